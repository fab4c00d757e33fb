"""Results as JSON and as a Markdown table, with differences from another model's."""

import json
from pathlib import Path


def write(folder: Path, results: dict, baseline: Path | None):
    """
    Writes results.json and results.md into a folder.

    Args:
        results: `scores` {task: {metric: share}}, `problems` {task: count}, and the settings that led there.
        baseline: a folder with the results of another model, whose differences are shown in percentage points.

    Raises:
        ValueError: the baseline lacks a score, or is of other settings or problems.
    """
    other = json.loads((baseline / "results.json").read_text(encoding="utf-8")) if baseline else None
    text = markdown(results, other)
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(text, encoding="utf-8")
    print(text, end="")


def markdown(results: dict, baseline: dict | None = None) -> str:
    columns = [(task, metric) for task, scores in results["scores"].items() for metric in scores]
    rows = {results["model"]: [f"{100 * results['scores'][task][metric]:.1f}" for task, metric in columns]}
    if baseline is not None:
        _check_comparable(results, baseline)
        before = [100 * baseline["scores"][task][metric] for task, metric in columns]
        now = [100 * results["scores"][task][metric] for task, metric in columns]
        rows = {baseline["model"]: [f"{score:.1f}" for score in before]}
        rows[results["model"]] = [f"{n:.1f} ({n - b:+.1f})" for n, b in zip(now, before, strict=True)]
    lines = ["| model | " + " | ".join(f"{task} {metric}" for task, metric in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    lines += [f"| {model} | " + " | ".join(cells) + " |" for model, cells in rows.items()]
    counts = ", ".join(f"{count} of {task}" for task, count in results["problems"].items())
    note = f"In percent, {results['samples']} samples of each problem at temperature 0.6; problems: {counts}."
    return "\n".join([*lines, "", note, ""])


def _check_comparable(results: dict, baseline: dict):
    for task, scores in results["scores"].items():
        missing = [metric for metric in scores if metric not in baseline["scores"].get(task, {})]
        if missing:
            raise ValueError(f"--baseline: {baseline['model']} has no {task} {', '.join(missing)}.")
        if results["problems"][task] != baseline["problems"][task]:
            raise ValueError(
                f"--baseline: {baseline['problems'][task]} problems of {task}, here {results['problems'][task]}."
            )
    for name in ("samples", "max_new_tokens"):
        if results[name] != baseline[name]:
            raise ValueError(f"--baseline: {name} {baseline[name]}, here {results[name]}.")
