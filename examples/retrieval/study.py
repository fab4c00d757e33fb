"""
Does IHA learn multi-key retrieval faster than the Llama it came from?

    python examples/retrieval/study.py [--output_dir demo-output/retrieval]

For every seed a small Llama is trained on single-key retrieval and converted; then the Llama and its conversions go on
with multi-key retrieval, on the same batches. Writes results.json, results.md and curves.png. Run again, it goes on
where it was stopped.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from task import VOCABULARY, multi_key, single_key
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import modeling_iha  # noqa: F401  (registers the Auto classes)
from configuration_iha import IHAConfig, attention_flops, linear_flops
from conversion_iha import convert
from training_iha.mixing import give_own_rate

SEEDS = (0, 1, 2)
VARIANTS = {
    "Llama": None,
    "IHA, exact": {"mixing_init": "exact"},
    "IHA, exact, std 0.25": {"mixing_init": "exact", "mixing_init_std": 0.25},
    "IHA, identity": {"mixing_init": "identity"},
}
RECORDS, ROWS = 85, 16  # of the evaluation, 510 tokens a row, and of a batch of the same tokens
CURRICULUM = (6, 12, 24, 85)  # records in a row, from batch to batch
BEFORE, STEPS, EVALUATE = 1500, 600, 25
LEARNING_RATE = 3e-3
LEARNED = 0.9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("demo-output/retrieval"))
    parser.add_argument("--seed", type=int, help="this one alone, without table and figure")
    args = parser.parse_args()
    if args.seed is not None:
        one_seed(args.output_dir / str(args.seed), args.seed)
        return
    # Two at a time: a model this small fills one core.
    waiting, running = list(SEEDS), []
    while waiting or running:
        while waiting and len(running) < 2:
            command = [sys.executable, __file__, "--output_dir", args.output_dir, "--seed", str(waiting.pop(0))]
            running.append(subprocess.Popen(list(map(str, command))))
        done = running.pop(0)
        if done.wait():
            raise SystemExit(done.returncode)
    report(args.output_dir)


def one_seed(folder: Path, seed: int):
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    llama = folder / "llama"
    if not llama.exists():
        before = folder / "llama.partial"
        pretrained(seed).save_pretrained(before)
        before.rename(llama)
    for name, fields in VARIANTS.items():
        file = folder / f"{name}.json"
        if file.exists():
            continue
        source = llama
        if fields is not None:
            source = folder / name
            if not source.exists():
                convert(llama, source, num_pseudo_heads=2, seed=seed, **fields)
        model = AutoModelForCausalLM.from_pretrained(source)
        curve = fine_tuned(model, seed, steps_for_equal_flops() if fields is None else STEPS, f"seed {seed}, {name}")
        file.write_text(json.dumps(curve), encoding="utf-8")


def pretrained(seed: int) -> LlamaForCausalLM:
    """A Llama of two layers that does single-key retrieval."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(small_llama())
    width = model.config.hidden_size
    with torch.no_grad():  # what all tokens have in common is what a head that goes by position alone can read
        model.model.embed_tokens.weight += model.config.initializer_range * torch.randn(width)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    for step in tqdm(range(BEFORE), desc=f"seed {seed}, single-key retrieval"):
        ids, labels = single_key(32, 24, (4, 8, 16)[step % 3], generator)
        answers, wanted, states = answer(model, ids, labels)
        # Its first layer is told to find the two tokens before: to come upon that takes longer than all the rest.
        found = model.model.norm(states[1])
        loss = (
            cross_entropy(answers, wanted)
            + cross_entropy(model.lm_head(found[:, 1:]).flatten(0, 1), ids[:, :-1].flatten())
            + cross_entropy(model.lm_head(found[:, 2:] @ turn).flatten(0, 1), ids[:, :-2].flatten())
        )
        update(model, optimizer, loss)
    return model


def small_llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )


def fine_tuned(model: nn.Module, seed: int, steps: int, name: str) -> dict:
    """The curve of a model that goes on with multi-key retrieval: accuracy on 64 rows of 510 tokens."""
    generator = torch.Generator().manual_seed(1000 + seed)
    held_out = [multi_key(ROWS, RECORDS, torch.Generator().manual_seed(100 + part)) for part in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    if model.config.model_type == "iha":
        give_own_rate(optimizer, model, LEARNING_RATE)
    curve = {"step": [], "accuracy": [], "loss": []}
    start = time.process_time()
    for step in tqdm(range(steps + 1), desc=name):
        if step % EVALUATE == 0:
            with torch.no_grad():
                results = [answer(model, *batch)[:2] for batch in held_out]
            accuracy = [float((answers.argmax(-1) == wanted).float().mean()) for answers, wanted in results]
            curve["step"].append(step)
            curve["accuracy"].append(statistics.mean(accuracy))
            curve["loss"].append(statistics.mean(float(cross_entropy(*result)) for result in results))
        records = CURRICULUM[step % len(CURRICULUM)]
        ids, labels = multi_key(ROWS * RECORDS // records, records, generator)
        update(model, optimizer, cross_entropy(*answer(model, ids, labels)[:2]))
    return {**curve, "cpu seconds": time.process_time() - start}


def answer(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor):
    """The logits where a value is asked for [asked, vocabulary], the values [asked], and the states of all layers."""
    output = model.model(ids, output_hidden_states=True, use_cache=False)
    asked = labels[:, 1:] != -100
    return model.lm_head(output.last_hidden_state[:, :-1][asked]), labels[:, 1:][asked], output.hidden_states


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor):
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def flops_of_a_step(num_pseudo_heads: int) -> float:
    """Forward and backward, the mean over the curriculum. The head sees only the sixth of the tokens that is asked."""
    config = IHAConfig.from_llama(small_llama(), num_pseudo_heads)
    each = []
    for records in CURRICULUM:
        linear = linear_flops(config, 6 * records)
        row = attention_flops(config, 6 * records)["total"] + linear["total"] - linear["head"] * 5 / 6
        each.append(3 * (ROWS * RECORDS // records) * row)
    return statistics.mean(each)


def steps_for_equal_flops() -> int:
    ratio = flops_of_a_step(2) / flops_of_a_step(1)
    return EVALUATE * round(STEPS * ratio / EVALUATE)


def report(folder: Path):
    from curves import draw

    curves = {
        name: [json.loads((folder / str(seed) / f"{name}.json").read_text(encoding="utf-8")) for seed in SEEDS]
        for name in VARIANTS
    }
    flops = {name: flops_of_a_step(1 if fields is None else 2) for name, fields in VARIANTS.items()}
    lines = [
        f"| | FLOPs of a step | accuracy after {STEPS} steps | with the FLOPs of {STEPS} steps of IHA | steps to "
        f"{LEARNED:.0%} | FLOPs to {LEARNED:.0%} |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in curves.items():
        end = [run["accuracy"][run["step"].index(STEPS)] for run in runs]
        steps = [next((s for s, a in zip(r["step"], r["accuracy"], strict=True) if a >= LEARNED), None) for r in runs]
        cost = [None if count is None else count * flops[name] for count in steps]
        last = [run["accuracy"][-1] for run in runs]
        cells = [
            f"{flops[name]:.2e}",
            spread(end, ".3f"),
            spread(last, ".3f"),
            spread(steps, ".0f"),
            spread(cost, ".2e"),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    note = (
        f"Median, and the seeds {', '.join(map(str, SEEDS))}. Multi-key retrieval on {4 * ROWS} held-out rows of "
        f"{6 * RECORDS} tokens, evaluated every {EVALUATE} steps. At {STEPS} steps IHA has had "
        f"{flops_of_a_step(2) / flops_of_a_step(1):.2f} times the FLOPs of the Llama, which therefore went on to step "
        f"{steps_for_equal_flops()}."
    )
    (folder / "results.md").write_text(f"# retrieval\n\n{table}\n\n{note}\n", encoding="utf-8")
    results = {"flops of a step": flops, "seeds": SEEDS, "curves": curves}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(curves, flops, folder / "curves.png")
    print(f"{table}\n\n{note}")


def spread(values: list[float | None], spec: str) -> str:
    """The median, and all of them."""
    known = [value for value in values if value is not None]
    each = ", ".join("never" if value is None else format(value, spec) for value in values)
    return f"{format(statistics.median(known), spec) if len(known) == len(values) else '-'} ({each})"


if __name__ == "__main__":
    main()
