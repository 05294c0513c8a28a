"""A sharded cache in files: one of each rank, which is a speedlight.KVCache's, and words on whose the tokens are."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..arrays.files import read_metadata
from ..errors import FileError, pass_on
from ..kv import saving as saved
from ..kv.cache import KVCache
from . import placement


class Content(NamedTuple):
    """What a rank's file holds."""

    local: KVCache
    capacity: int
    piece: int
    placed: list[list[placement.Placement]]


class Written(NamedTuple):
    """A rank's file, which is written aside before it takes its name; the stamp: of all that are written together."""

    path: Path
    rank: int
    ranks: int
    stamp: int

    @property
    def _name(self) -> Path:
        return _file_of(self.path, self.rank, self.ranks)

    @property
    def _aside(self) -> Path:
        return self._name.with_name(f".{self._name.stem}-{self.stamp:x}.safetensors")

    def write(self, content: Content) -> None:
        if self._name.is_dir():
            raise FileError(f"{self._name}: expected a file's name; got a folder's.")
        words = {"rank": self.rank, "ranks": self.ranks, "stamp": self.stamp, "whole": content.capacity}
        words |= {"piece": content.piece, "placed": placement.as_words(content.placed)}
        content.local._save(self._aside, {name: str(x) for name, x in words.items()})

    def rename(self) -> None:
        try:
            os.replace(self._aside, self._name)
        except OSError as error:
            pass_on(error, OSError)
            raise FileError(f"{self._name}: {error.strerror or error}.") from error

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Takes its name where an interrupt comes between, too: the others take theirs."""
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.replace(self._aside, self._name)

    @contextlib.contextmanager
    def discarding(self) -> Iterator[None]:
        """Leaves nothing that was written aside and not renamed."""
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._aside.unlink(missing_ok=True)


def read(path: Path, rank: int, ranks: int, device: Any) -> tuple[Content, str]:
    """What a rank wrote, and the stamp."""
    where = _existing(path, rank, ranks)
    words = read_metadata(where)
    local = saved.opened(where, lambda **sizes: KVCache(**sizes, device=device))
    try:
        placed = placement.from_words(words["placed"], int(words["ranks"]))
        own = [[x.counts[rank] for x in layer] for layer in placed]
        if int(words["ranks"]) != ranks or own != [lengths for lengths, _ in local._held]:
            raise ValueError("tokens of another file")
        return Content(local, int(words["whole"]), int(words["piece"]), placed), words["stamp"]
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise FileError(f"{where}: expected a file that save() of a sharded cache wrote ({error}).") from None


def _file_of(path: Path, rank: int, ranks: int) -> Path:
    return path.with_name(f"{path.stem}.{rank}-of-{ranks}{path.suffix}")


def _existing(path: Path, rank: int, ranks: int) -> Path:
    """A rank's file, or an error that says of how many there are."""
    where = _file_of(path, rank, ranks)
    if where.exists():
        return where
    own = re.compile(rf"{re.escape(path.stem)}\.\d+-of-(\d+)")
    if path.exists():
        words = read_metadata(path)
        if "ranks" not in words:
            raise FileError(
                f"{path}: expected the name that save() of a cache over ranks was given; got a whole cache. "
                f"speedlight.KVCache.load({path.name!r}) reads it."
            )
        raise FileError(f"{path} {saved.part_of(path, words)}.")
    others = sorted({int(x[1]) for x in map(own.fullmatch, [x.stem for x in path.parent.glob("*.safetensors")]) if x})
    if others:
        raise FileError(
            f"{path}: expected files of {ranks} ranks, as this group has; got those of {others[0]}. Load it in a group "
            f"of {others[0]} ranks, as many as saved it."
        )
    raise FileError(f"{where}: no such file. Every rank reads the one that it saved.")
