"""Options are told once, and keys tell them apart to the bit; the memo of prepared calls keeps its bounds."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import pickle
import random
import re
import typing
from dataclasses import replace

import numpy as np
import pytest
import torch
from repeated import forget, kept
from threads import together

import speedlight as sl
import speedlight.torch
from speedlight import front
from speedlight.host.memo import Memo
from speedlight.problem.options import DEFAULTS, OPTION_NAMES, AllOptions, Options, new_options
from speedlight.problem.prepared import prepared_calls


def own(function) -> dict[str, object]:
    """Keyword arguments and their defaults."""
    found = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in found if x.kind is x.KEYWORD_ONLY}


def test_the_record_of_a_call_has_the_options_of_the_list():
    """Each has the type and the default of the list; `lengths` are those of queries and keys."""
    types, defaults = typing.get_type_hints(AllOptions), dict(DEFAULTS)
    del types["lengths"], defaults["lengths"]
    assert typing.get_type_hints(Options) == types
    assert {x.name: x.default for x in dataclasses.fields(Options)} == defaults
    assert list(OPTION_NAMES) == list(defaults)


@pytest.mark.parametrize("make", [Options, new_options])
def test_the_record_of_a_call_is_a_frozen_dataclass(make):
    options = make(causal=True, scale=0.5, mask=sl.window(3, 0))
    for name in ("causal", "seed"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(options, name, False)
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot delete field '{name}'"):
            delattr(options, name)
    for alike in (
        Options(causal=True, scale=0.5, mask=sl.window(3, 0)),
        dataclasses.replace(Options(causal=True, scale=2.0, mask=sl.window(3, 0)), scale=0.5),
        copy.copy(options),
        pickle.loads(pickle.dumps(make(causal=True, scale=0.5))),
        copy.deepcopy(options),
    ):
        same = dataclasses.replace(alike, mask=options.mask)
        assert type(alike) is type(options) is Options and same == options and same is not options
        assert hash(same) == hash(options) and repr(same) == repr(options) and same.key() == options.key()
    assert options != make(causal=True) and not hasattr(options, "__dict__")
    assert repr(options).startswith("Options(mask=") and "causal=True" in repr(options)
    with pytest.raises(TypeError, match="unhashable"):
        hash(make(q_lengths=[3]))
    for wrong in ((True,), ()):
        with pytest.raises(TypeError, match=r"Options\.__init__\(\)"):
            make(*wrong, **({} if wrong else {"casual": True}))


def test_every_option_is_offered_with_its_default():
    for function in (
        sl.attention, sl.attention_backward, sl.plan, speedlight.torch.attention, sl.reference.attention,
    ):  # fmt: skip
        assert DEFAULTS.items() <= own(function).items(), function
    for function in (sl.attention_backward, sl.attention_paged, sl.KVCache.attend, sl.PagePool.attend):
        given = {name: x for name, x in own(function).items() if name in DEFAULTS}
        assert len(given) >= 6 and all(x == DEFAULTS[name] for name, x in given.items())


def test_every_option_reaches_the_problem_under_its_own_name(monkeypatch):
    """attention() spells options out, since that takes half the time."""
    for name in OPTION_NAMES:
        found = []
        monkeypatch.setattr(front, "compute", lambda q, k, v, options, *more: found.append(options))  # noqa: B023
        sl.attention(1, 2, 3, **{name: found})
        assert found[0].given() == {name: found}
        sl.attention(1, 2, 3, lengths=found)
    assert found[1].given() == {"q_lengths": found, "k_lengths": found}


def test_every_option_is_part_of_the_key():
    for name in {*OPTION_NAMES} - {"seed"}:
        assert Options(**{name: object()}).key() is None, name


def test_help_says_what_every_option_is():
    for function in (sl.attention_backward, sl.attention_paged, sl.plan, sl.KVCache.attend, speedlight.torch.attention):
        for name in {*own(function)} & {*DEFAULTS}:
            assert re.search(rf"^ +{name}: \S", function.__doc__, re.MULTILINE), (function, name)


SIGNS = [sl.expression(lambda s, b, h, i, j, z=z: s * z) for z in (0.0, -0.0)]
VALUES = {
    "causal": [False, True, "top-left", 0, 1, np.True_],
    "window": [None, (3, 0), [3, 0], (3.0, 0), (3, None), (0, 3)],
    "sink_logits": [None, [0.0, 1.0], [-0.0, 1.0], (0.0, 1.0), [0, 1], np.array([0.0, 1.0]), torch.tensor([0.0, 1.0])],
    "q_start": [None, 0, 0.0, 1, [0, 1], np.int64(0)],
    "k_start": [0, 1024, 0.0, False],
    "scale": [None, 0.0, -0.0, 1.0, 1, True, np.float32(1)],
    "layout": ["bhld", "blhd"],
    "cu_seqlens_q": [None, [0, 3], np.array([0, 3]), np.array([0, 3], np.int32)],
    "k_lengths": [None, [3, 2], [3, 1], torch.tensor([3, 2])],
    "mask": [None, sl.window(3, 0), sl.window(4, 0), lambda b, h, i, j: j < i, np.ones((2, 2), bool)],
    "score": [None, sl.softcap(2.0), sl.softcap(3.0), SIGNS[0], SIGNS[1]],
    "precision": ["ieee", "tf32"],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_key_tells_values_apart(name):
    keys = [Options(**{name: x}).key() for x in VALUES[name]]
    for (x, a), (y, b) in itertools.combinations(zip(VALUES[name], keys, strict=True), 2):
        assert a is None or a != b, (x, y)
    again = [Options(**{name: x}).key() for x in VALUES[name]]
    assert again == keys and sum(key is not None for key in keys) >= 2


def test_nothing_that_may_change_is_part_of_a_key():
    base = Options(causal=True)
    for name, x in (
        ("mask", lambda b, h, i, j: j < i),
        ("mask", np.ones((4, 4), bool)),
        ("score", torch.zeros(4, 4)),
        ("window", ([3], 0)),
        ("sink_logits", np.array([None, 1.0])),
        ("k_lengths", range(3)),
        ("scale", np.float64(1)),
    ):
        assert replace(base, **{name: x}).key() is None
    floats = np.ones(2)
    keys = [replace(base, sink_logits=x).key() for x in (floats, floats.view(np.int64), floats.view(np.uint64))]
    assert None not in keys and len(set(keys)) == 3  # of the same bytes, but other numbers
    lengths = [3, 2]
    before = replace(base, k_lengths=lengths).key()
    lengths[0] = 4
    assert replace(base, k_lengths=lengths).key() != before


def test_the_memo_keeps_what_was_used_last():
    memo: Memo[int] = Memo(3, 100)
    for n in range(3):
        memo.put(n, n * 10, 10)
    assert memo.get(0) == 0 and memo.get(7) is None
    memo.put(3, 30, 10)  # 1 was used least recently
    assert [memo.get(n) for n in range(4)] == [0, None, 20, 30]
    memo.put(4, 40, 85)  # beside it there is room for one
    assert memo.bytes <= 100 and memo.get(4) == 40 and memo.get(3) == 30 and len(memo) == 2
    memo.put(5, 50, 101)
    assert memo.get(5) is None and len(memo) == 2
    memo.clear()
    assert len(memo) == 0 and memo.get(4) is None


def test_the_memo_under_threads():
    memo: Memo[int] = Memo(20, 1000)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(5000):
            key = rng.randrange(60)
            found = memo.get(key)
            if found is None:
                memo.put(key, key * 7, rng.randrange(90))
            assert found in (None, key * 7)

    together(work, range(4))
    assert len(memo) <= 20 and memo.bytes <= 1000


def test_a_call_counts_the_tables_that_it_keeps():
    """The memo is bounded in bytes: a mask's tables live as long as the call."""
    q = np.ones((1, 1, 8, 16), np.float32)
    forget()
    sl.attention(q, q, q, mask=sl.documents(np.zeros(200_000, np.int32)))
    assert prepared_calls.bytes > 800_000
    sl.attention(q, q, q)
    assert len(kept()) == 2
    forget()


@pytest.mark.parametrize("queries", [8, 40])
def test_a_tensor_to_be_negated_is_not_taken_for_another(queries):
    """PyTorch's negative bit is no stride and no dtype: a call that was made before would read what lies there."""
    q = torch.randn(1, 2, queries, 16)
    sl.attention(q, q, q)
    for n in range(3):
        given = [torch._neg_view(q) if at == n else q for at in range(3)]
        with pytest.raises(sl.ArgumentTypeError, match=f"^{'qkv'[n]}: expected a plain tensor; got a lazily negated"):
            sl.attention(*given)


def test_packed_calls_are_repeated_too():
    q = np.random.default_rng(0).standard_normal((7, 2, 16), dtype=np.float32)
    forget()
    first = sl.attention(q, q, q, layout="lhd", cu_seqlens_q=[0, 3, 7], causal=True)
    assert len(kept()) == 1
    assert sl.attention(q, q, q, layout="lhd", cu_seqlens_q=[0, 3, 7], causal=True).tobytes() == first.tobytes()
    assert len(kept()) == 1
    other = sl.attention(q, q, q, layout="lhd", cu_seqlens_q=[0, 4, 7], causal=True)
    assert len(kept()) == 2 and other.tobytes() != first.tobytes()
