"""Prompts as tests of shared pages make them: keys and values are a function of a layer, a key and the tokens."""

from __future__ import annotations

import zlib

import numpy as np
from pools import KINDS, made
from problems import numpy_dtype, taken

SIZE = 16  # tokens of a page


def computed(pool, layer, tokens, extra=None, start=0):
    """Returns the keys and values that a model computes for the tokens from `start` on."""
    kind, count = numpy_dtype(taken(pool.dtype)), max(len(tokens) - start, 0)
    k, v = (np.zeros((count, pool.kv_heads, dim), np.float32) for dim in (pool.head_dim, pool.value_dim))
    seen = zlib.crc32(repr((layer, extra)).encode())
    for at, token in enumerate(tokens):
        seen = zlib.crc32(int(token).to_bytes(8, "little", signed=True), seen)
        if at >= start:
            rng = np.random.default_rng(seen)
            for x in (k, v):
                x[at - start] = rng.standard_normal(x.shape[1:], np.float32)
    return k.astype(kind), None if pool.latent else v.astype(kind)


def append(pool, sequence, tokens, *, layers=None, told=True):
    """Appends to each layer what a model computes for the tokens that follow those of the sequence."""
    for layer in range(pool.layers) if layers is None else layers:
        start = sequence.length(layer)
        k, v = computed(pool, layer, tokens, sequence.extra, start)
        pool.append(layer, [sequence], k, v, new_lengths=[len(k)], tokens=tokens[start:] if told else None)
    return sequence


def prompted(pool, tokens, extra=None):
    """Returns a sequence of these tokens, and how many of them it found."""
    sequence = pool.sequence(tokens=tokens, extra=extra)
    found = sequence.length()
    return append(pool, sequence, tokens), found


def found_of(pool, tokens, extra=None):
    """Returns how many tokens of a prompt the pool finds, which leaves no trace but in its counts."""
    with pool.sequence(tokens=tokens, extra=extra) as sequence:
        return sequence.length()


def assert_computed(sequence, tokens):
    """Checks the bits of a sequence against a pool that never shared anything."""
    pool = sequence.pool
    fresh = made(pool.dtype, pool.head_dim, pool.value_dim, layers=pool.layers, latent=pool.latent)
    plain = fresh.sequence()
    for layer in range(pool.layers):
        fresh.append(layer, [plain], *computed(pool, layer, tokens, sequence.extra))
        assert sequence.length(layer) == len(tokens)
        assert sequence.keys(layer).tobytes() == plain.keys(layer).tobytes()
        assert sequence.values(layer).tobytes() == plain.values(layer).tobytes()


__all__ = ["KINDS", "SIZE", "append", "assert_computed", "computed", "found_of", "made", "prompted"]
