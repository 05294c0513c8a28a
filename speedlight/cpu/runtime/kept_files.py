"""Files that are kept from process to process: object code of kernels, and what was tuned here.

Nothing is read from a directory or file that others could have written; any failure warns once, and whoever asked goes
on without.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Collection
from pathlib import Path

from ...errors import ArgumentError, pass_on, shown, warn_once


def cache_directory() -> Path | None:
    """Returns the directory of kept files, or None without a cache (SPEEDLIGHT_CACHE=0, or no home directory)."""
    kept = os.environ.get("SPEEDLIGHT_CACHE", "")
    if kept not in ("", "0", "1"):
        raise ArgumentError(f"SPEEDLIGHT_CACHE: expected 0 (keep no kernels) or 1 (keep them); got {shown(kept)}.")
    if kept == "0":
        return None
    named = os.environ.get("SPEEDLIGHT_CACHE_DIR")
    if named:
        return Path(named)
    try:
        return _users_directory()
    except RuntimeError:
        return None


def _users_directory() -> Path:
    """Returns this user's directory for caches on this system."""
    if sys.platform == "darwin" or sys.platform == "win32":
        from platformdirs import user_cache_path

        return user_cache_path("speedlight", appauthor=False)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "speedlight"


def read_kept(path: Path) -> bytes | None:
    """Returns a kept file's content; None unless there is one that only this user could have written."""
    try:
        check_directory(path.parent)
        return read_content(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        pass_on(error, OSError)
        _warn("cannot be read", error)
        return None


def read_content(path: Path, size: int = 1 << 26) -> bytes:  # far more than a kernel has
    """Returns bytes of a regular file that only this user can write. Others are not even opened: a pipe would block."""
    _check_file(path, os.lstat(path))
    with open(path, "rb") as f:
        _check_file(path, info := os.fstat(f.fileno()))
        return f.read(min(size, info.st_size))


def check_directory(directory: Path) -> None:
    """Raises PermissionError unless it is a directory that only this user can write to."""
    info = os.lstat(directory)
    if not stat.S_ISDIR(info.st_mode):
        raise PermissionError(f"{directory} is not a directory (a symbolic link is not followed)")
    if not _trusted(info):
        raise PermissionError(f"{directory} belongs to, or can be written by, somebody else")


def _check_file(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise PermissionError(f"{path.name} is not a file (a symbolic link is not followed)")
    if not _trusted(info):
        raise PermissionError(f"{path.name} belongs to, or can be written by, somebody else")


def _trusted(info: os.stat_result) -> bool:
    """Returns whether this user owns it, and nobody else can write to it."""
    return not hasattr(os, "geteuid") or (info.st_uid == os.geteuid() and not info.st_mode & 0o022)


def keep(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name, then renames it: a reader sees all of it or none.

    The temporary file is removed whatever happens.
    """
    temporary = path.parent / f".new-{os.getpid()}-{os.urandom(8).hex()}"
    try:
        _make_directory(path.parent)
        check_directory(path.parent)
        with open(temporary, "xb") as f:
            if hasattr(os, "fchmod"):
                os.fchmod(f.fileno(), 0o600)
            f.write(data)
        os.replace(temporary, path)
    except OSError as error:
        pass_on(error, OSError)
        _warn("cannot be written", error)
    finally:
        try:  # noqa: SIM105 - no Python is called before it, so no signal comes before it
            os.unlink(temporary)
        except OSError:
            pass


def _make_directory(directory: Path) -> None:
    """Makes a directory and its missing parents, for this user alone whatever the umask; changes none that exists."""
    if not directory.exists():
        _make_directory(directory.parent)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)


def sum_of(path: Path, content: bytes) -> bytes:
    """Returns a hash of a kept file's name and its content."""
    return hashlib.sha256(path.name.encode() + b"\n" + content).digest()


def digest_of(package: Path, rooms: Collection[str]) -> bytes:
    """Returns a hash of every source in these folders of the package: changed code never meets an old object.

    Every first call and plan waits for it, some 3 ms: pathlib would take twice as long.
    """
    total = hashlib.sha256()
    for name, path in sorted(x for room in rooms for x in _python_files(f"{package}/{room}", f"{room}/")):
        with open(path, "rb", buffering=0) as f:
            source = f.read()
        total.update(f"{name} {len(source)}\n".encode() + source)
    return total.digest()


def _python_files(folder: str, within: str = "") -> list[tuple[str, str]]:
    """Lists the Python files below a folder, as (name, path); the names begin with `within`."""
    found: list[tuple[str, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                found.append((within + entry.name, entry.path))
            elif entry.name != "__pycache__" and entry.is_dir():
                found += _python_files(entry.path, f"{within}{entry.name}/")
    return found


def _warn(what: str, error: object) -> None:
    warn_once(
        "cache",
        f"the kernel cache {what} ({error}); kernels are compiled in each process. Set SPEEDLIGHT_CACHE_DIR to a "
        "directory of your own, or SPEEDLIGHT_CACHE=0.",
    )
