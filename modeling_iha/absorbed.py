"""Decoding from the raw cache: key and value mixing absorbed into the scores and the weights."""

import torch
from transformers.models.llama.modeling_llama import rotate_half

from .virtual_masks import hidden, later_pseudo_heads


def absorbed_attention(
    k_mix: torch.Tensor,
    v_mix: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    own_key: int | torch.Tensor,
    scaling: float,
    offsets: tuple[torch.Tensor, ...] = (),
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attention of one new token over a Llama-size cache. The logit of pseudo-query (i, h) and pseudo-key (j) of token n
    is the sum over m of k_mix[j, g(h), m] (q[i, h] . k[n, m]), so the scores against the raw keys are computed once
    and mixed after; likewise the weights are mixed before they meet the raw values.

    Args:
        k_mix, v_mix: [P, G, G], the layer's mixing of keys and values.
        query: [B, P, H, d], pseudo-queries of the token, turned by their whole phase.
        key: [B, G, K, d], raw keys, turned by their base phase.
        value: [B, G, K, d], raw values.
        mask: [B or 1, heads or 1, 1, K] at token level, bool or additive; None where every key is seen.
        own_key: index among the K keys of the query's own token.
        scaling: factor of the logits.
        offsets: (cos, sin), each [P, d], of the pseudo-heads' second turn; empty where there is none.
        dropout: probability with which a weight is dropped.

    Returns:
        Output [B, P, H, d], and the weights [B, H, P, K P] of the virtual keys.
    """
    batch, size, heads, head_dim = query.shape
    groups, keys = key.shape[1:3]
    k_mix = k_mix.to(query.dtype).repeat_interleave(heads // groups, dim=1)  # [P, H, G]
    v_mix = v_mix.to(query.dtype).repeat_interleave(heads // groups, dim=1)

    turned = query[:, None]  # [B, 1 or P (j), P (i), H, d]
    if offsets:
        # The raw key lacks its pseudo-head's offset j: turn the query back by it instead.
        cos, sin = (table[None, :, None, None, :] for table in offsets)
        turned = turned * cos - rotate_half(turned) * sin
    scores = turned.reshape(batch, 1, -1, head_dim) @ key.transpose(-1, -2)
    scores = scores.view(batch, groups, -1, size, heads, keys).expand(-1, -1, size, -1, -1, -1)
    logits = torch.einsum("jhm,bmjihn->bhinj", k_mix, scores) * scaling

    if mask is not None:
        mask = mask[..., None].expand(-1, -1, -1, -1, size)  # [B, heads, 1, K, P]
        logits = logits.masked_fill(~mask, hidden(logits.dtype)) if mask.dtype == torch.bool else logits + mask
    is_own = torch.arange(keys, device=query.device) == own_key
    unseen = is_own[None, :, None] & later_pseudo_heads(size, query.device)[:, None, :]  # [P (i), K, P (j)]
    logits = logits.masked_fill(unseen, hidden(logits.dtype))

    at_least_float32 = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.flatten(-2).softmax(-1, dtype=at_least_float32).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
    mixed = torch.einsum("bhinj,jhm->bihmn", weights.view(batch, heads, size, keys, size), v_mix)
    output = mixed.reshape(batch, size * heads, groups * keys) @ value.reshape(batch, groups * keys, head_dim)
    return output.view(batch, size, heads, head_dim), weights
