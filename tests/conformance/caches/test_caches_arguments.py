"""What a cache is asked for wrongly is named, and leaves it as it was."""

from __future__ import annotations

import numpy as np
import pytest
from caches import made
from problems import DTYPES, numpy_dtype, qkv

import speedlight as sl

pytestmark = pytest.mark.usefixtures("one_width")  # how caches lie is seen at any width of panels


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
        (lambda c, q, k, v: c.truncate(6), "length: expected 0 to 5, the tokens of sequence 0"),
        (lambda c, q, k, v: c.select([1]), "batch_indices: expected 0 to 0; got 1"),
        (lambda c, q, k, v: c.select([0.0]), "batch_indices: expected an int; got float"),
        (lambda c, q, k, v: c.length(0, 1), "item: expected 0 to 0; got 1"),
        (lambda c, q, k, v: c.select([]), "batch_indices: expected at least one"),
        (lambda c, q, k, v: sl.KVCache(layers=0, kv_heads=1, head_dim=1, capacity=1), "layers: expected a size"),
        (lambda c, q, k, v: sl.KVCache(layers=1, kv_heads=1, head_dim=1, capacity=1, dtype="int5"), "dtype: expected"),
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


def test_float8_by_its_names():
    import ml_dtypes
    import torch

    for name in ("fp8", "fp8_e4m3", "float8_e4m3", "float8_e4m3fn", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn):
        assert made(name).dtype == "float8_e4m3fn"
    for theirs, way in (
        ("fp16", "Write 'float16'"),
        ("e4m3", "Write 'fp8'"),
        ("fp8_e5m2", "two bits of fraction"),
        ("q8_0", "Write 'int8'"),
        ("u8", "Write 'int8'"),
        ("nf4", "Write 'int4'"),
    ):
        with pytest.raises(sl.ArgumentTypeError, match=way):
            made(theirs)
    for other in (torch.float8_e5m2, torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3, "e4m3"):
        with pytest.raises(sl.ArgumentTypeError, match="bfloat16, int8, float8_e4m3fn \\('fp8'\\) or int4; got"):
            made(other)


def test_other_libraries_options_of_quantised_caches_are_known():
    x, sizes = np.ones((1, 2, 3, 8), np.float32), {"layers": 1, "kv_heads": 2, "head_dim": 8, "capacity": 8}
    both = r"KVCache\(dtype='int8'.*attention_paged\(k_scales=, v_scales=\)"
    for theirs in ("kv_cache_dtype", "k_scale", "k_scales", "v_descale"):
        with pytest.raises(sl.ArgumentTypeError, match=both):
            sl.attention(x, x, x, **{theirs: 1.0})
    for theirs, way in (
        ("kv_bits", "Use dtype='int8', 'fp8' or 'int4'"),
        ("type_k", "Use dtype='int8'"),
        ("q_group_size", "Leave it out: a scale is for a token and head"),
        ("residual_length", "Leave it out: every token is stored as codes"),
        ("k_scales", "Leave it out: a cache of codes finds scales itself"),
    ):
        with pytest.raises(sl.ArgumentTypeError, match=f"^{theirs}: .*{way}"):
            sl.KVCache(**sizes, **{theirs: 8})
    with pytest.raises(sl.ArgumentTypeError, match=r"Codes of your own are pages: attention_paged\(k_scales="):
        sl.KVCache(**sizes, dtype="int8").append(0, x.astype(np.int8), x.astype(np.int8))


def test_memory_that_cannot_be_reserved_is_an_error_of_ours():
    for name, head_dim in (("capacity", 1 << 40), ("window", 8)):
        with pytest.raises(sl.ReservationError, match=rf"^{name}: .* Reduce the {name}, layers or dtype"):
            sl.KVCache(layers=1, kv_heads=1, head_dim=head_dim, **{name: 1 << 46})
    with pytest.raises(sl.ReservationError, match="^pages: .* Reduce the pages"):
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
