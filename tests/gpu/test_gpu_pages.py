"""Pools, raw pages and block tables on a GPU, of which nothing is trusted; any order of calls of caches and pools."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from conftest import FULL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from injection import interrupted, needs_places
from on_gpu import DEVICE, same, tensor
from on_gpu_caches import DROPOUT, KINDS, OPTIONS, OWN, close, tokens
from tolerance import plain

import speedlight as sl


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((x, {}) for x in (KINDS if FULL else KINDS[3:4])),
        *(zip(KINDS[1:3], OPTIONS[1:3], strict=True) if FULL else [(KINDS[2], OPTIONS[2] | DROPOUT)]),
        *[("float32", DROPOUT)] * FULL,
    ],
)
def test_a_pool_says_what_it_says_on_the_cpu(rng, dtype, options):
    sizes = {"layers": 2, "pages": 60, "page_size": 16, "kv_heads": 2, "head_dim": 17, "value_dim": 20, "dtype": dtype}
    here, there = sl.PagePool(**sizes), sl.PagePool(**sizes, device="cuda")
    ours, theirs = ([pool.sequence() for _ in range(3)] for pool in (here, there))
    rng.shuffle(there._journal.free)
    for step, counts in enumerate(([40, 0, 70], [1, 1, 1], [5, 1, 20], [1, 1, 1, 1], [2, 20, 1, 3])):
        if len(counts) > len(ours):
            ours.append(ours[0].fork())
            theirs.append(theirs[0].fork())
        n = sum(counts)
        q, k, v = tokens(rng, dtype, (n, 4, 17), (n, 2, 17), (n, 2, 20))
        want, want_lse = here.attend(1, ours, q, k, v, new_lengths=counts, return_lse=True, **options)
        got, lse = there.attend(
            1, theirs, *(tensor(x) for x in (q, k, v)), new_lengths=counts, return_lse=True, **options
        )
        close(got, want, dtype)
        np.testing.assert_allclose(
            lse.cpu(), want_lse, rtol=0, atol=2e-3 if dtype == "bfloat16" else 1e-5, err_msg=str(step)
        )
    q = tokens(rng, dtype, (9, 4, 17))[0]
    lengths = {"new_lengths": [2, 3, 0, 4]}
    close(there.attend(1, theirs, tensor(q), **lengths), here.attend(1, ours, q, **lengths), dtype)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(plain(b.keys(1).cpu()), plain(a.keys(1)))
        np.testing.assert_array_equal(plain(b.values(1).cpu()), plain(a.values(1)))
    assert here.free_pages == there.free_pages


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_prompts_that_a_pool_knows_are_found(rng, dtype):
    """With the bits of the first time; a page that is cut is copied where another shares it."""
    pool = sl.PagePool(layers=2, pages=9, page_size=16, kv_heads=2, head_dim=16, dtype=dtype, device="cuda")
    prompt = list(range(40))
    k, v = (tensor(x) for x in tokens(rng, dtype, (40, 2, 16), (40, 2, 16)))
    first = pool.sequence(tokens=prompt)
    for layer in (0, 1):
        pool.append(layer, [first], k, v, tokens=prompt if layer else None)
    again = pool.sequence(tokens=prompt)
    assert again.length(1) == 32 and again.pages == first.pages[:2]
    assert (again.keys(1) == first.keys(1)[:, :32]).all() and (again.values(0) == first.values(0)[:, :32]).all()
    again.truncate(20)
    for layer in (0, 1):
        pool.append(layer, [again], k[:9], v[:9], tokens=prompt[:9])
    assert again.pages[0] == first.pages[0] and again.pages[1] != first.pages[1]
    assert (first.keys(0)[:, 20:29] != again.keys(0)[:, 20:29]).any()
    kept = first.keys(0)
    first.free()
    pool.append(0, [again], k, v)
    assert pool.free_pages == 9 - 5 and pool.sequence(tokens=prompt).length() == 16, (
        "of a cut page the tokens are unknown"
    )
    assert (pool.sequence(tokens=prompt).keys(0) == kept[:, :16]).all()


def test_a_pool_has_the_bits_of_one_sequence_alone(rng):
    """Whatever is packed beside it, and wherever its pages are."""
    q, k, v = tokens(rng, "bfloat16", (300, 4, 16), (300, 1, 16), (300, 1, 16))
    answers = []
    for beside in ([], [1], [40, 3]):
        pool = sl.PagePool(layers=1, pages=60, page_size=16, kv_heads=1, head_dim=16, dtype="bfloat16", device="cuda")
        rng.shuffle(pool._journal.free)
        sequences = [pool.sequence() for _ in range(1 + len(beside))]
        out = []
        for first, n in ((0, 50), (50, 240), (290, 1), (291, 5)):
            counts = [n, *beside]
            total = sum(counts)
            noise = tokens(rng, "bfloat16", (total, 4, 16), (total, 1, 16), (total, 1, 16))
            for x, y in zip(noise, (q, k, v), strict=True):
                x[:n] = y[first : first + n]
            if n == 240:  # for keys enough to be split
                pool.append(0, sequences, *(tensor(x) for x in noise[1:]), new_lengths=counts)
                continue
            out.append(pool.attend(0, sequences, *(tensor(x) for x in noise), new_lengths=counts)[:n])
        answers.append(out)
    assert same(answers[0], answers[1]) and same(answers[0], answers[2])


@pytest.mark.parametrize("page_size", [1, 7, 16, 33])
def test_raw_pages_of_any_size(rng, page_size):
    pages = 120 // page_size + 4
    k, v, q = tokens(rng, "float32", (pages, page_size, 2, 16), (pages, page_size, 2, 24), (3, 4, 2, 16))
    most = 60 // page_size + 1
    table = np.stack([rng.permutation(pages)[:most] for _ in range(3)])
    lengths = [40, 3, min(55, most * page_size)]
    want = sl.attention_paged(q, k, v, table, lengths, causal=True)
    for tables in (
        (table.tolist(), lengths),
        (tensor(table), tensor(np.array(lengths))),
        (tensor(table.astype(np.int32)), lengths),
    ):
        got = sl.attention_paged(tensor(q), tensor(k), tensor(v), *tables, causal=True, engine="cuda")
        close(got, want, "float32")
    packed = q.swapaxes(1, 2).reshape(6, 4, 16)
    got = sl.attention_paged(
        tensor(packed),
        tensor(k),
        tensor(v),
        table,
        lengths,
        causal=True,
        layout="lhd",
        cu_seqlens_q=[0, 2, 4, 6],
        engine="cuda",
    )
    close(got.reshape(3, 2, 4, 24).swapaxes(1, 2), want, "float32")


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "q_start": [30, 2, 50], "q_lengths": [2, 0, 1]},
        {"causal": True, "q_start": 1, "window": (5, None)},
        {"window": (5, 3), "q_lengths": [1, 2, 2]},
        {"causal": "top-left"},
    ],
)
def test_windows_starts_and_lengths_over_raw_pages(rng, options):
    """With lengths that the host knows, and with those that only the device has."""
    k, v, q = tokens(rng, "float32", (12, 16, 2, 16), (12, 16, 2, 24), (3, 4, 2, 16))
    table, lengths = rng.permutation(12).reshape(3, 4), [40, 3, 55]
    want, want_lse = sl.attention_paged(q, k, v, table, lengths, return_lse=True, **options)
    given = [tensor(x) for x in (q, k, v)]
    for tables in ((table, lengths), (tensor(table), tensor(np.array(lengths)))):
        got, lse = sl.attention_paged(*given, *tables, engine="cuda", return_lse=True, **options)
        close(got, want, "float32")
        np.testing.assert_allclose(lse.cpu(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["bhld", "blhd", "lhd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_go_where_they_go_on_the_cpu(rng, dtype, layout):
    """With tables and lengths of the host's, and of the device's."""
    axes = {"bhld": (0, 1, 2, 3), "blhd": (0, 2, 1, 3)}
    shape = {"lhd": (6, 2, 16)}.get(layout) or tuple((3, 2, 3, 16)[a] for a in axes[layout])
    table, counts, lengths = rng.permutation(15).reshape(3, 5)[:, :4], [3, 1, 2], [4, 0, 9]
    pages = tokens(rng, dtype, (15, 5, 2, 16), (15, 2, 5, 16))
    new = tokens(rng, dtype, shape, shape)
    for given in ((table, lengths, counts), tuple(tensor(np.array(x)) for x in (table, lengths, counts))):
        resident = isinstance(given[0], torch.Tensor)
        here = [pages[0].copy(), pages[1].copy().swapaxes(1, 2)]
        there = [tensor(pages[0].copy()), tensor(pages[1].copy()).transpose(1, 2)]
        want = sl.append_paged(*here, table, lengths, *new, new_lengths=counts, layout=layout)
        some = counts if resident and layout == "lhd" else given[2]
        more = {"new_lengths": some, "layout": layout, "engine": "cuda"}
        after = sl.append_paged(*there, *given[:2], *map(tensor, new), **more)
        assert list(after) == want == [7, 1, 11] and isinstance(after, torch.Tensor) == resident
        assert [plain(x.cpu()).tobytes() for x in there] == [plain(x).tobytes() for x in here]
        with pytest.raises(sl.Error, match=r"k: expected shape"):
            sl.append_paged(*there, *given[:2], *(tensor(x[..., :9]) for x in new), **more)
        sl.synchronize()


def test_appends_of_the_device_are_not_trusted(rng):
    """A sequence without room, or with a page that does not exist, stays whole as it is; its neighbours grow."""
    k, v = (tensor(x) for x in tokens(rng, "float32", (9, 4, 2, 16), (9, 4, 2, 16)))
    new = [tensor(x) for x in tokens(rng, "float32", (3, 2, 6, 16), (3, 2, 6, 16))]
    table = torch.tensor([[1, 0, 99], [3, 4, 5], [7, 8, 6]], device=DEVICE)
    for lengths, counts, after, message in (
        ([2, 1, 3], [6, 6, 5], [8, 7, 8], None),
        ([2, 1, 7], None, [8, 7, 7], "k_lengths: a length"),
        ([5, 1, 3], None, [5, 7, 9], "block_table: a page number"),
        ([-1, 1, 3], None, [-1, 7, 9], "k_lengths: a length"),
        ([2, 1, 3], [7, 6, -1], [2, 7, 3], "k_lengths: a length"),
    ):
        at = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
        k.zero_(), v.zero_()
        each = None if counts is None else torch.tensor(counts, device=DEVICE)
        got = sl.append_paged(k, v, table, at, *new, new_lengths=each, engine="cuda")
        assert got.tolist() == after and got.dtype == torch.int32
        with contextlib.nullcontext() if message is None else pytest.raises(sl.ArgumentError, match=message):
            sl.synchronize()
        changed = {n for n in range(9) if k[n].any() or v[n].any()}
        grown = [i for i in range(3) if after[i] != lengths[i]]
        assert changed <= {int(table[i, n]) for i in grown for n in range(3)} and {3, 4} <= changed
    with pytest.raises(sl.ArgumentTypeError, match="new_lengths: expected 3 of int32 or int64"):
        sl.append_paged(k, v, table, at, *new, new_lengths=torch.ones(3, device=DEVICE), engine="cuda")


def test_block_tables_on_the_device_are_not_trusted(rng):
    k, v, q = (tensor(x) for x in tokens(rng, "float32", (9, 4, 2, 16), (9, 4, 2, 16), (2, 4, 1, 16)))
    table, lengths = torch.tensor([[1, 99, 2], [3, 4, -5]], device=DEVICE), torch.tensor([12, 8], device=DEVICE)
    out = sl.attention_paged(q, k, v, table, lengths, engine="cuda")
    good = sl.attention_paged(q[1:], k, v, [[3, 4]], [8], engine="cuda")
    assert same([out[1:]], [good])
    with pytest.raises(sl.ArgumentError, match="block_table: a page number"):
        sl.synchronize()
    sl.attention_paged(q, k, v, table[1:].repeat(2, 1), torch.tensor([8, 13], device=DEVICE), engine="cuda")
    with pytest.raises(sl.ArgumentError, match="k_lengths: a length"):
        sl.synchronize()
    sl.synchronize()
    wide = torch.full((2, 9), 77, device=DEVICE)
    wide[:, 2:4] = torch.tensor([3, 4])
    eight = torch.tensor([8, 8], device=DEVICE)
    for view in (
        wide[:, 2:4],
        wide[:1, 2:4].expand(2, 2),
    ):  # rows further apart than they are long, and not apart at all
        assert same([sl.attention_paged(q, k, v, view, eight, engine="cuda")[1:]], [good])
        sl.attention_paged(q, k, v, view, eight + 1, engine="cuda")
        with pytest.raises(sl.ArgumentError, match="k_lengths: a length"):
            sl.synchronize()
    with pytest.raises(sl.ArgumentError, match=r"block_table: expected pages from 0 to 8; got 99 at \[0, 1\]"):
        sl.attention_paged(q, k, v, table.tolist(), [12, 8], engine="cuda")


@pytest.mark.parametrize("dtype", KINDS if FULL else KINDS[3:4])  # codes, whose scales move as well
def test_a_path_of_a_tree(rng, dtype):
    """What stays, and where, is what stays on the CPU: of a cache, round a ring, and in pages that a fork shares."""
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": dtype}
    _, k, v = tokens(rng, dtype, (2, 4, 70, 16), (2, 2, 70, 16), (2, 2, 70, 16))
    for more in ({"capacity": 200}, {"window": 20, "keep_first": 3}):
        here, there = sl.KVCache(**sizes, batch=2, **more), sl.KVCache(**sizes, batch=2, **more, device="cuda")
        for cache, of in ((here, lambda x: x), (there, tensor)):
            for layer in (0, 1):
                cache.append(layer, of(k), of(v))
                cache.append(layer, of(k[:, :, :30]), of(v[:, :, :30]), new_lengths=[30, 20])
            cache.keep([[0, 2, 5, 25], [1]], start=70)
        assert there.lengths(1) == here.lengths(1) == (74, 71) == tuple(there._storage.lengths.tensor[1].tolist())
        for part in ("keys", "values"):
            got, want = (getattr(x, part)(1) for x in (there, here))
            assert plain(got.cpu()).tobytes() == plain(want).tobytes()
    found = []
    for device, of in (("cpu", lambda x: x), ("cuda", tensor)):
        pool = sl.PagePool(**sizes, pages=12, page_size=16, device=device)
        a = pool.sequence()
        for layer in (0, 1):
            pool.append(layer, [a], of(k[0].swapaxes(0, 1)), of(v[0].swapaxes(0, 1)))
        b = a.fork()
        a.keep([3, 4, 30], start=20)
        assert (a.length(), b.length(), pool.free_pages) == (23, 70, 6)
        found.append(
            [plain(x if device == "cpu" else x.cpu()).tobytes() for s in (a, b) for x in (s.keys(1), s.values(0))]
        )
    assert found[0] == found[1]


def test_queries_that_are_not_those_of_the_new_tokens(rng):
    sizes = {"layers": 1, "kv_heads": 2, "head_dim": 16}
    q, k, v = tokens(rng, "float32", (2, 4, 8, 16), (2, 2, 40, 16), (2, 2, 40, 16))
    options = {"q_lengths": [5, 8], "score": sl.relative_bias(np.linspace(-1, 1, 4 * 121).reshape(4, 121))}
    found = []
    for device, of in (("cpu", lambda x: x), ("cuda", tensor)):
        cache = sl.KVCache(**sizes, batch=2, capacity=60, device=device)
        cache.append(0, of(k), of(v), new_lengths=[3, 40])
        found.append([cache.attend(0, of(q), of(k[:, :, :3]), of(v[:, :, :3]), new_lengths=[2, 3], **options)])
        found[-1].append(cache.attend(0, of(q), q_lengths=[8, 2]))
        pool = sl.PagePool(**sizes, pages=6, page_size=16, device=device)
        both, (x, y) = [pool.sequence() for _ in range(2)], (t[0].swapaxes(0, 1)[:30] for t in (k, v))
        pool.append(0, both, of(x), of(y), new_lengths=[10, 20])
        packed = q[0].swapaxes(0, 1)
        found[-1].append(pool.attend(0, both, of(packed), of(x[:3]), of(y[:3]), new_lengths=[1, 2], q_lengths=[6, 2]))
    for want, got in zip(*found, strict=True):
        close(got, want, "float32")


@needs_places
def test_an_exception_anywhere_in_a_path(rng):
    _, k, v = (tensor(x) for x in tokens(rng, "float32", *[(1, 1, 30, 16)] * 3))
    cache = sl.KVCache(layers=2, kv_heads=1, head_dim=16, capacity=40, device="cuda")
    pool = sl.PagePool(layers=2, pages=5, page_size=16, kv_heads=1, head_dim=16, device="cuda")
    a = pool.sequence()
    for layer in (0, 1):
        cache.append(layer, k, v)
        pool.append(layer, [a], k[0].transpose(0, 1), v[0].transpose(0, 1))
    b = a.fork()

    def state():
        held = [(x.keys(1).numpy().tobytes(), x.values(0).numpy().tobytes()) for x in (cache, a, b)]
        return held, cache.lengths(0), a.length(), pool.free_pages, cache._storage.lengths.tensor.tolist()

    before = state()
    for call in (lambda: cache.keep([2, 5], start=20), lambda: a.keep([2, 5], start=20)):
        undone = 0
        while interrupted(call, (undone + 1) ** 2, OWN):
            assert state() == before, undone
            undone += 1
        assert undone > 5 and state() != before
        before = state()


class Machine(RuleBasedStateMachine):
    """A cache and a pool on the device against lists of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.cache = sl.KVCache(layers=1, batch=2, kv_heads=1, head_dim=16, capacity=50, device="cuda")
        self.held = [np.zeros((0, 16), np.float32) for _ in range(2)]
        self.pool = sl.PagePool(layers=1, pages=6, page_size=16, kv_heads=1, head_dim=16, device="cuda")
        self.sequences = [(self.pool.sequence(), np.zeros((0, 16), np.float32))]

    @rule(counts=st.tuples(st.integers(0, 20), st.integers(0, 20)))
    def append(self, counts):
        x = self.rng.standard_normal((2, 1, max(counts), 16)).astype(np.float32)
        fits = all(len(h) + n <= 50 for h, n in zip(self.held, counts, strict=True))
        try:
            self.cache.append(0, tensor(x), tensor(x), new_lengths=counts)
            assert fits
            self.held = [
                np.concatenate([h, x[i, 0, :n]]) for i, (h, n) in enumerate(zip(self.held, counts, strict=True))
            ]
        except sl.CacheFull:
            assert not fits

    @rule(cut=st.integers(0, 50))
    def truncate(self, cut):
        n = min(cut, *map(len, self.held))
        self.cache.truncate(n)
        self.held = [h[:n] for h in self.held]

    @rule(which=st.integers(0, 9), n=st.integers(0, 30))
    def grow(self, which, n):
        which %= len(self.sequences)
        sequence, held = self.sequences[which]
        x = self.rng.standard_normal((n, 1, 16)).astype(np.float32)
        try:
            self.pool.append(0, [sequence], tensor(x), tensor(x), new_lengths=[n])
            self.sequences[which] = sequence, np.concatenate([held, x[:, 0]])
        except sl.CacheFull:
            pass

    @rule(which=st.integers(0, 9))
    def fork(self, which):
        sequence, held = self.sequences[which % len(self.sequences)]
        self.sequences.append((sequence.fork(), held))

    @rule(which=st.integers(0, 9))
    def free(self, which):
        if len(self.sequences) > 1:
            self.sequences.pop(which % len(self.sequences))[0].free()

    @invariant()
    def everything_is_there(self):
        assert (
            self.cache.lengths(0) == tuple(map(len, self.held)) == tuple(self.cache._storage.lengths.tensor[0].tolist())
        )
        keys = self.cache.keys(0).cpu().numpy()
        for i, h in enumerate(self.held):
            assert (keys[i, 0, : len(h)] == h).all() and not keys[i, 0, len(h) :].any()
        for sequence, held in self.sequences:
            assert (sequence.keys(0).cpu().numpy()[0] == held).all()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100 if FULL else 10, stateful_step_count=20, deadline=None)
