"""Faults of speedlight.transformers."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "a sliding window of transformers is one key wider",
        "transformers/masks.py",
        '_read_closure(f)["sliding_window"] - 1)',
        '_read_closure(f)["sliding_window"])',
        "tests/adapters/transformers/test_transformers.py -k test_masks",
    ),
    Mutation(
        "a padding mask is read from its first key where a window's cache begins later",
        "transformers/masks.py",
        "self.padded[:, first : first + self.k_len]",
        "self.padded[:, : self.k_len]",
        "tests/adapters/transformers/test_transformers.py -k test_masks",
    ),
    Mutation(
        "the padding of a longer mask is taken where it begins as this one does",
        "transformers/masks.py",
        "        fits = alike and (n <= seen.shape[1] if in_cache else n == seen.shape[1])\n"
        "        if fits and torch.equal(known, seen[:, :n]) and",
        "        fits = alike and (in_cache or n == seen.shape[1])\n"
        "        if fits and torch.equal(known[:, : seen.shape[1]], seen[:, :n]) and",
        "tests/adapters/transformers/test_transformers.py -k padding_of_this_mask",
    ),
    Mutation(
        "outside of a cache the padding of a shorter mask is taken",
        "transformers/masks.py",
        "(n <= seen.shape[1] if in_cache else n == seen.shape[1])",
        "n <= seen.shape[1]",
        "tests/adapters/transformers/test_transformers.py -k padding_of_this_mask",
    ),
    Mutation(
        "without a mask, one query of transformers sees the first key alone",
        "transformers/attending.py",
        "if not (is_causal and query.shape[2] > 1):",
        "if not is_causal:",
        "tests/adapters/transformers/test_transformers.py -k without_a_mask",
    ),
    Mutation(
        "nothing flows to the sinks of transformers' models",
        "transformers/attending.py",
        "s_aux if torch.is_grad_enabled() else s_aux.detach()",
        "s_aux.detach()",
        "tests/adapters/transformers/test_transformers.py -k test_options",
    ),
    Mutation(
        "a ring of transformers' cache is said to show one key more",
        "transformers/caches.py",
        "min(length, self.window - 1)",
        "min(length, self.window)",
        "tests/adapters/transformers/test_transformers_caches.py -k test_rings",
    ),
    Mutation(
        "a scale of transformers is taken for another that is equal",
        "transformers/masks.py",
        "key = type(scale), scale",
        "key = scale",
        "tests/adapters/transformers/test_transformers.py -k used_again",
    ),
    Mutation(
        "a scale of a step of transformers' cache is taken for another that is equal",
        "transformers/masks.py",
        "key = length, type(scale), scale, softcap",
        "key = length, scale, softcap",
        "tests/adapters/transformers/test_transformers_caches.py -k two_layers",
    ),
    Mutation(
        "a softcap of transformers that is a tensor is read once",
        "transformers/attending.py",
        "softcap = None if softcap is None else float(softcap)",
        "softcap = softcap if softcap is None else softcap",
        "tests/adapters/transformers/test_transformers.py -k used_again",
    ),
)
