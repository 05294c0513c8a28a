"""Micro-kernels in which a lane is a key: scores[row, key] = queries[row] · keys[key], of rows of keys or of a cache.

One chain of multiply-adds over the units for each score; several chains at once, for none to wait. What follows is in
row_weights.py, and so is what lies where.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...problem.problem import TILE
from ..language.prototypes import prototype
from ..language.reloading import copies
from ..language.vector import I64, PTR, Function, Module, Value
from ..memory.formats import load_scales
from ..memory.records import BLOCK
from ..memory.shape import Shape
from ..products.outer import scaled_sum
from ..products.packing import KeyRun, summed_together
from ..products.product import Product, product_of


def score_row(s: Shape) -> int:
    """Bytes of a row of scores."""
    return TILE * s.number_bytes


_SCORE = "scores* queries* places* key_row count units rows head_dim"


def score(module: Module, s: Shape) -> Any:
    """scores[row, key] = queries[row] · keys[key], one chain of multiply-adds over the units per element."""
    return score_lanes(module, s) if s.cached else score_rows(module, s)


def score_rows(module: Module, s: Shape) -> Any:
    """Scores rows of keys: a few vectors of keys at a time are transposed in registers, in runs that the product has.

    Keys past the end repeat the last one; what they score is never used.
    """
    k = module.function("score_rows", prototype(_SCORE))
    p, n, product = k.p, s.lanes, product_of(s)
    keys_at_once = n * s.tiles.key_vectors
    rows, rest = k.buffer(I64, keys_at_once), k.buffer(s.unit, n * keys_at_once)
    runs = list(product.key_runs(k, p["head_dim"]))
    # later keys are prefetched: line after line where rows lie side by side, else row by row
    dense = p["key_row"].equals(p["head_dim"] * s.key_bytes)
    unit_step = k.select(dense, k.i64(keys_at_once * s.stored_bytes), k.i64(s.stored_bytes))
    zero = k.const(0.0, s.vector)

    def transposed(ahead: Value | None, t: Value, run: KeyRun, first: int) -> list[Value]:
        """Loads and transposes units of a vector of rows, from unit t on."""
        lane_step, keys = k.select(dense, k.i64(run.bytes), p["key_row"]), []
        turns = max(1, 64 // run.bytes) if s.tiles.key_vectors > 1 else 1  # each fetches a share of the lines
        if turns > 1 and ahead is not None:
            ahead = k.at(ahead, k.select(dense, k.i64(0), t // run.step % turns * p["key_row"]))
        for m in range(first, first + n):
            if ahead is not None and m % turns == 0:
                k.prefetch(k.at(ahead, t * unit_step + lane_step * m), s.fetching.level)
            keys.append(run.load(k.load(PTR, rows, 8 * m), t))
        return k.transpose(keys)

    @contextlib.contextmanager
    def each_row(j: Value) -> Iterator[Callable[[Value, Sequence[Value]], None]]:
        """Goes on with the sums of each row; yields what adds unit t, of vectors of keys and the row's query."""
        with k.range(0, p["rows"]) as r:
            at = k.at(p["scores"], r * score_row(s) + j * s.number_bytes)
            places = range(0, s.tiles.key_vectors * s.vector_bytes, s.vector_bytes)
            totals, query = [product.new_sum(k, k.load(s.vector, at, x)) for x in places], r * p["units"]

            def add(t: Value, keys: Sequence[Value]) -> None:
                unit = k.splat(k.load(s.unit, p["queries"], (query + t) * s.number_bytes), n)
                for total, x in zip(totals, keys, strict=True):
                    total.add(unit, x)

            yield add
            for total, x in zip(totals, places, strict=True):
                total.join()
                k.store(total.get(), at, x)

    with k.range(0, p["count"], keys_at_once) as j:
        ahead = k.load(PTR, p["places"], (j + keys_at_once * s.fetching.groups) * 8) if s.fetching.groups else None
        for m in range(keys_at_once):
            k.store(k.load(I64, p["places"], k.min(j + m, p["count"] - 1) * 8), rows, 8 * m)
        with k.range(0, p["rows"]) as r:
            for m in range(0, keys_at_once, n):
                k.store(zero, p["scores"], r * score_row(s) + (j + m) * s.number_bytes)
        for run in runs:
            with k.range(run.first, run.end, run.step) as t:
                found = [transposed(ahead, t, run, m) for m in range(0, keys_at_once, n)]
                for i in range(run.step // n):
                    columns = [run.columns(x, i) for x in found]
                    with each_row(j) as add:
                        for u, keys in enumerate(zip(*columns, strict=True)):
                            add(t + (i * n + u), keys)
        _add_rest(k, product, (rows, rest), runs[-1].end, each_row(j))
    return k.finish()


def _add_rest(k: Function, product: Product, memory: tuple[Value, Value], first: Value, each_row: Any) -> None:
    """Adds the units past whole vectors, of keys at `rows`: they are brought together in `rest`, [unit][key]."""
    p, s, (rows, rest) = k.p, product.s, memory
    keys = s.lanes * s.tiles.key_vectors
    with k.when(first < p["units"]):
        with k.range(first, p["units"]) as t:
            for m in range(keys):
                x = product.load_unit(k, k.load(PTR, rows, 8 * m), t, k.i64(s.key_bytes), p["head_dim"], stored=True)
                k.store(x, rest, ((t - first) * keys + m) * s.number_bytes)
        with each_row as add, k.range(first, p["units"]) as t:
            at = [((t - first) * keys + m) * s.number_bytes for m in range(0, keys, s.lanes)]
            add(t, [k.load(s.units, rest, x) for x in at])


def score_lanes(module: Module, s: Shape) -> Any:
    """Scores a cache's blocks, where the keys of a vector lie side by side: nothing is transposed, all is read in
    sequence.
    """
    k = module.function("score_lanes", prototype(_SCORE))
    p = k.p
    ahead = blocks_ahead(k, s, p["key_row"])
    tiles = _score_tiles(s)
    most = max(together for _, together in tiles)
    with k.range(0, p["count"], BLOCK * most) as group:
        start = k.i64(0)
        for rows, together in tiles:
            end = start + (p["rows"] - start) // rows * rows
            with (
                k.range(start, end, rows) as r,
                k.range(group, k.min(group + BLOCK * most, p["count"]), BLOCK * together) as j,
            ):
                fetched = ahead if rows > 1 or s.fetches_alone else None
                _score_blocks(k, s, fetched, [r + i for i in range(rows)], j, together)
            start = end
    return k.finish()


def _score_tiles(s: Shape) -> tuple[tuple[int, int], ...]:
    """Rows and blocks of a cache whose sums are in registers."""
    if s.lanes < 4:  # as many sums would need too many registers
        return tuple([(max(1, rows // 2), max(1, together // 2)) for rows, together in s.tiles.narrow_scores])
    if s.lanes < BLOCK:
        return s.tiles.narrow_scores
    if not s.format.is_coded:
        return s.tiles.scores
    tiles = s.tiles.code_scores if s.elements == 1 else s.tiles.coded_pairs
    if s.format.bits == 8:
        return tiles
    # a line has more units, which take the room of sums
    return tuple([(rows, together if rows == 1 else max(1, together // 2)) for rows, together in tiles])


def _score_blocks(k: Function, s: Shape, ahead: Value | None, rows: list[Value], j: Value, together: int) -> None:
    """Scores some rows against some blocks from key j on: as many independent chains as there are sums.

    A block past the end repeats the last one. Meanwhile the block that is `ahead` blocks after each is fetched.
    """
    last = (k.p["count"] - 1) // BLOCK
    numbers = [k.min(j // BLOCK + i, last) for i in range(together)]
    dim = k.p["head_dim"]
    fetched = [] if ahead is None else [block_at(k, s, x + ahead, dim) for x in numbers]
    _score_groups(k, s, fetched, [(rows, [block_at(k, s, x, dim) for x in numbers])], j)


def _score_groups(
    k: Function, s: Shape, fetched: list[Value], groups: list[tuple[list[Value], list[Value]]], j: Value
) -> None:
    """Scores of each group all its rows against all its blocks, whose first key is key j; all chains in step.

    fetched: addresses of the blocks that are prefetched meanwhile.
    """
    p, n, unit_bytes, product = k.p, s.lanes, s.block_step, product_of(s)
    header = s.header(p["head_dim"])
    sums = []  # of each group its vectors of keys; of each row its query, and its sums
    for rows, blocks in groups:
        vectors = [(block, i * n) for block in blocks for i in range(max(1, BLOCK // n))]
        places = _query_places(k, s, rows, len(vectors))
        sums.append((vectors, [(x, [product.new_sum(k, k.const(0.0, s.vector)) for _ in vectors]) for x in places]))
    for later in fetched if s.format.is_coded else ():
        k.prefetch(k.at(later, k.i64(0) - header), s.fetching.level)

    def units(t: Value, count: int = 1) -> None:
        """Adds so many units, which lie together."""
        for vectors, rows in sums:
            keys = [product.load_keys(k, block, t, lane, count) for block, lane in vectors]
            for later in fetched:
                for line in range(0, unit_bytes * count, 64):
                    k.prefetch(k.at(later, t * unit_bytes + line), s.fetching.level)
            for row, totals in rows:
                for u in range(count):
                    for (pointer, offset), total, x in zip(row, totals, keys, strict=True):
                        place = k.at(pointer, (t + u) * s.number_bytes)
                        place = place if offset is None else k.at(place, offset)
                        total.add(k.splat(k.load(s.unit, place), n), x[u])

    def add(first: Value, end: Value) -> None:
        """Adds units that are summed together."""
        product.each_unit(k, end - first, lambda t, *count: units(first + t, *count), of_keys=True)
        for _, rows in sums:
            for _, totals in rows:
                for total in totals:
                    total.join()

    def store(number: Value | None) -> None:
        """Stores the sums; of codes times their scales, which are of all columns, or of the block of this number."""
        found, zero = [], k.const(0.0, s.vector)
        for (numbers, _), (vectors, rows) in zip(groups, sums, strict=True):
            for r, (_, totals) in zip(numbers, rows, strict=True):
                for i, (total, (block, lane)) in enumerate(zip(totals, vectors, strict=True)):
                    x, at = total.get(), r * score_row(s) + (j + i * n) * s.number_bytes
                    if s.format.is_coded and s.together == 1:
                        start = k.at(block, (k.i64(0) if number is None else number * (BLOCK * s.scale_bytes)) - header)
                        scale = load_scales(k, s.format, start, lane, n)
                        x = x * scale if number is None else scaled_sum(k, number, x, scale, p["scores"], at)
                    found.append((x, at))
                    if number is not None:
                        total.total.set(zero)
        # after all have read what they add to: groups may repeat a row
        for x, at in found:
            k.store(x, p["scores"], at)

    if s.scale_block:
        size = s.count_units(s.scale_block)
        with k.range(0, s.count_scales(p["head_dim"])) as number:
            add(number * size, k.min((number + 1) * size, p["units"]))
            store(number)
        return
    with summed_together(k, s, k.i64(0), p["units"]) as (first, end):
        add(first, end)
    store(None)


def _query_places(k: Function, s: Shape, rows: list[Value], count: int) -> list[list[tuple[Value, Value | None]]]:
    """Returns where the query of each row lies, a pointer and bytes from it, for each of so many vectors of keys.

    Where each multiply-add loads it, vectors have pointers of their own, which rows share: registers would not do for a
    pointer of each.
    """
    row_bytes = k.p["units"] * s.number_bytes
    if not s.reloads:
        return [[(k.at(k.p["queries"], r * row_bytes), None)] * count for r in rows]
    pointers = copies(k, k.at(k.p["queries"], rows[0] * row_bytes), count)
    return [[(x, row_bytes * i) for x in pointers] for i in range(len(rows))]


FEW_ROWS = 4  # below it a head alone has too few chains to keep a core busy


def score_heads(module: Module, s: Shape) -> Any:
    """Scores a few rows of each of several heads, whose blocks are `head` bytes apart: chains of several heads in
    step. `rows`: of all heads; `group`: of one.
    """
    k = module.function("score_heads", prototype(f"{_SCORE} head group"))
    p, most = k.p, max(1, min(FEW_ROWS, 8 * s.lanes // BLOCK))
    with k.range(0, p["rows"], most) as first, k.range(0, p["count"], BLOCK) as j:
        rows, block = [k.min(first + i, p["rows"] - 1) for i in range(most)], block_at(k, s, j // BLOCK, p["head_dim"])
        _score_groups(k, s, [], [([r], [k.at(block, r // p["group"] * p["head"])]) for r in rows], j)
    return k.finish()


def block_at(k: Function, s: Shape, number: Value, columns: Value) -> Value:
    """Returns the address of a tile's block of elements, of so many columns each."""
    return k.at(k.load(PTR, k.p["places"], number * 8), s.header(columns))


def blocks_ahead(k: Function, s: Shape, row: Value) -> Value | None:
    """Returns how many blocks ahead a cache is fetched; None: that is left to the CPU."""
    if not s.fetching.cache_blocks:
        return None
    return k.max(k.min(k.i64(s.fetching.cache_bytes) // (row * BLOCK), k.i64(s.fetching.cache_blocks)), k.i64(1))
