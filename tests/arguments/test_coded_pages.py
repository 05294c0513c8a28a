"""Wrong pages of codes, and wrong scales, are named, with a way out, before anything is read or written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import numpy_dtype

import speedlight as sl

PAGES, SIZE, HEADS, DIM = 6, 4, 2, 16
F32 = np.float32
E5M2 = numpy_dtype("float8_e5m2")


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, F32)


# what is given, the exception, and what it says
WRONG = [
    ({"k_scales": None}, TypeError, r"k_scales: expected a number or an array of float32 beside pages of int8; got"),
    ({"v_scales": None}, TypeError, r"v_scales: .* got None\. Of codes that are the numbers themselves"),
    ({"k_scales": float("nan")}, ValueError, "k_scales: expected a finite number of float32; got nan"),
    ({"v_scales": -1e39}, ValueError, "v_scales: expected a finite number of float32; got -1e"),
    ({"v_scales": 1e39}, ValueError, "v_scales: expected a finite number of float32; got 1e"),
    ({"k_scales": True}, TypeError, "k_scales: expected a number or an array of float32; got bool"),
    ({"k_scales": "0.5"}, TypeError, "k_scales: expected a NumPy array"),
    ({"k_scales": np.ones(HEADS)}, TypeError, r"k_scales: expected float32; got float64.*astype\('float32'\)"),
    ({"k_scales": ones(1)}, ValueError, r"got \(1,\)\. One scale for all is k_scales\.reshape\(\(\)\)"),
    ({"k_scales": ones(HEADS, PAGES)}, ValueError, r"heads \(2,\), channels \(2, 16\) or tokens and heads \(6, 4, 2\)"),
    ({"k_scales": ones(1, HEADS, 1, DIM)}, ValueError, r"Of channels write k_scales\.reshape\(2, 16\)"),
    ({"k_scales": ones(HEADS * DIM)}, ValueError, r"Of channels write k_scales\.reshape\(2, 16\)"),
    ({"k_scales": ones(HEADS, 1)}, ValueError, r"Of heads write k_scales\.reshape\(2\)"),
    ({"k_scales": ones(PAGES, HEADS, SIZE)}, ValueError, r"Heads come last: k_scales\.swapaxes\(1, 2\)"),
    ({"v_scales": ones(PAGES, SIZE, HEADS, 1)}, ValueError, r"v_scales: .* Write v_scales\[\.\.\., 0\]"),
    ({"k_scales": ones(PAGES, HEADS)}, ValueError, r"numpy\.broadcast_to\(k_scales\[:, None\], \(6, 4, 2\)\)"),
    ({"k_pages": np.ones((PAGES, SIZE, HEADS, DIM), np.uint8)}, TypeError, r"k_pages\.view\(ml_dtypes\.float8"),
    ({"k_pages": np.ones((PAGES, SIZE, HEADS, DIM), np.int16)}, TypeError, "or codes of int8, float8_e4m3fn or"),
    ({"v_pages": ones(PAGES, SIZE, HEADS, DIM)}, TypeError, "v_pages: expected dtype int8, as k_pages has; got fl"),
    ({"v_pages": np.ones((PAGES, SIZE, HEADS, DIM), E5M2)}, TypeError, "v_pages: expected dtype int8, as k_pages has"),
    ({"engine": "cuda"}, ValueError, "q: expected a tensor on a GPU|k_pages: expected pages of float32"),
    ({"k_scales": torch.ones(HEADS, requires_grad=True)}, sl.UnsupportedError, "k_scales: requires grad"),
    ({"k_scales": torch.ones(HEADS, device="meta")}, sl.UnsupportedError, "k_scales: expected a tensor on the CPU"),
]  # fmt: skip
ATTENDING = [
    *WRONG,
    ({"q": np.ones((1, 4, 1, DIM))}, TypeError, "q: expected float32, float16 or bfloat16 over pages of int8; got"),
    ({"v_pages": None, "value_dim": 8}, ValueError, "v_scales: expected None where values are columns of k_pages"),
    ({"v_pages": None, "value_dim": 8, "v_scales": None, "k_pages": "pair"}, sl.UnsupportedError, "codes in one array"),
    ({"k_pages": "floats", "v_pages": "others"}, ValueError, "k_scales: expected None beside k_pages of float32"),
]  # fmt: skip
READ_ONLY = ones(PAGES, SIZE, HEADS)
READ_ONLY.flags.writeable = False
SHARED = ones(PAGES, SIZE, HEADS)
APPENDING = [
    *[x for x in WRONG if "engine" not in x[0]],
    ({"k": np.ones((1, HEADS, 1, DIM))}, TypeError, "k: expected float32, float16 or bfloat16, to be stored as int8"),
    ({"k": np.ones((1, HEADS, 1, DIM), np.int8)}, TypeError, "k: expected dtype float32, float64, float16 or bfloat16"),
    ({"v": np.ones((1, HEADS, 1, DIM), np.float16)}, TypeError, "v: expected dtype float32, as k has; got float16"),
    ({"k_scales": READ_ONLY}, ValueError, "k_scales: expected memory that can be written; got a read-only array"),
    ({"k_scales": np.broadcast_to(ones(HEADS), (PAGES, SIZE, HEADS)).copy()[:, :1].repeat(4, 1)[::-1]}, None, ""),
    ({"k_scales": SHARED, "v_scales": SHARED}, ValueError, "scales: expected memory of its own; got some of v_s"),
    ({"v_pages": None, "v_scales": None, "k": ones(1, HEADS, 1, 8), "v": ones(1, HEADS, 1, 8)}, sl.UnsupportedError,
     "v: expected None beside k_pages of codes, whose rows"),
    (
        {"k_pages": "floats", "v_pages": "others"},
        ValueError,
        "k_scales: expected None beside k_pages of float32",
    ),
]  # fmt: skip


def filled(given):
    pages = {
        "pair": (np.ones((PAGES, SIZE, HEADS, 8), np.int8), np.ones((PAGES, SIZE, HEADS, 8), np.int8)),
        "floats": ones(PAGES, SIZE, HEADS, DIM),
        "others": ones(PAGES, SIZE, HEADS, DIM),
    }
    codes = np.ones((PAGES, SIZE, HEADS, DIM), np.int8)
    named = {name: pages[x] if isinstance(x, str) and x in pages else x for name, x in given.items()}
    return {"k_pages": codes, "v_pages": codes.copy(), "k_scales": 0.5, "v_scales": 0.5} | named


@pytest.mark.parametrize(("given", "kind", "says"), ATTENDING)
def test_attending(given, kind, says):
    with pytest.raises(kind, match=says):
        sl.attention_paged(**{"q": ones(1, 4, 1, DIM), "block_table": [[1]], "k_lengths": [3]} | filled(given))


@pytest.mark.parametrize(("given", "kind", "says"), APPENDING)
def test_appending(given, kind, says):
    named = filled(given)
    held = [np.array(named[x]) for x in ("k_pages",)]
    x = ones(1, HEADS, 1, DIM)
    call = {"k": x, "v": x, "block_table": [[1]], "k_lengths": [3]} | named
    if kind is None:
        sl.append_paged(**call)
        return
    with pytest.raises(kind, match=says):
        sl.append_paged(**call)
    assert (held[0] == np.array(named["k_pages"])).all()


def test_scales_that_share_memory_are_not_written():
    """A scale for several tokens, by a stride of 0, is for reading alone."""
    named = filled({"k_scales": np.broadcast_to(ones(HEADS), (PAGES, SIZE, HEADS))})
    x = ones(1, HEADS, 1, DIM)
    assert sl.attention_paged(ones(1, 4, 1, DIM), block_table=[[1]], k_lengths=[3], **named).shape == (1, 4, 1, DIM)
    with pytest.raises(sl.ArgumentError, match="k_scales: expected memory that can be written|a place of its own"):
        sl.append_paged(k=x, v=x, block_table=[[1]], k_lengths=[3], **named)
    named["k_scales"] = torch.ones(HEADS).expand(PAGES, SIZE, HEADS)
    with pytest.raises(sl.ArgumentError, match="k_scales: expected a place of its own for every scale; got strides"):
        sl.append_paged(k=x, v=x, block_table=[[1]], k_lengths=[3], **named)


def test_codes_elsewhere_say_where_they_are_taken():
    codes = np.ones((1, 1, 4, 8), np.int8)
    with pytest.raises(sl.ArgumentTypeError, match=r"attention_paged\(k_scales=, v_scales=\) takes pages of them"):
        sl.attention(codes, codes, codes)
