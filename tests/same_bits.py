"""Random problems of all options in two trees, by the public API alone: does any bit of any result differ?

    python tests/same_bits.py OTHER_TREE --problems 5000 [--first N] [--isa NAME …]
    python tests/same_bits.py OTHER_TREE --only SEED        one problem, and which of its results differ

Each tree computes the same seeds in a process of its own, on one core, with kernels that are compiled anew unless
SPEEDLIGHT_CACHE_DIR is set. A call that is refused has the type of its error as its result. Fails if results differ,
if a process ends early, or if too few calls went through, or results vary too little, for that to mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REFUSED = 0.2  # of a kind's calls; more prove little
FEW = 300  # problems of which some kind may be missing
SHOWN = 10  # problems that differ


def compute(seeds: range, isas: list[str]) -> None:
    """Prints where the package lies and the kinds of problems, then of each problem its seed, kind, calls, refusals and
    digests.
    """
    import numpy as np
    import torch
    from any_calls import KINDS, Calls

    import speedlight as sl

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kinds = [kind for kind, often in KINDS.items() for _ in range(often)]
    print(json.dumps([str(Path(sl.__file__).resolve().parents[1]), [x.__name__ for x in KINDS]]), flush=True)
    for seed in seeds:
        rng, calls = np.random.default_rng([seed, 32]), Calls()
        if isas:
            os.environ["SPEEDLIGHT_ISA"] = isas[seed % len(isas)]
        sl.set_threads(1 + seed % 2)
        kind = kinds[int(rng.integers(len(kinds)))]
        with np.errstate(all="ignore"):
            kind(rng, calls)
        print(json.dumps([seed, kind.__name__, calls.made, calls.refused, calls.digests]), flush=True)


@dataclass
class Tally:
    """Counts of problems in two trees, by kind."""

    problems: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    differ: Counter[str] = field(default_factory=Counter)
    results: int = 0
    digests: set[str] = field(default_factory=set)

    def add(self, own: list[Any], other: list[Any]) -> None:
        """Counts one problem; prints it if it is among the first that differ."""
        seed, kind, calls, refused, digests = own
        self.problems[kind] += 1
        self.calls[kind] += calls
        self.refused.setdefault(kind, Counter()).update(refused)
        self.results += len(digests)
        self.digests.update(digests)
        if own == other and kind != "died":
            return
        self.differ[kind] += 1
        if self.differ.total() <= SHOWN:
            at = [n for n, (x, y) in enumerate(zip(digests, other[4], strict=False)) if x != y]
            print(f"--only {seed}: {kind}, results {at} of {len(digests)} and, in the other tree, {len(other[4])}")
            print("".join(f"    {n}: {digests[n]}, {other[4][n]}\n" for n in at[:3]), end="", flush=True)

    def report(self, kinds: list[str]) -> list[str]:
        """Prints the counts; returns what is wrong."""
        wrong = [f"{self.differ.total()} problems differ"] if self.differ else []
        for kind, count in sorted(self.problems.items(), key=lambda x: -x[1]):
            refused = self.refused[kind]
            share = refused.total() / max(self.calls[kind], 1)
            print(f"{kind:20}{count:6} problems{self.calls[kind]:7} calls,{share:6.1%} refused, ", end="")
            print(f"{self.differ[kind]} differ", dict(refused) or "")
            if share >= REFUSED and count >= 20:
                wrong.append(f"{kind}: {share:.0%} of the calls are refused")
        total, unlike = self.problems.total(), len(self.digests)
        print(f"{total} problems, {self.results} results with {unlike} digests")
        if total >= FEW:
            wrong += [f"no problem of {kind}" for kind in kinds if not self.problems[kind]]
            wrong += [f"only {unlike} digests of {self.results} results"] * (2 * unlike < self.results)
        return wrong


def results_of(tree: Path, args: argparse.Namespace) -> Iterator[list[Any]]:
    """The kinds of problems, then a tree's line for each seed.

    If its process ends early the line says so, and another process goes on.
    """
    with tempfile.TemporaryDirectory() as kernels:
        own = {
            "PYTHONPATH": os.pathsep.join((str(tree), str(ROOT / "tests" / "support"))),
            "PYTHONHASHSEED": "0",
            "OPENBLAS_NUM_THREADS": "1",
        }
        env = {"SPEEDLIGHT_CACHE_DIR": kernels} | os.environ | own
        seed, end = args.first, args.first + args.problems
        while seed < end:
            command = [sys.executable, __file__, str(tree), "--compute", f"--first={seed}", f"--problems={end - seed}"]
            with subprocess.Popen(
                [*command, "--isa", *args.isa], env=env, stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout
                place, kinds = json.loads(process.stdout.readline() or "[null, null]")
                if place != str(tree):
                    raise SystemExit(f"expected the package of {tree}, got that of {place}")
                if seed == args.first:
                    yield kinds
                for line in process.stdout:
                    yield json.loads(line)
                    seed += 1
            if seed < end:
                yield [seed, "died", 1, {}, [f"{tree}: exit code {process.returncode}"]]
                seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="the other tree: a checkout with the package in it")
    parser.add_argument("--problems", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first problem")
    parser.add_argument("--only", type=int, help="seed of the only problem")
    parser.add_argument("--isa", nargs="*", default=[], help="vector units in turn; default: the machine's best")
    parser.add_argument("--compute", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only is not None:
        args.first, args.problems = args.only, 1
    if args.compute:
        compute(range(args.first, args.first + args.problems), args.isa)
        return 0
    trees = ROOT, args.other.resolve()
    if trees[0] == trees[1]:
        parser.error(f"{trees[0]}: expected another tree than this one")
    tally, (own, other) = Tally(), (results_of(tree, args) for tree in trees)
    kinds, _ = next(own), next(other)
    for pair in zip(own, other, strict=True):
        tally.add(*pair)
    wrong = tally.report(kinds)
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
