"""ONNX's operators as onnx's reference evaluator calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from .. import ArgumentError, ArgumentTypeError, Error, attention, rotary
from .. import softcap as softcap_score
from ..adapting import DTYPES, Library, check_index, limits

ATTENTION = Library("ONNX Attention", names={"q": "Q", "k": "K", "v": "V"})
ROTARY = Library(
    "ONNX RotaryEmbedding",
    names={
        "x": "X", "cos": "cos_cache", "sin": "sin_cache", "positions": "position_ids", "dims": "rotary_embedding_dim",
    },
)  # fmt: skip
SCATTER = Library("ONNX TensorScatter")
_PRECISIONS = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE


_F = TypeVar("_F", bound=Callable[..., Any])


def errors_of(operator: Library) -> Callable[[_F], _F]:
    """Gives errors the operator's names of inputs, and kinds that the evaluator lets pass: it wraps TypeErrors."""

    def decorate(run: _F) -> _F:
        @functools.wraps(run)
        def call(*args: Any, **attributes: Any) -> Any:
            try:
                with operator.renamed:
                    return run(*args, **attributes)
            except Error as error:
                if isinstance(error, TypeError):
                    raise ArgumentError(str(error)) from error
                raise

        return call  # type: ignore[return-value]

    return decorate


class Attention(OpRun):
    """The operator Attention of opsets 23, 24 and 25, of every attribute and input.

    Q, K and V: (batch, heads, length, dim), or (batch, length, heads · dim) with q_num_heads and kv_num_heads; V may
    have another dtype. Scores and softmax are computed in float32, in float64 if an input is or softmax_precision says
    so: never in 16 bits. Nothing grows with the square of the length but qk_matmul_output, which is an array of every
    score (modes 0 to 2) or weight (3) by definition, made by NumPy where the node names it as an output. Rows that
    see nothing are 0, in mode 3, too; hidden NaN stay hidden. present_key and present_value are K and V themselves
    without a past.

    Raises:
        speedlight.Error: the input or attribute, what was expected and what came. Never a TypeError,
            which onnx would wrap in another. A negative scale, which has no square root, and a negative softcap are
            refused.

    Source: https://onnx.ai/onnx/operators/onnx__Attention.html.

    >>> import numpy as np, speedlight.onnx
    >>> q, k = np.ones((1, 3, 32), np.float32), np.ones((1, 7, 8), np.float32)
    >>> speedlight.onnx.Attention.eval(q, k, k, q_num_heads=4, kv_num_heads=1, softcap=30.0).shape
    (1, 3, 32)
    """

    @errors_of(ATTENTION)
    def _run(
        self,
        Q: np.ndarray,
        K: np.ndarray,
        V: np.ndarray,
        attn_mask: np.ndarray | None = None,
        past_key: np.ndarray | None = None,
        past_value: np.ndarray | None = None,
        nonpad_kv_seqlen: np.ndarray | None = None,
        *,
        is_causal: int = 0,
        kv_num_heads: int | None = None,
        left_window_size: int = -1,
        q_num_heads: int | None = None,
        qk_matmul_output_mode: int = 0,
        right_window_size: int = -1,
        scale: float | None = None,
        softcap: float = 0.0,
        softmax_precision: int | None = None,
    ) -> tuple[np.ndarray, ...]:
        q = split_heads("Q", Q, "q_num_heads", q_num_heads)
        k, v = (split_heads(n, x, "kv_num_heads", kv_num_heads) for n, x in (("K", K), ("V", V)))
        past = 0 if past_key is None else past_key.shape[2]
        k, v = _join_past(k, v, past_key, past_value)
        if nonpad_kv_seqlen is not None and past_key is not None:
            raise ArgumentError("nonpad_kv_seqlen: expected none beside past_key; got both.")
        call = _Call(
            _check_visible(q, k, past, nonpad_kv_seqlen, attn_mask),
            is_causal != 0,
            _read_window(left_window_size, right_window_size),
            _check_scale(scale, q.shape[-1]),
            check_softcap(softcap),
            _choose_dtype(Q, K, V, softmax_precision),
        )
        weights = check_index("qk_matmul_output_mode", qk_matmul_output_mode, 4) == 3 and len(self.output) > 3
        out, lse = call.run(q, k, v, weights)
        width = out.shape[1] * out.shape[3]
        y = out if Q.ndim == 4 else np.ascontiguousarray(out.swapaxes(1, 2)).reshape(*Q.shape[:2], width)
        results = y.astype(Q.dtype, copy=False), k, v
        if len(self.output) > 3:
            results += (call.products(q, k, lse, qk_matmul_output_mode).astype(Q.dtype, copy=False),)
        return results[: max(len(self.output), 1)]


class _Visible(NamedTuple):
    """Keys that there are, and where the queries stand among them."""

    starts: tuple[int, ...]  # of each item's queries: the key that the first one is at
    lengths: tuple[int, ...]  # of each item's keys
    mask: np.ndarray | None  # bool, or added; of the keys that it has entries for, others are hidden
    keys: int  # how many those are

    def shown(self, rows: int, keys: int, causal: bool, window: tuple[int | None, int | None] | None) -> np.ndarray:
        """Returns (batch, 1, rows, keys): True where a mask of floats is what decides."""
        i = np.arange(rows)[:, None] + np.array(self.starts, np.int64).reshape(-1, 1, 1, 1)
        j = np.arange(keys)
        seen = j < np.array(self.lengths, np.int64).reshape(-1, 1, 1, 1)
        seen = seen & (j <= i) if causal else np.broadcast_to(seen, (len(self.lengths), 1, rows, keys))
        left, right = window or (None, None)
        if left is not None:
            seen = seen & (i - j <= left)
        return seen if right is None else seen & (j - i <= right)


class _Call(NamedTuple):
    """Attributes of a node, checked."""

    visible: _Visible
    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float
    softcap: float | None
    dtype: np.dtype  # of q, k and v as they are computed with

    def run(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, with_lse: bool) -> tuple[np.ndarray, Any]:
        """Returns Y by heads, and the log-sum-exps if they are wanted."""
        seen = self.visible
        score: list[Any] = [] if self.softcap is None else [softcap_score(self.softcap)]
        added = seen.mask is not None and seen.mask.dtype != bool
        if added:
            score.append(seen.mask)
        q, k, v = (x.astype(self.dtype, copy=False) for x in (q, k[:, :, : seen.keys], v[:, :, : seen.keys]))
        result: Any = attention(
            q,
            k,
            v,
            causal=self.causal,
            window=self.window,
            mask=None if added else seen.mask,
            score=score or None,
            q_start=seen.starts,
            k_lengths=seen.lengths,
            scale=self.scale,
            return_lse=with_lse,
        )
        return result if with_lse else (result, None)

    def products(self, q: np.ndarray, k: np.ndarray, lse: Any, mode: int) -> np.ndarray:
        """Returns qk_matmul_output: (batch, q_heads, rows, keys), all of it."""
        dtype = np.float64 if self.dtype == np.float64 else np.float32
        (batch, heads, rows, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
        grouped = q.astype(dtype, copy=False).reshape(batch, kv_heads, heads // kv_heads, rows, dim)
        with np.errstate(all="ignore"):
            s = grouped @ k.astype(dtype, copy=False)[:, :, None].swapaxes(-1, -2)
            s = s.reshape(batch, heads, rows, keys) * dtype(self.scale)
            if mode >= 1 and self.softcap is not None:
                s = np.tanh(s / dtype(self.softcap)) * dtype(self.softcap)
            if mode >= 2:
                s = self._hidden(s)
            if mode == 3:
                lse = lse[..., None]
                s = np.where(np.isneginf(lse), dtype(0), np.exp(s - lse))
        return s

    def _hidden(self, s: np.ndarray) -> np.ndarray:
        """Scores with the mask, -inf where nothing is seen."""
        seen, (rows, keys) = self.visible, s.shape[-2:]
        shown = seen.shown(rows, keys, self.causal, self.window)
        mask = seen.mask
        if mask is not None:
            more = [(0, 0)] * (mask.ndim - 1) + [(0, keys - seen.keys)]
            if mask.dtype == bool:
                shown = shown & np.pad(mask, more)
            else:
                mask = np.pad(mask, more, constant_values=-np.inf)
                shown, s = shown & ~np.isneginf(mask), s + mask
        return np.where(shown, s, s.dtype.type(-np.inf))


def split_heads(name: str, x: np.ndarray, attribute: str, heads: int | None) -> np.ndarray:
    """Returns a view of (batch, heads, length, dim)."""
    if x.ndim == 4:
        if heads not in (None, x.shape[1]):
            raise ArgumentError(f"{attribute}: expected none beside {name} of 4 dimensions; got {heads}.")
        return x
    if x.ndim != 3:
        raise ArgumentError(f"{name}: expected 3 or 4 dimensions; got shape {x.shape}.")
    if heads is None or heads < 1 or x.shape[2] % heads:
        raise ArgumentError(f"{attribute}: expected a divisor of {x.shape[2]}, as {name} is {x.shape}; got {heads}.")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2)


def _join_past(
    k: np.ndarray, v: np.ndarray, past_key: np.ndarray | None, past_value: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Joins the past with what is new."""
    if past_key is None and past_value is None:
        return k, v
    found = []
    for name, past, new in (("past_key", past_key, k), ("past_value", past_value, v)):
        if past is None:
            raise ArgumentError(f"{name}: expected past_key and past_value together; got one of them.")
        batch, heads, _, dim = new.shape
        if past.ndim != 4 or (past.shape[0], past.shape[1], past.shape[3]) != (batch, heads, dim):
            raise ArgumentError(f"{name}: expected shape ({batch}, {heads}, past, {dim}); got {past.shape}.")
        if past.dtype != new.dtype:
            raise ArgumentTypeError(f"{name}: expected {new.dtype}, as what is new has; got {past.dtype}.")
        found.append(np.concatenate((past, new), axis=2))
    if found[0].shape[2] != found[1].shape[2]:
        raise ArgumentError(f"past_value: expected the length of past_key; got {found[1].shape[2] - v.shape[2]}.")
    return found[0], found[1]


def _check_visible(
    q: np.ndarray, k: np.ndarray, past: int, nonpad: np.ndarray | None, mask: np.ndarray | None
) -> _Visible:
    (batch, heads, rows, _), keys = q.shape, k.shape[2]
    starts, lengths = [past] * batch, [keys] * batch
    if nonpad is not None:
        if nonpad.shape != (batch,) or nonpad.dtype.kind not in "iu":
            raise ArgumentError(
                f"nonpad_kv_seqlen: expected {batch} ints, one for each item; got {nonpad.dtype} of {nonpad.shape}."
            )
        lengths = [int(n) for n in nonpad]
        if not all([0 <= n <= keys for n in lengths]):
            raise ArgumentError(f"nonpad_kv_seqlen: expected 0 to {keys}, the keys in K; got {lengths}.")
        starts = [n - rows for n in lengths]
    if mask is None:
        return _Visible(tuple(starts), tuple(lengths), None, keys)
    shape = (1,) * (4 - mask.ndim) + mask.shape
    fits = [n in (1, whole) for n, whole in zip(shape[:3], (batch, heads, rows), strict=False)]
    if not 1 <= mask.ndim <= 4 or not all(fits) or shape[3] > keys:
        raise ArgumentError(
            f"attn_mask: expected a shape that broadcasts to {(batch, heads, rows)} and up to {keys} keys; got "
            f"{mask.shape}."
        )
    if mask.dtype != bool:
        mask = mask.astype(np.float64 if mask.dtype == np.float64 else np.float32, copy=False)
    return _Visible(tuple(starts), tuple([min(n, shape[3]) for n in lengths]), mask, shape[3])


def _read_window(left: int, right: int) -> tuple[int | None, int | None] | None:
    for name, n in (("left_window_size", left), ("right_window_size", right)):
        if n < -1:
            raise ArgumentError(f"{name}: expected -1, which is no limit, or more; got {n}.")
    return limits(left, right)


def _check_scale(scale: float | None, dim: int) -> float:
    if scale is None:
        return 1.0 / float(np.sqrt(max(dim, 1)))
    if not scale >= 0:
        raise ArgumentError(f"scale: expected a number of at least 0, whose root multiplies Q and K; got {scale}.")
    return scale


def check_softcap(softcap: float | None) -> float | None:
    if not softcap:
        return None
    if not softcap > 0:
        raise ArgumentError(f"softcap: expected 0, which is none, or more; got {softcap}.")
    return softcap


def _choose_dtype(q: np.ndarray, k: np.ndarray, v: np.ndarray, precision: int | None) -> np.dtype:
    """Returns one dtype for all three: theirs, or one that holds them all and that the softmax is asked to have."""
    for name, x in (("Q", q), ("K", k), ("V", v)):
        if x.dtype.name not in DTYPES:
            raise ArgumentTypeError(f"{name}: expected float32, float64, float16 or bfloat16; got {x.dtype}.")
    if k.dtype != q.dtype:
        raise ArgumentTypeError(f"K: expected {q.dtype}, as Q has; got {k.dtype}.")
    if precision is not None and precision not in _PRECISIONS:
        raise ArgumentError(f"softmax_precision: expected 1, 10, 11 or 16; got {precision}.")
    if precision == TensorProto.DOUBLE or np.float64 in (q.dtype, v.dtype):
        return np.dtype(np.float64)
    return q.dtype if v.dtype == q.dtype else np.dtype(np.float32)


class RotaryEmbedding(OpRun):
    """The operator RotaryEmbedding of opset 23, of every attribute and input.

    X: (batch, heads, length, dim), or (batch, length, heads · dim) with num_heads; cos_cache and sin_cache: (positions,
    dims / 2) with position_ids, (batch, length, dims / 2) without. Computed as `sl.rotary` does: in float32, rounded
    once. Positions outside of the table are refused, also negative ones.

    Raises:
        speedlight.Error: the input or attribute, what was expected and what came.

    Source: https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html.

    >>> import numpy as np, speedlight.onnx
    >>> x, table = np.ones((1, 2, 3, 4), np.float32), np.zeros((8, 2), np.float32)
    >>> speedlight.onnx.RotaryEmbedding.eval(x, table, table + 1, np.array([[5, 6, 7]]))[0, 0, 0].tolist()
    [-1.0, -1.0, 1.0, 1.0]
    """

    @errors_of(ROTARY)
    def _run(
        self,
        X: np.ndarray,
        cos_cache: np.ndarray,
        sin_cache: np.ndarray,
        position_ids: np.ndarray | None = None,
        *,
        interleaved: int = 0,
        num_heads: int | None = None,
        rotary_embedding_dim: int = 0,
    ) -> tuple[np.ndarray]:
        x = split_heads("X", X, "num_heads", num_heads)
        dims = rotary_embedding_dim or x.shape[-1]
        for name, t in (("cos_cache", cos_cache), ("sin_cache", sin_cache)):
            expected = 3 if position_ids is None else 2
            if t.ndim != expected or t.shape[-1] != dims // 2:
                beside = "no position_ids" if position_ids is None else "position_ids"
                raise ArgumentError(
                    f"{name}: expected {expected} dimensions beside {beside}, the last of {dims // 2}; got {t.shape}."
                )
        layout, given = ("bhld", X) if X.ndim == 4 else ("blhd", x.swapaxes(1, 2))
        y = rotary(
            given, cos_cache, sin_cache,
            positions=position_ids, interleaved=interleaved != 0, dims=dims, layout=layout,
        )  # fmt: skip
        return (y.reshape(X.shape),)


class TensorScatter(OpRun):
    """The operator TensorScatter of opset 24, of every attribute and dtype: an update written into a copy of a cache.

    past_cache: (batch, …, max_length, …), with the length at `axis`; update: the same but its length; write_indices:
    (batch,) ints. What a linear update has no room for is refused.

    Raises:
        speedlight.Error: the input or attribute, what was expected and what came.

    Source: https://onnx.ai/onnx/operators/onnx__TensorScatter.html.

    >>> import numpy as np, speedlight.onnx
    >>> past, update = np.zeros((1, 4, 1)), np.ones((1, 2, 1))
    >>> speedlight.onnx.TensorScatter.eval(past, update, np.array([3]), mode="circular").ravel().tolist()
    [1.0, 0.0, 0.0, 1.0]
    """

    @errors_of(SCATTER)
    def _run(
        self,
        past_cache: np.ndarray,
        update: np.ndarray,
        write_indices: np.ndarray | None = None,
        *,
        axis: int = -2,
        mode: str = "linear",
    ) -> tuple[np.ndarray]:
        at = axis + past_cache.ndim if axis < 0 else axis
        if not 1 <= at < past_cache.ndim:
            raise ArgumentError(f"axis: expected a dimension of {past_cache.shape} after the first; got {axis}.")
        if mode not in ("linear", "circular"):
            raise ArgumentError(f"mode: expected linear or circular; got {mode}.")
        batch, most = past_cache.shape[0], past_cache.shape[at]
        same = past_cache.shape[:at], past_cache.shape[at + 1 :]
        if (update.shape[:at], update.shape[at + 1 :]) != same or update.shape[at] > most:
            raise ArgumentError(
                f"update: expected the shape of past_cache, {past_cache.shape}, with up to {most} at axis {axis}; got "
                f"{update.shape}."
            )
        if update.dtype != past_cache.dtype:
            raise ArgumentTypeError(f"update: expected {past_cache.dtype}, as past_cache has; got {update.dtype}.")
        length = update.shape[at]
        first = np.zeros(batch, np.int64) if write_indices is None else write_indices
        if first.shape != (batch,) or first.dtype.kind not in "iu":
            raise ArgumentError(
                f"write_indices: expected {batch} ints, one for each item; got {first.dtype} of {first.shape}."
            )
        places = [range(int(n), int(n) + length) for n in first]
        if mode == "linear" and not all([r.start >= 0 and r.stop <= most for r in places]):
            raise ArgumentError(
                f"write_indices: expected 0 to {most - length}, so that {length} fit; got {first.tolist()}."
            )
        present = past_cache.copy()
        rows, new = np.moveaxis(present, at, 1), np.moveaxis(update, at, 1)
        for item, r in enumerate(places):
            rows[item, [n % most for n in r]] = new[item]
        return (present,)
