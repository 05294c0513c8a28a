"""What memos know calls by (R31): calls that differ in one thing alone, one after the other, at every door."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import FULL
from differing import DOORS, OPTIONS, Case, Memory, Pair, flat, machine, memos_of_calls, pairs_of

import speedlight as sl
from speedlight import engines
from speedlight.cpu.kernels.repeat import KEY_PARTS
from speedlight.cpu.runtime.repeating import functions
from speedlight.problem.options import DEFAULTS
from speedlight.problem.prepared import read_plainly

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")

CHECKED = 16  # of so many calls a short run compares one with the reference, which takes longest
READ = ("arrays", "tensors", "out", "cache")  # doors whose calls Python reads, too, as where machine code may not
LEARNED = "AAA", "BBBABA"  # Python runs the second call of a kind, machine code the third


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Forgets every call; whatever a test left, too."""
    known = memos_of_calls()

    def forget_all() -> None:
        for x in known:
            x.clear()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arguments in another order, and conversions
        yield forget_all
    forget_all()


def outcome(memory: Memory, door: str, case: Case, check: Callable[..., None] | None = None) -> Any:
    """Returns what a call returns, to the bit and the stride, or the error that it raises."""
    memory.turn += 1
    with machine(case):
        try:
            found = flat(DOORS[door].run(memory, case))
        except (sl.Error, RuntimeError) as error:
            assert isinstance(error, sl.Error) or "Inference tensors cannot be saved" in str(error)
            return type(error), str(error)
        if check is not None:
            check(memory, case, found)
    return [told(x) for x in found]


def told(x: Any) -> Any:
    """Returns all that anybody sees of an array; of one that autograd records, that it is."""
    if not isinstance(x, torch.Tensor):
        return type(x), x.dtype, x.shape, x.strides, x.tobytes()
    seen = x.requires_grad, x.is_inference()
    x = x.detach()
    return type(x), seen, x.dtype, x.shape, x.stride(), x.contiguous().view(torch.uint8).numpy().tobytes()


def name_of(case: Case) -> str:
    """Returns a text that two cases share if they are alike, to types and bits."""
    return repr(sorted((name, type(x), repr(x)) for name, x in case.items()))


def test_every_option_has_pairs():
    """An option that is added to the list is one that calls differ in here, too."""
    assert set(OPTIONS) == set(DEFAULTS)


@pytest.mark.parametrize(("door", "by"), [*((x, "machine code") for x in DOORS), *((x, "Python") for x in READ)])
def test_calls_that_differ_in_one_thing(door, by, forget, monkeypatch):
    """A, B, A: each time what it gives where nothing is remembered; that is within the bound of the specification."""
    memory, fresh = Memory(), {}
    for home in (functions(), engines.cpu()) if by == "Python" else ():
        monkeypatch.setattr(home, "read", read_plainly)
        monkeypatch.setattr(home, "repeat", lambda *given: read_plainly(*given[KEY_PARTS:]))
    pairs = list(pairs_of(DOORS[door], whole=FULL or (door, by) == ("arrays", "machine code")))
    names = [(name_of(pair.first), name_of(pair.second)) for pair in pairs]
    for pair, of_pair in zip(pairs, names, strict=True):
        for name, case in zip(of_pair, pair[1:], strict=True):
            if name not in fresh:
                forget()
                is_checked = FULL or len(fresh) % CHECKED == 0
                fresh[name] = outcome(memory, door, case, DOORS[door].check if is_checked else None)
    forget()
    last = None
    for pair, of_pair in zip(pairs, names, strict=True):
        repeat(memory, door, pair, [fresh[x] for x in of_pair], LEARNED[1] if of_pair[0] == last else "".join(LEARNED))
        last = of_pair[0]
    both = [pair for pair, of_pair in zip(pairs, names, strict=True) if isinstance(fresh[of_pair[1]], list)]
    for pair in both:  # what the second has left, the first may find
        forget()
        repeat(memory, door, pair, [fresh[name_of(x)] for x in pair[1:]], "BAB")
    assert len(both) > len(pairs) // 5


def repeat(memory: Memory, door: str, pair: Pair, fresh: list[Any], turns: str) -> None:
    """Calls the first of a pair, A, or the second, B, in turns: each is what it was where nothing was remembered."""
    for turn in turns:
        which = "AB".index(turn)
        assert outcome(memory, door, pair[1 + which]) == fresh[which], f"{pair.what}: {turn} of {turns}"
