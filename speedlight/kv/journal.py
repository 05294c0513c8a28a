"""Journal of a pool's pages: which record has them, how many share each, and which are free.

A page changes hands in a run of plain stores and operators, so that neither a signal nor another thread comes between
(see transact()). Nothing is allocated in a run: an allocation may fail, or start the garbage collector.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, NamedTuple

from ..errors import CacheFull


class SequencePages(NamedTuple):
    """Record of a sequence, or of a loan, which has pages alone. It never changes; a change stores another.

    pages: in order. Those past the first `used` are nobody's: the only writer extends the list in place.
    table: the same pages in the storage's own form.
    lengths: tokens of each layer.
    used: number of pages.
    handle: weak reference to the caller's handle; None of a loan.
    """

    pages: list[int]
    table: Any
    lengths: list[int]
    used: int
    handle: Any

    def held(self) -> list[int]:
        """Returns a copy of its pages."""
        return self.pages[: self.used]


def loan_of(pages: list[int]) -> SequencePages:
    """Makes the record of a loan of these pages."""
    return SequencePages(pages, None, [], len(pages), None)


_EMPTY = loan_of([])
_numbers = itertools.count()  # of the records of all pools: none is given twice


class PageJournal:
    """Pages of a pool. Every page is free, or is listed `others[page] + 1` times in records.

    A loan is the record of a call: the pages that it has taken, and once it takes effect those that it gives back.
    `records |= {...}` thus moves pages between sequences and a loan in one store, whose keys are there already.

    records: by number.
    unowned: numbers of loans, and of sequences whose handles nobody has. Whoever needs pages next releases their
        records, if nobody writes to them. When a handle goes, C enters its number: in any thread, at any moment.
    claims: numbers of records that a call in progress writes to.
    others: by page, how often records list it beyond the first time. It has every page, so that `|=` allocates nothing.
    free: pages that no record has; the last one is taken first.
    version: another object after each change of `others` and `free`. A change is computed first; if a signal handler
        has changed something meanwhile, it is computed again. The lock keeps other threads out.
    """

    __slots__ = ("claims", "free", "lock", "others", "records", "unowned", "version")

    def __init__(self, pages: int) -> None:
        self.records: dict[int, SequencePages] = {}
        self.unowned: dict[int, Any] = {}
        self.claims: set[Any] = set()
        self.free = list(range(pages - 1, -1, -1))
        self.others = dict.fromkeys(self.free, 0)
        self.version = object()
        self.lock = threading.RLock()

    def next_number(self) -> int:
        """Returns a number for a new record."""
        return next(_numbers)

    def lend(self, mine: set[Any]) -> int:
        """Enters an empty loan of a call that has claimed `mine`, the number among them; returns the number.

        The pages of a loan are released once the call has released its claims.
        """
        self.release_unowned()
        claims, unowned, records, number = self.claims, self.unowned, self.records, self.next_number()
        added = {number}
        mine |= added
        claims |= added
        unowned[number] = None
        records[number] = _EMPTY
        return number

    def take(self, loan: int, count: int, wherefore: str) -> list[int]:
        """Moves so many free pages to a loan; raises CacheFull, and moves none, if there are fewer."""
        free, records = self.free, self.records
        with self.lock:
            while True:
                self.release_unowned()
                seen, left = self.version, len(free)
                if count > left:
                    way = "free() or truncate() sequences, or make" if left < len(self.others) else "Make"
                    raise CacheFull(
                        f"{wherefore}: {count} pages are needed, {left} of {len(self.others)} are free. "
                        f"{way} a pool of more pages.",
                        count,
                        left,
                    )
                last = slice(left - count, left)
                taken = free[last][::-1]
                record, version = loan_of(taken), object()
                if self.version is seen:
                    del free[last]
                    records[loan] = record
                    self.version = version
                    return taken

    def share(self, number: int, record: SequencePages) -> None:
        """Stores the record of a fork in place of its loan: each page is in one more record."""
        others, records = self.others, self.records
        with self.lock:
            while True:
                seen, version = self.version, object()
                raised = {page: others[page] + 1 for page in record.held()}
                if self.version is seen:
                    others |= raised
                    records[number] = record
                    self.version = version
                    return

    def release_unowned(self) -> None:
        """Releases the records of deleted handles and of calls that have ended."""
        if self.unowned:
            for number in list(self.unowned):
                if number not in self.claims:
                    self._release(number)

    def _release(self, number: int) -> None:
        """Removes an unowned record: each page is in one record less, and free if it was in no other."""
        others, free, records, unowned = self.others, self.free, self.records, self.unowned
        with self.lock:
            while number in unowned:
                seen, version = self.version, object()
                pages = records.get(number, _EMPTY).held()
                lowered: dict[int, int] = {}
                freed = []
                for page in reversed(pages):  # a loan has a page twice if two sequences left it
                    count = lowered.get(page, others[page])
                    if count:
                        lowered[page] = count - 1
                    else:
                        freed.append(page)
                if self.version is seen:
                    free += freed
                    others |= lowered
                    if number in records:
                        del records[number]
                    del unowned[number]
                    self.version = version

    def after_fork(self) -> None:
        """In the child: the calls of the parent's other threads have ended."""
        self.claims.clear()
        self.lock = threading.RLock()
