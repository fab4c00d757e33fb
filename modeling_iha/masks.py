"""Masks of the virtual sequence, made from Transformers' token-level masks."""

import torch


def virtual_mask(
    mask: torch.Tensor | None, num_pseudo_heads: int, first_key: int | torch.Tensor
) -> torch.Tensor | None:
    """
    The mask between virtual tokens: a virtual query sees the P virtual keys of each token that its own token sees,
    and of its own token only those that flat causality leaves (j <= i).

    Args:
        mask: [B or 1, heads or 1, N, K] at token level, bool (True is seen) or additive; None is causal (and stays
            None, which every backend reads as flat causality on the longer sequence).
        num_pseudo_heads: P.
        first_key: index among the K keys of the first query's own token.

    Returns:
        [B or 1, heads or 1, N P, K P], of the same kind, or None.
    """
    if mask is None:
        return None
    batch, heads, queries, keys = mask.shape
    size = num_pseudo_heads
    virtual = mask[:, :, :, None, :, None].expand(batch, heads, queries, size, keys, size).clone()
    query = torch.arange(queries, device=mask.device)
    later = later_pseudo_heads(size, mask.device)
    own = virtual[:, :, query, :, first_key + query]  # [N, B, heads, P, P]: the indexed dimension comes first
    virtual[:, :, query, :, first_key + query] = own.masked_fill(later, hidden(mask.dtype))
    return virtual.view(batch, heads, queries * size, keys * size)


def later_pseudo_heads(num_pseudo_heads: int, device: torch.device) -> torch.Tensor:
    """[P, P] bool, True where pseudo-key j comes after pseudo-query i."""
    return torch.ones(num_pseudo_heads, num_pseudo_heads, dtype=torch.bool, device=device).triu(1)


def hidden(dtype: torch.dtype) -> bool | float:
    """What a mask of this dtype holds where nothing is seen."""
    return False if dtype == torch.bool else torch.finfo(dtype).min
