"""Guard drills: break a run on purpose, and see what is noticed and when, what is restored, and how the run goes on.

Each drill trains a guarded run in which something breaks, then a clean one without a guard that does the same and leaves out what the
guard left out, and compares weights, optimizer and schedule bit for bit. tests/test_stability.py checks the outcomes on short
runs; results/dsv32/drills.py writes them down under the default thresholds.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from transformers import TrainerCallback

import stability
from grpo_tokenclip import GRPOTokenClipTrainer
from rlvr_launch import settle_output_dir
from stability import faults
from training import REPO, equal, length_reward, make_ours, weights

BOUNDS = [
    "grad_norm>50:critical",
    "entropy<0.001:critical",
    "reward<0.05:critical",
    "guard/effective_batch<-1:warn:10",
]
DRILL = {
    "guard": "rollback", "guard_k": 1, "guard_bounds": BOUNDS, "save_strategy": "steps", "save_steps": 2, "max_steps": 6,
    "reward": length_reward, "max_completion_length": 8, "steps_per_generation": 2, "rollout_dtype": "fp8", "token_clip": "icepop",
}  # fmt: skip
QUIET = {k: v for k, v in DRILL.items() if not k.startswith("guard")}


class Faulty:
    """Part of a trainer in which `fault` happens at some optimizer steps (counted from 1), every time such a step is made."""

    fault, steps = None, (5,)

    def _now(self):
        return self.state.global_step + 1 in self.steps

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        return loss * {"nan": math.nan, "spike": 1e4}.get(self.fault, 1.0) if self._now() else loss

    def score(self, model, inputs):
        batch = super().score(model, inputs)
        if self.fault == "entropy" and self._now():
            batch.entropies.zero_()
        return batch

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)
        if self.fault == "reward" and self._now():
            rewards = rewards * 0
            self._rewards = self._rewards * 0
            self._metrics["train"]["reward"].append(0.0)
        return rewards


class DropUpdate(TrainerCallback):
    """What a rollback amounts to: the same run with some steps' gradients left out."""

    def __init__(self, trainer, steps):
        self.trainer, self.steps = trainer, steps

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 in self.steps:
            self.trainer.model.zero_grad(set_to_none=True)


def faulty(folder, fault, at=5, make=make_ours, **changes):
    """A trainer that breaks at a step, or at each of several."""
    trainer = make(folder, **changes)
    steps = (at,) if isinstance(at, int) else tuple(at)
    trainer.__class__ = type("Faulty", (Faulty, type(trainer)), {"fault": fault, "steps": steps})
    trainer.rollout_func = trainer._rollout
    return trainer


def events(folder, kind=None):
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if kind is None or line.get("kind") == kind]


@dataclass
class Outcome:
    """What a drill found. after: steps from the faulty one, counted as 1, to the event that told; equal: to the clean run."""

    seen: str
    after: int
    to: int
    skipped: list
    equal: bool
    trainer: GRPOTokenClipTrainer
    clean: GRPOTokenClipTrainer


def same_state(a, b):
    """Weights, optimizer and schedule of two trainers, bit for bit."""
    rates = [t.lr_scheduler.state_dict()["_last_lr"] for t in (a, b)]
    states = [t.optimizer.state_dict() for t in (a, b)]
    return (
        a.state.global_step == b.state.global_step
        and equal(weights(a), weights(b))
        and equal(*states)
        and equal(*rates)
    )


def settle(folder, guarded, fault, at, settings, from_start, told=None):
    """The outcome of a guarded run that was rolled back once. from_start: the clean run starts anew, not from the checkpoint.

    told: the event that gave the fault away, where it is not the first critical alarm.
    """
    (back,) = json.loads((guarded.guard.folder / "guard.json").read_text())["rollbacks"]
    skipped = list(range(back["skip"][0], back["skip"][1] + 1))
    clean = faulty(folder / "clean", fault, at, **{k: v for k, v in settings.items() if not k.startswith("guard")})
    clean.add_callback(DropUpdate(clean, skipped))
    checkpoint = None if from_start else str(guarded.guard.folder / f"checkpoint-{back['to']}")
    clean.train(resume_from_checkpoint=checkpoint)
    first = at if isinstance(at, int) else min(at)
    if told is None:
        told = next(e for e in events(guarded.guard.folder, "alarm") if e["level"] == "critical")
    seen = f"{told['metric']} ({told['rule']})" if told.get("kind") == "alarm" else told["text"]
    return Outcome(seen, told["step"] - first + 1, back["to"], skipped, same_state(guarded, clean), guarded, clean)


def wrong_step(fault, folder, at=5, from_start=False, **changes):
    """NaN loss, a loss times 10,000, entropy that reads 0, or rewards that are all 0, at one step or several."""
    settings = DRILL | changes
    guarded = faulty(folder / "guarded", fault, at, **settings)
    stability.train(guarded)
    return settle(folder, guarded, fault, at, settings, from_start)


def stale_weights(folder, at=4, from_start=False, **changes):
    """Pushes do not arrive: the engine believes that it has the weights of step `at` and samples with those before. A rollback
    mends it."""
    settings = DRILL | {"steps_per_generation": 1, "max_steps": 8} | changes
    guarded = faulty(folder / "guarded", None, at, **settings)
    push = guarded.engine.push_weights

    def lost(model, version):
        if version < at - 1 or guarded.guard.ledger["rollbacks"]:
            return push(model, version)
        guarded.engine.version = version

    guarded.engine.push_weights = lost
    stability.train(guarded)
    return settle(folder, guarded, None, at, settings, from_start)


def corrupt_checkpoint(folder, at=7, from_start=False, **changes):
    """The last good checkpoint loses a hundred bytes on the disk, then a loss is NaN."""
    settings = DRILL | {"max_steps": 8} | changes
    guarded = faulty(folder / "guarded", "nan", at, **settings)

    class Corrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == at - 1 and not guarded.guard.ledger["rollbacks"]:
                path = folder / "guarded" / f"checkpoint-{max(guarded.guard.ledger['good'])}" / "optimizer.pt"
                path.write_bytes(path.read_bytes()[:-100] + bytes(100))

    guarded.add_callback(Corrupt())
    stability.train(guarded)
    (told,) = events(folder / "guarded", "corrupt")
    return settle(folder, guarded, "nan", at, settings, from_start, told | {"step": at})  # seen when it is needed


@contextmanager
def largest_file(size):
    """No file of this process may grow beyond `size` bytes: what a full disk or a quota does to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(folder, at=5, from_start=False, size=100_000, **changes):
    """The checkpoint of step at - 1 cannot be written (files end at `size` bytes), then a loss is NaN."""
    settings = DRILL | changes
    guarded = faulty(folder / "guarded", "nan", at, **settings)
    save = guarded._save_checkpoint

    def limited(*args):
        if guarded.state.global_step != at - 1:
            return save(*args)
        with largest_file(size):
            save(*args)

    guarded._save_checkpoint = limited
    stability.train(guarded)
    told = events(folder / "guarded", "disk")[0]
    return settle(folder, guarded, "nan", at, settings, from_start, told | {"step": at})  # seen by the write itself


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
import stability
from guard_drills import DRILL
from training import make_ours

trainer = make_ours({folder!r}, **DRILL | {changes!r})
save = trainer._save_optimizer_and_scheduler

def killed(output_dir):
    save(output_dir)
    if trainer.state.global_step == {at}:
        os.kill(os.getpid(), signal.SIGKILL)

trainer._save_optimizer_and_scheduler = killed
stability.train(trainer)
"""


def killed_while_writing(folder, at=4, from_start=False, **changes):
    """kill -9 while the checkpoint of step `at` is half written; then --resume_from_checkpoint last."""
    run = folder / "guarded"
    paths = [str(REPO), str(REPO / "recipes"), str(REPO / "tests")]
    code = KILLED.format(paths=paths, folder=str(run), at=at, changes=changes)
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums round by their number
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=os.environ | threads, capture_output=True)
    if done.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the run ended with {done.returncode} and not by a kill: {done.stderr.decode()[-2000:]}")
    (told,) = faults(run / f"checkpoint-{at}")
    args = SimpleNamespace(output_dir=str(run), resume_from_checkpoint="last")
    settle_output_dir(args, explicit=True)
    rest = make_ours(run, **DRILL | changes)
    stability.train(rest, args.resume_from_checkpoint)
    clean = make_ours(folder / "clean", **{k: v for k, v in (DRILL | changes).items() if not k.startswith("guard")})
    clean.train(resume_from_checkpoint=None if from_start else args.resume_from_checkpoint)
    to = stability.step_of(args.resume_from_checkpoint)
    return Outcome(told.replace(f"{run}/", ""), 1, to, [], same_state(rest, clean), rest, clean)
