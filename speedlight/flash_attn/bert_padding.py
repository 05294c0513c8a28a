"""Packing of padded batches, and its inverse, as flash_attn.bert_padding has them. Gradients flow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ArgumentError
from .options import check_tensors


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Returns rows of the first axis.

    >>> import torch
    >>> from speedlight.flash_attn.bert_padding import index_first_axis
    >>> index_first_axis(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])).tolist()
    [[3.0], [1.0]]
    """
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns zeros with `values` in the rows of `indices`.

    >>> import torch
    >>> from speedlight.flash_attn.bert_padding import index_put_first_axis
    >>> index_put_first_axis(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 0]), 3).tolist()
    [[2.0], [0.0], [1.0]]
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    """Packs the tokens of a padded batch (batch, seqlen, …) where attention_mask, or unused_mask, is 1.

    Returns:
        (tokens (total, …), indices of them in the flattened batch, offsets (batch + 1,) in int32, the longest length,
        lengths by attention_mask alone (batch,) in int32).

    >>> import torch
    >>> from speedlight.flash_attn.bert_padding import unpad_input
    >>> x, indices, offsets, longest, used = unpad_input(torch.ones(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]]))
    >>> x.shape, indices.tolist(), offsets.tolist(), longest, used.tolist()
    (torch.Size([3, 4]), [0, 1, 3], [0, 2, 3], 2, [2, 1])
    """
    masks = {"hidden_states": hidden_states, "attention_mask": attention_mask}
    check_tensors(masks, {"unused_mask": unused_mask}, {}, strict=True)
    if attention_mask.shape != hidden_states.shape[:2]:
        raise ArgumentError(
            f"attention_mask: expected shape {tuple(hidden_states.shape[:2])}, as hidden_states begins; got "
            f"{tuple(attention_mask.shape)}."
        )
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    offsets, longest = _offsets(taken.sum(-1, dtype=torch.int32))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, longest, used


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor) -> Any:
    """Packs the tokens of rows that hold several sequences each: (batch, seqlen) lengths, 0 where there is none.

    Returns:
        (tokens (total, …), indices, offsets (sequences + 1,) in int32, the longest length).

    >>> import torch
    >>> from speedlight.flash_attn.bert_padding import unpad_input_for_concatenated_sequences as unpad
    >>> x, indices, offsets, longest = unpad(torch.ones(2, 4, 8), torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]]))
    >>> x.shape, indices.tolist(), offsets.tolist(), longest
    (torch.Size([6, 8]), [0, 1, 2, 4, 5, 6], [0, 2, 3, 6], 3)
    """
    each = attention_mask_in_length
    places = torch.arange(each.shape[-1], device=each.device)
    indices = (places < each.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    lengths = each.flatten()
    offsets, longest = _offsets(lengths[lengths > 0])
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts packed tokens (total, …) back in their places, (batch, seqlen, …), among zeros.

    >>> import torch
    >>> from speedlight.flash_attn.bert_padding import pad_input
    >>> pad_input(torch.ones(3, 4), torch.tensor([0, 1, 3]), 2, 3)[:, :, 0].tolist()
    [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _offsets(lengths: Tensor) -> tuple[Tensor, int]:
    """Returns lengths cumulated, from 0 on, and the longest."""
    summed = lengths.cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(summed, (1, 0)), int(lengths.max()) if lengths.numel() else 0
