"""What a run refuses before its first step, and what it counts."""

import time
from dataclasses import dataclass, field

import pytest
import torch
from accelerate import Accelerator
from models import tiny_model
from trl import SFTConfig

from training_iha import check_choices, refuse_unheeded
from training_iha.checkpoints import check_can_go_on, form_of
from training_iha.trainer import _Progress
from training_iha.ulysses import transformers_attention, whole_rows


@dataclass
class Recipe:
    documents: str = field(default="packed", metadata={"choices": ["packed", "whole"]})
    model: str = "any"


def test_a_field_is_one_of_its_choices():
    check_choices(Recipe("whole", "another"))
    with pytest.raises(ValueError, match="documents='packd' must be one of 'packed', 'whole'"):
        check_choices(Recipe("packd"))


def test_what_is_not_heeded_is_refused(tmp_path):
    config = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, save_only_model=True)
    refuse_unheeded(config, {"packing": "never"})
    with pytest.raises(ValueError, match="save_only_model=True must be left out: an interrupted run could not go on"):
        refuse_unheeded(config, {"save_only_model": "an interrupted run could not go on"})
    pushing = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, push_to_hub=True)
    with pytest.raises(ValueError, match="hub_strategy='every_save' must be 'end'"):
        refuse_unheeded(pushing, {})
    pushing.hub_strategy = "end"
    refuse_unheeded(pushing, {})


@pytest.mark.parametrize(
    ("made", "form"),
    [
        ("model.safetensors", None),
        ("pytorch_model_fsdp_0/x", "SHARDED_STATE_DICT"),
        ("pytorch_model_fsdp.bin", "FULL_STATE_DICT"),
        ("global_step2/x", "DeepSpeed"),
    ],
)
def test_a_checkpoint_tells_what_wrote_it(made, form, tmp_path):
    (tmp_path / made).parent.mkdir(exist_ok=True)
    (tmp_path / made).touch()
    assert form_of(tmp_path) == form


def test_tokens_are_counted_without_padding():
    progress = _Progress()
    progress.on_train_begin(None, None, None)
    progress.count({"input_ids": torch.ones(2, 8), "attention_mask": torch.tensor([[1] * 8, [1] * 3 + [0] * 5])})
    progress.count({"input_ids": torch.ones(3, 8)})
    progress.time = time.perf_counter() - 1000
    assert progress.tokens_per_second(Accelerator(cpu=True)) * 1000 == pytest.approx(11 + 24, rel=1e-3)
    assert progress.tokens == 0


def test_eager_attention_is_no_function_that_could_be_replaced():
    model = tiny_model()
    model.set_attn_implementation("eager")
    with torch.no_grad(), transformers_attention(model.config):
        assert model(torch.ones(1, 3, dtype=torch.long)).logits.isfinite().all()


def test_rows_of_another_model_cannot_be_spread():
    with pytest.raises(ValueError, match="The model has no layers of IHAAttention"):
        whole_rows(torch.nn.Linear(2, 2), {}, None).__enter__()


def test_a_run_that_shares_rows_by_heads_does_not_go_on(tmp_path):
    class Shared:  # stands in for a Trainer of several processes
        def get_sp_size(self):
            return 2

    with pytest.raises(
        ValueError, match=r"with sp_size=2 Accelerate cannot skip the rows before it\. Remove the folder"
    ):
        check_can_go_on(tmp_path, Shared())
