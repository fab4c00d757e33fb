"""Gradient checkpointing changes no number, in every setting, and takes the cache away with one warning."""

import logging

import pytest
import torch
from models import tiny_model, tokens
from transformers import DynamicCache

from modeling_iha import pieces

IDS = tokens(2, 12)
LEFT_PADDED = torch.ones_like(IDS)
LEFT_PADDED[1, :5] = 0
SETTINGS = {
    "plain": {},
    "packed": {"position_ids": torch.tensor([[*range(5), *range(7)], [*range(3), *range(1), *range(8)]])},
    "padded": {"attention_mask": LEFT_PADDED},
}
LAYERS = {
    "full": {"num_pseudo_heads": [2, 1, 3]},
    "sliding": {
        "num_pseudo_heads": [2, 3, 1],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 4,
    },
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(pieces, "SMALLEST_BLOCK", 4)
    monkeypatch.setattr(pieces, "ALIGNMENT", 1)


@pytest.fixture
def warnings(caplog):
    """What Transformers warns of; tests/conftest.py keeps all but errors from being seen."""
    logger = logging.getLogger("transformers")
    propagates, level = logger.propagate, logger.level
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    type(logger).warning_once.cache_clear()
    yield lambda: [record.getMessage() for record in caplog.records if "gradient checkpointing" in record.getMessage()]
    logger.propagate = propagates
    logger.setLevel(level)


def labels(setting):
    mask = SETTINGS[setting].get("attention_mask", torch.ones_like(IDS))
    return IDS.masked_fill(mask == 0, -100)


def step(setting, layers, use_reentrant=None, **kwargs):
    """The output, and every gradient, the embedding's and so the input's among them."""
    model = tiny_model(rope_phases="interleaved", **LAYERS[layers]).train()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    forwards = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: forwards.append(1))
    output = model(IDS, labels=labels(setting), **SETTINGS[setting], **kwargs)
    output.loss.backward()
    # Each layer ran once, and where it was checkpointed once more in the backward.
    assert len(forwards) == len(model.model.layers) * (1 if use_reentrant is None else 2)
    return output, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(first, second):
    assert torch.equal(first[0].logits, second[0].logits)
    for name, gradient in first[1].items():
        assert gradient.any(), name
        assert torch.allclose(second[1][name], gradient, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_layer_is_computed_again_and_no_number_changes(setting, layers, use_reentrant):
    assert_same(step(setting, layers, use_cache=False), step(setting, layers, use_reentrant, use_cache=False))


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_cache_is_switched_off_with_one_warning(setting, use_reentrant, warnings):
    plain = step(setting, "sliding", use_cache=True)
    assert not warnings()
    for _ in range(2):
        checkpointed = step(setting, "sliding", use_reentrant, use_cache=True)
        assert_same(plain, checkpointed)
    assert warnings() == ["`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`."]
    for output, has_cache in ((plain[0], True), (checkpointed[0], False)):
        assert any(name in output for name in ("cache", "past_key_values")) == has_cache


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_cache_that_is_given_stays_empty(use_reentrant, warnings):
    model = tiny_model(**LAYERS["sliding"]).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    cache = DynamicCache(config=model.config)
    output = model(IDS, labels=IDS, past_key_values=cache)
    output.loss.backward()
    assert cache.get_seq_length() == 0
    assert len(warnings()) == 2  # of the model, and of its layers
    assert torch.equal(output.logits, tiny_model(**LAYERS["sliding"])(IDS).logits)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_mixing_tensors_train_alone(use_reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(**LAYERS["sliding"]).train()
        model.requires_grad_(False)
        trained = {n: p.requires_grad_() for n, p in model.named_parameters() if ".mixer." in n or ".collapse." in n}
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()  # as the Trainer does for adapters
        model(IDS, labels=IDS).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in trained.items()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, rtol=1e-12, atol=1e-14), name


def test_evaluation_keeps_its_cache(warnings):
    model = tiny_model(**LAYERS["sliding"])
    expected = model.generate(IDS, max_new_tokens=8, do_sample=False)
    model.gradient_checkpointing_enable()
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), expected)
    assert not warnings()
