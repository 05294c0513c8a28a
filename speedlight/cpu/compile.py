"""Kernels: their names, object code, and the cache of object files.

A cached kernel is a plain object file, named by a hash of everything that went into it: the specialisation, the
target, llvmlite's version and the sources of the emitters. There is no index and no pickle. Nothing is read from a
directory or file that others could have written; any failure of the cache warns once and the kernel is compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import os
import stat
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CompileError

if TYPE_CHECKING:
    from . import merging, microkernels

    Shape = microkernels.Shape | merging.MergeShape

_MAGIC = b"speedlight object 1\n"
_HEADER = len(_MAGIC) + 64  # then sha256 of the object, sha256 of the IR, the object
_lock = threading.RLock()
_loaded: dict[Any, Any] = {}
_engines: list[Any] = []  # the execution engines own the machine code
_warned = False

# Nobody forks while a kernel is being compiled: LLVM's lock would stay taken in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Kernel:
    """Machine code with its name. `entry(address of arguments)` runs it; the GIL is released meanwhile."""

    __slots__ = ("address", "entry", "from_cache", "symbol")

    def __init__(self, symbol: str, address: int, from_cache: bool) -> None:
        self.symbol, self.address, self.from_cache = symbol, address, from_cache
        self.entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def symbol_of(shape: Shape) -> str:
    """The kernel's identity: the same string in profiles, in the cache and in benchmark rows."""
    return f"{shape.stem}_{_digest(shape)[:12]}"


def kernel_of(shape: Shape) -> Kernel:
    """The forward, decode or merge kernel for `shape`: loaded once in a process, from the cache or freshly compiled."""
    kernel = _loaded.get(shape)
    if kernel is None:
        with _lock:
            kernel = _loaded.get(shape)
            if kernel is None:
                kernel = _loaded[shape] = _make(shape)
    return kernel


def emit(shape: Shape) -> str:
    """The LLVM IR of the kernel."""
    from .decode import decode_module
    from .forward import forward_module
    from .merging import MergeShape, merge_module

    if isinstance(shape, MergeShape):
        return str(merge_module(shape, symbol_of(shape)))
    return str((forward_module if shape.vectors else decode_module)(shape, symbol_of(shape)))


def compile_ir(shape: Shape, text: str, triple: str | None = None, *, assembly: bool = False) -> Any:
    """Object code (or assembly) of `text` for the shape's target."""
    from llvmlite import binding

    if shape.isa.arch == "x86_64":
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
    else:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple(triple or shape.isa.triple)
        machine = target.create_target_machine(cpu=shape.isa.cpu, features=shape.isa.features, opt=3, reloc="pic")
        module = binding.parse_assembly(text)
        module.verify()
        options = binding.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        builder = binding.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        return machine.emit_assembly(module) if assembly else machine.emit_object(module)
    except RuntimeError as error:
        raise CompileError(f"kernel {symbol_of(shape)} could not be compiled: {error}. Please report this.") from error


def _make(shape: Shape) -> Kernel:
    symbol = symbol_of(shape)
    path = cache_path(shape)
    code = _read(path) if path else None
    hit = code is not None
    if code is None:
        text = emit(shape)
        code = compile_ir(shape, text, _host_triple(shape))
        if path:
            _write(path, code, text)
    return Kernel(symbol, _load(code, symbol), hit)


def _host_triple(shape: Shape) -> str | None:
    """The object format must be the host's; on Linux it is the level's own."""
    if sys.platform == "linux":
        return None
    from llvmlite import binding

    return binding.get_process_triple()


def _load(code: bytes, symbol: str) -> int:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    if not address:
        raise CompileError(f"kernel {symbol} is not in its own object file. Please report this.")
    _engines.append(engine)
    return address


@functools.cache
def _sources() -> bytes:
    """A digest of the emitters: changed code never meets an old object."""
    total = hashlib.sha256()
    here = Path(__file__).parent
    others = [here.parent / name for name in ("arrays.py", "bounds.py", "machine.py", "planning.py", "tree.py")]
    for path in (*sorted(here.glob("*.py")), *others):
        total.update(path.read_bytes())
    return total.digest()


@functools.cache
def _digest(shape: Shape) -> str:
    versions = importlib.metadata.version("llvmlite")
    return hashlib.sha256(repr((shape, versions, sys.platform)).encode() + _sources()).hexdigest()


# --- the cache of object files


def cache_directory() -> Path | None:
    """Where object files are kept, or None where there is no cache (SPEEDLIGHT_CACHE=0, or no home)."""
    if os.environ.get("SPEEDLIGHT_CACHE", "") == "0":
        return None
    named = os.environ.get("SPEEDLIGHT_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "speedlight"
    except RuntimeError:
        return None


def cache_path(shape: Shape) -> Path | None:
    directory = cache_directory()
    return directory and directory / f"{symbol_of(shape)}_{_digest(shape)}.o"


def kept_kernels() -> dict[Path, int]:
    """The object files that are kept, and their bytes."""
    directory = cache_directory()
    if directory is None or not directory.is_dir() or directory.is_symlink():
        return {}
    return {path: path.stat().st_size for path in sorted(directory.glob("*.o")) if path.is_file() and not path.is_symlink()}


def clear_kernels() -> int:
    """Deletes them; returns how many there were."""
    gone = 0
    for path in kept_kernels():
        with contextlib.suppress(OSError):
            path.unlink()
            gone += 1
    return gone


def _warn(what: str, error: object) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"speedlight: the kernel cache {what} ({error}); kernels are compiled in each process. "
            "Set SPEEDLIGHT_CACHE_DIR to a directory of your own, or SPEEDLIGHT_CACHE=0.",
            RuntimeWarning,
            stacklevel=2,
        )


def _trusted(info: os.stat_result) -> bool:
    """Ours, and nobody else may write it."""
    return not hasattr(os, "geteuid") or (info.st_uid == os.geteuid() and not info.st_mode & 0o022)


def _check_directory(directory: Path) -> None:
    info = os.lstat(directory)
    if not stat.S_ISDIR(info.st_mode):
        raise PermissionError(f"{directory} is not a directory (a symbolic link is not followed)")
    if not _trusted(info):
        raise PermissionError(f"{directory} belongs to, or can be written by, somebody else")


def _read(path: Path) -> bytes | None:
    """The object, if the cache has it whole and nobody else could have put it there."""
    try:
        _check_directory(path.parent)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn("cannot be read", error)
        return None
    try:
        with os.fdopen(descriptor, "rb") as f:
            info = os.fstat(f.fileno())
            if not stat.S_ISREG(info.st_mode) or not _trusted(info):
                raise PermissionError(f"{path.name} belongs to, or can be written by, somebody else")
            data = f.read()
    except OSError as error:
        _warn("cannot be read", error)
        return None
    digest = data[len(_MAGIC) : len(_MAGIC) + 32]
    if not data.startswith(_MAGIC) or hashlib.sha256(data[_HEADER:]).digest() != digest:
        return None  # truncated or damaged: compile, and write it anew
    return data[_HEADER:]


def _write(path: Path, code: bytes, text: str) -> None:
    """Under a temporary name first, then renamed: a reader sees all of it or none."""
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_directory(path.parent)
        descriptor, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)  # mode 0600
        with os.fdopen(descriptor, "wb") as f:
            f.write(_MAGIC + hashlib.sha256(code).digest() + hashlib.sha256(text.encode()).digest() + code)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _warn("cannot be written", error)
