"""Runs of train.py as people start them, in processes of their own, and what they leave."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from training_iha import last_complete_checkpoint

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "sft_openthoughts"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
STEPS = 6  # two epochs of 24 rows: Accelerate would fill up an uneven one, and processes would not be one
BATCH = 8  # rows in a step


def train(model, data, folder, *more, launcher=()):
    return [
        *(sys.executable, *launcher),
        *(EXAMPLE / "train.py", "--config", EXAMPLE / "demo.yaml"),
        *("--training_template", EXAMPLE / "smollm2_training.jinja"),
        *("--model", model, "--dataset", data, "--output_dir", folder, "--eval_examples", "44"),
        *("--max_steps", str(STEPS), "--save_steps", "2", "--save_total_limit", "9", "--eval_steps", "3"),
        *("--learning_rate", "1e-3", "--use_cpu", "true", "--disable_tqdm", "true"),
        *("--per_device_train_batch_size", str(BATCH)),
        *more,
    ]


def spread(processes, sharded=False):
    """The launcher and the argument that spread a step over processes, as DDP or FSDP2."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes))
    return {"launcher": (*launcher, HERE.parent / "spread.py", "fsdp") if sharded else launcher}, (
        "--per_device_train_batch_size",
        str(BATCH // processes),
    )


def run(command):
    done = finish(command)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def finish(command):
    return subprocess.run(list(map(str, command)), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def kill_after(checkpoint, command):
    """Starts a run, and kills all its processes once the checkpoint is there."""
    folder = checkpoint.parent
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        launched = psutil.Popen(list(map(str, command)), env=ENVIRONMENT, stdout=output, stderr=output)
        try:
            while last_complete_checkpoint(folder) is None:
                assert launched.poll() is None, log.read_text()[-4000:]
                time.sleep(0.01)
        finally:
            family = [launched, *launched.children(recursive=True)]  # torchrun's are in sessions of their own
            for process in family:
                process.kill()
            psutil.wait_procs(family, timeout=30)
    assert not (folder / "results.json").exists()


def curve(folder, key="loss"):
    log = json.loads((folder / "results.json").read_text())["log"]
    return [entry[key] for entry in log if key in entry]


def weights(folder, file="model.safetensors"):
    tensors = load_file(folder / file)
    if "lm_head.weight" in tensors:  # FSDP writes a tied head as well
        assert torch.equal(tensors.pop("lm_head.weight"), tensors["model.embed_tokens.weight"])
    return tensors


def assert_same_run(folder, expected, tolerance, file="model.safetensors"):
    assert len(curve(folder)) == len(curve(expected))
    assert curve(folder) == pytest.approx(curve(expected), rel=tolerance)
    ours, theirs = weights(folder, file), weights(expected, file)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= 100 * tolerance * tensor.abs().max(), name
