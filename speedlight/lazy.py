"""Public names of a package, imported when they are first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def importer(scope: dict[str, Any], homes: Mapping[str, str], modules: Collection[str] = ()) -> Callable[[str], Any]:
    """A package's __getattr__. `scope`: its globals, which keep what was found; `homes`: of each name, its module;
    `modules`: names that are modules themselves.
    """
    package = scope["__name__"]

    def find(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f".{name}", package)
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        scope[name] = value = getattr(importlib.import_module(f".{home}", package), name)
        return value

    return find
