"""
`absorbed_attention` for inference on GPUs, flash-decoding style: one Triton kernel reads the cache once, in parts that
run at the same time, and a second one combines them.
"""

import re

import torch
from transformers.models.llama.modeling_llama import rotate_half

from .virtual_masks import hidden

try:  # in a `try`, Transformers does not ask for it where this file travels with a checkpoint
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("modeling_iha.absorbed_triton needs Triton: pip install triton.") from error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_ROW_BLOCK = 64
LARGEST_QUERY_TILE = 32 * 1024  # bytes: larger ones leave no registers and no shared memory
LARGEST_SPLIT_COUNT = 256
COMBINED_CHANNELS = 32
# Finite, so that a row that has seen nothing yet gives exp(0) and not exp(nan).
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def absorbed_attention_triton(
    k_mix: torch.Tensor,
    v_mix: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    own_key: int | torch.Tensor,
    scaling: float,
    offsets: tuple[torch.Tensor, ...] = (),
    multiprocessors: int | None = None,
) -> torch.Tensor:
    """
    What `absorbed_attention` gives, without gradients and dropout. A row that a mask of -inf hides whole is zero.

    Args:
        k_mix, v_mix, query, key, value, mask, own_key, scaling, offsets: those of `absorbed_attention`, caches and
            masks with any strides. An `own_key` that is a tensor is not read on the host.
        multiprocessors: of the GPU, to be filled; None asks the device.

    Returns:
        Output [B, P, H, d].

    Raises:
        ValueError: the dtype is none of `DTYPES`.
    """
    if query.dtype not in DTYPES:
        raise ValueError(f"query has the dtype {query.dtype}: it must be one of {', '.join(map(str, DTYPES))}.")
    batch, size, heads, head_dim = query.shape
    turned = query[:, None]  # [B, 1 or P (j), P (i), H, d]
    if offsets:
        # The raw key lacks its pseudo-head's offset j: turn the query back by it instead.
        cos, sin = (table[None, :, None, None, :] for table in offsets)
        turned = (turned * cos - rotate_half(turned) * sin).to(query.dtype)
    if not isinstance(own_key, torch.Tensor):
        own_key = torch.full((), own_key, dtype=torch.int64, device=query.device)
    output = _decode(
        k_mix.to(query.dtype).contiguous(),
        v_mix.to(query.dtype).contiguous(),
        turned.flatten(2, 3).contiguous(),
        key,
        value,
        mask,
        own_key,
        scaling,
        multiprocessors,
    )
    return output.view(batch, size, heads, head_dim)


def split_length(keys: int, programs: int, multiprocessors: int, block: int) -> int:
    """
    Keys per split, a multiple of `block`: two programs for each multiprocessor where there are keys enough.

    Args:
        keys: K.
        programs: of each split.
        multiprocessors: of the GPU.
        block: keys that a program looks at together.
    """
    splits = min(max(2 * multiprocessors // programs, 1), LARGEST_SPLIT_COUNT)
    return triton.cdiv(triton.cdiv(keys, block), splits) * block


# Opaque to torch.compile: the number of splits must not become a guard on the cache's length.
# Named for this module: where a checkpoint brings its own copy of it, each copy has an operator of its own.
@torch.library.custom_op(re.sub(r"\W", "_", __name__) + "::absorbed_decode", mutates_args=())
def _decode(
    k_mix: torch.Tensor,
    v_mix: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    own_key: torch.Tensor,
    scaling: float,
    multiprocessors: int | None,
) -> torch.Tensor:
    """Query [B, 1 or P, P H, d] -> output [B, P H, d]."""
    batch, turns, rows, head_dim = query.shape
    keys, size = key.shape[2], len(k_mix)
    channel_block = max(triton.next_power_of_2(head_dim), 16)
    row_bytes = max(triton.next_power_of_2(turns), 2) * channel_block * query.element_size()
    largest = min(LARGEST_QUERY_TILE // row_bytes, LARGEST_ROW_BLOCK)
    row_block = max(min(triton.next_power_of_2(rows), largest), 16)
    row_blocks = triton.cdiv(rows, row_block)
    key_block = 32 if size <= 4 else 16  # P tiles of logits are in registers at once
    if multiprocessors is None:
        multiprocessors = torch.cuda.get_device_properties(query.device).multi_processor_count
    length = split_length(keys, batch * row_blocks, multiprocessors, key_block)
    splits = triton.cdiv(keys, length)

    mask_kind, mask_by_head, mask_strides = "none", False, (0, 0, 0)
    if mask is not None:
        mask_kind = "bool" if mask.dtype == torch.bool else "additive"
        mask_by_head = mask.shape[1] > 1
        mask_strides = mask[:, :, 0].expand(batch, rows // size, keys).stride()
    device = query.device
    partial = torch.empty(batch * rows, splits, head_dim, dtype=torch.float32, device=device)
    peaks, totals = torch.empty(2, batch * rows, splits, dtype=torch.float32, device=device)
    output = torch.empty(batch, rows, head_dim, dtype=query.dtype, device=device)
    with torch.cuda.device_of(query):  # Triton launches on the current one
        _split_kernel[(row_blocks, splits, batch)](
            query,
            key,
            value,
            k_mix,
            v_mix,
            mask,
            own_key,
            partial,
            peaks,
            totals,
            *key.stride(),
            *value.stride(),
            *mask_strides,
            keys,
            length,
            scaling,
            hidden(query.dtype),
            heads=rows // size,
            groups=key.shape[1],
            size=size,
            turns=turns,
            head_dim=head_dim,
            mask_kind=mask_kind,
            mask_by_head=mask_by_head,
            row_block=row_block,
            key_block=key_block,
            channel_block=channel_block,
            num_warps=4,
            num_stages=3,
        )
        _combine_kernel[(batch * rows, triton.cdiv(head_dim, COMBINED_CHANNELS))](
            partial,
            peaks,
            totals,
            output,
            splits,
            head_dim=head_dim,
            split_block=triton.next_power_of_2(splits),
            channel_block=COMBINED_CHANNELS,
        )
    return output


@_decode.register_fake
def _(k_mix, v_mix, query, key, value, mask, own_key, scaling, multiprocessors):
    batch, _, rows, head_dim = query.shape
    return query.new_empty(batch, rows, head_dim)


# No new kernel for what changes from token to token.
@triton.jit(
    do_not_specialize=["keys", "length", "mask_stride_batch", "mask_stride_head"],
    do_not_specialize_on_alignment=["mask", "own_key"],
)
def _split_kernel(
    query,  # [B, turns, rows, d]
    key,  # [B, G, K, d]
    value,
    k_mix,  # [P, G, G]
    v_mix,
    mask,  # [B, H, K]
    own_key,
    partial,  # [B, rows, splits, d]: sums over a split's keys, to be divided by `totals`
    peaks,  # [B, rows, splits]: the largest logit, which the sums are relative to
    totals,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    key_stride_channel,
    value_stride_batch,
    value_stride_head,
    value_stride_token,
    value_stride_channel,
    mask_stride_batch,
    mask_stride_head,
    mask_stride_token,
    keys,
    length,
    scaling,
    hidden,
    heads: tl.constexpr,
    groups: tl.constexpr,
    size: tl.constexpr,
    turns: tl.constexpr,
    head_dim: tl.constexpr,
    mask_kind: tl.constexpr,  # "none", "bool" or "additive"
    mask_by_head: tl.constexpr,
    row_block: tl.constexpr,
    key_block: tl.constexpr,
    channel_block: tl.constexpr,
):
    """Row i H + h is pseudo-query i of head h. All P rows of all heads share each tile of the cache."""
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    split, splits = tl.program_id(1), tl.num_programs(1)
    batch = tl.program_id(2).to(tl.int64)  # what counts into the cache may pass 2^31
    channel = tl.arange(0, channel_block)
    rows: tl.constexpr = size * heads
    is_row, is_channel = row < rows, channel < head_dim
    pseudo_head, head = row // heads, row % heads
    mix_row = (head // (heads // groups)) * groups  # of k_mix[0], v_mix[0]

    queries = ()
    for j in tl.static_range(turns):
        at = ((batch * turns + j) * rows + row[:, None]) * head_dim + channel[None, :]
        queries += (tl.load(query + at, mask=is_row[:, None] & is_channel[None, :], other=0.0),)

    own = tl.load(own_key)
    peak = tl.full([row_block], LOWEST, tl.float32)
    total = tl.zeros([row_block], tl.float32)
    summed = tl.zeros([row_block, channel_block], tl.float32)
    stop = tl.minimum((split + 1) * length, keys)
    for start in range(split * length, stop, key_block):
        token = start + tl.arange(0, key_block).to(tl.int64)
        is_key = token < stop
        in_tile = is_key[:, None] & is_channel[None, :]

        logits = ()
        for _ in tl.static_range(size):
            logits += (tl.zeros([row_block, key_block], tl.float32),)
        key_at = key + batch * key_stride_batch + token[:, None] * key_stride_token
        key_at += channel[None, :] * key_stride_channel
        for m in range(groups):
            raw_key = tl.trans(tl.load(key_at, mask=in_tile, other=0.0))
            key_at += key_stride_head
            if turns == 1:
                score = tl.dot(queries[0], raw_key, input_precision="ieee")
            mixed = ()
            for j in tl.static_range(size):
                if turns > 1:
                    score = tl.dot(queries[j], raw_key, input_precision="ieee")
                share = tl.load(k_mix + j * groups * groups + mix_row + m).to(tl.float32)
                mixed += (logits[j] + share[:, None] * score,)
            logits = mixed

        if mask_kind != "none":
            mask_at = mask + batch * mask_stride_batch + token[None, :] * mask_stride_token
            if mask_by_head:
                mask_at += head[:, None] * mask_stride_head
            seen = tl.load(mask_at, mask=is_key[None, :], other=0)
        highest = peak
        masked = ()
        for j in tl.static_range(size):
            logit = logits[j] * scaling
            if mask_kind == "bool":
                logit = tl.where(seen != 0, logit, hidden)
            if mask_kind == "additive":
                logit = logit + seen.to(tl.float32)
            is_later = (token == own)[None, :] & (pseudo_head < j)[:, None]
            logit = tl.where(is_later, tl.minimum(logit, hidden), logit)
            logit = tl.where(is_key[None, :], logit, float("-inf"))
            highest = tl.maximum(highest, tl.max(logit, 1))
            masked += (logit,)

        shrink = tl.exp(peak - highest)
        peak = highest
        total = total * shrink
        weights = ()
        for j in tl.static_range(size):
            weight = tl.exp(masked[j] - highest[:, None])
            total += tl.sum(weight, 1)
            weights += (weight,)

        summed = summed * shrink[:, None]
        value_at = value + batch * value_stride_batch + token[:, None] * value_stride_token
        value_at += channel[None, :] * value_stride_channel
        for m in range(groups):
            raw_value = tl.load(value_at, mask=in_tile, other=0.0)
            value_at += value_stride_head
            weight = tl.zeros([row_block, key_block], tl.float32)
            for j in tl.static_range(size):
                share = tl.load(v_mix + j * groups * groups + mix_row + m).to(tl.float32)
                weight += share[:, None] * weights[j]
            summed = tl.dot(weight.to(raw_value.dtype), raw_value, summed, input_precision="ieee")

    at = (batch * rows + row) * splits + split
    tl.store(peaks + at, peak, mask=is_row)
    tl.store(totals + at, total, mask=is_row)
    tl.store(partial + at[:, None] * head_dim + channel[None, :], summed, mask=is_row[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial,  # [B rows, splits, d]
    peaks,  # [B rows, splits]
    totals,
    output,  # [B rows, d]
    splits,
    head_dim: tl.constexpr,
    split_block: tl.constexpr,
    channel_block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * channel_block + tl.arange(0, channel_block)
    split = tl.arange(0, split_block)
    is_split, is_channel = split < splits, channel < head_dim
    at = row * splits + split
    peak = tl.load(peaks + at, mask=is_split, other=LOWEST)
    share = tl.exp(peak - tl.max(peak, 0))
    total = tl.sum(share * tl.load(totals + at, mask=is_split, other=0.0), 0)
    summed = tl.load(
        partial + at[:, None] * head_dim + channel[None, :], mask=is_split[:, None] & is_channel[None, :], other=0.0
    )
    result = tl.sum(share[:, None] * summed, 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + row * head_dim + channel, result.to(output.dtype.element_ty), mask=is_channel)
