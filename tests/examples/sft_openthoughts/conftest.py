import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modeling_iha import IHAConfig, IHAForCausalLM

EXAMPLE = Path(__file__).parents[3] / "examples" / "sft_openthoughts"
sys.path[:0] = [str(EXAMPLE), str(Path(__file__).parent)]

from runs import run, train  # noqa: E402  (what the paths above make importable)


def untrained(tokenizer, folder):
    """A model of two layers with this tokenizer and its chat template, as a conversion leaves it."""
    torch.manual_seed(0)
    config = IHAConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_pseudo_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    IHAForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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

    def of(folder, *more, launcher=()):
        return train(tiny_iha, data, folder, *more, launcher=launcher)

    return of


@pytest.fixture(scope="session")
def whole_run(command, tmp_path_factory) -> Path:
    """A run in one process, from its first step to its last."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(command(folder))
    return folder
