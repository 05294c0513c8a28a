"""The tests of a GPU, ended in time: a test that fails is told of at once, with what is known of its words."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
WORKERS = 14  # of pytest, at most, where it can have several: most of their time goes to compilers
WORKER_MIB = 2000  # of the GPU's memory for each
# what is known of a failure, by words of its text
KNOWN = {
    r"too little (shared|registers)|OutOfResources": "a row of gpu/tiles.py is too large for this GPU: run `speedlight "
    "tune --device cuda`, and send what it prints",
    r"CompilationError|CompileError|PassManager": "this Triton cannot compile a kernel: 3.6 is what kernels were "
    "compiled with; send the line that it names",
    r"illegal memory access|misaligned": "an address is wrong: run the test alone under CUDA_LAUNCH_BLOCKING=1, and "
    "send its name",
    r"stream is capturing": "a call waits or uploads while a CUDA graph is captured: send the test's name",
    r"outside the bound|wrong infinities|NaN in": "a result is wrong: send the test's name and the line with `bound`",
    r"OutOfMemoryError|out of memory": "other processes use this GPU's memory: run again when they have ended",
    r"no kernel image|not compatible": "this PyTorch was built for other GPUs: install one for this compute capability",
    r"ModuleNotFoundError|ImportError": "a package is missing: PyTorch, Triton, llvmlite, ml_dtypes, pytest and "
    "Hypothesis are needed",
}


_BAD = ("FAILED ", "ERROR ")  # beginnings of lines


class Outcome(NamedTuple):
    """The end of a run of tests: pytest's last line, failed tests and what is known of them, and its whole output."""

    name: str
    summary: str
    failed: list[str]
    known: list[str]
    output: str


def known_of(text: str) -> list[str]:
    """Returns what is known of the failures in a text."""
    return [advice for words, advice in KNOWN.items() if re.search(words, text)]


def pytest_runtest_logreport(report: Any, word: str = "FAILED") -> None:
    """Prints a test that fails as it fails, with the end of its text: this file is a plugin of the tests that it runs,
    which may be stopped before pytest tells of them.
    """
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        text, crash = str(report.longrepr).strip(), getattr(report.longrepr, "reprcrash", None)
        why = crash.message if crash else text.rpartition("\n")[2]
        print(f"\n{text[-2500:]}\n{word} {report.nodeid} - {why.partition(chr(10))[0][:200]}", flush=True)


def pytest_collectreport(report: Any) -> None:
    """Prints a file that cannot be imported."""
    pytest_runtest_logreport(report, "ERROR")


def workers(memory: int) -> int:
    """Returns how many processes of tests run at once on a GPU of so many MiB."""
    return max(1, min(WORKERS, (os.cpu_count() or 1) - 2, memory // WORKER_MIB))


def run_tests(name: str, words: Iterable[str], seconds: float, processes: int = 1) -> Outcome:
    """Runs tests for so long at most; what was not run by then is told."""
    many = ["-n", str(processes)] if find_spec("xdist") and processes > 1 else []
    options = ["-p", "gpu_boxes.testing", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=default"]
    command = [sys.executable, "-m", "pytest", *options, "-q", "-rN", *many, *words]
    paths = [str(ROOT / "tools"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {name: x for name, x in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    lines, is_late = _lines_of(command, seconds, own | {"PYTHONPATH": os.pathsep.join(paths)})
    failed = [line.partition(" ")[2] for line in lines if line.startswith(_BAD)]
    output, told = "\n".join(lines), [x for x in lines if x.strip()]
    known = known_of(output) if failed or "passed" not in output else []
    end = f" (stopped after {seconds:.0f} s)" if is_late else ""
    return Outcome(name, (told[-1] if told else "nothing ran") + end, failed, known, output)


def _lines_of(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[list[str], bool]:
    """Returns the lines that a command prints, and whether it and its processes were ended after so many seconds.
    Prints those of failures as they come.
    """
    lines, is_late = list[str](), threading.Event()

    def end() -> None:
        is_late.set()
        os.killpg(process.pid, signal.SIGKILL)

    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=ROOT,
        env=environment, start_new_session=True,
    )  # fmt: skip
    timer = threading.Timer(seconds, end)
    timer.start()
    with process:
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip("\n"))
                if line.startswith(_BAD):
                    print(f"  {lines[-1][:300]}", flush=True)
        finally:
            timer.cancel()
            if process.poll() is None:  # Ctrl-C, or a process that closed its output first
                os.killpg(process.pid, signal.SIGKILL)
    return lines, is_late.is_set()


def every_test() -> list[str]:
    """Returns the files of tests that a GPU runs; those of several processes on one GPU take too long."""
    left_out = ("test_gpu_ahead.py", "test_gpu_distributed.py")
    return [str(x.relative_to(ROOT)) for x in sorted(ROOT.glob("tests/**/test_gpu*.py")) if x.name not in left_out]
