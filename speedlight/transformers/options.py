"""Names of attention's options in transformers, and those that change nothing."""

from __future__ import annotations

from typing import Literal

from ..adapting import Library

LatentMode = Literal["auto", "absorbed", "stock"]

TRANSFORMERS = Library(
    "transformers",
    tested=("5.23", "5.24"),
    names={
        "q": "query", "k": "key", "v": "value", "mask": "attention_mask", "score": "attention_mask",
        "sink_logits": "s_aux", "scale": "scaling",
    },
    # models hand these on to every layer; the mask says sliding_window, too
    ignored=(
        "position_ids", "cache_position", "use_cache", "past_key_values", "return_dict", "deterministic", "seq_idx",
        "max_length_q", "max_length_k", "read_index", "write_index", "num_items_in_batch", "output_hidden_states",
        "output_router_logits", "logits_to_keep", "logits_indices", "logits_processor_args", "position_embeddings",
        "debug_io", "debug_io_dir", "prune_layers", "sliding_window",
    ),
    refused={"output_attentions": "Use model.set_attn_implementation('eager'), which keeps weights."},
)  # fmt: skip
