"""Pools of pages and raw pages: the bits of contiguous keys, whatever the pages; accounts that always add up."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from conftest import FULL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from problems import CODES, DTYPES, numpy_dtype, quantise, taken
from wrong import WRONG

import speedlight as sl
from speedlight.cpu import prepare, putting, storage

KINDS = (*DTYPES, *CODES)
OPTIONS = [{}, {"score": sl.softcap(2.0)}, {"mask": sl.window(50, 0) | sl.prefix(3)}, {"sink_logits": [0.5, -1, 2, 0]}]


def made(dtype="float32", d=16, dv=17, **sizes):
    return sl.PagePool(
        **(
            {"layers": 1, "pages": 60, "page_size": 16, "kv_heads": 2, "head_dim": d, "value_dim": dv, "dtype": dtype}
            | sizes
        )
    )


def packed(rng, dtype, total, d=16, dv=17):
    kind = numpy_dtype(taken(dtype))
    return [rng.standard_normal((total, heads, dim)).astype(kind) for heads, dim in ((4, d), (2, d), (2, dv))]


def alone(dtype, d, dv, chunks, **options):
    """What a cache of one sequence says to the last chunk."""
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=d, value_dim=dv, capacity=5000, dtype=dtype)
    for q, k, v in chunks:
        out, lse = cache.attend(0, *(x.swapaxes(0, 1)[None] for x in (q, k, v)), return_lse=True, **options)
    return out[0].swapaxes(0, 1), lse[0]


def check_accounts(pool, sequences):
    """Every page is free, or held as often as counted."""
    held = Counter(page for s in sequences for page in s.pages)
    assert (
        pool.free_pages == len(pool._free) == pool.pages - len(held) and pool.used_bytes == len(held) * pool.page_bytes
    )
    assert sorted([*held, *pool._free]) == list(range(pool.pages))
    assert [pool._others[page] for page in range(pool.pages)] == [max(held[page] - 1, 0) for page in range(pool.pages)]


@pytest.mark.each("dtype", "page_size", "options")
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_pool_has_the_bits_of_a_cache(isa, one_width, rng, dtype, page_size, options):
    """Chunks of any lengths of several sequences in one call, over pages in any order."""
    d, dv = [(16, 17), (33, 40)][page_size == 48]
    pool = made(dtype, d, dv, pages=150, page_size=page_size)
    rng.shuffle(pool._free)
    sequences, chunks = [pool.sequence() for _ in range(3)], [[], [], []]
    for counts in ([300, 7, 1], [1, 1, 1], [5, 1, 200], [1, 0, 1], [700, 2, 130], [1, 1, 1]):
        q, k, v = packed(rng, dtype, sum(counts), d, dv)
        out, lse = pool.attend(0, sequences, q, k, v, new_lengths=counts, return_lse=True, **options)
        at = 0
        for sequence, before, n in zip(sequences, chunks, counts, strict=True):
            here = slice(at, at + n)
            before.append((q[here], k[here], v[here]))
            want, want_lse = alone(dtype, d, dv, before, **options)
            assert out[here].tobytes() == want.tobytes() and lse[:, here].tobytes() == want_lse.tobytes(), (
                f"{n} of {sequence}"
            )
            at += n
    q, _, _ = packed(rng, dtype, 3, d, dv)
    assert np.isfinite(pool.attend(0, sequences, q, **options).astype(np.float32)).all()  # without appending


def test_queries_that_are_not_those_of_the_new_tokens(rng):
    """More of them ask for earlier tokens again, fewer for the last ones: the bits that these had, or would have."""
    pool, other = made(), made()
    chunks = [packed(rng, "float32", 60) for _ in range(3)]
    mine, theirs = ([p.sequence() for _ in chunks] for p in (pool, other))
    want = [other.attend(0, [s], *c, return_lse=True) for s, c in zip(theirs, chunks, strict=True)]
    pool.append(0, mine, *(np.concatenate([c[n][:30] for c in chunks]) for n in (1, 2)), new_lengths=[30] * 3)
    at = [30, 30, 30]
    for new, asked in (
        ([2, 0, 1], [5, 7, 1]),
        ([3, 9, 0], [1, 1, 0]),
        ([0, 0, 0], [3, 1, 2]),
        ([1, 1, 1], [2, 2, 2]),
    ) * 2:
        at = [a + n for a, n in zip(at, new, strict=True)]
        k, v = (np.concatenate([c[x][a - n : a] for c, a, n in zip(chunks, at, new, strict=True)]) for x in (1, 2))
        q = np.concatenate([c[0][a - n : a] for c, a, n in zip(chunks, at, asked, strict=True)])
        out, lse = pool.attend(0, mine, q, k, v, new_lengths=new, q_lengths=asked, return_lse=True)
        ends = np.cumsum(asked)
        for (full, logs), a, n, end in zip(want, at, asked, ends, strict=True):
            assert out[end - n : end].tobytes() == full[a - n : a].tobytes()
            assert lse[:, end - n : end].tobytes() == logs[:, a - n : a].tobytes()
    q, k, v = chunks[0]
    a = pool.sequence()
    for asked, message in (
        ([3], "q_lengths: expected at most 2, the tokens of sequence 0 by now; got 3"),
        ([2], "q_lengths: expected 1 ints, one per sequence, that add up to the 3 queries"),
        (None, r"k: expected 3 tokens, as q and new_lengths have; got 2\. Other queries .* told by q_lengths=\."),
    ):
        with pytest.raises(sl.Error, match=message):
            pool.attend(0, [a], q[:3], k[:2], v[:2], q_lengths=asked)
    assert a.length() == 0 and a.pages == ()
    same = pool.attend(0, mine, q[:6], q_lengths=[1, 2, 3])
    assert same.tobytes() == pool.attend(0, mine, q[:6], new_lengths=[1, 2, 3]).tobytes()


def test_a_mask_knows_a_sequence_by_its_place(rng):
    pool = made()
    sequences = [pool.sequence() for _ in range(3)]
    q, k, v = packed(rng, "float32", 60)
    ids = sl.table(np.array([5, 9, 40]), "ends")
    out = pool.attend(0, sequences, q, k, v, new_lengths=[1, 50, 9], mask=lambda b, h, i, j: j < ids[b])
    want = alone("float32", 16, 17, [(q[1:51], k[1:51], v[1:51])], mask=lambda b, h, i, j: j < 9)[0]
    assert out[1:51].tobytes() == want.tobytes()


def test_forks_share_until_one_writes(rng):
    pool = made(layers=2, pages=6)
    a = pool.sequence()
    q, k, v = packed(rng, "float32", 40)
    for layer in (0, 1):
        pool.append(layer, [a], k, v)
    b = a.fork()
    assert a.pages == b.pages and pool.free_pages == 3 and pool.used_bytes == 3 * pool.page_bytes
    pool.attend(0, [b], q[:1], k[:1], v[:1])
    assert a.pages[:2] == b.pages[:2] and a.pages[2] != b.pages[2] and pool.free_pages == 2
    assert a.keys(1).tobytes() == b.keys(1).tobytes() == k.swapaxes(0, 1).tobytes()  # the copy has all layers
    assert a.length(0) == 40 and b.length(0) == 41 and b.length(1) == 40
    a.free()
    assert pool.free_pages == 3 and "freed" in repr(a)
    with pytest.raises(sl.ArgumentError, match="this sequence was freed"):
        pool.attend(0, [a], q[:1])
    c = pool.sequence()  # has the place of the freed one; the old handle still means nothing
    with pytest.raises(sl.ArgumentError, match="this sequence was freed"):
        a.length()
    assert c.length() == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_failing_batch_takes_nothing_from_those_who_share(rng, order, monkeypatch):
    """The longer one gets a copy; the shorter may not write to what it left, which is the longer's again when the call
    fails.
    """
    pool = made()
    _, k, v = packed(rng, "float32", 14)
    longer = pool.sequence()
    pool.append(0, [longer], k[:14], v[:14])
    shorter = longer.fork()
    shorter.truncate(3)
    both = [longer, shorter]
    new = packed(rng, "float32", 4)
    free, held = pool.free_pages, [(s.keys(0).tobytes(), s.values(0).tobytes()) for s in both]

    def fail(*_, **__):
        raise sl.CompileError("no")

    with monkeypatch.context() as patch:
        patch.setattr(pool._storage, "attend", fail)
        with pytest.raises(sl.CompileError):
            pool.attend(0, [both[n] for n in order], *new, new_lengths=[2, 2])
    assert [(s.keys(0).tobytes(), s.values(0).tobytes()) for s in both] == held and pool.free_pages == free
    check_accounts(pool, both)
    pool.append(0, [both[n] for n in order], *new[1:], new_lengths=[2, 2])
    check_accounts(pool, both)
    assert longer.keys(0)[:, :14].tobytes() == k[:14].swapaxes(0, 1).tobytes() and shorter.length() == 5


def test_the_last_page_can_be_used_and_one_more_is_refused(rng):
    pool = made(pages=4)
    a, b = pool.sequence(), pool.sequence()
    q, k, v = packed(rng, "float32", 49)
    pool.append(0, [a, b], k[:48], v[:48], new_lengths=[31, 17])
    with pytest.raises(sl.CacheFull, match="layer 0: 1 pages are needed, 0 of 4 are free") as caught:
        pool.attend(0, [a, b], q[:17], k[:17], v[:17], new_lengths=[2, 15])
    assert (caught.value.needed, caught.value.free) == (1, 0)
    assert (a.length(), b.length()) == (31, 17) and a.keys(0).tobytes() == k[:31].swapaxes(0, 1).tobytes()
    pool.attend(0, [a, b], q[:16], k[:16], v[:16], new_lengths=[1, 15])
    assert (a.length(), b.length(), pool.free_pages) == (32, 32, 0)
    twins = made(pages=2)
    first = twins.sequence()
    twins.append(0, [first], k[:8], v[:8])
    second = first.fork()
    twins.attend(0, [first, second], q[:2], k[:2], v[:2])  # one takes the free page, the other keeps the shared one
    assert twins.free_pages == 0
    first.free()
    third = second.fork()
    del second  # of which nobody has counted anything yet: who is alone needs no page to write to
    twins.append(0, [third], k[:8], v[:8])
    assert twins.free_pages == 0 and third.length() == 17


CALLS = [
    (lambda p, s, q, k, v: p.attend(1, [s], q, k, v), "layer: expected 0 to 0; got 1"),
    (lambda p, s, q, k, v: p.attend(0, [s, s], q, k, v, new_lengths=[2, 1]), "sequences: expected each sequence once"),
    (lambda p, s, q, k, v: p.attend(0, [3], q, k, v), "sequences: expected sequences of this pool"),
    (
        lambda p, s, q, k, v: p.attend(0, [made().sequence()], q, k, v),
        "sequences: expected sequences of this pool; got one of another",
    ),
    (lambda p, s, q, k, v: p.attend(0, [s], q, k), "v: expected k and v together"),
    (lambda p, s, q, k, v: p.attend(0, [s], q[:2], k, v), "k: expected 2 tokens"),
    (lambda p, s, q, k, v: p.attend(0, [s], q, k, v[:2]), "v: expected 3 tokens"),
    (
        lambda p, s, q, k, v: p.attend(0, [s], q, k, v, new_lengths=[4]),
        "new_lengths: expected 1 ints, one per sequence, that add up to the 3",
    ),
    (
        lambda p, s, q, k, v: p.attend(0, [s, p.sequence()], q, k, v),
        "new_lengths: expected 2 ints, one per sequence, that add up to the 3 tokens; got None, which is one each",
    ),
    (lambda p, s, q, k, v: p.attend(0, [s], q, k, v, new_lengths=[3.0]), "new_lengths: expected 1 ints"),
    (
        lambda p, s, q, k, v: p.attend(0, [s], q, k.astype(np.float64), v),
        "k: expected dtype float32, as the cache has; got float64",
    ),
    (
        lambda p, s, q, k, v: p.attend(0, [s], q.astype(np.float16), k, v),
        "q: expected dtype float32, as the cache has; got float16",
    ),
    (lambda p, s, q, k, v: p.attend(0, [s], q[:, :3], k, v), "q: expected a multiple of 2 heads, the kv heads of"),
    (lambda p, s, q, k, v: p.attend(0, [s], q[:, :, :3], k, v), "q: expected head_dim 16"),
    (
        lambda p, s, q, k, v: p.attend(0, [s], q, k, v.swapaxes(0, 1)),
        r"v: .* got \(2, 3, 17\)\. Heads come after tokens: v\.swapaxes\(0, 1\)",
    ),
    (lambda p, s, q, k, v: p.attend(0, [s], q, k[:, :1], v), r"k: expected shape \(total new, 2, 16\)"),
    (
        lambda p, s, q, k, v: p.attend(0, [s], q, k, v, mask=np.ones((1, 1, 3, 3), bool)),
        "expected a function or pattern for layout='lhd'",
    ),
    (lambda p, s, q, k, v: p.attend(0, [s], q, k, v, out=np.zeros((1, 4, 17), np.float32)), "out: expected shape"),
    (lambda p, s, q, k, v: s.truncate(6), "length: expected 0 to 5"),
    (lambda p, s, q, k, v: made(page_size=20), "page_size: expected a multiple of 16; got 20. Use 32."),
    (lambda p, s, q, k, v: made(pages=0), "pages: expected a size from 1"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_every_failing_call_leaves_the_pool_as_it_was(rng, call, message):
    pool = made()
    sequence = pool.sequence()
    q, k, v = packed(rng, "float32", 5)
    pool.append(0, [sequence], k, v)
    before = sequence.keys(0).tobytes(), sequence.values(0).tobytes(), sequence.pages, pool.free_pages
    with pytest.raises(sl.Error, match=message):
        call(pool, sequence, *(x[:3] for x in (q, k, v)))
    assert (sequence.keys(0).tobytes(), sequence.values(0).tobytes(), sequence.pages, pool.free_pages) == before
    pool.attend(0, [sequence], q, k, v)


def test_arguments_of_any_type(rng):
    """A speedlight error, or an answer; never an error of somebody else's, and nothing is changed by an error."""
    sizes = {"layers": 1, "pages": 6, "page_size": 16, "kv_heads": 2, "head_dim": 16}
    q, k, v = packed(rng, "float32", 5, 16, 16)
    step = {
        "layer": 0,
        "sequences": [],
        "q": q[:1],
        "k": k[:1],
        "v": v[:1],
        "new_lengths": None,
        "q_lengths": None,
        "scale": None,
        "mask": None,
    }
    step |= {"score": None, "sink_logits": None, "return_lse": False, "out": None}
    append = {n: step[n] for n in ("layer", "sequences", "k", "v", "new_lengths")}
    calls = [
        ("attend", step),
        ("append", append),
        ("truncate", {"length": 3}),
        ("keep", {"indices": [0], "start": 3}),
        ("length", {"layer": 0}),
        ("keys", {"layer": 0}),
    ]
    for method, usual in calls:
        for name in usual:
            for wrong in WRONG:
                pool = sl.PagePool(**sizes)
                sequence = pool.sequence()
                pool.append(0, [sequence], k, v)
                owner = pool if "sequences" in usual else sequence
                given = usual | ({"sequences": [sequence]} if owner is pool else {}) | {name: wrong}
                try:
                    getattr(owner, method)(**given)
                except sl.Error as error:
                    assert sequence.keys(0).tobytes() == k.swapaxes(0, 1).tobytes() and str(error), (
                        f"{method}({name}={wrong!r})"
                    )
                    check_accounts(pool, [sequence])
                if name == "sequences":
                    with pytest.raises(sl.Error, match="sequences: expected|new_lengths: expected"):
                        pool.attend(0, [sequence, wrong], q[:2], k[:2], v[:2])
    for name in (*sizes, "dtype", "value_dim", "device"):
        for wrong in WRONG:
            with contextlib.suppress(sl.Error):
                sl.PagePool(**(sizes | {name: wrong}))


def test_one_writer_of_a_sequence_at_a_time(rng):
    pool = made()
    a, b = pool.sequence(), pool.sequence()
    q, k, v = packed(rng, "float32", 5)
    pool._claims.add(a._number)
    with pytest.raises(sl.CacheBusy, match="another thread is writing"):
        pool.append(0, [b, a], k, v, new_lengths=[2, 3])
    pool.append(0, [b], k, v)
    pool._claims.clear()
    assert (a.length(), b.length()) == (0, 5)
    wrong = []

    def work(n: int) -> None:
        """Sequences of their own, in one pool."""
        for _ in range(20):
            mine = pool.sequence()
            pool.attend(0, [mine], *(x.repeat(n, 0) for x in (q, k, v)))
            wrong.extend([1] if mine.keys(0).tobytes() != k.repeat(n, 0).swapaxes(0, 1).tobytes() else [])
            mine.free()

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 3, 9)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong and pool.free_pages == 59


def test_accounts_are_exact_whatever_threads_do(rng):
    """Forks of one sequence in several threads, switched as often as can be: pages are shared, copied, let go, and run
    out.
    """
    pool = made(pages=40)
    base = pool.sequence()
    _, k, v = packed(rng, "float32", 40)
    pool.append(0, [base], k, v)
    left, wrong = [], []

    def work(seed: int) -> None:
        mine, held = np.random.default_rng(seed), []
        for _ in range(20_000 if FULL else 1500):
            what = mine.integers(5)
            try:
                if what == 0 or not held:
                    held.append(base.fork())
                elif what == 1:
                    held.pop().free()
                elif what == 2:
                    held[-1].truncate(int(mine.integers(held[-1].length() + 1)))
                else:
                    n = int(mine.integers(1, 30))
                    pool.append(0, held[-1:], k[:n], v[:n], new_lengths=[n])
            except sl.CacheFull as error:
                wrong.extend([] if error.needed > error.free else [error])
            except sl.CacheBusy:  # base, which another thread forks
                pass
            except Exception as error:
                wrong.append(error)
        left.extend(held)

    threads, interval = [threading.Thread(target=work, args=(n,)) for n in range(4)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        [t.start() for t in threads]
        [t.join() for t in threads]
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    check_accounts(pool, [base, *left])
    assert base.keys(0).tobytes() == k.swapaxes(0, 1).tobytes()
    [x.free() for x in (base, *left)]
    assert pool.free_pages == 40


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, against arrays that are simply concatenated; pages are always either free or held as often as
    counted.
    """

    dtype = "float32"

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.pool = made(self.dtype, layers=2, pages=14)
        self.model: list[tuple[sl.PagedSequence, list]] = []  # handle, of each layer chunks of (q, k, v)

    @rule()
    def new(self):
        if len(self.model) < 5:
            self.model.append((self.pool.sequence(), [[], []]))

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4))
    def fork(self, which):
        if len(self.model) < 5:
            sequence, chunks = self.model[which % len(self.model)]
            self.model.append((sequence.fork(), [list(x) for x in chunks]))

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4), told=st.booleans())
    def free(self, which, told):
        sequence, _ = self.model.pop(which % len(self.model))
        if told:
            sequence.free()

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4), share=st.floats(0, 1))
    def truncate(self, which, share):
        sequence, chunks = self.model[which % len(self.model)]
        n = int(share * min(sequence.length(0), sequence.length(1)))
        sequence.truncate(n)
        for layer in (0, 1):
            whole = [np.concatenate(x)[:n] for x in zip(*chunks[layer], strict=True)] if chunks[layer] else []
            chunks[layer] = [tuple(whole)] if n else []

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4), share=st.floats(0, 1), path=st.sets(st.integers(0, 40)))
    def keep(self, which, share, path):
        sequence, chunks = self.model[which % len(self.model)]
        least, free = min(sequence.length(0), sequence.length(1)), self.pool.free_pages
        start = int(share * least)
        left = sorted(n for n in path if start + n < least)
        try:
            sequence.keep(left, start=start)
        except sl.CacheFull as error:
            assert error.needed > error.free == free == self.pool.free_pages
            return
        which = [*range(start), *(start + n for n in left)]
        for layer in (0, 1):
            whole = [np.concatenate(x)[which] for x in zip(*chunks[layer], strict=True)] if chunks[layer] else []
            chunks[layer] = [tuple(whole)] if which else []

    @precondition(lambda self: self.model)
    @rule(layer=st.integers(0, 1), counts=st.lists(st.integers(0, 40), min_size=5, max_size=5), attend=st.booleans())
    def grow(self, layer, counts, attend):
        counts = counts[: len(self.model)]
        q, k, v = packed(self.rng, self.dtype, sum(counts))
        sequences = [s for s, _ in self.model]
        free = self.pool.free_pages
        try:
            if attend:
                out = self.pool.attend(layer, sequences, q, k, v, new_lengths=counts)
            else:
                self.pool.append(layer, sequences, k, v, new_lengths=counts)
        except sl.CacheFull as error:
            assert error.needed > error.free == free == self.pool.free_pages
            return
        at = 0
        for (_, chunks), n in zip(self.model, counts, strict=True):
            here = slice(at, at + n)
            if n:
                chunks[layer].append((q[here], k[here], v[here]))
                if attend:
                    assert out[here].tobytes() == alone(self.dtype, 16, 17, chunks[layer])[0].tobytes()
            at += n

    @invariant()
    def accounts_add_up(self):
        check_accounts(self.pool, [sequence for sequence, _ in self.model])

    @invariant()
    def holds_what_it_was_given(self):
        for sequence, chunks in self.model:
            assert len(sequence.pages) == -(-max(sequence.length(0), sequence.length(1)) // 16) or chunks == [[], []]
            for layer in (0, 1):
                for which, stored in ((1, sequence.keys(layer)), (2, sequence.values(layer))):
                    tokens = (
                        np.concatenate([c[which] for c in chunks[layer]])
                        if chunks[layer]
                        else stored.swapaxes(0, 1)[:0]
                    )
                    if self.dtype == "int8":
                        codes, scales = quantise(tokens)
                        tokens = codes * scales
                    assert stored.swapaxes(0, 1).tobytes() == tokens.tobytes()


class QuantisedPoolMachine(PoolMachine):
    dtype = "int8"


for machine in (PoolMachine, QuantisedPoolMachine):
    machine.TestCase.settings = settings(
        max_examples=300 if FULL else 20, stateful_step_count=50 if FULL else 20, deadline=None
    )
TestPoolMachine, TestQuantisedPoolMachine = PoolMachine.TestCase, QuantisedPoolMachine.TestCase


# --- sequences that nobody has


def test_pages_return_when_nobody_has_a_sequence(rng):
    pool = made(pages=6)
    _, k, v = packed(rng, "float32", 40)
    a, empty = pool.sequence(), pool.sequence()
    pool.append(0, [a], k, v)
    b = a.fork()
    assert pool.free_pages == 3
    del a
    assert b.keys(0).tobytes() == k.swapaxes(0, 1).tobytes()  # b has them still
    kept = b.pages
    pool.append(0, [b], k[:1], v[:1])  # alone, it writes where it is
    assert pool.free_pages == 3 and b.pages == kept
    loop = [b]
    loop.append(loop)  # which only the garbage collector finds
    del b, loop
    gc.collect()
    assert pool.free_pages == 6 and pool._held.keys() == {empty._number} == pool._handles.keys()
    check_accounts(pool, [empty])
    for _ in range(5):
        pool.append(0, [pool.sequence()], k, v)  # each of which finds what the one before it had
    assert len(pool._held) <= 3 and pool.free_pages == 6


def test_a_block_frees_its_sequence(rng):
    pool = made(pages=6)
    _, k, v = packed(rng, "float32", 40)
    with contextlib.suppress(ZeroDivisionError), pool.sequence() as a, a.fork() as b:
        pool.append(0, [a, b], k, v, new_lengths=[20, 20])
        assert pool.free_pages == 2
        b.free()  # before its block ends
        raise ZeroDivisionError
    assert pool.free_pages == 6 and "freed" in repr(a) and "freed" in repr(b)
    with pytest.raises(sl.ArgumentError, match="this sequence was freed"), a:
        pass


def test_a_sequence_may_go_anywhere_at_any_moment(rng):
    """In the thread that takes pages, while it has the lock; and in others. Never twice, never while it is in use."""
    pool = made(pages=400)
    _, k, v = packed(rng, "float32", 40)
    held = [pool.sequence() for _ in range(100)]
    for sequence in held:
        pool.append(0, [sequence], k[:17], v[:17])
    del sequence
    with pool._taking:
        for _ in range(50):
            held.pop()
    kept, go = held[:10], threading.Barrier(3)
    del held[:10]
    halves = [held[:20], held[20:]]
    held.clear()

    def drop(mine):
        go.wait()
        while mine:
            del mine[-1]
            assert pool.free_pages <= 380

    threads = [threading.Thread(target=drop, args=(x,)) for x in halves]
    for thread in threads:
        thread.start()
    go.wait()
    for n in range(200):
        pool.append(0, [kept[n % 10]], k[:1], v[:1])
        pool.sequence().fork()
    for thread in threads:
        thread.join()
    check_accounts(pool, kept)
    assert {s.length() for s in kept} == {37} and pool.free_pages == 400 - 10 * 3


def test_nothing_is_lost_when_everything_ends():
    """Pools and sequences of an interpreter that exits, and of threads in it."""
    script = (
        "import threading, numpy as np, speedlight as sl\n"
        "pool = sl.PagePool(layers=1, pages=9, page_size=16, kv_heads=1, head_dim=8)\n"
        "x = np.ones((20, 1, 8), np.float32)\n"
        "a = pool.sequence(); pool.append(0, [a], x, x)\n"
        "threading.Thread(target=lambda b=a.fork(): b.length()).start()\n"
        "loop = [a]; loop.append(loop)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


# --- no memory


def forget_steps(owner):
    """So that the next call is checked and prepared anew."""
    owner._storage.steps.clear()
    owner._storage.checked_steps.clear()
    owner._storage.puts.clear()


class _Failing:
    """NumPy, whose n-th allocation fails."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattr__(self, name):
        found = getattr(np, name)
        if name not in ("empty", "zeros", "array", "arange", "concatenate", "where", "rint", "clip", "full", "ones"):
            return found

        def function(*args, **options):
            self.left -= 1
            if self.left == 0:
                raise MemoryError("no memory (in a test)")
            return found(*args, **options)

        return function


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["cache", "ring", "pool"])
def test_any_allocation_may_fail(rng, dtype, kind, monkeypatch):
    """The n-th, for every n: a MemoryError each time, nothing changed, and the next call is right."""
    d = 16
    q, k, v = packed(rng, dtype, 340, d, d)
    if kind == "pool":
        pool = made(dtype, d, d)
        first = pool.sequence()
        pool.append(0, [first], k[:24], v[:24])
        owner = first.fork()

        def call(n):
            return pool.attend(0, [owner], q[:n], k[:n], v[:n])

        def state():
            return owner.keys(0).tobytes(), owner.values(0).tobytes(), owner.pages, pool.free_pages, tuple(pool._others)
    else:
        cache = sl.KVCache(
            layers=1, kv_heads=2, head_dim=d, dtype=dtype, **({"window": 40} if kind == "ring" else {"capacity": 900})
        )
        cache.append(0, *(x[None, :24].swapaxes(1, 2) for x in (k, v)))

        def call(n):
            return cache.attend(0, *(x[None, :n].swapaxes(1, 2) for x in (q, k, v)))

        def state():
            return cache.keys(0).tobytes(), cache.values(0).tobytes(), cache.lengths(0)

    for n in (1, 340):
        before, failures = state(), 0
        for at in range(1, 400):
            with monkeypatch.context() as patch:
                failing = _Failing(at)
                for module in (putting, storage, prepare):
                    patch.setattr(module, "np", failing)
                forget_steps(pool if kind == "pool" else cache)
                try:
                    out = call(n)
                except MemoryError:
                    failures += 1
                else:
                    break
            assert state() == before, f"allocation {at}"
        assert failures > 2 and failing.left > 0 and state() != before
        assert np.isfinite(out.astype(np.float32)).all()


# --- raw pages


@pytest.mark.each("dtype", "page_size")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 33, 256])
def test_raw_pages_have_the_bits_of_contiguous_keys(isa, one_width, rng, dtype, page_size):
    lengths, count = [300, 0, 1025], 1400 // page_size + 6
    kind = numpy_dtype(dtype)
    order = rng.permutation(count)
    need = [-(-n // page_size) for n in lengths]
    table = np.full((3, max(need) + 1), -7, np.int32)
    for item, n in enumerate(need):
        table[item, :n], order = order[:n], order[n:]
    for d, dv, heads_first in ((16, 16, False), (33, 40, True)):
        shapes = [(count, page_size, 2, x) for x in (d, dv)]
        k, v = (
            (
                rng.standard_normal((s[0], s[2], s[1], s[3])).astype(kind).swapaxes(1, 2)
                if heads_first
                else rng.standard_normal(s).astype(kind)
            )
            for s in shapes
        )
        for n, options in ((1, {}), (3, {"causal": True}), (40, {"causal": True}), (2, {"mask": sl.window(70, 0)})):
            q = rng.standard_normal((3, 4, n, d)).astype(kind)
            out, lse = sl.attention_paged(q, k, v, table, lengths, return_lse=True, **options)
            for item, length in enumerate(lengths):
                flat = [
                    x[table[item, : need[item]]].reshape(-1, 2, x.shape[3])[:length].swapaxes(0, 1)[None]
                    for x in (k, v)
                ]
                want, want_lse = sl.attention(q[item : item + 1], *flat, return_lse=True, **options)
                assert out[item].tobytes() == want.tobytes() and lse[item].tobytes() == want_lse.tobytes(), (
                    f"{length} keys, {n} queries"
                )
    q = rng.standard_normal((5, 4, d)).astype(kind)
    out = sl.attention_paged(q, k, v, table, lengths, layout="lhd", cu_seqlens_q=[0, 2, 2, 5], causal=True)
    padded = np.stack([np.concatenate([q[:2], q[:1]]), q[:3], q[2:]]).swapaxes(1, 2)
    want = sl.attention_paged(padded[2:], k, v, table[2:], lengths[2:], causal=True)
    assert out[2:].tobytes() == want[0].swapaxes(0, 1).tobytes()


PLACED = [
    {"causal": True, "window": (30, None)},
    {"window": (3, 7), "q_start": [250, 2, 100], "q_lengths": [5, 0, 3]},
    {"causal": True, "q_start": 100, "q_lengths": [5, 4, 1]},
    {"causal": "top-left", "window": (2, 0), "q_lengths": [5, 2, 0]},
    {"q_lengths": [0, 5, 2], "causal": True, "mask": sl.dilated(3), "window": (40, 0), "score": sl.softcap(2.0)},
]


@pytest.mark.parametrize("options", PLACED if FULL else PLACED[1::2])
def test_windows_starts_and_lengths_over_raw_pages(rng, options):
    """As attention() means them, with the same bits; packed, too."""
    lengths = [300, 7, 129]
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4, 5, 16), (40, 16, 2, 16), (40, 16, 2, 17)))
    table = rng.integers(0, 40, (3, 20))  # pages may be anybody's, and come twice
    out, lse = sl.attention_paged(q, k, v, table, lengths, return_lse=True, **options)
    rows, starts = options.get("q_lengths", [5] * 3), options.get("q_start")
    flat = [
        [x[t].reshape(-1, *x.shape[2:])[:n].swapaxes(0, 1)[None] for x in (k, v)]
        for t, n in zip(table, lengths, strict=True)
    ]
    for item, (n, keys) in enumerate(zip(rows, flat, strict=True)):
        mine = {name: x for name, x in options.items() if name not in ("q_start", "q_lengths")}
        if starts is not None:
            mine["q_start"] = starts if isinstance(starts, int) else starts[item]
        want, want_lse = sl.attention(q[item : item + 1, :, :n], *keys, return_lse=True, **mine)
        assert out[item, :, :n].tobytes() == want.tobytes() and lse[item, :, :n].tobytes() == want_lse.tobytes()
        assert not out[item, :, n:].any() and np.isneginf(lse[item, :, n:]).all()
    packed = np.concatenate([x[:, :n].swapaxes(0, 1) for x, n in zip(q, rows, strict=True)])
    mine = {name: x for name, x in options.items() if name != "q_lengths"}
    cu = np.cumsum([0, *rows])
    got = sl.attention_paged(packed, k, v, table, lengths, layout="lhd", cu_seqlens_q=cu, **mine)
    want = np.concatenate([x[:, :n].swapaxes(0, 1) for x, n in zip(out, rows, strict=True)])
    assert got.tobytes() == want.tobytes()


def test_raw_pages_of_torch(rng):
    torch = pytest.importorskip("torch")
    q, pages = torch.randn(2, 4, 1, 16, dtype=torch.bfloat16), torch.randn(9, 16, 2, 16, dtype=torch.bfloat16)
    table, lengths = torch.tensor([[0, 5], [2, 1]], dtype=torch.int32), torch.tensor([20, 32])
    out = sl.attention_paged(q, pages, pages, table, lengths)
    keys = pages[table.long()].reshape(2, 32, 2, 16).transpose(1, 2)
    assert torch.equal(out[1:], sl.attention(q[1:], keys[1:], keys[1:]))


@pytest.mark.parametrize("batch", [1, 2])
def test_negated_tensors_are_refused_of_one_row_and_of_several(batch):
    torch = pytest.importorskip("torch")
    pages, q = torch.ones(9, 16, 2, 16), torch.ones(batch, 4, 1, 16)
    table, lengths = torch.tensor([[0, 5], [2, 1]])[:batch], torch.tensor([20, 32])[:batch]
    negated = torch._neg_view(-table), torch._neg_view(-lengths)
    with pytest.raises(sl.ArgumentTypeError, match=r"^block_table: .* Use block_table\.resolve_neg\(\)\.$"):
        sl.attention_paged(q, pages, pages, negated[0], lengths)
    with pytest.raises(sl.ArgumentTypeError, match=r"^k_lengths: .* Use k_lengths\.resolve_neg\(\)\.$"):
        sl.attention_paged(q, pages, pages, table, negated[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": [[0, 5], [1, 2]]}, r"block_table: expected pages from 0 to 4; got 5 at \[0, 1\]"),
        ({"block_table": [[0, -1], [1, 2]]}, r"block_table: expected pages from 0 to 4; got -1 at \[0, 1\]"),
        ({"block_table": [[0, 2**63], [1, 2]]}, "block_table: expected"),
        ({"block_table": np.array([[0, 2**63], [1, 2]], np.uint64)}, r"got 9223372036854775808 at \[0, 1\]"),
        ({"block_table": [[0.0, 1.0], [1, 2]]}, "block_table: expected ints"),
        ({"block_table": [0, 1]}, r"block_table: .*; got list of int64, shape \(2,\)\. Of one .* \[block_table\]"),
        ({"block_table": np.ones(2, int)}, r"block_table: .* write \[block_table\]"),
        ({"block_table": np.ones((2, 2))}, r"block_table: .* Try numpy.asarray\(block_table, int\)"),
        ({"block_table": None}, r"block_table: expected ints of shape \(batch, most pages\); got NoneType\.$"),
        ({"block_table": [[0, 1], [2]]}, "block_table: expected an array of ints, .* got rows of 1 to 2. Fill short"),
        ({"block_table": [[0, 1]]}, "k_lengths: expected 1 lengths"),
        ({"k_lengths": [5, 9]}, "k_lengths: expected lengths from 0 to 8"),
        ({"k_lengths": [5, -1]}, "k_lengths: expected lengths from 0"),
        ({"k_lengths": None}, "k_lengths: expected 2 lengths, one per row of block_table; got None"),
        ({"k_pages": np.ones((5, 4, 8), np.float32)}, "k_pages: expected shape"),
        ({"k_pages": np.ones((2, 5, 4, 2, 8), np.float32)}, r"k_pages: .* write kv_cache\[0\] and kv_cache\[1\]"),
        ({"k_pages": np.ones((5, 2, 4, 2, 8), np.float32)}, r"k_pages: .* kv_cache\[:, 0\] and kv_cache\[:, 1\]"),
        ({"k_pages": np.ones((0, 4, 2, 8)), "v_pages": np.ones((0, 4, 2, 8)), "q": np.ones((2, 4, 1, 8))}, "no page"),
        ({"kv_layout": "HND"}, r"kv_layout: .* k_pages.swapaxes\(1, 2\)"),
        ({"v_pages": np.ones((4, 4, 2, 8), np.float32)}, r"v_pages: expected shape \(5, 4, 2, value_dim\), as k_pages"),
        ({"v_pages": np.ones((5, 4, 2, 8), np.float64)}, "v_pages: expected dtype float32"),
        ({"q": np.ones((2, 4, 1, 9), np.float32)}, "q: expected head_dim 8"),
        ({"q": np.ones((1, 4, 1, 8), np.float32)}, "q: expected batch 2"),
        ({"q": np.ones((2, 3, 1, 8), np.float32)}, "q: expected a multiple of 2 heads, the kv heads of k_pages; got 3"),
        ({"layout": "lhb"}, "layout: expected"),
        ({"causal": "left"}, "causal: expected False, True"),
        ({"causal": "top-left", "q_start": 3}, "q_start: expected None with causal='top-left'"),
        ({"window": 3}, "window: expected a pair"),
        ({"q_start": [1]}, r"q_start: expected one int, or 2 \(one per batch item\); got 1"),
        ({"q_start": 1.5}, "q_start: expected an int"),
        ({"q_lengths": [1]}, "q_lengths: expected 2 lengths"),
        ({"q_lengths": [1, 2]}, "q_lengths: expected lengths from 0 to 1"),
        (
            {"q": np.ones((2, 4, 8), np.float32), "layout": "lhd", "q_lengths": [1, 1]},
            "q_lengths: expected None for layout='lhd'; packed sequences have cu_seqlens_q",
        ),
        ({"cu_seqlens_q": [0, 1, 2]}, "cu_seqlens_q: expected None"),
        (
            {"q": np.ones((3, 4, 8), np.float32), "layout": "lhd"},
            "q: expected 2 rows, a query for each sequence; got 3 .* told by cu_seqlens_q=",
        ),
        (
            {"q": np.ones((3, 4, 8), np.float32), "layout": "lhd", "cu_seqlens_q": [0, 3]},
            "cu_seqlens_q: expected 3 entries",
        ),
    ],
)
def test_wrong_raw_pages(change, message):
    pages = np.ones((5, 4, 2, 8), np.float32)
    arguments = {
        "q": np.ones((2, 4, 1, 8), np.float32),
        "k_pages": pages,
        "v_pages": pages,
        "block_table": [[0, 1], [2, 3]],
        "k_lengths": [5, 8],
    }
    sl.attention_paged(**arguments)
    with pytest.raises(sl.Error, match=message):
        sl.attention_paged(**(arguments | change))


def test_counts_are_pythons_integers():
    """Sums of NumPy's narrow integers wrap: 3 · 100 would be 44."""
    pool = sl.PagePool(layers=1, pages=64, page_size=16, kv_heads=1, head_dim=4)
    sequences, x = [pool.sequence() for _ in range(3)], np.ones((300, 1, 4), np.float32)
    counts = [np.int8(100)] * 3
    pool.append(0, sequences, x, x, new_lengths=counts)
    assert [s.length() for s in sequences] == [100, 100, 100]
    out = np.zeros_like(x)
    with pytest.raises(sl.ArgumentError, match="add up to the 44 tokens"):
        pool.attend(0, sequences, x[:44], new_lengths=counts, out=out[:44])
    assert not out.any()
