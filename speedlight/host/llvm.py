"""LLVM, by llvmlite, on threads that no signal interrupts.

Python handles signals in its main thread. There an exception between two of llvmlite's lines could free a string twice,
which ends the process, or leave llvmlite's lock taken, for which every other thread's compilation would wait for ever.
"""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import CompileError, pass_on

_R = TypeVar("_R")
_inside = threading.RLock()  # of who calls LLVM
_engines: list[tuple[weakref.ref[Code], Any]] = []  # disposed of where they are made: disposing is a call like others

atexit.register(lambda: _inside.acquire() and _inside.release())  # LLVM ends with the process: nobody is inside then

# No fork while LLVM is being called: its lock would stay locked in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_inside.acquire, after_in_parent=_inside.release, after_in_child=_inside.release)


def undisturbed(call: Callable[[], _R]) -> _R:
    """Returns or raises what call() does, on a thread of its own; call() must not come here again.

    An interrupted caller does not cancel it; later calls and forks wait for its end.
    """
    found: list[_R] = []
    failed: list[BaseException] = []
    begun: list[bool] = []
    turn, ended, process = [call], threading.Lock(), os.getpid()

    def run() -> None:
        begun.append(True)
        with _inside:  # a child that is forked after it finds what came of it
            if turn:
                try:
                    found.append(turn.pop()())
                except BaseException as error:
                    failed.append(error)
                    _forget_frames(error)
                finally:
                    ended.release()

    ended.acquire()
    try:
        while os.getpid() == process:  # a child that a signal's handler forked has no such thread
            # An exception that another thread sends to this one (PyThreadState_SetAsyncExc) ends the new one before its
            # first line if it comes while CPython still has that under this one's number.
            if not begun:
                _thread.start_new_thread(run, ())
            if ended.acquire(timeout=1.0):
                break
    except RuntimeError as error:
        pass_on(error)  # else no thread is to be had
    if not found and not failed:
        run()
    if failed:
        raise failed.pop()
    return found.pop()


def _forget_frames(error: BaseException | None) -> None:
    """Frees llvmlite's objects here, not in the thread that gets the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


class Code:
    """Addresses of machine code by name: code["symbol"]. It is unloaded some time after this object is gone."""

    __slots__ = ("__weakref__", "_addresses")

    def __init__(self, addresses: dict[str, int]) -> None:
        self._addresses = addresses

    def __getitem__(self, name: str) -> int:
        return self._addresses[name]


def load(
    objects: Sequence[bytes], names: Sequence[str], text: str = "", symbols: Mapping[str, int] | None = None
) -> Code:
    """The functions `names` of object files, or of LLVM's IR in `text`. symbols: addresses of functions they call."""
    return undisturbed(lambda: _load(objects, names, text, symbols or {}))


def _load(objects: Sequence[bytes], names: Sequence[str], text: str, symbols: Mapping[str, int]) -> Code:
    binding = _binding()
    for name, address in symbols.items():
        binding.add_symbol(name, address)
    _engines[:] = [x for x in _engines if x[0]() is not None]
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(text), machine)
    for code in objects:
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    found = {name: engine.get_function_address(name) for name in names}
    for name, address in found.items():
        if not address:
            raise CompileError(f"kernel {name} is not in its own object file. Please report this.")
    code = Code(found)
    _engines.append((weakref.ref(code), engine))
    return code


def process_triple() -> str:
    """Returns LLVM's name of the system that this process runs on."""
    return undisturbed(lambda: _binding().get_process_triple())


def host_features() -> set[str]:
    """Returns the host CPU's features, by LLVM's names."""
    return undisturbed(lambda: {name for name, on in _binding().get_host_cpu_features().items() if on})


def _binding() -> Any:
    """Imports llvmlite's calls of LLVM."""
    from llvmlite import binding

    return binding
