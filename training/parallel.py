"""What context parallelism would leak: its ring knows causality and nothing else, and drops every mask."""

import torch


class WithoutLeaks:
    """Mixed into a Trainer: refuses batches that a ring would train with documents that see each other, or padding."""

    def training_step(self, model, inputs, *args, **kwargs):
        parallelism = self.accelerator.parallelism_config
        if parallelism is not None and parallelism.cp_enabled:
            refuse_leaks(inputs)
        return super().training_step(model, inputs, *args, **kwargs)


def refuse_leaks(inputs: dict[str, torch.Tensor]):
    """
    Args:
        inputs: a whole batch, before it is spread over the ring. Padding on the right is fine: no token sees it.

    Raises:
        ValueError: it is packed, or padded elsewhere than on the right.
    """
    advice = "Give whole documents of one length, padded on the right, or set cp_size=1."
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is not None and bool((positions.diff(dim=-1) != 1).any()):
        raise ValueError(f"position_ids start over within a row: in a ring its documents see each other. {advice}")
    if any(name.startswith("cu_seq_lens") for name in inputs):
        raise ValueError(f"cu_seq_lens_q packs documents: in a ring they see each other. {advice}")
    if mask is not None and (mask.ndim != 2 or bool((mask.diff(dim=-1) > 0).any())):
        raise ValueError(f"attention_mask hides tokens that others follow: in a ring they are seen. {advice}")
