"""Calls that differ in one thing alone, at doors that remember calls: made from the list of options, and from what an
array has. They are what the keys of memos must tell apart.

A case is a dict: how each array lies, options by name, threads, the vector unit, and whatever else a door has.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from problems import numpy_dtype
from steps import sign
from tolerance import assert_within
from torch.nn.attention import flex_attention as flex

import speedlight as sl
import speedlight.torch
from speedlight import reference
from speedlight.host.machine import current_isa, host_isas

Case = dict[str, Any]
NUMBERS, MARGIN = 1 << 16, 1 << 11  # in an array's memory, and before its first: a stale stride still leads inside


@dataclass(frozen=True)
class Lie:
    """How an array lies: strides in elements, any of them, since one that is only read may overlap itself."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    dtype: str = "float32"
    numbers: int = 0  # which
    grad: bool = False
    way: str = ""  # of WAYS: what an array is besides

    @classmethod
    def of(cls, *shape: int, dtype: str = "float32", numbers: int = 0) -> Lie:
        steps = [*itertools.accumulate(shape[:0:-1], lambda a, b: a * b, initial=1)]
        return cls(shape, tuple(steps[::-1]), dtype, numbers)

    def sized(self, axis: int, size: int) -> Lie:
        return replace(self, shape=(*self.shape[:axis], max(0, size), *self.shape[axis + 1 :]))

    def stepped(self, axis: int, step: int) -> Lie:
        return replace(self, steps=(*self.steps[:axis], step, *self.steps[axis + 1 :]))

    def apart(self, written: bool = False, kind: str = "") -> Iterator[tuple[str, Lie]]:
        """Yields it with another stride, size or dtype, and in the ways of its kind. `written`: it may not overlap
        itself.
        """
        for axis, step in enumerate(self.steps):
            yield f"stride {axis}", self.stepped(axis, math.prod(self.shape) if written else step + 1)
        for axis, size in enumerate(self.shape):
            yield f"size {axis}", self.sized(axis, size - 1)
        yield "one more dimension", replace(self, shape=(1, *self.shape), steps=(1, *self.steps))
        for dtype in ("int8", "float32") if self.dtype == "bool" else ("float64", "float16", "int32"):
            yield dtype, replace(self, dtype=dtype)
        if self.dtype != "bool":
            yield "requires grad", replace(self, grad=True)
        for way in WAYS.get(kind, ()):
            yield way, replace(self, way=way)


def _negated(x: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(x) if x.is_floating_point() else x


def _all_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor."""
    return x.as_strided((NUMBERS,), (1,), 0)


def _lazy(x: torch.Tensor) -> torch.Tensor:
    return torch._lazy_clone(_all_of(x).clone()).as_strided(x.shape, x.stride(), MARGIN)


def _cut(x: torch.Tensor, numbers: int) -> torch.Tensor:
    """Returns the tensor in memory that has become too small."""
    x = _all_of(x).clone().as_strided(x.shape, x.stride(), MARGIN)
    x.untyped_storage().resize_(numbers * x.itemsize)
    return x


def _inferred(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def _locked(x: np.ndarray) -> np.ndarray:
    x = x.view()
    x.flags.writeable = False
    return x


def _misaligned(x: np.ndarray) -> np.ndarray:
    """Returns the array a byte further than numbers of its kind lie."""
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:]
    return _filled(np.frombuffer(memory, x.dtype)[: x.size].reshape(x.shape), x)


def _filled(to: np.ndarray, x: np.ndarray) -> np.ndarray:
    to[...] = x
    return to


class Mine(np.ndarray):
    """A class of somebody's."""


# what an array may be besides its layout; what it holds is the same
WAYS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "torch": {
        "negated": _negated,
        "copied when it is written to": _lazy,
        "resized to nothing": lambda x: _cut(x, 0),
        "resized to less": lambda x: _cut(x, MARGIN + 1),
        "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
        "of inference mode": _inferred,
        "an array of NumPy": lambda x: x.numpy(),
    },
    "numpy": {
        "locked": _locked,
        "misaligned": _misaligned,
        "of another byte order": lambda x: _filled(np.empty(x.shape, x.dtype.newbyteorder()), x),
        "reversed": lambda x: x[::-1],
        "of a class of somebody's": lambda x: x.view(Mine),
        "masked": np.ma.array,
        "a tensor": lambda x: torch.as_tensor(np.ascontiguousarray(x)),
    },
}


class Memory:
    """The numbers of arrays. Each call has them elsewhere: nothing may be told by an address."""

    def __init__(self) -> None:
        self.turn = 0
        self.known: dict[Any, Any] = {}

    def array(self, name: str, lie: Lie, kind: str) -> Any:
        """Returns an array of NumPy's or PyTorch's; one that is called out lies where no other does."""
        assert sum([max(0, n - 1) * step for n, step in zip(lie.shape, lie.steps, strict=True)]) < NUMBERS - 2 * MARGIN
        key = name, lie.dtype, lie.numbers, kind, self.turn % 2
        numbers: Any = self.known.get(key)
        if numbers is None:
            drawn = np.random.default_rng([*map(ord, name), lie.numbers]).standard_normal(NUMBERS)
            numbers = (drawn > -0.7 if lie.dtype == "bool" else drawn).astype(numpy_dtype(lie.dtype))
            self.known[key] = numbers = torch.from_numpy(numbers) if kind == "torch" else numbers
        if name.startswith("out"):
            numbers = numbers.clone() if kind == "torch" else numbers.copy()
        if kind == "torch":
            x = numbers.as_strided(lie.shape, lie.steps, MARGIN)
            x = WAYS[kind][lie.way](x) if lie.way in WAYS[kind] else x
            may_follow = isinstance(x, torch.Tensor) and x.is_floating_point() and not x.is_inference()
            return x.requires_grad_() if lie.grad and may_follow else x
        steps = [n * numbers.itemsize for n in lie.steps]
        x = np.lib.stride_tricks.as_strided(numbers[MARGIN:], lie.shape, steps)
        return WAYS[kind][lie.way](x) if lie.way in WAYS[kind] else x

    def made(self, x: Any, name: str, kind: str) -> Any:
        """Returns what a case has under a name: an array, or a list of some, or what is neither."""
        if isinstance(x, Lie):
            return self.array(name, x, kind)
        if type(x) is list and any([isinstance(one, Lie) for one in x]):
            return [self.made(one, f"{name}{n}", kind) for n, one in enumerate(x)]
        return x


# --- options

BY_SIGN = sl.expression(lambda s, b, h, i, j: s + sign(s))
SQUARE, PADDING = Lie.of(4, 9, dtype="bool"), Lie.of(2, 1, 1, 9, dtype="bool")
BIAS, ROW = Lie.of(4, 9), Lie.of(2, 1, 1, 9)


def of_zero(z: float) -> Any:
    """Returns a mask that shows everything, or nothing, by the sign of a zero."""
    return sl.expression(lambda b, h, i, j: (i * 0 + 1.0) / (i * 0 + z) > 0)


# of each option values, and what stands beside them, for 2 items, 4 heads, 4 queries and 9 keys
OPTIONS: dict[str, list[tuple[list[Any], Case]]] = {
    "mask": [
        ([SQUARE, PADDING, Lie.of(2, 4, 4, 9, dtype="bool"), Lie.of(1, 9, dtype="bool"), None], {}),
        ([sl.window(2, 2), sl.window(2, 3)], {}),
        ([SQUARE, PADDING, Lie.of(1, 9, dtype="bool")], {"window": (2, 0)}),
        ([of_zero(0.0), of_zero(-0.0)], {}),
    ],
    "score": [
        ([BIAS, ROW, [BIAS], [BIAS, ROW], [ROW, BIAS], None], {}),
        ([sl.softcap(0.5), sl.softcap(0.25)], {}),
        ([BIAS, ROW], {"causal": True}),
    ],
    "sink_logits": [([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 4.0], [0.0, 1.0], None], {})],
    "indices": [
        ([np.zeros((2, 4, 1), int), np.ones((2, 4, 1), int), np.zeros((2, 4, 2), int), None], {}),
        ([np.full((2, 4, 1), 3), None], {"causal": True}),
    ],
    "scale": [([0.25, 0.5, 1, None], {}), ([0.0, -0.0], {"score": BY_SIGN})],
    "dropout": [([0.25, 0.5, 1, 0.0, None], {"seed": 1}), ([0.0, 0.5], {})],
    "seed": [([1, 2, 0, None, -1], {"dropout": 0.5}), ([None, 1, -1], {})],
    "causal": [([False, True, "top-left", "bottom-right"], {})],
    "window": [([(2, 0), (3, 0), (2, 1), (2, None), None, (1,)], {})],
    "q_start": [([0, 3, None, [3, 3], [3, 4]], {"causal": True})],
    "layout": [(["bhld", "blhd", "bhsd", "lhd"], {})],
    "q_lengths": [([[4, 2], [4, 3], None, [4]], {}), ([[4, 2], [4, 3]], {"causal": True})],
    "k_lengths": [([[9, 5], [9, 6], None, [9]], {})],
    "lengths": [([[4, 2], [4, 3], None], {})],
    "cu_seqlens_q": [([[0, 4, 6], [0, 3, 6], None], {})],
    "cu_seqlens_k": [([[0, 5, 9], [0, 4, 9], None], {})],
    "k_start": [([0, 1024, 1], {"causal": True, "q_start": 1030})],
    "precision": [(["ieee", "tf32"], {})],
}  # fmt: skip


def twins_of(x: Any) -> Iterator[Any]:
    """Yields what equals a value, or reads like it, but has another type or another bit."""
    if isinstance(x, (list, tuple)) and {int, float, type(None)}.issuperset(map(type, x)) and x:
        yield tuple(x) if type(x) is list else list(x)
        if None not in x:
            yield from (np.array(x), np.array(x, float), np.array(x, ">i4"), np.array([x]), torch.tensor(x))
        for last in itertools.islice(twins_of(x[-1]), 3):
            yield type(x)([*x[:-1], last])
    elif isinstance(x, (bool, int, float)):
        if x == 0 and type(x) is float:
            yield -x
        yield from [kind(x) for kind in (bool, int, float) if kind is not type(x) and kind(x) == x]
        yield from (np.float32(x), np.array(x), torch.tensor(x), str(x))
    elif isinstance(x, str):
        yield from (x.encode(), np.str_(x), x.swapcase())
    elif x is None:
        yield from ("None", False)


# --- doors


@dataclass(frozen=True)
class Door:
    """A public call that remembers: `run` takes it with a case's arrays, and returns its results."""

    run: Callable[[Memory, Case], Any]
    check: Callable[[Memory, Case, list[Any]], None] | None  # compares results with the reference
    base: Case
    options: frozenset[str]
    sizes: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)  # where arrays have one size together
    more: tuple[tuple[Case, Case], ...] = ()  # two changes of the base that make a pair


class Pair(NamedTuple):
    """Two cases that differ in one thing."""

    what: str
    first: Case
    second: Case


def pairs_of(door: Door, *, whole: bool) -> Iterator[Pair]:
    """Yields pairs for all that a door's calls may differ in; if not `whole`, one or two for each option."""
    base = door.base
    for name, x in base.items():
        if isinstance(x, Lie):
            for what, other in x.apart(name.startswith("out"), base["kind"]):
                yield Pair(f"{name}: {what}", base, base | {name: other})
    for size, places in door.sizes.items():
        for more in (-1, 1, 2, -2, *([3000] if size == "k_len" else [])):
            other = {
                name: base[name].sized(axis, base[name].shape[axis] + more) for name, axis in places if base.get(name)
            }
            yield Pair(f"{size}: {more} more", base, base | other)
    for dtype in ("float64", "float16"):
        arrays = {name: replace(x, dtype=dtype) for name, x in base.items() if isinstance(x, Lie) and x.dtype != "bool"}
        yield Pair(f"all {dtype}", base, base | arrays)
        yield Pair(f"k, v {dtype}", base, base | {n: x for n, x in arrays.items() if n in ("k", "v")})
    for name in sorted(door.options):
        few = 2 if name in ("mask", "score") else 1  # arrays, then expressions
        for values, beside in OPTIONS[name] if whole else OPTIONS[name][:few]:
            given = base | beside
            for a, b in itertools.pairwise(values if whole else values[:2]):
                yield Pair(f"{name}: {a}, {b}", given | {name: a}, given | {name: b})
            for a in values if whole else ():
                is_array = isinstance(a, Lie)
                for what, b in a.apart(kind=base["kind"]) if is_array else [(repr(x), x) for x in twins_of(a)]:
                    yield Pair(f"{name}: {a}, {what}", given | {name: a}, given | {name: b})
    for a, b in door.more:
        yield Pair(f"{a}, {b}", base | a, base | b)
    units = [x.name for x in host_isas()]
    yield Pair("threads", base | {"threads": 1}, base | {"threads": 2})
    yield Pair("unit", base | {"unit": units[0]}, base | {"unit": units[-1]})


@contextmanager
def machine(case: Case) -> Iterator[None]:
    """Sets what of the machine a case has."""
    before = os.environ.get("SPEEDLIGHT_ISA")
    sl.set_threads(case.get("threads", 1))
    if "unit" in case:
        os.environ["SPEEDLIGHT_ISA"] = case["unit"]
    try:
        yield
    finally:
        sl.set_threads(None)
        os.environ.pop("SPEEDLIGHT_ISA", None)
        if before is not None:
            os.environ["SPEEDLIGHT_ISA"] = before


def arrays_of(memory: Memory, case: Case, names: Sequence[str]) -> list[Any]:
    """Returns what a case has under these names, arrays made."""
    return [memory.made(case[name], name, case["kind"]) for name in names]


def options_of(memory: Memory, case: Case) -> Case:
    """Returns the options of a case, arrays made."""
    return {name: memory.made(x, name, case["kind"]) for name, x in case.items() if name in OPTIONS}


def flat(results: Any) -> list[Any]:
    """Returns results as a list of arrays."""
    if isinstance(results, (tuple, list)) and not {int}.issuperset(map(type, results)):
        return [x for y in results for x in flat(y)]
    return [results]


def attend(memory: Memory, case: Case) -> Any:
    """Calls attention() where nobody records."""
    q, k, v, out = arrays_of(memory, case, ("q", "k", "v", "out"))
    with torch.set_grad_enabled(case["records"]):
        return sl.attention(q, k, v, return_lse=case["return_lse"], out=out, **options_of(memory, case))


def attend_and_back(memory: Memory, case: Case) -> Any:
    """Calls PyTorch's function, and has the gradients of whatever requires some."""
    q, k, v = arrays_of(memory, case, ("q", "k", "v"))
    given = options_of(memory, case)
    found = speedlight.torch.attention(q, k, v, return_lse=case["return_lse"], **given)
    results = found if case["return_lse"] else (found,)
    scores = given.get("score")
    leaves = [q, k, v, *(scores if isinstance(scores, list) else [scores])]
    leaves = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    flows = [torch.sin(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape) for x in results]
    return [*results, *(torch.autograd.grad(results, leaves, flows) if leaves else ())]


_BACKWARD = ("q", "k", "v", "out", "lse", "d_out", "d_lse")


def go_back(memory: Memory, case: Case) -> Any:
    """Calls attention_backward()."""
    given, grads = tables_of(memory, case)
    return sl.attention_backward(*arrays_of(memory, case, _BACKWARD), grads=grads, **given)


def tables_of(memory: Memory, case: Case) -> tuple[Case, tuple[Any, ...]]:
    """Returns options, in which a list of scores is one of tables, and `grads`: of a case numbers of scores, or a
    name.
    """
    given = options_of(memory, case)
    score: Any = given.get("score")
    if isinstance(score, list):
        same = {id(x): sl.Table(x, copy=False) for x in score}
        given["score"] = score = [same[id(x)] for x in score]
    return given, tuple([x if isinstance(x, str) else score[x] for x in case["grads"]])


def attend_paged(memory: Memory, case: Case) -> Any:
    """Calls attention_paged()."""
    q, k, v, out = arrays_of(memory, case, ("q", "k", "v", "out"))
    more = options_of(memory, case)
    return sl.attention_paged(
        q, k, v, case["table"], case["lengths_of"], return_lse=case["return_lse"], out=out, **more
    )


def attend_cache(memory: Memory, case: Case) -> Any:
    """Makes a cache, fills one layer, takes some steps and returns their results, and what is kept."""
    cache = sl.KVCache(**case["cache"])
    layer = case["layer"]
    cache.append(layer, *arrays_of(memory, case, ("past_k", "past_v")), new_lengths=case["past"])
    new = arrays_of(memory, case, ("q", "k", "v") if case["grows"] else ("q",))
    more = {name: case[name] for name in ("new_lengths",) if name in case}
    with torch.set_grad_enabled(case["records"]):
        found = cache.attend(layer, *new, return_lse=case["return_lse"], **more, **options_of(memory, case))
    return found, cache.keys(layer), cache.values(layer), np.array(cache.lengths(layer))


def attend_pool(memory: Memory, case: Case) -> Any:
    """Makes a pool, fills some sequences, takes a step and returns its results, and what is kept."""
    pool = sl.PagePool(**case["pool"])
    layer, past = case["layer"], case["past"]
    sequences = [pool.sequence() for _ in past]
    pool.append(layer, sequences, *arrays_of(memory, case, ("past_k", "past_v")), new_lengths=past)
    new = arrays_of(memory, case, ("q", "k", "v") if case["grows"] else ("q",))
    more = {name: case[name] for name in ("new_lengths",) if name in case}
    which = [sequences[n % len(sequences)] for n in case["order"]]
    found = pool.attend(layer, which, *new, return_lse=case["return_lse"], **more, **options_of(memory, case))
    return found, [x for s in which for x in (s.keys(layer), s.values(layer))]


def append_paged(memory: Memory, case: Case) -> Any:
    """Calls append_paged(); returns the pages."""
    k_pages, v_pages, k, v = arrays_of(memory, case, ("out", "out_v", "k", "v"))
    more = {"new_lengths": case["new_lengths"], "layout": case["layout"]}
    sl.append_paged(k_pages, v_pages, case["table"], case["lengths_of"], k, v, **more)
    return k_pages, v_pages


def rotate(memory: Memory, case: Case) -> Any:
    """Calls rotary()."""
    (x,) = arrays_of(memory, case, ("x",))
    names = ("positions", "base", "interleaved", "dims", "layout")
    return sl.rotary(x, **{name: case[name] for name in names if name in case})


def attend_flex(memory: Memory, case: Case) -> Any:
    """Calls flex_attention() with one BlockMask, whose parts are written to."""
    q, k, v = arrays_of(memory, case, ("q", "k", "v"))
    counts, lists = torch.tensor(case["counts"], dtype=torch.int32), torch.tensor(case["lists"], dtype=torch.int32)
    mask = memory.known.get("flex")
    if mask is None:
        mask = flex.BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=16, mask_mod=see_all, seq_lengths=(20, 40))
        memory.known["flex"] = mask
    mask.kv_num_blocks, mask.kv_indices, mask.mask_mod = counts, lists, case["mask_mod"]
    full = case["full"]
    mask.full_kv_num_blocks = None if full is None else torch.tensor(full, dtype=torch.int32)
    mask.full_kv_indices = None if full is None else lists
    mask.BLOCK_SIZE, mask.seq_lengths = case["block"], case["seq_lengths"]
    return speedlight.torch.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def see_all(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= 0) | (j >= 0)


def see_near(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j - 20


# --- what they should return


def check_attention(memory: Memory, case: Case, results: list[Any]) -> None:
    """Compares what attention() returned with the reference."""
    case = case | {"kind": "numpy"}
    compare(results, *arrays_of(memory, case, ("q", "k", "v")), **options_of(memory, case))


def compare(results: list[Any], q: Any, k: Any, v: Any, **options: Any) -> None:
    """Compares out, and lse if it is there, with the reference, every element with its bound."""
    want = reference.attention(q, k, v, return_lse=True, **options)
    bounds = reference.error_bound(q, k, v, dot=current_isa().dot(q.dtype), **options)
    assert_within(results[0], want[0], bounds.out, zeros_allowed=True)
    if len(results) > 1 and results[1].ndim < results[0].ndim:
        assert_within(results[1], want[1], bounds.lse, "lse", zeros_allowed=True)


def check_backward(memory: Memory, case: Case, results: list[Any]) -> None:
    """Compares what attention_backward() returned with the reference."""
    given, grads = tables_of(memory, case)
    arrays = arrays_of(memory, case, _BACKWARD)
    want = flat(reference.backward(*arrays, grads=grads, **given))
    dot = current_isa().dot(arrays[0].dtype, gradients=True)
    bounds = flat(reference.backward_bound(*arrays, grads=grads, dot=dot, **given))
    for got, x, bound in zip(results, want, bounds, strict=True):
        assert_within(got, x, bound, zeros_allowed=True)


def check_paged(memory: Memory, case: Case, results: list[Any]) -> None:
    """Compares what attention_paged() returned with the reference, over keys in one array."""
    q, k, v = arrays_of(memory, case, ("q", "k", "v"))
    table = np.array(case["table"])
    k, v = (np.concatenate(x[table].swapaxes(0, 1), 1).swapaxes(1, 2) for x in (k, v))
    options = {"k_lengths": case["lengths_of"]} | options_of(memory, case)
    if options.get("layout", "bhld") == "bhld" and options.get("mask") is options.get("score") is None:
        compare(results, q, k, v, **options)


def check_cache(memory: Memory, case: Case, results: list[Any]) -> None:
    """Compares what a cache returned with the reference, over the keys that it keeps."""
    *found, keys, values, lengths = results
    (q,) = arrays_of(memory, case | {"kind": "numpy"}, ("q",))
    if case["cache"].get("dtype", "float32") != "float32" or "window" in case["cache"]:
        return
    options = {"causal": case["grows"], "k_lengths": lengths, "q_lengths": case.get("new_lengths")}
    options |= options_of(memory, case | {"kind": "numpy"})
    if options.get("mask") is options.get("score") is None:
        compare(found, q, keys, values, **options)


def check_pool(memory: Memory, case: Case, results: list[Any]) -> None:
    """Compares what a pool returned with the reference, over the keys that its sequences keep."""
    count = 2 * len(case["order"])
    found, kept = results[:-count], results[-count:]
    (q,) = arrays_of(memory, case | {"kind": "numpy"}, ("q",))
    if case["pool"].get("dtype", "float32") != "float32":
        return
    k, v = (np.concatenate([x.swapaxes(0, 1) for x in kept[n::2]]) for n in (0, 1))
    rows = case.get("new_lengths") or ([1] * len(case["order"]) if len(case["order"]) > 1 else [len(q)])
    ends = {"q": rows, "k": [x.shape[1] for x in kept[::2]]}
    options: Case = {f"cu_seqlens_{x}": [*itertools.accumulate(n, initial=0)] for x, n in ends.items()}
    options |= {"causal": case["grows"], "layout": "lhd"} | options_of(memory, case | {"kind": "numpy"})
    if options.get("mask") is options.get("score") is None:
        compare(found, q, k, v, **options)


# --- their cases

PAGES = ((4, 0, 1), (2, 1, 3))
SIZES = {
    "batch": (("q", 0), ("k", 0), ("v", 0), ("out", 0)),
    "shared": (("k", 0), ("v", 0)),
    "q_heads": (("q", 1), ("out", 1)),
    "kv_heads": (("k", 1), ("v", 1)),
    "q_len": (("q", 2), ("out", 2)),
    "k_len": (("k", 2), ("v", 2)),
    "head_dim": (("q", 3), ("k", 3)),
    "value_dim": (("v", 3), ("out", 3)),
}
DENSE: Case = {
    "q": Lie.of(2, 4, 4, 16),
    "k": Lie.of(2, 2, 9, 16),
    "v": Lie.of(2, 2, 9, 16),
    "out": None,
    "return_lse": False,
    "kind": "numpy",
    "records": False,
}
TENSORS = DENSE | {"kind": "torch"}
WITH_OUT = DENSE | {"out": Lie.of(2, 4, 4, 16)}
PACKED = DENSE | {
    "q": Lie.of(6, 4, 16),
    "k": Lie.of(9, 2, 16),
    "v": Lie.of(9, 2, 16),
    "layout": "lhd",
    "cu_seqlens_q": [0, 4, 6],
    "cu_seqlens_k": [0, 5, 9],
}
FOLLOWED = {name: replace(x, grad=True) for name, x in TENSORS.items() if isinstance(x, Lie)}
RECORDED = {
    "kind": "torch",
    "records": True,
    "return_lse": False,
    "q": replace(Lie.of(2, 4, 4, 16), grad=True),
    "k": Lie.of(2, 2, 9, 16),
    "v": Lie.of(2, 2, 9, 16),
}
BACK = DENSE | {
    "out": Lie.of(2, 4, 4, 16),
    "lse": Lie.of(2, 4, 4),
    "d_out": Lie.of(2, 4, 4, 16),
    "d_lse": None,
    "grads": (),
}
BACK_SIZES = {
    "batch": (*SIZES["batch"], ("lse", 0), ("d_out", 0)),
    "shared": SIZES["shared"],
    "q_heads": (*SIZES["q_heads"], ("lse", 1), ("d_out", 1)),
    "kv_heads": SIZES["kv_heads"],
    "q_len": (*SIZES["q_len"], ("lse", 2), ("d_out", 2)),
    "k_len": SIZES["k_len"],
    "head_dim": SIZES["head_dim"],
    "value_dim": (*SIZES["value_dim"], ("d_out", 3)),
}
PAGED = DENSE | {"k": Lie.of(5, 3, 2, 16), "v": Lie.of(5, 3, 2, 16), "table": PAGES, "lengths_of": [9, 5]}
PAGED_SIZES = SIZES | {
    "batch": (("q", 0), ("out", 0)),
    "kv_heads": (("k", 2), ("v", 2)),
    "page_size": (("k", 1), ("v", 1)),
    "shared": (("k", 0), ("v", 0)),
}
CACHE: Case = {
    "cache": {"layers": 2, "batch": 2, "kv_heads": 2, "head_dim": 16, "capacity": 40},
    "layer": 1,
    "grows": True,
    "past_k": Lie.of(2, 2, 7, 16, numbers=1),
    "past_v": Lie.of(2, 2, 7, 16, numbers=1),
    "past": None,
    "q": Lie.of(2, 4, 2, 16),
    "k": Lie.of(2, 2, 2, 16),
    "v": Lie.of(2, 2, 2, 16),
    "return_lse": False,
    "kind": "numpy",
    "records": False,
}
CACHE_SIZES = {
    "n_new": (("q", 2), ("k", 2), ("v", 2)),
    "past": (("past_k", 2), ("past_v", 2)),
    "q_heads": (("q", 1),),
}
POOL: Case = {
    "pool": {"layers": 2, "pages": 9, "page_size": 16, "kv_heads": 2, "head_dim": 16},
    "layer": 1,
    "grows": True,
    "past_k": Lie.of(12, 2, 16, numbers=1),
    "past_v": Lie.of(12, 2, 16, numbers=1),
    "past": [7, 5],
    "order": [0, 1],
    "q": Lie.of(2, 4, 16),
    "k": Lie.of(2, 2, 16),
    "v": Lie.of(2, 2, 16),
    "return_lse": False,
    "kind": "numpy",
}
CHUNKS = POOL | {name: Lie.of(11, n, 16) for name, n in (("q", 4), ("k", 2), ("v", 2))} | {"new_lengths": [2, 9]}
POOL_SIZES = {"n_new": (("q", 0), ("k", 0), ("v", 0)), "q_heads": (("q", 1),)}
APPENDED: Case = {
    "out": Lie.of(5, 3, 2, 16),
    "out_v": Lie.of(5, 3, 2, 16),
    "k": Lie.of(2, 2, 2, 16),
    "v": Lie.of(2, 2, 2, 16),
    "table": PAGES,
    "lengths_of": [3, 2],
    "new_lengths": None,
    "layout": "bhld",
    "kind": "numpy",
}
FLEX: Case = {
    "q": Lie.of(2, 4, 20, 16),
    "k": Lie.of(2, 2, 40, 16),
    "v": Lie.of(2, 2, 40, 16),
    "kind": "torch",
    "counts": [[[2, 3]]],
    "lists": [[[[0, 1, 2], [0, 1, 2]]]],
    "full": None,
    "block": (16, 16),
    "seq_lengths": (20, 40),
    "mask_mod": see_all,
}


def changes(name: str, *values: Any) -> tuple[tuple[Case, Case], ...]:
    """Returns pairs of the first of these values with each other one, under a name."""
    return tuple([({name: values[0]}, {name: x}) for x in values[1:]])


def parts(name: str, base: Case, *others: Case) -> tuple[tuple[Case, Case], ...]:
    """Returns pairs of a dict of the base with one in which something differs."""
    return tuple([({}, {name: base[name] | x}) for x in others])


EVERY = frozenset(OPTIONS)


def named(function: Any) -> frozenset[str]:
    """Returns the options of the list that a public function takes."""
    return function.options & EVERY


LSE = changes("return_lse", False, True, 1)
TURNED = Lie((2, 9, 2, 16), (288, 16, 144, 1))  # in memory as heads before tokens
HEADS_LAST = {"k": TURNED, "v": TURNED, "layout": "blhd"}
OUT = changes("out", None, Lie.of(2, 4, 4, 16), Lie.of(2, 4, 4, 16, dtype="float64"), Lie.of(2, 4, 4, 15))
BIASES = {"score": [Lie.of(4, 9), Lie.of(1, 9, numbers=1)]}


def grown(base: Case) -> Iterator[tuple[Case, Case]]:
    """Yields changes of calls that are known for any number of keys: more of them, beside an array of as many columns,
    and beside numbers that are its first row's position, 5.
    """
    wide = {name: base[name].sized(2, 12) for name in ("k", "v")}
    inside = {name: replace(base[name], steps=(288, 16, 32, 1)) for name in ("k", "v")}  # heads, of a token's row
    yield {}, inside
    yield {"q": base["q"].sized(2, 1)}, {"q": base["q"].sized(2, 1)} | inside
    others = {"window": (5, 0)}, {"causal": True}, {"mask": sl.window(5, 5)}, {"score": sl.softcap(0.5)}
    for rows, name, beside in itertools.product((4, 1), ("mask", "score"), ({}, *others)):
        if name not in beside:
            narrow = Lie.of(rows, 9, dtype="bool" if name == "mask" else "float32")
            yield beside | {name: narrow}, beside | {name: replace(narrow, shape=(rows, 12), steps=(12, 1))} | wide


def of_one(base: Case) -> Iterator[tuple[Case, Case]]:
    """Yields changes of the stride of a dimension that has one entry, of queries or of keys."""
    for axis in range(4):
        sizes = {name: base[name].shape[:axis] + (1,) + base[name].shape[axis + 1 :] for name in ("q", "k", "v")}
        if axis == 2:  # one query of all keys
            sizes |= {name: base[name].shape for name in ("k", "v")}
        single = {name: Lie.of(*shape) for name, shape in sizes.items()}
        for name in ("q",) if axis == 2 else ("q", "k", "v"):
            for step in (0, 5, 1000):
                yield single, single | {name: single[name].stepped(axis, step)}


DOORS = {
    "arrays": Door(attend, check_attention, DENSE, EVERY, SIZES, LSE + OUT + (({}, HEADS_LAST),) + tuple(grown(DENSE))),
    "out": Door(attend, check_attention, WITH_OUT, frozenset(), SIZES, LSE),
    "packed": Door(
        attend,
        check_attention,
        PACKED,
        frozenset(("cu_seqlens_q", "cu_seqlens_k")),
        {"tokens": (("q", 0), ("k", 0), ("v", 0))},
    ),
    "tensors": Door(
        attend,
        check_attention,
        TENSORS,
        EVERY,
        SIZES,
        LSE
        + OUT
        + (({}, HEADS_LAST),)
        + tuple(grown(DENSE))
        + tuple(of_one(DENSE))
        + changes("records", False, True)
        + changes("kind", "torch", "numpy")
        + tuple([({name: x}, {name: x, "records": True}) for name, x in FOLLOWED.items()]),
    ),
    "autograd": Door(attend_and_back, check_attention, RECORDED, EVERY, SIZES, LSE),
    "backward": Door(
        go_back,
        check_backward,
        BACK,
        EVERY,
        BACK_SIZES,
        changes("d_lse", None, Lie.of(2, 4, 4))
        + tuple(
            [
                (BIASES | {"grads": a}, BIASES | {"grads": b})
                for a, b in (((0,), (1,)), ((0, 1), (1, 0)), ((), (0,)), ((0,), (0, 1)))
            ]
        )
        + (({"sink_logits": [0.0] * 4}, {"sink_logits": [0.0] * 4, "grads": ("sink_logits",)}),),
    ),
    "paged": Door(
        attend_paged,
        check_paged,
        PAGED,
        named(sl.attention_paged),
        PAGED_SIZES,
        LSE
        + OUT
        + changes("lengths_of", [9, 5], [8, 5], [9, 0], [9], [9.0, 5], (9, 5), np.array([9, 5]))
        + changes(
            "table",
            PAGES,
            PAGES[::-1],
            PAGES[:1],
            np.array(PAGES),
            np.array(PAGES, np.int32),
            np.array(PAGES)[:, ::-1],
            [x[:2] for x in PAGES],
            [[4, 0, 9], [2, 1, 3]],
            torch.tensor(PAGES),
        ),
    ),
    "cache": Door(
        attend_cache,
        check_cache,
        CACHE,
        named(sl.KVCache.attend),
        CACHE_SIZES,
        LSE
        + changes("layer", 1, 0, True)
        + changes("grows", True, False)
        + changes("past", None, [7, 3], [7, 0])
        + changes("new_lengths", None, [2, 1], [2, 2])
        + changes("q_lengths", None, [2, 1], [2, 2])
        + parts(
            "cache",
            CACHE,
            *(
                {name: x}
                for name, x in (
                    ("capacity", 41),
                    ("capacity", 8),
                    ("layers", 3),
                    ("dtype", "float64"),
                    ("dtype", "int8"),
                    ("dtype", "float16"),
                    ("value_dim", 15),
                    ("head_dim", 15),
                    ("batch", 1),
                    ("kv_heads", 1),
                )
            ),
            {"window": 5, "capacity": None},
            {"window": 6, "capacity": None},
            {"window": 5, "keep_first": 2, "capacity": None},
        )
        + changes("kind", "numpy", "torch"),
    ),
    "pool": Door(
        attend_pool,
        check_pool,
        POOL,
        named(sl.PagePool.attend),
        POOL_SIZES,
        LSE
        + changes("layer", 1, 0)
        + changes("grows", True, False)
        + changes("past", [7, 5], [5, 7], [6, 6], [12, 0], [12])
        + changes("order", [0, 1], [1, 0], [0])
        + changes("new_lengths", None, [2, 0], [1, 1])
        + changes("kind", "numpy", "torch")
        + parts("pool", POOL, {"page_size": 32}, {"pages": 10}, {"layers": 3}, {"dtype": "float64"}, {"value_dim": 15}),
    ),
    "chunks": Door(
        attend_pool,
        check_pool,
        CHUNKS,
        frozenset(),
        {},
        changes("new_lengths", [2, 9], [1, 10], [10, 1], [5, 6], [11, 0], [2, 8])
        + changes("grows", True, False)
        + (({"dropout": 0.5, "seed": 1}, {"dropout": 0.5, "seed": 1, "new_lengths": [9, 2]}),),
    ),
    "append_paged": Door(
        append_paged,
        None,
        APPENDED,
        frozenset(),
        {"tokens": (("k", 2), ("v", 2)), "heads": (("k", 1), ("v", 1), ("out", 2), ("out_v", 2))},
        changes("table", PAGES, PAGES[::-1], np.array(PAGES))
        + changes("lengths_of", [3, 2], [2, 3], [3, 8])
        + changes("new_lengths", None, [2, 1], [1, 2])
        + changes("layout", "bhld", "blhd", "bhsd", "lhd"),
    ),
    "rotary": Door(
        rotate,
        None,
        {"x": Lie.of(2, 3, 4, 16), "kind": "numpy"},
        frozenset(),
        {},
        changes("positions", 0, 1, True, 0.0, [0, 1, 2, 3], None)
        + changes("base", None, 1e4, 10000, 500.0, True, 1, 1.0)
        + changes("interleaved", False, True, 0, 1)
        + changes("dims", None, 8, 4, 8.0, 6)
        + changes("layout", "bhld", "blhd", "bhsd")
        + changes("kind", "numpy", "torch"),
    ),
    "flex": Door(
        attend_flex,
        None,
        FLEX,
        frozenset(),
        SIZES,
        changes("counts", [[[2, 3]]], [[[1, 3]]], [[[2, 3], [2, 3]]], [[[2, 3]] * 4] * 2)
        + changes("lists", [[[[0, 1, 2], [0, 1, 2]]]], [[[[0, 2, 1], [0, 1, 2]]]])
        + changes("full", None, [[[1, 0]]])
        + changes("block", (16, 16), (16, 20), (20, 16))
        + changes("seq_lengths", (20, 40), (20, 41), (21, 40))
        + changes("mask_mod", see_all, see_near),
    ),
}

# what remembers calls, or what was read of their arguments: the doors above that ask it, or who else compares
MEMOS = {
    "problem.prepared.prepared_calls": (
        "arrays", "out", "packed", "tensors", "autograd", "backward", "paged", "cache", "pool", "chunks",
        "append_paged",
    ),
    "calls.rotary._known": ("rotary",),
    "torch.blocks._known": ("flex",),
    "autograd.forms._texts": "its key is the text that its values are made of",
    "distributed.groups._groups": "the state of a group, no call",
}  # fmt: skip


def memos_by_home() -> dict[str, Any]:
    """Returns every memo by the name of its home."""
    homes = [(name, *name.rpartition(".")[::2]) for name in MEMOS]
    return {name: getattr(importlib.import_module(f"speedlight.{home}"), own) for name, home, own in homes}


def memos_of_calls() -> list[Any]:
    """Returns the memos that the doors ask."""
    return [x for name, x in memos_by_home().items() if isinstance(MEMOS[name], tuple)]
