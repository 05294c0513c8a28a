"""Faults of PyTorch's transforms, and of attention in its operations."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "tangents leave out how v grows",
        "autograd/higher_order.py",
        "return torch.func.vjp(pull, tuple(torch.zeros_like(x) for x in results))[1](tangents)[0]",
        "return torch.func.vjp(pull, tuple(torch.zeros_like(x) for x in results))[1]("
        "(*tangents[:2], 0 * tangents[2], *tangents[3:]))[0]",
        "tests/adapters/torch/test_torch_any_door.py",
    ),
    Mutation(
        "blocks of rows drop the weights of the first one",
        "autograd/higher_order.py",
        "i = range(first + self.rows.start, first + self.rows.stop)",
        "i = range(first, first + self.rows.stop - self.rows.start)",
        "tests/adapters/torch/test_torch_doors.py -k same_function",
    ),
    Mutation(
        "the sink is left out of a row's maximum",
        "autograd/higher_order.py",
        "top = torch.maximum(top, sinks.detach())",
        "top = top + 0 * sinks.detach()",
        "tests/adapters/torch/test_torch_doors.py -k same_function",
    ),
    Mutation(
        "a shift to the left by more than 63 goes round",
        "autograd/torch_eval.py",
        "return torch.where(inside, a << torch.where(inside, n, 0), 0)",
        "return a << (n & 63)",
        "tests/adapters/torch/test_torch_doors.py -k integers_at_their_ends",
    ),
    Mutation(
        "a shift to the right by more than 63 goes round",
        "autograd/torch_eval.py",
        "return a >> torch.where((n >= 0) & (n < 64), n, 63)",
        "return a >> (n & 63)",
        "tests/adapters/torch/test_torch_doors.py -k integers_at_their_ends",
    ),
    Mutation(
        "a quotient by -1 is not negated",
        "autograd/torch_eval.py",
        "return torch.where(usual, quotient, torch.where(b == 0, 0, -a))",
        "return torch.where(usual, quotient, torch.where(b == 0, 0, a))",
        "tests/adapters/torch/test_torch_doors.py -k integers_at_their_ends",
    ),
    Mutation(
        "angles beyond all have sines",
        "autograd/torch_eval.py",
        "return lambda x: function(torch.where(x.abs() <= MOST_ANGLE, x, torch.nan))",
        "return function",
        "tests/adapters/torch/test_torch_doors.py -k angles_at_their_end",
    ),
    Mutation(
        "examples whose items share keys are items of one batch",
        "autograd/transforms.py",
        "    return q != k",
        "    return False",
        "tests/adapters/torch/test_torch_doors.py -k share_their_keys",
    ),
    Mutation(
        "out= is not told to autograd",
        "arrays/making.py",
        '    sys.modules["torch"]._C._increment_version((tensor,))',
        "    assert tensor is not None",
        "tests/adapters/torch/test_tensors.py -k autograd",
    ),
    Mutation(
        "autocast is for speedlight.torch alone",
        "front.py",
        "    if torch is not None and torch._C._is_any_autocast_enabled():\n",
        "    if False:\n",
        "tests/adapters/torch/test_torch_doors.py -k autocast",
    ),
    Mutation(
        "graphs are told that results are contiguous",
        "autograd/operators.py",
        "return torch.empty_permuted(shape, order_of(x.shape, x.stride()), dtype=x.dtype, device=x.device)",
        "return x.new_empty(shape)",
        "tests/adapters/torch/test_torch_strides.py -k graphs",
    ),
    Mutation(
        "results of repeated calls are contiguous",
        "problem/prepared.py",
        "out, at = fresh(q, layout.shape, layout.strides, alike=layout.alike)",
        "out, at = fresh(q, layout.shape, None)",
        "tests/adapters/torch/test_torch_strides.py -k lie_as",
    ),
)
