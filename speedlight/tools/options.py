"""Options that several commands have: called as the API's arguments are, and described once.

ProblemOptions are those of every command that takes a problem by its sizes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import speedlight as sl

from ..arrays.dtypes import DTYPES
from ..arrays.files import read_arrays
from ..errors import ArgumentError, FileError, how_to_install
from ..host import machine
from ..problem.problem import LAYOUTS
from ..problem.rank_plan import METHODS
from ..problem.shardings import SHARDS
from .formula import read_formulas


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Returns the function by which a shell completes a value."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def _option(name: str, text: str, *values: str) -> Any:
    """Returns an option of this name and help; shells complete it to one of the values."""
    return typer.Option(name, help=text, autocompletion=one_of(*values) if values else None)


_UNITS, _DTYPES = [isa.name for isa in machine.ISAS], tuple(DTYPES)

QLen = Annotated[int, _option("--q-len", "Queries of a sequence.")]
KLen = Annotated[int | None, _option("--k-len", "Keys; default as many as queries. The last query is at the last key.")]
QHeads = Annotated[int, _option("--q-heads", "Query heads.")]
KvHeads = Annotated[int | None, _option("--kv-heads", "Heads of keys and values; default as many.")]
HeadDim = Annotated[int, _option("--head-dim", "Elements of a query and a key.")]
ValueDim = Annotated[int | None, _option("--value-dim", "Elements of a value; default --head-dim.")]
Dtype = Annotated[str, _option("--dtype", "float32, float64, float16 or bfloat16.", *_DTYPES)]
_LAYOUT = "bhld, blhd, hld, or lhd (packed; offsets are read from cu_seqlens_q and cu_seqlens_k)."
Layout = Annotated[str, _option("--layout", _LAYOUT, *LAYOUTS)]
Causal = Annotated[bool, typer.Option("--causal", help="Hide keys after the query, aligned at the end.")]
_WINDOW = "LEFT,RIGHT: hide keys farther before and after the query; '1023,0' leaves 1,024."
Window = Annotated[str | None, _option("--window", _WINDOW)]
_MASK = "Which keys are seen: 'causal() & window(1024, 0)', in b, h, i, j: '(i - j) % 2 == 0', or file.py:name."
Mask = Annotated[str | None, _option("--mask", _MASK)]
_SCORE = "What becomes of a score s: 'softcap(30)', '30 * tanh(s / 30)', or file.py:name."
Score = Annotated[str | None, _option("--score", _SCORE)]
Dropout = Annotated[float, _option("--dropout", "How likely a weight is dropped after the softmax.")]
Seed = Annotated[int | None, _option("--seed", "Of --dropout: says which weights are dropped.")]
Device = Annotated[str, _option("--device", "cpu, or cuda for a GPU.", "cpu", "cuda")]
_UNIT = f"The vector unit: {', '.join(_UNITS)}. Default the best here."
Unit = Annotated[str | None, _option("--isa", _UNIT, *_UNITS)]
_THREADS = "On so many threads of a CPU, whether this machine has them or not."
Threads = Annotated[int | None, _option("--threads", _THREADS)]
_PREFIX = "Leading keys that are those of all sequences, as of forks in a PagePool; they are read once by tiles of 128."
SharedPrefix = Annotated[int, _option("--shared-prefix", _PREFIX)]
_RANKS = "Also what it takes over so many processes, each on a machine like this."
Ranks = Annotated[int | None, _option("--ranks", _RANKS)]
_LINK = "Of --ranks: bytes per second of a rank's link. Default 12.5e9, assumed."
LinkBandwidth = Annotated[float | None, _option("--link-bandwidth", _LINK)]
_LATENCY = "Of --ranks: seconds until the first byte. Default 1e-5, assumed."
Latency = Annotated[float | None, _option("--latency", _LATENCY)]
_SHARD = f"Of --ranks: {', '.join(SHARDS)}, or auto, the fastest."
ShardBy = Annotated[str, _option("--shard", _SHARD, "auto", *SHARDS)]
_METHOD = f"Of --ranks: {', '.join(METHODS)}, or auto, the fastest."
Method = Annotated[str, _option("--method", _METHOD, "auto", *METHODS)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


_FILES = "One .safetensors or .npz file with q, k and v; or three .npy files named so."
_LENGTH = 2048  # of a problem of which no more is said
_QUERIES = f"Queries of a sequence; default {_LENGTH}, or the longest of --lengths."
_LENGTHS = "Tokens of each sequence of a padded batch: '300,1024,77'."
_LATENT = "Values in the keys, as MLA has them; default one query, 16 heads over one, dims 576 and 512."
_DECODE = f"One query of each sequence, over a cache of --k-len tokens (default {_LENGTH}), or of --lengths."

_LATENTS = {"q_heads": 16, "kv_heads": 1, "head_dim": 576, "value_dim": 512}  # DeepSeek-V2-Lite's


@dataclass(frozen=True)
class ProblemOptions:
    """The options of `plan`, `show` and `bench` that say which problem is meant; sizes are plan()'s."""

    q_len: Annotated[int | None, _option("--q-len", _QUERIES)] = None
    k_len: KLen = None
    batch: Annotated[int | None, _option("--batch", "Sequences; default 1, or as many as --lengths.")] = None
    lengths: Annotated[str | None, _option("--lengths", _LENGTHS)] = None
    q_heads: Annotated[int | None, _option("--q-heads", "Query heads; default 8.")] = None
    kv_heads: KvHeads = None
    head_dim: Annotated[int | None, _option("--head-dim", "Elements of a query and a key; default 64.")] = None
    value_dim: ValueDim = None
    dtype: Dtype = "float32"
    causal: Causal = False
    window: Window = None
    mask: Mask = None
    score: Score = None
    dropout: Dropout = 0.0
    seed: Seed = None
    backward: Annotated[bool, typer.Option("--backward", help="The gradients: attention_backward().")] = False
    decode: Annotated[bool, typer.Option("--decode", help=_DECODE)] = False
    latent: Annotated[bool, typer.Option("--latent", help=_LATENT)] = False

    def options(self) -> dict[str, Any]:
        """Returns the options of attention(), or of KVCache.attend(), in a call of this problem."""
        check_seed(self.dropout, self.seed)
        hidden = {"causal": self.causal, "window": self.window, "mask": self.mask, "score": self.score}
        options = {"dropout": self.dropout, "seed": self.seed} | hidden_by(**hidden)
        return options if self.lengths is None else options | {"lengths": _lengths_of(self.lengths)}

    def plan(self, **more: Any) -> sl.Plan:
        """Returns the plan of such a call."""
        options = self.options()
        lengths, sizes = options.get("lengths"), {"q_len": self.q_len, "k_len": self.k_len, "batch": self.batch}
        if lengths is not None and self.batch is None:
            sizes["batch"] = len(lengths)
        if self.decode:
            options |= {"k_lengths": options.pop("lengths", None)}
            sizes |= self._check_decoded(max(lengths or [_LENGTH]))
        elif lengths is None and self.q_len is None:
            sizes |= {"q_len": 1, "k_len": self.k_len or _LENGTH} if self.latent else {"q_len": _LENGTH}
        heads: dict[str, int | None] = {name: getattr(self, name) for name in _LATENTS}
        for name, default in (_LATENTS if self.latent else {"q_heads": 8, "head_dim": 64}).items():
            heads[name] = default if heads[name] is None else heads[name]
        return sl.plan(
            **sizes, **heads, latent=self.latent, dtype=self.dtype, backward=self.backward, **options, **more
        )

    def _check_decoded(self, longest: int) -> dict[str, int]:
        """Returns the lengths of one query of each sequence over a cache."""
        if self.backward or self.q_len not in (None, 1):
            raise ArgumentError("--decode: expected no --backward and no --q-len: it is one query of each sequence.")
        if self.k_len is not None and self.lengths is not None:
            raise ArgumentError("--k-len: expected none beside --decode and --lengths.")
        return {"q_len": 1, "k_len": longest if self.k_len is None else self.k_len}


@dataclass(frozen=True)
class FileOptions:
    """The options of `attend` and `accuracy` that say which arrays of a file are meant, and how they attend."""

    files: Annotated[list[Path], typer.Argument(help=_FILES)]
    q: Annotated[str, typer.Option(help="Name of the queries.")] = "q"
    k: Annotated[str, typer.Option(help="Name of the keys.")] = "k"
    v: Annotated[str, typer.Option(help="Name of the values.")] = "v"
    layout: Layout = "bhld"
    causal: Causal = False
    window: Window = None
    mask: Mask = None
    score: Score = None
    scale: Annotated[float | None, typer.Option(help="Factor of the scores. Default 1/sqrt(head_dim).")] = None

    def read(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Returns q, k and v, and the options of attention()."""
        found = read_arrays(self.files)
        arrays = find_named(found, {"--q": self.q, "--k": self.k, "--v": self.v})
        options = {"scale": self.scale, "layout": self.layout}
        options |= hidden_by(self.causal, self.window, self.mask, self.score)
        if self.layout == "lhd":
            options |= {n: found[n] for n in ("cu_seqlens_q", "cu_seqlens_k") if n in found}
        return arrays, options


def find_named(found: dict[str, np.ndarray], names: dict[str, str]) -> list[np.ndarray]:
    """Returns the arrays of a file that options name."""
    for option, name in names.items():
        if name not in found:
            known = ", ".join(sorted(found)) or "no arrays at all"
            raise ArgumentError(f"{option}: expected one of {known}; got {name!r}. Say which: {option} NAME.")
    return [found[name] for name in names.values()]


def takes_listed(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of the class that its first argument is of, in its place: Typer reads signatures."""
    first, *own = inspect.signature(command, eval_str=True).parameters.values()
    listed = inspect.signature(first.annotation, eval_str=True).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(first.annotation(**{name: given.pop(name) for name in listed}), **given)

    every = [x.replace(kind=inspect.Parameter.KEYWORD_ONLY) for x in (*listed.values(), *own)]
    run.__signature__ = inspect.Signature(every)  # pyright: ignore[reportAttributeAccessIssue]
    return run


def _lengths_of(text: str) -> list[int]:
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise ArgumentError(f"--lengths: expected whole numbers such as 300,1024,77; got {text!r}.")
    return [int(x) for x in text.split(",")]


def check_device(device: str) -> None:
    """A GPU takes more than the command does."""
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ArgumentError(f"--device: expected cpu, cuda, cuda:0, …; got {device!r}.")
    if device != "cpu" and not (find_spec("torch") and find_spec("triton")):
        raise ArgumentError(f"--device: expected cpu, or PyTorch and Triton for {device!r}: {how_to_install('gpu')}.")


def window_of(text: str | None) -> tuple[int | None, int | None] | None:
    """The window of a text such as "1023,0"; no number, or none, means no limit on that side."""
    if text is None:
        return None
    try:
        left, right = (None if x.strip() in ("", "none") else int(x) for x in text.split(","))
    except ValueError:
        raise ArgumentError(
            f"--window: expected LEFT,RIGHT such as 1023,0, either of which may be left out; got {text!r}."
        ) from None
    if any([x is not None and x < 0 for x in (left, right)]):
        ours = ",".join("" if x is None or x < 0 else str(x) for x in (left, right))
        way = f"Write --window={ours}." if ours != "," else "Leave it out."
        raise ArgumentError(f"--window: expected a size from 0, or nothing for no limit; got {text!r}. {way}")
    return left, right


def span_of(text: str) -> tuple[int, int]:
    """Returns the span of a text such as "0:40"."""
    try:
        first, end = (int(x) for x in text.split(":"))
    except ValueError:
        raise ArgumentError(f"--span: expected first:end, such as 0:40; got {text!r}.") from None
    return first, end


def read_labels(path: Path) -> list[str]:
    """Returns the lines of a file, a token on each."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"--labels: {path}: {getattr(error, 'strerror', None) or error}.") from None


def check_seed(dropout: float, seed: int | None) -> None:
    """Raises unless a seed says which weights are dropped."""
    if dropout and seed is None:
        raise ArgumentError(
            "--seed: expected an int beside --dropout, which says what is dropped; got none. Write --seed=7."
        )


def hidden_by(
    causal: bool | str, window: str | None, mask: str | None, score: str | None, at: dict[str, int] | None = None
) -> dict[str, Any]:
    """The options of attention() that say which keys are seen, and what becomes of scores; `at`: of one head."""
    return {"causal": causal, "window": window_of(window)} | read_formulas(mask, score, at)


@contextlib.contextmanager
def on_unit(name: str | None) -> Iterator[None]:
    """Puts a vector unit in force while a command runs, as SPEEDLIGHT_ISA would."""
    before = os.environ.get("SPEEDLIGHT_ISA")
    if name is not None:
        os.environ["SPEEDLIGHT_ISA"] = name
    try:
        yield
    finally:
        if name is not None:
            os.environ.pop("SPEEDLIGHT_ISA")
            if before is not None:
                os.environ["SPEEDLIGHT_ISA"] = before
