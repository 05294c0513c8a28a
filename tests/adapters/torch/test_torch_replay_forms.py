"""What machine code knows of repeated calls: it lives as long as a call, and whatever interrupts leaves it whole."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import weakref

import numpy as np
import pytest
import torch
from adapters.torch.test_torch_replay import CAPPED, HEADS, by_python, drawn, known, same, used
from injection import interrupted, needs_places, places, spread
from torch.overrides import TorchFunctionMode

import speedlight as sl
import speedlight.torch
from speedlight.calls import dense
from speedlight.cpu.memory.forms import BLOCK, FORM, OPTIONS
from speedlight.cpu.runtime import replay, workers
from speedlight.problem.options import PLAIN

pytestmark = [pytest.mark.usefixtures("one_width", "small_tiles"), pytest.mark.skip(reason="replaced")]

__all__ = ["known"]


def test_a_form_lives_as_long_as_its_call(known):
    """A mode of PyTorch's, or the garbage collector, may run Python while machine code has a form in hand."""
    q, k, v = drawn(2, 33, 33)
    held = []

    class Dropping(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.empty_like:
                known.forget()
                dense._prepared.clear()
                gc.collect()
                held.append(gone() is not None)
            return function(*args, **(kwargs or {}))

    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
        ((form, (_, _, prepared, *_)),) = known._known.values()
        gone = weakref.ref(prepared)
        del form, prepared
        with Dropping():
            same(sl.attention(q, k, v), want)
    assert held == [True] and gone() is None


@needs_places
@pytest.mark.parametrize("threads", [1, 2])
def test_interrupts_leave_machine_code_nothing_that_is_gone(known, monkeypatch, threads):
    """Nor a form that other threads were asked for, wherever a learning ends that makes room."""
    monkeypatch.setattr(workers, "_limit", lambda: 2)
    monkeypatch.setattr(workers, "counted_until", lambda: time.monotonic() + 1)
    calls = [drawn(1, n, n) for n in range(20, 21 + replay._MOST)]

    def fill():
        known.forget()
        sl.set_threads(2)
        for q, k, v in calls[:-1]:
            sl.attention(q, k, v)
        assert len(known._known) == replay._MOST and not used(known)
        sl.set_threads(threads)

    def learn():
        sl.attention(*calls[-1])

    def prepare():
        for n in {threads, 2}:
            sl.set_threads(n)
            for q, k, v in calls:
                sl.attention(q, k, v)

    room = ("runtime/replay.py",)
    try:
        with torch.no_grad():
            prepare()
            fill()
            found = places(learn, room)
            assert len(found) > 50
            for n in spread(found, 100):
                fill()
                assert interrupted(learn, n, room)
                read = known._forms[: known._block[BLOCK.word("count")]]
                assert set(read) <= {ctypes.addressof(x.form) for x in known._known.values()}, n
                out = known.call(None, *calls[5], PLAIN)
                assert out is None or known._machine[0] == threads, n
            want = by_python(lambda: sl.attention(*calls[-1]))
            for _ in range(3):
                same(sl.attention(*calls[-1]), want)
            assert used(known) >= 1
    finally:
        sl.set_threads(None)


def test_a_signals_handler_learns_meanwhile(known, monkeypatch):
    """It takes the room that was made for another."""
    calls, make = [drawn(1, n, n) for n in range(20, 22 + replay._MOST)], replay._make_form

    def interrupted(*given):
        monkeypatch.setattr(replay, "_make_form", make)
        sl.attention(*calls[-1])
        return make(*given)

    with torch.no_grad():
        for _ in range(2):
            for q, k, v in calls:
                sl.attention(q, k, v)
        known.forget()
        for q, k, v in calls[: replay._MOST]:
            sl.attention(q, k, v)
        monkeypatch.setattr(replay, "_make_form", interrupted)
        for q, k, v in [calls[-2]] * 3 + calls:
            same(sl.attention(q, k, v), by_python(lambda q=q, k=k, v=v: sl.attention(q, k, v)))
    assert replay._make_form is make and len(known._known) == replay._MOST


def test_threads_are_counted_now_and_then(known, monkeypatch):
    """What is known says until when; then Python looks again, and forgets what is of other threads."""
    monkeypatch.setattr(workers, "_limit", lambda: 2)
    q, k, v = drawn(2, 256, 256)

    def threads():
        return {x.form[FORM.word("threads")] for x in known._known.values()}

    try:
        sl.set_threads(2)
        with torch.no_grad():
            for _ in range(3):
                want = sl.attention(q, k, v)
            assert threads() == {2} and used(known) >= 1
            known._set(until=1)
            before = used(known)
            for n in (0, 1):
                same(sl.attention(q, k, v), want)
                assert used(known) == before + n
            sl.set_threads(1)
            for _ in range(3):
                same(sl.attention(q, k, v), want)
            assert threads() == {1} and used(known) >= 1
    finally:
        sl.set_threads(None)


def test_inference_mode_has_forms_of_its_own(known):
    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
    with torch.inference_mode():
        inner = [x.clone() for x in (q, k, v)]
        before = used(known)
        outs = [sl.attention(*inner) for _ in range(4)]
        assert used(known) == before + 3
        assert all([x.is_inference() for x in outs])
        same(outs[-1], want)
    with torch.no_grad():
        out = sl.attention(q, k, v)
    assert not out.is_inference() and used(known) == before + 4


def test_many_forms_take_turns(known):
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(4):
            for n in range(20, 44):
                q, k, v = drawn(1, n, n)
                same(sl.attention(q, k, v), by_python(lambda q=q, k=k, v=v: sl.attention(q, k, v)))
    assert 1 < len(known._known) <= replay._MOST


def test_nothing_is_kept_and_nothing_is_lost(known):
    """References: of what is returned, of None, of what was given."""
    q, k, v = drawn(2, 1, 40)
    mask = torch.rand(2, 1, 1, 40) > 0.3
    with torch.no_grad():
        for _ in range(3):
            sl.attention(q, k, v, mask=mask)
        count, before = used(known), sys.getrefcount(None)
        for _ in range(1000):
            out = sl.attention(q, k, v, mask=mask)
            known.call(None, q, k, v, None)  # options of another type: None
        assert used(known) == count + 1000 and abs(sys.getrefcount(None) - before) < 100
        assert sys.getrefcount(out) == 2 and sys.getrefcount(q) == 2
        names = [weakref.ref(x) for x in (q, k, v, mask, out)]
        del q, k, v, mask, out
        gc.collect()
        assert all([name() is None for name in names])


def test_expressions_are_known_by_identity(known):
    """Those that are equal, or that a list holds, are Python's; so are functions, and tables of tensors."""
    torch.manual_seed(0)
    q, k, v = drawn(2, 1, 40)
    slopes = torch.linspace(0.1, 1, HEADS).requires_grad_()
    of_tensor = sl.alibi(slopes)
    numbers = [2.0]
    calls = {
        "known": lambda: sl.attention(q, k, v, score=CAPPED),
        "equal": lambda: sl.attention(q, k, v, score=sl.softcap(2.0)),
        "other": lambda: sl.attention(q, k, v, score=sl.softcap(3.0)),
        "listed": lambda: sl.attention(q, k, v, score=[CAPPED]),
        "a function": lambda: sl.attention(q, k, v, score=lambda s, b, h, i, j: s * numbers[0]),
        "a tensor's": lambda: sl.attention(q, k, v, score=of_tensor),
    }
    with torch.no_grad():
        for _ in range(3):
            for name, call in calls.items():
                before, want = used(known), by_python(call)
                same(call(), want)
                assert used(known) == before or name == "known"
        assert used(known) >= 1
        numbers[0] = 5.0
        same(calls["a function"](), by_python(calls["a function"]))
        slopes += 1
        same(calls["a tensor's"](), by_python(lambda: sl.attention(q, k, v, score=sl.alibi(slopes))))


def test_lookups_past_a_table_are_pythons_errors(known):
    few = sl.table(np.arange(43.0))
    score = sl.expression(lambda s, b, h, i, j: s + few[j], "score")
    with torch.no_grad():
        for n in range(43, 39, -1):
            sl.attention(*drawn(2, 1, n), score=score)
        assert used(known) >= 1
        with pytest.raises(sl.Error, match="43"):
            sl.attention(*drawn(2, 1, 44), score=score)


def test_forms_hold_what_they_are_known_by(known):
    """An address is one object's only while that lives."""
    with torch.no_grad():
        for options in ({"score": sl.softcap(3.5)}, {"mask": sl.window(9, 2)}, {"window": (9, None)}):
            for _ in range(3):
                sl.attention(*drawn(2, 1, 40), **options)
    assert len(known._known) == 3
    for form, (_, options, *_) in known._known.values():
        assert [form[FORM.word(f"option{n}")] for n in range(OPTIONS)] == [id(x) for x in options]
