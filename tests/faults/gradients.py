"""Faults of the gradients."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "delta forgets what flows into lse",
        "cpu/kernels/gradient_tiles.py",
        'k.store(total.get() - k.load(s.vector, p["delta"], s.lane_offset(v)), p["delta"]',
        'k.store(total.get(), p["delta"]',
        "tests/conformance/backward/test_backward.py -k every_option",
    ),
    Mutation(
        "dk is not scaled",
        "cpu/kernels/backward.py",
        'return self.task.factor() if self.name == "k" else self.k.const(1.0, self.s.number)',
        "return self.k.const(1.0, self.s.number)",
        "tests/conformance/backward/test_backward.py -k every_option",
    ),
    Mutation(
        "something flows to the scores of hidden pairs",
        "cpu/kernels/gradient_tiles.py",
        "d_scores = [k.select(m, y, k.const(0.0, s.vector)) for m, y in zip(seen, d_scores, strict=True)]",
        "d_scores = list(d_scores)",
        "tests/conformance/backward/test_backward.py -k every_option",
    ),
    Mutation(
        "the key beside the last that a panel sees is multiplied",
        "cpu/products/bf16_pairs.py",
        "return unit & _HALVES[0]",
        "return unit",
        "tests/properties/test_backward_combined.py -k every_unit",
    ),
    Mutation(
        "dq forgets the ranges of keys before",
        "cpu/kernels/backward.py",
        "with k.either(self.range.equals(0) & ",
        "with k.either((self.range >= 0) & ",
        "tests/conformance/backward/test_backward.py -k any_threads",
    ),
    Mutation(
        "blocks of queries begin where a call does",
        "cpu/kernels/gradient_blocks.py",
        "self.row = (item.block + self.step // a.group) * QUERY_BLOCK - (item.start + a.k_start)",
        "self.row = (self.step // a.group) * QUERY_BLOCK",
        "tests/conformance/backward/test_backward.py -k absolute_positions",
    ),
    Mutation(
        "a task waits for one of the two before it",
        "cpu/kernels/backward.py",
        "come = super().has_come(turn) & (self.done_at(before) >= wanted)",
        "come = super().has_come(turn) | (self.done_at(before) >= wanted)",
        "tests/conformance/backward/test_backward_runs.py -k their_turn",
    ),
    Mutation(
        "dk and dv take 0 times what a hidden row holds",
        "cpu/products/outer_gradients.py",
        "one.set(product.multiply_add_seen(k, column, weight, one.get(), seen))",
        "one.set(product.multiply_add(k, weight, column, one.get()))",
        "tests/conformance/backward/test_backward.py -k 'hidden_never_matters and causal-float32'",
    ),
    Mutation(
        "sums of dk and dv begin with what memory held",
        "cpu/kernels/gradient_rows.py",
        'fresh, end = p["fresh"].differs(0), p["end"].differs(0)',
        'fresh, end = p["fresh"].differs(1), p["end"].differs(0)',
        "tests/conformance/backward/test_backward.py -k every_option",
    ),
    Mutation(
        "dk and dv of a whole block replace those before",
        "cpu/products/outer_gradients.py",
        "with k.when(x.fresh.equals(0)):",
        "with k.when(x.fresh.equals(2)):",
        "tests/conformance/backward/test_backward.py -k whole_blocks",
    ),
    Mutation(
        "panels taken together add where one of them sees less",
        "cpu/kernels/backward.py",
        "low.equals(0) & high.equals(count) & careful.equals(0)",
        "low.equals(0) & careful.equals(0)",
        "tests/conformance/backward/test_backward.py -k every_option",
    ),
    Mutation(
        "heads that add to the same entries do not wait for each other",
        "cpu/kernels/backward.py",
        "k.select(free, k.i64(0), turn + a.group)",
        "k.i64(0)",
        "tests/conformance/backward/test_backward_runs.py -k followed",
    ),
    Mutation(
        "the halves of a pair of keys change places",
        "cpu/kernels/gradient_tiles.py",
        "unit = product.pack_weights(k, d_scores[v::n] + [",
        "unit = product.pack_weights(k, d_scores[v::n][::-1] + [",
        "tests/conformance/backward/test_backward.py -k 'every_length and bfloat16'",
    ),
    Mutation(
        "slopes of hidden pairs come out",
        "cpu/kernels/score_backward.py",
        "k.store(k.select(mark.bits(s.ivector) > -1, x, k.const(0.0, s.vector)), ",
        "k.store(x, ",
        "tests/conformance/backward/test_backward.py -k slopes_of_hidden",
    ),
)
