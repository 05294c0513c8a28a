"""Objects as notebooks show them: well-formed, with the right numbers; figures; and the notebook of the examples."""

from __future__ import annotations

import re
import warnings
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from conftest import ROOT

import speedlight as sl
from speedlight.expressions.tree import evaluate
from speedlight.host import notebooks


def parsed(x):
    """What an object shows, read as XML, which is stricter than HTML."""
    html = x if isinstance(x, str) else x._repr_html_()
    assert len(html) < 6000
    return ElementTree.fromstring(f"<div>{html}</div>")


def text_of(root):
    return " ".join(" ".join(root.itertext()).split())


MASKS = {  # and the positions that a picture has
    "causal": (sl.causal(), 32),
    "window": (sl.causal() & sl.window(100, 0), 256),
    "every second": (lambda b, h, i, j: (i - j) % 2 == 0, 32),
    "documents": (sl.documents(np.repeat(np.arange(5), [20, 31, 9, 25, 15])), 100),
    "of a head": (lambda b, h, i, j: (j <= i) | (h > 0), 32),
    "nothing": (lambda b, h, i, j: j < -1, 32),
}


def classes_of(root):
    """The square of a picture: 0 skipped, 1 mixed, 2 full."""
    (svg,) = root.iter("{http://www.w3.org/2000/svg}svg")
    side = int(svg.get("viewBox").split()[-1])
    found = np.zeros((side, side), int)
    for path in svg.iter("{http://www.w3.org/2000/svg}path"):
        kind = list(notebooks.TILE_COLOURS.values()).index(path.get("stroke"))
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)", path.get("d")):
            found[int(y), int(x) : int(x) + int(width)] = kind
    return found


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_a_picture_of_its_tiles(name):
    mask, count = MASKS[name]
    mask = sl.expression(mask)
    root = parsed(mask)
    assert repr(mask) in text_of(root) and f"{count} queries x {count} keys" in text_of(root)
    assert (", head 0" in text_of(root)) == (name == "of a head")
    where = {"b": 0, "h": 0, "i": np.arange(count)[:, None], "j": np.arange(count)}
    where = {n: np.asarray(x, np.int64) for n, x in where.items()}
    seen = np.broadcast_to(evaluate(mask.root, where, np.float32, seen=False), (count, count))
    found, side = classes_of(root), -(-count // 32)
    for (y, x), kind in np.ndenumerate(found):
        tile = seen[y * side : (y + 1) * side, x * side : (x + 1) * side]
        assert kind == int(tile.any()) + int(tile.all())


def test_a_mask_that_nobody_can_bound_is_mixed():
    root = parsed(sl.expression(lambda b, h, i, j: sl.sin(sl.cast(i, float)) > 0))
    assert set(classes_of(root).ravel()) == {1}
    assert len(parsed(sl.expression(lambda b, h, i, j: j < i + (1 << 61)))) == 2


def test_a_score_is_its_formula():
    assert text_of(parsed(sl.softcap(30.0))) == repr(sl.softcap(30.0))


def test_texts_are_escaped():
    html = sl.expression(lambda b, h, i, j: (j <= i) & (i < 9))._repr_html_()
    assert "&lt;= i" in html and "(j <= i)" not in html
    root = parsed(notebooks.table([("<b>", "a & 'b' </td><script>")]) + notebooks.code("<i>"))
    assert text_of(root) == "<b> a & 'b' </td><script> <i>" and not list(root.iter("script"))
    assert text_of(parsed(notebooks.bars("<p>", "<u>", 3, [2]))) == "<p> sequence 0 2 <u>"
    assert "<i>" in text_of(parsed(notebooks.tiles([[1]], "<i> \"'")))


def test_a_plan_is_its_table():
    plan = sl.plan(q_heads=8, q_len=300, head_dim=64, causal=True)
    rows = [tuple("".join(cell.itertext()) for cell in row) for row in parsed(plan).iter("tr")]
    assert rows == plan.rows() and len(rows) > 8


def meters(x):
    found = [(int(y.get("value")), int(y.get("max"))) for y in parsed(x).iter("meter")]
    assert repr(x) in text_of(parsed(x))
    return found


def test_a_cache_is_its_fill():
    x = np.ones((3, 1, 7, 8), np.float32)
    cache = sl.KVCache(layers=2, batch=3, kv_heads=1, head_dim=8, capacity=50)
    cache.append(1, x, x, new_lengths=[7, 0, 3])
    assert meters(cache) == [(7, 50), (0, 50), (3, 50)] and "sequence 2 3 tokens" in text_of(parsed(cache))
    windowed = sl.KVCache(layers=1, batch=3, kv_heads=1, head_dim=8, window=4)
    windowed.append(0, x, x)
    assert meters(windowed) == [(7, windowed._ring.tokens)] * 3
    many = sl.KVCache(layers=1, batch=40, kv_heads=1, head_dim=8, capacity=50)
    assert len(meters(many)) == 16 and "… 24 more" in text_of(parsed(many))


def test_a_pool_is_its_pages():
    pool = sl.PagePool(layers=1, pages=8, page_size=16, kv_heads=1, head_dim=8)
    one, x = pool.sequence(), np.ones((40, 1, 8), np.float32)
    pool.append(0, [one], x, x)
    other = one.fork()
    assert meters(pool) == [(3, 8), (3, 8)] and "5 pages free" in text_of(parsed(pool))
    del other
    assert meters(pool) == [(3, 8)]


def test_figures_are_those_of_the_command(rng, tmp_path):
    """Of a mask, a plan and weights; and pyplot has none of them."""
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    q = rng.standard_normal((2, 4, 9, 8), dtype=np.float32)
    k = rng.standard_normal((2, 2, 12, 8), dtype=np.float32)
    figure = sl.view(q, k, head=[0, 3], item=1, causal=True, title="mine", span=(2, 9), labels=[*"abcdefghijkl"])
    weights = sl.reference.weights(q, k, causal=True)
    for axes, head in zip(figure.axes, (0, 3), strict=False):
        (image,) = axes.images
        np.testing.assert_allclose(image.get_array(), np.maximum(weights[1, head, 2:9, 2:9], 1e-3))
        assert axes.get_title() == f"head {head}"
        assert [x.get_text() for x in axes.get_xticklabels()] == [*"cdefghi"]
    assert figure.get_suptitle() == "mine"
    ticks = sl.view(q, k, span=(2, 3)).axes[0].get_xticks()
    assert (ticks == ticks.round()).all()
    mask = sl.causal() & sl.window(200, 0)
    plan = sl.plan(q_heads=1, q_len=1000, head_dim=64, mask=mask)
    for drawn in (sl.view(mask, q_len=1000), sl.view(plan), sl.view(sl.causal(), q_len=1000, window=(200, 0))):
        (axes,) = drawn.axes
        counts = np.bincount(axes.images[0].get_array().ravel().astype(int), minlength=3)
        assert counts.tolist() == [plan.tiles_skipped, plan.tiles_mixed, plan.tiles_full]
        assert "of the work is done" in axes.get_title() and "(j <= i)" in axes.get_title()
    assert plt.get_fignums() == before
    figure.savefig(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ((None,), {}, "mask_or_q: expected a mask, a Plan, or q beside k; got None."),
        ((sl.causal(),), {"mask": sl.causal()}, "mask: expected q and k beside it; got a mask or a Plan."),
        ((sl.causal(),), {"span": (0, 3)}, "span: expected q and k beside it; got a mask or a Plan. Leave it out."),
        ((sl.causal(),), {"q_len": 0}, "q_len: expected queries and keys to draw; got none."),
        ((np.tri(6, dtype=bool),), {}, "q_len: expected the mask's 6 keys; got 4096. Write q_len=6."),
        ((np.ones((1, 1, 6, 4)),), {}, "k: expected keys beside queries, or a mask alone; got none."),
        ((np.ones((1, 1, 6, 4)),) * 2, {"span": 3}, "span: expected a pair of positions, (first, end); got 3."),
        ((sl.causal(),), {"head": -1}, "head: expected 0 to 0; got -1."),
        ((sl.softcap(3.0),), {}, "mask: expected a mask; got the score"),
        ((np.ones((1, 1, 3, 4)),) * 2, {"labels": ["a"]}, "labels: expected 3, one for each key; got 1."),
        ((np.ones((1, 1, 3, 4)),) * 2, {"span": (2, 9)}, "span: expected positions from 0 to 3, the first below"),
        ((np.ones((1, 1, 3, 4)),) * 2, {"item": 1}, "item: expected 0 to 0; got 1."),
        ((np.ones((1, 3, 4)),) * 2, {}, "q: expected arrays of shape (batch, heads, length, head_dim)"),
    ],
)
def test_errors_of_figures(given, options, says):
    with pytest.raises(sl.Error, match=f"^{re.escape(says)}"):
        sl.view(*given, **options)


def test_the_notebook_runs(tmp_path, monkeypatch):
    """From its folder, in a kernel of its own; every picture comes once."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    book = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    nbformat.validate(book)
    assert not any(cell.get("outputs") for cell in book.cells)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zmq and asyncio
        folder = {"metadata": {"path": str(ROOT / "examples")}}
        NotebookClient(book, timeout=120, kernel_name="python3", resources=folder).execute()
    outputs = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    kinds = [kind for some in outputs for x in some for kind in x.get("data", {})]
    assert kinds.count("image/png") == 2 and kinds.count("text/html") == 4
    texts = "".join(x.get("text", x.get("data", {}).get("text/plain", "")) for some in outputs for x in some)
    assert texts.startswith("(1, 8, 1024, 64)") and "True\n" in texts and "3.76 times smaller" in texts
