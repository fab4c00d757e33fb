"""One run from start to end: gone on with where it was stopped, evaluated, and left as a folder that loads."""

import json
from pathlib import Path

from accelerate.utils import is_peft_model
from transformers.utils import logging

from .checkpoints import check_form, last_complete_checkpoint
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
)


def run(trainer: IHATrainer, recipe: dict, examples: dict[str, int]) -> None:
    """
    Trains from the last whole checkpoint in `output_dir`, if there is one; evaluates before the first step and after
    the last; leaves the model, whatever its sharding, as a plain folder, and `results.json` with the whole log. From
    the first step on the folder holds `recipe.json`, tokenizer and configuration: with them a checkpoint is a model.

    Args:
        recipe: JSON values that decide the steps, beside those of `DECIDING`.
        examples: counts for `results.json`.

    Raises:
        ValueError: the run in `output_dir` is another, or its checkpoint of another kind (`checkpoints.check_form`).
    """
    config, folder = trainer.args, Path(trainer.args.output_dir)
    checkpoint = last_complete_checkpoint(folder)
    deciding = _check_same_run(trainer, recipe)
    if checkpoint:
        check_form(checkpoint, trainer)
        logger.warning(f"Going on from {checkpoint}.")
    trainer.model.config.use_cache = True  # the Trainer has turned it off, and would save it so
    if trainer.is_world_process_zero():
        _write_json(folder / "recipe.json", deciding)
        trainer.processing_class.save_pretrained(folder)
        if not is_peft_model(trainer.model):
            trainer.model.config.save_pretrained(folder)
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
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        results = {"recipe": recipe, "examples": examples, "steps": state.global_step, "log": state.log_history}
        _write_json(folder / "results.json", results)


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
