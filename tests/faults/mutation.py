"""A fault: what becomes what in a file of the package, and which tests should see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in a file of speedlight/; `tests`: arguments of pytest, of the room's own tests."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def apply(self, tree: Path) -> None:
        path = tree / "speedlight" / self.file
        path.write_text(self.mutated(path.read_text()))

    def mutated(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: expected once in {self.file}, found {text.count(self.old)} times: {self.old!r}"
            )
        return text.replace(self.old, self.new)
