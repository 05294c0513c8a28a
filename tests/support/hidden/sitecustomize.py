"""Hides vector units from this process, as if the machine lacked them: SPEEDLIGHT_TEST_HIDE=avx512.

Python imports a module of this name first of all if its folder is on PYTHONPATH: conftest.py puts it there for the
processes that tests start. The package knows nothing of it: it reads what Linux says, and Linux says less.
"""

from __future__ import annotations

import builtins
import io
import os
import re
from typing import Any

HIDDEN = os.environ.get("SPEEDLIGHT_TEST_HIDE", "")  # what names of flags begin with
# libraries that ask the CPU itself: what makes each of them compute as without AVX-512
LIBRARIES = {
    "ATEN_CPU_CAPABILITY": "avx2",  # PyTorch
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",  # NumPy 2.4 or later
}
LEVEL2 = "512K\n"  # a core's second-level cache, which AMD's CPUs with AVX2 have

_open = builtins.open


def open_hiding(file: Any, *args: Any, **options: Any) -> Any:
    """open() on a machine that lacks the flags."""
    if file == "/proc/cpuinfo":
        with _open(file) as f:
            return io.StringIO(re.sub(rf"\b{HIDDEN}\w*", "", f.read()))
    if file == "/sys/devices/system/cpu/cpu0/cache/index2/size":
        return io.StringIO(LEVEL2)
    return _open(file, *args, **options)


if HIDDEN:
    os.environ.update(LIBRARIES)
    builtins.open = open_hiding
