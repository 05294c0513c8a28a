"""Latent attention of transformers with kv_b_proj absorbed, against transformers' own way and against float64."""

from __future__ import annotations

import importlib
import itertools
import sys
import warnings

import pytest
import torch
from conftest import ROOT
from small_llama import as_called
from tolerance import assert_equal

import speedlight as sl
import speedlight.torch
import speedlight.transformers

with warnings.catch_warnings():  # of a first import, about libraries that are missing
    warnings.simplefilter("ignore")
    from transformers import AttentionInterface, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    from speedlight.transformers import absorbing

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
Attention = modeling_deepseek_v3.DeepseekV3Attention
STOCK = Attention.expand_kv
NAME = "DeepseekV3Attention.expand_kv"
HEADS, LATENT, ROTARY, NOPE, VALUE = 4, 24, 8, 16, 12
FEW = 33  # queries: 24 · 28 / 20 = 33.6
LAYERS, NEW = 2, 6
SHARE = 5e-6  # of the largest logit, in float32
LEFT = torch.tensor([[0] * 5 + [1] * 8, [1] * 13])
ABSORBED = {
    "decoders": "axk1 bailing_hybrid deepseek_v2 deepseek_v3 glm4_moe_lite kimi_linear longcat_flash minicpm3 youtu",
    "multimodal": "mistral4",
}
INDEXED = {"decoders": "axk2 deepseek_v32 dots3_note glm_moe_dsa hy_v4", "multimodal": "mistral_large4 glm5_next"}


@pytest.fixture(autouse=True)
def restored():
    speedlight.torch.report(reset=True)
    yield
    speedlight.transformers.unregister()


SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "q_lora_rank": None,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROTARY, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


def model(**options):
    torch.manual_seed(0)
    made = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES | options)).eval()
    for x in made.parameters():  # so large that tokens differ, and that weights are far from equal
        x.data.normal_(0, 0.2)
    return made


@pytest.fixture(scope="module")
def deepseek():
    return model()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1, 61, (2, 13), generator=torch.Generator().manual_seed(1))


def attending(of, mode):
    """A model by transformers' own attention (None), or by ours in a mode."""
    if mode is not None:
        speedlight.transformers.register(mla=mode)
    of.set_attn_implementation("sdpa" if mode is None else "speedlight")
    return of


def generated(of, mode, ids, **options):
    options = {name: x() if callable(x) else x for name, x in options.items()}
    torch.manual_seed(0)
    found = attending(of, mode).generate(
        ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True, **as_called(options)
    )
    return found.sequences, torch.stack(found.logits)


def logits(of, mode, ids, **options):
    with torch.no_grad():
        return attending(of, mode)(ids, **as_called(options)).logits


def assert_close(got, want):
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= SHARE * float(want.abs().max())


def counts():
    """Calls that were absorbed, and what others were left for."""
    found = speedlight.torch.report(reset=True)
    assert {name for name, _ in found.left} | found.taken.keys() <= {NAME}
    return found.taken.get(NAME, 0), {why: n for (_, why), n in found.left.items()}


# --- models


def families(table):
    return [(kind, name) for kind, names in table.items() for name in names.split()]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), families(ABSORBED) + families(INDEXED))
def test_families(kind, name, monkeypatch):
    """Tokens and logits of small models, padded on the left; of some an indexer chooses keys."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import small

    of, ids = (one := small.make(kind, name)).model, one.inputs["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    of.set_attn_implementation("eager")
    found = {}
    for mode in ("eager", "stock", "auto", "absorbed"):
        if mode != "eager":
            speedlight.transformers.register(mla=mode)
            of.set_attn_implementation("speedlight")
        result = of.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
        found[mode] = result.sequences, torch.stack(result.logits)
        report = speedlight.torch.report(reset=True)
        assert bool(report.taken) == (mode in ("auto", "absorbed")) and not report.left
    for mode in ("stock", "auto", "absorbed"):
        assert torch.equal(found[mode][0], found["eager"][0]), mode
        assert_close(found[mode][1], found["eager"][1])


WAYS = {
    "a batch": {},
    "left padding": {"attention_mask": LEFT},
    "beams": {"num_beams": 3, "attention_mask": LEFT},
    "static cache": {"cache_implementation": "static", "disable_compile": True, "attention_mask": LEFT},
    "our cache": {"past_key_values": lambda: speedlight.transformers.Cache(model().config, capacity=32)},
    "chunks": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("way", WAYS)
def test_generation(deepseek, tokens, way):
    sequences, want = generated(deepseek, None, tokens, **WAYS[way])
    assert len(sequences.unique()) > NEW
    for mode in ("auto", "absorbed"):
        got = generated(deepseek, mode, tokens, **WAYS[way])
        assert torch.equal(got[0], sequences)
        assert_close(got[1], want)
        taken, left = counts()
        assert taken >= LAYERS * NEW and left == {}


ASSISTED = {"lookup": {"prompt_lookup_num_tokens": 3}, "model": {"assistant_model": model}}


@pytest.mark.parametrize("options", ASSISTED.values(), ids=ASSISTED)
def test_assisted_generation(deepseek, tokens, options):
    """Several tokens at once, and a cache that is cropped."""
    ids = tokens[:1].repeat(1, 2)
    want, _ = generated(deepseek, None, ids)
    got, _ = generated(deepseek, "absorbed", ids, **options)
    assert torch.equal(got, want) and counts()[0] > 0


def test_a_query_that_is_projected_twice(tokens):
    of = model(q_lora_rank=16)
    assert_close(logits(of, "absorbed", tokens), logits(of, None, tokens))
    assert counts() == (LAYERS, {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(tokens, dtype):
    """Of float64; and rounded to bfloat16, about as far from it as the stock way is."""
    dense = lambda of: model(first_k_dense_replace=LAYERS).to(of)  # noqa: E731 - experts are of float32 or less
    want = logits(dense(torch.float64), None, tokens)
    off = [float((logits(dense(dtype), mode, tokens) - want).norm() / want.norm()) for mode in ("absorbed", None)]
    assert off[0] < (1e-13 if dtype is torch.float64 else 1.5 * off[1])
    assert counts() == (LAYERS, {})


# --- which calls


def test_auto_absorbs_few_queries(deepseek):
    """Many at once are the bits of the stock way; the bound is of the model's shape alone."""
    ids = torch.randint(1, 61, (1, FEW + 1), generator=torch.Generator().manual_seed(2))
    assert int(absorbing.count_few(LATENT, NOPE, VALUE)) == FEW
    assert int(absorbing.count_few(512, 128, 128)) == 170
    assert absorbing.count_few(16, 16, 16) == float("inf")
    for batch in (1, 3):
        many = ids.repeat(batch, 1)
        stock = logits(deepseek, "stock", many)
        assert counts() == (0, {})
        assert torch.equal(logits(deepseek, "auto", many), stock)
        assert counts() == (0, {"many queries at once": LAYERS})
        logits(deepseek, "auto", many[:, :FEW])
        assert counts() == (LAYERS, {})
        assert_close(logits(deepseek, "absorbed", many), stock)
        assert counts() == (LAYERS, {})


def test_chunks_of_a_prompt(deepseek, tokens):
    want = logits(deepseek, None, tokens)
    for mode, cuts in itertools.product(("auto", "absorbed"), ((0, 7, 13), (0, 1, 2, 13), (0, 12, 13))):
        cache = DynamicCache()
        chunks = [tokens[:, a:b] for a, b in itertools.pairwise(cuts)]
        parts = [logits(deepseek, mode, x, past_key_values=cache) for x in chunks]
        assert_close(torch.cat(parts, 1), want)


@pytest.mark.parametrize("kind", ["bool", "float", "packed", "packed, alone", "not causal"])
def test_masks(deepseek, tokens, kind):
    if kind == "packed, alone":
        kind, tokens = "packed", tokens[:1]
    seen = torch.ones(13, 13).tril().bool() & (torch.arange(13) != 4)
    mask = seen[None, None].expand(len(tokens), 1, -1, -1)
    options = {
        "bool": {"attention_mask": mask},
        "float": {"attention_mask": torch.zeros(2, 1, 13, 13).masked_fill(~mask, torch.finfo(torch.float32).min)},
        "packed": {
            "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2]] * len(tokens)),
            "use_cache": False,
        },
        "not causal": {"attention_mask": torch.ones(2, 1, 13, 13).bool()},
    }[kind]
    assert_close(logits(deepseek, "absorbed", tokens, **options), logits(deepseek, None, tokens, **options))
    assert counts()[0] == LAYERS


def test_a_layer_alone(deepseek):
    """Without a mask, and without a scale."""
    layer = attending(deepseek, "absorbed").model.layers[0].self_attn
    latent, rotary, query = torch.randn(2, 1, 9, LATENT), torch.randn(2, 1, 9, ROTARY), torch.randn(2, HEADS, 1, 24)
    with torch.no_grad():
        keys, values = STOCK(layer, latent, rotary)
        for scaling in (None, 0.3):
            given = [f(layer, latent, rotary) for f in (Attention.expand_kv, STOCK)]
            got, want = (
                speedlight.transformers.attention_forward(layer, query, *x, None, scaling=scaling)[0] for x in given
            )
            assert_equal(want, sl.attention(query, keys, values, scale=scaling).transpose(1, 2))
            assert_close(got, want)
    assert counts() == (2, {})


def test_options_reach_attention(deepseek):
    """A soft cap and logits that join the denominator; weights that are asked for are refused, as without latents."""
    layer = attending(deepseek, "absorbed").model.layers[0].self_attn
    latent, rotary, query = torch.randn(2, 1, 9, LATENT), torch.randn(2, 1, 9, ROTARY), torch.randn(2, HEADS, 4, 24)
    spec = speedlight.transformers.attention_mask(2, 4, 9, q_offset=5)
    attend = speedlight.transformers.attention_forward
    with torch.no_grad():
        for options in ({"softcap": 2.0}, {"s_aux": torch.randn(HEADS)}, {"sinks": torch.randn(2, HEADS, 4, 1)}):
            given = [f(layer, latent, rotary) for f in (Attention.expand_kv, STOCK)]
            got, want = (attend(layer, query, *x, spec, scaling=0.2, **options)[0] for x in given)
            assert_close(got, want)
        with pytest.raises(sl.UnsupportedError, match="^output_attentions"):
            attend(layer, query, *Attention.expand_kv(layer, latent, rotary), spec, output_attentions=True)
        with pytest.raises(sl.ArgumentError, match="^key: expected 9 keys"):
            attend(layer, query, *Attention.expand_kv(layer, latent[:, :, :8], rotary[:, :, :8]), spec)


def test_keys_that_are_chosen(deepseek):
    layer = attending(deepseek, "absorbed").model.layers[0].self_attn
    latent, rotary, query = torch.randn(1, 1, 9, LATENT), torch.randn(1, 1, 9, ROTARY), torch.randn(1, HEADS, 1, 24)
    spec, chosen = speedlight.transformers.attention_mask(1, 1, 9, q_offset=8), torch.tensor([[[0, 3, 8]]])
    with torch.no_grad():
        keys = Attention.expand_kv(layer, latent, rotary)
        got, _ = speedlight.transformers.attention_forward(layer, query, *keys, spec, indices=chosen)
        want = sl.attention(query, *(x[:, :, chosen[0, 0]] for x in STOCK(layer, latent, rotary)))
        assert_close(got, want.transpose(1, 2))
        earlier = speedlight.transformers.attention_mask(1, 1, 9, q_offset=5)  # of a static cache
        got, _ = speedlight.transformers.attention_forward(layer, query, *keys, earlier, indices=chosen)
        want = sl.attention(query, *(x[:, :, [0, 3]] for x in STOCK(layer, latent, rotary)))
    assert_close(got, want.transpose(1, 2))
    assert counts() == (2, {})


@pytest.mark.parametrize(("queries", "taken"), [(FEW * 3, 1), (FEW * 3 + 3, 0)])
def test_many_queries_of_chosen_keys(deepseek, queries, taken):
    """A third of the keys is read, so that three times as many queries take fewer FLOPs absorbed."""
    layer = attending(deepseek, "auto").model.layers[0].self_attn
    shape = 1, 1, 3 * queries
    latent, rotary = torch.randn(*shape, LATENT), torch.randn(*shape, ROTARY)
    query, spec = torch.randn(1, HEADS, queries, 24), speedlight.transformers.attention_mask(1, queries, shape[2])
    chosen = torch.arange(queries).expand(1, queries, queries)
    with torch.no_grad():
        keys = Attention.expand_kv(layer, latent, rotary)
        speedlight.transformers.attention_forward(layer, query, *keys, spec, indices=chosen)
    assert counts() == (taken, {} if taken else {"many queries at once": 1})


# --- weights


class Wrapped(torch.nn.Linear):
    """What LoRA does: the product of a layer and something beside it."""

    def forward(self, x):
        return super().forward(x) * 1.5


class Quantised(torch.nn.Parameter):
    """What torchao does: a weight of another class."""


def wrapped(linear):
    made = Wrapped(linear.in_features, linear.out_features, bias=False)
    made.weight = linear.weight
    return made


def quantised(linear):
    linear.weight = Quantised(linear.weight.data, requires_grad=False)


def hooked(linear):
    linear.register_forward_hook(lambda module, given, out: out * 1.5)


def hooked_before(linear):
    linear.register_forward_pre_hook(lambda module, given: (given[0] * 1.5,))


def replaced(linear):
    whole = linear.forward
    linear.forward = lambda x: whole(x) * 1.5


def biased(linear):
    linear.bias = torch.nn.Parameter(torch.ones(linear.out_features))


CHANGES = {
    wrapped: f"kv_b_proj is a {__name__}.Wrapped",
    quantised: "kv_b_proj's weight is a Quantised", hooked: "kv_b_proj has hooks",
    hooked_before: "kv_b_proj has hooks", replaced: "kv_b_proj has hooks", biased: "kv_b_proj has a bias",
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_projection_of_another_kind_is_left_alone(tokens, change):
    """The bits are those of "stock", in that layer; the others are absorbed."""
    of = model(num_hidden_layers=1)
    attention = of.model.layers[0].self_attn
    attention.kv_b_proj = change(attention.kv_b_proj) or attention.kv_b_proj
    stock = logits(of, "stock", tokens)
    assert torch.equal(logits(of, "absorbed", tokens), stock)
    assert counts() == (0, {CHANGES[change]: 1})


def test_weights_that_change_are_seen(tokens):
    of = model()
    for _ in range(2):
        assert_close(logits(of, "absorbed", tokens), logits(of, None, tokens))
        with torch.no_grad():
            of.model.layers[0].self_attn.kv_b_proj.weight.mul_(1.25)
    of.model.layers[1].self_attn.kv_b_proj.weight = torch.nn.Parameter(
        torch.randn(HEADS * (NOPE + VALUE), LATENT).T.contiguous().T
    )
    assert_close(logits(of, "absorbed", tokens), logits(of, None, tokens))


# --- gradients, and what else is left alone


def test_training_keeps_its_way(tokens):
    of, found = model(), []
    for mode in ("stock", "absorbed"):
        of.zero_grad()
        attending(of, mode)(tokens, labels=tokens, use_cache=False).loss.backward()
        found.append([x.grad.clone() for x in of.parameters() if x.grad is not None])
    assert len(found[0]) > 10 and all(map(torch.equal, *found))
    assert counts() == (0, {"gradients are recorded": LAYERS})


def test_training_of_queries_alone(tokens):
    of = model(num_hidden_layers=1).requires_grad_(False)
    weight = of.model.layers[0].self_attn.q_proj.weight.requires_grad_()
    found = []
    for mode in ("stock", "absorbed"):
        weight.grad = None
        attending(of, mode)(tokens, labels=tokens, use_cache=False).loss.backward()
        found.append(weight.grad)
    assert torch.equal(*found) and counts() == (0, {"gradients are recorded": 1})


def test_autocast_keeps_its_way(deepseek, tokens):
    found = []
    for mode in ("stock", "absorbed"):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(logits(deepseek, mode, tokens))
    assert torch.equal(*found) and counts() == (0, {"latents and kv_b_proj have several dtypes": LAYERS})


@pytest.mark.slow
def test_a_graph_keeps_its_way(deepseek, tokens):
    torch.compiler.reset()
    of, whole = attending(deepseek, "absorbed"), deepseek.forward
    with torch.no_grad():
        got = torch.compile(whole, backend="eager")(tokens, use_cache=False).logits
    torch.compiler.reset()
    assert_close(got, logits(of, None, tokens))


def test_other_attention_gets_plain_tensors(deepseek, tokens):
    speedlight.transformers.register(mla="absorbed")
    latent, rotary = torch.randn(1, 1, 3, LATENT), torch.randn(1, 1, 3, ROTARY)
    for name in ("eager", "sdpa"):
        deepseek.set_attn_implementation(name)
        with torch.no_grad():
            keys = deepseek.model.layers[0].self_attn.expand_kv(latent, rotary)
        assert [type(x) for x in keys] == [torch.Tensor, torch.Tensor]
    assert counts() == (0, {})


def test_our_attention_under_other_names(deepseek, tokens):
    """Ours under another's name, and another's around ours, that reads what it is given."""
    speedlight.transformers.register(mla="absorbed", replace_sdpa=True)
    deepseek.set_attn_implementation("speedlight")
    with torch.no_grad():
        want = deepseek(tokens).logits
    calls = []

    def around(module, query, key, value, *more, **options):
        calls.append((repr(key), float((key.sum() + value.sum()).abs())))
        return speedlight.transformers.attention_forward(module, query, key, value, *more, **options)

    table = AttentionInterface()._global_mapping
    whole = table["speedlight"]
    counts()
    try:
        table["speedlight"] = around
        with torch.no_grad():
            assert torch.equal(deepseek(tokens).logits, want)
    finally:
        table["speedlight"] = whole
    assert len(calls) == LAYERS and calls[0][0] == "Expanded(keys, shape=(2, 4, 13, 24), dtype=torch.float32)"
    assert calls[0][1] > 0 and counts()[0] == LAYERS
    deepseek.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert_close(deepseek(tokens).logits, want)
    assert counts()[0] == LAYERS


def test_what_stands_for_keys_is_what_transformers_computes(deepseek):
    layer = attending(deepseek, "absorbed").model.layers[0].self_attn
    latent, rotary = torch.randn(2, 1, 5, LATENT), torch.randn(2, 1, 5, ROTARY)
    with torch.no_grad():
        want, got = STOCK(layer, latent, rotary), layer.expand_kv(latent, rotary)
        for a, b in zip(got, want, strict=True):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
            assert torch.equal(a + 0, b) and torch.equal(a[:, :, 1:], b[:, :, 1:]) and type(a + 0) is torch.Tensor


# --- register() and unregister()


def hook():
    return vars(torch.nn.Module).get("__init_subclass__")


def test_unregister_restores_everything(deepseek, tokens):
    assert hook() is None and Attention.expand_kv is STOCK
    for _ in range(2):
        speedlight.transformers.register()
        assert hook() is not None and Attention.expand_kv is not STOCK and Attention.expand_kv.__wrapped__ is STOCK
    expanding = Attention.expand_kv
    speedlight.transformers.register(mla="stock")
    assert hook() is None and Attention.expand_kv is STOCK
    speedlight.transformers.register(mla="absorbed")
    speedlight.transformers.unregister()
    assert hook() is None and Attention.expand_kv is STOCK
    speedlight.transformers.unregister()
    layer = deepseek.model.layers[0].self_attn
    with torch.no_grad():  # of somebody who has kept it
        assert type(expanding(layer, torch.randn(1, 1, 3, LATENT), torch.randn(1, 1, 3, ROTARY))[0]) is torch.Tensor
    assert_close(logits(deepseek, "stock", tokens), logits(deepseek, None, tokens))


def test_classes_that_are_defined_later(deepseek, tokens):
    """A module that is imported later, a class that inherits, one that calls super(), and one with its own way."""
    for name in [x for x in sys.modules if x.startswith("transformers.models.youtu")]:
        del sys.modules[name]
    speedlight.transformers.register(mla="absorbed")
    youtu = importlib.import_module("transformers.models.youtu.modeling_youtu")
    assert youtu.YoutuAttention.expand_kv.__wrapped__ is not None

    class Inherits(Attention):
        pass

    class Calls(Attention):
        def expand_kv(self, kv_nope, k_rot):
            keys, values = super().expand_kv(kv_nope, k_rot)
            return keys * 0.5, values

    class Own(Attention):
        def expand_kv(self, kv_nope, k_rot):
            keys, values = STOCK(self, kv_nope, k_rot)
            return keys * 0.5, values

    want = None
    for each, taken in ((Inherits, LAYERS), (Calls, 0), (Own, 0)):
        of = model()
        for layer in of.model.layers:
            layer.self_attn.__class__ = each
        found = logits(of, "absorbed", tokens)
        report = speedlight.torch.report(reset=True)
        assert sum(report.taken.values()) == taken and not report.left
        if each is Inherits:
            assert_close(found, logits(deepseek, None, tokens))
        else:
            assert want is None or torch.equal(found, want)
            want = found
    speedlight.transformers.unregister()
    assert Inherits.expand_kv is STOCK and not hasattr(youtu.YoutuAttention.expand_kv, "__wrapped__")
    assert not hasattr(Calls.expand_kv, "__wrapped__") and not hasattr(Own.expand_kv, "__wrapped__")


def test_a_release_that_expands_in_another_way_is_left_alone(deepseek, tokens, monkeypatch):
    def values_first(self, kv_nope, k_rot):
        n, v = self.qk_nope_head_dim, self.v_head_dim
        expanded = self.kv_b_proj(kv_nope).unflatten(-1, (-1, n + v))[:, 0].transpose(1, 2)
        values, keys = expanded.split((v, n), -1)
        return torch.cat((keys, k_rot.expand(-1, keys.shape[1], -1, -1)), -1), values

    values_first.__module__ = Attention.__module__
    for other in (values_first, lambda self, kv_nope, k_rot: STOCK(self, kv_nope, k_rot + self.scaling * 0)):
        other.__module__ = Attention.__module__
        with monkeypatch.context() as patched:
            patched.setattr(Attention, "expand_kv", other)
            want = logits(deepseek, None, tokens)
            assert_close(logits(deepseek, "absorbed", tokens), want)
            assert counts() == (0, {"this release expands keys in another way": LAYERS})
            speedlight.transformers.unregister()


def test_a_hook_of_others_stays(monkeypatch):
    """Classes that are there are absorbed; the hook belongs to those who came first."""
    seen = []
    monkeypatch.setattr(
        torch.nn.Module, "__init_subclass__", classmethod(lambda cls, **_: seen.append(cls.__name__)), raising=False
    )
    theirs = hook()
    speedlight.transformers.register()
    assert hook() is theirs and Attention.expand_kv is not STOCK
    speedlight.transformers.unregister()
    assert hook() is theirs and Attention.expand_kv is STOCK


def test_a_mode_that_is_none():
    with pytest.raises(sl.ArgumentError, match="^mla: expected 'auto', 'absorbed' or 'stock'; got 'fast'"):
        speedlight.transformers.register(mla="fast")  # pyright: ignore[reportArgumentType]
    assert Attention.expand_kv is STOCK
