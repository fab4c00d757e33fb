"""Verification of a conversion: the structural proof, then the numeric comparison."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .checkpoint import CheckpointError, read_checkpoint
from .compare import PROMPTS, TOLERANCE, Comparison, compare
from .llama import main_dtype, read_llama
from .quantised import NOT_COMPARED, quant_method
from .source import open_source
from .structure import check_structure

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}


@dataclass(frozen=True)
class Verification:
    """`reasons`: what the structural proof found unmet; `comparisons`: one per dtype. `ok` where all is well."""

    reasons: tuple[str, ...]
    tensors: int
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        return not self.reasons and all(comparison.explained for comparison in self.comparisons)

    def to_dict(self) -> dict:
        comparisons = [{**asdict(comparison), "explained": comparison.explained} for comparison in self.comparisons]
        return {**asdict(self), "comparisons": comparisons, "ok": self.ok}


def verify(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    dtypes: tuple[torch.dtype, ...] | None = None,
    *,
    prompts: tuple[str, ...] = PROMPTS,
    new_tokens: int = 64,
    device: str = "cpu",
    revision: str | None = None,
) -> Verification:
    """
    Checks that an IHA folder computes what its Llama source computes.

    Args:
        source: the Llama checkpoint: a folder, a .gguf file, or a Hub id.
        destination: the IHA folder.
        dtypes: of the numeric comparison; empty for the structural proof alone, which runs no model. Default: float32
            for causal language models with a tokenizer; empty for others, which continue no prompts, and for quantised
            ones.
        prompts, new_tokens, device: see `compare`.
        revision: branch, tag or commit of a Hub id.

    Raises:
        CheckpointError: one of the two is not a whole checkpoint of its kind; or a numeric comparison was asked for,
            and the source is quantised or no causal language model.
    """
    destination = Path(destination)
    iha = read_checkpoint(destination)
    if iha.config.get("model_type") != "iha":
        raise CheckpointError(f"{destination}: model_type {iha.config.get('model_type')!r}, an IHA folder has 'iha'.")
    with open_source(source, revision, gguf_dtype=main_dtype(iha)) as folder:
        llama = read_llama(folder)
        reasons = check_structure(llama, iha)
        architectures = llama.config.get("architectures") or ["LlamaForCausalLM"]
        is_causal_lm = architectures[0] == "LlamaForCausalLM"
        if dtypes is None:
            comparable = is_causal_lm and not quant_method(llama.config) and any(folder.glob("tokenizer*"))
            dtypes = (torch.float32,) if comparable else ()
        if dtypes and not is_causal_lm:
            raise CheckpointError(
                f"config.json: architectures {architectures!r}: only causal language models are compared on prompts; "
                "leave --dtype away."
            )
        if dtypes and quant_method(llama.config):
            raise CheckpointError(f"config.json: {NOT_COMPARED} leave --dtype away.")
        comparisons = [compare(folder, destination, dtype, prompts, new_tokens, device) for dtype in dtypes]
    return Verification(tuple(reasons), len(llama.tensors), tuple(comparisons))
