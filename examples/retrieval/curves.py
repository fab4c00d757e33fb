"""The curves of study.py."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(curves: dict[str, list[dict]], flops: dict[str, float], file: Path):
    """Accuracy by steps and by FLOPs: the median of the seeds, and their range."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name, runs in curves.items():
        each = [sorted(at_step) for at_step in zip(*(run["accuracy"] for run in runs), strict=True)]
        low, middle, high = ([values[i] for values in each] for i in (0, len(runs) // 2, -1))
        for axis, unit in zip(axes, (1, flops[name]), strict=True):
            x = [step * unit for step in runs[0]["step"]]
            axis.plot(x, middle, label=name)
            axis.fill_between(x, low, high, alpha=0.15)
    for axis, label in zip(axes, ("steps", "FLOPs"), strict=True):
        axis.set(xlabel=label, ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="accuracy, multi-key retrieval, 510 tokens")
    axes[0].legend()
    figure.savefig(file, dpi=120)
