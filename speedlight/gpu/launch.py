"""Prepares a call for the GPU and launches it: what to compute comes as a Problem, where things lie as tensors."""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import triton

from ..bounds import Exact, Walk, hides, largest_integer, visible
from ..errors import ArgumentError, ArgumentTypeError, CompileError, ExpressionError, UnsupportedError
from ..problem import LAYOUTS, Problem, page_lists
from ..tiles import Many
from ..tree import out_of_range
from . import lower
from .decode import combine
from .forward import AFTERWARDS, FLAGGED, ITEM, TILES, attend
from .tiles import HEAD_DIMS, Tile, table_row

_FEW = 128  # programs that look whether a block wants mending
SHORT_ROWS = 64  # query rows of a kv head up to which its keys are read by several programs
PRECISIONS = ("ieee", "tf32x3", "tf32")  # of float32 products


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
    classes: dict[Any, Any] = field(default_factory=dict)  # of tiles, where the host has looked


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
    walk = Walk(Exact(problem.box()))
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
_noted: dict[str, torch.Tensor] = {}  # what kernels note on a device, until somebody waits for it


def status_of(device: torch.device) -> torch.Tensor:
    """A word in which kernels note page numbers and lengths that are out of range."""
    found = _noted.get(str(device))
    if found is None:
        found = _noted[str(device)] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


def synchronize() -> None:
    """Waits for every device that was used, and raises what kernels have noted there."""
    for device, word in _noted.items():
        noted = int(word.item())
        if noted:
            word.zero_()
            what = "block_table: a page number" if noted == 2 else "k_lengths: a length"
            raise ArgumentError(f"{what} that was read on {device} was out of range; what was computed from it means nothing.")


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
    alike = (
        firsts is None and problem.items is None and all(len(set(x)) == 1 for x in (problem.q_lengths, problem.k_lengths, problem.q_starts))
    )
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


def paged_tables(
    block_table: Any, k_lengths: Any, pages: int, page_size: int, device: str
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...]]:
    """The table and the lengths on the device, and lengths for the host: the most there can be, where it does not know them."""
    there = [isinstance(x, torch.Tensor) and str(x.device) == device and (x.is_cuda or interpreting()) for x in (block_table, k_lengths)]
    if not all(there):
        numbers, lengths = page_lists(block_table, k_lengths, pages, page_size, 1)
        return torch.from_numpy(numbers).to(device), None, lengths
    for name, x, dims in (("block_table", block_table, 2), ("k_lengths", k_lengths, 1)):
        if x.ndim != dims or x.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(f"{name}: expected int32 or int64 of {dims} dimensions; got {x.dtype} of shape {tuple(x.shape)}.")
    if len(k_lengths) != len(block_table):
        raise ArgumentError(f"k_lengths: expected {len(block_table)} lengths, one per row of block_table; got {len(k_lengths)}.")
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    return table, k_lengths.contiguous(), (table.shape[1] * page_size,) * len(table)


def paged_keys(k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor | None, most: int) -> Keys:
    """Keys and values in pages (pages, page_size, heads, dim)."""
    strides = [(x.stride(0), x.stride(2), x.stride(1), x.stride(3)) for x in (k, v)]
    return Keys(
        k, v, *strides, pages=table, page_size=k.shape[1], page_count=k.shape[0], lengths=lengths, status=status_of(k.device), most=most
    )


@dataclass(slots=True)
class Launch:
    """A kernel, its grid, and all its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int


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
        parts = _alike(problem)
        if len(parts) > 1:  # how a sequence is computed depends on none that is packed beside it
            for which in parts:
                some, places = _part(problem, keys, which)
                chosen = tuple((*(x[i] for i in which), 0) for x in firsts)
                run(some, layout, q, places, out, lse, cu_q=chosen[0], cu_k=chosen[1], precision=precision, tile=tile)
            return
    ready = _prepare(problem, device, firsts)
    wrong = None
    if ready.risky:
        assert ready.program is not None
        wrong = torch.zeros(2 * len(ready.program.lookups), dtype=torch.int64, device=q.device)
    for each in launches(problem, layout, q, keys, out, lse, ready, wrong, precision, capability(device), tile):
        _launch(each)
    if wrong is not None and not capturing():
        _raise_wrong(ready, wrong)


def _alike(p: Problem) -> list[list[int]]:
    """Packed sequences by the tiles that they take; those without a query are left out."""
    classes: dict[int, list[int]] = {}
    for i, n in enumerate(p.q_lengths):
        if n:
            classes.setdefault(min(max(_power(n * p.group), 16), 2 * SHORT_ROWS), []).append(i)
    return list(classes.values())


def _part(p: Problem, keys: Keys, which: list[int]) -> tuple[Problem, Keys]:
    """Some of the sequences."""
    names = p.items or tuple(range(p.batch))
    q_lengths, k_lengths, q_starts, items = (tuple(x[i] for i in which) for x in (p.q_lengths, p.k_lengths, p.q_starts, names))
    pages, lengths = (None if x is None else x[which] for x in (keys.pages, keys.lengths))
    problem = replace(p, q_lengths=q_lengths, k_lengths=k_lengths, q_starts=q_starts, items=items)
    return problem, replace(keys, pages=pages, lengths=lengths)


def launches(
    p: Problem, layout: str, q: torch.Tensor, keys: Keys, out: torch.Tensor, lse: torch.Tensor | None, ready: _Prepared,
    wrong: torch.Tensor | None, precision: str, have: tuple[int, int], tile: Tile | None = None,
) -> list[Launch]:  # fmt: skip
    """What the call comes to on a device of this capability: the attention kernel and, for few rows, the merging of its splits."""
    group = p.group
    most_rows = max(p.q_lengths) if p.rows is None else p.rows
    short = most_rows * group <= SHORT_ROWS
    row = table_row(have, p.dtype, max(p.head_dim, p.value_dim), precision)
    causal = p.causal and not _sees_all(p, keys)
    hiding = ready.program is not None and ready.program.hiding
    if tile is None:
        paged = keys.pages is not None or keys.k_scales is not None
        tile = row.decode if short else row.paged if paged else row.masked if causal or ready.program else row.full
    pack = group if short else 1
    rows = max(tile.rows, _power(most_rows * pack)) if short else tile.rows
    row_blocks = -(-most_rows * pack // rows)
    splits = most_splits(keys.most if keys.lengths is not None else max(p.k_lengths)) if short else 1
    blocks = row_blocks * splits * (p.q_heads // pack) * p.batch
    flags = torch.empty(blocks, dtype=torch.int32, device=q.device)
    factor, sign = _factor(p)
    partial = stats = None
    if short:
        count = p.batch * p.kv_heads * splits * row_blocks * rows
        partial = torch.empty(count * p.value_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(count * 2, dtype=torch.float32, device=q.device)
    places = (0, 0, 0) if lse is None else lse.stride() if lse.ndim == 3 else (0, *lse.stride())
    both: dict[str, Any] = {
        "out": out, "lse": lse, "items": ready.items, "lengths": keys.lengths, "partial": partial, "stats": stats,
        **_named("o", _axes(out, layout)), **dict(zip(("l_item", "l_head", "l_row"), places, strict=True)),
        "q_len": p.q_lengths[0], "k_len": p.k_lengths[0], "out_rows": p.rows, "kv_heads": p.kv_heads, "group": group, "splits": splits,
        "PACK": pack, "DV": p.value_dim, "BLOCK_DV": max(16, _power(p.value_dim)),
    }  # fmt: skip
    scales = (0, 0, 0) if keys.k_scales is None else keys.k_scales.stride()
    arguments = both | {
        "q": q, "k": keys.k, "v": keys.v, "sinks": None if short else ready.sinks, "pages": keys.pages, "k_scales": keys.k_scales,
        "v_scales": keys.v_scales, "ints": ready.words, "floats": ready.floats, "wrong": wrong, "status": keys.status,
        **_named("q", _axes(q, layout)), **_named("k", keys.k_strides), **_named("v", keys.v_strides),
        **dict(zip(("s_item", "s_head", "s_row"), scales, strict=True)),
        "q_start": p.q_starts[0], "k_start": p.k_start, "row_blocks": row_blocks, "page_size": keys.page_size,
        "table_row": 0 if keys.pages is None else keys.pages.stride(0), "page_count": keys.page_count, **classes_of(p, ready, rows, tile.keys, pack, q.device, keys, short), "factor": factor,
        "scale": float(p.scale), "D": p.head_dim, "BLOCK_D": max(16, _power(p.head_dim)), "BM": rows, "BN": tile.keys, "CAUSAL": causal,
        "SIGN": sign, "PRECISION": precision, "HIDING": hiding, "REPAIR": int(FLAGGED), "flags": flags, "blocks": blocks, "SPLIT": short, "DESCRIBED": tile.described and _describable(keys, p),
        **{n: ready.functions.get(n) for n in ("known", "apply", "bounds")},
    }  # fmt: skip
    found = [Launch(attend, (blocks,), arguments, tile.warps, tile.stages)]
    # mending in a kernel of its own: it wants more registers
    found.append(Launch(attend, (min(blocks, _FEW),), arguments | {"REPAIR": int(AFTERWARDS)}, tile.warps, tile.stages))
    if short:
        both |= {"sinks": ready.sinks, "padded_rows": row_blocks * rows}
        found.append(Launch(combine, (most_rows * pack, p.kv_heads, p.batch), both, 4, 2))
    return found


def _launch(each: Launch) -> None:
    kernel, arguments = each.kernel, each.arguments
    if arguments.get("DESCRIBED"):
        triton.set_allocator(_room)
    try:
        kernel[each.grid](**arguments, num_warps=each.warps, num_stages=each.stages)
    except triton.runtime.errors.OutOfResources as error:
        raise UnsupportedError(
            f"{kernel.__name__}: this GPU has too little {error.name} for a head dim of {arguments['DV']}: "
            f"{error.required:,} needed, {error.limit:,} there. Run `speedlight tune` on it."
        ) from error
    except triton.CompilationError as error:
        raise CompileError(f"{kernel.__name__}: Triton could not compile it for this GPU: {error}") from error


def capturing() -> bool:
    """Whether a CUDA graph is being captured: nothing may wait for the device."""
    return not interpreting() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _raise_wrong(ready: _Prepared, wrong: torch.Tensor) -> None:
    assert ready.program is not None
    for (flag, index), (node, d) in zip(wrong.cpu().reshape(-1, 2).tolist(), ready.program.lookups, strict=True):
        if flag:
            raise out_of_range(node.value, d, index)


def classes_of(
    p: Problem, ready: _Prepared, rows: int, keys: int, pack: int, device: torch.device, where: Keys, short: bool
) -> dict[str, Any]:  # fmt: skip
    """The kernel's own look at tiles cannot see into tables of several dimensions: where there are few tiles, the host looks."""
    found: dict[str, Any] = {"classes": None, "c_item": 0, "c_head": 0, "chunks": 0}
    if short or where.lengths is not None or ready.program is None or not ready.program.opaque:
        return found
    key = rows, keys, pack, str(device)
    if key not in ready.classes:
        ready.classes[key] = _classified(p, ready.program, rows, keys, pack, device)
    return ready.classes[key] or found


_CELLS = 1 << 16  # blocks x tiles that the host looks at, at most
_BITS = int(TILES)


def _classified(p: Problem, program: lower.Program, rows: int, keys: int, pack: int, device: torch.device) -> dict[str, Any] | None:
    """For every block of rows and run of tiles two words: which tiles show something, and which show everything."""
    uses = frozenset().union(*(x.root.uses for x in (p.mask, p.score) if x is not None))
    items, heads = (p.batch if "b" in uses or len(set(zip(p.q_lengths, p.q_starts, strict=True))) > 1 else 1), p.q_heads // pack
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
        high = p.q_starts[item] + np.minimum(((np.arange(blocks) + 1) * rows - 1)[:, None] // pack, max(p.q_lengths[item] - 1, 0))
        last = np.minimum(j + keys, p.k_start + max(p.k_lengths)) - 1
        for head in range(heads):
            ends = (head * pack, head * pack + pack - 1) if "h" in uses else (0, p.q_heads - 1)
            name = item if p.items is None else p.items[item]
            ops = Many({"b": (name, name), "h": ends, "i": (low, high), "j": (j, np.maximum(last, j))})
            some, every = visible(program.mask, ops) if program.mask is not None else (ops.truth(True),) * 2
            hidden = None if program.score is None else hides(program.score, ops)
            some = some if hidden is None else some & ~hidden
            for n, x in enumerate((some, every)):
                bits = np.broadcast_to(x, (blocks, chunks * _BITS)).reshape(blocks, chunks, _BITS)
                words[item, head, :, :, n] = (bits.astype(np.int64) << np.arange(_BITS)).sum(axis=-1)
    signed = words.astype(np.uint32).view(np.int32)
    return {
        "classes": torch.from_numpy(signed).to(device), "c_item": heads * blocks if items > 1 else 0,
        "c_head": blocks if heads > 1 else 0, "chunks": chunks,
    }  # fmt: skip


def _describable(keys: Keys, p: Problem) -> bool:
    """Whether tensor descriptors can tell where keys and values lie: rows of adjoining numbers, all on 16 bytes."""
    if keys.pages is not None or keys.k_scales is not None or max(p.k_lengths) >= 1 << 31:
        return False
    size = keys.k.element_size()
    pairs = (keys.k, keys.k_strides), (keys.v, keys.v_strides)
    return all(x.data_ptr() % 16 == 0 and s[3] == 1 and s[2] > 0 and all(y * size % 16 == 0 for y in s[:3]) for x, s in pairs)


def _room(size: int, alignment: int, stream: Any) -> torch.Tensor:
    """Memory in which kernels keep their tensor descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


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


def merged(out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys, from the attention over each; what saw nothing has no say."""
    top = torch.maximum(lse1, lse2).double()
    safe = torch.where(torch.isneginf(top), 0.0, top)
    weights = [torch.exp(x.double() - safe) for x in (lse1, lse2)]
    total = weights[0] + weights[1]
    parts = [torch.where((w == 0)[..., None], 0.0, x.double() * w[..., None]) for x, w in ((out1, weights[0]), (out2, weights[1]))]
    out = (parts[0] + parts[1]) / torch.where(total == 0, 1.0, total)[..., None]
    lse = torch.where(total == 0, -torch.inf, safe + torch.log(total))
    return out.to(out1.dtype), lse.to(lse1.dtype)
