"""The commands of the SFT example as the tests give them."""

import sys

from runs import EXAMPLES

EXAMPLE = EXAMPLES / "sft_openthoughts"
STEPS = 6  # two epochs of 24 rows: Accelerate would fill up an uneven one, and processes would not be one
BATCH = 8  # rows in a step


def train(model, data, folder, *more, launcher=(sys.executable,)):
    """The command; `more` are arguments of the program, `launcher` is what starts it."""
    return [
        *launcher,
        *(EXAMPLE / "train.py", "--config", EXAMPLE / "demo.yaml"),
        *("--model", model, "--dataset", data, "--output_dir", folder, "--eval_examples", "44"),
        *("--max_steps", str(STEPS), "--save_steps", "2", "--save_total_limit", "9", "--eval_steps", "3"),
        *("--learning_rate", "1e-3", "--use_cpu", "true", "--disable_tqdm", "true"),
        *("--per_device_train_batch_size", str(BATCH)),
        *more,
    ]


def share(processes):
    """The argument that spreads a step over processes."""
    return ("--per_device_train_batch_size", str(BATCH // processes))
