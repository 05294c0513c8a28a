"""Pictures of masks and of attention weights: view() makes matplotlib's figures, also those of `speedlight view`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import fill, shorten
from typing import Any

import numpy as np

from ..arrays.latents import join_pair
from ..errors import ArgumentError, ArgumentTypeError, how_to_install, shown
from ..host.notebooks import TILE_COLOURS
from ..problem.checks import integer
from ..problem.options import Causal, Mask, Scores, Window
from ..problem.plan import Plan
from ..problem.problem import Problem
from ..problem.signatures import public
from ..problem.tiles import Rows, grid, integers_of
from ..problem.work import all_pairs
from .plan import plan as plan_of


@public()
def view(
    mask_or_q: Any,
    k: Any = None,
    *,
    causal: Causal = False,
    window: Window | None = None,
    mask: Mask | None = None,
    score: Scores | None = None,
    scale: float | None = None,
    head: int | Sequence[int] = 0,
    item: int = 0,
    span: tuple[int, int] | None = None,
    labels: Sequence[str] | None = None,
    q_len: int = 4096,
    title: str | None = None,
) -> Any:
    """Returns a matplotlib figure of the tiles of a mask, or of attention weights; a notebook shows it.

    Args:
        mask_or_q: a mask, as attention() takes it, or a Plan: which tiles are computed whole, under the mask, or not at
            all. Or, beside `k`, queries (batch, q_heads, q_len, head_dim): how much weight each gives to each key.
        k: keys (batch, kv_heads, k_len, head_dim).
        causal, window, score: as for attention(), beside a mask, or of weights.
        mask, scale: of weights, as for attention().
        head: which query head to draw; of weights also several.
        item: of weights: which batch item.
        span: of weights: positions to draw, (first, end).
        labels: of weights: a text for each key.
        q_len: of a mask: how many queries and keys. A Plan has other sizes.
        title: words above the picture. Default the mask's own.

    Raises:
        speedlight.Error: the argument, what was expected and what came; or that matplotlib is missing.

    >>> import numpy as np, speedlight as sl
    >>> [axes.get_xlabel() for axes in sl.view(sl.causal() & sl.window(1024, 0)).axes]
    ['key position']
    >>> q = k = np.ones((1, 2, 8, 4), np.float32)
    >>> [axes.get_title() for axes in sl.view(q, k, head=[0, 1], causal=True).axes]
    ['head 0', 'head 1', '']
    """
    heads = [integer("head", x) for x in (head if np.iterable(head) else [head])]
    if k is not None:
        if span is not None and not (isinstance(span, (tuple, list)) and len(span) == 2):
            raise ArgumentTypeError(f"span: expected a pair of positions, (first, end); got {shown(span)}.")
        where = None if span is None else (integer("span", span[0]), integer("span", span[1]))
        options = {"causal": causal, "window": window, "mask": mask, "score": score, "scale": scale}
        of = integer("item", item)
        return draw_weights(mask_or_q, join_pair(k), heads, of, where, labels, lambda _: options, title=title)[0]
    plan = mask_or_q
    if plan is None:
        raise ArgumentError("mask_or_q: expected a mask, a Plan, or q beside k; got None.")
    for name, x in (("mask", mask), ("scale", scale), ("span", span), ("labels", labels)):
        if x is not None:
            way = "Join masks by &." if name == "mask" else "Leave it out."
            raise ArgumentError(f"{name}: expected q and k beside it; got a mask or a Plan. {way}")
    if not isinstance(plan, Plan):
        _check_array(plan, q_len)
        sizes: dict[str, Any] = {"q_heads": max(0, *heads) + 1, "q_len": q_len, "head_dim": 64}
        plan = plan_of(**sizes, causal=causal, window=window, mask=plan, score=score)
    found = plan.problem.mask
    own = " and ".join(["causal"] * plan.problem.causal + ([] if found is None else [repr(found.root)]))
    return tile_map(plan, heads[0], shorten(own, 150) if title is None else title)


def _check_array(mask: Any, q_len: int) -> None:
    """Raises if an array is queries without keys, or a mask of other sizes."""
    if not getattr(mask, "shape", ()):
        return
    dtype, keys = str(mask.dtype), mask.shape[-1]
    if "float" in dtype:
        raise ArgumentError("k: expected keys beside queries, or a mask alone; got none.")
    if "bool" in dtype and keys not in (1, q_len):
        raise ArgumentError(f"q_len: expected the mask's {keys} keys; got {q_len}. Write q_len={keys}.")


def pyplot(backend: str | None = "agg") -> Any:
    """Returns matplotlib.pyplot, which draws into files alone; None: as its user's settings say."""
    try:
        import matplotlib
    except ImportError:
        raise ArgumentError(f"matplotlib: a picture needs it. Install it with: {how_to_install('plot')}") from None
    if backend:
        matplotlib.use(backend)
    import matplotlib.pyplot as plt

    return plt


def _new_figure(width: float, height: float) -> Any:
    """Returns a figure that pyplot has forgotten: else a notebook would show it twice."""
    plt = pyplot(None)
    figure = plt.figure(figsize=(width, height), layout="constrained")
    plt.close(figure)
    return figure


def tile_map(plan: Plan, head: int, text: str, *, size: tuple[float, float] = (7.2, 7.0)) -> Any:
    """Draws which tiles are computed whole, under the mask, or skipped: queries downwards, keys to the right.

    A small `size`, in inches, has shorter words.
    """
    if not 0 <= head < plan.problem.q_heads:
        raise ArgumentError(f"head: expected 0 to {plan.problem.q_heads - 1}; got {head}.")
    figure = _new_figure(*size)
    from matplotlib.patches import Patch

    axes = figure.subplots()
    queries, keys = _draw_tiles(axes, plan, head)
    whole = plan.tile_flops + plan.skipped_flops
    computed = plan.tile_flops / whole if whole else 0.0
    square, visible = all_pairs(plan.problem), ""
    if plan.visible_pairs is not None and square:
        visible = f"{plan.visible_pairs / square:.1%} of the pairs are visible"
    small = size[0] < 6  # then in shorter words
    several = plan.problem.q_heads > 1 and not small
    visible += (";\n" if several else "; ") * bool(visible)  # the title is not wider than the picture
    work = f"{computed:.1%} of the work{' of all heads' * several} is done"
    work += "" if small else f", {1 - computed:.1%} is skipped"
    if several:
        axes.set_ylabel(f"query position, {_heads_drawn(plan.problem, head)}")
    axes.set_title(f"{fill(text, 75)}\n{visible}{work}", fontsize=9 if small else 11)
    shown = f"a cell: {queries:g} queries x {keys} keys"
    names = {"full": "full: without the mask", "mixed": "mixed: under the mask", "skipped": "skipped: nothing visible"}
    handles = [
        Patch(facecolor=TILE_COLOURS[n], edgecolor="#666666", label=n if small else label) for n, label in names.items()
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3, frameon=False, title=shown, title_fontsize=9, fontsize=9
    )
    return figure


def _heads_drawn(problem: Problem, head: int) -> str:
    """Names the heads that share a head's keys, and so its tiles."""
    first, end = head // problem.group * problem.group, (head // problem.group + 1) * problem.group
    which = f"head {head}" if problem.group == 1 else f"heads {first} to {end - 1}"
    return f"{which} of {problem.q_heads}"


def _draw_tiles(axes: Any, plan: Plan, head: int) -> tuple[float, int]:
    """The map of one item; returns the queries and keys of a cell."""
    from matplotlib.colors import ListedColormap

    p = plan.problem
    rows = Rows(p, 0, head // p.group, plan.panel, integers_of(p))
    if not (p.q_lengths[0] and rows.keys):
        raise ArgumentError("q_len: expected queries and keys to draw; got none.")
    kinds, queries, keys = grid(rows)
    # the last cell may reach past the end: draw it whole and cut the axes there
    first, last = p.q_starts[0], p.q_starts[0] + p.q_lengths[0]
    extent = (p.k_start, p.k_start + kinds.shape[1] * keys, first + kinds.shape[0] * queries / p.group, first)
    axes.imshow(
        kinds, cmap=ListedColormap(list(TILE_COLOURS.values())), vmin=0, vmax=2, interpolation="nearest", aspect="auto",
        extent=extent,
    )  # fmt: skip
    axes.set_xlim(p.k_start, p.k_start + rows.keys)
    axes.set_ylim(last, first)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda x, _: f"{int(x):,}")
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    return queries / p.group, keys


_PIXELS = 700  # cells of a picture to a side; more tokens share one
_ROWS = 128  # whose weights are in memory at a time
_FAINTEST = 1e-3


def draw_weights(
    q: Any, k: Any, heads: Sequence[int], item: int, span: tuple[int, int] | None, labels: Sequence[str] | None,
    options: Callable[[int], dict[str, Any]], *, title: str | None = None, watch: Callable[[], None] = lambda: None,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """Draws a panel of attention weights for each head: queries downwards, keys to the right. `options` are a head's.

    Returns the figure and what it shows; `watch` is called after each head.
    """
    if q.ndim != 4 or k.ndim != 4:
        raise ArgumentError(
            f"q: expected arrays of shape (batch, heads, length, head_dim); got {tuple(q.shape)} and {tuple(k.shape)}."
        )
    fits = (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3]) and k.shape[1] and not q.shape[1] % k.shape[1]
    if not fits:
        raise ArgumentError(
            f"k: expected shape ({q.shape[0]}, kv heads, length, {q.shape[3]}), with kv heads that divide q's "
            f"{q.shape[1]} heads; got {tuple(k.shape)}."
        )
    for name, chosen, most in (("item", [item], q.shape[0]), ("head", heads, q.shape[1])):
        if any([not 0 <= x < most for x in chosen]):
            raise ArgumentError(f"{name}: expected 0 to {most - 1}; got {', '.join(map(str, chosen))}.")
    rows, keys = _spans(span, q.shape[2], k.shape[2])
    tokens = None if labels is None else [x.replace("$", r"\$") for x in labels]
    if tokens is not None and len(tokens) != k.shape[2]:
        raise ArgumentError(f"labels: expected {k.shape[2]}, one for each key; got {len(tokens)}.")
    across = min(len(heads), 3)
    down = -(-len(heads) // across)
    side = 5.6 if len(heads) == 1 else 4.2
    figure = _new_figure(side * across + 0.9, side * down + 0.4)
    axes = figure.subplots(down, across, squeeze=False)
    from matplotlib.colors import LogNorm

    drawn, largest = None, []
    for place, head in zip(axes.flat, heads, strict=False):
        cells = _cells(q, k, item, head, options(head), rows, keys)
        watch()
        largest.append({"head": head, "largest": float(cells.max(initial=0.0))})
        extent = (keys[0] - 0.5, keys[1] - 0.5, rows[1] - 0.5, rows[0] - 0.5)
        faint = np.maximum(cells, _FAINTEST)  # one scale for all heads
        drawn = place.imshow(
            faint, cmap="cividis", norm=LogNorm(_FAINTEST, 1.0), interpolation="nearest", aspect="auto", extent=extent
        )
        place.set_title(f"head {head}", fontsize=10)
        if tokens is not None:
            _name_ticks(place.xaxis, keys, tokens, 90)
            _name_ticks(place.yaxis, rows, tokens[k.shape[2] - q.shape[2] :], 0)
        else:
            place.locator_params(integer=True, min_n_ticks=1)
    for place in list(axes.flat)[len(heads) :]:
        place.set_visible(False)
    for place in axes[-1]:
        place.set_xlabel("key")
    for place in axes[:, 0]:
        place.set_ylabel("query")
    figure.suptitle(title or f"Attention weights, item {item} of the batch", fontsize=11)
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8, pad=0.01)
    bar.set_label("attention weight")
    bar.set_ticks([1e-3, 1e-2, 1e-1, 1.0], labels=["≤ 0.001", "0.01", "0.1", "1"])
    return figure, {"weights": {"item": item, "queries": rows, "keys": keys, "heads": largest}}


def _name_ticks(axis: Any, span: tuple[int, int], tokens: list[str], rotation: int) -> None:
    """Tokens instead of numbers; every few, where there are many."""
    at = list(range(*span, max(1, -(-(span[1] - span[0]) // 42))))
    axis.set_ticks(at, [tokens[i] for i in at], fontsize=6 if len(at) > 24 else 8)
    axis.set_tick_params(rotation=rotation)


def _cells(
    q: Any, k: Any, item: int, head: int, options: dict[str, Any], rows: tuple[int, int], keys: tuple[int, int]
) -> np.ndarray:  # fmt: skip
    """The weights of some rows and keys of a head, computed by rows; where tokens share a cell, the largest."""
    from ..reference import weights

    kv_head = head // (q.shape[1] // max(1, k.shape[1]))
    one = k[item : item + 1, kv_head : kv_head + 1]
    tall, wide = (max(1, -(-(end - first) // _PIXELS)) for first, end in (rows, keys))
    bands, step = [], max(1, _ROWS // tall) * tall
    for start in range(*rows, step):
        some = q[item : item + 1, head : head + 1, start : min(start + step, rows[1])]
        w = weights(some, one, q_start=start + k.shape[2] - q.shape[2], **options)[0, 0][:, slice(*keys)]
        w = np.pad(w, ((0, -w.shape[0] % tall), (0, -w.shape[1] % wide)))
        bands.append(w.reshape(w.shape[0] // tall, tall, w.shape[1] // wide, wide).max(axis=(1, 3)))
    return np.concatenate(bands)


def _spans(span: tuple[int, int] | None, *lengths: int) -> list[tuple[int, int]]:
    """Returns the rows and keys to draw: where one of them is shorter, as many as there are."""
    if span is None:
        return [(0, length) for length in lengths]
    first, end = span
    most = max(lengths) if 0 <= first < min(lengths) else min(lengths)
    if not 0 <= first < min(end, most) or end > most:
        raise ArgumentError(f"span: expected positions from 0 to {most}, the first below the second; got {span}.")
    return [(first, min(end, length)) for length in lengths]
