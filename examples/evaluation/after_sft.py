"""
The paper's table of reasoning after fine-tuning, for any checkpoint: several samples of each problem at temperature
0.6, P@1 over all of them, what most of them say (Maj), and for code the chance that one of ten is right (P@10).

    python examples/evaluation/after_sft.py MODEL --output_dir FOLDER --tasks gsm8k
    python examples/evaluation/after_sft.py MODEL --output_dir FOLDER --allow_code --baseline FOLDER
    accelerate launch --num_processes 8 examples/evaluation/after_sft.py MODEL --output_dir FOLDER --allow_code

Given again after an interruption, a command goes on. FOLDER then holds results.json and results.md, and every text in
generations/.
"""

import argparse
import sys
from pathlib import Path

import lm_eval
import torch
from generations import SavingLM
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from tables import read_baseline, write

import modeling_iha  # noqa: F401  (registers the Auto classes)

TASKS = ("gsm8k", "humaneval")
CODE = ("humaneval",)  # run what the model wrote


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a fine-tuned checkpoint, IHA or not: a folder or a Hub id")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--samples", type=int, default=16, help="of each problem (16, the paper's)")
    parser.add_argument("--max_new_tokens", type=int, default=4096, help="of a sample (4096)")
    parser.add_argument("--limit", type=int, help="problems of each task; all, if not given")
    parser.add_argument("--batch_size", type=int, default=16, help="samples at a time (16)")
    parser.add_argument("--dtype", default="auto", help="of the weights; auto is the checkpoint's")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu", "mps"], default=default, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a folder with gsm8k.jsonl, where the Hub is out of reach")
    parser.add_argument("--allow_code", action="store_true", help="run code that the model wrote; best in a container")
    parser.add_argument("--baseline", type=Path, help="the --output_dir of another model: differences are shown")
    args = parser.parse_args(arguments)
    code = [task for task in args.tasks if task in CODE]
    if code and not args.allow_code:
        parser.error(
            f"{', '.join(code)}: runs code that the model wrote: give --allow_code, or leave it out of --tasks."
        )
    if args.samples < 1 or (code and args.samples < 10):
        parser.error(f"--samples {args.samples}: must be at least {10 if code else 1}; P@10 of code needs ten.")
    for name in ("max_new_tokens", "limit", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1.")
    try:
        args.baseline = args.baseline and read_baseline(args.baseline, vars(args))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def main(arguments: list[str] | None = None):
    args = parse(arguments)
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
    if model.tokenizer.chat_template is None:
        sys.exit(f"{args.model}: its tokenizer has no chat template; this table is for fine-tuned models.")
    found = lm_eval.simple_evaluate(
        model,
        tasks=load(args.tasks, args.samples, args.data),
        gen_kwargs={"max_gen_toks": args.max_new_tokens},
        apply_chat_template=True,
        limit=args.limit,
        log_samples=False,
        bootstrap_iters=0,
        confirm_run_unsafe_code=args.allow_code,
    )
    if found is None:  # the first process has it
        return
    scores = {task: scores_of(found, task, args.samples) for task in args.tasks}
    problems = {task: found["n-samples"][f"{task}_sampled"]["effective"] for task in args.tasks}
    settings = {name: getattr(args, name) for name in ("model", "samples", "max_new_tokens", "seed", "dtype")}
    write(args.output_dir, {**settings, "problems": problems, "scores": scores}, args.baseline)


def load(names: list[str], samples: int, data: Path | None) -> list[Task]:
    """lm-eval's tasks, of so many samples."""
    folder = Path(__file__).parent / "tasks"
    metadata = {"data": data and str(data)}
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    tasks = list(manager.load([f"{name}_sampled" for name in names])["tasks"].values())
    for task in tasks:
        task.set_config("repeats", samples)
        # lm-eval gives some problems more of them where processes have unequal numbers of problems.
        score = task.config.process_results
        task.set_config("process_results", lambda doc, texts, score=score: score(doc, [texts[0][:samples]]))
    return tasks


def scores_of(found: dict, task: str, samples: int) -> dict[str, float]:
    """The metrics of a task in what lm-eval found."""
    scores = {}
    for name, value in found["results"][f"{task}_sampled"].items():
        metric, _, kind = name.partition(",")
        if kind == "all" and not metric.endswith("_stderr"):
            scores[metric.replace("@k", f"@{samples}")] = value
    return scores


if __name__ == "__main__":
    main()
