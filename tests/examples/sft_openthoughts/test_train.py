"""The example as people run it: real processes on the demo's data, killed, resumed, spread over processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import openthoughts
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(openthoughts.__file__).parent
SHARDED = Path(__file__).parent / "sharded.py"
STEPS = 6


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, EXAMPLE / "make_data.py", folder], check=True)
    return folder


@pytest.fixture
def command(small_iha, data):
    def of(folder, *more, launcher=(sys.executable,)):
        return [
            *launcher,
            *(EXAMPLE / "train.py", "--config", EXAMPLE / "demo.yaml"),
            *("--training_template", EXAMPLE / "smollm2_training.jinja"),
            *("--model", small_iha, "--dataset", data, "--output_dir", folder),
            *("--max_steps", str(STEPS), "--save_steps", "2", "--eval_steps", "3", "--learning_rate", "1e-3"),
            *("--use_cpu", "true", "--disable_tqdm", "true", "--per_device_train_batch_size", "4"),
            *more,
        ]

    return of


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


def run(command):
    done = subprocess.run(list(map(str, command)), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def curve(folder, key="loss"):
    log = json.loads((folder / "results.json").read_text())["log"]
    return [entry[key] for entry in log if key in entry]


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "uninterrupted"


@pytest.fixture
def whole_run(uninterrupted, command):
    if not (uninterrupted / "results.json").exists():
        run(command(uninterrupted))
    return uninterrupted


def test_help_lists_the_recipe_and_sftconfig():
    text = run([sys.executable, EXAMPLE / "train.py", "--help"])
    assert "--mixing_learning_rate" in text and "--gradient_accumulation_steps" in text


def test_a_run_trains_evaluates_logs_and_leaves_a_folder_that_loads(whole_run, command, tokenizer):
    results = json.loads((whole_run / "results.json").read_text())
    assert results["examples"] == {"train": 80, "eval": 20, "left out as too long": 0}
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
    subprocess.run([sys.executable, EXAMPLE / "plot.py", whole_run], check=True)
    assert (whole_run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_killed_run_goes_on_to_the_same_weights(whole_run, command, tmp_path):
    folder = tmp_path / "killed"
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(list(map(str, command(folder))), env=ENVIRONMENT, stdout=log, stderr=log)
        state = folder / "checkpoint-2" / "trainer_state.json"
        while not state.exists():
            assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (folder / "results.json").exists()
    half = folder / "checkpoint-5"  # as if it had been killed while it saved
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"")
    assert "Going on from" in run(command(folder))
    ours, theirs = weights(folder), weights(whole_run)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert curve(folder) == curve(whole_run)


def test_another_recipe_does_not_go_on_in_the_same_folder(whole_run, command):
    before = (whole_run / "results.json").read_bytes()
    refused = subprocess.run(
        list(map(str, command(whole_run, "--mixing_learning_rate", "0.5"))),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert refused.returncode != 0
    assert "holds a run with mixing_learning_rate=0.001, not 0.5. Name another output_dir" in refused.stderr
    assert (whole_run / "results.json").read_bytes() == before


def assert_same_run(folder, expected, tolerance):
    assert len(curve(folder)) == STEPS
    assert curve(folder) == pytest.approx(curve(expected), rel=tolerance)
    for name, tensor in weights(expected).items():
        assert (weights(folder)[name] - tensor).abs().max() <= 100 * tolerance * tensor.abs().max(), name


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_the_whole_batch(whole_run, command, tmp_path):
    batch = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4")
    run(command(tmp_path / "accumulated", *batch))
    assert_same_run(tmp_path / "accumulated", whole_run, 1e-5)


def test_two_processes_are_one(whole_run, command, tmp_path):
    batch = ("--per_device_train_batch_size", "2")
    run(command(tmp_path / "ddp", *batch, launcher=(*TORCHRUN, "2")))
    assert_same_run(tmp_path / "ddp", whole_run, 1e-4)


@pytest.mark.slow
def test_two_sharded_processes_are_one(whole_run, command, tmp_path):
    batch = ("--per_device_train_batch_size", "2")
    run(command(tmp_path / "fsdp", *batch, launcher=(*TORCHRUN, "2", SHARDED)))
    assert_same_run(tmp_path / "fsdp", whole_run, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["mixing", "lora"])
def test_less_than_all_is_trained(train, command, small_iha, tmp_path):
    run(command(tmp_path / train, "--train", train, "--max_steps", "3"))
    before = load_file(small_iha / "model.safetensors")
    if train == "lora":
        subprocess.run([sys.executable, EXAMPLE / "merge_lora.py", tmp_path / "lora", tmp_path / "merged"], check=True)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "lora", dtype=torch.float32).eval()
        source = AutoModelForCausalLM.from_pretrained(small_iha, dtype=torch.float32).eval()
        ids = torch.arange(100, 120)[None]
        with torch.no_grad():
            logits, expected, before = (model(ids).logits for model in (merged, adapted, source))
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert (before - expected).abs().max() > 1e-3 * expected.abs().max()
        trained = load_file(tmp_path / "lora" / "adapter_model.safetensors")
        plain = load_file(small_iha / "model.safetensors")
        mixing = {name: tensor for name, tensor in trained.items() if ".mixer." in name or ".collapse." in name}
        assert len(mixing) == 2 * 4
        for name, tensor in mixing.items():
            assert not torch.equal(tensor, plain[name.removeprefix("base_model.model.")]), name
        return
    for name, tensor in weights(tmp_path / train).items():
        moved = not torch.equal(tensor, before[name])
        assert moved == (".mixer." in name or ".collapse." in name), name
