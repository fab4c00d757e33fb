"""Quantised checkpoints: their tensors are carried as they are, where Transformers reads them in IHA as in Llama."""

from collections.abc import Iterable

from .checkpoint import Checkpoint, CheckpointError

# Both put a layer of their own in the place of every projection, whatever the model. Others have not been tried.
METHODS = ("bitnet", "bitsandbytes")
# In int8 or bfloat16, for one; a difference in the last bit becomes one of a step.
QUANTISED = "quantization_config: quantised layers round what they read, so that no tolerance on logits tells;"


def quant_method(checkpoint: Checkpoint) -> str | None:
    """
    How the weights are quantised, one of `METHODS`; None where they are not.

    Raises:
        CheckpointError: in another way.
    """
    quantization = checkpoint.config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method not in METHODS:
        raise CheckpointError(
            f"config.json: quantization_config: quant_method {method!r} is not supported, only "
            f"{', '.join(METHODS)}. Save the model dequantised first."
        )
    return method


def owner(name: str, modules: Iterable[str]) -> str | None:
    """The module, of those named, under whose name a tensor stands: `a.b` for `a.b.weight.absmax`."""
    parts = name.split(".")
    names = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((module for module in names if module in modules), None)
