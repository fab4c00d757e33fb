"""Results as JSON, as a Markdown table and as bars, beside another model's."""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

SETTINGS = ("table", "samples", "max_new_tokens")


def read_baseline(folder: Path, settings: dict) -> dict:
    """
    The results of another model.

    Args:
        settings: those of `SETTINGS` and `tasks`, which the other's must be.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are of other settings, or lack a task.
    """
    file = folder / "results.json"
    if not file.is_file():
        raise FileNotFoundError(f"--baseline {folder}: holds no results.json of an earlier command.")
    baseline = json.loads(file.read_text(encoding="utf-8"))
    for name in SETTINGS:
        if settings[name] != baseline.get(name):
            raise ValueError(f"--baseline {folder}: {name} {baseline.get(name)}, here {settings[name]}.")
    missing = [task for task in settings["tasks"] if task not in baseline["scores"]]
    if missing:
        raise ValueError(f"--baseline {folder}: has no {', '.join(missing)}.")
    return baseline


def write(args: argparse.Namespace, scores: dict, problems: dict):
    """
    Writes results.json, results.md and results.png into the output folder.

    Args:
        args: what `command.parse` gave; differences from its baseline are shown in percentage points.
        scores: {task: {metric: share}}.
        problems: {task: count}.

    Raises:
        ValueError: the baseline is of another number of problems.
    """
    settings = {name: getattr(args, name) for name in (*SETTINGS, "model", "seed", "dtype", "versions")}
    results = {**settings, "problems": problems, "scores": scores}
    (args.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    text = markdown(results, args.baseline)
    (args.output_dir / "results.md").write_text(text, encoding="utf-8")
    bars(results, args.baseline, args.output_dir / "results.png")
    print(text, end="")


def markdown(results: dict, baseline: dict | None = None) -> str:
    columns = [(task, metric) for task, scores in results["scores"].items() for metric in scores]
    now = [100 * results["scores"][task][metric] for task, metric in columns]
    rows = [(results["model"], [f"{score:.1f}" for score in now])]
    if baseline is not None:
        for task, count in results["problems"].items():
            if baseline["problems"][task] != count:
                raise ValueError(f"--baseline: {baseline['problems'][task]} problems of {task}, here {count}.")
        before = [100 * baseline["scores"][task][metric] for task, metric in columns]
        differences = [f"{n:.1f} ({n - b:+.1f})" for n, b in zip(now, before, strict=True)]
        rows = [(baseline["model"], [f"{score:.1f}" for score in before]), (results["model"], differences)]
    lines = ["| model | " + " | ".join(f"{task} {metric}" for task, metric in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    lines += [f"| {model} | " + " | ".join(cells) + " |" for model, cells in rows]
    counts = ", ".join(f"{count} of {task}" for task, count in results["problems"].items())
    note = f"In percent, {results['table']}, {results['samples']} samples of each problem at temperature 0.6"
    note += "; problems: " if results["table"] == "after fine-tuning" else " for Maj, else a greedy one; problems: "
    return "\n".join([*lines, "", f"{note}{counts}.", ""])


def bars(results: dict, baseline: dict | None, file: Path):
    """Draws what `markdown` writes: a bar for each metric of each task, the baseline's beside it."""
    columns = [(task, metric) for task, scores in results["scores"].items() for metric in scores]
    models = [results] if baseline is None else [baseline, results]
    figure, axes = plt.subplots(figsize=(2 + 1.2 * len(columns), 3.5), layout="constrained")
    width = 0.8 / len(models)
    for number, model in enumerate(models):
        heights = [100 * model["scores"][task][metric] for task, metric in columns]
        places = [column + (number + 0.5) * width - 0.4 for column in range(len(columns))]
        drawn = axes.bar(places, heights, width, label=Path(model["model"]).name)
        axes.bar_label(drawn, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(columns)), [f"{task}\n{metric}" for task, metric in columns])
    axes.set_ylabel("%")
    axes.set_ylim(0, 105)
    axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)
