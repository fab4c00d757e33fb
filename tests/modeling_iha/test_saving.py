"""Saving that is killed, or finds the disk full, before a write: the old model, the new one, or an error."""

import resource
import shutil

import pytest
import torch
from faults import fill_the_disk, in_child, kill
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.saving import is_weights

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
SHARDED, SINGLE = "70KB", "1GB"
STRIDE = 4  # of all writes, which have been struck by hand
PAIRS = [(None, SHARDED), (SINGLE, SINGLE), (SINGLE, SHARDED), (SHARDED, SINGLE), (SHARDED, SHARDED)]


def make_model(seed, **fields):
    """Models of different seeds have tensors of the same names and shapes."""
    torch.manual_seed(seed)
    return IHAForCausalLM(IHAConfig(vocab_size=1024, num_hidden_layers=2, num_pseudo_heads=2, **SIZES, **fields))


OLD, NEW = make_model(0), make_model(1, rope_phases="interleaved")


def there(folder):
    """Which of the two models a folder holds, or that Transformers refuses it."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
    except (OSError, ValueError):
        return "refused"
    for name, expected in {"old": OLD, "new": NEW}.items():
        tensors = expected.state_dict()
        if model.config.rope_phases == expected.config.rope_phases and all(
            torch.equal(tensor, tensors[key]) for key, tensor in model.state_dict().items()
        ):
            return name
    return "a mixture"


def contents(folder):
    """All files of a folder but what a killed save leaves, by their names."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def prepare(folder, old):
    """A README, and the model that is there before, in shards as large as `old`, with what only it has."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "README.md").write_text("Kept.")
    (folder / "model.fp16.safetensors").write_text("Another variant, kept.")
    if old is not None:
        OLD.save_pretrained(folder, max_shard_size=old)
        (folder / "model-mixing.safetensors").write_text("As in a converted folder, beside an index.")
    return contents(folder)


def is_mended(folder, new):
    """Saved again, the folder is the new model and what is not a model's, but for what a killed save has left."""
    NEW.save_pretrained(folder, max_shard_size=new)
    kept = {path.name for path in folder.iterdir() if not path.name.endswith(".py")} - {"config.json"}
    kept -= {name for name in kept if name.startswith(".saving-")}
    weights = (
        {"model.safetensors"} if new == SINGLE else {name for name in kept if "of-0000" in name or "index" in name}
    )
    return there(folder) == "new" and kept == {
        "README.md",
        "model.fp16.safetensors",
        "generation_config.json",
        *weights,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.parametrize(("fault", "exits"), [(kill, 9), (fill_the_disk, 1)])
def test_struck_before_a_write(fault, exits, old, new, tmp_path):
    folder, at, code = tmp_path / "model", PAIRS.index((old, new)) % STRIDE, None
    NEW.save_pretrained(tmp_path / "whole", max_shard_size=new)
    whole, seen = contents(tmp_path / "whole"), []
    while code != 0:
        at += STRIDE if at else 1
        before = prepare(folder, old)
        code = in_child(lambda: NEW.save_pretrained(folder, max_shard_size=new), fault(at))
        assert code in (0, exits), at
        seen.append(there(folder))
        if seen[-1] == "refused" and old is not None:  # killed while the files were moved
            assert fault is kill and not (folder / "config.json").exists(), at
            (hidden,) = folder.glob(".saving-*")
            assert {**contents(folder), **contents(hidden)}.items() >= whole.items(), at  # nothing is lost
        elif seen[-1] == "refused":
            assert before.items() <= contents(folder).items(), at
        elif seen[-1] == "old":  # untouched
            assert contents(folder) == before, at
        else:
            assert seen[-1] == "new", at
        assert exits == 9 or list(folder.glob(".*")) == [], at
        assert is_mended(folder, new), at
    assert at > 20 and seen[0] != "new" and seen[-1] == "new"


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_weights_that_do_not_fit(old, new, tmp_path):
    """Python does not write them itself: that no file may be so large, as no other is, stands for a full disk."""
    folder = tmp_path / "model"
    NEW.save_pretrained(folder, max_shard_size=new)
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert largest // 2 > max(path.stat().st_size for path in folder.glob("*.py"))
    for limit in (largest - 1, largest // 2):
        before = prepare(folder, old)

        def work(limit=limit):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            NEW.save_pretrained(folder, max_shard_size=new)

        assert in_child(work, lambda number, event: None, (OSError, SafetensorError)) == 1
        assert there(folder) == ("old" if old else "refused")
        assert contents(folder) == before and list(folder.glob(".*")) == []
        assert is_mended(folder, new)


@pytest.mark.parametrize(
    ("variant", "name", "weights"),
    [
        (None, "model.safetensors", True),
        (None, "model-00001-of-00002.safetensors", True),
        (None, "model-mixing.safetensors", True),
        (None, "model.safetensors.index.json", True),
        (None, "model.fp16.safetensors", False),
        (None, "model.safetensors.index.fp16.json", False),
        (None, "model-ema.safetensors", False),
        ("fp16", "model.fp16.safetensors", True),
        ("fp16", "model.fp16-00001-of-00002.safetensors", True),
        ("fp16", "model.safetensors.index.fp16.json", True),
        ("fp16", "model.safetensors", False),
        ("fp.6", "model.fp16.safetensors", False),
    ],
)
def test_whose_weights_a_file_is(variant, name, weights):
    assert is_weights(name, variant) == weights


def test_variants_stand_side_by_side(tmp_path):
    OLD.save_pretrained(tmp_path)
    NEW.save_pretrained(tmp_path, variant="new", max_shard_size=SHARDED)
    NEW.save_pretrained(tmp_path, variant="new")
    OLD.save_pretrained(tmp_path)
    weights = {path.name for path in tmp_path.glob("model*.safetensors*")}
    assert weights == {"model.safetensors", "model.new.safetensors"} and there(tmp_path) == "old"


def test_a_model_of_the_folder_itself_that_lies_on_the_disk(tmp_path):
    """Its weights are read from the folder while they are saved into it."""
    OLD.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    model.save_pretrained(tmp_path / "model")
    assert there(tmp_path / "model") == "old"
