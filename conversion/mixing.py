"""The mixing tensors of a whole model, by their names in a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from configuration_iha import IHAConfig
from modeling_iha import IHAModel
from modeling_iha.mixing import IHACollapse, IHAMixer

from .checkpoint import CheckpointError
from .llama import model_class


def mixing_modules(config: IHAConfig) -> Iterator[tuple[str, nn.Module]]:
    """Name in the state dict, and module, of all that a model of this configuration has beside Llama's."""
    prefix = "" if model_class(config) is IHAModel else "model."
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    for layer in range(config.num_hidden_layers):
        size = config.get_num_pseudo_heads(layer)
        if size > 1:
            yield f"{prefix}layers.{layer}.self_attn.mixer", IHAMixer(size, heads, groups)
            yield f"{prefix}layers.{layer}.self_attn.collapse", IHACollapse(size, heads)


def make_mixing(config: IHAConfig, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """The tensors, filled by the configuration's `mixing_init`; the global random state stays as it was."""
    mixing = {}
    with _absurd_counts_refused(config), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in mixing_modules(config):
            module.initialize(config.mixing_init, config.mixing_init_std)
            mixing |= {f"{name}.{key}": tensor.to(dtype) for key, tensor in module.state_dict().items()}
    return mixing


def added_shapes(config: IHAConfig, zeros: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of all that a conversion adds: mixing tensors, and biases that are zero."""
    return {**mixing_shapes(config), **dict.fromkeys(zeros, (config.hidden_size,))}


def mixing_shapes(config: IHAConfig) -> dict[str, tuple[int, ...]]:
    """The shapes that the tensors have."""
    with _absurd_counts_refused(config), torch.device("meta"):
        return {
            f"{name}.{key}": tuple(tensor.shape)
            for name, module in mixing_modules(config)
            for key, tensor in module.state_dict().items()
        }


@contextmanager
def _absurd_counts_refused(config: IHAConfig) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch has no memory, or no number, for such a size
        raise CheckpointError(f"config.json: num_pseudo_heads={config.num_pseudo_heads!r} is absurd.") from error
