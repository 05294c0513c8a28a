"""Prepared steps that caches and pools remember: whatever differs from the last call, the bits are those of a fresh
one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import FULL
from pools import kept_steps
from problems import CODES, numpy_dtype, qkv
from repeated import forget
from steps import LONGEST, OPTIONS, D, options_of, strided

import speedlight as sl
from speedlight.cpu.engine import storage
from speedlight.problem.block_tables import page_lists

pytestmark = pytest.mark.usefixtures("one_width")  # what is remembered of a step knows no panels
COUNT = 10_000 if FULL else 100  # of each kind
FEW = 3 if FULL else 2  # of OPTIONS, where rings and codes are what is tested


def kinds(rng, dtype):
    return numpy_dtype(str(rng.choice(["float32", "float16"])) if dtype in CODES else dtype)


def either(rng, *arrays):
    """Arrays, or tensors over the same memory; None stays."""
    return arrays if rng.random() < 0.5 else [None if x is None else torch.from_numpy(x) for x in arrays]


def bits(result):
    return [np.asarray(x).tobytes() for x in (result if isinstance(result, tuple) else (result,))]


def arguments_of(rng, q, k, v):
    """A step's arrays, or its queries alone, and, at times, an out= of other strides."""
    out = strided(rng, np.empty(q.shape, q.dtype)) if rng.random() < 0.3 else None
    q, k, v, out = either(rng, q, *((k, v) if rng.random() < 0.8 else (None, None)), out)
    return [q, k, v], {} if out is None else {"out": out}


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_a_pool_that_lives_long_says_what_a_fresh_one_says(rng, dtype):
    sizes = {"layers": 1, "pages": 40, "page_size": 256, "kv_heads": 2, "head_dim": D, "dtype": dtype}
    pool, count, most = sl.PagePool(**sizes), 4, FEW if dtype in CODES else len(OPTIONS) if FULL else 6
    sequences, lengths = [pool.sequence() for _ in range(count)], [0] * count
    tokens = [qkv(rng, "float32", 1, 4, 2, 1, LONGEST + 50, D, D)[1:] for _ in range(count)]
    tokens = [[x[0].swapaxes(0, 1) for x in both] for both in tokens]  # (token, head, dim) of each sequence
    orders = [rng.permutation(count)[: rng.integers(1, count + 1)] for _ in range(6)]
    for step in range(COUNT):
        order = orders[rng.integers(len(orders))]  # few, so that steps are met again
        counts = [1] * len(order) if rng.random() < 0.4 else [int(rng.choice([0, 1, 1, 1, 2, 20])) for _ in order]
        if not sum(counts):
            continue
        kind, options = kinds(rng, dtype), options_of(rng, most)
        sl.set_threads(int(rng.integers(1, 3)))
        for which in order:
            if rng.random() < 0.4:  # to another length, in the same span or another
                want = int(rng.integers(30, LONGEST))
                if want > lengths[which]:
                    new = [x[lengths[which] : want].astype(kind) for x in tokens[which]]
                    pool.append(0, [sequences[which]], *new, new_lengths=[want - lengths[which]])
                else:
                    sequences[which].truncate(want)
                lengths[which] = want
        fresh = sl.PagePool(**sizes)
        again, mine = [fresh.sequence() for _ in order], [sequences[n] for n in order]
        for sequence, old, which in zip(again, mine, order, strict=True):
            held = [x(0).swapaxes(0, 1) for x in (old.keys, old.values)]
            held = [x.astype(kind) for x in held] if dtype not in CODES else held
            fresh.append(0, [sequence], *held, new_lengths=[lengths[which]])
        q, *new = (x[0].swapaxes(0, 1) for x in qkv(rng, kind.name, 1, 4, 2, sum(counts), sum(counts), D, D))
        arrays, more = arguments_of(rng, *(strided(rng, x) for x in (q, *new)))
        want = bits(fresh.attend(0, again, *arrays, new_lengths=counts, **options))
        usual = (len(counts) == 1 or set(counts) == {1}) and rng.random() < 0.8
        more |= {} if usual else {"new_lengths": counts}
        for _ in range(2):  # as it is, and when the step is known
            got = pool.attend(0, mine, *arrays, **more, **options)
            assert bits(got) == want and type(got[0]) is type(arrays[0]), f"step {step}: {order}, {counts}, {options}"
            for which in order:
                sequences[which].truncate(lengths[which])
    assert len(kept_steps(pool)) > 5


@pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("float32", 300), ("int8", None), ("int4", None)])
def test_a_cache_that_lives_long_says_what_a_fresh_one_says(rng, dtype, window):
    sizes = {"layers": 1, "batch": 2, "kv_heads": 2, "head_dim": D, "dtype": dtype, "window": window}
    cache, base = (sl.KVCache(**sizes, capacity=LONGEST + 40) for _ in range(2))
    most = FEW if window or dtype in CODES else len(OPTIONS)
    _, k, v = qkv(rng, "float32", 2, 4, 2, 1, LONGEST, D, D)
    base.append(0, k, v)
    for step in range(COUNT):
        kind, options, n = kinds(rng, dtype), options_of(rng, most), int(rng.choice([1, 1, 2, 20]))
        sl.set_threads(int(rng.integers(1, 3)))
        if rng.random() < 0.5:
            lengths = [int(x) for x in rng.integers(30, LONGEST, 2 if rng.random() < 0.7 else 1)] * 2
            cache.clear()
            cache.append(0, k[:, :, : max(lengths[:2])], v[:, :, : max(lengths[:2])], new_lengths=lengths[:2])
        fresh, before = cache.copy(), cache.lengths(0)
        if not all(before) or max(before) + n > LONGEST + 40:
            cache.clear()
            continue
        arrays, more = arguments_of(rng, *(strided(rng, x) for x in qkv(rng, kind.name, 2, 4, 2, n, n, D, D)))
        told = arrays[1] is not None and rng.random() < 0.2
        lengths = {"new_lengths": [n, int(rng.integers(n + 1))]} if told else {}
        want = bits(fresh.attend(0, *arrays, **options, **lengths))
        for again in (True, False):  # as it is, and when the step is known
            got = cache.attend(0, *arrays, **options, **lengths, **more)
            assert bits(got) == want and type(got[0]) is type(arrays[0]), f"step {step}: {before} and {n}, {options}"
            if again:
                cache.truncate(before)
        assert cache.lengths(0) == fresh.lengths(0)
    assert len(kept_steps(cache)) > 5


@pytest.mark.parametrize("codes", ["float32", *CODES])
def test_heads_of_short_sequences_share_tasks(rng, codes):
    """As many as there are threads for: the bits are those of a task for each head, of sequences of any length."""
    lengths = [1, 700, 16, 130]
    pool = sl.PagePool(layers=1, kv_heads=8, head_dim=D, pages=64, page_size=16, dtype=codes)
    sequences = [pool.sequence() for _ in lengths]
    q, k, v = (rng.standard_normal((n, 8, D), np.float32) for n in (4, sum(lengths), sum(lengths)))
    pool.append(0, sequences, k, v, new_lengths=lengths)
    found, heads = set(), set()
    try:
        for threads in (1, 2, 3, 8):
            sl.set_threads(threads)
            for _ in range(2):
                found.add(tuple(bits(pool.attend(0, sequences, q, return_lse=True))))
            heads |= {x.call.how.heads for x in kept_steps(pool) if x.call is not None}
    finally:
        sl.set_threads(None)
    assert len(found) == 1 and heads == {1, 2, 4, 8}


def test_tokens_that_are_only_stored_are_stored_as_the_first_were(rng):
    """Appended without queries, from arrays and tensors: by the fast path, and with lengths that say the same."""
    sizes = {"layers": 1, "kv_heads": 2, "head_dim": D}
    fast, slow = ([sl.KVCache(**sizes, batch=2, capacity=200, window=w) for w in (None, 30)] for _ in range(2))
    pools = [sl.PagePool(**sizes, pages=40, page_size=16) for _ in range(2)]
    sequences = [[pool.sequence() for _ in range(2)] for pool in pools]
    for n in [1, 1, 1, 1, 3, 1, 3, 40, 1, 40, 1]:
        k, v = (strided(rng, x) for x in qkv(rng, "float32", 2, 2, 2, n, n, D, D)[1:])
        one = [strided(rng, x[:, :, 0]) for x in (k, v)]
        given, ones = either(rng, k, v), either(rng, *one)
        for a, b in zip(fast, slow, strict=True):
            a.append(0, *given)
            b.append(0, k, v, new_lengths=[n, n])
            assert a.lengths(0) == b.lengths(0)
            assert [x.tobytes() for x in (a.keys(0), a.values(0))] == [x.tobytes() for x in (b.keys(0), b.values(0))]
        pools[0].append(0, sequences[0], *ones)
        pools[1].append(0, sequences[1], *one, new_lengths=[1, 1])
        for a, b in zip(*sequences, strict=True):
            assert (a.length(), a.keys(0).tobytes()) == (b.length(), b.keys(0).tobytes())
    many = np.repeat(k[:, :, :1], 90, 2)
    fast[0].append(0, many, many)
    with pytest.raises(sl.CacheFull):
        fast[0].append(0, many, many)
    assert fast[0].lengths(0) == (183, 183)
    assert len(kept_steps(fast[0])) > 1 and len(kept_steps(pools[0])) > 1


def test_raw_pages_called_again_say_what_a_first_call_says(rng):
    """Tables, lengths, strides, kinds of arrays and options change; pages beyond a length may be any numbers."""
    k_pages, v_pages = (rng.standard_normal((150, 16, 2, D)).astype(np.float32) for _ in range(2))
    for _ in range(COUNT // 5):
        count, n = int(rng.integers(1, 4)), int(rng.choice([1, 1, 1, 2]))
        lengths = rng.integers(0 if rng.random() < 0.2 else 1, LONGEST, count).astype(rng.choice([np.int32, np.int64]))
        table = rng.integers(-5, 200, (count, 150)).astype(lengths.dtype)
        for row, length in zip(table, lengths, strict=True):
            row[: -(-length // 16)] = rng.integers(0, 150, -(-length // 16))
        layout = str(rng.choice(["bhld", "lhd"])) if n == 1 else "bhld"
        q = rng.standard_normal((count, 4, n, D) if layout == "bhld" else (count, 4, D)).astype(np.float32)
        options = options_of(rng, 4 if FULL else FEW) | {"causal": bool(rng.random() < 0.5), "layout": layout}
        forget()
        want = bits(sl.attention_paged(q, k_pages, v_pages, table, lengths, **options))
        for again in range(3):
            given = either(rng, strided(rng, q), k_pages, v_pages)
            tables = either(rng, table, lengths) if rng.random() < 0.7 else (table.tolist(), lengths.tolist())
            out = {"out": given[0] * 0} if rng.random() < 0.3 else {}
            assert bits(sl.attention_paged(*given, *tables, **options, **out)) == want, again
            other = np.maximum(lengths - 1, 0)  # between two calls of these lengths
            sl.attention_paged(*given, table, other, **options)
        wrong = table.copy()
        wrong[-1, 0] = rng.choice([-1, 150])
        if lengths[-1]:
            with pytest.raises(sl.ArgumentError, match=rf"pages from 0 to 149; got -?\d+ at \[{count - 1}, 0\]"):
                sl.attention_paged(*given, wrong, lengths, **options)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, np.uint64, torch.int32, torch.int64, torch.uint8, list])
def test_one_short_row_of_a_block_table(rng, kind):
    """It is read number by number; every number that is used is checked, whatever those are kept in."""
    q, pages = (
        rng.standard_normal((1, 4, 1, D)).astype(np.float32),
        rng.standard_normal((6, 4, 2, D)).astype(np.float32),
    )

    def table(*row):
        if kind is list:
            return [[*row]]
        return torch.tensor([row], dtype=kind) if isinstance(kind, torch.dtype) else np.array([row], kind)

    keys = pages[[5, 0]].reshape(1, 8, 2, D).swapaxes(1, 2)
    for given in (q, pages, pages), tuple(map(torch.from_numpy, (q, pages, pages))):
        for n in (8, 5, 4, 3, 0, 8):
            want = bits(sl.attention(q, keys[:, :, :n], keys[:, :, :n]))
            assert bits(sl.attention_paged(*given, table(5, 0, 77), [n])) == want
            numbers, lengths = page_lists(table(5, 0, 77), [n], 6, 4, 3)
            assert numbers.tolist() == [[5, 0][: -(-n // 4)] + [0] * 3] and lengths == (n,)
        for row, n, at in ((6, 0), 1, 0), ((5, 6, 0), 8, 1), ((5, 0, 200), 9, 2):
            with pytest.raises(sl.ArgumentError, match=rf"pages from 0 to 5; got {row[at]} at \[0, {at}\]"):
                sl.attention_paged(*given, table(*row), [n])
        with pytest.raises(sl.ArgumentError, match="k_lengths: expected lengths from 0 to 12, .*; got 13 for item 0"):
            sl.attention_paged(*given, table(5, 0, 1), [13])


def test_one_short_row_of_what_is_no_page(rng):
    q, pages = torch.ones(1, 4, 1, D), torch.ones(6, 4, 2, D)
    tables = [[[0.0, 1.0]], [[-1, 0]], [[True, False]], [[2**40, 0]], [[2**63 - 1, 0]]]
    cut, meta = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64, device="meta")
    cut.untyped_storage().resize_(8)
    later = torch.zeros(2, 2, dtype=torch.int64)[1:]  # as many bytes as are left, but not from where it begins
    later.untyped_storage().resize_(16)
    for wrong in (
        *tables,
        *map(np.array, tables),
        *map(torch.tensor, tables),
        *(np.array([[0, 1]], kind) for kind in (object, "m8[ns]", "M8[ns]")),  # of which tolist() makes ints
        cut,
        later,
        meta,
        torch.eye(1, 2).int().to_sparse(),
    ):
        with pytest.raises(sl.Error, match="block_table"):
            sl.attention_paged(q, pages, pages, wrong, [5])
    later = torch.zeros(4, 2, dtype=torch.int64)[2:]  # two rows are read at once
    later.untyped_storage().resize_(32)
    with pytest.raises(sl.Error, match="block_table: expected a tensor with memory"):
        sl.attention_paged(torch.ones(2, 4, 1, D), pages, pages, later, [5, 5])
    short = torch.ones(1, dtype=torch.int32)
    short.untyped_storage().resize_(0)
    with pytest.raises(sl.Error, match="k_lengths: expected a tensor with memory"):
        sl.attention_paged(q, pages, pages, [[0, 1]], short)


def test_rows_of_packed_queries_are_where_they_are_now(rng):
    """The same lengths in another order, and with nothing beside: each sequence's rows lie elsewhere."""
    q, k, v = (x[0].swapaxes(0, 1) for x in qkv(rng, "float32", 1, 4, 2, 33, 33, D, D))
    results = {}
    for counts in ([0, 1, 32], [32, 1, 0], [1, 32, 0], [1, 0, 32]):
        pool, warm = (sl.PagePool(layers=1, pages=60, page_size=16, kv_heads=2, head_dim=D) for _ in range(2))
        results[tuple(counts)] = pool.attend(0, [pool.sequence() for _ in range(3)], q, k, v, new_lengths=counts)
    for order in (list(results), list(reversed(results))):
        warm = sl.PagePool(layers=1, pages=60, page_size=16, kv_heads=2, head_dim=D)
        for counts in order:
            sequences = [warm.sequence() for _ in range(3)]
            assert (
                warm.attend(0, sequences, q, k, v, new_lengths=list(counts)).tobytes() == results[counts].tobytes()
            ), counts
            for sequence in sequences:
                sequence.free()


def test_lengths_that_are_said_are_no_default(rng):
    """Other lengths of as many rows are another call."""
    q, k, v = (x[0].swapaxes(0, 1) for x in qkv(rng, "float32", 1, 4, 2, 3, 3, D, D))

    def attended(pool, counts):
        sequences = [pool.sequence() for _ in counts]
        return pool.attend(0, sequences, q, k, v, new_lengths=counts).tobytes(), [x.length() for x in sequences]

    sizes = {"layers": 1, "pages": 20, "page_size": 16, "kv_heads": 2, "head_dim": D}
    warm = sl.PagePool(**sizes)
    for counts in ([1, 2], [2, 1], [1, 2]):
        assert attended(warm, counts) == attended(sl.PagePool(**sizes), counts) and counts == attended(warm, counts)[1]


def test_expressions_with_zeros_of_other_signs_are_others():
    plus, minus = (sl.expression(lambda s, b, h, i, j, z=z: s / z) for z in (0.0, -0.0))
    assert plus != minus and plus == sl.expression(lambda s, b, h, i, j: s / 0.0)
    assert sl.expression(lambda b, h, i, j: j < 1) != sl.expression(lambda b, h, i, j: j < True + 0.0)


@pytest.mark.parametrize("offset", [0, 3])
def test_a_usual_step_reads_no_tensor_whose_storage_was_cut(rng, offset):
    """By one element, after a step of the same form; at an offset, too."""
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=D, capacity=64)
    pool = sl.PagePool(layers=1, kv_heads=2, head_dim=D, pages=4, page_size=16)
    sequence = pool.sequence()
    given = [torch.from_numpy(x) for x in qkv(rng, "float32", 1, 4, 2, 1, 1, D, D)]
    steps = (
        (given, lambda *x: cache.attend(0, *x), lambda: cache.length(0)),
        ([x[:, :, 0] for x in given], lambda *x: pool.attend(0, [sequence], *x), sequence.length),
    )
    for usual, step, length in steps:
        usual = [torch.cat([x.new_zeros(offset), x.flatten()])[offset:].view(x.shape) for x in usual]
        for _ in range(2):
            step(*usual)
        for n, x in enumerate(usual):
            cut = torch.cat([x.new_zeros(offset), x.flatten()])
            short = cut[offset:].view(x.shape)
            cut.untyped_storage().resize_((offset + x.numel() - 1) * x.itemsize)
            with pytest.raises(sl.ArgumentError, match="storage is missing or too short"):
                step(*usual[:n], short, *usual[n + 1 :])
        assert length() == 2 and step(*usual).isfinite().all()


def test_a_usual_step_over_a_sequence_that_is_empty_now(rng):
    """Of a pool, in a batch that was not: it sees nothing."""
    pool = sl.PagePool(layers=1, pages=40, page_size=16, kv_heads=2, head_dim=D)
    a, b = pool.sequence(), pool.sequence()
    q, k, v = (x[0].swapaxes(0, 1) for x in qkv(rng, "float32", 1, 4, 2, 2, 40, D, D))
    pool.append(0, [a, b], k, v, new_lengths=[20, 20])
    want = [pool.attend(0, [a, b], q, return_lse=True) for _ in range(2)][1]
    b.truncate(0)
    out, lse = pool.attend(0, [a, b], q, return_lse=True)
    assert (out[0] == want[0][0]).all() and (lse[:, 0] == want[1][:, 0]).all()
    assert out[1].tobytes() == bytes(out[1].nbytes) and (lse[:, 1] == -np.inf).all()


@pytest.mark.parametrize("way", ["append", "arrays", "tensors"])
def test_a_cache_that_grows_by_steps_asks_for_large_pages_once(monkeypatch, tmp_path, way):
    """Once a head fills half of 2 MiB: also where steps are all repeated, as the second cache's are; a copy at once."""
    asked = []
    monkeypatch.setattr(storage, "ask_for_large_pages", asked.append)
    few = (1 << 20) // (4 * 320)  # tokens that fit a MiB
    x = np.ones((1, 1, few - 6, 320), np.float32)
    one = x[:, :, :1].copy()  # side by side: machine code repeats such steps of tensors
    k, step = (torch.from_numpy(y) if way == "tensors" else y for y in (x, one))
    for _ in range(2):
        cache = sl.KVCache(layers=2, kv_heads=1, head_dim=320, capacity=2048)
        cache.append(0, k, k)
        with torch.no_grad():
            for n in range(8):
                cache.append(0, step, step) if way == "append" else cache.attend(0, step, step, step)
                assert n > 5 or not asked
        assert len(asked) == 4  # keys and values of two layers
        asked.clear()
        cache.append(0, k, k)
        assert not asked
    cache.save(tmp_path / "long.safetensors")
    for make in (cache.copy, lambda: sl.KVCache.load(tmp_path / "long.safetensors")):
        make()
        assert len(asked) == 4
        asked.clear()
