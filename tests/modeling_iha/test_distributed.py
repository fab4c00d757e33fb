"""
Two real processes on gloo: data parallel, FSDP2 in three ways, tensor parallel. All give what one process gives.

This file is also the program of the two processes: `RANK=r python test_distributed.py FOLDER`.
"""

import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from models import SHAPE, tiny_model, tokens
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from modeling_iha import IHAConfig, IHAForCausalLM

PROCESSES = 2
SECONDS = 240
IDS = tokens(4, 9)


def exact_model():
    """As a conversion leaves it, one layer without mixing tensors."""
    return tiny_model(mixing_init="exact", num_pseudo_heads=[2, 1, 3]).train()


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.2)).double().eval()


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return None if tensor is None else tensor.detach().clone()


def two_steps(model, run, ids, optimizer=None):
    """The gradients of two steps, and the parameters after them."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05)
    gradients = []
    for _ in range(2):
        optimizer.zero_grad()
        run(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
        optimizer.step()
    return {"gradients": gradients, "parameters": {name: whole(p) for name, p in model.named_parameters()}}


def sharded(model):
    return sorted(type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule))


# What the processes run, each with its own half of IDS as `ids`.


def data_parallel(ids, folder):
    model = exact_model()
    return two_steps(model, DistributedDataParallel(model, find_unused_parameters=False), ids)


def fsdp(ids, folder, checkpointing=False):
    model = exact_model()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in list(model.modules()):
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module)
    fully_shard(model)
    forwards = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: forwards.append(1))
    result = two_steps(model, model, ids)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {**result, "sharded": sharded(model), "state": state, "forwards": len(forwards)}


def fsdp_with_checkpointing(ids, folder):
    return fsdp(ids, folder, checkpointing=True)


def fsdp_by_transformers(ids, folder):
    model = IHAForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float64, distributed_config=DistributedConfig(fsdp_size=PROCESSES)
    ).train()
    result = two_steps(model, model, ids)
    model.save_pretrained(folder / "from fsdp")
    return {**result, "sharded": sharded(model)}


def llama_into_shards(ids, folder):
    torch.manual_seed(dist.get_rank())
    model = IHAForCausalLM.from_pretrained(
        folder / "llama",
        config=IHAConfig.from_llama(LlamaConfig.from_pretrained(folder / "llama"), num_pseudo_heads=2),
        dtype=torch.float64,
        distributed_config=DistributedConfig(fsdp_size=PROCESSES),
    )
    with torch.no_grad():
        logits = whole(model(IDS).logits)
    return {"logits": logits, "parameters": {name: whole(p) for name, p in model.named_parameters()}}


def tensor_parallel(ids, folder):
    model = IHAForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, tp_plan="auto").eval()
    with torch.no_grad():
        logits = whole(model(IDS).logits)
        text = model.generate(IDS, max_new_tokens=8, do_sample=False)
    split = {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    result = two_steps(model.train(), model, IDS)
    model.save_pretrained(folder / "from tp")
    return {**result, "logits": logits, "text": text, "split": split}


def fsdp_by_accelerate(ids, folder):
    accelerator = Accelerator(cpu=True)
    # What Accelerator(fsdp_plugin=...) does on accelerators; on the CPU it drops the plugin without a word.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        cpu_ram_efficient_loading=True,
        reshard_after_forward=True,
    )
    model = exact_model()
    if dist.get_rank():
        torch.nn.init.zeros_(model.model.layers[0].self_attn.mixer.q_mix)  # the first process's values are taken
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
    result = two_steps(model, model, ids, optimizer)
    return {**result, "sharded": sharded(model), "state": accelerator.get_state_dict(model)}


SCENARIOS = (
    data_parallel,
    fsdp,
    fsdp_with_checkpointing,
    fsdp_by_transformers,
    llama_into_shards,
    tensor_parallel,
    fsdp_by_accelerate,  # the last, for it leaves a global state
)


def work(folder: Path):
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=60),
    )
    for scenario in SCENARIOS:
        try:
            result = scenario(IDS[rank::PROCESSES], folder)
        except Exception:  # the test of this scenario shows it; the others run on
            result = {"error": traceback.format_exc()}
        torch.save(result, folder / f"{scenario.__name__}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where both processes have left their results."""
    folder = tmp_path_factory.mktemp("distributed")
    exact_model().save_pretrained(folder / "model")
    llama().save_pretrained(folder / "llama")
    here = {"WORLD_SIZE": str(PROCESSES), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(PROCESSES):
        environment = {**os.environ, **here, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(folder / f"log-{rank}", "w") as log:
            command = [sys.executable, __file__, str(folder)]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        for process in processes:
            process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return folder


@pytest.fixture
def results(folder):
    def of(scenario):
        loaded = []
        for rank in range(PROCESSES):
            file = folder / f"{scenario.__name__}-{rank}.pt"
            assert file.exists(), (folder / f"log-{rank}").read_text()[-4000:]
            loaded.append(torch.load(file))
            assert "error" not in loaded[-1], loaded[-1]["error"]
        return loaded

    return of


@pytest.fixture(scope="module")
def alone():
    """One process with the whole batch."""
    model = exact_model()
    return two_steps(model, model, IDS)


def assert_close(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        # Llama's norms compute in float32 in every model.
        assert (tensors[name] - tensor).abs().max() <= 1e-6 * tensor.abs().max(), name


def assert_steps_are_those_of_one_process(results, alone):
    for result in results:
        for gradients, expected in zip(result["gradients"], alone["gradients"], strict=True):
            assert_close(gradients, expected)
        assert_close(result["parameters"], alone["parameters"])


def test_ddp_finds_every_parameter_used_and_steps_as_one_process(results, alone):
    ranks = results(data_parallel)
    assert_steps_are_those_of_one_process(ranks, alone)
    first, second = ranks[0]["gradients"]
    for layer in (0, 2):
        q_mix = f"model.layers.{layer}.self_attn.mixer.q_mix"
        assert not first[q_mix][:-1].any()  # the collapse reads the last pseudo-head only, until the first step
        assert first[q_mix][-1].any()
        assert second[q_mix][:-1].flatten(1).any(1).all()


LAYERS = ["FSDPIHADecoderLayer"] * 3
WITH_ENDS = sorted([*LAYERS, "FSDPEmbedding", "FSDPIHAForCausalLM", "FSDPLinear", "FSDPLlamaRMSNorm"])


@pytest.mark.parametrize(
    ("scenario", "modules"),
    [
        (fsdp, [*LAYERS, "FSDPIHAForCausalLM"]),
        (fsdp_with_checkpointing, [*LAYERS, "FSDPIHAForCausalLM"]),
        (fsdp_by_transformers, WITH_ENDS),
        (fsdp_by_accelerate, WITH_ENDS),
    ],
    ids=["fully_shard", "with checkpointing", "Transformers", "accelerate"],
)
def test_fsdp2_shards_the_layers_and_steps_as_one_process(scenario, modules, results, alone):
    ranks = results(scenario)
    assert_steps_are_those_of_one_process(ranks, alone)
    for result in ranks:
        assert result["sharded"] == modules
    if "state" in ranks[0]:
        assert_close(ranks[0]["state"], alone["parameters"])


def test_a_llama_folder_loads_into_shards_with_the_values_of_one_process(results):
    with torch.no_grad():
        logits = llama()(IDS).logits
    first, second = results(llama_into_shards)
    assert_close({"logits": first["logits"]}, {"logits": logits})
    for name, tensor in first["parameters"].items():
        assert torch.equal(tensor, second["parameters"][name])
        if name.endswith("v_mix"):
            assert torch.equal(tensor.sum(0), 2 * torch.eye(2, dtype=torch.float64))
            assert not torch.equal(tensor[0], tensor[1])


def test_checkpointing_under_fsdp2_runs_each_layer_once_more(results):
    layers_and_steps = 3 * 2
    assert [result["forwards"] for result in results(fsdp)] == [layers_and_steps] * 2
    assert [result["forwards"] for result in results(fsdp_with_checkpointing)] == [2 * layers_and_steps] * 2


def test_tensor_parallelism_splits_the_mlp_and_leaves_attention_whole(results):
    for result in results(tensor_parallel):
        mlp = {name: shape for name, shape in result["split"].items() if ".layers." in name}
        shapes = {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
        assert mlp == {
            f"model.layers.{layer}.mlp.{name}.weight": shape for layer in range(3) for name, shape in shapes.items()
        }


def test_tensor_parallelism_computes_generates_and_trains_as_one_process(results, alone):
    model = exact_model().eval()
    with torch.no_grad():
        logits = model(IDS).logits
        text = model.generate(IDS, max_new_tokens=8, do_sample=False)
    ranks = results(tensor_parallel)
    assert_steps_are_those_of_one_process(ranks, alone)
    for result in ranks:
        assert_close({"logits": result["logits"]}, {"logits": logits})
        assert torch.equal(result["text"], text)


@pytest.mark.parametrize(
    ("scenario", "saved"), [(fsdp_by_transformers, "from fsdp"), (tensor_parallel, "from tp")], ids=["FSDP2", "TP"]
)
def test_what_sharded_processes_save_is_one_whole_model(scenario, saved, results, folder, alone):
    results(scenario)
    model = IHAForCausalLM.from_pretrained(folder / saved, dtype=torch.float64)
    assert_close({name: p.detach() for name, p in model.named_parameters()}, alone["parameters"])
    assert (folder / saved / "attention.py").exists()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
