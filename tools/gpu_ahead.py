"""Ahead of time: compiles the kernels of the tile table for GPUs that this machine lacks, and inspects the result.

No driver is needed: Triton's own ptxas is used. `python tools/gpu_ahead.py` prints a line per kernel and ends with 1 if
one of them takes more registers, spills or shared memory than gpu_ahead.txt lets it, more shared memory than the device
has, or leaves the tensor cores alone. With --write the table becomes what was compiled.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from speedlight.arrays.dtypes import ON_GPU
from speedlight.arrays.memory import Array
from speedlight.expressions.patterns import documents, softcap
from speedlight.expressions.tables import Table, table
from speedlight.expressions.tracing import expression
from speedlight.gpu.differentiate import Gradients
from speedlight.gpu.joining import Ending, Found, State, joining
from speedlight.gpu.keys import Keys, arrays_of, axes
from speedlight.gpu.launch import Launch
from speedlight.gpu.prepare import Part
from speedlight.gpu.rows import Destination, Rows, Tokens, cache_type, paged_keys
from speedlight.gpu.schedule import schedule
from speedlight.gpu.sequence import RECOMPUTE
from speedlight.gpu.uploads import uploads_of
from speedlight.problem.build import Stored, from_arrays, from_stored
from speedlight.problem.gradients import Asked
from speedlight.problem.operands import Operands
from speedlight.problem.options import Options
from speedlight.problem.tokens import TokenShape

# capability: most shared memory of a block
DEVICES = {(8, 0): 166_912, (9, 0): 232_448, (10, 0): 232_448}
TABLE = Path(__file__).with_suffix(".txt")
_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Device:
    """A driver that says what a GPU of a capability would say, and launches nothing."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.number = capability[0] * 10 + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.number, 32)

    def get_current_device(self) -> int:
        return self.number  # of which Triton keeps kernels apart

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Compiled:
    """Figures of a compiled kernel."""

    name: str
    registers: int
    spills: int  # bytes
    shared: int
    seconds: float
    instructions: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def figures(self) -> tuple[int, int, int]:
        return self.registers, self.spills, self.shared

    def faults(self, capability: tuple[int, int], tensor_cores: bool, most: tuple[int, ...] = ()) -> list[str]:
        """Returns what is wrong; most: the figures of the table, if it holds this kernel's."""
        what = ("registers", "bytes spilled", "bytes of shared memory")[: len(most)]
        faults = [f"{x:,} {n}, {m:,} in the table" for n, x, m in zip(what, self.figures, most, strict=False) if x > m]
        if self.shared > DEVICES[capability]:
            faults.append(f"{self.shared:,} bytes of shared memory, {DEVICES[capability]:,} there")
        if tensor_cores and not self.instructions.get("tensor"):
            faults.append("no tensor core instruction")
        return faults + list(self.warnings)


class Row(NamedTuple):
    """A row of the table: registers, bytes spilled and of shared memory, by capability; why something spills."""

    figures: dict[tuple[int, int], tuple[int, ...]]
    why: str


def table_rows(text: str) -> dict[str, Row]:
    """Returns the rows of a table by the names of kernels; a dash is what nobody has compiled yet."""
    rows = {}
    for line in text.splitlines()[1:]:
        *columns, name = line.split(None, len(DEVICES))
        name, _, why = name.partition("  # ")
        by_device = zip(DEVICES, columns, strict=True)
        rows[name] = Row({c: tuple(map(int, x.split("/"))) for c, x in by_device if x != "-"}, why)
    return rows


def table_text(rows: dict[str, Row]) -> str:
    names = ", ".join(f"sm_{a}{b}" for a, b in DEVICES)
    lines = [f"registers/bytes spilled/bytes of shared memory for {names}, by Triton {triton.__version__}"]
    for name, row in rows.items():
        columns = ["/".join(map(str, row.figures.get(c, "-"))) for c in DEVICES]
        lines.append("".join(f"{x:<13} " for x in columns) + name + f"  # {row.why}" * bool(row.why))
    return "\n".join(lines) + "\n"


def compile_for(each: Launch, capability: tuple[int, int], name: str) -> Compiled:
    """The launch, compiled as a call on such a device compiles it, by Triton's own reading of the arguments."""
    driver: Any = Device(capability)
    triton.runtime.driver.set_active(driver)
    given = {n: torch.empty(16, dtype=x.dtype) if isinstance(x, torch.Tensor) else x for n, x in each.arguments.items()}
    options = {"num_warps": each.warps, "num_stages": each.stages, "maxnreg": each.registers}
    start = time.perf_counter()
    knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log:
        built = each.kernel.warmup(**given, grid=each.grid, **options)
    seconds = time.perf_counter() - start
    ptx = built.asm["ptx"]
    text = log.getvalue() or _assemble(ptx, capability)  # of a kernel that was compiled before there is none
    used, spilled = (re.findall(pattern, text) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    warnings = tuple(line.strip()[:160] for line in text.splitlines() if "wgmma" in line.lower() or "C75" in line)
    cores = r"\bmma\.sync|wgmma\.mma_async|tcgen05\.mma"
    counts = {"tensor": len(re.findall(cores, ptx)), "bulk": ptx.count("cp.async.bulk")}
    return Compiled(
        name, max(map(int, used), default=0), sum(map(int, spilled)), built.metadata.shared, seconds, counts, warnings
    )


def _assemble(ptx: str, capability: tuple[int, int]) -> str:
    """Returns ptxas' account of registers, spills and serialised products."""
    suffix = "a" if capability[0] >= 9 else ""
    tool = _BIN / ("ptxas-blackwell" if capability[0] >= 10 else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        name = f"sm_{capability[0]}{capability[1]}{suffix}"
        done = subprocess.run(
            [tool, "-v", f"--gpu-name={name}", f.name, "-o", "/dev/null"], capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(f"{tool}: {done.stderr}")
    return done.stderr


# --- what is compiled: for each row of the table, prefill and decode, full and causal; masks, scores, pages and codes
# at head dim 128


@dataclass(frozen=True, slots=True)
class Case:
    """A call of 32 query and 8 kv heads over 4,096 keys."""

    dtype: str
    d: int
    q_len: int
    causal: bool = False
    mask: Any = None
    score: Any = None
    paged: bool = False
    codes: str | None = None
    value_dim: int | None = None
    precision: str = "ieee"
    dropout: float = 0.0
    part: bool = False  # of the keys: its out is float32
    backward: bool = False
    tables: tuple[Table, ...] = ()  # whose gradients are asked for

    def __str__(self) -> str:
        kind = self.dtype if self.precision == "ieee" else self.precision
        return f"{kind} d{self.d} {self.phase}{' causal' * (self.causal and self.q_len > 1)}"

    @property
    def phase(self) -> str:
        return "backward" if self.backward else "prefill" if self.q_len > 1 else "decode"


def cases(quick: bool = False) -> Iterator[tuple[str, Case]]:
    """Cases and their names."""
    dtypes, dims = (("bfloat16",), (128,)) if quick else (("float16", "bfloat16", "float32"), (64, 128, 256, 512))
    shapes = ((4096, False), (4096, True), (1, False))
    plain = [Case(dtype, d, *shape) for dtype in dtypes for d in dims for shape in shapes]
    if not quick:
        plain += [Case("float32", d, *shape, precision="tf32x3") for d in (64, 128) for shape in shapes]
    plain += [replace(case, backward=True) for case in plain if case.q_len > 1]
    yield from ((str(case), case) for case in plain)
    if quick:
        return
    ids = documents(torch.arange(4096).numpy() // 512)
    window = expression(lambda b, h, i, j: (i - j <= 1024) & (j <= i))
    for base in (Case("bfloat16", 128, 4096), Case("bfloat16", 128, 1)):
        yield f"{base} window", replace(base, mask=window)
        yield f"{base} documents", replace(base, mask=ids, causal=True)
        yield f"{base} softcap", replace(base, score=softcap(30.0), causal=True)
        yield f"{base} dropout", replace(base, dropout=0.1, causal=True)
        yield f"{base} part of the keys", replace(base, part=True, causal=True)
        yield f"{base} pages", replace(base, paged=True, causal=True)
        for codes in ON_GPU:
            yield f"{base} {codes}", replace(base, codes=codes, paged=True, causal=True)
        yield f"bfloat16 d96 {base.phase} value_dim 80", replace(base, d=96, value_dim=80)
    base = Case("bfloat16", 128, 4096, backward=True)
    yield f"{base} window", replace(base, mask=window)
    yield f"{base} documents", replace(base, mask=ids, causal=True)
    yield f"{base} softcap", replace(base, score=softcap(30.0), causal=True)
    yield f"{base} dropout", replace(base, dropout=0.1, causal=True)
    bias = table(torch.zeros(32, 8192).numpy())
    relative = expression(lambda s, b, h, i, j: s + bias[h, i - j + 4096])
    yield f"{base} bias", replace(base, score=relative, causal=True, tables=(bias,))
    yield "bfloat16 d96 backward value_dim 80", replace(base, d=96, value_dim=80)


def appends() -> Iterator[tuple[str, Launch]]:
    """Storing a step's tokens, in arrays and in pages, as they are and as codes."""
    pages, words = torch.zeros((4, 16, 8, 128), dtype=torch.bfloat16), torch.zeros((2, 4), dtype=torch.int32)
    to = Destination(words[:, 0], 64, pages=words, page_size=16, after=words[:, 1])
    packed = words[:, 0], words[:, 1]
    for name, layout, shape, more in (("raw pages", "bhld", (2, 8, 1), ()), ("packed", "lhd", (2, 8), packed)):
        x = torch.zeros((*shape, 128), dtype=torch.bfloat16)
        new = Tokens(x, x, axes(x, layout), axes(x, layout), 1, *more)
        yield f"bfloat16 append {name}", Rows.over((pages, pages)).put(new, to, words)
    for dtype, paged in itertools.product(("bfloat16", *ON_GPU), (False, True)):
        device = torch.device("cpu")
        rows = Rows(TokenShape(1, 8, 128, 128, dtype), 4, 32, device, tokens_first=paged)
        x = torch.zeros((2, 8, 1, 128), dtype=torch.bfloat16)
        words = torch.zeros(2, dtype=torch.int32)
        new, to = Tokens(x, x, x.stride(), x.stride(), 1), Destination(words, 32, words)
        if paged:
            new = new._replace(counts=words.long(), first=words.long())
            to = Destination(words, 32, pages=torch.zeros((2, 4), dtype=torch.int32), page_size=16)
        yield f"{dtype} append{' paged' * paged}", rows.put(new, to, words)


def joins() -> Iterator[tuple[str, Launch]]:
    """Adding a part of the keys to a state: what begins it, goes on from it, and ends it."""
    for dtype, width in (("bfloat16", 128), ("float32", 128), ("bfloat16", 512)):
        acc, lse = torch.zeros((2, 4, 64, width)), torch.zeros((2, 4, 64))
        part, state, number = Found(acc, lse), State(acc, torch.zeros((*lse.shape, 2))), getattr(torch, dtype)
        into, ending = Found(acc.to(number), lse), Ending(lse[0, :, 0].contiguous(), torch.zeros(2, dtype=torch.int64))
        for name, begins, ends in (("begins", True, False), ("goes on", False, False), ("ends", False, True)):
            yield f"{dtype} join d{width} {name}", joining("bhld", part, state, into, ending, begins=begins, ends=ends)


def build(capability: tuple[int, int], case: Case) -> list[Launch]:
    """The launches of a case. The tensors are small: only their types and strides matter."""
    d, q_len, value_dim, number = case.d, case.q_len, case.value_dim or case.d, getattr(torch, case.dtype)
    q, out = (
        torch.empty_strided((1, 32, q_len, x), (32 * q_len * x, q_len * x, x, 1), dtype=y, device="meta")
        for x, y in ((d, number), (value_dim, torch.float32 if case.part else number))
    )
    keys = _keys(case, d, value_dim)
    like = Array("q", 0, tuple(q.shape), (0,) * 4, case.dtype, "torch", True, None)
    if case.backward:
        return gradients_of(capability, case)
    stored = Stored(case.codes or case.dtype, 8, d, value_dim, (4096,))
    problem = from_stored(
        like, stored, Options(causal=case.causal, mask=case.mask, score=case.score, dropout=case.dropout, seed=0)
    )
    lse = torch.empty((1, 32, q_len), dtype=torch.float32, device="meta")
    how = schedule(problem, keys, capability, case.precision)
    return Part(problem, "bhld", how, uploads_of(problem, "cpu", None)).launches(q, keys, out, lse, None)


def gradients_of(capability: tuple[int, int], case: Case) -> list[Launch]:
    """The launches of a backward case: delta, dQ, dK and dV, and where tables are asked for those of their entries."""
    dims = {"k": case.d, "dk": case.d, "q": case.d, "dq": case.d}

    def lying(name: str) -> Array:
        heads = 8 if name.removeprefix("d") in ("k", "v") else 32
        shape = (1, heads, case.q_len, dims.get(name, case.value_dim or case.d))[: 3 if "lse" in name else 4]
        dtype = "float32" if "lse" in name else case.dtype
        x = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        return Array(name, 0, shape, (0,) * len(shape), dtype, "torch", True, x)

    x = Operands(*(lying(name) for name in Operands._fields))
    options = Options(causal=case.causal, mask=case.mask, score=case.score, dropout=case.dropout, seed=0)
    problem = from_arrays(x.q, x.k, x.v, options).problem
    uploads = uploads_of(problem, "cpu", None, backward=True)
    call = Gradients(Asked(problem, case.tables), "bhld", case.precision, None, uploads, capability)
    delta = torch.empty(x.lse.shape, device="meta")
    sums = call.of_rows(x, delta, torch.zeros(32, dtype=torch.float64))[0]
    found = {id(t): torch.empty(t.array.size, dtype=torch.float64, device="meta") for t in case.tables}
    entries = itertools.islice(call.of_entries(x, delta, found), 2) if found else ()
    return [sums, *call.launches(x, delta, None), *entries]


def _keys(case: Case, d: int, value_dim: int) -> Keys:
    """Arrays, or 256 pages of 16 tokens whose lengths are on the device; codes with scales."""
    shape = (256, 16, 8) if case.paged else (1, 8, 4096)
    stored = cache_type(case.codes or case.dtype)
    k, v = (torch.empty((*shape, x), dtype=stored, device="meta") for x in (d, value_dim))
    keys = arrays_of(k, v, "bhld")
    if case.paged:
        table, lengths = torch.zeros((1, 256), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        keys = paged_keys((k, v), table, lengths, 4096, False)
    if case.codes:
        keys.k_scales = keys.v_scales = torch.zeros(shape).permute(0, 2, 1)
    return keys


def listed(capability: tuple[int, int], only: list[str], quick: bool = False) -> Iterator[tuple[str, Launch, bool]]:
    """Every kernel whose case's name has one of the words (or all), its name, and whether it needs tensor cores."""
    for name, case in cases(quick):
        for each in build(capability, case) if wanted(name, only) else ():
            products = case.dtype != "float32" or case.precision != "ieee"
            yield f"{name} {_kind(each)}", each, products and each.kernel.__name__ in ("attend", "differentiate")
    for name, each in (*appends(), *joins()):
        if wanted(name, only):
            yield f"{name} {_kind(each)}", each, False


def _kind(each: Launch) -> str:
    """The kernel's name; of the backward kernel with its end. A repair hardly ever runs: it may spill."""
    end = each.arguments.get("END")
    kind = each.kernel.__name__ + ("" if end is None else (" dq", " dk dv", " entries")[end])
    return kind + " repair" * (each.arguments.get("NONFINITE") == int(RECOMPUTE))


def wanted(name: str, only: list[str]) -> bool:
    return not only or any([x in name for x in only])


def main(arguments: list[str]) -> int:
    capabilities = [c for c in DEVICES if f"{c[0]}.{c[1]}" in arguments] or list(DEVICES)
    only = [x for x in arguments if not re.fullmatch(r"\d+\.\d|--quick|--write", x)]
    text = TABLE.read_text()
    rows = table_rows(text)
    is_held = f"Triton {triton.__version__}\n" in text
    bad = count = 0
    for capability in capabilities:
        for name, each, products in listed(capability, only, "--quick" in arguments):
            one, is_repair = compile_for(each, capability, name), name.endswith("repair")
            if "--write" in arguments and not is_repair:
                rows.setdefault(name, Row({}, "")).figures[capability] = one.figures
            unknown = (255, 0, DEVICES[capability])
            most = rows[name].figures.get(capability, unknown) if name in rows else unknown
            faults = one.faults(capability, products and not is_repair, most if is_held and not is_repair else ())
            count, bad = count + 1, bad + bool(faults)
            print(
                f"sm_{capability[0]}{capability[1]} {name}: {one.registers} registers, {one.spills} B spilled, "
                f"{one.shared:,} B shared, {one.instructions['tensor']} tensor, {one.instructions['bulk']} bulk, "
                f"{one.seconds:.1f} s" + "".join(f"; FAULT: {x}" for x in faults),
                flush=True,
            )
    if "--write" in arguments:
        TABLE.write_text(table_text(rows))
    if not is_held:
        print(f"{TABLE.name} has figures of another Triton than {triton.__version__}: nothing was compared with them")
    print(f"{count} kernels compiled, {bad} with faults")
    return int(bad > 0 or not count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
