"""Prepares a call for the GPU and launches it: what to compute comes as a Problem, where things lie as tensors."""

from __future__ import annotations

import functools
import hashlib
import itertools
import linecache
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..bounds import Exact, _Walk, largest_integer
from ..errors import ArgumentError, CompileError, ExpressionError, UnsupportedError
from ..problem import LAYOUTS, Problem
from ..tree import out_of_range
from . import lower
from .decode import combine
from .forward import ITEM, attend
from .tiles import HEAD_DIMS, Tile, table_row

SHORT_ROWS = 64  # query rows of a kv head up to which its keys are read by several programs
PRECISIONS = {"ieee": "ieee", "tf32": "tf32", "tf32x3": "tf32x3"}
_DTYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}


def interpreting() -> bool:
    """Whether Triton runs kernels in Python, on tensors of the CPU: what tests do where there is no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def capability(device: str) -> tuple[int, int]:
    return (9, 0) if interpreting() else torch.cuda.get_device_capability(device)


@dataclass(slots=True)
class Keys:
    """Where keys and values lie: strides in elements as (item or page, head, row, column)."""

    k: torch.Tensor
    v: torch.Tensor
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    pages: torch.Tensor | None = None  # (batch, most pages) page numbers, which kernels check
    page_size: int = 1
    page_count: int = 0
    k_scales: torch.Tensor | None = None  # of int8 codes: (item or page, head, row)
    v_scales: torch.Tensor | None = None
    lengths: torch.Tensor | None = None  # on the device, when the host does not know them
    status: torch.Tensor | None = None  # takes note of page numbers and lengths that are out of range
    most: int = 0  # keys of the longest item, where lengths are on the device


@dataclass(slots=True)
class _Prepared:
    """What a problem needs on a device; kept."""

    program: lower.Program | None
    functions: dict[str, Any]
    words: torch.Tensor | None
    floats: torch.Tensor | None
    tables: list[torch.Tensor]  # kept alive: the words hold their addresses
    sinks: torch.Tensor | None
    items: torch.Tensor | None
    risky: bool  # an index may be out of range


def check(problem: Problem, device: str, precision: Any) -> None:
    """What this engine can do, on this device."""
    if precision not in PRECISIONS:
        raise ArgumentError(f"precision: expected 'ieee', 'tf32x3' or 'tf32'; got {precision!r}.")
    if problem.dtype == "float64":
        raise UnsupportedError("q: expected float32, float16 or bfloat16 on a GPU; got float64. Use q.float(), or q.cpu() for float64.")
    if max(problem.head_dim, problem.value_dim) > HEAD_DIMS:
        most = max(problem.head_dim, problem.value_dim)
        raise UnsupportedError(f"q: expected head dims up to {HEAD_DIMS} on a GPU; got {most}. Use q.cpu().")
    have = capability(device)
    if have < (7, 5):
        raise UnsupportedError(f"{device}: expected compute capability 7.5 or newer; got {have[0]}.{have[1]}. Use tensors on the CPU.")
    if problem.dtype == "bfloat16" and have < (8, 0):
        raise UnsupportedError(f"{device}: expected compute capability 8.0 for bfloat16; got {have[0]}.{have[1]}. Use float16.")


# --- expressions


@functools.lru_cache(maxsize=512)
def functions_of(program: lower.Program) -> dict[str, Any]:
    """The program's functions, from their source. Triton reads that again, so it stays in linecache."""
    text = lower.source(program)
    name = f"<speedlight expression {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "speedlight.gpu.expression"}
    exec(compile(text, name, "exec"), space)
    return {n: space.get(n) for n in ("known", "apply", "bounds")}


def program_of(problem: Problem) -> tuple[lower.Program | None, bool]:
    """The mask and score, and whether an index of theirs may be out of range."""
    parts = [x for x in (problem.mask, problem.score) if x is not None]
    if not parts:
        return None, False
    roots = [n for x in parts for n in x.nodes]
    most = largest_integer(roots, problem.box())
    if most is not None and most >= 1 << 62:
        raise ExpressionError(f"{parts[0].role}: an integer may reach {most}, which int64 cannot hold. Use sl.cast(…, float).")
    walk = _Walk(Exact(problem.box()))
    first = lower.program_of(problem, True, ())
    assert first is not None
    checked = []
    for node, d in first.lookups:
        ends = walk.interval(node.args[d])
        checked.append(ends is None or ends[0] < 0 or ends[1] >= node.value.shape[d])
    return lower.program_of(problem, most is not None and most < 1 << 31, tuple(checked)), any(checked)


def _table_on(table: Any, device: str) -> torch.Tensor:
    """A table's entries on the device; uploaded once, unless they may change."""
    if table.tensor is not None:
        if str(table.tensor.device) != device:
            raise ArgumentError(f"{table.name}: expected a tensor on {device}, as q; got one on {table.tensor.device}.")
        return table.tensor
    if table.array.flags.writeable and not interpreting():
        raise ArgumentError(f"{table.name}: expected a tensor on {device}, as q; got an array on the CPU. Move it, or use sl.table().")
    found = table.copies.get(device)
    if found is None:
        array = table.array
        array = array.view(np.int8) if array.dtype == bool else array
        if array.dtype.kind == "u" and array.itemsize > 1:
            array = array.view(array.dtype.str.replace("u", "i"))  # the same bits; kernels read them as they are
        shared = array.flags.writeable and all(s >= 0 for s in array.strides)
        found = torch.from_numpy(array if shared else array.copy()).to(device)
        if not array.flags.writeable:
            table.copies[device] = found
    return found


_prepared: dict[Any, _Prepared] = {}


def _prepare(problem: Problem, device: str, firsts: tuple[tuple[int, ...], tuple[int, ...]] | None) -> _Prepared:
    key = problem, device, firsts
    found = _prepared.get(key)
    if found is not None:
        return found
    program, risky = program_of(problem)
    words = floats = sinks = items = None
    tables: list[torch.Tensor] = []
    if program is not None:
        tables = [_table_on(t, device) for t in program.tables]
        host = program.words([t.data_ptr() for t in tables], [tuple(t.stride()) for t in tables])
        words = torch.from_numpy(host).to(device)
        floats = words.view(torch.float64)
    if problem.sinks is not None:
        sinks = torch.tensor(problem.sinks, dtype=torch.float32).to(device)
    alike = firsts is None and problem.items is None and all(len(set(x)) == 1 for x in (problem.q_lengths, problem.k_lengths, problem.q_starts))
    if not alike:
        batch = problem.batch
        q_first, k_first = firsts if firsts is not None else ((0,) * batch, (0,) * batch)
        names = problem.items if problem.items is not None else range(batch)
        rows = zip(problem.q_lengths, problem.k_lengths, problem.q_starts, q_first, k_first, names, strict=True)
        items = torch.tensor(list(rows), dtype=torch.int64).reshape(batch, int(ITEM)).to(device)
    functions = functions_of(program) if program is not None else {}
    found = _Prepared(program, functions, words, floats, tables, sinks, items, risky)
    if len(_prepared) >= 256:
        _prepared.clear()
    _prepared[key] = found
    return found


# --- launching


def _axes(x: torch.Tensor, layout: str) -> tuple[int, ...]:
    """Strides as (item, head, row, column)."""
    strides = x.stride()
    axes = LAYOUTS[layout]
    return (*((0,) if layout == "lhd" else ()), *(strides[a] for a in axes))


def arrays_of(k: torch.Tensor, v: torch.Tensor, layout: str) -> Keys:
    return Keys(k, v, _axes(k, layout), _axes(v, layout))


def run(
    problem: Problem, layout: str, q: torch.Tensor, keys: Keys, out: torch.Tensor, lse: torch.Tensor | None, *,
    cu_q: tuple[int, ...] | None = None, cu_k: tuple[int, ...] | None = None, precision: str = "ieee", tile: Tile | None = None,
) -> None:  # fmt: skip
    """Fills out and lse on q's device and its current stream. `tile` is for tests and tuning."""
    device = str(q.device)
    check(problem, device, precision)
    if not problem.batch or not problem.q_heads or not out.numel():
        return
    firsts = None
    if cu_q is not None:
        firsts = cu_q[:-1], cu_k[:-1] if cu_k is not None else (0,) * problem.batch
    ready = _prepare(problem, device, firsts)
    p, group = problem, problem.group
    most_rows = max(p.q_lengths) if p.rows is None else p.rows
    k_most = keys.most if keys.lengths is not None else max(p.k_lengths)
    short = most_rows * group <= SHORT_ROWS
    row = table_row(capability(device), p.dtype, max(p.head_dim, p.value_dim))
    tile = tile or (row.decode if short else row.prefill)
    pack = group if short else 1
    bm = max(tile.rows, _power(most_rows * pack)) if short else tile.rows
    row_blocks = -(-most_rows * pack // bm)
    splits = most_splits(k_most) if short else 1
    causal = p.causal and not _sees_all(p, keys)
    hiding = ready.program is not None and ready.program.hiding
    kind = "bfloat16" if p.quantised and p.dtype == "float16" else p.dtype
    factor, sign = _factor(p)
    blocks_of_heads = p.q_heads // pack
    grid = (row_blocks * splits * blocks_of_heads * p.batch,)
    l_strides = (lse.stride(0), lse.stride(1), lse.stride(2)) if lse is not None and lse.ndim == 3 else (0, *(lse.stride() if lse is not None else (0, 0)))
    partial = stats = wrong = None
    if short:
        count = p.batch * p.kv_heads * splits * row_blocks * bm
        partial = torch.empty(count * p.value_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(count * 2, dtype=torch.float32, device=q.device)
    if ready.risky:
        assert ready.program is not None
        wrong = torch.zeros(2 * len(ready.program.lookups), dtype=torch.int64, device=q.device)
    scales = keys.k_scales.stride() if keys.k_scales is not None else (0, 0, 0)
    out_rows = p.rows
    uniform = (p.q_lengths[0], p.k_lengths[0], p.q_starts[0])
    o = _axes(out, layout)
    arguments = dict(
        q=q, k=keys.k, v=keys.v, out=out, lse=lse, sinks=None if short else ready.sinks, items=ready.items, lengths=keys.lengths,
        pages=keys.pages, k_scales=keys.k_scales, v_scales=keys.v_scales, partial=partial, stats=stats, ints=ready.words,
        floats=ready.floats, wrong=wrong, status=keys.status, classes=None,
        **_named("q", _axes(q, layout)), **_named("k", keys.k_strides), **_named("v", keys.v_strides), **_named("o", o),
        l_item=l_strides[0], l_head=l_strides[1], l_row=l_strides[2], s_item=scales[0], s_head=scales[1], s_row=scales[2],
        q_len=uniform[0], k_len=uniform[1], q_start=uniform[2], k_start=p.k_start, out_rows=out_rows, kv_heads=p.kv_heads, group=group,
        row_blocks=row_blocks, splits=splits, page_size=keys.page_size,
        table_row=keys.pages.stride(0) if keys.pages is not None else 0, page_count=keys.page_count, chunks=0, factor=factor,
        scale=float(p.scale), D=p.head_dim, DV=p.value_dim, BLOCK_D=max(16, _power(p.head_dim)), BLOCK_DV=max(16, _power(p.value_dim)),
        BM=bm, BN=tile.keys, PACK=pack, CAUSAL=causal, SIGN=sign, PRECISION=PRECISIONS[precision], HIDING=hiding,
        HIDDEN=causal or hiding, known=ready.functions.get("known"), apply=ready.functions.get("apply"),
        bounds=ready.functions.get("bounds"), SPLIT=short, DESCRIBED=False,
    )  # fmt: skip
    _launch(attend, grid, arguments, num_warps=tile.warps, num_stages=tile.stages)
    if short:
        arguments = dict(
            partial=partial, stats=stats, out=out, lse=lse, sinks=ready.sinks, items=ready.items, lengths=keys.lengths, **_named("o", o),
            l_item=l_strides[0], l_head=l_strides[1], l_row=l_strides[2], q_len=uniform[0], k_len=uniform[1], out_rows=out_rows,
            kv_heads=p.kv_heads, group=group, padded_rows=row_blocks * bm, splits=splits, DV=p.value_dim,
            BLOCK_DV=max(16, _power(p.value_dim)), PACK=pack,
        )  # fmt: skip
        _launch(combine, (most_rows * pack, p.kv_heads, p.batch), arguments, num_warps=4, num_stages=2)
    del kind
    if wrong is not None and not capturing():
        _raise_wrong(ready, wrong)


def _launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], **options: int) -> None:
    try:
        kernel[grid](**arguments, **options)
    except triton.runtime.errors.OutOfResources as error:
        raise UnsupportedError(
            f"{kernel.__name__}: this GPU has too little {error.name} for head_dim {arguments.get('D', arguments['DV'])}: "
            f"{error.required:,} needed, {error.limit:,} there. Run `speedlight tune` on it."
        ) from error
    except triton.CompilationError as error:
        raise CompileError(f"{kernel.__name__}: Triton could not compile it for this GPU: {error}") from error


def capturing() -> bool:
    """Whether a CUDA graph is being captured: nothing may wait for the device."""
    return not interpreting() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _raise_wrong(ready: _Prepared, wrong: torch.Tensor) -> None:
    assert ready.program is not None
    noted = wrong.cpu().tolist()
    for (flag, index), (node, d) in zip(itertools.batched(noted, 2) if False else _pairs(noted), ready.program.lookups, strict=True):
        if flag:
            raise out_of_range(node.value, d, index)


def _pairs(x: list[int]) -> list[tuple[int, int]]:
    return list(zip(x[::2], x[1::2], strict=True))


def _named(prefix: str, strides: tuple[int, ...]) -> dict[str, int]:
    return {f"{prefix}_{n}": s for n, s in zip(("item", "head", "row", "column"), strides, strict=True)}


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def most_splits(k_len: int) -> int:
    """Splits of the longest sequence, and at least as many as any shorter one has."""
    return max(1, min(-(-k_len // 256), 64), -(-k_len // 2048))


def _sees_all(p: Problem, keys: Keys) -> bool:
    """Whether causality hides nothing: one query, at the last key."""
    if keys.lengths is not None:
        return max(p.q_lengths) <= 1
    return all(q == 0 or start - p.k_start + 1 >= k for q, k, start in zip(p.q_lengths, p.k_lengths, p.q_starts, strict=True))


def _factor(p: Problem) -> tuple[float, int]:
    """What scores are multiplied by in the exponent, never negative; and what q is multiplied by first."""
    if p.score is not None:
        return math.log2(math.e), 1
    c = p.scale * math.log2(math.e)
    return (abs(c), 1 if c > 0 else -1) if c else (1.0, 0)
