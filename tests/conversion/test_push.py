"""A converted model on a Hub: real pushes by real processes, loaded by others that know its name alone."""

import json
import os
import subprocess
import sys

import pytest
import torch
from folders import edit_config, make_llama
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, LlamaForTokenClassification

from conversion_iha import CheckpointError, convert, push
from conversion_iha.card import conversion_card, read_licence
from modeling_iha import IHAConfig

LICENCE = (
    "---\nlicense: other\nlicense_name: tiny-licence\nlicense_link: https://example.org/licence\n---\nA tiny model."
)
WITHOUT_THE_PACKAGE = """
import sys
class Absent:
    # Stands for an environment in which the package is not installed.
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("modeling_iha", "configuration_iha", "conversion_iha"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(model.generate(torch.arange(1, 9)[None], max_new_tokens=8, do_sample=False).tolist())
"""


def run(arguments, environment):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def iha(*arguments):
    return ("-m", "conversion_iha.cli", *arguments)


def test_from_hub_to_hub(hub, tmp_path):
    """A Llama model of the Hub is converted and pushed, and loads there without this package, being what it was."""
    llama = make_llama(tmp_path / "llama", bos_token_id=1, eos_token_id=2)
    (llama / "README.md").write_text(LICENCE)
    mine = hub.environment(tmp_path / "mine")
    code, _, stderr = run(("-m", "huggingface_hub.cli.hf", "upload", "tester/llama", llama), mine)
    assert code == 0, stderr
    code, _, stderr = run(iha("convert", "tester/llama", tmp_path / "model-iha", "--no-check"), mine)
    assert code == 0, stderr
    before = (tmp_path / "model-iha" / "README.md").read_text()
    code, stdout, stderr = run(iha("push", tmp_path / "model-iha", "tester/model"), mine)
    assert code == 0, stderr
    assert f"Pushed: {hub.url}/tester/model/commit/" in stdout
    assert (tmp_path / "model-iha" / "README.md").read_text() == before

    assert len(hub.commits["tester/model"]) == 2  # made, and everything at once
    pushed = hub.commits["tester/model"][-1].keys()
    assert pushed == {path.relative_to(tmp_path / "model-iha").as_posix() for path in files(tmp_path / "model-iha")}
    card = ModelCard(hub.read("tester/model", "README.md").decode())
    assert (card.data.license, card.data.license_name) == ("other", "tiny-licence")
    assert card.data.base_model == "tester/llama" and "https://example.org/licence" in card.text
    assert 'from_pretrained("tester/model", trust_remote_code=True)' in card.text and "model-iha" not in card.text
    assert "exactly what its source computes" in card.text and "`num_pseudo_heads` 2" in card.text

    code, stdout, stderr = run(("-c", WITHOUT_THE_PACKAGE, "tester/model"), hub.environment(tmp_path / "another"))
    assert code == 0, stderr
    ids = torch.arange(1, 9)[None]
    expected = AutoModelForCausalLM.from_pretrained(llama).generate(ids, max_new_tokens=8, do_sample=False)
    assert json.loads(stdout.splitlines()[-1]) == expected.tolist()

    stranger = {**mine, "HF_TOKEN": "hf_wrong"}
    code, _, stderr = run(iha("push", tmp_path / "model-iha", "tester/model"), stranger)
    assert (
        code == 1 and stderr.startswith("iha: tester/model: the Hub did not take it (") and "hf auth login" in stderr
    )
    assert len(hub.commits["tester/model"]) == 2


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


def test_a_licence_without_a_name_of_its_own_is_shown():
    card = conversion_card("x", IHAConfig(), "meta-llama/Llama-3.2-1B", {"license": "llama3.2"}, [])
    assert "The source's licence holds: llama3.2." in card.text and card.data.license == "llama3.2"


def test_what_nobody_could_load_is_not_pushed(tmp_path):
    llama = make_llama(tmp_path / "llama")
    with pytest.raises(CheckpointError, match="model_type 'llama', an IHA folder has 'iha'"):
        push(llama, "tester/model")
    convert(llama, tmp_path / "iha")
    edit_config(tmp_path / "iha", auto_map=None)
    with pytest.raises(CheckpointError, match="does not bring its code"):
        push(tmp_path / "iha", "tester/model")
    convert(llama, tmp_path / "cardless")
    os.unlink(tmp_path / "cardless" / "README.md")
    with pytest.raises(CheckpointError, match=r"README\.md: not there\. Write one"):
        push(tmp_path / "cardless", "tester/model")
