"""Facts about machines: vector units and what they have, threads, caches, the family of the CPU."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import struct
import sys
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import UnsupportedError, pass_on
from .llvm import host_features
from .shortcuts import setting


@dataclass(frozen=True, slots=True)
class Isa:
    """A kernel's target: a level of an instruction set, never one CPU model."""

    name: str
    arch: str  # as in the target triple
    vector_bytes: int
    registers: int
    cpu: str  # LLVM's name of the level
    features: str
    needs: tuple[str, ...]  # feature names the host must report
    products: tuple[tuple[str, str], ...] = ()  # what multiplies numbers that are stored so, where it is not "fma"
    asked: bool = False  # runs only where SPEEDLIGHT_ISA names it

    @property
    def triple(self) -> str:
        return f"{self.arch}-unknown-linux-gnu"

    @property
    def takes_lanes(self) -> bool:
        """Multiplies by one lane of a register: one load brings several numbers of a row."""
        return self.arch == "aarch64"

    @property
    def overwrites_addends(self) -> bool:
        """Multiply-adds write their sum over the addend: one that is needed again is copied first, or loaded again."""
        return self.arch == "aarch64"

    @property
    def is_native(self) -> bool:
        """Has the instructions of its products, and does not compute their bits by others."""
        return not self.name.endswith("-software")

    @property
    def permutes_bytes(self) -> bool:
        """Has instructions that look up bytes in two vectors (VBMI): those of the dot instruction have them, too."""
        return "+avx512vbmi" in self.features

    @property
    def has_tiles(self) -> bool:
        """Has tile registers, which a process must ask the system for."""
        return "amx-tile" in self.needs

    def product(self, storage: str, *, gradients: bool = False, codes: str = "") -> str:
        """Names what multiplies numbers that are stored so, in PRODUCTS; cpu/products/ has a class for each.

        codes: keys and values are codes, under queries that are stored so: a name of Steps.codes.
        """
        name = dict(self.products).get(storage, "fma")
        if codes and codes not in PRODUCTS[name].codes:
            return "fma"
        return PRODUCTS[name].gradients or name if gradients else name

    def dot(self, dtype: object, *, gradients: bool = False, codes: str = "") -> bool | str:
        """Returns the class of bits of arrays of this dtype, as reference.error_bound() takes it.

        codes: of queries of this dtype over codes, as product() takes it.
        """
        return "bfloat16" in str(dtype) and PRODUCTS[self.product("bf16", gradients=gradients, codes=codes)].dot

    def lanes(self, storage: str) -> int:
        """Counts scores or sums in a vector."""
        return self.vector_bytes // number_bytes(storage)


def sum_storage(storage: str) -> str:
    """Names the type of scores and sums over numbers that are stored so."""
    return "f64" if storage == "f64" else "f32"


def number_bytes(storage: str) -> int:
    """Returns the bytes of a score, or a sum, over numbers of this storage."""
    return {"f64": 8, "f32": 4}[sum_storage(storage)]


class Steps(NamedTuple):
    """The steps in which a product sums."""

    elements: int  # of a unit: what one lane takes from a row in one step
    together: int = 1  # units that are summed by themselves, from zero, before they join the sum
    rows: int = 0  # keys, or columns of values, that are multiplied at once; 0: as many as a register tile has
    gradients: str = ""  # the product of gradients, where it is another
    dot: bool | str = False  # its class of bits, as error_bound(dot=) takes it: none, dot (True), "tiles" or "odd"
    packed: int = 1  # units that lie together in a packed row of queries or keys: zeros fill it up
    title: str = "multiply-adds"
    tried: tuple[str, ...] = ()  # kernels before whose first use the order of its instruction's sums is tried
    # codes of keys and values that it takes, which its elements have exactly: with a scale for a row, for columns
    # ("blocks"), or "latents"
    codes: tuple[str, ...] = ()


# by name; host/tunings.py has a row of blockings for each
PRODUCTS = {
    "fma": Steps(1, codes=("rows", "blocks", "latents")),
    "pairs": Steps(2, dot=True, title="pairs of bfloat16", codes=("rows", "blocks")),
    "amx_tiles": Steps(2, 16, 32, "fma", "tiles", 16, "tiles of bfloat16", ("forward",), codes=("rows",)),
    "odd_pairs": Steps(2, 1, 8, "fma", "odd", 2, "pairs of bfloat16, rounded to odd", ("forward", "decode")),
}


_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c")
_BF16, _TILES, _ODD = (("bf16", "pairs"),), (("bf16", "amx_tiles"),), (("bf16", "odd_pairs"),)
_AVX2 = ("avx2", "fma", "f16c")
_PAIRS = "+avx512bf16,+avx512vbmi,-prefer-256-bit"
_HAS_PAIRS = (*_AVX512, "avx512bf16", "avx512vbmi")
_HAS_AMX = (*_HAS_PAIRS, "amx-tile", "amx-bf16")
# best first:
#    name          arch       bytes regs  LLVM's cpu   LLVM's features                what the host must have   products
ISAS = (
    Isa("amx",        "x86_64",  64, 32, "x86-64-v4", f"+amx-tile,+amx-bf16,{_PAIRS}", _HAS_AMX,               _TILES),
    Isa("avx512bf16", "x86_64",  64, 32, "x86-64-v4", _PAIRS,                        _HAS_PAIRS,               _BF16),
    Isa("avx512",     "x86_64",  64, 32, "x86-64-v4", "-prefer-256-bit",             _AVX512),
    Isa("avx2",       "x86_64",  32, 16, "x86-64-v3", "",                            _AVX2),
    Isa("neon",       "aarch64", 16, 32, "generic",   "+neon",                       ("neon",)),
    # nobody has measured it on a machine
    Isa("neonbf16",   "aarch64", 16, 32, "generic",   "+neon,+bf16",                 ("neon", "bf16"), _ODD, True),
    # the bits of "amx" on any AVX-512, and of "neonbf16" on any AVX2, slowly
    Isa("amx-software", "x86_64", 64, 32, "x86-64-v4", "-prefer-256-bit",            _AVX512, _TILES, asked=True),
    Isa("neonbf16-software", "x86_64", 16, 32, "x86-64-v3", "",                      _AVX2, _ODD, asked=True),
)  # fmt: skip
# LLVM's names of what Arm's CPUs have, where Linux ("Features") and macOS (hw.optional.arm.FEAT_…) have others
_ARM_LINUX = {"asimd": "neon", "asimddp": "dotprod", "asimdhp": "fullfp16", "asimdfhm": "fp16fml", "atomics": "lse",
              "svebf16": "sve-bf16", "svei8mm": "sve-i8mm"}  # fmt: skip
_ARM_MACOS = {"AdvSIMD": "neon", "DotProd": "dotprod", "FP16": "fullfp16", "FHM": "fp16fml", "BF16": "bf16",
              "I8MM": "i8mm", "LSE": "lse", "SME": "sme", "SME2": "sme2"}  # fmt: skip

# What a family of CPUs takes, the first that it has, where that is not the best: Intel's multiply pairs of bfloat16 at
# half the rate of float32 or less (154 against 369 GFLOP/s on two cores of a Xeon, model 207), tiles at eight times it.
UNITS = {"intel512": ("amx", "avx512")}


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
    """The levels this machine can run without being asked to, best first."""
    return tuple(i for i in runnable_isas() if not i.asked)


def native_isas() -> tuple[Isa, ...]:
    """The levels whose instructions this machine has, also those that it runs only if asked to."""
    return tuple(i for i in runnable_isas() if i.is_native)


def runnable_isas() -> tuple[Isa, ...]:
    """The levels this machine can run."""
    arch = host_arch()
    if arch not in ("x86_64", "aarch64"):
        raise UnsupportedError(f"machine: expected x86-64 or 64-bit Arm; got {platform.machine()!r}.")
    have = _features()
    levels = tuple(i for i in ISAS if i.arch == arch and have.issuperset(i.needs))
    if not [i for i in levels if not i.asked]:
        raise UnsupportedError(
            "machine: expected a CPU with AVX2, FMA and F16C (x86-64-v3, 2013 or later); this one has none."
        )
    return levels


def _features() -> set[str]:
    """Returns the host CPU's features, by LLVM's names. Linux tells them in 1 ms; loading LLVM takes 20."""
    if host_arch() == "aarch64":
        return {"neon", *_arm_features()}  # which all of 64 bits have
    said = _cpuinfo().get("flags", "").split()
    if said:
        return {name.replace("avx512_", "avx512").replace("amx_", "amx-") for name in said}
    return {name for name in host_features() if not name.startswith("amx")}  # which Linux alone is asked for


def _arm_features() -> set[str]:
    if sys.platform == "darwin":
        return {ours for theirs, ours in _ARM_MACOS.items() if any(_sysctl(f"hw.optional.arm.FEAT_{theirs}"))}
    said = _cpuinfo().get("Features", "").split()
    return {_ARM_LINUX.get(name, name) for name in said} or host_features()


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """Returns Linux's /proc/cpuinfo fields of the first CPU; nothing elsewhere."""
    try:
        with open("/proc/cpuinfo") as f:
            first = f.read().partition("\n\n")[0]
    except OSError as error:
        pass_on(error, OSError)
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def current_isa() -> Isa:
    """The level in use: SPEEDLIGHT_ISA if set (it must be one this machine has), else what its family takes."""
    return _chosen_isa(setting("SPEEDLIGHT_ISA"))


@functools.cache
def _chosen_isa(wanted: str) -> Isa:
    if not wanted:
        wants = UNITS.get(cpu_family(), ())
        own = [i for i in host_isas() if i.name in wants]
        return (own or host_isas())[0]
    isa = isa_named(wanted)
    if isa not in runnable_isas():
        have = ", ".join(i.name for i in runnable_isas())
        raise UnsupportedError(f"SPEEDLIGHT_ISA: this machine cannot run {wanted!r}; it has {have}.")
    return isa


_REFUSALS = {
    errno.EINVAL: "Linux before 5.16, or a kernel built without them",
    errno.EOPNOTSUPP: "the hypervisor hides them",
    errno.EPERM: "a filter of system calls (seccomp) forbids arch_prctl",
    errno.ENOSPC: "a thread has an alternative signal stack too small for their state",
}


def permit_tiles() -> None:
    """Asks Linux for the tile registers, for all threads of this process. Raises UnsupportedError if it refuses."""
    import ctypes

    arch_prctl, request, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(ctypes.c_long(arch_prctl), ctypes.c_long(request), ctypes.c_long(tile_data)):
        why = _REFUSALS.get(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        raise UnsupportedError(
            f"SPEEDLIGHT_ISA: expected a process that may use AMX's tile registers; Linux refuses them: {why}. "
            "Set SPEEDLIGHT_ISA=avx512: bfloat16 then has other last bits, and takes two to four times as long."
        )


@functools.cache
def slow_cores() -> int:
    """Apple's slow cores, which calls leave alone unless they are asked for."""
    fast = int.from_bytes(_sysctl("hw.perflevel0.logicalcpu"), "little") if sys.platform == "darwin" else 0
    return max(0, (os.cpu_count() or 1) - fast) if fast else 0


def usable_cpus() -> int:
    """CPUs a call of this thread may use now: its affinity, cut by a cgroup quota. It takes some 20 µs to find out."""
    count = len(_affinity()) or os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as f:
            quota, period = f.read().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError) as error:
        pass_on(error, Exception)
    return max(1, count)


def _affinity() -> set[int]:
    """CPUs that the calling thread may use, and so threads that it starts; empty where the system does not say.

    Where OpenMP was told to bind each of its threads, the caller too, to one CPU: those that any thread may use.
    """
    if not hasattr(os, "sched_getaffinity"):
        return set()
    found = os.sched_getaffinity(0)
    if len(found) == os.cpu_count() or not any([setting(x) for x in _BINDING]):
        return found
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                found |= os.sched_getaffinity(int(thread))
    except OSError as error:
        pass_on(error, OSError)
    return found


_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@functools.cache
def level2_bytes() -> int:
    """Size of one core's second-level cache; 512 KiB where it cannot be read."""
    try:
        match sys.platform:
            case "darwin":
                found = _macos_level2()
            case "win32":
                found = _windows_level2(_windows_processors())
            case _:
                found = _linux_level2()
    except (OSError, ValueError, KeyError, AttributeError, struct.error) as error:
        pass_on(error, Exception)
        found = 0
    return found or 512 << 10


def _linux_level2() -> int:
    with open("/sys/devices/system/cpu/cpu0/cache/index2/size") as f:
        text = f.read().strip()
    return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]


def _macos_level2() -> int:
    """Returns a fast core's share: Apple's have one cache for each cluster of them, and another size for slow ones."""
    whole = _sysctl("hw.perflevel0.l2cachesize") or _sysctl("hw.l2cachesize")
    sharers = _sysctl("hw.perflevel0.cpusperl2") or b"\1"
    return int.from_bytes(whole, "little") // max(1, int.from_bytes(sharers, "little"))


def _sysctl(name: str) -> bytes:
    """Returns a value of macOS's sysctl as raw bytes: a number, or text that ends in a zero; empty if there is none."""
    import ctypes

    size = ctypes.c_size_t(256)
    found = ctypes.create_string_buffer(size.value)
    try:
        ask = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError) as error:
        pass_on(error, Exception)
        return b""
    failed = ask(name.encode(), found, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else found.raw[: size.value]


_WINDOWS_RECORD = struct.Struct("<QI4xBBHI8x")  # SYSTEM_LOGICAL_PROCESSOR_INFORMATION, of a cache
_IS_CACHE = 2


def _windows_level2(records: bytes) -> int:
    """Returns the bytes of the first second-level cache, which the threads of a core share."""
    for _, kind, level, _, _, size in _WINDOWS_RECORD.iter_unpack(records):
        if kind == _IS_CACHE and level == 2:
            return size
    return 0


def _windows_processors() -> bytes:
    """Returns Windows' records of its processors, as raw bytes."""
    import ctypes

    ask = ctypes.WinDLL("kernel32").GetLogicalProcessorInformation  # type: ignore[attr-defined]
    size = ctypes.c_uint32(0)
    ask(None, ctypes.byref(size))  # says how much room it needs
    found = ctypes.create_string_buffer(size.value)
    return found.raw[: size.value] if ask(found, ctypes.byref(size)) else b""


@functools.cache
def cpu_family() -> str:
    """ "zen4", "zen5", "intel512" (of Intel's, all that have AVX-512), "arm" or "other"."""
    if host_arch() == "aarch64":
        return "arm"
    words = _cpuinfo()
    avx512 = "avx512f" in words.get("flags", "").split()  # Zen 3 is of family 25, too, without it
    match words.get("vendor_id"), words.get("cpu family"):
        case "AuthenticAMD", "25" if avx512:
            return "zen4"
        case "AuthenticAMD", "26":
            return "zen5"
        case "GenuineIntel", _ if avx512:  # family 6 for thirty years; from Diamond Rapids on others
            return "intel512"
    return "other"


def cpu_identity() -> str:
    """Returns a text that tells this model of CPU from others. Its name may not: virtual machines often have a general
    one.
    """
    words = _cpuinfo()
    x86, arm = ("vendor_id", "cpu family", "model", "stepping"), ("implementer", "part", "variant", "revision")
    numbers = [words[x] for x in (*x86, *(f"CPU {x}" for x in arm)) if x in words]
    return ", ".join([cpu_name(), *numbers])


def interpreting() -> bool:
    """Returns whether Triton's kernels run in Python on the CPU, as in tests where there is no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def cpu_name() -> str:
    """The CPU's model name as the system gives it."""
    try:
        match sys.platform:
            case "darwin":
                found = _sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode("utf-8", "replace")
            case "win32":
                found = _windows_name()
            case _:
                found = _cpuinfo().get("model name", "")
    except (OSError, AttributeError) as error:
        pass_on(error, Exception)
        found = ""
    return found.strip() or platform.processor() or platform.machine()


def _windows_name() -> str:
    import winreg

    path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
    with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:  # type: ignore[attr-defined]
        return str(winreg.QueryValueEx(key, "ProcessorNameString")[0])  # type: ignore[attr-defined]
