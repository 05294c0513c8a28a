"""speedlight: exact attention at the speed of the machine.

>>> import numpy as np, speedlight as sl
>>> q = k = v = np.ones((1, 8, 16, 64), dtype=np.float32)
>>> sl.attention(q, k, v).shape
(1, 8, 16, 64)

In order of use; help(speedlight.attention) has every option:

    attention            softmax(scale · QKᵀ)V of NumPy's arrays, PyTorch's tensors …, with any mask and score
    plan                 what a call would do: FLOPs, bytes, tiles, least time; computes no attention
    Plan                 … as figures, and as a table when printed
    rotary               rotary positions of queries and keys
    merge                attention over shards of the keys, joined
    merge_states         … in FlashInfer's order
    attention_backward   gradients, without PyTorch

  masks and scores: a function of positions, a pattern, or an array
    causal, window, prefix, documents, padding, dilated         masks; join them with & | ~
    alibi, softcap, relative_bias                               scores; several in a list
    table                an array for functions to look up
    where, cast, minimum, maximum, abs, floor, sqrt, exp, exp2, log, log2       in functions
    tanh, sigmoid, erf, sin, cos, tan                           in functions
    expression           traces a function once, and shows what it is
    Symbol, MaskFunction, ScoreFunction, Expression, Table, AttentionOptions                  types

  decoding
    KVCache              keys and values of a batch of sequences: append, attend, save
    PagePool             the same in pages, for many sequences that come and go
    PagedSequence        … one of them
    attention_paged      attention() over another engine's pages
    append_paged         new keys and values into them

  the machine
    set_threads, get_threads, synchronize
    ARITHMETIC           which order of floating-point operations these bits are of
    reference            the specification in float64, and an error bound for every element

  errors: each is an Error, and the built-in type that one would expect
    Error, ArgumentError, ArgumentTypeError, UnsupportedError, ExpressionError, CacheFull, CacheBusy,
    ReservationError, FileError, CompileError, CommunicationError

Imported by name: speedlight.torch, speedlight.distributed, speedlight.transformers, speedlight.flash_attn,
speedlight.jax, speedlight.onnx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .host.lazy import importer

if TYPE_CHECKING:
    from . import reference
    from .calls.append_paged import append_paged
    from .calls.backward import attention_backward
    from .calls.merge import merge, merge_states
    from .calls.paged import attention_paged
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
        floor,
        log,
        log2,
        maximum,
        minimum,
        sigmoid,
        sin,
        sqrt,
        tan,
        tanh,
    )
    from .expressions.patterns import alibi, causal, dilated, documents, padding, prefix, relative_bias, softcap, window
    from .expressions.symbols import Symbol, cast, where
    from .expressions.tables import Table, table
    from .expressions.tracing import Expression, MaskFunction, ScoreFunction, expression
    from .front import attention
    from .kv.cache import KVCache
    from .kv.pool import PagePool
    from .kv.sequence import PagedSequence
    from .problem.options import AttentionOptions
    from .problem.plan import Plan

__version__ = "0.1.0"
ARITHMETIC = 2  # the canonical order of operations; docs/numerics.md

_HOMES = {
    "append_paged": "calls.append_paged",
    "attention": "front",
    "attention_backward": "calls.backward",
    "attention_paged": "calls.paged",
    "merge": "calls.merge",
    "merge_states": "calls.merge",
    "plan": "calls.plan",
    "rotary": "calls.rotary",
    "synchronize": "engines",
    "Plan": "problem.plan",
    "KVCache": "kv.cache",
    "PagePool": "kv.pool",
    "PagedSequence": "kv.sequence",
    "CacheBusy": "errors",
    "CacheFull": "errors",
    "CommunicationError": "errors",
    "set_threads": "cpu.runtime.workers",
    "get_threads": "cpu.runtime.workers",
    "Error": "errors",
    "ArgumentError": "errors",
    "ArgumentTypeError": "errors",
    "UnsupportedError": "errors",
    "CompileError": "errors",
    "FileError": "errors",
    "ReservationError": "errors",
    "AttentionOptions": "problem.options",
    "Expression": "expressions.tracing",
    "MaskFunction": "expressions.tracing",
    "ScoreFunction": "expressions.tracing",
    "Symbol": "expressions.symbols",
    "Table": "expressions.tables",
    "abs": "expressions.functions",
    "cast": "expressions.symbols",
    "cos": "expressions.functions",
    "erf": "expressions.functions",
    "exp": "expressions.functions",
    "exp2": "expressions.functions",
    "expression": "expressions.tracing",
    "floor": "expressions.functions",
    "log": "expressions.functions",
    "log2": "expressions.functions",
    "maximum": "expressions.functions",
    "minimum": "expressions.functions",
    "sigmoid": "expressions.functions",
    "sin": "expressions.functions",
    "sqrt": "expressions.functions",
    "table": "expressions.tables",
    "tan": "expressions.functions",
    "tanh": "expressions.functions",
    "where": "expressions.symbols",
    "alibi": "expressions.patterns",
    "causal": "expressions.patterns",
    "dilated": "expressions.patterns",
    "documents": "expressions.patterns",
    "padding": "expressions.patterns",
    "prefix": "expressions.patterns",
    "relative_bias": "expressions.patterns",
    "softcap": "expressions.patterns",
    "window": "expressions.patterns",
    "ExpressionError": "errors",
}

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
    "cast",
    "causal",
    "cos",
    "dilated",
    "documents",
    "erf",
    "exp",
    "exp2",
    "expression",
    "floor",
    "get_threads",
    "log",
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
    "where",
    "window",
]


if not TYPE_CHECKING:  # to a type checker a name that is not above is none
    __getattr__ = importer(globals(), _HOMES, ("reference",))


def __dir__() -> list[str]:
    return ["abs", *__all__]
