"""This tree beside another commit of it: a process each, which answer in turn: `run.py base`."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from squares import Problem
from workers import Workers

import speedlight as sl
from speedlight.tools.measuring import alternate, quantiles, ratios

_WORKER = """
import json, sys, time
import ml_dtypes, numpy as np, speedlight as sl
for line in sys.stdin:
    dtype, heads, n, d, causal, backward, settle = json.loads(line)
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    q, k, v = (rng.standard_normal((1, heads, n, d)).astype(kind) for _ in range(3))
    call = lambda: (sl.attention(q, k, v, causal=causal),)
    if backward:
        out, lse = sl.attention(q, k, v, causal=causal, return_lse=True)
        d_out = rng.standard_normal(out.shape).astype(kind)
        call = lambda: sl.attention_backward(q, k, v, out, lse, d_out, causal=causal)
    got = call(); start = time.perf_counter(); call()
    repeats = max(1, min(400, round(0.05 / (time.perf_counter() - start))))
    end = time.perf_counter() + settle
    while time.perf_counter() < end: call()
    start = time.perf_counter()
    for _ in range(repeats): call()
    seconds, size = (time.perf_counter() - start) / repeats, sum(float(np.abs(x.astype(np.float64)).sum()) for x in got)
    print(json.dumps([seconds, size, hash(b"".join(x.tobytes() for x in got))]), flush=True)
"""


def rows(base: str, problems: list[Problem], turns: int) -> Iterator[dict[str, Any]]:
    """Measures this tree and a commit of it, and compares their results."""
    with _trees(base) as trees, contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(_worker(tree)) for name, tree in trees.items()}
        for problem in problems:
            answers: dict[str, list[Any]] = {}

            def ask(name: str, problem: Problem = problem, answers: dict[str, list[Any]] = answers) -> float:
                seconds, *answers[name] = workers[name].ask([*problem, 0.03])[0]
                return seconds

            times = alternate({name: functools.partial(ask, name) for name in workers}, turns)
            (one, bits), (other, base_bits) = (answers[x] for x in ("speedlight", "base"))
            row: dict[str, Any] = {"name": problem.name, "same_bits": bits == base_bits}
            if abs(one - other) <= 1e-2 * abs(other):
                yield row | {"seconds": {x: quantiles(t) for x, t in times.items()}, "ratios": ratios(times)}
            else:
                yield row | {"refused": "the two have different results"}


@contextlib.contextmanager
def _trees(base: str) -> Iterator[dict[str, Path]]:
    """This tree, and a commit of it in a folder of its own."""
    here = Path(sl.__file__).parent.parent
    run = lambda *words: subprocess.run(["git", *words], cwd=here, capture_output=True)  # noqa: E731
    found = run("rev-parse", "--verify", f"{base}^{{commit}}")
    if found.returncode:
        why = (found.stderr.decode().strip().splitlines() or [""])[-1]
        raise SystemExit(f"base: expected a commit of the clone in {here}; got {base!r} ({why}).")
    with tempfile.TemporaryDirectory() as folder:
        archive = run("archive", found.stdout.decode().strip(), "speedlight")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield {"speedlight": here, "base": Path(folder)}


def _worker(tree: Path) -> Workers:
    """Starts a process that imports this tree."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    return Workers([[sys.executable, "-c", _WORKER]], env=environment, cwd=tree)


def line(row: dict[str, Any]) -> str:
    """Returns a row as text."""
    low, middle, high = row["ratios"]["base"][1:4]
    ours = row["seconds"]["speedlight"][2] * 1e3
    return (
        f"{row['name']:<44} {ours:9.3f} ms  base {middle:.3f} ({low:.3f}–{high:.3f})"
        f"  {'the same bits' if row['same_bits'] else 'OTHER BITS'}"
    )
