"""Any order of a cache's calls (R23), against arrays that are simply concatenated."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import FULL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from problems import decoded, qkv

import speedlight as sl

pytestmark = pytest.mark.usefixtures("one_width")  # how caches lie is seen at any width of panels


class Machine(RuleBasedStateMachine):
    """Any order of calls, against arrays that are simply concatenated."""

    options: dict = {"capacity": 150}  # noqa: RUF012
    value_dim = 17
    mask = None

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.dtype = "float32"
        self.most = self.options["capacity"]
        sizes = {"layers": 2, "batch": 2, "kv_heads": 2, "head_dim": 16, "value_dim": self.value_dim}
        self.cache = sl.KVCache(**sizes | self.options)
        nothing = tuple(np.zeros((2, 0, dim), np.float32) for dim in (16, self.value_dim))
        self.model = [[nothing for _ in range(2)] for _ in range(2)]

    def chunk(self, n: int) -> list[np.ndarray]:
        return qkv(self.rng, self.dtype, 2, 4, 2, n, n, 16, self.value_dim)

    def given(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        """What the cache is given for new tokens."""
        return k, v

    @rule(
        layer=st.integers(0, 1),
        n=st.integers(0, 40) | st.integers(250, 300),
        counts=st.none() | st.tuples(st.integers(0, 300), st.integers(0, 300)),
        attend=st.booleans(),
    )
    def grow(self, layer, n, counts, attend):
        q, k, v = self.chunk(n)
        counts = None if counts is None else [min(c, n) for c in counts]
        each = counts or [n, n]
        fits = all(self.model[layer][b][0].shape[1] + c <= self.most for b, c in enumerate(each))
        try:
            out = (
                self.cache.attend(layer, q, *self.given(k, v), new_lengths=counts)
                if attend
                else self.cache.append(layer, *self.given(k, v), new_lengths=counts)
            )
        except sl.CacheFull:
            assert not fits
            return
        assert fits
        for b, c in enumerate(each):
            keys, values = self.model[layer][b]
            keys, values = (
                np.concatenate([x, self.kept(new[b, :, :c])], axis=1) for x, new in ((keys, k), (values, v))
            )
            self.model[layer][b] = keys, values
            if attend:
                want = self.attention(q[b : b + 1, :, :c], keys[None], values[None])
                assert out[b : b + 1, :, :c].tobytes() == want.tobytes()

    def kept(self, x):
        """What a cache has of new tokens."""
        return x

    def attention(self, q, k, v):
        return sl.attention(q, k, v, causal=True, mask=self.mask)

    def shown(self, x):
        """What keys() and values() give of all the tokens."""
        return x

    @rule(share=st.floats(0, 1))
    def truncate(self, share):
        lengths = [int(share * min(self.model[layer][b][0].shape[1] for layer in range(2))) for b in range(2)]
        self.cache.truncate(lengths)
        self.forget(lengths)

    def forget(self, lengths):
        for layer in range(2):
            for b, n in enumerate(lengths):
                self.model[layer][b] = tuple(x[:, :n] for x in self.model[layer][b])

    @rule(back=st.integers(0, 60), path=st.sets(st.integers(0, 59)))
    def keep(self, back, path):
        longest, least = ([end(len(layer[b][0][0]) for layer in self.model) for b in (0, 1)] for end in (max, min))
        starts = [max(0, n - back) for n in least]
        paths = [sorted(n for n in path if a + n < b) for a, b in zip(starts, least, strict=True)]
        try:
            self.cache.keep(paths, start=starts)
        except sl.ArgumentError as error:
            assert "forgotten" in str(error) and self.mask is not None  # a window's, of which too much has gone by
            assert any([a - n > 200 or self.cut[b] for b, (a, n) in enumerate(zip(longest, starts, strict=True))])
            return
        self.cut = [True, True]
        for layer in range(2):
            for b, (start, left) in enumerate(zip(starts, paths, strict=True)):
                which = [*range(start), *(start + n for n in left)]
                self.model[layer][b] = tuple(x[:, which] for x in self.model[layer][b])

    cut = (False, False)  # a truncated ring may have less than it seems

    @rule(order=st.tuples(st.integers(0, 1), st.integers(0, 1)))
    def select(self, order):
        self.cache = self.cache.select(order)
        self.model = [[layer[b] for b in order] for layer in self.model]

    @rule()
    def copy(self):
        old, self.cache = self.cache, self.cache.copy()
        old.clear()

    @precondition(lambda self: self.cache.used_bytes > 4000)
    @rule()
    def clear(self):
        self.cache.clear()
        self.model = [[tuple(x[:, :0] for x in pair) for pair in layer] for layer in self.model]

    @invariant()
    def holds_what_it_was_given(self):
        for layer in range(2):
            assert self.cache.lengths(layer) == tuple(self.model[layer][b][0].shape[1] for b in range(2))
            for stored, which in ((self.cache.keys(layer), 0), (self.cache.values(layer), 1)):
                for b in range(2):
                    want = self.shown(self.model[layer][b][which])
                    n = want.shape[1]
                    assert stored[b, :, :n].tobytes() == want.tobytes() and not stored[b, :, n:].any()


class QuantisedMachine(Machine):
    options = {"capacity": 400, "dtype": "int8"}  # noqa: RUF012

    def kept(self, x):
        return decoded(x, self.options["dtype"])

    def attention(self, q, k, v):
        """Tokens that were quantised stay what they are when they are quantised again: here all at once."""
        sizes = self.options | {"capacity": max(1, k.shape[2])}
        cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, value_dim=17, **sizes)
        n = q.shape[2]
        cache.append(0, k[:, :, : k.shape[2] - n], v[:, :, : v.shape[2] - n])
        return cache.attend(0, q, k[:, :, k.shape[2] - n :], v[:, :, v.shape[2] - n :])


class FourBitMachine(QuantisedMachine):
    options = {"capacity": 400, "dtype": "int4"}  # noqa: RUF012


class WindowedMachine(Machine):
    options = {"capacity": 3000, "window": 60, "keep_first": 20}  # noqa: RUF012
    mask = sl.window(59, 0) | sl.prefix(20)

    def shown(self, x):
        n = x.shape[1]
        return np.concatenate([x[:, : min(20, n)], x[:, max(20, n - 59) :]], axis=1)

    @rule(back=st.integers(0, 100))
    def truncate(self, back):
        lengths = [max(0, min(self.model[layer][b][0].shape[1] for layer in range(2)) - back) for b in range(2)]
        longest = [max(self.model[layer][b][0].shape[1] for layer in range(2)) for b in range(2)]
        try:
            self.cache.truncate(lengths)
        except sl.ArgumentError as error:
            assert "forgotten" in str(error) and any(
                a - n > 200 or self.cut[b] for b, (a, n) in enumerate(zip(longest, lengths, strict=True))
            )
            return
        self.cut = [True, True]
        self.forget(lengths)


class Latents:
    """Values are the first columns of keys, which come whole or in two parts."""

    value_dim = 11

    def chunk(self, n: int) -> list[np.ndarray]:
        q, k, _ = super().chunk(n)  # pyright: ignore[reportAttributeAccessIssue]
        return [q, k, k[..., : self.value_dim]]

    def given(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        return (k,) if k.shape[2] % 2 else (v, k[..., self.value_dim :])


class LatentMachine(Latents, Machine):
    options = Machine.options | {"latent": True}


class WindowedLatentMachine(Latents, WindowedMachine):
    options = WindowedMachine.options | {"latent": True}


for machine in (Machine, QuantisedMachine, FourBitMachine, WindowedMachine, LatentMachine, WindowedLatentMachine):
    machine.TestCase.settings = settings(
        max_examples=300 if FULL else 25, stateful_step_count=50 if FULL else 20, deadline=None
    )
TestMachine, TestQuantisedMachine, TestWindowedMachine = (
    Machine.TestCase,
    QuantisedMachine.TestCase,
    WindowedMachine.TestCase,
)
TestFourBitMachine = FourBitMachine.TestCase
