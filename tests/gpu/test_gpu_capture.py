"""The rule of CUDA graphs: once a call's data is uploaded, the call waits for no device and copies nothing to it. And
the rule of grids.

Tensors without numbers stand for a GPU's, a driver that launches nothing for CUDA's: asking for a number fails.
"""

from __future__ import annotations

import contextlib
import weakref

import numpy as np
import pytest
import torch
from on_gpu import small_blocks
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

import speedlight as sl
from speedlight.arrays.memory import Array
from speedlight.gpu import differentiate, prepare, storage, uploads
from speedlight.gpu.keys import arrays_of
from speedlight.problem.build import Stated, from_arrays
from speedlight.problem.gradients import Asked
from speedlight.problem.operands import Operands
from speedlight.problem.options import Options

SLOPES = sl.table(np.ones(4, np.float32))
OPTIONS = {
    "causal": {"causal": True},
    "mask": {"mask": sl.window(9, 0) | sl.prefix(2), "sink_logits": [0.5] * 4},
    "score": {"score": sl.alibi(SLOPES), "dropout": 0.1, "seed": 3},
    "tables": {"mask": lambda b, h, i, j, t=sl.table(np.ones((60, 60), bool)): t[i - 10, j], "q_start": 10},
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


class Captured(Device):
    """Stands for the capture of a CUDA graph."""

    now = False

    def __enter__(self):
        Captured.now = True
        return super().__enter__()

    def __exit__(self, *error):
        Captured.now = False
        return super().__exit__(*error)


@pytest.fixture
def launched(monkeypatch):
    """The names of kernels that the driver was given, instead of launching them."""
    names = []
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: lambda **_: names.append(kernel.__name__))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # on a GPU, too: tensors without numbers have no device to ask
    for module in (storage, uploads):
        monkeypatch.setattr(module, "capturing", lambda: Captured.now)
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
    with Captured():
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
    with Captured():
        differentiate.prepare(request, "bhld", Stated(problem), x.q, "ieee").run(x)
    assert launched == 2 * before and before[:2] == ["sum_rows", "differentiate"]
    assert ("sum_terms" in before) == (name == "score")


STEPS = {
    "plain": {},
    "mask": {"mask": sl.window(9, 0) | sl.prefix(2)},
    "score": {"score": sl.alibi(SLOPES)},
    "sinks": {"sink_logits": [0.5] * 4},
    "dropout": {"score": sl.softcap(9.0), "dropout": 0.1, "seed": 3},
    "tables": {"mask": lambda b, h, i, j, t=sl.table(np.ones(300, bool)): t[j]},
}


@pytest.mark.parametrize("kind", [{"capacity": 300}, {"window": 20, "capacity": 300}])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_a_cache(name, kind, launched, monkeypatch):
    """The step before was shorter than what a graph may replay: it uploads what that wants, too."""
    monkeypatch.setattr(storage, "device_of", lambda device: torch.device("meta"))
    monkeypatch.setattr(storage, "described", lambda x, name, device: array(name, *x.shape))
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, **kind, device="cuda")
    q, k, v = (torch.empty(1, heads, 1, 16, device="meta") for heads in (4, 2, 2))
    cache.attend(0, q, k, v, **STEPS[name])
    before = launched.copy()
    with Captured():
        cache.attend(0, q, k, v, **STEPS[name])
    assert launched == 2 * before and "attend" in before


@pytest.mark.parametrize("name", ["mask", "tables"])
def test_numbers_that_a_graph_reads_are_not_dropped(name, launched, monkeypatch):
    """A replay reads them long after other calls have filled the memos."""
    monkeypatch.setattr(uploads, "_of_graphs", set())
    x = arrays(40)  # not split, so that the host classifies tiles
    keys = arrays_of(x.k.tensor, x.v.tensor, "bhld")
    problem = from_arrays(x.q, x.k, x.v, Options(**OPTIONS[name])).problem
    for context in (contextlib.nullcontext(), Captured()):
        with context:
            prepare.prepare(problem, "bhld", "cpu", keys).run(x.q.tensor, keys, x.out.tensor, x.lse.tensor)
    made = uploads.uploads_of(problem, "cpu", None)
    numbers = [made.words, made.sinks, *[y.classes for y in made.classes.values()]]
    held = [weakref.ref(t) for t in numbers if t is not None]
    del made, numbers
    uploads._uploads.clear()
    uploads._numbers.clear()
    assert len(held) == 2 and all(t() is not None for t in held)


def test_a_batch_of_any_size_fits_a_grid(launched, monkeypatch):
    """Of which only the first dimension has room for more than 65,535 programs."""
    grids = {}
    monkeypatch.setattr(
        KernelInterface, "__getitem__", lambda kernel, grid: lambda **_: grids.update({kernel.__name__: grid})
    )
    monkeypatch.setattr(storage, "device_of", lambda device: torch.device("meta"))
    monkeypatch.setattr(storage, "described", lambda x, name, device: array(name, *x.shape))
    cache = sl.KVCache(layers=1, batch=70_000, kv_heads=2, head_dim=16, capacity=300, device="cuda")
    cache.attend(0, *(torch.empty(70_000, heads, 1, 16, device="meta") for heads in (4, 2, 2)))
    assert grids.keys() == {"store", "attend", "combine"}
    for grid in grids.values():
        assert max(grid[1:], default=1) <= 65_535


def test_whoever_waits_is_found():
    for wait in (lambda x: x.cpu(), lambda x: x.sum().item(), bool, lambda x: torch.ones(1).to(x.device)):
        with Device(), pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
            wait(torch.empty(1, device="meta"))
