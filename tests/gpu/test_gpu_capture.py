"""The rule of CUDA graphs: once a call's data is uploaded, the call waits for no device and copies nothing to it.

Tensors without numbers stand for a GPU's, a driver that launches nothing for CUDA's: asking for a number fails.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from on_gpu import small_blocks
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

import speedlight as sl
from speedlight.arrays.memory import Array
from speedlight.gpu import differentiate, prepare, uploads
from speedlight.gpu.keys import arrays_of
from speedlight.problem.build import Stated, from_arrays
from speedlight.problem.gradients import Asked
from speedlight.problem.operands import Operands
from speedlight.problem.problem import Options

SLOPES = sl.table(np.ones(4, np.float32))
OPTIONS = {
    "causal": {"causal": True},
    "mask": {"mask": sl.window(9, 0) | sl.prefix(2), "sink_logits": [0.5] * 4},
    "score": {"score": sl.alibi(SLOPES), "dropout": 0.1, "seed": 3},
    "tables": {"mask": lambda b, h, i, j, t=sl.table(np.ones((20, 60), bool)): t[i - 10, j], "q_start": 10},
}


class Device(TorchDispatchMode):
    """Raises where the host waits for tensors without numbers, or copies others there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        named = str(function)
        result = function(*args, **(kwargs or {}))
        arguments = [x for x in args if isinstance(x, torch.Tensor)]
        there = [x.device.type for x in (*arguments, *([result] if isinstance(result, torch.Tensor) else []))]
        if ("scalar" in named and "meta" in there) or ("copy" in named and set(there) == {"cpu", "meta"}):
            raise AssertionError(f"{named} while a graph is captured")
        return result


@pytest.fixture
def launched(monkeypatch):
    """The names of kernels that the driver was given, instead of launching them."""
    names = []
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: lambda **_: names.append(kernel.__name__))
    monkeypatch.setattr(uploads, "capturing", lambda: True)
    with small_blocks():
        yield names


def array(name, *shape, device="meta"):
    dtype = "float32"
    x = torch.empty(shape, device=device)
    return Array(name, 0, shape, tuple(4 * s for s in x.stride()), dtype, "torch", True, x)


def arrays(q_len):
    """q, k, v, out, lse, d_out, d_lse, dq, dk and dv."""
    rows, keys, logs = (1, 4, q_len, 16), (1, 2, 60, 16), (1, 4, q_len)
    shapes = (rows, keys, keys, rows, logs, rows, logs, rows, keys, keys)
    return Operands(*(array(name, *shape) for name, shape in zip(Operands._fields, shapes, strict=True)))


@pytest.mark.parametrize("q_len", [20, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_forward(name, q_len, launched):
    x = arrays(q_len)
    problem = from_arrays(x.q, x.k, x.v, Options(**OPTIONS[name])).problem
    keys = arrays_of(x.k.tensor, x.v.tensor, "bhld")
    prepare.prepare(problem, "bhld", "cpu", keys).run(x.q.tensor, keys, x.out.tensor, x.lse.tensor)
    before = launched.copy()
    with Device():
        call = prepare.prepare(problem, "bhld", "cpu", keys)
        call.run(x.q.tensor, keys, x.out.tensor, x.lse.tensor)
    assert launched == 2 * before and before[0] == "attend"


@pytest.mark.parametrize("name", OPTIONS)
def test_backward(name, launched):
    x = arrays(20)
    problem = from_arrays(x.q, x.k, x.v, Options(**OPTIONS[name])).problem
    grads = {"mask": ("sink_logits",), "score": (SLOPES,)}.get(name, ())
    request = Asked(problem, grads)
    differentiate.prepare(request, "bhld", Stated(problem), x.q, "ieee").run(x)
    before = launched.copy()
    with Device():
        differentiate.prepare(request, "bhld", Stated(problem), x.q, "ieee").run(x)
    assert launched == 2 * before and before[:2] == ["sum_rows", "differentiate"]
    assert ("sum_terms" in before) == (name == "score")


def test_whoever_waits_is_found():
    for wait in (lambda x: x.cpu(), lambda x: x.sum().item(), bool, lambda x: torch.ones(1).to(x.device)):
        with Device(), pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
            wait(torch.empty(1, device="meta"))
