"""
A few steps of training for each case, in a ring of CPU processes. Their program in test_context_parallel.py:

    python ring.py PROCESSES FOLDER CASES

CASES are fields of the configuration by name, as JSON, and maybe "packed": two documents in each row. The result, or
why it was refused, is in FOLDER/NAME.pt.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.utils import ParallelismConfig
from cpu_ring import calls, let_cpus_shard, use_cpu_ring
from forked import fork
from models import tiny_config
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from modeling_iha import IHAForCausalLM
from training_iha.parallel import WithoutLeaks

TOKENS, STEPS = 32, 3


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.steps.append({n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in grads.items()})


class RingTrainer(WithoutLeaks, Trainer):
    pass


def train(folder: Path, fields: dict, processes: int) -> dict:
    fields = dict(fields)
    is_packed = fields.pop("packed", False)
    more = {}
    if processes > 1:
        wrap = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False}
        more = {
            "parallelism_config": ParallelismConfig(cp_size=processes),
            "fsdp": True,
            "fsdp_config": wrap,
        }
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
        use_cpu=True,
        seed=0,
        **more,
    )
    if processes > 1:
        let_cpus_shard(args.device)
    torch.manual_seed(0)
    model = IHAForCausalLM._from_config(tiny_config(**fields), attn_implementation="sdpa")
    ids = torch.randint(1, 128, (8, TOKENS), generator=torch.Generator().manual_seed(1))
    gradients = Gradients()
    data = [{"input_ids": row.clone(), "labels": row.clone()} for row in ids]
    if is_packed:
        for row in data:
            row["position_ids"] = torch.arange(TOKENS) % (TOKENS // 2)
    trainer = RingTrainer(model, args, train_dataset=data, callbacks=[gradients])
    calls.clear()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "gradients": gradients.steps, "calls": list(calls)}


def main():
    processes, folder, cases = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    fork(processes)
    use_cpu_ring()
    for name, fields in cases.items():
        try:
            result = train(folder, fields, processes)
        except ValueError as error:
            result = {"refused": str(error)}
        if os.environ["RANK"] == "0":
            torch.save(result, folder / f"{name}.pt")


if __name__ == "__main__":
    main()
