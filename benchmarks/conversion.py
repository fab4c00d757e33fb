"""
How long a conversion takes beside a plain copy of the same folder, and how much memory.

    python benchmarks/conversion.py [--gigabytes 4]

Makes a sharded Llama checkpoint with random weights in a temporary folder (TMPDIR says where; three times the size
must be free), then runs in turn a bare import of the package, `cp -r` and a conversion, each as a process of its own.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from results_file import write

ROUNDS = 3
SHARD_BYTES = 10**9
TARGET_RATIO = 1.3
TARGET_EXTRA_MB = 200

# Llama 3.2 3B but for the number of layers, which the size decides.
SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}

IMPORT = "from conversion_iha import convert"
CONVERT = f"""
import sys, time
{IMPORT}
start = time.perf_counter()
convert(sys.argv[1], sys.argv[2])
print(time.perf_counter() - start)
"""

COLUMNS = {
    "what": ("", ""),
    "measured": ("median", ".4g"),
    "rounds": ("rounds", ""),
    "target": ("target", ""),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4, help="size of the checkpoint")
    gigabytes = parser.parse_args().gigabytes

    with tempfile.TemporaryDirectory() as folder:
        llama, target = Path(folder, "llama"), Path(folder, "target")
        # In a process of its own: the peak memory that Linux reports of a child is at least its parent's.
        maker = get_context("spawn").Process(target=make_llama, args=(llama, int(gigabytes * 1e9)))
        maker.start()
        maker.join()
        size = sum(file.stat().st_size for file in llama.iterdir())
        copy(llama, target)  # the first copy is slower: its memory is new to the page cache
        rounds = [measure_round(llama, target, convert_first=i % 2 == 1) for i in range(ROUNDS)]

    seen = {key: [each[key] for each in rounds] for key in rounds[0]}
    middle = {key: median(values) for key, values in seen.items()}
    ratios = [each["convert_seconds"] / each["cp_seconds"] for each in rounds]
    extras = [each["convert_peak_mb"] - each["import_peak_mb"] for each in rounds]
    ratio = middle["convert_seconds"] / middle["cp_seconds"]
    extra = middle["convert_peak_mb"] - middle["import_peak_mb"]
    rows = [
        row("`cp -r`, s", middle["cp_seconds"], seen["cp_seconds"]),
        row("`convert()`, s", middle["convert_seconds"], seen["convert_seconds"]),
        row("`convert()` / `cp -r`", ratio, ratios, f"at most {TARGET_RATIO}"),
        row("process with import and `convert()`, s", middle["process_seconds"], seen["process_seconds"]),
        row("process with import alone, s", middle["import_seconds"], seen["import_seconds"]),
        row("peak memory with import and `convert()`, MB", middle["convert_peak_mb"], seen["convert_peak_mb"]),
        row("peak memory with import alone, MB", middle["import_peak_mb"], seen["import_peak_mb"]),
        row("memory that `convert()` adds, MB", extra, extras, f"at most {TARGET_EXTRA_MB}"),
    ]
    note = (
        f"A bfloat16 checkpoint of {size / 1e9:.2f} GB, source in the page cache. The ratio is that of the medians; "
        "where `cp` itself varies from round to round, so does the ratio."
    )
    write("conversion", rows, COLUMNS, note, checkpoint_bytes=size, rounds=rounds)


def row(what: str, measured: float, rounds: list[float], target: str = "") -> dict:
    return {"what": what, "measured": measured, "rounds": ", ".join(f"{x:.3g}" for x in rounds), "target": target}


def make_llama(folder: Path, nbytes: int) -> None:
    """Writes a checkpoint of about `nbytes`, with one shard at a time in memory."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    rest = sum(2 * shape.numel() for shape in llama_shapes(LlamaConfig(**SHAPE, num_hidden_layers=1)).values())
    both = sum(2 * shape.numel() for shape in llama_shapes(LlamaConfig(**SHAPE, num_hidden_layers=2)).values())
    layers = max(1, 1 + round((nbytes - rest) / (both - rest)))
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)

    shards, filled = [{}], 0
    for name, shape in llama_shapes(config).items():
        if filled + 2 * shape.numel() > SHARD_BYTES and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += 2 * shape.numel()

    weight_map = {}
    for i, shapes in enumerate(shards, start=1):
        shard = f"model-{i:05}-of-{len(shards):05}.safetensors"
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02) for name, shape in shapes.items()}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def llama_shapes(config) -> dict:
    """The shape of each tensor that a checkpoint of this configuration holds."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        tensors = LlamaForCausalLM(config).state_dict()
    return {name: tensor.shape for name, tensor in tensors.items() if name != "lm_head.weight"}  # tied


def measure_round(llama: Path, target: Path, convert_first: bool) -> dict[str, float]:
    """Seconds and peak MB of each process."""
    steps = [convert, copy] if convert_first else [copy, convert]
    return {key: value for step in steps for key, value in step(llama, target).items()}


def copy(llama: Path, target: Path) -> dict[str, float]:
    # The import comes just before, as it does in a conversion: the disk has the same seconds of rest.
    import_seconds, import_peak_mb, _ = measure(sys.executable, "-c", IMPORT)
    cp_seconds, _, _ = measure("cp", "-r", llama, target)
    shutil.rmtree(target)
    return {"import_seconds": import_seconds, "import_peak_mb": import_peak_mb, "cp_seconds": cp_seconds}


def convert(llama: Path, target: Path) -> dict[str, float]:
    process_seconds, peak_mb, printed = measure(sys.executable, "-c", CONVERT, llama, target)
    shutil.rmtree(target)
    return {"process_seconds": process_seconds, "convert_peak_mb": peak_mb, "convert_seconds": float(printed)}


def measure(*command) -> tuple[float, float, str]:
    """Runs a process; its seconds, its peak memory in MB, and what it printed."""
    os.sync()  # what earlier ones left to be written is not paid by this one
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} failed with exit code {process.returncode}.")
    return seconds, usage.ru_maxrss * 1024 / 1e6, printed


if __name__ == "__main__":
    main()
