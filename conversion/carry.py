"""Carries a file byte for byte: hard link, reflink where the file system can, else copy."""

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from transformers.utils import logging

from .checkpoint import CheckpointError

FICLONE = 0x40049409  # ioctl of Linux: share the blocks of another file
CHUNK = 64 << 20


def carry_all(files: list[tuple[Path, Path]], folder: Path, link: bool) -> None:
    """
    Carries (source, target) pairs into a folder, with a progress bar; what is there and not among them goes, and what
    an earlier run carried stays.

    Raises:
        CheckpointError: see `carry`.
    """
    wanted = {target for _, target in files}
    for leftover in folder.rglob("*"):
        if leftover.is_file() and leftover not in wanted:
            leftover.unlink()
    total = sum(source.stat().st_size for source, _ in files)
    with logging.tqdm(total=total, unit="B", unit_scale=True, desc="Carrying weights", disable=None) as bar:
        for source, target in files:
            target.parent.mkdir(exist_ok=True)
            if is_carried(source, target):
                bar.update(source.stat().st_size)
            else:
                # Small files are always copied: editing the new tokenizer must not edit the source's.
                carry(source, target, link and target.suffix == ".safetensors", bar.update)


def origin(files: list[tuple[Path, Path]], link: bool) -> str:
    """Tells this very source, and the way of carrying it, from any other."""
    stats = [(str(source), source.stat()) for source, _ in files]
    return json.dumps({"link": link, "files": [(n, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for n, s in stats]})


def is_carried(source: Path, target: Path) -> bool:
    """Whether an earlier run has carried this very file: same size and time of change."""
    if not target.exists():
        return False
    there, here = source.stat(), target.stat()
    return there.st_size == here.st_size and there.st_mtime_ns == here.st_mtime_ns


def carry(source: Path, target: Path, link: bool, on_bytes: Callable[[int], None]) -> None:
    """
    Brings `source` to `target`; the name `target` appears only when the file is whole.

    Args:
        source: the real file (no symbolic link).
        target: the file to make; its folder exists.
        link: hard-link instead of copying.
        on_bytes: told of each number of bytes done.

    Raises:
        CheckpointError: a file system error such as a full disk, or the source changed meanwhile.
    """
    before = source.stat()
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        if link:
            os.link(source, partial)
            on_bytes(before.st_size)
        else:
            with source.open("rb") as reader, partial.open("wb") as writer:
                if _reflink(reader, writer):
                    on_bytes(before.st_size)
                else:
                    _copy(reader, writer, on_bytes)
            shutil.copymode(source, partial)
            os.utime(partial, ns=(before.st_atime_ns, before.st_mtime_ns))
    except OSError as error:
        raise CheckpointError(f"{source.name}: {error.strerror}; mend that and run again.") from error
    after = source.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        partial.unlink()
        raise CheckpointError(f"{source.name}: the file changed while it was carried; run again when it is at rest.")
    os.replace(partial, target)


def require_room(files: list[tuple[Path, Path]], folder: Path, link: bool, written: int = 0) -> None:
    """
    Refuses before the first byte what could not be carried.

    Args:
        files: (source, target) pairs; targets that an earlier run carried count nothing.
        folder: an existing folder on the file system that the targets go to.
        link: whether weights will be hard-linked.
        written: bytes that are written beside them.

    Raises:
        CheckpointError: hard links cannot be made there, or the files do not fit on the disk.
    """
    needed = written
    if files and not _shares_blocks(files[0][0], folder, link):
        needed += sum(source.stat().st_size for source, target in files if not is_carried(source, target))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; make room, choose another "
            "destination, or use --link."
        )


def _shares_blocks(source: Path, folder: Path, link: bool) -> bool:
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=folder) as scratch:
        probe = Path(scratch) / "probe"
        if not link:
            with source.open("rb") as reader, probe.open("wb") as writer:
                return _reflink(reader, writer)
        try:
            os.link(source, probe)
        except OSError as error:
            raise CheckpointError(
                f"{source.name}: --link cannot hard-link it into {folder} ({error.strerror}); choose a "
                "destination on the same file system, or leave --link away."
            ) from error
        return True


def _reflink(reader, writer) -> bool:
    try:
        fcntl.ioctl(writer.fileno(), FICLONE, reader.fileno())
    except OSError:
        return False
    return True


def _copy(reader, writer, on_bytes: Callable[[int], None]) -> None:
    in_kernel = hasattr(os, "copy_file_range")
    while True:
        try:
            if in_kernel:
                done = os.copy_file_range(reader.fileno(), writer.fileno(), CHUNK)
            else:
                done = writer.write(reader.read(CHUNK))
                writer.flush()
        except OSError as error:
            if in_kernel and error.errno in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                in_kernel = False  # some pairs of file systems lack the call; the positions did not move
                continue
            raise
        if not done:
            return
        on_bytes(done)
