"""`iha bench`, for real: what is measured is right where it can be counted, and what it refuses."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from folders import make_llama
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from configuration_iha import IHAConfig, preset
from conversion_iha import speed
from conversion_iha.cli import app
from conversion_iha.speed import _generation, _models, bench, peak_bytes

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def iha_bench(*arguments) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.slow
def test_command_measures_a_folder_in_a_process_of_its_own(tmp_path):
    make_llama(tmp_path / "llama")
    options = ("--length", "24", "--new-tokens", "4", "--batch", "2", "--rounds", "2", "-p", "2")
    command = [sys.executable, "-m", "conversion_iha.cli", "bench", tmp_path / "llama", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = ("prefill", "decoding", "training step", "prefill memory", "training memory")
    for text in (", P = 2; 24 tokens, batch 2, float32, cpu, ", "Llama", "IHA", "tokens/s", "MB", *rows):
        assert text in " ".join(done.stdout.split()), text
    assert "100%" in done.stderr and "USDT" not in done.stderr

    code, stdout, stderr = iha_bench(tmp_path / "llama", *options, "--json", "--device", "cpu", "--dtype", "bfloat16")
    assert code == 0, stderr
    result = json.loads(stdout)
    assert (result["dtype"], result["device"].split(",")[0], result["batch"]) == ("bfloat16", "cpu", 2)
    assert tuple(row["what"] for row in result["measured"]) == rows
    assert all(row["llama"] > 0 and row["iha"] > 0 and row["ratio"] > 0 for row in result["measured"])


def test_both_models_are_one_set_of_weights_and_generate_what_is_asked():
    config = IHAConfig(**SIZES, num_pseudo_heads=[1, 2], use_cache=False, tie_word_embeddings=True)
    models = _models(config, torch.float32, "cpu")
    ids = torch.randint(64, (2, 9))
    with torch.no_grad():
        logits = [model.eval()(ids).logits for model in models.values()]
    assert (logits[0] - logits[1]).abs().max() < 1e-5  # the initialisation is exact
    mine = dict(models["iha"].named_parameters())
    shared = [mine[name] is parameter for name, parameter in models["llama"].named_parameters()]
    assert all(shared) and len(shared) == len(mine) - 4

    seen = []
    for model in models.values():
        model.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        _generation(model, ids, 5)
    assert seen == 2 * [9, 1, 1, 1, 1]


def test_rates_by_a_clock_that_the_models_move(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    forward = LlamaForCausalLM.forward

    def taking_time(self, *args, **kwargs):
        now[0] += 0.25 if type(self) is LlamaForCausalLM else 0.5
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", taking_time)  # which IHA's inherits
    rows = {row.what: row for row in bench(IHAConfig(**SIZES), 10, batch=3, new_tokens=3, rounds=1)}
    for what, tokens in {"prefill": 30, "decoding": 3, "training step": 30}.items():
        row = rows[what]
        assert (row.llama, row.iha, row.ratio) == (tokens / 0.25, tokens / 0.5, 0.5), what


def test_memory_is_what_is_allocated_at_once():
    def work():
        first = torch.empty(1000, dtype=torch.float64)
        del first
        second, third = torch.empty(500, dtype=torch.float64), torch.empty(2000)
        del second, third

    assert peak_bytes(work) == 12000


def test_the_llama_model_has_its_own_fields(tmp_path):
    llama = LlamaConfig(**SIZES, num_key_value_heads=2, rms_norm_eps=1e-4, architectures=["LlamaForCausalLM"])
    back = IHAConfig.from_llama(llama, num_pseudo_heads=2, sliding_window=4).to_llama()
    assert type(back) is LlamaConfig and back.to_dict() == llama.to_dict()
    config = preset("iha-2.4b")
    config.save_pretrained(tmp_path)
    fields = IHAConfig.from_pretrained(tmp_path).to_llama().to_dict()
    assert not {"num_pseudo_heads", "rope_phases", "is_causal", "sliding_window"} & fields.keys()
    assert fields["rope_parameters"] == config.rope_parameters and fields["hidden_size"] == 2560


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("model.gguf",), 1, "convert it first"),
        (("/nowhere/at/all",), 1, "/nowhere/at/all: no such folder"),
        ((".",), 1, ".: has no config.json"),
        (("iha-2.4b", "-p", "2"), 1, "must be left out"),
        (("smollm2-135m", "--device", "cudaa"), 2, "'cudaa' must be a device that PyTorch has here"),
        (("smollm2-135m", "--device", "meta"), 2, "'meta' must be a device that PyTorch has here"),
        (("smollm2-135m", "--batch", str(10**12)), 1, "cpu has too little memory"),
        (("smollm2-135m", "--new-tokens", "1"), 2, "--new-tokens"),
    ],
)
def test_refusals_name_what_is_wrong(arguments, code, message):
    found, stdout, stderr = iha_bench(*arguments)
    assert (found, stdout) == (code, "")
    assert message in " ".join(stderr.split())


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({"is_causal": False}, {}, "is_causal=False"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {}, "quantization_config"),
        ({}, {"new_tokens": 1}, "new_tokens=1 must be at least 2"),
        ({}, {"rounds": 0}, "rounds=0 must be at least 1"),
        ({}, {"device": "mps"}, "device='mps' must be one of cpu, cuda, xpu"),
    ],
)
def test_what_cannot_be_measured_is_refused(fields, arguments, message):
    with pytest.raises(ValueError, match=message):
        bench(IHAConfig(**SIZES, **fields), 8, **arguments)


def test_a_schedule_is_named(tmp_path):
    make_llama(tmp_path / "llama", num_hidden_layers=5)
    options = ("--length", 64, "--schedule", "hybrid", "--rounds", 1, "--new-tokens", 2)
    code, stdout, stderr = iha_bench(tmp_path / "llama", *options)
    assert code == 0, stderr
    assert "P = 1, 2, windows of 8; 64 tokens" in " ".join(stdout.split())


def test_another_kind_of_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    code, stdout, stderr = iha_bench(tmp_path, "--length", 64, "--schedule", "hybrid")
    assert (code, stdout) == (1, "") and "model_type='llava' is not supported" in stderr
