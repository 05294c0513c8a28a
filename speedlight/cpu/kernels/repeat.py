"""Two functions for CPython, as LLVM, with which a prepared call is repeated: `read` and `run`.

Python of some 30 functions takes 15 µs where it is warm and 100 µs between the layers of a model, whose weights have
emptied the caches meanwhile.

`read(rows, q, k, v, …)` looks at arrays of NumPy, and at tensors of PyTorch while grad mode is off. It says what each
is, and where it lies, and leaves all others to read_plainly() of problem/prepared.py. It knows three things: CPython's
documented functions; DLPack's C exchange API, which a library's type hands out; and PyTorch's own Python functions,
which it calls for what DLPack does not say. Nobody's memory is read.

`run(call, places, …)` writes a prepared call's arguments and runs its kernel. Addresses come from the caller, which
has checked them. Other threads of Python go on meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llvmlite import ir

from ...arrays.memory import DIMS
from ...expressions.program import LENGTHS, STRIDES
from ...host.machine import Isa
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

# CPython's documented functions that are called
PYTHON = (
    "PyBool_FromLong",
    "PyBuffer_Release",
    "PyBytes_AsString",
    "PyBytes_FromStringAndSize",
    "PyCapsule_GetPointer",
    "PyDict_GetItem",
    "PyErr_Clear",
    "PyErr_ExceptionMatches",
    "PyErr_NoMemory",
    "PyErr_Occurred",
    "PyEval_RestoreThread",
    "PyEval_SaveThread",
    "PyList_GetItem",
    "PyList_SetItem",
    "PyList_Size",
    "PyLong_AsLongLong",
    "PyLong_AsUnsignedLongLong",
    "PyLong_AsVoidPtr",
    "PyMem_RawFree",
    "PyMem_RawMalloc",
    "PyObject_CallNoArgs",
    "PyObject_GetBuffer",
    "PyObject_CallOneArg",
    "PyObject_RichCompareBool",
    "PyObject_Size",
    "PyObject_Type",
    "PyObject_Vectorcall",
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
    """Writes the functions `<symbol>_read` and `<symbol>`."""
    module = Module(symbol)
    _write_read(module, f"{symbol}_read")
    _write_run(module, symbol)
    return module


class _Method:
    """A function that CPython calls with `self`, a capsule that holds a record's address, and its arguments."""

    def __init__(self, module: Module, symbol: str) -> None:
        self.k = module.function(symbol, {"self": PTR, "arguments": PTR, "count": I64}, PTR, public=True)
        self.held = self.call("PyCapsule_GetPointer", PTR, self.k.p["self"], self.null())

    def argument(self, n: int) -> Value:
        return self.k.load(PTR, self.k.p["arguments"], 8 * n)

    def integer(self, n: int) -> Value:
        return self.call("PyLong_AsLongLong", I64, self.argument(n))

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
        none = self.k.load(PTR, self.held, READER.offset("none"))
        self.call("Py_IncRef", VOID, none)
        return none


def call_python(k: Function, name: str, returns: ir.Type, *arguments: Value) -> Value:
    function = k.module.declare(name, returns, [x.type for x in arguments])
    return k.call(function, *arguments)


def _is_null(k: Function, pointer: Value) -> Value:
    return Value(k, k.b.icmp_unsigned("==", pointer.x, ir.Constant(PTR, None)))


def _is_same(k: Function, a: Value, b: Value) -> Value:
    return Value(k, k.b.icmp_unsigned("==", a.x, b.x))


# --- read


def _write_read(module: Module, symbol: str) -> None:
    """read(rows, q, k, v, array, …): what read_plainly() of problem/prepared.py does, which it calls for the rest."""
    array = _Arrays(module).write()
    write_growth = _growth_function(module)
    method = _Method(module, symbol)
    k = method.k
    layout = k.buffer(I64, 1 + len(ARRAY.names) * TENSORS)
    places = k.buffer(I64, len(PLACE.names) * TENSORS)
    tensors = k.p["count"] - 1
    good = k.variable(k.zext((tensors >= 1) & (tensors <= TENSORS), I64))
    has_tensors = k.variable(k.i64(0))
    with k.range(0, tensors) as t, k.when(good.get().differs(0)):
        given = k.load(PTR, k.p["arguments"], t * 8 + 8)
        what = k.at(layout, t * ARRAY.bytes + 8)
        found = k.call(array, method.held, given, what, k.at(places, t * PLACE.bytes))
        good.set(found)
        has_tensors.set(has_tensors.get() | k.zext(found.equals(_TENSOR), I64))
    with k.when(good.get().differs(0) & has_tensors.get().differs(0)):
        good.set(_write_questions(method))
    result = k.variable(k.i64(0))
    with k.when(good.get().differs(0)):
        rows = method.integer(0)
        k.store(k.i64(0), layout)
        with k.when((rows > 0) & (tensors >= 3)):
            k.call(write_growth, rows, tensors, layout)
        parts = []
        for buffer, size in ((layout, tensors * ARRAY.bytes + 8), (places, tensors * PLACE.bytes)):
            part = method.call("PyBytes_FromStringAndSize", PTR, buffer, size)
            with k.when(_is_null(k, part)):  # no memory, as Python has noted
                k.b.ret(method.null().x)
            parts.append(part)
        pair = method.call("PyTuple_New", PTR, k.i64(2))
        for n, part in enumerate(parts):
            method.call("PyTuple_SetItem", I32, pair, k.i64(n), part)
        result.set(Value(k, k.b.ptrtoint(pair.x, I64)))
    with k.either(good.get().differs(0)) as (yes, no):
        with yes:
            k.b.ret(k.pointer(result.get()).x)
        with no:
            method.clear_refusal()
            plainly = k.load(PTR, method.held, READER.offset("plainly"))
            given = k.p["arguments"], k.p["count"], method.null()
            k.b.ret(method.call("PyObject_Vectorcall", PTR, plainly, *given).x)
    k.b.unreachable()


def _write_questions(method: _Method) -> Value:
    """Returns 1 if every question about PyTorch's state has the answer that is expected: of functions without an
    argument, and of the level of forward mode, an entry of a module.
    """
    k = method.k

    def known(name: str) -> Value:
        return k.load(PTR, method.held, READER.offset(name))

    level = method.call("PyDict_GetItem", PTR, known("level_of"), known("level"))
    good = k.variable(k.zext(_is_same(k, level, known("no_level")), I64))
    questions = known("questions")
    with k.range(0, k.load(I64, method.held, READER.offset("question_count"))) as n:
        with k.when(good.get().differs(0)):
            answer = method.call("PyObject_CallNoArgs", PTR, k.load(PTR, questions, n * 16))
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


def _write_run(module: Module, symbol: str) -> None:
    """run(call, places, k, v, like, out, lse, seed, lengths, lists, team): the result, or False: an index out of range.

    call: address of a REPEAT. places: the second part of read(). k, v: addresses of a cache's keys and values; 0: of
    `places`. like: a tensor whose empty_like() is the result; or None: that lies at `out`, and is told as True.
    lengths: of keys of each sequence, with the new tokens, and lists: addresses of their pages' numbers; or None.
    team: address of a TEAM, or 0. None is returned, and nothing done, where this is not to be done here: where several
    threads are to run and team is 0, where sequences are others, where empty_like() makes no plain tensor.
    """
    pack = _pack_function(module)
    method = _Method(module, symbol)
    k = method.k
    call = method.call("PyLong_AsVoidPtr", PTR, method.argument(0))

    def of_call(name: str) -> Value:
        return k.load(I64, call, REPEAT.offset(name))

    room = method.call("PyMem_RawMalloc", PTR, of_call("room"))
    with k.when(_is_null(k, room)):
        k.b.ret(method.call("PyErr_NoMemory", PTR).x)
    first = k.pointer((Value(k, k.b.ptrtoint(room.x, I64)) + (_LINE - 1)) & -_LINE)
    threads = k.call(pack, call, k.p["arguments"], first)
    team = method.call("PyLong_AsVoidPtr", PTR, method.argument(10))
    like, none = method.argument(4), k.load(PTR, method.held, READER.offset("none"))
    is_alike = _is_same(k, like, none).equals(0)
    lacks_pytorch = _is_null(k, k.load(PTR, method.held, READER.offset("tensor")))
    with k.when(threads.equals(0) | ((threads > 1) & _is_null(k, team)) | (is_alike & lacks_pytorch)):
        method.call("PyMem_RawFree", VOID, room)
        k.b.ret(method.none().x)
    made = k.variable(k.i64(0))
    with k.when(is_alike):
        found, at = _write_result(method, like)
        made.set(Value(k, k.b.ptrtoint(found.x, I64)))
        with k.when(at.equals(0)):
            method.call("PyMem_RawFree", VOID, room)
            with k.when(made.get().equals(0)):  # what Python raised
                k.b.ret(method.null().x)
            method.call("Py_DecRef", VOID, found)
            method.clear_refusal()
            k.b.ret(method.none().x)
        k.store(at, first, of_call("words") + 8 * (CALL.start + _CALL_OUT))
    _write_region(method, call, first, threads, team)
    wrong = k.variable(k.i64(0))
    with k.range(0, of_call("wrong_count")) as i:
        noted = k.at(first, of_call("wrong") + i * WRONG.bytes)
        wrong.set(wrong.get() | k.load(I64, noted, WRONG.offset("noted")))
    method.call("PyMem_RawFree", VOID, room)
    result = k.pointer(made.get())
    has_result = made.get().differs(0)
    with k.when(has_result & wrong.get().equals(0)):
        k.b.ret(result.x)
    with k.when(has_result):
        method.call("Py_DecRef", VOID, result)
    k.b.ret(method.call("PyBool_FromLong", PTR, k.zext(wrong.get().equals(0), I64)).x)


def _write_result(method: _Method, like: Value) -> tuple[Value, Value]:
    """Makes a tensor like another; returns it, and its address: 0 if it is no plain tensor, or Python raised."""
    k = method.k
    made = method.call("PyObject_CallOneArg", PTR, k.load(PTR, method.held, READER.offset("empty_like")), like)
    address = k.variable(k.i64(0))
    with k.when(_is_null(k, made).equals(0)):
        kind = method.call("PyObject_Type", PTR, made)
        method.call("Py_DecRef", VOID, kind)
        with k.when(_is_same(k, kind, k.load(PTR, method.held, READER.offset("tensor")))):
            found, failed = _write_exchange(k, method.held, made)
            with k.when(failed.equals(0)):
                address.set(k.load(I64, found) * _lies_as(method, found))
    return made, address.get()


def _lies_as(method: _Method, tensor: Value) -> Value:
    """Returns 1 if a DLTensor has the sizes, and the strides in bytes, of q; a mode could make another tensor."""
    k = method.k
    places = method.call("PyBytes_AsString", PTR, method.argument(1))
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


def _write_region(method: _Method, call: Value, room: Value, threads: Value, team: Value) -> None:
    """Runs the kernel: alone, or as a region, of which there is one at a time; without Python's lock meanwhile."""
    k = method.k
    region = k.load(PTR, method.held, READER.offset("region"))
    none, taken = (k.load(PTR, method.held, READER.offset(x)) for x in ("none", "taken"))
    kernel = k.load(I64, call, REPEAT.offset("kernel"))
    words = k.at(room, k.load(I64, call, REPEAT.offset("words")))
    holder = method.call("PyList_GetItem", PTR, region, k.i64(0))
    together = (threads > 1) & _is_same(k, holder, none)
    with k.when(together):
        method.call("Py_IncRef", VOID, taken)
        method.call("PyList_SetItem", I32, region, k.i64(0), taken)
    state = method.call("PyEval_SaveThread", PTR)
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
    method.call("PyEval_RestoreThread", VOID, state)
    with k.when(together):
        method.call("Py_IncRef", VOID, none)
        method.call("PyList_SetItem", I32, region, k.i64(0), none)


class _Packer:
    """pack(call, arguments, room): writes what a kernel reads, from the prepared call's words.

    Returns the number of threads, or 0 if the call does not fit.
    """

    def __init__(self, module: Module) -> None:
        self.k = module.function("pack", dict.fromkeys(("call", "arguments", "room"), PTR), I64, special=True)
        self.call, self.room = self.k.p["call"], self.k.p["room"]
        self.words = self.part("words")

    def of_call(self, name: str) -> Value:
        return self.k.load(I64, self.call, REPEAT.offset(name))

    def part(self, name: str) -> Value:
        return self.k.at(self.room, self.of_call(name))

    def argument(self, n: int) -> Value:
        return self.k.load(PTR, self.k.p["arguments"], 8 * n)

    def integer(self, n: int) -> Value:
        return call_python(self.k, "PyLong_AsLongLong", I64, self.argument(n))

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
    places = call_python(k, "PyBytes_AsString", PTR, p.argument(1))

    def place(t: int, name: str) -> Value:
        return k.load(I64, places, t * PLACE.bytes + PLACE.offset(name))

    p.copy("words", p.words)
    p.clear("arrived", p.of_call("arrived_count"), 8)
    p.clear("wrong", p.of_call("wrong_count"), WRONG.bytes)
    k_at, v_at = k.variable(p.integer(2)), k.variable(p.integer(3))
    grows = p.of_call("rows").differs(0)
    items = k.variable(p.of_call("items_from"))
    has_lengths = Value(k, k.b.icmp_unsigned("!=", p.argument(8).x, k.load(PTR, p.call, REPEAT.offset("none")).x))
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
    _write_tables(p, place, grows)
    scratch = p.address(p.part("scratch"))
    arrived = k.select(p.of_call("arrived_count") > 0, p.address(p.part("arrived")), k.i64(0))
    wrong = k.select(p.of_call("wrong_count") > 0, p.address(p.part("wrong")), k.i64(0))
    p.put_words(slice(SCRATCH, None), scratch)
    p.put_words(slice(LIMIT, None), p.of_call("tickets"))
    p.put_words(
        CALL, place(0, "address"), k_at.get(), v_at.get(), p.integer(5), p.integer(6), p.of_call("counts"),
        items.get(), scratch + p.of_call("partials"), arrived, wrong,
        call_python(k, "PyLong_AsUnsignedLongLong", I64, p.argument(7)),
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


def _write_sequences(p: _Packer, places: Value, k_at: Value, v_at: Value) -> Value:
    """Writes the length of each sequence of a cache or pool, and where its pages are; 0 if there are others."""
    k = p.k
    lengths, lists = p.argument(8), p.argument(9)
    count = p.of_call("items_count") // len(ITEM)
    stores = p.of_call("put_count") > 0
    fits = k.variable(k.zext(call_python(k, "PyList_Size", I64, lengths).equals(count), I64))
    has_lists = Value(k, k.b.icmp_unsigned("!=", lists.x, k.load(PTR, p.call, REPEAT.offset("none")).x))
    with k.when(has_lists):
        fits.set(fits.get() & k.zext(call_python(k, "PyList_Size", I64, lists).equals(count), I64))
    put = p.part("put")
    with k.when(stores):
        p.copy("put", put)
        for n, value in enumerate((k.load(I64, places, PLACE.bytes), k.load(I64, places, 2 * PLACE.bytes), k_at, v_at)):
            k.store(value, put, 8 * (APPEND.word("k") + n))
        k.store(p.of_call("put_tickets"), put, 8 * LIMIT)
    with k.when(fits.get().differs(0)), k.range(0, count) as i:
        length = call_python(k, "PyLong_AsLongLong", I64, call_python(k, "PyList_GetItem", PTR, lengths, i))
        item = k.at(p.part("items"), i * (8 * len(ITEM)))
        run = k.at(put, k.i64(8 * len(APPEND.names)) + i * RUN.bytes)
        k.store(length, item, 8 * ITEM.k_len)
        k.store(length - k.load(I64, item, 8 * ITEM.q_len), item, 8 * ITEM.start)
        with k.when(stores):
            k.store(length - k.load(I64, run, RUN.offset("count")), run, RUN.offset("slot"))
        with k.when(has_lists):
            at = call_python(k, "PyLong_AsLongLong", I64, call_python(k, "PyList_GetItem", PTR, lists, i))
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
