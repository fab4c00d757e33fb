"""
Supervised fine-tuning of an IHA model on OpenThoughts.

    python train.py --config openthinker.yaml --model FOLDER
    accelerate launch train.py --config openthinker.yaml --model FOLDER

Every field of `Recipe` and of TRL's `SFTConfig` is a line of the YAML file or an argument; arguments win. The same
command again goes on from the last whole checkpoint in `output_dir`.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from openthoughts import load, tokenize, training_template
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from trl import SFTConfig, TrlParser

import modeling_iha  # noqa: F401  (registers the Auto classes)
from training_iha import IHATrainer, choose_trainable, last_complete_checkpoint, lora_config

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
        default=None, metadata={"help": "chat template file with generation marks, where TRL knows none"}
    )
    dtype: str = field(default="float32", metadata={"help": "of the weights; bf16: true computes in bfloat16 anyway"})
    attn_implementation: str = field(default="sdpa", metadata={"help": "sdpa, or flash_attention_2 on a GPU"})
    lora_rank: int = field(default=16, metadata={"help": "with train: lora"})
    lora_alpha: int = field(default=32, metadata={"help": "with train: lora"})


def main():
    parser = TrlParser((Recipe, SFTConfig), description=__doc__)
    recipe, config = parser.parse_args_and_config()
    check(config)
    run_recipe = check_same_run(recipe, config)

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
    checkpoint = last_complete_checkpoint(config.output_dir)
    if checkpoint:
        logger.warning(f"Going on from {checkpoint}.")
    # Not by evaluate() before train(): the Trainer would then train without synchronising processes.
    trainer.args.eval_on_start = evaluated is not None and checkpoint is None
    if trainer.is_world_process_zero():
        write_json(Path(config.output_dir) / "recipe.json", run_recipe)
    trainer.train(resume_from_checkpoint=checkpoint)
    if evaluated and not any(
        "eval_loss" in log and log["step"] == trainer.state.global_step for log in trainer.state.log_history
    ):
        trainer.evaluate()
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type(
            "FULL_STATE_DICT"
        )  # else nothing that loads is written
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        results = {
            "recipe": asdict(recipe),
            "examples": {"train": len(dataset), "eval": recipe.eval_examples, "left out as too long": too_long},
            "steps": trainer.state.global_step,
            "log": trainer.state.log_history,
        }
        write_json(Path(config.output_dir) / "results.json", results)
    if config.push_to_hub:
        trainer.push_to_hub()


def check(config: SFTConfig):
    """Raises a ValueError for what `SFTConfig` takes and this program would not heed."""
    unheeded = {
        "resume_from_checkpoint": "the same command goes on by itself",
        "model_init_kwargs": "the recipe has dtype and attn_implementation",
        "chat_template_path": "the recipe has training_template",
    }
    for name, instead in unheeded.items():
        if getattr(config, name) is not None:
            raise ValueError(f"{name}={getattr(config, name)!r} must be left out: {instead}.")
    if config.max_length is None:
        raise ValueError("max_length=None must be a number of tokens: longer examples are left out.")


def check_same_run(recipe: Recipe, config: SFTConfig) -> dict:
    """
    What decides the steps of this run. Raises a ValueError where the run in `output_dir` is another, for going on with
    it would silently be neither of the two.
    """
    file = Path(config.output_dir) / "recipe.json"
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
    now = {**asdict(recipe), **{name: getattr(config, name) for name in DECIDING}, "examples in a step": batch}
    now = json.loads(json.dumps(now, default=str))
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        changed = {name: (before.get(name), value) for name, value in now.items() if before.get(name) != value}
        if changed:
            name, (old, new) = next(iter(changed.items()))
            raise ValueError(
                f"{config.output_dir} holds a run with {name}={old!r}, not {new!r}. Name another output_dir, or "
                "remove that folder to start anew."
            )
    return now


# What of SFTConfig changes the steps of a run. How the batch is spread over processes does not.
DECIDING = (
    "max_length",
    "packing",
    "packing_strategy",
    "loss_type",
    "optim",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "weight_decay",
    "num_train_epochs",
    "max_steps",
    "max_grad_norm",
    "seed",
    "data_seed",
    "bf16",
    "fp16",
)


def write_json(file: Path, value):
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)


if __name__ == "__main__":
    main()
