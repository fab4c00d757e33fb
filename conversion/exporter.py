"""IHA checkpoint -> Llama checkpoint, where the function is one: the same weights without the mixing tensors."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from configuration_iha import IHAConfig

from .carry import CHUNK, carry_all, origin, require_room
from .checkpoint import INDEX, WEIGHTS, Checkpoint, CheckpointError, build_config, read_checkpoint, resolve_inside
from .compare import Comparison, compare
from .destination import workshop
from .llama import check_tensors, refuse_adapter
from .mixing import mixing_shapes
from .quantised import NOT_COMPARED, quant_method
from .source import open_source, side_files
from .structure import check_mixing, load_tensors


def export(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    revision: str | None = None,
    link: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """
    Writes the plain Llama checkpoint of an IHA model whose function is one: its mixing keeps Llama's function, as
    after a conversion, or no layer has any. Files that hold no mixing tensors are carried byte for byte.

    Args:
        source: an IHA checkpoint: a folder, or a Hub id.
        destination: the folder to make.
        revision: branch, tag or commit of a Hub id.
        link: hard-link the weight files that are carried.
        overwrite: replace a destination that is a Llama folder.

    Returns:
        The reasons why the function is not a Llama model's, and by how much, where nothing is written; else empty.

    Raises:
        CheckpointError: the source is not a whole IHA checkpoint, or the destination cannot be written.
    """
    destination = Path(os.path.abspath(destination))
    with open_source(source, revision) as folder:
        iha = read_iha(folder)
        reasons = check_mixing(
            build_config(iha, IHAConfig), load_tensors(iha, iha.tensors.keys() - _plain(iha).keys())
        )
        if reasons:
            return reasons
        with workshop(source, destination, overwrite, "llama") as place:
            llama = without_mixing(iha)
            whole, mixed = _shards(iha, llama)
            files = [(resolve_inside(folder, name), place.new / target) for name, target in whole.items()]
            place.begin(origin([*files, *((resolve_inside(folder, name), place.new) for name in mixed)], link))
            require_room(files, place.scratch, link, sum(e.nbytes for e in llama.tensors.values() if e.shard in mixed))
            carry_all(files, place.new, link)
            for shard, target in mixed.items():
                _write_without_mixing(llama, shard, place.new / target)
            names = {**whole, **mixed}
            if WEIGHTS not in names.values():
                _write_index(llama, names, place.new)
            (place.new / "config.json").write_text(json.dumps(llama.config, indent=2) + "\n", encoding="utf-8")
            read_checkpoint(place.new)
    return []


def how_far(source: str | os.PathLike, revision: str | None = None, device: str = "cpu") -> Comparison:
    """
    The numeric comparison of an IHA model and the Llama model that is left without its mixing, in float32.

    Raises:
        CheckpointError: it is no causal language model, or has no tokenizer.
    """
    with open_source(source, revision) as folder:
        iha = read_iha(folder)
        architectures = iha.config.get("architectures") or ["IHAForCausalLM"]
        if architectures[0] != "IHAForCausalLM":
            raise CheckpointError(
                f"config.json: architectures {architectures!r}: only causal language models are compared on prompts; "
                "export --no-check does without."
            )
        if quant_method(iha.config):
            raise CheckpointError(f"config.json: {NOT_COMPARED} export --no-check does without.")
        with _without_mixing_in_a_folder(iha) as plain:
            return compare(plain, folder, torch.float32, device=device)


def read_iha(folder: Path) -> Checkpoint:
    """
    Reads a folder as an IHA checkpoint.

    Raises:
        CheckpointError: it is not whole, not IHA's, or holds something whose meaning is unknown.
    """
    iha = read_checkpoint(folder)
    if iha.config.get("model_type") != "iha":
        raise CheckpointError(
            f"{folder}: model_type {iha.config.get('model_type')!r}, an IHA folder has 'iha'; iha convert makes one."
        )
    refuse_adapter(folder)
    for name, shape in mixing_shapes(build_config(iha, IHAConfig)).items():
        if name not in iha.tensors:
            raise CheckpointError(f"{folder}: tensor {name!r} is missing from the weights.")
        if iha.tensors[name].shape != shape:
            entry = iha.tensors[name]
            raise CheckpointError(f"{entry.shard}: tensor {name!r} has shape {entry.shape}, config.json says {shape}.")
    check_tensors(without_mixing(iha))
    return iha


def without_mixing(iha: Checkpoint) -> Checkpoint:
    """The Llama checkpoint that is left, its tensors in the files in which they stand."""
    config = build_config(iha, IHAConfig).to_llama().to_dict()
    tensors = _plain(iha)
    shards = tuple(shard for shard in iha.shards if any(entry.shard == shard for entry in tensors.values()))
    return replace(iha, config=config, tensors=tensors, shards=shards)


def _plain(iha: Checkpoint) -> dict:
    mixing = mixing_shapes(build_config(iha, IHAConfig))
    return {name: entry for name, entry in iha.tensors.items() if name not in mixing}


def _shards(iha: Checkpoint, llama: Checkpoint) -> tuple[dict[str, str], dict[str, str]]:
    """Files to carry, and weight files that hold mixing tensors too, by the names that they get."""
    # A single file has a name of its own, beside which Transformers reads no index.
    names = {shard: WEIGHTS if len(llama.shards) == 1 else shard for shard in llama.shards}
    mixed = {entry.shard for name, entry in iha.tensors.items() if name not in llama.tensors}
    whole = {shard: name for shard, name in names.items() if shard not in mixed}
    whole |= {name: name for name in side_files(iha.folder)}
    return whole, {shard: name for shard, name in names.items() if shard in mixed}


def _write_without_mixing(llama: Checkpoint, shard: str, target: Path) -> None:
    entries = sorted(
        ((name, entry) for name, entry in llama.tensors.items() if entry.shard == shard),
        key=lambda item: item[1].offset,
    )
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, entry in entries:
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (end, end + entry.nbytes)}
        end += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin where their items are aligned
    source = resolve_inside(llama.folder, shard)
    before, whole = source.stat(), True
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        for _, entry in entries:
            reader.seek(entry.offset)
            left = entry.nbytes
            while left and (part := reader.read(min(CHUNK, left))):
                left -= writer.write(part)
            whole &= not left
    after = source.stat()
    if not whole or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise CheckpointError(f"{shard}: the file changed while it was read; run again when it is at rest.")


def _write_index(llama: Checkpoint, names: dict[str, str], folder: Path) -> None:
    weight_map = {name: names[entry.shard] for name, entry in sorted(llama.tensors.items())}
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in llama.tensors.values())},
        "weight_map": weight_map,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _without_mixing_in_a_folder(iha: Checkpoint) -> Iterator[Path]:
    """A folder that Transformers loads as the Llama model that is left, without a copy of its weights."""
    llama = without_mixing(iha)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(llama.config), encoding="utf-8")
        for shard in llama.shards:
            os.symlink(resolve_inside(iha.folder, shard), folder / shard)
        _write_index(llama, {shard: shard for shard in llama.shards}, folder)
        if llama.shards == (WEIGHTS,):
            (folder / INDEX).unlink()  # the single file is read, and its mixing tensors passed over
        for side_file in side_files(iha.folder):
            (folder / side_file).parent.mkdir(exist_ok=True)
            os.symlink(resolve_inside(iha.folder, side_file), folder / side_file)
        yield folder
