"""`speedlight bench`: a problem's time on this machine, beside those of every installed peer."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ArgumentError
from ..problem.plan import of_shared_prefix
from .measuring import APART, about, measure_plan
from .options import Json, ProblemOptions, SharedPrefix, Unit, on_unit, takes_listed
from .peers import BACKWARD, LIBRARIES, PEERS, TITLES
from .reports import MOST_OF_OTHERS, busy_rows, check_output, is_busy, plan_rows, print_report, progress, write_text

_MOST_BYTES = 4 << 30  # of arrays
_SPREAD = 0.2  # of the middle half of our times over their median: more is another program's doing


@takes_listed
def bench(
    problem: ProblemOptions,
    peer: Annotated[
        list[str] | None,
        typer.Option(help=f"Which peers, of {', '.join(PEERS)}, or none. Default all that are installed."),
    ] = None,
    shared_prefix: SharedPrefix = 0,
    turns: Annotated[int, typer.Option(help="Samples of each, in turn.")] = 5,
    isa: Unit = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A .json file for the row.")] = None,
    as_json: Json = False,
) -> None:
    """Measures your problem beside other libraries, in turn (A B A B), and says how much faster this one is.

    Every result is first compared with float64; if ours is wrong, nothing is measured and the exit status is 1.
    --backward: gradients, beside PyTorch's. --decode: one step over a KVCache. --latent: of DeepSeek's latents.
    --decode --shared-prefix: one step of a PagePool whose sequences share pages, also beside sequences with copies.
    """
    names = _names(peer, problem.backward)
    if problem.latent and (problem.backward or problem.decode):
        raise ArgumentError("--latent: expected neither --backward nor --decode beside it. Leave one of them out.")
    if shared_prefix and not problem.decode:
        raise ArgumentError("--shared-prefix: expected --decode beside it: a step of a PagePool. Write --decode.")
    if turns < 1:
        raise ArgumentError(f"--turns: expected at least 1; got {turns}.")
    check_output(output, ".json")
    missing = {x: f"not installed ({LIBRARIES.get(x, x)})" for x in names if find_spec(LIBRARIES.get(x, x)) is None}
    with on_unit(isa), progress("measuring", None):
        plan = problem.plan(exact=True)
        size = plan.bytes_read + plan.bytes_written  # each sequence has its own keys in one of the contenders
        plan = of_shared_prefix(plan, shared_prefix, packed=False)
        p, (_, name) = plan.problem, plan_rows(plan)[0]
        if not plan.flops or 0 in (p.q_lengths[0], p.k_lengths[0]):  # the first is the one that is checked
            raise ArgumentError(f"--q-len: expected queries of the first sequence that see keys; got none in {name}.")
        if size > _MOST_BYTES:
            raise ArgumentError(f"--q-len: expected a problem of at most {_MOST_BYTES >> 30} GiB; got {name}.")
        where = ", from a pool" if shared_prefix else ", from a cache"
        row: dict[str, Any] = {"name": name + where * problem.decode, "dtype": p.dtype, "causal": p.causal}
        row |= {"head_dim": p.head_dim, "backward": plan.backward}
        usable = [x for x in names if x not in missing]
        row |= measure_plan(plan, problem.options(), turns, usable, decode=problem.decode)
        report = about() | {"backward": plan.backward, "missing": missing, "rows": [row]}
    if output is not None:
        write_text(output, json.dumps(report, indent=1) + "\n")
    print_report(as_json, report, [*_rows(row, missing), *([("written", str(output))] if output else [])])
    if "refused" in row:
        raise typer.Exit(1)


def _names(peer: list[str] | None, backward: bool) -> list[str]:
    """Returns the names of the peers that are asked for."""
    known = BACKWARD if backward else tuple(PEERS)
    names = list(known) if peer is None else [] if peer == ["none"] else peer
    if unknown := [x for x in names if x not in known]:
        beside = " beside --backward" if backward else ""
        raise ArgumentError(f"--peer: expected some of {', '.join(known)}, or none{beside}; got {unknown[0]!r}.")
    return names


def _rows(row: dict[str, Any], missing: dict[str, str]) -> list[tuple[str, str]]:
    """Returns the lines of a table: the verdict last but for what it leaves out."""
    rows = [("problem", row["name"])]
    if "refused" in row:
        return [*rows, ("check", f"FAILED: {row['refused']}; not measured")]
    for name, (_, low, middle, high, _) in row["seconds"].items():
        ratio = f"{row['ratios'][name][2]:.2f} x our time" if name in row["ratios"] else f"{row['gflops']:,.0f} GFLOP/s"
        quartiles = f"quartiles {low * 1e3:.3g} to {high * 1e3:.3g}"
        rows.append((name, f"{middle * 1e3:.3g} ms ({quartiles}), {ratio}"))
    others = missing | row["notes"]
    rows += [(", ".join(x for x in others if others[x] == why), why) for why in dict.fromkeys(others.values())]
    _, low, middle, high, _ = row["seconds"]["speedlight"]
    spread = (high - low) / middle
    more = [f"our times spread over {spread:.0%}"] * (spread > _SPREAD)
    return [*rows, *busy_rows(row["others"], *more), ("verdict", _verdict(row))]


def _verdict(row: dict[str, Any]) -> str:
    """Returns the outcome in a sentence; none where others took too much of the machine."""
    if is_busy(row["others"]):
        return f"none: other programs took more than {MOST_OF_OTHERS:.0%} of the CPUs"
    share = f"{row['share_of_roof']:.0%} of what this machine can do"
    if row["share_of_roof"] > 1:
        share = "faster than this machine's memory is read: its caches hold the problem"
    others = {name: ratio[2] for name, ratio in row["ratios"].items() if name != APART}
    apart = f"{row['ratios'][APART][2]:.2f} x as fast as sequences apart; " if APART in row["ratios"] else ""
    if not others:
        return f"{apart}{share}; no other library to compare with"
    name = min(others, key=lambda name: others[name])
    fastest = f", the fastest of {len(others)} others" if len(others) > 1 else ""
    return f"{apart}{others[name]:.2f} x as fast as {TITLES.get(name, name)}{fastest}; {share}"
