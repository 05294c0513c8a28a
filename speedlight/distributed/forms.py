"""Forms of calls: text that is equal on processes that make the same call."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.array import listed
from ..arrays.integers import is_one
from ..arrays.torch_tensors import is_tensor
from ..expressions.tables import Table, check_dense
from ..expressions.tracing import Expression
from ..problem.options import BY_HEAD, DEFAULTS, OPTION_NAMES, Options, scores_of

_LISTS = (*BY_HEAD, "q_start", "cu_seqlens_q", "cu_seqlens_k", "q_lengths", "k_lengths")
_COMPARED = 1 << 16  # bytes of an array whose entries are compared, too


def form_of(options: Options, more: dict[str, str]) -> dict[str, str]:
    """Every option that is not its default, by name; of large arrays shapes and dtypes alone."""
    found = dict(more)
    for name in OPTION_NAMES:
        x = getattr(options, name)
        if x is not None and x is not DEFAULTS[name]:
            found[name] = _value(name, x)
    return found


def entries_of(counts: Sequence[int], **given: Any) -> dict[str, str]:
    """Returns, for (batch, heads, tokens, dim) that every process has, a digest of its tokens, of up to 64 KiB."""
    return {f"entries of {name}": _used(x, counts) for name, x in given.items() if x.nbytes <= _COMPARED}


def _used(x: Any, counts: Sequence[int]) -> str:
    used = [x] if all([n == x.shape[2] for n in counts]) else [one[:, :n] for one, n in zip(x, counts, strict=True)]
    return _digest(b"".join(map(_bytes, used)))


def _bytes(x: Any) -> bytes:
    if is_tensor(x):
        x = x.detach().cpu().contiguous().flatten().view(sys.modules["torch"].uint8).numpy()
    return x.tobytes()


def _value(name: str, x: Any) -> str:
    if name in ("mask", "score"):  # a function is an expression by now
        each = [_expressed(y) if isinstance(y, Expression) else _entries(_table(y, name)) for y in _each(name, x)]
        return ", ".join(each)
    if is_tensor(x) and x.requires_grad:
        return f"a tensor that requires grad: {_value(name, x.detach())}"
    if name in _LISTS and not is_one(x):
        values = listed(x, name, "numbers")
        return repr(values) if len(values) <= 16 else f"{len(values)} numbers ({_digest(repr(values).encode())})"
    return repr(x)


def _expressed(x: Expression) -> str:
    numbers = repr([n.value for n in x.numbers])
    return f"{x!r} ({_digest((x.key + numbers).encode())}) {' '.join(map(_entries, x.tables))}".strip()


def _each(name: str, x: Any) -> list[Any]:
    return scores_of(x) if name == "score" else [x]


def tables_in(options: Options) -> list[Table]:
    """Returns the tables that masks and scores look up; dense ones are tables, too."""
    given = [(x, name) for name in ("mask", "score") for x in _each(name, getattr(options, name)) if x is not None]
    each = [x.tables if isinstance(x, Expression) else (_table(x, name),) for x, name in given]
    return [table for tables in each for table in tables]


def _table(x: Any, name: str) -> Table:
    check_dense(name, x)
    return x if isinstance(x, Table) else Table(x, name, copy=False)


def _entries(table: Table) -> str:
    array = table.array
    text = f"{array.dtype} {array.shape}{'' if table.is_left_alone() else ' that requires grad'}"
    text += "" if table.tensor is None else " on a GPU"
    if array.nbytes > _COMPARED:
        return text
    return f"{text} {_digest(np.ascontiguousarray(table.host()).tobytes())}"


def _digest(x: bytes) -> str:
    return hashlib.blake2b(x, digest_size=8).hexdigest()
