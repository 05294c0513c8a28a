"""Hot loops of every register tile that ships hold their sums in registers, as the emitted assembly says: without Arm,
too. `make predict` says what that is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import FULL

from speedlight.cpu.memory.shape import Shape
from speedlight.host.machine import Isa, isa_named
from speedlight.host.tunings import TUNINGS

MOST = 2  # copies from register to register, and instructions that touch the stack, in a turn of a loop
# Who ships more: of a function the most copies/stack accesses in a turn. This may only shrink; float32 on Arm, forward
# and decoding, has no place in it. A loop of x86 has few registers for addresses: most of these are no spilled sums.
KNOWN = """
backward_f32_neon_8x3               product_tile 0/4, into_queries_predicated 3/0
forward_f32_avx2_4x1                softmax_tile 2/3, value_tile 0/3
forward_f32_avx2_4x2                softmax_tile 7/20, value_tile 0/4
forward_f32_avx2_4x3                softmax_tile 8/35, value_tile 0/3
backward_f32_avx2_4x3               weights 7/40, into_queries_predicated 4/0
decode_f32_avx2                     weigh 3/14, value_rows_1 0/7
decode_f32_avx2_cached              weigh 2/15, score_heads 0/4
forward_f32_avx512_8x1              value_tile 0/11
forward_f32_avx512_8x2              softmax_tile 4/0, value_tile 0/11
forward_f32_avx512_8x3              softmax_tile 6/4, value_tile 0/17
backward_f32_avx512_8x3             product_tile 0/6, weights 6/9, into_queries 0/8
decode_f32_avx512                   weigh 4/0, value_rows_2 0/7, value_rows_1 0/7
decode_f32_avx512_cached            weigh 4/0, value_rows_4 0/4, value_rows_2 0/7, value_rows_1 0/8
decode_f32_avx512_intel             weigh 4/0, value_rows_2 0/7, value_rows_1 0/7
decode_f32_avx512_cached_intel      score_lanes 0/3, weigh 4/0, value_rows_4 0/4, value_rows_2 0/7, value_rows_1 0/8
forward_bf16_avx512bf16_8x1         softmax_tile 4/0, value_tile 0/11
forward_bf16_avx512bf16_8x2         softmax_tile 14/18, value_tile 0/11
forward_bf16_avx512bf16_8x3         softmax_tile 24/24, value_tile 0/17
backward_bf16_avx512bf16_8x3        product_tile 0/6, weights 19/34, into_queries 0/8, into_queries_predicated 0/4
decode_bf16_avx512bf16              weigh 4/0, value_rows_4 0/7, value_rows_2 0/23, value_rows_1 0/23
decode_bf16_avx512bf16_cached       weigh 4/1, value_rows_4 0/4, value_rows_2 0/7, value_rows_1 0/8
decode_bf16_avx512bf16_intel        weigh 4/0, value_rows_8 0/4, value_rows_4 0/7, value_rows_2 0/23, value_rows_1 0/23
decode_bf16_avx512bf16_cached_intel score_lanes 0/3, weigh 4/0, value_rows_4 0/4, value_rows_2 0/7, value_rows_1 0/8
backward_f64_neon_8x3               product_tile 0/4, into_queries_predicated 3/0
decode_bf16_neon_cached             value_rows_2 4/2
forward_f64_avx2_4x1                softmax_tile 2/13, value_tile 0/3
forward_f64_avx2_4x2                softmax_tile 5/31, value_tile 0/4
forward_f64_avx2_4x3                softmax_tile 15/53, value_tile 0/3
backward_f64_avx2_4x3               weights 13/70, into_queries_predicated 4/0
decode_f64_avx2                     weigh 2/27, value_rows_1 0/7
decode_f64_avx2_cached              score_lanes 18/56, weigh 1/27
decode_f16_avx2                     weigh 3/14
decode_f16_avx2_cached              score_lanes 0/4, weigh 2/15, score_heads 0/4
decode_bf16_avx2                    weigh 3/14
decode_bf16_avx2_cached             weigh 2/15, value_rows_2 2/3, value_rows_1 4/0, score_heads 8/4
forward_f64_avx512_8x1              value_tile 0/11
forward_f64_avx512_8x2              softmax_tile 4/3, value_tile 0/11
forward_f64_avx512_8x3              softmax_tile 14/12, value_tile 0/17
backward_f64_avx512_8x3             product_tile 0/6, weights 8/14, into_queries 0/8
decode_f64_avx512                   weigh 4/2, value_rows_2 0/7, value_rows_1 0/7
decode_f64_avx512_cached            score_lanes 0/4, weigh 4/2, value_rows_4 0/4, value_rows_2 0/7
decode_f64_avx512_cached            value_rows_1 0/8, score_heads 0/4
decode_f64_avx512_intel             weigh 4/2, value_rows_2 0/7, value_rows_1 0/7
decode_f64_avx512_cached_intel      score_lanes 0/4, weigh 4/2, value_rows_4 0/4, value_rows_2 0/7
decode_f64_avx512_cached_intel      value_rows_1 0/8, score_heads 0/4
decode_f16_avx512                   weigh 4/0, value_rows_2 0/4
decode_f16_avx512_cached            weigh 4/0, value_rows_4 0/4, value_rows_2 0/3, value_rows_1 0/6
decode_f16_avx512_intel             weigh 4/0, value_rows_2 0/4
decode_f16_avx512_cached_intel      weigh 4/0, value_rows_4 0/4, value_rows_2 0/3, value_rows_1 0/6
decode_bf16_avx512                  weigh 4/0, value_rows_2 0/15
decode_bf16_avx512_cached           weigh 4/0, value_rows_2 10/11, value_rows_1 8/8, score_heads 4/0
decode_bf16_avx512_intel            weigh 4/0, value_rows_2 0/15
decode_bf16_avx512_cached_intel     score_lanes 4/1, weigh 4/0, value_rows_2 10/11, value_rows_1 8/8, score_heads 4/0
"""


@pytest.fixture(autouse=True)
def listing(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


def shapes_of(isa: Isa, storage: str) -> Iterator[tuple[str, Shape]]:
    """Every kernel whose products are vectors': its name, and its shape. Narrow numbers are wide ones but in caches."""
    for family in ("arm",) if isa.arch == "aarch64" else ("other", *["intel512"] * FULL)[: isa.registers // 16]:
        tuning = TUNINGS[family]
        of_tuning = {"fetching": tuning.fetching, "own_tiles": tuning.register_tiles(isa)}
        if family != "intel512" and (storage in ("f32", "f64") or isa.product(storage) != "fma"):
            for vectors in (1, 2, 3) if FULL else (2, 3) if isa.arch == "aarch64" else (3,):  # those that ship
                s = Shape("forward", isa, storage, vectors, **of_tuning)
                yield s.stem, s
            s = Shape("backward", isa, storage, 3, **of_tuning)
            yield s.stem, s
        for cached in (False, True):
            s = Shape("decode", isa, storage, cached=cached, **of_tuning)
            yield f"{s.stem}{'_cached' * cached}{'_intel' * (family == 'intel512')}", s


def excess(s: Shape) -> dict[str, tuple[int, int]]:
    """The functions of a kernel with a loop above the limits, and their most copies and stack accesses."""
    from listing import hot_listing, hot_loops

    loops = hot_loops(hot_listing(s))
    assert len({x.function for x in loops}) >= 3  # they are seen at all
    found: dict[str, tuple[int, int]] = {}
    for x in loops:
        if max(x.copies, x.stack) > MOST:
            copies, stack = found.get(x.function, (0, 0))
            found[x.function] = max(copies, x.copies), max(stack, x.stack)
    return found


def known() -> dict[str, dict[str, tuple[int, int]]]:
    rows: dict[str, dict[str, tuple[int, int]]] = {}
    for line in KNOWN.split("\n")[1:-1]:
        name, *words = line.replace(",", "").split()
        for function, most in zip(words[::2], words[1::2], strict=True):
            copies, stack = map(int, most.split("/"))
            rows.setdefault(name, {})[function] = copies, stack
    return rows


CASES = [("neon", "f32"), ("avx2", "f32"), ("avx512", "f32"), ("avx512bf16", "bf16")]
MORE = [(unit, storage) for unit in ("neon", "avx2", "avx512") for storage in ("f64", "f16", "bf16")]


@pytest.mark.parametrize(("unit", "storage"), CASES + MORE * FULL)
def test_sums_stay_in_registers(unit, storage):
    for name, s in shapes_of(isa_named(unit), storage):
        found, most = excess(s), known().get(name, {})
        assert found.keys() == most.keys(), f"{name}: more than {MOST} copies or stack accesses, beside those known"
        assert all(x <= y for key in found for x, y in zip(found[key], most[key], strict=True)), (name, found)


def test_arm_is_without_exception():
    assert not [x for x in known() if x.startswith(("forward_f32_neon", "decode_f32_neon"))]


def test_loops_are_read():
    """Of both architectures: a loop within a loop, its copies, its sums, its spills."""
    from listing import loops_of

    arm = [
        ".LBB0_1:",
        "mov x1, x2",
        ".LBB0_2:",
        "mov v1.16b, v2.16b",
        "fmla v1.4s, v2.4s, v3.s[0]",
        "str q1, [sp, #16]",
    ]
    arm += ["cmp x1, x2", "b.lt .LBB0_2", "cbnz x3, .LBB0_1", "ret"]
    x86 = [".LBB0_1:", ".LBB0_2:", "vmovaps %zmm1, %zmm2", "vfmadd231ps %zmm1, %zmm2, %zmm3", "vmovups %zmm3, 8(%rsp)"]
    x86 += ["jl .LBB0_2", "jne .LBB0_1", "retq"]
    for lines in (arm, x86):
        text = "\n".join([x if x.endswith(":") else "\t" + x.replace(" ", "\t", 1) for x in lines])
        outer, inner = loops_of(f"f:\n{text}\n.Lfunc_end0:\n")
        assert (inner.height, inner.products, inner.copies, inner.stack) == (1, 1, 1, 1)
        assert (outer.height, outer.products) == (2, 1) and len(outer.body) > len(inner.body)
