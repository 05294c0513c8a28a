"""Faults of chosen keys: their lists, their tiles, and keys beside them."""

from .mutation import Mutation

_BITS = "tests/properties/test_chosen_keys.py -k "

MUTATIONS = (
    Mutation(
        "a key that is chosen twice counts twice",
        "problem/chosen.py",
        "    if again.any():\n",
        "    if again.all():\n",
        f"{_BITS}duplicates",
    ),
    Mutation(
        "a tile of chosen keys goes on into the next tile",
        "cpu/kernels/slots.py",
        "past = k.min((key & -TILE) + TILE, end)",
        "past = k.min(key + TILE, end)",
        f"{_BITS}'equal_mask and float32'",
    ),
    Mutation(
        "few rows weigh what is absent of a pair",
        "cpu/kernels/decode.py",
        "k.store(k.load(kind, row, partner * size) & sign, row, slot * size)",
        "k.store(k.load(kind, row, partner * size), row, slot * size)",
        f"{_BITS}absent",
    ),
    Mutation(
        "values of absent keys are those that lie there",
        "cpu/kernels/slots.py",
        "is_absent = (slot >= ABSENT) & k.splat(has_zeros, _AT_ONCE)",
        "is_absent = (slot < 0) & k.splat(has_zeros, _AT_ONCE)",
        f"{_BITS}absent",
    ),
    Mutation(
        "panels weigh what is absent of a pair",
        "cpu/kernels/forward.py",
        'k.store(k.const(float("-inf"), s.vector), self.scratch, slot * s.row_bytes + s.lane_offset(v))',
        "k.store(k.const(0.0, s.vector), self.scratch, slot * s.row_bytes + s.lane_offset(v))",
        f"{_BITS}absent",
    ),
    Mutation(
        "scores of chosen keys are those of their slots' numbers",
        "cpu/kernels/lower.py",
        'return p["first"] + (number_of(k.load(I64, p["slots"], j * 8)) if s.chosen else j)',
        'return p["first"] + j',
        f"{_BITS}'equal_mask and float32'",
    ),
    Mutation(
        "kv heads share the first one's lists",
        "cpu/engine/chosen_call.py",
        "chosen.lists.strides[1] if chosen.has_heads else 0",
        "0",
        f"{_BITS}'equal_mask and float32'",
    ),
)
