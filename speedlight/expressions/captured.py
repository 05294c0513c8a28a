"""Arrays that a traced function captures: `array[symbol]` becomes an entry of a table that reads the array in place.

PyTorch asks symbols what an index of symbols means, so tensors are found wherever they are. NumPy's arrays and lists do
not ask: where a function captures them (closure, defaults, globals; and functions that it captures), it is traced as a
copy of itself that has such arrays and lists in their place as do.
"""

from __future__ import annotations

import functools
import itertools
import numbers
import pickle
import random
import sys
import types
from typing import Any

import numpy as np

from ..arrays.torch_tensors import is_tensor
from ..errors import ExpressionError
from .autograd import Traceable, is_autograd_function
from .symbols import LOOKUP, Symbol
from .tables import Table, as_index

LIBRARIES = ("numpy", "torch", "speedlight", "builtins", "jax", "jaxlib")  # whose globals are their own affair


class Tables:
    """The tables of one trace: one of each array, however often it is looked up."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[Any, Table]] = {}  # by the array's id, which stays its own while it is held
        self.names: dict[int, str] = {}

    def __call__(self, array: Any, index: Any) -> Any:
        """LOOKUP of a trace."""
        if id(array) not in self.of:
            name = self.names.get(id(array), "table")
            table = Table(array, name, copy=isinstance(array, list))
            table.captured = self._captured(array)
            self.of[id(array)] = array, table
        table = self.of[id(array)][1]
        sizes = itertools.chain(table.shape, itertools.repeat(0))
        return table[tuple(map(_from_the_end, as_index(index), sizes)) or (0,)]

    def _captured(self, array: Any) -> Any:
        """Returns the array or tensor that a function captured, of which it looks up this view; None if it made one."""
        if isinstance(array, LookedArray):
            return array.whole if np.may_share_memory(array, array.whole) else None
        if not is_tensor(array) or id(array) in self.names or array._base is None:
            return None
        return array._base if array._base.dtype == array.dtype else None


def _from_the_end(x: Any, n: int) -> Any:
    """A number below 0 counts from the end, as in the array itself; what a symbol stands for does not."""
    return int(x) + n if isinstance(x, numbers.Integral) and -n <= int(x) < 0 else x


class LookedArray(np.ndarray):
    """A captured array: what is made of it is NumPy's, and looked up the same way.

    `whole` is the array itself, also where this is a view of it.
    """

    whole: np.ndarray

    def __array_finalize__(self, made_of: Any) -> None:
        self.whole = getattr(made_of, "whole", made_of)

    def __getitem__(self, index: Any) -> Any:
        return _entry(self, index, super().__getitem__)


class LookedList(list):
    """A captured list of numbers, or of such lists, arrays and functions."""

    def __getitem__(self, index: Any) -> Any:
        return _entry(self, index, super().__getitem__)


def _entry(array: Any, index: Any, usual: Any) -> Any:
    lookup = LOOKUP.get()
    if lookup is None or not [x for x in as_index(index) if isinstance(x, Symbol)]:
        return usual(index)
    return lookup(array, index)


def called(function: Any, tables: Tables, symbols: list[Symbol]) -> Any:
    """The function of symbols, or a copy of it in which captured arrays and lists are looked up by them."""
    copying = _Copying(tables)
    copy = copying.of(function)
    before = _generator_states() if copying.may_draw else None
    result = copy(*symbols)
    if before is not None and before != _generator_states():
        raise ExpressionError(RANDOM)
    return result


RANDOM = (
    "random numbers: expected a function that draws none, for it is called once, with symbols, and one number would be "
    "drawn for all. Draw an array and look it up through sl.table(array); dropout= and seed= drop weights."
)


class _Copying:
    """One walk over what a function captures."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.may_draw = False  # random numbers, as far as names tell
        self.done: dict[int, Any] = {}  # by id; functions may capture themselves

    def of(self, x: Any, name: str = "table") -> Any:
        """Returns what stands for x in a copy: x itself, where nothing in it is looked up."""
        if id(x) in self.done:
            return self.done[id(x)]
        self.done[id(x)] = x
        new = self._made(x, name)
        self.done[id(x)] = new
        self.tables.names[id(new)] = name
        return new

    def _made(self, x: Any, name: str) -> Any:
        match x:
            case np.ndarray() if type(x) is np.ndarray and x.ndim:
                return x.view(LookedArray)
            case np.random.Generator() | np.random.RandomState():
                raise ExpressionError(RANDOM)
            case type() if is_autograd_function(x):
                return Traceable(x)
            case list() | tuple() if x and type(x) in (list, tuple):
                return self._sequence(x, name)
            case types.FunctionType():
                return self._function(x)
            case types.MethodType() if is_autograd_function(x.__self__):
                return Traceable(x.__self__).apply if x.__name__ == "apply" else x
            case types.MethodType():
                inner = self.of(x.__func__)
                return x if inner is x.__func__ else types.MethodType(inner, x.__self__)
            case functools.partial():
                args, options = self._all(x.args), self._all(x.keywords.values(), x.keywords)
                function = self.of(x.func)
                if function is x.func and args is None and options is None:
                    return x
                options = x.keywords if options is None else dict(zip(x.keywords, options, strict=True))
                return functools.partial(function, *(x.args if args is None else args), **options)
        if type(x).__module__.startswith("jaxlib") and hasattr(x, "__array__") and x.ndim:
            return np.asarray(x).view(LookedArray)
        return x

    def _sequence(self, x: Any, name: str) -> Any:
        """A list of numbers can be looked up; one of other things is another one if they are."""
        kinds = set(map(type, x))
        if not [1 for kind in kinds if not issubclass(kind, numbers.Real)]:
            return LookedList(x) if isinstance(x, list) else x
        if [1 for kind in kinds if not issubclass(kind, (list, tuple, np.ndarray, *_FUNCTIONS))]:
            return x
        new = self._all(x, itertools.repeat(name))
        return x if new is None else tuple(new) if isinstance(x, tuple) else LookedList(new)

    def _all(self, values: Any, names: Any = ()) -> list[Any] | None:
        """Returns what stands for each; None where each stands for itself."""
        values = list(values)
        named = zip(values, itertools.chain(names, itertools.repeat("table")), strict=False)
        new = [self.of(x, name) for x, name in named]
        return new if [1 for a, b in zip(values, new, strict=True) if a is not b] else None

    def _function(self, f: types.FunctionType) -> Any:
        self.may_draw = self.may_draw or _may_draw(f)
        cells = f.__closure__ or ()
        known = [(cell, name) for cell, name in zip(cells, f.__code__.co_freevars, strict=True) if cell != _EMPTY]
        closed = self._all([cell.cell_contents for cell, _ in known], [name for _, name in known])
        defaults = self._all(f.__defaults__ or (), _default_names(f))
        keywords = self._all((f.__kwdefaults__ or {}).values(), list(f.__kwdefaults__ or {}))
        used = {} if (f.__module__ or "").split(".")[0] in LIBRARIES else _globals_of(f)
        globals_ = self._all(used.values(), list(used))
        if closed is defaults is keywords is globals_ is None:
            return f
        filled = dict(zip([id(cell) for cell, _ in known], closed or [], strict=bool(closed)))
        names = f.__globals__ if globals_ is None else {**f.__globals__, **dict(zip(used, globals_, strict=True))}
        new_cells = tuple(types.CellType(filled[id(c)]) if id(c) in filled else c for c in cells)
        new = types.FunctionType(f.__code__, names, f.__name__, f.__defaults__, new_cells)
        new.__defaults__ = f.__defaults__ if defaults is None else tuple(defaults)
        kwdefaults = f.__kwdefaults__ or {}
        new.__kwdefaults__ = f.__kwdefaults__ if keywords is None else dict(zip(kwdefaults, keywords, strict=True))
        return new


_EMPTY = types.CellType()
_DRAWING = ("normal", "uniform", "bernoulli", "choice", "shuffle", "permutation", "gauss", "dropout")  # and rand…
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def _default_names(f: types.FunctionType) -> list[str]:
    count = len(f.__defaults__ or ())
    return list(f.__code__.co_varnames[f.__code__.co_argcount - count : f.__code__.co_argcount])


def _globals_of(f: types.FunctionType) -> dict[str, Any]:
    """Returns the globals that a function names."""
    return {name: f.__globals__[name] for name in _names_of(f) if name in f.__globals__}


def _names_of(f: types.FunctionType) -> dict[str, None]:
    """Returns the globals and attributes that a function names, itself or in functions that it makes, in order."""
    names: list[str] = []
    codes = [f.__code__]
    while codes:
        code = codes.pop()
        names += code.co_names
        codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return dict.fromkeys(names)


def _may_draw(f: types.FunctionType) -> bool:
    """Returns whether a function names something that may draw random numbers: a traced one would draw once for all."""
    return bool([x for x in _names_of(f) if x.startswith("rand") or x in _DRAWING])


def _generator_states() -> bytes:
    """Returns the states of the shared generators: Python's, NumPy's and PyTorch's."""
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state().numpy()
    return pickle.dumps((random.getstate(), np.random.get_state(), of_torch))
