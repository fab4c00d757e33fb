"""The paper's constructions do what it proves, in this package's own layer."""

import itertools
import sys

import pytest
import torch
from runs import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "theory"))

from constructions import (
    attention,
    cyclic_shifts,
    departure_from_linear,
    filter_bank,
    filter_bank_by_heads_alone,
    least_error_of_plain_heads,
    patterns,
    tokens,
)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def transition(size):
    """A random walk's matrix: its powers stay of one size."""
    return random(size, size).softmax(-1)


@pytest.mark.parametrize(("order", "heads"), [(1, 1), (2, 2), (4, 2), (5, 3), (9, 3), (10, 4), (16, 4)])
def test_a_filter_bank_takes_the_root_of_its_order_in_heads(order, heads):
    matrix, content = transition(7), random(7, 3)
    bank, layer = filter_bank(matrix, content, order)
    expected, power = [], content
    for _ in range(order):
        expected.append(power)
        power = matrix @ power
    expected = torch.stack(expected, dim=1)
    assert layer.config.num_attention_heads == heads
    assert (bank - expected).abs().max() < 1e-12
    assert (filter_bank_by_heads_alone(matrix, content, order) - expected).abs().max() < 1e-12


def test_plain_attention_needs_a_head_for_each_power():
    matrix = random(6, 6) / 6**0.5
    errors = [least_error_of_plain_heads(matrix, 6, heads) for heads in range(7)]
    assert errors[0] == pytest.approx(1) and errors[6] == 0
    assert all(before > after for before, after in itertools.pairwise(errors))
    assert errors[5] > 1e-4  # with one head too few it is not the bank


@pytest.mark.parametrize(("count", "heads"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (9, 3), (10, 4), (17, 5)])
def test_all_cyclic_shifts_take_the_root_of_the_length_in_heads(count, heads):
    content = random(count, 2)
    workspace, layer = cyclic_shifts(content)
    assert layer.config.num_attention_heads == heads
    for shift in range(count):
        assert (workspace[:, shift] - content.roll(-shift, dims=0)).abs().max() < 1e-12


def test_four_tokens_and_their_shifts():
    workspace, layer = cyclic_shifts(torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64))
    assert workspace[..., 0].round(decimals=9).tolist() == [[1, 2, 3, 4], [2, 3, 4, 1], [3, 4, 1, 2], [4, 1, 2, 3]]
    seen = patterns(layer, tokens(torch.zeros(4, 1, dtype=torch.float64))) > 0
    for query in range(2):
        for key in range(2):
            assert seen[query, key].nonzero()[:, 1].tolist() == [(n + 2 * query + key) % 4 for n in range(4)]


def with_random_weights(pseudo_heads):
    layer = attention(2, pseudo_heads, 4, 6)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    return layer


def test_on_repeated_tokens_plain_attention_is_linear_and_two_pseudo_heads_are_not():
    one, other = random(2, 6)
    assert departure_from_linear(with_random_weights(1), one, other) < 1e-14
    assert departure_from_linear(with_random_weights(2), one, other) > 1e-2
