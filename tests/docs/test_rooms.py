"""Imports between the rooms of the package run one way; docs/architecture.md lists the rooms in order."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import re
from pathlib import Path

import pytest

import speedlight as sl

PACKAGE = Path(sl.__file__).parent
TREE = (PACKAGE.parent / "docs" / "architecture.md").read_text().partition("```text")[2].partition("```")[0]
ROOMS = [
    name.removesuffix("/").removesuffix(".py").replace("/", ".").replace("__init__", "")
    for name in re.findall(r"^(\S+)", TREE, re.MULTILINE)
]
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
    for path in PACKAGE.rglob("*.py")
}
TOP = ("__main__", "cpu")  # the command, and a folder of rooms


def room_of(module: str) -> str | None:
    """Returns the room that a module stands in, "" for the list of public names; None for other libraries."""
    found = [room for room in ROOMS if module == room or module.startswith(f"{room}.")]
    return found[0] if found else None


@functools.cache
def imports() -> dict[str, set[str]]:
    """Returns the modules that each module imports, in functions and for types, too."""
    found = {}
    for own, path in MODULES.items():
        tree, is_package = ast.parse(path.read_text()), path.name == "__init__.py"
        found[own] = imported(tree, own, is_package) & set(MODULES)
    return found


def imports_between_rooms() -> dict[tuple[str, str], list[str]]:
    """Returns, of each pair of rooms, the modules of the first that import the second."""
    found: dict[tuple[str, str], list[str]] = {}
    for own, targets in imports().items():
        here = room_of(own)
        for there in {room_of(x) for x in targets} - {None, here}:
            if here is not None and there is not None:
                found.setdefault((here, there), []).append(own)
    return found


def test_every_module_stands_in_a_room_that_says_what_it_holds():
    assert [x for x in MODULES if room_of(x) is None and x not in TOP] == []
    for room in ROOMS:
        assert len(importlib.import_module(f"speedlight.{room}".rstrip(".")).__doc__ or "") > 20, room


def test_imports_run_one_way():
    """Each room imports only rooms above it, lazily, in functions and for types, too; the engines never each other."""
    pairs = imports_between_rooms()
    up = {pair: by for pair, by in pairs.items() if ROOMS.index(pair[1]) > ROOMS.index(pair[0])}
    across = {pair for pair in pairs if {x.split(".")[0] for x in pair} == {"cpu", "gpu"}}
    assert not up and not across


def test_rooms_and_imports_are_few():
    assert len(ROOMS) <= 28
    assert len([pair for pair in imports_between_rooms() if "" not in pair]) <= 136


def asked_about_devices(tree: ast.Module) -> list[str]:
    """Returns what a module asks about devices: comparisons with their names, and the engine of one of them."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                names = {x.value for y in (left, *others) for x in ast.walk(y) if isinstance(x, ast.Constant)}
                asks = bool(names & {"cpu", "cuda"})
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
                asks = name in {"cpu", "gpu", "is_on_gpu", "CacheStorage", "PoolStorage", "CpuEngine", "GpuEngine"}
            case ast.match_case(pattern=pattern):
                asks = any(isinstance(x, ast.Constant) and x.value in ("cpu", "cuda") for x in ast.walk(pattern))
            case _:
                asks = False
        if asks:
            found.append(ast.unparse(node))
    return found


def test_accounts_of_caches_never_ask_which_device():
    """kv/ asks a storage what it can do, so that another engine needs no change there."""
    accounts = [path for own, path in MODULES.items() if room_of(own) == "kv"]
    assert len(accounts) > 5
    assert [y for x in accounts for y in asked_about_devices(ast.parse(x.read_text()))] == []


@pytest.mark.parametrize(
    "source",
    [
        "if storage.device == 'cpu': pass",
        "x = storage.name not in ('cuda', 'other')",
        "from ..engines import is_on_gpu",
        "from .. import engines\nengines.cpu().read",
        "isinstance(storage, CacheStorage)",
        "match device:\n    case 'cpu':\n        pass",
    ],
)
def test_every_way_to_ask_which_device_is_seen(source):
    assert asked_about_devices(ast.parse(source))


def imported(tree: ast.Module, own: str, is_package: bool) -> set[str]:
    """Modules of the package that a module imports, in whatever way it says so, relative to the package."""
    found = set()
    here = own.split(".") if own else []
    here = here if is_package else here[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                x.name.removeprefix("speedlight").removeprefix(".")
                for x in node.names
                if x.name.startswith("speedlight")
            }
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = here[: len(here) - node.level + 1]
            elif node.module and node.module.split(".")[0] == "speedlight":
                base = []
            else:
                continue
            name = (node.module or "").split(".") if node.level else (node.module or "").split(".")[1:]
            target = [*base, *(x for x in name if x)]
            found |= {x if (x := ".".join([*target, y.name])) in MODULES else ".".join(target) for y in node.names}
    return found


def test_no_files_import_each_other():
    """Files of a room build on each other one way, too, and so do the types that they name."""
    edges = {a: {b for b in found - {a} if room_of(a) == room_of(b)} for a, found in imports().items()}
    graphlib.TopologicalSorter(edges).prepare()  # raises where there is a circle


@pytest.mark.parametrize(
    ("source", "own", "expected"),
    [
        ("from . import tree", "expressions.bounds", "expressions.tree"),
        ("from .. import front", "cpu.forward", "front"),
        ("from ..kv import cache", "cpu.forward", "kv.cache"),
        ("from ..kv.cache import KVCache", "cpu.forward", "kv.cache"),
        ("import speedlight.kv.cache as x", "cpu.forward", "kv.cache"),
        ("from speedlight.kv import cache", "cpu.forward", "kv.cache"),
        ("def f():\n    from .front import attention", "engines", "front"),
        ("from .. import engines", "calls.dense", "engines"),
        ("from .. import attention", "torch.module", ""),
        ("import speedlight as sl", "tools.cli", ""),
    ],
)
def test_every_way_to_import_is_seen(source, own, expected):
    assert expected in imported(ast.parse(source), own, False)
