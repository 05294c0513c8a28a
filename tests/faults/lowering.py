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
        '{"noted": k.i64(1), ',
        '{"noted": k.i64(0), ',
        "tests/conformance/attention/test_masks.py -k index_out_of_range",
    ),
    Mutation(
        "the last index out of range is noted, not the first",
        "cpu/kernels/lower.py",
        "earlier = (x < known) | (x.equals(known) & earlier)",
        "earlier = (x > known) | (x.equals(known) & earlier)",
        "tests/conformance/attention/test_wrong_indices.py -k 'many and mask'",
    ),
    Mutation(
        "of the lanes that are wrong the first by number is noted, not by position",
        "cpu/kernels/lower.py",
        "bad = bad & p[name].equals(k.splat(least, lanes))",
        "bad = bad & p[name].equals(k.splat(least, lanes)) | bad",
        "tests/conformance/attention/test_wrong_indices.py -k 'many and mask'",
    ),
    Mutation(
        "workers note what is wrong in one place",
        "cpu/kernels/lower.py",
        "worker * WRONG.bytes)",
        "worker * 0)",
        "tests/conformance/attention/test_wrong_indices.py -k every_worker",
    ),
    Mutation(
        "of what workers noted the first worker's is raised",
        "cpu/runtime/launch.py",
        'key=lambda note: note[WRONG.word("b") : WRONG.word("lookup") + 1]',
        "key=lambda note: 0",
        "tests/conformance/attention/test_wrong_indices.py -k every_worker",
    ),
    Mutation(
        "at one position the lookup that a worker noted first is raised",
        "cpu/runtime/launch.py",
        'key=lambda note: note[WRONG.word("b") : WRONG.word("lookup") + 1]',
        'key=lambda note: note[WRONG.word("b") : WRONG.word("lookup")]',
        "tests/conformance/attention/test_wrong_indices.py -k several_notes",
    ),
    Mutation(
        "tanh of -0 is -0",
        "cpu/language/functions.py",
        "((x + 0.0).bits(whole) & sign)",
        "(x.bits(whole) & sign)",
        "tests/expressions/test_tracing.py -k zeros_of_functions",
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
        "return self.key, words, tuple(t.",
        "return self.key, len(words), tuple(t.",
        "tests/conformance/attention/test_masks.py -k kept_expressions",
    ),
)
