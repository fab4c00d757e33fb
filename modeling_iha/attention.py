"""IHAAttention: Llama's attention with P pseudo-heads per head (paper section 3)."""

import torch
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
    rotate_half,
)

from configuration_iha import IHAConfig

from .absorbed import absorbed_attention
from .masks import virtual_mask
from .mixing import IHACollapse, IHAMixer, mix_heads


class IHAAttention(LlamaAttention):
    """
    Mix heads into pseudo-heads, interleave them token-major as P virtual tokens per token, attend with any standard
    kernel, collapse. The cache holds what Llama's does: [B, G, N, d], before mixing.
    """

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.num_pseudo_heads = config.get_num_pseudo_heads(layer_idx)
        self.mixer = IHAMixer(self.num_pseudo_heads, config.num_attention_heads, config.num_key_value_heads)
        self.collapse = IHACollapse(self.num_pseudo_heads, config.num_attention_heads)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, ...],
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states: [B, N, hidden_size].
            position_embeddings: (cos, sin[, offset_cos, offset_sin]) of `IHARotaryEmbedding` for this layer's P.
            attention_mask: [B or 1, heads or 1, N, K] at token level, or None for causal.
            kwargs: the cache, as `cache` or `past_key_values`; the rest goes to the attention function.

        Returns:
            Output [B, N, hidden_size], and with eager attention the weights [B, H, N P, K P] of virtual tokens.
        """
        cache = _pop_cache(kwargs)
        batch, tokens, _ = hidden_states.shape
        heads_shape = (batch, tokens, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads_shape)
        key = self.k_proj(hidden_states).view(heads_shape)
        value = self.v_proj(hidden_states).view(heads_shape)
        cos, sin, *offsets = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)

        first_key = 0
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            _, key_offset = cache.get_mask_sizes(tokens, self.layer_idx)
            first_key = cache.get_query_offset(self.layer_idx) - key_offset
            key, value = cache.update(key, value, self.layer_idx)

        dropout = self.attention_dropout if self.training else 0.0
        q_mix, k_mix, v_mix = self.mixer()
        query = self._pseudo_heads(q_mix, query, offsets)
        if tokens == 1 and cache is not None:
            output, weights = absorbed_attention(
                k_mix, v_mix, query, key, value, attention_mask, first_key, self.scaling, tuple(offsets), dropout
            )
            if self.config._attn_implementation != "eager":
                weights = None
        else:
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
            output, weights = attention(
                self,
                query.transpose(1, 2),
                self._pseudo_heads(k_mix, key.transpose(1, 2), offsets).transpose(1, 2),
                self._pseudo_heads(v_mix, value.transpose(1, 2)).transpose(1, 2),
                virtual_mask(attention_mask, self.num_pseudo_heads, first_key),
                dropout=dropout,
                scaling=self.scaling,
                **kwargs,
            )
        output = self.collapse(output.reshape(heads_shape))
        return self.o_proj(output.flatten(2)), weights

    def _pseudo_heads(self, mix: torch.Tensor, heads: torch.Tensor, offsets=()) -> torch.Tensor:
        """[B, N, heads, d] -> the virtual sequence [B, N P, heads, d]; mixing already gives its order."""
        batch, tokens, count, head_dim = heads.shape
        mixed = mix_heads(mix, heads).view(batch, tokens, self.num_pseudo_heads, count, head_dim)
        if offsets:
            cos, sin = (table[:, None] for table in offsets)
            mixed = mixed * cos + rotate_half(mixed) * sin
        return mixed.flatten(1, 2)


def _pop_cache(kwargs: dict) -> Cache | None:
    """The cache, which Transformers calls `past_key_values` up to 5.23 and `cache` from 5.24 on."""
    named = [kwargs.pop(name, None) for name in ("past_key_values", "cache")]
    caches = [cache for cache in named if cache is not None]
    if any(not isinstance(cache, Cache) for cache in caches):
        raise ValueError(
            f"IHA cannot use a cache of type {type(caches[-1]).__name__}: paged caches (continuous batching) hold "
            "keys where pseudo-heads cannot reach them. Use generate() with any transformers Cache."
        )
    return caches[0] if caches else None
