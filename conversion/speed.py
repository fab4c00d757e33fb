"""How fast an IHA model is beside the Llama model of the same weights: prefill, decoding, a training step, memory."""

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import modeling_iha  # noqa: F401  (registers the Auto classes)
from configuration_iha import IHAConfig

DEVICES = ("cpu", "cuda", "xpu")  # whose memory PyTorch counts


@dataclass(frozen=True)
class Measured:
    """Medians of both models, in `unit`; `ratios` are IHA over Llama in each round."""

    what: str
    unit: str
    llama: float
    iha: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median, which a machine whose speed drifts moves less than the ratio of medians."""
        return statistics.median(self.ratios)


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
        the megabytes that prefill takes at its peak above the weights, and a step above weights and gradients.

    Raises:
        ValueError: the model is an encoder, which does not generate, or quantised; an argument is out of range; the
            device is of a kind whose memory PyTorch does not count, or has too little.
    """
    if not config.is_causal:
        raise ValueError("is_causal=False: an encoder generates nothing, and only models that do are measured.")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "config.json: quantization_config: a quantised model is not supported; name the original one."
        )
    for name, value, least in (("length", length, 2), ("new_tokens", new_tokens, 2), ("batch", batch, 1)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1.")
    if torch.device(device).type not in DEVICES:
        raise ValueError(f"device={device!r} must be one of {', '.join(DEVICES)}, whose memory PyTorch counts.")
    try:
        models = _models(config, dtype, device)
        ids = torch.randint(config.vocab_size, (batch, length), device=device)
        return _measure(models, ids, new_tokens, rounds)
    except RuntimeError as error:  # of a CPU it is no OutOfMemoryError
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ValueError(
            f"{device} has too little memory for the weights in {dtype}, their gradients and a training step of "
            f"{batch} x {length} tokens. Take a smaller batch, a shorter length or another dtype."
        ) from error


def _models(config: IHAConfig, dtype: torch.dtype, device: str) -> dict[str, PreTrainedModel]:
    """Both models, of one set of parameters."""
    how = {"dtype": dtype, "attn_implementation": config._attn_implementation}
    with torch.device(device):
        iha = AutoModelForCausalLM.from_config(config, **how)
    with init_empty_weights(include_buffers=False):
        llama = AutoModelForCausalLM.from_config(config.to_llama(), **how)
    llama.load_state_dict(dict(iha.named_parameters()), strict=False, assign=True)
    llama.tie_weights()
    return {"llama": llama.to(device), "iha": iha}


def _measure(models: dict[str, PreTrainedModel], ids: torch.Tensor, new_tokens: int, rounds: int) -> list[Measured]:
    times = {name: {"prefill": [], "decoding": [], "training step": []} for name in models}
    peaks = {name: [] for name in models}
    with tqdm(total=(rounds + 2) * len(models), desc="bench") as progress:
        for number in range(rounds + 1):
            for name, model in models.items():
                taken = (*_generation(model, ids, new_tokens), _step_time(model, ids))
                model.zero_grad()
                if number > 0:
                    for each, one in zip(times[name].values(), taken, strict=True):
                        each.append(one)
                progress.update()
        for name, model in models.items():
            _training_step(model, ids)  # the gradients are there
            for work in (
                lambda model=model: _generation(model, ids, 2),
                lambda model=model: _training_step(model, ids),
            ):
                peaks[name].append(peak_bytes(work, ids.device) / 1e6)
            model.zero_grad()
            progress.update()
    rows = []
    for what, tokens in {"prefill": ids.numel(), "decoding": len(ids), "training step": ids.numel()}.items():
        llama, iha = times["llama"][what], times["iha"][what]
        speeds = (tokens / statistics.median(each) for each in (llama, iha))
        ratios = tuple(one / other for one, other in zip(llama, iha, strict=True))
        rows.append(Measured(what, "tokens/s", *speeds, ratios))
    for what, llama, iha in zip(("prefill memory", "training memory"), *peaks.values(), strict=True):
        rows.append(Measured(what, "MB", llama, iha, (iha / llama,)))
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
    how = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "use_cache": True}
    model.eval().generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **how)
    start, first, last = clock.times[0], clock.times[1], clock.times[-1]
    return first - start, (last - first) / (new_tokens - 1)


def _training_step(model: PreTrainedModel, ids: torch.Tensor) -> None:
    model.train()(ids, labels=ids, use_cache=False).loss.backward()


def _step_time(model: PreTrainedModel, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    _training_step(model, ids)
    if ids.device.type != "cpu":
        torch.accelerator.synchronize(ids.device)
    return time.perf_counter() - start


def peak_bytes(function: Callable, device: str | torch.device = "cpu") -> int:
    """The most that PyTorch allocates during a call on a device of `DEVICES`, above what was there before."""
    gc.collect()
    if torch.device(device).type != "cpu":
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        function()
        return torch.accelerator.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler talks
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    peak = now = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events):
        now += size
        peak = max(peak, now)
    return peak
