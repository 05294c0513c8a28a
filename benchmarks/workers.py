"""Processes that answer questions, a line of JSON each."""

from __future__ import annotations

import json
import subprocess
from typing import Any


class Workers:
    """Processes that answer the same questions together."""

    def __init__(self, commands: list[list[str]], **how: Any) -> None:
        pipe = subprocess.PIPE
        self.processes = [subprocess.Popen(x, stdin=pipe, stdout=pipe, text=True, **how) for x in commands]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for x in self.processes:
            x.kill()
            x.communicate()

    def ask(self, question: Any) -> list[Any]:
        """Returns everybody's answers."""
        for x in self.processes:
            assert x.stdin is not None
            x.stdin.write(json.dumps(question) + "\n")
            x.stdin.flush()
        answers = [x.stdout.readline() for x in self.processes if x.stdout is not None]
        if not all(answers):
            raise SystemExit(f"expected every process to answer; number {answers.index('')} ended. See above.")
        return [json.loads(x) for x in answers]
