"""The `speedlight` command."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import speedlight as sl

from ..errors import ArgumentError, Error
from ..files import read_arrays, write_arrays
from ..machine import current_isa
from .formula import read_formula, read_formulas
from .pictures import check_path, draw_weights, tile_map

try:
    import typer
    from rich.console import Console
    from rich.progress import Progress
except ImportError as error:  # pragma: no cover
    raise SystemExit(
        f"speedlight: the command needs {error.name}. Install it with: pip install 'speedlight[cli]'"
    ) from None

from .bench import bench, tune
from .inspecting import info, show
from .reports import print_json, print_rows

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Exact attention at the speed of the machine.",
)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if show:
        print(f"speedlight {sl.__version__}")
        raise typer.Exit


@app.command()
def attend(
    files: Annotated[
        list[Path], typer.Argument(help="One .safetensors or .npz file with q, k and v; or three .npy files named so.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write out and lse: .safetensors, .npz or .npy.")
    ] = None,
    q: Annotated[str, typer.Option(help="Name of the queries.")] = "q",
    k: Annotated[str, typer.Option(help="Name of the keys.")] = "k",
    v: Annotated[str, typer.Option(help="Name of the values.")] = "v",
    layout: Annotated[
        str, typer.Option(help="bhld, blhd, hld, or lhd (packed; offsets are read from cu_seqlens_q and cu_seqlens_k).")
    ] = "bhld",
    causal: Annotated[bool, typer.Option("--causal", help="Hide keys after the query, aligned at the end.")] = False,
    top_left: Annotated[bool, typer.Option("--top-left", help="Causal, aligned at the start.")] = False,
    scale: Annotated[float | None, typer.Option(help="Factor of the scores. Default 1/sqrt(head_dim).")] = None,
    mask: Annotated[
        str | None,
        typer.Option(help="Which keys are seen: 'causal() & window(1024, 0)', or in b, h, i, j: '(i - j) % 2 == 0'."),
    ] = None,
    score: Annotated[
        str | None, typer.Option(help="What becomes of a score s: 'softcap(30)', or '30 * tanh(s / 30) - abs(i - j)'.")
    ] = None,
    dropout: Annotated[float, typer.Option(help="How likely a weight is dropped after the softmax.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of --dropout: says which weights are dropped.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every element with float64; exit 1 if one is outside its bound.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Attention over a file: softmax(scale·QKᵀ)V, its log-sum-exp, and the plan it followed."""
    if top_left and causal:
        raise ArgumentError("--top-left: expected either --causal or --top-left; got both.")
    if output is not None and not output.parent.is_dir():
        raise ArgumentError(f"--output: expected a directory that exists; got {output.parent}.")
    found = read_arrays(files)
    names = {"--q": q, "--k": k, "--v": v}
    for option, name in names.items():
        if name not in found:
            raise ArgumentError(
                f"{option}: expected one of {', '.join(sorted(found)) or 'no arrays at all'}; got {name!r}."
            )
    arrays = [found[n] for n in names.values()]
    options: dict[str, Any] = {"causal": "top-left" if top_left else causal, "scale": scale, "layout": layout}
    if layout == "lhd":
        options |= {n: found[n] for n in ("cu_seqlens_q", "cu_seqlens_k") if n in found}
    options |= read_formulas(mask, score) | {"dropout": dropout, "seed": seed}
    plan = sl.plan(*arrays, **options)
    out, lse, seconds = _attend(arrays, options, plan, quiet=as_json)
    if output is not None:
        write_arrays(output, {"out": out, "lse": lse})
    report: dict[str, Any] = {
        "out": {"shape": list(out.shape), "dtype": out.dtype.name},
        "seconds": seconds,
        "gflops": None if plan.flops is None else plan.flops / seconds / 1e9,
        "kernel": plan.kernel,
        "output": str(output) if output else None,
    }
    if check:
        report["check"] = _check(arrays, options, out, lse)
    if as_json:
        print_json(report | {"plan": dict(plan.rows())})
    else:
        _print(report, plan)
    if check and not report["check"]["passed"]:
        raise typer.Exit(1)


@app.command()
def view(
    files: Annotated[
        list[Path] | None, typer.Argument(help="A file with q and k, to draw weights; without one, --mask is drawn.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture: .png, .svg or .pdf.")] = Path("view.png"),
    mask: Annotated[
        str | None,
        typer.Option(help="The mask: 'causal() & window(1024, 0)', or in b, h, i, j: '(i >= j) & (i - j < 100)'."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Of a file: hide keys after the query.")] = False,
    head: Annotated[
        list[int] | None, typer.Option(help="Which query head to draw; of a file, may be given several times.")
    ] = None,
    item: Annotated[int, typer.Option(help="Of a file: which batch item.")] = 0,
    span: Annotated[str | None, typer.Option(help="Of a file: positions first:end to draw, such as 0:40.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Of a file: a text file with a token on each line.")] = None,
    q: Annotated[str, typer.Option(help="Of a file: name of the queries.")] = "q",
    k: Annotated[str, typer.Option(help="Of a file: name of the keys.")] = "k",
    length: Annotated[int, typer.Option(help="Of a mask: queries, and keys unless --keys says otherwise.")] = 8192,
    keys: Annotated[int | None, typer.Option(help="Of a mask: keys. The last query is at the last key.")] = None,
    heads: Annotated[int, typer.Option(help="Of a mask: query heads.")] = 1,
    kv_heads: Annotated[int | None, typer.Option(help="Of a mask: heads of keys and values; default as many.")] = None,
    head_dim: Annotated[int, typer.Option(help="Of a mask: elements of a query; tiles depend on it a little.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of a mask: float32, float64, float16 or bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Draws the attention weights of a file's heads; or, without a file, which tiles a mask computes whole, under the
    mask, and skips.
    """
    check_path(output)
    what = None if mask is None else read_formula("--mask", mask, "bhij")
    if files:
        found = read_arrays(files)
        for option, name in (("--q", q), ("--k", k)):
            if name not in found:
                raise ArgumentError(
                    f"{option}: expected one of {', '.join(sorted(found)) or 'no arrays at all'}; got {name!r}."
                )
        report: dict[str, Any] = draw_weights(
            found[q], found[k], head or [0], item, span, labels, {"causal": causal, "mask": what}, output
        )
    else:
        if what is None or mask is None:
            raise ArgumentError("--mask: expected a mask to draw, or a file with q and k.")
        (one, *more) = head or [0]
        if more or not 0 <= one < heads:
            raise ArgumentError(f"--head: expected 0 to {heads - 1}; got {', '.join(map(str, head or []))}.")
        drawn = sl.plan(
            q_heads=heads, kv_heads=kv_heads, q_len=length, k_len=keys, head_dim=head_dim, dtype=dtype, mask=what
        )
        tile_map(drawn, one, mask, output)
        report = {"plan": dict(drawn.rows())}
    if as_json:
        print_json({"output": str(output)} | report)
        return
    print_rows([("written", str(output)), *report.get("plan", report).items()])


@app.command()
def plan(
    length: Annotated[int, typer.Option(help="Queries of a sequence.")],
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of keys and values; default as many.")] = None,
    keys: Annotated[
        int | None, typer.Option(help="Keys; default as many as queries. The last query is at the last key.")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Elements of a query and a key.")] = 64,
    value_dim: Annotated[int | None, typer.Option(help="Elements of a value; default --head-dim.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float64, float16 or bfloat16.")] = "float32",
    causal: Annotated[bool, typer.Option("--causal", help="Hide keys after the query.")] = False,
    mask: Annotated[str | None, typer.Option(help="Which keys are seen, as for attend.")] = None,
    score: Annotated[str | None, typer.Option(help="What becomes of a score, as for attend.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Count visible pairs where only counting tells.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="The plan of attention_backward().")] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda for a GPU.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """What a call would do: FLOPs, tiles, bytes, memory beside the naive way's, and the time it cannot beat.

    Runs nothing.
    """
    found = sl.plan(
        batch=batch,
        q_heads=heads,
        kv_heads=kv_heads,
        q_len=length,
        k_len=keys,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        causal=causal,
        exact=exact,
        device=device,
        backward=backward,
        **read_formulas(mask, score),
    )
    if as_json:
        figures = {n: getattr(found, n) for n in _FIGURES}
        print_json(
            figures
            | {
                "memory_ratio": found.memory_ratio,
                "seconds_at_least": found.seconds_at_least,
                "text": dict(found.rows()),
            }
        )
        return
    print_rows(found.rows())


_FIGURES = (
    "engine", "isa", "kernel", "threads", "visible_pairs", "flops", "tile_flops", "tiles_full", "tiles_mixed",
    "tiles_skipped",
    "bytes_read", "bytes_written", "workspace_bytes", "materialised_bytes", "peak_flops", "bandwidth",
)  # fmt: skip
app.command()(bench)
app.command()(tune)
app.command()(info)
app.command()(show)


def _attend(
    arrays: list[np.ndarray], options: dict[str, Any], plan: sl.Plan, quiet: bool
) -> tuple[np.ndarray, np.ndarray, float]:
    """The call; head by head under a progress bar if it takes over a second. The bits are the same, without dropout,
    which knows heads by their numbers.
    """
    q, k, v = arrays
    group, kv_heads = plan.problem.group, plan.problem.kv_heads
    out, lse, seconds = q, q, 0.0
    if (plan.seconds_at_least or 0) < 0.5 or kv_heads < 2 or plan.problem.dropout:
        for _ in range(2):  # the first call also loads or compiles the kernel; the second is the one to time
            start = time.perf_counter()
            out, lse = sl.attention(q, k, v, return_lse=True, **options)
            seconds = time.perf_counter() - start
        return out, lse, seconds
    axis = options["layout"].index("h")
    parts = []
    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as progress:
        task = progress.add_task("heads", total=kv_heads)
        for h in range(kv_heads):
            at = [(slice(None),) * axis + (slice(h * n, h * n + n),) for n in (group, 1, 1)]
            start = time.perf_counter()
            parts.append(sl.attention(*(x[i] for x, i in zip(arrays, at, strict=True)), return_lse=True, **options))
            seconds += time.perf_counter() - start
            progress.advance(task)
    lse_axis = len(options["layout"]) - 3
    return (
        np.concatenate([p[0] for p in parts], axis=axis),
        np.concatenate([p[1] for p in parts], axis=lse_axis),
        seconds,
    )


def _check(arrays: list[np.ndarray], options: dict[str, Any], out: np.ndarray, lse: np.ndarray) -> dict[str, Any]:
    """Every element against the float64 reference: largest error, and the largest share of its bound."""
    dot = current_isa().product("bf16") == "pairs" and out.dtype.name == "bfloat16"
    want, want_lse = sl.reference.attention(*arrays, return_lse=True, **options)
    bounds = sl.reference.error_bound(*arrays, dot=dot, **options)
    passed, share, largest = True, 0.0, 0.0
    for got, expected, bound in ((out, want, bounds.out), (lse, want_lse, bounds.lse)):
        got = got.astype(np.float64)
        same = (np.isnan(got) == np.isnan(expected)) & (~np.isinf(expected) | (got == expected))
        finite = np.isfinite(expected)
        error = np.abs(got[finite] - expected[finite])
        passed = passed and bool(same.all()) and bool((error <= bound[finite]).all())
        if error.size:
            share = max(share, float((error / np.maximum(bound[finite], 1e-320)).max()))
        if got is not lse and largest == 0.0 and error.size:
            largest = float(error.max())
    return {"passed": passed, "largest_error": largest, "share_of_bound": share, "elements": int(out.size)}


def _print(report: dict[str, Any], plan: sl.Plan) -> None:
    out = report["out"]
    rate = "" if report["gflops"] is None else f" ({report['gflops']:.3g} GFLOP/s)"
    rows = [("result", f"out {tuple(out['shape'])} {out['dtype']}, in {report['seconds'] * 1e3:.3g} ms{rate}")]
    if report["output"]:
        rows.append(("written", report["output"]))
    if "check" in report:
        c = report["check"]
        word = "[green]passed[/]" if c["passed"] else "[red]FAILED[/]"
        error = f"largest error {c['largest_error']:.2g}, {c['share_of_bound']:.0%} of its bound"
        rows.append(("check", f"{word}: {c['elements']:,} elements against float64, {error}"))
    print_rows([*rows, *plan.rows()])


def main() -> None:
    """Runs the command: errors are one line on stderr and exit code 2."""
    try:
        app()
    except Error as error:
        print(f"speedlight: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, KeyboardInterrupt) or end.code == 130:  # Typer makes the one of the other
            print("speedlight: interrupted; nothing was written.", file=sys.stderr)
            raise SystemExit(130) from None
        raise


if __name__ == "__main__":
    main()
