"""JAX's attention, computed here: `dot_product_attention` under jit, grad, vmap and shard_map, on the CPU.

>>> import jax, jax.numpy as jnp, speedlight.jax
>>> q = k = v = jnp.ones((1, 5, 8, 64))
>>> attend = lambda q: speedlight.jax.dot_product_attention(q, k, v, is_causal=True)
>>> jax.jit(attend)(q).shape, jax.grad(lambda q: attend(q).sum())(q).shape
((1, 5, 8, 64), (1, 5, 8, 64))
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..adapting import not_installed

try:
    import jax
except ModuleNotFoundError as error:
    raise not_installed(__name__, error) from None
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from .. import ArgumentError, ArgumentTypeError, Table, UnsupportedError, attention, attention_backward
from ..adapting import DTYPES, Library, check_flag, integer, public, scale_of, shown
from . import xla

__all__ = ["dot_product_attention"]

JAX = Library(
    "jax",
    tested=("0.6", "0.10"),
    refused={"implementation": "It chooses among jax.nn.dot_product_attention's own."},
)
HIDDEN = np.float32(-0.7) * np.finfo(np.float32).max  # what JAX puts where a mask hides a key
_LENGTH = " JAX's length comes before heads: (batch, length, heads, dim)."
_PIECE = 256  # rows that are settled at a time
_OPTIONAL = ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths")


@public(leaves_graph=False)
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
) -> Any:
    """Attends as jax.nn.dot_product_attention does, by its signature, on the CPU; memory is linear in the length.

    Args:
        query: (batch, T, heads, dim), or without the batch: float32, float64, float16 or bfloat16.
        key: (batch, S, kv_heads, dim); kv_heads divides heads. At least one key.
        value: as key.
        bias: added to scores, (batch or 1, heads or 1, T or 1, S or 1), or fewer dimensions: differentiable.
        mask: bool of such a shape, True where a key takes part.
        scale: a number that is known when the call is traced. Default 1/sqrt(dim).
        is_causal: hides keys j > i, counted from the first query and key.
        query_seq_lengths: (batch,) of int32: rows from there on are 0, and nothing flows back from them.
        key_value_seq_lengths: (batch,) of int32: keys from there on are hidden.
        local_window_size: (left, right), or one int for both: hides keys before i - left and after i + right.
        implementation: None.
        return_residual: also return the log-sum-exps, (batch, T, heads), of key's dtype; gradients do not follow them.

    Returns:
        What query is shaped as. A row that sees no key is the mean of what is hidden from it, and its log-sum-exp
        -2.4e38, as in JAX, where hidden scores are that number: the same for rows whose bias is below it, and NaN for
        those that a bias of -inf alone leaves without keys. Different from JAX, hidden NaN and infinities in value stay
        hidden elsewhere, and float64 is computed in float64.

    Raises:
        speedlight.Error: when it is called or traced: the argument, what was expected and what came.

    >>> import jax.numpy as jnp, speedlight.jax
    >>> q, k = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 5, 2, 8))
    >>> out, lse = speedlight.jax.dot_product_attention(q, k, k, local_window_size=(2, 0), return_residual=True)
    >>> out.shape, lse.shape
    ((2, 3, 4, 8), (2, 3, 4))
    """
    JAX.refuse(implementation=implementation)
    check_flag("return_residual", return_residual)
    q, k, v = (_read_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    shape = q.shape
    q, k, v = (x[None] if x.ndim == 3 else x for x in (q, k, v))
    _check_arrays(q, k, v)
    given = {"bias": bias, "mask": mask}
    rest = {name: _check_dense(name, x, q, k) for name, x in given.items() if x is not None}
    given = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    rest |= {name: _check_lengths(name, x, len(k)) for name, x in given.items() if x is not None}
    call = _Call(
        _read_static("is_causal", is_causal, bool),
        _read_window(local_window_size),
        scale_of(None if scale is None else _read_static("scale", scale, float), shape[-1]),
        return_residual,
        tuple(rest),
    )
    results = _compiled(call, q, k, v, rest)
    out = results[0].reshape(shape)
    return (out, jax.lax.stop_gradient(results[1]).reshape(shape[:-1])) if return_residual else out


class _Call(NamedTuple):
    """Options that are known when a call is traced, and go to XLA as text."""

    causal: bool
    window: tuple[int, int] | None
    scale: float
    residual: bool
    rest: tuple[str, ...]  # which of the optional operands there are
    grads: bool = False  # whether the log-sum-exps are wanted, or, of a backward pass, what flows to the bias

    def text(self) -> str:
        return json.dumps(self)


@functools.lru_cache(maxsize=512)
def _parse(text: bytes) -> _Call:
    causal, window, scale, residual, rest, grads = json.loads(text)
    return _Call(causal, window and tuple(window), scale, residual, tuple(rest), grads)


# --- what JAX traces


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, q: Any, k: Any, v: Any, rest: dict[str, Any]) -> Any:
    """Returns [out], and the residual if it is asked for."""
    return _forward(call, q, k, v, rest)


def _forward(call: _Call, q: Any, k: Any, v: Any, rest: dict[str, Any]) -> Any:
    def take_rows(q: Any) -> Any:
        rows = jax.lax.reduce_max(q, (3,))
        return rows, rows.swapaxes(1, 2)

    by_row, by_head = jax.make_jaxpr(take_rows)(q).out_avals
    results = [_type_of(q)]
    if call.residual:
        results.append(by_row.update(dtype=k.dtype, weak_type=False))
    if call.grads:
        results.append(by_head.update(dtype=_lse_bits(q.dtype), weak_type=False))
    operands = [rest[name] for name in call.rest]
    return jax.ffi.ffi_call("speedlight_attention", results, vmap_method="expand_dims")(
        q, k, v, *operands, text=call.text()
    )


def _forward_kept(call: _Call, q: Any, k: Any, v: Any, rest: dict[str, Any]) -> tuple[list[Any], Any]:
    followed = "bias" in rest and rest["bias"].perturbed
    q, k, v, rest = jax.tree.map(lambda x: x.value, (q, k, v, rest))
    *results, lse = _forward(call._replace(grads=True), q, k, v, rest)
    return results, (q, k, v, rest, results[0], lse, () if followed else None)


def _backward(call: _Call, kept: Any, flows: list[Any]) -> tuple[Any, ...]:
    q, k, v, rest, out, lse, followed = kept
    d_out = flows[0]
    if isinstance(d_out, SymbolicZero):
        d_out = jnp.zeros_like(out)
    results = [_type_of(x) for x in (q, k, v)]
    if followed is not None:
        results.append(_type_of(rest["bias"]))
    operands = [rest[name] for name in call.rest]
    text = call._replace(grads=followed is not None).text()
    dq, dk, dv, *d_bias = jax.ffi.ffi_call("speedlight_attention_backward", results, vmap_method="expand_dims")(
        q, k, v, *operands, out, lse, d_out, text=text
    )
    return dq, dk, dv, {name: d_bias[0] if name == "bias" and d_bias else None for name in rest}


_attend.defvjp(_forward_kept, _backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=0)
def _compiled(call: _Call, *operands: Any) -> Any:
    _check_partitioner()
    return _attend(call, *_vary(operands))


# --- what a result's type says of shard_map's mesh axes


def _type_of(x: Any) -> Any:
    """Returns the type of a result that is like x; the mesh axes over which it varies are part of it."""
    return jax.typeof(x).update(weak_type=False)


def _vary(operands: Any) -> Any:
    """Marks operands as varying over every mesh axis that one varies over; JAX then sums gradients of shared ones."""
    lax: Any = jax.lax  # older releases have pvary, newer ones pcast
    axes = dict.fromkeys(axis for x in jax.tree.leaves(operands) for axis in _varying_axes(x))

    def vary(x: Any) -> Any:
        own = _varying_axes(x)
        missing = tuple(axis for axis in axes if axis not in own)
        if not missing:
            return x
        return lax.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, missing)

    return jax.tree.map(vary, operands)


def _varying_axes(x: Any) -> frozenset[Any]:
    """Returns the mesh axes over which an array's type says that it varies; none without shard_map's check."""
    kind = jax.typeof(x)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def _check_partitioner() -> None:
    """Raises where XLA's older partitioner, GSPMD, would end the process: JAX 0.6 takes it."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    manual = {kind == jax.sharding.AxisType.Manual for kind, size in sizes if size > 1}
    if len(manual) == 2 and not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise UnsupportedError(
            "query: expected shard_map over all axes of its mesh, or the partitioner Shardy; got shard_map over some "
            "axes, and GSPMD. Use jax.config.update('jax_use_shardy_partitioner', True), as JAX has from 0.7 on."
        )


# --- what XLA calls


class _Given(NamedTuple):
    """Operands on the host, with all batches of vmap one."""

    call: _Call
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    bias: Table | None
    mask: np.ndarray | None
    q_lengths: list[int] | None
    k_lengths: list[int] | None

    def options(self) -> dict[str, Any]:
        return {
            "causal": self.call.causal, "window": self.call.window, "scale": self.call.scale, "layout": "blhd",
            "mask": self.mask, "score": self.bias, "q_start": 0,
            "q_lengths": self.q_lengths, "k_lengths": self.k_lengths,
        }  # fmt: skip

    def iterate(self, low: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yields (item, head, rows) of True entries of (batch, heads, rows), but for rows past an item's length."""
        if self.q_lengths is not None:
            low = low & (np.arange(low.shape[2]) < np.array(self.q_lengths)[:, None, None])
        for b, h in np.argwhere(low.any(-1)).tolist():
            rows = np.flatnonzero(low[b, h])
            for at in range(0, len(rows), _PIECE):
                yield b, h, rows[at : at + _PIECE]

    def find_hidden(self, b: int, h: int, rows: np.ndarray) -> np.ndarray:
        """Returns (rows or 1, keys) of floats, 1 where a mask hides the key; all 1 without a bias."""
        j = np.arange(self.k.shape[1])
        if self.bias is None:
            return np.ones((1, len(j)))
        i = rows[:, None]
        seen = np.broadcast_to(True if self.k_lengths is None else j < self.k_lengths[b], (len(rows), len(j)))
        if self.call.causal:
            seen = seen & (j <= i)
        if self.call.window is not None:
            seen = seen & (i - j <= self.call.window[0]) & (j - i <= self.call.window[1])
        if self.mask is not None:
            mask = self.mask[min(b, len(self.mask) - 1), min(h, self.mask.shape[1] - 1)]
            seen = seen & (mask if len(mask) == 1 else mask[rows])
        return (~seen).astype(np.float64)

    def kv_head(self, h: int) -> int:
        return h // (self.q.shape[2] // self.k.shape[2])


def _fold_operands(call: _Call, operands: list[np.ndarray], lead: tuple[int, ...], share: bool = True) -> _Given:
    """Folds (…, *shape) operands, … being 1 or the size of each vmap. `share`: a bias may be that of many items."""
    q, k, v = (_fold(x, lead, x.shape[len(lead)]) for x in operands[:3])
    rest: dict[str, Any] = dict.fromkeys(_OPTIONAL)
    for name, x in zip(call.rest, operands[3:], strict=False):
        alone = math.prod(x.shape[: len(lead) + 1]) == 1 and (share or math.prod(lead) == 1)
        whole = x.ndim > len(lead) + 1 and alone
        rest[name] = x.reshape(x.shape[len(lead) :]) if whole else _fold(x, lead, operands[0].shape[len(lead)])
    bias = None if rest["bias"] is None else Table(rest["bias"], "bias", copy=False)
    lengths = [
        None if x is None else np.clip(x, 0, most).tolist()
        for x, most in ((rest["query_seq_lengths"], q.shape[1]), (rest["key_value_seq_lengths"], k.shape[1]))
    ]
    return _Given(call, q, k, v, bias, rest["mask"], *lengths)


def _fold(x: np.ndarray, lead: tuple[int, ...], batch: int) -> np.ndarray:
    shape = x.shape[len(lead) + 1 :]
    return np.broadcast_to(x, (*lead, batch, *shape)).reshape(math.prod(lead) * batch, *shape)


def _run(operands: list[np.ndarray], results: list[np.ndarray], text: bytes) -> None:
    """Computes out, residual and log-sum-exps, as asked for; lse: -inf of rows to which nothing but values counts."""
    call = _parse(text)
    given = _fold_operands(call, operands, results[0].shape[:-4])
    out = results[0].reshape(given.q.shape)
    if not (call.rest or call.window or call.grads or call.residual):
        attention(given.q, given.k, given.v, out=out, **given.options())
        return
    _, lse = attention(given.q, given.k, given.v, out=out, return_lse=True, **given.options())
    settled = _settle(given, out, lse)
    if call.residual:
        logs = np.where(np.isneginf(settled), HIDDEN, lse).swapaxes(1, 2)
        with np.errstate(all="ignore"):
            results[1][...] = logs.astype(results[1].dtype).reshape(results[1].shape)
    if call.grads:
        results[-1][...] = settled.reshape(results[-1].shape).view(results[-1].dtype)


def _settle(given: _Given, out: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Makes rows that see nothing above `HIDDEN` what JAX makes them; lse with -inf for those, or NaN."""
    settled = lse
    for b, h, rows in given.iterate(lse < HIDDEN):
        settled = lse.copy() if settled is lse else settled
        hidden = given.find_hidden(b, h, rows)
        count = hidden.sum(-1, keepdims=True)
        mean = (hidden / np.maximum(count, 1)) @ given.v[b, :, given.kv_head(h)].astype(np.float64)
        nothing = np.isneginf(lse[b, h, rows])[:, None]
        old = out[b, rows, h]
        out[b, rows, h] = np.where(count > 0, mean, np.where(nothing, np.nan, old.astype(np.float64)))
        of_hidden = np.broadcast_to(count[:, 0] > 0, rows.shape)
        settled[b, h, rows] = np.where(of_hidden, -np.inf, np.where(nothing[:, 0], np.nan, lse[b, h, rows]))
    return settled


def _run_backward(operands: list[np.ndarray], results: list[np.ndarray], text: bytes) -> None:
    """Computes dq, dk, dv, and the bias's gradient if it is asked for."""
    call = _parse(text)
    lead = results[0].shape[:-4]
    given = _fold_operands(call, operands[:-3], lead, share=not call.grads)
    out, lse, d_out = (_fold(x, lead, x.shape[len(lead)]) for x in operands[-3:])
    lse = lse.view(_lse_dtype(given.q.dtype))
    q, k, v = given.q, given.k, given.v
    grads: Any = (given.bias,) if call.grads else ()
    found: Any = attention_backward(q, k, v, out, lse, d_out, grads=grads, **given.options())
    dq, dk, dv = found[:3]
    d_bias = found[3][0] if call.grads else None
    for b, h, rows in given.iterate(np.isnan(lse)):
        dq[b, rows, h] = dk[b, :, given.kv_head(h)] = dv[b, :, given.kv_head(h)] = np.nan
        if d_bias is not None:
            t = d_bias[min(b, len(d_bias) - 1), min(h, d_bias.shape[1] - 1)]
            t[rows if len(t) > 1 else 0] = np.nan
    flows = np.zeros(0)
    for b, h, rows in given.iterate(np.isneginf(lse)):
        flows = flows if flows.size else dv.astype(np.float64)
        hidden, d = given.find_hidden(b, h, rows), d_out[b, rows, h].astype(np.float64)
        d = d.sum(0, keepdims=True) if len(hidden) == 1 else d
        flows[b, :, given.kv_head(h)] += (hidden / hidden.sum(-1, keepdims=True)).T @ d
    for x, result in zip((dq, dk, dv if not flows.size else flows), results, strict=False):
        result[...] = x.reshape(result.shape).astype(result.dtype, copy=False)
    if d_bias is not None:
        _store_bias(d_bias, results[3], lead)


def _store_bias(d_bias: np.ndarray, result: np.ndarray, lead: tuple[int, ...]) -> None:
    """Sums the gradient of a bias of many items over them."""
    each = d_bias.reshape(*lead, len(d_bias) // math.prod(lead), *d_bias.shape[1:])
    shared = result.shape[len(lead)] == 1
    result[...] = each.sum(len(lead), keepdims=True) if shared else each


xla.register("speedlight_attention", _run)
xla.register("speedlight_attention_backward", _run_backward)


# --- checks, when a call is traced


def _read_array(name: str, x: Any) -> Any:
    if x is None or isinstance(x, tuple):
        raise ArgumentTypeError(
            f"{name}: expected an array; got {type(x).__name__}. Keys in two parts, and values in the keys, are "
            "speedlight.attention()'s: join here by jnp.concatenate."
        )
    x = jnp.asarray(x)
    if x.dtype.name not in DTYPES:
        raise ArgumentTypeError(
            f"{name}: expected float32, float64, float16 or bfloat16; got {x.dtype}. Use {name}.astype(jnp.float32)."
        )
    if x.ndim not in (3, 4):
        raise ArgumentError(f"{name}: expected (batch, length, heads, dim) or (length, heads, dim); got {x.shape}.")
    return x


def _check_arrays(q: Any, k: Any, v: Any) -> None:
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise ArgumentTypeError(
                f"{name}: expected {q.dtype}, as query has; got {x.dtype}. Use {name}.astype(query.dtype)."
            )
    if v.shape != k.shape:
        raise ArgumentError(f"value: expected shape {k.shape}, as key has; got {v.shape}.")
    if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        raise ArgumentError(f"key: expected batch {q.shape[0]} and dim {q.shape[3]}, as query; got {k.shape}.{_LENGTH}")
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ArgumentError(f"key: expected heads that divide query's {q.shape[2]}; got {k.shape[2]}.{_LENGTH}")
    if not (k.shape[1] and k.shape[3]):
        raise ArgumentError(f"key: expected at least one key, and a dim of at least 1; got {k.shape}.")


def _lse_dtype(dtype: Any) -> Any:
    """Returns the type of log-sum-exps, and of scores, for a type of queries."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _lse_bits(dtype: Any) -> Any:
    """Returns integers as wide as log-sum-exps: jax_debug_infs would refuse the -inf of a row without keys."""
    return np.dtype(f"int{8 * _lse_dtype(dtype).itemsize}")


def _check_dense(name: str, x: Any, q: Any, k: Any) -> Any:
    """Returns a mask, or a bias in the type of scores, of four dimensions."""
    x = jnp.asarray(x)
    if (x.dtype == bool) != (name == "mask") or jnp.iscomplexobj(x):
        if name == "mask":
            expected, way = "bool, True where a key takes part", "Use mask.astype(bool), or bias= for what is added"
        else:
            expected, way = "floats, which are added to scores", "A bool array is mask="
        raise ArgumentTypeError(f"{name}: expected {expected}; got {x.dtype}. {way}.")
    whole = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    shape = (1,) * (4 - x.ndim) + x.shape
    if len(shape) != 4 or not all([a in (1, b) for a, b in zip(shape, whole, strict=True)]):
        raise ArgumentError(
            f"{name}: expected a shape that broadcasts to (batch, heads, T, S) = {whole}; got {x.shape}."
        )
    return x.reshape(shape) if name == "mask" else x.reshape(shape).astype(_lse_dtype(q.dtype))


def _check_lengths(name: str, x: Any, batch: int) -> Any:
    x = jnp.asarray(x)
    if x.shape != (batch,) or x.dtype != np.int32:
        raise ArgumentError(f"{name}: expected int32 of shape ({batch},); got {x.dtype} of shape {x.shape}.")
    return x


def _read_window(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = size if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2:
        raise ArgumentError(f"local_window_size: expected an int or (left, right); got {shown(size)}.")
    left, right = (integer("local_window_size", n) for n in pair)
    if min(left, right) < 0:
        raise ArgumentError(
            f"local_window_size: expected sizes of at least 0; got {shown(size)}. Without a limit leave it out."
        )
    return left, right


def _read_static(name: str, x: Any, kind: type) -> Any:
    """Returns a value that is the same whenever the compiled call runs."""
    if isinstance(x, Tracer):
        raise UnsupportedError(
            f"{name}: expected a number that is known when the call is traced; got {type(x).__name__}. Give it to jit "
            f"as one of static_argnames, or multiply query by it."
        )
    try:
        return kind(x)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name}: expected a {kind.__name__}; got {shown(x)} ({error}).") from None
