"""What is published beside the code: workflows name what there is, and versions, systems and pages agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

from speedlight.errors import how_to_install

yaml = pytest.importorskip("yaml")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE, PROJECT = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "pyproject.toml"))


def parsed(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs() -> list[tuple[str, dict]]:
    return [(f"{path.name}: {name}", job) for path in WORKFLOWS for name, job in parsed(path)["jobs"].items()]


def test_workflows_run_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    run = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs()}
    made = {word for commands in run.values() for x in commands for word in re.findall(r"make ([a-z-]+)", x)}
    assert {"test", "package", "check-arm"} <= made <= targets
    for name, commands in run.items():
        assert any("make " in x for x in commands), f"{name} makes nothing"
        assert "PYTHON=python" in " ".join(commands), f"{name} takes another Python than it set up"
    for name, job in jobs():
        assert job["timeout-minutes"] <= 90 and job["steps"][0]["uses"].startswith("actions/checkout@"), name
        assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", x["uses"]) for x in job["steps"] if "uses" in x), name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_only_read(path):
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "workflow_dispatch" in workflow[True]  # YAML takes `on` for a bool


def test_pythons_are_those_of_the_classifiers():
    job = dict(jobs())["test.yml: test"]
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert job["strategy"]["matrix"]["python"] == named and f'requires-python = ">={named[0]}"' in PROJECT
    systems = {job["strategy"]["matrix"]["system"][0]} | {x["system"] for x in job["strategy"]["matrix"]["include"]}
    assert {x.partition("-")[0] for x in systems} == {"ubuntu", "macos", "windows"}
    assert any(x.endswith("-arm") for x in systems)
    assert all(x["untried"] for x in job["strategy"]["matrix"]["include"])  # until one has run


def test_the_sdist_has_what_its_tests_ask_for():
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    for folder in ("tests", "docs", "examples", "benchmarks", ".github"):
        assert f"\ngraft {folder}\n" in manifest and (ROOT / folder).is_dir()
    named = re.findall(r"^include (.*)$", manifest, re.MULTILINE)[0].split()
    assert {"Makefile", "constraints.txt", "CITATION.cff", "SECURITY.md", "CHANGELOG.md"} <= set(named)
    assert all((ROOT / x).exists() for x in named)


def test_the_lowest_releases_are_those_that_are_tested():
    """Of what has an interface that changes: a job installs the bounds of pyproject.toml."""
    pins = dict(re.findall(r"^(\w+)==([\d.]+)\.\*$", (ROOT / "lowest.txt").read_text(encoding="utf-8"), re.MULTILINE))
    bounds = {name: re.findall(rf'"{name}>=([\d.]+)"', PROJECT)[0] for name in ("numpy", "llvmlite", "torch", "jax")}
    assert pins == bounds
    assert any("make test-lowest" in step.get("run", "") for _, job in jobs() for step in job["steps"])


def test_nobody_is_told_to_install_what_is_on_no_index():
    """Commands for what extras bring are made in one place, work in a clone, and name extras that there are."""
    places = [p for x in ("speedlight", "docs", "examples", "benchmarks", "tools") for p in (ROOT / x).rglob("*")]
    texts = {p: p.read_text(encoding="utf-8") for p in (*places, *ROOT.glob("*.md")) if p.suffix in (".py", ".md")}
    extras = set(re.findall(r"^([a-z]+) = \[", PROJECT.partition("[project.optional-dependencies]")[2], re.MULTILINE))
    named = set()
    for path, text in texts.items():
        assert not re.search(r"pip install (-U )?['\"]?speedlight\b", text), path
        if path.parts[len(ROOT.parts)] == "speedlight" and path.parts[-2:] != ("errors", "__init__.py"):
            assert not re.search(r"pip install ['\"]?(\.|torch|jax|onnx|typer|safetensors|triton)", text), path
        found = re.findall(r"how_to_install\(['\"]([a-z]+)['\"]\)|pip install '\.\[([a-z,]+)\]'", text)
        named |= {x for pair in found for words in pair for x in words.split(",") if x}
    assert named and named <= extras, named - extras
    assert how_to_install("gpu").startswith("pip install '.[gpu]' in a clone")
