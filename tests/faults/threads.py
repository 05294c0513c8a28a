"""Faults of regions and threads."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "the caller's modes are those of the kernel",
        "cpu/kernels/task.py",
        "k.store(k.const(0x1F80, I32), ours)",
        "k.store(k.const(0x9FC0, I32), ours)",
        "tests/conformance/attention/test_forward.py -k subnormals",
    ),
    Mutation(
        "a call ends while a helper still computes",
        "cpu/runtime/workers.py",
        "        try:\n            kernel.joined(arguments)\n        except",
        "        try:\n            kernel.entry(arguments)\n        except",
        "tests/robustness/test_signals.py -k 'nobody_is_inside or threads_as_they_were'",
    ),
    Mutation(
        "a region ends while a thread of ours still computes",
        "cpu/kernels/thread_pool.py",
        'leave_if(_load(k, block, "left").equals(inside))',
        'leave_if(_load(k, block, "left") >= 0)',
        "tests/robustness/test_threads.py -k waited_for",
    ),
    Mutation(
        "threads of ours may share the caller's CPU",
        "cpu/kernels/thread_pool.py",
        "k.store(k.load(I64, may, at) & (own ^ -1), may, at)",
        "k.store(k.load(I64, may, at) & -1, may, at)",
        "tests/robustness/test_threads.py -k where_the_caller",
    ),
    Mutation(
        "the last item is looked for one too low",
        "cpu/kernels/task.py",
        "leave_if(high.get() - low.get() <= 1)",
        "leave_if(high.get() - low.get() <= 2)",
        "tests/conformance/attention/test_forward.py "
        "tests/conformance/attention/test_attention.py -k 'same_bits_however or packed'",
    ),
    Mutation(
        "machine code takes tensors of any strides",
        "cpu/kernels/replay.py",
        "(size >= ranges[0]) & (size <= ranges[1]) & (stride >= ranges[2]) & (stride <= ranges[3])",
        "(size >= ranges[0]) & (size <= ranges[1])",
        "tests/adapters/torch/test_torch_replay.py",
    ),
    Mutation(
        "machine code does not look whether gradients are recorded",
        "cpu/kernels/replay.py",
        "body.require((recording & 1).equals(0))",
        "body.require((recording & 0).equals(0))",
        "tests/adapters/torch/test_torch_replay.py",
    ),
    Mutation(
        "machine code repeats a call after other threads were asked for",
        "cpu/kernels/replay.py",
        "for i in range(WATCHED):\n            held",
        "for i in range(1):\n            held",
        "tests/adapters/torch/test_torch_replay.py",
    ),
    Mutation(
        "machine code stores a new token where the last one lies",
        "cpu/kernels/replay.py",
        'k.store(length - of_form("new"), put,',
        'k.store(length - of_form("new") - 1, put,',
        "tests/adapters/torch/test_torch_steps.py",
    ),
    Mutation(
        "machine code fills a cache past its capacity",
        "cpu/runtime/replay.py",
        "min(spans * SPAN, capacity) - prepared.new",
        "spans * SPAN - prepared.new",
        "tests/adapters/torch/test_torch_steps.py",
    ),
    Mutation(
        "machine code computes with the lengths of another step",
        "cpu/kernels/replay.py",
        "k.store(length - word(0, 3), items,",
        "k.store(length - word(0, 3) + 1, items,",
        "tests/adapters/torch/test_torch_steps.py",
    ),
)
