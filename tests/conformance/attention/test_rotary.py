"""sl.rotary(): against float64, and as others mean it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from conftest import FULL
from problems import DTYPES, numpy_dtype
from tolerance import assert_within, plain

import speedlight as sl

LAYOUTS = {"bhld": (2, 3, 5, 16), "blhd": (2, 5, 3, 16), "lhd": (5, 3, 16)}
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def drawn(rng, shape, dtype="float32"):
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def tables(rng, rows, columns, dtype="float32"):
    angles = rng.uniform(-4, 4, (rows, columns))
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def assert_turned(x, dtype, *tables, **options):
    """NumPy's and PyTorch's results, inside the bound, and with the same bits."""
    got = sl.rotary(x, *tables, **options)
    want = sl.reference.rotary(x, *tables, **options)
    size = np.abs(plain(x)).max() * 2
    unit = ROUNDOFF["float64" if dtype == "float64" else "float32"]  # each table entry and product, and the sum
    assert_within(got, want, 4 * unit * size + (1 + 2**-8) * ROUNDOFF[dtype] * np.abs(want) + 2.0**-25)
    assert type(got) is np.ndarray and got.dtype == x.dtype
    wrap = lambda a: torch.from_numpy(a.astype(np.float32)).bfloat16() if dtype == "bfloat16" else torch.from_numpy(a)  # noqa: E731
    theirs = sl.rotary(wrap(x), *(torch.from_numpy(t) for t in tables), **options)
    if tables:  # else cosines are those of two libraries
        assert plain(theirs).tobytes() == plain(got).tobytes()
    else:
        assert_within(theirs, want, 4 * unit * size + (1 + 2**-8) * ROUNDOFF[dtype] * np.abs(want) + 2.0**-25)
    return got


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_few_tokens_have_the_bits_of_many(rng, kind):
    """Few are turned by tables that are kept, whole rows at once; `out` and long arrays by halves."""
    x = rng.standard_normal((2, 3, 9, 16), dtype=np.float32)
    x[0, 0, :4, :4] = np.inf, -0.0, 0.0, 1e-42
    x[0, 0, 0, 8] = np.inf
    few = np.asarray(sl.rotary(kind(x), positions=5))
    many = np.asarray(sl.rotary(kind(x), positions=5, out=kind(np.empty_like(x))))
    assert np.isnan(few).any() and np.array_equal(np.isnan(few), np.isnan(many))
    assert np.where(np.isnan(few), 0, few).tobytes() == np.where(np.isnan(many), 0, many).tobytes()


@pytest.mark.each("layout", "dtype", "interleaved", "dims")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [None, 2, 12])
def test_against_float64(rng, dtype, layout, interleaved, dims):
    x = drawn(rng, LAYOUTS[layout], dtype)
    options = {"layout": layout, "interleaved": interleaved, "dims": dims}
    assert_turned(x, dtype, positions=1000, base=5e5, **options)
    for columns in {dims or 16, (dims or 16) // 2}:
        assert_turned(x, dtype, *tables(rng, 9, columns), positions=[8, 0, 3, 3, 1], **options)
        assert_turned(x, dtype, *tables(rng, 9, columns), positions=4, **options)
        if layout != "lhd":
            shape = (2, 5, columns)
            assert_turned(x, dtype, drawn(rng, shape), drawn(rng, shape), **options)
            each = rng.integers(0, 9, (2, 5))
            assert_turned(x, dtype, *tables(rng, 9, columns), positions=each, **options)


# --- as others have it, written from their sources


def llama(x, cos, sin):
    """transformers: (batch, heads, length, d); cos and sin (batch, length, d)."""
    half = np.concatenate([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
    return x * cos[:, None] + half * sin[:, None]


def test_llama(rng):
    x, angles = drawn(rng, (2, 3, 5, 16), "float64"), np.arange(5)[:, None] * 10000.0 ** (-np.arange(0, 16, 2) / 16)
    emb = np.concatenate([angles, angles], -1)[None]
    want = llama(x, np.cos(emb), np.sin(emb))
    np.testing.assert_allclose(sl.rotary(x), want, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(sl.rotary(x, np.cos(emb), np.sin(emb)), want)


def test_tables_whose_halves_differ(rng):
    """Nobody's tables have, and yet they mean what transformers makes of them."""
    x, cos, sin = drawn(rng, (2, 3, 5, 16)), drawn(rng, (2, 5, 16)), drawn(rng, (2, 5, 16))
    np.testing.assert_allclose(sl.rotary(x, cos, sin), llama(x, cos, sin), rtol=0, atol=1e-6)


def test_flash_attention(rng):
    """apply_rotary_emb_torch of flash_attn/layers/rotary.py: (batch, length, heads, d), tables (length, dims / 2)."""
    x, (cos, sin) = drawn(rng, (2, 5, 3, 16)), tables(rng, 5, 6)
    for interleaved in (False, True):
        turned = x[..., :12]
        if interleaved:
            half = np.stack((-turned[..., 1::2], turned[..., ::2]), -1).reshape(turned.shape)
            c, s = (np.repeat(t, 2, -1)[:, None] for t in (cos, sin))
        else:
            half = np.concatenate((-turned[..., 6:], turned[..., :6]), -1)
            c, s = (np.tile(t, 2)[:, None] for t in (cos, sin))
        want = np.concatenate([turned * c + half * s, x[..., 12:]], -1)
        got = sl.rotary(x, cos, sin, interleaved=interleaved, dims=12, layout="blhd")
        np.testing.assert_array_equal(got, want)


# --- autograd


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # PyTorch's own, of forward mode
@pytest.mark.parametrize("interleaved", [False, True])
def test_autograd(interleaved):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = (torch.randn(4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {"dims": 4, "interleaved": interleaved, "positions": torch.tensor([[0, 3, 1]])}
    turned = lambda *args: sl.rotary(*args, **options)  # noqa: E731
    for args in ((x,), (x, cos, sin)):
        assert torch.autograd.gradcheck(turned, args, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(turned, args, fast_mode=not FULL)
    _, tangent = torch.func.jvp(turned, (x.detach(),), (x.detach(),))
    assert torch.equal(tangent, turned(x.detach()))  # it is linear


def test_transforms_and_compilers():
    x = torch.randn(2, 3, 5, 8)
    cos, sin = torch.randn(2, 9, 4)
    for options in ({}, {"positions": torch.arange(5)}, {"positions": 7, "interleaved": True, "dims": 4},
                    {"cos": cos, "sin": sin, "positions": torch.tensor([[1, 2, 3, 4, 8]])}):  # fmt: skip
        want = sl.rotary(x, **options)
        compiled = torch.compile(lambda y, o=options: sl.rotary(y, **o), fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), want)
        each = torch.func.vmap(lambda y, o=options: sl.rotary(y[None], **o)[0])(x)
        assert torch.allclose(each, want, atol=1e-6)


def test_kept_angles_are_plain_tensors_whoever_asked_first(rng):
    """Those of a token are kept for later calls, which gradients, transforms and modes may be around."""
    x = torch.from_numpy(rng.standard_normal((1, 4, 1, 16), dtype=np.float32))

    def turn(x):
        return sl.rotary(x, positions=4321)

    with torch.inference_mode():
        first = turn(x).clone()
    assert (turn(x) == first).all() and (turn(x).numpy() == sl.rotary(x.numpy(), positions=4321)).all()
    followed = x.clone().requires_grad_()
    turn(followed).sum().backward()
    assert (followed.grad == sl.rotary(torch.ones_like(x), positions=-4321)).all()
    assert (torch.func.vmap(turn)(x[None]) == first).all() and (torch.func.functionalize(turn)(x) == first).all()
    assert (turn(x.double()).float() - first).abs().max() < 1e-6 and turn(x.bfloat16()).dtype is torch.bfloat16
    assert turn(x.to("meta")).is_meta


# --- in place


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_long_is_turned_piece_by_piece(rng, monkeypatch, layout):
    """The same bits; in place, too, and where arrays overlap, which is done at once."""
    x, half = drawn(rng, LAYOUTS[layout]), tables(rng, 5, 6)
    options = {"layout": layout, "dims": 12}
    cases = [(options, ()), (options | {"positions": [4, 0, 2, 2, 1]}, half), (options, half)]
    cases += [(options, (drawn(rng, (2, 5, 12)), drawn(rng, (2, 5, 12))))] if layout != "lhd" else []
    want = [sl.rotary(x, *t, **o) for o, t in cases]
    for size in (16, 40, 100, 1 << 20):
        monkeypatch.setattr("speedlight.calls.rotary._PIECE", size)
        for (o, t), w in zip(cases, want, strict=True):
            mine, at = x.copy(), torch.from_numpy(x.copy())
            assert (sl.rotary(x[..., ::-1][..., ::-1], *t, **o) == w).all()
            assert sl.rotary(mine, *t, **o, out=mine) is mine and (mine == w).all()
            if t:
                theirs = [torch.from_numpy(y) for y in t]
                assert (sl.rotary(at, *theirs, **o).numpy() == w).all()
                assert (sl.rotary(at, *theirs, **o, out=at).numpy() == w).all()
                followed = torch.from_numpy(x.copy()).requires_grad_()
                sl.rotary(followed, *theirs, **o).sum().backward()
                assert followed.grad is not None
        twice = np.concatenate([x, x])
        sl.rotary(twice[1 : 1 + len(x)], **options, out=twice[: len(x)])
        again = np.concatenate([x, x])[1 : 1 + len(x)]
        assert (twice[: len(x)] == sl.rotary(again, **options)).all()


@pytest.mark.parametrize("layout", ["bhld", "blhd", "bshd", "hld", "lhd"])
def test_what_is_long_takes_little_memory(layout):
    """Tables for whole rows, and products of all of them, are of few tokens, whichever dimension these are."""
    shape = {"h": 4, "n": 4, "l": 1 << 14, "s": 1 << 14, "b": 1, "d": 64}
    x = np.ones([shape[letter] for letter in layout], np.float32)
    tracemalloc.start()
    try:
        sl.rotary(x, layout=layout)
        assert tracemalloc.get_traced_memory()[1] < 2 * x.nbytes
    finally:
        tracemalloc.stop()


def test_tables_in_the_memory_of_out(rng, monkeypatch):
    """What is written piece by piece is not what angles are still read from."""
    monkeypatch.setattr("speedlight.calls.rotary._PIECE", 16)
    x = drawn(rng, (2, 3, 5, 8))
    for make in (np.array, lambda a: torch.from_numpy(a.copy())):
        out = make(np.zeros_like(x))
        cos, sin = (part.reshape(5, 4) for part in (out[0, 0, :, :4], out[1, 2, :, 4:]))
        for table, given in zip((cos, sin), tables(rng, 5, 4), strict=True):
            table[...] = make(given)
        want = sl.rotary(make(x), make(plain(cos)), make(plain(sin)))
        sl.rotary(make(x), cos, sin, out=out)
        np.testing.assert_array_equal(plain(out), plain(want))


def test_out_has_a_place_for_every_element(rng):
    x = drawn(rng, (2, 3, 5, 8))
    for out in (torch.zeros(1, 3, 5, 8).expand(2, -1, -1, -1), np.lib.stride_tricks.as_strided(x, strides=(4,) * 4)):
        with pytest.raises(sl.ArgumentError, match=r"^out: expected a place of its own for every element; got strides"):
            sl.rotary(torch.from_numpy(x) if isinstance(out, torch.Tensor) else x, out=out)


def test_in_place_with_gradients():
    leaf = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def turned(x):
        x = x * 1
        return sl.rotary(x, out=x)

    assert torch.autograd.gradcheck(turned, leaf)
    with pytest.raises(sl.UnsupportedError, match="out: expected a tensor that may be overwritten; got a leaf"):
        sl.rotary(leaf, out=leaf)
    with torch.no_grad():
        sl.rotary(leaf, out=leaf)


def test_special_values(rng):
    x = drawn(rng, (1, 1, 2, 8), "float16")
    x[0, 0, 0, 0], x[0, 0, 1, 1] = np.nan, np.inf
    out = sl.rotary(x, positions=1)
    assert np.isnan(out[0, 0, 0, [0, 4]]).all() and np.isfinite(out[0, 0, 0, [1, 2, 3, 5, 6, 7]]).all()
    assert np.isinf(out[0, 0, 1, [1, 5]]).all()
    assert sl.rotary(x[:, :, :0]).shape == (1, 1, 0, 8) and sl.rotary(x[:0], positions=[[3]]).shape == (0, 1, 2, 8)


def test_far_positions_have_exact_angles():
    """In float32, as others compute it, the angle of position 10^6 + 1 is 0.03 off."""
    x = np.array([1.0, 0.0], np.float32).reshape(1, 1, 1, 2)
    got = sl.rotary(x, positions=10**6 + 1).ravel()
    np.testing.assert_allclose(got, [np.cos(10**6 + 1), np.sin(10**6 + 1)], atol=1e-7)


X, C = np.ones((2, 3, 5, 8), np.float32), np.ones((9, 4), np.float32)
WRONG = [
    (lambda: sl.rotary([1.0]), "x: expected a NumPy array, or a PyTorch tensor; got list"),
    (lambda: sl.rotary(X.astype(int)), "x: expected dtype float32, float64, float16 or bfloat16; got int64"),
    (lambda: sl.rotary(torch.ones(1, 1, 1, 2, dtype=int)), "x: expected float32, .* got torch.int64"),
    (lambda: sl.rotary(torch.ones(1, 1, 1, 2).to_sparse()), "x: expected a strided tensor; got torch.sparse_coo"),
    (lambda: sl.rotary(X[0]), "x: expected 4 dimensions .batch, heads, length, head_dim. for layout='bhld'"),
    (lambda: sl.rotary(X, layout="bld"), "layout: expected 'bhld', 'blhd', 'hld' or 'lhd'; got 'bld'"),
    (lambda: sl.rotary(X[..., :7]), "dims: expected an even number from 2 to head_dim, 7; got 7"),
    (lambda: sl.rotary(X, dims=10), "dims: expected an even number from 2 to head_dim, 8; got 10"),
    (lambda: sl.rotary(X, dims=2.0), "dims: expected an int; got float"),
    (lambda: sl.rotary(X, interleaved=1), "interleaved: expected True or False; got 1"),
    (lambda: sl.rotary(X, base=-1), "base: expected a positive, finite number; got -1"),
    (lambda: sl.rotary(X, base=np.inf), "base: expected a positive, finite number; got inf"),
    (lambda: sl.rotary(X, base="x"), "base: expected a positive number; got str"),
    (lambda: sl.rotary(X, C, C, base=3.0), "base: expected None beside cos and sin"),
    (lambda: sl.rotary(X, C), "sin: expected cos and sin together, or neither; got None"),
    (lambda: sl.rotary(X, C, C[:8]), r"sin: expected shape \(9, 4\), as cos has; got \(8, 4\)"),
    (lambda: sl.rotary(X, torch.ones(9, 4), torch.ones(9, 4)), "cos: expected the same kind of array as x; got Tensor"),
    (
        lambda: sl.rotary(X, C[:, :2], C[:, :2]),
        r"cos: expected shape \(positions, 4\) or \(positions, 8\), .* dims=",
    ),
    (lambda: sl.rotary(X, C[None], C[None]), r"cos: expected shape \(2 or 1, 5, …\), .*; got \(1, 9, 4\)"),
    (lambda: sl.rotary(X, C[:4], C[:4]), "positions: expected 0 to 3, the rows of cos; got 4. Give a longer table"),
    (lambda: sl.rotary(X, C, C, positions=-1), "positions: expected 0 to 8, the rows of cos; got -1"),
    (lambda: sl.rotary(X, C, C, positions=[0, 1, 2, 3, 9]), "positions: expected 0 to 8, the rows of cos; got 9"),
    (
        lambda: sl.rotary(X, C[None, :5], C[None, :5], positions=0),
        "positions: expected None, where cos is of each token",
    ),
    (lambda: sl.rotary(X, positions=[0.5]), "positions: expected ints; got float64. For fractions give cos and sin"),
    (lambda: sl.rotary(X, positions=True), "positions: expected ints; got bool"),
    (lambda: sl.rotary(X, positions=[[1], [2, 3]]), "positions: expected ints; got list"),
    (lambda: sl.rotary(X, positions=[1, 2]), r"positions: expected an int, .* \(5,\) or \(2, 5\); got \(2,\)"),
    (lambda: sl.rotary(X, positions=1 << 50), "positions: expected positions below 2.46"),
    (lambda: sl.rotary(X, positions=torch.arange(5)), "positions: expected an int, a list or a NumPy array"),
    (lambda: sl.rotary(X, out=X[:1].copy()), r"out: expected shape \(2, 3, 5, 8\) of float32, as x"),
    (lambda: sl.rotary(X, out=torch.from_numpy(X)), "out: expected the same kind of array as x; got Tensor"),
    (lambda: sl.rotary(X, out=np.broadcast_to(np.float32(0), X.shape)), "out: expected an array that can be written"),
    (lambda: sl.rotary(np.ma.ones((1, 1, 1, 2))), "x: expected an array without a mask of its own"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_arguments(call, message):
    with pytest.raises(sl.Error, match=message):
        call()
