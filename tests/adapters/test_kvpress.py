"""Scores of kvpress's presses by key_weights(), against the matrix of weights and against an installed kvpress."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from small_llama import llama, tokens  # noqa: F401 - fixtures
from tolerance import assert_within, plain

import speedlight as sl
from speedlight import reference

with warnings.catch_warnings():  # of a first import, about libraries that are missing
    warnings.simplefilter("ignore")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
WINDOW, POOL = 4, 5
SHARE = 1e-5  # of each score, in float32


def averaged(scores: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Returns the mean over the query heads of each kv head."""
    return scores.unflatten(1, (kv_heads, -1)).mean(2)


def observed(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, **options: Any) -> torch.Tensor:
    """Returns the scores of ObservedAttentionPress: a key's mean weight over the queries that see it."""
    length = k.shape[2]
    total = sl.key_weights(q, k, lse, causal=True, **options)
    return averaged(total / torch.arange(length, 0, -1), k.shape[1])


def snap(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, **options: Any) -> torch.Tensor:
    """Returns the scores of SnapKVPress without its last window, whose keys always stay."""
    total = sl.key_weights(q, k, lse, causal=True, queries=slice(-WINDOW, None), **options)
    mean = total[..., :-WINDOW] / WINDOW
    return averaged(torch.nn.functional.avg_pool1d(mean, POOL, stride=1, padding=POOL // 2), k.shape[1])


def tova(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, **options: Any) -> torch.Tensor:
    """Returns the scores of TOVAPress without the last key, which always stays: one row for all kv heads."""
    row = sl.key_weights(q, k, lse, causal=True, rows=[-1], **options)[:, :, 0, :-1]
    return row.mean(1, keepdim=True).expand(-1, k.shape[1], -1)


def means_of_heads(weights: np.ndarray, kv_heads: int) -> np.ndarray:
    return np.stack([x.mean(axis=1) for x in np.split(weights, kv_heads, axis=1)], axis=1)


def observed_by_matrix(weights: np.ndarray, kv_heads: int) -> np.ndarray:
    """Averages column j of the weights over its queries, j and later."""
    columns = [weights[:, :, j:, j].mean(axis=-1) for j in range(weights.shape[-1])]
    return means_of_heads(np.stack(columns, axis=-1), kv_heads)


def snap_by_matrix(weights: np.ndarray, kv_heads: int) -> np.ndarray:
    """Averages the last rows, then POOL neighbouring keys; zeros are beyond the ends."""
    rows = weights[:, :, -WINDOW:, :-WINDOW].mean(axis=2)
    around = np.pad(rows, [(0, 0), (0, 0), (POOL // 2, POOL // 2)])
    pooled = [around[..., j : j + POOL].sum(axis=-1) / POOL for j in range(rows.shape[-1])]
    return means_of_heads(np.stack(pooled, axis=-1), kv_heads)


def tova_by_matrix(weights: np.ndarray, kv_heads: int) -> np.ndarray:
    return np.repeat(weights[:, :, -1, :-1].mean(axis=1, keepdims=True), kv_heads, axis=1)


class Press(NamedTuple):
    """A press of kvpress: its name and options there, our scores, its definition, and how many last keys stay."""

    name: str
    options: dict[str, int]
    scores: Callable[..., torch.Tensor]
    by_matrix: Callable[[np.ndarray, int], np.ndarray]
    kept: int


PRESSES = [
    Press("ObservedAttentionPress", {}, observed, observed_by_matrix, 0),
    Press("SnapKVPress", {"window_size": WINDOW, "kernel_size": POOL}, snap, snap_by_matrix, WINDOW),
    Press("TOVAPress", {}, tova, tova_by_matrix, 1),
]
each_press = pytest.mark.parametrize("press", PRESSES, ids=lambda x: x.name)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (3, 1)], ids=str)
@each_press
def test_scores_are_those_of_the_matrix(press, heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, x, 137, 32, generator=generator) for x in (*heads, heads[1]))
    for options in ({}, {"score": sl.softcap(2.0), "sink_logits": np.linspace(-1, 1, heads[0], dtype=np.float32)}):
        _, lse = sl.attention(q, k, v, causal=True, return_lse=True, **options)
        want = press.by_matrix(reference.weights(q, k, causal=True, **options), heads[1])
        assert_within(press.scores(q, k, lse, **options), want, SHARE * want, press.name)


@pytest.fixture
def kvpress(monkeypatch):
    """kvpress, whose import replaces transformers' attention functions; they are put back."""
    # a copy takes the replacements
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", dict(ALL_ATTENTION_FUNCTIONS._local_mapping))
    with warnings.catch_warnings():  # of a first import, about modules that Python will remove
        warnings.simplefilter("ignore")
        return pytest.importorskip("kvpress")


class Layer(NamedTuple):
    """A call of an attention layer: what a press reads."""

    module: torch.nn.Module
    options: dict[str, Any]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor


@pytest.fixture
def layers(llama, tokens, monkeypatch):  # noqa: F811
    """The calls of a small Llama's layers under eager attention, for one prompt."""
    arrays, found = [], []
    eager = modeling_llama.eager_attention_forward

    def record(module, q, k, v, *args, **options):
        arrays.append((q, k, v))
        return eager(module, q, k, v, *args, **options)

    def hook(module, args, options, out):
        found.append(Layer(module, options, *arrays[-1], out[1]))

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", record)
    llama.set_attn_implementation("eager")
    hooks = [x.self_attn.register_forward_hook(hook, with_kwargs=True) for x in llama.model.layers]
    with torch.no_grad():
        llama(tokens)
    for x in hooks:
        x.remove()
    assert len(found) == len(hooks) == 2
    return found


@each_press
def test_scores_and_kept_keys_are_those_of_kvpress(press, layers, kvpress):
    """With the matrix that eager attention returns, and with the window that kvpress computes without one."""
    theirs = getattr(kvpress, press.name)(compression_ratio=0.5, **press.options)
    for layer in layers:
        with torch.no_grad():
            _, lse = sl.attention(layer.q, layer.k, layer.v, causal=True, return_lse=True)
            ours = press.scores(layer.q, layer.k, lse)
        length, compared = layer.k.shape[2], layer.k.shape[2] - press.kept
        full = torch.nn.functional.pad(ours, (0, press.kept), value=torch.inf)
        chosen = full.topk(length // 2).indices.sort().values[..., None].expand(-1, -1, -1, layer.k.shape[3])
        for weights in (layer.weights, None) if press.kept else (layer.weights,):
            given = layer.module, layer.options["hidden_states"], layer.k, layer.v, weights, layer.options
            with torch.no_grad():
                want = plain(theirs.score(*given)[..., :compared])
                keys, _ = theirs.compress(*given)
            assert_within(ours, want, SHARE * want, press.name)
            assert_same_rows(keys, layer.k.gather(2, chosen))


def assert_same_rows(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares rows of each head as sets: kvpress keeps them in the order of their scores."""
    assert got.shape == want.shape
    for one, other in zip(got.flatten(0, 1), want.flatten(0, 1), strict=True):
        assert sorted(one.tolist()) == sorted(other.tolist())
