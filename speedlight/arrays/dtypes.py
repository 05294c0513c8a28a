"""The one table of dtypes: our names, bytes, and codes of caches; NumPy's dtypes of them."""

from __future__ import annotations

import numpy as np

from ..errors import ArgumentTypeError
from ..host.forks import importing

# our name, bytes; names as NumPy, ml_dtypes, PyTorch and the command line spell them
DTYPES = {"float32": ("f32", 4), "float64": ("f64", 8), "float16": ("f16", 2), "bfloat16": ("bf16", 2)}
STORAGE_BYTES = dict(DTYPES.values())

# of caches that keep codes, with a scale for each token and head: the largest code
CODES = {"int8": 127, "float8_e4m3fn": 448}


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name; bfloat16 and float8_e4m3fn are ml_dtypes'."""
    if name in ("bfloat16", "float8_e4m3fn"):
        with importing:
            import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def conversion(name: str, dtype: str) -> str:
    """Returns code that converts an array, or a tensor, for a message."""
    of_numpy = f"ml_dtypes.{dtype}" if dtype == "bfloat16" else repr(dtype)
    return f"{name}.astype({of_numpy}), of a tensor {name}.to(torch.{dtype})"


def code_cache(dtype: str) -> str:
    """Returns the name of a cache of codes, with its article, for a message."""
    return f"{'an' if dtype == 'int8' else 'a'} {dtype} cache"


def check_dtype(name: str, dtype: str) -> str:
    if dtype not in DTYPES:
        known = dtype in CODES
        scales = f" Codes alone have no scales: KVCache(dtype={dtype!r}) and PagePool keep both." if known else ""
        raise ArgumentTypeError(
            f"{name}: expected dtype float32, float64, float16 or bfloat16; got {dtype}. Convert it first.{scales}"
        )
    return dtype
