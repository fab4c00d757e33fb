"""Writes what a benchmark measured: results/NAME.json with all numbers, results/NAME.md with the table."""

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def write(name: str, rows: list[dict], columns: dict[str, tuple[str, str]], note: str, **more) -> None:
    """
    Writes both files and prints the table.

    Args:
        name: of the benchmark, and of its script.
        rows: what was measured, one dict of JSON values per row.
        columns: the table's columns: key in a row -> (heading, format spec).
        note: a sentence or two below the table.
        more: further JSON values for the .json file.
    """
    result = {
        "command": " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("torch", "transformers")}},
        **more,
        "rows": rows,
    }
    lines = [[heading for heading, _ in columns.values()], ["---"] * len(columns)]
    lines += [[_text(row[key], spec) for key, (_, spec) in columns.items()] for row in rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (RESULTS / f"{name}.md").write_text(
        f"# {name}\n\n{table}\n\n{note}\n\nMade by `{result['command']}` on {result['machine']}; {versions}.\n",
        encoding="utf-8",
    )
    print(f"\n{table}\n\n{note}")


def machine() -> str:
    """The kind of machine, and nothing that identifies it."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, {gpu}"


def _text(value, spec: str) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else format(value, spec)
