"""Key-value caches: the bits of one call over everything, whatever was done in between; nothing lost when a call fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import FULL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from problems import DTYPES, numpy_dtype, qkv

import speedlight as sl


def made(dtype, d=16, dv=16, **sizes):
    return sl.KVCache(
        **({"layers": 1, "batch": 1, "kv_heads": 2, "head_dim": d, "value_dim": dv, "capacity": 1300, "dtype": dtype} | sizes)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (33, 40), (16, 5)])
@pytest.mark.parametrize(
    "options", [{}, {"sink_logits": [0.5, -1, 2, 0]}, {"mask": sl.window(200, 0) | sl.prefix(3)}, {"score": sl.softcap(2.0)}]
)
def test_any_chunks_have_the_bits_of_one_call(isa, rng, dtype, d, dv, options):
    q, k, v = qkv(rng, dtype, 1, 4, 2, 1300, 1300, d, dv)
    want, lse = sl.attention(q, k, v, causal=True, return_lse=True, **options)
    for chunks in ([1300], [1, 1, 126, 1, 3, 700, 1, 16, 200, 251], [1299, 1]):
        cache, at = made(dtype, d, dv), 0
        for n in chunks:
            here = slice(at, at + n)
            out, some = cache.attend(0, q[:, :, here], k[:, :, here], v[:, :, here], return_lse=True, **options)
            assert out.tobytes() == want[:, :, here].tobytes() and some.tobytes() == lse[:, :, here].tobytes(), f"{n} tokens at {at}"
            at += n
        assert cache.length(0) == 1300


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_decode_kernel_has_the_forward_kernels_bits(isa, rng, dtype, monkeypatch):
    """Every width, length, group and thread count, with special values in keys and values."""
    from speedlight import api, planning

    for case in range(200 if FULL else 30):
        batch, kv_heads, group, n = (int(rng.integers(1, m)) for m in (3, 4, 6, 4))
        length = int(rng.choice([0, 1, 2, 15, 16, 17, 127, 128, 129, 300, 1023, 1024, 1025, 2500]))
        d, dv = int(rng.choice([1, 3, 16, 33, 64, 80, 128])), int(rng.choice([16, 17, 31, 64, 80, 128]))
        q, k, v = qkv(rng, dtype, batch, kv_heads * group, kv_heads, n, length, d, dv, float(rng.choice([0.1, 1, 30])))
        if case % 3 == 0 and length > 2:
            for x in (k, v):
                x[rng.random(x.shape) < 0.5 / length] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0])
        options = {"causal": bool(case % 2), "scale": [None, -0.3, 0.0][int(rng.integers(3))], "return_lse": True}
        options |= {"sink_logits": rng.standard_normal(kv_heads * group)} if case % 5 == 0 else {}
        results = []
        for rows, threads in ((0, 1), (64, 1), (64, 2)):
            monkeypatch.setattr(planning, "DECODE_ROWS", rows)
            api._prepared.clear()
            sl.set_threads(threads)
            results.append(sl.attention(q, k, v, **options))
            kernel = sl.plan(q, k, v, causal=options["causal"]).kernel
            assert length == 0 or kernel.startswith("decode" if rows else "forward")
        (want, lse), *others = results
        for out, other in others:
            nan = np.isnan(want)
            assert (np.isnan(out) == nan).all() and (np.isnan(other) == np.isnan(lse)).all()
            assert out[~nan].tobytes() == want[~nan].tobytes() and other[~np.isnan(lse)].tobytes() == lse[~np.isnan(lse)].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
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
        (lambda c, q, k, v: c.attend(0, q, k[:, :1], v), r"k: expected shape \(1, 2, n_new, 16\)"),
        (lambda c, q, k, v: c.attend(0, q, k.astype(np.float64), v), "k: expected dtype float32, as the cache has; got float64"),
        (lambda c, q, k, v: c.attend(0, q.astype(np.float64), k, v), "expected dtype"),
        (lambda c, q, k, v: c.attend(0, q[:, :3], k, v), "kv heads that divides"),
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


def test_one_appender_at_a_time(rng):
    q, k, v = qkv(rng, "float32", 1, 4, 2, 300, 300, 16, 16)
    cache = made("float32", layers=2)
    cache.append(1, k, v)
    with cache._writing(0):
        with pytest.raises(sl.CacheBusy, match="layer 0: another thread"):
            cache.append(0, k, v)
        with pytest.raises(sl.CacheBusy):
            cache.clear()
        cache.attend(1, q)  # another layer, and reading, go on
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
        try:
            back = sl.KVCache.load(path)
            assert back.length(0) <= back.capacity
        except sl.FileError as error:
            refused += 1
            assert "c.safetensors" in str(error)
    assert refused > 100
    with pytest.raises(sl.FileError, match="No such file"):
        sl.KVCache.load(tmp_path / "none.safetensors")


def test_merge(rng):
    q, k, v = qkv(rng, "float32", 1, 4, 2, 9, 300, 16, 16)
    want, lse = sl.attention(q, k, v, return_lse=True)
    for cut in (0, 1, 120, 300):
        parts = [sl.attention(q, k[:, :, at], v[:, :, at], return_lse=True) for at in (slice(cut), slice(cut, None))]
        out, merged = sl.merge(*parts[0], *parts[1])
        assert out.dtype == merged.dtype == np.float32
        np.testing.assert_allclose(out, want, atol=2e-6)
        np.testing.assert_allclose(merged, lse, atol=2e-6)
    nothing = np.zeros_like(want), np.full_like(lse, -np.inf)
    out, merged = sl.merge(*nothing, *nothing)
    assert not out.any() and (merged == -np.inf).all()
    poisoned = np.full_like(want, np.nan), nothing[1]
    assert np.isfinite(sl.merge(*poisoned, want, lse)[0]).all()
    with pytest.raises(sl.ArgumentError, match="lse2: expected shape"):
        sl.merge(want, lse, want, lse[:, :1])


class Machine(RuleBasedStateMachine):
    """Any order of calls, against arrays that are simply concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.dtype = "float32"
        self.cache = sl.KVCache(layers=2, batch=2, kv_heads=2, head_dim=16, value_dim=17, capacity=150)
        self.model = [[(np.zeros((2, 0, 16), np.float32), np.zeros((2, 0, 17), np.float32)) for _ in range(2)] for _ in range(2)]

    def chunk(self, n: int) -> list[np.ndarray]:
        return qkv(self.rng, self.dtype, 2, 4, 2, n, n, 16, 17)

    @rule(
        layer=st.integers(0, 1),
        n=st.integers(0, 40),
        counts=st.none() | st.tuples(st.integers(0, 40), st.integers(0, 40)),
        attend=st.booleans(),
    )
    def grow(self, layer, n, counts, attend):
        q, k, v = self.chunk(n)
        counts = None if counts is None else [min(c, n) for c in counts]
        each = counts or [n, n]
        fits = all(self.model[layer][b][0].shape[1] + c <= 150 for b, c in enumerate(each))
        try:
            out = self.cache.attend(layer, q, k, v, new_lengths=counts) if attend else self.cache.append(layer, k, v, new_lengths=counts)
        except sl.CacheFull:
            assert not fits
            return
        assert fits
        for b, c in enumerate(each):
            keys, values = self.model[layer][b]
            keys, values = np.concatenate([keys, k[b, :, :c]], axis=1), np.concatenate([values, v[b, :, :c]], axis=1)
            self.model[layer][b] = keys, values
            if attend:
                want = sl.attention(q[b : b + 1, :, :c], keys[None], values[None], causal=True)
                assert out[b : b + 1, :, :c].tobytes() == want.tobytes()

    @rule(share=st.floats(0, 1))
    def truncate(self, share):
        lengths = [int(share * min(self.model[layer][b][0].shape[1] for layer in range(2))) for b in range(2)]
        self.cache.truncate(lengths)
        for layer in range(2):
            for b, n in enumerate(lengths):
                self.model[layer][b] = tuple(x[:, :n] for x in self.model[layer][b])

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
                    want = self.model[layer][b][which]
                    n = want.shape[1]
                    assert stored[b, :, :n].tobytes() == want.tobytes() and not stored[b, :, n:].any()


Machine.TestCase.settings = settings(max_examples=300 if FULL else 25, stateful_step_count=50 if FULL else 20, deadline=None)
TestMachine = Machine.TestCase


def test_numpy_dtypes_are_understood():
    for name in DTYPES:
        assert made(numpy_dtype(name)).dtype == name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_example_says_the_same_whatever_the_chunks_and_threads(dtype):
    path = Path(__file__).parent.parent / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    model, texts = generate.Model(3, dtype), set()
    for chunk, threads in ((1, 1), (5, 2), (16, 1), (100, 2)):
        sl.set_threads(threads)
        texts.add("".join(generate.generate(model, "The attention of a stranger, in turn", 30, chunk)))
    (text,) = texts
    assert len(text) == 30 and len(set(text)) > 5


def test_the_example_as_a_person_runs_it():
    path = Path(__file__).parent.parent / "examples" / "generate.py"
    run = [sys.executable, str(path), "--tokens", "20", "--prompt"]
    done = subprocess.run([*run, "a stranger"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("a stranger") and "tokens/s" in done.stderr
    wrong = subprocess.run([*run, "Zürich"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and "--prompt: no token for" in wrong.stderr
