"""Llama checkpoint -> IHA checkpoint: the same weight files, one small file of mixing tensors, a new config."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import LlamaConfig

from configuration_iha import IHAConfig, flop_matched_schedule
from modeling_iha.bundle import AUTO_MAP, write_bundle

from .card import conversion_card, read_licence
from .carry import carry_all, origin, require_room
from .checkpoint import (
    INDEX,
    WEIGHTS,
    Checkpoint,
    CheckpointError,
    build_config,
    read_checkpoint,
    read_json,
    resolve_inside,
)
from .destination import workshop
from .llama import main_dtype, read_llama
from .mixing import make_mixing
from .source import open_source, side_files
from .structure import check_mixing

MIXING_FILE = "model-mixing.safetensors"
CARRIED_WEIGHTS = "model-00001-of-00001.safetensors"  # Transformers would read model.safetensors and no index


def convert(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    num_pseudo_heads: int | list[int] = 2,
    *,
    hybrid_length: int | None = None,
    rope_phases: str = "shared",
    mixing_init: str = "exact",
    mixing_init_std: float = 1.0,
    seed: int = 0,
    revision: str | None = None,
    gguf_dtype: torch.dtype = torch.float32,
    link: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """
    Converts a Llama checkpoint, or one of another family whose function is a Llama model's (Mistral, Qwen2). Weight
    files are carried byte for byte and never parsed; with the default phases and init the model computes exactly what
    it did. Run again after an interruption it goes on where it stopped; the destination appears when it is whole.

    Args:
        source: a folder, a .gguf file, or a Hub id.
        destination: the folder to make.
        num_pseudo_heads: P, for all layers or one per layer.
        hybrid_length: N of the paper's schedule (`flop_matched_schedule`), which takes one P; None leaves every layer
            full. Sliding layers do not compute what Llama's do: the model is to be trained on.
        rope_phases, mixing_init, mixing_init_std: fields of `IHAConfig`.
        seed: of the random numbers in the mixing tensors.
        revision: branch, tag or commit of a Hub id.
        gguf_dtype: dtype that a GGUF file is dequantised to; other sources keep theirs.
        link: hard-link the weight files; the two folders then share them.
        overwrite: replace a destination that is an IHA folder.

    Returns:
        The reasons why the function is no longer the Llama model's; empty where it is.

    Raises:
        CheckpointError: the source is not a whole Llama checkpoint, or the destination cannot be written.
        ValueError: a field of the configuration has a value that is not allowed.
    """
    if hybrid_length is not None and not isinstance(num_pseudo_heads, int):
        raise ValueError(f"num_pseudo_heads={num_pseudo_heads} must be one number with hybrid_length.")
    destination = Path(os.path.abspath(destination))
    with (
        workshop(source, destination, overwrite, "iha") as place,
        open_source(source, revision, gguf_dtype, place.scratch) as folder,
    ):
        llama = read_llama(folder)
        plain = build_config(llama, LlamaConfig)
        layers = {"num_pseudo_heads": num_pseudo_heads, **llama.windows}
        if hybrid_length is not None:
            if llama.windows:
                raise ValueError(f"hybrid_length={hybrid_length} must be left out: {source} has windows of its own.")
            layers = flop_matched_schedule(plain.num_hidden_layers, hybrid_length, num_pseudo_heads)
        config = IHAConfig.from_llama(
            plain,
            **layers,
            rope_phases=rope_phases,
            mixing_init=mixing_init,
            mixing_init_std=mixing_init_std,
        )
        dtype = main_dtype(llama)
        mixing = make_mixing(config, dtype, seed)
        added = mixing | {name: torch.zeros(config.hidden_size, dtype=dtype) for name in llama.zeros}
        files = _files_to_carry(llama, place.new)
        place.begin(origin(files, link))
        require_room(files, place.scratch, link)
        carry_all(files, place.new, link)
        if added:
            # Not save_file, which makes the file unreadable for others than its owner.
            (place.new / MIXING_FILE).write_bytes(save(added, metadata={"format": "pt"}))
        _write_index(llama, added, place.new)
        write_bundle(place.new)
        config.auto_map = dict(AUTO_MAP)
        config.save_pretrained(place.new)
        reasons = check_mixing(config, mixing, llama.windows)
        base_model = None if Path(source).exists() else str(source)
        conversion_card(
            destination.name,
            config,
            base_model,
            read_licence(folder),
            reasons,
            family=read_json(folder, "config.json")["model_type"],
            dequantised=Path(source).suffix == ".gguf",
        ).save(place.new / "README.md")
        read_checkpoint(place.new)
    return reasons


def _files_to_carry(llama: Checkpoint, work: Path) -> list[tuple[Path, Path]]:
    if MIXING_FILE in llama.shards:
        raise CheckpointError(f"{MIXING_FILE}: a shard of the source has the name that the mixing tensors get.")
    names = {shard: CARRIED_WEIGHTS if shard == WEIGHTS else shard for shard in llama.shards}
    names |= {name: name for name in side_files(llama.folder)}
    return [(resolve_inside(llama.folder, name), work / target) for name, target in names.items()]


def _write_index(llama: Checkpoint, added: dict[str, torch.Tensor], work: Path) -> None:
    shards = {
        name: CARRIED_WEIGHTS if entry.shard == WEIGHTS else entry.shard for name, entry in llama.tensors.items()
    }
    added_bytes = sum(tensor.nbytes for tensor in added.values())
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in llama.tensors.values()) + added_bytes},
        "weight_map": dict(sorted({**shards, **dict.fromkeys(added, MIXING_FILE)}.items())),
    }
    (work / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
