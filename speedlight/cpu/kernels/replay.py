"""A function of CPython's, as LLVM, that repeats a prepared call of PyTorch's tensors without running any Python.

Python of some 30 functions takes 15 µs where it is warm and 100 µs between the layers of a model, whose weights have
emptied the caches meanwhile. This function reads tensors by PyTorch's C interface and compares all that a prepared call
depends on (memory/forms.py): what is not exactly alike is left to Python, which decides, and says what went wrong. One
thread calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llvmlite import ir

from ...expressions.program import LENGTHS, STRIDES
from ...host.machine import Isa
from ..language.vector import I8, I32, I64, PTR, VOID, Function, Module, Value
from ..memory.forms import (
    AFTER,
    AT_OPTIONS,
    AT_PLACES,
    BLOCK,
    BYTES_VALUE,
    DIMS,
    FORM,
    FRAME_WORDS,
    OBJECT_TYPE,
    ROOM_AT,
    TENSORS,
    TUPLE_ITEMS,
    WATCHED,
    at_tensor,
)  # fmt: skip
from ..memory.records import APPEND, CALL, ITEM, KEYS, LIMIT, NEW, NUMBERS, RUN, SCRATCH, TABLES, WRONG
from .replay_matching import Body, matches_of
from .task import call_at

CLOCK = 1  # CLOCK_MONOTONIC


@dataclass(frozen=True, slots=True)
class ReplayShape:
    """The specialisation of the module: an architecture, by its least vector unit."""

    isa: Isa
    kind: ClassVar[str] = "replay"

    @property
    def stem(self) -> str:
        return f"replay_{self.isa.arch}"


def replay_module(s: ReplayShape, symbol: str) -> Module:
    module = Module(symbol)
    _Main(module, symbol, matches_of(module), _Repeat(module, _packs(module)).write()).write()
    return module


def _packs(module: Module) -> Any:
    """packs(block, form, arguments, frame, out): writes the kernel's arguments, items and tables, and those of the one
    that stores new tokens, into the room; the number of threads.
    """
    names = ("block", "form", "arguments", "frame", "out")
    body = Body(module, "packs", dict.fromkeys(names, PTR) | {"out": I64}, I64)
    k = body.k
    block, form, arguments, frame, out = (k.p[x] for x in names)
    room = k.load(PTR, block, BLOCK.offset("room"))

    def of_form(name: str) -> Value:
        return k.load(I64, form, FORM.offset(name))

    def part(name: str) -> Value:
        return k.at(room, ROOM_AT[name])

    def address(pointer: Value) -> Value:
        return Value(k, k.b.ptrtoint(pointer.x, I64))

    def copy(name: str, count: Value) -> None:
        source = k.load(PTR, form, FORM.offset(name))
        with k.range(0, count) as i:
            k.store(k.load(I64, source, i * 8), part(name), i * 8)

    def word(t: int, n: int) -> Value:
        return k.load(I64, frame, at_tensor(t, n))

    copy("words", of_form("word_count"))
    words, items, tables = part("words"), part("items"), part("tables")
    groups = of_form("groups")
    with k.range(0, groups) as i:
        k.store(k.i64(0), part("arrived"), i * 8)
    with k.range(0, of_form("wrong")) as i:
        k.store(k.i64(0), part("wrong"), i * WRONG.bytes + WRONG.offset("noted"))
    keys, scratch = word(1, 3), address(part("scratch"))
    k.store(scratch, words, 8 * SCRATCH)
    arrived = k.select(groups > 0, address(part("arrived")), k.i64(0))
    items_at, total = k.variable(of_form("items")), k.variable(keys * word(0, 1))
    k_at, v_at = k.variable(word(1, 0)), k.variable(word(2, 0))
    grows, sequences = of_form("grows").differs(0), of_form("sequences")
    with k.when(grows | (sequences > 0)):
        items_at.set(address(items))
        copy("items", of_form("item_count") * len(ITEM))
    with k.when(grows):
        with k.range(0, of_form("item_count")) as i:
            at = i * (8 * len(ITEM))
            for place, value in ((ITEM.k_len, keys), (ITEM.start, keys - word(0, 3)),
                                 (ITEM.k_at, i * _step(k, word, 1)), (ITEM.v_at, i * _step(k, word, 2))):  # fmt: skip
                k.store(value, items, at + 8 * place)
        for n, stride in enumerate((word(1, 6), word(1, 7), word(1, 8), word(2, 6), word(2, 7), word(2, 8))):
            k.store(stride, words, 8 * (KEYS.start + n))
    with k.when(sequences > 0):
        places = k.load(PTR, arguments, 8 * AT_PLACES)
        stores = [k.load(PTR, places, TUPLE_ITEMS + 8 * n) for n in range(2)]
        put, own = part("put"), [body.calling(block, "PyLong_AsLongLong", x) for x in stores]
        copy("put", of_form("put_count"))
        new_at = (k_at.get(), v_at.get(), *own)
        with k.when(of_form("put_count") > 0):
            for n, value in enumerate(new_at):
                k.store(value, put, 8 * (APPEND.word("k") + n))
            k.store(of_form("put_tickets"), put, 8 * LIMIT)
        k_at.set(own[0])
        v_at.set(own[1])
        total.set(k.i64(0))
        with k.range(0, sequences) as i:
            length = k.load(I64, k.at(frame, 8 * AFTER), i * 8)
            total.set(total.get() + length)
            k.store(length, items, i * (8 * len(ITEM)) + 8 * ITEM.k_len)
            k.store(length - word(0, 3), items, i * (8 * len(ITEM)) + 8 * ITEM.start)
            with k.when(of_form("put_count") > 0):
                slot = len(APPEND.names) + RUN.word("slot")
                k.store(length - of_form("new"), put, i * (8 * len(RUN.names)) + 8 * slot)
        with k.when(of_form("put_ticket").differs(0)):
            k.store(of_form("put_ticket"), words, 8 * NEW.start)
            k.store(address(put), words, 8 * (NEW.start + 1))
    call = (word(0, 0), k_at.get(), v_at.get(), out, k.i64(0), of_form("counts"), items_at.get(),
            scratch + of_form("partials"), arrived, address(part("wrong")), of_form("seed"))  # fmt: skip
    for n, value in enumerate(call):
        k.store(value, words, 8 * (CALL.start + n))
    with k.when(of_form("table_count") > 0):
        copy("tables", of_form("table_count"))
        k.store(address(tables), words, 8 * TABLES.start)
        with k.when(of_form("slot") >= 0):
            row = k.at(tables, of_form("slot") * 8)
            k.store(word(3, 0), row)
            with k.when(grows):
                k.store(keys, row, 8 * (LENGTHS + 3))
                dims = of_form("dims3")
                with k.range(0, dims) as d:
                    stride = k.load(I64, k.at(frame, at_tensor(3, 1 + DIMS)), d * 8)
                    k.store(stride, row, (k.i64(DIMS) - dims + d) * 8 + 8 * STRIDES)
    with k.when(of_form("first_count") > 0):
        copy("numbers", of_form("number_count"))
        firsts = k.load(PTR, form, FORM.offset("firsts"))
        with k.range(0, of_form("first_count")) as i:
            k.store(keys - word(0, 3), part("numbers"), k.load(I64, firsts, i * 8) * 8)
        k.store(address(part("numbers")), words, 8 * NUMBERS.start)
    k.store(of_form("tickets"), words, 8 * LIMIT)
    few = (grows | (sequences > 0)) & (total.get() < of_form("inline_below"))
    return body.finish(k.select(few, k.i64(1), of_form("threads")), lambda: k.i64(0))


def _step(k: Function, word: Any, t: int) -> Value:
    """Bytes from an item's keys or values to the next item's: 0 where one serves all."""
    return k.select(word(t, 1) > 1, word(t, 5), k.i64(0))


def _nothing(body: Body, block: Value) -> Value:
    none = body.k.load(PTR, block, BLOCK.offset("none"))
    body.calling(block, "Py_IncRef", none, returns=VOID)
    return none


class _Repeat:
    """repeat(block, form, arguments, objects, frame): the result of a call that has a form, or None; where there is no
    memory for it, what Python raises is passed on.
    """

    def __init__(self, module: Module, packs: Any) -> None:
        names = ("block", "form", "arguments", "objects", "frame")
        self.body = Body(module, "repeat", dict.fromkeys(names, PTR), PTR)
        self.packs, self.k, self.block, self.form = packs, self.body.k, self.body.k.p["block"], self.body.k.p["form"]

    def write(self) -> Any:
        """Makes the result, packs and runs."""
        k, block, form, body = self.k, self.block, self.form, self.body
        out, made = self._make_result()
        threads = k.call(self.packs, block, form, k.p["arguments"], k.p["frame"], made)
        self._run(threads)
        room, wrong = k.load(PTR, block, BLOCK.offset("room")), k.variable(k.i64(0))
        with k.range(0, k.load(I64, form, FORM.offset("wrong"))) as i:
            wrong.set(wrong.get() | k.load(I64, k.at(room, ROOM_AT["wrong"]), i * WRONG.bytes + WRONG.offset("noted")))
        with k.when(wrong.get().differs(0)):  # Python computes it once more, and raises
            body.calling(block, "Py_DecRef", out, returns=VOID)
        body.require(wrong.get().equals(0))
        k.store(k.load(I64, form, FORM.offset("used")) + 1, form, FORM.offset("used"))
        return body.finish(out, lambda: _nothing(body, block))

    def _make_result(self) -> tuple[Value, Value]:
        """A tensor like q, and its address. A mode of PyTorch's may make something else: that is given up."""
        k, block, form, body = self.k, self.block, self.form, self.body
        empty_like = k.load(PTR, block, BLOCK.offset("empty_like"))
        out = body.calling(block, "PyObject_CallOneArg", empty_like, k.load(PTR, k.p["objects"]), returns=PTR)
        bad = k.f.append_basic_block("raised")
        good = k.f.append_basic_block("made")
        k.b.cbranch(k.b.icmp_unsigned("==", out.x, ir.Constant(PTR, None)), bad, good)
        k.b.position_at_end(bad)
        k.b.ret(ir.Constant(PTR, None))
        k.b.position_at_end(good)
        handle, found = k.buffer(I64, 1), k.buffer(I64, 1)
        k.store(k.i64(0), found)
        is_plain = k.load(I64, out, OBJECT_TYPE).equals(k.load(I64, block, BLOCK.offset("tensor")))
        with k.when(is_plain):
            there = k.load(I64, out, k.load(I64, block, BLOCK.offset("implementation")))
            keys = k.load(I64, k.pointer(there), k.load(I64, block, BLOCK.offset("keys")))
            with k.when(keys.equals(k.load(I64, form, FORM.offset("keys0")))):
                k.store(there, handle)
                body.calling(block, "torch_get_mutable_data_ptr", handle, found, returns=I32)
        made = k.load(I64, found)
        with k.when(made.equals(0)):
            body.calling(block, "Py_DecRef", out, returns=VOID)
        body.require(made.differs(0))
        return out, made

    def _run(self, threads: Value) -> None:
        """Runs the kernel: alone, or as a region, of which there is one at a time. Other threads go on meanwhile."""
        k, block, form, body = self.k, self.block, self.form, self.body
        words = k.at(k.load(PTR, block, BLOCK.offset("room")), ROOM_AT["words"])
        kernel = k.load(I64, form, FORM.offset("kernel"))
        region = k.load(PTR, block, BLOCK.offset("region"))
        none, taken = (k.load(PTR, block, BLOCK.offset(x)) for x in ("none", "taken"))
        first = body.calling(block, "PyList_GetItem", region, k.i64(0), returns=PTR)
        free = Value(k, k.b.icmp_unsigned("==", first.x, none.x))
        together = (threads > 1) & free
        with k.when(together):
            body.calling(block, "Py_IncRef", taken, returns=VOID)
            body.calling(block, "PyList_SetItem", region, k.i64(0), taken, returns=I32)
        state = body.calling(block, "PyEval_SaveThread", returns=PTR)
        put = k.load(I64, form, FORM.offset("put_kernel"))
        with k.when(put.differs(0)):
            call_at(k, put, k.at(k.load(PTR, block, BLOCK.offset("room")), ROOM_AT["put"]))
        with k.either(together) as (yes, no):
            with yes:
                kind = ir.FunctionType(I64, [PTR, PTR, PTR, I64, PTR, I64]).as_pointer()
                serve = k.b.inttoptr(k.load(I64, form, FORM.offset("serve")).x, kind)
                team, openmp = (k.load(PTR, form, FORM.offset(x)) for x in ("team", "openmp"))
                clock = k.load(I64, form, FORM.offset("clock"))
                k.b.call(serve, [x.x for x in (team, k.pointer(kernel), words, threads - 1, openmp, clock)])
            with no:
                call_at(k, kernel, words)
        body.calling(block, "PyEval_RestoreThread", state, returns=VOID)
        with k.when(together):
            body.calling(block, "Py_IncRef", none, returns=VOID)
            body.calling(block, "PyList_SetItem", region, k.i64(0), none, returns=I32)


class _Main:
    """replay(self, arguments, count): CPython's, of (tag, q, k, v, options), and of a step of a cache the tuple of
    addresses of its keys and values and the list of lengths: the result, or None.
    """

    def __init__(self, module: Module, symbol: str, matches: Any, repeat: Any) -> None:
        self.body = Body(module, symbol, {"self": PTR, "arguments": PTR, "count": I64}, PTR, public=True)
        self.matches, self.repeat, self.k = matches, repeat, self.body.k
        self.block = self.k.load(PTR, self.k.p["self"], BYTES_VALUE)  # `self` is bytes: the block's address

    def write(self) -> None:
        """Looks for a form that fits, and holds it meanwhile: what Python runs where a result is made may drop it."""
        k, block, body = self.k, self.block, self.body
        arguments = k.p["arguments"]

        def of_block(name: str) -> Value:
            return k.load(I64, block, BLOCK.offset(name))

        body.require(k.intrinsic("pthread_self", I64).equals(of_block("thread")))
        self._check_around()
        options = k.load(PTR, arguments, 8 * AT_OPTIONS)
        body.require(k.load(I64, options, OBJECT_TYPE).equals(of_block("options")))
        objects, frame = k.buffer(I64, TENSORS), k.buffer(I64, FRAME_WORDS)
        for t in range(3):
            k.store(k.load(I64, arguments, 8 + 8 * t), objects, 8 * t)
        forms, count = k.load(PTR, block, BLOCK.offset("forms")), of_block("count")
        chosen, n = k.variable(k.i64(0)), k.variable(k.i64(0))
        with k.forever() as leave_if:
            leave_if((n.get() >= count) | chosen.get().differs(0))
            form = k.load(PTR, forms, n.get() * 8)
            fits = k.call(self.matches, block, form, arguments, k.p["count"], objects, frame)
            with k.when(fits.differs(0)):
                chosen.set(k.load(I64, forms, n.get() * 8))
            n.set(n.get() + 1)
        body.require(chosen.get().differs(0))
        form = k.pointer(chosen.get())
        owner = k.load(PTR, form, FORM.offset("owner"))
        body.calling(block, "Py_IncRef", owner, returns=VOID)
        result = k.call(self.repeat, block, form, arguments, objects, frame)
        body.calling(block, "Py_DecRef", owner, returns=VOID)
        body.finish(result, lambda: _nothing(body, block))

    def _check_around(self) -> None:
        """Requires what every form depends on: no gradients, the same settings, not long since they were read."""
        k, block, body = self.k, self.block, self.body
        recording = body.calling(block, "aoti_torch_grad_mode_is_enabled", returns=I8)
        body.require((recording & 1).equals(0))
        time = k.buffer(I64, 2)
        body.require(k.intrinsic("clock_gettime", I32, k.const(CLOCK, I32), time).equals(0))
        now = k.load(I64, time) * 1_000_000_000 + k.load(I64, time, 8)
        body.require(now < k.load(I64, block, BLOCK.offset("until")))
        for i in range(WATCHED):
            held, key, value = (k.load(PTR, block, BLOCK.offset(f"watched{i}_{x}")) for x in ("dict", "key", "value"))
            found = body.calling(block, "PyDict_GetItem", held, key, returns=PTR)
            body.require(Value(k, k.b.icmp_unsigned("==", found.x, value.x)))
