"""Which index an error names where a lookup is out of range: the first in the order of positions, whoever met it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FULL
from engines import one_vector, tuned
from problems import qkv

import speedlight as sl
from speedlight.cpu.memory.records import WRONG
from speedlight.cpu.runtime import launch
from speedlight.cpu.runtime.launch import raise_wrong
from speedlight.expressions.tree import order

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # lanes are seen at any width of panels
KEYS, D = 150, 8
SHORT = sl.table(np.linspace(-1.0, 1.0, 140).astype(np.float32), "short")
SQUARE = sl.table(np.ones((4, 160), np.float32), "square")
IDS = sl.table(np.arange(145), "ids")


def number(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Another one at every position, none of which a table has."""
    return ((b * 4 + h) * KEYS + i) * KEYS + j + 1000


def of_score(score: Callable[..., Any]) -> dict[str, Any]:
    return {"score": score}


OPTIONS: dict[str, dict[str, Any]] = {
    "of a key": of_score(lambda s, b, h, i, j: s + SHORT[j]),
    "backwards": of_score(lambda s, b, h, i, j: s + SHORT[150 - j - 2 * b]),
    "of heads and distances": of_score(lambda s, b, h, i, j: s + SQUARE[h + i // 140, i - j + 80]),
    "of the last heads": of_score(lambda s, b, h, i, j: s + SHORT[(i * 7 + j * 3) % 100 + 20 * b * h]),
    "of the last row": of_score(lambda s, b, h, i, j: s + SHORT[i * 3 % 130 + i // 149 * j]),
    "of a score": of_score(lambda s, b, h, i, j: s + SHORT[sl.cast(s * 0.0, int) + (i + j) // 2]),
    "two of a score": of_score(lambda s, b, h, i, j: s + SHORT[j - (149 - i) // 16] + SQUARE[h, j + i // 10]),
    "of a mask": {"mask": lambda b, h, i, j: IDS[(i + 2 * j) % 151] % 3 != h % 2},
    "of a mask and a score": {
        "mask": lambda b, h, i, j: IDS[j + i // 40] >= 0,
        "score": lambda s, b, h, i, j: s + SHORT[sl.where(j + i % 30 < 140, j, number(b, h, i, j))],
    },
    "the same position": {
        "mask": lambda b, h, i, j: IDS[j] >= 0,
        "score": lambda s, b, h, i, j: s + SHORT[sl.minimum(j, 139) + sl.where(j > 144, 9, 0)],
    },
    "of a key that a mask hides": {
        "mask": lambda b, h, i, j: (j < 140) | (i + h > 148),
        "score": lambda s, b, h, i, j: s + SHORT[j],
    },
}
CROSSED = "of a mask and a score"  # with every door in a short run, the others with some rows alone


@pytest.fixture(params=[5, 1] if FULL else [5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many take part, however little there is to do."""
    small = {product: blocks | {"panels": 1, "task_flops": 1_000} for product, blocks in one_vector(1).items()}
    with tuned(threading={"inline_seconds": 0.0, "inline_bytes": 0}, **small):
        sl.set_threads(request.param)
        yield request.param


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(sl.ArgumentError, match="expected index") as found:
        call()
    return str(found.value)


Calls = tuple[Callable[[], Any], Callable[[], Any]]  # ours, and the reference's


def arrays(rows: int, dtype: str = "float32") -> list[np.ndarray]:
    return list(qkv(np.random.default_rng(3), dtype, 2, 4, 2, rows, KEYS, D, D))


def both(rows: int, dtype: str = "float32", **options: Any) -> Calls:
    given = arrays(rows, dtype)
    return partial(sl.attention, *given, **options), partial(sl.reference.attention, *given, **options)


def gradients(**options: Any) -> Calls:
    q, k, v = arrays(KEYS)
    given = (q, k, v, q, np.zeros(q.shape[:-1], np.float32), q)
    return partial(sl.attention_backward, *given, **options), partial(sl.reference.backward, *given, **options)


def packed(**options: Any) -> Calls:
    """The last sequence is the longer one, whose tasks come first."""
    given = [np.concatenate([x[0][:, :20], x[1]], axis=1).swapaxes(0, 1) for x in arrays(KEYS)]
    options |= {"layout": "lhd", "cu_seqlens_q": [0, 20, 20 + KEYS], "cu_seqlens_k": [0, 20, 20 + KEYS]}
    return partial(sl.attention, *given, **options), partial(sl.reference.attention, *given, **options)


def cached(dtype: Any = "float32", window: int | None = None, **options: Any) -> Calls:
    """Three new tokens, of which the last is at the last key."""
    q, k, v = arrays(3)
    sizes: dict[str, Any] = {"capacity": KEYS} if window is None else {"window": window}
    cache = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=D, dtype=dtype, **sizes)
    cache.attend(0, np.zeros((2, 4, KEYS - 3, D), np.float32), k[:, :, :-3], v[:, :, :-3])
    ours = partial(cache.attend, 0, q, k[:, :, -3:], v[:, :, -3:], **options)
    if window is not None:
        options["window"] = (window - 1, 0)
    return ours, partial(sl.reference.attention, q, k, v, causal=True, **options)


def paged(**options: Any) -> Calls:
    q, k, v = arrays(3)
    pages = [x.reshape(2, 2, 15, 10, D).transpose(0, 2, 3, 1, 4).reshape(30, 10, 2, D) for x in (k, v)]
    ours = partial(sl.attention_paged, q, *pages, np.arange(30).reshape(2, 15), [KEYS] * 2, **options)
    return ours, partial(sl.reference.attention, q, k, v, **options)


def repeated(**options: Any) -> Calls:
    """The second call comes when the first has been written down."""
    q, k, v = arrays(3)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    ours = partial(sl.attention, *tensors, **{name: sl.expression(x) for name, x in options.items()})
    assert message(ours) == message(ours)
    return ours, partial(sl.reference.attention, q, k, v, **options)


DOORS: dict[str, Callable[..., Calls]] = {
    "many rows": partial(both, KEYS),
    "few rows": partial(both, 3),
    "pairs": partial(both, KEYS, "bfloat16"),
    "gradients": gradients,
    "packed": packed,
    "cache": cached,
    "codes": partial(cached, "int8"),
    "four bits": partial(cached, "int4"),
    "window": partial(cached, window=40),
    "pages": paged,
    "repeated": repeated,
}
SOME_ROWS = {"many rows": ("of heads and distances", "of a score"), "few rows": ("of a mask",)}
CASES = [
    (door, name) for door in DOORS for name in OPTIONS if FULL or name == CROSSED or name in SOME_ROWS.get(door, ())
]


@pytest.mark.units
@pytest.mark.parametrize(("door", "options"), CASES)
def test_the_first_wrong_index_is_named(isa, threads, door, options):
    ours, want = DOORS[door](**OPTIONS[options])
    expected = message(want)
    for _ in range(3):
        assert message(ours) == expected


@pytest.mark.parametrize("first", WRONG.names[1:6])
def test_the_first_of_several_notes_is_raised(first):
    """The order is that of positions; at one position it is that of lookups."""
    score = sl.expression(lambda s, b, h, i, j: s + SHORT[i] + SQUARE[0, j])
    of = {node.value.name: node for node in order(score.root) if node.op == "table"}
    lookups = [(of["short"], 0), (of["square"], 1)]
    at = WRONG.names.index(first)
    notes = []
    for lookup, index in enumerate((1000, 2000)):
        # fields before `first` are equal, and those after it the other way round
        note = [1, *[5] * (at - 1), 5 + lookup, *[9 - 9 * lookup] * (5 - at), index, 0]
        note[WRONG.names.index("lookup")] = lookup if first == "lookup" else 1 - lookup
        notes.append(note)
    unused = [0] * len(WRONG.names)
    for several in (notes, notes[::-1]):
        with pytest.raises(sl.ArgumentError, match="got 1000 "):
            raise_wrong(lookups, list(chain(unused, *several)))


def test_every_worker_notes_its_own(threads, monkeypatch):
    """And the first of all is raised, whoever met it."""
    found: list[tuple[Any, list[list[int]]]] = []

    def look(lookups: Any, wrong: Any) -> None:
        size = len(WRONG.names)
        found.append((lookups, [list(wrong[n : n + size]) for n in range(0, len(wrong), size)]))
        raise_wrong(lookups, wrong)

    monkeypatch.setattr(launch, "raise_wrong", look)
    q, k, v = qkv(np.random.default_rng(3), "float32", 2, 4, 2, 900, KEYS, D, D)
    call = partial(sl.attention, q, k, v, q_start=0, score=lambda s, b, h, i, j: s + SHORT[number(b, h, i, j)])
    for _ in range(50):  # until threads have come in time
        assert "got 1000 (" in message(call)
        lookups, notes = found[-1]
        noted = [note for note in notes if note[0]]
        if len(noted) > 1:
            break
    assert len(noted) > 1 and len({tuple(note) for note in noted}) == len(noted)
    for several in (noted, noted[::-1]):
        with pytest.raises(sl.ArgumentError, match=r"got 1000 \("):
            raise_wrong(lookups, (ctypes.c_int64 * (len(WRONG.names) * len(several)))(*chain(*several)))
