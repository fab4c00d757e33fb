"""
The example's train.py under FSDP2 on CPUs, which Accelerate turns into DDP without a word:

    torchrun --nproc_per_node 2 sharded.py TRAIN.PY ARGUMENTS
"""

import os
import runpy
import sys
from pathlib import Path

os.environ["ACCELERATE_USE_FSDP"] = "true"

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback
from trl import SFTConfig

from training_iha import IHATrainer

prepare = SFTConfig.__post_init__


def prepare_for_shards(self):
    self.fsdp = True
    self.fsdp_config = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    prepare(self)
    _ = self.device  # sets up the process group, as CPU processes
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class Sharded(TrainerCallback):
    def on_step_begin(self, args, state, control, model, **kwargs):
        layers = [module for module in model.modules() if hasattr(module, "self_attn")]
        assert layers and all(isinstance(module, FSDPModule) for module in (model, *layers))


def with_check(self, *args, **kwargs):
    create(self, *args, callbacks=[Sharded()], **kwargs)


if __name__ == "__main__":
    create, IHATrainer.__init__ = IHATrainer.__init__, with_check
    SFTConfig.__post_init__ = prepare_for_shards
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
