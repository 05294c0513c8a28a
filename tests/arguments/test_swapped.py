"""Heads and length in each other's place: what is warned of, and what is not."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest
import torch

import speedlight as sl
import speedlight.torch
from speedlight.calls import dense
from speedlight.errors import advice as hints

SWAPPED = [
    (2, 512, 8, 64), (1, 4096, 8, 64), (1, 4096, 32, 128), (1, 1024, 16, 64), (4, 2048, 1, 64), (1, 1024, 128, 64),
    (1, 197, 12, 64), (8, 77, 12, 64), (2, 128, 12, 64), (1, 257, 16, 80), (32, 577, 24, 64), (4, 1500, 20, 64),
]  # fmt: skip
# of models: heads, kv heads, head dim
MODELS = {
    "GPT-2": (12, 12, 64), "GPT-2 XL": (25, 25, 64), "GPT-3": (96, 96, 128), "BLOOM": (112, 112, 128),
    "Llama 3.1 405B": (128, 8, 128), "its keys repeated": (128, 128, 128), "Mistral": (32, 8, 128),
    "DeepSeek-V3": (128, 128, 192), "Falcon 7B": (71, 1, 64), "Falcon 40B": (128, 8, 64), "Falcon 180B": (232, 8, 64),
    "gpt-oss": (64, 8, 64), "PaLM": (48, 1, 256), "T5 small": (8, 8, 64), "T5 11B": (128, 128, 128),
    "ViT-B": (12, 12, 64), "ViT-22B": (48, 48, 128), "Whisper large": (20, 20, 64), "Swin, stage 1": (3, 3, 32),
    "Swin, stage 4": (48, 48, 32), "Stable Diffusion": (8, 8, 40), "one head": (1, 1, 512), "Gemma 2": (8, 4, 256),
    "NeoX": (64, 64, 96), "ESM-2 15B": (40, 40, 128), "PatchTST": (16, 16, 8), "OPT 66B": (72, 72, 128),
}  # fmt: skip
LENGTHS = [*range(1, 70), 77, 96, 128, 144, 196, 197, 256, 257, 448, 577, 1024, 1500, 4096, 32_768, 100_000]
USUAL = [  # shapes of q and of k
    ((1, 32, 1, 128), (1, 8, 4096, 128)), ((1, 32, 5, 128), (1, 32, 5, 128)), ((1, 128, 1, 64), (1, 128, 1, 64)),
    ((16, 128, 7, 64), (16, 128, 7, 64)), ((1, 96, 2, 128), (1, 96, 2, 128)), ((2, 8, 512, 64), (2, 8, 512, 64)),
    ((4096, 4, 49, 32), (4096, 4, 49, 32)), ((1, 512, 77, 64), (1, 512, 77, 64)), ((2, 8, 64, 64), (2, 8, 77, 64)),
    ((1, 256, 17, 64), (1, 256, 17, 64)), ((1, 400, 1, 64), (1, 400, 900, 64)), ((0, 512, 8, 64), (0, 256, 8, 64)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "layout"), [(x, y) for x in SWAPPED for y in ("bhld", "blhd")])
def test_heads_and_length_in_each_others_place_are_noticed(shape, layout):
    shape = shape if layout == "bhld" else (shape[0], shape[2], shape[1], shape[3])
    other = "blhd" if layout == "bhld" else "bhld"
    with pytest.warns(UserWarning, match=rf"heads of .* by layout='{layout}'.* give layout='{other}'") as told:
        hints.warn_if_swapped(layout, shape, shape)
    assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.parametrize(("of_q", "of_k"), USUAL)
def test_usual_shapes_are_not_warned_of(of_q, of_k):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hints.warn_if_swapped("bhld", of_q, of_k)
        hints.warn_if_swapped("blhd", *((x[0], x[2], x[1], x[3]) for x in (of_q, of_k)))
        hints.warn_if_swapped("lhd", (4096, 8, 64), (4096, 8, 64))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), MODELS.values(), ids=MODELS)
def test_models_are_not_warned_of(heads, kv_heads, dim):
    """At any number of tokens: prompts, chunks, steps over a cache, windows in the batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in (1, 2, 16, 4096):
            for q_len in LENGTHS:
                for k_len in (q_len, 8 * q_len, 1500):
                    shapes = (batch, heads, q_len, dim), (batch, kv_heads, k_len, dim)
                    hints.warn_if_swapped("bhld", *shapes)
                    hints.warn_if_swapped("blhd", *((x[0], x[2], x[1], x[3]) for x in shapes))


def test_it_is_told_once_where_the_call_is(monkeypatch):
    def stop(*_):
        raise StopIteration

    monkeypatch.setattr(dense.engines, "of", stop)  # nothing is compiled for this
    x = np.ones((1, 256, 4, 4), np.float32)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            for call, y in ((sl.attention, x), (speedlight.torch.attention, torch.from_numpy(x))):
                with contextlib.suppress(StopIteration):
                    call(y, y, y)
    assert [x.filename for x in told] == [__file__]
    assert str(told[0].message).startswith("q of shape (1, 256, 4, 4) has 256 heads of 4 tokens by layout='bhld'.")
