"""A call as autograd follows it: forward keeps the out and lse of the whole sequence, backward computes again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..arrays.torch_tensors import is_tensor
from ..errors import ArgumentError, UnsupportedError
from ..expressions.tree import lazily
from ..problem.gradients import Followed, check_unwritten, resolved
from ..problem.problem import LAYOUTS
from . import joining, ring
from .plans import Plan, Sharded, plan_of
from .ring import RankContext, Saved


class Core:
    """Rows of one process against the keys of all of a ring, as planned; for tensors at any addresses."""

    def __init__(
        self, sharded: Sharded, rank: int, layout: str, *, exact: bool, first_head: int = 0, on_gpu: bool = False
    ) -> None:
        self.sharded, self.rank, self.layout, self.exact = sharded, rank, layout, exact
        self.first_head, self.on_gpu = first_head, on_gpu
        self.prepared: dict[Any, Any] = {}

    @lazily
    def plan(self) -> Plan:
        return plan_of(self.sharded, self.rank, exact=self.exact)

    @lazily
    def back(self) -> Plan:
        """A pass back adds by owner, whatever the order of keys was."""
        return plan_of(self.sharded, self.rank, exact=False) if self.exact else self.plan

    def here(self, peers: Any, plan: Plan, deferred_errors: list[ArgumentError]) -> RankContext:
        return RankContext(peers, self.sharded, plan, self.layout, self.prepared, deferred_errors)


class Context(NamedTuple):
    """The context of one call."""

    core: Core
    peers: Any
    known: Followed
    read: list[tuple[Any, Any]]
    deferred_errors: list[ArgumentError]
    keys: Any = None  # an exchange by which keys and values come first, and what flows to them goes back, in float32


def attended(context: Context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse."""
    known = context.known
    return _Attention.apply(context, q, k, v, known.sinks, *(x.origin for x in known.tables))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Context, q: Any, k: Any, v: Any, sinks: Any, *sources: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        core = context.core
        q, k, v = (x.detach() for x in (q, k, v))
        if context.keys is not None:
            k, v = (context.keys.there(x) for x in (k, v))
        here = core.here(context.peers, core.plan, context.deferred_errors)
        out, lse = joining.forward(here, q, k, v) if core.on_gpu else ring.forward(here, q, k, v)
        ctx.context = context
        ctx.save_for_backward(q, k, v, out, lse, sinks, *sources)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():  # in all processes, and nothing was sent
            raise UnsupportedError(
                "create_graph: expected False, as attention over processes has first derivatives alone; got True. "
                "speedlight.torch.attention() of the whole sequence in one process has second ones."
            )
        d_out, d_lse = resolved(d_out), resolved(d_lse)
        context, needed = ctx.context, ctx.needs_input_grad[1:]
        check_unwritten(context.read)
        given: list[Any] = [x if x is None else x.detach() for x in ctx.saved_tensors[:6]]
        q, k, v, out, lse, sinks = given
        core, known = context.core, context.known
        if d_out is None:  # the other processes come here, too
            d_out = torch.zeros((), dtype=out.dtype).expand(out.shape)
        saved = Saved(q, k, v, out, lse, d_out, d_lse)
        wanted = tuple([t for t, need in zip(known.tables, needed[4:], strict=True) if need])
        # what flows to keys of others is sent on as it was summed
        here = core.here(context.peers, core.back, context.deferred_errors)
        found = ring.backward(here, saved, wanted, wide=context.keys is not None)
        flows = dict(zip(wanted, found.tables, strict=True))
        tables = (flows[t].reshape(t.origin.shape).to(t.origin.dtype) if t in flows else None for t in known.tables)
        d_sinks = _sinks(core, saved, sinks) if needed[3] else None
        dk, dv = (x if context.keys is None else context.keys.back(x) for x in (found.dk, found.dv))
        return None, *(x.to(y.dtype) for x, y in ((found.dq, q), (dk, k), (dv, v))), d_sinks, *tables


def _sinks(core: Core, saved: Saved, sinks: torch.Tensor) -> torch.Tensor:
    """A sink is one more key of every row, whose value is zeros: - Σ p · delta of each head, in float64."""
    assert is_tensor(sinks)
    head = LAYOUTS[core.layout][-3]
    of_heads = zip(saved.d_out.unbind(head), saved.out.unbind(head), strict=True)  # one at a time: products are large
    delta = torch.stack([(x.double() * y.double()).sum(-1) for x, y in of_heads], -2)
    delta = delta if saved.d_lse is None else delta - saved.d_lse.double()
    lse = saved.lse.double()
    mine = slice(core.first_head, core.first_head + lse.shape[-2])
    logits = sinks.double()[mine, None]
    seen = (lse != -torch.inf) & (logits != -torch.inf)
    weights = torch.where(seen, torch.exp(torch.clamp(logits - lse, max=0)), 0.0)
    flow = torch.where(seen, weights * delta, 0.0).transpose(-1, -2).reshape(-1, lse.shape[-2]).sum(0)
    result = torch.zeros(sinks.shape, dtype=torch.float64)
    result[mine] = -flow
    return result.to(sinks.dtype)
