"""Examples in docstrings and in the README run, and say what they print."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import FULL, ROOT

import speedlight as sl
import speedlight.torch
from speedlight.errors import how_to_install

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels

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


def code_of(text: str) -> list[tuple[str, list[str]]]:
    """Python blocks of a page, and the lines that each prints: `print(…)  # these`, or a block of text below it."""
    found = re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", text, re.DOTALL)
    return [
        (code, re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE) + told.splitlines()) for code, told in found
    ]


EACH = """
import os, sys, traceback
import numpy, torch  # other people's, which take seconds; of ours nothing is there
CODES = {codes!r}
for number, code in enumerate(CODES):
    os.mkdir(str(number))
    child = os.fork()
    if not child:
        os.chdir(str(number))
        os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT), 1)
        failed = 1
        try:
            exec(code, {{"__name__": "__main__"}})
            failed = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(failed)
    assert os.waitpid(child, 0)[1] == 0, code
"""


def run_alone(codes: Sequence[str], folder: Path) -> list[str]:
    """What each of some codes prints in a process of its own, in an empty folder; warnings are errors. Where a process
    can fork, other libraries are imported once.
    """
    paths = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    forks = hasattr(os, "fork") and not FULL
    alike = {"OMP_NUM_THREADS": "1"} if forks else {}  # more would wait for each other in tight loops
    printed = []
    for code in [EACH.format(codes=codes)] if forks else codes:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            capture_output=True, text=True, encoding="utf-8", timeout=300, cwd=folder,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8"} | alike,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    if forks:
        return [(folder / str(n) / "printed").read_text("utf-8") for n in range(len(codes))]
    return printed


def assert_prints(printed: str, told: list[str]) -> None:
    """That these lines were printed; `…` is anything."""
    pattern = "\n".join(re.escape(line).replace("…", ".*") for line in told)
    assert re.fullmatch(pattern, printed.rstrip("\n")), f"printed {printed!r}, expected {told}"


# transformers is not for every Python
FAQ = (ROOT / "docs" / "faq.md").read_text()
TUTORIAL = code_of((ROOT / "docs" / "tutorial.md").read_text())
ALONE = [block for block in code_of(README + FAQ) if "transformers" not in block[0] or find_spec("transformers")]


def test_blocks_run_pasted_alone(tmp_path):
    """Those of the README and of questions: drop-in ones say that they are used, all say what came."""
    codes, told = zip(*ALONE, strict=True)
    assert all(told), "a reader sees no result"
    for printed, lines in zip(run_alone(codes, tmp_path), told, strict=True):
        assert_prints(printed, lines)


def test_the_tutorial_says_what_it_prints(tmp_path, monkeypatch, capsys):
    """Each block goes on where the last one ended; in a short run in this process, whose kernels are narrow."""
    code, told = "\n".join(code for code, _ in TUTORIAL), [line for _, lines in TUTORIAL for line in lines]
    if FULL:
        (printed,) = run_alone([code], tmp_path)
    else:
        monkeypatch.chdir(tmp_path)
        speedlight.torch.report(reset=True)  # what other tests had taken
        exec(code, {"__name__": "__main__"})
        printed = capsys.readouterr().out
    assert_prints(printed, told)
    assert len(told) > 12 and sum("…" in line for line in told) <= 2


@pytest.mark.parametrize(("printed", "told", "good"), [
    ("a 1.5 b\nc\n", ["a … b", "c"], True), ("a\n", ["a", "c"], False), ("a\nc\n", ["a"], False),
    ("axb\n", ["a.b"], False),
])  # fmt: skip
def test_what_is_printed_is_compared(printed, told, good):
    with contextlib.nullcontext() if good else pytest.raises(AssertionError):
        assert_prints(printed, told)


@pytest.mark.parametrize(
    ("page", "made"),
    [
        ("torch", "layer"),
        ("coming-from", "seq_lens"),
        ("caches", "lengths"),
        ("index", "q"),
        ("mla", "rotary"),
        ("distributed", "whole"),
    ],
)
def test_examples_of_pages(page, made, capsys):
    names: dict = {}
    blocks = code_of((ROOT / "docs" / f"{page}.md").read_text())
    for code, _ in blocks:
        exec(code, names)
        if "theirs" in names:  # beside ours
            assert abs(names.pop("theirs") - names["ours"]).max() < 1e-5
    assert made in names and "out" in names
    assert_prints(capsys.readouterr().out, [line for _, lines in blocks for line in lines])


def prose_of(text: str) -> str:
    """A page without code, tables, comments and addresses."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"^\|.*$", "", text, flags=re.MULTILINE))


def test_the_readme_is_short():
    assert len(prose_of(README).split()) <= 650
    assert len(prose_of(README.split("import numpy")[0]).split()) <= 100, "before the first result"


def test_the_readme_says_first_what_a_stranger_asks_first():
    parts = [x.split("\n")[0] for x in re.split(r"^## ", README, flags=re.MULTILINE)]
    assert parts == [
        "# speedlight", "Install", "First result", "What you gain", "In a model you have", "In code you write",
        "What is supported, and how that was checked", "Read on",
    ]  # fmt: skip
    assert len(code_of(README)) == 6 and len(ALONE) >= 6


def test_the_readme_says_right_after_the_clone_what_a_clone_can_do():
    lines, makefile = README.partition("git clone ")[2].splitlines()[1:3], (PACKAGE.parent / "Makefile").read_text()
    assert [x.partition("#")[0].strip() for x in lines] == ["make demo", "make test"]
    assert "\ndemo: " in makefile and "\ntest: " in makefile and "build/demo.png" in makefile
    assert README.count("make demo") == README.count("make test") == 1


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_advice_to_install_is_that_of_errors(page):
    """errors.how_to_install knows whether a package index has it."""
    text, advice = (ROOT / page).read_text(), how_to_install("torch")
    assert advice.partition(" in a clone")[0] in text
    assert ("on no package index yet" in text.lower()) == ("in a clone" in advice)


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
    importlib.import_module("speedlight.torch").report(reset=True)  # of what other tests' calls have left there
    for path in (PACKAGE / own).glob("*.py"):
        importlib.import_module(f"speedlight.{module_of(str(path.relative_to(PACKAGE)))}")
    for name, value in {f"speedlight.{own}": package, **names}.items():
        assert value is package or getattr(package, name) is value
        examples = doctest.DocTestFinder(recurse=False).find(value, name)
        assert sum(len(x.examples) for x in examples) > 0, f"{name} has no example"
        runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
        assert sum(runner.run(x).failed for x in examples) == 0
