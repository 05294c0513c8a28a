"""Attention as a function that PyTorch's autograd records."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from ..arrays.array import listed
from ..arrays.torch_tensors import in_grad_mode, is_followed, is_plain, is_tensor, is_traced
from ..calls import dense
from ..calls.backward import gradients_of
from ..calls.backward import repeat as repeat_gradients
from ..errors import ArgumentTypeError, UnsupportedError
from ..expressions.tables import Table
from ..host.insides import TORCH
from ..problem.biases import array_of
from ..problem.checks import seed_of
from ..problem.gradients import SINKS, Followed, check_one_dtype, check_unwritten, followed, resolved, settled, state_of
from ..problem.options import Options
from . import higher_order as further
from . import operators as ops
from .forms import tensors_of, text_of
from .transforms import Transformed, TransformedBackward, is_batched, of_each

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OR_NONE = frozenset((type(None), *_PLAIN))


def attend_recorded(q: Any, k: Any, v: Any, options: Options, return_lse: bool, out: Any = None) -> tuple[Any, Options]:
    """Attends where autograd records the call; returns the results, or None if nothing of it requires grad.

    Also returns the options, whose functions are traced then.
    """
    if out is None and torch.is_grad_enabled():
        results = _repeat(q, k, v, options, return_lse)
        if results is not None:
            return results, options
    known = followed(options.spelled())
    if not known and not any([isinstance(x, torch.Tensor) and is_followed(x) for x in (q, k, v)]):
        return None, known.options
    if out is not None:
        raise UnsupportedError(
            "out: expected None where autograd follows the call (a tensor requires grad or has a tangent); got an "
            "array. Leave it out, or call under torch.no_grad()."
        )
    if not isinstance(q, torch.Tensor):
        raise ArgumentTypeError(
            f"q: expected a PyTorch tensor, as k, v or a table that requires grad is one; got {type(q).__name__}. Use "
            "torch.from_numpy(q), or call under torch.no_grad()."
        )
    if not is_plain(q, k, v):
        return attend_as_operation(q, k, v, known.options, return_lse), options
    dtypes = [str(getattr(x, "dtype", "")).removeprefix("torch.") for x in (q, k)]
    check_one_dtype(dtypes[0], dtypes[1])
    known, read = settled(known)
    results = _attend_unrecorded(q.detach(), _detach(k), _detach(v), _read_arrays(known.unfollowed), True)
    out, lse = _Attention.apply(known, read, results, q, k, v, known.sinks, *(x.origin for x in known.tables))
    return (out, lse) if return_lse else out, options


def _repeat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, return_lse: bool) -> Any:
    """Repeats a prepared call whose inputs require grad. Returns None if no such call was prepared.

    No option may change, and nothing but q, k, v and a score that is added is followed.
    """
    mask: Any = options.mask
    score: Any = options.score
    if not (_OR_NONE.issuperset((type(mask), type(score))) and options.is_fixed()):
        return None
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN and q.dtype is k.dtype is v.dtype):
        return None
    has_bias = score is not None and score.requires_grad
    if not (has_bias or q.requires_grad or k.requires_grad or v.requires_grad) or not is_plain():
        return None
    arrays = [x for x in (mask, score) if x is not None]
    if [x for x in arrays if x.is_inference() or not x.is_cpu]:
        return None
    tables = ()
    if score is not None and has_bias:
        if score._base is not None and score.grad_fn is None:  # whose gradient may be lost
            return None
        options = replace(options, score=score.detach())
        tables = (options.score,)
    a, b, c = (x if type(x) is torch.Tensor else x.detach() for x in (q, k, v))
    _, results = _repeat_unrecorded(a, b, c, options, True)
    if results is None:
        return None
    known, read = Followed(options, None, tables), [(added, state_of(added)) for added in arrays]
    out, lse = _Attention.apply(known, read, results, q, k, v, None, *((score,) if has_bias else ()))
    return (out, lse) if return_lse else out


# views of three tensors would take longer
_attend_unrecorded = in_grad_mode(False)(dense.attend)
_repeat_unrecorded = in_grad_mode(False)(dense.repeat)


def attend_as_operation(q: Any, k: Any, v: Any, options: Options, return_lse: bool) -> Any:
    """The call as PyTorch's machinery has it; forward mode passes operations by, and takes another way."""
    form, tables = text_of(options), tensors_of(options)
    sinks = _tensor_of(options.sink_logits)
    seed: Any = options.seed
    if is_tensor(seed):  # of a trace, which has no number yet
        tables, seed = [*tables, seed], None
    elif options.dropout:
        seed = seed_of(seed)
    if torch.compiler.is_exporting() and [
        x for x in (sinks, *tables) if x is not None and x.requires_grad and not is_traced(x)
    ]:
        raise UnsupportedError(
            "score: expected tables of parameters to be made in forward(), where an export sees what they are made of; "
            "got one that was made before. Call sl.table, sl.alibi … there."
        )
    if _has_tangents((q, k, v, sinks, *tables)):
        results = further.attention_of(form, seed, further.Tensors(q, k, v, tables, sinks))
    elif TORCH.peek_interpreter_stack() is None:
        results = ops.attention_op(q, k, v, sinks, tables, form, ops.signed(seed))
    else:
        results = Transformed.apply(form, ops.signed(seed), q, k, v, sinks, *tables)
    return results if return_lse else results[0]


def _tensor_of(sinks: Any) -> Any:
    """Sinks as operations take them, to the last bit of Python's numbers."""
    if sinks is None or is_tensor(sinks):
        return sinks
    return torch.tensor(listed(sinks, "sink_logits", "numbers, one per query head"), dtype=torch.float64)


def _has_tangents(tensors: tuple[Any, ...]) -> bool:
    """Returns whether forward mode is on, of torch.func or of torch.autograd."""
    if [x for x in TORCH.get_interpreter_stack() or () if x.key() == TORCH.TransformType.Jvp]:
        return True
    return TORCH.forward_ad._current_level >= 0 and bool(
        [x for x in tensors if x is not None and forward_ad.unpack_dual(x).tangent is not None]
    )


class _Attention(torch.autograd.Function):
    """`results`, out and lse, as made of q, k, v, sinks and the tensors behind tables: in half the operations' time."""

    @staticmethod
    def forward(ctx: Any, known: Followed, read: Any, results: Any, *tensors: Any) -> Any:
        q, k, v, sinks, *sources = tensors
        ctx.known, ctx.read, (out, lse) = known, read, results
        ctx.save_for_backward(q, k, v, out, lse, sinks, *sources)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *flows: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors  # or an error, where a pass before has freed them
        check_unwritten(ctx.read)
        given = ctx.known, ctx.needs_input_grad[2:], saved
        if flows[0] is None and flows[1] is None:
            gradients = (None,) * (len(given[1]) + 2)
        elif is_batched(flows):
            gradients = of_each(functools.partial(_flow_back, *given), flows)
        else:
            gradients = _flow_back(*given, *flows)
        if not TORCH.get_current_graph_task_keep_graph():
            ctx.known = ctx.read = None
        return gradients


def _flow_back(known: Followed, needed: Any, saved: Any, *flows: Any) -> tuple[Any, ...]:
    """Returns what backward() does, of what flows into out and lse."""
    if torch.is_grad_enabled() or TORCH.peek_interpreter_stack() is not None:  # create_graph=True, torch.func.vmap
        return (None, None, *_differentiable(known, needed, saved, flows))
    q, k, v, out, lse = [x if type(x) is torch.Tensor else x.detach() for x in saved[:5]]
    d_out = out.new_zeros(()).expand(out.shape) if flows[0] is None else flows[0]
    wanted = [n for n, x in enumerate(needed[5:]) if x] + [SINKS] * needed[4]
    d_out, d_lse = resolved(d_out), resolved(flows[1])
    dq, dk, dv, *more = _gradients_of(known, (q, k, v, out, lse, d_out, d_lse), wanted)
    found = dict(zip(wanted, more[0] if more else (), strict=True))
    sinks = found[SINKS].to(known.sinks.dtype) if SINKS in found else None
    tables = [found[n].reshape(x.shape).to(x.dtype) if n in found else None for n, x in enumerate(saved[6:])]
    return (None, None, None, dq, dk, dv, sinks, *tables)


def _gradients_of(known: Followed, tensors: tuple[Any, ...], wanted: list[Any]) -> Any:
    """Returns gradients_of() these. wanted: numbers of tables, and SINKS. A tensor that is added becomes a table only
    where no such call was prepared.
    """
    tables, options = known.tables, known.unfollowed
    results = repeat_gradients(tensors, tuple([x if x is SINKS else tables[x] for x in wanted]), options)[1]
    if results is not None:
        return results
    tables = [x if type(x) is Table else Table(x, "score", copy=False) for x in tables]
    if tables and is_tensor(options.score):
        options = replace(options, score=tables[0])
    q, k, v, out, lse, d_out, d_lse = tensors
    grads = tuple([x if x is SINKS else tables[x] for x in wanted])
    return gradients_of(q, k, v, out, lse, d_out, d_lse, grads, options)


def _differentiable(known: Followed, needed: Any, saved: Any, flows: Any) -> Any:
    """The backward pass as an operation, which has derivatives of its own."""
    q, k, v, out, lse, sinks, *sources = saved
    tables = tensors_of(known.options)
    free, places = list(range(len(tables))), {}  # of a tensor, which may be behind several tables, by its first
    for n, table in enumerate(known.tables):
        origin = table if is_tensor(table) else table.origin
        at = [slot for slot in free if tables[slot] is origin]
        free = [slot for slot in free if slot not in at]
        places[n] = at
        for slot in at:
            tables[slot] = sources[n]
    sinks = _tensor_of(known.options.sink_logits) if sinks is None else sinks
    wanted = [slot for n, at in places.items() if needed[5 + n] for slot in at] + [ops.SINKS] * needed[4]
    form = text_of(known.options)
    given_seed: Any = known.options.seed
    seed = ops.signed(given_seed)
    if TORCH.peek_interpreter_stack() is None:
        dq, dk, dv, *more = ops.attention_backward_op(q, k, v, out, lse, *flows, sinks, tables, form, seed, wanted)
    else:
        flows = [torch.zeros_like(x) if flow is None else flow for x, flow in zip((out, lse), flows, strict=True)]
        given = (*flows, out, lse, q, k, v, sinks, *tables)
        dq, dk, dv, *more = TransformedBackward.apply(form, seed, tuple(wanted), *given)
    found = dict(zip(wanted, more, strict=True))
    of_tables = [sum(found[slot] for slot in at) if at and needed[5 + n] else None for n, at in places.items()]
    return (None, dq, dk, dv, found.get(ops.SINKS), *of_tables)


def _detach(x: Any) -> Any:
    return x.detach() if is_tensor(x) else x


def _read_arrays(options: Options) -> Options:
    """Options in which arrays stand for the tables that read them: then the call is prepared once."""
    score = options.score
    if score is None:
        return options
    arrays = [array_of(x) for x in score] if isinstance(score, (list, tuple)) else array_of(score)
    return replace(options, score=arrays)
