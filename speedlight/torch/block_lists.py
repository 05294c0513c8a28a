"""Lists of the blocks that each row of blocks sees, as PyTorch's and flash-attn's kernels take them."""

from __future__ import annotations

import numpy as np
import torch

from .. import UnsupportedError
from ..arrays.torch_tensors import is_traced
from ..host.insides import TORCH


def read_entries(x: torch.Tensor, name: str) -> np.ndarray:
    """Returns a table's entries as they are now; also where a graph is being made, of which they are no part."""
    if is_traced(x):
        raise UnsupportedError(
            f"{name}: expected tables whose numbers lie in memory; got those of a graph. Make them outside of what is "
            "exported."
        )
    with TORCH.disable_current_modes():
        return x.detach().cpu().numpy()


def make_dense(counts: np.ndarray, indices: np.ndarray, columns: int) -> np.ndarray:
    """Returns lists of blocks as bools, of 4 dimensions; blocks past the last key are none."""
    within = np.arange(indices.shape[-1]) < counts[..., None]
    dense = np.zeros((*indices.shape[:-1], columns + 1), bool)
    wanted = within & (indices >= 0) & (indices < columns)
    np.put_along_axis(dense, np.where(wanted, indices, columns).astype(np.int64), True, axis=-1)
    return dense[(None,) * (4 - dense.ndim)][..., :columns]
