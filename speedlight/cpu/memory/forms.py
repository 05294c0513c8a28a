"""What a replay knows: of the process (`BLOCK`) and of each call (`FORM`), and the memory that it works in.

The host fills them (runtime/replay.py), machine code reads them (kernels/replay.py). LLVM is not needed here.
"""

from __future__ import annotations

from ...problem.options import OPTION_NAMES
from .records import Record

TENSORS, DIMS, OPTIONS = 4, 4, len(OPTION_NAMES)  # q, k, v and an array of a mask or score; of each; of a call
MASK, SCORE, SCALE, DROPOUT = map(OPTION_NAMES.index, ("mask", "score", "scale", "dropout"))
WATCHED = 4  # entries of dictionaries that must be the same objects

# Functions of CPython and of PyTorch's stable C interface, by address
PYTHON = ("PyDict_GetItem", "PyList_GetItem", "PyList_SetItem", "PyList_Size", "PyLong_AsLongLong",
          "PyObject_CallOneArg", "Py_IncRef", "Py_DecRef", "PyEval_SaveThread", "PyEval_RestoreThread")  # fmt: skip
TORCH = ("aoti_torch_grad_mode_is_enabled", "aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_strides",
         "aoti_torch_get_dtype", "aoti_torch_get_storage_size", "aoti_torch_get_storage_offset",
         "torch_get_const_data_ptr", "torch_get_mutable_data_ptr")  # fmt: skip

BLOCK = Record(
    "thread", "until",  # who may call, and when (nanoseconds) threads must be counted anew
    "none", "tensor", "float", "options",  # the object, and types
    "implementation", "keys",  # bytes from a tensor to its TensorImpl, from that to its dispatch keys
    "local_keys",  # address of the thread's own two words of dispatch keys
    "empty_like", "region", "taken",  # the function; workers' list, and what it holds while this one has it
    *(f"watched{i}_{x}" for i in range(WATCHED) for x in ("dict", "key", "value")),
    "forms", "count", "room",  # addresses of forms, one after another; how many; memory to work in
    *PYTHON, *TORCH,
)  # fmt: skip

RANGES = ("size_low", "size_high", "stride_low", "stride_high")
FORM = Record(
    "tag", "arguments", "tensors", "role", "local0", "local1",  # role: which option is the fourth tensor; -1: none
    "scale_is_none", "scale",
    *(f"option{i}" for i in range(OPTIONS)),
    *(f"{x}{t}" for t in range(TENSORS) for x in ("keys", "dims", "dtype", "itemsize")),
    *(f"{x}{t}_{d}" for t in range(TENSORS) for d in range(DIMS) for x in RANGES),
    "grows", "inside",  # any number of keys; heads of a token lie inside a row
    "words", "word_count", "items", "item_count", "tables", "table_count", "slot",  # templates
    "numbers", "number_count", "firsts", "first_count",  # … and which of the numbers are the first row's position
    "kernel", "tickets", "threads", "inline_below", "groups", "partials", "wrong", "counts", "seed",
    "serve", "team", "openmp", "clock",  # of a region
    # a step of a cache: sequences (0: no step), their new tokens and their lengths before; the call that stores those
    "sequences", "new", "length_low", "length_high", "put", "put_count", "put_kernel", "put_ticket", "put_tickets",
    "used", "owner",  # calls that it had; the object that keeps it alive
)  # fmt: skip

# bytes of each part of the room, and where each begins
PARTS = {
    "words": 2048,
    "items": 16384,
    "tables": 4096,
    "numbers": 512,
    "put": 4096,
    "arrived": 8192,
    "wrong": 16384,
    "scratch": 8 << 20,
}
ROOM_AT = dict(zip(PARTS, [sum(list(PARTS.values())[:n]) for n in range(len(PARTS))], strict=True))
# bytes from the beginning of CPython's objects; checked where the block is filled
AT_OPTIONS, AT_PLACES, AT_LENGTHS = 4, 5, 6  # among Python's arguments
OBJECT_TYPE, TUPLE_ITEMS, FLOAT_VALUE, BYTES_VALUE = 8, 24, 16, 32
SEQUENCES = 64  # of a step, at most
AFTER = TENSORS * (1 + 2 * DIMS)  # word of a frame from which on it has lengths after a step
FRAME_WORDS = AFTER + SEQUENCES


def at_tensor(t: int, word: int) -> int:
    """Returns where a frame has a word of a tensor: 0 its address, from 1 on sizes, from 5 on strides in bytes."""
    return 8 * (t * (1 + 2 * DIMS) + word)
