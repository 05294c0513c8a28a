"""What works on this machine's GPU, how fast, and what to send us: `make gpu`, or this file with a Python.

Prints what it finds; then shares the minutes that it has: a tenth for the smoke tests, four for the benchmark beside
other libraries, main figures first, and the rest for all tests. A test that fails is printed at once. Leaves a report,
a picture and the tests' output in a directory, and a paragraph for an issue on the screen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "numpy", "flash_attn")
WORKERS = 14  # of pytest, at most, where it can have several: most of their time goes to compilers
WORKER_MIB = 2000  # of the GPU's memory for each
# of the budget, what smoke tests and the benchmark have at most; all tests have what is left
SHARES = {"smoke tests": 0.1, "benchmark": 0.4}
SMOKE = ("tests/conformance/backward/test_gpu_backward.py", "tests/gpu/test_gpu.py", "-k", "option or tile or layouts")
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


def found() -> dict[str, str]:
    """Returns the GPU, its driver, and the packages that matter."""
    names = "name,driver_version,memory.total,compute_cap"
    try:
        command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
        gpu = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip() or "none"
    except (OSError, subprocess.TimeoutExpired):
        gpu = "nvidia-smi does not answer"
    return {"GPU (name, driver, memory, capability)": gpu, "Python": sys.version.split()[0]} | {
        name: _version(name) for name in PACKAGES
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


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
    options = ["-p", Path(__file__).stem, "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=default"]
    command = [sys.executable, "-m", "pytest", *options, "-q", "-rN", *many, *words]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
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


def run_benchmark(turns: str, output: Path, seconds: float) -> list[Outcome]:
    """Runs the benchmark for so long at most; its rows go to the output as they are measured. Returns what ended it,
    if anything did.
    """
    command = [sys.executable, ROOT / "benchmarks" / "run.py", "gpu", "--turns", turns, "-o", output]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=seconds)
    except KeyboardInterrupt:  # of somebody who has no more time: rows until then are kept
        return [Outcome("benchmark", "interrupted", [], [], "")]
    except subprocess.TimeoutExpired:
        return [Outcome("benchmark", f"stopped after {seconds:.0f} s; `run.py gpu` measures every row", [], [], "")]
    if not done.returncode or "Traceback" not in done.stderr:
        return []
    return [Outcome("benchmark", done.stderr.splitlines()[-1], [], known_of(done.stderr), done.stderr)]


def paragraph(about: dict[str, str], tests: list[Outcome], rows: list[dict[str, Any]]) -> str:
    """Returns what to paste into an issue."""
    lines = ["GPU report", "", *(f"- {name}: {x}" for name, x in about.items())]
    for x in tests:
        lines += [f"- {x.name}: {x.summary}", *(f"  - {each}" for each in x.failed[:20])]
        lines += [f"  - known: {each}" for each in x.known]
    lines += [f"- {x}" for x in fastest(rows)]
    return "\n".join(lines)


def fastest(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yields each row's speed, and that of the fastest other library."""
    for row in rows:
        if "refused" in row:
            yield f"{row['name']}: REFUSED: {row['refused']}"
            continue
        times = {name: x[2] for name, x in row["seconds"].items()}
        ours = times.pop("speedlight")
        others = {name: x for name, x in times.items() if not name.startswith("speedlight")}
        best = min(others, key=lambda name: others[name], default=None)
        beside = "no other library" if best is None else f"{others[best] / ours:.2f} of the speed of {best}"
        yield f"{row['name']}: {ours * 1e6:,.0f} us, {beside}"


def draw(rows: list[dict[str, Any]], path: Path) -> str:
    """Draws TFLOP/s of every row that has them; says where, or why not."""
    if not find_spec("matplotlib"):
        return "no picture: matplotlib is not installed"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [x for x in rows if x.get("tflops")]
    names = sorted({name for x in shown for name in x["tflops"]}, key=lambda name: (name != "speedlight", name))
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.3 * len(shown)))
    for n, name in enumerate(names):
        at = [y + n * 0.8 / len(names) for y, x in enumerate(shown) if name in x["tflops"]]
        axes.barh(at, [x["tflops"][name] for x in shown if name in x["tflops"]], 0.8 / len(names), label=name)
    axes.set_yticks(range(len(shown)), [x["name"] for x in shown], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s")
    axes.legend(fontsize=6)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    return f"picture: {path}"


def sees_gpu() -> bool:
    """Returns whether PyTorch has a GPU, or Triton's interpreter takes its place."""
    if not find_spec("torch"):
        return False
    import torch

    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def every_test() -> list[str]:
    """Returns the files of tests that a GPU runs; those of several processes on one GPU take too long."""
    left_out = ("test_gpu_ahead.py", "test_gpu_distributed.py")
    return [str(x.relative_to(ROOT)) for x in sorted(ROOT.glob("tests/**/test_gpu*.py")) if x.name not in left_out]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files of tests; by default those that a GPU runs")
    parser.add_argument("--minutes", type=float, default=20, help="how long all of it may take; default 20")
    parser.add_argument("--turns", default="5", help="samples of each row of the benchmark; 0: none")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", help="a folder")
    given = parser.parse_args(words)
    about, outcomes, start = found(), list[Outcome](), time.time()
    print(*(f"{name}: {x}" for name, x in about.items()), sep="\n", flush=True)
    if not sees_gpu():
        print("gpu: expected a CUDA device; PyTorch sees none here. `make gpu-check` needs none.", file=sys.stderr)
        return 2
    given.output.mkdir(parents=True, exist_ok=True)
    budget = 60 * given.minutes
    memory = re.search(r"(\d+) MiB", "".join(about.values()))
    processes = workers(int(memory[1]) if memory else 0)

    def tested(name: str, which: Iterable[str], seconds: float) -> None:
        print(f"{name}, at most {seconds:.0f} s, {processes} at once", flush=True)
        outcomes.append(run_tests(name, which, seconds, processes))
        print(f"{name}: {outcomes[-1].summary}", *outcomes[-1].known, sep="\n  ", flush=True)
        (given.output / f"{name.replace(' ', '-')}.txt").write_text(outcomes[-1].output)

    tested("smoke tests", SMOKE, SHARES["smoke tests"] * budget)
    if given.turns != "0":
        outcomes += run_benchmark(given.turns, given.output, SHARES["benchmark"] * budget)
    tested("all tests", given.tests or every_test(), max(1.0, budget - (time.time() - start)))
    rows = [x for file in given.output.glob("*.json") if file.stat().st_mtime > start for x in _rows_of(file)]
    print(draw(rows, given.output / "speed.png") if rows else "no rows of the benchmark")
    report = paragraph(about, outcomes, rows)
    (given.output / "report.txt").write_text(report + "\n")
    print("", "Please paste this into an issue:", "", report, sep="\n")
    print(f"\nand attach what lies in {given.output}")
    return int(any([went_wrong(x) for x in outcomes]))


def went_wrong(x: Outcome) -> bool:
    """Returns whether a test failed, none passed, or the benchmark raised; one that had no more time is right."""
    if x.name == "benchmark":
        return bool(x.output)
    return bool(x.failed) or "passed" not in x.summary


def _rows_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text()).get("rows", [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
