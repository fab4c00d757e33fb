"""
What `iha plan` says of memory against what a training step takes: small models on a CPU, with the products in bfloat16
and TRL's chunked head, as on one GPU.

    python benchmarks/memory_plan.py

Measured is the peak of torch's allocations, as its profiler sees them: the resident size of a process would add the
libraries' own. Each figure is of a process of its own.
"""

import argparse
import json
import subprocess
import sys

import torch
from results_file import write
from torch.profiler import ProfilerActivity, profile, record_function
from trl.trainer.utils import add_fused_lm_head

from configuration_iha import flop_matched_schedule
from modeling_iha import IHAConfig, IHAForCausalLM
from training_iha.memory import Layout, moments

CASES = [
    (schedule, checkpointing, tokens)
    for schedule in ("P = 1", "P = 2", "hybrid")
    for checkpointing in (False, True)
    for tokens in (2048, 4096)
] + [(schedule, True, 8192) for schedule in ("P = 1", "hybrid")]
MARK = "gradients have left the head"

COLUMNS = {
    "schedule": ("layers", ""),
    "checkpointing": ("gradient checkpointing", ""),
    "tokens": ("N", ""),
    "measured": ("step, measured MB", ".0f"),
    "planned": ("planned MB", ".0f"),
    "ratio": ("planned / measured", ".2f"),
    "measured_layers": ("backward of the layers, measured MB", ".0f"),
    "planned_layers": ("planned MB", ".0f"),
    "ratio_layers": ("planned / measured", ".2f"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, metavar="CASE", help=argparse.SUPPRESS)
    case = parser.parse_args().measure
    if case is not None:
        print(json.dumps(measure(*CASES[case])))
        return
    rows = []
    for case, (schedule, checkpointing, tokens) in enumerate(CASES):
        print(f"{schedule}, N = {tokens}, checkpointing {checkpointing}", file=sys.stderr)
        command = [sys.executable, __file__, "--measure", str(case)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = {"schedule": schedule, "checkpointing": checkpointing, "tokens": tokens, **json.loads(output)}
        planned = moments(config(schedule, tokens), tokens, 1, Layout("alone", checkpointing=checkpointing))
        row["planned"] = max(sum(parts.values()) for parts in planned.values()) / 1e6
        row["planned_layers"] = sum(planned["layer"].values()) / 1e6
        row["ratio"] = row["planned"] / row["measured"]
        row["ratio_layers"] = row["planned_layers"] / row["measured_layers"]
        rows.append(row)
    worst = max((row[key] for row in rows for key in ("ratio", "ratio_layers")), key=lambda ratio: abs(ratio - 1))
    note = (
        "A model of 4 layers (hidden 512, intermediate 1408, H 8, G 4, d 64, vocabulary 1024), weights and AdamW in "
        "float32, batch 1; hybrid is the FLOP-matched schedule for that N, P = 2. Peaks of torch's allocations, "
        "weights, gradients and optimizer included; those of the layers are what is seen once gradients have left the "
        "head, whose tile of 268 MB a small model is dominated by. What the step has above the plan is the head's: on "
        "a CPU TRL folds a tile with float32 copies of it, on a GPU in one kernel, which is what is planned for. "
        f"Target: within 25 %; the worst ratio is {worst:.2f}."
    )
    write("memory_plan", rows, COLUMNS, note)


def config(schedule: str, tokens: int) -> IHAConfig:
    fields = {
        "P = 1": {"num_pseudo_heads": 1},
        "P = 2": {"num_pseudo_heads": 2},
        "hybrid": flop_matched_schedule(4, tokens, 2),
    }[schedule]
    return IHAConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        **fields,
    )


def measure(schedule: str, checkpointing: bool, tokens: int) -> dict:
    torch.manual_seed(0)
    model = IHAForCausalLM._from_config(config(schedule, tokens), attn_implementation="sdpa").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def mark(grad):
        with record_function(MARK):
            pass

    model.model.register_forward_hook(
        lambda module, args, output: output.last_hidden_state.register_hook(mark) and None
    )

    def step(tokens):
        ids = torch.randint(1024, (1, tokens))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids, fused_lm_head=True).loss
        loss.backward()
        optimizer.step()

    step(64)  # gradients and moments are there now, as in the second of several steps that accumulate
    stays = [tensor for p in model.parameters() for tensor in (p, p.grad, *optimizer.state[p].values())]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(tokens)
    events = profiler.profiler.kineto_results.events()
    marked = next(event.start_ns() for event in events if event.name() == MARK)
    peak = peak_layers = now = 0
    for time, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        now += size
        peak = max(peak, now)
        if time > marked:
            peak_layers = max(peak_layers, now)
    before = sum(tensor.nbytes for tensor in stays)
    return {"measured": (before + peak) / 1e6, "measured_layers": (before + peak_layers) / 1e6}


if __name__ == "__main__":
    main()
