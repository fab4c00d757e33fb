"""
Makes a plain IHA folder of what a run leaves: a checkpoint of any kind, or the adapter of `train: lora`.

    python examples/merge.py run/checkpoint-100 DESTINATION
    python examples/merge.py run DESTINATION

It reads the recipe.json of the run. Start it where the run was started if the model is named there by a relative path.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate.utils import merge_fsdp_weights
from peft import AutoPeftModelForCausalLM, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import modeling_iha  # noqa: F401  (registers the Auto classes)
from training_iha import lora_config
from training_iha.checkpoints import SHARDS, form_of


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a run's output_dir, or a checkpoint in it")
    parser.add_argument("destination", type=Path, help="must not exist yet")
    args = parser.parse_args()
    if args.destination.exists():
        parser.error(f"{args.destination} exists.")
    run = run_of(args.folder.resolve())
    partial = args.destination.with_name(args.destination.name + ".partial")
    trained(args.folder, run).save_pretrained(partial)
    AutoTokenizer.from_pretrained(run).save_pretrained(partial)
    partial.rename(args.destination)
    print(args.destination)


def run_of(folder: Path) -> Path:
    """The output_dir that a folder is, or is in."""
    found = next((place for place in (folder, folder.parent) if (place / "recipe.json").exists()), None)
    if found is None:
        raise FileNotFoundError(f"recipe.json is neither in {folder} nor above it: it is no folder of a run.")
    return found


def trained(folder: Path, run: Path) -> PreTrainedModel:
    """The model of a checkpoint: in float32 where an adapter is merged into it, else in its own dtype."""
    recipe = json.loads((run / "recipe.json").read_text(encoding="utf-8"))
    lora = recipe["train"] == "lora"
    dtype = torch.float32 if lora else getattr(torch, recipe["dtype"])
    if form_of(folder) == "SHARDED_STATE_DICT":
        with TemporaryDirectory(dir=folder) as merged:
            merge_fsdp_weights(folder / SHARDS, merged)
            state = load_file(Path(merged) / "model.safetensors")
        config = AutoConfig.from_pretrained(recipe["model"] if lora else run)  # a run may change it
        model = AutoModelForCausalLM.from_pretrained(recipe["model"], config=config, dtype=dtype)
        if lora:
            model = get_peft_model(model, lora_config(recipe["lora_rank"], recipe["lora_alpha"]))
            set_peft_model_state_dict(model, state)
        else:
            model.load_state_dict(state)
    else:
        auto = AutoPeftModelForCausalLM if lora else AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=dtype)
        model.config.use_cache = True  # the Trainer turns it off in its checkpoints
    return model.merge_and_unload() if lora else model


if __name__ == "__main__":
    main()
