"""Examples of the adapters: in docstrings, of every public name, and on their pages."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re

import pytest
from conftest import FULL, ROOT

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels

FLASH = ["flash_attn", *[f"flash_attn.{x}" for x in ("bert_padding", "installing", "interface", "v3", "v4")]]
MODELS = [f"transformers.{x}" for x in ("attending", "caches", "masks", "registering")]
MODULES = ["adapting", *FLASH, "jax", "onnx", "onnx.operators", *MODELS * FULL]
PAGES = {  # and what their code makes in the end
    "flash_attn": lambda made: (
        all([(made["out"] == made[x]).all() for x in ("same", "also")]) and (made["padded"][1, 2:] == 0).all()
    ),
    "jax": lambda made: made["dq"].shape == (2, 16, 8, 64),
    "onnx": lambda made: (made["out"] == made["same"]).all(),
    "transformers": lambda made: made["cache"].get_seq_length() > 20,
}


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"speedlight.{name}"), optionflags=doctest.REPORT_NDIFF)
    assert result.attempted > 0 and not result.failed


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn.v3", "flash_attn.v4", "jax", "onnx", "transformers"])
def test_every_public_name_has_an_example(name):
    module = importlib.import_module(f"speedlight.{name}")
    found = [getattr(module, x) for x in module.__all__]
    things = [x for x in found if inspect.isroutine(x) or inspect.isclass(x)]
    assert [x.__name__ for x in things if ">>>" not in (x.__doc__ or "") and x.__name__ != "unregister"] == []


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # the one name that 5.23 and 5.24 take
@pytest.mark.parametrize("page", PAGES)
def test_pages(page):
    made: dict = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL):
        exec(code.replace("512", "16"), made)
    assert PAGES[page](made)
