"""What the mixing tensors of a layer say, in numbers."""

import re
from dataclasses import dataclass

import torch

TINY = torch.finfo(torch.float64).tiny  # where a tensor is zero
# PEFT puts modules of its own in between.
NAME = re.compile(r"\blayers\.(\d+)\.self_attn\.(?:mixer\.(?:.+\.)?(q_mix|k_mix|v_mix)|(collapse)\.(?:.+\.)?weight)$")


@dataclass(frozen=True)
class LayerStatistics:
    """
    Args:
        layer: its index.
        num_pseudo_heads: P.
        distance: of `q_mix`, `k_mix`, `v_mix` from copies of the heads, of `collapse` from reading the last
            pseudo-head alone: the Frobenius norm of the difference over that of what it differs from.
        distinct: effective number of distinct pseudo-heads in `q_mix`, `k_mix` and `v_mix`, 1 (all alike) to P (all at
            right angles, equally large): the exponential of the entropy of the squared singular values' shares, each
            pseudo-head being a row.
        collapse_mass: how much the collapse reads of each of the P pseudo-heads, as shares of its squared norm.
    """

    layer: int
    num_pseudo_heads: int
    distance: dict[str, float]
    distinct: dict[str, float]
    collapse_mass: list[float]


def by_layer(tensors: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """
    The mixing tensors among those of a model (a state dict, or a checkpoint's), as {layer: {kind: tensor}}: `q_mix`
    [P, H, H], `k_mix` and `v_mix` [P, G, G], `collapse` [H, P, H], all in float64. Layers with P = 1 have none.
    """
    layers = {}
    for name, tensor in tensors.items():
        if match := NAME.search(name):
            layer, *kinds = match.groups()
            kind = next(kind for kind in kinds if kind)
            layers.setdefault(int(layer), {})[kind] = tensor.detach().to("cpu", torch.float64)
    return dict(sorted(layers.items()))


def layer_statistics(layer: int, mixing: dict[str, torch.Tensor]) -> LayerStatistics:
    """The statistics of one entry of `by_layer`."""
    collapse = mixing["collapse"]
    heads, size = collapse.shape[:2]
    mixers = {kind: mixing[kind] for kind in ("q_mix", "k_mix", "v_mix")}
    plain = {
        kind: torch.eye(tensor.shape[-1], dtype=tensor.dtype).expand_as(tensor) for kind, tensor in mixers.items()
    }
    plain["collapse"] = torch.zeros_like(collapse)
    plain["collapse"][:, -1] = torch.eye(heads, dtype=collapse.dtype)
    mass = collapse.square().sum((0, 2))
    return LayerStatistics(
        layer=layer,
        num_pseudo_heads=size,
        distance={kind: float((mixing[kind] - plain[kind]).norm() / plain[kind].norm()) for kind in plain},
        distinct={kind: _effective_rank(tensor.flatten(1)) for kind, tensor in mixers.items()},
        collapse_mass=(mass / mass.sum().clamp(min=TINY)).tolist(),
    )


def _effective_rank(rows: torch.Tensor) -> float:
    shares = torch.linalg.svdvals(rows).square()
    return float(torch.special.entr(shares / shares.sum().clamp(min=TINY)).sum().exp())
