"""The recipe end to end in small: stages of longer rows, spread over processes, killed and gone on with."""

import sys

import pytest
import yaml
from runs import EXAMPLES, SPREAD, assert_same_run, curve, kill_after, run, run_here, spread
from transformers import AutoModelForCausalLM

EXAMPLE = EXAMPLES / "long_context"
STEPS, BATCH = 4, 4
LENGTHS = {"8k": 64, "16k": 128}


def train(stage, model, documents, folder, *more, launcher=(sys.executable,)):
    return [
        *launcher,
        *(EXAMPLE / "train.py", "--config", EXAMPLE / f"{stage}.yaml", "--max_length", LENGTHS[stage]),
        *("--model", model, "--dataset", documents, "--output_dir", folder, "--eval_documents", "3"),
        *("--max_steps", STEPS, "--save_steps", "2", "--learning_rate", "1e-3", "--bf16", "false"),
        *("--per_device_train_batch_size", BATCH, "--gradient_accumulation_steps", "1", "--disable_tqdm", "true"),
        *("--use_cpu", "true", *more),
    ]


@pytest.fixture(scope="module")
def whole(full, documents, tmp_path_factory):
    """Two stages in one process, rows from within one document each."""
    folder = tmp_path_factory.mktemp("whole")
    before = full
    for stage in LENGTHS:
        run_here(train(stage, before, documents, folder / stage, "--documents", "whole"))
        before = folder / stage
    return folder


@pytest.mark.slow
def test_each_stage_learns_and_leaves_a_model_for_longer_rows(whole):
    for stage, length in LENGTHS.items():
        evaluations = curve(whole / stage, "eval_loss")
        assert len(evaluations) == 2 and evaluations[-1] < evaluations[0]
        config = AutoModelForCausalLM.from_pretrained(whole / stage).config
        recipe = yaml.safe_load((EXAMPLE / f"{stage}.yaml").read_text())
        assert config.max_position_embeddings == length
        assert config.rope_parameters["rope_theta"] == recipe["rope_theta"]


@pytest.mark.slow
def test_two_stages_in_a_ring_are_those_of_one_process(whole, full, documents, tmp_path):
    before = full
    for stage in LENGTHS:
        folder = tmp_path / stage
        command = train(stage, before, documents, folder, "--documents", "whole", launcher=spread("ring", 2))
        if stage == "16k":
            kill_after(folder / "checkpoint-2", command)
        run(command)
        assert_same_run(folder, whole / stage, 1e-4)
        assert curve(folder, "eval_loss") == pytest.approx(curve(whole / stage, "eval_loss"), rel=1e-4)
        before = folder


@pytest.mark.slow
def test_a_stage_by_heads_is_that_of_one_process(hybrid, documents, tmp_path):
    """DeepSpeed's Ulysses through Accelerate's configuration, with windows and packed rows."""
    configuration = yaml.safe_load((EXAMPLES / "accelerate" / "8gpu_ulysses.yaml").read_text())
    configuration |= {"num_processes": 2, "mixed_precision": "no", "main_process_port": 0}
    configuration["parallelism_config"] |= {
        "parallelism_config_dp_shard_size": 1,
        "parallelism_config_sp_size": 2,
    }
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump(configuration))
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, SPREAD, "deepspeed")
    cpus = ("--use_cpu", "false", "--ddp_backend", "gloo")
    one, two = tmp_path / "one", tmp_path / "two"
    run_here(train("8k", hybrid, documents, one))
    run(train("8k", hybrid, documents, two, *cpus, launcher=launcher))
    assert_same_run(two, one, 1e-4)
    assert curve(two, "eval_loss") == pytest.approx(curve(one, "eval_loss"), rel=1e-4)
