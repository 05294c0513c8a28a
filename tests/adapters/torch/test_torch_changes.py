"""What may change between two calls, against every door: the next call has the new numbers, or raises one error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tolerance import assert_equal

import speedlight as sl
import speedlight.torch
from speedlight import reference
from speedlight.arrays import torch_tensors
from speedlight.expressions.bounds import SCAN
from speedlight.problem import gradients

pytestmark = pytest.mark.usefixtures("one_kernel")
HEADS, LENGTH, DIM = 2, 6, 8
X = torch.randn(1, HEADS, LENGTH, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
QUERY, KEYS, VALUES = X, X.roll(1, 2), X.flip(2)


class Subject(NamedTuple):
    """Numbers that a mask or a score looks up."""

    make: Callable[[], torch.Tensor]
    options: Callable[[Any], dict[str, Any]]  # of a tensor, or of its numbers in NumPy's array


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).add(0.5).to(dtype)


def captured(x: Any) -> dict[str, Any]:
    return {"score": sl.expression(lambda s, b, h, i, j: s + x[h] * (j - i))}


def looked_up(x: Any) -> dict[str, Any]:
    of = sl.table(x)
    return {"score": sl.expression(lambda s, b, h, i, j: s * of[h, j])}


SUBJECTS = {
    "alibi": Subject(lambda: numbers(HEADS), lambda x: {"score": sl.alibi(x)}),
    "alibi of bfloat16": Subject(lambda: numbers(HEADS, dtype=torch.bfloat16), lambda x: {"score": sl.alibi(x)}),
    "distances": Subject(lambda: numbers(HEADS, 2 * LENGTH - 1), lambda x: {"score": sl.relative_bias(x)}),
    "cap": Subject(
        lambda: numbers(1)[0], lambda x: {"score": sl.softcap(x if x.ndim or torch.is_tensor(x) else x[()])}
    ),
    "large table": Subject(lambda: numbers(HEADS, 70_000), looked_up),
    "captured": Subject(lambda: numbers(HEADS), captured),
    "documents": Subject(lambda: torch.tensor([0, 0, 0, 1, 1, 1]), lambda x: {"mask": sl.documents(x)}),
    "bias": Subject(lambda: numbers(HEADS, LENGTH, LENGTH), lambda x: {"score": x}),
    "mask": Subject(lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), lambda x: {"mask": x}),
}


# --- doors: how a call of these options is made; each keeps what its library keeps from call to call


class Kept(torch.nn.Module):
    """A parameter, and the options that look it up, as a module of a model has them."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        x = subject.make()
        self.x = torch.nn.Parameter(x, requires_grad=x.is_floating_point())
        self.options = subject.options(self.x)


def call_plain(kept: Kept) -> Any:
    with torch.no_grad():
        return sl.attention(QUERY, KEYS, VALUES, **kept.options)


def call_recorded(kept: Kept) -> Any:
    return sl.attention(QUERY, KEYS, VALUES, **kept.options)


def call_torch(kept: Kept) -> Any:
    return speedlight.torch.attention(QUERY, KEYS, VALUES, **kept.options)


def call_arrays(kept: Kept) -> Any:
    with torch.no_grad():
        return sl.attention(*(x.numpy() for x in (QUERY, KEYS, VALUES)), **kept.options)


def call_reference(kept: Kept) -> Any:
    with torch.no_grad():
        return reference.attention(QUERY, KEYS, VALUES, **kept.options)


def call_paged(kept: Kept) -> Any:
    pages = (x.transpose(1, 2).contiguous() for x in (KEYS, VALUES))
    with torch.no_grad():
        return sl.attention_paged(QUERY, *pages, [[0]], [LENGTH], **kept.options)


def call_cache(kept: Kept) -> Any:
    """Twice the last token, which a cache forgets in between."""
    cache = sl.KVCache(layers=1, kv_heads=HEADS, head_dim=DIM, capacity=LENGTH, dtype="float64")
    with torch.no_grad():
        cache.append(0, KEYS[:, :, :-1], VALUES[:, :, :-1])
        for _ in range(2):
            out = cache.attend(0, *(x[:, :, -1:] for x in (QUERY, KEYS, VALUES)), **_last_row(kept.options))
            cache.truncate(LENGTH - 1)
    return out


def call_pool(kept: Kept) -> Any:
    pool = sl.PagePool(layers=1, kv_heads=HEADS, head_dim=DIM, pages=4, page_size=16, dtype="float64")
    sequence = pool.sequence()
    with torch.no_grad():
        pool.append(0, [sequence], *(x[0, :, :-1].transpose(0, 1) for x in (KEYS, VALUES)), new_lengths=[LENGTH - 1])
        last = (x[0, :, -1:].transpose(0, 1) for x in (QUERY, KEYS, VALUES))
        out = pool.attend(0, [sequence], *last, **_last_row(kept.options))
    return out.transpose(0, 1)[None]


def _last_row(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x[..., -1:, :] if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def call_backward(kept: Kept) -> Any:
    """Gradients that are asked for by hand, of a forward pass that is made anew."""
    with torch.no_grad():
        out, lse = sl.attention(QUERY, KEYS, VALUES, return_lse=True, **kept.options)
        return sl.attention_backward(QUERY, KEYS, VALUES, out, lse, torch.ones_like(out), **kept.options)[0]


def call_compiled(kept: Kept) -> Any:
    run = torch.compile(lambda: speedlight.torch.attention(QUERY, KEYS, VALUES, **kept.options), backend="eager")
    return run()


def call_layer(kept: Kept) -> Any:
    return _layer(kept)(QUERY.transpose(1, 2).flatten(2), mask=kept.options.get("mask"))


def call_layer_with_cache(kept: Kept) -> Any:
    cache = sl.KVCache(layers=1, kv_heads=HEADS, head_dim=DIM, capacity=LENGTH, dtype="float64")
    with torch.no_grad():
        layer = _layer(kept, causal=True)
        return layer(QUERY.transpose(1, 2).flatten(2), mask=kept.options.get("mask"), cache=cache)


def _layer(kept: Kept, causal: bool = False) -> Any:
    """A layer whose projections change nothing: kept beside the parameter, as a model has it."""
    layer = getattr(kept, "layer", None)
    if layer is None:
        size = HEADS * DIM
        score = kept.options.get("score")
        layer = speedlight.torch.Attention(size, HEADS, score=score, causal=causal, dtype=torch.float64)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
            torch.nn.init.eye_(projection.weight)
        kept.layer = layer
    return layer


def call_flex(kept: Kept) -> Any:
    score, mask = kept.options.get("score"), kept.options.get("mask")
    block = None
    if mask is not None:  # with every block listed, so that the function alone says what is seen
        one = torch.ones(1, 1, 1, dtype=torch.int32)
        from_blocks = torch.nn.attention.flex_attention.BlockMask.from_kv_blocks
        block = from_blocks(one, one[..., None] - 1, mask_mod=mask, seq_lengths=(LENGTH, LENGTH))
    return speedlight.torch.flex_attention(QUERY, KEYS, VALUES, score, block)


def call_sdpa(kept: Kept) -> Any:
    bias = kept.options.get("score", kept.options.get("mask"))
    return speedlight.torch.scaled_dot_product_attention(QUERY, KEYS, VALUES, bias)


def call_transformers(kept: Kept) -> Any:
    transformers = pytest.importorskip("speedlight.transformers")
    transformers.register()
    attend = pytest.importorskip("transformers").modeling_utils.ALL_ATTENTION_FUNCTIONS["speedlight"]
    bias = kept.options.get("score", kept.options.get("mask"))
    return attend(torch.nn.Module(), QUERY, KEYS, VALUES, bias.view(1, -1, LENGTH, LENGTH))[0].transpose(1, 2)


def call_jax(kept: Kept) -> Any:
    jax = pytest.importorskip("speedlight.jax")
    q, k, v = (x.transpose(1, 2).float().numpy() for x in (QUERY, KEYS, VALUES))
    bias = kept.options.get("score", kept.options.get("mask")).detach().numpy()
    name = "bias" if "score" in kept.options else "mask"
    given = {name: bias.astype(np.float32) if name == "bias" else bias}
    return np.asarray(jax.dot_product_attention(q, k, v, **given)).swapaxes(1, 2)


ANY = {
    "sl.attention without gradients": call_plain,
    "sl.attention": call_recorded,
    "sl.attention of arrays": call_arrays,
    "speedlight.torch.attention": call_torch,
    "reference": call_reference,
    "attention_paged": call_paged,
    "KVCache": call_cache,
    "PagePool": call_pool,
    "attention_backward": call_backward,
    "torch.compile": call_compiled,
    "Attention": call_layer,
    "Attention with a cache": call_layer_with_cache,
}
FUNCTIONS = {"flex_attention": call_flex}
DENSE = {"scaled_dot_product_attention": call_sdpa, "transformers": call_transformers, "jax": call_jax}
DOORS = ANY | FUNCTIONS | DENSE


def is_open(door: str, subject: str) -> bool:
    """Returns whether a door takes such options."""
    dense = subject in ("bias", "mask")
    if dense and door in ("Attention with a cache", "PagePool", *FUNCTIONS):
        return False
    return dense or door not in DENSE


# --- changes


def step(kept: Kept) -> None:
    """An optimizer's step."""
    kept.x.grad = -torch.ones_like(kept.x)
    torch.optim.SGD([kept.x], lr=0.25).step()
    kept.x.grad = None


def load(kept: Kept) -> None:
    kept.load_state_dict({**kept.state_dict(), "x": _others(kept.x)})


def write(kept: Kept) -> None:
    with torch.no_grad():
        kept.x.copy_(_others(kept.x))


def write_data(kept: Kept) -> None:
    kept.x.data.copy_(_others(kept.x))


def move(kept: Kept) -> None:
    kept.x.data = _others(kept.x)


def set_(kept: Kept) -> None:
    with torch.no_grad():
        kept.x.set_(_others(kept.x))


def share(kept: Kept) -> None:
    """Its memory is another one from then on, which other processes see, too."""
    kept.share_memory()
    kept.x.data.copy_(_others(kept.x))


def _others(x: torch.Tensor) -> torch.Tensor:
    """Other numbers of the same kind."""
    if x.dtype is torch.bool:
        return x.detach().logical_not() | torch.eye(LENGTH, dtype=torch.bool)
    return x.detach().flip(-1) if x.ndim and not x.is_floating_point() else x.detach().flip(list(range(x.ndim))) + 1


CHANGES = {f.__name__: f for f in (step, load, write, write_data, move, set_, share)}


def check(door: str, kept: Kept, subject: Subject) -> None:
    """Compares a call, and the same again, with the reference over a copy of the numbers."""
    now = kept.x.detach().clone()
    options = subject.options(now.double().numpy() if now.is_floating_point() else now.numpy())
    with torch.no_grad():
        q, k, v = (QUERY,) * 3 if door.startswith("Attention") else (QUERY, KEYS, VALUES)
        causal = {"causal": "cache" in door}
        if door == "attention_backward":
            arrays = q.numpy(), k.numpy(), v.numpy()
            out, lse = reference.attention(*arrays, return_lse=True, **options)
            want = reference.backward(*arrays, out, lse, np.ones_like(out), **options)[0]
        else:
            want = reference.attention(q, k, v, **causal, **options)
    if door in ("KVCache", "PagePool"):
        want = want[:, :, -1:]
    if door.startswith("Attention"):
        want = want.swapaxes(1, 2).reshape(1, LENGTH, -1)
    for _ in range(2):
        got = DOORS[door](kept)
        if door == "jax":
            assert np.allclose(got, want, atol=1e-5)
        else:
            assert_equal(got, want, door)


@pytest.mark.each("door", "name", "change")
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("change", CHANGES)
def test_the_next_call_has_the_new_numbers(door, name, change):
    if not is_open(door, name):
        pytest.skip(f"{door} takes no {name}")
    subject = SUBJECTS[name]
    kept = Kept(subject)
    if change == "step" and not kept.x.is_floating_point():
        pytest.skip("an optimizer trains floats")
    check(door, kept, subject)
    before = kept.x.detach().clone()
    for _ in range(2):
        CHANGES[change](kept)
        assert not torch.equal(before, kept.x)
        before = kept.x.detach().clone()
        check(door, kept, subject)


@pytest.mark.each("door", "name")
@pytest.mark.parametrize("name", [x for x in SUBJECTS if x not in ("bias", "mask")])
@pytest.mark.parametrize("door", [*ANY, *FUNCTIONS])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copied_module_follows_its_own_numbers(door, name, way):
    kept = Kept(SUBJECTS[name])
    check(door, kept, SUBJECTS[name])
    other = way(kept)
    write_data(kept)
    for module in (kept, other):
        check(door, module, SUBJECTS[name])
    move(other)
    for module in (kept, other):
        check(door, module, SUBJECTS[name])


WRITES = {f.__name__: f for f in (step, write, write_data, move)}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["alibi", "large table", "captured", "distances"])
def test_backward_has_what_forward_read_or_refuses(name, write):
    """A write between them is an error, also one that has no version; the same numbers written again are none."""
    kept = Kept(SUBJECTS[name])
    q = QUERY.clone().requires_grad_()
    out = speedlight.torch.attention(q, KEYS, VALUES, **kept.options)
    kept.x.data.copy_(kept.x.detach().clone())
    out.sum().backward(retain_graph=True)
    want = q.grad.clone()
    WRITES[write](kept)
    with pytest.raises((sl.ArgumentError, RuntimeError), match="written to since|modified by an inplace operation"):
        out.sum().backward()
    assert torch.equal(q.grad, want)


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_backward_sees_writes_behind_the_last_whole_block(kind):
    """Of many numbers sums of blocks are compared; what is left over is compared itself."""
    size = (gradients._EXACT + gradients._BLOCK) // 4 + 3
    table = np.zeros(size, np.float32)
    if kind == "tensor":
        table = torch.from_numpy(table)
    score = sl.expression(lambda s, b, h, i, j: s + table[size - 1 - j])
    q = QUERY.clone().requires_grad_()
    for at in (size - 1, size - 3):
        out = speedlight.torch.attention(q, KEYS, VALUES, score=score)
        out.sum().backward(retain_graph=True)
        (table.data if kind == "tensor" else table)[at] += 1
        with pytest.raises(sl.ArgumentError, match="written to since"):
            out.sum().backward()


def test_the_ends_of_integers_are_those_of_each_call():
    """Kernels skip tiles by a table's least and greatest entry, which must not be those of an earlier call."""
    n, size = 40, SCAN + 1  # fewer entries are looked at themselves
    x = torch.randn(1, 1, n, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(size, dtype=torch.int64)
    of = sl.table(ids)
    mask = sl.expression(lambda b, h, i, j: of[j * 7919 % size] < 3)  # anywhere in the table, as far as bounds tell
    at = torch.arange(n) * 7919 % size
    for numbers in (torch.zeros(size), torch.full((size,), 5), torch.arange(size) % 7, torch.zeros(size)):
        ids.copy_(numbers.long())
        want = reference.attention(x, x, x, mask=(ids[at] < 3)[None, None, None].numpy())
        for _ in range(2):
            assert_equal(sl.attention(x, x, x, mask=mask), want)


def test_a_shorter_storage_at_the_same_address_is_refused(monkeypatch):
    """Memory that was freed may be handed out again: then the address alone says that nothing has changed."""
    bias = torch.zeros(100)
    table = sl.table(bias)
    score = sl.expression(lambda s, b, h, i, j: s + table[j])
    sl.attention(QUERY, KEYS, VALUES, score=score)
    before, read_address = torch_tensors.read_address(bias), torch_tensors.read_address
    bias.untyped_storage().resize_(8)
    monkeypatch.setattr(torch_tensors, "read_address", lambda x: before if x is bias else read_address(x))
    with pytest.raises(sl.ArgumentError, match="storage is missing or too short"):
        sl.attention(QUERY, KEYS, VALUES, score=score)


@pytest.mark.parametrize("name", SUBJECTS)
def test_storage_stays_resizable(name):
    """FSDP frees a parameter's memory between calls, and fills it again: it may have another place then."""
    subject = SUBJECTS[name]
    x = subject.make()
    kept = Kept(subject._replace(make=lambda: x))
    check("sl.attention without gradients", kept, subject)
    assert x.untyped_storage().resizable()
    numbers, size = x.clone(), x.untyped_storage().nbytes()
    x.untyped_storage().resize_(0)
    if name not in ("bias", "mask"):
        with pytest.raises(sl.ArgumentError, match="storage is missing or too short"):
            call_plain(kept)
    x.untyped_storage().resize_(size)
    x.copy_(numbers)
    check("sl.attention without gradients", kept, subject)


def test_a_table_of_an_array_is_a_copy():
    array = np.float64([0.5, 0.25])
    score = sl.alibi(array)
    before = sl.attention(QUERY, KEYS, VALUES, score=score)
    array[:] = 7
    assert torch.equal(sl.attention(QUERY, KEYS, VALUES, score=score), before)


def test_a_transposed_square_is_read_as_it_lies():
    x = numbers(HEADS, LENGTH, LENGTH)
    kept = Kept(Subject(lambda: x, lambda x: {"score": sl.expression(lambda s, b, h, i, j: s + x[h, i, j])}))
    for _ in range(2):
        before = call_plain(kept)
        kept.x.data = kept.x.detach().mT
        with torch.no_grad():
            want = reference.attention(QUERY, KEYS, VALUES, score=kept.x.numpy(force=True))
        assert_equal(call_plain(kept), want)
        assert not torch.equal(call_plain(kept), before)


def test_a_table_of_bfloat16_stays_one():
    """A prepared call knows the widened copy by its address, which a table of another dtype would not keep."""
    t, other = numbers(HEADS, dtype=torch.bfloat16), numbers(HEADS, dtype=torch.float32)
    score, memory = sl.alibi(t), t.data
    sl.attention(QUERY, KEYS, VALUES, score=score)
    t.data = other
    with pytest.raises(sl.ArgumentError, match="dtype bfloat16 that its tensor had"):
        sl.attention(QUERY, KEYS, VALUES, score=score)
    memory.add_(1)
    t.data = memory
    for _ in range(2):
        want = reference.attention(QUERY, KEYS, VALUES, score=sl.alibi(memory.float().numpy()))
        assert_equal(sl.attention(QUERY, KEYS, VALUES, score=score), want)


def test_an_ordinary_write_to_a_large_table_is_refused():
    """Numbers that change places leave the sums of blocks alone; their version is another one."""
    t, q = numbers(HEADS, 70_000), QUERY.clone().requires_grad_()
    out = speedlight.torch.attention(q, KEYS, VALUES, **looked_up(t))
    t[:, :LENGTH] = t[:, :LENGTH].flip(1)
    with pytest.raises(sl.ArgumentError, match="written to since"):
        out.sum().backward()


@pytest.mark.parametrize("other", [torch.rand(3), torch.rand(2, 2), torch.rand(2).half()])
def test_other_shapes_and_dtypes_are_refused(other):
    kept = Kept(SUBJECTS["alibi"])
    check("sl.attention without gradients", kept, SUBJECTS["alibi"])
    kept.x.data = other
    for door in ("sl.attention without gradients", "KVCache", "speedlight.torch.attention", "attention_paged"):
        with pytest.raises(sl.ArgumentError, match="^slopes: expected the shape"):
            DOORS[door](kept)
