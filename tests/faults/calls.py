"""Faults of arguments and of how calls are prepared."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "the scale is left out where there is no score",
        "cpu/engine/forward_call.py",
        "else problem.scale * LOG4_E",
        "else LOG4_E",
        "tests/conformance/attention/test_attention.py -k 'special_values and float64'",
    ),
    Mutation(
        "a repeated call is known without its scale",
        "problem/options.py",
        "type(scale), exactly, layout",
        "type(scale), layout",
        "tests/arguments/test_repeated.py -k option_is_part",
    ),
    Mutation(
        "values of an item lie where its keys would",
        "cpu/memory/operands.py",
        "index * pages.v_item",
        "index * pages.k_item",
        "tests/properties/test_caches_any_order.py -k TestMachine",
    ),
    Mutation(
        "what flows to shared keys is the last item's",
        "calls/backward.py",
        "total += item",
        "total[...] = item",
        "tests/conformance/attention/test_layouts.py -k flows_to_shared",
    ),
    Mutation(
        "what flows to shared keys is added in float32",
        "calls/backward.py",
        "total = np.zeros((1, *each.shape[1:]))",
        "total = np.zeros((1, *each.shape[1:]), np.float32)",
        "tests/conformance/attention/test_layouts.py -k flows_to_shared",
    ),
    Mutation(
        "a tensor to be negated is taken for one that is not",
        "problem/prepared.py",
        "if x.layout is not strided or x.is_neg():",
        "if x.layout is not strided:",
        "tests/arguments/test_calls.py -k negated",
    ),
    Mutation(
        "of a tensor behind two tables the first alone gets its gradient",
        "autograd/attending.py",
        "sum(found[slot] for slot in at)",
        "found[at[0]]",
        "tests/adapters/torch/test_torch.py -k two_tables",
    ),
    Mutation(
        "large tables that are out of date are taken",
        "expressions/tables.py",
        "            return source._version != self.version\n",
        "            return False\n",
        "tests/adapters/torch/test_torch.py -k out_of_date",
    ),
    Mutation(
        "of a cache's pairs the other element is taken",
        "cpu/products/fma.py",
        "k.trunc(i & 1, I32) << 4",
        "k.trunc((i & 1) ^ 1, I32) << 4",
        "tests/conformance/caches/test_caches.py -k score_of_minus_infinity",
    ),
    Mutation(
        "queries of a short item are aligned by the longest",
        "problem/build.py",
        "starts = tuple(k - q for q, k in zip(q_lengths, k_lengths, strict=True))",
        "starts = (max(k_lengths, default=0) - max(q_lengths, default=0),) * len(q_lengths)",
        "tests/conformance/attention/test_attention.py -k 'packed_is_padded and float32'",
    ),
    Mutation(
        "a page after the last is taken",
        "problem/block_tables.py",
        "if used.size and (used.min() < 0 or used.max() >= pages):",
        "if used.size and (used.min() < 0 or used.max() > pages):",
        "tests/conformance/pages/test_pages_raw.py -k wrong_raw_pages",
    ),
    Mutation(
        "a page after the last is taken of a single short row",
        "problem/block_tables.py",
        "max(used_pages) < pages:",
        "max(used_pages) <= pages:",
        "tests/conformance/caches/test_steps.py -k one_short_row",
    ),
    Mutation(
        "out may overlap an input",
        "problem/results.py",
        "        if overlap(out, x):\n",
        "        if overlap(out, x) and out.shape == ():\n",
        "tests/arguments/test_arrays.py -k over_an_argument",
    ),
)
