"""
Context parallelism and sequence parallelism drop every mask. Of the first, a ring that knows causality and nothing
else, what would leak is refused; the second gets the masks back.
"""

import torch

from .ulysses import transformers_attention, whole_rows


class WithoutLeaks:
    """
    Mixed into a Trainer: with Accelerate's `cp_size` > 1, refuses batches that a ring would train with documents that
    see each other, or padding; with `sp_size` > 1, attends over whole rows as one process does. Evaluation is not
    spread: each process has whole rows.
    """

    def training_step(self, model, inputs, *args, **kwargs):
        parallelism = self.accelerator.parallelism_config
        if parallelism is not None and parallelism.cp_enabled:
            refuse_leaks(inputs)
        if parallelism is not None and parallelism.sp_enabled:
            from deepspeed.runtime.sequence_parallel.parallel_state_sp import get_sequence_parallel_group

            inputs = self._prepare_inputs(inputs)  # on the device, where processes can talk
            with whole_rows(model, inputs, get_sequence_parallel_group()):
                return super().training_step(model, inputs, *args, **kwargs)
        return super().training_step(model, inputs, *args, **kwargs)

    def prediction_step(self, model, *args, **kwargs):
        with transformers_attention(self.model.config):
            return super().prediction_step(model, *args, **kwargs)

    def compute_loss(self, model, *args, **kwargs):
        result = super().compute_loss(model, *args, **kwargs)
        parallelism = self.accelerator.parallelism_config
        loss = result[0] if isinstance(result, tuple) else result
        if parallelism is not None and parallelism.sp_enabled and loss.requires_grad:
            # Transformers has added up its gradient over the processes of a row, where ZeRO adds up once more, or not.
            averages = model.zero_optimization_stage() == 3 and model.zero_reduce_scatter()
            if not averages:
                loss.register_hook(lambda grad: grad / parallelism.sp_size)
        return result


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
