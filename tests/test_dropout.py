"""Dropout: the random numbers, the weights that they drop, and that these are the same wherever a row is computed."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from speedlight import philox
from speedlight.cpu import philox as on_vectors
from speedlight.cpu.compile import _load, compile_ir
from speedlight.cpu.shape import Shape
from speedlight.cpu.vector import I64, PTR, Module, vec
from speedlight.machine import host_isas

# --- the random numbers

# of Random123: counter, key, words
KNOWN = (
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_known_answers(counter, key, words):
    assert tuple(int(x) for x in philox.philox(counter, key)) == words


def emitted(isa, storage):
    """A function that stores words of each lane's counter, then which of them stay."""
    s, module = Shape("forward", isa, storage, 1), Module("words")
    names = ("out", "keep", "i", "h"), ("b", "quad", "count", "seed", "drop_below")
    k = module.function("words", dict.fromkeys(names[0], PTR) | dict.fromkeys(names[1], I64), public=True)
    p, lanes = k.p, s.lanes
    i, h = (k.load(vec(I64, lanes), p[n]) for n in ("i", "h"))
    with k.range(0, p["count"]) as n:
        words = on_vectors.philox(k, (p["b"], h, i, p["quad"] + n), p["seed"], lanes)
        for w, (word, keep) in enumerate(zip(words, on_vectors.keeps(k, words, p["drop_below"]), strict=True)):
            at = (n * 4 + w) * (lanes * 4)
            k.store(word, p["out"], at)
            k.store(k.zext(keep, s.ivector if not s.wide else word.type), p["keep"], at)
    k.finish()
    engine = _load(compile_ir(s, str(module)))
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 5)
    return engine, call(engine.get_function_address("words")), lanes


@pytest.mark.parametrize("isa", host_isas(), ids=lambda x: x.name)
@pytest.mark.parametrize("storage", ["f32", "f64"])
def test_words_on_vectors(isa, storage):
    _engine, run, lanes = emitted(isa, storage)
    i = np.array([(-1) ** n * (n * 99_999_999 + n) for n in range(lanes)], np.int64)
    h, quads = np.arange(lanes, dtype=np.int64) // 3, (1 << 30) - 17 + np.arange(32)
    for seed in (0, 1, 0xFEDCBA9876543210, 2**64 - 1):
        for b in (0, 7, 2**32 - 1):
            want = philox.philox((b, h[None], i[None], quads[:, None]), philox.key_of(seed))
            want = np.stack(np.broadcast_arrays(*want), axis=1)
            for below in (0, 1, philox.drop_below(0.3), 2**32 - 1, 2**32):
                words, keep = np.zeros((2, 32, 4, lanes), np.uint32)
                run(*(x.ctypes.data for x in (words, keep, i, h)), b, int(quads[0]), 32, seed, below)
                assert (words == want).all()
                assert (keep == (want >= below)).all()


def test_what_is_dropped_of_a_probability():
    assert philox.drop_below(0.0) == 0 and philox.drop_below(1.0) == 2**32
    assert philox.drop_below(2.0**-33) == 0 and philox.drop_below(1 - 2.0**-53) == 2**32 - 1
    assert philox.drop_below(0.1) == 429496729
