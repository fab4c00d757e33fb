"""
FlashAttention where there is no GPU: a stand-in for the package's two functions, in plain PyTorch, called by
Transformers' own code around them. It says nothing of the kernels, only of what they are given.
"""

import itertools

import torch


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    """q [tokens, H, d], k and v [tokens, G, d]; causality and windows are aligned at the end of each sequence."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    output = []
    for (q_start, q_stop), (k_start, k_stop) in zip(pairs(cu_seqlens_q), pairs(cu_seqlens_k), strict=True):
        query, key = torch.arange(q_stop - q_start)[:, None], torch.arange(k_stop - k_start)
        query = query + len(key) - len(query)
        seen = torch.ones(len(query), len(key), dtype=torch.bool)
        if causal:
            seen &= key <= query
        if window_size[0] >= 0:
            seen &= key >= query - window_size[0]
        states = (x.transpose(0, 1)[None] for x in (q[q_start:q_stop], k[k_start:k_stop], v[k_start:k_stop]))
        result = torch.nn.functional.scaled_dot_product_attention(
            *states, attn_mask=seen, dropout_p=dropout_p, scale=softmax_scale, enable_gqa=True
        )
        output.append(result[0].transpose(0, 1))
    return torch.cat(output)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """q [B, N, H, d], k and v [B, K, G, d]."""
    lengths = [(0, q.shape[1]), (0, k.shape[1])]
    cu_q, cu_k = (torch.tensor(length, dtype=torch.int32) for length in lengths)
    rows = [
        flash_attn_varlen_func(*row, cu_q, cu_k, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size)
        for row in zip(q, k, v, strict=True)
    ]
    return torch.stack(rows)


def pairs(bounds):
    return list(itertools.pairwise(bounds.tolist()))
