"""Processes that need the same kernels at the same time: one compiles each, the others wait, and read it."""

from __future__ import annotations

import fcntl
import os
from typing import Any

from engines import one_vector, tuned

from speedlight.cpu.runtime import compile as kernels

_widths = tuned(**one_vector(1))


def make_in_turn(folder: str) -> None:
    """From now on this process is one of those that share `folder`; in a short run its panels have one width, as
    conftest.one_width has it.
    """
    make = kernels._make

    def in_turn(shape: Any) -> Any:
        with open(f"{folder}/turn", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            return make(shape)

    kernels._make = in_turn
    if os.environ.get("SPEEDLIGHT_FULL") != "1":
        _widths.__enter__()
