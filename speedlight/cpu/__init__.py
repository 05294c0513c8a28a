"""The CPU engine, from its language to its calls."""
