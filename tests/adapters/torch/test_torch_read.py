"""Arrays that machine code reads for repeated calls: what Python reads, the same bits, and nothing that it may not."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import threading
import tracemalloc
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import FULL
from injection import interrupted, needs_places, places, spread
from repeated import counted, forget, in_python, kept, last_used, read_by_python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import speedlight as sl
import speedlight.torch
from speedlight import engines
from speedlight.cpu.memory.records import READER
from speedlight.cpu.runtime import compile as compiling
from speedlight.cpu.runtime import repeating, workers
from speedlight.host.insides import TORCH
from speedlight.problem.prepared import array_places, prepared_calls, read_plainly

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels

HEADS, DIM = 4, 32
WINDOW, BAND, CAPPED = (20, None), sl.window(20, 3) | sl.prefix(2), sl.softcap(2.0)
BEHIND = sl.padding(np.arange(33) > np.array([[3], [9]]))


class Mine(torch.Tensor):
    """A class of somebody's."""


@pytest.fixture
def counts():
    """What machine code does meanwhile; skips where this process has no such code."""
    if repeating.functions().run is None:
        pytest.skip("Python repeats all calls here")
    with counted() as found:
        yield found


def drawn(batch, queries, keys, heads=HEADS, kv_heads=None, dtype=torch.float32, like=torch.randn):
    sizes = (heads, queries), (kv_heads or heads, keys), (kv_heads or heads, keys)
    return [like(batch, h, n, DIM, dtype=dtype) for h, n in sizes]


def by_python(call):
    """Returns what a call returns where Python reads and runs."""
    with in_python():
        return call()


def same(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
    a, b = (x.contiguous().view(torch.uint8) for x in (a, b))
    assert torch.equal(a, b)


# --- repeated calls have the bits of Python's way

# a kind's name: a call of it, by a number
KINDS = {
    "decode": lambda n: (drawn(2, 1, 40 + n), {}),
    "decode, one item": lambda n: (drawn(1, 1, 1 + n), {}),
    "decode, grouped": lambda n: (drawn(2, 1, 40 + n, kv_heads=1), {}),
    "decode, few queries, causal": lambda n: (drawn(3, 5, 40 + n), {"causal": True}),
    "decode, past a span": lambda n: (drawn(1, 1, 1022 + n), {}),
    "decode, in parts": lambda n: (drawn(1, 1, 6000 + n, 1), {}),
    "decode, bfloat16": lambda n: (drawn(2, 1, 40 + n, dtype=torch.bfloat16), {}),
    "decode, float64": lambda n: (drawn(2, 1, 40 + n, dtype=torch.float64), {}),
    "decode, padded": lambda n: (drawn(3, 1, 40 + n), {"mask": seen(3, 1, 1, 40 + n)}),
    "decode, a part of a mask": lambda n: (drawn(3, 1, 40 + n), {"mask": seen(3, 1, 1, 90)[..., n : 40 + 2 * n]}),
    "decode, a bias": lambda n: (drawn(2, 1, 40 + n), {"score": torch.randn(1, HEADS, 1, 40 + n)}),
    "decode, a bias of every item": lambda n: (drawn(2, 1, 40 + n), {"score": torch.randn(2, HEADS, 1, 40 + n)}),
    "decode, a bias of two dims": lambda n: (drawn(2, 1, 40 + n), {"score": torch.randn(1, 90)[:, n : 40 + 2 * n]}),
    "decode, a mask of rows": lambda n: (drawn(3, 5, 40 + n), {"mask": seen(3, 1, 5, 40 + n)}),
    "decode, a part of a mask of rows": lambda n: (
        drawn(2, 5, 40 + n), {"mask": seen(90, 90)[n : n + 5, n : 40 + 2 * n], "causal": True}
    ),
    "decode, a bias of rows with -inf": lambda n: (drawn(2, 16, 1020 + n), {"score": hiding(1, HEADS, 16, 1020 + n)}),
    "decode, keys of a wider buffer": lambda n: (cut(n), {}),
    "decode, one batch of keys": lambda n: ([torch.randn(3, HEADS, 1, DIM), *drawn(1, 1, 40 + n)[1:]], {}),
    "decode, a window": lambda n: (drawn(2, 2, 40 + n), {"window": WINDOW, "causal": True}),
    "decode, a pattern": lambda n: (drawn(2, 1, 40 + n), {"mask": BAND}),
    "decode, a function": lambda n: (drawn(2, 3, 40 + n), {"score": CAPPED, "causal": True}),
    "decode, pattern and bias": lambda n: (drawn(2, 1, 40 + n), {"mask": BAND, "score": hiding(1, HEADS, 1, 40 + n)}),
    "decode, tokens before heads": lambda n: (
        [torch.randn(2, m, HEADS, DIM) for m in (1, 9 + n, 9 + n)], {"layout": "blhd"}
    ),
    "decode, dropout": lambda n: (drawn(2, 1, 40 + n), {"dropout": 0.5, "seed": 2**63 + n}),
    "self, a table and a function": lambda n: (drawn(2, 33, 33), {"mask": BEHIND, "score": CAPPED}),
    "self": lambda n: (drawn(2, 33, 33), {}),
    "self, causal": lambda n: (drawn(2, 33, 33), {"causal": True}),
    "self, top-left, a scale": lambda n: (drawn(2, 20, 33), {"causal": "top-left", "scale": 0.1}),
    "self, half": lambda n: (drawn(2, 33, 33, dtype=torch.float16), {}),
    "self, transposed": lambda n: ([torch.randn(2, 33, HEADS, DIM).transpose(1, 2) for _ in range(3)], {}),
    "self, of one tensor": lambda n: (torch.randn(2, 33, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(), {}),
    "self, a mask": lambda n: (drawn(2, 33, 33), {"mask": seen(33, 33)}),
    "self, padded": lambda n: (drawn(2, 33, 33), {"mask": padding(9 + n, 33)}),
    "self, a bias": lambda n: (drawn(2, 33, 33), {"score": torch.randn(1, HEADS, 33, 33)}),
    "self, a bias with -inf": lambda n: (drawn(2, 33, 33), {"score": hiding(2, 1, 33, 33)}),
    "self, a bias of bfloat16": lambda n: (drawn(2, 33, 33), {"score": torch.randn(1, HEADS, 33, 33).bfloat16()}),
    "self, sinks": lambda n: (drawn(2, 33, 33), {"sink_logits": [0.5, 1.0, -1.0, 2.0]}),
    "cross, expanded": lambda n: (drawn(2, 20, 70), {"mask": seen(2, 1, 1, 70).expand(2, HEADS, 20, 70)}),
    "packed": lambda n: (
        [torch.randn(33, HEADS, DIM) for _ in range(3)], {"layout": "lhd", "cu_seqlens_q": [0, 9, 33]}
    ),
}  # fmt: skip
PLAIN_ONLY = ("self, a bias of bfloat16",)  # its copy in float32 is Python's to make


def seen(*shape):
    return torch.rand(shape) > 0.3


def padding(*lengths):
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, None]


def hiding(*shape):
    return torch.randn(shape).masked_fill(~seen(*shape), -torch.inf)


def cut(n):
    q, k, v = drawn(2, 1, 90)
    return q, k[:, :, : 40 + n], v[:, :, n : 40 + 2 * n]


@pytest.mark.parametrize("of_numpy", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_bits_are_those_of_pythons_way(counts, name, of_numpy):
    """Each with other arrays, of as many keys or one more."""
    if of_numpy and name in ("decode, bfloat16", "self, a bias of bfloat16"):
        pytest.skip("NumPy has no bfloat16")
    torch.manual_seed(0)
    for n in range(6):
        arrays, options = KINDS[name](n)
        if of_numpy:
            arrays = [x.numpy() for x in arrays]
            options = {key: x.numpy() if isinstance(x, torch.Tensor) else x for key, x in options.items()}

        def call(arrays=arrays, options=options):
            found = sl.attention(*arrays, **options, return_lse=n % 2 == 1)  # noqa: B023
            return [torch.as_tensor(x) for x in (found if type(found) is tuple else (found,))]

        with torch.no_grad():
            want = by_python(call)
            for _ in range(2):
                for a, b in zip(call(), want, strict=True):
                    same(a, b)
    assert counts.read >= 12
    assert counts.ran == 0 if name in PLAIN_ONLY else counts.ran >= 7


# --- what is read


def readable_tensors():
    """Tensors that machine code reads, by name."""
    x = torch.randn(6, 4, 8, 16)
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8,
             torch.int16, torch.int32, torch.int64, torch.complex64]  # fmt: skip
    return {
        **{str(kind): x.to(kind) for kind in kinds},
        "part": x[1:5, ::2, 3:, 1:9],
        "columns apart": x[..., ::2],
        "transposed": x.transpose(1, 2),
        "permuted": x.permute(3, 1, 0, 2),
        "expanded": x[:1].expand(3, -1, -1, -1),
        "rows alike": x[:, :, :1].expand(-1, -1, 5, -1),
        "overlapping": x.as_strided((2, 3, 4, 5), (1, 1, 1, 1), 7),
        **{f"one at {n}": x.narrow(n, 1, 1) for n in range(4)},
        "one of another stride": torch.randn(6, 1, 8, 16).as_strided((6, 1, 8, 16), (128, 999, 16, 1)),
        "three": x[0],
        "two": x[0, 0],
        "one": x[0, 0, 0],
        "none": torch.tensor(2.0),
        "the last": torch.randn(9)[8],
        "requires grad": torch.randn(6, 4, 8, 16, requires_grad=True),
    }


def other_tensors():
    """Tensors that no read takes, by name."""
    x = torch.randn(6, 4, 8, 16)
    short, nothing = torch.randn(3, 4, 5)[1:], torch.randn(3, 4)
    short.untyped_storage().resize_(short.nbytes)
    nothing.untyped_storage().resize_(0)
    return {
        "five dimensions": x[None],
        "empty": x[:0],
        "a parameter": torch.nn.Parameter(x),
        "a subclass": x.as_subclass(Mine),
        "a fake": FakeTensorMode().from_tensor(x),
        "negated": torch._neg_view(x),
        "short": short,
        "without memory": nothing,
        "meta": x.to("meta"),
        "nested": torch.nested.nested_tensor([x[0], x[1, :2]]),
        "sparse": x.to_sparse(),
        "rows of sparse": x[0, 0].to_sparse_csr(),
        "mkldnn": x.to_mkldnn(),
        "zeros that are nowhere": torch._efficientzerotensor((2, 3)),
        "None": None,
        "a number": 5,
        "a list": [1.0],
        "a type": torch.Tensor,
    }


def readable_arrays():
    """Arrays of NumPy that are read, by name."""
    x = np.random.default_rng(0).standard_normal((6, 4, 8, 16))
    locked = x.copy()
    locked.flags.writeable = False
    shifted = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float64).reshape(x.shape)
    codes = "?bBhHiIlLqQefdgFDG"
    return {
        **{code: (x * 3).astype(code) for code in codes},
        "bfloat16": x.astype(ml_dtypes.bfloat16),
        "another byte order": x.astype(">f8"),
        "locked": locked,
        "shifted": shifted,
        "reversed": x[::-1, :, ::-1],
        "part": x[1:5, ::2, 3:, 1:9],
        "transposed": x.swapaxes(1, 2),
        "broadcast": np.broadcast_to(x[:1], (3, 4, 8, 16)),
        "structured": np.zeros((3, 4), [("a", "f4"), ("b", "i4")]),
        "objects": np.array([[1, "a"]], object),
        "texts": np.array(["a", "bc"]),
        "dates": np.array([5], "M8[s]"),
        "one": x[0, 0, 0],
        "none": np.array(2.0),
        "Fortran's": np.asfortranarray(x),
    }


def other_arrays():
    x = np.ones((2, 3, 4, 5), np.float32)
    return {
        "five dimensions": x[None],
        "empty": x[:0],
        "a subclass": x.view(type("Mine", (np.ndarray,), {})),
        "masked": np.ma.array(x),
        "a scalar": np.float32(3),
    }


def same_places(a, b):
    """Compares what two ways read; strides of dimensions of one say nothing."""
    for (at, sizes, steps), (other, others, theirs) in zip(array_places(a), array_places(b), strict=True):
        assert (at, sizes) == (other, others)
        assert [x for n, x in zip(sizes, steps, strict=True) if n > 1] == [
            x for n, x in zip(sizes, theirs, strict=True) if n > 1
        ]


@pytest.mark.parametrize("arrays", [readable_tensors, readable_arrays])
def test_both_ways_read_the_same(counts, arrays):
    """Addresses, sizes and strides; two arrays have one layout in both or in neither."""
    given, read, found = arrays(), repeating.functions().read, {}
    with torch.no_grad():
        for name, x in given.items():
            before = x.is_conj() if isinstance(x, torch.Tensor) else None
            by_machine, plainly = read(0, x), read_plainly(0, x)
            assert by_machine is not None and plainly is not None, name
            same_places(by_machine[1], plainly[1])
            assert before is None or not before
            found[name] = by_machine[0], plainly[0], type(by_machine[0]) is bytes
        fast = [name for name, x in found.items() if x[2]]
        slow = {"bfloat16", "another byte order", "structured", "texts", "dates", "shifted", "F", "D", "G"}
        assert set(found) - set(fast) == slow & set(found)
        for name in fast:
            for other in fast:
                a, b = found[name], found[other]
                assert a[0] != b[0] or a[1] == b[1] or 1 in given[name].shape, (name, other)
                is_one_kind = given[name].dtype == given[other].dtype and not isinstance(given[name], np.ndarray)
                assert a[1] != b[1] or a[0] == b[0] or not is_one_kind, (name, other)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:Sparse CSR")
@pytest.mark.parametrize("arrays", [other_tensors, other_arrays])
def test_neither_way_reads_others(counts, arrays):
    read = repeating.functions().read
    with torch.no_grad():
        for name, x in arrays().items():
            q = torch.randn(2, 3) if arrays is other_tensors else np.ones((2, 3), np.float32)
            for given in ((x,), (q, x), (x, q), (q, q, x)):
                assert read(0, *given) is None and read_plainly(0, *given) is None, name
        assert read(0) is None or read(0) == read_plainly(0)


def test_what_requires_grad_is_read_where_nobody_records(counts):
    x, read = torch.randn(2, 3, requires_grad=True), repeating.functions().read
    assert read(0, x) is None and read(0, x, x) is None
    plain = read(0, x.detach())
    with torch.no_grad():
        assert read(0, x)[1] == plain[1]
    with torch.inference_mode():
        inner = torch.randn(2, 3)
        assert type(read(0, inner)[0]) is bytes
        same_places(read(0, inner)[1], read_plainly(0, inner)[1])


def test_shared_memory_stays_shared(counts):
    """torch._lazy_clone() copies at the first write; the exchange API would copy at once."""
    whole = torch.randn(2, HEADS, 40, DIM)
    lazy, read = torch._lazy_clone(whole), repeating.functions().read
    with torch.no_grad():
        for x in (lazy, whole, lazy[1:], lazy.transpose(1, 2)):
            for given in ((x,), (torch.randn(3), x)):
                same_places(read(0, *given)[1], read_plainly(0, *given)[1])
        want = sl.attention(*[whole.clone() for _ in range(3)])
        for _ in range(5):
            same(sl.attention(lazy, lazy, lazy), want)
            same(sl.attention(whole.clone(), lazy, whole), want)
        own = torch.randn(40, 40)
        bias, want = torch._lazy_clone(own), sl.attention(lazy, lazy, lazy, score=own.clone())
        for _ in range(5):
            same(sl.attention(lazy, lazy, lazy, score=bias), want)
    assert all([torch._C._is_cow_tensor(x) for x in (lazy, whole, bias)])


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_nothing_is_read_by_machine_code_where_calls_are_more_than_calls(counts):
    """Modes, transforms, traces, tangents."""
    x, read, found = torch.randn(2, 3), repeating.functions().read, {}
    forward_ad = torch.autograd.forward_ad

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    def look(name, x=x):
        found.setdefault(name, read(0, x))  # a trace is checked by calls that it is not
        return x * 1

    with torch.no_grad():
        look("plain")
        torch.func.vmap(lambda y: look("vmap", y))(x)
        torch.func.vmap(lambda y: (look("beside vmap"), y)[1])(x)
        torch.jit.trace(lambda y: look("trace", y), x)
        with Passing():
            look("dispatch mode")
        with FakeTensorMode(allow_non_fake_inputs=True):
            look("fake mode")
        with forward_ad.dual_level():
            look("tangents")
    torch.func.grad(lambda y: look("grad", y).sum())(x)
    torch.func.jvp(lambda y: look("jvp", y), (x,), (x,))
    look("recorded")
    fast = [name for name, x in found.items() if x is not None and type(x[0]) is bytes]
    assert fast == ["plain"]
    assert {name for name, x in found.items() if x is None} >= {"vmap", "trace", "grad", "jvp", "tangents"}


def test_readers_of_other_threads(counts):
    """Each has a grad mode of its own."""
    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        want, bad = sl.attention(q, k, v), []

    def work():
        with torch.no_grad():
            for n in range(200):
                x = q.clone() if n % 2 else q
                if not torch.equal(sl.attention(x, k, v), want):
                    bad.append(n)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert not bad and counts.read >= 600 and counts.ran >= 590


def test_arrays_that_are_gone_are_not_read(counts):
    """Each call's lie where the last one's lay, or elsewhere."""
    rng = np.random.default_rng(0)
    kept_results = []
    with torch.no_grad():
        for n in range(40):
            given = [rng.standard_normal((1, 2, 1 if x == 0 else 30 + n % 5, 16)).astype(np.float32) for x in range(3)]
            got = sl.attention(*given), sl.attention(*map(torch.from_numpy, given))
            with read_by_python():
                forget_nothing = sl.attention(*[x.copy() for x in given])
            assert got[0].tobytes() == got[1].numpy().tobytes() == forget_nothing.tobytes()
            kept_results.append((got[0], got[0].tobytes()))
            del given
            gc.collect(0)
    assert all([x.tobytes() == text for x, text in kept_results])
    assert counts.ran > 60


# --- what is not alike is Python's


def lie_otherwise(x):
    """The same numbers: heads and rows in each other's place, in a wider buffer, and one head or row for all."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 3).to(x.dtype)
    wide[..., 1::2] = x
    return [
        x.transpose(1, 2).contiguous().transpose(1, 2),
        wide[..., 1::2],
        x[:, :1].expand_as(x),
        x[:, :, :1].expand_as(x),
    ]


@pytest.mark.parametrize("queries", [1, 33])
def test_tensors_that_lie_otherwise(counts, queries):
    """One of a prepared call's at a time."""
    torch.manual_seed(0)
    given = [*drawn(2, queries, 40), torch.rand(2, HEADS, queries, 40) > 0.3]

    def attend(q, k, v, mask):
        return sl.attention(q, k, v, mask=mask)

    with torch.no_grad():
        for n in range(4):
            for x in lie_otherwise(given[n]):
                other = [*given[:n], x, *given[n + 1 :]]
                for _ in range(3):
                    attend(*given)
                want = by_python(lambda other=other: attend(*other))
                for _ in range(3):
                    same(attend(*other), want)
    assert counts.ran >= 60


@pytest.mark.parametrize("by", ["machine code", "Python"])
def test_heads_inside_of_a_row_have_a_call_of_their_own(counts, by):
    """Tasks take several heads of a row together; how far rows lie apart is no matter."""
    q, k, v = drawn(2, 1, 40)
    beside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    wider = [torch.cat([x, x], 1)[:, :HEADS] for x in (k, v)]
    with torch.no_grad(), read_by_python() if by == "Python" else contextlib.nullcontext():
        for number, given in ((1, (k, v)), (1, wider), (2, beside), (2, (k, v))):
            for _ in range(2):
                sl.attention(q, *given)
            assert len(kept()) == number


def with_hidden(name):
    """Ways to call with the arguments of a prepared call that are not plain, and must be Python's."""
    jvp = torch.autograd.forward_ad
    q, k, v = drawn(2, 1, 40)

    def attend(q=q, k=k, v=v):
        return speedlight.torch.attention(q, k, v)

    def follow():
        with torch.enable_grad():
            out = attend(q.clone().requires_grad_())
            known = sl.attention(q.clone().requires_grad_(), k, v)
        assert out.requires_grad and known.requires_grad
        return out.detach()

    def tangent():
        with jvp.dual_level(), torch.enable_grad():
            out = attend(jvp.make_dual(q, q))
            assert jvp.unpack_dual(out).tangent is not None
            return jvp.unpack_dual(out).primal

    def transform():
        return torch.func.vmap(attend)(q[None], k[None], v[None])[0]

    def trace():
        return torch.jit.trace(lambda q: speedlight.torch.attention(q, k, v), q)(q)

    return {
        "recorded": follow,
        "a tangent": tangent,
        "vmap": transform,
        "traced": trace,
        "autocast": lambda: autocast(attend),
        "a subclass": lambda: attend(q.as_subclass(Mine)).as_subclass(torch.Tensor),
        "a parameter": lambda: attend(torch.nn.Parameter(q)),
        "an array": lambda: torch.from_numpy(sl.attention(*[x.numpy() for x in (q, k, v)])),
        "fewer threads": lambda: with_threads(attend),
        "inference": lambda: inferred(attend),
    }[name], attend


def autocast(call):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call()
    assert out.dtype is torch.bfloat16
    return out


def inferred(call):
    with torch.inference_mode():
        out = call()
    assert out.is_inference()
    return out.clone()


def with_threads(call):
    try:
        sl.set_threads(1)
        return call()
    finally:
        sl.set_threads(None)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("name", ["recorded", "a tangent", "vmap", "traced", "autocast", "a subclass", "a parameter",
                                  "an array", "fewer threads", "inference"])  # fmt: skip
def test_what_is_not_alike_is_taken_as_a_new_call(counts, name):
    torch.manual_seed(0)
    call, attend = with_hidden(name)
    with torch.no_grad():
        for _ in range(3):
            want = attend()
        assert counts.ran >= 1
        for _ in range(3):
            out = call()
            if name in ("autocast", "a tangent"):  # of bfloat16; by the transform's own formula
                assert (out.float() - want).abs().max() < (0.05 if name == "autocast" else 1e-6)
            else:
                same(out.detach(), want)
            before = counts.ran
            same(attend(), want)
            assert counts.ran == before + 1


def test_negated_and_short_tensors_are_refused(counts):
    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
        short = torch.randn(3, HEADS, 40, DIM)[1:]  # its storage has the bytes, but from an earlier place on
        short.untyped_storage().resize_(short.nbytes)
        for _ in range(2):
            with pytest.raises(sl.Error, match="lazily negated"):
                sl.attention(q, torch._neg_view(k), v)
            for given in ((q, short, v), (q, k, short)):
                with pytest.raises(sl.Error, match="memory"):
                    sl.attention(*given)
            with pytest.raises(sl.Error):
                sl.attention(q, k.to("meta"), v)
        same(sl.attention(q, k, v), want)


def test_what_is_no_tensor_is_refused_as_in_a_new_call(counts):
    q, k, v = drawn(2, 1, 40)
    wrong = (None, 5, "k", object(), [k], k.numpy(), k[0], k[:, :2], k[:1], k[:, :, 1:], k.to_sparse(), k.cfloat())
    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
        before = counts.ran
        for x in wrong:
            for given in ((q, x, v), (q, k, x)):
                with pytest.raises(sl.Error) as raised:
                    sl.attention(*given)
                with pytest.raises(sl.Error, match=re.escape(str(raised.value))):
                    sl.attention(*[y.clone() if type(y) is torch.Tensor else y for y in given], engine="cpu")
        assert counts.ran == before
        same(sl.attention(q, torch.nn.Parameter(k), v), want)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_trace_is_refused_by_calls_that_are_prepared(counts):
    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        for _ in range(3):
            sl.attention(q, k, v)
        with pytest.raises(sl.Error, match="trace"):
            torch.jit.trace(lambda q: sl.attention(q, k, v), q)


def test_torch_doors_have_rules_of_their_own(counts):
    """What attention() takes, grouped heads, is refused by PyTorch's function unless it is said."""
    (q, k, v), mask = drawn(2, 1, 40, kv_heads=2), torch.rand(2, 1, 1, 40) > 0.3
    with torch.no_grad(), speedlight.torch.sdpa():
        for _ in range(4):
            want = sl.attention(q, k, v, mask=mask)
            same(F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), want)
            with pytest.raises(sl.Error, match="enable_gqa"):
                F.scaled_dot_product_attention(q, k, v, mask)
            with pytest.raises(sl.Error, match="attn_mask"):
                F.scaled_dot_product_attention(q, k[:, :, :39], v[:, :, :39], mask, enable_gqa=True)
            with pytest.raises(sl.Error, match="v: "):
                sl.attention(q, k, v[:, :, :39])
    assert counts.ran >= 5


def test_a_mask_that_requires_grad_has_pytorchs_result(counts):
    """A contiguous one, whatever q is like."""
    q, k, v = (torch.randn(2, 33, HEADS, DIM).transpose(1, 2) for _ in range(3))
    bias = torch.randn(1, 1, 33, 33)
    with torch.no_grad(), speedlight.torch.sdpa():
        for _ in range(3):
            want = F.scaled_dot_product_attention(q, k, v, bias)
        assert counts.ran >= 1 and want.stride() == q.stride()
        same(F.scaled_dot_product_attention(q, k, v, bias.requires_grad_()), want.contiguous())


def test_settings_are_read_at_each_call(counts, monkeypatch):
    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
        monkeypatch.setenv("SPEEDLIGHT_ISA", "no such unit")
        for _ in range(2):
            with pytest.raises(sl.Error, match="SPEEDLIGHT_ISA"):
                sl.attention(q, k, v)
        monkeypatch.delenv("SPEEDLIGHT_ISA")
        same(sl.attention(q, k, v), want)


# --- results


@pytest.mark.parametrize("queries", [1, 33])
@pytest.mark.parametrize("door", ["attention", "torch.attention", "sdpa"])
def test_results_lie_as_those_of_a_new_call(counts, door, queries):
    """Dimensions of one have any strides in q: a repeated call's result has the strides that a new one's has."""
    sizes = [(2, HEADS, queries), (1, HEADS, queries), (2, 1, queries), (1, 1, queries)]
    attend = {
        "attention": sl.attention,
        "torch.attention": speedlight.torch.attention,
        "sdpa": F.scaled_dot_product_attention,
    }[door]
    orders = ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3))
    with torch.no_grad(), speedlight.torch.sdpa():
        for shape in sizes:
            for order in orders:
                whole = (*shape, DIM)
                base = torch.randn([whole[n] for n in order]).permute([order.index(n) for n in range(4)])
                variants = [base]
                for n in range(3):
                    if shape[n] == 1:
                        for step in (0, 1, 5, 7777):
                            steps = [*base.stride()]
                            steps[n] = step
                            variants.append(base.as_strided(base.shape, steps))
                k, v = torch.randn(shape[0], shape[1], 40, DIM), torch.randn(shape[0], shape[1], 40, DIM)
                wants = []
                for q in variants:
                    forget()
                    wants.append(attend(q, k, v))
                for q, want in [*zip(variants, wants, strict=True)] * 3:
                    same(attend(q, k, v), want)
    assert counts.ran > 40


def test_what_a_mode_makes_of_results(counts):
    """A mode of PyTorch's may make another tensor than machine code has asked for."""
    q, k, v = drawn(2, 33, 33)
    made = {
        "meta": lambda x: torch.empty_like(x, device="meta"),
        "a subclass": lambda x: torch.empty_like(x).as_subclass(Mine),
        "nothing": lambda x: None,
        "an error": lambda x: 1 / 0,
        "sparse": lambda x: torch.zeros_like(x).to_sparse(),
    }

    class Making(TorchFunctionMode):
        make = staticmethod(lambda x: torch.empty_like(x))

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.empty_like:
                return self.make(*args)
            return function(*args, **(kwargs or {}))

    def outcome():
        try:
            return sl.attention(q, k, v)
        except (sl.Error, ZeroDivisionError, AttributeError, TypeError, RuntimeError) as error:
            return type(error), str(error)

    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
        for name, make in made.items():
            mode = Making()
            mode.make = make
            with mode:
                got, plain = outcome(), by_python(lambda: [outcome() for _ in range(3)])[2]
            assert type(got) is type(plain), name
            if isinstance(got, tuple):
                assert got == plain, name
            before = counts.ran
            same(sl.attention(q, k, v), want)
            assert counts.ran == before + 1, name


def test_errors_of_a_mode_are_not_swallowed(counts):
    """PyTorch's functions that read a tensor may be a mode's, which may raise, or be interrupted."""
    q, k, v = drawn(2, 1, 40)

    class Stopping(TorchFunctionMode):
        at = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.at -= 1
            if not self.at:
                raise KeyboardInterrupt
            return function(*args, **(kwargs or {}))

    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
        for n in range(1, 40):
            mode = Stopping()
            mode.at = n
            with mode, contextlib.suppress(KeyboardInterrupt):
                same(sl.attention(q, k, v), want)
                assert mode.at > 0, "the interrupt was swallowed"
                break
            same(sl.attention(q, k, v), want)
        else:
            pytest.fail("more places than were looked at")


def test_modes_that_make_other_tensors(counts):
    calls = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        for _ in range(3):
            want = speedlight.torch.attention(q, k, v)
        with Spy():
            same(speedlight.torch.attention(q, k, v), want)
        assert any(["speedlight" in x for x in calls])
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert type(speedlight.torch.attention(q, k, v)) is not torch.Tensor


def test_lookups_past_a_table_are_errors(counts):
    """The call before and after has other keys; nothing wrong is kept, and `out` is as it was."""
    few = sl.table(np.arange(43.0))
    score = sl.expression(lambda s, b, h, i, j: s + few[j], "score")
    for like in (torch.randn, lambda *x, dtype: torch.randn(*x).numpy()):
        with torch.no_grad():
            for _ in range(3):
                for n in range(43, 39, -1):
                    given = drawn(2, 1, n, like=like)
                    got, want = sl.attention(*given, score=score), by_python(lambda: sl.attention(*given, score=score))  # noqa: B023
                    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
                out = torch.zeros(2, HEADS, 1, DIM) if like is torch.randn else np.zeros((2, HEADS, 1, DIM), np.float32)
                with pytest.raises(sl.Error, match="43"):
                    sl.attention(*drawn(2, 1, 44, like=like), score=score)
                with pytest.raises(sl.Error, match="43"):
                    sl.attention(*drawn(2, 1, 44, like=like), score=score, out=out)
                assert not out.any()
    assert counts.ran >= 8


# --- what is held


def test_nothing_is_kept_and_nothing_is_lost(counts):
    """References: of what is returned, of what was given, of the objects that machine code hands out; and memory."""
    q, k, v = drawn(2, 1, 40)
    mask, arrays = torch.rand(2, 1, 1, 40) > 0.3, [x.numpy() for x in drawn(2, 1, 40)]
    here, negated = repeating.functions(), torch._neg_view(q)
    common = None, True, False, torch.Tensor, np.ndarray, torch.empty_like, here._held[0], torch.float32
    lot = 10_000 if FULL else 2500
    cache, token = sl.KVCache(layers=1, kv_heads=HEADS, head_dim=DIM, capacity=9), drawn(1, 1, 1)

    def rounds(count):
        for _ in range(count):
            out = sl.attention(q, k, v, mask=mask)
            cache.attend(0, *token)
            cache.truncate(0)
            other = sl.attention(*arrays)
            here.read(0, negated)
            here.read(2, q, k, v, mask)
            here.read(0, arrays[0], 5)
        return out, other

    with torch.no_grad():
        out, other = rounds(50)
        common += tuple([x.call.record for x in (*kept(), *kept("step")) if x.call is not None])
        gc.collect()
        tracemalloc.start()
        rounds(50)
        gc.collect()
        before, memory = [sys.getrefcount(x) for x in common], tracemalloc.get_traced_memory()[0]
        out, other = rounds(lot)
        gc.collect()
        after, grown = [sys.getrefcount(x) for x in common], tracemalloc.get_traced_memory()[0] - memory
        tracemalloc.stop()
    assert max([abs(a - b) for a, b in zip(before, after, strict=True)]) < 100
    assert grown < 50_000
    assert counts.ran >= 3 * lot
    assert (sys.getrefcount(out), sys.getrefcount(other), sys.getrefcount(k), sys.getrefcount(mask)) == (
        2,
        2,
        *[sys.getrefcount(v)] * 2,
    )


def test_whoever_drops_arrays_has_their_memory_back(counts):
    def repeat(of_numpy):
        given = drawn(2, 1, 40)
        given = [x.numpy() for x in given] if of_numpy else given
        mask = np.ones((2, 1, 1, 40), bool) if of_numpy else torch.ones(2, 1, 1, 40, dtype=torch.bool)
        for _ in range(4):
            out = sl.attention(*given, mask=mask)
        return [weakref.ref(x) for x in (*given, mask, out)]

    with torch.no_grad():
        gone = repeat(False) + repeat(True)
    gc.collect()
    assert all([x() is None for x in gone]) and counts.ran >= 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_the_process_does_not_grow(counts):
    q, k, v = drawn(2, 33, 33)

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with torch.no_grad():
        for _ in range(200):
            sl.attention(q, k, v)
        before = resident()
        for _ in range(3000):
            sl.attention(q, k, v)
        assert resident() - before < 2 << 20
    assert counts.ran > 3000


@pytest.mark.parametrize("most", [1, 2] if FULL else [1])
def test_kernels_that_are_unloaded_are_loaded_anew(counts, monkeypatch, most):
    """Calls of more kinds than kernels may be loaded, in turns."""
    torch.manual_seed(0)
    calls = [drawn(1, 1, 40), drawn(1, 33, 33)]
    cache = sl.KVCache(layers=1, kv_heads=HEADS, head_dim=DIM, capacity=100)
    with torch.no_grad():
        wants = [by_python(lambda x=x: sl.attention(*x)) for x in calls]
        for _ in range(3):
            for x, want in zip(calls, wants, strict=True):
                same(sl.attention(*x), want)
        monkeypatch.setattr(compiling, "MOST_LOADED", most)
        for _ in range(2):
            for x, want in zip(calls, wants, strict=True):
                loaded = [weakref.ref(kernel) for kernel in compiling._loaded.values()]
                compiling._make_room()
                gc.collect()
                assert all([kernel() is None for kernel in loaded])
                for _ in range(3):
                    same(sl.attention(*x), want)
                step = torch.randn(1, HEADS, 1, DIM)
                length = cache.length(0)
                got = cache.attend(0, step, step, step)
                same(got, sl.attention(step, *[torch.from_numpy(y(0)) for y in (cache.keys, cache.values)]))
                assert cache.length(0) == length + 1
                gc.collect()
        assert len(compiling._loaded) <= most
    assert counts.ran >= 10


def test_a_kernel_is_unloaded_while_it_runs(counts):
    """A mode of PyTorch's, or the garbage collector, may run Python while machine code has a call in hand."""
    q, k, v = drawn(2, 33, 33)
    found = []

    class Dropping(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.empty_like:
                for call in kept():
                    call.call.forget_record()
                forget()
                compiling._loaded.clear()
                gc.collect()
                found.append(kernel() is not None)
            return function(*args, **(kwargs or {}))

    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
        kernel = weakref.ref(kept()[-1].call.launch.kernel)
        with Dropping():
            same(sl.attention(q, k, v), want)
        assert found == [True] and kernel() is None
        same(sl.attention(q, k, v), want)


def test_what_machine_code_repeats_is_used(counts):
    """The memo drops the least recently used."""
    calls, known = (drawn(1, 1, 40), drawn(1, 33, 33)), []
    with torch.no_grad():
        for given in calls:
            for _ in range(3):
                sl.attention(*given)
            known.append(last_used())
        for n in (0, 1, 0):
            ran = counts.ran
            sl.attention(*calls[n])
            assert counts.ran == ran + 1 and last_used() is known[n]


# --- threads and processes


def test_a_call_runs_on_as_many_threads_as_now(counts, monkeypatch):
    monkeypatch.setattr(workers, "_limit", lambda: 8)
    q, k, v = drawn(2, 33, 33)
    try:
        with torch.no_grad():
            for threads in (2, 1, 3, 2):
                sl.set_threads(threads)
                found = []
                ran = counts.ran
                for _ in range(3):
                    out = sl.attention(q, k, v)
                    found.append(last_used())
                    same(out, by_python(lambda: sl.attention(q, k, v)))
                assert counts.ran - ran >= 2 and {x.call.machine[0] for x in found} == {threads}
    finally:
        sl.set_threads(None)


def test_a_region_of_another_thread(counts):
    """Two threads at once: regions of both, in turn."""
    torch.manual_seed(0)
    q, k, v = drawn(2, 128, 128)
    long = drawn(2, 200, 200)
    stop, bad = threading.Event(), []
    sl.set_threads(2)
    try:
        with torch.no_grad():
            wants = by_python(lambda: sl.attention(q, k, v)), by_python(lambda: sl.attention(*long))

            def other():
                with torch.no_grad():
                    while not stop.is_set():
                        if not torch.equal(sl.attention(*long), wants[1]):
                            bad.append(1)

            thread = threading.Thread(target=other)
            thread.start()
            try:
                for _ in range(100):
                    same(sl.attention(q, k, v), wants[0])
            finally:
                stop.set()
                thread.join()
    finally:
        sl.set_threads(None)
    assert not bad and counts.ran > 100 and workers._region == [None]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_call_is_repeated_in_pieces(counts, threads, monkeypatch):
    """Between its regions Python sees signals: machine code does not take it."""
    q, k, v = drawn(1, 700, 700, 2)
    sl.set_threads(threads)
    try:
        with torch.no_grad():
            want = by_python(lambda: sl.attention(q, k, v))
            for _ in range(3):
                same(sl.attention(q, k, v), want)
            record = kept()[-1].call.launch
            short = counts.ran
            monkeypatch.setattr(record, "seconds", record.region_seconds)
            kept()[-1].call.forget_record()
            for x in kept():
                x.call.forget_record()
                monkeypatch.setattr(x.call.launch, "seconds", x.call.launch.region_seconds)
            for _ in range(3):
                same(sl.attention(q, k, v), want)
            assert counts.ran == short
    finally:
        sl.set_threads(None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_repeats_calls(counts):
    given = drawn(2, 1, 40), drawn(2, 128, 128)
    sl.set_threads(2)
    try:
        with torch.no_grad():
            for _ in range(3):
                wants = [sl.attention(*x) for x in given]

            def child():
                before = counts.ran
                for _ in range(3):
                    for x, want in zip(given, wants, strict=True):
                        same(sl.attention(*x), want)
                assert counts.ran >= before + 4

            number = os.fork()
            if not number:
                status = 1
                try:
                    child()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(number, 0)[1] == 0
            for x, want in zip(given, wants, strict=True):
                same(sl.attention(*x), want)
    finally:
        sl.set_threads(None)


# --- interrupts


@needs_places
def test_interrupts_leave_repeated_calls_as_they_were(counts):
    """Later calls are right, and machine code reads and runs them."""
    q, k, v = drawn(1, 33, 33)
    x = q.numpy()
    cases = {
        "tensors": lambda: sl.attention(q, k, v),
        "arrays": lambda: sl.attention(x, x, x),
        "recorded": lambda: sl.attention(q, k, v, return_lse=True)[0],
    }
    room = ("runtime/repeating.py", "problem/prepared.py", "calls/dense.py", "engine/forward_call.py", "host/memo.py")
    with torch.no_grad():
        for name, call in cases.items():

            def begin(call=call, turns=0):
                forget()
                for _ in range(turns):
                    call()

            for turns in (0, 1, 2):
                begin(call, turns)
                want = np.asarray(call()).tobytes()
                begin(call, turns)
                found = places(call, room)
                for n in spread(found, 60 if FULL else 12):
                    begin(call, turns)
                    interrupted(call, n, room)
                    for _ in range(3):
                        assert np.asarray(call()).tobytes() == want, (name, n)
                    read, ran = counts.read, counts.ran
                    call()
                    assert (counts.read, counts.ran) == (read + 1, ran + 1), (name, turns, n)
    assert workers._region == [None]


@pytest.fixture
def anew(monkeypatch):
    """Loads what reads and runs anew, as a process does at its first call."""

    def load():
        repeating.functions.cache_clear()
        for name in ("read", "repeat"):
            vars(engines.cpu()).pop(name, None)
        prepared_calls.clear()

    before = repeating.functions()
    load()
    yield load
    repeating.functions.cache_clear()
    for name in ("read", "repeat"):
        vars(engines.cpu()).pop(name, None)
    prepared_calls.clear()
    monkeypatch.setattr(repeating.functions, "__wrapped__", lambda: before, raising=False)


@needs_places
def test_an_interrupt_of_the_first_read_leaves_later_ones_fast(anew):
    q, k, v = drawn(1, 1, 40)
    if repeating.functions().run is None:
        pytest.skip("Python repeats all calls here")
    room = ("runtime/repeating.py", "engine/cpu_engine.py")

    def call():
        return sl.attention(q, k, v)

    with torch.no_grad():
        want = call()
        anew()
        found = places(call, room)
        assert len(found) > 20
        for n in spread(found, len(found) if FULL else 40):
            anew()
            assert interrupted(call, n, room)
            for _ in range(3):
                same(call(), want)
            here = repeating.functions()
            assert here.run is not None
            assert type(here.read(0, q)[0]) is bytes, f"read by Python after an interrupt at {n} of {len(found)}"
            assert kept()[-1].call.record.address


def test_a_function_that_somebody_still_has_may_be_called(anew):
    """As while the interpreter ends, when modules are gone."""
    x = torch.randn(2, 3)
    with torch.no_grad():
        read = repeating.functions().read
        want = read(0, x), read(0, x.numpy())
        anew()
        gc.collect()
        others = [(ctypes.c_int64 * len(READER.names))(*[1] * len(READER.names)) for _ in range(1000)]
        assert (read(0, x), read(0, x.numpy())) == want and len(others) == 1000


# --- without any of it


def another_version():
    """Returns a capsule of an exchange API of another major version."""
    words = (ctypes.c_uint32 * 32)(*[2] * 32)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = ctypes.create_string_buffer(b"dlpack_exchange_api")
    return make(ctypes.addressof(words), name, None), (words, name)


@pytest.mark.parametrize("lacks", ["the API", "its version", "its name", "copy-on-write", "CPython", "machine code"])
def test_python_reads_where_something_is_missing(anew, monkeypatch, lacks):
    """Another PyTorch, or another Python: the same results."""
    held = None
    match lacks:
        case "the API":
            monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
        case "its version":
            capsule, held = another_version()
            monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", capsule)
        case "its name":
            monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", object())
        case "copy-on-write":
            monkeypatch.setattr(TORCH, "is_cow_tensor", None)
        case "CPython":
            monkeypatch.setattr(repeating, "_is_known_python", lambda: False)
        case "machine code":
            monkeypatch.setattr(repeating.Functions, "_load", lambda self: None)
    anew()
    given = drawn(2, 1, 40), drawn(2, 33, 33)
    cache = sl.KVCache(layers=1, kv_heads=HEADS, head_dim=DIM, capacity=100)
    with torch.no_grad():
        for _ in range(4):
            for x in given:
                got = sl.attention(*x), torch.from_numpy(sl.attention(*[y.numpy() for y in x]))
                same(*got)
                same(got[0], by_python(lambda x=x: sl.attention(*x)))
            x = torch.randn(1, HEADS, 1, DIM)
            same(
                cache.attend(0, x, x, x), sl.attention(x, *[torch.from_numpy(y(0)) for y in (cache.keys, cache.values)])
            )
        here = repeating.functions()
        assert type(here.read(0, given[0][0])[0]) is tuple
        has_code = lacks not in ("CPython", "machine code")
        assert (here.run is not None) == has_code
        assert (type(here.read(0, given[0][0].numpy())[0]) is bytes) == has_code
    assert held is None or held[0][0] == 2


def test_a_result_that_a_mode_makes_too_small_is_refused():
    """Kernels would write past it: machine code makes it, or Python."""
    q, k = torch.randn(1, 8, 1, 64), torch.randn(1, 8, 64, 64)

    class Small(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            return made.flatten()[:1].clone() if function is torch.empty_like else made

    for way in (contextlib.nullcontext(), read_by_python()):
        with torch.no_grad(), way:
            for _ in range(3):
                want = sl.attention(q, k, k)
            with Small(), pytest.raises(sl.UnsupportedError, match="^out: expected new tensors of shape"):
                sl.attention(q, k, k)
            assert torch.equal(sl.attention(q, k, k), want)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_storage_that_lacks_one_number_is_not_read(lacking):
    """Of a tensor that begins inside of it, too."""
    whole = torch.randn(3 + 2 * 20 * 16)
    q = whole[3:].view(1, 2, 20, 16)
    whole.untyped_storage().resize_(whole.untyped_storage().nbytes() - 4 * lacking)
    with torch.no_grad():
        for read in (repeating.functions().read, read_plainly):
            assert (read(0, q) is None) == bool(lacking)
