"""Make the evidence in results/ again, one command a claim.

    python results/reproduce.py grpo_tokenclip            three arms x three seeds, about half an hour on 2 cores
    python results/reproduce.py gradloc                   seven arms x five seeds that spike and collapse, about 40 minutes
    python results/reproduce.py minirl --jobs 2           the paper's ablations on the tiny MoE: 26 arms x three seeds, under an hour
    python results/reproduce.py minirl_push --jobs 2      where the same arms break: coarser rollouts, higher learning rates, longer runs
    python results/reproduce.py async_time                seconds of an update at each staleness; on an idle machine, some minutes
    python results/reproduce.py async --jobs 2            staleness 0 to 16, replay and clip: 28 arms x three seeds, half an hour
    python results/reproduce.py dsv32 --jobs 2            DeepSeek-V3.2's mechanisms on the tiny MoE: 20 arms x three seeds
    python results/dsv32/drills.py                        what the guard sees and restores when a run is broken on purpose, minutes
    python results/reproduce.py ares --jobs 2             8 optimizers at 4 learning rates, ablations: 49 arms x three seeds, half an hour
    python results/reproduce.py ares_spectra --jobs 2     spectra of the gradient: RLVR, random reward, SFT
    python results/reproduce.py grpo_tokenclip --seeds 0 --steps 20     a quick look, written to runs/, not to results/

Writes results/<claim>/report.md, metrics.jsonl (every arm, seed and step) and curve.png (mean and spread over seeds).
"""

import argparse
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from results.claim_ares import ares, ares_spectra  # noqa: E402
from results.claim_async import async_, async_time  # noqa: E402
from results.claim_dsv32 import dsv32  # noqa: E402
from results.claim_gradloc import gradloc, grpo_tokenclip  # noqa: E402
from results.claim_minirl import minirl, minirl_push  # noqa: E402

CLAIMS = {
    "grpo_tokenclip": grpo_tokenclip,
    "gradloc": gradloc,
    "minirl": minirl,
    "minirl_push": minirl_push,
    "async": async_,
    "async_time": async_time,
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
