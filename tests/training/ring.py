"""
Accelerate's context parallelism on CPUs, which it refuses there: torch's own ring algorithm over the CPU's attention
kernel, so that sharding, load balancing and causality are the real ones. The program of the processes of
test_context_parallel.py:

    torchrun --nproc_per_node 2 ring.py FOLDER FIELDS_OF_THE_CONFIG [packed]    (fields as JSON)
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed.tensor.experimental._context_parallel._attention as ring
from accelerate.state import PartialState
from accelerate.utils import DistributedType, ParallelismConfig
from models import tiny_config
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from modeling_iha import IHAForCausalLM
from training_iha.parallel import WithoutLeaks

kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
plain_sdpa = torch.nn.functional.scaled_dot_product_attention
TOKENS, STEPS = 32, 3


class RingAttention(torch.autograd.Function):
    """query, key, value [B, heads, N / processes, d]."""

    @staticmethod
    def forward(ctx, query, key, value, is_causal, scale, group):
        output, logsumexp = ring._templated_ring_attention(
            group, 2, kernel, query=query, key=key, value=value, is_causal=is_causal, scale=scale
        )
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.is_causal, ctx.scale, ctx.group = is_causal, scale, group
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, output, logsumexp = ctx.saved_tensors

        def one_step(query, key, value, out, logsumexp, is_causal, grad_out, **_):
            return kernel_backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=ctx.scale)

        grads = ring._templated_ring_attention_backward(
            ctx.group,
            2,
            one_step,
            grad_out=grad.contiguous(),
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=output,
            logsumexp=logsumexp,
            is_causal=ctx.is_causal,
        )
        return *grads[:3], None, None, None


def enable(seq_dim, mesh):
    def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        assert attn_mask is None and is_causal and dropout_p == 0.0
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = (heads.repeat_interleave(groups, 1) for heads in (key, value))
        calls.append(query.shape[2])
        return RingAttention.apply(query, key, value, is_causal, scale, mesh.get_group())

    torch.nn.functional.scaled_dot_product_attention = sdpa


def disable():
    torch.nn.functional.scaled_dot_product_attention = plain_sdpa


calls = []


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.steps.append({n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in grads.items()})


class RingTrainer(WithoutLeaks, Trainer):
    pass


def main():
    folder, fields = Path(sys.argv[1]), json.loads(sys.argv[2])
    processes = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)
    more = {}
    if processes > 1:
        ring._enable_context_parallel_dispatcher_impl = enable
        ring._disable_context_parallel_dispatcher_impl = disable
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # on CPUs FSDP would become DDP
        wrap = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False}
        more = {
            "parallelism_config": ParallelismConfig(cp_size=processes),
            "fsdp": True,
            "fsdp_config": wrap,
        }
    args = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **more,
    )
    if processes > 1:
        _ = args.device
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    torch.manual_seed(0)
    model = IHAForCausalLM._from_config(tiny_config(**fields), attn_implementation="sdpa")
    ids = torch.randint(1, 128, (8, TOKENS), generator=torch.Generator().manual_seed(1))
    gradients = Gradients()
    data = [{"input_ids": row.clone(), "labels": row.clone()} for row in ids]
    if len(sys.argv) > 3:  # packed in halves
        positions = torch.arange(TOKENS // 2).repeat(2)
        data = [{**row, "position_ids": positions} for row in data]
    trainer = RingTrainer(model, args, train_dataset=data, callbacks=[gradients])
    trainer.train()
    if int(os.environ.get("RANK", 0)) == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        torch.save({"losses": losses, "gradients": gradients.steps, "calls": calls}, folder / "result.pt")


if __name__ == "__main__":
    main()
