"""What sdpa(), patch(), unpatch() and report() take and leave: contexts, threads, options, and what stays PyTorch's."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from counting import SDPA, counted
from repeated import forget, kept
from test_torch_sdpa import assert_equal, drawn, formula
from torch.nn.attention.bias import causal_lower_right

import speedlight as sl
import speedlight.torch
from speedlight.torch import patch, report, sdpa, unpatch

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
F = torch.nn.functional


def is_ours(x):
    """Whether autograd's node is ours; PyTorch's are named after its operators."""
    return "Scaled" not in type(x.grad_fn).__name__


def test_inside_and_outside():
    q = drawn(2, 3, 8, 8, grad=True)
    attend = F.scaled_dot_product_attention
    assert not is_ours(attend(q, q, q))
    with sdpa():
        assert is_ours(attend(q, q, q))
        with sdpa(False):
            assert not is_ours(attend(q, q, q))
        with sdpa():
            assert is_ours(attend(q, q, q))
        assert torch.equal(attend(q, q, q), speedlight.torch.scaled_dot_product_attention(q, q, q))
    assert not is_ours(attend(q, q, q))
    assert report() == ({SDPA: 3}, {})


def _found(call):
    """What comes out, and how it lies; or the kind of error."""
    torch.manual_seed(0)
    try:
        out = call()
    except (RuntimeError, sl.Error) as error:
        return type(error)
    return out.stride(), out.dtype, out.tolist()


MASK = drawn(8, 8) > 0
ALIKE = {  # of attention(), and of PyTorch's: arguments of one form, and rules that differ
    "a mask beside is_causal": ({"mask": MASK}, {"attn_mask": MASK, "is_causal": True}, {}),
    "is_causal beside a mask": ({"mask": MASK, "causal": "top-left"}, {"attn_mask": MASK, "is_causal": True}, {}),
    "a mask of one dimension": ({"mask": MASK[0]}, {"attn_mask": MASK[0]}, {}),
    "dropout": ({}, {"dropout_p": 0.5}, {}),
    "a mask of another float": ({"score": drawn(8, 8).half()}, {"attn_mask": drawn(8, 8).half()}, {}),
    "fewer heads": ({}, {}, {"heads": 2}),
    "one batch item's keys": ({}, {}, {"batch": 1}),
    "another value dim": ({}, {}, {"value_dim": 4}),
    "keys of another dtype": ({}, {}, {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("name", ALIKE)
def test_calls_that_attention_has_prepared_are_taken_by_pytorch_s_rules(name, monkeypatch):
    """What attention() took before, of the same tensors, changes no call of PyTorch's, nor refuses one less."""
    options, theirs, sizes = ALIKE[name]
    q = drawn(2, 8, 4, 8).float().transpose(1, 2)
    k = drawn(sizes.get("batch", 2), 8, sizes.get("heads", 4), 8).to(sizes.get("dtype", torch.float32)).transpose(1, 2)
    v = k[..., : sizes.get("value_dim", 8)]
    forget()
    with sdpa():
        want = _found(lambda: F.scaled_dot_product_attention(q, k, v, **theirs))
        forget()
        for _ in range(2):
            sl.attention(q, k, v, **options)
        assert len(kept()) == 1 or name == "a mask of another float"
        for _ in range(2):
            assert _found(lambda: F.scaled_dot_product_attention(q, k, v, **theirs)) == want


def test_heads_are_grouped_where_that_is_asked_for():
    """Each time, whatever was repeated before."""
    q, k = drawn(1, 4, 8, 8), drawn(1, 2, 8, 8)
    with sdpa(), torch.no_grad():
        want = _found(lambda: F.scaled_dot_product_attention(q, k, k))
        for _ in range(4):
            F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        assert _found(lambda: F.scaled_dot_product_attention(q, k, k)) == want


def test_every_option_of_a_call_arrives():
    q, k = drawn(2, 6, 8, 8), drawn(2, 3, 9, 8)
    mask = drawn(8, 9)
    with sdpa():
        for options in (
            {"is_causal": True, "enable_gqa": True},
            {"scale": -0.4, "attn_mask": mask, "enable_gqa": True},
            {"attn_mask": mask > 0, "enable_gqa": True},
        ):
            assert_equal(F.scaled_dot_product_attention(q, k, k, **options), formula(q, k, k, **options))
        bias = causal_lower_right(8, 9)
        got = F.scaled_dot_product_attention(q[:, :3], k, k, bias)
        assert_equal(got, formula(q[:, :3], k, k, bias._materialize()))
        torch.manual_seed(3)
        dropped = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(dropped, speedlight.torch.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    assert report().taken == {SDPA: 5} and not report().left


def test_an_exception_leaves():
    q = drawn(1, 2, 8, 8, grad=True)
    with pytest.raises(ZeroDivisionError), sdpa():
        1 / 0  # noqa: B018
    assert not is_ours(F.scaled_dot_product_attention(q, q, q))
    stopped = sdpa()
    with contextlib.suppress(KeyboardInterrupt), stopped:
        raise KeyboardInterrupt
    assert not is_ours(F.scaled_dot_product_attention(q, q, q))


def test_contexts_that_overlap_without_nesting():
    """As of generators that are not exhausted in turn: leaving one leaves the others."""
    q = drawn(1, 2, 8, 8, grad=True)
    first, second = sdpa(), sdpa()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_ours(F.scaled_dot_product_attention(q, q, q))
    second.__exit__(None, None, None)
    assert not is_ours(F.scaled_dot_product_attention(q, q, q))


def test_threads_have_contexts_of_their_own():
    q, found, turn = drawn(1, 2, 8, 8, grad=True), {}, threading.Barrier(2)

    def work(name, enabled):
        with sdpa(enabled):
            turn.wait(60)  # both are inside
            found[name] = is_ours(F.scaled_dot_product_attention(q, q, q))
            turn.wait(60)

    threads = [threading.Thread(target=work, args=x) for x in (("ours", True), ("PyTorch's", False))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == {"ours": True, "PyTorch's": False}
    assert not is_ours(F.scaled_dot_product_attention(q, q, q))


def test_patch_is_the_whole_processs():
    q, found = drawn(1, 2, 8, 8, grad=True), []

    def elsewhere():
        found.append(is_ours(F.scaled_dot_product_attention(q, q, q)))

    def run():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return found.pop()

    patch()
    patch()
    try:
        assert run()
        with sdpa(False):
            assert run() and not is_ours(F.scaled_dot_product_attention(q, q, q))
        unpatch()
        assert run()
    finally:
        unpatch()
    assert not run()
    with pytest.raises(sl.ArgumentError, match=r"unpatch\(\): expected a patch\(\) before it"):
        unpatch()


def test_a_backward_is_its_forwards():
    """Called outside for a forward that was made inside, and the other way round: the same numbers."""
    q = drawn(2, 3, 40, 8, dtype=torch.float32, grad=True)
    with sdpa():
        ours = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        (inside,) = torch.autograd.grad(ours.sum(), q, retain_graph=True)
    theirs = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    (outside,) = torch.autograd.grad(ours.sum(), q)
    (plain,) = torch.autograd.grad(theirs.sum(), q, retain_graph=True)
    with sdpa():
        (mixed,) = torch.autograd.grad(theirs.sum(), q)
    assert torch.equal(inside, outside) and torch.equal(plain, mixed) and not torch.equal(plain, inside)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_grad(without):
    with without(), sdpa():
        q = drawn(2, 3, 8, 8)  # made in inference mode, too
        assert_equal(F.scaled_dot_product_attention(q, q, q), formula(q, q, q))
    assert report().taken == {SDPA: 1}


def test_autocast():
    q = drawn(2, 3, 8, 8, dtype=torch.float32, grad=True)
    with sdpa(), torch.autocast("cpu", torch.bfloat16):
        out = F.scaled_dot_product_attention(q, q, q, torch.zeros(8, 8))
    assert out.dtype == torch.bfloat16 and report().taken == {SDPA: 1}
    out.sum().backward()
    assert q.grad.dtype == torch.float32


ONES = torch.ones(1, 2, 8, 8)
LEFT = {
    "attn_mask beside is_causal": lambda attend: attend(*[ONES] * 3, MASK, is_causal=True),
    "scale is not finite, or beyond 1e30": lambda attend: attend(*[ONES.double()] * 3, scale=1e31),
    "torch.complex64": lambda attend: attend(*[ONES.to(torch.complex64)] * 3),
    "dropout_p is no probability": lambda attend: attend(*[ONES] * 3, dropout_p=1.5),
    "tensors of fewer than two dimensions": lambda attend: attend(ONES[0, 0, 0], ONES, ONES),
    "tensors of several dtypes": lambda attend: attend(ONES, ONES.double(), ONES),
    "a head dim of 0": lambda attend: attend(ONES, ONES, ONES[..., :0]),
}


@pytest.mark.parametrize("why", LEFT)
def test_left_to_pytorch(why):
    """What we do not support is PyTorch's, its errors included, in their words and class, and counted."""

    def run():
        try:
            return LEFT[why](F.scaled_dot_product_attention)
        except RuntimeError as error:
            return type(error), str(error)

    want = run()
    with sdpa():
        got = run()
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    assert report() == ({}, {(SDPA, why): 1})


def test_a_tensor_with_its_own_way_is_left():
    class Logged(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, arguments=(), options=None):
            with torch._C._DisableTorchDispatch():
                return function(*arguments, **(options or {}))

    q = drawn(1, 2, 8, 8)
    with sdpa():
        F.scaled_dot_product_attention(q.as_subclass(Logged), q, q)
    assert (SDPA, "a tensor of class Logged") in report().left


def test_keys_and_values_of_different_lengths_are_refused():
    q = drawn(1, 2, 8, 8)
    with sdpa(), pytest.raises(sl.ArgumentError, match="value: expected length 8"):
        F.scaled_dot_product_attention(q, q, q[:, :, :7])


def test_report_prints():
    q = drawn(1, 2, 8, 8)
    with sdpa():
        for _ in range(12):
            F.scaled_dot_product_attention(q, q, q)
    assert str(report()) == f"taken  12  {SDPA}"
    assert str(report(reset=True)) == f"taken  12  {SDPA}" and str(report()) == "nothing taken, nothing left"


@pytest.mark.parametrize("enabled", ["on", 1, None])
def test_sdpa_takes_a_bool(enabled):
    """Refused where it is called, not where it is entered."""
    with pytest.raises(sl.ArgumentError, match="^enabled: expected True or False; got"):
        sdpa(enabled)
    with pytest.raises(sl.ArgumentTypeError, match="^reset: expected True or False; got"):
        report(reset=enabled)
