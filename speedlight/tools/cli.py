"""The `speedlight` command."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import speedlight as sl

from ..arrays.files import read_arrays
from ..calls.pictures import draw_weights, pyplot, tile_map
from ..errors import ArgumentError, Error, how_to_install
from ..problem.plan import pair_flops
from ..problem.work import count

try:
    import typer
except ImportError as error:  # pragma: no cover
    raise SystemExit(f"speedlight: the command needs {error.name}. Install it with: {how_to_install('cli')}") from None

from . import options as opt
from .attending import attend
from .bench import bench
from .cache_accuracy import accuracy
from .checking import check
from .inspecting import info, show
from .options import check_device, find_named, hidden_by, on_unit, read_labels, span_of
from .reports import check_output, plan_figures, plan_rows, print_report, progress
from .tuning import tune
from .typed import as_typed, usage

app = typer.Typer(pretty_exceptions_enable=False, help="Exact attention at the speed of the machine.")


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if show:
        print(f"speedlight {sl.__version__}")
        raise typer.Exit


app.command()(attend)


_OF_FILES = ("item", "span", "labels", "q", "k")  # options of view, beside a file and without one
_OF_SIZES = ("q_len", "k_len", "q_heads", "kv_heads", "head_dim", "value_dim", "dtype", "isa")


@app.command()
def view(
    context: typer.Context,
    files: Annotated[
        list[Path] | None, typer.Argument(help="A file with q and k, to draw weights; without one, --mask is drawn.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture: .png, .svg or .pdf.")] = Path("view.png"),
    causal: opt.Causal = False,
    window: opt.Window = None,
    mask: opt.Mask = None,
    head: Annotated[list[int] | None, typer.Option(help="Which query head; of a file also several.")] = None,
    item: Annotated[int, typer.Option(help="Of a file: which batch item.")] = 0,
    span: Annotated[str | None, typer.Option(help="Of a file: positions first:end to draw, such as 0:40.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Of a file: a text file with a token on each line.")] = None,
    q: Annotated[str, typer.Option(help="Of a file: name of the queries.")] = "q",
    k: Annotated[str, typer.Option(help="Of a file: name of the keys.")] = "k",
    q_len: opt.QLen = 8192,
    k_len: opt.KLen = None,
    q_heads: opt.QHeads = 1,
    kv_heads: opt.KvHeads = None,
    head_dim: opt.HeadDim = 64,
    value_dim: opt.ValueDim = None,
    dtype: opt.Dtype = "float32",
    isa: opt.Unit = None,
    as_json: opt.Json = False,
) -> None:
    """Draws the attention weights of a file's heads, or, without a file, the tiles of a mask.

    Of a mask: which tiles are computed whole, under the mask, and not at all, for the sizes that are given.
    """
    for name in _OF_SIZES if files else _OF_FILES:
        if getattr(context.get_parameter_source(name), "name", None) == "COMMANDLINE":
            option, beside = f"--{name.replace('_', '-')}", "no file" if files else "a file with q and k"
            raise ArgumentError(f"{option}: expected {beside} beside it; got {'one' if files else 'none'}.")
    check_output(output, ".png", ".svg", ".pdf")
    options = hidden_by(causal, window, mask, None)
    pyplot()  # draws into files
    if files:
        queries, keys = find_named(read_arrays(files), {"--q": q, "--k": k})
        of_head = lambda h: hidden_by(causal, window, mask, None, {"b": item, "h": h})  # noqa: E731
        where, tokens = span_of(span) if span else None, read_labels(labels) if labels else None
        with progress("weights of heads", len(head or [0])) as advance:
            figure, report = draw_weights(queries, keys, head or [0], item, where, tokens, of_head, watch=advance)
        lines = _weight_rows(report["weights"])
    else:
        texts = ["causal" * causal, f"window {window}" * (window is not None), mask or ""]
        if not any(texts):
            raise ArgumentError("--mask: expected a mask to draw (or --causal, --window), or a file with q and k.")
        (one, *more) = head or [0]
        if more:
            raise ArgumentError(f"--head: expected one, of a mask; got {len(more) + 1}.")
        with on_unit(isa):
            drawn = sl.plan(
                q_heads=q_heads, kv_heads=kv_heads, q_len=q_len, k_len=k_len, head_dim=head_dim, value_dim=value_dim,
                dtype=dtype, **options,
            )  # fmt: skip
        figure = tile_map(drawn, one, " and ".join(filter(None, texts)))
        report, lines = {"plan": plan_figures(drawn)}, plan_rows(drawn)
    figure.savefig(output, dpi=150)
    print_report(as_json, {"output": str(output)} | report, [("written", str(output)), *lines])


def _weight_rows(weights: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns lines of a table of what was drawn."""
    (first, end), (first_key, end_key) = weights["queries"], weights["keys"]
    where = f"item {weights['item']}, queries {first} to {end - 1}, keys {first_key} to {end_key - 1}"
    heads = [(f"head {x['head']}", f"largest weight {x['largest']:.3g}") for x in weights["heads"]]
    return [("weights", where), *heads]


@app.command()
@opt.takes_listed
def plan(
    problem: opt.ProblemOptions,
    exact: Annotated[
        bool, typer.Option("--exact", help="Count what a mask shows, where only counting tells. Not --method exact.")
    ] = False,
    shared_prefix: opt.SharedPrefix = 0,
    threads: opt.Threads = None,
    ranks: opt.Ranks = None,
    link_bandwidth: opt.LinkBandwidth = None,
    latency: opt.Latency = None,
    shard: opt.ShardBy = "auto",
    method: opt.Method = "auto",
    device: opt.Device = "cpu",
    isa: opt.Unit = None,
    as_json: opt.Json = False,
) -> None:
    """Says what a call would do: FLOPs, tiles, bytes, memory beside the naive way's, and the least time.

    That is at the best peak and bandwidth that were measured on this machine. Computes no attention.
    --ranks: also the time over several processes.
    """
    check_device(device)
    over: dict[str, Any] = {"ranks": ranks, "link_bandwidth": link_bandwidth, "latency": latency}
    over |= {"shard": shard, "method": method, "device": device, "threads": threads, "shared_prefix": shared_prefix}
    with on_unit(isa):
        found = problem.plan(**over)
    if exact and found.visible_pairs is None:
        found = _count_pairs(found)
    print_report(as_json, plan_figures(found), plan_rows(found))


def _count_pairs(found: sl.Plan) -> sl.Plan:
    """The plan as exact=True makes it; a bar says how long counting takes."""
    p = found.problem
    tiles = found.tiles_full + found.tiles_mixed
    with progress("counting pairs", tiles) as advance:
        pairs = count(p, found.panel, exact=True, backward=found.backward, watch=advance).visible_pairs
    return replace(found, visible_pairs=pairs, flops=(pairs or 0) * pair_flops(p, backward=found.backward))


for command_of in (bench, show, tune, accuracy, info, check):
    app.command()(command_of)


_UsageError: Any = typer.BadParameter.__mro__[1]  # which Typer exports under no name


def command() -> Any:
    """The command as Typer makes it; flags are not shown as if they took a value."""
    group = typer.main.get_command(app)
    commands = [group, *getattr(group, "commands", {}).values()]
    for one in commands:
        for param in [*one.params, one.get_help_option(typer.Context(one))]:
            if getattr(param, "is_flag", False):
                param.metavar = ""  # type: ignore[attr-defined]
    return group


def main() -> None:
    """Runs the command: errors are one line on stderr and exit code 2, whatever stdout is."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: what is opened next would be taken for it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a pipe may know fewer letters than ᵀ and µ
    code, out = _run(sys.argv[1:]), sys.stdout
    try:
        out.flush()
    except OSError as error:  # full, or a pipe that nobody reads any more
        code = code or _report_unwritten(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # Python flushes once more when it ends
    raise SystemExit(code)


def _run(words: list[str]) -> int:
    """The exit code."""
    group = command()
    try:
        code = group.main(words or ["--help"], prog_name="speedlight", standalone_mode=False)
        return code or (0 if words else 2)
    except Error as error:
        print(f"speedlight: {as_typed(str(error), group, words)}", file=sys.stderr)
        return 2
    except _UsageError as error:
        print(f"speedlight: {usage(error, words)}", file=sys.stderr)
        return 2
    except OSError as error:
        return _report_unwritten(error)
    except (KeyboardInterrupt, typer.Abort, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != 130:  # Typer makes that of an interrupt
            if not isinstance(end.code, int):
                raise
            return end.code
        print("speedlight: interrupted; nothing was written.", file=sys.stderr)
        return 130


def _report_unwritten(error: OSError) -> int:
    """The exit code where stdout cannot be written to; who has closed a pipe knows of it."""
    if isinstance(error, BrokenPipeError):
        return 1
    print(f"speedlight: the output cannot be written: {error.strerror or error}.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
