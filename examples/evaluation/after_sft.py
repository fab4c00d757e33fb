"""
The paper's table of reasoning after fine-tuning, for any checkpoint: several samples of each problem at temperature
0.6, P@1 over all of them, what most of them say (Maj), and for code the chance that one of ten is right (P@10).

    python examples/evaluation/after_sft.py MODEL --output_dir FOLDER --tasks gsm8k
    python examples/evaluation/after_sft.py MODEL --output_dir FOLDER --allow_code --baseline FOLDER
    accelerate launch --num_processes 8 examples/evaluation/after_sft.py MODEL --output_dir FOLDER --allow_code

Given again after an interruption, a command goes on. FOLDER then holds results.json, results.md and results.png, and
every text in generations/.
"""

import sys

from command import CODE, check_counts, evaluate, load, parse, start
from tables import write


def main(arguments: list[str] | None = None):
    args = parse("after fine-tuning", 16, 4096, __doc__, arguments)
    code = [task for task in args.tasks if task in CODE]
    if code and args.samples < 10:
        sys.exit(f"--samples {args.samples}: must be at least 10; P@10 of code needs ten.")
    tasks = load({f"{task}_sampled": args.samples for task in args.tasks}, args.data)
    check_counts(tasks, args)
    model = start(args)
    if model.tokenizer.chat_template is None:
        sys.exit(f"{args.model}: its tokenizer has no chat template; this table is for fine-tuned models.")
    found = evaluate(model, tasks, args, apply_chat_template=True)
    if found is not None:  # the first process has it
        of_files, problems = found
        scores = {
            task: {metric.replace("@k", f"@{args.samples}"): x for metric, x in of_files[f"{task}_sampled"].items()}
            for task in args.tasks
        }
        write(args, scores, {task: problems[f"{task}_sampled"] for task in args.tasks})


if __name__ == "__main__":
    main()
