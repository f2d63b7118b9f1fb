"""Runs that are stopped and go on: one writer a folder, settings that a checkpoint overrides, the end by a signal."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_launch import log, make_run, parse, refusal, settle, state
from transformers import TrainerCallback

import rlvr_launch
import rlvr_resume
from grpo_tokenclip import GRPOTokenClipConfig
from optimizers import OPTIMIZERS, make_optimizer
from rlvr_common import run
from rlvr_launch import complete_checkpoints
from rlvr_report import RunReport, read_metrics
from rlvr_resume import (
    OPTIMIZER_FLAGS,
    Stopped,
    check_resumed,
    hold,
    let_go,
    read_settings,
    set_aside,
    settings_of,
    stop_line,
    stoppable,
    write_settings,
)
from stability import read_ledger, write_manifest
from training import REPO, make_ours, options


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """An empty working directory, no launcher, and afterwards no folder held and the signals as they were."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in rlvr_resume.SIGNALS}
    yield
    rlvr_launch.unclaim()
    let_go()
    for number, handler in before.items():
        signal.signal(number, handler)


# --- one run a folder -------------------------------------------------------------------------------------------------

HOLDER = """
import os, socket, sys
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire(blocking=False)
open(sys.argv[1], "w").write(f"pid {os.getpid()} on {socket.gethostname()}")
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def another_run(folder):
    """A process that holds the folder."""
    command = [sys.executable, "-c", HOLDER, str(folder / rlvr_resume.LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_run_in_a_folder_is_refused_and_after_a_kill_it_is_not(tmp_path):
    folder = make_run(tmp_path / "a", 5)
    with another_run(folder) as other:
        for argv in ([], ["--resume_from_checkpoint", "last"], ["--resume_from_checkpoint", "a/checkpoint-5"]):
            message = refusal("--output_dir", "a", *argv)
            assert message.startswith(f"error: {folder} is being written by a run that goes on (pid {other.pid} on ")
            assert socket.gethostname() in message and f"(kill {other.pid})" in message and "\n" not in message
            assert "another --output_dir" in message
        assert settle("b", True, "a/checkpoint-5")[0] == tmp_path / "b"  # reads there, writes here
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert settle("a", True, "last") == (folder, folder / "checkpoint-5")
        assert rlvr_resume.HELD.keys() == {folder, tmp_path / "b"}


def test_a_run_that_has_ended_is_no_living_one(tmp_path):
    make_run(tmp_path / "a", 5)
    assert "already holds a run" in refusal("--output_dir", "a")
    assert rlvr_resume.HELD == {}


def test_the_default_folder_moves_on_beside_a_living_run(tmp_path):
    with another_run(make_run(tmp_path / "a", 5)):
        assert settle("a", explicit=False)[0].name == "a-2"


def test_the_lock_names_this_process_and_is_given_back(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    hold(folder)
    hold(folder)  # is this process's already
    assert (folder / "run.lock").read_text() == f"pid {os.getpid()} on {socket.gethostname()}\n"
    taken = [sys.executable, "-c", HOLDER, str(folder / "run.lock")]
    assert b"Timeout" in subprocess.run(taken, capture_output=True, stdin=subprocess.DEVNULL).stderr
    let_go()
    assert (folder / "run.lock").read_text() == "" and rlvr_resume.HELD == {}
    with another_run(folder), pytest.raises(ValueError, match="is being written"):
        hold(folder)


def test_without_locks_a_run_warns_and_goes_on(tmp_path, monkeypatch):
    def none(fd, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.warns(UserWarning, match="a cannot be locked .* nothing keeps a second run"):
        assert settle("a")[0] == tmp_path / "a"
    assert rlvr_resume.HELD == {}


def test_a_start_that_failed_leaves_no_lock(tmp_path):
    make_run(tmp_path / "a", 5)
    (tmp_path / "a" / "checkpoint-5" / "trainer_state.json").write_text("no")
    assert "cannot be read" in refusal("--output_dir", "runs/b", "--resume_from_checkpoint", "a/checkpoint-5")
    assert rlvr_resume.HELD == {} and not (tmp_path / "runs").exists()


def test_a_run_that_breaks_gives_its_folder_back(tmp_path):
    settle("a")
    trainer = make_ours(tmp_path / "a", max_completion_length=4)
    trainer.train = lambda resume_from_checkpoint: (_ for _ in ()).throw(RuntimeError("an error in training"))
    with pytest.raises(RuntimeError, match="an error in training"):
        run(trainer)
    assert rlvr_resume.HELD == {}


def test_the_main_process_decides_and_the_others_end_without_a_word(monkeypatch):
    """Two processes, as rank 1 sees it."""
    second = type("State", (), {"is_main_process": False, "num_processes": 2})
    monkeypatch.setattr(rlvr_launch, "PartialState", second)
    for answer in ("a", ValueError("refused")):
        monkeypatch.setattr(
            rlvr_launch, "broadcast_object_list", lambda box, answer=answer: box.__setitem__(0, answer)
        )
        if answer == "a":
            assert rlvr_launch.decided_by_main(None) == "a"
            continue
        with pytest.raises(SystemExit) as end:
            rlvr_launch.decided_by_main(None)
        assert end.value.code == 1


# --- settings ---------------------------------------------------------------------------------------------------------


def config(tmp_path, checkpoint=None, **changes):
    return GRPOTokenClipConfig(**options(tmp_path / "a", **changes), resume_from_checkpoint=checkpoint)


def made_with(tmp_path, step=3, controls=None, ended=6, **changes):
    """A checkpoint's two small files."""
    checkpoint = tmp_path / "a" / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": ended}))
    write_settings(checkpoint, settings_of(config(tmp_path, **changes)), controls or {})
    return str(checkpoint)


def test_the_same_settings_say_nothing(tmp_path):
    assert check_resumed(config(tmp_path, made_with(tmp_path))) is None


def test_what_differs_and_takes_effect_is_one_line(tmp_path):
    checkpoint = made_with(tmp_path, rollout_dtype="fp8", token_clip="icepop")
    line = check_resumed(config(tmp_path, checkpoint, rollout_dtype="int4", token_clip="icepop", temperature=0.5))
    assert line == "resumed with other settings: temperature 0.5 (was 1.0), rollout_dtype int4 (was fp8)"


def test_steps_saves_and_logs_may_change_freely(tmp_path):
    changes = {
        "max_steps": 50,
        "save_steps": 7,
        "save_strategy": "steps",
        "logging_steps": 5,
        "eval_every": 2,
        "report_to": "all",
    }
    assert check_resumed(config(tmp_path, made_with(tmp_path), **changes | {"report_to": "none"})) is None


@pytest.mark.parametrize(
    ("made", "asked", "sentence"),
    [
        ({}, {"learning_rate": 5e-4}, "--learning_rate 0.0005 (was 0.001) would be ignored"),
        ({}, {"weight_decay": 0.1}, "--weight_decay 0.1 (was 0.0) would be ignored"),
        ({}, {"adam_beta2": 0.9, "adam_epsilon": 1e-6}, "--adam_beta2 0.9 (was 0.999), --adam_epsilon 1e-06 (was 1e-08) would"),
        ({}, {"optim": "sgd"}, "--optim sgd (was adamw_torch_fused) would"),
        ({}, {"optim_method": "adamw"}, "--optim_method adamw (was unset) would"),
        ({"optim_method": "ares"}, {"optim_method": "ares", "rank_max": 8}, "--rank_max 8 (was unset) would"),
        ({"optim_method": "ares"}, {"optim_method": "ares", "seed": 8}, "--seed 8 (was 3) would"),
        ({"optim_method": "sgd"}, {"optim_method": "sgd", "momentum": 0.5}, "--momentum 0.5 (was unset) would"),
    ],
)  # fmt: skip
def test_what_the_optimizers_state_overrides_is_refused(tmp_path, made, asked, sentence):
    checkpoint = made_with(tmp_path, **made)
    with pytest.raises(ValueError) as error:
        check_resumed(config(tmp_path, checkpoint, **asked))
    message = str(error.value)
    assert sentence in message and f"--model_name_or_path {checkpoint}" in message and "\n" not in message
    was = re.findall(r"(--\w+) \S+ \(was (\S+)\)", message)
    assert f"keep {', '.join(f'{flag} {value}' for flag, value in was)}, or start" in message


def test_a_seed_may_change_where_no_optimizer_keeps_it(tmp_path):
    assert check_resumed(config(tmp_path, made_with(tmp_path), seed=8)).endswith("seed 8 (was 3)")


def test_a_setting_that_the_run_itself_changed_is_refused_by_name(tmp_path):
    checkpoint = made_with(tmp_path, controls={"max_grad_norm": 0.25, "learning_rate_scale": 0.5})
    assert check_resumed(config(tmp_path, checkpoint)) is None  # arguments are compared with arguments
    with pytest.raises(
        ValueError, match=r"--max_grad_norm 2.0 \(was 1.0\) would be ignored, .* keeps 0.25, .*control.yaml"
    ):
        check_resumed(config(tmp_path, checkpoint, max_grad_norm=2.0))


def test_a_checkpoint_without_settings_says_nothing(tmp_path):
    checkpoint = made_with(tmp_path)
    (Path(checkpoint) / rlvr_resume.SETTINGS).unlink()
    assert check_resumed(config(tmp_path, checkpoint, learning_rate=5e-4)) is None


def test_settings_that_cannot_be_read_are_named(tmp_path):
    checkpoint = made_with(tmp_path)
    (Path(checkpoint) / rlvr_resume.SETTINGS).write_text("{")
    with pytest.raises(ValueError, match="settings.json cannot be read"):
        check_resumed(config(tmp_path, checkpoint))


GROUP_KEYS = {  # key of a param_group -> the flag that sets it; None: no flag does
    "params": None, "param_names": None, "ns_method": None, "ns_coeffs": None, "ns_reset_steps": None,
    "lr": "learning_rate", "weight_decay": "weight_decay", "betas": "adam_beta1", "eps": "adam_epsilon",
    "momentum": "momentum", "alpha": None, "dampening": None, "nesterov": None, "maximize": None, "foreach": None, "fused": None,
    "capturable": None, "differentiable": None, "amsgrad": None, "decoupled_weight_decay": None, "centered": None,
    "rank_max": "rank_max", "rank_min": "rank_min", "rank_ema": "rank_ema", "power_iters": "power_iters", "step": "ares_step",
    "rank_mode": "rank_mode", "low_rank": "no_low_rank", "oversample": None, "energy_power": None, "spectral": None, "skipped": None,
    "seed": "seed", "use_muon": None, "use_adjusted_lr": None, "weight_decouple": None, "ns_steps": None, "rank": "rank_max",
    "update_proj_gap": "galore_gap", "scale": "galore_scale", "projection_type": None, "fixed_decay": None, "cautious_weight_decay": None,
}  # fmt: skip


@pytest.mark.parametrize("method", OPTIMIZERS)
def test_every_flag_that_an_optimizer_keeps_in_its_groups_is_known(tmp_path, method):
    """A new optimizer or option must be sorted here, or a resume would ignore it without a word."""
    layer = torch.nn.Module()
    layer.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
    optimizer = make_optimizer(layer, config(tmp_path, optim_method=method))
    keys = {key for group in optimizer.param_groups for key in group}
    assert keys - GROUP_KEYS.keys() == set()
    assert {GROUP_KEYS[key] for key in keys} - {None, "seed"} <= OPTIMIZER_FLAGS


def test_flags_of_the_lists_exist():
    known = {f.name for f in dataclasses.fields(GRPOTokenClipConfig)}
    assert OPTIMIZER_FLAGS <= known
    assert all(any(name.startswith(part) for name in known) for part in rlvr_resume.FREE_PARTS)
    assert not {"learning_rate", "beta", "rollout_dtype", "temperature"} & rlvr_resume.FREE_FLAGS


class Change(TrainerCallback):
    """What control.yaml does in the middle of a run."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.controls()["max_grad_norm"].set(0.25)
        self.trainer.controls()["learning_rate_scale"].set(0.5)
        self.trainer.changed |= {"max_grad_norm", "learning_rate_scale"}


def test_a_checkpoint_holds_what_was_asked_for_and_a_resume_saves_as_it_is_told(tmp_path):
    changes = {"save_strategy": "steps", "max_completion_length": 4, "rows": 8}
    first = make_ours(tmp_path / "a", max_steps=2, save_steps=2, **changes)
    first.add_callback(Change(first))
    first.train()
    checkpoint = tmp_path / "a/checkpoint-2"
    settings, controls = read_settings(checkpoint)
    assert (settings["learning_rate"], settings["max_grad_norm"]) == (1e-3, 1.0)
    assert controls == {"max_grad_norm": 0.25, "learning_rate_scale": 0.5}
    asked = config(
        tmp_path, str(checkpoint), token_clip="none", save_strategy="steps", save_steps=1, max_completion_length=4
    )
    assert check_resumed(asked) is None
    rest = make_ours(tmp_path / "a", max_steps=4, save_steps=1, resume_from_checkpoint=str(checkpoint), **changes)
    rest.train(resume_from_checkpoint=str(checkpoint))
    assert (tmp_path / "a/checkpoint-3").is_dir()  # the checkpoint says every second step
    assert rest._get_learning_rate() == pytest.approx(5e-4)  # what the run changed stays


# --- a finished run ---------------------------------------------------------------------------------------------------


def test_going_on_from_an_older_checkpoint_mixes_no_two_courses(tmp_path, capsys, monkeypatch):
    """Else `last`, and a rollback, would take up what was left behind."""
    monkeypatch.setattr(RunReport, "draw", lambda self: None)
    guarded = {"guard": "rollback", "guard_k": 1, "save_strategy": "steps", "max_steps": 4, "max_completion_length": 4}
    run(make_ours(tmp_path, save_steps=1, **guarded))
    assert json.loads((tmp_path / "guard.json").read_text())["good"] == [0, 1, 2, 3]
    rest = make_ours(tmp_path, save_steps=9, resume_from_checkpoint=str(tmp_path / "checkpoint-1"), **guarded)
    run(rest)
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["checkpoint-0", "checkpoint-1", "checkpoint-4"]
    assert rest.guard.ledger["good"] == [0, 1] and rest.guard.ledger["waiting"] == [4]
    aside = tmp_path / "set_aside"
    assert sorted(p.name for p in aside.iterdir()) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    line = f"going on from step 1: checkpoint-2, checkpoint-3, checkpoint-4 of the course before moved to {aside}"
    assert capsys.readouterr().out.count(line) == 1
    assert set_aside(tmp_path, 4) is None
    assert set_aside(tmp_path, 1).endswith("set_aside-2") and (tmp_path / "set_aside-2/checkpoint-4").is_dir()


@pytest.mark.parametrize("content", ["", "[1]", '{"good": [0]}'])
def test_a_ledger_that_cannot_be_read_is_named(tmp_path, content):
    (tmp_path / "guard.json").write_text(content)
    with pytest.raises(ValueError, match="guard.json cannot be read .* delete it to go on all the same"):
        read_ledger(tmp_path / "guard.json")


def test_a_finished_run_is_refused_before_the_model_is_loaded(tmp_path):
    made_with(tmp_path, step=6)
    (tmp_path / "a/checkpoint-6/rollout_state_0.pt").touch()
    message = refusal("--output_dir", "a", "--resume_from_checkpoint", "last", "--max_steps", "6")
    assert (
        "checkpoint-6 is at step 6 and the run ends at step 6: nothing is left to train; raise --max_steps" in message
    )
    assert "\n" not in message


def test_a_run_by_epochs_is_finished_with_its_epochs(tmp_path):
    checkpoint = made_with(tmp_path, step=6, ended=6, max_steps=-1, num_train_epochs=2)
    with pytest.raises(ValueError, match="nothing is left to train"):
        check_resumed(config(tmp_path, checkpoint, max_steps=-1, num_train_epochs=2))
    assert check_resumed(config(tmp_path, checkpoint, max_steps=-1, num_train_epochs=3)) is None
    assert check_resumed(config(tmp_path, checkpoint, max_steps=7)) is None


def test_a_checkpoint_of_another_run_is_refused_before_the_evaluation(tmp_path, capsys):
    first = make_ours(
        tmp_path / "a", max_steps=1, save_strategy="steps", save_steps=1, max_completion_length=4, rows=8
    )
    first.train()
    checkpoint = str(tmp_path / "a/checkpoint-1")
    other = make_ours(tmp_path / "a", rows=7, max_completion_length=4, resume_from_checkpoint=checkpoint)
    with pytest.raises(SystemExit, match="^error: .* made with other training rows"):
        run(other, other.train_dataset)
    assert "held-out" not in capsys.readouterr().out
    write_manifest(checkpoint)
    weights = tmp_path / "a/checkpoint-1/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    damaged = make_ours(tmp_path / "a", rows=8, max_completion_length=4, resume_from_checkpoint=checkpoint)
    with pytest.raises(SystemExit, match="^error: .*checkpoint-1 is damaged: .*model.safetensors holds other bytes"):
        run(damaged, damaged.train_dataset)
    assert "held-out" not in capsys.readouterr().out
    weights.write_bytes(whole)
    same = make_ours(
        tmp_path / "a", rows=8, max_completion_length=4, max_steps=2, eval_samples=1, resume_from_checkpoint=checkpoint
    )
    run(same, same.train_dataset.select([0]))
    assert (
        "held-out accuracy before training (before step 1; the checkpoint is loaded next): 1"
        in capsys.readouterr().out
    )


def test_a_run_that_is_not_there_is_named(tmp_path):
    message = refusal("--output_dir", "runs/nothing", "--resume_from_checkpoint", "last")
    assert f"--output_dir {tmp_path / 'runs/nothing'} does not exist" in message
    (tmp_path / "empty").mkdir()
    assert f"--output_dir {tmp_path / 'empty'} holds no checkpoint" in refusal(
        "--output_dir", "empty", "--resume_from_checkpoint", "last"
    )
    message = refusal("--resume_from_checkpoint", "last")
    assert "no run in" in message and "name the run with --output_dir" in message


# --- the end by a signal ----------------------------------------------------------------------------------------------


class Signal(TrainerCallback):
    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "code", "save_steps", "hint"),
    [
        (signal.SIGINT, 130, 2, "go on with --resume_from_checkpoint last (checkpoint-2 in "),
        (signal.SIGTERM, 143, 50, "no checkpoint exists yet, the first comes at --save_steps 50"),
    ],
)
def test_a_signal_ends_a_run_with_one_line_and_its_curve(tmp_path, capsys, number, code, save_steps, hint):
    changes = {"save_strategy": "steps", "save_steps": save_steps, "max_completion_length": 4}
    settle(tmp_path)
    trainer = make_ours(tmp_path, **changes)
    trainer.add_callback(Signal(3, number))
    closed = []
    trainer.close = lambda: closed.append(True)
    with pytest.raises(SystemExit) as end:
        run(trainer)
    assert end.value.code == code and closed == [True] and rlvr_resume.HELD == {}
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(f"stopped at step 3; {hint}")
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [
        1,
        2,
    ]  # the step's line comes after its end


def test_an_interrupt_that_is_no_signal_is_not_swallowed(tmp_path):
    trainer = make_ours(tmp_path, max_completion_length=4)
    trainer.train = lambda resume_from_checkpoint: (_ for _ in ()).throw(KeyboardInterrupt)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(trainer)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_is_passed_on_by_a_launcher_and_counts_once():
    with pytest.raises(Stopped) as stop, stoppable():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    assert stop.value.code == 130
    os.kill(os.getpid(), signal.SIGTERM)  # the process is ending: ignored


def test_an_error_after_the_signal_is_the_stop():
    """A collective that breaks because another rank has left."""
    with pytest.raises(Stopped), stoppable():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Stopped as stop:
            raise RuntimeError("connection closed by peer") from stop
    with pytest.raises(RuntimeError), stoppable():
        raise RuntimeError("an error of its own")


def test_a_signal_while_loading_gives_the_folder_back(tmp_path, capsys):
    with pytest.raises(SystemExit) as end, rlvr_launch.one_sentence():
        settle("a")
        os.kill(os.getpid(), signal.SIGINT)
    assert end.value.code == 130 and capsys.readouterr().out == "stopped before it began\n"
    assert list(tmp_path.iterdir()) == []


def test_the_line_of_a_stopped_run(tmp_path):
    newest = tmp_path / "a/checkpoint-16"
    assert stop_line(22, 100, newest, 16) == (
        f"stopped at step 22; go on with --resume_from_checkpoint last (checkpoint-16 in {tmp_path / 'a'})"
    )
    assert stop_line(0, 0, None, 75.0).startswith("stopped before the first step; no checkpoint exists yet")
    assert stop_line(16, 16, newest, 16) == f"stopped at step 16, which was the last; its weights are in {newest}"


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=sys.stdout)
child.wait()
"""
CHILD = """
import ctypes, signal, sys, time
sys.modules["optimizers"] = sys.modules["stability_control"] = type(sys)("stub")  # a second of imports
sys.modules["optimizers"].OPTIMIZERS, sys.modules["stability_control"].flatten = {"a": set()}, None
sys.path.insert(0, %r)
import rlvr_resume
rlvr_resume.end_with_parent()
try:
    with rlvr_resume.stoppable():
        print("ready", flush=True)
        time.sleep(60)
except rlvr_resume.Stopped as stop:
    print(stop.code, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_trainer_ends_with_the_launcher_that_was_killed():
    command = [sys.executable, "-c", PARENT, CHILD % str(REPO)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        assert launcher.stdout.readline() == "143\n"


# --- what a run says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"num_minibatches": 4}, "--per_device_train_batch_size 8 or --num_minibatches 4"),
        ({"gradient_accumulation_steps": 2}, "--per_device_train_batch_size 8 or --gradient_accumulation_steps 2"),
        ({"steps_per_generation": 3}, "--per_device_train_batch_size 8 or --steps_per_generation 3"),
        ({"prompts_per_step": 4}, "--prompts_per_step 4"),
        ({}, "--per_device_train_batch_size 8"),
    ],
)
def test_too_few_rows_name_the_flags_that_were_set(tmp_path, changes, flags):
    with pytest.raises(ValueError, match=f"use more rows, or lower {flags}$"):
        make_ours(tmp_path, rows=1, **changes)


def run_of(rewards, folder, start=0, name="reward"):
    report = RunReport(folder, lines=1)
    report.on_train_begin(None, state(start, 100), None)
    for step, reward in enumerate(rewards, start + 1):
        log(report, step, **({} if reward is None else {name: reward, "reward": reward - (name == "accuracy")}))
    report.on_train_end(None, state(start + len(rewards), 100), None)


@pytest.mark.parametrize(
    ("rewards", "start", "name", "said"),
    [
        ([0.0] * 25, 0, "reward", 1),
        ([0.0, None] * 12, 0, "reward", 1),  # two updates a sampling
        ([0.0] * 9, 0, "reward", 0),
        ([0.0] * 9 + [0.125], 0, "reward", 0),
        ([0.0] * 15 + [0.5], 0, "reward", 1),
        ([0.0] * 25, 16, "reward", 0),  # resumed
        ([0.0] * 12, 0, "accuracy", 1),  # with a punishment: the reward is -1
        ([1.0] * 12, 0, "accuracy", 0),  # and here 0
        ([float("nan")] * 12, 0, "reward", 0),
    ],
)
def test_a_reward_of_0_in_the_first_steps_is_told_once(tmp_path, monkeypatch, capsys, rewards, start, name, said):
    monkeypatch.setattr(RunReport, "draw", lambda self: None)
    run_of(rewards, tmp_path / "a", start, name)
    out = capsys.readouterr().out
    assert out.count(f"{name} 0 for 10 steps: nothing can be learnt from groups without a success; see README") == said


def test_a_log_holds_no_frames_of_a_bar(monkeypatch, tmp_path, capsys):
    assert parse("--output_dir", "a")[0].disable_tqdm is True  # pytest's stderr is no terminal
    assert parse("--output_dir", "b", "--disable_tqdm", "false")[0].disable_tqdm is False
    monkeypatch.setattr(RunReport, "draw", lambda self: None)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert parse("--output_dir", "c")[0].disable_tqdm is False
    capsys.readouterr()
    for show in (False, True):
        report = RunReport(tmp_path / "run", bar=show)
        report.on_train_begin(None, state(0, 2), None)
        log(report, 1, reward=0.5)
        report.on_train_end(None, state(1, 2), None)
        said = capsys.readouterr()
        assert "step     1  reward 0.5" in said.out and ("train:" in said.err) == show


# --- real launches ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("how", ["interrupt", "terminate", "kill the launcher"])
def test_a_launched_recipe_is_stopped_and_goes_on(tmp_path, processes, how):
    accelerate = str(Path(sys.executable).parent / "accelerate")
    several = ["--multi_gpu", "--num_processes", "2"] if processes == 2 else []
    recipe = [
        str(REPO / "recipes/minirl_async_r3.py"),
        "--output_dir",
        "a",
        "--save_steps",
        "2",
        "--eval_problems",
        "4",
    ]
    recipe += ["--per_device_train_batch_size", str(64 // processes), "--num_minibatches", "1", "--eval_samples", "1"]
    command = [accelerate, "launch", *several, *recipe]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(tmp_path / "log", "w") as log:
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("a/checkpoint-*/rollout_state_0.pt")) and time.monotonic() < deadline:
        time.sleep(0.2)
    pid = int(re.match(r"pid (\d+) on ", (tmp_path / "a/run.lock").read_text())[1])
    second = subprocess.run(
        [*command, "--resume_from_checkpoint", "last"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert second.returncode and second.stderr.count(f"is being written by a run that goes on (pid {pid}") == 1
    if how == "interrupt":
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
    else:
        launcher.send_signal(signal.SIGTERM if how == "terminate" else signal.SIGKILL)
    launcher.wait(120)
    while "\nstopped at step " not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    while _group(launcher.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    text = (tmp_path / "log").read_text()
    assert text.count("stopped at step ") == 1 and re.search(
        r"stopped at step \d+; go on with --resume_from_check", text
    )
    assert _group(launcher.pid) == [] and (tmp_path / "a/curve.png").exists()
    assert "rlvr_common.py" not in text, text  # no stack of ours


def _group(session):
    """What still runs of a launch, engines and verifiers included: they carry its folder as their working directory."""
    import psutil

    own = [p for p in psutil.process_iter(["cwd", "pid"]) if p.info["cwd"] == os.getcwd() and p.pid != os.getpid()]
    return [p.pid for p in own if p.status() != psutil.STATUS_ZOMBIE]
