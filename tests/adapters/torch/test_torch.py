"""speedlight.torch.attention: what autograd follows, and what PyTorch's machinery makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import FULL
from tolerance import assert_within

import speedlight as sl
import speedlight.torch
from speedlight import reference
from speedlight.autograd import operators as ops
from speedlight.autograd.forms import tensors_of, text_of
from speedlight.problem.options import Options

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
SHAPE = 2, 4, 2, 12, 8  # batch, q_heads, kv_heads, length, dim


def tensors(dtype=torch.float64, seed=0, grad=True):
    torch.manual_seed(seed)
    b, h, kv, n, d = SHAPE
    return tuple(torch.randn(b, x, n, d).to(dtype).requires_grad_(grad) for x in (h, kv, kv))


def learned(dtype=torch.float64):
    """A bias, a row of one, slopes, sinks, a soft cap, distances: the tensors that a score may learn."""
    torch.manual_seed(1)
    shapes = {"bias": (4, 12, 12), "row": (2, 1, 1, 12), "slopes": (4,), "sinks": (4,), "distances": (4, 23)}
    found = {name: torch.randn(shape, dtype=dtype).requires_grad_() for name, shape in shapes.items()}
    return found | {"cap": torch.tensor(3.0, dtype=dtype, requires_grad=True)}


def options_of(x):
    score = [sl.softcap(x["cap"]), x["bias"], x["row"], sl.alibi(x["slopes"]), sl.relative_bias(x["distances"])]
    return {"causal": True, "score": score, "sink_logits": x["sinks"]}


def ours(q, k, v, x):
    return speedlight.torch.attention(q, k, v, return_lse=True, **options_of(x))


def formula(q, k, v, x):
    """The same in PyTorch."""
    i = torch.arange(q.shape[-2])
    s = q @ k.repeat_interleave(2, 1).mT / q.shape[-1] ** 0.5
    s = x["cap"] * torch.tanh(s / x["cap"]) + x["bias"] + x["row"] + x["slopes"][:, None, None] * (i - i[:, None])
    s = (s + x["distances"][:, i[:, None] - i + 11]).masked_fill(i > i[:, None], -torch.inf)
    s = torch.cat([s, x["sinks"][:, None, None].expand(*s.shape[:-1], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1), s.logsumexp(-1)


def close(got, want, atol=1e-12):
    """Of float64, whose bound the engine's own tests hold."""
    assert (got is None) == (want is None)
    assert got is None or torch.allclose(got, want, rtol=1e-11, atol=atol), (got - want).abs().max()


@pytest.mark.parametrize("flows", ["both", *["out", "lse"] * FULL])
def test_gradients_of_everything(flows):
    q, k, v = tensors()
    x = learned()
    inputs = (q, k, v, *x.values())
    found = []
    for function in (ours, formula):
        out, lse = function(q, k, v, x)
        loss = sum(y.sin().sum() for y, name in ((out, "out"), (lse, "lse")) if flows in (name, "both"))
        found.append((out, lse, *torch.autograd.grad(loss, inputs, allow_unused=True)))
    for got, want in zip(*found, strict=True):
        close(got, torch.zeros_like(got) if want is None else want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if FULL else [torch.bfloat16])
def test_gradients_keep_the_bound(dtype):
    q, k, v = tensors(dtype)
    out, lse = speedlight.torch.attention(q, k, v, causal=True, return_lse=True)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse))
    given = [x.detach() for x in (q, k, v, out, lse, d_out, d_lse)]
    want = reference.backward(*given, causal=True)
    bounds = reference.backward_bound(*given, dot=dtype == torch.bfloat16, causal=True)
    for x, y, bound, name in zip(got, want, bounds, bounds._fields, strict=True):
        assert x.dtype == dtype
        assert_within(x, y, bound, name)


def test_attention_forwards_what_requires_grad():
    q, k, v = tensors()
    x = learned()
    a, b = ours(q, k, v, x), sl.attention(q, k, v, return_lse=True, **options_of(x))
    assert all(torch.equal(y, z) and z.grad_fn is not None for y, z in zip(a, b, strict=True))
    with torch.no_grad():
        assert torch.equal(sl.attention(q, k, v), sl.attention(q.detach(), k.detach(), v.detach()))
    with pytest.raises(sl.UnsupportedError, match="^out: expected None where autograd follows"):
        sl.attention(q, k, v, out=torch.empty_like(q))


@pytest.mark.parametrize("which", range(4) if FULL else [3])
def test_some_inputs_alone(which):
    """Those that do not require grad get none, and the others the same."""
    q, k, v = tensors()
    bias = torch.randn(12, 12, dtype=torch.float64, requires_grad=True)
    inputs = (q, k, v, bias)
    want = torch.autograd.grad(speedlight.torch.attention(q, k, v, score=bias).sin().sum(), inputs)
    given = [x if n == which else x.detach() for n, x in enumerate(inputs)]
    speedlight.torch.attention(*given[:3], score=given[3]).sin().sum().backward()
    assert torch.equal(inputs[which].grad, want[which])


def test_views_get_their_gradients():
    """A fused projection, an expanded key, a transposed layout: nothing is copied, and the results are the same."""
    torch.manual_seed(0)
    fused = torch.randn(2, 12, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    q, k, v = fused.unbind(2)
    k = k[:, :, :1].expand(2, 12, 2, 8)
    v = v[:, :, ::2]
    got = torch.autograd.grad(speedlight.torch.attention(q, k, v, causal=True, layout="blhd").sin().sum(), fused)[0]
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    want = speedlight.torch.attention(q, k, v, causal=True).sin().sum()
    close(got, torch.autograd.grad(want, fused)[0])


def test_one_tensor_behind_two_tables():
    """What flows to both flows to it."""
    q, k, v = tensors(torch.float64, grad=False)
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    one, other = sl.table(slopes), sl.table(slopes)
    out, want = (
        speedlight.torch.attention(q, k, v, score=lambda s, b, h, i, j, t=t: s * one[h] - t[h] * sl.abs(i - j))
        for t in (other, one)
    )
    (want,) = torch.autograd.grad(want.sin().sum(), slopes)
    for again in (False, True):
        (got,) = torch.autograd.grad(out.sin().sum(), slopes, retain_graph=True, create_graph=again)
        close(got, want)


def test_what_cannot_follow_says_so():
    q, k, v = tensors(torch.float32, grad=False)
    score = sl.alibi(torch.rand(4, requires_grad=True))
    with pytest.raises(sl.UnsupportedError, match="^slopes: requires grad.*speedlight.torch.attention"):
        sl.attention(q.numpy(), k.numpy(), v.numpy(), score=score)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=8, capacity=20)
    with pytest.raises(sl.UnsupportedError, match="^q: requires grad.*speedlight.torch.attention"):
        cache.attend(0, q[:1, :, :1].clone().requires_grad_(), k[:1, :, :1], v[:1, :, :1])
    with pytest.raises(sl.UnsupportedError, match="^slopes: requires grad"):
        cache.attend(0, q[:1, :, :1], k[:1, :, :1], v[:1, :, :1], score=score)


# --- as operations


def operands(x=None, **options):
    options = Options(**options)
    return [x, tensors_of(options), text_of(options), None]


def test_further_gradients_are_of_tables_whatever_was_prepared():
    """A bias itself is refused in grads=, also where autograd has had its gradient by such a call."""
    (q, k, v), bias = tensors(), learned()["bias"]
    *given, added = (x.detach() for x in (q, k, v, bias))
    flow = *sl.attention(*given, score=added, return_lse=True), torch.ones_like(q)
    for _ in range(3):
        with pytest.raises(sl.ArgumentTypeError, match=r"grads: expected a tuple of the score's tables .*; got tensor"):
            sl.attention_backward(*given, *flow, score=added, grads=(added,))
        speedlight.torch.attention(q, k, v, score=bias).backward(flow[2])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which opcheck() makes
def test_opcheck():
    q, k, v = tensors()
    x = learned()
    options = Options(**options_of(x))
    tables = [y.detach().requires_grad_() for y in tensors_of(options)]
    arguments = (q, k, v, x["sinks"], tables, text_of(options), None)
    torch.library.opcheck(ops.attention_op, arguments)
    out, lse = (y.detach() for y in ops.attention_op(*arguments))
    flows = (torch.randn_like(out).requires_grad_(), None)
    detached = (q, k, v, out, lse, *flows, *arguments[3:])
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.attention_backward_op, (*detached, [0, 2, -1]), **{} if FULL else {"test_utils": quick})
    if FULL:
        torch.library.opcheck(ops.attention_op, (*(y.detach() for y in (q, k, v)), *operands(causal=True)))
        torch.library.opcheck(ops.attention_backward_op, (*detached, []))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_second_derivatives():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, bias, sinks):
        score = [bias, sl.softcap(2.0)]
        return speedlight.torch.attention(q, k, v, causal=True, score=score, sink_logits=sinks, return_lse=True)

    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def twice(slopes):
        score = [sl.alibi(slopes), sl.alibi(slopes), sl.alibi(slopes * 2)]
        return speedlight.torch.attention(q, k, v, score=score)

    for call, inputs in ((function, (q, k, v, bias, sinks)), *[(twice, (slopes,))] * FULL):
        assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, fast_mode=not FULL)
        assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_transforms():
    """torch.func's of ours are those of the formula."""
    q, k, v = tensors(grad=False)
    x = {name: y.detach() for name, y in learned().items()}
    primals = (q, k, v, *x.values())
    tangents = tuple(torch.randn_like(y) for y in primals)

    def losses(function):
        return lambda *y: function(*y[:3], dict(zip(x, y[3:], strict=True)))[0].sin().sum()

    def results(function):
        loss = losses(function)
        yield from torch.func.grad(loss, argnums=tuple(range(9)))(*primals)
        yield from torch.func.jvp(loss, primals, tangents)
        yield torch.func.jvp(torch.func.grad(loss), primals, tangents)[1]
        yield torch.func.grad(lambda *y: torch.func.grad(loss)(*y).sin().sum())(*primals)
        batched = tuple(torch.stack([y, y / 2]) for y in primals)
        yield torch.func.vmap(loss)(*batched)
        yield from torch.func.vmap(torch.func.grad(loss, argnums=(0, 5)))(*batched)

    for got, want in zip(results(ours), results(formula), strict=True):
        close(got, want)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_tangents():
    q, k, v = tensors(grad=False)
    t = torch.randn_like(q)
    close(torch.func.grad(lambda q: sl.attention(q, k, v).sin().sum())(q),
          torch.func.grad(lambda q: speedlight.torch.attention(q, k, v).sin().sum())(q))  # fmt: skip
    want = torch.func.jvp(lambda q: speedlight.torch.attention(q, k, v, causal=True), (q,), (t,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, t)
        for function in (speedlight.torch.attention, sl.attention):
            got = torch.autograd.forward_ad.unpack_dual(function(dual, k, v, causal=True))
            close(got.primal, want[0])
            close(got.tangent, want[1])


@pytest.mark.each("dims", "options")
@pytest.mark.parametrize("dims", [(0, 0, 0), (2, None, 1), (None, 3, None)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"mask": lambda b, h, i, j: j <= i + b}, {"k_lengths": [5, 9]}, {"dropout": 0.5, "seed": 3},
     {"score": torch.arange(2.0)[:, None, None, None]}],
    ids=["plain", "item", "lengths", "dropout", "bias"],
)  # fmt: skip
def test_vmap(dims, options):
    """Every example is what it would be alone."""
    torch.manual_seed(0)
    b, h, kv, n, d = SHAPE
    shapes = [(b, x, n, d) for x in (h, kv, kv)]
    given = [torch.randn(s if at is None else (*s[:at], 3, *s[at:])) for s, at in zip(shapes, dims, strict=True)]

    def function(q, k, v):
        return speedlight.torch.attention(q, k, v, return_lse=True, **options)

    out, lse = torch.func.vmap(function, in_dims=dims)(*given)
    for one in range(3):
        alone = [x if at is None else x.select(at, one) for x, at in zip(given, dims, strict=True)]
        want, want_lse = function(*alone)
        assert torch.equal(out[one], want) and torch.equal(lse[one], want_lse)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    q, k, v = tensors()
    x = learned()
    want = torch.autograd.grad(ours(q, k, v, x)[0].sin().sum(), (q, k, v, x["sinks"]))
    out = torch.utils.checkpoint.checkpoint(lambda q, k, v: ours(q, k, v, x)[0].sin(), q, k, v, use_reentrant=reentrant)
    out.sum().backward()
    for got, y in zip((q, k, v, x["sinks"]), want, strict=True):
        assert torch.equal(got.grad, y)


def test_inference_mode():
    q, k, v = tensors(grad=False)
    want = speedlight.torch.attention(q, k, v, causal=True)
    with torch.inference_mode():
        got = speedlight.torch.attention(q, k, v, causal=True)
        assert got.is_inference() and torch.equal(got, want)
        assert torch.equal(speedlight.torch.attention(q.clone(), k.clone(), v.clone(), causal=True), want)


def test_what_a_call_reads_must_stay_until_its_backward():
    """Masks, scores and what functions look up are not copied: writing to them in between is an error, not a number."""
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    mask, bias, w = torch.ones(4, 4, dtype=torch.bool).tril(), torch.randn(4, 4), torch.randn(4)
    for options, written in (
        ({"mask": mask}, mask),
        ({"score": bias}, bias),
        ({"score": lambda s, b, h, i, j: s * w[j]}, w),
        ({"mask": lambda b, h, i, j: (w[j] > -9) | (i == j)}, w),
    ):
        for _ in range(3):  # made, repeated, and repeated again
            out = speedlight.torch.attention(q, q, q, **options)
            written.copy_(~written if written is mask else written + 1)
            with pytest.raises(sl.ArgumentError, match="written to since"):
                out.sum().backward()
    lengths = torch.tensor([3])
    out = speedlight.torch.attention(q, q, q, k_lengths=lengths, q_start=0)
    (first,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    lengths.fill_(1)
    assert torch.equal(first, torch.autograd.grad(out.sum(), q)[0])


def frozen_patterns(p):
    """Patterns of a tensor that nobody follows when they are made: they are kept."""
    return {
        "alibi": lambda: sl.alibi(p),
        "table": lambda: sl.expression(lambda s, b, h, i, j, t=sl.table(p): s * t[h]),
        "captured": lambda: sl.expression(lambda s, b, h, i, j: s + p[h] * (j - i)),
    }


@pytest.mark.each("name", "how")
@pytest.mark.parametrize("name", ["alibi", "table", "captured"])
@pytest.mark.parametrize("how", ["frozen", "no_grad"])
def test_patterns_of_what_is_followed_later(name, how):
    """Whether a gradient flows is what holds when a call is made, not when its pattern was."""
    q, k, v = tensors(grad=False)
    p = torch.nn.Parameter(torch.rand(4, dtype=torch.float64), requires_grad=how != "frozen")
    with torch.no_grad():
        kept = frozen_patterns(p)[name]()
        want = speedlight.torch.attention(q, k, v, score=kept)
    p.requires_grad_()
    for call in (speedlight.torch.attention, sl.attention):
        out = call(q, k, v, score=kept)
        assert torch.equal(out, want)
        (got,) = torch.autograd.grad(out.square().sum(), p)
        (anew,) = torch.autograd.grad(call(q, k, v, score=frozen_patterns(p)[name]()).square().sum(), p)
        assert torch.equal(got, anew) and got.abs().sum() > 0
    p.requires_grad_(False)
    assert not speedlight.torch.attention(q, k, v, score=kept).requires_grad


def test_numbers_of_what_is_followed_later():
    """Tensors of one number, and parts of tensors, of which no gradient would arrive."""
    q, k, v = tensors(grad=False)
    c, p = torch.tensor(3.0), torch.rand(8, requires_grad=True)
    kept = [sl.softcap(c), sl.expression(lambda s, b, h, i, j: s * c)]
    with torch.no_grad():
        part = sl.alibi(p[:4])
    c.requires_grad_()
    speedlight.torch.attention(q, k, v, score=kept).square().sum().backward()
    got, c.grad = c.grad, None
    formula = (q @ k.repeat_interleave(2, 1).mT) / 8**0.5
    weights = (c * torch.tanh(formula / c) * c).softmax(-1)
    (weights @ v.repeat_interleave(2, 1)).square().sum().backward()
    assert torch.allclose(got, c.grad, rtol=1e-6)
    for call in (speedlight.torch.attention, sl.attention):
        with pytest.raises(sl.ArgumentError, match="^slopes: expected a tensor that autograd follows"):
            call(q, k, v, score=part)
    speedlight.torch.attention(q, k, v, score=sl.alibi(p.detach()[:4]))


@pytest.mark.parametrize("what", ["mask", "score", "captured", "broadcast"])
def test_arrays_that_a_call_reads_must_stay(what):
    """NumPy counts no writes: the numbers themselves are compared."""
    q, k, v = tensors()
    array = np.zeros((12, 12)) if what != "mask" else np.tri(12, dtype=bool)
    given = {
        "mask": lambda: {"mask": array},
        "score": lambda: {"score": [array]},
        "captured": lambda: {"score": lambda s, b, h, i, j: s + array[i, j]},
        "broadcast": lambda: {"score": np.broadcast_to(array[:1], (4, 12, 12))},
    }[what]
    out = speedlight.torch.attention(q, k, v, **given())
    array[0, 3] = 1
    with pytest.raises(sl.ArgumentError, match="an array of shape .* was written to since"):
        out.sum().backward()
    speedlight.torch.attention(q, k, v, **given()).sum().backward()


def test_lists_are_read_once():
    q, k, v = tensors()
    lists = {"q_lengths": [12, 9], "k_lengths": [12, 8], "sink_logits": [0.0, 1.0, 2.0, 3.0], "window": [3, 2]}
    want = torch.autograd.grad(speedlight.torch.attention(q, k, v, q_start=0, **lists).square().sum(), q)
    out = speedlight.torch.attention(q, k, v, q_start=0, **lists).square().sum()
    for x in lists.values():
        x[:] = [1] * len(x)
    assert torch.equal(torch.autograd.grad(out, q)[0], want[0])


def test_messages_say_the_way_out():
    """Of what tests/docs/test_mistakes.py has not."""
    q, k, v = tensors(grad=False)
    table, attend = sl.table(torch.rand(4)), speedlight.torch.attention
    for call, message in (
        (lambda: attend(q, k, v, score=sl.alibi([0.5, 0.25])), "slopes: .* Give an entry for each query head of the"),
        (lambda: sl.softcap(torch.ones(2)), r"c: expected a number, or a tensor of one; got shape \(2,\)"),
        (
            lambda: sl.attention_backward(q, k, v, q, q[..., 0], q, grads=table, score=sl.alibi(table)),
            r"grads: .* Use grads=\(table,\)",
        ),
        (
            lambda: sl.attention_backward(q, k, v, q, q[..., 0], q, grads="sink_logits", sink_logits=[1.0] * 4),
            r"grads: .* Use grads=\('sink_logits',\)",
        ),
    ):
        with pytest.raises(sl.Error, match=f"^{message}"):
            call()
