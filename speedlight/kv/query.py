"""Checks of the arguments of a call to a cache or pool."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import ArgumentError, ArgumentTypeError
from ..errors.advice import of_packed
from ..problem.checks import check_flag, check_tokens, item_lengths, new_counts, packed_counts
from ..problem.options import Options
from ..problem.tokens import Piece, TokenShape
from ..problem.windows import Ring

# for who gives keys alone
MAKE_LATENT = " Where values are the first columns of keys, make it with latent=True."


class Query(NamedTuple):
    """The queries of a call, and how they attend."""

    given: tuple[Any, ...]  # q, or q, k and v, as the caller has them
    q: Any  # where they lie; None of a step that was checked
    options: Options
    return_lse: bool
    out: Any  # the caller's own array, or None
    lengths: Any = None  # q_lengths, as the caller has it


class Packed(NamedTuple):
    """The tokens that a call of a pool stores, and its queries."""

    counts: list[int]  # new tokens of each sequence
    k: Any
    v: Any
    query: Query | None = None
    asked: Any = ()  # queries of each sequence
    usual: bool = False  # may be kept as a step: default counts, no out=, and a storage that prepares steps
    step: Any = None  # a storage's step that was checked with these arrays, and their addresses
    tokens: Any = None  # those of the rows of k, as the caller has them


def query_of(
    storage: Any, given: tuple[Any, ...], options: Options, return_lse: Any, out: Any, q_lengths: Any = None
) -> Query:
    """The queries of a call, checked to lie on the storage's device."""
    check_flag("return_lse", return_lse)
    return Query(given, storage.query(given[0]), options, return_lse, out, q_lengths)


def check_asked(counts: list[int], tokens: list[int]) -> None:
    """Raises unless every query is at a token: those of a sequence end with its last one."""
    for item, (asked, n) in enumerate(zip(counts, tokens, strict=True)):
        if asked > n:
            raise ArgumentError(f"q_lengths: expected at most {n}, the tokens of sequence {item} by now; got {asked}.")


def piece_of(query: Query, before: list[int], after: list[int], written: list[int], ring: Ring) -> Piece:
    """A cache's queries that are not those of its new tokens: of each sequence the last one is at its last token."""
    shape = query.q.shape
    rows = shape[2] if len(shape) == 4 else 0
    if query.lengths is None and not (ring.size or query.options.causal):
        return Piece(slice(0, rows), before, after, None)  # a step that reads, in a microsecond less
    counts = list(item_lengths("q_lengths", query.lengths, len(after), rows, "the queries in q"))
    if query.options.causal:
        check_asked(counts, after)
    for item, (asked, n, w) in enumerate(zip(counts, after, written, strict=True)):
        if asked and ring.lost(n - asked, n, w):
            raise ArgumentError(
                f"q: expected fewer queries; of sequence {item} the window has forgotten what {asked} of them see. "
                "Make a cache of a longer window."
            )
    return Piece(slice(0, rows), before, after, None if counts.count(rows) == len(counts) else counts)


def _turned(name: str, shape: tuple[int, ...], expected: tuple[int | str, ...], axis: int) -> str:
    """A sentence for who gives heads and tokens in each other's place."""
    low, high = sorted((1, axis))
    if len(shape) != len(expected):
        return ""
    turned = list(shape)
    turned[low], turned[high] = shape[high], shape[low]
    if any([n != axis and a != b for n, (a, b) in enumerate(zip(turned, expected, strict=True))]):
        return ""
    return (
        f" Heads come {'after' if axis == 0 else 'before'} tokens: {name}.swapaxes({low}, {high}), and so the others."
    )


def _remade(name: str, shape: tuple[int, ...], expected: tuple[int | str, ...], stored: TokenShape) -> str:
    """Returns a sentence for who gives tokens of other sizes than those that a cache or pool was made for."""
    if len(shape) == 3 and len(expected) == 4:
        if stored.kv_heads == 1 and shape[0] == expected[0]:
            return f" Of one head it is {name}[:, None], and so the others."
        return f" Of one sequence it is {name}[None], and so the others."
    if len(shape) != len(expected):
        return ""
    sizes = ("batch", "kv_heads", "n_new", "head_dim" if name == "k" else "value_dim")
    if len(expected) == 3:
        sizes = ("total new", *sizes[1::2])
    others = [f"{word}={n}" for word, n, one in zip(sizes, shape, expected, strict=True) if one not in (n, word)]
    latent = name == "k" and not stored.latent and shape[-1] == stored.value_dim < stored.head_dim
    instead = ", or with latent=True if these are latents whose rotary parts are v" * latent
    return f" Make it with {' and '.join(others)}{instead}."


def received(storage: Any, x: Any, name: str, expected: tuple[int | str, ...], axis: int) -> Any:
    """New keys or values, of the storage's dtype and the expected shape, whose `axis` is a word for any size."""
    tokens, dtype = storage.received(x, name)
    shape, after = tuple(tokens.shape), axis + 1
    if len(shape) != len(expected) or shape[:axis] != expected[:axis] or shape[after:] != expected[after:]:
        is_packed = len(expected) == 3 != len(shape)
        turned = _turned(name, shape, expected, axis) or _remade(name, shape, expected, storage.shape)
        way = of_packed(name, shape) if is_packed else turned
        if storage.shape.latent and shape[:-1] == (*expected[:axis], *shape[axis:after], *expected[after:-1]):
            way = _way_of_parts(storage.shape)
        raise ArgumentError(f"{name}: expected shape ({', '.join(map(str, expected))}); got {shape}.{way}")
    check_tokens(dtype, name, storage.shape.dtype)
    return tokens


def second_part(stored: TokenShape, k: Any, v: Any) -> Any:
    """Returns what goes behind latents: their rotary parts, or k itself where that has both.

    A step that was prepared for whole keys knows them by v's width, so no other v may have that.
    """
    if v is None:
        return k
    shape = getattr(v, "shape", ())
    if v is k or (shape and shape[-1] == stored.head_dim):
        got = "k itself" if v is k else f"shape {tuple(shape)}"
        raise ArgumentError(
            f"v: expected the rotary part, {stored.rotary_dim} columns, or None where k has both; got {got}. Values "
            f"are the first {stored.value_dim} columns of keys (latent=True): leave v out."
        )
    return v


def _way_of_parts(shape: TokenShape) -> str:
    """Returns a sentence for who gives parts of other widths to a cache of latents."""
    return (
        f" Give latents of {shape.value_dim} columns as k and rotary parts of {shape.rotary_dim} as v, or keys of "
        f"{shape.head_dim} as k alone."
    )


def _received_pair(storage: Any, k: Any, v: Any, sizes: tuple[int | str, ...], axis: int) -> tuple[Any, Any]:
    """Returns new keys and values, or both parts of latents; the joined keys twice where k has both.

    sizes: of all dimensions but the last, as received() has them.
    """
    shape = storage.shape
    if isinstance(k, (tuple, list)) and len(k) == 2 and all([hasattr(x, "shape") for x in k]):
        way = "" if shape.latent else " of a cache that is made with latent=True"
        raise ArgumentTypeError(
            f"k: expected an array; got a {type(k).__name__} of two. A latent and its rotary part are k and v{way}."
        )
    if v is None:
        raise ArgumentTypeError(f"v: expected an array; got None.{MAKE_LATENT}")
    if not shape.latent:
        dims = shape.head_dim, shape.value_dim
    elif v is k:
        joined = received(storage, k, "k", (*sizes, shape.head_dim), axis)
        return joined, joined
    else:
        dims = shape.value_dim, shape.rotary_dim
    first, second = ((*sizes, dim) for dim in dims)
    return received(storage, k, "k", first, axis), received(storage, v, "v", second, axis)


def check_queries(query: Query, n_new: int) -> None:
    """Raises unless there are as many queries as new tokens, or q_lengths= says which there are."""
    shape = query.q.shape
    if len(shape) == 4 and shape[2] != n_new and query.lengths is None:
        raise ArgumentError(
            f"q: expected {n_new} tokens, as k has; got {shape[2]} (shape {shape}). For other queries than the new "
            "tokens give q_lengths=."
        )


def padded_tokens(
    storage: Any, batch: int, k: Any, v: Any, new_lengths: Any, q_lengths: Any
) -> tuple[Any, Any, list[int]]:
    """New keys and values of a cache, checked, and the number of new tokens of each sequence."""
    k, v = _received_pair(storage, k, v, (batch, storage.shape.kv_heads, "n_new"), 2)
    n_new = k.shape[2]
    if v.shape[2] != n_new:
        raise ArgumentError(f"v: expected {n_new} tokens, as k has; got {v.shape[2]} (shape {tuple(v.shape)}).")
    storage.lengths.check_capture({"new_lengths": new_lengths, "q_lengths": q_lengths})
    return k, v, new_counts(new_lengths, batch, n_new)


def packed_queries(k: Any, v: Any, new_lengths: Any, q_lengths: Any, sequences: int, rows: int) -> list[int]:
    """Returns how many of a pool's queries are each sequence's, of a call that stores nothing, too."""
    if (k is None) != (v is None):
        way = MAKE_LATENT * (v is None)
        raise ArgumentError(f"{'k' if k is None else 'v'}: expected k and v together, or neither.{way}")
    if k is None and new_lengths is not None and q_lengths is not None:
        raise ArgumentError("new_lengths: expected None without k and v; q_lengths says whose the queries are.")
    by_new = q_lengths is None and not (k is new_lengths is None)
    name, lengths = ("new_lengths", new_lengths) if by_new else ("q_lengths", q_lengths)
    return packed_counts(name, lengths, sequences, rows)


def packed_tokens(storage: Any, k: Any, v: Any, total: int | None) -> tuple[Any, Any]:
    """New keys and values of a pool, checked; `total`: as many as there are queries, unless these are others."""
    k, v = _received_pair(storage, k, v, ("total new", storage.shape.kv_heads), 0)
    wanted = k.shape[0] if total is None else total
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != wanted:
            way = "" if total is None else " For other queries than the new tokens give q_lengths=."
            raise ArgumentError(f"{name}: expected {wanted} tokens, as q and new_lengths have; got {x.shape[0]}.{way}")
    return k, v
