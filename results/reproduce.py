"""Make the evidence in results/ again, one command a claim; and the table of all claims from it.

    python results/reproduce.py minirl --jobs 2           one; `python results/reproduce.py list` says what there is and how long it takes
    python results/reproduce.py ares ares_spectra         several; `all`: everything
    python results/reproduce.py --quick                   a look at everything: one seed, a few updates, written to runs/, not to results/
    python results/reproduce.py table                     results/claims.md and README's table, from the evidence that is there

Writes results/<claim>/report.md (its figures), metrics.jsonl (every arm, seed and step), curve.png (mean and spread over seeds), and
results/made.json (when, from what). A run that was interrupted goes on where it stopped.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from results import claims  # noqa: E402
from results.claim_ares import ares, ares_spectra  # noqa: E402
from results.claim_async import async_, async_time  # noqa: E402
from results.claim_defaults import defaults  # noqa: E402
from results.claim_dsv32 import dsv32  # noqa: E402
from results.claim_gradloc import gradloc, grpo_tokenclip  # noqa: E402
from results.claim_minirl import minirl, minirl_push  # noqa: E402
from results.running import record  # noqa: E402

RUNS = {  # name -> (what it is, the function that runs its arms)
    "defaults": ("every recipe as it starts with no flag: 5 arms", defaults),
    "grpo_tokenclip": ("TokenClip and SeqClip on the embedded default: 3 arms", grpo_tokenclip),
    "gradloc": ("the ladder of treatments on runs that spike and collapse: 7 arms x 5 seeds", gradloc),
    "minirl": ("MiniRL's ablations on the tiny MoE, three cold starts: 26 arms", minirl),
    "minirl_push": (
        "where the same arms break: coarse rollouts, high learning rates, long runs: 19 arms",
        minirl_push,
    ),
    "async_time": ("seconds of an update at each staleness, on an idle machine: 4 arms", async_time),
    "async": ("staleness 0 to 16, replay and clip: 22 arms", async_),
    "dsv32": ("DeepSeek-V3.2's mechanisms one by one on the tiny MoE: 20 arms", dsv32),
    "ares": ("8 optimizers at 4 to 6 learning rates, ablations, estimators: 57 arms", ares),
    "ares_spectra": ("spectra of the gradient: verifiable reward, random reward, SFT", ares_spectra),
}
SCRIPTS = {  # name -> (what it is, command, what --quick adds; None: it has no short form)
    "planted": ("planted anomalies found by GradLoc", ["results/gradloc/planted.py", "--trials", "100"], ["--quick"]),
    "theorem": ("the published success bound, measured", ["results/gradloc/theorem.py"], ["--quick"]),
    "mismatch": ("what replay does to mismatch and staleness", ["results/minirl/mismatch.py"], ["--quick"]),
    "drills": ("nine faults that the guard takes back, bit for bit", ["results/dsv32/drills.py"], None),
    "vllm": ("training against a real vLLM server: 7 runs", ["results/async/vllm_runs.py"], ["--quick"]),
    "faults": ("a real vLLM server that lies, halts and dies: 12 drills", ["results/async/faults.py"], ["--quick"]),
}
SERVED = ("vllm", "faults")  # need SERVER_PYTHON, the python of an environment of requirements-vllm.txt


def listed():
    entries = claims.made()
    width = max(map(len, RUNS | SCRIPTS))
    for name, (what, *_) in (RUNS | SCRIPTS).items():
        minutes = f"{entries[name]['minutes']} minutes" if name in entries else "not made yet"
        print(f"{name:{width}}  {what} ({minutes})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"{', '.join(RUNS | SCRIPTS)}; all; list; table")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, 4 updates, few held-out problems; goes to runs/"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2; gradloc: 5 6 7 8 9")
    parser.add_argument("--steps", type=int, help="optimizer steps instead of the claim's own; goes to runs/")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time; each gets its share of the cores")
    args = parser.parse_args()
    names = args.claims or (["all"] if args.quick else ["list"])
    if names == ["list"]:
        return listed()
    if names == ["table"]:
        return claims.write()
    if names == ["all"]:
        names = [n for n in RUNS | SCRIPTS if not (args.quick and n in SCRIPTS and SCRIPTS[n][2] is None)]
        if "SERVER_PYTHON" not in os.environ:
            names = [n for n in names if n not in SERVED]
            print(
                f"without {' and '.join(SERVED)}: set SERVER_PYTHON to the python of an environment of requirements-vllm.txt"
            )
    for name in names:
        if name not in RUNS | SCRIPTS:
            parser.error(
                f"{name} is no claim: use one or more of {', '.join(RUNS | SCRIPTS)}, or all, list, table alone"
            )
    for i, name in enumerate(names, 1):
        print(f"== {name} ({i} of {len(names)})", flush=True)
        start = time.monotonic()
        if name in SCRIPTS:
            _, command, quick = SCRIPTS[name]
            if args.quick and quick is None:
                parser.error(f"{name} has no short form: leave --quick")
            subprocess.run([sys.executable, *command, *(quick if args.quick else [])], check=True, cwd=REPO)
            if not args.quick:
                record(name, " ".join(["python", *command]), (time.monotonic() - start) / 60, "-")
            continue
        # 0-4 chose the setting of gradloc
        seeds = args.seeds or ([0] if args.quick else [5, 6, 7, 8, 9] if name == "gradloc" else [0, 1, 2])
        steps = args.steps or (4 if args.quick else None)
        full = steps is None and len(seeds) >= 3
        RUNS[name][1](seeds, steps, (REPO / "results" if full else REPO / "runs" / "quick") / name, args.jobs)


if __name__ == "__main__":
    main()
