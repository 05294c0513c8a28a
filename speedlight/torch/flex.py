"""FlexAttention's calls: PyTorch's score_mod, mask_mod and BlockMask, on our engine, with gradients on the CPU."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch.nn.attention import flex_attention as flex

from .. import (
    ArgumentError,
    ArgumentTypeError,
    Error,
    Expression,
    MaskFunction,
    ScoreFunction,
    UnsupportedError,
    expression,
)
from ..adapting import Renamed, check_flag, pass_on, shown
from ..errors.advice import of_no_tensor
from ..expressions.tracing import expression_of
from ..expressions.tree import Node
from ..problem.signatures import public
from .attending import attention
from .blocks import make_block_mask, read_mask

# options of PyTorch's kernels, which change no result
_TUNING = {"num_warps", "num_stages", "kpack", "matrix_instr_nonkdim", "waves_per_eu"} | {
    x for x in flex.FlexKernelOptions.__annotations__ if x.isupper()
}
_NAMES = Renamed({"q": "query", "k": "key", "v": "value"})
_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")


@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: ScoreFunction | None = None,
    block_mask: flex.BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: Literal[False] = False, kernel_options: dict[str, Any] | None = None, *, return_aux: None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: ScoreFunction | None = None,
    block_mask: flex.BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    *, return_lse: Literal[True], kernel_options: dict[str, Any] | None = None, return_aux: None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: ScoreFunction | None = None,
    block_mask: flex.BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: dict[str, Any] | None = None, *, return_aux: flex.AuxRequest,
) -> tuple[torch.Tensor, flex.AuxOutput]: ...  # fmt: skip
@public()
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: flex.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: flex.AuxRequest | None = None,
) -> Any:
    """Attends as torch.nn.attention.flex_attention.flex_attention does, by its signature.

    Gradients flow to query, key and value, and to float tensors that score_mod looks up, on the CPU too. Nothing is
    compiled by PyTorch, and no matrix of scores is made.

    Args:
        query: (batch, q_heads, q_len, head_dim).
        key: (batch or 1, kv_heads, k_len, head_dim).
        value: (batch or 1, kv_heads, k_len, value_dim).
        score_mod: a function (score, b, h, q_idx, kv_idx) -> score. It is called once, with symbols: PyTorch's
            functions and methods of numbers work on them, and tensors that it captures are looked up by them.
        block_mask: PyTorch's BlockMask, or ours (the same class). A key is seen if its block is listed and mask_mod
            shows it, or if its block is listed as full. PyTorch's kernels do so; its function without torch.compile
            looks at mask_mod alone.
        scale: factor of the scores. Default 1/sqrt(head_dim).
        enable_gqa: whether key and value may have fewer heads: query head h reads head h // (q_heads // kv_heads).
        return_lse: also return the log-sum-exps, natural logarithm, -inf for a query that sees nothing.
        kernel_options: PyTorch's; they change no result, and are only checked.
        return_aux: AuxRequest(lse=True) asks for them in an AuxOutput.

    Returns:
        The output, (batch, q_heads, q_len, value_dim); with return_lse (output, lse), with return_aux (output,
        AuxOutput). Queries that see nothing get 0.

    Raises:
        speedlight.Error: the argument, what was expected and what came; of a function that cannot be traced, the line
            and the expression.

    >>> import torch, speedlight.torch
    >>> q = k = v = torch.ones(1, 2, 8, 4)
    >>> mask = speedlight.torch.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 8, 8, "cpu")
    >>> speedlight.torch.flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s / 20) * 20, mask).shape
    torch.Size([1, 2, 8, 4])
    """
    _check_options(kernel_options)
    _check_aux(return_lse, return_aux)
    if block_mask is not None and not isinstance(block_mask, flex.BlockMask):
        way = " Use create_block_mask(function, B, H, Q_LEN, KV_LEN)." if callable(block_mask) else ""
        if isinstance(block_mask, torch.Tensor):
            way = " Of a tensor it is create_block_mask(lambda b, h, i, j: tensor[i, j], B, H, Q_LEN, KV_LEN)."
        raise ArgumentTypeError(f"block_mask: expected a BlockMask or None; got {shown(block_mask)}.{way}")
    batch, q_heads, q_len, k_len = _check_tensors(query, key, value, enable_gqa, block_mask)
    mask = None if block_mask is None else read_mask(block_mask, (batch, q_heads, q_len, k_len))
    score = None if score_mod is None else _trace("score_mod", score_mod, "score")
    if key.shape[0] != batch:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    causal, mask = (False, None) if mask is None else _split_causal(mask)
    options: dict[str, Any] = {"causal": causal, "mask": mask, "score": score, "q_start": 0, "scale": scale}
    with _NAMES:
        found = attention(query, key, value, return_lse=wants_lse, **options)
    if return_aux is None:
        return found
    out, lse = found if wants_lse else (found, None)
    return out, flex.AuxOutput(lse=lse)


def _split_causal(mask: Expression) -> tuple[bool, Expression | None]:
    """Returns whether a mask says kv_idx <= q_idx, and what else it says: causal of the kernels' own costs a tenth
    less.
    """
    others, left, causal = None, [mask.root], False
    while left:
        term = left.pop()
        names = tuple(x.value if x.op == "symbol" else None for x in term.args)
        if term.op == "and" and term.kind == "bool":
            left += term.args[::-1]
        elif (term.op, names) in (("ge", ("i", "j")), ("le", ("j", "i"))):
            causal = True
        else:
            others = term if others is None else Node("and", "bool", (others, term))
    if not causal:
        return False, mask
    return True, None if others is None else expression_of("mask", others)


def _trace(name: str, function: Any, role: str) -> Expression:
    """Traces a function; errors say what PyTorch calls it."""
    try:
        return expression(function, role)
    except Error as error:
        if str(error).startswith(f"{role}: "):
            error.args = (name + str(error).removeprefix(role),)
        raise


def _check_options(options: Any) -> None:
    """Raises unless these are PyTorch's kernel options, of which none changes a result."""
    if options is not None and not isinstance(options, dict):
        raise ArgumentTypeError(f"kernel_options: expected a dict or None; got {shown(options)}.")
    for name in options or ():
        if not isinstance(name, str) or name.removeprefix("fwd_").removeprefix("bwd_") not in _TUNING:
            raise ArgumentError(
                f"kernel_options: expected names of FlexKernelOptions; got {shown(name)}. Leave it out."
            )
    backend = (options or {}).get("BACKEND", "AUTO")
    if backend not in _BACKENDS:
        raise ArgumentError(f"kernel_options: expected a BACKEND of {_BACKENDS}; got {shown(backend)}.")
    if "BACKEND" in (options or {}) and (options or {}).get("FORCE_USE_FLEX_ATTENTION"):
        raise ArgumentError("kernel_options: expected BACKEND or FORCE_USE_FLEX_ATTENTION; got both.")


def _check_aux(return_lse: Any, aux: Any) -> None:
    if aux is not None and not isinstance(aux, flex.AuxRequest):
        raise ArgumentTypeError(f"return_aux: expected an AuxRequest or None; got {shown(aux)}.")
    if return_lse and aux is not None:
        raise ArgumentError("return_lse: expected False beside return_aux. Use return_aux=AuxRequest(lse=True).")
    if aux is not None and aux.max_scores:
        raise UnsupportedError(
            "return_aux: expected max_scores=False; the largest score of a row is not kept, as PyTorch does not on the "
            "CPU. Use the log-sum-exps."
        )


def _check_tensors(query: Any, key: Any, value: Any, enable_gqa: Any, block_mask: Any) -> tuple[int, int, int, int]:
    """Returns batch, q_heads, q_len and k_len. Raises for what attention() would take and PyTorch does not."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError(f"{name}: expected a tensor; got {type(x).__name__}.{of_no_tensor(x)}")
        if x.is_nested or x.ndim != 4:
            got = "a nested one" if x.is_nested else f"shape {tuple(x.shape)}"
            way = f" Of one item it is {name}[None]." if not x.is_nested and x.ndim == 3 else ""
            raise UnsupportedError(f"{name}: expected a plain tensor of 4 dimensions; got {got}.{way}")
    batch, q_heads, q_len, _ = query.shape
    kv_batch, kv_heads, k_len, _ = key.shape
    if q_heads != kv_heads and not enable_gqa:
        raise ArgumentError(f"key: expected {q_heads} heads, as query has; got {kv_heads}. Give enable_gqa=True.")
    if kv_batch != batch and (kv_batch != 1 or block_mask is None or block_mask.kv_num_blocks.shape[0] != batch):
        raise ArgumentError(
            f"key: expected batch {batch}, as query has, or 1 beside a block_mask of batch {batch}; got {kv_batch}."
        )
    return batch, q_heads, q_len, k_len


def _read_device(device: Any) -> Any:
    """Returns where block tables lie."""
    if device is None:
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        return torch.device(device)
    except Exception as error:  # whatever PyTorch says of what is none
        pass_on(error)
        raise ArgumentError(
            f"device: expected a device of PyTorch's, as 'cpu' or 'cuda:0', or None; got {shown(device)}."
        ) from None


@public()
def create_block_mask(
    mask_mod: MaskFunction,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> flex.BlockMask:
    """Makes a block mask as torch.nn.attention.flex_attention.create_block_mask does, without a Q_LEN x KV_LEN tensor.

    What a block shows is told from the ends of its positions; only a block of which they do not tell is looked at
    entry by entry.

    Args:
        mask_mod: a function (b, h, q_idx, kv_idx) -> bool, True where a key is seen.
        B, H: batch and query heads that the mask tells apart; None: it does not.
        Q_LEN, KV_LEN: numbers of queries and keys.
        device: where the block tables lie. Default the accelerator, if there is one, else the CPU.
        BLOCK_SIZE: positions of a block, or of queries and of keys.
        _compile: means nothing here.
        separate_full_blocks: whether blocks in which every key is seen are listed apart.
        compute_dq_write_order, dq_kv_order: what kernels on a GPU want beside it; PyTorch makes it.

    Returns:
        PyTorch's BlockMask, equal to the one that PyTorch makes.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    >>> import speedlight.torch
    >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    >>> mask = speedlight.torch.create_block_mask(causal, None, None, 1 << 15, 1 << 15, "cpu")
    >>> mask.full_kv_num_blocks.sum().item()
    32640
    """
    pair = BLOCK_SIZE if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)
    if len(pair) != 2:
        raise ArgumentError(
            f"BLOCK_SIZE: expected an int from 1, or two, of queries and keys; got {shown(BLOCK_SIZE)}."
        )
    block = pair[0], pair[1]
    for name, x in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN), *(("BLOCK_SIZE", x) for x in block)):
        if not (x is None and name in "BH") and (not isinstance(x, int) or isinstance(x, bool) or x < 1):
            raise ArgumentError(f"{name}: expected an int from 1; got {shown(x)}.")
    for name, x in (
        ("separate_full_blocks", separate_full_blocks),
        ("compute_dq_write_order", compute_dq_write_order),
        ("dq_kv_order", dq_kv_order),
    ):
        check_flag(name, x)
    function = _trace("mask_mod", mask_mod, "mask")
    at = _read_device(device)
    mask = make_block_mask(mask_mod, function, (B or 1, H or 1, Q_LEN, KV_LEN), block, at, separate_full_blocks)
    if compute_dq_write_order:
        order = flex._compute_dq_write_order_from_block_mask(mask, dq_kv_order=dq_kv_order)
        mask.dq_write_order, mask.dq_write_order_full = order
        mask.dq_kv_order_spt = dq_kv_order
    return mask
