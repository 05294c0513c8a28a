"""Commands that look at the machine and at kernels: info, show."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import speedlight as sl

from .. import engines as engine
from ..errors import ArgumentError
from ..host import machine
from ..host.others import Others
from ..problem.operands import Strides
from ..problem.plan import Roofs, size_text
from . import options as opt
from .libraries import libraries_report, library_rows
from .options import on_unit
from .reports import busy_rows, check_output, print_json, print_report, print_rows, progress, write_text


def info(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure peak and bandwidth again; the best that was seen is kept.")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Delete the kernels that were kept.")] = False,
    isa: opt.Unit = None,
    as_json: opt.Json = False,
) -> None:
    """This machine: vector unit, threads, measured peaks and bandwidth, the kernels that are kept, and libraries."""
    from ..cpu.runtime import compile, kept_files, workers
    from ..cpu.runtime.tuned import tuning_of

    with on_unit(isa):
        unit, threads = machine.current_isa(), sl.get_threads()
    tuning = tuning_of(unit)
    known, taken = _roofs(unit, threads, again=measure)
    products = bf16_report(unit) if measure else {}
    cached = compile.cached_kernels()
    removed = compile.clear_kernels() if clear else None  # what measuring has compiled, too
    peaks, read = {x: r.flops for x, r in known.items()}, known["float32"].bytes
    directory = kept_files.cache_directory()
    report = {
        "version": sl.__version__, "arithmetic": sl.ARITHMETIC, "engine": "cpu", "cpu": machine.cpu_name(),
        "isa": unit.name,
        "isas": [x.name for x in machine.native_isas()],
        "schedule": tuning.origin._asdict(),
        "threads": threads, "thread_runtime": workers.runtime(),
        "peak_flops": peaks, "read_bytes_per_second": read,
        "measured": {x: r.date for x, r in known.items()}, "others": taken,
        "kernels": {"directory": str(directory) if directory else None, "count": len(cached),
                    "bytes": sum(cached.values())},
        "loaded": {"count": len(compile.loaded_kernels()), "most": compile.MOST_LOADED},
        "removed": removed, **products,
        "libraries": libraries_report(),  # last: it imports them
    }  # fmt: skip
    if as_json:
        print_json(report)
        return
    others = ", ".join(f"{x.name}" for x in machine.native_isas() if x is not unit)
    where = "not kept (SPEEDLIGHT_CACHE=0, or no home directory)"
    if directory is not None:
        where = f"{len(cached)}, {size_text(sum(cached.values()))}, in {directory}"
    bits = f"{unit.name}: {unit.registers} registers of {8 * unit.vector_bytes} bits"
    rates = ", ".join(f"{name} {x / 1e9:,.0f} GFLOP/s" for name, x in peaks.items())
    rows = [
        ("speedlight", f"{sl.__version__}, arithmetic {sl.ARITHMETIC}, engine cpu"),
        ("cpu", machine.cpu_name()),
        ("vector unit", bits + (f"; also here: {others}" if others else "")),
        ("schedule", str(tuning.origin)),
        ("threads", f"{threads}, {workers.runtime()}"),
        ("peak", f"{rates}, {threads} threads, measured {known['float32'].date} (--measure: again)"),
        ("plain read", f"{read / 1e9:,.1f} GB/s"),
        *busy_rows(taken),
        *bf16_rows(products),
        ("kernels", where),
        ("loaded", f"{report['loaded']['count']} in this process; {compile.MOST_LOADED} at most in any"),
        *library_rows(report["libraries"]),
    ]
    print_rows(rows if removed is None else [*rows, ("removed", f"{removed} kernels")])


def bf16_report(unit: machine.Isa) -> dict[str, Any]:
    """Measures how fast each unit multiplies bfloat16, and names the one to ask for instead of `unit`, if any."""
    from ..cpu.runtime import roof

    peaks = roof.bf16_peaks()
    return {"bfloat16_thread_flops": peaks, "recommended_isa": roof.faster_unit(unit, peaks)}


def bf16_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns bf16_report() as a line that advises: another unit changes bits of bfloat16, so that users choose it."""
    if not report:
        return []
    peaks, other = report["bfloat16_thread_flops"], report["recommended_isa"]
    advice = f"; SPEEDLIGHT_ISA={other} is faster here (other last bits: docs/numerics.md)" if other else ""
    return [
        ("bfloat16", ", ".join(f"{name} {x / 1e9:,.0f} GFLOP/s" for name, x in peaks.items()) + " a thread" + advice)
    ]


def _roofs(unit: machine.Isa, threads: int, *, again: bool) -> tuple[dict[str, Roofs], float | None]:
    """Returns roofs of each dtype that has a peak of its own: those that were kept, or measured again; and which share
    of the CPUs others took while they were measured, if they were.
    """
    from ..cpu.runtime import roof

    kinds = {"float32": "f32", "float64": "f64"}
    if roof.kind_of_peak(unit, "bf16") == "bf16":
        kinds["bfloat16"] = "bf16"
    is_kept = not again and all([roof.kept_rate(unit, x, threads) for x in (*kinds.values(), roof.READING)])
    others = Others()
    with progress("measuring", len(kinds)) as advance:
        for storage in kinds.values():
            (roof.measure if again else roof.roofs)(unit, storage, threads)
            advance()
    taken = None if is_kept else others.share()
    return {name: roof.roofs(unit, storage, threads) for name, storage in kinds.items()}, taken


@opt.takes_listed
def show(
    problem: opt.ProblemOptions,
    isa: opt.Unit = None,
    ir: Annotated[bool, typer.Option("--ir", help="Print the LLVM IR.")] = False,
    assembly: Annotated[bool, typer.Option("--asm", help="Print the assembly.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A file for the IR or assembly.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Shows the kernel that a call would run: its name, size and registers; its IR or its assembly.

    --isa may name a vector unit that this machine lacks.
    """
    from ..cpu.runtime import compile

    if ir and assembly:
        raise ArgumentError("--asm: expected either --ir or --asm; got both.")
    if output is not None and not (ir or assembly):
        raise ArgumentError("--output: expected --ir or --asm beside it.")
    check_output(output)
    unit = machine.current_isa() if isa is None else machine.isa_named(isa)
    maker = engine.cpu().planner(backward=problem.backward)
    how, shape = maker.kernel_of_problem(problem.plan().problem, Strides(), sl.get_threads(), unit)
    text = compile.emit(shape)
    code, listing = (compile.compile_ir(shape, text, assembly=x) for x in (False, True))
    panels = how.panel if shape.kind == "decode" else how.panels
    report = _report(compile.symbol_of(shape), shape, panels, code, listing) | {"schedule": how.tuning.origin._asdict()}
    if ir or assembly:
        body = text if ir else listing
        if output is None:
            sys.stdout.write(body)
            return
        write_text(output, body)
        report["output"] = str(output)
    print_report(as_json, report, _rows(report | {"schedule": str(how.tuning.origin)}, unit))


def _report(symbol: str, shape: Any, panels: int, code: bytes, listing: str) -> dict[str, Any]:
    """Returns a kernel's figures, for --json."""
    functions, unit = _functions(listing), shape.isa
    return {
        "kernel": symbol, "isa": unit.name, "runs_here": unit in machine.runnable_isas(),
        "product": shape.product, "lanes": shape.lanes, "lanes_are": "keys" if shape.kind == "decode" else "queries",
        "tile_rows": None if shape.kind == "decode" else shape.rows,
        "tile_vectors": None if shape.kind == "decode" else shape.vectors, "panels": panels,
        "object_bytes": len(code), "instructions": sum(n for n, _ in functions.values()),
        "registers": _registers(listing, unit),
        "functions": {name: {"instructions": n, "spills": spills} for name, (n, spills) in functions.items()},
    }  # fmt: skip


def _rows(report: dict[str, Any], unit: machine.Isa) -> list[tuple[str, str]]:
    """Returns a kernel's figures as lines of a table."""
    panels = f"{report['panels']} panels share" if report["panels"] > 1 else "a panel at a time takes"
    tile = f"{report['lanes_are']} in lanes; {panels} a tile of keys"
    if report["tile_rows"]:
        tile = f"register tile {report['tile_rows']} x {report['tile_vectors']} vectors; {tile}"
    product = machine.PRODUCTS[report["product"]].title
    registers = f"{report['registers']} of {unit.registers} vector registers"
    rows = [
        ("kernel", report["kernel"]),
        ("vector unit", unit.name + ("" if report["runs_here"] else ", not of this machine")),
        ("lanes", f"{report['lanes']}, {product}; {tile}"),
        ("schedule", report["schedule"]),
        ("object", f"{report['object_bytes']:,} bytes, {report['instructions']:,} instructions, {registers}"),
    ]
    for name, x in report["functions"].items():
        spills = f", {x['spills']} vector spills" if x["spills"] else ""
        shown = name.replace(report["kernel"], "entry")  # its whole name stands above
        rows.append((f"  {shown}", f"{x['instructions']:,} instructions{spills}"))
    return [*rows, ("written", report["output"])] if "output" in report else rows


_X86 = re.compile(r"%([xyz])mm(\d+)")
_ARM = re.compile(r"\b[vqds](\d+)\b")


def _registers(listing: str, unit: machine.Isa) -> int:
    """Vector registers that the code names."""
    pattern = _X86 if unit.arch == "x86_64" else _ARM
    return len({m[-1] if isinstance(m, tuple) else m for m in pattern.findall(listing)})


def _functions(listing: str) -> dict[str, tuple[int, int]]:
    """Counts instructions of each function in an assembly listing, and vector registers stored to the stack."""
    found: dict[str, tuple[int, int]] = {}
    name = None
    for line in listing.splitlines():
        label = re.match(r"([A-Za-z_]\w*):", line)
        if label and not label[1].startswith("L"):
            name = label[1]
            found[name] = 0, 0
        elif name and line.startswith("\t") and not line.startswith("\t."):
            count, spills = found[name]
            spill = "-byte Spill" in line and ("mm" in line or re.search(r"\bq\d", line) is not None)
            found[name] = count + 1, spills + spill
    return {name: x for name, x in found.items() if x[0]}
