"""The launch files under recipes/configs/accelerate: accelerate itself reads each of them as what its name says."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

FOLDER = Path(__file__).resolve().parents[1] / "recipes" / "configs" / "accelerate"
KIND = {
    "single_gpu": "NO",
    "ddp": "MULTI_GPU",
    "fsdp2": "FSDP",
    "deepspeed_zero2": "DEEPSPEED",
    "deepspeed_zero3": "DEEPSPEED",
}


def test_every_launch_file_is_listed():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(KIND)


@pytest.mark.parametrize("name", sorted(KIND))
def test_accelerate_reads_the_launch_file(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert str(config.distributed_type).split(".")[-1] == KIND[name]
    assert config.use_cpu is False and (config.num_processes == 1) == (name == "single_gpu")
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if name.startswith("deepspeed"):
        assert config.deepspeed_config["zero_stage"] == int(name[-1])
