"""One layer of a model, run with everything a model does about masks and caches, and run by the naive reference."""

import inspect

import torch
from naive import naive_iha
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from modeling_iha import IHAConfig, IHAModel

# `past_key_values` up to Transformers 5.23 and `cache` from 5.24 on.
CACHE = next(name for name in ("cache", "past_key_values") if name in inspect.signature(Qwen2Model.forward).parameters)


class OneLayer:
    """A model of one layer with random tensors; what enters and leaves its attention is recorded."""

    def __init__(self, heads=(4, 2), head_dim=8, attention="sdpa", dtype=torch.float64, **fields):
        torch.manual_seed(0)
        self.heads = heads
        self.config = IHAConfig(
            vocab_size=8,
            hidden_size=head_dim * heads[0],
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=heads[0],
            num_key_value_heads=heads[1],
            mixing_init="normal",
            mixing_init_std=0.7,
            initializer_range=0.3,
            **fields,
        )
        self.model = IHAModel._from_config(self.config).to(dtype).eval()
        self.config = self.model.config
        self.config._attn_implementation = attention
        self.dtype = dtype
        self.model.layers[0].self_attn.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module, args, kwargs, output):
        self.entered.append(kwargs["hidden_states"])
        self.left.append(output[0])

    @torch.no_grad()
    def __call__(self, x, positions, mask=None, chunks=None, cache=None, **kwargs):
        """What enters the attention and what leaves it, each [B, N, hidden_size], run in chunks of these sizes."""
        self.entered, self.left = [], []
        start = 0
        for size in chunks or [x.shape[1]]:
            stop = start + size
            self.model(
                inputs_embeds=x[:, start:stop],
                position_ids=None if positions is None else positions[:, start:stop],
                attention_mask=mask[:, :stop] if isinstance(mask, torch.Tensor) and mask.ndim == 2 else mask,
                **({} if cache is None else {CACHE: cache}),
                use_cache=cache is not None,
                **kwargs,
            )
            start = stop
        return torch.cat(self.entered, 1), torch.cat(self.left, 1)

    def input(self, batch, tokens):
        return torch.randn(batch, tokens, self.config.hidden_size, dtype=torch.float64).to(self.dtype)

    def reference(self, entered, positions, sees, flat=None):
        """One row, by `naive_iha`."""
        is_causal = self.config.is_causal
        attention = self.model.layers[0].self_attn
        return naive_iha(
            entered.double(),
            dict(attention.state_dict()),
            *self.heads,
            self.config.rope_phases,
            self.model.rotary_emb.inv_freq,
            positions.tolist(),
            sees,
            flat=is_causal if flat is None else flat,
            own_is_causal=is_causal,
        )


def assert_close(result, expected, tolerance=1e-10):
    assert torch.isfinite(result).all()
    assert (result - expected).abs().max() <= tolerance * expected.abs().max()
