"""The GPU engine (R27): what is its own beside what test_attention.py tells of every engine; in Triton's
interpreter, or on a GPU.

Blocks are made small where what is tested is how they join.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import FULL
from on_gpu import DEVICE, DTYPES, attention, check, same, small_blocks, tensor
from problems import numpy_dtype, qkv
from states import CASES as MERGED
from tolerance import assert_within, plain

import speedlight as sl
from speedlight import reference
from speedlight.arrays.array import describe
from speedlight.arrays.memory import pages
from speedlight.gpu import launch, merging, schedule, tiles, uploads
from speedlight.gpu.keys import arrays_of
from speedlight.gpu.prepare import prepare
from speedlight.gpu.sequence import FLAG
from speedlight.gpu.tiles import Tile
from speedlight.problem.build import from_arrays
from speedlight.problem.options import Options

# --- accuracy


def test_a_tile_may_be_given(rng):
    arrays = q, k, v = qkv(rng, "float32", 1, 2, 1, 40, 70, 16, 16)
    given = [describe(tensor(x), name, gpu=True) for x, name in zip(arrays, "qkv", strict=True)]
    problem, keys, out = (
        from_arrays(*given, Options(causal=True)).problem,
        arrays_of(tensor(k), tensor(v), "bhld"),
        torch.zeros_like(tensor(q)),
    )
    prepare(problem, "bhld", str(out.device), keys, tile=Tile(32, 16, 4, 1)).run(tensor(q), keys, out, None)
    bound = sl.reference.error_bound(q, k, v, causal=True, tile=16)
    assert_within(out.cpu(), sl.reference.attention(q, k, v, causal=True), bound.out)


@pytest.mark.parametrize("precision", ["tf32x3", "tf32"])
def test_float32_products_by_tensor_cores(rng, precision):
    q, k, v = qkv(rng, "float32", 1, 2, 1, 40, 70, 24, 20)
    out = attention(q, k, v, causal=True, precision=precision)
    bound = sl.reference.error_bound(q, k, v, causal=True, tile=32, precision=precision)
    assert_within(out.cpu(), sl.reference.attention(q, k, v, causal=True), bound.out)


@pytest.mark.parametrize("rows", [2, 20])
def test_without_a_batch(rng, rows):
    with small_blocks():
        q, k, v = qkv(rng, "float32", 1, 2, 1, rows, 40, 16, 20)
        whole = attention(q, k, v, causal=True, return_lse=True)
        alone = attention(q[0], k[0], v[0], causal=True, layout="hld", return_lse=True)
        assert same([x[0] for x in whole], alone)


@pytest.mark.parametrize("rows", [2, 20])
def test_shared_keys(rng, rows):
    with small_blocks():
        q, k, v = qkv(rng, "float32", 2, 2, 1, rows, 40, 16, 20)
        for layout in ("bhld", "blhd"):
            arrays = [x if layout == "bhld" else x.swapaxes(1, 2) for x in (q, k[:1], v[:1])]
            got = attention(*arrays, k_lengths=[40, 21], layout=layout, return_lse=True)
            wide = [np.repeat(x, 2, 0) for x in arrays[1:]]
            assert same(got, attention(arrays[0], *wide, k_lengths=[40, 21], layout=layout, return_lse=True))


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_widened_keys(rng, rows, dtype):
    with small_blocks():
        q, k, v = qkv(rng, "float32", 1, 2, 1, rows, 40, 16, 20)
        k, v = (x.astype(numpy_dtype(dtype)) for x in (k, v))
        got = check(q, k, v, causal=True)
        wide = (x.astype(np.float32) for x in (k, v))
        assert same(got, attention(q, *wide, causal=True, return_lse=True))
        cache = sl.KVCache(layers=1, kv_heads=1, head_dim=16, value_dim=20, capacity=40, dtype=dtype, device="cuda")
        assert same(
            [cache.attend(0, tensor(q), tensor(k[:, :, :rows]), tensor(v[:, :, :rows]))],
            [attention(q, k[:, :, :rows], v[:, :, :rows], causal=True)],
        )


def test_keys_that_are_not_widened():
    q = np.ones((1, 2, 3, 16), numpy_dtype("bfloat16"))
    k = q.astype(np.float16)
    with pytest.raises(sl.UnsupportedError, match="q: expected float32, or float16, as k has, on a GPU; got bfloat16"):
        attention(q, k, k)


# --- layouts, lengths, bits


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_layouts_and_strides(rng, layout):
    q, k, v = qkv(rng, "float32", 2, 4, 2, 40, 50, 16, 20)
    want = attention(q, k, v, causal=True).cpu()
    wide = rng.standard_normal((2, 8, 40, 40)).astype(np.float32)
    wide[:, ::2, :, 3:35:2] = q
    views = [tensor(wide)[:, ::2, :, 3:35:2], tensor(k), tensor(v[..., ::-1].copy()).flip(-1)]
    if layout == "blhd":
        views = [x.swapaxes(1, 2) for x in views]
    got = sl.attention(*views, causal=True, layout=layout, engine="cuda").cpu()
    assert same([got.swapaxes(1, 2) if layout == "blhd" else got], [want])
    room = torch.full((2, 4, 60, 33), np.nan, device=DEVICE)
    out = room[:, :, 11:51, 5:25]
    assert sl.attention(tensor(q), tensor(k), tensor(v), causal=True, out=out, engine="cuda") is out
    assert same([out], [want]) and torch.isnan(room).sum() == room.numel() - out.numel()


@pytest.mark.parametrize("q_len", [1, 3, 40])
def test_bits_do_not_depend_on_the_batch(rng, q_len):
    q, k, v = qkv(rng, "float32", 4, 2, 1, q_len, 700, 16, 16)
    out = attention(q, k, v, causal=True, return_lse=True)
    for i in (0, 3):
        alone = attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], causal=True, return_lse=True)
        assert same([x[i : i + 1] for x in out], alone)


@pytest.mark.parametrize("which", ["k", "out"])
def test_offsets_past_2_to_the_31(which):
    """R11: heads so far apart that 32 bits cannot tell where they lie; memory that is never touched takes none."""
    if DEVICE == "cuda":
        pytest.skip("a GPU has no sparse memory")
    room = np.frombuffer(pages((5 << 30) + (1 << 12)), np.float16)
    far = torch.from_numpy(np.lib.stride_tricks.as_strided(room, (1, 2, 40, 16), (0, 5 << 30, 32, 2)))
    q, k, v = (torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(n)).half() for n in range(3))
    want = sl.attention(q, k, v, causal=True, engine="cuda")
    if which == "k":
        far.copy_(k)
        got = sl.attention(q, far, v, causal=True, engine="cuda")
    else:
        got = sl.attention(q, k, v, causal=True, engine="cuda", out=far)
    assert same([got], [want])


def test_merge(rng):
    q, k, v = (tensor(x) for x in qkv(rng, "float32", 1, 2, 1, 40, 60, 16, 16))
    parts = [launch_run(q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 0), (0, 25), (25, 60))]
    out, lse = merging.merged([out for out, _ in parts], [lse for _, lse in parts])
    whole = launch_run(q, k, v)
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])
    two = merging.merged(*(list(xs) for xs in zip(parts[1], parts[2], strict=True)))
    assert same([out, lse], two)  # what saw nothing has no say


@pytest.mark.parametrize("case", MERGED, ids=[c[0] for c in MERGED])
def test_special_values_of_merge(case):
    outs, lses = ([np.array([x], np.float32) for x in xs] for xs in zip(*case[1], strict=True))
    got = [plain(x.cpu()) for x in merging.merged([tensor(x) for x in outs], [tensor(x) for x in lses])]
    want = np.array([case[2]])
    assert np.array_equal(got[0], want, equal_nan=True) and (np.signbit(got[0]) == np.signbit(want))[want == 0].all()
    for x, y, bound in zip(got, reference.merge(outs, lses), reference.merge_bound(outs, lses), strict=True):
        assert_within(x, y, bound, zeros_allowed=True)


def launch_run(q, k, v):
    return sl.attention(q, k, v, return_lse=True, engine="cuda")


# --- dropout


@pytest.mark.parametrize("dtype", DTYPES if FULL else DTYPES[::2])
def test_dropout(rng, dtype):
    """Blocks of many rows, and few rows over keys that are split."""
    with small_blocks():
        for q_len, k_len, options in ((40, 70, {"causal": True}), (2, 300, {"sink_logits": [0.0, 1.0]})):
            q, k, v = qkv(rng, dtype, 2, 2, 1, q_len, k_len, 24, 20)
            for p, seed in ((0.3, 2**64 - 3), (1.0, 5)):
                out, _ = check(q, k, v, dropout=p, seed=seed, zeros_allowed=True, **options)
                assert p < 1 or not out.any()
            assert same([attention(q, k, v, dropout=0, **options)], [attention(q, k, v, **options)])


@pytest.mark.parametrize(("start", "k_start"), [(-5, 0), (2**32 - 60, 2**32 - 1024)])
def test_the_weights_that_keep_mask_tells(start, k_start):
    """The value of key j is 1 in column j alone: what is 0 was dropped."""
    seed, j = 2**63 + 7, range(k_start, k_start + 90)
    with small_blocks():
        for q_len in (40, 2):
            q, k = (np.zeros((2, n, m, 16), np.float32) for n, m in ((4, q_len), (2, 90)))
            v = np.ascontiguousarray(np.broadcast_to(np.eye(90, dtype=np.float32), (2, 2, 90, 90)))
            out = attention(q, k, v, dropout=0.4, seed=seed, q_start=start, k_start=k_start).cpu().numpy()
            for b, h in np.ndindex(2, 4):
                keep = sl.reference.keep_mask(0.4, seed, b, h, range(start, start + q_len), j)
                assert ((out[b, h] != 0) == keep).all()


def test_another_seed_uploads_nothing(rng):
    q, k, v = qkv(rng, "float32", 1, 1, 1, 2, 20, 16, 16)
    for probability in (0.3, 0.4):
        first = attention(q, k, v, dropout=probability, seed=1)
        kept = len(uploads._uploads)
        assert not same([attention(q, k, v, dropout=probability, seed=2**63)], [first])
        assert len(uploads._uploads) == kept


@pytest.mark.parametrize("q_len", [40, 2])
def test_dropped_values_that_are_not_finite(rng, q_len):
    """0 times NaN or infinity is NaN where the key is visible, and nothing where it is hidden."""
    q, k, v = qkv(rng, "float32", 1, 2, 1, q_len, 70, 16, 16)
    v[0, 0, 60, 3], v[0, 0, 65, 5] = np.nan, np.inf
    dropout = {"dropout": 0.9, "seed": 1}
    hiding, clean = (
        dropout | {"mask": sl.expression(lambda b, h, i, j: (j != 60) & (j != 65))},
        np.where(np.isfinite(v), v, 0),
    )
    with small_blocks():
        hidden = attention(q, k, v, **hiding)
        out = attention(q, k, v, causal=True, **dropout).cpu().numpy()
    bounds = sl.reference.error_bound(q, k, clean, tile=16, **hiding)
    assert_within(hidden.cpu(), sl.reference.attention(q, k, clean, **hiding), bounds.out)
    want = sl.reference.attention(q, k, v, causal=True, **dropout)
    assert (np.isnan(out) == np.isnan(want)).all() and np.isnan(want).any()
    assert (np.isinf(out) == np.isinf(want)).all()


# --- errors


def test_wrong_arguments(rng):
    q, k, v = (tensor(x) for x in qkv(rng, "float32", 1, 2, 1, 4, 5, 16, 16))
    for message, error, call in (
        ("engine: expected", sl.ArgumentError, lambda: sl.attention(q, k, v, engine="gpu")),
        ("precision: expected", sl.ArgumentError, lambda: sl.attention(q, k, v, precision="half", engine="cuda")),
        (
            "q: expected float32, float16 or bfloat16 on a GPU",
            sl.UnsupportedError,
            lambda: sl.attention(*(x.double() for x in (q, k, v)), engine="cuda"),
        ),
        (
            "q: expected head dims up to 512",
            sl.UnsupportedError,
            lambda: attention(*qkv(rng, "float32", 1, 1, 1, 2, 2, 600, 8)),
        ),
        ("k: expected head_dim 16", sl.ArgumentError, lambda: sl.attention(q, k[..., :8], v, engine="cuda")),
        (
            "q: expected a tensor on a GPU",
            sl.ArgumentError,
            lambda: sl.attention(*(x.cpu().numpy() for x in (q, k, v)), engine="cuda"),
        ),
        ("return_lse", sl.ArgumentTypeError, lambda: sl.attention(q, k, v, return_lse=1, engine="cuda")),
    ):
        with pytest.raises(error, match=message):
            call()


def test_capabilities(monkeypatch, rng):
    q, k, v = qkv(rng, "bfloat16", 1, 2, 1, 4, 5, 16, 16)
    monkeypatch.setattr(schedule, "capability", lambda device: (7, 5))
    with pytest.raises(sl.UnsupportedError, match=r"expected compute capability 8.0 for bfloat16; got 7.5"):
        attention(q, k, v)
    monkeypatch.setattr(schedule, "capability", lambda device: (7, 0))
    with pytest.raises(sl.UnsupportedError, match=r"expected compute capability 7.5 or newer; got 7.0"):
        attention(q, k, v)


def test_tensor_descriptors_can_be_turned_off(monkeypatch, rng):
    """By the environment, to the same bits; another value is an error, and a cache stays as it was."""
    q, k, v = (tensor(x) for x in qkv(rng, "float32", 1, 2, 1, 70, 50, 16, 16))
    used = []

    def start(each):
        used.append(each.arguments.get("USE_TMA"))
        launch.start(each)

    monkeypatch.setattr("speedlight.gpu.prepare.start", start)
    results, cache = [], sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=70, device="cuda")
    with small_blocks(Tile(16, 16, 4, 1, use_tma=True)):
        for setting in ("1", "0"):
            monkeypatch.setenv("SPEEDLIGHT_GPU_TMA", setting)
            results.append(sl.attention(q, k, v, engine="cuda"))
        monkeypatch.setenv("SPEEDLIGHT_GPU_TMA", "yes")
        for call in (
            lambda: sl.attention(q, k, v, engine="cuda"),
            lambda: cache.attend(0, q[:, :, :50], k, v),
            lambda: sl.attention_backward(q, k, v, results[0], results[0][..., 0], q, engine="cuda"),
        ):
            with pytest.raises(sl.ArgumentError, match=r"^SPEEDLIGHT_GPU_TMA: expected 0 \(plain loads\) or 1 .*'yes'"):
                call()
    assert used == [True, True, False, False] and same(results[:1], results[1:])
    assert cache.length(0) == 0


WIDE = Tile(128, 128, 8, 2, True, producer=True)


@pytest.fixture
def has_producer(monkeypatch):
    """PRODUCER of each first launch of a call."""
    used = []

    def start(each):
        if each.arguments.get("NONFINITE") == int(FLAG):
            used.append(each.arguments["PRODUCER"])
        launch.start(each)

    monkeypatch.setattr("speedlight.gpu.prepare.start", start)
    return used


@pytest.mark.parametrize("tile", [WIDE, replace(WIDE, stages=3)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "layout": "blhd"}])
def test_a_producer_changes_no_bit(rng, has_producer, tile, options):
    """With heads that share keys, and a head dim below the block's; values that are not finite are repaired."""
    q, k, v = qkv(rng, "bfloat16", 1, 2, 1, 128, 256, 40, 48)
    broken = v.copy()
    broken[:, :, 200, 3:5] = np.inf, np.nan
    if "layout" in options:
        q, k, v, broken = (x.swapaxes(1, 2).copy() for x in (q, k, v, broken))
    results = []
    for each in (tile, replace(tile, producer=False)):
        with small_blocks(each):
            results.append([*check(q, k, v, **options), *attention(q, k, broken, return_lse=True, **options)])
    assert same(*results) and has_producer == [True, True, False, False]
    assert results[0][2].isnan().any()


def test_calls_without_a_producer(rng, monkeypatch, has_producer):
    """Tiles that are not whole, rows that see nothing, unlike items, strides that no descriptor takes, anything beside
    causality.
    """
    q, k, v = (tensor(x) for x in qkv(rng, "float16", 2, 2, 2, 128, 256, 16, 16))
    wide = torch.cat([q, q], -1)
    cu_lengths = {"cu_seqlens_q": [0, 128], "cu_seqlens_k": [0, 256], "layout": "lhd"}
    short, empty = [x[:, :, :128] for x in (k, v)], [x[:, :, :0] for x in (k, v)]
    calls = [
        ((q[:, :, :127], k, v), {}),
        ((q, k[:, :, 1:], v[:, :, 1:]), {}),
        ((torch.cat([q, q], 2), *short), {"causal": True}),
        ((q, *empty), {}),
        ((q, k, v), {"k_lengths": [256, 128]}),
        ((*[x[0].transpose(0, 1) for x in (q, k, v)],), cu_lengths),
        ((wide[..., 1:17], k, v), {}),
        ((wide[..., ::2], k, v), {}),
        ((q, k, v), {"scale": -0.5}),
        ((q, k, v), {"sink_logits": [0.5, 1.0]}),
        ((q, k, v), {"dropout": 0.1, "seed": 1}),
        ((q, k, v), {"mask": sl.window(9, 9)}),
        ((q, k, v), {"score": sl.softcap(5.0)}),
    ]
    with small_blocks(WIDE):
        for arrays, options in calls:
            sl.attention(*arrays, engine="cuda", **options)
        monkeypatch.setenv("SPEEDLIGHT_GPU_TMA", "0")
        sl.attention(q, k, v, engine="cuda")
    assert has_producer == [False] * (len(calls) + 1)


def test_the_table_has_producers_on_hopper_alone():
    """For full and causal calls of 16 bits; a mask, a score or dropout takes another tile."""
    with_producers = {
        (capability, kind, row.head_dim)
        for capability, of_kinds in tiles.TABLE.items()
        for kind, rows in of_kinds.items()
        for row in rows
        if row.full.producer or row.causal is not None
    }
    assert with_producers == {((9, 0), "16", 64), ((9, 0), "16", 128)}
    for row in tiles.TABLE[9, 0]["16"][:2]:
        assert row.full == row.causal and not row.masked.producer


def test_out_stays_as_it_was_where_a_lookup_fails(rng):
    """Also over caches and pools; a call without errors fills the caller's own tensor, whatever its strides."""
    q, k, v = (tensor(x) for x in qkv(rng, "float32", 1, 2, 2, 20, 20, 16, 16))
    limits = sl.table(np.arange(20), "limits")
    right, wrong = (sl.expression(lambda b, h, i, j, n=n: j <= limits[i + n]) for n in (0, 1))
    out = torch.full((1, 2, 20, 32), 7.0, device=DEVICE)[..., ::2]
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, capacity=32, device="cuda")
    cache.append(0, k, v)
    calls = [
        lambda **options: sl.attention(q, k, v, engine="cuda", out=out, **options),
        lambda **options: cache.attend(0, q, out=out, **options),
    ]
    for call in calls:
        out[...] = 7
        with pytest.raises(sl.ArgumentError, match="limits: expected index 1 from 0 to 19"):
            call(mask=wrong)
        assert (out == 7).all()
        assert call(mask=right) is out
        assert torch.equal(out, sl.attention(q, k, v, engine="cuda", mask=right))
