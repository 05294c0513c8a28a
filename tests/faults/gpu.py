"""Faults of the GPU engine, in the interpreter."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "GPU: the sum before a new maximum is not rescaled",
        "gpu/primitives.py",
        "running_sum * alpha + tl.sum(p, 1)",
        "running_sum + tl.sum(p, 1)",
        "tests/conformance/attention/test_gpu_attention.py -k 'special_values or every_length'",
    ),
    Mutation(
        "GPU: the last split of the keys is left out",
        "gpu/splits.py",
        "count = tl.minimum((item.k_len + size - 1) // size, splits)",
        "count = tl.minimum(item.k_len // size, splits)",
        "tests/conformance/attention/test_gpu_attention.py "
        "tests/gpu/test_gpu_caches.py -k 'every_length or uneven_lengths'",
    ),
    Mutation(
        "GPU: the sign of // and % is that of the processor",
        "gpu/primitives.py",
        "((a ^ by) < 0)",
        "(a < 0)",
        "tests/expressions/test_gpu_expressions.py -k 'every_operation or random_expressions'",
    ),
)
