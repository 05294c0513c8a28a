"""Programs, which both engines lower: a mask and a score as one list of nodes, with slots for numbers and tables.

A program is its structure: two that are equal run in one kernel. Numbers, tables and their lengths are arguments, as
words of 64 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .bounds import Exact, Walk, integers, visible
from .derivative import flows
from .tables import Table
from .tracing import Expression
from .tree import FLOW, Node, lazily, merged, order, structure

# of a table: address, 4 lengths, 4 strides, least and greatest entry (of integers)
TABLE_WORDS = 11
LENGTHS, STRIDES, ENDS = 1, 5, 9  # the first of those words


@dataclass(frozen=True)
class Program:
    """A mask and a score, one of which may be missing."""

    key: str  # their structure
    mask: Node | None = field(compare=False, repr=False, default=None)
    score: Node | None = field(compare=False, repr=False, default=None)
    flow: Node | None = field(compare=False, repr=False, default=None)  # what flows back to s, of a backward pass
    # lookups, and what flows back to the entries that they read
    entries: tuple[tuple[Node, Node], ...] = field(compare=False, repr=False, default=())
    narrow: bool = False  # every integer fits 32 bits, which vectors do twice as fast
    unbounded: tuple[int, ...] = ()  # integers, by their indices in `walked`, whose intervals must not be followed
    box: dict[str, tuple[int, int]] | None = field(compare=False, repr=False, default=None)  # positions of the problem

    @classmethod
    def of(
        cls,
        mask: Expression | None,
        score: Expression | None,
        box: dict[str, tuple[int, int]],
        *,
        backward: bool = False,
    ) -> Program | None:
        """Returns the program of a problem's mask and score, whose positions lie in `box`; None without either.

        Raises ExpressionError where an integer may leave int64; `backward`: and where the score has no derivative.
        """
        roots = {x.role: x.root for x in (mask, score) if x is not None}
        if backward and score is not None:
            back = flows(score.root, ())
            nothing = Node("number", "float", value=0.0)
            roots["flow"] = nothing if back.s is None else _where_seen(back.score, back.s)
        return cls._of_roots(roots, box) if roots else None

    @classmethod
    def of_entries(
        cls, mask: Expression | None, score: Expression, box: dict[str, tuple[int, int]], tables: tuple[Table, ...]
    ) -> Program:
        """Returns the program of a score, with the gradients of the entries of these tables."""
        back = flows(score.root, tables)
        roots = {"score": score.root} if mask is None else {"mask": mask.root, "score": score.root}
        for n, (lookup, into) in enumerate(back.entries):
            roots |= {f"at{n}": lookup, f"into{n}": _where_seen(back.score, into)}
        return cls._of_roots(roots, box)

    @classmethod
    def _of_roots(cls, roots: dict[str, Node], box: dict[str, tuple[int, int]]) -> Program:
        """Merges even one tree: programs of one structure have as many lookups."""
        trees = dict(zip(roots, merged(list(roots.values())), strict=True))
        ends, known = {role: tree[-1] for role, tree in trees.items()}, integers(trees.items(), box)
        entries = tuple((ends[f"at{n}"], ends[f"into{n}"]) for n in range(sum("into" in role for role in roots)))
        score, flow = ends.get("score"), ends.get("flow")
        return cls(structure(trees), ends.get("mask"), score, flow, entries, known.narrow, known.others, box)

    @property
    def roots(self) -> list[Node]:
        ends = (self.mask, self.score, self.flow, *(x for pair in self.entries for x in pair))
        return [root for root in ends if root is not None]

    @property
    def changes_flow(self) -> bool:
        """Raw scores have another gradient than scores."""
        return self.flow is not None and not (self.flow.op == "symbol" and self.flow.value == FLOW)

    @lazily
    def walked(self) -> list[Node]:
        """The mask's nodes, then the score's, then those of what flows back; one that two have comes twice."""
        return [node for root in self.roots for node in order(root)]

    @lazily
    def nodes(self) -> list[Node]:
        """Every node once, arguments first."""
        return list({id(node): node for node in self.walked}.values())

    @lazily
    def followed(self) -> frozenset[int]:
        """Ids of the integers whose intervals are known to fit."""
        unbounded = {id(self.walked[at]) for at in self.unbounded}
        return frozenset(id(node) for node in self.nodes if node.kind == "int") - unbounded

    # --- numbers, tables and lookups

    @lazily
    def numbers(self) -> dict[int, int]:
        """Slot of every number, by the id of its node."""
        return {id(node): slot for slot, node in enumerate(n for n in self.nodes if n.op == "number")}

    @lazily
    def tables(self) -> dict[Table, int]:
        """Slot of every table."""
        tables = dict.fromkeys(node.value for node in self.nodes if node.op == "table")
        return {table: slot for slot, table in enumerate(tables)}

    @lazily
    def lookups(self) -> list[tuple[Node, int]]:
        """Every (lookup, dimension): an index that may be out of range."""
        return [(node, d) for node in self.nodes if node.op == "table" for d in range(len(node.args))]

    @lazily
    def checked(self) -> tuple[bool, ...]:
        """Returns for each of `lookups` whether its index may leave the table, as far as intervals can tell."""
        assert self.box is not None
        walk = Walk(Exact(self.box))
        ends = [(walk.interval(node.args[d]), node.value.shape[d]) for node, d in self.lookups]
        return tuple(x is None or x[0] < 0 or x[1] >= size for x, size in ends)

    @property
    def may_fail(self) -> bool:
        """Returns whether a lookup may turn out, while kernels run, to be out of range."""
        return any(self.checked)

    def number_words(self) -> list[int]:
        """Numbers in the order of their slots: integers, or the bits of float64."""
        numbers = [node for node in self.nodes if node.op == "number"]
        return [int(np.float64(n.value).view(np.int64)) if n.is_float else int(n.value) for n in numbers]

    def host_words(self) -> tuple[np.ndarray, np.ndarray]:
        """Words of the numbers, and of the tables, none of which is on a GPU; strides in bytes."""
        numbers = np.array([*self.number_words(), 0], np.int64)
        words = np.zeros((len(self.tables) + 1, TABLE_WORDS), np.int64)
        for row, table in zip(words, self.tables, strict=False):
            if table.tensor is not None:
                raise ArgumentError(
                    f"{table.name}: expected a tensor on the CPU, as q; got one on {table.tensor.device}. Use "
                    f"{table.name}.cpu()."
                )
            array = table.array
            _describe(row, array.ctypes.data, array.shape, array.strides)
            if array.size and table.kind in ("bool", "int"):
                row[ENDS : ENDS + 2] = table.ends()
            if not array.size:  # any address will do, and any index reads there
                row[0], row[STRIDES:] = words.ctypes.data, 0
        return numbers, words

    def device_words(self, addresses: list[int], strides: list[tuple[int, ...]]) -> np.ndarray:
        """Words of the numbers, then of the tables at these addresses on a GPU; strides in elements."""
        words = np.zeros((len(self.tables), TABLE_WORDS), np.int64)
        for row, table, address, steps in zip(words, self.tables, addresses, strides, strict=True):
            _describe(row, address, table.shape, steps)
            row[ENDS : ENDS + 2] = table.known_ends() or (0, 1)  # of bools, if unknown
        return np.array([*self.number_words(), *words.ravel(), 0], np.int64)

    # --- what is visible

    @property
    def may_hide(self) -> bool:
        """Returns whether tiles may be hidden: by the mask, or by a score that can be -inf."""
        return may_hide(self.mask, self.score)

    def visibility(self, ops: Any) -> tuple[Any, Any]:
        """(something may be visible, the mask shows all) in ops.box; `ops` as for bounds.py's walk."""
        return visibility(self.mask, self.score, ops)

    @property
    def opaque(self) -> bool:
        """Returns whether tiles depend on tables that no GPU kernel bounds: of several dimensions, or of floats."""
        if not self.may_hide or not all([t.is_own for t in self.tables]):
            return False
        lookups = [node for node in self.nodes if node.op == "table"]
        return any([node.is_float or any([a.uses & {"i", "j"} for a in node.args[:-1]]) for node in lookups])


def may_hide(mask: Node | None, score: Node | None) -> bool:
    """Returns whether keys may be hidden: by a mask, or by a score of the form where(condition, number, …)."""
    return mask is not None or hiding_condition(score) is not None


def hiding_condition(score: Node | None) -> Node | None:
    """The condition under which a score where(condition, number, …) is that number: hidden, if it is -inf."""
    if score is None or score.op != "where" or score.args[1].op != "number":
        return None
    return score.args[0]


def _where_seen(score: Node, flow: Node) -> Node:
    """Returns the gradient through a score where a pair is visible: not through the branch that hides it."""
    condition = hiding_condition(score)
    if condition is None or score.args[1].value != -math.inf or flow.op != "where" or flow.args[0] is not condition:
        return flow
    nothing = flow.args[1].op == "number" and flow.args[1].value == 0
    return flow.args[2] if nothing else flow


def visibility(mask: Node | None, score: Node | None, ops: Any) -> tuple[Any, Any]:
    """(something may be visible, the mask shows all) in ops.box: what the mask shows and the score does not hide."""
    shown, every = visible(mask, ops) if mask is not None else (ops.truth(True), ops.truth(True))
    condition = hiding_condition(score)
    holds = None if condition is None else Walk(ops).interval(condition)
    if score is None or holds is None:
        return shown, every
    return shown & ops.invert(holds[0] & ops.minus_infinity(score.args[1])), every


def _describe(row: np.ndarray, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    row[0], row[LENGTHS : LENGTHS + len(shape)], row[STRIDES : STRIDES + len(shape)] = address, shape, strides
