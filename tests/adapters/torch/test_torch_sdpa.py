"""speedlight.torch.scaled_dot_product_attention: PyTorch's signature and meaning, to the letter."""

from __future__ import annotations

import gc
import inspect
import itertools
import math
import os
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FULL
from repeated import forget
from tolerance import assert_equal
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import speedlight as sl
import speedlight.torch
from speedlight.autograd import attending
from speedlight.calls import backward, dense
from speedlight.expressions.tables import Table

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
F = torch.nn.functional
attend = speedlight.torch.scaled_dot_product_attention


def formula(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """What PyTorch documents, in float64; rows that see nothing are 0."""
    q, k, v = (x.double() for x in (query, key, value))
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), -math.inf)
    if attn_mask is not None:
        scores = (
            scores.masked_fill(attn_mask.logical_not(), -math.inf) if attn_mask.dtype == torch.bool
            else scores + attn_mask
        )  # fmt: skip
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0) @ v


def drawn(*shape, dtype=torch.float64, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_(grad)


def test_signature():
    """Names, order, defaults and what is keyword-only are PyTorch's, in this version of it."""
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    own = inspect.signature(attend).parameters.values()
    assert [x.name for x in own] == [x.name for x in schema]
    for mine, theirs in zip(own, schema, strict=True):
        assert (mine.kind is mine.KEYWORD_ONLY) == theirs.kwarg_only
        assert theirs.name in ("query", "key", "value") or mine.default == theirs.default_value


def samples():
    """As torch.testing's OpInfo of this function draws them (to import it takes expecttest), and one of its own."""
    batch, q_len, k_len, heads, dim = 4, 3, 6, 4, 8
    kinds = {
        "3-D": ((batch, q_len, dim), (batch, k_len, dim)),
        "4-D": ((batch, heads, q_len, dim), (batch, heads, k_len, dim)),
        "broadcast": ((heads, q_len, dim), (batch, heads, k_len, dim)),
    }
    every = list(itertools.product(kinds.items(), (True, False), (0.0, 0.5)))
    for (name, (q, k)), causal, dropout in every[::5]:  # test_torch_samples.py has all of them, in long runs
        yield pytest.param(
            (q, k, k), None, {"is_causal": causal, "dropout_p": dropout}, id=f"{name} {causal} {dropout}"
        )
    q, k = kinds["4-D"]
    yield pytest.param((q, k, k), (q_len, k_len), {}, id="mask")


@pytest.mark.parametrize(("shapes", "mask", "options"), list(samples()))
def test_gradients_of_the_samples(shapes, mask, options):
    tensors = [drawn(*shape, seed=n, grad=True) for n, shape in enumerate(shapes)]
    if mask is not None:
        tensors.append(drawn(*mask, grad=True))

    def run(*given):
        torch.manual_seed(5)
        return attend(*given, **options)

    if not options.get("dropout_p"):
        known = {k: v for k, v in options.items() if k != "dropout_p"}
        assert_equal(run(*tensors), formula(*tensors, **known))
    assert gradcheck(run, tensors, fast_mode=not FULL)
    assert gradgradcheck(run, tensors, fast_mode=True)


def random_call(rng):
    """Shapes that broadcast, masks and options, in float64: arguments of PyTorch's function."""
    batch = [int(rng.integers(1, 4)) for _ in range(rng.integers(0, 3))]
    gqa, dim, value_dim = bool(rng.random() < 0.3), 8, int(rng.choice([8, 8, 5]))
    heads, kv = (6, int(rng.choice([1, 2, 3, 6]))) if gqa else (3, 3)
    q_len, k_len = int(rng.integers(1, 9)), int(rng.integers(1, 9))

    def lead(heads):
        sizes = [*batch, heads] if gqa else [n if rng.random() < 0.8 else 1 for n in (*batch, heads)]
        return sizes if gqa else sizes[int(rng.integers(0, len(sizes) + 1)) if rng.random() < 0.2 else 0 :]

    shapes = [(*lead(heads), q_len, dim), (*lead(kv), k_len, dim), (*lead(kv), k_len, value_dim)]
    tensors = [drawn(*s, seed=int(rng.integers(99)), grad=rng.random() < 0.7) for s in shapes]
    options: dict = {"scale": rng.choice([None, 0.0, -0.7, 1.3]), "enable_gqa": gqa}
    kind = rng.choice(["none", "causal", "bool", "float"])
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        lengths = [len(s) for s in shapes]
        full = torch.broadcast_shapes(*([s[:-3] for s in shapes] if gqa else [s[:-2] for s in shapes]))
        full = [*full, *([heads] if gqa else []), q_len, k_len]
        own = [n if rng.random() < 0.6 else 1 for n in full][int(rng.integers(0, len(full) - 1)) :]
        assert len(full) == max(lengths)
        mask = drawn(*own, seed=3, grad=kind == "float" and rng.random() < 0.5)
        options["attn_mask"] = mask > -0.5 if kind == "bool" else mask
    return tensors, options


@pytest.mark.parametrize("seed", range(400 if FULL else 3))
def test_random_options(seed):
    """Whatever PyTorch takes: its result, the formula's, and the gradients of all that requires grad."""
    tensors, options = random_call(np.random.default_rng(seed))
    want = formula(*tensors, **options)
    got = attend(*tensors, **options)
    assert_equal(got, want)
    try:
        if options["scale"] != 0:  # by which its kernels multiply -inf
            assert_equal(F.scaled_dot_product_attention(*tensors, **options), want, "PyTorch's")
    except RuntimeError as error:  # it adds a mask of more dimensions in place, where nothing requires grad
        assert "doesn't match the broadcast shape" in str(error)
    followed = [x for x in (*tensors, options.get("attn_mask")) if x is not None and x.requires_grad]
    assert got.requires_grad == bool(followed)
    if followed:
        flow = drawn(*got.shape, seed=11)
        grads = zip(torch.autograd.grad(got, followed, flow), torch.autograd.grad(want, followed, flow), strict=True)
        for mine, theirs in grads:
            assert_equal(mine, theirs, "gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *[torch.float16, torch.float64] * FULL])
def test_same_bits_as_attention(dtype):
    q, k, v = (drawn(2, n, 40, 16, dtype=dtype, seed=n) for n in (6, 3, 3))
    assert torch.equal(attend(q, k, v, is_causal=True, enable_gqa=True), sl.attention(q, k, v, causal="top-left"))
    mask = drawn(40, 40, dtype=torch.float32)  # goes with every dtype
    assert torch.equal(attend(q, k, v, mask, enable_gqa=True), sl.attention(q, k, v, score=mask))


def test_a_masks_gradient_is_its_own():
    """Its dtype and shape, beside queries of 16 bits."""
    q = drawn(2, 3, 40, 16, dtype=torch.bfloat16)
    for mask in (drawn(3, 1, 40, dtype=torch.float32, grad=True), drawn(3, 1, 40, dtype=torch.bfloat16, grad=True)):
        attend(q, q, q, mask).sum().backward()
        assert mask.grad.dtype == mask.dtype and mask.grad.shape == mask.shape and mask.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_that_see_nothing(kind):
    """0, as PyTorch's are on the CPU; nothing flows back from them."""
    q, k, v = (drawn(2, 3, n, 8, seed=n, grad=True) for n in (4, 5, 6))
    k, v = k, v[:, :, :5]
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1] = False
    mask = mask if kind == "bool" else torch.zeros(4, 5, dtype=q.dtype).masked_fill(~mask, -math.inf)
    out = attend(q, k, v, mask)
    assert (out[:, :, 1] == 0).all() and torch.equal(
        F.scaled_dot_product_attention(q, k, v, mask)[:, :, 1], out[:, :, 1]
    )
    out.sum().backward()
    assert (q.grad[:, :, 1] == 0).all() and q.grad[:, :, 0].abs().min() > 0


def test_no_keys_no_queries_no_items():
    q, k = drawn(2, 3, 4, 8), drawn(2, 3, 5, 8)
    assert (attend(q, k[:, :, :0], k[:, :, :0]) == 0).all()
    assert attend(q[:, :, :0], k, k).shape == (2, 3, 0, 8) and attend(q[:0], k[:0], k[:0]).shape == (0, 3, 4, 8)


def test_causal_biases():
    q, k = drawn(2, 3, 4, 8), drawn(2, 3, 6, 8)
    for bias in (causal_lower_right(4, 6), causal_upper_left(4, 6)):
        assert_equal(attend(q, k, k, bias), formula(q, k, k, bias._materialize()))
    with pytest.raises(sl.ArgumentError, match=r"attn_mask: expected a CausalBias of \(4, 6\); got one of \(4, 7\)"):
        attend(q, k, k, causal_lower_right(4, 7))
    with pytest.raises(sl.ArgumentError, match="is_causal"):
        attend(q, k, k, causal_upper_left(4, 6), is_causal=True)


def test_dropout_is_drawn_from_pytorchs_generator():
    q = drawn(2, 3, 40, 8, grad=True)

    def run(seed, p=0.4):
        torch.manual_seed(seed)
        out = attend(q, q, q, dropout_p=p)
        return out, torch.rand(())

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert first[1] == again[1]
    torch.manual_seed(1)
    seed = int(torch.randint(1 << 62, ()))
    assert torch.equal(first[0], sl.attention(*[q.detach()] * 3, dropout=0.4, seed=seed))
    torch.manual_seed(1)
    after_nothing = torch.rand(())
    assert run(1, 0.0)[1] == after_nothing  # nothing is drawn where nothing is dropped
    assert (run(1, 1.0)[0] == 0).all()


REFUSED = {
    "lengths": (lambda q: (q, q, q[:, :, :3]), {}, r"value: expected length 4, as key has; got 3"),
    "dims": (lambda q: (q, q[..., :4], q), {}, r"key: expected last dim 8, as query has; got shape \(2, 3, 4, 4\)"),
    "one dimension": (lambda q: (q[0, 0, 0], q, q), {}, r"query: expected \(length, dim\) at least; got shape \(8,\)"),
    "no heads": (lambda q: (q[0, 0],) * 3, {"enable_gqa": True}, r"query: expected \(heads, length, dim\) at least"),
    "heads": (
        lambda q: (q, q[:, :2], q[:, :2]),
        {"enable_gqa": True},
        r"key: expected a number of heads that divides .* 3; got 2",
    ),
    "heads without gqa": (
        lambda q: (torch.cat([q, q], 1), q, q),
        {},
        r"key: expected .* broadcast; .* enable_gqa=True",
    ),
    "mask and causal": (
        lambda q: (q, q, q, torch.ones(4, 4)),
        {"is_causal": True},
        r"is_causal: expected False beside",
    ),
    "mask's dtype": (
        lambda q: (q, q, q, torch.ones(4, 4, dtype=torch.float16)),
        {},
        r"attn_mask: .* got torch\.float16",
    ),
    "mask of ints": (lambda q: (q, q, q, torch.ones(4, 4, dtype=torch.int64)), {}, r"attn_mask: .* got torch\.int64"),
    "mask's shape": (
        lambda q: (q, q, q, torch.ones(3, 4)),
        {},
        r"attn_mask: .* broadcasts to \(2, 3, 4, 4\); got \(3, 4\)",
    ),
    "mask of one dim": (lambda q: (q, q, q, torch.ones(4)), {}, r"attn_mask: expected a shape of 2 dims at least"),
    "mask beyond": (lambda q: (q[:1], q[:1], q[:1], torch.ones(2, 1, 4, 4)), {}, r"attn_mask: .* \(1, 3, 4, 4\); got"),
    "no mask": (lambda q: (q, q, q, [[True]]), {}, r"attn_mask: expected a bool tensor.*; got list"),
    "dropout": (lambda q: (q, q, q), {"dropout_p": 1.5}, r"dropout_p: expected a probability from 0 to 1; got 1\.5"),
    "scale": (lambda q: (q, q, q), {"scale": math.nan}, r"scale: expected a finite number"),
    "dtypes": (lambda q: (q, q.float(), q), {}, r"key: expected dtype float64, as query has"),
    "nested mask": (
        lambda q: (q, q, q, torch.nested.nested_tensor([torch.ones(4, 4)] * 2)),
        {},
        "attn_mask: expected a strided tensor; got a nested one",
    ),
    "sparse mask": (lambda q: (q, q, q, torch.ones(4, 4).to_sparse()), {}, "attn_mask: expected a strided tensor"),
    "no tensor": (lambda q: (q.numpy(), q, q), {}, r"query: expected a tensor; got ndarray"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arguments, options, message = REFUSED[name]
    with pytest.raises(sl.Error, match=message):
        attend(*arguments(drawn(2, 3, 4, 8)), **options)


@pytest.mark.parametrize("shape", [None, (20, 20), (1, 3, 20, 20), (3, 20, 20), (40, 1, 20, 20)])
def test_a_recorded_call_of_a_known_form_describes_and_traces_nothing(shape, monkeypatch):
    """The second of a form, forwards and backwards, of other numbers and other upstream strides: the bits of one that
    is prepared anew.
    """

    def results(seed, expanded=False):
        torch.manual_seed(seed)
        given = [torch.randn(40, 3, 20, 16, requires_grad=True) for _ in range(3)]
        given += [] if shape is None else [torch.randn(shape, requires_grad=True)]
        out = attend(*given)
        flow = torch.randn(1).expand(out.shape) if expanded else torch.randn(out.shape)
        return [out.detach(), *torch.autograd.grad(out, given, flow)]

    cases, want = [(1, False), (2, True), (3, False)], []
    for case in cases:
        forget()
        want.append(results(*case))
    for case in cases[:2]:
        results(*case)
    for where, name in ((Table, "__init__"), (backward, "describe"), (dense, "describe"), (attending, "settled")):
        monkeypatch.setattr(where, name, None)
    for case, those in zip(cases, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(results(*case), those, strict=True))


def test_a_known_form_of_a_mask_that_is_written_before_backward_is_refused():
    q, k, v = (drawn(2, 3, 20, 16, dtype=torch.float32, seed=s, grad=True) for s in range(3))
    biases = [drawn(20, 20, dtype=torch.float32), drawn(20, 20, dtype=torch.float32, grad=True)]
    for mask in (*biases, torch.ones(20, 20, dtype=torch.bool)):
        for _ in range(2):
            out = attend(q, k, v, mask)
            out.sum().backward(retain_graph=True)
            mask.detach()[0] = 0
            with pytest.raises((sl.Error, RuntimeError), match="written to since|modified by an inplace operation"):
                out.sum().backward()


def test_masks_of_inference_mode_are_trained_with_each_time():
    """They have no version that tells whether somebody wrote to them."""
    q = drawn(2, 3, 20, 16, dtype=torch.float32, grad=True)
    masks = drawn(20, 20, dtype=torch.float32), torch.ones(20, 20, dtype=torch.bool).tril()
    with torch.inference_mode():
        inferred = [x.clone() for x in masks]
    for mask, same in zip(masks, inferred, strict=True):
        (want,) = torch.autograd.grad(attend(q, q, q, mask).sum(), q)
        for _ in range(3):
            assert torch.equal(torch.autograd.grad(attend(q, q, q, same).sum(), q)[0], want)


def test_a_part_of_a_frozen_parameter_is_refused_in_a_known_form_too():
    """No gradient flows through it to the whole."""
    q, whole = drawn(2, 3, 20, 16, dtype=torch.float32, grad=True), drawn(2, 20, 20, dtype=torch.float32)
    for _ in range(2):
        attend(q, q, q, whole[0].clone().requires_grad_()).sum().backward()
    part = whole[0].requires_grad_()
    whole.requires_grad_()
    with pytest.raises(sl.ArgumentError, match="a part of one that requires grad now"):
        attend(q, q, q, part)


def peak(run):
    """What a call takes beyond what is there, at most, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def resident(which):
    return 1024 * int(re.findall(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux says what was resident at most")
@pytest.mark.parametrize("form", ["mask that requires grad", "dropout", *["value dim", "3-D"] * FULL])
def test_memory(form):
    """What PyTorch computes densely, with gradients: nothing of the square's size but for a mask."""
    n = 3000 if FULL else 1400
    q, k, v = (drawn(1, 1, n, 16, dtype=torch.float32, seed=s, grad=True) for s in range(3))
    mask = drawn(n, n, dtype=torch.float32, grad=True) if form.startswith("mask") else None
    v = v[..., :8] if form == "value dim" else v
    q, k, v = (x[0] for x in (q, k, v)) if form == "3-D" else (q, k, v)

    def run(rows):
        seen = None if mask is None else mask[:rows, :rows]
        attend(*(x[..., :rows, :] for x in (q, k, v)), seen, 0.2 if form == "dropout" else 0.0).sum().backward()

    run(200)  # compiled, and threads started
    square = 4 * n * n
    assert peak(lambda: run(n)) < (5 * square if mask is not None else 0.5 * square)


@pytest.mark.parametrize("retained", [False, True])
def test_a_backward_pass_keeps_masks_and_biases_only_if_it_may_come_again(retained):
    """Of a new form, and of a known one; the result lives on."""
    for _ in range(2):
        q = drawn(2, 3, 20, 16, dtype=torch.float32, grad=True)
        mask, bias = torch.ones(20, 20, dtype=torch.bool).tril(), drawn(3, 20, 20, dtype=torch.float32)
        outs = [attend(q, q, q, x) for x in (mask, bias)]
        alive = [weakref.ref(mask), weakref.ref(bias)]
        del mask, bias
        gc.collect()
        assert None not in [x() for x in alive]
        for out in outs:
            out.sum().backward(retain_graph=retained)
            first, q.grad = q.grad, None
            if retained:
                out.sum().backward(retain_graph=True)
                assert torch.equal(q.grad, first)
            q.grad = None
        gc.collect()
        assert [x() is not None for x in alive] == [retained] * 2


def test_an_interrupted_backward_pass_can_be_made_again(monkeypatch):
    """What it reads is released only once it is done."""
    q, mask = drawn(2, 3, 20, 16, dtype=torch.float32, grad=True), torch.ones(20, 20, dtype=torch.bool).tril()
    (want,) = torch.autograd.grad(attend(q, q, q, mask).sum(), q)
    for _ in range(2):
        total = attend(q, q, q, mask).sum()
        with monkeypatch.context() as patch:
            patch.setattr(attending, "_flow_back", interrupted)
            with pytest.raises(KeyboardInterrupt):
                total.backward()
        (found,) = torch.autograd.grad(total, q)
        assert torch.equal(found, want)


def interrupted(*_):
    raise KeyboardInterrupt
