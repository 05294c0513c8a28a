"""How gradients are computed: no byte too many (R08, R09, R11), tasks that wait for each other (R13, R14, R15), memory,
and what is refused.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import sys
import threading
import time
import tracemalloc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import FULL
from engines import tuned
from guarded import Guarded, GuardedNumpy, libc
from injection import interrupted, needs_places, places, spread
from problems import DTYPES, flow_of, numpy_dtype, qkv
from repeated import forget, kept
from test_backward import NAMES, same
from threads import count_threads, together, up, wait_until

import speedlight as sl
from speedlight.arrays.array import describe
from speedlight.calls import backward
from speedlight.cpu.engine import backward_call as differentiate
from speedlight.cpu.engine import table_sums
from speedlight.cpu.memory.records import HEAD, LEFT, LIMIT, SCRATCH, TICKET, WORKER
from speedlight.cpu.runtime import launch, workers
from speedlight.problem import biases

linux = pytest.mark.skipif(sys.platform == "win32", reason="mmap and mprotect")


def problem(rng: Any, dtype: str, *sizes: int, **options: Any) -> Any:
    """q, k, v, out, lse, d_out, d_lse; sizes: heads, kv_heads, q_len, k_len, head_dim, value_dim."""
    heads, kv_heads, q_len, k_len, d, dv = sizes
    given = qkv(rng, dtype, 1, heads, kv_heads, q_len, k_len, d, dv)
    return [*given, *flow_of(rng, given, **options)]


# --- R08, R09, R11


@pytest.fixture(scope="module")
def guarded() -> list[Guarded]:
    """Of seven arrays, three gradients, three sums, and scratch."""
    return [Guarded(size << 20) for size in [1] * 13 + [8]]


@pytest.fixture
def no_gap() -> Any:
    """Nothing lies between the scratch of one worker and the next one's."""
    with tuned(threading={"apart": 0}):
        yield


@linux
@pytest.mark.parametrize("dtype", DTYPES)
def test_guard_pages(isa, guarded, no_gap, dtype, monkeypatch):
    """Inputs sealed, outputs and scratch full of NaN, guards on both sides of all: a fault kills the process."""
    rng, kind, side = np.random.default_rng(7), numpy_dtype(dtype), "over"

    def made(x: Any, shape: tuple[int, ...], dtype: str, *, ordered: bool) -> Any:
        new = next(outputs).array(shape, numpy_dtype(dtype), side)
        return new, describe(new, "out")

    def scratch(size: int) -> ctypes.Array:
        last = guarded[13]
        return (ctypes.c_char * size).from_address(last.base + last.size - size)

    monkeypatch.setattr(launch, "take_scratch", scratch)
    monkeypatch.setattr(launch, "give_scratch", lambda x: None)
    sl.set_threads(1)
    for n in range(1500 if FULL else 40):
        side = str(rng.choice(["over", "under"]))
        d, dv = int(rng.integers(1, 131)), int(rng.integers(1, 131))
        q_len, k_len, group = int(rng.integers(1, 230)), int(rng.integers(1, 258)), int(rng.integers(1, 3))
        options: dict[str, Any] = {"causal": bool(n % 2), "q_start": int(rng.integers(-20, k_len))}
        shapes = [(1, group, q_len, d), (1, 1, k_len, d), (1, 1, k_len, dv)]
        shapes += [(1, group, q_len, dv), (1, group, q_len)] * 2
        logs = np.dtype(np.float64 if dtype == "float64" else np.float32)
        for g in guarded:
            g.unlock()
            ctypes.memset(g.base, 0xFF, g.size)  # NaN in every type
        given = [
            g.array(shape, logs if len(shape) == 3 else kind, side) for g, shape in zip(guarded, shapes, strict=False)
        ]
        for x, g in zip(given, guarded, strict=False):
            x[...] = rng.standard_normal(x.shape, dtype=np.float32)
            g.seal()
        outputs = iter(guarded[7:10])
        with monkeypatch.context() as patch:
            patch.setattr(backward, "empty_like", made)
            patch.setattr(differentiate, "np", GuardedNumpy(iter(guarded[10:13]), side))
            got = sl.attention_backward(*given, **options)
        for x, g in zip(got, guarded[7:10], strict=True):
            assert not np.isnan(x.astype(np.float32)).any()
            memory: Any = (ctypes.c_char * g.size).from_address(g.base)
            whole = np.frombuffer(memory, np.uint8)
            assert ((whole[: -x.nbytes] if side == "over" else whole[x.nbytes :]) == 0xFF).all()


@linux
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offsets_above_two_to_the_31(rng, dtype):
    """Rows 2^31 elements apart, of each array in turn."""
    given: Any = problem(rng, dtype, 1, 1, 4, 4, 16, 16)
    want = sl.attention_backward(*given)
    size, apart = given[0].itemsize, (1 << 31) + 64
    length = size * (3 * apart + 64)
    base = libc.mmap(None, length, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)  # MAP_NORESERVE
    buffer: Any = (ctypes.c_char * length).from_address(base)
    for n in (0, 1, 2, 3, 5):
        x = np.ndarray((1, 1, 4, 16), given[n].dtype, buffer, 0, (0, 0, apart * size, size))
        x[...] = given[n]
        every: Any = (*given[:n], x, *given[n + 1 :])
        same(sl.attention_backward(*every), want, NAMES[n])
    libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(length))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scratch_contents_do_not_matter(isa, rng, rubbish, dtype):
    given = problem(rng, dtype, 2, 1, 230, 150, 33, 17, causal=True)
    results = set()
    for _ in rubbish(launch):
        results.add(b"".join(x.tobytes() for x in sl.attention_backward(*given, causal=True)))
    assert len(results) == 1


# --- tasks wait for each other


@pytest.fixture
def many(rng, monkeypatch) -> Any:
    """A call of six blocks of queries and five ranges of keys, and what it comes to."""
    given = problem(rng, "float32", 4, 2, 500, 600, 16, 16)
    yield from called(lambda: sl.attention_backward(*given), monkeypatch)


@pytest.fixture
def followed(rng, monkeypatch) -> Any:
    """As `many`, where heads follow each other: all add to the same gradient of a table."""
    table = sl.table(rng.standard_normal((500, 600)))

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[i - 100, j]

    given = problem(rng, "float64", 4, 2, 500, 600, 16, 16, score=score)  # whose sums tell in what order they were made
    monkeypatch.setattr(biases, "_SHARE_BYTES", 1)
    monkeypatch.setattr(table_sums.TableSums, "beside", lambda *_: False)

    def call() -> Any:
        *others, (found,) = sl.attention_backward(*given, score=score, grads=(table,))
        return *others, found

    yield from called(call, monkeypatch)


def called(call: Any, monkeypatch: Any) -> Any:
    """The call, to be made by three threads, and what it comes to with one."""
    monkeypatch.setattr(workers, "_openmp", lambda _: None)
    with tuned(ranges={"keys": (128, 128)}):
        sl.set_threads(1)
        want = call()
        sl.set_threads(3)
        yield call, want


def from_ticket(words: Any, first: int, end: int) -> Any:
    """Arguments of a region of some of the tickets."""
    new = type(words).from_buffer_copy(words)
    new[TICKET], new[WORKER], new[LEFT], new[LIMIT] = first, 0, 0, end
    return new


@pytest.mark.parametrize("which", ["many", "followed"])
def test_tasks_wait_for_their_turn(which, request, monkeypatch):
    """Somebody draws late tickets and is there long before those who have the earlier ones."""
    call, want = request.getfixturevalue(which)
    cuts = []

    def out_of_turn(kernel: Any, words: Any, tickets: int, threads: int = 1, *_: float) -> None:
        cut = max(1, 5 * len(cuts))  # of five ranges of keys: where a head begins, too
        cuts.append(cut)
        early, late = from_ticket(words, 0, cut), from_ticket(words, cut, tickets)
        scratch = (ctypes.c_char * late[HEAD.index("scratch_stride")])()
        late[SCRATCH] = ctypes.addressof(scratch)
        thread = threading.Thread(target=kernel.entry, args=(ctypes.addressof(late),))
        thread.start()
        time.sleep(0.02)
        kernel.entry(ctypes.addressof(early))
        thread.join(60)
        assert not thread.is_alive()

    for name in ("run_alone", "run_tickets"):
        monkeypatch.setattr(launch, name, out_of_turn)
    for _ in range(18):
        same(call(), want, f"from ticket {cuts}")


@pytest.mark.parametrize("which", ["many", "followed"])
def test_a_call_may_stop_after_any_ticket(which, request, monkeypatch):
    """Regions of a long call, one after another: whatever a ticket waits for is in its own or an earlier one."""
    call, want = request.getfixturevalue(which)
    at = [0, 1]

    def in_two(kernel: Any, words: Any, tickets: int, threads: int = 1, *_: float) -> None:
        at[1] = tickets
        for first, end in itertools.pairwise((0, min(at[0], tickets), tickets)):
            if first < end:
                workers.run_region(kernel, from_ticket(words, first, end), threads)

    for name in ("run_alone", "run_tickets"):
        monkeypatch.setattr(launch, name, in_two)
    while at[0] <= at[1]:
        same(call(), want, f"cut at {at[0]}")
        at[0] += 1 if FULL else 3
    assert at[1] > 30


@pytest.mark.parametrize("helpers", [0, 1])
def test_fewer_threads_than_asked(many, monkeypatch, helpers):
    call, want = many
    started, ours = workers._started, workers._ours
    monkeypatch.setattr(workers, "_started", lambda count: started(count)[:helpers])
    if ours is not None:
        fewer: Any = SimpleNamespace(run=lambda kernel, words, _, *openmp: ours.run(kernel, words, helpers, *openmp))
        monkeypatch.setattr(workers, "_ours", fewer)
    sl.set_threads(8)
    same(call(), want)


def test_openmp_and_our_own_threads(many, monkeypatch):
    pytest.importorskip("torch")
    call, want = many
    same(call(), want)
    monkeypatch.undo()
    sl.set_threads(3)
    for _ in range(5):
        same(call(), want)


def test_concurrent_callers(many):
    call, want = many

    def work(_: int) -> None:
        for _ in range(3):
            same(call(), want)

    together(work, range(100 if FULL else 12))


@pytest.fixture
def short_regions() -> Any:
    with tuned(threading={"region_seconds": 1e-4}):
        yield


@needs_places
def test_an_interrupt_anywhere_leaves_threads_as_they_were(many, short_regions):
    """In a call of several regions: no slot stays taken, nobody inside, the next call right."""
    call, want = many
    call()
    wait_until(up)
    threads = count_threads()
    for n in spread(places(call), 100_000 if FULL else 40):
        interrupted(call, n)
        assert workers._region == [None]
        wait_until(lambda: count_threads() <= threads)
        same(call(), want, f"after place {n}")


# --- what is kept between calls (R31)


def test_a_repeated_call_sees_what_changed(rng):
    """Numbers in place, and every option."""
    arrays = qkv(rng, "float32", 2, 2, 1, 40, 50, 9, 8)
    everything = [*arrays, *flow_of(rng, arrays)]
    seen = {}
    lists = ([0, 10], [40, 33])
    for options in ({}, {"causal": True}, {"causal": "top-left"}, {"scale": 0.1}, {"scale": -0.1}, {"window": (9, 2)},
                    {"q_start": 3, "causal": True}, {"q_start": lists[0], "causal": True}, {"q_lengths": lists[1]},
                    {"k_lengths": lists[1]}, {"mask": np.arange(50) < 20}, {"score": sl.softcap(2.0)},
                    {"score": sl.softcap(3.0)}, {"sink_logits": [1.0, 2.0]}):  # fmt: skip
        got = sl.attention_backward(*everything, **options)
        for _ in range(2):
            same(sl.attention_backward(*everything, **options), got)
            forget()
            same(sl.attention_backward(*everything, **options), got)
            sl.attention_backward(*everything)
        seen[repr(options)] = b"".join(x.tobytes() for x in got)
    assert len(set(seen.values())) == len(seen) - 1  # sinks change out and lse alone
    lists[0][0] = 25
    got = sl.attention_backward(*everything, q_start=lists[0], causal=True)
    assert b"".join(x.tobytes() for x in got) != seen[repr({"q_start": [0, 10], "causal": True})]
    for x in everything:
        before = sl.attention_backward(*everything)
        x *= np.float32(1.5)
        got = sl.attention_backward(*everything)
        forget()
        same(sl.attention_backward(*everything), got)
        assert any(a.tobytes() != b.tobytes() for a, b in zip(got, before, strict=True))
    without = sl.attention_backward(*everything[:6])
    assert without[0].tobytes() != sl.attention_backward(*everything)[0].tobytes()


# --- memory


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_is_small_and_linear(monkeypatch, dtype):
    """Beside the gradients: 40 MB for one head of 65,536 tokens; of 16 bits also the gradients' sums in float32."""
    taken = []
    monkeypatch.setattr(launch, "take_scratch", lambda size: taken.append(size) or (ctypes.c_char * 64)())
    monkeypatch.setattr(launch, "give_scratch", lambda scratch: None)
    monkeypatch.setattr(launch, "run_tickets", lambda *given: None)
    sl.set_threads(2)
    extra = []
    for n in (32768, 65536):
        x, lse = np.zeros((1, 1, n, 64), dtype), np.zeros((1, 1, n), np.float32)
        tracemalloc.start()
        sl.attention_backward(x, x, x, x, lse, x)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        sums = 0 if dtype == "float32" else 3 * x.size * 4
        extra.append(peak - 3 * x.nbytes - sums + taken[-1])
    assert extra[1] < 40 << 20
    assert extra[1] - extra[0] < 1 << 20


def test_a_prepared_call_keeps_no_array(rng):
    """Calls are known by shapes and strides: whoever drops the arrays has their memory back."""
    arrays = qkv(rng, "float32", 1, 2, 2, 5, 6, 9, 8)
    everything = [*arrays, *flow_of(rng, arrays)]
    held = [weakref.ref(x) for x in everything]
    forget()
    for _ in range(2):
        sl.attention_backward(*everything)
    assert len(kept("gradients")) == 1
    del arrays, everything
    gc.collect()
    assert [x() for x in held] == [None] * len(held)


# --- what is refused

WRONG: list[tuple[str, Any, type[sl.Error], str]] = [
    ("q", np.zeros((1, 2, 5), np.float32), sl.ArgumentError, "expected .* got"),
    ("k", np.zeros((1, 1, 6, 9), np.float32), sl.ArgumentError, "expected .* got"),
    ("v", np.zeros((1, 1, 7, 4), np.float32), sl.ArgumentError, "expected .* got"),
    ("k", np.zeros((1, 1, 6, 8), np.float64), sl.ArgumentTypeError, "expected .* got float64"),
    ("out", np.zeros((1, 2, 5, 8), np.float32), sl.ArgumentError, r"expected shape \(1, 2, 5, 4\), as .* got"),
    ("lse", np.zeros((1, 5, 2), np.float32), sl.ArgumentError, r"expected shape \(1, 2, 5\), as .* got \(1, 5, 2\)"),
    ("lse", np.zeros((1, 2, 5)), sl.ArgumentTypeError, "expected dtype float32, as .* got float64. Convert"),
    ("d_out", np.zeros((1, 2, 5, 4), np.float16), sl.ArgumentTypeError, "expected dtype float32, .* got float16"),
    ("d_lse", np.zeros((1, 2, 6), np.float32), sl.ArgumentError, "expected shape .* got"),
    ("d_lse", np.zeros((1, 2, 5), np.float16), sl.ArgumentTypeError, "expected dtype float32"),
    *((name, None, sl.ArgumentTypeError, "expected a NumPy array.* got NoneType") for name in NAMES[:6]),
    *((name, [[1.0]], sl.ArgumentTypeError, "expected a NumPy array.* got list") for name in NAMES),
    *((name, np.zeros((1, 2, 5, 4), np.int32), sl.ArgumentTypeError, "expected dtype .* got int32") for name in NAMES),
    ("out", np.ma.zeros((1, 2, 5, 4), np.float32), sl.ArgumentTypeError, "without a mask of its own"),
    ("k_lengths", [9], sl.ArgumentError, "expected .* got"),
    ("q_lengths", [1, 2], sl.ArgumentError, "expected .* got"),
    ("sink_logits", [1.0], sl.Error, "expected .* got"),
    ("grads", "sink_logits", sl.ArgumentTypeError, "expected a tuple"),
    ("grads", ("sinks",), sl.ArgumentTypeError, r"got 'sinks' at \[0\]"),
    ("grads", ("sink_logits",), sl.ArgumentError, "expected sink_logits= beside"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bad", "kind", "message"), WRONG, ids=[f"{x[0]} {n}" for n, x in enumerate(WRONG)])
def test_wrong_arguments_are_named(rng, name, bad, kind, message):
    """Also when the call was made before with right ones; by the specification, too."""
    given: dict[str, Any] = dict(zip(NAMES, problem(rng, "float32", 2, 1, 5, 6, 8, 4), strict=True))
    for gradients_of in (sl.attention_backward, sl.attention_backward, sl.reference.backward):
        with pytest.raises(kind, match=f"^{name}: .*{message}"):
            gradients_of(**(given | {name: bad}))
        gradients_of(**given)


def test_wrong_tensors_are_named(rng):
    torch = pytest.importorskip("torch")
    given: dict[str, Any] = dict(zip(NAMES, problem(rng, "float32", 2, 1, 5, 6, 8, 4), strict=True))
    tensors: dict[str, Any] = {name: torch.from_numpy(x) for name, x in given.items()}
    for name, x in tensors.items():
        for base, other in ((given, x), (tensors, given[name])):
            for gradients_of in (sl.attention_backward, sl.reference.backward):
                with pytest.raises(sl.ArgumentTypeError, match="expected the same kind of array as q"):
                    gradients_of(**(base | {name: other}))
        with pytest.raises(sl.UnsupportedError, match=f"^{name}: requires grad"):
            sl.attention_backward(**(tensors | {name: x.clone().requires_grad_()}))
        with pytest.raises(sl.UnsupportedError, match=f"^{name}: .*meta"):
            sl.attention_backward(**(tensors | {name: x.to("meta")}))
        sl.attention_backward(**tensors)


@pytest.mark.parametrize("gradients_of", [sl.attention_backward, sl.reference.backward])
def test_an_operation_without_a_derivative_is_named(rng, gradients_of):
    given = problem(rng, "float32", 2, 1, 5, 6, 8, 4)
    with pytest.raises(sl.ExpressionError, match="expected operations that have a derivative; got %"):
        gradients_of(*given, score=sl.expression(lambda s, b, h, i, j: s % 2.0))


def test_an_entry_out_of_range_is_an_error(rng):
    table = sl.table(np.ones(3, np.float32), "short")
    given = problem(rng, "float32", 2, 1, 5, 6, 8, 4)
    score = sl.expression(lambda s, b, h, i, j: s + table[sl.cast(sl.abs(s) * 0.0, int) + j])
    with pytest.raises(sl.Error, match="short"):
        sl.attention_backward(*given, score=score)
