"""Statistics against plain loops, patterns against the naive attention, figures against what they are drawn of."""

import base64
import json
import math
import re

import numpy as np
import pytest
import torch
from naive import mixed, phase, turn
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from configuration_iha import IHAConfig
from conversion_iha import CheckpointError, convert, inspect
from conversion_iha.cli import app
from inspection_iha import attention_patterns, by_layer, draw_graph, draw_mixing, draw_patterns, layer_statistics
from modeling_iha import IHAForCausalLM

FIELDS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_pseudo_heads": [2, 1, 3],
    "mixing_init": "normal",
    "rms_norm_eps": 1e-6,
}


def make_model(**fields):
    torch.manual_seed(0)
    config = IHAConfig(**{**FIELDS, **fields})
    return IHAForCausalLM._from_config(config, attn_implementation="eager").eval()


MIXED = (7, 29)


@pytest.fixture(scope="module")
def converted(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "iha"
    convert(smollm2, folder, [2 if layer in MIXED else 1 for layer in range(30)], link=True)
    return folder


def test_statistics_of_plain_loops():
    mixing = by_layer(make_model().state_dict())
    assert list(mixing) == [0, 2]
    for layer, size in ((0, 2), (2, 3)):
        row = layer_statistics(layer, mixing[layer])
        assert (row.layer, row.num_pseudo_heads) == (layer, size)
        for kind, heads in (("q_mix", 4), ("k_mix", 2), ("v_mix", 2)):
            tensor, off = mixing[layer][kind], 0.0
            for j in range(size):
                for h in range(heads):
                    for m in range(heads):
                        off += (float(tensor[j, h, m]) - (h == m)) ** 2
            assert row.distance[kind] == pytest.approx(math.sqrt(off / (size * heads)), rel=1e-12)
            gram = np.array([[float((tensor[i] * tensor[j]).sum()) for j in range(size)] for i in range(size)])
            shares = np.linalg.eigvalsh(gram) / np.trace(gram)
            assert row.distinct[kind] == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)), rel=1e-9)
        mass = [float(sum(x * x for x in mixing[layer]["collapse"][:, j].flatten())) for j in range(size)]
        assert row.collapse_mass == pytest.approx([part / sum(mass) for part in mass])


def test_what_the_statistics_of_copies_are():
    """Pure copies are one pseudo-head, at no distance; at right angles and equally large there are P."""
    mixing = by_layer(make_model(num_pseudo_heads=3, mixing_init="identity").state_dict())[1]
    row = layer_statistics(1, mixing)
    assert row.distance == {"q_mix": 0, "k_mix": 0, "v_mix": 0, "collapse": 0}
    assert row.collapse_mass == [0, 0, 1] and row.distinct == pytest.approx({"q_mix": 1, "k_mix": 1, "v_mix": 1})
    nothing = {kind: torch.zeros_like(tensor) for kind, tensor in mixing.items()}
    row = layer_statistics(1, nothing)
    assert row.collapse_mass == [0, 0, 0] and set(row.distinct.values()) == {1} and set(row.distance.values()) == {1}
    shifts = torch.stack([torch.eye(4, dtype=torch.float64).roll(j, 0) for j in range(3)])
    assert layer_statistics(1, {**mixing, "q_mix": shifts}).distinct["q_mix"] == pytest.approx(3)


@pytest.mark.parametrize("rope_phases", ["shared", "interleaved", "fractional"])
def test_patterns_are_those_of_plain_loops(rope_phases):
    """Layer 0, whose input needs nothing but the embeddings and their norm."""
    model = make_model(rope_phases=rope_phases, num_pseudo_heads=[2, 1, 3]).double()
    ids, size, head = torch.tensor([5, 9, 1, 33, 9]), 2, 3
    found = attention_patterns(model, ids, 0, head)
    attention, inv_freq = model.model.layers[0].self_attn, model.model.rotary_emb.inv_freq
    q_mix, k_mix, _ = (mix.detach().double() for mix in attention.mixer())
    with torch.no_grad():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        queries = attention.q_proj(x).view(5, 4, 8)
        keys = attention.k_proj(x).view(5, 2, 8)
    group = head // 2
    for n in range(5):
        base = n * size if rope_phases == "interleaved" else n
        query = turn(queries[n, head], base, inv_freq)
        bases = (m * size if rope_phases == "interleaved" else m for m in range(n + 1))
        logits = torch.stack([query @ turn(keys[m, group], at, inv_freq) for m, at in enumerate(bases)])
        plain = torch.zeros(5, dtype=torch.float64)
        plain[: n + 1] = (logits * 8**-0.5).softmax(0)
        assert torch.allclose(found.plain[n].double(), plain, atol=1e-6)
        for i in range(size):
            query = turn(mixed(q_mix, queries[n], i, head), phase(rope_phases, n, i, size), inv_freq)
            logits = torch.full((5, size), -math.inf, dtype=torch.float64)
            for m in range(n + 1):
                for j in range(size):
                    if m * size + j <= n * size + i:
                        key = turn(mixed(k_mix, keys[m], j, group), phase(rope_phases, m, j, size), inv_freq)
                        logits[m, j] = query @ key * 8**-0.5
            weights = logits.flatten().softmax(0).view(5, size).T
            assert torch.allclose(found.weights[i, :, n].double(), weights, atol=1e-6)


def test_patterns_in_a_window_and_where_nothing_is_mixed():
    fields = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 2}
    model = make_model(**fields)
    ids = torch.arange(6)
    windowed = attention_patterns(model, ids, 0, 0)
    outside = torch.ones(6, 6).tril(-2) + torch.ones(6, 6).triu(1) > 0
    assert not windowed.plain[outside].any() and not windowed.weights[:, :, outside].any()
    alone = attention_patterns(model, ids, 1, 2)
    assert alone.weights.shape == (1, 1, 6, 6) and torch.allclose(alone.weights[0, 0], alone.plain, atol=1e-6)
    for arguments, message in (((3, 0), "layer=3 must be"), ((0, -1), "head=-1 must be")):
        with pytest.raises(ValueError, match=message):
            attention_patterns(model, ids, *arguments)


def test_patterns_of_a_model_in_training_that_is_left_as_it_was():
    model = make_model(attention_dropout=0.5)
    expected = attention_patterns(model, torch.arange(6), 2, 1)
    model.set_attn_implementation("sdpa")
    model.train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    found = attention_patterns(model, torch.arange(6), 2, 1)
    assert torch.equal(found.weights, expected.weights) and torch.equal(found.plain, expected.plain)
    assert model.config._attn_implementation == "sdpa"
    assert [module.training for module in model.modules()] == before
    with pytest.raises(ValueError, match="head=4 must be"):
        attention_patterns(model, torch.arange(6), 2, 4)
    for tokens in (0, 257):
        with pytest.raises(ValueError, match=f"prompt: it has {tokens} tokens; 1 to 256 can be drawn"):
            attention_patterns(model, torch.zeros(tokens, dtype=torch.long), 2, 1)


def test_figures_show_the_tensors():
    mixing = by_layer(make_model().state_dict())
    images = [ax.images[0] for ax in draw_mixing(2, mixing[2]).axes if ax.images]
    drawn = [np.asarray(image.get_array()) for image in images]
    expected = [mixing[2][kind][j] for kind in ("q_mix", "k_mix", "v_mix") for j in range(3)]
    expected += [mixing[2]["collapse"][:, j] for j in range(3)]
    assert len(drawn) == 12 and all(np.array_equal(a, b) for a, b in zip(drawn, expected, strict=True))
    assert all(image.norm.vmin == -image.norm.vmax for image in images)

    patterns = attention_patterns(make_model(), torch.arange(5), 2, 1)
    figure = draw_patterns(patterns, ["a", "\n", "<b>", "d", "e"])
    images = [ax.images[0].get_array() for ax in figure.axes if ax.images][: 1 + 9]
    assert np.array_equal(images[0], patterns.plain)
    assert all(np.array_equal(image, patterns.weights[n // 3, n % 3]) for n, image in enumerate(images[1:]))
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["a", "\\n", "<b>", "d", "e"]


def test_the_graph_has_a_line_for_each_weight_that_is_not_faint():
    mixing = by_layer(make_model(num_pseudo_heads=2, mixing_init="identity").state_dict())[0]
    mixing["q_mix"][0, 1, 3] = -0.5
    mixing["collapse"][2, 0, 0] = 0.01  # of 1: too faint
    lines = draw_graph(0, mixing).axes[0].lines
    assert len(lines) == 2 * 4 + 1 + 4
    (blue,) = [line for line in lines if line.get_color() == "tab:blue"]
    assert blue.get_alpha() == 0.5 and list(blue.get_xdata()) == [0, 1]


@pytest.mark.slow
def test_the_command_inspects_a_real_model(converted, tmp_path):
    prompt = "The key is 41 <b>&amp;. The key is"
    options = ["--output-dir", str(tmp_path / "inside"), "--prompt", prompt, "--layer", "7", "--head", "4"]
    said = CliRunner().invoke(app, ["inspect", str(converted), *options], terminal_width=200)
    assert said.exit_code == 0, said.output
    assert re.search(r"│\s+29 │\s+2 │", said.output) and "Written:" in said.output
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]

    rows = json.loads((tmp_path / "inside" / "statistics.json").read_text())
    assert rows == json.loads(CliRunner().invoke(app, ["inspect", str(converted), "--json"]).stdout)
    assert [row["layer"] for row in rows] == list(MIXED)
    for row in rows:  # as a conversion makes them
        assert row["distance"]["k_mix"] == row["distance"]["collapse"] == 0 and row["collapse_mass"] == [0, 1]
        assert row["distance"]["q_mix"] > 0.1 and 1 < row["distinct"]["v_mix"] < 2

    pictures = sorted((tmp_path / "inside").glob("*.png"))
    assert len(pictures) == 4 and {"attention.png", "graph.png", "mixing-029.png"} <= {p.name for p in pictures}
    page = (tmp_path / "inside" / "index.html").read_text()
    assert "The key is 41 &lt;b&gt;&amp;amp;. The key is" in page
    assert not re.findall(r'(?:src|href)="(?!data:)|url\(|<script|@import', page)  # it asks for nothing
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(images) == 4 and all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)

    model = AutoModelForCausalLM.from_pretrained(converted, attn_implementation="eager")
    ids = AutoTokenizer.from_pretrained(converted)(prompt, return_tensors="pt").input_ids[0]
    patterns = attention_patterns(model, ids, 7, 4)
    # The last pseudo-query of a model that was just converted attends as the plain head does.
    assert torch.allclose(patterns.weights[1].sum(0), patterns.plain, atol=1e-5)


def test_what_cannot_be_inspected_is_refused(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path / "iha")
    with pytest.raises(ValueError, match=r"layer=1 must be one with pseudo-heads: 0, 2"):
        inspect(tmp_path / "iha", tmp_path / "out", layer=1)
    with pytest.raises(ValueError, match=r"layer=1: it is drawn, so an output_dir is needed"):
        inspect(tmp_path / "iha", layer=1)
    with pytest.raises(ValueError, match=r"head=1: its patterns are those of a prompt, which is needed"):
        inspect(tmp_path / "iha", tmp_path / "out", head=1)
    with pytest.raises(ValueError, match=r"head=4 must be at least 0 and below 4"):
        inspect(tmp_path / "iha", tmp_path / "out", prompt="Hello", head=4)
    with pytest.raises(ValueError, match="an output_dir is needed"):
        inspect(tmp_path / "iha", prompt="Hello")
    with pytest.raises(CheckpointError, match="exists already; name another folder"):
        inspect(tmp_path / "iha", tmp_path)
    make_model(num_pseudo_heads=1).save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="num_pseudo_heads is 1 in every layer"):
        inspect(tmp_path / "plain")
    model.config.to_llama().save_pretrained(tmp_path / "iha")
    with pytest.raises(CheckpointError, match="model_type 'llama', an IHA folder has 'iha'"):
        inspect(tmp_path / "iha", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iha", "plain"]
