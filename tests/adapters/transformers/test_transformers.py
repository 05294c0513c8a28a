"""speedlight.transformers: masks and the attention function, against what transformers documents."""

from __future__ import annotations

import json
import math
import re
import types
import warnings

import pytest
import torch
from conftest import FULL, ROOT
from small_llama import BATCH, DIM, HEADS, HOLES, KV_HEADS, LEFT, RIGHT, SIZES, assert_equal, drawn, registered, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import speedlight as sl
import speedlight.transformers
from speedlight.expressions.tree import evaluate

with warnings.catch_warnings():  # of a first import, about libraries that are missing
    warnings.simplefilter("ignore")
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, masking_utils

    from speedlight.transformers import masks

__all__ = ["registered", "tokens"]

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
attend, mask_of = (getattr(speedlight.transformers, x) for x in ("attention_forward", "attention_mask"))
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]])


def formula(q, k, v, seen, *, scaling=None, softcap=None, s_aux=None, position_bias=None):
    """What transformers' eager attention computes, in float64; rows that see nothing are 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if position_bias is None else scores + position_bias
    scores = scores.masked_fill(seen.logical_not(), -math.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0)
    return (weights[..., : k.shape[2]] @ v).transpose(1, 2)


def dense(**options):
    """transformers' own mask of the same arguments: (batch, 1, q_len, k_len)."""
    return masking_utils.sdpa_mask(**options, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)


def packed(mask_function, positions=PACKED):
    """Hides other sequences, and counts positions from each sequence's first token, as transformers does."""
    sequence = masking_utils.find_packed_sequence_indices(positions)
    of_own = masking_utils.packed_sequence_mask_function(sequence)
    return masking_utils.and_masks(of_own, masking_utils.remap_positions_for_packed_sequence(mask_function, positions))


m = masking_utils
SQUARE = {"q_length": 13, "kv_length": 13}
STEP = {"q_length": 1, "kv_length": 13, "q_offset": 12}
CHUNK = {"q_length": 4, "kv_length": 9, "q_offset": 9, "kv_offset": 4}
PATTERNS = {
    "causal": {**SQUARE},
    "causal, left": {**SQUARE, "attention_mask": LEFT},
    "causal, right": {**SQUARE, "attention_mask": RIGHT},
    "causal, holes": {**SQUARE, "attention_mask": HOLES},
    "step": {**STEP},
    "step, left": {**STEP, "attention_mask": LEFT},
    "step, left, chunked": {
        **STEP, "mask_function": m.chunked_causal_mask_function(13, torch.zeros(2, dtype=torch.int64)),
        "attention_mask": HOLES,
    },
    "chunk": {**CHUNK, "attention_mask": LEFT},
    "both ways": {**SQUARE, "mask_function": m.bidirectional_mask_function},
    "both ways, right": {**SQUARE, "mask_function": m.bidirectional_mask_function, "attention_mask": RIGHT},
    "both ways, left": {**SQUARE, "mask_function": m.bidirectional_mask_function, "attention_mask": LEFT},
    "sliding": {**SQUARE, "mask_function": m.sliding_window_causal_mask_function(4), "attention_mask": LEFT},
    "sliding chunk": {**CHUNK, "mask_function": m.sliding_window_causal_mask_function(6)},
    "sliding both ways": {
        **SQUARE, "mask_function": m.sliding_window_bidirectional_mask_function(3), "attention_mask": RIGHT
    },
    "chunked": {**SQUARE, "mask_function": m.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))},
    "chunked, left": {
        **SQUARE, "mask_function": m.chunked_causal_mask_function(4, torch.tensor([5, 0])), "attention_mask": LEFT
    },
    "chunked chunk": {**CHUNK, "mask_function": m.chunked_causal_mask_function(4, torch.tensor([2, 0]))},
    "packed": {**SQUARE, "mask_function": packed(m.causal_mask_function)},
    "packed, sliding": {**SQUARE, "mask_function": packed(m.sliding_window_causal_mask_function(3))},
    "packed, chunked": {
        **SQUARE,
        "mask_function": packed(m.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))),
    },
    "blocks": {
        **SQUARE,
        "mask_function": m.or_masks(
            m.causal_mask_function, m.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, 2, 2, 2, 2]] * 2))
        ),
    },
    "prefix": {**SQUARE, "mask_function": m.or_masks(m.causal_mask_function, lambda b, h, i, j: j < 5)},
    "static": {"q_length": 7, "kv_length": 16, "q_offset": torch.tensor(3), "attention_mask": LEFT[:, :10]},
}  # fmt: skip


LONGER = ("causal, holes", "both ways, left", "chunked chunk", "packed, sliding", "packed, chunked")  # in long runs


@pytest.mark.parametrize("name", [x for x in PATTERNS if FULL or x not in LONGER])
def test_masks(name):
    """A mask is seen as transformers' own tensor of it would be."""
    given = {"batch_size": BATCH, **PATTERNS[name]}
    q, k = drawn(BATCH, HEADS, given["q_length"], DIM), drawn(BATCH, KV_HEADS, given["kv_length"], DIM, seed=1)
    spec = mask_of(**given)
    assert "MaskSpec" in repr(spec)
    out, weights = attend(torch.nn.Module(), q, k, k, spec)
    assert weights is None and out.is_contiguous()
    assert_equal(out, formula(q, k, k, dense(**given)))


@pytest.mark.parametrize("recording", [True, False])
def test_a_mask_is_used_again_as_each_call_says(recording):
    """With another scale, under autocast, and inside a mode that is to see each call's operation; where machine code
    repeats calls, too.
    """
    with torch.set_grad_enabled(recording):
        _check_again()


def _check_again():
    q, k = drawn(BATCH, HEADS, 13, DIM), drawn(BATCH, KV_HEADS, 13, DIM, seed=1)
    given = {"batch_size": BATCH, **PATTERNS["causal, left"]}
    spec = mask_of(**given)
    for scaling in (0.5, 0.1, None) * 2:
        want = formula(q, k, k, dense(**given), scaling=scaling)
        assert_equal(attend(torch.nn.Module(), q, k, k, spec, scaling=scaling)[0], want)
    q, k = q.float(), k.float()
    for _ in range(3):
        assert attend(torch.nn.Module(), q, k, k, spec, scaling=1.0)[0].dtype == torch.float32
        assert attend(torch.nn.Module(), q, k, k, spec)[0].dtype == torch.float32
        with pytest.raises(sl.Error, match="scaling"):
            attend(torch.nn.Module(), q, k, k, spec, scaling=True)
    capped = torch.tensor(2.0)
    for softcap in (2.0, 5.0):
        want = attend(torch.nn.Module(), q, k, k, mask_of(**given), softcap=softcap)[0]
        assert_equal(attend(torch.nn.Module(), q, k, k, spec, softcap=capped.fill_(softcap))[0], want)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(torch.nn.Module(), q, k, k, spec)[0].dtype == torch.bfloat16
    with _Seen() as seen:
        attend(torch.nn.Module(), q, k, k, spec)
    assert "speedlight.attention" in "".join(seen.names)


class _Seen(TorchDispatchMode):
    """The names of the operations inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_packed_in_one_row():
    """A batch of one is cut into its sequences; offsets that a collator made say the same."""
    of = packed(m.sliding_window_causal_mask_function(4), PACKED[:1])
    given = {"batch_size": 1, **SQUARE, "mask_function": of}
    q, k = drawn(1, HEADS, 13, DIM), drawn(1, KV_HEADS, 13, DIM, seed=1)
    spec = mask_of(**given)
    assert spec.options()["cu_seqlens_q"] == [0, 4, 10, 13]
    want = formula(q, k, k, dense(**given))
    assert_equal(attend(torch.nn.Module(), q, k, k, spec)[0], want)
    offsets = torch.tensor([0, 4, 10, 13], dtype=torch.int32)
    plain = mask_of(1, 13, 13, mask_function=m.sliding_window_causal_mask_function(4))
    assert_equal(attend(torch.nn.Module(), q, k, k, plain, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)[0], want)
    for _ in range(2):  # also where the call without offsets has been prepared
        attend(torch.nn.Module(), q, k, k, plain)
    assert_equal(attend(torch.nn.Module(), q, k, k, plain, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)[0], want)


def test_packed_by_positions_alone():
    """Where no mask comes, as under DeepSpeed's Ulysses, position_ids that begin anew tell what is packed."""
    q, k = drawn(2, HEADS, 13, DIM), drawn(2, KV_HEADS, 13, DIM, seed=1)
    module = torch.nn.Module()
    causal = torch.ones(13, 13, dtype=torch.bool).tril()
    same = (PACKED[:, :, None] - PACKED[:, None] == torch.arange(13)[:, None] - torch.arange(13)).to(torch.bool)
    assert not same.all()
    assert_equal(attend(module, q, k, k, None, position_ids=PACKED)[0], formula(q, k, k, (same & causal)[:, None]))
    assert_equal(attend(module, q, k, k, None, position_ids=torch.arange(13)[None])[0], formula(q, k, k, causal))
    assert_equal(
        attend(module, q[:, :, :5], k, k, None, position_ids=PACKED[:, :5])[0], formula(q[:, :, :5], k, k, causal[:5])
    )


def test_no_mask_is_made():
    """What a mask holds does not grow with q_len times k_len."""
    spec = mask_of(1, 1 << 20, 1 << 20, mask_function=m.sliding_window_causal_mask_function(4096))
    assert spec.options() == {"causal": True, "window": (4095, None)}
    step = mask_of(1, 1, 1 << 20, q_offset=(1 << 20) - 1, attention_mask=torch.ones(1, 1 << 20, dtype=torch.bool))
    assert step.options() == {} and step.in_cache(None) is None


@pytest.mark.parametrize("dims", [(24, 16), (DIM, DIM)] if FULL else [(24, 16)], ids=str)
def test_options(dims):
    """Soft caps, sinks, a bias, a scale, masks as tensors, other value dims: forwards and backwards."""
    dim, value_dim = dims
    seen = dense(batch_size=BATCH, **SQUARE, attention_mask=LEFT)
    spec, bias = mask_of(BATCH, 13, 13, attention_mask=LEFT), drawn(1, HEADS, 13, 13)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min).to(torch.float64)
    some = LEFT[:, None, :, None]  # rows that see something
    cases = [
        ({"softcap": 2.0, "scaling": 0.3}, spec), ({"s_aux": drawn(HEADS)}, spec), ({"position_bias": bias}, added),
        ({}, seen), ({}, added), ({"position_bias": bias}, spec),
    ]  # fmt: skip
    for options, mask in cases if FULL else cases[:3]:
        q, k, v = (
            drawn(BATCH, h, 13, d, seed=n).requires_grad_()
            for n, (h, d) in enumerate(((HEADS, dim), (KV_HEADS, dim), (KV_HEADS, value_dim)))
        )
        learned = [x.requires_grad_() for x in options.values() if isinstance(x, torch.Tensor)]
        flow, results = drawn(BATCH, 13, HEADS, value_dim, seed=9) * some.transpose(1, 2), []
        for out in (attend(torch.nn.Module(), q, k, v, mask, **options)[0], formula(q, k, v, seen, **options)):
            results.append((out * some.transpose(1, 2), *torch.autograd.grad(out, [q, k, v, *learned], flow)))
        for got, want in zip(*results, strict=True):
            assert_equal(got, want)


def test_sinks_of_rows():
    """A logit per row (Inkling 2), with its gradient, beside a bias; s_aux says the same of one per head."""
    q, bias, spec = drawn(BATCH, HEADS, 13, DIM), drawn(BATCH, HEADS, 13, 13), mask_of(BATCH, 13, 13)
    sinks, heads = drawn(BATCH, HEADS, 13, 1, seed=3).requires_grad_(), drawn(HEADS)
    scores = (q @ q.mT / math.sqrt(DIM) + bias).masked_fill(dense(batch_size=BATCH, **SQUARE).logical_not(), -math.inf)
    want = (torch.cat([scores, sinks], -1).softmax(-1)[..., :13] @ q).transpose(1, 2)
    got = attend(torch.nn.Module(), q, q, q, spec, position_bias=bias, sinks=sinks)[0]
    assert_equal(got, want)
    for x, y in zip(*(torch.autograd.grad(x.pow(3).sum(), sinks) for x in (got, want)), strict=True):
        assert_equal(x, y)
    alike = heads[:, None, None].expand(BATCH, HEADS, 13, 1)
    assert_equal(
        attend(torch.nn.Module(), q, q, q, spec, sinks=alike)[0],
        attend(torch.nn.Module(), q, q, q, spec, s_aux=heads)[0],
    )
    with pytest.raises(sl.Error, match=r"sinks: expected \(batch, q_heads, q_len, 1\).*s_aux"):
        attend(torch.nn.Module(), q, q, q, spec, sinks=heads)
    with pytest.raises(sl.Error, match="sinks: expected no packed sequences"):
        attend(torch.nn.Module(), q[:1], q[:1], q[:1], None, sinks=sinks[:1], cu_seq_lens_q=[0, 13])


def test_dropout_comes_from_pytorchs_generator():
    q, module = drawn(1, HEADS, 13, DIM), torch.nn.Module()
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        outs.append(attend(module, q, q, q, mask_of(1, 13, 13), dropout=0.5)[0])
    assert torch.equal(*outs) and not torch.equal(outs[0], attend(module, q, q, q, mask_of(1, 13, 13), dropout=0.5)[0])


def test_without_a_mask_the_module_says_whether_it_is_causal():
    module, q, k = torch.nn.Module(), drawn(1, HEADS, 5, DIM), drawn(1, KV_HEADS, 9, DIM)
    lower, every = torch.ones(5, 9, dtype=torch.bool).tril(), torch.ones(5, 9, dtype=torch.bool)
    assert_equal(attend(module, q, k, k, None)[0], formula(q, k, k, lower))  # PyTorch's alignment
    assert_equal(attend(module, q, k, k, None, is_causal=False)[0], formula(q, k, k, every))
    module.is_causal = False
    assert_equal(attend(module, q, k, k, None)[0], formula(q, k, k, every))
    assert_equal(attend(module, q[:, :, :1], k, k, None, is_causal=True)[0], formula(q[:, :, :1], k, k, every[:1]))


def test_a_cache_that_a_model_hands_on_changes_nothing():
    """Under either name, whatever it holds: the layer has appended to it."""
    from transformers import DynamicCache

    q = drawn(1, HEADS, 13, DIM)
    want = attend(torch.nn.Module(), q, q, q, mask_of(1, 13, 13))[0]
    for name in ("cache", "past_key_values"):
        got = attend(torch.nn.Module(), q, q, q, mask_of(1, 13, 13), **{name: DynamicCache()})[0]
        assert torch.equal(got, want)


def test_what_is_refused():
    module, q, two = torch.nn.Module(), drawn(1, HEADS, 13, DIM), drawn(2, HEADS, 13, DIM)
    spec, tensor = mask_of(1, 13, 13), torch.ones(13, 13, dtype=torch.bool)
    refused = [
        ({"output_attentions": True}, "output_attentions: expected False.*set_attn_implementation"),
        ({"indices": q}, r"indices: Module gives attention an option.*register\(harmless=\('indices',\)\)"),
        ({"softcap": 2.0, "position_bias": q}, "position_bias: expected None beside softcap"),
        ({"position_bias": q[:, :, :12, :5]}, "^position_bias: expected a shape"),
        ({"s_aux": drawn(2)}, "^s_aux: expected .* numbers, one per query head"),
        ({"scaling": float("nan")}, "^scaling: expected a finite number"),
        ({"cache": 3}, "cache: expected a PagedAttentionCache; got int"),
        ({"attention_mask": tensor}, "attention_mask: expected what speedlight.transformers.attention_mask"),
        ({"attention_mask": mask_of(1, 13, 12)}, "key: expected 12 keys, for which the mask was made; got 13"),
        ({"attention_mask": mask_of(1, 12, 13)}, "query: expected 12 queries, for which the mask was made; got 13"),
        ({"cu_seq_lens_q": [0, 13], "attention_mask": mask_of(1, 13, 13, attention_mask=LEFT[:1])}, "beside them"),
    ]
    for options, words in refused:
        with pytest.raises(sl.Error, match=words):
            attend(module, q, q, q, **({"attention_mask": spec} | options))
    with pytest.raises(sl.Error, match="cu_seq_lens_q: expected a batch of one"):
        attend(module, two, two, two, mask_of(2, 13, 13), cu_seq_lens_q=[0, 13])
    attend(module, q, q, q, spec, indices=None, output_attentions=False, position_ids=q, deterministic=True)


def test_a_mask_becomes_a_tensor_where_a_model_computes_with_it():
    """Eager's, made once; never where nobody asks."""
    given = {"batch_size": BATCH, **SQUARE, "attention_mask": LEFT, "dtype": torch.float64}
    spec, want = mask_of(**given), masking_utils.eager_mask(**given)
    assert spec.to("cpu") is spec and spec.contiguous() is spec and spec.ndim == 4 and spec._dense is None
    x = drawn(BATCH, HEADS, 13, 13)
    for got, eager in (
        (spec[:, :, :5], want[:, :, :5]), (x + spec, x + want), (torch.cat([spec, x], 1), torch.cat([want, x], 1)),
        (spec.masked_fill(want < 0, 1.0), want.masked_fill(want < 0, 1.0)), (spec.to(torch.bool), want.bool()),
        (spec == 0, want == 0), (spec != 0.0, want != 0.0), (1 - spec, 1 - want), (spec < 0, want < 0),
    ):  # fmt: skip
        assert torch.equal(got, eager)
    assert spec.dtype is torch.float64 and spec.dense() is spec.dense()
    assert spec == spec and spec != None and spec in {spec} and (spec == "causal") is False  # noqa: E711
    assert not hasattr(spec, "nothing_that_tensors_have") and not hasattr(spec, "__array__")
    q = drawn(BATCH, HEADS, 13, DIM)
    assert_equal(
        attend(torch.nn.Module(), q, q, q, spec + 0)[0][LEFT], attend(torch.nn.Module(), q, q, q, spec)[0][LEFT]
    )


def test_models_that_hand_the_mask_on_make_no_tensor(monkeypatch, tokens):
    monkeypatch.setattr(masks, "_make_dense", lambda *_: pytest.fail("a tensor of q_len x kv_len"))
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    model.set_attn_implementation("speedlight")
    model.generate(tokens, attention_mask=LEFT.long(), max_new_tokens=3, do_sample=False)
    model(tokens, attention_mask=LEFT.long(), labels=tokens, use_cache=False).loss.backward()


def test_keys_that_sparse_attention_has_chosen():
    """`indices`, of each query; a key that the mask hides stays hidden."""
    q, chosen = drawn(BATCH, HEADS, 13, DIM), torch.rand(BATCH, 13, 13, generator=torch.Generator().manual_seed(1))
    chosen = chosen.topk(4, -1).indices
    kept = torch.zeros(BATCH, 13, 13, dtype=torch.bool).scatter(-1, chosen, True)[:, None]
    kept |= torch.eye(13, dtype=torch.bool)  # rows that see nothing are an average
    chosen = torch.cat([chosen, torch.arange(13).expand(BATCH, 13)[..., None]], -1)
    seen = dense(batch_size=BATCH, **SQUARE) & kept
    for mask in (mask_of(BATCH, 13, 13, dtype=torch.float64), dense(batch_size=BATCH, **SQUARE)):
        assert_equal(attend(torch.nn.Module(), q, q, q, mask, indices=chosen)[0], formula(q, q, q, seen))
    with pytest.raises(sl.Error, match="indices: Module gives attention an option"):
        attend(torch.nn.Module(), q, q, q, mask_of(BATCH, 13, 13), indices=chosen[0])
    module = torch.nn.Module()  # MiniMax-M3's, whose indexer makes a mask of blocks and of the mask
    module.indexer = types.SimpleNamespace(build_block_mask=lambda blocks, mask, *_: mask.masked_fill(~kept, -1e300))
    mask = mask_of(BATCH, 13, 13, dtype=torch.float64)
    assert_equal(attend(module, q, q, q, mask, block_indices=chosen)[0], formula(q, q, q, seen))


@pytest.mark.parametrize("name", ["Doge", "Beit"])
def test_models_that_compute_with_their_mask(name):
    """Doge writes into it, BEiT adds its learned bias."""
    import transformers

    torch.manual_seed(0)
    if name == "Doge":
        sizes = SIZES | {"keep_window_size": 8}
        model = transformers.DogeForCausalLM(transformers.DogeConfig(**sizes)).double()
        given = {"input_ids": torch.randint(1, 61, (2, 13)), "attention_mask": LEFT.long()}
    else:
        sizes = {x: SIZES[x] for x in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
        sizes |= {"image_size": 32, "patch_size": 8, "use_relative_position_bias": True, "drop_path_rate": 0.0}
        model = transformers.BeitModel(transformers.BeitConfig(**sizes)).double()
        given = {"pixel_values": drawn(2, 3, 32, 32)}
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.1)
    results = []
    for way in ("speedlight", "sdpa"):
        model.set_attn_implementation(way)
        model.zero_grad()
        out = model(**given)[0]
        out = out[LEFT] if name == "Doge" else out
        out.pow(3).sum().backward()
        results.append([out, *[p.grad for p in model.parameters() if p.grad is not None]])
    for got, want in zip(*results, strict=True):
        assert_equal(got / want.abs().max(), want / want.abs().max())


def test_a_model_that_attends_itself_does_not_get_a_mask_to_do_it():
    import transformers

    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=2)
    config._attn_implementation = "speedlight"
    model = transformers.BloomForCausalLM(config)
    with pytest.raises(
        sl.Error, match=r"models of BloomConfig compute attention themselves.*speedlight.torch.sdpa\(\)"
    ):
        model(torch.ones(1, 5, dtype=torch.int64))


def test_a_padding_mask_is_never_dropped():
    """Under a name that has a function and no mask, transformers would drop padding without a word."""
    AttentionInterface.register("half", attend)
    try:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="half")).eval()
        with pytest.raises(sl.Error, match="padding would be dropped.*AttentionMaskInterface.register"):
            model(torch.ones(2, 13, dtype=torch.int64), attention_mask=LEFT.long())
        AttentionMaskInterface.register("half", mask_of)
        model(torch.ones(2, 13, dtype=torch.int64), attention_mask=LEFT.long())
    finally:
        AttentionInterface._global_mapping.pop("half", None)
        AttentionMaskInterface._global_mapping.pop("half", None)


@pytest.mark.parametrize("seed", range(40) if FULL else range(4))
def test_padding_of_this_mask(seed):
    """It is of no mask before that begins alike: longer, shorter, or in a cache, where what is past its end is seen."""
    r = torch.Generator().manual_seed(seed)
    whole = torch.rand(2, 9, generator=r) < 0.5
    whole[:, 4:] |= torch.rand(1, generator=r) < 0.5  # often nothing hidden in what one mask has more
    for _ in range(60):
        n, in_cache = int(torch.randint(1, 10, (), generator=r)), bool(torch.rand(1, generator=r) < 0.5)
        keys = 12 if in_cache else n
        shown = masks._make_padding(whole[:, :n], in_cache)
        found = [[bool(evaluate(shown.root, {"b": b, "h": 0, "i": 0, "j": j})) for j in range(keys)] for b in range(2)]
        assert found == [[j >= n or bool(whole[b, j]) for j in range(keys)] for b in range(2)], (n, in_cache)
        assert in_cache or [x.shape for x in shown.tables] == [(2, n)]  # attention() takes no other


def test_register(monkeypatch):
    from speedlight.transformers import attending
    from speedlight.transformers.options import TRANSFORMERS

    TRANSFORMERS.check_version("5.23.4")
    with pytest.raises(sl.Error, match=r"expected 5.23 or newer, .*; got 4.57.1. pip install -U"):
        TRANSFORMERS.check_version("4.57.1")
    with pytest.raises(sl.Error, match=r"none is installed. pip install"):
        TRANSFORMERS.check_version(None)
    TRANSFORMERS.check_version("7.0.0")  # without a warning: what it relies on is asked for by name
    for wrong, words in (
        ({"replace_sdpa": 1}, "replace_sdpa"),
        ({"harmless": "x"}, "harmless"),
        ({"harmless": [1]}, "h"),
    ):
        with pytest.raises(sl.Error, match=f"{words}.*: expected"):
            speedlight.transformers.register(**wrong)
    monkeypatch.setattr(attending, "harmless", attending.harmless)
    speedlight.transformers.register(harmless=("indices",))
    q = drawn(1, HEADS, 13, DIM)
    attend(torch.nn.Module(), q, q, q, mask_of(1, 13, 13), indices=q)


def test_a_model_without_register_says_what_docs_quote(monkeypatch):
    import transformers

    monkeypatch.delitem(transformers.AttentionInterface._global_mapping, "speedlight")
    said = 'Specified `attn_implementation="speedlight"` is not supported. The only possible arguments are'
    with pytest.raises(ValueError, match=re.escape(said)):
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attn_implementation="speedlight"))
    assert f"ValueError: {said}" in (ROOT / "docs" / "transformers.md").read_text()


def test_a_saved_model_does_not_name_its_attention(tmp_path, monkeypatch):
    """Transformers keeps the name out of config.json, and obeys one that stands there."""
    import transformers

    LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="speedlight")).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    assert "speedlight" not in config.read_text()
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert load(tmp_path).config._attn_implementation == "sdpa"
    assert load(tmp_path, attn_implementation="speedlight").config._attn_implementation == "speedlight"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attn_implementation": "speedlight"}))
    assert load(tmp_path).config._attn_implementation == "speedlight"
    monkeypatch.delitem(AttentionInterface._global_mapping, "speedlight")
    with pytest.raises(ValueError, match='`attn_implementation="speedlight"` is not supported'):
        load(tmp_path)
