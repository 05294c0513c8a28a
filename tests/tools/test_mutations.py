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
def read(file: str) -> tuple[str, str]:
    """Returns the text of a file of the package, and its syntax."""
    text = (ROOT / "speedlight" / file).read_text()
    return text, ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m.name for m in MUTATIONS])
def test_it_applies(mutation):
    text, parsed = read(mutation.file)
    assert ast.dump(ast.parse(mutation.mutated(text))) != parsed, "the code is what it was"
    files = [x.split("::")[0] for x in shlex.split(mutation.tests) if x.startswith("tests/")]
    assert files and all((ROOT / x).exists() for x in files)
