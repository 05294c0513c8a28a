"""Launches recorded where no GPU is, and compiled for one: kernels are ready before they are called, and travel."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gpu_ahead
import torch
import triton
from triton.runtime.jit import KernelInterface

import speedlight
from speedlight.gpu import schedule
from speedlight.host import machine

from .running import Item, Journal, NoDevice, run_items

KEY = "key.json"


class Recorder:
    """Takes the launches of calls of CPU tensors, as a GPU of a capability would get them."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.capability = capability
        self.found: dict[Any, tuple[Any, Any, dict[str, Any]]] = {}
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Recorder:
        recorder = self
        said: dict[str, tuple[Any, Any]] = {"interpreting": (machine.interpreting, lambda: True)}
        said["capability"] = (schedule.capability, lambda device: recorder.capability)
        for module in list(sys.modules.values()):
            for name, (real, ours) in said.items():
                if getattr(module, "__dict__", {}).get(name) is real:
                    self._put(module, name, ours)
        self._put(
            KernelInterface, "__getitem__", lambda kernel, grid: lambda **given: recorder._take(kernel, grid, given)
        )
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)
        self._before.clear()

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _take(self, kernel: Any, grid: Any, given: dict[str, Any]) -> None:
        """Keeps a launch, unless one that compiles to the same kernel is there."""
        key: list[Any] = [kernel.__name__]
        plain: dict[str, Any] = {}
        fixed = {p.name for p in kernel.params if p.is_constexpr}
        loose = {p.name for p in kernel.params if p.do_not_specialize}
        for name, x in given.items():
            plain[name] = x
            if isinstance(x, torch.Tensor):
                is_aligned = x.data_ptr() % 16 == 0
                plain[name] = torch.empty(17, dtype=x.dtype)[0 if is_aligned else 1 :]
                key.append((name, x.dtype, is_aligned))
            elif name not in fixed and type(x) is int:
                width = -(1 << 31) <= x < 1 << 31
                key.append((name, width) if name in loose else (name, width, x == 1, x % 16 == 0))
            elif name not in fixed and isinstance(x, float):
                key.append((name, float))
            else:
                key.append((name, x if x is None or isinstance(x, bool | int | float | str) else id(x)))
        self.found.setdefault(tuple(key), (kernel, grid, plain))


def recorded(items: Iterable[Item], capability: tuple[int, int]) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Returns the launches of items; those whose compilers take longest come first."""
    with Recorder(capability) as recorder:
        for item in items:
            with contextlib.suppress(NoDevice):
                try:
                    item.run()
                except NoDevice:
                    raise
                except Exception as error:  # the kernels of other items matter, too
                    print(f"not recorded: {item.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)

    def takes_long(launch: tuple[Any, Any, dict[str, Any]]) -> bool:
        q = launch[2].get("q")
        return q is not None and q.dtype == torch.float32

    return sorted(recorder.found.values(), key=takes_long, reverse=True)


def compile_all(
    items: Iterable[Item], capability: tuple[int, int], journal: Journal, *, seconds: float, processes: int
) -> str:
    """Compiles what items launch, in processes; says how many kernels, and which not."""
    launches = recorded(items, capability)
    todo = [
        Item(f"kernel {n} {_name_of(x)}", functools.partial(_compile, *x, capability)) for n, x in enumerate(launches)
    ]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # a line for each kernel is too many
        found = run_items(todo, "kernels", journal, seconds=seconds, each=seconds, at_once=processes)
    bad = [name for name, x in found.items() if not x.is_right]
    done = sum([x.seconds > 0 and x.is_right for x in found.values()])
    return f"{done} of {len(todo)} kernels compiled by {processes} processes" + "".join(f"; WRONG: {x}" for x in bad)


def _name_of(launch: tuple[Any, Any, dict[str, Any]]) -> str:
    kernel, _, given = launch
    shown = ("D", "BM", "BN", "PRODUCER", "NONFINITE", "END", "HIDING", "PRECISION")
    return " ".join([kernel.__name__, *[f"{name}={given[name]}" for name in shown if name in given]])


def _compile(kernel: Any, grid: Any, given: dict[str, Any], capability: tuple[int, int]) -> str:
    driver: Any = gpu_ahead.Device(capability)
    triton.runtime.driver.set_active(driver)
    built = kernel.warmup(grid=grid, **given)
    if Path("/dev/nvidia0").exists():  # what calls the kernel is compiled, too; it links the driver's library
        with contextlib.suppress(Exception):
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(built.src, built.metadata)
    return "compiled"


# --- kernels that travel


def sources_key() -> dict[str, str]:
    """Returns what compiled kernels depend on: any edit above a kernel in its file changes its key."""
    text = hashlib.sha256()
    for file in sorted(Path(speedlight.__file__).parent.joinpath("gpu").glob("*.py")):
        text.update(file.read_bytes())
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python, "triton": triton.__version__, "sources": text.hexdigest()[:16], "folder": str(cache())}


def cache() -> Path:
    return Path(os.environ["TRITON_CACHE_DIR"])


def pack(file: Path) -> None:
    """Packs the compiled kernels: Triton's index has whole paths, so they are unpacked to the same folder."""
    (cache() / KEY).write_text(json.dumps(sources_key()))
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as tar:
        tar.add(cache(), arcname=".")


def unpack(file: Path) -> str:
    """Unpacks kernels if they were compiled from these sources; says so."""
    if not file.exists():
        return f"no kernels came along in {file}"
    with tarfile.open(file) as tar:
        member = tar.extractfile(f"./{KEY}")
        key = json.loads(member.read()) if member else {}
        differs = [name for name, x in sources_key().items() if key.get(name) != x]
        if differs:
            return f"kernels in {file} are of another {', '.join(differs)}: they are compiled here"
        cache().mkdir(parents=True, exist_ok=True)
        tar.extractall(cache(), filter="data")
    return f"{len(list(cache().glob('*/*.cubin')))} kernels came along"
