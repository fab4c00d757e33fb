"""Runs of the examples as people start them, in processes of their own, and what they leave."""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from modeling_iha import IHAConfig, IHAForCausalLM
from training_iha import last_complete_checkpoint

SPREAD = Path(__file__).parent / "spread.py"
EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def torchrun(processes):
    """What starts a program in processes that are one by DDP."""
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes))


def spread(way, processes):
    """What starts it in processes that are one in a way of spread.py."""
    return (sys.executable, SPREAD, way, processes)


def run(command, environment=ENVIRONMENT):
    """What it says."""
    done = finish(command, environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def finish(command, environment=ENVIRONMENT):
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300)


def run_here(command):
    """Runs a program in this process: importing takes most of the time of one of its own."""
    before = sys.argv, sys.path
    _, *sys.argv = map(str, command)
    sys.path = [str(Path(sys.argv[0]).parent), *sys.path]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv, sys.path = before


def kill_after(checkpoint, command):
    """Starts a run, and kills all its processes once the checkpoint is there."""
    folder = checkpoint.parent
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        launched = psutil.Popen(list(map(str, command)), env=ENVIRONMENT, stdout=output, stderr=output)
        try:
            while last_complete_checkpoint(folder) != str(checkpoint):
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


def untrained(tokenizer, folder, **fields):
    """A model of two layers with this tokenizer and its chat template, as a conversion leaves it."""
    torch.manual_seed(0)
    shape = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_pseudo_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    IHAForCausalLM(IHAConfig(**{**shape, **fields})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
