"""Vector code of an expression's tree: a lane is a query and keys come one after another, or a lane is a key.

What does not depend on the key is computed before the loop over keys; what is the same for all lanes is scalar.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from ...expressions.bounds import linear
from ...expressions.operations import INT_MAX, INT_MIN, OPERATIONS
from ...expressions.program import TABLE_WORDS, Program
from ...expressions.tree import FLOW, OF_KEYS, Node, order
from ..language.functions import FUNCTIONS, IN_STEP, like
from ..language.lookups import Stream, added, as_number, clamped, direction, entries, splat_like, stride_of
from ..language.prototypes import prototype
from ..language.vector import F32, F64, I1, I32, I64, PTR, Function, Value, Variable, vec
from ..memory.records import WRONG
from ..memory.records import field as field_at
from ..memory.shape import Shape
from .slots import number_of

# what Python's operators on values emit
_INFIX = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor,
}  # fmt: skip


IN_STEP_KEYS = 8  # whose functions' chains go in step: as many as two pipes of multiply-adds of 4 cycles take


class Turn(NamedTuple):
    """One of the keys that are computed at once."""

    key: Value
    env: dict[str, Value]
    values: dict[int, Value]
    wrong: dict[tuple[int, int], tuple[Value, Value]]


class Lowering:
    """One function's values of a program's nodes."""

    def __init__(
        self, k: Function, s: Shape, program: Program, numbers: Value, tables: Value, *, narrow: bool = False
    ) -> None:
        self.k, self.s, self.numbers_at, self.tables_at = k, s, numbers, tables
        self.program = program
        self.int = I32 if narrow else I64
        self.double: ir.Type = F64
        self.values: dict[int, Value] = {}
        self.wrong: dict[tuple[int, int], tuple[Value, Value]] = {}  # (node, dimension): out of range, index
        self.growing: dict[int, tuple[Variable, int]] = {}  # of a node: at the next key, and from key to key

    def type_of(self, kind: str) -> ir.Type:
        return {"bool": I1, "int": self.int, "float": self.s.number, "double": self.double}[kind]

    def symbols_of(self, lane: Value, **more: Value) -> dict[str, Value]:
        """Returns symbols of a vector of queries whose positions, and then heads, lie from a lane on."""
        k, wide = self.k, vec(I64, self.s.lanes)
        env = {"b": k.p["batch"], "i": k.load(wide, k.p["lanes"], lane)}
        env |= {"h": k.load(wide, k.p["lanes"], lane + self.s.panel * 8)} | more
        return {name: self.integer(x) for name, x in env.items()}

    def before_keys(self, root: Node, env: dict[str, Value]) -> None:
        """Emits what no key changes."""
        for node in order(root):
            if not node.uses & OF_KEYS and id(node) not in self.values:
                self.values[id(node)] = self.emit(node, env, self.values)

    def value(self, root: Node, env: dict[str, Value], values: dict[int, Value]) -> Value:
        """Emits the rest; `values` starts as a copy of self.values for each key."""
        for node in order(root):
            if id(node) not in values:
                values[id(node)] = self.emit(node, env, values)
        return values[id(root)]

    def begin_keys(self, root: Node, env: dict[str, Value]) -> None:
        """Begins numbers that grow by a constant from key to key; `env`: of the first key.

        Integers are added to. So are numbers where all sums are exact: float64 if they fit 32 bits, float32 in
        single().
        """
        for node in order(root):
            if node.op != "cast" or not node.is_float or node.uses & {"s", FLOW} or id(node) in self.values:
                continue
            whole = node.args[0]
            form = linear(whole) if whole.kind == "int" else None
            if form is None or not form[1]:
                continue
            x = self.value(whole, env, dict(self.values))
            if not isinstance(x.type, ir.VectorType):
                continue
            t = self.type_of(node.kind)
            exact = (self.int is I32 and t is F64) or (node.kind == "double" and t is F32)
            start = self.k.to_float(x, like(x, t)) if exact else x
            self.growing[id(node if exact else whole)] = self.k.variable(start), form[1]

    def single(self, program: Program, env: dict[str, Value], keys: Value) -> tuple[Lowering, Value] | None:
        """Returns a lowering that computes sums of float64 in float32, and whether that has the same bits at so many
        keys; None of a program without such sums. `env`: of the first key.

        A sum of two numbers of float32 is rounded alike, at once or by way of float64, which has more than twice the
        bits. Such are floats, and distances below 2^24 times a power of 2: ALiBi's slopes, where NumPy made them.
        """
        terms = _terms_of_sum(program)
        if terms is None or self.s.wide:
            return None
        k, single = self.k, Lowering(self.k, self.s, program, self.numbers_at, self.tables_at)
        single.int, single.double, single.wrong = self.int, F32, self.wrong
        doubles = {id(node) for node in program.nodes if node.kind == "double"}
        single.values = {
            key: k.narrow(x, like(x, F32)) if key in doubles else x for key, x in self.values.items()
        }  # of what no key changes
        same = k.const(1, I1)
        for factor, distance, step in terms:
            bits = self.vector(self.values[id(factor)]).bits(vec(I64, self.s.lanes))
            size = (bits << 1) >> 1
            power = (size & ((1 << 52) - 1)).equals(0) & (size >= (1023 - 60) << 52) & (size <= (1023 + 60) << 52)
            same = same & k.all(power | size.equals(0))
            first = self.vector(self.value(distance, env, dict(self.values)))
            last = first + k.splat(self.integer(keys), self.s.lanes) * step
            for x in (first, last):
                same = same & k.all((x <= 1 << 24) & (x >= -(1 << 24)))
        return single, same

    def next_keys(self, keys: int) -> list[dict[int, Value]]:
        """Returns what grows, at so many keys, and goes on past them."""
        found: list[dict[int, Value]] = [{} for _ in range(keys)]
        for node, (variable, step) in self.growing.items():
            x = variable.get()
            for n, values in enumerate(found):
                values[node] = x + n * step if n else x
            variable.set(x + keys * step)
        return found

    def values_of(self, root: Node, turns: list[Turn]) -> list[Value]:
        """As value(), of several keys: the chains of their functions go in step, and overlap."""
        for node in order(root):
            if id(node) in turns[0].values:
                continue
            if node.op in IN_STEP and len(turns) > 1:
                xs = [turn.values[id(node.args[0])] for turn in turns]
                if isinstance(xs[0].type, ir.VectorType):
                    for turn, y in zip(turns, self.k.in_step(FUNCTIONS[node.op], xs), strict=True):
                        turn.values[id(node)] = y
                    continue
            for turn in turns:
                self.wrong = turn.wrong
                turn.values[id(node)] = self.emit(node, turn.env, turn.values)
        return [turn.values[id(root)] for turn in turns]

    def vector(self, x: Value) -> Value:
        return x if isinstance(x.type, ir.VectorType) else self.k.splat(x, self.s.lanes)

    def integer(self, x: Value) -> Value:
        """Returns an I64 as the integers of this lowering."""
        return x if self.int is I64 else self.k.trunc(x, like(x, I32))

    def wide(self, x: Value) -> Value:
        """Returns an integer of this lowering as an I64."""
        return x if self.int is I64 else Value(self.k, self.k.b.sext(x.x, like(x, I64)))

    def _broadcast(self, args: list[Value]) -> list[Value]:
        return [self.vector(x) for x in args] if any([isinstance(x.type, ir.VectorType) for x in args]) else args

    def emit(self, node: Node, env: dict[str, Value], values: dict[int, Value]) -> Value:
        k, op = self.k, node.op
        if op == "symbol":
            return env[node.value]
        if op == "number":
            return self._number(node)
        args = [values[id(a)] for a in node.args]
        if op == "table":
            return self._look_up(node, args)
        args = self._broadcast(args)
        if op in FUNCTIONS:
            return FUNCTIONS[op](k, args[0])
        if op in _INFIX:
            return _INFIX[op](*args)
        match op:
            case "lt" | "le" | "gt" | "ge" | "eq":
                a, b = args if node.args[0].kind != "bool" else reversed(args)  # LLVM's signed True is -1
                return a._compare(str(OPERATIONS[op].symbol), b)
            case "ne":
                return args[0].differs(args[1])
            case "floordiv" | "mod":
                return self._divided(op, *args)
            case "shl":
                inside = self._may_shift(args[1])
                return k.select(inside, Value(k, k.b.shl(args[0].x, (args[1] & 63).x)), k.const(0, args[0].type))
            case "shr":
                by = k.select(self._may_shift(args[1]), args[1], k.const(63, args[1].type))
                return Value(k, k.b.ashr(args[0].x, by.x))
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
        word = self.k.load(I64, self.numbers_at, 8 * self.program.numbers[id(node)])
        if node.kind == "int":
            return self.integer(word)
        if node.kind == "bool":
            return word.differs(0)
        number = word.bits(F64)
        return number if self.type_of(node.kind) is F64 else self.k.narrow(number, F32)

    def _may_shift(self, by: Value) -> Value:
        """Returns whether a shift is defined: LLVM leaves others undefined.

        Integers that are shifted have 64 bits: their intervals are unknown.
        """
        assert self.int is I64
        return (by >= 0) & (by < 64)

    def _divided(self, op: str, a: Value, b: Value) -> Value:
        k = self.k
        if a.is_float:
            whole = k.unary("floor", a / b)
            return whole if op == "floordiv" else k.fma(-whole, b, a)
        none = b.equals(0)
        if (
            isinstance(a.type, ir.VectorType) and self.int is I32
        ):  # no vector unit divides integers; float64 is exact here
            by = k.select(none, k.const(1, b.type), b)
            wide = vec(F64, a.type.count)
            floor = k.unary("floor", k.to_float(a, wide) / k.to_float(by, wide))
            floor = k.min(floor, k.const(2.0**31 - 1, wide))  # in a lane that nobody looks at
            quotient = Value(k, k.b.fptosi(floor.x, a.type))
            return k.select(none, k.const(0, a.type), quotient if op == "floordiv" else a - quotient * by)
        minus = b.equals(-1)  # INT_MIN // -1 stops the process
        by = k.select(none | minus, k.const(1, b.type), b)
        quotient = k.select(minus, -a, Value(k, k.b.sdiv(a.x, by.x)))
        rest = a - quotient * b
        over = rest.differs(0) & ((rest ^ b) < 0)
        result = k.select(over, quotient - 1, quotient) if op == "floordiv" else k.select(over, rest + b, rest)
        return k.select(none, k.const(0, a.type), result)

    def _cast(self, x: Value, kind: str, to: ir.Type) -> Value:
        k, t = self.k, like(x, to)
        if kind == "bool":
            one = k.zext(x, like(x, self.int))
            return one if to is self.int else k.to_float(one, t)
        if kind == "int":
            return k.to_float(x, t)
        if to is self.int:
            assert self.int is I64
            inside = (x >= -(2.0**63)) & (x < 2.0**63)
            ends = k.select(x > 0.0, k.const(INT_MAX, t), k.select(x < 0.0, k.const(INT_MIN, t), k.const(0, t)))
            return k.select(inside, Value(k, k.b.fptosi(k.select(inside, x, k.const(0.0, x.type)).x, t)), ends)
        if x.type == t:
            return x
        return k.extend(x, t) if to is F64 else k.narrow(x, t)

    def table_at(self, node: Node) -> Value:
        return self.k.at(self.tables_at, self.program.tables[node.value] * TABLE_WORDS * 8)

    def _look_up(self, node: Node, index: list[Value]) -> Value:
        """Returns the entry at the index, clamped to the table; where it was out of bounds is remembered."""
        k, at = self.k, self.table_at(node)
        offset: Value | None = None
        for d, x in enumerate(map(self.wide, index)):
            inside, bad = clamped(k, at, d, x)
            self.wrong[id(node), d] = bad, x
            offset = added(k, offset, inside * splat_like(k, stride_of(k, at, d), x))
        assert offset is not None
        return as_number(k, node, entries(k, node, k.load(PTR, at), offset), self.type_of(node.kind))

    def streams(self, program: Program, roots: list[Node], env: dict[str, Value], ahead: Value) -> list[Stream]:
        """Begins the lookups that are read many keys at once. `ahead` as from prefetch_addresses(), at these lanes."""
        addresses = {
            id(x): k_at
            for n, x in enumerate(per_query_streams(program))
            for k_at in [self.k.at(ahead, n * self.s.panel * 8)]
        }
        lookups = {id(n): n for root in roots for n in order(root) if n.op == "table" and direction(n)}
        out = []
        for node in lookups.values():
            number = self.s.integer if node.kind == "bool" else self.type_of(node.kind)
            if number not in (self.s.number, self.s.integer):
                continue  # of another width than the lanes
            stream = Stream(self.k, node, self.table_at(node), self.s.lanes, number, addresses.get(id(node)))
            leading = [self.wide(self.value(a, env, self.values)) for a in node.args[:-1]]
            self.wrong |= {(id(node), d): x for d, x in stream.begin(leading).items()}
            out.append(stream)
        return out

    def each_key(
        self,
        streams: list[Stream],
        env: dict[str, Value],
        position: Value,
        ends: tuple[Value, Value],
        key: Callable[[Value, Value], None],
        after: Callable[[Value, Value], None] | None = None,
    ) -> None:
        """Calls key(j, m) for keys from one end up to the other, the m-th of those for which streams were filled.

        `position`: of key 0. `after`: called with the ends of every group of keys, as many as lanes, but for the last.
        """
        self.keys_at_once(streams, env, position, ends, lambda js, ms: key(js[0], ms[0]), 1, after)

    def keys_at_once(
        self,
        streams: list[Stream],
        env: dict[str, Value],
        position: Value,
        ends: tuple[Value, Value],
        keys: Callable[[list[Value], list[Value]], None],
        count: int,
        after: Callable[[Value, Value], None] | None = None,
    ) -> None:
        """As each_key(), but calls keys() with so many of them, and at the end with one after another."""
        k, lanes, (begin, end) = self.k, self.s.lanes, ends
        count = min(count, lanes) if streams or after is not None else count

        def take(first: Value, last: Value, filled: Value) -> None:
            def turn(j: Value, count: int = count) -> None:
                js = [j + i for i in range(count)]
                keys(js, [x - filled for x in js])

            def one(j: Value) -> None:
                turn(j, 1)

            if count > 1:
                k.unrolled(first, last, one, count, turn)
            elif streams or after is not None:
                k.unrolled(first, last, one)
            else:
                with k.range(first, last) as j:
                    one(j)

        if not streams and after is None:
            take(begin, end, k.i64(0))
            return
        with k.range(begin, end, lanes) as group:
            here = env | {"j": self.integer(position + group)}
            last = k.min(group + lanes, end)
            for stream in streams:
                index = self.wide(self.value(stream.node.args[-1], here, dict(self.values)))
                stream.fill(index, group, last - group)
            take(group, last, group)
            if after is not None:
                after(group, last)


def _terms_of_sum(program: Program) -> list[tuple[Node, Node, int]] | None:
    """Returns what is multiplied in a score that is a sum of two terms in float64, rounded at the end; None of others.

    A term is a float; or a factor that no key changes times an integer that grows by a step from key to key.
    """
    root = program.score
    if root is None or root.op != "cast" or root.args[0].kind != "double" or root.args[0].op not in ("add", "sub"):
        return None
    known, products = {id(root.args[0])}, []
    for term in root.args[0].args:
        if term.op == "cast" and term.args[0].kind == "float":
            known.add(id(term))
        elif term.op == "mul":
            factor, moved = sorted(term.args, key=lambda x: bool(x.uses & OF_KEYS))
            form = linear(moved.args[0]) if moved.op == "cast" and moved.args[0].kind == "int" else None
            if factor.uses & OF_KEYS or "s" in moved.uses or form is None or not form[1]:
                return None
            known |= {id(term), id(moved)}
            products.append((factor, moved.args[0], form[1]))
        else:
            return None
    others = [x for x in program.nodes if x.kind == "double" and x.uses & OF_KEYS and id(x) not in known]
    return None if others or not products else products


def keys_of_turn(program: Program) -> int:
    """Returns how many keys' scores are computed at once: so many that chains of steps overlap, and few where none is
    long.
    """
    if program.score is None:
        return 1
    nodes = [node for node in order(program.score) if node.uses & OF_KEYS]
    if any([node.op in IN_STEP for node in nodes]):
        return IN_STEP_KEYS
    return 2


def per_query_streams(program: Program) -> list[Node]:
    """Returns the streams of which every query has a row of its own, read forwards."""
    nodes = {id(n): n for n in program.nodes if n.op == "table" and direction(n) == 1}
    return [n for n in nodes.values() if any(["i" in a.uses for a in n.args[:-1]])]


def scale_of(k: Function, s: Shape) -> Value:
    """Returns the scale of scores, in every lane."""
    word = k.load(I64, k.p["a"], field_at("scale"))
    return k.splat(word.bits(F64) if s.wide else k.trunc(word, I32).bits(F32), s.lanes)


def of_queries(k: Function, s: Shape, program: Program, v: Value) -> tuple[Lowering, dict[str, Value], Value]:
    """Returns the lowering of one vector of queries, its symbols, and where its lanes are."""
    lane = v * (s.lanes * 8)
    numbers, tables = (k.load(PTR, k.p["a"], field_at(n)) for n in ("numbers", "tables"))
    lowering = Lowering(k, s, program, numbers, tables, narrow=program.narrow)
    return lowering, lowering.symbols_of(lane), lane


def prefetch_addresses(module: Any, s: Shape, program: Program) -> Any:
    """ahead[square, lane] = where the lane's entries of the keys from `first` on lie; in range or not, it is only a
    hint.
    """
    k = module.function("prefetch_addresses", prototype("a* ahead* lanes* first batch"), special=True)
    p = k.p
    numbers, tables = (k.load(PTR, p["a"], field_at(n)) for n in ("numbers", "tables"))
    with k.range(0, s.vectors) as v:
        lane = v * (s.lanes * 8)
        lowering = Lowering(k, s, program, numbers, tables, narrow=program.narrow)
        env = lowering.symbols_of(lane, j=p["first"])
        for n, node in enumerate(per_query_streams(program)):
            stream = Stream(k, node, lowering.table_at(node), s.lanes, s.number)
            *leading, last = (lowering.wide(lowering.value(x, env, lowering.values)) for x in node.args)
            stream.begin(leading)
            k.store(stream.address(last), k.at(p["ahead"], lane), n * s.panel * 8)
    return k.finish()


def expression_tile(module: Any, s: Shape, program: Program) -> Any:
    """scores[n_keys, panel] = score(scale · S), and -inf (which means hidden) where the mask says so, but of the keys
    [clear, full).

    `lanes` holds the position and then the head of every lane; `limits` as in softmax_tile. With a score, `check` is as
    from score_tile, of the keys that the mask shows. An index out of range at a visible key is noted in `wrong`, of the
    worker whose `scratch` this is.
    """
    words = (
        "a* scratch* scores* check* lanes* limits* first start n_keys batch clear full ahead*" + " slots*" * s.chosen
    )
    notes = module.once("note_first", lambda module: note_first(module, s))
    k = module.function("expression_tile", prototype(words), special=True)
    p = k.p
    scale = scale_of(k, s)
    numbers, tables = (k.load(PTR, p["a"], field_at(n)) for n in ("numbers", "tables"))
    hidden, zero, wide = k.const(float("-inf"), s.vector), k.const(0.0, s.vector), vec(I64, s.lanes)
    count = keys_of_turn(program)
    in_step = count == IN_STEP_KEYS
    # without a score nothing happens to visible keys
    begin = k.i64(0) if program.score is not None else k.select(p["clear"] > 0, k.i64(0), p["full"])
    with k.range(0, s.vectors) as v:
        at, lane = v * (s.lanes * s.number_bytes), v * (s.lanes * 8)
        lowering = Lowering(k, s, program, numbers, tables, narrow=program.narrow)
        env = lowering.symbols_of(lane)
        seen = k.load(wide, p["limits"], lane) - k.splat(p["start"], s.lanes)
        for root in (program.score, program.mask):
            if root is not None:
                lowering.before_keys(root, env)
        roots = [] if s.chosen else [x for x in (program.score, program.mask) if x is not None]
        streams = lowering.streams(program, roots, env, k.at(p["ahead"], lane))
        risky = _any(lowering, [condition for condition, _ in lowering.wrong.values()])  # in what no key changes
        top, total, least = (k.variable(x) for x in (hidden, k.const(0.0, s.vector), -hidden))

        def key_at(j: Value) -> Value:
            return p["first"] + (number_of(k.load(I64, p["slots"], j * 8)) if s.chosen else j)

        def keys(lowering: Lowering, js: list[Value], ms: list[Value]) -> None:
            """Keys, which are those of `ms` among the ones whose streams are filled."""
            rows = [k.at(p["scores"], j * s.row_bytes) for j in js]
            turns = []
            for j, m, row, values in zip(js, ms, rows, lowering.next_keys(len(js)), strict=True):
                now = env | {"j": lowering.integer(key_at(j)), "s": k.load(s.vector, row, at)}
                values = lowering.values | values | {id(x.node): x.value(m) for x in streams}
                turns.append(Turn(j, now, values, dict(lowering.wrong)))
            xs: list[Value] = [turn.env["s"] for turn in turns]
            visible: list[Value | None] = [None] * len(js)
            if program.score is not None:
                for turn, x in zip(turns, xs, strict=True):
                    turn.env["s"] = x * scale
                xs = [lowering.vector(x) for x in lowering.values_of(program.score, turns)]
            if program.mask is not None:
                shown = [lowering.vector(x) for x in lowering.values_of(program.mask, turns)]
                whole = [k.splat((j >= p["clear"]) & (j < p["full"]), s.lanes) for j in js]
                visible = [x | y for x, y in zip(shown, whole, strict=True)]
                xs = [k.select(y, x, hidden) for x, y in zip(xs, visible, strict=True)]

            def note() -> None:
                for turn, y, m in zip(turns, visible, ms, strict=True):

                    def position(j: Value = turn.key) -> list[Value]:
                        heads, rows = (k.load(wide, k.at(p["lanes"], lane), n * s.panel * 8) for n in (1, 0))
                        return [heads, rows, k.splat(key_at(j), s.lanes)]

                    def looked_at(j: Value = turn.key, y: Value | None = y) -> Value:
                        inside = k.splat(j, s.lanes) < seen
                        return inside if y is None else inside & y

                    lowering.wrong = turn.wrong
                    _note_wrong(lowering, notes, position, looked_at, risky, streams, m)

            if not in_step:
                note()
            for x, y, row in zip(xs, visible, rows, strict=True):
                k.store(x, row, at)
                if program.score is not None:
                    top.set(k.max(x, top.get()))
                    shown = [x, x] if y is None else [k.select(y, x, z) for z in (zero, -hidden)]
                    total.set(shown[0] + total.get())
                    least.set(k.min(shown[1], least.get()))
            if in_step:  # LLVM would move steps behind the branches of the notes
                note()

        first = env | {"j": lowering.integer(p["first"] + begin)}

        def take(lowering: Lowering) -> None:
            for root in () if s.chosen else (program.score, program.mask):
                if root is not None:
                    lowering.begin_keys(root, first)
            lowering.keys_at_once(
                streams, env, p["first"], (begin, p["n_keys"]), functools.partial(keys, lowering), count
            )

        single = None if s.chosen else lowering.single(program, first, p["n_keys"] - begin)
        if single is None:
            take(lowering)
        else:
            with k.either(single[1]) as (same, differs):
                with same:
                    take(single[0])
                with differs:
                    take(lowering)
        if program.score is not None:
            for n, variable in enumerate((top, total, least)):
                k.store(variable.get(), k.at(p["check"], at), n * s.row_bytes)
    return k.finish()


def expression_row(module: Any, s: Shape, program: Program) -> Any:
    """scores[key] = score(scale · S), and -inf (which means hidden) where the mask says so, of one row. A lane is a
    key.

    `first` is the position of the first key; the mask hides nothing below `clear`. The row sees keys below `limit`.
    """
    words = "a* scratch* scores* first count limit clear batch head position" + " slots*" * s.chosen
    notes = module.once("note_first", lambda module: note_first(module, s))
    k = module.function("expression_row", prototype(words), special=True)
    p, n = k.p, s.lanes
    numbers, tables = (k.load(PTR, p["a"], field_at(x)) for x in ("numbers", "tables"))
    scale = scale_of(k, s)
    lowering = Lowering(k, s, program, numbers, tables, narrow=program.narrow)
    env = {"b": lowering.integer(p["batch"]), "i": lowering.integer(p["position"]), "h": lowering.integer(p["head"])}
    for root in (program.score, program.mask):
        if root is not None:
            lowering.before_keys(root, env)
    risky = _any(lowering, [condition for condition, _ in lowering.wrong.values()])
    with k.range(k.i64(0) if program.score is not None else p["clear"] & -n, p["count"], n) as j:
        lanes = k.splat(j, n) + k.iota(n)
        x = k.load(s.vector, p["scores"], j * s.number_bytes)
        keys = k.splat(p["first"], n) + (number_of(k.load(lanes.type, p["slots"], j * 8)) if s.chosen else lanes)
        now = env | {"j": lowering.integer(keys)}
        values, seen = dict(lowering.values), lanes < k.splat(p["limit"], n)
        if program.score is not None:
            now["s"] = x * scale
            x = lowering.vector(lowering.value(program.score, now, values))
        if program.mask is not None:
            visible = lowering.vector(lowering.value(program.mask, now, values)) | (lanes < k.splat(p["clear"], n))
            x, seen = k.select(visible, x, k.const(float("-inf"), s.vector)), seen & visible

        def position() -> list[Value]:
            return [k.splat(p["head"], n), k.splat(p["position"], n), keys]

        _note_wrong(lowering, notes, position, lambda: seen, risky, [], j)
        k.store(x, p["scores"], j * s.number_bytes)
    return k.finish()


def _any(lowering: Lowering, conditions: list[Value]) -> Value | None:
    """Returns whether any lane of any condition holds; None without conditions."""
    every: Value | None = None
    for condition in conditions:
        vector = lowering.vector(condition)
        every = vector if every is None else every | vector
    return None if every is None else lowering.k.any(every)


def _note_wrong(
    lowering: Lowering,
    notes: Any,
    position: Callable[[], list[Value]],
    seen: Callable[[], Value],
    invariant: Value | None,
    streams: list[Stream],
    m: Value,
) -> None:
    """Writes down indices that are out of range at a key that a lane sees; m: the key's index in its streams.

    `notes`: note_first(). `position`: the head, query position and key position of every lane.
    `invariant`: whether any index that is the same for every key is out of range.
    """
    k, program = lowering.k, lowering.program
    moving, fixed = [], []
    streamed = {id(x.node): x for x in streams}
    for n, (node, d) in enumerate(program.lookups):
        stream = streamed.get(id(node))
        if stream is not None and d == stream.last:
            with k.when(stream.risky.get()):
                index = stream.index(m)
                _, bad = clamped(k, stream.at, d, index)
                _note(lowering, notes, n, bad, index, position, seen())
        elif stream is not None or not node.uses & OF_KEYS:
            fixed.append((n, *lowering.wrong[id(node), d]))
        else:
            moving.append((n, *lowering.wrong[id(node), d]))
    for any_bad, lookups in ((_any(lowering, [bad for _, bad, _ in moving]), moving), (invariant, fixed)):
        if any_bad is not None and lookups:
            with k.when(any_bad, likely=False):
                for n, bad, index in lookups:
                    _note(lowering, notes, n, bad, index, position, seen())


def _note(
    lowering: Lowering, notes: Any, n: int, bad: Value, index: Value, position: Callable[[], list[Value]], seen: Value
) -> None:
    """Calls note_first() for lookup `n`, where `bad` holds in a lane that sees the key."""
    k, s = lowering.k, lowering.s
    bad = lowering.vector(bad) & seen
    with k.when(k.any(bad), likely=False):  # its call takes no registers from the loop
        lanes = k.zext(bad, vec(I64, s.lanes))
        k.call(notes, k.p["a"], k.p["scratch"], k.p["batch"], *position(), k.i64(n), lowering.vector(index), lanes)


def note_first(module: Any, s: Shape) -> Any:
    """Notes the first of the lanes that are bad, in the order of positions, unless the worker met an earlier one."""
    wide = vec(I64, s.lanes)
    types = prototype("a* scratch* b h i j lookup index bad", h=wide, i=wide, j=wide, index=wide, bad=wide)
    k = module.function("note_first", types, special=True)
    p, lanes = k.p, s.lanes
    bad = p["bad"].differs(0)
    place = []
    for name in "hij":
        least = reduced(k, "smin", k.select(bad, p[name], k.const(INT_MAX, wide)), lanes)
        bad = bad & p[name].equals(k.splat(least, lanes))
        place.append(least)
    index = reduced(k, "smax", k.select(bad, p["index"], k.const(INT_MIN, wide)), lanes)
    base, stride = (k.load(I64, p["a"], field_at(x)) for x in ("scratch", "scratch_stride"))
    worker = (Value(k, k.b.ptrtoint(p["scratch"].x, I64)) - base) // stride
    note = k.at(k.load(PTR, p["a"], field_at("wrong")), worker * WRONG.bytes)
    found = {"b": p["b"], **dict(zip("hij", place, strict=True)), "lookup": p["lookup"]}
    earlier = k.const(0, I1)
    for name, x in reversed(found.items()):
        known = k.load(I64, note, WRONG.offset(name))
        earlier = (x < known) | (x.equals(known) & earlier)
    with k.when(earlier | k.load(I64, note, WRONG.offset("noted")).equals(0)):
        for name, x in {"noted": k.i64(1), "index": index, **found}.items():
            k.store(x, note, WRONG.offset(name))
    return k.finish()


def reduced(k: Function, name: str, x: Value, lanes: int) -> Value:
    """Returns the least ("smin") or greatest ("smax") of a vector's 64-bit integers."""
    return k.intrinsic(f"llvm.vector.reduce.{name}.v{lanes}i64", I64, x)
