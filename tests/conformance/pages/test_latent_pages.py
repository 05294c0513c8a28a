"""Latent attention over pages: a pair of pages, and values in the keys' pages, have the bits of copies."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import FULL
from latents import PLACES, draw_latents, laid
from problems import DTYPES
from tolerance import assert_within

import speedlight as sl
from speedlight.host.machine import current_isa


@pytest.mark.units("dtype")
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages(isa, one_width, rng, dtype):
    """Pages of any size, in any order, wherever their parts lie; padded and packed queries."""
    sizes = ((1, 1, 7), (5, 16, 300), (40, 64, 300), (1, 64, 1100), (17, 3, 129))
    for n, (q_len, page_size, k_len) in enumerate(sizes):
        p = draw_latents(rng, dtype, q_len, k_len, widths=(33, 5) if n % 2 else (64, 16), heads=(1 + n % 2, 3))
        lengths = [k_len] + [max(1, k_len - 5)] * (len(p.q) - 1)
        table, parts = paged(rng, p, page_size, lengths)
        pages, columns = parts[0].reshape(-1, page_size, *parts[0].shape[2:]), p.value_dim
        whole = np.concatenate(parts, -1)
        options = {"causal": True, "return_lse": True}
        want = sl.attention_paged(p.q, whole, pages[..., :columns].copy(), table, lengths, **options)
        for place in PLACES if FULL else (PLACES[n],):
            pair = laid(parts, place, rng)
            for keys, values, named in (
                (pair, None, {"value_dim": columns}),
                (pair, pair[0][..., :columns], {}),
                (whole, None, {"value_dim": columns}),
                (whole, whole[..., :columns], {}),
            ):
                got = sl.attention_paged(p.q, keys, values, table, lengths, **named, **options)
                assert [x.tobytes() for x in got] == [x.tobytes() for x in want], (n, place)
        k, v = (np.stack([x[table[i]].reshape(-1, *x.shape[2:])[:k_len] for i in range(len(p.q))]).swapaxes(1, 2)
                for x in (whole, pages[..., :columns]))  # fmt: skip
        given = {"k_lengths": lengths, "q_lengths": [q_len] * len(p.q), "causal": True}
        exact = sl.reference.attention(p.q, k, v, **given)
        bounds = sl.reference.error_bound(p.q, k, v, dot=current_isa().dot(p.q.dtype), **given)
        assert_within(want[0], exact, bounds.out)


def paged(rng, p, page_size, lengths):
    """Both parts of the tokens in pages of any order, NaN past each sequence's own, and their block table."""
    each = -(-max(lengths) // page_size)
    order = rng.permutation(len(lengths) * each).reshape(len(lengths), each)
    parts = []
    for x in (p.latent, p.rotary):
        pages = np.full((order.size, page_size, x.shape[1], x.shape[3]), np.nan, x.dtype)
        for i, length in enumerate(lengths):
            tokens = np.full((each * page_size, *pages.shape[2:]), np.nan, x.dtype)
            tokens[:length] = x[min(i, len(x) - 1)].swapaxes(0, 1)[:length]
            pages[order[i]] = tokens.reshape(each, page_size, *pages.shape[2:])
        parts.append(pages)
    return order, (parts[0], parts[1])
