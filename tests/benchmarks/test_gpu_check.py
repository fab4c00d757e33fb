"""The program that checks a GPU, where there is none: toy sizes on the CPU, and code that is broken on purpose."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modeling_iha.mixing import IHACollapse, mix_heads

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ["--device", "cpu", "--small"]
DTYPES = ["float32", "bfloat16", "float16"]

ROWS = [
    *(f"layer, {attention}, {dtype}" for attention in ("sdpa", "eager", "flex_attention") for dtype in DTYPES),
    *(f"layer, flash_attention_2, {dtype}" for dtype in DTYPES[1:]),
    "layer, sdpa, autocast to bfloat16",
    *(f"decoding from a {cache}Cache, {dtype}" for cache in ("Dynamic", "Static") for dtype in DTYPES),
    *(f"absorbed attention, {form}, {dtype}" for form in ("torch form", "Triton kernel") for dtype in DTYPES),
    "compiled generation, float32, shared",
    *(f"full layer, P = {size}, {dtype}: sdpa takes a fused kernel" for size in (1, 2, 3) for dtype in DTYPES),
    *(f"decoding, {shape}, K = 64, batch {batch}, P = 2" for shape in ("SmolLM2", "8B") for batch in (1, 8)),
    *(
        f"{shape}, N P = 128, P = {size}, {reach}, sdpa: {part}"
        for shape in ("SmolLM2", "8B")
        for size in (1, 2, 4)
        for reach in ("full", "sliding")
        for part in ("forward", "and backward")
    ),
    "8B, N P = 128, P = 2, sliding, flex_attention",
]
NEEDS_A_GPU = {
    *(f"layer, flex_attention, {dtype}" for dtype in DTYPES[1:]),
    *(f"layer, flash_attention_2, {dtype}" for dtype in DTYPES[1:]),
    "absorbed attention, Triton kernel, bfloat16",  # Triton's interpreter has none
    "8B, N P = 128, P = 2, sliding, flex_attention",
}


def run(*command) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)


def rows(folder: Path) -> dict[str, dict]:
    found = json.loads((folder / "gpu_cpu-small.json").read_text())["rows"]
    assert len({row["what"] for row in found}) == len(found)
    return {row["what"]: row for row in found}


@pytest.mark.slow
def test_it_has_every_row_and_all_are_right(tmp_path):
    result = run(BENCHMARKS / "gpu_check.py", *SMALL, "--results", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    found = rows(tmp_path)
    assert sorted(found) == sorted(ROWS)
    for what, row in found.items():
        is_check = what.startswith(("layer", "decoding from", "absorbed", "compiled", "full layer"))
        assert row["passed"] == ("ok" if is_check and what not in NEEDS_A_GPU else ""), row
        assert ("needs a CUDA GPU" in row["more"]) == (what in NEEDS_A_GPU), row
    for row in (row for row in found.values() if row["theirs"].startswith("<= ")):
        assert 0 < float(row["ours"]) <= float(row["theirs"].removeprefix("<= ")) < 0.1
    assert (tmp_path / "gpu_cpu-small.md").read_text().count("\n| ") == len(ROWS) + 2


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_check")


@pytest.mark.slow
def test_what_is_wrong_is_a_failed_row_and_the_exit_code(gpu_check, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(IHACollapse, "forward", lambda self, heads: mix_heads(self.weight.flip(1), heads))
    monkeypatch.setattr(gpu_check.correctness, "FLEX", ())
    assert gpu_check.main([*SMALL, "--only", "correctness", "--results", str(tmp_path)]) == 1
    found = rows(tmp_path)
    for what in ("layer, sdpa, bfloat16", "layer, eager, float16", "decoding from a StaticCache, bfloat16"):
        assert found[what]["passed"] == "FAILED" and float(found[what]["ratio"]) > 5
    assert found["absorbed attention, torch form, float16"]["passed"] == "ok"
    assert found["layer, flex_attention, float32"]["more"].startswith("ValueError")  # nothing to compare is no success
    failed = {what for what, row in found.items() if row["passed"] == "FAILED"}
    assert set(capsys.readouterr().out.split("rows failed\n")[1].splitlines()) == {f"  {what}" for what in failed}


def test_without_a_gpu_the_error_says_what_works(gpu_check, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--results", str(tmp_path)])
    assert "gpu_check needs a CUDA GPU; --device cpu --small tries the program itself." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
