"""The claims `ares` (optimizers, ablations, estimators on the tiny RL task) and `ares_spectra`: arms and tables.

Two models: the tiny Qwen3 (hidden 96, ships here), and a larger one (hidden 256, 3.0M parameters). The article's 32 of 2,048 directions
are 2 and 4 of theirs. The larger one is cold-started once, in ten minutes of one core (20 % sampled, 35 % greedy held out), by
    python recipes/cold_start.py --output_dir runs/ares/larger --hidden_size 256 --max_steps 1000 --copies 8 \
        --per_device_train_batch_size 32 --learning_rate 2e-3 --lazy_steps 60 --heldout_rows 240

H1 and H2 are the readings of the article's ablation without low rank (2.7 against 27.2) in which that number is possible. H1: Ares runs at
a learning rate far above AdamW's, so plain Adam at that rate collapses. H2: its step is orthogonalised, so that Muon is what is left. What
separates them: "no low rank" at each learning rate of the sweep, beside Muon's sweep.
"""

import statistics
import subprocess
import sys

from results.running import REPO, rows_by_arm, run_arms, spread, write_table
from spectral_monitor import mean_over, plot_spectra, read_spectra

RATES = {  # four or more for each optimizer, with the best of them inside the range
    "ares": ["3e-5", "1e-4", "3e-4", "1e-3", "3e-3"],
    "projected": ["1e-4", "3e-4", "1e-3", "3e-3"],
    "no low rank": ["3e-5", "1e-4", "3e-4", "1e-3", "3e-3"],
    "adamw": ["3e-5", "1e-4", "3e-4", "1e-3", "3e-3"],
    "muon": ["3e-5", "1e-4", "3e-4", "1e-3", "3e-3", "1e-2"],
    "galore": ["1e-4", "3e-4", "1e-3", "3e-3", "1e-2"],
    "sgd": ["1e-3", "1e-2", "3e-2", "1e-1", "1", "10"],
    "rmsprop": ["3e-5", "1e-4", "3e-4", "1e-3"],
}
ARES = ["--optim_method", "ares", "--ares_step", "literal"]  # rank_max 16 on the tiny model
METHODS = {
    "ares": ARES,
    "projected": [*ARES, "--ares_step", "projected"],
    "no low rank": [*ARES, "--no_low_rank", "true"],
    "adamw": ["--optim_method", "adamw"],
    "muon": ["--optim_method", "muon"],
    "galore": ["--optim_method", "galore", "--rank_max", "16", "--galore_gap", "20", "--galore_scale", "1"],
    "sgd": ["--optim_method", "sgd"],
    "rmsprop": ["--optim_method", "rmsprop"],
}
COMMON = [
    "--per_device_train_batch_size", "32", "--max_steps", "64", "--save_strategy", "no", "--report_to", "none", "--gradloc", "off",
    "--spectral_every", "0", "--dynamic_sampling", "false", "--eval_problems", "100", "--eval_samples", "8", "--verifier_workers", "1",
]  # fmt: skip


def sweep_arms():
    """{"ares at 1e-4": options}: every optimizer at every rate, and the ablations that the article lists at one."""
    arms = {
        f"{name} at {lr}": [*COMMON, *METHODS[name], "--learning_rate", lr]
        for name, rates in RATES.items()
        for lr in rates
    }
    for step in ("literal", "projected"):
        base = [*COMMON, *ARES, "--ares_step", step, "--learning_rate", "3e-4"]
        arms[f"{step}, fixed rank at 3e-4"] = [*base, "--rank_mode", "fixed"]
        arms[f"{step}, no smoothing at 3e-4"] = [*base, "--rank_ema", "0"]
    for rank in ("4", "8", "31"):
        arms[f"literal, rank_max {rank} at 3e-4"] = [
            *COMMON,
            *ARES,
            "--rank_max",
            rank,
            "--learning_rate",
            "3e-4",
        ]
    for algorithm in ("rloo", "reinforce_pp", "gdpo", "grpo"):
        for name in ("ares", "adamw"):
            arms[f"{algorithm}: {name} at 1e-4"] = [
                *COMMON,
                *METHODS[name],
                "--learning_rate",
                "1e-4",
                "--algorithm",
                algorithm,
            ]
    for name in ("ares", "adamw"):
        arms[f"sft: {name} at 1e-4"] = [
            *COMMON,
            *METHODS[name],
            "--learning_rate",
            "1e-4",
            "--mode",
            "sft",
            "--overlong_buffer",
            "0",
        ]
    return arms


# spectra: AdamW, so that what is seen is the gradient's and not Ares's doing; top 2 of 96 is the article's 32 of 2,048, rounded up
SPECTRA = [
    "--optim_method", "adamw", "--save_strategy", "no", "--report_to", "none", "--gradloc", "off",
    "--spectral_every", "5", "--dynamic_sampling", "false", "--algorithm", "grpo", "--overlong_buffer", "0", "--learning_rate", "1e-4",
]  # fmt: skip
LARGER = "runs/ares/larger"
COLD_START = [
    "--hidden_size", "256", "--max_steps", "1000", "--copies", "8", "--per_device_train_batch_size", "32", "--learning_rate", "2e-3",
    "--lazy_steps", "60", "--heldout_rows", "240", "--logging_steps", "50",
]  # fmt: skip
# a named model has no default config
TINY_ARES = REPO / "recipes" / "configs" / "tiny_ares.yaml"
# 1.6 seconds of one core a step of the larger model
SPECTRA_RUN = [
    "--per_device_train_batch_size", "32", "--max_steps", "80", "--eval_problems", "48", "--eval_samples", "2",
    "--verifier_workers", "1",
]  # fmt: skip


def spectra_arms(larger):
    """{"tiny: RLVR": options, ...}; with `larger` (a model folder) the first three on it.

    There not the top 32: these hold 99.6 % of the energy at the first step (ranks for 50, 70, 90 %: 2, 3.5, 8), and cannot rise.
    """
    kinds = {
        "RLVR": [],
        "random reward": ["--reward", "random"],
        "SFT": ["--mode", "sft"],
        "RLVR, dapo": ["--algorithm", "dapo", "--dynamic_sampling", "true"],
    }
    arms = {
        f"tiny: {kind}": [*SPECTRA_RUN, *SPECTRA, "--spectral_top", "2", *options] for kind, options in kinds.items()
    }
    if larger is not None:
        model = ["--config", str(TINY_ARES), "--model_name_or_path", str(larger), *SPECTRA_RUN]
        arms |= {
            f"larger: {kind}": [*model, *SPECTRA, "--spectral_top", "4", *options]
            for kind, options in kinds.items()
            if kind != "RLVR, dapo"
        }
    return arms


def sweep_cells(records, minutes):
    """The cells of one run: accuracy, reward, collapse, ranks, minutes."""
    evals = [100 * r["eval/accuracy"] for r in records if "eval/accuracy" in r]
    train = [r for r in records if "grad_norm" in r]
    tail = train[-10:]
    return {
        "held-out after %": evals[-1],
        "gain, points": evals[-1] - evals[0],
        "accuracy, last 10 steps": statistics.mean(r["accuracy"] for r in tail),
        "best accuracy": max(
            statistics.mean(r["accuracy"] for r in train[i : i + 10]) for i in range(max(1, len(train) - 9))
        ),
        "entropy, last 10": statistics.mean(r["entropy"] for r in tail),
        "rank, mean over the run": statistics.mean(r["ares/rank/mean"] for r in train)
        if "ares/rank/mean" in train[0]
        else None,
        "minutes": minutes,
    }


def best_rates(rows, heads):
    """Lines that name each optimizer's best learning rate by mean held-out accuracy."""
    column = 1 + heads.index("held-out after %")
    best = {}
    for row in rows:
        name, _, lr = row[0].rpartition(" at ")
        value = float(row[column].split(" ")[0])
        if name in METHODS and value > best.get(name, (0.0,))[0]:
            best[name] = (value, lr, row[column])
    return [
        f"- {name}: {text} % at {lr}" for name, (_, lr, text) in sorted(best.items(), key=lambda item: -item[1][0])
    ]


def spectra_rows(spectra):
    """One row an arm from {arm: [records of each seed]}: first and last fifth of the run."""
    keys = ("top_share", "rank_0.5", "rank_0.7", "rank_0.9", "entropy_rank")
    for arm, seeds in spectra.items():
        cells = []
        for key in keys:
            for part in (0, 1):
                values = []
                for records in seeds:
                    size = max(1, len(records) // 5)
                    some = records[-size:] if part else records[:size]
                    values.append(statistics.mean(mean_over(record, key) for record in some))
                cells.append(spread(values))
        yield [arm, *cells]


SPECTRA_HEAD = ["arm"] + [
    f"{name}, {part} fifth"
    for name in ("top share", "rank 50 %", "rank 70 %", "rank 90 %", "entropy rank")
    for part in ("first", "last")
]


def ares(seeds, steps, out, jobs):
    """Runs the sweep and writes its table; prints the best rates."""
    arms = sweep_arms()
    runs, _ = run_arms("ares", arms, seeds, steps, out, jobs, recipe="ares_dapo", every=10)
    names, rows = rows_by_arm(runs, sweep_cells)
    write_table("ares", ["arm", *names], rows, runs, seeds, steps, jobs, out)
    print("\n".join(best_rates(rows, names)))


def ares_spectra(seeds, steps, out, jobs):
    """Also on the larger model, which is made first where it is missing (ten minutes of one core; a quick look does without)."""
    larger = REPO / LARGER
    if steps is None and not larger.is_dir():
        subprocess.run(
            [sys.executable, str(REPO / "recipes" / "cold_start.py"), "--output_dir", str(larger), *COLD_START],
            check=True,
        )
    arms = spectra_arms(larger if larger.is_dir() else None)
    runs, work = run_arms("ares_spectra", arms, seeds, steps, out, jobs, recipe="ares_dapo", every=10)
    spectra = {
        arm: [read_spectra(work / f"{i}-{seed}" / "spectral.jsonl") for seed in seeds] for i, arm in enumerate(arms)
    }
    for model in ("tiny", "larger"):
        part = {arm.split(": ")[1]: records for arm, records in spectra.items() if arm.startswith(model)}
        if part:
            plot_spectra(part, out / f"spectral_{model}.png")
    rows = list(spectra_rows(spectra))
    write_table("ares_spectra", SPECTRA_HEAD, rows, runs, seeds, steps, jobs, out)
