"""Sequences of a pool in files: shared pages once, their tokens, their model; what is damaged is named."""

from __future__ import annotations

import doctest
import threading

import numpy as np
import pytest
from conftest import FULL
from injection import interrupted, needs_places, places
from pools import KINDS, check_accounts, made, packed

import speedlight as sl
from speedlight.arrays.files import read_arrays, read_metadata, write_arrays

pytestmark = pytest.mark.usefixtures("one_width")  # how pages lie is seen at any width of panels


def grown(rng, **sizes):
    """A pool of three sequences: a prompt, a fork that goes on, one of its own; two layers, the second shorter."""
    pool = made(layers=2, d=24, **sizes)
    prompt, other = pool.sequence(), pool.sequence()
    _, k, v = packed(rng, pool.dtype, 60, pool.head_dim, pool.value_dim)
    for layer in (0, 1):
        pool.append(layer, [prompt], k[:40], *([] if pool.latent else [v[:40]]))
    fork = prompt.fork()
    new = [x[40:] for x in ((k,) if pool.latent else (k, v))]
    pool.append(0, [fork, other], *new, new_lengths=[15, 5])
    return pool, [prompt, fork, other]


def tokens_of(sequences):
    return [list(range(100 * n, 100 * n + x.length())) for n, x in enumerate(sequences)]


def contents(sequences, layers=2):
    return [(x.length(n), x.keys(n).tobytes(), x.values(n).tobytes()) for x in sequences for n in range(layers)]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("latent", [False, True])
def test_sequences_come_back(rng, tmp_path, dtype, latent):
    """Into pages of another pool that is partly used: the same bits, shared alike, and they go on alike."""
    pool, sequences = grown(rng, dtype=dtype, latent=latent)
    path, tokens = tmp_path / "prompts.safetensors", tokens_of(sequences)
    pool.save(path, sequences, tokens=tokens, model="llama")
    assert path.stat().st_mode & 0o77 == 0
    again, before = made(layers=2, d=24, dtype=dtype, latent=latent), path.read_bytes()
    mine = again.sequence()
    q, k, v = packed(rng, dtype, 21, 24)
    again.append(0, [mine], k[:17], *([] if latent else [v[:17]]))
    loaded, known = again.load(path, model="llama")
    assert known == tokens and contents(loaded) == contents(sequences)
    assert loaded[0].pages[:2] == loaded[1].pages[:2] and again.free_pages == 60 - 2 - 3 - 1 - 1 - 1
    check_accounts(again, [mine, *loaded])
    for x in ((pool, sequences), (again, loaded)):
        out = x[0].attend(0, x[1], q[:3], k[:3], *([] if latent else [v[:3]]))
        x[1].append(out.tobytes())
    assert sequences.pop() == loaded.pop()
    assert contents(loaded) == contents(sequences) and path.read_bytes() == before
    del loaded, x
    assert again.free_pages == 58


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
    pool.save(tmp_path / "a.safetensors", [a, b], tokens=[None, []])
    loaded, tokens = pool.load(tmp_path / "a.safetensors")
    assert [x.length() for x in loaded] == [0, 0] and tokens == [[], []] and pool.free_pages == 60


def test_another_model_dtype_or_size_is_refused_by_name(rng, tmp_path):
    pool, sequences = grown(rng)
    path = tmp_path / "a.safetensors"
    pool.save(path, sequences, model="llama")
    same = {"layers": 2, "dtype": "float32", "d": 24}
    for message, sizes, model in (
        ("of model='qwen', as given; got those of model='llama'", {}, "qwen"),
        ("of model='', as given; got those of model='llama'", {}, None),
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
        (sl.ArgumentError, "^tokens: expected 3 lists", lambda: pool.save(path, sequences, tokens=[[1]])),
        (sl.ArgumentError, "^tokens: expected 40 tokens of sequence 0, as it has; got 1",
         lambda: pool.save(path, sequences, tokens=[[1], None, None])),
        (sl.ArgumentTypeError, "^tokens: ", lambda: pool.save(path, sequences, tokens=[["a"] * 40, None, None])),
        (sl.ArgumentError, "^tokens: expected numbers",
         lambda: pool.save(path, sequences, tokens=[[1 << 60] * 40, None, None])),
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
    """Pages that are not there, that nobody has, twice in a sequence; lengths that do not fit; counts that lie."""
    pool, sequences = grown(rng)
    path = tmp_path / "a.safetensors"
    pool.save(path, sequences, tokens=tokens_of(sequences))
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
                    loaded, tokens = pool.load(path)
                except sl.FileError as error:
                    assert "a.safetensors" in str(error)
                else:
                    assert len(loaded) == 3 and [len(y) for y in tokens] == [
                        max(y.length(0), y.length(1)) for y in loaded
                    ]
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
    pool.save(path, sequences, tokens=tokens_of(sequences))
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
            loaded, _ = pool.load(path)
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
    save = lambda: pool.save(path, sequences, tokens=tokens_of(sequences))  # noqa: E731
    save()
    new = path.read_bytes()
    for n in places(save, within):
        path.write_bytes(old)
        assert interrupted(save, n, within)
        assert path.read_bytes() in (old, new) and [x.name for x in tmp_path.iterdir()] == [path.name]
        check_accounts(pool, sequences)
    path.write_bytes(new)
    for n in places(lambda: pool.load(path), within):
        assert interrupted(lambda: pool.load(path), n, within)
        check_accounts(pool, sequences)


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
    assert sequences[0].length() == 42 and pool.load(tmp_path / "a.safetensors")[0][0].length() == 40


@pytest.mark.parametrize("method", [sl.PagePool.save, sl.PagedSequence.save])
def test_examples_run(method):
    (example,) = doctest.DocTestFinder(recurse=False).find(method, method.__name__)
    assert doctest.DocTestRunner().run(example).failed == 0
