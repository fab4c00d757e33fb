"""Training IHA models with Transformers' Trainer."""

from .checkpoints import last_complete_checkpoint
from .mixing import choose_trainable, is_mixing, lora_config
from .trainer import IHATrainer

__all__ = ["IHATrainer", "choose_trainable", "is_mixing", "last_complete_checkpoint", "lora_config"]
