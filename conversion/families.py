"""Checkpoints of other families whose function is a Llama model's, read as one; what IHA cannot compute is refused."""

from collections.abc import Callable
from dataclasses import replace

from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from .checkpoint import Checkpoint, CheckpointError, build_config

NORMED = "the queries and keys of its heads are normed (q_norm, k_norm), which IHA's layers do not do"
REFUSED = {"qwen3": NORMED, "olmo2": NORMED, "gemma3_text": NORMED, "mixtral": "its layers choose among experts"}


def as_llama(checkpoint: Checkpoint) -> Checkpoint:
    """
    The checkpoint with a Llama model's config.json, the windows of its layers, and the names of tensors that a Llama
    model of its function has and it lacks, all zero. A Llama checkpoint stays as it is.

    Raises:
        CheckpointError: the family is not known, or its function is not a Llama model's.
    """
    family = checkpoint.config.get("model_type")
    if family == "llama":
        return checkpoint
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(map(repr, ["llama", *FAMILIES]))
        reason = f": {REFUSED[family]}" if str(family) in REFUSED else ""
        raise CheckpointError(f"config.json: model_type {family!r}; only {known} become IHA{reason}.")
    config_class, read = FAMILIES[family]
    config = build_config(checkpoint, config_class)
    fields, zeros = read(config)
    # Through the family's own class, whose defaults stand for what config.json leaves out.
    known = {*LlamaConfig().to_dict(), "quantization_config"}
    ours = {name: value for name, value in config.to_dict().items() if name in known}
    architectures = [
        name.replace(config_class.__name__.removesuffix("Config"), "Llama", 1) for name in config.architectures or []
    ]
    windows = {"layer_types": _layer_types(config), "sliding_window": config.sliding_window}
    return replace(
        checkpoint,
        config={**ours, **fields, "model_type": "llama", "architectures": architectures or None},
        windows=windows if "sliding_attention" in windows["layer_types"] else {},
        zeros=tuple(zeros),
    )


def _layer_types(config: PreTrainedConfig) -> list[str]:
    if getattr(config, "layer_types", None) is not None:
        return config.layer_types
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return [kind] * config.num_hidden_layers


def _mistral(config: MistralConfig) -> tuple[dict, list[str]]:
    return {}, []


def _qwen2(config: Qwen2Config) -> tuple[dict, list[str]]:
    """Biases at the projections of queries, keys and values; Llama's layers have one at the output too."""
    prefix = "" if config.architectures == ["Qwen2Model"] else "model."
    zeros = [f"{prefix}layers.{layer}.self_attn.o_proj.bias" for layer in range(config.num_hidden_layers)]
    return {"attention_bias": True}, zeros


FAMILIES: dict[str, tuple[type[PreTrainedConfig], Callable]] = {
    "mistral": (MistralConfig, _mistral),
    "qwen2": (Qwen2Config, _qwen2),
}
