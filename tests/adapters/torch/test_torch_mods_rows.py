"""More masks and scores as people write them for FlexAttention: rows of tables taken together, autograd functions,
waves, and the odd lookups of PyTorch's own tests; against PyTorch as in test_torch_mods.py.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from conftest import FULL
from test_torch_mods import BATCH, GENERATOR, HEADS, LENGTH, assert_call, assert_mask, assert_score, random

import speedlight as sl

pytestmark = pytest.mark.usefixtures("one_kernel")
TILE = 16
LENGTHS = torch.tensor([20, 24, 8, 12])
STARTS = torch.tensor([0, 20, 44, 52, 64])
IDS = torch.repeat_interleave(torch.arange(4), LENGTHS)


def whole(*shape, below):
    return torch.randint(0, below, shape, generator=GENERATOR)


# --- masks


def listed(tiles, filled=None):
    """Tiles of keys from a short list for each tile of queries; `filled`: how many keys of a tile there are."""

    def mask(b, h, q, k):
        tile = k // TILE
        seen = (tiles[b, h, q // TILE] == tile.unsqueeze(-1)).any(dim=-1)
        return seen if filled is None else seen & (k % TILE < filled[tile])

    return mask


def in_documents(inner):
    """Another mask, of places within a document."""

    def mask(b, h, q, k):
        ours, theirs = IDS[q], IDS[k]
        return (ours == theirs) & inner(b, h, q - STARTS[ours], k - STARTS[theirs])

    return mask


def shorter_than(b, h, q, k, lengths):
    return torch.logical_and(q < lengths[b], k < lengths[b])


def of_shape(b, h, q, k):
    """As code does that must not depend on the head."""
    return SEEN[b, h.new_zeros(h.shape), q, k]


def causal(b, h, q, k):
    return k <= q


SEEN = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=GENERATOR) < 0.4
HIDDEN = torch.rand(BATCH, LENGTH, generator=GENERATOR) < 0.5
SHIFTS = torch.tensor([0.0, 0.25])
CHOSEN = torch.stack([torch.randperm(4, generator=GENERATOR)[:2] for _ in range(BATCH * HEADS * 4)])
CHOSEN = CHOSEN.reshape(BATCH, HEADS, 4, 2)
MASKS = {
    "listed tiles": listed(CHOSEN),
    "listed tiles, some short": listed(CHOSEN, torch.tensor([16, 13, 16, 9])),
    "documents, causal": in_documents(causal),
    "lengths, by keyword": functools.partial(shorter_than, lengths=torch.tensor([30, 50])),
    "zeros like the head": of_shape,
    "rows that see nothing": lambda b, h, q, k: ~HIDDEN[b, q],
    "shifts in floats": lambda b, h, q, k: q + SHIFTS[b] * 128 >= k,
    "clamped lookups": lambda b, h, q, k: IDS[q.clamp(0, IDS.shape[0] - 1)] == IDS[k.clamp(0, IDS.shape[0] - 1)],
    "any of a few": lambda b, h, q, k: (CHOSEN[b, h, 0] * 20 + 5 > (q - k).abs()).all() | (k < CHOSEN[1, 1, -1, -1]),
}


# --- scores


class Tanh(torch.autograd.Function):
    """An instruction of some device, that vmap and autograd are told of."""

    @staticmethod
    def forward(x):
        return torch.ops.aten.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, d):
        (y,) = ctx.saved_tensors
        return d * (1 - y * y)

    @staticmethod
    def vmap(info, in_dims, x):
        return torch.tanh(x), 0


class Shown(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, condition):
        return torch.where(condition, x, -math.inf)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, d):
        return d, None


def rotary_part(query, key):
    """Products of a part of the head that is kept apart (DeepSeek's latent attention)."""
    return lambda s, b, h, q, k: s + 0.5 * torch.dot(query[b, h, q], key[b, h // HEADS, k])


def distances(places, scales):
    """Distances in space."""

    def score(s, b, h, q, k):
        apart = (places[q] - places[k]).pow(2).sum(-1).sqrt()
        return s * torch.exp(-apart / scales[h].exp())

    return score


def in_space(places, scales):
    """The same of another power, whose slope at 0 is a number."""
    return lambda s, b, h, q, k: s - scales[h] * ((places[q] - places[k]) ** 2).mean()


def waves(frequency, phase):
    """Sums of sines of distances."""
    return lambda s, b, h, q, k: s * torch.cos(frequency[h] * (q - k)) + torch.sin(phase[h] + frequency[h] * k)


def odd_lookups(first, second):
    zero = torch.tensor(0)
    return lambda s, b, h, q, k: s + first[0][b, h][q] + second[b][h][zero, k] + second[-1, h, 1, q] + first[1, 0, 0, 3]


def joined(table):
    return lambda s, b, h, q, k: s + table[b].sum(dim=-1) - table[h].amax() * torch.any(table[b] > 1.0)


def sums_over_rows(table):
    """Python's own loops, over entries and over rows."""
    return lambda s, b, h, q, k: s + sum(x * x for x in table[b, 0]) + sum(row[k % 3] for row in table[b])


def activation(f):
    return lambda s, b, h, q, k: torch.log(f(s) + 1.0)


GELU = torch.nn.functional.gelu
SCORES = {
    "products of rows": (rotary_part, (random(BATCH, HEADS, LENGTH, 3), random(BATCH, 1, LENGTH, 3))),
    "in space": (in_space, (random(LENGTH, 3), random(HEADS).abs())),
    "waves": (waves, (random(HEADS), random(HEADS))),
    "waves of waves": (lambda: lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b), ()),
    "odd lookups": (odd_lookups, (random(2, BATCH, HEADS, LENGTH), random(BATCH, HEADS, 2, LENGTH))),
    "joined rows": (joined, (random(2, 5),)),
    "sums over rows": (sums_over_rows, (random(BATCH, 4, 3),)),
    "GELU": (lambda: activation(GELU), ()),
    "GELU, tanh": (lambda: activation(functools.partial(GELU, approximate="tanh")), ()),
    "SiLU": (lambda: activation(torch.nn.functional.silu), ()),
    "another tanh": (lambda: lambda s, b, h, q, k: 5 * Tanh.apply(s / 5), ()),
    "shown by a function": (lambda: lambda s, b, h, q, k: Shown.apply(s, q >= k), ()),
    "quotients of places": (lambda: lambda s, b, h, q, k: s - q // (1 + k) + (q / 8 - k / 8).abs(), ()),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    assert_mask(MASKS[name])


@pytest.mark.parametrize("name", [*SCORES, "distances"])
def test_scores(name):
    make, learned = SCORES.get(name, (distances, (random(LENGTH, 3), random(HEADS))))
    assert_score(make(*learned), name)


CALLS = [(list(MASKS)[n % len(MASKS)], score) for n, score in enumerate(SCORES)]
QUICK = [("listed tiles", "products of rows"), ("documents, causal", "waves")]
ROWS = ("products of rows", "in space", "joined rows", "sums over rows")
LOOSE = ("waves of waves", "quotients of places")  # tan of integers, quotients: PyTorch's are float32


@pytest.mark.parametrize(("mask", "score"), CALLS if FULL else QUICK, ids=str)
def test_calls(mask, score):
    make, learned = SCORES[score]
    if score in ROWS:  # which PyTorch has no gradients of
        make, learned = functools.partial(make, *learned), ()
    assert_call(MASKS[mask], make, learned, 1e-5 if score in LOOSE else 1e-10)


def test_a_row_is_its_entries():
    """To the last bit, gradients, too: the trees are equal."""
    query, key = SCORES["products of rows"][1]

    def entry_by_entry(s, b, h, q, k):
        x, y, z = (query[b, h, q, n] * key[b, h // HEADS, k, n] for n in range(3))
        return s + 0.5 * (x + y + z)

    row = sl.expression(rotary_part(query.numpy(), key.numpy()))
    query, key = query.numpy(), key.numpy()
    assert repr(row) == repr(sl.expression(entry_by_entry))
    entries = [sl.expression(lambda b, h, q, k, n=n: CHOSEN[b, h, 0, n] == k) for n in range(2)]
    end = {"0": lambda r: r[0], "1": lambda r: r[1]}
    for make, same in (
        (lambda r: 7 // r, lambda n: 7 // n),
        (lambda r: 1 << r, lambda n: 1 << n),
        (lambda r: 64 >> r, lambda n: 64 >> n),
    ):
        for at in "01":
            made = sl.expression(lambda b, h, q, k, make=make, at=at: end[at](make(CHOSEN[b, h, 0])) == k)
            alone = sl.expression(lambda b, h, q, k, same=same, at=at: same(CHOSEN[b, h, 0, int(at)]) == k)
            assert repr(made) == repr(alone)
    assert repr(sl.expression(lambda b, h, q, k: CHOSEN[b, h, 0][-1] == k)) == repr(entries[1])
    both = sl.expression(lambda b, h, q, k: sl.cast(CHOSEN[b, h, 0, 0], bool) & sl.cast(CHOSEN[b, h, 0, 1], bool))
    assert repr(sl.expression(lambda b, h, q, k: CHOSEN[b, h, 0].all())) == repr(both)
    assert repr(entries[0] | entries[1]) == repr(sl.expression(lambda b, h, q, k: (CHOSEN[b, h, 0] == k).any()))


class StraightThrough(torch.autograd.Function):
    """Steps, with the slope of what was stepped."""

    @staticmethod
    def forward(x):
        return torch.floor(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, d):
        return d


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.tanh(x)


def test_autograd_functions_that_are_refused():
    for function, message in (
        (lambda s, b, h, q, k: StraightThrough.apply(s), "StraightThrough: expected a backward that PyTorch's own"),
        (lambda s, b, h, q, k: OldStyle.apply(s), "OldStyle: expected an autograd function with a setup_context"),
    ):
        with pytest.raises(sl.ExpressionError, match=message) as caught:
            sl.expression(function, "score")
        assert f"{__file__}:{function.__code__.co_firstlineno}" in str(caught.value)


def test_rows_are_not_numbers():
    """What a row is no number for says so, with its place."""
    wide = torch.zeros(2, 251)
    for function, message in (
        (lambda s, b, h, q, k: s + CHOSEN[b, h, 0], "one number; got a row of 2. Index it, .*any"),
        (
            lambda s, b, h, q, k: CHOSEN[b, h, 0] if CHOSEN[b, h, 0] else s,
            r"a row of 2 has no truth value. Use .any\(\)",
        ),
        (lambda s, b, h, q, k: s + (CHOSEN[b, h, 0] * LENGTHS).sum(), "expected rows of one length; got 2, 4"),
        (lambda s, b, h, q, k: s + wide[b].sum(), "a row of at most 250 entries, taken together; got 251"),
        (lambda s, b, h, q, k: s + torch.dot(wide[b], wide[h]), "at most 125 entries; got 251. Append them to q and k"),
        (lambda s, b, h, q, k: s + CHOSEN[b, h, 0].sum(dim=1), "expected dim None, 0 or -1 of a row; got 1"),
        (lambda s, b, h, q, k: s + torch.max(CHOSEN[b, h, 0], 0)[0], "torch.max: expected a row alone .*; got dim 0"),
        (lambda s, b, h, q, k: s + torch.min(CHOSEN[b, h, 0], -1)[0], "torch.min: expected a row alone .*; got dim -1"),
        (
            lambda s, b, h, q, k: s + CHOSEN[b, h, 0].sum(dtype=torch.int32),
            "sum: expected a row, and dim .*; got dtype",
        ),
        (lambda s, b, h, q, k: s + np.sum(CHOSEN[b, h, 0], keepdims=True), "sum: expected a row, .*; got keepdims"),
        (lambda s, b, h, q, k: s + CHOSEN[b, h, 0].median(), "a row of 2 has no attribute 'median'"),
    ):
        with pytest.raises(sl.ExpressionError, match=message) as caught:
            sl.expression(function, "score")
        assert f"{__file__}:{function.__code__.co_firstlineno}" in str(caught.value)
