"""
Greedy text of a Llama checkpoint and of its IHA conversion, side by side.

    python examples/quickstart/generate.py LLAMA IHA
"""

import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_iha  # noqa: F401  (registers the Auto classes)
from conversion_iha.source import open_source

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three prime numbers.",
)
NEW_TOKENS = 40


def generate(folder) -> tuple[list[str], float]:
    """The answers, and the tokens per second they came at."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers, count, start = [], 0, time.perf_counter()
    for prompt in PROMPTS:
        text = prompt
        if tokenizer.chat_template:
            message = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)[0, inputs.input_ids.shape[1] :]
        answers.append(tokenizer.decode(output, skip_special_tokens=True).strip())
        count += len(output)
    return answers, count / (time.perf_counter() - start)


def main() -> None:
    source, destination = sys.argv[1:]
    with open_source(source) as folder:
        llama, llama_speed = generate(folder)
    iha, iha_speed = generate(destination)
    table = Table(show_lines=True)
    for column in ("prompt", f"Llama, {llama_speed:.0f} tokens/s", f"IHA, {iha_speed:.0f} tokens/s", "same"):
        table.add_column(column)
    for prompt, ours, theirs in zip(PROMPTS, llama, iha, strict=True):
        table.add_row(prompt, ours, theirs, "yes" if ours == theirs else "NO")
    Console().print(table)


if __name__ == "__main__":
    main()
