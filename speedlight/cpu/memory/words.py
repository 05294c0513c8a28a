"""The words of records in memory, as kernels read them."""

from __future__ import annotations

from ..language.vector import I64, Function, Value
from .records import Record


class Words:
    """The words of a record in memory, by name: `words.k_row` loads one."""

    __slots__ = ("_at", "_k", "_record")

    def __init__(self, k: Function, record: Record, at: Value) -> None:
        self._k, self._record, self._at = k, record, at

    def __getattr__(self, name: str) -> Value:
        return self._k.load(I64, self._at, self._record.offset(name), align=8)


class Constants(Words):
    """Words that nothing changes while a task runs: LLVM loads each once, whatever is stored in between."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Value:
        found = super().__getattr__(name)
        found.x.set_metadata("invariant.load", self._k.module.ir.add_metadata([]))
        return found
