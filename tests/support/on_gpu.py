"""The GPU engine as tests call it: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import contextlib
import inspect

import numpy as np
import torch

if not torch.cuda.is_available():
    import gpu_interpreter  # noqa: F401  (before Triton)

from problems import numpy_dtype
from tolerance import assert_within

import speedlight as sl
from speedlight.gpu import differentiate, forward, schedule
from speedlight.gpu.tiles import GradientRow, Row, Tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = ("float32", "float16", "bfloat16")
SMALL = Tile(16, 16, 4, 1)


def tensor(x):
    """A NumPy array as a tensor of the engine's device."""
    x = np.asarray(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(x).to(DEVICE)


@contextlib.contextmanager
def small_blocks(tile: Tile = SMALL, *, short: int = schedule.SHORT_ROWS):
    """Blocks of a few rows and keys, so that small problems have many. short: rows of a kv head up to which its keys
    are split, as in decoding.
    """
    before = schedule.table_row, schedule.SHORT_ROWS, differentiate.gradient_row
    schedule.table_row, schedule.SHORT_ROWS = lambda *_: Row(512, tile, tile, tile, tile), short
    differentiate.gradient_row = lambda *_, **__: GradientRow(512, tile, tile)
    try:
        yield
    finally:
        schedule.table_row, schedule.SHORT_ROWS, differentiate.gradient_row = before


def on_cpu(x):
    """A tensor as a NumPy array."""
    x = x.detach().cpu()
    return x.view(torch.int16).numpy().view(numpy_dtype("bfloat16")) if x.dtype is torch.bfloat16 else x.numpy()


def attention_backward(*arrays, **options):
    """NumPy arrays in and out."""
    got = sl.attention_backward(*(None if x is None else tensor(x) for x in arrays), engine="cuda", **options)
    return (*map(on_cpu, got[:3]), *(tuple(map(on_cpu, more)) for more in got[3:]))


def attention(q, k, v, **options):
    return sl.attention(*(tensor(x) for x in (q, k, v)), engine="cuda", **options)


def check(q, k, v, *, zeros_allowed=False, **options):
    """Against the oracle: shape, dtype, special values, and the bound for every element."""
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert str(out.dtype) == f"torch.{q.dtype.name}"
    want, want_lse = sl.reference.attention(q, k, v, return_lse=True, **options)
    bounds = sl.reference.error_bound(q, k, v, tile=16, **options)
    assert_within(out.cpu(), want, bounds.out, "out", zeros_allowed=zeros_allowed)
    assert_within(lse.cpu(), want_lse, bounds.lse, "lse", zeros_allowed=True)
    return out, lse


def same(a, b):
    """The same bits, of NaN too."""
    return all(
        x.cpu().contiguous().view(torch.uint8).equal(y.cpu().contiguous().view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )


def tiles_computed(monkeypatch, call):
    """How many tiles the kernel works on. The interpreter alone can tell."""
    count, real = [0, 0], forward.one_tile
    masked = list(inspect.signature(real.fn).parameters).index("MASKED")

    class Counted:
        def __call__(self, *args, **kwargs):
            count[not args[masked]] += 1
            return real(*args, **kwargs)

    monkeypatch.setattr(forward, "one_tile", Counted())
    call()
    monkeypatch.undo()
    return tuple(count)
