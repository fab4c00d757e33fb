"""A converted model on a Hub: real pushes by real processes, loaded by others that know its name alone."""

import json
import os
import subprocess
import sys

import pytest
import torch
from folders import INDEX, edit_config, make_llama
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForTokenClassification

from conversion_iha import CheckpointError, convert, push
from conversion_iha.card import conversion_card, read_licence
from modeling_iha import IHAConfig, IHAForCausalLM

LICENCE = (
    "---\nlicense: other\nlicense_name: tiny-licence\nlicense_link: https://example.org/licence\n---\nA tiny model."
)
WITHOUT_THE_PACKAGE = """
import sys, importlib.util
for name in ("modeling_iha", "configuration_iha", "conversion_iha"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed, so that this would prove nothing"
import torch, transformers
for name in ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification",
             "AutoModelForQuestionAnswering", "AutoModelForCausalLM"):
    model = getattr(transformers, name).from_pretrained("tester/model", trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
ids = torch.arange(1, 9)[None]
print(model.generate(ids, max_new_tokens=8, do_sample=False).tolist())
for name in ("tester/by-hand", "tester/saved"):
    again = transformers.AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    assert torch.equal(again(ids).logits, model(ids).logits)
tokenizer = transformers.AutoTokenizer.from_pretrained("tester/by-hand", trust_remote_code=True)
print(tokenizer("The capital of France").input_ids)
"""


# A conversion, a push, and one by somebody who may not; in one process, whose imports take most of the time.
PUSH = """
import os, sys
from typer.testing import CliRunner
from conversion_iha.cli import app

def iha(*arguments):
    done = CliRunner().invoke(app, arguments)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.exit_code

assert iha("convert", "tester/llama", "model-iha", "--no-check") == 0
assert iha("push", "model-iha", "tester/model") == 0
assert iha("push", "again", "tester/trained") == 0
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import modeling_iha
model = AutoModelForCausalLM.from_pretrained("tester/model")  # with the package, without the code that it brings
assert type(model) is modeling_iha.IHAForCausalLM
print(model.generate(torch.arange(1, 9)[None], max_new_tokens=8, do_sample=False).tolist())
model.push_to_hub("tester/by-hand")
AutoTokenizer.from_pretrained(sys.argv[1]).push_to_hub("tester/by-hand")
model.save_pretrained("saved", push_to_hub=True, repo_id="tester/saved")
first = dict(os.environ)
os.environ["HF_TOKEN"] = "hf_wrong"
assert iha("push", "model-iha", "tester/model") == 1
os.environ.update(first)
assert iha("push", "model-iha", "tester/trained") == 0
"""


def run(code, *arguments, python=sys.executable, env, cwd):
    command = [python, "-c", code, *arguments]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_from_hub_to_hub(hub, elsewhere, smollm2, tokenizer, tmp_path):
    """A Llama model of the Hub is converted and pushed, and loads there without this package, being what it was."""
    llama = make_llama(tmp_path / "llama", bos_token_id=1, eos_token_id=2)
    (llama / "README.md").write_text(LICENCE)
    hub.commits["tester/llama"] = [
        {path.relative_to(llama).as_posix(): hub.keep(path.read_bytes()) for path in files(llama)}
    ]
    again = tmp_path / "again"  # another folder of such a model, renamed since, with what a training run leaves
    convert(llama, tmp_path / "before")
    (tmp_path / "before").rename(again)
    for name in (INDEX, "model-00001-of-00001.safetensors", "model-mixing.safetensors"):
        (again / name).unlink()
    IHAForCausalLM.from_pretrained(
        llama, config=IHAConfig.from_llama(LlamaConfig.from_pretrained(llama))
    ).save_pretrained(again)
    for name in ("results.json", "checkpoint-2/model.safetensors", "runs/events.out.tfevents.1", "train.pkl"):
        (again / name).parent.mkdir(exist_ok=True)
        (again / name).write_text("{}")

    stdout, stderr = run(PUSH, smollm2, env=hub.environment(tmp_path / "mine"), cwd=tmp_path)
    assert f"Pushed: {hub.url}/tester/model/commit/" in stdout
    assert "iha: tester/model: the Hub did not take it (" in stderr and "hf auth login" in stderr
    assert 'from_pretrained("model-iha"' in (tmp_path / "model-iha" / "README.md").read_text()

    assert len(hub.commits["tester/model"]) == 2  # made, and everything at once
    pushed = hub.commits["tester/model"][-1].keys()
    assert pushed == {path.relative_to(tmp_path / "model-iha").as_posix() for path in files(tmp_path / "model-iha")}
    card = ModelCard(hub.read("tester/model", "README.md").decode())
    assert (card.data.license, card.data.license_name) == ("other", "tiny-licence")
    assert card.data.base_model == "tester/llama" and "https://example.org/licence" in card.text
    assert 'from_pretrained("tester/model", trust_remote_code=True)' in card.text and "model-iha" not in card.text
    assert "exactly what its source computes" in card.text and "`num_pseudo_heads` 2" in card.text

    first, second = hub.commits["tester/trained"][1:]
    assert "model.safetensors" in first and "results.json" in first
    assert not any(name.startswith(("checkpoint", "runs", "train")) for name in first)
    before = hub.folder / first["README.md"]
    assert 'from_pretrained("tester/trained"' in before.read_text() and '"before"' not in before.read_text()
    # Weights in other files than before: the old ones are gone, for they would be read first.
    assert {name for name in second if "safetensors" in name} == {name for name in pushed if "safetensors" in name}

    another = {**hub.environment(tmp_path / "another"), "PYTHONPATH": ""}
    alone, _ = run(WITHOUT_THE_PACKAGE, python=elsewhere, env=another, cwd=tmp_path)
    ids = torch.arange(1, 9)[None]
    expected = AutoModelForCausalLM.from_pretrained(llama).generate(ids, max_new_tokens=8, do_sample=False)
    generated, encoded = map(json.loads, alone.splitlines()[-2:])
    assert generated == expected.tolist() and encoded == tokenizer("The capital of France").input_ids
    for name in ("tester/by-hand", "tester/saved"):
        assert {"config.json", "modeling_iha.py", "saving.py", "model.safetensors"} <= hub.commits[name][-1].keys()
    assert str(expected.tolist()) in stdout.splitlines()


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_card_says_what_is_not_as_it_was(tmp_path):
    llama = make_llama(tmp_path / "llama", LlamaForTokenClassification, num_labels=3)
    convert(llama, tmp_path / "iha", [2, 3], hybrid_length=None, rope_phases="interleaved")
    card = ModelCard.load(tmp_path / "iha" / "README.md")
    assert "does not compute what its source computes" in card.text and "'interleaved' phases turn" in card.text
    assert "`num_pseudo_heads` 2 3" in card.text and "AutoModelForTokenClassification" in card.text
    assert "The source names no licence" in card.text and card.data.license is None and card.data.base_model is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: llama3.2\n---\nText", {"license": "llama3.2"}),
        ("---\nlicense: [apache-2.0, mit]\n---\n", {"license": ["apache-2.0", "mit"]}),
        ("---\nlicense_name: without-a-licence\n---\n", {}),
        ("---\nlicense: [broken\n---\n", {}),
        ("No metadata.", {}),
        (b"\xff\xfe not text", {}),
        (None, {}),
    ],
)
def test_licences_that_can_be_read_and_others(text, expected, tmp_path):
    if text is not None:
        (tmp_path / "README.md").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read_licence(tmp_path) == expected


def test_several_licences_are_shown():
    card = conversion_card("x", IHAConfig(), None, {"license": ["apache-2.0", "mit"]}, [], "mistral", dequantised=True)
    assert "The source's licence holds: apache-2.0, mit." in card.text and card.data.license == ["apache-2.0", "mit"]
    assert "A model of type mistral as an" in card.text and "every weight is the source's, dequantised to" in card.text


def test_a_licence_without_a_name_of_its_own_is_shown():
    card = conversion_card("x", IHAConfig(), "meta-llama/Llama-3.2-1B", {"license": "llama3.2"}, [])
    assert "The source's licence holds: llama3.2." in card.text and card.data.license == "llama3.2"


def test_what_nobody_could_load_is_not_pushed(tmp_path):
    llama = make_llama(tmp_path / "llama")
    with pytest.raises(CheckpointError, match="model_type 'llama', an IHA folder has 'iha'"):
        push(llama, "tester/model")
    convert(llama, tmp_path / "iha")
    with pytest.raises(CheckpointError, match=r"the Hub did not take it \(.*offline.*\)\.$"):
        push(tmp_path / "iha", "tester/model")
    edit_config(tmp_path / "iha", auto_map=None)
    with pytest.raises(CheckpointError, match="does not bring its code"):
        push(tmp_path / "iha", "tester/model")
    convert(llama, tmp_path / "cardless")
    os.unlink(tmp_path / "cardless" / "README.md")
    with pytest.raises(CheckpointError, match=r"README\.md: not there\. Write one"):
        push(tmp_path / "cardless", "tester/model")
