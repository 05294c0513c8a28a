"""speedlight: exact attention at the speed of the machine.

>>> import numpy as np, speedlight as sl
>>> q = k = v = np.ones((1, 8, 16, 64), dtype=np.float32)
>>> sl.attention(q, k, v).shape
(1, 8, 16, 64)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import importer

if TYPE_CHECKING:
    from . import reference
    from .api import attention, attention_paged, plan, synchronize
    from .backward import attention_backward
    from .cpu.workers import get_threads, set_threads
    from .errors import (
        ArgumentError,
        ArgumentTypeError,
        CacheBusy,
        CacheFull,
        CompileError,
        Error,
        ExpressionError,
        FileError,
        ReservationError,
        UnsupportedError,
    )
    from .expressions.functions import (
        abs,
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
    from .expressions.symbols import cast, where
    from .expressions.tables import Table, table
    from .expressions.tracing import Expression, expression
    from .kv.cache import KVCache
    from .kv.pool import PagePool
    from .kv.sequence import Sequence
    from .merging import merge, merge_states
    from .planning import Plan
    from .turning import rotary

__version__ = "0.1.0"
ARITHMETIC = 1  # the canonical order of operations; docs/numerics.md

_HOMES = {
    "attention": "api",
    "attention_backward": "backward",
    "attention_paged": "api",
    "merge": "merging",
    "merge_states": "merging",
    "plan": "api",
    "rotary": "turning",
    "synchronize": "api",
    "Plan": "planning",
    "KVCache": "kv.cache",
    "PagePool": "kv.pool",
    "Sequence": "kv.sequence",
    "CacheBusy": "errors",
    "CacheFull": "errors",
    "set_threads": "cpu.workers",
    "get_threads": "cpu.workers",
    "Error": "errors",
    "ArgumentError": "errors",
    "ArgumentTypeError": "errors",
    "UnsupportedError": "errors",
    "CompileError": "errors",
    "FileError": "errors",
    "ReservationError": "errors",
    "Expression": "expressions.tracing",
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

__all__ = [
    "ARITHMETIC",
    "ArgumentError",
    "ArgumentTypeError",
    "CacheBusy",
    "CacheFull",
    "CompileError",
    "Error",
    "Expression",
    "ExpressionError",
    "FileError",
    "KVCache",
    "PagePool",
    "Plan",
    "ReservationError",
    "Sequence",
    "Table",
    "UnsupportedError",
    "__version__",
    "abs",
    "alibi",
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


__getattr__ = importer(globals(), _HOMES, ("reference",))


def __dir__() -> list[str]:
    return sorted(__all__)
