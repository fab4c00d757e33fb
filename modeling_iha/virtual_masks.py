"""Masks between virtual tokens, from masks between tokens."""

import torch
from torch.nn.attention.flex_attention import BlockMask

from .masks import Mask


def virtual_mask(
    mask: Mask,
    num_pseudo_heads: int,
    first_key: int | torch.Tensor = 0,
    window: int | None = None,
    is_causal: bool = True,
) -> Mask:
    """
    A virtual query sees the P virtual keys of each token that its own token sees; of its own token, where attention is
    causal, those up to itself (j <= i).

    Args:
        mask: at token level, [B or 1, heads or 1, N, K] bool (True is seen) or additive, or a BlockMask.
        num_pseudo_heads: P.
        first_key: index among the K keys of the first query's own token.
        window: W in tokens of a sliding layer, applied whether or not `mask` did; None for all tokens.
        is_causal: False where every virtual token sees all of its own token.

    Returns:
        [B or 1, heads or 1, N P, K P] of the same kind.
    """
    if num_pseudo_heads == 1 and window is None:
        return mask
    if isinstance(mask, BlockMask):
        return _virtual_block_mask(mask, num_pseudo_heads, first_key, window, is_causal)
    batch, heads, queries, keys = mask.shape
    size = num_pseudo_heads
    query = torch.arange(queries, device=mask.device)
    if window is not None:
        outside = torch.arange(keys, device=mask.device) <= query[:, None] + first_key - window
        mask = mask.masked_fill(outside, hidden(mask.dtype))
    if size == 1:
        return mask
    virtual = mask[:, :, :, None, :, None].expand(batch, heads, queries, size, keys, size)
    if is_causal:
        virtual = virtual.clone()
        own = virtual[:, :, query, :, first_key + query]  # [N, B, heads, P, P]: the indexed dimension comes first
        later = later_pseudo_heads(size, mask.device)
        virtual[:, :, query, :, first_key + query] = own.masked_fill(later, hidden(mask.dtype))
    return virtual.reshape(batch, heads, queries * size, keys * size)


def causal_mask(queries: int, keys: int, first_key: int, device: torch.device) -> torch.Tensor:
    """[1, 1, N, K] bool at token level: a query sees the keys up to its own token's."""
    query = torch.arange(queries, device=device)[:, None] + first_key
    return (torch.arange(keys, device=device) <= query)[None, None]


def as_dense(mask: BlockMask, batch: int, queries: int, keys: int) -> torch.Tensor:
    """[B, 1 or heads, N, K] bool: what a BlockMask's function says of each pair."""
    device, heads = mask.kv_indices.device, mask.shape[1]
    index = [torch.arange(size, device=device) for size in (batch, heads, queries, keys)]
    of_batch, of_heads, of_queries = index[0][:, None, None, None], index[1][:, None, None], index[2][:, None]
    return mask.mask_mod(of_batch, of_heads, of_queries, index[3]).expand(batch, heads, queries, keys)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as what is added to the logits, in `dtype`."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, hidden(dtype))


def later_pseudo_heads(num_pseudo_heads: int, device: torch.device) -> torch.Tensor:
    """[P, P] bool, True where pseudo-key j comes after pseudo-query i."""
    order = torch.arange(num_pseudo_heads, device=device)
    return order > order[:, None]


def hidden(dtype: torch.dtype) -> bool | float:
    """What a mask of this dtype holds where nothing is seen."""
    return False if dtype == torch.bool else torch.finfo(dtype).min


def _virtual_block_mask(
    mask: BlockMask, size: int, first_key: int | torch.Tensor, window: int | None, is_causal: bool
) -> BlockMask:
    """The blocks of tokens are blocks of P times as many virtual tokens: no pair of virtual tokens is looked at."""

    def mask_mod(batch, head, query, key):
        token, key_token = query // size, key // size
        seen = mask.mask_mod(batch, head, token, key_token)
        if window is not None:
            seen = seen & (key_token > token + first_key - window)
        if is_causal:
            seen = seen & ((key_token != token + first_key) | (key % size <= query % size))
        return seen

    queries, keys = mask.seq_lengths
    query_block, key_block = mask.BLOCK_SIZE
    some, whole = _dense(mask.kv_num_blocks, mask.kv_indices), None
    if mask.full_kv_num_blocks is not None:
        whole = _dense(mask.full_kv_num_blocks, mask.full_kv_indices)
        # A block that was whole is so no more where it holds pairs that are hidden now: own tokens, the window's edge.
        first_query = torch.arange(some.shape[-2], device=some.device)[:, None] * query_block + first_key
        block = torch.arange(some.shape[-1], device=some.device) * key_block
        cut = torch.zeros_like(whole[0, 0])
        if is_causal and size > 1:
            cut |= (block < first_query + query_block) & (block + key_block > first_query)
        if window is not None:
            cut |= block <= first_query + query_block - 1 - window
        some, whole = some | (whole & cut), whole & ~cut
    return BlockMask.from_kv_blocks(
        *_ordered(some),
        *((None, None) if whole is None else _ordered(whole)),
        BLOCK_SIZE=(query_block * size, key_block * size),
        mask_mod=mask_mod,
        seq_lengths=(queries * size, keys * size),
    )


def _dense(num_blocks: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[B, heads, query blocks, key blocks] bool, from the key blocks listed for each query block."""
    return BlockMask.from_kv_blocks(num_blocks, indices).to_dense().bool()


def _ordered(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse of `_dense`."""
    return dense.sum(-1, dtype=torch.int32), dense.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
