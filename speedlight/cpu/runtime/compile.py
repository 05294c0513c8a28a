"""Kernels: their names, object code, and the cache of object files.

A cached kernel is a plain object file (kept_files.py), named by a hash of everything that went into it: the
specialisation, the target, llvmlite's version and the sources of the package. There is no index and no pickle.

In memory the key of a kernel is its structure, so no array stays alive for it; those least recently used are unloaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import re
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import CompileError, UnsupportedError
from ...host.llvm import load, process_triple, undisturbed
from ...host.machine import PRODUCTS, cpu_name, permit_tiles
from ...host.rounding import standard
from .kept_files import cache_directory, check_directory, digest_of, keep, read_content, read_kept, sum_of

if TYPE_CHECKING:
    from ...host.machine import Isa
    from ..kernels.merge import MergeShape
    from ..kernels.repeat import RepeatShape
    from ..kernels.term_sums import TermShape
    from ..kernels.thread_pool import ServingShape
    from ..kernels.tile_test import TileTestShape
    from ..memory.shape import AppendShape, Shape

    AnyShape = Shape | MergeShape | AppendShape | ServingShape | RepeatShape | TermShape | TileTestShape

_OURS = b"speedlight object "
_MAGIC = _OURS + b"3\n"
_HEADER = len(_MAGIC) + 64  # then sha256 of the file's name and the objects, sha256 of the IR, the objects
_NAME = re.compile(r"[a-z0-9_-]+_[0-9a-f]{12}_[0-9a-f]{64}\.o")
MOST_LOADED = 256  # kernels; then the least recently used is unloaded, once no thread runs it
lock = threading.RLock()
_loaded: dict[Any, Kernel] = {}
_turns = itertools.count()  # a clock of uses

# No fork while a kernel is being made: the child's lock would stay locked.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Kernel:
    """Machine code and its symbol; unloaded with this object. The GIL is released while it runs.

    `entry(address of arguments)` does one thread's share of a region. `joined(address)` does the same, and returns when
    no thread is inside any more. `ticket`: the address of what does one ticket, where the kernel says it.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "code",
        "entry",
        "from_cache",
        "joined",
        "last",
        "records",
        "symbol",
        "ticket",
    )

    def __init__(
        self, symbol: str, objects: tuple[bytes, ...], from_cache: bool, *, does_tickets: bool = False
    ) -> None:
        self.symbol, self.from_cache, self.last = symbol, from_cache, 0
        self.records: weakref.WeakSet[Any] = weakref.WeakSet()  # calls that machine code repeats with it
        names = symbol, f"{symbol}_joined", *[f"{symbol}_ticket"] * does_tickets
        self.code = load(objects, names)
        self.address, self.ticket = self.code[symbol], self.code[names[-1]] if does_tickets else 0
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self.entry, self.joined = call(self.address), call(self.code[f"{symbol}_joined"])

    def used(self) -> None:
        """Marks it as recently used."""
        self.last = next(_turns)


def symbol_of(shape: AnyShape) -> str:
    """The kernel's identity: the same string in profiles, in the cache and in benchmark rows."""
    return f"{shape.stem}_{_digest(shape)[:12]}"


def kernel_of(shape: AnyShape) -> Kernel:
    """The forward, decode or merge kernel for `shape`: loaded once in a process, from the cache or freshly compiled."""
    key = _structure(shape)
    kernel = _loaded.get(key)
    if kernel is None:
        with lock:
            kernel = _loaded.get(key)
            if kernel is None:
                kernel = _make(shape)
                _make_room()
                _loaded[key] = kernel
    kernel.used()
    return kernel


def _structure(shape: Any) -> Any:
    """Returns what determines the kernel, and nothing else: equal to `shape`, without its expressions' arrays and
    numbers.
    """
    program = getattr(shape, "program", None)
    if program is None:
        return shape
    return replace(shape, program=replace(program, mask=None, score=None, flow=None, entries=()))


def _make_room() -> None:
    """For one more. A running call holds a reference, so its kernel is unloaded afterwards."""
    while len(_loaded) >= MOST_LOADED:
        kernel = _loaded.pop(min(_loaded, key=lambda key: _loaded[key].last))
        for call in list(kernel.records):
            call.forget_record()


def loaded_kernels() -> list[str]:
    """The symbols of the kernels that are loaded."""
    return sorted(kernel.symbol for kernel in list(_loaded.values()))


def emit(shape: AnyShape) -> str:
    """The LLVM IR of the kernel, as one module."""
    return str(_module(shape))


@standard
def _module(shape: AnyShape) -> Any:
    """Emitters are imported where they are needed: a first call waits for its own alone."""
    symbol = symbol_of(shape)
    match shape.kind:
        case "merge":
            from ..kernels.merge import merge_module as module
        case "terms":
            from ..kernels.term_sums import terms_module as module
        case "append":
            from ..kernels.append import append_module as module
        case "forward":
            from ..kernels.forward import forward_module as module
        case "backward":
            from ..kernels.backward import backward_module as module
        case "tables":
            from ..kernels.table_gradients import tables_module as module
        case "weights":
            from ..kernels.key_weights import weights_module as module
        case "serving":
            from ..kernels.thread_pool import serving_module as module
        case "tile_test":
            from ..kernels.tile_test import tile_test_module as module
        case "repeat":
            from ..kernels.repeat import repeat_module as module
        case _:
            from ..kernels.decode import decode_module as module
    of_kind: Any = shape
    return module(of_kind, symbol)


@standard  # and so the thread that is made
def compile_ir(shape: AnyShape, text: str, triple: str | None = None, *, assembly: bool = False) -> Any:
    """Object code (or assembly) of `text` for the shape's target."""

    def call() -> Any:
        try:
            return _compiled(shape.isa, text, triple or shape.isa.triple, assembly)
        except RuntimeError as error:
            said = f"kernel {symbol_of(shape)} could not be compiled: {error}. Please report this."
            raise CompileError(said) from error

    return undisturbed(call)


@functools.lru_cache(maxsize=16)  # what many kernels share comes again and again
def _compiled(isa: Isa, text: str, triple: str, assembly: bool) -> Any:
    from llvmlite import binding

    if isa.arch == "x86_64":
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
    else:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(triple)
    # absolute addresses where parts call each other: LLVM's loader counts from the first part's table of offsets
    reloc = "static" if _in_parts(isa) else "pic"
    machine = target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=3, reloc=reloc)
    module = binding.parse_assembly(text)
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=1)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    _optimise(module, binding.create_pass_builder(machine, options))
    return machine.emit_assembly(module) if assembly else machine.emit_object(module)


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
    begin_product(shape)
    return Kernel(symbol_of(shape), *objects_of(shape), does_tickets=shape.kind == "append")


def begin_product(shape: AnyShape) -> None:
    """Makes this process ready for the product of a shape: before its code runs, whoever compiled it."""
    product = getattr(shape, "product", "fma")
    if shape.kind in PRODUCTS[product].tried and shape.isa.is_native:
        try_bfloat16(shape.isa)


@functools.cache
def try_bfloat16(isa: Isa) -> None:
    """Tries instructions for bfloat16 whose order of sums is their own: once in a process, before the first kernel that
    needs them. Tile registers are asked for first.

    Raises UnsupportedError if they are refused, or compute other bits than docs/numerics.md says.
    """
    from ..kernels.tile_test import TILE_BYTES, TileTestShape

    if isa.has_tiles:
        permit_tiles()
    memory = np.zeros((5, TILE_BYTES), np.uint8)
    pairs, sums = memory[:2].view(np.uint16), memory[2].view(np.float32)
    numbers = np.random.default_rng(0).standard_normal(pairs.shape).astype(np.float32)
    numbers[:, :8] = [[1e-39], [2.0**-100]]  # a subnormal number; products that are
    pairs[...], sums[...] = numbers.view(np.uint32) >> 16, numbers[0, : sums.size] * 3
    shape = TileTestShape(isa)
    Kernel(symbol_of(shape), *objects_of(shape)).entry(memory.ctypes.data)
    if not np.array_equal(memory[3], memory[4]):
        raise UnsupportedError(
            "SPEEDLIGHT_ISA: expected a CPU that sums bfloat16 in the order of docs/numerics.md; the sums of this one "
            f"have other bits ({cpu_name()}). Set SPEEDLIGHT_ISA={'avx512' if isa.arch == 'x86_64' else 'neon'}, and "
            "please report this."
        )


def objects_of(shape: AnyShape) -> tuple[tuple[bytes, ...], bool]:
    """Its object files, and whether they come from the cache."""
    path = cache_path(shape)
    data = read_kept(path) if path else None
    objects = _objects_in(path, data) if path and data is not None else None
    hit = objects is not None
    if objects is None:
        module = _module(shape)
        texts = module.parts() if _in_parts(shape.isa) else (str(module),)
        objects = tuple([compile_ir(shape, text, host_triple()) for text in texts])
        if path:
            code = len(objects[0]).to_bytes(8, "little") + b"".join(objects)
            keep(path, _MAGIC + sum_of(path, code) + hashlib.sha256("".join(texts).encode()).digest() + code)
    return objects, hit


def _in_parts(isa: Isa) -> bool:
    """Returns whether a kernel is two object files. Tried where it could be; one is as good."""
    return isa.arch == "x86_64" and sys.platform == "linux"


def host_triple() -> str | None:
    """Returns the triple whose object format is the host's; on Linux it is the unit's own."""
    return None if sys.platform == "linux" else process_triple()


# All that kernels may be made of: the rooms that cpu/ may import.
ROOMS = ("arrays", "cpu", "errors", "expressions", "host", "problem")


@functools.cache
def _sources() -> bytes:
    return digest_of(Path(__file__).parents[2], ROOMS)


def _digest(shape: AnyShape) -> str:
    return _digest_of(_structure(shape))


@functools.lru_cache(maxsize=4 * MOST_LOADED)
def _digest_of(structure: Any) -> str:
    import llvmlite

    return hashlib.sha256(repr((structure, llvmlite.__version__, sys.platform)).encode() + _sources()).hexdigest()


# --- the cache of object files


def cache_path(shape: AnyShape) -> Path | None:
    directory = cache_directory()
    return directory and directory / f"{symbol_of(shape)}_{_digest(shape)}.o"


def cached_kernels() -> dict[Path, int]:
    """The object files in the cache, and their bytes; other files in the directory are ignored."""
    directory = cache_directory()
    if directory is None:
        return {}
    try:
        check_directory(directory)
        return {path: path.stat().st_size for path in sorted(directory.glob("*.o")) if _is_ours(path)}
    except OSError:
        return {}


def _is_ours(path: Path) -> bool:
    """Returns whether a version of speedlight has written it, by its name and its first bytes."""
    if not _NAME.fullmatch(path.name):
        return False
    try:
        return read_content(path, len(_OURS)) == _OURS
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


def _objects_in(path: Path, data: bytes) -> tuple[bytes, ...] | None:
    """The object files of a kernel; of a file that is truncated, damaged or another kernel's, None."""
    code = data[_HEADER:]
    if data[: _HEADER - 32] != _MAGIC + sum_of(path, code):
        return None
    end = 8 + int.from_bytes(code[:8], "little")
    return (code[8:end], code[end:]) if len(code) > end else (code[8:],)
