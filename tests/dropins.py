"""What test_distributed_dropins.py runs on several ranks: forked from one process, which has imported and compiled.

    python tests/dropins.py RANKS [RANKS …]

Every function here, and in sharded_cache.py, that begins with `case_` is run by every rank; a line for each says how it
went.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import re
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any

import sharded_cache
import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention as theirs
import torch.nn.functional as F
from sharded_cache import BATCH, DIM, FULL, HEADS, KV, refused
from torch.distributed.device_mesh import init_device_mesh
from turns import make_in_turn

import speedlight as sl
import speedlight.distributed as sd
import speedlight.flash_attn
import speedlight.torch
import speedlight.transformers
from speedlight import reference
from speedlight.distributed import positions, templated
from speedlight.flash_attn import flash_attn_func, flash_attn_varlen_func

TIMEOUT = 120  # seconds; nothing here waits for it

# --- PyTorch's ring


def case_context_parallel() -> None:
    """PyTorch's context_parallel() and its scaled_dot_product_attention(), forward and backward."""
    ranks = dist.get_world_size()
    if not FULL:  # DTensor's first operation imports a compiler in every process
        return
    mesh = init_device_mesh("cpu", (ranks,))
    for causal in (True, False):
        q, k, v, flow = drawn_tensors(24 * ranks)
        want = gradients(q, k, v, flow, causal=causal)
        parts = [x.clone() for x in (q, k, v, flow)]
        theirs._cp_options.enable_load_balance = causal
        named = {"buffers": parts, "buffer_seq_dims": [2] * 4, "no_restore_buffers": set(parts)}
        with sd.context_parallel(mesh, **named):
            inputs = [x.requires_grad_() for x in parts[:3]]
            out = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True, scale=0.3)
            out.backward(parts[3])
        got = [out.detach(), *(x.grad for x in inputs)]
        close(theirs.context_parallel_unshard(mesh, got, [2] * 4), want)
    theirs._cp_options.enable_load_balance = True
    assert not [x for x in theirs.custom_ops if "for_cpu" in str(x)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    attend = F.scaled_dot_product_attention
    with sd.context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]):
        said = refused(lambda: sd.context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]).__enter__())
        assert said.startswith("context_parallel: expected none around this one"), said
        assert "dropout_p: expected none" in refused(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1))
        ring = theirs.custom_ops[flash]
        assert "attn_mask: expected none" in refused(lambda: ring(flash, (q, q, q), {"attn_mask": flow}))
        assert "dropout_p: expected none" in refused(lambda: ring(flash, (q, q, q, 0.1, True), {}))
    assert F.scaled_dot_product_attention is attend


def case_context_parallel_refusals() -> None:
    """What PyTorch takes for granted, and what its ring has not, are told before anything is sent."""
    mesh, x = init_device_mesh("cpu", (dist.get_world_size(),)), torch.ones(1, 2, 2 * dist.get_world_size(), 4)
    two = init_device_mesh("cpu", (1, dist.get_world_size()))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("buffers: expected one tensor at least", {"buffers": None}),
        (
            "buffers: expected one tensor at least, and in buffer_seq_dims a dimension of each; got 1 and 2",
            {"buffer_seq_dims": [2, 2]},
        ),
        ("buffer_seq_dims: expected dimensions of tensors of shape", {"buffer_seq_dims": [9]}),
        ("mesh: expected a DeviceMesh of one dimension", {"mesh": two}),
        ("mesh: expected a DeviceMesh of one dimension; got None", {"mesh": None}),
    ]
    if dist.get_world_size() > 1:
        wrong.append(("buffers: expected lengths that divide by", {"buffers": [x[:, :, 1:]]}))
    for text, options in wrong:
        with contextlib.ExitStack() as stack:
            given = {"mesh": mesh, "buffers": [x], "buffer_seq_dims": [2]} | options
            said = refused(lambda given=given: stack.enter_context(sd.context_parallel(**given)))
            assert said.startswith(text), said
    before, flash = dict(theirs.custom_ops), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    theirs.custom_ops[flash] = None
    said = refused(lambda: sd.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]).__enter__())
    assert said.startswith("context_parallel: expected none around this one"), said
    del theirs.custom_ops[flash]
    assert theirs.custom_ops == before
    attend = templated._checking(F.scaled_dot_product_attention)
    assert attend(x, x, x, enable_gqa=True).shape == x.shape
    assert "attn_mask: expected none under context_parallel()" in refused(lambda: attend(x, x, x, x))
    assert "dropout_p: expected none under context_parallel()" in refused(lambda: attend(x, x, x, None, 0.1))
    assert "value: expected head_dim 4, as query has" in refused(lambda: attend(x, x, x[..., :2]))


def case_other_releases() -> None:
    """Of which nothing is known are told, with the way out; an op alone is a block of the whole."""
    q, k, v, flow = drawn_tensors(48)
    want, ops = gradients(q, k, v, flow, causal=True), sd.ring_ops()
    out, lse = ops.forward(q, k, v, is_causal=True, scale=0.3)
    flow, q, out, lse = flow[:, :, 24:], q[:, :, 24:], out[:, :, 24:], lse[:, :, 24:].contiguous()
    blocks = [(x[:, :, a:b], y[:, :, a:b]) for x, y in [(k, v)] for a, b in ((0, 24), (24, 48))]
    early, late = (
        ops.backward(flow, q, *both, out, lse, is_causal=at > 0, scale=0.3) for at, both in enumerate(blocks)
    )
    close([out, early[0] + late[0]], [x[:, :, 24:] for x in want[:2]])
    close([out, q, late[1], late[2]], [want[0][:, :, 24:], q.double(), *(x[:, :, 24:] for x in want[2:])])
    release, function = torch.__version__, theirs._templated_ring_attention
    try:
        torch.__version__ = "2.14.0"
        assert "torch: expected 2.13, whose private ring attention is known; got 2.14.0" in refused(sd.ring_ops)
        torch.__version__ = release
        theirs._templated_ring_attention = lambda group, op: None
        said = refused(sd.ring_ops)
        assert (
            said.startswith("torch: expected _templated_ring_attention(group, seq_dim, op, query")
            and "group, op" in said
        )
        assert said.endswith("speedlight.distributed.attention() needs nothing private of PyTorch's.")
    finally:
        torch.__version__, theirs._templated_ring_attention = release, function


def case_ring_ops() -> None:
    """The private functions themselves, by either way of passing blocks on."""
    ranks, ops = dist.get_world_size(), sd.ring_ops()
    if not FULL:  # as above
        return
    q, k, v, flow = drawn_tensors(24 * ranks)
    want = gradients(q, k, v, flow, causal=True)
    group, scale = dist.group.WORLD, 0.3
    for method in ("allgather", "alltoall"):
        theirs.set_rotate_method(method)
        mine = [shard(x, "zigzag") for x in (q, k, v, flow)]
        out, lse = theirs._templated_ring_attention(group, 2, ops.forward, *mine[:3], is_causal=True, scale=scale)
        found = theirs._templated_ring_attention_backward(
            group, 2, ops.backward, mine[3], "grad_out", *mine[:3], out, lse, True, scale=scale
        )
        close([out, *found], [shard(x, "zigzag") for x in want])
    theirs.set_rotate_method("allgather")


# --- ring-flash-attention


def case_ring_flash_attn() -> None:
    """Its calls, beside flash_attn_func() over the whole sequence; packed sequences are sharded one by one."""
    ranks, slopes = dist.get_world_size(), torch.tensor([0.5, 0.25, 0.125, 0.1])
    q, k, v, flow = (x.transpose(1, 2).contiguous() for x in drawn_tensors(24 * ranks))
    options: dict[str, Any] = {"softmax_scale": 0.3, "causal": True}
    options |= {"window_size": (19, 0), "alibi_slopes": slopes} if FULL else {}
    want = traced(flash_attn_func, (q, k, v), flow, **options)
    calls = sd.ring_flash_attn
    for name, kind in (("ring", "contiguous"), ("zigzag_ring", "zigzag"), ("stripe", "stripe")):
        own = [shard(x, kind, 1) for x in (q, k, v)]
        own_flow, own_want = shard(flow, kind, 1), [shard(x, kind, 1) for x in want]
        close(traced(getattr(calls, f"{name}_flash_attn_func"), own, own_flow, **options), own_want)
        kv = traced(
            getattr(calls, f"{name}_flash_attn_kvpacked_func"), (own[0], torch.stack(own[1:], 2)), own_flow, **options
        )
        close([*kv[:2], *kv[2].unbind(2)], own_want)
    qkv = torch.stack([shard(x, "zigzag", 1) for x in (q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))], 2)
    out, lse, none = calls.zigzag_ring_flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    wide = [x.repeat(1, 1, 2, 1) for x in (k, v)]
    expected, logs, _ = flash_attn_func(q, *wide, causal=True, return_attn_probs=True)
    close([out], [shard(expected, "zigzag", 1).double()])
    close([lse], [shard(logs, "zigzag", 2).double()])
    assert none is None
    said = refused(lambda: calls.ring_flash_attn_func(q, k, v, causal=dist.get_rank() > 0)) if ranks > 1 else "causal: "
    assert said.startswith("causal: ")
    assert "dropout_p: expected 0" in refused(lambda: calls.stripe_flash_attn_func(q, k, v, 0.1))
    said = refused(lambda: calls.ring_flash_attn_kvpacked_func(q, k if dist.get_rank() else torch.stack((k, v), 2)))
    assert ranks == 1 or "kv: expected a tensor of shape (batch, seqlen, 2, nheads, headdim)" in said


def case_ring_flash_attn_varlen() -> None:
    """Every sequence is cut for itself, as the package's own tests cut them."""
    ranks, calls = dist.get_world_size(), sd.ring_flash_attn
    local = [0, 5, 6, 20]
    ends = torch.tensor(local, dtype=torch.int32)
    cuts = [ranks * n for n in local]
    q, k, v, flow = (x[0].transpose(0, 1).contiguous() for x in drawn_tensors(cuts[-1]))
    whole = torch.tensor(cuts, dtype=torch.int32)
    longest = max(b - a for a, b in itertools.pairwise(cuts))
    options: dict[str, Any] = {"causal": True} | ({"window_size": (9, 0)} if FULL else {})
    want = traced(flash_attn_varlen_func, (q, k, v), flow, whole, whole, longest, longest, **options)
    for name, kind in (("ring", "contiguous"), ("zigzag_ring", "zigzag")):

        def own(x: torch.Tensor, kind: str = kind) -> torch.Tensor:
            return torch.cat([shard(x[a:b], kind, 0) for a, b in itertools.pairwise(cuts)])

        call, mine = getattr(calls, f"{name}_flash_attn_varlen_func"), [own(x) for x in (q, k, v)]
        close(traced(call, mine, own(flow), ends, longest, **options), [own(x) for x in want])
        packed = getattr(calls, f"{name}_flash_attn_varlen_kvpacked_func")
        out = packed(mine[0], torch.stack(mine[1:], 1), ends, longest, **options)
        close([out], [own(want[0])])
        qkv = torch.stack([mine[0], *(x.repeat(1, 2, 1) for x in mine[1:])], 1)
        out = getattr(calls, f"{name}_flash_attn_varlen_qkvpacked_func")(qkv, ends, longest, causal=True)
        assert out.shape == mine[0].shape


def traced(call: Any, given: Any, flow: torch.Tensor, *more: Any, **options: Any) -> list[torch.Tensor]:
    """What a call returns, and what flows back to its tensors, in float64."""
    inputs = [x.clone().requires_grad_() for x in given]
    out = call(*inputs, *more, **options)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, inputs, flow))]


def case_ring_on_flash_attn() -> None:
    """A ring of somebody else's on flash_attn's private functions, found and called as ring-flash-attention does."""
    speedlight.flash_attn.install()
    try:
        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
    finally:
        speedlight.flash_attn.uninstall()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v, flow = (x.transpose(1, 2).contiguous() for x in drawn_tensors(24 * ranks))
    want = [shard(x, "contiguous", 1) for x in traced(flash_attn_func, (q, k, v), flow, softmax_scale=0.3, causal=True)]
    q, flow = (shard(x, "contiguous", 1) for x in (q, flow))
    blocks = [(x.chunk(ranks, 1)) for x in (k, v)]
    said = {
        "dropout_p": 0.0,
        "softmax_scale": 0.3,
        "window_size_left": -1,
        "window_size_right": -1,
        "alibi_slopes": None,
    }

    def filled(function: Any, **given: Any) -> Any:
        """By name, whatever the function's arguments are: None where it has no default, and no softcap."""
        spec = inspect.getfullargspec(function)
        defaults = spec.defaults or ()
        options = dict(zip(spec.args, (None,) * (len(spec.args) - len(defaults)) + defaults, strict=True))
        return function(**options | {"softcap": 0.0} | said | given)

    out = lse = None
    for source in range(rank + 1):  # as they come round; later ones are hidden
        at = {"k": blocks[0][source].contiguous(), "v": blocks[1][source].contiguous(), "causal": source == rank}
        block, logs, *_ = filled(_flash_attn_forward, q=q, return_softmax=False, **at)
        block, logs = block.float(), logs.transpose(1, 2).unsqueeze(-1)
        if out is None:
            out, lse = block, logs
        else:
            out, lse = out - F.sigmoid(logs - lse) * (out - block), lse - F.logsigmoid(lse - logs)
    lse = lse.squeeze(-1).transpose(1, 2).contiguous()
    total = [torch.zeros_like(x) for x in (q, k, v)]
    for source in range(rank + 1):
        at = {"k": blocks[0][source].contiguous(), "v": blocks[1][source].contiguous(), "causal": source == rank}
        part = [torch.empty_like(x) for x in (q, at["k"], at["v"])]
        named = dict(zip(("dq", "dk", "dv"), part, strict=True))
        filled(_flash_attn_backward, dout=flow, q=q, out=out, softmax_lse=lse, deterministic=False, **named, **at)
        for x, y in zip((total[0], *(x.chunk(ranks, 1)[source] for x in total[1:])), part, strict=True):
            x += y
    for x in total[1:]:
        dist.all_reduce(x)
    close([out, total[0], *(x.chunk(ranks, 1)[rank] for x in total[1:])], want)


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


def drawn_tensors(length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v and what flows into out, the same on every rank."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(BATCH, n, length, DIM, generator=draw, dtype=dtype) for n in (HEADS, KV, KV, HEADS)]


def gradients(q: Any, k: Any, v: Any, flow: Any, **options: Any) -> list[torch.Tensor]:
    """out, dq, dk and dv of the specification, in float64."""
    arrays = [x.double().numpy() for x in (q, k, v)]
    out, lse = reference.attention(*arrays, scale=0.3, return_lse=True, **options)
    found = reference.backward(*arrays, out, lse, flow.double().numpy(), scale=0.3, **options)
    return [torch.from_numpy(x) for x in (out, *found)]


def shard(x: torch.Tensor, kind: Any, dim: int = 2) -> torch.Tensor:
    own = positions(x.shape[dim], dist.get_world_size(), kind)[dist.get_rank()]
    return x.index_select(dim, torch.tensor([i for run in own for i in run], dtype=torch.int64))


def close(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=False):
        torch.testing.assert_close(x.double(), y, atol=3e-6, rtol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


# --- processes

CASES = {name: x for of in (vars(sharded_cache), globals()) for name, x in of.items() if name.startswith("case_")}


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
    with tempfile.TemporaryDirectory() as where:
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
    wanted = [x for x in CASES if re.search(os.environ.get("CASE", ""), x)]
    for count in map(int, sys.argv[1:]):
        forked(count, wanted)
