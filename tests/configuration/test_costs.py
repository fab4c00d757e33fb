"""Costs from the configuration: parameters are a real model's, pairs and FLOPs are counted in plain loops."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from configuration_iha import (
    PRESETS,
    IHAConfig,
    attention_flops,
    attention_pairs,
    count_parameters,
    flop_matched_schedule,
    linear_flops,
    plain_attention,
    preset,
)
from modeling_iha import IHAForCausalLM

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PARTS = {
    "embeddings": ("embed_tokens",),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mixing": ("mixer", "collapse"),
    "mlp": ("mlp",),
    "norms": ("norm", "input_layernorm", "post_attention_layernorm"),
    "head": ("lm_head",),
}


def parameters_of_the_model(config):
    with torch.device("meta"):
        parameters = dict(IHAForCausalLM(config).named_parameters())
    counts = {
        part: sum(p.numel() for name, p in parameters.items() if set(name.split(".")) & set(modules))
        for part, modules in PARTS.items()
    }
    return {**counts, "total": sum(p.numel() for p in parameters.values())}


@pytest.mark.parametrize(
    "fields",
    [
        {"num_pseudo_heads": 1},
        {"num_pseudo_heads": 2},
        {"num_pseudo_heads": 3, "num_key_value_heads": 1},
        {"num_pseudo_heads": 2, "num_key_value_heads": 4, "head_dim": 10},
        {"num_pseudo_heads": [4, 1, 2]},
        {"num_pseudo_heads": [2, 2, 1], "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
        | {"sliding_window": 4},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=str,
)
def test_parameters_are_the_models(fields):
    config = IHAConfig(**{**SHAPE, **fields})
    assert count_parameters(config) == parameters_of_the_model(config)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_presets_are_the_models(name):
    assert count_parameters(preset(name)) == parameters_of_the_model(preset(name))


def pairs_in_loops(tokens, size, window, is_causal=True):
    """Virtual token v is pseudo-head v % P of token v // P."""
    pairs = 0
    for query in range(tokens * size):
        for key in range(tokens * size):
            apart = query // size - key // size
            seen = (key <= query and apart < window) or not is_causal
            pairs += seen
    return pairs


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 5, 9])
def test_pairs_are_those_of_plain_loops(tokens, size):
    for window in (2, 3, 5, 8, 9, 20):
        config = IHAConfig(num_hidden_layers=1, num_pseudo_heads=size, sliding_window=window)
        assert attention_pairs(config, 0, tokens) == pairs_in_loops(tokens, size, window)
    config = IHAConfig(num_hidden_layers=1, num_pseudo_heads=size)
    assert attention_pairs(config, 0, tokens) == pairs_in_loops(tokens, size, tokens)
    assert attention_pairs(config, 0, tokens) == tokens * size * (tokens * size + 1) // 2
    config = IHAConfig(num_hidden_layers=1, num_pseudo_heads=size, is_causal=False)
    assert attention_pairs(config, 0, tokens) == pairs_in_loops(tokens, size, tokens, is_causal=False)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_flops_are_what_torch_counts(size):
    """An encoder's eager attention computes every pair, and nothing but the products that are counted here."""
    tokens = 7
    config = IHAConfig(**SHAPE, num_pseudo_heads=size, is_causal=False, use_cache=False)
    model = IHAForCausalLM._from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, tokens, dtype=torch.long))
    # Transformers 5.17 makes the angles of RoPE by a product of positions and frequencies.
    rotary = counter.get_flop_counts().get("IHAForCausalLM.model.rotary_emb", {})
    counted = attention_flops(config, tokens)["total"] + linear_flops(config, tokens)["total"]
    assert counter.get_total_flops() - sum(rotary.values()) == counted


def test_flops_by_hand():
    """H 4, G 2, d 6; layer 0 with P = 2 slides over 4 of 10 tokens, layer 1 is plain."""
    config = IHAConfig(
        **{**SHAPE, "num_hidden_layers": 2},
        num_pseudo_heads=[2, 1],
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
    )
    sliding, full = attention_flops(config, 10)["layers"]
    pairs = 4 * (0 + 1 + 2 + 7 * 3) + 10 * 3
    assert sliding == {
        "scores": pairs * 4 * 6 * 4,
        "mixing": 2 * 10 * 6 * (2 * 4 * 4 + 2 * 2 * 2 * 2 + 4 * 2 * 4),
        "total": pairs * 4 * 6 * 4 + 2 * 10 * 6 * 80,
    }
    assert full == {"scores": 55 * 4 * 6 * 4, "mixing": 0, "total": 55 * 4 * 6 * 4}
    total = attention_flops(config, 10)
    assert total["total"] == total["scores"] + total["mixing"] == sliding["total"] + full["total"]
    assert linear_flops(config, 10) == {
        "projections": 2 * 10 * 2 * (24 * 24 * 2 + 24 * 12 * 2),
        "mlp": 2 * 10 * 2 * 3 * 24 * 56,
        "head": 2 * 10 * 40 * 24,
        "total": 2 * 10 * (2 * 1728 + 2 * 3 * 24 * 56 + 40 * 24),
    }


def test_plain_attention_keeps_the_rest():
    config = preset("iha-2.4b")
    plain = plain_attention(config)
    assert (plain.num_pseudo_heads, plain.sliding_window, set(plain.layer_types)) == (1, None, {"full_attention"})
    changed = {"num_pseudo_heads", "layer_types", "sliding_window"}
    assert {k: v for k, v in plain.to_dict().items() if k not in changed} == {
        k: v for k, v in config.to_dict().items() if k not in changed
    }
    assert config.num_pseudo_heads != 1
    assert count_parameters(plain)["mixing"] == 0


def test_the_schedule_matches_plain_attention():
    """The paper's claim, which the window of N / (2 P^2) makes true up to a sliding layer's first tokens."""
    config = preset("iha-2.4b", **flop_matched_schedule(25, 8192, 2), num_hidden_layers=25)
    ours, plain = (attention_flops(c, 8192)["scores"] for c in (config, plain_attention(config)))
    assert 0.9 < ours / plain < 1


@pytest.mark.parametrize("length", [0, -1, 2.5, True])
def test_a_length_that_is_none(length):
    config = preset("smollm2-135m")
    for count in (attention_flops, linear_flops):
        with pytest.raises(ValueError, match=f"sequence_length={length} must be an integer of at least 1"):
            count(config, length)
