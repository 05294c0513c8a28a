"""Functions of NumPy and PyTorch on symbols, translated into our operations.

A name is an operation of ours with the same operands, or a rule: a function of `apply(operation, *operands)` and of
what the library's function was called with. Methods of tensors have the same names, and mean the same.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

from ..errors import ExpressionError, shown
from .operations import OPERATIONS

Apply = Callable[..., Any]
_ACCEPTED = {"out": (None,), "dtype": (None,), "inplace": (False,), "alpha": (1,), "where": (True,)}  # that say nothing
_OPERANDS = ("input", "self", "other", "exponent", "x1", "x2")  # by name, in this order after those without


def _div(apply: Apply, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode not in (None, "floor"):
        raise ExpressionError(f"div: expected rounding_mode None or 'floor'; got {shown(rounding_mode)}. Use //.")
    return apply("div" if rounding_mode is None else "floordiv", a, b)


def _clamp(apply: Apply, x: Any, low: Any = None, high: Any = None, **ends: Any) -> Any:
    """x within the ends; at an end its slope is x's, as PyTorch has it."""
    for name in ("min", "a_min"):
        low = ends.pop(name, low)
    for name in ("max", "a_max"):
        high = ends.pop(name, high)
    _nothing_left("clamp", ends)
    x = x if low is None else apply("max", x, low)
    return x if high is None else apply("min", x, high)


def _ceil(apply: Apply, x: Any) -> Any:
    return -apply("floor", -x)


def _trunc(apply: Apply, x: Any) -> Any:
    return apply("where", x < 0, _ceil(apply, x), apply("floor", x))


def _sign(apply: Apply, x: Any) -> Any:
    return apply("where", x > 0, 1, apply("where", x < 0, -1, x * 0))


def _isfinite(apply: Apply, x: Any) -> Any:
    return apply("lt", apply("abs", x), math.inf)


def _isinf(apply: Apply, x: Any) -> Any:
    return apply("eq", apply("abs", x), math.inf)


def _lerp(apply: Apply, x: Any, end: Any, weight: Any) -> Any:
    return x + weight * (end - x)


def _relu(apply: Apply, x: Any) -> Any:
    return apply("max", 0, x)  # in this order: where both are 0, nothing flows to x


def _silu(apply: Apply, x: Any) -> Any:
    return x * apply("sigmoid", x)


def _gelu(apply: Apply, x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + apply("tanh", inner))
    if approximate != "none":
        raise ExpressionError(f"gelu: expected approximate 'none' or 'tanh'; got {shown(approximate)}.")
    return 0.5 * x * (1.0 + apply("erf", x * math.sqrt(0.5)))


def _leaky_relu(apply: Apply, x: Any, negative_slope: float = 0.01) -> Any:
    return apply("where", x > 0, x, x * negative_slope)


def _softplus(apply: Apply, x: Any, beta: float = 1, threshold: float = 20) -> Any:
    """ln(1 + e^(beta x)) / beta, without overflow; x where beta x is above the threshold, as PyTorch has it.

    max and abs in this order of operands: at 0 the slope is 1 - 1/2.
    """
    inner = x * float(beta)
    soft = apply("max", inner, 0) + apply("log1p", apply("exp", -apply("abs", inner)))
    return apply("where", inner > threshold, x, soft / float(beta))


def _logsigmoid(apply: Apply, x: Any) -> Any:
    """min has the operands in this order: at 0 the slope is 0 + 1/2."""
    return apply("min", 0, x) - apply("log1p", apply("exp", -apply("abs", x)))


def _elu(apply: Apply, x: Any, alpha: float = 1.0) -> Any:
    return apply("where", x > 0, x, float(alpha) * apply("expm1", x))


def _celu(apply: Apply, x: Any, alpha: float = 1.0) -> Any:
    return apply("where", x > 0, x, float(alpha) * apply("expm1", x / float(alpha)))


def _selu(apply: Apply, x: Any) -> Any:
    return 1.0507009873554805 * _elu(apply, x, 1.6732632423543772)


def _mish(apply: Apply, x: Any) -> Any:
    return x * apply("tanh", _softplus(apply, x))


def _hardsigmoid(apply: Apply, x: Any) -> Any:
    """Flat at -3 and 3, too."""
    return apply("where", x <= -3, 0, apply("where", x >= 3, 1, x / 6 + 0.5))


def _truth(apply: Apply, x: Any) -> Any:
    return apply("cast", x, bool)


def _logical(op: str) -> Callable[..., Any]:
    return lambda apply, *operands: apply(op, *[_truth(apply, x) for x in operands])


def _to(apply: Apply, x: Any, dtype: Any = None, **options: Any) -> Any:
    for name in ("device", "copy", "non_blocking"):
        options.pop(name, None)
    _nothing_left("to", options)
    return x if dtype is None or type(dtype).__name__ == "device" else apply("cast", x, dtype)


def _as(dtype: Any) -> Callable[..., Any]:
    return lambda apply, x: apply("cast", x, dtype)


def _like(value: Any) -> Callable[..., Any]:
    return lambda apply, x, dtype=None, device=None: apply("number", value, dtype or x.dtype)


def _full_like(apply: Apply, x: Any, fill_value: Any, dtype: Any = None, device: Any = None) -> Any:
    return apply("number", fill_value, dtype or x.dtype)


def _new(value: Any) -> Callable[..., Any]:
    def rule(apply: Apply, x: Any, size: Any = (), dtype: Any = None, device: Any = None) -> Any:
        return _new_full(apply, x, size, value, dtype, device)

    return rule


def _new_full(apply: Apply, x: Any, size: Any, fill_value: Any, dtype: Any = None, device: Any = None) -> Any:
    if size not in ((), []):
        raise ExpressionError(f"new_full: expected size (), of one number; got {shown(size)}.")
    return apply("number", fill_value, dtype or x.dtype)


Rule = str | Callable[..., Any]
FUNCTIONS: dict[str, Rule] = {
    "add": "add", "sub": "sub", "subtract": "sub", "mul": "mul", "multiply": "mul", "neg": "neg", "negative": "neg",
    "div": _div, "divide": _div, "true_divide": "div", "floor_divide": "floordiv", "remainder": "mod", "mod": "mod",
    "pow": "pow", "power": "pow", "square": lambda apply, x: x * x, "reciprocal": lambda apply, x: 1.0 / x,

    "lt": "lt", "less": "lt", "le": "le", "less_equal": "le", "gt": "gt", "greater": "gt", "ge": "ge",
    "greater_equal": "ge", "eq": "eq", "equal": "eq", "ne": "ne", "not_equal": "ne",
    "where": "where", "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),

    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not", "invert": "not",
    "bitwise_left_shift": "shl", "bitwise_right_shift": "shr", "left_shift": "shl", "right_shift": "shr",

    "abs": "abs", "absolute": "abs", "fabs": "abs", "minimum": "min", "maximum": "max", "relu": _relu, "sign": _sign,
    "clamp": _clamp, "clip": _clamp, "clamp_min": lambda apply, x, low: apply("max", x, low),
    "clamp_max": lambda apply, x, high: apply("min", x, high),
    "floor": "floor", "ceil": _ceil, "trunc": _trunc, "fix": _trunc,

    "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "tanh": "tanh", "sqrt": "sqrt", "sigmoid": "sigmoid",
    "sin": "sin", "cos": "cos", "tan": "tan", "erf": "erf",
    "isnan": lambda apply, x: x != x, "isinf": _isinf, "isfinite": _isfinite, "lerp": _lerp,
    "positive": lambda apply, x: x, "log10": lambda apply, x: apply("log2", x) * math.log10(2),
    "hardtanh": lambda apply, x, min_val=-1.0, max_val=1.0: _clamp(apply, x, min_val, max_val),
    "silu": _silu, "gelu": _gelu, "leaky_relu": _leaky_relu, "relu6": lambda apply, x: _clamp(apply, x, 0, 6),
    "log1p": "log1p", "expm1": "expm1", "softplus": _softplus, "logsigmoid": _logsigmoid, "elu": _elu, "celu": _celu,
    "selu": _selu, "mish": _mish, "hardsigmoid": _hardsigmoid,
    "hardswish": lambda apply, x: x * _hardsigmoid(apply, x),
    "softsign": lambda apply, x: x / (1.0 + apply("abs", x)),
    "expit": "sigmoid", "rsqrt": lambda apply, x: 1.0 / apply("sqrt", x),
    "zeros_like": _like(0), "ones_like": _like(1), "full_like": _full_like,
}  # fmt: skip
# functions of PyTorch that NumPy has otherwise
TENSORS: dict[str, Rule] = {"min": "min", "max": "max"}
METHODS: dict[str, Rule] = {
    "where": lambda apply, x, condition, other: apply("where", condition, x, other),
    "masked_fill": lambda apply, x, condition, value: apply("where", condition, value, x),
    "__and__": "and", "__or__": "or", "__xor__": "xor", "__lshift__": "shl", "__rshift__": "shr",
    "__floordiv__": "floordiv", "__mod__": "mod", "__pow__": "pow",
    "to": _to, "type": _to, "type_as": lambda apply, x, other: apply("cast", x, other.dtype),
    "float": _as(float), "double": _as("float64"), "int": _as(int), "long": _as(int), "bool": _as(bool),
    "new_zeros": _new(0), "new_ones": _new(1), "new_full": _new_full,
}  # fmt: skip


_OF_ONE = ("unsqueeze", "squeeze", "clone", "contiguous")  # methods that one number goes through unchanged


@functools.cache
def _rules(library: str) -> dict[Any, Rule]:
    """Returns the operations that a library's functions stand for, by function."""
    module: Any = sys.modules[library]
    homes = [(module, FUNCTIONS)]
    if library == "torch":
        functions = {**FUNCTIONS, **TENSORS}
        homes = [(home, functions) for home in (module, module.special, module.nn.functional)]
        homes.append((module.Tensor, {**functions, **METHODS}))
    return {getattr(home, name): rule for home, rules in homes for name, rule in rules.items() if hasattr(home, name)}


def called(apply: Apply, library: str, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Applies a library's function to symbols."""
    rule = _rules(library).get(function) or _of_operator(function)
    if rule is None:
        raise unknown(library, function)
    return _applied(apply, getattr(function, "__name__", "a function"), rule, args, options)


def _of_operator(function: Any) -> Rule | None:
    """Returns the operation of torch.ops.aten.tanh, or of one of its overloads."""
    name = str(function).split(".") if type(function).__module__ == "torch._ops" else []
    return {**FUNCTIONS, **TENSORS}.get(name[1]) if len(name) > 1 and name[0] == "aten" else None


def unknown(library: str, function: Any) -> ExpressionError:
    short, name = {"numpy": "np"}.get(library, library), getattr(function, "__name__", "a function")
    if name == "embedding":
        return ExpressionError("torch.embedding: expected its weight, looked up: of emb(i)[h] write emb.weight[i, h].")
    return ExpressionError(
        f"{short}.{name}: expected operators and functions of single numbers, as sl.where, np.exp, torch.tanh; symbols "
        "have no values. Compute it outside and look it up: t = sl.table(array), and t[i] in the function."
    )


def method(apply: Apply, x: Any, name: str) -> Callable[..., Any] | None:
    """A tensor's method, of a symbol; None: there is no such method here."""
    if name in _OF_ONE:
        return lambda *_, **__: x
    rule = METHODS.get(name) or TENSORS.get(name) or FUNCTIONS.get(name)
    if rule is None or name.startswith("__"):
        return None
    return lambda *args, **options: _applied(apply, name, rule, (x, *args), options)


def _applied(apply: Apply, name: str, rule: Rule, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    for option, silent in _ACCEPTED.items():
        if option in options and [x for x in silent if options[option] is x or options[option] == x]:
            del options[option]
    operands = (*args, *(options.pop(x) for x in _OPERANDS if x in options))
    if not isinstance(rule, str):
        try:
            return rule(apply, *operands, **options)
        except TypeError as error:
            if isinstance(error, ExpressionError):
                raise
            raise ExpressionError(f"{name}: {error}.") from None
    _nothing_left(name, options)
    wanted = 2 if rule == "pow" else OPERATIONS[rule].operands
    if len(operands) != wanted:
        raise ExpressionError(f"{name}: expected {wanted} operands in an expression; got {len(operands)}.")
    return apply(rule, *operands)


def _nothing_left(name: str, options: dict[str, Any]) -> None:
    if options:
        raise ExpressionError(f"{name}: expected no {', '.join(options)} in an expression, whose values are symbols.")
