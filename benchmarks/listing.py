"""Loops of micro-kernels as LLVM's assembly has them, for x86-64 and 64-bit Arm."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from speedlight.cpu.kernels.gradient_tiles import Weights
from speedlight.cpu.kernels.panel_products import score_tile
from speedlight.cpu.kernels.panel_weights import softmax_tile
from speedlight.cpu.kernels.row_scores import score, score_heads
from speedlight.cpu.kernels.row_weights import value_tiles, weigh
from speedlight.cpu.language.vector import Module
from speedlight.cpu.memory.shape import Shape
from speedlight.cpu.products.outer_gradients import into_keys, into_queries, product_tile
from speedlight.cpu.products.product import outer_product_of, product_of
from speedlight.cpu.runtime.compile import compile_ir

_LABEL = re.compile(r"^(\.LBB\d+_\d+|[A-Za-z_][\w.]*):")
_JUMP = re.compile(r"^\t(?:b(?:\.\w+)?|cbn?z|tbn?z|j\w+)\t(?:[^,]+, *)*(\.LBB\d+_\d+)\b")
_PRODUCT = re.compile(r"^\t(fml[as]|bfdot|bfmmla|bfmlal[bt]|vfn?m(?:add|sub)\d+p[sd]|vdpbf16ps|tdpbf16ps)\b")
_COPY = re.compile(r"^\tf?mov\tv\d+\.\w+, v\d+\.\w+$|^\tvmov[ad]\w*\t%[xyz]mm\d+, %[xyz]mm\d+$")
_STACK = re.compile(r"\[sp\b|\(%r[sb]p")


class Loop(NamedTuple):
    """A loop of a function: its instructions in order, from its label to the jump back."""

    function: str
    body: tuple[str, ...]
    height: int  # 1: has no other loop inside

    @property
    def products(self) -> int:
        """Counts multiply-adds of vectors."""
        return sum(bool(_PRODUCT.match(x)) for x in self.body)

    @property
    def copies(self) -> int:
        """Counts copies from vector register to vector register."""
        return sum(bool(_COPY.match(x)) for x in self.body)

    @property
    def stack(self) -> int:
        """Counts instructions that touch the stack."""
        return sum(bool(_STACK.search(x)) for x in self.body)


def hot_listing(s: Shape) -> str:
    """Returns the assembly of the micro-kernels in which a kernel of this shape spends its time."""
    module = Module("hot")
    match s.kind:
        case "forward":
            product = product_of(s)
            score_tile(module, s)
            softmax_tile(module, s)
            product.value_tile(module)
            product.predicated_tile(module)
        case "backward":
            product = outer_product_of(s)
            product_tile(product, module)
            Weights(module, s, last=True).function()
            for predicated in (False, True):
                into_queries(product, module, predicated=predicated)
            for rows, vectors in s.tiles.gradients:
                into_keys(product, module, rows, vectors)
        case _:
            score(module, s)
            weigh(module, s)
            value_tiles(module, s)
            if s.cached:
                score_heads(module, s)
    return compile_ir(s, str(module), assembly=True)


def loops_of(listing: str) -> list[Loop]:
    """Returns all loops of a listing in order."""
    found = []
    for name, lines in _functions(listing).items():
        at = {m[1]: i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
        jumps = sorted((at[m[1]], i + 1) for i, line in enumerate(lines) if (m := _JUMP.match(line)))
        ends = {first: end for first, end in jumps if first < end}  # the last jump back of each
        heights: dict[int, int] = {}
        for first, end in sorted(ends.items(), key=lambda x: x[1] - x[0]):
            inside = [heights[x] for x in heights if first < x < end]
            heights[first] = 1 + max(inside, default=0)
        for first, end in ends.items():
            body = tuple(x for x in lines[first:end] if _is_instruction(x))
            found.append(Loop(name, body, heights[first]))
    return found


def hot_loops(listing: str, least: int = 4) -> list[Loop]:
    """Returns the innermost loops that have so many multiply-adds."""
    return [x for x in loops_of(listing) if x.height == 1 and x.products >= least]


def blocks_of(listing: str, function: str) -> list[list[str]]:
    """Returns the instructions of a function from label to label."""
    blocks: list[list[str]] = [[]]
    for line in _functions(listing)[function]:
        if _LABEL.match(line):
            blocks.append([])
        elif _is_instruction(line):
            blocks[-1].append(line)
    return blocks


def _is_instruction(line: str) -> bool:
    return line.startswith("\t") and not line.startswith(("\t.", "\t#"))


def _functions(listing: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: Any = None
    for line in listing.splitlines():
        label = _LABEL.match(line)
        if label and not label[1].startswith("."):
            lines = found.setdefault(label[1], [])
        elif line.startswith(".Lfunc_end"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return found
