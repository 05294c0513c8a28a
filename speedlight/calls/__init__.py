"""The public calls: dense, paged and backward attention, plans, pictures, merging, rotary positions, raw pages."""
