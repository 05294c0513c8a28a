"""The README's picture: bars, how many times faster than the fastest other library. table.py asks for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speedlight.calls.pictures import pyplot

PEERS = {
    "torch": "PyTorch", "torch by rows": "PyTorch", "torch dense": "PyTorch (dense mask)", "sdpa": "PyTorch",
    "eager": "PyTorch (eager)", "flex": "FlexAttention", "torch flex": "FlexAttention", "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO", "jax": "JAX",
}  # fmt: skip
# a row's name, and what it is to somebody who reads it in the README
FIGURES = (
    ("float32 H8 N4096 d128 full", "a prompt of 4,096 tokens, float32"),
    ("float32 H8 N4096 d128 causal", "a prompt of 4,096 tokens, causal, float32"),
    ("bfloat16 H8 N4096 d128 causal", "a prompt of 4,096 tokens, causal, bfloat16"),
    ("float32 H8 N16384 d64 window 1024", "a window of 1,024 in 16,384 tokens, float32"),
    ("float32 B1 H32/8 N16384 d128 one token", "one token after 16,384, GQA of 32/8 heads, float32"),
    ("bfloat16 B1 H32/8 N16384 d128 one token", "one token after 16,384, GQA of 32/8 heads, bfloat16"),
    ("float32 H8 N4096 d128 causal backward", "gradients of 4,096 tokens, causal, float32"),
    (
        "Llama, 8 layers, 8/2 heads of 128, prefill 4096, bfloat16",
        "a whole Llama of 8 layers, a prompt of 4,096 tokens, bfloat16",
    ),
)


# of families of CPUs, in the order of their first bars
COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7"


def median_of(ratio: Any) -> float:
    """Returns the median of a ratio that is its quantiles, or a median alone, as in older rows."""
    return ratio[len(ratio) // 2] if isinstance(ratio, list) else ratio


def best_peer(row: dict[str, Any]) -> tuple[float, str]:
    """Returns how many times ours a row's fastest peer takes, and which that is."""
    found = row.get("ratios") or row.get("peers") or {x: row[x] for x in ("flex", "torch") if row.get(x)}
    return min((median_of(x), PEERS[name]) for name, x in found.items() if name in PEERS)


def family_of(report: dict[str, Any]) -> str:
    """Names a family of CPUs; of Intel's those that have tiles apart."""
    return "Intel with AMX" if report["isa"] == "amx" else report["family"]


def compared(reports: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yields the problems that a reader compares first, each with every report that has it, and the row there."""
    for name, text in FIGURES:
        for report in reports:
            yield from ((text, report, row) for row in report["rows"] if row["name"] == name)


def chart(reports: list[dict[str, Any]], path: Path) -> None:
    """Draws a bar for each problem and family of CPUs, legible at a phone's width; the file keeps their figures."""
    plt, problems = pyplot(), [*compared(reports)]
    families = {family_of(x): f"{x.get('cores') or x['threads']} cores, {x['isa']}" for _, x, _ in problems}
    bars = [(text, family_of(report), *best_peer(row)) for text, report, row in problems]
    colours = dict(zip(families, COLOURS, strict=False))
    figure, axes = plt.subplots(figsize=(5, 1.9 + 0.27 * len(bars) + 0.3 * len(FIGURES)), layout="constrained")
    widest, y, last = max(ratio for *_, ratio, _ in bars), 0.0, ""
    here: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 11}
    for text, family, ratio, peer in bars:
        if text != last:
            axes.annotate(text, (0, y + 0.2), xytext=(3, 0), **here)
            y, last = y + 1.2, text
        axes.barh(y, ratio, height=0.9, color=colours[family], zorder=1)
        axes.annotate(f"{ratio:.2f} x", (ratio, y), xytext=(-4, -1), ha="right", color="white", weight="bold", **here)
        axes.annotate(f"than {peer}", (ratio, y), xytext=(4, -1), **here)
        y += 1
    axes.axvspan(0, 1, color="#e4e4e4", linewidth=0, zorder=0)
    axes.set_ylim(y - 0.3, -0.4)
    axes.set_xlim(0, widest * 1.3)
    axes.set_yticks([])
    axes.set_xticks([0, 1], ["", "1 = as fast as\nthat library"], fontsize=10)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    what = "Times faster than the fastest of\nPyTorch, FlexAttention, ONNX Runtime, OpenVINO"
    figure.suptitle(what, fontsize=12.5, x=0.02, ha="left")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[x]) for x in families]
    names = [f"{family}: {what}" for family, what in families.items()]
    figure.legend(handles, names, fontsize=10, frameon=False, loc="outside lower left")
    figure.savefig(path, dpi=170, metadata={"Figures": json.dumps(bars)})
    plt.close(figure)
