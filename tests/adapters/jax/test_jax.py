"""speedlight.jax: JAX's attention to the letter, under its transformations; oracles in float64."""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FULL

import speedlight as sl
import speedlight.jax
from speedlight.expressions.tree import evaluate
from speedlight.jax import xla

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
attend = speedlight.jax.dot_product_attention
HIDDEN = -0.7 * float(np.finfo(np.float32).max)
HAS_RESIDUAL = "return_residual" in inspect.signature(jax.nn.dot_product_attention).parameters
SMALL = {"float32": 3e-5, "float16": 3e-3, "bfloat16": 2.5e-2}


def formula(q, k, v, bias=None, mask=None, scale=None, is_causal=False, lengths=(None, None), window=None):
    """JAX's documentation and source in NumPy, float64, with gradients for a flow of ones: out, lse, dq, dk, dv, db."""
    q, k, v = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v))
    group, (rows, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.swapaxes(-1, -2) * scale + (0 if bias is None else np.asarray(bias, np.float64))
    i, j = np.arange(rows)[:, None], np.arange(keys)
    seen = np.ones(scores.shape, bool) if mask is None else np.broadcast_to(np.asarray(mask), scores.shape)
    seen = seen & (j <= i) if is_causal else seen
    if window is not None:
        seen = seen & (i - j <= window[0]) & (j - i <= window[1])
    there = np.ones((len(q), 1, rows, 1), bool)
    if lengths[0] is not None:
        there = i < np.asarray(lengths[0])[:, None, None, None]
        seen = seen & there
    if lengths[1] is not None:
        seen = seen & (j < np.asarray(lengths[1])[:, None, None, None])
    scores = np.where(seen, scores, HIDDEN)
    with np.errstate(invalid="ignore"):
        most = scores.max(-1, keepdims=True)
        p = np.exp(scores - most)
        lse = (most + np.log(p.sum(-1, keepdims=True)))[..., 0]
        p = p / p.sum(-1, keepdims=True)
    out, flow = np.where(there, p @ v, 0), np.where(there, np.ones(q.shape), 0)
    dp = flow @ v.swapaxes(-1, -2)
    ds = np.where(seen, p * (dp - (p * dp).sum(-1, keepdims=True)), 0)
    heads = (len(q), -1, group, keys, q.shape[-1])
    dk, dv = ((x.swapaxes(-1, -2) @ y).reshape(heads).sum(2) for x, y in ((ds * scale, q), (p, flow)))
    return (*(x.swapaxes(1, 2) for x in (out, lse, ds @ k * scale, dk, dv)), ds)


def drawn(seed, dtype="float32"):
    """Arrays, and options in our words and in the formula's."""
    r = np.random.default_rng(seed)
    batch, rows, keys, kv, group = (int(r.integers(1, n)) for n in (4, 9, 11, 3, 4))
    shapes = (rows, kv * group), (keys, kv), (keys, kv)
    arrays = [jnp.asarray(r.standard_normal((batch, *shape, 8)), dtype) for shape in shapes]
    options, lengths = {}, [None, None]
    whole = (batch, kv * group, rows, keys)
    if r.integers(2):
        bias = r.standard_normal([n if r.integers(3) else 1 for n in whole]).astype(np.float32)
        bias[r.random(bias.shape) < 0.2] = [-np.inf, np.finfo(np.float32).min][seed % 2]
        if seed % 2:
            bias[..., :1] = 0  # gradients of rows that see nothing else differ (docs/jax.md)
        options["bias"] = jnp.asarray(bias)
    if r.integers(2):
        options["mask"] = jnp.asarray(r.random([n if r.integers(3) else 1 for n in whole]) < 0.6)
    options["is_causal"] = bool(r.integers(2))
    if not r.integers(3):
        options["scale"] = float(r.choice([0.0, 0.3, -1.0]))
    for at, n in enumerate((rows, keys)):
        if not r.integers(3):
            lengths[at] = jnp.asarray(r.integers(-1, n + 2, batch), jnp.int32)
    window = [None, 2, (1, 0), (0, 3)][int(r.integers(4))]
    ours = {"query_seq_lengths": lengths[0], "key_value_seq_lengths": lengths[1], "local_window_size": window}
    theirs = {"lengths": lengths, "window": (window, window) if isinstance(window, int) else window}
    return arrays, options | ours, options | theirs


def close(got, want, small, what):
    """In value, and where NaN and infinities are."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, what
    assert np.allclose(got, want, small, small, equal_nan=True), f"{what}: {abs(got - want).max()}"


@pytest.mark.parametrize("seed", range(300) if FULL else [7, 13, 26])
def test_against_the_formula(seed):
    """out, the residual and every gradient, also of rows that see nothing; of 16 bits, too."""
    name = ["float32", "float32", "float32", "bfloat16", "float16"][seed % 5]
    arrays, options, known = drawn(seed, name)
    bias = options.pop("bias", None)
    given = (*arrays, *(() if bias is None else (bias,)))

    def total(*given):
        out, lse = attend(*given, **options, return_residual=True)
        return out.astype(jnp.float32).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    grads, (out, lse) = jax.jit(jax.grad(total, tuple(range(len(given))), has_aux=True))(*given)
    want, want_lse, *flows, d_bias = formula(*arrays, **known)
    small = SMALL[name]
    close(out, want, small, "out")
    with np.errstate(over="ignore"):
        want_lse = want_lse.astype(np.float16) if name == "float16" else want_lse  # -2.4e38 is -inf
    close(lse, want_lse, small, "lse")
    for what, x, y in zip(("dq", "dk", "dv"), grads, flows, strict=False):
        close(x, y, 4 * small, what)
    if bias is not None:
        axes = tuple(at for at, n in enumerate(bias.shape) if n == 1)
        close(grads[3], d_bias.sum(axes, keepdims=True), 4 * small, "d_bias")


def test_signature():
    """Names, order, what is keyword-only, and defaults are JAX's; older versions return no residual."""
    own, theirs = (list(inspect.signature(f).parameters.values()) for f in (attend, jax.nn.dot_product_attention))
    own = own if HAS_RESIDUAL else own[:-1]
    assert [(x.name, x.kind, x.default) for x in own] == [(x.name, x.kind, x.default) for x in theirs]


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.skipif(not HAS_RESIDUAL, reason="this JAX returns no residual")
def test_against_jax():
    """JAX itself, in what its documentation leaves open: rows that see nothing, and those that are all -inf."""
    q, k, v = normal(2, 5, 2, 8), normal(2, 5, 1, 8, seed=1), normal(2, 5, 1, 8, seed=2)
    bias = jnp.zeros((1, 1, 5, 5)).at[..., 2, :].set(-jnp.inf).at[..., 3, :2].set(-jnp.inf)
    mask = jnp.ones((2, 1, 5, 5), bool).at[0, 0, 1].set(False).at[0, 0, 3, 2:].set(False)
    lengths = {"query_seq_lengths": jnp.array([4, 5], jnp.int32), "key_value_seq_lengths": jnp.array([5, 0], jnp.int32)}
    for options in ({"bias": bias, "mask": mask}, *([{"bias": bias}, {"mask": mask, **lengths}] if FULL else [])):

        def both(attend, q, k, v, options=options):
            out, lse = attend(q, k, v, **options, return_residual=True)
            return out.sum(), (out, lse)

        found = [
            jax.jit(jax.grad(functools.partial(both, f), (0, 1, 2), has_aux=True))(q, k, v)
            for f in (attend, jax.nn.dot_product_attention)
        ]
        for at, (x, y) in enumerate(zip(*map(jax.tree.leaves, found), strict=True)):
            close(x, y, 1e-4, at)


def test_transformations():
    """vmap of all and of some arguments, twice, of gradients; scan and remat: as one call for each."""
    q, k, v = normal(3, 2, 4, 5, 2, 8), normal(3, 2, 4, 5, 1, 8, seed=1), normal(3, 4, 5, 1, 8, seed=2)
    bias, lengths = normal(2, 5, 5, seed=3), jnp.array([[5, 3, 0, 1], [2, 2, 5, 4]], jnp.int32)

    def total(q, k, v, bias, lengths):
        return (attend(q, k, v, bias, is_causal=True, key_value_seq_lengths=lengths) ** 2).sum()

    step = jax.grad(total, (0, 1, 2, 3))
    got = jax.jit(jax.vmap(jax.vmap(step, (0, 0, None, None, 0)), (0, 0, 0, None, None)))(q, k, v, bias, lengths)
    alone = jax.jit(jax.grad(jax.checkpoint(total), (0, 1, 2, 3)))
    for a, b in ((0, 0), (0, 1), (2, 1)):
        want = alone(q[a, b], k[a, b], v[a], bias, lengths[b])
        for at, (x, y) in enumerate(zip(got, want, strict=True)):
            close(x[a, b], y, 1e-6, (a, b, at))

    @jax.jit
    def rolled(x):
        return jax.lax.scan(lambda x, k: (attend(x, k, k), None), x, k[0])[0]

    close(rolled(q[0, 0]), attend(attend(q[0, 0], k[0, 0], k[0, 0]), k[0, 1], k[0, 1]), 1e-6, "scan")


def test_float64():
    """All in float64, with a row that sees nothing; newer releases compute such arrays without x64, too."""
    enable_x64 = jax.enable_x64 if hasattr(jax, "set_mesh") else jax.experimental.enable_x64
    mask = jnp.ones((1, 1, 4, 4), bool).at[0, 0, 1].set(False)

    def step(q, k, v, flow):
        out, pull = jax.vjp(lambda *given: attend(*given, mask=mask), q, k, v)
        return pull(flow), out

    with enable_x64(True):
        given = [jnp.asarray(np.random.default_rng(seed).standard_normal((1, 4, 2, 8))) for seed in range(3)]
        flow = jnp.ones((1, 4, 2, 8))
        found = [step(*given, flow)]
    if jax.__version_info__ >= (0, 10):
        found.append(step(*given, flow))
    want, _, *flows, _ = formula(*given, mask=mask)
    for grads, out in found:
        for at, (x, y) in enumerate(zip((out, *grads), (want, *flows), strict=True)):
            assert x.dtype == np.float64
            close(x, y, 1e-12, at)


@pytest.mark.parametrize("flag", ["debug_infs", "debug_nans"])
def test_debugging_flags(flag):
    """Rows that see nothing are finite in all that JAX sees, and have the same bits; NaN is found where it is."""
    q, k, v = normal(2, 4, 2, 8), normal(2, 4, 1, 8, seed=1), normal(2, 4, 1, 8, seed=2)
    options = {"mask": jnp.ones((2, 1, 4, 4), bool).at[0, 0, 1].set(False),
               "query_seq_lengths": jnp.array([3, 4], jnp.int32)}  # fmt: skip

    def total(q, k, v, bias=None):
        return (attend(q, k, v, bias, **options) ** 2).sum()

    step = jax.value_and_grad(total, (0, 1, 2))
    want = jax.tree.leaves(step(q, k, v))
    lowest = np.full((1, 1, 4, 4), -np.inf, np.float32)
    with getattr(jax, flag)(True):
        got = jax.tree.leaves(step(q, k, v))
        if flag == "debug_nans":
            with pytest.raises(FloatingPointError, match="nan"):
                step(q, k, v, lowest)
    assert all((x == y).all() for x, y in zip(got, want, strict=True))


def test_without_a_batch():
    q, k = jnp.ones((3, 4, 8)), jnp.ones((5, 2, 8))
    out, lse = attend(q, k, k, mask=np.ones((4, 3, 5), bool), local_window_size=1, return_residual=True)
    assert out.shape == (3, 4, 8) and lse.shape == (3, 4) and float(out[2, 3, 7]) == 1
    weak = jax.jit(lambda: jax.lax.broadcast(0.5, (3, 4, 8)))()
    assert weak.weak_type and not attend(weak, weak, weak).weak_type


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_no_queries_at_all(shape):
    """Under vmap, with a bias that gradients flow to, too."""
    (batch, rows), key = shape, jnp.ones((shape[0], 5, 2, 8))
    q, bias = jnp.ones((batch, rows, 2, 8)), jnp.ones((1, 1, 1, 5))

    def total(q, k, bias):
        return attend(q, k, k, bias, is_causal=True).sum()

    each = jax.grad(total, (0, 1, 2))(q, key, bias)
    stacked = jax.vmap(jax.grad(total, (0, 1, 2)), (None, None, 0))(q, key, jnp.stack([bias] * 3))
    for x, many, like in zip(each, stacked, (q, key, bias), strict=True):
        assert x.shape == like.shape and many.shape == (3, *like.shape) and not x.any() and not many.any()


def test_what_is_not_followed_costs_nothing():
    """A bias that nobody differentiates has no gradient kernel; what flows into the residual stays there."""
    q, bias = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 1, 3, 3))
    text = str(jax.make_jaxpr(jax.grad(lambda q: attend(q, q, q, bias).sum()))(q))
    assert '"grads": false' in text.replace("\\", "") or text.count("speedlight_attention_backward") == 1
    residual = jax.grad(lambda q: attend(q, q, q, return_residual=True)[1].sum())(q)
    assert (residual == 0).all()


def test_many_calls_on_many_threads():
    """Calls that follow and overlap each other, in programs of their own threads: nobody waits for another."""
    q = normal(2, 40, 4, 8)

    @jax.jit
    def chained(q):
        ways = [attend(q, q + n, q - n, is_causal=True) for n in range(4)]  # which XLA may run side by side
        return functools.reduce(lambda x, y: attend(x, y, q), ways) + jax.grad(lambda q: attend(q, q, q).sum())(q)

    want, found = chained(q), []

    def work():
        for _ in range(20):
            found.append(chained(q))  # not waited for

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(found) == 60 and all((x == want).all() for x in found)


def test_errors_when_it_is_called():
    q, k = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 5, 2, 8))
    lengths = jnp.ones(2, jnp.int32)
    for args, options, message in [
        ((q[0, 0], k, k), {}, "query: expected .batch, length, heads, dim."),
        ((q, k, k[:, :4]), {}, "value: expected shape"),
        ((q, k[:1], k[:1]), {}, "key: expected batch 2 and dim 8"),
        ((q, k[:, :, [0, 1, 0]], k[:, :, [0, 1, 0]]), {}, "key: expected heads that divide query's 4; got 3"),
        ((q, k[:, :0], k[:, :0]), {}, "key: expected at least one key"),
        ((q, k, k, jnp.ones((2, 4, 3, 4))), {}, "bias: expected a shape that broadcasts"),
        ((q, k, k, None, jnp.ones((3, 1, 1, 5), bool)), {}, "mask: expected a shape that broadcasts"),
        ((q, k, k), {"query_seq_lengths": lengths[:1]}, "query_seq_lengths: expected int32 of shape"),
        ((q, k, k), {"key_value_seq_lengths": lengths * 1.0}, "key_value_seq_lengths: expected int32 of shape"),
        ((q, k, k), {"local_window_size": (-1, 2)}, "local_window_size: expected sizes of at least 0"),
        ((q, k, k), {"scale": np.inf}, "scale: expected a finite number"),
    ]:
        with pytest.raises(sl.ArgumentError, match=message):
            attend(*args, **options)
    for args, options, message in [
        (
            (q.astype(int), k, k),
            {},
            r"query: expected float32, float64, .* Use query\.astype\(jnp\.float32\)",
        ),
        (
            (q, k.astype(jnp.bfloat16), k),
            {},
            r"key: expected float32, as query .* bfloat16. Use key\.astype\(query\.dtype\)",
        ),
        ((q, k, k, jnp.ones((3, 5), bool)), {}, "bias: expected floats"),
        ((q, k, k, None, jnp.ones((3, 5))), {}, "mask: expected bool"),
        ((q, k, k), {"scale": "half"}, "scale: expected a float"),
    ]:
        with pytest.raises(sl.ArgumentTypeError, match=message):
            attend(*args, **options)
    with pytest.raises(sl.UnsupportedError, match="implementation: expected None; got 'cudnn'"):
        attend(q, k, k, implementation="cudnn")
    with pytest.raises(sl.UnsupportedError, match="scale: expected a number that is known when the call is traced"):
        jax.jit(lambda s: attend(q, k, k, scale=s))(1.0)


def test_attention_of_a_traced_array_names_this_call():
    q = jnp.ones((1, 2, 3, 8))
    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(sl.UnsupportedError, match=r"q: .*speedlight\.jax\.dot_product_attention"):
            transform(lambda q: sl.attention(q, q, q).sum())(q if transform is not jax.vmap else q[None])


def test_errors_inside_a_call_are_jax_errors(monkeypatch):
    """What kernels raise becomes the message of JAX's error, and the next call works."""

    def refuse(*_, **__):
        raise MemoryError("no room")

    q = jnp.ones((1, 3, 1, 8))
    with monkeypatch.context() as patch:
        patch.setattr(speedlight.jax, "attention", refuse)
        with pytest.raises(jax.errors.JaxRuntimeError, match="MemoryError: no room"):
            attend(q, q, q).block_until_ready()
    assert (attend(q, q, q) == 1).all()


def test_derivatives_that_are_refused():
    q = jnp.ones((1, 3, 1, 8))

    def total(q):
        return attend(q, q, q).sum()

    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(total, (q,), (q,))
    with pytest.raises(ValueError, match="speedlight_attention` cannot be differentiated"):
        jax.hessian(total)(q)


# --- programs that end while calls are in flight

LATE = """
import atexit, os, signal, sys, threading, jax, jax.numpy as jnp, speedlight.jax
from jax.experimental import io_callback
q, w = jnp.ones((1, 64, 2, 8)), jnp.ones((800, 800))

@jax.jit
def late(q, w):  # attention that is asked for now, and begins after a while
    for _ in range(8):
        w = w @ w / 800
    return speedlight.jax.dot_product_attention(q + w[0, 0], q, q)

late(q, w).block_until_ready()
y = late(q, w)
"""
ENDS = {  # the last lines, the exit code, what is printed
    "shape": ("print(y.shape)", 0, "(1, 64, 2, 8)"),
    "saved": ("jax.jit(lambda q: io_callback(lambda x: print(float(x)), None, late(q, w).sum()))(q)", 0, "1024.0"),
    "several": ("z = [late(q + n, w) for n in range(5)], jax.jit(jax.grad(lambda q: late(q, w).sum()))(q)", 0, ""),
    "dropped": ("del y", 0, ""),
    "exit": ("sys.exit(3)", 3, ""),
    "_exit": ("os._exit(4)", 4, ""),
    "raise": ("raise MemoryError", 1, ""),
    "interrupt": ("signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)",
                  -signal.SIGINT, ""),
    "fork": ("if not (child := os.fork()): os._exit(5)\nprint(os.waitpid(child, 0)[1] >> 8)", 0, "5"),
    "at exit": ("atexit.register(lambda: print(late(q, w).sum()))", 0, "1024.0"),
    "error": ("speedlight.jax.attention = None\nz = late(q, w)", 0, ""),
    "thread": ("threading.Thread(target=lambda: print(late(q, w).sum())).start()", 0, "1024.0"),
}  # fmt: skip
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
ends = [pytest.param(x, marks=needs_fork) if x == "fork" else x for x in (ENDS if FULL else ["shape", "fork"])]


@pytest.mark.parametrize("name", ends)
def test_no_call_keeps_a_program_from_ending(name):
    """The GIL is not to be had any more when XLA comes to the call. What JAX itself waits for is computed."""
    last, code, printed = ENDS[name]
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LATE + last], capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stdout.strip()) == (code, printed), found.stderr


# --- the structures of XLA


def test_structures_are_those_that_jax_ships():
    """Each field of ours is where the header has it, in the version that handlers answer with and in this one."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    version = [int(re.search(rf"define XLA_FFI_API_{x} (\d+)", header)[1]) for x in ("MAJOR", "MINOR")]
    assert version[0] == xla._VERSION[0] and version[1] >= xla._VERSION[1]
    for structure, name in (
        (xla._Buffer, "Buffer"), (xla._Buffers, "Args"), (xla._Buffers, "Rets"), (xla._Version, "Api_Version"),
        (xla._ErrorArgs, "Error_Create_Args"), (xla._Api, "Api"), (xla._Attributes, "Attrs"), (xla._Frame, "CallFrame"),
        (xla._Metadata, "Metadata"),
    ):  # fmt: skip
        body = re.search(rf"struct XLA_FFI_{name} {{(.*?)\n}};", header, re.DOTALL)[1]
        fields = re.findall(r"(?:^|\n)\s*([^\n;/]*?)[;)]", re.sub(r"//[^\n]*", "", body))
        kinds = [sizes_of(x, xla) for x in fields if x.strip()]
        ours = [kind for _, kind in structure._fields_]
        assert [ctypes.sizeof(x) for x in ours] == kinds[: len(ours)], name


def sizes_of(field, xla):
    """Of a declaration in C: its size in bytes."""
    known = {"XLA_FFI_Args": xla._Buffers, "XLA_FFI_Rets": xla._Buffers, "XLA_FFI_Attrs": xla._Attributes,
             "XLA_FFI_Api_Version": xla._Version, "int64_t": ctypes.c_int64, "size_t": ctypes.c_size_t}  # fmt: skip
    kind = field.split()[0]
    if "*" in field or "(" in field:
        return ctypes.sizeof(ctypes.c_void_p)
    return ctypes.sizeof(known.get(kind, ctypes.c_int))  # an enumeration, or int


def test_a_jax_that_no_longer_takes_handlers_says_so(monkeypatch):
    jax.devices()  # before, JAX only notes what is registered
    monkeypatch.setattr(xla, "_VERSION", (99, 0))
    with pytest.raises(sl.UnsupportedError, match=r"speedlight\.jax: expected a JAX .* 99\.0 of its FFI; JAX \d"):
        xla.register("speedlight_of_tomorrow", lambda *_: None)


def test_arrays_in_expressions():
    """Captured arrays are looked up; JAX's functions are not traced, and say so with the line."""
    slopes = jnp.arange(4.0)
    traced = sl.expression(lambda s, b, h, i, j: s + slopes[h] * (j - i))
    assert evaluate(traced.root, {"s": 1.0, "b": 0, "h": 3, "i": 1, "j": 5}) == 13.0
    for function in (
        lambda s, b, h, i, j: jnp.tanh(s),
        lambda s, b, h, i, j: jax.nn.gelu(s),
        lambda s, b, h, i, j: jnp.where(i > j, s, 0),
        lambda s, b, h, i, j: jnp.float32(2) * s,
    ):
        with pytest.raises(sl.ExpressionError, match=r"JAX's functions and arrays: .* np\.tanh, .* sl\.exp") as caught:
            sl.expression(function)
        assert f"{__file__}:{function.__code__.co_firstlineno}" in str(caught.value)
