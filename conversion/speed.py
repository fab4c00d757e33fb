"""How fast an IHA model is beside the Llama model of the same weights: prefill, decoding, a training step, memory."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import modeling_iha  # noqa: F401  (registers the Auto classes)
from configuration_iha import IHAConfig


@dataclass(frozen=True)
class Measured:
    """Medians of both models, in `unit`; `ratio` is the median of IHA over Llama in each round."""

    what: str
    unit: str
    llama: float
    iha: float
    ratio: float


def bench(
    config: IHAConfig,
    length: int,
    *,
    new_tokens: int = 32,
    batch: int = 1,
    rounds: int = 3,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Measured]:
    """
    Measures a model with random weights, which are as fast as any, and the Llama model of the same weights, in turn.

    Args:
        config: the IHA model's; the Llama model's is `config.to_llama()`.
        length: tokens of the prompt, and of a row in training.
        new_tokens: tokens that `generate` adds to the prompt, at least 2.
        batch: rows.
        rounds: in each of which both models have their turn; one more before them is not counted.
        dtype, device: of both models.

    Returns:
        Tokens per second of prefill, decoding and a training step (forward and backward, without the optimizer), and
        the megabytes that prefill and step take at their peak above the weights.

    Raises:
        ValueError: the model is an encoder, which does not generate, or the device's memory does not suffice.
    """
    if not config.is_causal:
        raise ValueError("is_causal=False: an encoder generates nothing, and only models that do are measured.")
    try:
        models = _models(config, dtype, device)
        ids = torch.randint(config.vocab_size, (batch, length), device=device)
        return _measure(models, ids, new_tokens, rounds)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{device} has too little memory for two models in {dtype} of one set of weights and a training step of "
            f"{batch} x {length} tokens. Take a shorter --length or another --dtype."
        ) from error


def _models(config: IHAConfig, dtype: torch.dtype, device: str) -> dict[str, PreTrainedModel]:
    configs = {"llama": config.to_llama(), "iha": config}
    with torch.device(device):
        models = {name: AutoModelForCausalLM.from_config(each, dtype=dtype) for name, each in configs.items()}
    for name, parameter in models["llama"].named_parameters():
        parameter.data = models["iha"].get_parameter(name).data  # one set of weights in memory
    return models


def _measure(models: dict[str, PreTrainedModel], ids: torch.Tensor, new_tokens: int, rounds: int) -> list[Measured]:
    times = {name: {"prefill": [], "decoding": [], "training step": []} for name in models}
    for number in tqdm(range(rounds + 1), desc="bench", unit="round"):
        for name, model in models.items():
            prefill, decoding = _generation(model, ids, new_tokens)
            step = seconds(lambda model=model: _training_step(model, ids), ids.device)
            if number > 0:
                for each, taken in zip(times[name].values(), (prefill, decoding, step), strict=True):
                    each.append(taken)
    rows = []
    for what, tokens in {"prefill": ids.numel(), "decoding": len(ids), "training step": ids.numel()}.items():
        llama, iha = times["llama"][what], times["iha"][what]
        ratio = statistics.median(one / other for one, other in zip(llama, iha, strict=True))
        rows.append(Measured(what, "tokens/s", *(tokens / statistics.median(each) for each in (llama, iha)), ratio))
    work = {"prefill": lambda model: _generation(model, ids, 1), "training step": lambda m: _training_step(m, ids)}
    for what, function in work.items():
        llama, iha = (peak_bytes(lambda m=m, f=function: f(m), ids.device) / 1e6 for m in models.values())
        rows.append(Measured(f"{what}, memory", "MB", llama, iha, iha / llama))
    return rows


class _Clock(BaseStreamer):
    """When the prompt went in, and when each token came out."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def _generation(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and from each token to the next."""
    clock = _Clock()
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    model.eval().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=clock, **lengths)
    start, first, *_, last = *clock.times, clock.times[-1]
    return first - start, (last - first) / max(new_tokens - 1, 1)


def _training_step(model: PreTrainedModel, ids: torch.Tensor) -> None:
    model.train()(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


def seconds(function: Callable, device: str | torch.device) -> float:
    """How long a call takes, until the device has done its part."""
    start = time.perf_counter()
    function()
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def peak_bytes(function: Callable, device: str | torch.device = "cpu") -> int:
    """The most that PyTorch allocates during a call, above what was there before."""
    gc.collect()
    if torch.device(device).type != "cpu":
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        function()
        return torch.accelerator.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    peak = now = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events):
        now += size
        peak = max(peak, now)
    return peak
