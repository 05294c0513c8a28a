"""Padded batches, attention sinks, and the window shorthand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import DTYPES, qkv
from tolerance import assert_accurate

import speedlight as sl
import speedlight.torch
from speedlight.arrays.array import describe
from speedlight.cpu.engine.forward_call import upcoming_of, words_of
from speedlight.cpu.engine.schedule import schedule
from speedlight.cpu.runtime.tuned import tuning_of
from speedlight.host.machine import current_isa, level2_bytes
from speedlight.problem.build import from_arrays
from speedlight.problem.operands import Dense, Rows
from speedlight.problem.options import Options

pytestmark = pytest.mark.usefixtures("one_width")  # test_attention.py has sinks and lengths in panels of any width
SINKS = np.array([0.5, -3.0, 20.0, -np.inf])
LENGTHS = {"q_lengths": [75, 0, 40], "k_lengths": [430, 100, 0]}


@pytest.mark.units
@pytest.mark.each("dtype", "options")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"mask": sl.window(40, 3)},
        {"score": sl.softcap(3.0)},
        {"scale": -0.3},
        {"mask": sl.prefix(0)},
        LENGTHS,
    ],
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


@pytest.mark.each("dtype", "q_len")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [3, 60])
def test_a_sink_of_minus_infinity_is_none(isa, rng, dtype, q_len):
    """In either kernel; of rows before every key nothing is left."""
    q, k, v = qkv(rng, dtype, 2, 4, 2, q_len, 1300, 16, 16)
    none = [-np.inf] * 4
    for q_start in (None, -q_len):
        want = sl.attention(q, k, v, causal=True, q_start=q_start, return_lse=True)
        got = sl.attention(q, k, v, causal=True, q_start=q_start, return_lse=True, sink_logits=none)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(want, got, strict=True))
    assert not got[0].any() and (got[1] == -np.inf).all()


def test_padded_batches_meet_the_reference(isa, rng):
    q, k, v = qkv(rng, "float32", 3, 4, 2, 75, 430, 17, 20)
    mask = rng.random((3, 1, 75, 430)) < 0.6
    assert_accurate(
        q, k, v, mask=mask, q_lengths=np.array([75, 3, 40]), k_lengths=np.array([430, 100, 9]), zeros_allowed=True
    )


def test_a_padded_batch_of_none():
    nothing = np.zeros((0, 2, 5, 16), np.float32)
    assert sl.attention(nothing, nothing, nothing, q_lengths=[], k_lengths=[]).shape == (0, 2, 5, 16)


def test_lists_that_change_are_seen(rng):
    """Repeated calls are prepared once: by the values of a list, not by the list."""
    q, k, v = qkv(rng, "float32", 2, 2, 2, 30, 60, 8, 8)
    lengths, sinks = [60, 60], np.zeros(2)
    first = sl.attention(q, k, v, k_lengths=lengths, sink_logits=sinks)
    lengths[1], sinks[0] = 7, 2.0
    second = sl.attention(q, k, v, k_lengths=lengths, sink_logits=sinks)
    assert (
        second.tobytes()
        == sl.attention(q.copy(), k, v, k_lengths=[60, 7], sink_logits=[2.0, 0.0]).tobytes()
        != first.tobytes()
    )


PLACED = [
    {"causal": True}, {"window": (3, None)}, {"mask": sl.causal()}, {"mask": lambda b, h, i, j: j <= i},
    {"score": sl.alibi([0.5, 0.25])},
    {"score": [sl.softcap(3.0), lambda s, b, h, i, j: s - (i - j)]},
]  # fmt: skip


@pytest.mark.parametrize("options", PLACED)
@pytest.mark.parametrize("lengths", [{"k_lengths": [9, 6]}, {"q_lengths": [9, 6]}])
def test_a_padded_square_with_one_kind_of_lengths_is_refused(rng, options, lengths):
    """Aligned at the end of each item, queries would be elsewhere than whoever pads a square means."""
    q, k, v = qkv(rng, "float32", 2, 2, 2, 9, 9, 8, 8)
    (name,) = lengths
    other = {"k_lengths": "q_lengths", "q_lengths": "k_lengths"}[name]
    for call in (sl.attention, sl.plan, sl.reference.attention):
        with pytest.raises(
            sl.ArgumentError, match=f"^{name}: expected lengths= in its place, .*, or {other}= or .* item 1's"
        ):
            call(q, k, v, **lengths, **options)
    rows = [slice(n) for n in (9, 6)]
    alone = [
        sl.attention(q[b : b + 1, :, r], k[b : b + 1, :, r], v[b : b + 1, :, r], **options) for b, r in enumerate(rows)
    ]
    for way_out in ({"lengths": [9, 6]}, {other: [9, 6]} | lengths, {"q_start": 0} | lengths):
        out = sl.attention(q, k, v, **way_out, **options)
        if name == "k_lengths" or "q_start" not in way_out:
            assert all(
                out[b, :, r].tobytes() == one[0].tobytes() for b, (r, one) in enumerate(zip(rows, alone, strict=True))
            )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": np.tri(9, dtype=bool)},
        {"causal": "top-left"},
        {"score": sl.softcap(3.0)},
        {"causal": True, "k_lengths": [9, 0]},
    ],
)
def test_lengths_alone_where_positions_do_not_matter(rng, options):
    q, k, v = qkv(rng, "float32", 2, 2, 2, 9, 9, 8, 8)
    assert_accurate(q, k, v, **({"k_lengths": [9, 6]} | options), zeros_allowed=True)
    assert_accurate(q[:, :, :4], k, v, causal=True, k_lengths=[9, 6])  # a step of a cache


def test_numbers_that_float32_cannot_hold(rng):
    q, k, v = qkv(rng, "float32", 1, 2, 2, 5, 9, 8, 8)
    for bad in (1e300, -1e39, 10**400):
        with pytest.raises(sl.ArgumentError, match="^sink_logits: expected"):
            sl.attention(q, k, v, sink_logits=[0.0, bad])
    wide = [x.astype(np.float64) for x in (q, k, v)]
    assert not sl.attention(*wide, sink_logits=[1e300, 1e300]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q_lengths": [30]}, "q_lengths: expected 2 lengths, one per batch item; got 1"),
        (
            {"q_lengths": [30, 31]},
            "q_lengths: expected lengths from 0 to 30, the length of q; got 31 for item 1",
        ),
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


def test_lengths_are_of_queries_and_keys_alike(rng):
    """Everywhere: attention() and its backward pass, plans, the specification; arrays, lists and tensors hold them."""
    q, k, v = qkv(rng, "float32", 2, 2, 2, 9, 9, 8, 8)
    both = {"q_lengths": [9, 6], "k_lengths": [9, 6], "causal": True}
    out, lse = sl.attention(q, k, v, **both, return_lse=True)
    assert not out[1, :, 6:].any() and np.isneginf(lse[1, :, 6:]).all() and out[1, :, 5].all()
    want = [x.tobytes() for x in sl.attention_backward(q, k, v, out, lse, out, **both)]
    for lengths in ([9, 6], (9, 6), np.array([9, 6], np.int32), torch.tensor([9, 6])):
        padded = {"lengths": lengths, "causal": True}
        assert sl.attention(q, k, v, **padded).tobytes() == out.tobytes()
        assert [x.tobytes() for x in sl.attention_backward(q, k, v, out, lse, out, **padded)] == want
        assert sl.plan(q, k, v, **padded) == sl.plan(q, k, v, **both)
    assert_accurate(q, k, v, lengths=[9, 6], causal=True, zeros_allowed=True)
    sizes = {"batch": 2, "q_heads": 2, "head_dim": 8}
    assert sl.plan(**sizes, **padded).visible_pairs == sl.plan(**sizes, **both).visible_pairs
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in (q, k, v))
    followed = speedlight.torch.attention(q, k, v, **padded)
    followed.backward(torch.from_numpy(out))
    assert [x.grad.numpy().tobytes() for x in (q, k, v)] == want


@pytest.mark.parametrize("name", ["q_lengths", "k_lengths"])
def test_lengths_stand_alone(rng, name):
    q, k, v = qkv(rng, "float32", 2, 2, 2, 9, 9, 8, 8)
    for call in (sl.attention, sl.plan, sl.reference.attention):
        with pytest.raises(sl.ArgumentError, match=f"^lengths: expected None beside {name}=; got both"):
            call(q, k, v, lengths=[9, 6], **{name: [9, 6]})


LETTERS = {"bhld": ["bhsd", "BHSD", "bnsd", "BNTH", "bhnd"], "blhd": ["bshd", "BSND", "BTNH", "bthd"],
           "lhd": ["thd", "THD", "NHD", "tnd"]}  # fmt: skip


@pytest.mark.parametrize("layout", LETTERS)
def test_layouts_by_other_libraries_letters(rng, layout):
    """Everywhere that has a layout, again and again, and without another preparation's memory."""
    shape = {"bhld": (2, 3, 5, 8), "blhd": (2, 5, 3, 8), "lhd": (5, 3, 8)}[layout]
    q = rng.standard_normal(shape, dtype=np.float32)
    want, lse = sl.attention(q, q, q, layout=layout, causal=True, return_lse=True)
    grads = [x.tobytes() for x in sl.attention_backward(q, q, q, want, lse, q, layout=layout, causal=True)]
    turned = sl.rotary(q, positions=3, layout=layout).tobytes()
    t = torch.from_numpy(q).requires_grad_()
    for name in LETTERS[layout]:
        options = {"layout": name, "causal": True}
        for _ in range(2):
            assert sl.attention(q, q, q, **options).tobytes() == want.tobytes()
            assert [x.tobytes() for x in sl.attention_backward(q, q, q, want, lse, q, **options)] == grads
        assert sl.reference.attention(q, q, q, **options).shape == want.shape
        assert sl.plan(q, q, q, **options) == sl.plan(q, q, q, layout=layout, causal=True)
        assert sl.rotary(q, positions=3, layout=name).tobytes() == turned
        assert speedlight.torch.attention(t, t, t, **options).detach().numpy().tobytes() == want.tobytes()


def test_alignments_by_other_libraries_names(rng):
    q, k, v = qkv(rng, "float32", 2, 2, 2, 5, 9, 8, 8)
    pages = k.swapaxes(1, 2)
    for name, ours in (("bottom-right", True), ("lower-right", True), ("upper-left", "top-left")):
        want = sl.attention(q, k, v, causal=ours).tobytes()
        for _ in range(2):
            assert sl.attention(q, k, v, causal=name).tobytes() == want
        t = [torch.from_numpy(x) for x in (q, k, v)]
        assert speedlight.torch.attention(*t, causal=name).numpy().tobytes() == want
        with pytest.raises(sl.ArgumentError, match=rf"^q_start: expected None with causal='{name}'.* got both"):
            sl.attention(q, k, v, causal=name, q_start=3)
        if ours is True:
            for layout in ("bhld", "bhsd"):
                paged = sl.attention_paged(q, pages, pages, [[0], [1]], [9, 9], causal=name, layout=layout)
                assert paged.tobytes() == sl.attention(q, k, k, causal=True).tobytes()


def test_a_batch_beyond_the_caches_has_the_bits_of_its_items(rng):
    """A task fetches the next one's arrays then, of another item; of arrays that the caches keep it does not."""
    items = -(-7 * level2_bytes() // (4 * 4 * 4 * 80 * 16))
    q, k, v = qkv(rng, "float32", items, 4, 2, 80, 80, 16, 16)
    words = [_words(x[: n or None] for x in (q, k, v)) for n in (0, 1)]
    assert words[0]["upcoming"] == 2 and words[0]["q_lines"] == words[0]["v_lines"] == 1 and not words[1]
    for n in (1, 2):
        sl.set_threads(n)
        for options in ({}, {"causal": True}, {"q_lengths": [80, 40] * (items // 2) + [80] * (items % 2)}):
            out = sl.attention(q, k, v, q_start=0, **options)
            for b in (0, 1, items - 1):
                of_item = {x: y[b : b + 1] if x == "q_lengths" else y for x, y in options.items()}
                alone = sl.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], q_start=0, **of_item)
                assert alone.tobytes() == out[b : b + 1].tobytes()


def _words(arrays):
    q, k, v = (describe(x, name) for x, name in zip(arrays, "qkv", strict=True))
    problem, _, _ = from_arrays(q, k, v, Options())
    rows, keys, isa = Rows("bhld", q, q.strides), Dense("bhld", k, v), current_isa()
    how = schedule(problem, isa, 2, keys.strides("float32"), tuning_of(isa))
    return upcoming_of(problem, how, words_of(problem, how, rows, keys))
