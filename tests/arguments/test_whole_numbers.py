"""Whole numbers as arguments: Python's, NumPy's, arrays and tensors of one, at every public call that takes them."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch

import speedlight as sl
import speedlight.torch
from speedlight import flash_attn

KINDS = {
    "int64": np.int64,
    "uint16": np.uint16,
    "array": np.array,
    "array of int32": lambda n: np.array(n, np.int32),
    "tensor": torch.tensor,
    "tensor of int32": lambda n: torch.tensor(n, dtype=torch.int32),
}
WRONG = {
    "bool": bool,
    "NumPy's bool": np.bool_,
    "array of a bool": lambda n: np.array(bool(n)),
    "tensor of a bool": lambda n: torch.tensor(bool(n)),
    "float": float,
    "NumPy's float": np.float64,
    "array of a float": lambda n: np.array(float(n)),
    "tensor of a float": lambda n: torch.tensor(float(n)),
    "masked": lambda n: np.ma.array(n, mask=True),
    "span of time": lambda n: np.timedelta64(n, "D"),
    "text": str,
}

RNG = np.random.default_rng(5)
Q, K = (RNG.standard_normal((2, 2, n, 8), dtype=np.float32) for n in (3, 4))
PACKED, PAGES = (RNG.standard_normal(shape, dtype=np.float32) for shape in ((5, 2, 8), (3, 4, 2, 8)))
SIZES = {"layers": 2, "batch": 2, "kv_heads": 2, "head_dim": 8, "capacity": 64}
POOL = {"layers": 1, "pages": 4, "page_size": 16, "kv_heads": 2, "head_dim": 8}


def options(n):
    """Of attention() and its like: (arrays, options) by the names of those that hold whole numbers."""
    two = {"cu_seqlens_q": [0, n(2), n(5)], "cu_seqlens_k": [n(0), n(2), n(5)], "layout": "lhd"}
    return {
        "q_start": ((Q, K, K), {"q_start": n(1), "causal": True}),
        "q_start, several": ((Q, K, K), {"q_start": [n(1), n(2)], "causal": True}),
        "k_start": ((Q, K, K), {"k_start": n(1024), "q_start": 1025, "causal": True}),
        "window": ((Q, K, K), {"window": (n(1), n(0))}),
        "cu_seqlens_q": ((PACKED, PACKED, PACKED), two),
        "cu_seqlens_k": ((PACKED, PACKED, PACKED), two),
        "lengths": ((Q, Q, Q), {"lengths": [n(2), n(3)]}),
        "q_lengths": ((Q, K, K), {"q_lengths": [n(2), n(3)]}),
        "k_lengths": ((Q, K, K), {"k_lengths": (n(4), n(2))}),
        "seed": ((Q, K, K), {"dropout": 0.5, "seed": n(7)}),
    }


def plain(given, more):
    return sl.attention(*given, **more, return_lse=True)


def backward(given, more):
    out, lse = sl.attention(*given, **more, return_lse=True)
    return sl.attention_backward(*given, out, lse, out, **more)


def weighed(given, more):
    _, lse = sl.attention(*given, **more, return_lse=True)
    return sl.key_weights(*given[:2], lse, **more)


def followed(given, more, attention=sl.attention):
    q, k, v = (torch.tensor(x, requires_grad=True) for x in given)
    out = attention(q, k, v, **more)
    out.square().sum().backward()
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)]


def transformed(given, more):
    q, k, v = map(torch.tensor, given)
    return torch.func.grad(lambda q: speedlight.torch.attention(q, k, v, **more).square().sum())(q)


DOORS = {
    "attention": plain,
    "attention, of tensors": lambda given, more: sl.attention(*map(torch.tensor, given), **more),
    "attention, followed": followed,
    "torch.attention": lambda given, more: speedlight.torch.attention(*map(torch.tensor, given), **more),
    "torch.attention, followed": lambda given, more: followed(given, more, speedlight.torch.attention),
    "torch.attention, transformed": transformed,
    "attention_backward": backward,
    "key_weights": weighed,
    "plan": lambda given, more: repr(sl.plan(*given, **more)),
}


def cache(n=int, **sizes):
    return sl.KVCache(**{name: n(x) for name, x in (SIZES | sizes).items()})


def stepped(n, what=lambda cache, n: None, **sizes):
    """A cache of three tokens, what is done to it, and its keys."""
    x = cache(n, **sizes)
    for layer in (0, 1):
        x.append(n(layer), Q, Q)
    return what(x, n), x.keys(n(0)), x.values(n(0)), x.lengths(n(1))


def paged(n, what=lambda pool, one, n: None):
    pool = sl.PagePool(**{name: n(x) for name, x in POOL.items()})
    one = pool.sequence()
    pool.append(n(0), [one], PACKED, PACKED)
    return what(pool, one, n), one.keys(n(0)), one.length(n(0))


def of_pages(n, **more):
    return sl.attention_paged(Q, PAGES, PAGES, [[0, 1], [2, 1]], [5, 4], **more)


def put_into_pages(n):
    pages, new = PAGES.copy(), Q.swapaxes(1, 2)
    sl.append_paged(pages, pages.copy(), [[0], [2]], [n(1), n(2)], new, new, new_lengths=[n(2), n(1)], layout="blhd")
    return pages


def drawn(n):
    """What is drawn of weights, and of tiles."""
    x = np.ones((2, 3, 9, 4), np.float32)
    figures = [sl.view(x, x, head=n(1), item=n(1), span=(n(2), n(5))), sl.view(sl.causal(), q_len=n(300), head=n(0))]
    return [(axes.get_title(), axes.get_xlim(), axes.get_ylim()) for figure in figures for axes in figure.axes]


def over_cache(n, **more):
    q, k = (torch.tensor(x.swapaxes(1, 2)) for x in (Q, K))
    return flash_attn.flash_attn_with_kvcache(q, k.contiguous(), k.contiguous(), **more)


def in_prompt(pool, tokens):
    sequence = pool.sequence(tokens=tokens)
    pool.attend(0, [sequence], PACKED, PACKED, PACKED, tokens=tokens)
    sequence.keep([0], start=4, tokens=tokens[:1])
    return sequence.tokens


# (the call, the parameters that it is about): of a converter of Python's ints
CALLS = {
    ("KVCache.__init__", "layers batch kv_heads head_dim capacity"): stepped,
    ("KVCache.__init__", "value_dim window keep_first"): lambda n: stepped(n, value_dim=8, window=4, keep_first=2),
    ("KVCache.attend", "seed"): lambda n: cache().attend(0, Q, Q, Q, dropout=0.5, seed=n(3)),
    ("KVCache.attend", "new_lengths"): lambda n: cache().attend(n(1), Q, Q, Q, new_lengths=[n(2), n(3)]),
    ("KVCache.attend", "layer q_lengths"): lambda n: cache().attend(n(1), Q, Q, Q, q_lengths=[n(2), n(1)]),
    ("KVCache.append KVCache.keys KVCache.values KVCache.lengths", "layer"): stepped,
    ("KVCache.length", "layer item"): lambda n: cache().length(n(1), n(1)),
    ("KVCache.keep", "start"): lambda n: stepped(n, lambda x, n: x.keep([n(0), n(1)], start=n(1))),
    ("KVCache.keep", "start, several"): lambda n: stepped(n, lambda x, n: x.keep([[n(0)], []], start=[n(1), n(2)])),
    ("KVCache.roll_back", "layer lengths"): lambda n: stepped(n, lambda x, n: x.roll_back(n(0), [n(2), n(1)])),
    ("KVCache.truncate", "length"): lambda n: stepped(n, lambda x, n: x.truncate(n(2))),
    ("KVCache.truncate", "length, several"): lambda n: stepped(n, lambda x, n: x.truncate([n(2), n(1)])),
    ("KVCache.select", "batch_indices"): lambda n: stepped(n, lambda x, n: x.select([n(1), n(0)]).keys(0)),
    ("PagePool.__init__", "layers pages page_size kv_heads head_dim"): paged,
    ("PagePool.__init__", "value_dim"): lambda n: sl.PagePool(**POOL, value_dim=n(16)).value_dim,
    ("PagePool.append PagedSequence.keys PagedSequence.values PagedSequence.length", "layer"): paged,
    ("PagePool.attend", "layer seed"): lambda n: paged(
        n, lambda pool, one, n: pool.attend(n(0), [one], PACKED, PACKED, PACKED, dropout=0.5, seed=n(3))
    ),
    ("PagePool.attend", "new_lengths q_lengths"): lambda n: paged(
        n, lambda pool, one, n: pool.attend(0, [one], PACKED, PACKED, PACKED, new_lengths=[n(5)], q_lengths=[n(5)])
    ),
    ("PagePool.sequence PagePool.attend PagedSequence.keep", "tokens"): lambda n: paged(
        n, lambda pool, one, n: in_prompt(pool, [n(5)] * 5)
    ),
    ("PagedSequence.keep", "start"): lambda n: paged(n, lambda pool, one, n: one.keep([n(1)], start=n(2))),
    ("PagedSequence.truncate", "length"): lambda n: paged(n, lambda pool, one, n: one.truncate(n(2))),
    ("view", "head item span q_len"): drawn,
    ("append_paged", "k_lengths new_lengths"): put_into_pages,
    ("key_weights", "rows"): lambda n: sl.key_weights(Q, K, np.zeros(Q.shape[:3], np.float32), rows=[n(1), n(2)]),
    ("attention", "value_dim"): lambda n: sl.attention(Q, K, None, value_dim=n(3)),
    ("attention_backward", "value_dim"): lambda n: sl.attention_backward(
        Q, K, None, Q[..., :3], np.zeros(Q.shape[:3], np.float32), Q[..., :3], value_dim=n(3)
    ),
    ("attention_paged", "value_dim"): lambda n: sl.attention_paged(
        Q, PAGES, None, [[0, 1], [2, 1]], [5, 4], value_dim=n(3)
    ),
    ("attention_paged", "q_start"): lambda n: of_pages(n, q_start=n(1), causal=True),
    ("attention_paged", "seed"): lambda n: of_pages(n, dropout=0.5, seed=n(3)),
    ("attention_paged", "q_lengths"): lambda n: of_pages(n, q_lengths=[n(2), n(3)]),
    ("attention_paged", "k_lengths cu_seqlens_q"): lambda n: sl.attention_paged(
        PACKED, PAGES, PAGES, [[0, 1], [2, 1]], [n(5), n(4)], layout="lhd", cu_seqlens_q=[0, n(2), n(5)]
    ),
    ("plan", "batch q_heads kv_heads q_len k_len head_dim value_dim ranks"): lambda n: repr(
        sl.plan(
            batch=n(2), q_heads=n(4), kv_heads=n(2), q_len=n(9), k_len=n(11), head_dim=n(8), value_dim=n(16), ranks=n(1)
        )
    ),
    ("plan", "threads"): lambda n: repr(sl.plan(q_heads=4, q_len=9, head_dim=8, threads=n(2))),
    ("plan", "shared_prefix"): lambda n: repr(
        sl.plan(batch=2, q_heads=4, q_len=1, k_len=9, head_dim=8, shared_prefix=n(5))
    ),
    ("dilated", "k"): lambda n: repr(sl.dilated(n(2))),
    ("prefix", "n"): lambda n: repr(sl.prefix(n(2))),
    ("window", "left right"): lambda n: repr(sl.window(n(2), n(1))),
    ("rotary", "positions dims"): lambda n: sl.rotary(Q, positions=n(3), dims=n(4)),
    ("set_threads", "n"): lambda n: sl.set_threads(n(sl.get_threads())),
    ("Attention.__init__", "dim heads kv_heads head_dim context_dim window rotary_dims layer"): lambda n: repr(
        speedlight.torch.Attention(
            dim=n(16),
            heads=n(2),
            kv_heads=n(2),
            head_dim=n(8),
            context_dim=n(16),
            causal=True,
            window=n(4),
            rotary=1e4,
            rotary_dims=n(4),
            layer=n(1),
        )
    ),
    ("flash_attn_func", "window_size"): lambda n: flash_attn.flash_attn_func(
        *[torch.tensor(Q)] * 3, window_size=(n(1), n(0))
    ),
    ("flash_attn_with_kvcache", "cache_seqlens"): lambda n: over_cache(n, cache_seqlens=n(3)),
    ("keep_mask", "seed b h"): lambda n: sl.reference.keep_mask(0.5, n(3), n(1), n(1), [n(0), n(2)], [n(1)]),
}
for _door, _run in DOORS.items():
    for _name in options(int):
        if (_door, _name) == ("key_weights", "seed"):  # which drops nothing
            continue
        CALLS[_door, _name] = lambda n, run=_run, name=_name: run(*options(n)[name])


def flat(x):
    """Every array and number of a result, as bytes or text."""
    if isinstance(x, (list, tuple)):
        return [y for one in x for y in flat(one)]
    return [x.tobytes() if isinstance(x, np.ndarray) else x.numpy().tobytes() if torch.is_tensor(x) else repr(x)]


@pytest.fixture(autouse=True)
def _same_threads():
    yield
    sl.set_threads(None)


@pytest.mark.parametrize("call", CALLS.values(), ids=map(" ".join, CALLS))
def test_whole_numbers_of_any_library_are_taken(call):
    expected = flat(call(int))
    taken = {name: flat(call(kind)) == expected for name, kind in KINDS.items()}
    assert taken == dict.fromkeys(KINDS, True)


def test_those_of_jax_are_taken():
    jax = pytest.importorskip("jax.numpy")
    for call in CALLS.values():
        assert flat(call(jax.asarray)) == flat(call(int))


@pytest.mark.parametrize("array", [np.array, torch.tensor])
@pytest.mark.parametrize("sizes", [{}, {"window": 16, "keep_first": 2}])
def test_arrays_of_one_are_taken_as_sizes(array, sizes):
    """NumPy makes an int of no array that has dimensions."""
    given = SIZES | sizes
    kept = sl.KVCache(**{name: array([n]) for name, n in given.items()})
    assert repr(kept) == repr(sl.KVCache(**given))


@pytest.mark.parametrize("call", CALLS, ids=map(" ".join, CALLS))
def test_what_is_none_is_refused_by_name(call):
    names = {name for _, several in CALLS for name in re.findall(r"\w+", several)} | {"indices"}
    for name, kind in WRONG.items():
        with pytest.raises(sl.ArgumentTypeError) as refused:
            CALLS[call](kind)
        assert str(refused.value).split(":")[0] in names, name


@pytest.mark.parametrize("name", options(int))
def test_a_pass_back_reads_them_as_the_call_did(name):
    """Arrays and tensors of one may be written to between the two."""
    expected, held = flat(followed(*options(int)[name])), []
    given, more = options(lambda n: held.append(np.array(n)) or held[-1])[name]
    q, k, v = (torch.tensor(x, requires_grad=True) for x in given)
    out = sl.attention(q, k, v, **more)
    for x in held:
        x[...] = 3
    out.square().sum().backward()
    assert flat([x.detach().numpy() for x in (out, q.grad, k.grad, v.grad)]) == expected


UNASKED = ("KVCache.compute",)  # attend(), which is asked, with its options in one


def test_every_argument_that_is_one_is_asked():
    """By the types that signatures tell."""
    owners = [(name, getattr(sl, name)) for name in sl.__all__ if not issubclass_of(name, (Exception, tuple))]
    owners += [("attention", speedlight.torch.attention), ("Attention", speedlight.torch.Attention)]
    missing = []
    for owner, x in owners:
        for name, function in methods(owner, x):
            for parameter, of in inspect.signature(function).parameters.items():
                if name in UNASKED:
                    continue
                if re.search(r"\b(Int|Ints|int)\b", str(of.annotation)) and not is_asked(name, parameter):
                    missing.append((name, parameter))
    assert not missing


def issubclass_of(name, kinds):
    x = getattr(sl, name)
    return inspect.isclass(x) and (issubclass(x, kinds) or name in ("Expression", "Plan", "Table"))


def methods(owner, x):
    if not inspect.isclass(x):
        return [(owner, x)] if inspect.isfunction(x) else []
    shown = [(name, y) for name, y in vars(x).items() if name == "__init__" or not name.startswith("_")]
    return [(f"{owner}.{name}", y) for name, y in shown if inspect.isfunction(y)]


def is_asked(function, parameter):
    return any(function in re.findall(r"[\w.]+", of) and parameter in re.findall(r"\w+", names) for of, names in CALLS)
