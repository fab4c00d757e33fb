"""
A sliding IHA layer at growing lengths, forward and backward: time and memory should grow as N does. Beside it the same
function with one dense mask of all virtual tokens, as far as memory allows.

    python benchmarks/windows.py

The layer has SmolLM2-135M's shape. Each figure is of a process of its own.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from results_file import write
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from modeling_iha import IHAConfig, IHAModel
from modeling_iha.mixing import mix_heads
from modeling_iha.virtual_masks import causal_mask, virtual_mask

WINDOW, PSEUDO_HEADS, ROUNDS = 512, 2, 3
LENGTHS = (4096, 8192, 16384)
DENSE_UP_TO = 8192

COLUMNS = {
    "tokens": ("N", ""),
    "seconds": ("blocks, s", ".2f"),
    "time_over_linear": ("time / (N times that of N = 4096)", ".2f"),
    "megabytes": ("blocks, peak MB", ".0f"),
    "memory_over_linear": ("memory / (N times that of N = 4096)", ".2f"),
    "dense_over_blocks_time": ("dense mask / blocks, time", ""),
    "dense_over_blocks_memory": ("dense mask / blocks, memory", ""),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs=2, metavar=("HOW", "N"), help=argparse.SUPPRESS)
    measured = parser.parse_args().measure
    if measured:
        print(json.dumps(measure(measured[0], int(measured[1]))))
        return
    rows = []
    for tokens in LENGTHS:
        row = {"tokens": tokens, **in_a_process("blocks", tokens)}
        scale = tokens / LENGTHS[0]
        row["time_over_linear"] = row["seconds"] / ((rows or [row])[0]["seconds"] * scale)
        row["memory_over_linear"] = row["megabytes"] / ((rows or [row])[0]["megabytes"] * scale)
        for key, name in (("seconds", "time"), ("megabytes", "memory")):
            row[f"dense_over_blocks_{name}"] = ""
            if tokens <= DENSE_UP_TO:
                row["dense"] = row.get("dense") or in_a_process("dense", tokens)
                row[f"dense_over_blocks_{name}"] = f"{row['dense'][key] / row[key]:.1f}"
        rows.append(row)
    note = (
        f"One sliding layer of SmolLM2-135M's shape (H 9, G 3, d 64, projections included), P = {PSEUDO_HEADS}, "
        f"W = {WINDOW}, batch 1, float32, forward and backward; median of {ROUNDS} rounds. Memory is what the layer "
        "adds to the process. Target: memory linear in N, time within 1.3 x linear."
    )
    write("windows", rows, COLUMNS, note)


def in_a_process(how: str, tokens: int) -> dict:
    print(f"{how}, N = {tokens}", file=sys.stderr)
    command = [sys.executable, __file__, "--measure", how, str(tokens)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(how: str, tokens: int) -> dict:
    torch.manual_seed(0)
    config = IHAConfig(
        vocab_size=8,
        hidden_size=576,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_pseudo_heads=PSEUDO_HEADS,
        sliding_window=WINDOW,
    )
    model = IHAModel(config)
    attention = model.layers[0].self_attn
    run = {"blocks": attention, "dense": lambda *args: (dense(attention, *args),)}[how]

    def step(tokens):
        x = torch.randn(1, tokens, config.hidden_size, requires_grad=True)
        tables = model.rotary_emb(x, torch.arange(tokens)[None])[str(PSEUDO_HEADS)]
        run(x, tables)[0].sum().backward()

    step(WINDOW + 1)  # what the first call of anything costs
    before = peak_megabytes()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        step(tokens)
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "megabytes": peak_megabytes() - before}


def dense(attention, x, tables):
    """The layer with one masked call, mask and all."""
    tokens = x.shape[1]
    mask = virtual_mask(causal_mask(tokens, tokens, 0, x.device), PSEUDO_HEADS, window=WINDOW)
    shape = (1, tokens, -1, attention.head_dim)
    query, key = apply_rotary_pos_emb(
        attention.q_proj(x).view(shape), attention.k_proj(x).view(shape), *tables, unsqueeze_dim=2
    )
    states = zip(attention.mixer(), (query, key, attention.v_proj(x).view(shape)), strict=True)
    query, key, value = (
        mix_heads(mix, heads).view(1, -1, heads.shape[2], heads.shape[3]).transpose(1, 2) for mix, heads in states
    )
    key, value = (heads.repeat_interleave(attention.num_key_value_groups, 1) for heads in (key, value))
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    return attention.o_proj(attention.collapse(output.reshape(shape)).flatten(2))


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
