"""Masks and scores in the kernels, against the reference and against the promises of the arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import FULL
from expressions import LENGTH, masks, scores
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import DTYPES, numpy_dtype, qkv
from tolerance import assert_accurate

import speedlight as sl
from speedlight.expressions.program import Program

pytestmark = pytest.mark.usefixtures("one_width")  # test_attention.py has masks in panels of any width
NAN = np.nan


@pytest.mark.parametrize("dtype", DTYPES if FULL else ["bfloat16"])
def test_dense_arrays(rng, dtype):
    q, k, v = qkv(rng, dtype, 2, 4, 2, 50, 300, 16, 16)
    visible = rng.random((2, 1, 50, 300)) < 0.5
    visible[0, 0, 3] = False
    bias = rng.standard_normal((4, 50, 300)).astype(np.float32)
    bias[:, :, 7] = -np.inf
    for start in (None, 11, [3, 400]):
        assert_accurate(q, k, v, mask=visible, score=[sl.softcap(2.0), bias], q_start=start)
    assert_accurate(q, k, v, mask=visible[..., :1, :], score=bias[:1])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"] if FULL else ["float64"])
def test_dense_arrays_of_any_strides_and_types(isa, rng, dtype):
    q, k, v = qkv(rng, dtype, 1, 4, 2, 53, 333, 16, 16)
    visible, bias = rng.random((53, 666)) < 0.7, rng.standard_normal((4, 53, 333))
    for mask in (visible[:, :333], visible[:, ::2], visible[::-1, ::-1][:, :333], np.asfortranarray(visible[:, 5:338])):
        assert_accurate(q, k, v, mask=mask)
    for score in (
        bias.astype(np.float16),
        bias.astype(np.float32)[..., ::-1],
        bias,
        bias[:, :1].astype(np.float32),
        bias[..., :1],
    ):
        assert_accurate(q, k, v, score=score)


def test_dense_arrays_of_odd_places(rng):
    """Unaligned, fields of records, read-only, without elements, and of no batch at all."""
    q, k, v = qkv(rng, "float32", 1, 2, 2, 30, 60, 8, 8)
    bias = rng.standard_normal((30, 60)).astype(np.float32)
    want = sl.attention(q, k, v, score=bias)
    unaligned = np.zeros(bias.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(30, 60)
    records = np.zeros((30, 60), [("flag", "i1"), ("bias", "f4")])
    fixed = bias.copy()
    unaligned[:], records["bias"], fixed.flags.writeable = bias, bias, False
    assert not unaligned.flags.aligned and records["bias"].strides[1] == 5
    for score in (unaligned, records["bias"], fixed, torch.from_numpy(bias), sl.table(bias).array):
        assert sl.attention(q, k, v, score=score).tobytes() == want.tobytes()
    for options in (
        {"mask": bias > 0},
        {"score": bias},
        {"mask": np.ones((0, 2, 30, 60), bool)},
        {"score": bias[None, None], "window": (3, 0)},
    ):
        out, lse = sl.attention(q[:0], k[:0], v[:0], return_lse=True, **options)
        assert out.shape == (0, 2, 30, 8) and lse.shape == (0, 2, 30)
        assert sl.plan(q[:0], k[:0], v[:0], **options).flops == 0
    none = sl.attention(q[:, :, :0], k, v, mask=np.ones((0, 60), bool))
    empty = sl.attention(q, k[:, :, :0], v[:, :, :0], score=np.ones((30, 0)))
    assert none.shape == (1, 2, 0, 8) and (empty == 0).all()


def test_hidden_parts_of_dense_arrays_are_skipped(isa, rng):
    """What a whole tile hides is never read: NaN there does not come out."""
    q, k, v = qkv(rng, "float32", 1, 2, 2, 100, 700, 16, 16)
    visible = np.zeros((100, 700), bool)
    visible[:, 130:150] = visible[60:, 600:] = True
    want = sl.attention(q, k, v, mask=visible)
    for hidden in (slice(0, 128), slice(256, 512)):
        k[:, :, hidden], v[:, :, hidden] = NAN, NAN
    assert want.tobytes() == sl.attention(q, k, v, mask=visible).tobytes()
    bias = np.where(visible, 0.0, -np.inf).astype(np.float32)
    additive = sl.attention(q, k, v, score=bias)
    assert np.isfinite(additive).all() and np.abs(additive - want).max() < 1e-5
    after = sl.attention(
        q, k, v, score=[bias, lambda s, b, h, i, j: sl.maximum(s, -1.0)]
    )  # -inf comes back: nothing is hidden
    assert np.isnan(after).all()


@settings(max_examples=2000 if FULL else 5, deadline=None)
@given(masks(), scores(), st.booleans(), st.sampled_from(["float32", "float64", "bfloat16"]), st.integers(0, 1 << 30))
def test_random_expressions(mask, score, causal, dtype, seed):
    rng = np.random.default_rng(seed)
    q, k, v = qkv(rng, dtype, 2, 4, 2, int(rng.integers(1, 80)), int(rng.integers(1, LENGTH - 80)), 9, 8)
    start = int(rng.integers(0, LENGTH - 80))
    assert_accurate(q, k, v, mask=mask, score=score, causal=causal, q_start=start, zeros_allowed=True)


@pytest.mark.each("dtype")
def test_the_same_bits_as_causal(isa, rng, dtype):
    q, k, v = qkv(rng, dtype, 1, 4, 2, 200, 1300, 16, 16)
    want = sl.attention(q, k, v, causal=True, return_lse=True)
    got = sl.attention(q, k, v, mask=lambda b, h, i, j: i >= j, return_lse=True)
    assert want[0].tobytes() == got[0].tobytes() and want[1].tobytes() == got[1].tobytes()


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": sl.window(20, 0)}])
def test_what_follows_the_last_key_of_some_queries_is_not_touched(isa, rng, options):
    """Queries that go through a tile together may see an odd number of its keys: the next is no partner of the last."""
    q, k, v = qkv(rng, "bfloat16", 1, 4, 4, 511, 512, 64, 64)  # several panels share a tile
    want = sl.attention(q, k, v, q_start=1, **options)
    for hidden in (289, 193, 161, 97, 81, 65, 49, 33, 17):  # for all before it
        k[:, :, hidden:], v[:, :, hidden:] = NAN, NAN
        rows = slice(0, hidden - 1)
        assert want[:, :, rows].tobytes() == sl.attention(q, k, v, q_start=1, **options)[:, :, rows].tobytes()


def test_keys_before_those_that_all_see(isa, rng):
    """A window's lower edge: of a key that some rows of a panel do not see, its score matters to the others alone."""
    q, k, v = qkv(rng, "float32", 1, 2, 2, 200, 200, 16, 16)
    k[:, :, ::13] *= 40
    for mask in (sl.window(50, None), sl.window(70, 25), sl.window(50, None) & (lambda b, h, i, j: j % 64 != 40)):
        assert_accurate(q, k, v, mask=mask)
        assert_accurate(q, k, v, mask=mask, score=sl.softcap(50.0))
    v[:, :, 39] = NAN
    out = sl.attention(q, k, v, mask=sl.window(50, None))[0, :, :, 0]
    assert np.isnan(out).any(axis=0).tolist() == [True] * 90 + [False] * 110


def test_what_follows_the_last_key_of_a_whole_panel_is_not_touched(isa, rng):
    """A panel of heads at one position sees an odd number of keys, all of its lanes the same; the next sees more."""
    q, k, v = qkv(rng, "bfloat16", 1, 96, 1, 40, 40, 64, 64)  # blocks of several panels
    want = sl.attention(q, k, v, causal=True)
    for hidden in range(39, 0, -2):
        k[:, :, hidden:], v[:, :, hidden:] = NAN, NAN
        assert want[:, :, :hidden].tobytes() == sl.attention(q, k, v, causal=True)[:, :, :hidden].tobytes()


@pytest.mark.units
@pytest.mark.parametrize("rows", [40, 2])
def test_an_odd_last_key_has_nothing_beside_it(isa, rng, rows):
    """Not its own value once more, 0 times which would be NaN where it is infinite."""
    q, k, v = qkv(rng, "bfloat16", 1, 1, 1, rows, 129, 64, 64)
    v[:, :, -1] = np.inf
    for causal in (False, True):
        out = sl.attention(q, k, v, causal=causal)
        assert np.isposinf(out[:, :, -1]).all() and np.isposinf(out).all(-1).all() == (not causal)


@pytest.mark.units("dtype")
@pytest.mark.parametrize(("dtype", "k_len"), [("float32", 384), ("float64", 384), ("bfloat16", 384), ("bfloat16", 257)])
@pytest.mark.parametrize(
    "options", [{"causal": True, "q_start": 255}, {"mask": lambda b, h, i, j: (j < 256) | (i > 255), "q_start": 255}]
)
@pytest.mark.parametrize("rows", [40, 2])
def test_a_tile_that_a_row_does_not_see_leaves_the_sign_of_its_zero(isa, dtype, k_len, options, rows):
    """Row 0 underflows to -0 in the second tile; the third is its neighbours' alone, and may end with half a pair.

    Two rows take the decode kernel.
    """
    q, k, v = (np.zeros((1, 1, n, 16), numpy_dtype(dtype)) for n in (rows, k_len, k_len))
    least = {"float32": 2.0**-149, "float64": 2.0**-1074, "bfloat16": 2.0**-126}[dtype]
    q[...], v[0, 0, 0], k[0, 0, 128] = 1, -least, 16
    alone = sl.attention(q[:, :, :1], k, v, **options)
    assert np.signbit(alone).all() and alone.tobytes() == sl.attention(q, k, v, **options)[:, :, :1].tobytes()


def test_empty_tiles_are_skipped(rng):
    """A window costs what it shows, not the square: work counted by the clock would be noise, so poison tells."""
    q, k, v = qkv(rng, "float32", 1, 1, 1, 48, 200_000, 8, 8)
    k[:, :, :190_000] = NAN
    out, lse = sl.attention(q, k, v, mask=sl.window(100, 0), return_lse=True)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


def test_index_out_of_range_is_an_error(isa, rng):
    q, k, v = qkv(rng, "float32", 1, 2, 2, 30, 60, 8, 8)
    short = sl.table(np.arange(50.0), "short")
    with pytest.raises(sl.ArgumentError, match="short: expected index 1 from 0 to 49 where the key is visible; got 50"):
        sl.attention(q, k, v, score=lambda s, b, h, i, j: s + short[j])
    bounded = sl.attention(q, k, v, score=lambda s, b, h, i, j: s + short[j], mask=lambda b, h, i, j: j < 50)
    assert np.isfinite(bounded).all()
    ids = sl.table(np.arange(60), "ids")
    with pytest.raises(sl.ArgumentError, match="ids: expected index 1 from 0 to 59"):
        sl.attention(q, k, v, mask=lambda b, h, i, j: ids[j + 10] >= 0)
    with pytest.raises(sl.ArgumentError, match="ids"):
        sl.reference.attention(q, k, v, mask=lambda b, h, i, j: ids[j + 10] >= 0)


def test_numbers_are_not_part_of_a_kernel(rng):
    from speedlight.cpu.runtime import compile as compiling

    q, k, v = qkv(rng, "float32", 1, 2, 2, 30, 60, 8, 8)
    outs = [sl.attention(q, k, v, mask=lambda b, h, i, j, n=n: (i - j) * 2 < n) for n in (4, 40)]
    count = len(compiling._loaded)
    outs += [sl.attention(q, k, v, mask=lambda b, h, i, j, n=n: (i - j) * 2 < n) for n in (12, 0)]
    assert len(compiling._loaded) == count
    assert len({x.tobytes() for x in outs}) == 4


def test_kernels_know_which_tables_a_mask_and_a_score_share(rng):
    """A kernel for one table in both is none for two tables of the same type."""
    q, k, v = qkv(rng, "float32", 1, 2, 2, 30, 60, 8, 8)
    one, other = (sl.table(x.astype(np.float32), "x") for x in (np.linspace(-1, 1, 60), np.linspace(3, -9, 60)))
    mask = sl.expression(lambda b, h, i, j: one[j] > -0.5)
    for table in (one, other, one):
        assert_accurate(q, k, v, mask=mask, score=lambda s, b, h, i, j, t=table: s + t[j])


def test_expressions_of_one_structure_have_as_many_lookups():
    """Kernels note wrong indices by lookup, into an array of the call's own size."""
    table, box = sl.table(np.arange(4.0)), {"b": (0, 0), "h": (0, 0), "i": (0, 9), "j": (0, 9)}

    def twice(s, b, h, i, j):
        entry = table[j]
        return s + entry * entry

    scores = [sl.expression(x) for x in (twice, lambda s, b, h, i, j: s + table[j] * table[j])]
    first, second = (Program.of(None, score, box) for score in scores)
    assert first is not None and second is not None and scores[0] == scores[1]
    assert first == second and len(first.lookups) == len(second.lookups) == 1 and first.checked == (True,)


def test_kept_expressions_are_prepared_once_and_told_apart(rng):
    q, k, v = qkv(rng, "float32", 1, 2, 2, 30, 60, 8, 8)
    first, second = sl.window(3, 0), sl.window(9, 0)
    want = [sl.attention(q, k, v, mask=lambda b, h, i, j, n=n: (i - j <= n) & (j <= i)) for n in (3, 9)]
    for _ in range(2):
        for mask, right in zip((first, second), want, strict=True):
            assert sl.attention(q, k, v, mask=mask).tobytes() == right.tobytes()
    tables = [sl.documents(np.repeat([0, 1], [n, 60 - n])) for n in (40, 50)]
    outs = [sl.attention(q, k, v, mask=mask) for mask in tables for _ in range(2)]
    assert outs[0].tobytes() == outs[1].tobytes() != outs[2].tobytes() == outs[3].tobytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": np.zeros((3, 30, 60), bool)}, "mask: expected a shape that broadcasts"),
        ({"mask": np.zeros((30, 60))}, "mask: expected a bool array"),
        ({"score": np.zeros((30, 60), bool)}, "score: expected a float array"),
        ({"mask": 3}, "mask: expected a function, a pattern"),
        ({"mask": lambda b, h, i, j: i - j}, "mask: expected a bool result"),
        ({"mask": lambda i, j: i >= j}, "mask: expected the arguments"),
        ({"score": lambda s, b, h, i, j: s if i > j else 0}, "use sl.where"),
        ({"score": sl.causal()}, "score: expected a score"),
        ({"score": [lambda s, b, h, i, j: np.zeros(3)]}, "Look arrays up through sl.table"),
        (
            {"mask": np.ones((30, 60), np.int64)},
            r"mask: expected a bool array, .*got int64. Use mask.bool\(\) or mask.astype\(bool\)",
        ),
        (
            {"mask": torch.ones(30, 60, dtype=torch.uint8)},
            r"mask: expected a bool array, .*got uint8. Use mask.bool\(\)",
        ),
        ({"score": np.ones((30, 60), np.int32)}, r"score: expected a float array; got int32. Use score.float\(\)"),
        (
            {"score": np.ones((30, 60), ">f4")},
            r"score: expected native byte order; got >f4. Use score.astype\('float32'\)",
        ),
        ({"score": np.ma.zeros((30, 60))}, "score: expected an array without a mask of its own; got MaskedArray"),
        ({"score": np.zeros((30, 60), complex)}, "score: .*got dtype complex128"),
        ({"score": np.zeros((30, 60), object)}, "score: .*got dtype object"),
        ({"mask": [[True] * 60] * 30}, "mask: expected a function, a pattern such as .*got list"),
        ({"score": torch.zeros(30, 60, requires_grad=True)}, r"score: requires grad.*score.detach\(\)"),
        ({"score": [sl.softcap(2.0), torch.zeros(60, requires_grad=True)]}, r"score: requires grad.*score.detach\(\)"),
        (
            {"score": torch.complex(torch.zeros(30, 60), torch.zeros(30, 60)).conj().imag},
            r"score: .*score.resolve_neg\(\)",
        ),
        ({"score": torch.zeros(30, 60).to_sparse()}, r"score: expected a strided tensor.*score.to_dense\(\)"),
        (
            {"score": torch.nested.nested_tensor([torch.ones(60)] * 30, layout=torch.jagged)},
            "score: expected a tensor whose numbers lie in memory; got NestedTensor",
        ),
        ({"mask": torch.ones(30, 60, device="meta") > 0}, "mask: .*device meta"),
        ({"score": torch._efficientzerotensor((30, 60))}, "score: .*storage is missing"),
    ],
)
def test_wrong_arguments(rng, options, message):
    q, k, v = qkv(rng, "float32", 1, 2, 2, 30, 60, 8, 8)
    with pytest.raises(sl.Error, match=message):
        sl.attention(q, k, v, **options)
