"""A call without its tensors, as text: what graphs and exported programs carry.

The text has every option that is not its default, and the trees of mask and score. Tables of arrays are in it; those of
tensors that are followed, or read where they lie, are numbers of tensors beside it, and so are lengths and offsets of
which only each call knows the values. It means the same in any process.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..arrays.array import listed
from ..arrays.integers import integer, is_one, whole
from ..arrays.torch_tensors import is_tensor, is_traced
from ..errors import ArgumentError, ArgumentTypeError
from ..expressions.operations import KINDS, OPERATIONS
from ..expressions.tables import Table, plainly
from ..expressions.tracing import Expression, expression, expression_of
from ..expressions.tree import SYMBOLS, Node, order
from ..host.memo import Memo
from ..problem.options import MOST_SEEDS, Options, scores_of

_LISTS = ("window", "q_start", "cu_seqlens_q", "cu_seqlens_k", "q_lengths", "k_lengths")
ARRAY = ...  # in place of an array: one that is added to scores, or hides, or of numbers that a graph does not know


def text_of(options: Options) -> str:
    """All but tensors, sink logits and the seed, which are arguments of their own."""
    slots = itertools.count()
    kept: dict[str, Any] = {}
    for name, x in options.given().items():
        if name == "mask":
            kept[name] = _write(x, name, slots)
        elif name == "score":
            kept[name] = [_write(one, name, slots) for one in scores_of(x)]
        elif name == "indices":
            kept[name] = {"tensor": next(slots)}
        elif name not in ("sink_logits", "seed") and x is not None:
            kept[name] = _number(x, name, slots)
    return json.dumps(kept)


def tensors_of(options: Options) -> list[torch.Tensor]:
    """Returns the tensors that mask and score look up, and numbers that only each call knows, in the text's order."""
    found: list[torch.Tensor] = []
    for name, option in options.given().items():
        if name in _LISTS and is_tensor(option) and is_traced(option):
            found.append(option)
        if name == "indices":
            with plainly():
                found.append(option if is_tensor(option) else _tensor_of(option, name))
        if name not in ("mask", "score"):
            continue
        for x in scores_of(option) if name == "score" else [option]:
            if isinstance(x, Table):
                found += [] if x.given is None else [x.given]
            elif isinstance(x, Expression) or callable(x):
                found += [t.given for t in expression(x, name).tables if t.given is not None]
            else:
                found.append(x if is_tensor(x) else _tensor_of(x, name))
    return found


def _tensor_of(x: Any, role: str) -> torch.Tensor:
    """A copy of an array that is added to scores, or hides."""
    array = np.ascontiguousarray(x)
    if not array.dtype.isnative:
        raise ArgumentTypeError(
            f"{role}: expected native byte order; got {array.dtype.str}. Use {role}.astype({array.dtype.name!r})."
        )
    try:
        if array.dtype.name == "bfloat16":  # which PyTorch does not know of NumPy's
            return torch.tensor(array.view(np.int16)).view(torch.bfloat16)
        return torch.tensor(array)
    except TypeError:
        raise ArgumentTypeError(
            f"{role}: expected bool or floats that PyTorch has, under its transforms and derivatives; got dtype "
            f"{array.dtype}. Convert it first."
        ) from None


def options_of(
    text: str, tensors: list[torch.Tensor], sinks: torch.Tensor | list[float] | None, seed: int | None
) -> tuple[Options, list[Table]]:
    """The options of a form, and tables of its tensors. `seed`: 64 bits, of either sign."""
    kept, tables = _read(text), [Table(t.detach(), f"tables[{at}]", copy=False) for at, t in enumerate(tensors)]
    if kept.get("dropout") and seed is None and tensors:
        seed = int(tensors[-1])  # drawn in a graph
    for table in tables:
        table.origin = None  # whoever follows it has the tensor
    options = {name: _fill(x, tensors) for name, x in kept.items() if name not in ("mask", "score")}
    if "window" in options:
        options["window"] = tuple(options["window"])
    if "mask" in kept:
        options["mask"] = kept["mask"].over(tables)
    if "score" in kept:
        options["score"] = [x.over(tables) for x in kept["score"]]
    options |= {
        "sink_logits": sinks.detach() if isinstance(sinks, torch.Tensor) else sinks,
        "seed": None if seed is None else seed % MOST_SEEDS,
    }
    return Options(**options), tables


_texts: Memo[dict[str, Any]] = Memo(512, 64 << 20)


def _read(text: str) -> dict[str, Any]:
    """The options of a text; mask and scores are parts."""
    kept = _texts.get(text)
    if kept is None:
        kept = json.loads(text)
        if "mask" in kept:
            kept["mask"] = Part(kept["mask"], "mask")
        if "score" in kept:
            kept["score"] = [Part(x, "score") for x in kept["score"]]
        parts = [kept["mask"]] if "mask" in kept else []
        _texts.put(text, kept, len(text) + sum([x.size for x in parts + kept.get("score", [])]))
    return kept


def _fill(x: Any, tensors: list[torch.Tensor]) -> Any:
    """An option as text holds it, with the numbers that come beside it."""
    if isinstance(x, list):
        return [_fill(one, tensors) for one in x]
    if isinstance(x, dict):
        tensor = tensors[x["tensor"]]
        if not tensor.ndim:
            return tensor.item()
        with plainly():  # transforms would wrap it
            return tensor.detach()
    return x


def layout_of(text: str) -> str:
    return _read(text).get("layout", "bhld")


def is_same_for_items(text: str, tables: list[torch.Tensor]) -> bool:
    """Returns whether every item of a batch is treated alike."""
    kept = _read(text)
    if (
        len(kept.get("layout", "bhld")) == 3
        or kept.get("dropout")
        or "indices" in kept
        or any([isinstance(kept.get(x), (list, dict)) for x in _LISTS[1:]])
    ):
        return False
    parts = [kept["mask"]] if "mask" in kept else []
    return not any([x.tells_items(tables) for x in parts + kept.get("score", [])])


def _number(x: Any, name: str, slots: Iterator[int]) -> Any:
    """An option as text holds it, or the number of a tensor that has it; what is wrong with it the call itself says,
    by name.
    """
    if x is ARRAY or (name in _LISTS and is_tensor(x) and is_traced(x)):
        return {"tensor": next(slots)}
    if name in _LISTS and not is_one(x):
        x = listed(x, name, "a sequence of ints") if not isinstance(x, tuple) else list(x)
        return [one if one is None else _number(one, name, slots) if one is ARRAY else integer(name, one) for one in x]
    if isinstance(x, (list, tuple)):
        return [_number(one, name, slots) for one in x]
    if whole(x) is not None:
        return integer(name, x)
    if isinstance(x, np.generic):
        x = x.item()
    if not isinstance(x, (bool, int, float, str)):
        raise ArgumentTypeError(f"{name}: expected a number or a string in a graph; got {type(x).__name__}.")
    return x


def _write(x: Any, role: str, slots: Iterator[int]) -> Any:
    """A mask or a score: its tables and its nodes, arguments first; or one table, that is added or hides."""
    if isinstance(x, Table):
        return _entries(x, slots)
    if not (isinstance(x, Expression) or callable(x)):
        return next(slots)
    traced = expression(x, role)
    nodes, tables = order(traced.root), {table: at for at, table in enumerate(traced.tables)}
    at = {id(node): n for n, node in enumerate(nodes)}
    return {
        "tables": [_entries(table, slots) for table in tables],
        "nodes": [
            [n.op, n.kind, [at[id(a)] for a in n.args], tables[n.value] if n.op == "table" else n.value] for n in nodes
        ],
    }


def _entries(table: Table, slots: Iterator[int]) -> Any:
    """The number of a table's tensor; or name, dtype, shape and bytes of an array that stays as it is."""
    if table.given is not None:
        return next(slots)
    array = np.ascontiguousarray(table.host())
    return [table.name, array.dtype.name, array.shape, base64.b64encode(array.tobytes()).decode()]


_NODE = 1 << 10  # bytes of a node as text has it and as a tree does, at most


class Part:
    """A mask or a score as text has it, which may come from a file. Tables of arrays are made once."""

    __slots__ = ("_known", "_tables", "nodes", "role")

    def __init__(self, text: Any, role: str) -> None:
        self.role, self.nodes = role, text["nodes"] if isinstance(text, dict) else None
        tables = text["tables"] if isinstance(text, dict) else [text]
        self._tables = [x if isinstance(x, int) else _table_of(*x) for x in tables]
        self._known = None if [x for x in self._tables if isinstance(x, int)] else self._restore([])

    @property
    def size(self) -> int:
        """Bytes that it holds, about."""
        arrays = [x.array.nbytes for x in self._tables if not isinstance(x, int)]
        return sum(arrays) + _NODE * (1 + len(self.nodes or ()))

    def over(self, tables: list[Table]) -> Any:
        """An expression, or a table, of these tensors."""
        return self._restore(tables) if self._known is None else self._known

    def tells_items(self, tensors: list[torch.Tensor]) -> bool:
        """Returns whether it differs from item to item of a batch."""
        if self.nodes is not None:
            return "b" in [node[3] for node in self.nodes]
        of = self._tables[0]
        shape = tensors[of].shape if isinstance(of, int) else of.shape
        return len(shape) == 4 and shape[0] > 1

    def _restore(self, given: list[Table]) -> Any:
        tables = [given[x] if isinstance(x, int) else x for x in self._tables]
        if self.nodes is None:
            return tables[0]
        nodes: list[Node] = []
        for op, kind, args, value in self.nodes:
            if not _is_known(op, kind, len(args), value):
                raise ArgumentError(f"form: expected operations of masks and scores; got {op!r} of {kind!r}.")
            of = tables[value] if op == "table" else value
            nodes.append(Node(op, kind, tuple(nodes[at] for at in args), of))
        return expression_of(self.role, nodes[-1])


def _table_of(name: str, dtype: str, shape: list[int], entries: str) -> Table:
    return Table(np.frombuffer(base64.b64decode(entries), np.dtype(dtype)).reshape(shape), name)


def _is_known(op: Any, kind: Any, count: int, value: Any) -> bool:
    match op:
        case "symbol":
            return value in SYMBOLS
        case "number":
            return isinstance(value, (bool, int, float)) and kind in KINDS
        case "table":
            return isinstance(value, int) and value >= 0
    return op in OPERATIONS and OPERATIONS[op].operands == count and kind in KINDS
