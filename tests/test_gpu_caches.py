"""Caches, pools and block tables on a GPU: the same answers as on the CPU, the same errors; in Triton's interpreter, or
on a GPU.
"""

from __future__ import annotations

import contextlib
import inspect

import numpy as np
import pytest
import torch
from conftest import FULL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from injection import interrupted, needs_places, places, spread
from problems import numpy_dtype, taken
from test_gpu import DEVICE, same, tensor
from tolerance import plain
from wrong import WRONG

import speedlight as sl
from speedlight.cpu import storage as cpu_storage
from speedlight.files import read_arrays, read_metadata
from speedlight.gpu import launch
from speedlight.gpu import storage as gpu_storage
from speedlight.gpu.rows import Destination, Tokens
from speedlight.windows import SPARE

KINDS = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn")
OPTIONS = [{}, {"score": sl.softcap(2.0)}, {"mask": sl.window(50, 0) | sl.prefix(3)}, {"sink_logits": [0.5, -1, 2, 0]}]
DROPOUT = {"dropout": 0.4, "seed": 2**63 + 1}
OWN = ("storage.py", "kv/")  # files whose functions are interrupted
CLOSE = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2, "int8": 3e-6, "float8_e4m3fn": 3e-6}


def close(got, want, dtype):
    np.testing.assert_allclose(plain(got.cpu()), plain(want), rtol=CLOSE[dtype], atol=CLOSE[dtype])


def tokens(rng, dtype, *shapes):
    kind = numpy_dtype(taken(dtype))
    return [rng.standard_normal(s).astype(kind) for s in shapes]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [*((x, {}) for x in (KINDS if FULL else ())), *zip(KINDS[1:4], OPTIONS[1:], strict=True), ("float32", DROPOUT)],
)
def test_a_cache_says_what_it_says_on_the_cpu(rng, dtype, options):
    sizes = {"layers": 2, "batch": 2, "kv_heads": 2, "head_dim": 17, "value_dim": 20, "capacity": 400, "dtype": dtype}
    here, there = sl.KVCache(**sizes), sl.KVCache(**sizes, device="cuda")
    for n in (5, 1, 70 if FULL else 40, 190, 1, 3):
        q, k, v = tokens(rng, dtype, (2, 4, n, 17), (2, 2, n, 17), (2, 2, n, 20))
        if n == 190:  # for keys enough to be split
            here.append(1, k, v, new_lengths=[n, 0])
            there.append(1, tensor(k), tensor(v), new_lengths=[n, 0])
            continue
        want, want_lse = here.attend(1, q, k, v, return_lse=True, **options)
        got, lse = there.attend(1, *(tensor(x) for x in (q, k, v)), return_lse=True, **options)
        close(got, want, dtype)
        np.testing.assert_allclose(lse.cpu(), want_lse, rtol=0, atol=2e-3 if dtype == "bfloat16" else 1e-5)
        assert there.lengths(1) == here.lengths(1) and there.lengths(0) == (0, 0)
    np.testing.assert_array_equal(plain(there.keys(1).cpu()), plain(here.keys(1)))
    np.testing.assert_array_equal(plain(there.values(1).cpu()), plain(here.values(1)))
    assert there.used_bytes == here.used_bytes or dtype == "bfloat16"  # pairs of an odd head dim take one more
    q = tokens(rng, dtype, (2, 4, 2, 17))[0]
    close(there.attend(1, tensor(q)), here.attend(1, q), dtype)


def test_float8_is_what_it_is_on_the_cpu(rng, tmp_path):
    """Codes of every kind of row, by the kernel that stores them; results; and files, both ways."""
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 40, "capacity": 60, "dtype": "fp8"}
    here, there = sl.KVCache(**sizes), sl.KVCache(**sizes, device="cuda")
    every = np.arange(256, dtype=np.uint8).view(numpy_dtype("float8_e4m3fn")).astype(np.float32)
    every = np.unique(every[np.abs(every) <= 448])
    rows = np.concatenate([np.resize(x, (7, 40)) for x in (every, (every[1:] + every[:-1]) / 2)])
    rows[:, 0] = 448  # codes themselves, and what is half way between two
    rows = np.concatenate([rows, rng.standard_normal((6, 40)).astype(np.float32)])
    rows = np.concatenate([rows, np.zeros((1, 40), np.float32), np.full((1, 40), 1e-43, np.float32)])[None, None]
    here.append(0, rows, rows)
    there.append(0, tensor(rows), tensor(rows))
    for loaded in (here, there):
        loaded.save(tmp_path / "c.safetensors")
        other = sl.KVCache.load(tmp_path / "c.safetensors", device="cpu" if loaded is there else "cuda")
        for cache in (there, other):
            assert plain(cache.keys(0)).tobytes() == plain(here.keys(0)).tobytes()
    q, k, v = tokens(rng, "float32", (1, 2, 1, 40), (1, 1, 1, 40), (1, 1, 1, 40))
    close(there.attend(0, *(tensor(x) for x in (q, k, v))), here.attend(0, q, k, v), "float8_e4m3fn")
    k[0, 0, 0, 3] = np.inf
    for cache, of in ((here, lambda x: x), (there, tensor)):
        assert np.isnan(plain(cache.attend(0, *(of(x) for x in (q, k, v))))).all()


def test_uneven_lengths_and_beams(rng):
    sizes = {"layers": 1, "batch": 3, "kv_heads": 1, "head_dim": 16, "capacity": 60}
    here, there = sl.KVCache(**sizes), sl.KVCache(**sizes, device="cuda")
    for counts in ([3, 0, 9], [1, 1, 1], [20, 2, 30], [0, 1, 0]):
        q, k, v = tokens(rng, "float32", (3, 2, max(counts), 16), (3, 1, max(counts), 16), (3, 1, max(counts), 16))
        want = here.attend(0, q, k, v, new_lengths=counts)
        close(there.attend(0, *(tensor(x) for x in (q, k, v)), new_lengths=counts), want, "float32")
    assert there.lengths(0) == (24, 4, 40)
    for cache in (there.select([2, 0, 2]), there.copy()):
        cache.truncate(3)
        assert cache.lengths(0) == (3,) * cache.batch
    beams, other = there.select([2, 0]), here.select([2, 0])
    q, k, v = tokens(rng, "float32", (2, 2, 1, 16), (2, 1, 1, 16), (2, 1, 1, 16))
    close(beams.attend(0, *(tensor(x) for x in (q, k, v))), other.attend(0, q, k, v), "float32")
    assert there.lengths(0) == (24, 4, 40) and beams.lengths(0) == (41, 25)


@pytest.mark.parametrize(
    ("dtype", "keep", "capacity"), [("int8", 0, None), *[("float32", 0, None), ("bfloat16", 5, 3000)] * FULL]
)
def test_a_window_in_constant_memory(rng, dtype, keep, capacity):
    """Many times round the ring, in steps, in chunks, in chunks that the ring has no room for; the same as on the
    CPU.
    """
    sizes = {
        "layers": 1,
        "batch": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "window": 20,
        "keep_first": keep,
        "capacity": capacity,
        "dtype": dtype,
    }
    here, there = sl.KVCache(**sizes), sl.KVCache(**sizes, device="cuda")
    for n, uneven in (
        (3, None),
        (1, None),
        (100, None),
        (300, None),
        (30, [30, 4]),
        (1, None),
        (270, [1, 270]),
        (2, None),
    ):
        heads = 2 if n < 100 else 1
        q, k, v = tokens(rng, dtype, (2, heads, n, 16), (2, 1, n, 16), (2, 1, n, 16))
        want, want_lse = here.attend(0, q, k, v, return_lse=True, new_lengths=uneven)
        got, lse = there.attend(0, *(tensor(x) for x in (q, k, v)), return_lse=True, new_lengths=uneven)
        close(got, want, dtype)
        np.testing.assert_allclose(lse.cpu(), want_lse, rtol=0, atol=2e-3 if dtype == "bfloat16" else 1e-5)
        np.testing.assert_array_equal(plain(there.keys(0).cpu()), plain(here.keys(0)))
    assert there.lengths(0) == here.lengths(0) == (438, 681) and there._storage.rows[0].k.shape[2] == there._ring.tokens
    q = tensor(tokens(rng, dtype, (2, 2, 400, 16))[0])
    with pytest.raises(sl.ArgumentError, match="the window has forgotten"):
        there.attend(0, q)
    assert there._ring == here._ring and there._ring.tokens <= 20 + 256 + keep + 2 * 127
    for cache in (here, there):
        with pytest.raises(sl.ArgumentError, match="one whose window is still there"):
            cache.truncate(200)
        cache.truncate([430, 670])
    beams, others = there.select([1]), here.select([1])
    q, k, v = tokens(rng, dtype, (1, 2, 1, 16), (1, 1, 1, 16), (1, 1, 1, 16))
    close(beams.attend(0, *(tensor(x) for x in (q, k, v))), others.attend(0, q, k, v), dtype)


def test_a_failed_piece_leaves_the_window(rng, monkeypatch):
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=16, window=20, device="cuda")
    x = [tensor(y) for y in tokens(rng, "float32", (1, 1, 600, 16), (1, 1, 600, 16), (1, 1, 600, 16))]
    cache.attend(0, *(y[:, :, :50] for y in x))
    before, calls, real = cache.keys(0), [], sl.gpu.storage.run

    def fail(*a, **o):
        calls.append(1)
        if len(calls) == 3:
            raise sl.CompileError("no")
        return real(*a, **o)

    monkeypatch.setattr("speedlight.gpu.storage.run", fail)
    with pytest.raises(sl.CompileError):
        cache.attend(0, *x)
    assert len(calls) == 3 and cache.length(0) == 50 and same([before], [cache.keys(0)])


@pytest.mark.parametrize("n", [17, 40])
def test_a_failing_call_takes_nothing_from_a_ring(rng, n, monkeypatch):
    """New tokens of a ring are written over old ones, to which truncate() could still go back."""
    here, cache = (
        sl.KVCache(layers=1, kv_heads=1, head_dim=16, window=20, **more) for more in ({}, {"device": "cuda"})
    )
    x = tokens(rng, "float32", (1, 1, 600, 16), (1, 1, 600, 16), (1, 1, 600, 16))
    cache.append(0, *(tensor(y) for y in x[1:]))
    first = 600 - cache._ring.size + SPARE + 19
    here.append(0, *(y[:, :, :first] for y in x[1:]))

    def fail(*_, **__):
        raise sl.CompileError("no")

    with monkeypatch.context() as patch:
        patch.setattr("speedlight.gpu.storage.run", fail)
        with pytest.raises(sl.CompileError):
            cache.attend(0, *(tensor(y[:, :, :n]) for y in x))
    with pytest.raises(sl.ArgumentError, match="one whose window is still there"):
        cache.truncate(first - 1)
    cache.truncate(first)
    one = [y[:, :, first : first + 1] for y in x]
    close(cache.attend(0, *(tensor(y) for y in one)), here.attend(0, *one), "float32")


def test_a_kept_expression_is_run_at_any_position(rng):
    """Where its integers are beyond 32 bits, and where its indices are beyond a table: not only at those of the first
    call.
    """
    x = tokens(rng, "float32", (1, 1, 16, 16), (1, 1, 16, 16), (1, 1, 16, 16))
    beyond = sl.expression(lambda b, h, i, j: (16 - i) * 400_000_000 * (j % 2) > 0)
    ids = sl.table(np.zeros(16, np.int64), "ids")
    outside = sl.expression(lambda b, h, i, j: ids[3 * (15 - i)] == 0)
    here, there = (
        sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=16, **more) for more in ({}, {"device": "cuda"})
    )
    for first in (15, 9):
        for cache, of in ((here, np.asarray), (there, tensor)):
            cache.clear()
            cache.append(0, *(of(y[:, :, :first]) for y in x[1:]))
        one = [y[:, :, first : first + 1] for y in x]
        want = here.attend(0, *one, mask=beyond)
        close(there.attend(0, *(tensor(y) for y in one), mask=beyond), want, "float32")
        there.truncate(first)
        if first == 15:
            there.attend(0, *(tensor(y) for y in one), mask=outside)
        else:
            with pytest.raises(sl.Error, match="ids"):
                there.attend(0, *(tensor(y) for y in one), mask=outside)
            assert there.length(0) == first


@needs_places
@pytest.mark.parametrize("window", [20, None] if FULL else [20])
@pytest.mark.parametrize("method", ["append", "truncate", "attend"])
def test_an_interrupt_anywhere_leaves_a_cache_as_it_was(rng, method, window):
    """At every place of the functions of the cache and its storage."""
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=600, window=window, device="cuda")
    q, k, v = (tensor(x) for x in tokens(rng, "float32", (1, 1, 280, 16), (1, 1, 280, 16), (1, 1, 280, 16)))
    cache.append(0, k, v)
    q, k, v = (x[:, :, :18].clone() for x in (q, k, v))
    call = {
        "append": lambda cache: cache.append(0, k, v),
        "truncate": lambda cache: cache.truncate(275),
        "attend": lambda cache: cache.attend(0, q, k, v),
    }[method]

    def state():
        cache.append(0, k[:, :, :0], v[:, :, :0])  # nobody is busy
        return [cache.keys(0), cache.values(0)], [cache.length(0), cache._storage.device_lengths.tolist(), cache._held]

    before, probe = state(), cache.copy()
    found = places(lambda: call(probe), OWN)
    assert len(found) > 5
    for n in spread(found, 1000 if FULL else 3):
        assert interrupted(lambda: call(cache), n, OWN)
        parts, lengths = state()
        assert lengths == before[1] and same(parts, before[0]), n
    call(cache)
    assert cache.length(0) == (275 if method == "truncate" else 298)


def test_a_full_cache_is_an_error_and_stays_as_it_was(rng):
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=10, device="cuda")
    q, k, v = (tensor(x) for x in tokens(rng, "float32", (1, 1, 10, 16), (1, 1, 10, 16), (1, 1, 10, 16)))
    cache.append(0, k[:, :, :7], v[:, :, :7])
    before = cache.keys(0)
    with pytest.raises(sl.CacheFull, match="4 tokens need room, 3 of 10 are free") as error:
        cache.append(0, k[:, :, :4], v[:, :, :4])
    assert (error.value.needed, error.value.free) == (4, 3)
    assert same([before], [cache.keys(0)]) and cache.length(0) == 7
    # what a graph's replay does: the host's lengths are not asked
    cache._held = [([0], [0])]
    storage = cache._storage
    storage.captured = True
    to = Destination(storage.device_lengths[0], 10, storage.arrived[0])
    launch.start(storage.rows[0].put(Tokens(k, v, k.stride(), v.stride(), 4), to, storage.status))
    with pytest.raises(sl.CacheFull, match=r"found no room: 3 of 10"):
        cache.length(0)
    assert cache.length(0) == 7 and same([before], [cache.keys(0)])
    cache.attend(0, q[:, :, :3], k[:, :, :3], v[:, :, :3])
    assert cache.length(0) == 10


def test_a_failed_call_leaves_the_lengths(rng, monkeypatch):
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=10, device="cuda")
    q, k, v = (tensor(x) for x in tokens(rng, "float32", (1, 1, 2, 16), (1, 1, 2, 16), (1, 1, 2, 16)))
    cache.attend(0, q, k, v)

    def fail(*_, **__):
        raise sl.CompileError("no")

    monkeypatch.setattr("speedlight.gpu.storage.run", fail)
    with pytest.raises(sl.CompileError):
        cache.attend(0, q, k, v)
    assert cache.length(0) == 2 and cache._storage.device_lengths.tolist() == [[2]]


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("window: expected a size from 1", {"window": 0}),
        ("keep_first: expected 0 without a window", {"keep_first": 3}),
        ("capacity: expected", {"capacity": None}),
        ("dtype: expected float32, float16, bfloat16, int8 or float8_e4m3fn on a GPU", {"dtype": "float64"}),
        ("device: expected 'cpu', 'cuda'", {"device": "tpu"}),
        ("head_dim: expected a size", {"head_dim": 0}),
    ],
)
def test_wrong_sizes(message, change):
    with pytest.raises(sl.Error, match=message):
        sl.KVCache(**({"layers": 1, "kv_heads": 1, "head_dim": 16, "capacity": 10, "device": "cuda"} | change))


def test_devices_by_torch():
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 16}
    assert sl.KVCache(**sizes, capacity=10, device=torch.device("cpu")).keys(0).shape == (1, 1, 0, 16)
    assert sl.PagePool(**sizes, pages=2, page_size=16, device=torch.device("cpu")).free_pages == 2
    cache = sl.KVCache(**sizes, capacity=10, device=torch.device("cuda"))
    assert type(cache) is type(cache.copy()) is sl.KVCache and "device='" in repr(cache)


@pytest.mark.parametrize("name", ["CacheStorage", "PoolStorage"])
def test_both_engines_keep_tokens_by_the_same_methods(name):
    """kv/ knows no other difference than which of the two it made."""
    methods = []
    for kind in (getattr(cpu_storage, name), getattr(gpu_storage, name)):
        public = {n: getattr(kind, n) for n in vars(kind) if n[0] != "_" and callable(getattr(kind, n))}
        methods.append({n: [x for x in inspect.signature(f).parameters if x != "self"] for n, f in public.items()})
    assert methods[0] == methods[1] and {"received", "query", "put", "tokens", "attend"} <= set(methods[0])


SAVED = [
    *((x, 40, {"capacity": 900}) for x in (KINDS if FULL else KINDS[2:3])),
    *((x, 420, {"window": 20}) for x in (KINDS if FULL else ("int8",))),
    *((x, 700, {"window": 70, "keep_first": 5, "capacity": 3000}) for x in (KINDS if FULL else ())),
]


@pytest.mark.parametrize(("dtype", "n", "kind"), SAVED)
def test_a_cache_saved_on_one_device_loads_on_the_other(rng, tmp_path, dtype, n, kind):
    """With all that a window has not forgotten, to which truncate() may go back; and files of both are the same."""
    pytest.importorskip("safetensors")
    sizes = {"layers": 2, "batch": 2, "kv_heads": 1, "head_dim": 16, "value_dim": 20, "dtype": dtype} | kind
    _, k, v = tokens(rng, dtype, (2, 2, n, 16), (2, 1, n, 16), (2, 1, n, 20))
    paths = {device: tmp_path / f"{device}.safetensors" for device in ("cpu", "cuda")}
    for device, path in paths.items():
        cache, of = sl.KVCache(**sizes, device=device), np.asarray if device == "cpu" else tensor
        for layer in (0, 1):
            cache.append(layer, of(k), of(v), new_lengths=[n, 7])
        cache.truncate([n - 10, 7])
        cache.append(1, of(k[:, :, :3]), of(v[:, :, :3]))
        cache.save(path)
    ours, theirs = (read_arrays([path]) for path in paths.values())
    assert {n: x.tobytes() for n, x in ours.items()} == {n: x.tobytes() for n, x in theirs.items()}
    assert read_metadata(paths["cpu"]) == read_metadata(paths["cuda"])
    here, there = sl.KVCache.load(paths["cuda"]), sl.KVCache.load(paths["cpu"], device="cuda")
    for cut in (None, [n - 20, 5]):
        if cut is not None:
            there.truncate(cut)
            here.truncate(cut)
        for layer in (0, 1):
            assert here.lengths(layer) == there.lengths(layer)
            np.testing.assert_array_equal(plain(there.keys(layer).cpu()), plain(here.keys(layer)))
            new = tokens(rng, dtype, (2, 2, 1, 16), (2, 1, 1, 16), (2, 1, 1, 20))
            close(there.attend(layer, *(tensor(x) for x in new)), here.attend(layer, *new), dtype)


def test_a_file_that_a_device_cannot_load(tmp_path):
    path = tmp_path / "c.safetensors"
    sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=10, dtype="float64").save(path)
    with pytest.raises(sl.UnsupportedError, match="dtype: expected"):
        sl.KVCache.load(path, device="cuda")
    with pytest.raises(sl.ArgumentError, match="device: expected"):
        sl.KVCache.load(path, device="tpu")


def test_wrong_tokens(rng):
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=10, device="cuda")
    x = tensor(np.zeros((1, 1, 2, 16), np.float32))
    for message, call in (
        ("k: expected shape", lambda: cache.append(0, x[..., :8], x)),
        ("v: expected 2 tokens", lambda: cache.append(0, x, x[:, :, :1])),
        ("k: expected dtype float32", lambda: cache.append(0, x.half(), x)),
        ("layer: expected 0 to 0", lambda: cache.append(1, x, x)),
        ("q: expected 2 tokens", lambda: cache.attend(0, x[:, :, :1], x, x)),
        ("k: expected k and v together", lambda: cache.attend(0, x, None, x)),
        ("length: expected 0 to 0", lambda: cache.truncate(1)),
        ("expected a name that ends in .safetensors", lambda: cache.save("x.npz")),
    ):
        with pytest.raises(sl.Error, match=message):
            call()
    assert cache.length(0) == 0


def test_arguments_of_any_type(rng):
    """A speedlight error, or an answer."""
    x = tensor(np.zeros((1, 1, 1, 16), np.float32))
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=10, device="cuda")
    cache.append(0, x, x)
    step = {"layer": 0, "q": x, "k": x, "v": x, "new_lengths": None, "q_lengths": None, "return_lse": False}
    step["out"] = None
    calls = [
        ("attend", step),
        ("append", {n: step[n] for n in ("layer", "k", "v", "new_lengths")}),
        ("truncate", {"length": 1}),
        ("keep", {"indices": [0], "start": 0}),
    ]
    calls += [
        ("select", {"batch_indices": [0]}),
        ("lengths", {"layer": 0}),
        ("length", {"layer": 0, "item": 0}),
        ("save", {"path": "x"}),
    ]
    for method, usual in calls:
        for name in usual:
            for wrong in WRONG:
                with contextlib.suppress(sl.Error):
                    getattr(cache, method)(**(usual | {name: wrong}))
                    cache.clear()
                    cache.append(0, x, x)
                assert cache.length(0) == 1 and not cache._claims


# --- pages


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
    rng.shuffle(there._free)
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


def test_a_pool_has_the_bits_of_one_sequence_alone(rng):
    """Whatever is packed beside it, and wherever its pages are."""
    q, k, v = tokens(rng, "bfloat16", (300, 4, 16), (300, 1, 16), (300, 1, 16))
    answers = []
    for beside in ([], [1], [40, 3]):
        pool = sl.PagePool(layers=1, pages=60, page_size=16, kv_heads=1, head_dim=16, dtype="bfloat16", device="cuda")
        rng.shuffle(pool._free)
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
        assert there.lengths(1) == here.lengths(1) == (74, 71) == tuple(there._storage.device_lengths[1].tolist())
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
        return held, cache.lengths(0), a.length(), pool.free_pages, cache._storage.device_lengths.tolist()

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
            self.cache.lengths(0) == tuple(map(len, self.held)) == tuple(self.cache._storage.device_lengths[0].tolist())
        )
        keys = self.cache.keys(0).cpu().numpy()
        for i, h in enumerate(self.held):
            assert (keys[i, 0, : len(h)] == h).all() and not keys[i, 0, len(h) :].any()
        for sequence, held in self.sequences:
            assert (sequence.keys(0).cpu().numpy()[0] == held).all()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100 if FULL else 10, stateful_step_count=20, deadline=None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph wants a GPU")
def test_a_step_in_a_cuda_graph(rng):
    """One captured step, replayed: the lengths move on the device, and too many steps are told at the next look."""
    sizes = {"layers": 1, "kv_heads": 2, "head_dim": 64, "capacity": 300, "dtype": "bfloat16"}
    here, cache = sl.KVCache(**sizes), sl.KVCache(**sizes, device="cuda")
    x = [torch.zeros(1, n, 1, 64, dtype=torch.bfloat16, device="cuda") for n in (8, 2, 2)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cache.attend(0, *x)
    torch.cuda.current_stream().wait_stream(side)
    cache.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.attend(0, *x)
    for n in range(300):
        step = tokens(rng, "bfloat16", (1, 8, 1, 64), (1, 2, 1, 64), (1, 2, 1, 64))
        for to, new in zip(x, step, strict=True):
            to.copy_(tensor(new))
        graph.replay()
        want = here.attend(0, *step)
        if n % 37 == 0:
            close(out, want, "bfloat16")
    assert cache.length(0) == 300
    graph.replay()
    with pytest.raises(sl.CacheFull):
        cache.length(0)
    assert cache.length(0) == 300 and launch.capturing() is False
