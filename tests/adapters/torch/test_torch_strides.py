"""How results lie: in the order of the query's dimensions, as PyTorch's own attention has it: models view them."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import CausalBias, CausalVariant

import speedlight as sl
import speedlight.torch
from speedlight.autograd import operators as ops
from speedlight.autograd.forms import text_of
from speedlight.problem.options import Options
from speedlight.torch import kernel_choice

pytestmark = pytest.mark.usefixtures("one_kernel")
B, H, N, D = 2, 4, 6, 8
LAID = {
    "bhld": lambda h, d: torch.randn(B, h, N, d),
    "blhd": lambda h, d: torch.randn(B, N, h, d).transpose(1, 2),
    "lbhd": lambda h, d: torch.randn(N, B, h, d).permute(1, 2, 0, 3),
    "one of three": lambda h, d: torch.randn(B, N, 3, h, d)[:, :, 0].transpose(1, 2),
    "a part": lambda h, d: torch.randn(B, h, N + 3, d)[:, :, :N],
    "expanded": lambda h, d: torch.randn(1, h, N, d).expand(B, -1, -1, -1),
    "columns first": lambda h, d: torch.randn(B, h, d, N).mT,
    "one query": lambda h, d: torch.randn(B, 1, h, d).transpose(1, 2),
    "every other column": lambda h, d: torch.randn(B, N, h, 2 * d).transpose(1, 2)[..., ::2],
}
CALLS = {
    "plain": lambda f, q, k, v: f(q, k, v),
    "causal": lambda f, q, k, v: f(q, k, v, is_causal=True),
    "mask": lambda f, q, k, v: f(q, k, v, torch.ones(k.shape[2], dtype=torch.bool)[None]),
    "bias that is learned": lambda f, q, k, v: f(q, k, v, torch.zeros(1, k.shape[2], requires_grad=True)),
    "dropout": lambda f, q, k, v: f(q, k, v, dropout_p=0.5),
    "value dim": lambda f, q, k, v: f(q, k, v[..., :5]),
    "fewer heads": lambda f, q, k, v: f(q, k[:, :2], v[:, :2], enable_gqa=True),
    "without a batch": lambda f, q, k, v: f(q[0], k[0], v[0]),
    "with more": lambda f, q, k, v: f(q[None], k[None], v[None]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("laid", LAID)
def test_results_lie_as_pytorch_s_do(laid, call):
    """Of the first call and of those that are repeated; with gradients, too."""
    q, k, v = (LAID[laid](H, D) for _ in range(3))
    want = CALLS[call](functional.scaled_dot_product_attention, q, k, v)
    for _ in range(2):
        assert CALLS[call](speedlight.torch.scaled_dot_product_attention, q, k, v).stride() == want.stride()
    with speedlight.torch.sdpa():
        assert CALLS[call](functional.scaled_dot_product_attention, q, k, v).stride() == want.stride()
    out = CALLS[call](speedlight.torch.scaled_dot_product_attention, q.detach().requires_grad_(), k, v)
    assert out.stride() == want.stride()
    with torch.no_grad():
        want = CALLS[call](functional.scaled_dot_product_attention, q, k, v)
        with speedlight.torch.sdpa():
            for _ in range(3):
                assert CALLS[call](functional.scaled_dot_product_attention, q, k, v).stride() == want.stride()


KERNELS = {
    "any": None,
    "formula": [SDPBackend.MATH],
    "fused": [SDPBackend.FLASH_ATTENTION],
}
LAID_APART = {  # query, key and value
    "one of three": ("one of three",) * 3,
    "a key's columns first": ("blhd", "columns first", "bhld"),
    "a value's columns first": ("blhd", "blhd", "columns first"),
    "a query's columns first": ("columns first", "bhld", "bhld"),
    "every other column": ("every other column", "blhd", "blhd"),
    "a value's every other column": ("bhld", "bhld", "every other column"),
}
OTHER_CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.ones(N, N, dtype=torch.bool)},
    "bias": {"attn_mask": torch.zeros(1, 1, N, N)},
    "bias of heads": {"attn_mask": torch.zeros(H, N, N)},
    "bias that is learned": {"attn_mask": torch.zeros(N, N, requires_grad=True)},
    "fewer heads": {"enable_gqa": True},
    "dropout": {"dropout_p": 0.5},
}
RECORDED = {  # whether gradients are, and of what
    "nothing": (contextlib.nullcontext, False),
    "the query": (contextlib.nullcontext, True),
    "nothing, under no_grad": (torch.no_grad, True),
}


def call_of(laid, call, dtype, requires_grad):
    """The arguments of a call, and its options."""
    heads = H, *(2 if call == "fewer heads" else H,) * 2
    q, k, v = (LAID[name](h, D).to(dtype) for name, h in zip(LAID_APART[laid], heads, strict=True))
    return [q.detach().requires_grad_(requires_grad), k, v], OTHER_CALLS[call]


def compare(pytorch, doors):
    """Every door's result lies as PyTorch's; False where that has no kernel of those enabled."""
    try:
        want = pytorch()
    except RuntimeError:
        return False
    for door in doors:
        for _ in range(3):  # anew, repeated by Python, and by machine code
            got = door()
            assert (got.shape, got.stride()) == (want.shape, want.stride())
    return True


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of why it has no kernel
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("laid", LAID_APART)
def test_results_lie_as_those_of_the_kernel_that_pytorch_chooses(laid, kernels):
    """PyTorch is asked for its own: another release is judged by itself."""
    compared, attend = 0, functional.scaled_dot_product_attention
    with contextlib.nullcontext() if KERNELS[kernels] is None else sdpa_kernel(KERNELS[kernels]):
        for call, recorded in itertools.product(OTHER_CALLS, RECORDED):
            mode, requires_grad = RECORDED[recorded]
            for dtype in (torch.float32, torch.bfloat16) if call == "plain" else (torch.float32,):
                given, options = call_of(laid, call, dtype, requires_grad)
                several = [given]
                if recorded == "nothing" and call != "bias":
                    several.append([x[0] for x in given])  # without a batch
                for tensors in several:
                    ours = functools.partial(speedlight.torch.scaled_dot_product_attention, *tensors, **options)
                    theirs = functools.partial(attend, *tensors, **options)
                    with mode():
                        compared += compare(theirs, [ours, taken(theirs)])
    assert compared > 30 or kernels == "fused"
    assert compared > 10 or laid != "one of three"


def taken(call):
    """A call inside sdpa()."""

    def function():
        with speedlight.torch.sdpa():
            return call()

    return function


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q[:, :1], k, v),
        lambda q, k, v: (q, k[:, :1], v[:, :1]),
        lambda q, k, v: (q, k[:1], v[:1]),
        lambda q, k, v: (q[:1], k, v),
        lambda q, k, v: (q, k[0], v[0]),
        lambda q, k, v: (q[:, :B], k[0, :B], v[0, :B]),  # the key's first dimension is as the batch
        lambda q, k, v: (q[0, 0], k, v),
        lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0]),
        lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
        lambda q, k, v: (q[..., ::8], k[..., ::8], v),
        lambda q, k, v: (q, k[:, :, :3], v[:, :, :3], None, 0.0, True),
        lambda q, k, v: (q, k, v, torch.zeros(1, N, N)),
        lambda q, k, v: (q, k, v, torch.zeros(N, N).mT),
        lambda q, k, v: (q, k, v, CausalBias(CausalVariant.LOWER_RIGHT, N, N)),
    ],
)
def test_shapes_that_broadcast_lie_as_pytorch_s_do(change):
    given = change(*(LAID["blhd"](H, D) for _ in range(3)))
    call = functools.partial(functional.scaled_dot_product_attention, *given)
    assert compare(call, [functools.partial(speedlight.torch.scaled_dot_product_attention, *given), taken(call)])


@pytest.mark.parametrize("sizes", [(N, N, D // 2), (0, N, D), (N, 0, D)])
@pytest.mark.parametrize("enable_gqa", [False, True])
def test_no_heads_at_all(sizes, enable_gqa):
    """PyTorch would divide by their number where it is asked for its kernel, which ends the process."""
    rows, keys, value_dim = sizes
    q, k, v = (torch.zeros(B, n, 0, d).transpose(1, 2) for n, d in ((rows, D), (keys, D), (keys, value_dim)))
    call = functools.partial(functional.scaled_dot_product_attention, q, k, v, enable_gqa=enable_gqa)
    ours = functools.partial(speedlight.torch.scaled_dot_product_attention, q, k, v, enable_gqa=enable_gqa)
    assert compare(call, [ours, taken(call)])


@pytest.mark.parametrize("heads", [*itertools.product((2, 4, 8), repeat=3)])
def test_the_kernel_is_asked_with_numbers_of_heads_that_differ_as_the_call_s(heads):
    """PyTorch is asked about small tensors: its answer is the one that it has for the call's own."""
    q, k, v = (torch.zeros(B, h, N, D) for h in heads)
    for options in ({}, {"enable_gqa": True}):
        enable_gqa = bool(options)
        # the arguments fit each other
        if (not enable_gqa and len(set(heads)) > 1) or heads[0] % heads[1] or heads[0] % heads[2]:
            continue
        for given in ((q, k, v), (q[:, :, :0], k, v), (q, k[:, :, :0], v[:, :, :0]), (q[:1], k, v)):
            want = kernel_choice.INSIDES.fused_sdp_choice(*given, None, 0.0, False, **options)
            found = kernel_choice.takes_formula(*given, None, 0.0, False, enable_gqa)
            assert found == (want == kernel_choice._MATH)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_repeated_call_follows_what_is_enabled(requires_grad):
    """A kernel that is enabled or disabled later changes how the next result lies."""
    q, k, v = (LAID["blhd"](H, D) for _ in range(3))
    q.requires_grad_(requires_grad)
    call = taken(lambda: functional.scaled_dot_product_attention(q, k, v))
    with torch.set_grad_enabled(requires_grad):
        for _ in range(2):
            assert [call().is_contiguous() for _ in range(3)] == [False] * 3
            with sdpa_kernel([SDPBackend.MATH]):
                assert [call().is_contiguous() for _ in range(3)] == [True] * 3


def test_a_release_that_cannot_be_asked(monkeypatch):
    """Then usual calls lie as the query, others are contiguous."""
    monkeypatch.setitem(vars(kernel_choice.INSIDES), "fused_sdp_choice", None)
    kernel_choice._ask.cache_clear()
    try:
        q, k, v = (LAID["blhd"](H, D) for _ in range(3))
        bias = torch.zeros(H, N, N)
        attend = speedlight.torch.scaled_dot_product_attention
        assert [attend(*x).is_contiguous() for x in ((q, k, v), (q[0], k[0], v[0]), (q, k, v, bias))] == [
            False, True, True,
        ]  # fmt: skip
    finally:
        kernel_choice._ask.cache_clear()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("laid", ["a key's columns first", "one of three"])
def test_what_is_traced_lies_as_what_runs(laid):
    """Fake tensors, and programs that are exported inside sdpa() and exported again."""

    class Model(nn.Module):
        def forward(self, q, k, v):
            out = functional.scaled_dot_product_attention(q, k, v)
            return out.view(-1) if laid == "a key's columns first" else out.transpose(1, 2).view(-1)

    tensors, _ = call_of(laid, "plain", torch.float32, False)
    length = {2: torch.export.Dim("length")}
    with speedlight.torch.sdpa():
        want = functional.scaled_dot_product_attention(*tensors)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in tensors]
            assert functional.scaled_dot_product_attention(*fakes).stride() == want.stride()
            assert speedlight.torch.scaled_dot_product_attention(*fakes).stride() == want.stride()
        model = Model()
        for shapes in (None, (length, length, length)):
            program = torch.export.export(model, tuple(tensors), dynamic_shapes=shapes)
            again = torch.export.export(program.module(), tuple(tensors), dynamic_shapes=shapes)
            for x in (program, again, again.run_decompositions()):
                assert torch.equal(x.module()(*tensors), model(*tensors))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("value_dim", [D, 5])
@pytest.mark.parametrize("laid", [x for x in LAID if x != "expanded"])
def test_results_lie_as_the_query(laid, value_dim):
    """attention() and flex_attention() by every way, for any value dim; gradients as what they flow to."""
    q, k, v = (LAID[laid](H, d) for d in (D, D, value_dim))
    want = flex.flex_attention(q, k, v) if laid != "one query" else sl.attention(q, k, v)
    assert want.stride() == speedlight.torch.flex_attention(q, k, v).stride()
    form = text_of(Options())
    for function in (sl.attention, speedlight.torch.attention):
        assert function(q, k, v).stride() == function(q, k, v).stride() == want.stride()
        grads = q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
        out = function(*grads)
        assert out.stride() == want.stride()
        flows = torch.autograd.grad(out.sum(), grads)
        assert [x.stride() for x in flows] == [dense(x).stride() for x in (q, k, v)]
    assert ops.attention_op(q, k, v, None, [], form, None)[0].stride() == want.stride()
    assert sl.attention(q, k, v, out=torch.empty(out.shape)).is_contiguous()
    assert torch.equal(sl.attention(q, k, v), sl.attention(*(x.contiguous() for x in (q, k, v))))


def dense(x):
    """A tensor in the order of another, its rows whole."""
    order = sorted(range(3), key=lambda d: -x.stride()[d])
    return torch.empty_permuted(x.shape, (*order, 3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("laid", LAID)
def test_graphs_are_told_how_results_lie(laid):
    """Forwards and backwards: what an operation says of its results is what it gives."""
    q, k, v = (LAID[laid](H, D).detach().requires_grad_() for _ in range(3))
    arguments = (q, k, v, None, [], text_of(Options(causal=True)), None)
    torch.library.opcheck(ops.attention_op, arguments)
    out, lse = ops.attention_op(*arguments)
    given = [x.detach() for x in (q, k, v, out, lse, torch.ones_like(out), lse)]
    torch.library.opcheck(
        ops.attention_backward_op, (*given, None, [], arguments[5], None, []),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
