"""The two engines: which one takes a call, and the modules that run it, loaded when they are first needed."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from .arrays.array import Array
from .cpu.memory.operands import Strides
from .errors import ArgumentError, UnsupportedError, how_to_install, shown
from .host.forks import importing
from .host.machine import interpreting
from .problem.checks import device_name
from .problem.options import public
from .problem.problem import Problem

if TYPE_CHECKING:
    from .problem.plan import Plan


def chosen(engine: Any, q: Array) -> str:
    """ "cpu", or the device whose engine takes the call: that on which the array lies, which `engine` may insist on."""
    if not (engine is None or (isinstance(engine, str) and engine in ("cpu", "cuda"))):
        raise ArgumentError(f"engine: expected 'cpu', 'cuda' or None (where q lies); got {shown(engine)}.")
    if engine == "cpu" and q.device != "cpu":
        raise ArgumentError(
            f"{q.name}: expected an array on the CPU for engine='cpu'; got one on {q.device}. Use {q.name}.cpu()."
        )
    if engine == "cuda" and q.device == "cpu" and not (interpreting() and q.kind == "torch"):
        raise ArgumentError(
            f"{q.name}: expected a tensor on a GPU for engine='cuda'; got an array on the CPU. Use {q.name}.cuda()."
        )
    return "cpu" if q.device == "cpu" and engine != "cuda" else q.device


def of(device: str) -> Any:
    """The engine of a device, as chosen() gives it: `prepare` makes a call, `plan` says what it would do."""
    match device:
        case "cpu":
            with importing:
                from .cpu.engine import forward_call as prepare

            return prepare
        case _:
            return gpu()


def gradients() -> Any:
    """What computes them: `prepare` makes a backward call, `plan` says what it would do."""
    with importing:
        from .cpu.engine import backward_call as gradients

    return gradients


def gpu(name: str = "q", way: str = "q.cpu()") -> Any:
    """What computes on a GPU; `name`: the argument that asks for it, and the `way` without."""
    try:
        with importing:
            from .gpu import prepare
    except ImportError as error:
        raise UnsupportedError(
            f"{name}: expected Triton, for arrays on a GPU; it cannot be loaded ({error}). Run "
            f"{how_to_install('gpu')}, or use {way}."
        ) from None
    return prepare


def raw_pages() -> Any:
    """What stores tokens in the caller's pages on the CPU."""
    from .cpu.engine import append_call

    return append_call


def gpu_used() -> bool:
    """Whether anything was launched on one."""
    return "speedlight.gpu.launch" in sys.modules


def resident() -> Any:
    """Caches in a GPU's memory."""
    gpu("device", "device='cpu'")
    with importing:
        from .gpu import storage as resident

    return resident


def storage_of(device: Any) -> Any:
    """The module of CacheStorage and PoolStorage for a device."""
    if device_name(device) != "cpu":
        return resident()
    with importing:
        from .cpu.engine import storage

    return storage


@public()
def synchronize() -> None:
    """Waits for the GPUs that were used, and raises what kernels have noted: page numbers and lengths that were out of
    range.

    Does nothing where none was used.

    >>> import speedlight as sl
    >>> sl.synchronize()
    """
    if gpu_used():
        gpu().synchronize()


def plan(
    problem: Problem, device: Any, strides: Strides, precision: str, *, exact: bool = False, backward: bool = False
) -> Plan:
    """What a call, or a backward call, on a device would do: on the CPU over arrays with these strides."""
    match None if device is None else device_name(device):
        case None | str("cpu"):
            maker = gradients() if backward else of("cpu")
            return maker.plan(problem, strides, threads_now(), exact=exact)
        case _:
            if backward:
                raise UnsupportedError(
                    f"backward: expected False, or the CPU, where gradients are computed; got True for {device}. "
                    "Use .cpu(), or device='cpu'."
                )
            gpu_device = resident().device_of(device)
            with importing:
                from .gpu import counting

            return counting.plan(problem, gpu_device, precision, exact=exact)


@functools.lru_cache(maxsize=1)
def _get_threads() -> Any:
    with importing:
        from .cpu.runtime.workers import get_threads

    return get_threads


def threads_now() -> int:
    return _get_threads()()
