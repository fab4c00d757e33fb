"""Decoding from the raw cache: key and value mixing absorbed into the scores and the weights."""

import torch
from transformers.models.llama.modeling_llama import rotate_half

from .virtual_masks import hidden, later_pseudo_heads

try:
    from .absorbed_triton import DTYPES, absorbed_attention_triton
except ImportError:  # without Triton, PyTorch's operations do it on GPUs too
    DTYPES = ()


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
    needs_weights: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
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
        needs_weights: False where nobody reads the weights: the kernel for GPUs does not give them.

    Returns:
        Output [B, P, H, d], and the weights [B, P, H, P, K], of pseudo-query (i, h) at pseudo-key j of token n, or
        None.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (k_mix, v_mix, query, key, value))
    if query.is_cuda and query.dtype in DTYPES and not (needs_weights or needs_grad or dropout) and _has_kernel(query):
        return absorbed_attention_triton(k_mix, v_mix, query, key, value, mask, own_key, scaling, offsets), None

    batch, size, heads, head_dim = query.shape
    groups, keys = key.shape[1:3]
    k_mix, v_mix = (_per_query(mix.to(query.dtype), size, heads) for mix in (k_mix, v_mix))  # [P H, P (j), G]

    turned = query[:, None]  # [B, 1 or P (j), P (i), H, d]
    if offsets:
        # The raw key lacks its pseudo-head's offset j: turn the query back by it instead.
        cos, sin = (table[None, :, None, None, :] for table in offsets)
        turned = turned * cos - rotate_half(turned) * sin
    turns = turned.shape[1]
    logits = turned.reshape(batch, 1, -1, head_dim) @ key.transpose(-1, -2)  # against raw keys
    logits = logits.view(batch, groups, turns, -1, keys).permute(0, 3, 2, 1, 4)  # [B, P H, 1 or P (j), G, K]
    logits = (k_mix.view(-1, turns, size // turns, groups) @ logits).mul_(scaling)
    logits = logits.view(batch, size, heads, size, keys)  # [B, P (i), H, P (j), K]

    if mask is not None:
        mask = mask[:, None]
        logits = logits.masked_fill(~mask, hidden(logits.dtype)) if mask.dtype == torch.bool else logits + mask
    own = torch.zeros(1, dtype=torch.long, device=query.device) + own_key
    unseen = later_pseudo_heads(size, query.device)[:, None, :, None]
    own_logits = logits.index_select(-1, own)
    logits.index_copy_(-1, own, torch.where(unseen, own_logits.clamp(max=hidden(logits.dtype)), own_logits))

    at_least_float32 = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.flatten(-2).softmax(-1, dtype=at_least_float32).to(query.dtype)
    weights = torch.nn.functional.dropout(logits, dropout, training=dropout > 0).view(batch, size, heads, size, keys)
    mixed = v_mix.transpose(-1, -2) @ weights.flatten(1, 2)  # [B, P H, G, K]
    output = mixed.flatten(2) @ value.flatten(1, 2)
    return output.view(batch, size, heads, head_dim), weights if needs_weights else None


def _has_kernel(query: torch.Tensor) -> bool:
    # Triton has no bfloat16 for GPUs before Ampere. Of what asks, torch.compile knows this function.
    return torch.cuda.get_device_properties(query.device).major >= 8


def _per_query(mix: torch.Tensor, size: int, heads: int) -> torch.Tensor:
    """[P, G, G] -> [P H, P, G]: for each pseudo-query, in order, the rows of its group."""
    shared = heads // mix.shape[-1]
    return mix.transpose(0, 1)[None, :, None].expand(size, -1, shared, -1, -1).flatten(0, 2)
