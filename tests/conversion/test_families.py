"""Checkpoints of each family, with random weights: the same function after conversion, or a refusal that says why."""

import pytest
import torch
from folders import TINY, edit_config, make_speaking_llama
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    Qwen3ForCausalLM,
)

from conversion_iha import CheckpointError, convert, export, verify


def rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


NINE_HEADS = {"hidden_size": 36, "num_attention_heads": 9}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}  # so that these short rows feel it
SHAPES = {  # what tells them apart, at a small width
    "Llama-2-7B": (LlamaForCausalLM, {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "head_dim": 8}),
    "Llama-3-8B": (LlamaForCausalLM, {"num_key_value_heads": 1, "rope_parameters": rope(5e5)}),
    "Llama-3.1-8B": (LlamaForCausalLM, {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "Llama-3.2-1B": (LlamaForCausalLM, {"tie_word_embeddings": True, "rope_parameters": {**LLAMA3, "factor": 32.0}}),
    "TinyLlama-1.1B": (LlamaForCausalLM, {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "SmolLM2-135M": (LlamaForCausalLM, {"num_key_value_heads": 3, "tie_word_embeddings": True, **NINE_HEADS}),
    "Yi-6B": (LlamaForCausalLM, {"num_attention_heads": 8, "rope_parameters": rope(5e6)}),
    "Mistral-7B-v0.1": (MistralForCausalLM, {"sliding_window": 7}),
    "Mistral-7B-v0.3": (MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "Qwen2.5-0.5B": (Qwen2ForCausalLM, {"tie_word_embeddings": True, "rope_parameters": rope(1e6)}),
    "Qwen2, windows": (Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
}


def make(folder, head, **fields):
    """A tiny model as `save_pretrained` writes it, its biases not zero."""
    torch.manual_seed(0)
    model = head(head.config_class(**{**TINY, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    ids = torch.randint(1, 64, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    cached = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    return torch.cat(
        [model(ids, attention_mask=mask).logits[mask > 0], model(cached).logits[:, -12:].flatten(0, 1)]
    ), cached


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_model_that_it_was(name, tmp_path):
    head, fields = SHAPES[name]
    source = make(tmp_path / "source", head, **fields)
    assert convert(source, tmp_path / "iha", [2, 3]) == []
    (before, tokens), (after, same_tokens) = logits(source), logits(tmp_path / "iha")
    assert torch.equal(tokens, same_tokens)
    assert (before - after).abs().max() < 1e-6 * before.abs().max()
    verification = verify(source, tmp_path / "iha", dtypes=())
    assert verification.ok, verification.reasons


def test_a_bias_that_the_source_lacks_must_stay_zero(tmp_path):
    source = make(tmp_path / "qwen", Qwen2ForCausalLM)
    convert(source, tmp_path / "iha")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "iha")
    bias = model.model.layers[1].self_attn.o_proj.bias
    assert not bias.any()
    with torch.no_grad():
        bias[3] = 1e-8
    model.save_pretrained(tmp_path / "changed")
    reasons = verify(source, tmp_path / "changed", dtypes=()).reasons
    assert reasons == ("model.layers.1.self_attn.o_proj.bias: not zero, and the source has no such bias",)


def test_windows_must_be_the_sources(tmp_path):
    source = make(tmp_path / "mistral", MistralForCausalLM, sliding_window=7)
    convert(source, tmp_path / "iha")
    assert verify(source, tmp_path / "iha", dtypes=()).ok
    edit_config(tmp_path / "iha", sliding_window=8)
    assert "does not see all that the source's sees" in " ".join(verify(source, tmp_path / "iha", dtypes=()).reasons)
    with pytest.raises(ValueError, match=r"hybrid_length=64 must be left out: .* has windows of its own"):
        convert(source, tmp_path / "hybrid", hybrid_length=64)


def test_what_a_config_leaves_out_is_what_its_family_takes(tmp_path):
    """Mistral's own default is a window of 4096 tokens."""
    source = make(tmp_path / "mistral", MistralForCausalLM, sliding_window=None)
    convert(source, tmp_path / "without")
    edit_config(source, architectures=["MistralForCausalLM"])
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(
        config.replace('"sliding_window": null,', "").replace(', "sliding_window": null', "")
    )
    convert(source, tmp_path / "with")
    sizes = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name).config.sliding_window for name in ("without", "with")
    ]
    assert sizes == [None, 4096]


@pytest.mark.parametrize(("head", "fields"), [(Qwen2Model, {}), (Qwen2ForSequenceClassification, {"num_labels": 3})])
def test_other_heads(head, fields, tmp_path):
    source = make(tmp_path / "source", head, **fields)
    assert convert(source, tmp_path / "iha") == [] and verify(source, tmp_path / "iha", dtypes=()).ok
    assert export(tmp_path / "iha", tmp_path / "llama") == []  # with a bias of zeros


def test_a_family_that_iha_cannot_compute_is_refused_with_the_reason(tmp_path):
    source = make(tmp_path / "qwen3", Qwen3ForCausalLM)
    with pytest.raises(CheckpointError, match=r"'qwen3'; only 'llama', 'mistral', 'qwen2' become IHA: .*are normed"):
        convert(source, tmp_path / "iha")
    bidirectional = make(tmp_path / "qwen2", Qwen2ForCausalLM, is_causal=False)
    with pytest.raises(CheckpointError, match="'is_causal' is false"):
        convert(bidirectional, tmp_path / "iha")
    edit_config(source, model_type="gpt2")
    with pytest.raises(CheckpointError, match=r"'gpt2'; only 'llama', 'mistral', 'qwen2' become IHA\."):
        convert(source, tmp_path / "iha")
    assert not (tmp_path / "iha").exists()


@pytest.mark.slow
def test_both_run_on_prompts(smollm2, tmp_path):
    source = make(tmp_path / "qwen", Qwen2ForCausalLM, vocab_size=49152)
    make_speaking_llama(tmp_path / "llama", smollm2)
    for path in (tmp_path / "llama").glob("tokenizer*"):
        (source / path.name).write_bytes(path.read_bytes())
    convert(source, tmp_path / "iha")
    verification = verify(source, tmp_path / "iha", (torch.float64,), new_tokens=8)
    assert verification.ok and verification.comparisons[0].max_difference < 1e-9
