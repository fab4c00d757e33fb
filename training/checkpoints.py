"""Where an interrupted run goes on."""

import json
import re
from pathlib import Path

from transformers import Trainer

SHARDS, DEEPSPEED = "pytorch_model_fsdp_0", "DeepSpeed"


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """
    The newest `checkpoint-N` of `IHATrainer` that was written to its end, or None. `trainer_state.json` comes last,
    so processes that were killed while they saved leave a folder without a whole one.
    """
    found = []
    for folder in Path(output_dir).glob("checkpoint-*"):
        number = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if number and _is_whole(folder / "trainer_state.json", int(number[1])):
            found.append((int(number[1]), str(folder)))
    return max(found)[1] if found else None


def _is_whole(state: Path, step: int) -> bool:
    try:
        return json.loads(state.read_text(encoding="utf-8"))["global_step"] == step
    except (FileNotFoundError, ValueError, KeyError):
        return False


def form_of(checkpoint: str | Path) -> str | None:
    """What wrote a checkpoint: FSDP, as its `state_dict_type`, "DeepSpeed", or None for one process or DDP."""
    folder = Path(checkpoint)
    if (folder / SHARDS).is_dir():
        return "SHARDED_STATE_DICT"
    if (folder / "pytorch_model_fsdp.bin").exists():
        return "FULL_STATE_DICT"
    return DEEPSPEED if any(folder.glob("global_step*")) else None


def check_can_go_on(checkpoint: str | Path, trainer: Trainer):
    """
    Raises a ValueError where this Trainer could not go on with the checkpoint: FSDP and DeepSpeed write others than
    one process and DDP do (the number of processes does not matter), and with DeepSpeed's sequence parallelism
    Accelerate cannot skip what was trained on already.
    """
    advice = "make a model of it with examples/merge.py and train that anew."
    if trainer.get_sp_size() > 1:
        raise ValueError(
            f"{checkpoint} is there, but with sp_size={trainer.get_sp_size()} Accelerate cannot skip the rows before "
            f"it. Remove the folder to start anew, or {advice}"
        )
    new = None
    if trainer.is_fsdp_enabled:
        new = trainer.accelerator.state.fsdp_plugin.state_dict_type.name
    elif trainer.is_deepspeed_enabled:
        new = DEEPSPEED
    old = form_of(checkpoint)
    if old != new:
        raise ValueError(
            f"{checkpoint} is of a run under {old or 'neither FSDP nor DeepSpeed'}; this one is under "
            f"{new or 'neither'}. Launch it as before (the number of processes may differ), or {advice}"
        )
