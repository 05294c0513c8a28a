"""Arrays in files: safetensors, .npz and .npy. Sizes are checked before anything is allocated; nothing is unpickled."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import uuid
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..errors import Error, FileError, UnsupportedError, pass_on
from ..host.forks import importing
from .dtypes import CODES, numpy_dtype

_UNPACKED = 64 << 20  # bytes that a compressed file may hold whatever its size
_RATIO = 32  # … and beyond them for each of its own
_SAFETENSORS = {"F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16", "I32": "int32",
                "I64": "int64", "U8": "uint8",
                **{row.safetensors: name for name, row in CODES.items() if row.safetensors}}  # fmt: skip
_NAMES = {name: word for word, name in _SAFETENSORS.items()}


def read_arrays(paths: list[Path]) -> dict[str, np.ndarray]:
    """All arrays of one .safetensors or .npz file, or one from each .npy file, named by the file."""
    found: dict[str, np.ndarray] = {}
    for path in paths:
        try:
            match path.suffix:
                case ".safetensors":
                    found |= _read_safetensors(path)
                case ".npz":
                    found |= _read_npz(path)
                case ".npy":
                    with path.open("rb") as f:
                        found[path.stem] = _read_npy(f, path.stat().st_size, path.name)
                case _:
                    raise FileError(f"{path}: expected a .safetensors, .npz or .npy file.")
        except Exception as error:  # whatever a damaged file makes a parser say
            raise _file_error(path, error) from error
    return found


def _file_error(path: Path, error: Exception) -> FileError:
    """Returns what an error says of a file; raises ours again, and what says nothing of it."""
    if isinstance(error, Error):
        raise error
    if isinstance(error, OSError):
        pass_on(error, OSError)
        why = str(error.strerror or error).removesuffix(f": {path}")
        return FileError(f"{path}: {why}.")
    pass_on(error, Exception)
    return FileError(f"{path}: damaged, or not what its name says ({error}).")


def _safetensors() -> Any:
    """The package, which is imported when a file is read or written."""
    try:
        with importing:
            import safetensors.numpy
    except ImportError as error:
        raise UnsupportedError(
            f"safetensors: expected the package that reads and writes .safetensors files; it cannot be imported "
            f"({error}). Install the package safetensors."
        ) from error
    return safetensors


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    return {name: x.copy() for name, x in map_arrays(path).arrays.items()}


class MappedFile(NamedTuple):
    """A .safetensors file that is mapped into memory: its words, its arrays, which are views, and its bytes."""

    words: dict[str, str]
    arrays: dict[str, np.ndarray]
    size: int


def map_arrays(path: Path) -> MappedFile:
    """Maps a .safetensors file. Its arrays are read where they are touched, and cannot be written to.

    The package checks the header first. Offsets are checked again here, since another file may take the name meanwhile.
    """
    package = _safetensors()
    try:
        with package.safe_open(path, "np"):
            pass
        with path.open("rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        first = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:first])
        words = header.pop("__metadata__", None) or {}
        arrays = {}
        for name, row in header.items():
            kind = _SAFETENSORS.get(row["dtype"])
            if kind is not None:
                dtype, shape, (begin, end) = numpy_dtype(kind), row["shape"], row["data_offsets"]
                count = math.prod(shape)
                if begin < 0 or end - begin != count * dtype.itemsize or first + end > len(data):
                    raise FileError(f"{path}: damaged; {name} of shape {shape} is not where its header says.")
                x = np.frombuffer(data, dtype, count, first + begin).reshape(shape)
                arrays[name] = x if x.flags.aligned else x.copy()
        return MappedFile(words, arrays, len(data))
    except Exception as error:  # whatever a damaged file makes a parser say
        raise _file_error(path, error) from error


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    found = {}
    with zipfile.ZipFile(path) as archive:
        promised, room = sum(x.file_size for x in archive.infolist()), path.stat().st_size
        if promised > max(_UNPACKED, _RATIO * room):
            raise FileError(
                f"{path}: {room:,} bytes promise {promised:,}; expected up to {_RATIO} times the file, or "
                f"{_UNPACKED:,}. "
                "Save it with numpy.savez, which does not compress."
            )
        for member in archive.infolist():
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise FileError(
                    f"{path}: expected members that NumPy writes; got a compression of type {member.compress_type}."
                )
            if member.filename.endswith(".npy"):
                with archive.open(member) as f:
                    found[member.filename[:-4]] = _read_npy(f, member.file_size, member.filename)
    return found


def _read_npy(f: Any, size: int, name: str) -> np.ndarray:
    """An .npy stream of `size` bytes.

    NumPy multiplies shapes in wrapping integers and allocates first: we check first.
    """
    version = np.lib.format.read_magic(f)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(f)
    if dtype.hasobject:
        raise FileError(f"{name}: holds Python objects, which are never loaded. Save plain numbers.")
    count = 1
    for n in shape:
        count *= int(n)
    if count < 0 or f.tell() + count * dtype.itemsize != size:
        raise FileError(
            f"{name}: its header promises {count * dtype.itemsize:,} bytes of data; the file does not hold just those."
        )
    data = f.read(count * dtype.itemsize)
    if dtype.kind == "V" and dtype.itemsize == 2:  # how NumPy writes bfloat16
        dtype = numpy_dtype("bfloat16")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the words that a .safetensors file carries beside its arrays."""
    return map_arrays(path).words


def write_arrays(
    path: Path, found: dict[str, np.ndarray], metadata: dict[str, str] | None = None, *, private: bool = False
) -> None:
    """Writes arrays under a temporary name, then renames the file once the disk has it.

    A reader sees the old file or the whole new one. Nothing else is left after an exception, also of a signal handler.
    private: only the user may read the file, whatever the umask.
    """
    if path.suffix not in (".safetensors", ".npz", ".npy"):
        raise FileError(f"{path}: expected an output name that ends in .safetensors, .npz or .npy.")
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:12]}")  # known before there is such a file
    arrays = {name: np.ascontiguousarray(x) for name, x in found.items()}
    try:
        if private:
            temporary.touch(0o600, exist_ok=False)
        with temporary.open("wb" if private else "xb") as f:
            match path.suffix:
                case ".safetensors":
                    _write_safetensors(f, arrays, metadata)
                case ".npz":
                    np.savez(f, **arrays)  # type: ignore[arg-type]
                case _:
                    np.save(f, arrays["out"])
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise _file_error(path, error) from error


def _write_safetensors(f: BinaryIO, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None) -> None:
    """Writes a header, and each array from where it lies. The package then reads the header, as it will be read."""
    package = _safetensors()
    wide_first = sorted(arrays, key=lambda name: -arrays[name].itemsize)  # each then begins at a multiple of its bytes
    ends = [*itertools.accumulate([arrays[name].nbytes for name in wide_first], initial=0)]
    rows = {
        name: {"dtype": _NAMES[arrays[name].dtype.name], "shape": arrays[name].shape, "data_offsets": both}
        for name, both in zip(wide_first, itertools.pairwise(ends), strict=True)
    }
    words = {"__metadata__": metadata} if metadata else {}
    header = json.dumps(words | rows, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    f.write(len(header).to_bytes(8, "little") + header)
    for name in wide_first:
        f.write(arrays[name].reshape(-1).view(np.uint8).data)
    f.flush()
    with package.safe_open(f.name, "np"):
        pass
