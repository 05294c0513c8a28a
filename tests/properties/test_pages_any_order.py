"""Any order of a pool's calls (R23), against arrays that are simply concatenated."""

from __future__ import annotations

import numpy as np
from conftest import FULL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pools import alone, check_accounts, made, packed
from problems import CODES, decoded

import speedlight as sl


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, against arrays that are simply concatenated; pages are always either free or held as often as
    counted.
    """

    dtype = "float32"

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.pool = made(self.dtype, layers=2, pages=14)
        self.model: list[tuple[sl.PagedSequence, list]] = []  # handle, of each layer chunks of (q, k, v)

    @rule()
    def new(self):
        if len(self.model) < 5:
            self.model.append((self.pool.sequence(), [[], []]))

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4))
    def fork(self, which):
        if len(self.model) < 5:
            sequence, chunks = self.model[which % len(self.model)]
            self.model.append((sequence.fork(), [list(x) for x in chunks]))

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4), told=st.booleans())
    def free(self, which, told):
        sequence, _ = self.model.pop(which % len(self.model))
        if told:
            sequence.free()

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4), share=st.floats(0, 1))
    def truncate(self, which, share):
        sequence, chunks = self.model[which % len(self.model)]
        n = int(share * min(sequence.length(0), sequence.length(1)))
        sequence.truncate(n)
        for layer in (0, 1):
            whole = [np.concatenate(x)[:n] for x in zip(*chunks[layer], strict=True)] if chunks[layer] else []
            chunks[layer] = [tuple(whole)] if n else []

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4), share=st.floats(0, 1), path=st.sets(st.integers(0, 40)))
    def keep(self, which, share, path):
        sequence, chunks = self.model[which % len(self.model)]
        least, free = min(sequence.length(0), sequence.length(1)), self.pool.free_pages
        start = int(share * least)
        left = sorted(n for n in path if start + n < least)
        try:
            sequence.keep(left, start=start)
        except sl.CacheFull as error:
            assert error.needed > error.free == free == self.pool.free_pages
            return
        which = [*range(start), *(start + n for n in left)]
        for layer in (0, 1):
            whole = [np.concatenate(x)[which] for x in zip(*chunks[layer], strict=True)] if chunks[layer] else []
            chunks[layer] = [tuple(whole)] if which else []

    @precondition(lambda self: self.model)
    @rule(layer=st.integers(0, 1), counts=st.lists(st.integers(0, 40), min_size=5, max_size=5), attend=st.booleans())
    def grow(self, layer, counts, attend):
        counts = counts[: len(self.model)]
        q, k, v = packed(self.rng, self.dtype, sum(counts))
        sequences = [s for s, _ in self.model]
        free = self.pool.free_pages
        try:
            if attend:
                out = self.pool.attend(layer, sequences, q, k, v, new_lengths=counts)
            else:
                self.pool.append(layer, sequences, k, v, new_lengths=counts)
        except sl.CacheFull as error:
            assert error.needed > error.free == free == self.pool.free_pages
            return
        at = 0
        for (_, chunks), n in zip(self.model, counts, strict=True):
            here = slice(at, at + n)
            if n:
                chunks[layer].append((q[here], k[here], v[here]))
                if attend:
                    assert out[here].tobytes() == alone(self.dtype, 16, 17, chunks[layer])[0].tobytes()
            at += n

    @invariant()
    def accounts_add_up(self):
        check_accounts(self.pool, [sequence for sequence, _ in self.model])

    @invariant()
    def holds_what_it_was_given(self):
        for sequence, chunks in self.model:
            assert len(sequence.pages) == -(-max(sequence.length(0), sequence.length(1)) // 16) or chunks == [[], []]
            for layer in (0, 1):
                for which, stored in ((1, sequence.keys(layer)), (2, sequence.values(layer))):
                    tokens = (
                        np.concatenate([c[which] for c in chunks[layer]])
                        if chunks[layer]
                        else stored.swapaxes(0, 1)[:0]
                    )
                    if self.dtype in CODES:
                        tokens = decoded(tokens, self.dtype)
                    assert stored.swapaxes(0, 1).tobytes() == tokens.tobytes()


class QuantisedPoolMachine(PoolMachine):
    dtype = "int8"


class FourBitPoolMachine(PoolMachine):
    dtype = "int4"


for machine in (PoolMachine, QuantisedPoolMachine, FourBitPoolMachine):
    machine.TestCase.settings = settings(
        max_examples=300 if FULL else 20, stateful_step_count=50 if FULL else 20, deadline=None
    )
TestPoolMachine, TestQuantisedPoolMachine = PoolMachine.TestCase, QuantisedPoolMachine.TestCase
TestFourBitPoolMachine = FourBitPoolMachine.TestCase
