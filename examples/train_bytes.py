"""Trains a byte-level transformer of 2 M parameters on the text that ships with Python, attention's gradients by us.

    pip install '.[torch,cli,plot]'                      # in a clone of the repository
    python examples/train_bytes.py                       # some two minutes on two cores
    python examples/generate.py --checkpoint bytes.safetensors --prompt "The for statement"

--sdpa torch is the same run through PyTorch's attention: the losses differ by roundings. With --reproducible, runs
with other --threads print the same digest of all that attention and its gradients came to.
"""

from __future__ import annotations

import hashlib
import json
import math
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

import speedlight as sl
import speedlight.torch

VOCABULARY, LAYERS, DIM, HEADS, KV_HEADS, HIDDEN = 256, 4, 192, 6, 2, 640  # examples/generate.py reads such a model
ENGINES = ("speedlight", "torch")
MARK, PICTURES = "examples/train_bytes.py", (".png", ".svg", ".pdf")  # the title of a picture, which these three keep


class Block(nn.Module):
    """RMSNorm, rotary positions, grouped heads, SwiGLU."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        self.engine, self.norm = engine, nn.RMSNorm(DIM, eps=1e-5, elementwise_affine=False)
        self.attention = speedlight.torch.Attention(
            DIM, HEADS, kv_heads=KV_HEADS, causal=True, rotary=10000.0, interleaved=True
        )
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + (self.attention(h) if self.engine == "speedlight" else by_pytorch(self.attention, h))
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Bytes in, logits of the next ones out."""

    def __init__(self, engine: str = "speedlight") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList([Block(engine) for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(DIM, eps=1e-5, elementwise_affine=False)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def by_pytorch(layer: speedlight.torch.Attention, x: torch.Tensor) -> torch.Tensor:
    """What the layer does, through PyTorch's attention."""
    q, k, v = (p(x).unflatten(-1, (-1, layer.head_dim)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (sl.rotary(y, interleaved=True, layout="blhd") for y in (q, k))
    heads_first = (y.transpose(1, 2) for y in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return layer.o_proj(out.transpose(1, 2).flatten(-2))


class Digest:
    """Of the bits of attention's outputs and of what flows back from it to q, k and v, in every layer and step."""

    def __init__(self, model: Model) -> None:
        self.sum = hashlib.blake2b(digest_size=8)
        for layer in (block.attention for block in model.layers):
            layer.o_proj.register_forward_pre_hook(lambda _, given: self.add(given[0]))
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
                projection.register_full_backward_hook(lambda _, __, flows: self.add(flows[0]))

    def add(self, x: torch.Tensor) -> None:
        self.sum.update(x.detach().contiguous().numpy())


def text() -> torch.Tensor:
    """The bytes of Python's own help."""
    topics = "\n\n".join(pydoc_data.topics.topics.values())
    return torch.from_numpy(np.frombuffer(topics.encode(), np.uint8).astype(np.int64))


def batches(data: torch.Tensor, steps: int, batch: int, length: int, seed: int) -> torch.Tensor:
    """(steps, batch, length + 1) bytes, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - length - 1, (steps, batch, 1), generator=generator)
    return data[starts + torch.arange(length + 1)]


def rate(step: int, steps: int, most: float) -> float:
    """Of learning: a rise, then half a cosine."""
    return most * min((step + 1) / min(40, steps), 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(model: Model, data: torch.Tensor, most: float, progress: Progress | None = None) -> list[float]:
    """One step for each of `data`; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), most, betas=(0.9, 0.95), weight_decay=0.01)
    bar = None if progress is None else progress.add_task("", total=len(data), loss=math.nan)
    losses = []
    for step, tokens in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, len(data), most)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if progress is not None and bar is not None:
            progress.update(bar, advance=1, loss=losses[-1])
    return losses


def draw(losses: list[float], path: Path) -> None:
    """The curve of the losses, in bits of a byte."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.array(losses) / math.log(2))
    axes.set(xlabel="step", ylabel="loss, bits of a byte", title="Python's own help, a byte at a time")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, metadata={"Title": MARK})
    plt.close(figure)


def check_new(option: str, path: Path, written: bool) -> None:
    """A file that something else wrote stays as it is."""
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"no folder {path.parent}; make it first.", param_hint=option)
    if path.exists() and not written:
        raise typer.BadParameter(
            f"expected a new name, or a file that this program wrote; got {path}, which stays as it is.",
            param_hint=option,
        )


def is_checkpoint(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            return "sizes" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def is_curve(path: Path) -> bool:
    return path.is_file() and MARK.encode() in path.read_bytes()


def check_files(output: Path, picture: Path) -> None:
    """Before minutes of training: both files can be written, and nothing is lost by it."""
    check_new("--output", output, is_checkpoint(output))
    if picture.suffix not in PICTURES:
        raise typer.BadParameter(
            f"expected a name ending in {', '.join(PICTURES)}; got {picture}.", param_hint="--curve"
        )
    if picture.absolute() == output.absolute():
        raise typer.BadParameter(f"expected another name than the checkpoint's; got {picture}.", param_hint="--curve")
    check_new("--curve", picture, is_curve(picture))


def main(
    output: Annotated[Path, typer.Option("-o", "--output", help="The checkpoint.")] = Path("bytes.safetensors"),
    steps: Annotated[int, typer.Option(min=1, help="Of the optimizer.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 16,
    length: Annotated[int, typer.Option(min=1, help="Bytes of a sequence.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="The highest.")] = 4e-3,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights, batches and what is generated.")] = 0,
    sdpa: Annotated[str, typer.Option(help="Whose attention: speedlight or torch.")] = "speedlight",
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Default: all.")] = None,
    reproducible: Annotated[
        bool, typer.Option(help="PyTorch's part on one thread: attention then has the same bits for any --threads.")
    ] = False,
    curve: Annotated[Path | None, typer.Option(help="A picture of the losses. Default: beside the checkpoint.")] = None,
    sample: Annotated[int, typer.Option(min=0, help="Bytes to generate at the end.")] = 300,
) -> None:
    """Trains a byte-level transformer of 2 M parameters on Python's own help."""
    if sdpa not in ENGINES:
        raise typer.BadParameter(f"expected {' or '.join(ENGINES)}; got {sdpa!r}.", param_hint="--sdpa")
    if not 0 < learning_rate < math.inf:
        raise typer.BadParameter(
            f"expected a finite number above 0; got {learning_rate}.", param_hint="--learning-rate"
        )
    picture = output.with_suffix(".png") if curve is None else curve
    check_files(output, picture)
    if length >= len(text()):
        raise typer.BadParameter(
            f"expected fewer than the text's {len(text()):,} bytes; got {length:,}.", param_hint="--length"
        )
    torch.manual_seed(seed)
    sl.set_threads(threads)
    if reproducible:  # PyTorch's sum over a whole tensor is another one with other threads, and no product is promised
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
    elif threads is not None:
        torch.set_num_threads(threads)
    model, console = Model(sdpa), Console(stderr=True)
    digest = Digest(model) if reproducible else None
    data = batches(text(), steps, batch, length, seed)
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} steps, loss {task.fields[loss]:.4f}"))
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters, attention by {sdpa}")
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        losses = train(model, data, learning_rate, progress)
    print(f"loss {losses[0]:.4f} → {losses[-1]:.4f} nats a byte ({losses[-1] / math.log(2):.2f} bits)")
    if digest is not None:
        print(f"attention's bits: {digest.sum.hexdigest()}")
    sizes = {"layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS}
    save_file(model.state_dict(), output, metadata={"sizes": json.dumps(sizes)})  # of several, the order would vary
    draw(losses, picture)
    print(f"{output}, {picture}", flush=True)
    if sample:
        from generate import Model as Trained
        from generate import generate

        prompt = "The for statement"
        print(prompt, end="")
        for letter in generate(Trained(checkpoint=output), prompt, sample, 64):
            print(letter, end="", flush=True)
        print()
    sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
