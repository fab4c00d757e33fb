"""Attention weights of virtual tokens, told of tokens."""

import torch


def token_weights(weights: torch.Tensor, num_pseudo_heads: int, pseudo_query: int | None = None) -> torch.Tensor:
    """
    Sums the weights of virtual tokens up to tokens, for plots and interpretability.

    Args:
        weights: [B, H, N P, K P], one layer's entry of `output.attentions` (eager attention only): row n P + i is
            pseudo-query i of token n, column k P + j pseudo-key j of token k, and each row sums to 1.
        num_pseudo_heads: P of that layer, `config.get_num_pseudo_heads(layer)`.
        pseudo_query: which of the token's P queries to show; by default the mean of all. In a freshly converted model
            the collapse reads the last one only, so `pseudo_query=-1` gives Llama's own weights.

    Returns:
        [B, H, N, K]: how much of a token's attention goes to the pseudo-keys of another, all together. Rows sum to 1.

    Raises:
        ValueError: the weights are not those of P pseudo-heads.
    """
    batch, heads, queries, keys = weights.shape
    size = num_pseudo_heads
    if size < 1 or queries % size or keys % size:
        raise ValueError(f"weights of shape {list(weights.shape)} cannot be those of num_pseudo_heads={size}.")
    by_token = weights.view(batch, heads, queries // size, size, keys // size, size).sum(-1)
    return by_token.mean(3) if pseudo_query is None else by_token[:, :, :, pseudo_query]
