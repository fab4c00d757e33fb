"""Which parameters are trained, and with which learning rate: the mixing tensors differ from all others."""

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


def parameter_groups(model: nn.Module, decayed: set[str], weight_decay: float, mixing_learning_rate: float) -> list:
    """The optimizer's groups: decayed, not decayed, and mixing tensors, not decayed and at a rate of their own."""
    groups = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
        {"params": [], "weight_decay": 0.0, "lr": mixing_learning_rate},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[2 if is_mixing(name) else name not in decayed]["params"].append(parameter)
    return [group for group in groups if group["params"]]
