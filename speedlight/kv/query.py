"""A call of a cache or pool: its arguments, its run on the storage, its results."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays import Array
from ..checks import check_flag, check_tokens
from ..errors import ArgumentError
from ..problem import Options
from ..results import Results
from ..tokens import Piece


class Query(NamedTuple):
    """The queries of a call, and how they attend."""

    given: Any  # q as the caller has it
    q: Array
    options: Options
    return_lse: bool
    out: Any  # the caller's own array, or None


def query_of(storage: Any, q: Any, options: Options, return_lse: Any, out: Any) -> Query:
    """The queries of a call, checked to lie on the storage's device."""
    check_flag("return_lse", return_lse)
    return Query(q, storage.query(q), options, return_lse, out)


def results_of(query: Query, value_dim: int, lse_shape: tuple[int, ...]) -> Results:
    """New arrays, or the caller's own where it can be written."""
    q, options = query.q, query.options
    staged = not (options.mask is options.score is None)  # a lookup may turn out, while kernels run, to be out of range
    shape = (*q.shape[:-1], value_dim)
    return Results(q, shape, lse_shape if query.return_lse else None, query.out, (q,), staged)


def received(storage: Any, x: Any, name: str, expected: tuple[int | str, ...], axis: int) -> Any:
    """New keys or values, of the storage's dtype and the expected shape, whose `axis` is a word for any size."""
    tokens, dtype = storage.received(x, name)
    shape, after = tuple(tokens.shape), axis + 1
    if len(shape) != len(expected) or shape[:axis] != expected[:axis] or shape[after:] != expected[after:]:
        raise ArgumentError(f"{name}: expected shape ({', '.join(map(str, expected))}); got {shape}.")
    check_tokens(dtype, name, storage.shape.dtype)
    return tokens


def attended(storage: Any, layer: int, query: Query, pieces: list[Piece], k: Any, v: Any) -> Any:
    """Stores a cache's new tokens, if any, and computes what the queries see.

    A chunk too long for a window's ring comes in pieces: each attends before the next overwrites what it sees.
    Everything is checked before anything is stored.
    """
    first = pieces[0]
    if len(pieces) == 1 and first.counts is query.out is None:
        step = storage.step(query.given, k, v, first.after, query.options)
        if step is not None:
            if k is not None:
                storage.put(layer, first.before, first.new, k, v)
            return step.run(layer, query.given, first.after, query.return_lse, query.options.seed_word())
    results = results_of(query, storage.shape.value_dim, query.q.shape[:-1])
    calls = [storage.prepare(query.q, x, query.options, results.out.strides) for x in pieces]
    for piece, call in zip(pieces, calls, strict=True):
        if k is not None:
            storage.put(layer, piece.before, piece.new, k[:, :, piece.rows], v[:, :, piece.rows])
        storage.attend(layer, call, query.q, piece, results)
    return results.returned()
