"""Reads a folder as a Llama checkpoint, and refuses what is not one or holds something whose meaning is unknown."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig

import modeling_iha
from configuration_iha import IHAConfig
from modeling_iha import IHAPreTrainedModel

from .checkpoint import Checkpoint, CheckpointError, build_config, read_checkpoint, read_json
from .families import as_llama
from .quantised import is_beside, quant_method, quantised_modules

# Llama's question-answering head names its backbone differently, so its files cannot be carried as they are.
CONVERTIBLE = ("IHAForCausalLM", "IHAModel", "IHAForSequenceClassification", "IHAForTokenClassification")
# Fields of config.json, and why a checkpoint that sets one is refused.
UNKNOWN = {
    "auto_map": "the checkpoint brings its own code, so its function is unknown",
    "sliding_window": "Llama has no windows, so what it means is unknown",
    "per_layer_config": "layers that differ from each other are not supported",
}
TORCH_DTYPE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_llama(folder: Path) -> Checkpoint:
    """
    Reads a folder as a Llama checkpoint, also one of another family whose function is a Llama model's.

    Raises:
        CheckpointError: it is not whole, not Llama's, or holds something whose meaning is unknown.
    """
    quant_method(read_json(folder, "config.json"))  # before tensors of unknown dtypes are met
    checkpoint = read_checkpoint(folder)
    refuse_adapter(folder)
    refuse_unknown(checkpoint, UNKNOWN.keys() - {"sliding_window"})
    if checkpoint.config.get("is_causal") is False:
        raise CheckpointError("config.json: 'is_causal' is false: bidirectional models are not supported.")
    checkpoint = as_llama(checkpoint)
    refuse_unknown(checkpoint, UNKNOWN)
    if (folder / "tokenizer_config.json").exists() and "auto_map" in read_json(folder, "tokenizer_config.json"):
        raise CheckpointError("tokenizer_config.json: 'auto_map' is set: the tokenizer's own code is not carried.")
    check_tensors(checkpoint)
    return checkpoint


def refuse_unknown(checkpoint: Checkpoint, fields: Iterable[str]) -> None:
    """CheckpointError where config.json sets one of these fields of `UNKNOWN`."""
    for name in fields:
        if checkpoint.config.get(name) is not None:
            raise CheckpointError(f"config.json: {name!r} is set: {UNKNOWN[name]}.")


def refuse_adapter(folder: Path) -> None:
    """CheckpointError where an adapter lies in the folder."""
    if (folder / "adapter_config.json").exists():
        raise CheckpointError("adapter_config.json: merge the adapter into the model first.")


def check_tensors(checkpoint: Checkpoint) -> None:
    """Every tensor that the configured Llama has is there in its shape, and no other but what quantising adds."""
    method = quant_method(checkpoint.config)
    try:
        config = IHAConfig.from_llama(build_config(checkpoint, LlamaConfig), num_pseudo_heads=1)
        with torch.device("meta"):
            model = model_class(config)(config)
    except CheckpointError:
        raise
    except Exception as error:  # torch and Transformers raise any kind on absurd sizes
        raise CheckpointError(f"config.json: not a valid Llama configuration ({error}).") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    optional = set(model.all_tied_weights_keys)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantised = quantised_modules(checkpoint.tensors, linears, method) if method else set()
    for name, shape in expected.items():
        if name not in checkpoint.tensors and name not in optional and name not in checkpoint.zeros:
            raise CheckpointError(f"{checkpoint.folder}: tensor {name!r} is missing from the weights.")
        if name not in checkpoint.tensors or name.removesuffix(".weight") in quantised:
            continue
        entry = checkpoint.tensors[name]
        if entry.shape != shape:
            raise CheckpointError(f"{entry.shard}: tensor {name!r} has shape {entry.shape}, config.json says {shape}.")
        if entry.dtype not in TORCH_DTYPE:
            raise CheckpointError(f"{entry.shard}: tensor {name!r} has dtype {entry.dtype!r}, and no quantisation.")
    for name, entry in checkpoint.tensors.items():
        # Early Llama checkpoints store the rotary frequencies, which every version computes afresh.
        known = name in expected or name.endswith(".rotary_emb.inv_freq")
        if not known and not (method and is_beside(name, quantised, method)):
            raise CheckpointError(f"{entry.shard}: tensor {name!r} is not one of a Llama model's.")


def model_class(config: IHAConfig) -> type[IHAPreTrainedModel]:
    """The IHA class of a checkpoint, by its configuration's architectures."""
    architecture = (config.architectures or ["IHAForCausalLM"])[0]
    if architecture not in CONVERTIBLE:
        raise CheckpointError(
            f"config.json: architectures {config.architectures!r} is not supported; convertible are "
            f"{', '.join(name.replace('IHA', 'Llama') for name in CONVERTIBLE)}."
        )
    return getattr(modeling_iha, architecture)


def main_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of a Llama or IHA checkpoint's attention weights, or, where they are quantised, of its norms'."""
    kind = "input_layernorm.weight" if quant_method(checkpoint.config) else "self_attn.q_proj.weight"
    for name, entry in checkpoint.tensors.items():
        if name.endswith(kind):
            return TORCH_DTYPE[entry.dtype]
    raise CheckpointError(f"{checkpoint.folder}: no layer has a {kind!r}.")
