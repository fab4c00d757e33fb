"""Saving that is killed, or finds the disk full, before a write: the old model, the new one, or an error."""

import resource
import shutil

import pytest
import torch
from faults import fill_the_disk, in_child, kill
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from modeling_iha import IHAConfig, IHAForCausalLM

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


def model_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(("config.", "model"))}


def prepare(folder, old):
    """The files of a model that is there before, in shards as large as `old`; a README that is not the model's."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "README.md").write_text("Kept.")
    if old is not None:
        OLD.save_pretrained(folder, max_shard_size=old)
    return {name: content for name, content in model_files(folder).items() if not name.endswith(".py")}


def is_mended(folder, new):
    NEW.save_pretrained(folder, max_shard_size=new)
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return there(folder) == "new" and hidden == [] and (folder / "README.md").read_text() == "Kept."


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.parametrize(("fault", "exits"), [(kill, 9), (fill_the_disk, 1)])
def test_struck_before_a_write(fault, exits, old, new, tmp_path):
    folder, at, code = tmp_path / "model", PAIRS.index((old, new)) % STRIDE, None
    seen = set()
    while code != 0:
        at += STRIDE if at else 1
        files = prepare(folder, old)
        code = in_child(lambda: NEW.save_pretrained(folder, max_shard_size=new), fault(at))
        assert code in (0, exits), at
        found = there(folder)
        seen.add(found)
        assert found == "new" if code == 0 else found != "a mixture", at
        if old is not None and found != "new":  # nothing is lost, and an error leaves all as it was
            assert found == "old" or fault is kill, at
            left = {**model_files(folder), **(model_files(folder / ".set-aside") if found == "refused" else {})}
            assert all(left[name] == content for name, content in files.items()), at
        assert is_mended(folder, new), at
    assert at > 20 and "new" in seen and len(seen) > 1


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_weights_that_do_not_fit(old, new, tmp_path):
    """Python does not write them itself: that no file may be so large, as no other is, stands for a full disk."""
    folder = tmp_path / "model"
    NEW.save_pretrained(folder, max_shard_size=new)
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert largest // 2 > max(path.stat().st_size for path in folder.glob("*.py"))
    for limit in (largest - 1, largest // 2):
        files = prepare(folder, old)

        def work(limit=limit):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            NEW.save_pretrained(folder, max_shard_size=new)

        assert in_child(work, lambda number, event: None, (OSError, SafetensorError)) == 1
        assert there(folder) == ("old" if old else "refused")
        assert model_files(folder).items() >= files.items()
        assert is_mended(folder, new)
