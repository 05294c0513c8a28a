"""Sharing of pages between sequences: which pages are copied before a write, and the writer's record afterwards."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

from .journal import SequencePages

new_tuple = tuple.__new__  # new_tuple(SequencePages, (…)): in half the time of SequencePages(…)


class Appended(NamedTuple):
    """Sequences after an append to a layer, if none needs other pages.

    starts, totals: of each its tokens in the layer, before and after.
    fits: whether none needs any, as nearly always: each one's new tokens go to one page that it has, and has alone.
    """

    starts: list[int]
    totals: list[int]
    after: list[SequencePages]
    fits: bool


def lengths_after(
    before: list[SequencePages], layer: int, counts: list[int], page_size: int, others: dict[int, int]
) -> Appended:
    """Returns sequences with the lengths that they have once `counts` new tokens of each are stored in a layer."""
    starts, totals, after, fits = [], [], [], True
    for record, n in zip(before, counts, strict=True):
        pages, table, lengths, used, handle, tokens = record
        start = lengths[layer]
        total, at = start + n, start // page_size
        if n and (total > (at + 1) * page_size or at >= used or others[pages[at]]):
            fits = False
        lengths = lengths[:]
        lengths[layer] = total
        starts.append(start)
        totals.append(total)
        after.append(new_tuple(SequencePages, (pages, table, lengths, used, handle, tokens)))
    return new_tuple(Appended, (starts, totals, after, fits))


def shared_pages(
    before: list[SequencePages], starts: list[int], totals: list[int], page_size: int, others: dict[int, int]
) -> list[tuple[int, int]]:
    """Returns shared pages that would be written to, as (index of the sequence, index of its page).

    starts, totals: of each sequence the first token that is written, and one past the last. others: of each page the
    references beyond the first. The last sequence that shares a page writes in place, unless one that leaves has tokens
    there: a failing call must not change those.
    """
    three = zip(before, starts, totals, strict=True)
    ends = [x.pages[start // page_size : min(x.used, -(-total // page_size))] for x, start, total in three]
    if not any([others[page] for pages in ends for page in pages]):
        return []  # as nearly always
    left: Counter[int] = Counter()
    away: dict[int, int] = {}  # of a page: tokens of the longest sequence that leaves it for a copy
    shared = []
    for index, (record, start, total) in enumerate(zip(before, starts, totals, strict=True)):
        for at in range(start // page_size, min(record.used, -(-total // page_size))):
            page = record.pages[at]
            if others[page] > left[page] or away.get(page, 0) > start:
                left[page] += 1
                away[page] = max(away.get(page, 0), start)
                shared.append((index, at))
    return shared


def with_pages(
    storage: Any, before: list[SequencePages], fresh: list[int], copies: list[tuple[int, int]], taken: list[int]
) -> tuple[list[SequencePages], list[int]]:
    """Copies on write: returns each sequence with its fresh pages, and with copies of the shared pages that it writes
    to; and the pages that were replaced.
    """
    left, longer, replaced = iter(taken), [], []
    for index, (record, n) in enumerate(zip(before, fresh, strict=True)):
        moved = [at for owner, at in copies if owner == index] if copies else []
        if not moved and not n:
            longer.append(record)
            continue
        pages, used = record.pages, record.used
        if moved:  # in another list: others may be reading this one
            pages = record.held()
        for at in moved:
            old, new = pages[at], next(left)
            storage.copy_page(new, old)
            replaced.append(old)
            pages[at] = new
        pages[used:] = itertools.islice(left, n)
        table = storage.extended(record.table, pages, used, moved)
        longer.append(record._replace(pages=pages, table=table, used=len(pages)))
    return longer, replaced
