"""generate() and the cache: every way gives what the full forward gives."""

import inspect

import pytest
import torch
from layers import CACHE
from models import SHAPE, smollm2_as_iha, tiny_model, tokens
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching import PagedAttentionCache

PHASES = ["shared", "interleaved", "fractional"]
SIZES = [1, 2, 3, [2, 1, 4]]
GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


@torch.no_grad()
def step_by_step(model, ids):
    logits, cache = [], None
    for n in range(ids.shape[1]):
        output = model(ids[:, n : n + 1], use_cache=True, **{CACHE: cache})
        cache = output[CACHE]
        logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("phases", PHASES)
def test_token_by_token_is_the_full_forward(phases, size):
    model = tiny_model(num_pseudo_heads=size, rope_phases=phases)
    ids = tokens(2, 9)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    # RMSNorm computes in float32 in every model, so a last-bit change may move a value by 1e-7.
    assert torch.allclose(step_by_step(model, ids)[0], full, rtol=0, atol=1e-6 * float(full.abs().max()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("phases", PHASES)
def test_a_left_padded_batch_is_each_prompt_alone(phases, attention):
    model = tiny_model(rope_phases=phases, attention=attention, dtype=torch.float32)
    ids = tokens(2, 9)
    ids[1, :4] = 0
    mask = (ids != 0).long()
    batch = model.generate(ids, attention_mask=mask, **GREEDY)
    alone = [model.generate(ids[:1], **GREEDY), model.generate(ids[1:, 4:], **GREEDY)]
    assert torch.equal(batch[0], alone[0][0])
    assert torch.equal(batch[1, 4:], alone[1][0])


@pytest.mark.parametrize("phases", PHASES)
@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 4},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda how: next(iter(how)) + f"-{len(how)}",
)
def test_ways_of_generating_give_what_no_cache_gives(phases, how):
    model = tiny_model(rope_phases=phases, num_pseudo_heads=[2, 1, 3])
    ids = tokens(1 if "prompt_lookup_num_tokens" in how else 2, 9)
    about_the_cache = ("cache_implementation", "prefill_chunk_size", "prompt_lookup_num_tokens")
    without = {name: value for name, value in how.items() if name not in about_the_cache}
    torch.manual_seed(0)
    expected = model.generate(ids, **{**GREEDY, **without}, use_cache=False)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, **{**GREEDY, **how}), expected)


@pytest.mark.parametrize("phases", PHASES)
def test_sliding_layers_generate_what_they_do_without_a_cache(phases):
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    model = tiny_model(rope_phases=phases, num_pseudo_heads=[2, 2, 1], layer_types=layer_types, sliding_window=4)
    ids = tokens(2, 9)
    expected = model.generate(ids, **GREEDY, use_cache=False)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert torch.equal(model.generate(ids, **GREEDY, cache_implementation="static"), expected)


@torch.no_grad()
@pytest.mark.parametrize("phases", PHASES)
def test_a_cache_splits_by_rows_and_repeats_them(phases):
    layer_types = ["sliding_attention", "full_attention", "full_attention"]
    model = tiny_model(rope_phases=phases, num_pseudo_heads=[2, 1, 3], layer_types=layer_types, sliding_window=4)
    ids, tail = tokens(3, 9), tokens(2, 3, seed=1)
    for rows in ([2, 0], [1, 1]):
        _, cache = step_by_step(model, ids)
        cache.batch_select_indices(torch.tensor(rows))
        logits = model(tail, **{CACHE: cache}).logits
        full = model(torch.cat([ids[rows], tail], 1), use_cache=False).logits
        assert torch.allclose(logits, full[:, 9:], rtol=0, atol=1e-6 * float(full.abs().max()))
    _, cache = step_by_step(model, ids[:1])
    cache.batch_repeat_interleave(2)
    logits = model(tail, **{CACHE: cache}).logits
    full = model(torch.cat([ids[:1].expand(2, -1), tail], 1), use_cache=False).logits
    assert torch.allclose(logits, full[:, 9:], rtol=0, atol=1e-6 * float(full.abs().max()))


PAGED = inspect.signature(PagedAttentionCache.update).parameters


@pytest.mark.parametrize("phases", PHASES)
def test_continuous_batching_gives_what_each_prompt_alone_gives(phases):
    layer_types = ["sliding_attention", "full_attention", "full_attention"]
    model = tiny_model(
        dtype=torch.float32, rope_phases=phases, num_pseudo_heads=[2, 1, 3], layer_types=layer_types, sliding_window=4
    )
    prompts = [tokens(1, length, seed=length) for length in (5, 9, 3, 12)]
    how = {
        "generation_config": GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=16),
    }
    batch = [prompt[0].tolist() for prompt in prompts]
    if "kwargs" not in PAGED:  # before Transformers 5.24
        with pytest.raises(ValueError, match="Continuous batching takes attn_implementation='sdpa', from Trans"):
            model.generate_batch(batch, **how)
        return
    results = model.generate_batch(batch, **how)
    for prompt, result in zip(prompts, results.values(), strict=True):
        assert result.error is None
        assert result.generated_tokens == model.generate(prompt, **GREEDY)[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_cache_has_llamas_bytes(size):
    def cache_bytes(model):
        _, cache = step_by_step(model, tokens(2, 7))
        assert isinstance(cache, DynamicCache)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    model = tiny_model(num_pseudo_heads=size)
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE)).double().eval()
    assert cache_bytes(model) == cache_bytes(llama)


def test_the_real_model_batched_with_left_padding(smollm2, prompts, tokenizer):

    model = smollm2_as_iha(smollm2, torch.float32)
    how = {"do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16}
    batch = model.generate(**prompts, **how)[:, -16:]
    for row in (0, 2):
        kept = prompts["attention_mask"][row].bool()
        alone = model.generate(prompts["input_ids"][row][kept][None], **how)[:, -16:]
        assert torch.equal(batch[row], alone[0])
    assert "Paris" in tokenizer.decode(batch[0])
