"""What one optimiser step does to pseudo-heads, and that training options leave the function alone."""

import pytest
import torch
from models import smollm2_as_iha, tiny_model, tokens

import modeling_iha.backends
from modeling_iha.mixing import identity_copies

LEARNING_RATE = 1e-3


def step(model, ids):
    model.train()
    trained = [p for name, p in model.named_parameters() if ".mixer." in name or ".collapse." in name]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, weight_decay=0.0)
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def mixing(model, name):
    """[layers, P, heads, heads]"""
    return torch.stack([getattr(layer.self_attn.mixer, name).detach().clone() for layer in model.model.layers])


def test_pseudo_heads_of_exact_init_come_apart_in_one_step(smollm2, text):
    model = smollm2_as_iha(smollm2, torch.float32)
    before = {name: mixing(model, name) for name in ("q_mix", "k_mix", "v_mix")}
    step(model, text)
    after = {name: mixing(model, name) for name in before}
    for tensor in after.values():
        assert ((tensor[:, 0] - tensor[:, 1]).flatten(1).abs().amax(1) >= LEARNING_RATE).all()  # in every layer
    # Queries and values differ from the start. The keys start as copies, and it is the step that parts them.
    assert torch.equal(before["k_mix"][:, 0], before["k_mix"][:, 1])
    assert not torch.equal(before["v_mix"][:, 0], before["v_mix"][:, 1])
    # The collapse does not read pseudo-query 0 yet, so it rests; and copies of a key share their value's gradient.
    assert torch.equal(before["q_mix"][:, 0], after["q_mix"][:, 0])


def test_identity_copies_under_a_symmetric_mask_never_do(smollm2, text, monkeypatch):
    def token_level(mask, size, *_):
        seen = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool).tril()
        return seen.repeat_interleave(size, 0).repeat_interleave(size, 1)[None, None]

    monkeypatch.setattr(modeling_iha.backends, "virtual_mask", token_level)
    model = smollm2_as_iha(smollm2, torch.float32, init="identity")
    model.set_attn_implementation("eager")
    for layer in model.model.layers:  # a collapse that does not tell them apart either
        weight = layer.self_attn.collapse.weight.data
        weight[:] = torch.eye(len(weight))[:, None] / weight.shape[1]
    step(model, text)
    for layer in model.model.layers:
        for name in ("q_mix", "k_mix", "v_mix"):
            weight = getattr(layer.self_attn.mixer, name)
            assert (weight.detach() - identity_copies(weight)).abs().max() >= 0.5 * LEARNING_RATE  # they do move
            # Equal to rounding; AdamW's first step takes the sign, so the gradients say it and not the weights.
            assert (weight.grad[0] - weight.grad[1]).abs().max() <= 1e-4 * weight.grad.abs().max()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("phases", ["shared", "interleaved"])
def test_gradient_checkpointing_changes_nothing(phases, use_reentrant):
    ids = tokens(2, 9)
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(rope_phases=phases).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            assert model.is_gradient_checkpointing
        model(ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-9, atol=1e-12), name


def test_attention_dropout_acts_in_training_only():
    ids = tokens(1, 9)
    for attention in ("sdpa", "eager"):
        model = tiny_model(attention=attention, attention_dropout=0.5)
        plain = tiny_model(attention=attention)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, plain(ids).logits)
            model.train()
            assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-2)


def test_gradients_of_sdpa_and_eager_agree():
    ids = tokens(2, 9)
    gradients = []
    for attention in ("sdpa", "eager"):
        model = tiny_model(attention=attention, num_pseudo_heads=[3, 1, 2], rope_phases="fractional")
        model(ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-3, atol=1e-5 * float(gradient.abs().max())), name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("phases", ["shared", "fractional"])
def test_autocast_trains_and_decodes(phases, attention):
    model, ids = tiny_model(dtype=torch.float32, rope_phases=phases, attention=attention), tokens(2, 9)
    plain = model(ids, labels=ids).loss
    plain.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
        generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    loss.backward()
    assert abs(loss - plain) <= 0.02 * plain
    assert generated.shape == (2, 13)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        similarity = torch.nn.functional.cosine_similarity(parameter.grad.flatten(), expected[name].flatten(), dim=0)
        assert similarity >= 0.95, name
