"""Kernels: their names, object code, and the cache of object files.

A cached kernel is a plain object file, named by a hash of everything that went into it: the specialisation, the
target, llvmlite's version and the sources of the package. There is no index and no pickle. Nothing is read from a
directory or file that others could have written; any failure of the cache warns once and the kernel is compiled.

In memory the key of a kernel is its structure, so no array stays alive for it; those least recently used are unloaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import itertools
import os
import re
import stat
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CompileError
from ..modes import standard

if TYPE_CHECKING:
    from .merging import MergeShape
    from .shape import Shape

    AnyShape = Shape | MergeShape

_OURS = b"speedlight object "
_MAGIC = _OURS + b"2\n"
_HEADER = len(_MAGIC) + 64  # then sha256 of the file's name and the object, sha256 of the IR, the object
_NAME = re.compile(r"[a-z0-9_]+_[0-9a-f]{12}_[0-9a-f]{64}\.o")
MOST_LOADED = 256  # kernels; then the least recently used is unloaded, once no thread runs it
_lock = threading.RLock()
_loaded: dict[Any, Kernel] = {}
_turns = itertools.count()  # a clock of uses
_warned = False

# No fork while a kernel is being compiled: LLVM's lock would stay locked in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Kernel:
    """Machine code and its symbol; unloaded with this object. The GIL is released while it runs.

    `entry(address of arguments)` does one thread's share of a region. `joined(address)` does the same, and returns when
    no thread is inside any more.
    """

    __slots__ = ("__weakref__", "address", "entry", "from_cache", "joined", "last", "owner", "symbol")

    def __init__(self, symbol: str, code: bytes, from_cache: bool) -> None:
        self.symbol, self.from_cache, self.owner, self.last = symbol, from_cache, _load(code), 0
        self.address = _find(self.owner, symbol)
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self.entry, self.joined = call(self.address), call(_find(self.owner, f"{symbol}_joined"))

    def used(self) -> None:
        """Marks it as recently used."""
        self.last = next(_turns)


def _find(owner: Any, name: str) -> int:
    """The address of a function that an execution engine owns."""
    address = owner.get_function_address(name)
    if not address:
        raise CompileError(f"kernel {name} is not in its own object file. Please report this.")
    return address


def symbol_of(shape: AnyShape) -> str:
    """The kernel's identity: the same string in profiles, in the cache and in benchmark rows."""
    return f"{shape.stem}_{_digest(shape)[:12]}"


def kernel_of(shape: AnyShape) -> Kernel:
    """The forward, decode or merge kernel for `shape`: loaded once in a process, from the cache or freshly compiled."""
    key = _structure(shape)
    kernel = _loaded.get(key)
    if kernel is None:
        with _lock:
            kernel = _loaded.get(key)
            if kernel is None:
                kernel = _make(shape)
                _make_room()
                _loaded[key] = kernel
    kernel.used()
    return kernel


def _structure(shape: Any) -> Any:
    """What makes the kernel, and nothing else: equal to `shape`, without the arrays and numbers of its expressions."""
    program = getattr(shape, "program", None)
    if program is None:
        return shape
    return replace(shape, program=replace(program, mask=None, score=None, flow=None, entries=()))


def _make_room() -> None:
    """For one more. A running call holds a reference, so its kernel is unloaded afterwards."""
    while len(_loaded) >= MOST_LOADED:
        del _loaded[min(_loaded, key=lambda key: _loaded[key].last)]


def loaded_kernels() -> list[str]:
    """The symbols of the kernels that are loaded."""
    return sorted(kernel.symbol for kernel in list(_loaded.values()))


@standard
def emit(shape: AnyShape) -> str:
    """The LLVM IR of the kernel."""
    from .backward import backward_module
    from .decode import decode_module
    from .forward import forward_module
    from .merging import MergeShape, merge_module
    from .shape import Shape
    from .table_gradients import tables_module

    symbol = symbol_of(shape)
    match shape:
        case MergeShape():
            return str(merge_module(shape, symbol))
        case Shape(kind="forward"):
            return str(forward_module(shape, symbol))
        case Shape(kind="backward"):
            return str(backward_module(shape, symbol))
        case Shape(kind="tables"):
            return str(tables_module(shape, symbol))
        case _:
            return str(decode_module(shape, symbol))


@standard
def compile_ir(shape: AnyShape, text: str, triple: str | None = None, *, assembly: bool = False) -> Any:
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
        options = binding.create_pipeline_tuning_options(speed_level=1)
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        _optimise(module, binding.create_pass_builder(machine, options))
        return machine.emit_assembly(module) if assembly else machine.emit_object(module)
    except RuntimeError as error:
        raise CompileError(f"kernel {symbol_of(shape)} could not be compiled: {error}. Please report this.") from error


def _optimise(module: Any, builder: Any) -> None:
    """Runs LLVM's passes for functions, and frees them: in llvmlite 0.50 ObjectRef's empty _dispose hides the one that
    does. Those for whole modules take twice as long, for kernels as fast: they are one function each.
    """
    from llvmlite.binding.ffi import ObjectRef
    from llvmlite.binding.newpassmanagers import NewPassManager

    passes = builder.getFunctionPassManager()
    try:
        for function in module.functions:
            if not function.is_declaration:
                passes.run(function, builder)
    finally:
        if type(passes)._dispose is ObjectRef._dispose:
            NewPassManager._dispose(passes)


def _make(shape: AnyShape) -> Kernel:
    symbol = symbol_of(shape)
    path = cache_path(shape)
    code = _read(path) if path else None
    hit = code is not None
    if code is None:
        text = emit(shape)
        code = compile_ir(shape, text, _host_triple(shape))
        if path:
            _write(path, code, text)
    return Kernel(symbol, code, hit)


def _host_triple(shape: AnyShape) -> str | None:
    """The object format must be the host's; on Linux it is the level's own."""
    if sys.platform == "linux":
        return None
    from llvmlite import binding

    return binding.get_process_triple()


def _load(code: bytes) -> Any:
    """The execution engine that owns the machine code: it is unloaded with it."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


@functools.cache
def _sources() -> bytes:
    return digest_of(Path(__file__).parent.parent)


def digest_of(package: Path) -> bytes:
    """Of every source: changed code never meets an old object, for kernels are made of numbers from everywhere.

    Some 3 ms.
    """
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        total.update(f"{path.relative_to(package).as_posix()} {len(source)}\n".encode() + source)
    return total.digest()


def _digest(shape: AnyShape) -> str:
    return _digest_of(_structure(shape))


@functools.lru_cache(maxsize=4 * MOST_LOADED)
def _digest_of(structure: Any) -> str:
    versions = importlib.metadata.version("llvmlite")
    return hashlib.sha256(repr((structure, versions, sys.platform)).encode() + _sources()).hexdigest()


# --- the cache of object files


def cache_directory() -> Path | None:
    """The directory of object files, or None without a cache (SPEEDLIGHT_CACHE=0, or no home directory)."""
    if os.environ.get("SPEEDLIGHT_CACHE", "") == "0":
        return None
    named = os.environ.get("SPEEDLIGHT_CACHE_DIR")
    if named:
        return Path(named)
    try:
        return _users_directory()
    except RuntimeError:
        return None


def _users_directory() -> Path:
    """Where this system keeps what may be made again: a directory of this user's."""
    if sys.platform == "darwin" or sys.platform == "win32":
        from platformdirs import user_cache_path

        return user_cache_path("speedlight", appauthor=False)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "speedlight"


def cache_path(shape: AnyShape) -> Path | None:
    directory = cache_directory()
    return directory and directory / f"{symbol_of(shape)}_{_digest(shape)}.o"


def cached_kernels() -> dict[Path, int]:
    """The object files in the cache, and their bytes; other files in the directory are ignored."""
    directory = cache_directory()
    if directory is None:
        return {}
    try:
        _check_directory(directory)
        return {path: path.stat().st_size for path in sorted(directory.glob("*.o")) if _is_ours(path)}
    except OSError:
        return {}


def _is_ours(path: Path) -> bool:
    """Whether a version of speedlight has written it: by its name and its first bytes."""
    if not _NAME.fullmatch(path.name):
        return False
    try:
        return _content(path, len(_OURS)) == _OURS
    except OSError:
        return False


def clear_kernels() -> int:
    """Deletes the object files; returns how many."""
    gone = 0
    for path in cached_kernels():
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
    """Owned by this user, and writable by no other."""
    return not hasattr(os, "geteuid") or (info.st_uid == os.geteuid() and not info.st_mode & 0o022)


def _check_directory(directory: Path) -> None:
    info = os.lstat(directory)
    if not stat.S_ISDIR(info.st_mode):
        raise PermissionError(f"{directory} is not a directory (a symbolic link is not followed)")
    if not _trusted(info):
        raise PermissionError(f"{directory} belongs to, or can be written by, somebody else")


def _content(path: Path, size: int = -1) -> bytes:
    """Bytes of a regular file that only this user can write. Others are not even opened: a pipe would block."""
    _check_file(path, os.lstat(path))
    with open(path, "rb") as f:
        _check_file(path, os.fstat(f.fileno()))
        return f.read(size)


def _check_file(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise PermissionError(f"{path.name} is not a file (a symbolic link is not followed)")
    if not _trusted(info):
        raise PermissionError(f"{path.name} belongs to, or can be written by, somebody else")


def _read(path: Path) -> bytes | None:
    """The object code, if the file is complete and only this user could have written it."""
    try:
        _check_directory(path.parent)
        data = _content(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn("cannot be read", error)
        return None
    code = data[_HEADER:]
    if data[: _HEADER - 32] != _MAGIC + _sum(path, code):
        return None  # truncated, damaged or another kernel's: compile, and write it anew
    return code


def _sum(path: Path, code: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\n" + code).digest()


def _write(path: Path, code: bytes, text: str) -> None:
    """Under a temporary name first, then renamed: a reader sees all of it or none.

    The temporary file is removed whatever happens.
    """
    temporary = path.parent / f".new-{os.getpid()}-{os.urandom(8).hex()}"
    try:
        _make_directory(path.parent)
        _check_directory(path.parent)
        with open(temporary, "xb") as f:
            if hasattr(os, "fchmod"):
                os.fchmod(f.fileno(), 0o600)
            f.write(_MAGIC + _sum(path, code) + hashlib.sha256(text.encode()).digest() + code)
        os.replace(temporary, path)
    except OSError as error:
        _warn("cannot be written", error)
    finally:
        try:  # noqa: SIM105 - no Python is called before it, so no signal comes before it
            os.unlink(temporary)
        except OSError:
            pass


def _make_directory(directory: Path) -> None:
    """With missing parents, accessible to this user alone whatever the umask. Existing directories stay as they are."""
    if not directory.exists():
        _make_directory(directory.parent)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
