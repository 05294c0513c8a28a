"""Parameters of functions, written as one line."""

from __future__ import annotations

from llvmlite import ir

from .vector import I64, PTR


def prototype(text: str, **types: ir.Type) -> dict[str, ir.Type]:
    """Returns parameters by name, in order: `name*` is an address, any other a 64-bit integer but for those of `types`;
    what `text` does not name comes last.
    """
    found = {name.rstrip("*"): PTR if name.endswith("*") else types.get(name, I64) for name in text.split()}
    return found | types
