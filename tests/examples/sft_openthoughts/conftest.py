import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[3] / "examples" / "sft_openthoughts"), str(Path(__file__).parent)]

from runs import run_here, untrained  # noqa: E402  (what the paths above make importable)
from sft import EXAMPLE, train  # noqa: E402


@pytest.fixture(scope="session")
def small_iha(tokenizer, tmp_path_factory) -> Path:
    """With the real tokenizer."""
    return untrained(tokenizer, tmp_path_factory.mktemp("small iha"))


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """The demo's."""
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, EXAMPLE / "make_data.py", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def tiny_iha(tokenizer, data, tmp_path_factory) -> Path:
    """With 1024 tokens learned from the data and the real chat template: logits of 49,152 take most of the time."""
    rows = map(json.loads, (data / "train.jsonl").read_text(encoding="utf-8").splitlines())
    texts = (said["value"] for row in rows for said in row["conversations"])
    return untrained(tokenizer.train_new_from_iterator(texts, 1024), tmp_path_factory.mktemp("tiny iha"))


@pytest.fixture(scope="session")
def command(tiny_iha, data):
    """The command that trains into a folder, from its arguments and launcher."""

    return functools.partial(train, tiny_iha, data)


@pytest.fixture(scope="session")
def whole_run(command, tmp_path_factory) -> Path:
    """A run in one process, from its first step to its last."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_here(command(folder))
    return folder
