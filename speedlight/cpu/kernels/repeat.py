"""Three functions for CPython, as LLVM, with which a prepared call is repeated: `read`, `run` and `repeat`.

Python of some 30 functions takes 15 µs where it is warm and 100 µs between the layers of a model, whose weights have
emptied the caches meanwhile.

`read(rows, q, k, v, …)` looks at arrays of NumPy, and at tensors of PyTorch while grad mode is off. It says what each
is, and where it lies, and leaves all others to read_plainly() of problem/prepared.py. It knows three things: CPython's
documented functions; DLPack's C exchange API, which a library's type hands out; and PyTorch's own Python functions,
which it calls for what DLPack does not say. Nobody's memory is read.

`run(call, places, …)` writes a prepared call's arguments and runs its kernel. Addresses come from the caller, which
has checked them. Other threads of Python go on meanwhile.

`repeat(key's parts, …, rows, q, k, v, …)` does both at once for tensors: it reads, asks the memo of prepared calls, and
runs what it found. Python goes on from read()'s answer where that call is not known, or not for machine code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llvmlite import ir

from ...arrays.memory import DIMS
from ...expressions.program import LENGTHS, STRIDES
from ...host.machine import Isa
from ...host.memo import USED, VALUE
from ...problem.prepared import FEW_ROWS
from ...problem.problem import SPAN
from ..language.vector import I8, I32, I64, PTR, VOID, Function, Module, Value
from ..memory.records import (
    APPEND,
    ARRAY,
    CALL,
    ITEM,
    KEYS,
    LIMIT,
    NEW,
    NUMBERS,
    PLACE,
    READER,
    REPEAT,
    RUN,
    SCALED,
    SCALES,
    SCRATCH,
    TABLED,
    TABLES,
    TEAM,
    TENSORS,
    WRONG,
)  # fmt: skip
from .task import call_at

_CPU = 1  # DLPack's kDLCPU
_DLTENSOR = 48  # bytes: data, device, ndim, dtype, shape, strides, byte_offset
_BUFFER = 80  # bytes of CPython's Py_buffer: buf, obj, len, itemsize, readonly, ndim, format, shape, strides …
_BUFFER_FLAGS = 0x1C  # PyBUF_RECORDS_RO: strides and a format, written to or not
_NUMPY = 1 << 32  # marks the letter of a format, where a tensor has DLPack's dtype
_CALL_OUT = 3  # of the words that are new for each call, the result's address
_OF_NUMPY, _TENSOR = 1, 2  # what an array is
_LINE = 64  # bytes of a cache line
_EQUAL = 2  # CPython's Py_EQ
# the arguments of `repeat`, before the arrays; the last is read()'s own
_REPEATED = ("call", "options", "machine", "place", "seed", "store", "lengths", "most", "rows")
KEY_PARTS = len(_REPEATED) - 1  # arguments of `repeat` before those of `read`

# CPython's documented functions that are called
PYTHON = (
    "PyBool_FromLong",
    "PyBuffer_Release",
    "PyBytes_AsString",
    "PyBytes_FromStringAndSize",
    "PyCapsule_GetPointer",
    "PyDict_GetItem",
    "PyDict_GetItemWithError",
    "PyErr_Clear",
    "PyErr_ExceptionMatches",
    "PyErr_NoMemory",
    "PyErr_Occurred",
    "PyEval_RestoreThread",
    "PyEval_SaveThread",
    "PyIter_Next",
    "PyList_GetItem",
    "PyList_New",
    "PyList_SetItem",
    "PyList_Size",
    "PyLong_AsLongLong",
    "PyLong_AsUnsignedLongLong",
    "PyLong_AsVoidPtr",
    "PyLong_FromLongLong",
    "PyMem_RawFree",
    "PyMem_RawMalloc",
    "PyObject_CallNoArgs",
    "PyObject_CallOneArg",
    "PyObject_GetAttr",
    "PyObject_GetBuffer",
    "PyObject_RichCompareBool",
    "PyObject_Size",
    "PyObject_Type",
    "PyObject_Vectorcall",
    "PyTuple_GetItem",
    "PyTuple_New",
    "PyTuple_SetItem",
    "Py_DecRef",
    "Py_IncRef",
)


@dataclass(frozen=True, slots=True)
class RepeatShape:
    """The specialisation of the module: an architecture, by its least vector unit."""

    isa: Isa
    kind: ClassVar[str] = "repeat"

    @property
    def stem(self) -> str:
        return f"repeat_{self.isa.arch}"


def repeat_module(s: RepeatShape, symbol: str) -> Module:
    """Writes the functions `<symbol>_read`, `<symbol>` and `<symbol>_repeat`."""
    module = Module(symbol)
    look, run = _look_function(module), _run_function(module)
    _write_read(module, f"{symbol}_read", look)
    _write_run(module, symbol, run)
    _write_repeat(module, f"{symbol}_repeat", look, run)
    return module


class _Caller:
    """A function that calls CPython's, and returns an object of Python's; `held`: the address of a READER."""

    def __init__(self, k: Function, held: Value) -> None:
        self.k, self.held = k, held

    def known(self, name: str) -> Value:
        return self.k.load(PTR, self.held, READER.offset(name))

    def is_none(self, x: Value) -> Value:
        return _is_same(self.k, x, self.known("none"))

    def drop(self, *objects: Value) -> None:
        """Gives references back."""
        for x in objects:
            self.call("Py_DecRef", VOID, x)

    def leave_if_null(self, x: Value, *objects: Value) -> None:
        """Ends the function with what Python raised, and gives references back, where `x` is null."""
        with self.k.when(_is_null(self.k, x)):
            self.drop(*objects)
            self.k.b.ret(self.null().x)

    def tuple_of(self, *objects: Value) -> Value:
        """Returns a tuple, which takes over the references; ends the function without memory."""
        made = self.call("PyTuple_New", PTR, self.k.i64(len(objects)))
        self.leave_if_null(made, *objects)
        for n, x in enumerate(objects):
            self.call("PyTuple_SetItem", I32, made, self.k.i64(n), x)
        return made

    def call(self, name: str, returns: ir.Type, *arguments: Value) -> Value:
        """Calls one of CPython's documented functions."""
        return call_python(self.k, name, returns, *arguments)

    def null(self) -> Value:
        return Value(self.k, ir.Constant(PTR, None))

    def clear_refusal(self) -> None:
        """Forgets what a library raised for an array that it does not hand out; ends the method with any other error.

        A mode of PyTorch's may be interrupted.
        """
        k = self.k
        with k.when(_is_null(k, self.call("PyErr_Occurred", PTR)).equals(0)):
            refusals = k.load(PTR, self.held, READER.offset("refusals"))
            with k.when(self.call("PyErr_ExceptionMatches", I32, refusals).equals(0)):
                k.b.ret(self.null().x)
            self.call("PyErr_Clear", VOID)

    def none(self) -> Value:
        """Returns a new reference to None."""
        none = self.known("none")
        self.call("Py_IncRef", VOID, none)
        return none


class _Method(_Caller):
    """A function that CPython calls with `self`, a capsule that holds a READER's address, and its arguments."""

    def __init__(self, module: Module, symbol: str) -> None:
        k = module.function(symbol, {"self": PTR, "arguments": PTR, "count": I64}, PTR, public=True)
        super().__init__(k, Value(k, ir.Constant(PTR, None)))
        self.held = self.call("PyCapsule_GetPointer", PTR, k.p["self"], self.null())

    def argument(self, n: int) -> Value:
        return self.k.load(PTR, self.k.p["arguments"], 8 * n)

    def integer(self, n: int) -> Value:
        return self.call("PyLong_AsLongLong", I64, self.argument(n))


def call_python(k: Function, name: str, returns: ir.Type, *arguments: Value) -> Value:
    function = k.module.declare(name, returns, [x.type for x in arguments])
    return k.call(function, *arguments)


def _is_null(k: Function, pointer: Value) -> Value:
    return Value(k, k.b.icmp_unsigned("==", pointer.x, ir.Constant(PTR, None)))


def _is_same(k: Function, a: Value, b: Value) -> Value:
    return Value(k, k.b.icmp_unsigned("==", a.x, b.x))


# --- read


def _look_function(module: Module) -> Any:
    """look(held, rows, arrays, count, layout, places): writes a layout and places, as read_plainly() tells them apart.

    Returns whose the first array is; 0 where Python must read, which may have raised.
    """
    array = _Arrays(module).write()
    write_growth = _growth_function(module)
    names = {"held": PTR, "rows": I64, "arrays": PTR, "count": I64, "layout": PTR, "places": PTR}
    k = module.function("look", names, I64, special=True)
    caller = _Caller(k, k.p["held"])
    layout, places, count = k.p["layout"], k.p["places"], k.p["count"]
    good = k.variable(k.zext((count >= 1) & (count <= TENSORS), I64))
    first, has_tensors = k.variable(k.i64(0)), k.variable(k.i64(0))
    with k.range(0, count) as t, k.when(good.get().differs(0)):
        what = k.at(layout, t * ARRAY.bytes + 8)
        given = k.load(PTR, k.p["arrays"], t * 8)
        found = k.call(array, caller.held, given, what, k.at(places, t * PLACE.bytes))
        good.set(found)
        first.set(k.select(t.equals(0), found, first.get()))
        has_tensors.set(has_tensors.get() | k.zext(found.equals(_TENSOR), I64))
    with k.when(good.get().differs(0) & has_tensors.get().differs(0)):
        good.set(_write_questions(caller))
    with k.when(good.get().differs(0)):
        k.store(k.i64(0), layout)
        with k.when((k.p["rows"] > 0) & (count >= 3)):
            k.call(write_growth, k.p["rows"], count, layout)
    return k.finish(k.select(good.get().differs(0), first.get(), k.i64(0)))


class _Reader:
    """The part of a method that looks at its last arguments: `rows`, then the arrays."""

    def __init__(self, method: _Method, look: Any, before: int) -> None:
        """before: the number of arguments before the arrays, the last of them rows."""
        self.method, self.k = method, method.k
        k = self.k
        self.layout = k.buffer(I64, 1 + len(ARRAY.names) * TENSORS)
        self.places = k.buffer(I64, len(PLACE.names) * TENSORS)
        self.arrays = k.at(k.p["arguments"], 8 * before)
        self.count = k.p["count"] - before
        rows = method.integer(before - 1)
        self.first = k.call(look, method.held, rows, self.arrays, self.count, self.layout, self.places)
        with k.when(self.first.equals(0)):
            method.clear_refusal()
            given = k.at(self.arrays, -8), self.count + 1, method.null()
            k.b.ret(method.call("PyObject_Vectorcall", PTR, method.known("plainly"), *given).x)

    def write_layout(self) -> Value:
        """Returns a new object of the layout, the first part of read()'s answer."""
        return self._bytes_of(self.layout, self.count * ARRAY.bytes + 8)

    def write_answer(self, layout: Value) -> Value:
        """Returns read()'s answer, which takes over the layout."""
        places = self._bytes_of(self.places, self.count * PLACE.bytes, layout)
        return self.method.tuple_of(layout, places)

    def _bytes_of(self, buffer: Value, size: Value, *held: Value) -> Value:
        made = self.method.call("PyBytes_FromStringAndSize", PTR, buffer, size)
        self.method.leave_if_null(made, *held)
        return made


def _write_read(module: Module, symbol: str, look: Any) -> None:
    """read(rows, q, k, v, array, …): what read_plainly() of problem/prepared.py does, which it calls for the rest."""
    method = _Method(module, symbol)
    reader = _Reader(method, look, 1)
    method.k.b.ret(reader.write_answer(reader.write_layout()).x)


def _write_questions(caller: _Caller) -> Value:
    """Returns 1 if every question about PyTorch's state has the answer that is expected: of functions without an
    argument, and of the level of forward mode, an entry of a module.
    """
    k, known = caller.k, caller.known
    level = caller.call("PyDict_GetItem", PTR, known("level_of"), known("level"))
    good = k.variable(k.zext(_is_same(k, level, known("no_level")), I64))
    questions = known("questions")
    with k.range(0, k.load(I64, caller.held, READER.offset("question_count"))) as n:
        with k.when(good.get().differs(0)):
            answer = caller.call("PyObject_CallNoArgs", PTR, k.load(PTR, questions, n * 16))
            good.set(_is_answer(k, answer, k.load(PTR, questions, n * 16 + 8)))
    return good.get()


def _is_answer(k: Function, answer: Value, expected: Value) -> Value:
    """Returns 1 if an answer is the one that is expected; gives the answer's reference back."""
    is_same = k.variable(k.i64(0))
    with k.when(_is_null(k, answer).equals(0)):
        same = call_python(k, "PyObject_RichCompareBool", I32, answer, expected, k.const(_EQUAL, I32))
        is_same.set(k.zext(same.equals(1), I64))
        call_python(k, "Py_DecRef", VOID, answer)
    return is_same.get()


class _Arrays:
    """array(held, given, what, place): writes an ARRAY's words and a PLACE's; returns whose it is, or 0."""

    def __init__(self, module: Module) -> None:
        names = ("held", "given", "what", "place")
        self.k = module.function("array", dict.fromkeys(names, PTR), I64, special=True)
        self.held, self.given, self.what, self.place = (self.k.p[x] for x in names)
        self.leave = self.k.f.append_basic_block("leave")

    def write(self) -> Any:
        k = self.k
        kind = call_python(k, "PyObject_Type", PTR, self.given)
        call_python(k, "Py_DecRef", VOID, kind)
        with k.when(_is_same(k, kind, self.known("ndarray"))):
            self.write_numpy()
        self.require(_is_same(k, kind, self.known("tensor")))
        self.write_tensor()
        k.b.position_at_end(self.leave)
        k.b.ret(I64(0))
        return k.f

    def require(self, condition: Value) -> None:
        on = self.k.f.append_basic_block("on")
        self.k.b.cbranch(condition.x, on, self.leave)
        self.k.b.position_at_end(on)

    def known(self, name: str) -> Value:
        return self.k.load(PTR, self.held, READER.offset(name))

    def ask(self, name: str, x: Value) -> Value:
        """Calls one of PyTorch's functions with one argument."""
        return call_python(self.k, "PyObject_CallOneArg", PTR, self.known(name), x)

    def ask_integer(self, name: str, x: Value) -> Value:
        """Returns the number that one of PyTorch's functions says; -1 where it raises."""
        k = self.k
        number, answer = k.variable(k.i64(-1)), self.ask(name, x)
        with k.when(_is_null(k, answer).equals(0)):
            number.set(call_python(k, "PyLong_AsLongLong", I64, answer))
            call_python(k, "Py_DecRef", VOID, answer)
        return number.get()

    def write_words(self, dims: Value, sizes: Value, steps: Value, unit: Value, element: Value) -> Value:
        """Writes sizes and strides, of elements and of bytes, of steps in units; returns the last element's number.

        Requires at most DIMS dimensions, and no empty one.
        """
        k = self.k
        self.require((dims >= 0) & (dims <= DIMS))
        k.store(dims, self.what, ARRAY.offset("dims"))
        last, count = k.variable(k.i64(0)), k.variable(k.i64(1))
        for d in range(DIMS):
            size, step = k.variable(k.i64(0)), k.variable(k.i64(0))
            with k.when(dims > d):
                size.set(k.load(I64, sizes, 8 * d))
                step.set(k.load(I64, steps, 8 * d))
                last.set(last.get() + (size.get() - 1) * step.get())
                count.set(count.get() * size.get())
            k.store(size.get(), self.what, ARRAY.offset(f"size{d}"))
            k.store(step.get() * unit, self.what, ARRAY.offset(f"stride{d}"))
            k.store(size.get(), self.place, PLACE.offset(f"size{d}"))
            k.store(step.get() * element, self.place, PLACE.offset(f"stride{d}"))
        self.require(count.get().differs(0))
        return last.get()

    def write_numpy(self) -> None:
        """Reads an array of NumPy by the buffer protocol; bfloat16 and foreign byte orders are Python's."""
        k = self.k
        view = k.buffer(I64, _BUFFER // 8)
        failed = call_python(k, "PyObject_GetBuffer", I32, self.given, view, k.const(_BUFFER_FLAGS, I32))
        self.require(failed.equals(0))
        address, text = k.load(I64, view), k.load(PTR, view, 40)
        first, second = (k.zext(k.load(I8, text, n), I64) for n in range(2))
        dims = k.zext(k.load(I32, view, 36), I64)
        sizes, steps = k.buffer(I64, DIMS), k.buffer(I64, DIMS)
        few = k.select(dims <= DIMS, dims, k.i64(0))
        with k.range(0, few) as d:
            k.store(k.load(I64, k.load(PTR, view, 48), d * 8), sizes, d * 8)
            k.store(k.load(I64, k.load(PTR, view, 56), d * 8), steps, d * 8)
        call_python(k, "PyBuffer_Release", VOID, view)  # the array itself keeps its memory meanwhile
        self.require(second.equals(0))
        k.store(first | _NUMPY, self.what, ARRAY.offset("dtype"))
        k.store(address, self.place, PLACE.offset("address"))
        self.write_words(dims, sizes, steps, k.i64(1), k.i64(1))
        k.b.ret(I64(_OF_NUMPY))
        k.b.position_at_end(k.f.append_basic_block("tensor"))

    def write_tensor(self) -> None:
        """Reads a tensor on the CPU by the exchange API, and asks PyTorch what that does not say."""
        k, given = self.k, self.given
        self.require(_is_answer(k, self.ask("is_neg", given), self.known("false")).differs(0))
        # before the exchange API, which would give a copy-on-write tensor memory of its own
        self.require(_is_answer(k, self.ask("is_copy_on_write", given), self.known("false")).differs(0))
        found, failed = _write_exchange(k, self.held, given)
        self.require(failed.equals(0))
        address, device, dims = k.load(I64, found), k.load(I32, found, 8), k.zext(k.load(I32, found, 16), I64)
        dtype, steps = k.zext(k.load(I32, found, 20), I64), k.load(PTR, found, 32)
        self.require(device.equals(_CPU) & address.differs(0) & _is_null(k, steps).equals(0))
        element = ((dtype >> 8) & 0xFF) >> 3
        k.store(dtype, self.what, ARRAY.offset("dtype"))
        k.store(address, self.place, PLACE.offset("address"))
        last = self.write_words(dims, k.load(PTR, found, 24), steps, k.i64(1), element)
        # the storage may have been resized
        storage = self.ask("untyped_storage", given)
        self.require(_is_null(k, storage).equals(0))
        size = call_python(k, "PyObject_Size", I64, storage)
        call_python(k, "Py_DecRef", VOID, storage)
        first = self.ask_integer("storage_offset", given)
        self.require((first >= 0) & ((first + last + 1) * element <= size))
        k.b.ret(I64(_TENSOR))


def _growth_function(module: Module) -> Any:
    """growth(rows, tensors, layout): takes the number of keys, and strides of k and v, out of a layout.

    A call of few queries is kept for any number of keys, as a model's next token needs it. The first word says for
    how many spans, and if heads lie inside of a token's row.
    """
    k = module.function("growth", {"rows": I64, "tensors": I64, "layout": PTR}, VOID, special=True)
    layout = k.p["layout"]
    axis = k.p["rows"] & 3
    has_rows = (k.p["rows"] >> 2).differs(0)
    leave = k.f.append_basic_block("leave")

    def require(condition: Value) -> None:
        on = k.f.append_basic_block("on")
        k.b.cbranch(condition.x, on, leave)
        k.b.position_at_end(on)

    def at(t: Value | int, name: str) -> Value:
        return k.at(layout, k.i64(8 + ARRAY.offset(name)) + (t if isinstance(t, Value) else k.i64(t)) * ARRAY.bytes)

    def word(t: Value | int, name: str, index: Value | int = 0) -> Value:
        return k.load(I64, at(t, name), (index if isinstance(index, Value) else k.i64(index)) * 8)

    for t in range(3):
        require(word(t, "dims").equals(4))
    keys, queries = word(1, "size0", axis), word(0, "size0", axis)
    require((queries <= FEW_ROWS) & (keys > 0) & word(2, "size0", axis).equals(keys))
    most = k.select(has_rows & (queries < keys), queries, k.i64(1))
    fits = k.variable(k.i64(1))
    with k.range(3, k.p["tensors"]) as t:
        dims = word(t, "dims")
        last, rows = word(t, "size0", dims - 1), word(t, "size0", dims - 2)
        is_one = (dims > 1) & last.equals(keys) & (keys > 1) & (rows.equals(1) | rows.equals(most))
        fits.set(fits.get() & k.zext(is_one, I64))
    require(fits.get().differs(0))
    head, row = word(1, "stride0", k.i64(3) - axis), word(1, "stride0", axis)
    inside = k.zext((head > 0) & (head < row), I64)
    spans = k.variable(k.i64(1))
    with k.forever() as leave_if:
        leave_if(spans.get() * SPAN >= keys)
        spans.set(spans.get() * 2)
    k.store(spans.get() * 2 + inside, layout)
    for t in (1, 2):
        k.store(k.i64(0), at(t, "size0"), axis * 8)
        for d in range(3):
            k.store(k.i64(0), at(t, f"stride{d}"))
    with k.range(3, k.p["tensors"]) as t:
        last = word(t, "dims") - 1
        k.store(k.i64(0), at(t, "size0"), last * 8)
        with k.range(0, last) as d:
            k.store(k.i64(0), at(t, "stride0"), d * 8)
    k.b.branch(leave)
    k.b.position_at_end(leave)
    return k.finish()


# --- run


def _write_run(module: Module, symbol: str, run: Any) -> None:
    """run(call, places, k, v, like, out, lse, seed, lengths, lists): the result, or False: an index out of range.

    call: address of a REPEAT. places: the second part of read(). k, v: addresses of a cache's keys and values; 0: of
    `places`. like: a tensor like the result, which is made, or None: then it goes to the address `out`, and True is
    returned. lse, seed, lengths, lists: as Prepared.run() has them. Returns None where the call does not fit here:
    where several threads are to run and there is no team, where sequences are others, where empty_like() makes no plain
    tensor.
    """
    method = _Method(module, symbol)
    k = method.k
    call = method.call("PyLong_AsVoidPtr", PTR, method.argument(0))
    places = method.call("PyBytes_AsString", PTR, method.argument(1))
    keys, values, out, lse = (method.integer(n) for n in (2, 3, 5, 6))
    like, lengths, lists = (method.argument(n) for n in (4, 8, 9))
    seed = method.call("PyLong_AsUnsignedLongLong", I64, method.argument(7))
    k.b.ret(k.call(run, method.held, call, places, keys, values, like, out, lse, seed, lengths, lists, k.i64(0)).x)


_RUN = {
    "held": PTR, "call": PTR, "places": PTR, "k": I64, "v": I64, "like": PTR, "out": I64, "lse": I64, "seed": I64,
    "lengths": PTR, "lists": PTR, "new": I64,
}  # fmt: skip


def _run_function(module: Module) -> Any:
    """run(…): what the method of this name does, with its arguments as words. new: to add to each length."""
    pack = _pack_function(module)
    k = module.function("run", _RUN, PTR, special=True)
    caller = _Caller(k, k.p["held"])
    call, like = k.p["call"], k.p["like"]

    def of_call(name: str) -> Value:
        return k.load(I64, call, REPEAT.offset(name))

    room = caller.call("PyMem_RawMalloc", PTR, of_call("room"))
    with k.when(_is_null(k, room)):
        k.b.ret(caller.call("PyErr_NoMemory", PTR).x)
    first = k.pointer((Value(k, k.b.ptrtoint(room.x, I64)) + (_LINE - 1)) & -_LINE)
    threads = k.call(pack, first, *[k.p[name] for name in _PACKED])
    is_alike = caller.is_none(like).equals(0)
    lacks_pytorch = _is_null(k, caller.known("tensor"))
    fits = k.variable(k.zext(threads.differs(0) & (is_alike & lacks_pytorch).equals(0), I64))
    team = k.variable(k.i64(0))
    with k.when(fits.get().differs(0) & (threads > 1)):
        answer = _write_team(caller, threads)
        with k.when(_is_null(k, answer)):  # what Python raised
            caller.call("PyMem_RawFree", VOID, room)
            k.b.ret(caller.null().x)
        team.set(caller.call("PyLong_AsLongLong", I64, answer))
        caller.drop(answer)
        fits.set(k.zext(team.get().differs(0), I64))
    with k.when(fits.get().equals(0)):
        caller.call("PyMem_RawFree", VOID, room)
        k.b.ret(caller.none().x)
    made = k.variable(k.i64(0))
    with k.when(is_alike):
        found, at = _write_result(caller, like, k.p["places"])
        made.set(Value(k, k.b.ptrtoint(found.x, I64)))
        with k.when(at.equals(0)):
            caller.call("PyMem_RawFree", VOID, room)
            caller.leave_if_null(found)
            caller.drop(found)
            caller.clear_refusal()
            k.b.ret(caller.none().x)
        k.store(at, first, of_call("words") + 8 * (CALL.start + _CALL_OUT))
    _write_region(caller, call, first, threads, k.pointer(team.get()))
    wrong = k.variable(k.i64(0))
    with k.range(0, of_call("wrong_count")) as i:
        noted = k.at(first, of_call("wrong") + i * WRONG.bytes)
        wrong.set(wrong.get() | k.load(I64, noted, WRONG.offset("noted")))
    caller.call("PyMem_RawFree", VOID, room)
    result = k.pointer(made.get())
    has_result = made.get().differs(0)
    with k.when(has_result & wrong.get().equals(0)):
        k.b.ret(result.x)
    with k.when(has_result):
        caller.drop(result)
    return k.finish(caller.call("PyBool_FromLong", PTR, k.zext(wrong.get().equals(0), I64)))


def _write_team(caller: _Caller, threads: Value) -> Value:
    """Asks Python for the address of the calling thread's team; returns a number, or null."""
    k = caller.k
    answer = k.variable(k.i64(0))
    count = caller.call("PyLong_FromLongLong", PTR, threads)
    with k.when(_is_null(k, count).equals(0)):
        answer.set(Value(k, k.b.ptrtoint(caller.call("PyObject_CallOneArg", PTR, caller.known("team"), count).x, I64)))
        caller.drop(count)
    return k.pointer(answer.get())


def _write_result(caller: _Caller, like: Value, places: Value) -> tuple[Value, Value]:
    """Makes a tensor like another; returns it, and its address: 0 if it is no plain tensor, or Python raised."""
    k = caller.k
    made = caller.call("PyObject_CallOneArg", PTR, caller.known("empty_like"), like)
    address = k.variable(k.i64(0))
    with k.when(_is_null(k, made).equals(0)):
        kind = caller.call("PyObject_Type", PTR, made)
        caller.drop(kind)
        with k.when(_is_same(k, kind, caller.known("tensor"))):
            found, failed = _write_exchange(k, caller.held, made)
            with k.when(failed.equals(0)):
                address.set(k.load(I64, found) * _lies_as(k, found, places))
    return made, address.get()


def _lies_as(k: Function, tensor: Value, places: Value) -> Value:
    """Returns 1 if a DLTensor has the sizes, and the strides in bytes, of q; a mode could make another tensor."""
    dims, bits = k.zext(k.load(I32, tensor, 16), I64), k.zext(k.load(I8, tensor, 21), I64)
    good = k.variable(k.zext((dims <= DIMS) & k.load(I32, tensor, 8).equals(_CPU), I64))
    for d in range(DIMS):  # q has sizes of 0 where it lacks dimensions
        size, step = k.variable(k.i64(0)), k.variable(k.i64(0))
        with k.when((dims > d) & good.get().differs(0)):
            size.set(k.load(I64, k.load(PTR, tensor, 24), 8 * d))
            step.set(k.load(I64, k.load(PTR, tensor, 32), 8 * d))
        wanted, stride = (k.load(I64, places, 8 * d + PLACE.offset(x)) for x in ("size0", "stride0"))
        is_same = size.get().equals(wanted) & (wanted.equals(1) | (step.get() * (bits >> 3)).equals(stride))
        good.set(good.get() & k.zext(is_same, I64))
    return good.get()


def _write_exchange(k: Function, held: Value, tensor: Value) -> tuple[Value, Value]:
    """Has the exchange API describe a tensor; returns the DLTensor, and 0 if there is one."""
    found = k.buffer(I64, _DLTENSOR // 8)
    kind = ir.FunctionType(I32, [PTR, PTR]).as_pointer()
    exchange = k.b.inttoptr(k.load(I64, held, READER.offset("exchange")).x, kind)
    return found, Value(k, k.b.call(exchange, [tensor.x, found.x]))


def _write_region(caller: _Caller, call: Value, room: Value, threads: Value, team: Value) -> None:
    """Runs the kernel: alone, or as a region, of which there is one at a time; without Python's lock meanwhile."""
    k = caller.k
    region, none, taken = (caller.known(x) for x in ("region", "none", "taken"))
    kernel = k.load(I64, call, REPEAT.offset("kernel"))
    words = k.at(room, k.load(I64, call, REPEAT.offset("words")))
    holder = caller.call("PyList_GetItem", PTR, region, k.i64(0))
    together = (threads > 1) & _is_same(k, holder, none)
    with k.when(together):
        caller.call("Py_IncRef", VOID, taken)
        caller.call("PyList_SetItem", I32, region, k.i64(0), taken)
    state = caller.call("PyEval_SaveThread", PTR)
    put = k.load(I64, call, REPEAT.offset("put_kernel"))
    with k.when(put.differs(0)):
        call_at(k, put, k.at(room, k.load(I64, call, REPEAT.offset("put"))))
    with k.either(together) as (yes, no):
        with yes:
            serve, threads_at, openmp, clock = (k.load(I64, team, TEAM.offset(x)) for x in TEAM.names)
            kind = ir.FunctionType(I64, [PTR, PTR, PTR, I64, PTR, I64]).as_pointer()
            given = k.pointer(threads_at), k.pointer(kernel), words, threads - 1, k.pointer(openmp), clock
            k.b.call(k.b.inttoptr(serve.x, kind), [x.x for x in given])
        with no:
            call_at(k, kernel, words)
    caller.call("PyEval_RestoreThread", VOID, state)
    with k.when(together):
        caller.call("Py_IncRef", VOID, none)
        caller.call("PyList_SetItem", I32, region, k.i64(0), none)


_PACKED = tuple([x for x in _RUN if x not in ("held", "like")])


class _Packer:
    """pack(room, …): writes what a kernel reads, from the prepared call's words; run()'s arguments follow.

    Returns the number of threads, or 0 if the call does not fit.
    """

    def __init__(self, module: Module) -> None:
        names = {"room": PTR} | {name: _RUN[name] for name in _PACKED}
        self.k = module.function("pack", names, I64, special=True)
        self.call, self.room = self.k.p["call"], self.k.p["room"]
        self.words = self.part("words")

    def of_call(self, name: str) -> Value:
        return self.k.load(I64, self.call, REPEAT.offset(name))

    def part(self, name: str) -> Value:
        return self.k.at(self.room, self.of_call(name))

    def is_given(self, name: str) -> Value:
        none = self.k.load(PTR, self.call, REPEAT.offset("none"))
        return Value(self.k, self.k.b.icmp_unsigned("!=", self.k.p[name].x, none.x))

    def address(self, pointer: Value) -> Value:
        return Value(self.k, self.k.b.ptrtoint(pointer.x, I64))

    def put_words(self, place: slice, *values: Value) -> None:
        for n, value in enumerate(values):
            self.k.store(value, self.words, 8 * (place.start + n))

    def copy(self, name: str, to: Value) -> None:
        """Copies one of the call's templates."""
        k = self.k
        source = k.pointer(self.of_call(f"{name}_from"))
        with k.range(0, self.of_call(f"{name}_count")) as i:
            k.store(k.load(I64, source, i * 8), to, i * 8)

    def clear(self, name: str, count: Value, step: int) -> None:
        with self.k.range(0, count) as i:
            self.k.store(self.k.i64(0), self.part(name), i * step)


def _pack_function(module: Module) -> Any:
    """Writes the arguments of a call: its words, items, tables, and the words of the kernel that stores new tokens."""
    p = _Packer(module)
    k = p.k
    places = k.p["places"]

    def place(t: int, name: str) -> Value:
        return k.load(I64, places, t * PLACE.bytes + PLACE.offset(name))

    p.copy("words", p.words)
    p.clear("arrived", p.of_call("arrived_count"), 8)
    p.clear("wrong", p.of_call("wrong_count"), WRONG.bytes)
    k_at, v_at = k.variable(k.p["k"]), k.variable(k.p["v"])
    grows = p.of_call("rows").differs(0)
    items = k.variable(p.of_call("items_from"))
    has_lengths = p.is_given("lengths")
    fits = k.variable(k.i64(1))
    with k.when(grows | has_lengths):
        items.set(p.address(p.part("items")))
        p.copy("items", p.part("items"))
    with k.when(has_lengths):
        fits.set(_write_sequences(p, places, k_at.get(), v_at.get()))
    with k.when(k_at.get().equals(0)):
        k_at.set(place(1, "address"))
        v_at.set(place(2, "address"))
    with k.when(grows):
        _write_growth(p, place)
    with k.when(p.of_call("scaled").differs(0)):
        p.put_words(SCALES, *[place(t, "address") for t in SCALED])
    _write_tables(p, place, grows)
    scratch = p.address(p.part("scratch"))
    arrived = k.select(p.of_call("arrived_count") > 0, p.address(p.part("arrived")), k.i64(0))
    wrong = k.select(p.of_call("wrong_count") > 0, p.address(p.part("wrong")), k.i64(0))
    p.put_words(slice(SCRATCH, None), scratch)
    p.put_words(slice(LIMIT, None), p.of_call("tickets"))
    p.put_words(
        CALL, place(0, "address"), k_at.get(), v_at.get(), k.p["out"], k.p["lse"], p.of_call("counts"),
        items.get(), scratch + p.of_call("partials"), arrived, wrong, k.p["seed"],
    )  # fmt: skip
    total = k.variable(k.i64(0))
    with k.when(grows | has_lengths):
        with k.range(0, p.of_call("items_count") // len(ITEM)) as i:
            total.set(total.get() + k.load(I64, p.part("items"), i * (8 * len(ITEM)) + 8 * ITEM.k_len))
    is_short = (grows | has_lengths) & (total.get() < p.of_call("inline_below"))
    return k.finish(k.select(is_short, k.i64(1), p.of_call("threads")) * fits.get())


def _write_growth(p: _Packer, place: Any) -> None:
    """Writes how many keys there are, in every item, and the strides of k and v."""
    k = p.k
    axis = p.of_call("rows") & 3

    def of_axis(t: int, name: str, first: str, second: str) -> tuple[Value, Value]:
        """Returns a size or stride of heads and of rows."""
        is_heads_first = axis.equals(2)
        a, b = place(t, f"{name}1"), place(t, f"{name}2")
        return k.select(is_heads_first, a, b), k.select(is_heads_first, b, a)

    _, keys = of_axis(1, "size", "head", "row")
    _, queries = of_axis(0, "size", "head", "row")
    strides = []
    for t in (1, 2):
        strides += [*of_axis(t, "stride", "head", "row"), place(t, "stride3")]
    p.put_words(KEYS, *strides)
    steps = [k.select(place(t, "size0") > 1, place(t, "stride0"), k.i64(0)) for t in (1, 2)]
    with k.range(0, p.of_call("items_count") // len(ITEM)) as i:
        item = k.at(p.part("items"), i * (8 * len(ITEM)))
        k.store(keys, item, 8 * ITEM.k_len)
        k.store(keys - queries, item, 8 * ITEM.start)
        k.store(i * steps[0], item, 8 * ITEM.k_at)
        k.store(i * steps[1], item, 8 * ITEM.v_at)


def _number_in(k: Function, numbers: Value, i: Value) -> Value:
    """Returns a number in a list."""
    return call_python(k, "PyLong_AsLongLong", I64, call_python(k, "PyList_GetItem", PTR, numbers, i))


def _write_sequences(p: _Packer, places: Value, k_at: Value, v_at: Value) -> Value:
    """Writes the length of each sequence of a cache or pool, and where its pages are; 0 if there are others."""
    k = p.k
    lengths, lists = k.p["lengths"], k.p["lists"]
    count = p.of_call("items_count") // len(ITEM)
    stores = p.of_call("put_count") > 0
    fits = k.variable(k.zext(call_python(k, "PyList_Size", I64, lengths).equals(count), I64))
    has_lists = p.is_given("lists")
    with k.when(has_lists):
        fits.set(fits.get() & k.zext(call_python(k, "PyList_Size", I64, lists).equals(count), I64))
    put = p.part("put")
    with k.when(stores):
        p.copy("put", put)
        for n, value in enumerate((k.load(I64, places, PLACE.bytes), k.load(I64, places, 2 * PLACE.bytes), k_at, v_at)):
            k.store(value, put, 8 * (APPEND.word("k") + n))
        k.store(p.of_call("put_tickets"), put, 8 * LIMIT)
    with k.when(fits.get().differs(0)), k.range(0, count) as i:
        length = _number_in(k, lengths, i) + k.p["new"]
        item = k.at(p.part("items"), i * (8 * len(ITEM)))
        run = k.at(put, k.i64(8 * len(APPEND.names)) + i * RUN.bytes)
        k.store(length, item, 8 * ITEM.k_len)
        k.store(length - k.load(I64, item, 8 * ITEM.q_len), item, 8 * ITEM.start)
        with k.when(stores):
            k.store(length - k.load(I64, run, RUN.offset("count")), run, RUN.offset("slot"))
        with k.when(has_lists):
            at = _number_in(k, lists, i)
            k.store(at, item, 8 * ITEM.pages)
            with k.when(stores):
                k.store(at, run, RUN.offset("list"))
    with k.when(p.of_call("put_ticket").differs(0)):
        p.put_words(NEW, p.of_call("put_ticket"), p.address(put))
    return fits.get()


def _write_tables(p: _Packer, place: Any, grows: Value) -> None:
    """Writes where the arrays of a mask or score lie, and, over any number of keys, their sizes and strides."""
    k = p.k
    tables = p.part("tables")
    numbers = p.part("numbers")
    has_numbers = p.of_call("numbers_count") > 0
    with k.when(p.of_call("tables_count") > 0):
        p.copy("tables", tables)
        p.put_words(TABLES, p.address(tables))
    with k.when(has_numbers):
        p.copy("numbers", numbers)
        p.put_words(NUMBERS, p.address(numbers))
    for t in TABLED:
        slot = p.of_call(f"slot{t}")
        with k.when(slot >= 0):
            row = k.at(tables, slot * 8)
            k.store(place(t, "address"), row)
            with k.when(grows):
                _write_table_of_keys(p, t, place, row)


def _write_table_of_keys(p: _Packer, t: int, place: Any, row: Value) -> None:
    k = p.k
    dims = p.of_call(f"dims{t}")
    keys = k.variable(place(t, "size3"))
    rows = k.variable(place(t, "size2"))
    for d in range(2, DIMS):
        with k.when(dims.equals(d)):
            keys.set(place(t, f"size{d - 1}"))
            rows.set(place(t, f"size{d - 2}"))
    k.store(keys.get(), row, 8 * (LENGTHS + 3))
    for d in range(DIMS):
        with k.when(dims > d):
            k.store(place(t, f"stride{d}"), row, (k.i64(DIMS + d) - dims) * 8 + 8 * STRIDES)
    firsts = k.pointer(p.of_call(f"firsts{t}"))
    with k.range(0, p.of_call(f"first_count{t}")) as i:
        k.store(keys.get() - rows.get(), p.part("numbers"), k.load(I64, firsts, i * 8) * 8)


# --- repeat


def _write_repeat(module: Module, symbol: str, look: Any, run: Any) -> None:
    """repeat(call, options, machine, place, seed, store, lengths, limits, rows, q, k, v, …): the result of a call.

    call, options, machine, place: of its CallKey. store: addresses of a cache's keys and values, or None. lengths: of
    its sequences so far, or None; then the result is a pair with the lengths afterwards. most: the greatest length, or
    None. rows, and the arrays: read()'s arguments. seed: of dropout.

    Where no such call is prepared, or machine code does not run it, read()'s answer is returned.
    """
    find, grow = _find_function(module), _grow_function(module)
    method = _Method(module, symbol)
    k = method.k
    of = {name: method.argument(n) for n, name in enumerate(_REPEATED)}
    reader = _Reader(method, look, len(_REPEATED))
    layout = reader.write_layout()
    with k.when(reader.first.equals(_TENSOR)):
        record = k.call(find, method.held, *[of[name] for name in ("call", "options", "machine", "place")], layout)
        with k.when(_is_null(k, record)):
            with k.when(_is_null(k, method.call("PyErr_Occurred", PTR)).equals(0)):
                method.drop(layout)
                k.b.ret(method.null().x)
        with k.when(_is_null(k, record).equals(0)):
            _write_repetition(method, reader, record, layout, of, grow, run)
            method.drop(record)
    k.b.ret(reader.write_answer(layout).x)


def _write_repetition(
    method: _Method, reader: _Reader, record: Value, layout: Value, of: dict[str, Value], grow: Any, run: Any
) -> None:
    """Runs the call of a record, and ends the method with its result; goes on where machine code does not run it."""
    k = method.k
    held = record, layout
    address = method.call("PyObject_GetAttr", PTR, record, method.known("address"))
    method.leave_if_null(address, *held)
    call = method.call("PyLong_AsVoidPtr", PTR, address)
    method.drop(address)
    is_alike = k.variable(k.i64(0))  # a record at 0 stands for a call that is Python's
    with k.when(_is_null(k, call).equals(0)):
        is_alike.set(k.load(I64, call, REPEAT.offset("alike")))
    with k.when(is_alike.get().differs(0)):
        keys, values = (k.variable(k.i64(0)) for _ in range(2))
        with k.when(method.is_none(of["store"]).equals(0)):
            for n, variable in enumerate((keys, values)):
                part = method.call("PyTuple_GetItem", PTR, of["store"], k.i64(n))
                variable.set(method.call("PyLong_AsLongLong", I64, part))
        new = k.load(I64, call, REPEAT.offset("new"))
        grows = method.is_none(of["lengths"]).equals(0)
        totals = k.variable(k.i64(0))
        with k.when(grows):
            grown = k.call(grow, method.held, call, of["lengths"], of["most"])
            method.leave_if_null(grown, *held)
            totals.set(Value(k, k.b.ptrtoint(grown.x, I64)))
        after = k.pointer(totals.get())
        with k.when(grows.equals(0) | method.is_none(after).equals(0)):
            q, seed = k.load(PTR, reader.arrays), method.call("PyLong_AsUnsignedLongLong", I64, of["seed"])
            none = method.known("none")
            given = call, reader.places, keys.get(), values.get(), q, k.i64(0), k.i64(0), seed, of["lengths"], none, new
            result = k.call(run, method.held, *given)
            with k.when(_is_null(k, result)):
                with k.when(grows):
                    method.drop(after)
                method.drop(*held)
                k.b.ret(method.null().x)
            is_result = (method.is_none(result) | _is_same(k, result, method.known("false"))).equals(0)
            with k.when(is_result):
                method.drop(*held)
                with k.when(grows.equals(0)):
                    k.b.ret(result.x)
                k.b.ret(method.tuple_of(result, after).x)
            method.drop(result)
        with k.when(grows):
            method.drop(after)


def _find_function(module: Module) -> Any:
    """find(held, call, options, machine, place, layout): the record of a prepared call, as Memo.get() finds it.

    Returns a new reference; null where there is none, or where Python raised.
    """
    names = ("held", "call", "options", "machine", "place", "layout")
    k = module.function("find", dict.fromkeys(names, PTR), PTR, special=True)
    caller = _Caller(k, k.p["held"])
    parts = [k.p[name] for name in ("call", "options", "layout", "machine", "place")]  # CallKey's order
    for x in parts:
        caller.call("Py_IncRef", VOID, x)
    key = caller.tuple_of(*parts)
    entry = caller.call("PyDict_GetItemWithError", PTR, caller.known("prepared"), key)
    caller.leave_if_null(entry, key)
    now = caller.call("PyIter_Next", PTR, caller.known("clock"))
    caller.leave_if_null(now, key)
    caller.call("PyList_SetItem", I32, entry, k.i64(USED), now)
    prepared = caller.call("PyList_GetItem", PTR, entry, k.i64(VALUE))
    call = caller.call("PyObject_GetAttr", PTR, prepared, caller.known("call"))
    caller.drop(key)
    caller.leave_if_null(call)
    with k.when(caller.is_none(call)):  # tokens are stored, and nothing else
        caller.drop(call)
        k.b.ret(caller.null().x)
    record = caller.call("PyObject_GetAttr", PTR, call, caller.known("record"))
    caller.drop(call)
    with k.when(caller.is_none(record)):  # it runs for the first time, or its kernel is unloaded
        caller.drop(record)
        k.b.ret(caller.null().x)
    return k.finish(record)


def _grow_function(module: Module) -> Any:
    """grow(held, call, lengths, most): a list of the lengths with new tokens, as Prepared.fits() takes them.

    Returns None where the call is not for these; null where Python raised.
    """
    k = module.function("grow", dict.fromkeys(("held", "call", "lengths", "most"), PTR), PTR, special=True)
    caller = _Caller(k, k.p["held"])
    new, spans = (k.load(I64, k.p["call"], REPEAT.offset(name)) for name in ("new", "spans"))
    most = caller.call("PyLong_AsLongLong", I64, k.p["most"])
    count = caller.call("PyList_Size", I64, k.p["lengths"])
    totals = caller.call("PyList_New", PTR, count)
    caller.leave_if_null(totals)
    shortest, longest = k.variable(k.i64(SPAN)), k.variable(k.i64(0))
    with k.range(0, count) as i:
        total = _number_in(k, k.p["lengths"], i) + new
        shortest.set(k.min(total, shortest.get()))
        longest.set(k.max(total, longest.get()))
        number = caller.call("PyLong_FromLongLong", PTR, total)
        caller.leave_if_null(number, totals)
        caller.call("PyList_SetItem", I32, totals, i, number)
    is_of_spans = (longest.get() > (spans >> 1) * SPAN) & (longest.get() <= spans * SPAN)
    fits = (shortest.get() > 0) & is_of_spans & (longest.get() <= most)
    with k.when(fits.equals(0)):
        caller.drop(totals)
        k.b.ret(caller.none().x)
    return k.finish(totals)
