"""
A few steps of training for each case, plainly: sequence parallelism comes from Accelerate's configuration alone. The
program of the processes of test_ulysses.py:

    accelerate launch --config_file FILE ulysses.py FOLDER CASE...

A case is JSON: its name, the fields of the model's configuration, "rows" ("whole", "packed", or padded "left" or
"right"), and "plain" for Transformers' Trainer as it is. The result is in FOLDER/NAME.pt.
"""

import json
import os
import sys
from pathlib import Path

import torch
from models import tiny_config
from transformers import Trainer, TrainingArguments

from modeling_iha import IHAForCausalLM
from training_iha.parallel import WithoutLeaks

TOKENS, STEPS = 32, 3
IS_SPREAD = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"


class Recorded(Trainer):
    """Keeps the gradients of each step, as the optimizer gets them."""

    gradients = None

    def training_step(self, model, inputs, *args, **kwargs):
        if self.gradients is None:
            self.gradients = []
            if self.is_deepspeed_enabled:  # which steps within its backward
                from deepspeed.utils import safe_get_full_grad

                step = model.step
                model.step = lambda: (self.record(model.module, safe_get_full_grad), step())
            else:
                self.optimizer.optimizer.register_step_pre_hook(lambda *_: self.record(model, lambda p: p.grad))
        # On a CPU DeepSpeed leaves slices of rows, which the loss cannot flatten.
        inputs = {name: part.contiguous() for name, part in inputs.items()}
        return super().training_step(model, inputs, *args, **kwargs)

    def record(self, model, gradient):
        self.gradients.append({name: gradient(p).clone() for name, p in model.named_parameters()})


class Spread(WithoutLeaks, Recorded):
    pass


def data(rows: str) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(1, 128, (8, TOKENS), generator=torch.Generator().manual_seed(1))
    token, result = torch.arange(TOKENS), []
    for i, row in enumerate(ids):
        one = {"input_ids": row, "labels": row.clone(), "position_ids": token}
        if rows == "packed":  # the second document goes on over the ends of parts
            first = 5 + i
            one["position_ids"] = torch.cat([torch.arange(first), torch.arange(TOKENS - first)])
            one["labels"][first] = -100
        elif rows in ("left", "right"):
            padding = 3 * i  # up to more than a part
            real = token >= padding if rows == "left" else token < TOKENS - padding
            one["attention_mask"] = real.long()
            one["labels"][~real] = -100
            one["position_ids"] = (real.long().cumsum(0) - 1).clamp(min=0)
        result.append(one)
    return result


def untrained(fields: dict) -> IHAForCausalLM:
    torch.manual_seed(0)
    return IHAForCausalLM._from_config(tiny_config(**fields), attn_implementation="sdpa")


def train(folder: Path, model: IHAForCausalLM, rows: str = "whole", plain: bool = False) -> dict:
    args = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not IS_SPREAD,  # DeepSpeed goes its own way on CPUs
        seed=0,
        ddp_backend="gloo" if IS_SPREAD else None,  # without it Accelerate has one process on a CPU under DeepSpeed
    )
    trainer = (Recorded if plain else Spread)(model, args, train_dataset=data(rows))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "gradients": trainer.gradients}


def main():
    folder, cases = Path(sys.argv[1]), [json.loads(case) for case in sys.argv[2:]]
    torch.set_num_threads(1)
    if IS_SPREAD:
        import deepspeed
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        # Its kernel for CPUs takes minutes to build, and serves inference alone.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # All before ZeRO's third stage is known of, which would draw other numbers.
    models = [untrained(case.pop("fields")) for case in cases]
    for case, model in zip(cases, models, strict=True):
        name = case.pop("name")
        try:
            result = train(folder, model, **case)
        except ValueError as error:
            if not case.get("plain"):
                raise
            result = {"refused": str(error)}
        if int(os.environ.get("RANK", 0)) == 0:
            torch.save(result, folder / f"{name}.pt")
        if IS_SPREAD:
            parallel_state_sp._release_sequence_parallel_groups()  # there can be one model in a process


if __name__ == "__main__":
    main()
