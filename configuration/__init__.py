"""Configuration of Interleaved Head Attention: the config class, presets and the FLOP-matched schedule."""

from .configuration_iha import IHAConfig
from .presets import PRESETS, preset
from .schedule import flop_matched_schedule

__all__ = ["PRESETS", "IHAConfig", "flop_matched_schedule", "preset"]
