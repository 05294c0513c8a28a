"""What works on this machine's GPU, how fast, and what to send us: `make gpu`.

Prints what it finds; runs the smoke tests in 2 minutes, the others in 8, then the benchmark beside other libraries.
Leaves a report, a picture and the tests' output in a directory, and a paragraph for an issue on the screen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "numpy", "flash_attn")
WORKERS = 8  # of pytest, where it can have several
SMOKE = ("tests/conformance/backward/test_gpu_backward.py", "tests/gpu/test_gpu.py", "-k", "option or tile or layouts")
# what is known of a failure, by words of its text
KNOWN = {
    r"too little (shared|registers)|OutOfResources": "a row of gpu/tiles.py is too large for this GPU: run `speedlight "
    "tune --device cuda`, and send what it prints",
    r"CompilationError|CompileError|PassManager": "this Triton cannot compile a kernel: 3.6 is what kernels were "
    "compiled with; send the line that it names",
    r"illegal memory access|misaligned": "an address is wrong: run the test alone under CUDA_LAUNCH_BLOCKING=1, and "
    "send its name",
    r"outside the bound|wrong infinities|NaN in": "a result is wrong: send the test's name and the line with `bound`",
    r"OutOfMemoryError|out of memory": "other processes use this GPU's memory: run again when they have ended",
    r"no kernel image|not compatible": "this PyTorch was built for other GPUs: install one for this compute capability",
    r"ModuleNotFoundError|ImportError": "a package is missing: PyTorch, Triton, llvmlite, ml_dtypes, pytest and "
    "Hypothesis are needed",
}


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


def run_tests(name: str, words: Iterable[str], seconds: float) -> Outcome:
    """Runs tests for so long at most; what was not run by then is told."""
    many = ["-n", str(WORKERS)] if find_spec("xdist") else []
    options = ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=default", "-q", "-rf", *many]
    command = [sys.executable, "-m", "pytest", *options, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
        output, end = done.stdout + done.stderr, ""
    except subprocess.TimeoutExpired as error:
        output, end = _text(error.stdout), f" (stopped after {seconds:.0f} s)"
    lines = [x for x in output.splitlines() if x.strip()]
    failed = [x.removeprefix("FAILED ") for x in lines if x.startswith(("FAILED ", "ERROR "))]
    known = known_of(output) if failed or "passed" not in output else []
    return Outcome(name, (lines[-1] if lines else "nothing ran") + end, failed, known, output)


def run_benchmark(turns: str, output: Path) -> list[Outcome]:
    """Runs the benchmark, whose rows go to the output; returns what ended it, if anything did."""
    command = [sys.executable, ROOT / "benchmarks" / "run.py", "gpu", "--turns", turns, "-o", output]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    except KeyboardInterrupt:  # of somebody who has no more time: rows until then are kept
        return [Outcome("benchmark", "interrupted", [], [], "")]
    if not done.returncode or "Traceback" not in done.stderr:
        return []
    return [Outcome("benchmark", done.stderr.splitlines()[-1], [], known_of(done.stderr), done.stderr)]


def _text(x: str | bytes | None) -> str:
    return x.decode("utf-8", "replace") if isinstance(x, bytes) else x or ""


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


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files of tests")
    parser.add_argument("--turns", default="5", help="samples of each row of the benchmark; 0: none")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    given = parser.parse_args(words)
    about, tests, start = found(), list[Outcome](), time.time()
    print(*(f"{name}: {x}" for name, x in about.items()), sep="\n", flush=True)
    if not sees_gpu():
        print("gpu: expected a CUDA device; PyTorch sees none here. `make gpu-check` needs none.", file=sys.stderr)
        return 2
    given.output.mkdir(parents=True, exist_ok=True)
    for name, which, seconds in (("smoke tests", SMOKE, 120), ("all tests", given.tests, 480)):
        tests.append(run_tests(name, which, seconds) if which else Outcome(name, "none were asked for", [], [], ""))
        print(f"{name}: {tests[-1].summary}", *tests[-1].failed, *tests[-1].known, sep="\n  ", flush=True)
        (given.output / f"{name.replace(' ', '-')}.txt").write_text(tests[-1].output)
    if given.turns != "0":
        tests += run_benchmark(given.turns, given.output)
    rows = [x for file in given.output.glob("*.json") if file.stat().st_mtime > start for x in _rows_of(file)]
    print(draw(rows, given.output / "speed.png") if rows else "no rows of the benchmark")
    print("", "Please paste this into an issue:", "", paragraph(about, tests, rows), sep="\n")
    print(f"\nand attach what lies in {given.output}")
    return int(any([x.failed or "passed" not in x.summary for x in tests]))


def _rows_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text()).get("rows", [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
