"""Checks of pages and of block tables, which list the pages of a sequence in order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.array import is_masked, listed, short_list
from ..arrays.dlpack import has
from ..arrays.memory import Array
from ..arrays.torch_tensors import check_plain_tensor, has_bytes, is_tensor
from ..errors import ArgumentError, ArgumentTypeError, pass_on
from .checks import item_lengths

_SHORT = 256  # bytes of a block table that is read number by number, if it has one row


def check_pages(k: Array, v: Array) -> None:
    """Raises unless keys and values in pages have shapes that go together."""
    if len(k.shape) != 4 or min(k.shape[1:]) < 1:
        raise ArgumentError(
            f"k_pages: expected shape (pages, page_size, kv_heads, head_dim); got {k.shape}.{_of_both(k.shape)}"
        )
    if len(v.shape) != 4 or v.shape[:3] != k.shape[:3] or v.shape[3] < 1:
        raise ArgumentError(
            f"v_pages: expected shape ({', '.join(map(str, k.shape[:3]))}, value_dim), as k_pages has; got {v.shape}."
        )


def _of_both(shape: tuple[int, ...]) -> str:
    """Returns a sentence for who has no dimension of heads, or keys and values in one, as vLLM and FlashInfer do."""
    if len(shape) == 3:
        return " Of one head it is k_pages[:, :, None]."
    if len(shape) != 5 or 2 not in shape[:2]:
        return ""
    key, value = (f"kv_cache[{':, ' * shape.index(2)}{i}]" for i in range(2))
    return f" Of keys and values in one array write {key} and {value}."


def page_numbers(pages: int) -> str:
    """Returns the page numbers that there are, for messages."""
    return f"pages from 0 to {pages - 1}" if pages else "no page, since there are none"


def block_table_of(x: Any) -> np.ndarray:
    """A copy of a (batch, most pages) table that may say anything."""
    return _block_table(x).astype(np.int64)


def _plain_ints(x: Any) -> np.ndarray | None:
    """Returns an array over the memory of a contiguous CPU tensor of ints, as check_plain_tensor() would find it; None
    of anything else, which that function refuses by name.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(x) is not torch.Tensor:
        return None
    try:
        seen = x.numpy()  # refuses what is elsewhere, sparse, nested, or not yet negated
        enough = has_bytes(x, seen.nbytes)
    except (RuntimeError, TypeError):  # a wrapper of torch.func, too
        return None
    return seen if enough and seen.dtype.kind == "i" and seen.flags.c_contiguous else None


def _block_table(x: Any) -> np.ndarray:
    """(batch, most pages) of ints, of any kind and byte order; perhaps the caller's memory."""
    seen: Any = _plain_ints(x)
    seen = x if seen is None else seen
    if type(seen) is np.ndarray and seen.ndim == 2 and seen.dtype.kind in "iu":
        return seen
    if is_tensor(x):
        check_plain_tensor(x, "block_table")
    elif isinstance(x, Sequence):  # of rows, whose lengths are looked at before NumPy copies them
        what = "ints of shape (batch, most pages)"
        x = listed(x, "block_table", what)
        if not (x and isinstance(x[0], int)):  # a row alone is told below
            x = [row if has(row, "block_table", "shape") else listed(row, "block_table", what) for row in x]
    try:
        table = np.array(x.detach().cpu().numpy() if is_tensor(x) else x)
    except Exception as error:  # ragged lists, other libraries' code
        pass_on(error)
        lengths = {len(row) for row in x if isinstance(row, list)} if isinstance(x, list) else ()
        if len(lengths) > 1:
            raise ArgumentTypeError(
                f"block_table: expected an array of ints, rows of one length; got rows of {min(lengths)} to "
                f"{max(lengths)}. Fill short rows up, by -1."
            ) from None
        raise ArgumentTypeError(f"block_table: expected an array of ints; got {type(x).__name__} ({error}).") from error
    if is_masked(x) or table.ndim != 2 or (table.size and table.dtype.kind not in "iu"):
        of_what = f" of {table.dtype}, shape {table.shape}" if table.ndim or has(x, "block_table", "dtype") else ""
        raise ArgumentTypeError(
            f"block_table: expected ints of shape (batch, most pages); got {type(x).__name__}{of_what}.{_way(table)}"
        )
    return table


def _way(table: np.ndarray) -> str:
    """A sentence for who gives a table that is nearly one."""
    if table.ndim == 1 and table.dtype.kind in "iu":
        return " Of one sequence write [block_table]."
    return " Try numpy.asarray(block_table, int)." if table.ndim == 2 and table.dtype.kind == "f" else ""


def page_lists(
    block_table: Any, k_lengths: Any, pages: int, page_size: int, slack: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """The columns in use of a block table that may say anything, copied with `slack` more, then checked as far as they
    are used; and the lengths.
    """
    rows = short_list(block_table, 2, _SHORT)
    if rows is not None and len(rows) == 1:  # NumPy takes twice as long
        lengths = page_lengths(k_lengths, 1, len(rows[0]) * page_size)
        used_pages = rows[0][: -(-lengths[0] // page_size)]
        if used_pages and min(used_pages) >= 0 and max(used_pages) < pages:
            return np.array([used_pages + [0] * slack], np.int64), lengths
    table = _block_table(block_table)
    lengths = page_lengths(k_lengths, len(table), table.shape[1] * page_size)
    used = -(-max(lengths, default=0) // page_size)
    numbers = np.zeros((len(table), used + slack), np.int64)
    numbers[:, :used] = table[:, :used]
    if np.count_nonzero(numbers.view(np.uint64) >= pages):  # or negative: past a sequence's length they may be
        _check_used(numbers, table, lengths, pages, page_size)
    return numbers, lengths


def page_lengths(k_lengths: Any, batch: int, most: int) -> tuple[int, ...]:
    """Keys of every sequence. Pages do not say how many of their tokens there are."""
    if k_lengths is None:
        raise ArgumentTypeError(f"k_lengths: expected {batch} lengths, one per row of block_table; got None.")
    return item_lengths("k_lengths", k_lengths, batch, most, "the tokens that a row of block_table has pages for")


def _check_used(numbers: np.ndarray, table: np.ndarray, lengths: tuple[int, ...], pages: int, page_size: int) -> None:
    """`table`: the same as it was given, for the message."""
    used = np.array(lengths, np.int64).reshape(-1, 1) > np.arange(numbers.shape[1]) * page_size
    if not np.count_nonzero((numbers.view(np.uint64) >= pages) & used):
        return
    for item, n in enumerate(lengths):
        used = numbers[item, : -(-n // page_size)]
        if used.size and (used.min() < 0 or used.max() >= pages):
            at = int(np.argmax((used < 0) | (used >= pages)))
            raise ArgumentError(
                f"block_table: expected {page_numbers(pages)}; got {table[item, at]} at [{item}, {at}]."
            )
