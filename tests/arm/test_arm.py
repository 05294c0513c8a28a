"""Kernels compile for 64-bit Arm on any machine; `make check-arm` also runs them, under qemu."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import FULL
from problems import CODES

import speedlight as sl
from speedlight.arrays.dtypes import CODES as CODE_FORMATS
from speedlight.cpu.kernels.merge import MergeShape
from speedlight.cpu.kernels.term_sums import TermShape
from speedlight.cpu.kernels.thread_pool import ServingShape
from speedlight.cpu.kernels.tile_test import TileTestShape
from speedlight.cpu.memory.shape import AppendShape, Shape, Source
from speedlight.cpu.runtime.compile import compile_ir, emit
from speedlight.expressions.program import Program
from speedlight.host.machine import isa_named


@pytest.mark.each("storage", "cached")
@pytest.mark.parametrize("storage", ["f32", "f64", "f16", "bf16"] if FULL else ["bf16"])
@pytest.mark.parametrize("cached", [False, True])
def test_kernels_compile_for_arm(storage, cached):
    mask, score = sl.window(30, 0) | sl.dilated(3), sl.softcap(2.0)
    program = Program("both", mask.root, score.root)
    for shape in (
        Shape("decode", isa_named("neon"), storage, 0, None, cached, dropout=not cached),
        Shape("forward", isa_named("neon"), storage, 2, program, cached, dropout=cached),
    ):
        assert compiles(shape)


@pytest.mark.each("kind", "cached")
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("kind", "vectors", "name"), [("forward", 3, "bfmmla"), ("decode", 0, "bfdot")])
def test_bfloat16_has_instructions_of_its_own(kind, vectors, name, cached):
    unit, mask = isa_named("neonbf16"), sl.window(30, 0) | sl.dilated(3)
    for program in (Program("both", mask.root, sl.softcap(2.0).root), None):
        shape = Shape(kind, unit, "bf16", vectors, program, cached)
        assert f"\t{name}\t" in compile_ir(shape, emit(shape), assembly=True)
    assert compiles(replace(shape, dropout=True))


def test_the_first_use_of_its_instructions_compiles_for_arm():
    assert compiles(TileTestShape(isa_named("neonbf16")))


@pytest.mark.each("codes")
@pytest.mark.parametrize("codes", CODES)
def test_codes_compile_for_arm(codes):
    neon, keys = isa_named("neon"), Source("f32", False)
    for storage in ("f32", "bf16"):
        assert compiles(Shape("decode", neon, storage, cached=True, quantised=codes))
        assert compiles(Shape("forward", neon, storage, 2, cached=True, quantised=codes))
    if CODE_FORMATS[codes].bits == 8:
        assert compiles(Shape("forward", neon, "bf16", 2, cached=True, quantised=codes, latent=True))
        same = Source(codes, strided=False)
        assert compiles(AppendShape(neon, codes, same, same))
    assert compiles(AppendShape(neon, codes, keys, keys))


def test_merge_compiles_for_arm():
    assert compiles(MergeShape(isa_named("neon")))
    assert compiles(TermShape(isa_named("neon"), "f32"))


def test_what_threads_run_compiles_for_arm():
    assert compiles(ServingShape(isa_named("neon")))


def compiles(shape):
    code = compile_ir(shape, emit(shape))
    return code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == 183  # AArch64
