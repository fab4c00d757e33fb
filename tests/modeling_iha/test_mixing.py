"""The mixing product and its gradients, and what the initialisations promise."""

import pytest
import torch

from modeling_iha.mixing import IHACollapse, IHAMixer, identity_copies, mix_heads, zero_sum_noise


def test_mix_heads_is_the_sum_over_heads_and_has_its_gradients():
    torch.manual_seed(0)
    weight = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 5, 4, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.einsum("jhm,bnmd->bnjhd", weight, x).flatten(2, 3)
    assert torch.allclose(mix_heads(weight, x), expected, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(mix_heads, (weight, x))


def test_double_backward_is_refused():
    weight = torch.randn(2, 2, 2, requires_grad=True)
    x = torch.randn(1, 3, 2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(mix_heads(weight, x).square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_mix_heads_keeps_the_dtype_of_the_heads():
    weight = torch.randn(2, 3, 3, requires_grad=True)
    mixed = mix_heads(weight, torch.randn(1, 2, 3, 4, dtype=torch.bfloat16))
    mixed.sum().backward()
    assert mixed.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("std", [0.001, 0.02, 0.1, 1.0, 16.0])
@pytest.mark.parametrize("shape", [(2, 3, 3), (3, 8, 8), (4, 1, 1)])
def test_zero_sum_noise_is_exact_in_half_precision(shape, std):
    torch.manual_seed(1)
    noise = zero_sum_noise(shape, std)
    values = noise + identity_copies(noise)
    assert not noise.double().sum(0).any()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(noise.to(dtype).double(), noise.double())
        assert torch.equal(values.to(dtype).double(), values.double())


@pytest.mark.parametrize("std", [0.02, 0.1, 1.0])
def test_zero_sum_noise_has_about_the_size_asked_for(std):
    torch.manual_seed(0)
    assert 0.8 * std < zero_sum_noise((2, 64, 64), std).std() < 1.2 * std


def test_exact_init_meets_its_conditions_and_tells_pseudo_heads_apart():
    torch.manual_seed(0)
    mixer, collapse = IHAMixer(3, 4, 2), IHACollapse(3, 4)
    mixer.initialize("exact", 0.1)
    collapse.initialize("exact", 0.1)
    assert torch.equal(mixer.k_mix, identity_copies(mixer.k_mix))
    assert torch.equal(mixer.v_mix.sum(0), 3 * torch.eye(2))
    assert torch.equal(mixer.q_mix[-1], torch.eye(4))
    assert torch.equal(collapse.weight[:, -1], torch.eye(4))
    assert not collapse.weight[:, :-1].any()
    for tensor in (mixer.q_mix, mixer.v_mix):
        assert not torch.equal(tensor[0], tensor[1])


def test_identity_init_is_copies_and_normal_is_neither():
    mixer = IHAMixer(3, 4, 2)
    mixer.initialize("identity", 0.1)
    for tensor in (mixer.q_mix, mixer.k_mix, mixer.v_mix):
        assert torch.equal(tensor, identity_copies(tensor))
    mixer, collapse = IHAMixer(4, 64, 16), IHACollapse(4, 64)
    mixer.initialize("normal", 0.8)
    collapse.initialize("normal", 0.8)
    for tensor, expected in ((mixer.q_mix, 0.1), (mixer.k_mix, 0.2), (mixer.v_mix, 0.2), (collapse.weight, 0.05)):
        assert 0.9 * expected < tensor.std() < 1.1 * expected
