"""`grpo_tokenclip`: what the clips do to the embedded default; `gradloc`: the same arms where training spikes and dies."""

import statistics

from gradloc_report import load_spikes
from results.running import collapse_step, curves, run_arms, spread, write_table

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
    "--optim", "sgd", "--learning_rate", "1.0", "--warmup_steps", "100", "--max_steps", "96", "--max_grad_norm", "0",
]  # fmt: skip
ADAMW = ["--learning_rate", "3e-3", "--warmup_steps", "200", "--max_steps", "120", "--max_grad_norm", "0"]
# the blog's band is for answers of 8k tokens; these have 20
WIDE = ["--seq_clip_low", "0.9", "--seq_clip_high", "1.1"]
SPIKING_ARMS = {
    "SGD: GRPO": [*SGD, *MEASURE, "--token_clip", "none"],
    "SGD: GRPO + global clip at 1": [*SGD, *MEASURE, "--token_clip", "none", "--max_grad_norm", "1"],
    "SGD: GRPO + TokenClip": [*SGD, *MEASURE, "--token_clip", "icepop"],
    "SGD: GRPO + TokenClip + SeqClip": [*SGD, *MEASURE, "--token_clip", "icepop", *WIDE],
    "SGD: GRPO + TokenClip + SeqClip + LayerClip": [*SGD, "--token_clip", "icepop", *WIDE],
    "AdamW: GRPO": [*ADAMW, *MEASURE, "--token_clip", "none"],
    "AdamW: GRPO + TokenClip + SeqClip + LayerClip": [*ADAMW, "--token_clip", "icepop", *WIDE],
}


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


def grpo_tokenclip(seeds, steps, out, jobs):
    """Runs the three arms and writes table and curves."""
    runs, _ = run_arms("grpo_tokenclip", ARMS, seeds, steps, out, jobs)
    curves(runs, out / "curve.png")
    head = ["arm", "held-out before %", "after %", "gain, points", "largest grad norm", "mismatch k3, last 20 steps",
            "tokens masked %", "sequences masked %", "minutes", "smallest gain"]  # fmt: skip
    write_table("grpo_tokenclip", head, list(table_rows(runs)), runs, seeds, steps, jobs, out)


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
    """Runs the ladder and writes its table, with what GradLoc said of the spikes, and the curves."""
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
        # a correlation needs 8 updates: none in the short form
        corr = [[r["layer_clip/corr_min"] for r in t if "layer_clip/corr_min" in r] for t in train]
        evals = [[r["eval/accuracy"] for r in records if "eval/accuracy" in r] for records, _ in by_seed.values()]
        steps_of = sorted(c for c in collapsed if c is not None)
        rows.append([
            arm, f"{len(steps_of)} of {len(collapsed)}", ", ".join(map(str, steps_of)) or "-",
            spread([s[0] for s in spikes]), f"{sum(s[0] > 10 for s in spikes)}", spread(last),
            spread([100 * e[0] for e in evals]), spread([100 * e[-1] for e in evals]),
            ", ".join(f"{n} {cause}" for cause, n in sorted(causes.items())) or "-",
            f"{max(certificates):.2g}" if certificates else "-",
            spread([statistics.mean(c) for c in corr]) if all(corr) else "-",
        ])  # fmt: skip
    head = ["arm", "collapsed seeds", "collapse step", "largest spike (x median)", "seeds with a spike above 10x",
            "reward at the end", "held-out before %", "after %", "causes named by GradLoc", "largest certificate",
            "smallest correlation of two layers"]  # fmt: skip
    write_table("gradloc", head, rows, runs, seeds, steps, jobs, out)
    print(f"pages of the spikes: python gradloc.py view {work}")
