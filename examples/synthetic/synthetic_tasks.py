"""The tasks: composition of two or three binary relations, and the count of matching triples (CPM-3)."""

import itertools
import math
from dataclasses import dataclass

import torch

IGNORED = -100  # the label of padding
TRIPLE = (1, 2, 3)  # coefficients of CPM-3's condition: they differ, so that the order of a pair matters


@dataclass(frozen=True)
class Examples:
    """Each [rows, N], padded on the right: token ids, the two indices that a token is told, labels."""

    ids: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    labels: torch.Tensor

    @property
    def real(self) -> torch.Tensor:
        """[rows, N], False for padding."""
        return self.labels != IGNORED

    def __getitem__(self, rows) -> "Examples":
        return Examples(self.ids[rows], self.first[rows], self.second[rows], self.labels[rows])

    def to(self, device: str) -> "Examples":
        return Examples(*(states.to(device) for states in (self.ids, self.first, self.second, self.labels)))

    def __len__(self) -> int:
        return len(self.ids)


def composition(
    rows: int, relations: int, sizes: tuple[int, int], density: float, generator: torch.Generator
) -> Examples:
    """
    Relations R_1 .. R_r on m elements, m drawn for each row. Token (i, j) of the m^2, row by row, carries R_1(i, j) ..
    R_r(i, j) as the bits of its id; its label is whether the composition of all relates i to j: for r = 2, whether
    there is a k with R_1(i, k) and R_2(k, j).

    Args:
        sizes: the smallest and the largest m. density: the chance that a relation relates two elements.
    """
    low, high = sizes
    size = torch.randint(low, high + 1, (rows, 1), generator=generator)
    there = torch.arange(high) < size
    pairs = there[:, :, None] & there[:, None, :]
    drawn = torch.rand(rows, relations, high, high, generator=generator) < density
    drawn &= pairs[:, None]  # elements that are not there relate to none, and so lead nowhere
    reached = drawn[:, 0].float()
    for relation in range(1, relations):
        reached = (reached @ drawn[:, relation].float()).clamp(max=1)
    bits = (2 ** torch.arange(relations))[:, None, None]
    ids = (drawn * bits).sum(1)
    token = torch.arange(high * high)
    real = token < size**2
    first, second = (index.where(real, 0) for index in (token // size, token % size))
    row = torch.arange(rows)[:, None]
    labels = reached.long()[row, first, second].where(real, IGNORED)
    return Examples(ids[row, first, second].where(real, 0), first, second, labels)


def cpm3(rows: int, sizes: tuple[int, int], modulus: int, classes: int, generator: torch.Generator) -> Examples:
    """
    N numbers below `modulus`, N drawn for each row. The label of x_n is how many ordered pairs (j, k) of tokens have
    x_n + 2 x_j + 3 x_k = 0 (mod modulus), at most classes - 1. A token is told its index n (and 0).
    """
    low, high = sizes
    size = torch.randint(low, high + 1, (rows, 1), generator=generator)
    real = torch.arange(high) < size
    numbers = torch.randint(modulus, (rows, high), generator=generator)
    own, one, other = TRIPLE
    sums = (own * numbers)[:, :, None, None] + (one * numbers)[:, None, :, None] + (other * numbers)[:, None, None, :]
    counted = (sums % modulus == 0) & (real[:, :, None] & real[:, None, :])[:, None]
    labels = counted.sum((2, 3)).clamp(max=classes - 1).where(real, IGNORED)
    index = torch.arange(high).expand(rows, -1).where(real, 0)
    return Examples(numbers.where(real, 0), index, torch.zeros_like(index), labels)


def positive_rate(size: int, relations: int, density: float) -> float:
    """The chance that a pair of m elements is related by the composition of two or three relations."""
    if relations == 2:
        return 1 - (1 - density**2) ** size
    # Of i's successors, each element is reached by at least one with the same chance, independently.
    none = 0.0
    for count in range(size + 1):
        none += _chance(count, size, density) * (1 - density * (1 - (1 - density) ** count)) ** size
    return 1 - none


def counting_accuracy(size: int, relations: int, density: float) -> float:
    """
    How often the best answer is right that only counts: i's successors in the first relation, j's predecessors in the
    last, and of three relations the pairs of the middle one. It composes nothing.
    """
    right = 0.0
    middle = [(0, 1.0)] if relations == 2 else [(n, _chance(n, size**2, density)) for n in range(size**2 + 1)]
    for successors, predecessors in itertools.product(range(size + 1), repeat=2):
        chance = _chance(successors, size, density) * _chance(predecessors, size, density)
        for pairs, chance_of_pairs in middle:
            if relations == 2:  # no predecessor is a successor
                none = math.comb(size - successors, predecessors) / math.comb(size, predecessors)
            else:  # no pair of the middle goes from one to the other
                none = math.comb(size**2 - successors * predecessors, pairs) / math.comb(size**2, pairs)
            right += chance * chance_of_pairs * max(none, 1 - none)
    return right


def _chance(count: int, of: int, density: float) -> float:
    """That so many of so many are drawn."""
    return math.comb(of, count) * density**count * (1 - density) ** (of - count)
