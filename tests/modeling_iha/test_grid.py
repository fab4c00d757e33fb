"""Masks, caches and chunks in all combinations, on every backend, against plain loops in float64."""

import itertools

import pytest
import torch
from layers import OneLayer, assert_close, float64_throughout  # noqa: F401  (a fixture)
from transformers import DynamicCache, StaticCache

from modeling_iha import pieces

TOKENS = 8
WINDOW = 3
VARIANTS = list(itertools.product(["shared", "interleaved", "fractional"], [1, 2, 3]))
HEADS = [(4, 2), (2, 2), (3, 1)]
CHUNKS = {"at once": [8], "chunks": [4, 1, 3], "token by token": [1] * 8}
CACHES = {"no cache": None, "dynamic": DynamicCache, "static": StaticCache}
WAYS = [("no cache", "at once"), *itertools.product(["dynamic", "static"], CHUNKS)]

# Rows of what each token is: 0 is padding, equal numbers are one document.
PADDED = {
    "plain": [[1] * 8, [1] * 8],
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8],
    "right": [[1] * 8, [1, 1, 1, 1, 1, 0, 0, 0]],
    "inside": [[1, 1, 0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 1, 1, 1]],
    "whole row": [[0] * 8, [1] * 8],
}
PACKED = {
    "packed": [[1, 1, 1, 2, 2, 3, 3, 3], [1, 2, 2, 2, 2, 2, 2, 3]],
    "packed and padded": [[1, 1, 1, 2, 2, 0, 0, 0], [0, 1, 1, 1, 1, 2, 2, 2]],
}
CASES = [
    *itertools.product(PADDED, WAYS, VARIANTS),
    *itertools.product(PACKED, [way for way in WAYS if way[1] == "at once"], VARIANTS),
]


def name(case):
    layout, way, (phases, size) = case
    return "-".join([layout, *way, phases, f"P{size}"])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Short sequences are several blocks then."""
    monkeypatch.setattr(pieces, "SMALLEST_BLOCK", 2)
    monkeypatch.setattr(pieces, "LARGEST_MASK", 2 * 3 * TOKENS)


def check(layer, layout, cache="no cache", chunks=None, tolerance=1e-10, **kwargs):
    documents = torch.tensor(layout)
    batch, tokens = documents.shape
    real = documents != 0
    same = documents[:, :, None] == documents[:, None, :]
    # A token's position among the real ones before it in its document; padding has any.
    positions = (same & real[:, None, :]).tril().sum(-1).clamp(min=1) - 1
    mask = None if real.all() else real.long()
    if CACHES[cache] is not None:
        length = {"max_cache_len": tokens + 3} if cache == "static" else {}
        cache = CACHES[cache](config=layer.config, **length)
    else:
        cache = None
    entered, left = layer(layer.input(batch, tokens), positions, mask, chunks, cache, **kwargs)
    assert torch.isfinite(left).all()
    window = layer.config.sliding_window or tokens
    for row in range(batch):
        if real[row].any():
            expected = layer.reference(
                entered[row], positions[row], lambda n, m, row=row: bool(same[row, n, m]) and abs(n - m) < window
            )
            assert_close(left[row][real[row]].double(), expected[real[row]], tolerance)


def layer_of(index, variant, **fields):
    """Heads and windows take turns over the cases."""
    phases, size = variant
    window = WINDOW if index % 2 else None
    return OneLayer(HEADS[index % 3], num_pseudo_heads=size, rope_phases=phases, sliding_window=window, **fields)


@pytest.mark.parametrize("case", CASES, ids=map(name, CASES))
def test_sdpa(case, float64_throughout):  # noqa: F811
    layout, (cache, chunks), variant = case
    layer = layer_of(CASES.index(case), variant)
    check(layer, {**PADDED, **PACKED}[layout], cache, CHUNKS[chunks])


@pytest.mark.parametrize("case", CASES[::3], ids=map(name, CASES[::3]))
def test_eager(case, float64_throughout):  # noqa: F811
    layout, (cache, chunks), variant = case
    layer = layer_of(CASES.index(case) // 3, variant, attention="eager")
    check(layer, {**PADDED, **PACKED}[layout], cache, CHUNKS[chunks])
