"""Trains a small model on as many processes as there are, by DDP or FSDP: what test_torch_distributed.py starts.

    python tests/support/distributed.py RANK WORLD ddp|fsdp patched|plain FOLDER

Rank 0 saves losses and parameters to FOLDER; a world of one is the run that the others must equal.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import speedlight.torch

STEPS, BATCH, LENGTH, DIM = 4, 4, 12, 16


class Model(nn.Module):
    """PyTorch's encoder layer, and ours after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.TransformerEncoderLayer(DIM, 2, 32, 0.0, batch_first=True, dtype=torch.float64)
        self.second = speedlight.torch.Attention(
            DIM, 4, kv_heads=2, causal=True, rotary=10000.0, sinks=True, dtype=torch.float64
        )
        self.last = nn.Linear(DIM, DIM, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.second(x))


def wrapped(model: Model, how: str) -> nn.Module:
    if dist.get_world_size() == 1:
        return model
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(rank: int, world: int, how: str, patched: bool, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    if patched:
        speedlight.torch.patch()
    torch.manual_seed(0)
    model = wrapped(Model(), how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(STEPS, 2, BATCH, LENGTH, DIM, dtype=torch.float64)
    losses = []
    for x, y in data:
        mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        loss = nn.functional.mse_loss(model(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole / world)
    state = {name.removeprefix("module."): x.detach() for name, x in model.state_dict().items()}
    state = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in state.items()}
    if rank == 0:
        counts = speedlight.torch.report()
        state |= {"losses": torch.stack(losses), "taken": counts.taken, "left": counts.left}
        torch.save(state, folder / "found")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "patched", Path(sys.argv[5]))
