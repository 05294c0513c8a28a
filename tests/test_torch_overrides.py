"""Models that exist on speedlight: sdpa(), patch(), unpatch(), report(), and the operators of PyTorch's behind them."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch
from conftest import FULL
from test_torch_sdpa import assert_equal, drawn, formula
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

import speedlight as sl
import speedlight.torch
from speedlight.torch import patch, report, sdpa, unpatch

pytestmark = pytest.mark.usefixtures("one_kernel")  # kernels of few shapes: engines' tests have the others
F = torch.nn.functional
SDPA, FLASH = "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"
FAST_PATH, WEIGHTS = "_native_multi_head_attention", "multi_head_attention_forward"


@pytest.fixture(autouse=True)
def counted():
    report(reset=True)
    yield
    assert not sl.torch.routing.ours(), "a test left its thread asking for speedlight"


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


LEFT = {
    "attn_mask beside is_causal": ({"attn_mask": torch.ones(8, 8, dtype=torch.bool), "is_causal": True}, torch.float32),
    "scale is not finite, or beyond 1e30": ({"scale": 1e31}, torch.float64),
    "torch.complex64": ({}, torch.complex64),
    "dropout_p is no probability": ({"dropout_p": 1.5}, torch.float64),
}


@pytest.mark.parametrize("why", LEFT)
def test_left_to_pytorch(why):
    """What we do not support is PyTorch's, its errors included, and counted."""
    options, dtype = LEFT[why]
    q = torch.ones(1, 2, 8, 8, dtype=dtype)

    def run():
        try:
            return F.scaled_dot_product_attention(q, q, q, **options)
        except RuntimeError as error:
            return str(error)

    want = run()
    with sdpa():
        got = run()
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    assert report() == ({}, {(SDPA, why): 1})


def test_head_dims_of_0_are_left():
    q = drawn(1, 2, 8, 8)
    with sdpa():
        assert F.scaled_dot_product_attention(q, q, q[..., :0]).shape == (1, 2, 8, 0)
    assert report().left == {(SDPA, "a head dim of 0"): 1}


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


# --- modules


@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention(training):
    """Without its weights it is ours, on the fast path and off it; with them it is PyTorch's, and counted."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64).train(training)
    x = drawn(2, 8, 16)
    with torch.set_grad_enabled(training):
        want, weights = layer(x, x, x, need_weights=True)
        with sdpa():
            got, nothing = layer(x, x, x, need_weights=False)
            same, seen = layer(x, x, x)
    assert nothing is None and torch.equal(seen, weights) and torch.equal(same, want)
    assert_equal(got.detach(), want)
    name = SDPA if training else FAST_PATH
    assert report() == ({name: 1}, {(WEIGHTS if training else FAST_PATH, "need_weights"): 1})


PAD = torch.tensor([[False] * 8, [False] * 5 + [True] * 3])
CAUSAL = torch.ones(8, 8, dtype=torch.bool).triu(1)
ENCODER_MASKS = {
    "none": {},
    "causal": {"src_mask": CAUSAL},
    "padding": {"src_key_padding_mask": PAD},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": PAD},
    "heads": {"src_mask": CAUSAL.expand(4, 8, 8)},
}


@pytest.mark.each("masks", "norm_first")
@pytest.mark.parametrize("masks", ENCODER_MASKS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_encoders_fast_path(masks, norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=norm_first, batch_first=True, dtype=torch.float64).eval()
    x = drawn(2, 8, 16)
    with torch.no_grad():
        want = layer(x, **ENCODER_MASKS[masks])
        with sdpa():
            got = layer(x, **ENCODER_MASKS[masks])
    assert_equal(got, want)
    assert report() == ({FAST_PATH: 1}, {})


def test_float_masks_of_the_fast_path():
    """PyTorch reads them as bool there: what is not 0 hides. 0 and -inf mean the same to both."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x, added = drawn(2, 8, 16).float(), torch.zeros(8, 8).masked_fill(CAUSAL, -torch.inf)
    for mask, reports in ((added, ({FAST_PATH: 1}, {})), (torch.rand(8, 8) + 1, None)):
        with torch.no_grad():
            want = layer(x, src_mask=mask)
            with sdpa():
                got = layer(x, src_mask=mask)
        assert torch.allclose(got, want, atol=1e-5, equal_nan=True)
        found = report(reset=True)
        assert found == reports or list(found.left) == [
            (FAST_PATH, "a float mask of other numbers than 0 and -inf, which PyTorch reads as bool")
        ]


def test_nested_tensors_of_the_encoder():
    """nn.TransformerEncoder packs padded batches where nobody trains."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float64), 2
    ).eval()
    x = drawn(2, 8, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        want = model(x, src_key_padding_mask=PAD)
        with sdpa():
            got = model(x, src_key_padding_mask=PAD)
    assert_equal(got, want)
    assert report() == ({FAST_PATH: 2}, {})


class Block(nn.Module):
    """Of a small GPT."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = (nn.Linear(16, n, dtype=torch.float64) for n in (48, 16))
        self.norm = nn.LayerNorm(16, dtype=torch.float64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def gpt():
    return nn.Sequential(
        nn.Embedding(11, 16, dtype=torch.float64), Block(), Block(), nn.Linear(16, 11, dtype=torch.float64)
    )


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, dtype=torch.float64)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.first, self.last = nn.Embedding(11, 16, dtype=torch.float64), nn.Linear(16, 11, dtype=torch.float64)

    def forward(self, tokens):
        return self.last(self.body(self.first(tokens), mask=CAUSAL, is_causal=True))


def trained(make, steps=20):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens, losses = torch.arange(24).view(3, 8) % 11, []
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("make", [gpt, *[Encoder] * FULL])
def test_training(make):
    """20 steps of models that exist: the same losses."""
    want = trained(make)
    patch()
    try:
        got = trained(make)
    finally:
        unpatch()
    assert report().taken == {SDPA: 40} and not report().left
    assert want[-1] < 0.9 * want[0]
    assert_equal(got, want)


# --- compilers and transforms


def test_compiled_inside():
    """A graph that is compiled inside is ours, wherever it runs; forwards and backwards."""
    torch.compiler.reset()
    q = drawn(2, 3, 8, 8, grad=True)
    mask = drawn(8, 8, grad=True)
    run = torch.compile(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), backend="aot_eager")
    with sdpa():
        got = run(q, mask)
    taken = report(reset=True).taken
    assert set(taken) <= {SDPA, f"{SDPA}, compiled into a graph"} and taken
    want = formula(q, q, q, mask)
    assert_equal(got, want)
    flow = drawn(2, 3, 8, 8, seed=4)
    for a, b in zip(*(torch.autograd.grad(x, (q, mask), flow) for x in (got, want)), strict=True):
        assert_equal(a, b)
    torch.compiler.reset()


def test_compiled_outside():
    """Of a graph that was compiled before, what PyTorch made its flash kernel is ours when it runs inside."""
    torch.compiler.reset()
    q = drawn(2, 3, 8, 8, grad=True)
    run = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), backend="aot_eager")
    assert_equal(run(q), formula(q, q, q, is_causal=True))
    assert not report().taken
    with sdpa():
        got = run(q)
    assert report().taken == {FLASH: 1}
    (grad,) = torch.autograd.grad(got.sum(), q)  # outside, and ours: of the forward's log-sum-exps
    assert_equal(grad, torch.autograd.grad(formula(q, q, q, is_causal=True).sum(), q)[0])
    patch()  # graphs are made anew
    try:
        run(q)
    finally:
        unpatch()
    assert any("compiled" in name or name == SDPA for name in report().taken)
    torch.compiler.reset()


def test_a_compiled_function_may_enter():
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def run(q):
        with sdpa():
            return F.scaled_dot_product_attention(q, q, q)

    q = drawn(2, 3, 8, 8)
    assert_equal(run(q), formula(q, q, q))
    torch.compiler.reset()


def test_exported():
    """A program keeps PyTorch's operator, wherever it was made, and runs on who is asked then."""

    class Model(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = drawn(2, 3, 8, 8)
    with sdpa():
        program = torch.export.export(Model(), (q,)).module()
        report(reset=True)
        assert_equal(program(q), formula(q, q, q, is_causal=True))
    assert report().taken == {SDPA: 1}
    program(q)
    assert report().taken == {SDPA: 1}


def test_dropout_in_a_graph_is_left():
    """Which weights are dropped is drawn when a graph runs, and a seed is a number of the graph."""
    torch.compiler.reset()
    q = drawn(1, 2, 8, 8)
    with sdpa():
        torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), backend="aot_eager")(q)
    assert (SDPA, "dropout_p in a graph that is being compiled") in report().left
    torch.compiler.reset()


def test_transforms():
    """vmap comes to us by PyTorch's flash kernel; what is differentiated by torch.func is PyTorch's, and counted."""
    q = drawn(4, 2, 8, 8)
    with sdpa():
        got = torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))(q)
        assert_equal(got, formula(q, q, q, is_causal=True))
        grad = torch.func.grad(lambda x: F.scaled_dot_product_attention(x, x, x).sum())(q)
    assert_equal(grad, torch.func.grad(lambda x: formula(x, x, x).sum())(q))
    assert report().left == {(SDPA, "inside torch.func"): 1}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_tangents():
    q, t = drawn(1, 2, 8, 8), drawn(1, 2, 8, 8, seed=1)
    with sdpa(), forward_ad.dual_level():
        x = forward_ad.make_dual(q, t)
        out = forward_ad.unpack_dual(F.scaled_dot_product_attention(x, x, x))
    assert_equal(out.tangent, torch.func.jvp(lambda x: formula(x, x, x), (q,), (t,))[1])


def test_lazily_negated():
    q = torch.complex(drawn(1, 2, 8, 8), drawn(1, 2, 8, 8, seed=1)).conj().imag
    assert q.is_neg()
    with sdpa():
        assert_equal(F.scaled_dot_product_attention(q, q, q), formula(q, q, q))


def test_checkpoint_inside():
    from torch.utils.checkpoint import checkpoint

    q = drawn(2, 3, 8, 8, grad=True)

    def run(x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)

    with sdpa():
        torch.manual_seed(1)
        (want,) = torch.autograd.grad(run(q).sum(), q)
        torch.manual_seed(1)
        (got,) = torch.autograd.grad(checkpoint(run, q, use_reentrant=False).sum(), q)
    assert torch.equal(got, want)


# --- PyTorch's own operators

FLASH_FORMS = {  # causal or not, and what else
    "causal": (True, {}),
    "mask": (False, {"attn_mask": drawn(8, 8)}),
    "empty rows": (False, {"attn_mask": torch.where(drawn(8, 8) > 1.2, 0.0, -torch.inf), "scale": 0.3}),
}


@pytest.mark.parametrize("form", FLASH_FORMS)
def test_flash_operator(form):
    """Values, log-sum-exps and layouts as PyTorch's, and the backward with whom made the forward."""
    causal, rest = FLASH_FORMS[form]
    q, d_out = drawn(2, 3, 8, 8), drawn(2, 3, 8, 8, seed=5)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    theirs = forward(q, q, q, 0.0, causal, **rest)
    with sdpa():
        ours = forward(q, q, q, 0.0, causal, **rest)
        counted_once = report().taken
    assert counted_once == {FLASH: 1}
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.stride() == other.stride() and mine.dtype == other.dtype
        assert_equal(mine, other)
    want = backward(d_out, q, q, q, *theirs, 0.0, causal, **rest)
    got = backward(d_out, q, q, q, *ours, 0.0, causal, **rest)
    with sdpa():
        still = backward(d_out, q, q, q, *theirs, 0.0, causal, **rest)
    for mine, other, same in zip(got, want, still, strict=True):
        assert mine.stride() == other.stride() and torch.equal(other, same)
        assert_equal(mine, other)


WINDOWS = {"all": (-1, -1), "causal": (-1, 0), "window": (3, 0), "both sides": (2, 1)}


def by_sequence(q, k, v, window, lengths_q, lengths_k):
    """What varlen_attn() is, sequence by sequence, in FlashAttention's alignment."""
    parts = []
    for a, b, c in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
        i, j = torch.arange(len(a))[:, None] + len(b) - len(a), torch.arange(len(b))
        left, right = (n if n >= 0 else 99 for n in window)
        seen = (j >= i - left) & (j <= i + right)
        parts.append(formula(*(x.transpose(0, 1) for x in (a, b, c)), seen, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", WINDOWS if FULL else ["both sides"])
def test_varlen(window):
    """torch.nn.attention.varlen, which PyTorch has for GPUs only: forwards and backwards."""
    lengths_q, lengths_k = [3, 1, 6], [5, 4, 6]
    q, k, v = (drawn(n, h, 8, seed=s, grad=True) for s, (n, h) in enumerate([(10, 4), (15, 2), (15, 2)]))
    cu_q, cu_k = (torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32) for x in (lengths_q, lengths_k))
    with sdpa():
        out, lse = varlen_attn(
            q, k, v, cu_q, cu_k, 6, 6, window_size=WINDOWS[window], enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        written = torch.empty_like(out)
        with torch.no_grad():
            varlen_attn_out(written, q, k, v, cu_q, cu_k, 6, 6, window_size=WINDOWS[window], enable_gqa=True)
    assert lse.shape == (4, 10) and torch.equal(written, out)
    want = by_sequence(q, k, v, WINDOWS[window], lengths_q, lengths_k)
    assert_equal(out, want)
    flow = drawn(10, 4, 8, seed=9)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), flow) for x in (out, want)), strict=True):
        assert_equal(a, b)
    assert report().taken == {"_flash_attention_forward": 2}


def test_varlen_of_caches():
    """Slots that are longer than their sequences, and pages."""
    q, k, v = drawn(4, 4, 8), drawn(20, 2, 8, seed=1), drawn(20, 2, 8, seed=2)
    cu_q, cu_k, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 4], [0, 10, 20], [7, 9]))
    keys, values = (torch.cat([x[:7], x[10:19]]) for x in (k, v))
    want = by_sequence(q, keys, values, (4, 0), [1, 3], [7, 9])
    with sdpa():
        got = varlen_attn(q, k, v, cu_q, cu_k, 3, 10, window_size=(4, 0), enable_gqa=True, seqused_k=used)
        assert_equal(got, want)
        table = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32)
        pages = [x.view(4, 5, 2, 8)[torch.tensor([1, 0, 3, 2])] for x in (k, v)]
        got = varlen_attn(
            q, *pages, cu_q, None, 3, 10, window_size=(4, 0), enable_gqa=True, seqused_k=used, block_table=table
        )
    assert_equal(got, want)


def test_varlen_outside_is_refused():
    with sdpa():
        pass  # our kernel is in PyTorch's table
    q, cu = drawn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"PyTorch has no kernel of it for the CPU.*speedlight\.torch\.sdpa"):
        varlen_attn(q, q, q, cu, cu, 4, 4)


@pytest.mark.skipif(not FULL, reason="a graph of C++ takes seconds to compile")
def test_inductor():
    torch.compiler.reset()
    q = drawn(2, 3, 8, 8, grad=True)
    run = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True).relu())
    want = formula(q, q, q, is_causal=True).relu()
    with sdpa():
        assert_equal(run(q), want)
    torch.compiler.reset()
    run(q)
    with sdpa():  # its strides are asserted in the graph
        got = run(q)
    assert_equal(torch.autograd.grad(got.sum(), q)[0], torch.autograd.grad(want.sum(), q)[0])
    torch.compiler.reset()


@pytest.mark.parametrize("enabled", ["on", 1, None])
def test_sdpa_takes_a_bool(enabled):
    """Refused where it is called, not where it is entered."""
    with pytest.raises(sl.ArgumentError, match="^enabled: expected True or False; got"):
        sdpa(enabled)
