"""Items in processes of their own, whose outcomes are written as they come.

An error of CUDA ends its process, a hang never ends by itself: so a parent that never starts CUDA forks what calls it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

_FORK = multiprocessing.get_context("fork")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
NOT_RUN = "not run: no time was left"


class NoDevice(Exception):
    """Raised where only a GPU can go on."""


class Item(NamedTuple):
    """Something to run: it returns a text, or a row of the benchmark."""

    name: str
    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an item: its text or row, whether that is right, and the seconds that it took."""

    result: Any
    is_right: bool
    seconds: float = 0.0


class Journal:
    """A file with a line of JSON for each outcome, and one with the text of each failure; whole at any time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, step: str, name: str, outcome: Outcome) -> None:
        line = {"step": step, "name": name, "right": outcome.is_right, "seconds": round(outcome.seconds, 2)}
        self._append("outcomes.jsonl", json.dumps(line | {"result": outcome.result}, default=str) + "\n")

    def add_failure(self, name: str, text: str) -> None:
        self._append("failures.txt", f"=== {name}\n{text}\n")

    def lines(self) -> list[dict[str, Any]]:
        file = self.folder / "outcomes.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _append(self, name: str, text: str) -> None:
        with open(self.folder / name, "a") as file:  # one write, so that processes may share the file
            file.write(text)


@dataclass(slots=True)
class _Worker:
    """A process that runs the items left of a batch in order."""

    process: Any
    left: list[Item]
    since: float


def run_items(
    items: Iterable[Item], step: str, journal: Journal, *, seconds: float, each: float, at_once: int = 1,
    is_alone: bool = True,
) -> dict[str, Outcome]:  # fmt: skip
    """Runs items for so many seconds, each for `each` at most; is_alone: each in a process of its own. If a process of
    several dies, another goes on behind the item that ended it.
    """
    outcomes: dict[str, Outcome] = {}
    waiting, workers = list(items), dict[Connection, _Worker]()
    end = time.monotonic() + seconds

    def told(name: str, outcome: Outcome) -> None:
        outcomes[name] = outcome
        journal.add(step, name, outcome)
        mark = "" if outcome.is_right else "FAILED "
        print(f"{mark}{name}: {short(outcome.result)} ({outcome.seconds:.1f} s)", flush=True)

    try:
        while (waiting or workers) and time.monotonic() < end:
            while waiting and len(workers) < at_once:
                batch = waiting[:1] if is_alone else waiting[:]
                del waiting[: len(batch)]
                workers.update([_started(batch, journal)])
            for pipe in wait(list(workers), timeout=0.1):
                assert isinstance(pipe, Connection)
                worker = workers[pipe]
                try:
                    outcome = pipe.recv()
                except EOFError:
                    del workers[pipe]
                    waiting[:0] = _after_death(worker, told)
                    continue
                told(worker.left.pop(0).name, outcome)
                worker.since = time.monotonic()
            for worker in workers.values():
                if time.monotonic() - worker.since > each:
                    _kill(worker.process)
    finally:
        for worker in workers.values():
            _kill(worker.process)
    for item in [*(x for worker in workers.values() for x in worker.left), *waiting]:
        told(item.name, Outcome(NOT_RUN, is_right=True))
    return outcomes


def _started(batch: list[Item], journal: Journal) -> tuple[Connection, _Worker]:
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_work, args=(batch, theirs, journal))
    process.start()
    theirs.close()
    return ours, _Worker(process, list(batch), time.monotonic())


def _after_death(worker: _Worker, told: Callable[[str, Outcome], None]) -> list[Item]:
    """Returns the items behind the one during which a process ended."""
    worker.process.join()
    if not worker.left:
        return []
    lost = worker.left.pop(0)
    code = worker.process.exitcode
    why = "took too long" if code == -signal.SIGKILL else f"its process ended with {code}"
    told(lost.name, Outcome(why, is_right=False, seconds=time.monotonic() - worker.since))
    return worker.left


def _work(batch: list[Item], pipe: Connection, journal: Journal) -> None:
    os.setpgrp()
    with contextlib.suppress(OSError, AttributeError):  # on Linux: if the parent is killed, this process is
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    for item in batch:
        start = time.monotonic()
        result, is_right = _outcome_of(item, journal)
        pipe.send(Outcome(result, is_right, time.monotonic() - start))
    pipe.close()
    os._exit(0)


def _outcome_of(item: Item, journal: Journal) -> tuple[Any, bool]:
    try:
        result = item.run()
    except NoDevice:
        return "recorded", True
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        journal.add_failure(item.name, traceback.format_exc()[-4000:])
        return f"{type(error).__name__}: {str(error)[:300]} ({Path(last.filename).name}:{last.lineno})", False
    if isinstance(result, dict):
        return result, "refused" not in result
    return result, "WRONG" not in str(result)


def _kill(process: Any) -> None:
    """Ends a process and those that it started."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            end(process.pid, signal.SIGKILL)
    process.join()


def short(result: Any) -> str:
    """Returns a result as a line of a screen."""
    if not isinstance(result, dict):
        return str(result)[:400]
    if "refused" in result:
        return f"REFUSED: {result['refused']}"
    times = {name: x[2] * 1e6 for name, x in result.get("seconds", {}).items()}
    text = ", ".join(f"{name} {x:,.1f} us" for name, x in times.items())
    rates = result.get("tflops") or result.get("gbps") or {}
    unit = "TFLOP/s" if "tflops" in result else "GB/s"
    rate = f" = {rates['speedlight']:,.0f} {unit}" if "speedlight" in rates else ""
    return text + rate + "".join(f"; {name}: {why}" for name, why in result.get("notes", {}).items())
