"""TRL's SFTTrainer, which is Transformers' Trainer, with what IHA adds: a learning rate, and what is logged."""

import resource
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers import TrainerCallback
from trl import SFTTrainer

from .card import model_card
from .mixing import give_own_rate
from .monitor import distances, gradient_norm
from .parallel import WithoutLeaks


class IHATrainer(WithoutLeaks, SFTTrainer):
    """
    Args:
        mixing_learning_rate: peak rate of the mixing tensors, which get no weight decay; the others' is
            `args.learning_rate`. Both follow the same schedule.
        args, kwargs: of `SFTTrainer`, but for `optimizers`.

    Every log has, beside the Trainer's own entries: `apart/q_mix`, `apart/k_mix`, `apart/v_mix`, `apart/collapse`
    (`monitor.distances`), `mixing_grad_norm` (after clipping, as the optimizer sees it; not under DeepSpeed, which has
    spent the gradients by then), `tokens_per_second` (of all processes, padding not counted, since the last log, with
    the time of evaluations) and `peak_memory_gb` (of this process, on its device).
    """

    def __init__(self, *args, mixing_learning_rate: float, **kwargs):
        if kwargs.get("optimizers") is not None:
            raise ValueError("optimizers must be left out: mixing_learning_rate would not count.")
        self.mixing_learning_rate = mixing_learning_rate
        super().__init__(*args, **kwargs)
        if self.get_sp_size() > 1 and (self.args.packing or self.args.padding_free):
            raise ValueError(
                f"packing={self.args.packing}, padding_free={self.args.padding_free} must be False with sp_size > 1, "
                "which cannot spread what TRL's collator gives beside the rows. Rows of several documents with "
                "position_ids that start over can be spread: examples/long_context makes them."
            )
        self.progress = _Progress()
        self.add_callback(self.progress)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            super().create_optimizer(model)
            give_own_rate(self.optimizer, self.model if model is None else model, self.mixing_learning_rate)
        return self.optimizer

    def _run_epoch(self, *args, **kwargs):
        # A checkpoint of the last step, gone on with: the Trainer would make one more.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # trainer_state.json comes next, and marks a whole checkpoint

    def training_step(self, model, inputs, *args, **kwargs):
        self.progress.count(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def create_model_card(self, model_name=None, dataset_name=None, tags=()):
        if self.is_world_process_zero():
            base, folder = self.model.config._name_or_path, Path(self.args.output_dir).absolute()
            card = model_card(
                self.hub_model_id or folder.name,
                self.model.config,
                None if not base or Path(base).exists() else base,
                is_peft_model(self.model),
                dataset_name,
                [tags] if isinstance(tags, str) else tags or [],
            )
            card.save(folder / "README.md")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= {f"apart/{kind}": distance for kind, distance in distances(self.model).items()}
            if self.progress.gradient_norm is not None:
                logs["mixing_grad_norm"] = self.progress.gradient_norm
            copies = self.get_cp_size() * self.get_tp_size()  # processes with the same rows
            logs["tokens_per_second"] = self.progress.tokens_per_second(self.accelerator) / copies
            logs["peak_memory_gb"] = peak_memory_gb(self.args.device)
        super().log(logs, start_time)


class _Progress(TrainerCallback):
    """What is lost by the time of a log: the gradients, how many tokens there were, and when the last log was."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.time, self.tokens, self.gradient_norm = time.perf_counter(), 0, None

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradient_norm = gradient_norm(model)

    def count(self, inputs: dict[str, torch.Tensor]):
        mask = inputs.get("attention_mask")
        self.tokens += inputs["input_ids"].numel() if mask is None else mask.sum()

    def tokens_per_second(self, accelerator: Accelerator) -> float:
        tokens = torch.as_tensor(self.tokens, device=accelerator.device)
        rate = float(accelerator.reduce(tokens)) / (time.perf_counter() - self.time)
        self.time, self.tokens = time.perf_counter(), 0
        return rate


def peak_memory_gb(device: torch.device) -> float:
    """The most memory that this process has had, in 10^9 bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
