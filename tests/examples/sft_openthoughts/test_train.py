"""The example as people run it: a real process on the demo's data, killed and resumed."""

import json
import sys

import pytest
import torch
from runs import assert_same_run, curve, kill_after, run, run_here, weights
from sft import BATCH, EXAMPLE, STEPS
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_help_lists_the_recipe_and_sftconfig(capsys):
    with pytest.raises(SystemExit):
        run_here([sys.executable, EXAMPLE / "train.py", "--help"])
    text = capsys.readouterr().out
    assert "--mixing_learning_rate" in text and "--gradient_accumulation_steps" in text


def test_a_run_trains_evaluates_logs_and_leaves_a_folder_that_loads(whole_run, tokenizer):
    results = json.loads((whole_run / "results.json").read_text())
    assert results["examples"] == {"train": 56, "eval": 44, "left out as too long": 0}
    losses, evaluations = curve(whole_run), curve(whole_run, "eval_loss")
    assert len(losses) == STEPS and losses[-1] < losses[0]
    assert len(evaluations) >= 3 and evaluations[-1] < evaluations[0]
    for key in (
        "apart/q_mix",
        "apart/k_mix",
        "apart/v_mix",
        "apart/collapse",
        "mixing_grad_norm",
        "tokens_per_second",
    ):
        assert len(curve(whole_run, key)) == STEPS and all(value > 0 for value in curve(whole_run, key)[1:]), key
    assert curve(whole_run, "apart/collapse")[-1] > curve(whole_run, "apart/collapse")[0]
    model = AutoModelForCausalLM.from_pretrained(whole_run)
    saved = AutoTokenizer.from_pretrained(whole_run)
    assert saved.chat_template == tokenizer.chat_template
    ids = saved.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert model.generate(**ids, max_new_tokens=4).shape[1] == ids["input_ids"].shape[1] + 4
    run_here([sys.executable, EXAMPLE / "plot.py", whole_run])
    assert (whole_run / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_weights(whole_run, command, tmp_path):
    folder = tmp_path / "killed"
    kill_after(folder / "checkpoint-2", command(folder))
    half = folder / "checkpoint-5"  # as if it had been killed while it saved
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"")
    assert f"Going on from {folder / 'checkpoint-2'}" in run(command(folder))
    ours, theirs = weights(folder), weights(whole_run)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert curve(folder) == curve(whole_run)


def test_another_recipe_does_not_go_on_in_the_same_folder(whole_run, command):
    before = (whole_run / "results.json").read_bytes()
    with pytest.raises(ValueError, match=r"holds a run with mixing_learning_rate=0\.001, not 0\.5\. Name another"):
        run_here(command(whole_run, "--mixing_learning_rate", "0.5"))
    assert (whole_run / "results.json").read_bytes() == before


def test_a_run_that_ended_within_an_epoch_stays_as_it_is(command, tmp_path):
    folder = tmp_path / "run"
    again = command(folder, "--max_steps", "1", "--save_steps", "1")
    run_here(again)
    names = ("model.safetensors", "results.json")
    before = {name: (folder / name).read_bytes() for name in names}
    run_here(again)
    assert {name: (folder / name).read_bytes() for name in names} == before
    (folder / "results.json").unlink()  # as if it had been killed between its last checkpoint and its end
    run_here(again)
    assert (folder / "model.safetensors").read_bytes() == before["model.safetensors"]
    assert json.loads((folder / "results.json").read_text())["steps"] == 1


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_the_whole_batch(whole_run, command, tmp_path):
    batch = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", str(BATCH))
    run_here(command(tmp_path / "accumulated", *batch))
    assert_same_run(tmp_path / "accumulated", whole_run, 1e-5)


@pytest.mark.slow
def test_mixing_alone_is_trained(command, tiny_iha, tmp_path):
    run_here(command(tmp_path / "mixing", "--train", "mixing", "--max_steps", "3"))
    before = weights(tiny_iha)
    for name, tensor in weights(tmp_path / "mixing").items():
        moved = not torch.equal(tensor, before[name])
        assert moved == (".mixer." in name or ".collapse." in name), name
