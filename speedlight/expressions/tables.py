"""Tables: arrays that masks and scores look up."""

from __future__ import annotations

import contextlib
import numbers
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arrays.array import is_masked
from ..arrays.torch_tensors import check_plain_tensor, has_tangent, is_tensor, is_traced
from ..errors import ArgumentError, ArgumentTypeError, ExpressionError, has, pass_on, shown
from ..errors.advice import of_masks
from ..host.graph_breaks import check_outside
from ..host.insides import TORCH
from . import foreign
from .operations import INT_MAX
from .rows import Row
from .symbols import LOOKUP, Symbol, by_name, node_of
from .tree import Node, convert, kind_of

_FEW = 16384  # entries
_RELEASED: Any = object()  # in place of an array


class Table:
    """Table that masks and scores look up: `t = sl.table(ids)`, then `t[j]` inside a function.

    Args:
        array: 1 to 4 dimensions of bool, integers, float16, bfloat16, float32 or float64; on a GPU or not. It is
            copied, so later changes have no effect. attention_backward(grads=(t,)) returns its gradient. A tensor that
            requires grad when a call is made gets its gradient from speedlight.torch.attention().
        name: its name in error messages.

    An index must lie in 0 … n - 1 wherever the mask leaves the key visible; elsewhere it may be anything. Integers
    come as int64, float16 and bfloat16 as float.

    Raises:
        speedlight.ArgumentError, ArgumentTypeError: other dimensions or dtypes, a masked array, a sparse tensor …
        speedlight.UnsupportedError: a tensor without numbers in memory.

    >>> import numpy as np, speedlight as sl
    >>> ids = sl.table(np.array([0, 0, 1, 1]))
    >>> sl.expression(lambda b, h, i, j: ids[i] == ids[j])
    mask (table[i] == table[j])
    """

    def __init__(self, array: Any, name: str = "table", *, copy: bool = True) -> None:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"name: expected a string; got {type(name).__name__}.")
        self.name = name
        self.array: np.ndarray  # the entries; of a tensor that stays on a GPU its shape and dtype, and no values
        self.tensor: Any = None  # that tensor, detached
        self.origin: Any = None  # a tensor of floats that the entries are the numbers of, whether followed or not
        self.version = 0  # of its numbers
        self.watched: Any = None  # the caller's tensor or array, whose memory is looked up; None: a copy is
        self.place: Any = None  # where that memory was, of a tensor
        self.copies: dict[str, Any] = {}  # by device
        self.of_items = False  # whether it has to have a row for each item of the batch
        self.of_keys = False  # … and that an entry for each key
        self.of_heads = False  # whether it has to have an entry for each query head
        self.way = ""  # out of an index beyond it, where a pattern knows better than the rule
        self._ends: Any = None
        if not is_tensor(array):
            self.watched = None if copy else array
            self._take(_entries(array, name), copy)
        elif is_traced(array):
            self.origin = array  # ones stand for its numbers
            ones = np.broadcast_to(np.ones((), _torch_dtype(array, name)), tuple(map(int, array.shape)))
            self._take(ones, False)
        else:
            self._take(self._entries_of(array, copy), copy)

    def _entries_of(self, tensor: Any, copy: bool) -> np.ndarray:
        """Reads a tensor, which is watched unless it is copied; one that stays on a GPU becomes `tensor`."""
        check_plain_tensor(tensor, self.name, followed=True)
        if tensor.is_floating_point() and not tensor.is_inference():  # which nothing ever flows to
            self.origin, self.version = tensor, tensor._version
        if not copy:
            self.watched, self.place = tensor, _place(tensor)
        with plainly():
            tensor = tensor.detach()
        if copy or tensor.device.type == "cpu":
            return _entries(tensor, self.name)
        self.tensor = tensor if tensor.ndim else tensor.reshape(1)
        return np.broadcast_to(np.zeros((), _torch_dtype(tensor, self.name)), self.tensor.shape)

    def _take(self, array: np.ndarray, copy: bool) -> None:
        """Checks entries, and keeps them in a dtype that kernels look up: a read-only copy, or where they lie."""
        name = self.name
        if not array.ndim and not copy:
            array = array.reshape(1)
        if not 1 <= array.ndim <= 4:
            got = f"shape {array.shape}" if array.ndim else shown(array.item())
            raise ArgumentError(f"{name}: expected 1 to 4 dimensions; got {got}.")
        self.kind = kind_of(array.dtype)
        if self.kind is None:
            raise _wrong_dtype(array, name)
        if not array.dtype.isnative:
            if not copy:
                raise ArgumentTypeError(
                    f"{name}: expected native byte order; got {array.dtype.str}. Use "
                    f"{name}.astype({array.dtype.name!r})."
                )
            array = array.astype(array.dtype.newbyteorder("="))
        if array.dtype.name == "bfloat16":
            array = array.astype(np.float32)
        elif array.dtype == np.uint64 and array.size and array.max() > INT_MAX:
            raise ArgumentError(f"{name}: expected integers that int64 can hold; got {array.max()}.")
        if copy:
            array = np.array(array, order="C")
            array.flags.writeable = False
        self.array = array

    @property
    def source(self) -> Any:
        """Returns `origin` if autograd or a graph follows it now; it may have been frozen when the table was made."""
        x = self.origin
        return x if x is None or x.requires_grad or has_tangent(x) or is_traced(x) else None

    def is_left_alone(self) -> bool:
        """Returns whether autograd does not record it now."""
        source = self.source
        return source is None or not (
            sys.modules["torch"].is_grad_enabled() or has_tangent(source) or is_traced(source)
        )

    def may_be_kept(self) -> bool:
        """Returns whether a memo may hold it: autograd does not record it now, and its tensor holds no graph."""
        return self.origin is None or (self.origin.is_leaf and self.is_left_alone())

    @property
    def given(self) -> Any:
        """Returns the tensor that a graph's operation takes for it: one that is followed, or is read where it lies."""
        source = self.source
        return self.watched if source is None and is_tensor(self.watched) else source

    def is_stale(self) -> bool:
        """Returns whether its tensor has other numbers by now: a few are compared, many are known by their version."""
        source = self.source
        if source is None or is_traced(source):
            return False
        if self.array.size > _FEW:
            return source._version != self.version
        now = _entries(source, self.name).reshape(self.array.shape)
        return not np.array_equal(now.astype(np.float64), self.array.astype(np.float64), equal_nan=True)

    def reshaped(self, shape: tuple[int, ...]) -> None:
        """Takes another shape with leading ones."""
        self.array = (
            self.array.reshape(shape)
            if self.array.flags.c_contiguous
            else self.array[(None,) * (len(shape) - self.array.ndim)]
        )
        if self.tensor is not None:
            self.tensor = self.tensor[(None,) * (len(shape) - self.tensor.ndim)]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype_name(self) -> str:
        """The dtype of the entries as they lie in memory."""
        return self.array.dtype.name if self.tensor is None else str(self.tensor.dtype).removeprefix("torch.")

    @property
    def last_is_one(self) -> bool:
        """Returns whether entries of the last dimension are contiguous."""
        if self.tensor is not None:
            return self.tensor.stride()[-1] == 1
        return self.array.strides[-1] == self.array.itemsize

    @property
    def is_own(self) -> bool:
        """Returns whether its entries are a copy, which nobody changes. An array that was captured may change whatever
        its flags say: it may be a read-only view of another.
        """
        return self.watched is None

    def read_again(self) -> None:
        """Reads again what others hold: where it lies, or the numbers of a widened bfloat16 as they are now.

        Raises ArgumentError where a tensor lies elsewhere by now.
        """
        if self.place is not None and self.place != _place(self.watched):
            raise ArgumentError(
                f"{self.name}: expected the tensor's memory, shape and strides as they were when the function was "
                "traced; they are others by now (set_, resize_, t_, .data = …). Change its numbers in place, or trace "
                "the function anew."
            )
        is_widened = self.watched is not None and self.tensor is None and str(self.watched.dtype).endswith("bfloat16")
        if is_widened and self.array.flags.writeable:  # one that is broadcast was read for this very call
            self.array[...] = _entries(self.watched, self.name).reshape(self.array.shape)

    def release(self) -> None:
        """Forgets where the entries lie, once a call that was prepared has its own addresses of them."""
        self.array = np.broadcast_to(np.zeros((), self.array.dtype), self.array.shape)
        self.watched, self.place, self.origin = _RELEASED, None, None

    def known_ends(self) -> tuple[int, int] | None:
        """Least and greatest entry of integers that stay what they are."""
        if self.kind not in ("bool", "int") or not self.array.size or self.tensor is not None or not self.is_own:
            return None
        return self.ends()

    def host(self) -> np.ndarray:
        """The entries, wherever they lie."""
        return self.array if self.tensor is None else _entries(self.tensor, self.name)

    def __getitem__(self, index: Any) -> Any:
        index = as_index(index)
        if len(index) + 1 == self.array.ndim:
            return self._row(index)
        if len(index) < self.array.ndim:
            return TableRows(self, index)
        if len(index) > self.array.ndim:
            raise wrong_count(self, index)
        for at, (x, n) in enumerate(zip(index, self.array.shape, strict=True)):
            if isinstance(x, numbers.Integral) and not 0 <= int(x) < n:
                raise ExpressionError(
                    f"{self.name}: expected index {at + 1} from 0 to {n - 1}; got {shown(x)} (shape "
                    f"{self.array.shape})."
                )
        constant = all([isinstance(x, numbers.Integral) and not isinstance(x, (bool, np.bool_)) for x in index])
        learned = self.kind in ("float", "double") and LOOKUP.get() is not None  # of what may be asked for its gradient
        if constant and not learned and self.tensor is self.origin is None:
            return self.array[tuple(int(x) for x in index)].item()
        nodes = tuple(node_of(x) for x in index)
        for at, x in enumerate(nodes):
            if x.kind != "int":
                raise ExpressionError(
                    f"{self.name}: expected an integer as index {at + 1}; got {x.kind}. Use sl.cast(x, int)."
                )
        entry = Node("table", str(self.kind), nodes, self)
        return Symbol(convert(entry, "float") if constant and self.origin is None else entry)  # as a number is

    def _row(self, index: tuple[Any, ...]) -> Row:
        """Returns a row that waits for its last index: table[b][i] is table[b, i]."""

        def at(last: Any) -> Any:
            return self[(*index, *as_index(last))]

        count = self.array.shape[-1]
        return Row(by_name, lambda: [at(n) for n in range(count)], count, self.name, at)

    def ends(self) -> tuple[int, int]:
        """Least and greatest entry of an integer or bool table that has any."""
        if self.array.dtype == bool:
            return 0, 1
        if self._ends is None or not self.is_own:
            array = self.host()
            self._ends = int(array.min()), int(array.max())
        return self._ends

    def __repr__(self) -> str:
        return f"table({self.name}, {self.array.dtype.name}{list(self.array.shape)})"


class TableRows:
    """A table with some of its indices, which waits for two or more others: table[b][h][i] is table[b, h, i]."""

    __slots__ = ("index", "table")

    def __init__(self, table: Table, index: tuple[Any, ...]) -> None:
        self.table, self.index = table, index

    def __getitem__(self, index: Any) -> Any:
        return self.table[(*self.index, *as_index(index))]

    def __len__(self) -> int:
        return self.table.shape[len(self.index)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[n] for n in range(len(self)))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        """torch.dot(table[b, i], table[b, j]) …"""
        raise foreign.unknown("torch", function)

    def _refused(self, *_: Any) -> Any:
        raise wrong_count(self.table, self.index)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refused
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _refused
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __bool__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refused
    __hash__ = None  # type: ignore[assignment]


def as_index(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def wrong_count(table: Table, index: tuple[Any, ...]) -> ExpressionError:
    dims = table.array.ndim
    return ExpressionError(f"{table.name}: expected {dims} ind{'ex' if dims == 1 else 'ices'}; got {len(index)}.")


def _place(x: Any) -> tuple[Any, ...]:
    """Returns a key of the place where a tensor's numbers are."""
    return x.data_ptr(), x.untyped_storage().nbytes(), x.dtype, tuple(x.shape), x.stride()


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Leaves torch.func's transforms for a while: they wrap what is made inside, of tensors that are none of theirs."""
    if TORCH.peek_interpreter_stack() is None:
        yield
        return
    with TORCH.temporarily_clear_interpreter_stack():
        yield


def _entries(x: Any, name: str) -> np.ndarray:
    """Returns an array, a tensor or a list as NumPy reads it."""
    if is_masked(x):
        raise ArgumentTypeError(
            f"{name}: expected an array without a mask of its own; got {type(x).__name__}. Use {name}.filled(…)."
        )
    try:
        if is_tensor(x):
            with plainly():
                x = x.detach().cpu()
                return x.float().numpy() if str(x.dtype) == "torch.bfloat16" else x.numpy()
        return np.asarray(x)
    except Exception as error:  # lists of different lengths, quantised tensors, another library's code
        pass_on(error)
        raise ArgumentTypeError(f"{name}: expected an array that NumPy can read; got {shown(x)} ({error}).") from error


def _torch_dtype(x: Any, name: str) -> Any:
    name_of = str(x.dtype).removeprefix("torch.")
    try:
        return np.float32 if name_of == "bfloat16" else np.dtype(name_of)
    except TypeError:
        raise _wrong_dtype(x, name) from None


def _wrong_dtype(x: Any, name: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"{name}: expected bool, integers or floats of up to 64 bits; got dtype {x.dtype}.")


def table(array: Any, name: str = "table") -> Table:
    check_outside(name if isinstance(name, str) else "table", "sl.table")
    return Table(array, name)


table.__doc__ = Table.__doc__


def check_dense(name: str, x: Any) -> None:
    """Raises unless a mask or a score that is no expression is an array."""
    if is_tensor(x) or isinstance(x, Table) or has(x, name, "dtype", "shape"):
        return
    such, ours = "sl.softcap(30.0)", "A factor of scores is scale="
    if name == "mask":
        such, ours = "sl.causal()", "Causality is causal=True"
    plain = isinstance(x, (bool, int, float)) or (name == "mask" and isinstance(x, str))
    way = f" {ours}." if plain else of_masks(name, x)
    if name == "mask" and type(x).__name__ == "BlockMask":
        way = " Give its function, mask=block_mask.mask_mod, beside q_start=0."
    raise ArgumentTypeError(
        f"{name}: expected a function, a pattern such as {such}, or an array; got {type(x).__name__}.{way}"
    )
