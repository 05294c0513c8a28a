"""Tables: arrays that masks and scores look up."""

from __future__ import annotations

import contextlib
import numbers
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays import torch_tensors
from ..arrays.array import is_masked
from ..arrays.dlpack import has
from ..arrays.torch_tensors import check_plain_tensor, has_tangent, in_grad_mode, is_tensor, is_traced, view_of
from ..errors import ArgumentError, ArgumentTypeError, ExpressionError, UnsupportedError, pass_on, shown
from ..errors.advice import of_masks
from ..host.graph_breaks import check_outside
from ..host.insides import TORCH
from . import foreign
from .operations import INT_MAX
from .rows import Row
from .symbols import LOOKUP, Symbol, by_name, node_of
from .tree import Node, convert, kind_of

_RELEASED: Any = object()  # in place of an array


class _Bound(NamedTuple):
    """Where a table's entries lie."""

    array: np.ndarray  # the entries; of a tensor that stays on a GPU its shape and dtype, and no values
    tensor: Any = None  # that tensor, detached
    place: Any = None  # of a tensor that is read where it lies: _place() when it was looked at
    is_widened: bool = False  # the entries are a float32 copy of bfloat16 that others may change

    def reshaped(self, shape: tuple[int, ...]) -> _Bound:
        """Returns the same entries in another shape with leading ones."""
        array, tensor = self.array, self.tensor
        array = array.reshape(shape) if array.flags.c_contiguous else array[(None,) * (len(shape) - array.ndim)]
        if tensor is not None:
            tensor = tensor[(None,) * (len(shape) - tensor.ndim)]
        return self._replace(array=array, tensor=tensor)


class Table:
    """Table that masks and scores look up: `t = sl.table(ids)`, then `t[j]` inside a function.

    Args:
        array: 1 to 4 dimensions of bool, integers, float16, bfloat16, float32 or float64. A NumPy array or a list is
            copied: later changes have no effect. A PyTorch tensor is read where it lies, whenever the table is used:
            later changes count (an optimizer's step, load_state_dict, `.data = …`), and if it requires grad then, its
            gradient comes from speedlight.torch.attention(). For a copy of a tensor give tensor.detach().clone().
            attention_backward(grads=(t,)) returns its gradient. A tensor lies on q's device.
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

    def __init__(self, array: Any, name: str = "table", *, copy: bool | None = None) -> None:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"name: expected a string; got {type(name).__name__}.")
        copy = not is_tensor(array) if copy is None else copy
        self.name = name
        self.origin: Any = None  # a tensor of floats that the entries are the numbers of, whether followed or not
        self.watched: Any = None  # the caller's tensor or array, whose memory is looked up; None: a copy is
        self.captured: Any = None  # the array or tensor that a function captured; `watched` may be a view of it
        self.copies: dict[str, Any] = {}  # by device
        self.of_items = False  # whether it has to have a row for each item of the batch
        self.of_keys = False  # … and that an entry for each key
        self.heads_axis: int | None = None  # the dimension that has to have an entry for each query head
        self.way = ""  # out of an index beyond it, where a pattern knows better than the rule
        self._ends: Any = None
        self._bound: _Bound
        if not is_tensor(array):
            self.watched = None if copy else array
            self._bound = self._take(_entries(array, name), copy)
        elif is_traced(array):
            self.origin = array  # ones stand for its numbers
            ones = np.broadcast_to(np.ones((), _torch_dtype(array, name)), tuple(map(int, array.shape)))
            self._bound = self._take(ones, False)
        else:
            check_plain_tensor(array, name, followed=True)
            if copy:
                self._bound = self._take(_entries(array, name), True)
            else:
                self.watched = array
                self._bound = self._read_tensor()
                if array.is_floating_point() and not array.is_inference():  # which nothing ever flows to
                    self.origin = array

    def _read_tensor(self) -> _Bound:
        """Reads where the watched tensor lies; a tensor on a GPU stays there."""
        x = self.watched
        place = _place(x)
        if x.device.type == "cpu":
            entries = view_of(x) if _is_of_numpy(x) else _entries(x, self.name)
            return self._take(entries, False)._replace(place=place)
        with plainly():
            there = x.detach()
        there = there if there.ndim else there.reshape(1)
        shape_alone = np.broadcast_to(np.zeros((), _torch_dtype(there, self.name)), there.shape)
        return self._take(shape_alone, False)._replace(place=place, tensor=there)

    def _take(self, array: np.ndarray, copy: bool) -> _Bound:
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
        is_widened = not copy and str(getattr(self.watched, "dtype", "")).endswith("bfloat16")
        if array.dtype.name == "bfloat16":
            array = array.astype(np.float32)
        elif array.dtype == np.uint64 and array.size and array.max() > INT_MAX:
            raise ArgumentError(f"{name}: expected integers that int64 can hold; got {array.max()}.")
        if copy:
            array = np.array(array, order="C")
            array.flags.writeable = False
        return _Bound(array, is_widened=is_widened)

    @property
    def array(self) -> np.ndarray:
        """The entries as they are now; of a tensor that stays on a GPU their shape and dtype, and no values.

        Raises ArgumentError if a tensor that is read where it lies has another shape or dtype by now.
        """
        return self._follow().array

    @property
    def tensor(self) -> Any:
        """The tensor itself, detached, where it stays on a GPU; else None."""
        return self._follow().tensor

    def _follow(self) -> _Bound:
        """Finds the entries again if they have moved, and reads the numbers of a widened bfloat16 anew.

        Everything that looks at entries comes through here: a table of a tensor cannot be stale.
        """
        bound, x = self._bound, self.watched
        if bound.place is not None and _place(x) != bound.place:
            bound = self._move(bound)
        if bound.is_widened:
            _widen(x, bound.array)
        return bound

    def _move(self, old: _Bound) -> _Bound:
        """Reads where a tensor lies that was moved: `.data = …`, set_(), a module's to()."""
        x, name = self.watched, self.name
        check_plain_tensor(x, name, followed=True)
        new = self._read_tensor()
        missing = old.array.ndim - new.array.ndim  # leading ones that reshaped() added
        new = new.reshaped((1,) * missing + new.array.shape)
        was, now = ((x.array.shape, str(x.place[_DTYPE]).removeprefix("torch.")) for x in (old, new))
        if was != now:
            raise ArgumentError(
                f"{name}: expected the shape {was[0]} and the dtype {was[1]} that its tensor had when the table was "
                f"made; got {now[0]} and {now[1]}. Make the table, or trace the function, anew."
            )
        if new.is_widened:
            new = new._replace(array=old.array)  # prepared calls know the widened copy by its address
        self._bound = new
        return new

    def place(self) -> Any:
        """Returns what a prepared call depends on beside the entries' structure: where they lie, and the least and
        greatest of integers. None of a copy.
        """
        if self.watched is None:
            return None
        bound = self._follow()
        if self.kind == "int" and bound.tensor is None and bound.array.size:
            return bound.place, self.ends()
        return bound.place or ()

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

    def reshaped(self, shape: tuple[int, ...]) -> None:
        """Takes another shape with leading ones."""
        self._bound = self._bound.reshaped(shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._bound.array.shape

    @property
    def dtype_name(self) -> str:
        """The dtype of the entries as they lie in memory."""
        array, tensor, *_ = self._bound
        return array.dtype.name if tensor is None else str(tensor.dtype).removeprefix("torch.")

    @property
    def last_is_one(self) -> bool:
        """Returns whether entries of the last dimension are contiguous."""
        array, tensor, *_ = self._follow()
        if tensor is not None:
            return tensor.stride()[-1] == 1
        return array.strides[-1] == array.itemsize

    @property
    def is_own(self) -> bool:
        """Returns whether its entries are a copy, which nobody changes. An array that was captured may change whatever
        its flags say: it may be a read-only view of another.
        """
        return self.watched is None

    @property
    def identity(self) -> int:
        """The id of what is looked up: of an own array, or of the caller's."""
        return id(self._bound.array if self.watched is None else self.watched)

    @property
    def held_bytes(self) -> int:
        """Bytes that it keeps alive: those of its entries, if it has not released them."""
        return 0 if self.watched is _RELEASED else self._bound.array.nbytes

    def release(self) -> None:
        """Forgets where the entries lie, once a call that was prepared has its own addresses of them."""
        array = self._bound.array
        self._bound = _Bound(np.broadcast_to(np.zeros((), array.dtype), array.shape))
        self.watched, self.origin = _RELEASED, None

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns the caller's array itself, or the copy of it: addresses and views are derived from it again, so that
        a table that is copied or pickled with its array reads the array's copy.
        """
        flags = {name: getattr(self, name) for name in ("of_items", "of_keys", "heads_axis", "way")}
        if self.origin is not None and is_traced(self.origin):
            return Table, (self.origin, self.name), flags
        if self.is_own:
            return Table, (self.array, self.name), flags
        return _table_of_view, (_View(self.name, self.watched, self.captured), self.shape, self.name), flags

    def known_ends(self) -> tuple[int, int] | None:
        """Least and greatest entry of integers that stay what they are."""
        if self.kind not in ("bool", "int") or not self.is_own or not self.array.size:
            return None
        return self.ends()

    def host(self) -> np.ndarray:
        """The entries, wherever they lie."""
        array, tensor, *_ = self._follow()
        return array if tensor is None else _entries(tensor, self.name)

    def __getitem__(self, index: Any) -> Any:
        index = as_index(index)
        if len(index) + 1 == len(self.shape):
            return self._row(index)
        if len(index) < len(self.shape):
            return TableRows(self, index)
        if len(index) > len(self.shape):
            raise wrong_count(self, index)
        for at, (x, n) in enumerate(zip(index, self.shape, strict=True)):
            if isinstance(x, numbers.Integral) and not 0 <= int(x) < n:
                raise ExpressionError(
                    f"{self.name}: expected index {at + 1} from 0 to {n - 1}; got {shown(x)} (shape {self.shape})."
                )
        constant = all([isinstance(x, numbers.Integral) and not isinstance(x, (bool, np.bool_)) for x in index])
        learned = self.kind in ("float", "double") and LOOKUP.get() is not None  # of what may be asked for its gradient
        if constant and not learned and self.is_own and self.origin is None:
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

        count = self.shape[-1]
        return Row(by_name, lambda: [at(n) for n in range(count)], count, self.name, at)

    def ends(self) -> tuple[int, int]:
        """Least and greatest entry of an integer or bool table that has any."""
        if self.kind == "bool":
            return 0, 1
        if self._ends is not None and self.is_own:
            return self._ends
        array = self.host()
        low, high = int(array.min()), int(array.max())
        if high > INT_MAX:
            raise ArgumentError(f"{self.name}: expected integers that int64 can hold; got {high}.")
        self._ends = low, high
        return self._ends

    def __repr__(self) -> str:
        return f"table({self.name}, {self._bound.array.dtype.name}{list(self.shape)})"


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
    dims = len(table.shape)
    return ExpressionError(f"{table.name}: expected {dims} ind{'ex' if dims == 1 else 'ices'}; got {len(index)}.")


class _View:
    """An array or a tensor as the part of another that it is; copying both keeps it a part of the other's copy.

    Args:
        whole: the other; None if it is not known.
    """

    __slots__ = ("at", "is_followed", "shape", "strides", "type", "whole")

    def __init__(self, name: str, x: Any, whole: Any) -> None:
        is_of_torch = is_tensor(x)
        if is_of_torch and not x.is_leaf:
            if x._base is None or not x._base.is_leaf or not x._base.requires_grad:
                raise UnsupportedError(
                    f"{name}: expected a leaf of the graph, or a view of one, to copy or pickle the function; got the "
                    f"result of {type(x.grad_fn).__name__}. Trace the function again where the copy is wanted."
                )
            whole = x._base
        if whole is None or whole is x:
            self.whole, self.shape = x, None
            return
        self.whole, self.type, self.shape = whole, x.dtype, tuple(x.shape)
        if is_of_torch:
            self.is_followed, self.strides = x.requires_grad, x.stride()
            self.at = x.storage_offset() - whole.storage_offset()
            keeps_order = whole.stride() == sys.modules["torch"].empty_like(whole, device="meta").stride()
        else:
            self.strides, self.at = x.strides, x.ctypes.data - whole.ctypes.data
            if not self.at and (self.type, self.shape, self.strides) == (whole.dtype, whole.shape, whole.strides):
                self.shape = None
                return
            keeps_order = whole.flags.forc
        if not keeps_order:
            raise UnsupportedError(
                f"{name}: expected a contiguous array to copy or pickle a function that looks up a part of it; got "
                f"strides {whole.stride() if is_of_torch else whole.strides}. Let the function capture a contiguous "
                "copy."
            )

    def made(self) -> Any:
        """Returns the part."""
        whole = self.whole
        if self.shape is None:
            return whole
        if not is_tensor(whole):
            memory = whole.ravel(order="K")  # a view: the array is contiguous
            return np.ndarray(self.shape, self.type, memory, self.at, self.strides)
        make = in_grad_mode(self.is_followed)(whole.as_strided)
        return make(self.shape, self.strides, whole.storage_offset() + self.at)


def _table_of_view(view: _View, shape: tuple[int, ...], name: str) -> Table:
    """Returns a table that reads an array where it lies."""
    table = Table(view.made(), name, copy=False)
    table.captured = view.whole
    if table.shape != shape:
        table.reshaped(shape)
    return table


def _is_of_numpy(x: Any) -> bool:
    """Returns whether a tensor's dtype is NumPy's own, and none that ml_dtypes adds: bfloat16, float8 …"""
    name = str(x.dtype).removeprefix("torch.")
    return name in np.sctypeDict and np.dtype(name).isbuiltin == 1


_DTYPE = 2  # of a place


def _place(x: Any) -> tuple[Any, ...]:
    """Returns a key of the place where a tensor's numbers are."""
    return torch_tensors.read_address(x), x.untyped_storage().nbytes(), x.dtype, x.shape, x.stride()


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Leaves torch.func's transforms for a while: they wrap what is made inside, of tensors that are none of theirs."""
    if TORCH.peek_interpreter_stack() is None:
        yield
        return
    with TORCH.temporarily_clear_interpreter_stack():
        yield


def _widen(x: Any, into: np.ndarray) -> None:
    """Stores the numbers of a bfloat16 array or tensor as float32, in the shape that `into` has."""
    if not is_tensor(x):
        into[...] = x.reshape(into.shape)
        return
    with plainly():
        sys.modules["torch"].from_numpy(into).copy_(x.detach().reshape(into.shape))


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
