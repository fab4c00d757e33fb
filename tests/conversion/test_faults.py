"""A conversion that is killed, or finds the disk full, before each of its writes; and checkpoints broken at random."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from faults import fill_the_disk, in_child, kill
from folders import INDEX, SHARDED, WEIGHTS, make_llama, shard_names, snapshot
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import modeling_iha
from conversion_iha import CheckpointError, convert, export, verify

STRIDE = 4  # of all writes, which have been struck by hand
VALUES = [
    "null",
    "-1",
    "0",
    "1e999",
    "NaN",
    "true",
    '"x"',
    "[]",
    "{}",
    "[[]]",
    str(2**63),
    str(10**400),
    '"../../../x"',
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "exits"), [(kill, 9), (fill_the_disk, 1)])
@pytest.mark.parametrize("way", ["convert", "overwrite", "export"])
def test_before_every_write(way, fault, exits, tmp_path):
    """What is there is whole, what was there is not lost, and the same command then ends well."""
    llama = make_llama(tmp_path / "llama", max_shard_size=SHARDED)
    other = make_llama(tmp_path / "other", seed=1)
    source, place = llama, tmp_path / "made"
    if way == "export":
        source = tmp_path / "iha"
        convert(llama, source)
    place.mkdir()
    destination = place / "destination"

    def work():
        if way == "export":
            assert export(source, destination) == []
        else:
            convert(source, destination, overwrite=way == "overwrite")

    def whole(llama):
        pair = (destination, source) if way == "export" else (llama, destination)
        return verify(*pair, dtypes=()).ok

    if way == "overwrite":
        convert(other, place / "old")
    before, at, code = snapshot(source), 0, None
    while code != 0:
        at += STRIDE
        shutil.rmtree(place)
        place.mkdir()
        if way == "overwrite":
            convert(other, destination)
        code = in_child(work, fault(at), CheckpointError)
        assert code in (0, exits), at
        assert snapshot(source) == before
        if destination.exists():
            assert whole(llama) or (way == "overwrite" and whole(other)), at
        elif way == "overwrite":  # between the two renames: the old one waits to be put back
            assert (place / ".destination.converting" / "old").exists(), at
        done = way != "overwrite" and destination.exists()  # cut off while it cleaned up
        if not done:
            work()
            assert whole(llama), at
            assert [path.name for path in place.iterdir()] == ["destination"], at
    assert [path.name for path in place.iterdir()] == ["destination"]
    assert at > 20  # so many writes there are


@pytest.fixture
def opened():
    """The files that this process opens, real paths, while the test is in it; weights' readers open theirs unseen."""
    paths = []

    def hook(event, args):
        if event == "open" and isinstance(args[0], str) and paths is not None:
            paths.append(os.path.realpath(args[0]))

    sys.addaudithook(hook)  # nothing takes it away again
    yield paths
    paths = None


def test_checkpoints_broken_at_random(whole, opened, tmp_path):
    """
    An error that names a file, or a conversion that is whole; nothing is written but the destination, nothing read but
    the source. `--hypothesis-profile thorough` breaks 10,000.
    """
    source, destination = tmp_path / "source", tmp_path / "destination"
    ours = (str(tmp_path / place) for place in ("source", "destination", ".destination.converting"))
    theirs = (sys.prefix, sys.base_prefix, str(Path(modeling_iha.__file__).parents[1]), "/proc", "/dev")
    allowed, outcomes = (*ours, *theirs), []

    @settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(rng=st.randoms())
    def break_and_convert(rng):
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(destination, ignore_errors=True)
        shutil.copytree(rng.choice(whole), source)
        index = INDEX if (source / INDEX).exists() else WEIGHTS
        break_one(rng, source / rng.choice(["config.json", index, rng.choice(shard_names(source))]))
        before = snapshot(source)
        opened.clear()
        try:
            convert(source, destination)
        except CheckpointError as error:
            outcomes.append("refused")
            assert not destination.exists()
            assert re.search(r"[\w-]+\.(json|safetensors)", str(error)) or str(source) in str(error)
        else:
            outcomes.append("converted")
            assert verify(source, destination, dtypes=()).ok
            shutil.rmtree(destination)
        event(outcomes[-1])
        assert str(source / "config.json") in opened
        assert [path for path in opened if not path.startswith(allowed)] == []
        assert snapshot(source) == before
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

    break_and_convert()
    assert len(outcomes) / 2 < outcomes.count("refused") < len(outcomes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    single, many = make_llama(folder / "single"), make_llama(folder / "many", max_shard_size="20KB")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(single, quantization_config=four_bits).save_pretrained(folder / "quantised")
    return single, many, folder / "quantised"


def break_one(rng, path):
    """Bytes flipped, cut or repeated, or a value of the JSON replaced; of weights in the header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little") if path.suffix == ".safetensors" else None
    start, text, rest = (
        (content[:8], content[8 : 8 + length], content[8 + length :]) if length else (b"", content, b"")
    )
    at = rng.randrange(len(text))
    kind = rng.randrange(6)
    if kind == 0:
        text = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    elif kind == 1:
        text = text[:at] + text[at + rng.randrange(1, 40) :]
    elif kind == 2:
        text = text[: at + 30] + text[at:]
    elif kind == 3:
        text = text[:at]
    else:
        found = rng.choice(list(re.finditer(rb'(?<=:)\s*("[^"]*"|[\w.+-]+)|\[[^\[\]]*\]', text)))
        value = rng.choice([*VALUES, "[" * 5000, json.dumps(rng.random()), str(rng.randrange(1 << 40))])
        text = text[: found.start()] + value.encode() + text[found.end() :]
    if length and rng.random() < 0.5:  # a header whose length is right
        start = len(text).to_bytes(8, "little")
    path.write_bytes(start + text + rest)
