"""Where an interrupted run goes on."""

import json
import re
from pathlib import Path


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """
    The newest `checkpoint-N` of the Trainer that was written to its end, or None. The Trainer writes
    `trainer_state.json` last, so a process that was killed while it saved leaves a folder without a whole one.
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
