"""Opens what a user names as a checkpoint: a folder, a GGUF file, or a model id of the Hub."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .checkpoint import CheckpointError
from .families import FAMILIES

CARRIED_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "[Ll][Ii][Cc][Ee][Nn][SsCc][Ee]*",
    "COPYING*",
    "NOTICE*",
    "USE_POLICY*",
)


def side_files(folder: Path) -> list[str]:
    """What stands beside weights and goes with them: tokenizer, chat templates, licence."""
    found = (path for pattern in CARRIED_FILES for path in sorted(folder.glob(pattern)) if not path.is_dir())
    return [path.relative_to(folder).as_posix() for path in found]


@contextmanager
def open_source(
    source: str | os.PathLike,
    revision: str | None = None,
    gguf_dtype: torch.dtype = torch.float32,
    scratch: Path | None = None,
) -> Iterator[Path]:
    """
    Yields a folder with config.json and safetensors weights.

    Args:
        source: a folder, a .gguf file (dequantised through Transformers into a temporary folder), or a Hub id
            (downloaded into the Hub's cache; pickles are never fetched).
        revision: branch, tag or commit of a Hub id.
        gguf_dtype: dtype that a GGUF file is dequantised to.
        scratch: where the temporary folder of a GGUF file is made; default the system's.

    Raises:
        CheckpointError: the source is none of these, or a GGUF file holds another architecture.
    """
    path = Path(source)
    if path.is_dir():
        yield path
    elif path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{path}: the file does not exist.")
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            _dequantise(path, Path(folder), gguf_dtype)
            yield Path(folder)
    elif path.exists():
        raise CheckpointError(f"{path}: a file of this kind is no source; name a folder, a .gguf file or a Hub id.")
    else:
        yield _download(str(source), revision)


def _download(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["config.json", "README.md", "model*.safetensors", "model.safetensors.index.json", *CARRIED_FILES]
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise CheckpointError(f"{repo_id}: no such folder or file, and a Hub id has the form name/model.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{repo_id}: no such folder here, and the Hub did not give such a model ({reason}). "
            "Check the name; a gated model needs `hf auth login`."
        ) from error


def _dequantise(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    try:
        import gguf as _  # noqa: F401  (Transformers' own message comes late and names a git install)
    except ImportError as error:
        raise CheckpointError(
            f"{gguf.name}: GGUF files need the gguf package: pip install modeling-iha[gguf]"
        ) from error
    # Alone in a folder: Transformers would take a tokenizer.json beside the file for the file's own.
    with tempfile.TemporaryDirectory(dir=folder) as alone:
        os.symlink(gguf.resolve(), Path(alone, gguf.name))
        try:
            _read_and_save({"pretrained_model_name_or_path": alone, "gguf_file": gguf.name}, folder, dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{gguf.name}: {error}") from error
        except Exception as error:  # the readers raise anything on a damaged file, and so does a full disk
            raise CheckpointError(f"{gguf.name}: Transformers cannot read it, or save it again ({error}).") from error


def _read_and_save(where: dict[str, str], folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(**where)
    if config.model_type not in ("llama", *FAMILIES):
        raise CheckpointError(f"model type {config.model_type!r}; only {', '.join(('llama', *FAMILIES))} become IHA.")
    with torch.device("meta"):
        needed = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()) * dtype.itemsize
    if (free := shutil.disk_usage(folder).free) < needed:
        raise CheckpointError(
            f"dequantised it takes {needed / 1e9:.2f} GB and {folder.parent} has {free / 1e9:.2f} GB free; make room."
        )
    model = AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=dtype)
    # Dequantised, the model is a plain one; with these it would be saved as a quantised one.
    model.hf_quantizer = None
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # Transformers 5.17 confuses the special tokens of GGUF tokenizers; the config has the file's own ids.
    for name in ("bos_token", "eos_token", "pad_token"):
        token_id = getattr(model.config, f"{name}_id")
        if token_id is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # which safetensors makes unreadable for others than their owner
        shutil.copymode(folder / "config.json", weights)
    tokenizer.save_pretrained(folder)
