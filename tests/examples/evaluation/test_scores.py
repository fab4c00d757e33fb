"""Scores of scripted answers, against what one computes by hand."""

import json
from fractions import Fraction
from pathlib import Path

import lm_eval
import pytest
import yaml
from after_sft import load, parse, scores_of
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from problems import code, majority, number, pass_at, score_numbers
from problems import gsm8k as load_gsm8k
from tables import markdown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so it is \\boxed{1,234}.", "1234"),
        ("first \\boxed{3}, no: \\boxed{-4.50}", "-4.5"),
        ("\\boxed{\\$18} of 20", "18"),
        ("18 apples and 7 pears make 25.", "25"),
        ("a loss of -7", "-7"),
        ("$1,000.00 in all", "1000"),
        ("steps <<2*3=6>>6\n#### 6", "6"),
        ("\\boxed{10,\\!000}", "10000"),
        ("\\boxed{1{,}234}", "1234"),
        ("\\boxed{18 - 7 = 11}", "11"),
        ("\\boxed{2 \\times 3 = 6}.", "6"),
        ("\\boxed{\\text{Day 3: } 12}", "12"),
        ("\\boxed{12 \\text{ dollars}} and 5 more", "12"),
        ("\\boxed{\\frac{1}{2}}", "1/2"),
        ("\\boxed{-\\$5}", "-5"),
        ("it costs $-5", "-5"),
        ("\u22125", "-5"),
        ("\\boxed{.5}", "0.5"),
        ("it is 10-4", "4"),
        ("one of 3, 4,5", "5"),
        ("about 1.5e3", "1500"),
        ("3/4 of it", "3/4"),
        ("50%", "50"),
        ("the answer is 5.", "5"),
    ],
)
def test_the_number_that_an_answer_ends_in(text, expected):
    assert number(text) == Fraction(expected)


@pytest.mark.parametrize(
    "text", ["", "I do not know.", "\\boxed{x} then 7", "3 and 4 make \\boxed{}", "\\boxed{\\text{five}} as 3 apples"]
)
def test_an_answer_without_a_number_is_none(text):
    assert number(text) is None


def test_a_majority_of_those_that_answer():
    assert majority([None, None, None, 1]) == 1
    assert majority([2, 1, 1, 2]) == 2
    assert majority([None, None]) is None


def test_the_chance_that_one_of_ten_is_right():
    assert pass_at(1, [True] * 4 + [False] * 12) == 4 / 16
    assert pass_at(10, [True] + [False] * 15) == pytest.approx(10 / 16)
    assert pass_at(10, [True] * 2 + [False] * 14) == pytest.approx(1 - (6 * 5) / (16 * 15))
    assert pass_at(10, [False] * 16) == 0 and pass_at(10, [True] * 16) == 1
    with pytest.raises(ValueError, match="P@10 needs at least 10 samples: there are 9"):
        pass_at(10, [True] * 9)


def test_code_is_the_block_that_defines_the_function():
    text = "Plan:\n```\nnotes\n```\n```python\ndef f(x):\n    return x\n```\nTest:\n```python\nprint(f(1))\n```"
    assert code(text, "f") == "def f(x):\n    return x\n"
    assert code("```python\ndef f(x):\n    return", "f") == "def f(x):\n    return"  # cut off
    assert code("    return x", "f") == "    return x"
    assert (
        code("Here:\r\n  ``` python \r\n  def f(x):\r\n      return x\r\n  ```\r\nDone.", "f")
        == "def f(x):\n    return x\n"
    )
    assert code("```\ndef f(x): pass\n```\n```\ndef find(y): pass\n```", "f") == "def f(x): pass\n"


class Scripted(LM):
    """Named mock: a model that says what is written for each problem, sample by sample."""

    def __init__(self, texts):
        super().__init__()
        self.texts = {problem: list(said) for problem, said in texts.items()}

    def generate_until(self, requests):
        return [self.texts[request.doc_id].pop(0) for request in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def evaluate(task, texts, data=None):
    samples = len(texts[0])
    options = dict(limit=len(texts), bootstrap_iters=0, log_samples=False, confirm_run_unsafe_code=True)
    found = lm_eval.simple_evaluate(Scripted(texts), tasks=load([task], samples, data), **options)
    return scores_of(found, task, samples)


def test_a_scripted_run_of_gsm8k(gsm8k):
    golds = [line["answer"].split("#### ")[1] for line in load_gsm8k(str(gsm8k))["test"]]
    right = [f"so \\boxed{{{gold}}}" for gold in golds]
    texts = {
        # 7 of 16 right, 5 agree on a wrong one, 4 say nothing: right by majority.
        0: [right[0]] * 7 + ["\\boxed{-1}"] * 5 + ["I give up."] * 4,
        # 4 right, 12 without an answer, which have no vote: right by majority.
        1: ["no idea"] * 12 + [right[1]] * 4,
        # 7 right, 9 agree on a wrong one.
        2: ["\\boxed{-5}"] * 9 + [right[2]] * 7,
        # Nobody answers.
        3: [""] * 16,
    }
    scores = evaluate("gsm8k", texts, gsm8k)
    assert scores == {"P@1": (7 / 16 + 4 / 16 + 7 / 16 + 0) / 4, "Maj@16": 2 / 4}


@pytest.mark.slow
def test_a_scripted_run_of_humaneval():
    right = "```python\ndef has_close_elements(numbers, threshold):\n    s = sorted(numbers)\n"
    right += "    return any(b - a < threshold for a, b in zip(s, s[1:]))\n```"
    wrong = "```python\ndef has_close_elements(numbers, threshold):\n    return True\n```"
    endless = "```python\ndef has_close_elements(numbers, threshold):\n    while True: pass\n```"
    broken = "```python\ndef has_close_elements(numbers threshold):\n```"
    scores = evaluate("humaneval", {0: [wrong, right, broken, endless, right] + [wrong] * 11})
    assert scores == {"P@1": 2 / 16, "P@10": pytest.approx(1 - (6 * 5) / (16 * 15))}


def test_the_harness_scores_the_same_generations_alike(gsm8k, tmp_path):
    """Its flexible-extract takes the last number, as this does where nothing is boxed."""
    golds = [line["answer"].split("#### ")[1] for line in load_gsm8k(str(gsm8k))["test"]][:40]
    texts = {i: [f"I think {i} and then {gold if i % 3 else 'nothing'}."] for i, gold in enumerate(golds)}
    local = {"data_files": {split: str(gsm8k / "gsm8k.jsonl") for split in ("train", "test")}}
    theirs = {"include": str(Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"), "task": "theirs"}
    theirs |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": local, "num_fewshot": 0}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    options = dict(limit=len(texts), bootstrap_iters=0, log_samples=False, task_manager=manager)
    found = lm_eval.simple_evaluate(Scripted(texts), tasks=["theirs"], **options)["results"]["theirs"]
    mine = evaluate("gsm8k", texts, gsm8k)
    assert 0.6 < mine["P@1"] < 0.7
    assert mine["P@1"] == mine["Maj@1"] == found["exact_match,flexible-extract"]


def test_tables_show_differences_and_refuse_what_is_not_comparable():
    settings = {"samples": 16, "max_new_tokens": 8, "problems": {"gsm8k": 100}}
    mine = {"model": "iha", **settings, "scores": {"gsm8k": {"P@1": 0.542, "Maj@16": 0.5}}}
    other = {"model": "llama", **settings, "scores": {"gsm8k": {"P@1": 0.484, "Maj@16": 0.515}}}
    lines = markdown(mine, other).splitlines()
    assert lines[0] == "| model | gsm8k P@1 | gsm8k Maj@16 |"
    assert lines[2:4] == ["| llama | 48.4 | 51.5 |", "| iha | 54.2 (+5.8) | 50.0 (-1.5) |"]
    assert "100 of gsm8k" in lines[-1]
    with pytest.raises(ValueError, match="50 problems of gsm8k, here 100"):
        markdown(mine, {**other, "problems": {"gsm8k": 50}})
    twice = markdown({**mine, "model": "llama"}, other).splitlines()
    assert [line.split(" | ")[0] for line in twice[2:4]] == ["| llama", "| llama"]


def test_a_baseline_of_other_settings_is_refused_before_anything_runs(tmp_path, capsys):
    baseline = {"model": "llama", "samples": 8, "max_new_tokens": 4096, "scores": {"gsm8k": {}}}
    (tmp_path / "results.json").write_text(json.dumps(baseline))
    refuse(["--tasks", "gsm8k", "--baseline", str(tmp_path)], "samples 8, here 16", capsys)
    wanted = ["--allow_code", "--samples", "10", "--baseline", str(tmp_path)]
    (tmp_path / "results.json").write_text(json.dumps({**baseline, "samples": 10}))
    refuse(wanted, "has no humaneval", capsys)


def refuse(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse(["model", "--output_dir", "out", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "humaneval"], "runs code that the model wrote: give --allow_code"),
        (["--allow_code", "--samples", "9"], "--samples 9: must be at least 10"),
        (["--tasks", "gsm8k", "--baseline", "nowhere"], "holds no results.json"),
        (["--tasks", "aime"], "invalid choice: 'aime'"),
        (["--tasks", "gsm8k", "--limit", "0"], "--limit 0: must be at least 1"),
    ],
)
def test_commands_that_are_refused(arguments, message, capsys):
    refuse(arguments, message, capsys)


def test_data_that_are_not_there_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gsm8k\.jsonl: not there"):
        load_gsm8k(str(tmp_path))
    assert score_numbers({"answer": "so\n#### 3"}, [["3"]]) == {"P@1": 1, "Maj@k": 1}
    with pytest.raises(ValueError, match="must end in #### and a number"):
        score_numbers({"answer": "no marker"}, [["I give up"]])
