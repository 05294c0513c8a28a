"""What test_attention.py tells, of the GPU engine (R27): in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import contextlib
import functools
import types

import pytest
import test_attention
import torch
from engines import Engine
from on_gpu import DTYPES, attention, on_cpu, small_blocks
from test_attention import (  # noqa: F401 - collected here as well, with the fixtures below
    test_any_finite_score,
    test_every_dim,
    test_every_length,
    test_hidden_data_never_matter,
    test_huge_logits_stay_finite,
    test_packed_is_padded_is_alone,
    test_patterns,
    test_random_problems,
)
from test_attention import test_special_values as special_values

from speedlight import reference
from speedlight.gpu import schedule
from speedlight.gpu.tiles import Tile


def on_device(q, k, v, **options):
    """NumPy arrays in and out."""
    got = attention(q, k, v, **options)
    return tuple(map(on_cpu, got)) if isinstance(got, tuple) else on_cpu(got)


@contextlib.contextmanager
def blocks(*, as_many: bool = False):
    with small_blocks(Tile(32, 32, 4, 1), short=0 if as_many else schedule.SHORT_ROWS):
        yield


GPU = Engine(
    on_device,
    functools.partial(reference.error_bound, tile=16),
    DTYPES,
    keys=70,
    long=300,
    lse_error=2e-6,
    blocks=blocks,
    one_arithmetic=False,
    slow=not torch.cuda.is_available(),
)


# of dtypes and ways each with some of the cases: the interpreter is slow
test_special_values = types.FunctionType(special_values.__code__, vars(test_attention), "test_special_values")
test_special_values.pytestmark = [*special_values.pytestmark, pytest.mark.each("case", "dtype", "as_many").mark]


@pytest.fixture
def engine():
    return GPU


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(
    params=[(1, 1), (2, 3), (16, 16), (17, 33), (64, 64), (80, 96), (130, 8), (192, 128), (512, 512)], ids=str
)
def dims(request):
    return request.param


@pytest.fixture(params=[(0, 5), (5, 0), (1, 1), (3, 127), (33, 64), (70, 129), (16, 600), (1, 1030)], ids=str)
def lengths(request):
    return request.param


@pytest.fixture(params=[1, 70])
def queries(request):
    return request.param
