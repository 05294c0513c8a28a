"""Options of steps in few forms, with several numbers and tables of each, and arrays that lie in any way."""

from __future__ import annotations

import numpy as np

import speedlight as sl

D, LONGEST = 16, 2300  # two spans and a bit
IDS = [sl.table(np.arange(LONGEST + 50) // n, "ids") for n in (7, 11)]


def sign(x):
    """Tells 0.0 from -0.0."""
    return sl.where(1 / x > 0, 1.0, 0.0)


BEYOND = sl.expression(lambda b, h, i, j: (1000 - i) * 3_000_000 * (j % 2) > 0)  # 32 bits, at some rows
OPTIONS = [  # few structures, each with several numbers and tables
    {},
    {"scale": 0.3},
    {"mask": BEYOND},
    {"mask": sl.window(50, 0)},
    {"mask": sl.window(51, 0)},
    {"mask": sl.expression(lambda b, h, i, j: j % (b + 2) != 1)},
    *(
        {"mask": sl.expression(lambda b, h, i, j, t=t: t[i] == t[j]), "score": sl.softcap(c)}
        for t in IDS
        for c in (2.0, 3.0)
    ),
    *({"score": sl.expression(lambda s, b, h, i, j, z=z: s + j / 64 * sign(s * 0 + z))} for z in (0.0, -0.0)),
    *({"scale": z, "score": sl.expression(lambda s, b, h, i, j: j / 64 * sign(s + s))} for z in (0.0, -0.0)),
]


def options_of(rng, most):
    return OPTIONS[rng.integers(most)] | {"return_lse": True}


def strided(rng, x):
    """The same numbers, lying in one of three ways."""
    way = rng.integers(3)
    if way == 1:
        return np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2)
    return np.concatenate([x, x], axis=-1)[..., : x.shape[-1]] if way == 2 else x
