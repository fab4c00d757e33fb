"""The attention patterns of one head: the P^2 between its pseudo-heads, and the one it would have without mixing."""

from dataclasses import dataclass

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from modeling_iha import IHAPreTrainedModel

LONGEST = 256  # tokens of a prompt: more than a figure shows


@dataclass(frozen=True)
class Patterns:
    """
    Args:
        layer, head: which.
        weights: [P (i), P (j), N, N], of pseudo-query i of a token at pseudo-key j of another; for each i all that a
            token gives sums to 1 over j and the last dimension.
        plain: [N, N], of the plain query and key of the head, on the same input of the layer; rows sum to 1.
    """

    layer: int
    head: int
    weights: torch.Tensor
    plain: torch.Tensor


@torch.no_grad()
def attention_patterns(model: IHAPreTrainedModel, input_ids: torch.Tensor, layer: int, head: int) -> Patterns:
    """
    Runs a model on one row of tokens and keeps what a head attends to.

    Args:
        model: it runs without dropout and with the eager implementation, the only one that gives weights, and is after
            that as it was.
        input_ids: [N].
        layer, head: of a layer with P > 1, or P = 1 (then `weights` is `plain`).

    Raises:
        ValueError: there is no such layer or head, or no tokens or more than a figure shows.
    """
    config = model.config
    for name, value, count in (("layer", layer, config.num_hidden_layers), ("head", head, config.num_attention_heads)):
        if not 0 <= value < count:
            raise ValueError(f"{name}={value} must be at least 0 and below {count}.")
    if not 0 < len(input_ids) <= LONGEST:
        raise ValueError(f"prompt: it has {len(input_ids)} tokens; 1 to {LONGEST} can be drawn.")
    attention = model.base_model.layers[layer].self_attn
    seen = {}

    def keep(module, args, kwargs, output):
        hidden_states = args[0] if args else kwargs["hidden_states"]
        seen.update(weights=output[1], plain=_plain(module, hidden_states, kwargs["position_embeddings"], head))

    handle = attention.register_forward_hook(keep, with_kwargs=True)
    implementation = config._attn_implementation
    training = {module: module.training for module in model.modules()}
    try:
        model.set_attn_implementation("eager")
        model.eval()
        model(input_ids=input_ids[None].to(model.device), use_cache=False)
    finally:
        handle.remove()
        model.set_attn_implementation(implementation)
        for module, was in training.items():
            module.training = was
    size, tokens = attention.num_pseudo_heads, len(input_ids)
    weights = seen["weights"][0, head].view(tokens, size, tokens, size).permute(1, 3, 0, 2)
    return Patterns(layer, head, weights.float().cpu(), seen["plain"].float().cpu())


def _plain(attention, hidden_states, position_embeddings, head: int) -> torch.Tensor:
    shape = (1, hidden_states.shape[1], -1, attention.head_dim)
    cos, sin, *_ = position_embeddings
    query, key = (project(hidden_states).view(shape) for project in (attention.q_proj, attention.k_proj))
    query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
    group = head // attention.num_key_value_groups
    logits = query[0, :, head] @ key[0, :, group].T * attention.scaling
    tokens = torch.arange(len(logits), device=logits.device)
    distance = tokens[:, None] - tokens
    if attention.is_causal:
        logits = logits.masked_fill(distance < 0, -torch.inf)
    if attention.sliding_window is not None:
        logits = logits.masked_fill(distance >= attention.sliding_window, -torch.inf)
    return logits.softmax(-1)
