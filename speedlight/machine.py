"""Facts about machines: vector units, how many of what they have, and the roofs that were measured."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass

from .errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Isa:
    """What a kernel is compiled for: a level of an instruction set, never the whims of one CPU model."""

    name: str
    arch: str  # as in the target triple
    vector_bytes: int
    registers: int
    cpu: str  # LLVM's name of the level
    features: str
    needs: tuple[str, ...]  # feature names the host must report
    bf16_dot: bool = False

    @property
    def triple(self) -> str:
        return f"{self.arch}-unknown-linux-gnu"


_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c")
# name, arch, vector bytes, registers, LLVM cpu, LLVM features, what the host must have; best first
ISAS = (
    Isa("avx512bf16", "x86_64", 64, 32, "x86-64-v4", "+avx512bf16,-prefer-256-bit", (*_AVX512, "avx512bf16"), True),
    Isa("avx512", "x86_64", 64, 32, "x86-64-v4", "-prefer-256-bit", _AVX512),
    Isa("avx2", "x86_64", 32, 16, "x86-64-v3", "", ("avx2", "fma", "f16c")),
    Isa("neon", "aarch64", 16, 32, "generic", "+neon", ()),
)


def isa_named(name: str) -> Isa:
    """The level called `name`, whether or not this machine has it."""
    for isa in ISAS:
        if isa.name == name:
            return isa
    names = ", ".join(i.name for i in ISAS)
    raise UnsupportedError(f"SPEEDLIGHT_ISA: expected one of {names}; got {name!r}. Unset it to let speedlight choose.")


def host_arch() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


@functools.cache
def host_isas() -> tuple[Isa, ...]:
    """The levels this machine can run, best first."""
    arch = host_arch()
    if arch == "aarch64":
        return tuple(i for i in ISAS if i.arch == arch)
    if arch != "x86_64":
        raise UnsupportedError(f"machine: expected x86-64 or 64-bit Arm; got {platform.machine()!r}.")
    from llvmlite import binding

    have = {name for name, on in binding.get_host_cpu_features().items() if on}
    found = tuple(i for i in ISAS if i.arch == arch and have.issuperset(i.needs))
    if not found:
        raise UnsupportedError(
            "machine: expected a CPU with AVX2, FMA and F16C (x86-64-v3, 2013 or later); this one has none."
        )
    return found


def current_isa() -> Isa:
    """The level in use: SPEEDLIGHT_ISA if set (it must be one this machine has), else the best."""
    return _chosen_isa(os.environ.get("SPEEDLIGHT_ISA", ""))


@functools.cache
def _chosen_isa(wanted: str) -> Isa:
    if not wanted:
        return host_isas()[0]
    isa = isa_named(wanted)
    if isa not in host_isas():
        have = ", ".join(i.name for i in host_isas())
        raise UnsupportedError(f"SPEEDLIGHT_ISA: this machine cannot run {wanted!r}; it has {have}.")
    return isa


def available_threads() -> int:
    """CPUs this process may use: its affinity, cut by a cgroup quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as f:
            quota, period = f.read().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return max(1, count)


@functools.cache
def level2_bytes() -> int:
    """Size of one core's second-level cache; 512 KiB where it cannot be read."""
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index2/size") as f:
            text = f.read().strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    except (OSError, ValueError, KeyError):
        return 512 << 10


@dataclass(frozen=True, slots=True)
class Blocking:
    """What a CPU wants of the forward kernel's blocks of queries. No bit of a result depends on it."""

    worth: tuple[
        float, float, float
    ]  # share of the peak that panels of 1, 2, 3 query vectors reach, relative to the best
    panels: int  # that share a tile of keys, at most


# measured over 90 shapes on each of the two (docs/ladder.md); "dot" are bf16 pairs, "fma" all else
#               worth of 1, 2, 3 vectors   panels
_BLOCKINGS = {
    ("zen4", "fma"): Blocking((1.00, 0.98, 0.95), 8),
    ("zen4", "dot"): Blocking((0.72, 1.00, 0.99), 4),
    ("zen5", "fma"): Blocking((0.80, 0.97, 1.00), 8),
    ("zen5", "dot"): Blocking((0.80, 0.97, 1.00), 8),
    ("other", "fma"): Blocking((0.80, 0.97, 1.00), 8),
    ("other", "dot"): Blocking((0.80, 0.97, 1.00), 8),
}  # fmt: skip


def blocking(isa: Isa, *, dot: bool) -> Blocking:
    """The row of this CPU. Units of 16 registers have no room for enough sums of one vector: theirs is the last row."""
    family = cpu_family() if isa.registers >= 32 and isa.arch == host_arch() else "other"
    return _BLOCKINGS[family, "dot" if dot else "fma"]


@functools.cache
def cpu_family() -> str:
    """ "zen4", "zen5" or "other"."""
    try:
        with open("/proc/cpuinfo") as f:
            first = f.read().partition("\n\n")[0]
    except OSError:
        return "other"
    words = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    if words.get("vendor_id") != "AuthenticAMD":
        return "other"
    avx512 = "avx512f" in words.get("flags", "").split()  # Zen 3 is of family 25, too, without it
    return {"25": "zen4" if avx512 else "other", "26": "zen5"}.get(words.get("cpu family", ""), "other")


def interpreting() -> bool:
    """Whether Triton's kernels run in Python on the CPU, as tests do where there is no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def cpu_name() -> str:
    """The CPU's model name as the system gives it."""
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
