"""Llama checkpoint -> IHA checkpoint: the same weight files, one small file of mixing tensors, a new config."""

import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import LlamaConfig
from transformers.utils import logging

import modeling_iha
from configuration_iha import IHAConfig
from modeling_iha import IHAPreTrainedModel
from modeling_iha.bundle import AUTO_MAP, write_bundle
from modeling_iha.mixing import IHACollapse, IHAMixer

from .carry import carry, is_carried, require_room
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
from .source import CARRIED_FILES, open_source
from .structure import check_mixing

MIXING_FILE = "model-mixing.safetensors"
CARRIED_WEIGHTS = "model-00001-of-00001.safetensors"  # Transformers would read model.safetensors and no index
# Llama's question-answering head names its backbone differently, so its files cannot be carried as they are.
CONVERTIBLE = ("IHAForCausalLM", "IHAModel", "IHAForSequenceClassification", "IHAForTokenClassification")
SAFETENSORS_DTYPE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def convert(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    num_pseudo_heads: int | list[int] = 2,
    *,
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
    Converts a Llama checkpoint. Weight files are carried byte for byte and never parsed; with the default phases and
    init the model computes exactly what it did. Run again after an interruption it goes on where it stopped; the
    destination appears when it is whole.

    Args:
        source: a folder, a .gguf file, or a Hub id.
        destination: the folder to make.
        num_pseudo_heads: P, for all layers or one per layer.
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
    destination = Path(os.path.abspath(destination))
    _check_destination(source, destination, overwrite)
    with open_source(source, revision, gguf_dtype, scratch=_nearest_folder(destination)) as folder:
        llama = read_llama(folder)
        config = IHAConfig.from_llama(
            build_config(llama, LlamaConfig),
            num_pseudo_heads,
            rope_phases=rope_phases,
            mixing_init=mixing_init,
            mixing_init_std=mixing_init_std,
        )
        mixing = _make_mixing(config, main_dtype(llama), seed)
        work = destination.with_name(f".{destination.name}.converting")
        files = _files_to_carry(llama, work)
        require_room(files, _nearest_folder(destination), link)
        with _locked(work):
            _carry_files(files, work, link)
            # Not save_file, which makes the file unreadable for others than its owner.
            (work / MIXING_FILE).write_bytes(save(mixing, metadata={"format": "pt"}))
            _write_index(llama, mixing, work)
            write_bundle(work)
            config.auto_map = dict(AUTO_MAP)
            config.save_pretrained(work)
            read_checkpoint(work)
            _move_into_place(work, destination)
    return check_mixing(config, mixing)


def read_llama(folder: Path) -> Checkpoint:
    """
    Reads a folder as a Llama checkpoint.

    Raises:
        CheckpointError: it is not whole, not Llama's, or holds something whose meaning is unknown.
    """
    checkpoint = read_checkpoint(folder)
    config = checkpoint.config
    if config.get("model_type") != "llama":
        raise CheckpointError(f"config.json: model_type {config.get('model_type')!r}; only 'llama' becomes IHA.")
    for name, why in (
        ("quantization_config", "the weights are quantised; dequantise them first"),
        ("auto_map", "the checkpoint brings its own code, so its function is unknown"),
        ("sliding_window", "Llama has no windows, so what it means is unknown"),
    ):
        if config.get(name) is not None:
            raise CheckpointError(f"config.json: {name!r} is set: {why}.")
    if (folder / "tokenizer_config.json").exists() and "auto_map" in read_json(folder, "tokenizer_config.json"):
        raise CheckpointError("tokenizer_config.json: 'auto_map' is set: the tokenizer's own code is not carried.")
    _check_tensors(checkpoint)
    return checkpoint


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Every tensor that the configured Llama has is there in its shape, and no other."""
    try:
        config = IHAConfig.from_llama(build_config(checkpoint, LlamaConfig), num_pseudo_heads=1)
        with torch.device("meta"):
            model = _model_class(config)(config)
    except CheckpointError:
        raise
    except Exception as error:  # torch and Transformers raise any kind on absurd sizes
        raise CheckpointError(f"config.json: not a valid Llama configuration ({error}).") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    optional = set(model.all_tied_weights_keys)
    for name, shape in expected.items():
        if name not in checkpoint.tensors and name not in optional:
            raise CheckpointError(f"{checkpoint.folder}: tensor {name!r} is missing from the weights.")
        if name in checkpoint.tensors and checkpoint.tensors[name].shape != shape:
            entry = checkpoint.tensors[name]
            raise CheckpointError(f"{entry.shard}: tensor {name!r} has shape {entry.shape}, config.json says {shape}.")
    for name, entry in checkpoint.tensors.items():
        # Early Llama checkpoints store the rotary frequencies, which every version computes afresh.
        if name not in expected and not name.endswith(".rotary_emb.inv_freq"):
            raise CheckpointError(f"{entry.shard}: tensor {name!r} is not one of a Llama model's.")


def _model_class(config: IHAConfig) -> type[IHAPreTrainedModel]:
    architecture = (config.architectures or ["IHAForCausalLM"])[0]
    if architecture not in CONVERTIBLE:
        raise CheckpointError(
            f"config.json: architectures {config.architectures!r} is not supported; convertible are "
            f"{', '.join(name.replace('IHA', 'Llama') for name in CONVERTIBLE)}."
        )
    return getattr(modeling_iha, architecture)


def main_dtype(checkpoint: Checkpoint) -> torch.dtype:
    entry = next(entry for name, entry in checkpoint.tensors.items() if name.endswith("self_attn.q_proj.weight"))
    return SAFETENSORS_DTYPE[entry.dtype]


def _make_mixing(config: IHAConfig, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    prefix = "" if _model_class(config) is modeling_iha.IHAModel else "model."
    mixing = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in range(config.num_hidden_layers):
            size = config.get_num_pseudo_heads(layer)
            if size == 1:
                continue
            for name, module in (
                ("mixer", IHAMixer(size, config.num_attention_heads, config.num_key_value_heads)),
                ("collapse", IHACollapse(size, config.num_attention_heads)),
            ):
                module.initialize(config.mixing_init, config.mixing_init_std)
                for key, tensor in module.state_dict().items():
                    mixing[f"{prefix}layers.{layer}.self_attn.{name}.{key}"] = tensor.to(dtype)
    return mixing


def _check_destination(source, destination: Path, overwrite: bool) -> None:
    source = Path(source)
    if source.is_dir() and (
        destination.resolve().is_relative_to(source.resolve())
        or source.resolve().is_relative_to(destination.resolve())
    ):
        raise CheckpointError(f"{destination}: the destination must lie outside the source, which is never touched.")
    replaced = _replaced(destination)
    if replaced.exists() and not os.path.lexists(destination):
        os.rename(replaced, destination)  # an --overwrite was cut off between its two renames
    if not os.path.lexists(destination):
        return
    if not overwrite:
        raise CheckpointError(f"{destination}: exists already; name another destination, or pass --overwrite.")
    if not destination.is_dir() or destination.is_symlink():
        raise CheckpointError(f"{destination}: --overwrite replaces folders only.")
    if any(destination.iterdir()) and read_json(destination, "config.json").get("model_type") != "iha":
        raise CheckpointError(f"{destination}: --overwrite replaces IHA folders only, and this is another model's.")


def _nearest_folder(destination: Path) -> Path:
    """The folder nearest above the destination that exists; nothing is made before the source is known to be good."""
    return next(parent for parent in destination.parents if parent.is_dir())


@contextmanager
def _locked(work: Path):
    """
    Makes the hidden folder in which the destination grows, and keeps other runs out of it. It stays where a run is cut
    off, for the next one to go on with.
    """
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise CheckpointError(f"{work}: another conversion to this destination is running.") from error
    finally:
        os.close(descriptor)


def _files_to_carry(llama: Checkpoint, work: Path) -> list[tuple[Path, Path]]:
    names = {shard: CARRIED_WEIGHTS if shard == WEIGHTS else shard for shard in llama.shards}
    for pattern in CARRIED_FILES:
        for path in sorted(llama.folder.glob(pattern)):
            if path.is_file():
                name = path.relative_to(llama.folder).as_posix()
                names[name] = name
    return [(resolve_inside(llama.folder, name), work / target) for name, target in names.items()]


def _carry_files(files: list[tuple[Path, Path]], work: Path, link: bool) -> None:
    wanted = {target for _, target in files}
    for leftover in work.rglob("*"):
        if leftover.is_file() and leftover not in wanted:
            leftover.unlink()
    total = sum(source.stat().st_size for source, _ in files)
    with logging.tqdm(total=total, unit="B", unit_scale=True, desc="Carrying weights") as bar:
        for source, target in files:
            target.parent.mkdir(exist_ok=True)
            if is_carried(source, target):
                bar.update(source.stat().st_size)
            else:
                # Small files are always copied: editing the new tokenizer must not edit the source's.
                carry(source, target, link and target.suffix == ".safetensors", bar.update)


def _write_index(llama: Checkpoint, mixing: dict[str, torch.Tensor], work: Path) -> None:
    shards = {
        name: CARRIED_WEIGHTS if entry.shard == WEIGHTS else entry.shard for name, entry in llama.tensors.items()
    }
    mixing_bytes = sum(tensor.nbytes for tensor in mixing.values())
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in llama.tensors.values()) + mixing_bytes},
        "weight_map": dict(sorted({**shards, **dict.fromkeys(mixing, MIXING_FILE)}.items())),
    }
    (work / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _move_into_place(work: Path, destination: Path) -> None:
    if not destination.exists():
        os.rename(work, destination)
        return
    replaced = _replaced(destination)
    shutil.rmtree(replaced, ignore_errors=True)
    os.rename(destination, replaced)
    os.rename(work, destination)
    shutil.rmtree(replaced)


def _replaced(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.replaced")
