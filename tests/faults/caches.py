"""Faults of caches, pools and their steps."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "a pool's last owner writes where others left a longer part",
        "kv/sharing.py",
        " or away.get(page, 0) > start:",
        ":",
        "tests/test_pages.py -k takes_nothing_from",
    ),
    Mutation(
        "a dropped sequence keeps its pages",
        "kv/pool.py",
        "dropped += [held[number].pages[:]]",
        "dropped += [held[number].pages[:0]]",
        "tests/test_pages.py -k nobody_has",
    ),
    Mutation(
        "a path is moved in pages that a fork shares",
        "kv/keeping.py",
        """            if copies:
                taken = """,
        """            if copies == [None]:
                taken = """,
        "tests/test_keeping.py -k others_share",
    ),
    Mutation(
        "an interrupted path stays half moved",
        "kv/keeping.py",
        "undo[layer] = storage.before_moves(layer, old, moves)",
        "storage.before_moves(layer, old, moves)",
        "tests/test_interrupts.py -k 'keep and anywhere'",
    ),
    Mutation(
        "two sequences grow in one page",
        "appending.py",
        "    if len(same):",
        "    if len(same) > 99:",
        "tests/test_appending.py -k anything_is_wrong",
    ),
    Mutation(
        "a ring forgets one token late",
        "windows.py",
        "written + SPARE - self.size)",
        "written + SPARE - self.size - 1)",
        "tests/test_caches_windows.py -k 'over_a_ring or from_a_ring'",
    ),
    Mutation(
        "heads in step all read the first one's keys",
        "cpu/scores.py",
        'r // p["group"] * p["head"]',
        'r // p["rows"] * p["head"]',
        "tests/test_putting.py -k in_step",
    ),
    Mutation(
        "every task of a step stores the first one's tokens",
        "cpu/decode.py",
        'k.pointer(a.new), k.p["number"])',
        'k.pointer(a.new), k.p["number"] * 0)',
        "tests/test_putting.py -k stores_its_own",
    ),
    Mutation(
        "raw pages begin at their first block",
        "cpu/append.py",
        "block % of_page * size",
        "block % of_page * 0",
        "tests/test_appending.py -k 'long_prompts'",
    ),
    Mutation(
        "codes are rounded down",
        "cpu/append.py",
        'k.unary("rint", x',
        'k.unary("floor", x',
        "tests/test_putting.py -k codes",
    ),
    Mutation(
        "the sign of float8 reaches its exponent",
        "cpu/conversions.py",
        "(whole << 7) & ~0x4000",
        "(whole << 7) & ~0x2000",
        "tests/test_caches_codes.py -k codes_against",
    ),
    Mutation(
        "float8 is rounded up half way",
        "cpu/conversions.py",
        "| bias - 8)",
        "| bias - 7)",
        "tests/test_putting.py -k codes",
    ),
    Mutation(
        "float8's scales are of codes, not of what they are widened to",
        "cpu/products.py",
        "scales if unit == 1 else scales * unit",
        "scales if unit else scales * unit",
        "tests/test_caches_codes.py -k codes_against",
    ),
    Mutation(
        "a cache's prepared step is known without its scale",
        "cpu/storage.py",
        "known = options.key()\n        if known is None or not (type(given)",
        "known = options._replace(scale=None).key()\n        if known is None or not (type(given)",
        "tests/test_steps.py -k cache_that_lives",
    ),
    Mutation(
        "a pool's prepared step does not know where its rows are",
        "cpu/storage.py",
        "where = part.items, part.counts, part.rows",
        "where = part.items, part.counts",
        "tests/test_steps.py -k rows_of_packed",
    ),
    Mutation(
        "a pool's step is known without its lengths",
        "kv/pool.py",
        "usual = new_lengths is q_lengths is out is None",
        "usual = q_lengths is out is None",
        "tests/test_steps.py -k lengths_that_are_said",
    ),
    Mutation(
        "tables are not checked where a call is repeated",
        "block_tables.py",
        "    if np.count_nonzero(numbers.view(np.uint64) >= pages):",
        "    if not len(numbers):",
        "tests/test_steps.py -k raw_pages",
    ),
)
