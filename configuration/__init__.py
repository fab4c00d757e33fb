"""Configuration of Interleaved Head Attention: the config class, presets, the FLOP-matched schedule, and costs."""

from .configuration_iha import IHAConfig
from .costs import attention_flops, attention_pairs, count_parameters, linear_flops, plain_attention
from .presets import PRESETS, preset
from .schedule import flop_matched_schedule

__all__ = [
    "PRESETS",
    "IHAConfig",
    "attention_flops",
    "attention_pairs",
    "count_parameters",
    "flop_matched_schedule",
    "linear_flops",
    "plain_attention",
    "preset",
]
