# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""The tiles of the backward kernel: what the pairs of a tile weigh, and the sums that they are added to.

Weights are computed again, from the lse that is given; docs/numerics.md has the formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..problem.problem import FAR_LSE
from .dropping import keeps
from .forward import CODES, FINITE, Program
from .primitives import LOG2E, dot, finite, opposite
from .sequence import Batch, Config, Item, Rows, Tensor, keys_from, load_rows

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
def load_keys(n, end, item: Item, kv_head, sides: Sides, MASKED: tl.constexpr, c: Config):
    """Keys and values n … n + BN - 1; zeros from `end` on."""
    o_d, o_dv = tl.arange(0, c.BLOCK_D).to(tl.int64), tl.arange(0, c.BLOCK_DV).to(tl.int64)
    o_n = n + tl.arange(0, c.BN).to(tl.int64)
    k, v = sides.k, sides.v
    p_k, p_v = head_of(k, item.i_item, kv_head, item.o_k), head_of(v, item.i_item, kv_head, item.o_k)
    b_k = load_rows(p_k, o_n * k.row, o_d, k.column, o_n < end, c.D, c.BLOCK_D, MASKED)
    return b_k, load_rows(p_v, o_n * v.row, o_dv, v.column, o_n < end, c.DV, c.BLOCK_DV, MASKED)


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
