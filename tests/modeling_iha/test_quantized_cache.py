"""generate() with a quantised cache: IHA caches what Llama caches, so quantising it does the same to both."""

import pytest
import torch
from models import smollm2_as_iha
from transformers import AutoModelForCausalLM, cache_utils

# Four tokens stay as they are, older ones are quantised again and again.
BACKENDS = {
    "8 bits": {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1, "residual_length": 4},
    "4 bits": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1, "residual_length": 4},
}
if hasattr(cache_utils, "Fp8QuantizedLayer"):  # not yet in Transformers 5.17
    BACKENDS["fp8"] = {"backend": "fp8"}
NEW_TOKENS = 8


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=str)
def models(request, smollm2):
    """Llama and IHA in one dtype."""
    llama = AutoModelForCausalLM.from_pretrained(smollm2, dtype=request.param).eval()
    return llama, smollm2_as_iha(smollm2, request.param)


@pytest.fixture(scope="module")
def with_a_plain_cache(models, prompts):
    return generate(models[1], prompts)


def generate(model, prompts, **how):
    """Two prompts: with 4 bits hqq packs the groups of all rows in pairs, and fails where their number is odd."""
    inputs = {name: tensor[:2] for name, tensor in prompts.items()}
    how = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, **how}
    output = model.generate(**inputs, **how, return_dict_in_generate=True, output_logits=True)
    return output.sequences[:, -NEW_TOKENS:], torch.stack(output.logits)


def quantized(backend):
    """As a new dictionary each time: Transformers 5.17 takes the backend's name out of it."""
    return {"cache_implementation": "quantized", "cache_config": dict(BACKENDS[backend])}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quantised_cache_gives_what_it_gives_llama(models, with_a_plain_cache, prompts, tokenizer, backend):
    llama, iha = models
    expected, expected_logits = generate(llama, prompts, **quantized(backend))
    tokens, logits = generate(iha, prompts, **quantized(backend))
    assert torch.equal(tokens, expected)
    # In float64 both round to the same steps; in float32 a value that lies between two may go to either.
    if logits.dtype == torch.float64:
        assert torch.allclose(logits, expected_logits, rtol=0, atol=1e-9 * float(expected_logits.abs().max()))

    assert "Paris" in tokenizer.decode(tokens[0])
    plain_tokens, plain_logits = with_a_plain_cache
    assert torch.equal(tokens, plain_tokens) or backend != "8 bits"
    # The first token comes before anything is read back, the second is the first to show the steps.
    difference = (logits - plain_logits).abs().amax(dim=(1, 2))
    assert difference[0] == 0
    assert 1e-3 < difference[1] < 20
