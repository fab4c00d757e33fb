import json
import pydoc_data.topics
import sys
from pathlib import Path

import pytest
from runs import untrained

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "long_context"))

DOCUMENTS = list(pydoc_data.topics.topics.values())


@pytest.fixture(scope="session")
def documents(tmp_path_factory) -> Path:
    """Python's own help texts, 79 documents of up to 60 kB."""
    folder = tmp_path_factory.mktemp("documents")
    lines = (json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def own_tokenizer(tokenizer):
    """The real one with 1024 tokens, learned from the documents."""
    return tokenizer.train_new_from_iterator(DOCUMENTS, 1024)


@pytest.fixture(scope="session")
def full(own_tokenizer, tmp_path_factory) -> Path:
    """An untrained model of full layers for 64 tokens."""
    return untrained(own_tokenizer, tmp_path_factory.mktemp("full"), max_position_embeddings=64)


@pytest.fixture(scope="session")
def hybrid(own_tokenizer, tmp_path_factory) -> Path:
    """The same with the paper's schedule in small: a sliding layer, and a full one with P = 1."""
    fields = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "num_pseudo_heads": [2, 1]}
    return untrained(own_tokenizer, tmp_path_factory.mktemp("hybrid"), max_position_embeddings=64, **fields)
