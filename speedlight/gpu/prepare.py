"""What a problem needs on a device, made once and kept: the expressions' functions, numbers and tables, the items,
tiles' classes.
"""

from __future__ import annotations

import hashlib
import linecache
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError
from ..expressions.program import Program
from ..machine import interpreting
from ..modes import standard
from ..problem import Problem
from ..tiles import Many
from . import lower
from .forward import ITEM, TILES


@dataclass(slots=True)
class Ready:
    """What a problem needs on a device; kept."""

    program: Program | None
    functions: dict[str, Any]
    words: torch.Tensor | None
    floats: torch.Tensor | None
    tables: list[torch.Tensor]  # kept alive: the words hold their addresses
    sinks: torch.Tensor | None
    items: torch.Tensor | None
    risky: bool  # an index may be out of range
    classes: dict[Any, Any] = field(default_factory=dict)  # of tiles, where the host has looked


_functions: dict[str, dict[str, Any]] = {}  # by lower.key_of: a program itself holds tables


def functions_of(program: Program) -> dict[str, Any]:
    """The program's functions, from their source. Triton reads that again, so it stays in linecache."""
    key = lower.key_of(program)
    found = _functions.get(key)
    if found is None:
        text = lower.source(program)
        name = f"<speedlight expression {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": "speedlight.gpu.expression"}
        exec(compile(text, name, "exec"), space)
        found = _functions[key] = {n: space.get(n) for n in ("known", "apply", "bounds")}
    return found


def program_of(problem: Problem) -> tuple[Program | None, bool]:
    """The mask and score, and whether an index of theirs may be out of range."""
    program = Program.of(problem.mask, problem.score, problem.box())
    return program, program is not None and any(program.checked)


def _table_on(table: Any, device: str) -> torch.Tensor:
    """A table's entries on the device; uploaded once, unless they may change."""
    if table.tensor is not None:
        if str(table.tensor.device) != device:
            raise ArgumentError(f"{table.name}: expected a tensor on {device}, as q; got one on {table.tensor.device}.")
        return table.tensor
    if table.array.flags.writeable and not interpreting():
        raise ArgumentError(
            f"{table.name}: expected a tensor on {device}, as q; got an array on the CPU. Move it, or use sl.table()."
        )
    found = table.copies.get(device)
    if found is None:
        array = table.array
        array = array.view(np.int8) if array.dtype == bool else array
        if array.dtype.kind == "u" and array.itemsize > 1:
            array = array.view(array.dtype.str.replace("u", "i"))  # the same bits; kernels read them as they are
        shared = array.flags.writeable and all(s >= 0 and s % array.itemsize == 0 for s in array.strides)
        found = torch.from_numpy(array if shared else array.copy()).to(device)
        if not array.flags.writeable:
            table.copies[device] = found
    return found


_prepared: dict[Any, Ready] = {}


@standard
def prepare(problem: Problem, device: str, firsts: tuple[tuple[int, ...], tuple[int, ...]] | None) -> Ready:
    key = problem, device, firsts
    found = _prepared.get(key)
    if found is not None:
        return found
    program, risky = program_of(problem)
    words = floats = sinks = items = None
    tables: list[torch.Tensor] = []
    if program is not None:
        tables = [_table_on(t, device) for t in program.tables]
        host = program.device_words([t.data_ptr() for t in tables], [tuple(t.stride()) for t in tables])
        words = torch.from_numpy(host).to(device)
        floats = words.view(torch.float64)
    if problem.sinks is not None:
        sinks = torch.tensor(problem.sinks, dtype=torch.float32).to(device)
    alike = (
        firsts is None
        and problem.items is None
        and all(len(set(x)) == 1 for x in (problem.q_lengths, problem.k_lengths, problem.q_starts))
    )
    if not alike:
        batch = problem.batch
        q_first, k_first = firsts if firsts is not None else ((0,) * batch, (0,) * batch)
        names = problem.items if problem.items is not None else range(batch)
        rows = zip(problem.q_lengths, problem.k_lengths, problem.q_starts, q_first, k_first, names, strict=True)
        items = torch.tensor(list(rows), dtype=torch.int64).reshape(batch, int(ITEM)).to(device)
    functions = functions_of(program) if program is not None else {}
    found = Ready(program, functions, words, floats, tables, sinks, items, risky)
    lent = program is not None and any(t.tensor is not None or t.array.flags.writeable for t in program.tables)
    if not lent:  # arrays of a caller's are not held
        if len(_prepared) >= 256:
            _prepared.clear()
        _prepared[key] = found
    return found


def classes_of(p: Problem, ready: Ready, rows: int, keys: int, pack: int, device: torch.device) -> dict[str, Any]:
    """The kernel's own look at tiles cannot see into tables of several dimensions: where there are few tiles, the host
    looks.
    """
    found: dict[str, Any] = {"classes": None, "c_item": 0, "c_head": 0, "chunks": 0}
    if ready.program is None or not ready.program.opaque:
        return found
    key = rows, keys, pack, str(device)
    if key not in ready.classes:
        ready.classes[key] = _classified(p, ready.program, rows, keys, pack, device)
    return ready.classes[key] or found


_CELLS = 1 << 16  # blocks x tiles that the host looks at, at most
_BITS = int(TILES)


def _classified(
    p: Problem, program: Program, rows: int, keys: int, pack: int, device: torch.device
) -> dict[str, Any] | None:
    """For every block of rows and run of tiles two words: which tiles show something, and which show everything."""
    uses = frozenset().union(*(x.root.uses for x in (p.mask, p.score) if x is not None))
    items, heads = (
        (p.batch if "b" in uses or len(set(zip(p.q_lengths, p.q_starts, strict=True))) > 1 else 1),
        p.q_heads // pack,
    )
    heads = heads if "h" in uses else 1
    most, longest = max(p.q_lengths), max(p.k_lengths)
    blocks, chunks = -(-most * pack // rows), -(-longest // (keys * _BITS))
    if not longest or items * heads * blocks * chunks * _BITS > _CELLS:
        return None
    words = np.zeros((items, heads, blocks, chunks, 2), np.int64)
    first = np.arange(blocks)[:, None] * rows // pack
    j = p.k_start + np.arange(chunks * _BITS)[None, :] * keys
    for item in range(items):
        low = p.q_starts[item] + np.minimum(first, max(p.q_lengths[item] - 1, 0))
        high = p.q_starts[item] + np.minimum(
            ((np.arange(blocks) + 1) * rows - 1)[:, None] // pack, max(p.q_lengths[item] - 1, 0)
        )
        last = np.minimum(j + keys, p.k_start + max(p.k_lengths)) - 1
        for head in range(heads):
            ends = (head * pack, head * pack + pack - 1) if "h" in uses else (0, p.q_heads - 1)
            name = item if p.items is None else p.items[item]
            ops = Many(
                {"b": (name, name), "h": ends, "i": (low, high), "j": (j, np.maximum(last, j))}, program.followed
            )
            for n, x in enumerate(program.visibility(ops)):
                bits = np.broadcast_to(x, (blocks, chunks * _BITS)).reshape(blocks, chunks, _BITS)
                words[item, head, :, :, n] = (bits.astype(np.int64) << np.arange(_BITS)).sum(axis=-1)
    signed = words.astype(np.uint32).view(np.int32)
    return {
        "classes": torch.from_numpy(signed).to(device), "c_item": heads * blocks if items > 1 else 0,
        "c_head": blocks if heads > 1 else 0, "chunks": chunks,
    }  # fmt: skip
