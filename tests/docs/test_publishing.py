"""What is said of installing is true, and the lowest releases that are installed are those that are named."""

from __future__ import annotations

import re

from conftest import ROOT

from speedlight import errors
from speedlight.errors import how_to_install

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_lowest_releases_are_those_that_are_tested():
    """Of what has an interface that changes: `make test-lowest` installs the bounds of pyproject.toml."""
    pins = dict(re.findall(r"^(\w+)==([\d.]+)\.\*$", (ROOT / "lowest.txt").read_text(encoding="utf-8"), re.MULTILINE))
    bounds = {name: re.findall(rf'"{name}>=([\d.]+)"', PROJECT)[0] for name in ("numpy", "llvmlite", "torch", "jax")}
    assert pins == bounds


def test_the_image_of_a_gpu_has_the_lowest_release_that_the_extra_takes():
    """`make test-gpu-image` holds what the extra promises."""
    pins = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "gpu-image.txt").read_text(encoding="utf-8"), re.MULTILINE))
    bounds = dict(re.findall(r'"(\w+)>=([\d.]+)', re.findall(r"^gpu = .*", PROJECT, re.MULTILINE)[0]))
    assert bounds.keys() == {"torch", "triton"} and all(pins[x] == f"{bound}.0" for x, bound in bounds.items())


def test_what_is_said_of_installing_is_true():
    """Commands for what extras bring are made in one place, which knows whether the package is published."""
    places = [p for x in ("speedlight", "docs", "examples", "benchmarks", "tools") for p in (ROOT / x).rglob("*")]
    texts = {p: p.read_text(encoding="utf-8") for p in (*places, *ROOT.glob("*.md")) if p.suffix in (".py", ".md")}
    extras = set(re.findall(r"^([a-z]+) = \[", PROJECT.partition("[project.optional-dependencies]")[2], re.MULTILINE))
    named, from_an_index = set(), []
    for path, text in texts.items():
        if path.parts[len(ROOT.parts)] == "speedlight" and path.parts[-2:] != ("errors", "__init__.py"):
            assert not re.search(r"pip install ['\"]?(\.|speedlight|torch|jax|onnx|typer|safetensors|triton)", text), (
                path
            )
        elif re.search(r"pip install (-U )?['\"]?speedlight\b", text) and path.suffix == ".md":
            from_an_index.append(path.name)
        found = re.findall(r"how_to_install\(['\"]([a-z]+)['\"]\)|pip install '(?:\.|speedlight)\[([a-z,]+)\]'", text)
        named |= {x for pair in found for words in pair for x in words.split(",") if x}
    assert named and named <= extras, named - extras
    assert ("README.md" in from_an_index) if errors.PUBLISHED else not from_an_index


def test_errors_name_a_command_that_works(monkeypatch):
    monkeypatch.setattr(errors, "PUBLISHED", False)
    assert how_to_install("gpu") == "pip install '.[gpu]' in a clone of speedlight's repository"
    monkeypatch.setattr(errors, "PUBLISHED", True)
    assert how_to_install("gpu") == "pip install 'speedlight[gpu]'"
