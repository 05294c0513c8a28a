"""Pictures of rows: the roofline of a report, and whole models. table.py asks for them; of any report:

python benchmarks/pictures.py ROWS.json PICTURE.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from chart import PEERS, median_of

from speedlight.calls.pictures import pyplot

_COLOUR_OF = {"float32": "#0072b2", "float16": "#009e73", "bfloat16": "#d55e00", "float64": "#cc79a7"}
_MARKERS = "osD^v"  # of head dims, ascending
_SLOTS = {"bfloat16": 1, "float16": 2}  # to the right of wider ones that have the same work per byte


def roofline(report: dict[str, Any], path: Path) -> None:
    """GFLOP/s over FLOPs per byte that must be moved, under the measured roofs: full and causal side by side.

    Filled: ours; hollow, and linked to it: the best peer on that problem. Colours are dtypes, shapes head dims.
    """
    plt = pyplot()
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
        best = row["gflops"] / min(median_of(x) for x in row["ratios"].values())
        axes.plot([at, at], [best, row["gflops"]], color=colour, linewidth=0.8, alpha=0.7, zorder=2)
        axes.plot(at, best, marker, markerfacecolor="white", color=colour, markersize=5, zorder=3)
    axes.plot(at, row["gflops"], marker, color=colour, markersize=5, zorder=3)


def model_bars(report: dict[str, Any], path: Path) -> None:
    """Draws how many times faster whole models are than with others' attention, and attention alone, if told apart."""
    plt = pyplot()
    rows = [r for r in report["rows"] if "ratios" in r][::-1]
    others = [(r, peer) for r in rows for peer in list(r["ratios"])[::-1] if peer in PEERS]
    bars = [(f"{r['name']}\nthan {PEERS[peer]}", r, peer) for r, peer in others]
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
    ticks = [x for x in (1, 2, 5, 10, 20, 50, 100, 200) if x <= 1.2 * axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{x}" for x in ticks])
    axes.xaxis.set_minor_formatter("")
    axes.set_xlim(min(0.8, axes.get_xlim()[0]), 1.8 * axes.get_xlim()[1])
    figure.suptitle("Times faster with speedlight's attention, median of turns; left of 1 slower", fontsize=10)
    axes.set_title(f"{report['machine']}, {report['threads']} threads, {report['isa']}", fontsize=8)
    handles = dict(zip(axes.get_legend_handles_labels()[1], axes.get_legend_handles_labels()[0], strict=True))
    figure.legend(handles.values(), handles.keys(), fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def prompt_bars(report: dict[str, Any], path: Path) -> None:
    """Draws each client's time to the first token, and the memory, with the prompt shared and computed for each.

    The file keeps the figures that it shows.
    """
    plt = pyplot()
    (row,) = report["rows"]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(7, 3.6), layout="constrained", width_ratios=(row["clients"], 2.5)
    )
    figures = {way: [*row["seconds"][way], row["bytes"][way] / 2**20] for way in ("apart", "shared")}
    for place, (way, colour) in enumerate({"apart": "#d55e00", "shared": "#0072b2"}.items()):
        *seconds, memory = figures[way]
        label = {"apart": "computed for each client in turn", "shared": "the prompt shared"}[way]
        left.bar(np.arange(row["clients"]) + 0.4 * place + 0.8, seconds, width=0.38, color=colour, label=label)
        for client in {0, row["clients"] - 1}:
            at = client + 0.4 * place + 0.8, seconds[client]
            left.annotate(f"{seconds[client]:.1f}", at, ha="center", va="bottom", fontsize=9)
        right.bar(place, memory, width=0.8, color=colour)
        right.annotate(f"{memory:.0f}", (place, memory), ha="center", va="bottom", fontsize=9)
    left.set(xlabel="client", ylabel="seconds to the first token", xticks=np.arange(row["clients"]) + 1)
    right.set(ylabel="MiB of keys and values", xticks=[])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=9, frameon=False, loc="upper left")
    machine = f"{row['model']}; {report['machine']}, {report['threads']} threads, {report['isa']}"
    figure.suptitle(f"{row['name']}\n{machine}", fontsize=9)
    figure.savefig(path, dpi=150, metadata={"Figures": json.dumps(figures)})
    plt.close(figure)


if __name__ == "__main__":
    ROWS = json.loads(Path(sys.argv[1]).read_text())
    (roofline if any("gflops" in row for row in ROWS["rows"]) else model_bars)(ROWS, Path(sys.argv[2]))
