"""Attention in and around JAX's shard_map on four devices of the host; a script, as their number is fixed at the start.

python sharded_jax.py FILE traces every case with speedlight.jax and with jax.nn, writes the arrays to FILE (.npz) and
prints, as JSON, what either raised: {case: [ours or null, theirs or null]}. Cases of equal results are computed with
jax.nn once: it takes a third of a second to compile.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH, HEADS, QUERIES, SHARED = P("x"), P(None, None, "x"), P(None, "x"), P()
BY = {"batch": (BATCH, BATCH), "heads": (HEADS, HEADS), "queries": (QUERIES, SHARED)}  # of queries; of keys and values


def draw(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def arrays():
    """Four items of eight queries in eight heads, six keys in four."""
    return draw(4, 8, 8, 8, seed=0), draw(4, 6, 4, 8, seed=1), draw(4, 6, 4, 8, seed=2)


def mesh(*sizes):
    return Mesh(np.array(jax.devices()).reshape(sizes), ("x", "y")[: len(sizes)])


def shard(function, in_specs, out_specs, sizes=(4,), check=True, axes=None):
    """shard_map by its name and options in this release."""
    if hasattr(jax, "shard_map"):
        more = {} if axes is None else {"axis_names": axes}
        return jax.shard_map(
            function, mesh=mesh(*sizes), in_specs=in_specs, out_specs=out_specs, check_vma=check, **more
        )
    from jax.experimental.shard_map import shard_map

    more = {} if axes is None else {"auto": frozenset(("x", "y")) - axes}
    return shard_map(function, mesh(*sizes), in_specs, out_specs, check_rep=check, **more)


def loss_of(attend, **options):
    def loss(q, k, v, bias=None, mask=None):
        return (attend(q, k, v, bias, mask, **options) ** 2).sum()

    return loss


CASES = {}  # functions of attend; they return a function, and its arguments
ALIKE = {}  # {case: the case whose results it has}
PLAIN = "grad inside, by batch"
WEIGHTS = "shared weights inside"


def case(function=None, *, alike=None):
    if function is None:
        return functools.partial(case, alike=alike)
    name = function.__name__.replace("_", " ")
    CASES[name] = function
    if alike is not None:
        ALIKE[name] = alike
    return function


def add_layouts(by):
    """Adds gradients inside and around, with the arrays sharded over one dimension."""
    of_q, of_k = BY[by]

    def inside(attend):
        specs = (of_q, of_k, of_k)
        return shard(jax.grad(loss_of(attend), (0, 1, 2)), specs, specs), arrays()

    def around(attend):
        mapped = shard(attend, (of_q, of_k, of_k), of_q)
        return jax.grad(lambda *given: (mapped(*given) ** 2).sum(), (0, 1, 2)), arrays()

    for name, function in ((f"grad inside, by {by}", inside), (f"grad around, by {by}", around)):
        CASES[name] = function
        if name != PLAIN:
            ALIKE[name] = PLAIN


for by in BY:
    add_layouts(by)


@case
def result(attend):
    return shard(attend, (BATCH,) * 3, BATCH), arrays()


@case
def value_and_grad(attend):
    loss = loss_of(attend, is_causal=True)
    step = jax.value_and_grad(lambda *given: jax.lax.psum(loss(*given), "x"), (0, 1, 2))
    return shard(step, (BATCH,) * 3, (SHARED, (BATCH,) * 3)), arrays()


@case
def shared_weights_inside(attend):
    def loss(w, q, k, v):
        return (attend(q @ w, k @ w, v) ** 2).sum()

    specs = (SHARED, BATCH, BATCH, BATCH)
    return shard(jax.grad(loss, (0, 1)), specs, (SHARED, BATCH)), (draw(8, 8, seed=3), *arrays())


@case(alike=WEIGHTS)
def shared_weights_around(attend):
    mapped = shard(lambda w, q, k, v: attend(q @ w, k @ w, v), (SHARED, BATCH, BATCH, BATCH), BATCH)
    return jax.grad(lambda *given: (mapped(*given) ** 2).sum(), (0, 1)), (draw(8, 8, seed=3), *arrays())


@case
def scan(attend):
    def loss(q, k, v):
        return (jax.lax.scan(lambda x, _: (attend(x, k, v), None), q, None, length=2)[0] ** 2).sum()

    return shard(jax.grad(loss, (0, 1, 2)), (BATCH,) * 3, (BATCH,) * 3), arrays()


@case(alike=PLAIN)
def cond(attend):
    def loss(q, k, v):
        return (jax.lax.cond(jnp.isfinite(q.sum()), lambda: attend(q, k, v), lambda: q) ** 2).sum()

    return shard(jax.grad(loss, (0, 1, 2)), (BATCH,) * 3, (BATCH,) * 3), arrays()


@case(alike=PLAIN)
def checkpoint(attend):
    return shard(jax.grad(jax.checkpoint(loss_of(attend)), (0, 1, 2)), (BATCH,) * 3, (BATCH,) * 3), arrays()


@case(alike=PLAIN)
def vmap(attend):
    def loss(q, k, v):
        return (jax.vmap(attend, (0, 0, None))(q, k, v[0]) ** 2).sum()

    return shard(jax.grad(loss, (0, 1, 2)), (BATCH,) * 3, (BATCH,) * 3), arrays()


@case(alike=PLAIN)
def jit_inside(attend):
    step = jax.jit(jax.grad(jax.jit(loss_of(attend)), (0, 1, 2)))
    return shard(step, (BATCH,) * 3, (BATCH,) * 3), arrays()


@case
def bias_and_mask_shared(attend):
    bias, mask = draw(1, 8, 8, 6, seed=4), draw(1, 1, 8, 6, seed=5) < 1
    specs = (BATCH, BATCH, BATCH, SHARED, SHARED)
    return shard(jax.grad(loss_of(attend), (0, 3)), specs, (BATCH, SHARED)), (*arrays(), bias, mask)


@case
def bias_and_mask_sharded(attend):
    bias, mask = draw(4, 8, 1, 6, seed=4), draw(4, 1, 8, 6, seed=5) < 1
    specs = (HEADS, HEADS, HEADS, P(None, "x"), SHARED)
    return shard(jax.grad(loss_of(attend), (0, 3)), specs, (HEADS, P(None, "x"))), (*arrays(), bias, mask)


@case
def lengths(attend):
    def loss(q, k, v, q_lengths, k_lengths):
        out = attend(q, k, v, query_seq_lengths=q_lengths, key_value_seq_lengths=k_lengths)
        return (out**2).sum()

    given = jnp.array([8, 3, 0, 5], jnp.int32), jnp.array([6, 2, 1, 4], jnp.int32)
    return shard(jax.grad(loss, (0, 1, 2)), (BATCH,) * 5, (BATCH,) * 3), (*arrays(), *given)


@case
def two_axes(attend):
    """A bias that is shared over one axis, and keys without an item's axis."""
    both, keys, bias = P("x", None, "y"), P(None, None, "y"), P(None, "y")
    specs = (both, keys, keys, bias)
    q, k, v = arrays()
    given = (q, k[:1], v[:1], draw(1, 8, 8, 6, seed=4))

    def loss(q, k, v, bias):
        k, v = (jnp.broadcast_to(x, (len(q), *x.shape[1:])) for x in (k, v))
        return loss_of(attend)(q, k, v, bias)

    return shard(jax.grad(loss, (0, 1, 2, 3)), specs, specs, sizes=(2, 2)), given


@case(alike=PLAIN)
def one_axis_of_two(attend):
    """The result is shared over the other axis, which nothing varies over."""
    mapped = shard(attend, (BATCH,) * 3, BATCH, sizes=(2, 2))
    return jax.grad(lambda *given: (mapped(*given) ** 2).sum(), (0, 1, 2)), arrays()


@case(alike=PLAIN)
def automatic_axis(attend):
    """shard_map over one of two axes."""
    step = jax.grad(loss_of(attend), (0, 1, 2))
    return shard(step, (BATCH,) * 3, (BATCH,) * 3, sizes=(2, 2), axes=frozenset("x")), arrays()


@case
def all_shared(attend):
    return shard(attend, (SHARED,) * 3, SHARED), arrays()


@case
def summed_is_shared(attend):
    return shard(lambda *given: jax.lax.psum(attend(*given), "x"), (BATCH,) * 3, SHARED), arrays()


@case(alike=PLAIN)
def check_is_off(attend):
    return shard(jax.grad(loss_of(attend), (0, 1, 2)), (BATCH,) * 3, (BATCH,) * 3, check=False), arrays()


@case
def explicit_axes(attend):
    """Arrays that are sharded by their types, without shard_map."""
    explicit = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))

    def step(*given):
        with jax.set_mesh(explicit):
            placed = [jax.device_put(x, NamedSharding(explicit, BATCH)) for x in given]
            return jax.jit(jax.grad(loss_of(attend), (0, 1, 2)))(*placed)

    return step, arrays()


@case
def residual_alone(attend):
    """No gradient follows the residual: they are zeros that vary as the arrays do."""

    def loss(q, k, v, bias):
        out, lse = attend(q, k, v, bias, return_residual=True)
        return lse.sum() + out[:, :0].sum() + (bias**2).sum(), lse

    specs = (BATCH, BATCH, BATCH, SHARED)
    step = jax.grad(loss, (0, 1, 2, 3), has_aux=True)
    return shard(step, specs, (specs, BATCH)), (*arrays(), draw(1, 8, 8, 6, seed=4))


@case
def residual_of_varying_values(attend):
    def residual(q, k, v):
        return attend(q, k, v, return_residual=True)[1]

    q, k, v = arrays()
    return shard(residual, (SHARED, SHARED, BATCH), SHARED), (q[:1], k[:1], v)


@case
def refused_result(attend):
    return shard(attend, (BATCH,) * 3, SHARED), arrays()


@case
def refused_result_of_shared_queries(attend):
    """Keys alone vary."""
    return shard(attend, (SHARED, HEADS, HEADS), SHARED), (arrays()[0][:, :, :1], *arrays()[1:])


@case
def refused_gradient(attend):
    return shard(jax.grad(loss_of(attend), (0, 1)), (BATCH,) * 3, (BATCH, SHARED)), arrays()


@case
def refused_over_the_second_axis(attend):
    """Only the bias varies over y."""
    specs = (BATCH, BATCH, BATCH, P(None, None, None, "y"))
    given = (*arrays(), draw(1, 1, 8, 12, seed=4))
    return shard(attend, specs, BATCH, sizes=(2, 2)), given


@case(alike=PLAIN)
def without_jit(attend):
    return shard(jax.grad(loss_of(attend), (0, 1, 2)), (BATCH,) * 3, (BATCH,) * 3), arrays()


def partitioned_by_gspmd(attend, sizes):
    """XLA's older partitioner ends the process where an axis of several devices is automatic."""

    def step(*given):
        specs = (BATCH,) * 3
        grads = shard(jax.grad(loss_of(attend), (0, 1, 2)), specs, specs, sizes=sizes, axes=frozenset("x"))
        before = jax.config.jax_use_shardy_partitioner
        jax.config.update("jax_use_shardy_partitioner", False)
        try:
            return jax.jit(grads)(*given)
        finally:
            jax.config.update("jax_use_shardy_partitioner", before)

    return step, arrays()


@case(alike=PLAIN)
def automatic_axis_and_gspmd(attend):
    return partitioned_by_gspmd(attend, (2, 2))


@case(alike=PLAIN)
def automatic_axis_of_one_and_gspmd(attend):
    return partitioned_by_gspmd(attend, (4, 1))


EAGER = {"explicit axes", "without jit", "automatic axis and gspmd", "automatic axis of one and gspmd"}


def main(path):
    import speedlight.jax

    jax.config.update("jax_disable_most_optimizations", True)  # each program runs once
    raised, found = {}, {}
    for name, make in CASES.items():
        for who, attend in (("ours", speedlight.jax.dot_product_attention), ("theirs", jax.nn.dot_product_attention)):
            function, given = make(attend)
            step = function if name in EAGER else jax.jit(function)
            try:
                if who == "theirs" and name in ALIKE:
                    jax.eval_shape(step, *given)
                else:
                    found |= {f"{name}/{who}/{at}": x for at, x in enumerate(jax.tree.leaves(step(*given)))}
                error = None
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
            raised.setdefault(name, []).append(error)
    np.savez(path, **{name: np.asarray(x) for name, x in found.items()})
    print(json.dumps(raised))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
