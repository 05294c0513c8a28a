"""Tensors whose numbers do not lie in memory, and what transforms, modes and graphs of PyTorch make of them."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from conftest import FULL
from repeated import forget, kept
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

import speedlight as sl
from speedlight.arrays import torch_tensors
from speedlight.arrays.making import fresh
from speedlight.cpu.engine.forward_call import Call

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels

SHAPE = (1, 2, 8, 16)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(3)]


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
    assert len(kept()) > 0
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
        new, address = fresh(q, SHAPE, None)
        assert type(new) is Mine and address == new.data_ptr()
        got = sl.attention(q, k, v)
    assert type(got) is Mine and torch.equal(got, want)


def pages_of(x):
    """Of (batch, heads, length, dim) one page for each item, and its table."""
    return x.transpose(1, 2).contiguous(), [[n] for n in range(len(x))]


def cache_of(k, v):
    cache = sl.KVCache(layers=1, batch=len(k), kv_heads=k.shape[1], head_dim=k.shape[3], capacity=99)
    cache.append(0, k.numpy(), v.numpy())
    return cache


def pool_of(k, v):
    pool = sl.PagePool(layers=1, pages=9, page_size=16, kv_heads=k.shape[1], head_dim=k.shape[3])
    sequence = pool.sequence()
    pool.append(0, [sequence], *(x[0].transpose(0, 1).numpy() for x in (k, v)))
    return pool, [sequence]


def paged(q, k, v, out, **options):
    (k_pages, table), (v_pages, _) = pages_of(k), pages_of(v)
    return sl.attention_paged(q, k_pages, v_pages, table, [k.shape[2]] * len(k), out=out, **options)


def pooled(q, k, v, out, **options):
    pool, sequences = pool_of(k, v)
    turned = out[0].transpose(0, 1)
    return pool.attend(0, sequences, q[0].transpose(0, 1), q_lengths=[q.shape[2]], out=turned, **options)


WRITERS = {
    "attention": lambda q, k, v, out, **options: sl.attention(q, k, v, out=out, **options),
    "attention_paged": paged,
    "KVCache.attend": lambda q, k, v, out, **options: cache_of(k, v).attend(0, q, out=out, **options),
    "PagePool.attend": pooled,
}
OTHER_WRITERS = {
    "merge_states": lambda x: sl.merge_states(
        [x[0], torch.ones_like(x[0])], [torch.zeros(2, 8)] * 2, out=(x[0], torch.empty(2, 8))
    ),
    "rotary": lambda x: sl.rotary(x, out=x),
    "rotary in pieces": lambda x: sl.rotary(torch.ones(1, 2, 9000, 16), out=x),
}


def saved(x):
    """Something whose gradient needs the numbers that x has now."""
    return (x * torch.ones_like(x, requires_grad=True)).sum()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_autograd_hears_what_is_written(name, fails):
    """What was saved of `out` for a backward pass is no more; a repeated call says so, too."""
    q, k, v = tensors()
    table = sl.table(torch.arange(8.0))
    options = {"score": lambda s, b, h, i, j: s + table[j]} if fails else {}  # goes to `out` by way of other memory
    out = torch.zeros(SHAPE)
    for _ in range(3):
        flow = saved(out)
        WRITERS[name](q, k, v, out, **options)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            flow.backward()
    with torch.inference_mode():
        inferred = torch.zeros(SHAPE)
    for _ in range(2):
        WRITERS[name](q, k, v, inferred, **options)
    assert torch.equal(inferred, out)


@pytest.mark.parametrize("name", OTHER_WRITERS)
def test_autograd_hears_what_others_write(name):
    x = torch.zeros(1, 2, 9000, 16) if "pieces" in name else torch.zeros(SHAPE)
    flow = saved(x)
    OTHER_WRITERS[name](x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        flow.backward()


@pytest.mark.parametrize("repeated", [False, True])
def test_autograd_hears_of_a_kernel_that_is_stopped(repeated, monkeypatch):
    """`out` may be half written then. Where a call is refused, or a lookup is out of range, it is as it was."""
    q, k, v = tensors()
    out, table = torch.zeros(SHAPE), sl.table(torch.arange(7.0))
    forget()
    if repeated:
        sl.attention(q, k, v, out=out)
    flow = saved(out)
    with pytest.raises(sl.ArgumentError, match=r"^out: expected memory of its own"):
        sl.attention(out, k, v, out=out)
    for _ in range(2):
        with pytest.raises(sl.ArgumentError, match="^table: expected index 1"):
            sl.attention(q, k, v, out=out, score=lambda s, b, h, i, j: s + table[j])
    flow.backward()

    def stopped(*_given, **_options):
        raise KeyboardInterrupt

    flow = saved(out)
    for name in ("run", "run_again"):
        monkeypatch.setattr(Call, name, stopped)
    with pytest.raises(KeyboardInterrupt):
        sl.attention(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        flow.backward()


READERS = {
    "this release": torch_tensors._choose_read_address,
    "without const_data_ptr": torch_tensors._read_address_of_storage,
}


@pytest.fixture(params=READERS)
def read(request, monkeypatch):
    """Reads a tensor's address as this release of PyTorch can, and as PyTorch 2.11."""
    monkeypatch.setattr(torch_tensors, "read_address", READERS[request.param])
    return lambda x: torch_tensors.read_address(x)


def test_an_address_is_read_as_data_ptr_has_it(read):
    """Views, empty tensors and tensors without memory, too; what has no address raises RuntimeError."""
    x = torch.randn(4, 6)
    without = torch.randn(3)
    without.untyped_storage().resize_(0)
    for view in (x, x[1:, 2::3], x.T, x[2, 3], x[:, 2:2], x.bfloat16()[1:], without, torch.nn.Parameter(x[1:])):
        assert read(view) == view.data_ptr()
    expected = [x.data_ptr(), x[1:, 2:].data_ptr()]
    lazy = torch._lazy_clone(x)
    assert [read(lazy), read(lazy[1:, 2:])] == expected
    assert torch._C._is_cow_tensor(lazy)

    def read_inside(part):
        with pytest.raises(RuntimeError, match="storage"):
            read(part)
        return part

    torch.func.vmap(read_inside)(x)


def test_copies_that_wait_for_a_write_are_not_made_by_reading(read):
    """torch._lazy_clone()'s: the first call and later ones, with gradients, too; what is written becomes its own."""
    given, is_lazy = tensors(), torch._C._is_cow_tensor
    lazy = [torch._lazy_clone(x) for x in given]
    followed = [torch._lazy_clone(x).requires_grad_() for x in given]
    for _ in range(3):
        out = sl.attention(*lazy)
        sl.attention(*followed).sum().backward()
    assert all(is_lazy(x) for x in (*lazy, *followed, *given))
    target, of_an_input = torch._lazy_clone(given[0]), torch._lazy_clone(lazy[0])
    before = given[0].numpy().copy()
    for _ in range(3):
        for x in (target, of_an_input):
            assert sl.attention(*lazy, out=x) is x
            assert torch.equal(x, out)
    assert torch.equal(lazy[0], torch.from_numpy(before))
    assert torch.equal(given[0], torch.from_numpy(before))
