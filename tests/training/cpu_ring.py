"""
Accelerate's context parallelism on CPUs, which it refuses there: torch's own ring algorithm over the CPU's attention
kernel, so that sharding, load balancing and causality are the real ones.
"""

import os

import torch
import torch.distributed.tensor.experimental._context_parallel._attention as ring
from accelerate.state import PartialState
from accelerate.utils import DistributedType

kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
plain_sdpa = torch.nn.functional.scaled_dot_product_attention
calls = []  # the lengths of the virtual sequences that it has seen


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


def use_cpu_ring():
    """To be called first of all."""
    ring._enable_context_parallel_dispatcher_impl = enable
    ring._disable_context_parallel_dispatcher_impl = disable
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    let_cpus_shard(PartialState(cpu=True))


def let_cpus_shard(_):
    """To be called again once `TrainingArguments.device` was read: on CPUs FSDP would become DDP without a word."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
