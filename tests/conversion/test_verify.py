"""verify() proves and measures a conversion and sees through each way to break one; the command line, for real."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from folders import (
    INDEX,
    SHARDED,
    WEIGHTS,
    edit_config,
    edit_json,
    make_llama,
    make_speaking_llama,
    snapshot,
    split_header,
)
from safetensors.torch import load_file, save_file
from transformers import LlamaForSequenceClassification
from typer.testing import CliRunner

from configuration_iha import PRESETS
from conversion_iha import CheckpointError, convert, verify
from conversion_iha.cli import app
from conversion_iha.compare import PROMPTS
from conversion_iha.destination import MARKER

MIXING = "model-mixing.safetensors"
CARRIED = "model-00001-of-00001.safetensors"
LAYER = "model.layers.1.self_attn."
Q_MIX, K_MIX, V_MIX = (f"{LAYER}mixer.{name}_mix" for name in "qkv")
COLLAPSE = f"{LAYER}collapse.weight"
WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for one another make small models many times slower wherever something else runs too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def edit_mixing(folder: Path, change) -> None:
    """Changes the mixing tensors, and the index with them, as a program that saves them would."""
    tensors = load_file(folder / MIXING)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / MIXING, {"format": "pt"})

    def index_anew(index):
        kept = {name: shard for name, shard in index["weight_map"].items() if shard != MIXING}
        index["weight_map"] = kept | dict.fromkeys(tensors, MIXING)

    edit_json(folder / INDEX, index_anew)


def set_values(name, where, value):
    """A change of a mixing tensor at one place."""
    return lambda folder: edit_mixing(folder, lambda tensors: tensors[name].__setitem__(where, value))


def replace(name, make):
    return lambda folder: edit_mixing(folder, lambda tensors: tensors.update({name: make(tensors[name])}))


def rename(old, new):
    return lambda folder: edit_mixing(folder, lambda tensors: tensors.update({new: tensors.pop(old)}))


def set_config(**fields):
    return lambda folder: edit_config(folder, **fields)


def flip_bit(folder):
    """The lowest bit of one of Llama's weights, in place."""
    path = folder / CARRIED
    header, data = split_header(path)
    place = path.stat().st_size - len(data) + header[WEIGHT]["data_offsets"][0]
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def drop_weight(folder):
    path = folder / CARRIED
    tensors = load_file(path)
    tensors["model.layers.0.hook"] = tensors.pop(WEIGHT)
    save_file(tensors, path, {"format": "pt"})
    edit_json(
        folder / INDEX,
        lambda index: index["weight_map"].update({"model.layers.0.hook": index["weight_map"].pop(WEIGHT)}),
    )


def widen_weight(folder):
    path = folder / CARRIED
    tensors = load_file(path)
    tensors[WEIGHT] = tensors[WEIGHT].double()  # the same numbers, other bytes
    save_file(tensors, path, {"format": "pt"})


BROKEN = {
    "k-mix": (set_values(K_MIX, (0, 0, 1), 2.0**-20), K_MIX),
    "k-mix-last": (set_values(K_MIX, (1, 1, 1), 1.0 + 2.0**-20), K_MIX),
    "v-mix-mean": (set_values(V_MIX, (0, 1, 0), 0.5), V_MIX),
    "q-mix-last": (set_values(Q_MIX, (1, 2, 3), 2.0**-20), Q_MIX),
    "q-mix-nan": (set_values(Q_MIX, (0, 0, 0), float("nan")), Q_MIX),  # times the collapse's 0 it is not 0
    "q-mix-infinite": (set_values(Q_MIX, (0, 0, 0), float("inf")), Q_MIX),
    "v-mix-nan": (set_values(V_MIX, (0, 0, 0), float("nan")), V_MIX),
    "collapse-last": (set_values(COLLAPSE, (0, 1, 0), 0.5), COLLAPSE),
    "collapse-first": (set_values(COLLAPSE, (3, 0, 2), 2.0**-20), COLLAPSE),
    "collapse-other-head": (set_values(COLLAPSE, (0, 1, 1), 1.0), COLLAPSE),
    "mixing-of-three": (replace(K_MIX, lambda k_mix: k_mix[:1].repeat(3, 1, 1)), K_MIX),
    "mixing-of-more-heads": (replace(K_MIX, lambda k_mix: torch.eye(4).repeat(2, 1, 1)), K_MIX),
    "mixing-flat": (replace(Q_MIX, lambda q_mix: torch.ones(())), Q_MIX),
    "mixing-renamed": (rename(V_MIX, f"{LAYER}mixer.w_mix"), V_MIX),
    "mixing-lost": (lambda folder: edit_mixing(folder, lambda tensors: tensors.pop(V_MIX)), "layers?[ .]1"),
    "weight-bit": (flip_bit, WEIGHT),
    "weight-lost": (drop_weight, f"{WEIGHT}: not in the destination"),
    "weight-added": (drop_weight, "model.layers.0.hook: (not|neither) in the source"),
    "weight-dtype": (widen_weight, f"{WEIGHT}: F32"),
    "phases": (set_config(rope_phases="interleaved"), "rope_phases: 'interleaved'"),
    "fractional-phases": (set_config(rope_phases="fractional"), "rope_phases: 'fractional'"),
    "sliding": (
        set_config(layer_types=["sliding_attention", "full_attention"], sliding_window=4),
        "layer_types, sliding_window: a sliding layer",
    ),
    "not-causal": (set_config(is_causal=False), "is_causal: false"),
    "more-pseudo-heads": (set_config(num_pseudo_heads=3), "num_pseudo_heads"),
    "fewer-pseudo-heads": (set_config(num_pseudo_heads=[2, 1]), "layers?[ .]1.*num_pseudo_heads"),
    "norm": (set_config(rms_norm_eps=1e-3), "config.json: rms_norm_eps is 1e-06"),
    "rope": (set_config(rope_parameters={"rope_type": "default", "rope_theta": 5.0}), "config.json: rope_parameters"),
    "activation": (set_config(hidden_act="gelu"), "config.json: hidden_act"),
    "tied": (set_config(tie_word_embeddings=True), "config.json: tie_word_embeddings"),
    "quantised": (set_config(quantization_config={"quant_method": "bitnet"}), "config.json: quantization_config"),
    "dtype": (set_config(dtype="float16"), "config.json: dtype"),
    "code": (set_config(auto_map={"AutoConfig": "other.Config"}), "config.json: auto_map"),
    "q-mix-huge": (lambda folder: edit_mixing(folder, lambda tensors: tensors[Q_MIX][0].fill_(3e38)), "q_mix.*beyond"),
    "head": (set_config(architectures=["IHAForTokenClassification"]), "config.json: architectures"),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    source = make_llama(folder / "llama")
    convert(source, folder / "iha")
    return source, folder / "iha"


@pytest.mark.parametrize(("break_it", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_structure_sees_what_is_broken(break_it, reason, pair, tmp_path):
    source, good = pair
    broken = shutil.copytree(good, tmp_path / "iha")
    assert verify(source, broken, dtypes=()).reasons == ()
    break_it(broken)

    result = verify(source, broken, dtypes=())

    assert not result.ok
    assert not result.to_dict()["ok"]
    assert any(re.search(reason, found) for found in result.reasons), result.reasons


def test_structure_is_blind_to_what_changes_nothing(pair, tmp_path):
    source, good = pair
    other = shutil.copytree(good, tmp_path / "iha")
    # The collapse does not read the first pseudo-query, and any two pseudo-values with the same mean do.
    set_values(Q_MIX, (0, 0, 1), 3.0)(other)
    replace(V_MIX, lambda v_mix: v_mix + torch.tensor([2.0, -2.0])[:, None, None])(other)
    edit_config(other, mixing_init="normal")

    result = verify(source, other, dtypes=())

    assert result.ok and result.comparisons == ()
    assert result.tensors == 21


@pytest.mark.parametrize(
    ("head", "max_shard_size", "num_pseudo_heads"),
    [(None, SHARDED, [3, 1]), (LlamaForSequenceClassification, "1GB", 2)],
)
def test_structure_of_shards_and_heads(head, max_shard_size, num_pseudo_heads, tmp_path):
    heads = {} if head is None else {"head": head}
    source = make_llama(tmp_path / "llama", max_shard_size=max_shard_size, **heads)
    convert(source, tmp_path / "iha", num_pseudo_heads, link=True)
    before = {**snapshot(source), **snapshot(tmp_path / "iha")}

    assert verify(source, tmp_path / "iha", dtypes=()).ok

    assert {**snapshot(source), **snapshot(tmp_path / "iha")} == before


def test_another_llama_is_another_function(pair, tmp_path):
    other = make_llama(tmp_path / "other", seed=1)

    reasons = verify(other, pair[1], dtypes=()).reasons

    # Norms are ones in both; the rest was drawn anew.
    assert len(reasons) == 21 - 5
    assert all(reason.endswith("its bytes differ from the source's") for reason in reasons)


def test_prompts_need_a_causal_model(tmp_path):
    source = make_llama(tmp_path / "llama", LlamaForSequenceClassification)
    convert(source, tmp_path / "iha")

    with pytest.raises(CheckpointError, match="only causal language models are compared on prompts"):
        verify(source, tmp_path / "iha", dtypes=(torch.float32,))


HOPELESS = {
    "llama": (lambda folder: edit_config(folder, model_type="llama"), "model_type 'llama', an IHA folder has 'iha'"),
    "no-config": (lambda folder: (folder / "config.json").unlink(), "config.json: the file is missing"),
    "truncated": (lambda folder: (folder / MIXING).write_bytes(b"cut"), f"{MIXING}: truncated"),
    "no-mixing": (lambda folder: (folder / MIXING).unlink(), f"{MIXING}: the file is missing"),
    "field-of-other-type": (set_config(rms_norm_eps="1e-6"), "config.json"),
    "unknown-phases": (set_config(rope_phases="spiral"), "config.json: .*rope_phases='spiral'"),
    "other-number-of-layers": (set_config(num_hidden_layers=3), "config.json: .*num_hidden_layers=3"),
    "absurd-number-of-pseudo-heads": (set_config(num_pseudo_heads=10**18), "config.json: .*num_pseudo_heads"),
    "absurd-number-of-layers": (set_config(num_hidden_layers=10**9, layer_types=None), "num_hidden_layers=1000000000"),
}


@pytest.mark.parametrize(("break_it", "message"), HOPELESS.values(), ids=HOPELESS.keys())
def test_refuses_destination_that_is_no_iha_checkpoint(break_it, message, pair, tmp_path):
    source, good = pair
    broken = shutil.copytree(good, tmp_path / "iha")
    break_it(broken)

    with pytest.raises(CheckpointError, match=message):
        verify(source, broken, dtypes=())


@pytest.fixture(scope="module")
def speaking(smollm2, tmp_path_factory):
    """A tiny Llama with the real tokenizer, and its conversion."""
    folder = tmp_path_factory.mktemp("speaking")
    source = make_speaking_llama(folder / "llama", smollm2)
    convert(source, folder / "iha")
    return source, folder / "iha"


def test_prompts_in_each_dtype(speaking):
    result = verify(*speaking, (torch.float64, torch.float32, torch.bfloat16), prompts=PROMPTS[:2], new_tokens=4)

    assert result.ok
    assert [comparison.dtype for comparison in result.comparisons] == ["float64", "float32", "bfloat16"]
    exact, *_ = result.comparisons
    assert exact.max_difference < 1e-12 * exact.largest_logit
    assert exact.divergences == ()
    assert abs(exact.loss_source - exact.loss_destination) < 1e-9
    assert exact.greedy_prompts == 2 and exact.greedy_tokens == 4
    json.dumps(result.to_dict())


def test_prompts_see_what_was_trained_away(speaking, tmp_path):
    source, good = speaking
    trained = shutil.copytree(good, tmp_path / "iha")
    edit_mixing(trained, lambda tensors: tensors[COLLAPSE].mul_(1.1))

    result = verify(source, trained, prompts=PROMPTS[:2], new_tokens=4)

    assert not result.ok
    assert len(result.reasons) == 1 and result.reasons[0].startswith(COLLAPSE)
    (comparison,) = result.comparisons
    assert not comparison.explained
    assert comparison.max_difference > comparison.tolerance * comparison.largest_logit
    assert comparison.kl_divergence > 0


def test_real_model(smollm2, tmp_path):
    before = snapshot_without_bytes(smollm2)

    assert convert(smollm2, tmp_path / "iha") == []
    result = verify(smollm2, tmp_path / "iha", prompts=PROMPTS[:2], new_tokens=8)

    assert result.ok
    assert result.tensors == 272
    (comparison,) = result.comparisons
    assert comparison.loss_source < 5  # the model speaks: the comparison is one of sense with sense
    assert abs(comparison.loss_source - comparison.loss_destination) < 1e-4
    assert comparison.kl_divergence < 1e-8
    assert snapshot_without_bytes(smollm2) == before
    shutil.rmtree(tmp_path / "iha")


def snapshot_without_bytes(folder: Path) -> dict[str, tuple]:
    """Half a gigabyte need not be kept twice in memory."""
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.iterdir()}


def start_iha(*arguments, **environment) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "conversion_iha.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    stdout, stderr = process.communicate()
    return process.returncode, stdout, stderr


def iha(*arguments, **environment) -> tuple[int, str, str]:
    return finish(start_iha(*arguments, **environment))


def iha_here(*arguments) -> tuple[int, str, str]:
    """In this process: importing takes most of the time of one of its own."""
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


OPTIONS = {
    "convert": {
        "--num-pseudo-heads",
        "--schedule",
        "--length",
        "--rope-phases",
        "--mixing-init",
        "--mixing-init-std",
        "--seed",
        "--revision",
        "--gguf-dtype",
        "--link",
        "--overwrite",
        "--check",
        "--no-check",
        "--check-dtype",
        "--device",
    },
    "verify": {"--dtype", "--structure-only", "--new-tokens", "--device", "--revision", "--json"},
    "export": {"--link", "--overwrite", "--check", "--no-check", "--device", "--revision", "--json"},
    "inspect": {"--output-dir", "--prompt", "--layer", "--head", "--revision", "--json"},
    "push": {"--private"},
    "plan": {
        "--length",
        "--num-pseudo-heads",
        "--schedule",
        "--gpus",
        "--memory",
        "--batch",
        "--write",
        "--revision",
        "--json",
    },
    "bench": {
        "--length",
        "--num-pseudo-heads",
        "--schedule",
        "--new-tokens",
        "--batch",
        "--rounds",
        "--dtype",
        "--device",
        "--revision",
        "--json",
    },
}


def test_help_names_commands_and_options():
    overview = start_iha("--help")
    processes = {command: start_iha(command, "--help") for command in OPTIONS}

    for command, options in OPTIONS.items():
        code, stdout, stderr = finish(processes[command])
        assert code == 0, stderr
        named = {word for word in stdout.replace("/", " ").split() if word.startswith("--")}
        assert named - {"--help"} == options
        if command in ("plan", "bench"):
            assert PRESETS.keys() <= set(re.findall(r"[\w.-]*\w", stdout))
    code, stdout, stderr = finish(overview)
    assert code == 0, stderr
    assert OPTIONS.keys() <= set(stdout.split())


@pytest.mark.slow
def test_command_line_converts_checks_and_verifies(speaking, tmp_path):
    source, _ = speaking

    code, stdout, stderr = iha("convert", source, tmp_path / "iha", "-p", "2,3", "--seed", 5, "--link")

    assert code == 0, stderr
    assert "Structure: proved equal. 21 tensors" in stdout
    assert "8 of 8 x 64" in stdout  # the prompts that the check ends with
    assert stdout.rstrip().endswith("OK")
    assert json.loads((tmp_path / "iha" / "config.json").read_text())["num_pseudo_heads"] == [2, 3]
    assert (source / WEIGHTS).samefile(tmp_path / "iha" / CARRIED)

    broken = tmp_path / "broken"
    convert(source, broken)
    edit_mixing(broken, lambda tensors: tensors[COLLAPSE].mul_(1.1))
    options = ("--json", "--new-tokens", 4)
    code, stdout, stderr = iha_here("verify", source, tmp_path / "iha", *options)
    assert code == 0, stderr
    result = json.loads(stdout)
    assert result["ok"] and result["reasons"] == [] and result["tensors"] == 21
    assert [comparison["dtype"] for comparison in result["comparisons"]] == ["float32"]
    assert result["comparisons"][0]["explained"] and result["comparisons"][0]["greedy_tokens"] == 4

    code, stdout, stderr = iha_here("verify", source, broken, *options)
    assert code == 1, stderr
    result = json.loads(stdout)
    assert not result["ok"]
    assert [reason.split(":")[0] for reason in result["reasons"]] == [COLLAPSE]
    assert not result["comparisons"][0]["explained"]


def test_errors_are_one_line(pair, tmp_path):
    source, destination = pair
    mistyped = make_llama(tmp_path / "mistyped")
    edit_config(mistyped, hidden_size="32")  # Transformers' own message has two lines
    (tmp_path / "file").write_text("not a folder")
    commands = {
        ("convert", mistyped, tmp_path / "iha"): "config.json: not a valid Llama",
        ("convert", source, tmp_path / "file" / "iha"): str(tmp_path / "file"),
        ("verify", source, destination): "tokenizer",
    }
    for command, message in commands.items():
        code, stdout, stderr = iha_here(*command)
        assert code == 1, stderr
        assert stderr.startswith("iha: ") and message in stderr
        assert len(stderr.splitlines()) == 1, stderr
        assert not stdout


@pytest.mark.slow
def test_command_line_takes_a_classifier_of_the_hub(tmp_path):
    # No Hub answers in a test: the model lies in a cache, where an earlier download would have left it.
    repo = tmp_path / "hub" / "models--acme--tiny"
    source = make_llama(repo / "snapshots" / "0123abc", LlamaForSequenceClassification)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123abc")

    code, stdout, stderr = iha("convert", "acme/tiny", tmp_path / "iha", HF_HUB_CACHE=str(tmp_path / "hub"))

    # A classifier continues no prompts, so the check that a conversion ends with is the proof alone.
    assert code == 0, stderr
    assert "Structure: proved equal. 21 tensors" in stdout
    assert verify(source, tmp_path / "iha", dtypes=()).ok


@pytest.mark.slow
@pytest.mark.slow
def test_command_line_takes_a_gguf_file(smollm2_gguf, smollm2, tmp_path):
    # Reading such a file takes long, so both commands run at once, each on what the other has not made.
    leftover = tmp_path / "new" / ".iha.converting" / "scratch"  # of a run that was killed
    leftover.mkdir(parents=True)
    (leftover.parent / MARKER).touch()
    (leftover / "model.safetensors").write_text("half")
    converting = start_iha("convert", smollm2_gguf, tmp_path / "new" / "iha", "--no-check")
    convert(smollm2, tmp_path / "iha", link=True)
    verifying = start_iha("verify", smollm2_gguf, tmp_path / "iha", "--structure-only")

    code, stdout, stderr = finish(converting)
    assert code == 0, stderr
    assert "keep the function exactly" in stdout
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["iha"]  # the dequantised folder is gone
    assert verify(smollm2, tmp_path / "new" / "iha", dtypes=()).ok

    code, stdout, stderr = finish(verifying)
    assert code == 0, stderr
    assert "Structure: proved equal. 272 tensors" in stdout
    shutil.rmtree(tmp_path / "new")


def test_command_line_without_a_tokenizer_and_json_of_an_error(tmp_path):
    source = make_llama(tmp_path / "llama")
    for path in source.glob("tokenizer*"):
        path.unlink()
    code, stdout, stderr = iha_here("convert", source, tmp_path / "iha")
    assert code == 0, stderr
    assert "Structure: proved equal" in stdout and "Prompts: none run." in stdout

    code, stdout, _ = iha_here("verify", source, tmp_path / "none", "--json")
    assert code == 1
    error = json.loads(stdout)
    assert error["ok"] is False and "config.json: the file is missing" in error["error"]
