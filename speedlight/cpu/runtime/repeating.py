"""Loads the machine code that reads arrays and repeats prepared calls, and hands it what it may call."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

from ...errors import pass_on
from ...host.insides import TORCH
from ...host.llvm import load
from ...host.machine import host_arch, isa_named
from ...problem.prepared import prepared_calls, read_plainly
from ...problem.problem import spans_of
from ..kernels.repeat import KEY_PARTS, PYTHON, RepeatShape
from ..memory.records import READER, REPEAT, TABLED, WRONG
from . import workers
from .compile import lock, objects_of, symbol_of

_FASTCALL = 0x80  # METH_FASTCALL
_EXCHANGE = b"dlpack_exchange_api"
_READ_AT = 16 + 3 * 8  # bytes to dltensor_from_py_object_no_sync, behind a header and three other functions
_MOST_ROOM = 8 << 20  # bytes of a call's words and scratch, at most
_LINE = 64
# forward mode's level outside of it, which PyTorch has as this very object: a small number
_LEVEL, _NO_LEVEL = "_current_level", -1
_REFUSALS = (RuntimeError, BufferError, TypeError, ValueError)  # by which libraries do not hand out an array


class Functions:
    """The functions `read`, `run` and `repeat` of this process."""

    def __init__(self) -> None:
        self.read: Any = read_plainly
        self.repeat: Any = self.repeat_rest
        self.run: Any = None  # where this Python has no such functions
        self._has_torch = False
        self._block = (ctypes.c_int64 * len(READER.names))()
        self._held: list[Any] = [object()]
        self._set(
            none=None, false=False, refusals=_REFUSALS, ndarray=np.ndarray, plainly=self.read_rest,
            region=workers.region_holder(), taken=self._held[0], team=workers.team_address,
            prepared=prepared_calls.held, clock=prepared_calls.clock, call="call", record="record", address="address",
        )  # fmt: skip
        if _is_known_python():
            self._load()

    def read_rest(self, rows: int, *arrays: Any) -> tuple[Any, bytes] | None:
        """Reads what machine code leaves to Python; hands PyTorch's functions over once PyTorch is there."""
        if not self._has_torch and "torch" in sys.modules:
            self._hand_over(sys.modules["torch"])
            self._has_torch = True  # not before: an interrupt would leave all tensors to Python
            return self.read(rows, *arrays)
        return read_plainly(rows, *arrays)

    def repeat_rest(self, *given: Any) -> tuple[Any, bytes] | None:
        """Reads the arrays of a call for Python to repeat it."""
        return self.read_rest(*given[KEY_PARTS:])

    def _load(self) -> None:
        shape = RepeatShape(isa_named({"x86_64": "avx2", "aarch64": "neon"}[host_arch()]))
        symbol = symbol_of(shape)
        names = symbol, f"{symbol}_read", f"{symbol}_repeat"
        symbols = {name: ctypes.cast(ctypes.pythonapi[name], ctypes.c_void_p).value or 0 for name in PYTHON}
        with lock:
            code = load(objects_of(shape)[0], names, symbols=symbols)
        block = _call("PyCapsule_New", ctypes.py_object, ctypes.addressof(self._block), None, None)
        self.run, self.read, self.repeat = (self._function(name, code, block) for name in names)

    def _function(self, name: str, code: Any, block: Any) -> Any:
        """Makes a function of Python's. It, and what it reads, stay: whoever has the function may call it."""
        method = _Method(name.encode(), code[name], _FASTCALL, None)
        for kept in (method, code, self._block, self._held):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        return _call("PyCFunction_NewEx", ctypes.py_object, ctypes.addressof(method), ctypes.py_object(block), None)

    def _hand_over(self, torch: Any) -> None:
        """Tells machine code what PyTorch offers; tensors are read in Python where a part of that is missing."""
        api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        exchange = 0 if api is None else _exchange_function(api)
        if not exchange or TORCH.is_cow_tensor is None:
            return
        questions = [
            (torch.is_grad_enabled, False),
            (TORCH.len_torch_dispatch_stack, 0),
            (TORCH.get_tracing_state, None),
            (TORCH.peek_interpreter_stack, None),
        ]
        words = (ctypes.c_int64 * (2 * len(questions)))(*[id(x) for pair in questions for x in pair])
        self._held += [questions, words]
        self._block[READER.word("exchange")] = exchange
        self._block[READER.word("questions")] = ctypes.addressof(words)
        self._block[READER.word("question_count")] = len(questions)
        self._set(
            is_neg=torch.Tensor.is_neg,
            is_copy_on_write=TORCH.is_cow_tensor,
            untyped_storage=torch.Tensor.untyped_storage,
            storage_offset=torch.Tensor.storage_offset,
            empty_like=torch.empty_like,
            level_of=vars(TORCH.forward_ad),
            level=_LEVEL,
            no_level=_NO_LEVEL,
        )
        self._set(tensor=torch.Tensor)  # last: from now on tensors are read

    def _set(self, **objects: Any) -> None:
        for name, x in objects.items():
            self._held.append(x)
            self._block[READER.word(name)] = id(x)


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


@functools.cache
def functions() -> Functions:
    """Returns the functions, loaded at the first call."""
    return Functions()


def _is_known_python() -> bool:
    """Returns whether this is CPython with its lock, on a CPU that has kernels."""
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    return sys.implementation.name == "cpython" and has_lock and host_arch() in ("x86_64", "aarch64")


def _call(name: str, returns: Any, *arguments: Any) -> Any:
    """Calls one of CPython's functions."""
    function = ctypes.pythonapi[name]
    function.restype = returns
    function.argtypes = [type(x) if isinstance(x, ctypes.py_object) else ctypes.c_void_p for x in arguments]
    return function(*arguments)


def _exchange_function(api: Any) -> int:
    """Returns the address of the function that describes a tensor; 0 where the API has another version."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        at = get(api, _EXCHANGE)
    except ValueError as error:  # a capsule of another name
        pass_on(error, ValueError)
        return 0
    major = ctypes.c_uint32.from_address(at).value
    return ctypes.c_void_p.from_address(at + _READ_AT).value or 0 if major == 1 else 0


class Record:
    """A prepared call as machine code runs it, and what must live as long.

    run(address, …) is kernels/repeat.py's: it returns None where it does not take the call.
    """

    __slots__ = ("_held", "address", "run")

    def __init__(self, words: dict[str, int], held: list[Any]) -> None:
        record = (ctypes.c_int64 * len(REPEAT.names))()
        for name, value in words.items():
            record[REPEAT.word(name)] = value
        self.address, self._held = ctypes.addressof(record), [*held, record]
        self.run = functions().run


def _never(*_call: Any) -> None:
    """Takes no call."""


class _NotRepeated:
    """Stands for the record of a call that machine code does not run."""

    address, run = 0, staticmethod(_never)


NOT_REPEATED = _NotRepeated()


def record_of(call: Any) -> Record | None:
    """Returns a call as machine code runs it; None for a long one, between whose regions Python sees signals."""
    launch, put = call.launch, call.put
    if functions().run is None or launch.seconds >= launch.region_seconds or not launch.tickets:
        return None
    if call.in_parts or any([place.is_copied for place in call.places]) or len(call.places) > len(TABLED):
        return None
    if put is not None and not (put.within or put.launch.inline):
        return None
    kernel = launch.kernel
    held: list[Any] = [kernel]
    templates = {"words": launch.template, "items": call.items_bytes, "tables": b"", "numbers": b"", "put": b""}
    words: dict[str, int] = {
        "none": id(None), "kernel": kernel.address, "tickets": launch.tickets,
        "threads": 1 if launch.inline else launch.threads, "inline_below": call.inline_keys, "rows": call.rows,
        "counts": call.counts_at, "partials": launch.partials_at, "arrived_count": launch.groups,
        "wrong_count": launch.threads if launch.lookups else 0,
        "alike": int(call.result_layout.alike), "new": 0 if put is None else put.counts[0],
        "spans": spans_of(max(call.problem.k_lengths, default=0)), "scaled": int(call.is_scaled),
        **{f"slot{t}": -1 for t in TABLED},
    }  # fmt: skip
    if call.places:
        templates["tables"] = launch.slots[1].tobytes()
        for t, place in zip(TABLED, call.places, strict=False):
            firsts = (ctypes.c_int64 * len(place.first))(*place.first)
            held.append(firsts)
            slot = -1 if place.slot is None else place.slot * launch.slots[1].shape[1]
            words |= {f"slot{t}": slot, f"dims{t}": place.dims}
            words |= {f"firsts{t}": ctypes.addressof(firsts), f"first_count{t}": len(firsts)}
            if place.first:
                templates["numbers"] = launch.slots[0].tobytes()
    if put is not None and put.launch.tickets:
        store = put.launch.kernel
        held.append(store)
        templates["put"] = put.launch.template
        words["put_tickets"] = put.launch.tickets
        words["put_ticket" if put.within else "put_kernel"] = store.ticket if put.within else store.address
        store.records.add(call)
    sizes = {name: len(text) for name, text in templates.items()}
    sizes["arrived"] = 8 * launch.groups
    sizes["wrong"] = WRONG.bytes * words["wrong_count"]
    sizes["scratch"] = launch.scratch_bytes
    end = 0
    for name, size in sizes.items():
        words[name] = end
        end += -(-size // _LINE) * _LINE
    if end > _MOST_ROOM:
        return None
    words["room"] = end + _LINE
    for name, text in templates.items():
        memory = ctypes.create_string_buffer(text, len(text)) if text else None
        held.append(memory)
        words[f"{name}_from"] = ctypes.addressof(memory) if memory is not None else 0
        words[f"{name}_count"] = len(text) // 8
    kernel.records.add(call)
    return Record(words, held)
