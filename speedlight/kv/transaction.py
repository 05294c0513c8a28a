"""Transactions on a cache or pool: one writer at a time, and all of a change or nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from operator import setitem
from typing import Any

from ..problem.storage import Overwritten


def transact(owner: Any, mine: set[Any], change: Callable[[], Any], undo: Overwritten | None = None) -> Any:
    """Returns change(), which alone writes to `mine` (layers, or numbers of records); if it fails, rolls it back.

    undo: change() enters what it is about to overwrite. mine: change() may claim more, as PageJournal.lend() does.

    Signals come, and other threads run, where functions begin, where calls of C return and where loops jump back: not
    within a run of plain stores, operators and returns. Claims are made and released in such runs, and change() ends
    in one, which begins with the store that makes it take effect. The rollback is one operator, which runs C alone.
    """
    claims, claimed, key = owner._claims, False, id(undo)
    rollback = starmap(setitem, undo) if undo is not None else ()
    try:
        if claims & mine:
            raise owner._busy(claims & mine)
        claims |= mine
        claimed = True
        if undo is not None:
            owner._undo[key] = undo
        return change()
    except BaseException:
        _ = [*rollback]
        raise
    finally:
        if claimed:
            if undo is not None and key in owner._undo:
                del owner._undo[key]
            claims -= mine


def put_back(undo: Overwritten) -> None:
    """Restores what was overwritten."""
    _ = [*starmap(setitem, undo)]
