"""IHAAttention: Llama's attention with P pseudo-heads per head (paper section 3)."""

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, rotate_half

from configuration_iha import IHAConfig

from .absorbed import absorbed_attention
from .backends import virtual_attention
from .masks import Mask
from .mixing import IHACollapse, IHAMixer, mix_heads


class IHAAttention(LlamaAttention):
    """
    Mix heads into pseudo-heads, interleave them token-major as P virtual tokens per token, attend with any standard
    kernel, collapse. The cache holds what Llama's does: [B, G, N, d], before mixing. With P = 1 a token is its own
    virtual token, and nothing is mixed or collapsed.
    """

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.num_pseudo_heads = config.get_num_pseudo_heads(layer_idx)
        self.is_causal = config.is_causal
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        if self.num_pseudo_heads > 1:
            self.mixer = IHAMixer(self.num_pseudo_heads, config.num_attention_heads, config.num_key_value_heads)
            self.collapse = IHACollapse(self.num_pseudo_heads, config.num_attention_heads)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, ...],
        attention_mask: Mask = None,
        position_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states: [B, N, hidden_size].
            position_embeddings: (cos, sin[, offset_cos, offset_sin]) of `IHARotaryEmbedding` for this layer's P.
            attention_mask: between tokens, one of those that `token_masks` gives.
            position_ids: not used: the two above say where tokens are and what they see.
            kwargs: the cache, as `cache` or `past_key_values`; the rest goes to the attention function.

        Returns:
            Output [B, N, hidden_size], and with eager attention the weights [B, H, N P, K P] between virtual tokens:
            row n P + i is pseudo-query i of token n, column k P + j is pseudo-key j of token k, and a row sums to 1.
        """
        cache = pop_cache(kwargs)
        is_paged = isinstance(cache, PagedAttentionCache)
        batch, tokens, _ = hidden_states.shape
        heads_shape = (batch, tokens, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads_shape)
        key = self.k_proj(hidden_states).view(heads_shape)
        value = self.v_proj(hidden_states).view(heads_shape)
        cos, sin, *offsets = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)

        key, value = key.transpose(1, 2), value.transpose(1, 2)
        query_offset = key_offset = 0  # tokens before the first query and the first key
        if is_paged:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        elif cache is not None:
            _, key_offset = cache.get_mask_sizes(tokens, self.layer_idx)
            query_offset = cache.get_query_offset(self.layer_idx)
            if isinstance(query_offset, torch.Tensor):
                query_offset = query_offset.clone()  # `update` moves a static cache's
            key, value = cache.update(key, value, self.layer_idx)
            if tokens > 1 and not torch.compiler.is_compiling():
                query_offset = int(query_offset)
        if self.is_causal and not is_paged and not isinstance(query_offset, torch.Tensor):
            key, value, attention_mask, key_offset = self._within_reach(
                key, value, attention_mask, tokens, query_offset, key_offset
            )

        dropout = self.attention_dropout if self.training else 0.0
        q_mix, k_mix, v_mix = self.mixer() if self.num_pseudo_heads > 1 else (None, None, None)
        query = self._pseudo_heads(q_mix, query, offsets)
        if tokens == 1 and self.num_pseudo_heads > 1 and isinstance(cache, Cache) and self.is_causal:
            own_key = query_offset - key_offset
            is_eager = self.config._attn_implementation == "eager"
            output, weights = absorbed_attention(
                k_mix,
                v_mix,
                query,
                key,
                value,
                attention_mask,
                own_key,
                self.scaling,
                tuple(offsets),
                dropout,
                is_eager,
            )
            weights = weights.permute(0, 2, 1, 4, 3).flatten(-2) if is_eager else None
        else:
            output, weights = virtual_attention(
                self,
                query.transpose(1, 2),
                self._pseudo_heads(k_mix, key.transpose(1, 2), offsets).transpose(1, 2),
                self._pseudo_heads(v_mix, value.transpose(1, 2)).transpose(1, 2),
                attention_mask,
                query_offset,
                key_offset,
                dropout=dropout,
                **kwargs,
            )
        if self.num_pseudo_heads > 1:
            output = self.collapse(output.reshape(heads_shape))
        return self.o_proj(output.reshape(batch, tokens, -1)), weights

    def _within_reach(self, key, value, mask, tokens: int, query_offset: int, key_offset: int):
        """The keys from the first query's window to the last query's own token: no others are mixed."""
        fits = isinstance(mask, torch.Tensor) and mask.shape[-1] == key.shape[2]
        if tokens == 1 and fits and (self.sliding_window is None or key.shape[2] <= self.sliding_window):
            return key, value, mask, key_offset  # the mask says it all, in one shape for every compiled step
        first, stop = 0, query_offset + tokens - key_offset
        if isinstance(mask, BlockMask) and mask.seq_lengths[1] != stop:
            return key, value, mask, key_offset
        if self.sliding_window is not None and not isinstance(mask, BlockMask):
            first = max(query_offset + 1 - self.sliding_window - key_offset, 0)
        if isinstance(mask, torch.Tensor):
            if mask.shape[-1] == key_offset + stop:  # of the whole row, also what a sliding cache has forgotten
                mask = mask[..., key_offset:]
            elif mask.shape[-1] != key.shape[2]:
                raise ValueError(
                    f"attention_mask has the shape {list(mask.shape)}: its last dimension must be {key_offset + stop} "
                    f"(all tokens so far) or {key.shape[2]} (those in the cache of layer {self.layer_idx})."
                )
            mask = mask[..., first:stop]
        return key[:, :, first:stop], value[:, :, first:stop], mask, key_offset + first

    def _pseudo_heads(self, mix: torch.Tensor | None, heads: torch.Tensor, offsets=()) -> torch.Tensor:
        """[B, N, heads, d] -> the virtual sequence [B, N P, heads, d]; mixing already gives its order."""
        if mix is None:
            return heads
        batch, tokens, count, head_dim = heads.shape
        mixed = mix_heads(mix, heads).view(batch, tokens, self.num_pseudo_heads, count, head_dim)
        if offsets:
            cos, sin = (table[:, None] for table in offsets)
            mixed = mixed * cos + rotate_half(mixed) * sin
        return mixed.flatten(1, 2)


def pop_cache(kwargs: dict) -> Cache | PagedAttentionCache | None:
    """The cache, which Transformers calls `past_key_values` up to 5.23 and `cache` from 5.24 on."""
    named = [kwargs.pop(name, None) for name in ("past_key_values", "cache")]
    cache = next((cache for cache in named if cache is not None), None)
    if cache is not None and not isinstance(cache, (Cache, PagedAttentionCache)):
        raise ValueError(
            f"IHA cannot use a cache of type {type(cache).__name__}: it must be a transformers Cache, or the paged "
            "one of continuous batching."
        )
    return cache
