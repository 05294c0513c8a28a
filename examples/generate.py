"""A small Llama-style decoder in NumPy on a speedlight.KVCache: prefill in chunks, then one token after another.

    python examples/generate.py --prompt "Once upon a time" --tokens 200 --chunk 16

The weights are drawn from a seed, not trained, so the text means nothing; what it shows is the loop of an inference
engine. With --checkpoint they are those that examples/train_bytes.py has trained, and it does. Whatever the chunks,
threads and calls, in one piece of memory or in pages (--paged), the text stays the same, because the attention has the
same bits and every other row is computed alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

import speedlight as sl

LETTERS = " etaoinshrdlucmfwypvbgkqjxz.,'\nTAISHWMBCE-;!?"  # the vocabulary: one token a character
LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 256, 8, 2, 32, 688


class Paged:
    """One sequence of a pool, with the methods of a KVCache that are used here."""

    def __init__(self, pool: sl.PagePool) -> None:
        self.pool, self.sequence = pool, pool.sequence()

    def length(self, layer: int) -> int:
        return self.sequence.length(layer)

    def attend(self, layer: int, *new: np.ndarray) -> np.ndarray:
        """Pools take packed tokens: (tokens, heads, dim)."""
        out = self.pool.attend(layer, [self.sequence], *(x[0].swapaxes(0, 1) for x in new))
        return out.swapaxes(0, 1)[None]


# of caches: the dtype of what they take, where it is not their own name
TAKEN = {"bfloat16": ml_dtypes.bfloat16, **dict.fromkeys(("int8", "fp8", "int4"), "float32")}


class Model:
    """RMSNorm, rotary positions, grouped heads, SwiGLU. Tokens are LETTERS, or, with a checkpoint, bytes."""

    def __init__(self, seed: int = 0, dtype: str = "float32", checkpoint: Path | None = None) -> None:
        self.dtype, self.stored = dtype, np.dtype(TAKEN.get(dtype, dtype))
        self.trained, self.kv_heads, self.head_dim = checkpoint is not None, KV_HEADS, HEAD_DIM
        if checkpoint is None:
            self._draw(np.random.default_rng(seed))
        else:
            self._load(checkpoint)
        self.temperature = 0.7 if self.trained else 4.0

    def _draw(self, rng: np.random.Generator) -> None:
        self.embedding, self.output = (rng.standard_normal((len(LETTERS), DIM), dtype=np.float32) for _ in range(2))
        shapes = {
            "q": (DIM, HEADS * HEAD_DIM), "k": (DIM, KV_HEADS * HEAD_DIM), "v": (DIM, KV_HEADS * HEAD_DIM),
            "o": (HEADS * HEAD_DIM, DIM),
            "gate": (DIM, HIDDEN), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM),
        }  # fmt: skip
        draw = lambda shape: rng.standard_normal(shape, dtype=np.float32) * np.float32(1.6 / shape[0] ** 0.5)  # noqa: E731
        self.layers = [{name: draw(shape) for name, shape in shapes.items()} for _ in range(LAYERS)]

    def _load(self, path: Path) -> None:
        """What examples/train_bytes.py wrote."""
        from safetensors import SafetensorError, safe_open

        notes, stored = None, {}
        try:
            with safe_open(path, "numpy") as file:
                notes, stored = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError:
            pass
        if notes is None or "sizes" not in notes:
            raise SystemExit(f"--checkpoint: expected a file that examples/train_bytes.py wrote; got {path}.")
        sizes = json.loads(notes["sizes"])
        heads, self.kv_heads = sizes["heads"], sizes["kv_heads"]
        self.embedding, self.output = stored["embedding.weight"], stored["output.weight"]
        names = {x: f"attention.{x}_proj" for x in "qkvo"} | {x: x for x in ("gate", "up", "down")}
        weights = lambda n: {x: stored[f"layers.{n}.{name}.weight"].T for x, name in names.items()}  # noqa: E731
        self.layers = [weights(n) for n in range(sizes["layers"])]
        self.head_dim = self.layers[0]["q"].shape[1] // heads

    def tokens(self, text: str) -> np.ndarray:
        return np.array(list(text.encode()) if self.trained else [LETTERS.index(c) for c in text])

    def letter(self, token: int) -> str:
        return bytes([token]).decode("ascii", "replace") if self.trained else LETTERS[token]

    def forward(self, tokens: np.ndarray, cache: sl.KVCache | Paged) -> np.ndarray:
        """Appends the tokens to the cache; returns the logits after each of them."""
        first = cache.length(0)
        x = self.embedding[tokens]
        for n, w in enumerate(self.layers):
            h = normalised(x)
            q, k, v = (self.heads(rows_times(h, w[name])) for name in "qkv")
            q, k = (sl.rotary(y, positions=first, interleaved=True) for y in (q, k))
            attended = cache.attend(n, *(y.astype(self.stored) for y in (q, k, v)))
            x = x + rows_times(attended[0].transpose(1, 0, 2).reshape(len(tokens), -1).astype(np.float32), w["o"])
            h = normalised(x)
            gate = rows_times(h, w["gate"])
            x = x + rows_times(gate / (1 + np.exp(-gate)) * rows_times(h, w["up"]), w["down"])
        return rows_times(normalised(x), self.output.T)

    def heads(self, x: np.ndarray) -> np.ndarray:
        """(tokens, heads · dim) to (1, heads, tokens, dim)."""
        return x.reshape(len(x), -1, self.head_dim).transpose(1, 0, 2)[None]


def rows_times(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x @ w, a row at a time: a BLAS sums in another order for another number of rows."""
    return np.stack([row @ w for row in x])


def normalised(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-5)


def generate(model: Model, prompt: str, count: int, chunk: int, seed: int = 0, paged: bool = False) -> Iterator[str]:
    """The prompt's continuation, character by character."""
    tokens = model.tokens(prompt)
    sizes = {
        "layers": len(model.layers), "kv_heads": model.kv_heads, "head_dim": model.head_dim, "dtype": model.dtype
    }  # fmt: skip
    room = len(tokens) + count
    cache = (
        Paged(sl.PagePool(pages=-(-room // 16), page_size=16, **sizes)) if paged else sl.KVCache(capacity=room, **sizes)
    )
    logits = np.zeros((1, len(model.output)))
    for start in range(0, len(tokens), chunk):
        logits = model.forward(tokens[start : start + chunk], cache)
    for n in range(count):
        noise = np.random.default_rng([seed, n]).gumbel(size=len(model.output))  # sampling, the same in every run
        token = int(np.argmax(logits[-1] / model.temperature + noise))
        yield model.letter(token)
        if n + 1 < count:
            logits = model.forward(np.array([token]), cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="The attention of a stranger ", help="the text that goes on")
    parser.add_argument("--tokens", type=int, default=200, help="letters that are generated")
    parser.add_argument("--chunk", type=int, default=16, help="tokens of the prompt in one call")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "float64", "float16", "bfloat16", "int8", "fp8", "int4"],
        help="of the cache",
    )
    parser.add_argument("--paged", action="store_true", help="keep keys and values in pages")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, and of what is drawn")
    parser.add_argument("--checkpoint", type=Path, help="weights that examples/train_bytes.py has trained")
    options = parser.parse_args()
    unknown = [] if options.checkpoint else sorted(set(options.prompt) - set(LETTERS))
    if unknown or not options.prompt or options.chunk < 1 or options.tokens < 1:
        why = (
            f"--prompt: no token for {unknown[0]!r}"
            if unknown
            else "--prompt, --chunk, --tokens: expected some text, and numbers from 1"
        )
        parser.error(f"{why}; the letters are {LETTERS!r}")
    if options.seed < 0:
        parser.error(f"--seed: expected a number from 0; got {options.seed}")
    if options.checkpoint and not options.checkpoint.is_file():
        parser.error(f"--checkpoint: no file {options.checkpoint}; examples/train_bytes.py writes one")
    model = Model(options.seed, options.dtype, options.checkpoint)
    print(options.prompt, end="", flush=True)
    start, seen = time.perf_counter(), 0.0
    letters = generate(model, options.prompt, options.tokens, options.chunk, options.seed, options.paged)
    try:
        for n, letter in enumerate(letters):
            seen = time.perf_counter() if n == 0 else seen
            print(letter, end="", flush=True)
    except (sl.ArgumentError, sl.ReservationError) as error:  # of the cache
        parser.error(f"--tokens: no cache for so many and the prompt ({error})")
    seconds = time.perf_counter() - seen
    rate = f", {(options.tokens - 1) / seconds:.0f} tokens/s" if options.tokens > 1 else ""
    print(f"\n\n[{len(options.prompt)} tokens of prompt in {(seen - start) * 1e3:.0f} ms{rate}]", file=sys.stderr)


if __name__ == "__main__":
    main()
