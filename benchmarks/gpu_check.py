"""
Whether everything is right on this GPU, and how fast it is: each path against float64, then attention and decoding
beside plain kernels. At most 8 minutes on one H100 or H200; exit code 1 where a path is wrong.

    python benchmarks/gpu_check.py [--minutes 8]
    python benchmarks/gpu_check.py --device cpu --small    # tries the program itself: what it measures means nothing

It needs this package, torch and transformers; flash-attn where it is installed.
"""

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path

import results_file
import torch
from gpu import correctness, speed
from gpu.table import COLUMNS
from tqdm.auto import tqdm
from transformers.utils import logging

PARTS = ["correctness", "fused", "decoding", "attention"]
NOTE = (
    "Errors are parts of the result's norm, beside what rounding allows; layers with their gradients. Attention is "
    "bfloat16, batch 1, without projections, beside one causal sdpa of N P tokens; W is N / (2 P^2). TFLOP/s count "
    "the pairs that see each other. Decoding is one new token in bfloat16, GB/s of its cache beside those that a copy "
    "reads and writes. The GPU's time, each call with nothing in its cache; each pair in turn, medians."
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--minutes", type=float, default=8, help="after which measurements are left out")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--results", type=Path, default=results_file.RESULTS, help="the folder to write to")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("gpu_check needs a CUDA GPU; --device cpu --small tries the program itself.")
    if args.device == "cpu" and not args.small:
        parser.error("--device cpu takes --small: nothing larger ends in minutes there.")
    warnings.filterwarnings("ignore", message=".*past_key_values.*deprecated", category=FutureWarning)
    logging.set_verbosity_error()
    end = time.monotonic() + 60 * args.minutes
    parts = {
        "correctness": correctness.rows(args.device, args.small),
        "fused": speed.fused(args.device, args.small),
        "decoding": speed.decoding(args.device, args.small, end),
        "attention": speed.attention(args.device, args.small, end),
    }
    found = []
    for row in itertools.chain.from_iterable(parts[part] for part in args.only):
        found.append(row)
        tqdm.write("  ".join(filter(None, row.values())))
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu small"
    results_file.RESULTS = args.results
    command = " ".join(["python", "benchmarks/gpu_check.py", *(sys.argv[1:] if arguments is None else arguments)])
    results_file.write(f"gpu_{device.lower().replace(' ', '-')}", found, COLUMNS, NOTE, command=command)
    wrong = [row["what"] for row in found if row["passed"] == "FAILED"]
    print(f"\n{len(wrong)} of {len(found)} rows failed" + "".join(f"\n  {what}" for what in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
