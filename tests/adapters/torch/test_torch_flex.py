"""speedlight.torch.flex_attention against PyTorch's own formulation in float64: what people write, and BlockMasks."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from conftest import FULL
from tolerance import assert_within
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as flex

import speedlight as sl
import speedlight.torch
from speedlight.torch import create_block_mask, flex_attention
from speedlight.torch.flex import _split_causal

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
BATCH, HEADS, KV_HEADS, SIDE = 2, 4, 2, 12
LENGTH = SIDE * SIDE
GENERATOR = torch.Generator().manual_seed(3)
DOCUMENTS = torch.repeat_interleave(torch.arange(5), torch.tensor([30, 1, 60, 13, 40]))
OFFSETS = torch.tensor([0, 30, 31, 91, 104, 144])


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR)


# --- masks, as published: PyTorch's blog, attention-gym


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding(size):
    def mask(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= size) & (q_idx >= kv_idx)

    return mask


def prefix_lm(lengths):
    def prefix(b, h, q_idx, kv_idx):
        return kv_idx < lengths[b]

    return flex.or_masks(prefix, causal)


def documents(ids, offsets, inner):
    def mask(b, h, q_idx, kv_idx):
        same = ids[q_idx] == ids[kv_idx]
        return same & inner(b, h, q_idx - offsets[ids[q_idx]], kv_idx - offsets[ids[kv_idx]])

    return mask


def paged(tables, page, inner):
    """Of physical positions, as attention-gym converts a mask: what a page holds in the sequence of each item."""

    def mask(b, h, q_idx, physical):
        logical_block = tables[b, physical // page]
        logical = logical_block * page + physical % page
        return torch.where(logical_block >= 0, inner(b, h, q_idx, logical), False)

    return mask


# --- scores


def alibi(slopes):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod


def dense_bias(bias):
    return lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx]


def relative(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx) / 16


PAGES = torch.stack([torch.randperm(LENGTH // 16, generator=GENERATOR), torch.full((LENGTH // 16,), -1)])
PAGES[1, :4] = torch.tensor([2, 0, 3, 1])
CASES = {
    "alibi, causal": (alibi, (random(HEADS),), causal),
    "bias, documents": (dense_bias, (random(BATCH, HEADS, LENGTH, LENGTH),), documents(DOCUMENTS, OFFSETS, causal)),
    "relative, paged": (lambda: relative, (), paged(PAGES, 16, causal)),
}


def tensors(shared=False, dtype=torch.float32):
    shapes = (BATCH, HEADS, LENGTH, 16), *((1 if shared else BATCH, KV_HEADS, LENGTH, n) for n in (16, 24))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def doubled(x):
    return x.detach().double().requires_grad_()


def formulation(q, k, v, score_mod, block_mask, scale=None):
    """PyTorch's own, differentiable: (out, lse). It looks at mask_mod alone."""
    block_mask = block_mask or flex._create_empty_block_mask(q, k)
    out, lse, _ = math_attention(
        q, k, v, score_mod or flex._identity, block_mask.as_tuple(), scale or q.shape[-1] ** -0.5, {}
    )
    return out, lse * math.log(2)


BACKWARD = list(CASES) if FULL else list(CASES)[:2]  # whose gradients are looked at


@pytest.mark.parametrize("name", CASES)
def test_what_people_write(name):
    """Out, log-sum-exps, and gradients of query, key, value and of what the score looks up."""
    make, learned, mask_mod = CASES[name]
    q, k, v = (x.requires_grad_() for x in tensors(shared="paged" in name))
    learned = [x.clone().requires_grad_() for x in learned]
    mask = (create_block_mask if "causal" in name else flex.create_block_mask)(
        mask_mod, BATCH, None, LENGTH, LENGTH, "cpu"
    )
    score = make(*learned)
    out, aux = flex_attention(q, k, v, score, mask, enable_gqa=True, scale=0.3, return_aux=flex.AuxRequest(lse=True))
    want_inputs = [doubled(x) for x in (q, k, v, *learned)]
    want_out, want_lse = formulation(*want_inputs[:3], make(*want_inputs[3:]), mask, 0.3)
    with torch.no_grad():
        options = {"mask": sl.expression(mask_mod), "score": sl.expression(make(*learned), "score")}
        every = (x.expand(BATCH, -1, -1, -1) for x in (q, k, v))
        bounds = sl.reference.error_bound(*every, q_start=0, scale=0.3, **options)
    assert_within(out, want_out.detach().numpy(), bounds.out)
    assert_within(aux.lse, want_lse.detach().numpy(), bounds.lse, "lse")
    if name not in BACKWARD:
        return
    seen = torch.isfinite(want_lse)
    d_out, d_lse = random(*out.shape), random(*aux.lse.shape)
    ((out * d_out).sum() + (aux.lse * d_lse)[seen].sum()).backward()
    ((want_out * d_out).sum() + (want_lse * d_lse)[seen].sum()).backward()
    for at, (x, want) in enumerate(zip((q, k, v, *learned), want_inputs, strict=True)):
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
        largest = 3e-5 * max(1.0, float(want.grad.abs().max()))
        assert_within(x.grad, want.grad.numpy(), np.full(x.shape, largest), f"gradient {at}")


MASKS = {
    "causal": causal,
    "sliding": sliding(33),
    "prefix": prefix_lm(torch.tensor([7, 70])),
    "documents": documents(DOCUMENTS, OFFSETS, causal),
    "paged": paged(PAGES, 16, causal),
    "heads": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < 8 * (h + 1),
    "everything": flex.noop_mask,
    "nothing": lambda b, h, q_idx, kv_idx: q_idx < -kv_idx,
}


@pytest.mark.each("block", "name")
@pytest.mark.parametrize("block", [16, (32, 48), 100], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_block_masks_are_those_of_pytorch(name, block):
    sizes = BATCH, HEADS, LENGTH - 5, LENGTH
    for apart in (True, False):
        got, want = (
            make(MASKS[name], *sizes, "cpu", BLOCK_SIZE=block, separate_full_blocks=apart)
            for make in (create_block_mask, flex.create_block_mask)
        )
        assert got.shape == want.shape and got.BLOCK_SIZE == want.BLOCK_SIZE and got.mask_mod is want.mask_mod
        for attribute in flex.BlockMask._TENSOR_ATTRS:
            x, y = getattr(got, attribute), getattr(want, attribute)
            assert (x is None) == (y is None) and (x is None or (x.dtype == y.dtype and torch.equal(x, y))), attribute


def test_a_block_mask_of_long_sequences_is_cheap():
    """2^40 positions: a tensor of them would take a terabyte."""
    mask = create_block_mask(sliding(1000), None, None, 1 << 20, 1 << 20, "cpu", BLOCK_SIZE=1 << 13)
    assert mask.kv_num_blocks.sum() == 255 and mask.full_kv_num_blocks.sum() == 0


def test_metadata_of_kernels_is_pytorchs():
    made = [
        make(causal, 1, 1, 256, 256, "cpu", compute_dq_write_order=True, dq_kv_order=False)
        for make in (create_block_mask, flex.create_block_mask)
    ]
    assert torch.equal(made[0].dq_write_order, made[1].dq_write_order) and made[0].dq_kv_order_spt is False


def seen_by(mask, sizes, block_mask=True):
    """Which keys each query sees: values are unit vectors, and keys are 0."""
    batch, heads, q_len, k_len = sizes
    q, k = torch.zeros(batch, heads, q_len, 8), torch.zeros(batch, heads, k_len, 8)
    v = torch.eye(k_len).expand(batch, heads, k_len, k_len)
    return flex_attention(q, k, v, block_mask=mask) > 0


def blocks_of(listed, full=None, size=16, mask_mod=None, lengths=None):
    lists = [flex._dense_to_ordered(x.int()) for x in (listed, full) if x is not None]
    return flex.BlockMask.from_kv_blocks(
        *(x for pair in lists for x in pair), BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=lengths
    )


def entries(blocks, size, q_len, k_len):
    return blocks.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :q_len, :k_len].bool()


def test_block_tables_are_obeyed():
    """Made by hand: more than mask_mod says, less, and blocks that are full whatever it says."""
    sizes = BATCH, 3, 60, 76
    listed = torch.rand(BATCH, 3, 4, 5, generator=GENERATOR) < 0.5
    full = (torch.rand(1, 3, 4, 5, generator=GENERATOR) < 0.3).expand(BATCH, 3, 4, 5) & ~listed
    within = flex.create_mask(causal, 1, 1, 60, 76, "cpu")
    every = functools.partial(entries, size=16, q_len=60, k_len=76)
    for tables, want in (
        ((listed,), every(listed)),
        ((listed, full), every(listed | full)),
        ((listed, None, 16, causal), every(listed) & within),
        ((listed, full, 16, causal), every(listed) & within | every(full)),
        ((listed[:1, :1], None, 16, causal), (every(listed[:1, :1]) & within).expand(BATCH, 3, 60, 76)),
    ):
        tables = (*tables, *(None, 16, None)[len(tables) - 1 :])
        mask = blocks_of(*tables, lengths=(60, 76))
        assert torch.equal(seen_by(mask, sizes), want)


def test_tables_that_say_no_more_than_the_function_cost_nothing():
    from speedlight.torch.blocks import read_mask

    for block in (16, 128):
        mask = flex.create_block_mask(sliding(20), 1, 1, LENGTH, LENGTH, "cpu", BLOCK_SIZE=block)
        assert repr(read_mask(mask, (BATCH, HEADS, LENGTH, LENGTH))) == "mask (((i - j) <= 20) & (i >= j))"
    noop = flex.create_block_mask(flex.noop_mask, 1, 1, LENGTH, LENGTH, "cpu")
    assert read_mask(noop, (BATCH, HEADS, LENGTH, LENGTH)) is None
    of_items = blocks_of(torch.tril(torch.ones(1, 1, 9, 9)), mask_mod=lambda b, h, i, j: (i >= j) | (b > 0))
    assert "block_mask" in repr(read_mask(of_items, (BATCH, HEADS, LENGTH, LENGTH)))


@pytest.mark.parametrize("size", [(128, 128), (64, 128), (100, 60), (16, 256)], ids=str)
def test_hidden_blocks_cost_nothing_without_a_function(size):
    """Blocks of any size: the bits and gradients of the dense mask, and the tiles that the plan skips."""
    from speedlight.torch.blocks import read_mask

    sizes = BATCH, 4, 300, 2048
    shape = BATCH, 4, -(-300 // size[0]), -(-2048 // size[1])
    listed = torch.zeros(shape, dtype=torch.bool)
    listed[..., :: 2048 // size[1] // 2] = True
    listed[0, 1, 0] = False  # a row of blocks sees nothing
    mask = blocks_of(listed, size=size, lengths=(300, 2048))
    dense = listed.repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)[:, :, :300, :2048]
    q, k, v = (torch.randn(BATCH, heads, n, 16, generator=GENERATOR) for heads, n in ((4, 300), (2, 2048), (2, 2048)))
    found = []
    for call in (
        lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True),
        lambda q, k, v: sl.torch.attention(q, k, v, mask=dense, q_start=0),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = call(*leaves)
        out.sum().backward()
        found.append([x.detach().numpy().tobytes() for x in (out, *(x.grad for x in leaves))])
    assert found[0] == found[1]
    plan, full = (sl.plan(q, k, v, mask=x, q_start=0) for x in (read_mask(mask, sizes), None))
    share = dense[:, ::2].float().mean(), dense.float().mean()  # the second head of a group may see less
    assert plan.tile_flops <= (1.02 if size[1] % 32 == 0 else 1.6) * float(max(share)) * full.tile_flops
    assert plan.tiles_skipped >= 0.75 * full.tiles_full


def test_block_tables_are_compared_again_with_what_a_function_captures():
    """The function shows no more than its blocks, then all, then less, then the first again."""
    ids, sizes = torch.arange(64) // 32, (BATCH, HEADS, 64, 64)
    mask = flex.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], 1, 1, 64, 64, "cpu", BLOCK_SIZE=16)
    first, halves = ids.clone(), torch.arange(64) // 32
    blocks = halves[:, None] == halves
    for now, want in ((first, blocks), (torch.zeros_like(ids), blocks), (torch.arange(64), blocks), (first, blocks)):
        ids.copy_(now)
        assert torch.equal(seen_by(mask, sizes)[0, 0], want)


def test_pytorchs_own_call_gives_the_same(monkeypatch):
    """Its function without a compiler; out is 0 and lse -inf where nothing is seen."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_WARNINGS_SHOWN", {"deprecated_return_lse"})
    q, k, v = tensors()
    mask = create_block_mask(lambda b, h, i, j: (i > j + 3) & (h > 0), None, HEADS, LENGTH, LENGTH, "cpu")
    arguments = q, k, v, relative, mask, None, True, True
    (out, lse), (want_out, want_lse) = flex_attention(*arguments), flex.flex_attention(*arguments)
    assert torch.allclose(out, want_out, atol=2e-6) and torch.allclose(lse, want_lse, atol=1e-5)
    assert torch.isneginf(lse[:, 0]).all() and not out[:, 0].any()
    plain = flex_attention(
        q, k, v, enable_gqa=True, kernel_options={"BLOCK_M": 32, "fwd_num_warps": 4, "BACKEND": "AUTO"}
    )
    assert torch.allclose(plain, flex.flex_attention(q, k, v, enable_gqa=True), atol=2e-6)


def test_what_is_captured_is_read_again():
    """A tensor that changes in place, a number that is another one, a function that is replaced."""
    q, k, v = (x[:, :2] for x in tensors())
    bias, state = torch.zeros(2), {"size": 3}
    mask = create_block_mask(lambda b, h, i, j: i - j < state["size"], None, None, LENGTH, LENGTH, "cpu", 1 << 30)

    def score_mod(s, b, h, i, j):
        return s + bias[h] * j

    def dense():
        return flex_attention(q.double(), k.double(), v.double(), score_mod, mask)

    for change in (
        lambda: bias.fill_(-0.5),
        lambda: state.update(size=50),
        lambda: bias.copy_(torch.tensor([1.0, 2.0])),
    ):
        change()
        want, _ = formulation(q.double(), k.double(), v.double(), score_mod, mask)
        assert torch.allclose(dense(), want, atol=1e-12)


X = torch.zeros(2, 4, 8, 16)
BOTH = {"BACKEND": "AUTO", "FORCE_USE_FLEX_ATTENTION": True}
REFUSED = [
    (lambda: flex_attention(X[0], X, X), sl.UnsupportedError, "query: expected a plain tensor of 4 dimensions"),
    (lambda: flex_attention(X, X[:, :2], X[:, :2]), ValueError, "enable_gqa=True"),
    (lambda: flex_attention(X, X[:, :3], X[:, :3], enable_gqa=True), ValueError, "key: expected a number of kv heads"),
    (lambda: flex_attention(X, X[:1], X[:1]), ValueError, "key: expected batch 2"),
    (lambda: flex_attention(X, X.double(), X), TypeError, "key: expected dtype float32"),
    (lambda: flex_attention(X, X[..., :8], X), ValueError, "key: expected head_dim 16"),
    (lambda: flex_attention(X.numpy(), X, X), TypeError, "query: expected a tensor"),
    (lambda: flex_attention(X, X, X[:, :3]), ValueError, "^value: expected .* as key has"),
    (lambda: flex_attention(X, X, X, 2.0), TypeError, "^score_mod: expected a function"),
    (lambda: flex_attention(X, X, X, block_mask=causal), TypeError, "^block_mask: .* a BlockMask.* create_block_mask"),
    (lambda: flex_attention(X, X, X, block_mask=X), TypeError, r"^block_mask: .* it is create_block_mask\(lambda"),
    (lambda: flex_attention(X, X, X, block_mask=made(9, 8)), ValueError, "got shape .*9, 8"),
    (lambda: flex_attention(X, X, X, block_mask=made(8, 8, 3)), ValueError, "broadcast to batch 2, 4 heads"),
    (lambda: flex_attention(X, X, X, block_mask=made(8, 8)[:, :, 0]), ValueError, "got a slice"),
    (lambda: flex_attention(X, X, X, kernel_options={"COLOUR": 1}), ValueError, "kernel_options.*COLOUR"),
    (lambda: flex_attention(X, X, X, kernel_options={"BACKEND": "x"}), ValueError, "BACKEND"),
    (lambda: flex_attention(X, X, X, kernel_options=BOTH), ValueError, "BACKEND or FORCE_USE_FLEX_ATTENTION; got both"),
    (lambda: flex_attention(X, X, X, kernel_options=3), TypeError, "kernel_options: expected a dict"),
    (lambda: flex_attention(X, X, X, return_lse=True, return_aux=flex.AuxRequest()), ValueError, "return_aux"),
    (lambda: flex_attention(X, X, X, return_aux=flex.AuxRequest(max_scores=True)), NotImplementedError, "max_scores"),
    (lambda: flex_attention(X, X, X, return_aux=True), TypeError, "return_aux"),
    (
        lambda: flex_attention(X, X, X, lambda s, b, h, i, j: s + torch.lgamma(i)),
        sl.ExpressionError,
        "flex.py.*torch.lgamma",
    ),
    (lambda: create_block_mask(lambda s, b, h, i, j: s, 1, 1, 8, 8), sl.ExpressionError, "arguments"),
    (
        lambda: create_block_mask(causal, 1, 1, 8, 8, BLOCK_SIZE=2.5),
        sl.Error,
        "^BLOCK_SIZE: expected an int from 1",
    ),
    (lambda: create_block_mask(causal, 1, 1, 8, 8, BLOCK_SIZE=(1, 2, 3)), sl.Error, "^BLOCK_SIZE: expected .*, or two"),
    (lambda: create_block_mask(causal, True, 1, 8, 8), sl.Error, "^B: expected an int from 1; got True"),
    (lambda: create_block_mask(causal, 1, 1, 8, 8, "foo"), sl.Error, "^device: expected a device of PyTorch's"),
    (lambda: create_block_mask(3, 1, 1, 8, 8), sl.Error, "^mask_mod: expected a function"),
    (lambda: create_block_mask(causal, 1, 1, 8.0, 8), ValueError, "Q_LEN: expected an int"),
    (lambda: create_block_mask(causal, 1, 0, 8, 8), ValueError, "H: expected an int"),
    (lambda: create_block_mask(lambda b, h, i, j: X[0, 0, 0][j + 9] >= 0, 1, 1, 8, 8), ValueError, "expected index 1"),
]


def made(q_len, k_len, heads=1):
    return create_block_mask(causal, 1, heads, q_len, k_len, "cpu")


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refused(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, sl.Error)


def test_causal_beside_other_terms_is_the_kernels_own():
    """Wherever it stands in a conjunction, and in no other place: the bits of the mask as it is written."""
    document = torch.tensor([0] * 70 + [1] * 130)
    functions = [
        (lambda b, h, i, j: (document[i] == document[j]) & (i >= j), True),
        (lambda b, h, i, j: (j <= i) & (document[i] == document[j]) & (i - j < 90), True),
        (lambda b, h, i, j: j <= i, True),
        (lambda b, h, i, j: (i >= j) | (document[i] == document[j]), False),
        (lambda b, h, i, j: (i > j) & (document[i] == document[j]), False),
        (lambda b, h, i, j: ~((i >= j) & (document[i] == document[j])), False),
    ]
    q, k, v = (torch.randn(1, 2, 200, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    for function, causal in functions:
        whole = sl.expression(function, "mask")
        apart, rest = _split_causal(whole)
        assert apart == causal and (rest is not whole) == causal
        mask = create_block_mask(function, None, None, 200, 200, "cpu")
        got = flex_attention(q, k, v, block_mask=mask)
        assert torch.equal(got, sl.attention(q, k, v, mask=whole))
