"""Spread over processes, DDP and FSDP2, killed and resumed with another number of them: one process's run."""

import sys

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from runs import EXAMPLES, assert_same_run, curve, kill_after, run, run_here, spread, torchrun, weights
from sft import share
from transformers import AutoModelForCausalLM, AutoTokenizer


def merge(folder, destination):
    run_here([sys.executable, EXAMPLES / "merge.py", folder, destination])
    return weights(destination)


def test_two_processes_are_one(whole_run, command, tmp_path):
    run(command(tmp_path / "ddp", *share(2), launcher=torchrun(2)))
    assert_same_run(tmp_path / "ddp", whole_run, 1e-4)


@pytest.mark.slow
def test_sharded_processes_killed_and_resumed_as_others_are_one(whole_run, command, tiny_iha, tmp_path):
    """Two, then four; the curve holds the steps of all, so that each number is compared."""
    folder = tmp_path / "fsdp"
    kill_after(folder / "checkpoint-2", command(folder, *share(2), launcher=spread("fsdp", 2)))
    with pytest.raises(
        ValueError, match="checkpoint-2 is of a run under SHARDED_STATE_DICT; this one is under neither"
    ):
        run_here(command(folder))
    said = run(command(folder, *share(4), launcher=spread("fsdp", 4)))
    assert f"Going on from {folder / 'checkpoint-2'}" in said
    assert_same_run(folder, whole_run, 1e-4)
    final = weights(folder)
    merged = merge(folder / "checkpoint-6", tmp_path / "merged")
    assert merged.keys() == final.keys()
    for name, tensor in final.items():
        assert torch.equal(merged[name], tensor), name
    names = {file.name for file in folder.iterdir() if file.is_file()}
    assert {file.name for file in (tmp_path / "merged").iterdir()} == names - RUN
    configs = (
        AutoModelForCausalLM.from_pretrained(it).config.to_diff_dict() for it in (tmp_path / "merged", tiny_iha)
    )
    assert next(configs) == next(configs)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template


@pytest.mark.slow
def test_a_ring_is_one_process(command, tmp_path):
    rows = ("--packing", "false", "--pad_to_multiple_of", "4", "--per_device_eval_batch_size", "1", "--max_steps", "2")
    run_here(command(tmp_path / "one", *rows))
    run(command(tmp_path / "ring", *rows, launcher=spread("ring", 2)))
    assert_same_run(tmp_path / "ring", tmp_path / "one", 1e-4)
    evaluations = curve(tmp_path / "one", "eval_loss")
    assert curve(tmp_path / "ring", "eval_loss") == pytest.approx(evaluations, rel=1e-4) and len(evaluations) == 2


@pytest.mark.slow
def test_adapters_of_sharded_processes_are_those_of_one_and_merge(command, tiny_iha, tmp_path):
    alone, sharded = tmp_path / "alone", tmp_path / "fsdp"
    run_here(command(alone, "--train", "lora"))
    run(command(sharded, *share(2), "--train", "lora", launcher=spread("fsdp", 2)))
    assert_same_run(sharded, alone, 1e-4, ADAPTER)
    trained, before = weights(alone, ADAPTER), weights(tiny_iha)
    mixing = {name: tensor for name, tensor in trained.items() if ".mixer." in name or ".collapse." in name}
    assert len(mixing) == 2 * 4
    for name, tensor in mixing.items():
        assert not torch.equal(tensor, before[name.removeprefix("base_model.model.")]), name

    final = merge(sharded, tmp_path / "final")
    merged = merge(sharded / "checkpoint-6", tmp_path / "merged")
    assert merged.keys() == final.keys() == before.keys()
    for name, tensor in final.items():
        assert torch.equal(merged[name], tensor), name
    ids = torch.arange(100, 120)[None]
    with torch.no_grad():
        logits, expected, source = (
            auto.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
            for auto, folder in (
                (AutoModelForCausalLM, tmp_path / "merged"),
                (AutoPeftModelForCausalLM, alone),
                (AutoModelForCausalLM, tiny_iha),
            )
        )
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (source - expected).abs().max() > 1e-3 * expected.abs().max()


ADAPTER = "adapter_model.safetensors"
# What a run leaves beside its model.
RUN = {"recipe.json", "results.json", "trainer_state.json", "training_args.bin", "README.md"}
