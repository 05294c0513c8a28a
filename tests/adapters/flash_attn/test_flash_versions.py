"""flash-attn 3's and 4's calls, and merge_states(), mean what their documentation says."""

from __future__ import annotations

import math

import flash
import pytest
import torch
from flash import agree, close, made

import speedlight as sl
import speedlight.flash_attn as fa
from speedlight.flash_attn import v3, v4

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (3, 0)}, {"softcap": 1.5, "scale": 0.2}])
def test_version_3(options):
    q, k, v = made(1, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 12), grad=True)
    given = {"window_size" if name == "window" else name: x for name, x in options.items()}
    given["softmax_scale"] = given.pop("scale", None)
    out, lse = v3.flash_attn_func(q, k, v, **given, return_attn_probs=True)
    true = flash.batched(q, k, v, **options)
    agree((out, lse), true, (q, k, v))


@pytest.mark.parametrize("call", [v3.flash_attn_func, v4.flash_attn_func])
def test_scores_of_values(call):
    """MLA's form: scores of q·k + qv·v. flash-attn 4 has heads last in its log-sum-exps then."""
    q, k, v, qv = made(2, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 12), (2, 5, 4, 12), grad=True)
    lse_too = {"return_attn_probs": True} if call is v3.flash_attn_func else {"return_lse": True}
    out, lse = call(q, k, v, qv=qv, causal=True, **lse_too)
    true = flash.batched(q, k, v, qv=qv, causal=True)
    close(out, true[0])
    close(lse if call is v3.flash_attn_func else lse.transpose(1, 2), true[1])
    agree((out,), true[:1], (q, k, v, qv))


@pytest.mark.parametrize("heads", [None, 4])
def test_version_3_in_one_tensor(heads):
    (qkv,) = made(3, (2, 5, 3, 4, 8) if heads is None else (2, 5, 8, 8))
    q, k, v = qkv.unbind(2) if heads is None else qkv.split([4, 2, 2], 2)
    close(v3.flash_attn_qkvpacked_func(qkv, num_heads_q=heads, causal=True), flash.batched(q, k, v, causal=True)[0])


SIDES = {
    "packed": (True, True, None, None),
    "packed, used": (True, True, [3, 0, 2], [4, 2, 5]),
    "padded, used": (False, False, [3, 0, 5], [4, 2, 7]),
    "square, keys used": (False, False, None, [4, 2, 7]),
    "queries packed": (True, False, None, [4, 2, 7]),
    "keys packed": (False, True, [3, 1, 5], None),
}


class Sided:
    """Arrays of a case of SIDES, with kv_heads heads of keys, and the arguments that say how its sequences lie."""

    def __init__(self, name, kv_heads):
        self.q_packed, self.k_packed, self.q_used, self.k_used = SIDES[name]
        self.most = 7 if name.startswith("square") else 5
        self.cu_q, self.cu_k = flash.offsets(4, 1, 2), flash.offsets(6, 2, 5)
        of_keys = (13, kv_heads, 8) if self.k_packed else (3, 7, kv_heads, 8)
        self.arrays = made(4, (7, 4, 8) if self.q_packed else (3, self.most, 4, 8), of_keys, of_keys, grad=True)
        self.ends = {
            "cu_seqlens_q": self.cu_q if self.q_packed else None,
            "cu_seqlens_k": self.cu_k if self.k_packed else None,
        }
        self.used = {
            name: None if x is None else torch.tensor(x, dtype=torch.int32)
            for name, x in (("seqused_q", self.q_used), ("seqused_k", self.k_used))
        }

    def compare(self, out, lse, **options):
        """Holds results, and gradients, to those of each sequence by itself; mask: what makes it of the sequence's
        number, rows and keys.
        """
        q, k, v = self.arrays
        true = torch.zeros(out.shape, dtype=torch.float64)
        true_lse = torch.full(lse.shape, -math.inf, dtype=torch.float64)
        mask = options.pop("mask", None)
        for n in range(3):
            rows = row_range(self.cu_q, n, self.q_packed, self.q_used, self.most)
            keys = row_range(self.cu_k, n, self.k_packed, self.k_used, 7)
            own = (
                q[rows] if self.q_packed else q[n, rows],
                *(x[keys] if self.k_packed else x[n, keys] for x in (k, v)),
            )
            shown = {} if mask is None else {"mask": mask(n, rows, keys)}
            found, found_lse = flash.attended(*own, **options, **shown)
            if self.q_packed:
                true[rows], true_lse[:, rows] = found, found_lse
            else:
                true[n, rows], true_lse[n, :, rows] = found, found_lse
        agree((out, lse), (true, true_lse))
        agree((out,), (true,), self.arrays)


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("version", [3, 4])
def test_sequences(version, name):
    case = Sided(name, kv_heads=2)
    if version == 3:
        ends = case.ends["cu_seqlens_q"], case.ends["cu_seqlens_k"], 5, 7
        results = v3.flash_attn_varlen_func(*case.arrays, *ends, **case.used, causal=True, return_attn_probs=True)
    else:
        results = v4.flash_attn_varlen_func(*case.arrays, **case.ends, **case.used, causal=True, return_lse=True)
    case.compare(*results, causal=True)


def gathered(tokens, most, count):
    """Keys of each token, each once; numbers of none among them, as a selector leaves them."""
    found = torch.stack([torch.randperm(most + 3)[:count] for _ in range(tokens)])
    return found.masked_fill(found >= most, int(torch.tensor([-1, 10**6])[tokens % 2])).int()


def shown_by(chosen, keys):
    """The mask of chosen keys."""
    seen = torch.zeros(len(chosen), keys + 1, dtype=torch.bool)
    seen.scatter_(1, torch.where((chosen < 0) | (chosen >= keys), keys, chosen).long(), True)
    return lambda i, j: seen[i, j]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SIDES)
def test_gathered_keys(name, causal):
    """Numbers count in each sequence; one past its keys is none."""
    case = Sided(name, kv_heads=1)
    chosen = gathered(7, 7, 4) if case.q_packed else gathered(3 * case.most, 7, 4).view(3, case.most, 4)
    out, lse = v4.flash_attn_varlen_func(
        *case.arrays, **case.ends, **case.used, gather_kv_indices=chosen, causal=causal, return_lse=True
    )

    def mask(n, rows, keys):
        return shown_by(chosen[rows] if case.q_packed else chosen[n, rows], keys.stop - keys.start)

    case.compare(out, lse, causal=causal, mask=mask)


@pytest.mark.parametrize("shared", [False, True])
def test_gathered_keys_of_latents(shared):
    """As flash-attn 4 has them: beside qv, or with values that are their own keys."""
    q, k, v, qv = made(2, (2, 5, 4, 8), (2, 7, 1, 8), (2, 7, 1, 12), (2, 5, 4, 12), grad=True)
    chosen = gathered(10, 7, 4).view(2, 5, 4)
    given, inputs = ((None, None, v, qv), (v, qv)) if shared else ((q, k, v, qv), (q, k, v, qv))
    out, lse = v4.flash_attn_func(*given, gather_kv_indices=chosen, causal=True, return_lse=True)
    true = []
    for n in range(2):
        own = (qv[n], v[n], v[n]) if shared else (q[n], k[n], v[n])
        more = {} if shared else {"qv": qv[n]}
        true.append(flash.attended(*own, **more, causal=True, mask=shown_by(chosen[n], 7)))
    want, want_lse = (torch.stack(x) for x in zip(*true, strict=True))
    agree((out, lse.transpose(1, 2)), (want, want_lse))
    agree((out,), (want,), inputs)


def row_range(ends, n, packed, used, most):
    start = int(ends[n]) if packed else 0
    room = int(ends[n + 1] - ends[n]) if packed else most
    return slice(start, start + (room if used is None else used[n]))


def test_private_calls_of_version_3():
    q, k, v = made(5, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), grad=True)
    used_q, used_k = torch.tensor([5, 3]), torch.tensor([4, 7])
    true = torch.zeros(2, 5, 4, 8, dtype=torch.float64)
    for n in range(2):
        a, b = int(used_q[n]), int(used_k[n])
        true[n, :a] = flash.attended(q[n, :a], k[n, :b], v[n, :b], causal=True)[0]
    mine = torch.empty(2, 5, 4, 8)
    out, lse, *rest = v3._flash_attn_forward(q, k, v, out_=mine, seqused_q=used_q, seqused_k=used_k, causal=True)
    close(out, true)
    assert out is mine and [x.numel() for x in rest] == [0, 0]
    dout, grads = torch.randn(2, 5, 4, 8), [torch.empty_like(x) for x in (q, k, v)]
    used = {"sequed_q": used_q, "sequed_k": used_k}
    v3._flash_attn_backward(dout, q, k, v, out, lse, **used, dq=grads[0], dk=grads[1], dv=grads[2], is_causal=True)
    for x, y in zip(grads, torch.autograd.grad(true, (q, k, v), dout.double()), strict=True):
        close(x, y)
    ends = flash.offsets(3, 4)
    q, k, v = made(6, (7, 4, 8), (7, 2, 8), (7, 2, 8), grad=True)
    out, lse, *_ = v3._flash_attn_forward(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=4, max_seqlen_k=4)
    true, _ = flash.ragged(q, k, v, ends, ends)
    close(out, true)
    dout, grads = torch.randn(7, 4, 8), [torch.empty_like(x) for x in (q, k, v)]
    v3._flash_attn_backward(dout, q, k, v, out, lse, ends, ends, None, None, 4, 4, *grads)
    for x, y in zip(grads, torch.autograd.grad(true, (q, k, v), dout.double()), strict=True):
        close(x, y)
    cache, (one,) = torch.randn(2, 8, 2, 8), made(7, (2, 1, 2, 8))
    out, *_ = v3._flash_attn_forward(
        out[None, :2].expand(2, -1, -1, -1)[:, :1], cache, cache.clone(), one, one, seqused_k=used_q
    )
    assert torch.equal(cache[0, 5], one[0, 0]) and out.shape == (2, 1, 4, 8)


def seen(window, causal, apart):
    """flash-attn 4's: sides are numbers, below 0, too; two that cross limit nothing."""
    left, right = window[0], 0 if causal else window[1]
    left, right = (None, None) if left is not None and right is not None and left + right < 0 else (left, right)
    right = 0 if causal else right
    return lambda i, j: (
        ((left is None) | (j >= i + apart - (left or 0))) & ((right is None) | (j <= i + apart + (right or 0)))
    )


@pytest.mark.parametrize(
    "window", [(None, None), (2, None), (None, 1), (3, 0), (-1, -1), (None, -2), (-1, None), (4, -1), (-2, 3), (-1, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_version_4_windows(window, causal):
    for rows, keys in ((6, 4), (5, 9)):
        q, k, v = made(8, (1, rows, 2, 8), (1, keys, 2, 8), (1, keys, 2, 8))
        given = window if rows == 6 else tuple(n if n is None else torch.tensor(n) for n in window)
        out, lse = v4.flash_attn_func(q, k, v, causal=causal, window_size=given, return_lse=True)
        true = flash.batched(q, k, v, mask=seen(window, causal, keys - rows))
        agree((out, lse), (true[0], true[1]))
        ends = {"cu_seqlens_q": flash.offsets(rows), "cu_seqlens_k": flash.offsets(keys)}
        packed, _ = v4.flash_attn_varlen_func(q[0], k[0], v[0], **ends, causal=causal, window_size=given)
        close(packed, true[0][0])


@pytest.mark.parametrize("name", ["q", "v", "qv", "learnable_sink"])
def test_version_4_returns_log_sum_exps_where_there_is_a_gradient(name):
    q, k, v, qv = made(17, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (2, 5, 4, 8))
    given = {"q": q, "k": k, "v": v, "qv": qv if name == "qv" else None, "learnable_sink": torch.ones(4)}
    assert v4.flash_attn_func(**given)[1] is None
    given[name].requires_grad_()
    out, lse = v4.flash_attn_func(**given)
    assert out.requires_grad and not lse.requires_grad
    assert torch.equal(lse, v4.flash_attn_func(**given, return_lse=True)[1])
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), None)
    assert torch.equal(lse, v4.flash_attn_varlen_func(**given, **ends)[1])


def test_version_4_without_queries_and_keys():
    """Then scores are of qv and v."""
    qv, v = made(18, (2, 5, 4, 12), (2, 7, 2, 12), grad=True)
    true = flash.batched(qv, v, v, causal=True)
    out, lse = v4.flash_attn_func(None, None, v, qv, causal=True, return_lse=True)
    agree((out, lse), (true[0], true[1].transpose(1, 2)), (qv, v))
    ends_q, ends_k = flash.offsets(5, 5), flash.offsets(7, 7)
    packed, _ = v4.flash_attn_varlen_func(
        None, None, v.flatten(0, 1), qv.flatten(0, 1), cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, causal=True
    )
    close(packed, true[0].flatten(0, 1))


@pytest.mark.parametrize("used", [None, [6, 3]])
@pytest.mark.parametrize("version", [2, 4])
def test_pages_have_gradients(version, used):
    """Of queries, of pages, and of what several sequences share; without lengths a sequence fills its pages."""
    q, k, v = made(19, (7, 4, 8), (5, 3, 2, 8), (5, 3, 2, 8), grad=True)
    table, ends, lens = torch.tensor([[4, 1], [4, 0]], dtype=torch.int32), flash.offsets(4, 3), used or [6, 6]
    if version == 4:
        given = None if used is None else torch.tensor(used, dtype=torch.int32)
        out, lse = v4.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=ends, page_table=table, seqused_k=given, causal=True, return_lse=True
        )
    else:
        out, lse, _ = fa.flash_attn_varlen_func(
            q, k, v, ends, flash.offsets(*lens), 4, 6, causal=True, return_attn_probs=True, block_table=table
        )
    keys, values = (torch.cat([x[row].flatten(0, 1)[:n] for row, n in zip(table, lens, strict=True)]) for x in (k, v))
    true = flash.ragged(q, keys, values, ends, flash.offsets(*lens), causal=True)
    close(out, true[0])
    close(lse, true[1].masked_fill(true[1] == -math.inf, math.inf) if version == 2 else true[1])
    agree((out,), true[:1], (q, k, v))
    with torch.no_grad():
        again = v4.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=ends, page_table=table, seqused_k=torch.tensor(lens), causal=True
        )[0]
    close(again, true[0])
    with pytest.raises(sl.Error, match="^page_table: expected"):
        v4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends, page_table=table + 1, seqused_k=torch.tensor(lens))


@pytest.mark.parametrize("call", [fa.flash_attn_func, v3.flash_attn_func, v4.flash_attn_func])
def test_windows_may_be_tensors(call):
    q, k, v = made(20, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    out = call(q, k, v, window_size=torch.tensor([2, 1]))
    true = flash.batched(q, k, v, window=(2, 1))[0]
    close(out[0] if call is v4.flash_attn_func else out, true)
    for wrong in (torch.tensor([2, 1, 0]), torch.tensor([2.0, 1.0]), torch.tensor(3)):
        with pytest.raises(sl.Error, match="^window_size: expected"):
            call(q, k, v, window_size=wrong)


def test_version_4_sinks():
    q, k, v = made(9, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), grad=True)
    sink = torch.randn(4, requires_grad=True)
    out, lse = v4.flash_attn_func(q, k, v, learnable_sink=sink, causal=True, return_lse=True)
    true = flash.batched(q, k, v, sink=sink, causal=True)
    agree((out, lse), true, (q, k, v, sink))


def test_version_4_functions():
    """Indices count from 0, causal is aligned at the end, what functions look up has gradients."""
    q, k, v = made(10, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), grad=True)
    bias = torch.randn(4, 7, requires_grad=True)
    odd = torch.tensor([1, 0, 1, 1, 0, 1, 1])

    def score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        near = q_idx + seqlen_info.seqlen_k - seqlen_info.seqlen_q - kv_idx
        return torch.tanh(score) + aux_tensors[0][h, kv_idx] - aux_scalars[0] * near

    out, lse = v4.flash_attn_func(
        q, k, v, causal=True, score_mod=score_mod, aux_tensors=[bias], aux_scalars=(0.25,), return_lse=True
    )
    true = flash.batched(
        q, k, v, causal=True, score=lambda s, h, i, j: s.tanh() + bias[h].double() - 0.25 * (i + 2 - j)
    )
    agree((out, lse), true, (q, k, v, bias))
    out, lse = v4.flash_attn_func(
        q, k, v, mask_mod=lambda b, h, m, n, info, aux: (aux[0][n] != 0) & (n <= m), aux_tensors=[odd], return_lse=True
    )
    true = flash.batched(q, k, v, mask=lambda i, j: (odd[j] != 0) & (j <= i))
    agree((out, lse), (true[0], true[1]))


def test_version_4_functions_of_sequences():
    ends_q, ends_k = flash.offsets(4, 3), flash.offsets(6, 5)
    q, k, v = made(11, (7, 4, 8), (11, 2, 8), (11, 2, 8))
    bias = torch.randn(11)

    def score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return score + aux_tensors[0][seqlen_info.offset_k + kv_idx] * (q_idx + seqlen_info.offset_q)

    ends = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    out, _ = v4.flash_attn_varlen_func(q, k, v, **ends, score_mod=score_mod, aux_tensors=[bias], causal=True)
    for n in range(2):
        a, b = slice(*ends_q[n : n + 2]), slice(*ends_k[n : n + 2])
        own = bias[b].double()
        first = int(ends_q[n])
        score = lambda s, h, i, j, own=own, first=first: s + own * (i + first)  # noqa: E731
        close(out[a], flash.attended(q[a], k[b], v[b], causal=True, score=score)[0])
    pages_k, pages_v = made(12, (5, 3, 2, 8), (5, 3, 2, 8))
    table, used = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32), torch.tensor([4, 6], dtype=torch.int32)
    out, lse = v4.flash_attn_varlen_func(
        q, pages_k, pages_v, cu_seqlens_q=ends_q, page_table=table, seqused_k=used, return_lse=True,
        mask_mod=lambda b, h, m, n, info, aux: n < info.seqlen_k - 1 - m,
    )  # fmt: skip
    for n in range(2):
        rows, count = slice(*ends_q[n : n + 2]), int(used[n])
        keys, values = (x[table[n]].flatten(0, 1)[:count] for x in (pages_k, pages_v))
        true = flash.attended(q[rows], keys, values, mask=lambda i, j, c=count: j < c - 1 - i)
        agree((out[rows], lse[:, rows]), (true[0], true[1]))


def test_combine():
    out, lse = made(13, (3, 2, 5, 4, 8), (3, 2, 5, 4))
    lse[1, 0] = -math.inf
    weights = (lse.double() - lse.double().logsumexp(0)).exp()
    true = (weights[..., None] * out.double()).sum(0)
    for version in (v3, v4):
        found, total = version.flash_attn_combine(out, lse)
        close(found, true)
        close(total, lse.double().logsumexp(0))
        mine = torch.empty(2, 5, 4, 8, dtype=torch.bfloat16)
        assert version.flash_attn_combine(out, lse, mine)[0] is mine
        torch.testing.assert_close(mine, true.bfloat16(), atol=0.02, rtol=0.02)
        assert version.flash_attn_combine(out, lse, None, torch.float16)[0].dtype == torch.float16
    assert v4.flash_attn_combine(out[:, 0], lse[:, 0], return_lse=False)[1] is None
    with pytest.raises(sl.ArgumentError, match="^out: expected shape"):
        v3.flash_attn_combine(out, lse, torch.empty(2, 5, 4, 9))
    with pytest.raises(sl.ArgumentError, match="^out: expected shape .* of floats"):
        v3.flash_attn_combine(out, lse, torch.empty(2, 5, 4, 8, dtype=torch.int32))
    with pytest.raises(sl.ArgumentError, match="^out_dtype: expected a dtype of floats"):
        v3.flash_attn_combine(out, lse, None, torch.int32)


TABLE = torch.zeros(2, 1, dtype=torch.int32)
REFUSED = [
    (v3.flash_attn_func, "q_descale", {"q_descale": torch.ones(2, 2)}),
    (v3.flash_attn_func, "attention_chunk", {"attention_chunk": 4}),
    (v3.flash_attn_func, "qv", {"qv": torch.ones(2, 5, 4, 9)}),
    (v3.flash_attn_func, "causal", {"causal": 1}),
    (v4.flash_attn_func, "gather_kv_indices", {"gather_kv_indices": torch.ones(2, 5, 8)}),
    (v4.flash_attn_func, "gather_kv_indices", {"gather_kv_indices": torch.ones(2, 5, 8).int()}),
    (v4.flash_attn_func, "gather_kv_indices", {"gather_kv_indices": torch.zeros(2, 4, 1).int()}),
    (v4.flash_attn_func, "gather_kv_indices", {"gather_kv_indices": [[[1]]]}),
    (v4.flash_attn_varlen_func, "gather_kv_indices", {"page_table": TABLE, "gather_kv_indices": TABLE[:, None]}),
    (v4.flash_attn_func, "score_mod_bwd", {"score_mod_bwd": max}),
    (v4.flash_attn_func, "mask_mod", {"mask_mod": lambda b, h, m, n, info, aux: n < 3, "causal": True}),
    (v4.flash_attn_func, "softcap", {"score_mod": lambda s, b, h, m, n, info, aux: s, "softcap": 1.0}),
    (v4.flash_attn_func, "window_size", {"window_size": (4.0, 1)}),
    (v4.flash_attn_func, "k", {"k": None}),
    (v4.flash_attn_func, "qv", {"q": None, "k": None, "qv": torch.ones(2, 5, 4, 9)}),
    (v4.flash_attn_func, "learnable_sink", {"learnable_sink": torch.ones(3)}),
    (v4.flash_attn_varlen_func, "cu_seqlens_k", {"page_table": TABLE, "cu_seqlens_k": flash.offsets(3, 4)}),
    (v4.flash_attn_varlen_func, "page_table", {"page_table": TABLE[0]}),
    (v4.flash_attn_varlen_func, "seqused_q", {"seqused_q": torch.tensor([6, 1])}),
]


@pytest.mark.parametrize(("call", "name", "options"), REFUSED, ids=[f"{x[1]}-{n}" for n, x in enumerate(REFUSED)])
def test_what_is_not_offered_is_named(call, name, options):
    q, k, v = made(14, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    with pytest.raises(sl.Error, match=f"^{name}: expected"):
        call(**{"q": q, "k": k, "v": v, **options})


def test_values_that_are_their_own_keys():
    """flash-attn 4 takes k that is v, of 512 elements, for MLA: its log-sum-exps have heads last then."""
    q, v = made(15, (1, 2, 2, 512), (1, 3, 1, 512))
    out, lse = v4.flash_attn_func(q, v, v, return_lse=True)
    true = flash.batched(q, v, v)
    close(out, true[0])
    close(lse.transpose(1, 2), true[1])
    with pytest.raises(sl.UnsupportedError, match="^qv: expected None"):
        v4.flash_attn_func(q, v, v, qv=q)


ENDS = flash.offsets(3, 4)
PADDED, PACKED, CACHE = torch.ones(2, 5, 2, 8), torch.ones(7, 2, 8), torch.zeros(2, 6, 2, 8)
THREE, LIST = [PADDED] * 3, "those of speedlight.flash_attn"


def cached(call=fa.flash_attn_with_kvcache, cache=CACHE, **options):
    one = torch.ones(2, 1, 2, 8)
    return call(one, cache, cache.clone(), one, one, **{"cache_seqlens": 3, **options})


def turning(cos, sin):
    return {"rotary_cos": torch.ones(cos), "rotary_sin": torch.ones(sin)}


WRONG = {
    "2's order in 3": (lambda: v3.flash_attn_func(*THREE, 0.0, None, True), f"qv: expected .* got bool.*{LIST}"),
    "2's order in 4": (lambda: v4.flash_attn_func(*THREE, 0.0, None, True), f"qv: expected .* got float.*{LIST}"),
    "2's order, packed": (
        lambda: v3.flash_attn_varlen_func(*[PACKED] * 3, ENDS, ENDS, 4, 4, 0.0, None, True),
        f"seqused_q: expected .* got float.*{LIST}",
    ),
    "2's order, a cache": (
        lambda: v3.flash_attn_with_kvcache(PADDED, CACHE, CACHE, PADDED, PADDED, torch.ones(6, 4), torch.ones(6, 4), 1),
        f"rotary_sin: expected .* got int.*{LIST}",
    ),
    "no q": (lambda: fa.flash_attn_func(None, PADDED, PADDED, alibi_slopes=torch.ones(2)), "q: expected a tensor"),
    "no qkv": (lambda: v3.flash_attn_qkvpacked_func(None), "qkv: expected"),
    "no parts": (lambda: v3.flash_attn_combine(None, None), "out_partial: expected a tensor"),
    "an array": (lambda: fa.flash_attn_func(*[PADDED.numpy()] * 3, return_attn_probs=True), "q: expected a tensor"),
    "slopes": (lambda: fa.flash_attn_func(*THREE, alibi_slopes=[0.1, 0.2]), "alibi_slopes: expected .* got list"),
    "scale": (lambda: fa.flash_attn_func(*THREE, softmax_scale=math.nan), "softmax_scale: expected a finite"),
    "packed": (lambda: fa.flash_attn_func(*[PACKED] * 3), r"q: expected 4 dimensions, .* without cu_seqlens_q; got"),
    "no offsets": (lambda: fa.flash_attn_varlen_func(*[PACKED] * 3, None, None, 4, 4), "cu_seqlens_q: expected off"),
    "no offsets in one": (
        lambda: fa.flash_attn_varlen_qkvpacked_func(torch.ones(7, 3, 2, 8), None, 7), "cu_seqlens: expected offsets",
    ),
    "offsets": (
        lambda: fa.flash_attn_varlen_func(*[PACKED] * 3, ENDS.float(), ENDS, 4, 4), "cu_seqlens_q: expected an int32",
    ),
    "lengths": (lambda: cached(cache_seqlens=torch.tensor([5.0, 3.0])), "cache_seqlens: expected an int32 tensor"),
    "rows": (lambda: cached(cache_batch_idx=torch.tensor([0, 9])), "cache_batch_idx: expected rows of k_cache, 0 to 1"),
    "count of rows": (lambda: cached(cache_batch_idx=[0]), "cache_batch_idx: expected 2 rows"),
    "short": (lambda: cached(**turning((2, 4), (2, 4))), "rotary_cos: expected 4 positions or more.*got 2"),
    "wide": (lambda: cached(**turning((9, 5), (9, 5))), "rotary_cos: expected shape"),
    "apart": (lambda: cached(**turning((9, 4), (9, 2))), "rotary_sin: expected shape"),
    "pairs": (lambda: cached(**turning((9, 4), (9, 4)), rotary_interleaved=1), "rotary_interleaved: expected True"),
    "no slots": (
        lambda: fa.flash_attn_with_kvcache(PADDED, CACHE[:, :0], CACHE[:, :0], block_table=TABLE, cache_seqlens=0),
        "k_cache: expected pages",
    ),
    "no score": (
        lambda: v4.flash_attn_func(*THREE, score_mod=lambda s, b, h, m, n, info, aux: None),
        r"score_mod: expected a result of <lambda>\(\) in ",
    ),
    "aux": (lambda: v4.flash_attn_func(*THREE, mask_mod=max, aux_tensors=3), "aux_tensors: expected a list"),
    "version": (lambda: fa.install(2), r"versions: expected .*, as \(2,\) or \(2, 3, 4\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    call, message = WRONG[name]
    with pytest.raises(sl.Error, match=f"^{message}"):
        call()


@pytest.mark.parametrize("mod", [3, sl.causal(), lambda b, h, i, j: i > j, lambda b, h, m, n, info, aux, more: m > n])
@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_functions_of_other_arguments_are_named(name, mod):
    mod = (lambda s, b, h, m, n, info: s) if name == "score_mod" and callable(mod) else mod
    with pytest.raises(sl.ArgumentTypeError, match=rf"^{name}: expected a function \(.*, seqlen_info, aux_tensors\)"):
        v4.flash_attn_func(*THREE, **{name: mod})
