"""attention_paged() over anybody's pages: the bits of contiguous keys; what is wrong is named."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import FULL
from problems import DTYPES, numpy_dtype

import speedlight as sl

SIZES = (1, 3, 16, 33, 256)
CALLS = [  # how many queries, and options
    (1, {}),
    (3, {"causal": True}),
    (40, {"causal": True}),
    (2, {"mask": sl.window(70, 0)}),
    (5, {"causal": True, "window": (30, None)}),
    (5, {"window": (3, 7), "q_start": [250, 2, 100], "q_lengths": [5, 0, 3]}),
    (5, {"causal": True, "q_start": 100, "q_lengths": [5, 4, 1]}),
    (5, {"causal": "top-left", "window": (2, 0), "q_lengths": [5, 2, 0]}),
    (5, {"q_lengths": [0, 5, 2], "causal": True, "mask": sl.dilated(3), "window": (40, 0), "score": sl.softcap(2.0)}),
]
FURTHER = {1: CALLS[5:6], 256: CALLS[7:8]}  # beside the first four, of a short run


@pytest.mark.units
@pytest.mark.each("dtype", "page_size")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", SIZES)
def test_raw_pages_have_the_bits_of_contiguous_keys(isa, one_width, rng, dtype, page_size):
    """Options mean what they mean to attention(), of padded queries and of packed ones."""
    lengths, count = [300, 0, 1025], 1400 // page_size + 6
    kind, order = numpy_dtype(dtype), rng.permutation(count)
    need = [-(-n // page_size) for n in lengths]
    table = np.full((3, max(need) + 1), -7, np.int32)
    for item, n in enumerate(need):
        table[item, :n], order = order[:n], order[n:]
    for d, dv, heads_first in ((16, 16, False), (33, 40, True)):
        pages = [rng.standard_normal((count, page_size, 2, x)).astype(kind) for x in (d, dv)]
        if heads_first:
            pages = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in pages]
        whole = [
            [x[row[: -(-n // page_size)]].reshape(-1, 2, x.shape[3])[:n].swapaxes(0, 1)[None] for x in pages]
            for row, n in zip(table, lengths, strict=True)
        ]
        for n, options in CALLS if FULL else CALLS[:4] + FURTHER.get(page_size, []):
            q = rng.standard_normal((3, 4, n, d)).astype(kind)
            check(q, pages, (table, lengths), whole, options)


def check(q, pages, places, whole, options):
    """Against attention() of each sequence, whose keys and values are `whole`; then packed."""
    out, lse = sl.attention_paged(q, *pages, *places, return_lse=True, **options)
    rows, starts = options.get("q_lengths", [q.shape[2]] * 3), options.get("q_start")
    for item, (n, keys) in enumerate(zip(rows, whole, strict=True)):
        mine = {name: x for name, x in options.items() if name not in ("q_start", "q_lengths")}
        if starts is not None:
            mine["q_start"] = starts if isinstance(starts, int) else starts[item]
        want, want_lse = sl.attention(q[item : item + 1, :, :n], *keys, return_lse=True, **mine)
        assert out[item, :, :n].tobytes() == want.tobytes() and lse[item, :, :n].tobytes() == want_lse.tobytes()
        assert not out[item, :, n:].any() and np.isneginf(lse[item, :, n:]).all()
    packed, want = (np.concatenate([x[:, :n].swapaxes(0, 1) for x, n in zip(y, rows, strict=True)]) for y in (q, out))
    mine = {name: x for name, x in options.items() if name != "q_lengths"}
    cu = np.cumsum([0, *rows])
    got = sl.attention_paged(packed, *pages, *places, layout="lhd", cu_seqlens_q=cu, **mine)
    assert got.tobytes() == want.tobytes()


@pytest.mark.units
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_of_pages_may_lie_unlike(isa, one_width, rng, dtype):
    """Rows of keys are side by side while columns of values are apart, and the other way round."""
    kind, table = numpy_dtype(dtype), np.array([[4, 1, 3], [2, 0, -9]])
    pages = [rng.standard_normal((6, 7, 2, 16)).astype(kind) for _ in range(2)]
    apart = [np.ascontiguousarray(x.transpose(3, 0, 1, 2)).transpose(1, 2, 3, 0) for x in pages]
    for n in (1, 5, 40):
        q = rng.standard_normal((2, 4, n, 16)).astype(kind)
        want, got, turned = (
            sl.attention_paged(q, k, v, table, [20, 11]) for k, v in (pages, (pages[0], apart[1]), (apart[0], pages[1]))
        )
        assert got.tobytes() == turned.tobytes() == want.tobytes(), n


@pytest.mark.parametrize("batch", [1, 2])
def test_negated_tensors_are_refused_of_one_row_and_of_several(batch):
    torch = pytest.importorskip("torch")
    pages, q = torch.ones(9, 16, 2, 16), torch.ones(batch, 4, 1, 16)
    table, lengths = torch.tensor([[0, 5], [2, 1]])[:batch], torch.tensor([20, 32])[:batch]
    negated = torch._neg_view(-table), torch._neg_view(-lengths)
    with pytest.raises(sl.ArgumentTypeError, match=r"^block_table: .* Use block_table\.resolve_neg\(\)\.$"):
        sl.attention_paged(q, pages, pages, negated[0], lengths)
    with pytest.raises(sl.ArgumentTypeError, match=r"^k_lengths: .* Use k_lengths\.resolve_neg\(\)\.$"):
        sl.attention_paged(q, pages, pages, table, negated[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": [[0, 5], [1, 2]]}, r"block_table: expected pages from 0 to 4; got 5 at \[0, 1\]"),
        ({"block_table": [[0, -1], [1, 2]]}, r"block_table: expected pages from 0 to 4; got -1 at \[0, 1\]"),
        ({"block_table": [[0, 2**63], [1, 2]]}, "block_table: expected"),
        ({"block_table": np.array([[0, 2**63], [1, 2]], np.uint64)}, r"got 9223372036854775808 at \[0, 1\]"),
        ({"block_table": [[0.0, 1.0], [1, 2]]}, "block_table: expected ints"),
        ({"block_table": [0, 1]}, r"block_table: .*; got list of int64, shape \(2,\)\. Of one .* \[block_table\]"),
        ({"block_table": np.ones(2, int)}, r"block_table: .* write \[block_table\]"),
        ({"block_table": np.ones((2, 2))}, r"block_table: .* Try numpy.asarray\(block_table, int\)"),
        ({"block_table": None}, r"block_table: expected ints of shape \(batch, most pages\); got NoneType\.$"),
        ({"block_table": [[0, 1], [2]]}, "block_table: expected an array of ints, .* got rows of 1 to 2. Fill short"),
        ({"block_table": [[0, 1]]}, "k_lengths: expected 1 lengths"),
        ({"k_lengths": [5, 9]}, "k_lengths: expected lengths from 0 to 8"),
        ({"k_lengths": [5, -1]}, "k_lengths: expected lengths from 0"),
        ({"k_lengths": None}, "k_lengths: expected 2 lengths, one per row of block_table; got None"),
        ({"k_pages": np.ones((5, 4, 8), np.float32)}, "k_pages: expected shape"),
        ({"k_pages": np.ones((2, 5, 4, 2, 8), np.float32)}, r"k_pages: .* write kv_cache\[0\] and kv_cache\[1\]"),
        ({"k_pages": np.ones((5, 2, 4, 2, 8), np.float32)}, r"k_pages: .* kv_cache\[:, 0\] and kv_cache\[:, 1\]"),
        ({"k_pages": np.ones((0, 4, 2, 8)), "v_pages": np.ones((0, 4, 2, 8)), "q": np.ones((2, 4, 1, 8))}, "no page"),
        ({"kv_layout": "HND"}, r"kv_layout: .* k_pages.swapaxes\(1, 2\)"),
        ({"v_pages": np.ones((4, 4, 2, 8), np.float32)}, r"v_pages: expected shape \(5, 4, 2, value_dim\), as k_pages"),
        ({"v_pages": np.ones((5, 4, 2, 8), np.float64)}, "v_pages: expected dtype float32"),
        ({"q": np.ones((2, 4, 1, 9), np.float32)}, "q: expected head_dim 8"),
        ({"q": np.ones((1, 4, 1, 8), np.float32)}, "q: expected batch 2"),
        ({"q": np.ones((2, 3, 1, 8), np.float32)}, "q: expected a multiple of 2 heads, the kv heads of k_pages; got 3"),
        ({"q_start": [1]}, r"q_start: expected one int, or 2 \(one per batch item\); got 1"),
        ({"q_lengths": [1]}, "q_lengths: expected 2 lengths"),
        ({"q_lengths": [1, 2]}, "q_lengths: expected lengths from 0 to 1"),
        (
            {"q": np.ones((2, 4, 8), np.float32), "layout": "lhd", "q_lengths": [1, 1]},
            "q_lengths: expected None for layout='lhd'; packed sequences have cu_seqlens_q",
        ),
        ({"cu_seqlens_q": [0, 1, 2]}, "cu_seqlens_q: expected None"),
        (
            {"q": np.ones((3, 4, 8), np.float32), "layout": "lhd"},
            "q: expected 2 rows, a query for each sequence; got 3 .* give cu_seqlens_q=",
        ),
        (
            {"q": np.ones((3, 4, 8), np.float32), "layout": "lhd", "cu_seqlens_q": [0, 3]},
            "cu_seqlens_q: expected 3 entries",
        ),
    ],
)
def test_wrong_raw_pages(change, message):
    pages = np.ones((5, 4, 2, 8), np.float32)
    arguments = {
        "q": np.ones((2, 4, 1, 8), np.float32),
        "k_pages": pages,
        "v_pages": pages,
        "block_table": [[0, 1], [2, 3]],
        "k_lengths": [5, 8],
    }
    sl.attention_paged(**arguments)
    with pytest.raises(sl.Error, match=message):
        sl.attention_paged(**(arguments | change))
