"""An attention layer of ggml over a cache of its own codes, through the libraries that llama-cpp-python ships.

It is llama.cpp's own way: `ggml_flash_attn_ext` over a cache whose tokens have the heads side by side.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import types
from pathlib import Path
from typing import Any

import numpy as np

import speedlight as sl

_F32 = 0  # of ggml.h
_TYPES = {"q4_0": 2, "q8_0": 8}
_BLOCK = 32
# a float16 scale, then the codes of 32 numbers
_BLOCKS = {
    "q4_0": np.dtype([("scale", np.float16), ("codes", np.uint8, _BLOCK // 2)]),
    "q8_0": np.dtype([("scale", np.float16), ("codes", np.int8, _BLOCK)]),
}
_QUERIES = "q8_0"  # what ggml rounds queries to before it multiplies them with codes
_SPARE = 1 << 20  # bytes of a context beside its tensors' elements
_Pointer, _Long, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Parameters(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", _Pointer), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    """ggml_cplan."""

    _fields_ = (
        ("work_size", ctypes.c_size_t), ("work_data", _Pointer), ("threads", ctypes.c_int), ("pool", _Pointer),
        ("abort", _Pointer), ("abort_data", _Pointer), ("use_ref", ctypes.c_bool),
    )  # fmt: skip


_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # results, then arguments
    "ggml_cpu_init": (None,),
    "ggml_init": (_Pointer, _Parameters),
    "ggml_free": (None, _Pointer),
    "ggml_get_data": (_Pointer, _Pointer),
    "ggml_new_tensor_3d": (_Pointer, _Pointer, ctypes.c_int, _Long, _Long, _Long),
    "ggml_permute": (_Pointer, _Pointer, _Pointer, *[ctypes.c_int] * 4),
    "ggml_flash_attn_ext": (_Pointer, *[_Pointer] * 5, _Float, _Float, _Float),
    "ggml_new_graph": (_Pointer, _Pointer),
    "ggml_build_forward_expand": (None, _Pointer, _Pointer),
    "ggml_graph_plan": (_Plan, _Pointer, ctypes.c_int, _Pointer),
    "ggml_graph_compute": (ctypes.c_int, _Pointer, ctypes.POINTER(_Plan)),
    "ggml_get_type_traits_cpu": (ctypes.POINTER(_Pointer), ctypes.c_int),  # begins with from_float
}


@functools.cache
def _library() -> Any:
    """Returns the functions of ggml, with their types."""
    spec = importlib.util.find_spec("llama_cpp")  # whose import loads all of llama.cpp
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("expected llama-cpp-python", name="llama-cpp-python")
    folder = Path(spec.origin).parent / "lib"
    base, cpu = (ctypes.CDLL(str(folder / f"libggml-{x}.so"), mode=ctypes.RTLD_GLOBAL) for x in ("base", "cpu"))
    found = {}
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = found[name] = getattr(cpu if hasattr(cpu, name) else base, name)
        function.restype = result
        function.argtypes = arguments
    ggml = types.SimpleNamespace(**found)
    ggml.ggml_cpu_init()  # fills the tables by which float16 is converted
    return ggml


def _blocks(kind: str, x: np.ndarray) -> np.ndarray:
    """Returns the blocks of float32 rows, as a cache of this type stores them."""
    blocks = np.empty(x.size // _BLOCK, _BLOCKS[kind])
    address = _library().ggml_get_type_traits_cpu(_TYPES[kind])[0]
    ctypes.CFUNCTYPE(None, _Pointer, _Pointer, _Long)(address)(x.ctypes.data, blocks.ctypes.data, x.size)
    return blocks


def _numbers(blocks: np.ndarray) -> np.ndarray:
    """Returns the numbers that blocks stand for."""
    codes = blocks["codes"]
    if codes.dtype == np.uint8:  # number j is the low half of byte j, number j + 16 the high half
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.float32) - 8
    return (codes * blocks["scale"].astype(np.float32)[:, None]).astype(np.float32)


class Layer:
    """A call that attends with one token of a sequence, on as many threads as ours.

    q is (1, q_heads, 1, dim), k and v (1, kv_heads, tokens, dim). `numbers` are these as ggml rounds them.
    """

    def __init__(self, kind: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        ggml = self._ggml = _library()
        dim = q.shape[3]
        rows, *tokens = (np.ascontiguousarray(x[0].swapaxes(0, 1), np.float32) for x in (q, k, v))
        coded = [_blocks(kind, x) for x in tokens]
        numbers = (_numbers(_blocks(_QUERIES, rows)), _numbers(coded[0]), _numbers(coded[1]))
        of_q, of_k, of_v = (
            x.reshape(shape.shape).swapaxes(0, 1)[None] for x, shape in zip(numbers, (rows, *tokens), strict=True)
        )
        self.numbers = of_q, of_k, of_v
        size = sum(x.nbytes for x in (rows, *coded, rows))
        self._context = ggml.ggml_init(_Parameters(size + _SPARE, None, False))
        inputs = [self._tensor(_F32, rows.shape, rows)]
        inputs += [self._tensor(_TYPES[kind], x.shape, blocks) for x, blocks in zip(tokens, coded, strict=True)]
        out = ggml.ggml_flash_attn_ext(self._context, *inputs, None, dim**-0.5, 0.0, 0.0)
        self._graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(self._graph, out)
        self._plan = ggml.ggml_graph_plan(self._graph, sl.get_threads(), None)
        self._work = np.empty(self._plan.work_size, np.uint8)
        self._plan.work_data = self._work.ctypes.data
        data = ctypes.cast(ggml.ggml_get_data(out), ctypes.POINTER(_Float))
        self._out = np.ctypeslib.as_array(data, (q.size,)).reshape(q.shape)

    def _tensor(self, kind: int, shape: tuple[int, ...], content: np.ndarray) -> Any:
        """Returns a tensor of (length, heads, dim), seen as (heads, length, dim)."""
        length, heads, dim = shape
        tensor = self._ggml.ggml_new_tensor_3d(self._context, kind, dim, heads, length)
        ctypes.memmove(self._ggml.ggml_get_data(tensor), content.ctypes.data, content.nbytes)
        return self._ggml.ggml_permute(self._context, tensor, 0, 2, 1, 3)

    def __call__(self) -> np.ndarray:
        if self._ggml.ggml_graph_compute(self._graph, ctypes.byref(self._plan)):
            raise RuntimeError("ggml_graph_compute() failed")
        return self._out

    def __del__(self) -> None:
        if hasattr(self, "_context"):
            self._ggml.ggml_free(self._context)
