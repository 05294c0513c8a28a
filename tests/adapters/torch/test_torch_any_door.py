"""Every door of PyTorch's, over random problems: the right numbers of this call, or a speedlight.Error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import FULL
from tolerance import assert_within, plain

import speedlight as sl
import speedlight.torch
from speedlight import reference
from speedlight.host.machine import current_isa

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
KINDS = "list", "numpy", "tensor"
LENGTH, DIM, HEADS, KV_HEADS, BATCH = 12, 8, 4, 2, 2


@dataclass
class Drawn:
    """A problem: its layout, how each option is given, and three sets of numbers, as the specification takes them."""

    number: int
    layout: str
    dtype: torch.dtype
    kinds: dict[str, str]
    sets: list[dict[str, Any]]
    in_place: bool

    def __str__(self) -> str:
        return f"problem {self.number}: {self.layout} {self.dtype} {self.kinds} in_place={self.in_place} {self.sets}"


def drawn(number: int) -> Drawn:
    rng = np.random.default_rng([31, number])
    layout = str(rng.choice(["bhld", "blhd", "hld", "lhd"], p=[0.5, 0.2, 0.1, 0.2]))
    dtype = (torch.float32, torch.float64, torch.bfloat16, torch.float16)[rng.choice(4, p=[0.5, 0.3, 0.1, 0.1])]
    kinds: dict[str, str] = {}
    for name, likely in (("causal", 0.5), ("window", 0.3), ("mask", 0.5), ("score", 0.5), ("sink_logits", 0.3),
                         ("positions", 0.6), ("scale", 0.3), ("seed", 0.2)):  # fmt: skip
        if rng.random() < likely:
            kinds[name] = _kind(rng, name, layout)
    if "positions" in kinds and kinds.get("causal") == "top-left":
        kinds["causal"] = "plain"
    sets = [numbers_of(rng, kinds, layout) for _ in range(3)]
    return Drawn(number, layout, dtype, kinds, sets, bool(rng.random() < 0.5))


def _kind(rng: np.random.Generator, name: str, layout: str) -> str:
    of = {
        "causal": ("plain", "top-left", "numpy"),
        "window": ("list", "tuple", "numpy"),
        "mask": ("function", "expression", "pattern", "captured", *KINDS[1:]),
        "score": ("function", "expression", "pattern", "table", "parameter", "several", "captured", *KINDS[1:]),
        "sink_logits": (*KINDS, "parameter", "scalars"),
        "positions": [f"{what} {kind}" for what in _positions(layout) for kind in (*KINDS, "scalars")],
        "scale": ("list", "numpy"),
        "seed": ("list", "numpy", "tensor"),
    }[name]  # fmt: skip
    kinds = [x for x in of if layout != "lhd" or name not in ("mask", "score") or x not in (*KINDS, "several")]
    return str(kinds[rng.integers(len(kinds))])


def _positions(layout: str) -> tuple[str, ...]:
    if layout == "lhd":
        return "cu_seqlens", "cu_seqlens", "q_start"
    return ("q_start",) if layout == "hld" else ("lengths", "k_lengths", "q_start", "q_starts")


def numbers_of(rng: np.random.Generator, kinds: dict[str, str], layout: str) -> dict[str, Any]:
    """One set: of a mask or a score the number that it is made of."""
    found: dict[str, Any] = {"layout": layout}
    n, batch = LENGTH, 1 if len(layout) == 3 else BATCH
    for name, kind in kinds.items():
        match name:
            case "causal":
                found[name] = "top-left" if kind == "top-left" else bool(rng.random() < 0.7)
            case "window":
                found[name] = [int(rng.integers(1, n)), int(rng.integers(0, 4))]
            case "mask" | "score":
                found[name] = int(rng.integers(1, 9))
            case "sink_logits":
                found[name] = [float(x) for x in rng.standard_normal(HEADS)]
            case "scale":
                found[name] = float(np.float32(rng.uniform(0.1, 1.5)))
            case "seed":
                found |= {"seed": int(rng.integers(1 << 40)), "dropout": 0.5}
            case "positions":
                found |= _places(rng, kind.split()[0], batch)
    return found


def _places(rng: np.random.Generator, what: str, batch: int) -> dict[str, Any]:
    match what:
        case "cu_seqlens":
            offsets = [0, *sorted(int(x) for x in rng.integers(0, LENGTH + 1, 2)), LENGTH]
            return {"cu_seqlens_q": offsets, "cu_seqlens_k": list(offsets)}
        case "q_start":
            return {"q_start": int(rng.integers(0, 20))}
        case "q_starts":
            return {"q_start": [int(x) for x in rng.integers(0, 20, batch)]}
        case "k_lengths":
            return {"k_lengths": [int(x) for x in rng.integers(1, LENGTH + 1, batch)], "q_start": 0}
    return {"lengths": [int(x) for x in rng.integers(1, LENGTH + 1, batch)]}


# --- as calls are given them


def hides(n: int) -> Callable[..., Any]:
    return lambda b, h, i, j: (i - j < n) | (j % 3 == h % 3)


def turns(n: int) -> Callable[..., Any]:
    return lambda s, b, h, i, j: s * 0.5 + sl.where(i > j, h * 0.1, n * 0.25)


def hiding(n: int) -> np.ndarray:
    return np.arange(LENGTH)[:, None] - np.arange(LENGTH) < n


def adding(n: int, dtype: Any) -> np.ndarray:
    return np.cos(np.arange(HEADS * LENGTH * LENGTH) * n).reshape(HEADS, LENGTH, LENGTH).astype(dtype)


def given(kinds: dict[str, str], numbers: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The options of a call: new objects, but for numbers."""
    found = {name: x for name, x in numbers.items() if name not in ("mask", "score")}
    wide = np.float64 if dtype == torch.float64 else np.float32
    for name, kind in kinds.items():
        x = numbers.get(name)
        match name:
            case "causal" if kind == "numpy":
                found[name] = bool(np.bool_(x))
            case "window":
                found[name] = x if kind == "list" else tuple(x) if kind == "tuple" else tuple(np.int64(x))
            case "mask":
                found[name] = _mask(kind, numbers["mask"])
            case "score":
                found[name] = _score(kind, numbers["score"], wide)
            case "sink_logits" | "scale" | "seed":
                found[name] = as_kind(x, kind, {"sink_logits": wide, "scale": np.float32, "seed": int}[name])
            case "positions":
                what, how = kind.split()
                for option in ("lengths", "k_lengths", "cu_seqlens_q", "cu_seqlens_k", "q_start"):
                    if option in numbers and (option != "q_start" or what.startswith("q_start")):
                        found[option] = as_kind(numbers[option], how, np.int32)
    return found


def as_kind(x: Any, kind: str, dtype: Any) -> Any:
    match kind:
        case "numpy":
            return np.array(x, dtype) if isinstance(x, list) else np.dtype(dtype).type(x)
        case "tensor" | "parameter":
            return torch.from_numpy(np.array(x, dtype)).requires_grad_(kind == "parameter")
        case "scalars":
            return [np.dtype(dtype).type(y) for y in x] if isinstance(x, list) else np.dtype(dtype).type(x)
    return copy.copy(x)


def _mask(kind: str, n: int) -> Any:
    match kind:
        case "function":
            return hides(n)
        case "expression":
            return sl.expression(hides(n))
        case "pattern":
            return sl.window(n, n) | sl.prefix(2)
        case "captured":
            array = torch.from_numpy(hiding(n))
            return lambda b, h, i, j: array[i % LENGTH, j % LENGTH]
    return as_kind(hiding(n), kind, bool)


def _score(kind: str, n: int, dtype: Any) -> Any:
    match kind:
        case "function":
            return turns(n)
        case "expression":
            return sl.expression(turns(n))
        case "pattern":
            return sl.softcap(float(n))
        case "table" | "parameter":
            slopes = torch.from_numpy(np.arange(1, HEADS + 1, dtype=dtype) / n)
            return sl.alibi(slopes.requires_grad_(kind == "parameter"))
        case "several":
            return [sl.softcap(float(n)), turns(n), torch.from_numpy(adding(n, dtype))]
        case "captured":
            array = torch.from_numpy(adding(n, dtype))
            return lambda s, b, h, i, j: s + array[h, i % LENGTH, j % LENGTH]
    return as_kind(adding(n, dtype), kind, dtype)


def written(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new options in the lists, arrays and tensors of the old ones, where they have room."""
    found = dict(new)
    for name, x in old.items():
        y = new[name]
        if isinstance(x, np.ndarray) and x.shape == y.shape:
            x[...] = y
        elif isinstance(x, torch.Tensor) and not x.requires_grad and x.shape == y.shape:
            x.copy_(y)
        elif isinstance(x, list) and len(x) == len(y) and not callable(x[0]):
            x[:] = y
        else:
            continue
        found[name] = x
    return found


# --- the doors


def shapes(layout: str) -> list[tuple[int, ...]]:
    sizes = {"b": BATCH, "l": LENGTH, "d": DIM}
    return [tuple({**sizes, "h": heads}[x] for x in layout) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def attend(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    return speedlight.torch.attention(q, k, v, return_lse=True, **options)


class Tangents(NamedTuple):
    """How out and lse grow where q, k and v do so."""

    out: Any
    lse: Any
    given: tuple[Any, ...]


Found = tuple[Any, Any, Any]  # out, lse, gradients, tangents or nothing
Door = Callable[..., Found]


def eager(arrays: Any, flow: Any, options: dict[str, Any]) -> Found:
    with torch.no_grad():
        return (*attend(*arrays, options), None)


def grad(arrays: Any, flow: Any, options: dict[str, Any], function: Any = attend) -> Found:
    inputs = [x.clone().requires_grad_() for x in arrays]
    out, lse = function(*inputs, options)
    return out, lse, torch.autograd.grad((out, lse), inputs, flow)


def func_grad(arrays: Any, flow: Any, options: dict[str, Any]) -> Found:
    def loss(*inputs: Any) -> Any:
        out, lse = attend(*inputs, options)
        seen = torch.where(lse == -torch.inf, 0.0, lse)
        return (out * flow[0]).sum() + (seen * flow[1]).sum(), (out, lse)

    grads, (out, lse) = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
    return out, lse, grads


def vmap(arrays: Any, flow: Any, options: dict[str, Any]) -> Found:
    """The first of two examples."""
    examples = [torch.stack([x, x + 1]) for x in arrays]
    out, lse = torch.func.vmap(lambda q, k, v: attend(q, k, v, options))(*examples)
    return out[0], lse[0], None


def jvp(arrays: Any, flow: Any, options: dict[str, Any]) -> Found:
    given = tuple(map(torch.randn_like, arrays))
    (out, lse), grown = torch.func.jvp(lambda *x: attend(*x, options), tuple(arrays), given)
    return out, lse, Tangents(*grown, given)


def second(arrays: Any, flow: Any, options: dict[str, Any]) -> Found:
    """Gradients that have derivatives of their own."""
    inputs = [x.clone().requires_grad_() for x in arrays]
    out, lse = attend(*inputs, options)
    found = torch.autograd.grad((out, lse), inputs, flow, create_graph=True)
    along = [torch.randn_like(x) for x in inputs]
    more = torch.autograd.grad(found, inputs, along, allow_unused=True, materialize_grads=True)
    return out, lse, Second(found, along, more)


class Second(NamedTuple):
    """Gradients, and the gradients of their sum along something."""

    grads: tuple[Any, ...]
    along: list[Any]
    more: tuple[Any, ...]

    def check(self, arrays: Any, flow: Any, options: dict[str, Any]) -> None:
        """By differences of gradients, which are off by what half as long ones differ from them."""
        way, found = [torch.randn_like(x) for x in arrays], []
        for step in (2.0**-12, 2.0**-11):
            sums = []
            for x in (step, -step):
                moved = [y + x * z for y, z in zip(arrays, way, strict=True)]
                results = map(torch.from_numpy, reference.attention(*moved, return_lse=True, **options))
                grads = reference.backward(*moved, *results, *flow, **options)
                sums.append(sum(float((y.numpy() * g).sum()) for y, g in zip(self.along, grads, strict=True)))
            found.append((sums[0] - sums[1]) / (2 * step))
        got = sum(float((x * y).sum()) for x, y in zip(self.more, way, strict=True))
        off = abs(found[1] - found[0]) + 2.0**-38 * (abs(sums[0]) + abs(sums[1]) + 1)
        assert abs(got - found[0]) <= off, f"second derivative: got {got}, expected {found[0]}, off by {off} at most"


class Model(torch.nn.Module):
    """Options that are attributes."""

    options: dict[str, Any]

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, self.options)


def exported(arrays: Any, flow: Any, options: dict[str, Any]) -> Found:
    """Tensors among the options are inputs of the program, which was made of others."""

    class Program(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, tensors: dict[str, Any]) -> Any:
            return attend(q, k, v, options | tensors)

    tensors = {n: x for n, x in options.items() if isinstance(x, torch.Tensor) and not x.requires_grad}
    program = torch.export.export(Program(), (*arrays, {n: x.clone().zero_() for n, x in tensors.items()}))
    return (*program.module()(*arrays, tensors), None)


def compiled(fullgraph: bool, held: bool, grads: bool) -> Door:
    """One compiled function for all calls; options are its argument, or attributes of a module."""
    torch._dynamo.reset()
    module = Model()
    function = torch.compile(module if held else attend, fullgraph=fullgraph, backend="aot_eager")

    def call(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        module.options = options
        return function(q, k, v) if held else function(q, k, v, options)

    def door(arrays: Any, flow: Any, options: dict[str, Any]) -> Found:
        if grads:
            return grad(arrays, flow, options, call)
        with torch.no_grad():
            return (*call(*arrays, options), None)

    return door


def doors(rng: np.random.Generator) -> Iterator[tuple[str, Door, Any]]:
    """Each with what it may raise beside nothing."""
    ours = sl.Error
    yield from (("eager", eager, ()), ("grad", grad, ours), ("func.grad", func_grad, ours), ("vmap", vmap, ours))
    yield from (("jvp", jvp, ours), ("second", second, ours), ("export", exported, ours))
    held, grads = rng.random(2) < 0.5
    yield f"compile held={held} grads={grads}", compiled(False, held, grads), ours
    refusals = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.FailOnRecompileLimitHit)
    yield f"fullgraph held={held} grads={not grads}", compiled(True, held, not grads), refusals


def check(found: Found, arrays: Any, flow: Any, options: dict[str, Any]) -> None:
    """By the specification."""
    out, lse, grads = found
    want, want_lse = reference.attention(*arrays, return_lse=True, **options)
    dot, of_gradients = (current_isa().dot(arrays[0].dtype, gradients=x) for x in (False, True))
    bounds = reference.error_bound(*arrays, dot=dot, **options)
    assert out.dtype == arrays[0].dtype
    assert_within(out, want, bounds.out, "out", zeros_allowed=True)
    assert_within(lse, want_lse, bounds.lse, "lse", zeros_allowed=True)
    if grads is None:
        return
    if isinstance(grads, Second):
        if arrays[0].dtype == torch.float64:
            grads.check(arrays, flow, options)
        grads = grads.grads
    given = [x.detach() for x in (*arrays, out, lse, *flow)]
    if isinstance(grads, Tangents):  # what flows back along them is what grows
        d_out, d_lse = grads.out.detach().double() * flow[0], grads.lse.detach().double() * flow[1]
        got, want, off = float(d_out.sum() + d_lse[lse > -torch.inf].sum()), 0.0, 0.0
        bounds = reference.backward_bound(*given, dot=of_gradients, **options)
        for x, y, bound in zip(reference.backward(*given, **options), grads.given, bounds, strict=True):
            want, off = want + (x * plain(y)).sum(), off + (bound * np.abs(plain(y))).sum()
        ulp = torch.finfo(arrays[0].dtype).eps * float(d_out.abs().sum())
        assert abs(got - want) <= off + ulp, f"tangents: got {got}, expected {want}, bound {off + ulp}"
        return
    for x, y, bound, name in zip(
        grads, reference.backward(*given, **options), reference.backward_bound(*given, dot=of_gradients, **options),
        ("dq", "dk", "dv"), strict=True,
    ):  # fmt: skip
        assert_within(x, y, bound, name, zeros_allowed=True)


def plainly(problem: Drawn, numbers: dict[str, Any]) -> dict[str, Any]:
    """Options as the specification takes them."""
    kinds = {n: "table" if k == "parameter" else k for n, k in problem.kinds.items() if n in ("mask", "score")}
    return given(kinds, numbers, problem.dtype)


def run(problem: Drawn, of_lse: float = 1) -> tuple[int, int, list[str]]:
    """How many calls gave the right numbers, how many were refused, and what else came. of_lse: a factor of what flows
    into lse.
    """
    number, rng = problem.number, np.random.default_rng([32, problem.number])
    torch.manual_seed(number)
    right = refused = 0
    wrong: list[str] = []
    arrays = [torch.randn(x).to(problem.dtype) for x in shapes(problem.layout)]
    logs = torch.float64 if problem.dtype == torch.float64 else torch.float32
    for n, (name, door, allowed) in enumerate(doors(rng)):
        options: dict[str, Any] = {}
        if not FULL and (n + number) % 3:  # three problems by a third of the doors each
            continue
        for at in (0, 1, 2, 0) if FULL else (0, 1, 0):
            numbers = problem.sets[at]
            new = given(problem.kinds, numbers, problem.dtype)
            options = written(options, new) if options and problem.in_place and name != "export" else new
            with torch.no_grad():
                out, lse = sl.attention(*arrays, return_lse=True, **plainly(problem, numbers))
            flow = torch.randn(out.shape).to(out.dtype), torch.randn(lse.shape).to(logs) * of_lse
            try:
                found = door(arrays, flow, options)
            except allowed:
                refused += 1
                if name == "export":
                    break
                continue
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {str(error)[:900]}")
                break
            try:
                check(found, arrays, flow, plainly(problem, numbers))
            except AssertionError as error:
                wrong.append(f"{name}, numbers {at}: {error}")
                break
            right += 1
            if name == "export":
                break
    return right, refused, [f"{x}\n  {problem}" for x in wrong]


@pytest.mark.parametrize("number", range(300) if FULL else (13, 14, 15))
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # PyTorch's own, in forward mode
def test_every_door(number):
    right, refused, wrong = run(drawn(number))
    assert not wrong, "\n".join(wrong)
    assert right > refused
