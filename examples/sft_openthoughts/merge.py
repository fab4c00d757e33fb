"""
Makes a plain IHA folder of what train.py leaves: a checkpoint of any kind, or the adapter of `train: lora`.

    python merge.py run/checkpoint-100 DESTINATION
    python merge.py run DESTINATION

It reads the run's recipe.json. Start it where the run was started if the model is named there by a relative path.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate.utils import merge_fsdp_weights
from openthoughts import training_template
from peft import AutoPeftModelForCausalLM, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import modeling_iha  # noqa: F401  (registers the Auto classes)
from training_iha import lora_config
from training_iha.checkpoints import SHARDS, fsdp_form


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a run's output_dir, or a checkpoint in it")
    parser.add_argument("destination", type=Path, help="must not exist yet")
    args = parser.parse_args()
    if args.destination.exists():
        parser.error(f"{args.destination} exists.")
    recipe = recipe_of(args.folder.resolve())
    tokenizer = AutoTokenizer.from_pretrained(recipe["model"])
    training_template(tokenizer, recipe["training_template"])  # which the tokenizer of a base model is given
    partial = args.destination.with_name(args.destination.name + ".partial")
    trained(args.folder, recipe).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(args.destination)
    print(args.destination)


def recipe_of(folder: Path) -> dict:
    for place in (folder, folder.parent):
        if (place / "recipe.json").exists():
            return json.loads((place / "recipe.json").read_text(encoding="utf-8"))
    raise FileNotFoundError(f"recipe.json is neither in {folder} nor above it: it is no folder of train.py.")


def trained(folder: Path, recipe: dict) -> PreTrainedModel:
    """The model of a checkpoint: in float32 where an adapter is merged into it, else in its own dtype."""
    lora = recipe["train"] == "lora"
    dtype = torch.float32 if lora else getattr(torch, recipe["dtype"])
    if fsdp_form(folder) == "SHARDED_STATE_DICT":
        model = AutoModelForCausalLM.from_pretrained(recipe["model"], dtype=dtype)
        with TemporaryDirectory(dir=folder) as merged:
            merge_fsdp_weights(folder / SHARDS, merged)
            state = load_file(Path(merged) / "model.safetensors")
        if lora:
            model = get_peft_model(model, lora_config(recipe["lora_rank"], recipe["lora_alpha"]))
            set_peft_model_state_dict(model, state)
        else:
            model.load_state_dict(state)
    else:
        auto = AutoPeftModelForCausalLM if lora else AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=dtype)
    return model.merge_and_unload() if lora else model


if __name__ == "__main__":
    main()
