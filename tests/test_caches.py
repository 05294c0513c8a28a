"""Key-value caches: the bits of one call over everything, whatever was done in between; nothing lost when a call
fails.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import FULL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from problems import CODES, DTYPES, Pack, numpy_dtype, qkv, quantise, taken
from tolerance import assert_within
from wrong import WRONG

import speedlight as sl
from speedlight import arrays
from speedlight.cpu.steps import Step
from speedlight.results import Results
from speedlight.windows import SPARE

pytestmark = pytest.mark.usefixtures("one_width")  # how caches lie is seen at any width of panels
OPTIONS = [{}, {"sink_logits": [0.5, -1, 2, 0]}, {"mask": sl.window(200, 0) | sl.prefix(3)}, {"score": sl.softcap(2.0)}]


def made(dtype, d=16, dv=16, **sizes):
    return sl.KVCache(
        **(
            {"layers": 1, "batch": 1, "kv_heads": 2, "head_dim": d, "value_dim": dv, "capacity": 1300, "dtype": dtype}
            | sizes
        )
    )


@pytest.mark.each("dtype", "d", "options")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (33, 40), (16, 5)])
@pytest.mark.parametrize("options", OPTIONS)
def test_any_chunks_have_the_bits_of_one_call(isa, one_width, rng, dtype, d, dv, options):
    q, k, v = qkv(rng, dtype, 1, 4, 2, 1300, 1300, d, dv)
    want, lse = sl.attention(q, k, v, causal=True, return_lse=True, **options)
    for chunks in ([1300], [1, 1, 126, 1, 3, 700, 1, 16, 200, 251], [1299, 1]):
        cache, at = made(dtype, d, dv), 0
        for n in chunks:
            here = slice(at, at + n)
            out, some = cache.attend(0, q[:, :, here], k[:, :, here], v[:, :, here], return_lse=True, **options)
            assert out.tobytes() == want[:, :, here].tobytes() and some.tobytes() == lse[:, :, here].tobytes(), (
                f"{n} tokens at {at}"
            )
            at += n
        assert cache.length(0) == 1300


@pytest.mark.units
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_decode_kernel_has_the_forward_kernels_bits(isa, one_width, rng, dtype, monkeypatch):
    """Every dim, length, group and thread count, with special values in keys and values. A short run has one mask or
    score for each dtype.
    """
    from speedlight import api
    from speedlight.cpu import schedule

    for case in range(200 if FULL else 15):
        batch, kv_heads, group, n = (int(rng.integers(1, m)) for m in (3, 4, 6, 4))
        length = int(rng.choice([0, 1, 2, 15, 16, 17, 127, 128, 129, 300, 1023, 1024, 1025, 2500]))
        d, dv = int(rng.choice([1, 3, 16, 33, 64, 80, 128])), int(rng.choice([16, 17, 31, 64, 80, 128]))
        q, k, v = qkv(rng, dtype, batch, kv_heads * group, kv_heads, n, length, d, dv, float(rng.choice([0.1, 1, 30])))
        if case % 3 == 0 and length > 2:
            for x in (k, v):
                x[rng.random(x.shape) < 0.5 / length] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0])
        options = {"causal": bool(case % 2), "scale": [None, -0.3, 0.0][int(rng.integers(3))], "return_lse": True}
        options |= {"sink_logits": rng.standard_normal(kv_heads * group)} if case % 5 == 0 else {}
        slopes = rng.random(kv_heads * group)
        more: list[dict[str, Any]] = [
            {"mask": sl.window(int(rng.integers(1, 1500)), 0) | sl.prefix(int(rng.integers(40)))},
            {"score": [sl.softcap(3.0), sl.alibi(slopes)]},
            {"mask": rng.random((batch, 1, n, length) if FULL else length) < 0.7, "score": sl.alibi(slopes)},
        ]
        options |= [{}, *(more if FULL else [more[DTYPES.index(dtype) % 3]] * 3)][case % 4]
        results = []
        for rows, threads in ((0, 1), (64, 1), (64, 2)):
            monkeypatch.setattr(schedule, "DECODE_ROWS", rows)
            api._prepared.clear()
            sl.set_threads(threads)
            results.append(sl.attention(q, k, v, **options))
            kernel = sl.plan(q, k, v, causal=options["causal"]).kernel
            assert length == 0 or kernel.startswith("decode" if rows else "forward")
        (want, lse), *others = results
        for out, other in others:
            nan = np.isnan(want)
            assert (np.isnan(out) == nan).all() and (np.isnan(other) == np.isnan(lse)).all()
            assert (
                out[~nan].tobytes() == want[~nan].tobytes()
                and other[~np.isnan(lse)].tobytes() == lse[~np.isnan(lse)].tobytes()
            )


@pytest.mark.parametrize("dtype", DTYPES if FULL else ["float32", "bfloat16"])
def test_what_a_truncated_cache_still_holds_is_never_read(isa, rng, dtype):
    """Also not the other half of an odd last pair, in either kernel."""
    q, k, v = qkv(rng, dtype, 1, 4, 2, 40, 300, 16, 16)
    for length in (1, 5, 127, 128, 255):
        fresh, used = made(dtype), made(dtype)
        poisoned = [x.copy() for x in (k, v)]
        for x in poisoned:
            x[:, :, length:] = np.nan
        used.append(0, *poisoned)
        used.truncate(length)
        fresh.append(0, k[:, :, :length], v[:, :, :length])
        for n in (1, 40):
            assert used.attend(0, q[:, :, :n]).tobytes() == fresh.attend(0, q[:, :, :n]).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_score_of_minus_infinity_hides_its_value_when_decoding(isa, rng, dtype):
    q, k, v = qkv(rng, dtype, 1, 4, 2, 2, 300, 16, 16)
    q[..., 0] = np.abs(q[..., 0]) + 1
    k[:, :, 77, 0], v[:, :, 77] = -np.inf, np.nan
    seen = np.arange(300) != 77
    want = sl.reference.attention(q, k[:, :, seen], v[:, :, seen])
    cache = made(dtype)
    cache.append(0, k, v)
    for out in (sl.attention(q, k, v), cache.attend(0, q)):
        assert np.abs(out.astype(np.float64) - want).max() < 0.02


def test_few_heads_share_their_spans(isa, rng):
    """One kv head: several tasks, merged in order by the last."""
    for dtype in DTYPES:
        q, k, v = qkv(rng, dtype, 1, 4, 1, 1, 9000, 64, 64)
        sl.set_threads(2)
        assert sl.plan(q, k, v).threads == 2
        results = []
        for threads in (1, 2, 3, 8):
            sl.set_threads(threads)
            results += [sl.attention(q, k, v, causal=True).tobytes() for _ in range(5)]
        assert len(set(results)) == 1


def test_batches_of_unequal_lengths(isa, rng):
    q, k, v = qkv(rng, "float32", 3, 4, 2, 600, 600, 16, 16)
    cache = made("float32", batch=3, capacity=600)
    lengths = np.zeros(3, int)
    for counts in ([10, 0, 300], [1, 1, 1], [7, 40, 0], [500, 3, 16], [1, 1, 1]):
        new = max(counts)
        chunk = [np.zeros((3, x.shape[1], new, 16), np.float32) for x in (q, k, v)]
        for part, x in zip(chunk, (q, k, v), strict=True):
            for item, n in enumerate(counts):
                part[item, :, :n] = x[item, :, lengths[item] : lengths[item] + n]
        same = counts == [1, 1, 1]
        out = cache.attend(0, *chunk, new_lengths=None if same else counts)
        for item, n in enumerate(counts):
            total = lengths[item] + n
            at = slice(item, item + 1)
            want = sl.attention(q[at, :, lengths[item] : total], k[at, :, :total], v[at, :, :total], causal=True)
            assert out[at, :, :n].tobytes() == want.tobytes() and not out[at, :, n:].any()
        lengths += counts
    assert cache.lengths(0) == tuple(lengths)


@pytest.mark.parametrize("sizes", [{}, {"window": 20, "keep_first": 3, "capacity": None}], ids=["cache", "ring"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_queries_that_are_not_those_of_the_new_tokens(rng, dtype, sizes):
    """More of them ask for earlier tokens again, fewer for the last ones: the bits that these had, or would have."""
    q, k, v = qkv(rng, "float32", 2, 4, 2, 60, 60, 16, 16)
    whole, cache = (made(dtype, batch=2, **sizes) for _ in range(2))
    want, lse = whole.attend(0, q, k, v, return_lse=True)
    cache.append(0, k[:, :, :30], v[:, :, :30])
    at = 30
    for new, asked in ((2, [5, 5]), (3, [4, 1]), (9, [1, 1]), (0, [6, 0]), (4, [0, 0]), (12, [12, 12]), (0, [60, 25])):
        rows = max(asked)
        given = np.full((2, 4, rows, 16), np.nan, np.float32)
        for item, n in enumerate(asked):
            given[item, :, :n] = q[item, :, at + new - n : at + new]
        chunk = [x[:, :, at : at + new] for x in (k, v)]
        at += new
        if sizes and rows > 50:
            given = given[:, :, :50]  # what the window has not forgotten
            asked = [50, 25]
            given[0] = q[0, :, at - 50 : at]
        for _ in range(2):  # as it is, and when the step is known
            out, some = cache.attend(0, given, *chunk, q_lengths=asked, return_lse=True)
            for item, n in enumerate(asked):
                assert out[item, :, :n].tobytes() == want[item, :, at - n : at].tobytes()
                assert some[item, :, :n].tobytes() == lse[item, :, at - n : at].tobytes()
                assert not out[item, :, n:].any() and np.isneginf(some[item, :, n:]).all()
            cache.truncate(at - new)
            if new not in (0, given.shape[2]):  # it must be said each time
                with pytest.raises(sl.ArgumentError, match="told by q_lengths="):
                    cache.attend(0, given, *chunk)
        cache.append(0, *chunk)
    assert cache.lengths(0) == (60, 60)
    few = made(dtype, batch=2, **sizes)
    few.append(0, k[:, :, :9], v[:, :, :9])
    state = few.keys(0).tobytes(), few.lengths(0)
    for asked, message in (
        ([11, 12], "q_lengths: expected at most 11, the tokens of sequence 1 by now; got 12"),
        ([13, 1], "q_lengths: expected lengths from 0 to 12, the queries in q; got 13"),
        ([1], "q_lengths: expected 2 lengths"),
        (None, r"q: expected 2 tokens, as k has; got 12 .* told by q_lengths=\."),
    ):
        with pytest.raises(sl.Error, match=message):
            few.attend(0, q[:, :, :12], k[:, :, :2], v[:, :, :2], q_lengths=asked)
        assert (few.keys(0).tobytes(), few.lengths(0)) == state
    some = few.attend(0, q[:, :, :12], q_lengths=[12, 4])  # of those who see everything, there may be any number
    assert not some[1, :, 4:].any() and np.isfinite(some).all()


def test_attending_without_appending_sees_all(rng):
    q, k, v = qkv(rng, "float32", 2, 4, 2, 7, 50, 16, 16)
    cache = made("float32", batch=2)
    cache.append(0, k, v, new_lengths=[50, 20])
    out = cache.attend(0, q)
    assert out.tobytes() == sl.attention(q, k, v, k_lengths=[50, 20]).tobytes() and cache.lengths(0) == (50, 20)


def test_torch_tensors_come_back_as_such(rng):
    torch = pytest.importorskip("torch")
    q, k, v = qkv(rng, "float32", 1, 4, 2, 9, 9, 16, 16)
    cache, other = made("float32"), made("float32")
    out = cache.attend(0, *(torch.from_numpy(x) for x in (q, k, v)))
    assert isinstance(out, torch.Tensor) and out.numpy().tobytes() == other.attend(0, q, k, v).tobytes()


def test_a_full_cache_says_so_and_keeps_what_it_has(rng):
    q, k, v = qkv(rng, "float32", 2, 4, 2, 10, 10, 16, 16)
    cache = made("float32", batch=2, capacity=12)
    cache.attend(0, q, k, v)
    before = cache.keys(0).tobytes(), cache.lengths(0)
    with pytest.raises(sl.CacheFull, match="10 tokens need room, 2 of 12 are free") as caught:
        cache.attend(0, q, k, v)
    assert (caught.value.needed, caught.value.free) == (10, 2) and isinstance(caught.value, MemoryError)
    with pytest.raises(sl.CacheFull):
        cache.append(0, k, v, new_lengths=[0, 3])
    assert (cache.keys(0).tobytes(), cache.lengths(0)) == before
    cache.append(0, k, v, new_lengths=[2, 2])  # the last place can be used
    assert cache.lengths(0) == (12, 12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, q, k, v: c.attend(1, q, k, v), "layer: expected 0 to 0; got 1"),
        (lambda c, q, k, v: c.attend(0, q, k), "v: expected k and v together"),
        (lambda c, q, k, v: c.attend(0, q, k, v[:, :, :2]), "v: expected 3 tokens, as k has; got 2"),
        (lambda c, q, k, v: c.attend(0, q[:, :, :2], k, v), "q: expected 3 tokens, as k has; got 2"),
        (
            lambda c, q, k, v: c.attend(0, q, k.swapaxes(1, 2), v),
            r"k: .* got \(1, 3, 2, 16\)\. Heads come before tokens: k\.swapaxes\(1, 2\)",
        ),
        (lambda c, q, k, v: c.attend(0, q, k, v, new_lengths=3), r"new_lengths: .* got int. One for each: \[3\] \* 1"),
        (lambda c, q, k, v: c.attend(0, q, k[:, :1], v), r"k: expected shape \(1, 2, n_new, 16\)"),
        (
            lambda c, q, k, v: c.attend(0, q, k.astype(np.float64), v),
            "k: expected dtype float32, as the cache has; got float64",
        ),
        (lambda c, q, k, v: c.attend(0, q.astype(np.float64), k, v), "expected dtype"),
        (
            lambda c, q, k, v: c.attend(0, q[:, :3], k, v),
            "q: expected a multiple of 2 heads, the kv heads of the cache; got 3",
        ),
        (lambda c, q, k, v: c.attend(0, q, k, v, new_lengths=[4]), "new_lengths: expected 0 to 3"),
        (lambda c, q, k, v: c.attend(0, q, k, v, new_lengths=[1.0]), "new_lengths: expected 1 ints"),
        (lambda c, q, k, v: c.attend(0, q, k, v, scale="x"), "scale: expected a number"),
        (lambda c, q, k, v: c.attend(0, q, k, v, mask=lambda b, h, i, j: i), "mask: expected a bool result"),
        (lambda c, q, k, v: c.truncate(6), "length: expected 0 to 5, the tokens of sequence 0"),
        (lambda c, q, k, v: c.select([1]), "batch index: expected 0 to 0"),
        (lambda c, q, k, v: c.select([]), "batch_indices: expected at least one"),
        (lambda c, q, k, v: sl.KVCache(layers=0, kv_heads=1, head_dim=1, capacity=1), "layers: expected a size"),
        (lambda c, q, k, v: sl.KVCache(layers=1, kv_heads=1, head_dim=1, capacity=1, dtype="int4"), "dtype: expected"),
        (lambda c, q, k, v: c.save("x.npz"), "expected a name that ends in .safetensors"),
    ],
)
def test_every_failing_call_leaves_the_cache_as_it_was(rng, call, message):
    q, k, v = qkv(rng, "float32", 1, 4, 2, 5, 5, 16, 16)
    cache = made("float32")
    cache.append(0, k, v)
    before = cache.keys(0).tobytes(), cache.values(0).tobytes(), cache.lengths(0)
    with pytest.raises(sl.Error, match=message):
        call(cache, *(x[:, :, :3] for x in (q, k, v)))
    assert (cache.keys(0).tobytes(), cache.values(0).tobytes(), cache.lengths(0)) == before
    cache.attend(0, q, k, v)


def arguments(rng):
    """Of every method of a cache: with what it is called."""
    q, k, v = qkv(rng, "float32", 2, 4, 2, 1, 1, 16, 16)
    step = {"layer": 0, "q": q, "k": k, "v": v, "new_lengths": None, "scale": None, "mask": None, "score": None}
    step |= {"sink_logits": None, "return_lse": False, "out": None, "q_lengths": None}
    return {
        "attend": step,
        "append": {n: step[n] for n in ("layer", "k", "v", "new_lengths")},
        "truncate": {"length": 3},
        "keep": {"indices": [0], "start": 3},
        "select": {"batch_indices": [0]},
        "lengths": {"layer": 0},
        "length": {"layer": 0, "item": 0},
        "keys": {"layer": 0},
        "save": {"path": "x"},
    }


def test_arguments_of_any_type(rng, tmp_path, monkeypatch):
    """A speedlight error, or an answer; never an error of somebody else's, and nothing is changed by an error."""
    monkeypatch.chdir(tmp_path)
    sizes = {"layers": 1, "batch": 2, "kv_heads": 2, "head_dim": 16, "capacity": 20}
    _, k, v = qkv(rng, "float32", 2, 4, 2, 5, 5, 16, 16)
    for method, usual in arguments(rng).items():
        for name in usual:
            for wrong in WRONG:
                cache = sl.KVCache(**sizes)
                cache.append(0, k, v)
                before = cache.keys(0).tobytes(), cache.lengths(0)
                try:
                    getattr(cache, method)(**(usual | {name: wrong}))
                except sl.Error as error:
                    assert (cache.keys(0).tobytes(), cache.lengths(0)) == before and str(error), (
                        f"{method}({name}={wrong!r})"
                    )
    for name in (*sizes, "dtype", "value_dim", "window", "keep_first", "device"):
        for wrong in WRONG:
            with contextlib.suppress(sl.Error):
                sl.KVCache(**(sizes | {name: wrong}))
    for wrong in WRONG:
        with pytest.raises(sl.Error):
            sl.KVCache.load(wrong)


def test_one_appender_at_a_time(rng):
    q, k, v = qkv(rng, "float32", 1, 4, 2, 300, 300, 16, 16)
    cache = made("float32", layers=2)
    cache.append(1, k, v)
    cache._claims.add(0)
    with pytest.raises(sl.CacheBusy, match="layer 0: another thread"):
        cache.append(0, k, v)
    with pytest.raises(sl.CacheBusy):
        cache.clear()
    cache.attend(1, q)  # another layer, and reading, go on
    cache._claims.clear()
    assert cache.lengths(0) == (0,) and cache.lengths(1) == (300,)
    want, wrong = cache.attend(1, q).tobytes(), []

    def read() -> None:
        wrong.extend(1 for _ in range(50) if cache.attend(1, q).tobytes() != want)

    threads = [threading.Thread(target=read) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_caches_come_back(rng, tmp_path, dtype):
    pytest.importorskip("safetensors")
    q, k, v = qkv(rng, dtype, 2, 4, 2, 40, 40, 16, 20)
    cache = made(dtype, 16, 20, layers=2, batch=2)
    cache.append(0, k, v, new_lengths=[40, 7])
    cache.append(1, k[:, :, :3], v[:, :, :3])
    cache.save(tmp_path / "chat.safetensors")
    again = sl.KVCache.load(tmp_path / "chat.safetensors")
    assert repr(again) == repr(cache) and [again.lengths(n) for n in (0, 1)] == [(40, 7), (3, 3)]
    new = [x[:, :, :1] for x in (q, k, v)]
    assert all(again.attend(n, *new).tobytes() == cache.attend(n, *new).tobytes() for n in (0, 1))
    assert [p.name for p in tmp_path.iterdir()] == ["chat.safetensors"]


def test_damaged_files_are_named(rng, tmp_path):
    pytest.importorskip("safetensors")
    _, k, v = qkv(rng, "float32", 1, 4, 2, 9, 9, 16, 16)
    cache, path = made("float32"), tmp_path / "c.safetensors"
    cache.append(0, k, v)
    cache.save(path)
    data, refused = path.read_bytes(), 0
    for _ in range(5000 if FULL else 400):
        damaged = bytearray(data)
        at = int(rng.integers(len(data) if rng.random() < 0.3 else 700))
        match rng.integers(3):
            case 0:
                damaged = damaged[:at]
            case 1:
                damaged[at] = int(rng.integers(256))
            case 2:
                damaged[at : at + 4] = rng.choice([b"9999", b"-111", b'""""', b"null"])
        path.write_bytes(damaged)
        start = time.process_time()
        try:
            back = sl.KVCache.load(path)
            assert back.length(0) <= back.capacity and back.keys(0).nbytes <= len(data)
        except sl.FileError as error:
            refused += 1
            assert "c.safetensors" in str(error)
        assert time.process_time() - start < 1
    assert refused > 100
    with pytest.raises(sl.FileError, match="No such file"):
        sl.KVCache.load(tmp_path / "none.safetensors")


def written(path, change):
    """A saved cache with other words in its header."""
    length = int.from_bytes(path.read_bytes()[:8], "little")
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("kind", [{}, {"window": 70, "keep_first": 5, "capacity": None}])
def test_no_size_of_a_file_is_believed(rng, tmp_path, kind):
    """Every size is held against the file before anything is made: at once, and in little memory."""
    pytest.importorskip("safetensors")
    _, k, v = qkv(rng, "float32", 1, 4, 2, 9, 9, 16, 16)
    cache, path = made("float32", **kind), tmp_path / "c.safetensors"
    cache.append(0, k, v)
    cache.save(path)
    data = path.read_bytes()
    for name in ("layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity", "window", "keep_first"):
        for size in (
            "0",
            "-1",
            "2",
            "17",
            "3000000",
            str(1 << 31),
            str(1 << 46),
            str(1 << 63),
            "9" * 5000,
            "1e3",
            "",
            "٣",
        ):
            path.write_bytes(data)
            written(path, lambda header: header["__metadata__"].update({name: size}))  # noqa: B023
            start = time.process_time()
            try:
                again = sl.KVCache.load(path)
            except sl.FileError as error:
                assert "c.safetensors" in str(error)
            else:
                assert name in ("capacity", "window", "keep_first") or size == str(getattr(cache, name))
                assert again.lengths(0) == cache.lengths(0)
                assert again.keys(0).tobytes() == cache.keys(0).tobytes() or name == "window"
            assert time.process_time() - start < 2, (name, size)


def test_a_ring_that_was_written_less_far_than_it_is_long_is_refused(rng, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    save = pytest.importorskip("safetensors.numpy").save_file
    _, k, v = qkv(rng, "float32", 1, 4, 2, 9, 9, 16, 16)
    cache, path = made("float32", window=70, keep_first=5, capacity=None), tmp_path / "c.safetensors"
    cache.append(0, k, v)
    cache.save(path)
    with safetensors.safe_open(path, "np") as file:
        words, stored = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    stored["written"][0, 0] -= 1
    save(stored, path, words)
    with pytest.raises(sl.FileError, match="expected what a sequence of 9 tokens sees; of 8 that were there"):
        sl.KVCache.load(path)


def test_an_empty_file_of_many_layers_is_refused_at_once(tmp_path):
    save = pytest.importorskip("safetensors.numpy").save_file
    words = {
        "format": "speedlight key-value cache",
        "version": "1",
        "dtype": "float32",
        "layers": "3000000",
        "batch": "1",
    }
    words |= {"kv_heads": "1", "head_dim": "1", "value_dim": "1", "capacity": "1"}
    save({"lengths": np.zeros((1, 1), np.int64)}, tmp_path / "c.safetensors", words)
    start = time.process_time()
    with pytest.raises(sl.FileError, match="cannot hold 3000000 layers"):
        sl.KVCache.load(tmp_path / "c.safetensors")
    assert time.process_time() - start < 1


class Machine(RuleBasedStateMachine):
    """Any order of calls, against arrays that are simply concatenated."""

    options: dict = {"capacity": 150}  # noqa: RUF012
    mask = None

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.dtype = "float32"
        self.most = self.options["capacity"]
        self.cache = sl.KVCache(layers=2, batch=2, kv_heads=2, head_dim=16, value_dim=17, **self.options)
        self.model = [
            [(np.zeros((2, 0, 16), np.float32), np.zeros((2, 0, 17), np.float32)) for _ in range(2)] for _ in range(2)
        ]

    def chunk(self, n: int) -> list[np.ndarray]:
        return qkv(self.rng, self.dtype, 2, 4, 2, n, n, 16, 17)

    @rule(
        layer=st.integers(0, 1),
        n=st.integers(0, 40) | st.integers(250, 300),
        counts=st.none() | st.tuples(st.integers(0, 300), st.integers(0, 300)),
        attend=st.booleans(),
    )
    def grow(self, layer, n, counts, attend):
        q, k, v = self.chunk(n)
        counts = None if counts is None else [min(c, n) for c in counts]
        each = counts or [n, n]
        fits = all(self.model[layer][b][0].shape[1] + c <= self.most for b, c in enumerate(each))
        try:
            out = (
                self.cache.attend(layer, q, k, v, new_lengths=counts)
                if attend
                else self.cache.append(layer, k, v, new_lengths=counts)
            )
        except sl.CacheFull:
            assert not fits
            return
        assert fits
        for b, c in enumerate(each):
            keys, values = self.model[layer][b]
            keys, values = (
                np.concatenate([x, self.kept(new[b, :, :c])], axis=1) for x, new in ((keys, k), (values, v))
            )
            self.model[layer][b] = keys, values
            if attend:
                want = self.attention(q[b : b + 1, :, :c], keys[None], values[None])
                assert out[b : b + 1, :, :c].tobytes() == want.tobytes()

    def kept(self, x):
        """What a cache has of new tokens."""
        return x

    def attention(self, q, k, v):
        return sl.attention(q, k, v, causal=True, mask=self.mask)

    def shown(self, x):
        """What keys() and values() give of all the tokens."""
        return x

    @rule(share=st.floats(0, 1))
    def truncate(self, share):
        lengths = [int(share * min(self.model[layer][b][0].shape[1] for layer in range(2))) for b in range(2)]
        self.cache.truncate(lengths)
        self.forget(lengths)

    def forget(self, lengths):
        for layer in range(2):
            for b, n in enumerate(lengths):
                self.model[layer][b] = tuple(x[:, :n] for x in self.model[layer][b])

    @rule(back=st.integers(0, 60), path=st.sets(st.integers(0, 59)))
    def keep(self, back, path):
        longest, least = ([end(len(layer[b][0][0]) for layer in self.model) for b in (0, 1)] for end in (max, min))
        starts = [max(0, n - back) for n in least]
        paths = [sorted(n for n in path if a + n < b) for a, b in zip(starts, least, strict=True)]
        try:
            self.cache.keep(paths, start=starts)
        except sl.ArgumentError as error:
            assert "forgotten" in str(error) and self.mask is not None  # a window's, of which too much has gone by
            assert any([a - n > 200 or self.cut[b] for b, (a, n) in enumerate(zip(longest, starts, strict=True))])
            return
        self.cut = [True, True]
        for layer in range(2):
            for b, (start, left) in enumerate(zip(starts, paths, strict=True)):
                which = [*range(start), *(start + n for n in left)]
                self.model[layer][b] = tuple(x[:, which] for x in self.model[layer][b])

    cut = (False, False)  # a truncated ring may have less than it seems

    @rule(order=st.tuples(st.integers(0, 1), st.integers(0, 1)))
    def select(self, order):
        self.cache = self.cache.select(order)
        self.model = [[layer[b] for b in order] for layer in self.model]

    @rule()
    def copy(self):
        old, self.cache = self.cache, self.cache.copy()
        old.clear()

    @precondition(lambda self: self.cache.used_bytes > 4000)
    @rule()
    def clear(self):
        self.cache.clear()
        self.model = [[tuple(x[:, :0] for x in pair) for pair in layer] for layer in self.model]

    @invariant()
    def holds_what_it_was_given(self):
        for layer in range(2):
            assert self.cache.lengths(layer) == tuple(self.model[layer][b][0].shape[1] for b in range(2))
            for stored, which in ((self.cache.keys(layer), 0), (self.cache.values(layer), 1)):
                for b in range(2):
                    want = self.shown(self.model[layer][b][which])
                    n = want.shape[1]
                    assert stored[b, :, :n].tobytes() == want.tobytes() and not stored[b, :, n:].any()


class QuantisedMachine(Machine):
    options = {"capacity": 400, "dtype": "int8"}  # noqa: RUF012

    def kept(self, x):
        codes, scales = quantise(x)
        return codes * scales

    def attention(self, q, k, v):
        """Tokens that were quantised stay what they are when they are quantised again: here all at once."""
        cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, value_dim=17, capacity=max(1, k.shape[2]), dtype="int8")
        n = q.shape[2]
        cache.append(0, k[:, :, : k.shape[2] - n], v[:, :, : v.shape[2] - n])
        return cache.attend(0, q, k[:, :, k.shape[2] - n :], v[:, :, v.shape[2] - n :])


class WindowedMachine(Machine):
    options = {"capacity": 3000, "window": 60, "keep_first": 20}  # noqa: RUF012
    mask = sl.window(59, 0) | sl.prefix(20)

    def shown(self, x):
        n = x.shape[1]
        return np.concatenate([x[:, : min(20, n)], x[:, max(20, n - 59) :]], axis=1)

    @rule(back=st.integers(0, 100))
    def truncate(self, back):
        lengths = [max(0, min(self.model[layer][b][0].shape[1] for layer in range(2)) - back) for b in range(2)]
        longest = [max(self.model[layer][b][0].shape[1] for layer in range(2)) for b in range(2)]
        try:
            self.cache.truncate(lengths)
        except sl.ArgumentError as error:
            assert "forgotten" in str(error) and any(
                a - n > 200 or self.cut[b] for b, (a, n) in enumerate(zip(longest, lengths, strict=True))
            )
            return
        self.cut = [True, True]
        self.forget(lengths)


for machine in (Machine, QuantisedMachine, WindowedMachine):
    machine.TestCase.settings = settings(
        max_examples=300 if FULL else 25, stateful_step_count=50 if FULL else 20, deadline=None
    )
TestMachine, TestQuantisedMachine, TestWindowedMachine = (
    Machine.TestCase,
    QuantisedMachine.TestCase,
    WindowedMachine.TestCase,
)


@pytest.mark.each("dtype", "options")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (33, 40), (16, 5)] if FULL else [(33, 40)])
@pytest.mark.parametrize(
    ("codes", "options"),
    [*(("int8", x) for x in OPTIONS), *(("float8_e4m3fn", x) for x in (OPTIONS if FULL else OPTIONS[1::2]))],
)
def test_codes_against_the_oracle_and_in_any_chunks(isa, one_width, rng, codes, dtype, d, dv, options):
    """Codes and scales are numbers like any others: the result is inside float32's bound of them, and the output's
    rounding.
    """
    q, k, v = qkv(rng, dtype, 1, 4, 2, 1300, 1300, d, dv)
    stored = [x.astype(np.float64) * scales for x, scales in (quantise(each, codes) for each in (k, v))]
    last = q if FULL else q[:, :, -60:]  # of which rows the reference is asked
    want, want_lse = sl.reference.attention(last.astype(np.float64), *stored, causal=True, return_lse=True, **options)
    bounds = sl.reference.error_bound(
        last.astype(np.float32), *(x.astype(np.float32) for x in stored), causal=True, int8=True, **options
    )
    step = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    whole = made(codes, d, dv).attend(0, q, k, v, return_lse=True, **options)
    assert whole[0].dtype == q.dtype
    assert_within(whole[0][:, :, -last.shape[2] :], want, bounds.out + step * np.abs(want) + 2.0**-24)
    assert_within(whole[1][:, :, -last.shape[2] :], want_lse, bounds.lse)
    for chunks in ([1, 1, 126, 1, 3, 700, 1, 16, 200, 251], [1299, 1]):
        cache, at = made(codes, d, dv), 0
        for n in chunks:
            here = slice(at, at + n)
            out, lse = cache.attend(0, q[:, :, here], k[:, :, here], v[:, :, here], return_lse=True, **options)
            assert (
                out.tobytes() == whole[0][:, :, here].tobytes() and lse.tobytes() == whole[1][:, :, here].tobytes()
            ), f"{n} at {at}"
            at += n


@pytest.mark.parametrize("codes", CODES)
def test_rows_that_no_scale_fits(isa, rng, codes):
    """Zeros, tiny and huge numbers are kept as well as can be; NaN and infinity make NaN of exactly the rows that see
    them.
    """
    q, k, v = qkv(rng, "float32", 1, 4, 2, 40, 40, 16, 16)
    k[0, 0, 3], v[0, 1, 4], k[0, 1, 5], v[0, 0, 6] = 0, 0, 1e-42, 3e38
    cache = made(codes)
    assert np.isfinite(cache.attend(0, q, k, v)).all()
    for which, value in ((0, np.nan), (0, np.inf), (1, np.nan), (1, -np.inf)):
        bad = [k.copy(), v.copy()]
        bad[which][0, 1, 20, 7] = value
        for chunks in ([40], [1] * 40):
            cache, at, outs = made(codes), 0, []
            for n in chunks:
                outs.append(cache.attend(0, *(x[:, :, at : at + n] for x in (q, *bad))))
                at += n
            out = np.concatenate(outs, axis=2)
            nan = np.isnan(out).all(axis=-1)
            assert nan[0, 2:, 20:].all() and not nan[0, :2].any() and not nan[0, :, :20].any()
            assert (np.isnan(out).any(axis=-1) == nan).all()


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", ["float32", "int8", *["bfloat16", "float16", "float8_e4m3fn"] * FULL])
def test_a_window_is_the_mask_in_constant_memory(isa, one_width, rng, dtype):
    window, keep, n = 300, 20, 3000
    q, k, v = qkv(rng, taken(dtype), 2, 4, 2, n, n, 24, 24)
    whole = made(dtype, 24, 24, batch=2, capacity=n)
    want, lse = whole.attend(0, q, k, v, mask=sl.window(window - 1, 0) | sl.prefix(keep), return_lse=True)
    alibi = sl.alibi([0.1, 0.2, 0.3, 0.4])
    for chunks, options in (
        ([n], {}),
        ([1] * 5 + [100, 700, 1, 1, 3] + [200] * 11, {}),
        ([256, 257, 1, 2486], {"score": alibi}),
    )[: None if FULL or dtype == "float32" else 2]:
        cache, at = (
            sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=24, dtype=dtype, window=window, keep_first=keep),
            0,
        )
        store = cache._storage.keys[0]
        room = store.memory.nbytes
        if options:
            whole.clear()
            want, lse = whole.attend(
                0, q, k, v, mask=sl.window(window - 1, 0) | sl.prefix(keep), return_lse=True, **options
            )
        for m in chunks:
            here = slice(at, min(n, at + m))
            out, some = cache.attend(0, q[:, :, here], k[:, :, here], v[:, :, here], return_lse=True, **options)
            assert out.tobytes() == want[:, :, here].tobytes() and some.tobytes() == lse[:, :, here].tobytes(), (
                f"{m} tokens at {at}"
            )
            at += m
        assert cache.used_bytes <= 2 * (128 + 640) * cache.token_bytes and room == 2 * 2 * (128 + 640) * store.row
        assert cache.keys(0).shape[2] == keep + window - 1 and cache.copy().keys(0).tobytes() == cache.keys(0).tobytes()
    with pytest.raises(sl.ArgumentError, match="length: expected one whose window is still there"):
        cache.truncate(2000)
    cache.truncate(2990)
    new = [x[:, :, :1] for x in (q, k, v)]
    whole.truncate(2990)
    got, expected = (
        c.attend(0, *new, **o) for c, o in ((cache, {}), (whole, {"mask": sl.window(window - 1, 0) | sl.prefix(keep)}))
    )
    assert got.tobytes() == expected.tobytes()
    cache.truncate(15)
    assert cache.lengths(0) == (15, 15)


def test_a_failing_long_chunk_leaves_a_windowed_cache_as_it_was(rng):
    q, k, v = qkv(rng, "float32", 1, 4, 2, 900, 900, 16, 16)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, window=100)
    cache.attend(0, q, k, v)
    stores = cache._storage.keys[0], cache._storage.values[0]
    before = [x.memory.tobytes() for x in stores]
    ids = sl.table(np.zeros(1500, np.int64), "ids")  # too short for the last piece
    with pytest.raises(sl.Error, match="ids"):
        cache.attend(0, q, k, v, mask=lambda b, h, i, j: ids[i] == 0)
    assert [x.memory.tobytes() for x in stores] == before and cache.lengths(0) == (900,)
    with pytest.raises(sl.ArgumentError, match="q: expected fewer queries"):
        cache.attend(0, q)
    assert np.isfinite(cache.attend(0, q[:, :, :50])).all()


class Broken(Exception):
    pass


def fail(*_, **__):
    raise Broken


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("keep", [0, 20])
def test_a_failing_call_takes_nothing_from_a_ring(one_width, rng, dtype, keep, monkeypatch):
    """New tokens of a ring are written over old ones, to which truncate() could still go back."""
    q, k, v = qkv(rng, taken(dtype), 2, 4, 2, 1700, 1700, 16, 16)
    sizes = {"layers": 1, "batch": 2, "kv_heads": 2, "head_dim": 16, "dtype": dtype}
    whole = sl.KVCache(**sizes, capacity=1700)
    mask = sl.window(99, 0) | sl.prefix(keep)
    want = whole.attend(0, q, k, v, mask=mask)
    for n in (1, SPARE, SPARE + 1, 200, 300, 900):
        cache = sl.KVCache(**sizes, window=100, keep_first=keep)
        cache.append(0, k[:, :, :750], v[:, :, :750], new_lengths=[750, 730])
        held = cache.keys(0).tobytes()
        with monkeypatch.context() as patch:
            patch.setattr(*((Step, "run") if n <= 256 else (Results, "returned")), fail)
            with pytest.raises(Broken):
                cache.attend(0, *(x[:, :, :n] for x in (q, k, v)))
        assert cache.keys(0).tobytes() == held and cache.lengths(0) == (750, 730)
        ring = cache._ring
        first = [
            m - ring.size + SPARE + 99 for m in (750, 730)
        ]  # what the next token sees begins with the oldest that is counted on
        for item in (0, 1):
            with pytest.raises(sl.ArgumentError, match="one whose window is still there"):
                cache.truncate([m - (i == item) for i, m in enumerate(first)])
        cache.truncate(first)
        one = [np.stack([x[i, :, m : m + 1] for i, m in enumerate(first)]) for x in (q, k, v)]
        out = cache.attend(0, *one)
        for i, m in enumerate(first):
            assert out[i].tobytes() == want[i, :, m : m + 1].tobytes(), f"{n} tokens, sequence {i}"


@pytest.mark.parametrize("keep", [0, 5])
def test_queries_over_a_ring_see_all_that_they_should_or_are_refused(rng, keep):
    q, k, v = qkv(rng, "float32", 1, 4, 2, 900, 900, 16, 16)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, window=100, keep_first=keep)
    cache.append(0, k, v)
    want = sl.attention(q, k, v, mask=sl.window(99, None) | sl.prefix(keep))
    most = cache._ring.size - SPARE - 99
    for n in (1, 50, most - 1, most):
        assert cache.attend(0, q[:, :, 900 - n :]).tobytes() == want[:, :, 900 - n :].tobytes()
    for n in (
        most + 1,
        most + SPARE + 1,
        700,
        890,
        899,
        900,
    ):  # of few first tokens, too, that stay: they see later ones
        with pytest.raises(sl.ArgumentError, match="q: expected fewer queries"):
            cache.attend(0, q[:, :, 900 - n :])


def test_a_window_stays_small_however_long_the_sequence(rng):
    """One head, whose spans several tasks would share: what they leave for each other does not grow with what was
    forgotten.
    """
    from speedlight.cpu import prepare

    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=16, window=100)
    q, k, v = qkv(rng, "float32", 1, 4, 1, 300, 300, 16, 16)
    cache.attend(0, q, k, v)
    cache._held[0] = [1 << 33], [1 << 33]
    taken = []
    real = prepare.take_scratch
    prepare.take_scratch = lambda size: taken.append(size) or real(size)
    try:
        out = cache.attend(0, *(x[:, :, :1] for x in (q, k, v)))
    finally:
        prepare.take_scratch = real
    assert np.isfinite(out).all() and max(taken) < 80 << 20


@pytest.mark.parametrize("kind", [*({"dtype": x} for x in CODES), {"window": 70, "keep_first": 5, "capacity": None}])
def test_other_kinds_are_saved_too(rng, tmp_path, kind):
    q, k, v = qkv(rng, "float32", 2, 4, 2, 400, 400, 16, 20)
    cache = made(**({"dtype": "float32"} | kind), d=16, dv=20, batch=2)
    cache.append(0, k, v, new_lengths=[400, 7])
    cache.save(tmp_path / "c.safetensors")
    again = sl.KVCache.load(tmp_path / "c.safetensors")
    assert repr(again) == repr(cache) and again.keys(0).tobytes() == cache.keys(0).tobytes()
    new = [x[:, :, :1] for x in (q, k, v)]
    assert again.attend(0, *new).tobytes() == cache.attend(0, *new).tobytes()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"capacity": None}, "capacity: expected the most tokens"),
        ({"keep_first": 3}, "keep_first: expected 0 without a window"),
        ({"window": 0}, "window: expected a size from 1"),
        ({"window": 10, "keep_first": -1}, "keep_first: expected a size from 0"),
        ({"window": 2.5}, "window: expected an int"),
    ],
)
def test_wrong_windows(sizes, message):
    with pytest.raises(sl.Error, match=message):
        made("float32", **sizes)


def test_numpy_dtypes_are_understood():
    for name in DTYPES:
        assert made(numpy_dtype(name)).dtype == name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_example_says_the_same_whatever_the_chunks_and_threads(dtype):
    path = Path(__file__).parent.parent / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    model, texts = generate.Model(3, dtype), set()
    for chunk, threads, paged in ((1, 1, False), (5, 2, True), (16, 1, True), (100, 2, False)):
        sl.set_threads(threads)
        texts.add("".join(generate.generate(model, "The attention of a stranger, in turn", 30, chunk, paged=paged)))
    (text,) = texts
    assert len(text) == 30 and len(set(text)) > 5


def test_the_example_as_a_person_runs_it():
    path = Path(__file__).parent.parent / "examples" / "generate.py"
    run = [sys.executable, str(path), "--tokens", "20", "--prompt"]
    done = subprocess.run([*run, "a stranger"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("a stranger") and "tokens/s" in done.stderr
    wrong = subprocess.run([*run, "Zürich"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and "--prompt: no token for" in wrong.stderr


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_quantising_is_as_near_as_a_scale_allows(rng, dtype, kind):
    x = (rng.standard_normal((3, 4, 50, 33)) * 10.0 ** rng.integers(-3, 4, (3, 4, 50, 1))).astype(numpy_dtype(dtype))
    codes, scales = quantise(x, kind)
    assert codes.dtype == numpy_dtype(kind) and scales.dtype == np.float32
    codes, last = codes.astype(np.float64), {"int8": 127, "float8_e4m3fn": 448}[kind]
    assert (np.abs(codes).max(axis=-1) == last).all()
    assert (scales == np.abs(x.astype(np.float32)).max(axis=-1, keepdims=True) / np.float32(last)).all()
    error = np.abs(codes * scales.astype(np.float64) - x.astype(np.float64))
    allowed = 0.5 * scales if kind == "int8" else np.maximum(2.0**-4 * np.abs(x.astype(np.float64)), 2.0**-10 * scales)
    assert (error <= 1.0002 * allowed).all()


@pytest.mark.parametrize("kind", CODES)
def test_codes_are_those_of_the_reference(rng, kind):
    """All codes, what is half way between two, and the numbers beside that; rows that no scale fits."""
    every = np.arange(256, dtype=np.uint8).view(numpy_dtype(kind)).astype(np.float32)
    last = np.float32(np.nanmax(every))
    every = np.unique(every[np.abs(every) <= last])
    middle = (every[1:] + every[:-1]) / 2
    x = np.concatenate([every, middle, *(np.nextafter(middle, np.float32(way)) for way in (-np.inf, np.inf))])
    x = np.concatenate([x, -x[::-1]])
    rows = [x * np.float32(2.0**n) for n in (-130, -126, -9, 0, 7, 110)]  # a scale is that power of two
    rows += [rng.standard_normal(x.size).astype(np.float32) * np.float32(10.0**n) for n in range(-44, 38, 3)]
    rows += [np.where(np.arange(x.size) == 9, np.float32(bad), x) for bad in (np.nan, np.inf, -np.inf)]
    rows += [np.zeros_like(x), np.full_like(x, 1e-44), np.full_like(x, 3.4e38)]
    tokens = np.stack(rows)[None, None]
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=x.size, capacity=len(rows), dtype=kind)
    cache.append(0, tokens, tokens)
    want = quantise(tokens, kind)
    for stored in cache._storage.parts(0, [len(rows)]):
        assert [part.tobytes() for part in stored] == [part.tobytes() for part in want]
    codes, scales = (part[0, 0].astype(np.float32) for part in want)
    assert np.isnan(scales).sum() == 3 and (codes[3, : len(every)] == every).all()
    assert len(set(every.tolist())) == {"int8": 255, "float8_e4m3fn": 253}[kind]
    fits = (scales > 0)[:, 0]
    ratios = np.clip(np.stack(rows)[fits] / scales[fits], -last, last)
    assert (codes[fits] == (np.rint(ratios) if kind == "int8" else ratios.astype(numpy_dtype(kind)))).all()
    with pytest.raises(sl.ArgumentTypeError, match="x: expected float32, float16 or bfloat16, which an? "):
        sl.reference.quantise(np.zeros((2, 3)), kind)


def test_float8_by_its_names():
    import ml_dtypes
    import torch

    for name in ("fp8", "fp8_e4m3", "float8_e4m3", "float8_e4m3fn", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn):
        assert made(name).dtype == "float8_e4m3fn"
    for theirs, way in (("fp16", "Write 'float16'"), ("e4m3", "Write 'fp8'"), ("fp8_e5m2", "two bits of fraction")):
        with pytest.raises(sl.ArgumentTypeError, match=way):
            made(theirs)
    for other in (torch.float8_e5m2, torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3, "e4m3"):
        with pytest.raises(sl.ArgumentTypeError, match="bfloat16, int8 or float8_e4m3fn \\('fp8'\\); got"):
            made(other)


def test_a_code_of_nan_is_refused(tmp_path):
    """A row that has one has a scale of NaN: kernels widen codes as numbers."""
    cache, x = made("fp8"), np.ones((1, 2, 3, 16), np.float32)
    cache.append(0, x, x)
    cache.save(tmp_path / "c.safetensors")
    (tmp_path / "c.safetensors").write_bytes(
        (tmp_path / "c.safetensors").read_bytes().replace(b"\x7e" * 16, b"\x7f" * 16, 1)
    )
    with pytest.raises(sl.FileError, match=r"keys.0 of numbers; got NaN"):
        sl.KVCache.load(tmp_path / "c.safetensors")


HUGE = 10**5000  # of more digits than Python prints


def test_numbers_that_python_does_not_print_are_named():
    cache, x = sl.KVCache(layers=1, kv_heads=1, head_dim=4, capacity=4), np.ones((1, 1, 1, 4), np.float32)
    pool = sl.PagePool(layers=1, pages=2, page_size=16, kv_heads=1, head_dim=4)
    sequence, sizes = pool.sequence(), {"layers": 1, "kv_heads": 1, "head_dim": 4, "capacity": 4}
    calls = [
        *(lambda n=n: sl.KVCache(**(sizes | {n: HUGE})) for n in (*sizes, "batch", "value_dim", "window", "dtype",
                                                                  "device")),
        lambda: cache.lengths(HUGE), lambda: cache.length(0, HUGE), lambda: cache.keys(HUGE),
        lambda: cache.truncate(HUGE),
        lambda: cache.truncate([HUGE]), lambda: cache.select([HUGE]), lambda: cache.attend(HUGE, x, x, x),
        lambda: cache.attend(0, x, x, x, return_lse=HUGE), lambda: cache.append(0, x, x, new_lengths=HUGE),
        lambda: cache.append(0, x, x, new_lengths=[HUGE]), lambda: sequence.truncate(HUGE),
        lambda: sequence.length(HUGE),
        lambda: pool.append(HUGE, [sequence], x[0], x[0]),
        lambda: pool.attend(0, [sequence], x[0], x[0], x[0], return_lse=HUGE),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(sl.Error):
            call()
    assert cache.length(0) == sequence.length() == 0


def test_what_raises_while_it_is_listed_is_named():
    cache, x = sl.KVCache(layers=1, kv_heads=1, head_dim=4, capacity=4), np.ones((1, 1, 1, 4), np.float32)
    for call in (cache.truncate, cache.select, lambda y: cache.append(0, x, x, new_lengths=y)):
        with pytest.raises(sl.ArgumentTypeError, match="expected"):
            call(1 // n for n in (1, 0))


def test_memory_that_cannot_be_reserved_is_an_error_of_ours():
    for sizes in ({"capacity": 1 << 46, "head_dim": 1 << 40}, {"window": 1 << 46, "head_dim": 8}):
        with pytest.raises(sl.ReservationError, match="capacity"):
            sl.KVCache(layers=1, kv_heads=1, **sizes)
    with pytest.raises(sl.ReservationError, match="pages"):
        sl.PagePool(layers=1, pages=1 << 46, page_size=16, kv_heads=1, head_dim=8)


def test_truncate_wants_a_length():
    """None is not clear()."""
    for batch in (1, 2):
        cache = sl.KVCache(layers=1, batch=batch, kv_heads=1, head_dim=4, capacity=9)
        cache.append(0, *[np.ones((batch, 1, 5, 4), np.float32)] * 2)
        for wrong in (None, "3", "33"):
            with pytest.raises(sl.ArgumentTypeError, match="^length: expected an int; got (NoneType|str)"):
                cache.truncate(wrong)  # type: ignore[arg-type]
        assert cache.lengths(0) == (5,) * batch


def through_torch(x):
    return pytest.importorskip("torch").from_numpy(x.copy())


def through_dlpack(x):
    return Pack(x.copy())


@pytest.mark.parametrize("made", [through_torch, through_dlpack])
def test_arrays_that_nobody_else_holds(rng, made):
    """An argument may be the only reference: its memory must stay until it is stored."""
    x = rng.standard_normal((1, 2, 2000, 64), dtype=np.float32)
    tokens = np.ascontiguousarray(x[0].swapaxes(0, 1))
    want = np.asarray(sl.attention(x[:, :, -1:], x, x)).tobytes()
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 64}
    for _ in range(3):
        cache, pool = sl.KVCache(capacity=2000, **sizes), sl.PagePool(pages=130, page_size=32, **sizes)
        sequence = pool.sequence()
        cache.append(0, made(x), made(x))
        pool.append(0, [sequence], made(tokens), made(tokens))
        cache.attend(1, made(x[:, :, -1:]), made(x), made(x), q_lengths=[1])
        pool.attend(1, [sequence], made(tokens[-1:]), made(tokens), made(tokens), q_lengths=[1])
        for layer in range(2):
            assert cache.keys(layer).tobytes() == cache.values(layer).tobytes() == x.tobytes()
            assert pool.attend(layer, [sequence], tokens[-1:]).tobytes() == want


@pytest.mark.parametrize("made", [through_torch, through_dlpack])
def test_a_view_keeps_its_memory(rng, made):
    x = rng.standard_normal((3, 4))
    given = made(x)
    alive, view = weakref.ref(given), arrays.describe(given, "x").numpy()
    del given
    assert alive() is not None and view.tobytes() == x.tobytes()
    del view
    gc.collect()
    assert alive() is None
