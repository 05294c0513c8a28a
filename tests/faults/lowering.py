"""Faults of lowering and of lookups."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "integers of 33 bits count as those of 32",
        "expressions/bounds.py",
        "return self.most is not None and self.most < 1 << 31",
        "return self.most is not None and self.most < 1 << 33",
        "tests/properties/test_combined.py -k wide",
    ),
    Mutation(
        "an index out of range is not noted",
        "cpu/kernels/lower.py",
        "k.store(k.i64(1), wrong, 16 * n)",
        "k.store(k.i64(0), wrong, 16 * n)",
        "tests/conformance/attention/test_masks.py -k index_out_of_range",
    ),
    Mutation(
        "the sign of // and % of long integers is that of the processor",
        "cpu/kernels/lower.py",
        "over = rest.differs(0) & ((rest ^ b) < 0)",
        "over = rest.differs(0) & (rest < 0)",
        "tests/expressions/test_integers.py -k 'scalars or negative'",
    ),
    Mutation(
        "the sign of // and % of short integers is that of the processor",
        "cpu/kernels/lower.py",
        'floor = k.unary("floor", k.to_float(a, wide) / k.to_float(by, wide))',
        "floor = k.to_float(a, wide) / k.to_float(by, wide)",
        "tests/expressions/test_integers.py -k 'vectors_of_32 or negative'",
    ),
    Mutation(
        "a lookup is one entry late",
        "cpu/language/lookups.py",
        "last = splat_like(k, length_of(k, at, d) - 1, x)",
        "last = splat_like(k, length_of(k, at, d) - 2, x)",
        "tests/conformance/attention/test_attention.py -k 'patterns and alibi'",
    ),
    Mutation(
        "two expressions of other numbers are the same",
        "expressions/tracing.py",
        "return self.key, words, tuple(id(",
        "return self.key, len(words), tuple(id(",
        "tests/conformance/attention/test_masks.py -k kept_expressions",
    ),
)
