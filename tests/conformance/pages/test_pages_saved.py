"""Sequences of a pool in files: shared pages once, their tokens, their model; what is damaged is named."""

from __future__ import annotations

import doctest
import threading

import numpy as np
import pytest
from conftest import FULL
from injection import interrupted, needs_places, places
from pools import KINDS, check_accounts, made, packed
from prompts import append, assert_computed, found_of, prompted

import speedlight as sl
from speedlight.arrays.files import read_arrays, read_metadata, write_arrays
from speedlight.kv.prefixes import decode_extra, encode_extra

pytestmark = pytest.mark.usefixtures("one_width")  # how pages lie is seen at any width of panels


def grown(rng, **sizes):
    """A pool of three sequences: a prompt, a fork that goes on, one of its own; two layers, the second shorter.

    Of the third one no tokens are known.
    """
    pool = made(layers=2, d=24, **sizes)
    prompt, other = pool.sequence(extra=("a", -1, b"\xff")), pool.sequence(extra="é")
    _, k, v = packed(rng, pool.dtype, 60, pool.head_dim, pool.value_dim)
    rows = (k,) if pool.latent else (k, v)
    for layer in (0, 1):
        pool.append(layer, [prompt], *(x[:40] for x in rows), new_lengths=[40], tokens=range(40))
    fork = prompt.fork()
    pool.append(0, [fork], *(x[40:55] for x in rows), tokens=[1 << 62] * 15)
    pool.append(0, [other], *(x[55:] for x in rows))
    return pool, [prompt, fork, other]


def contents(sequences, layers=2):
    parts = [(x.length(n), x.keys(n).tobytes(), x.values(n).tobytes()) for x in sequences for n in range(layers)]
    return [*parts, *((x.tokens, x.extra) for x in sequences)]


def saved_prompts(path, prompts, extra=None, layers=2):
    """Saves prompts as a pool computes them, in which later ones share pages of earlier ones."""
    pool = made(layers=layers)
    sequences = [prompted(pool, prompt, extra)[0] for prompt in prompts]
    pool.save(path, sequences)
    return pool, sequences


@pytest.mark.parametrize(("latent", "dtype"), [(x, y) for x in (False, True) for y in KINDS if not x or y != "int4"])
def test_sequences_come_back(rng, tmp_path, dtype, latent):
    """Into pages of another pool that is partly used: the same bits, shared alike, and they go on alike."""
    pool, sequences = grown(rng, dtype=dtype, latent=latent)
    path = tmp_path / "prompts.safetensors"
    pool.save(path, sequences, model="llama")
    assert path.stat().st_mode & 0o77 == 0
    again, before = made(layers=2, d=24, dtype=dtype, latent=latent), path.read_bytes()
    mine = again.sequence()
    q, k, v = packed(rng, dtype, 21, 24)
    again.append(0, [mine], k[:17], *([] if latent else [v[:17]]))
    loaded = again.load(path, model="llama")
    assert [len(x.tokens) for x in loaded] == [40, 55, 0] and contents(loaded) == contents(sequences)
    assert loaded[0].pages[:2] == loaded[1].pages[:2] and again.free_pages == 60 - 2 - 3 - 1 - 1 - 1
    check_accounts(again, [mine, *loaded])
    for x in ((pool, sequences), (again, loaded)):
        out = x[0].attend(0, x[1], q[:3], k[:3], *([] if latent else [v[:3]]))
        x[1].append(out.tobytes())
    assert sequences.pop() == loaded.pop()
    assert contents(loaded) == contents(sequences) and path.read_bytes() == before
    del loaded, x
    assert again.free_pages == 58 and again.statistics()["pages_kept"] == 2
    check_accounts(again, [mine])


def test_the_last_tokens_of_a_page_that_nobody_has_are_not_saved(rng, tmp_path):
    """What a sequence has forgotten, or another wrote there once, is zeros in the file."""
    pool = made()
    a, (_, k, v) = pool.sequence(), packed(rng, "float32", 30)
    pool.append(0, [a], k, v)
    b = a.fork()
    a.truncate(20)
    pool.save(tmp_path / "a.safetensors", [a])
    stored = read_arrays([tmp_path / "a.safetensors"])
    assert not stored["keys.0"][:, :, 20:].any() and not stored["values.0"][:, :, 20:].any()
    assert stored["keys.0"][0, :, :20].tobytes() == a.keys(0).tobytes()
    pool.save(tmp_path / "b.safetensors", [a, b])
    stored = read_arrays([tmp_path / "b.safetensors"])
    assert stored["keys.0"][0, :, :30].tobytes() == b.keys(0).tobytes() and not stored["keys.0"][:, :, 30:].any()


def test_nothing_and_sequences_without_tokens(tmp_path):
    pool = made()
    a, b = pool.sequence(), pool.sequence()
    pool.save(tmp_path / "a.safetensors", [a, b])
    loaded = pool.load(tmp_path / "a.safetensors")
    assert [(x.length(), x.tokens, x.extra) for x in loaded] == [(0, [], None)] * 2 and pool.free_pages == 60
    assert found_of(pool, list(range(16 + 1))) == 0
    append(pool, loaded[0], range(16))
    assert found_of(pool, list(range(16 + 1))) == 16


def test_another_model_dtype_or_size_is_refused_by_name(rng, tmp_path):
    pool, sequences = grown(rng)
    path = tmp_path / "a.safetensors"
    pool.save(path, sequences, model="llama")
    same = {"layers": 2, "dtype": "float32", "d": 24}
    for message, sizes, model in (
        ("of model='qwen', as given; got those of model='llama'", {}, "qwen"),
        ("that were saved without model=; got those of model='llama'", {}, None),
        ("dtype int8, as this pool has; got float32", {"dtype": "int8"}, "llama"),
        ("page_size 32, as this pool has; got 16", {"page_size": 32}, "llama"),
        ("layers 3, as this pool has; got 2", {"layers": 3}, "llama"),
        ("head_dim 16, as this pool has; got 24", {"d": 16}, "llama"),
        ("value_dim 16, as this pool has; got 17", {"dv": 16}, "llama"),
        ("kv_heads 4, as this pool has; got 2", {"kv_heads": 4}, "llama"),
    ):
        other = made(**same | sizes)
        with pytest.raises(sl.FileError, match=message):
            other.load(path, model=model)
        assert other.free_pages == 60
    latent, a = made(d=17, latent=True), made(d=17)
    a.save(path, [a.sequence()])
    with pytest.raises(sl.FileError, match="latent"):
        latent.load(path)
    sl.KVCache(layers=1, kv_heads=1, head_dim=8, capacity=8).save(path)
    with pytest.raises(sl.FileError, match=r"PagePool.save\(\) wrote; .* speedlight.KVCache.load\(\) reads it"):
        pool.load(path)


def test_arguments_are_named_and_no_file_is_written(rng, tmp_path):
    pool, sequences = grown(rng)
    other, path = made().sequence(), tmp_path / "a.safetensors"
    for error, message, call in (
        (sl.ArgumentError, "^sequences: expected one sequence or more", lambda: pool.save(path, [])),
        (sl.ArgumentError, "^sequences: .* each once", lambda: pool.save(path, sequences[:1] * 2)),
        (sl.ArgumentError, "^sequences: .* another pool", lambda: pool.save(path, [other])),
        (sl.ArgumentTypeError, "^model: expected a str", lambda: pool.save(path, sequences, model=3)),
        (sl.FileError, "ends in .safetensors", lambda: pool.save(tmp_path / "a", sequences)),
        (sl.FileError, "No such file", lambda: pool.load(path)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    assert not [*tmp_path.iterdir()] and not pool._claims


def test_too_few_free_pages_take_none(rng, tmp_path):
    pool, sequences = grown(rng)
    path = tmp_path / "a.safetensors"
    pool.save(path, sequences)
    small = made(layers=2, d=24, pages=5)
    held = small.sequence()
    with pytest.raises(sl.CacheFull, match="load: 6 pages are needed, 5 of 5 are free"):
        small.load(path)
    check_accounts(small, [held])


def test_damaged_tables_are_named(rng, tmp_path):
    """Pages that are not there, that nobody has, twice in a sequence; lengths that do not fit; counts that lie.

    Keys that save() never wrote.
    """
    pool, sequences = grown(rng)
    path = tmp_path / "a.safetensors"
    pool.save(path, sequences)
    words, stored = read_metadata(path), read_arrays([path])
    for name, x in stored.items():
        if not name.startswith("sequence_"):
            continue
        for at in range(x.size):
            for n in (-1, 0, 5, 6, 41, 1 << 46, (1 << 63) - 1, -(1 << 63)):
                changed = x.copy()
                changed.reshape(-1)[at] = n
                write_arrays(path, stored | {name: changed}, words)
                try:
                    loaded = pool.load(path)
                except sl.FileError as error:
                    assert "a.safetensors" in str(error)
                else:
                    assert [len(y.tokens) for y in loaded[:2]] == [max(y.length(0), y.length(1)) for y in loaded[:2]]
                    assert len(loaded) == 3 and not loaded[2].tokens
                    check_accounts(pool, [*sequences, *loaded])
                    del loaded
        for wrong in (x[:-1], x.astype(np.int32), x[None], np.concatenate([x, x])):
            write_arrays(path, stored | {name: wrong}, words)
            with pytest.raises(sl.FileError, match=r"a\.safetensors"):
                pool.load(path)
        write_arrays(path, {n: y for n, y in stored.items() if n != name}, words)
        with pytest.raises(sl.FileError, match=r"a\.safetensors"):
            pool.load(path)
        check_accounts(pool, sequences)


def test_damaged_files_are_named(rng, tmp_path):
    pool, sequences = grown(rng, dtype="fp8")
    path = tmp_path / "a.safetensors"
    pool.save(path, sequences)
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(5000 if FULL else 300):
        damaged, at = bytearray(data), int(rng.integers(header))
        match rng.integers(3):
            case 0:
                damaged = damaged[: int(rng.integers(len(data)))]
            case 1:
                damaged[at] = int(rng.integers(256))
            case 2:
                damaged[at : at + 4] = rng.choice([b"9999", b"-111", b'""""', b"null"])
        path.write_bytes(damaged)
        try:
            loaded = pool.load(path)
        except sl.FileError as error:
            assert "a.safetensors" in str(error)
        else:
            assert [x.length() for x in loaded] == [40, 55, 5]
            del loaded
        check_accounts(pool, sequences)


@needs_places
def test_an_interrupt_leaves_pool_and_file_as_they_were(rng, tmp_path):
    pool, sequences = grown(rng)
    path, within = tmp_path / "a.safetensors", ("speedlight/kv/", "speedlight/arrays/files")
    pool.save(path, sequences[:1])
    old = path.read_bytes()
    save = lambda: pool.save(path, sequences)  # noqa: E731
    save()
    new = path.read_bytes()
    for n in places(save, within):
        path.write_bytes(old)
        assert interrupted(save, n, within)
        assert path.read_bytes() in (old, new) and [x.name for x in tmp_path.iterdir()] == [path.name]
        check_accounts(pool, sequences)
    path.write_bytes(new)
    again = made(layers=2, d=24)
    held, _ = prompted(again, list(range(1, 20)))
    check_accounts(again, [held])
    found = places(lambda: again.load(path), within)
    again.forget()
    for n in found:
        assert interrupted(lambda: again.load(path), n, within)
        check_accounts(again, [held])
        assert again.statistics()["pages_kept"] == 0 and not any(again._journal.contents.values())
    loaded = again.load(path)
    assert contents(loaded) == contents(sequences) and found_of(again, range(33), loaded[0].extra) == 32


def test_a_sequence_is_not_written_to_while_it_is_copied(rng, tmp_path, monkeypatch):
    pool, sequences = grown(rng)
    _, k, v = packed(rng, "float32", 2, 24)
    real, refused = type(pool._storage).parts, []

    def parts(self, *x):
        def append():
            try:
                pool.append(0, sequences[:1], k, v)
            except sl.CacheBusy as error:
                refused.append(error)

        thread = threading.Thread(target=append)
        thread.start()
        thread.join()
        return real(self, *x)

    monkeypatch.setattr(type(pool._storage), "parts", parts)
    for call in (
        lambda: pool.save(tmp_path / "a.safetensors", sequences),
        lambda: sequences[0].save(tmp_path / "b.safetensors"),
    ):
        call()
        assert len(refused) == 2 and "saves it" in str(refused[0])
        refused.clear()
    monkeypatch.undo()
    pool._claims.add(sequences[0]._number)
    with pytest.raises(sl.CacheBusy, match="another thread is writing"):
        pool.save(tmp_path / "a.safetensors", sequences)
    pool._claims.clear()
    pool.append(0, sequences[:1], k, v)
    assert sequences[0].length() == 42 and pool.load(tmp_path / "a.safetensors")[0].length() == 40


# --- the index


PROMPT = list(range(100, 164))  # four pages


@pytest.mark.parametrize("latent", [False, True])
def test_loaded_prompts_are_found(tmp_path, latent):
    """With the bits of a prompt that is computed anew, under an equal key, as long as the pool keeps their pages."""
    pool, path = made(layers=2, d=27, dv=16, latent=latent), tmp_path / "a.safetensors"
    sequences = [prompted(pool, x, "a")[0] for x in (PROMPT, [*PROMPT[:40], *range(30)])]
    pool.save(path, sequences)
    again = made(layers=2, d=27, dv=16, latent=latent)
    assert found_of(again, PROMPT, "a") == 0
    loaded = again.load(path)
    check_accounts(again, loaded)
    for prompt, pages in ((PROMPT, loaded[0].pages[:3]), ([*PROMPT[:40], *range(40)], loaded[1].pages[:4])):
        sequence = again.sequence(tokens=prompt, extra="a")
        assert sequence.pages == pages and sequence.tokens == prompt[: sequence.length()]
        assert_computed(append(again, sequence, prompt), prompt)
        assert [found_of(again, prompt, x) for x in (None, "b", b"a", ("a",))] == [0] * 4
    for x in loaded:
        x.free()
    sequence.free()
    assert again.statistics()["pages_kept"] == 7 and found_of(again, [*PROMPT, 0], "a") == 64
    check_accounts(again, [])


def changes(pool, sequence, how):
    """Changes a sequence within its second page, and lets it go on with other tokens."""
    if how == "truncate":
        sequence.truncate(20)
    elif how == "keep":
        sequence.keep([0, 3], start=18)
    elif how == "take all":
        sequence.truncate(0)
    tokens = [*sequence.tokens, *range(40)]
    moved = how == "keep"
    for layer in (0, 1):
        k, v = packed(np.random.default_rng(0), "float32", 40, 16, 17)[1:]
        if moved:
            pool.append(layer, [sequence], k, v, new_lengths=[40], tokens=tokens[-40:])
    return sequence if moved else append(pool, sequence, tokens)


@pytest.mark.parametrize("how", ["truncate", "keep", "take all", "append"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("gone", [False, True])
def test_loaded_forks_share_pages_that_are_found_until_one_changes_them(tmp_path, how, first, gone):
    """Whichever of the two it is, and whether the other is there still."""
    pool, path = made(layers=2), tmp_path / "a.safetensors"
    whole, _ = prompted(pool, PROMPT)
    pool.save(path, [whole, whole.fork()])
    again = made(layers=2)
    loaded = again.load(path)
    assert loaded[0].pages == loaded[1].pages and found_of(again, [*PROMPT, 0]) == 64
    changed, other = loaded[first], loaded[1 - first]
    if gone:
        other.free()
    changes(again, changed, how)
    check_accounts(again, [changed, *([] if gone else [other])])
    found = again.sequence(tokens=[*PROMPT, 0])
    assert found.length() == {"truncate": 16, "keep": 16, "take all": 64, "append": 64}[how]
    assert_computed(found, PROMPT[: found.length()])
    if not gone:
        assert_computed(other, PROMPT)
    if how != "keep":
        assert_computed(changed, changed.tokens)
        assert found_of(again, [*changed.tokens, 0]) == changed.length() // 16 * 16


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_a_page_that_a_loaded_sequence_has_in_part_is_not_found(tmp_path, order):
    """It writes there in place once the other is gone."""
    pool, path = made(layers=2), tmp_path / "a.safetensors"
    whole, _ = prompted(pool, PROMPT)
    cut = whole.fork()
    cut.truncate(20)
    pool.save(path, [whole, cut][order])
    again = made(layers=2)
    whole, cut = again.load(path)[order]
    assert found_of(again, PROMPT) == 16
    check_accounts(again, [whole, cut])
    whole.free()
    other = [*PROMPT[:20], *range(30)]
    pages = cut.pages
    assert append(again, cut, other).pages[:2] == pages
    assert found_of(again, PROMPT) == 16 and found_of(again, other) == 48
    assert_computed(cut, other)
    check_accounts(again, [cut])


def test_a_page_is_found_once_all_layers_of_a_loaded_sequence_have_it(tmp_path):
    pool, path = made(layers=2), tmp_path / "a.safetensors"
    sequence = pool.sequence()
    append(pool, sequence, PROMPT, layers=[0])
    append(pool, sequence, PROMPT[:20], layers=[1])
    pool.save(path, [sequence])
    again = made(layers=2)
    (loaded,) = again.load(path)
    assert loaded.tokens == PROMPT and found_of(again, PROMPT) == 16
    check_accounts(again, [loaded])
    append(again, loaded, PROMPT, told=False)
    assert found_of(again, PROMPT) == 48
    assert_computed(loaded, PROMPT)
    check_accounts(again, [loaded])


def test_a_prompt_that_the_pool_has_already_is_found_where_it_was(tmp_path):
    path = tmp_path / "a.safetensors"
    saved_prompts(path, [PROMPT])
    again = made(layers=2)
    own, _ = prompted(again, PROMPT[:32])
    one, two = again.load(path), again.load(path)
    assert again.sequence(tokens=[*PROMPT, 0]).pages == (*own.pages, *one[0].pages[2:])
    assert len({*own.pages, *one[0].pages, *two[0].pages}) == 10
    check_accounts(again, [own, *one, *two])


def test_of_tokens_that_are_known_in_part_none_is_saved(tmp_path):
    pool, path = made(layers=2), tmp_path / "a.safetensors"
    sequence = append(pool, pool.sequence(extra=3), PROMPT[:32])
    append(pool, sequence, PROMPT, told=False)
    assert sequence.tokens == PROMPT[:32]
    pool.save(path, [sequence])
    again = made(layers=2)
    (loaded,) = again.load(path)
    assert (loaded.tokens, loaded.extra, loaded.length()) == ([], 3, 64) and found_of(again, PROMPT, 3) == 0
    with pytest.raises(sl.ArgumentError, match="tokens: expected None"):
        append(again, loaded, [*PROMPT, 1])
    check_accounts(again, [loaded])


def test_what_was_forgotten_is_not_found_after_loading(tmp_path):
    """A file of sequences from before forget() may be loaded as one of the new weights."""
    pool, path = made(layers=2), tmp_path / "a.safetensors"
    old, empty = prompted(pool, PROMPT)[0], pool.sequence(tokens=[1])
    pool.forget()
    new, _ = prompted(pool, PROMPT[:40])
    pool.save(path, [old, new, empty])
    for forgets in (False, True):
        again = made(layers=2)
        if forgets:
            again.forget()
        loaded = again.load(path)
        assert [x.tokens for x in loaded] == [PROMPT, PROMPT[:40], []]
        assert again.sequence(tokens=PROMPT).pages == loaded[1].pages[:2]
        append(again, loaded[2], [1] * 16)
        assert found_of(again, [1] * 17) == 0
        check_accounts(again, loaded)
    again.forget()
    assert found_of(again, PROMPT) == 0
    again.save(path, loaded)
    assert not any(x.tokens and found_of(again, [*x.tokens, 0]) for x in again.load(path))


def test_keys_come_back(tmp_path):
    """Of each type and any characters; and what no key is encoded as is refused."""
    keys = [None, "a", "", b"", b"a", 0, -1, (1 << 64) - 1, "1", (), ("a",), ("a", 1, b"(,"), "None", ("", ""), "(s61)"]
    keys += ["\ud83d\ude00", "\U0001f600", "\0é,", ("",), (b"",), b"None"]
    pool, path = made(), tmp_path / "a.safetensors"
    pool.save(path, [prompted(pool, PROMPT[:17], x)[0] for x in keys])
    again = made()
    loaded = again.load(path)
    assert [(x.extra, type(x.extra)) for x in loaded] == [(x, type(x)) for x in keys]
    assert [again.sequence(tokens=PROMPT, extra=x).pages for x in keys] == [x.pages[:1] for x in loaded]
    assert len({encode_extra(x) for x in keys}) == len(keys)
    wrong = [b"", b"x", b"i", b"i01", b"i-0", b"i 1", b"i1_0", b"i%d" % (1 << 65), b"i" + b"9" * 9999]
    wrong += [b"s6", b"sff", b"sC3A9", b"b6 1", b"(", b"()i1", b"(i1", b"(i1,)", b"(None)", b"((i1))", b"\xff"]
    for code in wrong:
        with pytest.raises(ValueError):  # noqa: PT011
            decode_extra(code)


@pytest.mark.parametrize("method", [sl.PagePool.save, sl.PagedSequence.save])
def test_examples_run(method):
    (example,) = doctest.DocTestFinder(recurse=False).find(method, method.__name__)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_a_token_that_was_damaged_is_noticed(tmp_path):
    """A flipped bit would find a wrong prompt."""
    pool, path = made(), tmp_path / "a.safetensors"
    sequence = pool.sequence(tokens=range(40))
    x = np.zeros((40, 2, 16), np.float32), np.zeros((40, 2, 17), np.float32)
    pool.append(0, [sequence], *x, tokens=range(40))
    pool.save(path, [sequence])
    data = path.read_bytes()
    at = data.index(np.arange(40).tobytes())
    path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    with pytest.raises(sl.FileError, match="its tokens or tables are not those that were saved"):
        pool.load(path)
