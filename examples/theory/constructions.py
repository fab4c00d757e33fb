"""
The constructions of the paper's theory, as weights of this package's own attention layer. A token of these carries its
content and, one-hot, its position; there are no other positions (RoPE turns by zero) and no causality.
"""

import math

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from modeling_iha import IHAConfig
from modeling_iha.attention import IHAAttention


def linear_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """Attention without softmax: the scores are the weights."""
    return (scaling * (query @ key.transpose(-1, -2)) @ value).transpose(1, 2), None


AttentionInterface.register("linear", linear_attention)
AttentionMaskInterface.register("linear", eager_mask)


def filter_bank(matrix: torch.Tensor, content: torch.Tensor, order: int) -> tuple[torch.Tensor, IHAAttention]:
    """
    The polynomial filters [X, A X, ..., A^(k-1) X] by linear attention with H = ceil(sqrt k) heads: the query of head
    j holds A^(jH), the key of head m holds A^m.

    Args:
        matrix: A, [N, N], float64. content: X, [N, c], float64. order: k.

    Returns:
        [N, k, c], and the layer that gave it.
    """
    heads = _ceil_sqrt(order)
    powers = [torch.linalg.matrix_power(matrix, power) for power in range(heads * heads)]
    rows, columns = torch.stack(powers[::heads]), torch.stack(powers[:heads]).transpose(1, 2)
    layer = _all_pairs(rows, columns, content.shape[1], 1.0, "linear")
    return _blocks(layer, content, order), layer


def filter_bank_by_heads_alone(matrix: torch.Tensor, content: torch.Tensor, order: int) -> torch.Tensor:
    """The same with plain attention, a head for each power: [N, k, c]."""
    size, channels = content.shape
    layer = attention(order, 1, max(size, channels), channels + size, "linear")
    query, key, value = _by_head(layer)
    for head in range(order):
        query[head, :size, channels : channels + size] = torch.linalg.matrix_power(matrix, head).T
    key[:, :size, channels : channels + size] = torch.eye(size)
    value[:, :channels, :channels] = torch.eye(channels)
    return run(layer, tokens(content))[..., :channels]


def least_error_of_plain_heads(matrix: torch.Tensor, order: int, heads: int) -> float:
    """
    How far the filters stay from any `heads` attention patterns, relative: what those patterns span has that many
    dimensions, and the nearest such space to A^0 .. A^(k-1) leaves the singular values after (Eckart and Young).
    """
    powers = torch.stack([torch.linalg.matrix_power(matrix, power).flatten() for power in range(order)])
    values = torch.linalg.svdvals(powers)
    return float(values[heads:].norm() / values.norm())


def cyclic_shifts(content: torch.Tensor, sharpness: float = 1e3) -> tuple[torch.Tensor, IHAAttention]:
    """
    CPM-3's workspace, row n of which is x_n, x_(n+1), ..., x_(n+N-1), around the circle, by attention so sharp that it
    is hard, with H = ceil(sqrt N) heads: the query of head j looks jH further, the key of head m answers for m before.

    Args:
        content: [N, c], float64. sharpness: of the logit of a match; others are zero.

    Returns:
        [N, N, c], and the layer that gave it.
    """
    count, channels = content.shape
    heads = _ceil_sqrt(count)
    here = torch.eye(count, dtype=torch.float64)
    queries = torch.stack([here.roll(head * heads, dims=1) for head in range(heads)])
    keys = torch.stack([here.roll(-head, dims=1) for head in range(heads)])
    # Each pseudo-query has a match among the tokens of every pseudo-key, and takes their mean.
    layer = _all_pairs(sharpness * queries, keys, channels, heads, "sdpa")
    return _blocks(layer, content, count), layer


def patterns(layer: IHAAttention, hidden: torch.Tensor) -> torch.Tensor:
    """The P^2 attention patterns of head 0, before any softmax: [P (query), P (key), N, N]."""
    query, key = (
        torch.einsum("jm,mdc,nc->jnd", mix[:, 0], weight, _padded(layer, hidden)[0])
        for mix, weight in zip(layer.mixer()[:2], _by_head(layer)[:2], strict=True)
    )
    return torch.einsum("ind,jkd->ijnk", query, key)


def departure_from_linear(layer: IHAAttention, one: torch.Tensor, other: torch.Tensor, length: int = 5) -> float:
    """
    How far f(x + y) is from f(x) + f(y), relative, on sequences that repeat one token. Plain attention averages equal
    values there whatever its weights are, so it is linear; pseudo-keys of one token differ, and the softmax between
    them depends on it.
    """
    said = [run(layer, token.expand(1, length, -1)) for token in (one, other, one + other)]
    return float((said[2] - said[0] - said[1]).norm() / said[2].norm())


def tokens(content: torch.Tensor) -> torch.Tensor:
    """Content [N, c] and one-hot positions, as [1, N, c + N]."""
    return torch.cat([content, torch.eye(len(content)).to(content)], dim=1)[None]


def attention(heads: int, pseudo_heads: int, head_dim: int, hidden_size: int, how: str = "sdpa") -> IHAAttention:
    """
    A layer in float64, with its weights at zero, logits as they are (scale 1), and its heads as output. Its hidden
    size is the next that `heads` divides, its head size the next even one.
    """
    hidden_size, head_dim = hidden_size + -hidden_size % heads, head_dim + head_dim % 2
    shape = dict(num_attention_heads=heads, head_dim=head_dim, hidden_size=hidden_size, num_hidden_layers=1)
    config = IHAConfig(**shape, num_pseudo_heads=pseudo_heads, is_causal=False, attn_implementation=how)
    layer = IHAAttention(config, layer_idx=0).double().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.zero_()
    layer.scaling, layer.o_proj = 1.0, nn.Identity()
    return layer


def run(layer: IHAAttention, hidden: torch.Tensor) -> torch.Tensor:
    """What each head says of hidden states [1, N, up to the hidden size]: [N, H, d]."""
    cos = torch.ones(1, hidden.shape[1], layer.head_dim, dtype=torch.float64)
    said, _ = layer(_padded(layer, hidden), (cos, torch.zeros_like(cos)))
    return said.view(hidden.shape[1], -1, layer.head_dim)


def _all_pairs(queries: torch.Tensor, keys: torch.Tensor, channels: int, value_scale: float, how: str) -> IHAAttention:
    """
    Head h has a query and a key of its own, and the content as value, in channels of its own. Pseudo-query j is head
    j's query and pseudo-key m head m's key, so the P^2 patterns of each head are all pairs of the H = P heads; the
    collapse gives head h its pseudo-head h.

    Args:
        queries, keys: [H, N, N], of each head at each position.
    """
    heads, positions, _ = queries.shape
    layer = attention(heads, heads, max(positions, heads * channels), channels + positions, how)
    query, key, value = _by_head(layer)
    for weight, states in ((query, queries), (key, keys)):
        weight[:, :positions, channels : channels + positions] = states.transpose(1, 2)
    for head in range(heads):
        value[head, head * channels : (head + 1) * channels, :channels] = value_scale * torch.eye(channels)
    if heads == 1:
        return layer
    each = torch.eye(heads, dtype=torch.float64)
    for mix in layer.mixer():
        mix[:] = each[:, None]  # pseudo-head j, in every head, is head j
    layer.collapse.weight[:, :, 0] = each
    return layer


def _blocks(layer: IHAAttention, content: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` blocks of the heads' channels, one after another: [N, count, c]."""
    heads = layer.config.num_attention_heads
    said = run(layer, tokens(content))[..., : heads * content.shape[1]]
    return said.reshape(len(content), heads * heads, -1)[:, :count]


def _by_head(layer: IHAAttention) -> list[torch.Tensor]:
    """The weights of the three projections as [H, d, hidden size]."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    return [projection.weight.view(-1, layer.head_dim, layer.config.hidden_size) for projection in projections]


def _padded(layer: IHAAttention, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(hidden, (0, layer.config.hidden_size - hidden.shape[-1]))


def _ceil_sqrt(number: int) -> int:
    return math.isqrt(number - 1) + 1
