"""Faults of bounds, and of which tiles are computed."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "a row sees what is summed together with the first key of its window",
        "cpu/kernels/decode.py",
        "k.select((clear > first) & begin.equals(first), clear - first, k.i64(0))",
        "k.select(clear > first, clear - first, k.i64(0))",
        "tests/conformance/attention/test_tiles.py -k begins_at_any",
    ),
    Mutation(
        "a part of a tile that the mask cuts counts as visible",
        "cpu/kernels/visibility.py",
        "leave_if(classed(full.get(), after(full.get(), end.get())) < 2)",
        "leave_if(classed(full.get(), after(full.get(), end.get())) < 1)",
        "tests/conformance/attention/test_attention.py "
        "tests/conformance/attention/test_masks.py -k 'patterns or random_expressions'",
    ),
    Mutation(
        "i != j is taken for i < j",
        "expressions/bounds.py",
        'planes["ne"] = planes["lt"] + planes["gt"]',
        'planes["ne"] = planes["lt"]',
        "tests/expressions/test_bounds.py",
    ),
    Mutation(
        "the bounds of a difference are those of a sum",
        "expressions/operations.py",
        "return a[0] - b[1], a[1] - b[0]",
        "return a[0] - b[0], a[1] - b[1]",
        "tests/expressions/test_bounds.py tests/expressions/test_integers.py -k 'sound or exact'",
    ),
)
