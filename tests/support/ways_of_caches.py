"""Every way to compute a problem of test_combined.py whose keys lie in a cache, a pool or pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from forms import units
from problems import CODES, Combined, Part, as_numpy, stacked
from ways import Call, Results, as_kind, assert_right, assert_same, bits, joined, knows_items

import speedlight as sl
from speedlight.cpu.engine import schedule


def by_cache(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    """Appended in ragged chunks; queries with their tokens, or after all of them where they see each other."""
    alike = len({x.q.shape[1] for x in p.parts}) == 1
    if fits_a_cache(p, short) and (p.causal or alike) and (alike or most_rows(p, short) is None):
        yield cache_of(p, rng, {}, p.form.dtype, short)[0]


def by_ring(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    """A cache that forgets what the window hides."""
    if p.form.ring and fits_a_cache(p, short):
        limits, first = p.mask.root.args
        left = limits.args[0].args[1].value
        yield cache_of(p, rng, {"window": left + 1, "keep_first": first.args[1].value}, p.form.dtype, short)[0]


def by_codes(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    """Codes: the same bits from a cache and a pool, and inside the bound of what the codes stand for."""
    if not (fits_a_cache(p, short) and p.causal and p.form.dtype != "float64"):
        return
    codes = str(rng.choice(CODES))
    want, cache = cache_of(p, rng, {}, codes, short)
    for other in (cache_of(p, rng, {}, codes, short)[0], pool_of(p, rng, codes, short)):
        assert_same(want, other)
    keys, values = cache.keys(0), cache.values(0)
    if (
        p.form.dtype == "float32" and np.abs(values[values != 0]).min(initial=1) > 1e-30
    ):  # scales that are subnormal have few bits
        lengths = [x.k.shape[1] for x in p.parts]
        parts = [
            Part(x.item, x.q, keys[n, :, :m], values[n, :, :m], x.start)
            for n, (x, m) in enumerate(zip(p.parts, lengths, strict=True))
        ]
        assert_right(replace(p, parts=parts), want, units(p.form)[0])
    yield from ()  # codes are other numbers than the problem's


def fits_a_cache(p: Combined, short: bool) -> bool:
    most = most_rows(p, short)
    if most is not None and not (
        p.causal and p.parts[0].v.shape[2] >= 16 and max(x.q.shape[1] for x in p.parts) <= 10 * most
    ):
        return False  # the decode kernel would not take it
    return p.at_end and not p.form.dense and not (p.causal and any(x.start < 0 for x in p.parts))


def most_rows(p: Combined, short: bool) -> int | None:
    """Tokens of a step, where a short run has no other kernel than that for few rows."""
    if not short or p.form.extra != "steps":
        return None
    return schedule.DECODE_ROWS * p.parts[0].k.shape[0] // p.parts[0].q.shape[0]


def cache_of(
    p: Combined, rng: np.random.Generator, sizes: dict[str, Any], dtype: str, short: bool
) -> tuple[Results, sl.KVCache]:
    parts, given = p.parts, lambda x: as_kind(x, p.kind)
    capacity = None if sizes else max(x.k.shape[1] for x in parts) + int(rng.integers(100, 2000))
    cache = sl.KVCache(layers=1, batch=len(parts), capacity=capacity, dtype=dtype, **cache_shape(p), **sizes)
    options = {n: p.options[n] for n in ("scale", "sink_logits")} | {
        "mask": None if sizes else Call(p, rng).mask,
        "score": p.score,
    }
    done = [0] * len(parts)
    for counts in steps(rng, [x.start if p.causal else x.k.shape[1] for x in parts]):
        k, v = (
            stacked([getattr(x, n)[:, a : a + c] for x, a, c in zip(parts, done, counts, strict=True)], 0) for n in "kv"
        )
        cache.append(0, given(k), given(v), new_lengths=counts)
        done = [a + c for a, c in zip(done, counts, strict=True)]
        if rng.random() < 0.2:  # tokens that are taken back
            count = int(rng.integers(1, 99))
            k, v = (
                np.full((len(parts), x.shape[0], count, x.shape[2]), np.nan, x.dtype) for x in (parts[0].k, parts[0].v)
            )
            cache.append(0, k, v)
            cache.truncate(done)
    if not p.causal:
        out, lse = cache.attend(0, given(np.stack([x.q for x in parts])), return_lse=True, **options)
        return list(zip(as_numpy(out), as_numpy(lse), strict=True)), cache
    found, at = [[nothing_of(p, x) for x in parts]], [0] * len(parts)
    most = most_rows(p, short)
    lengths = [x.q.shape[1] for x in parts]
    for counts in steps(rng, lengths) if most is None else (c * len(parts) for c in steps(rng, lengths[:1], most)):
        some = [x.rows(a, a + c) for x, a, c in zip(parts, at, counts, strict=True)]
        new = [
            (x.k[:, x.start : x.start + c], x.v[:, x.start : x.start + c]) for x, c in zip(some, counts, strict=True)
        ]
        q, k, v = (given(stacked(list(x), 0)) for x in ([x.q for x in some], *zip(*new, strict=True)))
        new = None if len(set(counts)) == 1 else counts
        out, lse = map(as_numpy, cache.attend(0, q, k, v, new_lengths=new, return_lse=True, **options))
        found.append([(o[:, :c], e[:, :c]) for o, e, c in zip(out, lse, counts, strict=True)])
        at = [a + c for a, c in zip(at, counts, strict=True)]
    return joined(found), cache


def cache_shape(p: Combined) -> dict[str, int]:
    k, v = p.parts[0].k, p.parts[0].v
    return {"kv_heads": k.shape[0], "head_dim": k.shape[2], "value_dim": v.shape[2]}


def steps(rng: np.random.Generator, lengths: Sequence[int], most: int | None = None) -> Iterator[list[int]]:
    """Ragged chunks until every length is done: some of few tokens, also those of the last step in another order, then
    what is left.
    """
    left, counts = list(lengths), [0] * len(lengths)
    for n in itertools.count():
        if not any(left):
            return
        size = int(rng.choice([1, 1, 3, 17, 130]))
        size = max(left) if size == 130 or n >= 5 else size
        if any(counts) and rng.random() < 0.4 and n < 5:
            counts = [min(a, b) for a, b in zip(left, rng.permutation(counts).tolist(), strict=True)]
        else:
            counts = [
                min(x, size if n >= 5 or rng.random() < 0.6 else int(rng.integers(0, size + 1)), most or x)
                for x in left
            ]
        if any(counts):
            left = [a - b for a, b in zip(left, counts, strict=True)]
            yield counts


def by_pool(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    """Sequences of a pool in batches that change, some of them forks."""
    if fits_a_cache(p, short):
        yield pool_of(p, rng, p.form.dtype, short)


def pool_of(p: Combined, rng: np.random.Generator, dtype: str, short: bool) -> Results:
    parts, size = p.parts, int(rng.choice([16, 32, 128]))
    pages = 2 * sum(-(-x.k.shape[1] // size) for x in parts) + 8
    pool = sl.PagePool(layers=1, pages=pages, page_size=size, dtype=dtype, **cache_shape(p))
    fragmented(pool, p, rng)
    sequences, done = [pool.sequence() for _ in parts], [0] * len(parts)
    for counts in steps(rng, [x.start if p.causal else x.k.shape[1] for x in parts]):
        some = [x for x in zip(sequences, parts, done, counts, strict=True) if x[3] or rng.random() < 0.5]
        if some:
            k, v = (np.concatenate([getattr(x, n)[:, a : a + c].swapaxes(0, 1) for _, x, a, c in some]) for n in "kv")
            pool.append(
                0, [s for s, *_ in some], as_kind(k, p.kind), as_kind(v, p.kind), new_lengths=[c for *_, c in some]
            )
        done = [a + c for a, c in zip(done, counts, strict=True)]
    found, at = [tuple([y] for y in nothing_of(p, x)) for x in parts], [0] * len(parts)
    lengths = [x.q.shape[1] for x in parts]
    for counts in steps(rng, lengths, most_rows(p, short)) if p.causal else [lengths]:
        order = list(range(len(parts)))
        if not knows_items(p):
            order = [int(x) for x in rng.permutation(order) if counts[x] or rng.random() < 0.3]
        twins = {n: sequences[n].fork() for n in order if rng.random() < 0.3} if not knows_items(p) else {}
        batch = [(sequences[n], n) for n in order] + [(s, n) for n, s in twins.items()]
        some = [parts[n].rows(at[n], at[n] + counts[n]) for _, n in batch]
        results = attend_pool(p, pool, [s for s, _ in batch], some, Call(p, rng).mask) if batch else []
        for (sequence, n), one in zip(batch, results, strict=True):
            if sequence is sequences[n]:
                for to, x in zip(found[n], one, strict=True):
                    to.append(x)
            else:
                assert all(bits(x) == bits(y[-1]) for x, y in zip(one, found[n], strict=True)), f"a fork of item {n}"
        for n, twin in twins.items():  # either of the two goes on
            if rng.random() < 0.5:
                sequences[n], twin = twin, sequences[n]
            twin.free()
        at = [a + c for a, c in zip(at, counts, strict=True)]
    assert pool.free_pages == pages - sum(len(s.pages) for s in sequences), "pages were lost"
    return [(np.concatenate(o, axis=1), np.concatenate(e, axis=1)) for o, e in found]


def fragmented(pool: sl.PagePool, p: Combined, rng: np.random.Generator) -> None:
    """Pages are free in any order, and full of NaN."""
    rubbish = [
        as_kind(np.full((pool.page_size, *x.shape[::2]), np.nan, x.dtype), p.kind) for x in (p.parts[0].k, p.parts[0].v)
    ]
    sequences = [pool.sequence() for _ in range(pool.pages)]
    for sequence in sequences:
        pool.append(0, [sequence], *rubbish)
    for n in rng.permutation(len(sequences)):
        sequences[n].free()


def attend_pool(p: Combined, pool: sl.PagePool, sequences: list[Any], some: list[Part], mask: Any) -> Results:
    """A step; the queries bring their own tokens, unless they see all there are."""
    q = np.concatenate([x.q.swapaxes(0, 1) for x in some])
    k = v = None
    if p.causal:
        new = [(x.k[:, x.start : x.start + x.q.shape[1]], x.v[:, x.start : x.start + x.q.shape[1]]) for x in some]
        k, v = (as_kind(np.concatenate([x.swapaxes(0, 1) for x in each]), p.kind) for each in zip(*new, strict=True))
    lengths = [x.q.shape[1] for x in some]
    options = {n: p.options[n] for n in ("scale", "sink_logits")} | {"mask": mask, "score": p.score}
    out, lse = map(
        as_numpy, pool.attend(0, sequences, as_kind(q, p.kind), k, v, new_lengths=lengths, return_lse=True, **options)
    )
    ends = list(itertools.accumulate(lengths, initial=0))
    return [(out[a:b].swapaxes(0, 1), lse[:, a:b]) for a, b in itertools.pairwise(ends)]


def nothing_of(p: Combined, part: Part) -> tuple[np.ndarray, np.ndarray]:
    """The results of no query."""
    kind = np.float64 if p.form.dtype == "float64" else np.float32
    return np.zeros((part.q.shape[0], 0, part.v.shape[2]), part.v.dtype), np.zeros((part.q.shape[0], 0), kind)


def by_pages(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    """Raw pages of any size, in any order, with rubbish in their ends."""
    alike = len({x.q.shape[1] for x in p.parts}) == 1
    if p.options["k_start"] or (p.form.dense and not alike):
        return
    call, parts = Call(p, rng), p.parts
    size = int(rng.choice([1, 3, 16, 33, 128])) if max(x.k.shape[1] for x in parts) < 300 else 128
    counts = [-(-x.k.shape[1] // size) for x in parts]
    total, most = sum(counts) + 3, max(counts) + 1
    order = rng.permutation(total)
    table = rng.integers(-9, 9, (len(parts), most))
    pages = [np.full((total, x.shape[0], size, x.shape[2]), np.nan, x.dtype) for x in (parts[0].k, parts[0].v)]
    at = 0
    for item, (part, count) in enumerate(zip(parts, counts, strict=True)):
        table[item, :count] = order[at : at + count]
        for to, x in zip(pages, (part.k, part.v), strict=True):
            for n in range(count):
                piece = x[:, n * size : (n + 1) * size]
                to[table[item, n], :, : piece.shape[1]] = piece
        at += count
    k, v = (x.swapaxes(1, 2) if rng.random() < 0.5 else np.ascontiguousarray(x.swapaxes(1, 2)) for x in pages)
    options = {n: p.options[n] for n in ("scale", "sink_logits")} | {"causal": bool(p.causal)}
    options |= {} if p.at_end else {"q_start": [x.start for x in parts]}
    lengths = [x.k.shape[1] for x in parts]
    if alike and (p.form.dense or rng.random() < 0.5):
        given = call.expressions(parts, parts[0].q.shape[1], max(lengths)) | (
            {} if p.form.dense else {"mask": call.mask}
        )
        out, lse = sl.attention_paged(
            np.stack([x.q for x in parts]), k, v, table, lengths, return_lse=True, **options, **given
        )
        yield list(zip(out, lse, strict=True))
        return
    cu = list(itertools.accumulate((x.q.shape[1] for x in parts), initial=0))
    q = np.concatenate([x.q.swapaxes(0, 1) for x in parts])
    options |= {"mask": call.mask, "score": p.score, "layout": "lhd", "cu_seqlens_q": cu}
    out, lse = sl.attention_paged(q, k, v, table, np.array(lengths), return_lse=True, **options)
    yield [(out[a:b].swapaxes(0, 1), lse[:, a:b]) for a, b in itertools.pairwise(cu)]
