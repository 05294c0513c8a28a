# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""The attention kernel: a block of query rows of one kv head over tiles of keys, wherever those lie.

One kernel serves prefill and decode, arrays, packed sequences, caches and pages; constexpr arguments leave out what a
call does not need. A row is a (token, head): with PACK > 1 the heads of a group share a block, row r is token r //
PACK. With SPLIT a program takes a run of keys, whose size depends on the sequence's length alone, and leaves a partial
state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import (
    LN2,
    LOG2E,
    dot,
    exponents,
    finite,
    finite_max,
    log_sum_exp,
    lowest,
    online_softmax,
    outcome,
    packed,
    unusual,
)

ITEM = tl.constexpr(
    6
)  # words of an item: q_len, k_len, position of its first query, its first row of q and of k, what masks call it
TILES = tl.constexpr(32)  # that are classified at once
FLAGGED, AFTERWARDS = tl.constexpr(1), tl.constexpr(2)  # values for REPAIR
ARRAYS, PAGES, RING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # values for WHERE: how keys and values lie
PLAIN, FINITE, UNUSUAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what is made of values


@triton.jit
def split_size(k_len):
    """Keys of a split: about a 64th of the sequence, between 256 and 2048."""
    return tl.minimum(tl.maximum((k_len + 8191) // 8192 * 128, 256), 2048)


@triton.jit
def places(
    first,
    o_n,
    end,
    pages,
    page_size,
    p_item,
    p_row,
    item,
    WHERE: tl.constexpr,
    table_row,
    page_count,
    status,
    ring_first,
    ring,
):
    """Where keys first + o_n lie, in elements from their head's start."""
    n = first + o_n
    if WHERE == PAGES:
        held = n < end
        page = tl.load(pages + item * table_row + n // page_size, mask=held, other=0).to(tl.int64)
        wrong = held & ((page < 0) | (page >= page_count))
        tl.store(status + tl.zeros_like(wrong.to(tl.int32)), tl.full(wrong.shape, 2, tl.int32), mask=wrong)
        return tl.where(wrong, 0, page) * p_item + (n % page_size) * p_row
    elif WHERE == RING:  # the first stay where they are, the others come round
        return tl.where(n < ring_first, n, ring_first + (n - ring_first) % ring) * p_row
    else:
        return n * p_row


@triton.jit
def load_rows(base, at, o_d, column, held, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK] of an array; zeros past WIDTH, and in rows that are not held where MASKED."""
    p = base + at[:, None] + o_d[None, :] * column
    if MASKED and WIDTH != BLOCK:
        return tl.load(p, mask=held[:, None] & (o_d < WIDTH)[None, :], other=0.0)
    elif MASKED:
        return tl.load(p, mask=held[:, None], other=0.0)
    elif WIDTH != BLOCK:
        return tl.load(p, mask=(o_d < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(p)


# sizes that change from step to step: a kernel is not compiled anew for those that 16 divides
_SIZES = [
    "q_len",
    "k_len",
    "q_start",
    "out_rows",
    "row_blocks",
    "splits",
    "table_pages",
    "page_count",
    "chunks",
    "blocks",
    "factor",
    "scale",
]


@triton.jit(do_not_specialize=_SIZES)
def attend(
    q,
    k,
    v,
    out,
    lse,
    sinks,
    items,
    lengths,
    pages,
    k_scales,
    v_scales,
    partial,
    stats,
    ints,
    floats,
    wrong,
    status,
    classes,
    flags,
    q_item,
    q_head,
    q_row,
    q_column,
    k_item,
    k_head,
    k_row,
    k_column,
    v_item,
    v_head,
    v_row,
    v_column,
    o_item,
    o_head,
    o_row,
    o_column,
    l_item,
    l_head,
    l_row,
    s_item,
    s_head,
    s_row,
    q_len,
    k_len,
    q_start,
    k_start,
    out_rows,
    kv_heads,
    group,
    row_blocks,
    splits,
    page_size,
    table_row,
    table_pages,
    page_count,
    ring_first,
    ring,
    c_item,
    c_head,
    chunks,
    blocks,
    factor,
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PACK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDING: tl.constexpr,
    REPAIR: tl.constexpr,
    known: tl.constexpr,
    apply: tl.constexpr,
    bounds: tl.constexpr,
    SPLIT: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WHERE: tl.constexpr,
):
    """Strides are in elements.

    HIDING: tiles are classified. REPAIR: who mends what hidden values that are not finite have done.
    """
    pointers = (
        q,
        k,
        v,
        out,
        lse,
        sinks,
        items,
        lengths,
        pages,
        k_scales,
        v_scales,
        partial,
        stats,
        ints,
        floats,
        wrong,
        status,
        classes,
    )
    strides = (
        (q_item, q_head, q_row, q_column),
        (k_item, k_head, k_row, k_column),
        (v_item, v_head, v_row, v_column),
        (o_item, o_head, o_row, o_column),
        (l_item, l_head, l_row),
        (s_item, s_head, s_row),
    )
    sizes = (
        q_len,
        k_len,
        q_start,
        k_start,
        out_rows,
        kv_heads,
        group,
        row_blocks,
        splits,
        page_size,
        table_row,
        table_pages,
        page_count,
        ring_first,
        ring,
        c_item,
        c_head,
        chunks,
    )
    if REPAIR == AFTERWARDS:
        # a few programs look whether any block wants it: nearly always none does
        o_flags = tl.arange(0, 4096)
        some = 0
        for at in tl.range(0, blocks, 4096):
            some = tl.maximum(some, tl.max(tl.load(flags + at + o_flags, mask=at + o_flags < blocks, other=0), 0))
        if some != 0:
            for pid in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
                if tl.load(flags + pid) != 0:
                    block_of_rows(
                        pid,
                        pointers,
                        strides,
                        sizes,
                        factor,
                        scale,
                        flags,
                        D,
                        DV,
                        BLOCK_D,
                        BLOCK_DV,
                        BM,
                        BN,
                        PACK,
                        CAUSAL,
                        SIGN,
                        PRECISION,
                        HIDING,
                        REPAIR,
                        known,
                        apply,
                        bounds,
                        SPLIT,
                        DESCRIBED,
                        WHERE,
                    )
    else:
        block_of_rows(
            tl.program_id(0),
            pointers,
            strides,
            sizes,
            factor,
            scale,
            flags,
            D,
            DV,
            BLOCK_D,
            BLOCK_DV,
            BM,
            BN,
            PACK,
            CAUSAL,
            SIGN,
            PRECISION,
            HIDING,
            REPAIR,
            known,
            apply,
            bounds,
            SPLIT,
            DESCRIBED,
            WHERE,
        )


@triton.jit
def block_of_rows(
    pid,
    pointers,
    strides,
    sizes,
    factor,
    scale,
    flags,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PACK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDING: tl.constexpr,
    REPAIR: tl.constexpr,
    known: tl.constexpr,
    apply: tl.constexpr,
    bounds: tl.constexpr,
    SPLIT: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WHERE: tl.constexpr,
):
    """One block: of an item and a head, and with SPLIT of a run of keys."""
    (
        q,
        k,
        v,
        out,
        lse,
        sinks,
        items,
        lengths,
        pages,
        k_scales,
        v_scales,
        partial,
        stats,
        ints,
        floats,
        wrong,
        status,
        classes,
    ) = pointers
    q_item, q_head, q_row, q_column = strides[0]
    k_item, k_head, k_row, k_column = strides[1]
    v_item, v_head, v_row, v_column = strides[2]
    o_item, o_head, o_row, o_column = strides[3]
    l_item, l_head, l_row = strides[4]
    s_item, s_head, s_row = strides[5]
    (
        q_len,
        k_len,
        q_start,
        k_start,
        out_rows,
        kv_heads,
        group,
        row_blocks,
        splits,
        page_size,
        table_row,
        table_pages,
        page_count,
        ring_first,
        ring,
        c_item,
        c_head,
        chunks,
    ) = sizes
    PAGED: tl.constexpr = WHERE == PAGES
    CODED: tl.constexpr = k_scales is not None
    # blocks of one head follow each other, so that its keys stay in the cache; with causal, the longest first
    split = pid % splits
    block = row_blocks - 1 - pid // splits % row_blocks
    head = pid // splits // row_blocks % (kv_heads * group // PACK)  # of blocks: PACK query heads each
    item = (pid // splits // row_blocks // (kv_heads * group // PACK)).to(tl.int64)
    kv_head = (head * PACK // group).to(tl.int64)
    q_first, k_first, name = item * 0, item * 0, item
    k_len, q_start, q_len = item * 0 + k_len, item * 0 + q_start, item * 0 + q_len
    if items is not None:
        q_len, k_len, q_start = (
            tl.load(items + item * ITEM),
            tl.load(items + item * ITEM + 1),
            tl.load(items + item * ITEM + 2),
        )
        q_first, k_first, name = (
            tl.load(items + item * ITEM + 3),
            tl.load(items + item * ITEM + 4),
            tl.load(items + item * ITEM + 5),
        )
    if lengths is not None:  # they grow on the device
        k_len = tl.load(lengths + item).to(tl.int64)
        if PAGED:
            lost = (k_len < 0) | (k_len > table_pages.to(tl.int64) * page_size)
            if lost:
                tl.store(status, 4)
            k_len = tl.where(lost, 0, k_len)
        q_start = k_len - q_len
    out_len = q_len
    if out_rows is not None:
        out_len = item * 0 + out_rows

    o_m = block * BM + tl.arange(0, BM)
    o_n = tl.arange(0, BN).to(tl.int64)
    o_d, o_dv = tl.arange(0, BLOCK_D).to(tl.int64), tl.arange(0, BLOCK_DV).to(tl.int64)
    token, heads = (o_m // PACK).to(tl.int64), (head * PACK + o_m % PACK).to(tl.int64)
    asked = token < q_len
    live = block * BM < out_len * PACK
    if SPLIT:
        live = live & (split * split_size(k_len) < k_len)
    if live:
        first, end = item * 0, k_len
        if SPLIT:
            size = split_size(k_len)
            first = split * size
            end = tl.minimum(k_len, first + size)
        position = q_start + token
        low = q_start + block * BM // PACK  # positions of the first and the last row
        high = q_start + tl.minimum((block * BM + BM - 1) // PACK, q_len - 1)
        limit = tl.where(asked, k_len, 0)
        least = k_len
        if CAUSAL:
            limit = tl.minimum(limit, tl.maximum(position - k_start + 1, 0))
            least = tl.minimum(k_len, tl.maximum(low - k_start + 1, 0))
            end = tl.minimum(end, tl.maximum(high - k_start + 1, 0))
        end = tl.where(block * BM < q_len * PACK, end, first)
        # a tile is visible as a whole below `clear`
        clear = tl.minimum(tl.maximum(tl.minimum(least, end) // BN * BN, first), end)

        base_k = k + item * k_item * (0 if PAGED else 1) + kv_head * k_head + k_first * k_row
        base_v = v + item * v_item * (0 if PAGED else 1) + kv_head * v_head + k_first * v_row
        base_ks, base_vs = k_scales, v_scales
        if CODED:
            base_ks = k_scales + item * s_item * (0 if PAGED else 1) + kv_head * s_head
            base_vs = v_scales + item * s_item * (0 if PAGED else 1) + kv_head * s_head
        queries = load_rows(
            q + item * q_item + heads[:, None] * q_head + q_first * q_row,
            token * q_row,
            o_d,
            q_column,
            asked,
            D,
            BLOCK_D,
            True,
        )
        if SIGN != 1:  # the factor is positive: a negative scale turns q around, 0 makes it 0
            queries = (queries.to(tl.float32) * SIGN).to(queries.dtype)
        rows = (item, name, heads, position, limit)
        if DESCRIBED:  # rows past the last and columns past D come as zeros
            base_k = tl.make_tensor_descriptor(
                base_k, [tl.maximum(k_len, 1).to(tl.int32), D], [k_row, 1], [BN, BLOCK_D]
            )
            base_v = tl.make_tensor_descriptor(
                base_v, [tl.maximum(k_len, 1).to(tl.int32), DV], [v_row, 1], [BN, BLOCK_DV]
            )
        keys = (base_k, k_row, k_column, base_ks, k_item)
        values = (base_v, v_row, v_column, base_vs, v_item)
        place = (
            pages,
            page_size,
            table_row,
            page_count,
            status,
            s_item,
            s_row,
            k_start,
            end,
            factor,
            scale,
            ints,
            floats,
            wrong,
            ring_first,
            ring,
        )
        known_values = (0,)
        if apply is not None:
            known_values = known(name, heads[:, None], position[:, None], ints, floats)
        box = (
            name,
            head * PACK,
            head * PACK + PACK - 1,
            low,
            high,
            (item * c_item + head * c_head + block) * chunks,
            classes,
        )

        nothing = tl.full([BM], float("-inf"), tl.float32)
        acc, running_max, running_sum = over_tiles(
            queries,
            rows,
            keys,
            values,
            place,
            known_values,
            box,
            nothing,
            first,
            clear,
            o_n,
            o_d,
            o_dv,
            FINITE if REPAIR == AFTERWARDS else PLAIN,
            D,
            DV,
            BLOCK_D,
            BLOCK_DV,
            BM,
            BN,
            WHERE,
            CODED,
            PRECISION,
            HIDING,
            known,
            apply,
            bounds,
            DESCRIBED,
        )
        if REPAIR == FLAGGED:
            # 0 · NaN is NaN: values that are not finite may have reached rows from which they are hidden
            sound = tl.sum(acc * 0.0, 1)  # NaN in rows that have one
            at_once = tl.reshape(
                tl.where(sound == 0.0, 0, 1), [1, BM]
            )  # a reduction to a scalar crashes Triton 3.6 for sm_100
            tl.store(flags + pid + tl.arange(0, 1), tl.max(at_once, 1))
        final_max = running_max
        running_max = tl.where(
            running_max == float("-inf"), running_max, running_max * (factor * LN2)
        )  # from here on a logit
        acc = tl.where(asked[:, None], acc, 0.0)
        running_sum = tl.where(asked, running_sum, 0.0)
        running_max = tl.where(asked, running_max, float("-inf"))
        m_out = (token < out_len)[:, None] & (o_dv < DV)[None, :]
        if SPLIT:
            row = ((item * kv_heads + kv_head) * splits + split) * (row_blocks * BM) + o_m
            p_out = partial + row[:, None] * DV + o_dv[None, :]
            tl.store(p_out, acc, mask=m_out)
            tl.store(stats + row * 2, running_max, mask=token < out_len)
            tl.store(stats + row * 2 + 1, running_sum, mask=token < out_len)
        else:
            if sinks is not None:
                sink = tl.load(sinks + heads)
                new_max = tl.maximum(running_max, sink)
                least_max = finite_max(new_max)
                alpha = tl.math.exp2((running_max - least_max) * LOG2E)
                acc = acc * alpha[:, None]
                running_sum = running_sum * alpha + tl.where(asked, tl.math.exp2((sink - least_max) * LOG2E), 0.0)
                running_max = tl.where(asked, new_max, running_max)
            total = tl.where(running_sum == 0.0, 1.0, running_sum)  # a row that sees nothing is 0
            result = tl.math.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape))
            p_out = (
                out
                + item * o_item
                + (q_first + token[:, None]) * o_row
                + heads[:, None] * o_head
                + o_dv[None, :] * o_column
            )
            tl.store(p_out, result.to(out.dtype.element_ty), mask=m_out)
            if lse is not None:
                p_lse = lse + item * l_item + heads * l_head + (q_first + token) * l_row
                tl.store(p_lse, log_sum_exp(running_max, running_sum), mask=token < out_len)
        if (
            REPAIR == AFTERWARDS
        ):  # those that are visible come out as what they are, written after what stands there by now
            tl.debug_barrier()
            codes, _, _ = over_tiles(
                queries,
                rows,
                keys,
                values,
                place,
                known_values,
                box,
                final_max,
                first,
                clear,
                o_n,
                o_d,
                o_dv,
                UNUSUAL,
                D,
                DV,
                BLOCK_D,
                BLOCK_DV,
                BM,
                BN,
                WHERE,
                CODED,
                PRECISION,
                HIDING,
                known,
                apply,
                bounds,
                DESCRIBED,
            )
            tl.store(p_out, codes.to(p_out.dtype.element_ty), mask=m_out & asked[:, None] & (codes != 0.0))
    elif REPAIR == FLAGGED:
        tl.store(flags + pid, 0)


@triton.jit
def over_tiles(
    queries,
    rows,
    keys,
    values,
    place,
    known_values,
    box,
    running_max,
    first,
    clear,
    o_n,
    o_d,
    o_dv,
    MODE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WHERE: tl.constexpr,
    CODED: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDING: tl.constexpr,
    known: tl.constexpr,
    apply: tl.constexpr,
    bounds: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """(acc, running_max, running_sum) of keys from `first` to the end: tiles below `clear` are visible but for the
    mask.
    """
    item, h_low, h_high, low, high, first_class, classes = box
    k_start, end = place[7], place[8]
    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    running_sum = tl.zeros([BM], tl.float32)
    if HIDING:
        o_tiles = tl.arange(0, TILES)
        for chunk in tl.range(first, end, TILES * BN, num_stages=1):
            j = chunk + o_tiles * BN
            here = j < end
            if classes is None:
                some, every = bounds(
                    item,
                    h_low,
                    h_high,
                    low,
                    high,
                    k_start + j,
                    k_start + tl.minimum(j + BN, end) - 1,
                    place[11],
                    place[12],
                    128,
                )
                whole = packed(here & some & every & (j < clear), o_tiles)
                mixed = packed(here & some, o_tiles) ^ whole
            else:
                p_class = classes + (first_class + chunk // (TILES * BN)) * 2
                inside = packed(here, o_tiles)
                sure = packed(here & (j < clear), o_tiles)
                some_bits, every_bits = tl.load(p_class), tl.load(p_class + 1)
                whole = some_bits & every_bits & sure
                mixed = (some_bits & inside) ^ whole
            count = tl.sum((mixed >> o_tiles) & 1, 0)
            for _ in tl.range(0, count):
                n = chunk + lowest(mixed) * BN
                mixed = mixed & (mixed - 1)
                acc, running_max, running_sum = one_tile(
                    acc,
                    running_max,
                    running_sum,
                    queries,
                    n,
                    rows,
                    keys,
                    values,
                    place,
                    known_values,
                    o_n,
                    o_d,
                    o_dv,
                    True,
                    MODE,
                    D,
                    DV,
                    BLOCK_D,
                    BLOCK_DV,
                    BM,
                    BN,
                    WHERE,
                    CODED,
                    PRECISION,
                    apply,
                    DESCRIBED,
                )
            count = tl.sum((whole >> o_tiles) & 1, 0)
            for _ in tl.range(0, count):
                n = chunk + lowest(whole) * BN
                whole = whole & (whole - 1)
                acc, running_max, running_sum = one_tile(
                    acc,
                    running_max,
                    running_sum,
                    queries,
                    n,
                    rows,
                    keys,
                    values,
                    place,
                    known_values,
                    o_n,
                    o_d,
                    o_dv,
                    False,
                    MODE,
                    D,
                    DV,
                    BLOCK_D,
                    BLOCK_DV,
                    BM,
                    BN,
                    WHERE,
                    CODED,
                    PRECISION,
                    apply,
                    DESCRIBED,
                )
    else:
        for n in tl.range(first, clear, BN):
            acc, running_max, running_sum = one_tile(
                acc,
                running_max,
                running_sum,
                queries,
                n,
                rows,
                keys,
                values,
                place,
                known_values,
                o_n,
                o_d,
                o_dv,
                False,
                MODE,
                D,
                DV,
                BLOCK_D,
                BLOCK_DV,
                BM,
                BN,
                WHERE,
                CODED,
                PRECISION,
                apply,
                DESCRIBED,
            )
        for n in tl.range(clear, end, BN):
            acc, running_max, running_sum = one_tile(
                acc,
                running_max,
                running_sum,
                queries,
                n,
                rows,
                keys,
                values,
                place,
                known_values,
                o_n,
                o_d,
                o_dv,
                True,
                MODE,
                D,
                DV,
                BLOCK_D,
                BLOCK_DV,
                BM,
                BN,
                WHERE,
                CODED,
                PRECISION,
                apply,
                DESCRIBED,
            )
    return acc, running_max, running_sum


@triton.jit
def one_tile(
    acc,
    running_max,
    running_sum,
    queries,
    n,
    rows,
    keys,
    values,
    place,
    known_values,
    o_n,
    o_d,
    o_dv,
    MASKED: tl.constexpr,
    MODE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WHERE: tl.constexpr,
    CODED: tl.constexpr,
    PRECISION: tl.constexpr,
    apply: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Keys n … n + BN - 1, folded into the running state."""
    item, name, heads, position, limit = rows
    base_k, k_row, k_column, base_ks, k_item = keys
    base_v, v_row, v_column, base_vs, v_item = values
    (
        pages,
        page_size,
        table_row,
        page_count,
        status,
        s_item,
        s_row,
        k_start,
        end,
        factor,
        scale,
        ints,
        floats,
        wrong,
        ring_first,
        ring,
    ) = place
    held = n + o_n < end
    if DESCRIBED:
        key_rows = base_k.load([tl.cast(n, tl.int32), 0])
    else:
        at_k = places(
            n, o_n, end, pages, page_size, k_item, k_row, item, WHERE, table_row, page_count, status, ring_first, ring
        )
        key_rows = load_rows(base_k, at_k, o_d, k_column, held, D, BLOCK_D, MASKED or WHERE == PAGES).to(queries.dtype)
    x = dot(queries, tl.trans(key_rows), PRECISION)
    if CODED:
        at_s = places(
            n, o_n, end, pages, page_size, s_item, s_row, item, WHERE, table_row, page_count, status, ring_first, ring
        )
        x = x * tl.load(base_ks + at_s, mask=held, other=0.0)[None, :]
    if apply is not None:
        inside = (n + o_n)[None, :] < limit[:, None]
        x = apply(
            x,
            name,
            heads[:, None],
            position[:, None],
            (k_start + n + o_n)[None, :],
            inside,
            scale,
            known_values,
            ints,
            floats,
            wrong,
            MASKED,
        )
    elif MASKED:
        x = tl.where((n + o_n)[None, :] < limit[:, None], x, float("-inf"))
    if DESCRIBED:
        value_rows = base_v.load([tl.cast(n, tl.int32), 0])
    else:
        at_v = places(
            n, o_n, end, pages, page_size, v_item, v_row, item, WHERE, table_row, page_count, status, ring_first, ring
        )
        value_rows = load_rows(base_v, at_v, o_dv, v_column, held, DV, BLOCK_DV, MASKED or WHERE == PAGES)
    if CODED:
        value_scale = tl.load(base_vs + at_s, mask=held, other=0.0)
    if MODE == UNUSUAL:
        # running_max is the last one here; a weight that is 0 makes NaN of an infinity
        by, base = exponents(running_max, factor)
        seen = tl.where(tl.math.exp2(x * by[:, None] - base[:, None]) == 0.0, 2097152.0, 1.0)
        seen = tl.where(x == float("-inf"), 0.0, seen)
        strange = value_rows.to(tl.float32)
        if CODED:
            strange = strange * value_scale[:, None]
        found = outcome(dot(seen.to(tl.bfloat16), unusual(strange).to(tl.bfloat16), "ieee"))
        return acc + found, running_max, running_sum
    else:
        p, running_max, running_sum, alpha = online_softmax(x, factor, running_max, running_sum)
        if CODED:
            p = p * (finite(value_scale) if MODE == FINITE else value_scale)[None, :]
        operand = value_rows.to(queries.dtype)
        if CODED and queries.dtype == tl.float16:
            operand = value_rows.to(tl.bfloat16)  # codes are exact in it, and a scale may be any float32
        if MODE == FINITE:
            operand = finite(operand.to(tl.float32)).to(operand.dtype)
        if queries.dtype == tl.float32:
            acc = acc * alpha[:, None] + dot(
                p, operand, PRECISION
            )  # a short chain of sums in the tile, then one over tiles
        else:
            acc = tl.dot(p.to(operand.dtype), operand, acc * alpha[:, None])
        return acc, running_max, running_sum
