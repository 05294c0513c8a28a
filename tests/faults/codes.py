"""Faults of codes: their scales, their order, and what hides them."""

from .mutation import Mutation

_ORDER = "tests/properties/test_bits_of_codes.py -k "
_CHUNKS = "tests/properties/test_codes_any_chunks.py -k "

MUTATIONS = (
    Mutation(
        "weights of hidden keys are multiplied by their scales in arrays",
        "cpu/kernels/row_weights.py",
        "[rescale_weights(k, s, k.load(s.vector, row, key * 4), x) for",
        "[k.load(s.vector, row, key * 4) * x for",
        "tests/conformance/pages/test_pages_of_codes.py -k hidden_codes",
    ),
    Mutation(
        "autograd is not told that scales of tokens are written",
        "calls/append_paged.py",
        "        if len(x.shape) == 3:\n            tell_written(x)",
        "        if len(x.shape) == 9:\n            tell_written(x)",
        "tests/conformance/pages/test_appending_codes.py -k versions",
    ),
    Mutation(
        "a head that comes twice in a group of heads adds each block of columns twice",
        "cpu/kernels/row_scores.py",
        "found.append((x, at))",
        'k.store(x, p["scores"], at)',
        "tests/conformance/caches/test_caches_codes.py -k any_number",
    ),
    Mutation(
        "few rows score all columns of four bits by the first ones' scales",
        "cpu/kernels/row_scores.py",
        "else number * (BLOCK * s.scale_bytes)) - header)",
        "else k.i64(0) * (BLOCK * s.scale_bytes)) - header)",
        f"{_ORDER}'int4 and bfloat16'",
    ),
    Mutation(
        "few rows leave out the last columns of four bits where these are no whole block",
        "cpu/kernels/row_scores.py",
        'with k.range(0, s.count_scales(p["head_dim"])) as number:',
        'with k.range(0, p["head_dim"] // s.scale_block) as number:',
        f"{_ORDER}'int4 and bfloat16'",
    ),
    Mutation(
        "scores of a block of columns go on from what lay there",
        "cpu/products/outer.py",
        "k.select(number.equals(0), none, before)",
        "k.select(number.equals(number), before, none)",
        f"{_ORDER}'int4 and bfloat16'",
    ),
    Mutation(
        "numbers behind a latent's codes have the scale of what lay there",
        "cpu/kernels/forward.py",
        "rest = s.count_scales(a.value_dim) * TILE",
        "rest = (s.count_scales(a.value_dim) - 1) * TILE",
        f"{_ORDER}'latents and int8'",
    ),
    Mutation(
        "a pair of four bits has its halves exchanged",
        "cpu/products/coded_pairs.py",
        "for x in _interleaved(k, first, second)]",
        "for x in _interleaved(k, second, first)]",
        f"{_ORDER}'int4 and bfloat16'",
    ),
    Mutation(
        "weights of codes are summed after scales have multiplied them",
        "cpu/kernels/panel_weights.py",
        "self.total[v].set(self.total[v].get() + x)",
        'self.total[v].set(self.total[v].get() + x * k.splat(k.load(F32, k.p["scales"], (j + i) * 4), s.lanes))',
        f"{_ORDER}'int8 and bfloat16'",
    ),
    Mutation(
        "all columns of values have the first ones' scales",
        "cpu/kernels/forward.py",
        "k.at(scales[1], n * (TILE * 4)), high)",
        "k.at(scales[1], k.i64(0) * (TILE * 4)), high)",
        f"{_ORDER}'int4 and bfloat16'",
    ),
    Mutation(
        "few rows weigh all columns of values by the first ones' scales",
        "cpu/kernels/decode.py",
        "n * self.scaled_row), n * (BLOCK * s.scale_bytes)",
        "n * self.scaled_row), k.i64(0) * (BLOCK * s.scale_bytes)",
        f"{_ORDER}'int4 and bfloat16'",
    ),
    Mutation(
        "the first column of a scale has the scale of those before",
        "cpu/kernels/row_weights.py",
        "found.append(k.select(lanes < size, *both))",
        "found.append(k.select(lanes <= size, *both))",
        f"{_ORDER}'int4 and bfloat16'",
    ),
    Mutation(
        "a hidden key's weight loses its mark by its value's scale",
        "cpu/kernels/softmax.py",
        "return k.select(weight.bits(s.ivector) < 0, weight, scaled)",
        "return k.select(weight.bits(s.ivector) < 0, scaled, scaled)",
        f"{_CHUNKS}bfloat16",
    ),
    Mutation(
        "few rows take weights of negative scales for hidden ones",
        "cpu/products/bf16_pairs.py",
        "x.differs(-(1 << 31)) if self.s.scale_block else x > -1",
        "x.differs(-(1 << 31)) if self.s.scale_block > 32 else x > -1",
        f"{_CHUNKS}'int4 and bfloat16'",
    ),
    Mutation(
        "many rows take weights of negative scales for hidden ones",
        "cpu/products/bf16_pairs.py",
        "if self.s.scale_block:  # weights",
        "if self.s.scale_block > 32:  # weights",
        f"{_CHUNKS}'int4 and bfloat16'",
    ),
    Mutation(
        "keys of four bits are read from their block's first one on",
        "cpu/products/outer.py",
        "return [k.at(block, (j & (BLOCK - 1)) * unit + m * unit) for m in range(s.rows)]",
        "return [k.at(block, (j * 0 + m) * unit) for m in range(s.rows)]",
        f"{_ORDER}'int4 and bfloat16'",
    ),
    Mutation(
        "the last staged block of codes is read where an earlier one was",
        "cpu/kernels/forward.py",
        "with k.range(0, TILE // BLOCK + 1) as n:",
        "with k.range(0, TILE // BLOCK - 1) as n:",
        f"{_ORDER}'int8 and bfloat16'",
    ),
)
