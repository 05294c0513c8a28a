"""The engines: which one takes a call; they are loaded when they are first needed."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .arrays.array import describe, on_gpu
from .arrays.memory import Array
from .arrays.torch_tensors import is_tensor
from .errors import ArgumentError, UnsupportedError, how_to_install, shown
from .host.forks import importing
from .host.machine import interpreting
from .problem.checks import device_name
from .problem.engine import Engine
from .problem.operands import Strides
from .problem.problem import Problem
from .problem.signatures import public

if TYPE_CHECKING:
    from .cpu.engine.cpu_engine import CpuEngine
    from .gpu.gpu_engine import GpuEngine
    from .problem.plan import Plan


def of(device: str) -> Engine:
    """Returns the engine of a device, "cpu" or another."""
    match device:
        case "cpu":
            return cpu()
        case _:
            return gpu()


@functools.lru_cache(maxsize=1)
def cpu() -> CpuEngine:
    """Returns the CPU's engine."""
    with importing:
        from .cpu.engine.cpu_engine import ENGINE

    return ENGINE


def gpu(name: str = "q", way: str = "arrays on the CPU") -> GpuEngine:
    """Returns the GPUs' engine; `name`: the argument that asks for it; `way`: one without."""
    try:
        with importing:
            from .gpu.gpu_engine import ENGINE
    except ImportError as error:
        raise UnsupportedError(
            f"{name}: expected Triton, for arrays on a GPU; it cannot be loaded ({error}). Run "
            f"{how_to_install('gpu')}, or use {way}."
        ) from None
    return ENGINE


def by_name(device: Any) -> Engine:
    """Returns the engine of a device that a caller named."""
    return of("cpu") if device_name(device) == "cpu" else gpu("device", "device='cpu'")


def runs_on_gpu(q: Any, engine: Any) -> bool:
    """Returns whether a GPU's engine takes the call; raises for an `engine` that q cannot have."""
    there = on_gpu(q)
    if engine is None or (type(engine) is str and engine == ("cuda" if there else "cpu")):
        return there
    at = describe(q.detach() if is_tensor(q) else q, "q", gpu=True)  # the interpreter's, or an error
    return is_on_gpu(engine, at)


def is_on_gpu(engine: Any, q: Array) -> bool:
    """Returns whether a GPU's engine takes the call, for where q lies; raises for an `engine` that q cannot have."""
    if not (engine is None or (isinstance(engine, str) and engine in ("cpu", "cuda"))):
        raise ArgumentError(
            f"engine: expected 'cpu', 'cuda' or None (where q lies); got {shown(engine)}. Leave it out."
        )
    if engine == "cpu" and q.device != "cpu":
        raise ArgumentError(
            f"{q.name}: expected an array on the CPU for engine='cpu'; got one on {q.device}. Use {_as_torch(q)}.cpu()."
        )
    if engine == "cuda" and q.device == "cpu" and not (interpreting() and q.kind == "torch"):
        narrow, way = (".float()", ", or leave engine out: GPUs take no float64") if q.dtype == "float64" else ("", "")
        raise ArgumentError(
            f"{q.name}: expected a tensor on a GPU for engine='cuda'; got an array on the CPU. "
            f"Use {_as_torch(q)}{narrow}.cuda(){way}."
        )
    return q.device != "cpu" or engine == "cuda"


def _as_torch(q: Array) -> str:
    """Returns the words that make a PyTorch tensor of an array."""
    # PyTorch takes no negative strides
    name = f"{q.name}.copy()" if q.kind == "numpy" and min(q.strides, default=0) < 0 else q.name
    match q.kind:
        case "torch":
            return name
        case "numpy" if q.dtype == "bfloat16":  # of which PyTorch does not know NumPy's
            return f"torch.from_numpy({name}.view('int16')).view(torch.bfloat16)"
        case _:
            return f"torch.from_{q.kind}({name})"


@public()
def synchronize() -> None:
    """Waits for the GPUs in use, and raises the errors that their kernels noted: page numbers and lengths out of range.

    Does nothing if no GPU was used.

    >>> import speedlight as sl
    >>> sl.synchronize()
    """
    if "speedlight.gpu.launch" in sys.modules:
        gpu().synchronize()


def plan(
    problem: Problem, device: Any, strides: Strides, precision: str, *, exact: bool = False, backward: bool = False,
    threads: int | None = None,
) -> Plan:  # fmt: skip
    """Plans a call, or a backward call, on a device, or on the CPU where none is named; there on `threads`, if any."""
    device = "cpu" if device is None else device
    if threads is not None:
        if device_name(device) != "cpu":
            raise ArgumentError(f"threads: expected None for {device}, which has none; got {threads}. Leave it out.")
        chosen = problem.chosen is not None
        found = cpu().planner(backward=backward, chosen=chosen).plan(problem, strides, threads, exact=exact)
        return found if threads <= threads_now() else replace(found, measured=None)
    if backward and device_name(device) != "cpu":
        raise UnsupportedError(
            f"backward: expected False, or the CPU, of which backward calls are planned; got True for {device}. "
            "Use .cpu(), or device='cpu'."
        )
    return by_name(device).plan(problem, device, strides, precision, exact=exact, backward=backward)


@functools.lru_cache(maxsize=1)
def _get_threads() -> Any:
    with importing:
        from .cpu.runtime.workers import get_threads

    return get_threads


def threads_now() -> int:
    """Returns the number of threads that calls on the CPU use."""
    return _get_threads()()
