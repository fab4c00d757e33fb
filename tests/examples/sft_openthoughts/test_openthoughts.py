"""Rows of every OpenThoughts schema, from real files, to the very tokens that carry loss."""

import json
import subprocess
import sys
from pathlib import Path

import openthoughts
import pytest
import torch
import trl
from openthoughts import IGNORED, load, to_messages, tokenize, training_template
from transformers import AutoTokenizer
from trl import SFTConfig

from modeling_iha import IHAForCausalLM
from training_iha import IHATrainer

EXAMPLE = Path(openthoughts.__file__).parent
TEMPLATE = EXAMPLE / "templates" / "smollm2.jinja"
TURNS = ("What is 6 times 7?", "<think>\n6 * 7 = 42\n</think>\n\nIt is 42.", "And its half?", "21")
SCHEMAS = {
    "OpenThoughts-114k": {"system": "Think, then answer.", "names": ("user", "assistant")},
    "OpenThoughts2-1M": {"names": ("user", "assistant"), "source": "somewhere"},
    "OpenThoughts3-1.2M": {"names": ("human", "gpt"), "difficulty": 3, "domain": "math"},
}


def row(schema, turns=TURNS):
    more = dict(SCHEMAS[schema])
    names = more.pop("names")
    said = [{"from": names[turn % 2], "value": value} for turn, value in enumerate(turns)]
    return {**more, "conversations": said}


def folder_of(rows, folder):
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture
def template(tokenizer):
    return training_template(tokenizer, None)


def said_in(ids, labels, tokenizer):
    """The stretches that carry loss, decoded."""
    stretches, open_ = [], False
    for token, label in zip(ids, labels, strict=True):
        assert label in (token, IGNORED)
        if label != IGNORED and not open_:
            stretches.append([])
        open_ = label != IGNORED
        if open_:
            stretches[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in stretches]


ANSWERS = [f"{TURNS[1]}<|im_end|>", f"{TURNS[3]}<|im_end|>"]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_what_the_assistant_says_carries_loss_and_nothing_else(schema, tokenizer, template, tmp_path):
    dataset, too_long = tokenize(load(folder_of([row(schema)] * 3, tmp_path / "data")), tokenizer, template, 512)
    assert too_long == 0
    assert dataset.column_names == ["input_ids", "labels"]
    for example in dataset:
        assert said_in(example["input_ids"], example["labels"], tokenizer) == ANSWERS
        messages = to_messages(row(schema), 0)
        assert tokenizer.decode(example["input_ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert ("Think, then answer." in tokenizer.decode(dataset[0]["input_ids"])) == (schema == "OpenThoughts-114k")


def trainer(model, tokenizer, dataset, folder, **fields):
    config = SFTConfig(
        output_dir=str(folder),
        max_length=256,
        per_device_eval_batch_size=8,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        **fields,
    )
    return IHATrainer(
        model, config, train_dataset=dataset, eval_dataset=dataset, processing_class=tokenizer, mixing_learning_rate=0
    )


@pytest.mark.parametrize("schema", SCHEMAS)
def test_packed_rows_hold_the_same_labels_and_have_the_same_loss(schema, small_iha, tokenizer, template, tmp_path):
    rows = [row(schema), row(schema, ("Name a colour.", "Red, of course.")), row(schema, TURNS[2:])]
    dataset, _ = tokenize(load(folder_of(rows, tmp_path / "data")), tokenizer, template, 256)
    model = IHAForCausalLM.from_pretrained(small_iha, dtype=torch.float32)
    losses = {}
    for packing in (False, True):
        run = trainer(model, tokenizer, dataset, tmp_path / "out", packing=packing)
        prepared = run.train_dataset
        assert len(prepared) == (1 if packing else 3)
        said = [text for one in prepared for text in said_in(one["input_ids"], one["labels"], tokenizer)]
        assert sorted(said) == sorted([*ANSWERS, "Red, of course.<|im_end|>", ANSWERS[1]])
        losses[packing] = run.evaluate()["eval_loss"]
    assert abs(losses[True] - losses[False]) <= 1e-5 * losses[False]


def test_long_examples_are_counted_and_left_out_whole(tokenizer, template, tmp_path):
    rows = [row("OpenThoughts-114k"), row("OpenThoughts-114k", ("Count.", "one two " * 200)), row("OpenThoughts-114k")]
    data = load(folder_of(rows, tmp_path / "data"))
    whole, _ = tokenize(data, tokenizer, template, 4096)
    fitting, too_long = tokenize(data, tokenizer, template, len(whole[0]["input_ids"]))
    assert too_long == 1
    assert list(fitting) == [whole[0], whole[2]]
    with pytest.raises(ValueError, match="All 3 examples are longer than max_length=8"):
        tokenize(data, tokenizer, template, 8)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([("user", "a"), ("tool", "b")], r"row 1: from='tool' in turn 1 must be one of"),
        ([("user", "a"), ("gpt", " \n")], r"row 1: value=' \\n' in turn 1 is empty"),
        ([("human", ""), ("gpt", "b")], r"row 1: value='' in turn 0 is empty"),
        ([("gpt", "a"), ("human", "b")], r"row 1: from='gpt' in turn 0 must be the user's"),
        ([("user", "a"), ("user", "b")], r"row 1: from='user' in turn 1 must be the assistant's"),
        ([("user", "a")], r"row 1: conversations has 1 turns: the last must be the assistant's"),
        ([], r"row 1: conversations has 0 turns"),
    ],
)
def test_a_malformed_row_is_named(said, message, tokenizer, template, tmp_path):
    wrong = {"conversations": [{"from": name, "value": value} for name, value in said]}
    data = load(folder_of([row("OpenThoughts2-1M"), wrong], tmp_path / "data"))
    with pytest.raises(ValueError, match=message):
        tokenize(data, tokenizer, template, 512)


def test_a_folder_of_another_schema_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'conversations' must be among them"):
        load(folder_of([{"text": "a"}], tmp_path / "data"))


def test_templates_that_cannot_be_used_are_refused(tokenizer, tmp_path, smollm2):
    assert training_template(tokenizer, None) == TEMPLATE.read_text()
    unknown = type(tokenizer).from_pretrained(smollm2)
    unknown.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"Neither TRL nor .*templates has a training form"):
        training_template(unknown, None)
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE.read_text().replace("<|im_end|>", "<|endoftext|>"))
    with pytest.raises(ValueError, match="The training template renders"):
        training_template(tokenizer, str(other))
    base = type(tokenizer).from_pretrained(smollm2)
    base.chat_template = None
    with pytest.raises(ValueError, match="no chat template, as base models do not"):
        training_template(base, None)
    assert training_template(base, str(TEMPLATE)) == base.chat_template == TEMPLATE.read_text()


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_templates_of_newer_llamas_mark_what_the_assistant_says(name, smollm2, tmp_path):
    """Their own templates come with TRL; the tokenizer that renders them is SmolLM2's."""
    llamas = AutoTokenizer.from_pretrained(smollm2)
    llamas.add_special_tokens(
        {"additional_special_tokens": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]}
    )
    llamas.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath(f"{name}.jinja").read_text()
    template = training_template(llamas, None)
    assert template == (EXAMPLE / "templates" / f"{name}.jinja").read_text()
    data = load(folder_of([row("OpenThoughts-114k"), row("OpenThoughts2-1M")], tmp_path / "data"))
    tokenized, _ = tokenize(data, llamas, template, 512)
    for example, schema in zip(tokenized, ("OpenThoughts-114k", "OpenThoughts2-1M"), strict=True):
        said = said_in(example["input_ids"], example["labels"], llamas)
        assert said == [f"{TURNS[1]}<|eot_id|>", f"{TURNS[3]}<|eot_id|>"]
        own = llamas.apply_chat_template(to_messages(row(schema), 0), tokenize=False)
        assert llamas.decode(example["input_ids"]) == own


def test_the_demo_data_are_whole_problems(tokenizer, template, tmp_path):
    subprocess.run([sys.executable, EXAMPLE / "make_data.py", tmp_path / "data"], check=True)
    dataset, too_long = tokenize(load(str(tmp_path / "data")), tokenizer, template, 512)
    assert (len(dataset), too_long) == (100, 0)
    for example in dataset:
        (answer,) = said_in(example["input_ids"], example["labels"], tokenizer)
        assert "####" in answer and "<<" not in answer
