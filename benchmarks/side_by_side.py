"""Two things measured in turn, so that a machine whose speed drifts drifts for both."""

import gc
import statistics
import time
from collections.abc import Callable

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
