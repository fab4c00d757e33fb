"""
Exclusive Self Attention in IHA: what a head says of a token is freed of the direction of the token's own value,

    o[n, h]  <-  o[n, h] - (o[n, h] . v[n, g(h)]) / |v[n, g(h)]|^2  v[n, g(h)]

so that a head tells what the token does not hold already; the residual stream carries that. o is the *collapsed*
output of head h, what o_proj reads, and v the raw value of its key head g(h), before any mixing. In a layer with P = 1
both are Llama's, and this is Exclusive Self Attention itself; so are they in a model just converted. Freed before the
collapse, pseudo-head by pseudo-head of its own pseudo-value, a head would get its token's value back from the other
pseudo-heads that the collapse mixes in. The cache is what it was: no token needs another's value here.
"""

import torch
from torch import nn

from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.attention import IHAAttention
from modeling_iha.modeling_iha import IHAPreTrainedModel


def without_own(output: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """
    Args:
        output: [..., H, d], of each head. value: [..., G, d], of each key head.

    Returns:
        [..., H, d]: the part of each head's output that is orthogonal to the value of its key head.
    """
    dtype = torch.promote_types(output.dtype, torch.float32)  # squares are beyond float16
    by_group, value = output.to(dtype).unflatten(-2, (value.shape[-2], -1)), value.to(dtype).unsqueeze(-2)
    squared = value.square().sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)  # a value may be zero
    own = (by_group * value).sum(-1, keepdim=True) / squared * value
    return (by_group - own).flatten(-3, -2).to(output.dtype)


class OwnValue:
    """Two hooks of a layer: IHAAttention makes its values and gives its output to o_proj by itself."""

    def __init__(self, layer: IHAAttention):
        self.head_dim = layer.head_dim
        layer.v_proj.register_forward_hook(self.keep)
        layer.o_proj.register_forward_pre_hook(self.remove)

    def keep(self, module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor):
        self.value = output.unflatten(-1, (-1, self.head_dim))

    def remove(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        value, self.value = self.value, None
        return (without_own(inputs[0].unflatten(-1, (-1, self.head_dim)), value).flatten(-2),)


class ExclusiveIHAConfig(IHAConfig):
    """IHAConfig's fields; P = 1 is Exclusive Self Attention in Llama."""

    model_type = "exclusive_iha"


class ExclusiveIHAForCausalLM(IHAForCausalLM):
    config: ExclusiveIHAConfig
    config_class = ExclusiveIHAConfig

    def __init__(self, config: ExclusiveIHAConfig):
        super().__init__(config)
        for layer in self.model.layers:
            OwnValue(layer.self_attn)

    def save_pretrained(self, *args, **kwargs):
        """Past IHA's own, which would put IHA's code beside the weights: it loads them as IHA."""
        super(IHAPreTrainedModel, self).save_pretrained(*args, **kwargs)
