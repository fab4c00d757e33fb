"""The curves of reasoning.py."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(curves: dict[str, dict[str, list[list[float]]]], chance: dict[str, float], file: Path):
    """Validation accuracy by epoch, a panel for each task: the mean of the seeds, and their range."""
    figure, axes = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 4), layout="constrained", squeeze=False)
    for axis, (task, models) in zip(axes[0], curves.items(), strict=True):
        for name, runs in models.items():
            # Where a seed has stopped, the others go on alone.
            each = [[run[i] for run in runs if i < len(run)] for i in range(max(map(len, runs)))]
            epochs = range(1, len(each) + 1)
            axis.plot(epochs, [sum(values) / len(values) for values in each], label=name)
            axis.fill_between(epochs, [min(values) for values in each], [max(values) for values in each], alpha=0.15)
        axis.axhline(chance[task], color="grey", linestyle=":", label="chance")
        axis.set(title=task, xlabel="epochs")
        axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="validation accuracy")
    axes[0, -1].legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
