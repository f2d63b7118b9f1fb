"""Run the recipe under FSDP2 on CPUs: `torchrun --nproc_per_node 2 tests/fsdp2_on_cpu.py <recipe options>` (RECIPE=ares_dapo: another one).

accelerate gives FSDP to accelerators only and runs plain DDP on CPUs without a word (the recipe then stops, see
rlvr_launch.check_distributed). This test-only wrapper tells accelerate's state that the run is FSDP, so that sharded
parameters, DTensor gradients and the engine's gathering push are exercised on a machine without a GPU.
"""

import importlib
import os
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "recipes")]

original_init = AcceleratorState.__init__


def init_with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
    original_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


if __name__ == "__main__":
    AcceleratorState.__init__ = init_with_fsdp
    importlib.import_module(os.environ.get("RECIPE", "grpo_tokenclip")).main()
