"""Malformed input (R12): every call raises a speedlight error that names the argument, writes nothing, and takes no
time.
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import speedlight as sl


def arrays(**shapes):
    base = {"q": (2, 4, 6, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 5)} | shapes
    return {name: np.ones(shape, np.float32) for name, shape in base.items()}


BAD = [
    ("q", {"q": None}, sl.ArgumentTypeError),
    ("q", {"q": np.ones((2, 4, 6, 8), np.int32)}, sl.ArgumentTypeError),
    ("q", {"q": np.ones((2, 4, 6, 8), ">f4")}, sl.ArgumentTypeError),
    ("q", {"q": np.ones((4, 6, 8), np.float32)}, sl.ArgumentError),
    ("q", {"q": np.ones((2, 4, 6, 0), np.float32), "k": np.ones((2, 2, 7, 0), np.float32)}, sl.ArgumentError),
    ("k", {"q": torch.ones(2, 4, 6, 8, requires_grad=True)}, sl.ArgumentTypeError),
    ("q", {"q": torch.ones(2, 4, 6, 8, device="meta")}, sl.UnsupportedError),
    ("q", {"q": torch.ones(2, 4, 6, 8).to_sparse()}, sl.ArgumentTypeError),
    ("k", {"k": np.ones((2, 2, 7, 8))}, sl.ArgumentTypeError),
    ("k", {"k": torch.ones(2, 2, 7, 8)}, sl.ArgumentTypeError),
    ("k", {"k": np.ones((2, 3, 7, 8), np.float32), "v": np.ones((2, 3, 7, 8), np.float32)}, sl.ArgumentError),
    ("k", {"k": np.ones((2, 0, 7, 8), np.float32), "v": np.ones((2, 0, 7, 8), np.float32)}, sl.ArgumentError),
    ("k", {"k": np.ones((2, 2, 7, 9), np.float32)}, sl.ArgumentError),
    ("k", {"k": np.ones((3, 2, 7, 8), np.float32)}, sl.ArgumentError),
    ("v", {"v": np.ones((2, 2, 6, 5), np.float32)}, sl.ArgumentError),
    ("v", {"v": np.ones((2, 1, 7, 5), np.float32)}, sl.ArgumentError),
    ("v", {"v": np.ones((1, 2, 7, 5), np.float32)}, sl.ArgumentError),
    ("v", {"v": np.ones((2, 2, 7, 0), np.float32)}, sl.ArgumentError),
    ("causal", {"causal": 1}, sl.ArgumentError),
    ("causal", {"causal": "bottom-left"}, sl.ArgumentError),
    ("q_start", {"q_start": 1.5}, sl.ArgumentTypeError),
    ("q_start", {"q_start": [1]}, sl.ArgumentError),
    ("q_start", {"q_start": [1, "2"]}, sl.ArgumentTypeError),
    ("q_start", {"q_start": 0, "causal": "top-left"}, sl.ArgumentError),
    ("q_start", {"q_start": 1 << 60}, sl.ArgumentError),
    ("k_start", {"k_start": 5}, sl.ArgumentError),
    ("k_start", {"k_start": -1024}, sl.ArgumentError),
    ("scale", {"scale": "1"}, sl.ArgumentTypeError),
    ("scale", {"scale": float("nan")}, sl.ArgumentError),
    ("layout", {"layout": "bdhl"}, sl.ArgumentError),
    ("cu_seqlens_q", {"cu_seqlens_q": [0, 6]}, sl.ArgumentError),
    ("return_lse", {"return_lse": 2}, sl.ArgumentTypeError),
    ("out", {"out": np.zeros((2, 4, 6, 8), np.float32)}, sl.ArgumentError),
    ("out", {"out": np.zeros((2, 4, 6, 5))}, sl.ArgumentTypeError),
    ("out", {"out": np.broadcast_to(np.float32(0), (2, 4, 6, 5))}, sl.ArgumentError),
    (
        "out",
        {"out": np.lib.stride_tricks.as_strided(np.zeros(500, np.float32), (2, 4, 6, 5), (4, 4, 4, 4))},
        sl.ArgumentError,
    ),
]
PACKED = [
    ("cu_seqlens_q", {"cu_seqlens_q": [0]}),
    ("cu_seqlens_q", {"cu_seqlens_q": [1, 6]}),
    ("cu_seqlens_q", {"cu_seqlens_q": [0, 7]}),
    ("cu_seqlens_q", {"cu_seqlens_q": [0, 5, 4, 6]}),
    ("cu_seqlens_q", {"cu_seqlens_q": 6}),
    ("cu_seqlens_q", {"cu_seqlens_q": [0.0, 6.0]}),
    ("cu_seqlens_k", {"cu_seqlens_q": [0, 3, 6], "cu_seqlens_k": [0, 7]}),
    ("cu_seqlens_k", {"cu_seqlens_k": [0, 1 << 70]}),
    ("cu_seqlens_k", {"cu_seqlens_k": [0, -1, 7]}),
]


@pytest.mark.parametrize(("name", "change", "kind"), BAD, ids=[f"{i}-{b[0]}" for i, b in enumerate(BAD)])
def test_bad_arguments_are_named(name, change, kind):
    call = arrays() | change
    with pytest.raises(kind) as caught:
        sl.attention(**call)
    assert str(caught.value).startswith(f"{name}: ") and isinstance(caught.value, sl.Error)
    assert isinstance(caught.value, (ValueError, TypeError, NotImplementedError))


def test_a_first_key_that_is_too_far_is_told_how_far_it_may_be():
    """2^62 is a multiple of 1024, and not negative."""
    with pytest.raises(sl.ArgumentError, match=r"^k_start: expected a multiple of 1024 from 0 to 2\^46; got 46116"):
        sl.attention(**arrays(), q_start=0, k_start=1 << 62)


def test_a_tensor_without_numbers_is_not_told_to_move():
    with pytest.raises(sl.UnsupportedError, match=r"^q: .* on meta\. Make it where it has numbers\.$"):
        sl.attention(torch.ones(2, 4, 6, 8, device="meta"), torch.ones(2, 2, 7, 8), torch.ones(2, 2, 7, 8))


@pytest.mark.parametrize(("name", "change"), PACKED)
def test_bad_packing_is_named(name, change):
    q, k = np.ones((6, 4, 8), np.float32), np.ones((7, 2, 8), np.float32)
    with pytest.raises(sl.Error, match=f"^{name}: "):
        sl.attention(q, k, k, layout="lhd", **change)


def test_the_memo_does_not_soften_checks():
    call = arrays()
    sl.attention(**call, causal=True)
    with pytest.raises(sl.ArgumentError, match="causal"):
        sl.attention(**call, causal=1)
    with pytest.raises(sl.ArgumentTypeError, match="return_lse"):
        sl.attention(**call, causal=True, return_lse=1)


def test_errors_of_plan():
    with pytest.raises(sl.ArgumentTypeError, match="^q_heads: "):
        sl.plan()
    with pytest.raises(sl.ArgumentError, match="^head_dim: "):
        sl.plan(q_heads=1, q_len=5, head_dim=0)
    with pytest.raises(sl.ArgumentTypeError, match="^dtype: "):
        sl.plan(q_heads=1, q_len=5, head_dim=4, dtype="int8")


def test_threads_are_checked():
    for bad in (0, 1.5, True, "2", 5000):
        with pytest.raises(sl.Error, match="^n: "):
            sl.set_threads(bad)


def test_a_repeated_call_with_out_checks_it_again(rng):
    q, k, v = (rng.standard_normal((1, 2, 70, 16), dtype=np.float32) for _ in range(3))
    want = sl.attention(q, k, v)
    out = np.zeros_like(q)
    for _ in range(2):
        out[:] = 0
        assert sl.attention(q, k, v, out=out) is out
        assert out.tobytes() == want.tobytes()
    both = np.zeros((1, 2, 140, 16), np.float32)
    both[:, :, 35:105] = q
    sl.attention(both[:, :, :70], k, v, out=out)
    sl.attention(both[:, :, :70].copy(), k, v, out=both[:, :, 70:])
    both[:, :, 35:105] = q
    before = both.copy()
    with pytest.raises(sl.ArgumentError, match="out: expected memory of its own"):
        sl.attention(both[:, :, 35:105], k, v, out=both[:, :, 70:])
    out.flags.writeable = False
    with pytest.raises(sl.ArgumentError, match="read-only"):
        sl.attention(q, k, v, out=out)
    assert before.tobytes() == both.tobytes()
    with pytest.raises(sl.ArgumentError, match="overlaps v"):
        sl.attention(q, k, v, out=v)


def test_devices_must_agree(monkeypatch):
    """Arrays of two devices, and GPUs without what they need; no GPU is asked."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which tests of the GPU leave set
    from dataclasses import replace

    from speedlight import engines as engine
    from speedlight.arrays.array import describe
    from speedlight.problem.build import from_arrays
    from speedlight.problem.options import Options

    x = np.zeros((1, 1, 2, 4), np.float32)
    q, k, v = (describe(x, n) for n in "qkv")
    for wrong in (
        (q, replace(k, device="cuda:0"), v),
        (replace(q, device="cuda:0"), k, v),
        (q, k, replace(v, device="cuda:1")),
    ):
        with pytest.raises(
            sl.ArgumentError, match="expected an array on (cpu|cuda:0), as q; got one on (cpu|cuda:0|cuda:1)"
        ):
            from_arrays(*wrong, Options())
    with pytest.raises(sl.ArgumentError, match="q: expected an array on the CPU for engine='cpu'; got one on cuda:0"):
        engine.is_on_gpu("cpu", replace(q, device="cuda:0"))
    methods = {"__dlpack__": lambda self, **how: x.__dlpack__(**how), "__dlpack_device__": lambda self: (1, 0)}
    halves = x.astype(ml_dtypes.bfloat16)
    held = type("Held", (), methods)()
    for array in (torch.zeros(x.shape), x, halves, held, x[..., ::-1, :], halves[..., ::-1], x.astype(float)):
        with pytest.raises(sl.ArgumentError, match="q: expected a tensor on a GPU for engine='cuda'") as error:
            engine.is_on_gpu("cuda", describe(array, "q"))
        way = str(error.value).partition("Use ")[2].partition(".cuda()")[0]
        made = eval(way, {"q": array, "torch": torch})
        assert torch.equal(made.float(), torch.zeros(x.shape)) and made.dtype != torch.float64
    assert engine.is_on_gpu(None, replace(q, device="cuda:0"))
    assert not engine.is_on_gpu(None, q) and not engine.is_on_gpu("cpu", q)


def test_without_triton(monkeypatch):
    from speedlight import engines as engine

    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [n for n in sys.modules if n.startswith("speedlight.gpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(sys.modules["speedlight"], "gpu", raising=False)
    with pytest.raises(
        sl.UnsupportedError, match=r"expected Triton, for arrays on a GPU; it cannot be loaded .* pip install"
    ):
        engine.gpu()
    for call, rest in (
        (sl.PagePool, {"layers": 1, "kv_heads": 1, "pages": 4, "page_size": 16}),
        (sl.KVCache, {"layers": 1, "kv_heads": 1, "capacity": 5}),
        (sl.plan, {"q_heads": 1, "q_len": 5}),
    ):
        with pytest.raises(sl.UnsupportedError, match=r"^device: expected Triton, .* or use device='cpu'\.$"):
            call(**rest, head_dim=8, device="cuda")
        with pytest.raises(sl.ArgumentError, match=r"^device: expected 'cpu', 'cuda' or .*; got 'gpu'\.$"):
            call(**rest, head_dim=8, device="gpu")


def test_a_plan_takes_devices_as_caches_do():
    sizes = {"q_heads": 1, "q_len": 5, "head_dim": 8}
    assert sl.plan(**sizes, device=torch.device("cpu")) == sl.plan(**sizes)
    with pytest.raises(sl.ArgumentTypeError, match="device: expected 'cpu', 'cuda' or .*; got 3"):
        sl.plan(**sizes, device=3)
