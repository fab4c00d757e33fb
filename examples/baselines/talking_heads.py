"""Talking-Heads Attention (Shazeer et al., arXiv:2003.02436) in Llama."""

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, LlamaConfig
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    repeat_kv,
)


def talking_heads(module, query, key, value, attention_mask, scaling: float, dropout: float = 0.0, **kwargs):
    """
    Attention whose heads share what they think of each pair of tokens, before the softmax and after it.

    Args:
        module: the `TalkingHeadsAttention`, for its two mixing tensors.
        query: [B, H, N, d]; key, value: [B, G, K, d].
        attention_mask: additive, [B or 1, 1, N, K], or None where every token sees all.
        scaling: of the logits; dropout: probability with which a mixed weight is dropped.

    Returns:
        Output [B, N, H, d], and the mixed weights [B, H, N, K], whose rows need not sum to 1.
    """
    key, value = (repeat_kv(states, module.num_key_value_groups) for states in (key, value))
    logits = torch.einsum("hm,bmnk->bhnk", module.before.weight, scaling * (query @ key.transpose(-1, -2)))
    if attention_mask is not None:  # after the mixing, which would spread what is hidden
        logits = logits + attention_mask
    weights = torch.einsum("hm,bmnk->bhnk", module.after.weight, logits.softmax(-1))
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


AttentionInterface.register("talking_heads", talking_heads)
AttentionMaskInterface.register("talking_heads", eager_mask)


class HeadMixing(nn.Module):
    """`weight` [H, H]: row h says what head h takes of each head."""

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, heads))


class TalkingHeadsAttention(LlamaAttention):
    """Llama's attention with a mixing of logits (the paper's P_l) and one of weights (P_w)."""

    def __init__(self, config: "TalkingHeadsConfig", layer_idx: int):
        super().__init__(config, layer_idx)
        self.before = HeadMixing(config.num_attention_heads)
        self.after = HeadMixing(config.num_attention_heads)


class TalkingHeadsConfig(LlamaConfig):
    """Llama's fields. Both mixings start as the identity, Llama's attention, and noise of `initializer_range`."""

    model_type = "talking_heads"


class TalkingHeadsPreTrainedModel(LlamaPreTrainedModel):
    config: TalkingHeadsConfig
    config_class = TalkingHeadsConfig

    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, HeadMixing):
            noise = self.config.initializer_range * torch.randn_like(module.weight)
            init.copy_(module.weight, torch.eye(len(noise)).to(noise) + noise)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        # Any other function would leave the mixing out without a word.
        if attn_implementation not in (None, "talking_heads"):
            raise ValueError(
                f"attn_implementation={attn_implementation!r} cannot mix heads: leave it out, or say 'talking_heads'."
            )
        return super()._check_and_adjust_attn_implementation("talking_heads", *args, **kwargs)


class TalkingHeadsModel(TalkingHeadsPreTrainedModel, LlamaModel):
    def __init__(self, config: TalkingHeadsConfig):
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = TalkingHeadsAttention(config, index)
        self.post_init()


class TalkingHeadsForCausalLM(TalkingHeadsPreTrainedModel, LlamaForCausalLM, GenerationMixin):
    def __init__(self, config: TalkingHeadsConfig):
        super(LlamaForCausalLM, self).__init__(config)  # past Llama's own, which would build a LlamaModel
        self.model = TalkingHeadsModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoModel.register(TalkingHeadsConfig, TalkingHeadsModel, exist_ok=True)
