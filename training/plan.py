"""The simplest way to train a model at a length on some GPUs: what memory it takes, and Accelerate's configuration."""

from dataclasses import asdict, dataclass, field

import yaml

from configuration_iha import IHAConfig, attention_flops, count_parameters, linear_flops, plain_attention

from .memory import Layout, host_memory, step_memory

GPUS_PER_MACHINE = 8
# Left free: what CUDA and NCCL keep (some 2 GB), fragmentation, and the error of the estimate.
MARGIN = 0.15
GIGABYTE = 10**9
MOST_GPUS = 1024  # up to which more of them are looked for


@dataclass
class Plan:
    """
    What `plan_training` found. `memory` and `available` are bytes on one GPU, `host_memory` bytes of main memory on
    one machine. Where nothing fits, `fits` is False, the rest describes what comes closest, and `enough_gpus` and
    `longest` say what would fit instead: the least number of GPUs, and the longest rows in steps of 1024 tokens, or
    None.
    """

    fits: bool
    layout: Layout
    gpus: int
    sequence_length: int
    batch: int
    parameters: dict[str, int]
    memory: dict[str, int]
    available: int
    host_memory: int
    attention: dict[str, int]
    plain_attention: dict[str, int]
    linear: dict[str, int]
    accelerate: dict
    arguments: dict = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    enough_gpus: int | None = None
    longest: int | None = None

    @property
    def total_memory(self) -> int:
        return sum(self.memory.values())

    def to_dict(self) -> dict:
        """All of it as JSON values."""
        return {**asdict(self), "total_memory": self.total_memory}

    def accelerate_yaml(self) -> str:
        """The file for `accelerate launch --config_file`."""
        return yaml.safe_dump(self.accelerate, sort_keys=False)


def plan_training(
    config: IHAConfig, sequence_length: int, gpus: int = 1, memory_gb: float = 80, batch: int = 1
) -> Plan:
    """
    The first of these that fits, each without and then with gradient checkpointing: the one GPU that there is; all of
    several sharing weights, gradients and optimizer (FSDP2); the same with 2, 4, ... of them sharing each sequence: in
    a ring, or by heads (DeepSpeed's Ulysses) where the model has sliding layers, which the ring cannot do. Then all of
    it again with weights and optimizer offloaded to main memory, where only checkpointing is tried.

    Args:
        sequence_length: N, tokens of a row.
        gpus: how many; above 8, machines of 8.
        memory_gb: of one GPU, in 10^9 bytes, of which 15 % are left free.
        batch: rows at a time on each GPU, or on each group of GPUs that share a sequence.

    Raises:
        ValueError: a number is not positive, `gpus` is above 8 and no multiple of it, or the model is an encoder.
    """
    for name, value in (("sequence_length", sequence_length), ("gpus", gpus), ("batch", batch)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
    if not 0 < memory_gb < float("inf"):
        raise ValueError(f"memory_gb={memory_gb!r} must be above 0 and finite.")
    if gpus > GPUS_PER_MACHINE and gpus % GPUS_PER_MACHINE:
        raise ValueError(f"gpus={gpus} must be at most {GPUS_PER_MACHINE}, or a multiple: machines of 8 GPUs.")
    if not config.is_causal:
        raise ValueError("is_causal=False is an encoder's: only language models are planned for.")

    available = int(memory_gb * GIGABYTE)
    layout, fits = _choose(config, sequence_length, gpus, available, batch)
    machines = max(gpus // GPUS_PER_MACHINE, 1)
    plan = Plan(
        fits=fits,
        layout=layout,
        gpus=gpus,
        sequence_length=sequence_length,
        batch=batch,
        parameters=count_parameters(config),
        memory=step_memory(config, sequence_length, batch, layout),
        available=available,
        host_memory=host_memory(config, layout) // machines,
        attention=_without_layers(attention_flops(config, sequence_length)),
        plain_attention=_without_layers(attention_flops(plain_attention(config), sequence_length)),
        linear=linear_flops(config, sequence_length),
        accelerate=_accelerate(layout, gpus, machines),
        arguments=_arguments(layout, sequence_length, batch),
        notes=_notes(config, sequence_length, layout, gpus),
    )
    if not fits:
        plan.enough_gpus = _enough_gpus(config, sequence_length, gpus, available, batch)
        plan.longest = _longest(config, sequence_length, gpus, available, batch)
    return plan


def layouts(config: IHAConfig, gpus: int) -> list[Layout]:
    """What there is to choose from, simplest first."""
    if gpus == 1:
        spread = [Layout("alone")]
    else:
        by_heads = "sliding_attention" in config.layer_types
        spread = [Layout("fsdp2", gpus)]
        for size in (2**i for i in range(1, gpus.bit_length())):
            if gpus % size == 0 and (not by_heads or _heads_divide(config, size)):
                spread.append(Layout("deepspeed" if by_heads else "fsdp2", gpus, size))
    found = [
        Layout(way.engine, way.shards, way.sequence_shards, checkpointing)
        for way in spread
        for checkpointing in (False, True)
    ]
    # One GPU's offloading is DeepSpeed's.
    engines = {"alone": "deepspeed"}
    found += [
        Layout(engines.get(way.engine, way.engine), way.shards, way.sequence_shards, checkpointing=True, offload=True)
        for way in spread
    ]
    return found


def _heads_divide(config: IHAConfig, size: int) -> bool:
    """Whether Ulysses can give each of `size` devices its heads."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    return heads % size == 0 and (groups % size == 0 or size % groups == 0)


def _choose(config: IHAConfig, sequence_length: int, gpus: int, available: int, batch: int) -> tuple[Layout, bool]:
    """The first layout that fits and True, or the one that takes least and False."""
    needs = {}
    for layout in layouts(config, gpus):
        needs[layout] = sum(step_memory(config, sequence_length, batch, layout).values())
        if needs[layout] <= (1 - MARGIN) * available:
            return layout, True
    return min(needs, key=needs.get), False


def _enough_gpus(config: IHAConfig, sequence_length: int, gpus: int, available: int, batch: int) -> int | None:
    counts = [n for n in (1, 2, 4, 8) if n > gpus]
    counts += [n for n in range(2 * GPUS_PER_MACHINE, MOST_GPUS + 1, GPUS_PER_MACHINE) if n > gpus]
    return next((n for n in counts if _choose(config, sequence_length, n, available, batch)[1]), None)


def _longest(config: IHAConfig, sequence_length: int, gpus: int, available: int, batch: int) -> int | None:
    fitting, too_long = 0, (sequence_length + 1023) // 1024
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        if _choose(config, middle * 1024, gpus, available, batch)[1]:
            fitting = middle
        else:
            too_long = middle
    return fitting * 1024 or None


def _accelerate(layout: Layout, gpus: int, machines: int) -> dict:
    """For `accelerate launch --config_file`; which of several machines this is, and where the first is, it is told."""
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"alone": "NO", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}[layout.engine],
        "num_machines": machines,
        "num_processes": gpus,
        "mixed_precision": "bf16",
    }
    if layout.engine == "fsdp2":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": layout.offload,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if layout.engine == "deepspeed":
        device = "cpu" if layout.offload else "none"
        config["deepspeed_config"] = {
            "zero_stage": 3,
            "zero3_init_flag": True,
            "zero3_save_16bit_model": True,
            "offload_optimizer_device": device,
            "offload_param_device": device,
        }
        if machines > 1:
            config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"  # one `accelerate launch` on each
    if layout.sequence_shards > 1:
        sizes = {"parallelism_config_dp_shard_size": gpus // layout.sequence_shards}
        if layout.engine == "fsdp2":
            sizes |= {
                "parallelism_config_cp_size": layout.sequence_shards,
                "parallelism_config_cp_comm_strategy": "alltoall",  # allgather has the keys of all devices at once
            }
        else:
            sizes |= {
                "parallelism_config_sp_size": layout.sequence_shards,
                "parallelism_config_sp_backend": "deepspeed",
                "parallelism_config_sp_seq_length_is_variable": True,
                "parallelism_config_sp_attn_implementation": "sdpa",
            }
        config["parallelism_config"] = sizes
    return config


def _arguments(layout: Layout, sequence_length: int, batch: int) -> dict:
    """What the training's own arguments must be."""
    arguments = {
        "max_length": sequence_length,
        "per_device_train_batch_size": batch,
        "bf16": True,
        "gradient_checkpointing": layout.checkpointing,
    }
    if layout.sequence_shards > 1:
        # The ring gives each device a piece from the front and one from the back.
        pieces = 2 if layout.engine == "fsdp2" else 1
        arguments["pad_to_multiple_of"] = pieces * layout.sequence_shards
        arguments["packing"] = False
    return arguments


def _notes(config: IHAConfig, sequence_length: int, layout: Layout, gpus: int) -> list[str]:
    notes = []
    if sequence_length > config.max_position_embeddings:
        notes.append(
            f"{sequence_length} tokens are more than max_position_embeddings={config.max_position_embeddings}: set "
            "rope_parameters for them (examples/long_context: rope_theta)."
        )
    if layout.engine == "deepspeed":
        notes.append("DeepSpeed is needed: pip install 'deepspeed>=0.18.2'")
        notes.append("ZeRO-3 saves the model in bfloat16.")
    if layout.sequence_shards > 1:
        notes.append(
            "Rows are shared by GPUs: train with training_iha.IHATrainer, as the examples do, and sdpa attention."
        )
        whole = ", and set documents: whole" if layout.engine == "fsdp2" else ""
        notes.append(f"packing and pad_to_multiple_of are SFT's; for examples/long_context leave both out{whole}.")
    if gpus > GPUS_PER_MACHINE:
        notes.append("On each machine: accelerate launch --machine_rank N --main_process_ip FIRST --config_file ...")
    return notes


def _without_layers(flops: dict) -> dict[str, int]:
    return {part: count for part, count in flops.items() if part != "layers"}
