"""Every path that a GPU takes, held to float64."""

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from models import tiny_model
from tqdm.auto import tqdm
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.utils import is_flash_attn_2_available

from conversion_iha.compare import norms_in_float64
from gpu.layer import SETTINGS, UNIT, Layer, allowed, condition, distance, moved, truth
from gpu.table import failed, row
from modeling_iha import absorbed, pieces

DTYPES = tuple(UNIT)
# A kernel is compiled for each: P = 2 with a window, packed documents, padding, P = 1.
FLEX = tuple(SETTINGS[i] for i in (13, 38, 22, 9))
# Heads, groups, P, head size, keys, batch.
DECODED = ((9, 3, 2, 64, 700, 2), (4, 4, 3, 80, 65, 1), (32, 8, 2, 128, 4097, 1))


class Comparison(NamedTuple):
    where: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # not so for NaN


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def held(what: str, comparisons: Iterator[Comparison]) -> dict:
    """The row of a path: its worst comparison."""
    try:
        found = list(tqdm(comparisons, desc=what, leave=False))
        worst = max(found, key=lambda one: (not one.passed, one.error / one.bound))
    except Exception as error:
        return failed(what, error)
    numbers = (f"{worst.error:.1e}", f"<= {worst.bound:.1e}", worst.error / worst.bound)
    return row(what, *numbers, passed=worst.passed, more=f"worst of {len(found)}: {worst.where}")


def rows(device: str, small: bool) -> Iterator[dict]:
    with patch.object(pieces, "SMALLEST_BLOCK", 8):  # short sequences are several blocks then
        yield from layers(device, small)
        yield from decoding(device, small)
    yield from absorbed_functions(device, small)
    for phases in ("shared", "interleaved")[: 1 if small else 2]:
        yield held(f"compiled generation, float32, {phases}", compiled_generation(phases, device))


def layers(device: str, small: bool) -> Iterator[dict]:
    is_cuda = device == "cuda"
    some = SETTINGS[:: 23 if small else 5]
    for attention, dtype in itertools.product(("sdpa", "eager"), DTYPES):
        settings = SETTINGS if (attention, dtype, small) == ("sdpa", torch.float32, False) else some
        yield held(f"layer, {attention}, {name(dtype)}", steps(settings, attention, dtype, device))
    yield held("layer, sdpa, autocast to bfloat16", autocast_steps(SETTINGS[1 :: 23 if small else 5], device))
    for dtype, settings in zip(DTYPES, (FLEX[:1], FLEX, FLEX[2:3]), strict=True):
        what = f"layer, flex_attention, {name(dtype)}"
        if is_cuda or dtype == torch.float32:
            yield held(what, steps(settings, "flex_attention", dtype, device, backward=is_cuda))
        else:
            yield row(what, more="needs a CUDA GPU")
    flash = [setting for setting in SETTINGS if setting.size == 1 or setting.window is None]
    for dtype in (torch.bfloat16, torch.float16):
        what = f"layer, flash_attention_2, {name(dtype)}"
        if is_cuda and is_flash_attn_2_available():
            yield held(what, steps(flash[::2], "flash_attention_2", dtype, device))
        else:
            yield row(what, more="not installed" if is_cuda else "needs a CUDA GPU")


def compared(setting, results: dict, dtype: torch.dtype) -> Iterator[Comparison]:
    for tensor, result in results.items():
        error, bound = distance(result, truth(setting)[tensor]), allowed(dtype, condition(setting)[tensor])
        yield Comparison(f"{tensor}; {setting}", error, bound)


def steps(settings, attention: str, dtype: torch.dtype, device: str, backward: bool = True) -> Iterator[Comparison]:
    for setting in settings:
        if attention == "flex_attention":
            torch.compiler.reset()  # it stops compiling after a few shapes
        layer = Layer(setting, attention, dtype, device)
        yield from compared(setting, layer.step() if backward else layer.forward(), dtype)


def autocast_steps(settings, device: str) -> Iterator[Comparison]:
    for setting in settings:
        layer = Layer(setting, "sdpa", torch.float32, device)
        with torch.autocast(device, torch.bfloat16):
            results = layer.step()
        yield from compared(setting, results, torch.bfloat16)


def decoding(device: str, small: bool) -> Iterator[dict]:
    """Token by token; on a GPU through the kernel, whose calls are counted."""
    calls, kernel = [], getattr(absorbed, "absorbed_attention_triton", None)

    def counted(*args):
        calls.append(None)
        return kernel(*args)

    def comparisons(settings, dtype, cache):
        for setting in settings:
            yield from compared(setting, Layer(setting, "sdpa", dtype, device).decode(cache), dtype)

    settings = [setting for setting in SETTINGS if setting.layout != "packed" and setting.size > 1]
    for (i, dtype), cache in itertools.product(enumerate(DTYPES), (DynamicCache, StaticCache)):
        with patch.object(absorbed, "absorbed_attention_triton", counted, create=True):
            some = settings[i :: 11 if small else 5]
            yield held(f"decoding from a {cache.__name__}, {name(dtype)}", comparisons(some, dtype, cache))
    if device == "cuda":
        yield row("decoding takes the Triton kernel", f"{len(calls)} calls", passed=bool(calls))


def absorbed_functions(device: str, small: bool) -> Iterator[dict]:
    shapes, interprets = DECODED[1:2] if small else DECODED, os.environ.get("TRITON_INTERPRET") == "1"
    for dtype in DTYPES:
        what = f"absorbed attention, torch form, {name(dtype)}"
        yield held(what, absorbed_comparisons(absorbed.absorbed_attention, shapes, dtype, device))
        what = f"absorbed attention, Triton kernel, {name(dtype)}"
        if not absorbed.DTYPES:
            yield row(what, more="Triton is not installed")
        elif device == "cpu" and (not interprets or dtype == torch.bfloat16):
            yield row(what, more="needs a CUDA GPU, or TRITON_INTERPRET=1, which has no bfloat16")
        else:
            function = partial(absorbed.absorbed_attention_triton, multiprocessors=2 if device == "cpu" else None)
            yield held(what, absorbed_comparisons(function, shapes, dtype, device))


@torch.no_grad()
def absorbed_comparisons(function: Callable, shapes, dtype: torch.dtype, device: str) -> Iterator[Comparison]:
    for heads, groups, size, head_dim, keys, batch in shapes:
        torch.manual_seed(0)
        mixing, cache = (size, groups, groups), (batch, groups, keys, head_dim)
        states = [torch.randn(shape) for shape in (mixing, mixing, (batch, size, heads, head_dim), cache, cache)]
        rest = (None, keys - 1, head_dim**-0.5)
        result = function(*(x.to(device, dtype) for x in states), *rest)
        result = result[0] if isinstance(result, tuple) else result
        states = [x.to(dtype).double() for x in states]

        def exactly(states=states, rest=rest):
            return {"output": absorbed.absorbed_attention(*states, *rest)[0]}

        bound = allowed(dtype, moved(exactly, states)["output"], terms=size * keys)
        yield Comparison(f"H/G {heads}/{groups}, d {head_dim}, K {keys}", distance(result, exactly()["output"]), bound)


def compiled_generation(phases: str, device: str) -> Iterator[Comparison]:
    """A whole model, padded on the left; the logits of every step, whatever tokens they chose."""
    model = tiny_model(dtype=torch.float32, num_pseudo_heads=[2, 1, 3], rope_phases=phases).to(device)
    ids = torch.randint(1, 128, (2, 10), device=device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    how = {} if device == "cuda" else {"backend": "aot_eager", "mode": None}
    how = CompileConfig(fullgraph=True, **how)
    how._compile_all_devices = True  # Transformers would compile on accelerators only
    output = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False, "max_new_tokens": 12}
    cache = {"cache_implementation": "static", "compile_config": how, "pad_token_id": 0}
    result = model.generate(ids, attention_mask=mask, **output, **cache)

    model = norms_in_float64(model.cpu().double())
    mask = torch.cat([mask.cpu(), torch.ones(2, 11, dtype=torch.long)], 1)
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
    ids = result.sequences[:, :-1].cpu()

    @torch.no_grad()
    def exactly():
        return {"logits": model(ids, **inputs).logits[:, 9:]}

    bound = allowed(torch.float32, moved(exactly, list(model.parameters()))["logits"])
    yield Comparison("logits", distance(torch.stack(result.logits, 1), exactly()["logits"]), bound)
