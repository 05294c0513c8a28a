"""Faults of speedlight.transformers."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "a sliding window of transformers is one key wider",
        "transformers/masks.py",
        '_captured(f)["sliding_window"] - 1)',
        '_captured(f)["sliding_window"])',
        "tests/test_transformers.py -k test_masks",
    ),
    Mutation(
        "a padding mask is read from its first key where a window's cache begins later",
        "transformers/masks.py",
        "self.padded[:, first : first + self.k_len]",
        "self.padded[:, : self.k_len]",
        "tests/test_transformers.py -k test_masks",
    ),
    Mutation(
        "without a mask, one query of transformers sees the first key alone",
        "transformers/attending.py",
        "if not (is_causal and query.shape[2] > 1):",
        "if not is_causal:",
        "tests/test_transformers.py -k without_a_mask",
    ),
    Mutation(
        "nothing flows to the sinks of transformers' models",
        "transformers/attending.py",
        "s_aux if torch.is_grad_enabled() else s_aux.detach()",
        "s_aux.detach()",
        "tests/test_transformers.py -k test_options",
    ),
    Mutation(
        "a ring of transformers' cache is said to show one key more",
        "transformers/caches.py",
        "max(length - self.window + 1, 0)",
        "max(length - self.window, 0)",
        "tests/test_transformers_caches.py -k test_rings",
    ),
)
