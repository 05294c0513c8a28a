"""speedlight.torch.Attention: against what people write by hand, and what others' weights mean in it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import FULL
from torch import nn

import speedlight as sl
from speedlight.torch import Attention

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels
N, DIM = 37, 32


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def hidden(batch=2, length=N, dim=DIM, dtype=torch.float32):
    return torch.randn(batch, length, dim, dtype=dtype)


class Llama(nn.Module):
    """LlamaAttention, after transformers/models/llama/modeling_llama.py, in float64 where it is told so."""

    def __init__(self, heads=4, kv_heads=2, head_dim=8, bias=False, base=10000.0):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.base = heads, kv_heads, head_dim, base
        self.q_proj = nn.Linear(DIM, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(DIM, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(DIM, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, DIM, bias=bias)

    def embedding(self, positions):
        inverse = self.base ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angles = torch.cat([positions[:, :, None] * inverse] * 2, -1)
        return angles.cos(), angles.sin()

    def forward(self, x, visible, sinks=None):
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (t.to(x.dtype)[:, None] for t in self.embedding(torch.arange(length)[None].expand(batch, -1)))
        half = lambda y: torch.cat((-y[..., self.head_dim // 2 :], y[..., : self.head_dim // 2]), -1)  # noqa: E731
        q, k = q * cos + half(q) * sin, k * cos + half(k) * sin
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        scores = (q @ k.mT / self.head_dim**0.5).masked_fill(~visible, -torch.inf)
        if sinks is not None:
            column = sinks.to(x.dtype)[None, :, None, None].expand(batch, -1, length, 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1).nan_to_num()  # a row that sees nothing
        return self.o_proj((weights @ v).transpose(1, 2).reshape(batch, length, -1))


def causal(length=N, window=None):
    i, j = torch.arange(length)[:, None], torch.arange(length)
    return (j <= i) & (i - j < (window or length))


@pytest.mark.parametrize("bias", [False, True])
def test_a_llama_layer_loads_and_computes_the_same(bias):
    theirs = Llama(bias=bias)
    ours = Attention(DIM, 4, kv_heads=2, bias=bias, causal=True, rotary=10000.0)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = hidden()
    want = copy.deepcopy(theirs).double()(x.double(), causal())
    torch.testing.assert_close(ours(x).double(), want, rtol=0, atol=2e-6)
    embedding = [t.float() for t in theirs.embedding(torch.arange(N)[None])]  # transformers' position_embeddings
    plain = Attention(DIM, 4, kv_heads=2, bias=bias, causal=True)
    plain.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(plain(x, rotation=embedding).double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", ["window, padded, sinks", *["window", "sinks", "padded"] * FULL])
def test_it_trains_as_the_same_in_float64(options):
    theirs = Llama().double()
    window = 9 if "window" in options else None
    ours = Attention(DIM, 4, kv_heads=2, causal=True, rotary=10000.0, window=window, sinks="sinks" in options)
    ours.double().load_state_dict(theirs.state_dict(), strict="sinks" not in options)
    visible, mask, sinks = causal(window=window), None, None
    if "padded" in options:
        mask = torch.ones(2, N, dtype=torch.int64)
        mask[0, :11] = mask[1, 20:] = 0
        visible = visible & (mask[:, None, None] != 0)
    if "sinks" in options:
        with torch.no_grad():
            ours.sinks.copy_(torch.randn(4))
        sinks = ours.sinks.detach().clone().requires_grad_()
    x = hidden(dtype=torch.float64).requires_grad_()
    y = x.detach().clone().requires_grad_()
    got, want = ours(x, attention_mask=mask), theirs(y, visible, sinks)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    flow = torch.randn_like(got)
    got.backward(flow)
    want.backward(flow)
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-11)
    wanted = {n: p.grad for n, p in theirs.named_parameters()} | ({} if sinks is None else {"sinks": sinks.grad})
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=0, atol=1e-11, msg=name)


@pytest.mark.each("bias", "context_dim")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("context_dim", [None, 20])
def test_weights_of_multihead_attention(bias, context_dim):
    theirs = nn.MultiheadAttention(DIM, 4, bias=bias, kdim=context_dim, vdim=context_dim, batch_first=True)
    ours = Attention(DIM, 4, bias=bias, context_dim=context_dim).load_multihead(theirs.state_dict())
    x = hidden()
    context = x if context_dim is None else hidden(dim=20, length=N + 5)
    want, _ = theirs(x, context, context)
    torch.testing.assert_close(ours(x, context), want, rtol=0, atol=2e-6)
    back = nn.MultiheadAttention(DIM, 4, bias=bias, kdim=context_dim, vdim=context_dim, batch_first=True)
    back.load_state_dict(ours.multihead_state())
    for name, w in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], w)
    padded = torch.zeros(2, context.shape[1], dtype=torch.bool)
    padded[0, 9:] = True
    want, _ = theirs(x, context, context, key_padding_mask=padded)
    torch.testing.assert_close(ours(x, context, attention_mask=~padded), want, rtol=0, atol=2e-6)


LAYERS = {
    "plain": {},
    "rotary": {"rotary": 5e5, "rotary_dims": 4, "interleaved": True, "kv_heads": 2},
    "window, sinks": {"rotary": 10000.0, "window": 9, "sinks": True, "score": sl.softcap(20.0)},
}


@pytest.mark.parametrize("name", LAYERS)
@torch.inference_mode()
def test_token_by_token_is_the_same(name):
    """The attention's own bits; the projections' are those of a matrix product of another height, so they are given."""
    layer = Attention(DIM, 4, causal=True, layer=1, **LAYERS[name]).eval()
    if layer.sinks is not None:
        layer.sinks.copy_(torch.randn(4))
    identity(layer)
    x = hidden()
    want = layer(x)
    window = LAYERS[name].get("window")
    for cache_window in {None, window}:
        sizes = {"layers": 2, "batch": 2, "kv_heads": layer.kv_heads, "head_dim": 8, "capacity": N}
        cache = sl.KVCache(**sizes, window=cache_window)
        steps = [layer(x[:, a:b], cache=cache) for a, b in ((0, 20), *((n, n + 1) for n in range(20, N)))]
        assert cache.lengths(1) == (N, N) and cache.lengths(0) == (0, 0)
        assert torch.equal(torch.cat(steps, 1), want)


def identity(layer):
    """Projections that only pick elements: exact, whatever the height of the product."""
    for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        p.weight.copy_(torch.eye(*p.weight.shape))


@torch.inference_mode()
def test_padded_prompts_and_a_cache():
    """The mask of the prompts serves every step; so does one that grows."""
    layer = Attention(DIM, 4, causal=True, rotary=10000.0).eval()
    identity(layer)
    x, mask = hidden(), torch.ones(2, N, dtype=torch.int64)
    mask[0, :7] = 0
    want = layer(x, attention_mask=mask)
    once = sl.padding(mask[:, :20])
    for given in (lambda n: once, lambda n: mask[:, :n]):
        cache = sl.KVCache(layers=1, batch=2, kv_heads=4, head_dim=8, capacity=N)
        steps = ((0, 20), *((n, n + 1) for n in range(20, N)))
        got = [layer(x[:, a:b], cache=cache, attention_mask=given(b)) for a, b in steps]
        assert torch.equal(torch.cat(got, 1), want)


@torch.inference_mode()
def test_sequences_of_a_cache_have_positions_of_their_own():
    layer = Attention(DIM, 4, causal=True, rotary=10000.0).eval()
    identity(layer)
    x, cache = hidden(), sl.KVCache(layers=1, batch=2, kv_heads=4, head_dim=8, capacity=N)
    layer(x[:, :20], cache=cache)
    cache.truncate([20, 6])
    got = layer(torch.stack([x[0, 20:22], x[1, 6:8]]), cache=cache)
    want = layer(x)
    assert torch.equal(got, torch.stack([want[0, 20:22], want[1, 6:8]]))


def test_dropout_follows_the_generator():
    layer = Attention(DIM, 4, causal=True, dropout=0.5)
    x = hidden()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(layer(x))
    assert torch.equal(*results[:2]) and not torch.equal(*results[1:])
    assert torch.equal(layer.eval()(x), layer(x))


def test_masks_join():
    layer = Attention(DIM, 4, causal=True, window=9)
    x, documents = hidden(), np.repeat([0, 1], [20, N - 20])
    with torch.no_grad():
        got = layer(x, mask=sl.documents(documents))
        apart = torch.cat([layer(x[:, :20]), layer(x[:, 20:])], 1)
    torch.testing.assert_close(got, apart, rtol=0, atol=1e-6)


MADE = [
    (lambda: Attention(30, 4), "heads: expected a divisor of dim, 30, or head_dim= beside; got 4"),
    (lambda: Attention(32, 4, kv_heads=3), "kv_heads: expected a divisor of heads, 4; got 3"),
    (lambda: Attention(32, 4, window=3), "window: expected causal=True beside it"),
    (lambda: Attention(32, 4, causal=True, window=(3, 0)), r"window: expected an int; .* \(3, 0\) is window=4"),
    (lambda: Attention(32, 4, causal=True, window=0), "window: expected a size from 1"),
    (lambda: Attention(32, 4, bias=1), "bias: expected True or False; got 1"),
    (lambda: Attention(32, 0), "heads: expected a size from 1"),
    (lambda: Attention(32, 4, rotary=-1), "rotary: expected the base .* got -1"),
    (lambda: Attention(32, 4, rotary_dims=3), "rotary_dims: expected an even number up to head_dim, 8; got 3"),
    (lambda: Attention(32, 4, score="x"), "score: expected a function, a pattern"),
    (lambda: Attention(32, 4, scale="x"), "scale: expected a number"),
    (lambda: Attention(32, 4, dropout=3), "dropout: expected a probability from 0 to 1; got 3"),
    (lambda: Attention(32, 4, device="foo"), "device: expected a device of PyTorch's"),
    (lambda: Attention(32, 4, dtype=torch.int64), "dtype: expected a floating dtype"),
]


@pytest.mark.parametrize(("make", "message"), MADE)
def test_wrong_sizes(make, message):
    with pytest.raises(sl.Error, match=message):
        make()


def test_wrong_calls():
    layer, x = Attention(DIM, 4, causal=True, rotary=10000.0), hidden()
    cache = sl.KVCache(layers=1, batch=2, kv_heads=4, head_dim=8, capacity=N)
    for call, message in (
        (lambda: layer(x[0]), r"x: expected shape \(batch, length, 32\); got \(37, 32\)"),
        (lambda: layer(x.numpy()), "x: expected a tensor; got ndarray"),
        (lambda: layer(None), "x: expected a tensor; got NoneType"),
        (lambda: layer(x.detach().to_sparse()), "x: expected a strided tensor; got a sparse one. Pad it"),
        (lambda: layer(x, x), "context: expected None beside rotary="),
        (lambda: Attention(DIM, 4, context_dim=20)(x), r"context: expected shape \(batch, length, 20\); got None"),
        (lambda: layer(x, cache={}), "cache: expected a speedlight.KVCache; got dict"),
        (lambda: Attention(DIM, 4)(x, cache=cache), "cache: expected None beside causal=False"),
        (lambda: layer(x, cache=cache), "cache: expected no gradients beside it"),
        (lambda: layer(x, attention_mask=torch.ones(2, 5, dtype=int)), r"\(batch, k_len\) = \(2, 37\).*got \(2, 5\)"),
        (lambda: layer(x, attention_mask=torch.ones(2, N, dtype=int), mask=causal()), "mask: expected a function or"),
        (
            lambda: layer.load_multihead(nn.MultiheadAttention(16, 4).state_dict()),
            "state: expected .32, 32. for q_proj",
        ),
        (lambda: Attention(DIM, 4)(x, positions=3), "positions: expected None without rotary="),
        (lambda: layer(x, rotation=3), r"rotation: expected a pair \(cos, sin\) of tensors; got int"),
        (lambda: layer(x, rotation=(x,)), r"rotation: expected a pair .* got 1 of them"),
        (lambda: layer(x.long()), "x: expected dtype torch.float32, as the layer's parameters; got torch.int64"),
        (lambda: layer.load_multihead(nn.MultiheadAttention(DIM, 4)), r"state: expected .* Use \.state_dict\(\)"),
        (lambda: layer.load_multihead(3), "state: expected a state_dict"),
        (lambda: Attention(DIM, 4, kv_heads=2).multihead_state(), "expected what nn.MultiheadAttention has"),
        (lambda: Attention(DIM, 4, out_bias=True).multihead_state(), "out_bias: expected bias, as in nn.Multihead"),
        (
            lambda: layer.load_multihead(nn.MultiheadAttention(DIM, 4, add_bias_kv=True).state_dict()),
            "add_bias_kv=False",
        ),
    ):
        with pytest.raises(sl.Error, match=message):
            call()
    assert cache.length(0) == 0


@pytest.mark.parametrize("masked", [True, *[False] * FULL])
@pytest.mark.parametrize("dropout", [0.5, *[0.0] * FULL])
def test_in_a_graph(masked, dropout):
    """One graph, with the bits of the call without it; dropout draws anew in every call."""
    torch._dynamo.reset()
    x, tokens = torch.randn(2, 12, DIM), torch.ones(2, 12, dtype=torch.int64)
    tokens[0, :5] = 0
    layer = Attention(DIM, 4, causal=True, rotary=10000.0, window=3, dropout=dropout)
    given = {"attention_mask": tokens} if masked else {}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in (1, 2) if dropout else (1,):
        torch.manual_seed(seed)
        got = compiled(x, **given)
        got.sum().backward()
        torch.manual_seed(seed)
        assert torch.equal(got, layer(x, **given))
