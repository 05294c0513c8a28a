"""Examples in docstrings and in the README run, and say what they print."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections.abc import Iterator

import pytest
from conftest import FULL, ROOT

import speedlight as sl

PACKAGE = ROOT / "speedlight"
README = (PACKAGE.parent / "README.md").read_text()


PUBLIC = [name for name in sl.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", ["speedlight", *PUBLIC])
def test_docstrings(name):
    """Every public name shows how it is used, and the example prints what it says; errors share that of their base."""
    thing = sl if name == "speedlight" else getattr(sl, name)
    if isinstance(thing, type) and issubclass(thing, sl.Error) and thing is not sl.Error:
        assert thing.__doc__
        return
    if name in ("ARITHMETIC", "reference", "MaskFunction", "ScoreFunction"):  # no docstrings; the module's follow
        return
    examples = doctest.DocTestFinder(recurse=False).find(thing, name)
    assert sum(len(x.examples) for x in examples) > 0, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    assert sum(runner.run(x).failed for x in examples) == 0


def test_docstrings_of_the_reference():
    result = doctest.testmod(sl.reference)
    assert result.attempted > 0 and result.failed == 0


FEWER = {"4096": "512", "1024": "128", "1000": "125", "1008": "133", "8192": "1024"}  # tokens, in a short run


def test_readme_example(capsys):
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(code if FULL else re.sub(r"\b\d{4}\b", lambda found: FEWER[found[0]], code), names)
    printed, n = capsys.readouterr().out, 4096 if FULL else 512
    assert printed.startswith(f"(1, 8, {n}, 64) (1, 8, {n})\n") and "visible" in printed
    assert printed.endswith(f"\n{n} True\n")


@pytest.mark.parametrize(
    ("page", "made"),
    [("torch", "layer"), ("coming-from", "v_ab"), ("caches", "lengths"), ("index", "q"), ("distributed", "whole")],
)
def test_examples_of_pages(page, made, capsys):
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", (PACKAGE.parent / "docs" / f"{page}.md").read_text(), re.DOTALL):
        exec(code, names)
        if "theirs" in names:  # beside ours
            assert abs(names.pop("theirs") - names["ours"]).max() < 1e-5
    assert made in names and "out" in names
    text = (PACKAGE.parent / "docs" / f"{page}.md").read_text()
    said = re.findall(r"^print\(.*\)  # (.*)$", text, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said


def test_first_result_within_90_words():
    before = README.split("out, lse = ")[0]
    assert len(before.split()) <= 90


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix("__init__").removesuffix(".")


def test_no_generator_ends_early_in_a_call():
    """any(), all() and next() close a generator that they leave early, and CPython prints, not raises, what a signal
    handler raises meanwhile: a KeyboardInterrupt would be lost. They take lists in what runs in a call.
    """
    ended = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(("tools/", "reference")):
            ended |= {(name, function) for function in early_ends(ast.parse(path.read_text()))}
    assert not ended


def early_ends(tree: ast.AST, function: str = "") -> Iterator[str]:
    """Functions that give any(), all() or next() a generator expression."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args and function:
            is_early = node.func.id in ("any", "all", "next") and isinstance(node.args[0], ast.GeneratorExp)
            yield from [function] * is_early
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from early_ends(node, getattr(node, "name", function or "lambda") if is_function else function)


def test_no_module_hides_a_public_name():
    """Importing a submodule of a public name's spelling would replace that name."""
    names = {name: getattr(sl, name) for name in sl.__all__}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__main__.py":
            importlib.import_module(f"speedlight.{module_of(str(path.relative_to(PACKAGE)))}".rstrip("."))
    assert all(getattr(sl, name) is value for name, value in names.items())


def test_promises_name_tests_that_exist():
    """Every test that docs/reliability.md names is there."""
    tests = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    promises = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", promises)
    assert len(named) > 60
    for file, name in named:
        assert re.search(rf"\b{name}\b", tests[file].read_text()), f"{file} has no {name}"


@pytest.mark.parametrize("own", ["torch", "distributed"])
def test_public_names_in_torch(own):
    """Each is no module, whichever of them are imported, and its example runs."""
    package = importlib.import_module(f"speedlight.{own}")
    names = {name: getattr(package, name) for name in package.__all__}
    for path in (PACKAGE / own).glob("*.py"):
        importlib.import_module(f"speedlight.{module_of(str(path.relative_to(PACKAGE)))}")
    for name, value in {f"speedlight.{own}": package, **names}.items():
        assert value is package or getattr(package, name) is value
        examples = doctest.DocTestFinder(recurse=False).find(value, name)
        assert sum(len(x.examples) for x in examples) > 0, f"{name} has no example"
        runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
        assert sum(runner.run(x).failed for x in examples) == 0
