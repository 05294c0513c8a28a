"""Clients that begin with one system prompt: their time to the first token and the pool's memory, with it shared and
computed for each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import speedlight as sl
from speedlight.tools.measuring import alternate

LEGEND = "seconds to the first token of each client, and MiB of the pool; the prompt shared, and computed for each"
_SLACK = 1e-3  # between logits: PyTorch's products of other numbers of rows round differently


class Sizes(NamedTuple):
    """Numbers of a measurement; heads are of 64 elements."""

    clients: int = 8
    prompt: int = 4096  # tokens of the system prompt
    question: int = 64  # tokens of each client
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    vocabulary: int = 1024


class Model(torch.nn.Module):
    """A small GPT whose attention is a pool's; its weights are random."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        torch.manual_seed(0)
        dim, linear = sizes.heads * 64, torch.nn.Linear
        self.sizes, self.tokens = sizes, torch.nn.Embedding(sizes.vocabulary, dim)
        self.places = torch.nn.Embedding(sizes.prompt + sizes.question, dim)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(dim) for _ in range(2 * sizes.layers)])
        self.qkv = torch.nn.ModuleList([linear(dim, dim + sizes.kv_heads * 128) for _ in range(sizes.layers)])
        self.out = torch.nn.ModuleList([linear(dim, dim) for _ in range(sizes.layers)])
        self.wide = torch.nn.ModuleList([linear(dim, 4 * dim) for _ in range(sizes.layers)])
        self.narrow = torch.nn.ModuleList([linear(4 * dim, dim) for _ in range(sizes.layers)])

    @torch.inference_mode()
    def forward(self, pool: sl.PagePool, sequences: list[Any], texts: list[torch.Tensor]) -> torch.Tensor:
        """Appends a text to each sequence; returns the logits after each."""
        lengths = [len(x) for x in texts]
        at = [torch.arange(n) + x.length() for n, x in zip(lengths, sequences, strict=True)]
        x = self.tokens(torch.cat(texts)) + self.places(torch.cat(at))
        parts = [self.sizes.heads, self.sizes.kv_heads, self.sizes.kv_heads]
        for layer in range(self.sizes.layers):
            q, k, v = self.qkv[layer](self.norms[2 * layer](x)).unflatten(-1, (-1, 64)).split(parts, 1)
            seen = pool.attend(layer, sequences, q, k, v, new_lengths=lengths)
            x = x + self.out[layer](seen.flatten(1))
            wide = self.wide[layer](self.norms[2 * layer + 1](x))
            x = x + self.narrow[layer](torch.nn.functional.gelu(wide))
        return x[torch.tensor(lengths).cumsum(0) - 1] @ self.tokens.weight.T


class Trial:
    """Both ways to serve the clients, each in a new pool."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.model = sizes, Model(sizes)
        self.prompt = torch.randint(sizes.vocabulary, (sizes.prompt,))
        self.questions = [torch.randint(sizes.vocabulary, (sizes.question,)) for _ in range(sizes.clients)]
        self.bytes: dict[str, int] = {}
        self.waits: dict[str, list[list[float]]] = {"shared": [], "apart": []}  # of each turn, of each client
        self.logits: dict[str, torch.Tensor] = {}

    def pool(self) -> sl.PagePool:
        """Makes a pool that has room for a copy of the prompt for each client."""
        pages = self.sizes.clients * (-(-(self.sizes.prompt + self.sizes.question) // 16) + 1)
        heads: dict[str, Any] = {"kv_heads": self.sizes.kv_heads, "head_dim": 64}
        return sl.PagePool(layers=self.sizes.layers, pages=pages, page_size=16, **heads)

    def shared(self) -> float:
        """Computes the prompt once; each client goes on from a fork of it."""
        pool, start = self.pool(), time.perf_counter()
        system = pool.sequence()
        self.model(pool, [system], [self.prompt])
        clients = [system.fork() for _ in self.questions]
        self.logits["shared"] = self.model(pool, clients, self.questions)
        wait = time.perf_counter() - start
        self.bytes["shared"] = pool.used_bytes
        self.waits["shared"].append([wait] * len(clients))
        return wait

    def apart(self) -> float:
        """Computes the prompt again for each client, in the order in which they came."""
        pool, start = self.pool(), time.perf_counter()
        clients, waits, logits = [], [], []
        for question in self.questions:
            clients.append(pool.sequence())
            logits.append(self.model(pool, clients[-1:], [torch.cat([self.prompt, question])]))
            waits.append(time.perf_counter() - start)
        self.logits["apart"] = torch.cat(logits)
        self.bytes["apart"] = pool.used_bytes
        self.waits["apart"].append(waits)
        return waits[-1]


def rows(turns: int, sizes: Sizes = Sizes()) -> Iterator[dict[str, Any]]:
    """Measures both ways in turn; a row says each client's median."""
    torch.set_num_threads(sl.get_threads())
    name = f"{sizes.clients} clients, a prompt of {sizes.prompt:,} tokens, questions of {sizes.question}"
    model = f"{sizes.layers} layers, {sizes.heads}/{sizes.kv_heads} heads of 64, float32"
    small = Trial(sizes._replace(prompt=min(sizes.prompt, 256)))  # makes the kernels
    small.shared()
    small.apart()
    trial = Trial(sizes)
    alternate({"shared": trial.shared, "apart": trial.apart}, turns)
    row = {"name": name, "model": model, "clients": sizes.clients, "prompt": sizes.prompt}
    off = float((trial.logits["shared"] - trial.logits["apart"]).abs().max())
    if not off <= _SLACK:
        yield row | {"refused": f"logits differ by {off:.2g}"}
        return
    waits = {x: [statistics.median(y) for y in zip(*of, strict=True)] for x, of in trial.waits.items()}
    yield row | {"seconds": waits, "bytes": trial.bytes}


def line(row: dict[str, Any]) -> str:
    """Returns a row as text."""
    ways = [
        f"{way} {min(x):.2f} to {max(x):.2f} s, {row['bytes'][way] / 2**20:.1f} MiB"
        for way, x in row["seconds"].items()
    ]
    return f"{row['name']}: {'; '.join(ways)}"
