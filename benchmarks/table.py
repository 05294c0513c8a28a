"""Writes tables and pictures from the rows of machines: python benchmarks/table.py [benchmarks/results/<machine>.json]

Every row goes to docs/benchmarks.md, a part for each machine; eight problems, a line for each family of CPUs, and
programs, a column for each, to docs/performance.md; four programs to the README, whose picture has the eight problems.
The roofline is of the file that is named, else of the last by name. A machine that is not at hand keeps its last rows,
with their commits. Gradients have a file for each machine in results/backward, of `run.py backward -o`; whole models in
results/models, of `run.py models -o`, and quantised caches in results/codes, of `run.py codes -o`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from chart import best_peer, chart, compared, family_of, median_of
from pictures import model_bars, prompt_bars, roofline

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGE, EXPECT, PICTURES = DOCS / "benchmarks.md", DOCS / "performance.md", DOCS / "pictures"


def marks(name: str) -> tuple[str, str]:
    """Returns the lines before and after a part that is written here."""
    return f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"


def markdown(titles: tuple[str, ...], rows: Iterable[Iterable[str]]) -> list[str]:
    """Returns the lines of a table."""
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def table(path: Path) -> str:
    """Returns a machine's part of the page."""
    data = json.loads(path.read_text())
    versions = ", ".join(f"{n} {v}" for n, v in data["versions"].items() if n in ("torch", "onnxruntime", "openvino"))
    lines = [
        f"### {family_of(data)}",
        "",
        f"{machine_of(data)}; {versions}. Medians of one run, in turn; a ratio above 1 means that speedlight is",
        f"faster. Measured at {commits_of(data['rows'])}.",
        "",
        *markdown(
            ("problem", "GFLOP/s", "of peak", *COLUMNS),
            (attention_cells(row) for row in data["rows"] if "gflops" in row),
        ),
    ]
    if masks := [row for row in data["rows"] if row["part"] == "masks" and "of_plain" in row]:
        titles = ("problem", "ms", "of plain time", "FlexAttention", "PyTorch")
        lines += ["", *MASKS.splitlines(), "", *markdown(titles, map(mask_cells, masks))]
    if decode := [row for row in data["rows"] if row["part"] == "decode" and "share_of_read" in row]:
        titles = ("problem", "tokens/s", "GB/s", "of a plain read", "own arrays", "pages", *COLUMNS)
        lines += ["", *DECODING.splitlines(), "", *markdown(titles, map(decode_cells, decode))]
    return "\n".join(lines) + "\n"


COLUMNS = "PyTorch", "ONNX Runtime", "OpenVINO"
MASKS = """\
Masks and scores, 8 heads, d=64; time against attention without them (windows and prefix: against causal); \
PyTorch gets a
dense mask, FlexAttention (compiled, warm) its block mask. In brackets what FlexAttention needs to compile and build."""
DECODING = """\
One token of each sequence against n cached keys, as a share of a plain read (`torch.sum`) of as many bytes \
in the same turn:
`KVCache`; `attention()` over the caller's own arrays; and `PagePool` (pages of 16 in random order) \
relative to `KVCache`.
PyTorch: SDPA with enable_gqa, and in brackets with a group's heads as rows, which is faster; \
OpenVINO likewise by rows."""


def attention_cells(row: dict[str, Any]) -> Iterator[str]:
    yield from (row["name"], f"{row['gflops']:.0f}", f"{row['share_of_peak']:.0%}")
    for peer in ("torch", "onnxruntime", "openvino"):
        yield f"{median_of(row['ratios'][peer]):.2f} x" if peer in row["ratios"] else "–"


def mask_cells(row: dict[str, Any]) -> Iterator[str]:
    yield row["name"].removeprefix("float32 H8 ").replace("d64 ", "")
    yield from (f"{row['seconds']['speedlight'][2] * 1e3:.0f}", f"{row['of_plain']:.3f}")
    yield f"{row['flex']:.2f} x ({row['flex_seconds_to_build']:.0f} s)" if row["flex"] else "–"
    yield f"{row['torch']:.1f} x" if row.get("torch") else "–"


def decode_cells(row: dict[str, Any]) -> Iterator[str]:
    own, peers = row["share_of_read_arrays"], {name: f"{x:.1f} x" for name, x in row["peers"].items()}
    yield from (row["name"].removesuffix(" one token"), f"{row['tokens']:,.0f}", f"{row['gbytes']:.0f}")
    yield from (f"{row['share_of_read']:.0%}", "–" if own is None else f"{own:.0%}", f"{row['pages']:.2f} x")
    yield f"{peers['torch']} ({peers['torch by rows']})" if "torch by rows" in peers else peers.get("torch", "–")
    yield from (peers.get("onnxruntime", "–"), peers.get("openvino", "–"))


def machine_of(data: dict[str, Any]) -> str:
    return f"{data['machine']} ({data['family']}), {data.get('cores') or data['threads']} cores, {data['isa']}"


PARTS = {"prefill": "attention", "masks": "masks", "decode": "decoding"}


def commits_of(rows: list[dict[str, Any]]) -> str:
    """Names the commit of each part of the tables."""
    found = {row["part"]: row["commit"] for row in rows if row["part"] in PARTS}
    return ", ".join(f"{found[part]} ({name})" for part, name in PARTS.items() if part in found)


def backward_table(paths: list[Path]) -> str:
    """Gradients beside PyTorch's backward pass, machine after machine."""
    lines = []
    for path in paths:
        data = json.loads(path.read_text())
        problems: dict[str, list[str]] = {}
        for row in sorted(data["rows"], key=lambda x: x["causal"]):
            name = row["name"].replace(" causal", "").replace(" full", "").removesuffix(" backward")
            ratio = f"{row['ratios']['torch'][2]:.2f} x"
            problems.setdefault(name, []).extend((f"{row['gflops']:.0f}", f"{row['share_of_peak']:.0%}", ratio))
        titles = ("backward pass", "full: GFLOP/s", "of peak", "PyTorch", "causal: GFLOP/s", "of peak", "PyTorch")
        cells = ((name, *row) for name, row in problems.items())
        lines += [f"{machine_of(data)}; torch {data['versions']['torch']}.", "", *markdown(titles, cells), ""]
    return "\n".join(lines)


BESIDE_CODES = {  # titles of what stands beside a cache of codes
    "bfloat16 cache": "our bfloat16", "int8 cache": "our int8", "ggml": "ggml", "onnxruntime": "ONNX Runtime",
}  # fmt: skip


def codes_table(paths: list[Path]) -> str:
    """Quantised caches beside other libraries', a layer and a model, machine after machine."""
    lines = []
    for path in paths:
        data = json.loads(path.read_text())
        commits = ", ".join(dict.fromkeys(row["commit"] for row in data["rows"]))
        names = ("torch", "onnxruntime", "llama_cpp_python", "transformers", "hqq", "optimum-quanto")
        versions = ", ".join(f"{name} {data['versions'][name]}" for name in names if name in data["versions"])
        lines += [f"{machine_of(data)}; {versions}. Measured at {commits}.", ""]
        if layers := [row for row in data["rows"] if "share_of_read" in row]:
            titles = ("a layer", "tokens/s", "of a plain read", *BESIDE_CODES.values())
            lines += [*markdown(titles, map(layer_cells, layers)), ""]
        for row in (x for x in data["rows"] if "perplexity" in x):
            lines += [f"{row['name']}; perplexity of {row['perplexity_of']}.", ""]
            titles = ("cache", "ms a token", "MiB", "change of perplexity")
            lines += [*markdown(titles, model_of_codes_cells(row)), ""]
    return "\n".join(lines)


def layer_cells(row: dict[str, Any]) -> Iterator[str]:
    yield from (row["name"].removesuffix(" one token"), f"{row['tokens']:,.0f}", f"{row['share_of_read']:.0%}")
    yield from (f"{row['peers'][name]:.2f} x" if name in row["peers"] else "–" for name in BESIDE_CODES)


def model_of_codes_cells(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    exact = row["perplexity"]["float32"]
    for name, spread in row["seconds"].items():
        ours = "speedlight bfloat16" if name == "speedlight" else name
        change = f"{row['perplexity'][name] / exact - 1:+.2%}" if name in row["perplexity"] else "–"
        yield ours, f"{median_of(spread) * 1e3:.1f}", f"{row['bytes'][name] / 2**20:.0f}", change


def figures(reports: list[dict[str, Any]]) -> str:
    """Returns the table of problems that a reader compares first, a line for each family that has them."""
    rows = [
        (text, family_of(report), *cells_of(row), against(*best_peer(row))) for text, report, row in compared(reports)
    ]
    machines = "; ".join(dict.fromkeys(map(machine_of, reports)))
    lines = [f"{machines}. 8 heads of 128 where nothing else is said; heads of the window have 64.", ""]
    lines += markdown(("problem", "CPU", "speedlight", "of the roof", "against the fastest other library"), rows)
    return "\n".join(lines) + "\n"


def cells_of(row: dict[str, Any]) -> tuple[str, str]:
    """Returns a row's speed, and its share of the roof where it has one."""
    if "share_of_read" in row:
        return f"{row['tokens']:,.0f} tokens/s", f"{row['share_of_read']:.0%} of a plain read"
    if "share_of_peak" in row:
        return f"{row['gflops']:.0f} GFLOP/s", f"{row['share_of_peak']:.0%} of peak"
    return in_units(median_of(row["seconds"]["speedlight"])), "–"


def in_units(seconds: float) -> str:
    """Returns a time as people say it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def against(ratio: float, peer: str) -> str:
    """Returns what a ratio means, in words."""
    return f"{ratio:.2f} x {'faster than' if ratio >= 1 else 'as fast as'} {peer}"


# rows of the README's table of what is gained, and what they are called there
GAINS = (
    ("Llama, 8 layers, 8/2 heads of 128, prefill 4096, bfloat16", "Llama reads a prompt of 4,096 tokens, bfloat16"),
    ("Llama, greedy, 64 tokens after 4096, float32", "Llama, `generate()`: 64 tokens after 4,096, float32"),
    (
        "GPT of 6 layers, 512 wide, 8 heads, 2048 tokens, float32, a training step",
        "a GPT's training step, 2,048 tokens, float32",
    ),
    (
        "flex: ALiBi in 8 documents, causal, 8 heads, 8192, d=64, float32, forward",
        "FlexAttention: ALiBi in packed documents, 8,192 tokens, float32",
    ),
    (
        "DeepSeek-V2-Lite, 4 layers, 16 tokens after 4096, float32",
        "DeepSeek-V2-Lite, 4 layers, `generate()`: 16 tokens after 4,096, float32",
    ),
)


def gains(models: list[dict[str, Any]]) -> str:
    """Returns the README's table of programs, stock and with speedlight, of the families that have them."""
    some = [report for report in models if any(cells_of_gain(report, name) != "–" for name, _ in GAINS)]
    rows = [(text, *(cells_of_gain(report, name) for report in some)) for name, text in GAINS]
    torch = ", ".join(dict.fromkeys(report["versions"]["torch"].partition("+")[0] for report in some))
    machines = "; ".join(map(machine_of, some))
    lines = markdown(("program", *map(family_of, some)), (x for x in rows if {*x[1:]} != {"–"}))
    return "\n".join([*lines, "", f"{machines}; PyTorch {torch}."]) + "\n"


def cells_of_gain(report: dict[str, Any], name: str) -> str:
    """Returns the time of a report's program with speedlight, and how many times faster it is."""
    row = next((x for x in report["rows"] if x["name"] == name and "ratios" in x), None)
    return f"{in_units(median_of(row['seconds']['speedlight']))}, {against(*best_peer(row))}" if row else "–"


# rows of the page's programs, as they begin
PROGRAMS = (
    "Llama, 8 layers, 8/2 heads of 128, prefill 4096, float32", "Llama, greedy, 64 tokens after",
    "Llama, left-padded, 4 x 64 tokens after", "Mistral", "T5, 64", "whisper", "Gemma-2", "BERT", "sentence", "ViT, 8",
    "UNet", "T5, a step", "Swin", "nanoGPT", "JAX", "MiniLM", "gpt-oss", "GPT of 6",
)  # fmt: skip


def programs(models: list[dict[str, Any]]) -> str:
    """Returns the table of programs: how many times faster, and attention alone, a column for each machine."""
    found = [{row["name"]: row for row in report["rows"] if "ratios" in row} for report in models]
    names = [x for start in PROGRAMS for x in dict.fromkeys(y for of in found for y in of) if x.startswith(start)]
    rows = ((name.removesuffix(", float32"), *(gain_of(of.get(name)) for of in found)) for name in names)
    return "\n".join(markdown(("program", *map(family_of, models)), rows)) + "\n"


def gain_of(row: dict[str, Any] | None) -> str:
    """Returns stock time over ours, in brackets that of attention alone; of the peer that is stock."""
    if row is None:
        return "–"
    stock = next(name for name in ("torch", "sdpa", "jax", "eager") if name in row["ratios"])
    alone = row.get("attention_ratios", {}).get(stock)
    return f"{median_of(row['ratios'][stock]):.2f} x" + (f" ({median_of(alone):.2f} x)" if alone else "")


def models_table(models: list[dict[str, Any]]) -> str:
    """Every row of whole models, machine after machine."""
    lines = []
    for report in models:
        versions = ", ".join(f"{n} {v}" for n, v in report["versions"].items() if n in ("torch", "jax"))
        commits = ", ".join(dict.fromkeys(row["commit"] for row in report["rows"] if "commit" in row))
        lines += [f"{machine_of(report)}; {versions}. Measured at {commits or 'an earlier commit'}.", ""]
        rows = (model_cells(row) for row in report["rows"] if "ratios" in row)
        lines += [*markdown(("program", "ours, ms", "they take", "attention alone"), rows), ""]
    return "\n".join(lines)


def model_cells(row: dict[str, Any]) -> Iterator[str]:
    yield from (row["name"], f"{median_of(row['seconds']['speedlight']) * 1e3:,.0f}")
    for part in ("ratios", "attention_ratios"):
        yield ", ".join(f"{median_of(x):.2f} x ({name})" for name, x in row.get(part, {}).items()) or "–"


def between(text: str, name: str, new: str) -> str:
    """Text whose part of this name is another."""
    start, end = marks(name)
    before, rest = text.split(start)
    return before + start + new + end + rest.split(end)[1]


def main() -> None:
    folders = ("", "backward", "models", "codes")
    forward, gradients, models, codes = (sorted((RESULTS / name).glob("*.json")) for name in folders)
    data = json.loads((Path(sys.argv[1]) if len(sys.argv) > 1 else forward[-1]).read_text())
    page = between(PAGE.read_text(), "rows", "\n".join(map(table, forward)))
    page = between(page, "backward", backward_table(gradients))
    page = between(page, "codes", codes_table(codes))
    reports, whole = ([json.loads(path.read_text()) for path in paths] for paths in ((*forward, *gradients), models))
    PAGE.write_text(between(page, "models", models_table(whole)))
    expect = between(EXPECT.read_text(), "figures", figures([*reports, *whole]))
    EXPECT.write_text(between(expect, "programs", programs(whole)))
    README.write_text(between(README.read_text(), "gains", gains(whole)))
    PICTURES.mkdir(exist_ok=True)
    for report in models:
        model_bars(json.loads(report.read_text()), PICTURES / f"models-{report.stem}.png")
    for report in gradients:
        roofline(json.loads(report.read_text()), PICTURES / f"backward-{report.stem}.png")
    for report in sorted((RESULTS / "prompts").glob("*.json")):
        prompt_bars(json.loads(report.read_text()), PICTURES / "shared-prompt.png")
    chart([*reports, *whole], PICTURES / "best-peer.png")
    rows = [row for row in data["rows"] if "bytes_moved" in row and row["part"] == "prefill"]
    roofline(data | {"threads": data["cores"], "rows": rows}, PICTURES / "roofline.png")


if __name__ == "__main__":
    main()
