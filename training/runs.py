"""One run from start to end: gone on with where it was stopped, evaluated, and left as a folder that loads."""

import json
from dataclasses import fields
from pathlib import Path

from accelerate.utils import gather_object, is_peft_model
from huggingface_hub import HfApi
from transformers import TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from modeling_iha.bundle import write_bundle

from .checkpoints import check_can_go_on, last_complete_checkpoint
from .trainer import IHATrainer

logger = logging.get_logger("training_iha")

# What of the arguments changes the steps of a run. How the batch is spread over processes does not.
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
    "optim_args",
    "neftune_noise_alpha",
    "label_smoothing_factor",
    "dataloader_drop_last",
    "assistant_only_loss",
    "completion_only_loss",
)


def check_choices(recipe):
    """Raises a ValueError where a field of a dataclass is none of its `choices`, which a YAML file gets past."""
    for field in fields(recipe):
        value, choices = getattr(recipe, field.name), field.metadata.get("choices")
        if choices and value not in choices:
            raise ValueError(f"{field.name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def refuse_unheeded(config: TrainingArguments, instead: dict[str, str]):
    """Raises a ValueError where an argument is given that the program would not heed. instead: what to do, by name."""
    for name, advice in instead.items():
        if getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)!r} must be left out: {advice}.")
    if config.push_to_hub and config.hub_strategy != "end":
        raise ValueError(
            f"hub_strategy={config.hub_strategy.value!r} must be 'end': a checkpoint alone need not load."
        )


def run(trainer: IHATrainer, recipe: dict, examples: dict[str, int]) -> None:
    """
    Trains from the last whole checkpoint in `output_dir`, if there is one; evaluates before the first step and after
    the last; leaves the model, whatever its sharding, as a plain folder, and `results.json` with the whole log. From
    the first step on the folder holds `recipe.json`, tokenizer, configuration and code: with them a checkpoint is a
    model. With `push_to_hub` all this, but no checkpoints, goes to the Hub at the end. A finished run stays as it is.

    Args:
        recipe: JSON values that decide the steps, beside those of `DECIDING`.
        examples: counts for `results.json`.

    Raises:
        ValueError: the run in `output_dir` is another, or cannot be gone on with (`checkpoints.check_can_go_on`).
    """
    config, folder = trainer.args, Path(trainer.args.output_dir)
    refuse_unheeded(config, {"save_only_model": "an interrupted run could not go on"})
    checkpoint, is_finished = last_complete_checkpoint(folder), (folder / "results.json").exists()
    if len(set(found := gather_object([(checkpoint, is_finished)]))) > 1:
        raise ValueError(f"output_dir={str(folder)!r} must be one folder for all machines: they find {found} there.")
    if is_finished and not (folder / "recipe.json").exists():
        raise ValueError(f"output_dir={str(folder)!r} holds the results.json of something else: name another folder.")
    deciding = _check_same_run(trainer, recipe)
    if is_finished:
        logger.warning(f"{folder} holds this run, finished: nothing is left to train.")
        _push(trainer)
        return
    if checkpoint:
        check_can_go_on(checkpoint, trainer)
        logger.warning(f"Going on from {checkpoint}.")
    trainer.model.config.use_cache = True  # the Trainer has turned it off, and would save it so
    if trainer.is_world_process_zero():
        _write_json(folder / "recipe.json", deciding)
        trainer.processing_class.save_pretrained(folder)
        if not is_peft_model(trainer.model):
            trainer.model.config.save_pretrained(folder)
            write_bundle(folder)  # a checkpoint's push takes the code from here
    # Not by evaluate() before train(): the Trainer would then train without synchronising processes.
    config.eval_on_start = trainer.eval_dataset is not None and checkpoint is None
    trainer.train(resume_from_checkpoint=checkpoint)
    state = trainer.state
    if trainer.eval_dataset is not None and not any(
        "eval_loss" in log and log["step"] == state.global_step for log in state.log_history
    ):
        trainer.evaluate()
    if trainer.is_fsdp_enabled:  # else nothing that loads is written
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    if trainer.is_deepspeed_enabled and config.bf16 and is_deepspeed_zero3_enabled():
        logger.warning("ZeRO-3 saves the model in bfloat16, the mixing tensors too.")
    trainer.save_model(_internal_call=True)  # without a push, which comes last
    trainer.save_state()
    if trainer.is_world_process_zero():
        results = {"recipe": recipe, "examples": examples, "steps": state.global_step, "log": state.log_history}
        _write_json(folder / "results.json", results)
    _push(trainer)


def _push(trainer: IHATrainer):
    """Pushes the folder as it is, where that is asked for. (The Trainer's own push would save all once more.)"""
    config = trainer.args
    if config.push_to_hub and trainer.is_world_process_zero():
        trainer.create_model_card()
        HfApi(token=config.hub_token).upload_folder(
            repo_id=trainer.hub_model_id,
            folder_path=config.output_dir,
            ignore_patterns=["_*", "checkpoint-*"],
            revision=config.hub_revision,
            commit_message="End of training",
        )


def _check_same_run(trainer: IHATrainer, recipe: dict) -> dict:
    """What decides the steps of this run. To go on with another one's would silently be neither of the two."""
    config = trainer.args
    now = {**recipe, **{name: getattr(config, name) for name in DECIDING}}
    now["examples in a step"] = trainer.get_total_train_batch_size(config)
    now = json.loads(json.dumps(now, default=str))
    file = Path(config.output_dir) / "recipe.json"
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


def _write_json(file: Path, value):
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)
