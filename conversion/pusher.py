"""An IHA folder -> a repository of the Hub that anyone loads."""

import os
import re
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from .checkpoint import INDEX, WEIGHTS, CheckpointError
from .exporter import read_iha
from .source import side_files

MORE = ("results.json",)  # of a training run, which its card names; checkpoints and logs stay


def push(folder: str | os.PathLike, repo_id: str, *, private: bool = False) -> str:
    """
    Pushes an IHA folder as `iha convert`, `save_pretrained` or a training run leaves it; the code that it brings loads
    it with trust_remote_code=True where this package is not installed. Weights that the repository had go.

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
    code = [path.name for path in sorted(folder.glob("*.py"))]
    index = [INDEX] if iha.shards != (WEIGHTS,) else []
    names = [
        "config.json",
        *iha.shards,
        *index,
        *side_files(folder),
        *code,
        *(n for n in MORE if (folder / n).is_file()),
    ]
    operations = [CommitOperationAdd(name, folder / name) for name in names]
    operations.append(CommitOperationAdd("README.md", _named(card.read_text(encoding="utf-8"), repo_id).encode()))
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        # Weights of another number of files would be read before these.
        operations += [
            CommitOperationDelete(name)
            for name in api.list_repo_files(repo_id)
            if name not in names and (name == INDEX or Path(name).match("*.safetensors"))
        ]
        done = api.create_commit(repo_id, operations, commit_message="IHA model")
    except Exception as error:  # the client's network raises kinds of its own
        reason = " ".join(str(error).split())
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        login = (
            " `hf auth login` logs in." if status in (401, 403) or isinstance(error, LocalTokenNotFoundError) else ""
        )
        raise CheckpointError(f"{repo_id}: the Hub did not take it ({reason}).{login}") from error
    return done.commit_url


def _named(card: str, repo_id: str) -> str:
    """A card whose snippets and title have the repository's name where they had a folder's."""
    folders = re.findall(r'from_pretrained\("([^"/]+)"', card)
    for folder in dict.fromkeys(folders):
        card = card.replace(f'from_pretrained("{folder}"', f'from_pretrained("{repo_id}"')
        card = card.replace(f"\n# {folder}\n", f"\n# {repo_id.split('/')[-1]}\n")
    return card
