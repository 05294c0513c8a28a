"""Whatever is passed: odd objects (R12), arrays of other kinds, tensors without memory, and repeated calls whose
arguments change (R31).
"""

from __future__ import annotations

import ctypes
import decimal
import fractions
import math
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import FULL
from problems import qkv
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

import speedlight as sl
from speedlight import api
from speedlight.calls import Memo, Repeatable
from speedlight.machine import host_isas
from speedlight.results import fresh

SHAPE = (1, 2, 8, 16)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(3)]


# --- tensors whose numbers do not lie in memory


def resized(bytes_left):
    x = torch.ones(SHAPE)
    x.untyped_storage().resize_(bytes_left)
    return x


class Mine(torch.Tensor):
    """A tensor that computes in its own way."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


WITHOUT_MEMORY = {
    "no storage": lambda: resized(0),
    "a short storage": lambda: resized(4 * math.prod(SHAPE) - 4),
    "a fake": lambda: FakeTensorMode().from_tensor(torch.ones(SHAPE)),
    "meta": lambda: torch.ones(SHAPE, device="meta"),
    "zeros that are nowhere": lambda: torch._efficientzerotensor(SHAPE),
    "another way": lambda: torch.ones(SHAPE).as_subclass(Mine),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 8, 16)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(8, 16)], layout=torch.jagged),
    "sparse": lambda: torch.ones(SHAPE).to_sparse(),
    "mkldnn": lambda: torch.ones(SHAPE).to_mkldnn(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(SHAPE), 1.0, 0, torch.qint8),
    "negated": lambda: torch.ones(SHAPE, dtype=torch.complex64).conj().imag,
    "masked": lambda: torch.masked.masked_tensor(torch.ones(SHAPE), torch.ones(SHAPE, dtype=torch.bool)),
}


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of prototypes
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_tensors_without_memory_are_named(kind, name):
    given = dict(zip("qkv", tensors(), strict=True))
    out = torch.empty(SHAPE)
    sl.attention(**given, out=out)  # a call like the next one is prepared
    with pytest.raises(sl.Error, match=f"^{name}: "):
        sl.attention(**({"out": out} | given | {name: WITHOUT_MEMORY[kind]()}))


def test_memory_that_a_prepared_call_has_lost():
    q, k, v = tensors()
    sl.attention(q, k, v)
    assert len(api._prepared) > 0
    k.untyped_storage().resize_(0)
    with pytest.raises(sl.ArgumentError, match=r"^k: expected a tensor with memory for its \(1, 2, 8, 16\)"):
        sl.attention(q, k, v)
    with (
        FakeTensorMode(),
        pytest.raises(sl.Error, match="^out: expected a tensor whose numbers lie in memory; got FakeTensor"),
    ):
        sl.attention(q, q, v)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # PyTorch's own use of it
@pytest.mark.parametrize("transform", ["vmap", "functionalize"])
def test_transforms_of_torch_are_refused(transform):
    q, k, v = tensors()
    sl.attention(q, k, v)

    def call(x):
        return sl.attention(x, k, v).sum()

    run = {
        "vmap": lambda: torch.func.vmap(call)(q[None]),
        "functionalize": lambda: torch.func.functionalize(call)(q),
    }[transform]
    with pytest.raises(sl.Error, match="^q: "):
        run()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_tangents_and_gradients_beside_numpy_are_refused():
    q, k, v = tensors()
    sl.attention(q, k, v)
    with torch.autograd.forward_ad.dual_level():
        assert sl.attention(q, k, v).shape == q.shape
        dual = torch.autograd.forward_ad.make_dual(torch.zeros(2), torch.ones(2))
        with pytest.raises(sl.UnsupportedError, match="^sink_logits: has a tangent"):
            sl.attention(q.numpy(), k.numpy(), v.numpy(), sink_logits=dual)
    sinks = torch.zeros(2, requires_grad=True)
    with pytest.raises(sl.UnsupportedError, match="^sink_logits: requires grad"):
        sl.attention(q.numpy(), k.numpy(), v.numpy(), sink_logits=sinks)
    with torch.no_grad():
        sl.attention(q, k, v, sink_logits=sinks)
    parameter = torch.nn.Parameter(q, requires_grad=False)
    assert torch.equal(sl.attention(parameter, k, v), sl.attention(q, k, v))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"] if FULL else ["eager"])
def test_torch_compile_leaves_its_graph(backend):
    q, k, v = tensors()
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, capacity=99)
    pool = sl.PagePool(layers=1, pages=9, page_size=16, kv_heads=2, head_dim=16)

    def model(q, k, v):
        once = sl.attention(q * 2, k, v, causal=True) + 1
        step = cache.attend(0, q[:, :, :1] * 2, k[:, :, :1], v[:, :, :1])
        packed = pool.attend(0, [pool.sequence()], *(x[0].transpose(0, 1).contiguous() for x in (once, k, v)))
        return once + step + packed.transpose(0, 1)

    want = model(q, k, v)
    cache.clear()
    compiled = torch.compile(model, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert torch.equal(compiled(q, k, v), want)
            cache.clear()
    torch._dynamo.reset()


def test_new_tensors_ignore_the_default_device():
    q, k, v = tensors()
    for _ in range(2):
        with torch.device("meta"):
            out, lse = sl.attention(q, k, v, return_lse=True)
        assert out.device.type == lse.device.type == "cpu"


def test_new_tensors_may_be_what_a_mode_makes_of_them():
    """A prepared call asks those where they lie, too."""

    class Mine(torch.Tensor):
        pass

    class AllMine(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            x = function(*args, **(kwargs or {}))
            return x.as_subclass(Mine) if function in (torch.empty, torch.empty_like) else x

    q, k, v = tensors()
    want = sl.attention(q, k, v)
    with AllMine():
        new, address = fresh(q, SHAPE)
        assert type(new) is Mine and address == new.data_ptr()
        got = sl.attention(q, k, v)
    assert type(got) is Mine and torch.equal(got, want)


# --- other arrays


def test_byte_orders():
    """Arrays are native or refused; numbers of lists are read as what they are."""
    q, k, v = qkv(np.random.default_rng(0), "float32", 2, 2, 2, 5, 9, 8, 8)
    for at, name in enumerate(("q", "k", "v", "out")):
        given = [q, k, v, np.empty_like(q)]
        given[at] = given[at].astype(given[at].dtype.newbyteorder())
        with pytest.raises(sl.ArgumentTypeError, match=f"^{name}: expected native byte order; got >f4"):
            sl.attention(*given[:3], out=given[3])
    lists = {
        "sink_logits": np.array([0.5, 2.0], "f4"),
        "k_lengths": np.array([9, 3]),
        "q_lengths": np.array([5, 2]),
        "q_start": np.array([4, 1]),
    }
    want = sl.attention(q, k, v, causal=True, **lists)
    for name, x in lists.items():
        for _ in range(2):
            got = sl.attention(q, k, v, causal=True, **(lists | {name: x.astype(x.dtype.newbyteorder())}))
            assert got.tobytes() == want.tobytes()
    pages = k.reshape(2, 9, 2, 8)
    want = sl.attention_paged(q, pages, pages, [[1], [0]], [9, 3])
    assert (
        want.tobytes()
        == sl.attention_paged(q, pages, pages, np.array([[1], [0]], ">i8"), np.array([9, 3], ">i4")).tobytes()
    )
    x = np.ones((6, 2, 8), np.float32)
    packed = sl.attention(x, x, x, layout="lhd", cu_seqlens_q=np.array([0, 2, 6], ">i2"))
    assert packed.tobytes() == sl.attention(x, x, x, layout="lhd", cu_seqlens_q=[0, 2, 6]).tobytes()


def test_masked_arrays_are_refused():
    plain = {
        "q": np.ones((1, 2, 5, 8), np.float32),
        "k": np.ones((1, 2, 9, 8), np.float32),
        "v": np.ones((1, 2, 9, 8), np.float32),
    }
    more = {
        "out": np.ones_like(plain["q"]),
        "sink_logits": np.zeros(2),
        "k_lengths": np.array([9]),
        "q_lengths": np.array([5]),
    }
    for name, x in (plain | more).items():
        with pytest.raises(sl.ArgumentTypeError, match=f"^{name}: expected .*got .*MaskedArray"):
            sl.attention(**(plain | {name: np.ma.masked_array(x, mask=False)}))
    with pytest.raises(sl.ArgumentTypeError, match=r"^block_table: .* MaskedArray"):
        sl.attention_paged(plain["q"], *(np.ones((2, 9, 2, 8), np.float32),) * 2, np.ma.masked_array([[1]]), [9])


def test_an_empty_out():
    for shape, keys in (((0, 2, 5, 8), (0, 2, 5, 8)), ((1, 2, 0, 8), (1, 2, 5, 8)), ((1, 0, 5, 8), (1, 0, 5, 8))):
        q, k = np.ones(shape, np.float32), np.ones(keys, np.float32)
        out = np.empty(shape, np.float32)
        for _ in range(2):
            assert sl.attention(q, k, k, out=out) is out
            assert sl.attention(*map(torch.from_numpy, (q, k, k)), out=torch.empty(shape)).shape == shape


class Capsule:
    """An object with DLPack whose fields may be anything."""

    def __init__(self, name=b"dltensor", error=None, **fields):
        self.array = np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
        self.lengths, self.steps = (ctypes.c_int64 * 4)(*SHAPE), (ctypes.c_int64 * 4)(256, 128, 16, 1)
        given = {
            "data": self.array.ctypes.data,
            "device_type": 1,
            "ndim": 4,
            "code": 2,
            "bits": 32,
            "vector": 1,
            "shape": self.lengths,
        }
        from speedlight.arrays import _DLTensor

        pointers = {"shape", "strides"}
        fields = given | {"strides": self.steps} | fields
        self.tensor = _DLTensor(**{n: x for n, x in fields.items() if n not in pointers})
        for n in pointers:
            if fields[n] is not None:
                setattr(self.tensor, n, ctypes.cast(fields[n], ctypes.POINTER(ctypes.c_int64)))
        self.device, self.name, self.error = fields.get("device", (1, 0)), name, error

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        if self.error:
            raise self.error
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), self.name, None) if self.name else object()


def test_dlpack_capsules():
    q = Capsule().array
    want = sl.attention(q, q, q)
    for good in (Capsule(), Capsule(strides=None), Capsule(byte_offset=4, data=q.ctypes.data - 4)):
        assert sl.attention(good, q, q).tobytes() == want.tobytes()
    backwards = Capsule(strides=(ctypes.c_int64 * 4)(256, 128, -16, 1), byte_offset=7 * 64)
    assert sl.attention(backwards, q, q).tobytes() == sl.attention(q[:, :, ::-1], q, q).tobytes()


BAD_CAPSULES = [
    {"name": b"used_dltensor"}, {"name": b"dltensor_versioned"}, {"name": b""}, {"error": RuntimeError("no")},
    {"error": BufferError("no")},
    {"vector": 4}, {"code": 5}, {"bits": 8}, {"device_type": 10}, {"device": (10, 0)}, {"device": None},
    {"device": ("a", 0)}, {"ndim": 0},
    {"ndim": -1}, {"ndim": 1 << 20}, {"data": None}, {"shape": None}, {"shape": (ctypes.c_int64 * 4)(1, 2, -8, 16)},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD_CAPSULES, ids=",".join)
def test_bad_dlpack_capsules_are_named(fields):
    q = Capsule().array
    for name in "qkv":
        with pytest.raises(sl.Error, match=f"^{name}: "):
            sl.attention(**({"q": q, "k": q, "v": q} | {name: Capsule(**fields)}))


def test_a_gpu_array_of_negative_strides_is_named():
    """PyTorch, asked to take one, would end the process."""
    q = Capsule().array
    steps = (ctypes.c_int64 * 4)(256, 128, -16, 1)
    with pytest.raises(sl.ArgumentTypeError, match=r"^q: expected strides that are not negative on a GPU. Use q.copy"):
        sl.attention(Capsule(device=(2, 0), device_type=2, strides=steps, byte_offset=7 * 64), q, q)


# --- results are written when nothing can fail any more


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


def test_tables_that_may_change_are_read_anew(rng):
    q, k, v = qkv(rng, "float32", 1, 1, 1, 300, 300, 16, 16)
    limits = np.zeros(10_000_000, np.int8)
    table = sl.Table(limits, copy=False)
    mask = sl.expression(lambda b, h, i, j: table[(i * 97001 + j * 50021) % 10_000_000] > 0)
    assert not sl.attention(q, k, v, mask=mask).any()
    limits[:] = 1
    assert sl.attention(q, k, v, mask=mask).tobytes() == sl.attention(q, k, v, mask=sl.prefix(300)).tobytes()


# --- repeated calls


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
        monkeypatch.setattr(api, "_prepared", Memo(8, 1 << 20))
        want.append(sl.attention(q, k, v, **options, **{name: value}).tobytes())
    assert want[0] != want[1]
    monkeypatch.setattr(api, "_prepared", Memo(8, 1 << 20))
    for turn in range(6):
        assert sl.attention(q, k, v, **options, **{name: OTHERWISE[name][turn % 2]}).tobytes() == want[turn % 2]
    assert len(api._prepared) == 2


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
    again = Repeatable.again
    monkeypatch.setattr(Repeatable, "again", lambda *given: (calls.append(1), again(*given))[1])
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
        memo, untouched = api._prepared, None if out is None else _numpy(out).copy()
        calls: list[int] = []
        got = _outcome(lambda: sl.attention(*given, out=out, **options))  # noqa: B023
        hits += len(calls)
        if isinstance(got, tuple) and out is not None:
            assert _numpy(out).tobytes() == untouched.tobytes()
        monkeypatch.setattr(api, "_prepared", Memo(8, 1 << 20))
        if isinstance(out, torch.Tensor):
            out.copy_(torch.from_numpy(untouched))
        elif out is not None and out.flags.writeable:
            out[...] = untouched
        want = _outcome(lambda: sl.attention(*given, out=out, **options))  # noqa: B023
        ran += isinstance(want, list)
        assert got == want, options
        monkeypatch.setattr(api, "_prepared", memo)
    assert hits > 20 and ran > 40


# --- anything at all


class Whole(int):
    pass


class Real(float):
    pass


class Evil:
    """Its every answer is an error."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __len__(self):
        raise RuntimeError("no length")

    def tolist(self):
        raise RuntimeError("no list")


_BESIDE = ("q", "k", "v", "k_pages", "out", "cu_seqlens_k")  # what may have to go with an argument that is odd


def odd():
    """Objects that nobody should pass."""
    return [
        None, "", "a", [], {}, (), set(), {3}, object(), -1, 0, 1, 5, 10**400, -(10**5000), 1.5, float("nan"),
        float("inf"), -0.0,
        np.float16(1), np.int64(2), np.array(1), np.array("a"), np.array([object()]), np.zeros(3), np.zeros((2, 2, 2)),
        np.zeros(0),
        torch.tensor(1), torch.tensor([1.0]), torch.ones(2, requires_grad=True), torch.ones(2, device="meta"), range(3),
        range(10**9),
        "bhld", b"bhld", bytearray(3), memoryview(b"abc"), [0] * 100_000, [[1, 2], [3]], [None], ["a"], int, np.ndarray,
        torch.Tensor,
        lambda: 1, lambda *_: 1, lambda b, h, i, j: "a", lambda s, b, h, i, j: None, (i for i in range(3)), Whole(3),
        Real(0.5), True,
        fractions.Fraction(1, 3), fractions.Fraction(10**400), decimal.Decimal("0.5"),
        1j, Evil(), NotImplemented, ..., slice(3),
        np.datetime64("2020-01-01"), np.void(b"abc"), np.ma.masked, np.zeros(2, "V4"), np.zeros(2, [("a", "i4")]),
        sl.softcap(2.0),
        sl.causal(), sl, sl.table([1, 2]), iter([1]), torch.float32, np.dtype("f4"), Exception("a"),
        {"a": 1}, [1 << 70], [-1, 5],
    ]  # fmt: skip


def _calls():
    """Public calls, their right arguments, and what an error may name beside the argument that is wrong."""
    x = np.ones((1, 2, 5, 8), np.float32)
    pages = np.ones((3, 4, 2, 8), np.float32)
    options = dict.fromkeys(
        ("causal", "window", "mask", "score", "sink_logits", "q_start", "k_start", "scale", "layout", "cu_seqlens_q")
    )
    lengths = dict.fromkeys(("cu_seqlens_k", "lengths", "q_lengths", "k_lengths"))
    sizes = dict.fromkeys(
        (
            "batch",
            "q_heads",
            "kv_heads",
            "q_len",
            "k_len",
            "head_dim",
            "value_dim",
            "dtype",
            "exact",
            "device",
            "precision",
        )
    )
    given = {"q": x, "k": x, "v": x}
    paged = {"q": x, "k_pages": pages, "v_pages": pages, "block_table": [[0, 1]], "k_lengths": [5]}
    more = dict.fromkeys(("return_lse", "out", "engine"))
    few = (
        "causal",
        "window",
        "mask",
        "score",
        "sink_logits",
        "q_start",
        "scale",
        "layout",
        "cu_seqlens_q",
        "q_lengths",
    )
    return {
        "attention": (sl.attention, given, [*given, *options, *lengths, *more, "precision"]),
        "attention_paged": (sl.attention_paged, paged, [*paged, *few, *more]),
        "plan": (sl.plan, {"q_heads": 2, "q_len": 5, "head_dim": 8}, [*sizes, *options, *lengths]),
        "plan of arrays": (sl.plan, given, [*given, *options, *lengths, "device", "exact", "precision"]),
        "set_threads": (sl.set_threads, {"n": 1}, ["n"]),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _calls())
def test_odd_objects_are_named(name):
    """Every argument, every object: it is taken, or the error is one of ours and names the argument (or one that must
    go with it).
    """
    function, right, names = _calls()[name]
    wrong = []
    for argument in names:
        for x in odd():
            out = np.full((1, 2, 5, 8), 7, np.float32)
            call = right | ({"out": out} if name.startswith("attention") and argument != "out" else {}) | {argument: x}
            try:
                function(**call)
            except sl.Error as error:
                if str(error).split(":")[0] not in (argument, *_BESIDE) and argument not in ("mask", "score"):
                    wrong.append((argument, type(x).__name__, str(error)[:80]))
                if not (out == 7).all():
                    wrong.append((argument, type(x).__name__, "out was written"))
            except Exception as error:
                if argument not in ("mask", "score") or not callable(x):  # a callable's errors are its own
                    wrong.append((argument, type(x).__name__, repr(error)[:80]))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("seed", range(10 if FULL else 1))
def test_several_odd_objects_raise_and_write_nothing(seed):
    rng = np.random.default_rng(seed)
    objects, calls = odd(), list(_calls().values())
    for _ in range(1000 if FULL else 300):
        function, right, names = calls[rng.integers(len(calls))]
        chosen = {
            str(n): objects[rng.integers(len(objects))] for n in rng.choice(names, min(len(names), 3), replace=False)
        }
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function(**(right | chosen))
        except sl.Error as error:
            assert ":" in str(error) and len(str(error)) < 2000, chosen
        except Exception:
            if not any(callable(chosen.get(n)) for n in ("mask", "score")):
                raise
