"""What convert() refuses, leaving no trace of itself: damaged or hostile folders, and destinations."""

import errno
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from folders import (
    INDEX,
    SHARDED,
    WEIGHTS,
    edit_config,
    edit_json,
    make_llama,
    read_tensors,
    shard_names,
    snapshot,
    split_header,
    write_header,
)
from safetensors.torch import save_file

from conversion_iha import CheckpointError, convert, verify
from conversion_iha.destination import MARKER

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM = "model.norm.weight"


def resave(folder, change):
    tensors = read_tensors(folder)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_header(folder, change, shard=WEIGHTS):
    header, data = split_header(folder / shard)
    write_header(folder / shard, change(header) or header, data)


def edit_entry(folder, **fields):
    edit_header(folder, lambda header: header[NORM].update(fields))


def edit_weight_map(folder, **shards):
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({NORM: shards["norm"]}))


def shift_data(folder, by):
    """Moves the last tensor's place by some bytes; the file grows or shrinks with it, so only the place is wrong."""
    header, data = split_header(folder / WEIGHTS)
    entries = [value for name, value in header.items() if name != "__metadata__"]
    last = max(entries, key=lambda entry: entry["data_offsets"][1])
    last["data_offsets"] = [offset + by for offset in last["data_offsets"]]
    write_header(folder / WEIGHTS, header, (data + bytes(by)) if by > 0 else data[:by])


def cut(path, nbytes):
    path.write_bytes(path.read_bytes()[:-nbytes])


def link_outside(folder, name):
    """The file itself is good; only where it lies is not."""
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / name).rename(outside / name)
    (folder / name).symlink_to(outside / name)


def pickle_only(folder):
    torch.save(read_tensors(folder), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def claim_long_header(folder):
    path = folder / WEIGHTS
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])


def break_header(folder):
    path = folder / WEIGHTS
    content = bytearray(path.read_bytes())
    content[8] = ord("!")
    path.write_bytes(content)


def point_into_other_folder(folder):
    (folder.parent / "outside").mkdir()
    shutil.copy(folder / SECOND, folder.parent / "outside" / SECOND)
    edit_weight_map(folder, norm=f"../outside/{SECOND}")


def point_absolutely(folder):
    edit_weight_map(folder, norm=str(folder / SECOND))


def lose_from_shard(folder):
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"model.none.weight": SECOND}))


def lose_from_index(folder):
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop(NORM) and None)


def store_twice(folder):
    tensors = read_tensors(folder)
    save_file({NORM: tensors[NORM]}, folder / "extra.safetensors")
    # The index names the extra file for a tensor that is in it, and the old shard still holds the tensor too.
    edit_weight_map(folder, norm="extra.safetensors")


def name_shard_as_mixing(folder):
    (folder / SECOND).rename(folder / "model-mixing.safetensors")
    rename = {FIRST: FIRST, SECOND: "model-mixing.safetensors"}
    edit_json(
        folder / INDEX,
        lambda index: index.update(weight_map={name: rename[shard] for name, shard in index["weight_map"].items()}),
    )


def set_in_tokenizer(folder):
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(auto_map={"AutoTokenizer": ["evil.T"]}))


def transpose(tensors):
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


SINGLE = [
    ("no-config", lambda f: (f / "config.json").unlink(), "config.json: the file is missing"),
    ("config-no-json", lambda f: (f / "config.json").write_text("{'model_type': 'llama'}"), "config.json: not valid"),
    ("config-binary", lambda f: (f / "config.json").write_bytes(b"\xff\xfe{"), "config.json: not valid JSON"),
    ("config-too-deep", lambda f: (f / "config.json").write_text("[" * 100_000), "config.json: not valid JSON"),
    ("config-list", lambda f: edit_json(f / "config.json", lambda c: [c]), "config.json: must hold a JSON object"),
    ("other-model", lambda f: edit_config(f, model_type="gpt2"), "config.json: model_type 'gpt2'"),
    ("model-type-list", lambda f: edit_config(f, model_type=["llama"]), r"config.json: model_type ['llama']"),
    (
        "infinity",
        lambda f: edit_config(f, rms_norm_eps=float("inf")),
        "config.json: not valid JSON (the number Infinity)",
    ),
    (
        "no-model-type",
        lambda f: edit_json(f / "config.json", lambda c: c.pop("model_type") and None),
        "model_type None",
    ),
    (
        "quantised",
        lambda f: edit_config(f, quantization_config={"bits": 4}),
        "config.json: quantization_config: quant",
    ),
    ("own-code", lambda f: edit_config(f, auto_map={"AutoModel": "evil.M"}), "config.json: 'auto_map' is set"),
    ("sliding-window", lambda f: edit_config(f, sliding_window=16), "config.json: 'sliding_window' is set"),
    ("absurd-layers", lambda f: edit_config(f, num_hidden_layers=10**9), "config.json: num_hidden_layers=1000000000"),
    ("more-layers", lambda f: edit_config(f, num_hidden_layers=3), "tensor 'model.layers.2."),
    ("fewer-layers", lambda f: edit_config(f, num_hidden_layers=1), f"{WEIGHTS}: tensor 'model.layers.1."),
    ("absurd-vocab", lambda f: edit_config(f, vocab_size=10**12), "config.json says (1000000000000, 32)"),
    ("absurd-width", lambda f: edit_config(f, intermediate_size=10**18), "config.json: not a valid Llama"),
    ("text-for-number", lambda f: edit_config(f, hidden_size="32"), "config.json: not a valid Llama"),
    ("zero-heads", lambda f: edit_config(f, num_attention_heads=0), "config.json: not a valid Llama"),
    ("uneven-groups", lambda f: edit_config(f, num_key_value_heads=3), "num_key_value_heads=3 must divide"),
    ("unknown-rope", lambda f: edit_config(f, rope_parameters={"rope_type": "spiral"}), "config.json: not a valid"),
    (
        "other-head",
        lambda f: edit_config(f, architectures=["LlamaForQuestionAnswering"]),
        "config.json: architectures",
    ),
    ("numbered-head", lambda f: edit_config(f, architectures=[1]), "config.json: not a valid Llama"),
    ("tokenizer-code", set_in_tokenizer, "tokenizer_config.json: 'auto_map' is set"),
    ("tokenizer-list", lambda f: (f / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json: must hold"),
    ("pickle", pickle_only, "pytorch_model.bin: pickle weights are never loaded"),
    ("no-weights", lambda f: (f / WEIGHTS).unlink(), f"no weights found, neither {WEIGHTS} nor {INDEX}"),
    ("empty-file", lambda f: (f / WEIGHTS).write_bytes(b""), f"{WEIGHTS}: truncated, 0 bytes"),
    ("truncated", lambda f: cut(f / WEIGHTS, 1), f"{WEIGHTS}: truncated, its header describes"),
    ("appended", lambda f: (f / WEIGHTS).open("ab").write(b"!"), f"{WEIGHTS}: too long, its header describes"),
    ("header-too-long", claim_long_header, f"{WEIGHTS}: truncated or no safetensors file, its header claims"),
    ("header-no-json", break_header, f"{WEIGHTS}: its header is not valid JSON"),
    ("header-list", lambda f: edit_header(f, lambda header: list(header)), f"{WEIGHTS}: its header must be a JSON"),
    ("overlap", lambda f: shift_data(f, -4), f"{WEIGHTS}: tensor"),
    ("gap", lambda f: shift_data(f, 4), f"{WEIGHTS}: tensor"),
    ("float8", lambda f: edit_entry(f, dtype="F8_E4M3"), f"{WEIGHTS}: tensor '{NORM}' has dtype 'F8_E4M3'"),
    ("int8", lambda f: edit_entry(f, dtype="I8"), f"{WEIGHTS}: tensor '{NORM}' has 128 bytes, not what I8"),
    ("dtype-list", lambda f: edit_entry(f, dtype=["F32"]), f"{WEIGHTS}: the header's entry for tensor '{NORM}'"),
    ("entry-text", lambda f: edit_header(f, lambda h: {**h, NORM: "F32"}), f"entry for tensor '{NORM}' is malformed"),
    ("no-offsets", lambda f: edit_header(f, lambda h: h[NORM].pop("data_offsets") and None), f"'{NORM}' is malformed"),
    ("negative-shape", lambda f: edit_entry(f, shape=[-32]), f"{WEIGHTS}: the header's entry for tensor '{NORM}'"),
    ("float-shape", lambda f: edit_entry(f, shape=[32.0]), f"{WEIGHTS}: the header's entry for tensor '{NORM}'"),
    ("size-and-shape", lambda f: edit_entry(f, shape=[31]), f"{WEIGHTS}: tensor '{NORM}' has 128 bytes, not what F32"),
    ("shard-link-outside", lambda f: link_outside(f, WEIGHTS), f"{WEIGHTS}: the file lies outside"),
    ("config-link-outside", lambda f: link_outside(f, "config.json"), "config.json: the file lies outside"),
    ("tokenizer-link-outside", lambda f: link_outside(f, "tokenizer.json"), "tokenizer.json: the file lies outside"),
    ("license-link-outside", lambda f: link_outside(f, "LICENSE"), "LICENSE: the file lies outside"),
    ("wrong-shape", lambda f: resave(f, transpose), f"{WEIGHTS}: tensor 'model.layers.1.self_attn.k_proj.weight'"),
    ("missing-tensor", lambda f: resave(f, lambda t: t.pop(NORM)), f"tensor '{NORM}' is missing from the weights"),
    ("extra-tensor", lambda f: resave(f, lambda t: t.update(hook=torch.ones(1))), f"{WEIGHTS}: tensor 'hook' is not"),
    ("bias", lambda f: edit_config(f, attention_bias=True), "q_proj.bias' is missing from the weights"),
]

INDEXED = [
    ("truncated-first", lambda f: cut(f / FIRST, 1), f"{FIRST}: truncated, its header describes"),
    ("truncated-last", lambda f: cut(f / SECOND, 100), f"{SECOND}: truncated, its header describes"),
    ("emptied-shard", lambda f: (f / FIRST).write_bytes(b"abc"), f"{FIRST}: truncated, 3 bytes"),
    ("missing-shard", lambda f: (f / SECOND).unlink(), f"{SECOND}: the file is missing"),
    ("shard-link-outside", lambda f: link_outside(f, FIRST), f"{FIRST}: the file lies outside"),
    ("index-no-json", lambda f: (f / INDEX).write_text("weights"), f"{INDEX}: not valid JSON"),
    ("index-list", lambda f: (f / INDEX).write_text("[]"), f"{INDEX}: must hold a JSON object"),
    ("index-empty", lambda f: (f / INDEX).write_text("{}"), f"{INDEX}: 'weight_map' must be an object"),
    ("index-to-parent", point_into_other_folder, f"{INDEX}: tensor '{NORM}' points at '../outside/{SECOND}'"),
    ("index-absolute", point_absolutely, f"{INDEX}: tensor '{NORM}' points at '/"),
    ("index-to-pickle", lambda f: edit_weight_map(f, norm="pytorch_model.bin"), f"{INDEX}: tensor '{NORM}' points at"),
    ("index-to-number", lambda f: edit_weight_map(f, norm=1), f"{INDEX}: tensor '{NORM}' points at 1"),
    ("index-to-nul", lambda f: edit_weight_map(f, norm="\0.safetensors"), "the file is missing"),
    ("index-too-long", lambda f: edit_weight_map(f, norm=f"{'a' * 300}.safetensors"), "aaa.safetensors: "),
    ("index-wrong-shard", lambda f: edit_weight_map(f, norm=FIRST), f"{INDEX}: tensor '{NORM}' is not in {FIRST}"),
    ("not-in-shard", lose_from_shard, f"{INDEX}: tensor 'model.none.weight' is not in {SECOND}"),
    ("not-in-index", lose_from_index, f"{INDEX}: tensor '{NORM}' of {SECOND} is missing from the index"),
    ("tensor-twice", store_twice, f"tensor '{NORM}' stands in extra.safetensors too"),
]


@pytest.mark.parametrize(
    ("max_shard_size", "damage", "message"),
    [pytest.param("1GB", damage, message, id=name) for name, damage, message in SINGLE]
    + [pytest.param(SHARDED, damage, message, id=f"sharded-{name}") for name, damage, message in INDEXED],
)
def test_refuses_hostile_folder(max_shard_size, damage, message, tmp_path):
    parent = tmp_path / "parent"
    source = make_llama(parent / "llama", max_shard_size=max_shard_size)
    assert shard_names(source) == ([WEIGHTS] if max_shard_size == "1GB" else [FIRST, SECOND])
    damage(source)
    before, listing = snapshot(source), sorted(parent.rglob("*"))

    with pytest.raises(CheckpointError) as error:
        convert(source, parent / "iha")

    assert message in str(error.value)
    assert snapshot(source) == before
    assert sorted(parent.rglob("*")) == listing


@pytest.mark.parametrize("link", [False, True])
def test_refuses_shard_that_would_be_written_over(link, tmp_path):
    source = make_llama(tmp_path / "llama", max_shard_size=SHARDED)
    name_shard_as_mixing(source)
    before = snapshot(source)

    with pytest.raises(CheckpointError, match=r"model-mixing\.safetensors"):
        convert(source, tmp_path / "iha", link=link)

    # Hard-linked, the source's own file would have got the mixing tensors.
    assert snapshot(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_refused_before_folders_are_made(tmp_path):
    source = make_llama(tmp_path / "llama")
    edit_config(source, model_type="gpt2")

    with pytest.raises(CheckpointError):
        convert(source, tmp_path / "not" / "yet" / "iha")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


def test_failed_overwrite_keeps_the_old_folder(tmp_path):
    source = make_llama(tmp_path / "llama")
    convert(source, tmp_path / "iha")
    before = snapshot(tmp_path / "iha")
    cut(source / WEIGHTS, 1)

    with pytest.raises(CheckpointError, match="truncated"):
        convert(source, tmp_path / "iha", overwrite=True)

    assert snapshot(tmp_path / "iha") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iha", "llama"]


@pytest.mark.parametrize("name", ["llama.bin", "llama.gguf"])
def test_refuses_source_that_is_no_checkpoint(name, tmp_path):
    (tmp_path / name).write_bytes(b"GGUF" + bytes(64))

    with pytest.raises(CheckpointError, match=name):
        convert(tmp_path / name, tmp_path / "iha")

    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["acme/none", "acme/none/at/all", "none"])
def test_refuses_name_that_no_folder_and_no_model_has(name, tmp_path):
    with pytest.raises(CheckpointError, match=f"{name}: no such folder"):
        convert(name, tmp_path / "iha")

    assert not list(tmp_path.iterdir())


def test_refuses_truncated_gguf_file(smollm2_gguf, tmp_path):
    with smollm2_gguf.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(300_000))

    with pytest.raises(CheckpointError, match=r"cut\.gguf: Transformers cannot read it"):
        convert(tmp_path / "cut.gguf", tmp_path / "iha")

    assert [path.name for path in tmp_path.iterdir()] == ["cut.gguf"]


def test_refuses_gguf_file_that_does_not_fit_dequantised(smollm2_gguf, tmp_path, monkeypatch):
    # Mock: a nearly full disk cannot be had here. 134,515,008 parameters in float32 are 538,060,032 bytes.
    monkeypatch.setattr("conversion_iha.source.shutil.disk_usage", lambda _: SimpleNamespace(free=538_060_031))

    with pytest.raises(CheckpointError, match=r"gguf: dequantised it takes 0\.54 GB and .* has 0\.54 GB free"):
        convert(smollm2_gguf, tmp_path / "iha")

    assert not list(tmp_path.iterdir())


def test_refuses_missing_gguf_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.gguf: the file does not exist"):
        convert(tmp_path / "none.gguf", tmp_path / "iha")


@pytest.mark.parametrize("max_shard_size", ["1GB", SHARDED])
def test_accepts_layout_of_the_hub_cache(max_shard_size, tmp_path):
    source = make_llama(tmp_path / "llama", max_shard_size=max_shard_size)
    repo = tmp_path / "models--acme--tiny"
    snapshot_folder, blobs = repo / "snapshots" / "0123abc", repo / "blobs"
    snapshot_folder.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        path.rename(blobs / f"{number:040x}")
        link = snapshot_folder / path.relative_to(source)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(blobs / f"{number:040x}")
    before = snapshot(repo)

    assert convert(snapshot_folder, tmp_path / "iha") == []

    assert snapshot(repo) == before
    assert verify(snapshot_folder, tmp_path / "iha", dtypes=()).ok
    # Files, not links into a cache that may be emptied.
    assert not any(path.is_symlink() for path in (tmp_path / "iha").rglob("*"))


def test_refuses_links_of_the_hub_cache_that_leave_it(tmp_path):
    source = make_llama(tmp_path / "models--acme--tiny" / "snapshots" / "0123abc")
    other = tmp_path / "models--acme--other" / "blobs"
    other.mkdir(parents=True)
    (source / WEIGHTS).rename(other / WEIGHTS)
    (source / WEIGHTS).symlink_to(other / WEIGHTS)

    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: the file lies outside"):
        convert(source, tmp_path / "iha")


def test_accepts_rotary_frequencies_of_early_llama(tmp_path):
    source = make_llama(tmp_path / "llama")
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    resave(source, lambda tensors: tensors.update(frequencies))

    assert convert(source, tmp_path / "iha") == []

    assert verify(source, tmp_path / "iha", dtypes=()).ok
    assert frequencies.keys() <= read_tensors(tmp_path / "iha").keys()


def test_accepts_tied_head_stored_twice(tmp_path):
    source = make_llama(tmp_path / "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in read_tensors(source)
    resave(source, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))

    assert convert(source, tmp_path / "iha") == []
    assert verify(source, tmp_path / "iha", dtypes=()).ok


def put_file(source, destination):
    destination.write_text("mine")


def put_folder(source, destination):
    destination.mkdir()
    (destination / "mine.txt").write_text("mine")


def put_iha(source, destination):
    convert(source, destination)


def put_llama(source, destination):
    shutil.copytree(source, destination)


def put_dangling_link(source, destination):
    destination.symlink_to(destination.parent / "none")


def put_link_to_iha(source, destination):
    convert(source, destination.parent / "elsewhere")
    destination.symlink_to(destination.parent / "elsewhere")


@pytest.mark.parametrize(
    ("put", "overwrite", "message"),
    [
        (put_file, False, "exists already"),
        (put_folder, False, "exists already"),
        (put_iha, False, "exists already; name another destination, or pass --overwrite"),
        (put_dangling_link, False, "exists already"),
        (put_file, True, "--overwrite replaces folders only"),
        (put_folder, True, "--overwrite replaces IHA folders only"),
        (put_llama, True, "--overwrite replaces IHA folders only"),
        (put_link_to_iha, True, "--overwrite replaces folders only"),
        (put_dangling_link, True, "--overwrite replaces folders only"),
    ],
)
def test_refuses_destination(put, overwrite, message, tmp_path):
    source = make_llama(tmp_path / "llama")
    put(source, tmp_path / "iha")
    before = {**snapshot(source), **snapshot(tmp_path / "iha")}
    listing = sorted(tmp_path.rglob("*"))

    with pytest.raises(CheckpointError) as error:
        convert(source, tmp_path / "iha", overwrite=overwrite)

    assert message in str(error.value)
    assert {**snapshot(source), **snapshot(tmp_path / "iha")} == before
    assert sorted(tmp_path.rglob("*")) == listing


@pytest.mark.parametrize("where", [".", "iha", "deep/iha", "..", "link/iha"])
def test_refuses_destination_that_meets_the_source(where, tmp_path):
    source = make_llama(tmp_path / "folder" / "llama")
    (tmp_path / "folder" / "other").mkdir()
    if where.startswith("link"):
        (tmp_path / "link").symlink_to(source)
        destination = tmp_path / where
    else:
        destination = source / where
    before, listing = snapshot(source), sorted(tmp_path.rglob("*"))

    with pytest.raises(CheckpointError, match="must lie outside the source"):
        convert(source, destination, overwrite=True)

    assert snapshot(source) == before
    assert sorted(tmp_path.rglob("*")) == listing


def test_overwrite_replaces_iha_folder(tmp_path):
    first = make_llama(tmp_path / "first")
    second = make_llama(tmp_path / "second", seed=1, max_shard_size=SHARDED)
    convert(first, tmp_path / "iha")
    (tmp_path / "iha" / "notes.txt").write_text("of the old one")

    assert convert(second, tmp_path / "iha", 3, overwrite=True) == []

    assert verify(second, tmp_path / "iha", dtypes=()).ok
    assert not verify(first, tmp_path / "iha", dtypes=()).ok
    assert json.loads((tmp_path / "iha" / "config.json").read_text())["num_pseudo_heads"] == 3
    assert not (tmp_path / "iha" / "notes.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "iha", "second"]


def test_overwrite_fills_empty_folder(tmp_path):
    source = make_llama(tmp_path / "llama")
    (tmp_path / "iha").mkdir()

    convert(source, tmp_path / "iha", overwrite=True)

    assert verify(source, tmp_path / "iha", dtypes=()).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iha", "llama"]


def test_overwrite_cut_off_between_its_renames_is_undone(tmp_path):
    source = make_llama(tmp_path / "llama")
    convert(source, tmp_path / "iha")
    before = snapshot(tmp_path / "iha")
    # A process cannot be stopped there reliably, so its state is made: the old folder set aside, the new not in place.
    hidden = tmp_path / ".iha.converting"
    (hidden / "new").mkdir(parents=True)
    (hidden / MARKER).touch()
    (tmp_path / "iha").rename(hidden / "old")

    with pytest.raises(CheckpointError, match="exists already"):
        convert(source, tmp_path / "iha")
    assert snapshot(tmp_path / "iha") == before

    # Cut off a step later, the new one was in place; the old one is not put back when that one goes.
    assert not hidden.exists()
    (hidden / "old").mkdir(parents=True)
    (hidden / MARKER).touch()
    shutil.rmtree(tmp_path / "iha")
    convert(source, tmp_path / "iha")
    assert verify(source, tmp_path / "iha", dtypes=()).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iha", "llama"]


def test_a_hidden_folder_of_somebody_else_is_not_touched(tmp_path):
    source = make_llama(tmp_path / "llama")
    hidden = tmp_path / ".iha.converting"
    hidden.mkdir()
    (hidden / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not made by a conversion, so it is not touched"):
        convert(source, tmp_path / "iha")
    assert [path.name for path in hidden.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", [".iha.converting", ".iha.converting/new"])
def test_the_hidden_folder_is_never_the_source(name, tmp_path):
    source = make_llama(tmp_path / name)
    before = snapshot(source)
    with pytest.raises(CheckpointError, match="must lie outside the source"):
        convert(source, tmp_path / "iha")
    assert snapshot(source) == before


def test_a_link_in_place_of_the_hidden_folder_is_refused(tmp_path):
    source, other = make_llama(tmp_path / "llama"), tmp_path / "other"
    other.mkdir()
    (other / MARKER).touch()
    (other / "mine.txt").write_text("mine")
    (tmp_path / ".iha.converting").symlink_to(other)
    with pytest.raises(CheckpointError, match="is a link"):
        convert(source, tmp_path / "iha")
    assert (other / "mine.txt").exists()


def test_a_gguf_source_inside_the_destination_is_refused(smollm2_gguf, tmp_path):
    convert(make_llama(tmp_path / "llama"), tmp_path / "iha")
    gguf = tmp_path / "iha" / "model.gguf"
    gguf.symlink_to(smollm2_gguf)
    shutil.copy(smollm2_gguf, tmp_path / "iha" / "copy.gguf")
    with pytest.raises(CheckpointError, match="must lie outside the source"):
        convert(tmp_path / "iha" / "copy.gguf", tmp_path / "iha", overwrite=True)
    assert (tmp_path / "iha" / "copy.gguf").stat().st_size == smollm2_gguf.stat().st_size


def test_a_gguf_file_has_its_own_tokenizer(smollm2):
    """It lay beside another one's tokenizer.json."""
    assert len(json.loads((smollm2 / "tokenizer.json").read_text())["model"]["vocab"]) == 49152
    modes = {path.stat().st_mode for path in smollm2.iterdir()}
    assert len(modes) == 1  # weights can be read by whom the config can


@pytest.mark.parametrize("missing", [1, 0])
def test_refuses_what_does_not_fit_on_the_disk(missing, tmp_path, monkeypatch):
    source = make_llama(tmp_path / "llama", max_shard_size=SHARDED)
    # Mocks: a disk with as many free bytes as the test needs and without shared blocks cannot be had here.
    carried = [*shard_names(source), "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    carried += ["special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"]
    carried += ["LICENSE", "NOTICE.txt"]
    needed = sum((source / name).stat().st_size for name in carried)
    monkeypatch.setattr("conversion_iha.carry.shutil.disk_usage", lambda _: SimpleNamespace(free=needed - missing))
    monkeypatch.setattr("conversion_iha.carry._reflink", lambda reader, writer: False)

    if not missing:
        assert convert(source, tmp_path / "iha") == []
        return
    with pytest.raises(CheckpointError, match=r"GB are needed and .* GB are free"):
        convert(source, tmp_path / "iha")
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_refuses_hard_links_across_disks(tmp_path, monkeypatch):
    source = make_llama(tmp_path / "llama")

    def link(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    # Mock: not every machine has a second disk.
    monkeypatch.setattr("conversion_iha.carry.os.link", link)

    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: --link cannot hard-link it .*cross-device"):
        convert(source, tmp_path / "iha", link=True)

    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_fields_without_meaning_in_llama_are_left_behind(tmp_path):
    source = make_llama(tmp_path / "llama")
    edit_config(source, layer_types=["sliding_attention"] * 2, use_sliding_window=True, max_window_layers=1)

    assert convert(source, tmp_path / "iha") == []

    config = json.loads((tmp_path / "iha" / "config.json").read_text())
    assert config["layer_types"] == ["full_attention"] * 2
    assert verify(source, tmp_path / "iha", dtypes=()).ok
