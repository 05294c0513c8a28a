"""Sharing of pages between sequences: which pages are copied before a write, and what the writer holds afterwards."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple


class Held(NamedTuple):
    """A sequence's tokens. Never changed: an append makes another.

    pages: in order.
    table: the same in the storage's own form, which an append may extend in place.
    lengths: tokens of each layer.
    """

    pages: list[int]
    table: Any
    lengths: list[int]


new_tuple = tuple.__new__  # new_tuple(Held, (…)): in half the time of Held(…)


class Appended(NamedTuple):
    """Sequences after an append to a layer, if none needs other pages.

    starts, totals: of each its tokens in the layer, before and after.
    fits: whether none needs any, as nearly always: each one's new tokens go to one page that it has, and has alone.
    """

    starts: list[int]
    totals: list[int]
    after: list[Held]
    fits: bool


def lengths_after(before: list[Held], layer: int, counts: list[int], page_size: int, others: list[int]) -> Appended:
    """Returns sequences with the lengths that they have once `counts` new tokens of each are stored in a layer."""
    starts, totals, after, fits = [], [], [], True
    for held, n in zip(before, counts, strict=True):
        pages, table, lengths = held
        start = lengths[layer]
        total, at = start + n, start // page_size
        if n and (total > (at + 1) * page_size or at >= len(pages) or others[pages[at]]):
            fits = False
        lengths = lengths[:]
        lengths[layer] = total
        starts.append(start)
        totals.append(total)
        after.append(new_tuple(Held, (pages, table, lengths)))
    return new_tuple(Appended, (starts, totals, after, fits))


def shared_pages(
    before: list[Held], starts: list[int], totals: list[int], page_size: int, others: list[int]
) -> list[tuple[int, int]]:
    """Returns shared pages that would be written to, as (index of the sequence, index of its page).

    starts, totals: of each sequence the first token that is written, and one past the last. others: of each page the
    references beyond the first. The last sequence that shares a page writes in place, unless one that leaves has tokens
    there: a failing call must not change those.
    """
    three = zip(before, starts, totals, strict=True)
    ends = [held.pages[start // page_size : -(-total // page_size)] for held, start, total in three]
    if not any([others[page] for pages in ends for page in pages]):
        return []  # as nearly always
    left: Counter[int] = Counter()
    away: dict[int, int] = {}  # of a page: tokens of the longest sequence that leaves it for a copy
    shared = []
    for index, (held, start, total) in enumerate(zip(before, starts, totals, strict=True)):
        for at in range(start // page_size, min(len(held.pages), -(-total // page_size))):
            page = held.pages[at]
            if others[page] > left[page] or away.get(page, 0) > start:
                left[page] += 1
                away[page] = max(away.get(page, 0), start)
                shared.append((index, at))
    return shared


def with_pages(
    storage: Any, before: list[Held], fresh: list[int], copies: list[tuple[int, int]], taken: list[int]
) -> tuple[list[Held], list[int]]:
    """Copies on write: returns each sequence with its fresh pages, and with copies of the shared pages that it writes
    to; and the pages that were replaced.
    """
    left, longer, replaced = iter(taken), [], []
    for index, (held, n) in enumerate(zip(before, fresh, strict=True)):
        moved = [at for owner, at in copies if owner == index] if copies else []
        if not moved and not n:
            longer.append(held)
            continue
        pages = held.pages[:]
        for at in moved:
            old, new = pages[at], next(left)
            storage.copy_page(new, old)
            replaced.append(old)
            pages[at] = new
        pages += itertools.islice(left, n)
        longer.append(Held(pages, storage.extended(held.table, pages, len(held.pages), moved), held.lengths))
    return longer, replaced
