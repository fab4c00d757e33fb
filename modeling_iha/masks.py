"""
Who sees whom, at token level: made by Transformers, or as spans where documents and padding are runs of tokens.

Windows need no mask either: a sliding layer always applies its own (see `pieces.py` and `virtual_masks.py`).
"""

import copy
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.generic import is_flash_attention_requested

from configuration_iha import IHAConfig

MASK_FUNCTIONS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


# A piece of a batch whose queries see its keys only: (row, first query, past the last, first key, past the last).
Piece = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Documents:
    """
    Runs of tokens, each of which sees its own run only; a token of no run is padding and sees nothing.

    Args:
        spans: (row, start, stop) in order; `start` and `stop` count the row's tokens, cached ones included.
    """

    spans: tuple[tuple[int, int, int], ...]

    def pieces(self, query_offset: int, key_offset: int) -> list[Piece]:
        """The runs among queries and keys that begin with these tokens of a row."""
        return [
            (
                row,
                max(start, query_offset) - query_offset,
                stop - query_offset,
                max(start, key_offset) - key_offset,
                stop - key_offset,
            )
            for row, start, stop in self.spans
            if stop > query_offset
        ]


@dataclass(frozen=True)
class Sequences:
    """Continuous batching: the new tokens of several sequences end to end in one row, and so are all their keys."""

    spans: tuple[Piece, ...]

    def pieces(self, query_offset: int, key_offset: int) -> list[Piece]:
        return list(self.spans)


Mask = torch.Tensor | BlockMask | Documents | Sequences | None


def token_masks(
    config: IHAConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | dict | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens: torch.Tensor | None = None,
) -> dict[str, Mask]:
    """
    The token-level mask of each layer type.

    Args:
        config: names the backend, the layer types and the window.
        inputs_embeds: [B, N, hidden_size], the new tokens.
        attention_mask: [B, cached + N], 0 for padding; or a mask that was made before: [B or 1, heads or 1, N, K],
            bool (True is seen) or additive, a BlockMask, or these by layer type; or None. K is cached + N, or what
            the layer's cache holds.
        cache: what was seen before, or None.
        position_ids: [B or 1, N]. Without an attention_mask any step but 1 begins a document, as in Transformers;
            with one, a real token that is not after the one before it.
        cu_seq_lens: [documents + 1], where documents begin and end in the rows laid end to end (FlashAttention's
            `cu_seq_lens_q`); it goes before `position_ids`.

    Returns:
        By layer type: None (every token sees those up to itself, or all where `config.is_causal` is False),
        `Documents`, or a mask as above.

    Raises:
        ValueError: the arguments do not fit each other, or the backend cannot express them.
    """
    is_flash = is_flash_attention_requested(config)
    batch, tokens = inputs_embeds.shape[:2]
    if isinstance(attention_mask, (dict, BlockMask)) or (attention_mask is not None and attention_mask.ndim != 2):
        return _made_before(config, attention_mask, is_flash and tokens > 1)

    # Nothing below may look into a tensor while a whole model is compiled.
    looks = is_flash or not torch.compiler.is_compiling()
    cached = cache.get_seq_length() if cache is not None else 0
    given = attention_mask
    if looks:
        cached = int(cached)
        attention_mask = _checked(attention_mask, batch, cached + tokens)
    if tokens > 1 and not isinstance(cached, torch.Tensor) and cached == 0:
        cache = None  # an empty one says nothing

    numbers = None
    if tokens > 1 and (cu_seq_lens is not None or position_ids is not None) and (looks or cache is None):
        if cu_seq_lens is not None:
            numbers = _numbers_by_bounds(batch, tokens, cu_seq_lens, looks)
        else:
            numbers = _numbers_by_positions(
                position_ids.expand(batch, -1), None if given is None else given[:, cached : cached + tokens].bool()
            )
        if looks and not (numbers != numbers[:, :1]).any():
            numbers = None
        elif cache is not None:
            raise ValueError(
                f"position_ids or cu_seq_lens_q begin a document among {tokens} tokens that continue {cached} cached "
                "ones. Give packed documents without a cache, or each in a row of its own."
            )

    # flex_attention compiles a kernel per shape and offset: what continues a cache is not worth one.
    continues = cache is not None and config._attn_implementation == "flex_attention"
    wants_runs = is_flash or continues or config._attn_implementation == "sdpa"
    if tokens > 1 and wants_runs:
        if attention_mask is None and numbers is None and not isinstance(cached, torch.Tensor):
            return dict.fromkeys(config.layer_types)
        if looks and (documents := _as_runs(batch, cached + tokens, attention_mask, numbers)):
            return dict.fromkeys(config.layer_types, documents)
        if is_flash:
            raise ValueError(
                f"{config._attn_implementation} cannot hide tokens in the midst of a document, as attention_mask "
                "does here. Use attn_implementation='sdpa'."
            )
    if tokens == 1 or wants_runs:
        config = with_dense_masks(config)
        if attention_mask is not None and cache is None:  # as with spans, padding sees nothing
            numbers = torch.where(attention_mask.bool(), 0 if numbers is None else numbers, -1)
    in_document = None if numbers is None else _same_document(numbers)
    return {
        kind: MASK_FUNCTIONS[kind](config, inputs_embeds, attention_mask, cache, and_mask_function=in_document)
        for kind in dict.fromkeys(config.layer_types)
    }


def paged_masks(kwargs: dict) -> dict[str, Sequences]:
    """Those of continuous batching, by layer type, from what it passes to a model beside its paged cache."""
    queries = kwargs["cu_seq_lens_q"].tolist()
    masks = {}
    for kind, keys in kwargs["cu_seq_lens_k"].items():
        spans = zip(queries, queries[1:], keys.tolist(), keys[1:].tolist(), strict=False)  # queries may be padded
        masks[kind] = Sequences(tuple((0, *span) for span in spans if span[0] < span[1]))
    return masks


def pop_cu_seq_lens(kwargs: dict) -> torch.Tensor | None:
    """FlashAttention's `cu_seq_lens_q`; the others of its kind are told by it."""
    bounds, key_bounds = kwargs.pop("cu_seq_lens_q", None), kwargs.pop("cu_seq_lens_k", None)
    kwargs.pop("max_length_q", None)
    kwargs.pop("max_length_k", None)
    looks = not torch.compiler.is_compiling()
    if looks and key_bounds is not None and (bounds is None or not torch.equal(bounds, key_bounds)):
        raise ValueError(f"cu_seq_lens_k={key_bounds.tolist()} must be cu_seq_lens_q: a document attends to itself.")
    return bounds


def with_dense_masks(config: IHAConfig) -> IHAConfig:
    """A configuration for which Transformers makes dense masks, whatever the backend."""
    config = copy.copy(config)
    config._attn_implementation_internal = "sdpa"
    return config


def _checked(attention_mask: torch.Tensor | None, batch: int, length: int) -> torch.Tensor | None:
    """The 2-D mask, or None where it hides nothing."""
    if attention_mask is None:
        return None
    if len(attention_mask) != batch or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask has the shape {list(attention_mask.shape)}: it must be [{batch}, {length}], the cached "
            "tokens included."
        )
    attention_mask = attention_mask[:, :length]
    return None if attention_mask.all() else attention_mask


def _made_before(config: IHAConfig, masks, must_be_none: bool) -> dict[str, torch.Tensor | BlockMask | None]:
    if not isinstance(masks, dict):
        masks = dict.fromkeys(config.layer_types, masks)
    if missing := set(config.layer_types) - set(masks):
        raise ValueError(f"attention_mask has the keys {sorted(masks)}: {sorted(missing)} must be among them.")
    for mask in masks.values():
        is_dense = isinstance(mask, torch.Tensor) and mask.ndim == 4
        if is_dense and mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(
                f"attention_mask of 4 dimensions has the dtype {mask.dtype}: it must be bool or floating."
            )
        if mask is not None and not is_dense and not isinstance(mask, BlockMask):
            raise ValueError(
                f"attention_mask is {type(mask).__name__} of shape {list(getattr(mask, 'shape', []))}: it must have 2 "
                "dimensions, or 4, or be a BlockMask, or a dict of the last two by layer type."
            )
        if must_be_none and mask is not None:
            raise ValueError(
                f"{config._attn_implementation} takes an attention_mask of shape [batch, tokens] only. Use "
                "attn_implementation='sdpa' for others."
            )
    return masks


def _numbers_by_bounds(batch: int, tokens: int, cu_seq_lens: torch.Tensor, looks: bool) -> torch.Tensor:
    """[B, N], the number of each token's document."""
    if looks:
        bounds = cu_seq_lens.tolist()
        if bounds[0] != 0 or bounds[-1] != batch * tokens or sorted(bounds) != bounds:
            raise ValueError(f"cu_seq_lens_q={bounds} must rise from 0 to the number of tokens, {batch * tokens}.")
    token = torch.arange(batch * tokens, device=cu_seq_lens.device)
    return torch.bucketize(token, cu_seq_lens[1:].to(token.dtype), right=True).view(batch, tokens)


def _numbers_by_positions(positions: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """[B, N], the number of each token's document within its row; `real` is None where no mask was given."""
    if real is None:
        return (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)  # Transformers' rule
    last_real = torch.where(real, torch.arange(real.shape[1], device=real.device), 0).cummax(-1).values
    previous = torch.nn.functional.pad(last_real[:, :-1], (1, 0))
    begins = real & (positions <= positions.gather(1, previous)) & (real.cumsum(-1) > 1)
    return begins.cumsum(-1)


def _as_runs(
    batch: int, length: int, attention_mask: torch.Tensor | None, numbers: torch.Tensor | None
) -> Documents | None:
    """`Documents`, or None where one has padding in its midst."""
    labels = torch.zeros(batch, length, dtype=torch.long) if numbers is None else numbers.cpu()
    if attention_mask is not None:
        labels = torch.where(attention_mask.cpu().bool(), labels, -1)
    begins = torch.ones_like(labels, dtype=torch.bool)
    begins[:, 1:] = labels[:, 1:] != labels[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    stops = torch.cat([starts[1:], starts.new_tensor([labels.numel()])])
    runs = zip(labels.flatten()[starts].tolist(), starts.tolist(), stops.tolist(), strict=True)
    spans, seen = [], set()
    for label, start, stop in runs:
        row = start // length
        if label < 0:
            continue
        if (row, label) in seen:
            return None
        seen.add((row, label))
        spans.append((row, start - row * length, stop - row * length))
    return Documents(tuple(spans))


def _same_document(numbers: torch.Tensor):
    """Transformers' mask function of packed documents."""

    def mask_function(batch, head, query, key):
        return numbers[batch, query] == numbers[batch, key]

    return mask_function
