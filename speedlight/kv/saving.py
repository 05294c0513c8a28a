"""Files of a KVCache (.safetensors): its sizes, lengths, and the keys and values of each layer, token by token."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..arrays.dtypes import CODES, DTYPES, numpy_dtype
from ..arrays.files import read_arrays, read_metadata, write_arrays
from ..errors import ArgumentTypeError, FileError, UnsupportedError, of_a_handler
from ..problem.checks import MOST
from ..problem.windows import Ring, ring_of

_FORMAT, _VERSION = "speedlight key-value cache", 1
_LONGEST_WINDOW = 1 << 30  # tokens: a ring has a list of its tiles
_NAMES = ("layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity")
_SOMETIMES = ("window", "keep_first", "latent")


class Saved(NamedTuple):
    """The contents of a file, checked."""

    sizes: dict[str, int]
    dtype: str
    held: list[tuple[list[int], list[int]]]  # of each layer: lengths, and one past the highest position written
    parts: list[tuple[list[np.ndarray], list[np.ndarray]]]  # of each layer keys and values, plane by plane


def checked_path(path: Any) -> Path:
    """Returns the path that a cache is saved to."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path: expected a str or a Path; got {type(path).__name__}.")
    name = os.fspath(path)
    if not isinstance(name, str) or "\0" in name or not name.endswith(".safetensors"):
        raise FileError(f"{name!r}: expected a name that ends in .safetensors.")
    return Path(name)


def write(path: Path, saved: Saved, more: dict[str, str]) -> None:
    """Under a temporary name first, then renamed; more: words that read() leaves alone."""
    stored = {name: np.array([x[n] for x in saved.held], np.int64) for n, name in enumerate(("lengths", "written"))}
    for layer, both in enumerate(saved.parts):
        for name, parts in zip(("key", "value"), both, strict=True):
            stored |= {f"{name}{part}s.{layer}": x for part, x in zip(("", "_scale"), parts, strict=False)}
    words = {n: str(int(x)) for n, x in saved.sizes.items()}
    write_arrays(path, stored, {"format": _FORMAT, "version": str(_VERSION), "dtype": saved.dtype} | words | more)


def save_cache(cache: Any, where: Path, metadata: dict[str, str]) -> None:
    """Writes a cache, with extra metadata."""
    held = list(cache._now())
    parts = [cache._storage.parts(layer, list(map(cache._ring.held, *pair))) for layer, pair in enumerate(held)]
    sizes = {n: x for n, x in cache._sizes().items() if x is not None and x is not False}
    write(where, Saved(sizes, cache.dtype, held, parts), metadata)


def save_sequence(storage: Any, lengths: list[int], pages: list[int], path: Any) -> None:
    """Writes a sequence of a pool as a cache of one, with room for no more."""
    where, shape = checked_path(path), storage.shape
    sizes = {"layers": len(lengths), "batch": 1, "capacity": max(1, *lengths)}
    sizes |= {name: getattr(shape, name) for name in ("kv_heads", "head_dim", "value_dim")}
    sizes |= {"latent": True} if shape.latent else {}
    parts = [storage.parts(layer, pages, n) for layer, n in enumerate(lengths)]
    write(where, Saved(sizes, shape.dtype, [([n], [n]) for n in lengths], parts), {})


def read(path: Path) -> Saved:
    """Reads what write() wrote. Sizes are held against the file, and against each other, before anything is made of
    them.
    """
    words = read_metadata(path)
    if words.get("format") != _FORMAT:
        raise FileError(f"{path}: expected a file that KVCache.save() wrote; got format {words.get('format')!r}.")
    if words.get("version") != str(_VERSION):
        raise FileError(
            f"{path}: expected version {_VERSION}; got {words.get('version')!r}. Save it anew with this release."
        )
    sizes, dtype = _sizes(path, words), words["dtype"]
    room = path.stat().st_size
    if sizes["layers"] * sizes["batch"] * 16 > room:
        raise FileError(f"{path}: {room:,} bytes cannot hold {sizes['layers']} layers of {sizes['batch']} sequences.")
    stored = read_arrays([path])
    ring = ring_of(sizes.get("window"), sizes.get("keep_first", 0))
    held = _held(path, sizes, ring, stored)
    parts = []
    for layer, pairs in enumerate(held):
        most = max(ring.held(*pair) for pair in zip(*pairs, strict=True))
        keys = _parts(path, f"key{{}}s.{layer}", sizes, dtype, most, stored)
        is_latent = sizes.get("latent", False)
        values = [] if is_latent else _parts(path, f"value{{}}s.{layer}", sizes, dtype, most, stored)
        parts.append((keys, values))
    return Saved(sizes, dtype, held, parts)


def opened(path: Path, made: Callable[..., Any]) -> Any:
    """Returns the cache that a file holds, which made() reserves."""
    content = read(path)
    try:
        cache = made(**content.sizes, dtype=content.dtype)
    except UnsupportedError:  # of the device
        raise
    except (OSError, OverflowError, MemoryError, ValueError, RuntimeError) as error:
        if of_a_handler(error):
            raise
        raise FileError(f"{path}: a cache of {content.sizes} cannot be reserved ({error}).") from None
    storage = cache._storage
    for layer, (keys, values) in enumerate(content.parts):
        storage.fill(layer, keys, values)
    storage.lengths.set([lengths for lengths, _ in content.held])
    cache._held = content.held
    return cache


def check_whole(path: Path) -> None:
    """Raises if it is one rank's file."""
    words = read_metadata(path)
    if "ranks" in words:
        raise FileError(f"{path} {part_of(path, words)}, on {words['ranks']} ranks.")


def part_of(path: Path, words: dict[str, str]) -> str:
    """Returns a description of a rank's file, and which call reads it."""
    name = re.sub(r"\.\d+-of-\d+(?=\.safetensors$)", "", path.name)
    return (
        f"is the part of rank {words.get('rank', '?')} of {words['ranks']} of a cache over ranks; "
        f"speedlight.distributed.KVCache.load({name!r}) reads it"
    )


def rank_path(path: Path, rank: int, ranks: int) -> Path:
    """File of one rank of a cache over ranks."""
    return path.with_name(f"{path.stem}.{rank}-of-{ranks}{path.suffix}")


def rank_file(path: Path, rank: int, ranks: int) -> Path:
    """File that a rank saved; the error where there is none says how many ranks have one."""
    where = rank_path(path, rank, ranks)
    if where.exists():
        return where
    if path.exists():
        words = read_metadata(path)
        if "ranks" not in words:
            raise FileError(
                f"{path}: expected the name that save() of a cache over ranks was given; got a whole cache. "
                f"speedlight.KVCache.load({path.name!r}) reads it."
            )
        raise FileError(f"{path} {part_of(path, words)}.")
    own = re.compile(rf"{re.escape(path.stem)}\.\d+-of-(\d+)")
    others = sorted({int(x[1]) for x in map(own.fullmatch, [x.stem for x in path.parent.glob("*.safetensors")]) if x})
    if others:
        raise FileError(
            f"{path}: expected files of {ranks} ranks, as this group has; got those of {others[0]}. Load it in a group "
            f"of {others[0]} ranks, as many as saved it."
        )
    raise FileError(f"{where}: no such file. Every rank reads the one that it saved.")


def _sizes(path: Path, words: dict[str, str]) -> dict[str, int]:
    try:
        sizes = {n: int(words[n]) for n in _NAMES} | {n: int(words[n]) for n in _SOMETIMES if n in words}
    except (KeyError, ValueError) as error:
        raise FileError(f"{path}: a size is missing or no number ({error}).") from None
    wrong = any([not (0 if n == "keep_first" else 1) <= x <= MOST for n, x in sizes.items()])
    wrong |= "latent" in sizes and (sizes["latent"] != 1 or sizes["value_dim"] > sizes["head_dim"])
    if wrong or words.get("dtype") not in (*DTYPES, *CODES) or (sizes.get("keep_first") and "window" not in sizes):
        raise FileError(
            f"{path}: expected sizes from 1 to 2^46 and a known dtype; got {sizes} and {words.get('dtype')!r}."
        )
    if "window" in sizes and max(sizes["window"], sizes.get("keep_first", 0)) > _LONGEST_WINDOW:
        raise FileError(
            f"{path}: expected a window of up to 2^30 tokens; got {sizes['window']} and keep_first "
            f"{sizes.get('keep_first')}."
        )
    return sizes | ({"latent": True} if "latent" in sizes else {})


def _held(
    path: Path, sizes: dict[str, int], ring: Ring, stored: dict[str, np.ndarray]
) -> list[tuple[list[int], list[int]]]:
    shape, capacity = (sizes["layers"], sizes["batch"]), sizes["capacity"]
    both = []
    for name in ("lengths", "written"):
        x = stored.get(name)
        if x is None or x.shape != shape or x.dtype != np.int64:
            raise FileError(f"{path}: expected {name} of {shape[0]} layers and {shape[1]} sequences.")
        if x.min() < 0 or x.max() > capacity:
            raise FileError(f"{path}: expected {name} from 0 to the capacity {capacity}; got {x.min()} to {x.max()}.")
        both.append(x.tolist())
    held = list(zip(*both, strict=True)) if ring.size else [(x, x) for x in both[0]]
    for lengths, written in held:
        for n, w in zip(lengths, written, strict=True):
            if w < n or ring.lost(n, n, w):
                raise FileError(
                    f"{path}: expected what a sequence of {n} tokens sees; of {w} that were there it has been written "
                    "over."
                )
    return held


def _parts(
    path: Path, name: str, sizes: dict[str, int], dtype: str, held: int, stored: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """Keys or values of a layer; codes and their scales."""
    dim = sizes["head_dim" if name.startswith("key") else "value_dim"]
    coded = dtype in CODES
    planes = [("", dim, numpy_dtype(dtype))] + ([("_scale", 1, np.dtype(np.float32))] if coded else [])
    parts = []
    for part, last, kind in planes:
        x, wanted = stored.get(name.format(part)), (sizes["batch"], sizes["kv_heads"], held, last)
        if x is None or x.shape != wanted or x.dtype != kind:
            got = "none" if x is None else f"{x.shape} of {x.dtype}"
            raise FileError(f"{path}: expected {name.format(part)} of shape {wanted} and dtype {kind}; got {got}.")
        parts.append(x)
    if coded:
        if np.isnan(parts[0]).any():
            raise FileError(f"{path}: expected {name.format('')} of numbers; got NaN, which belongs in the scale.")
        if (parts[1] < 0).any() or np.isinf(parts[1]).any():
            raise FileError(f"{path}: expected {name.format('_scale')} of finite numbers that are not negative.")
        parts[1] = np.abs(parts[1])  # zeros and NaN of one sign: the kernels read it
    return parts
