"""Recipes of docs/cookbook.md run, and compute what they say: the same dense mask or bias through the reference."""

from __future__ import annotations

import functools
import itertools
import math
import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from tolerance import assert_within, flat, plain

import speedlight as sl
import speedlight.torch
from speedlight import reference

pytestmark = pytest.mark.usefixtures("one_kernel")

PAGE = (ROOT / "docs" / "cookbook.md").read_text()
SETUP, *_ = RECIPES = re.split(r"^## ", PAGE, flags=re.MULTILINE)
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)

ROW, KEY = np.arange(96)[:, None], np.arange(96)
CAUSAL = ROW >= KEY
ITEM = np.arange(2)[:, None, None, None]
SLOPES = np.float32([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0])[:, None, None]


def t5_bucket(before):
    """As the paper's code has it, one number at a time."""
    side, distance = (16 if before < 0 else 0), abs(before)
    if distance < 8:
        return side + distance
    return side + min(15, 8 + int(math.log(distance / 8) / math.log(128 / 8) * 8))


def t5_bias(names):
    buckets = [[t5_bucket(int(i - j)) for j in range(96)] for i in range(96)]
    return names["weight"][np.array(buckets)].transpose(2, 0, 1)


def neighbourhood(height, width, size):
    """NATTEN's, pixel by pixel."""
    shown = np.zeros((height, width, height, width), bool)
    for y, x in itertools.product(range(height), range(width)):
        top = min(max(y - size // 2, 0), height - size)
        left = min(max(x - size // 2, 0), width - size)
        shown[y, x, top : top + size, left : left + size] = True
    return shown.reshape(height * width, height * width)


def part(names, rows=slice(None), keys=slice(None), items=slice(None)):
    """Some queries, keys and items of the page's arrays."""
    q, k, v = (names[x][items] for x in "qkv")
    return q[:, :, rows], k[:, :, keys], v[:, :, keys]


def beams(names):
    """A token of each beam after the prompts that were chosen."""
    _, k, v = part(names, keys=slice(80), items=[1, 1, 0])
    return names["q_new"], *(np.concatenate([x, names[f"{n}_new"]], 2) for x, n in ((k, "k"), (v, "v")))


def ragged(names):
    """The last token of each prompt, at its own place, of rotated queries and keys."""
    q, k = (sl.rotary(names[x]) for x in "qk")
    return np.stack([q[0, :, 90:91], q[1, :, 50:51]]), k, names["v"]


def grouped(heads, names):
    """Fewer heads of keys and values."""
    q, k, v = part(names)
    return q, k[:, :heads], v[:, :heads]


def latents(names):
    """Keys that all heads share, and values that are their first columns."""
    q, k, _ = part(names)
    return q, k[:, :1], k[:, :1, :, :12]


def heaviest(names):
    """The 16 newest keys of each head, and 32 that queries weigh most."""
    weights = reference.weights(names["q"], names["k"], mask=CAUSAL).sum(axis=2)
    weights[..., -16:] = np.inf
    return {"mask": weights[:, :, None] >= np.sort(weights)[..., None, -48:-47]}


def chosen(names):
    """The 16 keys that an indexer scores highest, unless they come later."""
    found = names["found"]
    return {"mask": (CAUSAL & (found >= np.sort(found)[..., -16:-15]))[:, None]}


IDS = np.repeat([0, 1, 2], [40, 8, 48])
DOCUMENTS = CAUSAL & (IDS[:, None] == IDS)
WINDOW = CAUSAL & (ROW - KEY < 24)
FIRST = functools.partial(part, items=slice(1))
TEXTS = functools.partial(part, rows=slice(40))
ALIBI = np.float32([0.5, 0.25, 0.125, 0.0625])[:, None, None] * np.float32(KEY - ROW)

# of each recipe, what its variables hold: which arrays, and options of the reference, or how they follow from the names
EXPECTED = {
    "SDPA swap": {"out": (part, {"mask": CAUSAL})},
    "Ragged prompts": {"out": (ragged, {"mask": np.where(ITEM, 50, 90) >= KEY})},
    "Learned bias": {
        "out": (part, lambda names: {"mask": CAUSAL, "score": plain(names["layer"].bias)[:, ROW - KEY + 95]})
    },
    "GQA and MQA": {
        "out": (functools.partial(grouped, 2), {"mask": CAUSAL}),
        "also": (functools.partial(grouped, 1), {"mask": CAUSAL}),
    },
    "Latent attention": {"out": (latents, {"mask": CAUSAL}), "same": "out"},
    "Reproducible results": {"out": (part, {"mask": CAUSAL, "dropout": 0.1, "seed": 7}), "same": "out"},
    "Sliding window": {"out": (part, {"mask": WINDOW}), "same": "out"},
    "Packing": {"out": (FIRST, {"mask": DOCUMENTS}), "also": (part, {"mask": DOCUMENTS})},
    "Padding on the right": {"out": (part, {"mask": CAUSAL & (np.maximum(ROW, KEY) < np.where(ITEM, 60, 96))})},
    "Padding on the left": {"out": (part, {"mask": CAUSAL & (np.where(ITEM, 36, 0) <= KEY)})},
    "ALiBi": {"out": (part, {"mask": CAUSAL, "score": SLOPES * np.float32(KEY - ROW)})},
    "Relative bias": {"out": (part, lambda names: {"score": names["learned"][:, ROW - KEY + 95]})},
    "T5": {"out": (part, lambda names: {"score": t5_bias(names), "scale": 1.0}), "same": "out"},
    "Soft cap": {
        "out": (part, {"mask": CAUSAL, "score": lambda s, b, h, i, j: 5 * np.tanh(s / 5)}),
        "also": (part, {"mask": CAUSAL, "score": [lambda s, b, h, i, j: 5 * np.tanh(s / 5), ALIBI]}),
    },
    "Prefix-LM": {
        "out": (part, {"mask": CAUSAL | (KEY < 32)}),
        "also": (part, {"mask": CAUSAL | (np.where(ITEM, 50, 32) > KEY)}),
    },
    "Cross-attention": {"out": (TEXTS, {"mask": np.where(ITEM, 70, 96) > KEY}), "same": "out"},
    "Attention sinks": {
        "out": (part, {"mask": CAUSAL, "sink_logits": np.float32([0.5, 1.0, 0.0, -1.0])}),
        "also": (part, {"mask": CAUSAL & ((ROW - KEY < 24) | (KEY < 4))}),
        "same": "also",
    },
    "Longformer": {"out": (part, {"mask": (abs(ROW - KEY) <= 8) | np.isin(ROW, (0, 50)) | np.isin(KEY, (0, 50))})},
    "BigBird": {"out": (part, lambda names: {"mask": np.kron(names["shown"], np.ones((8, 8))) > 0})},
    "Block-sparse video": {"out": (part, lambda names: {"mask": np.kron(names["shown"], np.ones((8, 8))) > 0})},
    "NATTEN": {"out": (part, {"mask": neighbourhood(8, 12, 5)})},
    "Beam search": {"out": (beams, {})},
    "H2O in ten lines": {"out": (functools.partial(part, rows=slice(95, 96)), heaviest)},
    "Top-k": {"out": (part, chosen)},
    "Sharding by merge": {"out": (part, {})},
    "Gradients without PyTorch": {"out": (part, {"mask": CAUSAL, "score": ALIBI})},
}  # fmt: skip


# recipes with a test of their own, below
APART = ("Accuracy of quantised caches", "Continuous batching", "Generate with our cache", "Shared system prompt")


def run(title):
    """The names that a recipe leaves."""
    names: dict = {}
    recipe = next(x for x in RECIPES if x.startswith(f"{title}\n"))
    exec(CODE.search(SETUP)[1], names)
    for code in CODE.findall(recipe):
        exec(code, names)
    return names


def expected(names, arrays, options, packed):
    """What the reference says, and its bound, as the recipe lays its result out."""
    q, k, v = arrays(names)
    options = options(names) if callable(options) else options
    results = reference.attention(q, k, v, **options), reference.error_bound(q, k, v, **options).out
    return [x[0].swapaxes(0, 1) for x in results] if packed else list(results)


def test_every_recipe_is_expected():
    titles = [x.split("\n")[0] for x in RECIPES[1:]]
    assert sorted(titles) == sorted([*EXPECTED, *APART]) and len(set(titles)) == len(titles)


@pytest.mark.parametrize("title", EXPECTED)
def test_recipes(title):
    names = run(title)
    for name, what in EXPECTED[title].items():
        if isinstance(what, str):
            assert plain(names[name]).tobytes() == plain(names[what]).tobytes()
        else:
            want, bound = expected(names, *what, packed=title == "Packing" and name == "out")
            assert_within(names[name], want, bound, f"{title}: {name}")


def test_continuous_batching():
    """The last step: token 21 of item 1, and the first 30 of item 0."""
    names = run("Continuous batching")
    rows = slice(21, 22), slice(30)
    for at, item, queries in ((slice(1), 1, rows[0]), (slice(1, None), 0, rows[1])):
        some = functools.partial(part, items=[item], rows=queries, keys=slice(queries.stop))
        mask = CAUSAL[queries, : queries.stop]
        assert_within(names["out"][at], *expected(names, some, {"mask": mask}, packed=True))
    assert names["pool"].free_pages == 32 - 2 - 2 and names["b"].length() == 22


def test_clients_of_a_system_prompt(capsys):
    """Each has the bits of a prompt and a question in a pool of its own."""
    names = run("Shared system prompt")
    q, k, v = (x.swapaxes(0, 1)[None] for x in names["questions"])
    prompt = [names[x][:1, :, :80] for x in "kv"]
    printed = re.search(r"print\(pool.free_pages\)  # (\d+)", PAGE.split("## Shared system prompt")[1])[1]
    assert capsys.readouterr().out.strip() == printed
    for n in range(8):
        own = slice(10 * n, 10 * n + 10)
        keys, values = (np.concatenate([x, y[:, :, own]], 2) for x, y in zip(prompt, (k, v), strict=True))
        some, mask = (lambda names, q=q[:, :, own], k=keys, v=values: (q, k, v)), CAUSAL[80:90, :90]
        assert_within(names["out"][own], *expected(names, some, {"mask": mask}, packed=True))
        pool = sl.PagePool(layers=1, pages=6, page_size=16, kv_heads=4, head_dim=16)
        alone = pool.sequence()
        pool.append(0, [alone], *(x[0].swapaxes(0, 1) for x in prompt))
        apart = pool.attend(0, [alone], *(x[own] for x in names["questions"]))
        assert apart.tobytes() == names["out"][own].tobytes()


def test_generate_gives_the_tokens_of_pytorch():
    names = run("Generate with our cache")
    assert names["cache"].get_seq_length() == 27  # the last token needs no step
    model = names["model"]
    model.set_attn_implementation("sdpa")
    want = model.generate(names["tokens"], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(names["text"], want) and names["text"].shape == (2, 28)


def test_accuracy_of_codes_is_what_the_recipe_prints(capsys):
    """Against the reference in float64, over the codes' own numbers."""
    names = run("Accuracy of quantised caches")
    said = re.search(r"RMS error of the output\"\)  # (.*)", PAGE)[1].split(", ")
    assert [x.split(" RMS")[0] for x in capsys.readouterr().out.splitlines()] == said
    exact = reference.attention(*part(names), mask=CAUSAL)
    for dtype, error in names["errors"].items():
        k, v = (codes * scales for codes, scales in (reference.quantise(names[x], dtype) for x in "kv"))
        off = reference.attention(names["q"], k, v, mask=CAUSAL) - exact
        assert abs(error - np.sqrt((off**2).mean() / (exact**2).mean())) < 1e-5


def test_t5_bias_trains():
    names = run("T5")
    used = np.unique(names["buckets"].numpy())
    assert (plain(names["emb"].weight.grad)[used] != 0).all() and len(used) > 25


def test_gradients():
    names = run("Gradients without PyTorch")
    given, asked = [names[x] for x in ("q", "k", "v", "out", "lse", "d_out")], {"grads": (names["learned"],)}
    want, bound = (f(*given, **names["options"], **asked) for f in (reference.backward, reference.backward_bound))
    got = *(names[x] for x in ("dq", "dk", "dv")), (names["d_learned"],)
    for x, y, z in zip(*map(flat, (got, want, bound)), strict=True):
        assert_within(x, y, z, "gradients")
