"""RoPE at the phases of virtual tokens: a base turn that the cache holds, and a small second turn per pseudo-head."""

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from configuration_iha import IHAConfig


class IHARotaryEmbedding(LlamaRotaryEmbedding):
    """
    Llama's rotary tables for the base phase of each token, and those of the offsets of its pseudo-heads.

    RoPE turns all heads of a token alike, so the turn by n P + j is a turn by n P before mixing and one by j after it;
    keys are cached between the two, as G heads whatever P is.
    """

    def __init__(self, config: IHAConfig):
        super().__init__(config)
        self.rope_phases = config.rope_phases
        self.pseudo_head_counts = sorted({config.get_num_pseudo_heads(i) for i in range(config.num_hidden_layers)})

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        """
        Args:
            x: gives dtype and device of the tables.
            position_ids: [B or 1, N], positions of the tokens.

        Returns:
            For each P of the model's layers, as a string (DeepSpeed takes no other keys), the tuple (cos, sin), each
            [B or 1, N, d], of the base phase; where pseudo-heads have phases of their own, (cos, sin, offset_cos,
            offset_sin) with offsets as [P, d].
        """
        base = super().forward(x, position_ids) if self.rope_phases != "interleaved" else None
        tables = {}
        for count in self.pseudo_head_counts:
            turn = base or super().forward(x, position_ids * count)
            tables[str(count)] = turn + self._offsets(x, count)
        return tables

    def _offsets(self, x: torch.Tensor, num_pseudo_heads: int) -> tuple[torch.Tensor, ...]:
        if num_pseudo_heads == 1 or self.rope_phases == "shared":
            return ()
        dtype = torch.promote_types(x.dtype, torch.float32)
        offsets = torch.arange(num_pseudo_heads, dtype=dtype, device=x.device)
        if self.rope_phases == "fractional":
            offsets = offsets / num_pseudo_heads
        angles = (offsets[:, None] * self.inv_freq.to(x.device, dtype)).repeat(1, 2)
        # A rotation only: attention_scaling of YaRN and others is in the base turn already.
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def _apply(self, fn, recurse=True):
        # In bfloat16 the frequencies would turn position 65535 anywhere, so a cast of the model leaves them alone.
        kept = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            if getattr(self, name).dtype != buffer.dtype:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self
