"""By which way the processes of a call compute it; all of them end in one: rows here against keys of a ring.

All ranks have to choose alike, and what each would measure differs, so `method="auto"` goes by bytes, which all know:
gather up to 1 MiB of keys and values, else what sends least.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from .. import engines
from ..arrays.dtypes import STORAGE_BYTES
from ..errors import ArgumentError
from ..problem.gradients import Followed
from ..problem.key_parts import Heads, problem_of, split_of
from ..problem.prepared import CallKey, prepared_calls
from ..problem.problem import LAYOUTS
from ..problem.shardings import Runs, joined, positions, tokens, whole_of
from .differentiable import Context, Core, attended
from .groups import MeshGroups, Peers, SingleRank
from .plans import Sharded
from .tensors import Exchange, exchange, resharding

Method: TypeAlias = Literal["ring", "ulysses", "gather", "auto"]
METHODS = ("ring", "ulysses", "gather", "auto")
_SMALL = 1 << 20  # bytes of all keys and values, which are gathered without much ado


class Execution(NamedTuple):
    """A call that all processes agree on."""

    peers: MeshGroups
    sharded: Sharded
    shard: str
    method: str
    exact: bool
    known: Followed
    read: list[tuple[Any, Any]]
    returns_lse: bool
    deferred_errors: list[ArgumentError]  # what kernels find out while the others wait
    on_gpu: bool = False

    @property
    def layout(self) -> str:
        return self.known.options.layout

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of this process's rows."""
        reason = _refused_stripes(self)
        if reason:
            warnings.warn(
                f"shard: expected 'zigzag' or 'contiguous' {reason}; got 'stripe', which is redistributed first, and "
                "back. Shard so from the start: it saves sending all of it.",
                stacklevel=5,
            )
            return self._redistributed(q, k, v)
        match self._chosen(q, k, v):
            case "gather":
                return self._gathered(q, k, v)
            case "ulysses":
                return self._over_heads(SingleRank(), self.peers.ring, q, k, v)
        if self.peers.heads.ranks > 1:
            return self._over_heads(self.peers.ring, self.peers.heads, q, k, v)
        return self._core(self.peers.ring, self.sharded, q, k, v)

    def _chosen(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
        """A method's name in place of "auto": what sends least, of small keys and values what asks least often."""
        ranks, p = self.peers.ring.ranks, self.sharded.whole.problem
        if self.method != "auto" or self.peers.heads.ranks > 1 or ranks == 1:
            return self.method
        size = STORAGE_BYTES[p.key_storage]
        key = (p.head_dim + p.value_dim) * p.kv_heads * size * (1 if self.sharded.whole.cu_k else p.batch)
        query = (p.head_dim + p.value_dim) * p.q_heads * STORAGE_BYTES[p.storage]
        if sum(map(tokens, self.sharded.k)) * key <= _SMALL:
            return "gather"
        divides = p.q_heads % ranks == 0
        if self.exact and self.sharded.whole.cu_k is not None:
            return "ulysses" if divides else "gather"
        travelling = self._made(self.peers.ring, self.sharded, (q, k, v)).plan.schedule
        ring = max([travelling.tokens_sent(rank) for rank in range(ranks)]) * key
        rows = max(map(tokens, self.sharded.q)) * (1 if self.sharded.whole.cu_k else p.batch)
        own = max(map(tokens, self.sharded.k)) * key * max(1, ranks // max(1, p.kv_heads))
        return "ulysses" if divides and (rows * query + own) * (ranks - 1) // ranks < ring else "ring"

    # --- each way

    def _core(
        self, peers: Any, sharded: Sharded, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: Any = None,
        first_head: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        core = self._made(peers, sharded, (q, k, v), first_head)
        return attended(Context(core, peers, self.known, self.read, self.deferred_errors, keys), q, k, v)

    def _made(self, peers: Any, sharded: Sharded, given: tuple[torch.Tensor, ...], first_head: int = 0) -> Core:
        """Kept from call to call where the options say what they say: it depends on them, on the whole's lengths, on
        who holds what, on how the tensors lie, from which it follows how those lie that are made of them, and on the
        machine.
        """
        exact = self.exact and peers.ranks > 1
        new = Core(sharded, peers.rank, self.layout, exact=exact, first_head=first_head, on_gpu=self.on_gpu)
        options = self.known.options.key()
        if options is None:
            return new
        machine = str(given[0].device) if self.on_gpu else engines.cpu().machine()
        lies = tuple([(x.shape, x.stride(), x.dtype) for x in given])
        p = sharded.whole.problem  # whose rows need not all be somebody's: each may have all keys, and its own rows
        place = (
            p.q_lengths, p.k_lengths, p.rows, sharded.q, sharded.k, peers.rank, exact, self.peers.heads.ranks,
            first_head,
        )  # fmt: skip
        key = CallKey("shard", options, lies, machine, place)
        found = prepared_calls.get(key)
        if found is None:
            found = new
            prepared_calls.put(key, new, self.known.options.table_bytes())
        return found

    def _gathered(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Every process gets all keys and values; of stripes, stripe by stripe."""
        peers, dim, held = self.peers.ring, LAYOUTS[self.layout][-2], self.sharded.k
        striped = True in [run.step > 1 for runs in held for run in runs]
        every: Runs = tuple([run for runs in held for run in runs]) if striped else whole_of(held)
        sharded = Sharded(self.sharded.whole, (self.sharded.q[peers.rank],), (every,))
        return self._core(SingleRank(), sharded, q, k, v, resharding(peers, held, (every,) * peers.ranks, dim))

    def _over_heads(
        self, ring: Any, heads: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of own heads against keys that travel round the ring, if there are several in it."""
        whole = self.sharded.whole
        split = split_of(whole.problem.q_heads, whole.problem.kv_heads, heads.ranks)
        begins = range(0, ring.ranks * heads.ranks, heads.ranks)  # of the mesh's rows
        rows, keys = ([x[n : n + heads.ranks] for n in begins] for x in (self.sharded.q, self.sharded.k))
        axes = LAYOUTS[self.layout][-3:-1]
        of_q = _between_heads(heads, rows[ring.rank], split.q, axes, whole.problem.q_heads)
        of_k = _between_heads(heads, keys[ring.rank], split.kv, axes, whole.problem.kv_heads)
        own = whole._replace(problem=problem_of(whole.problem, split, heads.rank))
        joint = Sharded(own, *(tuple([whole_of(x) for x in each]) for each in (rows, keys)))
        (q,) = exchange((of_q,), q)
        out, lse = self._core(ring, joint, q, k, v, of_k, (split.q[heads.rank] or (0,))[0])
        of_out = of_q._replace(held=of_q.wanted, wanted=of_q.held)
        out, lse = exchange((of_out, of_out._replace(axes=(lse.ndim - 2, lse.ndim - 1))), out, self._followed(lse))
        return out, lse

    def _redistributed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As zigzag shards, and back."""
        peers, dim, sharded = self.peers.ring, LAYOUTS[self.layout][-2], self.sharded
        new = [positions(sum(map(tokens, x)), peers.ranks, "zigzag") for x in (sharded.q, sharded.k)]
        (q,) = exchange((resharding(peers, sharded.q, new[0], dim),), q)
        k, v = (exchange((resharding(peers, sharded.k, new[1], dim),), x)[0] for x in (k, v))
        out, lse = self._replace(shard="zigzag", sharded=Sharded(sharded.whole, *new)).attended(q, k, v)
        back = tuple([resharding(peers, new[0], sharded.q, axis) for axis in (dim, lse.ndim - 1)])
        out, lse = exchange(back, out, self._followed(lse))
        return out, lse

    def _followed(self, lse: torch.Tensor) -> torch.Tensor:
        """Returns lse, detached where no process returns it: no gradient flows to it."""
        return lse if self.returns_lse else lse.detach()


def _refused_stripes(way: Execution) -> str:
    """Why stripes are redistributed; nothing if they need not be."""
    p = way.sharded.whole.problem
    if way.shard != "stripe" or way.peers.ranks == 1:
        return ""
    if way.exact and way.method in ("ring", "auto", "gather"):
        return "for exact=True"
    if way.method == "ulysses":
        return ""
    if way.sharded.whole.cu_q is not None:
        return "for packed sequences"
    return "where items begin at different positions" if len(set(p.q_starts)) > 1 else ""


def _between_heads(peers: Peers, held: tuple[Runs, ...], heads: Heads, axes: tuple[int, int], number: int) -> Exchange:
    """Ulysses: each process has its own tokens of all heads, and gets all tokens of its heads, of so many in all."""
    own = [((range(number),), runs) for runs in held]
    every = [(joined([range(h, h + 1) for h in some]), whole_of(held)) for some in heads]
    return Exchange(peers, tuple(own), tuple(every), axes, sum(map(len, heads)) > number, "with its heads")
