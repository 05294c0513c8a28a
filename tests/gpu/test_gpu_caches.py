"""Caches on a GPU: the same answers as on the CPU, the same errors; in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from anything import check_any_type, of_caches
from conftest import FULL
from injection import interrupted, needs_places, places, spread
from on_gpu import same, tensor
from on_gpu_caches import DROPOUT, KINDS, OPTIONS, OWN, close, tokens
from problems import numpy_dtype
from tolerance import plain

import speedlight as sl
from speedlight import engines
from speedlight.arrays.files import read_arrays, read_metadata
from speedlight.cpu.engine import storage as cpu_storage
from speedlight.gpu import launch
from speedlight.gpu import storage as gpu_storage
from speedlight.gpu.rows import Destination, Tokens
from speedlight.problem.engine import Engine
from speedlight.problem.storage import Storage
from speedlight.problem.windows import SPARE


@pytest.mark.parametrize(
    ("dtype", "options"),
    [*((x, {}) for x in (KINDS if FULL else ())), *zip(KINDS[1:4], (*OPTIONS[1:3], OPTIONS[3] | DROPOUT), strict=True)],
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
    # pairs of an odd head dim take one more there, of each of two heads
    one_more = {"float32": 0, "float16": 0, "bfloat16": 2}.get(dtype, 1)
    assert here.used_bytes == there.used_bytes + sum(here.lengths(1)) * 2 * one_more
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


def test_codes_of_no_format_that_kernels_know_are_refused(rng):
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=4, dtype="int8", device="cuda")
    rows = cache._storage.rows[0]
    rows.k, rows.v = rows.k.short(), rows.v.short()
    with pytest.raises(Exception, match="no rounding here"):
        cache.append(0, *(tensor(x) for x in tokens(rng, "float32", (1, 1, 1, 16), (1, 1, 1, 16))))


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
    before, calls, real = cache.keys(0), [], sl.gpu.storage.prepare

    def fail(*a, **o):
        calls.append(1)
        if len(calls) == 3:
            raise sl.CompileError("no")
        return real(*a, **o)

    monkeypatch.setattr("speedlight.gpu.storage.prepare", fail)
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
        patch.setattr("speedlight.gpu.storage.prepare", fail)
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
        return [cache.keys(0), cache.values(0)], [cache.length(0), cache._storage.lengths.tensor.tolist(), cache._held]

    before, probe = state(), cache.copy()
    found = places(lambda: call(probe), OWN)
    assert len(found) > 5
    for n in spread(found, 1000 if FULL else 2):
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
    there = storage.lengths
    there.captured = True
    to = Destination(there.tensor[0], 10, there.arrived[0])
    launch.start(storage.rows[0].put(Tokens(k, v, k.stride(), v.stride(), 4), to, there.status))
    with pytest.raises(sl.CacheFull, match=r"found no room: 3 of 10"):
        cache.length(0)
    assert cache.length(0) == 7 and same([before], [cache.keys(0)])
    cache.attend(0, q[:, :, :3], k[:, :, :3], v[:, :, :3])
    assert cache.length(0) == 10


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
    """kv/ knows no other difference than what they say that they can do."""
    methods = []
    # of steps that are prepared, of a ring's first chunk and of large pages: those of the CPU's, which it says it has
    own = {
        "find_step",
        "repeat_step",
        "step",
        "remember",
        "remember_put",
        "learn_step",
        "attend_new",
        "expect",
        "together",
    }
    for kind in (getattr(cpu_storage, name), getattr(gpu_storage, name)):
        assert issubclass(kind, Storage) and not inspect.isabstract(kind)
        public = {n: f for n, f in inspect.getmembers(kind, inspect.isfunction) if n[0] != "_" and n not in own}
        methods.append({n: [x for x in inspect.signature(f).parameters if x != "self"] for n, f in public.items()})
        assert {n for n in own if hasattr(kind, n)} <= (own if kind.prepares_steps else set())
    assert methods[0] == methods[1] and {"received", "query", "put", "tokens", "attend", "move"} <= set(methods[0])


def test_both_engines_are_one():
    """The callers of engines.of() know no other difference than where arrays lie."""
    for kind in (type(engines.of("cpu")), type(engines.of("cuda"))):
        assert issubclass(kind, Engine)
        for n in Engine.__abstractmethods__:
            ours, base = (list(inspect.signature(getattr(x, n)).parameters) for x in (kind, Engine))
            assert ours == base, n


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_sequences_saved_on_one_device_load_on_the_other(rng, tmp_path, dtype):
    """A prompt, a fork that shares its pages, and one of its own; files of both devices are the same."""
    pytest.importorskip("safetensors")
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 16, "value_dim": 20, "dtype": dtype, "pages": 12, "page_size": 16}
    k, v = tokens(rng, dtype, (50, 2, 16), (50, 2, 20))
    made = {}
    for device in ("cpu", "cuda"):
        pool, of = sl.PagePool(**sizes, device=device), np.asarray if device == "cpu" else tensor
        prompt, alone = pool.sequence(), pool.sequence()
        for layer in (0, 1):
            pool.append(layer, [prompt], of(k[:40]), of(v[:40]), tokens=range(40))
        both = [prompt.fork(), alone]
        pool.append(0, both, of(k[40:]), of(v[40:]), new_lengths=[3, 7])
        made[device] = pool, [prompt, *both], tmp_path / f"{device}.safetensors"
        pool.save(made[device][2], made[device][1])
    ours, theirs = (read_arrays([path]) for *_, path in made.values())
    assert {n: x.tobytes() for n, x in ours.items()} == {n: x.tobytes() for n, x in theirs.items()}
    for (pool, sequences, _), (*_, path) in zip(made.values(), [*made.values()][::-1], strict=True):
        pool.forget()
        loaded = pool.load(path)
        assert [x.tokens for x in loaded] == [[*range(40)], [], []] and pool.free_pages == 12 - 2 * 5
        assert pool.sequence(tokens=range(40)).pages == loaded[0].pages[:2]
        assert [x.length(n) for x in loaded for n in (0, 1)] == [40, 40, 43, 40, 7, 0]
        for mine, other in zip(sequences, loaded, strict=True):
            for layer in (0, 1):
                np.testing.assert_array_equal(plain(other.keys(layer)), plain(mine.keys(layer)))
                np.testing.assert_array_equal(plain(other.values(layer)), plain(mine.values(layer)))


def test_a_file_that_a_device_cannot_load(tmp_path):
    path = tmp_path / "c.safetensors"
    sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=10, dtype="float64").save(path)
    with pytest.raises(sl.UnsupportedError, match="dtype: expected"):
        sl.KVCache.load(path, device="cuda")
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 16, "value_dim": 8, "latent": True}
    sl.KVCache(**sizes, capacity=10).save(path)
    for made in (
        lambda: sl.KVCache.load(path, device="cuda"),
        lambda: sl.KVCache(**sizes, capacity=10, device="cuda"),
        lambda: sl.PagePool(**sizes, pages=2, page_size=16, device="cuda"),
    ):
        with pytest.raises(sl.UnsupportedError, match='latent: expected False on a GPU.*device="cpu"'):
            made()
    pages, x = (tensor(np.zeros(shape, np.float32)) for shape in ((2, 16, 1, 16), (1, 1, 2, 16)))
    with pytest.raises(sl.UnsupportedError, match="v_pages: expected pages of values on a GPU.*on the CPU"):
        sl.append_paged(pages, None, [[0]], [0], x, engine="cuda")
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


@pytest.mark.parametrize("method", ["attend", "append", "truncate", "keep", "select", "lengths", "length", "save"])
def test_arguments_of_any_type(tmp_path, monkeypatch, method):
    monkeypatch.chdir(tmp_path)
    check_any_type(of_caches(tensor, device="cuda")[method])


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
