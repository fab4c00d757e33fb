"""IHAConfig: fields, refusals, the way from Llama, presets and the schedule."""

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, MistralConfig

from configuration_iha import PRESETS, IHAConfig, flop_matched_schedule, preset
from modeling_iha import IHAForCausalLM

BAD = [
    ({"num_pseudo_heads": 0}, "num_pseudo_heads=0 must be an integer of at least 1"),
    ({"num_pseudo_heads": "two"}, "num_pseudo_heads='two' must be"),
    ({"num_pseudo_heads": 2.0}, "num_pseudo_heads=2.0 must be"),
    ({"num_pseudo_heads": True}, "num_pseudo_heads=True must be"),
    ({"num_pseudo_heads": []}, r"num_pseudo_heads=\[\] must be"),
    ({"num_pseudo_heads": [2, 0]}, r"num_pseudo_heads=\[2, 0\] must be"),
    ({"num_pseudo_heads": [2]}, r"num_pseudo_heads=\[2\] has 1 entries: it must have one per layer"),
    ({"rope_phases": "other"}, "rope_phases='other' must be one of 'shared', 'interleaved', 'fractional'"),
    ({"mixing_init": "zeros"}, "mixing_init='zeros' must be one of 'exact', 'identity', 'normal'"),
    ({"mixing_init_std": 0}, "mixing_init_std=0 must be a number above 0"),
    ({"mixing_init_std": 17}, "mixing_init_std=17 must be a number above 0 and at most 16"),
    ({"mixing_init_std": float("nan")}, "mixing_init_std=nan must be"),
    ({"mixing_init_std": "big"}, "mixing_init_std='big' must be"),
    ({"layer_types": ["full_attention"]}, "layer_types=.* has 1 entries"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types='chunked_attention' must be one of"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=None must be an integer where"),
    ({"sliding_window": 1}, "sliding_window=1 must be None or an integer of at least 2"),
    ({"is_causal": "no"}, "is_causal='no' must be True or False"),
    ({"is_causal": False, "sliding_window": 8}, "is_causal=False needs 'full_attention' in all of layer_types"),
    ({"layer_types": "full_attention"}, "layer_types='full_attention' must be a list"),
    (
        {
            "num_pseudo_heads": [2, 1],
            "rope_phases": "interleaved",
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
        r"num_pseudo_heads=\[2, 1\] must be one number for all layers with",
    ),
    ({"sliding_window": 4.5}, "sliding_window=4.5 must be"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
    ({"hidden_size": 30, "num_attention_heads": 4}, "hidden size .30. is not a multiple"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_bad_values_name_field_value_and_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        IHAConfig(**{"num_hidden_layers": 2, **fields})


def test_layer_types_are_always_set():
    assert IHAConfig(num_hidden_layers=2).layer_types == ["full_attention"] * 2
    assert IHAConfig(num_hidden_layers=2, sliding_window=8).layer_types == ["sliding_attention"] * 2


def test_pseudo_heads_per_layer():
    config = IHAConfig(num_hidden_layers=3, num_pseudo_heads=[2, 1, 4])
    assert [config.get_num_pseudo_heads(layer) for layer in range(3)] == [2, 1, 4]
    assert IHAConfig(num_hidden_layers=3).get_num_pseudo_heads(2) == 2


def test_save_and_load(tmp_path):
    config = IHAConfig(num_hidden_layers=2, num_pseudo_heads=[3, 1], rope_phases="fractional", mixing_init="identity")
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is IHAConfig
    ours, theirs = ({**each.to_dict(), "_name_or_path": None} for each in (config, loaded))
    assert ours == theirs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_phases": "sharde"}, "rope_phases='sharde' must be one of"),
        ({"num_pseudo_heads": 0}, "num_pseudo_heads=0 must be"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window=None must be an integer"),
        ({"sliding_window": 4}, "sliding_window=4 must be None where layer_types has no 'sliding_attention'"),
        ({"mixing_init": "bogus"}, "mixing_init='bogus' must be one of"),
        ({"num_hidden_layers": 4}, "layer_types=.* has 2 entries: it must have one per layer, num_hidden_layers=4"),
    ],
)
def test_fields_given_at_load_are_checked_too(fields, message, tmp_path):
    IHAConfig(num_hidden_layers=2).save_pretrained(tmp_path)

    class Child(IHAConfig):
        more: int = 0

    for load in (AutoConfig, IHAConfig, Child):
        with pytest.raises(ValueError, match=message):
            load.from_pretrained(tmp_path, **fields)


def test_fields_given_at_load_are_taken(tmp_path):
    IHAConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    config, unused = AutoConfig.from_pretrained(
        tmp_path, rope_phases="fractional", num_pseudo_heads=(3, 1), other=1, return_unused_kwargs=True
    )
    assert (config.rope_phases, config.num_pseudo_heads, unused) == ("fractional", [3, 1], {"other": 1})


def test_from_llama_wants_a_configuration():
    with pytest.raises(TypeError, match="llama_config='a folder' must be a LlamaConfig"):
        IHAConfig.from_llama("a folder")


def test_from_llama_keeps_every_field():
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
    llama = LlamaConfig(
        num_hidden_layers=2,
        head_dim=96,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=rope,
        max_position_embeddings=4096,
        architectures=["LlamaForSequenceClassification"],
        num_labels=5,
        dtype="bfloat16",
        a_field_of_the_users="kept",
    )
    config = IHAConfig.from_llama(llama, num_pseudo_heads=3, rope_phases="fractional")
    assert config.architectures == ["IHAForSequenceClassification"]
    assert (config.model_type, config.num_pseudo_heads, config.rope_phases) == ("iha", 3, "fractional")
    expected = {key: value for key, value in llama.to_dict().items() if key not in ("model_type", "architectures")}
    assert {key: config.to_dict().get(key) for key in expected} == expected


def test_from_llama_drops_windows_that_llama_ignores():
    llama = LlamaConfig(num_hidden_layers=2, sliding_window=16)
    config = IHAConfig.from_llama(llama)
    assert config.sliding_window is None
    assert config.layer_types == ["full_attention"] * 2


def test_from_llama_refuses_other_models():
    with pytest.raises(ValueError, match="model_type='mistral' is not supported"):
        IHAConfig.from_llama(MistralConfig())


def test_schedule_is_the_papers():
    schedule = flop_matched_schedule(num_hidden_layers=7, sequence_length=8192, num_pseudo_heads=2)
    assert schedule == {
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"] * 2,
        "sliding_window": 1024,
        "num_pseudo_heads": [2, 2, 2, 2, 1, 2, 2],
    }
    config = IHAConfig(num_hidden_layers=7, **schedule)
    # FLOP-matched: a sliding layer has N P x W P pairs, a causal plain layer N^2 / 2.
    assert 8192 * 2 * config.sliding_window * 2 == 8192**2 // 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 7, 2), "sequence_length=7 must be at least 4 P.2 = 16"),
        ((0, 64, 2), "num_hidden_layers=0 must be at least 1"),
        ((2, 64, 0), "num_pseudo_heads=0 must be at least 1"),
    ],
)
def test_schedule_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        flop_matched_schedule(*arguments)


# Parameters without mixing tensors, counted by hand from the shapes (tied embeddings once).
PLAIN_PARAMETERS = {"iha-2.4b": 3_054_768_640, "smollm2-135m": 134_515_008, "llama-3.1-8b": 8_030_261_248}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build_models_of_the_known_size(name):
    config = preset(name)
    with torch.device("meta"):
        model = IHAForCausalLM(config)
    mixing = sum(p.numel() for n, p in model.named_parameters() if ".mixer." in n or ".collapse." in n)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    sizes = [config.get_num_pseudo_heads(layer) for layer in range(config.num_hidden_layers)]
    assert mixing == sum(2 * size * (heads**2 + groups**2) for size in sizes if size > 1)
    assert sum(p.numel() for p in model.parameters()) - mixing == PLAIN_PARAMETERS[name]


def test_preset_takes_fields_and_refuses_unknown_names():
    assert preset("smollm2-135m", num_pseudo_heads=4).num_pseudo_heads == 4
    with pytest.raises(ValueError, match=r"preset 'gpt' must be one of 'iha-2\.4b'"):
        preset("gpt")
