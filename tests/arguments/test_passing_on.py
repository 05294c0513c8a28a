"""What another library's code raises while we ask it: what it says of the argument is told in our words, with the
original as the cause; what has nothing to do with the argument comes out as it is.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import speedlight as sl
from speedlight.arrays import files

X = np.ones((1, 1, 8, 4), np.float32)


class Timeout(Exception):
    """As programs make one for their signal handlers."""


class Unlucky:
    """Its every answer is an exception, or a call that raises one."""

    def __init__(self, fails: Callable[[], Any]) -> None:
        self.fails, self.shape = fails, (3,)

    def __iter__(self) -> Any:
        yield self.fails()


class Array(Unlucky):
    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.fails()


class Capsule(Unlucky):
    def __dlpack_device__(self) -> Any:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        return self.fails()


class Device(Capsule):
    def __dlpack_device__(self) -> Any:
        return self.fails()


class Tolist(Unlucky):
    def tolist(self) -> Any:
        return self.fails()


class Slopes(torch.autograd.Function):
    """An autograd function that fails."""

    fails: Callable[[], Any]

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return Slopes.fails()

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return given


def scored(fails: Callable[[], Any]) -> Any:
    Slopes.fails = staticmethod(fails)
    return sl.attention(X, X, X, score=lambda s, b, h, i, j: Slopes.apply(s))


def pooled(fails: Callable[[], Any]) -> Any:
    pool = sl.PagePool(layers=1, pages=4, page_size=16, kv_heads=1, head_dim=4)
    return pool.append(0, Unlucky(fails), X[0].swapaxes(0, 1), X[0].swapaxes(0, 1))


def paged(table: Any) -> Any:
    return sl.attention_paged(X, np.ones((3, 4, 1, 4), np.float32), np.ones((3, 4, 1, 4), np.float32), table, [5])


ASKED = {
    "dlpack device": lambda fails: sl.attention(X, Device(fails), X),
    "dlpack": lambda fails: sl.attention(X, X, Capsule(fails)),
    "array": lambda fails: sl.table(Array(fails)),
    "list": lambda fails: sl.attention(X, X, X, k_lengths=Tolist(fails)),
    "sequences": pooled,
    "block table": lambda fails: paged(Array(fails)),
    "positions": lambda fails: sl.rotary(X, positions=Array(fails)),
    "autograd": scored,
}


def raises(error: BaseException) -> Callable[[], Any]:
    def fails() -> Any:
        raise error

    return fails


@pytest.mark.parametrize("asked", ASKED)
def test_a_refusal_is_told_in_our_words_with_its_cause(asked):
    for error in (TypeError("so it is"), ValueError("so it is"), RuntimeError("so it is"), BufferError("so it is")):
        with pytest.raises(sl.Error, match="so it is") as caught:
            ASKED[asked](raises(error))
        assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [MemoryError("none"), Timeout("late"), OSError(5, "disk"), KeyboardInterrupt()])
@pytest.mark.parametrize("asked", ASKED)
def test_what_is_not_about_the_argument_comes_out(asked, error):
    with pytest.raises(type(error)) as caught:
        ASKED[asked](raises(error))
    assert caught.value is error


# --- signal handlers, which raise what they like


class Handlers:
    """In the shapes that programs give them."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def method(self, number: int, frame: Any) -> None:
        raise self.error

    def once(self, number: int, frame: Any) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise self.error

    def deep(self, *given: Any) -> None:
        self.method(*given)

    def all(self) -> Iterator[Any]:
        yield from (self.method, self.once, self.deep, functools.partial(self.other, "of mine"))
        yield lambda *_: self.method(0, None)

    def other(self, mine: str, number: int, frame: Any) -> None:
        raise self.error


@pytest.fixture
def handled() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def signalled() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals here")
@pytest.mark.parametrize("asked", ASKED)
def test_what_a_signal_handler_raises_comes_out(asked, handled):
    for error in (TimeoutError("late"), ValueError("late"), RuntimeError("late"), Timeout("late")):
        for handler in Handlers(error).all():
            handled(handler)
            with pytest.raises(type(error)) as caught:
                ASKED[asked](signalled)
            assert caught.value is error


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals here")
def test_what_a_signal_handler_raises_while_files_are_read_comes_out(handled, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", X)
    opened = np.lib.format.read_magic

    def interrupted(f: Any) -> Any:
        signalled()
        return opened(f)

    monkeypatch.setattr(np.lib.format, "read_magic", interrupted)
    for error in (TimeoutError("late"), ValueError("late")):
        handled(Handlers(error).method)
        with pytest.raises(type(error)) as caught:
            files.read_arrays([tmp_path / "x.npy"])
        assert caught.value is error
