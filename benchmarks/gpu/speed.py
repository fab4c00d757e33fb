"""What the GPU does with it: attention without projections beside one plain call, and decoding beside a copy."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from peers import Given
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from tqdm.auto import tqdm

from configuration_iha.costs import attention_flops
from conversion_iha.speed import peak_bytes
from gpu.table import failed, row
from modeling_iha import IHAConfig, IHAModel, absorbed
from modeling_iha.masks import token_masks

FUSED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
SHAPES = {"SmolLM2": (9, 3, 64), "8B": (32, 8, 128)}  # H, G, d
SHARE_OF_MEMORY = 0.6
COMPILING = 60  # seconds for a flex_attention kernel, forward and backward
# The forward has two products of the pairs, the backward five.
BACKWARD = 2.5


class Core:
    """A layer without its projections, of `length` virtual tokens; beside it one causal call of as many."""

    def __init__(self, shape, length: int, size: int, slides: bool, attention: str, device: str, dtype=torch.bfloat16):
        heads, groups, head_dim = shape
        self.tokens = length // size
        self.window = max(self.tokens // (2 * size**2), 2) if slides else None
        fields = dict(vocab_size=8, hidden_size=heads * head_dim, intermediate_size=8, num_hidden_layers=1)
        fields |= dict(num_attention_heads=heads, num_key_value_heads=groups, num_pseudo_heads=size)
        config = IHAConfig(**fields, sliding_window=self.window, mixing_init="normal")
        model = IHAModel._from_config(config, attn_implementation=attention).to(device, dtype)
        self.layer = model.layers[0].self_attn
        self.states = [self._random(self.tokens, count, head_dim, device, dtype) for count in (heads, groups, groups)]
        for name, x in zip(("q_proj", "k_proj", "v_proj"), self.states, strict=True):
            setattr(self.layer, name, Given(x))
        self.layer.o_proj = nn.Identity()
        self.x = torch.empty(1, self.tokens, 1, device=device, dtype=dtype)
        self.tables = model.rotary_emb(self.x, torch.arange(self.tokens, device=device)[None])[str(size)]
        self.mask = token_masks(model.config, self.x, None, None)[model.config.layer_types[0]]
        self.virtual = [
            self._random(length, count, head_dim, device, dtype).transpose(1, 2) for count in (heads, groups, groups)
        ]
        self.scores = attention_flops(config, self.tokens)["scores"]
        self.plain_scores = 2 * head_dim * heads * length * (length + 1)

    @staticmethod
    def _random(tokens, count, head_dim, device, dtype):
        return torch.randn(1, tokens, count, head_dim, device=device, dtype=dtype, requires_grad=True)

    def iha(self) -> torch.Tensor:
        return self.layer(self.x, self.tables, self.mask)[0]

    def plain(self) -> torch.Tensor:
        return scaled_dot_product_attention(*self.virtual, is_causal=True, enable_gqa=True)

    def mixing(self):
        """Mixing, interleaving and phases, and the collapse."""
        for mix, x in zip(self.layer.mixer(), self.states, strict=True):
            self.layer._pseudo_heads(mix, x)
        pseudo_heads = self.virtual[0].transpose(1, 2).reshape(1, self.tokens, -1, self.layer.head_dim)
        self.layer.collapse(pseudo_heads)


def milliseconds(functions: dict[str, Callable], device: str, rounds: int) -> dict[str, float]:
    """Medians over rounds in which all have their turn; called once before, uncounted."""
    for function in functions.values():
        function()
    clock = _cuda_time if device == "cuda" else _cpu_time
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(clock(function))
    return {name: statistics.median(each) for name, each in times.items()}


def _cuda_time(function: Callable) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(2**28, dtype=torch.uint8, device="cuda").zero_()  # what the last one left in the GPU's cache
    torch.cuda._sleep(2_000_000)  # a millisecond in which the calls queue up: the GPU's time, not Python's
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _cpu_time(function: Callable) -> float:
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def trained(function: Callable[[], torch.Tensor]) -> Callable:
    """Its forward and backward; gradients gather in the leaves, as in training."""

    def step():
        output = function()
        output.backward(output.detach())  # whatever gradient, made without a kernel

    return step


def fused(device: str, small: bool) -> Iterator[dict]:
    """Full causal layers under fused kernels only: where sdpa has none of them it raises. And how fast is each."""
    length = 64 if small else 12 * 1024
    for dtype, size in itertools.product((torch.bfloat16, torch.float16, torch.float32), (1, 2, 3)):
        what = f"full layer, P = {size}, {str(dtype).removeprefix('torch.')}: sdpa takes a fused kernel"
        core = Core(SHAPES["SmolLM2"], length, size, False, "sdpa", device, dtype)
        times, why = {}, ""
        for name, backends in {"any of them": FUSED, **{backend.name: (backend,) for backend in FUSED}}.items():
            try:
                times[name] = milliseconds({"": under(backends, trained(core.iha))}, device, 3)[""]
            except RuntimeError as error:  # it has no such kernel
                why = why or f"{name}: {error}".splitlines()[0]
        passed = "any of them" in times
        fastest = min((name for name in times if name != "any of them"), key=times.get, default="none")
        shown = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items()) if passed else why
        # PyTorch has no fused kernel for float32 where G < H, for Llama no more than here.
        is_asked = dtype != torch.float32 or device == "cpu"
        yield row(what, f"fastest: {fastest}", passed=passed if is_asked else None, more=shown)


def under(backends, function: Callable) -> Callable:
    def run():
        with sdpa_kernel(list(backends)):
            function()

    return run


def attention(device: str, small: bool, end: float) -> Iterator[dict]:
    """The largest last, for the time may be over; after them flex_attention, which compiles."""
    lengths = (128,) if small else (8 * 1024, 32 * 1024, 64 * 1024)
    ways = (("full", "sdpa"), ("sliding", "sdpa"))
    cases = [*itertools.product(lengths, SHAPES, (1, 2, 4), ways)]
    flex = [(lengths[-1], "8B", 2), (lengths[0], "8B", 2), (lengths[-1], "SmolLM2", 4), (lengths[-1], "8B", 4)]
    cases += [(*case, ("sliding", "flex_attention")) for case in (flex[:1] if small else flex)]
    for length, shape, size, (reach, backend) in tqdm(cases, desc="attention", unit="case"):
        what = f"{shape}, N P = {length}, P = {size}, {reach}, {backend}"
        if device == "cpu" and backend == "flex_attention":
            yield row(what, more="needs a CUDA GPU: no backward on CPUs")
        elif time.monotonic() + (COMPILING if backend == "flex_attention" else 5) > end:
            yield row(what, more="left out: no time left")
        else:
            yield from of_core(what, SHAPES[shape], length, size, reach, backend, device, 1 if small else 7)


def of_core(what, shape, length, size, reach, backend, device, rounds) -> Iterator[dict]:
    heads, groups, head_dim = shape
    needed = 12 * (heads + 2 * groups) * head_dim * length * 2  # bfloat16: states, virtual ones, outputs, gradients
    if device == "cuda" and needed > SHARE_OF_MEMORY * torch.cuda.get_device_properties(0).total_memory:
        yield row(what, more=f"left out: about {needed / 1e9:.0f} GB are more than 60 % of the GPU's memory")
        return
    try:
        if backend == "flex_attention":
            torch.compiler.reset()
        core = Core(shape, length, size, reach == "sliding", backend, device)
        functions = {"iha": core.iha, "plain": core.plain} | ({"mixing": core.mixing} if size > 1 else {})
        with torch.no_grad():
            forward = milliseconds(functions, device, rounds)
        steps = {name: trained(functions[name]) for name in ("iha", "plain")}
        both = milliseconds(steps, device, rounds)
        peaks = [peak_bytes(step, device) / 1e9 for step in steps.values()]
    except (RuntimeError, ValueError) as error:  # out of memory is a RuntimeError
        yield failed(what, error)
        return
    memory = f"peak {peaks[0]:.2f} GB beside {peaks[1]:.2f}"
    share = f"mixing and collapse {100 * forward['mixing'] / forward['iha']:.1f} % of it" if size > 1 else ""
    for part, times, factor, more in (("forward", forward, 1, share), ("and backward", both, 1 + BACKWARD, memory)):
        shown = [
            f"{times[name]:.2f} ms, {factor * flops / times[name] / 1e9:.1f} TFLOP/s"
            for name, flops in (("iha", core.scores), ("plain", core.plain_scores))
        ]
        yield row(f"{what}: {part}", *shown, times["iha"] / times["plain"], more=more)


def decoding(device: str, small: bool, end: float) -> Iterator[dict]:
    """Bytes of the cache that one new token's attention reads a second, beside what a copy reads and writes."""
    lengths = (64,) if small else (4 * 1024, 32 * 1024, 128 * 1024)
    cases = [*itertools.product(lengths, (1, 8), SHAPES, (2,) if small else (2, 4))]
    for keys, batch, shape, size in tqdm(cases, desc="decoding", unit="case"):
        what = f"decoding, {shape}, K = {keys}, batch {batch}, P = {size}"
        if time.monotonic() + 3 > end:
            yield row(what, more="left out: no time left")
            continue
        try:
            yield of_decoding(what, SHAPES[shape], keys, batch, size, device, small)
        except RuntimeError as error:  # out of memory is one
            yield failed(what, error)


@torch.no_grad()
def of_decoding(what, shape, keys, batch, size, device, small) -> dict:
    heads, groups, head_dim = shape
    source = torch.empty(2**20 if small else 2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    key, value = torch.randn(2, batch, groups, keys, head_dim, device=device, dtype=torch.bfloat16)
    query = torch.randn(batch, size, heads, head_dim, device=device, dtype=torch.bfloat16)
    mix = torch.randn(2, size, groups, groups, device=device, dtype=torch.bfloat16)
    given = (*mix, query, key, value, None, keys - 1, head_dim**-0.5)
    functions = {
        "torch form": lambda: absorbed.absorbed_attention(*given, needs_weights=True),
        "Llama": lambda: scaled_dot_product_attention(query[:, 0, :, None], key, value, enable_gqa=True),
        "copy": lambda: target.copy_(source),
    }
    if device == "cuda" and absorbed.DTYPES:
        functions["kernel"] = lambda: absorbed.absorbed_attention_triton(*given)
    times = milliseconds(functions, device, 1 if small else 11)
    cache, copied = key.nbytes + value.nbytes, 2 * source.nbytes
    rates = {name: (copied if name == "copy" else cache) / ms / 1e6 for name, ms in times.items()}
    ours = "kernel" if "kernel" in rates else "torch form"
    numbers = (f"{ours} {rates[ours]:.0f} GB/s", f"copy {rates['copy']:.0f} GB/s", rates[ours] / rates["copy"])
    beside = (f"{name} {rates[name]:.0f} GB/s, {times[ours] / times[name]:.2f} of its time" for name in rates)
    others = [text for name, text in zip(rates, beside, strict=True) if name not in (ours, "copy")]
    more = f"{times[ours]:.3f} ms, cache {cache / 1e6:.0f} MB; " + "; ".join(others)
    return row(what, *numbers, more=more)
