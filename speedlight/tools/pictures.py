"""Pictures, drawn with matplotlib where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from .. import reference
from ..errors import ArgumentError, FileError, how_to_install
from ..problem.plan import Plan
from ..problem.problem import Problem
from ..problem.tiles import Rows, grid, integers_of
from ..problem.work import all_pairs
from .reports import progress

SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = {"skipped": "#f2f2f2", "mixed": "#e69f00", "full": "#0072b2"}  # told apart by every eye, and in grey


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ArgumentError(
            f"--output: a picture needs matplotlib. Install it with: {how_to_install('plot')}"
        ) from None
    return plt


def check_path(path: Path, option: str = "--output") -> None:
    """Before any work: a suffix that can be drawn, in a directory that exists."""
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"{option}: expected a name that ends in {', '.join(SUFFIXES)}; got {path.name!r}.")
    if not path.parent.is_dir():
        raise ArgumentError(f"{option}: expected a directory that exists; got {path.parent}.")


def tile_map(plan: Plan, head: int, text: str, path: Path, *, size: tuple[float, float] = (7.2, 7.0)) -> None:
    """Which tiles are computed whole, computed under the mask, and skipped: queries downwards, keys to the right.

    A small `size`, in inches, has shorter words.
    """
    plt = _pyplot()
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(figsize=size, layout="constrained")
    queries, keys = _draw_tiles(axes, plan, head)
    whole = plan.tile_flops + plan.skipped_flops
    computed = plan.tile_flops / whole if whole else 0.0
    square, visible = all_pairs(plan.problem), ""
    if plan.visible_pairs is not None and square:
        visible = f"{plan.visible_pairs / square:.1%} of the pairs are visible"
    small = size[0] < 6  # then in shorter words
    several = plan.problem.q_heads > 1 and not small
    visible += (";\n" if several else "; ") * bool(visible)  # the title is not wider than the picture
    work = f"{computed:.1%} of the work{' of all heads' * several} is done"
    work += "" if small else f", {1 - computed:.1%} is skipped"
    if several:
        axes.set_ylabel(f"query position, {_heads_drawn(plan.problem, head)}")
    axes.set_title(f"{fill(text, 75)}\n{visible}{work}", fontsize=9 if small else 11)
    shown = f"a cell: {queries:g} queries x {keys} keys"
    names = {"full": "full: without the mask", "mixed": "mixed: under the mask", "skipped": "skipped: nothing visible"}
    handles = [
        Patch(facecolor=_COLOURS[n], edgecolor="#666666", label=n if small else label) for n, label in names.items()
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3, frameon=False, title=shown, title_fontsize=9, fontsize=9
    )
    figure.savefig(path, dpi=100 if small else 150)
    plt.close(figure)


def _heads_drawn(problem: Problem, head: int) -> str:
    """Whose tiles those of a head are: all that share its keys go through them together."""
    first, end = head // problem.group * problem.group, (head // problem.group + 1) * problem.group
    which = f"head {head}" if problem.group == 1 else f"heads {first} to {end - 1}"
    return f"{which} of {problem.q_heads}"


def _draw_tiles(axes: Any, plan: Plan, head: int) -> tuple[float, int]:
    """The map of one item; returns the queries and keys of a cell."""
    from matplotlib.colors import ListedColormap

    p = plan.problem
    rows = Rows(p, 0, head // p.group, plan.panel, integers_of(p))
    kinds, queries, keys = grid(rows)
    # the last cell may reach past the end: draw it whole and cut the axes there
    first, last = p.q_starts[0], p.q_starts[0] + p.q_lengths[0]
    extent = (p.k_start, p.k_start + kinds.shape[1] * keys, first + kinds.shape[0] * queries / p.group, first)
    axes.imshow(
        kinds,
        cmap=ListedColormap(list(_COLOURS.values())),
        vmin=0,
        vmax=2,
        interpolation="nearest",
        aspect="auto",
        extent=extent,
    )
    axes.set_xlim(p.k_start, p.k_start + rows.keys)
    axes.set_ylim(last, first)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda x, _: f"{int(x):,}")
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    return queries / p.group, keys


_PIXELS = 700  # cells of a picture to a side; more tokens share one
_ROWS = 128  # whose weights are in memory at a time
_FAINTEST = 1e-3


def draw_weights(
    q: np.ndarray,
    k: np.ndarray,
    heads: list[int],
    item: int,
    span: str | None,
    labels: Path | None,
    options: Callable[[int], dict[str, Any]],
    path: Path,
) -> dict[str, Any]:
    """A panel of attention weights for each head: queries downwards, keys to the right. `options` are a head's."""
    if q.ndim != 4 or k.ndim != 4:
        raise ArgumentError(
            f"--q: expected arrays of shape (batch, heads, length, head_dim); got {q.shape} and {k.shape}."
        )
    fits = (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3]) and k.shape[1] and not q.shape[1] % k.shape[1]
    if not fits:
        raise ArgumentError(
            f"--k: expected shape ({q.shape[0]}, kv heads, length, {q.shape[3]}), with kv heads that divide q's "
            f"{q.shape[1]} heads; got {k.shape}."
        )
    for name, chosen, most in (("--item", [item], q.shape[0]), ("--head", heads, q.shape[1])):
        if any(not 0 <= x < most for x in chosen):
            raise ArgumentError(f"{name}: expected 0 to {most - 1}; got {', '.join(map(str, chosen))}.")
    rows, keys = _spans(span, q.shape[2], k.shape[2])
    tokens = _labels(labels, k.shape[2])
    plt = _pyplot()
    from matplotlib.colors import LogNorm

    across = min(len(heads), 3)
    down = -(-len(heads) // across)
    side = 5.6 if len(heads) == 1 else 4.2
    figure, axes = plt.subplots(
        down, across, figsize=(side * across + 0.9, side * down + 0.4), layout="constrained", squeeze=False
    )
    drawn, largest = None, []
    with progress("weights of heads", len(heads)) as advance:
        cells_of = []
        for head in heads:
            cells_of.append(_cells(q, k, item, head, options(head), rows, keys))
            advance()
    for place, head, cells in zip(axes.flat, heads, cells_of, strict=False):
        largest.append({"head": head, "largest": float(cells.max(initial=0.0))})
        extent = (keys[0] - 0.5, keys[1] - 0.5, rows[1] - 0.5, rows[0] - 0.5)
        faint = np.maximum(cells, _FAINTEST)  # one scale for all heads
        drawn = place.imshow(
            faint, cmap="cividis", norm=LogNorm(_FAINTEST, 1.0), interpolation="nearest", aspect="auto", extent=extent
        )
        place.set_title(f"head {head}", fontsize=10)
        if tokens is not None:
            _name_ticks(place.xaxis, keys, tokens, 90)
            _name_ticks(place.yaxis, rows, tokens[k.shape[2] - q.shape[2] :], 0)
    for place in list(axes.flat)[len(heads) :]:
        place.set_visible(False)
    for place in axes[-1]:
        place.set_xlabel("key")
    for place in axes[:, 0]:
        place.set_ylabel("query")
    figure.suptitle(f"Attention weights, item {item} of the batch", fontsize=11)
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8, pad=0.01)
    bar.set_label("attention weight")
    bar.set_ticks([1e-3, 1e-2, 1e-1, 1.0], labels=["≤ 0.001", "0.01", "0.1", "1"])
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return {"weights": {"item": item, "queries": rows, "keys": keys, "heads": largest}}


def _name_ticks(axis: Any, span: tuple[int, int], tokens: list[str], rotation: int) -> None:
    """Tokens instead of numbers; every few, where there are many."""
    at = list(range(*span, max(1, -(-(span[1] - span[0]) // 42))))
    axis.set_ticks(at, [tokens[i] for i in at], fontsize=6 if len(at) > 24 else 8)
    axis.set_tick_params(rotation=rotation)


def _cells(
    q: np.ndarray,
    k: np.ndarray,
    item: int,
    head: int,
    options: dict[str, Any],
    rows: tuple[int, int],
    keys: tuple[int, int],
) -> np.ndarray:
    """The weights of some rows and keys of a head, computed by rows; where tokens share a cell, the largest."""
    kv_head = head // (q.shape[1] // max(1, k.shape[1]))
    one = k[item : item + 1, kv_head : kv_head + 1]
    tall, wide = (max(1, -(-(end - first) // _PIXELS)) for first, end in (rows, keys))
    bands, step = [], max(1, _ROWS // tall) * tall
    for start in range(*rows, step):
        some = q[item : item + 1, head : head + 1, start : min(start + step, rows[1])]
        w = reference.weights(some, one, q_start=start + k.shape[2] - q.shape[2], **options)[0, 0][:, slice(*keys)]
        w = np.pad(w, ((0, -w.shape[0] % tall), (0, -w.shape[1] % wide)))
        bands.append(w.reshape(w.shape[0] // tall, tall, w.shape[1] // wide, wide).max(axis=(1, 3)))
    return np.concatenate(bands)


def _spans(text: str | None, *lengths: int) -> list[tuple[int, int]]:
    """Which rows and keys to draw: where one of them is shorter, as many as there are."""
    if text is None:
        return [(0, length) for length in lengths]
    try:
        first, end = (int(x) for x in text.split(":"))
    except ValueError:
        raise ArgumentError(f"--span: expected first:end, such as 0:40; got {text!r}.") from None
    most = max(lengths) if 0 <= first < min(lengths) else min(lengths)
    if not 0 <= first < min(end, most) or end > most:
        raise ArgumentError(f"--span: expected positions from 0 to {most}, the first below the second; got {text!r}.")
    return [(first, min(end, length)) for length in lengths]


def _labels(path: Path | None, length: int) -> list[str] | None:
    if path is None:
        return None
    try:
        tokens = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"--labels: {path}: {getattr(error, 'strerror', None) or error}.") from None
    if len(tokens) != length:
        raise ArgumentError(f"--labels: expected {length} lines, one for each key; got {len(tokens)} in {path}.")
    return [t.replace("$", r"\$") for t in tokens]


_COLOUR_OF = {"float32": "#0072b2", "float16": "#009e73", "bfloat16": "#d55e00", "float64": "#cc79a7"}
_MARKERS = "osD^v"  # of head dims, ascending
_SLOTS = {"bfloat16": 1, "float16": 2}  # to the right of wider ones that have the same work per byte


def roofline(report: dict[str, Any], path: Path) -> None:
    """GFLOP/s over FLOPs per byte that must be moved, under the measured roofs: full and causal side by side.

    Filled: ours; hollow, and linked to it: the best peer on that problem. Colours are dtypes, shapes head dims.
    """
    plt = _pyplot()
    rows = [r for r in report["rows"] if "gflops" in r]
    causal = sorted({r["causal"] for r in rows}) or [False]
    figure, axes = plt.subplots(
        1, len(causal), figsize=(1.4 + 4.6 * len(causal), 5.4), layout="constrained", sharey=True, squeeze=False
    )
    dims, dtypes = sorted({r["head_dim"] for r in rows}), list(dict.fromkeys(r["dtype"] for r in rows))
    markers = {d: _MARKERS[n % len(_MARKERS)] for n, d in enumerate(dims)}
    for place, is_causal in zip(axes[0], causal, strict=True):
        mine = [r for r in rows if r["causal"] == is_causal]
        _roofs(place, mine)
        for r in mine:
            slot = dims.index(r["head_dim"]) + len(dims) * _SLOTS.get(r["dtype"], 0)
            _linked(place, r, markers[r["head_dim"]], 1.06 ** (slot - (3 * len(dims) - 1) / 2))
        place.set_title("causal" if is_causal else "full", fontsize=10)
        place.set_xlabel("FLOPs per byte that must be moved")
        place.tick_params(labelsize=8)
    axes[0][0].set_ylabel("GFLOP/s of visible work")
    what = "Roofline of gradients" if report.get("backward") else "Roofline"
    machine = ", ".join(report[x] for x in ("machine", "family", "isa") if x in report)
    has_peers = any([r["ratios"] for r in rows])
    what += ": speedlight" + " linked to its best peer" * has_peers
    figure.suptitle(f"{what}\n{machine}, {report['threads']} threads; roofs of the same run", fontsize=11)
    line: Any = plt.Line2D
    handles = [line([], [], color=_COLOUR_OF[x], linewidth=4, label=x) for x in dtypes]
    handles += [line([], [], color="#444444", linestyle="", marker=m, label=f"d = {d}") for d, m in markers.items()]
    grey = {"color": "#444444", "linestyle": "", "marker": "o"}
    handles.append(line([], [], **grey, label="speedlight"))
    if has_peers:
        handles.append(line([], [], **grey, mfc="white", label="best peer"))
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=4 * len(causal))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _roofs(axes: Any, rows: list[dict[str, Any]]) -> None:
    """The measured roofs, named at their ends, one for dtypes that have the same; and axes with round numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    places = [r["flops"] / r["bytes_moved"] for r in rows] or [1.0]
    x = np.geomspace(min(places) / 2, max(places) * 4, 200)
    peaks = {d: float(np.median([r["peak"] for r in rows if r["dtype"] == d])) for d in {r["dtype"] for r in rows}}
    tops: list[tuple[float, list[str]]] = []
    for dtype in sorted(peaks, key=lambda d: peaks[d]):
        if tops and peaks[dtype] < 1.04 * tops[-1][0]:  # as far as turns differ
            tops[-1][1].append(dtype)
        else:
            tops.append((peaks[dtype], [dtype]))
    for n, (peak, dtypes) in enumerate(tops):
        read = next(r["read_bandwidth"] for r in rows if r["dtype"] in dtypes)
        colour = _COLOUR_OF[dtypes[0]] if len(dtypes) == 1 else "#444444"
        axes.plot(x, np.minimum(peak, x * read / 1e9), color=colour, linewidth=1.2, zorder=1)
        near = n > 0 and peak < 1.08 * tops[n - 1][0]  # then its name stands above, the other's below its line
        below = n + 1 < len(tops) and tops[n + 1][0] < 1.08 * peak and not near
        style = {"color": colour, "ha": "right", "va": "top" if below else "bottom", "fontsize": 8}
        axes.annotate(f"{', '.join(sorted(dtypes))}: {peak:,.0f}", (x[-1], peak), **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    # rates span a decade: with few numbers its scale would look linear
    for axis, of_decade in ((axes.xaxis, (1, 2, 5)), (axes.yaxis, (1, 1.5, 2, 3, 5, 7))):
        axis.set_major_locator(LogLocator(subs=of_decade))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.grid(alpha=0.25)


def _linked(axes: Any, row: dict[str, Any], marker: str, aside: float) -> None:
    """A problem: ours, and below or above it the peer that came nearest; aside of others with as much work per byte."""
    at, colour = row["flops"] / row["bytes_moved"] * aside, _COLOUR_OF[row["dtype"]]
    if row["ratios"]:
        best = row["gflops"] / min(spread[2] for spread in row["ratios"].values())
        axes.plot([at, at], [best, row["gflops"]], color=colour, linewidth=0.8, alpha=0.7, zorder=2)
        axes.plot(at, best, marker, markerfacecolor="white", color=colour, markersize=5, zorder=3)
    axes.plot(at, row["gflops"], marker, color=colour, markersize=5, zorder=3)


def model_bars(report: dict[str, Any], path: Path) -> None:
    """How much longer whole models take with PyTorch's attention, and attention alone, where it was told apart."""
    plt = _pyplot()
    rows = [r for r in report["rows"] if "ratios" in r][::-1]
    bars = [(f"{r['name']}\nbeside {peer}", r, peer) for r in rows for peer in list(r["ratios"])[::-1]]
    figure, axes = plt.subplots(figsize=(8.5, 1.2 + 0.42 * len(bars)), layout="constrained")
    for n, (_, row, peer) in enumerate(bars):
        alone = row.get("attention_ratios", {}).get(peer)
        for at, spread, colour, label in (
            (n + 0.2, row["ratios"][peer], "#3465a4", "whole"),
            (n - 0.2, alone, "#f57900", "attention alone"),
        ):
            if spread is not None:
                axes.barh(at, spread[2] - 1, left=1, height=0.36, color=colour, label=label)
                axes.annotate(f" {spread[2]:.2f}", (spread[2], at), va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=7)
    ticks = [x for x in (1, 2, 5, 10, 20, 50, 100) if x <= 1.2 * axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{x}" for x in ticks])
    axes.xaxis.set_minor_formatter("")
    axes.set_xlim(min(0.8, axes.get_xlim()[0]), 1.3 * axes.get_xlim()[1])
    figure.suptitle("Their time over ours, median of turns: to the right of 1, speedlight is faster", fontsize=10)
    axes.set_title(f"{report['machine']}, {report['threads']} threads, {report['isa']}", fontsize=8)
    handles = dict(zip(axes.get_legend_handles_labels()[1], axes.get_legend_handles_labels()[0], strict=True))
    figure.legend(handles.values(), handles.keys(), fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


_WAYS = {
    "ring zigzag": "#0072b2",
    "ring contiguous": "#e69f00",
    "gather": "#009e73",
    "ulysses": "#d55e00",
    "exact": "#cc79a7",
}
_MORE = {
    "gather": " (sharding: the fastest)",
    "exact": " (sharding: the fastest)",
    "ulysses": " (as many ranks as heads: a circle)",
}
_LINES = ("-", ":", "--")  # of links, the fastest first


def _width(name: str) -> float:
    """The line that is drawn first is the widest: it shows beside one that lies on it."""
    return 4.5 if name == next(iter(_WAYS)) else 1.6


def scaling(rows: list[dict[str, Any]], path: Path) -> None:
    """Over ranks, what is left of the ideal: strong scaling above, weak below, masks side by side."""
    plt = _pyplot()
    kinds, masks = (list(dict.fromkeys(r[x] for r in rows)) for x in ("kind", "mask"))
    links = sorted({r["link"] for r in rows}, reverse=True)
    figure, axes = plt.subplots(
        len(kinds), len(masks), figsize=(3.6 * len(masks), 3.1 * len(kinds)), layout="constrained", sharey=True,
        squeeze=False,
    )  # fmt: skip
    for kind, across in zip(kinds, axes, strict=True):
        for mask, place in zip(masks, across, strict=True):
            for name, colour in _WAYS.items():
                for link, style in zip(links, _LINES, strict=False):
                    mine = [r for r in rows if (r["kind"], r["mask"], r["link"]) == (kind, mask, link)]
                    points = [(r["ranks"], r["ways"][name]["efficiency"]) for r in mine if name in r["ways"]]
                    look: dict[str, Any] = {"linewidth": _width(name)}
                    if len(points) == 1:
                        look = {"marker": "o", "markersize": 5, "mfc": colour if link == links[0] else "white"}
                    place.plot(*zip(*points, strict=True), style, color=colour, **look)
            place.set_title(f"{kind} scaling, {mask}", fontsize=10)
            place.set_xscale("log", base=2)
            place.set_xticks(ticks := sorted({r["ranks"] for r in rows}), [f"{x:,}" for x in ticks], fontsize=8)
            place.grid(alpha=0.25)
    for place in axes[:, 0]:
        place.set_ylabel("of the ideal")
        place.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        place.set_ylim(0, 1.05)
    for place in axes[-1]:
        place.set_xlabel("ranks")
    line: Any = plt.Line2D
    delays = {r["link"]: r["latency"] for r in rows}
    handles = [
        line([], [], color=colour, linewidth=_width(name), label=f"{name}{_MORE.get(name, '')}")
        for name, colour in _WAYS.items()
    ]
    handles += [
        line(
            [], [], color="#444444", linestyle=style, marker="o", markersize=5,
            mfc="#444444" if link == links[0] else "white", label=f"{link / 1e9:g} GB/s, {delays[link] * 1e6:g} µs",
        )
        for link, style in zip(links, _LINES, strict=False)
    ]  # fmt: skip
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=130)
    plt.close(figure)
