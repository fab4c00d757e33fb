"""A conversion that is killed, or finds the disk full, before each of its writes; and checkpoints broken at random."""

import errno
import json
import os
import random
import re
import shutil
import sys
import traceback

import pytest
from folders import INDEX, SHARDED, WEIGHTS, make_llama, shard_names, snapshot

from conversion_iha import CheckpointError, convert, export, verify

WRITES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink", "os.utime", "os.chmod"}
NEED_ROOM = {"open", "os.mkdir", "os.link", "os.symlink"}
STRIDE = 4  # of all writes, which have been struck by hand
INPUTS = 150  # broken at random; 10,000 have been tried by hand
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


def counted(event, args):
    return event in WRITES or (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"))


def in_child(work, strike):
    """What a process exits with that runs `work`, and `strike(number, event)` before each of its writes."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    number = 0

    def hook(event, args):
        nonlocal number
        if number is not None and counted(event, args):
            number += 1
            strike(number, event)

    try:
        sys.addaudithook(hook)
        work()
        code = 0
    except CheckpointError:
        code = 1
    except BaseException as error:
        code = 1 if isinstance(error, OSError) and error.errno == errno.ENOSPC else 3  # the command says it in a line
        number = None
        traceback.print_exc()
    number = None
    os._exit(code)


def kill(at):
    def strike(number, event):
        if number == at:
            os._exit(9)

    return strike


def fill_the_disk(at):
    def strike(number, event):
        if number >= at and event in NEED_ROOM:
            raise OSError(errno.ENOSPC, "No space left on device")

    return strike


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
        code = in_child(work, fault(at))
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


def test_checkpoints_broken_at_random(tmp_path):
    """An error that names a file, or a conversion that is whole; nothing is written but the destination."""
    folders = [
        make_llama(tmp_path / "single", max_shard_size="1GB"),
        make_llama(tmp_path / "many", max_shard_size="20KB"),
    ]
    refused = 0
    for number in range(INPUTS):
        rng = random.Random(number)
        source = shutil.copytree(rng.choice(folders), tmp_path / "source")
        name = rng.choice(
            ["config.json", INDEX if (source / INDEX).exists() else WEIGHTS, rng.choice(shard_names(source))]
        )
        break_one(rng, source / name)
        before = snapshot(source)
        try:
            convert(source, tmp_path / "destination")
        except CheckpointError:
            refused += 1
            assert not (tmp_path / "destination").exists(), number
        except Exception as error:
            raise AssertionError(f"input {number}, {name}: {(source / name).read_bytes()[:400]}") from error
        else:
            assert verify(source, tmp_path / "destination", dtypes=()).ok, number
            shutil.rmtree(tmp_path / "destination")
        assert snapshot(source) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["many", "single", "source"], number
        shutil.rmtree(source)
    assert 0.5 * INPUTS < refused < INPUTS


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
