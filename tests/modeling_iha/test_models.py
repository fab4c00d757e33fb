"""The model classes: heads, Auto registration, saving and loading, and what a forward returns."""

import inspect
import json
import os
import subprocess

import pytest
import torch
from models import SHAPE, smollm2_as_iha, tiny_config, tiny_model, tokens
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation import GenerationMixin
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

import modeling_iha
from modeling_iha import IHAConfig, IHAForCausalLM, IHAModel, flop_matched_schedule, token_weights
from modeling_iha.rotary import IHARotaryEmbedding

HEADS = {
    AutoModel: modeling_iha.IHAModel,
    AutoModelForCausalLM: modeling_iha.IHAForCausalLM,
    AutoModelForSequenceClassification: modeling_iha.IHAForSequenceClassification,
    AutoModelForTokenClassification: modeling_iha.IHAForTokenClassification,
    AutoModelForQuestionAnswering: modeling_iha.IHAForQuestionAnswering,
}
ALL_HEADS = pytest.mark.parametrize(("auto", "model_class"), HEADS.items(), ids=[c.__name__ for c in HEADS.values()])


def same_tensors(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@ALL_HEADS
def test_auto_classes_build_save_and_load_bit_identically(auto, model_class, tmp_path):
    model = auto.from_config(tiny_config())
    assert type(model) is model_class
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is model_class
    assert same_tensors(model, loaded)


@ALL_HEADS
def test_every_head_loads_the_backbone_of_a_causal_checkpoint(auto, model_class, tmp_path):
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    backbone = loaded if auto is AutoModel else loaded.model
    assert same_tensors(model.model, backbone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_mixing_tensors_keep_their_bits_in_every_dtype(tmp_path, dtype):
    model = tiny_model(dtype=dtype)
    model.save_pretrained(tmp_path)
    assert same_tensors(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))


@pytest.mark.parametrize(
    "lost",
    ["model.layers.1.self_attn.q_proj.weight", "lm_head.weight", "model.layers.0.self_attn.mixer.k_mix"],
)
def test_a_lost_tensor_is_initialised_and_no_other_touched(tmp_path, lost):
    model = tiny_model(dtype=torch.float32, mixing_init="exact")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mixer." in name or ".collapse." in name:
                parameter.add_(0.125)  # trained away from any init
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {lost}
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]) == (name != lost)


def test_a_llama_folder_loads_straight_into_iha(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    llama = LlamaForCausalLM(config).double().eval()
    llama.save_pretrained(tmp_path)
    config = IHAConfig.from_llama(LlamaConfig.from_pretrained(tmp_path), num_pseudo_heads=[4, 2])
    model = IHAForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float64).eval()
    with torch.no_grad():
        ids = torch.arange(1, 33)[None]
        assert torch.allclose(model(ids).logits, llama(ids).logits, rtol=0, atol=1e-12)


def test_one_pseudo_head_has_llamas_parameters_and_its_numbers():
    model = tiny_model(num_pseudo_heads=[1, 2, 1])
    assert {name.split(".")[1] for name, _ in model.model.named_parameters() if ".mixer." in name} == {"1"}
    model = tiny_model(num_pseudo_heads=1, dtype=torch.float32)
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    llama.load_state_dict(model.state_dict())
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, llama(ids).logits)
    how = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(ids, **how), llama.generate(ids, **how))


def test_parameters_have_the_names_and_shapes_of_the_design():
    names = {
        name: tuple(p.shape) for name, p in tiny_model(num_pseudo_heads=3).named_parameters() if "layers.0" in name
    }
    prefix = "model.layers.0.self_attn."
    assert names[prefix + "mixer.q_mix"] == (3, 4, 4)
    assert names[prefix + "mixer.k_mix"] == names[prefix + "mixer.v_mix"] == (3, 2, 2)
    assert names[prefix + "collapse.weight"] == (4, 3, 4)
    assert GenerationMixin in IHAForCausalLM.__bases__


def test_eager_returns_the_weights_of_virtual_tokens_and_all_hidden_states():
    model = tiny_model(attention="eager", num_pseudo_heads=[2, 1, 3])
    ids = tokens(2, 5)
    with torch.no_grad():
        output = model(ids, output_attentions=True, output_hidden_states=True)
        decoded = model.generate(
            ids, max_new_tokens=2, do_sample=False, output_attentions=True, return_dict_in_generate=True
        )
    assert [tuple(w.shape) for w in output.attentions] == [(2, 4, 5 * p, 5 * p) for p in (2, 1, 3)]
    assert [tuple(w.shape) for w in decoded.attentions[1]] == [(2, 4, p, 6 * p) for p in (2, 1, 3)]
    for weights in (*output.attentions, *decoded.attentions[1]):
        assert torch.allclose(weights.sum(-1), torch.ones((), dtype=weights.dtype), atol=1e-6)
    for weights in output.attentions:
        assert not weights.triu(1).any()  # flat causality
    assert len(output.hidden_states) == 4


def test_weights_summed_to_tokens_are_llamas_at_conversion(smollm2, llama, text):
    model = smollm2_as_iha(smollm2, torch.float32)
    model.set_attn_implementation("eager")
    llama = LlamaForCausalLM.from_pretrained(smollm2, attn_implementation="eager")
    with torch.no_grad():
        ours, theirs = (each(text, output_attentions=True).attentions for each in (model, llama))
    for virtual, plain in zip(ours, theirs, strict=True):
        assert virtual.shape[-1] == 2 * plain.shape[-1]
        assert torch.allclose(token_weights(virtual, 2, pseudo_query=-1), plain, atol=1e-4)
        mean = token_weights(virtual, 2)
        assert torch.allclose(mean.sum(-1), torch.ones(()), atol=1e-5)
        assert not mean.triu(1).any()
        assert torch.allclose(mean, (token_weights(virtual, 2, 0) + token_weights(virtual, 2, 1)) / 2)
    with pytest.raises(ValueError, match="cannot be those of num_pseudo_heads=3"):
        token_weights(torch.zeros(1, 1, 4, 4), 3)


@pytest.mark.parametrize("phases", ["shared", "interleaved", "fractional"])
def test_rotation_far_out_is_the_float32_one_to_bfloat16_rounding(phases):
    positions = torch.arange(65_530, 65_542)[None]
    model = tiny_model(IHAModel, dtype=torch.float32, rope_phases=phases)
    expected = model.rotary_emb(torch.zeros(1), positions)["2"]
    loaded_in_bfloat16 = tiny_model(IHAModel, dtype=torch.bfloat16, rope_phases=phases)
    for cast in (model.to(torch.bfloat16), loaded_in_bfloat16):
        tables = cast.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), positions)["2"]
        for table, exact in zip(tables, expected, strict=True):
            assert table.dtype == torch.bfloat16
            assert torch.equal(table, exact.to(torch.bfloat16))


def test_the_papers_hybrid_schedule_trains_and_generates():
    schedule = flop_matched_schedule(num_hidden_layers=5, num_pseudo_heads=2, sequence_length=64)
    model = tiny_model(num_hidden_layers=5, dtype=torch.float32, **schedule)
    assert model.config.layer_types == ["sliding_attention"] * 4 + ["full_attention"]
    ids = tokens(2, 64)
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        full = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=False)
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), full)


def test_the_task_heads_train():
    ids = tokens(2, 6)
    labels = {
        modeling_iha.IHAForSequenceClassification: {"labels": torch.tensor([0, 1])},
        modeling_iha.IHAForTokenClassification: {"labels": torch.zeros(2, 6, dtype=torch.long)},
        modeling_iha.IHAForQuestionAnswering: {
            "start_positions": torch.tensor([1, 2]),
            "end_positions": torch.tensor([3, 4]),
        },
        modeling_iha.IHAForCausalLM: {"labels": ids},
    }
    for model_class, targets in labels.items():
        model = tiny_model(model_class, dtype=torch.float32)
        model(ids, **targets).loss.backward()
        used = [parameter for name, parameter in model.named_parameters() if "embed" not in name]
        assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in used), model_class


def test_a_cast_leaves_the_rotary_frequencies_alone():
    model = tiny_model(IHAModel, dtype=torch.float32, rope_phases="interleaved")
    frequencies = model.rotary_emb.inv_freq.clone()
    x, positions = torch.zeros(1, 1, dtype=torch.bfloat16), torch.tensor([[65_535]])
    expected = model.rotary_emb(x, positions)["2"]
    for cast in (model.bfloat16(), model.half(), model.to(torch.bfloat16)):
        assert torch.equal(cast.rotary_emb.inv_freq, frequencies)
        assert all(torch.equal(a, b) for a, b in zip(cast.rotary_emb(x, positions)["2"], expected, strict=True))


@pytest.mark.parametrize("rope_type", ["default", "yarn"])
@pytest.mark.parametrize("phases", ["interleaved", "fractional"])
def test_base_and_second_turn_make_the_phase_and_scale_once(rope_type, phases):
    rope = {"rope_type": rope_type, "rope_theta": 1e4}
    if rope_type == "yarn":
        rope |= {"factor": 4.0, "original_max_position_embeddings": 16}
    rotary = IHARotaryEmbedding(tiny_config(num_pseudo_heads=3, rope_phases=phases, rope_parameters=rope))
    cos, sin, offset_cos, offset_sin = rotary(torch.zeros(1), torch.arange(8)[None])["3"]
    for n in range(8):
        for j in range(3):
            position = 3 * n + j if phases == "interleaved" else n + j / 3
            angle = position * rotary.inv_freq.double().repeat(2)
            turned = cos[0, n] * offset_cos[j] - sin[0, n] * offset_sin[j]
            assert torch.allclose(turned.double(), angle.cos() * rotary.attention_scaling, atol=1e-6)


def test_offloaded_layers_compute_the_same(tmp_path):
    model = tiny_model(dtype=torch.float32, rope_phases="fractional")
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    offloaded = IHAForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    ).eval()
    ids = tokens(2, 7)
    with torch.no_grad():
        assert torch.equal(offloaded(ids).logits, model(ids).logits)
    how = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(offloaded.generate(ids, **how), model.generate(ids, **how))


def test_mixing_takes_the_meta_device_and_leaves_float64_alone_under_autocast():
    collapse = tiny_model().model.layers[0].self_attn.collapse
    with torch.autocast("cpu", torch.bfloat16):
        assert collapse(torch.zeros(1, 3, 8, 4, dtype=torch.float64)).dtype == torch.float64
        assert collapse.to("meta")(torch.zeros(1, 3, 8, 4, device="meta")).shape == (1, 3, 4, 4)


def test_paged_attention_is_refused_at_load():
    with pytest.raises(ValueError, match=r"attn_implementation='paged\|eager' is not supported"):
        IHAModel._from_config(tiny_config(), attn_implementation="paged|eager")


WITHOUT_THE_PACKAGE = """
import sys, importlib.util
for name in ("modeling_iha", "configuration_iha", "conversion_iha"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed, so that this would prove nothing"
import torch, transformers
folder, again = sys.argv[1:]
ids = torch.arange(1, 9)[None]
for name in ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification",
             "AutoModelForTokenClassification", "AutoModelForQuestionAnswering"):
    model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
model.save_pretrained(again)
print(model.generate(ids, max_new_tokens=8, do_sample=False).tolist())
"""


def test_a_saved_folder_works_where_the_package_is_not_installed(elsewhere, tmp_path):
    model = tiny_model(dtype=torch.float32, rope_phases="interleaved")
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    model.save_pretrained(first)
    expected = model.generate(torch.arange(1, 9)[None], max_new_tokens=8, do_sample=False).tolist()
    for source, target in ((first, second), (second, third)):  # what remote code saves is whole again
        run = subprocess.run(
            [elsewhere, "-c", WITHOUT_THE_PACKAGE, str(source), str(target)],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""},
            cwd=tmp_path,
        )
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout.splitlines()[-1]) == expected
        ours, theirs = ({p.name: p.read_bytes() for p in f.glob("*.py")} for f in (source, target))
        assert ours == theirs
    assert same_tensors(model, AutoModelForCausalLM.from_pretrained(third))
    assert AutoConfig.from_pretrained(third).auto_map == modeling_iha.bundle.AUTO_MAP


def test_forward_has_the_signature_that_transformers_reads():
    assert inspect.signature(IHAModel.forward) == inspect.signature(Qwen2Model.forward)
