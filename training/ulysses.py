"""
Sequence parallelism by DeepSpeed's scheme (Ulysses, arXiv:2309.14509): each process holds some of the tokens, and for
attention some of the heads of all tokens. Heads are mixed before, where a process has them all, and collapsed after.

DeepSpeed's own `UlyssesSPAttentionHF` drops every mask and window; here attention knows of all tokens of a row, so
windows, packed documents and padding are those of one process.
"""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from configuration_iha import IHAConfig
from modeling_iha.attention import IHAAttention
from modeling_iha.backends import is_deepspeeds, virtual_attention
from modeling_iha.masks import Mask, token_masks


@contextlib.contextmanager
def whole_rows(model: nn.Module, inputs: dict[str, torch.Tensor], group: dist.ProcessGroup):
    """
    While it lasts, forward and backward of `model` attend over whole rows, of which each process has a part.

    Args:
        model: an IHA model, or one that holds it.
        inputs: this process's part of a batch: `position_ids` [B, N / processes], which count from the beginning of
            each document, and maybe `attention_mask` of the same shape, which is taken out. Parts are in the order of
            the processes and of one length.
        group: the processes that share a row. Their number divides H; it divides G or is a multiple of it.
    """
    attentions = [module for module in model.modules() if isinstance(module, IHAAttention)]
    if not attentions:
        raise ValueError("The model has no layers of IHAAttention: rows can be spread over processes for those only.")
    config = attentions[0].config
    positions = _whole(inputs["position_ids"], group)
    real = inputs.pop("attention_mask", None)
    real = None if real is None else _whole(real, group)
    if real is not None and bool(real.all()):
        real = None  # beside a mask positions that start over would not begin documents
    tokens = torch.empty(*positions.shape, 0, dtype=attentions[0].q_proj.weight.dtype, device=positions.device)
    masks = token_masks(config, tokens, real, None, positions)
    for attention in attentions:
        attention.across_processes = _Exchange(masks[config.layer_types[attention.layer_idx]], group)
    try:
        with transformers_attention(config):  # DeepSpeed's would exchange heads a second time
            yield
    finally:
        for attention in attentions:
            del attention.across_processes


@contextlib.contextmanager
def transformers_attention(config: IHAConfig):
    """While it lasts, attention functions are Transformers' own, where DeepSpeed has put its in their place."""
    name = config._attn_implementation
    replaced = ALL_ATTENTION_FUNCTIONS.get(name)  # eager is none of them
    if not is_deepspeeds(replaced):
        yield
        return
    del ALL_ATTENTION_FUNCTIONS[name]
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = replaced


class _Exchange:
    """`virtual_attention` of whole rows. mask: of the whole rows, between tokens."""

    def __init__(self, mask: Mask, group: dist.ProcessGroup):
        self.mask, self.group = mask, group

    def __call__(self, module, query, key, value, mask, query_offset, key_offset, dropout, **kwargs):
        """query [B, H, N P / processes, d]; key, value [B, G, N P / processes, d] -> [B, N P / processes, H, d]."""
        copies = max(self.group.size() // key.shape[1], 1)  # of a key head, where there are more processes
        key, value = (heads.repeat_interleave(copies, 1) for heads in (key, value))
        query, key, value = (_spread(heads, self.group) for heads in (query, key, value))
        alone = copy.copy(module)
        alone.across_processes = None
        alone.num_key_value_groups = query.shape[1] // key.shape[1]
        output, _ = virtual_attention(alone, query, key, value, self.mask, 0, 0, dropout, **kwargs)
        return _spread(output, self.group), None


def _spread(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, a, b, ...] -> [B, a / processes, b processes, ...]: a part of `a` for each process, and all parts of `b`."""
    parts = x.unflatten(1, (group.size(), -1)).movedim(1, 0)
    return _AllToAll.apply(parts, group).movedim(0, 2).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """[processes, ...]: what each process has for each other; its own inverse, and so is its backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.group), None


def _whole(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, N / processes] -> [B, N]."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, 1)
