"""Writes the README's tables from the rows of one machine: python benchmarks/table.py
[benchmarks/results/<machine>.json]

Gradients have a file for each machine in results/backward, of `speedlight bench --backward -o`; whole models in
results/models, of `speedlight bench --models -o`, of which the pictures in docs are drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from speedlight.tools.pictures import model_bars, roofline

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- rows: begin -->\n", "<!-- rows: end -->\n"
BACKWARD_START, BACKWARD_END = "<!-- backward: begin -->\n", "<!-- backward: end -->\n"


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


def between(text: str, start: str, end: str, new: str) -> str:
    """Text whose part from start to end is another."""
    before, rest = text.split(start)
    return before + start + new + end + rest.split(end)[1]


def main() -> None:
    newest = max((Path(__file__).parent / "results").glob("*.json"), key=lambda x: x.stat().st_mtime)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else newest
    text = between(README.read_text(), START, END, table(path))
    gradients = sorted((Path(__file__).parent / "results" / "backward").glob("*.json"))
    README.write_text(between(text, BACKWARD_START, BACKWARD_END, backward_table(gradients)))
    for models in sorted((Path(__file__).parent / "results" / "models").glob("*.json")):
        model_bars(json.loads(models.read_text()), README.parent / "docs" / f"models-{models.stem}.png")
    data = json.loads(path.read_text())
    rows = [
        row | {"ratios": {x: [r] * 5 for x, r in row["ratios"].items()}} for row in data["rows"] if "bytes_moved" in row
    ]
    if rows:
        roofline(data | {"threads": data["cores"], "rows": rows}, README.parent / "docs" / "roofline.png")


if __name__ == "__main__":
    main()
