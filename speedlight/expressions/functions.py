"""Functions of symbols, which are public; on numbers and arrays they are NumPy's."""

from __future__ import annotations

from typing import Any

from .symbols import Symbol, applied, applied_by_numpy, is_traced


def _function(op: str, *operands: Any) -> Any:
    """Makes a node of symbols, and NumPy's result of numbers and arrays."""
    return applied(op, *operands) if is_traced(*operands) else applied_by_numpy(op, *operands)


def minimum(a: Any, b: Any) -> Any:
    """Lesser of two; NaN if either is.

    >>> import speedlight as sl
    >>> sl.expression(lambda b, h, i, j: sl.minimum(i, 9) >= j)
    mask (min(i, 9) >= j)
    """
    return _function("min", a, b)


def maximum(a: Any, b: Any) -> Any:
    """Greater of two; NaN if either is.

    >>> import speedlight as sl
    >>> sl.expression(lambda b, h, i, j: sl.maximum(i, 9) >= j)
    mask (max(i, 9) >= j)
    """
    return _function("max", a, b)


def exp(x: Any) -> Any:
    """Exponential, e to the power x; at most 2 ulp off, +0 where the result would be subnormal.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.exp(s))
    score exp(s)
    """
    return _function("exp", x)


def exp2(x: Any) -> Any:
    """Power of two, 2 to the power x; at most 2 ulp off, +0 where the result would be subnormal.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.exp2(s))
    score exp2(s)
    """
    return _function("exp2", x)


def log(x: Any) -> Any:
    """Natural logarithm; at most 2 ulp off.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.log(s))
    score log(s)
    """
    return _function("log", x)


def log2(x: Any) -> Any:
    """Logarithm to base 2; at most 2 ulp off.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.log2(s))
    score log2(s)
    """
    return _function("log2", x)


def log1p(x: Any) -> Any:
    """Natural logarithm of 1 + x, accurate near 0; at most 2 ulp off (3 on GPUs).

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.maximum(s, 0.0) + sl.log1p(sl.exp(-sl.abs(s))))  # softplus
    score (max(s, 0.0) + log1p(exp(-abs(s))))
    """
    return _function("log1p", x)


def expm1(x: Any) -> Any:
    """Exponential less 1, accurate near 0; at most 2 ulp off (3 on GPUs).

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.where(s > 0.0, s, sl.expm1(s)))  # ELU
    score where((s > 0.0), s, expm1(s))
    """
    return _function("expm1", x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent; at most 2 ulp off.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.tanh(s))
    score tanh(s)
    """
    return _function("tanh", x)


def sqrt(x: Any) -> Any:
    """Square root, correctly rounded.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.sqrt(s))
    score sqrt(s)
    """
    return _function("sqrt", x)


def sigmoid(x: Any) -> Any:
    """Logistic function, 1 / (1 + exp(-x)); at most 3 ulp off.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.sigmoid(s))
    score sigmoid(s)
    """
    return _function("sigmoid", x)


def sin(x: Any) -> Any:
    """Sine of x radians; at most 2 ulp off. NaN beyond ±2⁴⁰ (1.1e12), as of infinities.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: s * sl.sin(0.01 * (i - j)))
    score (s * sin((0.01 * cast((i - j)))))
    """
    return _function("sin", x)


def cos(x: Any) -> Any:
    """Cosine of x radians; at most 2 ulp off. NaN beyond ±2⁴⁰ (1.1e12), as of infinities.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.cos(s))
    score cos(s)
    """
    return _function("cos", x)


def tan(x: Any) -> Any:
    """Tangent of x radians; at most 3 ulp off. NaN beyond ±2⁴⁰ (1.1e12), as of infinities.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.tan(s))
    score tan(s)
    """
    return _function("tan", x)


def erf(x: Any) -> Any:
    """Error function, 2/√π times the integral of exp(-t²) from 0 to x; at most 2 ulp off.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: 0.5 * s * (1.0 + sl.erf(s * 0.5**0.5)))  # GELU
    score ((0.5 * s) * (1.0 + erf((s * 0.7071067811865476))))
    """
    return _function("erf", x)


def abs(x: Any) -> Any:
    """Absolute value.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.abs(s))
    score abs(s)
    """
    return _function("abs", x)


def floor(x: Any) -> Any:
    """Largest whole number not above x, of x's kind.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.floor(s))
    score floor(s)
    """
    return x if isinstance(x, Symbol) and not x.node.is_float else _function("floor", x)
