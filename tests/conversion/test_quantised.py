"""Quantised sources, each really quantised: carried as they are, the same function, and back again."""

import logging

import pytest
import torch
from folders import TINY, edit_config, make_speaking_llama, read_tensors
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitNetQuantConfig,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.bitnet import AutoBitLinear, pack_weights

from conversion_iha import CheckpointError, convert, export, verify
from conversion_iha.exporter import how_far

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a warning per product

SHAPE = {**TINY, "hidden_size": 64, "intermediate_size": 128}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
METHODS = {
    "int8": BitsAndBytesConfig(load_in_8bit=True),
    "nf4": BitsAndBytesConfig(**NF4),
    "nf4, twice": BitsAndBytesConfig(**NF4, bnb_4bit_use_double_quant=True),
    "nf4 in float32": BitsAndBytesConfig(**NF4, bnb_4bit_quant_storage=torch.float32),
    "nf4 in bfloat16": BitsAndBytesConfig(**NF4, bnb_4bit_quant_storage=torch.bfloat16),
    "fp4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32),
    "bitnet": BitNetQuantConfig(linear_class="autobitlinear", quantization_mode="offline"),
}
# In float64 the int8 activations of both models meet the same steps; four bits are for float32 at most.
EXACT = {"int8": (torch.float64, 1e-9), "bitnet": (torch.float64, 1e-9)}


@pytest.fixture(autouse=True)
def without_a_compiler():
    """BitNet's functions are compiled at their first call, which takes longer than all else here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def make_quantised(folder, method, head=LlamaForCausalLM, config_class=LlamaConfig):
    torch.manual_seed(0)
    plain = head(config_class(**SHAPE))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    plain.save_pretrained(folder / "plain")
    if method != "bitnet":
        model = head.from_pretrained(folder / "plain", quantization_config=METHODS[method], dtype=torch.float32)
        model.save_pretrained(folder / "quantised")
        return folder / "quantised"
    plain.config.quantization_config = METHODS[method].to_dict()
    plain.config.save_pretrained(folder / "quantised")
    tensors = load_file(folder / "plain/model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().mean()
        tensors[f"{name}_scale"] = scale[None]
        tensors[name] = pack_weights((tensors[name] / scale).round().clamp(-1, 1))
    save_file(tensors, folder / "quantised/model.safetensors", metadata={"format": "pt"})
    return folder / "quantised"


@torch.no_grad()
def run(folder, dtype):
    """Logits and greedy tokens; in training mode, where bitsandbytes has no bfloat16 kernel of its own."""
    # Cast here: Transformers 5.24 would leave what is not packed in the dtype of the file.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    model = model.double() if dtype == torch.float64 else model
    ids = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return model(tokens).logits, tokens, model


def same(first, second):
    """Bytes: four bits a weight, kept as floats, are sometimes no numbers."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8))
        for name in first
    )


@pytest.mark.parametrize("method", METHODS)
def test_it_is_the_model_that_it_was(method, tmp_path):
    source = make_quantised(tmp_path, method)
    tensors = read_tensors(source)
    assert any(tensor.dtype in (torch.uint8, torch.int8) for tensor in tensors.values())
    assert convert(source, tmp_path / "iha", [2, 3]) == []
    verification = verify(source, tmp_path / "iha")  # of a quantised model the structural proof alone
    assert verification.ok and verification.tensors == len(tensors) and verification.comparisons == ()

    converted = read_tensors(tmp_path / "iha")
    mixing = {name: converted.pop(name) for name in converted.keys() - tensors.keys()}
    assert same(tensors, converted) and len(mixing) == 2 * 4
    assert all(tensor.dtype == torch.float32 for tensor in mixing.values())

    dtype, tolerance = EXACT.get(method, (torch.float32, 1e-5))
    (before, tokens, llama), (after, same_tokens, iha) = run(source, dtype), run(tmp_path / "iha", dtype)
    for model in (llama, iha):
        projection = model.model.layers[1].self_attn.q_proj
        assert type(projection) is (AutoBitLinear if method == "bitnet" else type(llama.model.layers[0].mlp.up_proj))
        assert type(projection) is not torch.nn.Linear
    assert torch.equal(tokens, same_tokens)
    assert (before - after).abs().max() <= tolerance * before.abs().max()

    assert export(tmp_path / "iha", tmp_path / "back") == []
    assert same(read_tensors(tmp_path / "back"), tensors)
    assert torch.equal(run(tmp_path / "back", dtype)[0], before)


@pytest.mark.parametrize(
    ("head", "config_class"), [(MistralForCausalLM, MistralConfig), (Qwen2ForCausalLM, Qwen2Config)]
)
def test_other_families(head, config_class, tmp_path):
    source = make_quantised(tmp_path, "nf4", head, config_class)
    assert convert(source, tmp_path / "iha") == [] and verify(source, tmp_path / "iha").ok
    (before, tokens, _), (after, same_tokens, _) = run(source, torch.float32), run(tmp_path / "iha", torch.float32)
    assert torch.equal(tokens, same_tokens) and (before - after).abs().max() <= 1e-5 * before.abs().max()


def test_what_is_not_whole_or_not_known_is_refused(tmp_path):
    source = make_quantised(tmp_path, "nf4")
    weights = source / "model.safetensors"
    tensors = load_file(weights)

    def refused(message, **changed):
        save_file(
            {**{name: tensor for name, tensor in tensors.items() if name not in changed}, **changed.get("more", {})},
            weights,
            metadata={"format": "pt"},
        )
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "iha")
        assert not (tmp_path / "iha").exists()

    first = "model.layers.0.self_attn.q_proj.weight"
    refused(f"tensor '{first}' is missing", **{first: None})
    bare = {name: None for name in tensors if name.startswith(f"{first}.")}
    refused(f"tensor '{first}' has shape .*, config.json says", **bare)
    square = {first: torch.zeros(64, 64, dtype=torch.uint8)}
    refused(f"tensor '{first}' has dtype 'U8', and no quantisation", **bare, **dict.fromkeys(square), more=square)
    half = f"{first}.absmax"
    refused(r"self_attn.q_proj.\*: weight.quant_map, weight.quant_state.bitsandbytes__nf4 stand", **{half: None})
    for name in ("model.norm.weight.absmax", "lm_head.zap", first.replace("weight", "bias"), f"{first}_scale"):
        refused(f"tensor '{name}' is not one of a Llama model's", more={name: torch.zeros(1)})
    packed = {f"{first[:-6]}qweight": torch.zeros(8, 8, dtype=torch.int32)}  # in a dtype that no other source has
    for config, method in (({"quant_method": "gptq"}, "'gptq'"), ({}, "None"), ([1], "None")):
        edit_config(source, quantization_config=config)
        unsupported = f"quant_method {method} is not supported, only bitsandbytes, bitnet. Save the model dequantised"
        refused(unsupported, **bare, **{first: None}, more=packed)
    edit_config(source, quantization_config={"load_in_4bit": True})  # all that early ones say
    save_file(tensors, weights, metadata={"format": "pt"})
    assert convert(source, tmp_path / "early") == []
    edit_config(source, quantization_config=None)
    refused(f"tensor '{first}' has shape .*, config.json says")


def test_numbers_of_a_quantised_model_are_not_compared(smollm2, tmp_path):
    source = make_speaking_llama(tmp_path / "llama", smollm2, hidden_size=64)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=METHODS["int8"])
    model.save_pretrained(source)
    convert(source, tmp_path / "iha")
    assert verify(source, tmp_path / "iha").comparisons == ()
    with pytest.raises(
        CheckpointError, match=r"quantised layers compute in a precision of their own.*leave --dtype away"
    ):
        verify(source, tmp_path / "iha", dtypes=(torch.float32,))
    with pytest.raises(
        CheckpointError, match=r"quantised layers compute in a precision of their own.*export --no-check"
    ):
        how_far(tmp_path / "iha")
