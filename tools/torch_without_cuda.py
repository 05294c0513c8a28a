"""Installs PyTorch's CUDA build without the gigabytes of CUDA: empty libraries take the place of those that it wants.

    python tools/torch_without_cuda.py torch==2.11.0 -c gpu-image.txt

With the Python of an environment of its own, on Linux; needs a C compiler and readelf. What follows the requirement are
pip's own options. `import torch` works afterwards, and sees no GPU; pip no longer asks for CUDA's packages. A CPU
build, from an index that has one, is left as it is.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import files, requires
from pathlib import Path

# of CUDA, what runs when PyTorch is imported: it asks how many devices there are
_REAL = ("cudart", "cupti")
_REAL_PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-cupti")
_ROOTS = ("libtorch_global_deps.so", "libtorch_python.so")  # what `import torch` loads, with all that they want


def without_cuda(requirement: str) -> str | None:
    """Returns a requirement of PyTorch's as it is to be installed; None if it is one of CUDA's, or an extra's."""
    wanted, _, marker = requirement.partition(";")
    if "extra" in marker:
        return None
    name = re.split(r"[^\w.-]", wanted.strip())[0]
    if name == "cuda-toolkit":
        return re.sub(r"\[.*\]", f"[{','.join(_REAL)}]", requirement)
    is_cuda = name.startswith(("nvidia-", "cuda-"))
    return None if is_cuda and not name.startswith(_REAL_PACKAGES) else requirement


def metadata_without_cuda(text: str) -> str:
    """Returns a package's metadata without CUDA's packages, which pip would install beside whatever comes next."""
    lines = []
    for line in text.splitlines(keepends=True):
        requirement = line.removeprefix("Requires-Dist: ").rstrip("\n")
        if requirement == line.rstrip("\n") or "extra ==" in requirement:
            lines.append(line)
        elif (kept := without_cuda(requirement)) is not None:
            lines.append(f"Requires-Dist: {kept}\n")
    return "".join(lines)


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *words], check=True)


@dataclass
class Library:
    """A shared library as readelf shows it: the libraries that it wants, and symbols."""

    wanted: list[str] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    undefined: set[tuple[str, str]] = field(default_factory=set)  # name, and version or ""
    versions: dict[str, str] = field(default_factory=dict)  # the library that each version is of


def read_library(path: Path) -> Library:
    """Reads a shared library's dynamic section and symbols."""
    words = ["readelf", "--wide", "--dynamic", "--dyn-syms", "--version-info", str(path)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found, file = Library(), ""
    for line in text.splitlines():
        if needed := re.search(r"\(NEEDED\).*\[(.+)\]", line):
            found.wanted.append(needed[1])
        elif of_file := re.search(r"Version: \d+\s+File: (\S+)", line):
            file = of_file[1]
        elif version := re.search(r"Name: (\S+)\s+Flags: .*Version: \d+", line):
            found.versions[version[1]] = file
        elif symbol := re.match(r"\s*\d+: [0-9a-f]+ +\S+ +\S+ +(\w+) +\w+ +(\S+) (\S+)", line):
            binding, section, (name, _, version) = symbol[1], symbol[2], symbol[3].partition("@")
            if section != "UND":
                found.defined.add(name)
            elif binding == "GLOBAL":
                found.undefined.add((name, version))
    return found


def missing_symbols(roots: list[Path], folders: list[Path]) -> dict[str, set[tuple[str, str]]]:
    """Returns the libraries that the roots want, themselves or through others, and that are nowhere: for each the
    symbols, with their versions, that it should have.
    """
    seen: dict[str, Library] = {}
    missing: dict[str, set[tuple[str, str]]] = {}
    others = [ctypes.CDLL(None)]  # has the symbols of Python; the system's libraries follow
    left = list(roots)
    while left:
        path = left.pop()
        if path.name in seen:
            continue
        seen[path.name] = read_library(path)
        for name in seen[path.name].wanted:
            places = [folder / name for folder in folders if (folder / name).exists()]
            if places:
                left.append(places[0])
            else:
                try:
                    others.append(ctypes.CDLL(name))
                except OSError:
                    missing[name] = set()
    defined = set[str]().union(*[x.defined for x in seen.values()])
    for library in seen.values():
        absent = [x for x in library.wanted if x in missing]
        for name, version in library.undefined:
            if version:
                owner = library.versions.get(version)
            else:  # says not whose it is: any library that is loaded will do
                is_known = name in defined or any(hasattr(x, name) for x in others)
                owner = None if is_known or not absent else absent[0]
            if owner in missing:
                missing[owner].add((name, version))
    return missing


def write_library(path: Path, symbols: set[tuple[str, str]]) -> None:
    """Writes a library whose functions all return 1: to CUDA's callers an error."""
    lines = [f'int f{n}(void) __asm__("{name}"); int f{n}(void) {{ return 1; }}' for n, (name, _) in enumerate(symbols)]
    versions: dict[str, list[str]] = {}
    for name, version in symbols:
        versions.setdefault(version, []).append(name)
    named = {version: names for version, names in versions.items() if version}
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "empty.c"), Path(folder, "versions.map")
        source.write_text("\n".join(lines) + "\n")
        script.write_text("".join(f"{x} {{ global: {'; '.join(names)}; }};\n" for x, names in named.items()))
        by_version = [f"-Wl,--version-script={script}"] if named else []
        words = ["cc", "-shared", "-fPIC", "-o", str(path), f"-Wl,-soname,{path.name}", *by_version, str(source)]
        subprocess.run(words, check=True)


def main(words: list[str]) -> None:
    requirement, *options = words
    pip("--no-deps", requirement, *options)
    name = re.split(r"[^\w.-]", requirement)[0]
    print(f"{name}: what pip says to miss is CUDA's, and left out on purpose", flush=True)
    pip(*[x for x in map(without_cuda, requires(name) or ()) if x is not None], *options)
    for file in files(name) or ():
        if file.name == "METADATA":
            path = Path(str(file.locate()))
            path.write_text(metadata_without_cuda(path.read_text(encoding="utf-8")), encoding="utf-8")
    packages = Path(sysconfig.get_path("platlib"))
    ours = packages / "torch" / "lib"
    cuda = sorted({x.parent for x in packages.glob("nvidia/**/*.so*")})
    for library, symbols in missing_symbols([ours / x for x in _ROOTS], [ours, *cuda]).items():
        write_library(ours / library, symbols)
        print(f"{library}: empty, {len(symbols)} functions")
    told = "import torch; print('torch', torch.__version__, 'sees a GPU:', torch.cuda.is_available())"
    subprocess.run([sys.executable, "-c", told], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
