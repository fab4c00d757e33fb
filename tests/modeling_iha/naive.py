"""
IHA attention in plain loops and float64, from the paper's definition: the truth that the fast code is held to.

One sequence, no batch, no cache, no tricks: each virtual token is mixed and turned on its own, each pair of virtual
tokens is looked at on its own.
"""

import math
from collections.abc import Callable

import torch


def turn(vector: torch.Tensor, position: float, inv_freq: torch.Tensor) -> torch.Tensor:
    """RoPE: channels i and i + d/2 are a complex number, turned by position * inv_freq[i]."""
    half = len(vector) // 2
    angle = position * inv_freq.double()
    real, imaginary = vector[:half], vector[half:]
    return torch.cat([real * angle.cos() - imaginary * angle.sin(), real * angle.sin() + imaginary * angle.cos()])


def phase(rope_phases: str, position: float, pseudo_head: int, size: int) -> float:
    return {
        "shared": position,
        "interleaved": position * size + pseudo_head,
        "fractional": position + pseudo_head / size,
    }[rope_phases]


def mixed(mix: torch.Tensor, heads: torch.Tensor, pseudo_head: int, head: int) -> torch.Tensor:
    total = torch.zeros(heads.shape[-1], dtype=torch.float64)
    for m in range(len(heads)):
        total += mix[pseudo_head, head, m] * heads[m]
    return total


def naive_iha(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    num_heads: int,
    num_key_value_heads: int,
    rope_phases: str,
    inv_freq: torch.Tensor,
    positions: list[float],
    sees: Callable[[int, int], bool],
    flat: bool = True,
    own_is_causal: bool = True,
) -> torch.Tensor:
    """
    Args:
        x: [N, hidden_size], float64.
        weights: the layer's parameters by name; without mixing tensors it is plain attention (P = 1).
        positions: of each token.
        sees: whether token n sees token m, beside flat causality.
        flat: whether a virtual token sees only those up to itself; else `sees` alone decides about other tokens,
        own_is_causal: and this whether it sees only those up to itself of its own token.

    Returns:
        [N, hidden_size]; the rows of tokens that see nothing are zero.
    """
    heads, groups, tokens = num_heads, num_key_value_heads, len(x)
    identity = {"q": torch.eye(heads)[None], "k": torch.eye(groups)[None], "v": torch.eye(groups)[None]}
    q_mix, k_mix, v_mix = (weights.get(f"mixer.{name}_mix", identity[name]).double() for name in "qkv")
    size = len(q_mix)
    collapse = weights.get("collapse.weight", torch.eye(heads)[:, None]).double()

    def project(name: str, count: int) -> torch.Tensor:
        bias = weights.get(f"{name}_proj.bias", torch.zeros(()))
        return (x @ weights[f"{name}_proj.weight"].double().T + bias.double()).view(tokens, count, -1)

    q, k, v = project("q", heads), project("k", groups), project("v", groups)
    virtual = [(n, j) for n in range(tokens) for j in range(size)]

    def at(n: int, j: int) -> float:
        return phase(rope_phases, positions[n], j, size)

    queries = {(n, j, h): turn(mixed(q_mix, q[n], j, h), at(n, j), inv_freq) for n, j in virtual for h in range(heads)}
    keys = {(n, j, g): turn(mixed(k_mix, k[n], j, g), at(n, j), inv_freq) for n, j in virtual for g in range(groups)}
    values = {(n, j, g): mixed(v_mix, v[n], j, g) for n, j in virtual for g in range(groups)}

    head_dim = q.shape[-1]
    attended = torch.zeros(tokens, size, heads, head_dim, dtype=torch.float64)
    for index, (n, i) in enumerate(virtual):
        before = virtual[: index + 1] if flat else virtual
        seen = [(m, j) for (m, j) in before if sees(n, m) and (m != n or j <= i or not own_is_causal)]
        for h in range(heads):
            g = h // (heads // groups)
            logits = [float(queries[n, i, h] @ keys[m, j, g]) / math.sqrt(head_dim) for m, j in seen]
            largest = max(logits, default=0.0)
            exponents = [math.exp(logit - largest) for logit in logits]
            for (m, j), exponent in zip(seen, exponents, strict=True):
                attended[n, i, h] += exponent / sum(exponents) * values[m, j, g]

    output = torch.zeros(tokens, heads, head_dim, dtype=torch.float64)
    for n in range(tokens):
        for h in range(heads):
            for j in range(size):
                for m in range(heads):
                    output[n, h] += collapse[h, j, m] * attended[n, j, m]
    bias = weights.get("o_proj.bias", torch.zeros(()))
    return output.flatten(1) @ weights["o_proj.weight"].double().T + bias.double()
