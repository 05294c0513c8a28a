"""Every option at once (R01, R03, R04, R05, R10): inside the bound, and of the same bits however a problem is computed.

As a script it takes any share of the problems, prints a line for each failure, which reproduces it, and goes on:

    python tests/test_combined.py --first 0 --count 25000 [--seed N] [--only K]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import operator
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FULL
from engines import one_vector, tuned
from forms import FORMS, Form, units
from problems import Combined, Part, draw_combined, numpy_dtype
from tolerance import assert_within, plain

import speedlight as sl
from speedlight import reference
from speedlight.cpu import compile as compiler
from speedlight.cpu import schedule
from speedlight.expressions.tree import evaluate
from speedlight.machine import host_isas, isa_named

Results = list[tuple[np.ndarray, np.ndarray]]  # of each item: out (heads, length, dim) and lse (heads, length)


@contextlib.contextmanager
def kernels(form: Form, unit: str, short: bool, *, cached: bool = False) -> Iterator[None]:
    """On a vector unit; in a short run with panels of one width, and the decode kernel only where the form says so."""
    rows, before = schedule.DECODE_ROWS, os.environ.get("SPEEDLIGHT_ISA")
    os.environ["SPEEDLIGHT_ISA"] = unit
    if short and (form.extra != ("steps" if cached else "decode") or unit != units(form)[0]):
        schedule.DECODE_ROWS = 0
    try:
        with tuned(**one_vector(vectors_of(form))) if short else contextlib.nullcontext():
            yield
    finally:
        schedule.DECODE_ROWS = rows
        if before is None:
            del os.environ["SPEEDLIGHT_ISA"]
        else:
            os.environ["SPEEDLIGHT_ISA"] = before


def vectors_of(form: Form) -> int:
    """Query vectors of a panel in a short run."""
    return FORMS.index(form) % 3 + 1


# --- arrays of every kind and lie


def lie(x: np.ndarray, how: str, rng: np.random.Generator) -> np.ndarray:
    """The same numbers, lying otherwise in memory; what is between them is NaN."""
    match how:
        case "transposed":
            axes = rng.permutation(x.ndim)
            return np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes))
        case "sliced":
            steps, first = rng.integers(1, 3, x.ndim), rng.integers(0, 3, x.ndim)
            wide = np.full([n * s + f for n, s, f in zip(x.shape, steps, first, strict=True)], np.nan, x.dtype)
            view = wide[tuple(slice(f, f + n * s, s) for n, s, f in zip(x.shape, steps, first, strict=True))]
            view[...] = x
            return view
        case "backwards":
            turn = tuple(slice(None, None, -1 if rng.random() < 0.5 else 1) for _ in x.shape)
            return x[turn].copy()[turn]
        case "unaligned":
            view = np.ndarray(x.shape, x.dtype, np.empty(x.nbytes + 1, np.uint8)[1:].data)
            view[...] = x
            return view
    return np.ascontiguousarray(x)


def as_kind(x: np.ndarray, kind: str) -> Any:
    if kind == "numpy":
        return x
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def as_numpy(x: Any) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        return x.view(torch.int16).numpy().view(numpy_dtype("bfloat16")) if x.dtype is torch.bfloat16 else x.numpy()
    return x


class Call:
    """One way to compute a problem, or some of its parts."""

    def __init__(
        self, problem: Combined, rng: np.random.Generator, *, kind: str = "numpy", lies: Sequence[str] = ("plain",) * 3
    ) -> None:
        self.p, self.rng, self.kind, self.lies = problem, rng, kind, lies
        self.options = problem.options | {"causal": bool(problem.causal)}

    def given(self, x: np.ndarray, how: str, repeated: int | None = None) -> Any:
        """An array as the caller has it; `repeated`: along this axis the first entry stands for all."""
        if repeated is not None and x.shape[repeated] and self.p.expanded:
            one = as_kind(lie(x[(slice(None),) * repeated + (slice(0, 1),)], how, self.rng), self.kind)
            return np.broadcast_to(one, x.shape) if self.kind == "numpy" else one.expand(x.shape)
        return as_kind(lie(x, how, self.rng), self.kind)

    def padded(
        self, parts: Sequence[Part], layout: str, *, starts: Any = ..., lengths: bool | None = None, out: bool = False
    ) -> Results:
        """One array for all parts, whose rows and keys end where they end."""
        q_lens, k_lens = [x.q.shape[1] for x in parts], [x.k.shape[1] for x in parts]
        ragged = len(set(q_lens)) > 1 or len(set(k_lens)) > 1
        more = self.rng.integers(0, 3, 2) if lengths and not self.p.form.dense else (0, 0)
        arrays = [
            stacked([getattr(x, n) for x in parts], int(extra))
            for n, extra in zip("qkv", (more[0], more[1], more[1]), strict=True)
        ]
        axes = (0, 1, 2, 3) if layout == "bhld" else (0, 2, 1, 3)
        same = not ragged and not lengths
        along = {"batch": 0 if same else None, "heads": axes.index(1) if same else None, "": None}[self.p.expanded]
        q, k, v = (
            self.given(x.transpose(axes), how, at)
            for x, how, at in zip(arrays, self.lies, (None, along, along), strict=True)
        )
        options = self.options | {"layout": layout, "q_start": [x.start for x in parts] if starts is ... else starts}
        if ragged or lengths:
            options |= {"q_lengths": q_lens, "k_lengths": k_lens}
        options |= self.expressions(parts, arrays[0].shape[2], arrays[1].shape[2])
        got, lse = self.attention(q, k, v, options, out)
        got = got.transpose(axes)
        for item, length in enumerate(q_lens):
            assert not plain(got[item, :, length:]).any() and (lse[item, :, length:] == -np.inf).all(), (
                "rows past the lengths"
            )
        return [(got[item, :, :length], lse[item, :, :length]) for item, length in enumerate(q_lens)]

    def packed(self, parts: Sequence[Part], *, starts: Any = ..., out: bool = False) -> Results:
        """One part after the other."""
        cu = [list(itertools.accumulate((getattr(x, n).shape[1] for x in parts), initial=0)) for n in "qk"]
        arrays = [np.concatenate([getattr(x, n) for x in parts], axis=1).swapaxes(0, 1) for n in "qkv"]
        q, k, v = (self.given(x, how) for x, how in zip(arrays, self.lies, strict=True))
        options = self.options | {
            "layout": "lhd",
            "cu_seqlens_q": cu[0],
            "q_start": [x.start for x in parts] if starts is ... else starts,
        }
        if cu[0] != cu[1] or self.rng.random() < 0.5:
            options["cu_seqlens_k"] = np.array(cu[1], np.int32)
        got, lse = self.attention(q, k, v, options | {"mask": self.p.mask, "score": self.p.score}, out)
        return [(got[a:b].swapaxes(0, 1), lse[:, a:b]) for a, b in itertools.pairwise(cu[0])]

    def attention(self, q: Any, k: Any, v: Any, options: dict[str, Any], out: bool) -> tuple[np.ndarray, np.ndarray]:
        if not out:
            got, lse = sl.attention(q, k, v, return_lse=True, **options)
            return as_numpy(got), as_numpy(lse)
        wide = np.full((*q.shape[:-1], 2 * v.shape[-1] + 1), np.nan, as_numpy(v).dtype)
        target = as_kind(wide[..., 1::2], self.kind)
        got, lse = sl.attention(q, k, v, return_lse=True, out=target, **options)
        assert got is target and np.isnan(wide[..., ::2]).all(), "out: written beside it"
        return wide[..., 1::2].copy(), as_numpy(lse)

    def expressions(self, parts: Sequence[Part], q_len: int, k_len: int) -> dict[str, Any]:
        """The mask and score; of arrays, the rows of these parts."""
        if not self.p.form.dense:
            return {"mask": self.p.mask, "score": self.p.score}
        return {
            n: None if x is None else cut(x, parts, q_len, k_len)
            for n, x in (("mask", self.p.mask), ("score", self.p.score))
        }

    @property
    def mask(self) -> Any:
        """Where there is no option `window`."""
        if self.options["window"] is None:
            return self.p.mask
        left, right = self.options["window"]
        limits = [] if left is None else [sl.window(left, None)]
        limits += [] if right is None else [sl.window(None, right)]
        return functools.reduce(operator.and_, limits if self.p.mask is None else [*limits, self.p.mask])


def stacked(items: Sequence[np.ndarray], more: int) -> np.ndarray:
    """(batch, heads, longest + more, dim), NaN past each one's length."""
    longest = max(x.shape[1] for x in items) + more
    out = np.full((len(items), items[0].shape[0], longest, items[0].shape[2]), np.nan, items[0].dtype)
    for to, x in zip(out, items, strict=True):
        to[:, : x.shape[1]] = x
    return out


def cut(x: np.ndarray, parts: Sequence[Part], q_len: int, k_len: int) -> np.ndarray:
    """The entries of some rows of a dense array."""
    found, places = [], [(part.item if x.shape[0] > 1 else 0, part.row if x.shape[2] > 1 else 0) for part in parts]
    for item, row in places[:1] if len(set(places)) == 1 else places:
        one = x[item : item + 1, :, row : row + q_len] if x.shape[2] > 1 else x[item : item + 1]
        one = one[..., :k_len] if x.shape[3] > 1 else one
        found.append(np.pad(one, [(0, 0), (0, 0), (0, q_len - one.shape[2] if x.shape[2] > 1 else 0), (0, 0)]))
    return np.concatenate(found)


# --- ways to compute one problem; None where one does not apply


def first_call(p: Combined, rng: np.random.Generator, *, out: bool = False) -> Results:
    """As drawn: layout, kind of arrays, strides, and q_start as it was given."""
    call = Call(p, rng, kind=p.kind, lies=p.lies)
    call.options["causal"] = p.causal
    if p.layout == "lhd":
        return call.packed(p.parts, starts=p.q_start, out=out)
    return call.padded(p.parts, p.layout, starts=p.q_start, out=out)


def by_threads(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    for threads in (1, 2, 3):
        sl.set_threads(threads)
        try:
            yield first_call(p, rng)
        finally:
            sl.set_threads(None)


def with_out(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    yield first_call(p, rng, out=True)


def by_layouts(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    call = Call(p, rng)
    for layout in ("bhld", "blhd"):
        yield call.padded(p.parts, layout, lengths=True)
    if not p.form.dense:
        yield call.packed(p.parts)


def one_by_one(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    """Each item alone; a mask that knows items knows the first one only."""
    call = Call(p, rng, kind=p.kind, lies=p.lies)
    parts = p.parts[:1] if knows_items(p) else p.parts
    if not (short and (p.form.dense or not all(x.q.size for x in parts))):  # these are other kernels
        yield [call.padded([x], "bhld")[0] for x in parts]


def by_chunks(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    """Queries cut anywhere, in padded or packed calls."""
    call = Call(p, rng)
    longest = max(x.q.shape[1] for x in p.parts)
    least = 2 if p.form.dense else 1  # a row alone would broadcast
    found: list[Results] = []
    for a, b in itertools.pairwise(cuts(rng, longest, least)):
        some = [x.rows(min(a, x.q.shape[1]), min(b, x.q.shape[1])) for x in p.parts]
        packed = not p.form.dense and rng.random() < 0.5
        found.append(call.packed(some) if packed else call.padded(some, "bhld"))
    yield joined(found) if found else call.padded(p.parts, "bhld")


def cuts(rng: np.random.Generator, length: int, least: int = 1, most: int = 4) -> list[int]:
    """0 … length, in up to `most` chunks, of which the short ones are of any size."""
    at, found = 0, [0]
    while at < length and len(found) < most:
        at = min(length, at + max(least, int(rng.choice([1, 2, 5, 16, 17, 48, 129, rng.integers(1, length + 1)]))))
        at = length if length - at < least else at
        found.append(at)
    return found if at == length else [*found[:-1], length]


def joined(found: Sequence[Results]) -> Results:
    """Of each item, its chunks one after another."""
    return [
        (np.concatenate([x[n][0] for x in found], axis=1), np.concatenate([x[n][1] for x in found], axis=1))
        for n in range(len(found[0]))
    ]


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
    """int8: the same bits from a cache and a pool, and inside the bound of what the codes stand for."""
    if not (fits_a_cache(p, short) and p.causal and p.form.dtype != "float64"):
        return
    want, cache = cache_of(p, rng, {}, "int8", short)
    for other in (cache_of(p, rng, {}, "int8", short)[0], pool_of(p, rng, "int8", short)):
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


def by_heads(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    """Keys repeated for every query head are those that heads share."""
    group = p.parts[0].q.shape[0] // p.parts[0].k.shape[0]
    if group > 1:
        parts = [Part(x.item, x.q, x.k.repeat(group, 0), x.v.repeat(group, 0), x.start) for x in p.parts]
        yield Call(p, rng).padded(parts, "bhld")


def flooded(p: Combined, rng: np.random.Generator, short: bool) -> Iterator[Results]:
    """NaN in every key and value that no query of its heads sees."""
    parts = [Part(x.item, x.q, x.k.copy(), x.v.copy(), x.start) for x in p.parts]
    for part, seen in zip(parts, seen_keys(p), strict=True):
        part.k[~seen], part.v[~seen] = np.nan, np.nan
    yield Call(replace(p, expanded=""), rng).padded(parts, "bhld")


def knows_items(p: Combined) -> bool:
    """Whether the mask or score looks at the batch item."""
    found = [
        x for x in (p.mask, *(p.score if isinstance(p.score, list) else [p.score])) if isinstance(x, sl.Expression)
    ]
    return any("b" in x.root.uses for x in found)


# --- comparing


def for_reference(p: Combined) -> tuple[list[np.ndarray], dict[str, Any]]:
    """One padded batch, and its options."""
    arrays = [stacked([getattr(x, n) for x in p.parts], 0) for n in "qkv"]
    options = p.options | {
        "causal": bool(p.causal),
        "q_start": [x.start for x in p.parts],
        "mask": p.mask,
        "score": p.score,
    }
    return arrays, options | {
        "q_lengths": [x.q.shape[1] for x in p.parts],
        "k_lengths": [x.k.shape[1] for x in p.parts],
    }


def seen_keys(p: Combined) -> list[np.ndarray]:
    """Of each item, (kv_heads, k_len): whether any query of the heads of a key may see it, whatever its score is."""
    arrays, options = for_reference(p)
    seen = [np.zeros(x.k.shape[:2], bool) for x in p.parts]
    for head in reference.Case(*arrays, options).heads():
        visible = head.visible
        if head.problem.score is not None:
            nothing = np.full(visible.shape, np.nan)
            visible = visible & (evaluate(head.problem.score.root, head.env | {"s": nothing}, seen=visible) != -np.inf)
        seen[int(head.env["b"])][int(head.env["h"]) // head.problem.group] |= visible.any(axis=0)
    return seen


def assert_right(p: Combined, got: Results, unit: str) -> None:
    """Every element inside the bound."""
    arrays, options = for_reference(p)
    dot = isa_named(unit).product("bf16") == "pairs" and p.form.dtype == "bfloat16"
    if dot and p.has_infinity:  # its instruction takes subnormal inputs as zeros, and 0 times infinity is NaN
        arrays[:2] = [np.where(np.abs(plain(x)) < 2.0**-126, x.dtype.type(0), x) for x in arrays[:2]]
    want, want_lse = reference.attention(*arrays, return_lse=True, **options)
    clean = np.where(np.isfinite(arrays[2]), arrays[2], 0).astype(
        arrays[2].dtype
    )  # what sees others is not finite itself
    bounds = reference.error_bound(*arrays[:2], clean, dot=dot, **options)
    for item, (out, lse) in enumerate(got):
        rows = out.shape[1]
        expected = want[item, :, :rows]
        if p.has_infinity:  # a weight below 2^-126 is 0, and 0 times infinity NaN
            neither = ~np.isfinite(plain(out)) & ~np.isfinite(expected)
            out = np.where(neither, expected, plain(out))
        assert_within(out, expected, bounds.out[item, :, :rows], f"out of item {item}", zeros_allowed=True)
        assert_within(
            lse, want_lse[item, :, :rows], bounds.lse[item, :, :rows], f"lse of item {item}", zeros_allowed=True
        )


def bits(x: np.ndarray) -> bytes:
    """With one payload for all NaN: payloads are not promised."""
    return np.where(np.isnan(x), np.asarray(np.nan, x.dtype), x).tobytes()


def assert_same(want: Results, got: Results) -> None:
    for item, pair in enumerate(zip(want, got, strict=False)):
        for name, x, y in zip(("out", "lse"), *pair, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype, (
                f"{name} of item {item}: {y.dtype} {y.shape}, expected {x.dtype} {x.shape}"
            )
            if bits(x) != bits(y):
                other = np.argwhere([bits(a) != bits(b) for a, b in zip(x.reshape(-1), y.reshape(-1), strict=True)])[
                    :, 0
                ]
                at = tuple(int(n) for n in np.unravel_index(other[0], x.shape))
                raise AssertionError(
                    f"{name} of item {item}: {len(other)} of {x.size} differ; first at {at}: {y[at]!r}, expected "
                    f"{x[at]!r}"
                )


WAYS: tuple[tuple[Callable[..., Iterator[Results]], bool], ...] = (  # and whether keys lie in a cache
    (by_threads, False),
    (with_out, False),
    (by_layouts, False),
    (one_by_one, False),
    (by_chunks, False),
    (by_heads, False),
    (flooded, False),
    (by_pages, False),
    (by_cache, True),
    (by_ring, True),
    (by_pool, True),
    (by_codes, True),
)


def failures(form: Form, seed: int, index: int, *, short: bool) -> Iterator[str]:
    """What is wrong with one problem."""
    p = draw_combined(np.random.default_rng([seed, index]), form)
    if short and vectors_of(form) != 3 and not any(x.q.size for x in p.parts):
        return  # the schedule has three vectors for no rows
    unit, other = units(form)
    others = (
        [other] * (FORMS.index(form) % 8 == 1)  # kernels of the second unit, for an eighth of the forms
        if short
        else [
            x.name
            for x in host_isas()
            if form.dtype != "bfloat16" or x.product("bf16") == isa_named(unit).product("bf16")
        ]
    )
    try:
        with kernels(form, unit, short):
            want = first_call(p, np.random.default_rng([seed, index, 0]))
    except Exception as error:
        yield f"call: {type(error).__name__}: {error}"
        return
    checks: list[tuple[str, str, bool, Callable[[], Any]]] = [
        ("reference", unit, False, lambda: assert_right(p, want, unit))
    ]

    def compare(way: Any, salt: int) -> None:
        for got in way(p, np.random.default_rng([seed, index, salt]), short):
            assert_same(want, got)

    checks += [
        (u, u, False, lambda: assert_same(want, first_call(p, np.random.default_rng([seed, index, 0]))))
        for u in set(others) - {unit}
    ]
    for salt, (way, cached) in enumerate(WAYS, 1):
        wanted = ("codes",) if way is by_codes else ("cached", "steps")
        if not (short and cached and form.extra not in wanted):
            checks.append((way.__name__, unit, cached, lambda way=way, salt=salt: compare(way, salt)))
    for name, where, cached, check in checks:
        try:
            with kernels(form, where, short, cached=cached), np.errstate(all="ignore"):
                check()
        except Exception as error:
            yield f"{name}: {type(error).__name__ + ': ' if not isinstance(error, AssertionError) else ''}{error}"


SEED, EACH = 13, 6  # problems of each form in a short run


@pytest.mark.parametrize("form", FORMS, ids=[f.name for f in FORMS])
def test_combined(form, monkeypatch):
    """240 problems of few kernels; 50,000 of any in a full run."""
    shapes, kernel_of = set(), compiler.kernel_of
    monkeypatch.setattr(compiler, "kernel_of", lambda shape: shapes.add(shape) or kernel_of(shape))
    first, each = FORMS.index(form), 50_000 // len(FORMS) if FULL else EACH
    found = []
    for index in range(first, first + each * len(FORMS), len(FORMS)):
        found += [
            f"{again(SEED, index, short=not FULL)}  # {form.name}: {x}"
            for x in failures(form, SEED, index, short=not FULL)
        ]
    assert not found, "\n".join(found)
    assert FULL or len(shapes) <= form.kernels, "\n".join(str(s) for s in shapes)


def test_kernels_are_few():
    assert sum(form.kernels for form in FORMS) <= 120


def test_problems_are_of_every_kind():
    """What the 240 problems claim to cover, they do; and few of them have nothing to say."""
    drawn = [draw_combined(np.random.default_rng([SEED, n]), FORMS[n % len(FORMS)]) for n in range(len(FORMS) * EACH)]
    seen: Counter[str] = Counter()
    for p in drawn:
        seen.update(
            {
                p.layout,
                p.kind,
                *p.lies,
                f"repeats {p.expanded}",
                f"causal {p.causal}",
                f"scale {p.options['scale']}",
                f"{len(p.parts)} items",
            }
        )
        seen.update({"at the end"} if p.at_end else {"k_start"} if p.options["k_start"] else {"elsewhere"})
        seen.update({"sinks"} if p.options["sink_logits"] else set())
        seen.update({"ragged"} if len({(x.q.shape[1], x.k.shape[1]) for x in p.parts}) > 1 else set())
        seen.update({"grouped"} if p.parts[0].q.shape[0] > p.parts[0].k.shape[0] else set())
        seen.update({"infinities"} if p.has_infinity else set())
        seen.update(
            {"nothing to say"} if not any(x.q.size and np.nan_to_num(plain(x.v)).any() for x in p.parts) else set()
        )
    wanted = [
        "bhld",
        "blhd",
        "lhd",
        "numpy",
        "torch",
        "plain",
        "transposed",
        "sliced",
        "backwards",
        "unaligned",
        "repeats batch",
    ]
    wanted += [
        "repeats heads",
        "causal True",
        "causal False",
        "causal top-left",
        "scale None",
        "scale -0.3",
        "scale 0.0",
        "scale 1e-30",
    ]
    wanted += [f"{n} items" for n in (1, 2, 3, 4)] + [
        "at the end",
        "k_start",
        "elsewhere",
        "sinks",
        "ragged",
        "grouped",
        "infinities",
    ]
    assert min(seen[x] for x in wanted) >= EACH, seen
    assert seen["nothing to say"] <= 4 * EACH and seen["at the end"] >= 15 * EACH


def again(seed: int, index: int, *, short: bool) -> str:
    return f"python tests/test_combined.py --seed {seed} --only {index}{' --short' if short else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Random problems of every option.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, help="one problem")
    parser.add_argument("--short", action="store_true", help="with the few kernels of `make test`")
    given = parser.parse_args()
    wanted = range(given.first, given.first + given.count) if given.only is None else [given.only]
    wrong, start = 0, time.perf_counter()
    for done, index in enumerate(wanted, 1):
        form = FORMS[index % len(FORMS)]
        for what in failures(form, given.seed, index, short=given.short):
            wrong += 1
            print(
                f"{again(given.seed, index, short=given.short)}  # {form.name}: {' '.join(what.split())[:300]}",
                flush=True,
            )
        if done % 1000 == 0:
            print(
                f"{done:,} problems, {wrong} failures, {time.perf_counter() - start:,.0f} s",
                file=sys.stderr,
                flush=True,
            )
    print(f"{len(wanted):,} problems, {wrong} failures, {time.perf_counter() - start:,.0f} s")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
