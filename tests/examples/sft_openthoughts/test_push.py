"""What `--push_to_hub` leaves on a Hub: real pushes by real processes, loaded by others that know its name alone."""

import sys

import pytest
import torch
from peft import PeftModel
from runs import finish, run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

LOAD = """
import sys
import torch
from safetensors.torch import save_file
from {library} import {loader}

model = {loader}.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
print(type(model.get_base_model() if {peft} else model).__module__)
save_file({{"logits": model(torch.arange(1, 33)[None]).logits}}, sys.argv[2])
"""
WEIGHTS = ("adapter_model.safetensors", "adapter_config.json", "results.json")
PLAIN = LOAD.format(library="transformers", loader="AutoModelForCausalLM", peft=False)
ADAPTER = LOAD.format(library="peft", loader="AutoPeftModelForCausalLM", peft=True)


def logits(program, name, folder, environment):
    """Of the model of this name, in a process of its own, and the module its class comes from."""
    file = folder / "logits.safetensors"
    module = run([sys.executable, "-c", program, name, file], environment).split()[0]
    return load_file(file)["logits"], module


def pushing(name):
    return ("--max_steps", "3", "--push_to_hub", "true", "--hub_strategy", "end", "--hub_model_id", name)


def test_a_pushed_model_loads_by_its_name_with_the_code_it_brings(hub, command, tmp_path):
    run(command(tmp_path / "run", *pushing("tester/tuned")), hub.environment(tmp_path / "mine"))
    pushed = hub.commits["tester/tuned"][-1]
    assert {"config.json", "modeling_iha.py", "tokenizer.json", "results.json", "README.md"} <= pushed.keys()
    assert not any(name.startswith("checkpoint-") for name in pushed)
    assert 'from_pretrained("tester/tuned", trust_remote_code=True)' in hub.read("tester/tuned", "README.md").decode()
    ours, module = logits(PLAIN, "tester/tuned", tmp_path, hub.environment(tmp_path / "another"))
    assert module.startswith("transformers_modules.")
    with torch.no_grad():
        assert torch.equal(
            ours, AutoModelForCausalLM.from_pretrained(tmp_path / "run")(torch.arange(1, 33)[None]).logits
        )


@pytest.mark.slow
def test_a_pushed_adapter_finds_its_model_on_the_hub(hub, command, tiny_iha, tmp_path):
    mine = hub.environment(tmp_path / "mine")
    run([sys.executable, "-m", "huggingface_hub.cli.hf", "upload", "tester/tiny", tiny_iha], mine)
    adapter = (*pushing("tester/adapter"), "--train", "lora", "--model", "tester/tiny")
    run(command(tmp_path / "run", *adapter), mine)
    ours, _ = logits(ADAPTER, "tester/adapter", tmp_path, hub.environment(tmp_path / "another"))
    base, ids = AutoModelForCausalLM.from_pretrained(tiny_iha).eval(), torch.arange(1, 33)[None]
    with torch.no_grad():
        plain = base(ids).logits
        assert torch.equal(ours, PeftModel.from_pretrained(base, tmp_path / "run").eval()(ids).logits)
    assert not torch.equal(ours, plain)
    before = hub.commits.pop("tester/adapter")[-1]
    run(command(tmp_path / "run", *adapter), mine)  # a finished run is pushed as it is
    pushed = hub.commits["tester/adapter"][-1]
    assert {name: pushed[name] for name in WEIGHTS} == {name: before[name] for name in WEIGHTS}


@pytest.mark.slow
def test_an_adapter_that_would_name_a_folder_is_not_pushed(hub, command, tmp_path):
    adapter = (*pushing("tester/adapter"), "--train", "lora")
    refused = finish(command(tmp_path / "run", *adapter), hub.environment(tmp_path / "mine"))
    assert refused.returncode != 0
    assert "must be a Hub id to push an adapter" in refused.stderr
    assert not hub.commits
