"""`defaults`: every recipe as it starts with no flag, for the recipe table of the README."""

import statistics

from results.running import cells, curves, run_arms, write_table

RECIPES = ("grpo_tokenclip", "minirl_sync", "minirl_async_r3", "dsv32_stable", "ares_dapo")


def defaults(seeds, steps, out, jobs):
    runs, _ = run_arms(
        "defaults", {r: [] for r in RECIPES}, seeds, steps, out, jobs, {r: r for r in RECIPES}, every=10
    )
    curves(runs, out / "curve.png")
    rows = []
    for recipe, by_seed in runs.items():
        columns = {}
        for records, minutes in by_seed.values():
            evals = [100 * r["eval/accuracy"] for r in records if "eval/accuracy" in r]
            train = [r for r in records if "grad_norm" in r]
            row = {
                "held-out before %": evals[0],
                "after %": evals[-1],
                "gain, points": evals[-1] - evals[0],
                "updates": float(len(train)),
                "reward, last 10": statistics.mean([r["reward"] for r in train if "reward" in r][-10:]),
                "minutes": minutes,
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
        rows.append([recipe, *cells(columns)])
    write_table("defaults", ["recipe", *columns], rows, runs, seeds, steps, jobs, out)
