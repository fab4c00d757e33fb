"""
The virtual sequence in pieces, so that no mask of (N P)^2 is ever made: each document on its own, a window or a mask
in blocks of queries. Time and memory are those of the pairs that see each other, forward and backward.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from .masks import Piece
from .virtual_masks import additive, causal_mask, hidden, virtual_mask

SMALLEST_BLOCK = 64  # tokens; below it a call costs more than what a smaller block would save
LARGEST_MASK = 2**25  # entries of one block's mask
ALIGNMENT = 8  # tokens; masks of blocks begin and end on it, else kernels on GPUs copy each of them


class _Cut(torch.autograd.Function):
    """Views of overlapping slices. Their gradients add up in one buffer, where autograd would fill one per slice."""

    @staticmethod
    def forward(ctx, x, pieces):
        ctx.shape, ctx.pieces = x.shape, pieces
        return tuple(x[rows, :, tokens] for rows, tokens in pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        total = grads[0].new_zeros(ctx.shape)
        for (rows, tokens), grad in zip(ctx.pieces, grads, strict=True):
            total[rows, :, tokens] += grad
        return total, None


def cut(x: torch.Tensor, pieces: list[tuple[slice, slice]]) -> tuple[torch.Tensor, ...]:
    """[B, heads, length, d] -> the pieces x[rows, :, tokens], as views."""
    return _Cut.apply(x, pieces)


class _Take(torch.autograd.Function):
    """A slice, and the tensor for the next one to be taken from: `cut`, for slices that are used one after the other.
    The backward of each adds its gradient to one buffer, before that of the slice before it is there."""

    @staticmethod
    def forward(ctx, x, start, stop):
        ctx.shape, ctx.piece = x.shape, slice(start, stop)
        return x[:, :, ctx.piece], x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, total):
        if torch.compiler.is_compiling():  # which traces this with views, and makes it one buffer itself
            total = total.clone()
        total[:, :, ctx.piece] += grad
        return total, None, None


def in_pieces(attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: list[Piece], size: int):
    """
    Attention of pieces of a batch that do not see each other.

    Args:
        attend: takes, as lists over the pieces, queries [1, H, n P, d], keys and values [1, G, k P, d], and which of
            the k tokens is the first query's own; gives the outputs, each [1, n P, H, d].
        query: [B, H, N P, d]; key, value: [B, G, K P, d].
        pieces: in order, counted in tokens.
        size: P.

    Returns:
        [B, N P, H, d], zero for the tokens of no piece.
    """
    batch, heads, length, head_dim = query.shape
    if not pieces:
        return query.new_zeros(batch, length, heads, head_dim)
    at_queries = [(slice(row, row + 1), slice(start * size, stop * size)) for row, start, stop, _, _ in pieces]
    at_keys = [(slice(row, row + 1), slice(start * size, stop * size)) for row, _, _, start, stop in pieces]
    # The last query is the last key's.
    own_keys = [(key_stop - key_start) - (stop - start) for _, start, stop, key_start, key_stop in pieces]
    outputs = attend(cut(query, at_queries), cut(key, at_keys), cut(value, at_keys), own_keys)

    whole, end = [], 0
    for (rows, tokens), output in zip(at_queries, outputs, strict=True):
        start = rows.start * length + tokens.start
        whole += [output.new_zeros(start - end, heads, head_dim), output[0]]
        end = rows.start * length + tokens.stop
    whole.append(query.new_zeros(batch * length - end, heads, head_dim))
    return torch.cat(whole).view(batch, length, heads, head_dim)


def in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    size: int,
    first_key: int | torch.Tensor,
    window: int | None,
    is_causal: bool,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """
    Attention block of queries by block of queries, each against the keys that its window reaches.

    Args:
        query: [B, H, N P, d]; key, value: [B, G, K P, d].
        mask: [B or 1, heads or 1, N, K] at token level, bool or additive; None where causality and window say it all.
        size: P.
        first_key: index among the K keys of the first query's own token; a tensor (static caches, compiled) leaves
            the keys uncut.
        window: W in tokens, or None.

    Returns:
        [B, N P, H, d].
    """
    batch, heads, length, head_dim = query.shape
    if mask is not None and mask.is_floating_point() and mask.dtype != query.dtype:
        # Beside float64 queries PyTorch's kernel for CPUs takes a float32 mask and reads it wrongly.
        mask = additive(mask, query.dtype).clamp(min=hidden(query.dtype))
    groups, tokens, keys = key.shape[1], length // size, key.shape[2] // size
    can_cut = is_causal and not isinstance(first_key, torch.Tensor)
    if isinstance(tokens, torch.SymInt) or isinstance(keys, torch.SymInt):
        block = tokens  # an exported graph of any length cannot have a number of blocks that depends on it
    else:
        masks = heads // groups if mask is None else mask.shape[0] * max(mask.shape[1], heads // groups)
        block = block_length(keys, size, window if can_cut else None, masks)
    starts = [0] if block >= tokens else range(0, tokens, block)
    blocks = [(start, min(start + block, tokens)) for start in starts]
    reach = [
        (
            first_in_reach(start + first_key, window) if window is not None and can_cut else 0,
            stop + first_key if mask is None and can_cut else keys,  # a mask may show what comes later
        )
        for start, stop in blocks
    ]
    every = slice(None)
    query_pieces = [(every, slice(start * size, stop * size)) for start, stop in blocks]

    shared_rows, shared, outputs = None, None, []
    for (start, stop), (low, high), block_query in zip(blocks, reach, cut(query, query_pieces), strict=True):
        block_key, key = _Take.apply(key, low * size, high * size)
        block_value, value = _Take.apply(value, low * size, high * size)
        own = start + first_key - low
        if mask is not None:
            seen = virtual_mask(mask[:, :, start:stop, low:high], size, own, window, is_causal)
            seen = _by_group(seen, groups, heads)
        elif not can_cut:
            seen = virtual_mask(causal_mask(stop - start, keys, own, query.device), size, own, window)
            seen = _by_group(additive(seen, query.dtype), groups, heads)
        else:
            if stop - start != shared_rows:  # blocks end at their last token's key, so they are cut from one mask
                shared_rows = stop - start
                alike = zip(blocks, reach, strict=True)
                widest = max(high - low for (start, stop), (low, high) in alike if stop - start == shared_rows)
                own = widest - shared_rows
                shared = virtual_mask(causal_mask(shared_rows, widest, own, query.device), size, own, window)
                shared = _by_group(additive(shared, query.dtype), groups, heads)
            seen = shared[..., -(high - low) * size :]
        rows = (stop - start) * size
        output = scaled_dot_product_attention(
            block_query.reshape(batch, groups, -1, head_dim),
            block_key,
            block_value,
            attn_mask=seen,
            dropout_p=dropout,
            scale=scaling,
        )
        outputs.append(output.view(batch, heads, rows, head_dim).transpose(1, 2))
    return torch.cat(outputs, dim=1)


def block_length(keys: int, size: int, window: int | None, masks: int) -> int:
    """
    Tokens of a block of queries.

    Args:
        keys: tokens that there are to be seen.
        size: P.
        window: W in tokens where blocks may be cut to it, or None.
        masks: how many masks of tokens a block has: of rows, and of heads that share keys.
    """
    within = keys if window is None else min(window + window // 4, keys)
    block = LARGEST_MASK // (masks * size * size * within)
    if window is not None:
        block = min(block, max(window // 4, SMALLEST_BLOCK))
    return max(block - block % ALIGNMENT, ALIGNMENT)


def first_in_reach(token: int, window: int) -> int:
    """Of the keys that a block of queries from `token` on gets: the first that it sees, or a few before."""
    first = max(token + 1 - window, 0)
    return first - first % ALIGNMENT


def _by_group(mask: torch.Tensor, groups: int, heads: int) -> torch.Tensor:
    """[B, 1 or H, rows, keys] -> [B, 1 or G, H / G rows, keys]: the heads of a group as more rows, keys uncopied."""
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, heads // groups, 1)
    return mask.reshape(len(mask), groups, -1, mask.shape[-1])
