"""Runs the arms of a claim and writes what they saw: what every results/claim_*.py shares.

An arm is a name and the options of a recipe. Each run is a process that a fork server makes, so that torch, Transformers and TRL
are imported once and not once a run; a recipe sees its command line as if it had been started by hand.
"""

import hashlib
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "results"
sys.path.insert(0, str(REPO))
from rlvr_report import read_metrics, smooth, to_json  # noqa: E402

PRELOADED = ["rlvr_common", "gradloc_report", "stability", "async_rollout", "ares", "spectral_monitor"]
KEPT = (
    "reward", "eval/accuracy", "entropy", "grad_norm", "mismatch/k1", "mismatch/k3", "mismatch/extreme_frac", "omega/max",
    "rho/p01", "rho/p99", "token_clip/masked_frac", "seq_clip/masked_frac", "completions/mean_length", "ratio/max",
    "accuracy", "ares/rank/mean", "spectral/top_share", "spectral/rank_0.9", "spectral/entropy_rank", "async/staleness/p50",
    "gradloc/top1_share", "gradloc/certificate", "layer_clip/corr_mean", "layer_clip/corr_min", "layer_clip/clipped_frac",
    "minirl/masked_frac", "minirl/truncated_frac", "routing/rollout_agreement", "routing/old_agreement", "ratio/p99",
    "mismatch/mean", "kl", "off_policy_mask/masked_frac", "support/agreement", "support/rollout_kept_mass", "guard/level",
)  # fmt: skip


def start_recipe(recipe, options, log):
    """In a process of its own: the recipe under its command line, its output in `log`, the CPU time of its processes beside it."""
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = [str(REPO / "recipes" / f"{recipe}.py"), *options]
    runpy.run_path(sys.argv[0], run_name="__main__")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    log.with_suffix(".cpu").write_text(json.dumps(sum(u.ru_utime + u.ru_stime for u in used) / 60))


def run_arm(recipe, name, options, seed, folder):
    """One training run -> its metrics records and its minutes of CPU time, which other work on the machine changes little. A run
    that `folder` holds already is read, not made again."""
    done = folder / "minutes.json"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)  # half a run
        options = ["--output_dir", str(folder), "--rollout_dtype", "fp8", "--seed", str(seed), *options]
        log = folder.parent / f"{folder.name}.log"
        process = multiprocessing.get_context("forkserver").Process(target=start_recipe, args=(recipe, options, log))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{name}, seed {seed}: {recipe} ended with exit code {process.exitcode}, see {log}")
        log.with_suffix(".cpu").rename(done)
    minutes = json.loads(done.read_text())
    print(f"seed {seed}: {name}: {minutes:.1f} minutes", flush=True)
    return read_metrics(folder / "metrics.jsonl"), minutes


def run_arms(claim, arms, seeds, steps, out, jobs, recipe="grpo_tokenclip", every=1):
    """Every arm with every seed -> {arm: {seed: (records, minutes)}} and the folder of the runs.

    recipe: the one of all arms, or {arm: recipe}. Writes metrics.jsonl, with the mean of each metric over `every` steps. After an
    interruption the runs that ended are read from runs/reproduce/<claim>, as long as arms and commit are the same.
    """
    out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "-C", str(REPO), "log", "-1", "--format=%h"], capture_output=True, text=True
    ).stdout.strip()
    limit = [] if steps is None else ["--max_steps", str(steps), "--eval_problems", "20", "--eval_samples", "1"]
    arms = {arm: [*options, *limit] for arm, options in arms.items()}
    key = hashlib.sha256(json.dumps([commit, arms]).encode()).hexdigest()[:8]
    work = REPO / "runs" / "reproduce" / f"{claim}-{key}"
    work.mkdir(parents=True, exist_ok=True)
    runs, waiting = {arm: {} for arm in arms}, {}
    # read when the fork server starts: its children inherit threads and path
    os.environ["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // jobs))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with ThreadPoolExecutor(jobs) as pool:
        for seed in seeds:
            for i, (arm, options) in enumerate(arms.items()):
                name = recipe if isinstance(recipe, str) else recipe[arm]
                waiting[arm, seed] = pool.submit(run_arm, name, arm, options, seed, work / f"{i}-{seed}")
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


def collapse_step(records):
    """First step from which the reward stays below half of its peak (of means over samplings); None if it never does."""
    points = [(r["step"], r["reward"]) for r in records if "reward" in r]
    peak = max(reward for _, reward in points)
    below = [step for i, (step, _) in enumerate(points) if all(reward < peak / 2 for _, reward in points[i:])]
    return below[0] if below else None


def spread(values):
    """mean +- standard deviation over seeds (n - 1), as text; a single value has no spread."""
    if len(values) == 1:
        return f"{values[0]:.3g}"
    return f"{statistics.mean(values):.3g} ± {statistics.stdev(values):.2g}"


def curves(runs, path):
    """Reward, gradient norm, mismatch k3 and entropy: mean over seeds, the band is min to max."""
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


def cells(columns):
    """{name: a value a seed, None where there is none} -> mean and spread as text; of collapse steps the list."""
    for name, values in columns.items():
        known = [v for v in values if v is not None]
        if name == "collapse step":
            yield ", ".join(map(str, sorted(known))) or "-"
        else:
            yield spread(known) if known else "-"


def rows_by_arm(runs, row_of):
    """{name: value a seed} of `row_of(records, minutes)` -> (the names, [one table row an arm: its name, then mean and spread])."""
    names, rows = [], []
    for arm, by_seed in runs.items():
        columns = {}
        for records, minutes in by_seed.values():
            for name, value in row_of(records, minutes).items():
                columns.setdefault(name, []).append(value)
        names = list(columns)
        rows.append([arm, *cells(columns)])
    return names, rows


def curves_by_group(runs, out):
    """Arms are named "group: arm"; one figure a group, curve_<group>.png."""
    for group in dict.fromkeys(arm.split(":")[0] for arm in runs):
        part = {arm.split(": ", 1)[1]: seeds for arm, seeds in runs.items() if arm.startswith(f"{group}:")}
        curves(part, out / f"curve_{group.lower().translate({ord(' '): '_', ord('='): None, ord(','): None})}.png")


FIGURES = "<!-- figures: written by results/reproduce.py -->", "<!-- end of figures -->"


def fill(text, marks, lines, where):
    """Replaces what lies between two marks of a file; the words around them are written by hand. ValueError where one is missing."""
    begin, end = marks
    if begin not in text or end not in text:
        raise ValueError(f"{where} has lost its marks {begin} ... {end}: put them back where the figures belong")
    return text.split(begin)[0] + begin + "\n\n" + "\n".join(lines) + "\n\n" + end + text.split(end)[1]


def record(name, command, minutes, seeds, **more):
    """Writes down when and from what a piece of evidence was made."""
    path = RESULTS / "made.json"
    entries = json.loads(path.read_text()) if path.exists() else {}
    git = ["git", "-C", str(RESULTS), "log", "-1", "--format=%h %cs"]
    commit, date = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split()
    entries[name] = {
        "command": command,
        "minutes": round(minutes),
        "seeds": seeds,
        "commit": commit,
        "date": date,
        **more,
    }
    path.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


def write_table(claim, head, rows, runs, seeds, steps, jobs, out, more=()):
    """The figures of a report; of a whole set of runs also when and from what it was made."""
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    command = f"python results/reproduce.py {claim} --seeds {' '.join(map(str, seeds))}"
    command += (f" --steps {steps}" if steps else "") + (f" --jobs {jobs}" if jobs > 1 else "")
    path = out / "report.md"
    text = path.read_text() if path.exists() else "\n".join(FIGURES) + "\n"
    made = f"Made by `{command}`, mean ± standard deviation over {len(seeds)} seeds."
    path.write_text(fill(text, FIGURES, [made, "", *lines, *more], path.name))
    if steps is None and len(seeds) >= 3:
        took = {arm: [round(minutes, 2) for _, minutes in by_seed.values()] for arm, by_seed in runs.items()}
        more = {"arm_minutes": took} if claim == "defaults" else {}  # README's recipe table shows them
        record(claim, command, sum(map(sum, took.values())) / jobs, f"{seeds[0]}-{seeds[-1]}", **more)
    print("\n".join(lines))
    print(json.dumps({"claim": claim, "out": str(out), "runs": len(seeds) * len(runs)}))
