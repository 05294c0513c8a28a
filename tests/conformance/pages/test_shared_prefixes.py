"""Sequences that share leading pages see these together: the bits are those of sequences that share nothing."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from conftest import FULL
from pools import KINDS
from problems import CODES, numpy_dtype, taken

import speedlight as sl
from speedlight.cpu.engine import cascade, forward_call
from speedlight.host.machine import host_isas

OPTIONS = {
    "plain": {},
    "window": {"mask": sl.window(300, 0)},
    "prefix": {"mask": sl.prefix(5)},
    "alibi": {"score": sl.alibi([2.0**-n for n in range(8)])},
    "softcap": {"score": sl.softcap(5.0)},
    "sinks": {"sink_logits": [0.5] * 8},
}
UNDER_BFLOAT16 = [f"{x}, bfloat16" for x in CODES]


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Runs are taken together wherever that is possible; returns the calls of stages, as (leaves, tasks per block)."""
    monkeypatch.setattr(cascade, "LEAST_RATIO", 0.0)
    monkeypatch.setattr(cascade, "LEAST_SECONDS", -1e9)
    seen, run_on = [], forward_call.Call.run_on

    def spy(call, *args):
        seen.append((call.words()["leaves"], call.how.parts, call.how.kind))
        return run_on(call, *args)

    monkeypatch.setattr(forward_call.Call, "run_on", spy)
    return seen


class Forest:
    """Sequences of one pool that share pages as forks do, and of another that have copies of the same tokens.

    kind: a dtype of pools; or of codes, and that of queries and tokens.
    """

    def __init__(self, rng, kind, *, kv_heads=2, group=4, d=32, dv=32, page_size=16, latent=False):
        kind, _, given = kind.partition(", ")
        sizes = {"layers": 1, "kv_heads": kv_heads, "head_dim": d, "value_dim": dv, "dtype": kind, "latent": latent}
        self.pools = [sl.PagePool(pages=2400, page_size=page_size, **sizes) for _ in range(2)]
        self.rng, self.heads, self.dims, self.latent = rng, (kv_heads, group), (d, dv), latent
        self.dtype = numpy_dtype(given or taken(kind))
        self.trees, self.given = [], []  # given: of each sequence the tokens that it got, part after part

    def drawn(self, count, heads, dim):
        return self.rng.standard_normal((count, heads, dim)).astype(self.dtype)

    def tokens(self, count):
        kv_heads, (d, dv) = self.heads[0], self.dims
        return self.drawn(count, kv_heads, d), None if self.latent else self.drawn(count, kv_heads, dv)

    def plant(self, count, of=None):
        """Adds a sequence of so many new tokens, behind those of another; returns its number."""
        parts = [] if of is None else self.given[of].copy()
        shared, apart = self.pools[0].sequence() if of is None else self.trees[of][0].fork(), self.pools[1].sequence()
        for part in parts:  # the copy has pages of its own
            self.pools[1].append(0, [apart], *part)
        if count:
            parts.append(self.tokens(count))
            self.pools[0].append(0, [shared], *parts[-1])
            self.pools[1].append(0, [apart], *parts[-1])
        self.trees.append((shared, apart))
        self.given.append(parts)
        return len(self.trees) - 1

    def check(self, which, count=1, turns=2, lies=None, **options):
        """Compares a step of some sequences in both pools; returns the results. lies: moves q in memory."""
        kv_heads, group = self.heads
        for _ in range(turns):  # the second is a repeated one
            q, new = self.drawn(count * len(which), kv_heads * group, self.dims[0]), self.tokens(count * len(which))
            q = q if lies is None else lies(q)
            more = {} if count == 1 else {"new_lengths": [count] * len(which)}
            got, want = (
                pool.attend(0, [self.trees[n][side] for n in which], q, *new, return_lse=True, **more, **options)
                for side, pool in enumerate(self.pools)
            )
            for a, b in zip(got, want, strict=True):
                assert a.tobytes() == b.tobytes()
            for n, place in enumerate(which):
                self.given[place].append([None if x is None else x[n * count : (n + 1) * count] for x in new])
        return got


@pytest.mark.parametrize("kind", [*KINDS, *UNDER_BFLOAT16])
@pytest.mark.parametrize("option", OPTIONS)
def test_bits_of_sequences_apart(rng, isa, kind, option, always):
    if not FULL and (isa != host_isas()[0].name or option not in ("plain", "window")) and kind != "bfloat16":
        pytest.skip("a short run has bfloat16 alone on other units, and of most options")
    forest = Forest(rng, kind)
    root = forest.plant(1150)  # a span and a tile
    some = [forest.plant(n, root) for n in (0, 1, 130)]
    some += [forest.plant(n, some[-1]) for n in (40, 900)]
    some.append(forest.plant(200))  # shares nothing
    forest.check(some, **OPTIONS[option])
    depths = [leaves for leaves, *_ in always]
    assert depths.count(1) >= 2 * depths.count(0) > 0, "two levels of keys, then each one's own"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "float8_e4m3fn", "int8, bfloat16"])
@pytest.mark.parametrize("group", [1, 16])
def test_latents(rng, kind, group, always):
    forest = Forest(rng, kind, kv_heads=1, group=group, d=72, dv=64, page_size=32, latent=True)
    root = forest.plant(1400)
    forest.check([root, *(forest.plant(n, root) for n in (3, 200))])
    assert any(leaves for leaves, *_ in always)


@pytest.mark.parametrize("seed", range(60 if FULL else 6))
def test_random_forests(seed, always):
    rng = np.random.default_rng(seed)
    kv_heads, group, page_size = (int(rng.choice(x)) for x in ((1, 2), (1, 4, 16), (16, 48, 128, 256)))
    kind = str(rng.choice([*KINDS, *UNDER_BFLOAT16])) if FULL else ["float32", *UNDER_BFLOAT16][seed % 4]
    forest = Forest(rng, kind, kv_heads=kv_heads, group=group, page_size=page_size)
    for _ in range(2):
        forest.plant(int(rng.choice([100, 128, 1024, 1500, 3100])))
    for _ in range(5):
        forest.plant(int(rng.choice([0, 1, 127, 128, 300, 1100])), int(rng.integers(len(forest.trees))))
    for _ in range(3):
        size = int(rng.integers(2, len(forest.trees) + 1))
        which = rng.choice(len(forest.trees), size, replace=False).tolist()
        option = OPTIONS[str(rng.choice([*OPTIONS]))] if group * kv_heads == 8 or FULL else {}
        if group * kv_heads != 8 and {"sink_logits", "score"} & option.keys():
            option = {}
        forest.check(which, int(rng.choice([1, 1, 2, 3])), **option)


@pytest.mark.parametrize(("group", "kernel"), [(2, "decode"), (16, "forward")])
def test_runs_end_inside_of_pages_and_spans(rng, group, kernel, always):
    """A second level goes on in the open span that the first one left, and leaves it open; both end at a tile."""
    forest = Forest(rng, "float32", kv_heads=1, group=group, page_size=48)
    root = forest.plant(1400)
    some = [forest.plant(130, root), forest.plant(300, root)]
    some += [forest.plant(n, some[-1]) for n in (250, 500)]
    threads = sl.get_threads()
    try:
        for count in (1, 2):  # two of them share the spans of the one head
            sl.set_threads(count)
            forest.check(some[:1] + some[2:])
    finally:
        sl.set_threads(threads)
    assert {kind for leaves, _, kind in always if leaves} == {kernel}
    assert [leaves for leaves, *_ in always] == [1, 1, 0] * 4


def test_tasks_share_the_spans_of_a_run(rng, always):
    """One kv head on several threads: tasks leave spans for the last one, which keeps the open span apart."""
    threads = sl.get_threads()
    sl.set_threads(4)
    try:
        for group in (2, 16):
            forest = Forest(rng, "float32", kv_heads=1, group=group)
            root = forest.plant(5000)
            forest.check([root, *(forest.plant(n, root) for n in (3, 2300))])
    finally:
        sl.set_threads(threads)
    assert {kind for leaves, parts, kind in always if leaves and parts > 1} == {"forward", "decode"}
    assert {kind for leaves, parts, kind in always if not leaves and parts > 1} == {"decode"}


def test_what_knows_its_sequence_is_taken_apart(rng, always):
    forest = Forest(rng, "float32")
    root = forest.plant(600)
    some = [root, forest.plant(3, root)]
    lengths = sl.table(np.array([400, 500]), "lengths")
    forest.check(some, mask=lambda b, h, i, j: j < lengths[b])
    forest.check(some, dropout=0.2, seed=3)
    assert not always


def test_a_step_that_shares_nothing_is_the_prepared_one(rng, always):
    forest = Forest(rng, "float32")
    some = [forest.plant(n) for n in (300, 300, 20)]
    forest.check(some)
    assert not always


def test_few_tokens_are_not_worth_a_run(rng, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cascade.Together, "run", lambda *_: pytest.fail("expected the sequences apart"))
    forest = Forest(rng, "float32")
    root = forest.plant(600)
    forest.check([root, forest.plant(3, root)])


def test_an_index_out_of_range_in_shared_keys_leaves_the_pool(rng, always):
    forest = Forest(rng, "float32")
    root = forest.plant(600)
    some = [forest.trees[n][0] for n in (root, forest.plant(3, root))]
    pool, table = forest.pools[0], sl.table(np.zeros(100, np.float32), "bias")
    q, new = forest.drawn(2, 8, 32), forest.tokens(2)
    before = [x.length(0) for x in some], pool.free_pages
    with pytest.raises(sl.ArgumentError, match="bias"):
        pool.attend(0, some, q, *new, score=lambda s, b, h, i, j: s + table[j])
    assert ([x.length(0) for x in some], pool.free_pages) == before


@pytest.mark.parametrize("stage", [0, 1])
def test_an_interrupt_between_stages_leaves_the_pool(rng, monkeypatch, stage):
    forest = Forest(rng, "float32")
    root = forest.plant(600)
    some = [root, forest.plant(3, root)]
    pool, sequences, count = forest.pools[0], [forest.trees[n][0] for n in some], [0]
    before = [x.length(0) for x in sequences], pool.free_pages
    run_on = forward_call.Call.run_on

    def interrupted(call, *args):
        count[0] += 1
        if count[0] == stage + 1:
            raise KeyboardInterrupt
        return run_on(call, *args)

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(forward_call.Call, "run_on", interrupted)
        pool.attend(0, sequences, forest.drawn(2, 8, 32), *forest.tokens(2))
        pytest.fail("expected an interrupt")
    assert ([x.length(0) for x in sequences], pool.free_pages) == before
    forest.check(some)


def _beside_nan(q, axis):
    """Returns q in an array that has NaN behind each of its rows along an axis."""
    gap = np.full_like(q, np.nan)
    return np.concatenate([q, gap], axis)[tuple([slice(n) for n in q.shape])]


def test_queries_that_lie_otherwise_have_stages_of_their_own(rng, always):
    """Steps of one form but for the strides of q, one after the other, in both orders."""
    forest = Forest(rng, "float32")
    root = forest.plant(300)
    some = [forest.plant(n, root) for n in (1, 20, 40)]
    ways = [
        None, lambda q: _beside_nan(q, 1), lambda q: _beside_nan(q, 2),
        lambda q: np.ascontiguousarray(q.swapaxes(0, 1)).swapaxes(0, 1),
    ]  # fmt: skip
    for lies in (*ways, *ways[::-1]):
        for count in (1, 3):
            forest.check(some, count, turns=1, lies=lies)
    assert any(leaves for leaves, *_ in always)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("page_size", [1, 7, 64, 200])
def test_pages_of_the_caller(rng, layout, page_size, always):
    """attention_paged() over tables whose rows begin alike: the bits of each sequence by itself."""
    heads, lengths = (8, 2), [1300, 1024, 1151, 700]
    k, v = (rng.standard_normal((3 * 1400 // page_size + 9, page_size, 2, 32), np.float32) for _ in range(2))
    order, most = rng.permutation(len(k)), -(-1300 // page_size)
    table, same = np.zeros((4, most), np.int64), 1024 // page_size
    for n in range(4):
        table[n] = order[:most]
        table[n, same:] = np.roll(order, -most * (n + 1))[: most - same]
    table[3] = order[-most:]
    q = rng.standard_normal((4, heads[0], 2, 32), np.float32)
    q = q if layout == "bhld" else np.ascontiguousarray(q.swapaxes(1, 2))
    options = {"layout": layout, "causal": True, "return_lse": True}
    got = [sl.attention_paged(q, k, v, table, lengths, **options) for _ in range(3)][-1]
    assert {leaves for leaves, *_ in always} == {0, 1}
    for n in range(4):
        part = slice(n, n + 1)
        want = sl.attention_paged(q[part], k, v, table[part], lengths[part], **options)
        for a, b in zip(got, want, strict=True):
            assert a[part].tobytes() == b.tobytes()


def test_a_table_that_changed_is_looked_at_again(rng, always):
    """A kept answer is of the same numbers and lengths alone."""
    k, v = (rng.standard_normal((40, 64, 2, 32), np.float32) for _ in range(2))
    q = rng.standard_normal((2, 8, 1, 32), np.float32)
    for second in (3, 9, 3):
        table = np.array([[1, 2, 3, 4, 5, 6], [1, 2, second, 7, 8, 9]])
        for lengths in ([384, 384], [384, 200], [384, 384]):
            for _ in range(2):
                got = sl.attention_paged(q, k, v, table, lengths)
            for n in range(2):
                part = slice(n, n + 1)
                want = sl.attention_paged(q[part], k, v, table[part], lengths[part])
                assert got[part].tobytes() == want.tobytes()
    assert always


def test_pages_that_a_shortened_sequence_got_are_looked_at_again(rng, always):
    """A kept answer is of the same pages, not of a table that has others by now."""
    forest = Forest(rng, "float32")
    root = forest.plant(1300)
    some = [root, *(forest.plant(n, root) for n in (3, 5))]
    sequences = [forest.trees[n] for n in some]
    q = forest.drawn(3, 8, 32)

    def check():
        got, want = (pool.attend(0, [x[side] for x in sequences], q) for side, pool in enumerate(forest.pools))
        assert got.tobytes() == want.tobytes()

    check()
    fresh = forest.tokens(1300 - 608)
    for side, pool in enumerate(forest.pools):
        sequences[0][side].truncate(608)  # a whole page: none is copied
        pool.append(0, [sequences[0][side]], *fresh, new_lengths=[1300 - 608])
    check()
    assert sequences[0][0].length() == 1300 and always


@pytest.mark.parametrize("dims", [(1, 1), (17, 33), (72, 20)], ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_dims_that_no_vector_divides(rng, kind, dims, always):
    """States have their last columns, in the kernels of few rows and of many."""
    for group in (1, 16):
        forest = Forest(rng, kind, group=group, d=dims[0], dv=dims[1])
        root = forest.plant(1200)
        forest.check([root, *(forest.plant(n, root) for n in (3, 5))])
    assert any(leaves for leaves, *_ in always)
