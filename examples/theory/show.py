"""
The paper's theory on a laptop, in seconds: what few heads with pseudo-heads do, printed and drawn.

    python examples/theory/show.py
"""

# %% What is asked for
import argparse
from pathlib import Path

import torch
from constructions import (
    attention,
    cyclic_shifts,
    departure_from_linear,
    filter_bank,
    filter_bank_by_heads_alone,
    least_error_of_plain_heads,
    patterns,
    tokens,
)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--figure", type=Path, default=Path("demo-output/theory/patterns.png"), help="where it is drawn (%(default)s)"
)
figure = parser.parse_args().figure
torch.manual_seed(0)


def table(*columns: str):
    print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    return lambda *cells: print("| " + " | ".join(map(str, cells)) + " |")


# %% Polynomial filters X, A X, ..., A^(k-1) X, by linear attention
matrix = torch.randn(16, 16, dtype=torch.float64) / 4
content = torch.randn(16, 2, dtype=torch.float64)
row = table(
    "filters k", "heads of IHA", "error", "heads of plain attention", "error", "least error with one head less"
)
for order in (4, 9, 16):
    bank, layer = filter_bank(matrix, content, order)
    powers = [torch.linalg.matrix_power(matrix, power) @ content for power in range(order)]
    expected = torch.stack(powers, dim=1)
    plain = filter_bank_by_heads_alone(matrix, content, order)
    errors = (float((found - expected).norm() / expected.norm()) for found in (bank, plain))
    mine, theirs = (f"{error:.0e}" for error in errors)
    less = f"{least_error_of_plain_heads(matrix, order, order - 1):.0e}"
    row(order, layer.config.num_attention_heads, mine, order, theirs, less)

# %% CPM-3's workspace: every cyclic shift of the tokens, by hard attention
row = table("tokens N", "heads of IHA", "error", "heads of plain attention")
for count in (4, 9, 16, 30):
    content = torch.randn(count, 1, dtype=torch.float64)
    workspace, layer = cyclic_shifts(content)
    expected = torch.stack([content.roll(-shift, dims=0) for shift in range(count)], dim=1)
    row(count, layer.config.num_attention_heads, f"{float((workspace - expected).norm()):.0e}", count)

four = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
print("\nThe workspace of the tokens 1, 2, 3, 4:")
for line in cyclic_shifts(four)[0][..., 0].round().int().tolist():
    print("   ", *line)

# %% More than plain attention can be: on a token repeated, plain attention is linear in it
row = table("pseudo-heads P", "how far f(x + y) is from f(x) + f(y)")
for size in (1, 2, 3):
    layer = attention(heads=2, pseudo_heads=size, head_dim=4, hidden_size=6)
    for parameter in layer.parameters():
        parameter.normal_()
    one, other = torch.randn(2, 6, dtype=torch.float64)
    row(size, f"{departure_from_linear(layer, one, other):.0e}")

# %% The P^2 patterns of one head of the workspace of 16 tokens
import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

content = torch.zeros(16, 1, dtype=torch.float64)
seen = patterns(cyclic_shifts(content)[1], tokens(content))
size = len(seen)
drawing, axes = plt.subplots(size, size, figsize=(6, 6.2), sharex=True, sharey=True)
for query in range(size):
    for key in range(size):
        axes[query, key].imshow(seen[query, key], cmap="Greys")
        axes[query, key].set(xticks=[], yticks=[], title=f"shift {size * query + key}")
        axes[query, key].title.set_fontsize(8)
    axes[query, 0].set_ylabel(f"pseudo-query {query}", fontsize=8)
    axes[-1, query].set_xlabel(f"pseudo-key {query}", fontsize=8)
drawing.suptitle("One head: what each token (row) looks at", fontsize=10)
drawing.tight_layout()
figure.parent.mkdir(parents=True, exist_ok=True)
drawing.savefig(figure, dpi=100)
print(f"\nDrawn: {figure}")
