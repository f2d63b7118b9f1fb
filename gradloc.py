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

import gradloc_report
from gradloc_batch import (
    boost,
    copies,
    exp_difference,
    extras_of,
    log_rho_z,
    mask_and_ids,
    prompt_id,
    prompt_ids,
    rho_of,
    value_at,
)
from gradloc_causes import CAUSES, cause_name, diagnose_into, place_key, sentence
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
from gradloc_trainer import Attachment
from layer_clip import LayerClip, gradient_norms, group_norms, kind_of, layer_of, parameter_norms  # noqa: F401

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
    cause_name: str = ""  # "" = the cause's usual one
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
        """Absolute share of the largest token, 0 without tokens."""
        return abs(self.tokens[0].share) if self.tokens else 0.0

    @property
    def top10_share(self):
        """Sum of the absolute shares of the ten largest tokens."""
        return sum(abs(t.share) for t in self.tokens[:10])

    def to_dict(self):
        """Plain values: one line of spikes.jsonl."""
        fields = {k: v for k, v in vars(self).items() if k != "page"}
        return fields | {
            "format": 1,
            "update": self.step,
            "world_size": world_size(),
            "cause_name": self.cause_name or CAUSES[self.cause],
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
        self.level = 0.0  # the largest median so far, fading
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
        """Plain numbers: all that the next decision depends on."""
        return {
            "norms": list(self.norms), "level": self.level, "seen": self.seen, "quiet": dict(self.quiet),
            "suppressed": self.suppressed,
        }  # fmt: skip

    def load_state_dict(self, state):
        """The counterpart of `state_dict`."""
        self.norms, self.level = deque(state["norms"], maxlen=self.norms.maxlen), state["level"]
        self.seen, self.suppressed, self.quiet = state["seen"], state["suppressed"], dict(state["quiet"])


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
    token_band, seq_band   omega of a token, rho of a sequence: outside they are a mismatch (TokenClip's, SeqClip's bands)
    differentiation        of "directional": auto | jvp | finite_difference
    quiet          True: no sentence on the console
    clips_in       script that has the flags of TokenClip and SeqClip, named where one of them is the remedy
    trigger, tau, window, warmup, factor, ceiling, z, cooldown, every_n_steps: see Trigger
    Raises ValueError for an unknown method or aggregation.
    """

    def __init__(
        self, folder=None, method="directional", tokenizer=None, aggregation="token_mean", confirm=4, tolerance=0.05, budget=128,
        token_band=(0.5, 5.0), seq_band=(0.995, 1.005), differentiation="auto", quiet=False, clips_in="", **trigger,
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
        self.clips_in = clips_in
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
        return copies(outputs)  # a loss that edits them in place must not lose the hooks

    def record(self, logps_fn, batch, outputs, noise=None):
        """Remember a call that was made: logps_fn(model, batch) gave `outputs`, which the coming backward goes through."""
        named = named_outputs(outputs)
        if noise is not None and same_rng_state(noise, rng_state()):
            noise = None  # the call drew no random number (dropout, NEFTune, ...): its rows may be cut out
        if not (torch.is_grad_enabled() and named["logps"].requires_grad):
            return None
        call = Call(logps_fn, batch, named, *mask_and_ids(batch, named["logps"].shape), rng=noise)
        if isinstance(batch, Mapping):
            call.extras = extras_of(batch, call.shape)
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
                # write, not print: progress bars stay whole
                tqdm.write(f"GradLoc: {line}" + (f"\n  {report.page}" if report.page else ""))
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
            diagnose_into(report, self.token_band, self.seq_band, self.clips_in)
        report.cause_name = cause_name(report, self.token_band)
        report.sentence = sentence(report, self.token_band, self.seq_band)
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
        z = log_rho_z(step.calls)
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
                key = place_key(sequence)
                own = [t for t in report.tokens if (t.rank, t.micro_batch, t.sequence) == key]
                for token in own:
                    sequence["shares"][token.position - sequence["first_position"]] = token.share
                sequence["share"] = sum(t.share for t in own)

    def _token(self, step, call, place, share, found):
        owner, index, row, column = place
        at = {name: value_at(value, call, row, column) for name, value in call.extras.items()}
        logp, old, rollout = float(call.outputs["logps"][row, column]), at.get("old_logps"), at.get("rollout_logps")
        token = None if call.ids is None else int(call.ids[row, column])
        return TokenReport(
            owner, index, row, column - call.offset, token, self._text(token), math.nan if share is None else share,
            weight=float(call.weights["logps"][row, column]) if "logps" in call.weights else None,
            boost=boost(call, row, column), grad_norm=found.grad_norm if found else None,
            grad_norm_share=found.grad_norm / step.norm if found and step.norm else None,
            layers=_grouped(step, found.norms, layer_of) if found else None,
            kinds=_grouped(step, found.norms, kind_of) if found else None,
            logp=logp, old_logp=old, rollout_logp=rollout, ref_logp=at.get("ref_logps"),
            ratio=exp_difference(logp, old), mismatch=exp_difference(old, rollout), omega=exp_difference(logp, rollout),
            rho=rho_of(call, row),
            advantage=at.get("advantages"), reward=at.get("rewards"), prompt_id=prompt_id(call, row),
            version=None if at.get("version") is None else int(at["version"]),
        )  # fmt: skip

    def _sequence(self, call, key, shares, z):
        owner, index, row = key
        columns = call.mask[row].nonzero().squeeze(1).tolist()
        first, last = (columns[0], columns[-1] + 1) if columns else (call.offset, call.offset)
        ids = None if call.ids is None else call.ids[row, first:last].tolist()
        at = {name: value_at(value, call, row, first) for name, value in call.extras.items()}
        shares = [0.0] * (last - first) if shares is None else shares[first:last].tolist()
        prompt = prompt_ids(call, row)
        return {
            "rank": owner, "micro_batch": index, "sequence": row,
            "prompt": None if prompt is None or self.tokenizer is None else self.tokenizer.decode(prompt),
            "prompt_id": prompt_id(call, row),
            "tokens": [self._text(i) or "?" for i in ids] if ids is not None else ["?"] * (last - first),
            "shares": shares, "first_position": first - call.offset, "share": sum(shares), "rho": rho_of(call, row),
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
        """The counterpart of `state_dict`."""
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
                call = Call(logps_fn, part, named, *mask_and_ids(part, named["logps"].shape), rng=before)
                call.extras = extras_of(part, call.shape) if isinstance(part, Mapping) else {}
                call.watch(named)
                loss = objective_fn(copies(outputs), part)
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


# --- parts of a model -------------------------------------------------------------------------------------------------


def _trainable(model):
    """{name: parameter} of what is trained, each once (tied weights). Raises ValueError for FSDP1, whose flat parameters
    have no layers."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError("GradLoc cannot see the layers inside FSDP1's flat parameters: use FSDP2 (fsdp_version 2)")
    return {name: p for name, p in inner_module(model).named_parameters() if p.requires_grad}


def _grouped(step, norms, label_of):
    labels = [label_of(name) for name in step.names]
    names = list(dict.fromkeys(labels))
    grouped = group_norms(norms.cpu(), torch.tensor([names.index(label) for label in labels]), len(names))
    return dict(zip(names, grouped.tolist(), strict=True))


# --- command line -----------------------------------------------------------------------------------------------------


def main(argv=None):
    """`python gradloc.py view DIR`."""
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
