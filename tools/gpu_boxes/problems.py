"""Problems that a GPU must get right, beside float64 in PyTorch's operations: each twice, for equal bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import speedlight as sl
from speedlight.gpu import differentiate, schedule
from speedlight.host import machine
from speedlight.tools.gpu_tiles import device

from .running import Item, NoDevice

GPU: dict[str, Any] = {"engine": "cuda"}
# relative errors that are taken, of a whole result
LIMITS = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 2e-6, "tf32x3": 1e-5, "codes": 5e-2, "lse": 1e-3}
# a tile without one thing: which of them helps tells where a fault lies
PLAINER: dict[str, dict[str, Any]] = {
    "without producer": {"producer": False},
    "without TMA": {"use_tma": False, "producer": False},
    "one stage": {"stages": 1, "producer": False},
}
is_dry = False  # launches are recorded, and nothing is computed


def need_device(*, interpreter: bool = True) -> None:
    """Ends a dry run; interpreter: Triton's will do."""
    if is_dry or (not interpreter and machine.interpreting()):
        raise NoDevice


def drawn(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> torch.Tensor:
    """Returns normal numbers; of a dry run memory that nobody touches."""
    if is_dry:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device()).to(getattr(torch, dtype))


def plainer(item: Item, name: str) -> Item:
    """Returns the item with tiles that lack something."""
    change = PLAINER[name]

    def run() -> Any:
        row_of, gradients_of = schedule.table_row, differentiate.gradient_row

        def row(*given: Any) -> Any:
            found = row_of(*given)
            tiles = {n: getattr(found, n) for n in ("full", "masked", "paged", "decode", "causal")}
            return replace(found, **{n: tile and replace(tile, **change) for n, tile in tiles.items()})

        def gradients(*given: Any, **how: Any) -> Any:
            found = gradients_of(*given, **how)
            return replace(found, queries=replace(found.queries, **change), keys=replace(found.keys, **change))

        schedule.table_row, differentiate.gradient_row = row, gradients
        try:
            return item.run()
        finally:
            schedule.table_row, differentiate.gradient_row = row_of, gradients_of

    return Item(f"{item.name}, {name}", run)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, mask: Any = None, score: Any = None,
    d_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Returns out and lse of [b, h, n, d] by float64, or with d_out the gradients; mask(i, j), score(s, i, j, h)."""
    q, k, v = (x.double().detach().requires_grad_(d_out is not None) for x in (q, k, v))
    wide = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
    s = q @ wide[0].mT * q.shape[-1] ** -0.5
    i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device=q.device)
    h = torch.arange(q.shape[1], device=q.device)[:, None, None]
    s = s if score is None else score(s, i, j, h)
    s = s if not causal else s.masked_fill(j > i, float("-inf"))
    s = s if mask is None else s.masked_fill(~mask(i, j), float("-inf"))
    out = torch.softmax(s, -1) @ wide[1]
    if d_out is not None:
        return torch.autograd.grad(out, (q, k, v), d_out.double())
    return out, torch.logsumexp(s, -1)


def judged(got: torch.Tensor, want: torch.Tensor, limit: str) -> str:
    """Returns the relative error, and WRONG where it is too large; NaN is."""
    error = float((got.double() - want).norm() / want.norm())
    return f"{'right' if error < LIMITS[limit] else 'WRONG'}, error {error:.1e}"


def alike(first: Any, second: Any) -> str:
    is_same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return "the same bits again" if is_same else "WRONG: other bits on a second call"


def forward(
    shape: tuple[int, int, int, int], *, dtype: str = "bfloat16", kv_heads: int = 0, q_len: int = 0,
    options: dict[str, Any] | None = None, plain: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """plain: the options of reference(), where they are others."""
    b, h, n, d = shape
    q = drawn(b, h, q_len or n, d, dtype=dtype)
    k, v = (drawn(b, kv_heads or h, n, d, dtype=dtype, seed=s) for s in (1, 2))
    options = options or {}
    call = lambda: sl.attention(q, k, v, return_lse=True, **options, **GPU)  # noqa: E731
    got = call()
    need_device()
    want, want_lse = reference(q, k, v, **(options if plain is None else plain))
    limit = options.get("precision", dtype)
    return f"{judged(got[0], want, limit)}; lse {judged(got[1], want_lse, 'lse')}; {alike(got, call())}"


def backward(shape: tuple[int, int, int, int], *, dtype: str = "bfloat16", kv_heads: int = 0, causal: bool) -> str:
    b, h, n, d = shape
    q, d_out = (drawn(*shape, dtype=dtype, seed=s) for s in (0, 5))
    k, v = (drawn(b, kv_heads or h, n, d, dtype=dtype, seed=s) for s in (1, 2))
    out, lse = sl.attention(q, k, v, causal=causal, return_lse=True, **GPU)
    call = lambda: sl.attention_backward(q, k, v, out, lse, d_out, causal=causal, **GPU)[:3]  # noqa: E731
    got = call()
    need_device()
    want = reference(q, k, v, causal=causal, d_out=d_out)
    texts = [f"{name} {judged(x, y, dtype)}" for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True)]
    return "; ".join([*texts, alike(got, call())])


def producer(d: int, causal: bool) -> str:
    """The tiles of whole blocks, beside the same tiles without a producer: not a bit may differ."""
    options = {"causal": causal, "return_lse": True}
    q, k, v = (drawn(1, 2, 512, d, seed=s) for s in range(3))
    call = lambda: sl.attention(q, k, v, **options, **GPU)  # noqa: E731
    got, plain = call(), plainer(Item("", call), "without producer").run()
    need_device()
    same = "the same bits" if all(map(torch.equal, got, plain)) else "WRONG: other bits"
    return f"{judged(got[0], reference(q, k, v, causal=causal)[0], 'bfloat16')}; {same} without producer"


def hidden() -> str:
    """The second launch: NaN that causality hides from some rows."""
    q, k, v = (drawn(1, 2, 384, 64, seed=s) for s in range(3))
    v[:, :, 200:] = float("nan")
    out = sl.attention(q, k, v, causal=True, **GPU)
    need_device()
    want = reference(*(x[:, :, :200] for x in (q, k, v)), causal=True)[0]
    after = "NaN where it is seen" if out[:, :, 200:].isnan().all() else "WRONG: no NaN where it is seen"
    return f"{judged(out[:, :, :200], want, 'bfloat16')}; {after}"


def packed() -> str:
    lengths, at = (5, 300, 70), [0, 5, 305, 375]
    q, k, v = (drawn(375, 4, 64, seed=s) for s in range(3))
    out = sl.attention(q, k, v, layout="lhd", cu_seqlens_q=at, cu_seqlens_k=at, causal=True, **GPU)
    need_device()
    parts = [[x[a : a + n].transpose(0, 1)[None] for x in (q, k, v)] for a, n in zip(at, lengths, strict=False)]
    want = torch.cat([reference(*x, causal=True)[0][0].transpose(0, 1) for x in parts])
    return judged(out, want, "bfloat16")


def cache(dtype: Any) -> str:
    """A prefill and steps; then steps in a CUDA graph."""
    made = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=64, capacity=1024, dtype=dtype, device="cuda")
    q, k, v = (drawn(2, h, 330, 64, seed=s) for s, h in enumerate((8, 2, 2)))
    steps = [[x[:, :, n : n + 1].contiguous() for x in (q, k, v)] for n in range(300, 330)]
    outs = [made.attend(0, *(x[:, :, :300] for x in (q, k, v))), *(made.attend(0, *x) for x in steps[:20])]
    need_device()
    want, limit = reference(q, k, v, causal=True)[0], "bfloat16" if dtype == "bfloat16" else "codes"
    text = judged(torch.cat(outs, 2), want[:, :, :320], limit)
    if machine.interpreting():
        return text
    fixed = [x.clone() for x in steps[20]]
    replay, out = _captured(lambda: made.attend(0, *fixed))
    first = made.length(0)
    outs = []
    for x in steps[first - 300 :]:
        for a, b in zip(fixed, x, strict=True):
            a.copy_(b)
        replay()
        outs.append(out.clone())
    torch.cuda.synchronize()
    return f"{text}; in a graph {judged(torch.cat(outs, 2), want[:, :, first:330], limit)}; {made.lengths(0)}"


def masked_cache() -> str:
    """A graph whose capture would upload the numbers of a mask, were they not there."""
    made = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=64, capacity=1024, dtype="bfloat16", device="cuda")
    q, k, v = (drawn(2, h, 301, 64, seed=s) for s, h in enumerate((8, 2, 2)))
    mask = sl.window(50, 0) | sl.prefix(3)
    made.attend(0, *(x[:, :, :300].contiguous() for x in (q, k, v)), mask=mask)
    step = [x[:, :, 300:].contiguous() for x in (q, k, v)]
    made.attend(0, *step, mask=mask)
    need_device(interpreter=False)
    replay, _ = _captured(lambda: made.attend(0, *step, mask=mask))
    replay()
    torch.cuda.synchronize()
    return f"right, {made.lengths(0)}"


def _captured(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Returns the replay of a call in a graph, and its result; the call has run once before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph.replay, out


def pages() -> str:
    k_pages, v_pages = (drawn(64, 16, 2, 128, seed=s) for s in (1, 2))
    q, new = drawn(3, 8, 1, 128), [drawn(3, 2, 1, 128, seed=s) for s in (7, 8)]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:60].reshape(3, 20)
    table, lengths = order.to(device()).int(), torch.tensor([300, 17, 256], device=device()).int()
    after = sl.append_paged(k_pages, v_pages, table, lengths, *new, **GPU)
    out = sl.attention_paged(q, k_pages, v_pages, table, after, causal=True, **GPU)
    need_device()
    texts = [f"lengths {after.tolist()}"]
    for n, length in enumerate(after.tolist()):
        k, v = (x[table[n].long()].reshape(-1, 2, 128)[:length].transpose(0, 1)[None] for x in (k_pages, v_pages))
        texts.append(judged(out[n : n + 1], reference(q[n : n + 1], k, v)[0], "bfloat16"))
    return "; ".join(texts)


def far_offsets() -> str:
    """Keys beyond 2^31 elements, and their descriptors: 5 GB."""
    need_device(interpreter=False)
    memory = torch.zeros(1, 9_000_000, 1, 256, dtype=torch.bfloat16, device="cuda")
    k = memory[:, :, :, :128].transpose(1, 2)
    k[:, :, -5000:] = drawn(1, 1, 5000, 128, seed=1)
    q, late = drawn(1, 1, 100, 128), k[:, :, -5000:]
    out = sl.attention(q, late, late, **GPU)
    text = judged(out, reference(q, late, late)[0], "bfloat16")
    k[:, :, :-1] = 0
    k[:, :, -1] = 100 * q.mean(2).sign()
    is_finite = bool(sl.attention(q, k, k, **GPU).isfinite().all())
    return f"{text}; all rows: {'right' if is_finite else 'WRONG'}"


def compiled() -> str:
    """Gradients by autograd, and a call in torch.compile."""
    import speedlight.torch as st

    need_device(interpreter=False)
    q, k, v = (drawn(1, 2, 200, 64, seed=s).requires_grad_() for s in range(3))
    st.attention(q, k, v, causal=True).sum().backward()
    assert q.grad is not None
    text = judged(q.grad, reference(q, k, v, causal=True, d_out=torch.ones_like(q))[0], "bfloat16")
    inputs = [x.detach() for x in (q, k, v)]
    call: Any = torch.compile(lambda q, k, v: st.attention(q, k, v, causal=True))
    out = call(*inputs)
    return f"{text}; compiled {judged(out, reference(*inputs, causal=True)[0], 'bfloat16')}"


def problems() -> Iterator[Item]:
    """Yields the problems, those first that tell most."""
    causal, slopes = {"causal": True}, [0.5, 0.25, 0.125, 0.0625]
    alibi = lambda s, i, j, h: s + torch.tensor(slopes, device=s.device)[:, None, None] * (j - i)  # noqa: E731
    cap = lambda s, i, j, h: 5 * torch.tanh(s / 5)  # noqa: E731
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("forward bfloat16 d128 full", forward, (2, 4, 1000, 128), {}),
        ("forward bfloat16 d128 causal", forward, (2, 4, 1000, 128), {"options": causal}),
        ("forward bfloat16 d64 full", forward, (1, 4, 777, 64), {}),
        ("forward float16 d256 causal", forward, (1, 2, 500, 256), {"dtype": "float16", "options": causal}),
        ("forward d96, few queries", forward, (1, 8, 700, 96), {"kv_heads": 2, "q_len": 300, "options": causal}),
        ("forward float32 d128", forward, (1, 2, 300, 128), {"dtype": "float32", "options": causal}),
        (
            "forward float32 d64 tf32x3", forward, (1, 2, 300, 64),
            {"dtype": "float32", "options": {"precision": "tf32x3"}, "plain": {}},
        ),
        ("forward bfloat16 d512", forward, (1, 2, 200, 512), {}),
        (
            "mask window", forward, (1, 4, 1000, 128),
            {"options": {"mask": sl.window(100, 0)}, "plain": {"mask": lambda i, j: (j <= i) & (i - j <= 100)}},
        ),
        (
            "score softcap", forward, (1, 4, 600, 128),
            {"options": causal | {"score": sl.softcap(5.0)}, "plain": causal | {"score": cap}},
        ),
        (
            "score alibi", forward, (1, 4, 600, 64),
            {"options": causal | {"score": sl.alibi(slopes)}, "plain": causal | {"score": alibi}},
        ),
        ("backward bfloat16 d128 causal", backward, (1, 4, 1024, 128), causal),
        ("backward bfloat16 d64 full", backward, (1, 4, 500, 64), {"kv_heads": 2, "causal": False}),
        ("backward float32 d64 causal", backward, (1, 2, 200, 64), {"dtype": "float32", "causal": True}),
        ("decode B4 N1000", forward, (4, 32, 1000, 128), {"kv_heads": 8, "q_len": 1}),
        ("decode B1 N8192", forward, (1, 32, 8192, 128), {"kv_heads": 8, "q_len": 1}),
        ("decode of 4 tokens", forward, (2, 32, 3000, 128), {"kv_heads": 8, "q_len": 4, "options": causal}),
    ]  # fmt: skip
    for d in (128, 64):
        for name, is_causal in (("full", False), ("causal", True)):
            yield Item(f"producer d{d} {name}", lambda d=d, is_causal=is_causal: producer(d, is_causal))
    for name, function, shape, how in cases:
        yield Item(name, lambda function=function, shape=shape, how=how: function(shape, **how))
    yield Item("hidden NaN", hidden)
    yield Item("packed sequences", packed)
    for dtype in ("bfloat16", "int8", "fp8"):
        yield Item(f"KVCache {dtype}", lambda dtype=dtype: cache(dtype))
    yield Item("KVCache with a mask in a graph", masked_cache)
    yield Item("pages", pages)
    yield Item("offsets past 2^31", far_offsets)
    yield Item("autograd and torch.compile", compiled)
