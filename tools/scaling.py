"""Draws docs/pictures/scaling.png and writes the tables of docs/scaling.md: what the model of plan(…, ranks=) says of 8
to 1,024 ranks, and, beside it, what `speedlight bench --ranks` measured (benchmarks/results/ranks/*.json).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

import speedlight as sl
from speedlight.distributed.model import ASSUMED, Asked, Link, Rates, spread
from speedlight.problem.plan import pair_flops
from speedlight.tools.pictures import scaling

ROOT = Path(__file__).parent.parent
PAGE, PICTURE = ROOT / "docs" / "scaling.md", ROOT / "docs" / "pictures" / "scaling.png"
RESULTS = ROOT / "benchmarks" / "results" / "ranks"
RATES = Rates(5e11, 1.5e10)  # of a rank: two cores of the machine of docs/benchmarks.md, rounded
LINKS = (ASSUMED, Link(1.25e9, 5e-5))  # 100 and 10 Gbit/s
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
STRONG, WEAK = 131072, 2048  # tokens in all, tokens of a rank
HIDING: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window 1,024": {"causal": True, "window": (1023, None)},
}


def figures(ranks: tuple[int, ...] = RANKS) -> Iterator[dict[str, Any]]:
    """Of each number of ranks, what the best of each method takes of the time that is ideal: one rank's, divided."""
    for kind, hiding, n in ((k, h, n) for k in ("strong", "weak") for h in HIDING for n in ranks):
        length = STRONG if kind == "strong" else WEAK * n
        problem = sl.plan(q_heads=8, q_len=length, head_dim=128, **HIDING[hiding]).problem
        for link in LINKS:
            found = spread(problem, Asked(n, link, False, "auto", "auto"), RATES, pair_flops(problem))
            best = {}
            for way in found.ways:  # the fastest first
                name = f"ring {way.shard}" if way.method == "ring" and way.shard != "stripe" else way.method
                if name not in best and way.method != "mesh" and not (way.method == "ring" and way.shard == "stripe"):
                    best[name] = {"efficiency": found.alone_seconds / n / way.slowest, "sent": max(way.bytes_sent)}
            yield {
                "kind": kind,
                "mask": hiding,
                "ranks": n,
                "link": link.bandwidth,
                "latency": link.latency,
                "ways": best,
            }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The picture, which keeps its figures, so that a test sees that they are the model's."""
    scaling(rows, path)
    note = PngInfo()
    note.add_itxt("Figures", json.dumps(rows))
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256).save(path, pnginfo=note, optimize=True)


def measured(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of the table of what was measured."""
    yield "| processes | problem | one process | several | of one | modelled | sent by a rank | memory beyond shards |"
    yield "|---|---|---|---|---|---|---|---|"
    for report in sorted(reports, key=lambda x: x["ranks"]):
        for row in report["rows"]:
            one, several = (f"{row['seconds'][x][2] * 1e3:,.0f} ms" for x in ("single", "ranks"))
            share = "–" if row["modelled"]["share"] is None else f"{row['modelled']['share']:.0%}"
            sent, memory = max(row["bytes_sent"]) / 2**20, row["memory_shards"]
            yield (
                f"| {report['ranks']} | {row['name']}{', the same bits' * row['same_bits']} | {one} | {several} | "
                f"{row['share'][2]:.0%} | {share} | {sent:,.1f} MiB | {memory:.2f} × K and V |"
            )


def written(text: str, lines: Iterator[str]) -> str:
    """The page with this table."""
    table = "".join(f"{line}\n" for line in lines)
    return re.sub(r"(<!-- measured: begin -->\n).*?(<!-- measured: end -->)", rf"\g<1>{table}\g<2>", text, flags=re.S)


def main() -> None:
    draw(list(figures()), PICTURE)
    reports = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    PAGE.write_text(written(PAGE.read_text(), measured(reports)))


if __name__ == "__main__":
    main()
