"""Which parameters are trained, and with which learning rate: the mixing tensors differ from all others."""

import torch
from peft import LoraConfig
from torch import nn

MODULES = ("mixer", "collapse")


def is_mixing(name: str) -> bool:
    """Whether a parameter of this name is a mixing or collapse tensor, also where PEFT has wrapped its module."""
    return any(module in name.split(".") for module in MODULES)


def choose_trainable(model: nn.Module, train: str):
    """
    Freezes what is not trained.

    Args:
        model: an IHA model.
        train: "full" for all parameters, "mixing" for the mixing tensors alone. With "lora" PEFT freezes by itself.

    Raises:
        ValueError: another word, or a model without mixing tensors.
    """
    if train not in ("full", "mixing", "lora"):
        raise ValueError(f"train={train!r} must be 'full', 'mixing' or 'lora'.")
    if not any(is_mixing(name) for name, _ in model.named_parameters()):
        raise ValueError(
            f"The model (model_type {model.config.model_type!r}) has no mixing tensors. Make it an IHA model first: "
            "iha convert SOURCE DESTINATION --num-pseudo-heads 2"
        )
    if train == "mixing":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_mixing(name))


def lora_config(rank: int, alpha: int, **kwargs) -> LoraConfig:
    """Adapters on every projection but the language-model head; the mixing tensors are trained and saved whole."""
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear",
        modules_to_save=list(MODULES),
        task_type="CAUSAL_LM",
        **kwargs,
    )


def give_own_rate(optimizer: torch.optim.Optimizer, model: nn.Module, learning_rate: float):
    """Moves the mixing tensors of a fresh optimizer into a group of their own, with this rate and no weight decay."""
    mixing = {id(parameter): parameter for name, parameter in model.named_parameters() if is_mixing(name)}
    moved = []
    for group in optimizer.param_groups:
        moved += [parameter for parameter in group["params"] if id(parameter) in mixing]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in mixing]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    optimizer.add_param_group({"params": moved, "weight_decay": 0.0, "lr": learning_rate})
