"""Repeated calls whose arguments change (R31), and results that are written when nothing can fail any more."""

from __future__ import annotations

import functools
import gc
import importlib
import pkgutil
import threading
import types
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import FULL
from differing import DOORS, MEMOS, memos_by_home
from problems import qkv
from repeated import forget, kept, nothing_kept
from torch.autograd import forward_ad

import speedlight as sl
import speedlight.torch
from speedlight.calls import dense
from speedlight.host.machine import host_isas
from speedlight.host.memo import Memo
from speedlight.problem.prepared import Prepared

pytestmark = pytest.mark.usefixtures("one_width")  # what is remembered of a call knows no panels


def test_out_stays_as_it_was_where_a_lookup_fails(rng):
    """The kernel finds out while it runs, after it has written rows; also in a call that was prepared before, over
    pages and caches.
    """
    q, k, v = qkv(rng, "float32", 1, 2, 2, 300, 300, 16, 16)
    limits = sl.table(np.arange(300), "limits")
    right, wrong = (sl.expression(lambda b, h, i, j, n=n: j <= limits[i + n]) for n in (0, 1))
    wide = np.full((1, 2, 300, 32), 7, np.float32)
    out = wide[..., ::2]
    for _ in range(2):
        assert sl.attention(q, k, v, mask=right, out=out) is out
        assert out.tobytes() == sl.attention(q, k, v, mask=right).tobytes() and (wide[..., 1::2] == 7).all()
        out[...] = 7
    pages = k.swapaxes(1, 2)[0].reshape(300, 1, 2, 16)
    table = np.arange(300)[None]
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, capacity=400)
    pool = sl.PagePool(layers=1, pages=30, page_size=16, kv_heads=2, head_dim=16)
    cache.append(0, k, v)
    packed = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v)]
    sequence = pool.sequence()
    pool.append(0, [sequence], *packed[1:])
    calls = [
        (lambda out: sl.attention(q, k, v, mask=wrong, out=out), out),
        (lambda out: sl.attention_paged(q, pages, pages, table, [300], mask=wrong, out=out), out),
        (lambda out: cache.attend(0, q, mask=wrong, out=out), out),
        (
            lambda out: pool.attend(0, [sequence], packed[0], new_lengths=[300], mask=wrong, out=out),
            np.full_like(packed[0], 7),
        ),
    ]
    for call, target in calls:
        for _ in range(2):
            with pytest.raises(sl.ArgumentError, match="limits: expected index 1 from 0 to 299"):
                call(target)
            assert (target == 7).all()


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
def test_out_over_an_argument_is_refused_of_a_prepared_call(rng, wrap):
    rooms = [rng.standard_normal(2 * 2 * 30 * 16 + 1, dtype=np.float32) for _ in "qkv"]
    before = [room.copy() for room in rooms]
    q, k, v = (wrap(room[:-1].reshape(2, 2, 30, 16)) for room in rooms)
    out = wrap(np.empty((2, 2, 30, 16), np.float32))
    for _ in range(2):
        assert sl.attention(q, k, v, out=out) is out
    for name, room in zip("qkv", rooms, strict=True):
        for shift in (0, 1):
            over = wrap(room[shift : room.size - 1 + shift].reshape(2, 2, 30, 16))
            with pytest.raises(sl.ArgumentError, match=f"overlaps {name}"):
                sl.attention(q, k, v, out=over)
    assert all([(a == b).all() for a, b in zip(rooms, before, strict=True)])


def test_tables_that_may_change_are_read_anew(rng):
    q, k, v = qkv(rng, "float32", 1, 1, 1, 300, 300, 16, 16)
    limits = np.zeros(10_000_000, np.int8)
    table = sl.Table(limits, copy=False)
    mask = sl.expression(lambda b, h, i, j: table[(i * 97001 + j * 50021) % 10_000_000] > 0)
    assert not sl.attention(q, k, v, mask=mask).any()
    limits[:] = 1
    assert sl.attention(q, k, v, mask=mask).tobytes() == sl.attention(q, k, v, mask=sl.prefix(300)).tobytes()


def _outcome(call):
    """What a call returns, or the error it raises."""
    try:
        result = call()
    except sl.Error as error:
        return type(error), str(error)
    return [_numpy(x).tobytes() for x in (result if isinstance(result, tuple) else [result])]


def _numpy(x):
    return x.detach().numpy() if isinstance(x, torch.Tensor) else x


def _variants():
    """An option and values of it that are close to each other, one of which a call takes at random."""
    t = torch.tensor
    return {
        "causal": [False, True, "top-left", 1, 0, np.True_, "True"],
        "q_start": [None, 0, 3, False, 3.0, np.int64(3), [3, 3], [3, 4], [3, 3.0], -3],
        "k_start": [0, 1024, False, 0.0, np.int32(0)],
        "scale": [None, 0.25, 1, 1.0, True, 0.0, -0.0, -1, float("nan"), np.float32(0.25), t(0.25)],
        "window": [None, (3, 0), [3, 0], (3, None), (3.0, 0), (3, False), (np.int64(3), 0), np.array([3, 0]),
                   np.array([3.0, 0])],
        "sink_logits": [None, [0.0, 1.0], [-0.0, 1.0], (0, 1), [False, 1], np.array([0.0, 1.0]), np.array([0, 1]),
                        t([0.0, 1.0]),
                        np.array([0.0, 1.0], ">f8"), np.array([0.0, 1.0], ml_dtypes.bfloat16), [0.0, float("nan")],
                        [5e-324, 1.0]],
        "k_lengths": [None, [9, 5], [9.0, 5], (9, 5), np.array([9, 5]), np.array([9.0, 5]), t([9, 5]), t([9.0, 5]),
                      [9, 5, 3], [9, True]],
        "q_lengths": [None, [6, 2], [6, 2.0], np.array([6, 2], ">i4"), np.array([[6, 2]]), range(6, 8), [6, 7]],
        "return_lse": [False, True, 1, np.False_],
        "layout": ["bhld", "blhd", "lhd", b"bhld", None],
        "mask": [None, sl.window(2, 2), sl.window(2, 3), *(_of_zero(z) for z in (0.0, -0.0)), np.arange(9) > 2],
        "score": [None, sl.softcap(2.0), sl.softcap(2.5), [sl.softcap(2.0)], np.arange(9, dtype=np.float32)],
        "engine": [None, "cpu", "CPU"],
        "precision": ["ieee", "tf32", None],
    }  # fmt: skip


def _of_zero(z):
    return sl.expression(lambda b, h, i, j: (i * 0 + 1.0) / (i * 0 + z) > 0)


def _arrays(rng, base):
    """q, k, v (and out), of one call's values but of any strides, dtype, kind and overlap."""
    q, k, v = base
    if rng.random() < 0.3:
        q = np.asfortranarray(q)
    if rng.random() < 0.2:
        k = k[:, :, ::-1]
    if rng.random() < 0.1:
        v = v[:, :, :, :0] if rng.random() < 0.3 else np.broadcast_to(v[:, :1], v.shape)
    if rng.random() < 0.1:
        q = q.astype(rng.choice([">f4", "f8", "i4"]))
    given = [q, k, v]
    out = None
    if rng.random() < 0.4:
        out = [np.empty((2, 2, 6, 8), np.float32), np.empty((2, 2, 8, 6), np.float32).swapaxes(2, 3),
               np.empty((2, 2, 6, 8)),
               np.broadcast_to(np.float32(0), (2, 2, 6, 8)),
               np.empty((2, 2, 6, 7), np.float32)][rng.integers(5)]  # fmt: skip
        if rng.random() < 0.2 and out.shape == base[0].shape and out.dtype == np.float32 and out.flags.writeable:
            out[...] = base[0]
            given[0] = out  # it overlaps q
    if rng.random() < 0.3 and all(
        min(x.strides) >= 0 and x.dtype.isnative for x in (*given, *([] if out is None else [out]))
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tensors over read-only arrays
            given = [torch.from_numpy(x) for x in given]
            if given[0].shape == base[0].shape and rng.random() < 0.3:
                given[0] = (
                    torch.nn.Parameter(given[0], requires_grad=bool(rng.integers(2)))
                    if given[0].is_floating_point()
                    else given[0]
                )
            out = None if out is None or not out.flags.writeable else torch.from_numpy(out)
    return given, out


OTHERWISE = {
    "causal": (True, "top-left"), "q_start": (0, 3), "k_start": (0, 1024), "scale": (0.25, 0.5),
    "layout": ("bhld", "blhd"),
    "window": ((1, 0), (2, 0)), "sink_logits": ([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 4.0]),
    "q_lengths": ([4, 2], [4, 3]),
    "k_lengths": ([7, 5], [7, 6]), "mask": (sl.window(1, 0), sl.window(2, 0)),
    "score": (sl.softcap(0.5), sl.softcap(0.25)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_an_option_is_part_of_what_a_call_is_known_by(rng, name, monkeypatch):
    """Two values in turn: each time what it gives in a call that nothing was kept for."""
    q, k, v = qkv(rng, "float32", 2, 4, 4, 4, 4 if name == "layout" else 7, 8, 8)
    options = (
        {"causal": True}
        if name in ("q_start", "k_start")
        else {"q_start": 3}
        if name in ("q_lengths", "k_lengths")
        else {}
    )
    want = []
    for value in OTHERWISE[name]:
        forget()
        want.append(sl.attention(q, k, v, **options, **{name: value}).tobytes())
    assert want[0] != want[1]
    forget()
    for turn in range(6):
        assert sl.attention(q, k, v, **options, **{name: OTHERWISE[name][turn % 2]}).tobytes() == want[turn % 2]
    assert len(kept()) == 2


@pytest.mark.parametrize("seed", range(20 if FULL else 1))
def test_a_repeated_call_is_as_a_first_one(seed, monkeypatch):
    """One process, calls that differ from an earlier one in one thing: the same results and errors as with nothing
    kept.
    """
    rng = np.random.default_rng(seed)
    base = qkv(rng, "float32", 2, 2, 2, 6, 9, 8, 8)
    plain = {name: values[0] for name, values in _variants().items()}
    options = dict(plain)
    hits = ran = 0
    isas = [i.name for i in host_isas()][:2]
    for name in ("run",):
        run = getattr(Prepared, name)
        monkeypatch.setattr(Prepared, name, lambda *given, _run=run, **more: (calls.append(1), _run(*given, **more))[1])
    variants = _variants()
    for _ in range(500 if FULL else 250):
        if rng.random() < 0.2:
            options = dict(plain)
        name = str(rng.choice(list(variants)))
        options[name] = variants[name][rng.integers(len(variants[name]))]
        if rng.random() < 0.6:
            options[name] = plain[name]
        if rng.random() < 0.1:
            sl.set_threads(int(rng.integers(1, 3)))
        if rng.random() < 0.05:
            monkeypatch.setenv("SPEEDLIGHT_ISA", str(rng.choice(isas)))
        given, out = _arrays(rng, base)
        untouched = None if out is None else _numpy(out).copy()
        calls: list[int] = []
        got = _outcome(lambda: sl.attention(*given, out=out, **options))  # noqa: B023
        hits += len(calls)
        if isinstance(got, tuple) and out is not None:
            assert _numpy(out).tobytes() == untouched.tobytes()
        if isinstance(out, torch.Tensor):
            out.copy_(torch.from_numpy(untouched))
        elif out is not None and out.flags.writeable:
            out[...] = untouched
        with nothing_kept():
            want = _outcome(lambda: sl.attention(*given, out=out, **options))  # noqa: B023
        ran += isinstance(want, list)
        assert got == want, options
    assert hits > 20 and ran > 40


# --- what memos hold

MOST_HELD = 72 << 20  # bytes of arrays and texts in any memo of the package: the largest limit that one names, and keys
# what needs libraries that forks of this process could not stand: it remembers calls by short texts and numbers alone
REMEMBERS = type(functools.cache(min))
ELSEWHERE = {"gpu", "jax", "xla", "onnx", "transformers", "__main__"}


def memos() -> dict[str, Any]:
    """Every memo of the package that stays as long as the process: functions that remember, Memos, dicts, lists."""
    found: dict[str, Any] = {}
    for info in pkgutil.walk_packages(sl.__path__, "speedlight."):
        if ELSEWHERE & set(info.name.split(".")):
            continue
        for name, x in vars(importlib.import_module(info.name)).items():
            kept = isinstance(x, (REMEMBERS, Memo, dict, list, WeakKeyDictionary, threading.local))
            if kept and not name.startswith("__"):
                found[f"{info.name}.{name}"] = x
    return found


def held_by(memo: Any) -> int:
    """Bytes of the arrays, tensors and texts that are reached from it, but through modules, classes and code."""
    known: set[int] = set()
    total, left = 0, [memo.__dict__ if isinstance(memo, threading.local) else memo]
    while left:
        x = left.pop()
        if id(x) in known or isinstance(x, (types.ModuleType, type, types.CodeType, types.FrameType)):
            continue
        known.add(id(x))
        if isinstance(x, np.ndarray):
            total += x.nbytes if x.base is None else 0
            left += [] if x.base is None else [x.base]
        elif isinstance(x, torch.Tensor):
            total += x.untyped_storage().nbytes()
        elif isinstance(x, (str, bytes, bytearray)):
            total += len(x)
        elif isinstance(x, types.FunctionType):
            left += [*(x.__closure__ or ()), *(x.__defaults__ or ())]
        else:
            left += gc.get_referents(x)
    return total


def test_memos_are_bounded_in_bytes():
    """Many calls with large tables of their own, by every way that remembers something of a call."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 8, 8)
    step, pages, rows = torch.randn(1, 1, 1, 64), torch.randn(2, 4, 1, 64), np.int32([[0, 1]])
    entries, count = 1 << 20, 40 if FULL else 10  # of eight bytes

    def learn(q: torch.Tensor, mask: Any) -> torch.Tensor:
        return speedlight.torch.attention(q, q, q, mask=mask).sum()

    for n in range(count):
        array = np.full(entries, n)
        array[0] = 0
        ids = sl.table(array)
        mask = sl.expression(lambda b, h, i, j, ids=ids: ids[j] <= i)
        for _ in range(2):
            sl.attention(q, q, q, mask=mask)
            sl.plan(q, q, q, mask=mask)
            sl.attention_paged(step, pages, pages, rows, [8], mask=mask)
            cache = sl.KVCache(layers=1, batch=1, kv_heads=1, head_dim=8, capacity=16)
            cache.attend(0, q, q, q, mask=mask)
            learn(q.clone().requires_grad_(), mask).backward()
            flex = speedlight.torch.create_block_mask(mask, 1, 1, 8, 8, device="cpu")
            speedlight.torch.flex_attention(q, q, q, block_mask=flex)
        torch.func.grad(learn)(q, mask)
    del mask, ids, array, cache, flex
    gc.collect()
    known = memos()
    del known["speedlight.cpu.runtime.compile._compiled"]  # conftest.py has it grow
    assert len(known) > 20 and any(x.endswith("forms._texts") for x in known)
    found = {id(x): name for name, x in known.items() if isinstance(x, (Memo, WeakKeyDictionary))}
    homes = {id(x): name for name, x in memos_by_home().items()}
    assert found.keys() == homes.keys()  # a new one says which calls its key tells apart
    assert {x for doors in MEMOS.values() if isinstance(doors, tuple) for x in doors} == set(DOORS)
    held = {name: held_by(x) for name, x in known.items()}
    assert {name: size for name, size in held.items() if size > MOST_HELD} == {}
    assert max(held.values()) > 8 * entries  # or nothing was looked at


SEEDS = (1, 2, 3, 10, 15, 16, 18, 21, 23, 27)  # every form and dtype, few rows and many, masks that broadcast or not


def _placed(r, x):
    """The same numbers, as tensors of programs lie: contiguous, a part of a larger one, or in another order."""
    match r.integers(3):
        case 0:
            return x.contiguous()
        case 1:
            big = torch.full([n + 2 for n in x.shape], float("nan")).to(x.dtype)
            here = big[tuple(slice(n) for n in x.shape)]
            return here.copy_(x)
        case _:
            return x


@pytest.mark.parametrize("seed", range(60) if FULL else SEEDS)
def test_arrays_of_masks_and_any_number_of_keys_are_arguments(monkeypatch, seed):
    """Dense masks and biases, in steps whose keys and masks grow, at other addresses and strides, of which some have
    one key or cross a span: each call is compared with one that is prepared anew.
    """
    r = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype = [torch.float32, torch.bfloat16, torch.float16, torch.float64][r.integers(4)]
    batch, kv_heads, group, dims = (int(r.integers(1, n)) for n in (4, 3, 3, 2))
    heads, queries, layout = kv_heads * group, int(r.choice([1, 1, 2, 16, 40])), ["bhld", "blhd"][r.integers(2)]
    lead = [int(r.choice([1, n])) for n in (batch, heads, queries)]
    form, causal, half, numpy = r.integers(5), bool(r.integers(2)), r.integers(2), r.integers(2)
    given = []
    for _ in range(5):
        keys = int(r.choice([1, 2, 20, 63, 64, 1023, 1024, 1025]))
        shapes = (batch, heads, queries, 16), (batch, kv_heads, keys, 16), (batch, kv_heads, keys, 8 * dims)
        arrays = [torch.randn(*shapes[0]).to(dtype), *[_placed(r, torch.randn(*x).to(dtype)) for x in shapes[1:]]]
        arrays = [x.transpose(1, 2) if layout == "blhd" else x for x in arrays]
        mask, bias = _placed(r, torch.rand(*lead, keys) > 0.3), torch.randn(*lead, keys)
        bias = _placed(r, bias.masked_fill_(bias > 1, float("-inf")).to(dtype if half else torch.float32))
        options: dict[str, Any] = {"causal": causal, "layout": layout, "return_lse": True}
        options |= [
            {},
            {"mask": mask},
            {"score": bias},
            {"mask": mask[0, 0], "score": bias},
            {"score": [bias, mask.float()]},
        ][form]
        if numpy and dtype not in (torch.bfloat16,):
            arrays = [x.numpy() for x in arrays]
            options |= {x: options[x].numpy() for x in ("mask", "score") if isinstance(options.get(x), torch.Tensor)}
        given.append((arrays, options))
    repeated = [sl.attention(*arrays, **options) for arrays, options in given * 2]
    monkeypatch.setattr(dense, "repeat", lambda *_: (None, None))
    for found, (arrays, options) in zip(repeated, given * 2, strict=True):
        for a, b in zip(found, sl.attention(*arrays, **options), strict=True):
            assert (
                np.asarray(a).dtype == np.asarray(b).dtype if numpy and dtype != torch.bfloat16 else a.dtype == b.dtype
            )
            a, b = (torch.as_tensor(x).float() for x in (a, b))
            assert torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def test_an_array_that_is_added_twice_stands_for_no_two_arrays(rng, monkeypatch):
    """Where one array is added twice first, then two of its form: scores are added left to right, to the last bit, and
    each table has a gradient of its own.
    """
    q, k, v = qkv(rng, "float32", 2, 2, 2, 40, 130, 16, 16)
    biases = [rng.normal(size=(40, 130)).astype(np.float32) * x for x in (1e3, 1, 1e-3)]
    a, b, _ = tables = [sl.Table(x, copy=False) for x in biases]
    forget()

    def results(pair: Any, grads: Any) -> Any:
        arrays = [biases[tables.index(x)] for x in pair]
        out, lse = sl.attention(q, k, v, score=arrays, return_lse=True)
        *three, more = sl.attention_backward(q, k, v, out, lse, out, score=pair, grads=grads)
        return [x.tobytes() for x in (out, lse, *three, *more)]

    orders = [
        ([a, a], (a,)),
        ([a, b], (a,)),
        ([b, a], (a,)),
        ([b, a], ()),
        ([b, a], (a, b)),
        ([b, b], (b,)),
    ]
    found = [results(*x) for x in (*orders, *orders[::-1])]
    for x, got in zip((*orders, *orders[::-1]), found, strict=True):
        forget()
        assert got == results(*x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_bias_with_a_tangent_is_refused_by_a_prepared_call_too(rng):
    """Beside arrays that nobody can differentiate."""
    q, k, v = qkv(rng, "float32", 1, 1, 1, 40, 40, 16, 16)
    bias = torch.zeros(40, 40)
    for _ in range(2):
        sl.attention(q, k, v, score=bias)
    with forward_ad.dual_level(), pytest.raises(sl.Error, match="score: has a tangent"):
        sl.attention(q, k, v, score=forward_ad.make_dual(bias, torch.ones_like(bias)))


def test_a_prepared_call_keeps_no_array_of_a_mask(rng):
    q, k, v = (torch.from_numpy(x) for x in qkv(rng, "float32", 1, 2, 2, 40, 40, 16, 16))
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    first = sl.attention(q, k, v, mask=mask)
    gone = WeakKeyDictionary({mask: 0})
    del mask
    gc.collect()
    assert not gone and torch.equal(sl.attention(q, k, v, mask=torch.ones(40, 40, dtype=torch.bool).tril()), first)
