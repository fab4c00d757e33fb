"""`iha plan`, for real: models by folder and by preset, what it prints and writes, and what it refuses."""

import json
import subprocess
import sys

import yaml
from folders import make_llama
from typer.testing import CliRunner

from configuration_iha import IHAConfig, flop_matched_schedule
from conversion_iha.cli import app


def iha_plan(*arguments) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_prints_tables_arguments_and_configuration():
    options = ("--schedule", "hybrid", "--length", "131072", "--gpus", "8", "--memory", "80", "-p", "2")
    command = [sys.executable, "-m", "conversion_iha.cli", "plan", "llama-3.1-8b", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    stdout = done.stdout
    assert "113,152" in stdout  # mixing: 26 layers of 2 P (H^2 + G^2)
    for text in ("Parameters", "plain attention", "Memory on each GPU", "Ulysses", "gradient_checkpointing: true"):
        assert text in stdout, text
    config = yaml.safe_load(stdout[stdout.index("compute_environment") :])
    assert config["parallelism_config"]["parallelism_config_sp_size"] > 1


def test_folders_of_both_kinds(tmp_path):
    make_llama(tmp_path / "llama")
    code, stdout, _ = iha_plan(tmp_path / "llama", "--length", 256, "--schedule", "hybrid", "-p", 2, "--json")
    assert code == 0
    hybrid = json.loads(stdout)
    assert hybrid["parameters"]["mixing"] > 0

    fields = json.loads((tmp_path / "llama" / "config.json").read_text())
    schedule = flop_matched_schedule(fields["num_hidden_layers"], 256, 2)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = {name: fields[name] for name in (*names, "num_key_value_heads", "tie_word_embeddings")}
    IHAConfig(**shape, head_dim=fields.get("head_dim"), **schedule).save_pretrained(tmp_path / "iha")
    code, stdout, stderr = iha_plan(tmp_path / "iha", "--length", 256, "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["attention"] == hybrid["attention"]

    for option in (("-p", 2), ("--schedule", "full")):
        code, stdout, stderr = iha_plan(tmp_path / "iha", "--length", 256, *option)
        assert (code, stdout) == (1, "")
        assert "must be left out" in stderr


def test_writes_the_configuration_and_never_over_a_file(tmp_path):
    file = tmp_path / "accelerate.yaml"
    code, stdout, _ = iha_plan("smollm2-135m", "--length", 1024, "--gpus", 2, "--write", file)
    assert code == 0
    assert f"Written: {file}" in stdout
    assert yaml.safe_load(file.read_text())["distributed_type"] == "FSDP"
    before = file.read_bytes()
    code, stdout, stderr = iha_plan("smollm2-135m", "--length", 1024, "--write", file)
    assert (code, stdout) == (1, "")
    assert "exists already" in stderr
    assert file.read_bytes() == before


def test_what_does_not_fit(tmp_path):
    file = tmp_path / "accelerate.yaml"
    options = ("--length", 131072, "--gpus", 2, "--memory", 24)
    code, stdout, stderr = iha_plan("llama-3.1-8b", *options, "--write", file)
    assert (code, stderr) == (1, "")
    assert "Does not fit" in stdout and "8 GPUs would do." in stdout
    assert not file.exists()
    code, stdout, _ = iha_plan("llama-3.1-8b", *options, "--json")
    assert (code, json.loads(stdout)["enough_gpus"]) == (1, 8)


def test_errors_are_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused = {
        ("iha-2.4b", "--length", 1024, "-p", 2): "--num-pseudo-heads 2 must be left out: iha-2.4b is an IHA model",
        ("smollm2-135m", "--length", 1024, "--gpus", 12): "gpus=12 must be at most 8, or a multiple",
        ("smollm2-135m", "--length", 1024, "--memory", 0): "memory_gb=0.0 must be above 0",
        ("smollm2-135m", "--length", 8, "--schedule", "hybrid"): "sequence_length=8 must be at least 4 P^2 = 16",
        ("no/such-model", "--length", 1024): "no/such-model",
        ("some.gguf", "--length", 1024): "some.gguf: convert it first",
    }
    for arguments, message in refused.items():
        code, stdout, stderr = iha_plan(*arguments)
        assert (code, stdout) == (1, ""), stderr
        assert stderr.startswith("iha: ") and stderr.count("\n") == 1
        assert message in stderr
