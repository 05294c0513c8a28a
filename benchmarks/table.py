"""Writes the README's table from the rows of one machine: python benchmarks/table.py benchmarks/results/<machine>.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- rows: begin -->\n", "<!-- rows: end -->\n"


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
            ratios = (f"{row['ratios'][p]:.2f} x" if p in row["ratios"] else "–" for p in ("torch", "onnxruntime", "openvino"))
            lines.append(f"| {row['name']} | {row['gflops']:.0f} | {row['share_of_peak']:.0%} | {' | '.join(ratios)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = README.read_text()
    before, rest = text.split(START)
    README.write_text(before + START + table(Path(sys.argv[1])) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
