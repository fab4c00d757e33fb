"""Saving over a model: it is set aside first, so that a save cut off half-way leaves no mixture of two models."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = "config.json"
ASIDE = ".set-aside"


@contextmanager
def set_aside(folder: str | os.PathLike) -> Iterator[None]:
    """
    Moves the config and the weights in `folder` into a hidden one inside it while a model is saved there. They are
    put back where saving fails, and deleted when it is done; a process that is killed leaves them there, and a folder
    that Transformers refuses to load.
    """
    folder = Path(folder)
    aside = folder / ASIDE
    if not (folder / CONFIG).exists() and not (aside / CONFIG).exists():
        yield
        return
    if (folder / CONFIG).exists() and (aside / CONFIG).exists():
        _delete(_model_files(folder))  # what a save that was killed had written
    elif (folder / CONFIG).exists():
        shutil.rmtree(aside, ignore_errors=True)  # what it had no time to delete
    aside.mkdir(exist_ok=True)
    _move(_model_files(folder), aside)
    try:
        yield
    except BaseException:
        _delete(_model_files(folder))
        _move(reversed(_model_files(aside)), folder)
        aside.rmdir()
        raise
    _delete(_model_files(aside))
    shutil.rmtree(aside)


def _model_files(folder: Path) -> list[Path]:
    """The config first: without it nothing is loaded, and where it is tells at what point a process was killed."""
    return [*folder.glob(CONFIG), *sorted(folder.glob("model*.safetensors*"))]


def _move(files: Iterable[Path], folder: Path) -> None:
    for path in files:
        os.replace(path, folder / path.name)


def _delete(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink()
