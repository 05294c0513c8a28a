"""Handle of a sequence in a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from ..arrays.integers import integer
from ..errors import ArgumentTypeError, not_pickled
from ..problem.options import Ints
from ..problem.signatures import public, refuse_unknown
from .keeping import keep_in_pages


class PagedSequence:
    """Handle of a sequence in a PagePool, which ends with free(), with a `with` block, or when Python deletes it.

    Its pages are free then, except those that a fork still holds.

    >>> import numpy as np, speedlight as sl
    >>> pool = sl.PagePool(layers=1, pages=4, page_size=16, kv_heads=1, head_dim=8)
    >>> a, x = pool.sequence(), np.ones((20, 1, 8), np.float32)
    >>> pool.append(0, [a], x, x); a, a.length(), len(a.pages)
    (PagedSequence(20 tokens, 2 pages), 20, 2)
    >>> with a.fork() as b:
    ...     pool.append(0, [b], x, x)
    ...     pool.free_pages
    0
    >>> pool.free_pages
    2
    """

    __slots__ = ("__weakref__", "_number", "pool")

    def __init__(self, pool: Any, number: Any = None) -> None:
        if number is None:
            raise ArgumentTypeError("number: expected a pool's own; got None. Sequences come from pool.sequence().")
        self.pool, self._number = pool, number

    def __repr__(self) -> str:
        record = self.pool._journal.records.get(self._number)
        content = "freed" if record is None else f"{max(record.lengths)} tokens, {record.used} pages"
        return f"PagedSequence({content})"

    def __enter__(self) -> PagedSequence:
        self.pool._of(self, "PagedSequence")
        return self

    def __exit__(self, *_: Any) -> None:
        """Frees it, unless that was done inside."""
        if self._number in self.pool._journal.records:
            self.free()

    def length(self, layer: int = 0) -> int:
        """Tokens of a layer."""
        return self.pool._of(self, "PagedSequence").lengths[self.pool._layer(layer)]

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages that it holds, in order."""
        return tuple(self.pool._of(self, "PagedSequence").held())

    @property
    def tokens(self) -> list[int]:
        """Tokens that calls gave with its keys and values, from the first one on."""
        tokens = self.pool._of(self, "PagedSequence").tokens
        return [] if tokens is None else tokens.numbers()

    @property
    def extra(self) -> Any:
        """Key that it was made with."""
        tokens = self.pool._of(self, "PagedSequence").tokens
        return None if tokens is None else tokens.extra

    def fork(self) -> PagedSequence:
        """Makes another sequence of the same tokens. Pages are shared until one of the two writes to them."""
        return self.pool._fork(self)

    def __copy__(self) -> PagedSequence:
        return self.fork()

    def __deepcopy__(self, memo: Any) -> PagedSequence:
        return self.fork()

    __reduce__: Any = not_pickled("PagedSequence", "its tokens are its pool's: fork() it, or save keys() and values()")

    def truncate(self, length: int) -> None:
        """Forgets the tokens past `length` in every layer; pages that hold no others are returned."""
        self.pool._truncate(self, integer("length", length))

    @public(has_frame=False)
    def keep(self, indices: Any, *, start: int, tokens: Ints | None = None, **theirs: NoReturn) -> None:
        """Keeps the tokens at these indices from `start` on, and drops the others, in every layer.

        As KVCache.keep() does it; pages that hold no tokens then are returned. `tokens`: those that are kept, one int
        for each index. A tree is appended without tokens=, since no prompt has its order.

        Raises:
            CacheFull: pages are shared with a fork, and too few are free for copies of those that change.
            CacheBusy: another thread writes to it.
            speedlight.Error: the argument, what was expected and what came.

        After any exception the sequence is as it was.

        >>> import numpy as np, speedlight as sl
        >>> pool = sl.PagePool(layers=1, pages=4, page_size=16, kv_heads=1, head_dim=8)
        >>> a, x = pool.sequence(), np.ones((20, 1, 8), np.float32)
        >>> pool.append(0, [a], x, x)
        >>> pool.append(0, [a], x[:7], x[:7], new_lengths=[7])  # a tree of seven guesses
        >>> a.keep([0, 2, 5], start=20); a.length()  # of which a path of three is right
        23
        """
        refuse_unknown(PagedSequence.keep, theirs)
        keep_in_pages(self.pool, self, indices, start, tokens)

    def free(self) -> None:
        """Returns its pages to the pool. The handle cannot be used afterwards."""
        self.pool._free(self)

    def save(self, path: str | Path) -> None:
        """Writes its tokens to a .safetensors file, which KVCache.load() reads as a cache of one sequence: its keys and
        values go on in a pool by append(), or the cache attends by itself, with the same bits.

        >>> import numpy as np, pathlib, tempfile, speedlight as sl
        >>> pool = sl.PagePool(layers=1, pages=4, page_size=16, kv_heads=1, head_dim=8)
        >>> a, x = pool.sequence(), np.ones((20, 1, 8), np.float32)
        >>> pool.append(0, [a], x, x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     a.save(pathlib.Path(folder, "prompt.safetensors"))
        ...     sl.KVCache.load(pathlib.Path(folder, "prompt.safetensors")).lengths(0)
        (20,)
        """
        self.pool._save(self, path)

    def keys(self, layer: int) -> Any:
        """Copy of a layer's keys, (kv_heads, length, head_dim). Of codes, codes · scales in float32."""
        return self.pool._tokens(self, layer, "keys")

    def values(self, layer: int) -> Any:
        """Copy of a layer's values, (kv_heads, length, value_dim)."""
        return self.pool._tokens(self, layer, "values")
