"""Calls over shards for tests/support/sharded.py: what one is, and random ones of anything that attention() takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

import speedlight as sl

LENGTH_AT = {"bhld": 2, "blhd": 1, "hld": 1, "lhd": 0}


class Case(NamedTuple):
    """One call, by all processes."""

    arrays: tuple[torch.Tensor, ...]  # q, k and v of the whole sequence
    options: dict[str, Any]
    shard: Any = "contiguous"
    method: Any = "ring"
    exact: bool = False
    gradients: bool = True
    in_turns: bool = False  # heads one after another, which small problems are not worth

    def __str__(self) -> str:
        q, k, v = self.arrays
        how = f"{self.shard} {self.method}{' exact' * self.exact}{' in turns' * self.in_turns}"
        return f"{how} {q.dtype} {tuple(q.shape)} {tuple(k.shape)} {v.shape[-1]} {self.options}"

    @property
    def dim(self) -> int:
        return LENGTH_AT[self.options.get("layout", "bhld")]


def drawn_case(
    rng: np.random.Generator,
    heads: int,
    kv_heads: int,
    length: int,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    *,
    value_dim: int = 16,
    batch: int = 1,
    **how: Any,
) -> Case:
    """Of a layout, as options have it; `how`: fields of a Case."""
    shapes = (heads, 16), (kv_heads, 16), (kv_heads, value_dim)
    arrays = [tensor(rng, options.get("layout", "bhld"), batch, n, length, d).to(dtype) for n, d in shapes]
    return Case(tuple(arrays), options, **how)


def random_case(rng: np.random.Generator, exact: bool, world: int) -> Case:
    """Anything that attention() takes; every process draws the same."""
    layout = str(rng.choice(["bhld", "blhd", "hld", "lhd"], p=[0.4, 0.2, 0.1, 0.3]))
    method = str(rng.choice(["ring", "ring", "ulysses", "gather", "auto"]))
    batch = 1 if len(layout) == 3 else int(rng.integers(1, 3))
    kv, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3]))
    if method == "ulysses":
        group = world * int(rng.integers(1, 3)) if rng.random() < 0.5 else group
        kv = kv if group % world == 0 else world
    exact = exact and not (layout == "lhd" and method == "ring")
    long = int(rng.choice([1, 2, 5, 63, 200, 300])) if not exact else int(rng.choice([1, 900, 1025, 2300, 3100]))
    k_len = long if rng.random() < 0.7 else max(0, long + int(rng.integers(-40, 40)))
    dtype = [torch.float32, torch.bfloat16, torch.float16, torch.float64][rng.choice(4, p=[0.5, 0.3, 0.1, 0.1])]
    d, dv = (int(rng.choice([8, 16, 17, 32])) for _ in range(2))
    q, k, v = (
        tensor(rng, layout, batch, *x).to(dtype) for x in ((kv * group, long, d), (kv, k_len, d), (kv, k_len, dv))
    )
    shard = str(rng.choice(["contiguous", "zigzag", "stripe"]))
    options = random_options(rng, layout, (batch, kv * group, long, k_len))
    gradients = bool(long < 400 and rng.random() < 0.7)
    return Case((q, k, v), options, shard, method, exact, gradients, bool(rng.random() < 0.5))


def tensor(rng: np.random.Generator, layout: str, batch: int, heads: int, length: int, dim: int) -> torch.Tensor:
    shape = {"bhld": (batch, heads, length, dim), "blhd": (batch, length, heads, dim), "hld": (heads, length, dim)}
    return torch.from_numpy(rng.standard_normal(shape.get(layout, (length, heads, dim)), dtype=np.float32))


def random_options(rng: np.random.Generator, layout: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    batch, heads, q_len, k_len = sizes
    options: dict[str, Any] = {"layout": layout}
    options["causal"] = [False, True, "top-left"][rng.integers(3)]
    if rng.random() < 0.3:
        options["window"] = [(20, 0), (5, 5), (None, 3), (100, None)][rng.integers(4)]
    longest = max(q_len, k_len, 1) + 60
    if rng.random() < 0.4:
        ids = np.sort(rng.integers(0, 4, longest))
        masks = [
            sl.documents(ids), sl.prefix(7) | sl.causal(), sl.dilated(3),
            sl.expression(lambda b, h, i, j: (i + j + h + b) % 3 != 0),
        ]  # fmt: skip
        options["mask"] = masks[rng.integers(0 if layout != "lhd" and q_len == k_len else 1, 4)]
    if rng.random() < 0.4:
        slopes = rng.standard_normal(heads).astype(np.float32)
        scores = [sl.alibi(slopes), sl.softcap(3.0), [sl.softcap(2.0), sl.alibi(slopes)]]
        options["score"] = scores[rng.integers(3)]
    if rng.random() < 0.3:
        options["sink_logits"] = rng.standard_normal(heads).tolist()
    if rng.random() < 0.2:
        options["scale"] = 0.3
    if layout == "lhd":
        options |= packing(rng, q_len, k_len)
    elif batch > 1 and rng.random() < 0.5:
        options |= padding(rng, sizes, options["causal"] == "top-left")
    elif rng.random() < 0.2 and options["causal"] != "top-left":
        options["q_start"] = int(rng.integers(0, 30))
    if len(layout) == 4 and rng.random() < 0.15:
        options["mask"] = rng.random((batch, 1, q_len, k_len)) < 0.7
    if len(layout) == 4 and rng.random() < 0.15:
        options["score"] = rng.standard_normal((1, heads, q_len, k_len)).astype(np.float32)
    return options


def packing(rng: np.random.Generator, q_len: int, k_len: int) -> dict[str, Any]:
    count = int(rng.integers(1, 5))
    cuts = [np.sort(rng.integers(0, n + 1, count - 1)).tolist() for n in (q_len, k_len)]
    if q_len == k_len:
        return {"cu_seqlens_q": [0, *cuts[0], q_len]}
    return {"cu_seqlens_q": [0, *cuts[0], q_len], "cu_seqlens_k": [0, *cuts[1], k_len]}


def padding(rng: np.random.Generator, sizes: tuple[int, ...], placed: bool) -> dict[str, Any]:
    batch, _, q_len, k_len = sizes
    if q_len == k_len and rng.random() < 0.5:
        return {"lengths": rng.integers(0, q_len + 1, batch).tolist()}
    lengths = {"k_lengths": rng.integers(0, k_len + 1, batch).tolist()}
    if rng.random() < 0.5:
        return lengths | {"q_lengths": rng.integers(0, q_len + 1, batch).tolist()}
    return lengths | ({} if placed else {"q_start": 0})
