"""docs/gallery.md: each picture is of the code above it, and plans of that code count what its mask shows."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

from speedlight.expressions.tree import evaluate
from speedlight.problem.problem import TILE
from speedlight.problem.tiles import Rows, grid, integers_of

PAGE = ROOT / "docs" / "gallery.md"


def loaded():
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "tools" / "gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GALLERY = loaded()
SECTIONS = dict(GALLERY.sections(PAGE.read_text()))


def test_every_section_has_its_picture_and_every_picture_its_section():
    there = {x.name for x in (ROOT / "docs" / "gallery").iterdir()}
    assert there == {GALLERY.file_of(title) for title in SECTIONS} and len(there) >= 12
    for title in SECTIONS:
        assert f"![{title}](gallery/{GALLERY.file_of(title)})" in PAGE.read_text()


@pytest.mark.parametrize("title", SECTIONS)
def test_pictures_are_of_their_code(title):
    """`make gallery` draws them anew."""
    with Image.open(ROOT / "docs" / "gallery" / GALLERY.file_of(title)) as picture:
        assert picture.text["Source"] == SECTIONS[title]
        colours = {x[:3] for _, x in picture.convert("RGB").getcolors(1 << 16)}
    assert {(230, 159, 0), (242, 242, 242)} <= colours or title == "BigBird"  # mixed and skipped


@pytest.mark.parametrize("title", SECTIONS)
def test_plans_count_what_is_visible(title):
    """Of the last 512 queries."""
    names: dict = {}
    exec(SECTIONS[title], names)
    options = names["options"] | {"q_len": 512, "k_len": 4096}
    plan = GALLERY.sl.plan(q_heads=1, head_dim=64, exact=True, **options)
    p = plan.problem
    i, j = np.arange(p.q_lengths[0])[:, None] + p.q_starts[0], np.arange(p.k_lengths[0])
    seen = (j <= i) if p.causal else np.ones((len(i), len(j)), bool)
    if p.mask is not None:
        where = {"b": np.int64(0), "h": np.int64(0), "i": i, "j": j}
        seen = seen & np.broadcast_to(evaluate(p.mask.root, where, np.float32, seen=False), seen.shape)
    assert plan.visible_pairs == seen.sum()
    assert plan.tile_flops >= plan.flops


def mapped(plan, most: int) -> tuple[np.ndarray, int, int]:
    """The map of the first head of the first item, and how many panels and tiles a cell has."""
    kinds, queries, keys = grid(Rows(plan.problem, 0, 0, plan.panel, integers_of(plan.problem)), most)
    return kinds, queries // plan.panel, keys // TILE


GROUPED = {  # tiles that only the plan's trimming makes full, and heads side by side
    "grouped": {"q_heads": 3, "kv_heads": 1, "q_len": 700, "k_len": 900, "causal": True},
    "trimmed": {"q_heads": 1, "q_len": 500, "mask": lambda b, h, i, j: j % 128 < 48},
}


@pytest.mark.parametrize("title", [*SECTIONS, *GROUPED])
def test_pictures_have_the_tiles_of_their_plans(title):
    plan = GALLERY.planned(SECTIONS[title]) if title in SECTIONS else GALLERY.sl.plan(head_dim=64, **GROUPED[title])
    kinds, *cell = mapped(plan, 1 << 20)
    counts = plan.tiles_skipped, plan.tiles_mixed, plan.tiles_full
    assert cell == [1, 1] and np.bincount(kinds.ravel(), minlength=3).tolist() == list(counts)
    wide, down, across = mapped(plan, 3)  # a cell is of a class if all its tiles are; else mixed
    for at, kind in np.ndenumerate(wide):
        tiles = {*kinds[at[0] * down : (at[0] + 1) * down, at[1] * across : (at[1] + 1) * across].ravel().tolist()}
        assert kind == (tiles.pop() if len(tiles) == 1 else 1)
