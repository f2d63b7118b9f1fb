"""`minirl`: the ablations of MiniRL on the tiny MoE; `minirl_push`: where the same arms break."""

import statistics

from results.running import REPO, collapse_step, curves_by_group, rows_by_arm, run_arms, spread, windows, write_table

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
# a named model has no default config
TINY_MINIRL = ["--config", str(REPO / "recipes" / "configs" / "tiny_minirl.yaml")]
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


def minirl_cells(records, minutes):
    """The cells of one run: accuracy, the reward's peak and end over windows of 8 updates, stability, routing; mean and spread."""
    evals = [100 * r["eval/accuracy"] for r in records if "eval/accuracy" in r]
    points = [(step, w) for step, w in windows(records, 8) if "reward" in w]
    rewards, last = [w["reward"] for _, w in points], points[-1][1]
    collapsed = collapse_step([{"step": step, **w} for step, w in points])
    return {
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


def minirl_pairs(after):
    """What the clip, R2 and R3 change in held-out accuracy, compared with the same arm and seed without. {(arm, seed): %} -> lines."""
    seeds = sorted({seed for _, seed in after})
    grid = [(n, replay) for n in (2, 4, 8) for replay in ("no replay", "R2", "R3")]
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
    """Runs arms and writes table and curves; of `minirl` also what clip and replay change, paired."""
    runs, _ = run_arms(claim, arms, seeds, steps, out, jobs, recipe="minirl_sync", every=8)
    curves_by_group(runs, out)
    names, rows = rows_by_arm(runs, minirl_cells)
    after = {
        (arm, seed): 100 * [r["eval/accuracy"] for r in records if "eval/accuracy" in r][-1]
        for arm, by_seed in runs.items()
        for seed, (records, _) in by_seed.items()
    }
    more = list(minirl_pairs(after)) if claim == "minirl" else ()
    write_table(claim, ["arm", *names], rows, runs, seeds, steps, jobs, out, more)


def minirl(seeds, steps, out, jobs):
    """The ablations, and the three cold starts."""
    minirl_report("minirl", MINIRL_ARMS | COLD_STARTS, seeds, steps, out, jobs)


def minirl_push(seeds, steps, out, jobs):
    """The same arms where they break."""
    minirl_report("minirl_push", MINIRL_PUSH, seeds, steps, out, jobs)
