"""Figures of a real training run, read back as TensorBoard reads them."""

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainingArguments

from modeling_iha import IHAConfig, IHAForCausalLM
from training_iha import MixingFigures, lora_config


def make_model(vocab_size=32, num_pseudo_heads=(2, 1, 2)):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return IHAForCausalLM(
        IHAConfig(vocab_size=vocab_size, num_hidden_layers=3, num_pseudo_heads=num_pseudo_heads, **sizes)
    )


def images(model, folder, figures=None, tokenizer=None):
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 8, "labels": [[1, 2, 3, 4]] * 8})
    settings = {"per_device_train_batch_size": 1, "max_steps": 4, "save_steps": 2, "learning_rate": 0.05}
    args = TrainingArguments(folder, **settings, report_to=[], disable_tqdm=True, use_cpu=True)
    trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.add_callback(figures or MixingFigures())
    trainer.train()
    events = EventAccumulator(str(folder / "mixing"), size_guidance={"images": 0}).Reload()
    return {tag: events.Images(tag) for tag in events.Tags()["images"]}


@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_at_the_start_at_checkpoints_and_at_the_end(adapter, tokenizer, tmp_path):
    """
    Of an adapter the tensors that are trained, not those that PEFT keeps from before; and the patterns of a model that
    is trained with sdpa, which gives no weights.
    """
    model = make_model(vocab_size=len(tokenizer))
    trained = get_peft_model(model, lora_config(rank=2, alpha=4)) if adapter else model
    figures = MixingFigures(prompt="The capital of France is", layer=2, head=1)
    found = images(trained, tmp_path, figures, tokenizer)
    mixing = {f"{what}/layer {layer:03}" for what in ("mixing", "graph") for layer in (0, 2)}
    assert found.keys() == mixing | {"attention/layer 002, head 001"}
    for shown in found.values():
        assert [image.step for image in shown] == [0, 2, 4]
        assert len({image.encoded_image_string for image in shown}) == 3  # it learns
        assert all(image.encoded_image_string.startswith(b"\x89PNG") for image in shown)
    assert model.config._attn_implementation == "sdpa"


def test_what_cannot_be_drawn_is_refused_at_the_start(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="prompt needs a tokenizer"):
        images(make_model(), tmp_path, MixingFigures(prompt="Hello"))
    with pytest.raises(ValueError, match="layer=3 must be at least 0 and below 3"):
        images(make_model(len(tokenizer)), tmp_path, MixingFigures(prompt="Hello", layer=3), tokenizer)
    with pytest.raises(ValueError, match="num_pseudo_heads is 1 in every layer"):
        images(make_model(num_pseudo_heads=1), tmp_path)
