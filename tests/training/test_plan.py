"""The plan of a training: what is chosen, what memory is counted, and that Accelerate takes its configuration."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import ParallelismConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from configuration_iha import IHAConfig, flop_matched_schedule, preset
from training_iha import plan_training
from training_iha.memory import Layout, moments, step_memory
from training_iha.plan import MARGIN, _accelerate, layouts

LLAMA = preset("llama-3.1-8b")
HYBRID = preset("llama-3.1-8b", **flop_matched_schedule(32, 65536, 2))
SMALL = preset("smollm2-135m")


def test_states_by_hand():
    """8,030,374,400 parameters: 4 bytes of weight and of gradient, 8 of AdamW; ZeRO-3 has bfloat16 ones beside."""
    parameters = 8_030_261_248 + 32 * 2 * 2 * (32**2 + 8**2)
    memory = step_memory(LLAMA, 4096, 1, Layout("fsdp2", shards=8, checkpointing=True))
    share = -(-parameters // 8)
    assert (memory["weights"], memory["gradients"], memory["optimizer"]) == (4 * share, 4 * share, 8 * share)
    memory = step_memory(LLAMA, 4096, 1, Layout("deepspeed", shards=8, checkpointing=True))
    assert (memory["weights"], memory["gradients"], memory["optimizer"]) == (6 * share, 6 * share, 8 * share)


@pytest.mark.parametrize("size", [1, 2])
def test_activations_by_hand(size):
    """One layer, autocast: hidden 8, intermediate 20, H 4, G 2, d 2, 10 tokens; bytes per token, tensor by tensor."""
    config = IHAConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_pseudo_heads=size,
    )
    norms = (4 * 8 + 4 * 8 + 3 * 2 * 8) + (
        4 * 8 + 4 * 8 + 2 * 2 * 8
    )  # input, normed, casts for q k v; for gate and up
    kernel = size * (2 * (8 + 4 + 4) + 2 * 8 + 4 * 4)  # q k v, output, and the logarithm of each head's sum
    mixing = 2 * (8 + 4 + 4) + 2 * 8 if size > 1 else 0  # before mixing, after the collapse
    saved = 10 * (norms + kernel + mixing + 2 * 4 * 20)
    tables = 10 * 2 * 2 * 4
    assert moments(config, 10, 1, Layout("alone"))["forward"]["activations"] == saved + tables
    # With checkpointing only the layer's input is kept, and the backward of the MLP adds the gradient of the output
    # and those of the activation and of up, while that of their product takes the product's place.
    checkpointed = moments(config, 10, 1, Layout("alone", checkpointing=True))
    assert checkpointed["forward"]["activations"] == 10 * 4 * 8 + tables
    assert checkpointed["layer"]["activations"] >= saved + tables + 10 * (4 * 8 + 2 * 2 * 20)


def test_memory_grows_as_it_should():
    def activations(config, tokens, engine="fsdp2", sequence_shards=1, batch=1):
        layout = Layout(engine, 8, sequence_shards, checkpointing=True)
        return moments(config, tokens, batch, layout)["layer"]["activations"]

    assert activations(LLAMA, 65536) == 2 * activations(LLAMA, 32768)
    assert activations(LLAMA, 65536) > activations(preset("llama-3.1-8b", num_pseudo_heads=1), 65536)
    assert activations(LLAMA, 65536, sequence_shards=4) < activations(LLAMA, 65536) / 3
    by_heads = {"engine": "deepspeed", "sequence_shards": 4}
    assert activations(HYBRID, 65536, **by_heads) < activations(HYBRID, 65536, engine="deepspeed") / 3
    assert activations(LLAMA, 8192, batch=2) == 2 * activations(LLAMA, 8192)


# (config, tokens, GPUs, GB) -> engine, GPUs to a sequence, checkpointing, offload
CHOICES = {
    "small": ((SMALL, 2048, 1, 24), ("alone", 1, False, False)),
    # 16 bytes a parameter are 2.2 GB; what 30 layers keep of 32k tokens is more than 20 GB.
    "small, long": ((SMALL, 32768, 1, 24), ("alone", 1, True, False)),
    # 128 GB of weights, gradients and optimizer are more than one GPU has; a share of 16 GB fits beside the rest.
    "8b": ((LLAMA, 8192, 8, 80), ("fsdp2", 1, True, False)),
    "8b on one": ((LLAMA, 8192, 1, 80), ("deepspeed", 1, True, True)),
    "8b, long": ((LLAMA, 131072, 8, 80), ("fsdp2", 2, True, False)),
    "8b hybrid, long": ((HYBRID, 131072, 8, 80), ("deepspeed", 2, True, False)),  # a ring would lose the windows
    "8b on small GPUs": ((LLAMA, 65536, 8, 16), ("fsdp2", 4, True, True)),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choices(case):
    (config, tokens, gpus, gigabytes), expected = CHOICES[case]
    plan = plan_training(config, tokens, gpus, gigabytes)
    layout = plan.layout
    assert plan.fits
    assert (layout.engine, layout.sequence_shards, layout.checkpointing, layout.offload) == expected
    assert layout.shards == gpus
    assert plan.total_memory == sum(plan.memory.values()) <= (1 - MARGIN) * gigabytes * 1e9
    # Whatever is simpler does not fit.
    simpler = layouts(config, gpus)[: layouts(config, gpus).index(layout)]
    assert all(sum(step_memory(config, tokens, 1, way).values()) > (1 - MARGIN) * gigabytes * 1e9 for way in simpler)
    assert (plan.host_memory > 0) == layout.offload
    assert plan.arguments["gradient_checkpointing"] == layout.checkpointing
    assert json.loads(json.dumps(plan.to_dict()))["total_memory"] == plan.total_memory


def test_windows_are_never_put_in_a_ring_and_heads_are_divided():
    assert {way.engine for way in layouts(HYBRID, 8) if way.sequence_shards > 1} == {"deepspeed"}
    assert {way.sequence_shards for way in layouts(HYBRID, 64)} == {1, 2, 4, 8, 16, 32}  # H = 32
    nine = preset("smollm2-135m", **flop_matched_schedule(30, 4096, 2))  # H = 9, G = 3
    assert {way.sequence_shards for way in layouts(nine, 8)} == {1}
    assert {way.engine for way in layouts(LLAMA, 8)} == {"fsdp2"}
    assert {way.sequence_shards for way in layouts(LLAMA, 6)} == {1, 2}


def test_what_does_not_fit_says_what_would():
    plan = plan_training(LLAMA, 131072, 2, 24)
    assert not plan.fits
    assert plan.enough_gpus == 8
    assert plan_training(LLAMA, 131072, plan.enough_gpus, 24).fits
    assert not plan_training(LLAMA, 131072, 4, 24).fits
    assert plan.longest % 1024 == 0
    assert plan_training(LLAMA, plan.longest, 2, 24).fits
    assert not plan_training(LLAMA, plan.longest + 1024, 2, 24).fits
    hopeless = plan_training(LLAMA, 8192, 8, 1)
    assert (hopeless.fits, hopeless.enough_gpus, hopeless.longest) == (False, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SMALL, 0), "sequence_length=0 must be an integer of at least 1"),
        ((SMALL, 1024, 0), "gpus=0 must be an integer of at least 1"),
        ((SMALL, 1024, 12), "gpus=12 must be at most 8, or a multiple"),
        ((SMALL, 1024, 1, 0), "memory_gb=0 must be above 0"),
        ((SMALL, 1024, 1, float("nan")), "memory_gb=nan must be above 0"),
        ((SMALL, 1024, 1, 80, 0), "batch=0 must be an integer of at least 1"),
        ((preset("smollm2-135m", is_causal=False), 1024), "is_causal=False is an encoder's"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_training(*arguments)


LAYOUTS = sorted(
    {
        (layout, gpus)
        for gpus in (1, 2, 8, 16)
        for config in (LLAMA, HYBRID)
        for layout in layouts(config, gpus)
        if layout.sequence_shards in (1, 4)
    },
    key=str,
)


@pytest.mark.parametrize(("layout", "gpus"), LAYOUTS, ids=str)
def test_accelerate_takes_every_configuration(layout, gpus, tmp_path, monkeypatch):
    """Through Accelerate's own reader and launcher, up to the environment that the processes would get."""
    import yaml

    content = _accelerate(layout, gpus, max(gpus // 8, 1))
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump(content))
    config = load_config_from_file(str(file))  # raises for unknown keys, but for those of the inner dicts
    assert (config.num_processes, config.num_machines) == (gpus, max(gpus // 8, 1))
    known = vars(launch_command_parser().parse_args(["train.py"]))
    inner = {key: value for part in content.values() if isinstance(part, dict) for key, value in part.items()}
    assert inner.keys() <= known.keys()

    command = ["--config_file", str(file)]
    if gpus > 8:
        command += ["--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "29500"]
    args = launch_command_parser().parse_args([*command, "train.py"])
    args, *_ = _validate_launch_command(args)
    assert {key: getattr(args, key) for key in inner} == inner
    environment = environment_of_processes(args, layout)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    offloads = {"FSDP_OFFLOAD_PARAMS": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}
    assert any(environment.get(name) == value for name, value in offloads.items()) == layout.offload
    if gpus > 8:
        assert (args.machine_rank, args.main_process_ip) == (1, "10.0.0.1")
    if layout.sequence_shards > 1:
        for name, value in environment.items():
            if name.startswith("PARALLELISM_CONFIG_"):
                monkeypatch.setenv(name, value)
        parallelism = ParallelismConfig()
        assert parallelism.total_size == gpus
        ring = layout.engine == "fsdp2"
        assert (parallelism.cp_size, parallelism.sp_size) == ((4, 1) if ring else (1, 4))
        if ring:
            assert parallelism.cp_handler.cp_comm_strategy == "alltoall"
        else:
            assert parallelism.sp_handler.sp_seq_length_is_variable
            assert parallelism.sp_handler.sp_attn_implementation == "sdpa"


def environment_of_processes(args: Namespace, layout: Layout) -> dict[str, str]:
    if layout.engine == "alone":
        return prepare_simple_launcher_cmd_env(args)[1]
    if layout.engine == "fsdp2":
        return prepare_multi_gpu_env(args)
    args.deepspeed_fields_from_accelerate_config = ""
    return prepare_deepspeed_cmd_env(args)[1]


def test_a_real_launch_of_one_process(tmp_path):
    """On this machine a GPU may be missing; what one process is told does not depend on it."""
    file = tmp_path / "accelerate.yaml"
    file.write_text(plan_training(SMALL, 1024).accelerate_yaml())
    program = tmp_path / "train.py"
    program.write_text("import os\nprint(os.environ['ACCELERATE_MIXED_PRECISION'])\n")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout.strip()) == (0, "bf16"), done.stderr


def test_planning_needs_neither_trl_nor_peft(tmp_path):
    """In a process where neither can be imported, as where the extra `train` is not installed."""
    program = """
import sys
for name in ("trl", "peft"):
    sys.modules[name] = None
import training_iha
from configuration_iha import preset
assert training_iha.plan_training(preset("smollm2-135m"), 1024).fits
for name in ("IHATrainer", "lora_config"):
    try:
        getattr(training_iha, name)
    except ImportError as error:
        assert str(error) == f"training_iha.{name} needs pip install 'modeling-iha[train]'", error
    else:
        raise SystemExit(f"{name} was imported")
assert not hasattr(training_iha, "no_such_name")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_name_of_the_package_is_there():
    import training_iha

    names = {name: getattr(training_iha, name) for name in training_iha.__all__}
    assert all(callable(value) for value in names.values()), names


FILES = {
    "1gpu": (Layout("alone"), 1),
    "1gpu_offload": (Layout("deepspeed", 1, checkpointing=True, offload=True), 1),
    "8gpu": (Layout("fsdp2", 8), 8),
    "8gpu_offload": (Layout("fsdp2", 8, checkpointing=True, offload=True), 8),
    "8gpu_ring": (Layout("fsdp2", 8, 8), 8),
    "8gpu_ulysses": (Layout("deepspeed", 8, 8), 8),
    "64gpu": (Layout("fsdp2", 64), 64),
    "64gpu_ring": (Layout("fsdp2", 64, 8), 64),
    "64gpu_ulysses": (Layout("deepspeed", 64, 8), 64),
}


def test_the_files_of_the_examples_are_what_is_planned():
    import yaml

    folder = Path(__file__).parents[2] / "examples" / "accelerate"
    assert {file.stem for file in folder.iterdir()} == FILES.keys()
    for name, (layout, gpus) in FILES.items():
        content = yaml.safe_load((folder / f"{name}.yaml").read_text())
        assert content == _accelerate(layout, gpus, max(gpus // 8, 1)), name
