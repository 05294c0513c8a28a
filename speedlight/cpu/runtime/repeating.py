"""Repeats prepared calls in machine code (kernels/repeat.py): loads it, and hands it what it may call."""

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
from ..kernels.repeat import PYTHON, RepeatShape
from ..memory.records import ITEM, READER, REPEAT, WRONG
from . import workers
from .compile import lock, objects_of, symbol_of

_FASTCALL = 0x80  # METH_FASTCALL
_EXCHANGE = b"dlpack_exchange_api"
_READ_AT = 16 + 3 * 8  # bytes to dltensor_from_py_object_no_sync, behind a header and three other functions
_MOST_ROOM = 8 << 20  # bytes that a call takes for its words and scratch


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


class Repeater:
    """The two functions: `run`, and `read` once PyTorch is loaded and has the exchange API."""

    def __init__(self) -> None:
        self.block = (ctypes.c_int64 * len(READER.names))()
        self.taken = object()
        self._set(none=id(None), false=id(False), ndarray=id(np.ndarray), region=id(workers.region_holder()), taken=id(self.taken))
        shape = RepeatShape(isa_named({"x86_64": "avx2", "aarch64": "neon"}[host_arch()]))
        symbol = symbol_of(shape)
        with lock:
            self._code = load(objects_of(shape)[0], (symbol, f"{symbol}_read"), symbols=_addresses(PYTHON))
        self.run = self._function(b"run", symbol)
        self._read = self._function(b"read", f"{symbol}_read")
        self.read: Any = None

    def find_tensors(self) -> None:
        """Hands over what PyTorch offers; without the exchange API `read` stays None."""
        import torch

        api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        is_copy_on_write = getattr(torch._C, "_is_cow_tensor", None)
        if api is None or is_copy_on_write is None:
            return
        pointer = _pointer_of(api, _EXCHANGE)
        version = (ctypes.c_uint32 * 2).from_address(pointer)
        exchange = ctypes.c_void_p.from_address(pointer + _READ_AT).value
        if version[0] != 1 or not exchange:
            return
        level = functools.partial(getattr, TORCH.forward_ad, "_current_level")
        asked = [
            (torch.is_grad_enabled, False),
            (TORCH.len_torch_dispatch_stack, 0),
            (TORCH.get_tracing_state, None),
            (TORCH.peek_interpreter_stack, None),
            (level, -1),
        ]
        self._questions = (ctypes.c_int64 * (2 * len(asked)))(*[id(x) for pair in asked for x in pair])
        functions = {
            "is_neg": torch.Tensor.is_neg,
            "is_copy_on_write": is_copy_on_write,
            "untyped_storage": torch.Tensor.untyped_storage,
            "nbytes": torch.UntypedStorage.nbytes,
            "storage_offset": torch.Tensor.storage_offset,
        }
        self._held = asked, functions
        self._set(
            tensor=id(torch.Tensor), exchange=exchange, questions=ctypes.addressof(self._questions),
            question_count=len(asked), **{name: id(x) for name, x in functions.items()},
        )  # fmt: skip
        self.read = self._read

    def _set(self, **words: int) -> None:
        for name, value in words.items():
            self.block[READER.word(name)] = value

    def _function(self, name: bytes, symbol: str) -> Any:
        method = _Method(name, self._code[symbol], _FASTCALL, None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(method))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._code))
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        make = ctypes.pythonapi.PyCFunction_NewEx
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
        return make(ctypes.addressof(method), capsule(ctypes.addressof(self.block), None, None), None)


def _pointer_of(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, name)


def _addresses(names: Any) -> dict[str, int]:
    return {name: ctypes.cast(ctypes.pythonapi[name], ctypes.c_void_p).value or 0 for name in names}


def record_of(call: Any, prepared: Any) -> Any:
    """Writes down a prepared call for `run`; None where that cannot run it."""
    launch = call.launch
    if launch.seconds >= launch.region_seconds:
        return None
    kernel = launch.kernel
    template = (ctypes.c_char * len(launch.template)).from_buffer_copy(launch.template)
    parts: dict[str, tuple[int, int]] = {  # address and words of each template
        "words": (ctypes.addressof(template), len(launch.template) // 8),
        "items": (call.items_at, call.items.size),
        "tables": (0, 0), "numbers": (0, 0), "put": (0, 0),
    }
    held: list[Any] = [kernel, template, call]
    words = {
        "none": id(None), "kernel": kernel.address, "tickets": launch.tickets, "counts": call.counts_at,
        "partials": launch.partials_at, "rows": prepared.rows, "new": prepared.new,
        "arrived_count": launch.groups, "wrong_count": launch.threads if launch.lookups else 0,
        "slot3": -1, "slot4": -1,
    }
    if prepared.places:
        tables = (ctypes.c_int64 * launch.slots[1].size)(*launch.slots[1].ravel().tolist())
        parts["tables"] = ctypes.addressof(tables), len(tables)
        held.append(tables)
        for n, place in enumerate(prepared.places):
            if place.strides is not None:
                return None
            words[f"slot{3 + n}"] = -1 if place.slot is None else place.slot * launch.slots[1].shape[1]
            words[f"dims{3 + n}"] = place.dims
            if place.first:
                firsts = (ctypes.c_int64 * len(place.first))(*place.first)
                held.append(firsts)
                words[f"firsts{3 + n}"], words[f"first_count{3 + n}"] = ctypes.addressof(firsts), len(firsts)
                parts["numbers"] = launch.slots[0].ctypes.data, launch.slots[0].size
    put = prepared.put
    if put is not None:
        store = put.launch.kernel
        stored = (ctypes.c_char * len(put.launch.template)).from_buffer_copy(put.launch.template)
        parts["put"] = ctypes.addressof(stored), len(stored) // 8
        words |= {"put_tickets": put.launch.tickets, "put_ticket": store.ticket if put.within else 0,
                  "put_kernel": 0 if put.within else store.address}
        held += [store, stored]
    sizes = {name: 8 * count for name, (_, count) in parts.items()}
    sizes |= {"arrived": 8 * launch.groups, "wrong": WRONG.bytes * words["wrong_count"], "scratch": launch.scratch_bytes}
    at = 0
    for name, size in sizes.items():
        words[name] = at
        at += -(-size // 64) * 64
    if at > _MOST_ROOM:
        return None
    words["room"] = at + 64
    for name, (address, count) in parts.items():
        words[f"{name}_from"], words[f"{name}_count"] = address, count
    record = (ctypes.c_int64 * len(REPEAT.names))()
    for name, value in words.items():
        record[REPEAT.word(name)] = value
    return record, ctypes.addressof(record), held
