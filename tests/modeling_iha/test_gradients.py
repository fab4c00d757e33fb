"""Gradients against central finite differences in float64, and the same from every backend and through a cache."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from models import tiny_config
from transformers import DynamicCache

from conversion_iha.compare import norms_in_float64
from modeling_iha import IHAModel, pieces
from modeling_iha.attention import IHAAttention
from modeling_iha.rotary import IHARotaryEmbedding

BATCH, TOKENS, WINDOW = 2, 8, 3
PHASES = ["shared", "interleaved", "fractional"]
MIXING = ("q_mix", "k_mix", "v_mix", "collapse.weight")
STEP = 1e-5

# Rows of what each token is: 0 is padding, equal numbers are one document.
LAYOUTS = {
    "plain": [[1] * TOKENS] * BATCH,
    "packed": [[1, 1, 1, 2, 2, 3, 3, 3], [1, 2, 2, 2, 2, 2, 2, 3]],
    "padded": [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]],
    "padded inside": [[1, 1, 0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 1, 1, 1]],
    "packed and padded": [[1, 1, 1, 2, 2, 0, 0, 0], [0, 1, 1, 1, 1, 2, 2, 2]],
    "4-D": [[1, 1, 1, 2, 1, 1, 2, 1], [1, 2, 2, 1, 1, 2, 2, 2]],
    "4-D additive": [[1, 1, 1, 2, 1, 1, 2, 1], [1, 2, 2, 1, 1, 2, 2, 2]],
}
SETTINGS = list(itertools.product(LAYOUTS, ["full", "window"]))
# What is computed without a mask, and what document by document; all else is in blocks.
NOT_IN_BLOCKS = {("plain", "full"), ("packed", "full"), ("padded", "full"), ("packed and padded", "full")}

pytestmark = pytest.mark.usefixtures("float64_throughout")


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Pieces so small that short sequences have several blocks; counts them."""
    counted = SimpleNamespace(number=0)
    kernel = pieces.scaled_dot_product_attention

    def count(*args, **kwargs):
        counted.number += 1
        return kernel(*args, **kwargs)

    monkeypatch.setattr(pieces, "scaled_dot_product_attention", count)
    monkeypatch.setattr(pieces, "SMALLEST_BLOCK", 2)
    monkeypatch.setattr(pieces, "ALIGNMENT", 1)
    monkeypatch.setattr(pieces, "LARGEST_MASK", 2 * 3 * TOKENS)
    return counted


class Setting:
    """A model of two layers, an input, and a loss that reads every real token."""

    def __init__(self, layout="plain", reach="full", attention="sdpa", **fields):
        torch.manual_seed(0)
        windows = {"sliding_window": WINDOW} if reach == "window" else {}
        config = tiny_config(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, attention_bias=True, **windows, **fields
        )
        self.model = norms_in_float64(IHAModel._from_config(config, attn_implementation=attention).double().eval())
        documents = torch.tensor(LAYOUTS[layout])
        self.real = documents != 0
        same = documents[:, :, None] == documents[:, None, :]
        self.positions = (same & self.real[:, None, :]).tril().sum(-1).clamp(min=1) - 1
        self.mask = None if self.real.all() else self.real.long()
        if layout.startswith("4-D"):
            self.positions = torch.arange(TOKENS)[None]
            self.mask = same.tril()[:, None]
            if layout.endswith("additive"):
                hidden = torch.finfo(torch.float64).min
                self.mask = torch.zeros(self.mask.shape, dtype=torch.float64).masked_fill(~self.mask, hidden)
        self.x = torch.randn(BATCH, TOKENS, 16, dtype=torch.float64, requires_grad=True)
        self.weight = torch.randn(BATCH, TOKENS, 16, dtype=torch.float64) * self.real[..., None]

    def forward(self, start=0, stop=TOKENS, **kwargs):
        return self.model(
            inputs_embeds=self.x[:, start:stop],
            attention_mask=self.mask,
            position_ids=self.positions[:, start:stop],
            **kwargs,
        )

    def loss(self):
        output = self.forward(use_cache=False).last_hidden_state
        return (self.weight * output).sum()

    def tensors(self):
        return {"x": self.x, **dict(self.model.named_parameters())}

    def gradients(self, loss=None):
        tensors = self.tensors()
        loss = self.loss() if loss is None else loss
        grads = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        return {name: grad for name, grad in zip(tensors, grads, strict=True) if name != "embed_tokens.weight"}


@torch.no_grad()
def slope(loss, tensor, direction):
    """The central difference of the loss along a direction."""
    kept = tensor.detach().clone()
    ends = []
    for step in (STEP, -STEP):
        tensor.copy_(kept + step * direction)
        ends.append(loss())
    tensor.copy_(kept)
    return (ends[0] - ends[1]) / (2 * STEP)


def assert_slopes(setting, gradients):
    checked = {"x": setting.x, **{n: p for n, p in setting.tensors().items() if n.endswith(MIXING)}}
    assert len(checked) == 1 + 2 * len(MIXING)
    for name, tensor in checked.items():
        direction = torch.randn_like(tensor)
        difference = (gradients[name] * direction).sum() - slope(setting.loss, tensor, direction)
        assert difference.abs() <= 1e-7 * gradients[name].norm(), name


def assert_same_gradients(first, second, tolerance=1e-9):
    assert first.keys() == second.keys()
    for name, expected in second.items():
        assert (first[name] - expected).abs().max() <= tolerance * expected.abs().max(), name


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=lambda heads: "{}/{}".format(*heads))
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("phases", PHASES)
def test_every_entry_of_the_mixing_tensors_and_of_x(phases, size, heads):
    torch.manual_seed(0)
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 4 * heads[0]}
    config = tiny_config(num_pseudo_heads=size, rope_phases=phases, num_hidden_layers=1, **shape)
    config._attn_implementation = "sdpa"
    layer = IHAAttention(config, 0).double().eval()
    names = [name for name, _ in layer.named_parameters() if name.endswith(MIXING)]
    assert len(names) == 4
    values = [torch.randn(layer.get_parameter(name).shape, dtype=torch.float64) for name in names]
    x = torch.randn(1, 4, 4 * heads[0], dtype=torch.float64)
    tables = IHARotaryEmbedding(config)(x, torch.arange(4)[None])[str(size)]
    weight = torch.randn(x.shape, dtype=torch.float64)

    def loss(x, *values):
        mixing = dict(zip(names, values, strict=True))
        return (weight * torch.func.functional_call(layer, mixing, (x, tables))[0]).sum()

    inputs = [tensor.requires_grad_() for tensor in (x, *values)]
    assert torch.autograd.gradcheck(loss, inputs, eps=STEP, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("layout", "reach"), SETTINGS)
@pytest.mark.parametrize("phases", PHASES)
def test_a_model_has_the_slopes_of_its_loss_in_every_setting(phases, layout, reach, blocks):
    setting = Setting(layout, reach, rope_phases=phases, num_pseudo_heads=[2, 3])
    gradients = setting.gradients()
    assert (blocks.number > 2) == ((layout, reach) not in NOT_IN_BLOCKS)  # several in each of the two layers
    assert_slopes(setting, gradients)
    assert not gradients["x"][~setting.real].any()


# Transformers' loss reads the row of the last padding token, whose next token is real.
@pytest.mark.parametrize("reach", ["full", "window"])
@pytest.mark.parametrize("layout", ["padded", "padded inside", "packed and padded"])
def test_a_loss_that_reads_padding_has_its_slopes_too(layout, reach):
    setting = Setting(layout, reach, num_pseudo_heads=[2, 3])
    setting.weight = torch.randn_like(setting.weight)
    assert_slopes(setting, setting.gradients())


@pytest.mark.parametrize(("layout", "reach"), SETTINGS)
@pytest.mark.parametrize("phases", PHASES)
def test_sdpa_and_eager_have_the_same_gradients(phases, layout, reach):
    sdpa, eager = (
        Setting(layout, reach, attention, rope_phases=phases, num_pseudo_heads=[2, 3]).gradients()
        for attention in ("sdpa", "eager")
    )
    assert_same_gradients(sdpa, eager)


@pytest.mark.parametrize("chunks", [[5, 3], [1] * TOKENS, [3, 1, 4]], ids=str)
@pytest.mark.parametrize("reach", ["full", "window"])
@pytest.mark.parametrize("phases", PHASES)
def test_gradients_flow_through_the_cache(phases, reach, chunks):
    setting = Setting("plain", reach, rope_phases=phases, num_pseudo_heads=[3, 2])
    cache, start, loss = DynamicCache(config=setting.model.config), 0, 0.0
    for size in chunks:
        stop = start + size
        output = setting.forward(start, stop, past_key_values=cache, use_cache=True).last_hidden_state
        loss = loss + (setting.weight[:, start:stop] * output).sum()
        start = stop
    assert_same_gradients(setting.gradients(loss), setting.gradients())
