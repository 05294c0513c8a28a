"""Whatever is passed: odd objects (R12), every one as every argument, and several at once."""

from __future__ import annotations

import decimal
import fractions
import inspect
import warnings

import numpy as np
import pytest
import torch
from anything import KEPT, check_any_type
from conftest import FULL

import speedlight as sl
import speedlight.flash_attn


class Whole(int):
    pass


class Real(float):
    pass


class Evil:
    """Its every answer is an error."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __len__(self):
        raise RuntimeError("no length")

    def tolist(self):
        raise RuntimeError("no list")


_BESIDE = ("q", "k", "v", "k_pages", "out", "cu_seqlens_k", "seed")  # what may have to go with an argument that is odd


def odd():
    """Objects that nobody should pass."""
    return [
        None, "", "a", [], {}, (), set(), {3}, object(), -1, 0, 1, 5, 10**400, -(10**5000), 1.5, float("nan"),
        float("inf"), -0.0,
        np.float16(1), np.int64(2), np.array(1), np.array("a"), np.array([object()]), np.zeros(3), np.zeros((2, 2, 2)),
        np.zeros(0),
        torch.tensor(1), torch.tensor([1.0]), torch.ones(2, requires_grad=True), torch.ones(2, device="meta"), range(3),
        torch.nested.nested_tensor([torch.ones(3)]), torch.ones(2).to_sparse(), torch.nn.Parameter(torch.ones(3)),
        range(10**9),
        "bhld", b"bhld", bytearray(3), memoryview(b"abc"), [0] * 100_000, [[1, 2], [3]], [None], ["a"], int, np.ndarray,
        torch.Tensor,
        lambda: 1, lambda *_: 1, lambda b, h, i, j: "a", lambda s, b, h, i, j: None, (i for i in range(3)), Whole(3),
        Real(0.5), True,
        fractions.Fraction(1, 3), fractions.Fraction(10**400), decimal.Decimal("0.5"),
        1j, Evil(), NotImplemented, ..., slice(3),
        np.datetime64("2020-01-01"), np.void(b"abc"), np.ma.masked, np.zeros(2, "V4"), np.zeros(2, [("a", "i4")]),
        sl.softcap(2.0),
        sl.causal(), sl, sl.table([1, 2]), iter([1]), torch.float32, np.dtype("f4"), Exception("a"),
        {"a": 1}, [1 << 70], [-1, 5],
    ]  # fmt: skip


def _calls():
    """Public calls, their right arguments, and every argument that they have, but for those that exclude these."""
    x = np.ones((1, 2, 5, 8), np.float32)
    pages = np.ones((3, 4, 2, 8), np.float32)
    given = {"q": x, "k": x, "v": x}
    paged = {"q": x, "k_pages": pages, "v_pages": pages, "block_table": [[0, 1]], "k_lengths": [5]}
    sizes = {"q_heads": 2, "q_len": 5, "head_dim": 8}
    flash = speedlight.flash_attn.flash_attn_func
    calls = {
        "attention": (sl.attention, given, ()),
        "attention_paged": (sl.attention_paged, paged, ()),
        "plan": (sl.plan, sizes, given),
        "plan of arrays": (sl.plan, given, sizes),
        "set_threads": (sl.set_threads, {"n": 1}, ()),
        "flash_attn_func": (flash, dict.fromkeys("qkv", torch.ones(1, 5, 2, 8)), (*"qkv", "return_attn_probs")),
    }
    return {
        name: (function, right, [x for x in inspect.signature(function).parameters if x not in others])
        for name, (function, right, others) in calls.items()
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _calls())
def test_odd_objects_are_named(name):
    """Every argument, every object: it is taken, or the error is one of ours and names the argument (or one that must
    go with it).
    """
    function, right, names = _calls()[name]
    wrong = []
    for argument in names:
        for x in odd():
            out = np.full((1, 2, 5, 8), 7, np.float32)
            call = right | ({"out": out} if name.startswith("attention") and argument != "out" else {}) | {argument: x}
            try:
                function(**call)
            except sl.Error as error:
                if str(error).split(":")[0] not in (argument, *_BESIDE) and argument not in ("mask", "score"):
                    wrong.append((argument, type(x).__name__, str(error)[:80]))
                if not (out == 7).all():
                    wrong.append((argument, type(x).__name__, "out was written"))
            except Exception as error:
                if argument not in ("mask", "score") or not callable(x):  # a callable's errors are its own
                    wrong.append((argument, type(x).__name__, repr(error)[:80]))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("seed", range(10 if FULL else 1))
def test_several_odd_objects_raise_and_write_nothing(seed):
    rng = np.random.default_rng(seed)
    objects, calls = odd(), list(_calls().values())
    for _ in range(1000 if FULL else 300):
        function, right, names = calls[rng.integers(len(calls))]
        chosen = {
            str(n): objects[rng.integers(len(objects))] for n in rng.choice(names, min(len(names), 3), replace=False)
        }
        out = np.full((1, 2, 5, 8), 7, np.float32)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function(**(right | ({"out": out} if "out" in names else {}) | chosen))
        except sl.Error as error:
            assert ":" in str(error) and len(str(error)) < 2000, chosen
            assert (out == 7).all(), chosen
        except Exception:
            if not any(callable(chosen.get(n)) for n in ("mask", "score")):
                raise


@pytest.mark.parametrize("name", KEPT)
def test_calls_that_keep_something_take_any_type(name, tmp_path, monkeypatch):
    """A speedlight error that changes nothing, or an answer."""
    monkeypatch.chdir(tmp_path)
    check_any_type(KEPT[name])
