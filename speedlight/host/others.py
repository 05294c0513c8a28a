"""How much of the CPUs other programs take, measured: busy time of the machine less that of this process."""

from __future__ import annotations

import os
import time

from ..errors import pass_on

_IDLE = (3, 4)  # columns of /proc/stat: idle, and waiting for disks
_COLUMNS = 8  # time of guests is counted in that of users, too
_LEAST = 0.5  # of the time that CPUs have: systems that count less do not count


class Others:
    """Measures the share of the CPUs that others take from now on."""

    def __init__(self) -> None:
        self._start = _times()

    def share(self) -> float | None:
        """Returns the share of the CPUs' time, 0 to 1; None where the system does not say."""
        end = _times()
        if self._start is None or end is None:
            return None
        clock, counted, busy, own = [b - a for a, b in zip(self._start, end, strict=True)]
        if counted < _LEAST * clock or counted <= 0:
            return None
        return min(1.0, max(0.0, busy - own) / counted)


def _times() -> tuple[float, float, float, float] | None:
    """Returns CPU seconds until now: by the clock, counted by Linux, those that were not idle, and this process's."""
    try:
        with open("/proc/stat") as f:
            lines = [line.split() for line in f if line.startswith("cpu") and line[3] != " "]
        usable = os.sched_getaffinity(0)
        own = os.times()
        counts = [[int(x) for x in words[1 : 1 + _COLUMNS]] for words in lines if int(words[0][3:]) in usable]
        per_second = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError) as error:  # another system
        pass_on(error, Exception)
        return None
    total = sum([sum(row) for row in counts]) / per_second
    idle = sum([row[at] for row in counts for at in _IDLE]) / per_second
    clock = time.perf_counter() * len(counts)
    return clock, total, total - idle, sum(own[:4])
