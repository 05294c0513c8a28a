"""Transactions on a cache or pool: one writer at a time, and all of a change or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def transact(
    owner: Any,
    mine: set[Any],
    change: Callable[[], Any],
    undo: dict[int, Any] | None = None,
    taken: list[int] | None = None,
) -> Any:
    """Returns change(), which alone writes to `mine` (layers, or numbers of sequences); if it fails, rolls it back.

    undo: by layer what the storage puts back on failure, entered by change() before it overwrites anything. taken:
    pages that change() takes, which are dropped on failure.

    Signals come, and other threads run, where functions begin, where calls of C return and where loops jump back: not
    within a run of plain stores, operators and returns. Claims are made and released in such runs, and change() ends
    in one, which begins with the store that makes it take effect.
    """
    claims, claimed, key = owner._claims, False, id(undo)
    try:
        if claims & mine:
            raise owner._busy(claims & mine)
        claims |= mine
        claimed = True
        if undo is not None:
            owner._undo[key] = undo
        return change()
    except BaseException:
        if undo:
            try:
                owner._storage.put_back(undo)
            except BaseException:  # another signal came meanwhile: once more
                try:
                    owner._storage.put_back(undo)
                except BaseException:
                    owner._storage.put_back(undo)
        if taken:
            owner._dropped += [taken]
        raise
    finally:
        if claimed:
            if undo is not None and key in owner._undo:
                del owner._undo[key]
            claims -= mine
