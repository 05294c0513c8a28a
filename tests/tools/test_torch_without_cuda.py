"""Libraries that a shared library wants and that are nowhere: empty ones take their places."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import torch_without_cuda as tool

ELF = pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("cc") and shutil.which("readelf")),
    reason="wants Linux, a C compiler and readelf",
)


@pytest.mark.parametrize(
    ("requirement", "kept"),
    [
        ("sympy>=1.13.3", "sympy>=1.13.3"),
        ('triton==3.6.0; platform_system == "Linux"', 'triton==3.6.0; platform_system == "Linux"'),
        ('cuda-toolkit[cublas,cudart,cupti,nvrtc]==13.0.2; p == "Linux"', "cuda-toolkit[cudart,cupti]==13.0.2; p"),
        ("nvidia-cuda-runtime-cu12==12.8.90", "nvidia-cuda-runtime-cu12==12.8.90"),
        ("nvidia-cudnn-cu13==9.19.0.56", None),
        ("cuda-bindings<14,>=13.0.3", None),
        ('optree>=0.13.0; extra == "optree"', None),
    ],
)
def test_requirements_without_cuda(requirement, kept):
    found = tool.without_cuda(requirement)
    assert found is None if kept is None else found.startswith(kept)


def test_metadata_without_cuda():
    """Later calls of pip install nothing of CUDA's; extras, and what is no requirement, stay."""
    text = (
        "Name: torch\nRequires-Dist: sympy>=1.13.3\nRequires-Dist: nvidia-cudnn-cu13==9.24.0.43; p == 'Linux'\n"
        "Requires-Dist: cuda-toolkit[cublas,cudart]==13.0.3\nRequires-Dist: pyyaml; extra == 'pyyaml'\n\nnvidia-cudnn\n"
    )
    assert tool.metadata_without_cuda(text) == (
        "Name: torch\nRequires-Dist: sympy>=1.13.3\nRequires-Dist: cuda-toolkit[cudart,cupti]==13.0.3\n"
        "Requires-Dist: pyyaml; extra == 'pyyaml'\n\nnvidia-cudnn\n"
    )


def built(folder: Path, name: str, source: str, *words: str) -> Path:
    path = folder / name
    (folder / "source.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", "-o", path, f"-Wl,-soname,{name}", folder / "source.c", *words]
    subprocess.run(command, check=True)
    return path


@ELF
def test_a_library_whose_own_are_gone_can_be_loaded(tmp_path):
    """With a version of its own or none; through another library, too. What the system has is not made again."""
    script = tmp_path / "versions.map"
    script.write_text("GONE_2 { global: versioned; };\n")
    one = built(tmp_path, "libgone.so.2", "int versioned(void) { return 7; }", f"-Wl,--version-script={script}")
    two = built(tmp_path, "libplain.so.1", "int plain(void) { return 7; }")
    inner = built(tmp_path, "libinner.so", "int plain(void); int inner(void) { return plain(); }", str(two))
    source = (
        "#include <math.h>\nint versioned(void); int inner(void); extern void *PyLong_FromLong(long);\n"
        "double of(double x) { return PyLong_FromLong(3) ? 10 * versioned() + inner() + cos(x) : 0; }"
    )
    outer = built(tmp_path, "libouter.so", source, str(one), str(inner), "-lm", f"-Wl,-rpath,{tmp_path}")
    one.unlink()
    two.unlink()
    missing = tool.missing_symbols([outer], [tmp_path])
    assert missing == {"libgone.so.2": {("versioned", "GONE_2")}, "libplain.so.1": {("plain", "")}}
    for name, symbols in missing.items():
        tool.write_library(tmp_path / name, symbols)
    ctypes.CDLL(str(tmp_path / "libplain.so.1"))  # which libinner.so has no path to
    of = ctypes.CDLL(str(outer)).of
    of.restype, of.argtypes = ctypes.c_double, (ctypes.c_double,)
    assert of(0.0) == 12.0
