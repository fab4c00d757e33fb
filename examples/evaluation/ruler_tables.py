"""RULER's results as JSON, as Markdown tables and as a plot by length, with differences from another model's."""

import json
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from ruler_tasks import MULTI_KEY

SETTINGS = ("samples", "seed", "apply_chat_template")


def read_baseline(folder: Path, settings: dict) -> dict:
    """
    The results of another model.

    Args:
        settings: those of `SETTINGS`, which the other's must be, `tasks` and `lengths`.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are of other settings, or lack a task or a length.
    """
    file = folder / "results.json"
    if not file.is_file():
        raise FileNotFoundError(f"--baseline {folder}: holds no results.json of an earlier command.")
    baseline = json.loads(file.read_text(encoding="utf-8"))
    for name in SETTINGS:
        if settings[name] != baseline.get(name):
            raise ValueError(f"--baseline {folder}: {name} {baseline.get(name)}, here {settings[name]}.")
    for task in settings["tasks"]:
        for length in settings["lengths"]:
            if str(length) not in baseline["scores"].get(task, {}):
                raise ValueError(f"--baseline {folder}: has no {task} at {length} tokens.")
    return baseline


def summaries(scores: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """
    The mean over the tasks, and that of the three multi-key tasks where all are there, for each length.

    Args:
        scores: {task: {length: share}}.
    """
    groups = {f"mean of {len(scores)} tasks": list(scores)}
    if all(task in scores for task in MULTI_KEY):
        groups["multi-key"] = list(MULTI_KEY)
    lengths = next(iter(scores.values()))
    return {
        name: {length: mean(scores[task][length] for task in tasks) for length in lengths}
        for name, tasks in groups.items()
    }


def write(folder: Path, results: dict, baseline: dict | None):
    """
    Writes results.json, results.md and ruler.png into a folder.

    Args:
        results: `scores` {task: {length: share}} and the settings that led there.
        baseline: what `read_baseline` gave; differences from it are shown in percentage points.
    """
    scores = results["scores"]
    before = None
    if baseline is not None:  # of the same tasks and lengths
        before = {task: {length: baseline["scores"][task][length] for length in scores[task]} for task in scores}
    means = summaries(scores)
    (folder / "results.json").write_text(json.dumps({**results, "means": means}, indent=2) + "\n", encoding="utf-8")
    models = {results["model"]: scores} if before is None else {baseline["model"]: before, results["model"]: scores}
    if before is not None and len(models) == 1:  # one checkpoint under two settings, such as dtypes
        models = {f"{baseline['model']} (baseline)": before, results["model"]: scores}
    text = markdown(models, results)
    (folder / "results.md").write_text(text, encoding="utf-8")
    draw({model: summaries(its) for model, its in models.items()}, folder / "ruler.png")
    print(text, end="")


def markdown(models: dict[str, dict], settings: dict) -> str:
    """
    A table for each of `summaries`, models by lengths, and one of all tasks by lengths.

    Args:
        models: {model: scores}, the baseline before the model that it is compared with.
        settings: `samples` and `seed`.
    """
    *baselines, (model, scores) = models.items()
    before = baselines[0][1] if baselines else None
    lengths = list(next(iter(scores.values())))
    parts = []
    for group, row in summaries(scores).items():
        other = before and summaries(before)[group]
        rows = {baselines[0][0]: _cells(other)} if before else {}
        parts.append(_table(group, [*lengths, "average"], {**rows, model: _cells(row, other)}))
    tasks = {task: _cells(scores[task], before and before[task]) for task in scores}
    parts.append(_table(model, [*lengths, "average"], tasks))
    note = (
        f"RULER, in percent; {settings['samples']} samples of each task and length, greedy, seed {settings['seed']}."
    )
    return "\n\n".join([*parts, note]) + "\n"


def _cells(row: dict[str, float], before: dict[str, float] | None = None) -> list[str]:
    now = [100 * score for score in (*row.values(), mean(row.values()))]
    if before is None:
        return [f"{score:.1f}" for score in now]
    then = [100 * score for score in (*before.values(), mean(before.values()))]
    return [f"{n:.1f} ({n - t:+.1f})" for n, t in zip(now, then, strict=True)]


def _table(title: str, columns: list[str], rows: dict[str, list[str]]) -> str:
    lines = [f"| {title} | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    return "\n".join(lines + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()])


def draw(models: dict[str, dict], file: Path):
    """
    The means by length, a line for each model.

    Args:
        models: {model: what `summaries` gave}.
    """
    groups = list(next(iter(models.values())))
    figure, axes = pyplot.subplots(
        1, len(groups), figsize=(5 * len(groups), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, group in zip(axes[0], groups, strict=True):
        for means, style in zip(models.values(), ("--o", "-o")[-len(models) :], strict=True):
            lengths = sorted(means[group], key=int)
            axis.plot(lengths, [100 * means[group][length] for length in lengths], style)
        axis.set(title=group, xlabel="length in tokens", ylim=(0, 105))
        axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="score in percent")
    axes[0][0].legend(list(models), fontsize="small")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
