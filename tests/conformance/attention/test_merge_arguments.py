"""What merge() takes: layouts (R10), kinds and shapes of arrays, states in one array; what is wrong is named."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from states import INF, NAN, same, states

import speedlight as sl
from speedlight import reference


def test_layouts(isa, rng):
    outs, lses = states(rng, 3, (2, 3, 50, 24))
    want = sl.merge(outs, lses)
    wide = [np.full((2, 50, 5, 40), NAN, np.float32) for _ in outs]
    for w, x in zip(wide, outs, strict=True):
        w[:, :, 1:4, 7:31] = x.transpose(0, 2, 1, 3)
        w.flags.writeable = False
    views = [w[:, :, 1:4, 7:31].transpose(0, 2, 1, 3) for w in wide]
    flipped = [np.ascontiguousarray(x[::-1, :, ::-1, ::-1])[::-1, :, ::-1, ::-1] for x in outs]
    columns = [np.ascontiguousarray(x.transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0) for x in outs]
    rows = [np.ascontiguousarray(x.transpose(2, 1, 0)).transpose(2, 1, 0) for x in lses]
    tensors = [torch.from_numpy(x) for x in outs]
    for some in (views, flipped, columns, [views[0], outs[1], flipped[2]], tensors):
        assert same(want, [np.asarray(x) for x in sl.merge(some, lses)]) and same(
            want, [np.asarray(x) for x in sl.merge(some, rows)]
        )
    odd = [
        np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape) for x in outs
    ]  # unaligned
    assert same(want, sl.merge(odd, lses))


def test_strides_of_zero(rng):
    out, lse = states(rng, 2, (1, 50, 24))
    far = [[np.broadcast_to(x, (3, *x.shape[1:])) for x in xs] for xs in (out, lse)]
    assert same(sl.merge(*far), sl.merge(*[[np.array(x) for x in xs] for xs in far]))
    column = [np.broadcast_to(x[..., :1], x.shape) for x in out]
    assert same(sl.merge(column, lse), sl.merge([np.array(x) for x in column], lse))


def test_kinds(rng):
    outs, lses = states(rng, 2, (5, 7))
    want = sl.merge(outs, lses)
    got = sl.merge(torch.from_numpy(outs[0]), lses[0], outs[1], torch.from_numpy(lses[1]))
    assert (
        isinstance(got[0], torch.Tensor) and isinstance(got[1], np.ndarray) and same(want, [np.asarray(x) for x in got])
    )
    bf16 = [torch.from_numpy(x).bfloat16() for x in outs]
    out, lse = sl.merge(tuple(bf16), tuple(torch.from_numpy(x) for x in lses))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    numbers = sl.merge([x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for x in bf16], lses)
    assert out.view(torch.int16).numpy().tobytes() == numbers[0].tobytes()


def test_a_scalar_of_numpy_is_an_array():
    """NumPy makes an array of it, which nobody else holds while its memory is read."""
    for x in range(100):
        _, lse = sl.merge([np.ones(5, np.float32)] * 3, [np.float64(x), np.float64(-INF), np.float64(-INF)])
        assert lse.shape == () and lse == x


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 8), (0, 0), (5, 0), (2, 3, 0), (1,), (7,), (0,)])
def test_shapes_without_rows_or_columns(rng, shape):
    outs = [np.ones(shape, np.float32) for _ in range(2)]
    lses = [np.zeros(shape[:-1]) for _ in range(2)]
    out, lse = sl.merge(outs, lses)
    assert out.shape == shape and lse.shape == shape[:-1]
    assert (out == 1).all() and np.allclose(lse, np.log(2), rtol=1e-15)


@pytest.mark.parametrize("merge", [sl.merge, reference.merge, reference.merge_bound])
def test_wrong_arguments(rng, merge):
    (a, b), (la, lb) = states(rng, 2, (2, 5, 8))
    tensor = torch.from_numpy(a).requires_grad_()
    for message, error, call in (
        (
            r"lse2: expected shape \(2, 5\), to go with out1; got \(2, 1\)",
            sl.ArgumentError,
            lambda: merge(a, la, b, lb[:, :1]),
        ),
        (
            r"out2: expected shape \(2, 5, 8\), to go with out1; got",
            sl.ArgumentError,
            lambda: merge(a, la, b[..., :7], lb),
        ),
        (r"lse1: expected shape \(2, 5\)", sl.ArgumentError, lambda: merge(a, la[..., None], b, lb)),
        (
            r"out1: expected shape \(…, n_q, value_dim\); got \(\)",
            sl.ArgumentError,
            lambda: merge(*[np.array(1.0)] * 4),
        ),
        (r"outs\[2\]: expected shape", sl.ArgumentError, lambda: merge([a, b, a[:1]], [la, lb, la])),
        (r"lses\[1\]: expected shape", sl.ArgumentError, lambda: merge([a, b], [la, lb[:1]])),
        ("lses: expected 2 arrays, one for each of outs; got 1", sl.ArgumentError, lambda: merge([a, b], [la])),
        ("outs: expected one state or more", sl.ArgumentError, lambda: merge([], [])),
        (
            r"outs: expected a list or tuple of arrays; got ndarray. Use list\(outs\)",
            sl.ArgumentTypeError,
            lambda: merge(a, [la]),
        ),
        (r"lses: expected a list or tuple of arrays; got ndarray", sl.ArgumentTypeError, lambda: merge([a], la)),
        ("out2: expected nothing beside lists", sl.ArgumentError, lambda: merge([a], [la], b, lb)),
        ("out2: expected an array; got None", sl.ArgumentTypeError, lambda: merge(a, la)),
        ("lse2: expected an array; got None", sl.ArgumentTypeError, lambda: merge(a, la, b, None)),
        ("out2: expected dtype float32", sl.ArgumentTypeError, lambda: merge(a, la, np.int32(b > 0), lb)),
        (r"lses\[0\]: expected dtype float32", sl.ArgumentTypeError, lambda: merge([a], [la.astype(bool)])),
        (r"outs\[1\]: expected a NumPy array", sl.ArgumentTypeError, lambda: merge([a, "b"], [la, lb])),
        (r"outs\[0\]: requires grad", sl.UnsupportedError, lambda: merge([tensor, b], [la, lb])),
        ("out1: expected native byte order", sl.ArgumentTypeError, lambda: merge(a.astype(">f4"), la, b, lb)),
    ):
        with pytest.raises(error, match=message):
            call()
    with torch.no_grad():
        assert same([sl.merge([tensor], [la])[0].numpy()], [sl.merge([a], [la])[0]])


@pytest.mark.parametrize("base2", [False, True])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_states_in_one_array(kind, base2):
    rng = np.random.default_rng(3)
    outs, lses = states(rng, 3, (5, 4, 8))
    lses[0][0] = lses[1][0] = lses[2][0] = -INF
    factor = math.log(2) if base2 else 1.0
    want = reference.merge(outs, [x.astype(np.float64) * factor for x in lses])
    v, s = np.stack(outs, 1), np.stack(lses, 1)
    v, s = (v, s) if kind == "numpy" else (torch.from_numpy(v), torch.from_numpy(s))
    out, lse = sl.merge_states(v, s, base2=base2)
    assert type(out) is type(v) and out.dtype == v.dtype and lse.dtype == s.dtype and out.shape == (5, 4, 8)
    np.testing.assert_allclose(out, want[0], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(lse, want[1] / factor, rtol=1e-6, atol=1e-7)
    assert (np.asarray(lse)[0] == -INF).all() and (np.asarray(out)[0] == 0).all()
    if not base2:
        assert same((out, lse), sl.merge(outs, lses))
    mine = [x[:, 0] for x in (v, s)]  # in place, in a view
    lists = [v[:, n] for n in range(3)], [s[:, n] for n in range(3)]
    found = sl.merge_states(*lists, base2=base2, out=tuple(mine))
    assert found[0] is mine[0] and found[1] is mine[1] and same(found, (out, lse)) and same((v[:, 0], s[:, 0]), found)


SHARED = np.ones(170, np.float32)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"v": np.ones((5, 4, 8), np.float32)}, "v"),
        ({"s": np.ones((5, 3, 4, 1), np.float32)}, "s"),
        ({"v": [], "s": []}, "v"),
        ({"v": 3}, "v"),
        ({"base2": 2}, "base2"),
        ({"out": np.ones((5, 4, 8), np.float32)}, "out"),
        ({"out": (np.ones((5, 4, 9), np.float32), np.ones((5, 4), np.float32))}, "out"),
        ({"out": (SHARED[:160].reshape(5, 4, 8), SHARED[150:170].reshape(5, 4))}, "out"),
        ({"s": np.ones((5, 2, 4), np.float32)}, "lses"),
    ],
)
def test_errors_of_states(given, name):
    with pytest.raises(sl.Error, match=f"^{name}: expected"):
        sl.merge_states(**{"v": np.ones((5, 3, 4, 8), np.float32), "s": np.ones((5, 3, 4), np.float32)} | given)
