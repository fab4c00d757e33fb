"""Reads what a safetensors folder holds (config, shards, tensor headers) and refuses all that is not whole."""

import copy
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
ITEM_SIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and the reason."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: `nbytes` bytes from `offset` of the file `shard`, in the layout `dtype` and `shape`."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """
    A checked folder: its config.json, its shards in order and every tensor in them. Where it is read as a Llama
    model's (`families.as_llama`), `windows` has `layer_types` and `sliding_window` of layers that slide, and `zeros`
    the names of tensors that are not there and would be zero.
    """

    folder: Path
    config: dict
    shards: tuple[str, ...]
    tensors: dict[str, TensorEntry]
    windows: dict = field(default_factory=dict)
    zeros: tuple[str, ...] = ()


def read_checkpoint(folder: Path) -> Checkpoint:
    """
    Reads a safetensors folder, single file or sharded, without loading a tensor.

    Raises:
        CheckpointError: a file is missing, truncated, malformed, a pickle, or outside the folder.
    """
    config = read_json(folder, "config.json")
    weight_map = _read_weight_map(folder)
    shards = tuple(sorted(set(weight_map.values()))) if weight_map is not None else (WEIGHTS,)
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in _read_header(folder, shard):
            if name in tensors:
                raise CheckpointError(f"{shard}: tensor {name!r} stands in {tensors[name].shard} too.")
            tensors[name] = entry
    for name, shard in (weight_map or {}).items():
        if name not in tensors or tensors[name].shard != shard:
            raise CheckpointError(f"{INDEX}: tensor {name!r} is not in {shard}, where the index says it is.")
    for name, entry in tensors.items():
        if weight_map is not None and name not in weight_map:
            raise CheckpointError(f"{INDEX}: tensor {name!r} of {entry.shard} is missing from the index.")
    # A config builds lists of this length, so an absurd one is refused before anyone makes it an object.
    layers = config.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers <= len(tensors):
        raise CheckpointError(f"config.json: num_hidden_layers={layers!r} does not go with {len(tensors)} tensors.")
    return Checkpoint(folder, config, shards, tensors)


def build_config(checkpoint: Checkpoint, config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The configuration object of config.json; CheckpointError where the class refuses a value."""
    try:
        return config_class.from_dict(copy.deepcopy(checkpoint.config))
    except Exception as error:  # the strict config classes raise kinds of their own
        raise CheckpointError(f"config.json: not a valid {config_class.__name__} ({error}).") from error


def resolve_inside(folder: Path, name: str) -> Path:
    """
    The real path of a file of the folder. Links may lead into the folder, or, in a Hub cache, into the blobs of the
    same repository; anywhere else is refused.
    """
    path = folder / name
    try:
        is_file = path.is_file()
    except OSError as error:  # a name longer than file systems take
        raise CheckpointError(f"{name}: no usable file name ({error.strerror}).") from error
    if not is_file:
        raise CheckpointError(f"{name}: the file is missing from {folder}.")
    real, home = path.resolve(), folder.resolve()
    roots = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(root) for root in roots):
        raise CheckpointError(f"{name}: the file lies outside {folder}, at {real}.")
    return real


def read_json(folder: Path, name: str) -> dict:
    """The JSON object in a file of the folder; CheckpointError where it is none."""
    try:
        text = resolve_inside(folder, name).read_text(encoding="utf-8")
        content = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{name}: not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: must hold a JSON object, not {type(content).__name__}.")
    return content


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number}")
    return value


def _read_weight_map(folder: Path) -> dict[str, str] | None:
    # In the order in which Transformers looks.
    if (folder / WEIGHTS).exists():
        return None
    if not (folder / INDEX).exists():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{pickles[0]}: pickle weights are never loaded. Save the model as safetensors first: "
                "model.save_pretrained(folder)."
            )
        raise CheckpointError(f"{folder}: no weights found, neither {WEIGHTS} nor {INDEX}.")
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX}: 'weight_map' must be an object that names a file for each tensor.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{INDEX}: tensor {name!r} points at {shard!r}, which is not a file of the folder.")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX}: tensor {name!r} points at {shard!r}: only .safetensors files are read.")
    return weight_map


def _read_header(folder: Path, shard: str) -> Iterator[tuple[str, TensorEntry]]:
    path = resolve_inside(folder, shard)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise CheckpointError(f"{shard}: truncated, {size} bytes are no safetensors file.")
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{shard}: truncated or no safetensors file, its header claims {header_bytes} of {size} bytes."
            )
        try:
            header = json.loads(file.read(header_bytes))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{shard}: its header is not valid JSON ({error}).") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{shard}: its header must be a JSON object, not {type(header).__name__}.")
    header.pop("__metadata__", None)
    entries = sorted(
        ((name, _parse_entry(shard, name, value, 8 + header_bytes)) for name, value in header.items()),
        key=lambda item: item[1].offset,
    )
    end = 8 + header_bytes
    for name, entry in entries:
        if entry.offset != end:
            raise CheckpointError(f"{shard}: tensor {name!r} overlaps its neighbour or leaves a gap before it.")
        end += entry.nbytes
    if end != size:
        what = "truncated" if size < end else "too long"
        raise CheckpointError(f"{shard}: {what}, its header describes {end} bytes and the file has {size}.")
    yield from entries


def _parse_entry(shard: str, name: str, value, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        well_formed = isinstance(dtype, str) and all(
            type(number) is int and number >= 0 for number in (*shape, begin, end)
        )
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(f"{shard}: the header's entry for tensor {name!r} is malformed.")
    if dtype not in ITEM_SIZE:
        raise CheckpointError(f"{shard}: tensor {name!r} has dtype {dtype!r}; supported are {', '.join(ITEM_SIZE)}.")
    if end - begin != math.prod(shape) * ITEM_SIZE[dtype]:
        raise CheckpointError(f"{shard}: tensor {name!r} has {end - begin} bytes, not what {dtype} {shape} takes.")
    return TensorEntry(shard, dtype, shape, data_start + begin, end - begin)
