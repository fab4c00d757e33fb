"""
One optimiser step of a tiny IHA model of two layers, the paper's schedule, at growing lengths on a CPU: peak memory
should grow as N does, though the window grows with N and the vocabulary is SmolLM2's.

    python benchmarks/long_step.py

Each length runs in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time

import torch
from datasets import Dataset
from results_file import write
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig

from modeling_iha import IHAConfig, IHAForCausalLM, flop_matched_schedule
from training_iha import IHATrainer
from training_iha.trainer import peak_memory_gb

PSEUDO_HEADS, VOCABULARY = 2, 49152
LENGTHS = (8192, 16384, 32768, 65536)

COLUMNS = {
    "tokens": ("N", ""),
    "window": ("window, tokens", ""),
    "seconds": ("the step, s", ".0f"),
    "peak_gb": ("peak of the process, GB", ".2f"),
    "step_gb": ("of it the step, GB", ".2f"),
    "over_linear": ("the step / (N times that of N = 8192)", ".2f"),
    "logits_gb": ("for comparison: the logits alone, GB", ".1f"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, metavar="N", help=argparse.SUPPRESS)
    measured = parser.parse_args().measure
    if measured:
        print(json.dumps(measure(measured)))
        return
    rows = []
    for tokens in LENGTHS:
        print(f"N = {tokens}", file=sys.stderr)
        command = [sys.executable, __file__, "--measure", str(tokens)]
        row = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        )
        first = rows[0] if rows else row
        row["over_linear"] = row["step_gb"] / (first["step_gb"] * tokens / LENGTHS[0])
        rows.append(row)
    note = (
        "Two layers, hidden size 256, H 4, G 2, the first sliding with P = 2 and W = N / 8, the second full with "
        f"P = 1 (the paper's schedule in small), a vocabulary of {VOCABULARY:,}, batch 1, float32, AdamW, gradient "
        "checkpointing; one step of `IHATrainer`. Target: under 12 GB at N = 65,536, and linear from 8192 on."
    )
    write("long_step", rows, COLUMNS, note)


def measure(tokens: int) -> dict:
    schedule = flop_matched_schedule(num_hidden_layers=5, sequence_length=tokens, num_pseudo_heads=PSEUDO_HEADS)
    schedule = {key: value[-2:] if isinstance(value, list) else value for key, value in schedule.items()}
    torch.manual_seed(0)
    config = IHAConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=tokens,
        **schedule,
    )
    ids = torch.randint(VOCABULARY, (tokens,)).tolist()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), pad_token="a", eos_token="a"
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            max_length=None,
            max_steps=1,
            per_device_train_batch_size=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = IHATrainer(
            IHAForCausalLM(config),
            arguments,
            train_dataset=Dataset.from_dict({"input_ids": [ids], "labels": [ids]}),
            processing_class=tokenizer,
            mixing_learning_rate=1e-3,
        )
        before, start = peak_memory_gb(torch.device("cpu")), time.perf_counter()
        trainer.train()
        seconds, peak = time.perf_counter() - start, peak_memory_gb(torch.device("cpu"))
    return {
        "tokens": tokens,
        "window": schedule["sliding_window"],
        "seconds": seconds,
        "peak_gb": peak,
        "step_gb": peak - before,
        "logits_gb": tokens * VOCABULARY * 4 / 1e9,
    }


if __name__ == "__main__":
    main()
