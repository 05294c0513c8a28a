"""Runs calls on a storage: piece by piece, from prepared calls, and for packed sequences."""

from __future__ import annotations

from typing import Any

from ..arrays.array import describe
from ..problem.options import Options
from ..problem.results import Results
from ..problem.tokens import Batch, Piece
from .query import Packed, Query, packed_tokens, query_of
from .transaction import transact


def attend_pieces(storage: Any, layer: int, query: Query, pieces: list[Piece], k: Any, v: Any) -> Any:
    """Stores a cache's new tokens, if any, and computes what the queries see.

    A chunk too long for a window's ring comes in pieces: each attends before the next overwrites what it sees.
    Everything is checked before anything is stored.
    """
    first = pieces[0]
    if storage.prepares_steps and len(pieces) == 1 and first.counts is query.out is None:
        q, options = query.given[0], query.options
        step = storage.step(q, query.q, first.after, options)
        if step is not None:
            if query.lengths is None:  # only then a repeated step is known to be right by its shapes
                storage.remember(step, query.given, query.q, k, v, options)
            if k is not None:
                storage.put(layer, first.before, first.new, k, v)
            return step.run(
                q, query.q.place, return_lse=query.return_lse, seed=options.seed_word(), lengths=first.after,
                store=storage.addresses[layer],
            )  # fmt: skip
    results = results_of(query, storage.shape.value_dim, query.q.shape[:-1], k, v)
    if len(pieces) > 1 and _are_all_new(storage, query, pieces):
        storage.attend_new(query.q, k, v, query.options, results)
        storage.put(layer, first.before, pieces[-1].after, k, v)  # of empty sequences
        return results.returned()
    calls = [storage.prepare(query.q, x, query.options, results.out.strides) for x in pieces]
    for piece, call in zip(pieces, calls, strict=True):
        if k is not None:
            part = (k, v) if len(pieces) == 1 else (k[:, :, piece.rows], v[:, :, piece.rows])
            storage.put(layer, piece.before, piece.new, *part)
        storage.attend(layer, call, query.q, piece, results)
    return results.returned()


def _are_all_new(storage: Any, query: Query, pieces: list[Piece]) -> bool:
    """Returns whether all that queries see, through a ring's window, is in the caller's arrays."""
    if not storage.attends_new or any(pieces[0].before):
        return False
    return all([piece.counts is None for piece in pieces])


def repeat(cache: Any, layer: int, arrays: tuple[Any, ...], options: Options, return_lse: Any) -> Any:
    """Repeats a prepared step of a cache. Returns None if no such step was prepared, or it would need a check.

    arrays: q, or q, k and v, or k and v, which are only stored.
    """
    storage = cache._storage
    if not storage.prepares_steps or type(return_lse) is not bool:
        return None
    if len(arrays) == 1:
        found = storage.repeat_step(layer, arrays, options, return_lse, cache._held[layer][0])
        return None if found is None else found[0]

    def change() -> Any:
        lengths, written = cache._held[layer]
        found = storage.repeat_step(layer, arrays, options, return_lse, lengths)
        if found is None:
            return None
        result, totals = found
        after = totals, cache._ring.reached(written, totals) if cache._ring.size else totals
        cache._held[layer] = after
        return result

    return transact(cache, {layer}, change)


def run_packed(storage: Any, layer: int, batch: Batch, packed: Packed) -> Any:
    """Stores a pool's new tokens, if any, and computes what the queries see."""
    query = packed.query
    if packed.step is not None:
        step, places = packed.step
        lists, store = [x.address for x in batch.tables], storage.addresses[layer]
        if query is None:
            step.store(places, batch.before, store, lists)
            return None
        if step.fits(batch.after):
            step = storage.together(step, batch)
            return step.run(
                query.given[0], places, return_lse=query.return_lse, seed=query.options.seed_word(),
                lengths=batch.after, lists=lists, store=store,
            )  # fmt: skip
        query, k, v = _anew(storage, query)
        packed = packed._replace(k=k, v=v)
    if packed.k is not None:
        storage.put(layer, batch, packed.k, packed.v)
    if query is None:
        return None
    if packed.asked is not packed.counts:
        batch = batch._replace(counts=packed.asked)
    if packed.usual:
        storage.remember(query.given, query.q, packed.k, packed.v, batch, query.options)
    q = query.q
    results = results_of(query, storage.shape.value_dim, (q.shape[1], q.shape[0]), packed.k, packed.v)
    storage.attend(layer, q, batch, query.options, results)
    return results.returned()


def _anew(storage: Any, query: Query) -> tuple[Query, Any, Any]:
    """Reads a step's arrays as the first time, for other lengths than it was prepared for."""
    given = query.given
    query = query_of(storage, given, query.options, query.return_lse, None)
    k, v = (None, None) if len(given) == 1 else packed_tokens(storage, given[1], given[2], query.q.shape[0])
    return query, k, v


def results_of(query: Query, value_dim: int, lse_shape: tuple[int, ...], k: Any, v: Any) -> Results:
    """Makes new arrays, or checks that the caller's own can be written: apart from q, and from new tokens, of which a
    later piece may still be to be stored.
    """
    q, options, inputs = query.q, query.options, [query.q]
    if query.out is not None and k is not None:
        inputs += [describe(x, name, gpu=True) for x, name in ((k, "k"), (v, "v"))]
    # a lookup may turn out, while kernels run, to be out of range, or be in what they write
    staged = not (options.mask is options.score is None)
    shape = (*q.shape[:-1], value_dim)
    return Results(q, shape, lse_shape if query.return_lse else None, query.out, tuple(inputs), staged)
