"""Scores of several keys at once: the bits of one key after another, and the chains of functions in step."""

from __future__ import annotations

import numpy as np
import pytest
from problems import qkv

import speedlight as sl
from speedlight.cpu.engine.forward_call import kernel_of_problem
from speedlight.cpu.kernels.lower import IN_STEP_KEYS
from speedlight.cpu.runtime.compile import emit
from speedlight.host import machine
from speedlight.problem.operands import Strides

SCORES = {
    "softcap": sl.softcap(3.0),
    "softcap and ALiBi": [sl.softcap(3.0), sl.alibi(2.0 ** -np.arange(2.0))],
    "functions": lambda s, b, h, i, j: sl.sigmoid(s) * (j - i) + sl.tanh(s / (j + 1.0)),
    "ALiBi alone": sl.alibi([0.3, 0.7]),
}


@pytest.mark.parametrize("name", SCORES)
def test_keys_at_once_have_the_bits_of_keys_alone(isa, rng, name):
    """A row among many, whose keys go several at once and the rest alone; and by itself, in the kernel for few rows."""
    for k_len in (1, 7, 8, 17, 130):
        q, k, v = qkv(rng, "float32", 1, 2, 2, 40, k_len, 16, 16)
        many = sl.attention(q, k, v, score=SCORES[name])
        assert sl.attention(q[:, :, -1:], k, v, score=SCORES[name]).tobytes() == many[:, :, -1:].tobytes()


@pytest.mark.parametrize(
    "slopes", [[2.0**-20, -(2.0**-21)], [2.0**-20, 3 * 2.0**-22], [0.0, 2.0**-70], [2.0**-20 / 3, 1.0]]
)
@pytest.mark.parametrize("q_start", [100, (1 << 24) - 20, (1 << 24) + 7])
def test_float64_is_computed_in_float32_where_the_bits_are_the_same(isa, rng, slopes, q_start):
    """Of slopes that are powers of 2, and distances that float32 has: by themselves rows are computed in float64."""
    q, k, v = qkv(rng, "float32", 1, 2, 1, 40, 130, 16, 16)
    score = sl.alibi(np.array(slopes))
    many = sl.attention(q, k, v, score=score, q_start=q_start)
    for row in (0, 19, 20, 39):
        one = sl.attention(q[:, :, row : row + 1], k, v, score=score, q_start=q_start + row)
        assert one.tobytes() == many[:, :, row : row + 1].tobytes()


def test_the_chains_of_functions_go_in_step(isa):
    """And nothing else is computed for so many keys at once."""
    unit = machine.isa_named(isa)
    wide = f"fdiv <{IN_STEP_KEYS * unit.lanes('f32')} x float>"
    for name, score in SCORES.items():
        problem = sl.plan(q_heads=2, q_len=40, head_dim=16, score=score).problem
        text = emit(kernel_of_problem(problem, Strides(), 1, unit)[1])
        assert (wide in text) == (name != "ALiBi alone")
