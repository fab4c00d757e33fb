"""The folder that a conversion makes: it grows hidden beside its place and appears there whole, or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import CheckpointError, read_json

ORIGIN = ".origin"  # in the hidden folder: what it is made from, so that only the same run goes on with it


def check_destination(source: str | os.PathLike, destination: Path, overwrite: bool) -> None:
    """
    Refuses a destination that exists (but for an IHA folder with `overwrite`), or that the source lies in or around.

    Raises:
        CheckpointError: with the reason.
    """
    source, target = Path(source), destination.resolve()
    if source.is_dir() and (target.is_relative_to(source.resolve()) or source.resolve().is_relative_to(target)):
        raise CheckpointError(f"{destination}: the destination must lie outside the source, which is never touched.")
    replaced = _replaced(destination)
    if replaced.exists() and not os.path.lexists(destination):
        os.rename(replaced, destination)  # an overwriting run was cut off between its two renames
    if not os.path.lexists(destination):
        return
    if not overwrite:
        raise CheckpointError(f"{destination}: exists already; name another destination, or pass --overwrite.")
    if not destination.is_dir() or destination.is_symlink():
        raise CheckpointError(f"{destination}: --overwrite replaces folders only.")
    if any(destination.iterdir()) and read_json(destination, "config.json").get("model_type") != "iha":
        raise CheckpointError(f"{destination}: --overwrite replaces IHA folders only, and this is another model's.")


def work_folder(destination: Path) -> Path:
    """The hidden folder in which a destination grows."""
    return destination.with_name(f".{destination.name}.converting")


def nearest_folder(destination: Path) -> Path:
    """The folder nearest above the destination that exists; nothing is made before the source is known to be good."""
    return next(parent for parent in destination.parents if parent.is_dir())


@contextmanager
def growing(destination: Path, origin: str, overwrite: bool) -> Iterator[Path]:
    """
    Yields the hidden folder, with what an interrupted run from the same origin left in it, and moves it into place
    when the block ends well. Where the block fails it stays for the next run, unless it holds nothing yet.

    Args:
        destination: the folder to make.
        origin: names what it is made from, and how.
        overwrite: whether an IHA folder in its place is replaced.

    Raises:
        CheckpointError: another run is at it, or something else has taken its place meanwhile.
    """
    work = work_folder(destination)
    made = [parent for parent in work.parents if not parent.exists()]
    with locked(work):
        if not (work / ORIGIN).exists() or (work / ORIGIN).read_text() != origin:
            empty(work)
            (work / ORIGIN).write_text(origin)
        try:
            yield work
        except BaseException:
            if os.listdir(work) == [ORIGIN]:
                shutil.rmtree(work)
                for parent in made:
                    parent.rmdir()
            raise
        (work / ORIGIN).unlink()
        _move_into_place(work, destination, overwrite)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes a folder where it is missing and keeps other runs out of it; CheckpointError where one is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise BlockingIOError  # the other run moved it into place between our two calls
        yield
    except BlockingIOError as error:
        raise CheckpointError(f"{folder}: another conversion to this destination is running.") from error
    finally:
        os.close(descriptor)


def empty(folder: Path) -> None:
    """Removes all that is in a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _move_into_place(work: Path, destination: Path, overwrite: bool) -> None:
    check_destination(work, destination, overwrite)  # once more: it may have appeared meanwhile
    if not destination.exists():
        os.rename(work, destination)
        return
    replaced = _replaced(destination)
    shutil.rmtree(replaced, ignore_errors=True)
    os.rename(destination, replaced)
    os.rename(work, destination)
    discarded = destination.with_name(f".{destination.name}.discarded")
    shutil.rmtree(discarded, ignore_errors=True)
    os.rename(replaced, discarded)  # half removed, it must not be put back
    shutil.rmtree(discarded)


def _replaced(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.replaced")
