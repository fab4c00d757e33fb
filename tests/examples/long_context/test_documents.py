"""Documents as rows: exact lengths, and nothing that crosses from one document to the next."""

import json

import pytest
import torch
from datasets import Dataset
from documents import IGNORED, collate, load, rows_of, tokenize
from runs import EXAMPLES
from transformers import AutoConfig, LlamaConfig
from trl import SFTConfig

from modeling_iha import IHAConfig, IHAForCausalLM

LENGTHS = (5, 30, 3, 12, 9)
STAGES = ("8k", "16k", "32k", "64k")


def tokens_of(documents):
    """Ids that tell which token of which document they are."""
    return Dataset.from_dict(
        {"input_ids": [[100 * n + i for i in range(length)] for n, length in enumerate(documents)]}
    )


def test_packed_rows_are_full_and_hold_every_document_in_order():
    rows, left = rows_of(tokens_of(LENGTHS), 8, packed=True)
    assert len(rows) == sum(LENGTHS) // 8 and left == sum(LENGTHS) % 8
    together = [token for document in tokens_of(LENGTHS)["input_ids"] for token in document]
    assert [token for row in rows["input_ids"] for token in row] == together[: 8 * len(rows)]
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == 8
        first = 0
        for length in row["seq_lengths"]:
            ids, labels = (row[name][first : first + length] for name in ("input_ids", "labels"))
            assert len({token // 100 for token in ids}) == 1
            assert labels == [IGNORED, *ids[1:]]
            first += length


def test_whole_rows_are_from_within_one_document():
    rows, left = rows_of(tokens_of(LENGTHS), 8, packed=False)
    assert [row[0] for row in rows["input_ids"]] == [100, 108, 116, 300, 400]
    assert left == sum(LENGTHS) - 5 * 8
    for row in rows:
        assert row["input_ids"] == list(range(row["input_ids"][0], row["input_ids"][0] + 8))
        assert row["labels"] == [IGNORED, *row["input_ids"][1:]] and row["seq_lengths"] == [8]


@pytest.mark.parametrize(
    ("packed", "message"), [(True, "all documents together have not"), (False, "no document has")]
)
def test_rows_that_nothing_fills_are_refused(packed, message):
    with pytest.raises(ValueError, match=rf"max_length=100: {message}"):
        rows_of(tokens_of(LENGTHS), 100, packed)


@torch.no_grad()
def test_documents_in_a_row_do_not_see_each_other(full):
    model = IHAForCausalLM.from_pretrained(full, dtype=torch.float64).eval()
    rows, _ = rows_of(tokens_of((5, 11, 9, 7)), 16, packed=True)
    batch = collate(list(rows))
    logits = model(**batch).logits
    for row, lengths in zip(range(2), rows["seq_lengths"], strict=True):
        first = 0
        for length in lengths:
            alone = model(batch["input_ids"][row : row + 1, first : first + length]).logits[0]
            within = logits[row, first : first + length]
            # Llama's norms compute in float32 in every model.
            assert (within - alone).abs().max() <= 1e-6 * alone.abs().max()
            first += length


def test_documents_end_and_empty_ones_are_named(documents, own_tokenizer, tmp_path):
    tokenized = tokenize(load(str(documents)), own_tokenizer)
    assert all(ids[-1] == own_tokenizer.eos_token_id for ids in tokenized["input_ids"])
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": " "}) + "\n")
    with pytest.raises(ValueError, match="row 1: text=' ' is empty"):
        tokenize(load(str(tmp_path)), own_tokenizer)


def test_text_files_are_documents_and_other_columns_are_refused(tmp_path):
    (tmp_path / "text").mkdir()
    for name in ("one", "two"):
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name}\nof two lines")
    assert sorted(load(str(tmp_path / "text"))["text"]) == ["one\nof two lines", "two\nof two lines"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.jsonl").write_text(json.dumps({"conversations": "a"}))
    with pytest.raises(ValueError, match="'text' must be among them"):
        load(str(tmp_path / "other"))


def program():
    import importlib.util

    specification = importlib.util.spec_from_file_location("long_context", EXAMPLES / "long_context" / "train.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_base_is_set_where_nothing_else_stretches_positions(full):
    stretched = program().stretched
    config = stretched(AutoConfig.from_pretrained(full), 4096, 8e6)
    assert (config.rope_parameters["rope_theta"], config.max_position_embeddings) == (8e6, 4096)
    with pytest.raises(ValueError, match="max_length=65 is more than max_position_embeddings=64: give a rope_theta"):
        stretched(AutoConfig.from_pretrained(full), 65, None)
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 32}
    scaled = LlamaConfig(rope_parameters={**llama3, "low_freq_factor": 1.0, "high_freq_factor": 4.0})
    with pytest.raises(ValueError, match=r"rope_theta=8000000.0 must be left out: the model's rope_type='llama3'"):
        stretched(IHAConfig.from_llama(scaled), 4096, 8e6)


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_has_its_length_its_base_and_four_million_tokens_a_step(stage):
    import yaml

    recipe = yaml.safe_load((EXAMPLES / "long_context" / f"{stage}.yaml").read_text())
    length = recipe["max_length"]
    assert length == 1024 * int(stage[:-1])
    assert recipe["rope_theta"] == pytest.approx(5e5 * (length / 8192) ** (4 / 3), rel=3e-3)
    assert 8 * recipe["gradient_accumulation_steps"] * recipe["per_device_train_batch_size"] * length == 2**22


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("packing", True, "packing=True must be left out: the recipe's `documents`"),
        ("max_length", None, "max_length=None must be the tokens in a row"),
        ("model_init_kwargs", {"dtype": "float16"}, "model_init_kwargs=.* must be left out: the recipe has dtype"),
    ],
)
def test_what_would_not_be_heeded_is_refused(field, value, message, tmp_path):
    config = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, **{"max_length": 8, field: value})
    with pytest.raises(ValueError, match=message):
        program().rows_are_ready(config)
