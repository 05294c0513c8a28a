"""flash_attn_with_kvcache(): appends in place, attends, and leaves the cache alone if it fails."""

from __future__ import annotations

import flash
import pytest
import torch
from flash import agree, close, infinite, made

import speedlight as sl
import speedlight.flash_attn as fa
from speedlight.flash_attn import v3

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels

D, HEADS, KV = 16, 4, 2


class Room:
    """A cache, contiguous or paged, and what a plain reading of the documentation makes of it."""

    def __init__(self, paged: bool, rows: list[int] | None = None, batch: int = 3) -> None:
        torch.manual_seed(5)
        self.rows = list(range(batch)) if rows is None else rows
        self.table = torch.tensor([[6, 1, 3], [0, 2, 7], [5, 4, 8]], dtype=torch.int32) if paged else None
        shape = (9, 4, KV, D) if paged else (5, 12, KV, D)
        self.k, self.v = torch.randn(shape), torch.randn(shape)
        self.given = self.k.clone(), self.v.clone()

    def slot(self, item: int, at: int) -> tuple[int, int]:
        row = self.rows[item]
        return (row, at) if self.table is None else (int(self.table[row, at // 4]), at % 4)

    def put(self, item: int, at: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Into the copies."""
        for x, y in zip(self.given, (k, v), strict=True):
            x[self.slot(item, at)] = y.to(x.dtype)

    def read(self, item: int, start: int, stop: int) -> list[torch.Tensor]:
        places = [self.slot(item, n) for n in range(start, stop)]
        return [torch.stack([x[p] for p in places]) if places else x[0, :0] for x in self.given]

    def options(self) -> dict:
        options = {} if self.table is None else {"block_table": self.table}
        picked = {} if self.rows == [0, 1, 2] else {"cache_batch_idx": torch.tensor(self.rows, dtype=torch.int32)}
        return options | picked


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.arange(12)[:, None] * 10.0 ** -torch.arange(8)
    return t.cos(), t.sin()


CASES = {
    "one token": {"n": 1, "sq": 1},
    "causal": {"n": 3, "sq": 3, "causal": True},
    "causal, fewer queries": {"n": 3, "sq": 2, "causal": True, "window": (2, -1), "softcap": 1.5, "scale": 0.2},
    "turned, causal": {"n": 3, "sq": 3, "causal": True, "rotary": True},
    "turned, a window, in halves": {"n": 2, "sq": 3, "window": (4, 1), "rotary": False},
    "turned, all queries alike": {"n": 3, "sq": 3, "rotary": True},
    "turned in halves, slopes": {"n": 1, "sq": 1, "rotary": False, "slopes": True},
    "nothing new": {"n": 0, "sq": 2, "causal": True},
}


@pytest.mark.parametrize(
    "where", ["contiguous", "rows", "paged", "left padding", "rows, left padding", "paged, rows, left padding"]
)
@pytest.mark.parametrize("name", CASES)
def test_appends_and_attends(name, where):
    case = dict(CASES[name])
    n, sq, rotary, slopes = case.pop("n"), case.pop("sq"), case.pop("rotary", None), case.pop("slopes", None)
    paged, padded = "paged" in where, "left padding" in where
    room = Room(paged, ([2, 0, 1] if paged else [4, 0, 2]) if "rows" in where else None)
    q, k, v = made(11, (3, sq, HEADS, D), (3, n, KV, D), (3, n, KV, D))
    before, pads = [5, 3, 9] if padded else [5, 0, 9], [0, 0, 0]
    options = {"cache_seqlens": torch.tensor(before, dtype=torch.int32), **room.options()}
    if padded:
        pads = [2, 3, 0]
        options["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    if n:
        options |= {"k": k, "v": v}
    cos, sin = angles()
    if rotary is not None and n:
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary}
    if slopes:
        slopes = options["alibi_slopes"] = torch.rand(3, HEADS)
    said = {"softmax_scale": case.get("scale"), "causal": case.get("causal", False)}
    said |= {"window_size": case.get("window", (-1, -1)), "softcap": case.get("softcap", 0.0)}
    out, lse = fa.flash_attn_with_kvcache(q, room.k, room.v, **options, **said, return_softmax_lse=True)
    moves = case.get("causal") or "window" in case
    for item, start in enumerate(before):
        own_k, own_q = k[item].double(), q[item].double()
        if rotary is not None and n:
            own_k = flash.turned(own_k, cos, sin, list(range(start, start + n)), rotary)
            own_q = flash.turned(own_q, cos, sin, [start + i * bool(moves) for i in range(sq)], rotary)
        for i in range(n):
            room.put(item, start + i, own_k[i], v[item, i])
        keys, values = room.read(item, pads[item], start + n)
        own = None if slopes is None else slopes[item]
        true_out, true_lse = flash.attended(own_q, keys, values, slopes=own, **case)
        agree((out[item], lse[item]), (true_out, infinite(true_lse)))
    for x, y in zip((room.k, room.v), room.given, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)
    assert options["cache_seqlens"].tolist() == before


@pytest.mark.parametrize("paged", [False, True])
def test_version_3_takes_packed_tokens(paged):
    """Beside pages with picked rows and padding on the left."""
    room = Room(paged, [1, 2, 0] if paged else None)
    q, k, v = made(12, (6, HEADS, D), (4, KV, D), (4, KV, D))
    cu_q, cu_new, before, spin = flash.offsets(1, 3, 2), flash.offsets(2, 0, 2), [5, 1, 9], [3, 0, 1]
    cos, sin = angles()
    pads = [2, 0, 4] if paged else [0, 0, 0]
    table = {"page_table": room.table, "cache_batch_idx": torch.tensor(room.rows)} if paged else {}
    table |= {"cache_leftpad": torch.tensor(pads, dtype=torch.int32)} if paged else {}
    out, lse, *rest = v3.flash_attn_with_kvcache(
        q, room.k, room.v, k, v, None, cos, sin, torch.tensor(before), cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new,
        rotary_seqlens=torch.tensor(spin), causal=True, rotary_interleaved=False, return_softmax_lse=True, **table,
    )  # fmt: skip
    assert [x.numel() for x in rest] == [0, 0]
    for item, start in enumerate(before):
        rows, new = slice(*cu_q[item : item + 2]), slice(*cu_new[item : item + 2])
        count = int(cu_new[item + 1] - cu_new[item])
        own_k = flash.turned(k[new], cos, sin, list(range(spin[item], spin[item] + count)), False)
        own_q = flash.turned(q[rows], cos, sin, [spin[item] + i for i in range(len(q[rows]))], False)
        for i in range(count):
            room.put(item, start + i, own_k[i], v[new][i])
        true_out, true_lse = flash.attended(own_q, *room.read(item, pads[item], start + count), causal=True)
        agree((out[rows], lse[:, rows]), (true_out, true_lse))
    torch.testing.assert_close(room.k, room.given[0], atol=1e-6, rtol=1e-6)


def test_version_3_adds_scores_of_values():
    room = Room(False)
    q, qv, k, v = made(13, (3, 2, HEADS, D), (3, 2, HEADS, D), (3, 2, KV, D), (3, 2, KV, D))
    out = v3.flash_attn_with_kvcache(q, room.k, room.v, k, v, qv, cache_seqlens=4, causal=True)
    for item in range(3):
        for i in range(2):
            room.put(item, 4 + i, k[item, i], v[item, i])
        close(out[item], flash.attended(q[item], *room.read(item, 0, 6), qv=qv[item], causal=True)[0])


def test_default_length_is_all_there_is():
    room = Room(False)
    (q,) = made(14, (3, 1, HEADS, D))
    close(fa.flash_attn_with_kvcache(q, room.k, room.v)[1], flash.attended(q[1], room.k[1], room.v[1])[0])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("call", [fa.flash_attn_with_kvcache, v3.flash_attn_with_kvcache])
def test_overflow_is_an_error_and_nothing_is_written(call, paged):
    room = Room(paged)
    q, k, v = made(15, (3, 2, HEADS, D), (3, 2, KV, D), (3, 2, KV, D))
    table = {} if not paged else {("block_table" if call is fa.flash_attn_with_kvcache else "page_table"): room.table}
    with pytest.raises(sl.CacheFull, match="sequence 1 has 11 keys, 2 new ones need room, 1 of 12") as error:
        call(q, room.k, room.v, k, v, cache_seqlens=torch.tensor([4, 11, 2]), **table)
    assert (error.value.needed, error.value.free) == (2, 1)
    assert torch.equal(room.k, room.given[0]) and torch.equal(room.v, room.given[1])


WRONG = {
    "cache_seqlens": {"cache_seqlens": None},
    "cache_seqlens ": {"cache_seqlens": 13, "k": None, "v": None},
    "cache_seqlens  ": {"cache_seqlens": torch.tensor([1, 2])},
    "k": {"k": torch.ones(1, 2, KV, D)},
    "v": {"v": torch.ones(3, 2, KV, D + 1)},
    "v ": {"v": None},
    "k ": {"k": torch.ones(3, 2, KV, D, dtype=torch.float64)},
    "v_cache": {"v_cache": torch.ones(5, 11, KV, D)},
    "rotary_cos": {"rotary_cos": torch.ones(12, 8)},
    "rotary_cos ": {"rotary_cos": torch.ones(5, 8), "rotary_sin": torch.ones(5, 8)},
    "cache_batch_idx": {"cache_batch_idx": torch.tensor([0, 1, 5])},
    "cache_batch_idx ": {"cache_batch_idx": torch.tensor([0, 1, 3]), "block_table": torch.zeros(3, 1).int()},
    "block_table": {"block_table": torch.tensor([[0], [1], [5]], dtype=torch.int32)},
    "block_table ": {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
    "cache_leftpad": {"cache_leftpad": torch.tensor([0, 5, 0])},
    "q": {"q": torch.ones(3, 2, 3, D)},  # known only by attention itself, when tokens have been written
    "alibi_slopes": {"alibi_slopes": torch.ones(7)},
    "q ": {"q": torch.ones(3, 2, HEADS, D, requires_grad=True)},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_leave_the_cache_alone(name):
    room = Room(False)
    q, k, v = made(15, (3, 2, HEADS, D), (3, 2, KV, D), (3, 2, KV, D))
    given = {"q": q, "k_cache": room.k, "v_cache": room.v, "k": k, "v": v, "cache_seqlens": 4} | WRONG[name]
    named = "k" if name == "q" else name.strip()
    with pytest.raises(sl.Error, match=f"^{named}: expected"):
        fa.flash_attn_with_kvcache(**given)
    assert torch.equal(room.k, room.given[0]) and torch.equal(room.v, room.given[1])


def test_an_interrupt_puts_the_cache_back(monkeypatch):
    from speedlight.flash_attn import caches

    def interrupted(*_):
        assert not torch.equal(room.k, room.given[0])
        raise KeyboardInterrupt

    room = Room(False)
    q, k, v = made(15, (3, 2, HEADS, D), (3, 2, KV, D), (3, 2, KV, D))
    monkeypatch.setattr(caches, "attend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fa.flash_attn_with_kvcache(q, room.k, room.v, k, v, cache_seqlens=4)
    assert torch.equal(room.k, room.given[0]) and torch.equal(room.v, room.given[1])


def test_what_is_given_may_lie_in_the_cache():
    """It is read before anything is written: new tokens, and queries, from the very slots that they go to."""
    torch.manual_seed(4)
    k, v = torch.randn(2, 8, HEADS, D), torch.randn(2, 8, HEADS, D)
    seen, values = k.clone(), v.clone()
    seen[:, 4:6], values[:, 4:6] = v[:, 4:6], k[:, 3:5]
    expected = fa.flash_attn_with_kvcache(k[:, 4:6].clone(), seen, values, cache_seqlens=6)
    out = fa.flash_attn_with_kvcache(k[:, 4:6], k, v, v[:, 4:6], k[:, 3:5], cache_seqlens=4)
    assert torch.equal(k, seen) and torch.equal(v, values) and torch.equal(out, expected)


ROOM = torch.zeros(3, 8, KV, D)
SHARING = {
    "k_cache, expanded": (ROOM[:1].expand(2, -1, -1, -1), torch.zeros(2, 8, KV, D)),
    "v_cache, expanded": (torch.zeros(2, 8, KV, D), ROOM[:1].expand(2, -1, -1, -1)),
    "v_cache, rows a token apart": (torch.zeros(2, 8, KV, D), ROOM.as_strided((2, 8, KV, D), (KV * D, KV * D, D, 1))),
    "v_cache, which is k_cache": (ROOM[:2], ROOM[:2]),
    "v_cache, a row of k_cache": (ROOM[:2], ROOM[1:]),
}


@pytest.mark.parametrize("name", SHARING)
def test_memory_that_tokens_share_holds_no_new_ones(name):
    k_cache, v_cache = SHARING[name]
    q, k = torch.ones(2, 1, HEADS, D), torch.ones(2, 1, KV, D)
    with pytest.raises(sl.ArgumentError, match=f"^{name.split(',')[0]}: expected memory of its own"):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=3)
    assert not k_cache.any() and not v_cache.any()
    assert fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=3).shape == q.shape


def test_halves_of_one_tensor_are_two_caches():
    room, q, k = torch.zeros(2, 8, KV, 2 * D), torch.ones(2, 1, HEADS, D), torch.ones(2, 1, KV, D)
    fa.flash_attn_with_kvcache(q, room[..., :D], room[..., D:], k, k * 2, cache_seqlens=3)
    assert (room[:, 3, :, :D] == 1).all() and (room[:, 3, :, D:] == 2).all() and room.count_nonzero() == 2 * KV * 2 * D


def test_a_wrong_place_for_results_leaves_the_cache_alone():
    q, k = torch.ones(2, 1, HEADS, D), torch.ones(2, 1, KV, D)
    cache, used = torch.zeros(2, 8, KV, D), torch.tensor([3, 4])
    with pytest.raises(sl.ArgumentError, match="^out_: expected shape"):
        v3._flash_attn_forward(q, cache, cache.clone(), k, k, seqused_k=used, out_=torch.zeros(3, 2, 1, HEADS, D))
    assert not cache.any()
