"""Where an interrupted run goes on."""

import json
import re
from pathlib import Path

from transformers import Trainer

SHARDS = "pytorch_model_fsdp_0"


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


def fsdp_form(checkpoint: str | Path) -> str | None:
    """FSDP's `state_dict_type` of a checkpoint: "SHARDED_STATE_DICT", "FULL_STATE_DICT", or None without FSDP."""
    if (Path(checkpoint) / SHARDS).is_dir():
        return "SHARDED_STATE_DICT"
    return "FULL_STATE_DICT" if (Path(checkpoint) / "pytorch_model_fsdp.bin").exists() else None


def check_form(checkpoint: str | Path, trainer: Trainer):
    """
    Raises a ValueError where this Trainer could not read the checkpoint: FSDP writes others than one process and DDP
    do. The number of processes does not matter.
    """
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    old, new = fsdp_form(checkpoint), plugin and plugin.state_dict_type.name
    if old != new:
        old, new = (f"FSDP with {form}" if form else "no FSDP" for form in (old, new))
        raise ValueError(
            f"{checkpoint} is of a run under {old}; this one is under {new}. Launch it as before (the number of "
            "processes may differ), or make a model of it with examples/merge.py and train that anew."
        )
