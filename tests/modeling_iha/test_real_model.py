"""SmolLM2 as IHA, moved off its exact start so that all pseudo-heads count: one function in every way."""

import pytest
import torch
from layers import CACHE
from models import smollm2_as_iha
from transformers import DynamicCache, StaticCache

GREEDY = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
BACKENDS = ["sdpa", "eager", "flex_attention"]
CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "prefill in chunks": {"prefill_chunk_size": 5},
    "no cache": {"use_cache": False},
}


@pytest.fixture(scope="module")
def model(smollm2):
    model = smollm2_as_iha(smollm2, torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mixer." in name or ".collapse." in name:
                parameter.add_(0.02 * torch.randn_like(parameter))
    yield model


@pytest.fixture(autouse=True)
def back_to_sdpa(model):
    yield
    model.set_attn_implementation("sdpa")


@pytest.fixture(scope="module")
def alone(model, prompts):
    """Each prompt on its own, with eager attention and no cache."""
    model.set_attn_implementation("eager")
    kept = [row[mask.bool()][None] for row, mask in zip(prompts["input_ids"], prompts["attention_mask"], strict=True)]
    texts = [model.generate(ids, **GREEDY, use_cache=False)[0, -12:] for ids in kept]
    return kept, torch.stack(texts)


WAYS = [(attention, how) for attention in ("sdpa", "eager") for how in CACHES]
# A kernel of flex_attention for each length would take long to compile where there is no cache.
WAYS += [("flex_attention", "dynamic"), ("flex_attention", "static")]


@pytest.mark.parametrize(("attention", "how"), WAYS)
def test_a_left_padded_batch_gives_what_each_prompt_gives(attention, how, model, prompts, alone):
    model.set_attn_implementation(attention)
    batch = model.generate(**prompts, **GREEDY, **CACHES[how])[:, -12:]
    assert torch.equal(batch, alone[1])


@pytest.mark.parametrize("how", ["prompt lookup", "assisted"])
@pytest.mark.slow
def test_speculative_decoding_gives_the_greedy_text(how, model, llama, alone):
    extra = {"prompt lookup": {"prompt_lookup_num_tokens": 3}, "assisted": {"assistant_model": llama}}[how]
    for ids, expected in zip(*alone, strict=True):
        assert torch.equal(model.generate(ids, **GREEDY, **extra)[0, -12:], expected)


@pytest.mark.slow
def test_beams_with_a_cache_are_those_without(model, prompts):
    how = {"num_beams": 3, "num_return_sequences": 2, **GREEDY, "max_new_tokens": 8, "min_new_tokens": 8}
    assert torch.equal(model.generate(**prompts, **how), model.generate(**prompts, **how, use_cache=False))


@pytest.mark.slow
@torch.no_grad()
def test_perplexity_is_one_in_every_way(model, text):
    ids, length = text, text.shape[1]
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(expected[0, :-1], ids[0, 1:])

    def in_chunks(cache):
        return torch.cat([model(ids[:, n : n + 24], **{CACHE: cache}).logits for n in range(0, length, 24)], dim=1)

    packed = torch.cat([ids, ids.flip(1)], dim=1)
    positions = torch.arange(length).repeat(2)[None]
    padded = torch.nn.functional.pad(ids, (5, 7))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (5, 7))
    for attention in BACKENDS:
        model.set_attn_implementation(attention)
        ways = {
            "one call": model(ids, use_cache=False).logits,
            "packed": model(packed, position_ids=positions, use_cache=False).logits[:, :length],
        }
        if attention != "flex_attention":  # which leaves caches to sdpa, and compiles a kernel for each padding
            ways |= {
                "dynamic": in_chunks(DynamicCache(config=model.config)),
                "static": in_chunks(StaticCache(config=model.config, max_cache_len=length + 3)),
                "padded": model(padded, attention_mask=mask, use_cache=False).logits[:, 5 : 5 + length],
            }
        for name, logits in ways.items():
            assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max(), (attention, name)
            assert abs(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]) - loss) <= 1e-5, (attention, name)
