"""Whatever interrupts a call of a cache or pool, wherever: everything is as it was, nothing stays busy, no page is
lost.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from conftest import FULL
from injection import Interrupt, handled, interrupted, needs_places, places, spread
from pools import check_accounts
from prompts import append, computed, prompted
from repeated import forget

import speedlight as sl
from speedlight.kv.prefixes import no_tokens, token_bytes

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels

MOST = 100_000 if FULL else 8  # places of a call that are tried


@pytest.fixture(autouse=True)
def python_calls_python() -> None:
    """A torch.compile that raised leaves Dynamo's hook in the interpreter: each call of a Python function is one of C
    then, after which signals are looked for, between a step's end and its return, too.
    """
    api = ctypes.pythonapi
    if sys.implementation.name == "cpython" and "torch._dynamo" in sys.modules:
        api.PyInterpreterState_Get.restype = ctypes.c_void_p
        api._PyInterpreterState_SetEvalFrameFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        api._PyInterpreterState_SetEvalFrameFunc.restype = None
        itself = ctypes.cast(api._PyEval_EvalFrameDefault, ctypes.c_void_p)
        api._PyInterpreterState_SetEvalFrameFunc(api.PyInterpreterState_Get(), itself)


@pytest.fixture(autouse=True)
def no_callbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An exception in a callback of the garbage collector, such as Hypothesis', is swallowed. And every 64th cache has
    more places, since it tidies what is renewed after a fork.
    """
    monkeypatch.setattr("speedlight.host.forks._numbers", itertools.count((1 << 40) + 1, 64))
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


class Tokens(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def tokens(rng, n, batch=2):
    return Tokens(*(rng.standard_normal((batch, heads, n, 16), dtype=np.float32) for heads in (4, 2, 2)))


def packed(rng, n):
    return Tokens(*(rng.standard_normal((n, heads, 16), dtype=np.float32) for heads in (4, 2, 2)))


def widened(x, options):
    """Tokens of a cache of these options: of latents v is the rotary part, of 11 columns."""
    if not options.get("latent"):
        return x
    return x._replace(q=np.concatenate([x.q, -x.q[..., :11]], -1), v=x.v[..., :11].copy())


# --- what a cache and a pool are, and what is done with them


def cache_state(w):
    cache = w.cache
    for layer in (0, 1):
        cache.append(layer, w.one.k[:, :, :0], w.one.v[:, :, :0])  # nobody is busy
    layers = [(cache.lengths(n), cache.keys(n).tobytes(), cache.values(n).tobytes()) for n in (0, 1)]
    return layers, cache.used_bytes


def pool_state(w):
    pool = w.pool
    for layer in (0, 1):
        pool.append(layer, w.sequences, w.one.k[:0], w.one.v[:0], new_lengths=[0] * len(w.sequences))
    check_accounts(pool, w.sequences)
    names: dict[int, int] = {}  # of pages, in their order here
    pages = [[names.setdefault(page, len(names)) for page in s.pages] for s in w.sequences]
    return (
        [(s.length(0), s.length(1), s.keys(0).tobytes(), s.values(1).tobytes()) for s in w.sequences],
        pages,
        pool.free_pages,
    )


def made_cache(rng, **options):
    sizes = {"layers": 2, "batch": 2, "kv_heads": 2, "head_dim": 16} | options
    w = SimpleNamespace(cache=sl.KVCache(**sizes), state=cache_state)
    w.some, w.one, w.few, w.piece, w.long = (widened(tokens(rng, n), options) for n in (24, 1, 5, 40, 700))
    for layer in (0, 1):
        w.cache.append(layer, w.some.k, w.some.v)
    return w


def made_ring(rng):
    w = made_cache(rng, window=40, keep_first=5)
    for layer in (0, 1):
        w.cache.append(layer, w.long.k, w.long.v)  # many times round
    return w


def made_pool(rng, **options):
    """a and b share two pages, of which the second is not full; c has its own."""
    pool = sl.PagePool(**{"layers": 2, "pages": 20, "page_size": 16, "kv_heads": 2, "head_dim": 16} | options)
    a, c = pool.sequence(), pool.sequence()
    w = SimpleNamespace(pool=pool, sequences=[a, c], state=pool_state)
    w.one, w.few, w.many = (widened(packed(rng, n), options) for n in (3, 40, 64))
    for layer in (0, 1):
        pool.append(layer, [a, c], w.many.k, w.many.v, new_lengths=[24, 40])
    w.sequences.insert(1, a.fork())
    return w


# --- prompts that a pool knows


KEPT, HELD, SHORT = [*range(40)], [*range(100, 140)], [*range(200, 224)]


def prompts_state(w):
    """Returns also the tokens, what is found of each prompt, and the counts."""
    known = [s.tokens for s in w.sequences]
    found = [] if w.loses else [found_quietly(w.pool, x) for x in (KEPT, HELD, SHORT, [*SHORT, *HELD])]
    return pool_state(w), known, found, {} if w.loses else w.pool.statistics()


def found_quietly(pool, prompt):
    """Returns how many pages of a prompt are found, which leaves no trace."""
    whole = no_tokens(None, pool.page_size, pool._journal.generation).extended(0, 0, token_bytes(prompt, None))
    return len(pool._journal.find(whole.pages(0, len(prompt) // pool.page_size))[0])


def check_found(pool):
    """Whatever is found of a prompt has the bits that belong to it."""
    for prompt in (KEPT, HELD, SHORT, [*SHORT, *HELD]):
        with pool.sequence(tokens=prompt) as sequence:
            n = sequence.length()
            assert sequence.keys(1).tobytes() == computed(pool, 1, prompt[:n])[0].swapaxes(0, 1).tobytes()


def made_prompts(rng, pages=20):
    """a and b share a full page and half of one, c has three; two pages are kept."""
    w = made_pool(rng, pages=pages)
    w.pool = pool = sl.PagePool(layers=2, pages=pages, page_size=16, kv_heads=2, head_dim=16)
    a, c = (prompted(pool, x)[0] for x in (SHORT, HELD))
    w.sequences, w.state, w.loses = [a, a.fork(), c], prompts_state, pages < 20
    prompted(pool, KEPT)[0].free()
    pool.statistics()  # those that are released
    pool.append(0, [a], *computed(pool, 0, [*SHORT, *HELD], None, 24), new_lengths=[40], tokens=HELD)
    w.rows = Tokens(None, *computed(pool, 1, [*SHORT, *HELD], None, 24))
    return w


LATENT = {"latent": True, "head_dim": 27, "value_dim": 16}
MADE = {
    "cache": lambda rng: made_cache(rng, capacity=900),
    "int8": lambda rng: made_cache(rng, capacity=900, dtype="int8"),
    "int4": lambda rng: made_cache(rng, capacity=900, dtype="int4"),
    "ring": made_ring,
    "pool": made_pool,
    "int8 pool": lambda rng: made_pool(rng, dtype="int8"),
    "int4 pool": lambda rng: made_pool(rng, dtype="int4"),
    "latents": lambda rng: made_cache(rng, capacity=900, **LATENT),
    "latent pool": lambda rng: made_pool(rng, **LATENT),
    "coded latents": lambda rng: made_cache(rng, capacity=900, dtype="int8", **LATENT),
    "prompts": made_prompts,
    "full pool of prompts": lambda rng: made_prompts(rng, 10),
}


def again(w):
    vars(w).update(vars(w.made(np.random.default_rng(0))))


# Written out: after f(*x) Python looks for signals once more, when everything has taken effect
CACHE = {
    "attend": (lambda w: w.cache.attend(1, w.one.q, w.one.k, w.one.v), again),
    "attend again": (lambda w: w.cache.attend(1, w.one.q, w.one.k, w.one.v), again),
    "attend some of": (
        lambda w: w.cache.attend(0, w.few.q, w.few.k, w.few.v, new_lengths=[5, 2], return_lse=True),
        again,
    ),
    "attend others": (lambda w: w.cache.attend(0, w.piece.q, w.few.k, w.few.v, q_lengths=[20, 9]), again),
    "attend many": (lambda w: w.cache.attend(0, w.piece.q, w.piece.k, w.piece.v), again),
    "only attend": (lambda w: w.cache.attend(0, w.one.q), None),
    "append": (lambda w: w.cache.append(0, w.few.k, w.few.v), again),
    "truncate": (lambda w: w.cache.truncate([20, 3] if w.cache.window is None else 700), again),
    "keep": (lambda w: w.cache.keep([[1, 4, 7], [0, 9]], start=[10, 12] if w.cache.window is None else 700), again),
    "clear": (lambda w: w.cache.clear(), again),
    "select": (lambda w: w.cache.select([1, 1, 0]), None),
    "copy": (lambda w: w.cache.copy(), None),
}
RING = {
    "attend pieces": (lambda w: w.cache.attend(0, w.long.q, w.long.k, w.long.v), again),
    "append round": (lambda w: w.cache.append(1, w.long.k, w.long.v), again),
}


def adds(w):
    w.sequences += [w.pool.sequence()]


def forks(w):
    w.sequences += [w.sequences[0].fork()]


def frees(w):
    w.sequences[1].free()
    del w.sequences[1]


def blocks(w):
    with w.sequences[0].fork() as fork:
        w.pool.append(0, [fork], w.one.k, w.one.v)


POOL = {
    "attend": (lambda w: w.pool.attend(1, w.sequences, w.one.q, w.one.k, w.one.v), again),
    "attend chunks": (
        lambda w: w.pool.attend(0, w.sequences, w.few.q, w.few.k, w.few.v, new_lengths=[1, 30, 9], return_lse=True),
        again,
    ),
    "only attend": (lambda w: w.pool.attend(0, w.sequences, w.one.q), None),
    "append": (lambda w: w.pool.append(0, w.sequences, w.few.k, w.few.v, new_lengths=[20, 0, 20]), again),
    "sequence": (adds, again),
    "fork": (forks, again),
    "truncate": (lambda w: w.sequences[2].truncate(3), again),
    "truncate shared": (lambda w: w.sequences[1].truncate(3), again),
    "keep": (lambda w: w.sequences[2].keep([1, 5, 18], start=14), again),
    "keep shared": (lambda w: w.sequences[1].keep([1, 5, 6], start=14), again),
    "free": (frees, again),
    "block": (blocks, None),
}


def finds(w):
    w.sequences += [w.pool.sequence(tokens=KEPT)]


def grows(w):
    return w.pool.attend(1, w.sequences[:1], w.few.q, w.rows.k, w.rows.v, new_lengths=[40], tokens=HELD)


PROMPTS = {
    "sequence": (finds, again),
    "attend": (grows, again),
    "append": (lambda w: w.pool.append(1, w.sequences[:1], w.rows.k, w.rows.v, new_lengths=[40]), again),
    "append to all": (
        lambda w: w.pool.append(0, w.sequences, w.few.k, w.few.v, new_lengths=[0, 20, 20], tokens=range(40)),
        again,
    ),
    "fork": (forks, again),
    "truncate": (lambda w: w.sequences[2].truncate(20), again),
    "keep": (lambda w: w.sequences[2].keep([1, 5, 18], start=14), again),
    "keep shared": (lambda w: w.sequences[1].keep([1, 5, 6], start=14), again),
    "free": (frees, again),
    "forget": (lambda w: w.pool.forget(), again),
}
FULL_OF_PROMPTS = {
    "append": (
        lambda w: w.pool.append(0, w.sequences[1:], w.few.k, w.few.v, new_lengths=[20, 20], tokens=range(40)),
        again,
    ),
    "keep shared": (lambda w: w.sequences[1].keep([1, 5, 6], start=14), again),
}
CALLS_OF = {
    "cache": CACHE, "int8": CACHE, "int4": CACHE, "latents": CACHE, "coded latents": CACHE, "ring": CACHE | RING,
    "pool": POOL, "int8 pool": POOL, "int4 pool": POOL, "latent pool": POOL,
    "prompts": PROMPTS, "full pool of prompts": FULL_OF_PROMPTS,
}  # fmt: skip
# of codes and latents a short run has what writes them: all else is the same Python
OF_STORES = ("attend", "attend again", "append", "keep", "keep shared")
CALLS = [
    (kind, name)
    for kind in MADE
    for name in CALLS_OF[kind]
    if FULL or kind in ("cache", "ring", "pool") or "prompts" in kind or name in OF_STORES
]


def world(kind):
    w = MADE[kind](np.random.default_rng(0))
    w.made = MADE[kind]
    return w


def result(w, call):
    """What a call gives, and leaves."""
    out = call(w)
    return [x.tobytes() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, np.ndarray)], w.state(w)


@needs_places
@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_an_exception_anywhere_leaves_everything_as_it_was(kind, name):
    call, undo = CALLS_OF[kind][name]
    sl.set_threads(1)
    wanted = result(world(kind), call)
    w = world(kind)
    if name == "attend again":  # by what is remembered of the first time; else the long way
        call(w)
        w.cache.truncate(24 if kind != "ring" else 724)
    else:
        forget()
    before = w.state(w)
    found = places(lambda: call(w))
    assert len(found) > 5
    if name == "attend again":
        w.cache.truncate(24 if kind != "ring" else 724)
    elif undo is not None:
        w = world(kind)
    for n in spread(found, MOST):
        if name != "attend again":
            forget()
        if vars(w).get("loses"):  # kept pages that a failing call took are free ones for the next
            w = world(kind)
        assert interrupted(lambda w=w: call(w), n), f"place {n} of {len(found)}"
        assert w.state(w) == before, f"place {n} of {len(found)}"
    assert result(w, call) == wanted


def uses(w):
    """Does in a signal handler what a program may do with a pool; leaves it as it was."""
    pool, own = w.pool, w.pool.sequence()
    pool.append(0, [own], w.few.k, w.few.v)
    pool.attend(1, [own], w.one.q, w.one.k, w.one.v, new_lengths=[3])
    own.truncate(0)
    for sequence in w.sequences:
        try:
            fork = sequence.fork()
        except (sl.CacheBusy, sl.ArgumentError):  # the call writes to it, or has freed it
            continue
        pool.append(0, [fork, own], w.one.k[:2], w.one.v[:2])
        fork.free()
    assert pool.free_pages >= 1


@needs_places
@pytest.mark.parametrize("within", ["", "kv/journal"])
@pytest.mark.parametrize("name", POOL)
def test_a_signal_handler_may_use_the_pool(name, within):
    """At any place of a call, which then goes on; between the pages' own accounts and their change, too."""
    call, _ = POOL[name]
    sl.set_threads(1)
    wanted = result(world("pool"), call)
    w = world("pool")
    forget()
    found = places(functools.partial(call, w), (within,))
    for n in spread(found, MOST if not within else 60):
        w = world("pool")
        forget()
        got = result(w, lambda w, n=n: handled(lambda: call(w), n, lambda: uses(w), (within,)))
        assert got == wanted, f"place {n} of {len(found)}"


def uses_prompts(w):
    """Does in a signal handler what a program may do with a pool of prompts, until kept pages are taken."""
    pool = w.pool
    check_found(pool)
    for prompt in (KEPT, [*SHORT, *HELD], [7] * 40):
        append(pool, pool.sequence(tokens=prompt), prompt).free()
    own = pool.sequence()
    count = pool.free_pages * 16
    for layer in (0, 1):
        pool.append(layer, [own], *(np.zeros((count, 2, 16), np.float32) for _ in "kv"))
    own.truncate(3)
    own.free()
    pool.sequence(tokens=KEPT, extra="another").free()


@needs_places
@pytest.mark.parametrize("within", ["", "kv/journal"])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_signal_handler_may_use_a_pool_of_prompts(name, within):
    """What the call then leaves is right, though other pages may be kept than without the handler."""
    call, _ = PROMPTS[name]
    sl.set_threads(1)

    def left(w):
        """Returns what is left, but of a sequence that finds pages: those may have been taken."""
        if name == "sequence":
            assert w.sequences.pop().length() in (0, 16, 32)
        w.loses = True
        return w.state(w)

    call(world("prompts"))  # what a first call loads has places of its own
    w = world("prompts")
    forget()
    found, wanted = places(functools.partial(call, w), (within,)), left(w)
    for n in spread(found, MOST if not within else 60):
        w = world("prompts")
        forget()
        handled(lambda w=w: call(w), n, lambda w=w: uses_prompts(w), (within,))
        check_found(w.pool)
        assert left(w) == wanted, f"place {n} of {len(found)}"


# --- with real signals


def alarmed(call, w, seconds):
    """Whether an alarm ended the call."""
    armed = done = True

    def handler(*_):
        if armed:
            raise Interrupt

    old = signal.signal(signal.SIGALRM, handler)
    try:
        done = False
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call(w)
        done = True
        armed = False
    except Interrupt:
        armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)
    return not done


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
@pytest.mark.parametrize("kind", MADE)
def test_a_signal_at_any_moment_leaves_everything_as_it_was(kind):
    assert threading.current_thread() is threading.main_thread()
    rng, ended = np.random.default_rng(1), 0
    calls = CALLS_OF[kind]
    for call, _ in calls.values():  # reads the kernels: a file that is being opened is Python's to close
        call(world(kind))
    w = world(kind)
    deadline = time.monotonic() + (60 if FULL else 0.5)
    while time.monotonic() < deadline + 60 * (ended <= 20):  # on a busy machine few alarms come in time
        call, undo = calls[str(rng.choice(list(calls)))]
        before = w.state(w)
        if alarmed(call, w, float(rng.uniform(20e-6, 400e-6))):
            ended += 1
            assert w.state(w) == before
        elif undo is not None:
            w = world(kind)
    assert ended > 20


# --- forks


def child(check):
    """Whether check() ends well in a forked child; it has 20 s."""
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        try:
            check()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def halfway(monkeypatch, owner, name, at, call):
    """Begins a call in another thread and stops it where owner.name returns for the at-th time; gives what lets it go
    on.
    """
    there, go, real, calls = threading.Event(), threading.Event(), getattr(owner, name), []

    def stopped(*arguments, **options):
        result = real(*arguments, **options)
        calls.append(1)
        if len(calls) == at and threading.current_thread() is thread:
            there.set()
            go.wait(60)
        return result

    forget()
    monkeypatch.setattr(owner, name, stopped)
    thread = threading.Thread(target=call)
    thread.start()
    assert there.wait(60)

    def finish():
        go.set()
        thread.join()

    return finish


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    ("kind", "name", "stop", "at"),
    [
        ("cache", "attend some of", "attend", 1),
        ("cache", "attend", "put", 1),
        ("cache", "append", "put", 1),
        ("cache", "keep", "move", 2),
        ("ring", "keep", "move", 1),
        ("ring", "attend pieces", "attend", 2),
        ("ring", "attend many", "put", 1),
        ("pool", "attend", "put", 1),
        ("pool", "append", "take", 1),
        ("pool", "append", "release_unowned", 2),  # nobody else can take pages
        ("pool", "keep", "move", 2),
        ("int8 pool", "keep shared", "move", 1),
        ("pool", "attend chunks", "attend", 1),
        ("prompts", "attend", "offer", 1),
        ("prompts", "keep", "move", 1),
        ("prompts", "keep", "withdraw", 1),
        ("prompts", "truncate", "withdraw", 1),
        ("prompts", "sequence", "find", 1),
    ],
)
def test_a_child_finds_everything_as_it_was(monkeypatch, kind, name, stop, at):
    """What another thread of the parent had begun has not been; what it was writing to can be written to."""
    call, _ = CALLS_OF[kind][name]
    wanted = result(world(kind), call)
    w = world(kind)
    before = w.state(w)

    def check():
        assert w.state(w) == before
        assert result(w, call) == wanted

    owner = vars(w).get("pool") or w.cache
    of_journal = stop in ("take", "release_unowned", "offer", "withdraw", "find")
    stopped = type(owner._journal) if of_journal else owner._storage
    finish = halfway(monkeypatch, stopped, stop, at, lambda: call(w))
    try:
        assert child(check)
    finally:
        finish()
    assert w.state(w) == wanted[1]  # and the parent goes on


class _Stop(BaseException):
    pass


def test_a_ring_is_as_it_was_when_signals_come_in_threes(rng):
    """A further signal comes while the first one's call is being undone."""
    again, on = [0], [False]

    def handler(*_: object) -> None:
        if on[0]:
            if again[0]:
                again[0] -= 1
                signal.setitimer(signal.ITIMER_REAL, float(rng.choice([1e-5, 3e-5, 1e-4])))
            raise _Stop

    cache = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=8, window=100, keep_first=3)
    x = [rng.standard_normal((2, 2, 300, 8)).astype(np.float32) for _ in range(3)]
    for _ in range(3):
        cache.attend(0, *x)
    before_handler = signal.signal(signal.SIGALRM, handler)
    try:
        for n in range(2000 if FULL else 100):
            before, done = (cache.lengths(0), cache.keys(0).tobytes(), cache.values(0).tobytes()), False
            try:
                again[0], on[0] = 2, True
                signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-4, 3e-3)))
                cache.attend(0, *(y * (n % 7 + 2) for y in x))
                done, on[0] = True, False
            except _Stop:
                pass
            on[0] = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            after = cache.lengths(0), cache.keys(0).tobytes(), cache.values(0).tobytes()
            assert done or after[0] != before[0] or after == before  # a signal after the return is not the call's
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before_handler)


def test_what_is_rolled_back_is_written_without_a_look_at_signals(rng):
    """NumPy looks for signals while it reads a list."""
    w = made_ring(rng)
    overwritten = w.cache._storage.before(0, [740, 740], list(range(5, 60)))
    for memory, index, saved in overwritten:
        assert np.array_equal(memory[index], saved) and not np.shares_memory(memory, saved)
        assert all(isinstance(x, (slice, np.ndarray)) for x in index)
    assert len(overwritten) == 2


@needs_places
def test_an_interrupted_training_call_leaves_gradients_on():
    """A known one turns them off while it repeats what was prepared."""


# --- the modes of PyTorch's autograd


def grad_calls():
    """Returns calls that turn recording off or on, or enter or leave inference mode, and the mode around each."""
    torch = pytest.importorskip("torch")
    from speedlight.arrays.torch_tensors import in_grad_mode
    from speedlight.calls import rotary
    from speedlight.expressions import autograd
    from speedlight.flash_attn import kernels
    from speedlight.torch import attention, flash_kernels

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, *flows):
            return 2 * flows[0]

    q = torch.ones(1, 1, 3, 4, requires_grad=True)
    rows = {0: torch.ones(3, dtype=torch.float64, requires_grad=True)}
    options = rotary.RotaryOptions(None, None, 0, None, False, None, "bhld")
    return {
        "helper": (in_grad_mode(False)(lambda: max(1.0, 2.0)), torch.enable_grad),
        "helper, on": (in_grad_mode(True)(lambda: max(1.0, 2.0)), torch.no_grad),
        "training": (lambda: attention(q, q, q), torch.enable_grad),
        "training anew": (lambda: attention(q, q, q, scale=next(SCALES)), torch.enable_grad),
        "flash_attn": (lambda: kernels.sum_rows(q, q), torch.enable_grad),
        "PyTorch's kernel": (lambda: flash_kernels._attend(q, q, q), torch.enable_grad),
        "score": (lambda: autograd._of_tensors(Doubled, (None,), rows, [0]), torch.no_grad),
        "rotary": (lambda: rotary._made_known(q.detach(), options), torch.inference_mode),
    }


SCALES = itertools.count(0.25)
GRAD_CALLS = ("helper", "helper, on", "training", "training anew", "flash_attn", "PyTorch's kernel", "score", "rotary")
# the doors, and PyTorch's own classes, whose methods would be interrupted
DOORS = ("autograd/attending", "arrays/torch_tensors", "flash_attn/kernels", "torch/flash_kernels",
         "expressions/autograd", "calls/rotary", "autograd/grad_mode")  # fmt: skip


@needs_places
@pytest.mark.parametrize("name", GRAD_CALLS)
def test_an_exception_anywhere_leaves_the_modes_of_autograd(name):
    torch = pytest.importorskip("torch")
    calls = grad_calls()
    assert tuple(calls) == GRAD_CALLS
    call, around = calls[name]
    modes = lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled())  # noqa: E731

    def watched():
        # looked at while the exception lives: it holds what is entered, which is left at the latest when that goes
        try:
            return call()
        except Interrupt:
            found.append(modes())
            raise

    call()
    with around():
        usual, found = modes(), []
        for n in spread(places(watched, DOORS), MOST * 10):
            assert interrupted(watched, n, DOORS), f"place {n}"
            assert [*found, modes()] == [usual, usual], f"place {n}"
            found.clear()
