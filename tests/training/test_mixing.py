"""What is trained at which rate, and what is logged of pseudo-heads."""

import json

import pytest
import torch
from models import SHAPE, tiny_model, tokens
from peft import PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_iha import IHAForCausalLM
from training_iha import choose_trainable, is_mixing, last_complete_checkpoint, lora_config
from training_iha.mixing import give_own_rate
from training_iha.monitor import distances, gradient_norm

PER_LAYER = ("collapse.weight", "mixer.k_mix", "mixer.q_mix", "mixer.v_mix")


def names(model, parameters):
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return sorted(known[id(parameter)] for parameter in parameters)


def test_mixing_alone_is_trained():
    model = tiny_model(num_pseudo_heads=[2, 1, 3])
    choose_trainable(model, "mixing")
    trained = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    assert trained == sorted(f"model.layers.{layer}.self_attn.{name}" for layer in (0, 2) for name in PER_LAYER)


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="train='all' must be"):
        choose_trainable(tiny_model(), "all")
    with pytest.raises(ValueError, match=r"model_type 'llama'\) has no mixing tensors.*iha convert"):
        choose_trainable(LlamaForCausalLM(LlamaConfig(**SHAPE)), "full")


def test_mixing_tensors_have_a_rate_of_their_own_and_no_decay():
    model = tiny_model(num_pseudo_heads=2)
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in named if "norm" not in name], "weight_decay": 0.1},
        {"params": [named[name] for name in named if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, 1e-5)
    give_own_rate(optimizer, model, 1e-3)
    others, norms, mixing = optimizer.param_groups
    assert (others["weight_decay"], norms["weight_decay"], mixing["weight_decay"]) == (0.1, 0.0, 0.0)
    assert (others["lr"], norms["lr"], mixing["lr"]) == (1e-5, 1e-5, 1e-3)
    assert names(model, mixing["params"]) == [
        name for name in sorted(dict(model.named_parameters())) if is_mixing(name)
    ]
    assert all("norm" in name for name in names(model, norms["params"]))
    everything = [parameter for group in (others, norms, mixing) for parameter in group["params"]]
    assert len(everything) == len({id(parameter) for parameter in everything}) == len(list(model.parameters()))


def adapted(model):
    model = get_peft_model(model, lora_config(rank=4, alpha=8))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def test_an_adapter_with_its_mixers_is_saved_loaded_and_merged_equal(tmp_path):
    ids = tokens(2, 9)
    plain = tiny_model(mixing_init="exact")
    before = plain(ids).logits
    model = adapted(plain)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sum(is_mixing(name) for name in trained) == 3 * len(PER_LAYER)
    assert sum("lora_A" in name for name in trained) == 3 * 7  # every projection of attention and MLP
    logits = model(ids).logits
    assert (logits - before).abs().max() > 1e-2 * before.abs().max()
    model.save_pretrained(tmp_path / "adapter")

    loaded = PeftModel.from_pretrained(tiny_model(mixing_init="exact"), tmp_path / "adapter").eval()
    assert torch.allclose(loaded(ids).logits, logits, rtol=0, atol=1e-6 * float(logits.abs().max()))
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = IHAForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    # Llama's norms compute in float32 in every model.
    assert torch.allclose(again(ids).logits, logits, rtol=0, atol=1e-6 * float(logits.abs().max()))
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == "iha"


def test_distances_of_copies_are_zero_and_of_others_what_they_are():
    model = tiny_model(mixing_init="identity", num_pseudo_heads=2)
    assert distances(model) == {"q_mix": 0.0, "k_mix": 0.0, "v_mix": 0.0, "collapse": 0.0}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.mixer.k_mix[0] *= 3  # 3 and 1 identities: their mean is 2, and the rest 1 and -1
            layer.self_attn.collapse.weight[:, 0] = layer.self_attn.collapse.weight[:, 1]
    apart = distances(model)
    assert apart["k_mix"] == pytest.approx((2 / 10) ** 0.5)
    assert apart["collapse"] == pytest.approx(0.5**0.5)
    assert apart["q_mix"] == apart["v_mix"] == 0.0


def test_distances_with_an_adapter_are_those_of_what_it_trains():
    model = adapted(tiny_model(mixing_init="identity"))
    trained = distances(model)
    assert all(distance > 0 for distance in trained.values())
    assert distances(model.merge_and_unload()) == pytest.approx(trained)


def test_the_gradient_norm_is_that_of_mixing_tensors():
    model = tiny_model(num_pseudo_heads=[2, 1, 3])
    ids = tokens(2, 9)
    assert gradient_norm(model) is None
    model(ids, labels=ids).loss.backward()
    squares = [
        p.grad.pow(2).sum() for name, p in model.named_parameters() if ".mixer." in name or ".collapse." in name
    ]
    assert len(squares) == 2 * len(PER_LAYER)
    assert gradient_norm(model) == pytest.approx(float(sum(squares)) ** 0.5)


def test_the_last_checkpoint_is_the_last_that_was_written_to_its_end(tmp_path):
    assert last_complete_checkpoint(tmp_path / "none") is None
    for step, state in ((2, {"global_step": 2}), (10, {"global_step": 10}), (12, None), (14, "{"), (16, {})):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    (tmp_path / "checkpoint-best").mkdir()
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
