"""The struct a kernel is called with: names and places, for the emitter and for the caller."""

from __future__ import annotations

# one int64 word each; `ticket` has a cache line of its own. What every kernel's struct begins with: a region reads no
# more
HEAD = ("ticket", "worker", "left", "pad3", "pad4", "pad5", "pad6", "pad7", "limit", "scratch", "scratch_stride")
FIELDS = (
    *HEAD, "q", "k", "v", "out", "lse", "items", "item_count",
    "q_head", "q_row", "q_column", "k_head", "k_row", "k_column", "v_head", "v_row", "v_column",
    "out_head", "out_row", "out_column", "lse_head", "lse_row",
    "head_dim", "value_dim", "group", "panels", "causal", "c", "flip", "stage_k", "stage_v", "counts",
    "at_check", "at_partial", "at_keys", "at_values", "at_panels", "panel_bytes", "at_total", "at_span", "at_limits",
    "at_rows", "width",
    "scale", "k_start", "numbers", "tables", "wrong", "sinks",
    "partials", "partial_bytes", "arrived",
    "page_size", "page_fixed", "page_ring", "k_page", "v_page", "at_places", "at_scales", "heads",
)  # fmt: skip
# per batch item: tickets before it, blocks per kv head, lengths, q_start - k_start, byte offsets; which item (-1: rows
# without a query), its list of pages
ITEM = ("first", "blocks", "q_len", "k_len", "start", "q_at", "k_at", "v_at", "out_at", "lse_at", "index", "pages")
# what a counting run adds up (`counts` is not null): tiles full, mixed; keys computed for panels
COUNTS = ("full", "mixed", "panel_keys")


def field(name: str) -> int:
    return FIELDS.index(name) * 8


TICKET, WORKER, LEFT, LIMIT = (HEAD.index(name) for name in ("ticket", "worker", "left", "limit"))
