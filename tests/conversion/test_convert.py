"""What convert() writes: Llama's bytes, the same function, nothing half done, nothing done twice."""

import errno
import filecmp
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from folders import (
    INDEX,
    SHARDED,
    SIDE_FILES,
    WEIGHTS,
    make_layered_llama,
    make_llama,
    read_tensors,
    shard_names,
    snapshot,
)
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

from configuration_iha import IHAConfig, flop_matched_schedule
from conversion_iha import CheckpointError, convert, verify
from conversion_iha.carry import carry
from modeling_iha import IHAForCausalLM

MIXING = "model-mixing.safetensors"
CARRIED = "model-00001-of-00001.safetensors"
AUTO = {
    LlamaModel: AutoModel,
    LlamaForCausalLM: AutoModelForCausalLM,
    LlamaForSequenceClassification: AutoModelForSequenceClassification,
    LlamaForTokenClassification: AutoModelForTokenClassification,
}
CASES = [
    (LlamaForCausalLM, "1GB", torch.float32, 2, {}),
    (LlamaForCausalLM, SHARDED, torch.float32, 3, {}),
    (LlamaForCausalLM, "1GB", torch.bfloat16, 2, {"tie_word_embeddings": True}),
    (LlamaForCausalLM, "20KB", torch.bfloat16, 4, {}),
    (LlamaForCausalLM, "20KB", torch.float16, 2, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    (LlamaForCausalLM, "1GB", torch.float64, [1, 3], {"num_key_value_heads": 4, "attention_bias": True}),
    (LlamaForCausalLM, SHARDED, torch.float32, 1, {"head_dim": 16, "mlp_bias": True}),
    (LlamaModel, "1GB", torch.float16, [2, 1], {}),
    (LlamaModel, "20KB", torch.float32, 2, {}),
    (LlamaForSequenceClassification, SHARDED, torch.float32, 2, {"num_labels": 3}),
    (LlamaForSequenceClassification, "1GB", torch.bfloat16, 3, {"num_labels": 5}),
    (LlamaForTokenClassification, "1GB", torch.float32, 2, {"num_labels": 3}),
    (LlamaForTokenClassification, "20KB", torch.float16, [3, 2], {"num_labels": 4}),
]


def outputs(auto_class, folder):
    """The model in float64 on a padded batch; everything it returns, cache aside."""
    model = auto_class.from_pretrained(folder, dtype=torch.float64).eval()
    inputs = torch.randint(1, 64, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(inputs)
    mask[1, :5] = 0
    with torch.no_grad():
        result = model(inputs.where(mask > 0, 0), attention_mask=mask, output_hidden_states=True, use_cache=False)
    return type(model).__name__, torch.cat([result[0].flatten(), result.hidden_states[-1][mask > 0].flatten()])


@pytest.mark.parametrize(("head", "max_shard_size", "dtype", "num_pseudo_heads", "fields"), CASES)
def test_same_bytes_and_same_function(head, max_shard_size, dtype, num_pseudo_heads, fields, tmp_path):
    source = make_llama(tmp_path / "llama", head, dtype, max_shard_size, **fields)
    destination = tmp_path / "iha"
    before = snapshot(source)

    assert convert(source, destination, num_pseudo_heads) == []

    assert snapshot(source) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iha", "llama"]
    shards = shard_names(source)
    assert (len(shards) == 1) == (max_shard_size == "1GB")
    for shard in shards:
        target = CARRIED if shard == WEIGHTS else shard
        assert filecmp.cmp(source / shard, destination / target, shallow=False)
    assert not (destination / WEIGHTS).exists()  # Transformers would read it and no index
    for name in [*SIDE_FILES, *(["generation_config.json"] if head is LlamaForCausalLM else [])]:
        assert filecmp.cmp(source / name, destination / name, shallow=False)
    card = (destination / "README.md").read_text()  # of its own: the source's describes another model
    assert card.startswith("---\n") and "The source's own card" not in card

    index = json.loads((destination / INDEX).read_text())
    tensors = read_tensors(destination)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    counts = num_pseudo_heads if isinstance(num_pseudo_heads, list) else [num_pseudo_heads] * 2
    added = tensors.keys() - read_tensors(source).keys()
    assert len(added) == 4 * sum(count > 1 for count in counts)
    assert all(tensors[name].dtype == dtype for name in added)
    assert verify(source, destination, dtypes=()).ok

    name, expected = outputs(AUTO[head], source)
    assert name == head.__name__
    name, found = outputs(AUTO[head], destination)
    assert name == head.__name__.replace("Llama", "IHA")
    # float32 tables of RoPE are the same in both, so only the order of sums differs.
    assert (found - expected).abs().max() < 1e-12


def test_config_tells_all_that_was_asked_for(tmp_path):
    source = make_llama(tmp_path / "llama", rms_norm_eps=1e-4, rope_parameters={"rope_type": "linear", "factor": 4.0})

    reasons = convert(
        source,
        tmp_path / "iha",
        [2, 3],
        rope_phases="fractional",
        mixing_init="identity",
        mixing_init_std=0.5,
    )

    assert len(reasons) == 1 and reasons[0].startswith("rope_phases: 'fractional'")
    assert verify(source, tmp_path / "iha", dtypes=()).reasons == tuple(reasons)
    config = IHAConfig.from_pretrained(tmp_path / "iha")
    assert config.num_pseudo_heads == [2, 3]
    assert (config.rope_phases, config.mixing_init, config.mixing_init_std) == ("fractional", "identity", 0.5)
    assert config.architectures == ["IHAForCausalLM"]
    assert config.rms_norm_eps == 1e-4
    assert config.rope_parameters["rope_type"] == "linear" and config.rope_parameters["factor"] == 4.0


def test_normal_init_is_reported_as_another_function(tmp_path):
    source = make_llama(tmp_path / "llama")

    reasons = convert(source, tmp_path / "iha", mixing_init="normal")

    assert len(reasons) == 8  # four tensors in each of two layers
    assert {reason.split(":")[0] for reason in reasons} == read_tensors(tmp_path / "iha").keys() - read_tensors(
        source
    ).keys()


def test_the_hybrid_schedule_is_made_and_reported_as_another_function(tmp_path):
    source = make_llama(tmp_path / "llama", num_hidden_layers=5)
    reasons = convert(source, tmp_path / "iha", num_pseudo_heads=2, hybrid_length=64)
    assert reasons == ["layer_types, sliding_window: a sliding layer does not see all that the source's sees"]
    config = IHAConfig.from_pretrained(tmp_path / "iha")
    for name, value in flop_matched_schedule(5, 64, 2).items():
        assert getattr(config, name) == value, name
    assert IHAForCausalLM.from_pretrained(tmp_path / "iha").model.layers[0].self_attn.sliding_window == 8
    with pytest.raises(ValueError, match=r"num_pseudo_heads=\[2, 1\] must be one number with hybrid_length"):
        convert(source, tmp_path / "other", num_pseudo_heads=[2, 1], hybrid_length=64)
    assert not (tmp_path / "other").exists()


def test_bundle_and_auto_map_are_written(tmp_path):
    convert(make_llama(tmp_path / "llama"), tmp_path / "iha")

    auto_map = json.loads((tmp_path / "iha" / "config.json").read_text())["auto_map"]

    assert {"AutoConfig", "AutoModel", "AutoModelForCausalLM"} <= auto_map.keys()
    for reference in auto_map.values():
        module, name = reference.split(".")
        assert f"class {name}(" in (tmp_path / "iha" / f"{module}.py").read_text()


@pytest.mark.parametrize("num_pseudo_heads", [0, -1, True, 2.0, "2", None, [], [2], [2, 2, 2], [2, 0], [2, None]])
def test_refuses_number_of_pseudo_heads(num_pseudo_heads, tmp_path):
    source = make_llama(tmp_path / "llama")
    before = snapshot(source)

    with pytest.raises(ValueError, match="num_pseudo_heads="):
        convert(source, tmp_path / "iha", num_pseudo_heads)

    assert snapshot(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize(
    "fields", [{"rope_phases": "none"}, {"mixing_init": "zeros"}, {"mixing_init_std": 0.0}, {"mixing_init_std": 17.0}]
)
def test_refuses_other_fields(fields, tmp_path):
    source = make_llama(tmp_path / "llama")

    with pytest.raises(ValueError, match=next(iter(fields))):
        convert(source, tmp_path / "iha", **fields)

    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_seed_decides_the_mixing(tmp_path):
    source = make_llama(tmp_path / "llama")
    torch.manual_seed(5)
    drawn = torch.randn(3)
    torch.manual_seed(5)
    for name, seed in (("one", 7), ("again", 7), ("other", 8)):
        convert(source, tmp_path / name, seed=seed)

    one, again, other = ((tmp_path / name / MIXING).read_bytes() for name in ("one", "again", "other"))

    assert one == again
    assert one != other
    assert torch.equal(torch.randn(3), drawn)  # the caller's own random numbers go on as they would have


def test_source_named_through_a_link(tmp_path):
    source = make_llama(tmp_path / "llama")
    (tmp_path / "named").symlink_to(source)

    convert(str(tmp_path / "named"), str(tmp_path / "iha"))

    assert verify(tmp_path / "named", tmp_path / "iha", dtypes=()).ok


def test_relative_destination_in_new_folders(tmp_path, monkeypatch):
    source = make_llama(tmp_path / "llama")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    convert(source, "new/../newer/iha")

    assert verify(source, tmp_path / "here" / "newer" / "iha", dtypes=()).ok


@pytest.mark.parametrize("max_shard_size", ["1GB", SHARDED])
def test_link_shares_weights_and_nothing_else(max_shard_size, tmp_path):
    source = make_llama(tmp_path / "llama", max_shard_size=max_shard_size)
    before = snapshot(source)

    convert(source, tmp_path / "iha", link=True)

    assert snapshot(source) == before
    for shard in shard_names(source):
        target = CARRIED if shard == WEIGHTS else shard
        assert (source / shard).samefile(tmp_path / "iha" / target)
    inodes = {path.stat().st_ino for path in source.rglob("*")}
    shared = [path.name for path in (tmp_path / "iha").rglob("*") if path.stat().st_ino in inodes]
    assert len(shared) == len(shard_names(source))
    assert verify(source, tmp_path / "iha", dtypes=()).ok


def test_copies_share_nothing(tmp_path):
    source = make_llama(tmp_path / "llama", max_shard_size=SHARDED)

    convert(source, tmp_path / "iha")

    inodes = {path.stat().st_ino for path in source.rglob("*")}
    assert not [path for path in (tmp_path / "iha").rglob("*") if path.stat().st_ino in inodes]


def refuse_copy_in_kernel(*_):
    raise OSError(errno.EXDEV, "Invalid cross-device link")


@pytest.mark.parametrize("how", ["refused", "missing"])
def test_copies_where_the_kernel_does_not(how, tmp_path, monkeypatch):
    source = make_llama(tmp_path / "llama")
    # Mocks: file systems and systems without these calls are not at hand.
    monkeypatch.setattr("conversion_iha.carry._reflink", lambda reader, writer: False)
    if how == "missing":
        monkeypatch.delattr("conversion_iha.carry.os.copy_file_range")
    else:
        monkeypatch.setattr("conversion_iha.carry.os.copy_file_range", refuse_copy_in_kernel)

    convert(source, tmp_path / "iha")

    assert verify(source, tmp_path / "iha", dtypes=()).ok


def test_full_disk_is_named(tmp_path, monkeypatch):
    source = make_llama(tmp_path / "llama")

    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    # Mock: filling a disk would harm others.
    monkeypatch.setattr("conversion_iha.carry._reflink", lambda reader, writer: False)
    monkeypatch.setattr("conversion_iha.carry.os.copy_file_range", no_room)

    with pytest.raises(CheckpointError, match=r"model\.safetensors: No space left on device; mend that and run again"):
        convert(source, tmp_path / "iha")

    assert not (tmp_path / "iha").exists()
    monkeypatch.undo()
    convert(source, tmp_path / "iha")
    assert verify(source, tmp_path / "iha", dtypes=()).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iha", "llama"]


def test_source_that_changes_meanwhile_is_refused(tmp_path):
    (tmp_path / "source").write_bytes(b"before")

    with pytest.raises(CheckpointError, match="source: the file changed while it was carried"):
        carry(
            tmp_path / "source",
            tmp_path / "target",
            link=False,
            on_bytes=lambda _: (tmp_path / "source").write_bytes(b"changed"),
        )

    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def cut_off(source, destination, limit, **options):
    """A conversion that ends in the middle for real: no file may grow beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large; mend that and run again"):
            convert(source, destination, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not destination.exists()


def carried(folder: Path) -> dict[str, int]:
    """Inode of each of Llama's shards that is whole in a work folder or a destination."""
    return {path.name: path.stat().st_ino for path in folder.glob("model-*-of-*.safetensors")}


def make_growing_llama(folder, seed=0):
    """Its first shard is its smallest. Returns a limit on sizes that lets that one through and no other."""
    make_layered_llama(folder, 32, 200, 3, seed)
    sizes = [(folder / shard).stat().st_size for shard in shard_names(folder)]
    assert sizes[0] + 1 < min(sizes[1:])
    return sizes[0] + 1  # at the limit itself even writing nothing is refused


def test_resumed_run_keeps_what_was_carried(tmp_path):
    source, destination, work = tmp_path / "llama", tmp_path / "iha", tmp_path / ".iha.converting" / "new"
    limit = make_growing_llama(source)
    cut_off(source, destination, limit)
    kept = carried(work)
    assert kept.keys() == {shard_names(source)[0]}
    (work / "stray.safetensors").write_bytes(b"of another run")

    convert(source, destination)

    assert carried(destination).items() >= kept.items()
    assert not (destination / "stray.safetensors").exists()
    assert verify(source, destination, dtypes=()).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iha", "llama"]


def test_resumed_run_carries_again_what_changed(tmp_path):
    source, destination = tmp_path / "llama", tmp_path / "iha"
    cut_off(source, destination, make_growing_llama(source))
    shutil.rmtree(source)
    make_growing_llama(source, seed=1)

    convert(source, destination)

    assert verify(source, destination, dtypes=()).ok


def test_resumed_run_of_another_source_starts_over(tmp_path):
    first, second, destination = tmp_path / "first", tmp_path / "second", tmp_path / "iha"
    cut_at = make_growing_llama(first)
    make_growing_llama(second, seed=1)
    for path in (*first.iterdir(), *second.iterdir()):
        os.utime(path, (0, 0))  # as reproducible archives and images set it
    cut_off(first, destination, cut_at)

    convert(second, destination)

    assert verify(second, destination, dtypes=()).reasons == ()


def test_resumed_run_without_link_shares_nothing(tmp_path):
    source, destination = make_llama(tmp_path / "llama"), tmp_path / "iha"
    (source / "LICENSE").write_text("long " * 100_000)
    cut_off(source, destination, 400_000, link=True)  # weights were linked, then a small file did not fit

    convert(source, destination)

    assert not (source / WEIGHTS).samefile(destination / CARRIED)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = make_layered_llama(tmp_path_factory.mktemp("large") / "llama", 1024, 2816, 7)
    yield folder
    shutil.rmtree(folder.parent)


@pytest.fixture(scope="module")
def start():
    """Starts convert() in a process of its own, without importing everything again for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conversion_iha.converter"])
    processes = []

    def start_one(source, destination, **options):
        process = context.Process(target=convert, args=(source, destination), kwargs=options)
        process.start()
        processes.append(process)
        return process

    warm = context.Process(target=os.getpid)  # the first one waits for the imports
    warm.start()
    warm.join()
    yield start_one
    for process in processes:
        process.kill()
        process.join()


def has_file(folder):
    try:
        return bool(os.listdir(folder))
    except FileNotFoundError:  # not made yet, or made anew
        return False


def stop_when_working(process, work):
    """Halts the process once its work folder has a file in it."""
    while not has_file(work):
        assert process.is_alive()
    os.kill(process.pid, signal.SIGSTOP)


def test_killed_at_any_moment(large, start, tmp_path):
    destination, work = tmp_path / "iha", tmp_path / ".iha.converting" / "new"
    before = time.monotonic()
    start(large, destination).join()
    duration = time.monotonic() - before
    assert verify(large, destination, dtypes=()).ok
    shutil.rmtree(destination)
    moments = random.Random(0)

    killed, kept, starts = 0, {}, 0
    while killed < 10 and starts < 60:
        starts += 1
        process = start(large, destination)
        process.join(moments.uniform(0, 0.8 * duration))  # a resumed run takes less time than the first one took
        process.kill()
        process.join()
        if process.exitcode == -signal.SIGKILL:
            killed += 1
        else:  # it ended before its moment: the first run, with nothing in the page cache, was a slow one
            duration *= 0.8
        if destination.exists():
            assert verify(large, destination, dtypes=()).ok
            assert carried(destination).items() >= kept.items()
            shutil.rmtree(destination)
            kept = {}
        elif work.exists():
            assert carried(work).items() >= kept.items()  # nothing carried was carried again
            kept = carried(work)
    convert(large, destination)

    assert killed == 10
    assert verify(large, destination, dtypes=()).ok
    assert carried(destination).items() >= kept.items()
    assert [path.name for path in tmp_path.iterdir()] == ["iha"]


def test_second_run_to_one_destination_is_refused(large, start, tmp_path):
    destination, work = tmp_path / "iha", tmp_path / ".iha.converting" / "new"
    process = start(large, destination)
    stop_when_working(process, work)
    there = sorted(path.name for path in work.iterdir())

    with pytest.raises(CheckpointError, match="another conversion to this destination is running"):
        convert(large, destination)

    assert sorted(path.name for path in work.iterdir()) == there
    os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode == 0
    assert verify(large, destination, dtypes=()).ok
    assert [path.name for path in tmp_path.iterdir()] == ["iha"]


def test_folder_that_appears_meanwhile_is_kept(large, start, tmp_path):
    destination, work = tmp_path / "iha", tmp_path / ".iha.converting" / "new"
    process = start(large, destination)
    stop_when_working(process, work)
    destination.mkdir()
    (destination / "mine.txt").write_text("mine")

    os.kill(process.pid, signal.SIGCONT)
    process.join()

    assert process.exitcode == 1
    assert [path.name for path in destination.iterdir()] == ["mine.txt"]
