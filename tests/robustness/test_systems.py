"""What systems and CPUs say of themselves: macOS and Windows have others' answers put in their place."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import FULL, HIDDEN, SUPPORT

from speedlight.cpu.kernels.merge import MergeShape
from speedlight.cpu.memory.shape import AppendShape, Shape, Source
from speedlight.cpu.runtime import compile as compiling
from speedlight.cpu.runtime import kept_files
from speedlight.host import machine
from speedlight.host.llvm import process_triple


@pytest.fixture
def on(monkeypatch):
    """Another system, as far as Python can tell."""

    def pretend(name: str) -> None:
        monkeypatch.setattr(sys, "platform", name)
        forget()

    def forget() -> None:
        machine.level2_bytes.cache_clear()
        machine._cpuinfo.cache_clear()

    yield pretend
    monkeypatch.undo()
    forget()


def macos(monkeypatch, answers: dict[str, bytes]) -> None:
    """ctypes.CDLL(None).sysctlbyname with these answers."""
    import ctypes

    def sysctlbyname(name, found, size, new, new_size):
        answer = answers.get(name.decode())
        if answer is None or len(answer) > size._obj.value:
            return -1
        ctypes.memmove(found, answer, len(answer))
        size._obj.value = len(answer)
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(sysctlbyname=sysctlbyname))


def number(x: int, size: int = 8) -> bytes:
    return x.to_bytes(size, "little")


def test_macos(on, monkeypatch):
    on("darwin")
    apple = {
        "machdep.cpu.brand_string": b"Apple M3 Pro\0",
        "hw.perflevel0.l2cachesize": number(16 << 20, 4),
        "hw.perflevel0.cpusperl2": number(6, 4),
        "hw.l2cachesize": number(4 << 20),
    }
    macos(monkeypatch, apple)
    assert machine.cpu_name() == "Apple M3 Pro" and machine.level2_bytes() == (16 << 20) // 6
    machine.level2_bytes.cache_clear()
    macos(monkeypatch, {"machdep.cpu.brand_string": b"Intel(R) Core(TM) i7\0", "hw.l2cachesize": number(256 << 10)})
    assert machine.cpu_name() == "Intel(R) Core(TM) i7" and machine.level2_bytes() == 256 << 10


def test_windows_names_its_cpu(on, monkeypatch):
    on("win32")
    registry = ModuleType("winreg")
    values = {"ProcessorNameString": ("AMD Ryzen 9 7950X 16-Core Processor            ", 1)}
    opened = []

    class Key:
        def __init__(self, *place):
            opened.append(place)

        def __enter__(self):
            return values

        def __exit__(self, *error):
            return None

    registry.HKEY_LOCAL_MACHINE, registry.OpenKey = "machine", Key  # type: ignore[attr-defined]
    registry.QueryValueEx = lambda key, name: key[name]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "winreg", registry)
    assert machine.cpu_name() == "AMD Ryzen 9 7950X 16-Core Processor"
    assert opened == [("machine", r"HARDWARE\DESCRIPTION\System\CentralProcessor\0")]


def test_windows_tells_its_caches(on, monkeypatch):
    """A core, its first-level caches, the second of 1 MiB, and the third, as Windows lays them out: 32 bytes each."""
    import ctypes

    core = struct.pack("<QI4xQQ", 3, 0, 1, 0)
    caches = [
        struct.pack("<QI4xBBHII4x", 3, 2, level, 8, 64, size, kind)
        for level, size, kind in ((1, 32 << 10, 2), (1, 32 << 10, 1), (2, 1 << 20, 0), (3, 32 << 20, 0))
    ]
    records = core + b"".join(caches)

    def ask(found, size):
        enough = size._obj.value >= len(records)
        size._obj.value = len(records)
        if enough:
            ctypes.memmove(found, records, len(records))
        return enough

    kernel32 = SimpleNamespace(GetLogicalProcessorInformation=ask)
    monkeypatch.setattr(ctypes, "WinDLL", lambda name: kernel32 if name == "kernel32" else None, raising=False)
    on("win32")
    assert len(records) == 5 * 32 and machine.level2_bytes() == 1 << 20


@pytest.mark.parametrize("name", ["darwin", "win32", "linux"])
def test_a_system_that_says_nothing(on, monkeypatch, name):
    """Its functions are missing, its files cannot be opened: a name all the same, and the usual size."""

    def nothing(*_args: object, **_named: object) -> None:
        raise OSError(2, "nothing here")

    import ctypes

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    monkeypatch.setattr(ctypes, "WinDLL", nothing, raising=False)
    monkeypatch.setitem(sys.modules, "winreg", SimpleNamespace(OpenKey=nothing, HKEY_LOCAL_MACHINE=0))
    monkeypatch.setattr("builtins.open", nothing)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    on(name)
    assert machine.cpu_name() == machine.platform.machine() != "" and machine.level2_bytes() == 512 << 10


def test_linux_says_it(on):
    on("linux")
    assert machine.cpu_name() and machine.level2_bytes() >= 64 << 10


@pytest.fixture
def nowhere_said(monkeypatch):
    for variable in ("SPEEDLIGHT_CACHE_DIR", "SPEEDLIGHT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/home/ada")


@pytest.mark.parametrize("name", ["darwin", "win32"])
def test_kernels_lie_where_the_system_keeps_such_files(on, monkeypatch, nowhere_said, name):
    known = ModuleType("platformdirs")
    known.user_cache_path = lambda *asked, **named: Path("/caches", *asked, *map(str, named.items()))  # type: ignore
    monkeypatch.setitem(sys.modules, "platformdirs", known)
    on(name)
    assert kept_files.cache_directory() == Path("/caches/speedlight/('appauthor', False)")
    monkeypatch.setenv("SPEEDLIGHT_CACHE_DIR", "/mine")
    assert kept_files.cache_directory() == Path("/mine")


def test_on_linux_nothing_more_is_imported(on, monkeypatch, nowhere_said):
    monkeypatch.setitem(sys.modules, "platformdirs", None)  # an import would fail
    on("linux")
    assert kept_files.cache_directory() == Path("/home/ada/.cache/speedlight")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert kept_files.cache_directory() == Path("/fast/speedlight")


OBJECTS = {  # unit, system, triple, and what its object files begin with
    "Mac": ("neon", "darwin", "arm64-apple-darwin23.0.0", b"\xcf\xfa\xed\xfe\x0c\0\0\1"),
    "Mac with Intel": ("avx2", "darwin", "x86_64-apple-darwin", b"\xcf\xfa\xed\xfe\7\0\0\1"),
    "Windows": ("avx512", "win32", "x86_64-pc-windows-msvc", b"\x64\x86"),
    "Windows on Arm": ("neon", "win32", "aarch64-pc-windows-msvc", b"\x64\xaa"),
}


@pytest.mark.each("name", "kind")
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("kind", ["forward", "backward", "decode", "merge", "append"] if FULL else ["decode", "merge"])
def test_kernels_become_the_objects_of_other_systems(on, name, kind):
    """Nobody has loaded one yet. They call memset alone, and no frame is so large that Windows wants it probed."""
    unit, system, triple, begin = OBJECTS[name]
    isa, keys = machine.isa_named(unit), Source("f32", False)
    shapes = {"merge": MergeShape(isa), "append": AppendShape(isa, "int8", keys, keys)}
    shape = shapes.get(kind) or Shape(kind, isa, "f32", 0 if kind == "decode" else 3 if kind == "backward" else 2)
    assert process_triple()  # loads LLVM, where it is
    on(system)
    text = compiling.emit(shape)
    assert compiling.compile_ir(shape, text, triple).startswith(begin)
    code = compiling.compile_ir(shape, text, triple, assembly=True)
    called = set(re.findall(r"^\s+(?:callq?|bl|jmp|b)\s+\"?([\w.]+)", code, re.MULTILINE))
    outside = {x for x in called - set(re.findall(r'^"?([\w.]+)"?:', code, re.MULTILINE)) if x[0] not in "L."}
    may = {"darwin": {"_memset", "_bzero", "_sched_yield"}, "win32": {"memset"}}[system]
    assert called and outside <= may and "chkstk" not in code


# --- the CPUs that Linux and macOS tell of: the first of /proc/cpuinfo, and sysctl

_ARMV8_2 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm"
_V1 = (
    f"{_ARMV8_2} jscvt fcma lrcpc dcpop sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg"
)
_V2 = f"{_V1} dcpodp sve2 sveaes svepmull svebitperm svesha3 flagm2 frint svei8mm svebf16 i8mm bf16 dgh rng bti"


def arm(part: str, variant: str, revision: str, features: str) -> str:
    return (
        f"processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {features}\nCPU implementer\t: 0x41\n"
        f"CPU architecture: 8\nCPU variant\t: {variant}\nCPU part\t: {part}\nCPU revision\t: {revision}\n\n"
        f"processor\t: 1\nFeatures\t: {features}\nCPU part\t: 0xd05\n"
    )


def x86(vendor: str, family: int, model: int, stepping: int, name: str, flags: str) -> str:
    return (
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
        f"model name\t: {name}\nstepping\t: {stepping}\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
    )


_AVX2 = "fpu sse sse2 avx f16c fma avx2 bmi1 bmi2"
_AVX512 = f"{_AVX2} avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni avx512_bf16"
LINUX = {  # name: text, features that it must tell, features that it must not
    "Graviton 2": (arm("0xd0c", "0x3", "1", f"{_ARMV8_2} lrcpc dcpop asimddp ssbs"), "neon dotprod", "sve bf16 i8mm"),
    "Graviton 3": (arm("0xd40", "0x1", "1", f"{_V1} svei8mm svebf16 i8mm bf16"), "neon sve bf16 i8mm", "sve2"),
    "Graviton 4": (arm("0xd4f", "0x0", "1", _V2), "neon dotprod fullfp16 sve sve2 bf16 i8mm", "asimd"),
    "Ampere Altra": (arm("0xd0c", "0x3", "1", f"{_ARMV8_2} lrcpc dcpop asimddp"), "neon dotprod fullfp16", "sve"),
    "Grace": (arm("0xd4f", "0x0", "0", _V2), "neon sve2 sve-bf16 sve-i8mm", "asimddp"),
    "Raspberry Pi 5": (arm("0xd0b", "0x4", "1", f"{_ARMV8_2} lrcpc dcpop asimddp"), "neon dotprod", "bf16 sve"),
    "Intel": (x86("GenuineIntel", 6, 143, 8, "Intel(R) Xeon(R) Platinum 8481C", _AVX512), "avx512bf16 avx2", "neon"),
    "AMD": (x86("AuthenticAMD", 25, 1, 1, "AMD EPYC 7763 64-Core Processor", _AVX2), "avx2 fma f16c", "avx512f"),
}


def linux(on, monkeypatch, text: str) -> None:
    import io

    on("linux")
    monkeypatch.setattr(machine, "host_arch", lambda: "aarch64" if "Features" in text else "x86_64")
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr("builtins.open", lambda path, *_: io.StringIO(text if path == "/proc/cpuinfo" else ""))


@pytest.mark.parametrize("name", LINUX)
def test_linux_tells_what_a_cpu_has(on, monkeypatch, name):
    text, has, lacks = LINUX[name]
    linux(on, monkeypatch, text)
    found = machine._features()
    assert found.issuperset(has.split()) and found.isdisjoint(lacks.split())
    units = machine.host_isas.__wrapped__()
    own = [x for x in machine.ISAS if x.arch == machine.host_arch() and found.issuperset(x.needs)]
    assert units == tuple(x for x in own if not x.asked) != ()
    assert ("neonbf16" in [x.name for x in machine.runnable_isas()]) == (name in ("Graviton 3", "Graviton 4", "Grace"))


def test_no_two_cores_are_the_same(on, monkeypatch):
    """Tunings and roofs are kept by identity: those of one core are not another's."""
    found = {}
    for name, (text, _, _) in LINUX.items():
        linux(on, monkeypatch, text)
        found[name] = machine.cpu_identity()
    assert found["Graviton 2"] == found.pop("Ampere Altra")  # the same core, a Neoverse N1 r3p1
    assert len(set(found.values())) == len(found)


def test_a_unit_is_offered_where_its_needs_are_met(on, monkeypatch):
    needy = machine.ISAS[-1].__class__("sve2", "aarch64", 16, 32, "generic", "+sve2", ("neon", "sve2"))
    monkeypatch.setattr(machine, "ISAS", (needy, *machine.ISAS))
    for name in LINUX:
        linux(on, monkeypatch, LINUX[name][0])
        assert (needy in machine.host_isas.__wrapped__()) == (name in ("Graviton 4", "Grace"))


@pytest.mark.parametrize(("name", "extra", "lacks"), [("Apple M1", "", "bf16 i8mm"), ("Apple M2", "BF16 I8MM", "sme")])
def test_macos_tells_what_a_cpu_has(on, monkeypatch, name, extra, lacks):
    on("darwin")
    monkeypatch.setattr(machine, "host_arch", lambda: "aarch64")
    monkeypatch.setattr(machine, "_cpuinfo", dict)
    features = {x: number(int(x in f"AdvSIMD DotProd FP16 FHM LSE {extra}".split()), 4) for x in machine._ARM_MACOS}
    answers = {f"hw.optional.arm.FEAT_{x}": answer for x, answer in features.items()}
    answers |= {"machdep.cpu.brand_string": name.encode() + b"\0", "hw.perflevel0.logicalcpu": number(4, 4)}
    macos(monkeypatch, answers)
    found = machine._features()
    assert found.issuperset(["neon", "dotprod", "fullfp16", *extra.lower().split()])
    assert found.isdisjoint(lacks.split()) and machine.cpu_identity() == name
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert machine.slow_cores.__wrapped__() == 6
    assert [x.name for x in machine.host_isas.__wrapped__()] == ["neon"]
    assert [x.name for x in machine.native_isas()] == ["neon"] + ["neonbf16"] * (name == "Apple M2")


# --- units and families of CPUs


def test_linux_says_what_llvm_says_of_the_cpu():
    if HIDDEN or not machine._cpuinfo():
        pytest.skip("/proc/cpuinfo hides flags, or is none")
    from llvmlite import binding

    theirs = {name for name, on in binding.get_host_cpu_features().items() if on}
    wanted = {name for isa in machine.ISAS for name in isa.needs}
    assert machine._features() & wanted == theirs & wanted


def test_units_are_hidden_from_the_suite_and_its_children():
    """What `make suite-avx2` asks for; of a machine without AVX-512 nothing is left to hide."""
    if not machine._cpuinfo():
        pytest.skip("no /proc/cpuinfo")
    code = (
        "import os, subprocess, sys\n"
        "from speedlight.host import machine\n"
        "print([x.name for x in machine.runnable_isas()], machine.cpu_family(), machine.level2_bytes() >> 10)\n"
        "if len(sys.argv) < 2: sys.exit(subprocess.run([sys.executable, *sys.orig_argv[1:], 'child']).returncode)"
    )
    env = os.environ | {"SPEEDLIGHT_TEST_HIDE": "avx512", "SPEEDLIGHT_ISA": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(SUPPORT / "hidden"), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    here = [x.name for x in machine.runnable_isas() if "avx512f" not in x.needs]
    family = "arm" if machine.host_arch() == "aarch64" else "other"
    assert done.stdout.splitlines() == [f"{here} {family} 512"] * 2, done.stderr


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "found"),
    [
        ("AuthenticAMD", "25", "fma avx512f", "zen4"),
        ("AuthenticAMD", "25", "fma", "other"),  # Zen 3
        ("AuthenticAMD", "26", "fma avx512f", "zen5"),
        ("AuthenticAMD", "23", "fma", "other"),
        ("GenuineIntel", "6", "fma avx512f", "intel512"),
        ("GenuineIntel", "19", "fma avx512f", "intel512"),
        ("GenuineIntel", "6", "fma", "other"),
        ("HygonGenuine", "24", "fma", "other"),
    ],
)
def test_families_of_cpus(vendor, family, flags, found, monkeypatch):
    monkeypatch.setattr(machine, "_cpuinfo", lambda: {"vendor_id": vendor, "cpu family": family, "flags": flags})
    assert machine.cpu_family.__wrapped__() == found
    monkeypatch.setattr(machine, "_cpuinfo", dict)
    assert machine.cpu_family.__wrapped__() == "other"
    monkeypatch.setattr(machine, "host_arch", lambda: "aarch64")
    assert machine.cpu_family.__wrapped__() == "arm"


@pytest.mark.parametrize(
    ("family", "flags", "unit"),
    [
        ("zen4", "avx512bf16 avx512 avx2", "avx512bf16"),
        ("zen5", "avx512bf16 avx512 avx2", "avx512bf16"),
        ("intel512", "avx512bf16 avx512 avx2", "avx512"),  # its dot instruction has half the rate of float32's
        ("intel512", "avx512 avx2", "avx512"),
        ("intel512", "avx2", "avx2"),
        ("other", "avx2", "avx2"),
    ],
)
def test_which_unit_a_family_takes(family, flags, unit, monkeypatch):
    """SPEEDLIGHT_ISA still insists."""
    monkeypatch.setattr(machine, "cpu_family", lambda: family)
    for units in ("host_isas", "runnable_isas"):
        monkeypatch.setattr(machine, units, lambda: tuple(machine.isa_named(name) for name in flags.split()))
    choose = machine._chosen_isa.__wrapped__
    assert choose("").name == unit
    assert [choose(name).name for name in flags.split()] == flags.split()
