"""A problem's data on a device, uploaded once: functions, numbers and tables of its mask and score, the items'
words, sinks, classes of tiles.
"""

from __future__ import annotations

import hashlib
import itertools
import linecache
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..arrays.torch_tensors import is_tensor
from ..errors import ArgumentError
from ..expressions.program import Program
from ..expressions.tables import Table
from ..expressions.tree import out_of_range
from ..host.machine import interpreting
from ..host.memo import Memo
from ..host.rounding import standard
from ..problem.problem import Problem
from ..problem.tiles import Many
from . import lower
from .forward import TILES
from .launch import capturing
from .sequence import ITEM


@dataclass(slots=True)
class Uploads:
    """A problem's data on a device."""

    program: Program | None
    functions: dict[str, Any]
    words: torch.Tensor | None
    floats: torch.Tensor | None
    tables: list[torch.Tensor]  # references: the words hold their addresses
    sinks: torch.Tensor | None
    items: torch.Tensor | None
    may_fail: bool  # an index may be out of range
    classes: dict[Any, Any] = field(default_factory=dict)  # of tiles, where the host classifies them

    def new_flags(self, device: torch.device) -> torch.Tensor | None:
        """Makes the words in which kernels note a lookup that is out of range; None where there can be none."""
        if not self.may_fail or self.program is None:
            return None
        return torch.zeros(2 * len(self.program.lookups), dtype=torch.int64, device=device)

    def check_flags(self, flags: torch.Tensor | None) -> None:
        """Waits for the device, and raises for a lookup that was out of range; not while a graph is captured."""
        if flags is None or self.program is None or capturing():
            return
        for (flag, index), (node, d) in zip(flags.cpu().reshape(-1, 2).tolist(), self.program.lookups, strict=True):
            if flag:
                raise out_of_range(node, d, index)


_functions: dict[str, dict[str, Any]] = {}  # by lower.key_of: a program itself holds tables


def functions_of(program: Program) -> dict[str, Any]:
    """The program's functions, from their source. Triton reads that again, so it stays in linecache."""
    key = lower.key_of(program)
    functions = _functions.get(key)
    if functions is None:
        text = lower.source(program)
        name = f"<speedlight expression {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": "speedlight.gpu.expression"}
        exec(compile(text, name, "exec"), space)
        names = ("invariants", "apply", "bounds", "back", *(f"entry{n}" for n in range(len(program.entries))))
        functions = _functions[key] = {n: space.get(n) for n in names}
    return functions


def check_tables(tables: Iterable[Any], device: str) -> None:
    """Raises unless kernels on the device can read the tables."""
    for table in tables:
        if table.tensor is not None and str(table.tensor.device) != device:
            raise ArgumentError(f"{table.name}: expected a tensor on {device}, as q; got one on {table.tensor.device}.")
        if table.tensor is None and not table.is_own and not interpreting():
            way = f"Use {table.name}.to({device!r})." if is_tensor(table.watched) else "Move it, or use sl.table()."
            raise ArgumentError(f"{table.name}: expected a tensor on {device}, as q; got one on the CPU. {way}")


def _table_on(table: Any, device: str) -> torch.Tensor:
    """A table's entries on the device; uploaded once, unless they may change."""
    check_tables((table,), device)
    if table.tensor is not None:
        return table.tensor
    copy = table.copies.get(device)
    if copy is None:
        array = table.array
        array = array.view(np.int8) if array.dtype == bool else array
        if array.dtype.kind == "u" and array.itemsize > 1:
            array = array.view(array.dtype.str.replace("u", "i"))  # the same bits; kernels read them as they are
        shared = array.flags.writeable and all([s >= 0 and s % array.itemsize == 0 for s in array.strides])
        copy = torch.from_numpy(array if shared else array.copy()).to(device)
        if table.is_own:
            table.copies[device] = copy
    return copy


# by the numbers, their dtype, shape and device, so that problems of other lengths share them: a step of a cache that is
# captured in a CUDA graph is of the capacity's problem, while steps before it were of their own lengths'
_numbers: Memo[torch.Tensor] = Memo(1024, 1 << 28)
_of_graphs: set[torch.Tensor] = set()  # numbers that CUDA graphs read when they are replayed: never dropped


def _sent(x: np.ndarray, device: str) -> torch.Tensor:
    """Uploads numbers that nobody writes to; equal ones once."""
    key = x.tobytes(), x.dtype.str, x.shape, device
    there = _numbers.get(key)
    if there is None:
        there = torch.from_numpy(x).to(device)
        _numbers.put(key, there, there.nbytes)
    return there


def _keep_for_graph(uploads: Uploads) -> None:
    """Keeps the numbers of a call that is being captured: the memos may drop them before the graph's last replay."""
    if capturing():
        classes = [x.classes for x in uploads.classes.values()]
        read = (uploads.words, uploads.sinks, uploads.items, *classes)
        _of_graphs.update(x for x in read if x is not None)


# by problem, device and first rows; holds no array of a caller's, and nothing mutable
_uploads: Memo[Uploads] = Memo(256, 1 << 30)


@standard
def uploads_of(
    problem: Problem, device: str, firsts: tuple[tuple[int, ...], tuple[int, ...]] | None, *, backward: bool = False,
    tables: tuple[Table, ...] = (),
) -> Uploads:  # fmt: skip
    """firsts: of packed arrays, each item's first row of q and of k. backward: with the score's derivative; with tables
    that of their entries.
    """
    # dropout needs nothing: its words are arguments, and a seed comes with every call
    key = replace(problem, dropout=0.0, seed=0) if problem.dropout else problem, device, firsts, backward, tables
    uploads = _uploads.get(key)
    if uploads is not None:
        _keep_for_graph(uploads)
        return uploads
    program = problem.program
    if tables and problem.score is not None:
        program = Program.of_entries(problem.mask, problem.score, problem.box(), tables)
    elif backward:
        program = Program.of(problem.mask, problem.score, problem.box(), backward=True)
    words = floats = sinks = None
    entries: list[torch.Tensor] = []
    if program is not None:
        entries = [_table_on(t, device) for t in program.tables]
        host = program.device_words([t.data_ptr() for t in entries], [tuple(t.stride()) for t in entries])
        words = _sent(host, device)
        floats = words.view(torch.float64)
    if problem.sinks is not None:
        sinks = _sent(np.array(problem.sinks, np.float64 if backward else np.float32), device)
    functions = functions_of(program) if program is not None else {}
    items = _item_words(problem, device, firsts)
    may_fail = program is not None and program.may_fail
    uploads = Uploads(program, functions, words, floats, entries, sinks, items, may_fail)
    borrowed = [] if program is None else [t for t in program.tables if not t.is_own]
    if not borrowed:  # the memo holds no reference to an array of a caller's
        _uploads.put(key, uploads, sum(x.nbytes for x in (words, sinks, items, *entries) if x is not None))
    _keep_for_graph(uploads)
    return uploads


def _item_words(p: Problem, device: str, firsts: tuple[tuple[int, ...], tuple[int, ...]] | None) -> torch.Tensor | None:
    """ITEM words for each item; None where all items have the same."""
    if firsts is None and p.items is None and len(set(zip(p.q_lengths, p.k_lengths, p.q_starts, strict=True))) == 1:
        return None
    q_first, k_first = firsts if firsts is not None else ((0,) * p.batch, (0,) * p.batch)
    names = p.items if p.items is not None else range(p.batch)
    rows = zip(p.q_lengths, p.k_lengths, p.q_starts, q_first, k_first, names, strict=True)
    return _sent(np.array(list(rows), np.int64).reshape(p.batch, int(ITEM)), device)


# --- classes of tiles: kernels cannot bound tables of several dimensions, or of floats

_CELLS = 1 << 16  # blocks x tiles that the host classifies, at most
_BITS = int(TILES)


class Grid(NamedTuple):
    """The tiles of a kernel: blocks of `rows` rows of `pack` heads, by tiles of so many keys."""

    rows: int
    keys: int
    pack: int


class Classes(NamedTuple):
    """Two words for each run of TILES tiles of a block: bits of those partly visible, and of those wholly visible."""

    classes: torch.Tensor | None = None
    c_item: int = 0
    c_head: int = 0
    chunks: int = 0


def classes_of(p: Problem, uploads: Uploads, grid: Grid, device: torch.device) -> Classes:
    """Classes by the host for programs that kernels cannot bound, up to _CELLS tiles; else none."""
    if uploads.program is None or not uploads.program.opaque:
        return Classes()
    key = grid, str(device)
    if key not in uploads.classes:
        uploads.classes[key] = _classify(p, uploads.program, grid, device)
    return uploads.classes[key]


def _classify(p: Problem, program: Program, grid: Grid, device: torch.device) -> Classes:
    uses = p.uses
    differ = "b" in uses or len(set(zip(p.q_lengths, p.q_starts, strict=True))) > 1
    items, heads = p.batch if differ else 1, p.q_heads // grid.pack if "h" in uses else 1
    blocks, chunks = -(-max(p.q_lengths) * grid.pack // grid.rows), -(-max(p.k_lengths) // (grid.keys * _BITS))
    if not chunks or items * heads * blocks * chunks * _BITS > _CELLS:
        return Classes()
    words = np.zeros((items, heads, blocks, chunks, 2), np.int64)
    for item, head in itertools.product(range(items), range(heads)):
        ends = (head * grid.pack, head * grid.pack + grid.pack - 1) if "h" in uses else (0, p.q_heads - 1)
        for n, x in enumerate(_bound_tiles(p, program, item, ends, grid, blocks, chunks)):
            bits = np.broadcast_to(x, (blocks, chunks * _BITS)).reshape(blocks, chunks, _BITS)
            words[item, head, :, :, n] = (bits.astype(np.int64) << np.arange(_BITS)).sum(axis=-1)
    signed = torch.from_numpy(words.astype(np.uint32).view(np.int32)).to(device)
    return Classes(signed, heads * blocks if items > 1 else 0, blocks if heads > 1 else 0, chunks)


def _bound_tiles(
    p: Problem, program: Program, item: int, heads: tuple[int, int], grid: Grid, blocks: int, chunks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether tiles are partly, and wholly, visible: arrays that broadcast to [blocks, tiles],
    of these heads.
    """
    i, last_row = np.arange(blocks)[:, None], max(p.q_lengths[item] - 1, 0)
    low = p.q_starts[item] + np.minimum(i * grid.rows // grid.pack, last_row)
    high = p.q_starts[item] + np.minimum(((i + 1) * grid.rows - 1) // grid.pack, last_row)
    j = p.k_start + np.arange(chunks * _BITS)[None, :] * grid.keys
    last = np.minimum(j + grid.keys, p.k_start + max(p.k_lengths)) - 1
    name = item if p.items is None else p.items[item]
    box = {"b": (name, name), "h": heads, "i": (low, high), "j": (j, np.maximum(last, j))}
    ops = Many(box, program.followed)
    return program.visibility(ops)
