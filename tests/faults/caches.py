"""Faults of caches, pools and their steps."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "a pool's last owner writes where others left a longer part",
        "kv/sharing.py",
        " or away.get(page, 0) > start:",
        ":",
        "tests/conformance/pages/test_pages.py -k takes_nothing_from",
    ),
    Mutation(
        "a dropped sequence keeps its pages",
        "kv/journal.py",
        "                pages = records.get(number, _EMPTY).held()\n",
        "                pages = []\n",
        "tests/conformance/pages/test_pages.py -k nobody_has",
    ),
    Mutation(
        "a call takes pages that a signal handler has just taken",
        "kv/journal.py",
        """                if self.version is seen:
                    del free[last]""",
        """                if self.version:
                    del free[last]""",
        "tests/robustness/test_interrupts.py -k 'handler_may_use and append'",
    ),
    Mutation(
        "pages that a failing call took are lost",
        "kv/journal.py",
        "        claims |= added\n        unowned[number] = None\n",
        "        claims |= added\n",
        "tests/conformance/pages/test_pages.py -k takes_nothing_from",
    ),
    Mutation(
        "pages that are read are replaced in place",
        "kv/sharing.py",
        "            pages = record.held()",
        "            pages = record.pages",
        "tests/conformance/pages/test_pages.py -k 'takes_nothing_from or any_allocation'",
    ),
    Mutation(
        "a path is moved in pages that a fork shares",
        "kv/keeping.py",
        """            if copies:
                (new,)""",
        """            if copies == [None]:
                (new,)""",
        "tests/conformance/caches/test_keeping.py -k others_share",
    ),
    Mutation(
        "an interrupted path stays half moved",
        "kv/keeping.py",
        "            undo.extend(storage.before_moves(layer, old, moves))",
        "            storage.before_moves(layer, old, moves)",
        "tests/robustness/test_interrupts.py -k 'keep and anywhere'",
    ),
    Mutation(
        "two sequences grow in one page",
        "calls/append_paged.py",
        "    if len(same):",
        "    if len(same) > 99:",
        "tests/conformance/pages/test_appending.py -k anything_is_wrong",
    ),
    Mutation(
        "a ring forgets one token late",
        "problem/windows.py",
        "written + SPARE - self.size)",
        "written + SPARE - self.size - 1)",
        "tests/conformance/caches/test_caches_windows.py -k 'over_a_ring or from_a_ring'",
    ),
    Mutation(
        "heads in step all read the first one's keys",
        "cpu/kernels/row_scores.py",
        'r // p["group"] * p["head"]',
        'r // p["rows"] * p["head"]',
        "tests/conformance/caches/test_putting.py -k in_step",
    ),
    Mutation(
        "every task of a step stores the first one's tokens",
        "cpu/kernels/decode.py",
        'k.pointer(a.new), k.p["number"])',
        'k.pointer(a.new), k.p["number"] * 0)',
        "tests/conformance/caches/test_putting.py -k stores_its_own",
    ),
    Mutation(
        "raw pages begin at their first block",
        "cpu/kernels/append.py",
        "block % of_page * size",
        "block % of_page * 0",
        "tests/conformance/pages/test_appending.py -k 'long_prompts'",
    ),
    Mutation(
        "codes are rounded down",
        "cpu/memory/formats.py",
        'k.unary("rint", x',
        'k.unary("floor", x',
        "tests/conformance/caches/test_putting.py -k codes",
    ),
    Mutation(
        "the sign of float8 reaches its exponent",
        "cpu/memory/formats.py",
        "(whole << 7) & ~0x4000",
        "(whole << 7) & ~0x2000",
        "tests/conformance/caches/test_caches_codes.py -k codes_against",
    ),
    Mutation(
        "float8 is rounded up half way",
        "cpu/memory/formats.py",
        "| bias - 8)",
        "| bias - 7)",
        "tests/conformance/caches/test_putting.py -k codes",
    ),
    Mutation(
        "float8's scales are of codes, not of what they are widened to",
        "cpu/memory/formats.py",
        "scales if codes.unit == 1 else scales * codes.unit",
        "scales if codes.unit else scales * codes.unit",
        "tests/conformance/caches/test_caches_codes.py -k codes_against",
    ),
    Mutation(
        "a cache's prepared step is known without its scale",
        "cpu/engine/storage.py",
        "known = options.key()\n        if known is None or not (type(given)",
        "known = replace(options, scale=None).key()\n        if known is None or not (type(given)",
        "tests/conformance/caches/test_steps.py -k cache_that_lives",
    ),
    Mutation(
        "a pool's prepared step does not know where its rows are",
        "cpu/engine/storage.py",
        "where = part.items, part.counts, part.rows",
        "where = part.items, part.counts",
        "tests/conformance/caches/test_steps.py -k rows_of_packed",
    ),
    Mutation(
        "a pool's step is known without its lengths",
        "kv/pool.py",
        "usual = new_lengths is q_lengths is out is None",
        "usual = q_lengths is out is None",
        "tests/conformance/caches/test_steps.py -k lengths_that_are_said",
    ),
    Mutation(
        "tables are not checked where a call is repeated",
        "problem/block_tables.py",
        "    if np.count_nonzero(numbers.view(np.uint64) >= pages):",
        "    if not len(numbers):",
        "tests/conformance/caches/test_steps.py -k raw_pages",
    ),
    Mutation(
        "a pair of keys is multiplied whole where only its first is there",
        "cpu/products/fma.py",
        "pairs = count & -2",
        "pairs = count",
        "tests/conformance/caches/test_caches.py -k truncated_cache_still_holds",
    ),
    Mutation(
        "a long chunk comes round to the block of a ring that it began in",
        "cpu/engine/storage.py",
        "else size - BLOCK",
        "else size",
        "tests/conformance/caches/test_caches_windows.py -k no_two_threads",
    ),
    Mutation(
        "of a long chunk the end alone is stored, of sequences that have no such end, too",
        "cpu/engine/storage.py",
        "max(min(counts) - size, 0)",
        "max(max(counts) - size, 0)",
        "tests/conformance/caches/test_caches_windows.py -k chunk_that_fills",
    ),
    Mutation(
        "an empty ring's first chunk sees past its window",
        "cpu/engine/storage.py",
        "stored = self.shape.stored([k.shape[2]] * self.batch, hiding=self.ring.mask(options.causal))",
        "stored = self.shape.stored([k.shape[2]] * self.batch)",
        "tests/conformance/caches/test_caches_windows.py -k chunk_that_fills",
    ),
    Mutation(
        "first chunks of a ring are known by their arrays alone",
        "cpu/engine/storage.py",
        'self.steps.made(("new", known, *arrays), make)',
        'self.steps.made(("new", *arrays), make)',
        "tests/conformance/caches/test_caches_windows.py -k chunk_that_fills",
    ),
    Mutation(
        "keys of an odd dim are not made pairs where a file is read",
        "cpu/memory/blocks.py",
        "whole = np.zeros((*items, count * BLOCK, math.prod(tail) // BLOCK), part.dtype)",
        "whole = np.zeros((*items, count * BLOCK, dim), part.dtype)",
        "tests/conformance/caches/test_caches_saved.py -k come_back",
    ),
    Mutation(
        "a file may hold a ring that has lost what is still seen",
        "kv/saving.py",
        "if w < n or ring.lost(n, n, w):",
        "if w < n:",
        "tests/conformance/caches/test_caches_saved.py -k written_less_far",
    ),
    Mutation(
        "results may lie in new tokens that are still to be stored",
        "kv/running.py",
        "if query.out is not None and k is not None:",
        "if query.out is None and k is not None:",
        "tests/arguments/test_arrays.py -k over_an_argument",
    ),
    Mutation(
        "tokens that others append meanwhile are written over by machine code",
        "kv/running.py",
        "        if cache._held[layer] is not held:\n            return None  # somebody appended since\n"
        "        if max(lengths) >= storage.large_from",
        "        if max(lengths) >= storage.large_from",
        "tests/adapters/torch/test_torch_steps.py -k others_append",
    ),
    Mutation(
        "a long chunk is stored in a ring as a short one",
        "kv/running.py",
        "if cache._ring.size and n > SPARE:",
        "if cache._ring.size and n > 4 * SPARE:",
        "tests/adapters/torch/test_torch_steps.py -k ring_promised",
    ),
    Mutation(
        "a ring does not note what machine code wrote over",
        "kv/running.py",
        """        totals = [n + new for n in lengths]
        after = totals, cache._ring.reached(written, totals)
""",
        """        totals = [n + new for n in lengths]
        after = totals, written
""",
        "tests/adapters/torch/test_torch_steps.py -k machine_code_wrote_over",
    ),
)
