"""A long prompt over several processes, then token after token on a cache that they share: causal and sliding layers.

    torchrun --nproc-per-node 2 examples/long_context.py                      # 131,072 tokens of prompt
    torchrun --nproc-per-node 2 examples/long_context.py --prompt 8192        # some seconds

Each process holds its share of the tokens, of their keys and of their values (zigzag: all have the same work). The
weights are drawn from a seed, so what is generated means nothing; what it shows is what a context costs that is spread
over processes. Nothing but attention sends anything: all else of a layer is of single tokens.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import speedlight as sl
from speedlight.distributed import KVCache, attention, positions

VOCABULARY, DIM, HEADS, KV_HEADS, HEAD_DIM = 256, 256, 8, 2, 64
SHARD: Literal["zigzag"] = "zigzag"


class Layer(NamedTuple):
    """Of a decoder without norms that are learnt; window: how many tokens a query sees, itself among them, or all."""

    window: int | None
    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def projected(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v of tokens at these positions: (1, heads, tokens, HEAD_DIM)."""
        heads = (F.rms_norm(x, (DIM,)) @ self.qkv).view(1, len(x), HEADS + 2 * KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        return sl.rotary(q, positions=at), sl.rotary(k, positions=at), v.contiguous()

    def rest(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What comes after attention; nothing but the token's own row is in it."""
        x = x + attended.transpose(1, 2).reshape(len(x), HEADS * HEAD_DIM) @ self.out
        return x + F.silu(F.rms_norm(x, (DIM,)) @ self.up) @ self.down


class Model(NamedTuple):
    embedding: torch.Tensor
    layers: tuple[Layer, ...]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Of the last of these tokens."""
        return F.rms_norm(x[-1], (DIM,)) @ self.embedding.T


def drawn(layers: int, window: int, dtype: torch.dtype) -> Model:
    """Every second layer is sliding; the same weights on every rank."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[0] ** 0.5).to(dtype)

    heads = HEADS + 2 * KV_HEADS
    made = (
        Layer(
            window if n % 2 else None, weight(DIM, heads * HEAD_DIM), weight(HEADS * HEAD_DIM, DIM),
            weight(DIM, 4 * DIM), weight(4 * DIM, DIM),
        )
        for n in range(layers)
    )  # fmt: skip
    return Model(torch.randn(VOCABULARY, DIM, generator=generator).to(dtype), tuple(made))


def prefill(model: Model, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """The logits of the prompt's last token, on every rank; each computes its own share of the tokens."""
    held = positions(len(tokens), dist.get_world_size(), SHARD)
    own = [torch.arange(run.start, run.stop) for run in held[dist.get_rank()]]
    at = torch.cat([torch.arange(0), *own])  # of a short prompt some have nothing
    x = model.embedding[tokens[at]]
    for n, layer in enumerate(model.layers):
        q, k, v = layer.projected(x, at)
        window = None if layer.window is None else (layer.window - 1, 0)
        out = attention(q, k, v, causal=True, window=window, shard=SHARD, method="ring")
        cache.append(n, k, v, shard=SHARD)  # tokens stay where they are
        x = layer.rest(x, out)
    owner = next(rank for rank, runs in enumerate(held) if any(len(tokens) - 1 in run for run in runs))
    logits = model.logits(x) if dist.get_rank() == owner else torch.empty(VOCABULARY, dtype=x.dtype)
    dist.broadcast(logits, owner)
    return logits


def step(model: Model, token: int, cache: KVCache) -> torch.Tensor:
    """The logits after one more token: every rank has it, and attends to its own share of those before."""
    at = torch.tensor([cache.length(0)])
    x = model.embedding[token][None]
    for n, layer in enumerate(model.layers):
        q, k, v = layer.projected(x, at)
        mask = None if layer.window is None else sl.window(layer.window - 1, 0)
        x = layer.rest(x, cache.attend(n, q, k, v, mask=mask))
    return model.logits(x)


def sent(model: Model, length: int, dtype: str) -> int:
    """Bytes of keys and values that a rank sends at most for the prompt, as plans say."""
    total = 0
    for layer in model.layers:
        plan = sl.plan(
            q_heads=HEADS, kv_heads=KV_HEADS, q_len=length, head_dim=HEAD_DIM, dtype=dtype, causal=True,
            window=None if layer.window is None else (layer.window - 1, 0),
            ranks=dist.get_world_size(), shard=SHARD, method="ring",
        )  # fmt: skip
        assert plan.ranks is not None
        total += max(plan.ranks.way.bytes_sent)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=131072, help="tokens that are drawn")
    parser.add_argument("--tokens", type=int, default=16, help="that are generated")
    parser.add_argument("--layers", type=int, default=4, help="every second one is sliding")
    parser.add_argument("--window", type=int, default=1024, help="tokens that a sliding layer sees")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    given = parser.parse_args()
    if min(given.prompt, given.tokens, given.layers, given.window) < 1:
        parser.error("--prompt, --tokens, --layers, --window: expected numbers from 1")
    if not dist.is_torchelastic_launched():
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 examples/long_context.py")
    dist.init_process_group("gloo")
    dtype = getattr(torch, given.dtype)
    model = drawn(given.layers, given.window, dtype)
    tokens = torch.randint(VOCABULARY, (given.prompt,), generator=torch.Generator().manual_seed(1))
    cache = KVCache(
        layers=given.layers, kv_heads=KV_HEADS, head_dim=HEAD_DIM, capacity=given.prompt + given.tokens,
        dtype=given.dtype,
    )  # fmt: skip
    start = begun = time.perf_counter()
    with torch.no_grad():
        logits = prefill(model, tokens, cache)
        seen, text = time.perf_counter(), [int(logits.argmax())]
        while len(text) < given.tokens:
            text.append(int(step(model, text[-1], cache).argmax()))
            begun = time.perf_counter() if len(text) == 2 else begun  # the first step compiles
    end = time.perf_counter()
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        ranks, stored = dist.get_world_size(), cache.used_bytes / 2**20
        print(f"{given.prompt:,} tokens on {ranks} processes: {seen - start:.1f} s, ", end="")
        print(f"each sends at most {sent(model, given.prompt, given.dtype) / 2**20:,.1f} MiB of keys and values")
        rate = f" {(given.tokens - 2) / (end - begun):,.1f} tokens/s" if given.tokens > 2 else ""
        print(f"then{rate}: {' '.join(map(str, text))}")
        print(f"cache {stored:,.1f} MiB on this process; at most {int(peak) / 2**20:,.0f} MiB of memory on any")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
