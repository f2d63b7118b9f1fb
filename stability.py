"""StabilityGuard: watch a run, alert, stop it, or take it back to its last good checkpoint and past the batch that broke it.

    accelerate launch recipes/grpo_tokenclip.py --guard warn|halt|rollback        every recipe; `off` is the default
    python stability.py report runs/dsv32_stable                                  acceptance table, again at any time

Rules compare each step's metrics with absolute bounds or with the run's own recent history (see RULES). A broken rule is an event
of level info, warn or critical: one line in events.jsonl, on the console, in the tracker (`guard/level`), and to a hook.
On critical, `halt` stops with the checkpoint to go on from; `rollback` restores the last good checkpoint exactly, makes the
offending steps without an update, and stops after `--guard_retries`. A checkpoint is good when the `--guard_k` steps after it had
no alarm; the start of a run is one.

Source: the deployment guide for DeepSeek-V3.2's stabilisers (four core metrics, multi-level alerts, rollback, life cycle of checkpoints).
It names no threshold; ours were set on nine healthy runs of 150 steps (results/grpo_tokenclip/metrics.jsonl) and stand at RULES.
"""

import difflib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections import deque
from dataclasses import dataclass
from fnmatch import fnmatch
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer import rotate_checkpoints

from gradloc_methods import replayed_rng, rng_state
from rlvr_report import FULL_DISK, JsonLines, to_json
from rlvr_resume import complete_checkpoints, on_disk, step_of
from rollout import model_fingerprint
from stability_control import ControlFile, Stages, change, parse_stages
from stability_report import cause_of, glossary, write_acceptance

MODES = ("off", "warn", "halt", "rollback")
LEVELS = ("ok", "info", "warn", "critical")
WINDOW, MIN_HISTORY = 64, 16  # steps of history that relative bounds look at; and that they need


class GuardHalt(RuntimeError):
    """The guard stops the run; the message says why, and which checkpoint to go on from."""


class RollBack(Exception):
    """Raised inside training to leave it; `train` restores `checkpoint` and trains on."""


# --- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """metric (a name or a pattern), above (or below) bound, absolute or (times) a multiple of the run's own recent level."""

    text: str
    metric: str
    above: bool
    bound: float
    times: bool
    level: str
    patience: int


NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"


def parse_rule(text):
    """Rule text "metric>bound:level[:steps]"; a bound that ends in x is a multiple of the run's recent median. Raises ValueError.

    "grad_norm>15x:critical", "kl>0.5:warn:3", "entropy<0.1x:warn"
    """
    found = re.fullmatch(rf"([^<>:]+)([<>])({NUMBER})(x?):(info|warn|critical)(?::([1-9]\d*))?", text)
    if not found:
        raise ValueError(
            f"--guard_bounds {text!r} is not metric>bound:level[:steps], for example grad_norm>15x:critical or kl>0.5:warn:3"
        )
    metric, side, bound, times, level, patience = found.groups()
    if metric in UNWATCHED:
        raise ValueError(
            f"--guard_bounds {text!r}: the guard does not watch {metric}; it watches every other metric of the README's glossary"
        )
    return Rule(text, metric, side == ">", float(bound), bool(times), level, int(patience or 1))


# written down after the guard has looked at the step
UNWATCHED = ("loss", "learning_rate", "epoch", "step", "eval/accuracy", "eval/stderr", "guard/level")

# In the nine healthy runs: largest grad_norm 3.6 times the recent median, mismatch/k3 6.1 times and 0.004, entropy never below
# 0.28 times, sequences masked up to 0.80, five-step reward never below 0.71 of its peak.
RULES = (
    "grad_norm>6x:warn", "grad_norm>15x:critical",
    "kl>20x:warn", "kl>1:warn", "kl>10:critical",
    "mismatch/k3>20x:warn", "mismatch/k3>0.1:warn:3", "mismatch/k3>1:critical:3",
    "ratio/p99>2:warn:3", "omega/p99>5:warn:3",
    "*/masked_frac>0.9:warn:3",
    "routing/rollout_agreement<0.8:warn:3", "routing/rollout_agreement<0.5:critical:3",
    "support/agreement<0.9:warn:3", "support/agreement<0.5:critical:3", "support/replayed_frac<0.999:critical",
    "entropy<0.1x:warn", "entropy<0.02x:critical", "entropy>6x:warn:3",
    "guard/reward_share<0.6:warn", "guard/reward_share<0.4:critical",
    "guard/update_norm>10x:warn",
    "guard/stale>0.5:warn", "guard/stale>0.5:critical:2",
    "guard/effective_batch<0.02:warn:10",
    "verifier/timeout_frac>0.1:warn:3", "verifier/timeout_frac>0.9:critical:3",
)  # fmt: skip


def make_rules(changes=()):
    """RULES with a user's own on top: a rule replaces those of the same metric, side, kind and level."""
    rules = [parse_rule(text) for text in RULES]
    for text in changes:
        new = parse_rule(text)
        same = (new.metric, new.above, new.times, new.level)
        rules = [rule for rule in rules if (rule.metric, rule.above, rule.times, rule.level) != same] + [new]
    return rules


def unseen(rule, seen, known):
    """What to say of a bound that has nothing to compare, after a step that sampled. -> None, or (sentence, whether it is a mistake).

    seen: names of the metrics so far; known: names and patterns of metrics that a later step or another flag may bring. A name that is
    neither, and close to one that is, is misspelt; else it may be a metric that a recipe logs from a later step on.
    """
    if any(fnmatch(name, rule.metric) for name in seen):
        return None
    # of quantiles and layers all come at once: the pattern says nothing more once one of them is there
    later = [pattern for pattern in known if "*" not in pattern or not any(fnmatch(name, pattern) for name in seen)]
    if any(fnmatch(name, rule.metric) or fnmatch(rule.metric, name) for name in later):
        return f"--guard_bounds {rule.text}: no {rule.metric} so far; it is compared once a step has it", False
    names = {*seen, *known}
    names |= {f"*/{name.split('/')[-1]}" for name in names if "/" in name}
    near = difflib.get_close_matches(rule.metric, sorted(names), n=1, cutoff=0.8)
    if near:
        return f"--guard_bounds {rule.text}: no metric is named {rule.metric}; did you mean {near[0]}?", True
    return (
        f"--guard_bounds {rule.text}: no metric is named {rule.metric} so far; it is compared once a step has it "
        "(metrics.jsonl and the README's glossary have the names)",
        False,
    )


class Watch:
    """Judges one step's metrics after the other. `judge(values, broken)` -> events, each {rule, metric, value, bound, level}."""

    def __init__(self, rules):
        self.rules = rules
        self.history = {}  # metric -> deque of its recent values, cut at the bound of a broken relative rule
        self.streaks = {}  # (rule, metric) -> steps in a row beyond the bound
        self.rewards, self.reward_peak, self.reward_low, self.samplings = deque(maxlen=10), None, 0.0, 0

    def recent(self, metric, above):
        """The level that relative rules multiply: the recent median; for upper bounds at least a fifth of the recent largest,
        so that a metric which is often 0 raises no alarm when it is not."""
        past = self.history.get(metric, ())
        if len(past) < MIN_HISTORY:
            return None
        level = statistics.median(past)
        return max(level, 0.2 * max(past)) if above else level

    def bound(self, rule, metric):
        """The number a value is compared with, or None while there is too little history."""
        if not rule.times:
            return rule.bound
        level = self.recent(metric, rule.above)
        return None if level is None or level <= 0 else rule.bound * level

    def reward_share(self, reward):
        """Mean reward of the last 5 samplings as a share of the run's best mean of 10, from its lowest value (or 0) up; None
        during the first 10."""
        self.reward_low = min(self.reward_low, reward)
        self.rewards.append(reward)
        self.samplings += 1
        peak = self.reward_peak
        if len(self.rewards) == 10:
            mean = statistics.fmean(self.rewards)
            self.reward_peak = mean if peak is None else max(peak, mean)
        if self.samplings <= 10 or peak is None or peak <= self.reward_low:
            return None
        last = statistics.fmean(list(self.rewards)[-5:])
        return (last - self.reward_low) / (peak - self.reward_low)

    def judge(self, values, broken=()):
        """values: {metric: finite number}; broken: names of metrics that are NaN or infinite."""
        events = [
            {"rule": "not finite", "metric": name, "value": math.nan, "bound": None, "level": "critical"}
            for name in sorted(broken)
        ]
        values = dict(values)
        if "reward" in values:
            share = self.reward_share(values["reward"])
            if share is not None:
                values["guard/reward_share"] = share
        cuts = {}
        for rule in self.rules:
            for metric, value in values.items():
                if not fnmatch(metric, rule.metric):
                    continue
                bound = self.bound(rule, metric)
                beyond = bound is not None and (value > bound if rule.above else value < bound)
                if beyond and rule.times:
                    near = cuts.get(metric, bound)
                    cuts[metric] = min(near, bound) if rule.above else max(near, bound)
                streak = self.streaks[rule.text, metric] = (
                    self.streaks.get((rule.text, metric), 0) + 1 if beyond else 0
                )
                if beyond and streak >= rule.patience:
                    event = {"rule": rule.text, "metric": metric, "value": value, "bound": bound, "level": rule.level}
                    events.append(event)
        judged = [rule.metric for rule in self.rules if rule.times]
        for metric, value in values.items():
            if any(fnmatch(metric, pattern) for pattern in judged):
                self.history.setdefault(metric, deque(maxlen=WINDOW)).append(cuts.get(metric, value))
        return events

    def state_dict(self):
        """Plain numbers: all that the next judgement depends on."""
        return {
            "history": {metric: list(past) for metric, past in self.history.items()},
            "streaks": [[rule, metric, streak] for (rule, metric), streak in self.streaks.items() if streak],
            "rewards": list(self.rewards), "reward_peak": self.reward_peak, "reward_low": self.reward_low,
            "samplings": self.samplings,
        }  # fmt: skip

    def load_state_dict(self, state):
        """The counterpart of `state_dict`."""
        self.history = {metric: deque(past, maxlen=WINDOW) for metric, past in state["history"].items()}
        self.streaks = {(rule, metric): streak for rule, metric, streak in state["streaks"]}
        self.rewards = deque(state["rewards"], maxlen=10)
        self.reward_peak, self.reward_low = state["reward_peak"], state["reward_low"]
        self.samplings = state["samplings"]


# --- alerts -----------------------------------------------------------------------------------------------------------


class Alerts:
    """events.jsonl, the console and a hook. Only the main process writes; a hook that fails or hangs never stops training."""

    timeout_s = 10.0

    def __init__(self, folder, hook=None, main=True):
        self.path, self.hook, self.main = Path(folder) / "events.jsonl", hook, main
        self.lines = JsonLines(self.path)
        self.failures, self._threads = 0, []

    def tell(self, level, text, **fields):
        """One event. `text` is a sentence; warn and critical ones also go to the hook."""
        event = {"time": round(time.time(), 3), "level": level, "text": text, **fields}
        if not self.main:
            return event
        try:
            self.lines.write(event)
        except OSError as error:  # no file is worth turning an alarm into a crash
            tqdm.write(f"guard: {self.path} cannot be written ({error})")
        tqdm.write(f"guard [{level}] {text}")
        if self.hook and level in ("warn", "critical"):
            thread = threading.Thread(target=self._call, args=(to_json(event),), daemon=True)
            thread.start()
            self._threads.append(thread)
        return event

    def _call(self, event):
        try:
            if re.match(r"https?://", self.hook):
                request = urllib.request.Request(
                    self.hook, event.encode(), {"Content-Type": "application/json"}, method="POST"
                )
                urllib.request.urlopen(request, timeout=self.timeout_s).close()
            else:
                subprocess.run(
                    self.hook,
                    shell=True,
                    input=event,
                    text=True,
                    timeout=self.timeout_s,
                    check=True,
                    capture_output=True,
                )
        except (OSError, ValueError, HTTPException, subprocess.SubprocessError) as error:
            self.failures += 1
            if self.failures == 1:
                tqdm.write(f"guard: the hook {self.hook!r} failed ({error}); training goes on")

    def wait(self):
        """Until the hooks under way are done or have run out of time."""
        for thread in self._threads:
            thread.join(self.timeout_s + 1)
        self._threads.clear()


# --- checkpoints ------------------------------------------------------------------------------------------------------

MANIFEST, LEDGER = "guard_manifest.json", "guard.json"


def write_atomically(path, text):
    """Writes a file so that a reader, or a run that resumes after a kill, sees the old text or the new one."""
    path = Path(path)
    path.with_suffix(".tmp").write_text(text)
    os.replace(path.with_suffix(".tmp"), path)


def _crc(path):
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return crc


def write_manifest(checkpoint):
    """Size and CRC-32 of every file of a checkpoint, so that a torn or corrupt one is known before it is loaded."""
    own = {MANIFEST, Path(MANIFEST).with_suffix(".tmp").name}  # the second: left by a kill at this very place
    files = sorted(p for p in Path(checkpoint).rglob("*") if p.is_file() and p.name not in own)
    entries = {str(p.relative_to(checkpoint)): [p.stat().st_size, _crc(p)] for p in files}
    write_atomically(Path(checkpoint) / MANIFEST, json.dumps(entries))


def read_ledger(path):
    """What a run wrote down about its checkpoints and rollbacks. Raises ValueError, one sentence, where it cannot be read."""
    try:
        ledger = json.loads(path.read_text())
        return {name: ledger[name] for name in ("good", "waiting", "skip", "rollbacks", "changes")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error!r}): without it the run no longer knows which steps it leaves out and which checkpoints "
            "are good; delete it to go on all the same"
        ) from error


def faults(checkpoint):
    """What is wrong with a checkpoint, one sentence a file; [] for a whole one. Without a manifest only its absence is known."""
    checkpoint = Path(checkpoint)
    if not (checkpoint / MANIFEST).exists():
        return [f"{checkpoint} has no {MANIFEST}: it was not written to its end, or without a guard"]
    found = []
    try:
        entries = [(name, size, crc) for name, (size, crc) in json.loads((checkpoint / MANIFEST).read_text()).items()]
    except (ValueError, TypeError, AttributeError) as error:
        return [f"{checkpoint / MANIFEST} cannot be read ({error})"]
    for name, size, crc in entries:
        path = checkpoint / name
        if not path.exists():
            found.append(f"{path} is missing")
        elif path.stat().st_size != size:
            found.append(f"{path} has {path.stat().st_size:,} bytes where {size:,} were written")
        elif _crc(path) != crc:
            found.append(f"{path} holds other bytes than were written")
    return found


def removable(steps, good, keep, old=(), waiting=()):
    """Which checkpoints to delete so that `keep` are left (None: no limit). steps: on disk, rising; the others: sets of steps.

    Never the newest one, the last good one, or the one that waits longest to become good, so three may stay whatever `keep` is.
    First those that are not good, then the oldest; also every old one.
    """
    if not steps:
        return []
    protected = {steps[-1]} | ({max(good & set(steps))} if good & set(steps) else set())
    protected |= {min(set(waiting) & set(steps))} if set(waiting) & set(steps) else set()
    free = [step for step in steps if step not in protected]
    gone = [step for step in free if step in old]
    left = [step for step in sorted(free, key=lambda step: (step in good, step)) if step not in gone]
    if keep is not None:
        gone += left[: max(0, len(steps) - len(gone) - max(keep, len(protected)))]
    return sorted(gone)


def checkpoint_bytes(model, optimizer_states=2):
    """Estimate of one checkpoint: weights, and as many float32 states a trained weight as the optimizer keeps (AdamW: 2)."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return weights + 4 * optimizer_states * trained


def check_disk(folder, size, copies, budget_gb=None):
    """Raise ValueError unless `copies` checkpoints of `size` bytes fit the disk and the budget. -> sentence for the log."""
    folder = Path(folder).absolute()
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free, needed = shutil.disk_usage(place).free, size * copies
    text = f"{copies} checkpoints of about {size / 1e9:.3g} GB need {needed / 1e9:.3g} GB"
    if budget_gb is not None and needed > budget_gb * 1e9:
        raise ValueError(f"{text}, more than --guard_disk_gb {budget_gb:g}: lower --save_total_limit, or raise it")
    if needed > free:
        raise ValueError(f"{text}, and {place} has {free / 1e9:.3g} GB left: lower --save_total_limit or free some")
    return f"{text} of {free / 1e9:.3g} GB free"


# --- alignment of the two sides ---------------------------------------------------------------------------------------

# Mean |log pi - log mu| at equal weights that still is precision and no mistake: ten times what rollout.py reports for a 135M model
# (float16 as bfloat16, which is coarser); a server's other kinds of quantisation get the widest
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.3, "int8": 0.5, "fp8": 1.7, "int4": 3.0}
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "datasets", "peft")
ONE_SIDED = {"tokenizer_size", "chat_template"}  # engines get token ids: only training has a tokenizer


def differences(training, rollout):
    """Settings that both sides name and that differ, one sentence each."""
    return [
        f"{name} is {training[name]!r} in training and {rollout[name]!r} in the rollout engine"
        for name in training
        if name in rollout and training[name] != rollout[name]
    ]


def not_compared(training, rollout):
    """Settings that the rollout side does not tell, so that nobody can say whether they differ."""
    return [name for name in training if name not in rollout and name not in ONE_SIDED]


def training_side(trainer):
    """What the training side goes by; the engine's `describe()` has the same names."""
    tokenizer, model = trainer._tokenizer, trainer.accelerator.unwrap_model(trainer.model)
    template = tokenizer.chat_template or ""
    return {
        "model_type": model.config.model_type,
        "embeddings": model.get_input_embeddings().weight.shape[0],
        "eos_token_ids": sorted(set(trainer.eos_token_ids)),
        "pad_token_id": tokenizer.pad_token_id,
        "temperature": float(trainer.temperature),
        "top_p": float(trainer.top_p),
        "top_k": int(trainer.top_k),
        "min_p": float(trainer.min_p or 0.0),
        "version": trainer.state.global_step,
        "fingerprint": model_fingerprint(trainer.model_wrapped),
        "tokenizer_size": len(tokenizer),
        "chat_template": f"{zlib.crc32(template.encode()):08x}",
    }


def check_alignment(trainer):
    """Both sides described and compared, and one smoke step: sample a prompt, score it in training, run a backward.

    -> the record written to alignment.json; its "not_compared" names what the rollout side does not tell. Raises ValueError with
    the difference: a token that the model has no embedding for, settings or weights that differ, log-probs that disagree by more
    than the rollout precision explains, a gradient that is not finite.
    """
    engine = trainer.engine
    record = {"libraries": {name: version(name) for name in LIBRARIES}, "training": training_side(trainer)}
    side = record["training"]
    if side["tokenizer_size"] > side["embeddings"]:
        raise ValueError(
            f"the tokenizer has {side['tokenizer_size']} tokens and the model {side['embeddings']} embeddings: use the model's own "
            "tokenizer, or resize the model"
        )
    if engine is None:
        return record | {"rollout": None, "not_compared": not_compared(side, {})}
    trainer.sync_engine()
    if engine.fingerprint != side["fingerprint"]:  # changed since the engine was filled, as by a float32 master copy
        engine.push_weights(trainer.model_wrapped, trainer.state.global_step)
    prompt = trainer._tokenize_prompts([trainer.train_dataset[0]["prompt"]])[0][0]
    heat = {"temperature": trainer.temperature}
    sampled = engine.generate(
        [prompt], min(8, trainer.max_completion_length), sequence_ids=[2**41], **heat,
        top_k=trainer.top_k, top_p=trainer.top_p, min_p=trainer.min_p or 0.0,
    )  # fmt: skip
    record["rollout"] = engine.describe()
    record["not_compared"] = not_compared(side, record["rollout"])
    found = differences(side, record["rollout"])
    if found:
        raise ValueError("training and rollout do not match: " + "; ".join(found))
    ids = torch.tensor([prompt + sampled.completion_ids[0]], device=trainer.accelerator.device)
    length, model = len(sampled.completion_ids[0]), trainer.model_wrapped
    with replayed_rng(rng_state()), torch.enable_grad():
        trainer._support = sampled.support
        logps, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), length)
        trainer._support = None
        trainer.accelerator.backward(logps.mean())
    grads = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters() if p.grad is not None
    ]
    finite = bool(grads) and all(bool(torch.isfinite(g).all()) for g in grads)
    model.zero_grad(set_to_none=True)
    mu = torch.tensor(sampled.rollout_logps, device=logps.device)
    precision = record["rollout"]["rollout_dtype"]
    gap, limit = (logps.detach().float() - mu).abs().mean().item(), TOLERANCE.get(precision, max(TOLERANCE.values()))
    record["smoke"] = {"tokens": length, "mean_gap": gap, "allowed": limit, "finite_gradient": finite}
    if not finite:
        raise ValueError("the smoke step's gradient is not finite: the model's weights or its head are broken")
    truncated = side["top_p"] < 1 or side["top_k"] > 0 or side["min_p"] > 0
    exact = sampled.support is not None or not truncated
    if exact and not gap <= limit:
        raise ValueError(
            f"training and rollout log-probs of the same {length} tokens differ by {gap:.3g} nats on average, {precision} "
            f"explains {limit:g}: the engine holds other weights or samples with other settings"
        )
    return record


# --- the guard --------------------------------------------------------------------------------------------------------


class StabilityGuard(TrainerCallback):
    """Connects rules, alerts, checkpoints and control file to one trainer of this project. One a trainer.

    StabilityGuard(trainer, mode="rollback", bounds=(), k=5, retries=3, ...) before `stability.train(trainer)`.

    mode          warn | halt | rollback
    bounds        rules on top of RULES, see parse_rule
    k             a checkpoint is good when this many steps after it had no alarm
    retries       rollbacks before the run is stopped
    on_rollback   changes after a rollback, e.g. ("learning_rate_scale*0.5", "beta=0.05"); names of the trainer's controls
    save_every    also save a checkpoint every so many steps (None: the trainer's own schedule)
    max_age_h     delete checkpoints older than this (None: no limit); `--save_total_limit` counts
    hook          a shell command that gets the event as JSON on stdin, or an http(s) address it is posted to
    disk_gb       budget for checkpoints; refused at start if they will not fit
    stages        see stability_control.parse_stages
    """

    def __init__(
        self, trainer, mode="warn", bounds=(), k=5, retries=3, on_rollback=(), save_every=None, max_age_h=None,
        hook=None, disk_gb=None, stages=None,
    ):  # fmt: skip
        if mode not in MODES[1:]:
            raise ValueError(f"guard mode {mode!r} is unknown: use warn, halt or rollback")
        if trainer.is_deepspeed_enabled and mode == "rollback":
            raise ValueError(
                "--guard rollback drops the gradient of a bad step, which DeepSpeed keeps to itself: use halt"
            )
        self.trainer, self.mode, self.k, self.retries, self.max_age_h = trainer, mode, k, retries, max_age_h
        self.changes = [parse_change(text) for text in on_rollback]
        self.save_every, self.disk_gb = save_every, disk_gb
        self.folder = Path(trainer.args.output_dir)
        self.main = trainer.accelerator.is_main_process
        self.watch = Watch(make_rules(bounds))
        self.unmatched, self.names = [parse_rule(text) for text in bounds], set()  # until a step that sampled has come
        self.alerts = Alerts(self.folder, hook, self.main)
        self.stages = None if stages is None else Stages(parse_stages(stages))
        self.control = None
        # what outlives a rollback: kept in guard.json, not in the checkpoints
        self.ledger = {"good": [], "waiting": [], "skip": [], "rollbacks": [], "changes": {}}
        self.last_event = {}  # (rule, metric) -> step of its last event: a lasting fault is told every 20 steps
        self.first_bad = None  # first step of the alarms that lead to a critical event
        self.grad_norm, self.offender, self._before, self._seen = None, None, None, {}
        self.still = deque(maxlen=1024)  # newest steps that did not change the weights
        self._norm = trainer._get_grad_norm
        trainer._get_grad_norm = self._watched_norm
        trainer.guard = self
        trainer.add_callback(self)

    # state ------------------------------------------------------------------------------------------------------------

    def state_dict(self):
        """What a checkpoint keeps; what must outlive a rollback is in guard.json."""
        return {
            "watch": self.watch.state_dict(),
            "stages": None if self.stages is None else self.stages.state_dict(),
            "last_event": [[rule, metric, step] for (rule, metric), step in self.last_event.items()],
            "still": list(self.still),
        }

    def load_state_dict(self, state):
        """The counterpart of `state_dict`."""
        self.watch.load_state_dict(state["watch"])
        if self.stages is not None and state["stages"] is not None:
            self.stages.load_state_dict(state["stages"])
        self.last_event = {(rule, metric): step for rule, metric, step in state["last_event"]}
        self.still = deque(state["still"], self.still.maxlen)

    def _save_ledger(self):
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                write_atomically(self.folder / LEDGER, json.dumps(self.ledger))
            except OSError as error:
                if not save_failed(self, error):
                    raise
                self._tell("warn", f"{self.folder / LEDGER} is out of date ({error}); free disk space", kind="disk")

    def _tell(self, level, text, **fields):
        return self.alerts.tell(level, text, step=self.trainer.state.global_step, **fields)

    # the trainer's hooks ----------------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs):
        """Takes up ledger and control file; at the start of a run also the disk, the alignment and, for rollback, checkpoint-0."""
        trainer = self.trainer
        if state.global_step and not self.ledger["good"] and (self.folder / LEDGER).exists():  # a resumed run
            self.ledger = read_ledger(self.folder / LEDGER)
            for steps in (self.ledger["good"], self.ledger["waiting"]):  # later ones are of the course that was left
                steps[:] = [step for step in steps if step <= state.global_step]
        self.first_bad = self.grad_norm = None
        # a checkpoint brings metrics along that were judged before it
        self._seen = {name: (past, len(past)) for name, past in trainer._metrics["train"].items()}
        rolled_back = self.control is not None
        self.control = ControlFile(self.folder / "control.yaml", trainer.controls(), self._control_event)
        if rolled_back:  # the file is older than what --guard_on_rollback asks for
            self._read_control()
        for name, value in self.ledger["changes"].items():  # made after rollbacks; the checkpoint is older
            change(self.control.controls, name, value, self._control_event, "rollback")
        if state.global_step == 0 and not self.ledger["rollbacks"]:
            self._start(args, control)

    def _start(self, args, control):
        trainer = self.trainer
        optimizer = trainer.optimizer.optimizer if hasattr(trainer.optimizer, "optimizer") else trainer.optimizer
        states = 0 if type(optimizer).__name__ == "SGD" else 2
        if self.save_every or args.save_strategy != "no" or self.mode == "rollback":
            copies = max(args.save_total_limit or 0, 3) + 1  # a new one is complete before an old one is deleted
            size = checkpoint_bytes(trainer.accelerator.unwrap_model(trainer.model), states)
            self._tell("info", "disk: " + check_disk(self.folder, size, copies, self.disk_gb))
        record = check_alignment(trainer) | {"settings": self._settings()}
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / "alignment.json", json.dumps(record, indent=1))
        smoke = record.get("smoke")
        detail = "" if smoke is None else f"; smoke step: log-probs differ by {smoke['mean_gap']:.2g} nats on average"
        if record["not_compared"]:
            detail += f"; not comparable, as the rollout side does not tell: {', '.join(record['not_compared'])}"
        agree = "agree" if record["rollout"] else "are not compared"
        self._tell("info", f"alignment: training and rollout {agree}{detail}", kind="alignment")
        if self.mode == "rollback":  # the start is a state to go back to
            empty = not trainer.optimizer.state
            trainer._save_checkpoint(trainer.model, None)
            self.on_save(args, trainer.state, control)
            if empty:  # FSDP2's writer makes a step of learning rate 0 to have something to write
                trainer.optimizer.state.clear()
            self.ledger["good"], self.ledger["waiting"] = [0], []
            self._save_ledger()

    def _settings(self):
        args = self.trainer.args
        return {
            "recipe": type(self.trainer).__name__, "guard": self.mode, "beta": args.beta, "routing_replay": args.routing_replay,
            "keep_sampling_mask": args.keep_sampling_mask, "stages": args.guard_stages,
            "bounds": [rule.text for rule in self.watch.rules], **self.trainer.settings(),
        }  # fmt: skip

    def on_step_begin(self, args, state, control, **kwargs):
        """Reads control.yaml."""
        self._read_control()

    def _read_control(self):
        values = self.control.read() if self.main else None
        if self.trainer.accelerator.num_processes > 1:
            box = [values]
            broadcast_object_list(box)
            values = box[0]
        if values is not None:
            self.control.apply(values)

    def _control_event(self, level, text, **fields):
        self._tell(level, text, kind="control", **fields)
        if "new" in fields:
            self.trainer.changed.add(fields["name"])

    def _watched_norm(self, model, grad_norm=None):
        norm = self._norm(model, grad_norm=grad_norm)
        self.grad_norm = None if norm is None else float(norm)
        step = self.trainer.state.global_step + 1
        broken = self.grad_norm is not None and not math.isfinite(self.grad_norm)
        if broken and self.mode != "warn" and step not in self.ledger["skip"]:  # before it can reach the weights
            self._act(step, self.watch.judge({}, ["grad_norm"]), before_update=True)
        return norm

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Drops the gradient of a step that is to be made without an update; else notes the weights."""
        if state.global_step + 1 in self.ledger["skip"]:
            for p in self.trainer.model.parameters():
                p.grad = None  # an optimizer passes over weights without a gradient: no decay, no momentum either
            self._before = None
            return
        self._before = self._sampled_weights()

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Measures how far the update moved the weights."""
        if self._before is None:
            return
        after = self._sampled_weights()
        total = torch.stack([
            (b - a).float().square().sum() * stride for (a, stride), (b, _) in zip(self._before, after, strict=True)
        ]).sum()  # fmt: skip
        if any(isinstance(p, DTensor) for p in self.trainer.model.parameters()):
            total = self.trainer.accelerator.reduce(total, "sum")
        self._before = None
        self.trainer._metrics["train"]["guard/update_norm"].append(total.sqrt().item())

    sampled = 2**20

    def _sampled_weights(self):
        """Evenly spaced weights, about `sampled` in all: the norm of an update without a second copy of the model."""
        trained = [p for p in self.trainer.model.parameters() if p.requires_grad]
        trained = [p.to_local() if isinstance(p, DTensor) else p for p in trained]
        sizes = [p.numel() for p in trained]
        stride = max(1, sum(sizes) // self.sampled)
        # the spacing runs on from one tensor to the next
        starts = [-sum(sizes[:i]) % stride for i in range(len(sizes))]
        return [
            (p.detach().reshape(-1)[start::stride].clone(), stride) for p, start in zip(trained, starts, strict=True)
        ]

    def on_step_end(self, args, state, control, **kwargs):
        """Judges the step. Raises GuardHalt or RollBack on a critical alarm, by mode."""
        step = state.global_step
        if step in self.ledger["skip"]:
            self._tell(
                "info", f"step {step} was made without an update: its batch led to an alarm before", kind="skip"
            )
            self._seen = {name: (past, len(past)) for name, past in self.trainer._metrics["train"].items()}
            self.still.append(step)
            if not math.isfinite(float(self.trainer._tr_loss)):  # no update was made from it
                self.trainer._tr_loss.zero_()
            self.trainer._broken.clear()
            self._advance(step, healthy=True)
            return
        values, broken = self._collect()
        if self.unmatched:
            self._check_names({*self.trainer._metrics["train"], *values, *broken})
        events = self.watch.judge(values, broken)
        events = self._same_on_all(events)
        self._act(step, events)
        if self.save_every and step % self.save_every == 0:
            control.should_save = True

    def _collect(self):
        """This step's metrics: new finite values, and the names of broken ones."""
        store, values, broken = self.trainer._metrics["train"], {}, set(self.trainer._broken)
        for name, past in store.items():
            new = past[self._count(name, past) :]
            self._seen[name] = past, len(past)
            if new and math.isfinite(new[-1]):
                values[name] = new[-1]
            elif new and math.isinf(new[-1]):
                broken.add(name)
        if self.grad_norm is not None and math.isfinite(self.grad_norm):
            values["grad_norm"] = self.grad_norm
        elif self.grad_norm is not None:
            broken.add("grad_norm")
        if not math.isfinite(float(self.trainer._tr_loss)):
            broken.add("loss")
        derived = {}
        if "rollout/weights_changed" in values:
            older, newer = sorted(self.trainer.compared_versions)
            if not set(range(older + 1, newer + 1)) <= set(self.still):
                derived["guard/stale"] = 1.0 - values["rollout/weights_changed"]
        if not values.get("guard/update_norm", 0.0) > 0:
            self.still.append(self.trainer.state.global_step)
        if "frac_reward_zero_std" in values:
            share = 1.0 - values["frac_reward_zero_std"]
            for name in ("seq_clip/masked_frac", "off_policy_mask/masked_frac"):
                share *= 1.0 - values.get(name, 0.0)
            derived["guard/effective_batch"] = share
        for name, value in derived.items():
            self._record(name, value)
        return values | derived, broken

    def _check_names(self, names):
        """A user's bound on a metric that does not exist would never fire: stop after the first sampling, when the names are known."""
        if self.trainer.accelerator.num_processes > 1:
            names = {name for found in gather_object([sorted(names)]) for name in found}
        self.names |= names
        if "reward" not in self.names:  # resumed between two samplings
            return
        ours = {rule.metric for rule in make_rules() if "*" not in rule.metric}  # guard/reward_share is in no log
        known, rules, self.unmatched = (glossary() | ours) - set(UNWATCHED), self.unmatched, []
        for sentence, mistake in filter(None, (unseen(rule, self.names, known) for rule in rules)):
            if mistake:
                raise GuardHalt(sentence)
            self._tell("info", sentence, kind="bounds")

    def _count(self, name, past):
        """How many values of this list were seen before: after each log a new list begins."""
        known, count = self._seen.get(name, (None, 0))
        return count if known is past else 0

    def _record(self, name, value):
        """A metric of the guard's own, which it need not read again."""
        past = self.trainer._metrics["train"][name]
        past.append(value)
        self._seen[name] = past, len(past)

    def _same_on_all(self, events):
        """Every process's events, each once: what one of them alone sees (old weights in its engine) is everybody's."""
        if self.trainer.accelerator.num_processes == 1:
            return events
        merged = {}
        for event in (event for found in gather_object([events]) for event in found):
            merged.setdefault((event["rule"], event["metric"]), event)
        return list(merged.values())

    def _act(self, step, events, before_update=False):
        level = max((LEVELS.index(event["level"]) for event in events), default=0)
        for event in events:
            self._announce(step, event)
        self._record("guard/level", float(level))
        alarmed = level >= LEVELS.index("warn")
        self.first_bad = None if not alarmed else (self.first_bad or step)
        self._advance(step, healthy=not alarmed)
        if level < LEVELS.index("critical") or self.mode == "warn":
            return
        worst = next(event for event in events if event["level"] == "critical")
        reason = f"step {step}: {worst['metric']} {describe(worst)}"
        if self.mode == "halt":
            raise GuardHalt(self._halt_text(reason, before_update))
        self.offender = (self.first_bad or step, step, reason)  # first alarm, last alarm
        raise RollBack(reason)

    def _announce(self, step, event):
        key = event["rule"], event["metric"]
        if step - self.last_event.get(key, -100) < 20 and event["level"] != "critical":
            return
        self.last_event[key] = step
        on = {self.mode} | ({"gradloc"} if self.trainer.args.gradloc != "off" else set())
        cause, action = cause_of(event["metric"], event["rule"], on)
        likely = "cause unknown" if cause is None else f"likely {cause}"
        text = f"step {step}: {event['metric']} {describe(event)}; {likely}; {action}"
        self.alerts.tell(
            event["level"], text, step=step, kind="alarm", metric=event["metric"], rule=event["rule"],
            value=event["value"], bound=event["bound"], cause=cause, action=action,
        )  # fmt: skip

    def _advance(self, step, healthy):
        """Checkpoints wait for k steps without an alarm, and stages for theirs."""
        ledger, before = self.ledger, json.dumps(self.ledger)
        if not healthy:
            ledger["waiting"] = []
        for waiting in [w for w in ledger["waiting"] if step - w >= self.k]:
            ledger["waiting"].remove(waiting)
            ledger["good"].append(waiting)
        if json.dumps(ledger) != before:
            self._save_ledger()
        if self.stages is not None and self.stages.step(healthy) == "widened":
            self._tell(
                "info", f"stage {self.stages.name} begins after step {step}: no alarm in the one before", kind="stage"
            )

    def on_save(self, args, state, control, **kwargs):
        """Writes the manifest of a complete checkpoint, which now waits to become good."""
        checkpoint = self.folder / f"checkpoint-{state.global_step}"
        if not checkpoint.exists():
            return  # it could not be written, and an event says so
        if self._failed_to_write(checkpoint):
            return
        ledger = self.ledger
        for steps in (ledger["good"], ledger["waiting"]):
            if state.global_step in steps:
                steps.remove(state.global_step)
        ledger["waiting"].append(state.global_step)
        kept = {step_of(p) for p in on_disk(self.folder)}
        for steps in (ledger["good"], ledger["waiting"]):
            steps[:] = [step for step in steps if step in kept]
        self._save_ledger()

    def _failed_to_write(self, checkpoint):
        """Writes its manifest. A checkpoint that gets none is as good as torn: whether that is so, on all processes."""
        failure = None
        try:
            if self.main:
                write_manifest(checkpoint)
        except OSError as error:
            if not save_failed(self, error):
                raise
            failure = error
        failed = self.could_not_save(failure)
        self.trainer.accelerator.wait_for_everyone()
        return failed

    def on_train_end(self, args, state, control, **kwargs):
        """Waits for the hooks."""
        self.alerts.wait()

    # checkpoints ------------------------------------------------------------------------------------------------------

    def rotate(self, limit):
        """Delete what retention allows, after a checkpoint is complete."""
        steps = [step_of(p) for p in on_disk(self.folder)]
        old = set()
        if self.max_age_h is not None:
            now = time.time()
            old = {step_of(p) for p in on_disk(self.folder) if now - p.stat().st_mtime > 3600 * self.max_age_h}
        for step in removable(steps, set(self.ledger["good"]), limit, old, self.ledger["waiting"]):
            shutil.rmtree(self.folder / f"checkpoint-{step}", ignore_errors=True)

    def could_not_save(self, error):
        """Whether the checkpoint failed to be written (error) on any process; all call it. A torn one is removed; training goes on
        and the one before stays."""
        accelerator = self.trainer.accelerator
        failed = accelerator.gather(torch.tensor([float(error is not None)], device=accelerator.device)).any().item()
        if failed:
            checkpoint = self.folder / f"checkpoint-{self.trainer.state.global_step}"
            if self.main:
                shutil.rmtree(checkpoint, ignore_errors=True)
            cause = error or "on another process"
            self._tell(
                "warn", f"{checkpoint} could not be written ({cause}): training goes on; free disk space", kind="disk"
            )
        return failed

    def crashed(self, error):
        """The run ends with an error of the program or of the rollout engine, which is no anomaly of the training."""
        text = f"the run ended after step {self.trainer.state.global_step} with {type(error).__name__}: {error}"
        self._tell("critical", f"{text}; no alarm, nothing is rolled back", kind="crash")
        self.alerts.wait()

    def restore_point(self):
        """After a RollBack: the newest good checkpoint that is whole. Settles what is skipped; raises GuardHalt at the end of the road."""
        first, last, reason = self.offender
        skipped = max(first, last - 1)  # of a long slide only its end: what it began with was no critical step
        ledger, trainer = self.ledger, self.trainer
        if len(ledger["rollbacks"]) >= self.retries:
            raise GuardHalt(
                self._halt_text(
                    f"{reason}, after {len(ledger['rollbacks'])} rollbacks (--guard_retries {self.retries})", False
                )
            )
        chosen = None
        for step in sorted((s for s in ledger["good"] if s < first), reverse=True):
            wrong = faults(self.folder / f"checkpoint-{step}")
            if not wrong:
                chosen = step
                break
            self._tell("warn", f"checkpoint-{step} is not used: {wrong[0]}", kind="corrupt")
            ledger["good"].remove(step)
        if chosen is None:
            raise GuardHalt(self._halt_text(f"{reason}, and there is no good checkpoint to go back to", False))
        ledger["skip"] = sorted({*ledger["skip"], *range(skipped, last + 1)})
        ledger["rollbacks"].append({"at": last, "to": chosen, "skip": [skipped, last], "reason": reason})
        for name, kind, value in self.changes:
            ledger["changes"][name] = value if kind == "=" else value * self.control.controls[name].get()
        trainer.accelerator.wait_for_everyone()
        if self.main:  # of the steps that never were: a later save of the same name would mix with them
            for path in on_disk(self.folder):
                if step_of(path) > chosen:
                    shutil.rmtree(path, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        ledger["good"] = [s for s in ledger["good"] if s <= chosen]
        ledger["waiting"] = []
        self._save_ledger()
        self._tell(
            "warn", f"rolled back from step {last} to checkpoint-{chosen} ({reason}); step{'s' if last > skipped else ''} "
            f"{skipped}{f' to {last}' if last > skipped else ''} will be made without an update; "
            f"rollback {len(ledger['rollbacks'])} of {self.retries}", kind="rollback", to=chosen, skip=[skipped, last],
        )  # fmt: skip
        return str(self.folder / f"checkpoint-{chosen}")

    def _halt_text(self, reason, before_update):
        complete = [step_of(p) for p in complete_checkpoints(self.folder)]
        best = max([s for s in complete if s in self.ledger["good"]] or complete, default=None)
        text = f"the guard stopped the run: {reason}"
        text += "; the weights are those before the step" if before_update else ""
        text += (
            "; no checkpoint to go on from was saved"
            if best is None
            else f"; go on with --resume_from_checkpoint {self.folder / f'checkpoint-{best}'}"
        )
        spikes = sorted((self.folder / "gradloc").glob("*.html"), key=lambda p: p.stat().st_mtime)
        if spikes:
            text += f"; GradLoc's report: {spikes[-1]}"
        elif self.trainer.args.gradloc == "off":
            text += "; --gradloc directional would name the token"
        self._tell("critical", text, kind="halt")
        self.alerts.wait()
        return text

    @property
    def share(self):
        """Share of the batch and of the completion length that the current stage uses."""
        return 1.0 if self.stages is None else self.stages.share


def describe(event):
    """An event in words: "is 5.2, above 3.1 (grad_norm>15x:critical)"."""
    if event["bound"] is None:
        return "is not finite"
    side = "above" if ">" in event["rule"] else "below"
    return f"is {event['value']:.4g}, {side} {event['bound']:.4g} ({event['rule']})"


def parse_change(text):
    """Change text "beta=0.05" or "learning_rate_scale*0.5" -> (name, "=" | "*", number or bool). Raises ValueError."""
    found = re.fullmatch(r"([\w.]+)([=*])(\S+)", text)
    value = {"true": True, "false": False}.get(found.group(3)) if found else None
    if found and value is None:
        try:
            value = float(found.group(3))
        except ValueError:
            found = None
    if not found or (found.group(2) == "*" and found.group(1) != "learning_rate_scale"):
        raise ValueError(
            f"--guard_on_rollback {text!r} is not name=value of a control, or learning_rate_scale*factor, for example beta=0.05"
        )
    return found.group(1), found.group(2), value


def save_failed(guard, error):
    """Is this failure of a save one that training survives? A full disk or quota, an I/O error; with a guard only."""
    if guard is None:
        return False
    if isinstance(error, OSError):
        return error.errno in (*FULL_DISK, None)
    return any(
        word in str(error)
        for word in ("No space left", "File too large", "quota", "failed writing", "unexpected pos", "write error")
    )


def refuse_damaged(checkpoint):
    """Raises ValueError naming the first file that is not as it was written; without a manifest nothing is known."""
    if (Path(checkpoint) / MANIFEST).exists() and (wrong := faults(checkpoint)):
        raise ValueError(f"{checkpoint} is damaged: {wrong[0]}; resume from an older one")


def train(trainer, checkpoint=None):
    """`trainer.train`, through rollbacks. A damaged checkpoint is refused by name before anything is loaded."""
    if checkpoint is not None:
        refuse_damaged(checkpoint)
    return train_from_whole(trainer, checkpoint)


def train_from_whole(trainer, checkpoint=None):
    """`train` for who has called `refuse_damaged` before: it reads every byte of a checkpoint."""
    if trainer.guard is None:
        return trainer.train(resume_from_checkpoint=checkpoint)
    try:
        return _through_rollbacks(trainer, checkpoint)
    except GuardHalt:
        raise
    except Exception as error:  # an engine that died, or a mistake in the code: nothing that a rollback mends
        trainer.guard.crashed(error)
        raise


def _through_rollbacks(trainer, checkpoint):
    while True:
        try:
            return trainer.train(resume_from_checkpoint=checkpoint)
        except RollBack:
            checkpoint = trainer.guard.restore_point()
            trainer.forget()


def rotate(trainer, folder, limit):
    """Retention after a complete save: the guard's, or the Trainer's own."""
    if trainer.guard is not None:
        trainer.guard.rotate(limit)
        return
    rotate_checkpoints(
        output_dir=folder,
        save_total_limit=limit,
        best_model_checkpoint=trainer.state.best_model_checkpoint,
        use_mtime=True,
    )


def main(argv=None):
    """`python stability.py report RUN_DIR`."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2 or argv[0] != "report" or argv[1] in ("-h", "--help"):
        sys.exit("usage: python stability.py report RUN_DIR     writes RUN_DIR/acceptance.md and acceptance.html")
    try:
        print(write_acceptance(argv[1]))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
