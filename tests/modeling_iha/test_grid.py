"""Masks, caches and chunks in all combinations, on every backend, against plain loops in float64."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layers import OneLayer, assert_close
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
    monkeypatch.setattr(pieces, "ALIGNMENT", 1)
    monkeypatch.setattr(pieces, "LARGEST_MASK", 2 * 3 * TOKENS)


def run(layer, layout, cache="no cache", chunks=None):
    """What enters and leaves, which tokens are real, which belong together, and their positions."""
    documents = torch.tensor(layout)
    batch, tokens = documents.shape
    real = documents != 0
    same = documents[:, :, None] == documents[:, None, :]
    # A token's position among the real ones of its document; padding has any.
    positions = (same & real[:, None, :]).tril().sum(-1).clamp(min=1) - 1
    mask = None if real.all() else real.long()
    if CACHES[cache] is not None:
        length = {"max_cache_len": tokens + 3} if cache == "static" else {}
        cache = CACHES[cache](config=layer.config, **length)
    else:
        cache = None
    torch.manual_seed(1)
    return *layer(layer.input(batch, tokens), positions, mask, chunks, cache), real, same, positions


def check(layer, *how):
    entered, left, real, same, positions = run(layer, *how)
    assert torch.isfinite(left).all()
    window = layer.config.sliding_window or left.shape[1]
    for row in range(len(left)):
        if real[row].any():
            expected = layer.reference(
                entered[row], positions[row], lambda n, m, row=row: bool(same[row, n, m]) and n - m < window
            )
            assert_close(left[row][real[row]], expected[real[row]])


def layer_of(index, variant, **fields):
    """Heads and windows take turns over the cases."""
    phases, size = variant
    window = WINDOW if index % 2 else None
    return OneLayer(HEADS[index % 3], num_pseudo_heads=size, rope_phases=phases, sliding_window=window, **fields)


@pytest.mark.parametrize("case", CASES, ids=map(name, CASES))
def test_sdpa(case, float64_throughout):
    layout, (cache, chunks), variant = case
    layer = layer_of(CASES.index(case), variant)
    check(layer, {**PADDED, **PACKED}[layout], cache, CHUNKS[chunks])


@pytest.mark.parametrize("case", CASES[::3], ids=map(name, CASES[::3]))
def test_eager(case, float64_throughout):
    layout, (cache, chunks), variant = case
    layer = layer_of(CASES.index(case) // 3, variant, attention="eager")
    check(layer, {**PADDED, **PACKED}[layout], cache, CHUNKS[chunks])


FLASH_CASES = [case for case in CASES if "static" not in case[1] and case[0] != "inside"][::2]


@pytest.mark.parametrize("case", FLASH_CASES, ids=map(name, FLASH_CASES))
def test_flash_attention(case, float64_throughout, stand_in_flash):
    layout, (cache, chunks), (phases, size) = case
    window = WINDOW if size == 1 else None
    layer = OneLayer(
        HEADS[0],
        num_pseudo_heads=size,
        rope_phases=phases,
        sliding_window=window,
        attention="flash_attention_2",
    )
    check(layer, {**PADDED, **PACKED}[layout], cache, CHUNKS[chunks])


@pytest.mark.parametrize(
    ("layout", "chunks", "size", "window"),
    [
        ("plain", "at once", 2, 100),
        ("left", "at once", 3, None),
        ("packed", "at once", 2, None),
        ("inside", "chunks", 1, 100),
        ("right", "chunks", 2, None),
    ],
)
def test_flex_attention(layout, chunks, size, window):
    """In float32, which its kernel for CPUs takes, and over several of its blocks; held to eager, which is above."""
    torch.compiler.reset()
    longer = [[number for number in row for _ in range(19)] for row in {**PADDED, **PACKED}[layout]]
    how = ("no cache",) if chunks == "at once" else ("dynamic", [19 * count for count in CHUNKS[chunks]])
    fields = {"num_pseudo_heads": size, "rope_phases": "fractional", "sliding_window": window, "head_dim": 16}
    left = {}
    for attention in ("flex_attention", "eager"):
        layer = OneLayer((2, 1), attention=attention, dtype=torch.float32, **fields)
        _, left[attention], real, *_ = run(layer, longer, *how)
    assert_close(left["flex_attention"][real], left["eager"][real], tolerance=1e-5)


BIDIRECTIONAL = [
    (layout, *variant, attention)
    for layout, variant, attention in itertools.product(
        {**PADDED, **PACKED}, VARIANTS, ["sdpa", "eager", "flash_attention_2"]
    )
    if (layout, attention) != ("inside", "flash_attention_2")  # which is refused: see test_masks.py
]


@pytest.mark.parametrize(("layout", "phases", "size", "attention"), BIDIRECTIONAL)
def test_bidirectional(layout, phases, size, attention, float64_throughout, stand_in_flash):
    layer = OneLayer(num_pseudo_heads=size, rope_phases=phases, is_causal=False, attention=attention)
    check(layer, {**PADDED, **PACKED}[layout])


def test_flex_attention_bidirectional():
    torch.compiler.reset()
    layers = [
        OneLayer(head_dim=16, is_causal=False, attention=attention, dtype=torch.float32)
        for attention in ("flex_attention", "eager")
    ]
    (_, flex, real, *_), (_, eager, *_) = (run(layer, PADDED["left"]) for layer in layers)
    assert_close(flex[real], eager[real], tolerance=1e-5)


@st.composite
def rows(draw):
    """Window, length near its multiples, and for two rows documents (empty ones too) with padding around them."""
    window = draw(st.integers(2, 5))
    tokens = max(
        draw(st.sampled_from([1, 2, window - 1, window, 2 * window, 3 * window])) + draw(st.integers(-1, 1)), 1
    )
    layout = []
    for _ in range(2):
        begin, end = sorted((draw(st.integers(0, tokens)), draw(st.integers(0, tokens))))
        bounds = sorted(draw(st.lists(st.integers(begin, end), max_size=2)))
        layout.append([0 if not begin <= n < end else 1 + sum(n >= bound for bound in bounds) for n in range(tokens)])
    return window, layout


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows(), st.sampled_from(VARIANTS), st.sampled_from(["sdpa", "eager"]), st.booleans())
def test_odd_lengths(float64_throughout, drawn, variant, attention, slides):
    (window, layout), (phases, size) = drawn, variant
    window = window if slides else None
    layer = OneLayer((2, 1), num_pseudo_heads=size, rope_phases=phases, sliding_window=window, attention=attention)
    check(layer, layout)
    cached = [[min(number, 1) for number in row] for row in layout]  # one document
    check(layer, cached, "dynamic", [1] * len(layout[0]))
    check(layer, cached, "dynamic", [len(layout[0]) // 2 + 1, *[1] * (len(layout[0]) - len(layout[0]) // 2 - 1)])
