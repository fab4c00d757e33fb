"""Model shapes as data."""

from .configuration_iha import IHAConfig
from .schedule import flop_matched_schedule

PRESETS = {
    # The paper's from-scratch model at 8k. Its 2.4B parameters fit a two-matrix FFN; Llama's gated one makes 3.1B.
    "iha-2.4b": {
        "vocab_size": 128256,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 26,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": True,
        "rope_phases": "interleaved",
        "mixing_init": "normal",
        **flop_matched_schedule(num_hidden_layers=26, sequence_length=8192, num_pseudo_heads=2),
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}


def preset(name: str, **fields) -> IHAConfig:
    """
    The `IHAConfig` of a named shape.

    Args:
        name (`str`): a key of `PRESETS`.
        fields: fields of `IHAConfig` that replace the preset's.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} must be one of {', '.join(map(repr, PRESETS))}.")
    return IHAConfig(**{**PRESETS[name], **fields})
