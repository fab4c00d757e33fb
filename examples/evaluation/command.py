"""What the commands share: their options, and lm-eval's tasks from start to scores."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lm_eval
import torch
from generations import VERSIONS, SavingLM
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from tables import read_baseline

import modeling_iha  # noqa: F401  (registers the Auto classes)

TASKS = ("gsm8k", "math500", "mbpp", "humaneval")
CODE = ("mbpp", "humaneval")  # run what the model wrote


def parse(table: str, samples: int, max_new_tokens: int, text: str, arguments: list[str] | None):
    """
    The options of a command.

    Args:
        table: what its results are called; a baseline's must be of the same.
        samples, max_new_tokens: defaults.
        text: what `--help` begins with.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint, IHA or not: a folder or a Hub id")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--samples", type=int, default=samples, help="of each problem (%(default)s, the paper's)")
    parser.add_argument("--max_new_tokens", type=int, default=max_new_tokens, help="of a sample (%(default)s)")
    parser.add_argument("--limit", type=int, help="problems of each task; all, if not given")
    parser.add_argument("--batch_size", type=int, default=16, help="samples at a time (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="of the weights; auto is the checkpoint's")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu", "mps"], default=default, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a folder with the problems, where the Hub is out of reach")
    parser.add_argument("--allow_code", action="store_true", help="run code that the model wrote; best in a container")
    parser.add_argument("--baseline", type=Path, help="the --output_dir of another model: differences are shown")
    args = parser.parse_args(arguments)
    args.table, args.versions = table, VERSIONS
    code = [task for task in args.tasks if task in CODE]
    if code and not args.allow_code:
        parser.error(
            f"{', '.join(code)}: runs code that the model wrote: give --allow_code, or leave it out of --tasks."
        )
    for name in ("samples", "max_new_tokens", "limit", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1.")
    try:
        args.baseline = args.baseline and read_baseline(args.baseline, vars(args))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def check_counts(tasks: list[Task], args: argparse.Namespace):
    """Ends the command where the baseline is of another number of problems, before anything runs."""
    for task in tasks if args.baseline else []:
        name, count = task.config.task.partition("_")[0], len(list(task.eval_docs))
        count = min(count, args.limit or count)
        if args.baseline["problems"][name] != count:
            sys.exit(f"--baseline: {args.baseline['problems'][name]} problems of {name}, here {count}: see --limit.")


def start(args: argparse.Namespace) -> SavingLM:
    """The model, whose texts are kept in `generations/`."""
    model = SavingLM(
        args.output_dir / "generations",
        args.seed,
        pretrained=args.model,
        batch_size=args.batch_size,
        dtype=args.dtype,
        device=args.device,
    )
    if args.limit is not None and args.limit < model.world_size:
        sys.exit(f"--limit {args.limit}: must be at least {model.world_size}, a problem for each process.")
    return model


def load(names: dict[str, int], data: Path | None) -> list[Task]:
    """Task files of tasks/ by their names, each with so many samples of a problem."""
    folder = Path(__file__).parent / "tasks"
    metadata = {"data": data and str(data)}
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    tasks = list(manager.load(list(names))["tasks"].values())
    for task in tasks:
        samples = names[task.config.task]
        task.set_config("repeats", samples)
        task.set_config("process_results", partial(_score, task.config.process_results, samples))
    return tasks


def _score(score: Callable, samples: int, doc: dict, texts: list[list[str]]) -> dict[str, float]:
    # lm-eval gives some problems more samples where processes have unequal numbers of problems.
    return score(doc, [texts[0][:samples]])


def evaluate(model: SavingLM, tasks: list[Task], args: argparse.Namespace, **more) -> tuple[dict, dict] | None:
    """Scores {task file: {metric: share}} and counts of problems; None where another process has them."""
    found = lm_eval.simple_evaluate(
        model,
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),  # of its own tasks it would read thousands of files
        gen_kwargs={"max_gen_toks": args.max_new_tokens},
        limit=args.limit,
        log_samples=False,
        bootstrap_iters=0,
        confirm_run_unsafe_code=args.allow_code,
        **more,
    )
    if found is None:
        return None
    problems = {name: counts["effective"] for name, counts in found["n-samples"].items()}
    return {name: scores_of(found, name) for name in problems}, problems


def scores_of(found: dict, name: str) -> dict[str, float]:
    """The metrics of a task file in what lm-eval found."""
    pairs = ((*key.partition(","), value) for key, value in found["results"][name].items())
    return {metric: value for metric, _, kind, value in pairs if kind == "all" and not metric.endswith("_stderr")}
