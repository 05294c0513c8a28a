"""The tables of dtypes and of codes of caches: our names, sizes and others' names; NumPy's dtypes of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentTypeError, join_words
from ..host.forks import importing

# our name, bytes; names as NumPy, ml_dtypes, PyTorch and the command line spell them
DTYPES = {"float32": ("f32", 4), "float64": ("f64", 8), "float16": ("f16", 2), "bfloat16": ("bf16", 2)}
STORAGE_BYTES = dict(DTYPES.values())
# other libraries' names, for which errors say ours
THEIR_DTYPES = {
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
}


LATENT_BLOCK = 128  # codes of a latent that share a scale


class CodeFormat(NamedTuple):
    """A format of caches that keep codes, with scales for each token and head.

    A code whose binary exponent (frexp's) is e is a multiple of 2^(max(e, least) - digits).
    """

    article: str  # of its name
    bits: int  # of a code
    largest: int  # code: that of a row's largest magnitude
    digits: int  # of a code of the least exponent or more
    least: int
    library: str  # whose dtype it is
    safetensors: str | None  # its name in files; None: codes of parts of bytes, which are packed there
    on_gpu: str | None  # dtype of tensors there, by which kernels tell formats: no two have the same; None: not there
    spellings: tuple[str, ...] = ()  # as people type it
    elsewhere: tuple[str, ...] = ()  # other libraries' names, for which errors say ours
    block: int = 0  # elements of a row that share a scale; 0: all
    scale: str = "float32"  # dtype of scales

    @property
    def is_packed(self) -> bool:
        """Returns whether two codes share a byte: these are -8 to 7, by the rule of ggml's q4_0."""
        return self.bits == 4

    @property
    def scale_bytes(self) -> int:
        """Returns the bytes of a scale."""
        return DTYPES[self.scale][1]

    @property
    def error(self) -> float:
        """Bounds how far code · scale is from its number, over the largest magnitude of those that share the scale.

        Not where a scale of float16 is subnormal, or exceeds its largest number.
        """
        if self.is_packed:  # a number as large as the largest, of the other sign, is 7 of its 8 scales
            return (1 + 7 * 2.0**-11) / self.largest
        return 2.0 ** (math.frexp(self.largest)[1] - self.digits - 1) / self.largest


CODES = {
    "int8": CodeFormat(
        "an", bits=8, largest=127, digits=7, least=7, library="numpy", safetensors="I8", on_gpu="int8",
        elsewhere=("i8", "q8", "q8_0", "u8", "uint8", "int8_per_token_head"),
    ),
    "float8_e4m3fn": CodeFormat(
        "a", bits=8, largest=448, digits=4, least=-5, library="ml_dtypes", safetensors="F8_E4M3", on_gpu="uint8",
        spellings=("fp8", "fp8_e4m3", "float8_e4m3"),
        elsewhere=("float8", "e4m3", "fp8_e4m3fn", "f8_e4m3", "fp8_per_token_head"),
    ),
    "int4": CodeFormat(
        "an", bits=4, largest=8, digits=4, least=4, library="ml_dtypes", safetensors=None, on_gpu=None,
        spellings=("q4_0",), block=32, scale="float16",
        elsewhere=("i4", "u4", "q4", "q4_1", "iq4_nl", "nf4", "fp4", "mxfp4", "uint4", "int4_per_token_head"),
    ),
}  # fmt: skip
# codes in the caller's pages: those of a whole byte, and one that no cache keeps, since int8 and e4m3fn are nearer
PAGE_CODES = {name: row for name, row in CODES.items() if row.bits == 8} | {
    "float8_e5m2": CodeFormat(
        "a", bits=8, largest=57344, digits=3, least=-13, library="ml_dtypes", safetensors="F8_E5M2", on_gpu=None,
    ),
}  # fmt: skip
ALL_CODES = CODES | PAGE_CODES
ELEMENT_BYTES = {name: size for name, (_, size) in DTYPES.items()} | dict.fromkeys(PAGE_CODES, 1)  # of arrays
SPELLINGS = {x: name for name, row in CODES.items() for x in row.spellings}
SHORTEST = {name: min((name, *row.spellings), key=len) for name, row in CODES.items()}  # to type
ON_GPU = {name: row.on_gpu for name, row in CODES.items() if row.on_gpu}


def scale_columns(codes: str | None, *, latent: bool) -> int:
    """Counts the columns of codes that share a scale; 0: all of a row, or there are no codes."""
    if codes is None:
        return 0
    return LATENT_BLOCK if latent else ALL_CODES[codes].block


def scales_of(codes: str | None, *, latent: bool) -> str:
    """Says what shares a scale of codes: "rows", "blocks" of columns, or those of "latents"; "" without codes."""
    if codes is None:
        return ""
    if latent:
        return "latents"
    return "blocks" if scale_columns(codes, latent=False) else "rows"


def signed_nibbles(bits: np.ndarray) -> np.ndarray:
    """Returns numbers of four bits, in uint8, as int8 from -8 to 7."""
    return (bits ^ 8).view(np.int8) - np.int8(8)


def numpy_dtype(name: str) -> np.dtype:
    """Returns the NumPy dtype of a name; bfloat16's and some codes' are ml_dtypes'."""
    if name == "bfloat16" or (name in ALL_CODES and ALL_CODES[name].library == "ml_dtypes"):
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
    return f"{CODES[dtype].article} {dtype} cache"


def check_dtype(name: str, dtype: str, *, codes: bool = False) -> str:
    """Returns an array's dtype; raises for one that no call takes. `codes`: it may be of codes, too."""
    if dtype not in DTYPES and codes:
        if dtype not in PAGE_CODES:
            bits = "float8_e4m3fn"
            way = f" Bits of float8 are {name}.view(ml_dtypes.{bits}), of a tensor {name}.view(torch.{bits})."
            raise ArgumentTypeError(
                f"{name}: expected float32, float64, float16 or bfloat16, or codes of {join_words(PAGE_CODES)}; got "
                f"{dtype}.{way if dtype == 'uint8' else ''}"
            )
    elif dtype not in DTYPES:
        scales = ""
        if dtype in PAGE_CODES:
            keeps = f"KVCache(dtype={dtype!r}) and PagePool keep both, " if dtype in CODES else ""
            scales = f" Codes alone have no scales: {keeps}attention_paged(k_scales=, v_scales=) takes pages of them."
        raise ArgumentTypeError(
            f"{name}: expected dtype float32, float64, float16 or bfloat16; got {dtype}. Convert it first.{scales}"
        )
    return dtype
