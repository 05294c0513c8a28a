"""What multiplies, by the name that machine.py gives it: how operands are read and packed, and one step of a sum.

    fma     a unit is one number, in f32 or f64: total + a·b
    pairs   a unit is two neighbouring bf16: total + a₁b₁ + a₀b₀ by AVX-512's dot instruction, which reads subnormals
            as 0. Queries and keys are paired along head_dim, weights and values along keys; a missing partner is 0.

Hidden keys weigh -0, which no visible key can: their values are not touched (0 · NaN is NaN).
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from ...arrays.array import STORAGE_BYTES
from ..language import conversions
from ..language.functions import like
from ..language.vector import BF16, F32, I16, I32, PTR, Function, Value, vec
from ..memory.records import BLOCK
from ..memory.shape import Shape

# 2^f on [-1/2, 1/2] with value 1 at 0 (minimax, relative): errors 9.2e-8, 3.4e-18, and 1.0e-4 where P becomes bf16
_EXP2_F32 = 0.6931469774100962, 0.24022241711702084, 0.05550733819271004, 0.009671537837623517, 0.0013264795066351006
_EXP2_F64 = (
    0.69314718055994532581, 0.24022650695910131286, 0.055504108664820083029, 0.0096181291075941078627,
    0.0013333558146774620302, 0.00015403530457129508295, 0.000015252733493173796849, 1.3215435272716792343e-6,
    1.0178199533695840947e-7, 7.073785041023905453e-9, 4.4347798013903755776e-10,
)  # fmt: skip
_EXP2_BF16 = 0.69328331395880648, 0.24221155408455297, 0.055005948223862378
_ONES = 0x3F803F80  # a pair of bf16
_HALVES = 0xFFFF, -65536  # the bits of its elements


def exp2_terms(s: Shape) -> tuple[float, ...]:
    """Coefficients of f, f², … for weights as they are multiplied."""
    match s.product:
        case "pairs":
            return _EXP2_BF16
    return _EXP2_F64 if s.wide else _EXP2_F32


def multiply_add(k: Function, s: Shape, a: Value, b: Value, total: Value) -> Value:
    """total + a·b over the elements of a unit."""
    match s.product:
        case "pairs":
            pairs = vec(BF16, 2 * s.lanes)
            return k.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", s.vector, total, a.bits(pairs), b.bits(pairs))
    return k.fma(a, b, total)


# --- units


def units_of(s: Shape, length: Value) -> Value:
    """How many units hold so many elements."""
    return length if s.elements == 1 else (length + (s.elements - 1)) // s.elements


def unit_of(s: Shape, element: Value) -> Value:
    """The unit that has an element."""
    return element if s.elements == 1 else element // s.elements


def whole_units(s: Shape, length: Value) -> Value:
    """How many of them can be read a vector at a time."""
    return length // (s.elements * s.lanes) * s.lanes


def first_alone(s: Shape, unit: Value) -> Value:
    """One unit, with zeros for all of its elements but the first."""
    return unit if s.elements == 1 else unit & ((1 << 32 // s.elements) - 1)


def step_bytes(s: Shape, row: Value) -> Value:
    """From a unit of values to the next, where neighbouring keys' values are kept together."""
    return row if s.elements == 1 else row * s.elements


def load_units(k: Function, s: Shape, row: Value, t: Value, *, stored: bool = False) -> Value:
    """`lanes` units from a row with unit stride; of keys or values that are `stored`, or of q."""
    if stored and s.quantised:
        return conversions.load_code(k, s.quantised, row, t, s.lanes)
    match s.product:
        case "pairs":
            return k.load(s.ivector, row, t * 4)
    storage = s.stored if stored else s.storage
    return conversions.load(k, storage, row, t * STORAGE_BYTES[storage], s.lanes)


def load_unit(
    k: Function, s: Shape, row: Value, t: Value, column: Value, count: Value, *, stored: bool = False
) -> Value:
    """One unit from a row of any stride; the missing half of an odd last pair is 0."""
    if stored and s.quantised:
        return conversions.load_code(k, s.quantised, row, t * column)
    match s.product:
        case "pairs":
            second = t * 2 + 1
            low = k.zext(k.load(I16, row, t * 2 * column), I32)
            high = k.zext(k.load(I16, row, k.min(second, count - 1) * column), I32)
            return low | k.select(second < count, high << 16, k.const(0, I32))
    return conversions.load(k, s.stored if stored else s.storage, row, t * column)


def load_keys(k: Function, s: Shape, block: Value, t: Value, lane: int, count: int) -> list[Value]:
    """`count` units, which lie together, of `lanes` keys of a cache's block."""
    if s.parts_pairs:
        return parted(k.load(s.ivector, block, t * (2 * BLOCK) + 4 * lane))[:count]
    return [load_units(k, s, k.at(block, t * (BLOCK * s.stored_bytes)), k.i64(lane), stored=True)]


def cached_row(k: Function, s: Shape, row: Value, i: Value, step: Value) -> list[Value]:
    """For load_values, a cache's row of values: that of unit i of its block, `step` bytes after the one before.

    Of pairs of keys that are parted: where both lie, and which of them it is.
    """
    return [k.at(row, -((i & 1) * step)), i] if s.parts_pairs else [row]


def scales_of(s: Shape) -> dict[str, ir.Type]:
    """The parameter of a quantised tile's scales, one f32 for each key."""
    return {"scales": PTR} if s.quantised else {}


def load_scales(k: Function, s: Shape, block: Value, offset: Value | int = 0, lanes: int = 0) -> Value:
    """Scales of a cache's codes, side by side, times what those are widened over: exactly."""
    scales = k.load(vec(F32, lanes or s.lanes), block, offset)
    unit = conversions.CODE_UNIT[s.quantised or "int8"]
    return scales if unit == 1 else scales * unit


def load_pair(k: Function, s: Shape, row: Value, column: Value) -> list[Value]:
    """One vector of columns of both units' values of a cache's row of parted pairs."""
    return parted(k.load(s.ivector, row, column * 4))


def load_values(k: Function, s: Shape, rows: list[Value], column: Value) -> Value:
    """One vector of columns of a unit's values: of a cache's row, or of keys that are one after another in `rows`."""
    if s.parts_pairs:
        return part_of(k, s, k.load(s.ivector, rows[0], column * 4), rows[1])
    if s.cached:
        return load_units(k, s, rows[0], column, stored=True)
    match s.product:
        case "pairs":
            low, high = (k.zext(k.load(vec(I16, s.lanes), row, column * 2), s.ivector) for row in rows)
            return low | (high << 16)
    return load_units(k, s, rows[0], column, stored=True)


def part_of(k: Function, s: Shape, pairs: Value, i: Value) -> Value:
    """Element i, in f32, of vectors of bf16 pairs that have it: the lower if i is even. parted() has both, in half the
    time.
    """
    shift = k.splat(k.trunc(i & 1, I32) << 4, s.lanes)
    return ((pairs >> shift) << 16).bits(s.vector)


def parted(pairs: Value) -> list[Value]:
    """Both elements of pairs of bf16, in f32."""
    return [x.bits(like(x, F32)) for x in (pairs << 16, pairs & -65536)]


def by_pairs(k: Function, count: Value, body: Callable[[Value, int], None]) -> None:
    """body(index, 2) of units that lie in parted pairs; body(index, 1) of the last, where their number is odd."""
    pairs = count & -2
    with k.range(0, pairs, 2) as t:
        body(t, 2)
    with k.when(pairs < count):
        body(pairs, 1)


def paired(low: Value, high: Value, keep: Value) -> Value:
    """Elements of two rows as pairs, in lanes or alone; without the upper where `keep`, a mask of its bits, is 0."""
    return low | ((high << 16) & keep)


# --- weights


def packed(k: Function, s: Shape, weights: list[Value]) -> Value:
    """The weights of a unit's keys, lane by lane: pairs are rounded to nearest even."""
    match s.product:
        case "pairs":
            words = packed_vectors(k, s, weights)
            order = [lane + s.lanes * half for lane in range(s.lanes) for half in (0, 1)]
            return k.shuffle(words, words, order).bits(s.ivector)
    return weights[0]


def packed_vectors(k: Function, s: Shape, weights: list[Value]) -> Value:
    """Vectors of weights one after another, as units side by side."""
    match s.product:
        case "pairs":
            low, high = weights
            both = k.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vec(BF16, 2 * s.lanes), high, low)
            return both.bits(vec(I16, 2 * s.lanes))
    return weights[0]


def rounded(k: Function, s: Shape, x: Value) -> Value:
    """A vector of numbers as elements of units that lie side by side: pairs are rounded to nearest even."""
    match s.product:
        case "pairs":
            kind = vec(BF16, s.lanes)
            return k.intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", kind, x).bits(vec(I16, s.lanes))
    return x


def add_weights(k: Function, s: Shape, unit: Value, total: Value) -> Value:
    """total + the weights of a unit; `unit` is a vector of them."""
    match s.product:
        case "pairs":
            return multiply_add(k, s, k.const(_ONES, s.ivector), unit, total)
    return total + unit


def dropped(k: Function, s: Shape, unit: Value, keep: list[Value]) -> Value:
    """A vector of units of weights, without those of the elements that are not kept, lane by lane.

    They become +0, or NaN by a scale that is; -0 stays.
    """
    match s.product:
        case "pairs":
            every = k.const(-1, s.ivector)
            low, high = (
                k.select(x, every, k.const(bits, s.ivector))
                for x, bits in zip(keep, (-0x8000, 0x8000FFFF - (1 << 32)), strict=True)
            )
            return unit & low & high
    return k.select(keep[0], unit, unit * 0.0)


def weight_alone(s: Shape) -> ir.Type:
    """A key's weight in a row of units side by side."""
    match s.product:
        case "pairs":
            return I16
    return s.number


def dropped_alone(k: Function, s: Shape, weights: Value, keep: Value) -> Value:
    """The same of a vector of keys' weights in a row."""
    match s.product:
        case "pairs":
            return weights & k.select(keep, k.const(-1, weights.type), k.const(-0x8000, weights.type))
    return k.select(keep, weights, weights * 0.0)


def visible(k: Function, s: Shape, weight: Value) -> Value:
    """Of a vector of units: which lanes see it; of pairs, the bits of the visible halves."""
    match s.product:
        case "pairs":
            halves = weight.bits(vec(I16, 2 * s.lanes))
            return Value(k, k.b.not_(k.b.ashr(halves.x, k.const(15, halves.type).x))).bits(s.ivector)
    return weight.bits(s.ivector) > -1


def seen_units(k: Function, s: Shape, marks: list[Value]) -> Value:
    """What visible() gives, of a unit whose elements are marked one by one, in vectors or alone, by f32 or f64."""
    seen = [mark.bits(like(mark, s.integer)) > -1 for mark in marks]
    match s.product:
        case "pairs":
            halves = [
                k.select(x, k.const(m, like(x, I32)), k.const(0, like(x, I32)))
                for x, m in zip(seen, _HALVES, strict=True)
            ]
            return halves[0] | halves[1]
    return seen[0]


def visible_step(k: Function, s: Shape, value: Value, weight: Value, total: Value, seen: Value) -> Value:
    """multiply_add in lanes that see the unit; `seen` as from visible()."""
    match s.product:
        case "pairs":
            some = ((seen << 16) | seen) < 0  # as a sign: LLVM then makes it the multiply-add's own mask
            return k.select(some, multiply_add(k, s, value & seen, weight & seen, total), total)
    return k.select(seen, k.fma(value, weight, total), total)


def visible_bits(k: Function, s: Shape, weight: Value) -> tuple[Value, Value | None]:
    """Of one unit: whether anything of it is visible, and the bits that are, if that may be a part."""
    match s.product:
        case "pairs":
            low, high = (
                k.select((weight << by).bits(I32) > -1, k.const(m, I32), k.const(0, I32))
                for by, m in zip((16, 0), _HALVES, strict=True)
            )
            return (low | high).differs(0), low | high
    return weight.bits(s.integer) > -1, None


def full_keys(k: Function, s: Shape, full: Value, end: Value, count: Value) -> Value:
    """How many of `full` visible keys make units of their own: a half-visible pair needs the predicated path.

    `end`: of the keys that may be seen; `count`: of those in the tile. Past those is padding, of arrays.
    """
    match s.product:
        case "pairs":
            odd = (full & 1).differs(0)
            odd = odd if s.cached else odd & ((full < end) | (end < count))
            return k.select(odd, full - 1, full)
    return full
