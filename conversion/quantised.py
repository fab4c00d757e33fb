"""Quantised checkpoints: their tensors are carried as they are, where Transformers reads them in IHA as in Llama."""

from collections.abc import Iterable

from .checkpoint import CheckpointError

# What stands beside a quantised weight, by method. Both put a layer of their own in the place of every projection,
# whatever the model; other methods have not been tried.
FOUR_BITS = {"weight.absmax", "weight.quant_map"}
BESIDE = {
    "bitsandbytes": (
        {"SCB"},
        FOUR_BITS | {"weight.quant_state.bitsandbytes__nf4"},
        FOUR_BITS | {"weight.quant_state.bitsandbytes__fp4"},
    ),
    "bitnet": ({"weight_scale"},),
}
SOMETIMES = {"weight_format", "weight.nested_absmax", "weight.nested_quant_map"}
NOT_COMPARED = (
    "quantization_config: quantised layers compute in a precision of their own, whatever dtype is asked for;"
)


def quant_method(config: dict) -> str | None:
    """
    How the weights are quantised, by the content of config.json: a key of `BESIDE`; None where they are not.

    Raises:
        CheckpointError: in another way.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    fields = quantization if isinstance(quantization, dict) else {}
    method = fields.get("quant_method")
    if method is None and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        method = "bitsandbytes"  # as Transformers takes it
    if method not in tuple(BESIDE):
        raise CheckpointError(
            f"config.json: quantization_config: quant_method {method!r} is not supported, only "
            f"{', '.join(BESIDE)}. Save the model dequantised first."
        )
    return method


def quantised_modules(names: Iterable[str], linears: set[str], method: str) -> set[str]:
    """
    The modules, of those in `linears`, that are quantised by the names of a checkpoint's tensors.

    Raises:
        CheckpointError: what stands beside a weight is not whole.
    """
    known, beside = set().union(*BESIDE[method]) | SOMETIMES, {}
    for name in names:
        module, suffix = _split(name, linears)
        if suffix in known:
            beside.setdefault(module, set()).add(suffix)
    for module, suffixes in beside.items():
        if suffixes - SOMETIMES not in BESIDE[method]:
            raise CheckpointError(
                f"tensors {module}.*: {', '.join(sorted(suffixes))} stand beside the weight; {method} has "
                f"{' or '.join(' and '.join(sorted(kind)) for kind in BESIDE[method])} there."
            )
    return set(beside)


def is_beside(name: str, quantised: set[str], method: str) -> bool:
    """Whether a tensor stands beside the weight of one of these modules."""
    return _split(name, quantised)[1] in set().union(*BESIDE[method]) | SOMETIMES


def _split(name: str, modules: set[str]) -> tuple[str | None, str | None]:
    """(`a.b`, `weight.absmax`) of `a.b.weight.absmax` where `a.b` is one of the modules."""
    parts = name.split(".")
    ends = (end for end in range(1, len(parts)) if ".".join(parts[:end]) in modules)
    return next(((".".join(parts[:end]), ".".join(parts[end:])) for end in ends), (None, None))
