"""matches(): compares a call of PyTorch's tensors with what a prepared one depends on, and reads where these lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llvmlite import ir

from ..language.vector import I32, I64, PTR, Module, Value
from ..memory.forms import (
    AFTER,
    AT_LENGTHS,
    AT_OPTIONS,
    BLOCK,
    DIMS,
    DROPOUT,
    FLOAT_VALUE,
    FORM,
    MASK,
    OBJECT_TYPE,
    OPTIONS,
    RANGES,
    SCALE,
    SCORE,
    TENSORS,
    TUPLE_ITEMS,
    at_tensor,
)  # fmt: skip


class Body:
    """A function with a way out: what is required and is not so ends it with a result."""

    def __init__(self, module: Module, name: str, params: Mapping[str, Any], returns: ir.Type, **kind: bool) -> None:
        self.k = module.function(name, params, returns, **kind)
        self.out = self.k.f.append_basic_block("out")

    def require(self, condition: Value) -> None:
        on = self.k.f.append_basic_block("on")
        self.k.b.cbranch(condition.x, on, self.out)
        self.k.b.position_at_end(on)

    def finish(self, value: Value, otherwise: Any) -> Any:
        self.k.b.ret(value.x)
        self.k.b.position_at_end(self.out)
        return self.k.finish(otherwise())

    def calling(self, block: Value, name: str, *args: Value, returns: ir.Type = I64) -> Value:
        """Calls one of the functions that the block has."""
        kind = ir.FunctionType(returns, [a.type for a in args]).as_pointer()
        at = self.k.load(I64, block, BLOCK.offset(name))
        return Value(self.k, self.k.b.call(self.k.b.inttoptr(at.x, kind), [a.x for a in args]))


def matches_of(module: Module) -> Any:
    """matches(block, form, arguments, count, objects, frame): 1 if all is as the form has it; then the frame is filled.

    arguments, count: Python's. objects: the tensors, the fourth of which this puts there.
    """
    names = ("block", "form", "arguments", "count", "objects", "frame")
    body = Body(module, "matches", dict.fromkeys(names, PTR) | {"count": I64}, I64)
    k, require = body.k, body.require
    block, form, arguments, count, objects, frame = (k.p[x] for x in names)
    options = k.load(PTR, arguments, 8 * AT_OPTIONS)

    def of_form(name: str) -> Value:
        return k.load(I64, form, FORM.offset(name))

    def of_block(name: str) -> Value:
        return k.load(I64, block, BLOCK.offset(name))

    require(k.load(I64, arguments).equals(of_form("tag")) & count.equals(of_form("arguments")))
    local = k.load(PTR, block, BLOCK.offset("local_keys"))
    for i in range(2):
        require(k.load(I64, local, 8 * i).equals(of_form(f"local{i}")))

    def is_float(at: Value) -> Value:
        return k.load(I64, at, OBJECT_TYPE).equals(of_block("float"))

    role = of_form("role")
    for i in range(OPTIONS):
        given = k.load(I64, options, TUPLE_ITEMS + 8 * i)
        if i == SCALE:
            is_none = given.equals(of_block("none"))
            at = k.pointer(k.select(is_none, of_block("none"), given))
            number = is_float(at)
            wants_none = of_form("scale_is_none").differs(0)
            value = k.variable(k.i64(0))
            with k.when(number):
                value.set(k.load(I64, at, FLOAT_VALUE))
            require((is_none & wants_none) | (number & (wants_none ^ 1) & value.get().equals(of_form("scale"))))
        elif i == DROPOUT:  # none: any 0.0
            zero = k.variable(given.equals(of_form(f"option{i}")))
            with k.when(is_float(k.pointer(given))):
                zero.set(k.load(I64, k.pointer(given), FLOAT_VALUE).equals(0))
            require(zero.get())
        else:
            require(given.equals(of_form(f"option{i}")) | role.equals(i))
            if i in (MASK, SCORE):
                with k.when(role.equals(i)):
                    k.store(given, objects, 8 * 3)
    for t in range(TENSORS):
        if t < 3:
            _match_tensor(body, t)
    more = of_form("tensors").equals(TENSORS)
    inner = k.f.append_basic_block("fourth")
    after = k.f.append_basic_block("after")
    k.b.cbranch(more.x, inner, after)
    k.b.position_at_end(inner)
    _match_tensor(body, 3)
    k.b.branch(after)
    k.b.position_at_end(after)

    def word(t: int, n: int) -> Value:
        return k.load(I64, frame, at_tensor(t, n))

    keys = word(1, 3)
    _match_lengths(body)
    grows = of_form("grows").differs(0)
    head, row = word(1, 6), word(1, 7)
    inside = k.zext((head > 0) & (head < row), I64)
    alike = word(2, 3).equals(keys) & inside.equals(of_form("inside"))
    last = of_form("dims3") - 1
    columns = k.load(I64, k.at(frame, at_tensor(3, 1)), k.select(more, last, k.i64(0)) * 8)
    require((grows ^ 1) | (alike & ((more ^ 1) | columns.equals(keys))))
    return body.finish(k.i64(1), lambda: k.i64(0))


def _match_tensor(body: Body, t: int) -> None:
    """Requires a tensor to be as the form has it, and puts its address, sizes and strides into the frame."""
    k, require = body.k, body.require
    block, form, objects, frame = (k.p[x] for x in ("block", "form", "objects", "frame"))

    def of_form(name: str) -> Value:
        return k.load(I64, form, FORM.offset(name))

    given = k.load(PTR, objects, 8 * t)
    require(k.load(I64, given, OBJECT_TYPE).equals(k.load(I64, block, BLOCK.offset("tensor"))))
    there = k.load(I64, given, k.load(I64, block, BLOCK.offset("implementation")))
    require(there.differs(0))
    require(k.load(I64, k.pointer(there), k.load(I64, block, BLOCK.offset("keys"))).equals(of_form(f"keys{t}")))
    handle, found, dtype = k.buffer(I64, 1), k.buffer(I64, 1), k.buffer(I32, 2)
    k.store(there, handle)

    def ask(name: str, at: Value) -> None:
        require(body.calling(block, name, handle, at, returns=I32).equals(0))

    ask("aoti_torch_get_dim", found)
    require(k.load(I64, found).equals(of_form(f"dims{t}")))
    ask("aoti_torch_get_dtype", dtype)
    require(k.zext(k.load(I32, dtype), I64).equals(of_form(f"dtype{t}")))
    dims, itemsize = of_form(f"dims{t}"), of_form(f"itemsize{t}")
    ask("aoti_torch_get_sizes", found)
    sizes = k.load(PTR, found)
    ask("aoti_torch_get_strides", found)
    strides = k.load(PTR, found)
    end, good = k.variable(itemsize), k.variable(k.i64(1))
    with k.range(0, dims) as d:
        size, stride = k.load(I64, sizes, d * 8), k.load(I64, strides, d * 8)
        low = k.at(form, FORM.offset(f"size_low{t}_0"))
        ranges = [k.load(I64, low, d * (8 * len(RANGES)) + 8 * n) for n in range(len(RANGES))]
        fits = (size >= ranges[0]) & (size <= ranges[1]) & (stride >= ranges[2]) & (stride <= ranges[3])
        good.set(good.get() & k.zext(fits, I64))
        k.store(size, k.at(frame, at_tensor(t, 1)), d * 8)
        k.store(stride * itemsize, k.at(frame, at_tensor(t, 1 + DIMS)), d * 8)
        end.set(end.get() + (size - 1) * stride * itemsize)
    require(good.get().differs(0))
    ask("aoti_torch_get_storage_offset", found)
    offset = k.load(I64, found)
    ask("aoti_torch_get_storage_size", found)
    require(k.load(I64, found) >= end.get() + offset * itemsize)
    ask("torch_get_const_data_ptr", found)
    require(k.load(I64, found).differs(0))
    k.store(k.load(I64, found), frame, at_tensor(t, 0))


def _match_lengths(body: Body) -> None:
    """Requires a step's sequences to have lengths that the form is for, and puts those after it into the frame."""
    k = body.k
    block, form, arguments, frame = (k.p[x] for x in ("block", "form", "arguments", "frame"))
    sequences, new, low, high = (
        k.load(I64, form, FORM.offset(x)) for x in ("sequences", "new", "length_low", "length_high")
    )
    good = k.variable(k.i64(1))
    with k.when(sequences > 0):
        lengths = k.load(PTR, arguments, 8 * AT_LENGTHS)
        good.set(k.zext(body.calling(block, "PyList_Size", lengths).equals(sequences), I64))
        longest = k.variable(k.i64(0))
        with k.when(good.get().differs(0)):
            with k.range(0, sequences) as i:
                item = body.calling(block, "PyList_GetItem", lengths, i, returns=PTR)
                length = body.calling(block, "PyLong_AsLongLong", item)
                longest.set(k.select(length > longest.get(), length, longest.get()))
                good.set(good.get() & k.zext((length >= 0) & (length + new > 0), I64))
                k.store(length + new, k.at(frame, 8 * AFTER), i * 8)
            good.set(good.get() & k.zext((longest.get() >= low) & (longest.get() <= high), I64))
    body.require(good.get().differs(0))
