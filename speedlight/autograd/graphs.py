"""Calls under torch.compile: one operation. Its masks and scores are looked at once, as they are then.

Dynamo runs in_graph(); the functions that it must not look into, which make text, numbers and tensors of Python
objects, are marked as constants. What an operation cannot hold leaves the graph, and is computed as it is between two
compiled parts. torch.export without strict=True runs none of this: functions run there as they are.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..arrays.torch_tensors import is_tensor
from ..errors import UnsupportedError, pass_on
from ..expressions.tables import Table
from ..expressions.tracing import Expression, expression
from ..host.graph_breaks import constant, outside
from ..host.insides import TORCH
from ..problem.gradients import check_attached
from ..problem.options import DEFAULTS, OPTION_NAMES, Options, scores_of
from . import operators as ops
from .forms import ARRAY, text_of

_BESIDE = ("mask", "score", "sink_logits", "seed")  # options that have a way of their own
_OF_TENSORS = ("indices", "q_start", "k_start", "cu_seqlens_q", "cu_seqlens_k", "q_lengths", "k_lengths")
_WIDE = torch.float64
_guard_scalar = TORCH.guard_scalar  # Dynamo knows it by its name
_FIRST = (2, 13)  # before it Dynamo takes the graph of another closure, which computes something else
_IS_OLD = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _FIRST


class _Seen:
    """Dynamo's view of a call: constants of its graph, tensors that each call reads, and why there is no graph."""

    def __init__(self) -> None:
        self.rest: list[Any] = []
        self.handles: list[Any] = []
        self.tables: list[Any] = []
        self.why = "expected PyTorch 2.13 or newer for graphs; got an older one. Upgrade torch" if _IS_OLD else ""


def in_graph(call: Callable[..., Any], q: Any, k: Any, v: Any, options: dict[str, Any], return_lse: bool) -> Any:
    """Runs attention() as Dynamo sees it, with the options that it was given; `call`: it, for what is no operation."""
    given, seen = _fill_defaults(options), _Seen()
    for name in OPTION_NAMES:  # in the order in which text has what is beside it
        x = given[name]
        if name in ("mask", "score"):
            for one in [] if x is None else scores_of(x) if name == "score" else [x]:
                seen.handles += [name, *_handle(one, name, seen.tables)]
        elif name not in _BESIDE:
            seen.rest.append(_freeze(x, name, seen))
    if given["lengths"] is not None or len(given) > len(DEFAULTS):
        seen.why = "expected no argument that the call refuses"
    sinks, seed = _sinks(given["sink_logits"], seen), _seed(given["seed"], given["dropout"], seen)
    form = "" if seen.why else _text(len(seen.rest), *seen.rest, *seen.handles)
    if not form.startswith("{"):
        torch._dynamo.graph_break(msg=f"attention: {seen.why or form}")
        return outside(call, q, k, v, return_lse=return_lse, **options)
    results = ops.attention_op(q, k, v, sinks, seen.tables, form, seed)
    return results if return_lse else results[0]


def _fill_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Returns every option; `lengths` are those of queries and of keys, unless these are given, too."""
    given = {**DEFAULTS, **options}
    if given["q_lengths"] is None and given["k_lengths"] is None:
        given["q_lengths"] = given["k_lengths"] = given["lengths"]
        given["lengths"] = None
    return given


def _handle(x: Any, role: str, tables: list[Any]) -> tuple[Any, Any]:
    """A function, or what else masks and scores are, and whose method it is; tensors that it looks up join `tables`."""
    if isinstance(x, (torch.Tensor, np.ndarray)):
        tables.append(_tensor(x))
        return None, None
    if isinstance(x, (Expression, Table)):
        for table in [x] if isinstance(x, Table) else [x.tables[n] for n in range(_count(x))]:
            if table.origin is not None and table.origin.requires_grad:
                tables.append(table.origin)
            elif isinstance(table.watched, torch.Tensor):
                tables.append(table.watched)
        return x, None
    function, owner = (x.__func__, x.__self__) if isinstance(x, types.MethodType) else (x, None)
    id(function)  # Dynamo guards its code alone, which closures of other numbers share
    return function, owner


def _tensor(x: Any) -> Any:
    """A tensor of the graph; of NumPy's array a copy, since a backward pass must find what the forward pass had."""
    return torch.from_numpy(x).clone() if isinstance(x, np.ndarray) else x


def _freeze(x: Any, name: str, seen: _Seen) -> Any:
    """An option as a constant of the graph, where another one is another graph; what may be written to is a tensor
    beside it, which each call reads.
    """
    if isinstance(x, np.ndarray) or (isinstance(x, torch.Tensor) and name in _OF_TENSORS):
        seen.tables.append(_tensor(x) if isinstance(x, np.ndarray) else x.clone())
        return ARRAY
    if isinstance(x, (list, tuple)):
        return tuple([_freeze(y, name, seen) for y in x])
    if x is None or isinstance(x, (bool, str)):
        return x
    if isinstance(x, (int, float)):
        return _guard_scalar(x)
    seen.why = f"{name}: expected numbers, lists of them, NumPy's arrays or tensors of integers in a graph."
    return None


def _sinks(x: Any, seen: _Seen) -> Any:
    if x is None or isinstance(x, (torch.Tensor, np.ndarray)):
        return x if x is None else _tensor(x)
    if isinstance(x, (list, tuple)) and x and all([isinstance(y, (int, float, np.ndarray)) for y in x]):
        every = [_tensor(y) if isinstance(y, np.ndarray) else torch.tensor(_guard_scalar(y), dtype=_WIDE) for y in x]
        return torch.stack([y.to(_WIDE) for y in every])
    seen.why = "sink_logits: expected a tensor, an array or a list of numbers in a graph."
    return None


def _seed(x: Any, dropout: Any, seen: _Seen) -> int | None:
    """The seed as an argument of an operation; one that only each call knows stands last among the tensors."""
    if not isinstance(dropout, (int, float)) or (dropout and x is None):
        seen.why = "seed: expected an int of 64 bits, or a tensor of one, beside a number dropout= in a graph."
    elif dropout and isinstance(x, (torch.Tensor, np.ndarray)):
        seen.tables.append(_tensor(x))
    elif dropout and (not isinstance(x, int) or isinstance(x, bool) or not 0 <= x < ops.MOST_SEEDS):
        seen.why = "seed: expected an int of 64 bits, or a tensor of one, beside a number dropout= in a graph."
    elif dropout:
        return ops.signed(x)
    return None


@constant
def _count(x: Expression) -> int:
    """Counts the tables of an expression, which then knows them, where Dynamo finds them."""
    return len(x.tables)


@constant
def _text(count: int, *given: Any) -> str:
    """The other options, then of every mask and score its role, a function or an expression, and whose method it is:
    as text, or why there is none, which begins with no brace: Dynamo would tell an error as one of its own.
    """
    rest, handles = given[:count], given[count:]
    parts: dict[str, list[Any]] = {"mask": [], "score": []}
    names = [x for x in OPTION_NAMES if x not in _BESIDE]
    try:
        for role, function, owner in zip(handles[::3], handles[1::3], handles[2::3], strict=True):
            parts[role].append(ARRAY if function is None else _trace(function, owner, role))
        options = Options(**dict(zip(names, rest, strict=True))).spelled()
        return text_of(replace(options, mask=(parts["mask"] or [None])[0], score=parts["score"] or None))
    except Exception as error:  # of ours, or of the caller's function
        pass_on(error, Exception)
        return f"{type(error).__name__}: {error}"


def _trace(x: Any, owner: Any, role: str) -> Any:
    if isinstance(x, (Expression, Table)):
        known = [x] if isinstance(x, Table) else x.tables
        check_attached([t for t in known if t.source is not None])
        if [t for t in known if t.watched is not None and not is_tensor(t.watched)]:
            raise UnsupportedError(
                f"{role}: expected tensors, or sl.table(array), to be looked up in a graph; got a NumPy array, whose "
                "later numbers it would not see."
            )
        return x
    traced = expression(x if owner is None else types.MethodType(x, owner), role)
    for table in traced.tables:
        if table.given is not None or table.watched is not None:
            raise UnsupportedError(
                f"{table.name}: expected a function that looks up sl.table(…) of a NumPy array, which holds a copy; "
                "got one that looks up a tensor or an array, of which no graph sees later numbers and gradients. Make "
                "sl.expression(function) outside of what is compiled, which looks tensors up where they lie, and pass "
                "that."
            )
    return traced
