"""
The curves of a run as PNG.

    python plot.py OUTPUT_DIR    # reads results.json there, writes curves.png beside it
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

PANELS = (
    ("loss", {"loss": "training", "eval_loss": "evaluation"}),
    ("pseudo-heads apart", {f"apart/{kind}": kind for kind in ("q_mix", "k_mix", "v_mix", "collapse")}),
    ("gradient norm", {"grad_norm": "all", "mixing_grad_norm": "mixing tensors"}),
    ("tokens per second", {"tokens_per_second": "training"}),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    folder = parser.parse_args().output_dir
    log = json.loads((folder / "results.json").read_text(encoding="utf-8"))["log"]
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, (title, lines) in zip(axes.flat, PANELS, strict=True):
        for key, label in lines.items():
            points = [(entry["step"], entry[key]) for entry in log if key in entry]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o" if len(points) < 20 else None, ms=4, label=label)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.savefig(folder / "curves.png", dpi=120)
    print(folder / "curves.png")


if __name__ == "__main__":
    main()
