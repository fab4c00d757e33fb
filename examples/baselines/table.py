"""
The baselines at equal FLOPs, as a table: parameters, and FLOPs per token of the forward.

    python examples/baselines/table.py [iha-2.4b] [--sequence_length 8192] [--output_dir demo-output/baselines]

Writes results.json and results.md. Nothing is trained, and no weights are made.
"""

import argparse
import json
from pathlib import Path

import torch
from baselines import BASELINES, configuration
from flops import flops_per_token

from configuration_iha import PRESETS, IHAConfig, preset

PARTS = ("attention", "projections", "mlp", "head", "total")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", choices=PRESETS, default="iha-2.4b", help="the shape (%(default)s)")
    parser.add_argument("--sequence_length", type=int, default=8192, help="N in tokens (%(default)s)")
    parser.add_argument("--num_pseudo_heads", type=int, default=2, help="P (%(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("demo-output/baselines"), help="(%(default)s)")
    args = parser.parse_args()
    try:
        rows = compare(preset(args.preset), args.sequence_length, args.num_pseudo_heads)
    except ValueError as error:  # one of them cannot have this shape, or not at these FLOPs
        parser.error(str(error))
    write(args.output_dir, rows, args.preset, args.sequence_length, args.num_pseudo_heads)


def compare(shape: IHAConfig, sequence_length: int, num_pseudo_heads: int) -> list[dict]:
    """A row for each baseline; `ratio` is of its FLOPs to Global's, the first."""
    rows = []
    for name, baseline in BASELINES.items():
        config = configuration(name, shape, sequence_length, num_pseudo_heads)
        with torch.device("meta"):
            model = baseline.model_class(config)
        flops = flops_per_token(config, sequence_length)
        rows.append(
            {
                "model": name,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "intermediate_size": config.intermediate_size,
                **{f"flops a token, {part}": flops[part] for part in PARTS},
                "ratio": flops["total"] / (rows[0]["flops a token, total"] if rows else flops["total"]),
            }
        )
    return rows


def write(folder: Path, rows: list[dict], shape: str, sequence_length: int, num_pseudo_heads: int):
    lines = [
        "| model | parameters | intermediate size | " + " | ".join(f"FLOPs, {part}" for part in PARTS) + " | ratio |",
        "| --- " * (4 + len(PARTS)) + "|",
    ]
    for row in rows:
        flops = " | ".join(f"{row[f'flops a token, {part}']:.3e}" for part in PARTS)
        lines.append(
            f"| {row['model']} | {row['parameters']:,} | {row['intermediate_size']:,} | {flops} | {row['ratio']:.4f} |"
        )
    table = "\n".join(lines)
    note = (
        f"{shape}'s shape, N = {sequence_length}, P = {num_pseudo_heads}. FLOPs of the forward per token; a training "
        "step takes about three times as many. Ratio: to Global's."
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(f"# baselines\n\n{table}\n\n{note}\n", encoding="utf-8")
    results = {"shape": shape, "sequence_length": sequence_length, "num_pseudo_heads": num_pseudo_heads, "rows": rows}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{table}\n\n{note}")


if __name__ == "__main__":
    main()
