# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""The backward kernel, for one of three ends. OF_KEYS: a program owns a tile of keys, walks the queries of all heads of
the group in order, and makes dK and dV. OF_ROWS: it owns a block of rows, walks the keys, and makes dQ. OF_ENTRIES: as
that, for what flows to the entries of a table, which gradient_sums.py adds. No sum is shared, so bits never change.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dropping import Dropout
from .forward import CODES, FINITE, ORDINARY, TILES, Program, any_flagged, classify, flag_block
from .gradient_tiles import (
    ENTRIES,
    ROWS,
    KeyTile,
    Operands,
    RowSums,
    Sides,
    Sums,
    Terms,
    head_of,
    load_keys,
    load_queries,
    tile_of_keys,
    tile_of_queries,
)
from .primitives import as_bits, count_bits, take_bit
from .sequence import (
    ARRAYS,
    FLAG,
    RECOMPUTE,
    Batch,
    Config,
    Item,
    Tensor,
    locate_block,
    locate_item,
    locate_rows,
    tile_range,
)

OF_ROWS, OF_KEYS, OF_ENTRIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # values for END

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
        D, DV, BLOCK_D, BLOCK_DV, BM, BN, 1, CAUSAL, 1, PRECISION, HIDING, NONFINITE, False, False, False,
        ARRAYS, False, invariants, apply, bounds, SCORED, back, entry, SPREAD,
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
        for first in tl.range(keys.first, keys.end, TILES * c.BN, num_stages=1, disable_licm=True):
            mixed, whole = classify(first, block, keys, batch.k_start, program, c)
            for WHOLE in tl.static_range(2):
                bits = whole if WHOLE else mixed
                for _ in tl.range(0, count_bits(bits), disable_licm=True):
                    tile, bits = take_bit(bits)
                    n = first + tile * c.BN
                    acc = tile_of_keys(acc, n, block, keys, of_rows, sides, batch, program, not WHOLE, VALUES, c)
    else:
        for n in tl.range(keys.first, keys.clear, c.BN, disable_licm=True):
            acc = tile_of_keys(acc, n, block, keys, of_rows, sides, batch, program, False, VALUES, c)
        for n in tl.range(keys.clear, keys.end, c.BN, disable_licm=True):
            acc = tile_of_keys(acc, n, block, keys, of_rows, sides, batch, program, True, VALUES, c)
    return acc


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
                for WHOLE in tl.static_range(2):
                    bits = whole if WHOLE else mixed
                    for _ in tl.range(0, count_bits(bits), disable_licm=True):
                        block, bits = take_bit(bits)
                        m = start + block * c.BM
                        sums = tile_of_queries(sums, m, head, tile, item, sides, batch, program, not WHOLE, VALUES, c)
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
    whole = as_bits(every, o_tiles)
    return as_bits(some, o_tiles) ^ whole, whole


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
