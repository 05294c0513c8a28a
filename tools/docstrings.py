"""For `make docs`: docstrings as Markdown. Arguments and errors become lists, examples become code."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

TITLES = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises"}
_SECTION = re.compile(rf"^({'|'.join(TITLES)}):\n((?:(?: .*)?\n)+)", re.MULTILINE)
_NAMES = re.compile(r"([\w.*]+(?:, [\w.*…]+)*)(: |,$)")  # "q, k, v: …", or a list of names that goes on below
_EXAMPLES = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites what mkdocstrings shows; the package's docstrings stay as help() has them."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring of the house's form as Markdown."""
    text = _EXAMPLES.sub(lambda found: f"```pycon\n{found[0]}\n```", inspect.cleandoc(text) + "\n")
    return _SECTION.sub(lambda found: f"**{TITLES[found[1]]}**\n\n{_body(found[1], found[2])}\n\n", text)


def _body(section: str, text: str) -> str:
    lines = inspect.cleandoc(text).splitlines()
    return " ".join(x.strip() for x in lines) if section == "Returns" else "\n".join(map(_item, _items(lines)))


def _items(lines: list[str]) -> list[str]:
    """The lines of each item, joined: one begins at a name, or at a sentence, that is not indented."""
    items: list[str] = []
    for line in lines:
        begins = _NAMES.match(line) is not None or line[:1].isupper()
        if not items or (begins and not _NAMES.fullmatch(items[-1])):
            items.append(line)
        else:
            items[-1] += " " + line.strip()
    return items


def _item(text: str) -> str:
    """A line of a list: names as code, then what they mean."""
    names = re.match(r"([^:]*[\w…]): ", text)
    if names is None or _NAMES.match(text) is None:
        return f"- {text}"
    return f"- {', '.join(f'`{x}`' if x != '…' else x for x in names[1].split(', '))}: {text[names.end() :]}"
