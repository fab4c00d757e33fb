"""
The Triton kernel of decoding, held to plain loops and to `absorbed_attention`. There is no GPU: Triton's interpreter
runs it, and Triton compiles it for GPUs that it is not run on.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from naive import turn
from torch._dynamo.utils import counters
from transformers.dynamic_module_utils import get_imports
from triton.runtime.interpreter import InterpreterBuilder

from modeling_iha import absorbed_triton
from modeling_iha.absorbed import absorbed_attention
from modeling_iha.absorbed_triton import absorbed_attention_triton, split_length

pytestmark = pytest.mark.slow  # nothing of Transformers is in it

if any(isinstance(kernel, triton.JITFunction) for kernel in (tl.max, absorbed_triton._split_kernel)):
    raise RuntimeError("Triton was imported without its interpreter: set TRITON_INTERPRET=1 before that.")

# What one rounding may change, as a part of the number; the interpreter cuts bfloat16 off instead of rounding it.
UNIT = {
    torch.float32: torch.finfo(torch.float32).eps / 2,
    torch.float16: torch.finfo(torch.float16).eps / 2,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
}


@pytest.fixture(autouse=True)
def stand_in_bfloat16_dot(monkeypatch):
    """Triton's interpreter has no bfloat16: its `dot` multiplies the bits as integers. This one multiplies numbers."""
    dot = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *others):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def arguments(heads, groups, size, keys, head_dim=16, dtype=torch.float32, batch=2, phases="shared", own_key=None):
    """Those of `absorbed_attention`, random; the new token is the last one."""
    torch.manual_seed(0)
    offsets = ()
    if phases == "quarter turns":  # they are exact in every dtype
        angles = torch.arange(size)[:, None] * torch.arange(1, head_dim // 2 + 1).repeat(2) * (torch.pi / 2)
        offsets = (angles.cos().round().to(dtype), angles.sin().round().to(dtype))
    elif phases != "shared":
        inv_freq = 10.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        step = {"interleaved": 1, "fractional": 1 / size}[phases]
        angles = (torch.arange(size)[:, None] * step * inv_freq).repeat(1, 2)
        offsets = (angles.cos().to(dtype), angles.sin().to(dtype))
    return {
        "k_mix": torch.randn(size, groups, groups, dtype=dtype),
        "v_mix": torch.randn(size, groups, groups, dtype=dtype),
        "query": torch.randn(batch, size, heads, head_dim, dtype=dtype),
        "key": torch.randn(batch, groups, keys, head_dim, dtype=dtype),
        "value": torch.randn(batch, groups, keys, head_dim, dtype=dtype),
        "mask": None,
        "own_key": keys - 1 if own_key is None else own_key,
        "scaling": head_dim**-0.5,
        "offsets": offsets,
    }


def as_float64(given):
    def cast(x):
        if isinstance(x, tuple):
            return tuple(map(cast, x))
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return {name: cast(x) for name, x in given.items()}


def rounding(given):
    """
    What rounding may change, [B, P, H, d]: weights and output in the dtype; in float32 the logits, and a query that
    was turned back. A logit that is off by a part of its terms' size changes its weight by that part.
    """
    heads, groups = given["query"].shape[2], given["key"].shape[1]
    dtype = given["query"].dtype
    given = as_float64(given)
    k_mix = given["k_mix"].abs().repeat_interleave(heads // groups, dim=1)
    terms = torch.einsum("jhm,bihd,bmnd->bihnj", k_mix, given["query"].abs(), given["key"].abs()) * given["scaling"]
    size, _ = absorbed_attention(**{**given, "v_mix": given["v_mix"].abs(), "value": given["value"].abs()})
    return size * (2 * UNIT[dtype] + 4 * UNIT[torch.float32] * terms.amax((-2, -1))[..., None])


def assert_same(given, multiprocessors=2):
    output = absorbed_attention_triton(**given, multiprocessors=multiprocessors)
    expected, _ = absorbed_attention(**as_float64(given))
    assert output.dtype == given["query"].dtype and output.shape == expected.shape
    assert ((output.double() - expected).abs() <= rounding(given)).all()


def mask_of(kind, batch, heads, keys, dtype):
    """The last token is seen by all but of one kind."""
    by_head = kind.endswith("of each head")
    seen = torch.rand(batch, heads if by_head else 1, 1, keys) < 0.6
    if kind == "left padding":
        seen = (torch.arange(keys) >= torch.arange(batch)[:, None] * keys // 2)[:, None, None]
    seen[..., -1] = True
    if kind.startswith("additive"):
        return torch.randn(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return {"bool": seen, "left padding": seen, "bool of each head": seen, "bool of all rows": seen[:1]}[kind]


@pytest.mark.parametrize("phases", ["shared", "interleaved", "fractional"])
@pytest.mark.parametrize("size", [2, 3])
def test_it_is_the_definition_in_plain_loops(size, phases):
    heads, groups, keys, head_dim = 6, 3, 5, 16
    given = arguments(heads, groups, size, keys, head_dim, batch=1, phases=phases)
    output = absorbed_attention_triton(**given, multiprocessors=1)[0]
    k_mix, v_mix, query, key, value = (as_float64(given)[name] for name in ("k_mix", "v_mix", "query", "key", "value"))
    inv_freq = 10.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    step = {"shared": 0, "interleaved": 1, "fractional": 1 / size}[phases]
    for i in range(size):
        for h in range(heads):
            g = h // (heads // groups)
            seen = [(n, j) for n in range(keys) for j in range(size) if n < keys - 1 or j <= i]
            exponents, values = [], []
            for n, j in seen:
                pseudo_key = turn(sum(k_mix[j, g, m] * key[0, m, n] for m in range(groups)), j * step, inv_freq)
                exponents.append(math.exp(float(query[0, i, h] @ pseudo_key) / math.sqrt(head_dim)))
                values.append(sum(v_mix[j, g, m] * value[0, m, n] for m in range(groups)))
            expected = sum(e * v for e, v in zip(exponents, values, strict=True)) / sum(exponents)
            assert (output[i, h] - expected).abs().max() <= 1e-5 * expected.abs().max()


MASKS = ["none", "bool", "bool of all rows", "bool of each head", "additive", "additive of each head", "left padding"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("phases", ["shared", "interleaved"])
@pytest.mark.parametrize(("heads", "size"), [((9, 3), 2), ((4, 4), 4), ((8, 1), 3), ((15, 5), 2)], ids=str)
def test_it_is_the_torch_form(heads, size, phases, mask):
    given = arguments(*heads, size, keys=70, phases=phases)
    if mask != "none":
        given["mask"] = mask_of(mask, 2, heads[0], 70, torch.float32)
    assert_same(given)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
@pytest.mark.parametrize("dtype", absorbed_triton.DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["none", "additive"])
@pytest.mark.parametrize("phases", ["shared", "quarter turns"])
def test_dtypes_and_head_sizes(dtype, head_dim, mask, phases):
    given = arguments(4, 2, 2, 40, head_dim, dtype, batch=1, phases=phases)
    if mask != "none":
        given["mask"] = mask_of(mask, 1, 4, 40, dtype)
    assert_same(given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_over_many_keys_are_in_float32(dtype):
    given = arguments(4, 2, 2, 1024, dtype=dtype, batch=1)
    given["v_mix"], given["value"] = given["v_mix"].abs(), given["value"].abs()  # nothing cancels
    assert_same(given, multiprocessors=1)


@pytest.mark.parametrize("keys", [1, 7, 64, 130])
@pytest.mark.parametrize("multiprocessors", [1, 2, 132])
def test_any_length_in_any_number_of_splits(keys, multiprocessors):
    assert_same(arguments(9, 3, 2, keys), multiprocessors)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_rows_of_more_than_one_block(size):
    assert size * 32 > absorbed_triton.LARGEST_ROW_BLOCK
    assert_same(arguments(32, 8, size, 40, batch=1))


@pytest.mark.parametrize("own_key", [0, 20, 39, torch.tensor(20), torch.tensor(39)], ids=repr)
@pytest.mark.parametrize("hides", [False, True])
def test_the_new_token_in_the_midst_of_a_static_cache(own_key, hides):
    given = arguments(4, 2, 3, 40, own_key=own_key)
    if hides:
        given["mask"] = (torch.arange(40) <= own_key)[None, None, None]
        given["key"][:, :, int(own_key) + 1 :] = 1e4  # what an earlier text left there
    assert_same(given)


@pytest.mark.parametrize("keys", [1, 40, 70])
@pytest.mark.parametrize(("sliced", "transposed"), [("key", "value"), ("value", "key")])
def test_caches_and_masks_that_are_views(sliced, transposed, keys):
    given = arguments(9, 3, 2, keys, head_dim=80, phases="interleaved")
    whole = torch.full((3, 5, 90, 100), torch.nan)
    given[sliced] = whole[1:, 2:, 7 : 7 + keys, 10:90].copy_(given[sliced])
    given[transposed] = given[transposed].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    given["query"] = given["query"].transpose(1, 2).contiguous().transpose(1, 2)
    mask = torch.zeros(2, 1, 1, 3 * keys, dtype=torch.bool)
    mask[..., ::3] = mask_of("left padding", 2, 9, keys, torch.float32)
    given["mask"] = mask[..., ::3]
    assert_same(given)


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize(
    "strides", [(2**30, 640, 16, 1), (640, 2**30, 16, 1), (16, 48, 2**26, 1)], ids=["batch", "heads", "tokens"]
)
def test_caches_of_more_than_2_to_the_31_numbers(strides, name, tmp_path):
    given = arguments(6, 3, 2, 40, dtype=torch.float16, batch=3)
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32, dtype=torch.float16)
    given[name] = file.as_strided(given[name].shape, strides).copy_(given[name])
    assert_same(given)


@pytest.mark.parametrize("dtype", absorbed_triton.DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["bool", "additive"])
def test_a_row_that_sees_nothing_is_the_mean_as_in_the_torch_form(mask, dtype):
    given = arguments(4, 2, 2, 70, dtype=dtype)
    given["mask"] = torch.ones(2, 1, 1, 70, dtype=torch.bool)
    given["mask"][0] = False
    expected, _ = absorbed_attention(**as_float64(given))
    v_mix, value = given["v_mix"].double(), given["value"][0].double()
    mean = torch.einsum("jgm,mnd->gd", v_mix, value).repeat_interleave(2, dim=0) / (2 * 70)
    assert (expected[0] - mean).abs().max() < 1e-12
    allowed = rounding(given)
    if mask == "additive":
        given["mask"] = torch.zeros(2, 1, 1, 70).masked_fill(~given["mask"], torch.finfo(torch.float32).min)
    output = absorbed_attention_triton(**given, multiprocessors=4).double()
    assert ((output - expected).abs() <= allowed).all()


def test_a_row_that_infinity_hides_whole_is_zero():
    given = arguments(4, 2, 2, 70)
    given["mask"] = torch.zeros(2, 1, 1, 70)
    given["mask"][0] = -torch.inf
    output = absorbed_attention_triton(**given, multiprocessors=4)
    expected, _ = absorbed_attention(**as_float64(given))
    assert (output[0] == 0).all()
    assert ((output - expected).abs() <= rounding(given))[1].all()


def test_the_dtype_is_checked():
    with pytest.raises(ValueError, match=r"dtype torch\.float64: it must be one of torch\.float32, torch\.b"):
        absorbed_attention_triton(**as_float64(arguments(4, 2, 2, 7)), multiprocessors=1)


def test_splits_fill_the_gpu_and_leave_none_empty():
    for keys in (1, 31, 32, 33, 1000, 65536, 10**6):
        for programs in (1, 2, 8, 300):
            length = split_length(keys, programs, multiprocessors=132, block=32)
            splits = -(-keys // length)
            assert length % 32 == 0
            assert (splits - 1) * length < keys <= splits * length
            assert splits == 1 or splits * programs <= 2 * 132
            assert splits <= absorbed_triton.LARGEST_SPLIT_COUNT
    assert split_length(65536, 1, 132, 32) == 256  # 256 splits
    assert split_length(65536, 8, 132, 32) == 2016  # 33 splits of each row
    assert split_length(65536, 264, 132, 32) == 65536


@pytest.mark.parametrize("phases", ["shared", "fractional"])
def test_a_compiled_step_has_one_graph(phases):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(absorbed_attention_triton, fullgraph=True, backend="aot_eager")
    for keys in (40, 41, 42):
        given = arguments(4, 2, 2, 42, phases=phases, own_key=torch.tensor(keys - 1))
        given["mask"] = (torch.arange(42) < keys)[None, None, None]
        assert torch.equal(compiled(**given, multiprocessors=2), absorbed_attention_triton(**given, multiprocessors=2))
    assert counters["stats"]["unique_graphs"] == 1  # a static cache
    for keys in (40, 41, 64, 65):
        given = arguments(4, 2, 2, keys, phases=phases)
        assert torch.equal(compiled(**given, multiprocessors=2), absorbed_attention_triton(**given, multiprocessors=2))
    assert counters["stats"]["unique_graphs"] <= 3  # the length once as a constant, then as a symbol


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from modeling_iha import absorbed_triton

for name, types, constants in json.load(sys.stdin):
    kernel = getattr(absorbed_triton, name)
    signature = {argument: "constexpr" if argument in constants else types[argument] for argument in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    print(name, "mma" in compiled.asm["ptx"], len(compiled.asm["cubin"]) > 0)
"""


def test_triton_compiles_it_for_a_gpu(tmp_path):
    """The interpreter takes what Triton does not compile. The types are those that `_decode` launches it with."""
    jobs = []
    for turns, mask, dtype in ((1, None, "*bf16"), (2, "*fp16", "*fp16"), (2, "*i1", "*fp32")):
        kind = {None: "none", "*i1": "bool"}.get(mask, "additive")
        types = dict.fromkeys(absorbed_triton._split_kernel.arg_names, "i32")
        types |= dict.fromkeys(("query", "key", "value", "k_mix", "v_mix"), dtype)
        types |= dict.fromkeys(("partial", "peaks", "totals"), "*fp32")
        types |= {"mask": mask, "own_key": "*i64", "scaling": "fp32", "hidden": "fp32"}
        constants = {"heads": 8, "groups": 4, "size": 2, "turns": turns, "head_dim": 80, "mask_kind": kind}
        constants |= {"mask_by_head": False, "row_block": 16, "key_block": 32, "channel_block": 128}
        constants |= dict.fromkeys(("key_stride_channel", "value_stride_channel", "mask_stride_token"), 1)
        constants |= {} if mask else {"mask": None}
        jobs.append(("_split_kernel", types, constants))
    types = {"partial": "*fp32", "peaks": "*fp32", "totals": "*fp32", "output": "*bf16", "splits": "i32"}
    jobs.append(("_combine_kernel", types, {"head_dim": 80, "split_block": 64, "channel_block": 32}))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], input=json.dumps(jobs), env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(jobs)
    assert result.stdout.count("_split_kernel True True") == 2  # tensor cores, for bfloat16 and float16
    assert result.stdout.count("_split_kernel False True") == 1
    assert result.stdout.count("_combine_kernel False True") == 1


def test_a_checkpoint_with_this_code_does_not_require_triton():
    path = Path(absorbed_triton.__file__)
    assert re.search(r"^ +import triton$", path.read_text(), re.M)
    assert get_imports(path) == ["re", "torch", "transformers"]


def test_without_triton_the_error_says_so():
    code = "import torch, transformers, sys; sys.modules['triton'] = None; import modeling_iha.absorbed_triton"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: modeling_iha.absorbed_triton needs Triton: pip install triton." in result.stderr
