"""The FLOPs of the baselines, counted as IHA's are: multiplications and additions of what causality lets be seen."""

from talking_heads import TalkingHeadsConfig
from transformers import DiffLlamaConfig, PreTrainedConfig

from configuration_iha import IHAConfig, attention_flops, attention_pairs, linear_flops
from configuration_iha.costs import FLOPS_PER_PRODUCT

SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPE += ("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings")


def flops_per_token(config: PreTrainedConfig, sequence_length: int, is_causal: bool = True) -> dict[str, float]:
    """
    The FLOPs of the forward of one sequence of N tokens, over N: `attention` (scores, weights times values, mixing),
    `projections`, `mlp`, `head` and their `total`. Softmax, RoPE, norms and other products of single channels
    (Exclusive Self Attention's among them) are not counted.

    Args:
        config: an `IHAConfig`, or that of Talking-Heads or of DiffLlama. Differential attention has two maps for each
            two heads, each of which meets values as wide as both: scores as Llama, weights times values twice.
        is_causal: of the configurations that do not say it themselves.
    """
    plain = config if isinstance(config, IHAConfig) else same_shape(config, is_causal)
    attention = attention_flops(plain, sequence_length)["total"]
    pairs = sum(attention_pairs(plain, layer, sequence_length) for layer in range(plain.num_hidden_layers))
    if isinstance(config, DiffLlamaConfig):
        attention += pairs * FLOPS_PER_PRODUCT * config.num_attention_heads * config.head_dim
    if isinstance(config, TalkingHeadsConfig):
        attention += pairs * 2 * FLOPS_PER_PRODUCT * config.num_attention_heads**2  # before the softmax, and after it
    linear = linear_flops(plain, sequence_length)
    parts = {"attention": attention, **{part: linear[part] for part in ("projections", "mlp", "head")}}
    return {part: count / sequence_length for part, count in {**parts, "total": sum(parts.values())}.items()}


def same_shape(config: PreTrainedConfig, is_causal: bool = True) -> IHAConfig:
    """Plain attention of this shape."""
    return IHAConfig(**{name: getattr(config, name) for name in SHAPE}, num_pseudo_heads=1, is_causal=is_causal)
