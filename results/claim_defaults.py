"""`defaults`: every recipe as it starts with no flag, for the recipe table of the README."""

import statistics

from results.running import curves, rows_by_arm, run_arms, write_table

RECIPES = ("grpo_tokenclip", "minirl_sync", "minirl_async_r3", "dsv32_stable", "ares_dapo")


def cells_of(records, minutes):
    """The cells of one run: accuracy before and after, updates, reward, minutes."""
    evals = [100 * r["eval/accuracy"] for r in records if "eval/accuracy" in r]
    train = [r for r in records if "grad_norm" in r]
    return {
        "held-out before %": evals[0],
        "after %": evals[-1],
        "gain, points": evals[-1] - evals[0],
        "updates": float(len(train)),
        "reward, last 10": statistics.mean([r["reward"] for r in train if "reward" in r][-10:]),
        "minutes": minutes,
    }


def defaults(seeds, steps, out, jobs):
    """Runs each recipe as it starts."""
    runs, _ = run_arms(
        "defaults", {r: [] for r in RECIPES}, seeds, steps, out, jobs, {r: r for r in RECIPES}, every=10
    )
    curves(runs, out / "curve.png")
    names, rows = rows_by_arm(runs, cells_of)
    write_table("defaults", ["recipe", *names], rows, runs, seeds, steps, jobs, out)
