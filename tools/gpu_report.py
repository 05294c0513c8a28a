"""What works on this machine's GPU, how fast, and what to send us: `make gpu`, or this file with a Python.

Three boxes, each within its time, on a machine that may be there for minutes alone:

    one     170 s   kernels are compiled; problems beside float64; main rows beside cuDNN and flash; the host's time
    two     245 s   candidates of the table of tiles; every row of the benchmark
    three   205 s   all tests; the memory checker on a small problem
    pack            without a GPU: compiles what boxes launch, into a file that box one and two unpack

Outcomes are written as they come, so whatever ends a box leaves all until then. What failed is tried again with
plainer tiles. A paragraph for an issue ends each box.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tools")]
WORK = Path("/tmp/speedlight-gpu")  # kernels that travel have this path within
CACHES = {
    "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "MPLCONFIGDIR": "matplotlib",
    "SPEEDLIGHT_CACHE_DIR": "speedlight",
}  # fmt: skip
SECONDS = {"one": 170, "two": 245, "three": 205}
PACKAGES = ("torch", "triton", "numpy", "flash_attn")
AT_ONCE = 5  # problems
FLEX_AT_ONCE = 12  # graphs, each of which compiles for ten seconds or more
MOST_AGAIN = 4  # failures that are tried again
_END = 5  # seconds that the end of a box takes


def set_environment() -> None:
    """Puts caches where anybody may write, and asks for a GPU without starting CUDA, since processes are forked."""
    for name, folder in CACHES.items():
        at = WORK / folder
        if name not in os.environ:
            at.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.environ[name] = str(at)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its processes would outlive those that are ended


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


class Box:
    """A box: its steps share its seconds, and a step has what is left at most."""

    def __init__(self, name: str, given: argparse.Namespace, about: dict[str, str]) -> None:
        from gpu_boxes.running import Journal

        self.name, self.given, self.about = name, given, about
        self.end = time.monotonic() + (given.seconds or SECONDS[name]) - _END
        folder = given.output / f"box-{name}"
        earlier = len(list(given.output.glob(f"box-{name}*")))
        self.journal = Journal(folder.with_name(f"{folder.name}-{earlier + 1}") if earlier else folder)
        words = about["GPU (name, driver, memory, capability)"]
        found = re.search(r"(\d+)\.(\d+)$", words.partition("\n")[0])
        self.capability = (int(found[1]), int(found[2])) if found else (9, 0)
        memory = re.search(r"(\d+) MiB", words)
        self.memory = int(memory[1]) if memory else 0

    def left(self, most: float = 1e9) -> float:
        return max(0.0, min(most, self.end - time.monotonic()))

    def say(self, text: str) -> None:
        print(f"--- {text} ({self.left():.0f} s left)", flush=True)

    def items(self, step: str, items: Iterable[Any], seconds: float, each: float, **how: Any) -> None:
        """Runs items; tries some that failed again with plainer tiles, in what is left of the step."""
        from gpu_boxes.problems import PLAINER, plainer
        from gpu_boxes.running import run_items

        items, seconds = list(items), self.left(seconds)
        self.say(f"{step}: {len(items)}, at most {seconds:.0f} s")
        end = time.monotonic() + seconds
        outcomes = run_items(items, step, self.journal, seconds=seconds, each=each, **how)
        failed = [x for x in items if not outcomes[x.name].is_right]
        again = [plainer(x, name) for x in failed[:MOST_AGAIN] for name in PLAINER]
        if again and self.left(end - time.monotonic()) > 5:
            more = self.left(end - time.monotonic())
            run_items(again, f"{step} again", self.journal, seconds=more, each=each, at_once=how.get("at_once", 1))
        right = sum([outcomes[x.name].is_right and outcomes[x.name].seconds > 0 for x in items])
        print(f"{step}: {right} of {len(items)} are right")
        self.write_report()  # whoever stops the box later finds this much

    def write_report(self) -> str:
        text = report(self)
        (self.journal.folder / "report.txt").write_text(text + "\n")
        return text

    def kernels(self, items: Callable[[], Iterable[Any]], seconds: float) -> None:
        """Compiles what items launch, in a process of its own: what recording changes stays there."""
        from gpu_boxes import problems, recording
        from gpu_boxes.running import Item

        print(recording.unpack(self.given.kernels), flush=True)

        def run() -> str:
            problems.is_dry = True
            most = max(1, (os.cpu_count() or 2) - 1)
            return recording.compile_all(
                items(), self.capability, self.journal, seconds=self.left(seconds), processes=most
            )

        if not self.given.dry:
            self.items("compiling", [Item("kernels", run)], seconds, seconds)


def box_one(box: Box) -> None:
    from gpu_boxes import measuring, problems

    box.kernels(lambda: [*problems.problems(), *measuring.main_rows()], 45)
    box.items("problems", problems.problems(), 55, 45, at_once=AT_ONCE)
    box.items("main rows", measuring.main_rows(), 60, 40, is_alone=False)


def box_two(box: Box) -> None:
    from gpu_boxes import measuring

    box.kernels(lambda: [*measuring.tiles(), *measuring.every_row()], 40)
    box.items("FlexAttention", measuring.flex_graphs(), 45, 45, at_once=FLEX_AT_ONCE)
    box.items("tiles", measuring.tiles(), 80, 30, is_alone=False)
    box.items("rows", measuring.every_row(), 1e9, 60, is_alone=False)


def box_three(box: Box) -> None:
    from gpu_boxes import testing
    from gpu_boxes.running import Outcome

    if box.given.dry:
        print("a dry run has no tests: `make gpu-check` runs them")
        return
    processes = testing.workers(box.memory)
    box.say(f"tests, {processes} at once")
    told = testing.run_tests("all tests", box.given.tests or testing.every_test(), box.left(155), processes)
    (box.journal.folder / "tests.txt").write_text(told.output)
    box.journal.add("tests", "all tests", Outcome(told.summary, is_right=not told.failed))
    for name in told.failed:
        box.journal.add("tests", name, Outcome("failed", is_right=False))
    print(told.summary, *told.known, sep="\n")
    files = [x.partition(" ")[0] for x in told.failed[:MOST_AGAIN]]
    if files and box.left() > 60:
        os.environ["SPEEDLIGHT_GPU_TMA"] = "0"
        again = testing.run_tests("without TMA", files, box.left(30), processes)
        os.environ.pop("SPEEDLIGHT_GPU_TMA")
        box.journal.add("tests again", "without TMA", Outcome(again.summary, is_right=not again.failed))
    check_memory(box)


def check_memory(box: Box) -> None:
    """Runs a problem under compute-sanitizer, if that is there."""
    from gpu_boxes.running import Outcome

    tool, seconds = shutil.which("compute-sanitizer"), box.left(45)
    if tool is None or seconds < 10:
        print("no memory checker: compute-sanitizer is not installed, or no time is left")
        return
    command = [tool, "--tool", "memcheck", "--print-limit", "3", "--error-exitcode", "3", sys.executable, __file__]
    with open(box.journal.folder / "memcheck.txt", "w") as file:
        try:
            code = subprocess.run(
                [*command, "problem"], stdout=file, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    text = "no time was left" if code is None else f"ended with {code}"
    box.journal.add("memory", "memcheck", Outcome(text, is_right=not code))
    print(f"memcheck: {text}")


def pack(given: argparse.Namespace) -> int:
    """Compiles what boxes one and two launch, where no GPU is."""
    from gpu_boxes import measuring, problems, recording
    from gpu_boxes.running import Journal

    problems.is_dry = True
    os.environ["TRITON_CACHE_DIR"] = str(WORK / "triton")
    shutil.rmtree(WORK / "triton", ignore_errors=True)
    (WORK / "triton").mkdir(parents=True)
    items = [*problems.problems(), *measuring.main_rows(), *measuring.tiles(), *measuring.every_row()]
    items = [x for x in items if given.only in x.name]
    journal, start = Journal(given.output / "pack"), time.monotonic()
    most = given.processes or os.cpu_count() or 1
    text = recording.compile_all(items, (9, 0), journal, seconds=given.seconds or 3600, processes=most)
    recording.pack(given.kernels)
    size = given.kernels.stat().st_size / 2**20
    print(f"{text} in {time.monotonic() - start:.0f} s; {given.kernels}: {size:.1f} MiB")
    return int("WRONG" in text)


def report(box: Box) -> str:
    """Returns what to paste into an issue."""
    from gpu_boxes.running import short
    from gpu_boxes.testing import known_of

    lines = [f"GPU report, box {box.name}", "", *(f"- {name}: {x}" for name, x in box.about.items())]
    journal = [x for x in box.journal.lines() if x["step"] != "kernels"]
    for step in dict.fromkeys(x["step"] for x in journal):
        of_step = [x for x in journal if x["step"] == step]
        lines.append(f"- {step}: {sum(x['right'] for x in of_step)} of {len(of_step)}")
        for x in of_step:
            if not x["right"]:
                lines.append(f"  - FAILED {x['name']}: {short(x['result'])}")
                lines += [f"    - known: {each}" for each in known_of(str(x["result"]))]
            elif isinstance(x["result"], dict) or step in ("tiles", "main rows", "tests", "memory"):
                lines.append(f"  - {x['name']}: {_speed(x['result'])}")
    return "\n".join(lines)


def _speed(result: Any) -> str:
    """Returns our time of a row, and how fast the fastest other library is beside it."""
    from gpu_boxes.running import short

    if not isinstance(result, dict):
        return short(result)
    times = {name: x[2] for name, x in result["seconds"].items()}
    ours = times.pop("speedlight")
    others = {name: x for name, x in times.items() if not name.startswith("speedlight")}
    best = min(others, key=lambda name: others[name], default=None)
    beside = "no other library" if best is None else f"{others[best] / ours:.2f} of the speed of {best}"
    return f"{short(result)}; {beside}"


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


@contextlib.contextmanager
def dry() -> Iterator[None]:
    """Records launches and computes nothing."""
    from gpu_boxes import problems, recording

    problems.is_dry = True
    try:
        with recording.Recorder():
            yield
    finally:
        problems.is_dry = False


def run_box(name: str, given: argparse.Namespace, about: dict[str, str]) -> bool:
    """Runs a box and leaves its report; returns whether all of it is right."""
    box = Box(name, given, about)
    box.say(f"box {name}")
    run = {"one": box_one, "two": box_two, "three": box_three}[name]
    with dry() if given.dry else contextlib.nullcontext():
        run(box)
    lines = box.journal.lines()
    text = box.write_report()
    rows = [x["result"] for x in lines if isinstance(x["result"], dict) and "seconds" in x["result"]]
    if rows:
        print(draw(rows, box.journal.folder / "speed.png"))
    print("", "Please paste this into an issue:", "", text, sep="\n")
    print(f"\nand attach what lies in {box.journal.folder}")
    return all(x["right"] for x in lines if not x["step"].endswith("again"))


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("boxes", nargs="*", metavar="one | two | three | pack", help="by default one, two and three")
    parser.add_argument("--dry", action="store_true", help="without a GPU: launches are recorded, nothing is computed")
    parser.add_argument("--seconds", type=float, help="of each box, instead of its own")
    parser.add_argument("--tests", nargs="*", help="files of tests; by default those that a GPU runs")
    parser.add_argument("--kernels", type=Path, default=ROOT / "build" / "gpu-kernels.tar.gz", help="a file of `pack`")
    parser.add_argument("--only", default="", help="of pack: items whose name has this word")
    parser.add_argument("--processes", type=int, help="of pack")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", help="a folder")
    given = parser.parse_args(words)
    boxes = given.boxes or list(SECONDS)
    for name in boxes:
        if name not in (*SECONDS, "pack", "problem"):
            parser.error(f"expected one, two, three or pack; got {name}")
    set_environment()
    if boxes == ["pack"]:
        return pack(given)
    about = found()
    print(*(f"{name}: {x}" for name, x in about.items()), sep="\n", flush=True)
    if not given.dry and not sees_gpu():
        print("gpu: expected a CUDA device; PyTorch sees none here. `make gpu-check` needs none.", file=sys.stderr)
        return 2
    if boxes == ["problem"]:  # in this very process, for the memory checker
        from gpu_boxes.problems import forward

        print(forward((1, 2, 128, 64)))
        return 0
    given.output = given.output.resolve()
    return int(not all([run_box(name, given, about) for name in boxes]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
