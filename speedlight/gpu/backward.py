# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""The backward kernel, for one of three ends. OF_KEYS: a program owns a tile of keys, walks the queries of all heads of
the group in order, and makes dK and dV. OF_ROWS: it owns a block of rows, walks the keys, and makes dQ. OF_ENTRIES: as
that, for what flows to the entries of a table, which table_gradients.py adds. No sum is shared, so bits never change.

Weights are computed again, from the lse that is given; docs/numerics.md has the formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..problem.problem import FAR_LSE
from .dropping import Dropout, keeps
from .forward import CODES, FINITE, ORDINARY, TILES, Program, any_flagged, classify, flag_block
from .primitives import LOG2E, dot, finite, lowest_bit, opposite
from .sequence import (
    ARRAYS,
    FLAG,
    RECOMPUTE,
    Batch,
    Config,
    Item,
    Rows,
    Tensor,
    load_rows,
    locate_block,
    locate_item,
    locate_rows,
    tile_range,
)

OF_ROWS, OF_KEYS, OF_ENTRIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # values for END
# what flows to entries is stored for each row, as they know no key; each key of a block; or each pair: for SPREAD
ROWS, KEYS, PAIRS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ENTRIES = tl.constexpr(3)  # for VALUES, beside forward's
FAR: tl.constexpr = tl.constexpr(FAR_LSE["float32"])


class Sides(NamedTuple):
    """What a backward pass reads and writes. delta: of each row, d_out · out - d_lse. drop_factor: of weights kept."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    drop_factor: Any
    terms: Any


class Terms(NamedTuple):
    """What flows to entries, and to which, of blocks from `first` on; `length` keys for each block or row."""

    p_value: Any
    p_index: Any
    first: Any
    length: Any


class RowSums(NamedTuple):
    """What flows from the rows of a block to the entry that each reads."""

    total: Any
    index: Any


class Place(NamedTuple):
    """Positions of a tile's pairs, shaped as they are broadcast, and which of them causality and lengths show."""

    item: Any
    head: Any
    position: Any
    key: Any
    inside: Any
    invariants: Any


class Operands(NamedTuple):
    """Rows of queries: q and d_out, and of each row lse, delta and how many keys it may see."""

    b_q: Any
    b_d_out: Any
    lse: Any
    delta: Any
    rows: Rows
    position: Any
    limit: Any


class Weighed(NamedTuple):
    """Of a tile's pairs the weights after dropout, what flows into scale · q·k, and which are seen; 0 elsewhere."""

    p: Any
    raw: Any
    seen: Any


class KeyTile(NamedTuple):
    """A tile of keys: its first one, one past its last, pointers to the start of its head, and what lies there."""

    n: Any
    end: Any
    kv_head: Any
    b_k: Any
    b_v: Any


class Sums(NamedTuple):
    dk: Any
    dv: Any


_SIZES = [
    "q_len", "k_len", "q_start", "k_start", "blocks", "row_blocks", "key_blocks", "chunks", "scale",
    "seed_low", "seed_high", "drop_below", "drop_all", "drop_factor",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def differentiate(
    q, q_item, q_head, q_row, q_column,
    k, k_item, k_head, k_row, k_column,
    v, v_item, v_head, v_row, v_column,
    d_out, g_item, g_head, g_row, g_column,
    lse, l_item, l_head, l_row, delta, d_item, d_head, d_row,
    dq, a_item, a_head, a_row, a_column,
    dk, b_item, b_head, b_row, b_column,
    dv, c_item, c_head, c_row, c_column,
    items, q_len, k_len, q_start, k_start, kv_heads, group, row_blocks, key_blocks,
    ints, floats, wrong, classes, class_item, class_head, chunks, scale,
    seed_low, seed_high, drop_below, drop_all, drop_factor,
    flags, blocks, values, indices, first_block, length,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, HIDING: tl.constexpr, NONFINITE: tl.constexpr,
    END: tl.constexpr, SCORED: tl.constexpr, SPREAD: tl.constexpr,
    invariants: tl.constexpr, apply: tl.constexpr, bounds: tl.constexpr, back: tl.constexpr, entry: tl.constexpr,
):  # fmt: skip
    """Strides are in elements."""
    c: tl.constexpr = Config(
        D, DV, BLOCK_D, BLOCK_DV, BM, BN, 1, CAUSAL, 1, PRECISION, HIDING, NONFINITE, False, False, ARRAYS,
        False, invariants, apply, bounds, SCORED, back, entry, SPREAD,
    )  # fmt: skip
    sides = Sides(
        Tensor(q, q_item, q_head, q_row, q_column),
        Tensor(k, k_item, k_head, k_row, k_column),
        Tensor(v, v_item, v_head, v_row, v_column),
        Tensor(d_out, g_item, g_head, g_row, g_column),
        Tensor(lse, l_item, l_head, l_row, 1),
        Tensor(delta, d_item, d_head, d_row, 1),
        Tensor(dq, a_item, a_head, a_row, a_column),
        Tensor(dk, b_item, b_head, b_row, b_column),
        Tensor(dv, c_item, c_head, c_row, c_column),
        drop_factor,
        Terms(values, indices, first_block, length),
    )
    batch = Batch(items, None, q_len, k_len, q_start, 0, k_start, None, kv_heads, group, row_blocks, 1)
    dropout = Dropout(seed_low, seed_high, drop_below, drop_all)
    program = Program(1.0, scale, ints, floats, wrong, classes, class_item, class_head, chunks, dropout)
    if NONFINITE == RECOMPUTE:
        if any_flagged(flags, blocks):
            for pid in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
                if tl.load(flags + pid) != 0:
                    one_block(pid, sides, batch, program, flags, key_blocks, END, c)
    else:
        one_block(tl.program_id(0), sides, batch, program, flags, key_blocks, END, c)


@triton.jit
def one_block(
    pid, sides: Sides, batch: Batch, program: Program, p_flags, key_blocks, END: tl.constexpr, c: Config
):  # fmt: skip
    if END == OF_KEYS:
        block_of_keys(pid, sides, batch, program, p_flags, key_blocks, c)
    elif END == OF_ROWS:
        block_of_rows(pid, sides, batch, program, p_flags, c)
    else:
        block_of_entries(pid + sides.terms.first, sides, batch, program, c)


# --- what a pair of positions contributes


@triton.jit
def weigh(x, dp, lse, delta, keep, at: Place, drop_factor, program: Program, MASKED: tl.constexpr, c: Config):
    """Weights of a tile from its products q·k, and their gradients from d_out · v; in either orientation."""
    if c.apply is not None:
        score = c.apply(
            x if c.SCORED else x * program.scale, at.item, at.head, at.position, at.key, at.inside, program.scale,
            at.invariants, program.p_ints, program.p_floats, program.p_wrong, MASKED,
        )  # fmt: skip
        exponent = score - lse
    else:
        score = x * program.scale
        exponent = x * program.scale - lse
        if MASKED:
            score = tl.where(at.inside, score, float("-inf"))
    seen = (score != float("-inf")) & (lse != float("-inf"))
    # so large an lse was rounded by more than its distance to a score
    most = tl.where(tl.abs(lse) >= FAR, 0.0, float("inf"))
    exponent = tl.where(exponent > most, most + tl.zeros_like(exponent), exponent)
    p = tl.where(seen, tl.math.exp2(exponent * LOG2E), 0.0)
    if keep is not None:
        factor = tl.where(keep, drop_factor, 0.0)
        raw = p * (dp * factor - delta)
        p = p * factor
    else:
        raw = p * (dp - delta)
    raw = tl.where(seen, raw, 0.0)
    if c.back is not None:
        raw = c.back(
            raw, x, at.item, at.head, at.position, at.key, program.scale, at.invariants, program.p_ints,
            program.p_floats,
        )  # fmt: skip
        raw = tl.where(seen, raw, 0.0)
    return Weighed(p, raw, seen)


@triton.jit
def add_product(acc, weights, x, VALUES: tl.constexpr, PRECISION: tl.constexpr):
    """acc + weights @ x. FINITE: what is not finite counts as 0."""
    if VALUES == FINITE:
        weights, x = finite(weights), finite(x.to(tl.float32)).to(x.dtype)
    if x.dtype == tl.float32:  # a short chain of sums in the tile, then one over tiles
        return acc + dot(weights, x, PRECISION)
    else:
        return tl.dot(weights.to(x.dtype), x, acc)


@triton.jit
def add_nonfinite(
    acc, weights, seen, tensor: Tensor, p_rows, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LENGTH: tl.constexpr
):
    """acc with those terms of weights [·, LENGTH] @ x that are not finite, of seen pairs, in no order that matters.
    p_rows: of row 0 of x, of which there are `count`.
    """
    o, o_d = tl.arange(0, LENGTH), tl.arange(0, BLOCK).to(tl.int64)
    for t in tl.range(0, tl.minimum(count, LENGTH).to(tl.int32)):
        weight = tl.sum(tl.where((o == t)[None, :], weights, 0.0), 1)
        shown = tl.max(tl.where((o == t)[None, :] & seen, 1, 0), 1) != 0
        row = tl.load(p_rows + t * tensor.row + o_d * tensor.column, mask=o_d < WIDTH, other=0.0).to(tl.float32)
        term = weight[:, None] * row[None, :]
        acc += tl.where(shown[:, None] & opposite(tl.abs(term) < float("inf")), term, 0.0)
    return acc


@triton.jit
def head_of(tensor: Tensor, item, head, first):
    """Pointer to the row `first` of a head."""
    return tensor.p + item * tensor.item + head * tensor.head + first * tensor.row


@triton.jit
def load_queries(sides: Sides, item: Item, rows: Rows, head, k_start, c: Config):
    """head: of all rows."""
    o_d, o_dv = tl.arange(0, c.BLOCK_D).to(tl.int64), tl.arange(0, c.BLOCK_DV).to(tl.int64)
    q, d_out, lse, delta = sides.q, sides.d_out, sides.lse, sides.delta
    p_q, p_d_out = head_of(q, item.i_item, head, item.o_q), head_of(d_out, item.i_item, head, item.o_q)
    b_q = load_rows(p_q, rows.token * q.row, o_d, q.column, rows.m_row, c.D, c.BLOCK_D, True)
    b_d_out = load_rows(p_d_out, rows.token * d_out.row, o_dv, d_out.column, rows.m_row, c.DV, c.BLOCK_DV, True)
    p_lse, p_delta = head_of(lse, item.i_item, head, item.o_q), head_of(delta, item.i_item, head, item.o_q)
    of_rows = tl.load(p_lse + rows.token * lse.row, mask=rows.m_row, other=float("-inf"))
    deltas = tl.load(p_delta + rows.token * delta.row, mask=rows.m_row, other=0.0)
    position = item.q_start + rows.token
    limit = tl.where(rows.m_row, item.k_len, 0)
    if c.CAUSAL:
        limit = tl.minimum(limit, tl.maximum(position - k_start + 1, 0))
    return Operands(b_q, b_d_out, of_rows, deltas, rows, position, limit)


@triton.jit
def keys_from(n, limit, BN: tl.constexpr):
    """How many of the keys n … n + BN - 1 lie below a limit: in 32 bits, since threads hold it for many rows."""
    return tl.minimum(tl.maximum(limit - n, 0), BN).to(tl.int32)


# --- dQ: a block of rows walks the keys


@triton.jit
def block_of_rows(pid, sides: Sides, batch: Batch, program: Program, p_flags, c: Config):
    block = locate_block(pid, batch, None, c)
    item, rows = block.item, locate_rows(block, c)
    if block.i_rows * c.BM < item.q_len:
        keys = tile_range(block, rows, batch, c)
        head = block.i_heads.to(tl.int64)
        of_rows = load_queries(sides, item, rows, head, batch.k_start, c)
        VALUES: tl.constexpr = FINITE if c.NONFINITE == RECOMPUTE else ORDINARY
        acc = tl.zeros([c.BM, c.BLOCK_D], tl.float32)
        acc = over_keys(acc, block, keys, of_rows, sides, batch, program, VALUES, c)
        if c.NONFINITE == FLAG:
            flag_block(p_flags, pid, acc, c.BM)
        o_d = tl.arange(0, c.BLOCK_D).to(tl.int64)
        p_dq = head_of(sides.dq, item.i_item, head, item.o_q) + rows.token[:, None] * sides.dq.row
        p_dq = p_dq + o_d[None, :] * sides.dq.column
        m = rows.m_row[:, None] & (o_d < c.D)[None, :]
        tl.store(p_dq, (acc * program.scale).to(p_dq.dtype.element_ty), mask=m)
        if c.NONFINITE == RECOMPUTE:
            tl.debug_barrier()
            codes = tl.zeros([c.BM, c.BLOCK_D], tl.float32)
            codes = over_keys(codes, block, keys, of_rows, sides, batch, program, CODES, c)
            tl.store(p_dq, (codes * program.scale).to(p_dq.dtype.element_ty), mask=m & (codes != 0.0))
    elif c.NONFINITE == FLAG:
        tl.store(p_flags + pid, 0)


@triton.jit
def over_keys(
    acc, block, keys, of_rows: Operands, sides: Sides, batch: Batch, program: Program, VALUES: tl.constexpr, c: Config
):
    """acc with all tiles of a block added: of dQ, before the scale, or with ENTRIES of RowSums."""
    if c.HIDING:
        o_tiles = tl.arange(0, TILES)
        for first in tl.range(keys.first, keys.end, TILES * c.BN, num_stages=1, disable_licm=True):
            mixed, whole = classify(first, block, keys, batch.k_start, program, c)
            for _ in tl.range(0, tl.sum((mixed >> o_tiles) & 1, 0), disable_licm=True):
                n = first + lowest_bit(mixed) * c.BN
                mixed = mixed & (mixed - 1)
                acc = tile_of_keys(acc, n, block, keys, of_rows, sides, batch, program, True, VALUES, c)
            for _ in tl.range(0, tl.sum((whole >> o_tiles) & 1, 0), disable_licm=True):
                n = first + lowest_bit(whole) * c.BN
                whole = whole & (whole - 1)
                acc = tile_of_keys(acc, n, block, keys, of_rows, sides, batch, program, False, VALUES, c)
    else:
        for n in tl.range(keys.first, keys.clear, c.BN, disable_licm=True):
            acc = tile_of_keys(acc, n, block, keys, of_rows, sides, batch, program, False, VALUES, c)
        for n in tl.range(keys.clear, keys.end, c.BN, disable_licm=True):
            acc = tile_of_keys(acc, n, block, keys, of_rows, sides, batch, program, True, VALUES, c)
    return acc


@triton.jit
def tile_of_keys(
    acc, n, block, keys, of_rows: Operands, sides: Sides, batch: Batch, program: Program, MASKED: tl.constexpr,
    VALUES: tl.constexpr, c: Config,
):  # fmt: skip
    """The sum of dQ with keys n … n + BN - 1 added."""
    item, head = block.item, block.i_heads.to(tl.int64)
    b_k, b_v = load_keys(n, keys.end, item, block.kv_head, sides, MASKED, c)
    o_n = n + tl.arange(0, c.BN).to(tl.int64)
    invariants = (0,)
    if c.apply is not None:
        invariants = c.invariants(item.name, head, of_rows.position[:, None], program.p_ints, program.p_floats)
    at = Place(
        item.name, head, of_rows.position[:, None], (batch.k_start + o_n)[None, :],
        tl.arange(0, c.BN)[None, :] < keys_from(n, of_rows.limit, c.BN)[:, None], invariants,
    )  # fmt: skip
    keep = None
    if program.dropout.seed_low is not None:
        heads = tl.zeros_like(of_rows.position) + head
        keep = keeps(item.name, heads, of_rows.position, batch.k_start + n, program.dropout, c.BN)
    x, dp = dot(of_rows.b_q, tl.trans(b_k), c.PRECISION), dot(of_rows.b_d_out, tl.trans(b_v), c.PRECISION)
    lse, delta = of_rows.lse[:, None], of_rows.delta[:, None]
    found = weigh(x, dp, lse, delta, keep, at, sides.drop_factor, program, MASKED, c)
    if VALUES == ENTRIES:
        return add_terms(acc, x, found, at, n, sides.terms, program, c)
    elif VALUES == CODES:
        p_k = head_of(sides.k, item.i_item, block.kv_head, item.o_k + n)
        return add_nonfinite(acc, found.raw, found.seen, sides.k, p_k, keys.end - n, c.D, c.BLOCK_D, c.BN)
    else:
        return add_product(acc, found.raw, b_k, VALUES, c.PRECISION)


@triton.jit
def load_keys(n, end, item: Item, kv_head, sides: Sides, MASKED: tl.constexpr, c: Config):
    """Keys and values n … n + BN - 1; zeros from `end` on."""
    o_d, o_dv = tl.arange(0, c.BLOCK_D).to(tl.int64), tl.arange(0, c.BLOCK_DV).to(tl.int64)
    o_n = n + tl.arange(0, c.BN).to(tl.int64)
    k, v = sides.k, sides.v
    p_k, p_v = head_of(k, item.i_item, kv_head, item.o_k), head_of(v, item.i_item, kv_head, item.o_k)
    b_k = load_rows(p_k, o_n * k.row, o_d, k.column, o_n < end, c.D, c.BLOCK_D, MASKED)
    return b_k, load_rows(p_v, o_n * v.row, o_dv, v.column, o_n < end, c.DV, c.BLOCK_DV, MASKED)


# --- dK and dV: a tile of keys walks the queries of every head of its group


@triton.jit
def block_of_keys(pid, sides: Sides, batch: Batch, program: Program, p_flags, key_blocks, c: Config):
    """Tiles of one head are adjacent; the first keys come first, since with causal they take longest."""
    n = (pid % key_blocks).to(tl.int64) * c.BN
    kv_head = (pid // key_blocks % batch.kv_heads).to(tl.int64)
    item = locate_item((pid // key_blocks // batch.kv_heads).to(tl.int64), batch, None, c.MEMORY)
    if n < item.k_len:
        b_k, b_v = load_keys(n, item.k_len, item, kv_head, sides, True, c)
        tile = KeyTile(n, tl.minimum(n + c.BN, item.k_len), kv_head, b_k, b_v)
        VALUES: tl.constexpr = FINITE if c.NONFINITE == RECOMPUTE else ORDINARY
        sums = over_queries(tile, item, sides, batch, program, VALUES, c)
        if c.NONFINITE == FLAG:
            flag_block(p_flags, pid, tl.sum(sums.dk * 0.0, 1)[:, None] + tl.sum(sums.dv * 0.0, 1)[:, None], c.BN)
        store_keys(tile, item, sides, sums, program.scale, False, c)
        if c.NONFINITE == RECOMPUTE:
            tl.debug_barrier()
            store_keys(
                tile, item, sides, over_queries(tile, item, sides, batch, program, CODES, c), program.scale, True, c
            )
    elif c.NONFINITE == FLAG:
        tl.store(p_flags + pid, 0)


@triton.jit
def store_keys(tile: KeyTile, item: Item, sides: Sides, sums: Sums, scale, CODED: tl.constexpr, c: Config):
    """CODED: what is not finite alone."""
    o_n = tile.n + tl.arange(0, c.BN).to(tl.int64)
    store_rows(sides.dk, item, tile, o_n, sums.dk, scale, CODED, c.D, c.BLOCK_D)
    store_rows(sides.dv, item, tile, o_n, sums.dv, 1.0, CODED, c.DV, c.BLOCK_DV)


@triton.jit
def store_rows(
    to: Tensor, item: Item, tile: KeyTile, o_n, x, scale, CODED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    o_d = tl.arange(0, BLOCK).to(tl.int64)
    p = head_of(to, item.i_item, tile.kv_head, item.o_k) + o_n[:, None] * to.row + o_d[None, :] * to.column
    m = (o_n < tile.end)[:, None] & (o_d < WIDTH)[None, :]
    if CODED:
        m = m & (x != 0.0)
    tl.store(p, (x * scale).to(p.dtype.element_ty), mask=m)


@triton.jit
def over_queries(
    tile: KeyTile, item: Item, sides: Sides, batch: Batch, program: Program, VALUES: tl.constexpr, c: Config
):
    """dK, before the scale, and dV of a tile: heads ascending, of each the queries that causality lets see it."""
    sums = Sums(tl.zeros([c.BN, c.BLOCK_D], tl.float32), tl.zeros([c.BN, c.BLOCK_DV], tl.float32))
    first, clear = item.i_item * 0, item.i_item * 0
    if c.CAUSAL:  # rows from `first` on see some of it, from `clear` on all
        before = batch.k_start - item.q_start
        first = tl.maximum(tile.n + before, 0) // c.BM * c.BM
        clear = (tl.maximum(tile.end - 1 + before, 0) + c.BM - 1) // c.BM * c.BM
    for i in tl.range(0, batch.group, num_stages=1, disable_licm=True):
        head = tile.kv_head * batch.group + i
        if c.HIDING:
            for start in tl.range(first, item.q_len, TILES * c.BM, num_stages=1, disable_licm=True):
                mixed, whole = classify_rows(start, clear, tile, item, head, batch, program, c)
                o_tiles = tl.arange(0, TILES)
                for _ in tl.range(0, tl.sum((mixed >> o_tiles) & 1, 0), disable_licm=True):
                    m = start + lowest_bit(mixed) * c.BM
                    mixed = mixed & (mixed - 1)
                    sums = tile_of_queries(sums, m, head, tile, item, sides, batch, program, True, VALUES, c)
                for _ in tl.range(0, tl.sum((whole >> o_tiles) & 1, 0), disable_licm=True):
                    m = start + lowest_bit(whole) * c.BM
                    whole = whole & (whole - 1)
                    sums = tile_of_queries(sums, m, head, tile, item, sides, batch, program, False, VALUES, c)
        else:
            # masked from first to last: a second loop takes more registers than a comparison
            for m in tl.range(first, item.q_len, c.BM, disable_licm=True):
                sums = tile_of_queries(sums, m, head, tile, item, sides, batch, program, c.CAUSAL, VALUES, c)
    return sums


@triton.jit
def classify_rows(start, clear, tile: KeyTile, item: Item, head, batch: Batch, program: Program, c: Config):
    """The TILES blocks of rows from row `start` on as two sets of bits: (partly, wholly visible)."""
    o_tiles = tl.arange(0, TILES)
    m = start + o_tiles * c.BM
    m_tile = m < item.q_len
    if program.p_classes is None:
        low = item.q_start + m
        high = item.q_start + tl.minimum(m + c.BM, item.q_len) - 1
        j_low, j_high = batch.k_start + tile.n + 0 * m, batch.k_start + tile.end - 1 + 0 * m
        partly, wholly = c.bounds(
            item.name, head, head, low, high, j_low, j_high, program.p_ints, program.p_floats, 128
        )  # fmt: skip
    else:
        i_block = item.i_item * program.c_item + head * program.c_head + m // c.BM
        p_class = program.p_classes + (i_block * program.chunks + tile.n // (TILES * c.BN)) * 2
        bit = (tile.n // c.BN % TILES).to(tl.int32)
        partly = (tl.load(p_class, mask=m_tile, other=0) >> bit) & 1 != 0
        wholly = (tl.load(p_class + 1, mask=m_tile, other=0) >> bit) & 1 != 0
    some = m_tile & partly
    every = some & wholly & (m >= clear)
    whole = tl.sum(every.to(tl.int32) << o_tiles, 0)
    return tl.sum(some.to(tl.int32) << o_tiles, 0) ^ whole, whole


@triton.jit
def tile_of_queries(
    sums: Sums, m, head, tile: KeyTile, item: Item, sides: Sides, batch: Batch, program: Program, MASKED: tl.constexpr,
    VALUES: tl.constexpr, c: Config,
):  # fmt: skip
    """The sums of dK and dV with rows m … m + BM - 1 of a head added. What rows past the last hold is hidden."""
    token = m + tl.arange(0, c.BM).to(tl.int64)
    rows = Rows(token, token, token < item.q_len)
    of_rows = load_queries(sides, item, rows, head, batch.k_start, c)
    o_n = tile.n + tl.arange(0, c.BN).to(tl.int64)
    invariants = (0,)
    if c.apply is not None:
        invariants = c.invariants(item.name, head, of_rows.position[None, :], program.p_ints, program.p_floats)
    at = Place(
        item.name, head, of_rows.position[None, :], (batch.k_start + o_n)[:, None],
        tl.arange(0, c.BN)[:, None] < keys_from(tile.n, of_rows.limit, c.BN)[None, :], invariants,
    )  # fmt: skip
    keep = None
    if program.dropout.seed_low is not None:
        heads = tl.zeros_like(token) + head
        keep = keeps(item.name, heads, of_rows.position, batch.k_start + tile.n, program.dropout, c.BN)
        keep = tl.trans(keep)
    x, dp = dot(tile.b_k, tl.trans(of_rows.b_q), c.PRECISION), dot(tile.b_v, tl.trans(of_rows.b_d_out), c.PRECISION)
    lse, delta = of_rows.lse[None, :], of_rows.delta[None, :]
    found = weigh(x, dp, lse, delta, keep, at, sides.drop_factor, program, MASKED, c)
    if VALUES == CODES:
        p_q = head_of(sides.q, item.i_item, head, item.o_q + m)
        p_d_out = head_of(sides.d_out, item.i_item, head, item.o_q + m)
        count = item.q_len - m
        dk = add_nonfinite(sums.dk, found.raw, found.seen, sides.q, p_q, count, c.D, c.BLOCK_D, c.BM)
        dv = add_nonfinite(sums.dv, found.p, found.seen, sides.d_out, p_d_out, count, c.DV, c.BLOCK_DV, c.BM)
    else:
        dv = add_product(sums.dv, found.p, of_rows.b_d_out, VALUES, c.PRECISION)
        dk = add_product(sums.dk, found.raw, of_rows.b_q, VALUES, c.PRECISION)
    return Sums(dk, dv)


# --- what flows to entries of a table


@triton.jit
def block_of_entries(pid, sides: Sides, batch: Batch, program: Program, c: Config):
    block = locate_block(pid, batch, None, c)
    item, rows = block.item, locate_rows(block, c)
    if block.i_rows * c.BM < item.q_len:
        keys = tile_range(block, rows, batch, c)
        of_rows = load_queries(sides, item, rows, block.i_heads.to(tl.int64), batch.k_start, c)
        sums = RowSums(tl.zeros([c.BM], tl.float64), tl.zeros([c.BM], tl.int64))
        sums = over_keys(sums, block, keys, of_rows, sides, batch, program, ENTRIES, c)
        if c.SPREAD == ROWS:
            o_row = (pid - sides.terms.first).to(tl.int64) * c.BM + tl.arange(0, c.BM)
            tl.store(sides.terms.p_value + o_row, sums.total, mask=rows.m_row)
            tl.store(sides.terms.p_index + o_row, sums.index.to(tl.int32), mask=rows.m_row)


@triton.jit
def add_terms(acc: RowSums, x, found: Weighed, at: Place, n, terms: Terms, program: Program, c: Config):
    """Adds the terms of a tile of keys to sums of rows; or stores them, for each key or each pair."""
    index, value = c.entry(
        found.raw, x, at.item, at.head, at.position, at.key, program.scale, at.invariants, program.p_ints,
        program.p_floats,
    )  # fmt: skip
    value = tl.where(found.seen, value, 0.0)
    if c.SPREAD == ROWS:
        index = tl.reshape(index + tl.zeros([c.BM, 1], tl.int64), [c.BM])
        acc = RowSums(acc.total + tl.sum(value, 1), index)
    else:
        i_block = tl.program_id(0).to(tl.int64)
        o_n = n + tl.arange(0, c.BN).to(tl.int64)
        if c.SPREAD == KEYS:
            index = tl.reshape(index + tl.zeros([1, c.BN], tl.int64), [c.BN])
            index = tl.where(tl.max(found.seen.to(tl.int32), 0) != 0, index, -1)
            tl.store(terms.p_value + i_block * terms.length + o_n, tl.sum(value, 0))
            tl.store(terms.p_index + i_block * terms.length + o_n, index.to(tl.int32))
        else:
            index = tl.where(found.seen, index, -1)
            o_pair = (i_block * c.BM + tl.arange(0, c.BM))[:, None] * terms.length + o_n[None, :]
            tl.store(terms.p_value + o_pair, value)
            tl.store(terms.p_index + o_pair, index.to(tl.int32))
    return acc


@triton.jit(do_not_specialize=["entries"])
def sum_terms(values, order, starts, total, entries, ENTRIES_AT_ONCE: tl.constexpr, TERMS: tl.constexpr):
    """Adds to each entry its terms, which `order` brings together: entry e has those from starts[e] on."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES_AT_ONCE + tl.arange(0, ENTRIES_AT_ONCE)
    there = entry < entries
    first = tl.load(starts + entry, mask=there, other=0)
    count = tl.load(starts + entry + 1, mask=there, other=0) - first
    acc = tl.load(total + entry, mask=there, other=0.0)
    for t in tl.range(0, tl.max(count, 0), TERMS):
        o_t = t + tl.arange(0, TERMS)
        m = o_t[None, :] < count[:, None]
        at = tl.load(order + first[:, None] + o_t[None, :], mask=m, other=0)
        acc += tl.sum(tl.load(values + at, mask=m, other=0.0), 1)
    tl.store(total + entry, acc, mask=there)


# --- delta, and gradients of sinks


@triton.jit(do_not_specialize=["q_len", "blocks"])
def sum_rows(
    out, o_item, o_head, o_row, o_column, d_out, g_item, g_head, g_row, g_column,
    lse, l_item, l_head, l_row, d_lse, e_item, e_head, e_row, delta, d_item, d_head, d_row,
    sinks, shares, items, q_len, heads, blocks,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """delta of a block of rows of a head; with sinks also the block's share of its sink's gradient, in float64."""
    pid = tl.program_id(0)
    head = (pid // blocks % heads).to(tl.int64)
    batch = Batch(items, None, q_len, 0, 0, 0, 0, None, heads, 1, 1, 1)
    item = locate_item((pid // blocks // heads).to(tl.int64), batch, None, ARRAYS)
    token = (pid % blocks).to(tl.int64) * BM + tl.arange(0, BM)
    m_row, o_dv = token < item.q_len, tl.arange(0, BLOCK_DV).to(tl.int64)
    outs, flows = Tensor(out, o_item, o_head, o_row, o_column), Tensor(d_out, g_item, g_head, g_row, g_column)
    p_out = head_of(outs, item.i_item, head, item.o_q)
    p_flow = head_of(flows, item.i_item, head, item.o_q)
    b_out = load_rows(p_out, token * o_row, o_dv, o_column, m_row, DV, BLOCK_DV, True)
    b_flow = load_rows(p_flow, token * g_row, o_dv, g_column, m_row, DV, BLOCK_DV, True)
    total = tl.sum(b_out.to(tl.float32) * b_flow.to(tl.float32), 1)
    of_lse = tl.zeros([BM], tl.float32)
    if d_lse is not None:
        p_flow = head_of(Tensor(d_lse, e_item, e_head, e_row, 1), item.i_item, head, item.o_q) + token * e_row
        of_lse = tl.load(p_flow, mask=m_row, other=0.0)
    p_delta = head_of(Tensor(delta, d_item, d_head, d_row, 1), item.i_item, head, item.o_q) + token * d_row
    tl.store(p_delta, total - of_lse, mask=m_row)
    if sinks is not None:
        p_lse = head_of(Tensor(lse, l_item, l_head, l_row, 1), item.i_item, head, item.o_q) + token * l_row
        of_rows, sink = tl.load(p_lse, mask=m_row, other=float("-inf")), tl.load(sinks + head)
        exponent = sink - of_rows.to(tl.float64)
        exponent = tl.where((tl.abs(of_rows) >= FAR) & (exponent > 0.0), 0.0, exponent)
        seen = (of_rows != float("-inf")) & (sink != float("-inf"))
        total = tl.sum(b_out.to(tl.float64) * b_flow.to(tl.float64), 1) - of_lse.to(tl.float64)
        share = tl.where(seen, -tl.math.exp(tl.where(seen, exponent, 0.0)) * total, 0.0)
        tl.store(shares + pid + tl.arange(0, 1), tl.sum(tl.reshape(share, [1, BM]), 1))
