"""Journal of a pool's pages: which record has them, how many share each, which are free, and which can be found.

A page changes hands in a run of plain stores and operators, so that neither a signal nor another thread comes between
(see transact()). Nothing is allocated in a run: an allocation may fail, or start the garbage collector.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import CacheFull
from ..problem.storage import Overwritten
from .prefixes import PageTokens, SequenceTokens, is_same_prefix


class SequencePages(NamedTuple):
    """Record of a sequence, or of a loan, which has pages alone. It never changes; a change stores another.

    pages: in order. Those past the first `used` are nobody's: the only writer extends the list in place.
    table: the same pages in the storage's own form.
    lengths: tokens of each layer.
    used: number of pages.
    handle: weak reference to the caller's handle; None of a loan.
    tokens: those that calls gave; None if none did.
    """

    pages: list[int]
    table: Any
    lengths: list[int]
    used: int
    handle: Any
    tokens: SequenceTokens | None

    def held(self) -> list[int]:
        """Returns a copy of its pages."""
        return self.pages[: self.used]


def loan_of(pages: list[int]) -> SequencePages:
    """Makes the record of a loan of these pages."""
    return SequencePages(pages, None, [], len(pages), None, None)


_EMPTY = loan_of([])
_numbers = itertools.count()  # of the records of all pools: none is given twice


class PageJournal:
    """Pages of a pool. Every page is free, or is listed `others[page] + 1` times in records.

    The index has pages whose tokens are known: full, and written in all layers. An indexed page that no record lists
    any more is *kept*: it is found until take() needs its room. A page is indexed only while every record that lists
    it has all its tokens. Whoever writes to it, or shortens a sequence within it, withdraws it first.

    A loan is the record of a call: the pages that it has taken, and once it takes effect those that it gives back.
    `records |= {...}` thus moves pages between sequences and a loan in one store, whose keys are there already.

    records: by number.
    unowned: numbers of loans, and of sequences whose handles nobody has. Whoever needs pages next releases their
        records, if nobody writes to them. When a handle goes, C enters its number: in any thread, at any moment.
    claims: numbers of records that a call in progress writes to.
    others: by page, how often records list it beyond the first time; -1 of a kept page, 0 of a free one. It has every
        page, so that `|=` allocates nothing.
    free: pages that no record has, except kept ones; the last one is taken first.
    kept: number of kept pages.
    contents: by page, the tokens of an indexed one, else None. It has every page, too.
    places: pages by digest. A hint: `contents` decides whether the page is still there.
    last_use: pages in the order of their last release, every kept one among them.
    has_tokens: whether any call gave tokens: without them a step costs no more than in a pool without an index.
    generation: another object after each forget(). Pages of an earlier one are not found.
    lookups, hits, tokens_reused: counts for statistics().
    version: another object after each change of `others` and `free`, and after pages have left the index. A change is
        computed first; if a signal handler has changed something meanwhile, it is computed again. The lock keeps other
        threads out.
    """

    __slots__ = (
        "claims",
        "contents",
        "free",
        "generation",
        "has_tokens",
        "hits",
        "kept",
        "last_use",
        "lock",
        "lookups",
        "others",
        "places",
        "records",
        "tokens_reused",
        "unowned",
        "version",
    )

    def __init__(self, pages: int) -> None:
        self.records: dict[int, SequencePages] = {}
        self.unowned: dict[int, Any] = {}
        self.claims: set[Any] = set()
        self.free = list(range(pages - 1, -1, -1))
        self.others = dict.fromkeys(self.free, 0)
        self.kept = 0
        self.contents: dict[int, PageTokens | None] = dict.fromkeys(self.free)
        self.places: dict[bytes, int] = {}
        self.last_use: OrderedDict[int, None] = OrderedDict()
        self.generation = object()
        self.has_tokens = False
        self.lookups = 0
        self.hits = 0
        self.tokens_reused = 0
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

    def count_free(self) -> int:
        """Returns how many pages can be taken."""
        self.release_unowned()
        return len(self.free) + self.kept

    def take(self, loan: int, count: int, wherefore: str) -> list[int]:
        """Moves so many free pages to a loan; raises CacheFull, and moves none, if there are fewer.

        Kept pages are moved where the others do not suffice, least recently used first.
        """
        free, records, others, contents = self.free, self.records, self.others, self.contents
        with self.lock:
            while True:
                self.release_unowned()
                seen, left = self.version, len(free)
                if count > left + self.kept:
                    left += self.kept
                    way = "free() or truncate() sequences, or make" if left < len(others) else "Make"
                    raise CacheFull(
                        f"{wherefore}: {count} pages are needed, {left} of {len(others)} are free. "
                        f"{way} a pool of more pages.",
                        count,
                        left,
                    )
                oldest = self._oldest(count - left) if count > left else []
                last = slice(left - count + len(oldest), left)
                taken = free[last][::-1] + oldest
                record, version = loan_of(taken), object()
                emptied, zeros, kept = dict.fromkeys(oldest), dict.fromkeys(oldest, 0), self.kept - len(oldest)
                if self.version is seen:
                    del free[last]
                    records[loan] = record
                    others |= zeros
                    contents |= emptied
                    self.kept = kept
                    self.version = version
                    return taken

    def _oldest(self, count: int) -> list[int]:
        """Returns so many kept pages, of which there are enough, least recently used first."""
        others, looked = self.others, count
        while True:
            first = list(itertools.islice(self.last_use, looked))
            found = [page for page in first if others[page] < 0]
            if len(found) < len(first):
                self._tidy(first)
            if len(found) >= count or len(first) < looked:
                return found[:count]
            looked += count

    def _tidy(self, pages: list[int]) -> None:
        """Removes pages that are not kept from those in the order of their last release."""
        # a release that a signal handler has interrupted may be about to keep one of them
        self.version = object()
        for page in pages:
            if self.others[page] >= 0:
                self.last_use.pop(page, None)

    def share(self, number: int, make: Callable[[], SequencePages]) -> SequencePages:
        """Stores a record in place of its loan: each of its pages is in one more record. Returns the record.

        make: returns it. It is called with the lock, and again if anything changed meanwhile.
        """
        others, records = self.others, self.records
        with self.lock:
            while True:
                seen, version = self.version, object()
                record = make()
                raised = {page: others[page] + 1 for page in record.held()}
                kept = self.kept - [*raised.values()].count(0)
                if self.version is seen:
                    others |= raised
                    records[number] = record
                    self.kept = kept
                    self.version = version
                    return record

    def release_unowned(self) -> None:
        """Releases the records of deleted handles and of calls that have ended."""
        if self.unowned:
            for number in list(self.unowned):
                if number not in self.claims:
                    self._release(number)

    def _release(self, number: int) -> None:
        """Removes an unowned record: each page is in one record less, and free or kept if it was in no other."""
        others, free, records, unowned = self.others, self.free, self.records, self.unowned
        contents = self.contents
        with self.lock:
            while number in unowned:
                seen, version = self.version, object()
                pages = records.get(number, _EMPTY).held()
                lowered: dict[int, int] = {}
                emptied: dict[int, None] = {}
                freed, kept = [], self.kept
                for page in reversed(pages):  # a loan has a page twice if two sequences left it
                    count = lowered.get(page, others[page])
                    if count:
                        lowered[page] = count - 1
                    elif contents[page] is None:
                        freed.append(page)
                    elif self._is_found(page):
                        lowered[page] = -1
                        kept += 1
                        self.last_use[page] = None
                        self.last_use.move_to_end(page)
                    else:
                        freed.append(page)
                        emptied[page] = None
                if self.version is seen:
                    free += freed
                    others |= lowered
                    contents |= emptied
                    self.kept = kept
                    if number in records:
                        del records[number]
                    del unowned[number]
                    self.version = version

    # --- the index

    def _place_of(self, digest: bytes) -> int | None:
        """Returns the page that a digest finds."""
        page = self.places.get(digest)
        tokens = None if page is None else self.contents[page]
        is_there = tokens is not None and tokens.digest == digest and tokens.generation is self.generation
        return page if is_there else None

    def _is_found(self, page: int) -> bool:
        """Returns whether its digest finds this page, and not another with the same tokens."""
        tokens = self.contents[page]
        return tokens is not None and self._place_of(tokens.digest) == page

    def find(self, wanted: list[PageTokens]) -> tuple[list[int], list[PageTokens]]:
        """Returns the indexed pages of the longest prefix of `wanted`, and their tokens."""
        pages: list[int] = []
        found: list[PageTokens] = []
        known = set[int]()  # pages of the prefix, of whichever sequence
        for tokens in wanted:
            page = self._place_of(tokens.digest)
            there = None if page is None else self.contents[page]
            before = found[-1] if found else tokens.parent
            if page is None or there is None or there.tokens != tokens.tokens:
                break
            if not is_same_prefix(there.parent, before, known):
                break
            pages.append(page)
            found.append(there)
            known.add(id(there))
        return pages, found

    def offer(
        self, record: SequencePages, count_harmless: Callable[[int], int], found: dict[int, PageTokens | None]
    ) -> SequencePages:
        """Adds to `found` the pages of a record that a call fills, unless others have the same tokens already.

        The call stores `found` in `contents` with its records. Returns the record that has offered them.

        count_harmless: returns how many other records may list a page, since they leave it or have all its tokens.
        """
        tokens = record.tokens
        if tokens is None or tokens.last.depth <= tokens.offered:
            return record
        full = min(min(record.lengths) // tokens.page_size, tokens.last.depth)
        if full <= tokens.offered or tokens.last.generation is not self.generation:
            return record
        others, places = self.others, self.places
        for at, filled in enumerate(tokens.pages(tokens.offered, full), tokens.offered):
            page, place = record.pages[at], places.get(filled.digest)
            # one of those who share it may write to it
            if others[page] > count_harmless(page):
                continue
            if place not in found and self._place_of(filled.digest) is None:
                places[filled.digest] = page
                found[page] = filled
        if len(places) > 2 * len(others):  # most of them are of pages that have left
            self.places = {x.digest: page for page, x in list(self.contents.items()) if x is not None}
        return record._replace(tokens=tokens._replace(offered=full))

    def withdraw(self, pages: list[int], undo: Overwritten) -> None:
        """Takes pages out of the index, before their only writer changes them or shortens its sequence within them."""
        contents = self.contents
        before = [(contents, page, contents[page]) for page in pages if contents[page] is not None]
        if before:
            emptied, version = {page: None for _, page, _ in before}, object()
            undo += before
            contents |= emptied
            self.version = version

    def forget(self) -> None:
        """Empties the index; kept pages are free then. Sequences that are there enter no pages any more."""
        free, others, contents = self.free, self.others, self.contents
        while True:  # without the lock, which a signal could interrupt as it is released, when all is forgotten
            seen, version, generation = self.version, object(), object()
            kept = [page for page, count in others.items() if count < 0]
            zeros, emptied = dict.fromkeys(kept, 0), dict.fromkeys(others)
            places, last_use = {}, OrderedDict()
            if self.version is seen:
                free += kept
                others |= zeros
                contents |= emptied
                self.kept = 0
                self.places = places
                self.last_use = last_use
                self.generation = generation
                self.version = version
                return

    def after_fork(self) -> None:
        """In the child: the calls of the parent's other threads have ended."""
        self.claims.clear()
        self.lock = threading.RLock()
