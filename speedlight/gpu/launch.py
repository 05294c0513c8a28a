"""Prepares a call for the GPU and launches it: what to compute comes as a Problem, where things lie as tensors."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from ..errors import ArgumentError, ArgumentTypeError, CompileError, UnsupportedError
from ..expressions.program import may_hide
from ..expressions.tree import out_of_range
from ..machine import interpreting
from ..modes import standard
from ..problem import LAYOUTS, Problem, check_precision, page_lists
from .decode import combine
from .forward import AFTERWARDS, FLAGGED, attend
from .prepare import Ready, classes_of, prepare
from .tiles import COARSE_DIMS, HEAD_DIMS, Tile, table_row

_FEW = 128  # programs that look whether a block wants mending
SHORT_ROWS = 64  # query rows of a kv head up to which its keys are read by several programs


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
    ring_first: int = 0  # tokens that stay where they are, and how many the others go round
    ring: int = 0


def check(problem: Problem, device: str, precision: Any) -> None:
    """What this engine can do, on this device."""
    check_precision(precision)
    if problem.dtype == "float64":
        raise UnsupportedError(
            "q: expected float32, float16 or bfloat16 on a GPU; got float64. Use q.float(), or q.cpu() for float64."
        )
    if max(problem.head_dim, problem.value_dim) > HEAD_DIMS:
        most = max(problem.head_dim, problem.value_dim)
        raise UnsupportedError(f"q: expected head dims up to {HEAD_DIMS} on a GPU; got {most}. Use q.cpu().")
    have = capability(device)
    if have < (7, 5):
        raise UnsupportedError(
            f"{device}: expected compute capability 7.5 or newer; got {have[0]}.{have[1]}. Use tensors on the CPU."
        )
    if problem.dtype == "bfloat16" and have < (8, 0):
        raise UnsupportedError(
            f"{device}: expected compute capability 8.0 for bfloat16; got {have[0]}.{have[1]}. Use float16."
        )


# --- launching


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
            raise ArgumentError(
                f"{what} that was read on {device} was out of range; what was computed from it means nothing."
            )


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
    """The table and the lengths on the device, and lengths for the host: the most there can be, where it does not know
    them.
    """
    there = [
        isinstance(x, torch.Tensor) and str(x.device) == device and (x.is_cuda or interpreting())
        for x in (block_table, k_lengths)
    ]
    if not all(there):
        numbers, lengths = page_lists(block_table, k_lengths, pages, page_size, 1)
        return torch.from_numpy(numbers).to(device), None, lengths
    for name, x, dims in (("block_table", block_table, 2), ("k_lengths", k_lengths, 1)):
        if x.ndim != dims or x.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(
                f"{name}: expected int32 or int64 of {dims} dimensions; got {x.dtype} of shape {tuple(x.shape)}."
            )
    if len(k_lengths) != len(block_table):
        raise ArgumentError(
            f"k_lengths: expected {len(block_table)} lengths, one per row of block_table; got {len(k_lengths)}."
        )
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    return table, k_lengths.contiguous(), (table.shape[1] * page_size,) * len(table)


def paged_keys(k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor | None, most: int) -> Keys:
    """Keys and values in pages (pages, page_size, heads, dim)."""
    strides = [(x.stride(0), x.stride(2), x.stride(1), x.stride(3)) for x in (k, v)]
    return Keys(
        k,
        v,
        strides[0],
        strides[1],
        pages=table,
        page_size=k.shape[1],
        page_count=k.shape[0],
        lengths=lengths,
        status=status_of(k.device),
        most=most,
    )


@dataclass(slots=True)
class Launch:
    """A kernel, its grid, and all its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int
    registers: int | None = None


def run(
    problem: Problem,
    layout: str,
    q: torch.Tensor,
    keys: Keys,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    cu_q: tuple[int, ...] | None = None,
    cu_k: tuple[int, ...] | None = None,
    precision: str = "ieee",
    tile: Tile | None = None,
) -> None:
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
    ready = prepare(problem, device, firsts)
    wrong = None
    if ready.risky:
        assert ready.program is not None
        wrong = torch.zeros(2 * len(ready.program.lookups), dtype=torch.int64, device=q.device)
    for each in launches(problem, layout, q, keys, out, lse, ready, wrong, precision, capability(device), tile):
        start(each)
    if wrong is not None and not capturing():
        _raise_wrong(ready, wrong)


def _alike(p: Problem) -> list[list[int]]:
    """Packed sequences by the tiles that they take; those without a query are left out."""
    classes: dict[int, list[int]] = {}
    for i, n in enumerate(p.q_lengths):
        if n:
            classes.setdefault(min(max(power_above(n * p.group), 16), 2 * SHORT_ROWS), []).append(i)
    return list(classes.values())


def _part(p: Problem, keys: Keys, which: list[int]) -> tuple[Problem, Keys]:
    """Some of the sequences."""
    names = p.items or tuple(range(p.batch))
    q_lengths, k_lengths, q_starts, items = (
        tuple(x[i] for i in which) for x in (p.q_lengths, p.k_lengths, p.q_starts, names)
    )
    pages, lengths = (None if x is None else x[which] for x in (keys.pages, keys.lengths))
    problem = replace(p, q_lengths=q_lengths, k_lengths=k_lengths, q_starts=q_starts, items=items)
    return problem, replace(keys, pages=pages, lengths=lengths)


@dataclass(frozen=True, slots=True)
class Shape:
    """How the attention kernel takes a problem."""

    capability: tuple[int, int]
    tile: Tile
    short: bool  # few rows: the heads of a group share a block, and its keys are split
    pack: int  # heads of a block
    rows: int
    row_blocks: int  # of an item and `pack` heads
    splits: int
    causal: bool  # and not everything is seen anyway
    hiding: bool  # tiles are classified


def shape_of(p: Problem, keys: Keys, have: tuple[int, int], precision: str, tile: Tile | None = None) -> Shape:
    """By the lengths of queries alone, never by batch or keys: a row's bits depend on them no more than on the
    others.
    """
    most_rows = max(p.q_lengths, default=0) if p.rows is None else p.rows
    short = most_rows * p.group <= SHORT_ROWS
    row = table_row(have, p.dtype, max(p.head_dim, p.value_dim), precision)
    causal = p.causal and not _sees_all(p, keys)
    if tile is None:
        paged, masked = (
            keys.pages is not None or keys.k_scales is not None,
            causal or p.mask is not None or p.score is not None,
        )
        tile = row.decode if short else row.paged if paged else row.masked if masked else row.full
    pack = p.group if short else 1
    rows = max(tile.rows, power_above(most_rows * pack)) if short else tile.rows
    splits = most_splits(keys.most if keys.lengths is not None else max(p.k_lengths, default=0)) if short else 1
    hiding = may_hide(*p.roots)
    return Shape(have, tile, short, pack, rows, -(-most_rows * pack // rows), splits, causal, hiding)


@standard
def launches(
    p: Problem,
    layout: str,
    q: torch.Tensor,
    keys: Keys,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    ready: Ready,
    wrong: torch.Tensor | None,
    precision: str,
    have: tuple[int, int],
    tile: Tile | None = None,
) -> list[Launch]:
    """What the call comes to on a device of this capability: the attention kernel, its mending, and the merging of
    splits.
    """
    precision = precision if max(p.head_dim, p.value_dim) <= COARSE_DIMS else "ieee"
    how = shape_of(p, keys, have, precision, tile)
    tile, short, pack, rows, group = how.tile, how.short, how.pack, how.rows, p.group
    row_blocks, splits, causal, hiding = how.row_blocks, how.splits, how.causal, how.hiding
    most_rows = max(p.q_lengths) if p.rows is None else p.rows
    blocks = row_blocks * splits * (p.q_heads // pack) * p.batch
    flags = torch.empty(blocks, dtype=torch.int32, device=q.device)
    factor, sign = _factor(p)
    # tiles of splits are counted from each split's start, and lengths of the device are not known here
    classes = {"classes": None, "c_item": 0, "c_head": 0, "chunks": 0}
    if not short and keys.lengths is None:
        classes = classes_of(p, ready, rows, tile.keys, pack, q.device)
    partial = stats = None
    if short:
        count = p.batch * p.kv_heads * splits * row_blocks * rows
        partial = torch.empty(count * p.value_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(count * 2, dtype=torch.float32, device=q.device)
    places = (0, 0, 0) if lse is None else lse.stride() if lse.ndim == 3 else (0, *lse.stride())
    both: dict[str, Any] = {
        "out": out, "lse": lse, "items": ready.items, "lengths": keys.lengths, "partial": partial, "stats": stats,
        **_named("o", _axes(out, layout)), **dict(zip(("l_item", "l_head", "l_row"), places, strict=True)),
        "q_len": p.q_lengths[0], "k_len": p.k_lengths[0], "out_rows": p.rows, "kv_heads": p.kv_heads, "group": group,
        "splits": splits,
        "PACK": pack, "DV": p.value_dim, "BLOCK_DV": max(16, power_above(p.value_dim)),
    }  # fmt: skip
    ring = {
        "ring_first": keys.ring_first,
        "ring": keys.ring,
        "WHERE": 1 if keys.pages is not None else 2 if keys.ring else 0,
    }
    scales = (0, 0, 0) if keys.k_scales is None else keys.k_scales.stride()
    arguments = both | {
        "q": q, "k": keys.k, "v": keys.v, "sinks": None if short else ready.sinks, "pages": keys.pages,
        "k_scales": keys.k_scales,
        "v_scales": keys.v_scales, "ints": ready.words, "floats": ready.floats, "wrong": wrong, "status": keys.status,
        **_named("q", _axes(q, layout)), **_named("k", keys.k_strides), **_named("v", keys.v_strides),
        **dict(zip(("s_item", "s_head", "s_row"), scales, strict=True)),
        "q_start": p.q_starts[0], "k_start": p.k_start, "row_blocks": row_blocks, "page_size": keys.page_size,
        "table_row": 0 if keys.pages is None else keys.pages.stride(0),
        "table_pages": 0 if keys.pages is None else keys.pages.shape[1],
        "page_count": keys.page_count,
        **ring, **classes, "factor": factor, "scale": float(p.scale), "D": p.head_dim,
        "BLOCK_D": max(16, power_above(p.head_dim)),
        "BM": rows, "BN": tile.keys, "CAUSAL": causal,
        "SIGN": sign, "PRECISION": precision, "HIDING": hiding, "REPAIR": int(FLAGGED), "flags": flags,
        "blocks": blocks,
        "SPLIT": short, "DESCRIBED": tile.described and _describable(keys, p),
        **{n: ready.functions.get(n) for n in ("known", "apply", "bounds")},
    }  # fmt: skip
    found = [Launch(attend, (blocks,), arguments, tile.warps, tile.stages, tile.registers)]
    # mending in a kernel of its own: it wants more registers
    found.append(Launch(attend, (min(blocks, _FEW),), arguments | {"REPAIR": int(AFTERWARDS)}, tile.warps, tile.stages))
    if short:
        both |= {"sinks": ready.sinks, "padded_rows": row_blocks * rows}
        found.append(Launch(combine, (most_rows * pack, p.kv_heads, p.batch), both, 4, 2))
    return found


@standard
def start(each: Launch) -> None:
    kernel, arguments = each.kernel, each.arguments
    if 0 in each.grid:
        return
    if arguments.get("DESCRIBED"):
        triton.set_allocator(_room)
    where = arguments["out" if "out" in arguments else "keys"].device
    try:
        with (
            torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()
        ):  # Triton launches on the current one
            kernel[each.grid](**arguments, num_warps=each.warps, num_stages=each.stages, maxnreg=each.registers)
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


def _raise_wrong(ready: Ready, wrong: torch.Tensor) -> None:
    assert ready.program is not None
    for (flag, index), (node, d) in zip(wrong.cpu().reshape(-1, 2).tolist(), ready.program.lookups, strict=True):
        if flag:
            raise out_of_range(node.value, d, index)


def _describable(keys: Keys, p: Problem) -> bool:
    """Whether tensor descriptors can tell where keys and values lie: rows of adjoining numbers, all on 16 bytes."""
    if keys.pages is not None or keys.k_scales is not None or keys.ring or max(p.k_lengths) >= 1 << 31:
        return False
    size = keys.k.element_size()
    pairs = (keys.k, keys.k_strides), (keys.v, keys.v_strides)
    return all(
        x.data_ptr() % 16 == 0 and s[3] == 1 and s[2] > 0 and all(y * size % 16 == 0 for y in s[:3]) for x, s in pairs
    )


def _room(size: int, alignment: int, stream: Any) -> torch.Tensor:
    """Memory in which kernels keep their tensor descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _named(prefix: str, strides: tuple[int, ...]) -> dict[str, int]:
    return {f"{prefix}_{n}": s for n, s in zip(("item", "head", "row", "column"), strides, strict=True)}


def power_above(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def most_splits(k_len: int) -> int:
    """Splits of the longest sequence, and at least as many as any shorter one has."""
    return max(1, min(-(-k_len // 256), 64), -(-k_len // 2048))


def _sees_all(p: Problem, keys: Keys) -> bool:
    """Whether causality hides nothing: one query, at the last key."""
    if keys.lengths is not None:
        return max(p.q_lengths) <= 1
    return all(
        q == 0 or start - p.k_start + 1 >= k for q, k, start in zip(p.q_lengths, p.k_lengths, p.q_starts, strict=True)
    )


def _factor(p: Problem) -> tuple[float, int]:
    """What scores are multiplied by in the exponent, never negative; and what q is multiplied by first."""
    if p.score is not None:
        return math.log2(math.e), 1
    c = p.scale * math.log2(math.e)
    return (abs(c), 1 if c > 0 else -1) if c else (1.0, 0)


def merged(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over several sets of keys, from the attention over each, in float64; what saw nothing has no say."""
    logs = [x.double() for x in lses]
    top = functools.reduce(torch.fmax, logs)
    base = torch.where(torch.isneginf(top), 0.0, top)
    weights = [torch.exp(x - base) for x in logs]
    total = functools.reduce(torch.add, weights)
    out = torch.where(torch.isneginf(top), 0.0, -0.0)[..., None]  # -0 adds nothing, to the sign of zeros
    for x, log, weight in zip(outs, logs, weights, strict=True):
        out = out + torch.where(torch.isneginf(log)[..., None], -0.0, x.double() * (weight / total)[..., None])
    return out.to(outs[0].dtype), (base + torch.log(total)).to(lses[0].dtype)
