"""Requests for gradients: the checks of a backward call's arrays and names, and the tensors of a call that PyTorch's
autograd records.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from ..arrays import torch_tensors
from ..arrays.array import listed
from ..arrays.dtypes import conversion
from ..arrays.integers import is_one, whole
from ..arrays.layouts import are_widened, check_beside
from ..arrays.memory import Array
from ..arrays.torch_tensors import is_followed, is_tensor, is_traced, view_of
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, shown
from ..expressions.tables import Table
from ..expressions.tracing import Expression, expression
from .options import Options, scores_of
from .problem import LAYOUTS, Problem

SINKS: Final = "sink_logits"  # in `grads`: the gradient of those


class Followed(NamedTuple):
    """Options of a call, and what of them autograd follows."""

    options: Options
    sinks: Any = None
    tables: tuple[Any, ...] = ()  # which have sources; or the detached tensor that is added

    def __bool__(self) -> bool:
        return self.sinks is not None or bool(self.tables)

    @property
    def unfollowed(self) -> Options:
        """The options of a call that nobody follows."""
        return self.options if self.sinks is None else replace(self.options, sink_logits=self.sinks.detach())


def followed(options: Options) -> Followed:
    """Finds what autograd follows: functions are traced; a tensor score that autograd follows becomes a table."""
    score, sinks = options.score, options.sink_logits
    sinks = sinks if is_tensor(sinks) and is_followed(sinks) else None
    if score is None:
        return Followed(options, sinks)
    scores = [_traced(x) for x in scores_of(score)]
    tables = [t for t in tables_of(scores) if not t.is_left_alone()]
    check_attached(tables)
    score = scores if isinstance(score, (list, tuple)) else scores[0]
    return Followed(replace(options, score=score), sinks, tuple(dict.fromkeys(tables)))


def tables_of(score: Any) -> list[Table]:
    """Returns the tables that a score holds already; functions are not traced for it."""
    held = [x for x in scores_of(score) if isinstance(x, (Table, Expression))]
    return [t for x in held for t in ([x] if isinstance(x, Table) else x.tables)]


def check_attached(tables: Any) -> None:
    """Raises if a table's gradient could not reach its tensor: the table was made of a part of it under no_grad()."""
    for t in tables:
        whole = None if is_traced(t.source) else t.source._base
        if whole is not None and whole.requires_grad and t.source.grad_fn is None:
            raise ArgumentError(
                f"{t.name}: expected a tensor that autograd follows, or a detached one; got a part of one that "
                "requires grad now, taken while it was frozen or under torch.no_grad(), which no gradient flows "
                "through. Make the table anew for each call, or of tensor.detach()."
            )


def check_on_cpu(on_gpu: bool) -> None:
    """Raises unless the tensors are on a device that has a backward pass."""
    if on_gpu:
        raise UnsupportedError(
            "q: expected tensors on the CPU, where gradients of shards are computed; got one on a GPU. Use .cpu(), or "
            "call under torch.no_grad()."
        )


def settled(known: Followed) -> tuple[Followed, list[tuple[Any, Any]]]:
    """Freezes options: functions are traced, lists are read. Also returns the tensors and arrays that are read where
    they lie, with what tells later writes: a backward pass must find them as they were.
    """
    options = known.options
    mask = _expression(options.mask, "mask")
    names = ("q_start", "cu_seqlens_q", "cu_seqlens_k", "q_lengths", "k_lengths")
    ints = {name: _read(getattr(options, name), name) for name in names}
    ints |= {name: _one(getattr(options, name)) for name in ("k_start", "seed")}
    window, sinks = options.window, options.sink_logits
    options = replace(
        options, mask=mask, window=tuple(map(_one, window)) if isinstance(window, (list, tuple)) else window,
        sink_logits=list(sinks) if isinstance(sinks, list) else sinks, **ints,
    )  # fmt: skip
    states = [] if is_tensor(known.sinks) else [(options.sink_logits, state_of)]
    states.append((options.indices, state_of))
    for x in (mask, *scores_of(options.score)):
        tables = tables_of(x)
        looked_up = isinstance(x, Expression)
        states += [(t.watched, _numbers_of if looked_up else state_of) for t in tables] if tables else [(x, state_of)]
    read = [(x, state(x)) for x, state in states if is_tensor(x) or isinstance(x, np.ndarray)]
    return known._replace(options=options), read


def check_unwritten(read: list[tuple[Any, Any]]) -> None:
    """Raises if what settled() returned was written to since."""
    for x, before in read:
        now = _numbers_of(x) if isinstance(before, _Numbers) else state_of(x)
        if now != before:
            what, copy = ("a tensor", ".clone()") if is_tensor(x) else ("an array", ".copy()")
            raise ArgumentError(
                "mask, score, indices or sink_logits: expected the numbers that the forward pass read; "
                f"{what} of shape {tuple(x.shape)} was written to since. Give each call {what} of its own ({copy}), or "
                "write to it after backward()."
            )


def state_of(x: Any) -> Any:
    """Returns what tells later writes to a dense array: of a tensor PyTorch's version and the memory, as of q, k and v;
    a hash of the numbers of others.
    """
    if is_tensor(x):
        return None if x.is_inference() else x._version, torch_tensors.read_address(x)
    return hashlib.sha256(np.ascontiguousarray(_once(x)).view(np.uint8).data).digest()


class _Numbers(NamedTuple):
    """Numbers of a table that a forward pass has looked up."""

    shape: tuple[int, ...]
    words: bytes
    version: Any = None  # of a tensor of many numbers


def _numbers_of(x: Any) -> Any:
    """Returns what tells every later write to a table's array, also one through `.data`, which has no version: its
    numbers, or of many the sum of each block of them. A tensor on a GPU is not waited for.
    """
    entries, version = x, None
    if is_tensor(x):
        version = None if x.is_inference() else x._version
        if x.device.type != "cpu":
            return state_of(x)
        torch = sys.modules["torch"]
        entries = view_of(x.detach().view(torch.int16) if x.dtype is torch.bfloat16 else x)
    numbers = np.ascontiguousarray(_once(entries)).reshape(-1).view(np.uint8)
    if len(numbers) <= _EXACT:
        return _Numbers(tuple(x.shape), numbers.tobytes())
    whole = len(numbers) // _BLOCK * _BLOCK
    sums = numbers[:whole].view(np.uint64).reshape(-1, _BLOCK // 8).sum(axis=1)
    return _Numbers(tuple(x.shape), sums.tobytes() + numbers[whole:].tobytes(), version)


_EXACT, _BLOCK = 1 << 20, 4096  # bytes


def _once(x: np.ndarray) -> np.ndarray:
    """Returns the entries of an array that is broadcast once."""
    return x[tuple(slice(1) if step == 0 else slice(None) for step in x.strides)]


def _read(x: Any, name: str) -> Any:
    return _one(x) if x is None or is_one(x) else [_one(n) if is_one(n) else n for n in listed(x, name, "ints")]


def _one(x: Any) -> Any:
    """Returns a whole number as it is now; the call itself refuses anything else."""
    if x is None or type(x) is int:
        return x
    n = whole(x)
    return x if n is None else n


def _traced(x: Any) -> Any:
    if not is_tensor(x):
        return _expression(x, "score")
    if not is_followed(x):
        return x
    if is_traced(x):
        return Table(x, "score", copy=False)
    table = Table(x.detach(), "score", copy=False)  # which prepared calls know by its form
    table.origin = x
    return table


def _expression(x: Any, role: str) -> Any:
    """Traces a function; anything else is returned as it is."""
    return expression(x, role) if callable(x) and not isinstance(x, Expression) else x


def resolved(flow: Any) -> Any:
    """Returns an upstream gradient that is not lazily negated."""
    return flow.resolve_neg() if is_tensor(flow) and flow.is_neg() else flow


class Given(NamedTuple):
    """Queries, what attention() returned for them, and what flows back into that."""

    q: Array
    out: Array
    lse: Array
    d_out: Array
    d_lse: Array | None = None  # None: nothing flows into lse


@dataclass(frozen=True, slots=True)
class Asked:
    """A backward call: of which problem, and which gradients beside those of q, k and v."""

    problem: Problem
    grads: tuple[Table | str, ...] = ()

    @property
    def tables(self) -> tuple[Table, ...]:
        """Those of the score whose gradients are asked for."""
        return tuple(x for x in self.grads if isinstance(x, Table))

    def shape(self, grad: Table | str) -> tuple[int, ...]:
        """Returns the shape of one of `grads`."""
        return grad.shape if isinstance(grad, Table) else (self.problem.q_heads,)


def asked(problem: Problem, layout: str, given: Given, grads: Any) -> Asked:
    """The backward call of a problem whose q, k and v are right; or the error that names what does not go with them."""
    _check_arrays(problem, layout, given)
    return Asked(problem, _checked(grads, problem))


def check_one_dtype(q: str, k: str) -> None:
    """Raises if keys and values are widened: their gradients have the dtype that is computed with."""
    if are_widened(k, q):
        raise UnsupportedError(
            f"k: expected dtype {q}, as q has, where gradients are computed; got {k}. Convert k and v: in PyTorch, "
            "autograd follows k.to(q.dtype)."
        )


def _check_arrays(problem: Problem, layout: str, given: Given) -> None:
    """Raises unless out, lse and their upstream gradients are shaped as attention() returns them."""
    q = given.q
    check_one_dtype(problem.dtype, problem.key_dtype)
    shape = (*q.shape[:-1], problem.value_dim)
    for x in (given.out, given.d_out):
        _check_result(x, shape, q.dtype, q)
    check_lse(given.lse, layout, q)
    if given.d_lse is not None:
        check_lse(given.d_lse, layout, q)


def check_lse(lse: Array, layout: str, q: Array) -> None:
    """Raises unless log-sum-exps, or their upstream gradient, are shaped as attention() returns them."""
    shape = tuple([q.shape[a] for a in LAYOUTS[layout][:-1]])
    _check_result(lse, shape, "float64" if q.dtype == "float64" else "float32", q)


def _check_result(x: Array, shape: tuple[int, ...], dtype: str, q: Array) -> None:
    """Raises unless a result of attention(), or its upstream gradient, has a shape and dtype, and lies beside q."""
    what = x.name.removeprefix("d_")
    if x.shape != shape:
        raise ArgumentError(f"{x.name}: expected shape {shape}, as attention() returns {what}; got {x.shape}.")
    if x.dtype != dtype:
        raise ArgumentTypeError(
            f"{x.name}: expected dtype {dtype}, as attention() returns {what}; got {x.dtype}. Convert it first: "
            f"{conversion(x.name, dtype)}."
        )
    check_beside(x, q)


def are_named(grads: Any) -> bool:
    """Returns whether further gradients are asked for by a tuple of tables and names, as calls are prepared for."""
    return type(grads) is tuple and all([type(x) in (Table, str) for x in grads])


def _checked(grads: Any, problem: Problem) -> tuple[Table | str, ...]:
    what = f"a tuple of the score's tables (sl.table) and {SINKS!r}"
    if not isinstance(grads, (tuple, list)):
        way = f" Use grads=({shown(grads) if isinstance(grads, str) else 'table'},)."
        alone = isinstance(grads, Table) or (isinstance(grads, str) and grads == SINKS)
        way = way if alone else " dq, dk and dv always come."
        raise ArgumentTypeError(f"grads: expected {what}; got {shown(grads)}.{way}")
    for at, x in enumerate(grads):
        if not (isinstance(x, Table) or (isinstance(x, str) and x == SINKS)):
            raise ArgumentTypeError(f"grads: expected {what}; got {shown(x)} at [{at}]. dq, dk and dv always come.")
        if True in [x is y or (isinstance(x, str) and x == y) for y in grads[:at]]:
            raise ArgumentError(f"grads: expected each once; got {x!r} at [{at}] again.")
        if isinstance(x, Table):
            _check_table(x, at, problem)
        elif problem.sinks is None:
            raise ArgumentError(f"grads: expected sink_logits= beside {SINKS!r}; got none. Leave it out of grads.")
    return tuple(grads)


def _check_table(table: Table, at: int, problem: Problem) -> None:
    """Raises unless the score looks up this table, of floats."""
    if table.kind not in ("float", "double"):
        raise ArgumentTypeError(
            f"grads: expected tables of floats; got {table!r} at [{at}], whose entries have no gradient. Leave it out."
        )
    if problem.score is None or table not in problem.score.tables:
        only = problem.mask is not None and table in problem.mask.tables
        raise ArgumentError(
            f"grads: expected tables that the score looks up; got {table!r} at [{at}], which "
            f"{'only the mask does' if only else 'it does not'}. Pass the table that score= reads, at an index of "
            "symbols: an entry at a constant one is a number."
        )
