"""Interleaved Head Attention (arXiv:2602.21371) for Transformers. Importing it registers the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from configuration_iha import IHAConfig, flop_matched_schedule, preset

from .attention import IHAAttention
from .modeling_iha import (
    IHAForCausalLM,
    IHAForQuestionAnswering,
    IHAForSequenceClassification,
    IHAForTokenClassification,
    IHAModel,
    IHAPreTrainedModel,
    token_weights,
)

AutoConfig.register(IHAConfig.model_type, IHAConfig, exist_ok=True)
AutoModelForCausalLM.register(IHAConfig, IHAForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(IHAConfig, IHAForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(IHAConfig, IHAForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(IHAConfig, IHAForQuestionAnswering, exist_ok=True)

__all__ = [
    "IHAAttention",
    "IHAConfig",
    "IHAForCausalLM",
    "IHAForQuestionAnswering",
    "IHAForSequenceClassification",
    "IHAForTokenClassification",
    "IHAModel",
    "IHAPreTrainedModel",
    "flop_matched_schedule",
    "preset",
    "token_weights",
]
