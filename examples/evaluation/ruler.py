"""
RULER (arXiv:2404.06654) for any checkpoint: 13 tasks whose prompts fill 4,096 to 65,536 tokens, answered greedily.

    python examples/evaluation/ruler.py MODEL --output_dir FOLDER --data FOLDER
    python examples/evaluation/ruler.py MODEL --output_dir FOLDER --data FOLDER --baseline FOLDER
    accelerate launch --num_processes 8 examples/evaluation/ruler.py MODEL --output_dir FOLDER --data FOLDER

Given again after an interruption, a command goes on. FOLDER then holds results.json, results.md and ruler.png, and
every answer in generations/.
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import mean

import torch
from accelerate.utils import gather_object
from generations import VERSIONS, SavingLM
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from ruler_material import load
from ruler_tables import read_baseline, write
from ruler_tasks import TASKS, Material, Prompts, make
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoTokenizer

import modeling_iha  # noqa: F401  (registers the Auto classes)

LENGTHS = (4096, 8192, 16384, 32768, 65536)
Cell = tuple[str, int]  # task, length


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint, IHA or not: a folder or a Hub id")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=f"all of {' '.join(TASKS)}"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="of prompt and answer %(default)s")
    parser.add_argument("--samples", type=int, default=500, help="of each task and length (500, RULER's)")
    parser.add_argument("--apply_chat_template", action="store_true", help="for instruct models; its tokens count too")
    parser.add_argument("--batch_size", type=int, default=1, help="prompts at a time (1)")
    parser.add_argument("--dtype", default="auto", help="of the weights; auto is the checkpoint's")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu", "mps"], default=default, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--data", type=Path, help="a folder with the essays and questions, where they are not fetched")
    parser.add_argument("--baseline", type=Path, help="the --output_dir of another model: differences are shown")
    args = parser.parse_args(arguments)
    args.tasks = list(dict.fromkeys(args.tasks))
    args.lengths = sorted(set(args.lengths))
    for name in ("samples", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1.")
    try:
        args.baseline = args.baseline and read_baseline(args.baseline, vars(args))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def main(arguments: list[str] | None = None):
    args = parse(arguments)
    cells = [(task, length) for length in reversed(args.lengths) for task in args.tasks]
    try:
        check_lengths(args.model, args.lengths)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        if args.apply_chat_template and tokenizer.chat_template is None:
            raise ValueError(f"--apply_chat_template: the tokenizer of {args.model} has no chat template.")
        samples = Samples(args.tasks, args.data, args.seed, Prompts(tokenizer, args.apply_chat_template))
        for cell in cells:  # what is too short or too few is found before anything runs
            samples(cell, args.samples - 1)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))
    model = LongLM(
        args.output_dir / "generations",
        args.seed,
        pretrained=args.model,
        tokenizer=tokenizer,
        max_length=max(args.lengths),
        batch_size=args.batch_size,
        dtype=args.dtype,
        device=args.device,
    )
    found = evaluate(model, cells, samples, args.samples)
    if model.rank != 0:
        return
    scores = {task: {str(length): found[task, length] for length in args.lengths} for task in args.tasks}
    settings = ("model", "samples", "seed", "apply_chat_template", "dtype")
    made_by = {**{name: getattr(args, name) for name in settings}, "versions": VERSIONS}
    write(args.output_dir, {**made_by, "scores": scores}, args.baseline)


def check_lengths(model: str, lengths: list[int]):
    """
    Raises:
        ValueError: a length is more than the model's positions.
    """
    most = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
    over = [str(length) for length in lengths if most is not None and length > most]
    if over:
        raise ValueError(
            f"--lengths {' '.join(over)}: more than the max_position_embeddings of {model}, which are {most}. Leave "
            "these lengths out, or raise the field in its config.json if the model can read as much."
        )


class Samples:
    """
    Samples by cell and index; essays and questions are read once.

    Raises:
        FileNotFoundError, ValueError: what a task needs is not there, or not what is published.
    """

    def __init__(self, tasks: list[str], data: Path | None, seed: int, prompts: Prompts):
        needed = dict.fromkeys(TASKS[task].needs for task in tasks)
        self.material: dict[str | None, Material] = {name: name and load(name, data) for name in needed}
        self.seed, self.prompts = seed, prompts

    def __call__(self, cell: Cell, index: int) -> tuple[str, list[str]]:
        task, length = cell
        return make(task, length, index, self.seed, self.prompts, self.material[TASKS[task].needs])


class Bar(tqdm):
    """One bar through all tasks and lengths, in tokens, so that it says how long is left."""

    def start(self, task: str, length: int):
        self.length = length
        self.set_description(f"{task}, {length} tokens")

    def update(self, samples: int):
        super().update(samples * self.length)


class LongLM(SavingLM):
    bar: Bar

    def progress(self, samples: int):
        return nullcontext(self.bar)


def evaluate(model: LM, cells: list[Cell], samples: Samples, count: int) -> dict[Cell, float]:
    """
    The mean score of each cell; every process answers its part of the samples, and all get all scores.

    Args:
        count: samples of a cell.
    """
    mine = range(model.rank, count, model.world_size)
    tokens = len(mine) * sum(length for _, length in cells)
    found = []
    with Bar(total=tokens, unit=" tokens", unit_scale=True, disable=model.rank != 0) as model.bar:
        for cell in cells:
            model.bar.start(*cell)
            written = [samples(cell, index) for index in mine]
            settings = {"until": [], "do_sample": False, "max_gen_toks": TASKS[cell[0]].budget}
            requests = [
                Instance("generate_until", {}, (prompt, settings), 0, (f"{cell[0]}_{cell[1]}", index, 1))
                for index, (prompt, _) in zip(mine, written, strict=True)
            ]
            texts = model.generate_until(requests)
            for text, (_, outputs) in zip(texts, written, strict=True):
                found.append((cell, TASKS[cell[0]].score(text, outputs)))
    found = gather_object(found)
    return {cell: mean(score for its, score in found if its == cell) for cell in cells}


if __name__ == "__main__":
    main()
