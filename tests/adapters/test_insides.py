"""Private names of other libraries: the release at hand has them all, and results are right without any one of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import speedlight as sl
import speedlight.torch
import speedlight.transformers
from speedlight.host import graph_breaks, insides
from speedlight.host.graph_breaks import outside
from speedlight.host.insides import TORCH, TRANSFORMERS, Inside, Insides
from speedlight.tools.libraries import libraries_report, library_rows
from speedlight.torch import fast_path, flash_kernels
from speedlight.transformers import masks

pytestmark = [pytest.mark.usefixtures("one_kernel"), pytest.mark.filterwarnings("ignore:.*torch.jit")]
SIZES = (2, 2, 5, 8)


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(SIZES, generator=torch.Generator().manual_seed(seed))


Q, K, V, T = map(drawn, range(4))


def formula(q, k, v):
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(torch.ones(5, 5).tril().logical_not(), -torch.inf)
    return torch.softmax(scores, -1) @ v


def attend(q, k, v):
    return speedlight.torch.attention(q, k, v, causal=True)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def repeats():
    for _ in range(3):
        with torch.no_grad():
            close(attend(Q, K, V), formula(Q, K, V))


def gradients():
    found = []
    for f in (attend, formula):
        q = Q.clone().requires_grad_()
        for _ in range(3):
            found.append(torch.autograd.grad((f(q, K, V) * T).sum(), q)[0])
    close(found[2], found[-1])


def second_gradients():
    q = Q.clone().requires_grad_()
    found = []
    for f in (attend, formula):
        (first,) = torch.autograd.grad((f(q, K, V) * T).sum(), q, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), q)[0])
    close(*found)


def autocasts():
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert attend(Q, K, V).dtype == torch.bfloat16


def transforms():
    close(torch.func.grad(lambda q: (attend(q, K, V) * T).sum())(Q),
          torch.func.grad(lambda q: (formula(q, K, V) * T).sum())(Q))  # fmt: skip
    close(
        torch.func.vmap(lambda q: attend(q, K, V))(torch.stack([Q, T])), torch.stack([formula(x, K, V) for x in (Q, T)])
    )
    close(
        torch.func.jvp(lambda q: attend(q, K, V), (Q,), (T,))[1],
        torch.func.jvp(lambda q: formula(q, K, V), (Q,), (T,))[1],
    )


def tangents():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(Q, T)
        found = [forward_ad.unpack_dual(f(x, K, V)).tangent for f in (attend, formula)]
    close(*found)


def tables_in_transforms():
    slopes = torch.tensor([0.5, 0.25])
    biased = lambda q: (speedlight.torch.attention(q, K, V, score=sl.alibi(slopes)) * T).sum()  # noqa: E731
    q = Q.clone().requires_grad_()
    close(torch.func.grad(biased)(Q), torch.autograd.grad(biased(q), q)[0])


def traces():
    close(torch.jit.trace(attend, (Q, K, V))(K, Q, V), formula(K, Q, V))
    with pytest.raises(sl.Error):
        torch.jit.trace(sl.attention, (Q, K, V))


def batches_of_gradients():
    q = Q.clone().requires_grad_()
    flows = torch.stack([T, K])
    found = [torch.autograd.grad(f(q, K, V), q, flows, is_grads_batched=True)[0] for f in (attend, formula)]
    close(*found)


def other_peoples_models():
    with speedlight.torch.sdpa(), torch.no_grad():
        for _ in range(3):
            close(F.scaled_dot_product_attention(Q, K, V, is_causal=True), formula(Q, K, V))
        close(F.scaled_dot_product_attention(Q[0], K[0], V[0], is_causal=True), formula(Q[0], K[0], V[0]))


def compiled():
    torch.compiler.reset()
    scale = torch.compile(lambda q, n: speedlight.torch.attention(q, K, V, scale=n), backend="eager", dynamic=True)
    for n in (0.5, 0.25):
        close(scale(Q, n), speedlight.torch.attention(Q, K, V, scale=n))
    cache = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=8, capacity=16)
    step = torch.compile(lambda q: cache.attend(0, q * 1, K, V) * 1, backend="eager")
    with torch.no_grad():
        close(step(Q), formula(Q, K, V))
    torch.compiler.reset()


def masks_of_models():
    spec = masks.attention_mask(2, 5, 5)
    close((spec + 0.0).exp(), torch.ones(5, 5).tril().expand(2, 1, 5, 5))


WAYS = [repeats, gradients, second_gradients, autocasts, transforms, tangents, tables_in_transforms, traces,
        batches_of_gradients, other_peoples_models, masks_of_models]  # fmt: skip
IN_GRAPHS = ("get_eval_frame_callback", "guard_scalar")  # whatever else Dynamo runs is in none of its graphs
# the only ways that end in an error instead
REFUSED = {
    "len_torch_dispatch_stack": {batches_of_gradients},
    "peek_interpreter_stack": {batches_of_gradients},
    "forward_ad": {batches_of_gradients},
    "is_legacy_batchedtensor": {batches_of_gradients},
    "vmapmode_increment_nesting": {batches_of_gradients},
    "vmapmode_decrement_nesting": {batches_of_gradients},
    "add_batch_dim": {batches_of_gradients},
    "remove_batch_dim": {batches_of_gradients},
}


def test_this_release_has_every_private_name():
    """Else it still runs: the plain way's costs are what `speedlight info` says. Look for the name's new place."""
    assert TORCH.missing() == {} and TRANSFORMERS.missing() == {}
    assert all(TORCH.found().values()) and all(TRANSFORMERS.found().values())
    assert vars(torch.compiler.assume_constant_result(lambda: 0))["_dynamo_marked_constant"] is True
    assert vars(outside).keys() <= vars(torch.compiler.disable(lambda: 0)).keys()


def test_a_name_that_is_gone(monkeypatch):
    plain = lambda: 7  # noqa: E731
    gone = Inside("torch._C._no_such_name", plain, "seven is taken")
    place = Inside("torch.no_such_module.level", plain, "none is known", is_value=True)
    there = Inside("torch.autograd.forward_ad._current_level", plain, "", is_value=True)
    known = Insides(gone=gone, place=place, there=there)
    assert known.gone is plain and known.place is plain and known.there is forward_ad
    assert known.missing() == {gone.path: gone.without, place.path: place.without}
    assert known.found() == {gone.path: False, place.path: False, there.path: True}
    with pytest.raises(AttributeError):
        known.other  # noqa: B018
    monkeypatch.setattr("speedlight.tools.libraries._INSIDES", {"torch": known})
    rows = library_rows(libraries_report())
    at = [name for name, _ in rows].index("torch")
    assert "1 of 3 private names that are used are there" in rows[at][1]
    assert rows[at + 1] == ("", "without torch._C._no_such_name: seven is taken")


def test_a_library_that_cannot_be_imported(monkeypatch):
    monkeypatch.setattr("speedlight.tools.libraries._TABLES", {"torch": ("speedlight.no_such_module", "TORCH")})
    text = dict(library_rows(libraries_report()))["torch"]
    assert text.startswith(torch.__version__.partition("+")[0]) and "cannot be imported: ModuleNotFoundError" in text


@pytest.mark.filterwarnings("ignore")  # PyTorch's own: vmap of what has no rule, legacy vmap
@pytest.mark.parametrize("name", [*(x for x in TORCH._known if x not in (*insides._OPERATORS, "skip")), None])
def test_results_without_a_private_name(monkeypatch, name):
    if name is not None:
        monkeypatch.setitem(vars(TORCH), name, TORCH._known[name].plain)
        monkeypatch.setattr(graph_breaks, "_untraced", {})  # what earlier tests made there, with the name, knows it
    for way in [*WAYS, *[compiled] * (name in IN_GRAPHS)]:
        if way in REFUSED.get(name, ()):
            with pytest.raises((sl.Error, RuntimeError)):
                way()
        else:
            way()
    assert insides._depth.number == 0
    assert torch.randn(2).sum().isfinite()  # which raises where a vmap was left open


def test_operators_that_are_gone(monkeypatch):
    """sdpa() takes the place of those that there are."""

    class Recorder:
        def __init__(self):
            self.names = []

        def impl(self, name, *_, **__):
            self.names.append(name)

    def registered():
        recorder = Recorder()
        flash_kernels.register(recorder)
        fast_path.register(recorder)
        return set(recorder.names)

    monkeypatch.setattr(flash_kernels, "_originals", {})
    monkeypatch.setattr(fast_path, "_originals", {})
    assert registered() == set(insides._OPERATORS)
    for name in insides._OPERATORS:
        with monkeypatch.context() as hidden:
            hidden.setitem(vars(TORCH), name, None)
            assert registered() == set(insides._OPERATORS) - {name}


def test_a_frame_that_dynamo_cannot_skip():
    assert TORCH._known["skip"].plain(attend)(Q, K, V).equal(attend(Q, K, V))


KNOWN = ["_SLIDING", "_SLIDING_BOTH", "_CHUNKED", "_PACKED", "_REMAPPED"]


@pytest.mark.parametrize("name", KNOWN)
def test_masks_of_functions_that_are_not_known(monkeypatch, name):
    """They are traced instead: the same keys are seen."""
    theirs = masks.theirs
    ids, places = torch.tensor([[0, 0, 1, 1, 1]] * 2), torch.tensor([[0, 1, 0, 1, 2]] * 2)
    for function in (
        theirs.sliding_window_causal_mask_function(2),
        theirs.sliding_window_bidirectional_overlay(1),
        theirs.and_masks(theirs.chunked_overlay(2, torch.zeros(2, dtype=torch.int64)), theirs.causal_mask_function),
        theirs.and_masks(
            theirs.packed_sequence_mask_function(ids),
            theirs.remap_positions_for_packed_sequence(theirs.sliding_window_causal_mask_function(2), places),
        ),
    ):
        found = []
        for hidden in (False, True):
            if hidden:
                monkeypatch.setattr(masks, name, masks._code_of(None, (), (), None))
            spec = masks.attention_mask(2, 5, 5, mask_function=function)
            found.append(speedlight.transformers.attention_forward(torch.nn.Module(), Q, K, V, spec)[0])
        monkeypatch.undo()
        close(*found)


def test_mask_functions_are_known_by_what_they_show():
    def other(sliding_window):
        return lambda b, h, i, j: j >= i - sliding_window

    rule = lambda i, j: j > i - 2  # noqa: E731
    theirs = masks.theirs.sliding_window_overlay
    assert masks._code_of(theirs, (2,), ("sliding_window",), rule) is theirs(5).__code__
    assert masks._code_of(other, (2,), ("sliding_window",), rule) is not other(5).__code__
    assert masks._code_of(theirs, (2,), ("size",), rule) is not theirs(5).__code__
