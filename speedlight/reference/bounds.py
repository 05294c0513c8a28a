"""Error bounds of results against the specification, element by element. docs/numerics.md has the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays.dtypes import ALL_CODES, CODES, scale_columns
from ..expressions.tree import rounding_error
from ..problem.problem import SPAN, TILE, Problem

# unit roundoff of a result in each dtype, and half its smallest subnormal
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
TINY = {"float64": 2.0**-1074, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
# the largest number that each has
LARGEST = {
    "float64": float(np.finfo(np.float64).max),
    "float32": float(np.finfo(np.float32).max),
    "float16": 65504.0,
    "bfloat16": 2.0**128 - 2.0**120,
}

CHUNK = 32  # elements, or keys, that tiles sum by themselves

# of float32 products on tensor cores: of S for the scores, and of M for the sum of values
_COARSE = {"ieee": 0.0, "tf32x3": 2.0**-19, "tf32": 2.0**-9}


class Bounds(NamedTuple):
    """Largest allowed |error| of every element of out and of lse."""

    out: np.ndarray
    lse: np.ndarray


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The roundings of whatever computed a result."""

    problem: Problem
    proven: bool = False  # the worst for any values, else to first order for these
    dot: bool | str = False  # bfloat16 by the dot instruction; "tiles": by tiles; "odd": by Arm's
    codes: str | None = None  # dtype of a cache whose keys and values, codes · scales, these are
    latent: bool = False  # of codes: values are the first value_dim columns of keys, and the rest has no codes
    tile: int | None = None  # keys of a GPU's blocks
    precision: str = "ieee"  # of float32 products there

    @property
    def of_codes(self) -> int:
        """Roundings of codes · scales: of a sum by its scale, and of these numbers themselves."""
        return 2 * (self.codes is not None)

    @property
    def weighs_codes(self) -> bool:
        """Rounds weights by their scales to multiply them with codes, and sums them as they are."""
        return bool(self.dot) and self.codes is not None

    def key_blocks(self) -> list[slice]:
        """Returns the columns of a key whose products are summed by themselves, by what scale they have."""
        dim = self.problem.head_dim
        end = self.problem.value_dim if self.latent else dim
        size = scale_columns(self.codes, latent=self.latent)
        blocks = [slice(first, min(first + (size or end), end)) for first in range(0, end, size or max(end, 1))]
        return blocks + [slice(end, dim)] * (end < dim)

    @property
    def wide(self) -> bool:
        return self.problem.dtype == "float64"

    @property
    def u(self) -> float:
        """Unit roundoff of what is computed in."""
        return ROUNDOFF["float64" if self.wide else "float32"]

    @property
    def u_out(self) -> float:
        """The rounding of the result, where it is rounded once more."""
        return ROUNDOFF[self.problem.dtype] if self.problem.dtype in ("float16", "bfloat16") else 0.0

    @property
    def u_weights(self) -> float:
        """The rounding of the weights, where they are rounded."""
        return ROUNDOFF["bfloat16"] if self.dot else self.u_out if self.tile else 0.0

    @property
    def coarse(self) -> float:
        """What tensor cores round of float32 products, relative to the sizes of their terms."""
        return _COARSE[self.precision]

    @property
    def least_weight(self) -> float:
        """The error of a weight that is rounded, where it is subnormal then."""
        return TINY["float16"] if self.tile and self.problem.dtype == "float16" else 0.0

    @property
    def weight_room(self) -> float:
        """The largest weight that does not overflow where it is rounded."""
        return LARGEST[self.problem.dtype] / 2 if self.tile and self.u_out else self.room

    @property
    def normal(self) -> float:
        """The smallest normal number: weights below are 0."""
        return 2.0**-1022 if self.wide else 2.0**-126

    @property
    def room(self) -> float:
        """The largest sum of magnitudes whose terms cannot overflow, however they are rounded."""
        return LARGEST["float64" if self.wide else "float32"] / 2

    @property
    def tiny(self) -> float:
        """The error of an operation whose result is subnormal."""
        return self.normal if self.dot else TINY["float64" if self.wide else "float32"]

    @property
    def largest_code(self) -> float:
        """The largest code of any format of caches, or of these; 1 where numbers are no codes."""
        if self.codes is None:
            return 1.0
        return float(max(ALL_CODES[self.codes].largest, *[row.largest for row in CODES.values()]))

    @property
    def tiles(self) -> bool:
        """Sums of bfloat16 are made of sums over CHUNK elements."""
        return self.dot == "tiles"

    @property
    def odd(self) -> bool:
        """Sums of bfloat16 are of pairs, rounded to odd: by up to two units each."""
        return self.dot == "odd"

    @property
    def deepest(self) -> float:
        """A key so far below the maximum weighs 0."""
        return 709.0 if self.wide else 88.0


class _Softmax(NamedTuple):
    """One head's scores, their errors, and the softmax over them."""

    values: np.ndarray  # |v|
    visible: np.ndarray
    weight: np.ndarray  # p, of sum 1
    errors: np.ndarray
    depth: np.ndarray  # how far each score is below the row's largest
    top: np.ndarray
    logs: np.ndarray  # |lse|
    mean: np.ndarray  # M = Σ p|v|, of the weights that dropout leaves
    tiles: int  # of a span, at most
    merges: int  # of spans and a sink
    factors: Any  # what dropout multiplies weights by: 1, or an array


def bounds_of(head: Any, arithmetic: Arithmetic) -> Bounds:
    """Returns the bounds of one head of the reference: [q_len, value_dim] and [q_len]."""
    a, products = arithmetic, head.products()
    scores = head.scores(products)
    errors = _score_errors(head, a, products, scores)
    score = head.add_sink(scores)
    if head.problem.sinks is not None:
        errors = np.concatenate([errors, 2 * a.u * np.abs(score[:, -1:])], axis=1)
    visible = head.visible & (score != -np.inf)
    score = np.where(visible, score, -np.inf)
    top = np.maximum(score.max(axis=1, keepdims=True), -LARGEST["float64"])
    weight = np.exp(score - top)
    total = weight.sum(axis=1, keepdims=True)
    logs = np.abs(np.where(total == 0, 0, top + np.log(total)))
    weight /= np.where(total == 0, 1, total)
    # so large a maximum is rounded down, and exponents are clamped
    errors = errors + np.where((np.abs(top) > 2.0**22) & (total > 0), 4 * a.u * np.abs(top), 0)
    keys, values = len(head.k), np.abs(head.v)
    tiles, merges = min(-(-keys // TILE), SPAN // TILE), -(-keys // SPAN) + (head.problem.sinks is not None)
    depth = np.where(visible, np.minimum(top - score, a.deepest), 0)
    errors = np.where(visible, errors, 0)
    factors = 1.0 if head.factors is None else head.factors
    mean = (weight * factors) @ values
    found = _Softmax(values, visible, weight, errors, depth, top, logs, mean, tiles, merges, factors)
    match a:
        case Arithmetic(proven=True):
            out, lse = _proven(a, found, keys)
        case Arithmetic(tile=None):
            out, lse = _first_order(a, found, head)
        case _:
            out, lse = _on_gpu(a, found, keys)
    far = products_overflow(head, a).any(axis=1, keepdims=True)
    terms = (head.visible * factors) @ finite(values)
    return Bounds(
        np.where(far | (terms > a.room), np.inf, out + _floor(a, found, keys)),
        np.where(far, np.inf, lse)[:, 0],
    )


def _proven(a: Arithmetic, x: _Softmax, keys: int) -> tuple[Any, Any]:
    """Returns bounds that cannot be exceeded, whatever the values are."""
    error = x.errors.max(axis=1, keepdims=True) + a.u * x.depth.max(axis=1, keepdims=True)
    shared = error + _powers(a, x) + a.u_weights * (not a.weighs_codes)
    sums = a.u * 2 * (min(keys, TILE) + 3 * a.odd) + _merging(a, x)
    own = _dividing(a) + a.u_weights * a.weighs_codes
    relative = np.expm1(1.01 * (2 * shared + sums + own)) * (1 + a.u_out) + a.u_out
    out = np.where(np.isinf(relative), np.inf, relative * x.mean)  # even where the mean is 0
    return out, 1.01 * (shared + sums) + 4 * a.u * x.logs


def _first_order(a: Arithmetic, x: _Softmax, head: Any) -> tuple[Any, Any]:
    """Returns bounds of the roundings of these values, to first order.

    Numerator and denominator share what is wrong with a weight: it moves out by p·e·(v - out), and the sum of those is
    at most rms(e) · deviation(v), by Cauchy and Schwarz. Chains over keys have roundings of their own, and weights that
    are rounded by the scales of codes have these in the numerator alone.
    """
    rounded = 0.0 if a.weighs_codes else a.u_weights
    shared = x.errors + a.u * x.depth + _powers(a, x)
    largest = np.maximum(np.where(np.isfinite(head.v), x.values, 0).max(axis=0, initial=0.0), 1e-300)
    v = head.v / largest
    out, square = (x.weight * x.factors) @ v, (x.weight * x.factors * x.factors) @ (v * v)
    deviation = np.sqrt(np.maximum(square - out * out, 2.0**-50 * square))
    rms = np.sqrt((x.weight * shared * shared).sum(axis=1, keepdims=True))
    steps_of = _pair_steps if a.odd else _chain_steps
    chain = chain_of_values = x.weight * steps_of(x.visible, len(head.k))
    if a.tiles:
        chain_of_values = x.weight * _tile_steps(x.visible, len(head.k))
    steps = chain.sum(axis=1, keepdims=True)
    sums = _merging(a, x)
    moved = (rms + rounded) * deviation + a.u * ((chain_of_values * x.factors) @ np.abs(v) + steps * np.abs(out))
    moved = moved * largest + (sums + _dividing(a) + a.u_weights - rounded) * x.mean
    lse = (x.weight * shared).sum(axis=1, keepdims=True) + rounded + a.u * (steps + 2 * x.logs) + sums
    return 1.01 * moved + a.u_out * (np.abs(out) * largest + moved), 1.01 * lse


def _powers(a: Arithmetic, x: _Softmax) -> float:
    """Relative error of a weight's power of 4 and of those that it is multiplied by later."""
    return (1.1e-4 if a.dot else 4 * a.u) * (x.tiles + x.merges)


def _merging(a: Arithmetic, x: _Softmax) -> float:
    """Roundings of both sums where tiles and spans join, and of the division."""
    return a.u * (2 * x.tiles + 4 * x.merges + 1 + a.of_codes)


def _dividing(a: Arithmetic) -> float:
    """Roundings of what dropout divides by, of out alone: of 1 - p, and of its product with the sum of weights."""
    return 2 * a.u * (a.problem.dropout > 0)


def _on_gpu(a: Arithmetic, x: _Softmax, keys: int) -> tuple[Any, Any]:
    """Returns statistical bounds: the order in which tensor cores add is theirs."""
    error = x.errors.max(axis=1, keepdims=True) + a.u_weights
    sums = a.u * (TILE + keys / (a.tile or SPAN) + 12)
    relative = sums + error + a.u_out + a.coarse + _dividing(a)
    return relative * x.mean, sums - a.u * TILE / 2 + 2 * a.u * x.logs + error


def _chain_steps(visible: np.ndarray, keys: int) -> np.ndarray:
    """[q_len, keys]: how many roundings a key's weight goes through in its tile's chain, each of one unit at most.

    A sink, past the keys, is merged by itself.
    """
    tiles = np.zeros((len(visible), -(-keys // TILE), TILE))
    tiles.reshape(len(visible), -1)[:, :keys] = visible[:, :keys]
    later = tiles[:, :, ::-1].cumsum(axis=2)[:, :, ::-1].reshape(len(visible), -1)[:, :keys]
    return np.pad(later, ((0, 0), (0, visible.shape[1] - keys)))


def _pair_steps(visible: np.ndarray, keys: int) -> np.ndarray:
    """[q_len, keys]: _chain_steps where pairs are added, and both roundings of one are of two units at most."""
    pairs = np.zeros((len(visible), -(-keys // TILE), TILE // 2, 2))
    pairs.reshape(len(visible), -1)[:, :keys] = visible[:, :keys]
    later = pairs.max(axis=3)[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
    steps = np.repeat(2 * (later + 1), 2, axis=2).reshape(len(visible), -1)[:, :keys]
    return np.pad(steps, ((0, 0), (0, visible.shape[1] - keys)))


def _tile_steps(visible: np.ndarray, keys: int) -> np.ndarray:
    """[q_len, keys]: how many roundings a key's value times its weight goes through in its tile: in a chain of every
    second key of its chunk, where two of these join, and where its chunk and later ones join the sum.
    """
    chunks = np.zeros((len(visible), -(-keys // TILE) * TILE // CHUNK, CHUNK))
    chunks.reshape(len(visible), -1)[:, :keys] = visible[:, :keys]
    both = chunks.reshape(*chunks.shape[:2], CHUNK // 2, 2)
    later = both[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
    joins = chunks.any(axis=2).reshape(len(visible), -1, TILE // CHUNK)[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
    steps = (later + 1 + joins.reshape(len(visible), -1, 1, 1)).reshape(len(visible), -1)[:, :keys]
    return np.pad(steps, ((0, 0), (0, visible.shape[1] - keys)))


def _score_errors(head: Any, a: Arithmetic, products: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """[q_len, k_len]: how far every score may be off, its product with log4 e included."""
    off = product_errors(head, a, products)
    if a.problem.score is None:
        return off
    _, off = rounding_error(a.problem.score.root, head.env | {"s": products}, off, a.u)
    return off + 2 * a.u * np.abs(scores)


def product_errors(head: Any, a: Arithmetic, products: np.ndarray) -> np.ndarray:
    """[q_len, k_len]: how far every scale · q·k may be off, before a score's expression."""
    p, u, q, k = a.problem, a.u, np.abs(head.q), np.abs(head.k)
    size = q @ k.T * (max(abs(p.scale), a.normal * 2) if p.scale else 0.0)
    if a.proven:
        blocks = a.key_blocks()
        d = max([x.stop - x.start for x in blocks]) + (len(blocks) - 1)
        d += d % 2 * bool(a.dot) + 2 * a.odd
        off = u * (d + 2 + a.of_codes + (p.score is not None)) * size
    elif a.tile:
        off = on_tensor_cores(a, size, p.head_dim, products)
    else:
        sums = block_sums(a, head.q, head.k)
        off = u * (sums * abs(p.scale) + (2 + (a.dot is True) + 2 * (a.odd or a.codes is not None)) * size)
    tiny = a.tiny * abs(p.scale)
    if a.codes is not None:  # what is lost of a sum of codes is multiplied by their scale
        tiny = tiny * np.maximum(1.0, finite(head.k).max(axis=1, initial=0.0))
    off += (p.head_dim * (1 + a.odd) + a.tiles * 2 * -(-p.head_dim // CHUNK)) * tiny
    return off + flushed(a, q, k) * abs(p.scale)


def on_tensor_cores(a: Arithmetic, size: Any, terms: int, products: Any) -> Any:
    """Statistical bound of products that are sums of so many terms: size is the sum of the terms' sizes."""
    return (a.u * 6 + a.coarse) * size + a.u * terms / 4 * np.abs(products)


def products_overflow(head: Any, a: Arithmetic) -> np.ndarray:
    """[q_len, k_len]: which visible scores may be infinite, or NaN, though q and k are finite."""
    k = finite(head.k)
    for block in a.key_blocks() if a.codes is not None else ():  # the chain is over codes
        most = k[:, block].max(axis=1, keepdims=True, initial=0.0)
        k[:, block] *= np.maximum(1.0, a.largest_code / np.maximum(most, a.normal))
    size = finite(head.q) @ k.T
    return head.visible[:, : len(head.k)] & (size * max(1.0, abs(a.problem.scale)) > a.room)


def finite(x: np.ndarray) -> np.ndarray:
    """Sizes; without what is NaN or infinite already, and comes out where the specification has it."""
    return np.where(np.isfinite(x), np.abs(x), 0.0)


def flushed(a: Arithmetic, x: np.ndarray, y: np.ndarray) -> Any:
    """Returns what products of the rows of x and y lose in the dot class, where subnormal numbers are zeros."""
    if not a.dot:
        return 0.0
    small_x, small_y = (np.where(z < a.normal, z, 0) for z in (x, y))
    if a.codes is not None:  # a code is no such number
        return small_x @ y.T
    return small_x @ y.T + x @ small_y.T if small_x.any() or small_y.any() else 0.0


def block_sums(a: Arithmetic, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Σ of the sizes of all sums that are rounded on the way to q·k: of each block, and of the blocks so far."""
    blocks = a.key_blocks()
    total, whole = np.zeros((len(q), len(k))), np.zeros((len(q), len(k)))
    for block in blocks:
        x, y = q[:, block], k[:, block]
        total += tile_sums(x, y) if a.tiles else (1 + a.odd) * partial_sums(x, y, 1 + a.odd)
        if len(blocks) > 1:
            whole += x @ y.T
            total += np.abs(whole)
    return total


def partial_sums(q: np.ndarray, k: np.ndarray, step: int = 1) -> np.ndarray:
    """Σ over the chain of |partial sum|, each of `step` more elements: each is rounded by one unit at most."""
    total, columns = np.zeros((len(q), len(k))), np.ascontiguousarray(k.T)
    for start in range(0, len(q), 32):  # rows that stay in a cache
        rows, sums = q[start : start + 32], total[start : start + 32]
        partial, product = np.zeros(sums.shape), np.empty(sums.shape)
        for t, column in enumerate(columns):
            np.multiply(rows[:, t, None], column[None], out=product)
            partial += product
            if (t + 1) % step == 0 or t + 1 == len(columns):
                sums += np.abs(partial, out=product)
    return total


def tile_sums(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Σ over all sums of tiles of |partial sum|: of two chains for each chunk of elements, of their sum, of the whole's
    so far.
    """
    total, whole = np.zeros((len(q), len(k))), np.zeros((len(q), len(k)))
    for first in range(0, q.shape[1], CHUNK):
        chunk = np.zeros_like(whole)
        for i in (0, 1):
            x, y = (z[:, first : first + CHUNK][:, i::2] for z in (q, k))
            total += partial_sums(x, y)
            chunk += x @ y.T
        whole += chunk
        total += np.abs(chunk) + np.abs(whole)
    return total


def _floor(a: Arithmetic, x: _Softmax, keys: int) -> Any:
    """Returns the error that does not shrink with M: weights and sums that underflow."""
    # weights of the GPU are float16 there
    lost = 2.0**-25 if a.tile and a.problem.dtype == "float16" else a.normal
    left = 1 / a.problem.dropout_divisor
    sums = a.tiny * (2 * (keys + 1) + a.odd * keys) * left
    if a.codes is not None:  # what is lost of a weight times a scale is multiplied by a code
        sums = sums * a.largest_code
    floor = TINY[a.problem.dtype] + sums + lost * ((x.visible * x.factors) @ x.values)
    return floor + (x.weight * x.factors) @ np.where(x.values < a.normal, x.values, 0) if a.dot else floor
