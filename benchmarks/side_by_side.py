"""Two things measured in turn, so that a machine whose speed drifts drifts for both."""

import gc
import statistics
import time
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm


def seconds(functions: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Each function's times, one per round; in a round all have their turn. Called once before, uncounted."""
    times = {name: [] for name in functions}
    for function in functions.values():
        function()
    gc.collect()
    for _ in tqdm(range(rounds), desc=" / ".join(functions), leave=False):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return times


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def peak_bytes(function: Callable) -> int:
    """The most that torch has allocated on the CPU during a call, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    peak = now = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events):
        now += size
        peak = max(peak, now)
    return peak
