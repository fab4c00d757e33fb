"""
A program spread over CPU processes as it would be over GPUs: by FSDP2, which Accelerate turns into DDP on CPUs without
a word, and maybe by a ring of context parallelism; or by DeepSpeed.

    python spread.py fsdp|ring PROCESSES PROGRAM.PY ARGUMENTS
    accelerate launch --config_file FILE spread.py deepspeed PROGRAM.PY ARGUMENTS
"""

import os
import runpy
import sys
from pathlib import Path

os.environ["ACCELERATE_USE_FSDP"] = str(sys.argv[1] != "deepspeed")
sys.path.append(str(Path(__file__).parents[1] / "training"))

from accelerate.utils import ParallelismConfig
from cpu_ring import let_cpus_shard, use_cpu_ring
from forked import fork
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback
from trl import SFTConfig

from modeling_iha.modeling_iha import IHADecoderLayer
from training_iha import IHATrainer

WAY = sys.argv[1]
prepare, create = SFTConfig.__post_init__, IHATrainer.__init__


def prepare_for_shards(self):
    self.fsdp = True
    self.fsdp_config = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    if WAY == "ring":
        self.parallelism_config = ParallelismConfig(cp_size=int(os.environ["WORLD_SIZE"]))
    prepare(self)
    let_cpus_shard(self.device)  # which sets up the process group, as CPU processes


class Sharded(TrainerCallback):
    def on_step_begin(self, args, state, control, model, **kwargs):
        layers = [module for module in model.modules() if isinstance(module, IHADecoderLayer)]
        assert layers and all(isinstance(module, FSDPModule) for module in [model, *layers])


def with_check(self, *args, **kwargs):
    create(self, *args, callbacks=[Sharded()], **kwargs)


def without_compiling():
    """DeepSpeed's kernel for CPUs takes minutes to build, and serves inference alone."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


if __name__ == "__main__":
    sys.argv = sys.argv[2:]
    if WAY == "deepspeed":
        without_compiling()
    else:
        fork(int(sys.argv.pop(0)))
        IHATrainer.__init__ = with_check
        SFTConfig.__post_init__ = prepare_for_shards
    if WAY == "ring":
        use_cpu_ring()
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
