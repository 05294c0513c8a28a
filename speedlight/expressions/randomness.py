"""Detection of functions that draw random numbers: a traced one would draw once for all."""

from __future__ import annotations

import pickle
import random
import sys
import types

import numpy as np

_NAMES = ("normal", "uniform", "bernoulli", "choice", "shuffle", "permutation", "gauss", "dropout")  # and rand…


def draws(f: types.FunctionType) -> bool:
    """Returns whether a function names something that may draw, itself or in functions that it makes."""
    codes = [f.__code__]
    while codes:
        code = codes.pop()
        if [x for x in code.co_names if x.startswith("rand") or x in _NAMES]:
            return True
        codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return False


def states() -> bytes:
    """Returns the states of the shared generators: Python's, NumPy's and PyTorch's."""
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state().numpy()
    return pickle.dumps((random.getstate(), np.random.get_state(), of_torch))
