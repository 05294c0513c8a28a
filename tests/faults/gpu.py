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
        "GPU: dK and dV are of one head of the group",
        "gpu/backward.py",
        "tl.range(0, batch.group, num_stages=1",
        "tl.range(0, 1, num_stages=1",
        "tests/conformance/backward/test_gpu_backward.py -k every_option",
    ),
    Mutation(
        "GPU: what flows into the lse is left out of gradients",
        "gpu/gradient_sums.py",
        "total - of_lse, mask",
        "total, mask",
        "tests/conformance/backward/test_gpu_backward.py -k every_option",
    ),
    Mutation(
        "GPU: what is hidden and not finite stays in gradients",
        "gpu/gradient_tiles.py",
        "if VALUES == FINITE:",
        "if VALUES == CODES:",
        "tests/conformance/backward/test_gpu_backward.py -k hidden",
    ),
    Mutation(
        "GPU: an entry has the first of its terms alone",
        "gpu/gradient_sums.py",
        "tl.range(0, tl.max(count, 0), TERMS)",
        "tl.range(0, tl.minimum(tl.max(count, 0), TERMS), TERMS)",
        "tests/conformance/backward/test_gpu_backward.py -k tables",
    ),
    Mutation(
        "GPU: a producer reads queries of any strides",
        "gpu/prepare.py",
        "return not sees_none and fits_tma(q, axes(q, self.layout))",
        "return not sees_none",
        "tests/gpu/test_gpu.py -k without_a_producer",
    ),
    Mutation(
        "GPU: beside a producer no block is repaired",
        "gpu/forward.py",
        "m_bad = tl.sum(state.acc * 0.0, 1) != 0.0",
        "m_bad = tl.sum(state.acc * 0.0, 1) > 0.0",
        "tests/gpu/test_gpu.py -k a_producer_changes_no_bit",
    ),
    Mutation(
        "GPU: the sign of // and % is that of the processor",
        "gpu/primitives.py",
        "((a ^ by) < 0)",
        "(a < 0)",
        "tests/expressions/test_gpu_expressions.py -k 'every_operation or random_expressions'",
    ),
)
