"""The deployment guide as code: its troubleshooting table, and its checklist filled in from what a run wrote.

`write_acceptance(run)` reads metrics.jsonl, events.jsonl, alignment.json and guard.json and writes acceptance.md and acceptance.html: every
line of the guide's checklist with measured value, bound, verdict and source. Verdicts: pass and fail (measured in this run), too short
(about the course of a run that had fewer than `TREND_STEPS` steps; such a line can fail but not pass), by construction (the code is made
so, whatever the run did), off (the mechanism is switched off, or the model has no such thing), operator (about the clusters around a
run; nothing in a run can measure it).
"""

import html
import json
import math
import re
import statistics
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from rlvr_report import read_metrics

# --- troubleshooting --------------------------------------------------------------------------------------------------

# metric of the symptom -> likely cause, what to do. The first five causes and actions are the guide's table; first match wins.
TROUBLES = (
    ("grad_norm", "a ratio clip that is too wide or not active", "check ratio/... and omega/...; {gradloc} names the token"),
    ("*/masked_frac", "sampling and updates out of step", "fewer updates a sampling, or review the threshold"),
    ("routing/*", "routes not persisted, or versions that differ", "--routing_replay r3; compare alignment.json"),
    ("guard/effective_batch", "too small a minimum keep ratio, or groups of equal rewards", "raise min_keep_ratio; other problems"),
    ("step_time", "extra computation and transfer", "smaller supports (--top_k), more --verifier_workers"),
    ("support/*", "a policy that left the sampled tokens, or a record of another sample", "--keep_sampling_mask; fewer updates a sampling"),
    ("mismatch/*", "engine settings or stale weights", "compare alignment.json; --rollout_dtype nearer to training's"),
    ("omega/*", "training-inference mismatch", "--token_clip icepop (grpo_tokenclip.py), or eq. 9's sequence mask (dsv32_stable.py)"),
    ("ratio/*", "too many updates a sampling", "--num_minibatches lower, or a smaller --learning_rate"),
    ("kl", "too weak a KL, or tokens far below the reference", "raise beta in control.yaml; unbiased_kl.clip_ratio"),
    ("entropy", "entropy collapse", "raise --epsilon_high, lower --learning_rate, or a higher --temperature"),
    ("reward", "reward collapse", "verifier/... and completions/clipped_ratio first; then lower the learning rate"),
    ("guard/reward_share", "reward collapse", "lower the learning rate (--guard_on_rollback learning_rate_scale*0.5)"),
    ("guard/update_norm", "an update far larger than before", "lower --learning_rate, or longer --warmup_steps"),
    ("guard/stale", "weights that do not reach the rollout engine", "check the engine's push; a restart of the engine"),
    ("verifier/*", "a verifier that is overloaded or fed with hostile answers", "--verifier_workers, --verifier_timeout_s"),
)  # fmt: skip


def cause_of(metric, rule="", on=()):
    """-> (likely cause or None, what to do) of a symptom. on: which of "gradloc" and "rollback" the run has already."""
    tool = "GradLoc's report" if "gradloc" in on else "--gradloc directional"
    if rule == "not finite":
        action = f"{tool} names the tensor" + ("" if "rollback" in on else "; --guard rollback passes the batch")
        return "a NaN or Inf in weights, logits or loss", action
    for pattern, cause, action in TROUBLES:
        if fnmatch(metric, pattern):
            return cause, action.format(gradloc=tool)
    return None, f"to find it: {tool}" + (" of a step at which the gradient norm jumps" if "gradloc" in on else "")


def glossary():
    """Names of the README's table of metrics; `x/...` as the pattern `x/*`. Empty without a README beside this file."""
    readme = Path(__file__).with_name("README.md")
    table = readme.read_text().split("## Metrics")[-1].split("\n## ")[0] if readme.exists() else ""
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name.replace("...", "*") for row in rows for name in re.findall(r"`([^`]+)`", row)}


# --- what a run left behind -------------------------------------------------------------------------------------------


@dataclass
class Line:
    """One line of the checklist."""

    section: str
    text: str
    measured: str
    bound: str
    verdict: str
    source: str


class Run:
    """The files of a run, read once."""

    def __init__(self, folder):
        self.folder = Path(folder)
        if not (self.folder / "metrics.jsonl").exists():
            raise FileNotFoundError(f"{self.folder} holds no metrics.jsonl: give the --output_dir of a run")
        self.records = [r for r in read_metrics(self.folder / "metrics.jsonl") if "grad_norm" in r]
        self.steps = self.records[-1]["step"] if self.records else 0
        self.events = self._lines("events.jsonl")
        self.alignment, self.ledger = self._json("alignment.json"), self._json("guard.json")
        self.settings = self.alignment.get("settings", {})

    def _json(self, name):
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else {}

    def _lines(self, name):
        path = self.folder / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def values(self, metric):
        """The finite values of a metric, step by step."""
        return [r[metric] for r in self.records if isinstance(r.get(metric), float) and math.isfinite(r[metric])]

    def broken(self):
        """(step, metric) of every value that is not finite; NaN of a metric that counted nothing is none."""
        return [
            (r["step"], k) for r in self.records for k, v in r.items()
            if k in ("loss", "grad_norm", "kl", "mismatch/k3", "omega/max") and isinstance(v, float) and not math.isfinite(v)
        ]  # fmt: skip

    def alarms(self, *patterns, levels=("critical",)):
        """Alarms about metrics that match a pattern, those of steps that were rolled back left out."""
        skip = {step for back in self.ledger.get("rollbacks", []) for step in range(back["skip"][0], back["at"] + 1)}
        return [
            e for e in self.events
            if e.get("kind") == "alarm" and e["level"] in levels and any(fnmatch(e["metric"], p) for p in patterns)
            and e["step"] not in skip
        ]  # fmt: skip

    def named(self, kind):
        """Events of one kind."""
        return [e for e in self.events if e.get("kind") == kind]


def _range(values, digits=3):
    if not values:
        return "not logged"
    return f"{min(values):.{digits}g} to {max(values):.{digits}g}, last {values[-1]:.{digits}g}"


TREND_STEPS = 50  # guide: not stated; we: three times the history that the guard's relative bounds need, 16 steps
VERDICTS = {  # -> its name in the count, colour of its rows
    "pass": ("measured and passed", "#dff5e1"),
    "fail": ("fail", "#ffd9d6"),
    "too short": ("too short", "#fff3cd"),
    "by construction": ("by construction", "#f1f7e8"),
    "off": ("off", "#eee"),
    "operator": ("operator", "#e8eefc"),
}


# --- the checklist ----------------------------------------------------------------------------------------------------


def checklist(folder):
    """Every line of the guide's checklist for one run -> [Line]."""
    run, lines = Run(folder), []
    stability = run.settings.get("rl_stability", {})

    def add(section, text, measured, bound, verdict, source, trend=False):
        verdict = {True: "pass", False: "fail"}.get(verdict, verdict)
        if trend and verdict == "pass" and run.steps < TREND_STEPS:
            verdict, bound = "too short", f"{bound}; {TREND_STEPS} steps or more"
        lines.append(Line(section, text, str(measured), bound, verdict, source))

    def quiet(*patterns):
        found = run.alarms(*patterns)
        return not found, f"{len(found)} critical alarms"

    def metric(section, text, name, *patterns, needed=True):
        """A metric in range: logged, and no critical alarm about it outside of steps that were rolled back."""
        values = run.values(name)
        verdict = "off" if not values and not needed else bool(values) and quiet(*(patterns or (name,)))[0]
        source = "metrics.jsonl, events.jsonl"
        add(section, text, f"{name} {_range(values)}", "no critical alarm", verdict, source, trend=True)

    steps, broken = run.steps, run.broken()
    undone = {step for back in run.ledger.get("rollbacks", []) for step in range(back["skip"][0], back["at"] + 1)}
    broken = [b for b in broken if b[0] not in undone]
    halted, rolled = run.named("halt"), run.ledger.get("rollbacks", [])
    norms = run.values("grad_norm")
    largest = max(
        (x / statistics.median(norms[max(0, i - 64) : i]) for i, x in enumerate(norms)
         if i >= 16 and statistics.median(norms[max(0, i - 64) : i]) > 0), default=1.0,
    )  # fmt: skip
    masked = sorted({k for r in run.records for k in r if k.endswith("/masked_frac")})
    routed, kept = run.values("routing/rollout_agreement"), run.values("support/agreement")
    reached = {"good": run.ledger.get("good", []), "waiting": run.ledger.get("waiting", [])}
    checkpoints = reached["good"] + reached["waiting"]
    times = run.values("step_time")
    quarter = max(1, len(times) // 4)
    slower, step_time = "too short", f"{len(times)} step times"
    if len(times) >= 8:
        factor = statistics.median(times[-quarter:]) / statistics.median(times[:quarter])
        slower, step_time = factor < 2, f"step time, last over first quarter: {factor:.2f}x"

    part = "Acceptance goals"
    add(
        part,
        "Numerical stability: no explosion, no run stopped by a spike",
        f"{steps} steps, {len(broken)} non-finite, largest norm {largest:.1f}x its median, {len(halted)} halts, {len(rolled)} rollbacks",
        "0 non-finite, 0 halts",
        steps > 0 and not broken and not halted and quiet("grad_norm")[0],
        "metrics.jsonl, events.jsonl",
        trend=True,
    )
    effective = run.values("guard/effective_batch")
    add(
        part,
        "Learning effectiveness: divergent samples filtered, no invalid gradients",
        f"filters logged: {', '.join(masked) or 'none'}; effective batch {_range(effective)}",
        "some filter; mean effective batch > 0.02",
        "off" if not masked else not effective or statistics.fmean(effective) > 0.02,
        "metrics.jsonl",
        trend=True,
    )
    mean = run.values("mismatch/mean")
    add(
        part,
        "Train-inference consistency: same routing and sampling on both sides",
        f"mismatch/mean {_range(mean, 4)}; routing agreement {_range(routed)}; support agreement {_range(kept)}",
        "mean mismatch within 0.05 of 1",
        bool(mean) and abs(statistics.fmean(mean) - 1) < 0.05,
        "metrics.jsonl",
        trend=True,
    )
    add(
        part,
        "Scalability: compute grows without stability regressions",
        step_time,
        "below 2x",
        slower,
        "metrics.jsonl",
        trend=True,
    )
    add(
        part,
        "Observability: metrics monitored, anomalies alerted, faults rolled back",
        f"{len(run.events)} events, {len(checkpoints)} checkpoints, good: {reached['good']}",
        "guard on",
        bool(run.ledger) or bool(run.events),
        "events.jsonl, guard.json",
    )
    add(
        part,
        "Holds when RL compute reaches a high share of pre-training cost",
        "-",
        "-",
        "operator",
        "budget of the project",
    )

    part = "Architecture"
    add(part, "Training and rollout clusters separate, link fast enough", "-", "-", "operator", "README, real runs")
    ratio = run.values("ratio/p99")
    add(
        part,
        "Old, current and reference policy kept apart",
        f"ratio/p99 {_range(ratio)}; kl {_range(run.values('kl'))}",
        "both logged (kl: with beta)",
        bool(ratio),
        "metrics.jsonl",
    )
    switches = {
        "unbiased_kl": stability.get("unbiased_kl", {}).get("enabled"),
        "sequence_masking": stability.get("sequence_masking", {}).get("enabled"),
        "keep_routing": run.settings.get("routing_replay") == "r3",
        "keep_sampling_mask": run.settings.get("keep_sampling_mask"),
    }
    on = [name for name, value in switches.items() if value]
    add(
        part,
        "Mechanism modules: unbiased KL, sequence filter, consistency",
        f"on: {', '.join(on) or 'none'}",
        "each its own switch",
        "pass" if on else "off",
        "alignment.json",
    )
    logged = [
        name
        for name in ("kl", "grad_norm", "routing/rollout_agreement", "support/agreement", *masked)
        if run.values(name)
    ]
    add(
        part,
        "Metric service records KL, gradient norm, mask ratio, agreement",
        ", ".join(logged),
        "grad_norm and what is on",
        "grad_norm" in logged,
        "metrics.jsonl",
    )
    add(
        part,
        "Alerts on explosion, mask ratio, agreement",
        f"{len(run.settings.get('bounds', []))} thresholds",
        "above 0",
        bool(run.settings.get("bounds")),
        "alignment.json",
    )
    add(
        part,
        "One configuration centre",
        "rl_stability" if stability else "flags",
        "one namespace",
        "pass" if stability else "off",
        "alignment.json",
    )
    add(
        part,
        "Periodic checkpoints; return to a stable version",
        f"{len(checkpoints)} on record",
        "at least 1",
        bool(checkpoints),
        "guard.json",
    )

    part = "Preparation"
    add(
        part,
        "Custom losses and sample filters",
        "recipes override _compute_loss",
        "-",
        "by construction",
        "recipes/dsv32_stable.py",
    )
    fits = bool(run.named("alignment")) and run.alignment.get("rollout") is not None
    untold = ", ".join(run.alignment.get("not_compared", []))
    add(
        part,
        "Model and tokenizer version equal on both sides",
        "alignment check " + ("passed" if fits else "not run") + (f"; not comparable: {untold}" if untold else ""),
        "no difference",
        fits,
        "alignment.json",
    )
    add(
        part,
        "Own configuration namespace",
        "rl_stability" if stability else "-",
        "present",
        "pass" if stability else "off",
        "alignment.json",
    )
    add(part, "Clusters sized by rollout throughput and update frequency", "-", "-", "operator", "-")
    add(part, "Separate resources for metrics and logs", "-", "-", "operator", "-")
    disk = [e["text"] for e in run.events if e["text"].startswith("disk: ")]
    add(
        part,
        "Checkpoint capacity estimated",
        disk[-1][6:] if disk else "no checkpoints asked for",
        "fits the disk",
        "pass" if disk else "off",
        "events.jsonl",
    )
    keys = {
        "unbiased_kl": {"enabled", "estimator", "clip_ratio"},
        "consistency": {"keep_routing", "keep_sampling_mask"},
        "sequence_masking": {"enabled", "divergence_threshold", "min_keep_ratio"},
    }
    add(
        part,
        "Config keys present",
        json.dumps(stability),
        "the guide's keys",
        all(names <= set(stability.get(name, {})) for name, names in keys.items()) if stability else "off",
        "alignment.json",
    )
    changes = run.named("control")
    add(
        part,
        "Thresholds versioned, changes audited; access control and encryption",
        f"{len(changes)} changes with old, new, step",
        "audit trail; access: operator",
        "by construction",
        "events.jsonl",
    )

    part = "Step 1, environment"
    libraries = run.alignment.get("libraries", {})
    add(
        part,
        "Same framework, tokenizer and weights on both sides",
        ", ".join(f"{k} {v}" for k, v in libraries.items()) or "not recorded",
        "recorded and equal",
        bool(libraries) and fits,
        "alignment.json",
    )
    smoke = run.alignment.get("smoke")
    add(
        part,
        "Smoke run of forward, backward, sampling",
        "not run"
        if smoke is None
        else f"{smoke['tokens']} tokens, gap {smoke['mean_gap']:.2g} nats, gradient finite: {smoke['finite_gradient']}",
        "-" if smoke is None else f"gap at most {smoke['allowed']:g}",
        smoke is not None and smoke["finite_gradient"],
        "alignment.json",
    )

    part = "Step 2, unbiased KL"
    unbiased = stability.get("unbiased_kl", {})
    add(
        part,
        "Estimator (pi/pi_old)(k3)",
        unbiased.get("estimator", "-"),
        "importance_sampling_corrected",
        bool(switches["unbiased_kl"]) or "off",
        "alignment.json",
    )
    add(
        part,
        "Ratio numerically clipped",
        unbiased.get("clip_ratio", "-"),
        "a number",
        unbiased.get("clip_ratio") is not None or "off",
        "alignment.json",
    )
    metric(part, "Quantiles of the ratio logged", "ratio/p99", "ratio/*")
    metric(part, "Gradient-norm curve without spikes", "grad_norm")

    part = "Step 3, sequence mask"
    filtered = run.values("off_policy_mask/masked_frac")
    mask_on = bool(switches["sequence_masking"])
    add(
        part,
        "Divergence of current and sampling policy, whole sequence masked",
        f"divergence {_range(run.values('off_policy_mask/divergence/p99'))}",
        f"threshold {stability.get('sequence_masking', {}).get('divergence_threshold', '-')}",
        bool(filtered) if mask_on else "off",
        "metrics.jsonl",
    )
    add(
        part,
        "Sequence granularity",
        "one keep a sequence",
        "-",
        "by construction" if mask_on else "off",
        "rlvr_common.py off_policy_sequence_mask",
    )
    floor = stability.get("sequence_masking", {}).get("min_keep_ratio", 0.0)
    add(
        part,
        "Minimum keep ratio",
        f"kept at least {1 - max(filtered, default=0.0):.3f}",
        f"at least {floor}",
        1 - max(filtered, default=0.0) >= floor if mask_on else "off",
        "metrics.jsonl",
        trend=True,
    )
    metric(part, "Mask-ratio curve in range", "off_policy_mask/masked_frac", needed=mask_on)

    part = "Step 4, consistency"
    rows = run.values("routing/replayed_rows")
    add(
        part,
        "Keep routing: recorded experts replayed",
        f"{min(rows):.0f} rows a micro-batch" if rows else "-",
        "above 0 where on",
        bool(rows) and min(rows) > 0 if switches["keep_routing"] else "off",
        "metrics.jsonl",
    )
    share = run.values("support/replayed_frac")
    add(
        part,
        "Keep sampling mask: recorded sets replayed",
        f"{min(share):.4f} of the tokens" if share else "-",
        "1 where on",
        bool(share) and min(share) > 0.999 if switches["keep_sampling_mask"] else "off",
        "metrics.jsonl",
    )
    add(
        part,
        "Indices and masks travel with their samples",
        "in the batch dictionary",
        "-",
        "by construction",
        "tests/test_support.py, tests/test_minirl.py",
    )
    metric(part, "Routing agreement", "routing/rollout_agreement", needed=bool(switches["keep_routing"]))
    metric(part, "Support agreement", "support/agreement", needed=bool(switches["keep_sampling_mask"]))
    stored = [
        f"{name.split('/')[0]} {run.values(name)[-1]:.1f} B/token"
        for name in ("routing/bytes_per_token", "support/bytes_per_token")
        if run.values(name)
    ]
    storage = ", ".join(stored) or "nothing extra is stored"
    add(part, "Extra storage known", storage, "logged", "pass" if stored else "by construction", "metrics.jsonl")

    part = "Step 5, roll-out"
    stages = run.named("stage")
    staged = run.settings.get("stages")
    add(part, "Small, medium, full", staged or "-", "--guard_stages", "pass" if staged else "off", "alignment.json")
    add(
        part,
        "Several cycles at each stage; widen only when metrics are in range",
        "; ".join(e["text"] for e in stages) or "-",
        "no alarm in the stage before",
        "pass" if stages else "off",
        "events.jsonl",
    )

    part = "Verification"
    timeouts = run.values("verifier/timeout_frac")
    add(
        part,
        "Service: training starts, sampling delivers, no timeouts",
        f"{steps} steps; verifier timeouts {_range(timeouts)}",
        "steps > 0, mean timeouts < 0.1",
        steps > 0 and (not timeouts or statistics.fmean(timeouts) < 0.1),
        "metrics.jsonl",
        trend=True,
    )
    add(
        part,
        "Data: routing and mask fields complete",
        f"replayed rows {_range(rows, 4)}; replayed share {_range(share)}",
        "complete where on",
        all(
            [
                not switches["keep_routing"] or bool(rows),
                not switches["keep_sampling_mask"] or bool(share) and min(share) > 0.999,
            ]
        )
        if switches["keep_routing"] or switches["keep_sampling_mask"]
        else "off",
        "metrics.jsonl",
    )
    add(
        part,
        "Logs: no explosion alert, no NaN or Inf, no filter exception",
        f"{len(broken)} non-finite, {quiet('*')[1]}",
        "0",
        not broken and quiet("*")[0],
        "metrics.jsonl, events.jsonl",
        trend=True,
    )
    metric(part, "Metrics: smooth gradient norm", "grad_norm")
    metric(part, "Metrics: KL in range", "kl", needed=False)
    for name in masked:
        metric(part, "Metrics: stable mask ratio", name)
    metric(part, "Metrics: routing agreement near 100 %", "routing/rollout_agreement", needed=False)
    add(
        part,
        "Resources: steady use, storage growth as expected",
        f"{step_time}; {len(checkpoints)} checkpoints kept",
        "below 2x",
        slower,
        "metrics.jsonl, guard.json",
        trend=True,
    )

    part = "Rollback"
    add(
        part,
        "Each mechanism behind its own switch",
        json.dumps(switches),
        "independent",
        "by construction",
        "recipes/dsv32_stable.py",
    )
    add(
        part,
        "Return to the last stable version",
        f"{len(rolled)} rollbacks; good checkpoints {reached['good']}",
        "a good checkpoint",
        bool(reached["good"]) if run.settings.get("guard") == "rollback" else "off",
        "guard.json",
    )

    part = "Operations"
    add(
        part,
        "Four core metrics watched with multi-level alerts",
        f"guard {run.settings.get('guard', 'off')}",
        "on",
        bool(run.settings.get("guard")),
        "alignment.json",
    )
    add(part, "Rollback rehearsed", "drills", "-", "by construction", "tests/test_stability.py")
    add(
        part,
        "Filtering beside the main pipeline",
        "inside the loss, no extra pass",
        "-",
        "by construction",
        "recipes/dsv32_stable.py",
    )
    add(
        part,
        "Samples compressed in transfer",
        "routes uint8, supports int32 CSR",
        "-",
        "by construction",
        "routing.py, support.py",
    )
    add(part, "Rollout cluster resized by stage", "-", "-", "operator", "-")
    add(
        part,
        "Checkpoints cleaned by life cycle",
        f"{len(checkpoints)} left",
        "--save_total_limit, --guard_max_age_h",
        "by construction",
        "stability.py removable",
    )
    add(
        part,
        "Thresholds central, versioned, traceable",
        f"{len(run.settings.get('bounds', []))} in one list",
        "-",
        "by construction",
        "stability.py RULES, --guard_bounds",
    )
    add(part, "Stress test before each expansion", "-", "-", "operator", "benchmarks/")
    add(part, "Thresholds iterated", "-", "-", "operator", "--guard_bounds")
    return lines  # fmt: skip


def write_acceptance(folder):
    """Write acceptance.md and acceptance.html into a run's folder -> a printed summary: counts, and each line that failed."""
    folder, lines = Path(folder), checklist(folder)
    counts = [f"{sum(line.verdict == verdict for line in lines)} {name}" for verdict, (name, _) in VERDICTS.items()]
    summary = f"acceptance after {Run(folder).steps} steps: {', '.join(counts)}"
    head = ("section", "line", "measured", "bound", "verdict", "where from")
    rows = [[line.section, line.text, line.measured, line.bound, line.verdict, line.source] for line in lines]
    table = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    table += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    note = (
        f"too short: about the course of a run, which needs {TREND_STEPS} steps. by construction: so in the code, whatever the run did. "
        "off: switched off, or the model has no such thing. operator: about the clusters around the run."
    )
    (folder / "acceptance.md").write_text(
        f"# Acceptance of {folder.name}\n\n{summary}\n\n" + "\n".join(table) + f"\n\n{note}\n"
    )
    cells = "".join(
        f"<tr style='background:{VERDICTS[row[4]][1]}'>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    (folder / "acceptance.html").write_text(
        f"<!doctype html><meta charset='utf-8'><title>Acceptance of {html.escape(folder.name)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:4px 8px;text-align:left;vertical-align:top}"
        "table{border-collapse:collapse}tr{border-bottom:1px solid #ccc}</style>"
        f"<h1>Acceptance of {html.escape(folder.name)}</h1><p><b>{summary}</b></p><table><tr>"
        + "".join(f"<th>{cell}</th>" for cell in head) + f"</tr>{cells}</table><p>{note}</p>"
    )  # fmt: skip
    failed = [
        f"  fail: {line.section}: {line.text} ({line.measured}; bound {line.bound})"
        for line in lines
        if line.verdict == "fail"
    ]
    return "\n".join([f"{summary} ({folder / 'acceptance.md'})", *failed])
