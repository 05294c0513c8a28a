"""What test_distributed_dropins.py runs on several ranks: forked from one process, which has imported and compiled.

    python tests/support/dropins.py RANKS [RANKS …]

Every function here, in sharded_cache.py and in dropins_rings.py that begins with `case_` is run by every rank; a line
for each says how it went.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any

import dropins_rings
import sharded_cache
import torch
import torch.distributed as dist
from engines import SMALL_TILES, one_vector, tuned
from sharded_cache import FULL, HEADS, refused
from turns import make_in_turn
from whole_tensors import close, drawn_tensors, gradients, shard, traced

import speedlight as sl
import speedlight.distributed as sd
import speedlight.transformers
from speedlight import reference

TIMEOUT = 120  # seconds; nothing here waits for it

# --- DeepSpeed


class SeqAllToAll(torch.autograd.Function):
    """DeepSpeed's: what is scattered along one dimension is gathered along the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        ctx.way = gather, scatter
        parts = [y.contiguous() for y in x.chunk(dist.get_world_size(), scatter)]
        found = [torch.empty_like(y) for y in parts]
        dist.all_to_all(found, parts)
        return torch.cat(found, gather)

    @staticmethod
    def backward(ctx: Any, flow: torch.Tensor) -> Any:
        return SeqAllToAll.apply(flow, *ctx.way), None, None


class DistributedAttention(torch.nn.Module):
    """DeepSpeed's calling convention: local_attn(query, key, value, *args, **kwargs) between two exchanges."""

    def __init__(self, local_attention: Any, sequence_process_group: Any, scatter_idx: int = 2, gather_idx: int = 0):
        super().__init__()
        self.local_attn, self.scatter_idx, self.gather_idx = local_attention, scatter_idx, gather_idx

    def forward(self, query: Any, key: Any, value: Any, batch_dim_idx: int, *args: Any, **kwargs: Any) -> Any:
        query, key, value = (SeqAllToAll.apply(x, self.scatter_idx, self.gather_idx) for x in (query, key, value))
        context = self.local_attn(query, key, value, *args, **kwargs)
        return SeqAllToAll.apply(context, self.gather_idx, self.scatter_idx)


def case_deepspeed() -> None:
    """Whose heads a process has is known to scores and sinks, in both of its layouts."""
    ranks = dist.get_world_size()
    if HEADS % ranks:
        return
    dense = torch.rand(1, HEADS, 24 * ranks, 24 * ranks, generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"causal": True, "sink_logits": [1.0, -2.0, 0.5, 3.0]}
    alibi = sl.alibi([0.5, 0.25, 0.125, 0.1])
    options |= {"score": [sl.softcap(9.0), alibi, dense] if FULL else alibi}
    q, k, v, flow = drawn_tensors(24 * ranks)
    k, v = (x.repeat(1, 2, 1, 1) for x in (k, v))
    arrays = [x.double().numpy() for x in (q, k, v)]
    whole = [torch.from_numpy(reference.attention(*arrays, scale=0.3, **options))]
    want = gradients(q, k, v, flow, **options) if FULL else whole
    for batch_dim, order in ((0, (0, 2, 1, 3)), (1, (2, 0, 1, 3))):
        length = 1 - batch_dim
        attend = sd.local_attention(batch_dim_idx=batch_dim, scale=0.3, **options)
        layer = DistributedAttention(attend, dist.group.WORLD, 2, length)
        own = [shard(x.permute(order), "contiguous", length) for x in (q, k, v)]
        mine = [shard(x.permute(order), "contiguous", length) for x in (flow, *want)]
        if not FULL:
            close([layer(*own, batch_dim)], mine[1:])
            continue
        close(traced(layer, own, mine[0], batch_dim), mine[1:])
    said = refused(lambda: layer(*own, 1, torch.ones(1)))
    assert "argument 4: expected None; got Tensor" in said
    assert "layout: expected nothing" in refused(lambda: sd.local_attention(layout="bhld"))
    if not FULL:
        return
    causal = sd.local_attention(causal=True, mask=lambda b, h, i, j: (h % 2 == 0) | (i - j < 5))
    kept = causal(*(x.transpose(1, 2).chunk(ranks, 2)[dist.get_rank()] for x in (q, k, v)))
    whole = sl.attention(q, k, v, causal=True, mask=lambda b, h, i, j: (h % 2 == 0) | (i - j < 5))
    close([kept], [whole.chunk(ranks, 1)[dist.get_rank()].transpose(1, 2).double()])


# --- transformers


def case_transformers() -> None:
    """DeepSpeed's UlyssesSPAttentionHF around "speedlight": it drops every mask, so that position_ids tell what is
    packed. A whole model, of which every rank has a part of the tokens.
    """
    if not FULL or HEADS % dist.get_world_size():
        return
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    speedlight.transformers.register()
    core = ALL_ATTENTION_FUNCTIONS["speedlight"]
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=HEADS, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="speedlight")

    def ulysses(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value = (SeqAllToAll.apply(x, 1, 2) for x in (query, key, value))
        places = kwargs["position_ids"].contiguous()
        every = [torch.empty_like(places) for _ in range(dist.get_world_size())]
        dist.all_gather(every, places)
        context, weights = core(
            module, query, key, value, None, *args, **kwargs | {"position_ids": torch.cat(every, 1)}
        )
        return SeqAllToAll.apply(context, 1, 2), weights

    length = 24 * dist.get_world_size()
    ids = torch.randint(50, (1, length), generator=torch.Generator().manual_seed(1))
    for places in (torch.arange(length), torch.arange(length) % 20):
        want = model(ids, position_ids=places[None], use_cache=False).logits
        ALL_ATTENTION_FUNCTIONS["speedlight"] = ulysses
        try:
            own = [shard(x, "contiguous", 1) for x in (ids, places[None])]
            got = model(own[0], position_ids=own[1], use_cache=False).logits
        finally:
            ALL_ATTENTION_FUNCTIONS["speedlight"] = core
        close([got], [shard(want, "contiguous", 1).double()])


# --- processes

CASES = {
    name: x
    for of in (vars(sharded_cache), vars(dropins_rings), globals())
    for name, x in of.items()
    if name.startswith("case_")
}


def run(rank: int, ranks: int, where: str, names: list[str]) -> int:
    """One rank: every case, up to one that fails."""
    torch.set_num_threads(1)
    make_in_turn(where)
    dist.init_process_group(
        "gloo", init_method=f"file://{where}/meeting", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT)
    )
    wrong = 0
    for name in names:
        try:
            before = time.process_time()
            CASES[name]()
            said = "passed"
            if "TIMES" in os.environ:
                sys.stderr.write(f"{name} {time.process_time() - before:.2f}\n")
        except BaseException:
            said, wrong = traceback.format_exc(), wrong + 1
        text = said.replace("\n", "\\n")
        sys.stdout.write(f"{ranks} {rank} {name} {text}\n")
        sys.stdout.flush()
        if wrong:
            break  # and the others will miss this rank, not wait for it
        dist.barrier()
    dist.destroy_process_group()
    return wrong


def forked(ranks: int, names: list[str]) -> None:
    one_width = contextlib.nullcontext() if FULL else tuned((SMALL_TILES,), **one_vector(1))
    with tempfile.TemporaryDirectory() as where, one_width:
        os.environ["DROPINS"] = where
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                code = 1
                try:
                    code = run(rank, ranks, where, names)
                finally:
                    os._exit(code)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    gc.disable()  # as conftest.py: a kernel is some 100,000 objects
    wanted = [x for x in CASES if re.search(os.environ.get("CASE", ""), x)]
    for count in map(int, sys.argv[1:]):
        forked(count, wanted)
