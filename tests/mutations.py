"""Some hundred faults, put into the code one at a time: does the suite see them?

    python tests/mutations.py [--jobs 2] [--only NAME …] [--results FILE]

Each mutation is an exact replacement in a copy of the tree. The tests of its own room run first, and only if they pass
what else `make test` runs. Results are kept beside what they are of, so that a run that was stopped goes on where it
was. Fails unless all but two are caught.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faults import MUTATIONS, ROOT, Mutation

MISSED = 2  # may not be caught
OWN_SECONDS, SECONDS = 200, 1200  # after which tests that hang have seen the fault
FAILED, NOTHING_RAN = 1, (4, 5)  # exit codes of pytest


def digest(mutation: Mutation) -> str:
    """Of the sources, the tests and the mutation: a result is of these alone."""
    total = hashlib.sha256(repr(mutation).encode())
    for path in sorted((*(ROOT / "speedlight").rglob("*.py"), *(ROOT / "tests").rglob("*.py"))):
        if path.name != "mutations.py" and path.parent.name != "faults":
            total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()


def copied(to: Path) -> Path:
    """What tests need of the tree."""
    ignore = shutil.ignore_patterns("__pycache__", ".venv", ".git", ".pytest_cache", ".hypothesis")
    shutil.copytree(ROOT, to, ignore=ignore, symlinks=True, dirs_exist_ok=True)
    return to


def run_tests(tree: Path, arguments: list[str], seconds: int, *, mutated: bool) -> tuple[int, str]:
    """pytest's exit code, and the first test that failed; no test run at all is an error.

    A mutation has kernels of its own.
    """
    place = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"} | (
        {"SPEEDLIGHT_CACHE_DIR": str(tree / "kernels")} if mutated else {}
    )
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *arguments]
    options: dict[str, Any] = {
        "cwd": tree,
        "env": os.environ | place,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return FAILED, f"no end within {seconds} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # whatever a test has left, too
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode in NOTHING_RAN:
        raise ValueError(f"pytest {shlex.join(arguments)}: {said[-500:]}")
    lines = [x for x in said.splitlines() if x.startswith(("FAILED", "ERROR"))]
    return process.returncode, (lines or said.splitlines()[-1:] or [""])[0][:150]


def try_out(mutation: Mutation | None, tests: str, whole: bool) -> dict[str, Any]:
    """What the suite says to a mutation, its own room first, then, if `whole`, the rest; None: what these tests say to
    the tree as it is.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="speedlight-mutation-") as name:
        tree = copied(Path(name))
        if mutation is not None:
            mutation.apply(tree)
        code, first = run_tests(tree, shlex.split(tests), OWN_SECONDS, mutated=mutation is not None)
        by = "its own room" if code else "nothing"
        if mutation is not None and whole and not code:
            rest = ["-n", "2", "tests", "--ignore", "tests/tools/test_mutations.py"]  # which looks for what is replaced
            code, first = run_tests(tree, rest, SECONDS, mutated=True)
            by = "the rest" if code else "nothing"
    return {"caught": by, "test": first, "seconds": round(time.perf_counter() - start, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="mutations whose names have one of these words")
    parser.add_argument("--own", action="store_true", help="only the tests of each mutation's own room")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutations.json")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(given.results.read_text()) if given.results.exists() else {}
    done = dict(kept)
    wanted = [m for m in MUTATIONS if not given.only or any(x in m.name for x in given.only)]
    for m in wanted:
        m.mutated((ROOT / "speedlight" / m.file).read_text())
    whole = Mutation("nothing", "", "", "", "")
    rooms = {tests: digest(whole) + tests for tests in dict.fromkeys(m.tests for m in wanted)}
    jobs = [(m, m.tests, digest(m)) for m in wanted] + [(None, tests, key) for tests, key in rooms.items()]
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        running = {
            pool.submit(try_out, m, tests, not given.own): (m, tests, key) for m, tests, key in jobs if key not in kept
        }
        for future in concurrent.futures.as_completed(running):
            m, tests, key = running[future]
            try:
                result = future.result()
            except (ValueError, OSError) as error:  # of this one alone; it counts as not caught, and is tried again
                result = {"caught": "nothing" if m else "error", "test": f"ERROR {error}", "seconds": 0.0}
            kept[key] = result | {"name": m.name if m else f"as it is: {tests}"}
            if not result["test"].startswith("ERROR") and (m is None or not given.own or result["caught"] != "nothing"):
                done[key] = kept[key]
            given.results.write_text(json.dumps(done, indent=1))
            print(
                f"{kept[key]['seconds']:7.1f} s  {kept[key]['name']}: {kept[key]['caught']}  {kept[key]['test']}",
                flush=True,
            )
    return report(wanted, kept, rooms)


def report(wanted: list[Mutation], kept: dict[str, Any], rooms: dict[str, str]) -> int:
    """The table; 0 where enough are caught, by tests that pass without a mutation."""
    broken = [
        tests
        for tests, key in rooms.items()
        if kept[key]["caught"] != "nothing" or kept[key]["seconds"] > OWN_SECONDS / 3
    ]
    results = [kept[digest(m)] for m in wanted]
    for m, r in zip(wanted, results, strict=True):
        print(f"{m.file:22} {m.name:68} {r['caught']:13} {r['seconds']:6.1f} s  {r['test']}")
    caught = sum(r["caught"] != "nothing" for r in results)
    print(
        f"{caught} of {len(wanted)} caught, {sum(r['caught'] == 'its own room' for r in results)} by their own room's "
        "tests"
    )
    for tests in broken:
        print(f"fails without a mutation, or is too slow to tell who hangs: pytest {tests}")
    return int(bool(broken) or len(wanted) - caught > MISSED)


if __name__ == "__main__":
    sys.exit(main())
