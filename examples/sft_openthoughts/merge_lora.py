"""
Merges an adapter of `train: lora` into its model: a plain IHA folder, in float32.

    python merge_lora.py ADAPTER DESTINATION
"""

import argparse
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

import modeling_iha  # noqa: F401  (registers the Auto classes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", help="output_dir of the run")
    parser.add_argument("destination", type=Path, help="must not exist yet")
    args = parser.parse_args()
    if args.destination.exists():
        parser.error(f"{args.destination} exists.")
    model = AutoPeftModelForCausalLM.from_pretrained(args.adapter, dtype=torch.float32).merge_and_unload()
    partial = args.destination.with_name(args.destination.name + ".partial")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(args.adapter).save_pretrained(partial)
    partial.rename(args.destination)
    print(args.destination)


if __name__ == "__main__":
    main()
