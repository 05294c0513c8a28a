"""Other libraries' functions, caches and pools by every door of PyTorch's: the numbers of this call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_torch_any_door as any_door
import torch
from conftest import FULL
from test_torch_any_door import BATCH, DIM, HEADS, KINDS, KV_HEADS, LENGTH, Drawn, as_kind, numbers_of, written

import speedlight as sl
import speedlight.flash_attn
import speedlight.torch

pytestmark = pytest.mark.usefixtures("one_kernel")
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


def drawn(name: str, number: int) -> Drawn:
    rng = np.random.default_rng([33, number])

    def one(*of: Any) -> Any:
        return of[rng.integers(len(of))]

    layout, kinds = one("bhld", "bhld", "hld"), one({}, {"mask": "tensor"}, {"score": "tensor"}, {"causal": "top-left"})
    if name == "flash_attn":
        layout, kinds = "lhd", {"positions": f"cu_seqlens {one('tensor', *KINDS)}"}
        kinds |= {x: kind for x, kind in (("causal", "plain"), ("window", "tuple")) if one(0, 1)}
    kinds |= one({}, {"scale": one("list", "numpy")})
    sets = [numbers_of(rng, kinds, layout) for _ in range(3)]
    return Drawn(number, layout, one(*DTYPES[:2], *DTYPES), kinds, sets, bool(one(0, 1)))


def _lse(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    return speedlight.torch.attention(q, k, v, return_lse=True, **options)[1]


def dot_product(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    out = speedlight.torch.scaled_dot_product_attention(
        q, k, v, options.get("mask", options.get("score")), is_causal="causal" in options,
        scale=options.get("scale"), enable_gqa=True,
    )  # fmt: skip
    return out, _lse(q, k, v, options)


def flash(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    out = speedlight.flash_attn.flash_attn_varlen_func(
        q, k, v, options["cu_seqlens_q"], options["cu_seqlens_k"], LENGTH, LENGTH,
        softmax_scale=options.get("scale"), causal=options.get("causal", False),
        window_size=options.get("window", (-1, -1)),
    )  # fmt: skip
    return out, _lse(q, k, v, options)


@pytest.mark.each("name", "number")
@pytest.mark.parametrize("number", range(150) if FULL else (1, 2))
@pytest.mark.parametrize(("name", "function"), [("dot_product", dot_product), ("flash_attn", flash)])
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # PyTorch's own, in forward mode
def test_other_functions(name, function, number, monkeypatch):
    monkeypatch.setattr(any_door, "attend", function)
    # two gradients that are added in their dtype are not rounded once: nothing flows into lse
    right, refused, wrong = any_door.run(drawn(name, number), of_lse=0)
    assert not wrong, "\n".join(wrong)
    assert right > refused


class Steps:
    """Tokens that come to a cache, or to a pool's sequences, and what their queries see."""

    def __init__(self, pooled: bool, dtype: str) -> None:
        sizes: dict[str, Any] = {"layers": 2, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": dtype}
        self.pool = sl.PagePool(pages=32, page_size=16, **sizes) if pooled else None
        self.sequences = [] if self.pool is None else [self.pool.sequence() for _ in range(BATCH)]
        self.cache = None if pooled else sl.KVCache(batch=BATCH, capacity=64, **sizes)

    def attend(self, layer: int, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        q = q * 2
        if self.pool is None:
            assert self.cache is not None
            return self.cache.attend(layer, q, k, v, **options) * 2
        return self.pool.attend(layer, self.sequences, q, k, v, **options) * 2


@pytest.mark.parametrize("number", range(200) if FULL else (1, 2))
def test_caches_between_two_parts_of_a_graph(number):
    """The bits of the same steps without a graph; lengths are those of this call, whatever they come in."""
    torch._dynamo.reset()
    rng = np.random.default_rng([34, number])
    pooled, kind, dtype = bool(number % 2), KINDS[number % 3], ("float32", "bfloat16")[rng.integers(2)]
    plain, compiled = Steps(pooled, dtype), Steps(pooled, dtype)
    step = torch.compile(compiled.attend, backend="aot_eager")
    options: dict[str, Any] = {}
    torch.manual_seed(number)
    for at in range(5 if FULL else 3):
        counts = [int(x) for x in rng.integers(1, 5, BATCH)]
        n, rows = max(counts), sum(counts)
        shapes = [(rows, h, DIM) if pooled else (BATCH, h, n, DIM) for h in (HEADS, KV_HEADS, KV_HEADS)]
        arrays = [torch.randn(x).to(getattr(torch, dtype)) for x in shapes]
        numbers: dict[str, Any] = {"new_lengths": counts}
        want = plain.attend(at % 2, *arrays, numbers | {"mask": sl.window(at, 0)})
        new = {name: as_kind(x, kind, np.int32) for name, x in numbers.items()}
        options = written(options, new) if number % 4 > 1 and options else new
        got = step(at % 2, *arrays, options | {"mask": sl.window(at, 0)})
        assert torch.equal(got, want), f"step {at} with {counts}"
