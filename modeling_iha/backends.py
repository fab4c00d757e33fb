"""The attention of virtual tokens by each backend of Transformers, all of them the same function."""

import functools
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils.generic import is_flash_attention_requested

from configuration_iha import IHAConfig

from .masks import Documents, Mask, Sequences
from .pieces import in_blocks, in_pieces
from .virtual_masks import additive, as_dense, causal_mask, hidden, virtual_mask


def check_backend(config: IHAConfig, implementation: str | None):
    """Raises a ValueError where this attention implementation cannot compute the model's function."""
    advice = "Use attn_implementation='sdpa' (or 'flex_attention', 'eager')."
    if implementation is None:
        return
    if implementation.startswith("paged"):
        raise ValueError(
            f"attn_implementation={implementation!r} is not supported: its function reads keys from the cache, where "
            "they are not mixed yet. Continuous batching takes attn_implementation='sdpa', from Transformers 5.24 on."
        )
    if is_flash_attention_requested(requested_attention_implementation=implementation):
        sliding = [i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention"]
        if any(config.get_num_pseudo_heads(i) > 1 for i in sliding):
            raise ValueError(
                f"attn_implementation={implementation!r} cannot run the sliding layers of this model: FlashAttention "
                "starts its window a fixed number of keys before each query, which is the start of a token for one "
                f"of the num_pseudo_heads at most. {advice}"
            )
    registered, with_mask = (names.valid_keys() for names in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS))
    if implementation in registered and implementation not in with_mask:
        raise ValueError(
            f"attn_implementation={implementation!r} has no mask function, so padding would be lost: give it one with "
            f"transformers.AttentionMaskInterface.register. {advice}"
        )


def virtual_attention(
    module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    query_offset: int | torch.Tensor,
    key_offset: int,
    dropout: float,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Args:
        module: the `IHAAttention`, for its P, window, causality, scaling and configuration.
        query: [B, H, N P, d]; key, value: [B, G, K P, d]: virtual tokens, in order.
        mask: between tokens, one of those that `token_masks` gives.
        query_offset, key_offset: the first query's and the first key's token, counted from the row's first.
        dropout: probability with which a weight is dropped.
        kwargs: of the attention function.

    Returns:
        Output [B, N P, H, d], and the weights [B, H, N P, K P] where the backend is `eager`.

    Under sequence parallelism training sets `module.across_processes`, which is called instead: it gathers the tokens
    of all processes and comes back here with fewer heads.
    """
    if (across_processes := getattr(module, "across_processes", None)) is not None:
        return across_processes(module, query, key, value, mask, query_offset, key_offset, dropout, **kwargs)
    implementation = module.config._attn_implementation
    is_flex = implementation == "flex_attention"
    is_flash = is_flash_attention_requested(module.config)
    one_query = query.shape[2] == 1 and implementation != "eager"
    if one_query or (is_flex and not isinstance(mask, BlockMask)) or (is_flash and isinstance(mask, torch.Tensor)):
        implementation = "sdpa"  # which needs no kernel of its own for each
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
    if module.training and is_deepspeeds(interface):
        raise ValueError(
            f"DeepSpeed has replaced attn_implementation={implementation!r} for sp_size > 1: windows, documents and "
            "padding would be lost. Train with training_iha.IHATrainer, or a Trainer with "
            "training_iha.parallel.WithoutLeaks mixed in."
        )
    attention = functools.partial(interface, module, dropout=dropout, scaling=module.scaling, **kwargs)
    states = (query, key, value)
    if implementation == "sdpa":
        return _sdpa(module, attention, states, mask, query_offset, key_offset, dropout), None
    if is_flash:
        return _flash(module, attention, states, mask, query_offset, key_offset), None
    return _dense(module, attention, states, mask, query_offset - key_offset)


def is_deepspeeds(interface: Callable) -> bool:
    """Whether DeepSpeed has put its sequence parallelism in the place of an attention function."""
    return getattr(interface, "__module__", "").startswith("deepspeed.")


def _dense(module, attention: Callable, states, mask: Mask, first_key: int | torch.Tensor):
    """With the mask of all virtual tokens: eager and the like; flex_attention's lists blocks."""
    query, key, _ = states
    size = module.num_pseudo_heads
    queries, keys = query.shape[2] // size, key.shape[2] // size
    if mask is None and module.is_causal:
        mask = causal_mask(queries, keys, first_key, query.device)
    if isinstance(mask, BlockMask) and module.config._attn_implementation != "flex_attention":
        mask = as_dense(mask, len(query), queries, keys)
    if mask is not None:
        mask = virtual_mask(mask, size, first_key, module.sliding_window, module.is_causal)
    if isinstance(mask, torch.Tensor):
        # Eager's softmax is float32 in every model: what float64 has beyond it would be infinite there.
        mask = additive(mask, query.dtype).clamp(min=max(hidden(query.dtype), hidden(torch.float32)))
    return attention(*states, mask)


def _sdpa(module, attention: Callable, states, mask: Mask, query_offset, key_offset: int, dropout: float):
    size, window, is_causal = module.num_pseudo_heads, module.sliding_window, module.is_causal

    def attend(query, key, value, first_key, mask=None):
        queries, keys = query.shape[2] // size, key.shape[2] // size
        fits_window = window is None or window >= keys
        if mask is None and not is_causal:
            return attention(query, key, value, None, is_causal=False)[0]
        if mask is None and fits_window and (queries == keys or queries * size == 1):
            return attention(query, key, value, None, is_causal=True)[0]
        return in_blocks(
            query, key, value, mask, size, first_key, window, is_causal, scaling=module.scaling, dropout=dropout
        )

    if isinstance(mask, (Documents, Sequences)):
        pieces = mask.pieces(query_offset, key_offset)
        return in_pieces(lambda *pieces: list(map(attend, *pieces)), *states, pieces, size)
    if isinstance(mask, BlockMask):
        query, key, _ = states
        mask = as_dense(mask, len(query), query.shape[2] // size, key.shape[2] // size)
    return attend(*states, query_offset - key_offset, mask)


def _flash(
    module, attention: Callable, states, mask: Documents | Sequences | None, query_offset: int, key_offset: int
):
    attention = functools.partial(attention, is_causal=module.is_causal, sliding_window=module.sliding_window)
    if mask is None:
        return attention(*states, None)[0]

    def attend(queries, keys, values, own_keys):
        """All documents in one call; its causality is aligned at the last query of each, as caches need."""
        query_lengths, key_lengths = ([piece.shape[2] for piece in pieces] for pieces in (queries, keys))
        output, _ = attention(
            torch.cat(queries, 2),
            torch.cat(keys, 2),
            torch.cat(values, 2),
            None,
            cu_seq_lens_q=_bounds(query_lengths, queries[0].device),
            cu_seq_lens_k=_bounds(key_lengths, queries[0].device),
            max_length_q=max(query_lengths),
            max_length_k=max(key_lengths),
        )
        return output.split(query_lengths, dim=1)

    return in_pieces(attend, *states, mask.pieces(query_offset, key_offset), module.num_pseudo_heads)


def _bounds(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
