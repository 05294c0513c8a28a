"""Arrays of other kinds: byte orders, masked and empty ones, and DLPack's capsules."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from problems import Pack, flow_of, qkv

import speedlight as sl
from speedlight.arrays.memory import Array, overlap

SHAPE = (1, 2, 8, 16)


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
        from speedlight.arrays.dlpack import _DLTensor

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


@pytest.mark.parametrize("attribute", ["__array_interface__", "__dlpack__", "__dlpack_device__"])
def test_properties_that_fail_are_named(attribute):
    """hasattr() lets through what is no AttributeError."""

    def failing(error):
        def read(self):
            raise error

        return type("Odd", (), {"__dlpack__": None, "shape": property(read), attribute: property(read)})()

    q = Capsule().array
    for name in ("q", "k", "v", "out"):
        with pytest.raises(sl.ArgumentTypeError, match=f"^{name}: .*Odd.{attribute} failed: no") as caught:
            sl.attention(**({"q": q, "k": q, "v": q} | {name: failing(RuntimeError("no"))}))
        assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(OSError, match="gone"):  # says nothing of the argument
        sl.attention(q, failing(OSError("gone")), q)
    with pytest.raises(sl.ArgumentTypeError, match=r"^mask: .*Odd.shape failed: no"):
        sl.causal() & failing(RuntimeError("no"))


def test_a_gpu_array_of_negative_strides_is_named():
    """PyTorch, asked to take one, would end the process."""
    q = Capsule().array
    steps = (ctypes.c_int64 * 4)(256, 128, -16, 1)
    with pytest.raises(sl.ArgumentTypeError, match=r"^q: expected strides that are not negative on a GPU. Use q.copy"):
        sl.attention(Capsule(device=(2, 0), device_type=2, strides=steps, byte_offset=7 * 64), q, q)


def _tokens(x):
    """(1, heads, length, dim) as the rows of a pool."""
    return x[0].swapaxes(0, 1).copy()


def _stepped(step, **sizes):
    """A call of a cache, and the keys that it then has."""

    def call(given, out):
        cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, **sizes)
        try:
            return step(cache, given, out).copy(), cache.keys(0)
        except sl.Error:
            assert cache.length(0) == 0
            raise

    return call


def _pooled(given, out):
    pool = sl.PagePool(layers=1, pages=32, page_size=16, kv_heads=2, head_dim=16)
    with pool.sequence() as sequence:
        try:
            bias, tokens = given["score"][0], [given[x] for x in "qkv"]
            got = pool.attend(0, [sequence], *tokens, score=lambda s, b, h, i, j: s + bias[h, i, j], out=out)
        except sl.Error:
            assert sequence.length() == 0
            raise
        return got.copy(), sequence.keys(0)


def _writing_calls():
    """Calls that write to `out` what they make of arrays: these, and the call."""
    rng = np.random.default_rng(5)
    q, k, v, long = (rng.standard_normal((1, 2, n, 16), dtype=np.float32) for n in (192, 192, 192, 2500))
    bias = rng.standard_normal((1, 2, 192, 192), dtype=np.float32)
    pages = [x[0].swapaxes(0, 1).reshape(12, 16, 2, 16).copy() for x in (k, v)]
    cos, sin = rng.standard_normal((2, 2500, 8), dtype=np.float32)
    lse = rng.standard_normal((2, 2, 192), dtype=np.float32)
    named = {"q": q, "k": k, "v": v, "score": bias}
    paged = {"q": q, "k_pages": pages[0], "v_pages": pages[1], "score": bias}
    chunk, options = {"q": long, "k": long + 1, "v": long - 1}, {"window": 64}
    return {
        "attention": (named, lambda x, out: (sl.attention(**x, out=out),)),
        "attention_paged": (
            paged, lambda x, out: (sl.attention_paged(**x, block_table=[[*range(12)]], k_lengths=[192], out=out),)
        ),
        "KVCache": (named, _stepped(lambda cache, x, out: cache.attend(0, **x, out=out), capacity=192)),
        "KVCache(window)": (chunk, _stepped(lambda cache, x, out: cache.attend(0, **x, out=out), **options)),
        "PagePool": ({n: x if n == "score" else _tokens(x) for n, x in named.items()}, _pooled),
        "rotary": ({"x": long, "cos": cos, "sin": sin}, lambda x, out: (sl.rotary(**x, out=out),)),
        "merge_states": (
            {"v": np.concatenate((q, k)).swapaxes(0, 1), "s": lse.swapaxes(0, 1)},
            lambda x, out: sl.merge_states(**x, out=(out, np.empty((2, 192), np.float32))),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", _writing_calls())
def test_results_over_an_argument_are_right_or_refused(name):
    """Whatever lies in the memory of `out`: a mask's numbers, too, and tokens of which a part waits to be stored."""
    given, call = _writing_calls()[name]
    shape = next(iter(given.values())).shape
    shape = shape if name != "merge_states" else (2, 192, 16)
    want = call(given, np.empty(shape, np.float32))
    for at, x in given.items():
        for shift in (0, 1, x.size // 2, x.size - 1):
            room = np.zeros(shift + max(x.size, math.prod(shape)), np.float32)
            lent = room[: x.size].reshape(x.shape)
            lent[...] = x
            before = room.copy()
            try:
                got = call(given | {at: lent}, room[shift : shift + math.prod(shape)].reshape(shape))
            except sl.Error as error:
                assert str(error).startswith(f"out: expected memory of its own; it overlaps {at}.")
                assert (room == before).all()
            else:
                assert all(a.tobytes() == b.tobytes() for a, b in zip(got, want, strict=True)), f"{at}, {shift}"


def test_arrays_on_a_gpu_overlap_where_they_share_a_byte():
    """Where they lie tells, not what is there: pages of keys beside pages of values do not."""
    room = Array("k", 1 << 40, (9, 16, 2, 8), (1024, 32, 16, 2), "float16", "torch", True, None, "cuda:0")
    assert not overlap(room, dataclasses.replace(room, address=room.address + 512))
    assert overlap(room, dataclasses.replace(room, address=room.address + 510))
    assert not overlap(room, dataclasses.replace(room, device="cuda:1"))


def test_kinds_of_arrays_of_which_gradients_are_computed(rng):
    everything = [*(arrays := qkv(rng, "float32", 1, 2, 2, 20, 30, 8, 8)), *flow_of(rng, arrays)]
    want = sl.attention_backward(*everything)
    tensors = [torch.from_numpy(x) for x in everything]
    for _ in range(2):  # the first call, then the memoised one
        got = sl.attention_backward(*tensors)
        assert all(type(x) is torch.Tensor for x in got)
        same([x.numpy() for x in got], want)
    halves = [x if n in (4, 6) else x.bfloat16() for n, x in enumerate(tensors)]
    got = sl.attention_backward(*halves)
    assert all(x.dtype is torch.bfloat16 for x in got)
    same_as = [x if n in (4, 6) else x.astype(ml_dtypes.bfloat16) for n, x in enumerate(everything)]
    same([x.view(torch.int16).numpy() for x in got], [x.view(np.int16) for x in sl.attention_backward(*same_as)])
    same(sl.attention_backward(*(Pack(x) for x in everything)), want)
    same(sl.attention_backward(*(Pack(x) for x in halves)), sl.attention_backward(*same_as))


def same(one, other):
    assert [x.tobytes() for x in one] == [x.tobytes() for x in other]
