"""GradLoc: when the gradient spikes, say which rank, sequence, token and layer made it, why, and what treats it.

    python gradloc.py view runs/grpo_tokenclip                      every spike of a run, and a page that lists them

In a TRL trainer (GRPO, SFT, or a recipe of this project, where it is one flag: --gradloc directional):

    gradloc = GradLoc("runs/mine/gradloc", tokenizer=tokenizer)
    gradloc.attach(trainer)                                          before trainer.train()

In a plain Accelerate loop: `logps = gradloc.watch(model, batch, logps_fn)` in place of `logps_fn(model, batch)`, and
`gradloc.check(model)` after the backward of the step, before clipping.
In a notebook: `GradLoc().explain(model, batch, logps_fn, objective_fn)`.

How it works: gradloc_methods.py. Read only: weights, gradients and RNG are the same bits afterwards. While nothing happens it
costs one gradient norm and one comparison a step. Source: Tencent Hunyuan, "GradLoc" blog, 2026-02; the directional method,
the sequence and layer levels, the causes' evidence and the report are ours.
"""

import contextlib
import hashlib
import inspect
import math
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import TrainerCallback

import gradloc_report
from gradloc_methods import (
    Call,
    Found,
    Step,
    coefficients,
    confirm,
    contributions,
    first_nonfinite,
    gather_objects,
    inner_module,
    local,
    named_outputs,
    rank,
    rng_state,
    same_rng_state,
    search,
    set_rng_state,
    sum_over_ranks,
    world_size,
)
from layer_clip import LayerClip, gradient_norms, group_norms, kind_of, layer_of, parameter_norms  # noqa: F401
from routing import replay_routing
from support import replay_support

CAUSES = {
    "A.1": "token-level mismatch, training against sampling",
    "A.2": "sequence-level training-inference mismatch",
    "B": "layer-wise gradient heterogeneity",
    "N": "a value that is not finite",
    "unclassified": "no known cause",
}
REMEDIES = {
    "A.1": "--token_clip icepop",
    "A.2": "--seq_clip_low 0.995 --seq_clip_high 1.005",
    "B": "--layer_clip",
    "N": "",
    "unclassified": "",
}


# --- the report -------------------------------------------------------------------------------------------------------


@dataclass
class TokenReport:
    """One token of a report. share: signed part of the step's gradient norm; grad_norm, layers, kinds: exact, where confirmed."""

    rank: int
    micro_batch: int
    sequence: int
    position: int
    token_id: int | None
    token: str | None
    share: float
    weight: float | None = None  # dLoss/dlogp
    boost: float | None = None  # |weight| over the median |weight| of its sequence
    grad_norm: float | None = None
    grad_norm_share: float | None = None
    layers: dict | None = None
    kinds: dict | None = None
    logp: float | None = None
    old_logp: float | None = None
    rollout_logp: float | None = None
    ref_logp: float | None = None
    ratio: float | None = None
    mismatch: float | None = None
    omega: float | None = None
    rho: float | None = None
    advantage: float | None = None
    reward: float | None = None
    prompt_id: str | None = None
    version: int | None = None


@dataclass(repr=False)
class SpikeReport:
    """One explained step. `to_dict()` is what the JSONL line and the page hold; gradloc_report.check_report describes it."""

    step: int | None
    method: str
    trigger: dict
    grad_norm: float
    cause: str
    sentence: str
    tokens: list = field(default_factory=list)
    sequences: list = field(default_factory=list)
    certificate: float | None = None
    remainder: float = 0.0
    evidence: list = field(default_factory=list)
    not_judged: list = field(default_factory=list)
    remedy: str = ""
    note: str = ""
    layers: dict = field(default_factory=dict)
    kinds: dict = field(default_factory=dict)
    search: dict | None = None
    offender: dict | None = None
    num_micro_batches: int = 1  # of each rank
    num_tokens: int = 0
    num_sequences: int = 0
    seconds: float = 0.0
    time_ratio: float | None = None
    run: str = ""
    time: str = ""
    page: str | None = None

    @property
    def top1_share(self):
        return abs(self.tokens[0].share) if self.tokens else 0.0

    @property
    def top10_share(self):
        return sum(abs(t.share) for t in self.tokens[:10])

    def to_dict(self):
        fields = {k: v for k, v in vars(self).items() if k != "page"}
        return fields | {
            "format": 1,
            "update": self.step,
            "world_size": world_size(),
            "cause_name": CAUSES[self.cause],
            "tokens": [vars(t) for t in self.tokens],
            "top1_share": self.top1_share,
            "top10_share": self.top10_share,
        }

    def save(self, folder):
        """Write the page (and the JSON line) into a folder, as a run does. -> path, or None with a warning."""
        return gradloc_report.write_spike(self.to_dict(), folder)

    def __repr__(self):
        return self.sentence


# --- when to look -----------------------------------------------------------------------------------------------------


class Trigger:
    """Decides from the gradient norm whether a step is looked into.

    "adaptive"  norm > threshold = the largest of
                    median * exp(z * 1.4826 * MAD of log norms), at least factor * median, at most ceiling * median
                    1.5 * 95th percentile, from 40 norms on: a pattern (the first update of each sampling) is no spike
                over the last `window` norms, from the `warmup`-th on. A norm above the threshold enters the window as the
                threshold: a collapse cannot lift the bar at once, a lasting change of level still can. Steps with norm 0 (no
                advantage anywhere) are left out, and the median counts as no less than a tenth of the largest it has
                been, which fades by half in 138 steps: after a collapse, when norms are near 0, an ordinary one is no spike.
                ours; the blog's constant must be tuned for each model, aggregation and advantage scale.
    "paper"     norm > tau sqrt(sum_t a_t^2), which is tau/sqrt(N) for a token mean over N tokens.

    A norm, loss or log-prob that is not finite always triggers. After a report of one kind (spike, non-finite) the next
    `cooldown` steps of that kind are only counted. every_n_steps > 0 also looks at every n-th step.
    """

    def __init__(
        self,
        trigger="adaptive",
        tau=None,
        window=64,
        warmup=16,
        factor=3.0,
        ceiling=5.0,
        z=6.0,
        cooldown=10,
        every_n_steps=0,
    ):
        if trigger not in ("adaptive", "paper"):
            raise ValueError(f"trigger={trigger!r} is unknown: use 'adaptive' or 'paper'")
        if trigger == "paper" and not (tau is not None and tau > 0):
            raise ValueError(f"trigger='paper' needs tau > 0, the norm a typical token may reach, and got tau={tau}")
        if window < 4 or not 2 <= warmup <= window:
            raise ValueError(f"window={window}, warmup={warmup}: need 2 <= warmup <= window and window >= 4")
        if not (1 < factor <= ceiling and z > 0) or cooldown < 0 or every_n_steps < 0:
            raise ValueError(
                f"factor={factor}, ceiling={ceiling}, z={z}, cooldown={cooldown}, every_n_steps={every_n_steps}: need "
                "1 < factor <= ceiling, z > 0 and no negative counts"
            )
        self.kind, self.tau, self.warmup, self.factor, self.ceiling, self.z = trigger, tau, warmup, factor, ceiling, z
        self.cooldown, self.every_n_steps = cooldown, every_n_steps
        self.norms = deque(maxlen=window)
        self.level = 0.0  # the largest median so far
        self.seen = 0
        self.quiet = {"spike": 0, "non-finite": 0}  # steps left in which that kind is only counted
        self.suppressed = 0

    def threshold(self, squares=None):
        """The norm above which a step is a spike; None while it cannot be told. squares: sum of a_t^2 (for "paper")."""
        if self.kind == "paper":
            return None if squares is None else self.tau * math.sqrt(squares)
        if len(self.norms) < self.warmup:
            return None
        logs = [math.log(n) for n in self.norms]
        median = statistics.median(logs)
        spread = statistics.median(abs(x - median) for x in logs)
        self.level = max(0.995 * self.level, math.exp(median))  # halves in 138 steps
        usual = max(math.exp(median), 0.1 * self.level)
        above = math.exp(min(self.z * 1.4826 * spread, math.log(self.ceiling)))
        high = sorted(self.norms)[int(0.95 * (len(self.norms) - 1))] if len(self.norms) >= 40 else 0.0
        return max(usual * max(self.factor, above), 1.5 * high)

    def decide(self, norm, finite=True, squares=None):
        """Call once a step. -> (reason or None, threshold or None, median or None). Reasons: non-finite, adaptive, paper, every_n_steps."""
        self.seen += 1
        threshold = self.threshold(squares)
        median = statistics.median(self.norms) if self.norms else None
        reason, kind = None, None
        if not (finite and math.isfinite(norm)):
            reason, kind = "non-finite", "non-finite"
        else:
            if threshold is not None and norm > threshold:
                reason, kind = self.kind, "spike"
            if norm > 0:
                self.norms.append(norm if threshold is None or self.kind == "paper" else min(norm, threshold))
        silent = kind is not None and self.quiet[kind] > 0
        self.quiet = {k: max(0, left - 1) for k, left in self.quiet.items()}
        if silent:
            self.suppressed += 1
            reason = None
        elif kind is not None:
            self.quiet[kind] = self.cooldown
        if reason is None and self.every_n_steps and self.seen % self.every_n_steps == 0 and norm > 0:
            reason = kind if kind == "non-finite" else self.kind if kind else "every_n_steps"
        return reason, threshold, median

    def state_dict(self):
        return {
            "norms": list(self.norms), "level": self.level, "seen": self.seen, "quiet": dict(self.quiet),
            "suppressed": self.suppressed,
        }  # fmt: skip

    def load_state_dict(self, state):
        self.norms, self.level = deque(state["norms"], maxlen=self.norms.maxlen), state["level"]
        self.seen, self.suppressed, self.quiet = state["seen"], state["suppressed"], dict(state["quiet"])


# --- what made it -----------------------------------------------------------------------------------------------------


def diagnose(tokens, sequences, layers, token_band=(0.5, 5.0), seq_band=(0.995, 1.005), layer_factor=5.0, apart=4.0):
    """Cause of a spike from its evidence. -> (cause, evidence sentences, what could not be judged).

    tokens     [{"share", "omega", "ratio", "boost"}] signed shares of the norm; the others may be None or absent
    sequences  [{"share", "rho", "log_rho_z"}]: rho may be None; log_rho_z = |log rho - median| / (1.4826 MAD) over the step's
               sequences
    layers     {name: {"norm", "median", "ratio"}}: ratio to the layer's own median, None without history

    A.1  the tokens with a weight outside token_band hold at least half of the norm that the listed tokens hold. The weight: omega;
         or the staleness r = pi_theta/pi_old, where the loss does multiply by it (boost, the token's |dL/dlogp| over the median
         of its sequence, is 2 or more). r and pi_old/mu can cancel in omega while PPO's loss, which leaves r unbounded
         for A < 0, takes r alone; the clip on omega treats both. ours: the blog looks at omega only
    A.2  else, the sequences with omega inside and rho outside seq_band hold at least half of it, and they stand out of the step (z > 3)
    B    else, some layer is more than layer_factor times its own median and more than twice as far from it as the
         median layer is: heterogeneous, not everything at once. Before A.2, and before an A.1 whose omegas are the smaller
         factor, if it is more than `apart` times as far: omega and rho weigh a token's gradient alike in all layers
    paper: bands TokenClip [0.5, 5], SeqClip (0.995, 1.005); which share makes a cause, and what "outside its history" means for a
    layer, not stated; we: half, and the factors above, because they separate planted causes (results/gradloc/report.md).
    """
    evidence, not_judged = [], []
    ratios = {name: layer["ratio"] for name, layer in layers.items() if layer["ratio"] is not None}
    middle = statistics.median(ratios.values()) if ratios else 0.0
    furthest = max(ratios, key=ratios.get) if len(ratios) > 1 else None
    spread = 1.0  # how much further from its history one layer is than the median layer, where that says something
    if furthest and ratios[furthest] > layer_factor and ratios[furthest] > apart * middle:
        spread = ratios[furthest] / max(middle, 1e-6)
    total = sum(abs(t["share"]) for t in tokens) or 1.0
    judged = [t for t in tokens if t["omega"] is not None or t.get("ratio") is not None]
    outside = [(t, *weight) for t in judged if (weight := outside_weight(t, token_band)) is not None]
    part = sum(abs(t["share"]) for t, _, _ in outside) / total
    factor = max((max(value, 1 / max(value, 1e-30)) for _, _, value in outside), default=1.0)
    if not tokens:
        not_judged.append("A.1 and A.2: no token stands out")
    elif not judged:
        not_judged.append("A.1 and A.2: the inference engine's log-probs (rollout_logps) were not recorded")
    elif part >= 0.5 and not factor < spread:  # a NaN omega counts
        worst, name, value = max(outside, key=lambda x: abs(x[0]["share"]))
        evidence.append(
            f"{len(outside)} of the {len(tokens)} listed tokens have a weight outside [{token_band[0]:g}, {token_band[1]:g}]; they "
            f"hold {100 * part:.0f} % of what the list holds; the largest has {WEIGHTS[name]} = {value:.3g}"
        )
        if stale(worst):
            evidence.append(
                f"it is stale: the policy moved since it sampled (r = pi_theta/pi_old = {worst['ratio']:.3g}) more than the engines "
                f"disagree (pi_old/mu = {_shown(worst.get('mismatch'))}); fewer updates a sampling or a smaller learning rate treat that"
            )
        return "A.1", evidence, not_judged
    elif outside:
        evidence.append(
            f"tokens with a weight outside the band hold {'only ' if part < 0.5 else ''}{100 * part:.0f} % of what the list holds"
            + ("" if part < 0.5 else ", but one layer is further outside its own history")
        )
    else:
        evidence.append(f"the weight of every listed token lies in [{token_band[0]:g}, {token_band[1]:g}]")
    known = [s for s in sequences if s["rho"] is not None]
    drifting = [s for s in known if not seq_band[0] < s["rho"] < seq_band[1]]
    share = sum(abs(s["share"]) for s in sequences) or 1.0
    apart_from_others = standing_out(sequences, seq_band)
    part = sum(abs(s["share"]) for s in apart_from_others) / share
    if part >= 0.5 and spread == 1.0:
        worst = max(apart_from_others, key=lambda s: abs(s["share"]))
        z = (
            ""
            if worst["log_rho_z"] is None
            else f", {worst['log_rho_z']:.0f} robust deviations from the step's median"
        )
        evidence.append(
            f"rho (geometric mean of omega) is {worst['rho']:.4g}, outside ({seq_band[0]:g}, {seq_band[1]:g}){z}, in sequences "
            f"with {100 * part:.0f} % of what the listed ones hold"
        )
        return "A.2", evidence, not_judged
    if known:
        evidence.append(
            f"rho is outside ({seq_band[0]:g}, {seq_band[1]:g}) in {len(drifting)} of {len(known)} listed sequences, but "
            + (
                "in none that stands out of the step" if not apart_from_others
                else "these hold the smaller part" if part < 0.5
                else "a sequence's weight is the same in all layers"
            )
        )  # fmt: skip
    if furthest is None:
        not_judged.append("B: fewer than 8 earlier steps of layer norms are recorded")
        return "unclassified", evidence, not_judged
    if ratios[furthest] > layer_factor and ratios[furthest] > 2 * middle:
        evidence.append(
            f"{furthest} is at {ratios[furthest]:.1f} times its own median norm while the median layer is at {middle:.1f} times"
        )
        return "B", evidence, not_judged
    evidence.append(
        f"layers move together: the largest, {furthest}, is at {ratios[furthest]:.1f} times its median, the median layer at {middle:.1f}"
    )
    return "unclassified", evidence, not_judged


WEIGHTS = {"omega": "omega = pi_theta/mu", "ratio": "r = pi_theta/pi_old"}


def outside_weight(token, band):
    """("omega" or "ratio", its value) of a token whose weight lies outside the band, as in `diagnose`; else None."""
    omega, ratio, boost = token["omega"], token.get("ratio"), token.get("boost")
    if omega is not None and not band[0] <= omega <= band[1]:
        return "omega", omega
    if ratio is not None and not band[0] <= ratio <= band[1] and boost is not None and boost >= 2:
        return "ratio", ratio
    return None


def standing_out(sequences, band):
    """The sequences whose rho is outside the band and more than 3 robust deviations from the step's median."""
    known = [s for s in sequences if s["rho"] is not None and not band[0] < s["rho"] < band[1]]
    return [s for s in known if s["log_rho_z"] is None or s["log_rho_z"] > 3]


def stale(token):
    """Is a token's weight the policy's own movement (ratio) rather than the engines' disagreement (mismatch)?"""
    ratio, mismatch = token.get("ratio"), token.get("mismatch")
    if ratio is None or not ratio > 0:
        return False
    return mismatch is None or not mismatch > 0 or abs(math.log(ratio)) > abs(math.log(mismatch))


def _shown(value):
    return "not recorded" if value is None else f"{value:.3g}"


# --- GradLoc ----------------------------------------------------------------------------------------------------------


class GradLoc:
    """Watches gradient norms and explains spikes.

    folder         where spikes.jsonl and the pages go; None = nothing is written
    method         "directional" (one pass over all tokens), "search" (the published bisection)
    tokenizer      decodes tokens for the report; None = ids only
    aggregation    of the loss, for the thresholds of `search` and the paper's trigger: token_mean | seq_mean_token_mean | seq_sum
    confirm        number of top tokens whose gradient is computed exactly, with norms per layer
    tolerance      largest certificate (relative gap) that `directional` may keep; beyond it `search` takes over
    budget         backward passes of a search
    trigger, tau, window, warmup, factor, ceiling, z, cooldown, every_n_steps: see Trigger
    Raises ValueError for an unknown method or aggregation.
    """

    def __init__(
        self, folder=None, method="directional", tokenizer=None, aggregation="token_mean", confirm=4, tolerance=0.05, budget=128,
        token_band=(0.5, 5.0), seq_band=(0.995, 1.005), differentiation="auto", quiet=False, **trigger,
    ):  # fmt: skip
        if method not in ("directional", "search"):
            raise ValueError(f"method={method!r} is unknown: use 'directional' or 'search'")
        if aggregation not in ("token_mean", "seq_mean_token_mean", "seq_sum"):
            raise ValueError(f"aggregation={aggregation!r} is unknown: use token_mean, seq_mean_token_mean or seq_sum")
        if confirm < 0 or budget < 1 or not tolerance > 0:
            raise ValueError(
                f"confirm={confirm}, budget={budget}, tolerance={tolerance}: use counts >= 0, >= 1 and > 0"
            )
        self.folder = None if folder is None else Path(folder)
        self.method, self.tokenizer, self.aggregation = method, tokenizer, aggregation
        self.confirm, self.tolerance, self.budget = confirm, tolerance, budget
        self.token_band, self.seq_band, self.differentiation, self.quiet = token_band, seq_band, differentiation, quiet
        known = list(inspect.signature(Trigger).parameters)
        unknown = sorted(set(trigger) - set(known))
        if unknown:
            raise ValueError(f"GradLoc has no option {', '.join(unknown)}; the trigger's are {', '.join(known)}")
        self.trigger = Trigger(**trigger)
        self.layer_history = deque(maxlen=64)  # [norm of every layer], one entry a step
        self.step = 0
        self.reports = self.spikes = 0  # with and without the steps looked at in turn
        self.last = None  # the newest SpikeReport, on every rank
        self.losses = []  # of the step's micro-batches, detached
        self.calls, self._layers = [], None
        self._clock = self._step_seconds = None

    # recording --------------------------------------------------------------------------------------------------------

    def watch(self, model, batch, logps_fn):
        """logps_fn(model, batch), recorded: use its result in the loss as usual. Once a micro-batch."""
        noise = rng_state() if model.training else None
        outputs = logps_fn(model, batch)
        self.record(logps_fn, batch, outputs, noise)
        return _copies(outputs)  # a loss that edits them in place must not lose the hooks

    def record(self, logps_fn, batch, outputs, noise=None):
        """Remember a call that was made: logps_fn(model, batch) gave `outputs`, which the coming backward goes through."""
        named = named_outputs(outputs)
        if noise is not None and same_rng_state(noise, rng_state()):
            noise = None  # the call drew no random number (dropout, NEFTune, ...): its rows may be cut out
        if not (torch.is_grad_enabled() and named["logps"].requires_grad):
            return None
        call = Call(logps_fn, batch, named, *_mask_and_ids(batch, named["logps"].shape), rng=noise)
        if isinstance(batch, Mapping):
            call.extras = _extras(batch, call.shape)
        call.watch(named)
        self.calls.append(call)
        if len(self.calls) > 1024:
            warnings.warn(
                "GradLoc.watch was called 1024 times without check: the oldest calls are dropped", stacklevel=3
            )
            del self.calls[:512]
        return call

    # a step -----------------------------------------------------------------------------------------------------------

    def check(self, model, step=None, loss=None):
        """After the backward of an optimizer step, before clipping; all ranks call it. -> SpikeReport or None.

        step: its number in the report; None = counted here. loss: the step's loss, so that a NaN in it is seen even where no
        gradient shows it. Read-only.
        """
        if loss is not None:
            self.losses.append(torch.as_tensor(loss).detach())
        self.step = self.step + 1 if step is None else step
        calls, self.calls = [call for call in self.calls if "logps" in call.weights], []  # without: no backward came
        losses, self.losses = self.losses, []
        parameters = _trainable(model)
        if not parameters:
            return None
        now = time.perf_counter()
        if self._clock is not None:
            self._step_seconds = now - self._clock
        norms, layers, finite, squares = self._measure(parameters, calls, losses)
        reason, threshold, median = self.trigger.decide(norms, finite, squares)
        report = None
        if reason is not None:
            trigger = {"reason": reason, "grad_norm": norms, "threshold": threshold, "median": median}
            trigger["loss"] = float(sum(losses)) if losses else None
            gradient = [p.grad for p in parameters.values()]
            report = self._localise(model, calls, parameters, gradient, trigger)
        if finite and norms > 0:
            self.layer_history.append(layers)
        self._clock = time.perf_counter()
        return report

    def explain(self, model, batch, logps_fn, objective_fn):
        """Localise a loss in one call, spike or not. -> SpikeReport.

        batch: one batch, or a list of micro-batches whose losses add up. logps_fn(model, batch) -> (N, T) log-probs (or a
        tuple or mapping that starts with them); objective_fn(what logps_fn returned, batch) -> scalar. Several ranks: each its own batch,
        the gradient is their mean, as in DDP. Leaves gradients, weights and RNG as they were.
        """
        calls, parameters, gradient, loss = _backward(model, batch, logps_fn, objective_fn)
        norm = float(gradient_norms(list(parameters.values()), gradient).double().square().sum().sqrt())
        finite = math.isfinite(norm) and math.isfinite(loss)
        trigger = {
            "reason": "call" if finite else "non-finite",
            "grad_norm": norm,
            "threshold": None,
            "median": None,
            "loss": loss,
        }
        return self._localise(model, calls, parameters, gradient, trigger, contain=False)

    def _measure(self, parameters, calls, losses):
        """(norm, layer norms, all finite?, sum of a_t^2): one transfer to the host."""
        names, params = list(parameters), list(parameters.values())
        if self._layers is None or self._layers[2] != names:
            labels = list(dict.fromkeys(layer_of(name) for name in names))
            index = torch.tensor([labels.index(layer_of(name)) for name in names], device=params[0].device)
            self._layers = labels, index, names
        labels, index, _ = self._layers
        layers = group_norms(parameter_norms(params), index, len(labels)).double()
        broken = [~torch.isfinite(loss).all() for loss in losses]
        broken += [(~torch.isfinite(call.outputs["logps"]) & call.mask).any() for call in calls]
        broken += [~torch.isfinite(weight).all() for call in calls for weight in call.weights.values()]
        flag = torch.stack(broken).any() if broken else torch.zeros((), dtype=torch.bool)
        flag = sum_over_ranks(flag.to(layers).reshape(1))
        values = torch.cat([layers, flag]).tolist()
        norm = math.sqrt(sum(v * v for v in values[:-1]))
        squares = None
        if self.trigger.kind == "paper" and calls:
            mine = sum(c.square().sum() for c in coefficients(calls, self.aggregation))
            squares = float(sum_over_ranks(mine.clone()))
        return norm, dict(zip(labels, values[:-1], strict=True)), values[-1] == 0, squares

    def _localise(self, model, calls, parameters, gradient, trigger, contain=True):
        start = time.perf_counter()
        states = gather_objects((len(calls), trigger["reason"]))  # all ranks must go the same way
        if len({count for count, _ in states}) != 1 or not calls:
            counts = ", ".join(str(count) for count, _ in states)
            warnings.warn(
                f"step {self.step}: gradient norm {trigger['grad_norm']:.4g} triggered, but the model calls recorded by rank are "
                f"{counts}, and there must be as many, at least one, on each: use GradLoc.watch in the loop, or attach(trainer)",
                stacklevel=3,
            )
            return None
        if any(reason == "non-finite" for _, reason in states):
            trigger = trigger | {"reason": "non-finite"}
        noise, step = rng_state(), None
        buffers = [(b, b.detach().clone()) for b in inner_module(model).buffers()]  # a forward may count in them
        try:
            step = Step(model, calls, parameters, gradient)
            report = self._explain(step, trigger)
        except Exception as error:
            if world_size() > 1 or not contain:
                raise  # the other ranks are in a collective: going on would hang, not train
            warnings.warn(
                f"step {self.step}: GradLoc could not look into it ({type(error).__name__}: {error}); training goes on",
                stacklevel=3,
            )
            return None
        finally:
            set_rng_state(noise)
            with torch.no_grad():
                for buffer, saved in buffers:
                    buffer.copy_(saved)
            if step is not None:
                step.close()
        report.seconds = time.perf_counter() - start
        report.time_ratio = report.seconds / self._step_seconds if self._step_seconds else None
        self.last, self.reports = report, self.reports + 1
        self.spikes += trigger["reason"] not in ("every_n_steps", "call")
        if rank() == 0:
            if self.folder is not None:
                page = gradloc_report.write_spike(report.to_dict(), self.folder)
                report.page = None if page is None else str(page)
            if not self.quiet:
                line = gradloc_report.visible(report.sentence)  # a token may hold control characters
                tqdm.write(
                    f"GradLoc: {line}" + (f"\n  {report.page}" if report.page else "")
                )  # keeps progress bars whole
        return report

    def _explain(self, step, trigger):
        report = SpikeReport(
            step=self.step, method=self.method, trigger=trigger, grad_norm=step.norm, cause="unclassified", sentence="",
            run=self.folder.resolve().parent.name if self.folder else "", time=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
        counts = gather_objects([(int(c.mask.sum()), int(c.mask.any(1).sum())) for c in step.calls])
        report.num_micro_batches = len(step.calls)
        report.num_tokens = sum(t for part in counts for t, _ in part)
        report.num_sequences = sum(s for part in counts for _, s in part)
        self._name_layers(step, report)
        broken = trigger["reason"] == "non-finite"
        if broken:
            places, values = self._nonfinite(step, report)
        elif step.norm == 0:
            report.method, report.note = "none", "the gradient is exactly zero: no token adds to it"
            places, values = [], None
        else:
            places, values = self._contributors(step, report)
        found = {}
        if places and not broken:
            known = {p: f for p, f in places.items() if isinstance(f, Found)}
            missing = [p for p in list(places)[: self.confirm] if p not in known]
            exact = confirm(step, missing) if missing else []
            found = known | {p: f for p, f in zip(missing, exact, strict=True) if f is not None}
            if None in exact:
                report.note += (
                    " exact norms could not be computed (reentrant gradient checkpointing needs use_reentrant=False)"
                )
        if not all(gather_objects(all(call.faithful for call in step.calls))):
            report.note += (
                " running the model again on the recorded inputs gives other log-probs than in training: the shares and norms are "
                "those of the second run"
            )
        self._describe(step, report, list(places), values, found)
        if not broken and step.norm > 0:
            _diagnose_into(report, self.token_band, self.seq_band)
        report.sentence = _sentence(report, self.token_band, self.seq_band)
        return report

    def _name_layers(self, step, report):
        for label, names in (("layers", layer_of), ("kinds", kind_of)):
            setattr(report, label, _grouped(step, step.norms, names))
        history = list(self.layer_history)
        for name, norm in report.layers.items():
            past = [h[name] for h in history if h.get(name, 0) > 0]
            median = statistics.median(past) if len(past) >= 8 else None
            report.layers[name] = {"norm": norm, "median": median, "ratio": norm / median if median else None}

    def _contributors(self, step, report):
        """Places of the top tokens, largest share first: {(rank, call, row, column): share or Found}, and c_t where known."""
        if self.method == "directional":
            result = contributions(step, self.differentiation, self.tolerance)
            report.method, report.certificate = result.method, result.certificate
            report.remainder = result.remainder / step.norm
            if result.certificate <= self.tolerance:
                top = []
                for index, value in enumerate(result.values):
                    flat = value.abs().flatten()
                    best = flat.topk(min(20, flat.numel())).indices.tolist()
                    t = value.shape[1]
                    top += [(float(value[i // t, i % t]) / step.norm, (rank(), index, i // t, i % t)) for i in best]
                everyone = sorted((x for part in gather_objects(top) for x in part), key=lambda x: (-abs(x[0]), x[1]))
                return {place: share for share, place in everyone[:20] if share}, result.values
            report.note = (
                f"the shares sum to the norm only within {100 * result.certificate:.0f} % (limit {100 * self.tolerance:.0f} %): "
                "fell back to search"
            )
        a = coefficients(step.calls, self.aggregation)
        squares = float(sum_over_ranks(torch.stack([c.square().sum() for c in a]).sum()))
        if squares == 0:
            report.method, report.note = "search", "no token counts in the loss: the gradient comes from elsewhere"
            return {}, None
        root = report.trigger["threshold"] or 0.5 * step.norm
        tau = self.trigger.tau or min(root, 0.5 * step.norm) / math.sqrt(squares)
        result = search(step, a, tau, self.budget)
        report.method = "search"
        report.search = {
            "probes": result.probes, "budget": self.budget, "exhausted": result.exhausted, "trace": result.trace,
        }  # fmt: skip
        found = sorted(result.found, key=lambda f: -abs(f.share))[:20]
        return {(f.rank, f.call, f.row, f.column): f for f in found}, None

    def _nonfinite(self, step, report):
        offender = first_nonfinite(step)
        report.method, report.cause = "non-finite", "N"
        if offender is None:
            whole = all(bool(torch.isfinite(local(g)).all()) for g in step.gradient if g is not None)
            report.evidence = [
                "every gradient is finite, but their squares overflow float32: the norm is above 1.8e19"
                if whole and not math.isfinite(step.norm)
                else "a value was not finite, yet a second pass over the same tokens was: not reproducible"
            ]
            return {}, None
        report.offender = vars(offender) | {"position": None}  # in the completion
        place = f"module {offender.module}" if offender.module else "the objective"
        text = {
            "weights": f"the weights {offender.tensor} are already not finite",
            "forward": f"{place} is the first with a non-finite output from finite inputs",
            "loss": f"the log-probs are finite, dLoss/dlogp is not, at {offender.broken} of {offender.tokens} tokens"
            + (f": {offender.tensor} is not finite there" if offender.tensor else ""),
            "backward": f"{place} is the first whose backward makes a non-finite gradient"
            + (f", of {offender.tensor}" if offender.tensor else ""),
        }
        report.evidence = [text[offender.where]]
        if offender.column is None:
            if offender.row is not None:
                report.evidence[0] += f"; somewhere in sequence {offender.row} on rank {offender.rank}"
            return {}, None
        report.offender["position"] = offender.column - step.calls[offender.call].offset
        return {(offender.rank, offender.call, offender.row, offender.column): math.nan}, None

    # words and numbers of the report ----------------------------------------------------------------------------------

    def _describe(self, step, report, places, values, found):
        """Every rank describes its own tokens and sequences; the parts are put together in the order of `places`."""
        mine, sequences = {}, {}
        z = _log_rho_z(step.calls)
        for place in places:
            owner, index, row, column = place
            if owner != rank():
                continue
            call = step.calls[index]
            share = found[place].share if values is None and place in found else None
            if values is not None:
                share = float(values[index][row, column]) / step.norm
            mine[place] = self._token(step, call, place, share, found.get(place))
            if (owner, index, row) not in sequences:
                value = values[index][row] / step.norm if values is not None else None
                sequences[owner, index, row] = self._sequence(call, (owner, index, row), value, z)
        tokens, rows = {}, {}
        for part in gather_objects((mine, sequences)):
            tokens |= part[0]
            rows |= part[1]
        report.tokens = [tokens[place] for place in places]
        order = dict.fromkeys(place[:3] for place in places)
        report.sequences = [rows[key] for key in order][:8]
        largest = max((abs(s["share"]) for s in report.sequences), default=0.0)
        if values is not None:  # one that holds next to nothing says nothing
            report.sequences = [s for s in report.sequences if abs(s["share"]) >= 0.01 * largest]
        if values is None:
            for sequence in report.sequences:
                key = _key(sequence)
                own = [t for t in report.tokens if (t.rank, t.micro_batch, t.sequence) == key]
                for token in own:
                    sequence["shares"][token.position - sequence["first_position"]] = token.share
                sequence["share"] = sum(t.share for t in own)

    def _token(self, step, call, place, share, found):
        owner, index, row, column = place
        at = {name: _at(value, call, row, column) for name, value in call.extras.items()}
        logp, old, rollout = float(call.outputs["logps"][row, column]), at.get("old_logps"), at.get("rollout_logps")
        token = None if call.ids is None else int(call.ids[row, column])
        return TokenReport(
            owner, index, row, column - call.offset, token, self._text(token), math.nan if share is None else share,
            weight=float(call.weights["logps"][row, column]) if "logps" in call.weights else None,
            boost=_boost(call, row, column), grad_norm=found.grad_norm if found else None,
            grad_norm_share=found.grad_norm / step.norm if found and step.norm else None,
            layers=_grouped(step, found.norms, layer_of) if found else None,
            kinds=_grouped(step, found.norms, kind_of) if found else None,
            logp=logp, old_logp=old, rollout_logp=rollout, ref_logp=at.get("ref_logps"),
            ratio=_exp(logp, old), mismatch=_exp(old, rollout), omega=_exp(logp, rollout), rho=_rho(call, row),
            advantage=at.get("advantages"), reward=at.get("rewards"), prompt_id=_prompt_id(call, row),
            version=None if at.get("version") is None else int(at["version"]),
        )  # fmt: skip

    def _sequence(self, call, key, shares, z):
        owner, index, row = key
        columns = call.mask[row].nonzero().squeeze(1).tolist()
        first, last = (columns[0], columns[-1] + 1) if columns else (call.offset, call.offset)
        ids = None if call.ids is None else call.ids[row, first:last].tolist()
        at = {name: _at(value, call, row, first) for name, value in call.extras.items()}
        shares = [0.0] * (last - first) if shares is None else shares[first:last].tolist()
        prompt = _prompt_ids(call, row)
        return {
            "rank": owner, "micro_batch": index, "sequence": row,
            "prompt": None if prompt is None or self.tokenizer is None else self.tokenizer.decode(prompt),
            "prompt_id": _prompt_id(call, row),
            "tokens": [self._text(i) or "?" for i in ids] if ids is not None else ["?"] * (last - first),
            "shares": shares, "first_position": first - call.offset, "share": sum(shares), "rho": _rho(call, row),
            "log_rho_z": z.get((index, row)), "advantage": at.get("advantages"), "reward": at.get("rewards"),
            "version": None if at.get("version") is None else int(at["version"]), "length": len(columns),
        }  # fmt: skip

    def _text(self, token):
        if token is None:
            return None
        if self.tokenizer is None:
            return f"[{token}]"
        try:
            return self.tokenizer.decode([token])
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError):
            return f"[{token}]"  # ids beyond the tokenizer's vocabulary: a report is worth more than one token's text

    # trainers ---------------------------------------------------------------------------------------------------------

    def attach(self, trainer, layer_clip=None):
        """Watch a TRL trainer (GRPOTrainer, SFTTrainer, or any whose model returns `log_probs`). -> Attachment.

        Call it before `train()`. layer_clip: options of a LayerClip ({} for its defaults) that acts after the check and before the
        global clip. Metrics go to the trainer's log: gradloc/top1_share, top10_share, certificate, time_ratio on the steps
        that were looked into. Raises ValueError for DeepSpeed (its gradients never reach `.grad`) and for fp16 loss scaling.
        """
        return Attachment(trainer, self, layer_clip)

    def state_dict(self):
        """Everything a resumed run needs to trigger as this one would: plain numbers."""
        return {
            "trigger": self.trigger.state_dict(), "layer_history": list(self.layer_history), "step": self.step,
            "reports": self.reports, "spikes": self.spikes,
        }  # fmt: skip

    def load_state_dict(self, state):
        self.trigger.load_state_dict(state["trigger"])
        self.layer_history = deque(state["layer_history"], maxlen=self.layer_history.maxlen)
        self.step, self.reports, self.spikes = state["step"], state["reports"], state["spikes"]


def token_contributions(model, batch, logps_fn, objective_fn, method="auto"):
    """Each token's part of the gradient norm: c_t = w_t d/d_eps logp_t(theta + eps g/||g||). -> Contributions.

    logps_fn(model, batch) -> (N, T) log-probs (or a tuple or mapping that starts with them: further outputs of that shape, an
    entropy say, count with their token; others, a router's auxiliary loss, go to `remainder`); objective_fn(logps, batch) -> scalar loss.
    method: auto | jvp | finite_difference. .values (N, T) sums to .grad_norm up to .certificate (relative). Several ranks: the
    gradient is the mean over them. Weights, gradients and RNG are left as they were.
    Raises ValueError for an unknown method, or a gradient norm that is zero or not finite.
    """
    calls, parameters, gradient, _ = _backward(model, batch, logps_fn, objective_fn)
    noise, step = rng_state(), Step(model, calls, parameters, gradient)
    try:
        result = contributions(step, method)
    finally:
        set_rng_state(noise)
        step.close()
    if not isinstance(batch, list | tuple):
        result.values = result.values[0]
    return result


def _backward(model, batch, logps_fn, objective_fn):
    """Forward and backward of a loss with `.grad` set aside. -> (calls, parameters, gradient, loss)."""
    inner, parameters = inner_module(model), _trainable(model)
    if not parameters:
        raise ValueError(
            "the model has no trainable parameter: there is no gradient to explain (requires_grad is False everywhere)"
        )
    batches = batch if isinstance(batch, list | tuple) else [batch]
    if not all(isinstance(part, Mapping) for part in batches):
        kinds = sorted({type(part).__name__ for part in batches if not isinstance(part, Mapping)})
        raise ValueError(
            f"batch holds {', '.join(kinds)}: give a dict of tensors, or a list of such dicts (micro-batches)"
        )
    params = list(parameters.values())
    aside, calls, total = [p.grad for p in params], [], 0.0
    noise = rng_state()
    try:
        for p in params:
            p.grad = None
        for part in batches:
            before = rng_state()
            with torch.enable_grad():
                outputs = logps_fn(inner, part)
                if same_rng_state(before, rng_state()):
                    before = None
                named = named_outputs(outputs)
                call = Call(logps_fn, part, named, *_mask_and_ids(part, named["logps"].shape), rng=before)
                call.extras = _extras(part, call.shape) if isinstance(part, Mapping) else {}
                call.watch(named)
                loss = objective_fn(_copies(outputs), part)
                if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
                    shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                    raise ValueError(
                        f"objective_fn returned {shape}, or a value without gradient: it must return the scalar loss"
                    )
                loss.backward()
                if "logps" not in call.weights:
                    raise ValueError(
                        "the loss does not depend on the log-probs that logps_fn returned: nothing can be traced to a token"
                    )
            calls.append(call)
            total += float(loss.detach())
        gradient = [p.grad for p in params]
    finally:
        for p, grad in zip(params, aside, strict=True):
            p.grad = grad
        set_rng_state(noise)
    if world_size() > 1 and not any(isinstance(p, DTensor) for p in params):
        for i, p in enumerate(params):
            mean = torch.zeros_like(p) if gradient[i] is None else gradient[i]
            gradient[i] = sum_over_ranks(mean.contiguous()) / world_size()
    return calls, parameters, gradient, total


# --- reading a batch --------------------------------------------------------------------------------------------------

MASKS = ("mask", "completion_mask", "response_mask", "loss_mask")
EXTRAS = {  # names in batches -> names in the report
    "rollout_logps": "rollout_logps", "sampling_per_token_logps": "rollout_logps",
    "old_logps": "old_logps", "old_per_token_logps": "old_logps",
    "ref_logps": "ref_logps", "ref_per_token_logps": "ref_logps",
    "advantages": "advantages", "rewards": "rewards", "version": "version",
}  # fmt: skip


def _trainable(model):
    """{name: parameter} of what is trained, each once (tied weights). Raises ValueError for FSDP1, whose flat parameters
    have no layers."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError("GradLoc cannot see the layers inside FSDP1's flat parameters: use FSDP2 (fsdp_version 2)")
    return {name: p for name, p in inner_module(model).named_parameters() if p.requires_grad}


def _copies(outputs):
    """What a logps_fn returned, in tensors of its own."""
    if isinstance(outputs, torch.Tensor):
        return outputs.clone()
    if isinstance(outputs, Mapping):
        return {name: _copies(value) for name, value in outputs.items()}
    return tuple(map(_copies, outputs)) if isinstance(outputs, list | tuple) else outputs


def _mask_and_ids(batch, shape):
    """(mask, ids) of a batch in the shape of its log-probs, None where they cannot be told."""
    if not isinstance(batch, Mapping):
        return None, None
    n, t = shape

    def fitting(name):
        value = batch.get(name)
        fits = isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[0] == n and value.shape[1] >= t
        return value[:, value.shape[1] - t :] if fits else None

    masks = [m for m in map(fitting, MASKS) if m is not None]
    mask = masks[0] != 0 if masks else None
    labels = fitting("labels")
    if mask is None and labels is not None:
        mask = labels != -100
    ids = fitting("completion_ids")
    return mask, fitting("input_ids") if ids is None else ids


def _extras(batch, shape):
    extras = {}
    for name, known in EXTRAS.items():
        value = batch.get(name)
        if (
            isinstance(value, torch.Tensor)
            and value.shape[:1] == shape[:1]
            and (value.dim() == 1 or value.shape[1] <= shape[1])
        ):
            extras[known] = value.detach()
    return extras


def _at(value, call, row, column):
    """A recorded tensor's number for one token; None where it has none. (N,) and (N, 1) belong to the sequence."""
    if value.dim() == 1:
        return float(value[row])
    if value.shape[1] == 1:
        return float(value[row, 0])
    shifted = column - (call.shape[1] - value.shape[1])
    return float(value[row, shifted]) if shifted >= 0 else None


def _exp(numerator, denominator):
    if numerator is None or denominator is None:
        return None
    return (
        math.exp(min(max(numerator - denominator, -80.0), 80.0))
        if numerator == numerator and denominator == denominator
        else math.nan
    )


def _advantage_outlier(sequences):
    """A sentence where the leading sequence's advantage is far larger than the others'."""
    sizes = [abs(s["advantage"]) for s in sequences if s["advantage"] is not None]
    if len(sizes) < 3 or sequences[0]["advantage"] is None:
        return None
    median = statistics.median(sizes[1:])
    if not abs(sequences[0]["advantage"]) > 5 * median > 0:
        return None
    first = sequences[0]["advantage"]
    return f"the advantage of the first listed sequence, {first:.3g}, is {abs(first) / median:.0f} times the others'"


def _boost(call, row, column):
    """A token's |dLoss/dlogp| over the median of its sequence: above 1 the loss weighs it more than its neighbours."""
    if "logps" not in call.weights:
        return None
    weights = call.weights["logps"][row][call.mask[row]].abs()
    median = float(weights.median()) if len(weights) else 0.0
    return float(call.weights["logps"][row, column].abs()) / median if median > 0 else None


def _log_rho(call):
    """(N,) mean over counted tokens of log omega; None without rollout log-probs."""
    rollout = call.extras.get("rollout_logps")
    if rollout is None or rollout.dim() != 2:
        return None
    t = rollout.shape[1]
    mask, logps = call.mask[:, -t:], call.outputs["logps"][:, -t:]
    difference = torch.where(mask, logps.double() - rollout.double(), 0.0)
    return difference.sum(1) / mask.sum(1).clamp(min=1)


def _rho(call, row):
    log_rho = _log_rho(call)
    return None if log_rho is None else math.exp(min(max(float(log_rho[row]), -80.0), 80.0))


def _log_rho_z(calls):
    """{(call, row): robust deviations of log rho from the median over this rank's sequences}."""
    values = {}
    for index, call in enumerate(calls):
        log_rho = _log_rho(call)
        if log_rho is not None:
            counted = call.mask.any(1)
            values |= {(index, i): float(x) for i, x in enumerate(log_rho) if counted[i] and math.isfinite(x)}
    if len(values) < 4:
        return {}
    middle = statistics.median(values.values())
    spread = 1.4826 * statistics.median(abs(x - middle) for x in values.values())
    return {key: abs(x - middle) / max(spread, 1e-6) for key, x in values.items()}


def _prompt_ids(call, row):
    batch = call.batch
    if not isinstance(batch, Mapping):
        return None
    if isinstance(batch.get("prompt_ids"), torch.Tensor):
        ids, mask = batch["prompt_ids"][row], batch.get("prompt_mask")
    elif isinstance(batch.get("input_ids"), torch.Tensor) and call.ids is not None:
        columns = call.mask[row].nonzero().squeeze(1)
        width = batch["input_ids"].shape[1]
        end = width - call.shape[1] + (int(columns[0]) if len(columns) else 0)
        ids, mask = batch["input_ids"][row, :end], batch.get("attention_mask")
    else:
        return None
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        ids = ids[mask[row, : len(ids)] != 0]
    return ids.tolist()


def _prompt_id(call, row):
    """Short hash of the prompt's tokens: the same prompt has the same id in every step and run."""
    ids = _prompt_ids(call, row)
    return None if not ids else hashlib.sha256(str(ids).encode()).hexdigest()[:12]


def _grouped(step, norms, label_of):
    labels = [label_of(name) for name in step.names]
    names = list(dict.fromkeys(labels))
    grouped = group_norms(norms.cpu(), torch.tensor([names.index(label) for label in labels]), len(names))
    return dict(zip(names, grouped.tolist(), strict=True))


def _diagnose_into(report, token_band, seq_band):
    tokens = [vars(t) for t in report.tokens]
    cause, report.evidence, report.not_judged = diagnose(tokens, report.sequences, report.layers, token_band, seq_band)
    outlier = _advantage_outlier(report.sequences)
    if outlier:
        report.evidence.append(outlier)
    report.cause, report.remedy = cause, REMEDIES[cause]
    if report.trigger["reason"] == "every_n_steps":
        report.remedy = ""  # nothing to treat


def _place(item, many):
    """`sequence 5, micro-batch 1, on rank 0` of a token or a sequence of the report."""
    item = item if isinstance(item, dict) else vars(item)
    part = f", micro-batch {item['micro_batch']}," if many else ""
    return f"sequence {item['sequence']}{part} on rank {item['rank']}"


def _key(item):
    item = item if isinstance(item, dict) else vars(item)
    return item["rank"], item["micro_batch"], item["sequence"]


def _sentence(report, token_band, seq_band):
    """The headline: who, where, why, and the flag that treats it."""
    head, many = f"step {report.step}: ", report.num_micro_batches > 1
    t = (
        max(report.tokens, key=lambda x: x.share) if report.tokens else None
    )  # what the norm is made of, not what opposes it
    if report.cause == "N":
        text = head + report.evidence[0]
        return text + (f"; token {t.position} ({t.token!r}) of {_place(t, many)}" if t is not None else "")
    if report.grad_norm == 0:
        return head + report.note
    if t is None:
        text = head + f"gradient norm {report.grad_norm:.3g}, and no token stands out"
        if report.search and report.search["exhausted"]:
            text = (
                head
                + f"the search budget of {report.search['budget']} backward passes ended before a token was reached"
            )
    else:
        text = (
            head
            + f"{100 * t.share:.0f} % of the gradient norm is token {t.position} ({t.token!r}) of {_place(t, many)}"
        )
        rest = [x for x in report.tokens if x is not t]
        if rest and abs(rest[0].share) > 0.1:
            text += f", {100 * rest[0].share:.0f} % the next"
        whole = next((x["share"] for x in report.sequences if _key(x) == _key(t)), None)
        if whole is not None and whole > max(0.5, 1.5 * t.share):
            text += f", {100 * whole:.0f} % its whole sequence"
        if t.layers:
            text += f", {_leading(t.layers)}"
    if report.cause == "A.1":
        worst = max((x for x in report.tokens if outside_weight(vars(x), token_band)), key=lambda x: abs(x.share))
        name, value = outside_weight(vars(worst), token_band)
        where = "" if worst is t else f" at token {worst.position} of {_place(worst, many)}"
        kind = "stale token" if stale(vars(worst)) else "token mismatch"
        text += f"; {WEIGHTS[name]} = {value:.2g}{where} ({kind})"
    elif report.cause == "A.2":
        worst = max(standing_out(report.sequences, seq_band), key=lambda x: abs(x["share"]))
        where = "" if t is not None and _key(worst) == _key(t) else f" in {_place(worst, many)}"
        text += f"; rho = {worst['rho']:.3g}{where} with omega in its band (sequence mismatch)"
    elif report.cause == "B":
        name = max((n for n in report.layers if report.layers[n]["ratio"]), key=lambda n: report.layers[n]["ratio"])
        text += f"; {name} at {report.layers[name]['ratio']:.1f} times its own median (layer heterogeneity)"
    elif report.not_judged:
        text += "; cause not judged: " + "; ".join(report.not_judged)
    else:
        text += "; no known cause"
    if report.trigger["reason"] == "every_n_steps":
        return text + "; no spike, looked at in turn"
    return text + (f": {report.remedy}" if report.remedy else "")


def _leading(layers):
    """The fewest layers that hold 80 % of the squared norm, as `layers 0-2` or a list."""
    total, taken = sum(n * n for n in layers.values()), []
    for name in sorted(layers, key=layers.get, reverse=True):
        if sum(layers[n] ** 2 for n in taken) >= 0.8 * total:
            break
        taken.append(name)
    numbers = sorted(int(n.split()[1]) for n in taken if n.startswith("layer "))
    others = [n for n in taken if not n.startswith("layer ")]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return ", ".join([f"layers {numbers[0]}-{numbers[-1]}", *others])
    return ", ".join([f"layer {n}" for n in numbers] + others)


# --- trainers ---------------------------------------------------------------------------------------------------------


class Attachment(TrainerCallback):
    """Connects a GradLoc (or None) and a LayerClip (its options, or None) to one trainer.

    routes() -> the experts that the last training forward of a MoE used, or None: GradLoc's own passes replay them. The
    gradient takes the routing as given, so a choice that flips under moved weights must not count.

    The model's forward hook records calls whose output has `log_probs` (TRL's fused head); `compute_loss` is wrapped to see
    the batch and the loss; `accelerator.clip_grad_norm_` is wrapped because it is the only moment between the
    backward and the clipping, and the trainer calls it also where it does not clip.
    """

    def __init__(self, trainer, gradloc=None, layer_clip=None, routes=None):
        if not hasattr(trainer, "accelerator"):
            raise ValueError(
                f"attach takes a trainer, and got {type(trainer).__name__}: use watch and check in a loop of your own"
            )
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                "GradLoc and LayerClip read .grad, which DeepSpeed keeps to itself: use DDP or FSDP2, or --gradloc off"
            )
        if trainer.accelerator.scaler is not None:
            raise ValueError(
                "GradLoc and LayerClip do not follow fp16 loss scaling: train with --bf16, or --gradloc off"
            )
        self.trainer, self.gradloc, self.routes = trainer, gradloc, routes
        self.layer_clip, self._clip_options, self._clip_state = None, layer_clip, None
        self.batch = self.noise = None
        self.checked = False
        self.metrics = {}
        if gradloc is not None:
            module = inner_module(trainer.accelerator.unwrap_model(trainer.model))
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            module.register_forward_hook(self._after_forward, with_kwargs=True)
            self._compute_loss = trainer.compute_loss
            trainer.compute_loss = self._watched_loss
        self._clip = trainer.accelerator.clip_grad_norm_
        trainer.accelerator.clip_grad_norm_ = self._check_and_clip
        trainer.callback_handler.callbacks.insert(0, self)  # before the callbacks that write the log down

    def on_train_begin(self, args, state, control, **kwargs):
        self.checked = False  # a rollback leaves its step between the check and the update
        if self._clip_options is not None:  # now the parameters are those that train: FSDP2 has replaced the others
            before = (
                self._clip_state if self.layer_clip is None else self.layer_clip.state_dict()
            )  # a second train() goes on
            self.layer_clip = LayerClip(self.trainer.model, **self._clip_options)
            if before is not None:
                try:
                    self.layer_clip.load_state_dict(before)
                except ValueError as error:
                    raise ValueError(f"{error} (--layer_clip_mode, --use_peft)") from error

    def state_dict(self):
        return {
            "gradloc": None if self.gradloc is None else self.gradloc.state_dict(),
            "layer_clip": None if self.layer_clip is None else self.layer_clip.state_dict(),
        }

    def load_state_dict(self, state):
        """Before `train()`. A part that the state lacks, or that is off now, starts anew."""
        if self.gradloc is not None and state["gradloc"] is not None:
            self.gradloc.load_state_dict(state["gradloc"])
        self._clip_state, self.layer_clip = state["layer_clip"], None  # a rollback comes after an earlier train()

    def _watched_loss(self, model, inputs, *args, **kwargs):
        self.batch = inputs
        try:
            loss = self._compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.batch = None
        used = None if self.routes is None else self.routes()
        if used is not None and self.gradloc.calls:
            call = self.gradloc.calls[-1]
            call.batch = call.batch | {"routes": used}
        if (
            inputs.get("support") is not None and self.gradloc.calls
        ):  # sets that sampling left over: part of the model's call
            call = self.gradloc.calls[-1]
            call.batch = call.batch | {"support": inputs["support"], "first": call.offset}
        value = loss[0] if isinstance(loss, tuple) else loss
        if torch.is_grad_enabled() and value.requires_grad:
            self.gradloc.losses.append(value.detach())
        return loss

    def _before_forward(self, module, args, kwargs):
        recording = self.batch is not None and torch.is_grad_enabled()
        self.noise = rng_state() if recording and module.training else None

    def _after_forward(self, module, args, kwargs, output):
        if self.batch is None or not torch.is_grad_enabled() or not kwargs.get("fused_lm_head"):
            return
        call = self.gradloc.record(_fused_outputs, kwargs, _named(output), self.noise)
        if call is not None:
            call.forward_mode = False  # TRL's fused head has no forward derivative
            labels = kwargs["labels"][:, 1:]
            call._mask, call.ids = labels != -100, kwargs["input_ids"][:, 1:]
            self._add_extras(call)

    def _add_extras(self, call):
        """The trainer's batch beside the model's own: completions are the last columns."""
        if isinstance(self.batch.get("completion_ids"), torch.Tensor):
            width = self.batch["completion_ids"].shape[1]
            call.offset = call.shape[1] - width
            call.extras = _extras(self.batch, call.shape)
            tools = self.batch.get("tool_mask")
            if tools is not None:
                call._mask = call._mask.clone()
                call._mask[:, call.offset :] &= tools != 0

    def _check_and_clip(self, parameters, max_norm, *args, **kwargs):
        self._check()
        return self._clip(parameters, max_norm, *args, **kwargs)

    def _check(self):
        if self.checked:
            return
        self.checked = True
        model, step = self.trainer.model, self.trainer.state.global_step + 1
        if self.gradloc is not None:
            report = self.gradloc.check(model, step)
            if report is not None:
                for name, value in (
                    ("top1_share", report.top1_share), ("top10_share", report.top10_share),
                    ("certificate", report.certificate), ("time_ratio", report.time_ratio),
                ):  # fmt: skip
                    if value is not None:
                        self._log(f"gradloc/{name}", value)
        if self.layer_clip is not None:
            for name, value in self.layer_clip.clip_().items():
                self._log(name, value)

    def _log(self, name, value):
        if hasattr(self.trainer, "_metrics"):  # TRL: averaged into the next log line
            self.trainer._metrics["train"][name].append(value)
        else:
            self.metrics.setdefault(name, []).append(value)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._check()  # a trainer that did not ask accelerate for the norm
        self.checked = False

    def on_train_end(self, args, state, control, **kwargs):
        gradloc = self.gradloc
        if gradloc is not None and gradloc.folder is not None and gradloc.reports and state.is_world_process_zero:
            with contextlib.suppress(ValueError):  # no report could be written
                gradloc_report.write_index(gradloc.folder)

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name, values in self.metrics.items():
            logs[name] = state.log_history[-1][name] = sum(values) / len(values)  # the history holds a copy
        self.metrics.clear()


def _named(output):
    return {"logps": output.log_probs, "entropy": output.entropy, "aux_loss": output.aux_loss}


def _fused_outputs(model, kwargs):
    kwargs = dict(kwargs)
    routes, support, first = (kwargs.pop(name, None) for name in ("routes", "support", "first"))
    with contextlib.ExitStack() as replays:
        if routes is not None:
            replays.enter_context(replay_routing(model, routes))
        if support is not None:
            replays.enter_context(replay_support(support, kwargs["labels"][:, 1:] != -100, first))
        return _named(model(**kwargs))


# --- command line -----------------------------------------------------------------------------------------------------


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2 or argv[0] != "view" or argv[1] in ("-h", "--help"):
        sys.exit(
            "usage: python gradloc.py view DIR     lists the spikes of a run (or of every run below DIR), writes DIR/index.html"
        )
    try:
        print(gradloc_report.view(argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
