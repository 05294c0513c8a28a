# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""The attention kernel: a block of query rows of one kv head over tiles of keys, in arrays, pages or a ring.

One kernel serves prefill and decode, arrays, packed sequences, caches and pages; constexpr arguments leave out what a
call does not need. With SPLIT a program takes a run of keys, whose size depends on the sequence's length alone, and
leaves a partial state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .dropping import Dropout, keeps
from .primitives import (
    LN2,
    as_bits,
    count_bits,
    dot,
    exponents,
    finite,
    log_sum_exp,
    nonfinite_code,
    nonfinite_sum,
    online_softmax,
    take_bit,
    widened,
)
from .sequence import (
    FLAG,
    PAGES,
    RECOMPUTE,
    Batch,
    Block,
    Config,
    Pages,
    Range,
    Rows,
    Tensor,
    finish_rows,
    has_rows,
    key_offsets,
    keys_from,
    load_rows,
    locate_block,
    locate_rows,
    tile_range,
    with_sinks,
)
from .splits import first_state

TILES = tl.constexpr(32)  # classified at once: one bit each
# values for VALUES: used as they are, with 0 for the non-finite, or as codes of the non-finite
ORDINARY, FINITE, CODES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    k_scales: Tensor
    v_scales: Tensor
    p_sinks: Any
    divisor: Any  # of results, by dropout
    p_partial: Any
    p_stats: Any


class Program(NamedTuple):
    """Numbers of the mask and the score: a score is `scale` times a product, an exponent `factor` times a score.

    p_classes: of tiles, where the host classifies them: two words for each of the `chunks` runs of tiles of a block.
    """

    factor: Any
    scale: Any
    p_ints: Any
    p_floats: Any
    p_wrong: Any
    p_classes: Any
    c_item: Any
    c_head: Any
    chunks: Any
    dropout: Dropout


class Queries(NamedTuple):
    """The queries of a block, its rows, and the loop-invariant values of their mask and score."""

    b_q: Any
    rows: Rows
    invariants: Any


class Source(NamedTuple):
    """The keys and values that a block reads: pointers to their start (or tensor descriptors), and their range."""

    p_k: Any
    p_v: Any
    p_k_scales: Any
    p_v_scales: Any
    tensors: Tensors
    pages: Pages
    block: Block
    keys: Range
    o_n: Any  # of the keys of a tile, and of elements of keys and values: hoisted out of the loop
    o_d: Any
    o_dv: Any
    k_start: Any


class State(NamedTuple):
    """The state of the online softmax, per row: running_max in units of scores."""

    running_max: Any
    acc: Any
    running_sum: Any


class Values(NamedTuple):
    """The values of a tile: [BN, BLOCK_DV] in their own type; scales [BN] of codes; [BM, BN], which weights dropout
    keeps.
    """

    b_v: Any
    scale: Any
    keep: Any


# sizes that change from step to step: without this, multiples of 16 would compile another kernel
_SIZES = [
    "q_len", "k_len", "q_start", "at_end", "out_rows", "row_blocks", "splits", "table_pages", "page_count", "chunks",
    "blocks", "factor", "scale", "seed_low", "seed_high", "drop_below", "drop_all", "divisor",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def attend(
    q, q_item, q_head, q_row, q_column,
    k, k_item, k_head, k_row, k_column,
    v, v_item, v_head, v_row, v_column,
    out, o_item, o_head, o_row, o_column,
    lse, l_item, l_head, l_row,
    k_scales, v_scales, s_item, s_head, s_row,
    sinks, partial, stats,
    items, lengths, q_len, k_len, q_start, at_end, k_start, out_rows, kv_heads, group, row_blocks, splits,
    pages, page_size, table_row, table_pages, page_count, status, ring_first, ring,
    ints, floats, wrong, classes, c_item, c_head, chunks, factor, scale,
    seed_low, seed_high, drop_below, drop_all, divisor,
    flags, blocks,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PACK: tl.constexpr, CAUSAL: tl.constexpr, SIGN: tl.constexpr, PRECISION: tl.constexpr,
    HIDING: tl.constexpr, NONFINITE: tl.constexpr, SPLIT: tl.constexpr, USE_TMA: tl.constexpr, PRODUCER: tl.constexpr,
    MEMORY: tl.constexpr, invariants: tl.constexpr, apply: tl.constexpr, bounds: tl.constexpr,
):  # fmt: skip
    """Strides are in elements."""
    CODED: tl.constexpr = k_scales is not None
    c: tl.constexpr = Config(
        D, DV, BLOCK_D, BLOCK_DV, BM, BN, PACK, CAUSAL, SIGN, PRECISION, HIDING, NONFINITE, SPLIT, USE_TMA,
        PRODUCER, MEMORY, CODED, invariants, apply, bounds, None, None, None, None,
    )  # fmt: skip
    tensors = Tensors(
        Tensor(q, q_item, q_head, q_row, q_column),
        Tensor(k, k_item, k_head, k_row, k_column),
        Tensor(v, v_item, v_head, v_row, v_column),
        Tensor(out, o_item, o_head, o_row, o_column),
        Tensor(lse, l_item, l_head, l_row, 1),
        Tensor(k_scales, s_item, s_head, s_row, 1),
        Tensor(v_scales, s_item, s_head, s_row, 1),
        sinks,
        divisor,
        partial,
        stats,
    )
    batch = Batch(items, lengths, q_len, k_len, q_start, at_end, k_start, out_rows, kv_heads, group, row_blocks, splits)
    memory = Pages(pages, page_size, table_row, table_pages, page_count, status, ring_first, ring)
    dropout = Dropout(seed_low, seed_high, drop_below, drop_all)
    program = Program(factor, scale, ints, floats, wrong, classes, c_item, c_head, chunks, dropout)
    if NONFINITE == RECOMPUTE:
        if any_flagged(flags, blocks):
            for pid in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
                if tl.load(flags + pid) != 0:
                    attend_block(pid, tensors, batch, memory, program, flags, c)
    else:
        attend_block(tl.program_id(0), tensors, batch, memory, program, flags, c)


@triton.jit
def attend_block(pid, tensors: Tensors, batch: Batch, pages: Pages, program: Program, p_flags, c: Config):
    """One block: of an item and its heads, and with SPLIT of a run of keys."""
    block = locate_block(pid, batch, pages, c)
    if c.PRODUCER:
        # every block has rows, and Triton makes a producer only for a loop outside of conditions
        attend_rows(pid, block, tensors, batch, pages, program, p_flags, c)
    else:
        if has_rows(block, c):
            attend_rows(pid, block, tensors, batch, pages, program, p_flags, c)
        elif c.NONFINITE == FLAG:
            tl.store(p_flags + pid, 0)


@triton.jit
def attend_rows(
    pid, block: Block, tensors: Tensors, batch: Batch, pages: Pages, program: Program, p_flags, c: Config
):  # fmt: skip
    """A block that has rows."""
    item = block.item
    rows = locate_rows(block, c)
    o_n = tl.arange(0, c.BN).to(tl.int64)
    o_d, o_dv = tl.arange(0, c.BLOCK_D).to(tl.int64), tl.arange(0, c.BLOCK_DV).to(tl.int64)
    keys = tile_range(block, rows, batch, c)
    p_k, p_v = head_start(tensors.k, block, c.MEMORY), head_start(tensors.v, block, c.MEMORY)
    p_k_scales, p_v_scales = None, None
    if c.CODED:
        p_k_scales = head_start(tensors.k_scales, block, c.MEMORY)
        p_v_scales = head_start(tensors.v_scales, block, c.MEMORY)
    b_q = load_queries(tensors.q, block, rows, o_d, c)
    if c.USE_TMA:  # rows past the last and columns past D come as zeros
        length = tl.maximum(item.k_len, 1).to(tl.int32)
        p_k = tl.make_tensor_descriptor(p_k, [length, c.D], [tensors.k.row, 1], [c.BN, c.BLOCK_D])
        p_v = tl.make_tensor_descriptor(p_v, [length, c.DV], [tensors.v.row, 1], [c.BN, c.BLOCK_DV])
    invariants = (0,)
    if c.apply is not None:
        head, position = rows.head[:, None], keys.position[:, None]
        invariants = c.invariants(item.name, head, position, program.p_ints, program.p_floats)
    queries = Queries(b_q, rows, invariants)
    source = Source(p_k, p_v, p_k_scales, p_v_scales, tensors, pages, block, keys, o_n, o_d, o_dv, batch.k_start)

    unseen = tl.full([c.BM], float("-inf"), tl.float32)
    state = over_tiles(unseen, queries, source, program, FINITE if c.NONFINITE == RECOMPUTE else ORDINARY, c)
    if c.PRODUCER:
        # beside one Triton cannot reduce rows to a number: flags begin as zeros, and any row sets its block's
        m_bad = tl.sum(state.acc * 0.0, 1) != 0.0
        tl.store(p_flags + pid + tl.zeros([c.BM], tl.int32), tl.full([c.BM], 1, tl.int32), mask=m_bad)
    elif c.NONFINITE == FLAG:
        flag_block(p_flags, pid, state.acc, c.BM)
    p_out = finish_block(state, program.factor, block, rows, tensors, batch, c)
    if c.NONFINITE == RECOMPUTE:
        # non-finite values that a row sees overwrite what was stored for it
        tl.debug_barrier()
        codes = over_tiles(state.running_max, queries, source, program, CODES, c).acc
        m_out = rows.m_row[:, None] & (tl.arange(0, c.BLOCK_DV) < c.DV)[None, :]
        tl.store(p_out, codes.to(p_out.dtype.element_ty), mask=m_out & (codes != 0.0))


@triton.jit
def head_start(tensor: Tensor, block: Block, MEMORY: tl.constexpr):
    """Pointer to the first row of the block's item and kv head; in pages, of the kv head in page 0."""
    o_item = block.item.i_item * tensor.item * (0 if MEMORY == PAGES else 1)
    return tensor.p + o_item + block.kv_head * tensor.head + block.item.o_k * tensor.row


@triton.jit
def load_queries(q: Tensor, block: Block, rows: Rows, o_d, c: Config):
    """[BM, BLOCK_D]"""
    if c.PRODUCER:  # it takes them from shared memory alone
        p_head = q.p + block.item.i_item * q.item + block.i_heads.to(tl.int64) * q.head
        length = block.item.q_len.to(tl.int32)
        d_q = tl.make_tensor_descriptor(p_head, [length, c.D], [q.row, 1], [c.BM, c.BLOCK_D])
        b_q = d_q.load([block.i_rows * c.BM, 0])
    else:
        b_q = load_strided_queries(q, block, rows, o_d, c)
    if c.SIGN != 1:  # the factor is positive: a negative scale turns q around, 0 makes it 0
        b_q = (b_q.to(tl.float32) * c.SIGN).to(b_q.dtype)
    return b_q


@triton.jit
def load_strided_queries(q: Tensor, block: Block, rows: Rows, o_d, c: Config):
    """[BM, BLOCK_D]"""
    p_q = q.p + block.item.i_item * q.item + rows.head[:, None] * q.head + block.item.o_q * q.row
    return load_rows(p_q, rows.token * q.row, o_d, q.column, rows.m_row, c.D, c.BLOCK_D, True)


@triton.jit
def over_tiles(running_max, queries: Queries, source: Source, program: Program, VALUES: tl.constexpr, c: Config):
    """The state after all tiles of the block; for CODES, running_max is the last one already."""
    keys = source.keys
    state = State(running_max, tl.zeros([c.BM, c.BLOCK_DV], tl.float32), tl.zeros([c.BM], tl.float32))
    if c.PRODUCER:  # one loop, since two beside each other end Triton 3.6
        for n in tl.range(keys.first, keys.end, c.BN, warp_specialize=True):
            state = one_tile(state, n, queries, source, program, c.CAUSAL, VALUES, c)
    elif c.HIDING:
        for first in tl.range(keys.first, keys.end, TILES * c.BN, num_stages=1):
            # out of the inner loops nothing is hoisted: what both share takes more registers than there are
            mixed, whole = classify(first, source.block, keys, source.k_start, program, c)
            for WHOLE in tl.static_range(2):
                bits = whole if WHOLE else mixed
                for _ in tl.range(0, count_bits(bits), disable_licm=True):
                    tile, bits = take_bit(bits)
                    state = one_tile(state, first + tile * c.BN, queries, source, program, not WHOLE, VALUES, c)
    else:
        for n in tl.range(keys.first, keys.clear, c.BN):
            state = one_tile(state, n, queries, source, program, False, VALUES, c)
        for n in tl.range(keys.clear, keys.end, c.BN):
            state = one_tile(state, n, queries, source, program, True, VALUES, c)
    return state


@triton.jit
def classify(first, block: Block, keys: Range, k_start, program: Program, c: Config):
    """The TILES tiles from key `first` on as two sets of bits: (partly, wholly visible)."""
    o_tiles = tl.arange(0, TILES)
    j = first + o_tiles * c.BN
    m_tile = j < keys.end
    if program.p_classes is None:
        h_low = block.i_heads * c.PACK
        j_low, j_high = k_start + j, k_start + tl.minimum(j + c.BN, keys.end) - 1
        partly, wholly = c.bounds(
            block.item.name, h_low, h_low + c.PACK - 1, keys.low, keys.high, j_low, j_high,
            program.p_ints, program.p_floats, 128,
        )  # fmt: skip
        whole = as_bits(m_tile & partly & wholly & (j < keys.clear), o_tiles)
        mixed = as_bits(m_tile & partly, o_tiles) ^ whole
    else:
        i_block = block.item.i_item * program.c_item + block.i_heads * program.c_head + block.i_rows
        p_class = program.p_classes + (i_block * program.chunks + first // (TILES * c.BN)) * 2
        partly, wholly = tl.load(p_class), tl.load(p_class + 1)
        whole = partly & wholly & as_bits(m_tile & (j < keys.clear), o_tiles)
        mixed = (partly & as_bits(m_tile, o_tiles)) ^ whole
    return mixed, whole


@triton.jit
def one_tile(
    state: State, n, queries: Queries, source: Source, program: Program, MASKED: tl.constexpr, VALUES: tl.constexpr,
    c: Config,
):  # fmt: skip
    """The state with keys n … n + BN - 1 added."""
    tensors, pages, keys, i_item = source.tensors, source.pages, source.keys, source.block.item.i_item
    rows, b_q, end = queries.rows, queries.b_q, keys.end
    PREDICATED: tl.constexpr = MASKED or c.MEMORY == PAGES
    m_n = n + source.o_n < end
    if c.USE_TMA:
        b_k = source.p_k.load([tl.cast(n, tl.int32), 0])
    else:
        o_k = key_offsets(n + source.o_n, end, tensors.k, i_item, pages, c.MEMORY)
        b_k = load_rows(source.p_k, o_k, source.o_d, tensors.k.column, m_n, c.D, c.BLOCK_D, PREDICATED)
    b_k = widened(b_k, b_q.dtype)
    x = dot(b_q, tl.trans(b_k), c.PRECISION)
    o_n = n + source.o_n  # here, not above the load of keys: registers
    if c.CODED:
        o_s = key_offsets(o_n, end, tensors.k_scales, i_item, pages, c.MEMORY)
        x = x * tl.load(source.p_k_scales + o_s, mask=m_n, other=0.0)[None, :]
    if c.apply is not None:
        x = c.apply(
            x, source.block.item.name, rows.head[:, None], keys.position[:, None], (source.k_start + o_n)[None, :],
            o_n[None, :] < keys.limit[:, None], program.scale, queries.invariants,
            program.p_ints, program.p_floats, program.p_wrong, MASKED,
        )  # fmt: skip
    elif MASKED:
        if c.USE_TMA:  # 32 bits take fewer registers beside descriptors, 64 bits beside addresses
            x = tl.where(tl.arange(0, c.BN)[None, :] < keys_from(n, keys.limit, c.BN)[:, None], x, float("-inf"))
        else:
            x = tl.where(o_n[None, :] < keys.limit[:, None], x, float("-inf"))
    if c.USE_TMA:
        b_v = source.p_v.load([tl.cast(n, tl.int32), 0])
    else:
        o_v = key_offsets(o_n, end, tensors.v, i_item, pages, c.MEMORY)
        b_v = load_rows(source.p_v, o_v, source.o_dv, tensors.v.column, m_n, c.DV, c.BLOCK_DV, PREDICATED)
    v_scale = None
    if c.CODED:
        v_scale = tl.load(source.p_v_scales + o_s, mask=m_n, other=0.0)
    keep = None
    if program.dropout.seed_low is not None:
        first = source.k_start + n
        keep = keeps(source.block.item.name, rows.head, keys.position, first, program.dropout, c.BN)
    values = Values(b_v, v_scale, keep)
    if VALUES == CODES:
        acc = state.acc + code_sums(x, state.running_max, program.factor, values)
        return State(state.running_max, acc, state.running_sum)
    else:
        return add_tile(state, x, program.factor, b_q.dtype, values, VALUES, c.PRECISION)


@triton.jit
def add_tile(
    state: State, x, factor, dtype: tl.constexpr, values: Values, VALUES: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The online softmax: the state with scores x [BM, BN] and values added."""
    p, running_max, running_sum, alpha = online_softmax(x, factor, state.running_max, state.running_sum)
    if values.keep is not None:
        p = tl.where(values.keep, p, 0.0)
    if values.scale is not None:
        p = p * (finite(values.scale) if VALUES == FINITE else values.scale)[None, :]
    operand = widened(values.b_v, dtype)
    if values.scale is not None and dtype == tl.float16:
        operand = widened(values.b_v, tl.bfloat16)  # codes are exact in it, and a scale may be any float32
    if VALUES == FINITE:
        operand = finite(operand.to(tl.float32)).to(operand.dtype)
    if dtype == tl.float32:  # a short chain of sums in the tile, then one over tiles
        acc = state.acc * alpha[:, None] + dot(p, operand, PRECISION)
    else:
        acc = tl.dot(p.to(operand.dtype), operand, state.acc * alpha[:, None])
    return State(running_max, acc, running_sum)


@triton.jit
def code_sums(x, running_max, factor, values: Values):
    """Sums of the non-finite values that each row sees, [BM, BLOCK_DV]; 0 elsewhere."""
    by, base = exponents(running_max, factor)
    # a weight that is 0 makes NaN of an infinity: codes in units of NaN's
    weight = tl.where(tl.math.exp2(x * by[:, None] - base[:, None]) == 0.0, 2097152.0, 1.0)
    if values.keep is not None:
        weight = tl.where(values.keep, weight, 2097152.0)
    weight = tl.where(x == float("-inf"), 0.0, weight)
    b_v = widened(values.b_v, tl.float32)
    if values.scale is not None:
        b_v = b_v * values.scale[:, None]
    return nonfinite_sum(dot(weight.to(tl.bfloat16), nonfinite_code(b_v).to(tl.bfloat16), "ieee"))


@triton.jit
def any_flagged(flags, blocks):
    """Returns whether a block has a flag: the few programs of a repair usually exit."""
    o_flags = tl.arange(0, 4096)
    flagged = 0
    for i in tl.range(0, blocks, 4096):
        flagged = tl.maximum(flagged, tl.max(tl.load(flags + i + o_flags, mask=i + o_flags < blocks, other=0), 0))
    return flagged != 0


@triton.jit
def flag_block(p_flags, pid, acc, BM: tl.constexpr):
    """Flags a block with a non-finite result: 0 · NaN is NaN, so hidden values may have reached it."""
    m_bad = tl.where(tl.sum(acc * 0.0, 1) == 0.0, 0, 1)
    # a reduction to a scalar crashes Triton 3.6 for sm_100
    m_bad = tl.reshape(m_bad, [1, BM])
    tl.store(p_flags + pid + tl.arange(0, 1), tl.max(m_bad, 1))


@triton.jit
def finish_block(state: State, factor, block: Block, rows: Rows, tensors: Tensors, batch: Batch, c: Config):
    """Stores results, or with SPLIT states; padding rows are 0 and -inf. Returns the pointers of results."""
    item = block.item
    # from here on the maximum is a logit
    running_max = state.running_max
    running_max = tl.where(running_max == float("-inf"), running_max, running_max * (factor * LN2))
    acc = tl.where(rows.m_row[:, None], state.acc, 0.0)
    running_sum = tl.where(rows.m_row, state.running_sum, 0.0)
    running_max = tl.where(rows.m_row, running_max, float("-inf"))
    o_dv = tl.arange(0, c.BLOCK_DV).to(tl.int64)
    m_token = rows.token < item.out_len
    m_out = m_token[:, None] & (o_dv < c.DV)[None, :]
    if c.SPLIT:
        i_row = block.i_rows * c.BM + tl.arange(0, c.BM)
        i_state = first_state(item.i_item, block.kv_head, batch) + block.i_split
        i_state = i_state * (batch.row_blocks * c.BM) + i_row
        p_out = tensors.p_partial + i_state[:, None] * c.DV + o_dv[None, :]
        tl.store(p_out, acc, mask=m_out)
        tl.store(tensors.p_stats + i_state * 2, running_max, mask=m_token)
        tl.store(tensors.p_stats + i_state * 2 + 1, running_sum, mask=m_token)
    else:
        if tensors.p_sinks is not None:
            acc, running_max, running_sum = with_sinks(acc, running_max, running_sum, rows, tensors.p_sinks)
        result = finish_rows(acc, running_sum, tensors.divisor)
        out, lse = tensors.out, tensors.lse
        o_token = item.o_q + rows.token
        p_out = out.p + item.i_item * out.item + o_token[:, None] * out.row + rows.head[:, None] * out.head
        p_out = p_out + o_dv[None, :] * out.column
        tl.store(p_out, result.to(out.p.dtype.element_ty), mask=m_out)
        if lse.p is not None:
            p_lse = lse.p + item.i_item * lse.item + rows.head * lse.head + o_token * lse.row
            tl.store(p_lse, log_sum_exp(running_max, running_sum), mask=m_token)
    return p_out
