"""The public calls: dense, paged and backward attention, plans, merging, rotary positions, raw pages."""
