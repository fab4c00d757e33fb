import flash
import pytest
import torch
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@pytest.fixture
def float64_throughout(monkeypatch):
    """Transformers' rotary tables and eager's softmax are float32 always; beside them nothing shows at 1e-10."""

    def tables(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", tables)
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))


@pytest.fixture
def stand_in_flash(monkeypatch):
    functions = (
        flash.flash_attn_func,
        flash.flash_attn_varlen_func,
        None,
        flash_utils._pad_input,
        flash_utils._unpad_input,
    )
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
