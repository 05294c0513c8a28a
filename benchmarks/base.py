"""This tree beside another commit of it: a process each, which answer in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import speedlight as sl

from ..errors import ArgumentError
from .measuring import name_of, quantiles

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


def beside_commit(base: str, shapes: list[tuple[Any, ...]], turns: int, backward: bool) -> Iterator[dict[str, Any]]:
    """This tree and a commit of it, a process each, in turn."""
    here = Path(sl.__file__).parent.parent
    run = lambda *words: subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)  # noqa: E731
    found = run("rev-parse", "--verify", f"{base}^{{commit}}")
    if found.returncode:
        raise ArgumentError(
            f"--base: expected a commit of the clone in {here}; got {base!r} "
            f"({(found.stderr.strip().splitlines() or [''])[-1]})."
        )
    with tempfile.TemporaryDirectory() as directory:
        archive = subprocess.run(["git", "archive", found.stdout.strip(), "speedlight"], cwd=here, capture_output=True)
        subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)
        workers = {}
        try:
            for name, tree in (("speedlight", here), ("base", Path(directory))):
                env = os.environ | {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
                pipe = subprocess.PIPE
                workers[name] = subprocess.Popen(
                    [sys.executable, "-c", _WORKER], stdin=pipe, stdout=pipe, text=True, env=env, cwd=directory
                )
            for shape in shapes:
                times: dict[str, list[float]] = {name: [] for name in workers}
                results: dict[str, list[Any]] = {}
                for _ in range(turns):
                    for name, worker in workers.items():
                        seconds, *results[name] = _ask(worker, [*shape, backward, 0.03])
                        times[name].append(seconds)
                ratio = [b / a for a, b in zip(times["speedlight"], times["base"], strict=True)]
                row = {
                    "name": name_of(*shape, backward=backward),
                    "seconds": {x: quantiles(t) for x, t in times.items()},
                    "ratios": {"base": quantiles(ratio)},
                }
                one, other = (results[x][0] for x in ("speedlight", "base"))
                if not abs(one - other) <= 1e-2 * abs(other):
                    row = {"name": name_of(*shape, backward=backward), "refused": "the two have different results"}
                yield row | {"same_bits": results["speedlight"][1] == results["base"][1]}
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()


def _ask(worker: Any, question: list[Any]) -> list[Any]:
    worker.stdin.write(json.dumps(question) + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise ArgumentError(
            "--base: that version could not run attention(q, k, v, causal=…), or its backward pass, here; see the "
            "lines above."
        )
    return json.loads(answer)
