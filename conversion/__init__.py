"""Llama checkpoints -> IHA, and the proof that they are the same model."""

import importlib

# Where each name is. Imported when it is asked for: `iha --help` needs no torch.
_MODULES = {
    "CheckpointError": "checkpoint",
    "Comparison": "compare",
    "Verification": "verifier",
    "convert": "converter",
    "export": "exporter",
    "inspect": "inspector",
    "push": "pusher",
    "verify": "verifier",
}

__all__ = ["CheckpointError", "Comparison", "Verification", "convert", "export", "inspect", "push", "verify"]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value
