"""flash-attn 4's block_sparse_tensors: lists of blocks show what the equal dense mask shows, bit for bit."""

from __future__ import annotations

import itertools

import flash
import numpy as np
import pytest
import torch
from flash import made

import speedlight as sl
import speedlight.flash_attn as fa
from speedlight.flash_attn import v4
from speedlight.flash_attn.v4 import BlockSparseTensorsTorch

pytestmark = pytest.mark.usefixtures("one_kernel")


def ordered(blocks):
    """Counts and numbers of listed blocks, those first, as PyTorch's BlockMask has them."""
    numbers = torch.argsort(~blocks, dim=-1, stable=True).int()
    return blocks.sum(-1, dtype=torch.int32), numbers


def lists(partial, full, size):
    of_full = () if full is None else ordered(full)
    return BlockSparseTensorsTorch(*ordered(partial), *of_full, block_size=size)


def entries(blocks, size, q_len, k_len):
    return blocks.repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)[..., :q_len, :k_len]


def causal(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return q_idx + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) >= kv_idx


def drawn(seed, batch, heads, q_len, k_len, size):
    generator = torch.Generator().manual_seed(seed)
    shape = batch, heads, -(-q_len // size[0]), -(-k_len // size[1])
    listed = torch.rand(shape, generator=generator) < 0.4
    full = (torch.rand(shape, generator=generator) < 0.2) & ~listed
    return listed, full


def dense(q, k, v, mask, **options):
    """Returns out, lse and gradients of the call with a dense mask."""
    return results(q, k, v, lambda *x: sl.torch.attention(*x, mask=mask, layout="blhd", return_lse=True, **options))


def results(q, k, v, call):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = call(*leaves)
    (out.sum() + lse[torch.isfinite(lse)].sum()).backward()
    return [x.detach().numpy().tobytes() for x in (out, lse, *(x.grad for x in leaves))]


@pytest.mark.parametrize("size", [(64, 64), (100, 32), (256, 128), (1, 8)], ids=str)
@pytest.mark.parametrize("dims", [(2, 4), (1, 1), (2, 1)], ids=str)
def test_the_bits_of_the_dense_mask(size, dims):
    q, k, v = made(1, (2, 130, 4, 16), (2, 300, 2, 16), (2, 300, 2, 16))
    listed, full = drawn(2, *dims, 130, 300, size)
    every = [entries(x, size, 130, 300) for x in (listed, full)]
    below = torch.arange(130)[:, None] + 170 >= torch.arange(300)
    for blocks, mod, options, mask in (
        (lists(listed, None, size), None, {}, every[0]),
        (lists(listed, full, size), None, {}, every[0] | every[1]),
        (lists(listed, full, size), causal, {}, every[0] & below | every[1]),
        (lists(listed, None, size), causal, {}, every[0] & below),
        (lists(listed, full, size), None, {"causal": True}, (every[0] | every[1]) & below),
        (lists(listed, full, size), None, {"window_size": (-1, None)}, None),
    ):
        if mask is None:
            far = torch.arange(130)[:, None] + 170 - torch.arange(300) <= -1
            mask = (every[0] | every[1]) & far
        found = results(
            q, k, v, lambda *x, b=blocks, m=mod, o=options: v4.flash_attn_func(
                *x, block_sparse_tensors=b, mask_mod=m, return_lse=True, **o)
        )  # fmt: skip
        assert found == dense(q, k, v, mask.expand(2, 4, 130, 300))


def test_hidden_blocks_cost_nothing(monkeypatch):
    """Its mask is one whose tiles the plan skips."""
    from speedlight.flash_attn import block_sparsity

    masks, read = [], block_sparsity.read_mask
    monkeypatch.setattr(block_sparsity, "read_mask", lambda *x: masks.append(read(*x)) or masks[-1])
    q, k, v = made(3, (1, 1024, 1, 16), (1, 2048, 1, 16), (1, 2048, 1, 16))
    shown = torch.zeros(1, 1, 8, 16, dtype=torch.bool)
    shown[..., ::8] = True
    shown[..., 3] = True
    whole = torch.zeros_like(shown)
    whole[..., ::8] = True
    for partial, full, mod in ((shown, None, None), (shown & ~whole, whole, causal)):
        v4.flash_attn_func(q, k, v, mask_mod=mod, block_sparse_tensors=lists(partial, full, (128, 128)))
        plan = sl.plan(q, k, v, layout="blhd", mask=masks[-1])
        tiles = plan.tiles_full + plan.tiles_mixed + plan.tiles_skipped
        assert plan.tiles_skipped * 16 == tiles * 13 and plan.tiles_mixed == 0


@pytest.mark.parametrize("with_offsets", [False, True])
@pytest.mark.parametrize("mod", [None, causal])
def test_packed_sequences(with_offsets, mod):
    """Every sequence has rows of blocks of its own, one after the other."""
    q_lens, k_lens, size = (70, 130, 5), (90, 260, 300), (64, 32)
    cu_q, cu_k = flash.offsets(*q_lens), flash.offsets(*k_lens)
    q, k, v = made(4, (205, 4, 16), (650, 2, 16), (650, 2, 16))
    rows, columns = ([-(-n // step) for n in x] for step, x in zip(size, (q_lens, k_lens), strict=True))
    totals = [0, *itertools.accumulate(rows)]
    begins = [0, *itertools.accumulate(a * b for a, b in zip(rows, columns, strict=True))]
    if not with_offsets:
        k_lens, columns = (260,) * 3, [9] * 3  # else flash-attn does not know where a sequence's numbers begin
        begins = [n * 9 for n in totals]
        cu_k = flash.offsets(*k_lens)
        k, v = (x.repeat(2, 1, 1)[:780] for x in (k, v))
    parts, seen = [], []
    for n in range(3):
        listed, full = (x[0] for x in drawn(5 + n, 1, 4, q_lens[n], k_lens[n], size))
        parts.append((listed, full))
        mask, also = (entries(x, size, q_lens[n], k_lens[n]) for x in (listed, full))
        if mod is not None:
            mask = mask & (torch.arange(q_lens[n])[:, None] + k_lens[n] - q_lens[n] >= torch.arange(k_lens[n]))
        seen.append(mask | also)
    flat = [
        torch.cat([x.flatten(1) for x in pieces], 1).contiguous()
        for which in (0, 1)
        for pieces in zip(*(ordered(part[which]) for part in parts), strict=True)
    ]
    counts = torch.tensor(totals, dtype=torch.int32)
    blocks = BlockSparseTensorsTorch(
        *flat, counts, torch.tensor(begins, dtype=torch.int32) if with_offsets else None, block_size=size
    )
    out, lse = v4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, mask_mod=mod, block_sparse_tensors=blocks, return_lse=True
    )
    for n in range(3):
        a, b = (slice(int(x[n]), int(x[n + 1])) for x in (cu_q, cu_k))
        want = sl.attention(q[None, a], k[None, b], v[None, b], mask=seen[n], layout="blhd", return_lse=True)
        assert torch.equal(out[a], want[0][0]) and torch.equal(lse[:, a], want[1][0])


def test_pages():
    """Lists count in positions of a sequence, wherever its pages lie."""
    q, pages = made(7, (2, 40, 2, 16), (8, 16, 2, 16))
    table = torch.tensor([[3, 1, 7, 0], [2, 6, 5, 4]], dtype=torch.int32)
    listed, _ = drawn(8, 2, 2, 40, 64, (16, 16))
    out, _ = v4.flash_attn_varlen_func(
        q, pages, pages, page_table=table, block_sparse_tensors=lists(listed, None, (16, 16))
    )
    keys = pages[table.long()].flatten(1, 2)
    want = sl.attention(q, keys, keys, mask=entries(listed, (16, 16), 40, 64), layout="blhd")
    assert torch.equal(out, want)


def test_lists_of_the_backward_pass():
    """They are by columns, perhaps in blocks of other sizes, and may not contradict the forward pass."""
    q, k, v = made(9, (1, 256, 2, 16), (1, 256, 2, 16), (1, 256, 2, 16), grad=True)
    listed, full = drawn(10, 1, 2, 256, 256, (128, 64))
    listed[0, 0, 0, 0], full[0, 0, 0, 0] = False, True
    forward = lists(listed, full, (128, 64))

    def backward(listed, full, size=(128, 64)):
        return lists(*(x.transpose(-1, -2) for x in (listed, full)), size)

    finer = [x.repeat_interleave(2, 2) for x in (listed, full)]
    outs = []
    for theirs in (None, backward(listed, full), backward(*finer, (64, 64))):
        out, _ = v4.flash_attn_func(
            q, k, v, mask_mod=causal, block_sparse_tensors=forward, block_sparse_tensors_bwd=theirs
        )
        outs.append(torch.autograd.grad(out.sum(), (q, k, v)))
    assert all(torch.equal(x, y) for other in outs[1:] for x, y in zip(outs[0], other, strict=True))
    fewer = full.clone()
    fewer[0, 0, 0, 0] = False
    with pytest.raises(sl.ArgumentError, match=r"^block_sparse_tensors_bwd: .* got others at query 0 and key 0\."):
        v4.flash_attn_func(
            q, k, v, mask_mod=causal, block_sparse_tensors=forward, block_sparse_tensors_bwd=backward(listed, fewer)
        )
    with pytest.raises(sl.ArgumentError, match="^block_sparse_tensors_bwd: expected None without block_sparse_tensors"):
        v4.flash_attn_func(q, k, v, block_sparse_tensors_bwd=forward)


def ints(*shape, value=0):
    return torch.full(shape, value, dtype=torch.int32)


ONE = BlockSparseTensorsTorch(ints(1, 1, 2, value=1), ints(1, 1, 2, 2), block_size=(128, 128))
WRONG = [
    ((), TypeError, r"block_sparse_tensors: expected a BlockSparseTensorsTorch; got \(\)\. speedlight.flash_attn.v4"),
    (ONE._replace(block_size=None), ValueError, r"block_size: .*flash-attn's own tile.*_replace\(block_size="),
    (ONE._replace(block_size=128), TypeError, r"block_size: expected \(queries, keys\); got 128"),
    (ONE._replace(block_size=(0, 128)), ValueError, "block_size: expected two numbers from 1"),
    (ONE._replace(block_size=(64, 128)), ValueError, r"mask_block_cnt: expected shape .* 4\), in blocks of 64 of 256"),
    (ONE._replace(mask_block_cnt=None), ValueError, "mask_block_cnt: expected a tensor; got None"),
    (ONE._replace(full_block_cnt=ints(1, 1, 2)), ValueError, "full_block_idx: expected a tensor; got None"),
    (ONE._replace(mask_block_cnt=[1, 1]), TypeError, "mask_block_cnt: expected an int32 tensor, or None; got list"),
    (ONE._replace(mask_block_idx=torch.zeros(1, 1, 2, 2)), TypeError, "mask_block_idx: expected an int32 tensor"),
    (ONE._replace(mask_block_idx=ints(2, 2)), ValueError, "mask_block_idx: expected 4 dimensions"),
    (ONE._replace(mask_block_cnt=ints(1, 3, 2)), ValueError, r"mask_block_cnt: expected shape \(2 or 1, 2 or 1, 2\)"),
    (ONE._replace(mask_block_cnt=ints(1, 1, 2, value=3)), ValueError, "mask_block_cnt: expected counts from 0 to 2"),
    (ONE._replace(mask_block_cnt=ints(1, 1, 2, value=2)), ValueError, "mask_block_idx: .* once; got one twice"),
    (ONE._replace(mask_block_idx=ints(1, 1, 2, 2, value=2)), ValueError, "numbers of blocks from 0 to 1; got 2"),
    (ONE._replace(mask_block_idx=ints(1, 1, 2, 2, value=-1)), ValueError, "numbers of blocks from 0 to 1; got -1"),
    (
        ONE._replace(full_block_cnt=ONE.mask_block_cnt, full_block_idx=ONE.mask_block_idx),
        ValueError,
        r"expected each block once; got block \(0, 0\) of item 0 and head 0",
    ),
]


@pytest.mark.parametrize(("blocks", "kind", "message"), WRONG, ids=range(len(WRONG)))
def test_lists_that_cannot_be(blocks, kind, message):
    q, k, v = made(11, (2, 256, 2, 8), (2, 256, 2, 8), (2, 256, 2, 8))
    with pytest.raises(kind, match=message) as error:
        v4.flash_attn_func(q, k, v, block_sparse_tensors=blocks)
    assert isinstance(error.value, sl.Error) and str(error.value).startswith("block_sparse_tensors")


PACKED = BlockSparseTensorsTorch(ints(1, 2, value=1), ints(1, 3), cu_total_m_blocks=ints(3), block_size=(4, 4))
TOTALS = torch.tensor([0, 1, 2], dtype=torch.int32)
WRONG_PACKED = [
    (ONE, "cu_total_m_blocks: expected a tensor"),
    (PACKED, r"cu_total_m_blocks: expected \[0, 1, 2\], in blocks of 4 queries; got \[0, 0, 0\]"),
    (PACKED._replace(cu_total_m_blocks=TOTALS, mask_block_cnt=ints(1, 3)), "mask_block_cnt: expected 2 rows of blocks"),
    (PACKED._replace(cu_total_m_blocks=TOTALS, mask_block_cnt=ints(3, 2)), "mask_block_cnt: expected 2 or 1 rows"),
    (PACKED._replace(cu_total_m_blocks=TOTALS, mask_block_idx=ints(1, 1)), "mask_block_idx: expected at least 2 num"),
    (PACKED._replace(cu_total_m_blocks=TOTALS, cu_block_idx_offsets=ints(1)), "cu_block_idx_offsets: expected 3 offs"),
]


@pytest.mark.parametrize(("blocks", "message"), WRONG_PACKED, ids=range(len(WRONG_PACKED)))
def test_lists_of_packed_sequences_that_cannot_be(blocks, message):
    q, k, v = made(12, (7, 2, 8), (7, 2, 8), (7, 2, 8))
    ends = flash.offsets(3, 4)
    with pytest.raises(sl.ArgumentError, match=f"^block_sparse_tensors.{message}"):
        v4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, block_sparse_tensors=blocks)


def test_it_is_found_where_flash_attn_has_it():
    fa.install((4,))
    try:
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch as theirs  # type: ignore
    finally:
        fa.uninstall()
    assert theirs is BlockSparseTensorsTorch


def test_nothing_listed_is_nothing_seen():
    q, k, v = made(13, (1, 256, 2, 8), (1, 256, 2, 8), (1, 256, 2, 8))
    out, lse = v4.flash_attn_func(
        q, k, v, block_sparse_tensors=ONE._replace(mask_block_cnt=ints(1, 1, 2)), return_lse=True
    )
    assert not out.any() and np.isneginf(lse.numpy()).all()
