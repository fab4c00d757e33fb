"""The baselines: their attention against plain loops, their FLOPs against what torch counts, and that they train."""

import json
import math
import sys

import pytest
import torch
from layers import CACHE
from models import SHAPE, tokens
from naive import naive_iha, turn
from runs import EXAMPLES, run_here
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

sys.path.insert(0, str(EXAMPLES / "baselines"))

from baselines import BASELINES, configuration
from exclusive import ExclusiveIHAConfig, ExclusiveIHAForCausalLM, without_own
from flops import flops_per_token
from talking_heads import TalkingHeadsConfig, TalkingHeadsForCausalLM

from configuration_iha import IHAConfig, preset

LENGTH = 32
SMALL = IHAConfig(**{**SHAPE, "num_hidden_layers": 5, "intermediate_size": 512, "initializer_range": 0.2})


@pytest.fixture
def float64_tables(monkeypatch):
    """Transformers' are float32 always; beside them nothing could be seen at 1e-10."""

    def tables(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", tables)


def built(name, shape=SMALL):
    torch.manual_seed(0)
    return BASELINES[name].model_class(configuration(name, shape, LENGTH)).double().eval()


def talking_model():
    torch.manual_seed(0)
    config = TalkingHeadsConfig(**{**SHAPE, "num_hidden_layers": 2, "initializer_range": 0.3})
    return TalkingHeadsForCausalLM(config).double().eval()


def exclusive_model(pseudo_heads):
    torch.manual_seed(0)
    fields = {**SHAPE, "num_hidden_layers": 2, "initializer_range": 0.3, "mixing_init": "normal"}
    return ExclusiveIHAForCausalLM(ExclusiveIHAConfig(**fields, num_pseudo_heads=pseudo_heads)).double().eval()


def layer_output(model, hidden, mask=None):
    """Of the first layer's attention, as the model calls it."""
    layer, caught = model.model.layers[0], []
    handle = layer.self_attn.register_forward_hook(lambda module, args, output: caught.append(output[0]))
    layer.input_layernorm, norm = torch.nn.Identity(), layer.input_layernorm
    with torch.no_grad():
        model.model(inputs_embeds=hidden, attention_mask=mask, use_cache=False)
    handle.remove()
    layer.input_layernorm = norm
    return caught[0]


def naive_talking_heads(x, attention, inv_freq, seen):
    """arXiv:2003.02436 in plain loops: one sequence [N, hidden size], of which token n sees the tokens seen(n)."""
    heads, head_dim = len(attention.before.weight), attention.head_dim
    q, k, v = (
        (x @ getattr(attention, f"{name}_proj").weight.T).view(len(x), -1, head_dim) for name in ("q", "k", "v")
    )
    group = [head // (heads // k.shape[1]) for head in range(heads)]
    output = torch.zeros(len(x), heads, head_dim, dtype=torch.float64)
    for n in range(len(x)):
        others = seen(n)
        logits = torch.zeros(heads, len(others), dtype=torch.float64)
        for m in range(heads):
            query = turn(q[n, m], n, inv_freq)
            for at, other in enumerate(others):
                logits[m, at] = query @ turn(k[other, group[m]], other, inv_freq) / math.sqrt(head_dim)
        mixed, weights = torch.zeros_like(logits), torch.zeros_like(logits)
        for h in range(heads):
            for m in range(heads):
                mixed[h] += attention.before.weight[h, m] * logits[m]
            mixed[h] = mixed[h].exp() / mixed[h].exp().sum()
        for h in range(heads):
            for m in range(heads):
                weights[h] += attention.after.weight[h, m] * mixed[m]
            for at, other in enumerate(others):
                output[n, h] += weights[h, at] * v[other, group[h]]
    return output.flatten(1) @ attention.o_proj.weight.T


@torch.no_grad()
def test_talking_heads_is_its_plain_loops(float64_tables):
    model = talking_model()
    hidden = torch.randn(2, 6, 64, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    attention, inv_freq = model.model.layers[0].self_attn, model.model.rotary_emb.inv_freq
    said = layer_output(model, hidden, mask)
    for row, real in zip(range(2), (6, 4), strict=True):
        expected = naive_talking_heads(hidden[row, :real], attention, inv_freq, lambda n: list(range(n + 1)))
        assert (said[row, :real] - expected).abs().max() < 1e-10


@torch.no_grad()
def test_talking_heads_that_do_not_talk_are_llama():
    model = talking_model()
    for layer in model.model.layers:
        layer.self_attn.before.weight.copy_(torch.eye(4))
        layer.self_attn.after.weight.copy_(torch.eye(4))
    fields = {name: value for name, value in model.config.to_dict().items() if name != "model_type"}
    llama = LlamaForCausalLM(LlamaConfig(**fields)).double().eval()
    assert not llama.load_state_dict(model.state_dict(), strict=False).missing_keys
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    difference = (model(ids, attention_mask=mask).logits - llama(ids, attention_mask=mask).logits)[mask.bool()]
    assert difference.abs().max() < 1e-12


def test_talking_heads_refuses_a_function_that_would_leave_the_mixing_out():
    with pytest.raises(ValueError, match="attn_implementation='sdpa' cannot mix heads"):
        TalkingHeadsForCausalLM._from_config(TalkingHeadsConfig(**SHAPE), attn_implementation="sdpa")


def test_nothing_of_the_own_value_is_left():
    torch.manual_seed(0)
    output, value = torch.randn(2, 3, 6, 5, dtype=torch.float64), torch.randn(2, 3, 2, 5, dtype=torch.float64)
    value[0, 1, 1] = 0
    left = without_own(output, value)
    for row in range(2):
        for n in range(3):
            for h in range(6):
                o, v = output[row, n, h], value[row, n, h // 3]
                expected = o - (o @ v) / (v @ v) * v if v.any() else o
                assert (left[row, n, h] - expected).abs().max() < 1e-13
                assert abs(left[row, n, h] @ v) < 1e-13


@pytest.mark.parametrize("size", [1, 2])
@torch.no_grad()
def test_exclusive_iha_is_its_plain_loops(size, float64_tables):
    model, hidden = exclusive_model(size), torch.randn(1, 5, 64, dtype=torch.float64)
    attention = model.model.layers[0].self_attn
    weights = dict(attention.named_parameters())
    heads = naive_iha(
        hidden[0],
        {**weights, "o_proj.weight": torch.eye(64)},
        num_heads=4,
        num_key_value_heads=2,
        rope_phases="shared",
        inv_freq=model.model.rotary_emb.inv_freq,
        positions=list(range(5)),
        sees=lambda n, m: m <= n,
    ).view(5, 4, 16)
    values = (hidden[0] @ weights["v_proj.weight"].T).view(5, 2, 16)
    for n in range(5):
        for h in range(4):
            value = values[n, h // 2]
            heads[n, h] -= (heads[n, h] @ value) / (value @ value) * value
    expected = heads.flatten(1) @ weights["o_proj.weight"].T
    assert (layer_output(model, hidden)[0] - expected).abs().max() < 1e-10


@pytest.mark.parametrize("name", BASELINES)
def test_the_cache_changes_nothing(name):
    model, ids = built(name), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    said = [
        model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*said)
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :9])
        cached = model(ids[:, 9:], **{CACHE: getattr(first, CACHE)}).logits
    # Norms are float32 in every model.
    assert (cached - whole[:, 9:]).abs().max() < 1e-6 * whole.abs().max()


@pytest.mark.parametrize("name", ["Talking-Heads", "IHA hybrid + ESA"])
def test_a_saved_one_comes_back_as_what_it_was(name, tmp_path):
    model, ids = built(name).float(), tokens(1, 9)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py")) and "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    again = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", BASELINES)
def test_a_few_steps_lower_the_loss(name):
    model, ids = built(name).float().train(), tokens(4, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(6):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("name", ["Global", "IHA global", "Talking-Heads", "Differential"])
def test_flops_are_what_torch_counts(name):
    """Eager attention makes every pair of tokens, seen or not."""
    config = configuration(name, SMALL, LENGTH)
    if name in ("Global", "IHA global"):
        config.is_causal = config.use_cache = False
    how = None if name == "Talking-Heads" else "eager"
    model = BASELINES[name].model_class._from_config(config, attn_implementation=how)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(1, LENGTH), use_cache=False)
    # Transformers 5.17 makes the angles of RoPE by a product of positions and frequencies.
    rotary = sum(counter.get_flop_counts().get(f"{type(model).__name__}.model.rotary_emb", {}).values())
    more = counter.get_total_flops() - rotary - flops_per_token(config, LENGTH, is_causal=False)["total"] * LENGTH
    scores = 2 * config.head_dim * config.num_attention_heads * LENGTH**2 * config.num_hidden_layers
    # DiffLlama of 5.24 makes the same scores for each half of the values.
    assert more == 0 or (name == "Differential" and more == scores)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize(
    ("shape", "length"), [(SMALL, LENGTH), (preset("iha-2.4b"), 8192), (preset("llama-3.1-8b"), 8192)]
)
def test_flops_are_those_of_global(name, shape, length):
    config = configuration(name, shape, length)
    target = flops_per_token(configuration("Global", shape, length), length)
    assert config.intermediate_size % 8 == 0
    assert 0.95 < flops_per_token(config, length)["total"] / target["total"] < 1.05
    assert configuration("Global", shape, length).intermediate_size == shape.intermediate_size
    # As computed by hand: half of N^2 pairs, 4 d H each.
    by_hand = 2 * shape.num_hidden_layers * shape.head_dim * shape.num_attention_heads * (length + 1)
    assert target["attention"] == by_hand


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"IHA global with 65536 tokens takes 2\.\d\d times the FLOPs of Global"):
        configuration("IHA global", preset("iha-2.4b"), 65536)
    with pytest.raises(ValueError, match="baseline 'RetNet' must be one of 'Global'"):
        configuration("RetNet", SMALL, LENGTH)


def test_the_table_has_all_of_them(tmp_path, capsys):
    run_here(["python", EXAMPLES / "baselines" / "table.py", "--output_dir", tmp_path])
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["model"] for row in results["rows"]] == list(BASELINES)
    assert all(0.95 < row["ratio"] < 1.05 for row in results["rows"])
    shown = (EXAMPLES / "baselines" / "results.md").read_text()
    assert (tmp_path / "results.md").read_text() == shown
    assert shown.split("\n\n", 1)[1].strip() == capsys.readouterr().out.strip()


def test_the_table_says_what_cannot_be(tmp_path, capsys):
    command = ["python", EXAMPLES / "baselines" / "table.py", "smollm2-135m", "--output_dir", tmp_path / "none"]
    with pytest.raises(SystemExit):
        run_here(command)
    assert "error: IHA global with 8192 tokens takes 2.25 times" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_here([*command, "--sequence_length", "1024"])
    assert "error: num_key_value_heads=3 must be even" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
