"""The README's picture: bars, how many times faster than the fastest other library. table.py asks for it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


class Bar(NamedTuple):
    """A problem: how many times as long the fastest other library takes as speedlight, and which that is."""

    text: str
    ratio: float
    peer: str


def median_of(ratio: Any) -> float:
    """Returns the median of a ratio that is its quantiles, or a median alone, as in older rows."""
    return ratio[len(ratio) // 2] if isinstance(ratio, list) else ratio


def best_peer(row: dict[str, Any]) -> tuple[float, str]:
    """Returns how many times ours a row's fastest peer takes, and which that is."""
    found = row.get("ratios") or row.get("peers") or {x: row[x] for x in ("flex", "torch") if row.get(x)}
    return min((median_of(x), PEERS[name]) for name, x in found.items() if name in PEERS)


def bars(reports: list[dict[str, Any]]) -> Iterator[Bar]:
    """Yields the README's problems that these reports have; of a row in several, the last report's."""
    rows = {row["name"]: row for report in reports for row in report["rows"]}
    yield from (Bar(text, *best_peer(rows[name])) for name, text in FIGURES if name in rows)


def chart(report: dict[str, Any], others: list[dict[str, Any]], path: Path) -> None:
    """Draws bars of a report and others of its family, legible at a phone's width; the file keeps their figures."""
    plt, some = pyplot(), list(bars([*(x for x in others if x["family"] == report["family"]), report]))
    figure, axes = plt.subplots(figsize=(5, 1.3 + 0.56 * len(some)), layout="constrained")
    axes.axvspan(0, 1, color="#e4e4e4", linewidth=0, zorder=0)
    for y, x in enumerate(some):
        axes.barh(y, x.ratio, height=0.42, color="#0072b2", zorder=1)
        here: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 11}
        axes.annotate(x.text, (0, y - 0.37), xytext=(3, 0), **here)
        axes.annotate(
            f"{x.ratio:.2f} x", (x.ratio, y), xytext=(-4, -1), ha="right", color="white", weight="bold", **here
        )
        axes.annotate(f"than {x.peer}", (x.ratio, y), xytext=(4, -1), **here)
    axes.set_ylim(len(some) - 0.6, -0.85)
    axes.set_xlim(0, max(x.ratio for x in some) * 1.47)
    axes.set_yticks([])
    axes.set_xticks([0, 1], ["", "1 = as fast as\nthat library"], fontsize=10)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    machine = f"{report['machine']} ({report['family']}), {report['cores']} cores, {report['isa']}"
    what = "Times faster than the fastest of\nPyTorch, FlexAttention, ONNX Runtime, OpenVINO"
    figure.suptitle(what, fontsize=12.5, x=0.02, ha="left")
    axes.set_title("\n".join(textwrap.wrap(machine, 64)), fontsize=9.5, loc="left", color="#555555")
    figure.savefig(path, dpi=170, metadata={"Figures": json.dumps(some)})
    plt.close(figure)
