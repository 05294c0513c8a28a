"""Padded batches, attention sinks, and the window shorthand."""

from __future__ import annotations

import numpy as np
import pytest
from problems import DTYPES, qkv
from tolerance import assert_accurate

import speedlight as sl

SINKS = np.array([0.5, -3.0, 20.0, -np.inf])
LENGTHS = {"q_lengths": [75, 0, 40], "k_lengths": [430, 100, 0]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"mask": sl.window(40, 3)}, {"score": sl.softcap(3.0)}, {"scale": -0.3}, {"mask": sl.prefix(0)}, LENGTHS],
)
def test_sinks(isa, rng, dtype, options):
    q, k, v = qkv(rng, dtype, 3, 4, 2, 75, 430, 17, 20)
    assert_accurate(q, k, v, sink_logits=SINKS, **options, zeros_allowed=True)


def test_a_sink_alone(isa, rng):
    """No key at all, or none that is visible: the output is 0 and the log-sum-exp is the sink's logit."""
    q, k, v = qkv(rng, "float32", 1, 4, 2, 5, 9, 8, 8)
    for keys, options in ((0, {}), (9, {"mask": sl.prefix(0)})):
        out, lse = sl.attention(q, k[:, :, :keys], v[:, :, :keys], sink_logits=SINKS, return_lse=True, **options)
        assert not out.any()
        np.testing.assert_allclose(lse[0], np.repeat(SINKS[:, None], 5, 1), rtol=1e-6)


def test_a_sink_of_minus_infinity_is_none(isa, rng):
    q, k, v = qkv(rng, "float32", 2, 4, 2, 60, 1300, 16, 16)
    want = sl.attention(q, k, v, causal=True, return_lse=True)
    got = sl.attention(q, k, v, causal=True, return_lse=True, sink_logits=[-np.inf] * 4)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(want, got, strict=True))


def test_sinks_do_not_depend_on_the_schedule(isa, rng):
    q, k, v = qkv(rng, "float32", 2, 4, 2, 60, 1300, 16, 16)
    want = sl.attention(q, k, v, causal=True, sink_logits=SINKS)
    for at in (0, 31, 59):
        one = sl.attention(q[1:, :, at : at + 1], k[1:], v[1:], causal=True, q_start=1240 + at, sink_logits=SINKS)
        assert want[1:, :, at : at + 1].tobytes() == one.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": sl.window(40, 3)}, {"causal": "top-left"}])
def test_padded_batches_are_their_items(isa, rng, dtype, layout, options):
    """Each item has the bits it would have alone; what pads it is never read, and rows past it are zeros."""
    q, k, v = qkv(rng, dtype, 3, 4, 2, 75, 430, 17, 20)
    for x, lengths in zip((q, k, v), (LENGTHS["q_lengths"], LENGTHS["k_lengths"], LENGTHS["k_lengths"]), strict=True):
        for item, n in enumerate(lengths):
            x[item, :, n:] = np.nan
    given = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) if layout == "blhd" else x for x in (q, k, v)]
    out, lse = sl.attention(*given, return_lse=True, layout=layout, **LENGTHS, **options)
    out = out.transpose(0, 2, 1, 3) if layout == "blhd" else out
    for item, (a, b) in enumerate(zip(*LENGTHS.values(), strict=True)):
        at = slice(item, item + 1)
        want = sl.attention(q[at, :, :a], k[at, :, :b], v[at, :, :b], return_lse=True, **options)
        assert out[at, :, :a].tobytes() == want[0].tobytes() and lse[at, :, :a].tobytes() == want[1].tobytes()
        assert not out[at, :, a:].any() and (lse[at, :, a:] == -np.inf).all()


def test_padded_batches_meet_the_reference(isa, rng):
    q, k, v = qkv(rng, "float32", 3, 4, 2, 75, 430, 17, 20)
    mask = rng.random((3, 1, 75, 430)) < 0.6
    assert_accurate(q, k, v, mask=mask, q_lengths=np.array([75, 3, 40]), k_lengths=np.array([430, 100, 9]), zeros_allowed=True)


def test_a_padded_batch_of_none():
    nothing = np.zeros((0, 2, 5, 16), np.float32)
    assert sl.attention(nothing, nothing, nothing, q_lengths=[], k_lengths=[]).shape == (0, 2, 5, 16)


def test_window_is_the_pattern(rng):
    q, k, v = qkv(rng, "float32", 1, 4, 2, 75, 430, 16, 16)
    for window, mask in (((40, 0), sl.window(40, 0)), ((None, 3), sl.window(None, 3)), ([5, None], sl.window(5, None))):
        want = sl.attention(q, k, v, mask=mask & sl.prefix(400))
        assert want.tobytes() == sl.attention(q, k, v, window=window, mask=sl.prefix(400)).tobytes()
    assert sl.attention(q, k, v).tobytes() == sl.attention(q, k, v, window=(None, None)).tobytes()
    assert sl.plan(q, k, v, window=(40, 0)).visible_pairs == 75 * 41 * 4


def test_lists_that_change_are_seen(rng):
    """Repeated calls are prepared once: by the values of a list, not by the list."""
    q, k, v = qkv(rng, "float32", 2, 2, 2, 30, 60, 8, 8)
    lengths, sinks = [60, 60], np.zeros(2)
    first = sl.attention(q, k, v, k_lengths=lengths, sink_logits=sinks)
    lengths[1], sinks[0] = 7, 2.0
    second = sl.attention(q, k, v, k_lengths=lengths, sink_logits=sinks)
    assert second.tobytes() == sl.attention(q.copy(), k, v, k_lengths=[60, 7], sink_logits=[2.0, 0.0]).tobytes() != first.tobytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q_lengths": [30]}, "q_lengths: expected 2 lengths, one per batch item; got 1"),
        ({"q_lengths": [30, 31]}, "q_lengths: expected lengths from 0 to 30, the length of the array; got 31 for item 1"),
        ({"k_lengths": [-1, 3]}, "k_lengths: expected lengths from 0 to 60"),
        ({"k_lengths": [1.5, 3]}, "k_lengths: expected an int; got float"),
        ({"k_lengths": 5}, "k_lengths: expected a sequence of ints; got int"),
        ({"sink_logits": [1.0]}, "sink_logits: expected 2 numbers, one per query head; got 1"),
        ({"sink_logits": [1.0, "a"]}, "sink_logits: expected numbers"),
        ({"sink_logits": 3}, "sink_logits: expected"),
        ({"window": 5}, "window: expected a pair"),
        ({"window": (-1, 0)}, "window: expected a size from 0"),
        ({"window": (1.5, 0)}, "window: expected an int"),
    ],
)
def test_wrong_arguments(rng, options, message):
    q, k, v = qkv(rng, "float32", 2, 2, 2, 30, 60, 8, 8)
    with pytest.raises(sl.Error, match=message):
        sl.attention(q, k, v, **options)
    packed = [x.transpose(1, 0, 2, 3).reshape(2, -1, 8) for x in (q, k, v)]
    if "lengths" in next(iter(options)):
        with pytest.raises(sl.ArgumentError, match="expected None for layout='lhd'"):
            sl.attention(*packed, layout="lhd", **options)
