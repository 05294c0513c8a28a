"""Calls that machine code repeats: the bits of Python's way, and nothing taken that Python would decide otherwise."""

from __future__ import annotations

import os
import re
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import speedlight as sl
import speedlight.torch
from speedlight import engines
from speedlight.cpu.memory.forms import FORM
from speedlight.cpu.runtime import replay

pytestmark = [pytest.mark.usefixtures("one_width", "small_tiles"), pytest.mark.skip(reason="replaced")]

HEADS, DIM = 4, 32
WINDOW, BAND, CAPPED = (20, None), sl.window(20, 3) | sl.prefix(2), sl.softcap(2.0)  # known by identity
BEHIND = sl.padding(np.arange(33) > np.array([[3], [9]]))


@pytest.fixture
def known():
    """The calls that are known, none at first; skips where this process has no such code."""
    found = engines.cpu().replays()
    found.forget()
    with torch.no_grad():
        for _ in range(3):
            sl.attention(*drawn(1, 3, 5))
    if not found._known:
        assert found._refused  # a platform without, or another PyTorch
        pytest.skip("Python repeats all calls here")
    found.forget()
    return found


def drawn(batch, queries, keys, heads=HEADS, kv_heads=None, dtype=torch.float32, like=torch.randn):
    sizes = (heads, queries), (kv_heads or heads, keys), (kv_heads or heads, keys)
    return [like(batch, h, n, DIM, dtype=dtype) for h, n in sizes]


def used(known):
    """How many calls machine code has repeated."""
    return sum([x.form[FORM.word("used")] for x in known._known.values()])


def by_python(call):
    """What another thread returns: machine code is the main thread's."""
    found = []

    def run():
        with torch.no_grad():
            found.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def same(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
    a, b = (x.contiguous().view(torch.uint8) for x in (a, b))
    assert torch.equal(a, b)


# a form's name: how many calls of it, their arguments made by a number
FORMS = {
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
    "self, a table and a function": lambda n: (drawn(2, 33, 33), {"mask": BEHIND, "score": CAPPED}),
    "self": lambda n: (drawn(2, 33, 33), {}),
    "self, causal": lambda n: (drawn(2, 33, 33), {"causal": True}),
    "self, top-left, a scale": lambda n: (drawn(2, 20, 33), {"causal": "top-left", "scale": 0.1 + n}),
    "self, half": lambda n: (drawn(2, 33, 33, dtype=torch.float16), {}),
    "self, transposed": lambda n: ([torch.randn(2, 33, HEADS, DIM).transpose(1, 2) for _ in range(3)], {}),
    "self, of one tensor": lambda n: (torch.randn(2, 33, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(), {}),
    "self, a mask": lambda n: (drawn(2, 33, 33), {"mask": seen(33, 33)}),
    "self, padded": lambda n: (drawn(2, 33, 33), {"mask": padding(9 + n, 33)}),
    "self, a bias": lambda n: (drawn(2, 33, 33), {"score": torch.randn(1, HEADS, 33, 33)}),
    "self, a bias with -inf": lambda n: (drawn(2, 33, 33), {"score": hiding(2, 1, 33, 33)}),
    "cross, expanded": lambda n: (drawn(2, 20, 70), {"mask": seen(2, 1, 1, 70).expand(2, HEADS, 20, 70)}),
    "decode, tokens before heads": lambda n: ([torch.randn(2, m, HEADS, DIM) for m in (1, 9 + n, 9 + n)], BEFORE),
    "self, a bias of bfloat16": lambda n: (drawn(2, 33, 33), {"score": torch.randn(1, HEADS, 33, 33).bfloat16()}),
    "self, sinks": lambda n: (drawn(2, 33, 33), {"sink_logits": SINKS.__setitem__(0, float(n)) or SINKS}),
}  # fmt: skip
# results that are not like q; another layout; copies of tables; lists, which may change
LEFT = ("self, of one tensor", "decode, tokens before heads", "self, a bias of bfloat16", "self, sinks")
SINKS, BEFORE = [0.0] * HEADS, {"layout": "blhd"}


def seen(*shape):
    return torch.rand(shape) > 0.3


def padding(*lengths):
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, None]


def hiding(*shape):
    return torch.randn(shape).masked_fill(~seen(*shape), -torch.inf)


def cut(n):
    q, k, v = drawn(2, 1, 90)
    return q, k[:, :, : 40 + n], v[:, :, n : 40 + 2 * n]


@pytest.mark.parametrize("name", FORMS)
def test_bits_are_those_of_pythons_way(known, name):
    """Each with other arrays, of as many keys or one more."""
    torch.manual_seed(0)
    count = 0
    for n in range(6):
        (q, k, v), options = FORMS[name](n)
        call = lambda q=q, k=k, v=v, o=options: sl.attention(q, k, v, **o)  # noqa: E731
        want = by_python(call)
        with torch.no_grad():
            for _ in range(2):
                same(call(), want)
        count = used(known)
    assert count == 0 if name in LEFT else count >= 5


def test_torch_doors_have_rules_of_their_own(known):
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
    assert used(known) >= 4


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
def test_tensors_that_lie_otherwise(known, queries):
    """One of a known call's at a time."""
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
                same(attend(*other), by_python(lambda other=other: attend(*other)))
    assert used(known) >= 16


def with_hidden(name):
    """Ways to call with the arguments of a known call that are not plain, and must be Python's."""
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

    class Mine(torch.Tensor):
        pass

    return {
        "recorded": follow,
        "a tangent": tangent,
        "vmap": transform,
        "traced": trace,
        "autocast": lambda: autocast(attend),
        "a subclass": lambda: attend(q.as_subclass(Mine)).as_subclass(torch.Tensor),
        "an array": lambda: torch.from_numpy(sl.attention(*[x.numpy() for x in (q, k, v)])),
        "fewer threads": lambda: with_threads(attend),
        "a thread": lambda: by_python(attend),
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
@pytest.mark.parametrize("name", ["recorded", "a tangent", "vmap", "traced", "autocast", "a subclass", "an array",
                                  "fewer threads", "a thread", "inference"])  # fmt: skip
def test_what_is_not_alike_is_pythons(known, name):
    torch.manual_seed(0)
    call, attend = with_hidden(name)
    with torch.no_grad():
        for _ in range(3):
            want = attend()
        assert used(known) >= 1
        before = used(known)
        out = call()
        assert used(known) in (0, before) or name == "traced"  # forgotten, or not used; a graph's call is plain
        if name in ("autocast", "a tangent"):  # of bfloat16; by the transform's own formula
            assert (out.float() - want).abs().max() < (0.05 if name == "autocast" else 1e-6)
        else:
            same(out.detach(), want)
        same(attend(), want)


def test_negated_and_short_tensors_are_refused_as_by_python(known):
    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
        with pytest.raises(sl.Error, match="lazily negated"):
            sl.attention(q, torch._neg_view(k), v)
        short = torch.randn(3, HEADS, 40, DIM)[1:]  # its storage has the bytes, but from an earlier place on
        short.untyped_storage().resize_(short.nbytes)
        for given in ((q, short, v), (q, k, short)):
            with pytest.raises(sl.Error, match="memory"):
                sl.attention(*given)
        with pytest.raises(sl.Error):
            sl.attention(q, k.to("meta"), v)
        same(sl.attention(q, k, v), want)


def test_modes_that_make_other_tensors(known):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        for _ in range(3):
            want = speedlight.torch.attention(q, k, v)
        with Spy():
            same(speedlight.torch.attention(q, k, v), want)
        assert any(["speedlight" in x for x in seen])
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert type(speedlight.torch.attention(q, k, v)) is not torch.Tensor


def test_settings_are_read_at_each_call(known, monkeypatch):
    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
        monkeypatch.setenv("SPEEDLIGHT_ISA", "no such unit")
        with pytest.raises(sl.Error, match="SPEEDLIGHT_ISA"):
            sl.attention(q, k, v)
        monkeypatch.delenv("SPEEDLIGHT_ISA")
        same(sl.attention(q, k, v), want)


def test_a_region_of_another_thread(known):
    """Two threads at once: one in machine code, one of Python's; regions of both, in turn."""
    torch.manual_seed(0)
    q, k, v = drawn(2, 256, 256)
    long = drawn(2, 512, 512)
    wants = by_python(lambda: sl.attention(q, k, v)), by_python(lambda: sl.attention(*long))
    stop, bad = threading.Event(), []

    def other():
        while not stop.is_set():
            if not torch.equal(sl.attention(*long), wants[1]):
                bad.append(1)

    thread = threading.Thread(target=other)
    with torch.no_grad():
        thread.start()
        try:
            for _ in range(200):
                same(sl.attention(q, k, v), wants[0])
        finally:
            stop.set()
            thread.join()
    assert not bad and used(known) > 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_forked_child_computes_by_itself(known):
    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)

        def child():
            found = engines.cpu().replays()
            for _ in range(3):
                same(sl.attention(q, k, v), want)
            assert found.call is replay._unknown and not found._known

        number = os.fork()
        if not number:
            status = 1
            try:
                child()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(number, 0)[1] == 0
        same(sl.attention(q, k, v), want)


@pytest.mark.parametrize("place", ["_are_objects_known", "_tensor_places", "_neg_view", "_dispatch_keys"])
def test_unknown_objects_are_pythons(monkeypatch, place):
    """Another CPython, or another PyTorch: then nothing of them is read."""
    if place == "_neg_view":
        monkeypatch.delattr(torch, place)
    elif place == "_dispatch_keys":
        monkeypatch.delattr(torch._C, place)
    else:
        monkeypatch.setattr(replay, place, lambda *_: None)
    mine = replay.Replays()
    monkeypatch.setattr(engines.cpu(), "replays", lambda: mine)
    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        for _ in range(4):
            out = sl.attention(q, k, v)
    assert mine._refused and mine.call is replay._unknown and mine._block is None
    same(out, by_python(lambda: sl.attention(q, k, v)))


def test_every_door_has_what_one_has_taught(known):
    """A 0.0 of another caller's is no dropout either."""
    q, k, v = drawn(1, 1, 40)
    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
        before = used(known)
        same(speedlight.torch.attention(q, k, v), want)
        same(sl.attention(q, k, v, dropout=float("0")), want)
        assert used(known) == before + 2
        with pytest.raises(sl.Error, match="seed"):
            sl.attention(q, k, v, dropout=0.5)
        with pytest.raises(sl.Error, match="dropout"):
            sl.attention(q, k, v, dropout=float("nan"))


def test_what_is_no_tensor_is_refused_as_by_python(known):
    q, k, v = drawn(2, 1, 40)
    wrong = (None, 5, "k", object(), [k], k.numpy(), k[0], k[:, :2], k[:1], k[:, :, 1:], k.to_sparse(), k.cfloat())
    with torch.no_grad():
        for _ in range(3):
            want = sl.attention(q, k, v)
        before = used(known)
        for x in wrong:
            for given in ((q, x, v), (q, k, x)):
                with pytest.raises(sl.Error) as raised:
                    sl.attention(*given)
                with pytest.raises(sl.Error, match=re.escape(str(raised.value))):
                    sl.attention(*[y.clone() if type(y) is torch.Tensor else y for y in given], engine="cpu")
        same(sl.attention(q, torch.nn.Parameter(k), v), want)
    assert used(known) == before >= 1


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_trace_is_refused_by_calls_that_are_known(known):
    q, k, v = drawn(2, 1, 40)
    with torch.no_grad():
        for _ in range(3):
            sl.attention(q, k, v)
        with pytest.raises(sl.Error, match="trace"):
            torch.jit.trace(lambda q: sl.attention(q, k, v), q)


def test_a_mask_that_requires_grad_has_pytorchs_result(known):
    """A contiguous one, whatever q is like."""
    q, k, v = (torch.randn(2, 33, HEADS, DIM).transpose(1, 2) for _ in range(3))
    bias = torch.randn(1, 1, 33, 33)
    with torch.no_grad(), speedlight.torch.sdpa():
        for _ in range(3):
            want = F.scaled_dot_product_attention(q, k, v, bias)
        assert used(known) >= 1 and want.stride() == q.stride()
        same(F.scaled_dot_product_attention(q, k, v, bias.requires_grad_()), want.contiguous())
