"""The specification against a second, independent way to say it, and the harness against results broken on purpose."""

from __future__ import annotations

import numpy as np
import pytest
from problems import qkv
from tolerance import assert_within

import speedlight as sl
from speedlight import reference
from speedlight.reference.case import attention_row


def test_whole_matrix_and_row_by_row_agree(rng):
    q, k, v = qkv(rng, "float64", 1, 2, 1, 9, 11, 5, 3)
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    for h in range(2):
        for i in range(9):
            row, row_lse = attention_row(k[0, 0] @ q[0, h, i] / np.sqrt(5), v[0, 0], np.arange(11) <= i + 2)
            np.testing.assert_allclose(out[0, h, i], row, rtol=1e-12)
            assert lse[0, h, i] == pytest.approx(row_lse, rel=1e-12)


def test_by_hand():
    q, k, v = np.array([[[[1.0]]]]), np.array([[[[0.0], [np.log(3.0)]]]]), np.array([[[[2.0], [6.0]]]])
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert out[0, 0, 0, 0] == pytest.approx(5.0)  # weights 1/4 and 3/4
    assert lse[0, 0, 0] == pytest.approx(np.log(4.0))


def test_a_hidden_nan_does_not_exist_and_a_visible_one_shows():
    q, k, v = np.ones((1, 1, 2, 2)), np.ones((1, 1, 2, 2)), np.ones((1, 1, 2, 2))
    v[0, 0, 1, 0] = np.nan
    out = reference.attention(q, k, v, causal=True)
    assert np.isnan(out).tolist() == [[[[False, False], [True, False]]]]


@pytest.mark.parametrize("break_it", ["scale", "row", "nan", "sign", "tail", "zero"])
def test_the_harness_sees_broken_results(rng, break_it):
    q, k, v = qkv(rng, "float32", 1, 2, 2, 40, 150, 16, 16)
    out = sl.attention(q, k, v).astype(np.float64)
    want, bound = reference.attention(q, k, v), reference.error_bound(q, k, v).out
    assert_within(out, want, bound)
    match break_it:
        case "scale":
            out *= 1.0001
        case "row":
            out[0, 0, 7] = out[0, 0, 8]
        case "nan":
            out[0, 1, 3, 3] = np.nan
        case "sign":
            out[0, 0, 0] *= -1
        case "tail":
            out = sl.attention(q, k[:, :, :-1], v[:, :, :-1]).astype(np.float64)
        case "zero":
            want = np.zeros_like(want)
    with pytest.raises(AssertionError):
        assert_within(out, want, bound)


def test_nan_in_the_result_never_passes_a_bound_of_nan(rng):
    with pytest.raises(AssertionError):
        assert_within(np.array([1.0]), np.array([2.0]), np.array([np.nan]))


def test_rows_are_summed_in_pairs():
    """Equal values of many keys: in one long chain their roundings add up to more than the engine's whole bound."""
    v = np.full((1, 1, 4096, 3), 1.4392500169132)
    q, k = np.zeros((1, 1, 1, 8)), np.zeros((1, 1, 4096, 8))
    row, _ = attention_row(k[0, 0] @ q[0, 0, 0], v[0, 0], np.ones(4096, bool))
    for got in (row, reference.attention(q, k, v)[0, 0, 0]):
        assert abs(got - v[0, 0, 0]).max() <= 2.0**-53 * 24 * 1.44


def test_options_of_the_reference_are_checked():
    x, lse = np.ones((1, 1, 4, 8), np.float32), np.zeros((1, 1, 4), np.float32)
    for name, others in (("proven", " or False"), ("dot", ", False, 'tiles' or 'odd'"), ("int8", " or False")):
        with pytest.raises(sl.ArgumentTypeError, match=f"^{name}: expected True{others}; got 1"):
            reference.error_bound(x, x, x, **{name: 1})
    with pytest.raises(sl.ArgumentTypeError, match="^dot: expected True or False; got None"):
        reference.backward_bound(x, x, x, x, lse, x, dot=None)
    with pytest.raises(sl.ArgumentTypeError, match="^return_lse: expected True or False; got 'no'"):
        reference.attention(x, x, x, return_lse="no")
    for option, message in (
        ({"tile": 0}, "tile: expected a size from 1"),
        ({"precision": "tf16"}, "precision: expected"),
    ):
        with pytest.raises(sl.ArgumentError, match=f"^{message}"):
            reference.error_bound(x, x, x, **option)
