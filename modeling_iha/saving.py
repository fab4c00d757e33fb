"""Saving over a model: what is written replaces it when it is whole, so that no folder ever holds a mixture of two."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = "config.json"


@contextmanager
def staged(folder: str | os.PathLike, variant: str | None = None) -> Iterator[Path]:
    """
    Yields a hidden folder inside `folder` for a model to be saved in, and moves its files into place where that ends
    well. Where it fails all stays as it was; where the process is killed too, but for the instant of the moves, in
    which `folder` has no config and the new model lies in the two together.

    Args:
        folder: made where it is missing.
        variant: of the weights (`save_pretrained`); those of others stay.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as name:
        yield Path(name)
        new = {path.name: path for path in Path(name).iterdir()}
        config = new.pop(CONFIG, None)
        if config is not None:  # the process that writes, of several
            (folder / CONFIG).unlink(missing_ok=True)
            for path in folder.iterdir():
                if is_weights(path.name, variant) and path.name not in new:
                    path.unlink(missing_ok=True)
        for path in new.values():
            os.replace(path, folder / path.name)
        if config is not None:
            os.replace(config, folder / CONFIG)


def is_weights(name: str, variant: str | None) -> bool:
    """Whether a file is one of a model's weights: whole, a shard, their index, or the mixing of a conversion."""
    dotted = re.escape(f".{variant}") if variant else ""
    return bool(
        re.fullmatch(
            rf"model{dotted}(-\d{{5}}-of-\d{{5}}|-mixing)?\.safetensors|model\.safetensors\.index{dotted}\.json", name
        )
    )
