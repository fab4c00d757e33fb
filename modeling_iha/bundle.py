"""The code that travels with a checkpoint: this package as flat sibling modules, found through `auto_map`."""

import inspect
import os
import re
from pathlib import Path

from configuration_iha import IHAConfig

AUTO_MAP = {
    "AutoConfig": "configuration_iha.IHAConfig",
    "AutoModel": "modeling_iha.IHAModel",
    "AutoModelForCausalLM": "modeling_iha.IHAForCausalLM",
    "AutoModelForSequenceClassification": "modeling_iha.IHAForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_iha.IHAForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_iha.IHAForQuestionAnswering",
}


def write_bundle(folder: str | os.PathLike) -> list[str]:
    """
    Writes the modules that `AUTO_MAP` names and all that they import, flat, into `folder` (made where it is missing).
    Works from the installed package and from a folder that was itself loaded as remote code.

    Returns:
        The file names written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    configuration = Path(inspect.getsourcefile(IHAConfig))
    siblings = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name != "__init__.py")
    names = []
    for path in dict.fromkeys([configuration, *siblings]):
        source = path.read_text(encoding="utf-8")
        # Transformers follows relative imports only.
        source = re.sub(r"^from configuration_iha import", "from .configuration_iha import", source, flags=re.M)
        (folder / path.name).write_text(source, encoding="utf-8")
        names.append(path.name)
    return names
