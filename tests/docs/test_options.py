"""docs/options.md: its pictures, and its tables of options, are those of the calls."""

from __future__ import annotations

import doctest
import inspect
import operator
import re

from conftest import ROOT

import speedlight as sl

PAGE = (ROOT / "docs" / "options.md").read_text()
OPTIONS = {x.name for x in inspect.signature(sl.attention).parameters.values() if x.kind is x.KEYWORD_ONLY}


def test_pictures_are_what_the_reference_prints():
    code = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE, re.DOTALL))
    result = doctest.DocTestRunner().run(doctest.DocTestParser().get_doctest(code, {}, "options.md", None, 0))
    assert result.attempted > 15 and result.failed == 0


def test_each_option_has_its_row():
    rows = "".join(re.findall(r"^\| \[.*\]\(#", PAGE, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", rows)) == OPTIONS


def test_other_calls_take_what_the_page_says():
    lines = re.findall(r"^\| (`.*`) \| (all but|only) (.*) \|$", PAGE, re.MULTILINE)
    assert len(lines) == 5
    for calls, which, names in lines:
        for call in re.findall(r"`([\w.]+)`", calls):
            taken = OPTIONS & set(inspect.signature(operator.attrgetter(call)(sl)).parameters)
            named = set(re.findall(r"`(\w+)`", names))
            assert taken == (named if which == "only" else OPTIONS - named), call
