"""Public names of a package, imported when they are first asked for."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .forks import importing

_NONE: Mapping[str, str] = {}


def importer(
    scope: dict[str, Any], homes: Mapping[str, str], modules: Collection[str] = (), renamed: Mapping[str, str] = _NONE
) -> Callable[[str], Any]:
    """A package's __getattr__. `scope`: its globals, which keep what was found; `homes`: of each name, its module;
    `modules`: names that are modules themselves; `renamed`: of names of before, today's.
    """
    package = scope["__name__"]

    def find(name: str) -> Any:
        if name in renamed:
            today = renamed[name]
            warnings.warn(f"{package}.{name} is now {package}.{today}.", DeprecationWarning, stacklevel=2)
            return find(today)
        home = name if name in modules else homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with importing:
            module = importlib.import_module(home if home.startswith(".") else f".{home}", package)
        if name in modules:
            return module
        scope[name] = value = getattr(module, name)
        return value

    return find
