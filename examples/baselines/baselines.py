"""The models that IHA is compared with, all of one shape but for the MLP, as wide as equal FLOPs leave it."""

from collections.abc import Callable
from dataclasses import dataclass

from exclusive import ExclusiveIHAConfig, ExclusiveIHAForCausalLM
from flops import SHAPE, flops_per_token
from talking_heads import TalkingHeadsConfig, TalkingHeadsForCausalLM
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from configuration_iha import IHAConfig, flop_matched_schedule
from configuration_iha.schedule import SLIDING_LAYERS_PER_GLOBAL
from modeling_iha import IHAForCausalLM

WINDOW = 512  # tokens, of Global+Local
STEP = 8  # the MLP's width is a multiple of it


@dataclass(frozen=True)
class Baseline:
    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    fields: Callable[[int, int, int], dict]  # of layers, sequence length and P


def local_and_global(layers: int, length: int, size: int) -> dict:
    is_global = [layer % (SLIDING_LAYERS_PER_GLOBAL + 1) == SLIDING_LAYERS_PER_GLOBAL for layer in range(layers)]
    return {
        "num_pseudo_heads": 1,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention" if full else "sliding_attention" for full in is_global],
    }


def hybrid(layers: int, length: int, size: int) -> dict:
    return FROM_SCRATCH | flop_matched_schedule(layers, length, size)


def everywhere(layers: int, length: int, size: int) -> dict:
    return FROM_SCRATCH | {"num_pseudo_heads": size}


FROM_SCRATCH = {"rope_phases": "interleaved", "mixing_init": "normal"}  # the paper's

BASELINES = {
    "Global": Baseline(IHAConfig, IHAForCausalLM, lambda *_: {"num_pseudo_heads": 1}),
    "Global+Local": Baseline(IHAConfig, IHAForCausalLM, local_and_global),
    "IHA hybrid": Baseline(IHAConfig, IHAForCausalLM, hybrid),
    "IHA global": Baseline(IHAConfig, IHAForCausalLM, everywhere),
    "Differential": Baseline(DiffLlamaConfig, DiffLlamaForCausalLM, lambda *_: {}),
    "Talking-Heads": Baseline(TalkingHeadsConfig, TalkingHeadsForCausalLM, lambda *_: {}),
    "IHA hybrid + ESA": Baseline(ExclusiveIHAConfig, ExclusiveIHAForCausalLM, hybrid),
}


def configuration(name: str, shape: IHAConfig, sequence_length: int, num_pseudo_heads: int = 2) -> PreTrainedConfig:
    """
    The configuration of one of `BASELINES`, with the FLOPs of plain attention.

    Args:
        shape: gives the sizes, the vocabulary, RoPE, and with its intermediate size the FLOPs of Global.
        sequence_length: N in tokens, for which the FLOPs are equal.
        num_pseudo_heads: P of the layers that have pseudo-heads.

    Raises:
        ValueError: the name is unknown, attention alone takes more FLOPs than Global has, or a field is not allowed.
    """
    if name not in BASELINES:
        raise ValueError(f"baseline {name!r} must be one of {', '.join(map(repr, BASELINES))}.")
    if BASELINES[name].config_class is DiffLlamaConfig and shape.num_key_value_heads % 2:
        raise ValueError(f"num_key_value_heads={shape.num_key_value_heads} must be even: {name} takes them in pairs.")

    def build(baseline: str, intermediate_size: int) -> PreTrainedConfig:
        fields = {field: getattr(shape, field) for field in (*SHAPE, "rope_parameters", "rms_norm_eps")}
        fields |= {field: getattr(shape, field) for field in ("bos_token_id", "eos_token_id", "pad_token_id")}
        fields |= BASELINES[baseline].fields(shape.num_hidden_layers, sequence_length, num_pseudo_heads)
        return BASELINES[baseline].config_class(**{**fields, "intermediate_size": intermediate_size})

    target = flops_per_token(build("Global", shape.intermediate_size), sequence_length)["total"]
    narrowest = flops_per_token(build(name, STEP), sequence_length)
    rest = target - (narrowest["total"] - narrowest["mlp"])
    width = STEP * round(rest / narrowest["mlp"])
    if width < STEP:
        raise ValueError(
            f"{name} with {sequence_length} tokens takes {(target - rest) / target:.2f} times the FLOPs of Global "
            "without any MLP: give a smaller sequence_length or num_pseudo_heads, or a shape with a wider MLP."
        )
    return build(name, width)
