"""Lets PyTorch's CUDA build run without CUDA's gigabytes, for tests on a CPU: PYTHON tools/cuda_stubs.py

Install it with `pip install --no-deps torch` and run this with the same interpreter. Each CUDA library that the
loader does not find gets a stub beside PyTorch's own, whose functions fail as if there were no GPU. PyTorch's
requirements of CUDA leave its metadata, so that pip installs the others alone. A build for CPUs is left as it is.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice: PyTorch takes it for "no GPU" without a warning
LOADED = ("libtorch_python.so", "libtorch_global_deps.so")  # what `import torch` loads, with what they need
OF_CUDA = re.compile(r"^Requires-Dist: (nvidia-|cuda-).*\n", re.MULTILINE)


def main() -> None:
    """Makes the stubs and takes CUDA out of the requirements of the interpreter's PyTorch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"torch: expected it in {sys.prefix}; pip install --no-deps torch")
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    missing, undefined = links_of(folder)
    providers = providers_of(folder)
    functions: dict[str, dict[str, set[str]]] = {library: {} for library in missing}
    for version, library in providers.items():
        if library in functions:
            functions[library][version] = set()
    for name, version in undefined:
        library = providers.get(version, "") if version else next(iter(missing), "")
        if library in functions:
            functions[library].setdefault(version, set()).add(name)
    for library, versions in functions.items():
        make_stub(folder / library, versions)
    print(f"stubs: {', '.join(missing) or 'none is needed'}")
    leave_out_requirements()


def links_of(folder: Path) -> tuple[list[str], set[tuple[str, str]]]:
    """Returns the libraries that the loader does not find, and what is undefined without them: (name, version)."""
    text = ""
    for name in LOADED:
        done = subprocess.run(["ldd", "-r", str(folder / name)], capture_output=True, text=True)
        text += done.stdout + done.stderr
    missing = dict.fromkeys(re.findall(r"(\S+) => not found", text))
    undefined = re.findall(r"undefined symbol: (\w+)(?:, version (\S+))?", text)
    return list(missing), {(name, version) for name, version in undefined if not re.match("_?Py", name)}


def providers_of(folder: Path) -> dict[str, str]:
    """Returns the library that should define each version of symbols that PyTorch's libraries need."""
    providers = {}
    for path in folder.glob("*.so"):
        done = subprocess.run(["readelf", "--version-info", "--wide", str(path)], capture_output=True, text=True)
        library = ""
        for kind, name in re.findall(r"(File|Name): (\S+)", done.stdout):
            if kind == "File":
                library = name
            elif library:
                providers[name] = library
    return providers


def make_stub(path: Path, versions: dict[str, set[str]]) -> None:
    """Compiles a library of functions that return NO_DEVICE, under the versions that the loader asks for."""
    names = sorted(set().union(*versions.values()))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "stub.c")
        source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names))
        script = Path(folder, "versions")
        script.write_text(
            "".join(
                f"{version} {{ global: {' '.join(name + ';' for name in sorted(of))} }};\n"
                for version, of in versions.items()
                if version
            )
        )
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", str(path), str(source)]
        command.append(f"-Wl,-soname,{path.name}")
        if any(versions):
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def leave_out_requirements() -> None:
    """Takes CUDA's packages out of PyTorch's metadata."""
    for file in importlib.metadata.files("torch") or ():
        if file.name == "METADATA":
            path = Path(str(file.locate()))
            path.write_text(OF_CUDA.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
