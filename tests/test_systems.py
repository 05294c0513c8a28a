"""What is asked of macOS and Windows, with what they answer put in their place: neither has run it yet."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from speedlight import machine
from speedlight.cpu import compile as compiling


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
    assert compiling.cache_directory() == Path("/caches/speedlight/('appauthor', False)")
    monkeypatch.setenv("SPEEDLIGHT_CACHE_DIR", "/mine")
    assert compiling.cache_directory() == Path("/mine")


def test_on_linux_nothing_more_is_imported(on, monkeypatch, nowhere_said):
    monkeypatch.setitem(sys.modules, "platformdirs", None)  # an import would fail
    on("linux")
    assert compiling.cache_directory() == Path("/home/ada/.cache/speedlight")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert compiling.cache_directory() == Path("/fast/speedlight")
