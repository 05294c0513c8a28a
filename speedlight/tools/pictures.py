"""Pictures, drawn with matplotlib where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..planning import Plan
from ..tiles import Rows, grid

SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = {"skipped": "#f2f2f2", "mixed": "#e69f00", "full": "#0072b2"}  # told apart by every eye, and in grey


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ArgumentError("--output: a picture needs matplotlib. Install it with: pip install 'speedlight[plot]'") from None
    return plt


def check_path(path: Path) -> None:
    """Before any work: a suffix that can be drawn, in a directory that exists."""
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"--output: expected a name that ends in {', '.join(SUFFIXES)}; got {path.name!r}.")
    if not path.parent.is_dir():
        raise ArgumentError(f"--output: expected a directory that exists; got {path.parent}.")


def tile_map(plan: Plan, head: int, text: str, path: Path) -> None:
    """Which tiles are computed whole, computed under the mask, and skipped: queries downwards, keys to the right."""
    plt = _pyplot()
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    p = plan.problem
    rows = Rows(p, 0, head // p.group, plan.panel)
    kinds, queries, keys = grid(rows)
    figure, axes = plt.subplots(figsize=(7.2, 7.0), layout="constrained")
    # the last cell may reach past the end: draw it whole and cut the axes there
    extent = (p.k_start, p.k_start + kinds.shape[1] * keys, kinds.shape[0] * queries / p.group, 0)
    axes.imshow(kinds, cmap=ListedColormap(list(_COLOURS.values())), vmin=0, vmax=2, interpolation="nearest", aspect="auto", extent=extent)
    axes.set_xlim(p.k_start, p.k_start + rows.keys)
    axes.set_ylim(p.q_lengths[0], 0)
    first = p.q_starts[0]
    axes.yaxis.set_major_formatter(lambda y, _: f"{int(y) + first:,}")
    axes.xaxis.set_major_formatter(lambda x, _: f"{int(x):,}")
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    whole = plan.tile_flops + plan.skipped_flops
    computed = plan.tile_flops / whole if whole else 0.0
    square = sum(a * b for a, b in zip(p.q_lengths, p.k_lengths, strict=True)) * p.q_heads
    visible = "" if plan.visible_pairs is None or not square else f"{plan.visible_pairs / square:.1%} of the pairs are visible; "
    axes.set_title(f"{text}\n{visible}{computed:.1%} of the work is done, {1 - computed:.1%} is skipped", fontsize=11)
    shown = f"a cell: {queries / p.group:g} queries x {keys} keys"
    names = {"full": "full: all visible", "mixed": "mixed: under the mask", "skipped": "skipped: nothing visible"}
    handles = [Patch(facecolor=_COLOURS[n], edgecolor="#666666", label=label) for n, label in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, title=shown, title_fontsize=9, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
