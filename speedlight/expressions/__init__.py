"""Masks and scores: their operations, trees, tracing, intervals and patterns. Nothing here knows an engine."""
