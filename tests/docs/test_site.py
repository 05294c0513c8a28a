"""What `make docs` builds, looked at without its packages: every page is in the nav, every link leads somewhere, every
public name has its place, and no word of a docstring is lost on the way to a page.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import sys
import types
import unicodedata

import pytest
import yaml
from conftest import ROOT

DOCS = ROOT / "docs"
GUIDES = ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
PAGES = sorted(x.name for x in DOCS.glob("*.md"))
HERE = "https://github.com/speedlight/speedlight"
TREES = (f"{HERE}/blob/main/", HERE.replace("github.com", "raw.githubusercontent.com") + "/main/")
PACKAGES = {  # and the page where the names of each are
    "speedlight": "api.md",
    "speedlight.torch": "api-adapters.md",
    "speedlight.distributed": "api-adapters.md",
    "speedlight.transformers": "api-adapters.md",
    "speedlight.flash_attn": "api-adapters.md",
    "speedlight.jax": "api-adapters.md",
}


def prose(path):
    """A page without its code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda found: "x" * len(found[0]), text)


def links(path):
    return re.findall(r"\]\(([^)\s]+)\)", prose(path))


def anchors(path):
    """What a page's headings are called in links: as the site calls them, and as GitHub does."""
    code = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = {x.removeprefix("::: ") for x in re.findall(r"^::: .+", code, flags=re.MULTILINE)}
    found = {"site": set(named), "github": set(named)}
    for heading in re.findall(r"^#+ (.+)", code, flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
        found["site"].add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_text).strip()))
        found["github"].add(re.sub(r"[^\w\s-]", "", text).replace(" ", "-"))
    return found


def nav():
    def pages(part):
        return [part] if isinstance(part, str) else [x for one in part for x in pages(next(iter(one.values())))]

    return pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def test_every_page_is_in_the_nav_once():
    assert sorted(nav()) == PAGES and len(PAGES) > 15


@pytest.mark.parametrize("page", PAGES)
def test_links_of_pages(page):
    for link in links(DOCS / page):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = DOCS / (file or page)
            assert target.is_file() and target.resolve().is_relative_to(DOCS), f"{page}: {link}"
            for place, names in anchors(target).items() if anchor else ():
                assert anchor in names, f"{page}: {link} is none of {sorted(names)} ({place})"


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", *GUIDES, *(f"docs/{x}" for x in PAGES)])
def test_links_into_the_repository(page):
    """They name files and headings that are there; the README, which package indexes show, has no others of ours."""
    for link in links(ROOT / page):
        tree = next((x for x in TREES if link.startswith(x)), None)
        assert page != "README.md" or link.startswith("https://"), f"{link}: a package index has no such file"
        assert link.startswith("https://") or page[:5] == "docs/" or (ROOT / link).is_file(), f"{page}: {link}"
        if tree is not None:
            file, _, anchor = link.removeprefix(tree).partition("#")
            assert (ROOT / file).is_file(), f"{page}: {link}"
            assert not anchor or anchor in anchors(ROOT / file)["github"], f"{page}: {link}"


def test_there_are_links_to_test():
    assert len(links(ROOT / "README.md")) > 20 and len([x for page in PAGES for x in links(DOCS / page)]) > 40


def source(module):
    """A module's text: its package may take seconds to import."""
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def public(module):
    """What `__all__` names."""
    tree = ast.parse(source(module))
    [found] = [x.value for x in tree.body if isinstance(x, ast.Assign) and x.targets[0].id == "__all__"]
    return set(ast.literal_eval(found))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_its_place(package):
    """`::: speedlight.attention` on the page of the API; a new name needs such a line."""
    named = re.findall(r"^::: ([\w.]+)$", (DOCS / PACKAGES[package]).read_text(), flags=re.MULTILINE)
    assert len(named) == len(set(named))
    wanted = {f"{package}.{x}" for x in public(package) - {"ARITHMETIC", "__version__"}}
    there = {x for x in named if x.rpartition(".")[0] == package and x not in PACKAGES and x != "speedlight.onnx"}
    assert not wanted - there
    for more in there - wanted:  # what `from speedlight import *` leaves alone
        assert f'"{more.rpartition(".")[2]}"' in source(package), more


def listed(module, page):
    """The names that a page has of a module as a whole."""
    part = rf"^::: {module}\n +options:\n(?: +.*\n)*? +members: \[(.*)\]"
    return set(re.search(part, (DOCS / page).read_text(), re.MULTILINE)[1].split(", "))


@pytest.mark.parametrize("name", ["speedlight.flash_attn.v3", "speedlight.flash_attn.v4", "speedlight.onnx"])
def test_every_name_of_a_module_has_its_place(name):
    assert listed(name, "api-adapters.md") == public(name)


def test_the_specification_has_its_place():
    tree = ast.parse(source("speedlight.reference"))
    found = {x.name for x in tree.body if isinstance(x, ast.FunctionDef) and x.name[0] != "_"}
    assert listed("speedlight.reference", "api.md") == found


@pytest.fixture
def markdown(monkeypatch):
    """tools/docstrings.py without griffe, whose extension it is."""
    monkeypatch.setitem(sys.modules, "griffe", types.SimpleNamespace(Extension=object, Object=object))
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "tools" / "docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.markdown


def test_no_word_of_a_docstring_is_lost(markdown):
    count = 0
    for path in sorted((ROOT / "speedlight").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
            if text is not None:
                shown, where = markdown(text), f"{path.name}: {node.name}"
                words = [x for x in re.findall(r"\w+", shown) if x != "pycon"]
                assert words == re.findall(r"\w+", re.sub(r"^Args:$", "Arguments:", text, flags=re.MULTILINE)), where
                assert shown.count("```pycon") == shown.count("\n```\n") and "\nArgs:" not in shown, where
                count += 1
    assert count > 500


def test_lists_and_code_of_docstrings(markdown):
    text = """It adds.

    Args:
        a, b, …: arrays. Any
            strides, and:
            more.
        c, d,
        e: as for b.
        The others are as before.

    Returns:
        Their
        sum.

    >>> 1 + 1
    2
    """
    shown = markdown(text)
    assert "**Arguments**\n\n- `a`, `b`, …: arrays. Any strides, and: more.\n- `c`, `d`, `e`: as for b.\n- The" in shown
    assert "**Returns**\n\nTheir sum.\n" in shown and "```pycon\n>>> 1 + 1\n2\n```" in shown


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("table")
    for name in ("table", "chart", "pictures"):
        sys.modules.pop(name)


def test_figures_are_those_of_the_rows(tables):
    """`make readme` writes them: every row to the page, eight problems to the README; no figure is typed."""
    forward, gradients, models = (sorted((tables.RESULTS / name).glob("*.json")) for name in ("", "backward", "models"))
    page, readme = tables.PAGE.read_text(), tables.README.read_text()
    assert tables.between(page, "rows", "\n".join(map(tables.table, forward))) == page
    assert tables.between(page, "backward", tables.backward_table(gradients)) == page
    reports = [json.loads(x.read_text()) for x in (*forward, *gradients, *models)]
    figures = tables.figures(reports)
    problems = re.findall(r"^\| (\w[^|]*) \|", figures, flags=re.MULTILINE)[1:]
    assert tables.between(readme, "figures", figures) == readme and len(set(problems)) == 8
    assert len(re.findall(r"^!\[", readme, flags=re.MULTILINE)) == 1
    for report in reports[: len(forward)]:
        for row in report["rows"]:
            assert row["family"] == report["family"] and re.fullmatch("[0-9a-f]{7,}", row["commit"])
            if "gflops" in row or "share_of_read" in row:
                assert row["name"].removesuffix(" one token") in page


def test_each_family_of_cpus_has_its_rows(tables, tmp_path):
    """Side by side in the README; on the page a table each, with the commits of what was not measured again."""
    report = json.loads(min(tables.RESULTS.glob("*.json")).read_text())
    other = report | {"family": "Zen 7", "rows": [x | {"commit": "0000001"} for x in report["rows"]]}
    figures = tables.figures([report, other])
    assert figures.count("| Zen 7 |") == figures.count(f"| {report['family']} |") == 6
    other["rows"] = [x | ({"commit": "0000002"} if x["part"] == "decode" else {}) for x in other["rows"]]
    (tmp_path / "other.json").write_text(json.dumps(other))
    text = tables.table(tmp_path / "other.json")
    assert text.startswith("### Zen 7\n") and "at 0000001 (attention), 0000001 (masks), 0000002 (decoding)." in text


def test_every_public_member_has_a_docstring():
    """Those without one would be missing from their page."""
    package, classes = importlib.import_module("speedlight"), 0
    shown = r"^::: speedlight\.(\w+)$(?!\n +options:\n +members: false)"
    for name in re.findall(shown, (DOCS / "api.md").read_text(), re.MULTILINE):
        thing = getattr(package, name)
        if isinstance(thing, type):
            members = {n: x for n, x in vars(thing).items() if n[0] != "_" and (callable(x) or isinstance(x, property))}
            assert not {n for n, x in members.items() if not x.__doc__}, name
            classes += 1
    assert classes > 10


@pytest.mark.parametrize("name", ["api.md", "api-adapters.md"])
def test_summaries_are_the_first_sentences_of_docstrings(name):
    """A page has a row for each name that it shows, before the signatures."""
    page = (DOCS / name).read_text()
    rows = dict(re.findall(r"^\| \[`\w+`\]\(#([\w.]+)\) .*\| (.*) \|$", page, re.MULTILINE))
    without = {"speedlight.reference", "speedlight.adapting", "speedlight.onnx"}  # which list their members
    without |= {"speedlight.MaskFunction", "speedlight.ScoreFunction"}  # types
    assert len(rows) > 30 and set(rows) == set(re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)) - without
    for shown, row in rows.items():
        module, _, own = shown.rpartition(".")
        text = inspect.cleandoc(getattr(importlib.import_module(module), own).__doc__)
        sentence = re.match(r".*?[.!](?= [A-Z\d`\"]|$)", " ".join(text.split("\n\n")[0].split()))
        assert sentence and row.replace("\\|", "|") == sentence[0], shown
