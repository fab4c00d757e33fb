"""One attention layer in every setting, what it must give, and how far rounding may move that."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from layers import OneLayer
from torch import nn
from transformers import StaticCache

TOKENS, WINDOW = 24, 5
HEADS = ((4, 2), (2, 2), (6, 3))  # G > 1: a mixing tensor of two numbers is off by more or less than its bound by luck
# Two rows of what each token is: 0 is padding, equal numbers are one document.
LAYOUTS = {
    "plain": [[1] * 24] * 2,
    "left padding": [[0] * 9 + [1] * 15, [1] * 24],
    "packed": [[1] * 7 + [2] * 12 + [3] * 5, [1] + [2] * 20 + [3] * 3],
}
# What one rounding may change, as a part of the number.
UNIT = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float32, torch.bfloat16, torch.float16)}
# A result may be as wrong as one from data that is off by this many roundings. A number goes through about ten between
# x and the output; most change it by much less than UNIT, and they do not add up in one direction.
ROUNDINGS = 2
STEP = 1e-6


class Setting(NamedTuple):
    size: int
    phases: str
    heads: tuple[int, int]
    window: int | None
    layout: str

    def __str__(self):
        reach = f"W {self.window}" if self.window else "full"
        return f"P {self.size}, {self.phases}, H/G {self.heads[0]}/{self.heads[1]}, {reach}, {self.layout}"


SETTINGS = [
    Setting(size, phases, HEADS[(i + i // 9) % 3], window, layout)
    for i, (layout, window, phases, size) in enumerate(
        itertools.product(LAYOUTS, (None, WINDOW), ("shared", "interleaved", "fractional"), (1, 2, 3))
    )
]


class Layer(OneLayer):
    """Its attention gets `x` as it is, and its numbers are exact in every dtype: there is one truth for all."""

    def __init__(self, setting: Setting, attention: str = "sdpa", dtype=torch.float64, device="cpu"):
        fields = {"num_pseudo_heads": setting.size, "rope_phases": setting.phases, "sliding_window": setting.window}
        super().__init__(setting.heads, 16, attention, **fields)
        for parameter in self.model.parameters():
            parameter.data = exact(parameter)
        self.model.layers[0].input_layernorm = nn.Identity()
        self.model.to(device, dtype)
        documents = torch.tensor(LAYOUTS[setting.layout], device=device)
        self.real = documents != 0
        self.same = documents[:, :, None] == documents[:, None, :]
        # A token's position among the real ones of its document; padding has any.
        self.positions = (self.same & self.real[:, None]).tril().sum(-1).clamp(min=1) - 1
        self.mask = None if self.real.all() else self.real.long()
        x, weight = (exact(self.input(2, TOKENS)).to(device, dtype) for _ in range(2))
        self.x, self.weight = x.requires_grad_(), weight * self.real[..., None]

    def step(self) -> dict[str, torch.Tensor]:
        """The output at real tokens, and the gradients of a loss that reads it."""
        self.entered, self.left = [], []
        self.model(inputs_embeds=self.x, position_ids=self.positions, attention_mask=self.mask, use_cache=False)
        output, tensors = self.left[0], self.tensors()
        gradients = torch.autograd.grad((output * self.weight).sum(), list(tensors.values()))
        return {"output": output[self.real].detach(), **dict(zip(tensors, gradients, strict=True))}

    def forward(self) -> dict[str, torch.Tensor]:
        return {"output": self(self.x, self.positions, self.mask)[1][self.real]}

    def decode(self, cache_class) -> dict[str, torch.Tensor]:
        """The output when the second half of the tokens comes one by one."""
        length = {"max_cache_len": TOKENS + 3} if cache_class is StaticCache else {}
        chunks = [TOKENS // 2] + [1] * (TOKENS // 2)
        cache = cache_class(config=self.config, **length)
        return {"output": self(self.x, self.positions, self.mask, chunks, cache)[1][self.real]}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"x": self.x, **dict(self.model.layers[0].self_attn.named_parameters())}


def exact(x: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/64 with at most 8 bits."""
    return (x.detach() * 64).round().clamp(-255, 255) / 64


@functools.cache
def truth(setting: Setting) -> dict[str, torch.Tensor]:
    """What `step` must give: the output by plain loops, gradients by the layer in float64."""
    layer, window = Layer(setting), setting.window or TOKENS
    outputs = []
    for row in range(2):
        same = layer.same[row].tolist()
        sees = lambda n, m, same=same: same[n][m] and n - m < window  # noqa: E731
        outputs.append(layer.reference(layer.x[row].detach(), layer.positions[row], sees))
    return {**layer.step(), "output": torch.stack(outputs)[layer.real]}


@functools.cache
def condition(setting: Setting) -> dict[str, float]:
    """How far each tensor of `step` moves when every number that goes in moves by its own part."""
    layer = Layer(setting)
    return moved(layer.step, [*layer.tensors().values(), layer.weight])


def moved(function: Callable[[], dict], tensors: list[torch.Tensor], draws: int = 16) -> dict[str, float]:
    """The results' change for a change of the tensors by one part each: root mean square over draws of its signs."""
    results, changes = function(), []
    kept = [tensor.detach().clone() for tensor in tensors]
    generator = torch.Generator().manual_seed(1)
    for _ in range(draws):
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.data.copy_(value * (1 + STEP * (torch.randint(2, value.shape, generator=generator) * 2 - 1)))
        changed = function()
        changes.append({name: distance(changed[name], result) / STEP for name, result in results.items()})
    for tensor, value in zip(tensors, kept, strict=True):
        tensor.data.copy_(value)
    return {name: (sum(change[name] ** 2 for change in changes) / draws) ** 0.5 for name in results}


def allowed(dtype: torch.dtype, condition: float, terms: int = 3 * TOKENS) -> float:
    """How far a result may be off: by roundings in the dtype, and those of its longest sum in float32."""
    return condition * (ROUNDINGS * UNIT[dtype] + terms**0.5 * UNIT[torch.float32])


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of what is expected; both as float64 on the CPU."""
    expected = expected.double().cpu()
    return float((result.detach().double().cpu() - expected).norm() / expected.norm())
