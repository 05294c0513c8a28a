"""Makespan: how evenly a schedule's tickets keep many threads busy, simulated. Pure; no such machine was measured.

A thread takes a seat in the region, then tickets, each by a visit to a cache line that all threads write, one after
another. A ticket takes the time of its products, or of reading its keys; threads that read share the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from ...host.machine import PRODUCTS
from ...host.tunings import MANY, WAKES
from ...problem.plan import Balance
from ...problem.problem import SPAN, Problem
from ..runtime.workers import first_region, next_region
from .schedule import Schedule, product_name, token_bytes

# Of servers, assumed: cores and bytes per second of a socket; seconds until a line is another core's, for each socket;
# of a call that wakes a thread, and until that runs; from one region to the next
_CORES, _BYTES, _LINE, _WAKING, _WOKEN, _BETWEEN = 96, 400e9, 50e-9, 1.5e-6, 10e-6, 10e-6
# tickets that are simulated, the last ones: those before are taken to keep all threads busy; and of a call, at most
_TICKETS, _MOST = 1 << 15, 1 << 18


class Load(NamedTuple):
    """The tickets of a call."""

    seconds: np.ndarray  # of each, in a thread that reads memory alone
    fed: float  # how many threads memory feeds at once


def balance_of(problem: Problem, how: Schedule) -> Balance | None:
    """Simulates a call on the schedule's threads; None of more tickets than anybody waits for, and where a mask hides
    keys: which ones the schedule does not ask.
    """
    if problem.mask is not None or how.tickets > _MOST:
        return None
    load, longest = load_of(problem, how), how.tuning.threading.region_seconds
    least = float(load.seconds.sum()) / min(how.threads, load.fed)
    awake, asleep = makespans(load, how.threads, longest, [False, True])
    return Balance(awake, least / awake if least else 1.0, least / asleep if least else 1.0)


def load_of(problem: Problem, how: Schedule) -> Load:
    """Returns what the tickets of a schedule take, in their order."""
    if how.kind == "decode":
        return Load(_decode_seconds(problem, how), _sockets(how.threads) * _BYTES / how.tuning.threading.read_bytes)
    return Load(_forward_seconds(problem, how), np.inf)


def _sockets(threads: int) -> int:
    return -(-threads // _CORES)


def _forward_seconds(problem: Problem, how: Schedule) -> np.ndarray:
    """Returns the seconds of blocks of queries; a panel takes the keys that its last query sees."""
    steps, heads = PRODUCTS[product_name(problem, how.isa)], dict(how.words)["side_by_side"]
    rate = how.tuning.threading.flops * steps.elements * (4 if steps.together > 1 else 1)
    each, found = how.panel * 2 * (problem.head_dim + problem.value_dim) / rate, [np.zeros(0)]
    for q_len, k_len, start in zip(problem.q_lengths, problem.k_lengths, problem.q_starts, strict=True):
        if rows := q_len * problem.group:
            ends = np.minimum(np.arange(how.panel, rows + how.panel, how.panel), rows)
            keys = np.full(len(ends), k_len)
            if problem.causal:
                keys = np.clip(start - problem.k_start + (ends - 1) // problem.group + 1, 0, k_len)
            blocks = np.add.reduceat(keys, np.arange(0, len(ends), how.panels))
            blocks = np.repeat(blocks[::-1] if problem.causal else blocks, heads)
            blocks = np.outer(blocks, _shares(k_len, how.parts)).ravel()
            found.append(np.tile(blocks, problem.kv_heads // heads) * each)
    return np.concatenate(found)


def _decode_seconds(problem: Problem, how: Schedule) -> np.ndarray:
    """Returns the seconds of shares of spans."""
    tasks = problem.kv_heads // how.heads
    each, found = token_bytes(problem) / max(1, tasks) / how.tuning.threading.read_bytes, [np.zeros(0)]
    for q_len, k_len in zip(problem.q_lengths, problem.k_lengths, strict=True):
        if q_len:
            found.append(np.tile(_shares(k_len, how.parts) * k_len * each, tasks))
    return np.concatenate(found)


def _shares(keys: int, parts: int) -> np.ndarray:
    """Returns which part of a sequence's keys each of the tasks takes that share its spans."""
    edges = -(-keys // SPAN) * np.arange(parts + 1) // parts * SPAN
    return np.diff(np.minimum(edges, keys)) / max(keys, 1)


def makespan(load: Load, threads: int, longest: float, *, asleep: bool) -> float:
    """Returns the seconds of a call, region after region as the main thread runs them; all but the caller may sleep at
    first.
    """
    return makespans(load, threads, longest, [asleep])[0]


def makespans(load: Load, threads: int, longest: float, asleep: list[bool]) -> list[float]:
    """Returns makespan() of each: those whose first regions end at the same ticket have all others in common."""
    before, seconds = load.seconds[:-_TICKETS], load.seconds[-_TICKETS:].tolist()
    alone, found = sum(seconds), []
    step = len(seconds) if alone < longest else first_region(len(seconds), threads, alone, longest)
    others: dict[tuple[int, int], list[float]] = {}
    for sleeps in asleep:
        passed = float(before.sum()) / min(threads, load.fed)
        if seconds:
            arrive = _arrivals(threads, asleep=sleeps)
            took = run_region(seconds[:step], arrive, load.fed, _sockets(threads) * _LINE)
            done = min(step, len(seconds))
            passed, rest = passed + took, (done, next_region(step, done, threads, took, longest))
            if rest not in others:
                others[rest] = _regions(seconds, *rest, load.fed, threads, longest)
            for took in others[rest]:
                passed = passed + took + _BETWEEN
        found.append(passed)
    return found


def _regions(seconds: list[float], done: int, step: int, fed: float, threads: int, longest: float) -> list[float]:
    """Returns what each region takes, from ticket `done` on. Those of equal tickets, as heads have them, are alike."""
    known: dict[tuple[float, ...], float] = {}
    arrive, line, found = _arrivals(threads, asleep=False), _sockets(threads) * _LINE, []
    while done < len(seconds):
        tickets = tuple(seconds[done : done + step])
        if tickets not in known:
            known[tickets] = run_region(tickets, arrive, fed, line)
        took = known[tickets]
        found.append(took)
        done += len(tickets)
        step = next_region(step, len(tickets), threads, took, longest)
    return found


def _arrivals(threads: int, *, asleep: bool) -> list[float]:
    """Returns when each thread has a seat: one after another, or woken by others that were."""
    if not asleep:
        return [n * _sockets(threads) * _LINE for n in range(threads)]
    found, ready, wakes = [], [0.0], WAKES if threads - 1 > MANY else threads - 1
    while ready:
        now = heappop(ready)
        for _ in range(min(wakes, threads - 1 - len(found) - len(ready))):
            now += _WAKING
            heappush(ready, now + _WOKEN)
        found.append(now)
    return found


def run_region(seconds: Sequence[float], arrive: list[float], fed: float, line: float) -> float:
    """Returns when all threads have left a region; `line`: seconds of a visit to the line of tickets."""
    clock = [(at, -1) for at in arrive]  # who comes when: for a first ticket (-1), or with a ticket
    heapify(clock)
    busy: list[float] = []  # after how much work, of each that is busy, their tickets end
    now = work = free = 0.0
    drawn = 0
    while clock or busy:
        rate = min(1.0, fed / len(busy)) if busy else 1.0
        end = now + (busy[0] - work) / rate if busy else np.inf
        if clock and clock[0][0] <= end:
            at, ticket = heappop(clock)
            work, now = work + (at - now) * rate, at
            if ticket >= 0:
                heappush(busy, work + seconds[ticket])
                continue
        else:
            work, now = heappop(busy), end
        free = max(free, now) + line
        if drawn < len(seconds):
            heappush(clock, (free, drawn))
            drawn += 1
    return max(free, now)
