"""flash-attn 4's calls (its module flash_attn.cute): its order of arguments and its meaning."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import ArgumentError, ArgumentTypeError, Expression, Table, UnsupportedError, expression, table
from ..adapting import check_each_once, public, shown
from ..expressions.symbols import Symbol, node_of
from ..expressions.tracing import check_returned
from ..expressions.tree import Node
from . import block_sparsity, v3
from .block_sparsity import BlockSparseTensorsTorch, BothPasses
from .options import OTHER_ORDER, V4, check_tensors, options_of, read_sides
from .sequences import PAGES, Side, attend, attend_pages, check_sides, pack, read_lengths

__all__ = [
    "BlockSparseTensorsTorch",
    "SeqlenInfo",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
]

_MLA_DIM = 512  # of values that are their own keys: flash-attn 4 then orders log-sum-exps as it does with qv


class SeqlenInfo(NamedTuple):
    """Sequence as score_mod and mask_mod know it: numbers, or entries of tables by its place in the batch.

    >>> from speedlight.flash_attn.v4 import SeqlenInfo
    >>> SeqlenInfo(0, 0, 5, 7).seqlen_k
    7
    """

    offset_q: Any
    offset_k: Any
    seqlen_q: Any
    seqlen_k: Any


class SchedulerMetadata(NamedTuple):
    """Result of get_scheduler_metadata(), by flash-attn 4's names: nothing."""

    num_m_blocks_ptr: None = None
    num_splits_dynamic_ptr: None = None
    virtual_batch_idx_ptr: None = None
    num_nheads_in_l2_ptr: None = None
    tile_count_semaphore: None = None
    cu_total_m_blocks: None = None
    cu_total_splits_m_blocks: None = None
    blocks_to_batch_idx: None = None


class Mods(NamedTuple):
    """Functions of scores and positions, and what they look up."""

    score: Callable[..., Any] | None
    mask: Callable[..., Any] | None
    tensors: Any
    scalars: Any


@public(leaves_graph=False)
def flash_attn_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attends as flash_attn_func of flash-attn 4 does.

    Args:
        q: (batch, seqlen, nheads, headdim).
        k: (batch, seqlen_k, nheads_k, headdim).
        v: (batch, seqlen_k, nheads_k, headdim_v).
        qv: (batch, seqlen, nheads, headdim_v): scores are of q·k + qv·v. Keys and values are copied for that. Where q
            and k are None, scores are of qv·v.
        softmax_scale: factor of the scores. Default 1/sqrt(dim of what is multiplied): headdim, headdim_v, or both.
        causal: hides keys after the query; the last query is at the last key.
        window_size: (left, right): keys further away are hidden; None: no limit on that side. A negative side hides
            keys that are nearer than that, too, and the query's own; two that cross limit nothing.
        learnable_sink: (nheads,): a score that joins the softmax and has no value; it counts in log-sum-exps.
        softcap: c > 0: scores become c · tanh(s / c). Not beside score_mod.
        score_mod: a function (score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors) -> score, with aux_scalars an
            argument more; indices count from 0 in each sequence. It is called once, with symbols: operators, PyTorch's
            and speedlight's functions of numbers work on them, those of CUTLASS do not.
        mask_mod: likewise (b, h, q_idx, kv_idx, seqlen_info, aux_tensors) -> bool. Not beside causal and window_size,
            which flash-attn would not look at.
        aux_tensors: what they look up: `aux_tensors[0][b, kv_idx]`. Gradients flow to float ones in a score_mod.
        gather_kv_indices: (batch, seqlen, count) ints: the keys that each query sees at most, each once; a number that
            no key has (-1) is none. All heads see the same. flash-attn has it beside qv alone.
        num_splits, pack_gqa, deterministic: mean nothing here.
        block_sparse_tensors: a BlockSparseTensorsTorch, whose blocks are shown, the others hidden; mask_mod counts in
            its mask blocks alone. Hidden blocks cost nothing.
        block_sparse_tensors_bwd: likewise, by columns, for the backward pass. Gradients are those of the forward pass,
            whose blocks it may not contradict.
        score_mod_bwd: refused.
        return_lse: also return log-sum-exps.

    Returns:
        (out, lse): out (batch, seqlen, nheads, headdim_v); lse (batch, nheads, seqlen), with qv (batch, seqlen,
        nheads), -inf in a row that sees nothing; or None, if neither return_lse asks for it nor a tensor requires
        grad. Gradients flow, to learnable_sink, too, and through an lse that was asked for.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    >>> import torch, speedlight.flash_attn
    >>> q, k, v = torch.ones(2, 5, 8, 16), torch.ones(2, 7, 2, 16), torch.ones(2, 7, 2, 24)
    >>> near = lambda b, h, q_idx, kv_idx, seqlen_info, aux_tensors: abs(q_idx - kv_idx) < 3
    >>> out, lse = speedlight.flash_attn.v4.flash_attn_func(q, k, v, mask_mod=near)
    >>> out.shape, lse
    (torch.Size([2, 5, 8, 24]), None)
    """
    if block_sparse_tensors_bwd is not None:
        if block_sparse_tensors is None:
            raise ArgumentError(
                "block_sparse_tensors_bwd: expected None without block_sparse_tensors; got lists alone."
            )
        block_sparse_tensors = BothPasses(block_sparse_tensors, block_sparse_tensors_bwd)
    return flash_attn_varlen_func(
        q, k, v, qv, gather_kv_indices=gather_kv_indices, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, learnable_sink=learnable_sink, softcap=softcap, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars, return_lse=return_lse,
    )  # fmt: skip


@public(leaves_graph=False)
def flash_attn_varlen_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attends within sequences of their own lengths, as flash_attn_func() within a batch.

    Args:
        q: (total_q, nheads, headdim), or (batch, seqlen, nheads, headdim) where cu_seqlens_q is None.
        k, v: the same of keys and values, by cu_seqlens_k; beside page_table (pages, page_size, nheads_k, dim), pages
            of any size, copied where gradients flow.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) offsets of the sequences, from 0 to the total.
        seqused_q, seqused_k: (batch,): of each sequence only so many count. Rows of out past them are 0, their
            log-sum-exps -inf.
        gather_kv_indices: (total_q, count), or (batch, seqlen, count), of keys counted in each sequence; not beside
            page_table.
        page_table: (batch, most pages): which pages hold a sequence, of seqused_k keys, by default as many as fit.
        max_seqlen_q, max_seqlen_k, min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata:
            mean nothing here.
        The others are flash_attn_func()'s.

    Returns:
        (out, lse): out shaped as q with headdim_v last; lse (nheads, total_q), or (batch, nheads, seqlen), with qv
        heads come last; or None, as of flash_attn_func().

    >>> import torch, speedlight.flash_attn
    >>> q, offsets = torch.ones(7, 8, 16), torch.tensor([0, 3, 7])
    >>> out, lse = speedlight.flash_attn.v4.flash_attn_varlen_func(
    ...     q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([7, 8, 16]), torch.Size([8, 7]))
    """
    ints = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k}
    ints["page_table"] = page_table
    q, k, qv, heads_last = _choose_factors(q, k, v, qv, ints)
    V4.refuse(score_mod_bwd=score_mod_bwd)
    with_lse = return_lse or any([x.requires_grad for x in (q, k, v, qv, learnable_sink) if isinstance(x, Tensor)])
    q, k = v3.absorb(q, k, v, qv)
    mods = Mods(score_mod, mask_mod, aux_tensors, aux_scalars)
    options = _make_options(q, softmax_scale, causal, window_size, softcap, learnable_sink, mods)
    queries, keys = Side("q", cu_seqlens_q, seqused_q), Side("k", cu_seqlens_k, seqused_k)
    if page_table is None:
        check_sides(q, k, v, queries, keys)
    elif cu_seqlens_k is not None:
        raise ArgumentError("cu_seqlens_k: expected None beside page_table, where lengths are seqused_k; got offsets.")
    else:
        seqused_k = _fill_pages(page_table, k) if seqused_k is None else seqused_k
    info = None
    if score_mod is not None or mask_mod is not None or block_sparse_tensors is not None:
        q_lens = read_lengths(queries, q)
        k_lens = read_lengths(keys, k) if page_table is None or seqused_k is None else [int(n) for n in seqused_k]
        info = SeqlenInfo(_find_starts(queries, q), _find_starts(keys, k), q_lens, k_lens)
        options |= _trace_mods(mods, info)
    if info is not None and block_sparse_tensors is not None:
        if page_table is not None:
            check_sides(q, q, q, queries, queries)
        lengths = block_sparsity.Lengths(
            heads=q.shape[-2],
            q_len=q.shape[-3],
            k_len=k.shape[-3] if page_table is None else max(_fill_pages(page_table, k).tolist(), default=0),
            q_lens=tuple(info.seqlen_q),
            k_lens=tuple(info.seqlen_k),
            is_packed=cu_seqlens_q is not None,
        )
        mask = options["mask"] if mask_mod is not None else None
        listed = block_sparsity.read_mask(block_sparse_tensors, mask, lengths, _find_place(info))
        options["mask"] = listed & options["mask"] if mask is None and "mask" in options else listed
    if gather_kv_indices is not None:
        if page_table is not None:
            raise UnsupportedError(
                "gather_kv_indices: expected None beside page_table, as flash-attn does; got a tensor. "
                "speedlight.attention_paged(indices=) has both."
            )
        options["indices"] = _read_chosen(gather_kv_indices, q, k, keys)
    if page_table is None:
        with V4.renamed:
            found = attend(q, k, v, queries, keys, options, with_lse)
        return _make_results(found, return_lse, heads_last)
    found = attend_pages(q, (k, v), page_table, seqused_k, queries, options, PAGES._replace(table="page_table"))
    return _make_results(found if with_lse else found[0], return_lse, heads_last)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Joins the attention over several sets of keys.

    Args:
        out_partial: (splits, batch, seqlen, nheads, headdim), or (splits, total_q, nheads, headdim).
        lse_partial: (splits, batch, seqlen, nheads), or (splits, total_q, nheads), natural logarithms.
        out, out_dtype: where to write the first result, or its dtype.
        cu_seqlens, virtual_batch_idx: mean nothing here. seqused: refused.
        return_lse: whether the second result is wanted.

    Returns:
        (out, lse), as out_partial and lse_partial without their first dim; lse may be None. There are no gradients.

    >>> import torch, speedlight.flash_attn
    >>> out, lse = speedlight.flash_attn.v4.flash_attn_combine(torch.ones(3, 7, 8, 16), torch.zeros(3, 7, 8))
    >>> out.shape, lse.shape
    (torch.Size([7, 8, 16]), torch.Size([7, 8]))
    """
    V4.refuse(seqused=seqused)
    found, lse = v3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return found, lse if return_lse else None


def get_scheduler_metadata(*given: Any, **options: Any) -> SchedulerMetadata:
    """Returns what flash_attn_varlen_func(scheduler_metadata=…) takes: nothing, since nothing is computed ahead here.

    >>> from speedlight.flash_attn import v4
    >>> v4.get_scheduler_metadata(max_seqlen_q=1, max_seqlen_k=64, nheads=8, nheads_kv=2, headdim=16, num_splits=1)[0]
    """
    return SchedulerMetadata()


def _choose_factors(
    q: Tensor | None, k: Tensor | None, v: Tensor, qv: Tensor | None, ints: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """Returns q, k and qv, of which there are the first two at least, and whether log-sum-exps have heads last."""
    if q is None and k is None and isinstance(qv, Tensor):
        check_tensors({"qv": qv, "v": v}, {}, ints, strict=True, hint=OTHER_ORDER)
        if qv.shape[-1:] != v.shape[-1:]:
            raise ArgumentError(f"qv: expected v's dim, {v.shape[-1]}, last; got shape {tuple(qv.shape)}.")
        return qv, v, None, True
    check_tensors({"q": q, "k": k, "v": v}, {"qv": qv}, ints, strict=qv is not None, hint=OTHER_ORDER)
    assert q is not None and k is not None
    return q, k, qv, _is_absorbed(k, v, qv)


def _read_chosen(chosen: Any, q: Tensor, k: Tensor, keys: Side) -> Tensor:
    """Returns chosen keys, -1 for numbers that no key has. Raises where a query has a key twice."""
    name, lead = "gather_kv_indices", tuple(q.shape[:-2])
    check_tensors({}, {}, {name: chosen})
    shape = tuple(getattr(chosen, "shape", ()))
    if not isinstance(chosen, Tensor) or shape[:-1] != lead:
        expected = ", ".join(map(str, (*lead, "count")))
        got = shape if isinstance(chosen, Tensor) else type(chosen).__name__
        raise ArgumentError(f"{name}: expected a tensor of shape ({expected}), by q's tokens; got {got}.")
    most = k.shape[1] if keys.offsets is None else max(read_lengths(keys, k), default=0)
    chosen = chosen.masked_fill((chosen < 0) | (chosen >= most), -1)
    check_each_once(name, chosen)
    return chosen


def _fill_pages(page_table: Any, pages: Tensor) -> Tensor:
    """Returns as many keys of every sequence as its pages hold."""
    shape = getattr(page_table, "shape", ())
    if len(shape) != 2 or pages.ndim != 4:
        raise ArgumentError(
            f"page_table: expected shape (batch, most pages), and k of pages (pages, page_size, nheads_k, headdim); "
            f"got {tuple(shape)}, and k of shape {tuple(pages.shape)}."
        )
    return torch.full(shape[:1], shape[1] * pages.shape[1])


def _is_absorbed(k: Tensor, v: Tensor, qv: Tensor | None) -> bool:
    """Returns whether flash-attn 4 takes this for MLA, whose log-sum-exps have heads last."""
    shared = k is v and v.shape[-1] == _MLA_DIM
    if shared and qv is not None:
        raise UnsupportedError(
            f"qv: expected None where k is v, of {_MLA_DIM} elements; got a tensor. flash-attn would not look at q: "
            "give qv as q, or k.clone()."
        )
    return shared or qv is not None


def _make_options(
    q: Tensor, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, sink: Any, mods: Mods
) -> dict[str, Any]:
    """Returns attention()'s options, without the functions."""
    left, right = _read_limits(window_size, causal)
    if mods.mask is not None and (left, right) != (None, None):
        raise ArgumentError(
            "mask_mod: expected causal=False and window_size=(None, None) beside it, which flash-attn would not look "
            "at; got more. Say it in mask_mod."
        )
    if mods.score is not None and softcap:
        raise ArgumentError("softcap: expected 0.0 beside score_mod; got both. Say it in score_mod.")
    is_apart = min(left or 0, right or 0) < 0
    only_causal = left is None and causal is True
    options = options_of(q, softmax_scale, causal, (-1, -1) if is_apart or only_causal else (left, right), softcap)
    if is_apart:
        options["mask"] = _make_window(left, right)
    if sink is not None:
        heads = q.shape[-2]
        if not isinstance(sink, Tensor) or sink.shape != (heads,):
            got = tuple(sink.shape) if isinstance(sink, Tensor) else type(sink).__name__
            raise ArgumentError(f"learnable_sink: expected a tensor of shape ({heads},), by q's heads; got {got}.")
        options["sink_logits"] = sink
    return options


def _read_limits(window_size: Any, causal: Any) -> tuple[int | None, int | None]:
    """Returns left and right, None for no limit; causal takes the right side's place."""
    left, right = read_sides(window_size)
    right = 0 if causal is True else right
    if left is not None and right is not None and left + right < 0:
        return None, 0 if causal is True else None
    return left, right


@functools.lru_cache(64)
def _make_window(left: int | None, right: int | None) -> Expression:
    """Returns a window that is beside the query's own place."""
    if left is None:
        return expression(lambda b, h, i, j: j <= i + right, "mask")
    if right is None:
        return expression(lambda b, h, i, j: j >= i - left, "mask")
    return expression(lambda b, h, i, j: (j >= i - left) & (j <= i + right), "mask")


def _find_starts(side: Side, x: Tensor) -> list[int]:
    """Returns where sequences begin in a packed tensor; 0 in a padded one."""
    return [0] if side.offsets is None else pack(side._replace(used=None), x).offsets[:-1]


def _look_up(name: str, x: Sequence[int]) -> Callable[[Any], Any]:
    """Returns a function of b: a table's entry, or a number where all sequences have the same."""
    if len(set(x)) < 2:
        return lambda b: x[0] if x else 0
    of = Table(np.array(x, np.int64), name)
    return lambda b: of[b]


def _find_first(info: SeqlenInfo) -> Callable[[Any], Any]:
    """Returns a function of b: the position of a sequence's first query, the last being at the last key."""
    return _look_up("q_start", [b - a for a, b in zip(info.seqlen_q, info.seqlen_k, strict=True)])


def _find_place(info: SeqlenInfo) -> Node:
    """Returns the place of a query in its sequence, counted from 0."""
    b, i = (Symbol(Node("symbol", "int", value=name)) for name in "bi")
    return node_of(i - _find_first(info)(b))


def _trace_mods(mods: Mods, info: SeqlenInfo) -> dict[str, Expression]:
    """Returns score and mask of functions whose queries count from 0; info: of every sequence."""
    known = [_look_up(name, x) for name, x in info._asdict().items()]
    first = _find_first(info)
    if not isinstance(mods.tensors, (list, tuple, type(None))):
        raise ArgumentTypeError(f"aux_tensors: expected a list of tensors; got {type(mods.tensors).__name__}.")
    looked = [table(t, f"aux_tensors[{n}]") for n, t in enumerate(mods.tensors or ())]

    def more(b: Any) -> tuple[Any, ...]:
        given = (SeqlenInfo(*[of(b) for of in known]), looked)
        return given if mods.scalars is None else (*given, tuple(mods.scalars))

    found, score_mod, mask_mod = {}, mods.score, mods.mask
    if score_mod is not None:
        call = _check_mod("score_mod", score_mod, mods.scalars is not None)
        found["score"] = expression(lambda s, b, h, i, j: call(s, b, h, i - first(b), j, *more(b)), "score")
    if mask_mod is not None:
        see = _check_mod("mask_mod", mask_mod, mods.scalars is not None)
        found["mask"] = expression(lambda b, h, i, j: see(b, h, i - first(b), j, *more(b)), "mask")
    return found


def _check_mod(name: str, mod: Any, with_scalars: bool) -> Callable[..., Any]:
    """Returns a function that raises if it returns nothing. Raises unless it takes what it will be given."""
    names = ["b", "h", "q_idx", "kv_idx", "seqlen_info", "aux_tensors"] + ["aux_scalars"] * with_scalars
    names = ["score"] * (name == "score_mod") + names
    expected = f"{name}: expected a function ({', '.join(names)})"
    if not callable(mod):
        raise ArgumentTypeError(f"{expected}; got {shown(mod)}.")
    try:
        inspect.signature(mod).bind(*names)
    except TypeError as error:
        scalars = "" if with_scalars else ", and aux_scalars where they are given"
        raise ArgumentTypeError(f"{expected}{scalars}; got another one: {error}.") from None
    except ValueError:  # Python cannot say what it takes
        pass

    def call(*given: Any) -> Any:
        result = mod(*given)
        check_returned(name, mod, result)
        return result

    return call


def _make_results(found: Any, return_lse: bool, heads_last: bool) -> tuple[Tensor, Tensor | None]:
    """Returns (out, lse); gradients flow through log-sum-exps that were asked for."""
    if not isinstance(found, tuple):
        return found, None
    out, lse = found
    lse = lse if return_lse else lse.detach()
    return out, lse.transpose(-1, -2) if heads_last else lse
