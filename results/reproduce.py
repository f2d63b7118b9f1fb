"""Make the evidence in results/ again, one command a claim.

    python results/reproduce.py grpo_tokenclip            three arms x three seeds, about half an hour on 2 cores
    python results/reproduce.py gradloc                   seven arms x five seeds that spike and collapse, about 40 minutes
    python results/reproduce.py minirl --jobs 2           the paper's ablations on the tiny MoE: 26 arms x three seeds, under an hour
    python results/reproduce.py minirl_push --jobs 2      where the same arms break: coarser rollouts, higher learning rates, longer runs
    python results/reproduce.py dsv32 --jobs 2            DeepSeek-V3.2's mechanisms on the tiny MoE: 20 arms x three seeds
    python results/dsv32/drills.py                        what the guard sees and restores when a run is broken on purpose, minutes
    python results/reproduce.py ares --jobs 2             every optimizer at 4 or 5 learning rates, ablations: 57 arms x three seeds, hours
    python results/reproduce.py ares_spectra --jobs 2     spectra of the gradient: RLVR, random reward, SFT
    python results/reproduce.py grpo_tokenclip --seeds 0 --steps 20     a quick look, written to runs/, not to results/

Writes results/<claim>/report.md, metrics.jsonl (every arm, seed and step) and curve.png (mean and spread over seeds).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from gradloc_report import load_spikes  # noqa: E402
from results.ares import claim  # noqa: E402
from rlvr_common import k3, unbiased_kl  # noqa: E402
from rlvr_report import read_metrics, smooth, to_json  # noqa: E402
from spectral_monitor import mean_over, plot_spectra, read_spectra  # noqa: E402

SEQ_CLIP = ["--seq_clip_low", "0.995", "--seq_clip_high", "1.005"]
ARMS = {  # name in the report -> options on top of the embedded default at fp8 rollouts
    "GRPO": ["--token_clip", "none"],
    "GRPO + TokenClip": ["--token_clip", "icepop"],
    "GRPO + TokenClip + SeqClip": ["--token_clip", "icepop", *SEQ_CLIP],
}
# GRPO on stale rollouts (eight updates a sampling) under a rising learning rate: it improves, then spikes and dies. SGD, because
# AdamW divides a spike away; no global clip, because it is one of the treatments.
STALE = [
    "--steps_per_generation", "8", "--per_device_train_batch_size", "32", "--save_strategy", "no", "--report_to", "none",
    "--eval_problems", "100", "--eval_samples", "2", "--gradloc", "directional", "--layer_clip",
]  # fmt: skip
MEASURE = ["--layer_clip_alpha", "inf"]  # LayerClip that clips nothing: its metrics alone
SGD = [
    "--optim",
    "sgd",
    "--learning_rate",
    "1.0",
    "--warmup_steps",
    "100",
    "--max_steps",
    "96",
    "--max_grad_norm",
    "0",
]
ADAMW = ["--learning_rate", "3e-3", "--warmup_steps", "200", "--max_steps", "120", "--max_grad_norm", "0"]
WIDE = [
    "--seq_clip_low",
    "0.9",
    "--seq_clip_high",
    "1.1",
]  # the blog's band is for answers of 8k tokens; these have 20
SPIKING_ARMS = {
    "SGD: GRPO": [*SGD, *MEASURE, "--token_clip", "none"],
    "SGD: GRPO + global clip at 1": [*SGD, *MEASURE, "--token_clip", "none", "--max_grad_norm", "1"],
    "SGD: GRPO + TokenClip": [*SGD, *MEASURE, "--token_clip", "icepop"],
    "SGD: GRPO + TokenClip + SeqClip": [*SGD, *MEASURE, "--token_clip", "icepop", *WIDE],
    "SGD: GRPO + TokenClip + SeqClip + LayerClip": [*SGD, "--token_clip", "icepop", *WIDE],
    "AdamW: GRPO": [*ADAMW, *MEASURE, "--token_clip", "none"],
    "AdamW: GRPO + TokenClip + SeqClip + LayerClip": [*ADAMW, "--token_clip", "icepop", *WIDE],
}
KEPT = (
    "reward", "eval/accuracy", "entropy", "grad_norm", "mismatch/k1", "mismatch/k3", "mismatch/extreme_frac", "omega/max",
    "rho/p01", "rho/p99", "token_clip/masked_frac", "seq_clip/masked_frac", "completions/mean_length", "ratio/max",
    "accuracy", "ares/rank/mean", "spectral/top_share",
    "gradloc/top1_share", "gradloc/certificate", "layer_clip/corr_mean", "layer_clip/corr_min", "layer_clip/clipped_frac",
    "minirl/masked_frac", "minirl/truncated_frac", "routing/rollout_agreement", "routing/old_agreement", "ratio/p99",
    "mismatch/mean", "kl", "off_policy_mask/masked_frac", "support/agreement", "support/rollout_kept_mass", "guard/level",
)  # fmt: skip

# MiniRL's ablations (arXiv:2512.01374, section 4) on the tiny MoE: mini-batches of 4 prompts x 8 samples, the same number of gradient
# steps and of samples in every arm. The learning rate is three times the embedded default's: at that one eight updates a sampling
# learn as well as one, at three times this one every arm dies (minirl_push).
MINIRL = [
    "--per_device_train_batch_size", "32", "--max_steps", "160", "--learning_rate", "3e-4", "--save_strategy", "no",
    "--report_to", "none", "--eval_problems", "100", "--eval_samples", "8", "--gradloc", "off", "--verifier_workers", "1",
]  # fmt: skip
R3 = ["--routing_replay", "r3"]
NONE = ["--routing_replay", "none"]
MINIRL_ARMS = {
    f"N=1: {name}": [*MINIRL, "--num_minibatches", "1", *options]
    for name, options in {
        "MiniRL": NONE,
        "with length norm": [*NONE, "--length_norm"],
        "without IS": [*NONE, "--no_is"],
        "+ R3": R3,
        "+ R3, without IS": [*R3, "--no_is"],
    }.items()
} | {
    f"N={n}: {replay}, {clip}": [
        *MINIRL, "--num_minibatches", str(n),
        "--routing_replay", {"no replay": "none", "R2": "r2", "R3": "r3"}[replay],
        *(["--no_clip"] if clip == "no clip" else []),
    ]
    for n in (2, 4, 8) for replay in ("no replay", "R2", "R3") for clip in ("no clip", "clip")
}  # fmt: skip
TINY_MINIRL = [
    "--config",
    str(REPO / "recipes" / "configs" / "tiny_minirl.yaml"),
]  # a named model has no default config
COLD_STARTS = {
    f"cold start: {teacher}": [
        *MINIRL, *TINY_MINIRL, "--model_name_or_path", model, "--num_minibatches", "2", "--max_steps", "240",
    ]
    for teacher, model in {"steps": "tiny-moe", "split": "tiny-moe-split", "words": "tiny-moe-words"}.items()
}  # fmt: skip
WEAKEST, STRONGEST = ["--routing_replay", "none", "--no_clip"], ["--routing_replay", "r3"]
ON_POLICY = [*MINIRL, "--num_minibatches", "1", "--routing_replay", "none"]
EIGHT = [*MINIRL, "--num_minibatches", "8"]
SHORT = ["--max_steps", "96"]
MINIRL_PUSH = {
    f"lr {rate}, N=8: {name}": [*EIGHT, *SHORT, "--learning_rate", rate, *options]
    for rate in ("5e-4", "1e-3")
    for name, options in {
        "no replay, no clip": WEAKEST, "no replay, clip": NONE, "R3, no clip": [*R3, "--no_clip"], "R3, clip": STRONGEST,
    }.items()
} | {
    f"int4, N=8: {name}": [*EIGHT, *SHORT, "--rollout_dtype", "int4", *options]
    for name, options in {
        "no replay, no clip": WEAKEST, "R3, clip": STRONGEST, "R3, clip, without IS": [*STRONGEST, "--no_is"],
    }.items()
} | {
    f"{precision}, lr {rate}, N=1: {name}": [
        *ON_POLICY, *SHORT, "--rollout_dtype", precision, "--learning_rate", rate, *options,
    ]
    for precision, rate in (("int8", "3e-4"), ("int4", "3e-4"), ("int4", "1e-3"))
    for name, options in {"MiniRL": [], "without IS": ["--no_is"]}.items()
} | {
    f"320 updates, N=8: {name}": [*EIGHT, "--max_steps", "320", *options]
    for name, options in {"no replay, no clip": WEAKEST, "R3, clip": STRONGEST}.items()
}  # fmt: skip


# DeepSeek-V3.2's mechanisms (arXiv:2512.02556, section 3.1) on the tiny MoE, one changed at a time; the guard only watches.
DSV32 = [
    "--per_device_train_batch_size", "32", "--max_steps", "160", "--learning_rate", "3e-4", "--save_strategy", "no",
    "--report_to", "none", "--eval_problems", "100", "--eval_samples", "8", "--gradloc", "off", "--guard", "warn",
    "--verifier_workers", "1",
]  # fmt: skip
UNMASKED = ["--rl_stability.consistency.keep_sampling_mask", "false"]
WHOLE = ["--top_p", "1.0"]  # no truncation: nothing to keep
NO_SEQUENCE_MASK = ["--rl_stability.sequence_masking.enabled", "false"]
DSV32_ARMS = {
    f"sampling mask: {name}, {'kept' if kept else 'not kept'}": [*DSV32, *options, *([] if kept else UNMASKED)]
    for name, options in {"top-p 0.8": ["--top_p", "0.8"], "top-k 5": ["--top_p", "1.0", "--top_k", "5"]}.items()
    for kept in (True, False)
} | {
    f"KL estimator: N=8, beta 0.1, {name}": [*DSV32, *WHOLE, *NO_SEQUENCE_MASK, "--num_minibatches", "8", "--beta", "0.1", *options]
    for name, options in {
        "k3": ["--rl_stability.unbiased_kl.enabled", "false"],
        "unbiased": [],
        "unbiased, no clip": ["--rl_stability.unbiased_kl.clip_ratio", "null"],
    }.items()
} | {
    f"sequence mask: N={n}, {name}": [*DSV32, *WHOLE, "--num_minibatches", str(n), *options]
    for n in (1, 4, 8)
    for name, options in {
        "off": NO_SEQUENCE_MASK,
        **{f"delta {d}": ["--rl_stability.sequence_masking.divergence_threshold", d] for d in ("0.02", "0.1", "0.5")},
    }.items()
    if n > 1 or name in ("off", "delta 0.1")
} | {
    f"KL strength: {name}": [*DSV32, *WHOLE, "--beta", beta] for name, beta in {"zero": "0", "weak": "0.001", "strong": "0.1"}.items()
}  # fmt: skip


def run_arm(recipe, name, options, seed, folder, jobs):
    """One training run as a user would start it -> its metrics records and wall-clock minutes."""
    command = [sys.executable, str(REPO / "recipes" / f"{recipe}.py"), "--output_dir", str(folder)]
    command += ["--rollout_dtype", "fp8", "--seed", str(seed), *options]
    start = time.monotonic()
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // jobs))}
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=env)
    minutes = (time.monotonic() - start) / 60
    print(f"seed {seed}: {name}: {minutes:.1f} minutes", flush=True)
    return read_metrics(folder / "metrics.jsonl"), minutes


def spread(values):
    """mean +- standard deviation over seeds (n - 1), as text; a single value has no spread."""
    if len(values) == 1:
        return f"{values[0]:.3g}"
    return f"{statistics.mean(values):.3g} ± {statistics.stdev(values):.2g}"


def curves(runs, path):
    """Reward, gradient norm, mismatch k3 and masked fraction: mean over seeds, the band is min to max."""
    figure, axes = plt.subplots(1, 4, figsize=(20, 4.5), constrained_layout=True)
    panels = ("reward", "grad_norm", "mismatch/k3", "entropy")
    for axis, metric in zip(axes, panels, strict=True):
        for color, (arm, seeds) in enumerate(runs.items()):
            lines = []
            for records, _ in seeds.values():
                points = [(r["step"], r[metric]) for r in records if metric in r]  # reward: once a sampling
                steps, values = zip(*points, strict=True)
                lines.append(smooth(values, max(1, len(values) // 15)))
            columns = list(zip(*lines, strict=True))
            axis.plot(steps, [statistics.mean(c) for c in columns], color=f"C{color}", label=arm)
            axis.fill_between(
                steps, [min(c) for c in columns], [max(c) for c in columns], color=f"C{color}", alpha=0.15
            )
        axis.set_title(metric)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
    for axis in axes[1:3]:
        axis.set_yscale("log")
    axes[0].legend(fontsize=9)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def table_rows(runs):
    """One row an arm: held-out accuracy before, after and gain, then the stability numbers, mean and spread over seeds."""
    for arm, seeds in runs.items():
        before, after, norms, k3, token, seq, minutes = [], [], [], [], [], [], []
        for records, took in seeds.values():
            evals = [r["eval/accuracy"] for r in records if "eval/accuracy" in r]
            train = [r for r in records if "grad_norm" in r]
            before.append(100 * evals[0])
            after.append(100 * evals[-1])
            norms.append(max(r["grad_norm"] for r in train))
            k3.append(statistics.mean(r["mismatch/k3"] for r in train[-20:]))
            token.append(100 * statistics.mean(r.get("token_clip/masked_frac", 0.0) for r in train))
            seq.append(100 * statistics.mean(r.get("seq_clip/masked_frac", 0.0) for r in train))
            minutes.append(took)
        gain = [a - b for a, b in zip(after, before, strict=True)]
        yield [arm, *map(spread, (before, after, gain, norms, k3, token, seq, minutes)), f"{min(gain):.1f}"]


BEGIN, END = "<!-- figures: written by results/reproduce.py -->", "<!-- end of figures -->"


def fill(path, lines):
    """Replace the figures between the two marks of a report; the words around them are written by hand."""
    text = path.read_text() if path.exists() else f"{BEGIN}\n{END}\n"
    head, rest = text.split(BEGIN)
    path.write_text(head + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + rest.split(END)[1])


def run_arms(claim, arms, seeds, steps, out, jobs, recipe="grpo_tokenclip", every=1):
    """Every arm with every seed -> {arm: {seed: (records, minutes)}} and the folder of the runs.

    Writes metrics.jsonl, with the mean of each metric over `every` steps.
    """
    out.mkdir(parents=True, exist_ok=True)
    work = REPO / "runs" / "reproduce" / time.strftime(f"{claim}-%Y%m%d-%H%M%S")
    work.mkdir(parents=True)
    runs, waiting = {arm: {} for arm in arms}, {}
    limit = ["--max_steps", str(steps)] if steps else []
    with ThreadPoolExecutor(jobs) as pool:
        for seed in seeds:
            for i, (arm, options) in enumerate(arms.items()):
                waiting[arm, seed] = pool.submit(
                    run_arm, recipe, arm, [*options, *limit], seed, work / f"{i}-{seed}", jobs
                )
        for (arm, seed), future in waiting.items():
            runs[arm][seed] = future.result()
    with (out / "metrics.jsonl").open("w") as file:
        for arm, by_seed in runs.items():
            for seed, (records, _) in by_seed.items():
                for step, record in windows(records, every):
                    kept = {k: round(record[k], 6) for k in KEPT if isinstance(record.get(k), float)}
                    file.write(to_json({"arm": arm, "seed": seed, "step": step, **kept}) + "\n")
    return runs, work


def windows(records, every):
    """[(last step, {metric: mean})] over each `every` optimizer steps; step 0, the evaluation before training, stays alone."""
    groups = {}
    for record in records:
        groups.setdefault(-(-record["step"] // every) * every, []).append(record)
    for last, group in groups.items():
        names = {name for record in group for name in record if isinstance(record[name], float)}
        yield last, {n: statistics.mean(r[n] for r in group if isinstance(r.get(n), float)) for n in sorted(names)}


def write_table(claim, head, rows, seeds, steps, jobs, out, arms, more=()):
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    command = f"python results/reproduce.py {claim} --seeds {' '.join(map(str, seeds))}"
    command += (f" --steps {steps}" if steps else "") + (f" --jobs {jobs}" if jobs > 1 else "")
    fill(
        out / "report.md",
        [f"Made by `{command}`, mean ± standard deviation over {len(seeds)} seeds.", "", *lines, *more],
    )
    print("\n".join(lines))
    print(json.dumps({"claim": claim, "out": str(out), "runs": len(seeds) * len(arms)}))


def grpo_tokenclip(seeds, steps, out, jobs):
    runs, _ = run_arms("grpo_tokenclip", ARMS, seeds, steps, out, jobs)
    curves(runs, out / "curve.png")
    head = ["arm", "held-out before %", "after %", "gain, points", "largest grad norm", "mismatch k3, last 20 steps",
            "tokens masked %", "sequences masked %", "minutes", "smallest gain"]  # fmt: skip
    write_table("grpo_tokenclip", head, list(table_rows(runs)), seeds, steps, jobs, out, ARMS)


def collapse_step(records):
    """First step from which the reward stays below half of its peak (of means over samplings); None if it never does."""
    points = [(r["step"], r["reward"]) for r in records if "reward" in r]
    peak = max(reward for _, reward in points)
    below = [step for i, (step, _) in enumerate(points) if all(reward < peak / 2 for _, reward in points[i:])]
    return below[0] if below else None


def largest_spike(records):
    """Largest gradient norm over the median of the 20 steps before it, where that median is not near 0; and its step."""
    norms = [(r["step"], r["grad_norm"]) for r in records if "grad_norm" in r]
    ratios = [(0.0, 0)]
    for i in range(5, len(norms)):
        median = statistics.median(n for _, n in norms[max(0, i - 20) : i])
        if median > 0.05:
            ratios.append((norms[i][1] / median, norms[i][0]))
    return max(ratios)


def gradloc(seeds, steps, out, jobs):
    arms = {arm: [*STALE, *options] for arm, options in SPIKING_ARMS.items()}
    runs, work = run_arms("gradloc", arms, seeds, steps, out, jobs)
    for optimizer in ("SGD", "AdamW"):
        part = {arm.removeprefix(f"{optimizer}: "): v for arm, v in runs.items() if arm.startswith(optimizer)}
        curves(part, out / f"curve_{optimizer.lower()}.png")
    rows = []
    for i, (arm, by_seed) in enumerate(runs.items()):
        collapsed = [collapse_step(records) for records, _ in by_seed.values()]
        spikes = [largest_spike(records) for records, _ in by_seed.values()]
        causes, certificates, reports = {}, [], 0
        for seed in by_seed:
            folder = work / f"{i}-{seed}" / "gradloc"
            for spike in load_spikes(folder) if (folder / "spikes.jsonl").exists() else []:
                causes[spike["cause"]] = causes.get(spike["cause"], 0) + 1
                reports += 1
                if spike["certificate"] is not None:
                    certificates.append(spike["certificate"])
        train = [[r for r in records if "grad_norm" in r] for records, _ in by_seed.values()]
        last = [statistics.mean([r["reward"] for r in t if "reward" in r][-2:]) for t in train]
        corr = [statistics.mean(r["layer_clip/corr_min"] for r in t if "layer_clip/corr_min" in r) for t in train]
        evals = [[r["eval/accuracy"] for r in records if "eval/accuracy" in r] for records, _ in by_seed.values()]
        steps_of = sorted(c for c in collapsed if c is not None)
        rows.append([
            arm, f"{len(steps_of)} of {len(collapsed)}", ", ".join(map(str, steps_of)) or "-",
            spread([s[0] for s in spikes]), f"{sum(s[0] > 10 for s in spikes)}", spread(last),
            spread([100 * e[0] for e in evals]), spread([100 * e[-1] for e in evals]),
            ", ".join(f"{n} {cause}" for cause, n in sorted(causes.items())) or "-",
            f"{max(certificates):.2g}" if certificates else "-", spread(corr),
        ])  # fmt: skip
    head = ["arm", "collapsed seeds", "collapse step", "largest spike (x median)", "seeds with a spike above 10x",
            "reward at the end", "held-out before %", "after %", "causes named by GradLoc", "largest certificate",
            "smallest correlation of two layers"]  # fmt: skip
    write_table("gradloc", head, rows, seeds, steps, jobs, out, arms)
    print(f"pages of the spikes: python gradloc.py view {work}")


def cells(columns):
    """{name: a value a seed, None where there is none} -> mean and spread as text; of collapse steps the list."""
    for name, values in columns.items():
        known = [v for v in values if v is not None]
        if name == "collapse step":
            yield ", ".join(map(str, sorted(known))) or "-"
        else:
            yield spread(known) if known else "-"


def minirl_rows(runs):
    """One row an arm: accuracy, the reward's peak and end over windows of 8 updates, stability, routing; mean and spread."""
    for arm, by_seed in runs.items():
        columns = {}
        for records, minutes in by_seed.values():
            evals = [100 * r["eval/accuracy"] for r in records if "eval/accuracy" in r]
            points = [(step, w) for step, w in windows(records, 8) if "reward" in w]
            rewards, last = [w["reward"] for _, w in points], points[-1][1]
            collapsed = collapse_step([{"step": step, **w} for step, w in points])
            row = {
                "held-out after %": evals[-1],
                "gain, points": evals[-1] - evals[0],
                "best reward": max(rewards),
                "last reward": rewards[-1],
                "collapse step": collapsed,
                "entropy, first": points[0][1]["entropy"],
                "last": last["entropy"],
                "mismatch k3, first": points[0][1]["mismatch/k3"],
                "last 8": last["mismatch/k3"],
                "F(2), last 8": last["mismatch/extreme_frac"],
                "tokens clipped %": 100 * statistics.mean(w["minirl/masked_frac"] for _, w in points),
                "routing as the engine's %": 100 * last["routing/rollout_agreement"],
                "as pi_old's %": 100 * last["routing/old_agreement"] if "routing/old_agreement" in last else None,
                "largest grad norm": max(r["grad_norm"] for r in records if "grad_norm" in r),
                "minutes": minutes,
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
        yield list(columns), [arm, *cells(columns)]


def minirl_pairs(after):
    """What the clip, R2 and R3 change in held-out accuracy, compared with the same arm and seed without. {(arm, seed): %} -> lines."""
    seeds, grid = (
        sorted({seed for _, seed in after}),
        [(n, replay) for n in (2, 4, 8) for replay in ("no replay", "R2", "R3")],
    )
    clip = {
        (n, r, s): after[f"N={n}: {r}, clip", s] - after[f"N={n}: {r}, no clip", s] for n, r in grid for s in seeds
    }
    effects = {"clip": clip.values()} | {f"clip, N={n}": [v for k, v in clip.items() if k[0] == n] for n in (2, 4, 8)}
    for replay in ("R2", "R3"):
        effects[f"{replay} (with the clip)"] = [
            after[f"N={n}: {replay}, clip", s] - after[f"N={n}: no replay, clip", s] for n in (2, 4, 8) for s in seeds
        ]
    for other, name in (
        ("with length norm", "length norm, N=1"),
        ("without IS", "without IS, N=1"),
        ("+ R3", "R3, N=1"),
    ):
        effects[name] = [after[f"N=1: {other}", s] - after["N=1: MiniRL", s] for s in seeds]
    yield from (
        "",
        "| change | held-out accuracy, points, paired by arm and seed | pairs in which it rises |",
        "|---|---|---|",
    )
    for name, values in effects.items():
        yield f"| {name} | {spread(list(values))} | {sum(v > 0 for v in values)} of {len(values)} |"


def minirl_report(claim, arms, seeds, steps, out, jobs):
    runs, _ = run_arms(claim, arms, seeds, steps, out, jobs, recipe="minirl_sync", every=8)
    for group in dict.fromkeys(arm.split(":")[0] for arm in runs):
        part = {arm.split(": ", 1)[1]: v for arm, v in runs.items() if arm.startswith(f"{group}:")}
        curves(part, out / f"curve_{group.lower().translate({ord(' '): '_', ord('='): None, ord(','): None})}.png")
    heads, rows = zip(*minirl_rows(runs), strict=True)
    after = {
        (arm, seed): 100 * [r["eval/accuracy"] for r in records if "eval/accuracy" in r][-1]
        for arm, by_seed in runs.items()
        for seed, (records, _) in by_seed.items()
    }
    more = list(minirl_pairs(after)) if claim == "minirl" else ()
    write_table(claim, ["arm", *heads[0]], rows, seeds, steps, jobs, out, arms, more)


def minirl(seeds, steps, out, jobs):
    minirl_report("minirl", MINIRL_ARMS | COLD_STARTS, seeds, steps, out, jobs)


def minirl_push(seeds, steps, out, jobs):
    minirl_report("minirl_push", MINIRL_PUSH, seeds, steps, out, jobs)


def dsv32_rows(runs):
    """One row an arm of the DeepSeek-V3.2 claim: outcome, mismatch, KL and filters; mean and spread over seeds."""
    for arm, by_seed in runs.items():
        columns = {}
        for records, minutes in by_seed.values():
            train = [r for r in records if "grad_norm" in r]
            evals = [100 * r["eval/accuracy"] for r in records if "eval/accuracy" in r]
            points = [{"step": step, **w} for step, w in windows(train, 8) if "reward" in w]
            row = {
                "held-out after %": evals[-1],
                "gain, points": evals[-1] - evals[0],
                "best reward": max(w["reward"] for w in points),
                "last reward": points[-1]["reward"],
                "collapse step": collapse_step(points),
                "largest grad norm": max(r["grad_norm"] for r in train),
                "kept mass": points[0].get("support/rollout_kept_mass"),
                "mean mismatch, first": train[0]["mismatch/mean"],
                "last": points[-1]["mismatch/mean"],
                "F(2), last": points[-1]["mismatch/extreme_frac"],
                "kl, last": points[-1].get("kl"),
                "sequences masked %": 100 * statistics.mean(r.get("off_policy_mask/masked_frac", 0.0) for r in train),
                "steps with an alarm": float(sum(r.get("guard/level", 0.0) >= 2 for r in train)),
                "entropy, last": points[-1]["entropy"],
                "minutes": minutes,
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
        yield list(columns), [arm, *cells(columns)]


def kl_gradients():
    """|d KL_t / d log pi_theta| of one token that lies `gap` nats below the reference, sampled off-policy from mu = pi_theta e^drift:
    plain k3, the unbiased estimate, and what it would be with a detached ratio."""
    yield "| log pi_ref/pi_theta | log mu/pi_theta | k3 | unbiased, live ratio | ratio detached |"
    yield "|---|---|---|---|---|"
    for gap in (1.0, 5.0, 10.0, 15.0):
        for drift in (0.0, 2.0, 5.0):
            slopes = []
            for kind in ("k3", "live", "detached"):
                logp = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
                mu, ref = torch.full_like(logp, drift), torch.full_like(logp, gap)
                if kind == "k3":
                    value = k3(ref - logp)
                elif kind == "live":
                    value = unbiased_kl(logp, mu, ref)
                else:
                    value = (logp - mu).exp().detach() * k3(ref - logp)
                slopes.append(abs(torch.autograd.grad(value.sum(), logp)[0].item()))
            yield f"| {gap:g} | {drift:g} | " + " | ".join(f"{slope:.3g}" for slope in slopes) + " |"


def dsv32(seeds, steps, out, jobs):
    runs, _ = run_arms("dsv32", DSV32_ARMS, seeds, steps, out, jobs, recipe="dsv32_stable", every=8)
    for group in dict.fromkeys(arm.split(":")[0] for arm in runs):
        part = {arm.split(": ", 1)[1]: v for arm, v in runs.items() if arm.startswith(f"{group}:")}
        curves(part, out / f"curve_{group.replace(' ', '_')}.png")
    heads, rows = zip(*dsv32_rows(runs), strict=True)
    write_table("dsv32", ["arm", *heads[0]], rows, seeds, steps, jobs, out, DSV32_ARMS)
    path = out / "report.md"
    path.write_text(path.read_text().replace(f"\n{END}", "\n".join(["", *kl_gradients(), "", END]), 1))


def ares(seeds, steps, out, jobs):
    arms = claim.sweep_arms()
    runs, _ = run_arms("ares", arms, seeds, steps, out, jobs, recipe="ares_dapo", every=10)
    heads, rows = zip(*claim.sweep_rows(runs, spread), strict=True)
    write_table("ares", ["arm", *heads[0]], rows, seeds, steps, jobs, out, arms)
    print("\n".join(claim.best_rates(rows, heads[0])))


def ares_spectra(seeds, steps, out, jobs):
    """Also on the larger model, where it was made: recipes/cold_start.py, see results/ares/claim.py."""
    larger = REPO / claim.LARGER
    arms = claim.spectra_arms(larger if larger.is_dir() else None)
    _, work = run_arms("ares_spectra", arms, seeds, steps, out, jobs, recipe="ares_dapo", every=10)
    spectra = {
        arm: [read_spectra(work / f"{i}-{seed}" / "spectral.jsonl") for seed in seeds] for i, arm in enumerate(arms)
    }
    for model in ("tiny", "larger"):
        part = {arm.split(": ")[1]: records for arm, records in spectra.items() if arm.startswith(model)}
        if part:
            plot_spectra(part, out / f"spectral_{model}.png")
    rows = list(claim.spectra_rows(spectra, mean_over, spread))
    write_table("ares_spectra", claim.SPECTRA_HEAD, rows, seeds, steps, jobs, out, arms)


CLAIMS = {
    "grpo_tokenclip": grpo_tokenclip,
    "gradloc": gradloc,
    "minirl": minirl,
    "minirl_push": minirl_push,
    "dsv32": dsv32,
    "ares": ares,
    "ares_spectra": ares_spectra,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=CLAIMS)
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2; gradloc: 5 6 7 8 9")
    parser.add_argument("--steps", type=int, help="optimizer steps instead of the embedded default's; goes to runs/")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time; each gets its share of the cores")
    args = parser.parse_args()
    args.seeds = args.seeds or ([5, 6, 7, 8, 9] if args.claim == "gradloc" else [0, 1, 2])  # 0-4 chose the setting
    full = args.steps is None and len(args.seeds) >= 3
    out = (REPO / "results" if full else REPO / "runs" / "quick") / args.claim
    CLAIMS[args.claim](args.seeds, args.steps, out, args.jobs)


if __name__ == "__main__":
    main()
