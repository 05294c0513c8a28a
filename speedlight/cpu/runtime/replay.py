"""Replays: prepared calls of PyTorch's tensors that the main thread repeats in machine code (kernels/replay.py).

A call is learned when Python has repeated it once, with all that decided it: one that is exactly alike runs at once.
Whatever differs is Python's: another thread, gradients that are recorded, a mode or transform of PyTorch's, settings
that changed, a form that is not known. Linux and CPython, where what this reads of PyTorch's and CPython's objects lies
where a look at a few of them says.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from typing import Any, NamedTuple

from ...errors import pass_on
from ...expressions.tracing import Expression, is_immutable
from ...host import insides
from ...host.llvm import load
from ...host.machine import host_arch, isa_named
from ...host.shortcuts import ENVIRONMENT
from ...problem.problem import SPAN, Options
from ..kernels.replay import ReplayShape
from ..memory.forms import (
    BLOCK,
    BYTES_VALUE,
    FLOAT_VALUE,
    FORM,
    MASK,
    OBJECT_TYPE,
    PARTS,
    PYTHON,
    SCALE,
    SCORE,
    SEQUENCES,
    TORCH,
    TUPLE_ITEMS,
    WATCHED,
)  # fmt: skip
from ..memory.records import ITEM, WRONG
from . import workers
from .compile import lock, objects_of, symbol_of
from .launch import take_pages

_MOST = 16  # forms
_LARGEST = 1 << 20  # bytes that a form may keep alive: of tables
_ANY = 1 << 62
_FIXED = frozenset((type(None), bool, int, float, str))  # types of what never changes
_KEY_SET = "_ZN3c104impl26raw_local_dispatch_key_setE"  # two words of each thread: keys included, and excluded
_COUNT = BLOCK.word("count")
_HEAD = 64  # words of a TensorImpl that are looked through for its dispatch keys


class _Known(NamedTuple):
    """A form, and what must live as long as it."""

    form: Any
    held: tuple[Any, ...]


class Replays:
    """The calls of the main thread that are known; none until the first is learned."""

    def __init__(self) -> None:
        # call(tag, q, k, v, options), of a step also addresses and lengths: the result, or None
        self.call: Any = _unknown
        self._known: dict[Any, _Known] = {}
        self._block: Any = None
        self._machine: Any = None
        self._refused = False

    def learn(self, tag: Any, tensors: tuple[Any, ...], options: Options, key: Any, prepared: Any, grows: bool) -> None:
        """Takes in a call that Python has just repeated, if it is one of these.

        tag: of whoever asks, who has rules of its own; compared by identity. key: of the memo that has `prepared`;
        grows: for any number of keys.
        """
        if self._is_learnable(tensors, options, prepared):
            self._learn(tag, (*tensors, *options.arrays()), options, key[1], key, prepared, {"grows": grows})

    def learn_step(
        self, tag: Any, tensors: tuple[Any, ...], options: Options, machine: Any, prepared: Any, capacity: int
    ) -> bool:
        """learn(), of a step of a cache: q, or q, k and v. Returns whether such steps may be known.

        tag: of caches of one form. machine: threads and vector unit now.
        """
        put, spans = prepared.put, prepared.spans
        if len(tensors) == 1:
            tensors *= 3
        if (
            options.arrays()
            or not (put is None or put.launch.tickets)
            or not self._is_learnable(tensors, options, prepared)
        ):
            return False
        if not (put is None or put.within or put.launch.inline) or len(prepared.counts) > SEQUENCES:
            return False
        words = {
            "sequences": len(prepared.counts), "new": prepared.new,
            "length_low": (spans * SPAN // 2 if spans > 1 else 0) + 1 - prepared.new,
            "length_high": min(spans * SPAN, capacity) - prepared.new,
        }  # fmt: skip
        key = spans, options.key(), *[(x.shape, x.stride(), x.dtype) for x in tensors]
        return self._learn(tag, tensors, options, machine, key, prepared, words)

    def _is_learnable(self, tensors: tuple[Any, ...], options: Options, prepared: Any) -> bool:
        if self._refused or threading.current_thread() is not threading.main_thread():
            return False
        torch = sys.modules["torch"]
        if torch.is_grad_enabled() or any([type(x) is not torch.Tensor for x in (*tensors, *options.arrays())]):
            return False
        return _is_plain(options, prepared) and (self._block is not None or self._begin(torch))

    def _learn(
        self, tag: Any, whole: tuple[Any, ...], options: Options, machine: Any, key: Any, prepared: Any,
        more: dict[str, int],
    ) -> bool:  # fmt: skip
        torch = sys.modules["torch"]
        self._watch(machine)
        local = [ctypes.c_uint64.from_address(self._word("local_keys") + 8 * n).value for n in range(2)]
        name = tag, key, *local, *[_keys_of(x, torch) for x in whole]
        if name not in self._known:
            if not self._has_room():
                return False
            made = _make_form(tag, whole, options, prepared, local, torch, more)
            if made is None:
                return False
            self._change(self._known | {name: made})
        return True

    def _has_room(self) -> bool:
        """Returns whether there is room for a form; takes that of one that was not used since this was last asked."""
        if len(self._known) < _MOST:
            return True
        used = FORM.word("used")
        idle = [name for name, known in self._known.items() if not known.form[used]]
        for known in self._known.values():
            known.form[used] = 0
        if idle:
            self._change({name: known for name, known in self._known.items() if name != idle[0]})
        return bool(idle)

    def forget(self) -> None:
        """Forgets all: Python repeats them, and they are learned anew."""
        if self._block is not None:
            self._change({})

    def _change(self, known: dict[Any, _Known]) -> None:
        """Tells the code which forms there are now: the last learned first, of more than there is room for."""
        known = dict([*known.items()][-_MOST:])  # a signal's handler may have learned some meanwhile
        forms = [ctypes.addressof(x.form) for x in reversed(known.values())]
        block, count, old = self._block, len(forms), self._known
        # a run of plain stores, between which no signal comes; `old` ends after it
        self._known = known
        self._forms[:count] = forms
        block[_COUNT] = count
        del old

    def _begin(self, torch: Any) -> bool:
        """Finds out where everything lies; returns whether all of it is as the code has it."""
        self._refused = True  # until it is known; whatever is raised here leaves it so
        places = _places(torch)
        if places is None:
            return False
        self._forms = (ctypes.c_int64 * _MOST)()
        self._room = take_pages(sum(PARTS.values()))
        self._block = (ctypes.c_int64 * len(BLOCK.names))()
        self._taken = object()
        self._set(
            thread=threading.get_ident(), until=0, none=id(None), tensor=id(torch.Tensor), float=id(float),
            options=id(Options), empty_like=id(torch.empty_like), region=id(workers.region_holder()),
            taken=id(self._taken), forms=ctypes.addressof(self._forms), count=0,
            room=ctypes.addressof(self._room), **places,
        )  # fmt: skip
        self.call = _function(ctypes.addressof(self._block))
        self._refused = False
        return True

    def _watch(self, machine: Any) -> None:
        """Notes the settings that all that is known depends on, as they are now; forgets what was learned of others."""
        watched = [
            (ENVIRONMENT, b"SPEEDLIGHT_ISA"), (ENVIRONMENT, b"SPEEDLIGHT_THREADS"), (vars(workers), "_threads"),
            (vars(sys.modules["torch"].autograd.forward_ad), "_current_level"),
        ]  # fmt: skip
        assert len(watched) == WATCHED
        self._set(until=0)  # nothing is repeated before all is noted: a signal may come between
        now = [(held, name, held.get(name)) for held, name in watched]
        self._watched = now  # kept alive: an address is that of one object
        for n, (held, name, value) in enumerate(now):
            at = 0 if value is None and name not in held else id(value)
            self._set(**{f"watched{n}_dict": id(held), f"watched{n}_key": id(name), f"watched{n}_value": at})
        machine = (*machine, workers.known_clock())  # a team may have ended since forms were written down
        if machine != self._machine:
            self.forget()
            self._machine = machine
        self._set(until=round(workers.counted_until() * 1e9))

    def _word(self, name: str) -> int:
        return self._block[BLOCK.word(name)]

    def _set(self, **words: int) -> None:
        for name, value in words.items():
            self._block[BLOCK.word(name)] = value

    def after_fork(self) -> None:
        """Leaves all to Python in a forked child: its threads are others."""
        self.call, self._refused = _unknown, True
        self._known.clear()


def _unknown(*_call: Any) -> None:
    """Knows no call."""


replays = Replays()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=replays.after_fork)


def _is_plain(options: Options, prepared: Any) -> bool:
    """Returns whether a call is one that the code can repeat: short, its result like q, at most one array beside q, k
    and v, and no other option that could change under its name.
    """
    launch, arrays = prepared.call.launch, options.arrays()
    if launch.seconds >= launch.region_seconds or prepared.staged or not prepared.call.form.alike:
        return False
    if prepared.size > _LARGEST:
        return False
    if len(arrays) > 1 or any([place.strides is not None for place in prepared.places]):
        return False
    if options.layout != "bhld" or options.dropout or options.seed is not None:
        return False
    if type(options.scale) not in (float, type(None)):
        return False
    others = [x for n, x in enumerate(options) if n not in (MASK, SCORE, SCALE)]
    if not all([type(x) in _FIXED or (type(x) is tuple and _FIXED.issuperset(map(type, x))) for x in others]):
        return False
    return all([_is_fixed(x) or (arrays and x is arrays[0]) for x in (options.mask, options.score)])


def _is_fixed(x: Any) -> bool:
    """Returns whether a mask or score is one that always computes what it does now: then it is known by identity. A
    table of a tensor may be followed by a later call, or refused.
    """
    return x is None or (type(x) is Expression and is_immutable(x) and all([t.origin is None for t in x.tables]))


def _make_form(
    tag: Any, tensors: tuple[Any, ...], options: Options, prepared: Any, local: list[int], torch: Any,
    more: dict[str, int],
) -> _Known | None:  # fmt: skip
    """Writes down a call; None where it needs more room than there is. more: words of one that grows, or of a step."""
    call, grows = prepared.call, bool(more.get("grows"))
    launch = call.launch
    kernel = launch.kernel
    template = (ctypes.c_char * len(launch.template)).from_buffer_copy(launch.template)
    tables = (ctypes.c_int64 * launch.slots[1].size)(*launch.slots[1].ravel().tolist()) if tensors[3:] else None
    words: dict[str, int] = {
        "tag": id(tag), "arguments": 7 if "sequences" in more else 5, "tensors": len(tensors), "role": -1,
        "local0": local[0], "local1": local[1],
        "scale_is_none": options.scale is None,
        "scale": 0 if options.scale is None else struct.unpack("q", struct.pack("d", options.scale))[0],
        "words": ctypes.addressof(template), "word_count": len(launch.template) // 8,
        "items": call.items_at, "item_count": call.items.size // len(ITEM), "slot": -1,
        "kernel": kernel.address, "tickets": launch.tickets, "threads": 1 if launch.inline else launch.threads,
        "inline_below": call.inline_keys, "groups": launch.groups, "partials": launch.partials_at,
        "wrong": launch.threads if launch.lookups else 0,
        "counts": call.counts_at, "seed": 0,
    }  # fmt: skip
    words |= more | {f"option{n}": id(x) for n, x in enumerate(options)}
    numbers, firsts = None, ()
    if tables is not None and prepared.places[0].first:
        numbers, firsts = launch.slots[0], (ctypes.c_int64 * len(prepared.places[0].first))(*prepared.places[0].first)
        words |= {
            "numbers": numbers.ctypes.data, "number_count": numbers.size, "firsts": ctypes.addressof(firsts),
            "first_count": len(firsts),
        }  # fmt: skip
    put, stored, store = prepared.put, None, None
    if put is not None:
        store = put.launch.kernel
        stored = (ctypes.c_char * len(put.launch.template)).from_buffer_copy(put.launch.template)
        words |= {
            "put": ctypes.addressof(stored), "put_count": len(stored) // 8, "put_tickets": put.launch.tickets,
            "put_ticket": store.ticket if put.within else 0, "put_kernel": 0 if put.within else store.address,
        }  # fmt: skip
    if tables is not None:
        words["role"] = MASK if options.mask is tensors[3] else SCORE
        words |= {"tables": ctypes.addressof(tables), "table_count": len(tables)}
        if prepared.places[0].slot is not None:
            words["slot"] = prepared.places[0].slot * (launch.slots[1].shape[1])
    if words["threads"] > 1:
        words |= workers.region_words(words["threads"])
    for t, x in enumerate(tensors):
        words |= _ranges(t, x, prepared, grows, torch)
    if grows:
        words["inside"] = 0 < tensors[1].stride(1) < tensors[1].stride(2)
    needs = {
        "words": len(launch.template), "put": len(stored or ()), "items": call.items.nbytes,
        "tables": 8 * len(tables or ()), "numbers": 0 if numbers is None else numbers.nbytes,
        "arrived": 8 * launch.groups,
        "wrong": WRONG.bytes * words["wrong"], "scratch": launch.scratch_bytes,
    }  # fmt: skip
    if any([needs[part] > PARTS[part] for part in PARTS]):
        return None
    form = (ctypes.c_int64 * len(FORM.names))()
    for name, value in words.items():
        form[FORM.word(name)] = value
    mask, score = (x if type(x) is Expression else None for x in (options.mask, options.score))  # and no array
    options = options._replace(mask=mask, score=score)
    known = _Known(form, (tag, options, prepared, kernel, template, tables, numbers, firsts, store, stored))
    form[FORM.word("owner")] = id(known)
    return known


def _ranges(t: int, x: Any, prepared: Any, grows: bool, torch: Any) -> dict[str, int]:
    """Returns what a tensor must be like: its own sizes and strides, but for what may change with the keys."""
    words = {f"keys{t}": _keys_of(x, torch), f"dims{t}": x.dim(), f"dtype{t}": _code_of(x), f"itemsize{t}": x.itemsize}
    for d, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        sizes, strides = (size, size), (stride, stride)
        of_keys = d == (2 if t < 3 else x.dim() - 1)
        if grows and t and of_keys:
            spans = prepared.spans
            sizes = (spans * SPAN // 2 if spans > 1 else 1) + 1, spans * SPAN
        if grows and t and d < x.dim() - 1:
            strides = 0, _ANY
        for name, value in zip(("size_low", "size_high", "stride_low", "stride_high"), sizes + strides, strict=True):
            words[f"{name}{t}_{d}"] = value
    return words


# --- where things lie


def _keys_of(x: Any, torch: Any) -> int:
    return torch._C._dispatch_keys(x).raw_repr()


def _library(torch: Any, name: str) -> ctypes.CDLL:
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", name))


def _code_of(x: Any) -> int:
    """Returns PyTorch's number of a dtype."""
    torch, code = sys.modules["torch"], ctypes.c_int32()
    _library(torch, "libtorch_cpu.so").aoti_torch_get_dtype(ctypes.byref(ctypes.c_void_p(x._cdata)), ctypes.byref(code))
    return code.value


def _places(torch: Any) -> dict[str, int] | None:
    """Returns addresses of functions, and where objects have what the code reads; None where that is not so."""
    if sys.platform != "linux" or sys.implementation.name != "cpython" or host_arch() not in ("x86_64", "aarch64"):
        return None
    if ENVIRONMENT is None or not _are_objects_known():
        return None
    try:
        of_torch, of_c10 = _library(torch, "libtorch_cpu.so"), _library(torch, "libc10.so")
        found = {name: _address(ctypes.pythonapi[name]) for name in PYTHON}
        found |= {name: _address(of_torch[name]) for name in TORCH}
        local = ctypes.addressof(ctypes.c_uint64.in_dll(of_c10, _KEY_SET))
        own = _tensor_places(torch)
    except (OSError, AttributeError, ValueError) as error:  # another release of PyTorch
        pass_on(error)
        return None
    return None if own is None else found | own | {"local_keys": local}


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _are_objects_known() -> bool:
    """Returns whether CPython's objects are as the code has them."""
    word = ctypes.c_int64.from_address
    number, text, pair = 0.375, struct.pack("q", 123456789), (object(), [])
    return (
        all([word(id(x) + OBJECT_TYPE).value == id(type(x)) for x in (number, text, pair, Options())])
        and ctypes.c_double.from_address(id(number) + FLOAT_VALUE).value == number
        and word(id(text) + BYTES_VALUE).value == 123456789
        and all([word(id(pair) + TUPLE_ITEMS + 8 * n).value == id(x) for n, x in enumerate(pair)])
        and getattr(sys, "_is_gil_enabled", lambda: True)()
    )


def _tensor_places(torch: Any) -> dict[str, int] | None:
    """Returns the bytes from a tensor to the address of its TensorImpl, and from that to its dispatch keys."""
    plain = torch.ones(2, 3)
    some = [
        plain,
        plain[1:, 1],
        torch._neg_view(plain),
        plain.to(torch.bfloat16),
        torch.ones(1, dtype=torch.complex64).conj(),
    ]
    with insides.TORCH.inference_mode(True):
        some.append(torch.ones(3))
    words = [(ctypes.c_uint64 * 4).from_address(id(x)) for x in some]
    at = [n for n in range(2, 4) if all([w[n] == x._cdata for w, x in zip(words, some, strict=True)])]
    heads = [(ctypes.c_uint64 * _HEAD).from_address(x._cdata) for x in some]
    keys = [n for n in range(_HEAD) if all([w[n] == _keys_of(x, torch) for w, x in zip(heads, some, strict=True)])]
    if len(at) != 1 or len(keys) != 1:
        return None
    return {"implementation": 8 * at[0], "keys": 8 * keys[0]}


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


_FASTCALL = 0x80  # METH_FASTCALL


def _function(block: int) -> Any:
    """Returns the code as a function of Python's. Never unloaded."""
    shape = ReplayShape(isa_named({"x86_64": "avx2", "aarch64": "neon"}[host_arch()]))
    symbol = symbol_of(shape)
    with lock:
        code = load(objects_of(shape)[0], (symbol,))
    method = _Method(b"replay", code[symbol], _FASTCALL, None)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    for kept in (code, method):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    return make(ctypes.addressof(method), struct.pack("q", block), None)
