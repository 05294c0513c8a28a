"""docs/command-line.md: its commands run, print what it says, and are all that there are."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import fields

import pytest
from conftest import ROOT

from speedlight.host.others import Others
from speedlight.tools import cli
from speedlight.tools.options import ProblemOptions

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels

PAGE = (ROOT / "docs" / "command-line.md").read_text()
COMMANDS = list(dict.fromkeys(re.findall(r"^speedlight ([^#\n]*[^#\s])", PAGE, re.MULTILINE)))
ELSEWHERE = ("tune", "check", "info")  # which take long, or say what is of this machine; test_tuning.py, test_check.py


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Runs a line of the page in a folder with its files."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "masks.py").write_text("def packed(b, h, i, j): return i // 100 == j // 100\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(Others, "share", lambda self: 0.0)  # other tests that run meanwhile

    def run(line: str) -> str:
        monkeypatch.setattr(sys, "argv", ["speedlight", *shlex.split(line)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, error = capsys.readouterr()
        assert not end.value.code and not error, error
        return out

    return run


@pytest.mark.parametrize("line", [x for x in COMMANDS if x.split()[0] not in ELSEWHERE])
def test_commands_of_the_page_run(here, line):
    quick = " --turns 1" + " --peer none" * ("--peer" not in line) if line.startswith("bench") else ""
    out = here(line + quick)
    said = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert said is not None and (out == said[1]) == (line == "accuracy examples/minilm-layer3.safetensors")
    if line.startswith("bench"):
        assert "verdict " in out and ("PyTorch's SDPA" in out) == ("torch" in line)


def test_the_page_has_every_command_and_option_of_problems():
    group = cli.command()
    named = re.findall(r"^\| `speedlight (\w+)", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(group.commands) and {x.split()[0] for x in COMMANDS} <= set(named)
    assert not [x.name for x in fields(ProblemOptions) if f"--{x.name.replace('_', '-')}" not in PAGE]
