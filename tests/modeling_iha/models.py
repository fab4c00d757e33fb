"""Models for the tests: tiny ones with random tensors, and the real SmolLM2 as IHA."""

import torch
from transformers import LlamaConfig

from modeling_iha import IHAConfig, IHAForCausalLM

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tiny_config(**fields) -> IHAConfig:
    """Random mixing tensors, so that nothing holds by the accident of a nice initialisation."""
    return IHAConfig(**{**SHAPE, "mixing_init": "normal", "mixing_init_std": 1.2, "initializer_range": 0.2, **fields})


def tiny_model(model_class=IHAForCausalLM, attention="sdpa", dtype=torch.float64, **fields):
    torch.manual_seed(0)
    return model_class._from_config(tiny_config(**fields), attn_implementation=attention).to(dtype).eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def smollm2_as_iha(folder, dtype, pseudo_heads=2, init="exact", std=1.0, **fields):
    """The real checkpoint loaded straight into IHAForCausalLM."""
    llama_config = LlamaConfig.from_pretrained(folder)
    config = IHAConfig.from_llama(llama_config, pseudo_heads, mixing_init=init, mixing_init_std=std, **fields)
    torch.manual_seed(0)
    return IHAForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()
