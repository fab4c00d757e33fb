"""
The paper's table of reasoning before fine-tuning, for any checkpoint: five solved problems, then the problem (of
HumanEval the begun function alone). EM is of the greedy answer, Maj of what most of five samples at temperature 0.6
say; for code P@1 is of the greedy one.

    python examples/evaluation/pretrained.py MODEL --output_dir FOLDER --tasks gsm8k math500
    python examples/evaluation/pretrained.py MODEL --output_dir FOLDER --allow_code --baseline FOLDER
    accelerate launch --num_processes 8 examples/evaluation/pretrained.py MODEL --output_dir FOLDER --allow_code

Given again after an interruption, a command goes on. FOLDER then holds results.json, results.md and results.png, and
every text in generations/.
"""

from command import CODE, check_counts, evaluate, load, parse, start
from tables import write


def main(arguments: list[str] | None = None):
    args = parse("before fine-tuning", 5, 1024, __doc__, arguments)
    greedy = {f"{task}_few_shot": 1 for task in args.tasks}
    voted = {f"{task}_few_shot_voted": args.samples for task in args.tasks if task not in CODE}
    tasks = load(greedy | voted, args.data)
    check_counts(tasks, args)
    found = evaluate(start(args), tasks, args)
    if found is not None:  # the first process has it
        of_files, problems = found
        scores = {task: of_files[f"{task}_few_shot"] for task in args.tasks}
        for task in args.tasks:
            if task not in CODE:
                majority = of_files[f"{task}_few_shot_voted"]["Maj@k"]
                scores[task] = {"EM": scores[task]["P@1"], f"Maj@{args.samples}": majority}
        write(args, scores, {task: problems[f"{task}_few_shot"] for task in args.tasks})


if __name__ == "__main__":
    main()
