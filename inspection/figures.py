"""Figures of what heads mix and of what they attend to, as matplotlib figures that no window shows."""

import torch
from matplotlib.colors import PowerNorm, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .patterns import Patterns

KINDS = {"q_mix": "queries", "k_mix": "keys", "v_mix": "values", "collapse": "collapse"}
MOST_LABELS = 24  # tokens at an axis
FAINTEST = 0.02  # of the largest weight; lines below are left out


def draw_mixing(layer: int, mixing: dict[str, torch.Tensor]) -> Figure:
    """
    Heatmaps of a layer's mixing tensors: a row for each kind, a column for each pseudo-head; white is nothing.

    Args:
        layer: its index, for the title.
        mixing: an entry of `statistics.by_layer`.
    """
    tensors = {**mixing, "collapse": mixing["collapse"].transpose(0, 1)}  # [P, H, H], as the others
    size = len(tensors["collapse"])
    figure = Figure(figsize=(1.2 + 2.2 * size, 1 + 2.1 * len(KINDS)), layout="constrained")
    axes = figure.subplots(len(KINDS), size, squeeze=False)
    for row, (kind, name) in zip(axes, KINDS.items(), strict=True):
        largest = float(tensors[kind].abs().max()) or 1.0
        for j, ax in enumerate(row):
            image = ax.imshow(tensors[kind][j].numpy(), cmap="RdBu_r", norm=TwoSlopeNorm(0, -largest, largest))
            ax.set_title(f"{name}, pseudo-head {j}", fontsize=9)
            ax.tick_params(labelsize=7)
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
        row[0].set_ylabel("of head" if kind != "collapse" else "into head", fontsize=8)
        figure.colorbar(image, ax=row, shrink=0.8).ax.tick_params(labelsize=7)
    for ax in axes[-1]:
        ax.set_xlabel("reads head", fontsize=8)
    figure.suptitle(f"Mixing of layer {layer}, P = {size}")
    return figure


def draw_patterns(patterns: Patterns, tokens: list[str]) -> Figure:
    """
    The pattern of a head without mixing, and beside it the P^2 that it has: row i is pseudo-query i, column j
    pseudo-key j.

    Args:
        patterns: see `attention_patterns`.
        tokens: N texts for the axes; many are left out.
    """
    size = len(patterns.weights)
    figure = Figure(figsize=(2.6 * (size + 1) + 1, 2.6 * size + 1.2), layout="constrained")
    grid = figure.add_gridspec(size, size + 1)
    places = [(grid[:, 0], "plain head", patterns.plain)]
    places += [
        (grid[i, j + 1], f"query {i}, key {j}", patterns.weights[i, j]) for i in range(size) for j in range(size)
    ]
    step = -(-len(tokens) // MOST_LABELS)
    labels = [repr(token)[1:-1] for token in tokens]
    for place, title, weights in places:
        ax = figure.add_subplot(place)
        image = ax.imshow(weights.numpy(), cmap="magma", norm=PowerNorm(0.5, 0, 1))
        ax.set_title(title, fontsize=9)
        ax.set_xticks(range(0, len(tokens), step), labels[::step], rotation=90, fontsize=6)
        ax.set_yticks(range(0, len(tokens), step), labels[::step], fontsize=6)
        for spine in ax.spines.values():
            spine.set_visible(False)
    figure.colorbar(image, ax=figure.axes, shrink=0.6)
    figure.suptitle(f"Attention of layer {patterns.layer}, head {patterns.head}")
    return figure


def draw_graph(layer: int, mixing: dict[str, torch.Tensor]) -> Figure:
    """
    The pseudo-head graph of a layer: the heads, the pseudo-queries that are mixed of them, and the heads that the
    collapse makes of what those attend to. A line is as strong as its weight is large, red above 0 and blue below.
    """
    queries, collapse = mixing["q_mix"], mixing["collapse"]
    size, heads, _ = queries.shape
    figure = Figure(figsize=(7, 1.5 + 0.22 * size * heads), layout="constrained")
    ax = figure.add_subplot()
    middle = [(j, h) for h in range(heads) for j in range(size)]
    height = {key: -float(place) for place, key in enumerate(middle)}
    ends = [sum(height[j, h] for j in range(size)) / size for h in range(heads)]
    largest = {"mix": float(queries.abs().max()), "collapse": float(collapse.abs().max())}
    for j, h in middle:
        for m in range(heads):
            _line(ax, (0, ends[m]), (1, height[j, h]), float(queries[j, h, m]), largest["mix"])
            _line(ax, (1, height[j, h]), (2, ends[m]), float(collapse[m, j, h]), largest["collapse"])
        ax.text(1, height[j, h], f"{h}.{j}", fontsize=7, ha="center", va="center", bbox=_BOX)
    for h, y in enumerate(ends):
        for x in (0, 2):
            ax.text(x, y, str(h), fontsize=8, ha="center", va="center", bbox=_BOX)
    ax.set_xticks([0, 1, 2], ["head", "pseudo-query (head.pseudo-head)", "head after collapse"], fontsize=8)
    ax.set_xlim(-0.2, 2.2)
    ax.set_ylim(min(height.values()) - 1, 1)
    ax.yaxis.set_visible(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    figure.suptitle(f"Pseudo-heads of layer {layer}")
    return figure


_BOX = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "grey", "linewidth": 0.5}


def _line(ax, start: tuple[float, float], end: tuple[float, float], weight: float, largest: float):
    strength = abs(weight) / largest if largest else 0.0
    if strength > FAINTEST:
        color = "tab:red" if weight > 0 else "tab:blue"
        ax.plot(*zip(start, end, strict=True), color=color, alpha=strength, linewidth=2 * strength, zorder=0)
