"""Writes tables and pictures from the rows of a machine: python benchmarks/table.py [benchmarks/results/<machine>.json]

Every row goes to docs/benchmarks.md, eight of them and a chart to the README. Gradients have a file for each machine in
results/backward, of `speedlight bench --backward -o`; whole models in results/models, of `bench --models -o`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from chart import best_peer, chart

from speedlight.tools.pictures import model_bars, roofline

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
README, PAGE, PICTURES = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "pictures"


def marks(name: str) -> tuple[str, str]:
    """What stands before and after a part that is written here."""
    return f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"


def table(path: Path) -> str:
    data = json.loads(path.read_text())
    versions = ", ".join(f"{n} {v}" for n, v in data["versions"].items() if n in ("torch", "onnxruntime", "openvino"))
    lines = [
        f"{data['machine']}, {data['cores']} cores, {data['isa']}; {versions}. Medians of one run, in turn;",
        "a ratio above 1 means that speedlight is faster.",
        "",
        "| problem | GFLOP/s | of peak | PyTorch | ONNX Runtime | OpenVINO |",
        "|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        if "gflops" in row:
            ratios = (
                f"{row['ratios'][p]:.2f} x" if p in row["ratios"] else "–" for p in ("torch", "onnxruntime", "openvino")
            )
            lines.append(f"| {row['name']} | {row['gflops']:.0f} | {row['share_of_peak']:.0%} | {' | '.join(ratios)} |")
    masks = [row for row in data["rows"] if row["part"] == "masks" and "of_plain" in row]
    if masks:
        lines += [
            "",
            "Masks and scores, 8 heads, d=64; time against attention without them (windows and prefix: against "
            "causal); PyTorch gets a",
            "dense mask, FlexAttention (compiled, warm) its block mask. In brackets what FlexAttention needs to "
            "compile and build.",
            "",
            "| problem | ms | of plain time | FlexAttention | PyTorch |",
            "|---|---|---|---|---|",
        ]
    for row in masks:
        name, ms = row["name"].removeprefix("float32 H8 ").replace("d64 ", ""), row["seconds"]["speedlight"][2] * 1e3
        flex = f"{row['flex']:.2f} x ({row['flex_seconds_to_build']:.0f} s)" if row["flex"] else "–"
        dense = f"{row['torch']:.1f} x" if row.get("torch") else "–"
        lines.append(f"| {name} | {ms:.0f} | {row['of_plain']:.3f} | {flex} | {dense} |")
    decode = [row for row in data["rows"] if row["part"] == "decode" and "share_of_read" in row]
    if decode:
        lines += [
            "",
            "One token of each sequence against n cached keys, as a share of a plain read (`torch.sum`) of as many "
            "bytes in the same turn:",
            "`KVCache`; `attention()` over the caller's own arrays; and `PagePool` (pages of 16 in random order) "
            "relative to `KVCache`.",
            "PyTorch: SDPA with enable_gqa, and in brackets with a group's heads as rows, which is faster; OpenVINO "
            "likewise by rows.",
            "",
            "| problem | tokens/s | GB/s | of a plain read | own arrays | pages | PyTorch | ONNX Runtime | OpenVINO |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
    for row in decode:
        own = "–" if row["share_of_read_arrays"] is None else f"{row['share_of_read_arrays']:.0%}"
        peers = {name: f"{x:.1f} x" for name, x in row["peers"].items()}
        torch = f"{peers['torch']} ({peers['torch by rows']})" if "torch by rows" in peers else peers.get("torch", "–")
        cells = (
            row["name"].removesuffix(" one token"),
            f"{row['tokens']:,.0f}",
            f"{row['gbytes']:.0f}",
            f"{row['share_of_read']:.0%}",
            own,
            f"{row['pages']:.2f} x",
            torch,
            peers.get("onnxruntime", "–"),
            peers.get("openvino", "–"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def backward_table(paths: list[Path]) -> str:
    """Gradients beside PyTorch's backward pass, machine after machine."""
    lines = []
    for path in paths:
        data = json.loads(path.read_text())
        lines += [
            f"{data['machine']}, {data['family']}, {data['threads']} cores; torch {data['versions']['torch']}.",
            "",
            "| backward pass | full: GFLOP/s | of peak | PyTorch | causal: GFLOP/s | of peak | PyTorch |",
            "|---|---|---|---|---|---|---|",
        ]
        problems: dict[str, list[str]] = {}
        for row in sorted(data["rows"], key=lambda x: x["causal"]):
            name = row["name"].replace(" causal", "").replace(" full", "").removesuffix(" backward")
            ratio = f"{row['ratios']['torch'][2]:.2f} x"
            problems.setdefault(name, []).extend((f"{row['gflops']:.0f}", f"{row['share_of_peak']:.0%}", ratio))
        lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in problems.items()] + [""]
    return "\n".join(lines)


def figures(data: dict[str, Any], gradients: dict[str, Any], models: dict[str, Any]) -> str:
    """The README's eight rows: three forward, a window, two of decoding, gradients, a whole model."""
    rows = {row["name"]: row for report in (data, gradients, models) for row in report["rows"]}
    lines = [
        f"{data['machine']}, {data['cores']} cores, {data['isa']}; 8 heads, d = 128 where nothing else is said.",
        "",
        "| problem | speedlight | of the roof | best peer takes |",
        "|---|---|---|---|",
    ]

    def line(text: str, speed: str, roof: str, peer: str) -> None:
        lines.append(f"| {text} | {speed} | {roof} | {peer} |")

    for name, text in (
        ("float32 H8 N4096 d128 full", "4,096 tokens, float32"),
        ("float32 H8 N4096 d128 causal", "4,096 tokens, causal, float32"),
        ("bfloat16 H8 N4096 d128 causal", "4,096 tokens, causal, bfloat16"),
    ):
        ratio, peer = best_peer(rows[name])
        speed = f"{rows[name]['gflops']:.0f} GFLOP/s"
        line(text, speed, f"{rows[name]['share_of_peak']:.0%} of peak", f"{ratio:.2f} x ({peer})")
    row = rows["float32 H8 N16384 d64 window 1024"]
    assert row["flex"] < row["torch"]
    ms = f"{row['seconds']['speedlight'][2] * 1e3:.0f} ms"
    line("window of 1,024 in 16,384 tokens, d = 64, float32", ms, "–", f"{row['flex']:.2f} x (FlexAttention)")
    for dtype in ("float32", "bfloat16"):
        row = rows[f"{dtype} B1 H32/8 N16384 d128 one token"]
        ratio, peer = best_peer(row)
        share = f"{row['share_of_read']:.0%} of a plain read"
        line(
            f"one token after 16,384, 32/8 heads, {dtype}",
            f"{row['tokens']:,.0f} tokens/s",
            share,
            f"{ratio:.2f} x ({peer})",
        )
    row = rows["float32 H8 N4096 d128 causal backward"]
    speed, share = f"{row['gflops']:.0f} GFLOP/s", f"{row['share_of_peak']:.0%} of peak"
    line("gradients, 4,096 tokens, causal, float32 ¹", speed, share, f"{row['ratios']['torch'][2]:.2f} x (PyTorch)")
    row = rows["Llama, 8 layers, 8/2 heads of 128, prefill 4096, bfloat16"]
    seconds = f"{row['seconds']['speedlight'][len(row['seconds']['speedlight']) // 2]:.2f} s"
    line(
        "a whole Llama, 8 layers, 8/2 heads, prefill 4,096, bfloat16 ¹",
        seconds,
        "–",
        f"{row['ratios']['sdpa'][2]:.2f} x (PyTorch)",
    )
    return "\n".join(lines) + "\n"


def between(text: str, name: str, new: str) -> str:
    """Text whose part of this name is another."""
    start, end = marks(name)
    before, rest = text.split(start)
    return before + start + new + end + rest.split(end)[1]


def main() -> None:
    newest = max(RESULTS.glob("*.json"), key=lambda x: x.stat().st_mtime)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else newest
    data = json.loads(path.read_text())
    gradients, models = (sorted((RESULTS / name).glob("*.json")) for name in ("backward", "models"))
    page = between(PAGE.read_text(), "rows", table(path))
    PAGE.write_text(between(page, "backward", backward_table(gradients)))
    further = [json.loads(x[-1].read_text()) for x in (gradients, models)]
    README.write_text(between(README.read_text(), "figures", figures(data, *further)))
    PICTURES.mkdir(exist_ok=True)
    for report in models:
        model_bars(json.loads(report.read_text()), PICTURES / f"models-{report.stem}.png")
    for report in gradients:
        roofline(json.loads(report.read_text()), PICTURES / f"backward-{report.stem}.png")
    chart(data, PICTURES / "best-peer.png")
    rows = [
        row | {"ratios": {x: [r] * 5 for x, r in row["ratios"].items()}} for row in data["rows"] if "bytes_moved" in row
    ]
    roofline(data | {"threads": data["cores"], "rows": rows}, PICTURES / "roofline.png")


if __name__ == "__main__":
    main()
