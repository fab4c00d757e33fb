"""The folder that a conversion makes: it grows hidden beside its place and appears there whole, or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import CheckpointError, read_json

MARKER = ".made-by-iha-convert"  # in the hidden folder; no folder without it is ever emptied or taken over


class Workshop:
    """
    The hidden folder `.NAME.converting` beside a destination, held by one run at a time.

    `new` is where the destination grows; what an interrupted run left there is kept for the next one from the same
    origin. `scratch` is free for what a run needs on the way.
    """

    def __init__(self, destination: Path, overwrite: bool, model_type: str):
        self.destination, self.overwrite, self.model_type = destination, overwrite, model_type
        self.folder = workshop_folder(destination)
        self.new, self.old, self.scratch = (self.folder / name for name in ("new", "old", "scratch"))
        self.marker = self.folder / MARKER

    def open(self) -> None:
        """Puts back what a run that was cut off had in hand."""
        if not self.marker.exists():
            if any(self.folder.iterdir()):
                raise CheckpointError(f"{self.folder}: not made by a conversion, so it is not touched; move it away.")
            self.marker.touch()
        if self.old.exists() and self.new.exists() and not os.path.lexists(self.destination):
            os.rename(self.old, self.destination)  # cut off between the two renames of an --overwrite
        for leftover in (self.old, self.scratch):
            shutil.rmtree(leftover, ignore_errors=True)
        self.new.mkdir(exist_ok=True)
        self.scratch.mkdir()

    def begin(self, origin: str) -> None:
        """Empties `new` unless it grew from this very origin."""
        if self.marker.read_text() != origin:
            shutil.rmtree(self.new)
            self.new.mkdir()
            self.marker.write_text(origin)

    def finish(self) -> None:
        """Moves `new` into place; CheckpointError where something else has taken its place meanwhile."""
        check_free(self.destination, self.overwrite, self.model_type)
        if self.destination.exists():
            os.rename(self.destination, self.old)
        os.rename(self.new, self.destination)


@contextmanager
def workshop(source: str | os.PathLike, destination: Path, overwrite: bool, model_type: str) -> Iterator[Workshop]:
    """
    Opens the workshop of a destination and, where the block ends well, has the destination in place. Where it fails,
    what was carried stays for the next run; where nothing was, nothing stays.

    Args:
        source: what is converted; it must lie outside of all that is written.
        destination: the folder to make.
        overwrite: whether a folder of this model type in its place is replaced.
        model_type: as config.json says it.

    Raises:
        CheckpointError: the destination is taken, another run is at it, or the source lies in or around it.
    """
    _check_apart(Path(source), destination)
    check_free(destination, overwrite, model_type)
    place = Workshop(destination, overwrite, model_type)
    made = [parent for parent in place.folder.parents if not parent.exists()]
    if place.folder.is_symlink():
        raise CheckpointError(f"{place.folder}: is a link, and a conversion writes through none; remove it.")
    place.folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(place.folder)
    try:
        place.open()
        try:
            check_free(destination, overwrite, model_type)  # once more: it may have been put back
            yield place
            place.finish()
        except BaseException:
            shutil.rmtree(place.scratch, ignore_errors=True)
            if not place.new.exists() or not any(place.new.iterdir()):
                shutil.rmtree(place.folder)
                for parent in made:
                    parent.rmdir()
            raise
        shutil.rmtree(place.folder)
    finally:
        os.close(lock)


def workshop_folder(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.converting")


def check_free(destination: Path, overwrite: bool, model_type: str) -> None:
    """CheckpointError where the destination exists, but for a folder of the type or an empty one with `overwrite`."""
    if not os.path.lexists(destination):
        return
    if not overwrite:
        raise CheckpointError(f"{destination}: exists already; name another destination, or pass --overwrite.")
    if not destination.is_dir() or destination.is_symlink():
        raise CheckpointError(f"{destination}: --overwrite replaces folders only.")
    if any(destination.iterdir()) and _model_type(destination) != model_type:
        kind = {"iha": "IHA", "llama": "Llama"}[model_type]
        raise CheckpointError(f"{destination}: --overwrite replaces {kind} folders only, and this is none.")


def _model_type(folder: Path) -> str | None:
    try:
        return read_json(folder, "config.json").get("model_type")
    except CheckpointError:
        return None


def _check_apart(source: Path, destination: Path) -> None:
    if not source.exists():
        return  # a Hub id
    source = source.resolve()
    for written in (destination.resolve(), workshop_folder(destination).resolve()):
        if written.is_relative_to(source) or source.is_relative_to(written):
            raise CheckpointError(
                f"{destination}: the destination must lie outside the source, which is never touched."
            )


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise BlockingIOError  # the other run ended between our two calls
    except BlockingIOError as error:
        os.close(descriptor)
        raise CheckpointError(f"{folder}: another conversion to this destination is running.") from error
    return descriptor
