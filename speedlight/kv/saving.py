"""Files of caches (.safetensors): sizes, lengths, and the keys and values of each layer, token by token.

A KVCache is written as it is. The caches of transformers' layers stand side by side, each under a prefix. Pages of a
pool are a cache of one sequence, beside a table of the pages of each sequence.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..arrays.dtypes import CODES, DTYPES, numpy_dtype, scale_columns, signed_nibbles
from ..arrays.files import MappedFile, map_arrays, write_arrays
from ..arrays.integers import integer
from ..engines import by_name
from ..errors import ArgumentError, ArgumentTypeError, FileError, UnsupportedError, of_a_handler
from ..problem.checks import MOST
from ..problem.windows import Ring, ring_of
from .journal import SequencePages
from .prefixes import SequenceTokens, decode_extra, encode_extra, no_tokens, token_bytes, token_rows
from .transaction import transact

_VERSION = 1
_LONGEST_WINDOW = 1 << 30  # tokens: a ring has a list of its tiles
_NAMES = ("layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity")
_SOMETIMES = ("window", "keep_first", "latent")
_NAN = 0x7F  # of float8_e4m3fn, without its sign
_CHECKED = 1 << 20  # bytes of codes that are checked at a time: they stay in a CPU's cache


class Kind(NamedTuple):
    """A kind of file: its format, and the calls that write and read it."""

    format: str
    writer: str
    reader: str


CACHE = Kind("speedlight key-value cache", "KVCache.save()", "speedlight.KVCache.load()")
PAGES = Kind("speedlight pages of a pool", "PagePool.save()", "load() of a speedlight.PagePool")
LAYERS = Kind("speedlight cache for transformers", "Cache.save()", "speedlight.transformers.Cache.load()")
_KINDS = {kind.format: kind for kind in (CACHE, PAGES, LAYERS)}


class Saved(NamedTuple):
    """The content of a cache, checked."""

    sizes: dict[str, int]
    dtype: str
    held: list[tuple[list[int], list[int]]]  # of each layer: lengths, and one past the highest position written
    parts: list[tuple[list[np.ndarray], list[np.ndarray]]]  # of each layer keys and values, plane by plane


class SavedSequence(NamedTuple):
    """Sequence of a file of pages.

    pages: their numbers in the file, in order.
    lengths: tokens of each layer.
    tokens: one int for each token of the longest layer; none if they are not all known.
    extra: the caller's key.
    is_forgotten: whether it was older than the pool's last forget().
    """

    pages: list[int]
    lengths: list[int]
    tokens: list[int]
    extra: Any
    is_forgotten: bool

    def known_tokens(self, page_size: int, generation: object) -> SequenceTokens | None:
        """Returns its tokens as a pool has them. `generation`: the pool's, in which they can be found."""
        if not self.tokens and self.extra is None and not self.is_forgotten:
            return None
        empty = no_tokens(self.extra, page_size, object() if self.is_forgotten else generation)
        return empty.extended(0, 0, token_bytes(self.tokens, None))


class SavedSequences(NamedTuple):
    """Sequences of a pool, and their pages side by side, as a cache of one sequence."""

    pages: Saved
    sequences: list[SavedSequence]


def checked_path(path: Any) -> Path:
    """Returns the path that a cache is saved to."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path: expected a str or a Path; got {type(path).__name__}.")
    name = os.fspath(path)
    if not isinstance(name, str) or "\0" in name or not name.endswith(".safetensors"):
        raise FileError(f"{name!r}: expected a name that ends in .safetensors.")
    return Path(name)


def check_model(model: Any) -> str:
    """Returns the key of a model, "" where the caller gives none."""
    if model is None:
        return ""
    if not isinstance(model, str):
        raise ArgumentTypeError(f"model: expected a str that names the model; got {type(model).__name__}.")
    return model


# --- writing


def snapshot(cache: Any) -> Saved:
    """Copies a cache. Other threads cannot write to it meanwhile."""

    def copy() -> Saved:
        held = list(cache._now())
        parts = [cache._storage.parts(layer, list(map(cache._ring.held, *pair))) for layer, pair in enumerate(held)]
        sizes = {n: x for n, x in cache._sizes().items() if x is not None and x is not False}
        return Saved(sizes, cache.dtype, held, parts)

    return transact(cache, set(range(cache.layers)), copy)


def write(
    path: Path,
    kind: Kind,
    contents: Mapping[str, Saved],
    words: Mapping[str, str],
    arrays: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes a file that only the user may read. `contents`: caches by their prefixes."""
    said = {"format": kind.format, "version": str(_VERSION)} | dict(words)
    stored = dict(arrays or {})
    for prefix, saved in contents.items():
        said |= {f"{prefix}{name}": str(int(x)) for name, x in saved.sizes.items()} | {f"{prefix}dtype": saved.dtype}
        for n, name in enumerate(("lengths", "written")):
            stored[f"{prefix}{name}"] = np.array([x[n] for x in saved.held], np.int64)
        for layer, both in enumerate(saved.parts):
            for name, parts in zip(("key", "value"), both, strict=True):
                for suffix, x in _in_file(parts, saved.dtype).items():
                    stored[f"{prefix}{name}{suffix}s.{layer}"] = x
    write_arrays(path, stored, said, private=True)


def save_cache(cache: Any, where: Path, metadata: dict[str, str]) -> None:
    """Writes a cache, with extra metadata."""
    write(where, CACHE, {"": snapshot(cache)}, metadata)


def copy_sequence(storage: Any, record: SequencePages) -> Saved:
    """Copies a sequence of a pool as a cache of one, with room for no more."""
    lengths = record.lengths
    sizes = _sizes_of_pages(storage.shape, max(1, *lengths))
    parts = [storage.parts(layer, record.pages, n) for layer, n in enumerate(lengths)]
    return Saved(sizes, storage.shape.dtype, [([n], [n]) for n in lengths], parts)


def copy_sequences(storage: Any, page_size: int, records: list[SequencePages], generation: object) -> SavedSequences:
    """Copies sequences of a pool; a page that several have is copied once. Behind their tokens are zeros.

    generation: PageJournal.generation of the pool.
    """
    held = [record.held() for record in records]
    pages = list(dict.fromkeys(itertools.chain(*held)))
    numbers = {page: n for n, page in enumerate(pages)}
    room = len(pages) * page_size
    parts = []
    for layer in range(storage.shape.layers):
        both = storage.parts(layer, pages, room)
        ends = dict.fromkeys(pages, 0)  # of each page the tokens that some sequence has there
        for record, own in zip(records, held, strict=True):
            for at, page in enumerate(own):
                ends[page] = max(ends[page], min(record.lengths[layer] - at * page_size, page_size))
        for page, end in ends.items():
            first = numbers[page] * page_size
            for x in itertools.chain(*both):
                x[:, :, first + end : first + page_size] = 0
        parts.append(both)
    content = Saved(
        _sizes_of_pages(storage.shape, max(1, room)), storage.shape.dtype, [([room], [room])] * len(parts), parts
    )
    sequences = []
    for record, own in zip(records, held, strict=True):
        tokens, longest = record.tokens, max(record.lengths)
        known, extra, is_forgotten = [], None, False
        if tokens is not None:
            known = tokens.numbers() if tokens.length == longest else []
            extra, is_forgotten = tokens.extra, tokens.last.generation is not generation
        pages_of_file = [numbers[page] for page in own]
        sequences.append(SavedSequence(pages_of_file, record.lengths, known, extra, is_forgotten))
    return SavedSequences(content, sequences)


def _sizes_of_pages(shape: Any, capacity: int) -> dict[str, int]:
    """Returns the sizes of a cache of one sequence that has the layers of a pool."""
    sizes: dict[str, int] = {"layers": shape.layers, "batch": 1, "capacity": capacity}
    sizes |= {name: getattr(shape, name) for name in ("kv_heads", "head_dim", "value_dim")}
    return sizes | ({"latent": True} if shape.latent else {})


def write_sequences(path: Path, saved: SavedSequences, page_size: int, model: str) -> None:
    """Writes sequences of a pool."""
    sequences = saved.sequences
    rows = {
        "pages": [x.pages for x in sequences],
        "tokens": [x.tokens for x in sequences],
        "extra": [[*encode_extra(x.extra)] for x in sequences],
    }
    arrays = {
        "sequence_lengths": np.array([x.lengths for x in sequences], np.int64),
        "sequence_forgotten": np.array([x.is_forgotten for x in sequences], np.int64),
    }
    for name, lists in rows.items():
        arrays[f"sequence_{name}"] = np.array([*itertools.chain(*lists)], np.int64)
        arrays[f"sequence_{name}_count"] = np.array([len(x) for x in lists], np.int64)
    words = {"page_size": str(page_size), "sequences": str(len(sequences)), "model": model}
    words["sequences_sha256"] = _digest_of(arrays)
    write(path, PAGES, {"": saved.pages}, words, arrays)


def write_layers(
    path: Path, contents: Mapping[str, Saved], words: Mapping[str, str], tokens: list[list[int]] | None
) -> None:
    """Writes the caches of transformers' layers. `tokens`: those of each sequence, None if they are not known."""
    arrays, said = {}, dict(words)
    if tokens is not None:
        arrays["sequence_tokens"] = np.array(tokens, np.int64)
        said["sequences_sha256"] = _digest_of(arrays)
    write(path, LAYERS, contents, said, arrays)


def _digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the digest of what a file says of sequences: a wrong token would find a wrong prompt."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        if name.startswith("sequence_"):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


# --- reading


def open_file(path: Path, kind: Kind, device: Any = "cpu") -> MappedFile:
    """Maps a file of a kind, of this version. `device`: where its contents are to lie, which is checked first."""
    by_name(device)
    file = map_arrays(path)
    words = file.words
    if words.get("format") != kind.format:
        other = _KINDS.get(words.get("format", ""))
        way = "" if other is None else f" {other.reader} reads it."
        got = words.get("format")
        raise FileError(f"{path}: expected a file that {kind.writer} wrote; got format {got!r}.{way}")
    if words.get("version") != str(_VERSION):
        raise FileError(
            f"{path}: expected version {_VERSION}; got {words.get('version')!r}. Save it anew with this release."
        )
    return file


def check_named(path: Path, file: MappedFile, model: str) -> None:
    """Raises unless a file has the key of this model."""
    saved = file.words.get("model", "")
    if saved != model:
        expected = f"tokens of model={model!r}, as given" if model else "tokens that were saved without model="
        raise FileError(
            f"{path}: expected {expected}; got those of model={saved!r}. Give the key that they were saved with, or "
            "compute them anew."
        )


def check_prompt(path: Path, file: MappedFile, tokens: Any) -> int | None:
    """Raises unless tokens begin with those of a file of layers; returns how many it has, None if it has no tokens.

    tokens: a list for each sequence, or None.
    """
    if "sequences_sha256" not in file.words and "sequence_tokens" not in file.arrays:
        if tokens is not None:
            raise FileError(
                f"{path}: expected tokens that save() was given; got a file that was saved without tokens=. Leave "
                "tokens= out, or save it anew with tokens=."
            )
        return None
    saved = _array(path, file.arrays, "sequence_tokens", (-1, -1))
    if file.words.get("sequences_sha256") != _digest_of(file.arrays):
        raise FileError(f"{path}: damaged; its tokens are not those that were saved.")
    if tokens is None:
        raise FileError(
            f"{path}: expected tokens=, as save() was given them; got None. Give input_ids that begin with the saved "
            "prompt."
        )
    rows = token_rows(tokens)
    batch, length = saved.shape
    if len(rows) != batch:
        raise FileError(f"{path}: expected tokens of {batch} sequences, as were saved; got {len(rows)}.")
    for index, (own, row) in enumerate(zip(saved.tolist(), rows, strict=True)):
        if row[:length] != own:
            pairs = list(itertools.zip_longest(own, row[:length]))
            at = [one == other for one, other in pairs].index(False)
            one, other = pairs[at]
            raise FileError(
                f"{path}: expected token {one} at position {at} of sequence {index}, as was saved; got {other}. Give "
                "input_ids that begin with the saved prompt, or compute these anew."
            )
    return length


def read(path: Path, file: MappedFile, prefix: str = "") -> Saved:
    """Returns a cache that write() wrote. Sizes are held against the file, and against each other, before anything is
    made of them.
    """
    sizes, dtype = _sizes(path, file.words, prefix)
    if sizes["layers"] * sizes["batch"] * 16 > file.size:
        raise FileError(
            f"{path}: {file.size:,} bytes cannot hold {sizes['layers']} layers of {sizes['batch']} sequences."
        )
    ring = ring_of(sizes.get("window"), sizes.get("keep_first", 0))
    held = _held(path, prefix, sizes, ring, file.arrays)
    parts = []
    for layer, pairs in enumerate(held):
        most = max(ring.held(*pair) for pair in zip(*pairs, strict=True))
        shape = sizes["batch"], sizes["kv_heads"], most
        latent = sizes["value_dim"] if sizes.get("latent") else None
        keys = _parts(path, f"{prefix}key{{}}s.{layer}", (*shape, sizes["head_dim"]), dtype, file.arrays, latent)
        values = []
        if latent is None:
            values = _parts(path, f"{prefix}value{{}}s.{layer}", (*shape, sizes["value_dim"]), dtype, file.arrays)
        parts.append((keys, values))
    return Saved(sizes, dtype, held, parts)


def with_capacity(content: Saved, capacity: int | None) -> Saved:
    """Returns a cache with another capacity, if one is given; a window has its own."""
    if capacity is None:
        return content
    least = max([max(lengths, default=0) for lengths, _ in content.held])
    if "window" in content.sizes or integer("capacity", capacity) < max(least, 1):
        what = "None, as the cache has a window" if "window" in content.sizes else f"at least {max(least, 1)} tokens"
        raise ArgumentError(f"capacity: expected {what}; got {capacity}.")
    return content._replace(sizes=content.sizes | {"capacity": integer("capacity", capacity)})


def make_filled(path: Path, content: Saved, make: Callable[..., Any]) -> Any:
    """Returns the cache that a file holds, which make() reserves."""
    try:
        cache = make(**content.sizes, dtype=content.dtype)
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


def read_sequences(path: Path, pool: Any, model: str) -> SavedSequences:
    """Returns sequences that write_sequences() wrote, for a pool of the same sizes."""
    file = open_file(path, PAGES)
    check_named(path, file, model)
    content = read(path, file)
    shape = pool._storage.shape
    expected = {"dtype": shape.dtype, "page_size": str(pool.page_size)} | _sizes_of_pages(shape, 0)
    got = {"dtype": content.dtype, "page_size": file.words.get("page_size")} | content.sizes
    for name, x in expected.items():
        if name != "capacity" and got.get(name) != x:
            raise FileError(
                f"{path}: expected pages of {name} {x}, as this pool has; got {got.get(name)}. Load it into a pool of "
                "the sizes and the dtype that it was saved from."
            )
    if content.sizes.get("latent", False) != shape.latent:
        raise FileError(
            f"{path}: expected pages of latent={shape.latent}, as this pool has; got those of another kind."
        )
    if file.words.get("sequences_sha256") != _digest_of(file.arrays):
        raise FileError(f"{path}: damaged; its tokens or tables are not those that were saved.")
    tables, tokens, extras = (_rows(path, file.arrays, f"sequence_{name}") for name in ("pages", "tokens", "extra"))
    lengths = _array(path, file.arrays, "sequence_lengths", (len(tables), pool.layers))
    forgotten = _array(path, file.arrays, "sequence_forgotten", (len(tables),))
    room, size = content.held[0][0][0], pool.page_size
    used = -(-lengths.max(1, initial=0) // size)
    fits = len(tokens) == len(extras) == len(tables) and [len(x) for x in tables] == used.tolist()
    fits &= bool((lengths >= 0).all()) and {*forgotten.tolist()} <= {0, 1}
    fits &= all([([n], [n]) == pair for pair in content.held for n in [room]])
    fits &= {*itertools.chain(*tables)} == {*range(room // size)} and not any([len({*x}) < len(x) for x in tables])
    fits &= all([len(x) in (0, n) for x, n in zip(tokens, lengths.max(1, initial=0).tolist(), strict=False)])
    if not fits:
        raise FileError(f"{path}: damaged; its sequences do not fit its pages.")
    keys = [_key(path, code) for code in extras]
    rows = zip(tables, lengths.tolist(), tokens, keys, forgotten.astype(bool).tolist(), strict=True)
    return SavedSequences(content, [SavedSequence(*row) for row in rows])


def _key(path: Path, code: list[int]) -> Any:
    """Returns the `extra` key of a sequence."""
    try:
        return decode_extra(bytes(code))
    except ValueError as error:
        raise FileError(f"{path}: damaged; expected the code of a key as extra ({error}).") from None


def _rows(path: Path, arrays: dict[str, np.ndarray], name: str) -> list[list[int]]:
    """Returns lists that are stored one after another, beside how long each is."""
    counts = _array(path, arrays, f"{name}_count", (-1,))
    if counts.min(initial=0) < 0 or counts.max(initial=0) > MOST:
        raise FileError(f"{path}: damaged; {name} has lists of {counts.min()} to {counts.max()} numbers.")
    x = _array(path, arrays, name, (sum(counts.tolist()),)).tolist()
    ends = [*itertools.accumulate(counts.tolist(), initial=0)]
    return [x[a:b] for a, b in itertools.pairwise(ends)]


def _array(path: Path, arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array of int64; -1 in a shape is any number."""
    x = arrays.get(name)
    if x is None or x.dtype != np.int64 or len(x.shape) != len(shape):
        raise FileError(f"{path}: damaged; expected {name} of {len(shape)} dims of int64.")
    if any([n not in (-1, have) for n, have in zip(shape, x.shape, strict=True)]):
        raise FileError(f"{path}: damaged; expected {name} of shape {shape}; got {x.shape}.")
    return x


def check_whole(path: Path, words: dict[str, str]) -> None:
    """Raises if a file is one rank's."""
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
        words = map_arrays(path).words
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


def _sizes(path: Path, words: dict[str, str], prefix: str) -> tuple[dict[str, int], str]:
    """Returns the sizes of a cache, and its dtype."""
    dtype = words.get(f"{prefix}dtype", "")
    try:
        sizes = {n: int(words[prefix + n]) for n in _NAMES}
        sizes |= {n: int(words[prefix + n]) for n in _SOMETIMES if prefix + n in words}
    except (KeyError, ValueError) as error:
        raise FileError(f"{path}: a size is missing or no number ({error}).") from None
    wrong = any([not (0 if n == "keep_first" else 1) <= x <= MOST for n, x in sizes.items()])
    wrong |= "latent" in sizes and (sizes["latent"] != 1 or sizes["value_dim"] > sizes["head_dim"])
    if wrong or dtype not in (*DTYPES, *CODES) or (sizes.get("keep_first") and "window" not in sizes):
        raise FileError(f"{path}: expected sizes from 1 to 2^46 and a known dtype; got {sizes} and {dtype!r}.")
    if "window" in sizes and max(sizes["window"], sizes.get("keep_first", 0)) > _LONGEST_WINDOW:
        raise FileError(
            f"{path}: expected a window of up to 2^30 tokens; got {sizes['window']} and keep_first "
            f"{sizes.get('keep_first')}."
        )
    return sizes | ({"latent": True} if "latent" in sizes else {}), dtype


def _held(
    path: Path, prefix: str, sizes: dict[str, int], ring: Ring, stored: dict[str, np.ndarray]
) -> list[tuple[list[int], list[int]]]:
    shape, capacity = (sizes["layers"], sizes["batch"]), sizes["capacity"]
    both = []
    for name in ("lengths", "written"):
        x = stored.get(prefix + name)
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


def _in_file(parts: list[np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Returns the arrays of keys or values of a layer by how their names end; safetensors has no type of four bits."""
    if parts and dtype in CODES and CODES[dtype].is_packed:
        return {"_nibble": _packed(parts[0]), "_scale": parts[1]}
    return dict(zip(("", "_scale", "_rest"), parts, strict=False))


def _packed(codes: np.ndarray) -> np.ndarray:
    """Returns codes of four bits two in a byte, the first in the low half; an odd last one has a zero beside it."""
    halves = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // 2), 2), np.uint8)
    bits = codes.astype(np.int8).view(np.uint8) & 15
    halves[..., 0], halves[..., : bits.shape[-1] // 2, 1] = bits[..., ::2], bits[..., 1::2]
    return halves[..., 0] | halves[..., 1] << 4


def _unpacked(packed: np.ndarray, dim: int, kind: np.dtype) -> np.ndarray:
    """Returns what _packed() was given."""
    bits = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    return signed_nibbles(bits[..., :dim]).astype(kind)


def _planes(dtype: str, dim: int, latent: int | None) -> dict[str, tuple[int, np.dtype]]:
    """Returns columns and dtype of the arrays that _in_file() names; `latent`: as _parts() has it."""
    if dtype not in CODES:
        return {"": (dim, numpy_dtype(dtype))}
    row, columns = CODES[dtype], dim if latent is None else latent
    size = scale_columns(dtype, latent=latent is not None) or columns
    scales = {"_scale": (-(-columns // size), np.dtype(row.scale))}
    if row.is_packed:
        return {"_nibble": (-(-columns // 2), np.dtype(np.uint8))} | scales
    rest = {} if latent is None else {"_rest": (dim - columns, numpy_dtype("bfloat16"))}
    return {"": (columns, numpy_dtype(dtype))} | scales | rest


def _parts(
    path: Path, name: str, shape: tuple[int, ...], dtype: str, stored: dict[str, np.ndarray], latent: int | None = None
) -> list[np.ndarray]:
    """Returns keys or values of a layer; codes and their scales, and the rest of latents beside codes.

    latent: how many columns of a latent are values.
    """
    parts = []
    for part, (last, kind) in _planes(dtype, shape[-1], latent).items():
        x, wanted = stored.get(name.format(part)), (*shape[:-1], last)
        if x is None or x.shape != wanted or x.dtype != kind:
            got = "none" if x is None else f"{x.shape} of {x.dtype}"
            raise FileError(f"{path}: expected {name.format(part)} of shape {wanted} and dtype {kind}; got {got}.")
        parts.append(x)
    if dtype not in CODES:
        return parts
    if dtype == "float8_e4m3fn" and _has_nan(parts[0]):
        raise FileError(f"{path}: expected {name.format('')} of numbers; got NaN, which belongs in the scale.")
    is_packed = CODES[dtype].is_packed
    has_sign = not is_packed and bool((parts[1] < 0).any())
    if has_sign or np.isinf(parts[1]).any():
        what = "finite numbers" if is_packed else "finite numbers that are not negative"
        raise FileError(f"{path}: expected {name.format('_scale')} of {what}.")
    if is_packed:
        parts[0] = _unpacked(parts[0], shape[-1], numpy_dtype(dtype))
        parts[1] = np.where(np.isnan(parts[1]), parts[1].dtype.type(np.nan), parts[1])
    else:
        parts[1] = np.abs(parts[1])  # zeros and NaN of one sign: the kernels read it
    return parts


def _has_nan(codes: np.ndarray) -> bool:
    """Returns whether a code of float8_e4m3fn is NaN."""
    numbers = codes.reshape(-1).view(np.uint8)
    parts = [numbers[first : first + _CHECKED] for first in range(0, len(numbers), _CHECKED)]
    return any([(x & _NAN).max() == _NAN for x in parts])
