"""Llama checkpoints -> IHA, and the proof that they are the same model."""

from .checkpoint import CheckpointError
from .compare import Comparison
from .convert import convert
from .verify import Verification, verify

__all__ = ["CheckpointError", "Comparison", "Verification", "convert", "verify"]
