"""Some hundred faults, put into the code one at a time: does the suite see them?

    python tests/mutations.py [--jobs 2] [--only NAME …] [--results FILE]

Each mutation is an exact replacement in a copy of the tree. The tests of its own room run first, and only if they pass
what else `make test` runs. Results are kept beside what they are of, so that a run that was stopped goes on where it
was. Fails unless all but two are caught.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MISSED = 2  # may not be caught
OWN_SECONDS, SECONDS = 200, 1200  # after which tests that hang have seen the fault
FAILED, NOTHING_RAN = 1, (4, 5)  # exit codes of pytest


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in a file of speedlight/; `tests`: arguments of pytest, of the room's own tests."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def apply(self, tree: Path) -> None:
        path = tree / "speedlight" / self.file
        path.write_text(self.mutated(path.read_text()))

    def mutated(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: expected once in {self.file}, found {text.count(self.old)} times: {self.old!r}"
            )
        return text.replace(self.old, self.new)


ATTENTION, FORWARD, MASKS = "tests/test_attention.py", "tests/test_forward.py", "tests/test_masks.py"
CACHES, WINDOWS, CODES = "tests/test_caches.py", "tests/test_caches_windows.py", "tests/test_caches_codes.py"
POOLS = "tests/test_pages.py"
GPU_ATTENTION, GPU_CACHES = "tests/test_gpu_attention.py", "tests/test_gpu_caches.py"
GPU_SHARDS = "tests/test_gpu_distributed.py"
TRANSFORMERS, TRANSFORMERS_CACHES = "tests/test_transformers.py", "tests/test_transformers_caches.py"
SHARDS = "tests/test_distributed.py"
DROPINS = "tests/test_distributed_dropins.py"
BACKWARD, RUNS = "tests/test_backward.py", "tests/test_backward_runs.py"
MUTATIONS = (
    # --- kernels
    Mutation(
        "a step of the head dim is left out where the number is odd",
        "cpu/vector.py",
        "        with self.range(middle, high) as t:\n",
        "        with self.range(high, high) as t:\n",
        f"{ATTENTION} -k every_dim",
    ),
    Mutation(
        "keys past the end of the tile are read",
        "cpu/queries_in_lanes.py",
        'rows = [k.at(p["keys"], k.min(j + m, last) * p["key_row"]) for m in range(s.rows)]',
        'rows = [k.at(p["keys"], (j + m) * p["key_row"]) for m in range(s.rows)]',
        "tests/test_memory.py -k test_guard_pages",
    ),
    Mutation(
        "keys that some of another vector's queries see are taken for its last vector's alone",
        "cpu/forward.py",
        "(s.panel - s.lanes - 1) * 8",
        "(s.panel - s.lanes - 3) * 8",
        f"{ATTENTION} -k 'every_length and 255'",
    ),
    Mutation(
        "scores of the last vector alone are counted as the first one's",
        "cpu/queries_in_lanes.py",
        "checks.add(v, scores)",
        "checks.add(i, scores)",
        f"{FORWARD} -k last_vector_alone",
    ),
    Mutation(
        "what came before a new maximum is not rescaled",
        "cpu/weights.py",
        "(alpha,) = exp4(k, s, [old[v] - self.base[v]], any_x=True)",
        "(alpha,) = exp4(k, s, [old[v] - old[v]], any_x=True)",
        f"{ATTENTION} -k 'every_length and 255'",
    ),
    Mutation(
        "a tile of which a lane sees nothing changes the sign of its zeros",
        "cpu/weights.py",
        "self.total = [k.variable(self.hidden) for _ in range(s.vectors)]",
        "self.total = [k.variable(k.const(0.0, s.vector)) for _ in range(s.vectors)]",
        f"{MASKS} -k sign_of_its_zero",
    ),
    Mutation(
        "hidden keys decide whether a row's exponents are clamped",
        "cpu/weights.py",
        "usual = LARGE + lowest_exponent(s) - 1",
        "usual = LARGE",
        f"{FORWARD} -k large_without_hidden_keys",
    ),
    Mutation(
        "what a row does not see at a window's lower edge is part of its maximum",
        "cpu/weights.py",
        'k.when((finite ^ 1) | (p["clear"] > 0) | (p["full"] < p["n_keys"]))',
        'k.when((finite ^ 1) | (p["full"] < p["n_keys"]))',
        f"{MASKS} -k keys_before",
    ),
    Mutation(
        "values at a window's lower edge are multiplied, seen or not",
        "cpu/forward.py",
        "add(parts.predicated, k.i64(0), clear, wide)",
        "add(parts.value, k.i64(0), clear)",
        f"{MASKS} -k keys_before",
    ),
    Mutation(
        "values of hidden keys are multiplied",
        "cpu/products.py",
        "return k.select(seen, k.fma(value, weight, total), total)",
        "return k.fma(value, weight, total)",
        f"{ATTENTION} -k 'special_values and float32'",
    ),
    Mutation(
        "merging takes one state's maximum for the other's",
        "cpu/softmax.py",
        "factors = exp4(k, s, [m1 - base, m2 - base], any_x=True)",
        "factors = exp4(k, s, [m2 - base, m1 - base], any_x=True)",
        f"{ATTENTION} -k 'every_length and 1025'",
    ),
    Mutation(
        "a pair of which a lane sees one half is taken whole",
        "cpu/products.py",
        "return k.select(odd, full - 1, full)",
        "return k.select(odd, full, full)",
        f"{ATTENTION} -k 'special_values and bfloat16'",
    ),
    Mutation(
        "decoding touches values of scores of -inf",
        "cpu/products.py",
        "return weight.bits(s.integer) > -1, None",
        "return weight.bits(s.integer).differs(1), None",
        f"{CACHES} -k 'minus_infinity or decode_kernel'",
    ),
    Mutation(
        "decoding leaves out the spans that no share divides",
        "cpu/decode.py",
        "first, end = (spans * x // blocks for x in (self.share, self.share + 1))",
        "first, end = (spans // blocks * x for x in (self.share, self.share + 1))",
        f"{CACHES} -k few_heads_share",
    ),
    Mutation(
        "pages of a ring come round at the wrong place",
        "cpu/places.py",
        "slot.set(fixed + (page - fixed) % ring)",
        "slot.set(fixed + page % ring)",
        f"{WINDOWS} -k a_window_is_the_mask",
    ),
    # --- gradients
    Mutation(
        "delta forgets what flows into lse",
        "cpu/backward_tiles.py",
        'k.store(total.get() - k.load(s.vector, p["delta"], s.lane_offset(v)), p["delta"]',
        'k.store(total.get(), p["delta"]',
        f"{BACKWARD} -k every_option",
    ),
    Mutation(
        "dk is not scaled",
        "cpu/backward.py",
        'return self.task.factor() if self.name == "k" else self.k.const(1.0, self.s.number)',
        "return self.k.const(1.0, self.s.number)",
        f"{BACKWARD} -k every_option",
    ),
    Mutation(
        "something flows to the scores of hidden pairs",
        "cpu/backward_tiles.py",
        "flows = [k.select(m, y, k.const(0.0, s.vector)) for m, y in zip(seen, flows, strict=True)]",
        "flows = list(flows)",
        f"{BACKWARD} -k every_option",
    ),
    Mutation(
        "dq forgets the ranges of keys before",
        "cpu/backward.py",
        "with k.either(self.range.equals(0) & ",
        "with k.either((self.range >= 0) & ",
        f"{BACKWARD} -k any_threads",
    ),
    Mutation(
        "blocks of queries begin where a call does",
        "cpu/pairs.py",
        "self.row = (item.block + self.step // a.group) * QUERY_BLOCK - (item.start + a.k_start)",
        "self.row = (self.step // a.group) * QUERY_BLOCK",
        f"{BACKWARD} -k absolute_positions",
    ),
    Mutation(
        "a task waits for one of the two before it",
        "cpu/backward.py",
        "come = super().has_come(turn) & (k.fetch_add(before, 0, 0) >= wanted)",
        "come = super().has_come(turn) | (k.fetch_add(before, 0, 0) >= wanted)",
        f"{RUNS} -k their_turn",
    ),
    Mutation(
        "dk and dv take 0 times what a hidden row holds",
        "cpu/backward_tiles.py",
        "y = visible_step(k, s, columns[v], weight, y, seen)",
        "y = multiply_add(k, s, weight, columns[v], y)",
        f"{BACKWARD} -k 'hidden_never_matters and causal-float32'",
    ),
    Mutation(
        "sums of dk and dv begin with what memory held",
        "cpu/rows.py",
        'fresh, end = p["fresh"].differs(0), p["end"].differs(0)',
        'fresh, end = p["fresh"].differs(1), p["end"].differs(0)',
        f"{BACKWARD} -k every_option",
    ),
    Mutation(
        "dk and dv of a whole block replace those before",
        "cpu/backward_tiles.py",
        "with k.when(x.fresh.equals(0)):",
        "with k.when(x.fresh.equals(2)):",
        f"{BACKWARD} -k whole_blocks",
    ),
    Mutation(
        "panels taken together add where one of them sees less",
        "cpu/backward.py",
        "low.equals(0) & high.equals(count) & careful.equals(0)",
        "low.equals(0) & careful.equals(0)",
        f"{BACKWARD} -k every_option",
    ),
    Mutation(
        "heads that add to the same entries do not wait for each other",
        "cpu/backward.py",
        "k.select(free, k.i64(0), turn + a.group)",
        "k.i64(0)",
        f"{RUNS} -k followed",
    ),
    Mutation(
        "the halves of a pair of keys change places",
        "cpu/backward_tiles.py",
        "unit = packed(k, s, flows[v::n] + [",
        "unit = packed(k, s, flows[v::n][::-1] + [",
        f"{BACKWARD} -k 'every_option and bfloat16'",
    ),
    Mutation(
        "slopes of hidden pairs come out",
        "cpu/flows.py",
        "k.store(k.select(mark.bits(s.ivector) > -1, x, k.const(0.0, s.vector)), ",
        "k.store(x, ",
        f"{BACKWARD} -k slopes_of_hidden",
    ),
    # --- regions and threads
    Mutation(
        "the caller's modes are those of the kernel",
        "cpu/region.py",
        "k.store(k.const(0x1F80, I32), ours)",
        "k.store(k.const(0x9FC0, I32), ours)",
        f"{FORWARD} -k subnormals",
    ),
    Mutation(
        "a call ends while a helper still computes",
        "cpu/workers.py",
        "        try:\n            kernel.joined(arguments)\n        except",
        "        try:\n            kernel.entry(arguments)\n        except",
        "tests/test_signals.py -k 'nobody_is_inside or threads_as_they_were'",
    ),
    Mutation(
        "a region ends while a thread of ours still computes",
        "cpu/serving.py",
        'leave_if(_load(k, block, "left").equals(inside))',
        'leave_if(_load(k, block, "left") >= 0)',
        "tests/test_threads.py -k waited_for",
    ),
    Mutation(
        "threads of ours may share the caller's CPU",
        "cpu/serving.py",
        "k.store(k.load(I64, may, at) & (own ^ -1), may, at)",
        "k.store(k.load(I64, may, at) & -1, may, at)",
        "tests/test_threads.py -k where_the_caller",
    ),
    Mutation(
        "the last item is looked for one too low",
        "cpu/region.py",
        "leave_if(high.get() - low.get() <= 1)",
        "leave_if(high.get() - low.get() <= 2)",
        f"{FORWARD} {ATTENTION} -k 'same_bits_however or packed'",
    ),
    # --- bounds and tiles
    Mutation(
        "a part of a tile that the mask cuts counts as visible",
        "cpu/visibility.py",
        "leave_if(classed(full.get(), after(full.get(), end.get())) < 2)",
        "leave_if(classed(full.get(), after(full.get(), end.get())) < 1)",
        f"{ATTENTION} {MASKS} -k 'patterns or random_expressions'",
    ),
    Mutation(
        "i != j is taken for i < j",
        "expressions/bounds.py",
        'planes["ne"] = planes["lt"] + planes["gt"]',
        'planes["ne"] = planes["lt"]',
        "tests/test_bounds.py",
    ),
    Mutation(
        "the bounds of a difference are those of a sum",
        "expressions/operations.py",
        "return a[0] - b[1], a[1] - b[0]",
        "return a[0] - b[0], a[1] - b[1]",
        "tests/test_bounds.py tests/test_integers.py -k 'sound or exact'",
    ),
    # --- lowering and lookups
    Mutation(
        "integers of 33 bits count as those of 32",
        "expressions/bounds.py",
        "return self.most is not None and self.most < 1 << 31",
        "return self.most is not None and self.most < 1 << 33",
        "tests/test_combined.py -k wide",
    ),
    Mutation(
        "an index out of range is not noted",
        "cpu/lower.py",
        "k.store(k.i64(1), wrong, 16 * n)",
        "k.store(k.i64(0), wrong, 16 * n)",
        f"{MASKS} -k index_out_of_range",
    ),
    Mutation(
        "the sign of // and % of long integers is that of the processor",
        "cpu/lower.py",
        "over = rest.differs(0) & ((rest ^ b) < 0)",
        "over = rest.differs(0) & (rest < 0)",
        "tests/test_integers.py -k 'scalars or negative'",
    ),
    Mutation(
        "the sign of // and % of short integers is that of the processor",
        "cpu/lower.py",
        'floor = k.unary("floor", k.to_float(a, wide) / k.to_float(by, wide))',
        "floor = k.to_float(a, wide) / k.to_float(by, wide)",
        "tests/test_integers.py -k 'vectors_of_32 or negative'",
    ),
    Mutation(
        "a lookup is one entry late",
        "cpu/lookups.py",
        "last = splat_like(k, length_of(k, at, d) - 1, x)",
        "last = splat_like(k, length_of(k, at, d) - 2, x)",
        f"{ATTENTION} -k 'patterns and alibi'",
    ),
    Mutation(
        "two expressions of other numbers are the same",
        "expressions/tracing.py",
        "return self.key, words, tuple(id(",
        "return self.key, len(words), tuple(id(",
        f"{MASKS} -k kept_expressions",
    ),
    # --- arguments and preparation
    Mutation(
        "the scale is left out where there is no score",
        "cpu/prepare.py",
        "else problem.scale * LOG4_E",
        "else LOG4_E",
        f"{ATTENTION} -k 'special_values and float64'",
    ),
    Mutation(
        "a repeated call is known without its scale",
        "problem.py",
        "type(scale), exactly, layout",
        "type(scale), layout",
        "tests/test_repeated.py -k option_is_part",
    ),
    Mutation(
        "values of an item lie where its keys would",
        "cpu/operands.py",
        "index * pages.v_item",
        "index * pages.k_item",
        "tests/test_caches_any_order.py -k TestMachine",
    ),
    Mutation(
        "what flows to shared keys is the last item's",
        "backward.py",
        "total += item",
        "total[...] = item",
        "tests/test_layouts.py -k flows_to_shared",
    ),
    Mutation(
        "of a cache's pairs the other element is taken",
        "cpu/products.py",
        "k.trunc(i & 1, I32) << 4",
        "k.trunc((i & 1) ^ 1, I32) << 4",
        "tests/test_widened.py -k wherever_keys_lie",
    ),
    Mutation(
        "queries of a short item are aligned by the longest",
        "resolve.py",
        "starts = tuple(k - q for q, k in zip(q_lengths, k_lengths, strict=True))",
        "starts = (max(k_lengths, default=0) - max(q_lengths, default=0),) * len(q_lengths)",
        f"{ATTENTION} -k 'packed_is_padded and float32'",
    ),
    Mutation(
        "a page after the last is taken",
        "block_tables.py",
        "if used.size and (used.min() < 0 or used.max() >= pages):",
        "if used.size and (used.min() < 0 or used.max() > pages):",
        "tests/test_pages_raw.py -k wrong_raw_pages",
    ),
    Mutation(
        "a page after the last is taken of a single short row",
        "block_tables.py",
        "max(used_pages) < pages:",
        "max(used_pages) <= pages:",
        "tests/test_steps.py -k one_short_row",
    ),
    Mutation(
        "out may overlap an input",
        "results.py",
        "        if overlap(out, x):\n",
        "        if overlap(out, x) and out.shape == ():\n",
        "tests/test_problem.py -k overlap",
    ),
    # --- caches and pools
    Mutation(
        "a pool's last owner writes where others left a longer part",
        "kv/sharing.py",
        " or away.get(page, 0) > start:",
        ":",
        f"{POOLS} -k takes_nothing_from",
    ),
    Mutation(
        "a dropped sequence keeps its pages",
        "kv/pool.py",
        "dropped += [held[number].pages[:]]",
        "dropped += [held[number].pages[:0]]",
        f"{POOLS} -k nobody_has",
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
        f"{WINDOWS} -k 'over_a_ring or from_a_ring'",
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
        f"{CODES} -k codes_against",
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
        f"{CODES} -k codes_against",
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
    # --- the kernel cache and files
    Mutation(
        "a view does not keep the memory of what it was made of",
        "arrays.py",
        "        buffer.owner = self.owner\n",
        "",
        "tests/test_caches.py -k keeps_its_memory",
    ),
    Mutation(
        "a damaged object file is run",
        "cpu/compile.py",
        "if data[: _HEADER - 32] != _MAGIC + _sum(path, code):",
        "if not data.startswith(_MAGIC):",
        "tests/test_cache.py -k damage",
    ),
    Mutation(
        "kernels are not named by every source",
        "cpu/compile.py",
        'entry.name != "__pycache__" and entry.is_dir()',
        'entry.name == "cpu" and entry.is_dir()',
        "tests/test_cache.py -k every_source",
    ),
    Mutation(
        "what a group may write is trusted",
        "cpu/compile.py",
        "not info.st_mode & 0o022",
        "not info.st_mode & 0o002",
        "tests/test_cache.py -k others_can_write",
    ),
    Mutation(
        "a header may promise more than the file holds",
        "files.py",
        "f.tell() + count * dtype.itemsize != size",
        "f.tell() + count * dtype.itemsize < size",
        "tests/test_cli.py -k 'promises or damaged'",
    ),
    Mutation(
        "a tuning is believed whatever its sum says",
        "cpu/tuned.py",
        "if data[:_HEADER] != _MAGIC + _sum(path, body):",
        "if data[: len(_MAGIC)] != _MAGIC:",
        "tests/test_tuning.py -k damaged",
    ),
    Mutation(
        "what was tuned has no limits",
        "cpu/tuned.py",
        "or not all([low <= x <= high for x in each])",
        "or not each",
        "tests/test_tuning.py -k planted",
    ),
    Mutation(
        "a candidate that is faster on the whole is taken",
        "tools/trials.py",
        "self.least >= _GAIN and self.worst >= _LOSS",
        "self.gain >= 1.0",
        "tests/test_tuning.py -k noise",
    ),
    # --- GPU kernels, in the interpreter
    Mutation(
        "GPU: the sum before a new maximum is not rescaled",
        "gpu/primitives.py",
        "running_sum * alpha + tl.sum(p, 1)",
        "running_sum + tl.sum(p, 1)",
        f"{GPU_ATTENTION} -k 'special_values or every_length'",
    ),
    Mutation(
        "GPU: the last split of the keys is left out",
        "gpu/splits.py",
        "count = tl.minimum((item.k_len + size - 1) // size, splits)",
        "count = tl.minimum(item.k_len // size, splits)",
        f"{GPU_ATTENTION} {GPU_CACHES} -k 'every_length or uneven_lengths'",
    ),
    Mutation(
        "GPU: the sign of // and % is that of the processor",
        "gpu/primitives.py",
        "((a ^ by) < 0)",
        "(a < 0)",
        "tests/test_gpu_expressions.py -k 'every_operation or random_expressions'",
    ),
    # --- transformers
    Mutation(
        "a sliding window of transformers is one key wider",
        "transformers/masks.py",
        '_captured(f)["sliding_window"] - 1)',
        '_captured(f)["sliding_window"])',
        f"{TRANSFORMERS} -k test_masks",
    ),
    Mutation(
        "a padding mask is read from its first key where a window's cache begins later",
        "transformers/masks.py",
        "self.padded[:, first : first + self.k_len]",
        "self.padded[:, : self.k_len]",
        f"{TRANSFORMERS} -k test_masks",
    ),
    Mutation(
        "without a mask, one query of transformers sees the first key alone",
        "transformers/attending.py",
        "if not (is_causal and query.shape[2] > 1):",
        "if not is_causal:",
        f"{TRANSFORMERS} -k without_a_mask",
    ),
    Mutation(
        "nothing flows to the sinks of transformers' models",
        "transformers/attending.py",
        "s_aux if torch.is_grad_enabled() else s_aux.detach()",
        "s_aux.detach()",
        f"{TRANSFORMERS} -k test_options",
    ),
    Mutation(
        "a ring of transformers' cache is said to show one key more",
        "transformers/caches.py",
        "max(length - self.window + 1, 0)",
        "max(length - self.window, 0)",
        f"{TRANSFORMERS_CACHES} -k test_rings",
    ),
    # --- shards
    Mutation(
        "GPU: what rows have of earlier parts of the keys is not rescaled",
        "gpu/joining.py",
        "b_acc * alpha[:, None] + b_part",
        "b_acc + b_part",
        f"{GPU_SHARDS} -k shards_on_gpus",
    ),
    Mutation(
        "GPU: every part of the keys has the sinks",
        "distributed/joining.py",
        "sinks=part.problem.sinks if alone else None",
        "sinks=part.problem.sinks",
        f"{GPU_SHARDS} -k shards_on_gpus",
    ),
    Mutation(
        "messages between two processes come in another order than they go",
        "distributed/arriving.py",
        "messages = self.peers.post([x for sends, _ in gives for x in sends], receives)",
        "messages = self.peers.post([x for sends, _ in gives for x in sends], receives[::-1])",
        f"{SHARDS} -k paired",
    ),
    Mutation(
        "rows begin anew with every part of the keys",
        "cpu/forward.py",
        "            with k.when(a.begins.equals(0)):\n",
        "            with k.when(a.begins.equals(2)):\n",
        f"{SHARDS} -k two_processes",
    ),
    Mutation(
        "the last key that a process sees is not sent to it",
        "distributed/parts.py",
        "return int(j[at[0]]), last + 1\n",
        "return int(j[at[0]]), last\n",
        f"{SHARDS} -k not_needed",
    ),
    Mutation(
        "what flows to keys is that of the last rows alone",
        "cpu/backward.py",
        "self.step.equals(0) & whole",
        "self.step.equals(0)",
        f"{SHARDS} -k two_processes",
    ),
    Mutation(
        "masks take the heads of every turn for the first ones",
        "distributed/parts.py",
        '{"h": (1, q.start)}',
        '{"h": (1, 0)}',
        f"{SHARDS} -k two_processes",
    ),
    Mutation(
        "what others computed last is not added to gradients of keys",
        "distributed/returning.py",
        "self.settle(math.inf)",
        "self.settle(0)",
        f"{SHARDS} -k two_processes",
    ),
    Mutation(
        "pieces of keys end between spans under exact=True",
        "distributed/plans.py",
        "        chunk = max(SPAN, _up(-(-length // (2 * ranks)), SPAN))\n",
        "        chunk = max(TILE, _up(-(-length // (2 * ranks)), TILE))\n",
        f"{SHARDS} -k schedules_fit",
    ),
    Mutation(
        "what flows to log-sum-exps does not flow on to sinks",
        "distributed/differentiable.py",
        "delta - saved.d_lse.double()",
        "delta",
        f"{SHARDS} -k two_processes",
    ),
    Mutation(
        "a message may be taken for one of another exchange",
        "distributed/groups.py",
        "        return found\n\n    # --- failures\n",
        "        return tag\n\n    # --- failures\n",
        f"{SHARDS} -k two_processes",
    ),
    Mutation(
        "shards of other strides take the call of those before",
        "distributed/ways.py",
        "(x.shape, x.stride(), x.dtype)",
        "(x.shape, x.dtype)",
        f"{SHARDS} -k two_processes",
    ),
    Mutation(
        "queries over a rank's tokens are one position too late",
        "distributed/partial.py",
        "_I + shifts[0]",
        "_I + shifts[0] + 1",
        f"{DROPINS} -k steps",
    ),
    Mutation(
        "a rank that has no room is not seen",
        "distributed/placement.py",
        "            if count > most:\n",
        "            if count > capacity:\n",
        f"{DROPINS} -k too_many",
    ),
    Mutation(
        "every process thinks that its heads are the first ones",
        "distributed/local.py",
        "[: peers.rank]",
        "[: 0 * peers.rank]",
        f"{DROPINS} -k deepspeed",
    ),
    Mutation(
        "packed sequences are sharded as one",
        "distributed/attending.py",
        "(0, total) if self.cuts is None else self.cuts",
        "(0, total)",
        f"{DROPINS} -k varlen",
    ),
)


def digest(mutation: Mutation) -> str:
    """Of the sources, the tests and the mutation: a result is of these alone."""
    total = hashlib.sha256(repr(mutation).encode())
    for path in sorted((*(ROOT / "speedlight").rglob("*.py"), *(ROOT / "tests").rglob("*.py"))):
        if path.name != "mutations.py":
            total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()


def copied(to: Path) -> Path:
    """What tests need of the tree."""
    ignore = shutil.ignore_patterns("__pycache__", ".venv", ".git", ".pytest_cache", ".hypothesis", "results")
    shutil.copytree(ROOT, to, ignore=ignore, symlinks=True, dirs_exist_ok=True)
    return to


def run_tests(tree: Path, arguments: list[str], seconds: int, *, mutated: bool) -> tuple[int, str]:
    """pytest's exit code, and the first test that failed; no test run at all is an error.

    A mutation has kernels of its own.
    """
    place = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"} | (
        {"SPEEDLIGHT_CACHE_DIR": str(tree / "kernels")} if mutated else {}
    )
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *arguments]
    options: dict[str, Any] = {
        "cwd": tree,
        "env": os.environ | place,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return FAILED, f"no end within {seconds} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # whatever a test has left, too
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode in NOTHING_RAN:
        raise ValueError(f"pytest {shlex.join(arguments)}: {said[-500:]}")
    lines = [x for x in said.splitlines() if x.startswith(("FAILED", "ERROR"))]
    return process.returncode, (lines or said.splitlines()[-1:] or [""])[0][:150]


def try_out(mutation: Mutation | None, tests: str, rest: bool) -> dict[str, Any]:
    """What the suite says to a mutation, its own room first, then the `rest`; None: what these tests say to the tree as
    it is.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="speedlight-mutation-") as name:
        tree = copied(Path(name))
        if mutation is not None:
            mutation.apply(tree)
        code, first = run_tests(tree, shlex.split(tests), OWN_SECONDS, mutated=mutation is not None)
        by = "its own room" if code else "nothing"
        if mutation is not None and rest and not code:
            code, first = run_tests(tree, ["-n", "2", "tests"], SECONDS, mutated=True)
            by = "the rest" if code else "nothing"
    return {"caught": by, "test": first, "seconds": round(time.perf_counter() - start, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="mutations whose names have one of these words")
    parser.add_argument("--own", action="store_true", help="only the tests of each mutation's own room")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutations.json")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(given.results.read_text()) if given.results.exists() else {}
    done = dict(kept)
    wanted = [m for m in MUTATIONS if not given.only or any(x in m.name for x in given.only)]
    for m in wanted:
        m.mutated((ROOT / "speedlight" / m.file).read_text())
    whole = Mutation("nothing", "", "", "", "")
    rooms = {tests: digest(whole) + tests for tests in dict.fromkeys(m.tests for m in wanted)}
    jobs = [(m, m.tests, digest(m)) for m in wanted] + [(None, tests, key) for tests, key in rooms.items()]
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        running = {
            pool.submit(try_out, m, tests, not given.own): (m, tests, key) for m, tests, key in jobs if key not in kept
        }
        for future in concurrent.futures.as_completed(running):
            m, tests, key = running[future]
            try:
                result = future.result()
            except (ValueError, OSError) as error:  # of this one alone; it counts as not caught, and is tried again
                result = {"caught": "nothing" if m else "error", "test": f"ERROR {error}", "seconds": 0.0}
            kept[key] = result | {"name": m.name if m else f"as it is: {tests}"}
            if not result["test"].startswith("ERROR") and (m is None or not given.own or result["caught"] != "nothing"):
                done[key] = kept[key]
            given.results.write_text(json.dumps(done, indent=1))
            print(
                f"{kept[key]['seconds']:7.1f} s  {kept[key]['name']}: {kept[key]['caught']}  {kept[key]['test']}",
                flush=True,
            )
    return report(wanted, kept, rooms)


def report(wanted: list[Mutation], kept: dict[str, Any], rooms: dict[str, str]) -> int:
    """The table; 0 where enough are caught, by tests that pass without a mutation."""
    broken = [
        tests
        for tests, key in rooms.items()
        if kept[key]["caught"] != "nothing" or kept[key]["seconds"] > OWN_SECONDS / 3
    ]
    results = [kept[digest(m)] for m in wanted]
    for m, r in zip(wanted, results, strict=True):
        print(f"{m.file:22} {m.name:68} {r['caught']:13} {r['seconds']:6.1f} s  {r['test']}")
    caught = sum(r["caught"] != "nothing" for r in results)
    print(
        f"{caught} of {len(wanted)} caught, {sum(r['caught'] == 'its own room' for r in results)} by their own room's "
        "tests"
    )
    for tests in broken:
        print(f"fails without a mutation, or is too slow to tell who hangs: pytest {tests}")
    return int(bool(broken) or len(wanted) - caught > MISSED)


if __name__ == "__main__":
    sys.exit(main())
