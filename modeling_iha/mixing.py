"""Mixing heads into pseudo-heads, collapsing them again, and the three initialisations (paper section 3)."""

import math

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import initialization as init


class _MixHeads(torch.autograd.Function):
    """`weight @ x` for every token. The weight's gradient is one product: [B N, O, I] is never materialised."""

    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(weight, x)
        return torch.bmm(weight.expand(x.shape[0], -1, -1), x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, x = ctx.saved_tensors
        grad_weight = grad_x = None
        if ctx.needs_input_grad[0]:
            grad_weight = grad.transpose(0, 1).flatten(1) @ x.transpose(0, 1).flatten(1).T
        if ctx.needs_input_grad[1]:
            grad_x = torch.bmm(weight.T.expand(x.shape[0], -1, -1), grad)
        return grad_weight, grad_x


def mix_heads(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """
    Linear combinations of heads, the same for every token and every channel.

    Args:
        weight: [..., heads_in], the leading dimensions are the heads out; cast to the dtype of `x`.
        x: [B, N, heads_in, d]; under autocast it is cast to autocast's dtype, as for every matrix product.

    Returns:
        [B, N, heads_out, d], contiguous, in the dtype of `x`. Double backward raises a RuntimeError.
    """
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    if autocast and x.dtype != torch.float64:  # which autocast leaves alone
        x = x.to(torch.get_autocast_dtype(device))  # before the function, whose backward runs without autocast
    batch, tokens, heads_in, head_dim = x.shape
    weight = weight.reshape(-1, heads_in).to(x.dtype)
    mixed = _MixHeads.apply(weight, x.reshape(batch * tokens, heads_in, head_dim))
    return mixed.view(batch, tokens, -1, head_dim)


class IHAMixer(nn.Module):
    """
    The mixing tensors of a layer: `q_mix` [P, H, H], `k_mix` and `v_mix` [P, G, G]. `q_mix[j, h, m]` is the weight of
    head m in pseudo-query j of head h (the paper's alpha^Q[m, h, j]); keys and values mix over the G heads they have.
    """

    def __init__(self, num_pseudo_heads: int, num_heads: int, num_key_value_heads: int):
        super().__init__()
        self.q_mix = nn.Parameter(torch.empty(num_pseudo_heads, num_heads, num_heads))
        self.k_mix = nn.Parameter(torch.empty(num_pseudo_heads, num_key_value_heads, num_key_value_heads))
        self.v_mix = nn.Parameter(torch.empty(num_pseudo_heads, num_key_value_heads, num_key_value_heads))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three tensors, through a forward because offloading brings parameters in by its hooks."""
        return self.q_mix, self.k_mix, self.v_mix

    def initialize(self, how: str, std: float):
        """Fills the tensors by `IHAConfig.mixing_init` and `mixing_init_std`; tensors that were loaded are kept."""
        # Over the root of the heads mixed: noise of std 1 has the size of a head.
        q_std, kv_std = std / math.sqrt(self.q_mix.shape[-1]), std / math.sqrt(self.k_mix.shape[-1])
        if how == "normal":
            q_mix, k_mix, v_mix = normal(self.q_mix, q_std), normal(self.k_mix, kv_std), normal(self.v_mix, kv_std)
        else:
            q_mix, k_mix, v_mix = (identity_copies(weight) for weight in self())
        if how == "exact":
            q_mix[:-1] += q_std * torch.randn_like(q_mix[:-1])  # the collapse reads the last one only
            v_mix += zero_sum_noise(v_mix.shape, kv_std).to(v_mix)
        fill(self.q_mix, q_mix)
        fill(self.k_mix, k_mix)
        fill(self.v_mix, v_mix)


class IHACollapse(nn.Module):
    """The collapse of pseudo-heads: `weight` [H, P, H], out[h] = sum over (j, m) of weight[h, j, m] o[j, m]."""

    def __init__(self, num_pseudo_heads: int, num_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, num_pseudo_heads, num_heads))

    def forward(self, pseudo_heads: torch.Tensor) -> torch.Tensor:
        """[B, N, P H, d] -> [B, N, H, d]."""
        return mix_heads(self.weight, pseudo_heads)

    def initialize(self, how: str, std: float):
        """
        `normal` draws; the others read the last pseudo-head: under flat causality only that one sees all P copies of
        its own token's key, so only that one equals Llama's head.
        """
        if how == "normal":
            weight = normal(self.weight, std / math.sqrt(self.weight[0].numel()))
        else:
            weight = torch.zeros(self.weight.shape, dtype=torch.float32, device=self.weight.device)
            weight[:, -1] = torch.eye(len(weight), device=weight.device)
        fill(self.weight, weight)


def fill(parameter: torch.Tensor, value: torch.Tensor):
    """`init.copy_`, also where each process holds a shard of the parameter: of the first process's value then."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value.to(parameter.dtype), parameter.device_mesh, parameter.placements)
    init.copy_(parameter, value)


def normal(weight: torch.Tensor, std: float) -> torch.Tensor:
    """Noise in float32, of the whole shape and on the device of `weight`."""
    return std * torch.randn(weight.shape, dtype=torch.float32, device=weight.device)


def identity_copies(weight: torch.Tensor) -> torch.Tensor:
    """P identities in float32, of the shape [P, heads, heads] and on the device of `weight`."""
    return torch.eye(weight.shape[-1], dtype=torch.float32, device=weight.device).repeat(len(weight), 1, 1)


def zero_sum_noise(shape: tuple[int, int, int], std: float) -> torch.Tensor:
    """
    Noise E of shape [P, G, G] and about the standard deviation `std` (at most 16), float32, whose sum over P is zero
    to the bit. E and identity + E have at most 8 significant bits, so bfloat16, float16 and wider hold them exactly
    and the mean of the pseudo-values stays the value itself in each.
    """
    step = 2.0 ** (math.floor(math.log2(std)) - 4)
    steps = torch.full(shape[1:], step, dtype=torch.float32)
    steps.fill_diagonal_(max(step, 2.0**-7))  # 1 + k / 128 is the finest with 8 bits
    draws = (torch.randn(shape, dtype=torch.float32) * (std / math.sqrt(2)) / steps).round().clamp(-63, 63)
    return (draws - draws.roll(1, dims=0)) * steps
