"""Masks and scores as papers define them and people write them for FlexAttention: traced, each is what PyTorch makes of
it, entry by entry; and the call over it, forwards and backwards, in float64.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import FULL
from test_torch_flex import formulation
from tolerance import assert_within
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention import flex_attention as flex

import speedlight as sl
import speedlight.torch
from speedlight.expressions.tree import evaluate

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
BATCH, HEADS, SIDE = 2, 2, 8
LENGTH = SIDE * SIDE
GENERATOR = torch.Generator().manual_seed(5)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


# --- masks


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def longformer(radius, is_global):
    """Global tokens see everything, and everything sees them (arXiv:2004.05150)."""
    return flex.or_masks(
        lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= radius,
        lambda b, h, q_idx, kv_idx: is_global[q_idx] | is_global[kv_idx],
    )


def flamingo(intervals, image):
    """A text token sees the image whose interval it is in: a row of a table, of which both ends are taken."""

    def mask(b, h, q_idx, kv_idx):
        interval = intervals[image[kv_idx]]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return mask


def transfusion(spans):
    """Causal text, and images that see all of themselves (arXiv:2408.11039); spans of each item."""

    def mask(b, h, q_idx, kv_idx):
        seen = q_idx >= kv_idx
        for n in range(spans.shape[1]):
            offset, length = spans[b, n, 0], spans[b, n, 1]
            inside = [(x >= offset) & (x < offset + length) for x in (q_idx, kv_idx)]
            seen = seen | (inside[0] & inside[1])
        return seen

    return mask


def shared_prefix(ids, offsets, prefix_of):
    """Continuations of a prompt that is there once: its keys, and one's own."""

    def mask(b, h, q_idx, kv_idx):
        document = ids[q_idx]
        prefix = prefix_of[document]
        own = (kv_idx >= offsets[document]) & (q_idx >= kv_idx)
        return own | ((document != prefix) & (kv_idx >= offsets[prefix]) & (kv_idx < offsets[prefix + 1]))

    return mask


def tree(prefix, ancestors):
    """A tree of drafts after a prefix: a node sees its ancestors (Medusa, SpecInfer)."""
    nodes = len(ancestors)

    def mask(b, h, q_idx, kv_idx):
        node = (kv_idx - prefix).clamp(min=0, max=nodes - 1)
        return (kv_idx < prefix) | ((kv_idx < prefix + nodes) & ancestors[q_idx % nodes, node])

    return mask


def near(q, k, size, kernel):
    """NATTEN's window along an axis: centred, moved inside at the ends."""
    return (q.clamp(kernel // 2, size - 1 - kernel // 2) - k).abs() <= kernel // 2


def natten(kernel, coordinates):
    def mask(b, h, q_idx, kv_idx):
        (q_x, q_y), (k_x, k_y) = coordinates(q_idx), coordinates(kv_idx)
        return near(q_x, k_x, SIDE, kernel) & near(q_y, k_y, SIDE, kernel)

    return mask


def morton(i):
    """Coordinates of a Z-order curve."""

    def even_bits(x):
        x = x & 0x55555555
        for shift, kept in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
            x = (x | (x >> shift)) & kept
        return x

    return even_bits(i), even_bits(i >> 1)


def sliding_tiles(canvas, kernel, tile, text):
    """Sliding tile attention in three dimensions (arXiv:2502.04507), text after the video."""
    tiles, kernels = ([a // b for a, b in zip(x, tile, strict=True)] for x in (canvas, kernel))
    video = math.prod(canvas)

    def coordinates(i):
        which = i // math.prod(tile)
        return which // (tiles[1] * tiles[2]), (which % (tiles[1] * tiles[2])) // tiles[2], which % tiles[2]

    def mask(b, h, q_idx, kv_idx):
        seen = (q_idx < video) & (kv_idx < video)
        for q, k, n, size in zip(coordinates(q_idx), coordinates(kv_idx), tiles, kernels, strict=True):
            left, right = size // 2, size // 2 + (size % 2 - 1)
            center = q.clamp(left, n - 1 - right)
            seen = seen & (k >= center - left) & (k <= center + right)
        of_text = (kv_idx >= video) & (kv_idx < video + text)
        return seen | (q_idx < video) & of_text | (q_idx >= video) & (kv_idx < video + text)

    return mask


def voxels(places, radius):
    """Voxels near each other in space, wherever they lie in the list; rows of coordinates."""

    def mask(b, h, q_idx, kv_idx):
        q, k = places[q_idx], places[kv_idx]
        return ((q[0] - k[0]).abs() <= radius) & ((q[1] - k[1]).abs() <= radius) & ((q[2] - k[2]).abs() <= radius)

    return mask


ANCESTORS = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool()
IDS = torch.repeat_interleave(torch.arange(4), torch.tensor([16, 20, 8, 20]))
MASKS = {
    "Longformer": longformer(5, torch.rand(LENGTH, generator=GENERATOR) < 0.1),
    "Flamingo": flamingo(torch.tensor([[0, 9], [9, 40], [40, 64], [70, 70]]), torch.arange(LENGTH) // 16),
    "transfusion": transfusion(torch.tensor([[[3, 9], [30, 20]], [[0, 5], [64, 0]]])),
    "shared prefix": shared_prefix(IDS, torch.tensor([0, 16, 36, 44, 64]), torch.tensor([0, 0, 2, 2])),
    "tree": tree(LENGTH - 7, ANCESTORS),
    "NATTEN, Morton": natten(5, morton),
    "STA": sliding_tiles((4, 4, 3), (2, 4, 1), (2, 2, 1), 9),
    "voxels": voxels(torch.randint(0, 9, (LENGTH, 3), generator=GENERATOR), 2),
}


# --- scores, of tensors that learn


def alibi_of_exponents(score, b, h, q_idx, kv_idx):
    return score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / HEADS))


def t5_bidirectional(table, buckets=16, most=32):
    """T5's buckets of both signs; the table is (buckets, heads)."""

    def score_mod(score, b, h, q_idx, kv_idx):
        half, distance = buckets // 2, kv_idx - q_idx
        offset, n = (distance > 0).to(torch.int32) * half, distance.abs()
        exact = half // 2
        ratio = torch.log(n.float().clamp(min=1.0) / exact) / math.log(most / exact)
        far = (exact + (ratio * (half - exact)).int()).clamp(max=half - 1)
        return score + table[offset + torch.where(n < exact, n, far), h]

    return score_mod


def graphormer(of_distance, of_edge, distances, types, lengths):
    """Biases of shortest paths and of the edges along them (arXiv:2106.05234)."""

    def score_mod(score, b, h, q_idx, kv_idx):
        length, total = lengths[b, q_idx, kv_idx], 0.0
        for n in range(types.shape[-1]):
            total = total + torch.where(length > n, of_edge[h, n, types[b, q_idx, kv_idx, n]], 0.0)
        return score + of_distance[h, distances[b, q_idx, kv_idx]] + total / torch.clamp(length, min=1)

    return score_mod


def kerple(r1, r2):
    """KERPLE's logarithms (arXiv:2205.09921)."""
    return lambda score, b, h, q_idx, kv_idx: score - r1[h] * torch.log(1 + r2[h] * (q_idx - kv_idx).abs())


def forgetting(gates):
    """The forgetting transformer's (arXiv:2503.02130): sums of gates' logarithms."""
    sums = torch.nn.functional.logsigmoid(gates).cumsum(-1)
    return lambda score, b, h, q_idx, kv_idx: score + sums[b, h, q_idx] - sums[b, h, kv_idx]


def tisa(heights, widths, centers):
    """A sum of Gaussians of distances (TISA)."""

    def score_mod(score, b, h, q_idx, kv_idx):
        for n in range(heights.shape[1]):
            score = score + heights[h, n] * torch.exp(-widths[h, n].abs() * (kv_idx - q_idx - centers[h, n]) ** 2)
        return score

    return score_mod


def of_log_length(score, b, h, q_idx, kv_idx):
    return score * torch.log2(q_idx.to(torch.float32) + 2.0)


DISTANCES = torch.randint(0, 5, (BATCH, LENGTH, LENGTH), generator=GENERATOR)
TYPES = torch.randint(0, 3, (BATCH, LENGTH, LENGTH, 2), generator=GENERATOR)
SCORES = {
    "ALiBi of exponents": (lambda: alibi_of_exponents, ()),
    "T5, both ways": (t5_bidirectional, (random(16, HEADS),)),
    "Graphormer": (
        lambda x, y: graphormer(x, y, DISTANCES, TYPES, DISTANCES.clamp(max=2)), (random(HEADS, 5), random(HEADS, 2, 3))
    ),
    "KERPLE": (kerple, (random(HEADS).abs(), random(HEADS).abs())),
    "forgetting": (forgetting, (random(BATCH, HEADS, LENGTH),)),
    "TISA": (tisa, (random(HEADS, 2), 0.01 * random(HEADS, 2), random(HEADS, 2))),
    "log of the length": (lambda: of_log_length, ()),
}  # fmt: skip


# --- entry by entry

PLACES = dict(zip("bhij", np.ogrid[:BATCH, :HEADS, :LENGTH, :LENGTH], strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    assert_mask(MASKS[name])


def assert_mask(mask_mod):
    """Every entry, and the BlockMask, which is told from intervals."""
    want = flex.create_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, "cpu")
    got = evaluate(sl.expression(mask_mod, "mask").root, PLACES, seen=False)
    assert np.array_equal(np.broadcast_to(got, want.shape), want.numpy())
    assert want.any() and not want.all()
    ours, theirs = (
        make(mask_mod, BATCH, HEADS, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
        for make in (speedlight.torch.create_block_mask, flex.create_block_mask)
    )
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    make, learned = SCORES[name]
    assert_score(make(*learned), name)


def assert_score(score_mod, name):
    s = 3 * random(BATCH, HEADS, LENGTH, LENGTH)
    with TransformGetItemToIndex():
        want = flex._vmap_for_bhqkv(score_mod, prefix=(0,))(s, *(torch.arange(n) for n in s.shape))
    got = evaluate(sl.expression(score_mod, "score").root, {"s": s.numpy(), **PLACES})
    want = want.double().numpy()  # whose buckets' logarithms and powers are of float32
    assert_within(np.broadcast_to(got, want.shape), want, 1e-6 * (1 + np.abs(want)), name)


# --- the call

CALLS = [(mask, list(SCORES)[n % len(SCORES)]) for n, mask in enumerate(MASKS)]
QUICK = [("Flamingo", "KERPLE"), ("voxels", "forgetting")]


@pytest.mark.parametrize(("mask", "score"), CALLS if FULL else QUICK, ids=str)
def test_calls(mask, score):
    # what integers become, PyTorch has in float32 in some mods
    near = 1e-5 if score in ("T5, both ways", "log of the length", "ALiBi of exponents") else 1e-10
    assert_call(MASKS[mask], *SCORES[score], near)


def assert_call(mask_mod, make, learned, near):
    """Out, log-sum-exps and every gradient against PyTorch's formulation, all in float64."""
    block_mask = speedlight.torch.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    inputs = [random(BATCH, HEADS, LENGTH, 8) for _ in range(3)] + [x.clone() for x in learned]
    found = []
    for attend in (ours, formulation):
        given = [x.clone().requires_grad_() for x in inputs]
        out, lse = attend(*given[:3], make(*given[3:]), block_mask)
        seen = torch.isfinite(lse)
        loss = (out * out.detach().cos()).sum() + lse[seen].sin().sum()
        found.append((out, lse, *torch.autograd.grad(loss, given)))
    for at, (got, want) in enumerate(zip(*found, strict=True)):
        want = want.detach().numpy()
        largest = np.abs(want[np.isfinite(want)]).max()
        assert_within(got, want, np.full(want.shape, near * (1 + largest)), f"result {at}")


def ours(q, k, v, score_mod, block_mask):
    out, aux = speedlight.torch.flex_attention(q, k, v, score_mod, block_mask, return_aux=flex.AuxRequest(lse=True))
    return out, aux.lse


# --- what cannot be traced says so, with a way out


REFUSED = {
    "rows that are not joined": (lambda s, b, h, i, j: s + sum(x[0] for x in TYPES[b]), "one number; got a row of 2"),
    "branches": (lambda s, b, h, i, j: s if i > j else s - 1, "use sl.where"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    score_mod, message = REFUSED[name]
    with pytest.raises(sl.ExpressionError, match=message):
        sl.expression(score_mod, "score")
