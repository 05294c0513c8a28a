"""Programs that nobody here wrote, of transformers and PyTorch, stock and with our attention: part of `run.py models`.

Small models of random weights: what counts is which calls of attention they make, and what comes between.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from contenders import Clock, Contender, Problem, short
from language_models import transformers
from torch import nn

import speedlight.torch
import speedlight.transformers

KINDS = ("decoding", "encoders", "training")
_NEW = 64  # tokens of a generation
_WAYS = {"4 beams": {"num_beams": 4}, "static cache": {"cache_implementation": "static", "disable_compile": True},
         "prompt lookup": {"prompt_lookup_num_tokens": 5}}  # fmt: skip
Run = Callable[[], list[torch.Tensor]]


def problems(kind: str) -> Iterator[Problem]:
    """Makes problems of a kind, or of all, one after another."""
    if kind in ("", "decoding"):
        for prompt in (16, 512, 4096):
            yield _generation(f"Llama, greedy, {_NEW} tokens after {prompt}", _llama, prompt)
        for prompt in (64, 512):
            yield _generation(f"Llama, left-padded, 4 x {_NEW} tokens after {prompt}", _llama, prompt, batch=4)
        for way, options in _WAYS.items():
            yield _generation(f"Llama, {way}, {_NEW} tokens after 512", _llama, 512, options=options)
        yield _generation(f"Llama, greedy, {_NEW} tokens after 512", _llama, 512, dtype=torch.bfloat16)
        yield _generation(f"Mistral, window 128, {_NEW} tokens after 512", _mistral, 512)
        yield asked(f"T5, {_NEW} tokens after 128", _t5_generation)
        yield asked(f"whisper, {_NEW} tokens of 30 s", _whisper_generation)
    if kind in ("", "encoders"):
        yield asked("BERT, 8 padded texts of up to 128 tokens", _bert)
        yield asked("ViT, 8 images of 197 tokens", _vit, False)
        yield asked("sentence embeddings, MiniLM's sizes, 32 texts of 8 to 64 tokens", _embeddings)
        yield asked("UNet of Stable Diffusion, a third as wide, an image of 512 x 512", _unet)
    if kind in ("", "training"):
        yield asked("ViT, a step, 4 images of 197 tokens", _vit, True)
        yield asked("BEiT, a step, 2 images of 197 tokens, bias with gradient", _beit)
        yield asked("Swin, a step, 2 images, windows of 49 tokens", _swin)
        yield asked("T5, a step, 4 x 256 tokens, bias with gradient", _t5_step)
        for dropout in (0.0, 0.1):
            yield asked(f"nanoGPT, a step, 4 x 256 tokens, dropout {dropout}", _nano_gpt, dropout)
        yield _jax_step()


# --- how a program gets our attention


def asked(name: str, make: Callable[..., Run], *given: Any) -> Problem:
    """A program that calls PyTorch's attention: ours by speedlight.torch.sdpa()."""
    torch.manual_seed(0)
    clock, run = Clock(), make(*given)

    def timed() -> tuple[list[torch.Tensor], float]:
        clock.inside = 0.0
        return run(), clock.inside

    stock = Contender(timed, lambda: _clocked(clock, speedlight.torch.sdpa(False)))
    ours = Contender(timed, lambda: _clocked(clock, speedlight.torch.sdpa()))
    return Problem(f"{name}, float32", {"speedlight": ours, "torch": stock})


@contextlib.contextmanager
def _clocked(clock: Clock, way: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Times F.scaled_dot_product_attention, forwards and backwards."""
    whole = F.scaled_dot_product_attention

    def timed(query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            return clock.attend(lambda q, k, v: whole(q, k, v, *more, **options), query, key, value)
        clock.begin()
        out = whole(query, key, value, *more, **options)
        clock.end()
        return out

    try:
        F.scaled_dot_product_attention = timed
        with way:
            yield
    finally:
        F.scaled_dot_product_attention = whole


def _generation(
    name: str, make: Callable[[], Any], prompt: int, batch: int = 1, dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Problem:  # fmt: skip
    """generate() by implementations' names; a batch has padding on the left, of half the longest prompt at most."""
    torch.manual_seed(0)
    model, ids = make().to(dtype).eval(), _ids(batch, prompt)
    mask = torch.ones_like(ids)
    for item in range(batch):
        mask[item, : item * prompt // (2 * batch)] = 0

    @torch.inference_mode()
    def run(implementation: str, cache: bool) -> tuple[list[torch.Tensor], None]:
        model.set_attn_implementation(implementation)
        more = {"past_key_values": speedlight.transformers.Cache(model.config)} if cache else options
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=_NEW, min_new_tokens=_NEW, do_sample=False, pad_token_id=0, **more
        )
        # in bfloat16 another order of sums is another token, sooner or later: then the first of them are compared
        return [found if dtype is torch.float32 else found[:, : prompt + 1]], None

    contenders = {"speedlight": Contender(lambda: run("speedlight", False))}
    if batch == 1 and not options:
        contenders["our Cache"] = Contender(lambda: run("speedlight", True))
    contenders["torch"] = Contender(lambda: run("sdpa", False))
    return Problem(f"{name}, {short(dtype)}", contenders, dtype)


def step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Run:
    """A forward and a backward pass: the loss, and all gradients in one: those of keys' biases are noise."""

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        total = loss()
        total.backward()
        return [total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]

    return run


def _once(model: nn.Module, call: Callable[[], torch.Tensor]) -> Run:
    model.eval()

    def run() -> list[torch.Tensor]:
        with torch.inference_mode():
            return [call()]

    return run


# --- models

_DECODER = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 8192}  # fmt: skip
_ENCODER = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
_T5 = {
    "vocab_size": 1000,
    "d_model": 384,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 6,
    "num_heads": 6,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def _mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_DECODER, sliding_window=128))


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 1000, shape, generator=torch.Generator().manual_seed(0))


def _images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def _bert() -> Run:
    model, ids = transformers.BertModel(transformers.BertConfig(vocab_size=1000, **_ENCODER)), _ids(8, 128)
    mask = (torch.arange(128) < torch.arange(128, 0, -16)[:, None]).long()
    return _once(model, lambda: model(input_ids=ids, attention_mask=mask)[0] * mask[..., None])


def _embeddings() -> Run:
    """Encodes as sentence-transformers does: a padded batch, and the mean of each text's tokens."""
    config = transformers.BertConfig(vocab_size=1000, **_ENCODER | {"num_attention_heads": 12})
    model, ids = transformers.BertModel(config), _ids(32, 64)
    mask = (torch.arange(64) < torch.linspace(8, 64, 32).long()[:, None]).long()

    def encode() -> torch.Tensor:
        found = model(input_ids=ids, attention_mask=mask)[0] * mask[..., None]
        return F.normalize(found.sum(1) / mask.sum(1, keepdim=True), dim=-1)

    return _once(model, encode)


def _unet() -> Run:
    diffusers: Any = importlib.import_module("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=64, block_out_channels=(96, 192, 384, 384), cross_attention_dim=384, attention_head_dim=6
    )
    drawn = torch.Generator().manual_seed(0)
    x, text = torch.randn(1, 4, 64, 64, generator=drawn), torch.randn(1, 77, 384, generator=drawn)
    return _once(model, lambda: model(x, 10, encoder_hidden_states=text).sample)


def _vit(training: bool) -> Run:
    model, x = transformers.ViTModel(transformers.ViTConfig(**_ENCODER)), _images(4 if training else 8)
    if training:
        return step(model, lambda: model(pixel_values=x)[0].square().mean())
    return _once(model, lambda: model(pixel_values=x)[0])


def _beit() -> Run:
    config = transformers.BeitConfig(**_ENCODER, use_relative_position_bias=True, drop_path_rate=0.0)
    model, x = transformers.BeitModel(config), _images(2)
    return step(model, lambda: model(pixel_values=x)[0].square().mean())


def _swin() -> Run:
    config = transformers.SwinConfig(embed_dim=64, depths=[2, 2, 4], num_heads=[2, 4, 8], drop_path_rate=0.0)
    model, x = transformers.SwinModel(config), _images(2)
    return step(model, lambda: model(pixel_values=x)[0].square().mean())


def _t5_step() -> Run:
    model, ids = transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5, dropout_rate=0.0)), _ids(4, 256)
    return step(model, lambda: model(input_ids=ids, labels=ids).loss)


def _t5_generation() -> Run:
    model, ids = transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5)), _ids(1, 128)
    return _once(model, lambda: model.generate(ids, max_new_tokens=_NEW, min_new_tokens=_NEW, do_sample=False))


def _whisper_generation() -> Run:
    sizes = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6)
    sizes |= dict.fromkeys(("encoder_layers", "decoder_layers"), 4)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 1536)
    config = transformers.WhisperConfig(
        vocab_size=1000, d_model=384, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    x = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(0))
    return _once(
        model, lambda: model.generate(x, max_new_tokens=_NEW, min_new_tokens=_NEW, do_sample=False, num_beams=1)
    )


class Block(nn.Module):
    """nanoGPT's block."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def _nano_gpt(dropout: float) -> Run:
    """With dropout other weights are dropped by each: then only the loss's size is compared."""
    model = nn.Sequential(nn.Embedding(1000, 384), *[Block(384, 6, dropout) for _ in range(6)], nn.Linear(384, 1000))
    ids = _ids(4, 257)
    run = step(model, lambda: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))
    return run if not dropout else lambda: [run()[0].detach().round()]


def _jax_step(layers: int = 4, dim: int = 384, heads: int = 6, length: int = 1024) -> Problem:
    """A jitted step of a transformer in JAX: the loss, and all gradients in one."""
    jax: Any = importlib.import_module("jax")
    ours, jnp = importlib.import_module("speedlight.jax"), jax.numpy
    sizes = {"qkv": (dim, 3 * dim), "out": (dim, dim), "up": (dim, 4 * dim), "down": (4 * dim, dim)}
    keys = iter(jax.random.split(jax.random.key(0), layers * len(sizes) + 1))
    blocks = [
        {name: jax.random.normal(next(keys), s) / s[0] ** 0.5 for name, s in sizes.items()} for _ in range(layers)
    ]
    x = jax.random.normal(next(keys), (1, length, dim))

    def loss(blocks: Any, x: Any, attend: Callable[..., Any]) -> Any:
        for block in blocks:
            q, k, v = jnp.split((jax.nn.standardize(x) @ block["qkv"]).reshape(1, length, 3 * heads, -1), 3, 2)
            x = x + attend(q, k, v, is_causal=True).reshape(x.shape) @ block["out"]
            x = x + jax.nn.gelu(jax.nn.standardize(x) @ block["up"]) @ block["down"]
        return jnp.square(x).mean()

    def contender(attend: Callable[..., Any]) -> Contender:
        step = jax.jit(jax.value_and_grad(lambda blocks, x: loss(blocks, x, attend)))

        def run() -> tuple[list[torch.Tensor], None]:
            total, gradients = jax.block_until_ready(step(blocks, x))
            leaves = [torch.from_dlpack(g).flatten() for g in jax.tree.leaves(gradients)]
            return [torch.from_dlpack(total), torch.cat(leaves)], None

        return Contender(run)

    contenders = {"speedlight": contender(ours.dot_product_attention), "jax": contender(jax.nn.dot_product_attention)}
    return Problem(f"JAX, a step, {layers} layers, {length} tokens, causal, float32", contenders)
