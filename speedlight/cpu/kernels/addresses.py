"""Addresses of the keys and values of a tile: side by side in an array, or page by page. A kernel reads addresses from
a list.

A page of a sequence is `page_size` tokens, at base + number · page_bytes. An item's numbers of pages are a list; from
entry `page_fixed` on it is a ring of `page_ring` entries. An array without pages is one page that never ends.
"""

from __future__ import annotations

from typing import Any

from ..language.prototypes import prototype
from ..language.vector import F32, I64, PTR, Function, Module, Value, Variable, vec
from ..memory.records import ENDLESS, field

_AT_ONCE = 8  # addresses of one store


def locate(module: Module, tokens: int) -> Any:
    """places[i] = address of token start + i · tokens, for all below `end`. Returns 1 if one step leads from each to
    the next.

    start and page_size are multiples of `tokens`, which lie side by side.
    """
    k = module.function(f"locate_{tokens}", prototype("a* places* pages* base* page_bytes row start end"), I64)
    p = k.p
    size, fixed, ring = (k.load(I64, p["a"], field(f"page_{n}")) for n in ("size", "fixed", "ring"))
    base = Value(k, k.b.ptrtoint(p["base"].x, I64))
    steps = k.iota(_AT_ONCE) * k.splat(p["row"] * tokens, _AT_ONCE)
    regular = k.variable(k.i64(1))
    with k.either(size.equals(tokens) & fixed.equals(ENDLESS)) as (each, runs):
        with each, k.when(p["start"] < p["end"]):
            _locate_pages(k, tokens, base, steps, regular)
        with runs:
            at, expected = k.variable(p["start"]), k.variable(k.i64(0))
            with k.forever() as leave_if:
                leave_if(at.get() >= p["end"])
                _locate_run(k, tokens, base, steps, (size, fixed, ring), (at, regular, expected))
    return k.finish(regular.get())


def stage_scales(module: Module, locate: Any, unit: float) -> Any:
    """to[i] = scale of token start + i, for all below `end`, times `unit`: of codes in arrays, page by page as keys.

    places: room for addresses.
    """
    k = module.function("stage_scales", prototype("a* places* to* pages* base* page_bytes row start end"))
    p = k.p
    k.call(locate, *[p[name] for name in ("a", "places", "pages", "base", "page_bytes", "row", "start", "end")])
    with k.range(0, p["end"] - p["start"]) as i:
        scale = k.load(F32, k.load(PTR, p["places"], i * 8))
        k.store(scale if unit == 1 else scale * unit, p["to"], i * 4)
    return k.finish()


def _locate_pages(k: Function, tokens: int, base: Value, steps: Value, regular: Variable) -> None:
    """Finds a page, and a number, for each entry; up to _AT_ONCE - 1 numbers past the last are read."""
    p, step = k.p, k.p["row"] * tokens
    count = (p["end"] - p["start"] + (tokens - 1)) // tokens
    numbers = k.at(p["pages"], p["start"] // tokens * 8)
    first = base + k.load(I64, numbers) * p["page_bytes"]
    with k.range(0, count, _AT_ONCE) as i:
        number = k.load(vec(I64, _AT_ONCE), numbers, i * 8)
        address = k.splat(base, _AT_ONCE) + number * k.splat(p["page_bytes"], _AT_ONCE)
        k.store(address, p["places"], i * 8)
        follows = address.equals(k.splat(first + i * step, _AT_ONCE) + steps)
        past = k.iota(_AT_ONCE) >= k.splat(count - i, _AT_ONCE)
        regular.set(k.select(k.all(follows | past), regular.get(), k.i64(0)))


def _locate_run(
    k: Function, tokens: int, base: Value, steps: Value, ring_of: tuple[Value, ...], state: tuple[Variable, ...]
) -> None:
    """Finds the rest of a page from token `at` on. `expected`: the address at which it would go on where the last
    ended.
    """
    p, step = k.p, k.p["row"] * tokens
    (size, fixed, ring), (at, regular, expected) = ring_of, state
    here = at.get()
    page = here // size
    inside = here - page * size
    slot = k.variable(page)
    with k.when(page >= fixed):
        slot.set(fixed + (page - fixed) % ring)
    address = base + k.load(I64, p["pages"], slot.get() * 8) * p["page_bytes"] + inside * p["row"]
    run = k.min(p["end"] - here, size - inside)
    follows = here.equals(p["start"]) | address.equals(expected.get())
    regular.set(k.select(follows, regular.get(), k.i64(0)))
    expected.set(address + run * p["row"])
    first = (here - p["start"]) // tokens
    with k.range(0, (run + (tokens - 1)) // tokens, _AT_ONCE) as i:
        k.store(k.splat(address + i * step, _AT_ONCE) + steps, p["places"], (first + i) * 8)
    at.set(here + run)
