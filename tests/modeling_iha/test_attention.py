"""IHAAttention against plain loops in float64, over heads, P, phases, windows, padding and cache."""

import itertools

import pytest
import torch
from naive import naive_iha
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from modeling_iha import IHAConfig, IHAModel

TOKENS = 6
HEADS = [(4, 4), (4, 2), (9, 3)]
PHASES = ["shared", "interleaved", "fractional"]
GRID = list(itertools.product(HEADS, [1, 2, 3, 4], PHASES))
GRID_NAMES = [f"{h}/{g}-P{p}-{phases}" for (h, g), p, phases in GRID]


@pytest.fixture(autouse=True)
def float64_tables(monkeypatch):
    """Transformers' tables are float32 always; beside them nothing could be seen at 1e-10."""

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)


class Layer:
    """One attention layer with random tensors, run by the package and by the reference."""

    def __init__(self, heads=(4, 2), pseudo_heads=2, phases="shared", attention="sdpa", **fields):
        torch.manual_seed(0)
        self.heads, self.phases = heads, phases
        config = IHAConfig(
            vocab_size=8,
            hidden_size=8 * heads[0],
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=heads[0],
            num_key_value_heads=heads[1],
            num_pseudo_heads=pseudo_heads,
            rope_phases=phases,
            mixing_init="normal",
            mixing_init_std=0.7,
            initializer_range=0.3,
            **fields,
        )
        model = IHAModel._from_config(config, attn_implementation=attention).double().eval()
        self.config, self.rotary, self.attention = config, model.rotary_emb, model.layers[0].self_attn
        self.pseudo_heads = pseudo_heads
        for name, parameter in self.attention.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        self.weights = dict(self.attention.state_dict())

    def __call__(self, x, positions, mask=None, cache=None):
        tables = self.rotary(x, positions)[str(self.pseudo_heads)]
        with torch.no_grad():
            return self.attention(x, tables, mask, past_key_values=cache)[0]

    def input(self, batch=1, tokens=TOKENS):
        return torch.randn(batch, tokens, self.config.hidden_size, dtype=torch.float64)

    def reference(self, x, positions, sees=lambda n, m: True):
        return naive_iha(x, self.weights, *self.heads, self.phases, self.rotary.inv_freq, positions, sees)


def assert_close(result, expected, tolerance=1e-10):
    assert (result - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(("heads", "pseudo_heads", "phases"), GRID, ids=GRID_NAMES)
def test_full_sequence_and_token_by_token(heads, pseudo_heads, phases):
    layer = Layer(heads, pseudo_heads, phases)
    x, positions = layer.input(), torch.arange(TOKENS)[None]
    expected = layer.reference(x[0], positions[0].tolist())
    assert_close(layer(x, positions)[0], expected)

    cache = DynamicCache(config=layer.config)
    steps = [layer(x[:, n : n + 1], positions[:, n : n + 1], cache=cache)[0, 0] for n in range(TOKENS)]
    assert_close(torch.stack(steps), expected)


@pytest.mark.parametrize(("heads", "pseudo_heads", "phases"), GRID, ids=GRID_NAMES)
def test_eager_is_the_same_function(heads, pseudo_heads, phases, monkeypatch):
    # As with the tables: eager's softmax is float32 in every model, and rounds at 1e-7.
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype: softmax(x, dim=dim))
    layer = Layer(heads, pseudo_heads, phases, attention="eager")
    x, positions = layer.input(), torch.arange(TOKENS)[None]
    causal = torch.ones(1, 1, TOKENS, TOKENS).tril().log().double()  # 0 and -inf, as eager takes it
    assert_close(layer(x, positions, causal)[0], layer.reference(x[0], positions[0].tolist()))


@pytest.mark.parametrize(("pseudo_heads", "phases"), [(1, "shared"), (2, "interleaved"), (3, "fractional")])
def test_attention_bias_and_prefill_then_several_tokens(pseudo_heads, phases):
    layer = Layer(pseudo_heads=pseudo_heads, phases=phases, attention_bias=True)
    x, positions = layer.input(), torch.arange(TOKENS)[None]
    expected = layer.reference(x[0], positions[0].tolist())
    cache = DynamicCache(config=layer.config)
    first = layer(x[:, :3], positions[:, :3], cache=cache)
    mask = torch.ones(3, TOKENS, dtype=torch.bool).tril(3)[None, None]
    second = layer(x[:, 3:], positions[:, 3:], mask, cache)
    assert_close(torch.cat([first, second], dim=1)[0], expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("phases", PHASES)
def test_padding_is_not_seen(side, phases):
    layer = Layer(phases=phases)
    x = layer.input(batch=2)
    real = slice(2, TOKENS) if side == "left" else slice(0, TOKENS - 2)
    kept = torch.zeros(2, TOKENS, dtype=torch.bool)
    kept[0], kept[1, real] = True, True
    positions = (kept.cumsum(-1) - 1).clamp(min=0)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None] & kept[:, None, None, :]
    output = layer(x, positions, mask)
    assert_close(output[0], layer.reference(x[0], positions[0].tolist()))
    assert_close(output[1, real], layer.reference(x[1, real], positions[1, real].tolist()))


@pytest.mark.parametrize("phases", PHASES)
def test_packed_documents_do_not_see_each_other(phases):
    layer = Layer(phases=phases)
    x = layer.input()
    documents, positions = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([[0, 1, 0, 1, 2, 0]])
    same = documents[:, None] == documents[None, :]
    output = layer(x, positions, (same & torch.ones_like(same).tril())[None, None])
    assert_close(output[0], layer.reference(x[0], positions[0].tolist(), lambda n, m: bool(same[n, m])))


@pytest.mark.parametrize("phases", PHASES)
def test_window_counts_tokens(phases):
    window = 3
    layer = Layer(phases=phases, sliding_window=window)
    x, positions = layer.input(), torch.arange(TOKENS)[None]
    expected = layer.reference(x[0], positions[0].tolist(), lambda n, m: m > n - window)
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(1 - window)
    assert_close(layer(x, positions, seen[None, None])[0], expected)

    cache = DynamicCache(config=layer.config)  # with sliding layers: it forgets what left the window
    steps = [layer(x[:, n : n + 1], positions[:, n : n + 1], cache=cache)[0, 0] for n in range(TOKENS)]
    assert_close(torch.stack(steps), expected)


def test_the_cache_is_read_by_either_name_and_a_foreign_one_is_refused():
    layer = Layer()
    x, positions = layer.input(), torch.arange(TOKENS)[None]
    tables = layer.rotary(x, positions)["2"]
    for name in ("cache", "past_key_values"):
        cache = DynamicCache(config=layer.config)
        layer.attention(x, tables, **{name: cache})
        assert cache.get_seq_length() == TOKENS
    with pytest.raises(ValueError, match="cannot use a cache of type dict"):
        layer.attention(x, tables, cache={})
