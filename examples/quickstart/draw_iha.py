"""Draw the README's picture of Interleaved Head Attention for H = 2 heads, P = 2 pseudo-heads, N = 3 tokens.

    pip install matplotlib
    python examples/quickstart/draw_iha.py

writes examples/quickstart/iha.png; a path given as argument is written instead.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image  # comes with Matplotlib, as NumPy does

H, P, N = 2, 2, 3  # heads, pseudo-heads per head, tokens
WIDTH, HEIGHT = 12.0, 4.5  # inches, and the drawing's own coordinates

INK, MUTED, HIDDEN, HEAD = "#1f2328", "#57606a", "#f3f4f6", "#d8dee4"
RED = "#cf222e"
PSEUDO = ["#a5c8f0", "#ffc58a"]  # one colour per pseudo-head j
# One colour per (i, j): pseudo-query i looking at pseudo-key j.
PATTERN = {(0, 0): "#5b9bd5", (0, 1): "#b07cc6", (1, 0): "#6bbf7a", (1, 1): "#f2973f"}


def box(ax, x, y, width, height, text, color):
    """A rounded box centred on (x, y)."""
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.06"
    ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=color, edgecolor=INK, linewidth=0.9))
    ax.text(x, y, text, ha="center", va="center_baseline", fontsize=11, color=INK)


def label(ax, x, y, text, size=11, color=INK, **kwargs):
    ax.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": size, "color": color, **kwargs})


def arrow(ax, start, end, color=INK):
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.1, "shrinkB": 0})


def title(ax, x, text, subtitle):
    label(ax, x, 4.27, text, size=14, weight="bold")
    label(ax, x, 3.95, subtitle, size=11, color=MUTED)


def rows(count, top=3.0, bottom=1.1):
    """The heights of `count` boxes in a column."""
    step = (top - bottom) / count
    return [top - (r + 0.5) * step for r in range(count)]


def draw_mixing(ax, left):
    title(ax, left + 1.42, "(a) mix", "H heads → P pseudo-heads each")
    head_x, pseudo_x = left + 0.42, left + 2.32
    head_y, pseudo_y = rows(H), rows(H * P)
    for h in range(H):
        for j in range(P):
            y = pseudo_y[h * P + j]
            for m in range(H):
                ax.plot([head_x + 0.42, pseudo_x - 0.51], [head_y[m], y], color=PATTERN[j, j], linewidth=1.4)
            box(ax, pseudo_x, y, 1.02, 0.36, f"h={h}, j={j}", PSEUDO[j])
    for m in range(H):
        box(ax, head_x, head_y[m], 0.84, 0.46, f"head {m}", HEAD)
    label(ax, head_x, 3.3, "H heads")
    label(ax, pseudo_x, 3.3, "pseudo-heads")
    label(ax, left + 1.42, 0.7, "q_mix, k_mix, v_mix", family="monospace", weight="bold")
    label(ax, left + 1.42, 0.36, r"$\tilde{q}\,[j,h] = \sum_m\,$q_mix$[j,h,m]\;q\,[m]$", size=12)


def draw_interleaving(ax, left):
    title(
        ax,
        left + 2.7,
        "(b) interleave, then causal attention",
        "per head: N·P virtual tokens n,j (token n, pseudo-head j)",
    )
    cell, size = 0.44, N * P
    x0, y0 = left + 0.85, 3.1  # the grid's upper left corner
    virtual = [(n, j) for n in range(N) for j in range(P)]  # virtual index n P + j

    for a, (n, j) in enumerate(virtual):
        middle = (a + 0.5) * cell
        box(ax, x0 + middle, y0 + 0.2, cell - 0.03, 0.28, f"{n},{j}", PSEUDO[j])
        box(ax, x0 - 0.27, y0 - middle, 0.4, 0.3, f"{n},{j}", PSEUDO[j])
    label(ax, x0 + size * cell / 2, y0 + 0.5, "virtual keys →")
    label(ax, x0 - 0.66, y0 - size * cell / 2, "← virtual queries", rotation=90)

    for a, (_, i) in enumerate(virtual):
        for b, (_, j) in enumerate(virtual):
            color = PATTERN[i, j] if b <= a else HIDDEN
            corner = (x0 + b * cell, y0 - (a + 1) * cell)
            ax.add_patch(Rectangle(corner, cell, cell, facecolor=color, edgecolor="white", linewidth=1.2))
    block = P * cell
    for n in range(N):
        for m in range(N):
            corner = (x0 + m * block, y0 - (n + 1) * block)
            ax.add_patch(Rectangle(corner, block, block, fill=False, edgecolor=INK, linewidth=1.6))
    # The last pseudo-query of each token: the only one that sees all P copies of its own key.
    for n in range(N):
        corner = (x0 + n * block, y0 - (n + 1) * block)
        ax.add_patch(Rectangle(corner, block, cell, fill=False, edgecolor=RED, linewidth=2.6, zorder=3))

    x = x0 + size * cell + 0.2
    label(ax, x, 3.1, r"$P \times P$ = 4 patterns" "\nper pair of tokens", ha="left", va="top")
    for r, ((i, j), color) in enumerate(PATTERN.items()):
        y = 2.5 - 0.27 * r
        ax.add_patch(Rectangle((x, y - 0.1), 0.2, 0.2, facecolor=color))
        label(ax, x + 0.3, y, f"query {i}, key {j}", ha="left")
    label(
        ax,
        x,
        1.3,
        "Only a token's last\npseudo-query sees\nall P copies of its\nown key",
        ha="left",
        va="top",
        color=RED,
    )
    label(ax, x0 + size * cell / 2, 0.24, "grey: hidden (key index > query index)", color=MUTED)


def draw_collapse(ax, left):
    title(ax, left + 1.56, "(c) collapse", "P·H pseudo-heads → H heads")
    pseudo_x, head_x, out_x = left + 0.51, left + 2.2, left + 2.97
    head_y, pseudo_y = rows(H), rows(H * P)
    for m in range(H):
        for j in range(P):
            y = pseudo_y[m * P + j]
            for h in range(H):
                ax.plot([pseudo_x + 0.51, head_x - 0.39], [y, head_y[h]], color=PATTERN[j, j], linewidth=1.4)
            box(ax, pseudo_x, y, 1.02, 0.36, f"h={m}, j={j}", PSEUDO[j])
    for h in range(H):
        box(ax, head_x, head_y[h], 0.78, 0.46, f"head {h}", HEAD)
        arrow(ax, (head_x + 0.39, head_y[h]), (out_x - 0.15, head_y[h]))
    ax.add_patch(Rectangle((out_x - 0.15, 1.1), 0.3, 1.9, facecolor="white", edgecolor=INK, linewidth=0.9))
    label(ax, out_x, 2.05, "o_proj", rotation=90, family="monospace", weight="bold")
    label(ax, pseudo_x, 3.3, "their outputs")
    label(ax, head_x, 3.3, "H heads")
    label(ax, left + 1.56, 0.7, "collapse.weight", family="monospace", weight="bold")
    label(ax, left + 1.56, 0.36, r"out$\,[h] = \sum_{j,m}\,$collapse$[h,j,m]\;o\,[j,m]$", size=12)


def main(path):
    figure = plt.figure(figsize=(WIDTH, HEIGHT), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    ax.axis("off")
    draw_mixing(ax, left=0.12)
    draw_interleaving(ax, left=3.15)
    draw_collapse(ax, left=8.73)
    for x in (3.12, 8.58):
        ax.plot([x, x], [0.2, HEIGHT - 0.2], color=HEAD, linewidth=1)
    figure.set_dpi(150)
    figure.canvas.draw()
    # Flat colours: a palette of 128 makes the file three times smaller.
    Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB").quantize(128).save(path, optimize=True)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("iha.png"))
