"""append_paged(): new tokens in the caller's pages, nowhere else, and nothing at all where anything is wrong."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from problems import numpy_dtype
from wrong import WRONG

import speedlight as sl
from speedlight.cpu.engine import append_call as putting

LAYOUTS = {"bhld": (0, 2, 1, 3), "blhd": (0, 1, 2, 3)}


def pages_of(rng, dtype, heads_first=False, count=12, size=5, dims=(16, 17)):
    """Rubbish of its own in every place."""
    kind = numpy_dtype(dtype)
    shapes = [(count, 2, size, d) if heads_first else (count, size, 2, d) for d in dims]
    made = [rng.standard_normal(s).astype(kind) for s in shapes]
    return [x.swapaxes(1, 2) if heads_first else x for x in made]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("layout", ["bhld", "blhd", "lhd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_tokens_are_where_the_table_says_and_nowhere_else(rng, dtype, layout, kind):
    def given(x):
        if kind == "numpy":
            return x
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(x)

    pages = pages_of(rng, dtype, heads_first=layout == "blhd")
    table = np.array([[3, 7, 1, -9], [0, 99, 4, 5], [11, 2, 8, 6]])
    table[1, 1] = 10
    lengths = torch.tensor([4, 0, 9]) if kind == "torch" else [4, 0, 9]
    flat = [[x[t].reshape(-1, *x.shape[2:])[:n] for t, n in zip(table, (4, 0, 9), strict=True)] for x in pages]
    want = [x.copy() for x in pages]
    for counts in ([3, 2, 1], [0, 6, 5], [1, 1, 1], [0, 0, 0]):
        new = [rng.standard_normal((sum(counts), 2, x.shape[3])).astype(x.dtype) for x in pages]
        ends = np.cumsum([0, *counts])
        for x, tokens, to in zip(flat, new, want, strict=True):
            for item, (a, b) in enumerate(itertools.pairwise(ends)):
                for n, token in enumerate(tokens[a:b], len(x[item])):
                    to[table[item, n // 5], n % 5] = token
                x[item] = np.concatenate([x[item], tokens[a:b]])
        if layout != "lhd":
            padded = [np.full((3, max(counts), 2, x.shape[3]), np.nan, x.dtype) for x in pages]
            for x, tokens in zip(padded, new, strict=True):
                for item, (a, b) in enumerate(itertools.pairwise(ends)):
                    x[item, : b - a] = tokens[a:b]
            new = [x.transpose(LAYOUTS[layout]) for x in padded]
        some = None if counts == [1, 1, 1] else counts
        tokens = [given(np.ascontiguousarray(x)) for x in new]
        lengths = sl.append_paged(*map(given, pages), table, lengths, *tokens, new_lengths=some, layout=layout)
        assert list(lengths) == [len(x) for x in flat[0]]
        assert [x.tobytes() for x in pages] == [x.tobytes() for x in want]
    assert isinstance(lengths, torch.Tensor) == (kind == "torch")
    q = rng.standard_normal((3, 4, 1, 16)).astype(pages[0].dtype)
    out = sl.attention_paged(given(q), *map(given, pages), table, lengths)
    for item in range(3):
        keys = [x[item].swapaxes(0, 1)[None] for x in flat]
        exact = sl.attention(q[item : item + 1], *keys)
        mine = out[item : item + 1]
        mine = mine.view(torch.int16).numpy() if dtype == "bfloat16" and kind == "torch" else np.asarray(mine)
        assert mine.tobytes() == exact.tobytes()


def test_lengths_come_back_as_they_were_given(rng):
    k, v = pages_of(rng, "float32", count=40, size=16)
    x, y = np.ones((1, 2, 9, 16), np.float32), np.ones((1, 2, 9, 17), np.float32)
    table = np.arange(40)[None]
    for given, kind in (([120], list), ((120,), list), (np.array([120], np.int8), np.ndarray)):
        after = sl.append_paged(k, v, table, given, x, y)
        assert type(after) is kind and [int(n) for n in after] == [129]
    short = sl.append_paged(k, v, table, np.array([7], np.uint16), x, y)
    for kind in (torch.int8, torch.uint8):
        after = sl.append_paged(k, v, table, torch.tensor([torch.iinfo(kind).max], dtype=kind), x, y)
        assert after.dtype == torch.int64 and after.tolist() == [torch.iinfo(kind).max + 9]
    assert short.dtype == np.uint16 and sl.append_paged(k, v, table, torch.tensor([7]), x, y).tolist() == [16]


def test_new_tokens_may_lie_in_the_pages(rng):
    """What is appended is what stood there before the call."""
    k, v = pages_of(rng, "float32", count=3, size=4)
    new = [x.reshape(12, 2, -1)[2:8] for x in (k, v)]
    want = [x.copy() for x in new]
    sl.append_paged(k, v, [[0, 1, 2]], [4], *new, layout="lhd")
    assert [x.reshape(12, 2, -1)[4:10].tobytes() for x in (k, v)] == [x.tobytes() for x in want]
    k, v = pages_of(rng, "float32", count=3, size=4, dims=(16, 16))
    lies_in_keys = k.reshape(12, 2, -1)[2:8]  # written before values are
    want, new = lies_in_keys.copy(), rng.standard_normal((6, 2, 16)).astype(np.float32)
    sl.append_paged(k, v, [[0, 1, 2]], [4], new, lies_in_keys, layout="lhd")
    assert v.reshape(12, 2, -1)[4:10].tobytes() == want.tobytes()


@pytest.mark.parametrize("page_size", [1, 64, 127, 130])
def test_long_prompts_by_several_threads(rng, monkeypatch, page_size):
    """Pages of any size, on cache lines or not, with elements side by side or apart; heads that adjoin, or not."""
    monkeypatch.setattr(putting, "_STREAM_BYTES", 0)
    sl.set_threads(2)
    n, before = 1100, 5
    count = -(-(n + before) // page_size) + 2
    table = rng.permutation(count)[None]
    for shift, apart, layout in ((0, 1, "bhld"), (1, 1, "blhd"), (0, 2, "bhld"), (0, 1, "lhd")):
        size = count * page_size * 2 * 32 * apart
        room = np.zeros((2, size + 16), np.float32)
        at = -room.ctypes.data % 64 // 4 + shift
        k_pages, v_pages = (x[at % 16 :][:size].reshape(count, page_size, 2, 32 * apart)[..., ::apart] for x in room)
        k, v = rng.standard_normal((2, 1, n, 2, 32), np.float32)
        given = [x[0] if layout == "lhd" else x.transpose(LAYOUTS[layout]).copy() for x in (k, v)]
        sl.append_paged(k_pages, v_pages, table, [before], *given, layout=layout, new_lengths=[n])
        for x, pages in ((k, k_pages), (v, v_pages)):
            rows = pages[table[0]].reshape(-1, 2, 32)
            assert rows[before : before + n].tobytes() == x[0].tobytes()
            assert not rows[:before].any() and not rows[before + n :].any()
        if apart == 2:
            assert room.any() and not room[:, at % 16 :][:, 1:size:2].any()


def test_autograd_hears_of_it(rng):
    """What was saved for a backward pass and is written to must not give gradients."""
    pages, w = torch.zeros(2, 4, 1, 8), torch.ones(2, 4, 1, 8, requires_grad=True)
    flow, new = (w * pages).sum(), torch.ones(1, 1, 3, 8)
    sl.append_paged(pages, torch.zeros(2, 4, 1, 8), [[1, 0]], [0], new, new)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        flow.backward()


def arguments(rng) -> dict[str, Any]:
    k, v = pages_of(rng, "float32", count=6, size=4)
    x = rng.standard_normal((2, 2, 3, 16)).astype(np.float32)
    y = rng.standard_normal((2, 2, 3, 17)).astype(np.float32)
    return {"k_pages": k, "v_pages": v, "block_table": [[0, 5], [2, 1]], "k_lengths": [3, 0], "k": x, "v": y}


def expanded():
    return np.lib.stride_tricks.as_strided(np.ones(17, np.float32), (6, 4, 2, 17), (0, 0, 0, 4))


def frozen(x):
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_lengths": [6, 0]}, r"k_lengths: sequence 0 has 6 keys, 3 new ones need room, 2 of 8 are free\. Give"),
        ({"k_lengths": [3, 9]}, "k_lengths: expected lengths from 0 to 8"),
        ({"k_lengths": [3]}, "k_lengths: expected 2 lengths"),
        ({"k_lengths": None}, "k_lengths: expected 2 lengths, one per row of block_table; got None"),
        ({"block_table": [[0, 6], [2, 1]]}, r"block_table: expected pages from 0 to 5 where new .* got 6 at \[0, 1\]"),
        ({"block_table": [[0, -1], [2, 1]]}, r"got -1 at \[0, 1\]"),
        ({"block_table": [[0, 5], [5, 1]]}, "got page 5 where sequences 0 and 1 grow"),
        ({"block_table": [[0, 5.0], [2, 1]]}, "block_table: expected ints"),
        ({"new_lengths": [4, 0]}, "new_lengths: expected 0 to 3, the tokens in k; got 4 for sequence 0"),
        ({"new_lengths": [1]}, "new_lengths: expected 2 ints"),
        ({"k": np.ones((2, 2, 3, 15), np.float32)}, r"k: expected shape \(2, 2, n_new, 16\) for layout='bhld'"),
        ({"v": np.ones((2, 2, 2, 17), np.float32)}, r"v: expected shape \(2, 2, 3, 17\)"),
        ({"k": np.ones((1, 2, 3, 16), np.float32)}, "k: expected shape"),
        ({"layout": "lhd"}, r"k: expected shape \(n_new, 2, 16\)"),
        ({"layout": "abc"}, "layout: expected"),
        ({"layout": "hld"}, "layout: expected 'bhld', 'blhd' or 'lhd', which say whose tokens they are; got 'hld'"),
        ({"k": np.ones((2, 2, 3, 16), np.float16)}, "k: expected dtype float32, as k_pages has; got float16"),
        ({"v_pages": np.ones((6, 4, 2, 17), np.float64)}, "v_pages: expected dtype float32, as k_pages has"),
        ({"v_pages": np.ones((5, 4, 2, 17), np.float32)}, "v_pages: expected shape"),
        ({"k_pages": np.ones((6, 4, 16), np.float32)}, "k_pages: expected shape"),
        ({"k": torch.ones(2, 2, 3, 16)}, "k: expected the same kind of array as k_pages; got torch beside numpy"),
        ({"k_pages": frozen(np.ones((6, 4, 2, 16), np.float32))}, "k_pages: expected memory that can be written"),
        ({"v_pages": expanded()}, "v_pages: expected memory of its own for every token"),
        ({"engine": "tpu"}, "engine: expected"),
    ],
)  # fmt: skip
def test_nothing_is_written_where_anything_is_wrong(rng, change, message):
    given = arguments(rng) | change
    before = [np.array(given[n]).tobytes() for n in ("k_pages", "v_pages")]
    with pytest.raises(sl.Error, match=message):
        sl.append_paged(**given)
    assert [np.array(given[n]).tobytes() for n in ("k_pages", "v_pages")] == before
    assert sl.append_paged(**arguments(rng)) == [6, 3]


def test_the_same_memory_twice_is_refused(rng):
    given = arguments(rng)
    given |= {"v_pages": given["k_pages"], "v": given["k"]}
    with pytest.raises(sl.ArgumentError, match="v_pages: expected memory of its own; got some of k_pages'"):
        sl.append_paged(**given)
    more = np.zeros((7, 4, 2, 16), np.float32)
    for k, v in ((more[:6], more[1:]), (more[:6], more[:6, ::-1]), (more[:6], more[5::-1])):
        with pytest.raises(sl.ArgumentError, match="v_pages: expected memory of its own; got some of k_pages'"):
            sl.append_paged(**(given | {"k_pages": k, "v_pages": v}))
    of_themselves = np.lib.stride_tricks.as_strided(more, (6, 4, 2, 16), (256, *more.strides[1:]))
    with pytest.raises(sl.ArgumentError, match="k_pages: expected memory of its own for every token; got pages that"):
        sl.append_paged(**(given | {"k_pages": of_themselves, "v_pages": np.zeros_like(more[:6])}))
    assert not more.any()
    halves = np.zeros((6, 4, 2, 32), np.float32)
    sl.append_paged(**(given | {"k_pages": halves[..., :16], "v_pages": halves[..., 16:]}))
    assert halves[5, 0, 0].tobytes() == 2 * given["k"][0, 0, 1].tobytes()
    both = np.zeros((6, 2, 4, 2, 16), np.float32)  # which interleaved pages are not
    sl.append_paged(**(given | {"k_pages": both[:, 0], "v_pages": both[:, 1]}))
    assert both[5, 0, :2].tobytes() == both[5, 1, :2].tobytes() == given["k"][0, :, 1:].swapaxes(0, 1).tobytes()
    with pytest.raises(sl.CacheFull) as caught:
        sl.append_paged(**(arguments(rng) | {"k_lengths": [7, 0]}))
    assert (caught.value.needed, caught.value.free) == (3, 1)


def test_arguments_of_any_type(rng):
    """A speedlight error that writes nothing, or an answer."""
    for name in (*arguments(rng), "new_lengths", "layout", "engine"):
        for wrong in WRONG:
            given = arguments(rng) | {name: wrong}
            before = [np.array(given[n]).tobytes() for n in ("k_pages", "v_pages") if n != name]
            try:
                sl.append_paged(**given)
            except sl.Error as error:
                assert str(error), f"{name}={wrong!r}"
                assert [np.array(given[n]).tobytes() for n in ("k_pages", "v_pages") if n != name] == before
