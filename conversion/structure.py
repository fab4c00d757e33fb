"""The structural proof that an IHA checkpoint computes its Llama source: no model is run, any size takes seconds."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import LlamaConfig

from configuration_iha import IHAConfig
from modeling_iha.bundle import AUTO_MAP

from .checkpoint import Checkpoint, TensorEntry, build_config, resolve_inside
from .mixing import added_shapes

CHUNK = 16 << 20
LARGEST = 256  # in a mixing tensor; no initialisation comes near it


def check_mixing(config: IHAConfig, mixing: dict[str, torch.Tensor], windows: dict | None = None) -> list[str]:
    """
    The conditions under which a layer's function is Llama's. With shared phases and keys that are identity copies,
    the last pseudo-head of a token gives the P copies of each token it sees the same logit, so an attention weight w
    becomes P weights w / P, and values whose mean is the plain value add up to Llama's output; the collapse must read
    that pseudo-head and no other, with plain queries in it.

    Args:
        config: of the IHA model.
        mixing: its mixing tensors by name; layers with P = 1 have none.
        windows: `layer_types` and `sliding_window` of the source, where its layers slide.

    Returns:
        What is not met, a line each; empty where the function is Llama's.
    """
    reasons = []
    if not config.is_causal:
        reasons.append("is_causal: false, so that tokens see later ones")
    full = {"layer_types": ["full_attention"] * config.num_hidden_layers, "sliding_window": None}
    if {name: getattr(config, name) for name in full} != (windows or full):
        reasons.append("layer_types, sliding_window: a sliding layer does not see all that the source's sees")
    if config.rope_phases != "shared" and any(
        config.get_num_pseudo_heads(layer) > 1 for layer in range(config.num_hidden_layers)
    ):
        reasons.append(f"rope_phases: {config.rope_phases!r} phases turn the copies of a token apart")
    for name, tensor in mixing.items():
        tensor = tensor.double()
        if not tensor.abs().max() <= LARGEST:  # also where it is not a number
            reasons.append(f"{name}: it holds a value beyond {LARGEST}, beside which others are lost to rounding")
            continue
        what, off = _distance(name, tensor)
        if off.any():
            reasons.append(f"{name}: {what}, by up to {off.abs().max():.2g}")
    return reasons


def _distance(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """What a mixing tensor is not where it is off, and the differences."""
    identity = torch.eye(tensor.shape[-1], dtype=torch.float64)
    if name.endswith("q_mix"):
        return "the last pseudo-query is not the plain query", tensor[-1] - identity
    if name.endswith("k_mix"):
        return "the pseudo-keys are not identity copies", tensor - identity
    if name.endswith("v_mix"):
        return "the mean of the pseudo-values is not the plain value", (tensor.sum(0) - len(tensor) * identity) / len(
            tensor
        )
    plain = torch.zeros_like(tensor)
    plain[:, -1] = identity
    return "it does not read the last pseudo-head alone", tensor - plain


def check_structure(llama: Checkpoint, iha: Checkpoint) -> list[str]:
    """
    The whole proof: the same configuration, every Llama tensor byte for byte, and mixing as `check_mixing` asks.

    Returns:
        What is not met, a line each; empty where the function is proved to be the same.
    """
    config = build_config(iha, IHAConfig)
    shapes = added_shapes(config, llama.zeros)
    mixing = {name: entry for name, entry in iha.tensors.items() if name in shapes}
    carried = llama.tensors.keys() & iha.tensors.keys()
    reasons = []
    if (iha.folder / "adapter_config.json").exists():
        reasons.append("adapter_config.json: an adapter would be loaded on top of the model")
    reasons += _check_fields(build_config(llama, LlamaConfig), config)
    reasons += [
        f"{name}: neither in the source, nor what num_pseudo_heads in config.json needs"
        for name in sorted(iha.tensors.keys() - carried - shapes.keys())
    ]
    reasons += [
        f"{name}: not in the destination"
        for name in sorted((llama.tensors.keys() - carried) | (shapes.keys() - mixing.keys()))
    ]
    reasons += _check_bytes(llama, iha, sorted(carried))
    misshapen = {name for name, entry in mixing.items() if entry.shape != shapes[name]}
    reasons += [
        f"{name}: shape {mixing[name].shape}, num_pseudo_heads in config.json makes it {shapes[name]}"
        for name in sorted(misshapen)
    ]
    tensors = load_tensors(iha, mixing.keys() - misshapen)
    zeros = {name: tensors.pop(name) for name in llama.zeros if name in tensors}
    reasons += [f"{name}: not zero, and the source has no such bias" for name in zeros if zeros[name].any()]
    return reasons + check_mixing(config, tensors, llama.windows)


def _check_fields(llama_config: LlamaConfig, config: IHAConfig) -> list[str]:
    """Every field is what the conversion makes of the source's, and there is no other."""
    expected, found = IHAConfig.from_llama(llama_config).to_dict(), config.to_dict()
    expected["auto_map"] = AUTO_MAP
    own = {*IHAConfig.__annotations__, "transformers_version"}
    return [
        f"config.json: {name} is {expected.get(name)!r} in the source, and {found.get(name)!r} here"
        for name in sorted((expected.keys() | found.keys()) - own)
        if expected.get(name) != found.get(name)
    ]


def load_tensors(checkpoint: Checkpoint, names: set[str]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint by their names."""
    tensors = {}
    for shard in sorted({checkpoint.tensors[name].shard for name in names}):
        with safe_open(resolve_inside(checkpoint.folder, shard), framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118
    return tensors


def _check_bytes(llama: Checkpoint, iha: Checkpoint, names: list[str]) -> list[str]:
    with ThreadPoolExecutor(max_workers=4) as pool:
        return [reason for reason in pool.map(lambda name: _compare(llama, iha, name), names) if reason]


def _compare(llama: Checkpoint, iha: Checkpoint, name: str) -> str | None:
    ours, theirs = iha.tensors[name], llama.tensors[name]
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{name}: {theirs.dtype} {theirs.shape} in the source, {ours.dtype} {ours.shape} in the destination"
    paths = [resolve_inside(llama.folder, theirs.shard), resolve_inside(iha.folder, ours.shard)]
    if os.path.samefile(*paths) and ours.offset == theirs.offset:
        return None  # hard-linked: one file
    if _same_bytes(paths[0], theirs, paths[1], ours):
        return None
    return f"{name}: its bytes differ from the source's"


def _same_bytes(first: Path, first_entry: TensorEntry, second: Path, second_entry: TensorEntry) -> bool:
    with first.open("rb") as a, second.open("rb") as b:
        a.seek(first_entry.offset)
        b.seek(second_entry.offset)
        left = first_entry.nbytes
        while left:
            size = min(CHUNK, left)
            if a.read(size) != b.read(size):
                return False
            left -= size
    return True
