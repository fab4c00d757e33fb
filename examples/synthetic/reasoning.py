"""
Does one layer of IHA learn to compose relations better than plain attention?

    python examples/synthetic/reasoning.py --small [--task binary ternary cpm3] [--output_dir demo-output/synthetic]

Every model is trained with every learning rate from every seed. Writes results.json, results.md and curves.png, and
one file for each run that is done: run again, it goes on where it was stopped.
"""

import argparse
import copy
import dataclasses
import json
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from one_layer import VARIANTS, Reasoner, configuration, layer_flops
from synthetic_tasks import Examples, composition, counting_accuracy, cpm3
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

SPLITS = ("train", "validation", "test")
RELATIONS = {"binary": 2, "ternary": 3}
COLUMNS = ("task", "model", "parameters", "FLOPs of a token", "test accuracy", "each seed")
COLUMNS += ("chance", "positives", "counts alone")
EVALUATION_ROWS = 250  # at once
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Settings:
    task: str
    sizes: tuple[int, int]  # of relations the elements m, of cpm3 the tokens N
    density: float | None = None  # the chance that a relation relates two elements
    modulus: int | None = None  # of cpm3
    classes: int = 2
    rows: tuple[int, int, int] = (40_000, 5_000, 5_000)  # of the splits
    hidden_size: int = 128
    heads: int = 8
    pseudo_heads: int = 8
    batch: int = 64
    epochs: int = 100
    patience: int = 10  # epochs without a better validation accuracy
    learning_rates: tuple[float, ...] = (1e-3, 3e-4)
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def tokens(self) -> int:
        """N of the longest row."""
        return self.sizes[1] if self.task == "cpm3" else self.sizes[1] ** 2

    @property
    def vocabulary(self) -> int:
        return {"binary": 4, "ternary": 8}.get(self.task, self.modulus)


FULL = {
    "binary": Settings("binary", (6, 8), density=0.325),
    "ternary": Settings("ternary", (5, 6), density=0.305),
    "cpm3": Settings("cpm3", (12, 16), modulus=13, classes=32),
}
_LITTLE = dict(rows=(3000, 500, 1000), hidden_size=32, heads=4, pseudo_heads=4, epochs=12, patience=3)
_LITTLE["learning_rates"] = (3e-3, 1e-3)
SMALL = {
    "binary": Settings("binary", (5, 6), density=0.34, **_LITTLE),
    "ternary": Settings("ternary", (4, 5), density=0.345, **_LITTLE),
    "cpm3": Settings("cpm3", (6, 8), modulus=8, classes=16, **_LITTLE),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=FULL, default=list(FULL), help="(%(default)s)")
    parser.add_argument("--small", action="store_true", help="smaller everything: minutes a task on two cores")
    parser.add_argument("--output_dir", type=Path, default=Path("demo-output/synthetic"), help="(%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, a core each (%(default)s)")
    args = parser.parse_args()
    chosen = [(SMALL if args.small else FULL)[task] for task in dict.fromkeys(args.task)]
    study(args.output_dir, chosen, args.processes)


def study(folder: Path, chosen: list[Settings], processes: int):
    """
    All runs that are not there yet, and the report.

    Raises:
        ValueError: a run that is there was made with other settings.
    """
    runs = [run for settings in chosen for run in runs_of(settings)]
    missing = [run for run in runs if read(folder, *run) is None]
    progress = tqdm(total=len(runs), initial=len(runs) - len(missing), desc="runs")
    # Each a process of one thread: a model this small fills one core.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(do, folder, *run) for run in missing]
        try:
            for future in as_completed(futures):
                future.result()
                progress.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    progress.close()
    report(folder, chosen)


def runs_of(settings: Settings) -> list[tuple[Settings, str, float, int]]:
    return [
        (settings, variant, rate, seed)
        for seed in settings.seeds
        for variant in VARIANTS
        for rate in settings.learning_rates
    ]


def file_of(folder: Path, settings: Settings, variant: str, rate: float, seed: int) -> Path:
    return folder / "runs" / settings.task / f"{variant}, rate {rate:g}, seed {seed}.json"


def read(folder: Path, settings: Settings, variant: str, rate: float, seed: int) -> dict | None:
    """A run that is done; None where it is not there."""
    file = file_of(folder, settings, variant, rate, seed)
    if not file.exists():
        return None
    run = json.loads(file.read_text(encoding="utf-8"))
    ours = fingerprint(settings)
    if other := [name for name in ours if run["settings"].get(name) != ours[name]]:
        raise ValueError(
            f"{file}: was run with {other[0]}={run['settings'].get(other[0])!r}, here {ours[other[0]]!r}. Give "
            "another --output_dir, or remove that one's runs."
        )
    return run


def fingerprint(settings: Settings) -> dict:
    """What a run depends on, as JSON has it: not on which other rates and seeds there are."""
    fields = dataclasses.asdict(settings)
    return json.loads(json.dumps({k: v for k, v in fields.items() if k not in ("learning_rates", "seeds")}))


def do(folder: Path, settings: Settings, variant: str, rate: float, seed: int):
    """One run, and its file, which is there whole or not at all."""
    torch.set_num_threads(1)
    run = {"settings": fingerprint(settings), **train(settings, variant, rate, seed)}
    file = file_of(folder, settings, variant, rate, seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(run) + "\n", encoding="utf-8")
    partial.rename(file)


def examples(settings: Settings, seed: int, split: str) -> Examples:
    """The same for every model and rate; no split shares its random numbers with another, or with another seed's."""
    index = SPLITS.index(split)
    generator = torch.Generator().manual_seed(len(SPLITS) * seed + index)
    if settings.task == "cpm3":
        return cpm3(settings.rows[index], settings.sizes, settings.modulus, settings.classes, generator)
    return composition(settings.rows[index], RELATIONS[settings.task], settings.sizes, settings.density, generator)


def counting(settings: Settings) -> float | None:
    """`counting_accuracy` over the tokens of all sizes; None of cpm3."""
    if settings.task == "cpm3":
        return None
    low, high = settings.sizes
    tokens = {size: size**2 for size in range(low, high + 1)}
    each = [
        count * counting_accuracy(size, RELATIONS[settings.task], settings.density) for size, count in tokens.items()
    ]
    return sum(each) / sum(tokens.values())


def build(settings: Settings, variant: str) -> Reasoner:
    shape = (settings.hidden_size, settings.heads, settings.pseudo_heads, settings.vocabulary)
    return Reasoner(configuration(variant, *shape), settings.sizes[1], settings.classes)


def train(settings: Settings, variant: str, rate: float, seed: int) -> dict:
    """
    Trains until the validation accuracy has not risen for `patience` epochs.

    Returns:
        `validation`, the accuracy after each epoch, and of the epoch where it was best `test`; of the test's labels
        `chance`, the share of the commonest, and `positives`, that of label 1.
    """
    start = time.process_time()
    data, validation, test = (examples(settings, seed, split).to(DEVICE) for split in SPLITS)
    torch.manual_seed(seed)
    model = build(settings, variant).to(DEVICE)
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    curve, best, weights = [], 0, None
    while len(curve) < settings.epochs and len(curve) - best <= settings.patience:
        for rows in torch.randperm(len(data), generator=order).split(settings.batch):
            batch = data[rows]
            loss = cross_entropy(logits(model, batch)[batch.real], batch.labels[batch.real])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        curve.append(accuracy(model, validation))
        if curve.index(max(curve)) == len(curve) - 1:
            best, weights = len(curve) - 1, copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    labels = test.labels[test.real]
    return {
        "validation": curve,
        "test": accuracy(model, test),
        "chance": float(labels.bincount().max() / len(labels)),
        "positives": float((labels == 1).float().mean()),
        "cpu seconds": time.process_time() - start,
    }


def logits(model: Reasoner, batch: Examples) -> torch.Tensor:
    return model(batch.ids, batch.first, batch.second, batch.real)


@torch.no_grad()
def accuracy(model: Reasoner, data: Examples) -> float:
    """Over the real tokens of all rows."""
    right = 0
    for rows in torch.arange(len(data)).split(EVALUATION_ROWS):
        batch = data[rows]
        right += int((logits(model, batch).argmax(-1) == batch.labels)[batch.real].sum())
    return right / int(data.real.sum())


def report(folder: Path, chosen: list[Settings]):
    from accuracy_curves import draw

    rows, lines, curves = [], [], {}
    for settings in chosen:
        for variant in VARIANTS:
            runs = [best_rate(folder, settings, variant, seed) for seed in settings.seeds]
            model = build(settings, variant)
            row = {
                "task": settings.task,
                "model": variant,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "flops a token": layer_flops(model.backbone.config, settings.tokens),
                "test": [run["test"] for run in runs],
                "rate": [run["rate"] for run in runs],
                "chance": statistics.mean(run["chance"] for run in runs),
                "positives": None if settings.classes > 2 else statistics.mean(run["positives"] for run in runs),
                "counts alone": counting(settings),
                "cpu seconds": sum(run["cpu seconds"] for run in runs),
            }
            rows.append(row)
            curves.setdefault(settings.task, {})[variant] = [run["validation"] for run in runs]
            lines.append(
                f"| {settings.task} | {variant} | {row['parameters']:,} | {row['flops a token']:,.0f} | "
                f"{statistics.mean(row['test']):.3f} ± {statistics.stdev(row['test']):.3f} | "
                f"{', '.join(f'{value:.3f}' for value in row['test'])} | {row['chance']:.3f} | "
                f"{share(row['positives'])} | {share(row['counts alone'])} |"
            )
    table = "\n".join([f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|", *lines])
    note = " ".join(map(describe, chosen)) + (
        " Accuracy over the real tokens of the test rows, mean ± standard deviation over the seeds "
        f"{', '.join(map(str, chosen[0].seeds))}; of each seed the learning rate "
        f"({' or '.join(f'{rate:g}' for rate in chosen[0].learning_rates)}) and the epoch that were best in "
        "validation. FLOPs: of the layer's forward. Chance: the share of the commonest label. Counts alone: of the "
        "best answer that counts i's successors, j's predecessors and, of three relations, the middle one's pairs."
    )
    (folder / "results.md").write_text(f"# synthetic\n\n{table}\n\n{note}\n", encoding="utf-8")
    results = {"settings": [dataclasses.asdict(settings) for settings in chosen], "rows": rows, "validation": curves}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(curves, {row["task"]: row["chance"] for row in rows}, folder / "curves.png")
    print(f"{table}\n\n{note}")


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def best_rate(folder: Path, settings: Settings, variant: str, seed: int) -> dict:
    """The run with the rate that was best in validation."""
    runs = [{"rate": rate, **read(folder, settings, variant, rate, seed)} for rate in settings.learning_rates]
    return max(runs, key=lambda run: max(run["validation"]))


def describe(settings: Settings) -> str:
    low, high = settings.sizes
    if settings.task == "cpm3":
        what = f"{low} to {high} tokens, modulo {settings.modulus}, {settings.classes} classes"
    else:
        what = f"{low} to {high} elements, density {settings.density}"
    rows = "/".join(f"{count:,}" for count in settings.rows)
    return (
        f"{settings.task}: {what}; {rows} rows; hidden size {settings.hidden_size}, H {settings.heads}, "
        f"P {settings.pseudo_heads}, at most {settings.epochs} epochs."
    )


if __name__ == "__main__":
    main()
