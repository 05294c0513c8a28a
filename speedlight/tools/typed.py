"""Errors in the words that were typed: an argument of the API is an option here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_ARRAYS = ("q", "k", "v")  # are what a file holds; the options of these names say under which
_EXPECTED = {"integer": "a whole number", "number": "a number", "float": "a number"}


def as_typed(text: str, group: Any, words: Sequence[str]) -> str:
    """Returns an error of the API in the command's words: q_len and dropout= become --q-len and --dropout."""
    typed = [word for word in words if word in group.commands][:1]
    params = group.commands[typed[0]].params if typed else []
    names = {x.name: _option(x) for x in params if x.name not in _ARRAYS and _option(x).startswith("--")}
    if any(word.partition("=")[0] == "--isa" for word in words):
        text = text.replace("SPEEDLIGHT_ISA:", "isa:").replace("Unset it", "Leave it out")
    if not names:
        return text
    # one English word may be more than a name: then what follows must say so
    any_of, plain = (f"(?:{'|'.join(x)})" if x else "(?!)" for x in (names, [x for x in names if "_" in x]))
    pattern = rf"(?<![\w.'-])(?:({any_of})(?:=(?:True)?(?=[\s.;,)])|(?=[:=]))|({plain})\b(?![('-]))"
    return re.sub(pattern, lambda found: names[found[1] or found[2]], text)


def usage(error: Any, words: Sequence[str]) -> str:
    """Returns an error of Typer's (of Click's, in older ones) as ours read."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    path = context.command_path if context else " ".join(["speedlight", *words[:1]])
    option = _option(param) if param is not None else getattr(error, "option_name", "")
    message = " ".join(error.format_message().split())
    match type(error).__name__:
        case "NoSuchOption":
            close = f" Did you mean {' or '.join(sorted(error.possibilities))}?" if error.possibilities else ""
            return f"{option}: expected an option that `{path} --help` lists.{close}"
        case "MissingParameter":
            expected = "a value" if option[0] == "-" else "a file"
            return f"{option}: expected {expected}; got none. `{path} --help` says which."
        case "BadOptionUsage":
            takes = "a value; got none" if "requires" in message else "no value; got one"
            return f"{option}: expected {takes}. `{path} --help` says more."
        case "BadParameter" if option.startswith("-"):
            expected = [text for word, text in _EXPECTED.items() if word in message] or ["another value"]
            return f"{option}: expected {expected[0]}; got {_value(option, words)!r}."
    return f"{message.rstrip('?.')}{'?' if '?' in message else '.'} `{path} --help` says what there is."


def _option(param: Any) -> str:
    """Returns the long name of an option; of an argument its name."""
    return max(param.opts, key=len)


def _value(option: str, words: Sequence[str]) -> str:
    """Returns what was typed beside an option, last."""
    word, after = [(a, b) for a, b in zip(words, [*words[1:], ""], strict=True) if a.partition("=")[0] == option][-1]
    return word.partition("=")[2] if "=" in word else after
