"""What runs is what was planned: the kernel counts, and plan() must have said the same."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
from conftest import FULL
from expressions import LENGTH, masks
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import qkv

import speedlight as sl
from speedlight.arrays.array import describe
from speedlight.cpu.engine import backward_call as gradients
from speedlight.cpu.engine import forward_call
from speedlight.cpu.engine.forward_call import prepare
from speedlight.cpu.engine.schedule import schedule
from speedlight.cpu.runtime.compile import symbol_of
from speedlight.cpu.runtime.tuned import tuning_of
from speedlight.host import machine
from speedlight.host.machine import current_isa, isa_named
from speedlight.host.tunings import TUNINGS
from speedlight.problem import tiles
from speedlight.problem.build import from_arrays
from speedlight.problem.gradients import Asked
from speedlight.problem.operands import Dense, Operands, Rows, Strides
from speedlight.problem.options import Options
from speedlight.problem.plan import Roofs
from speedlight.problem.problem import LAYOUTS


def counted(q, k, v, options):
    """What the kernel counts, the plan, and the problem."""
    plan = sl.plan(q, k, v, **options, exact=True)
    described = tuple(describe(x, n) for x, n in ((q, "q"), (k, "k"), (v, "v")))
    problem = from_arrays(*described, Options(**options)).problem
    out, counts = np.empty_like(q), np.zeros(3, np.int64)
    rows, keys = Rows("bhld", described[0], out.strides), Dense("bhld", *described[1:])
    prepared = prepare(problem, rows, keys, sl.get_threads(), current_isa())
    prepared.counts_at = counts.ctypes.data
    prepared.run(*(x.address for x in described), out.ctypes.data, 0)
    assert plan.kernel == prepared.launch.kernel.symbol
    return counts.tolist(), plan, problem


@pytest.mark.units
@pytest.mark.each("dtype", "options")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("q_len", "k_len", "options"),
    [
        (300, 700, {"causal": True}),
        (300, 700, {}),
        (1, 5000, {"causal": True}),
        (700, 300, {"causal": True}),
        (513, 2049, {"causal": True, "q_start": 900}),
        (200, 400, {"causal": "top-left"}),
        (64, 64, {"causal": True, "q_start": -5}),
    ],
)
def test_the_kernel_counts_what_was_planned(isa, rng, dtype, q_len, k_len, options):
    counts, plan, problem = counted(*qkv(rng, dtype, 2, 6, 2, q_len, k_len, 16, 16), options)
    assert counts == [plan.tiles_full, plan.tiles_mixed, plan.panel_keys]
    i, j = np.arange(q_len)[:, None] + problem.q_starts[0], np.arange(k_len)
    visible = int((j <= i).sum()) if problem.causal else q_len * k_len
    assert plan.visible_pairs == visible * 2 * 6 and plan.flops == plan.visible_pairs * 4 * 16
    assert plan.tile_flops == plan.full_flops + plan.mixed_flops >= plan.flops


IDS = np.repeat(np.arange(40), np.random.default_rng(1).integers(1, 200, 40))
MASKS = {
    "window": {"mask": sl.window(300, 0)},
    "window and causal": {"mask": sl.window(100, 30), "causal": True},
    "both sides": {"mask": ~sl.window(200, 200)},
    "prefix": {"mask": sl.causal() & (sl.window(200, 0) | sl.prefix(4))},
    "three": {
        "mask": sl.expression(lambda b, h, i, j: (i - j > 700) | (j - i > 400) | ((i < 900) & (j >= 100) & (j < 300)))
    },
    "documents": {"mask": sl.documents(IDS)},
    "documents and causal": {"mask": sl.documents(IDS), "causal": True, "q_start": 700},
    "heads": {"mask": lambda b, h, i, j: (i - j < 100 * (h + 1)) & (j <= i)},
    "items": {"mask": lambda b, h, i, j: j < 500 * b + i},
    "nothing": {"mask": sl.prefix(0)},
    "dense": {"mask": np.random.default_rng(2).random((1, 4, 1, 1500)) < np.repeat([0, 0.5, 1], 500)},
    "additive": {"score": np.where(np.tri(500, 1500, 800, bool), 0, -np.inf).astype(np.float32)},
    "scored": {"score": sl.softcap(3.0), "mask": sl.window(50, 60)},
    "blocks": {"mask": sl.blocks(np.random.default_rng(3).random((12, 12)) < 0.3, 128)},
    "blocks of heads": {"mask": sl.blocks(np.random.default_rng(4).random((2, 4, 15, 24)) < 0.3, (100, 64))},
}


@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("name", MASKS if FULL else list(MASKS)[::2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if FULL else ["float32"])
def test_the_kernel_counts_what_was_planned_for_masks(isa, one_width, rng, dtype, name):
    q, k, v = qkv(rng, dtype, 2, 4, 2, 500, 1500, 16, 16)
    counts, plan, _ = counted(q, k, v, MASKS[name])
    assert counts == [plan.tiles_full, plan.tiles_mixed, plan.panel_keys]
    assert plan.tile_flops == plan.full_flops + plan.mixed_flops >= plan.flops
    quick = sl.plan(q, k, v, **MASKS[name])
    assert quick.visible_pairs in (None, plan.visible_pairs)
    assert (quick.visible_pairs is None) == (
        name in ("documents", "documents and causal", "heads", "dense", "additive", "blocks", "blocks of heads")
    )
    shown = sl.reference.weights(np.zeros_like(q, np.float32), np.zeros_like(k, np.float32), **MASKS[name]) > 0
    assert plan.visible_pairs == shown.sum() and plan.flops == plan.visible_pairs * 4 * 16


@settings(max_examples=300 if FULL else 3, deadline=None)
@given(masks(), st.booleans(), st.integers(0, 1 << 30))
def test_the_kernel_counts_what_was_planned_for_random_masks(mask, causal, seed):
    rng = np.random.default_rng(seed)
    sizes = int(rng.integers(1, 200)), int(rng.integers(1, LENGTH - 1))
    options = {"mask": mask, "causal": causal, "q_start": int(rng.integers(0, LENGTH - sizes[0]))}
    counts, plan, _ = counted(*qkv(rng, "float32", 2, 4, 2, *sizes, 4, 4), options)
    assert counts == [plan.tiles_full, plan.tiles_mixed, plan.panel_keys]


def counted_backward(q, k, v, options):
    """What the backward kernel counts, and the plan."""
    plan = sl.plan(q, k, v, **options, exact=True, backward=True)
    out, lse = sl.attention(q, k, v, **options, return_lse=True)
    x = Operands(*(describe(a.copy(), "x") for a in (q, k, v, out, lse, out)), None, *(
        describe(np.zeros_like(a), "x") for a in (q, k, v)
    ))  # fmt: skip
    stated = from_arrays(x.q, x.k, x.v, Options(**options))
    layout = options.get("layout", "bhld")
    prepared = gradients.prepare(Asked(stated.problem), layout, stated, x, sl.get_threads(), current_isa())
    assert plan.kernel == symbol_of(prepared.call.launch.shape)
    counts = np.zeros(3, np.int64)
    sums = [np.zeros(a.shape, np.float64) for a in (q, k, v)]
    prepared.call.run(x, [a.ctypes.data for a in sums], None, counts=counts.ctypes.data)
    assert plan.workspace_bytes >= prepared.call.how.workspace_bytes
    return counts.tolist(), plan


def held_to_the_kernel(arrays, options):
    counts, plan = counted_backward(*arrays, options)
    assert counts == [plan.tiles_full, plan.tiles_mixed, plan.panel_keys]
    assert plan.tile_flops == plan.full_flops + plan.mixed_flops >= plan.flops
    return plan


BACKWARD = [
    (300, 700, {"causal": True}),
    (300, 700, {}),
    (1, 2500, {"causal": True}),
    (500, 300, {"causal": True}),
    (513, 1049, {"causal": True, "q_start": 901}),
    (64, 64, {"causal": True, "q_start": -5}),
    (300, 700, {"causal": True, "k_start": 1024, "q_start": 1400}),
    (300, 700, {"q_lengths": [193, 0], "k_lengths": [700, 33]}),
    (300, 700, {"causal": True, "q_lengths": [300, 7], "k_lengths": [129, 700]}),
    (300, 700, {"layout": "lhd", "causal": True, "cu_seqlens_q": [0, 3, 3, 300], "cu_seqlens_k": [0, 0, 130, 700]}),
]


@pytest.mark.units
@pytest.mark.each("dtype", "options")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("q_len", "k_len", "options"), BACKWARD)
def test_the_backward_kernel_counts_what_was_planned(isa, rng, dtype, q_len, k_len, options):
    given = qkv(rng, dtype, 2, 6, 2, q_len, k_len, 16, 8)
    if options.get("layout") == "lhd":
        given = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in given]
    plan = held_to_the_kernel(given, options)
    assert plan.flops == plan.visible_pairs * (6 * 16 + 4 * 8)
    assert plan.visible_pairs == sl.plan(*given, **options).visible_pairs
    if "q_lengths" not in options:
        size, number = given[0].itemsize, 4
        rows, keys = given[0].size // 16, given[1].size // 16
        assert plan.bytes_read == (rows * (16 + 8 + 8) + keys * (16 + 8)) * size + rows * number
        assert plan.bytes_written == (rows * 16 + keys * (16 + 8)) * size


@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("name", MASKS if FULL else ["heads", "scored", "blocks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if FULL else ["float32"])
def test_the_backward_kernel_counts_what_was_planned_for_masks(isa, rng, dtype, name):
    given = qkv(rng, dtype, 2, 4, 2, 500, 1500, 16, 16)
    plan = held_to_the_kernel(given, MASKS[name])
    assert plan.visible_pairs == sl.plan(*given, **MASKS[name], exact=True).visible_pairs


def test_a_plan_of_gradients_says_so(rng):
    sizes = {"q_heads": 4, "kv_heads": 2, "q_len": 300, "head_dim": 32, "dtype": "bfloat16"}
    plan, forward = (sl.plan(**sizes, backward=x) for x in (True, False))
    assert plan.backward and not forward.backward and plan.kernel.startswith("backward_bf16")
    assert "backward" in dict(plan.rows())["problem"] and "whatever" not in dict(plan.rows())["workspace"]
    assert plan.flops == 5 * forward.flops // 2 and plan.seconds_at_least > 0
    given = qkv(rng, "bfloat16", 1, 4, 2, 300, 300, 32, 32)
    assert sl.plan(*given, backward=True) == plan
    spread = [np.repeat(x, 2, axis=-1)[..., ::2] for x in qkv(rng, "float32", 1, 4, 2, 300, 300, 64, 64)]
    close = [np.ascontiguousarray(x) for x in spread]
    assert sl.plan(*spread, backward=True).workspace_bytes > sl.plan(*close, backward=True).workspace_bytes
    with pytest.raises(sl.UnsupportedError, match="^backward: expected False, or the CPU"):
        sl.plan(**sizes, backward=True, device="cuda")
    with pytest.raises(sl.ArgumentTypeError, match="^backward: "):
        sl.plan(**sizes, backward=1)
    with pytest.raises(sl.Error, match="derivative"):
        sl.plan(**sizes, backward=True, score=lambda s, b, h, i, j: s // 2.0)


LISTS = {
    "bhld": [
        {},
        {"q_lengths": [75, 0, 40], "k_lengths": [430, 100, 0]},
        {"k_lengths": [430, 100, 7]},
        {"q_lengths": (3, 75, 1)},
    ],
    "lhd": [
        {},
        {"cu_seqlens_q": [0, 3, 3, 75], "cu_seqlens_k": (0, 0, 30, 430)},
        {"cu_seqlens_q": np.array([0, 70, 75]), "cu_seqlens_k": [0, 400, 430]},
    ],
}
OTHERS = [
    {"causal": True}, {"causal": "top-left"}, {"window": (40, 3)},
    {"window": (100, None), "causal": True, "mask": sl.prefix(4)},
    {"q_start": 500, "causal": True, "k_start": 1024}, {"score": sl.softcap(3.0), "scale": 0.5},
    {"sink_logits": [0.5, -3.0, 20.0, 1.0]},
]  # fmt: skip


@pytest.mark.parametrize("layout", ["bhld", "blhd", "lhd"])
@pytest.mark.parametrize("sizes", [(75, 430, 2), (75, 430, 4), (1, 3000, 1)])
def test_a_plan_by_sizes_is_that_of_arrays(layout, sizes):
    """Every option, alone and with lengths; what is left out of the sizes comes from the lengths."""
    q_len, k_len, kv_heads = sizes
    packed = layout == "lhd"
    shapes = [(1 if packed else 3, heads, n, 16) for heads, n in ((4, q_len), (kv_heads, k_len), (kv_heads, k_len))]
    given = [
        np.empty((s[2], s[1], s[3]) if packed else tuple(s[a] for a in LAYOUTS[layout]), np.float32) for s in shapes
    ]
    whole = {"q_heads": 4, "kv_heads": kv_heads, "q_len": q_len, "k_len": k_len, "head_dim": 16, "layout": layout}
    whole |= {} if packed else {"batch": 3}
    for lists in LISTS["lhd" if packed else "bhld"] if q_len > 1 else [{}]:
        for other in OTHERS:
            want = sl.plan(*given, layout=layout, **lists, **other)
            assert sl.plan(**whole, **lists, **other) == want
            if "cu_seqlens_k" in lists or {"q_lengths", "k_lengths"} <= set(lists):
                assert (
                    sl.plan(**{n: x for n, x in whole.items() if n not in ("q_len", "k_len")}, **lists, **other) == want
                )


def test_a_plan_takes_arrays_or_sizes():
    x = np.ones((1, 1, 5, 4), np.float32)
    for name in ("batch", "q_heads", "q_len", "value_dim", "dtype"):
        with pytest.raises(sl.ArgumentError, match=f"^{name}: expected either arrays or sizes"):
            sl.plan(x, x, x, **{name: 3})
    with pytest.raises(sl.ArgumentError, match="^batch: expected 1 for layout='lhd'"):
        sl.plan(batch=2, q_heads=1, q_len=5, head_dim=4, layout="lhd")
    for sizes, missing in (
        ({"q": x}, "k, v"),
        ({"v": x}, "q, k"),
        ({"q": x, "v": x}, "k"),
        ({}, "q_heads, q_len, head_dim"),
    ):
        message = rf"^{missing.split(',')[0]}: expected arrays or sizes, plan\(q, k, v\), or .*; got no {missing}\.$"
        with pytest.raises(sl.ArgumentTypeError, match=message):
            sl.plan(**sizes)
    with pytest.raises(sl.ArgumentTypeError, match=r"^k: expected a NumPy array.*; got NoneType\.$"):
        sl.attention(x, None, x)


def test_planning_a_window_of_a_million_keys_is_quick_and_small():
    call = {"q_heads": 8, "q_len": 1 << 20, "head_dim": 64, "mask": sl.window(1023, 0)}
    sl.plan(**call)
    tracemalloc.start()
    plan = sl.plan(**call)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.visible_pairs == 8 * ((1 << 20) * 1024 - 1023 * 1024 // 2)
    assert plan.tile_flops < 1.2 * plan.flops and peak < 10 << 20


@pytest.mark.parametrize(
    "options",
    [
        {"mask": sl.window(1023, 0)},
        {"mask": sl.causal() | sl.prefix(1000)},
        {"score": sl.alibi([0.5] * 8), "causal": True},
    ],
)
def test_a_plan_of_a_million_rows_asks_few_questions(monkeypatch, options):
    """Each is of many boxes at once. A score that hides nothing is the same of all heads, whatever it is of each."""
    asked, ask = [], tiles.classes
    monkeypatch.setattr(tiles, "classes", lambda rows, i, j: asked.append(rows.head) or ask(rows, i, j))
    sl.plan(q_heads=8, q_len=10**6, head_dim=64, **options)
    assert 0 < len(asked) < 100 and set(asked) == {0}


def test_workspace_does_not_grow_with_the_lengths():
    sizes = [sl.plan(q_heads=8, q_len=n, head_dim=64).workspace_bytes for n in (4096, 65536, 1 << 20)]
    assert sizes == sorted(sizes, reverse=True)  # long rows share a tile among fewer panels


def test_the_plan_is_frozen_and_prints_as_a_table():
    plan = sl.plan(batch=1, q_heads=32, kv_heads=8, q_len=8192, k_len=8192, head_dim=128, dtype="bfloat16", causal=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.flops = 0
    text = str(plan)
    for word in ("flops", "tiles", "workspace", "materialised", "time at least", plan.kernel):
        assert word in text
    assert plan.materialised_bytes == 2 * 32 * 8192 * 8192 * 2 and plan.seconds_at_least > 0


@pytest.mark.parametrize(
    ("length", "heads", "flops", "size"),
    [
        (16, 1, "65.5 kFLOP", "2 KiB"),
        (361, 1, "33.4 MFLOP", "1,018 KiB"),  # not 1.02e+03
        (100_000, 1, "2.56 TFLOP", "74.5 GiB"),
        (100_000, 1_000_000, "2.56 EFLOP", "71.1 PiB"),
        (100_000, 1_000_000_000, "2,560 EFLOP", "69.4 EiB"),
    ],
)
def test_large_numbers_print_in_larger_units(length, heads, flops, size):
    rows = dict(sl.plan(q_heads=heads, q_len=length, head_dim=64).rows())
    assert rows["flops"].startswith(f"{flops} visible, ") and rows["materialised"].startswith(f"{size} for ")


@pytest.mark.parametrize(("keys", "batch", "threads", "heads"), [
    (1000, 16, 2, 4), (1000, 16, 8, 1), (1000, 1, 2, 1), (1000, 1, 1, 8), (1025, 16, 2, 1), (1025, 1, 1, 1),
])  # fmt: skip
def test_heads_share_a_task_where_keys_are_few_and_tasks_enough(keys, batch, threads, heads):
    """No sequence alone, the longest of a batch maybe, has fewer tasks than there are threads."""
    problem = sl.plan(batch=batch, q_heads=8, q_len=1, k_len=keys, head_dim=64).problem
    how = schedule(problem, current_isa(), threads, Strides(), tuning_of(current_isa()))
    assert (how.kind, how.heads) == ("decode", heads)


@pytest.mark.parametrize(
    ("heads", "tokens", "dtype", "threads", "tasks"),
    [
        (8, 128, "float16", 2, 8),  # four for each thread
        (3, 384, "float16", 2, 12),  # of nine one thread would have five
        (6, 256, "float16", 2, 12),  # … and of two sizes one thread would have more
        (8, 128, "float32", 2, 16),  # nothing is staged
        (8, 128, "float16", 3, 32),
    ],
)
def test_tasks_that_stage_tiles_are_fewer_where_they_are_alike(heads, tokens, dtype, threads, tasks):
    problem = sl.plan(q_heads=heads, q_len=tokens, head_dim=64, dtype=dtype).problem
    how = schedule(problem, isa_named("avx512"), threads, Strides(), TUNINGS["intel512"])
    assert (how.vectors, how.tickets) == (2, tasks)


@pytest.mark.parametrize(
    ("q_len", "q_start", "unit", "vectors"),
    [(49, 0, "avx512", 2), (64, 0, "avx512", 2), (256, 0, "amx", 2), (48, 0, "avx512", 3), (48, 40, "avx512", 2),
     (197, 0, "avx512", 3), (4096, 0, "avx512", 3), (64, 0, "avx2", 3)],
)  # fmt: skip
def test_panels_of_gradients_leave_few_lanes_idle(q_len, q_start, unit, vectors):
    problem = sl.plan(q_heads=2, q_len=q_len, head_dim=64, q_start=q_start).problem
    _, shape = gradients.kernel_of_problem(problem, Strides(), 1, isa_named(unit))
    assert shape.vectors == vectors


def test_schedule_fits_the_cache():
    problem = sl.plan(q_heads=8, q_len=4096, head_dim=64).problem
    how = schedule(problem, current_isa(), 2, Strides(), tuning_of(current_isa()))
    assert how.scratch_bytes < 1 << 20 and how.panels >= 1


def test_the_plain_read_reads_every_byte():
    """The sum of what was read is the sum of the memory: a roof that skips lines would be too high."""
    import ctypes

    from speedlight.cpu.memory.records import LIMIT
    from speedlight.cpu.runtime import roof
    from speedlight.cpu.runtime.workers import run_region

    memory = np.random.default_rng(0).integers(0, 1 << 40, 4 * roof._PIECE // 8)
    words = (ctypes.c_int64 * (len(roof.ARGUMENTS.names) + 128))()
    words[LIMIT], words[roof.ARGUMENTS.word("memory")] = 4, memory.ctypes.data
    run_region(roof._kernels(current_isa(), "f32")[1], words, 1)
    sums = np.frombuffer(words, np.int64)[roof.OPERANDS // 8 :]
    assert sums.sum() == memory.sum() and np.count_nonzero(sums) == 8 * current_isa().vector_bytes // 8


def test_a_plan_measures_when_it_is_asked_for_roofs(tmp_path, monkeypatch):
    """Once per machine: the next process reads them. What another machine measured, or half a file, is not believed."""
    from speedlight.cpu.runtime import roof

    monkeypatch.setenv("SPEEDLIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(roof, "_known", {})
    measured: list[float] = []
    monkeypatch.setattr(roof, "peak_flops", lambda *_: measured.append(len(measured) + 1.0) or measured[-1] * 1e9)
    monkeypatch.setattr(roof, "bandwidth", lambda *_: 5e9)

    def peak() -> float:
        roof._known.clear()  # as another process
        return sl.plan(q_heads=2, q_len=64, head_dim=32).peak_flops

    plan = sl.plan(q_heads=2, q_len=64, head_dim=32)
    assert plan == sl.plan(q_heads=2, q_len=64, head_dim=32) and not measured
    assert "(1 GFLOP/s and 5.0 GB/s, 2" in str(plan) and plan.seconds_at_least == plan.flops / 1e9
    (file,) = tmp_path.glob("*_f32_*")
    whole = file.read_text()
    assert peak() == 1e9
    file.write_text(whole[:-5])
    assert peak() == 2e9
    file.write_text(whole.replace('"machine": "', '"machine": "another '))
    assert peak() == 3e9 and measured == [1, 2, 3]
    for wrong in ("-1.0", "0.0", "NaN", "Infinity", "1e400", f"1{'0' * 400}", '"1e12"', "true", "[" * 100_000):
        file.write_text(whole.replace("1000000000.0", wrong))
        assert roof.kept_rate(current_isa(), "f32", sl.get_threads()) is None, wrong
    file.write_text(whole.replace("1000000000.0", "9000000000.0"))
    assert roof.measure(current_isa(), "f32", sl.get_threads())[:2] == (9e9, 5e9) and peak() == 9e9  # the best


def test_one_figure_of_a_plain_read_is_kept(tmp_path, monkeypatch):
    """Plans of every dtype and `speedlight info` have it, whatever was measured first."""
    from speedlight.cpu.runtime import roof
    from speedlight.tools import inspecting

    rates = iter([5e9, 7e9, 6e9, 8e9, 3e9])
    monkeypatch.setenv("SPEEDLIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(roof, "_known", {})
    monkeypatch.setattr(roof, "peak_flops", lambda *_: 1e9)
    monkeypatch.setattr(roof, "bandwidth", lambda *_: next(rates))

    def figures() -> set[float]:
        plans = [sl.plan(q_heads=2, q_len=64, head_dim=32, dtype=x) for x in ("float32", "float64", "bfloat16")]
        known, _ = inspecting._roofs(current_isa(), sl.get_threads(), again=False)
        return {x.bandwidth for x in plans} | {x.bytes for x in known.values()}

    assert figures() == {5e9}
    roof.measure(current_isa(), "f64", sl.get_threads())
    assert figures() == {7e9}
    roof._known.clear()  # as another process
    assert figures() == {7e9}
    roof.measure(current_isa(), "f32", sl.get_threads())
    assert figures() == {7e9}  # the best


@pytest.mark.parametrize(
    ("unit", "backward", "kind"),
    [("amx", False, "bf16"), ("amx", True, "f32"), ("amx-software", False, "f32"), ("neonbf16", False, "bf16")],
)
def test_a_plan_of_tiles_has_the_peak_of_what_multiplies(unit, backward, kind, monkeypatch):
    """Tiles that vectors compute take minutes to measure, and gradients use none."""
    from speedlight.cpu.runtime import roof

    asked: list[str] = []
    monkeypatch.setattr(roof, "roofs", lambda isa, storage, threads: asked.append(storage) or Roofs(1e9, 5e9, "today"))
    for module in (forward_call, gradients):
        monkeypatch.setattr(module, "current_isa", lambda: machine.isa_named(unit))
    plan = sl.plan(q_heads=2, q_len=64, head_dim=32, dtype="bfloat16", backward=backward)
    assert (plan.isa, plan.peak_flops, asked) == (unit, 1e9, [kind])
