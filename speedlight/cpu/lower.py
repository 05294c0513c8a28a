"""From an expression's tree to vector code: a lane is a query, keys come one after another.

What does not depend on the key is computed before the loop over keys; what is the same for all lanes is scalar.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

from ..bounds import visible
from ..tree import FUNCTIONS as _NAMES
from ..tree import Node, order
from .fields import field as field_at
from .functions import FUNCTIONS, like
from .microkernels import Shape
from .vector import F16, F32, F64, I1, I8, I16, I32, I64, PTR, Function, Value, vec

_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}
_STORED = {"bool": I8, "int8": I8, "uint8": I8, "int16": I16, "uint16": I16, "int32": I32, "uint32": I32, "int64": I64, "uint64": I64,
           "float16": F16, "float32": F32, "float64": F64}  # fmt: skip
PART = 16  # keys: the smallest part of a tile that is skipped; even, so that pairs stay whole
TABLE_WORDS = 11  # address, 4 lengths, 4 strides in bytes, least and greatest entry (of integers)
_ANYTHING = 1 << 58
_SCAN = 8192  # entries of a table that are worth looking at for one box


@dataclass(frozen=True)
class Program:
    """A mask and a score as a kernel sees them: equal if the structure is; numbers and arrays are arguments."""

    key: str
    mask: Node | None = field(compare=False, repr=False, default=None)
    score: Node | None = field(compare=False, repr=False, default=None)
    narrow: bool = False  # every integer fits 32 bits, which vectors do twice as fast

    def nodes(self) -> list[Node]:
        return [n for root in (self.mask, self.score) if root is not None for n in order(root)]

    def slots(self) -> tuple[dict[int, int], dict[int, int], list[tuple[Node, int]]]:
        """Slots of numbers and of tables by node, and every (lookup, dimension) that may be out of range."""
        nodes = self.nodes()
        found = {n: i for i, n in enumerate(dict.fromkeys(id(n) for n in nodes if n.op == "number"))}
        tables = {t: i for i, t in enumerate(dict.fromkeys(id(n.value.array) for n in nodes if n.op == "table"))}
        lookups = list({id(n): n for n in nodes if n.op == "table"}.values())
        return found, {id(n): tables[id(n.value.array)] for n in lookups}, [(n, d) for n in lookups for d in range(len(n.args))]


class Lowering:
    """One function's values of a program's nodes."""

    def __init__(self, k: Function, s: Shape, program: Program, numbers: Value, tables: Value, *, narrow: bool = False) -> None:
        self.k, self.s, self.numbers_at, self.tables_at = k, s, numbers, tables
        self.numbers, self.tables, _ = program.slots()
        self.int = I32 if narrow else I64
        self.values: dict[int, Value] = {}
        self.wrong: dict[tuple[int, int], tuple[Value, Value]] = {}  # (node, dimension): out of range, index

    def type_of(self, kind: str) -> ir.Type:
        return {"bool": I1, "int": self.int, "float": self.s.number, "double": F64}[kind]

    def before_keys(self, root: Node, env: dict[str, Value]) -> None:
        """Emits what no key changes."""
        for node in order(root):
            if not node.uses & {"j", "s"} and id(node) not in self.values:
                self.values[id(node)] = self.emit(node, env, self.values)

    def value(self, root: Node, env: dict[str, Value], values: dict[int, Value]) -> Value:
        """Emits the rest; `values` starts as a copy of self.values for each key."""
        for node in order(root):
            if id(node) not in values:
                values[id(node)] = self.emit(node, env, values)
        return values[id(root)]

    def vector(self, x: Value) -> Value:
        return x if isinstance(x.type, ir.VectorType) else self.k.splat(x, self.s.lanes)

    def integer(self, x: Value) -> Value:
        """An I64 as the integers of this lowering."""
        return x if self.int is I64 else self.k.trunc(x, like(x, I32))

    def wide(self, x: Value) -> Value:
        """And back."""
        return x if self.int is I64 else Value(self.k, self.k.b.sext(x.x, like(x, I64)))

    def _alike(self, args: list[Value]) -> list[Value]:
        return [self.vector(x) for x in args] if any(isinstance(x.type, ir.VectorType) for x in args) else args

    def emit(self, node: Node, env: dict[str, Value], values: dict[int, Value]) -> Value:
        k, op = self.k, node.op
        if op == "symbol":
            return env[node.value]
        if op == "number":
            return self._number(node)
        args = [values[id(a)] for a in node.args]
        if op == "table":
            return self._look_up(node, args)
        args = self._alike(args)
        if op in _COMPARE:
            return args[0]._compare(_COMPARE[op], args[1])
        if op in _NAMES:
            return FUNCTIONS[op](k, args[0])
        match op:
            case "ne":
                return args[0].differs(args[1])
            case "add":
                return args[0] + args[1]
            case "sub":
                return args[0] - args[1]
            case "mul":
                return args[0] * args[1]
            case "div":
                return args[0] / args[1]
            case "floordiv" | "mod":
                return self._divided(op, *args)
            case "and":
                return args[0] & args[1]
            case "or":
                return args[0] | args[1]
            case "xor":
                return args[0] ^ args[1]
            case "shl":
                return Value(k, k.b.shl(args[0].x, args[1].x))
            case "shr":
                return Value(k, k.b.ashr(args[0].x, args[1].x))
            case "neg":
                return -args[0]
            case "not":
                return args[0] ^ 1
            case "abs":
                return k.abs(args[0]) if args[0].is_float else k.select(args[0] < 0, -args[0], args[0])
            case "floor":
                return k.unary("floor", args[0])
            case "min" | "max":
                a, b = args
                least = k.select(a <= b if op == "min" else a >= b, a, b)
                return k.select(a.differs(a), a, least) if a.is_float else least
            case "where":
                return k.select(*args)
            case "cast":
                return self._cast(args[0], node.args[0].kind, self.type_of(node.kind))
        raise AssertionError(op)

    def _number(self, node: Node) -> Value:
        word = self.k.load(I64, self.numbers_at, 8 * self.numbers[id(node)])
        if node.kind == "int":
            return self.integer(word)
        if node.kind == "bool":
            return word.differs(0)
        number = word.bits(F64)
        return number if self.type_of(node.kind) is F64 else self.k.narrow(number, F32)

    def _divided(self, op: str, a: Value, b: Value) -> Value:
        k = self.k
        if a.is_float:
            whole = k.unary("floor", a / b)
            return whole if op == "floordiv" else k.fma(-whole, b, a)
        none = b.equals(0)
        by = k.select(none, k.const(1, b.type), b)
        quotient = Value(k, k.b.sdiv(a.x, by.x))
        rest = a - quotient * by
        over = rest.differs(0) & ((rest ^ by) < 0)
        result = k.select(over, quotient - 1, quotient) if op == "floordiv" else k.select(over, rest + by, rest)
        return k.select(none, k.const(0, a.type), result)

    def _cast(self, x: Value, kind: str, to: ir.Type) -> Value:
        k, t = self.k, like(x, to)
        if kind == "bool":
            one = k.zext(x, like(x, self.int))
            return one if to is self.int else k.to_float(one, t)
        if kind == "int":
            return k.to_float(x, t)
        if to is self.int:
            x = k.select(x.differs(x), k.const(0.0, x.type), x)
            x = k.max(k.min(x, k.const(2.0**62, x.type)), k.const(-(2.0**62), x.type))
            return Value(k, k.b.fptosi(x.x, t))
        if x.type == t:
            return x
        return k.extend(x, t) if to is F64 else k.narrow(x, t)

    def _look_up(self, node: Node, index: list[Value]) -> Value:
        """The entry at the index, drawn into range first; where it had to be drawn is remembered."""
        k = self.k
        at = k.at(self.tables_at, self.tables[id(node)] * TABLE_WORDS * 8)
        offset: Value | None = None
        for d, x in enumerate(map(self.wide, index)):
            last = k.load(I64, at, 8 * (1 + d)) - 1
            stride = k.load(I64, at, 8 * (5 + d))
            zero = k.const(0, x.type)
            last, stride = (k.splat(y, self.s.lanes) if isinstance(x.type, ir.VectorType) else y for y in (last, stride))
            inside = k.max(k.min(x, last), zero)
            self.wrong[id(node), d] = (x.differs(inside) | (last < 0), x)
            step = inside * stride
            offset = step if offset is None else self._sum(offset, step)
        assert offset is not None
        name = node.value.array.dtype.name
        stored = _STORED[name]
        base = k.load(PTR, at)
        x = self._gather(stored, base, offset) if isinstance(offset.type, ir.VectorType) else k.load(stored, base, offset)
        if name == "bool":
            return x.differs(0)
        if name.startswith(("int", "uint")):
            wide = k.b.zext if name.startswith("u") else k.b.sext
            return self.integer(x if stored is I64 else Value(k, wide(x.x, like(x, I64))))
        wanted = like(x, self.type_of(node.kind))
        return x if x.type == wanted else k.extend(x, wanted)

    def _sum(self, a: Value, b: Value) -> Value:
        a, b = self._alike([a, b])
        return a + b

    def _gather(self, stored: ir.Type, base: Value, offset: Value) -> Value:
        k, lanes = self.k, self.s.lanes
        address = k.splat(Value(k, k.b.ptrtoint(base.x, I64)), lanes) + offset
        pointers = Value(k, k.b.inttoptr(address.x, vec(PTR, lanes)))
        t = vec(stored, lanes)
        suffix = {I8: "i8", I16: "i16", I32: "i32", I64: "i64", F16: "f16", F32: "f32", F64: "f64"}[stored]
        every = k.const(1, vec(I1, lanes))
        name = f"llvm.masked.gather.v{lanes}{suffix}.v{lanes}p0"
        return k.intrinsic(name, t, pointers, k.const(1, I32), every, k.const(0, t))


def expression_tile(module: Any, s: Shape, program: Program) -> Any:
    """scores[n_keys, panel] = score(scale · S), and -inf (which means hidden) where the mask says so, from key `clear` on.

    `lanes` holds the position and then the head of every lane; `limits` as in softmax_tile. With a score, `check` is as
    from score_tile. An index out of range at a visible key is noted in `wrong`: per lookup and dimension, a flag and one
    such index.
    """
    k = module.function("expression_tile", {"a": PTR, "scores": PTR, "check": PTR, "lanes": PTR, "limits": PTR, "first": I64,
                                            "start": I64, "n_keys": I64, "batch": I64, "clear": I64})  # fmt: skip
    p = k.p
    scale = k.load(I64, p["a"], field_at("scale"))
    scale = k.splat(scale.bits(F64) if s.wide else k.trunc(scale, I32).bits(F32), s.lanes)
    numbers, tables, wrong = (k.load(PTR, p["a"], field_at(n)) for n in ("numbers", "tables", "wrong"))
    hidden, wide = k.const(float("-inf"), s.vector), vec(I64, s.lanes)
    begin = k.i64(0) if program.score is not None else p["clear"]  # without a score nothing happens to visible keys
    with k.range(0, s.vectors) as v:
        at, lane = v * (s.lanes * s.number_bytes), v * (s.lanes * 8)
        lowering = Lowering(k, s, program, numbers, tables, narrow=program.narrow)
        env = {"b": p["batch"], "i": k.load(wide, p["lanes"], lane), "h": k.load(wide, p["lanes"], lane + s.panel * 8)}
        env = {name: lowering.integer(x) for name, x in env.items()}
        seen = k.load(wide, p["limits"], lane) - k.splat(p["start"], s.lanes)
        for root in (program.score, program.mask):
            if root is not None:
                lowering.before_keys(root, env)
        risky = _some(k, lowering, [condition for condition, _ in lowering.wrong.values()])  # in what no key changes
        top, total, least = (k.variable(x) for x in (hidden, k.const(0.0, s.vector), -hidden))
        with k.range(begin, p["n_keys"]) as j:
            place = k.at(p["scores"], j * s.row_bytes)
            now = env | {"j": lowering.integer(p["first"] + j), "s": k.load(s.vector, place, at)}
            values = dict(lowering.values)
            x, visible = now["s"], None
            if program.score is not None:
                now["s"] = x * scale
                x = lowering.vector(lowering.value(program.score, now, values))
            if program.mask is not None:
                visible = lowering.vector(lowering.value(program.mask, now, values)) | k.splat(j < p["clear"], s.lanes)
                x = k.select(visible, x, hidden)
            _note_wrong(k, s, program, lowering, wrong, k.splat(j, s.lanes) < seen, visible, risky)
            k.store(x, place, at)
            for variable, combine in ((top, k.max), (total, lambda a, b: a + b), (least, k.min)):
                variable.set(combine(x, variable.get()))
        if program.score is not None:
            for n, variable in enumerate((top, total, least)):
                k.store(variable.get(), k.at(p["check"], at), n * s.row_bytes)
    return k.finish()


def _some(k: Function, lowering: Lowering, conditions: list[Value]) -> Value | None:
    """Whether any lane of any condition holds; None without conditions."""
    every: Value | None = None
    for condition in conditions:
        vector = lowering.vector(condition)
        every = vector if every is None else every | vector
    return None if every is None else k.any(every)


def _note_wrong(
    k: Function, s: Shape, program: Program, lowering: Lowering, wrong: Value, seen: Value, visible: Value | None, risky: Value | None
) -> None:
    """Writes down indices that are out of range at a key that a lane sees."""
    seen = seen if visible is None else seen & visible
    lookups = [(n, node, d) for n, (node, d) in enumerate(program.slots()[2])]
    moving = [x for x in lookups if x[1].uses & {"j", "s"}]
    still = [x for x in lookups if not x[1].uses & {"j", "s"}]
    now = _some(k, lowering, [lowering.wrong[id(node), d][0] for _, node, d in moving])
    for some, which in ((now, moving), (risky, still)):
        if some is None:
            continue
        with k.when(some):
            for n, node, d in which:
                condition, index = lowering.wrong[id(node), d]
                bad = lowering.vector(condition) & seen
                with k.when(k.any(bad)):
                    lowest = k.const(-(1 << 63), vec(I64, s.lanes))
                    worst = k.select(bad, lowering.vector(index), lowest)
                    k.store(k.intrinsic(f"llvm.vector.reduce.smax.v{s.lanes}i64", I64, worst), wrong, 16 * n + 8)
                    k.store(k.i64(1), wrong, 16 * n)


class _Scalars:
    """bounds.py's arithmetic, written as scalar code."""

    def __init__(self, lowering: Lowering, box: dict[str, tuple[Value, Value]]) -> None:
        self.lowering, self.k, self.box = lowering, lowering.k, box

    def minimum(self, a: Value, b: Value | int) -> Value:
        return self.k.min(a, self._int(b))

    def maximum(self, a: Value, b: Value | int) -> Value:
        return self.k.max(a, self._int(b))

    def _int(self, x: Value | int) -> Value:
        return x if isinstance(x, Value) else self.k.i64(x)

    def where(self, condition: Value, yes: Value | int, no: Value | int) -> Value:
        return self.k.select(condition, self._int(yes), self._int(no))

    def invert(self, x: Value) -> Value:
        return x ^ 1

    def truth(self, x: bool) -> Value:
        return self.k.const(int(x), I1)

    def equal(self, a: Value, b: Value | int) -> Value:
        return a.equals(b)

    def floordiv(self, a: Value, b: Value) -> Value:
        return self.lowering._divided("floordiv", a, b)

    def number(self, node: Node) -> Value:
        return self.lowering._number(node)

    def table(self, node: Node, index: list[tuple[Value, Value]]) -> tuple[Value, Value]:
        """Least and greatest entry of a part of a row; of the whole table where that is long or not one row."""
        k, low = self.k, self.lowering
        at = k.at(low.tables_at, low.tables[id(node)] * TABLE_WORDS * 8)
        inside, ends = self.truth(True), index
        for d, (a, b) in enumerate(index):
            inside = inside & (a >= 0) & (b < k.load(I64, at, 8 * (1 + d)))
        row = inside & ((ends[-1][1] - ends[-1][0]) < _SCAN)
        offset = k.i64(0)
        for d, (a, b) in enumerate(ends):
            offset = offset + a * k.load(I64, at, 8 * (5 + d))
            row = row & a.equals(b) if d < len(ends) - 1 else row
        # an index that may be out of range must be looked at, key by key: then the entry may be anything
        whole = (k.select(inside, k.load(I64, at, 8 * n), k.i64(x)) for n, x in ((9, -_ANYTHING), (10, _ANYTHING)))
        least, most = (k.variable(x) for x in whole)
        with k.when(row):
            base, step = k.at(k.load(PTR, at), offset), k.load(I64, at, 8 * (4 + len(ends)))
            least.set(k.i64((1 << 63) - 1))
            most.set(k.i64(-(1 << 63)))
            count = ends[-1][1] - ends[-1][0] + 1
            whole = k.i64(0)
            if _STORED[node.value.array.dtype.name] is I64:  # eight at a time
                whole = k.select(step.equals(8), count & -8, k.i64(0))
                wide = vec(I64, 8)
                lows, highs = (k.variable(k.splat(x.get(), 8)) for x in (least, most))
                with k.range(0, whole, 8) as n:
                    x = k.load(wide, base, n * 8)
                    lows.set(k.min(x, lows.get()))
                    highs.set(k.max(x, highs.get()))
                least.set(k.intrinsic("llvm.vector.reduce.smin.v8i64", I64, lows.get()))
                most.set(k.intrinsic("llvm.vector.reduce.smax.v8i64", I64, highs.get()))
            with k.range(whole, count) as n:
                x = self._entry(node, base, n * step)
                least.set(k.min(x, least.get()))
                most.set(k.max(x, most.get()))
        found = least.get(), most.get()
        return (found[0] > 0, found[1] > 0) if node.kind == "bool" else found

    def _entry(self, node: Node, base: Value, offset: Value) -> Value:
        name = node.value.array.dtype.name
        stored = _STORED[name]
        x = self.k.load(stored, base, offset)
        signed = name.startswith("int")
        return x if stored is I64 else Value(self.k, (self.k.b.sext if signed else self.k.b.zext)(x.x, I64))


def visibility(module: Any, s: Shape, program: Program) -> Any:
    """0, 1 or 2: nothing, something, or everything in the box of heads, positions and keys is visible. Ends are inclusive."""
    names = ("batch", "h_low", "h_high", "i_low", "i_high", "j_low", "j_high")
    k = module.function("visibility", {"a": PTR} | dict.fromkeys(names, I64), I64)
    p = k.p
    assert program.mask is not None
    lowering = Lowering(k, s, program, *(k.load(PTR, p["a"], field_at(n)) for n in ("numbers", "tables")))
    box = {"b": (p["batch"], p["batch"]), "h": (p["h_low"], p["h_high"]), "i": (p["i_low"], p["i_high"]), "j": (p["j_low"], p["j_high"])}
    some, every = visible(program.mask, _Scalars(lowering, box))
    return k.finish(k.zext(some, I64) + k.zext(some & every, I64))


def extent(module: Any, visibility: Any) -> Any:
    """Of the mixed tile [j_low, j_low + count): first and past-the-last key that may be visible, and how far all are.

    Told by parts of PART keys, relative to j_low, packed as first | end << 8 | full << 16; first = end if all is hidden.
    """
    names = ("batch", "h_low", "h_high", "i_low", "i_high", "j_low", "count")
    k = module.function("extent", {"a": PTR} | dict.fromkeys(names, I64), I64)
    p = k.p

    def classed(low: Value, high: Value) -> Value:
        box = [p[n] for n in ("a", "batch", "h_low", "h_high", "i_low", "i_high")]
        return k.call(visibility, *box, p["j_low"] + low, p["j_low"] + high - 1)

    def after(at: Value, end: Value) -> Value:
        return k.min(at + PART, end)

    first, end = k.variable(k.i64(0)), k.variable(p["count"])
    with k.forever() as leave_if:
        leave_if(first.get() >= p["count"])
        leave_if(classed(first.get(), after(first.get(), p["count"])) > 0)
        first.set(after(first.get(), p["count"]))
    with k.forever() as leave_if:
        leave_if(end.get() <= first.get())
        start = (end.get() - 1) & -PART
        leave_if(classed(start, end.get()) > 0)
        end.set(start)
    full = k.variable(first.get())
    with k.forever() as leave_if:
        leave_if(full.get() >= end.get())
        leave_if(classed(full.get(), after(full.get(), end.get())) < 2)
        full.set(after(full.get(), end.get()))
    return k.finish(first.get() | end.get() << 8 | full.get() << 16)
