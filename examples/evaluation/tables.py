"""Results as JSON and as a Markdown table, with differences from another model's."""

import json
from pathlib import Path

SETTINGS = ("samples", "max_new_tokens")


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
        if settings[name] != baseline[name]:
            raise ValueError(f"--baseline {folder}: {name} {baseline[name]}, here {settings[name]}.")
    missing = [task for task in settings["tasks"] if task not in baseline["scores"]]
    if missing:
        raise ValueError(f"--baseline {folder}: has no {', '.join(missing)}.")
    return baseline


def write(folder: Path, results: dict, baseline: dict | None):
    """
    Writes results.json and results.md into a folder.

    Args:
        results: `scores` {task: {metric: share}}, `problems` {task: count}, and the settings that led there.
        baseline: what `read_baseline` gave; differences from it are shown in percentage points.

    Raises:
        ValueError: the baseline is of another number of problems.
    """
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    text = markdown(results, baseline)
    (folder / "results.md").write_text(text, encoding="utf-8")
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
    note = f"In percent, {results['samples']} samples of each problem at temperature 0.6; problems: {counts}."
    return "\n".join([*lines, "", note, ""])
