"""What IHA's attention is measured against: the plain kernel, and IHA written step by step as it is described."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from modeling_iha.virtual_masks import causal_mask, virtual_mask


def plain(query, key, value):
    """Causal attention [B, heads, length, d], grouped-query."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def einsum_iha(query, key, value, mix, collapse, tables, mask=None):
    """
    The paper's steps in its order (section 3), each a tensor of its own: heads to pseudo-heads by einsum, token-major
    by permute and reshape, RoPE on every virtual token, keys and values repeated for grouped queries, sdpa, collapse.

    Args:
        query: [B, N, H, d]; key, value: [B, N, G, d].
        mix: q_mix [P, H, H], k_mix and v_mix [P, G, G]; collapse: [H, P, H].
        tables: (cos, sin) of the virtual tokens, [1, N P, d].
        mask: [N P, N P] bool; None for is_causal.

    Returns:
        [B, N, H, d].
    """
    batch, tokens, heads, head_dim = query.shape
    states = []
    for weight, x in zip(mix, (query, key, value), strict=True):
        pseudo = torch.einsum("jhm,bnmd->bhjnd", weight, x)
        states.append(pseudo.permute(0, 1, 3, 2, 4).reshape(batch, len(weight[0]), -1, head_dim))
    query, key = apply_rotary_pos_emb(*states[:2], *tables)
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, states[2]))
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
    output = output.view(batch, heads, tokens, -1, head_dim).permute(0, 2, 3, 1, 4)
    return torch.einsum("hjm,bnjmd->bnhd", collapse, output)


def dense_mask(tokens: int, size: int) -> torch.Tensor:
    """[N P, N P] bool: flat causality."""
    return virtual_mask(causal_mask(tokens, tokens, 0, torch.device("cpu")), size)[0, 0]


class Given(nn.Module):
    """A projection whose result is there already."""

    def __init__(self, result: torch.Tensor):
        super().__init__()
        self.result = [result]

    def forward(self, _):
        return self.result[0]
