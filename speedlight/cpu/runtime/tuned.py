"""The tuning in force: what ships for this CPU's family, and what `speedlight tune` measured here in its place.

That is kept beside the kernels, for this model of CPU, vector unit and version of the sources, and read as they are:
from a file that only this user could have written, which is whole. Every number is held against its limits.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, FileError, shown, warn_once
from ...host.forks import importing
from ...host.machine import Isa, cpu_identity, host_arch
from ...host.shortcuts import setting
from ...host.tunings import LIMITS, Parts, Tuning, shipped
from .kept_files import cache_directory, digest_of, keep, read_kept, sum_of

_MAGIC = b"speedlight tuning 1\n"
_HEADER = len(_MAGIC) + 32  # then sha256 of the file's name and the rest, which is JSON
_known: dict[str, Tuning | None] = {}  # of vector units, by name: read once in a process, when a first call is prepared
_changes: tuple[Callable[[Tuning], Tuning], ...] = ()


def tuning_of(isa: Isa) -> Tuning:
    """Returns the tuning of a vector unit. It stays the same while a process runs, so memos of what was
    prepared need no key for it; who uses changed() sees to them.
    """
    try:
        found = _known[isa.name]
    except KeyError:
        found = _known[isa.name] = _measured(isa)
    found = found or shipped(isa)
    for change in _changes:
        found = change(found)
    return found


@contextlib.contextmanager
def changed(change: Callable[[Tuning], Tuning]) -> Iterator[None]:
    """Changes the tuning of every vector unit for what is prepared meanwhile, on any thread: to measure
    it, or to test.
    """
    global _changes
    before, _changes = _changes, (*_changes, change)
    try:
        yield
    finally:
        _changes = before


def parts_of(tuning: Tuning, base: Tuning) -> Parts:
    """The fields that may be tuned and differ from another's."""
    found: Parts = {}
    for name, limits in LIMITS.items():
        now, before = asdict(tuning.part(name)), asdict(base.part(name))
        if part := {x: now[x] for x in limits if now[x] != before[x]}:
            found[name] = part
    return found


def _measured(isa: Isa) -> Tuning | None:
    """Returns the kept tuning, unless SPEEDLIGHT_TUNING turns it off."""
    wanted = setting("SPEEDLIGHT_TUNING")
    if wanted not in ("", "0", "1"):
        raise ArgumentError(
            f"SPEEDLIGHT_TUNING: expected 0 (schedules as they ship) or 1 (as `speedlight tune` found them); got "
            f"{shown(wanted)}."
        )
    return None if wanted == "0" else kept_tuning(isa)


def kept_tuning(isa: Isa) -> Tuning | None:
    """Returns the tuning measured on this machine, if its file is whole and of these sources; else None."""
    path = tuning_path(isa)
    data = read_kept(path) if path else None
    if path is None or data is None:
        return None
    body = data[_HEADER:]
    if data[:_HEADER] != _MAGIC + sum_of(path, body):
        _warn(path, "is damaged")
        return None
    with importing:
        import json  # which a first call has no other need of

    try:
        row = json.loads(body)
        if [row[name] for name in ("cpu", "isa", "sources")] != [cpu_identity(), isa.name, _sources()]:
            return None  # of another CPU, or another version
        date = datetime.date.fromisoformat(row["date"]).isoformat()
        return shipped(isa).with_parts(_checked(row["parts"], shipped(isa)), date=date)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _warn(path, f"is not what `speedlight tune` writes ({error})")
        return None


def _checked(parts: Any, tuning: Tuning) -> Parts:
    """The fields of a file, if they are such as may be tuned, of the right types and within their limits."""
    found: Parts = {}
    for name, given in parts.items():
        limits = LIMITS[name]
        now = tuning.part(name)
        found[name] = {x: _within(value, getattr(now, x), limits[x], f"{name}.{x}") for x, value in given.items()}
    return found


def _within(value: Any, now: Any, limits: tuple[float, float], name: str) -> Any:
    """A field's value, as its record has it; `now`: what ships."""
    each, kinds = (value, now) if isinstance(now, tuple) else ([value], [now])
    low, high = limits
    if [type(x) for x in each] != [type(x) for x in kinds] or not all([low <= x <= high for x in each]):
        raise ValueError(f"{name}: {shown(value)}")
    return tuple(value) if isinstance(now, tuple) else value


def keep_tuning(isa: Isa, parts: Parts) -> Path | None:
    """Keeps what was measured; where, or None if nothing is kept here. Processes that start then follow it."""
    with importing:
        import json

    path = tuning_path(isa)
    if path is None:
        return None
    row = {
        "cpu": cpu_identity(), "isa": isa.name, "sources": _sources(), "date": datetime.date.today().isoformat(),
        "parts": parts,
    }  # fmt: skip
    _checked(json.loads(json.dumps(parts)), shipped(isa))
    body = json.dumps(row).encode()
    data = _MAGIC + sum_of(path, body) + body
    keep(path, data)
    _known.clear()
    return path if read_kept(path) == data else None


def forget_tuning(isa: Isa) -> bool:
    """Deletes the kept tuning, and returns whether there was one. Other files stay."""
    path = tuning_path(isa)
    if path is None or read_kept(path) is None:
        return False
    try:
        path.unlink(missing_ok=True)  # another process may have been first
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}. Delete it, or set SPEEDLIGHT_TUNING=0.") from error
    _known.clear()
    return True


def tuning_path(isa: Isa) -> Path | None:
    """One file for each model of CPU and vector unit; none for units of other machines."""
    directory = cache_directory() if isa.arch == host_arch() else None
    name = f"tuning_{isa.name}_{hashlib.sha256(cpu_identity().encode()).hexdigest()[:12]}"
    return directory and directory / name


@functools.cache
def _sources() -> str:
    """Returns a hash of the sources that are tuned: the engine, and the tables that ship."""
    return digest_of(Path(__file__).parents[2], ("cpu", "host")).hex()


def _warn(path: Path, what: str) -> None:
    warn_once(
        "tuning",
        f"{path} {what}; schedules are as they ship. Run `speedlight tune` again, or `speedlight tune --reset`.",
    )
