"""What export() writes: the Llama checkpoint that a conversion began with, or nothing and the reasons."""

import filecmp
import json

import pytest
import torch
from folders import (
    INDEX,
    SHARDED,
    SIDE_FILES,
    WEIGHTS,
    edit_config,
    make_llama,
    make_speaking_llama,
    read_tensors,
    shard_names,
    snapshot,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)
from typer.testing import CliRunner

import modeling_iha
from conversion_iha import CheckpointError, convert, export, verify
from conversion_iha.cli import app
from modeling_iha import IHAForCausalLM

CASES = [
    (LlamaForCausalLM, "1GB", torch.float32, 2, {}),
    (LlamaForCausalLM, SHARDED, torch.bfloat16, 3, {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    (LlamaForCausalLM, "20KB", torch.float16, [1, 2], {"attention_bias": True, "head_dim": 16}),
    (LlamaForCausalLM, SHARDED, torch.float32, 1, {}),
    (LlamaModel, "1GB", torch.float64, 2, {}),
    (LlamaForSequenceClassification, "20KB", torch.float32, 2, {"num_labels": 3}),
    (LlamaForTokenClassification, "1GB", torch.float32, 2, {"num_labels": 3}),
]


def say(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in ("export", *arguments)])


@pytest.mark.parametrize(("head", "max_shard_size", "dtype", "num_pseudo_heads", "fields"), CASES)
def test_there_and_back(head, max_shard_size, dtype, num_pseudo_heads, fields, tmp_path):
    llama = make_llama(tmp_path / "llama", head, dtype, max_shard_size, **fields)
    convert(llama, tmp_path / "iha", num_pseudo_heads)
    before = snapshot(tmp_path / "iha")
    assert export(tmp_path / "iha", tmp_path / "back") == []
    assert snapshot(tmp_path / "iha") == before

    back = tmp_path / "back"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "iha", "llama"]
    weights = [WEIGHTS] if (llama / WEIGHTS).exists() else [INDEX, *shard_names(llama)]
    expected = {*weights, "config.json", *SIDE_FILES, "generation_config.json"}
    assert {path.relative_to(back).as_posix() for path in back.rglob("*") if path.is_file()} == {
        name for name in expected if (llama / name).exists()
    }
    for name in (set(weights) - {INDEX}) | SIDE_FILES.keys():
        assert filecmp.cmp(llama / name, back / name, shallow=False), name
    configs = [head.config_class.from_pretrained(folder).to_dict() for folder in (llama, back)]
    assert configs[0] == configs[1]
    assert verify(back, tmp_path / "iha", dtypes=()).ok
    report = head.from_pretrained(back, output_loading_info=True)[1]
    assert not any(report.values()), report


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_files_in_which_mixing_stands_beside_weights(max_shard_size, tmp_path):
    """As `save_pretrained` writes them."""
    llama = make_llama(tmp_path / "llama", dtype=torch.bfloat16)
    convert(llama, tmp_path / "iha")
    model = IHAForCausalLM.from_pretrained(tmp_path / "iha", dtype="auto")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)  # trained, but not its mixing
    model.save_pretrained(tmp_path / "saved", max_shard_size=max_shard_size)
    assert export(tmp_path / "saved", tmp_path / "back") == []

    expected = read_tensors(llama)
    expected["model.layers.1.mlp.up_proj.weight"] *= 2
    found = read_tensors(tmp_path / "back")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    ids = torch.arange(12)[None]
    for dtype in (torch.float64, torch.float32):
        models = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype) for name in ("saved", "back"))
        logits = [model(ids).logits for model in models]
        assert (logits[0] - logits[1]).abs().max() < (1e-6 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("head", [LlamaModel, LlamaForSequenceClassification])
def test_nothing_to_carry(head, link, tmp_path):
    """Mixing stands in the only file, and nothing beside it."""
    llama = make_llama(tmp_path / "llama", head)
    convert(llama, tmp_path / "iha")
    architecture = head.__name__.replace("Llama", "IHA")
    getattr(modeling_iha, architecture).from_pretrained(tmp_path / "iha").save_pretrained(tmp_path / "saved")
    assert export(tmp_path / "saved", tmp_path / "back", link=link) == []
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["config.json", WEIGHTS]
    expected, found = read_tensors(llama), read_tensors(tmp_path / "back")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    convert(make_llama(tmp_path / "llama"), tmp_path / "iha")
    IHAForCausalLM.from_pretrained(tmp_path / "iha").save_pretrained(tmp_path / "saved")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 9000}))
    with pytest.raises(CheckpointError, match=r"GB are needed and 0\.00 GB are free"):
        export(tmp_path / "saved", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iha", "llama", "saved"]


def test_a_function_that_is_no_llama_models_is_not_written(smollm2, tmp_path):
    llama = make_speaking_llama(tmp_path / "llama", smollm2)
    convert(llama, tmp_path / "iha")
    model = IHAForCausalLM.from_pretrained(tmp_path / "iha")
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.collapse.weight[0, 0, 1] = 0.25
        attention.mixer.v_mix[0, 1, 0] += 0.5
    model.save_pretrained(tmp_path / "trained")
    for path in llama.glob("tokenizer*"):
        (tmp_path / "trained" / path.name).write_bytes(path.read_bytes())

    reasons = export(tmp_path / "trained", tmp_path / "back")
    assert [reason.split("self_attn.")[1] for reason in sorted(reasons)] == [
        "collapse.weight: it does not read the last pseudo-head alone, by up to 0.25",
        "mixer.v_mix: the mean of the pseudo-values is not the plain value, by up to 0.25",
    ]
    said = say(tmp_path / "trained", tmp_path / "back")
    assert said.exit_code == 1 and "nothing is written" in said.output and "by up to 0.25" in said.output
    assert "max difference of logits" in said.output
    told = json.loads(say(tmp_path / "trained", tmp_path / "back", "--json").stdout)
    assert told["reasons"] == reasons and told["comparison"]["max_difference"] > 1e-3
    assert (
        json.loads(say(tmp_path / "trained", tmp_path / "back", "--json", "--no-check").stdout)["comparison"] is None
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iha", "llama", "trained"]


def test_windows_and_other_phases_are_no_llamas(tmp_path):
    llama = make_llama(tmp_path / "llama")
    convert(llama, tmp_path / "hybrid", hybrid_length=64)
    assert "a sliding layer does not see all" in " ".join(export(tmp_path / "hybrid", tmp_path / "back"))
    convert(llama, tmp_path / "turned", rope_phases="interleaved")
    assert "turn the copies of a token apart" in " ".join(export(tmp_path / "turned", tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_what_is_no_iha_checkpoint_or_not_whole_is_refused(tmp_path):
    llama = make_llama(tmp_path / "llama", LlamaForSequenceClassification, num_labels=3)
    with pytest.raises(CheckpointError, match="model_type 'llama', an IHA folder has 'iha'"):
        export(llama, tmp_path / "back")
    convert(llama, tmp_path / "iha")
    convert(llama, tmp_path / "another")
    with pytest.raises(CheckpointError, match="--overwrite replaces Llama folders only"):
        export(tmp_path / "iha", tmp_path / "another", overwrite=True)
    edit_config(tmp_path / "iha", rope_phases="interleaved")
    said = say(tmp_path / "iha", tmp_path / "back")
    assert said.exit_code == 1 and "export --no-check does without" in said.output
    edit_config(tmp_path / "iha", num_pseudo_heads=3, rope_phases="shared")
    with pytest.raises(CheckpointError, match=r"q_mix' has shape \(2, 4, 4\), config.json says \(3, 4, 4\)"):
        export(tmp_path / "iha", tmp_path / "back")
    edit_config(tmp_path / "iha", num_pseudo_heads=1)
    with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn.[a-z.]*\w+' is not one of a Llama model's"):
        export(tmp_path / "iha", tmp_path / "back")
    edit_config(tmp_path / "iha", num_pseudo_heads=2, quantization_config={})
    with pytest.raises(CheckpointError, match="quantization_config: quant_method None is not supported"):
        export(tmp_path / "iha", tmp_path / "back")
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".*"))


def test_the_command_links_overwrites_and_says_how_to_verify(tmp_path):
    llama = make_llama(tmp_path / "llama")
    convert(llama, tmp_path / "iha", link=True)
    assert say(tmp_path / "iha", tmp_path / "back", "--link").exit_code == 0
    assert (tmp_path / "back" / WEIGHTS).samefile(llama / WEIGHTS)
    assert say(tmp_path / "iha", tmp_path / "back").exit_code == 1
    said = say(tmp_path / "iha", tmp_path / "back", "--overwrite")
    assert said.exit_code == 0 and f"iha verify {tmp_path / 'back'} {tmp_path / 'iha'}" in said.output
    assert not (tmp_path / "back" / WEIGHTS).samefile(llama / WEIGHTS)
