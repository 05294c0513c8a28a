"""Examples in docstrings and in the README run, and say what they print."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


MODULES = ("", ".api", ".merging", ".reference", ".tracing", ".patterns", ".caches", ".cpu.workers")


@pytest.mark.parametrize("name", [f"speedlight{x}" for x in MODULES])
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0 and result.failed == 0


def test_readme_example(capsys):
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(code, names)
    printed = capsys.readouterr().out
    assert printed.startswith("(1, 8, 4096, 64) (1, 8, 4096)\n") and "visible" in printed
    assert printed.endswith("\n4096 True\n")


def test_first_result_within_90_words():
    before = README.split("out, lse = ")[0]
    assert len(before.split()) <= 90


def test_import_directions():
    """Each module may import only those above it in docs/architecture.md."""
    package = Path(__file__).parent.parent / "speedlight"
    order = re.findall(r"^\| `([\w/]+\.py)`", (package.parent / "docs" / "architecture.md").read_text(), re.MULTILINE)
    rank = {path: i for i, path in enumerate(order)}
    files = {str(x.relative_to(package)) for x in package.rglob("*.py") if x.name != "__init__.py" and x.parent.name != "tools"}
    assert set(order) == files, "docs/architecture.md lists each module once"
    order += ["tools/formula.py", "tools/pictures.py", "tools/cli.py"]
    for path, own in rank.items():
        for dots, module in re.findall(r"^\s*from (\.+)([\w.]*) import", (package / path).read_text(), re.MULTILINE):
            here = path.split("/")[0] + "/" if "/" in path else ""
            base = here if dots == "." else ""
            target = f"{base}{module.replace('.', '/')}.py"
            if module and target in rank:
                assert rank[target] < own, f"{path} imports {target}"


def test_promises_name_tests_that_exist():
    """Every test that docs/reliability.md names is there."""
    tests = Path(__file__).parent
    promises = (tests.parent / "docs" / "reliability.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", promises)
    assert len(named) > 60
    for file, name in named:
        assert re.search(rf"\b{name}\b", (tests / file).read_text()), f"{file} has no {name}"
