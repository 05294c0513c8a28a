"""Every way to compute a problem of test_combined.py from arrays, and what a result must be."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from problems import Combined, Part, as_numpy, stacked
from tolerance import assert_within, plain

import speedlight as sl
from speedlight import reference
from speedlight.expressions.tree import evaluate
from speedlight.host.machine import isa_named
from speedlight.problem.options import Options

Results = list[tuple[np.ndarray, np.ndarray]]  # of each item: out (heads, length, dim) and lse (heads, length)


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


def cut(x: np.ndarray, parts: Sequence[Part], q_len: int, k_len: int) -> np.ndarray:
    """The entries of some rows of a dense array."""
    found, places = [], [(part.item if x.shape[0] > 1 else 0, part.row if x.shape[2] > 1 else 0) for part in parts]
    for item, row in places[:1] if len(set(places)) == 1 else places:
        one = x[item : item + 1, :, row : row + q_len] if x.shape[2] > 1 else x[item : item + 1]
        one = one[..., :k_len] if x.shape[3] > 1 else one
        found.append(np.pad(one, [(0, 0), (0, 0), (0, q_len - one.shape[2] if x.shape[2] > 1 else 0), (0, 0)]))
    return np.concatenate(found)


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
    for head in reference.Case(*arrays, Options(**options)).heads():
        seen[int(head.env["b"])][int(head.env["h"]) // head.problem.group] |= may_see(head).any(axis=0)
    return seen


def may_see(head: Any) -> np.ndarray:
    """Of one head of the reference, [q_len, k_len]: which pairs are not hidden, whatever q and k hold."""
    score, seen = head.problem.score, head.visible
    if score is None:
        return seen
    scores = (np.full(seen.shape, x) for x in (np.nan, np.inf, -np.inf))
    with np.errstate(all="ignore"):
        found = [evaluate(score.root, head.env | {"s": s}, seen=seen) != -np.inf for s in scores]
    return seen & np.logical_or.reduce(np.broadcast_arrays(*found))


def poisoned(arrays: Sequence[np.ndarray], flow: Sequence[Any], options: dict[str, Any], rng: Any) -> list[Any]:
    """Copies of q, k, v, out, lse, d_out and d_lse: in some of them NaN and infinities wherever no visible pair reads.
    Where other arrays are finite kernels take shorter ways.
    """
    case = reference.Case(*arrays, Options(**options))
    copies = [None if x is None else x.copy() for x in (*arrays, *flow)]
    rows, keys = (np.zeros(x.shape[:-1], bool) for x in (case.q, case.k))
    own = rows.copy()  # rows that there are; of those that see nothing, lse says so
    for head in case.heads():
        seen = may_see(head) & (flow[1][head.at] != -np.inf)[:, None]
        own[head.at] = True
        rows[head.at] |= seen.any(axis=1)
        keys[head.keys] |= seen.any(axis=0)
    for n, (x, there) in enumerate(zip(copies, (rows, keys, keys, rows, own, rows, rows), strict=True)):
        if x is not None and rng.random() < 0.5:
            inward = x if n in (4, 6) else case.inward(x)
            inward[~there] = rng.choice([np.nan, np.inf, -np.inf], inward[~there].shape).astype(x.dtype)
    return copies


def assert_right(p: Combined, got: Results, unit: str) -> None:
    """Every element inside the bound."""
    arrays, options = for_reference(p)
    dot = isa_named(unit).dot(p.form.dtype)
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
