"""What torch.compile makes of a call: one operation. Its masks and scores are looked at once, as they are then.

Dynamo runs in_graph(); the functions that it must not look into, which make text, numbers and tensors of Python
objects, are marked as constants. torch.export without strict=True runs none of this: functions run there as they are.
"""

from __future__ import annotations

import re
import types
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from ..arrays import is_tensor
from ..compiling import constant
from ..errors import ArgumentTypeError, UnsupportedError
from ..expressions.tables import Table
from ..expressions.tracing import Expression, expression
from ..gradients import check_attached
from ..problem import Options
from . import ops
from .forms import ARRAY, text_of

_FIRST = (2, 13)  # before it Dynamo takes the graph of another closure, which computes something else
_IS_OLD = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _FIRST


def in_graph(q: Any, k: Any, v: Any, options: Any, return_lse: bool) -> Any:
    """attention() as Dynamo sees it; `options`: all of them, in a tuple."""
    if _IS_OLD:
        raise UnsupportedError("torch.compile: expected PyTorch 2.13 or newer; got an older one. Upgrade torch.")
    mask, score, sinks, seed = options[2], options[3], options[4], options[15]
    scores = [] if score is None else list(score) if isinstance(score, (list, tuple)) else [score]
    tables: list[Any] = []
    handles: list[Any] = []
    for role, x in [("mask", mask)] * (mask is not None) + [("score", x) for x in scores]:
        handles += [role, *_handle(x, role, tables)]
    rest = [_fixed(x) for n, x in enumerate(options) if n not in (2, 3, 4, 15)]
    form = _text(len(rest), *rest, *handles)
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        sinks = torch.tensor([_fixed(x) for x in sinks])
    if isinstance(seed, torch.Tensor):
        tables.append(seed)
        seed = None
    elif options[14] and (seed is None or not isinstance(seed, int) or seed < 0):
        raise ArgumentTypeError("seed: expected an int of 64 bits, or a tensor of one, beside dropout=.")
    results = ops.attention_op(q, k, v, sinks, tables, form, ops.signed(seed))
    return results if return_lse else results[0]


def _handle(x: Any, role: str, tables: list[Any]) -> tuple[Any, Any]:
    """A function, or what else masks and scores are, and whose method it is; tensors that it looks up join `tables`."""
    if isinstance(x, np.ndarray):
        x = torch.from_numpy(x)
    if isinstance(x, torch.Tensor):
        tables.append(x)
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


def _fixed(x: Any) -> Any:
    """A number of the graph as what it is now: another one is another graph."""
    if isinstance(x, torch.Tensor):
        raise UnsupportedError("attention: expected lengths and offsets as Python's ints in a graph; got a tensor.")
    if isinstance(x, (list, tuple)):
        return tuple([_fixed(y) for y in x])
    return guard_scalar(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


@constant
def _count(x: Expression) -> int:
    """Also lets the expression know its tables, where Dynamo finds them."""
    return len(x.tables)


@constant
def _text(count: int, *given: Any) -> str:
    """The other options, then of every mask and score its role, a function or an expression, and whose method it is."""
    rest, handles = given[:count], given[count:]
    parts: dict[str, list[Any]] = {"mask": [], "score": []}
    for role, function, owner in zip(handles[::3], handles[1::3], handles[2::3], strict=True):
        parts[role].append(ARRAY if function is None else _traced(function, owner, role))
    names = [x for x in Options._fields if x not in ("mask", "score", "sink_logits", "seed")]
    options = Options(**dict(zip(names, rest, strict=True)))
    return text_of(options._replace(mask=(parts["mask"] or [None])[0], score=parts["score"] or None))


def _traced(x: Any, owner: Any, role: str) -> Any:
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
                f"{table.name}: expected a function that looks up sl.table(…), which holds a copy; got one that looks "
                "up a tensor or an array, of which no graph sees later numbers and gradients. Make "
                "sl.expression(function) outside of what is compiled, which looks tensors up where they lie, and pass "
                "that."
            )
    return traced
