"""
Supervised fine-tuning of an IHA model on OpenThoughts.

    python train.py --config openthinker.yaml --model FOLDER
    accelerate launch train.py --config openthinker.yaml --model FOLDER

Every field of `Recipe` and of TRL's `SFTConfig` is a line of the YAML file or an argument; arguments win. The same
command again goes on from the last whole checkpoint in `output_dir`.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from openthoughts import load, tokenize, training_template
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from trl import SFTConfig, TrlParser

import modeling_iha  # noqa: F401  (registers the Auto classes)
from training_iha import IHATrainer, check_choices, choose_trainable, lora_config, refuse_unheeded, run

logger = logging.get_logger("sft_openthoughts")


@dataclass
class Recipe:
    model: str = field(metadata={"help": "an IHA folder or Hub id; `iha convert` makes one of a Llama checkpoint"})
    dataset: str = field(
        metadata={"help": "OpenThoughts-114k, OpenThoughts2-1M, OpenThoughts3-1.2M, a Hub id, or a folder"}
    )
    train: str = field(default="full", metadata={"help": "what is trained", "choices": ["full", "lora", "mixing"]})
    mixing_learning_rate: float = field(default=1e-3, metadata={"help": "peak rate of the mixing tensors"})
    eval_examples: int = field(default=0, metadata={"help": "examples kept from training for the evaluations"})
    training_template: str | None = field(
        default=None, metadata={"help": "chat template with generation marks, where neither TRL nor templates/ has it"}
    )
    dtype: str = field(default="float32", metadata={"help": "of the weights; bf16: true computes in bfloat16 anyway"})
    attn_implementation: str = field(default="sdpa", metadata={"help": "sdpa, or flash_attention_2 on a GPU"})
    lora_rank: int = field(default=16, metadata={"help": "with train: lora"})
    lora_alpha: int = field(default=32, metadata={"help": "with train: lora"})


def main():
    parser = TrlParser((Recipe, SFTConfig), description=__doc__)
    recipe, config = parser.parse_args_and_config()
    check_choices(recipe)
    check(recipe, config)

    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    template = training_template(tokenizer, recipe.training_template)
    with config.main_process_first(desc="tokenizing"):
        dataset, too_long = tokenize(
            load(recipe.dataset), tokenizer, template, config.max_length, config.dataset_num_proc
        )
    logger.warning(f"{too_long} of {len(dataset) + too_long} examples exceed {config.max_length} tokens: left out.")
    evaluated = None
    if recipe.eval_examples:
        if recipe.eval_examples >= len(dataset):
            raise ValueError(f"eval_examples={recipe.eval_examples} must be less than the {len(dataset)} examples.")
        split = dataset.train_test_split(test_size=recipe.eval_examples, seed=config.seed)
        dataset, evaluated = split["train"], split["test"]

    model = AutoModelForCausalLM.from_pretrained(
        recipe.model, dtype=getattr(torch, recipe.dtype), attn_implementation=recipe.attn_implementation
    )
    choose_trainable(model, recipe.train)
    trainer = IHATrainer(
        model,
        config,
        train_dataset=dataset,
        eval_dataset=evaluated,
        processing_class=tokenizer,
        peft_config=lora_config(recipe.lora_rank, recipe.lora_alpha) if recipe.train == "lora" else None,
        mixing_learning_rate=recipe.mixing_learning_rate,
    )
    examples = {"train": len(dataset), "eval": recipe.eval_examples, "left out as too long": too_long}
    run(trainer, {**asdict(recipe), "training_template": template}, examples)


def check(recipe: Recipe, config: SFTConfig):
    """Raises a ValueError for what `SFTConfig` takes and this program would not heed, or what would not load."""
    instead = {
        "resume_from_checkpoint": "the same command goes on by itself",
        "model_init_kwargs": "the recipe has dtype and attn_implementation",
        "chat_template_path": "the recipe has training_template",
    }
    refuse_unheeded(config, instead)
    if config.max_length is None:
        raise ValueError("max_length=None must be a number of tokens: longer examples are left out.")
    if config.push_to_hub and recipe.train == "lora" and Path(recipe.model).exists():
        raise ValueError(
            f"model={recipe.model!r} must be a Hub id to push an adapter, which names its model: push the model first."
        )


if __name__ == "__main__":
    main()
