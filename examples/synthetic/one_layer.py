"""The models: one layer that sees everything, with an attention of its own; everything else is the same."""

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel

from modeling_iha import IHAConfig  # and registers the Auto classes

sys.path.append(str(Path(__file__).parents[1] / "baselines"))
from flops import flops_per_token
from talking_heads import TalkingHeadsConfig

VARIANTS = {
    "MHA": {"num_pseudo_heads": 1},
    "IHA, exact": {"mixing_init": "exact"},
    "IHA, identity": {"mixing_init": "identity"},
    "IHA, normal": {"mixing_init": "normal"},
    "Talking-Heads": None,
}


def configuration(variant: str, hidden_size: int, heads: int, pseudo_heads: int, vocabulary: int):
    """The configuration of one of `VARIANTS`."""
    fields = dict(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        initializer_range=0.1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    if VARIANTS[variant] is None:
        return TalkingHeadsConfig(**fields)
    return IHAConfig(**{**fields, "num_pseudo_heads": pseudo_heads, "is_causal": False, **VARIANTS[variant]})


def layer_flops(config, tokens: int) -> float:
    """FLOPs of the layer's forward per token of a row of N: what is read out, and how, is not counted."""
    flops = flops_per_token(config, tokens, is_causal=False)
    return flops["total"] - flops["head"]


class Reasoner(nn.Module):
    """
    A token's id and its two indices, each a learned embedding, through the layer to the logits of its label. There is
    no RoPE (all positions are 0): the indices say where a token is.
    """

    def __init__(self, config, indices: int, classes: int):
        super().__init__()
        self.backbone = AutoModel.from_config(config)
        self.first = nn.Embedding(indices, config.hidden_size)
        self.second = nn.Embedding(indices, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, classes)
        for embedding in (self.first, self.second):
            nn.init.normal_(embedding.weight, std=config.initializer_range)

    def forward(
        self, ids: torch.Tensor, first: torch.Tensor, second: torch.Tensor, real: torch.Tensor
    ) -> torch.Tensor:
        """Each [B, N] -> logits [B, N, classes]; what padding has is of no meaning."""
        embedded = self.backbone.embed_tokens(ids) + self.first(first) + self.second(second)
        # In four dimensions it is taken as it is: positions of 0 say nothing of packed documents then.
        mask = embedded.new_zeros(len(ids), 1, ids.shape[1], ids.shape[1])
        mask = mask.masked_fill(~real[:, None, None, :], torch.finfo(mask.dtype).min)
        output = self.backbone(
            inputs_embeds=embedded, attention_mask=mask, position_ids=torch.zeros_like(ids), use_cache=False
        )
        return self.head(output.last_hidden_state)
