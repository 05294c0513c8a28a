"""Public names: what `import *` takes, what help() and signatures show, and what type checkers are told of them; the
types themselves are tested by pyright, in tests/typing.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
import typing

import numpy as np
import problems
import pytest
import torch
from conftest import ROOT

import speedlight as sl
import speedlight.errors
import speedlight.torch
from speedlight.arrays.dtypes import CODES, DTYPES, SPELLINGS
from speedlight.problem import options as of_problem
from speedlight.problem.problem import LAYOUTS

PUBLIC = [name for name in dir(sl) if not name.startswith("__")]
OVERLOADED = [
    sl.attention, sl.attention_paged, sl.attention_backward, sl.KVCache.attend, sl.PagePool.attend,
    speedlight.torch.attention, speedlight.torch.flex_attention,
]  # fmt: skip


def test_everything_imported_hides_no_name_of_pythons():
    names: dict = {}
    exec("from speedlight import *", names)
    assert set(sl.__all__) <= set(names)
    assert not set(sl.__all__) & {*dir(builtins)}
    assert not hasattr(sl, "Sequence"), "PagedSequence has one name"
    assert set(sl.__all__) | {"abs"} == set(dir(sl))


def test_help_begins_with_every_name_in_order_of_use():
    page = pydoc.render_doc(sl, renderer=pydoc.plaintext)
    first = page[: page.index("PACKAGE CONTENTS")]
    listed = re.findall(r"^ {8}(\w+(?:, \w+)*)(?:  |,?$)", first, re.MULTILINE)
    names = [name for row in listed for name in row.split(", ")]
    assert names[:2] == ["attention", "plan"]
    assert sorted(names) == sorted(PUBLIC)


def test_help_of_a_cache_is_the_caches():
    page = pydoc.render_doc(sl.KVCache, renderer=pydoc.plaintext)
    assert "KVCache(*, layers: 'int', batch: 'int' = 1, kv_heads: 'int', head_dim: 'int'" in page
    assert type(sl.KVCache(layers=1, kv_heads=1, head_dim=8, capacity=16)) is sl.KVCache


@pytest.mark.parametrize("name", [*PUBLIC, *(f"torch.{name}" for name in speedlight.torch.__all__)])
def test_a_signature_is_whole(name):
    """inspect.signature() shows a function's own, with types that can be looked up where it was written."""
    thing = sl
    for part in name.split("."):
        thing = getattr(thing, part)
    if isinstance(thing, type) and issubclass(thing, (Exception, dict)):
        return
    functions = [thing] if inspect.isroutine(thing) else []
    if isinstance(thing, type) and thing.__module__.startswith("speedlight"):
        shown = [x for key, x in vars(thing).items() if key == "__init__" or not key.startswith("_")]
        functions = [x for x in shown if inspect.isfunction(x)]
    for function in functions:
        kinds = {x.kind for x in inspect.signature(function).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        assert "return" in typing.get_type_hints(function)


@pytest.mark.parametrize("function", OVERLOADED, ids=lambda x: f"{x.__module__}.{x.__qualname__}")
@pytest.mark.skipif(not hasattr(typing, "get_overloads"), reason="Python 3.10 forgets them")
def test_overloads_offer_what_the_signature_does(function):
    own, hints = inspect.signature(function).parameters, typing.get_type_hints(function)
    overloads = typing.get_overloads(function)
    assert len(overloads) >= 2
    for overload in overloads:
        given = dict(inspect.signature(overload).parameters)
        names, options = set(given) - {"options"}, {}
        if "options" in given:
            kind = getattr(of_problem, re.fullmatch(r"Unpack\[(\w+)\]", given["options"].annotation)[1])
            assert not kind.__required_keys__
            options = typing.get_type_hints(kind)
        assert not names & set(options) and names | set(options) == set(own)
        assert {name: hints[name] for name in options} == options
        for name in names - {"return_lse", "return_aux", "grads"}:
            assert given[name].default == own[name].default


def test_words_are_those_that_are_taken():
    assert set(LAYOUTS) <= set(typing.get_args(of_problem.Layout))
    name, spelling, *_ = typing.get_args(of_problem.Dtype)
    assert typing.get_args(of_problem.DtypeName) == typing.get_args(name) == (*DTYPES, *CODES)
    assert set(DTYPES) == set(problems.DTYPES) and tuple(CODES) == problems.CODES
    assert typing.get_args(spelling) == tuple(SPELLINGS)
    sizes = {"q_heads": 1, "q_len": 1, "head_dim": 8}
    for name in ("layout", "causal", "precision"):
        kind = getattr(of_problem, name.capitalize())
        words = [x for y in (kind, *typing.get_args(kind)) for x in typing.get_args(y) if isinstance(x, str)]
        assert words
        for word in words:
            sl.plan(**sizes, **{name: word})
        with pytest.raises(sl.ArgumentError, match=rf"^{name}: "):
            sl.plan(**sizes, **{name: "neither"})


def test_types_need_no_other_library():
    """A type checker that has no PyTorch would call what its types are in an unknown: rooms that are about another
    library import it at once, no other does.
    """
    package, rooms = ROOT / "speedlight", set()
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text())
        blocks = [tree.body, *(x.body for x in tree.body if isinstance(x, ast.If))]
        imports = [ast.unparse(x) for body in blocks for x in body if isinstance(x, (ast.Import, ast.ImportFrom))]
        if [x for x in imports if re.match(r"(from|import) (torch|jax)", x)]:
            rooms.add(path.relative_to(package).parts[0])
    assert rooms == {
        "autograd",
        "distributed",
        "flash_attn",
        "flash_mla.py",
        "gpu",
        "jax",
        "tools",
        "torch",
        "transformers",
    }


def test_errors_say_where_users_find_them():
    """In tracebacks and pickles: in speedlight.errors, wherever their module stands."""
    errors = [x for x in vars(speedlight.errors).values() if isinstance(x, type) and issubclass(x, sl.Error)]
    assert len(errors) == 11
    for error in errors:
        assert f"{error.__module__}.{error.__qualname__}" == f"speedlight.errors.{error.__name__}"
        assert type(pickle.loads(pickle.dumps(error("why")))) is error


def test_what_a_call_itself_raises_stays():
    """A TypeError from within, of a user's function or a library, is none of arguments that do not fit."""
    q = np.zeros((2, 4, 6, 8), np.float32)

    class Odd:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **_):
            raise TypeError("my own")

    with pytest.raises(TypeError, match="my own"):
        sl.attention(Odd(), q, q)

    def mask(b, h, i, j):
        return len(5) == 3

    with pytest.raises(TypeError, match=r"object of type 'int' has no len\(\)"):
        sl.attention(q, q, q, mask=mask)
    missing = r"^v: expected an argument of attention\(\); got none\. Write v=…\.$"
    with pytest.raises(sl.ArgumentTypeError, match=missing):
        sl.attention(q, q)
    with pytest.raises(TypeError, match="takes 0 positional arguments"):
        sl.synchronize(1)


@pytest.mark.parametrize("name", ["q_lengths", "k_lengths"])
@pytest.mark.parametrize("wrong", [[6], 3, "a"])
def test_lengths_that_are_none_are_not_what_is_wrong(name, wrong):
    """Who passes on every option gives None for most."""
    q = np.zeros((2, 4, 6, 8), np.float32)
    with pytest.raises(sl.Error, match=f"^{name}: expected"):
        sl.attention(q, q, q, lengths=None, **{name: wrong})


@pytest.mark.parametrize(
    ("library", "line", "extra"),
    [
        ("torch", "from speedlight.torch import sdpa", "torch"),
        ("torch", "from speedlight.flash_attn import flash_attn_func", "torch"),
        ("transformers", "from speedlight.transformers import Cache", "transformers"),
        ("jax", "import speedlight.jax", "jax"),
        ("onnx", "import speedlight.onnx", "onnx"),
    ],
)
def test_a_missing_library_is_named_with_what_installs_it(library, line, extra):
    """Adapters are imported where their library is not."""
    code = f"import sys; sys.modules[{library!r}] = None; {line}"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 1
    last = told.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: speedlight.") and f"needs {library} (" in last
    assert speedlight.errors.how_to_install(extra) in last


def test_ways_out_of_what_strangers_write():
    """Lengths for offsets, two kinds of arrays, a truth of NumPy, FlexAttention's blocks."""
    from torch.nn.attention.flex_attention import create_block_mask

    packed, q = np.zeros((10, 4, 8), np.float32), np.zeros((2, 4, 6, 8), np.float32)
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6, "cpu")
    tensor = torch.from_numpy(q)
    for call, way in (
        (lambda: sl.attention(packed, packed, packed, layout="lhd", cu_seqlens_q=[4, 6]), "cumsum([0, *lengths])."),
        (lambda: sl.attention(tensor, q, q), "Write torch.as_tensor(k)."),
        (lambda: sl.attention(q, tensor, tensor), "Write torch.as_tensor(q)."),
        (lambda: sl.attention(q, q, q, causal=np.True_), "Write causal=True."),
        (lambda: sl.attention(q, q, q, mask=blocks), "mask=block_mask.mask_mod, beside q_start=0."),
    ):
        with pytest.raises(sl.Error) as error:
            call()
        assert str(error.value).endswith(way), str(error.value)
    with pytest.raises(sl.ArgumentError, match=r"got 0 … 6\.$"):  # offsets of something shorter are no lengths
        sl.attention(packed, packed, packed, layout="lhd", cu_seqlens_q=[0, 6])
