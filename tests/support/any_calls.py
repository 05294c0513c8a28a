"""Random calls of everything public that computes, alike for one seed: tests/same_bits.py compares trees by them.

Masks and scores come from tests/support/forms.py, each beside one dtype, so that kernels are few; all else is any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from forms import FORMS
from problems import CODES, DTYPES, as_numpy, digest, draw_combined, numpy_dtype, qkv, stacked, taken
from states import states
from steps import strided

import speedlight as sl
import speedlight.flash_attn as fa
import speedlight.torch as st
from speedlight.flash_attn import v3

LENGTHS = (1, 2, 3, 5, 16, 17, 47, 48, 100, 129, 300)
DIMS = (1, 3, 8, 16, 17, 32, 40, 64, 80)
NAMES = {"bhld": ("bhld", "bhsd", "BNSD"), "blhd": ("blhd", "bshd"), "lhd": ("lhd", "thd"), "hld": ("hld",)}
SHARED = [x for x in FORMS if not x.dense and not x.ring]  # forms of kernels that caches have, too
Rng = np.random.Generator
Arrays = list[Any]


class Calls:
    """The results of one problem's calls, as digests; the error's type where a call is refused."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.refused = Counter[str]()
        self.made = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.made += 1
        try:
            result = function(*args, **options)
        except Exception as error:
            self.refused[type(error).__name__] += 1
            self.digests.append(type(error).__name__)
            return None
        self.digests += [digest((as_numpy(x),)) for x in flat(result)]
        return result


def flat(x: Any) -> Iterator[Any]:
    if isinstance(x, tuple | list) and not all(isinstance(y, int) for y in x):
        for y in x:
            yield from flat(y)
    elif isinstance(x, np.ndarray | torch.Tensor | int | tuple | list):
        yield x


def as_torch(x: np.ndarray, *, grad: bool = False) -> torch.Tensor:
    x = np.ascontiguousarray(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).requires_grad_(grad)
    return torch.from_numpy(x).requires_grad_(grad)


def chance(rng: Rng, p: float) -> bool:
    return bool(rng.random() < p)


def pick(rng: Rng, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


# --- attention() and its gradients


def draw_call(rng: Rng, wider: float) -> tuple[Arrays, dict[str, Any]]:
    """q, k, v and options of an attention() of any form; `wider`: how often q is of a wider dtype than k and v."""
    p = draw_combined(rng, pick(rng, FORMS))
    q_lens, k_lens = [x.q.shape[1] for x in p.parts], [x.k.shape[1] for x in p.parts]
    options = {"mask": p.mask, "score": p.score, "causal": p.causal, "q_start": p.q_start} | p.options
    layout = p.layout
    if layout == "lhd":
        arrays = [np.concatenate([getattr(x, n) for x in p.parts], axis=1).swapaxes(0, 1) for n in "qkv"]
        ends = [list(accumulate(x, initial=0)) for x in (q_lens, k_lens)]
        options |= {"cu_seqlens_q": ends[0]}
        if ends[0] != ends[1] or chance(rng, 0.5):
            options |= {"cu_seqlens_k": np.array(ends[1], np.int32)}
    else:
        more = [0, 0] if p.form.dense else rng.integers(0, 3, 2)
        sizes = (max(q_lens) + more[0], max(k_lens) + more[1], max(k_lens) + more[1])
        arrays = [stacked([getattr(x, n) for x in p.parts], length=int(m)) for n, m in zip("qkv", sizes, strict=True)]
        if len({*q_lens}) > 1 or len({*k_lens}) > 1 or any(more):
            both = q_lens == k_lens and sizes[0] == sizes[1]
            options |= {"lengths": q_lens} if both else {"q_lengths": q_lens, "k_lengths": k_lens}
        elif len(q_lens) == 1 and not p.form.dense and chance(rng, 0.4):
            layout, arrays = "hld", [x[0] for x in arrays]
        if p.expanded == "batch" and layout == "bhld" and "lengths" not in options and "k_lengths" not in options:
            arrays[1:] = arrays[1][:1], arrays[2][:1]
        if layout == "blhd":
            arrays = [x.swapaxes(1, 2) for x in arrays]
    if p.form.dtype in ("float32", "float16") and chance(rng, wider):
        narrow = numpy_dtype("bfloat16" if p.form.dtype == "float16" else pick(rng, ("float16", "bfloat16")))
        arrays[1:] = (x.astype(narrow) for x in arrays[1:])
    if chance(rng, 0.12):
        options |= {"dropout": pick(rng, (0.1, 0.5)), "seed": int(rng.integers(1 << 62))}
    options |= {"layout": pick(rng, NAMES[layout])}
    return [strided(rng, x) for x in arrays], options


def attention(rng: Rng, call: Calls) -> None:
    (q, k, v), options = draw_call(rng, 0.12)
    if chance(rng, 0.2):
        options |= {"precision": pick(rng, ("ieee", "tf32x3", "tf32")), "engine": "cpu"}
    if chance(rng, 0.15):
        options["out"] = np.full((*q.shape[:-1], 2 * v.shape[-1]), np.nan, q.dtype)[..., ::2]
    if chance(rng, 0.3):
        q, k, v = as_torch(q), as_torch(k), as_torch(v)
        options |= {"out": as_torch(options["out"])} if "out" in options else {}
    call(sl.attention, q, k, v, return_lse=chance(rng, 0.8), **options)
    if "out" in options:
        call(lambda: options["out"])


def learned(rng: Rng, heads: int, kind: Callable[[np.ndarray], Any] = np.asarray) -> tuple[Any, tuple[Any, ...]]:
    """A score and the tables that it looks up."""
    rows, bias = (rng.standard_normal(x).astype(np.float32) for x in ((heads, 64), (48, 48)))
    a, b, c = sl.table(kind(rows)), sl.table(kind(bias)), sl.table(kind(rows[:, 0] + 4))
    return [
        (lambda s, b, h, i, j: s + a[h, (i - j) % 64], (a,)),
        (lambda s, _, h, i, j: s * c[h] + b[i % 48, j % 48], (c, b)),
        ([lambda s, b, h, i, j: s - c[h] * sl.abs(i - j), sl.softcap(4.0)], (c,)),
    ][rng.integers(3)]


def heads_of(q: Any, layout: str) -> int:
    return q.shape[-3 if layout.lower()[-3] in "hn" else -2]


def attention_backward(rng: Rng, call: Calls) -> None:
    arrays, options = draw_call(rng, 0.02)
    heads, grads = heads_of(arrays[0], options["layout"]), ()
    if chance(rng, 0.3):
        options["score"], grads = learned(rng, heads)
    if options["sink_logits"] is not None and chance(rng, 0.6):
        grads = (*grads, "sink_logits")
    found = call(sl.attention, *arrays, return_lse=True, **options)
    if found is not None:
        out, lse = found
        flows = [rng.standard_normal(x.shape).astype(x.dtype) for x in found]
        d_lse = flows[1] if chance(rng, 0.4) else None
        call(sl.attention_backward, *arrays, out, lse, flows[0], d_lse, grads=grads, **options)


def pull(
    rng: Rng, call: Calls, function: Callable[..., Any], *args: Any, more: Sequence[Any] = (), **options: Any
) -> None:
    """Calls a function of tensors, and takes gradients to those that ask for them; now and then second ones."""
    wanted = [x for x in (*args, *options.values(), *more) if isinstance(x, torch.Tensor) and x.requires_grad]
    outs = call(function, *args, **options)
    outs = [x for x in flat(outs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not outs or not wanted:
        return
    flows, twice = [as_torch(rng.standard_normal(x.shape)).to(x.dtype) for x in outs], chance(rng, 0.15)
    grads = call(torch.autograd.grad, outs, wanted, flows, create_graph=twice, allow_unused=True)
    if twice and grads is not None:
        sums = [x.square().sum() for x in grads if x is not None and x.requires_grad]
        if sums:
            call(torch.autograd.grad, sums, wanted, allow_unused=True)


def autograd(rng: Rng, call: Calls) -> None:
    """attention() of tensors, by either name."""
    arrays, options = draw_call(rng, 0.02)
    tensors = [as_torch(x, grad=chance(rng, 0.8)) for x in arrays]
    heads, tables = heads_of(arrays[0], options["layout"]), []
    if chance(rng, 0.3):
        slopes = as_torch(rng.uniform(0.01, 1, heads).astype(np.float32), grad=True)
        options["score"], tables = pick(rng, (sl.alibi(slopes), [sl.softcap(5.0), sl.alibi(slopes)])), [slopes]
    if options["sink_logits"] is not None and chance(rng, 0.5):
        options["sink_logits"] = torch.tensor(options["sink_logits"], requires_grad=True)
    attend = pick(rng, (sl.attention, st.attention))
    pull(rng, call, attend, *tensors, more=tables, return_lse=chance(rng, 0.5), **options)


def draw_heads(rng: Rng) -> dict[str, Any]:
    """Sizes and options of calls in other libraries' words: arrays are (batch, length, heads, dim)."""
    kv_heads, group, batch = int(rng.integers(1, 3)), pick(rng, (1, 2, 4)), int(rng.integers(1, 4))
    dtype = pick(rng, (torch.float32, torch.float32, torch.float16, torch.bfloat16))
    q_len, k_len, dim = pick(rng, LENGTHS), pick(rng, LENGTHS), pick(rng, (8, 16, 32, 40, 64))
    q, k, v = (
        torch.from_numpy(rng.standard_normal((batch, n, h, dim))).to(dtype).requires_grad_(chance(rng, 0.7))
        for n, h in ((q_len, kv_heads * group), (k_len, kv_heads), (k_len, kv_heads))
    )
    return {"q": q, "k": k, "v": v, "causal": chance(rng, 0.5), "scale": pick(rng, (None, 0.3))}


def torch_sdpa(rng: Rng, call: Calls) -> None:
    d = draw_heads(rng)
    q, k, v = (d[n].transpose(1, 2) for n in "qkv")
    shape = (pick(rng, (1, q.shape[0])), pick(rng, (1, q.shape[1])), q.shape[2], k.shape[2])
    mask = None
    if not d["causal"]:
        some = torch.from_numpy(rng.standard_normal(shape))
        mask = pick(rng, (None, some > -0.5, some.to(q.dtype), some.to(q.dtype).requires_grad_()))
    options = {"attn_mask": mask, "is_causal": d["causal"], "scale": d["scale"], "enable_gqa": True}
    if chance(rng, 0.5):
        return pull(rng, call, st.scaled_dot_product_attention, q, k, v, more=[d["q"]], **options)
    with st.sdpa():
        pull(rng, call, torch.nn.functional.scaled_dot_product_attention, q, k, v, more=[d["q"]], **options)


def flash_attn(rng: Rng, call: Calls) -> None:
    d = draw_heads(rng)
    q, k, v = (d[n] for n in "qkv")
    options = {"softmax_scale": d["scale"], "causal": d["causal"], "softcap": pick(rng, (0.0, 0.0, 3.0))}
    options |= {"window_size": pick(rng, ((-1, -1), (-1, -1), (20, 0), (9, 4)))}
    if chance(rng, 0.3):
        options["alibi_slopes"] = torch.from_numpy(rng.uniform(0.1, 1, q.shape[2]).astype(np.float32))
    which = rng.integers(4)
    if which == 0:
        attend = (
            fa.flash_attn_func if "alibi_slopes" in options else pick(rng, (fa.flash_attn_func, v3.flash_attn_func))
        )
        pull(rng, call, attend, q, k, v, **options)
    elif which == 1:
        ends = [torch.arange(0, len(x) * x.shape[1] + 1, x.shape[1], dtype=torch.int32) for x in (q, k)]
        packed = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
        pull(rng, call, fa.flash_attn_varlen_func, *packed, *ends, q.shape[1], k.shape[1], **options)
    elif which == 2:
        packed = torch.from_numpy(rng.standard_normal((*q.shape[:2], 3, *q.shape[2:]))).to(q.dtype).requires_grad_()
        pull(rng, call, fa.flash_attn_qkvpacked_func, packed, **options)
    else:
        held = torch.from_numpy(rng.integers(0, k.shape[1], len(q)).astype(np.int32))
        room = [torch.cat([x.detach(), x.detach()], 1) for x in (k, v)]
        n = pick(rng, (1, 3))
        new = [x.detach()[:, :n] for x in (k, v)] if chance(rng, 0.7) else []
        call(
            fa.flash_attn_with_kvcache, q.detach(), *room, *new, cache_seqlens=held, return_softmax_lse=True, **options
        )
        call(lambda: room)


def torch_flex(rng: Rng, call: Calls) -> None:
    d, bias = draw_heads(rng), torch.from_numpy(rng.standard_normal(600).astype(np.float32))
    q, k, v = (d[n].transpose(1, 2) for n in "qkv")
    mods = (None, lambda s, b, h, i, j: s + bias[j], lambda s, b, h, i, j: s * 0.5 - (i - j).abs() * (h + 1) / 8)
    masks = (lambda b, h, i, j: i >= j, lambda b, h, i, j: (i - j).abs() < 20, lambda b, h, i, j: (i + j) % 3 != b)
    block = call(st.create_block_mask, pick(rng, masks), None, None, q.shape[2], k.shape[2], device="cpu")
    options = {"score_mod": pick(rng, mods), "block_mask": pick(rng, (None, block)), "scale": d["scale"]}
    pull(rng, call, st.flex_attention, q, k, v, more=[d["q"]], enable_gqa=True, return_lse=chance(rng, 0.5), **options)


def torch_module(rng: Rng, call: Calls) -> None:
    torch.manual_seed(int(rng.integers(1 << 30)))
    options = {"kv_heads": 2, "bias": chance(rng, 0.5), "causal": chance(rng, 0.5), "sinks": chance(rng, 0.3)}
    options |= {"rotary": pick(rng, (None, 1e4)), "interleaved": chance(rng, 0.3), "window": pick(rng, (None, 9))}
    options["causal"] |= options["window"] is not None
    module = st.Attention(32, 4, **options)
    x = torch.randn(2, pick(rng, LENGTHS), 32, requires_grad=True)
    pull(rng, call, module, x, more=list(module.parameters()))


# --- keys that are kept


def draw_kept(rng: Rng) -> tuple[Any, dict[str, int], dict[str, Any]]:
    """dtype, sizes and the options of all calls of a cache or pool."""
    form = pick(rng, SHARED)
    dtype = pick(rng, CODES) if SHARED.index(form) % 3 == 0 and chance(rng, 0.6) else form.dtype
    if taken(dtype) != form.dtype or chance(rng, 0.3):
        dtype, form = dtype if dtype in CODES else pick(rng, DTYPES), FORMS[0]
    mask, score = form.make(np.random.default_rng(SHARED.index(form) if form in SHARED else 0))
    options = {"mask": mask, "score": score, "scale": pick(rng, (None, None, 0.3))}
    if chance(rng, 0.1):
        options |= {"dropout": 0.25, "seed": int(rng.integers(1 << 40))}
    sizes = {"kv_heads": int(rng.integers(1, 3)), "head_dim": pick(rng, DIMS), "value_dim": pick(rng, DIMS)}
    if chance(rng, 0.3):
        options["sink_logits"] = rng.standard_normal(4 * sizes["kv_heads"])
    return dtype, sizes, options


def tokens(rng: Rng, dtype: str, sizes: dict[str, int], batch: int, n: int, *, packed: bool = False) -> Arrays:
    """q, k and v of new tokens; four query heads share a head of keys where there are sinks for as many."""
    heads = sizes["kv_heads"]
    arrays = qkv(rng, taken(dtype), batch, 4 * heads, heads, n, n, sizes["head_dim"], sizes["value_dim"])
    return [np.ascontiguousarray(x[0].swapaxes(0, 1)) if packed else strided(rng, x) for x in arrays]


def cache(rng: Rng, call: Calls) -> None:
    """Appends, queries, and everything that forgets or copies, in any order."""
    dtype, sizes, options = draw_kept(rng)
    batch, windowed = int(rng.integers(1, 4)), chance(rng, 0.3)
    room = {"window": pick(rng, (5, 40, 150)), "keep_first": pick(rng, (0, 4))} if windowed else {"capacity": 1500}
    kept = sl.KVCache(layers=1, batch=batch, dtype=dtype, **sizes, **room)
    for _ in range(int(rng.integers(4, 9))):
        n = pick(rng, (1, 1, 2, 5, 17, 130))
        q, k, v = tokens(rng, dtype, sizes, batch, n)
        lengths = {"new_lengths": rng.integers(0, n + 1, batch).tolist()} if chance(rng, 0.25) else {}
        match rng.integers(12):
            case 0 | 1:
                call(kept.append, 0, k, v, **lengths)
            case 2:
                call(kept.attend, 0, q[:, :, :3], return_lse=True, **options)
            case 3 if not windowed:
                call(kept.truncate, [int(x * rng.random()) for x in kept.lengths(0)])
            case 4:
                if min(kept.lengths(0)) > 6:
                    call(kept.keep, [0, 2, 5], start=[x - 6 for x in kept.lengths(0)])
            case 5:
                kept = kept.copy()
            case 6:
                kept = kept.select(rng.integers(0, batch, batch).tolist())
            case 7:
                call(kept.lengths, 0)
                call(kept.keys, 0)
                call(kept.values, 0)
            case _:
                if chance(rng, 0.1):
                    lengths["q_lengths"] = [min(2, n)] * batch
                arrays = [as_torch(x) for x in (q, k, v)] if chance(rng, 0.2) else [q, k, v]
                call(kept.attend, 0, *arrays, return_lse=True, **lengths, **options)
    call(kept.keys, 0)


def pool(rng: Rng, call: Calls) -> None:
    dtype, sizes, options = draw_kept(rng)
    pages = sl.PagePool(layers=1, pages=120, page_size=pick(rng, (16, 32, 128)), dtype=dtype, **sizes)
    sequences = [pages.sequence() for _ in range(3)]
    for _ in range(int(rng.integers(4, 9))):
        some = [sequences[n] for n in rng.permutation(3)[: rng.integers(1, 4)]]
        new = rng.choice([1, 1, 1, 3, 40], len(some)).tolist()
        q, k, v = tokens(rng, dtype, sizes, 1, sum(new), packed=True)
        match rng.integers(9):
            case 0:
                call(pages.append, 0, some, k, v, new_lengths=new)
            case 1:
                if all(x.length() >= n for x, n in zip(some, new, strict=True)):
                    call(pages.attend, 0, some, q, q_lengths=new, return_lse=True, **options)
            case 2:
                sequences[0] = some[-1].fork()
            case 3:
                call(some[0].truncate, int(some[0].length() * rng.random()))
            case 4:
                if some[0].length() > 6:
                    call(some[0].keep, [0, 2, 5], start=some[0].length() - 6)
            case _:
                call(pages.attend, 0, some, q, k, v, new_lengths=new, return_lse=True, **options)
    for x in sequences:
        call(x.keys, 0)
        call(lambda x=x: x.pages)


def paged(rng: Rng, call: Calls) -> None:
    """Raw pages, appended to and read."""
    form = pick(rng, SHARED)
    d, dv, heads, size = pick(rng, DIMS), pick(rng, DIMS), int(rng.integers(1, 3)), pick(rng, (1, 5, 16, 33))
    kind, batch, most = numpy_dtype(form.dtype), int(rng.integers(1, 4)), 12
    k_pages, v_pages = (rng.standard_normal((batch * most, size, heads, x)).astype(kind) for x in (d, dv))
    if chance(rng, 0.4):
        k_pages, v_pages = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k_pages, v_pages))
    table = rng.permutation(batch * most).reshape(batch, most).astype(pick(rng, (np.int32, np.int64)))
    lengths, new = rng.integers(0, most * size - 4, batch).clip(1), int(rng.integers(1, min(4, size * 2)))
    q, k, v = qkv(rng, form.dtype, batch, 2 * heads, heads, new, new, d, dv)
    ragged = {"new_lengths": rng.integers(0, new + 1, batch)} if chance(rng, 0.3) else {}
    lengths = call(sl.append_paged, k_pages, v_pages, table, lengths, k, v, **ragged)
    call(lambda: (k_pages, v_pages))
    if lengths is None:
        return
    mask, score = form.make(np.random.default_rng(SHARED.index(form)))
    options = {"mask": mask, "score": score, "causal": chance(rng, 0.6), "window": pick(rng, (None, None, (30, 2)))}
    options |= {"sink_logits": pick(rng, (None, [0.5] * (2 * heads))), "scale": pick(rng, (None, 0.2))}
    if chance(rng, 0.1):
        options |= {"dropout": 0.3, "seed": 5}
    if chance(rng, 0.3):
        q, options["layout"] = np.concatenate(q.swapaxes(1, 2)), "lhd"
        options["cu_seqlens_q"] = np.arange(0, batch * new + 1, new)
    call(sl.attention_paged, q, k_pages, v_pages, table, lengths, return_lse=True, **options)


# --- the rest


def merge(rng: Rng, call: Calls) -> None:
    count, dtype = int(rng.integers(1, 5)), pick(rng, DTYPES)
    shape = (pick(rng, (1, 2, 9)), pick(rng, (1, 3, 8)), pick(rng, DIMS))
    outs, lses = states(rng, count, shape, dtype, "float64" if dtype == "float64" else "float32")
    kind = pick(rng, (np.asarray, as_torch))
    outs, lses = [kind(x) for x in outs], [kind(x) for x in lses]
    call(sl.merge, outs, lses)
    call(sl.merge_states, outs, lses, base2=chance(rng, 0.5))
    if count == 2:
        call(sl.merge, outs[0], lses[0], outs[1], lses[1])
    q, k, v = qkv(rng, dtype, 1, 2, 1, 5, pick(rng, (40, 300)), 16, shape[2])
    cut = int(rng.integers(1, 39))
    parts = [sl.attention(q, *(x[:, :, at] for x in (k, v)), return_lse=True) for at in (slice(cut), slice(cut, None))]
    call(sl.merge, *parts[0], *parts[1])


def rotary(rng: Rng, call: Calls) -> None:
    layout, dim = pick(rng, ("bhld", "blhd", "hld", "lhd")), 2 * int(rng.integers(1, 60))
    shape = (*rng.integers(1, 4, len(layout) - 3), *rng.integers(1, 40, 2), dim)
    x = strided(rng, rng.standard_normal(shape).astype(numpy_dtype(pick(rng, DTYPES))))
    options: dict[str, Any] = {"interleaved": chance(rng, 0.4), "layout": layout}
    dims = pick(rng, (dim, dim, 2 * int(rng.integers(1, dim // 2 + 1))))
    if chance(rng, 0.5):
        angles = rng.uniform(0, 6, (60, dims // 2))
        options |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32), "dims": dims}
    else:
        options |= {"base": pick(rng, (None, 500.0, 1e6)), "dims": dims, "positions": pick(rng, (None, 7, 15))}
    if chance(rng, 0.4):
        options |= {n: as_torch(options[n]) for n in ("cos", "sin") if n in options}
        return pull(rng, call, sl.rotary, as_torch(x, grad=True), **options)
    call(sl.rotary, x, **options)


KINDS = {  # and how often of 100
    attention: 34, attention_backward: 16, autograd: 8, torch_sdpa: 5, flash_attn: 6, torch_flex: 3, torch_module: 2,
    cache: 10, pool: 6, paged: 5, merge: 2, rotary: 3,
}  # fmt: skip
