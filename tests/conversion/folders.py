"""Llama folders for the conversion tests: tiny real ones, made by Transformers, and what is read back from them."""

import json
import shutil
import struct
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDED = "60KB"  # as max_shard_size it splits the tiny model
SIDE_FILES = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "LICENSE": "Do what you like.",
    "NOTICE.txt": "Nothing to note.",
}
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def make_llama(
    folder: Path, head=LlamaForCausalLM, dtype=torch.float32, max_shard_size="1GB", seed=0, **fields
) -> Path:
    """A tiny Llama as `save_pretrained` writes it, with the files that stand beside weights on the Hub."""
    torch.manual_seed(seed)
    model = head(LlamaConfig(**{**TINY, **fields})).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    for name, text in SIDE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "README.md").write_text("The source's own card.")
    return folder


def make_speaking_llama(folder: Path, smollm2: Path, **fields) -> Path:
    """A tiny Llama with the real tokenizer, as the comparison on prompts needs one."""
    make_llama(folder, **{"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2, **fields})
    for path in smollm2.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]], seed: int) -> None:
    """A float32 file of random numbers, written tensor by tensor: it may be larger than the memory that is spent."""
    header, end = {}, 0
    for name, shape in tensors.items():
        nbytes = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (end, end + nbytes)}
        end += nbytes
    text = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in tensors.values():
            file.write(torch.empty(shape).uniform_(-0.05, 0.05, generator=generator).numpy())


def make_layered_llama(
    folder: Path, hidden_size: int, intermediate_size: int, num_hidden_layers: int, seed: int = 0
) -> Path:
    """A Llama of any size with a shard of embeddings, then one per layer; one tensor at a time is in memory."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        layer = int(name.split(".")[2]) + 1 if name.startswith("model.layers.") else 0
        shards.setdefault(f"model-{layer:05}-of-{num_hidden_layers:05}.safetensors", {})[name] = shape
    for number, (shard, tensors) in enumerate(shards.items()):
        write_safetensors(folder / shard, tensors, 1000 * seed + number)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "LICENSE").write_text(SIDE_FILES["LICENSE"])
    return folder


def edit_json(path: Path, change) -> None:
    """Applies `change` to the object in a JSON file; what it returns, if anything, replaces the object."""
    content = json.loads(path.read_text())
    replaced = change(content)
    path.write_text(json.dumps(content if replaced is None else replaced))


def edit_config(folder: Path, **fields) -> None:
    edit_json(folder / "config.json", lambda config: config.update(fields))


def split_header(path: Path) -> tuple[dict, bytes]:
    """The header of a safetensors file, and the bytes after it."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(path: Path, header, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def shard_names(folder: Path) -> list[str]:
    if not (folder / INDEX).exists():
        return [WEIGHTS]
    return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for shard in shard_names(folder):
        with safe_open(folder / shard, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def snapshot(folder: Path) -> dict[str, tuple]:
    """All that must stay as it is: each entry's kind, mode, time of change, inode, and bytes or link."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        # A folder's own time of change tells of files that came and went.
        found[str(path)] = (status.st_mode, status.st_mtime_ns, status.st_ino, content)
    return found
