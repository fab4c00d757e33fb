"""An IHA folder -> a repository of the Hub that anyone loads."""

import os
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects

from .checkpoint import CheckpointError
from .exporter import read_iha

# What a training run leaves beside the model, and pickles.
IGNORED = ["checkpoint-*", ".*", "*.bin", "*.pt", "*.pth"]


def push(folder: str | os.PathLike, repo_id: str, *, private: bool = False) -> str:
    """
    Pushes an IHA folder as `iha convert`, `save_pretrained` or a training run leaves it; the code that it brings loads
    it with trust_remote_code=True where this package is not installed. Files already there are not sent again.

    Args:
        folder: with config.json, weights, and a card as README.md, which will name the repository, not the folder.
        repo_id: name/model; made if it is not there.
        private: whether a new repository is.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: the folder is not a whole IHA checkpoint or has no card, or the Hub refused.
    """
    folder = Path(folder)
    iha = read_iha(folder)
    if not iha.config.get("auto_map") or not (folder / "modeling_iha.py").is_file():
        raise CheckpointError(
            f"{folder}: does not bring its code (auto_map, modeling_iha.py), so nobody could load it without this "
            "package. Load it with AutoModelForCausalLM and save_pretrained it again."
        )
    card = folder / "README.md"
    if not card.is_file():
        raise CheckpointError(f"{card}: not there. Write one: where the model came from, its licence, how it loads.")
    named, name = folder.resolve().name, repo_id.split("/")[-1]
    text = card.read_text(encoding="utf-8").replace(f'from_pretrained("{named}"', f'from_pretrained("{repo_id}"')
    text = text.replace(f"\n# {named}\n", f"\n# {name}\n")
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {name: folder / name for name in filter_repo_objects(names, ignore_patterns=IGNORED)}
    files["README.md"] = text.encode()
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        done = api.create_commit(repo_id, operations, commit_message="IHA model")
    except (HfHubHTTPError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{repo_id}: the Hub did not take it ({reason}). `hf auth login` logs in.") from error
    return done.commit_url
