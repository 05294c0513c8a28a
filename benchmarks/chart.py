"""The README's picture: problems of one run, ours linked to the best peer on each. table.py asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from speedlight.tools.pictures import pyplot

PEERS = {"torch": "PyTorch", "torch by rows": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
PREFILL = [
    (f"{dtype} H8 N{n} d128 {kind}", f"{n:,} tokens, {kind}, {dtype}")
    for dtype, lengths, kinds in (
        ("float32", (512, 4096), ("full", "causal")),
        ("bfloat16", (512, 4096), ("full", "causal")),
        ("float16", (4096,), ("full",)),
        ("float64", (2048,), ("full",)),
    )
    for n in lengths
    for kind in kinds
]
DECODE = [
    (f"{dtype} B{batch} H{heads}/8 N{n} d128 one token", f"{text}, {dtype}")
    for dtype, batch, heads, n, text in (
        ("float32", 1, 8, 16384, "1 token after 16,384, 8 heads"),
        ("float32", 1, 32, 16384, "1 token after 16,384, 32/8 heads"),
        ("float32", 16, 32, 4096, "16 x 1 token after 4,096, 32/8 heads"),
        ("bfloat16", 1, 32, 16384, "1 token after 16,384, 32/8 heads"),
        ("bfloat16", 16, 32, 4096, "16 x 1 token after 4,096, 32/8 heads"),
        ("float16", 1, 32, 16384, "1 token after 16,384, 32/8 heads"),
    )
]


class Line(NamedTuple):
    """A problem: what share of the roof we reach, and how many times as long the best peer takes."""

    text: str
    share: float
    ratio: float
    peer: str


def median_of(ratio: Any) -> float:
    """Returns the median of a ratio that is its quantiles, or a median alone, as in older rows."""
    return ratio[len(ratio) // 2] if isinstance(ratio, list) else ratio


def best_peer(row: dict[str, Any]) -> tuple[float, str]:
    """Returns how many times ours a row's fastest peer takes, and which that is."""
    return min((median_of(x), PEERS[name]) for name, x in (row.get("ratios") or row["peers"]).items())


def lines(rows: list[dict[str, Any]], named: list[tuple[str, str]], share: str) -> list[Line]:
    """The rows of these names, which must all be there."""
    by_name = {row["name"]: row for row in rows}
    return [Line(text, by_name[name][share], *best_peer(by_name[name])) for name, text in named]


def chart(data: dict[str, Any], path: Path) -> None:
    """Two panels, each with a roof of its own: attention under the peak, decoding under a plain read."""
    plt = pyplot()
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    panels = (
        ("Attention, 8 heads, d = 128", "of the measured peak", lines(data["rows"], PREFILL, "share_of_peak")),
        ("Decoding, d = 128", "of a plain read of the cache", lines(data["rows"], DECODE, "share_of_read")),
    )
    heights = [len(x) for *_, x in panels]
    figure, axes = plt.subplots(2, 1, figsize=(8.4, 6.6), layout="constrained", height_ratios=heights)
    for place, (title, roof, some) in zip(axes, panels, strict=True):
        end = max(1.0, *[x.share for x in some]) + 0.03  # what a cache holds may be read faster than by torch.sum
        for y, x in enumerate(some):
            place.plot([x.share / x.ratio, x.share], [y, y], color="#8aa7c4", linewidth=2.5, zorder=1)
            place.plot(x.share / x.ratio, y, "o", color="#d55e00", mfc="white", mew=1.5, markersize=7, zorder=2)
            place.plot(x.share, y, "o", color="#0072b2", markersize=7, zorder=3)
            place.annotate(f"{x.ratio:.2f} x {x.peer}", (end, y), va="center", fontsize=8, color="#333333")
        place.set_yticks(range(len(some)), [x.text for x in some], fontsize=8)
        place.set_ylim(len(some) - 0.4, -0.6)
        place.set_xlim(0, end + 0.33)
        place.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        place.xaxis.set_major_formatter(PercentFormatter(1.0))
        place.axvline(1.0, color="#666666", linewidth=0.8)
        place.set_title(title, fontsize=10, loc="left")
        place.set_xlabel(roof, fontsize=9)
        place.grid(axis="x", alpha=0.25)
        place.tick_params(axis="x", labelsize=8)
    figure.suptitle(
        f"speedlight linked to its best peer on each problem\n{data['machine']}, {data['cores']} cores, {data['isa']}",
        fontsize=11,
    )
    ours = Line2D([], [], color="#0072b2", marker="o", linestyle="", markersize=7, label="speedlight")
    peer = Line2D(
        [], [], color="#d55e00", marker="o", mfc="white", mew=1.5, linestyle="", markersize=7,
        label="best of PyTorch, ONNX Runtime, OpenVINO; at the right: its time over ours",
    )  # fmt: skip
    figure.legend(handles=[ours, peer], fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)
