"""Training IHA models with Transformers' Trainer, and planning it."""

import importlib

# Where each name is. Imported when it is asked for: planning needs neither TRL nor PEFT.
_MODULES = {
    "IHATrainer": "trainer",
    "MixingFigures": "figures",
    "Plan": "plan",
    "check_choices": "runs",
    "choose_trainable": "mixing",
    "is_mixing": "mixing",
    "last_complete_checkpoint": "checkpoints",
    "lora_config": "mixing",
    "plan_training": "plan",
    "refuse_unheeded": "runs",
    "run": "runs",
}

__all__ = [
    "IHATrainer",
    "MixingFigures",
    "Plan",
    "check_choices",
    "choose_trainable",
    "is_mixing",
    "last_complete_checkpoint",
    "lora_config",
    "plan_training",
    "refuse_unheeded",
    "run",
]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        extra = {"matplotlib": "plot", "tensorboard": "plot", "trl": "train", "peft": "train", "datasets": "train"}
        if error.name not in extra:
            raise
        raise ImportError(f"{__name__}.{name} needs pip install 'modeling-iha[{extra[error.name]}]'") from error
    globals()[name] = value
    return value
