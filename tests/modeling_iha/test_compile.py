"""torch.compile without graph breaks: the training step in every setting, and decoding from a static cache."""

import pytest
import torch
from models import SHAPE, tiny_model, tokens
from torch._dynamo.utils import counters
from transformers import CompileConfig, MistralConfig, MistralForCausalLM

from modeling_iha import pieces

SLIDING = {
    "num_hidden_layers": 2,
    "num_pseudo_heads": [2, 1],
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
}
FULL = {"num_hidden_layers": 2, "num_pseudo_heads": [2, 1], "layer_types": ["full_attention"] * 2}
ONE_LAYER = {"num_hidden_layers": 1, "num_pseudo_heads": 2}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(pieces, "SMALLEST_BLOCK", 4)  # nine tokens are three blocks of a window
    monkeypatch.setattr(pieces, "ALIGNMENT", 1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def setting(value) -> str:
    return value if isinstance(value, str) else "sliding" if "sliding_window" in value else "full"


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def padded(side: str) -> dict[str, torch.Tensor]:
    """Labels leave out padding, whose last row counts all the same where the next token is real."""
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


BATCHES = {
    "plain": {"input_ids": tokens(2, 9), "labels": tokens(2, 9)},
    "left padded": padded("left"),
    "right padded": padded("right"),
    "packed": {
        "input_ids": tokens(2, 9),
        "labels": tokens(2, 9),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 0]]),
    },
}


def step(model, run, batch):
    model.zero_grad()
    loss = run(**batch).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_compiled_step_is_the_step(model, batch, backend):
    loss, gradients = step(model, model, batch)
    compiled_loss, compiled = step(model, torch.compile(model, fullgraph=True, backend=backend), batch)
    assert graphs() == 1
    assert torch.allclose(compiled_loss, loss, rtol=1e-5)
    for name, gradient in gradients.items():
        # Llama's norms compute in float32 in every model.
        assert (compiled[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("layers", "batch", "phases", "attention"),
    [
        (FULL, "plain", "fractional", "sdpa"),
        (FULL, "left padded", "shared", "sdpa"),
        (SLIDING, "plain", "interleaved", "sdpa"),
        (SLIDING, "packed", "fractional", "sdpa"),
        (SLIDING, "right padded", "shared", "eager"),
    ],
    ids=setting,
)
def test_the_training_step_is_one_graph_with_the_same_gradients(layers, batch, phases, attention):
    model = tiny_model(rope_phases=phases, attention=attention, **layers).train()
    assert_compiled_step_is_the_step(model, BATCHES[batch], "aot_eager")


@pytest.mark.parametrize(
    "layer", [{}, {"layer_types": ["sliding_attention"], "sliding_window": 64}], ids=["full", "window"]
)
def test_every_length_up_to_a_block_runs_the_same_graph(layer, monkeypatch):
    monkeypatch.setattr(pieces, "SMALLEST_BLOCK", 64)
    monkeypatch.setattr(pieces, "ALIGNMENT", 8)
    model = tiny_model(**ONE_LAYER, **layer)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for length in (9, 8, 7):
            inputs = {name: tensor[:, :length] for name, tensor in BATCHES["plain"].items()}
            compiled(**inputs, use_cache=False)
    assert graphs() <= 2  # the length once as a constant, then as a symbol


@pytest.mark.slow
def test_inductor_trains_a_sliding_layer():
    model = tiny_model(rope_phases="fractional", dtype=torch.float32, **ONE_LAYER, sliding_window=4).train()
    assert_compiled_step_is_the_step(model, BATCHES["plain"], "inductor")


def generate(model, ids, **how):
    return model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0, **how)


def generate_compiled(model, ids):
    """Prefill as it is, every decoding step compiled."""
    how = CompileConfig(fullgraph=True, dynamic=None, backend="eager", mode=None)
    how._compile_all_devices = True  # Transformers would compile on accelerators only
    return generate(model, ids, cache_implementation="static", compile_config=how)


@pytest.mark.parametrize("phases", ["shared", "interleaved"])
def test_decoding_from_a_static_cache_is_one_graph_for_all_tokens(phases):
    model = tiny_model(num_pseudo_heads=[2, 1, 3], rope_phases=phases)
    ids = tokens(2, 6)
    ids[1, :2] = 0  # padding
    assert torch.equal(generate_compiled(model, ids), generate(model, ids))
    assert graphs() == 1


@pytest.mark.parametrize(
    ("window", "size"),
    [
        pytest.param(4, 1, id="full window of plain attention"),
        pytest.param(4, 2, id="full window"),
        pytest.param(9, 2, id="filling window"),
    ],
)
def test_a_window_decodes_with_as_many_graphs_as_mistral(window, size):
    torch.manual_seed(0)
    ids = tokens(2, 6)
    shape = {**SHAPE, "num_hidden_layers": 1, "sliding_window": window}
    generate_compiled(MistralForCausalLM(MistralConfig(**shape)).eval(), ids)
    expected = graphs()
    assert 0 < expected <= 3  # the length as a constant, then as a symbol; and once more where the window is full

    torch._dynamo.reset()
    counters.clear()
    model = tiny_model(rope_phases="fractional", **{**ONE_LAYER, "num_pseudo_heads": size}, sliding_window=window)
    assert torch.equal(generate_compiled(model, ids), generate(model, ids))
    assert graphs() == expected
