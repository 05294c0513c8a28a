"""truncate() and keep(): which tokens of a sequence stay, which of them move, and the change itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays.array import listed
from ..arrays.integers import integer, is_one
from ..errors import ArgumentError, ArgumentTypeError, shown
from ..problem.checks import shorter_lengths
from ..problem.storage import Overwritten
from ..problem.tokens import Moves
from ..problem.windows import Ring
from .prefixes import kept_tokens
from .transaction import transact

Lengths = tuple[list[int], list[int]]  # of each sequence: its tokens, and one past the highest position written


class Left(NamedTuple):
    """Lengths of the sequences, in every layer, and the moves that come before."""

    lengths: list[int]
    moves: Moves = Moves([], [], [], [])


def truncated(length: Any, held: list[Lengths], ring: Ring) -> Left:
    """Returns what truncate() leaves of a cache."""
    return Left(
        shorter_lengths(
            length,
            [lengths for lengths, _ in held],
            lambda item, n: any([ring.lost(n, n, written[item]) for _, written in held]),
        )
    )


def kept(indices: Any, start: Any, held: list[Lengths], ring: Ring) -> Left:
    """Returns what keep() leaves of a cache."""
    starts, paths = paths_of(indices, start, [lengths for lengths, _ in held])
    lengths, moves = [], Moves([], [], [], [])
    for item, (first, path) in enumerate(zip(starts, paths, strict=True)):
        n = first + len(path)
        lengths.append(n)
        sources = [(first + at, first + to) for to, at in enumerate(path) if at != to]
        for _, written in held:
            if ring.lost(n, n, written[item]) or any([ring.forgotten(at, written[item]) for at, _ in sources]):
                raise ArgumentError(
                    f"start: expected tokens that are still there; of sequence {item} the window has forgotten some "
                    f"that are kept, or that token {n} would see. Speculate fewer tokens, or make a cache of a longer "
                    "window."
                )
        for at, to in sources:
            for x, place in zip(moves, (item, ring.slot(at), item, ring.slot(to)), strict=True):
                x.append(place)
    return Left(lengths, moves)


def paths_of(indices: Any, start: Any, lengths: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Checks keep()'s arguments for a batch: returns of every sequence the first token, and those that stay.

    lengths: of each layer.
    """
    batch = len(lengths[0])
    starts, paths = _starts(start, batch), _paths(indices, batch)
    for item, (first, path) in enumerate(zip(starts, paths, strict=True)):
        _check_path(path, first, min(each[item] for each in lengths), f" of sequence {item}")
    return starts, paths


def path_of(indices: Any, start: Any, least: int) -> tuple[int, list[int]]:
    """Checks keep()'s arguments for one sequence, which has `least` tokens or more in every layer."""
    (first,), (path,) = _starts(start, 1), _paths(indices, 1)
    _check_path(path, first, least, "")
    return first, path


def _starts(start: Any, batch: int) -> list[int]:
    """Checks `start`: of every sequence the tokens before the speculated ones."""
    what = "an int" if batch == 1 else f"one int, or {batch} (one per sequence)"
    if is_one(start):
        return [integer("start", start)] * batch
    starts = [integer("start", n) for n in listed(start, "start", what)]
    if len(starts) != batch:
        raise ArgumentError(f"start: expected {what}; got {len(starts)}.")
    return starts


def _paths(indices: Any, batch: int) -> list[list[int]]:
    """Checks `indices`: of every sequence those that are kept, from one list for all, or one for each."""
    what = "ints" + f", or a list of them for each of {batch} sequences" * (batch > 1)
    given = listed(indices, "indices", what)
    if not any([hasattr(x, "__len__") and not is_one(x) and not isinstance(x, np.generic) for x in given]):
        return [[_index(n) for n in given]] * batch
    if len(given) != batch:
        raise ArgumentError(f"indices: expected {what}; got {len(given)} lists.")
    return [[_index(n) for n in listed(x, "indices", what)] for x in given]


def _index(n: Any) -> int:
    if isinstance(n, (bool, np.bool_)):
        raise ArgumentTypeError(
            "indices: expected ints, those of the tokens that are kept; got bool. Of an array that says which are, "
            "they are numpy.flatnonzero(accepted)."
        )
    return integer("indices", n)


def _check_path(path: list[int], start: int, least: int, whose: str) -> None:
    """Raises unless there are such tokens, in order."""
    if not 0 <= start <= least:
        raise ArgumentError(f"start: expected 0 to {least}, the tokens{whose} in every layer; got {shown(start)}.")
    for before, at in zip([-1, *path], path, strict=False):
        if at <= before:
            raise ArgumentError(f"indices: expected ints from 0 on that rise; got {shown(at)} after {before}{whose}.")
    if path and start + path[-1] >= least:
        raise ArgumentError(
            f"indices: expected less than {least - start}, the tokens{whose} from start={start} on in every layer; "
            f"got {shown(path[-1])}."
        )


# --- the changes


def shorten(cache: Any, find_left: Callable[[], Left], name: str) -> None:
    """Makes a cache what find_left() returns: truncate(), keep() and clear(), by whose argument it is named."""
    storage = cache._storage
    undo: Overwritten = []

    def change() -> None:
        lengths, moves = find_left()
        storage.before_change(min([*lengths, *moves.to_slot]), name)
        after = [(lengths, cache._ring.shortened(old, lengths)) for _, old in cache._held]
        for layer, (old, _) in enumerate(cache._held):
            undo.extend(storage.before_moves(layer, old, moves))
        for layer in range(cache.layers if moves.to_slot else 0):
            storage.move(layer, moves)
        storage.lengths.set([lengths] * cache.layers)
        cache._held = after

    transact(cache, set(range(cache.layers)), change, undo)


def keep_in_pages(pool: Any, sequence: Any, indices: Any, start: Any, tokens: Any) -> None:
    """Keeps tokens of a sequence: they move within its pages, or in copies of shared ones."""
    number, size, storage, mine = sequence._number, pool.page_size, pool._storage, {sequence._number}
    undo: Overwritten = []

    def change() -> None:
        journal, old = pool._journal, pool._of(sequence, "PagedSequence")
        records = journal.records
        first, path = path_of(indices, start, min(old.lengths))
        length, moved = first + len(path), [(first + at, first + to) for to, at in enumerate(path) if at != to]
        if tokens is not None:
            journal.has_tokens = True
        known = kept_tokens(old.tokens, first, path, tokens, size, journal.generation)
        new, returned = old, {}
        journal.withdraw(old.pages[(moved[0][1] if moved else length) // size : -(-length // size)], undo)
        if moved:
            copies = pool._shared([old], [moved[0][1]], [length])
            if copies:
                (new,), returned = pool._with_pages("keep", [old], [0], copies, mine)
            places = [(new.pages[at // size], at % size, new.pages[to // size], to % size) for at, to in moved]
            moves = Moves(*map(list, zip(*places, strict=True)))
            overwritten: Overwritten = []
            for layer in range(pool.layers):
                overwritten.extend(storage.before_moves(layer, [], moves))
            # first of all, since what is withdrawn is found again once it is as it was
            undo[:0] = overwritten
            for layer in range(pool.layers):
                storage.move(layer, moves)
        after = pool._shortened(number, new._replace(tokens=known), length, mine) | returned
        records |= after

    transact(pool, mine, change, undo)
