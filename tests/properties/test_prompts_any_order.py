"""Any order of calls of a pool that shares prompts (R34), against a dictionary of what has been computed."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
from conftest import FULL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pools import check_accounts
from prompts import SIZE, computed, made

import speedlight as sl

LAYERS = 2
EXTRAS = (None, "a")
PIECES = st.lists(st.sampled_from([8, 16, 20]), min_size=1, max_size=4)  # tokens of a kind, one kind after the other


class PromptMachine(RuleBasedStateMachine):
    """Any order of calls. Of a sequence the model has its tokens; keys and values follow from those.

    `findable` has the prefixes that may be found: full in all layers of one sequence once, and not forgotten since.
    """

    dtype = "float32"

    def __init__(self) -> None:
        super().__init__()
        self.pool = made(self.dtype, layers=LAYERS, pages=14)
        self.model: list[tuple[sl.PagedSequence, list[list[int]], list[bool]]] = []
        self.findable: set[tuple] = set()
        self.rows: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

    def of(self, layer, tokens, extra, start=0):
        """Returns the keys and values of these tokens."""
        key = (layer, tuple(tokens), extra)
        if key not in self.rows:
            self.rows[key] = computed(self.pool, layer, tokens, extra)
        return [x[start:] for x in self.rows[key]]

    def state(self):
        held = [(s.pages, s.tokens, s.length(0), s.length(1)) for s, *_ in self.model]
        return held, self.pool.free_pages, self.pool.statistics(), dict(self.pool._journal.contents)

    @precondition(lambda self: len(self.model) < 5)
    @rule(pieces=PIECES, kind=st.integers(0, 1), extra=st.sampled_from(EXTRAS))
    def new(self, pieces, kind, extra):
        prompt = [n % 2 + kind for n, count in enumerate(pieces) for _ in range(count)]
        free, before = self.pool.free_pages, self.pool.statistics()
        sequence = self.pool.sequence(tokens=prompt, extra=extra)
        n, after = sequence.length(), self.pool.statistics()
        assert n % SIZE == 0 and n < len(prompt) and sequence.tokens == prompt[:n]
        assert n == 0 or (extra, tuple(prompt[:n])) in self.findable
        assert after["lookups"] == before["lookups"] + 1 and after["hits"] == before["hits"] + (n > 0)
        assert after["tokens_reused"] == before["tokens_reused"] + n
        assert free - self.pool.free_pages == before["pages_kept"] - after["pages_kept"]
        self.model.append((sequence, [prompt[:n]] * LAYERS, [True]))

    @precondition(lambda self: self.model and len(self.model) < 5)
    @rule(which=st.integers(0, 4))
    def fork(self, which):
        sequence, tokens, told = self.model[which % len(self.model)]
        self.model.append((sequence.fork(), list(tokens), list(told)))

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4), told=st.booleans())
    def free(self, which, told):
        sequence, *_ = self.model.pop(which % len(self.model))
        if told:
            sequence.free()

    @rule()
    def forget(self):
        self.pool.forget()
        self.findable.clear()
        self.model = [(s, tokens, [False]) for s, tokens, _ in self.model]
        assert self.pool.statistics()["pages_kept"] == 0

    @precondition(lambda self: self.model and len(self.model) < 5)
    @rule(some=st.sets(st.integers(0, 4), min_size=1))
    def save_and_load(self, some):
        """Loads copies of sequences; a prompt from before forget() is not found among them either."""
        chosen = [self.model[n] for n in some if n < len(self.model)][: 5 - len(self.model)]
        if not chosen:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a.safetensors")
            self.pool.save(path, [sequence for sequence, *_ in chosen])
            before = self.state()
            try:
                loaded = self.pool.load(path)
            except sl.CacheFull as error:
                assert error.needed > error.free == self.pool.free_pages
                assert self.state() == before
                return
        for new, (old, tokens, told) in zip(loaded, chosen, strict=True):
            assert new.tokens == old.tokens and new.extra == old.extra
            self.model.append((new, list(tokens), list(told)))
            if told[0]:
                full = min(map(len, tokens))
                self.findable |= {(new.extra, tuple(new.tokens[:n])) for n in range(SIZE, full + 1, SIZE)}

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4), share=st.floats(0, 1))
    def truncate(self, which, share):
        sequence, tokens, _ = self.model[which % len(self.model)]
        n = int(share * min(map(len, tokens)))
        sequence.truncate(n)
        tokens[:] = [x[:n] for x in tokens]

    @precondition(lambda self: self.model)
    @rule(count=st.integers(1, 3), pieces=PIECES, kind=st.integers(0, 2), layers=st.sampled_from([(0,), (1,), (0, 1)]))
    def grow(self, count, pieces, kind, layers):
        """Appends to the first sequences the tokens of a kind; a layer that is behind gets what the other has."""
        some = self.model[:count]
        more = [n % 2 + kind for n, one in enumerate(pieces) for _ in range(one)]
        for layer in layers:
            whole = []
            for (_, tokens, _), n in zip(some, itertools.cycle([len(more), 1, 0]), strict=False):
                other = tokens[1 - layer]
                ahead = len(other) > len(tokens[layer])
                whole.append(other if ahead else tokens[layer] + more[:n])
            starts = [len(tokens[layer]) for _, tokens, _ in some]
            parts = [self.of(layer, x, s.extra, at) for (s, *_), x, at in zip(some, whole, starts, strict=True)]
            k, v = (np.concatenate(x) for x in zip(*parts, strict=True))
            told = [t for x, at in zip(whole, starts, strict=True) for t in x[at:]]
            counts = [len(x) - at for x, at in zip(whole, starts, strict=True)]
            before = self.state()
            try:
                self.pool.append(layer, [s for s, *_ in some], k, v, new_lengths=counts, tokens=told)
            except sl.CacheFull as error:
                assert error.needed > error.free == self.pool.free_pages
                assert self.state() == before
                return
            except sl.ArgumentError as error:  # other tokens than sequence() was asked for
                assert "the prompt has that sequence() looked up" in str(error)
                assert self.state() == before
                return
            for (s, tokens, told_since), x in zip(some, whole, strict=True):
                tokens[layer] = x
                full = min(map(len, tokens))
                if told_since[0]:
                    self.findable |= {(s.extra, tuple(x[:n])) for n in range(SIZE, full + 1, SIZE)}

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4), tokens=st.sampled_from([[1], [1.5], [True], "ab", [[1, 2]]]))
    def refuse(self, which, tokens):
        sequence, *_ = self.model[which % len(self.model)]
        k, v = self.of(0, [1, 2], None)
        before = self.state()
        try:
            self.pool.append(0, [sequence], k, v, new_lengths=[2], tokens=tokens)
        except sl.Error as error:
            assert str(error).startswith("tokens: expected 2 ints")
        else:
            raise AssertionError
        assert self.state() == before

    @invariant()
    def accounts_add_up(self):
        check_accounts(self.pool, [sequence for sequence, *_ in self.model])

    @invariant()
    def holds_what_was_computed(self):
        for sequence, tokens, _ in self.model:
            for layer in range(LAYERS):
                k, v = self.of(layer, tokens[layer], sequence.extra)
                assert sequence.keys(layer).tobytes() == k.swapaxes(0, 1).tobytes()
                assert sequence.values(layer).tobytes() == v.swapaxes(0, 1).tobytes()

    @invariant()
    def what_is_indexed_is_what_its_tokens_say(self):
        """Read from the pages themselves, whoever holds them."""
        storage, journal = self.pool._storage, self.pool._journal
        for page, tokens in journal.contents.items():
            if tokens is None:
                continue
            parts, at = [], tokens
            while at.parent is not None:
                parts.append(np.frombuffer(at.tokens, np.int64).tolist())
                at = at.parent
            whole = [t for x in reversed(parts) for t in x]
            for layer in range(LAYERS):
                k, v = self.of(layer, whole, None if at.tokens == b"None" else "a", len(whole) - SIZE)
                assert storage.tokens(layer, "keys", [page], SIZE).tobytes() == k.swapaxes(0, 1).tobytes()
                assert storage.tokens(layer, "values", [page], SIZE).tobytes() == v.swapaxes(0, 1).tobytes()


class KeepingPromptMachine(PromptMachine):
    """With paths that are kept: tokens move, and what is computed for them is no function of them any more."""

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 4), share=st.floats(0, 1), path=st.sets(st.integers(0, 40)))
    def keep(self, which, share, path):
        which %= len(self.model)
        sequence, tokens, _ = self.model[which]
        least = min(map(len, tokens))
        start = int(share * least)
        left = sorted(n for n in path if start + n < least)
        before = self.state()
        try:
            sequence.keep(left, start=start)
        except sl.CacheFull:
            assert self.state() == before
            return
        assert sequence.tokens == [*tokens[0][:start], *(tokens[0][start + n] for n in left)]
        sequence.free()  # of other bits than its tokens say
        del self.model[which]


for machine in (PromptMachine, KeepingPromptMachine):
    machine.TestCase.settings = settings(
        max_examples=300 if FULL else 30, stateful_step_count=50 if FULL else 25, deadline=None
    )
TestPromptMachine, TestKeepingPromptMachine = PromptMachine.TestCase, KeepingPromptMachine.TestCase
