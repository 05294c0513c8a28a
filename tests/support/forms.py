"""Forty masks and scores for random problems, each tied to one dtype and two vector units: their kernels are few."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import speedlight as sl

LENGTH = 6400  # positions that tables know
HEADS, ITEMS = 8, 4  # the most that problems have
VARIANTS = 3  # of each form: other tables and numbers, the same kernel
Maker = Callable[[np.random.Generator], tuple[Any, Any]]


@dataclass(frozen=True)
class Form:
    """A mask and a score as kernels know them. `extra`: which of its further kernels a short run compiles.

    decode: rows of few queries; cached: caches and pools in the forward kernel; steps: the same in the decode kernel;
    codes: caches and pools of int8.
    """

    name: str
    dtype: str
    make: Maker
    extra: str = ""
    tables: bool = False  # positions must be known to its tables wherever keys are visible
    dense: bool = False  # `make` takes the sizes, too, and returns arrays
    far: float = 0.0  # how often positions are beyond 32 bits
    wide: bool = False  # integers are beyond 32 bits now and then: kernels of both kinds
    window: tuple[bool, bool] = (False, False)  # which sides of the option `window` are given
    ring: bool = False  # also by a cache with a window

    @property
    def kernels(self) -> int:
        """That a short run may compile: two vector units, and the extra one."""
        return (2 + bool(self.extra)) * (2 if self.wide else 1)


def E(function: Callable[..., Any]) -> sl.Expression:
    return sl.expression(function)


def n(rng: np.random.Generator, low: int, high: int) -> int:
    return int(rng.integers(low, high))


def ids(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Documents: numbers that rise by one now and then, every few positions or every few hundred."""
    return np.cumsum(rng.random((*shape, LENGTH)) < 1 / rng.integers(3, 400), axis=-1)


def table(array: Any) -> sl.Table:
    return sl.table(array)


# --- masks


def _documents(rng: Any) -> Any:
    return sl.documents(ids(rng))


def _documents_of_items(rng: Any) -> Any:
    """As sl.documents() has it, of more items than the batch may have."""
    of = table(ids(rng, ITEMS))
    return E(lambda b, h, i, j: of[b, i] == of[b, j])


def _prefix(rng: Any) -> Any:
    return sl.causal() | sl.prefix(n(rng, 0, 200))


def _negative_floor(rng: Any) -> Any:
    by, least = -n(rng, 1, 9), -n(rng, 0, 40)
    return E(lambda b, h, i, j: (i - j) // by >= least)


def _negative_mod(rng: Any) -> Any:
    by, least = -n(rng, 2, 11), -n(rng, 1, 6)
    return E(lambda b, h, i, j: (j - i) % by > least)


def _both_signs(rng: Any) -> Any:
    x, y, z = n(rng, 2, 9), n(rng, 2, 30), n(rng, -300, 300)
    return E(lambda b, h, i, j: (z - i) % x <= (3 * j - z) % y)


def _by_a_key(rng: Any) -> Any:
    """Divisors of both signs, and 0."""
    middle, by = n(rng, -5, 60), n(rng, 1, 9)
    return E(lambda b, h, i, j: (((7 * i) // (j - middle)) + (i * 5) % (middle - j)) % by < by // 2 + 1)


def _blocks(rng: Any) -> Any:
    size, first = n(rng, 1, 150), n(rng, 0, 5)
    return E(lambda b, h, i, j: (i // size == j // size) | (j < first))


def _shifts(rng: Any) -> Any:
    x, y = n(rng, 0, 4), n(rng, 0, 4)
    return E(lambda b, h, i, j: ((i << x) >> y) - 40 <= (j << 1))


def _bits(rng: Any) -> Any:
    x, y = n(rng, 1, 16), n(rng, 0, 64)
    return E(lambda b, h, i, j: (((i ^ j) & x) != 0) | ((i | y) == (j | y)))


def _flags(rng: Any) -> Any:
    flags, heads = table(rng.random(LENGTH) < rng.choice([0.02, 0.5, 0.9])), table(rng.integers(0, 80, HEADS))
    return E(lambda b, h, i, j: flags[j] | (i - j == heads[h]))


def _floats(rng: Any) -> Any:
    x, y = rng.uniform(0.2, 0.6, 2)
    return E(lambda b, h, i, j: sl.cast(i, float) * x + 1.5 >= sl.sqrt(sl.cast(sl.abs(j), float)) * y)


def _squares(rng: Any) -> Any:
    seen = table(rng.random((ITEMS, 64, 48)) < 0.4)
    return E(lambda b, h, i, j: seen[b, i % 64, j % 48])


def _distance(rng: Any) -> Any:
    far = n(rng, 1, 90)
    return E(lambda b, h, i, j: (sl.abs(i - j) * (h + 1) <= far) | (j == b))


def _chosen(rng: Any) -> Any:
    by, most = n(rng, 2, 9), n(rng, 1, 5)
    return E(lambda b, h, i, j: sl.where(j < i, i - j, j * 2) % by < sl.minimum(h + 1, most))


def _terms(rng: Any) -> Any:
    a, b, c = (sl.window(n(rng, 0, 90), n(rng, 0, 90)) for _ in range(3))
    return (a & ~sl.dilated(n(rng, 2, 5))) | ~(b | sl.prefix(n(rng, 1, 60))) | (c & sl.causal())


def _products(rng: Any) -> Any:
    """Integers beyond 32 bits, or not, as positions say."""
    turn, by = int(rng.choice([1000, 1030, 2040])), n(rng, 2_500_000, 4_000_000)
    return E(lambda b, h, i, j: (turn - i) * by * (j % 2) > 0)


def _hundreds(rng: Any) -> Any:
    by = n(rng, 2, 100)
    return E(lambda b, h, i, j: (i + j * 3) % by < by - 1)


def _squared(rng: Any) -> Any:
    most = n(rng, 2, 120) ** 2
    return E(lambda b, h, i, j: ((i - j) ** 2 <= most) & ((i - j) >= -(h + 2)))


def _dense(*broadcast: int) -> Any:
    """A bool array that broadcasts in the axes that are 0 in `broadcast`."""

    def make(rng: Any, *whole: int) -> Any:
        return rng.random([a if keep else 1 for a, keep in zip(whole, broadcast, strict=True)]) < rng.choice(
            [0.03, 0.7]
        )

    return make


# --- scores


def _alibi(rng: Any) -> Any:
    """sl.alibi of however many heads, which wants a slope for each and no more."""
    slopes = table(rng.uniform(0.01, 1, HEADS).astype(np.float32))
    return E(lambda s, b, h, i, j: s + slopes[h] * (j - i))


def _relative(rng: Any) -> Any:
    bias = table(rng.standard_normal((HEADS, 257)).astype(np.float32))
    return E(lambda s, b, h, i, j: s + bias[h, sl.minimum(sl.maximum(i - j, -128), 128) + 128])


def _softcap(rng: Any) -> Any:
    return sl.softcap(float(rng.uniform(0.5, 30)))


def _hidden(rng: Any) -> Any:
    gone = table(rng.random(LENGTH) < rng.choice([0.1, 0.98]))
    return E(lambda s, b, h, i, j: sl.where(gone[j], -np.inf, s))


def _halves(rng: Any) -> Any:
    halves = table(rng.uniform(-2, 2, LENGTH).astype(np.float16))
    return E(lambda s, b, h, i, j: s * halves[j] - halves[i])


def _curves(rng: Any) -> Any:
    c = float(rng.uniform(0.5, 3))
    return E(lambda s, b, h, i, j: sl.sigmoid(s) * c + sl.log2(1.5 + sl.abs(s)) - sl.tanh(s / c))


def _exponentials(rng: Any) -> Any:
    c = float(rng.uniform(0.5, 3))
    return E(lambda s, b, h, i, j: sl.exp(sl.minimum(s, c)) + sl.exp2(-sl.abs(s)))


def _roots(rng: Any) -> Any:
    by = n(rng, 2, 7)
    return E(lambda s, b, h, i, j: sl.sqrt(1 + sl.abs(s)) * (1 - (i + j) % by) + sl.log(2.0 + s * s))


def _doubles(rng: Any) -> Any:
    bias = table(rng.standard_normal(HEADS))
    return E(lambda s, b, h, i, j: s * 0.5 + bias[h] / 3)


def _turned(rng: Any) -> Any:
    c = float(rng.uniform(0.2, 4))
    return E(lambda s, b, h, i, j: sl.where((i // -3 + j) % 2 == 0, s, sl.maximum(-s / c, c - 1.0)))


def _added(*broadcast: int, kind: Any = np.float32) -> Any:
    """A float array to add, with some keys hidden."""

    def make(rng: Any, *whole: int) -> Any:
        shape = [a if keep else 1 for a, keep in zip(whole, broadcast, strict=True)]
        return np.where(rng.random(shape) < 0.1, -np.inf, rng.standard_normal(shape) * 2).astype(kind)

    return make


def mask(make: Any) -> Maker:
    return lambda *a: (make(*a), None)


def score(make: Any) -> Maker:
    return lambda *a: (None, make(*a))


def both(one: Any, other: Any) -> Maker:
    return lambda *a: (one(*a), other(*a))


def nothing(rng: Any) -> tuple[None, None]:
    return None, None


def _ring(rng: Any) -> Any:
    first = n(rng, 0, 40)
    return sl.window(n(rng, 1, 300) - 1, 0) | sl.prefix(first)


FORMS = (
    Form("plain f32", "float32", nothing, "cached", far=0.15),
    Form("plain f64", "float64", nothing, "steps", far=0.15),
    Form("plain f16", "float16", nothing, far=0.15),
    Form("plain bf16", "bfloat16", nothing, "decode", far=0.15),
    Form("window", "float32", nothing, "steps", window=(True, True)),
    Form("window to the left", "bfloat16", nothing, "cached", window=(True, False)),
    Form("window to the right", "float16", mask(lambda rng: sl.causal()), "decode", window=(False, True)),
    Form("documents", "float32", mask(_documents), "cached", tables=True),
    Form("documents of items", "float64", mask(_documents_of_items), tables=True),
    Form("prefix", "bfloat16", mask(_prefix)),
    Form("dilated", "float32", mask(lambda rng: sl.dilated(n(rng, 1, 300))), "decode", far=1.0),
    Form("floor of negatives", "float32", mask(_negative_floor)),
    Form("rest of negatives", "float64", mask(_negative_mod), far=1.0),
    Form("rests of both signs", "float16", mask(_both_signs), "steps"),
    Form("divided by a key", "float32", mask(_by_a_key), "decode"),
    Form("blocks", "float32", mask(_blocks)),
    Form("shifts", "float64", mask(_shifts)),
    Form("bits", "float16", mask(_bits), "codes"),
    Form("flags", "bfloat16", mask(_flags), "decode", tables=True),
    Form("floats", "float32", mask(_floats)),
    Form("squares of items", "float32", mask(_squares)),
    Form("distance by head", "float16", mask(_distance)),
    Form("chosen", "float32", mask(_chosen)),
    Form("many terms", "float32", mask(_terms), "steps"),
    Form("wide products", "float32", mask(_products), wide=True),
    Form("a dense mask", "float32", mask(_dense(0, 0, 1, 1)), "", dense=True),
    Form("a dense mask of all", "bfloat16", mask(_dense(1, 1, 1, 1)), "", dense=True),
    Form("a mask of keys", "float64", mask(_dense(1, 0, 0, 1)), "", dense=True),
    Form("alibi", "float32", score(_alibi), "steps"),
    Form("relative bias", "bfloat16", score(_relative), "decode"),
    Form("softcap", "float64", score(_softcap), "cached"),
    Form("hidden by scores", "float32", score(_hidden), tables=True),
    Form("halves", "float16", both(_hundreds, _halves), tables=True),
    Form("curves", "float32", score(_curves), "decode"),
    Form("exponentials", "float64", both(_squared, _exponentials)),
    Form("roots", "float32", both(_prefix, _roots)),
    Form("doubles", "float16", both(_blocks, _doubles)),
    Form(
        "several scores",
        "float32",
        both(_documents, lambda rng: [_softcap(rng), _alibi(rng), _turned(rng)]),
        "codes",
        tables=True,
    ),
    Form("a dense score", "float32", score(_added(0, 1, 1, 1)), "", dense=True),
    Form("a window's ring", "float32", mask(_ring), "cached", ring=True),
)


@functools.cache
def variant(form: Form, which: int) -> tuple[Any, Any]:
    """The mask and score of a form, prepared once."""
    return form.make(np.random.default_rng([FORMS.index(form), which]))


def third_of(form: Form) -> int:
    """Returns 0, 1 or 2."""
    return 3 * FORMS.index(form) // len(FORMS)


def units(form: Form) -> tuple[str, str]:
    """Two vector units that have the same bits, as far as this machine has two: of each third of the forms the same
    two, since kernels of one unit, dtype and width have most of their code in common.
    """
    from speedlight.host.machine import host_isas  # all else is public: tests/same_bits.py runs it on any tree

    at, of_bf16 = third_of(form), [x.product("bf16") for x in host_isas()]
    wanted = sorted(set(of_bf16))[at % len(set(of_bf16))]
    found = [x.name for x, own in zip(host_isas(), of_bf16, strict=True) if form.dtype != "bfloat16" or own == wanted]
    return found[at % len(found)], found[(at + 1) % len(found)]
