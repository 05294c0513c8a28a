"""What test_backward.py tells, of the GPU engine: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FULL
from expressions import LENGTH, masks, scores
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from on_gpu import DTYPES, attention_backward, small_blocks, tensor
from problems import flow_of, qkv
from test_backward import (  # noqa: F401 - collected here as well, with the fixtures below
    HIDDEN,
    OPTIONS,
    check,
    one_problem,
    same,
    test_every_dim,
    test_far_scores,
    test_rows_that_see_nothing,
    test_slopes_of_hidden_pairs,
)
from test_backward import test_every_length as every_length
from test_backward import test_every_option as every_option
from test_backward import test_special_values as special_values
from test_table_gradients import FORMS, problem
from tolerance import assert_gradients
from ways import poisoned

import speedlight as sl
from speedlight.gpu import differentiate
from speedlight.gpu.tiles import Tile

if FULL or torch.cuda.is_available():  # which take the interpreter long
    test_every_length, test_special_values = every_length, special_values


@pytest.fixture
def gradients():
    with small_blocks(Tile(64, 64, 4, 1)):
        yield functools.partial(assert_gradients, backward=attention_backward, tile=16)


@pytest.fixture
def isa():
    return "cuda"


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


ALIKE = {"top-left", "positions", "a shard", "no queries", "no scale", "small scale"}  # to kernels, as others of these


@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("name", [x for x in OPTIONS if FULL or torch.cuda.is_available() or x not in ALIKE])
def test_every_option(rng, dtype, name, gradients):
    every_option(rng, dtype, name, gradients)


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_hidden_has_no_say(rng, name):
    """The same bits whatever lies where nothing reads, of many blocks; a block that sees some of it is mended."""
    options = HIDDEN[name]
    with small_blocks(Tile(16, 32, 4, 1)):
        x = list(one_problem(rng, "float32", **options).values())
        want = assert_gradients(x[:3], x[3:], backward=attention_backward, tile=16, **options)
        same(attention_backward(*poisoned(x[:3], x[3:], options, rng), **options), want, name)


@pytest.mark.parametrize("name", ["q", "k", "v", "d_out"])
def test_what_is_not_finite_propagates(rng, name, gradients):
    options = {"causal": True, "q_start": 120, "scale": -0.3}
    for special in (np.nan, np.inf, -np.inf):
        x = one_problem(rng, "float32", **options)
        x[name][0, 0, 4] = special
        check(gradients, x, **options)


@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("name", FORMS)
def test_tables_and_sinks(rng, dtype, name, gradients, monkeypatch):
    """Of each pair, of each key, of each row; they change no bit of the others, and what is hidden changes none."""
    score, tables = FORMS[name]
    arrays, options = problem(
        dtype, rng, score, batch=1, q_len=40, k_len=90, dropout=0.2, seed=5, sink_logits=[0.5] * 4
    )
    arrays, flow = poisoned(arrays[:3], arrays[3:], options, rng)[:3], arrays[3:]
    monkeypatch.setattr(differentiate, "_TERMS", 1 << 13)
    with small_blocks(Tile(32, 64, 4, 1)):
        got = gradients(arrays, flow, grads=(*tables, "sink_logits"), **options)
        same(attention_backward(*arrays, *flow, **options), got[:3], name)


@settings(max_examples=200 if FULL else 2, deadline=None)
@given(scores(3), st.none() | masks(1), st.booleans(), st.integers(0, 1 << 30), st.sampled_from(DTYPES))
def test_random_expressions(score, mask, causal, seed, dtype):
    rng = np.random.default_rng(seed)
    arrays = qkv(rng, dtype, 1, 4, 2, int(rng.integers(1, 60)), int(rng.integers(1, 90)), 9, 5)
    options = {"score": sl.expression(score, "score"), "causal": causal, "q_start": int(rng.integers(0, LENGTH // 2))}
    if mask is not None:
        options["mask"] = sl.expression(mask, "mask")
    with small_blocks(Tile(32, 16, 4, 1)), np.errstate(all="ignore"):
        flow = flow_of(rng, arrays, **options)
        assert_gradients(arrays, flow, backward=attention_backward, tile=16, zeros_allowed=True, **options)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_see(rng, sizes):
    """Gradients of what there is are 0: of tables and sinks, too."""
    table = sl.table(np.ones(2))
    options = {"score": lambda s, b, h, i, j: s * table[h], "sink_logits": [0.0, 1.0], "grads": (table, "sink_logits")}
    for batch in (0, 2):
        arrays = qkv(rng, "float32", batch, 2, 1, sizes[0], sizes[1], 3, 4)
        *three, more = attention_backward(*arrays, *flow_of(rng, arrays), **options)
        assert [x.shape for x in (*three, *more)] == [*(x.shape for x in arrays), (2,), (2,)]
        assert not any([x.any() for x in (*three, *more)])


@pytest.mark.parametrize("dims", [(512, 300), (130, 512)], ids=str)
def test_large_dims(rng, dims):
    arrays = qkv(rng, "float16", 1, 2, 1, 20, 30, *dims)
    flow = flow_of(rng, arrays, causal=True)
    assert_gradients(arrays, flow, backward=attention_backward, tile=16, causal=True)


@pytest.mark.parametrize("mask", [None, sl.window(40, 40)], ids=["", "window"])
def test_causality_begins_anywhere_in_a_tile(rng, mask):
    """The first row that sees a tile of keys, and the first that sees all of it, begin or end a block."""
    arrays = qkv(rng, "float32", 1, 2, 1, 40, 50, 8, 8)
    with small_blocks():
        for start in (-17, -16, -1, 1, 15, 17):
            options = {"causal": True, "q_start": start, "mask": mask}
            flow = flow_of(rng, arrays, **options)
            assert_gradients(arrays, flow, backward=attention_backward, tile=16, **options)


def test_tiles_that_the_host_classifies(rng):
    """A table of pairs hides some tiles and shows others whole, each in both kernels."""
    arrays = qkv(rng, "float32", 1, 2, 1, 40, 90, 8, 8)
    shown = [[0, 1, 0, 1, 1, 0], [1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1]]
    pairs = sl.table(np.kron(shown, np.ones((16, 16))) > 0)
    options = {"mask": lambda b, h, i, j: pairs[i, j], "q_start": 0}
    with small_blocks():
        assert_gradients(arrays, flow_of(rng, arrays, **options), backward=attention_backward, tile=16, **options)


def test_nothing_is_read_past_the_ends(rng):
    """Of arrays that end where memory does, in parts of tiles; what is not finite is read again, row by row."""
    arrays = qkv(rng, "float32", 1, 2, 1, 20, 30, 8, 8)
    arrays[2][0, 0, 29, 3] = np.inf
    given = [x for x in (*arrays, *flow_of(rng, arrays, q_start=3)) if x is not None]
    given[0][0, 1, 19] = given[1][0, 0, 29] = np.nan
    ending = [Guarded(x.nbytes).array(x.shape, x.dtype, "over") for x in given]
    for x, to in zip(given, ending, strict=True):
        to[...] = x
    with small_blocks(Tile(32, 32, 4, 1)):
        same(attention_backward(*ending, q_start=3), attention_backward(*given, q_start=3))


def test_keys_that_items_share_are_summed_in_float64():
    x = SimpleNamespace(tensor=torch.tensor([2.0**24, 1, 1]).reshape(3, 1, 1, 1), shape=(3, 1, 1, 1))
    assert differentiate.Gradients.sum_items(None, x).item() == 2**24 + 2


@pytest.mark.parametrize("precision", ["tf32x3", "tf32"])
def test_products_by_tensor_cores(rng, precision, gradients):
    arrays = qkv(rng, "float32", 1, 4, 2, 40, 70, 24, 20)
    gradients(arrays, flow_of(rng, arrays, causal=True), causal=True, precision=precision)


@pytest.mark.parametrize("layout", ["blhd", "hld", "lhd"])
def test_layouts(rng, layout, gradients):
    """Padded and packed sequences, an empty one among them; keys that items share."""
    q, k, v = qkv(rng, "float32", 1 if layout != "blhd" else 2, 4, 2, 90, 90, 8, 5)
    options = {"layout": layout, "causal": True}
    if layout == "blhd":
        arrays = q.swapaxes(1, 2), k[:1].swapaxes(1, 2), v[:1].swapaxes(1, 2)
    else:
        arrays = tuple(x[0] if layout == "hld" else x[0].swapaxes(0, 1) for x in (q, k, v))
    if layout == "lhd":
        options |= {"cu_seqlens_q": [0, 60, 60, 90], "sink_logits": [0.5, 1.0, 2.0, 3.0]}
    grads = ("sink_logits",) if layout == "lhd" else ()
    with small_blocks(Tile(32, 16, 4, 1)):
        gradients(arrays, flow_of(rng, arrays, **options), grads=grads, **options)


def test_bits_are_the_same_each_time_and_in_any_batch(rng):
    options = {"causal": True}
    arrays = qkv(rng, "bfloat16", 2, 4, 2, 50, 70, 16, 16)
    flow = flow_of(rng, arrays, **options)
    with small_blocks():
        want = attention_backward(*arrays, *flow, **options)
        same(attention_backward(*arrays, *flow, **options), want)
        one = [x[1:] for x in (*arrays, *flow)]
        same(attention_backward(*one, **options), [x[1:] for x in want])


def test_what_has_no_gradient(rng):
    arrays = qkv(rng, "float64", 1, 2, 1, 3, 4, 8, 8)
    flow = [tensor(x) for x in flow_of(rng, arrays)]
    with pytest.raises(sl.UnsupportedError, match=r"q: expected float32, float16 or bfloat16 on a GPU; got float64"):
        sl.attention_backward(*map(tensor, arrays), *flow, engine="cuda")
