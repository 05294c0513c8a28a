"""Masks and scores: their operations, trees, tracing, intervals and patterns, independent of engines."""
