"""Every form in which a mask, a packed row or a window can be given, and what is refused."""

import pytest
import torch
from layers import CACHE, OneLayer, assert_close
from models import tiny_config, tiny_model, tokens
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from modeling_iha import IHAForCausalLM, pieces
from modeling_iha.backends import check_backend
from modeling_iha.virtual_masks import causal_mask, virtual_mask

LENGTHS = [3, 0, 4, 1]  # an empty document among them
TOKENS = sum(LENGTHS)
DOCUMENT = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
SAME = DOCUMENT[:, None] == DOCUMENT
RESTARTING = torch.cat([torch.arange(length) for length in LENGTHS])[None]
CU_SEQ_LENS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
BACKENDS = ["sdpa", "eager", "flash_attention_2"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "SMALLEST_BLOCK", 2)
    monkeypatch.setattr(pieces, "ALIGNMENT", 1)
    monkeypatch.setattr(pieces, "LARGEST_MASK", 64)


def in_document(batch, head, query, key):
    return DOCUMENT[query] == DOCUMENT[key]


def first_two(batch, head, query, key):
    return key < 2


def check(layer, sees, mask=None, positions=RESTARTING, **kwargs):
    entered, left = layer(layer.input(1, TOKENS), positions, mask, **kwargs)
    at = torch.arange(TOKENS) if positions is None else positions[0]
    assert_close(left[0], layer.reference(entered[0], at, sees))


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("phases", ["shared", "interleaved", "fractional"])
def test_documents_by_cu_seq_lens(phases, attention, float64_throughout, stand_in_flash):
    layer = OneLayer(rope_phases=phases, attention=attention)
    told = {"cu_seq_lens_q": CU_SEQ_LENS, "cu_seq_lens_k": CU_SEQ_LENS, "max_length_q": 4, "max_length_k": 4}
    check(layer, lambda n, m: SAME[n, m], **told)
    check(layer, lambda n, m: SAME[n, m], positions=None, **told)  # RoPE needs distances only


def test_cu_seq_lens_run_over_the_rows_end_to_end(float64_throughout):
    layer = OneLayer()
    x = layer.input(2, TOKENS)
    bounds = torch.cat([CU_SEQ_LENS, CU_SEQ_LENS[1:] + TOKENS])
    entered, left = layer(x, None, cu_seq_lens_q=bounds)
    for row in range(2):
        assert_close(left[row], layer.reference(entered[row], torch.arange(TOKENS), lambda n, m: SAME[n, m]))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_masks_of_four_dimensions(kind, heads, window, attention, float64_throughout):
    layer = OneLayer(attention=attention, sliding_window=window)
    mask = (SAME & CAUSAL)[None, None].expand(1, heads, -1, -1)
    if kind != torch.bool:
        mask = torch.zeros(mask.shape, dtype=kind).masked_fill(~mask, torch.finfo(kind).min)
    check(layer, lambda n, m: SAME[n, m] and n - m < (window or TOKENS), mask)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("how", ["and", "or"])
def test_masks_made_by_transformers_with_functions_of_ones_own(how, window, attention):
    """An `or` may show tokens that come later; of its own token a virtual query sees what is not later."""
    torch.compiler.reset()
    layer = OneLayer(head_dim=16, attention=attention, sliding_window=window, dtype=torch.float32)
    functions = {"and": {"and_mask_function": in_document}, "or": {"or_mask_function": first_two}}[how]
    make, kind = create_causal_mask, "full_attention"
    if window is not None:
        make, kind = create_sliding_window_causal_mask, "sliding_attention"
    mask = make(layer.config, torch.zeros(1, TOKENS, 1), None, None, **functions)

    def sees(n, m):
        near = n - m < (window or TOKENS)
        return bool(SAME[n, m] and near and m <= n) if how == "and" else bool((m <= n or m < 2) and near)

    entered, left = layer(layer.input(1, TOKENS), torch.arange(TOKENS)[None], {kind: mask})
    expected = layer.reference(entered[0], torch.arange(TOKENS), sees, flat=False)
    assert_close(left[0].double(), expected, tolerance=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_static_cache_with_packed_documents(attention, float64_throughout):
    layer = OneLayer(attention=attention)
    cache = StaticCache(config=layer.config, max_cache_len=TOKENS + 5)
    check(layer, lambda n, m: SAME[n, m], cache=cache)


@pytest.mark.parametrize("attention", BACKENDS)
def test_documents_cannot_begin_in_what_continues_a_cache(attention, stand_in_flash):
    layer = OneLayer(attention=attention)
    cache = DynamicCache(config=layer.config)
    layer(layer.input(1, 2), torch.arange(2)[None], cache=cache)
    with pytest.raises(ValueError, match="begin a document among 8 tokens that continue 2 cached ones"):
        layer(layer.input(1, TOKENS), RESTARTING + 2, cache=cache)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [([0, 3], "must rise from 0 to the number of tokens, 8"), ([0, 5, 3, 8], "must rise"), ([1, 8], "must rise")],
)
def test_wrong_cu_seq_lens_are_refused(bounds, message):
    layer = OneLayer()
    with pytest.raises(ValueError, match=message):
        layer(layer.input(1, TOKENS), None, cu_seq_lens_q=torch.tensor(bounds))
    with pytest.raises(ValueError, match=r"cu_seq_lens_k=.* must be cu_seq_lens_q"):
        layer(layer.input(1, TOKENS), None, cu_seq_lens_q=CU_SEQ_LENS, cu_seq_lens_k=CU_SEQ_LENS[1:])


def test_a_mask_that_does_not_cover_the_cache_is_refused():
    layer = OneLayer()
    cache = DynamicCache(config=layer.config)
    layer(layer.input(2, 3), None, cache=cache)
    with pytest.raises(ValueError, match=r"attention_mask has the shape \[2, 2\]: it must be \[2, 5\]"):
        layer.model(inputs_embeds=layer.input(2, 2), attention_mask=torch.ones(2, 2), **{CACHE: cache})


def test_what_flash_attention_cannot_mask_is_refused(stand_in_flash):
    layer = OneLayer(attention="flash_attention_2")
    x = layer.input(1, 4)
    with pytest.raises(ValueError, match="cannot hide tokens in the midst of a document"):
        layer(x, None, torch.tensor([[1, 0, 1, 1]]))
    with pytest.raises(ValueError, match=r"takes an attention_mask of shape \[batch, tokens\] only"):
        layer(x, None, torch.ones(1, 1, 4, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"])
def test_flash_attention_is_refused_where_its_window_is_not_tokens(attention):
    sliding = tiny_config(sliding_window=4)
    for refused in (
        lambda: IHAForCausalLM._from_config(sliding, attn_implementation=attention),
        lambda: tiny_model(sliding_window=4).set_attn_implementation(attention),
    ):
        with pytest.raises(ValueError, match=r"cannot run the sliding layers .* Use attn_implementation='sdpa'"):
            refused()
    check_backend(tiny_config(num_pseudo_heads=1, sliding_window=4), attention)
    check_backend(tiny_config(), attention)


def test_a_backend_without_a_mask_function_is_refused():
    AttentionInterface.register("without_mask", sdpa_attention_forward)
    with pytest.raises(ValueError, match="'without_mask' has no mask function, so padding would be lost"):
        IHAForCausalLM._from_config(tiny_config(), attn_implementation="without_mask")


def test_bidirectional_models_have_no_cache():
    model = tiny_model(is_causal=False)
    with torch.no_grad():
        assert getattr(model(tokens(1, 4)), CACHE) is None
        with pytest.raises(ValueError, match="is_causal=False has no cache"):
            model(tokens(1, 4), use_cache=True)
        with pytest.raises(ValueError, match=r"is_causal=False has no cache.*Pass use_cache=False"):
            model(tokens(1, 4), **{CACHE: DynamicCache(config=model.config)})
        with pytest.raises(ValueError, match="is_causal=False has no cache"):
            model.generate(tokens(1, 4), max_new_tokens=2)
        assert model.generate(tokens(1, 4), max_new_tokens=2, use_cache=False).shape == (1, 6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("chunks", [[8, 1, 1], [8, 3]])
def test_a_whole_rows_mask_with_a_sliding_cache(chunks, attention, float64_throughout):
    layer = OneLayer(attention=attention, sliding_window=4)
    tokens = sum(chunks)
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    seen[8:, 6] = False
    x, cache, entered, left, start = layer.input(1, tokens), DynamicCache(config=layer.config), [], [], 0
    for size in chunks:
        stop = start + size
        mask = seen[None, None, start:stop, :stop]
        ins, outs = layer(x[:, start:stop], torch.arange(start, stop)[None], mask, cache=cache)
        entered, left, start = [*entered, ins], [*left, outs], stop
    entered, left = torch.cat(entered, 1), torch.cat(left, 1)
    expected = layer.reference(entered[0], torch.arange(tokens), lambda n, m: bool(seen[n, m]) and n - m < 4)
    assert_close(left[0], expected)
    with pytest.raises(ValueError, match=rf"its last dimension must be {tokens + 1} \(all tokens so far\) or 4"):
        layer(x[:, :1], torch.tensor([[tokens]]), torch.ones(1, 1, 1, 7, dtype=torch.bool), cache=cache)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_static_cache_that_was_reset_begins_with_one_token(attention, size, float64_throughout):
    layer = OneLayer(attention=attention, num_pseudo_heads=size)
    cache = StaticCache(config=layer.config, max_cache_len=TOKENS)
    layer(layer.input(1, 3), torch.arange(3)[None], cache=cache)
    cache.reset()
    entered, left = layer(layer.input(1, 4), torch.arange(4)[None], chunks=[1, 2, 1], cache=cache)
    assert_close(left[0], layer.reference(entered[0], torch.arange(4), lambda n, m: True))


def test_positions_that_skip_are_one_document_where_a_mask_is_given(float64_throughout):
    layer = OneLayer()
    positions = torch.tensor([[0, 1, 2, 100, 101, 102]]).expand(2, -1)
    for mask in (torch.ones(2, 6), torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])):
        entered, left = layer(layer.input(2, 6), positions, mask)
        assert_close(left[0], layer.reference(entered[0], positions[0], lambda n, m: True))


def test_a_block_mask_of_heads_is_that_of_each_head_on_every_backend(float64_throughout):
    def by_head(batch, head, query, key):
        return (key <= query) & ((head % 2 == 0) | (key == query))

    block_mask = create_block_mask(by_head, 1, 4, TOKENS, TOKENS, device="cpu")
    index = torch.arange(TOKENS)
    dense = by_head(0, torch.arange(4)[:, None, None], index[:, None], index)[None]
    for attention in ("sdpa", "eager"):
        layer = OneLayer(attention=attention)
        x = layer.input(1, TOKENS)
        assert_close(layer(x, None, block_mask)[1], layer(x, None, dense)[1])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("of_mask", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_model", [torch.float32, torch.float64])
def test_an_additive_mask_of_another_dtype_is_the_same_mask(of_model, of_mask, is_causal, monkeypatch):
    monkeypatch.setattr(pieces, "LARGEST_MASK", 2**25)  # one block, long enough for the kernel's fast path
    layer = OneLayer(dtype=of_model, is_causal=is_causal)
    x, seen = layer.input(1, 24), torch.ones(24, 24, dtype=torch.bool).tril()
    seen[:, 5:9] = seen[:, 20:] = False
    seen[0] = True
    mask = torch.zeros(24, 24, dtype=of_mask).masked_fill(~seen, torch.finfo(of_mask).min)
    expected = layer(x, None, seen[None, None])[1]
    assert (layer(x, None, mask[None, None])[1] - expected).abs().max() < 1e-5 * expected.abs().max()


def test_masks_of_other_kinds_are_refused():
    layer = OneLayer()
    x = layer.input(1, 4)
    for mask, message in (
        (torch.ones(1, 1, 4, 4, dtype=torch.long), "dtype torch.int64: it must be bool or floating"),
        (torch.ones(1, 4, 4), "it must have 2 dimensions, or 4"),
        ({"sliding_attention": None}, r"\['full_attention'\] must be among them"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, None, mask)


def test_flash_attention_takes_one_token_beside_padding(float64_throughout, stand_in_flash):
    layer = OneLayer(attention="flash_attention_2")
    entered, left = layer(layer.input(2, 1), None, torch.tensor([[1], [0]]))
    assert_close(left[0], layer.reference(entered[0], torch.arange(1), lambda n, m: True))


def test_masks_of_blocks_are_cut_where_kernels_need_no_copy(monkeypatch):
    """Aligned as in earnest: each block's mask begins and ends on 8 entries, and the output is that of one mask."""
    monkeypatch.undo()
    monkeypatch.setattr(pieces, "LARGEST_MASK", 2**17)
    window, tokens, size = 203, 1000, 2
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, tokens * size, 8, dtype=torch.float64) for heads in (4, 2, 2))
    seen, kernel = [], pieces.scaled_dot_product_attention

    def watched(*args, attn_mask, **kwargs):
        seen.append(attn_mask)
        return kernel(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(pieces, "scaled_dot_product_attention", watched)
    output = pieces.in_blocks(query, key, value, None, size, 0, window, True, 8**-0.5, 0.0)
    assert len(seen) > 5
    for mask in seen:
        assert mask.storage_offset() % 8 == 0 and all(stride % 8 == 0 or stride == 1 for stride in mask.stride())
    assert len({mask.untyped_storage().data_ptr() for mask in seen}) <= 2  # and the last, shorter block's own
    dense = virtual_mask(causal_mask(tokens, tokens, 0, query.device), size, 0, window)
    key, value = (heads.repeat_interleave(2, 1) for heads in (key, value))
    expected = kernel(query, key, value, attn_mask=dense, scale=8**-0.5).transpose(1, 2)
    assert (output - expected).abs().max() <= 1e-12
