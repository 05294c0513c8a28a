"""Public names of a package, imported when they are first asked for, and hints of names that are elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .forks import importing


def importer(scope: dict[str, Any], names: Mapping[str, str], modules: Collection[str] = ()) -> Callable[[str], Any]:
    """Makes a package's __getattr__. `scope`: its globals, which keep what was found; `names`: of each module, its
    public names; `modules`: names that are modules themselves.
    """
    homes = {name: home for home, several in names.items() for name in several.split()}
    package = scope["__name__"]

    def find(name: str) -> Any:
        home = name if name in modules else homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_way_out(package, name)}")
        with importing:
            try:
                module = importlib.import_module(home if home.startswith(".") else f".{home}", package)
            except ModuleNotFoundError as error:
                from ..errors import not_installed

                raise not_installed(package, error) from error.__cause__
        if name in modules:
            return module
        scope[name] = value = getattr(module, name)
        return value

    return find


def lacking(owner: str) -> Callable[[Any, str], Any]:
    """Makes the __getattr__ of a class."""

    def find(self: Any, name: str) -> Any:
        raise AttributeError(f"{owner!r} object has no attribute {name!r}{_way_out(owner, name)}")

    return find


def _way_out(owner: str, name: str) -> str:
    """Returns what stands for a name that a package, or a class, lacks; the table is imported where one is missing."""
    if name.startswith("_"):
        return ""
    with importing:
        from ..errors.other_names import ELSEWHERE

    way = ELSEWHERE.get(owner, {}).get(name, "").format(name=name)
    return f": {way}" if way else ""
