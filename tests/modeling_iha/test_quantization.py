"""Quantisation at load, on the CPU: the projections are quantised, the mixing tensors stay as they are."""

import logging

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from models import smollm2_as_iha
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitNetQuantConfig, BitsAndBytesConfig, LlamaConfig
from transformers.integrations.bitnet import AutoBitLinear, pack_weights

from conversion_iha import convert

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a warning per product

# In float64 the two models meet the same steps of int8 activations; 4 bits are for float32 at most.
METHODS = {
    "int8": (BitsAndBytesConfig(load_in_8bit=True), Linear8bitLt, torch.float64),
    "nf4": (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
        Linear4bit,
        torch.float32,
    ),
    "bitnet": (
        BitNetQuantConfig(linear_class="autobitlinear", quantization_mode="online"),
        AutoBitLinear,
        torch.float64,
    ),
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
MIXING = ("mixer.q_mix", "mixer.k_mix", "mixer.v_mix", "collapse.weight")


@pytest.fixture(autouse=True)
def without_a_compiler():
    """BitNet's functions are compiled at their first call, which takes longer than all else here."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory):
    destination = tmp_path_factory.mktemp("quantization") / "iha"
    convert(smollm2, destination, link=True)
    return destination


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    return request.param


@pytest.fixture(scope="module")
def models(method, smollm2, folder):
    """Llama and IHA, each quantised as it was loaded."""
    return load(smollm2, method), load(folder, method)


def load(folder, method):
    quantization, _, dtype = METHODS[method]
    if not isinstance(quantization, BitNetQuantConfig):
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=dtype).eval()
    config = AutoConfig.from_pretrained(folder)  # where BitNet's settings must come from
    config.quantization_config = quantization.to_dict()
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()


def projections(model):
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


def mixing_tensors(model):
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith(MIXING)}


@torch.no_grad()
def largest_difference(first, second, prompts):
    """Of logits, relative to the largest; in training mode, where bitsandbytes has no bfloat16 kernel of its own."""
    kept = prompts["attention_mask"].bool()
    first, second = (model.train()(**prompts).logits[kept] for model in (first, second))
    return float((first - second).abs().max() / first.abs().max())


def test_projections_are_quantised_as_llamas_and_mixing_tensors_are_not(models, folder, method):
    llama, iha = models
    _, linear_class, dtype = METHODS[method]
    assert len(projections(iha)) == 7 * 30
    assert all(type(module) is linear_class for module in projections(iha).values())
    if method != "bitnet":  # whose weights become ternary in every forward
        assert all(module.weight.dtype in (torch.int8, torch.uint8) for module in projections(iha).values())
    tensors = iha.state_dict()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in llama.state_dict().items())
    written = load_file(folder / "model-mixing.safetensors")
    mixing = mixing_tensors(iha)
    assert mixing.keys() == written.keys() and len(mixing) == 4 * 30
    assert all(torch.equal(tensor, written[name].to(dtype)) for name, tensor in mixing.items())


def test_a_converted_model_stays_llamas_when_both_are_quantised(models, prompts, method):
    llama, iha = models
    assert largest_difference(llama, iha, prompts) <= TOLERANCE[METHODS[method][2]]


def test_quantised_models_generate(models, prompts, tokenizer, method):
    llama, iha = (model.train() for model in models)
    how = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
    assert torch.equal(iha.generate(**prompts, **how), llama.generate(**prompts, **how))
    if method != "bitnet":  # which a model must be trained for
        assert "Paris" in tokenizer.decode(iha.eval().generate(**prompts, **how)[0])


@pytest.mark.slow
def test_quantised_models_save_and_load(folder, prompts, tmp_path, method):
    model = load(folder, method)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=METHODS[method][2])
    assert all(type(module) is METHODS[method][1] for module in projections(loaded).values())
    mixing = mixing_tensors(model)
    assert all(torch.equal(tensor, mixing[name]) for name, tensor in mixing_tensors(loaded).items())
    assert largest_difference(model, loaded, prompts) <= TOLERANCE[METHODS[method][2]]


def test_a_packed_bitnet_checkpoint_loads_into_iha(smollm2, prompts, tmp_path):
    config = LlamaConfig.from_pretrained(smollm2)
    quantization = BitNetQuantConfig(linear_class="autobitlinear", quantization_mode="offline")
    config.quantization_config = quantization.to_dict()
    config.save_pretrained(tmp_path / "llama")
    tensors = load_file(smollm2 / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().mean()
        tensors[f"{name}_scale"] = scale[None]
        tensors[name] = pack_weights((tensors[name] / scale).round().clamp(-1, 1))
    save_file(tensors, tmp_path / "llama/model.safetensors", metadata={"format": "pt"})

    # Cast here: Transformers 5.24 would leave what is not packed in the dtype of the file.
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32).double()
    iha = smollm2_as_iha(tmp_path / "llama", torch.float32).double()
    for module in projections(iha).values():
        assert type(module) is AutoBitLinear
        assert set(module.weight.unique().tolist()) == {-1, 0, 1}
    assert len(mixing_tensors(iha)) == 4 * 30
    assert largest_difference(llama, iha, prompts) <= TOLERANCE[torch.float64]
