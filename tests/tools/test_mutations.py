"""The mutations of faults/ still fit the code; `make mutations` tells whether the suite sees them."""

from __future__ import annotations

import ast
import functools
import shlex

import pytest
from mutations import MISSED, MUTATIONS, ROOT


def test_there_are_fifty_or_more():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 50 and MISSED == 2


@functools.cache
def read(file: str) -> tuple[str, dict[str, ast.stmt]]:
    """Returns the text of a file of the package, and its statements."""
    text = (ROOT / "speedlight" / file).read_text()
    return text, statements(text)


def statements(text: str) -> dict[str, ast.stmt]:
    """Returns the statements of a module by their text."""
    lines, found = text.splitlines(), ast.parse(text).body
    first = [min([x.lineno, *(y.lineno for y in getattr(x, "decorator_list", ()))]) for x in found]
    return {"\n".join(lines[n - 1 : x.end_lineno]): x for n, x in zip(first, found, strict=True)}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m.name for m in MUTATIONS])
def test_it_applies(mutation):
    text, before = read(mutation.file)
    after = statements(mutation.mutated(text))
    gone, new = ([ast.dump(x[y]) for y in x if y not in other] for x, other in ((before, after), (after, before)))
    assert gone != new, "the code is what it was"
    files = [x.split("::")[0] for x in shlex.split(mutation.tests) if x.startswith("tests/")]
    assert files and all((ROOT / x).exists() for x in files)
