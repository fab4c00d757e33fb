"""
The learning rate of the mixing tensors: the same short fine-tuning of SmolLM2 as IHA at several of them.

    python benchmarks/mixing_rate.py

Runs examples/sft_openthoughts/train.py on the demo's data; what `make train-demo` has made in demo-output/sft is used
again, and made where it is missing.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from results_file import write

EXAMPLE = Path(__file__).parents[1] / "examples" / "sft_openthoughts"
sys.path.insert(0, str(EXAMPLE))

from demo import OUTPUT, prepare  # noqa: E402  (what the path above makes importable)

RATES = ("0", "1e-4", "1e-3", "1e-2")
STEPS = 12

COLUMNS = {
    "rate": ("mixing_learning_rate", ""),
    "before": ("evaluation loss before", ".4f"),
    "after": ("after", ".4f"),
    "training": ("mean training loss of the last 4 steps", ".4f"),
    "collapse": ("apart/collapse", ".4f"),
    "k_mix": ("apart/k_mix", ".4f"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    data, model = prepare()
    rows = []
    for rate in RATES:
        run = OUTPUT / f"rate {rate}"
        command = [
            *(sys.executable, EXAMPLE / "train.py", "--config", EXAMPLE / "demo.yaml"),
            *("--model", model, "--dataset", data, "--output_dir", run, "--mixing_learning_rate", rate),
            *("--max_steps", STEPS, "--eval_steps", STEPS, "--save_strategy", "no"),
        ]
        subprocess.run(list(map(str, command)), check=True)
        log = json.loads((run / "results.json").read_text(encoding="utf-8"))["log"]
        evaluations = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
        losses = [entry for entry in log if "loss" in entry]
        rows.append(
            {
                "rate": rate,
                "before": evaluations[0],
                "after": evaluations[-1],
                "training": sum(entry["loss"] for entry in losses[-4:]) / 4,
                "collapse": losses[-1]["apart/collapse"],
                "k_mix": losses[-1]["apart/k_mix"],
            }
        )
        shutil.rmtree(run)
    note = (
        f"SmolLM2-135M-Instruct as IHA, P = 2, {STEPS} steps of 2 rows of 512 tokens on 80 grade-school problems, and "
        "20 more for the evaluation. The weights' own rate is 1e-5; everything else as in demo.yaml. One seed."
    )
    write("mixing_rate", rows, COLUMNS, note)


if __name__ == "__main__":
    main()
