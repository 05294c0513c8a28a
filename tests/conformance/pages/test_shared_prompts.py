"""Prompts that a pool has computed are found again: with the bits of a fresh sequence, and never another's."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest
from conftest import FULL
from pools import check_accounts, packed
from prompts import KINDS, SIZE, append, assert_computed, computed, found_of, made, prompted
from threads import together

import speedlight as sl
from speedlight.kv import pool as pools
from speedlight.kv import prefixes

PROMPT = list(range(100, 150))  # three pages, and two tokens


def make_older(pool, at):
    """Makes a kept page the one that is taken next; `at`: its place from the most recently used one on."""
    assert pool.free_pages
    order = pool._journal.last_use
    kept = [page for page in order if pool._journal.others[page] < 0]
    order.move_to_end([*reversed(kept)][at], last=False)


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", KINDS)
def test_a_match_has_the_bits_of_a_fresh_sequence(rng, dtype):
    pool = made(dtype, layers=2)
    first, found = prompted(pool, PROMPT)
    again, found_again = prompted(pool, PROMPT)
    assert (found, found_again) == (0, 48) and again.pages[:3] == first.pages[:3]
    assert_computed(again, PROMPT)
    q, k, v = packed(rng, dtype, 1)
    want = pool.attend(1, [first], q, k, v, tokens=[7])
    assert pool.attend(1, [again], q, k, v, tokens=[7]).tobytes() == want.tobytes()
    first.free()
    assert again.tokens == [*PROMPT, 7] and again.fork().tokens == again.tokens
    check_accounts(pool, [again])


def test_other_tokens_than_those_looked_up_are_refused():
    """Whoever appends the whole prompt behind what was found would store its beginning twice."""
    pool = made()
    prompted(pool, PROMPT)
    again = pool.sequence(tokens=PROMPT)
    k, v = computed(pool, 0, PROMPT)
    before = again.length(), pool.free_pages
    match = r"expected 148 at position 48 of sequence 0, as the prompt has.*; got 100\. Append what follows length\(\)"
    with pytest.raises(sl.ArgumentError, match=match):
        pool.append(0, [again], k, v, new_lengths=[50], tokens=PROMPT)
    assert (again.length(), pool.free_pages) == before
    append(pool, again, [*PROMPT, 5, 6])  # what comes behind the prompt is free
    other = pool.sequence(tokens=PROMPT)
    other.truncate(16)  # and so are the tokens of a sequence that was cut
    append(pool, other, [*PROMPT[:16], 1, 2])


def test_latents_are_found(rng):
    pool = made(d=27, dv=16, latent=True)
    prompted(pool, PROMPT)
    again, found = prompted(pool, PROMPT)
    assert found == 48
    assert_computed(again, PROMPT)


@pytest.mark.parametrize(
    ("count", "found"), [(0, 0), (1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (50, 48)]
)
def test_a_match_leaves_the_last_token_to_compute(count, found):
    pool = made()
    kept, _ = prompted(pool, PROMPT)
    sequence = pool.sequence(tokens=PROMPT[:count])
    assert sequence.length() == found and sequence.tokens == PROMPT[:found]
    assert sequence.pages == kept.pages[: found // SIZE]


def test_the_longest_prefix_is_found():
    pool = made()
    one, _ = prompted(pool, PROMPT)
    other = [*PROMPT[:20], *range(40)]
    two, found = prompted(pool, other)
    assert found == 16 and two.pages[0] == one.pages[0] and not {*two.pages[1:]} & {*one.pages[1:]}
    assert found_of(pool, other) == 48 and found_of(pool, [0, *PROMPT]) == 0
    assert_computed(one, PROMPT)
    assert_computed(two, other)


EXTRAS = [None, "a", b"a", 1, "1", -1, ("a",), ("a", 1), ("a", "1"), (), ("a, 1",), "None"]


def test_only_an_equal_key_finds_a_page():
    """A tenant cannot tell by a match what another has asked."""
    pool = made(pages=60)
    for extra in EXTRAS:
        sequence, found = prompted(pool, PROMPT, extra)
        assert found == 0 and sequence.extra == extra and type(sequence.extra) is type(extra), extra
    assert [found_of(pool, PROMPT, x) for x in EXTRAS] == [48] * len(EXTRAS)
    assert found_of(pool, PROMPT, "b") == 0
    assert prompted(pool, PROMPT, "a")[0].fork().extra == "a"


def test_a_page_is_found_once_all_layers_have_it():
    pool = made(layers=3)
    sequence = pool.sequence(tokens=PROMPT)
    for layer in (1, 0):
        append(pool, sequence, PROMPT, layers=[layer])
        assert found_of(pool, PROMPT) == 0
    append(pool, sequence, PROMPT[:31], layers=[2])
    assert found_of(pool, PROMPT) == 16
    append(pool, sequence, PROMPT[:32], layers=[2])
    assert found_of(pool, PROMPT) == 32
    check_accounts(pool, [sequence])


@pytest.mark.parametrize("said", [(0,), (2,), (0, 1, 2), (1, 2)])
def test_tokens_may_be_given_in_any_layer(said):
    pool = made(layers=3)
    sequence = pool.sequence()
    for n in (20, 21, 50):
        for layer in range(3):
            append(pool, sequence, PROMPT[:n], layers=[layer], told=layer in said)
    assert sequence.tokens == PROMPT and found_of(pool, PROMPT) == 48
    assert_computed(pool.sequence(tokens=PROMPT), PROMPT[:48])


def test_a_step_may_mix_sequences_with_and_without_tokens(rng):
    """Entries of None are rows of a sequence whose tokens nobody gives; the others are found as if alone."""
    pool = made()
    told, untold, forked = pool.sequence(tokens=PROMPT), pool.sequence(), append(pool, pool.sequence(), PROMPT[:20])
    k, v = (np.concatenate([x, x[:3], x[:5]]) for x in computed(pool, 0, PROMPT))
    q = packed(rng, "float32", 58)[0]
    before = forked.tokens
    pool.attend(0, [told, untold, forked], q, k, v, new_lengths=[50, 3, 5], tokens=[*PROMPT, *[None] * 3, *[None] * 5])
    assert (told.tokens, untold.tokens, forked.tokens) == (PROMPT, [], before)
    assert [x.length() for x in (told, untold, forked)] == [50, 3, 25] and found_of(pool, PROMPT) == 48
    assert_computed(told, PROMPT)
    rows = [x[:2] for x in (q, k, v)]
    pool.attend(0, [untold, told], *rows, tokens=np.array([None, 7]))
    pool.attend(0, [untold, told], *rows, tokens=[None, None])
    assert untold.tokens == [] and told.tokens == [*PROMPT, 7] and told.length() == 52
    with pytest.raises(sl.ArgumentError, match="no call gave the tokens of sequence 1 from position 51 on"):
        pool.attend(0, [untold, told], *rows, tokens=[None, 8])
    check_accounts(pool, [told, untold, forked])


def test_a_freed_sequence_is_named_by_its_argument_or_its_class():
    pool = made()
    gone, x = pool.sequence(), computed(pool, 0, PROMPT[:1])
    gone.free()
    for call in (
        gone.length, gone.fork, gone.free, lambda: gone.truncate(0), lambda: gone.keep([], start=0), lambda: gone.pages,
        lambda: gone.keys(0), lambda: gone.save("a.safetensors"),
    ):  # fmt: skip
        with pytest.raises(sl.ArgumentError, match="^PagedSequence: this sequence was freed"):
            call()
    for call in (lambda: pool.append(0, [gone], *x), lambda: pool.save("a.safetensors", [gone])):
        with pytest.raises(sl.ArgumentError, match="^sequences: this sequence was freed"):
            call()


def test_misspelt_names_are_told_the_right_ones():
    pool = made()
    for call in (
        pool.sequence,
        lambda **x: pool.append(0, [], None, **x),
        lambda **x: pool.sequence().keep([], start=0, **x),
    ):
        with pytest.raises(TypeError, match="Did you mean 'tokens'"):
            call(token=[1])


def test_a_call_that_fails_enters_nothing(rng, monkeypatch):
    pool = made()
    sequence = pool.sequence()
    q, _, _ = packed(rng, "float32", 50)
    k, v = computed(pool, 0, PROMPT)

    def fail(*_, **__):
        raise sl.CompileError("no")

    before = pool.statistics(), pool.free_pages
    with monkeypatch.context() as patch:
        patch.setattr(pool._storage, "attend", fail)
        with pytest.raises(sl.CompileError):
            pool.attend(0, [sequence], q, k, v, tokens=PROMPT)
    assert sequence.tokens == [] and (pool.statistics(), pool.free_pages) == before
    assert found_of(pool, PROMPT) == 0
    pool.attend(0, [sequence], q, k, v, tokens=PROMPT)
    assert found_of(pool, PROMPT) == 48


@pytest.mark.parametrize("at_once", [True, False])
def test_the_second_of_two_that_compute_the_same_keeps_its_own(at_once):
    pool = made()
    both = [pool.sequence(tokens=PROMPT) for _ in range(2)]
    if at_once:
        k, v = (np.concatenate([x, x]) for x in computed(pool, 0, PROMPT))
        pool.append(0, both, k, v, new_lengths=[50, 50], tokens=PROMPT * 2)
    else:
        both = [append(pool, x, PROMPT) for x in both]
    third = pool.sequence(tokens=PROMPT)
    assert not {*both[0].pages} & {*both[1].pages} and third.pages == both[0].pages[:3]
    third.free()
    both[1].free()
    assert pool.statistics()["pages_kept"] == 0 and found_of(pool, PROMPT) == 48
    own = both[0].pages
    both[0].free()
    assert pool.statistics()["pages_kept"] == 3 and pool.sequence(tokens=PROMPT).pages == own[:3]
    check_accounts(pool, [])


def test_pages_stay_until_room_is_needed():
    """The least recently used go first, of a sequence its last page; free pages that are not found go before them."""
    pool = made(pages=8)
    one, two = ([n] * 48 for n in (1, 2))
    for prompt in (one, two):
        prompted(pool, prompt)[0].free()
    assert pool.free_pages == 8 and pool.statistics()["pages_kept"] == 6
    assert found_of(pool, [*one, 0]) == 48  # used since: two is older now
    held = append(pool, pool.sequence(), [3] * 32, told=False)
    assert pool.free_pages == 6 and pool.statistics()["pages_kept"] == 6
    append(pool, held, [3] * 33, told=False)
    assert found_of(pool, [*two, 0]) == 32 and found_of(pool, [*one, 0]) == 48
    check_accounts(pool, [held])
    held.free()
    held = append(pool, pool.sequence(), [4] * 5 * SIZE, told=False)
    assert found_of(pool, [*two, 0]) == 0 and found_of(pool, [*one, 0]) == 48


def test_pages_that_a_sequence_holds_are_never_taken():
    pool = made(pages=5)
    held, _ = prompted(pool, PROMPT[:48])
    freed, _ = prompted(pool, [9] * 32)
    freed.free()
    assert pool.free_pages == 2
    other = pool.sequence()
    with pytest.raises(sl.CacheFull, match="layer 0: 3 pages are needed, 2 of 5 are free") as caught:
        append(pool, other, [8] * 33)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert pool.free_pages == 2 and found_of(pool, [9] * 33) == 32, "a refusal takes nothing"
    append(pool, other, [8] * 32).free()
    assert found_of(pool, [9] * 33) == 0 and found_of(pool, [*PROMPT[:48], 0]) == 48
    assert_computed(held, PROMPT[:48])
    check_accounts(pool, [held])


def test_a_page_is_found_without_those_before_it_once_they_are_computed_anew():
    """Its digest is that of its tokens, not of pages."""
    pool = made(pages=6)
    prompted(pool, PROMPT)[0].free()
    make_older(pool, 0)
    held = append(pool, pool.sequence(), [1] * 4 * SIZE, told=False)
    assert found_of(pool, PROMPT) == 0 and pool.statistics()["pages_kept"] == 2
    held.free()
    sequence, _ = prompted(pool, PROMPT[:SIZE])
    again = pool.sequence(tokens=PROMPT)
    assert again.length() == 48
    assert_computed(again, PROMPT[:48])
    check_accounts(pool, [sequence, again])


def test_equal_digests_are_compared_token_by_token(monkeypatch):
    """Of a digest that tells nothing apart, whatever the order in which pages come and go."""
    monkeypatch.setattr(prefixes, "digest_of", lambda parent, tokens: b"")
    pool, rng = made(pages=12), np.random.default_rng(0)
    for _ in range(300):
        prompt = rng.integers(0, 2, 3).repeat(SIZE).tolist()
        extra = ["a", None][rng.integers(2)]
        sequence = pool.sequence(tokens=[*prompt, 5], extra=extra)
        assert_computed(append(pool, sequence, prompt[: SIZE * int(rng.integers(1, 4))]), sequence.tokens)
        check_accounts(pool, [sequence])
        sequence.free()
        if rng.random() < 0.3:
            make_older(pool, int(rng.integers(pool.statistics()["pages_kept"])))
    assert pool.statistics()["hits"] > 10


def test_a_page_whose_parent_has_an_equal_digest_is_not_found(monkeypatch):
    """[A, B] is there, A goes, C of A's digest comes: B does not follow it."""
    monkeypatch.setattr(prefixes, "digest_of", lambda parent, tokens: b"b" if tokens[0] == 66 else b"ac")
    pool = made(pages=4)
    a, b, c = ([n] * SIZE for n in (65, 66, 67))
    prompted(pool, [*a, *b])[0].free()
    make_older(pool, 0)
    append(pool, pool.sequence(), [1] * 3 * SIZE, told=False).free()
    held, _ = prompted(pool, c)
    assert found_of(pool, [*c, *b, 0]) == 16
    check_accounts(pool, [held])


# --- what changes a page


def test_a_shortened_sequence_takes_the_page_that_it_cuts_out():
    pool = made()
    sequence, _ = prompted(pool, PROMPT)
    pages = sequence.pages
    sequence.truncate(40)
    assert sequence.tokens == PROMPT[:40] and found_of(pool, PROMPT) == 32
    other = [*PROMPT[:40], *range(10)]
    append(pool, sequence, other)
    assert found_of(pool, PROMPT) == 32 and found_of(pool, other) == 48 and sequence.pages[:3] == pages[:3]
    assert_computed(sequence, other)
    sequence.truncate(16)  # whole pages are left as they are
    assert found_of(pool, other) == 48 and pool.statistics()["pages_kept"] == 2
    append(pool, sequence, PROMPT)
    assert_computed(sequence, PROMPT)
    assert_computed(pool.sequence(tokens=[*other, 0]), other[:48])
    check_accounts(pool, [sequence])


def test_a_cut_page_is_found_again_once_it_is_full_again():
    pool = made()
    sequence, _ = prompted(pool, PROMPT)
    sequence.truncate(40)
    append(pool, sequence, PROMPT)
    assert found_of(pool, PROMPT) == 48
    sequence.truncate(0)
    assert sequence.tokens == [] and found_of(pool, PROMPT) == 48


def test_the_last_owner_of_a_page_that_others_cut_writes_nothing_that_is_found():
    """A fork is cut within a page; the one that has all of it goes; the fork writes in place."""
    pool = made()
    whole, _ = prompted(pool, PROMPT)
    fork = whole.fork()
    fork.truncate(40)
    whole.free()
    other = [*PROMPT[:40], *range(10)]
    append(pool, fork, other)
    assert found_of(pool, PROMPT) == 32 and found_of(pool, other) == 48
    assert_computed(fork, other)


def test_a_page_that_a_cut_fork_shares_is_not_entered():
    """It would be found while the fork writes to it."""
    pool = made(layers=2)
    sequence = pool.sequence(tokens=PROMPT)
    append(pool, sequence, PROMPT[:32])
    sequence.keep([n for n in range(31) if n != 3], start=0)
    moved = [x for n, x in enumerate(PROMPT[:31]) if n != 3]
    assert sequence.tokens == moved
    fork = sequence.fork()
    fork.truncate(20)
    for layer in (0, 1):
        pool.append(layer, [sequence], *packed(np.random.default_rng(0), "float32", 2)[1:], new_lengths=[2],
                    tokens=[1, 2])  # fmt: skip
    sequence.free()
    assert found_of(pool, [*moved, 1, 2, 0]) <= 16
    check_accounts(pool, [fork])


def test_a_path_takes_the_pages_that_it_moves_out():
    pool = made(layers=2)
    sequence, _ = prompted(pool, PROMPT[:48])
    sequence.keep([0, 1, 3, 7], start=20)
    left = [*PROMPT[:20], *(PROMPT[20 + n] for n in (0, 1, 3, 7))]
    assert sequence.tokens == left and sequence.length() == 24
    assert found_of(pool, PROMPT) == 16
    assert sequence.keys(1)[:, 22].tobytes() == computed(pool, 1, PROMPT)[0][23].tobytes()
    pool.sequence(tokens=left).free()
    check_accounts(pool, [sequence])


def test_a_path_moves_within_a_copy_of_a_shared_page():
    pool = made()
    sequence, _ = prompted(pool, PROMPT[:48])
    other = pool.sequence(tokens=PROMPT)
    sequence.keep([0, 3], start=20)
    assert_computed(other, PROMPT[:48])
    check_accounts(pool, [sequence, other])


def test_a_path_that_finds_no_room_leaves_the_index_as_it_was():
    pool = made(pages=3)
    sequence, _ = prompted(pool, PROMPT[:48])
    other = pool.sequence(tokens=PROMPT)
    with pytest.raises(sl.CacheFull):
        sequence.keep([0, 3], start=20)
    assert found_of(pool, PROMPT) == 48
    assert_computed(other, PROMPT[:48])
    check_accounts(pool, [sequence, other])


def test_who_writes_to_a_shared_page_copies_it():
    pool = made()
    prompted(pool, PROMPT[:48])[0].free()
    one, two = (pool.sequence(tokens=PROMPT) for _ in range(2))
    one.truncate(40)
    other = [*PROMPT[:40], *range(10)]
    append(pool, one, other)
    assert one.pages[:2] == two.pages[:2] and one.pages[2] != two.pages[2]
    assert_computed(one, other)
    assert_computed(two, PROMPT[:48])
    check_accounts(pool, [one, two])


def test_a_tree_has_no_tokens_and_its_path_has(rng):
    """Guesses beside each other are no prompt; the path is, and its pages are found once it goes on."""
    pool = made()
    sequence = append(pool, pool.sequence(), PROMPT[:30])
    k, v = computed(pool, 0, PROMPT, None, 30)
    tree = [0, 0, 1, 2, 2, 3, 0]  # of each guess its depth
    pool.append(0, [sequence], k[tree], v[tree], new_lengths=[7])
    sequence.keep([1, 2, 4, 5], start=30, tokens=PROMPT[30:34])
    assert sequence.tokens == PROMPT[:34] and found_of(pool, PROMPT) == 16
    append(pool, sequence, PROMPT)
    assert_computed(sequence, PROMPT)
    assert found_of(pool, PROMPT) == 48
    untold = pool.sequence()
    pool.append(0, [untold], k[tree], v[tree], new_lengths=[7])
    untold.keep([1, 2], start=0, tokens=[5, 6])
    assert untold.tokens == [5, 6]


def test_tokens_of_a_path_are_known_as_far_as_they_were():
    pool = made()
    sequence = append(pool, pool.sequence(tokens=[]), PROMPT[:18])
    append(pool, sequence, PROMPT[:25], told=False)
    sequence.keep([0, 2, 4], start=15)
    assert sequence.tokens == [*PROMPT[:15], 115, 117] and sequence.length() == 18
    assert pool.sequence().tokens == [] and pool.sequence().extra is None


# --- statistics and forgetting


def test_statistics_and_forgetting():
    pool = made(layers=2)
    assert pool.statistics() == {"lookups": 0, "hits": 0, "tokens_reused": 0, "pages_kept": 0}
    live, _ = prompted(pool, PROMPT)
    prompted(pool, [1] * 40)[0].free()
    pool.sequence(extra="a")  # asks for nothing
    assert found_of(pool, PROMPT) == 48
    assert pool.statistics() == {"lookups": 3, "hits": 1, "tokens_reused": 48, "pages_kept": 2}
    free = pool.free_pages
    pool.forget()
    assert pool.free_pages == free and pool.statistics()["pages_kept"] == 0
    assert found_of(pool, PROMPT) == found_of(pool, [1] * 40) == 0
    assert_computed(live, PROMPT)
    longer = [*PROMPT, *range(30)]
    append(pool, live, longer)  # computed, it may be, by other weights than what comes
    new, found = prompted(pool, PROMPT)
    assert found == 0 and found_of(pool, longer) == 48, "pages of a sequence from before are not found"
    assert new.pages[0] != live.pages[0]
    check_accounts(pool, [live, new])
    live.free()
    new.free()
    assert pool.statistics()["pages_kept"] == 3 and found_of(pool, PROMPT) == 48


def test_a_page_that_is_filled_while_the_pool_forgets_is_not_found(monkeypatch):
    """As a signal handler or another thread may call it; nor once the digests are collected anew."""
    pool, real = made(), pools.run_packed

    def forgetting(*given):
        result = real(*given)
        pool.forget()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(pools, "run_packed", forgetting)
        sequence, _ = prompted(pool, PROMPT)
    assert found_of(pool, PROMPT) == 0
    pool._journal.places |= {b"%d" % n: 0 for n in range(2 * pool.pages)}
    other, _ = prompted(pool, [1] * 16)
    assert len(pool._journal.places) <= pool.pages and found_of(pool, PROMPT) == 0
    sequence.free()
    assert found_of(pool, PROMPT) == 0 and pool.statistics()["pages_kept"] == 0
    check_accounts(pool, [other])


def test_a_pool_without_tokens_keeps_nothing(rng):
    pool = made()
    _, k, v = packed(rng, "float32", 50)
    sequence = pool.sequence()
    pool.append(0, [sequence], k, v)
    sequence.free()
    assert pool.free_pages == 60 and not pool._journal.places and not pool._journal.last_use
    assert pool._journal.kept == 0 and not any(pool._journal.contents.values())


def test_the_index_does_not_grow_with_prompts_that_have_gone():
    pool = made(pages=6)
    for n in range(300):
        prompted(pool, [n] * 40)[0].free()
        sequence, _ = prompted(pool, [n] * 40)
        sequence.truncate(30)
        sequence.free()
    journal = pool._journal
    assert len(journal.places) <= 2 * 6 + 2 and len(journal.last_use) <= 6


def test_long_prompts_cost_a_page_at_a_time():
    """No recursion, neither where they are found nor where they go."""
    pool = sl.PagePool(layers=1, pages=40_000, page_size=16, kv_heads=1, head_dim=1)
    prompt = np.arange(16 * 39_000, dtype=np.int32)
    x = np.zeros((len(prompt), 1, 1), np.float32)
    sequence = pool.sequence(tokens=prompt)
    pool.append(0, [sequence], x, x, tokens=prompt)
    assert pool.sequence(tokens=prompt).length() == len(prompt) - 16
    sequence.free()
    pool.forget()
    gc.collect()
    assert pool.free_pages == 40_000


# --- wrong calls


def of_rows(n=3, **options):
    return lambda p, s, q, k, v: p.append(0, [s], k[:n], v[:n], new_lengths=[n], **options)


WRONG = [
    (of_rows(tokens=[1, 2]), "tokens: expected 3 ints, one for each row of k; got 2."),
    (of_rows(tokens=[1, 2, 3, 4]), "got 4. Leave out tokens that are stored already"),
    (of_rows(tokens=[1, 2.5, 3]), "tokens: expected 3 ints, one for each row of k; got float among them"),
    (of_rows(tokens=[1, True, 3]), "got bool among them"),
    (of_rows(tokens=np.ones(3, np.float32)), "got float among them"),
    (of_rows(tokens=[[1, 2, 3]]), r"got list among them\. Give those of all sequences in one list: tokens.reshape"),
    (of_rows(tokens=[1, 2, None]), "ints for all 3 rows of sequence 0, or None for all; got 1 None"),
    (of_rows(tokens=[1, 2, 1 << 63]), "tokens: expected ints of 64 bits; got 9223372036854775808"),
    (of_rows(tokens=7), "tokens: expected 3 ints, one for each row of k; got int"),
    (of_rows(tokens="abc"), "tokens: expected 3 ints, one for each row of k; got str"),
    (lambda p, s, q, k, v: p.attend(0, [s], q, k, v, tokens=[1]), "tokens: expected 3 ints"),
    (lambda p, s, q, k, v: p.attend(0, [s], q, tokens=[1, 2, 3]), "tokens: expected None without k and v"),
    (
        lambda p, s, q, k, v: p.append(0, [s.pool.untold], k, v, tokens=[1, 2, 3]),
        "tokens: expected None, since no call gave the tokens of sequence 0 from position 0 on; got tokens from 5 on",
    ),
    (
        lambda p, s, q, k, v: p.append(1, [s], k, v, tokens=[100, 7, 102]),
        "tokens: expected 101 at position 1 of sequence 0, as given for another layer; got 7. Give equal tokens",
    ),
    (
        lambda p, s, q, k, v: p.untold.keep([0, 2], start=1, tokens=[1, 2]),
        "tokens: expected None, since no call gave the tokens of sequence 0 from position 0 on; got tokens from 1 on",
    ),
    (
        lambda p, s, q, k, v: p.untold.keep([0, 2], start=0, tokens=[1]),
        "tokens: expected 2 ints, one for each index; got 1.",
    ),
    (lambda p, s, q, k, v: p.sequence(tokens=5), "tokens: expected ints; got int"),
    (lambda p, s, q, k, v: p.sequence(tokens=[1.0]), "tokens: expected ints; got float among them"),
    (lambda p, s, q, k, v: p.sequence(tokens="abc"), "tokens: expected ints; got str"),
    (lambda p, s, q, k, v: p.sequence(extra=1.5), "extra: expected a str, bytes, an int of 64 bits, or a tuple of"),
    (lambda p, s, q, k, v: p.sequence(extra=True), r"got bool\. Write str\(extra\)"),
    (lambda p, s, q, k, v: p.sequence(extra=np.int64(3)), r"got int64\. Write int\(extra\)"),
    (lambda p, s, q, k, v: p.sequence(extra=("a", np.int8(3))), r"got int8\. Write int\(extra\[1\]\)"),
    (lambda p, s, q, k, v: p.sequence(extra=["a"]), r"got list\. Write tuple\(extra\)"),
    (
        lambda p, s, q, k, v: p.sequence(tokens=np.array(["a"])),
        "tokens: expected ints; got str among them. Give the numbers that the tokenizer makes of them",
    ),
    (lambda p, s, q, k, v: p.sequence(tokens=[[1], [2]]), r"ints; got list among them\. .*tokens.reshape\(-1\)"),
    (lambda p, s, q, k, v: p.sequence(tokens=[1, None]), "ints; got NoneType among them"),
    (
        lambda p, s, q, k, v: p.append(0, [s, p.untold], k, v, new_lengths=[1, 2], tokens=[1, None, 4]),
        "tokens: expected ints for all 2 rows of sequence 1, or None for all; got 1 None among them",
    ),
    (
        lambda p, s, q, k, v: p.append(0, [s, p.untold], k, v, new_lengths=[1, 2], tokens=[1, None]),
        "tokens: expected 3 ints, one for each row of k; got 2",
    ),
    (
        lambda p, s, q, k, v: p.append(0, [s, p.untold], k, v, new_lengths=[1, 2], tokens=["a", None, None]),
        "tokens: expected 3 ints, one for each row of k; got str among them",
    ),
    (lambda p, s, q, k, v: p.sequence(extra=("a", None)), "extra: .* got NoneType"),
    (lambda p, s, q, k, v: p.sequence(extra=("a", ("b",))), "extra: .* got tuple"),
    (lambda p, s, q, k, v: p.sequence(extra=1 << 70), "extra: .* got an int of 71 bits"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_what_is_wrong_is_named_and_changes_nothing(rng, call, message):
    class Pool(sl.PagePool):
        untold: sl.PagedSequence

    pool = Pool(layers=2, pages=9, page_size=16, kv_heads=2, head_dim=16, value_dim=17)
    q, k, v = packed(rng, "float32", 5)
    pool.untold, sequence = pool.sequence(), pool.sequence()
    for layer in (0, 1):
        pool.append(layer, [pool.untold], k, v)
    prompted(pool, [5] * 32)[0].free()
    append(pool, sequence, PROMPT[:20], layers=[0])

    def state():
        held = [(s.tokens, s.pages, s.keys(0).tobytes(), s.values(0).tobytes()) for s in (sequence, pool.untold)]
        return held, pool.statistics(), pool.free_pages, dict(pool._journal.contents)

    before = state()
    with pytest.raises(sl.Error, match=message):
        call(pool, sequence, *(x[:3] for x in (q, k, v)))
    assert state() == before
    check_accounts(pool, [sequence, pool.untold])


@pytest.mark.parametrize("given", [np.array, tuple, lambda x: np.array(x, np.uint16), lambda x: [*map(np.int8, x)]])
def test_tokens_of_any_kind_are_the_same(given):
    pool = made()
    prompt = [n % 100 for n in PROMPT]
    append(pool, pool.sequence(tokens=given(prompt)), given(prompt))
    assert found_of(pool, prompt) == found_of(pool, given(prompt)) == 48


def test_tensors_are_tokens():
    torch = pytest.importorskip("torch")
    pool = made()
    append(pool, pool.sequence(), torch.tensor(PROMPT))
    assert pool.sequence(tokens=torch.tensor(PROMPT, dtype=torch.int32)).length() == 48


# --- threads and processes


def cuts(pool, held):
    """Writes other tokens to a page that is found."""
    held.truncate(40)
    append(pool, held, [*PROMPT[:40], *range(8)])


def takes(pool, held):
    """Takes the page that is found."""
    held.free()
    append(pool, pool.sequence(), [1] * 16 * pool.free_pages, told=False).free()


def forgets(pool, held):
    """Forgets it, and computes it anew."""
    pool.forget()
    prompted(pool, PROMPT)[0].free()


@pytest.mark.parametrize("change", [cuts, takes, forgets])
def test_pages_that_change_while_they_are_found_are_looked_up_again(monkeypatch, change):
    """As a signal handler or another thread may change them: between the lookup and its effect."""
    pool = made(pages=8)
    held, _ = prompted(pool, PROMPT[:48])
    find, calls = type(pool._journal).find, []

    def between(journal, wanted):
        found = find(journal, wanted)
        calls.append(found)
        if len(calls) == 1:
            change(pool, held)
        return found

    monkeypatch.setattr(type(pool._journal), "find", between)
    sequence = pool.sequence(tokens=PROMPT)
    assert len(calls) > 1 and sequence.length() == {cuts: 32, takes: 0, forgets: 48}[change]
    assert_computed(sequence, sequence.tokens)
    append(pool, sequence, PROMPT)
    assert_computed(sequence, PROMPT)


def test_accounts_are_exact_whatever_threads_do():
    """Prompts of few kinds in several threads, in a pool that is always full: whatever is found is right."""
    pool, left = made(pages=40, layers=1), []
    prompts = [[a] * 20 + [b] * 20 for a in range(3) for b in range(3)]
    rows = {tuple(x): computed(pool, 0, x) for x in prompts}

    def work(seed):
        mine, held = np.random.default_rng(seed), []
        for step in range(6000 if FULL else 500):
            prompt = prompts[mine.integers(len(prompts))]
            k, v = rows[tuple(prompt)]
            what = mine.integers(6)
            try:
                if what < 3:
                    sequence = pool.sequence(tokens=prompt)
                    n = sequence.length()
                    assert sequence.keys(0).tobytes() == k[:n].swapaxes(0, 1).tobytes(), (seed, step)
                    pool.append(0, [sequence], k[n:], v[n:], new_lengths=[40 - n], tokens=prompt[n:])
                    held.append((sequence, prompt))
                elif what == 3 and held:
                    sequence, prompt = held[-1]
                    n = int(mine.integers(41))
                    sequence.truncate(min(n, sequence.length()))
                    n = sequence.length()
                    k, v = rows[tuple(prompt)]
                    pool.append(0, [sequence], k[n:], v[n:], new_lengths=[40 - n], tokens=prompt[n:])
                elif what == 4 and not mine.integers(20):
                    pool.forget()
            except sl.CacheFull as error:
                assert error.needed > error.free
            while held and (len(held) > 3 or held[-1][0].length() < 40):
                held.pop()[0].free()
        for sequence, prompt in held:
            assert sequence.values(0).tobytes() == rows[tuple(prompt)][1].swapaxes(0, 1).tobytes()
        left.extend([s for s, _ in held])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        together(work, range(4))
    finally:
        sys.setswitchinterval(interval)
    check_accounts(pool, left)
    assert pool.statistics()["hits"] > 50


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_finds_what_the_parent_computed():
    pool = made()
    prompted(pool, PROMPT)[0].free()
    pid = os.fork()
    if not pid:
        try:
            sequence, found = prompted(pool, PROMPT)
            assert_computed(sequence, PROMPT)
            os._exit(found)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 48
    assert found_of(pool, PROMPT) == 48 and pool.statistics()["lookups"] == 2


# --- cases of vLLM: tests/v1/core/test_prefix_caching.py


COMMON = [n for n in range(3) for _ in range(16)]


def test_vllm_prefill():
    """vLLM, test_prefill: three common pages, in use and then free; the order in which pages are taken."""
    pool = made(pages=10)
    one, found = prompted(pool, COMMON + [3] * 7)
    assert found == 0 and len(one.pages) == 4
    two = pool.sequence(tokens=COMMON + [3] * 5)
    assert two.length() == 48 and two.pages == one.pages[:3]
    append(pool, two, COMMON + [3] * 5)
    assert pool.free_pages == 5
    common, partial = one.pages[:3], [one.pages[3], two.pages[3]]
    one.free()
    two.free()
    assert pool.free_pages == 10
    three, found = prompted(pool, COMMON + [3] * 6)
    assert found == 48 and three.pages[:3] == common and three.pages[3] in partial and pool.free_pages == 6
    three.free()
    four, found = prompted(pool, [99] * 160)
    assert found == 0 and pool.free_pages == 0
    assert {*four.pages[:2]} == {*partial} and four.pages[7:] == common[::-1]


def test_vllm_decode():
    """vLLM, test_decode: a page that decoding fills is found, and the open one behind it is not."""
    pool = made(pages=10)
    prompt = COMMON + [3] * 7
    sequence, _ = prompted(pool, prompt)
    append(pool, sequence, prompt + [8] * 4)
    assert found_of(pool, prompt + [8] * 4) == 48 and len(sequence.pages) == 4
    append(pool, sequence, prompt + [8] * 4 + [7] * 15)
    assert len(sequence.pages) == 5 and found_of(pool, prompt + [8] * 4 + [7] * 15) == 64


def test_vllm_evict():
    """vLLM, test_evict: two prompts go, the older one's last pages are taken first; its first pages are found."""
    pool = made(pages=10)
    one, _ = prompted(pool, [*range(5 * 16 + 7)])
    two, _ = prompted(pool, [*range(1000, 1000 + 3 * 16)])
    assert len(one.pages) == 6 and len(two.pages) == 3 and pool.free_pages == 1
    first = one.pages
    one.free()
    two.free()
    assert pool.free_pages == 10
    sequence, found = prompted(pool, [*range(2 * 16 + 3)])
    assert found == 32 and sequence.pages[:2] == first[:2] and pool.free_pages == 7


def test_vllm_hash_block_correct_reuse():
    """vLLM, test_hash_block_correct_reuse: a page that is used again for other tokens is not found by its old ones."""
    pool = made(pages=1)
    sequence, _ = prompted(pool, [*range(16)])
    sequence.free()
    again, _ = prompted(pool, [*range(15)])
    assert again.pages == (0,) and found_of(pool, [*range(17)]) == 0


def test_vllm_computed_blocks_not_evicted():
    """vLLM, test_computed_blocks_not_evicted: the found page stays, though it was the next to be taken."""
    pool = made(pages=2)
    prompted(pool, [*range(16)])[0].free()
    prompted(pool, [*range(16, 32)])[0].free()
    sequence, found = prompted(pool, [*range(32)])
    assert found == 16
    assert_computed(sequence, [*range(32)])


def test_vllm_cache_key_salting():
    """vLLM, test_cache_key_salting and test_mm_prefix_caching: equal salts or images share, others do not."""
    pool = made(pages=20)
    prompt = COMMON + [3] * 11
    sequence, found = prompted(pool, prompt, "salt1")
    assert found == 0
    append(pool, sequence, prompt + [8] * 5)  # fills the fourth page
    assert found_of(pool, prompt + [8] * 5 + [4], "salt1") == 64
    assert found_of(pool, COMMON + [4] * 11, "salt1") == 48
    assert found_of(pool, COMMON + [4] * 11, "salt2") == found_of(pool, COMMON + [4] * 11) == 0
    assert prompted(pool, prompt, ("image", b"\x01", 11))[1] == 0
    assert found_of(pool, prompt, ("image", b"\x01", 11)) == 48 and found_of(pool, prompt, ("image", b"\x02", 11)) == 0


def test_vllm_prefill_not_enough_free_blocks_with_computed_blocks():
    """vLLM, the test of this name: where the rest finds no room, the counts of found pages stay as they were."""
    pool = made(pages=10)
    one, _ = prompted(pool, COMMON)
    two, found = prompted(pool, [*COMMON, *(9 - x for x in COMMON)])
    assert found == 48 and two.pages[:3] == one.pages
    two.free()
    three, _ = prompted(pool, [7] * 32)
    assert pool.free_pages == 5
    longest = [*COMMON, *(9 - x for x in COMMON), *([4] * 48)]
    four = pool.sequence(tokens=longest)
    assert four.length() == 96 and pool.free_pages == 2
    with pytest.raises(sl.CacheFull, match="3 pages are needed, 2 of 10"):
        append(pool, four, longest)
    four.free()
    assert pool.free_pages == 5 and found_of(pool, longest) == 96
    check_accounts(pool, [one, three])


def test_vllm_reset_prefix_cache():
    """vLLM, test_reset_prefix_cache. There it is refused while pages are in use; here sequences keep theirs."""
    pool = made(pages=10)
    one, _ = prompted(pool, COMMON + [3] * 7)
    two, found = prompted(pool, COMMON + [4] * 7)
    assert found == 48
    pool.forget()
    assert found_of(pool, COMMON + [4] * 7) == 0
    assert_computed(two, COMMON + [4] * 7)
    one.free()
    two.free()
    assert pool.free_pages == 10 and not any(pool._journal.contents.values())


# --- cases of FlashInfer: tests/attention/test_shared_prefix_kernels.py


@pytest.mark.parametrize("stage", ["decode", "append"])
@pytest.mark.parametrize(("shared", "own"), [(128, 37), (128, 17), (512, 17)])
def test_flashinfer_shared_prefix(rng, stage, shared, own):
    """FlashInfer, test_batch_attention_with_shared_prefix_paged_kv_cache: 12 sequences with a common prefix, and tokens
    of their own, say the same as without sharing, here to the bit.
    """
    batch, heads, pool = 12, 4, made(d=16, dv=16, pages=200)
    prompts = [[*range(shared), *([n] * own)] for n in range(batch)]
    prompted(pool, prompts[0][:shared])[0].free()
    sequences = [pool.sequence(tokens=x) for x in prompts]
    assert {x.length() for x in sequences} == {shared} and len({x.pages for x in sequences}) == 1
    plain = made(d=16, dv=16, pages=800)
    alone = [append(plain, plain.sequence(), x[:shared], told=False) for x in prompts]
    k, v = (np.concatenate(x) for x in zip(*[computed(pool, 0, x, None, shared) for x in prompts], strict=True))
    tokens = [t for x in prompts for t in x[shared:]]
    asked = [own if stage == "append" else 1] * batch
    q = rng.standard_normal((sum(asked), heads, 16), dtype=np.float32)
    lengths = {"new_lengths": [own] * batch, "q_lengths": asked}
    out = pool.attend(0, sequences, q, k, v, tokens=tokens, **lengths)
    assert out.tobytes() == plain.attend(0, alone, q, k, v, **lengths).tobytes()
    assert [x.tokens for x in sequences] == prompts
