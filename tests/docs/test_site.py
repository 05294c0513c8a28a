"""What `make docs` builds, looked at without its packages: every page is in the nav, every link leads somewhere, every
public name has its place, and no word of a docstring is lost on the way to a page.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import types
import unicodedata

import pytest
import yaml
from conftest import ROOT
from PIL import Image

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
    return [x or y for x, y in re.findall(r'\]\(([^)\s]+)\)|\bsrc="([^"]+)"', prose(path))]


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


# what people look for, and a page that the search must find by it
WORDS = {
    "GQA": "cookbook", "MQA": "cookbook", "grouped-query": "how-it-works", "KV cache": "tutorial",
    "PagedAttention": "faq",
    "quantization": "faq", "reproducible": "faq", "FlashAttention": "how-it-works", "xformers": "faq",
    "nanoGPT": "faq", "Jupyter": "faq", "attention mask": "faq", "RoPE": "tutorial", "AMX": "faq", "ragged": "cookbook",
    "DeepSeek": "mla", "Kimi": "mla", "MLA": "mla", "latent": "mla", "FlashMLA": "coming-from",
    "kvpress": "coming-from",
}  # fmt: skip


def found(index, query):
    """Pages whose sections have all words of a query, as the site's search splits and joins them."""
    separator = re.compile(index["config"]["separator"])
    words = separator.split(query.lower())
    return {
        section["location"].partition("#")[0].strip("/")
        for section in index["docs"]
        for text in [re.sub(r"<[^>]*>", " ", f"{section['title']} {section['text']}").lower()]
        if all(any(x.strip("`(),.:;*").startswith(y) for x in separator.split(text)) for y in words)
    }


@pytest.mark.slow
def test_the_site_is_built_and_searched(tmp_path):
    """mkdocs checks links and anchors; its index knows the words, and no page asks another host for anything."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=300)
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    assert len(WORDS) >= 12 and not found(index, "a word that nobody wrote")
    for word, page in WORDS.items():
        assert page in found(index, word), word
    for path in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=\"?(https?:[^\s\">]+)", path.read_text()
        )
        assert not [x for x in loaded if not x.startswith(HERE)], path
    assert 'data-md-component="source"' not in (tmp_path / "index.html").read_text()  # it asks GitHub for stars


def test_words_that_people_look_for_are_on_their_pages():
    for word, page in WORDS.items():
        assert word in (DOCS / f"{page}.md").read_text(), word


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{x}" for x in PAGES)])
def test_pictures_have_words(page):
    """Alternative texts: a heading's words in the gallery, elsewhere a sentence."""
    text = prose(ROOT / page)
    pictures = re.findall(r"!\[([^\]]*)\]\(|<img\b[^>]*\balt=\"([^\"]*)\"", text)
    assert len(pictures) == len(re.findall(r"!\[|<img\b", text))
    assert not [x for pair in pictures for x in ["".join(pair)] if len(x.split()) < (1 if "gallery" in page else 4)]


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
    """`make readme` writes them: every row to a page, eight problems to another, four programs to the README."""
    forward, gradients, models = (sorted((tables.RESULTS / name).glob("*.json")) for name in ("", "backward", "models"))
    page, expect, readme = (x.read_text() for x in (tables.PAGE, tables.EXPECT, tables.README))
    assert tables.between(page, "rows", "\n".join(map(tables.table, forward))) == page
    assert tables.between(page, "backward", tables.backward_table(gradients)) == page
    reports, whole = ([json.loads(x.read_text()) for x in y] for y in ((*forward, *gradients), models))
    assert tables.between(page, "models", tables.models_table(whole)) == page
    figures = tables.figures([*reports, *whole])
    problems = re.findall(r"^\| (\w[^|]*) \|", figures, flags=re.MULTILINE)[1:]
    assert tables.between(expect, "figures", figures) == expect and len(set(problems)) == 8
    assert tables.between(expect, "programs", tables.programs(whole)) == expect
    gains = tables.gains(whole)
    assert tables.between(readme, "gains", gains) == readme and gains.count("faster than") >= 4
    for report in reports[: len(forward)]:
        for row in report["rows"]:
            assert row["family"] == report["family"] and re.fullmatch("[0-9a-f]{7,}", row["commit"])
            if "gflops" in row or "share_of_read" in row:
                assert row["name"].removesuffix(" one token") in page


def test_the_picture_is_of_the_rows(tables):
    """Its file keeps the bars it shows: those of the table of problems, for each family of CPUs."""
    paths = [x for y in ("", "backward", "models") for x in sorted((tables.RESULTS / y).glob("*.json"))]
    with Image.open(tables.PICTURES / "best-peer.png") as picture:
        shown, wide = json.loads(picture.text["Figures"]), picture.width
    table = tables.EXPECT.read_text().split("figures: begin")[1]
    lines = re.findall(r"^\| (\w[^|]*) \| ([^|]+) \|", table, flags=re.MULTILINE)
    assert [tuple(x[:2]) for x in shown] == [x for x in lines if x[0] != "problem"]
    wanted = [tables.best_peer(row) for *_, row in tables.compared([json.loads(x.read_text()) for x in paths])]
    assert [tuple(x[2:]) for x in shown] == wanted and wide >= 780  # twice a phone's width
    assert readme_pictures() == [f"{TREES[1]}docs/pictures/best-peer.png"]


def test_the_picture_of_a_shared_prompt_is_of_its_rows(tables):
    """Its file keeps the bars it shows, and the cookbook says the largest."""
    (path,) = (tables.RESULTS / "prompts").glob("*.json")
    (row,) = json.loads(path.read_text())["rows"]
    with Image.open(tables.PICTURES / "shared-prompt.png") as picture:
        shown = json.loads(picture.text["Figures"])
    assert shown == {way: [*row["seconds"][way], row["bytes"][way] / 2**20] for way in ("apart", "shared")}
    says = (ROOT / "docs" / "cookbook.md").read_text()
    for *seconds, memory in shown.values():
        assert f"{seconds[-1]:.1f} s" in says and f"{memory:.0f} MiB" in says
    assert row["name"].startswith("8 clients, a prompt of 4,096 tokens") and row["commit"]


def readme_pictures():
    return [x for x in links(ROOT / "README.md") if x.endswith((".png", ".svg"))]


def test_programs_of_a_machine_that_has_few(tables):
    """Families without a row are no column, rows without a family no line; what is slower says so."""
    row = {"name": tables.GAINS[0][0], "ratios": {"sdpa": [0.5, 0.5, 0.5]}, "seconds": {"speedlight": [2.0]}}
    report = {"family": "Zen 7", "machine": "M", "cores": 2, "isa": "avx2", "versions": {"torch": "2.13.0+cpu"}}
    gains = tables.gains([report | {"rows": []}, report | {"rows": [row]}])
    assert gains.splitlines()[0] == "| program | Zen 7 |" and gains.count("\n|") == 2
    assert "| 2.00 s, 0.50 x as fast as PyTorch |" in gains and gains.endswith(
        "M (Zen 7), 2 cores, avx2; PyTorch 2.13.0.\n"
    )


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
