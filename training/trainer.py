"""TRL's SFTTrainer, which is Transformers' Trainer, with what IHA adds: a learning rate, and what is logged."""

import resource
import sys
import time

import torch
from transformers import TrainerCallback
from trl import SFTTrainer

from .mixing import parameter_groups
from .monitor import distances, gradient_norm


class IHATrainer(SFTTrainer):
    """
    Args:
        mixing_learning_rate: peak rate of the mixing tensors, which get no weight decay; the others' is
            `args.learning_rate`. Both follow the same schedule.
        args, kwargs: of `SFTTrainer`.

    Every log has, beside the Trainer's own entries: `apart/q_mix`, `apart/k_mix`, `apart/v_mix`, `apart/collapse`
    (`monitor.distances`), `mixing_grad_norm` (after clipping, as the optimizer sees it), `tokens_per_second` (of all
    processes, since the last log) and `peak_memory_gb` (of this process, on its device).
    """

    def __init__(self, *args, mixing_learning_rate: float, **kwargs):
        self.mixing_learning_rate = mixing_learning_rate
        super().__init__(*args, **kwargs)
        self.progress = _Progress()
        self.add_callback(self.progress)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            model = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(model))
            optimizer, kwargs = self.get_optimizer_cls_and_kwargs(self.args, model)
            groups = parameter_groups(model, decayed, self.args.weight_decay, self.mixing_learning_rate)
            self.optimizer = optimizer(groups, **kwargs)
        return self.optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= {f"apart/{kind}": distance for kind, distance in distances(self.model).items()}
            logs["mixing_grad_norm"] = self.progress.gradient_norm
            logs["tokens_per_second"] = self.progress.tokens_per_second(self._total_train_tokens)
            logs["peak_memory_gb"] = peak_memory_gb(self.args.device)
        super().log(logs, start_time)


class _Progress(TrainerCallback):
    """What is lost by the time of a log: the gradients, and when the last log was."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.time, self.tokens, self.gradient_norm = time.perf_counter(), 0, None

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        step = state.global_step + 1
        if step % state.logging_steps == 0 or (step == 1 and args.logging_first_step):
            self.gradient_norm = gradient_norm(model)

    def tokens_per_second(self, tokens: int) -> float:
        now = time.perf_counter()
        rate = (tokens - self.tokens) / (now - self.time)
        self.time, self.tokens = now, tokens
        return rate


def peak_memory_gb(device: torch.device) -> float:
    """The most memory that this process has had, in 10^9 bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
