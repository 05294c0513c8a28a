"""Threads of the engine and fresh interpreters, as tests start them and look at them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from speedlight.cpu.runtime import workers


def run(code: str, **environment: str) -> str:
    """A fresh interpreter; its output."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def together(work: Callable[[Any], None], given: Any) -> None:
    """Calls work(x) for every x of `given` in a thread of its own; all must end, and none may raise."""
    errors: list[BaseException] = []

    def guarded(x: Any) -> None:
        try:
            work(x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(x,)) for x in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors and not any(thread.is_alive() for thread in threads), errors


def use(monkeypatch, way: str) -> None:
    """Regions run on Python's threads ("helpers"), on ours outside Python ("threads") or on OpenMP's."""
    if way == "helpers":
        monkeypatch.setattr(workers, "_ours", None)
        monkeypatch.setattr(workers, "_new_threads", lambda: None)
    if way == "openmp":
        import torch  # noqa: F401 - brings it

        own = time.pthread_getcpuclockid(threading.get_ident())  # the caller's: it runs, as that of an awake team does
        openmp = workers._openmp(True)
        assert openmp is not None
        monkeypatch.setattr(workers, "_team_of", lambda *_: (openmp.parallel, own))
    else:
        monkeypatch.setattr(workers, "_openmp", lambda _: None)


def up() -> bool:
    """Whether all threads that serve regions have begun."""
    return all(x.up.locked() for x in workers._helpers)


BIG = """import numpy as np, speedlight as sl
from speedlight.cpu.runtime import workers
workers._limit = lambda: 1024  # as conftest.py
q = np.random.default_rng(0).standard_normal((1, 4, 600, 64)).astype(np.float32)
"""


def count_threads() -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()


def wait_until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)
