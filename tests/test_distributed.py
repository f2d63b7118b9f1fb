"""Two processes on gloo against one: the same samples, losses, metrics and weights, under DDP and FSDP2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_dsv32 import FLOOR, close, make_dsv32, step_values

from rlvr_report import read_metrics

REPO = Path(__file__).resolve().parents[1]
RUN = [
    "--max_steps=3", "--num_generations=4", "--max_completion_length=16", "--eval_problems=6", "--eval_samples=2",
    "--optim=sgd", "--learning_rate=0.5", "--max_grad_norm=0.0", "--lr_scheduler_type=constant", "--warmup_steps=0", "--token_clip=tis",
    "--rollout_dtype=float32", "--token_clip_high=0.9", "--scale_rewards=group", "--save_steps=2", "--eval_every=2",
    "--gradloc=directional", "--gradloc_every=2", "--layer_clip",
]  # fmt: skip
FSDP2 = [
    "--fsdp=full_shard",
    "--fsdp_config=" + json.dumps(
        {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"], "reshard_after_forward": True,
         "cpu_ram_efficient_loading": False}
    ),
]  # fmt: skip


def launch(processes, folder, *options, script="recipes/grpo_tokenclip.py"):
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    if processes == 1:
        command = [sys.executable]
    command += [str(REPO / script), *RUN, f"--output_dir={folder}", f"--expect_processes={processes}", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, cwd=folder.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return read_metrics(folder / "metrics.jsonl"), load_file(folder / "final" / "model.safetensors")


def compare(a, b):
    (records_a, weights_a), (records_b, weights_b) = a, b
    assert len(records_a) == len(records_b) == 5
    compared = 0
    for x, y in zip(records_a, records_b, strict=True):
        for name in ("loss", "grad_norm", "reward", "entropy", "mismatch/k3", "omega/p50", "rho/max", "eval/accuracy",
                     "token_clip/masked_frac", "completions/mean_length", "ratio/min",
                     "gradloc/top1_share", "gradloc/top10_share", "layer_clip/norm_before", "layer_clip/norm/layer_0"):  # fmt: skip
            if name in x:
                assert x[name] == pytest.approx(y[name], abs=1e-5, rel=1e-4), (x["step"], name)
                compared += 1
    assert compared >= 40
    assert sum("gradloc/top1_share" in r for r in records_a) == 1  # step 2 of 3
    assert any(r["grad_norm"] > 1e-3 for r in records_a if "grad_norm" in r)
    assert weights_a.keys() == weights_b.keys() - {"lm_head.weight"}  # FSDP2 writes the tied head out
    assert max((weights_a[k] - weights_b[k]).abs().max().item() for k in weights_a) < 1e-5


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return launch(1, tmp_path_factory.mktemp("one") / "run", "--per_device_train_batch_size=16")


def test_ddp_equals_one_process(one_process, tmp_path):
    compare(one_process, launch(2, tmp_path / "run", "--per_device_train_batch_size=8", "--expect_distributed=ddp"))


@pytest.mark.slow
def test_fsdp2_equals_one_process(one_process, tmp_path):
    two = launch(
        2,
        tmp_path / "run",
        "--per_device_train_batch_size=8",
        *FSDP2,
        "--expect_distributed=fsdp2",
        script="tests/fsdp2_on_cpu.py",
    )
    compare(one_process, two)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_resume_bit_for_bit(tmp_path, kind):
    options = ["--per_device_train_batch_size=8", f"--expect_distributed={kind}", *(FSDP2 if kind == "fsdp2" else [])]
    options += ["--optim=adamw_torch", "--learning_rate=1e-3"]  # an optimizer with a state to lose
    script = "tests/fsdp2_on_cpu.py" if kind == "fsdp2" else "recipes/grpo_tokenclip.py"
    whole = launch(2, tmp_path / "whole", *options, script=script)
    resumed = launch(
        2, tmp_path / "rest", f"--resume_from_checkpoint={tmp_path}/whole/checkpoint-2", *options, script=script
    )
    assert whole[1].keys() == resumed[1].keys()
    assert all(torch.equal(whole[1][k], resumed[1][k]) for k in whole[1])


@pytest.mark.slow
def test_fsdp_that_is_silently_ddp_stops_the_run(tmp_path):
    """What accelerate does with an FSDP request on CPUs: the run must not go on as DDP."""
    env = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [
        str(REPO / "recipes" / "grpo_tokenclip.py"),
        *RUN,
        f"--output_dir={tmp_path / 'run'}",
        "--per_device_train_batch_size=8",
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "asked for distributed type fsdp2, running as ddp" in done.stdout + done.stderr


# --- the guard --------------------------------------------------------------------------------------------------------


def guard_on_two(kind, folder, *drills):
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(REPO / "tests" / "guard_on_two.py"), kind, str(folder), *drills]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" agrees")}


@pytest.fixture(scope="module")
def ddp_drills(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drills")
    return folder, guard_on_two("ddp", folder)


@pytest.mark.slow
@pytest.mark.parametrize("drill", ["nan", "start", "spike", "stale", "full_disk"])
def test_what_breaks_on_one_of_two_processes_is_seen_by_both(ddp_drills, drill):
    assert drill in ddp_drills[1]


@pytest.mark.slow
def test_the_guard_rolls_sharded_weights_back(tmp_path):
    assert guard_on_two("fsdp2", tmp_path, "nan", "start", "full_disk") == {"nan", "start", "full_disk"}


@pytest.mark.slow
def test_the_floor_of_the_sequence_mask_spans_processes(ddp_drills, tmp_path):
    folder, agreed = ddp_drills
    assert "floor" in agreed
    one = make_dsv32(tmp_path, **FLOOR, per_device_train_batch_size=16)
    one.train()
    close(torch.load(folder / "floor" / "floor.pt"), step_values(one))
