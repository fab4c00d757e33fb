import sys
from pathlib import Path

import pytest
import torch

from modeling_iha import IHAConfig, IHAForCausalLM

EXAMPLE = Path(__file__).parents[3] / "examples" / "sft_openthoughts"
sys.path.insert(0, str(EXAMPLE))


@pytest.fixture(scope="session")
def small_iha(tokenizer, tmp_path_factory) -> Path:
    """An untrained model of two layers with the real tokenizer and its chat template, as a conversion leaves it."""
    folder = tmp_path_factory.mktemp("small iha")
    torch.manual_seed(0)
    config = IHAConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_pseudo_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    IHAForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
