"""`async`: MiniRL on stale rollouts of the tiny MoE, with and without replay and clip; `async_time`: what staleness buys in time.

How stale a sampling is follows from --max_staleness alone (its version is fixed by the order of asking), so that a comparison at equal
updates does not depend on the machine. At equal wall time it does: `async_time` runs alone and measures the seconds of an update.
"""

import json
import statistics

from results.running import (
    REPO,
    collapse_step,
    curves_by_group,
    rows_by_arm,
    run_arms,
    spread,
    windows,
    write_table,
)

# as results/claim_minirl.py: mini-batches of 4 prompts x 8 samples, the learning rate at which arms part
COMMON = [
    "--per_device_train_batch_size", "32", "--max_steps", "48", "--learning_rate", "3e-4", "--save_strategy", "no",
    "--report_to", "none", "--eval_problems", "100", "--eval_samples", "8", "--gradloc", "off", "--verifier_workers", "1",
]  # fmt: skip
STALENESS = ("0", "1", "4", "16")
# One update a sampling: pi_old is the policy itself, so a clip against it never acts and R2 replays what the model chooses anyway
# (the recipe refuses it); what can act is the clip against mu, and R3.
ONE = {
    f"N=1, {replay}, {clip}: S={staleness}": [
        *COMMON, "--num_minibatches", "1", "--max_staleness", staleness,
        "--routing_replay", {"no replay": "none", "R3": "r3"}[replay],
        *(["--no_clip"] if clip == "no clip" else ["--clip_against", "behaviour"]),
    ]
    for replay in ("no replay", "R3") for clip in ("no clip", "clip") for staleness in STALENESS
}  # fmt: skip
# Two updates a sampling: pi_old is a policy of its own, R2 and the usual clip act.
TWO = {
    f"N=2, clip: S={staleness}, {replay}": [
        *COMMON, "--num_minibatches", "2", "--max_staleness", staleness,
        "--routing_replay", {"no replay": "none", "R2": "r2", "R3": "r3"}[replay],
    ]
    for staleness in ("4", "16") for replay in ("no replay", "R2", "R3")
}  # fmt: skip
ARMS = ONE | TWO
TIMES = {
    f"S={s}": [*COMMON, "--num_minibatches", "1", "--routing_replay", "r3", "--max_staleness", s] for s in STALENESS
}


def cells_of(records, minutes):
    """The cells of one run: outcome, stability, staleness."""
    train = [r for r in records if "grad_norm" in r]
    evals = [100 * r["eval/accuracy"] for r in records if "eval/accuracy" in r]
    points = [{"step": step, **w} for step, w in windows(train, 8) if "reward" in w]
    last = points[-1]
    return {
        "held-out after %": evals[-1],
        "gain, points": evals[-1] - evals[0],
        "best reward": max(w["reward"] for w in points),
        "last reward": last["reward"],
        "collapse step": collapse_step(points),
        "staleness, last 8": last["async/staleness/p50"],
        "mismatch k3, last 8": last["mismatch/k3"],
        "F(2), last 8": last["mismatch/extreme_frac"],
        "omega p99, last 8": last["omega/p99"],
        "tokens clipped %": 100 * statistics.mean(w["minirl/masked_frac"] for w in points),
        "routing as the engine's %": 100 * last["routing/rollout_agreement"],
        "entropy, last": last["entropy"],
        "largest grad norm": max(r["grad_norm"] for r in train),
        "minutes": minutes,
    }


def effects(runs):
    """What replay, the clip and staleness change in held-out accuracy, paired by arm and seed -> lines of a table."""
    after = {
        (arm, seed): 100 * [r["eval/accuracy"] for r in records if "eval/accuracy" in r][-1]
        for arm, by_seed in runs.items()
        for seed, (records, _) in by_seed.items()
    }
    seeds = sorted({seed for _, seed in after})

    def change(of, to):
        """{name: (arm, arm)} -> points, each arm `to` less the arm `of`, over seeds."""
        return [after[b, s] - after[a, s] for a, b in zip(of, to, strict=True) for s in seeds]

    def one(replay, clip, some):
        return [f"N=1, {replay}, {clip}: S={s}" for s in some]

    def two(replay, staleness):
        return [f"N=2, clip: S={staleness}, {replay}"]

    both = ("no replay", "R3")
    found = {
        f"staleness {s} against 0 (N=1)": change(
            [a for r in both for c in ("no clip", "clip") for a in one(r, c, ["0"])],
            [a for r in both for c in ("no clip", "clip") for a in one(r, c, [s])],
        )
        for s in STALENESS[1:]
    }
    for s in STALENESS:
        found[f"clip against mu, S={s} (N=1)"] = change(
            [a for r in both for a in one(r, "no clip", [s])], [a for r in both for a in one(r, "clip", [s])]
        )
        found[f"R3, S={s} (N=1)"] = change(
            [a for c in ("no clip", "clip") for a in one("no replay", c, [s])],
            [a for c in ("no clip", "clip") for a in one("R3", c, [s])],
        )
    for s in ("4", "16"):
        for replay in ("R2", "R3"):
            found[f"{replay}, S={s} (N=2)"] = change(two("no replay", s), two(replay, s))
    yield from (
        "",
        "| change | held-out accuracy, points, paired by arm and seed | pairs in which it rises |",
        "|---|---|---|",
    )
    for name, values in found.items():
        yield f"| {name} | {spread(values)} | {sum(v > 0 for v in values)} of {len(values)} |"


def at_equal_time(runs, times):
    """Training reward when the synchronous run has made half of its updates, from the seconds of an update of each staleness."""
    sync = times["S=0"]["seconds_of_an_update"]
    # 48, fewer with --steps
    last = min(records[-1]["step"] for by_seed in runs.values() for records, _ in by_seed.values())
    yield from (
        "",
        f"| arm | seconds of an update | updates in the time of {last // 2} synchronous ones | reward then (8 updates) |",
        "|---|---|---|---|",
    )
    for arm, by_seed in runs.items():
        name = arm.split(": ")[-1]
        if not arm.startswith("N=1, R3") or name not in times:
            continue
        own = times[name]["seconds_of_an_update"]
        made = min(last, round(last // 2 * sync / own))
        rewards = [
            statistics.mean(r["reward"] for r in records if "reward" in r and made - 8 < r["step"] <= made)
            for records, _ in by_seed.values()
        ]
        yield f"| {arm} | {own:.3f} | {made} | {spread(rewards)} |"


def async_(seeds, steps, out, jobs):
    """Runs every staleness and writes tables and curves; the last table needs the seconds of `async_time`."""
    runs, _ = run_arms("async", ARMS, seeds, steps, out, jobs, recipe="minirl_async_r3", every=8)
    curves_by_group(runs, out)
    names, rows = rows_by_arm(runs, cells_of)
    times = REPO / "results" / "async_time" / "time.json"
    more = list(effects(runs))
    if times.exists():
        more += at_equal_time(runs, json.loads(times.read_text()))
    write_table("async", ["arm", *names], rows, runs, seeds, steps, jobs, out, more)


def async_time(seeds, steps, out, jobs):
    """Median seconds of an update on a machine that does nothing else; the first 16 updates fill the buffer."""
    runs, _ = run_arms("async_time", TIMES, seeds, steps or 48, out, 1, recipe="minirl_async_r3", every=8)
    times, rows = {}, []
    for arm, by_seed in runs.items():
        seconds, waiting = [], []
        for records, _ in by_seed.values():
            train = [r for r in records if "grad_norm" in r and r["step"] > 16] or [
                r for r in records if "grad_norm" in r
            ]
            seconds.append(statistics.median(r["step_time"] for r in train))
            waiting.append(statistics.median(r["async/waiting_share"] for r in train))
        times[arm] = {"seconds_of_an_update": statistics.median(seconds), "waiting_share": statistics.median(waiting)}
        rows.append(
            [
                arm,
                spread(seconds),
                f"{statistics.median(seconds) / times['S=0']['seconds_of_an_update']:.2f}",
                spread(waiting),
            ]
        )
    (out / "time.json").write_text(json.dumps(times, indent=2) + "\n")
    head = ["arm", "seconds of an update", "of the synchronous run's", "the trainer waits, share"]
    write_table("async_time", head, rows, runs, seeds, steps, 1, out)
