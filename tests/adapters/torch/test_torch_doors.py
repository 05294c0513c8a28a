"""One call by all of PyTorch's doors: followed, transformed, derived again, compiled, traced: the same results."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from test_torch import close, tensors

import speedlight as sl
import speedlight.torch
from speedlight.autograd import higher_order as further
from speedlight.autograd import operators as ops
from speedlight.autograd.forms import tensors_of, text_of
from speedlight.autograd.torch_eval import value_of
from speedlight.expressions.tracing import expression
from speedlight.expressions.tree import evaluate
from speedlight.problem.options import Options

pytestmark = [pytest.mark.usefixtures("one_kernel"), pytest.mark.filterwarnings("ignore:.*torch.jit")]


DOORS = {
    "sl.attention": sl.attention,
    "speedlight.torch.attention": speedlight.torch.attention,
    "vmap": lambda q, k, v: torch.func.vmap(speedlight.torch.attention)(q[None], k[None], v[None])[0],
    "compile": lambda q, k, v: torch.compile(speedlight.torch.attention, backend="eager", fullgraph=True)(q, k, v),
    "scaled_dot_product_attention": lambda q, k, v: speedlight.torch.scaled_dot_product_attention(
        q, k, v, enable_gqa=True
    ),
}


@pytest.mark.each("door", "grad")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_autocast_is_one_rule_for_all_doors(door, grad):
    """Of tensors of two dtypes, too; a repeated call is cast like the first; NumPy's arrays are as they are."""
    q, k, v = tensors(torch.float32, grad=grad)
    want = sl.attention(*(x.detach().bfloat16() for x in (q, k, v)))
    wide = sl.attention(*(x.detach() for x in (q, k, v)))
    narrow, double = ([x.detach().to(to).requires_grad_(grad) for x in (k, v)] for to in (torch.bfloat16, torch.double))
    given = {"one dtype": (q, k, v), "two": (q, *narrow), "wide": (q, *double)}
    for how in ("one dtype", "one dtype", "two"):
        with torch.autocast("cpu", torch.bfloat16):
            out = DOORS[door](*given[how])
        assert torch.equal(out.detach(), want), how
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(Exception, match=r"(k|key|v|value): expected .*dtype"):
        DOORS[door](*given["wide"])
    with torch.autocast("cpu", torch.bfloat16):
        if door != "compile":  # which is compiled anew for each dtype, and not for many
            assert DOORS[door](*(x.detach().double() for x in (q, k, v))).dtype == torch.float64
        arrays = sl.attention(*(x.detach().numpy() for x in (q, k, v)))
    assert np.array_equal(arrays, wide)
    if grad and door != "compile":
        assert torch.autograd.grad(out.float().sum(), q)[0].dtype == torch.float32


def second(f, q, k, v):
    """Derivatives of a derivative, which computes the forward anew."""
    return torch.autograd.grad((torch.autograd.grad(f(q, k, v).sum(), q, create_graph=True)[0] ** 2).sum(), q)[0]


DERIVED = {
    "jvp": lambda f, q, k, v: torch.func.jvp(lambda x: f(x, k, v), (q,), (k.repeat(1, 2, 1, 1),))[0],
    "vmap": lambda f, q, k, v: torch.func.vmap(lambda x: f(x, k, v))(q[None])[0],
    "func.grad": lambda f, q, k, v: torch.func.grad(lambda x: f(x, k, v).sum())(q),
    "compile": lambda f, q, k, v: torch.compile(f, backend="eager", fullgraph=True)(q, k, v),
    "create_graph": second,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("way", DERIVED)
def test_sinks_of_a_list_are_not_rounded(way):
    q, k, v = (x.detach().requires_grad_(way == "create_graph") for x in tensors())
    sinks = [0.1, 1 / 3, -0.7, 2.3]

    def attend(given):
        return lambda q, k, v: speedlight.torch.attention(q, k, v, sink_logits=given)

    want = DERIVED[way](attend(torch.tensor(sinks, dtype=torch.float64)), q, k, v)
    for given in (sinks, tuple(sinks)) if way == "compile" else (sinks, tuple(sinks), np.array(sinks)):
        close(DERIVED[way](attend(given), q, k, v), want, atol=1e-15)


@pytest.mark.parametrize("door", DOORS)
def test_two_dtypes_without_autocast_are_one_rule_for_all_doors(door):
    """Keys are widened where nobody asks for gradients."""
    q, k, v = (x.detach() for x in tensors(torch.float32))
    k, v = k.bfloat16(), v.bfloat16()
    assert torch.equal(DOORS[door](q, k, v), sl.attention(q, k.float(), v.float()))
    with pytest.raises(Exception, match=r"expected dtype float32, as q(uery)? has, where gradients are"):
        torch.autograd.grad(DOORS[door](q.requires_grad_(), k, v).sum(), q)


def test_autocast_leaves_graphs_and_kernels_as_they_were_made():
    """What a program was exported with counts, wherever it runs."""
    q, k, v = (x.detach() for x in tensors(torch.float32))
    form = text_of(Options())
    want = sl.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = ops.attention_op(q, k, v, None, [], form, None)
        with speedlight.torch.sdpa():
            whole = [x.repeat_interleave(2, 1) for x in (k, v)]
            theirs, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, *whole)
    assert torch.equal(out, want) and theirs.dtype == torch.float32


def bias(seed=5):
    return np.random.default_rng(seed).standard_normal((12, 12))


CONSTANT = {
    "alibi": {"score": sl.alibi(np.array([0.5, 0.25, 1.0, 0.1]))},
    "relative_bias": {"score": sl.relative_bias(torch.linspace(-1, 1, 4 * 23, dtype=torch.float64).reshape(4, 23))},
    "documents": {"mask": sl.documents(np.arange(12) // 5)},
    "padding": {"mask": sl.padding(np.arange(24).reshape(2, 12) % 12 > 3)},
    "two": {"score": sl.alibi(np.array([0.5, 0.25, 1.0, 0.1])), "mask": sl.documents(np.arange(12) // 5)},
}


@pytest.mark.each("name", "way")
@pytest.mark.parametrize("way", ["jvp", "create_graph", "func.grad"])
@pytest.mark.parametrize("name", CONSTANT)
def test_tables_of_arrays_in_further_derivatives(name, way):
    """Which hold the numbers of a bias, or a mask, of every pair: as by PyTorch's own operations."""
    q, k, v = (x.detach().requires_grad_(way == "create_graph") for x in tensors())
    i, h = np.arange(12), np.arange(4)[:, None, None]
    far = np.linspace(-1, 1, 4 * 23).reshape(4, 23)[h, i[:, None] - i + 11]
    alone = (i // 5)[:, None] == i // 5
    shown = (np.arange(24).reshape(2, 12) % 12 > 3)[:, None, None, :]
    slope = np.array([0.5, 0.25, 1.0, 0.1])[:, None, None] * (i - i[:, None])
    dense = {
        "alibi": (slope, True), "relative_bias": (far, True), "documents": (0.0, alone), "padding": (0.0, shown),
        "two": (slope, alone),
    }[name]  # fmt: skip
    bias, seen = map(torch.as_tensor, dense)

    def formula(q, k, v):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scores = (q @ k.mT / q.shape[-1] ** 0.5 + bias).masked_fill(~seen, -torch.inf)
        return torch.softmax(scores, -1) @ v

    ours = DERIVED[way](lambda q, k, v: speedlight.torch.attention(q, k, v, **CONSTANT[name]), q, k, v)
    theirs = DERIVED[way](formula, q, k, v)
    close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("follows", [False, True])
def test_functions_may_capture_tensors_inside_of_transforms(follows, dtype):
    """Tensors of outside, which are no part of what is transformed."""
    q, k, v = (x.detach() for x in tensors())
    slopes = torch.tensor([0.5, 0.25, 1.0, 0.125]).to(dtype).requires_grad_(follows)
    kept = sl.alibi(slopes)

    def added(x, score):
        return speedlight.torch.attention(x, k, v, score=score).sum()

    def captured(s, b, h, i, j):
        return s + slopes[h] * (j - i)

    close(torch.func.grad(added)(q, captured), torch.func.grad(added)(q, kept))
    x = q.clone().requires_grad_()
    close(torch.func.grad(added)(q, captured), torch.autograd.grad(added(x, kept), x)[0])


ARRAYS = {
    "bfloat16": (bias().astype(ml_dtypes.bfloat16), bias().astype(ml_dtypes.bfloat16).astype(np.float64)),
    "negative strides": (bias()[::-1, ::-1], bias()[::-1, ::-1].copy()),
    "read-only": (np.broadcast_to(bias()[0], (12, 12)), np.broadcast_to(bias()[0], (12, 12)).copy()),
}


@pytest.mark.each("name", "way")
@pytest.mark.parametrize("way", ["vmap", "jvp", "create_graph", "func.grad"])
@pytest.mark.parametrize("name", [*ARRAYS, "negative strides, bool"])
def test_dense_arrays_by_all_doors(name, way):
    q, k, v = (x.detach().requires_grad_(way == "create_graph") for x in tensors())
    given, same = ARRAYS[name.removesuffix(", bool")]
    key = "score"
    if name.endswith("bool"):
        key, given, same = "mask", (bias() > -1)[::-1, ::-1], (bias() > -1)[::-1, ::-1].copy()
    ours, theirs = (
        DERIVED[way](lambda q, k, v, x=x: speedlight.torch.attention(q, k, v, **{key: x}), q, k, v)
        for x in (given, torch.from_numpy(same))
    )
    close(ours, theirs)


@pytest.mark.parametrize("kind", [">f8", "float8_e4m3fn"])
def test_arrays_that_pytorch_has_not_are_named(kind):
    q, k, v = (x.detach() for x in tensors())
    wrong = bias().astype(kind if kind[0] == ">" else ml_dtypes.float8_e4m3fn)
    with pytest.raises(sl.ArgumentTypeError, match="^score: expected"):
        torch.func.vmap(lambda x: speedlight.torch.attention(x, k, v, score=wrong))(q[None])


@pytest.mark.parametrize("way", ["plain", "by items", "dropout", "grad", "grad of tables", "learned"])
def test_vmap_over_no_examples(way):
    """Gives what one example gives, none of it, and what flows back."""
    q, k, v = tensors()
    none, table = q.detach()[None][:0].requires_grad_(), torch.zeros(0, 12, 12, dtype=torch.float64, requires_grad=True)

    def attend(x, **options):
        return speedlight.torch.attention(x, k, v, **options)

    run = {
        "plain": lambda: torch.func.vmap(attend)(none),
        "by items": lambda: torch.func.vmap(lambda x: attend(x, score=lambda s, b, h, i, j: s + b))(none),
        "dropout": lambda: torch.func.vmap(lambda x: attend(x, dropout=0.1, seed=1))(none),
        "grad": lambda: torch.func.vmap(torch.func.grad(lambda x: attend(x).sum()))(none),
        "grad of tables": lambda: torch.func.vmap(torch.func.grad(lambda x: attend(q, score=x).sum()))(table),
        "learned": lambda: torch.func.vmap(lambda x: attend(q, score=x))(table),
    }[way]
    got = run()
    assert got.shape == (table if way == "grad of tables" else none).shape
    if not way.startswith("grad"):
        flow = torch.autograd.grad(got.sum(), table if way == "learned" else none)[0]
        assert flow.shape == (table if way == "learned" else none).shape


@pytest.mark.parametrize("grad", [False, True])
def test_traces_of_torchscript(grad):
    """Have the operation, of other numbers, too; what leaves graphs refuses."""
    q, k, v = (x.detach().requires_grad_(grad) for x in tensors())
    traced = torch.jit.trace(lambda q, k, v: speedlight.torch.attention(q, k, v, causal=True), (q, k, v))
    assert torch.equal(traced(2 * q, k, v), speedlight.torch.attention(2 * q, k, v, causal=True))
    with pytest.raises(sl.UnsupportedError, match="^q: expected .* torch.jit.trace"):
        torch.jit.trace(sl.attention, tuple(x.detach() for x in (q, k, v)))


INTEGERS = {
    "<<": lambda i, j: i << j, ">>": lambda i, j: i >> j, "//": lambda i, j: i // j, "%": lambda i, j: i % j,
}  # fmt: skip


@pytest.mark.parametrize("operation", INTEGERS)
def test_integers_at_their_ends_in_pytorch_s_operations(operation):
    """Shifts out of range, divisors 0 and -1, the least integer: what the table of operations says."""
    i = np.array([-(2**63), 2**63 - 1, -7, -1, 0, 3, 1 << 40])[:, None]
    j = np.array([-(2**63), -70, -64, -2, -1, 0, 1, 5, 62, 63, 64, 65, 2**63 - 1])
    root = expression(lambda b, h, i, j: INTEGERS[operation](i, j) == b, "mask").root.args[0]
    want = evaluate(root, {"i": i, "j": j})
    got = value_of(root, {"i": torch.from_numpy(i), "j": torch.from_numpy(j)}, {}, torch.float64, True)
    assert np.array_equal(got.numpy(), want)


@pytest.mark.parametrize("operation", [sl.sin, sl.cos, sl.tan])
def test_angles_at_their_end_in_pytorch_s_operations(operation):
    """Beyond 2^40 they have no sine."""
    s = np.array([0.5, 2.0**40, -(2.0**40), np.nextafter(2.0**40, np.inf), -(2.0**41), 1e300, np.inf, np.nan])
    root = expression(lambda s, b, h, i, j: operation(s), "score").root
    got = value_of(root, {"s": torch.from_numpy(s)}, {}, torch.float64, True)
    want = torch.from_numpy(evaluate(root, {"s": s}))
    assert torch.equal(got.isnan(), want.isnan()) and int(want.isnan().sum()) == 5
    close(got.nan_to_num(), want.nan_to_num())


FURTHER = {
    "dropout": {"dropout": 0.4, "seed": 3, "causal": True},
    "dropout, first query": {"dropout": 0.4, "seed": 3, "q_start": 7},
    "sinks beyond all scores": {"sink_logits": torch.tensor([2000.0, -2000.0, 0.0, 800.0], dtype=torch.float64)},
    "sinks, nothing seen": {
        "sink_logits": torch.tensor([2000.0, -2000.0, 0.0, 800.0], dtype=torch.float64), "mask": sl.window(0, 0),
        "q_start": 40,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FURTHER)
def test_further_derivatives_are_of_the_same_function(name, monkeypatch):
    """Over several blocks of rows, and where the sink is the greatest of a row."""
    monkeypatch.setattr(further, "QUERY_BLOCK", 5)
    q, k, v = (x.detach() for x in tensors())
    options = Options(**FURTHER[name])
    given = further.Tensors(q, k, v, tensors_of(options), options.sink_logits)
    got = further.attention_of(text_of(options), options.seed, given)
    for x, y in zip(got, sl.attention(q, k, v, return_lse=True, **FURTHER[name]), strict=True):
        close(x, y)


@pytest.mark.parametrize("dims", [(0, None, None), (0, 0, 0), (1, 0, None)])
@pytest.mark.parametrize("grad", [False, True])
def test_vmap_where_items_share_their_keys(dims, grad):
    """No examples of such are items of one batch."""
    generator = torch.Generator().manual_seed(3)

    def drawn(batch, heads, at):
        shape = [batch, heads, 6, 8]
        return torch.randn(shape if at is None else [*shape[:at], 3, *shape[at:]], generator=generator).double()

    given = [drawn(n, h, at) for n, h, at in zip((2, 1, 1), (4, 2, 2), dims, strict=True)]

    def function(q, k, v):
        return (speedlight.torch.attention(q, k, v) ** 2).sum() if grad else speedlight.torch.attention(q, k, v)

    run = torch.func.grad(function, (0, 1, 2)) if grad else function
    got = torch.func.vmap(run, dims)(*given)
    for n in range(3):
        want = run(*(x if at is None else x.select(at, n) for x, at in zip(given, dims, strict=True)))
        for x, y in zip(got, want, strict=True) if grad else [(got, want)]:
            close(x[n], y)


def test_flows_that_are_lazily_negated():
    """Of tensors that autograd hands on."""
    q, k, v = tensors()
    flow = torch.randn(q.shape, dtype=torch.complex128).conj().imag
    lse_flow = torch.randn(q.shape[:-1], dtype=torch.complex128).conj().imag
    assert flow.is_neg() and lse_flow.is_neg()
    out, lse = speedlight.torch.attention(q, k, v, return_lse=True)
    got = torch.autograd.grad((out, lse), (q, k, v), (flow, lse_flow), retain_graph=True)
    want = torch.autograd.grad((out, lse), (q, k, v), (flow.resolve_neg(), lse_flow.resolve_neg()))
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    q, k, v = (x.detach() for x in (q, k, v))
    direct = sl.attention_backward(q, k, v, out.detach(), lse.detach(), flow, lse_flow)
    for x, y in zip(direct, want, strict=True):
        assert torch.equal(x, y)
    operation = ops.attention_backward_op(
        q, k, v, out.detach(), lse.detach(), flow, lse_flow, None, [], text_of(Options()), None, []
    )
    for x, y in zip(operation, want, strict=True):
        assert torch.equal(x, y)
