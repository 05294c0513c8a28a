"""Draws docs/pictures/scaling.png and writes the tables of docs/scaling.md: what the model of plan(…, ranks=) says of 8
to 1,024 ranks, and, beside it, what `benchmarks/run.py ranks` measured (benchmarks/results/ranks/*.json).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

import speedlight as sl
from speedlight.calls.pictures import pyplot
from speedlight.problem.plan import pair_flops
from speedlight.problem.rank_plan import ASSUMED, Asked, Link, Rates, spread

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
    """Returns the efficiency of each method over ranks: the ideal time, one rank's divided, over the method's."""
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


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws what is left of the ideal over ranks: strong scaling above, weak below, a row for each link."""
    plt = pyplot()
    kinds, masks = (list(dict.fromkeys(r[x] for r in rows)) for x in ("kind", "mask"))
    links = sorted({r["link"] for r in rows}, reverse=True)
    figure, axes = plt.subplots(
        len(kinds) * len(links), len(masks), figsize=(3.6 * len(masks), 2.3 * len(kinds) * len(links)),
        layout="constrained", sharey=True, sharex=True, squeeze=False,
    )  # fmt: skip
    for (kind, link), across in zip(itertools.product(kinds, links), axes, strict=True):
        for mask, place in zip(masks, across, strict=True):
            mine = [r for r in rows if (r["kind"], r["mask"], r["link"]) == (kind, mask, link)]
            for name, colour in _WAYS.items():
                points = [(r["ranks"], r["ways"][name]["efficiency"]) for r in mine if name in r["ways"]]
                look: dict[str, Any] = {"linewidth": _width(name)}
                if len(points) == 1:
                    look = {"marker": "o", "markersize": 5, "mfc": colour if link == links[0] else "white"}
                place.plot(*zip(*points, strict=True), _LINES[links.index(link)], color=colour, **look)
            place.set_title(f"{kind} scaling, {mask}, {link / 1e9:g} GB/s", fontsize=10)
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


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The picture, which keeps its figures, so that a test sees that they are the model's."""
    plot(rows, path)
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
