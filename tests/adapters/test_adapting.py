"""Tables of what adapters ignore and refuse agree with their signatures, and docs/api-adapters.md shows them.

`python tests/adapters/test_adapting.py` writes the page.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import speedlight as sl
import speedlight.flash_attn as fa
import speedlight.jax
from speedlight.adapting import Library, add_distances, limits, rows_in_use
from speedlight.flash_attn import v3, v4
from speedlight.flash_attn.options import V2, V3, V4
from speedlight.flash_mla import FLASH_MLA, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from speedlight.jax import JAX
from speedlight.onnx import grouped, operators
from speedlight.torch.dot_product import TORCH
from speedlight.transformers.attending import attention_forward
from speedlight.transformers.options import TRANSFORMERS

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels

PAGE = Path(__file__).parents[2] / "docs" / "api-adapters.md"
FAQ = PAGE.with_name("faq.md")
HEADING = "## What is ignored, and what is refused\n"
# of each library its calls
CALLS = {
    TORCH: [speedlight.torch.scaled_dot_product_attention],
    V2: [getattr(fa, name) for name in (*fa.__all__, "_flash_attn_varlen_forward") if "flash_attn_" in name],
    V3: [getattr(v3, name) for name in v3.__all__],
    V4: [getattr(v4, name) for name in v4.__all__ if name[0] == "f"],
    FLASH_MLA: [flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata],
    TRANSFORMERS: [attention_forward],
    JAX: [speedlight.jax.dot_product_attention],
    operators.ATTENTION: [operators.Attention._run],
    operators.ROTARY: [operators.RotaryEmbedding._run],
    grouped.GROUPED: [grouped.GroupQueryAttention._run],
}
ADVICE = "try its adapter's tests, then say so in its Library's `tested` and in docs/faq.md"


@pytest.mark.parametrize("library", [TORCH, TRANSFORMERS, JAX], ids=lambda x: x.name)
def test_documents_name_the_release_at_hand(library):
    """With the newest releases, too: a page that says less than what was run is out of date, and this fails."""
    release = importlib.metadata.version(library.name)
    first, last = (tuple(map(int, x.split("."))) for x in library.tested)
    assert first <= tuple(map(int, release.split(".")[:2])) <= last, f"{library.name} {release}: {ADVICE}"
    row = re.search(rf"^\| {library.name} \| (.*) \|$", FAQ.read_text(), re.MULTILINE | re.IGNORECASE)
    assert row is not None and {".".join(x.split(".")[:2]) for x in row[1].split(", ")} >= set(library.tested)


LIBRARIES = pytest.mark.parametrize("library", CALLS, ids=lambda x: x.name)


def table() -> str:
    """Returns the section of the page."""
    rows = ["| library | tested | changes no result | refused |", "|---|---|---|---|"]
    for x in CALLS:
        tested = "" if x.tested is None else " to ".join(dict.fromkeys(x.tested))
        ignored = ", ".join(f"`{name}`" for name in x.ignored)
        ways = dict.fromkeys(x.refused.values())
        names = {way: ", ".join(f"`{name}`" for name in x.refused if x.refused[name] == way) for way in ways}
        refused = " ".join(f"{names[way]}: {way}" for way in ways)
        if ignored or refused:
            rows.append(f"| {x.name} | {tested} | {ignored} | {refused} |")
    return "\n".join(["", "Rows come from the adapters' tables (`speedlight.adapting.Library`).", "", *rows, "", ""])


def written(page: str) -> str:
    before, _, rest = page.partition(HEADING)
    return before + HEADING + table() + rest[rest.index("\n## ") + 1 :]


def test_the_page_has_the_tables():
    assert written(PAGE.read_text()) == PAGE.read_text(), f"run python {Path(__file__).name}"


def unused(call) -> set[str]:
    """Returns the parameters of a call that nothing in it reads."""
    function = inspect.unwrap(call)
    [tree] = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function))).body
    read = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
    return {name for name in inspect.signature(function).parameters if name not in read}


@LIBRARIES
def test_what_nothing_reads_is_said_to_change_nothing(library):
    calls = CALLS[library]
    names = {name for call in calls for name in inspect.signature(call).parameters}
    more = set(TRANSFORMERS.ignored) | set(TRANSFORMERS.refused) if library is TRANSFORMERS else set()
    assert {*library.ignored, *library.refused} <= names | more
    assert {x for call in calls for x in unused(call)} <= {*library.ignored, "given", "self", "theirs"}


@pytest.mark.parametrize("library", [x for x in CALLS if x.refused], ids=lambda x: x.name)
def test_what_is_refused_is_named_with_a_way_out(library):
    library.refuse(**dict.fromkeys(library.refused))
    for name, way in library.refused.items():
        with pytest.raises(sl.UnsupportedError) as error:
            library.refuse(**{name: np.ones(2)})
        assert str(error.value) == f"{name}: expected None; got ndarray. {way}"


def test_the_recipe():
    """docs/architecture.md has an adapter whole."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.with_name("architecture.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    attend, q = names["scaled_dot_product_attention"], torch.randn(1, 2, 5, 8)
    assert torch.equal(attend(q, q, q, scale=0.5, mask="causal"), sl.attention(q, q, q, scale=0.5, causal=True))
    for name, mask in (("score", torch.eye(5)), ("mask", torch.eye(5) > 0)):
        assert torch.equal(attend(q, q, q, scale=0.5, mask=mask), sl.attention(q, q, q, scale=0.5, **{name: mask}))
    with pytest.raises(sl.UnsupportedError, match="^stream: expected None; got 'gpu'. A call runs where"):
        attend(q, q, q, scale=0.5, stream="gpu")
    with pytest.raises(sl.Error, match="^sinks: expected"):
        attend(q, q, q, scale=0.5, sinks=np.ones(3))


def test_no_limit_is_minus_one_elsewhere():
    assert limits(-1, -1) is limits(None, None) is None
    assert [limits(*x) for x in ((3, -1), (0, 2), (-7, 0))] == [(3, None), (0, 2), (None, 0)]


def test_distances_and_rows():
    q = torch.randn(2, 3, 5, 8)
    slopes = torch.tensor([0.5, 0.25, 1.0])
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    expected = sl.attention(q, q, q, score=-slopes[:, None, None] * distance)
    for given in (slopes, slopes.expand(2, 3)):
        torch.testing.assert_close(sl.attention(q, q, q, score=add_distances(given)), expected)
    assert rows_in_use([0, 4, 9], [2, 0, 3]).tolist() == [0, 1, 9, 10, 11] and not len(rows_in_use([], []))


def test_names_of_a_library():
    theirs = Library("theirs", names={"q": "query", "window": "window_size"})
    with pytest.raises(sl.ArgumentError, match="^query: expected"), theirs.renamed:
        sl.attention(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)))
    with pytest.raises(ZeroDivisionError, match="^division by zero"), theirs.renamed:
        1 / 0  # noqa: B018
    q = np.ones((1, 1, 2, 4), np.float32)
    with pytest.raises(sl.ArgumentTypeError, match="^window: expected"), Library("ours").renamed:
        sl.attention(q, q, q, window=3)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
