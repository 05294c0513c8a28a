"""speedlight: fast exact attention for CPUs, with any mask, gradients and KV caches.

>>> import numpy as np, speedlight as sl
>>> q = k = v = np.ones((1, 8, 16, 64), dtype=np.float32)
>>> sl.attention(q, k, v).shape
(1, 8, 16, 64)

In order of use; help(speedlight.attention) has every option:

    attention            softmax(scale · QKᵀ)V of NumPy's arrays, PyTorch's tensors …, with any mask and score
    plan                 what a call would do: FLOPs, bytes, tiles, least time; computes no attention
    Plan                 … as figures, and as a table when printed
    view                 a picture of a mask's tiles, or of attention weights, by matplotlib
    rotary               rotary positions of queries and keys
    merge                attention over shards of the keys, joined
    merge_states         merge() in FlashInfer's order of arguments
    attention_backward   gradients, without PyTorch
    key_weights          how much each key weighs over queries, without the matrix of weights

  masks and scores: a function of positions, a pattern, or an array
    causal, window, prefix, documents, padding, dilated, blocks                 masks; join them with & | ~
    alibi, softcap, relative_bias                               scores; several in a list
    table                an array for functions to look up
    where, cast, minimum, maximum, abs, floor, sqrt, exp, exp2, log, log2       in functions
    tanh, sigmoid, erf, sin, cos, tan, log1p, expm1             in functions
    expression           traces a function once, and shows what it is
    Symbol, MaskFunction, ScoreFunction, Expression, Table, AttentionOptions                  types

  decoding
    KVCache              keys and values of a batch of sequences: append, attend, save
    PagePool             keys and values in pages, for many sequences that come and go
    PagedSequence        a sequence of a PagePool
    attention_paged      attention() over another engine's pages
    append_paged         writes new keys and values into such pages

  the machine
    set_threads, get_threads, synchronize
    ARITHMETIC           the number of the order of floating-point operations
    reference            the specification in float64, and an error bound for every element

  errors: each is an Error, and the built-in type that one would expect
    Error, ArgumentError, ArgumentTypeError, UnsupportedError, ExpressionError, CacheFull, CacheBusy,
    ReservationError, FileError, CompileError, CommunicationError

Imported by name: speedlight.torch, speedlight.distributed, speedlight.transformers, speedlight.flash_attn,
speedlight.flash_mla, speedlight.jax, speedlight.onnx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .host.lazy import importer

if TYPE_CHECKING:
    from . import reference
    from .calls.append_paged import append_paged
    from .calls.backward import attention_backward
    from .calls.key_weights import key_weights
    from .calls.merge import merge, merge_states
    from .calls.paged import attention_paged
    from .calls.pictures import view
    from .calls.plan import plan
    from .calls.rotary import rotary
    from .cpu.runtime.workers import get_threads, set_threads
    from .engines import synchronize
    from .errors import (
        ArgumentError,
        ArgumentTypeError,
        CacheBusy,
        CacheFull,
        CommunicationError,
        CompileError,
        Error,
        ExpressionError,
        FileError,
        ReservationError,
        UnsupportedError,
    )
    from .expressions.functions import abs as abs
    from .expressions.functions import (
        cos,
        erf,
        exp,
        exp2,
        expm1,
        floor,
        log,
        log1p,
        log2,
        maximum,
        minimum,
        sigmoid,
        sin,
        sqrt,
        tan,
        tanh,
    )
    from .expressions.patterns import (
        alibi,
        blocks,
        causal,
        dilated,
        documents,
        padding,
        prefix,
        relative_bias,
        softcap,
        window,
    )
    from .expressions.symbols import Symbol, cast, where
    from .expressions.tables import Table, table
    from .expressions.tracing import Expression, MaskFunction, ScoreFunction, expression
    from .front import attention
    from .kv.cache import KVCache
    from .kv.pool import PagePool
    from .kv.sequence import PagedSequence
    from .problem.options import AttentionOptions
    from .problem.plan import Plan

__version__ = "0.1.0a1"
ARITHMETIC = 3  # the canonical order of operations; docs/numerics.md

_NAMES = {
    "calls.append_paged": "append_paged",
    "front": "attention",
    "calls.backward": "attention_backward",
    "calls.key_weights": "key_weights",
    "calls.paged": "attention_paged",
    "calls.merge": "merge merge_states",
    "calls.plan": "plan",
    "calls.rotary": "rotary",
    "engines": "synchronize",
    "problem.plan": "Plan",
    "calls.pictures": "view",
    "kv.cache": "KVCache",
    "kv.pool": "PagePool",
    "kv.sequence": "PagedSequence",
    "errors": (
        "CacheBusy CacheFull CommunicationError Error ArgumentError ArgumentTypeError UnsupportedError "
        "CompileError FileError ReservationError ExpressionError"
    ),
    "cpu.runtime.workers": "set_threads get_threads",
    "problem.options": "AttentionOptions",
    "expressions.tracing": "Expression MaskFunction ScoreFunction expression",
    "expressions.symbols": "Symbol cast where",
    "expressions.tables": "Table table",
    "expressions.functions": (
        "abs cos erf exp exp2 expm1 floor log log1p log2 maximum minimum sigmoid sin sqrt tan tanh"
    ),
    "expressions.patterns": "alibi blocks causal dilated documents padding prefix relative_bias softcap window",
}  # of each module

# of `import *`, which leaves the built-in abs alone
__all__ = [
    "ARITHMETIC",
    "ArgumentError",
    "ArgumentTypeError",
    "AttentionOptions",
    "CacheBusy",
    "CacheFull",
    "CommunicationError",
    "CompileError",
    "Error",
    "Expression",
    "ExpressionError",
    "FileError",
    "KVCache",
    "MaskFunction",
    "PagePool",
    "PagedSequence",
    "Plan",
    "ReservationError",
    "ScoreFunction",
    "Symbol",
    "Table",
    "UnsupportedError",
    "__version__",
    "alibi",
    "append_paged",
    "attention",
    "attention_backward",
    "attention_paged",
    "blocks",
    "cast",
    "causal",
    "cos",
    "dilated",
    "documents",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "expression",
    "floor",
    "get_threads",
    "key_weights",
    "log",
    "log1p",
    "log2",
    "maximum",
    "merge",
    "merge_states",
    "minimum",
    "padding",
    "plan",
    "prefix",
    "reference",
    "relative_bias",
    "rotary",
    "set_threads",
    "sigmoid",
    "sin",
    "softcap",
    "sqrt",
    "synchronize",
    "table",
    "tan",
    "tanh",
    "view",
    "where",
    "window",
]


if not TYPE_CHECKING:  # to a type checker a name that is not above is none
    __getattr__ = importer(globals(), _NAMES, ("reference",))


def __dir__() -> list[str]:
    return ["abs", *__all__]
