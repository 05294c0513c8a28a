"""Sentences of the documents are short, and the documents together are no longer than they may be."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

MOST_IN_A_SENTENCE = 35
MOST_IN_ALL = 34_000
LAB_NOTES = ("ladder.md", "benchmarks.md", "systems.md")
PAGES = [x for x in sorted((ROOT / "docs").glob("*.md")) if x.name not in LAB_NOTES]
READ = [ROOT / "README.md", ROOT / "docs" / "systems.md", *PAGES]

NO_PROSE = (
    r"^( *)```.*?^\1```$",  # code
    r"^::: \S+\n(?: +.*\n)*",  # what mkdocstrings fills in
    r"<!--.*?-->",
    r"^ *(\||#|!\[).*$",  # tables, headings, pictures
)


def prose(text: str) -> str:
    """Returns a page's text without code, tables and headings, a code span and a link's address as one word."""
    for pattern in NO_PROSE:
        text = re.sub(pattern, "\n", text, flags=re.MULTILINE | re.DOTALL if "```" in pattern else re.MULTILINE)
    text = re.sub(r"(`+)[^`]+?\1", "Code", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[str]:
    """Returns the sentences of a page; a list's item ends one, a colon or a semicolon does not."""
    blocks = re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", prose(text))
    blocks = [re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "", x) for x in blocks]
    found = [y for x in blocks for y in re.split(r"(?<=[.!?])[)*\"”]*\s+(?=[\W_]*[A-Z0-9])", " ".join(x.split()))]
    return [x for x in found if x]


def words(sentence: str) -> list[str]:
    """Returns what counts as a word: it has a letter or a digit, as bars of tables have not."""
    return [x for x in sentence.split() if re.search(r"\w", x)]


@pytest.mark.parametrize("page", READ, ids=lambda x: x.name)
def test_sentences_are_short(page):
    found = sentences(page.read_text())
    long = [x for x in found if len(words(x)) > MOST_IN_A_SENTENCE]
    assert found and not long, "\n".join(f"{len(words(x))} words: {x}" for x in long)


def test_the_documents_are_not_too_long():
    count = sum(len(words(x.read_text())) for x in PAGES)
    assert 10_000 < count <= MOST_IN_ALL


def test_long_sentences_are_seen_and_short_ones_are_not():
    """Ends of sentences, list items, code, tables and links are told apart."""
    long = " ".join(["word"] * 36)
    for text in (
        f"{long}.",
        f"- a\n- {long}\n- b",
        f"A. {long}: b.",
        f"[{long}](there.md)",
        f"a\n\n{long[5:]}\nand one",
    ):
        assert max(len(words(x)) for x in sentences(text)) > MOST_IN_A_SENTENCE, text
    short = " ".join(["Word"] * 30)
    for text in (
        f"{short}. {short}.",
        f"{short}.\n`x` {short}? (2 {short}.) {short}!",
        f"- {short}\n- {short}",
        f"```\n{long}\n```\n{short}.",
        f"| {long} |\n|---|\n",
        f"# {long}\n",
        f"`{long}` {short}",
        f"[{short}](to#{long.replace(' ', '-')})",
        f"1. {short}\n   ```\n   {long}\n   ```\n2. {short}",
    ):
        assert max(map(len, map(words, sentences(text) or ["a"]))) <= MOST_IN_A_SENTENCE, text
