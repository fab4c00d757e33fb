"""What a training run says of its pseudo-heads."""

from collections import defaultdict

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .mixing import is_mixing


@torch.no_grad()
def distances(model: nn.Module) -> dict[str, float]:
    """
    How far pseudo-heads are apart, by tensor, as the mean over layers.

    Returns:
        For `q_mix`, `k_mix` and `v_mix` the norm of what differs from the mean pseudo-head over the norm of all: 0 for
        copies. For `collapse` the norm of what reads other pseudo-heads than the last over the norm of all: 0 at
        conversion.
    """
    layers = defaultdict(list)
    for name, parameter in model.named_parameters():
        if not is_mixing(name) or ".original_module." in name:  # PEFT keeps the tensors from before beside its own
            continue
        kind, heads = name.rsplit(".", 1)[-1], whole(parameter).float()
        if kind == "weight":
            kind, rest = "collapse", heads[:, :-1]
        else:
            rest = heads - heads.mean(0)
        layers[kind].append(rest.norm() / heads.norm())
    return {kind: float(torch.stack(values).mean()) for kind, values in layers.items()}


@torch.no_grad()
def gradient_norm(model: nn.Module) -> float | None:
    """The norm of the mixing tensors' gradients, all layers together; None where there are none."""
    norms = [
        whole(parameter.grad).float().norm()
        for name, parameter in model.named_parameters()
        if is_mixing(name) and parameter.grad is not None
    ]
    return float(torch.stack(norms).norm()) if norms else None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Also of one that is sharded over processes; all of them must ask."""
    if hasattr(tensor, "ds_id"):  # DeepSpeed's ZeRO, third stage
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
