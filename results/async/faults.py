r"""Break a real vLLM server under a run, on purpose, and write down what was seen, what was sent again, and what became of every group.

    SERVER_PYTHON=.venv-vllm/bin/python python results/async/faults.py [--quick] [--only NAME]

The server is killed (SIGKILL) or halted (SIGSTOP) by signals, its answers are lost or falsified by a proxy between it and the
trainer. Each drill is one recipe on the dense tiny model in a process of its own, which `audit.py` watches. A run that stops has to
say why in one sentence. Writes faults.md beside this file; --quick (garbage and lost answers, which need one server start) to
runs/quick/async/.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import TimeoutExpired

import psutil

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(REPO), str(REPO / "tests"), str(HERE)]

from audit import account, result, start  # noqa: E402
from real_vllm import RealServer  # noqa: E402

from rlvr_report import read_metrics  # noqa: E402

STEPS = 6
PROMPTS = 4  # a sampling
RUN = (
    f"{{recipe}} --engine vllm --rollout_dtype float32 --model_name_or_path tiny --dataset tiny --exact_answers true "
    f"--routing_replay none --num_minibatches 1 --gradloc off --max_steps {STEPS} --warmup_steps 0 --learning_rate 1e-4 "
    "--num_generations 8 --per_device_train_batch_size 32 --max_completion_length 48 --gradient_checkpointing false --vllm_restart_s 1800"
)
SYNC = RUN.format(recipe="recipes/minirl_sync.py")
AHEAD = RUN.format(recipe="recipes/minirl_async_r3.py") + " --max_staleness 1"
HALT_S = 90  # longer than the requests' time limit
AT = 3  # the sampling, or the weights, at which a fault strikes
GENERATE = "/inference/v1/generate"

# ---- what a proxy does to answers


def html(answer):
    return b"<html>502 Bad Gateway</html>"


def cut(answer):
    return json.dumps(answer).encode()[:-9]


def no_choices(answer):
    return json.dumps(answer | {"choices": []}).encode()


def foreign_token(answer):
    answer["choices"][0]["token_ids"][0] = 10**6
    return json.dumps(answer).encode()


def token_without_logprob(answer):
    answer["choices"][0]["logprobs"]["content"].pop()
    return json.dumps(answer).encode()


def nan_logprob(answer):
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = float("nan")
    return json.dumps(answer).encode()


GARBAGE = (html, cut, no_choices, foreign_token, token_without_logprob, nan_logprob)


class Proxy:
    """Context manager: passes requests on to a server on loopback; `rule(path)` says what happens to the answer (None: nothing;
    "lost": the connection closes, after the server has done the work; a function: answer -> bytes)."""

    def __init__(self, port, make_rule):
        lock, rule = threading.Lock(), make_rule()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                self.forward(None)

            def do_POST(self):
                self.forward(self.rfile.read(int(self.headers.get("Content-Length", 0))))

            def forward(self, body):
                probe = body is not None and b"prompt_logprobs" in body
                server = HTTPConnection("127.0.0.1", port, timeout=600)
                server.request(self.command, self.path, body, {"Content-Type": "application/json"})
                answer = server.getresponse()
                data = answer.read()
                server.close()
                with lock:
                    fault = rule("probe" if probe else self.path)
                if fault == "lost":
                    self.close_connection = True
                    return
                if fault is not None:
                    data = fault(json.loads(data))
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True)

    def run(self):
        """After the trainer was forked: a fork takes no threads along."""
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def some_garbage():
    asked = 0

    def rule(path):
        nonlocal asked
        asked += path == GENERATE
        return GARBAGE[asked // 3 % len(GARBAGE)] if path == GENERATE and asked % 3 == 0 else None

    return rule


def garbage_for_good():
    asked = 0

    def rule(path):
        nonlocal asked
        asked += path == GENERATE
        return html if path == GENERATE and asked > PROMPTS * AT else None

    return rule


def half_lost(everything):
    pick, asked = random.Random(0), 0

    def rule(path):
        nonlocal asked
        asked += path == GENERATE  # the first one asks what the server can do
        return "lost" if asked > 1 and (everything or path == GENERATE) and pick.random() < 0.5 else None

    return rule


# ---- what happens to the server


def kill_and_start(server):
    server.kill()
    server.start()


def kill_for_good(server):
    server.kill()


def kill_engine(server):
    """One of its processes, the one that computes; the other then ends by itself, as a supervisor would see."""
    for child in psutil.Process(server.process.pid).children(recursive=True):
        if "EngineCore" in " ".join(child.cmdline()) + child.name():
            child.kill()
    try:
        server.process.wait(120)
    except TimeoutExpired:
        server.kill()
    server.start()


def halt(server):
    server.signal(signal.SIGSTOP)
    time.sleep(HALT_S)
    server.signal(signal.SIGCONT)


def halt_for_good(server):
    server.signal(signal.SIGSTOP)


QUICKLY = " --vllm_timeout_s 60"
DRILLS = {
    # name: (what, options, what happens to the server, at the start of what, rule of the proxy)
    "calm": ("nothing", AHEAD, None, None, None),
    "garbage": ("every third answer is garbage, of six kinds", AHEAD, None, None, some_garbage),
    "garbage for good": ("from the third sampling on every answer is garbage", AHEAD, None, None, garbage_for_good),
    "half": ("half of the samples are lost on the way back", AHEAD, None, None, lambda: half_lost(False)),
    "half of all": (
        "half of all answers are lost on the way back, those to pushes too", SYNC, None, None, lambda: half_lost(True),
    ),
    "halt": (f"SIGSTOP in mid-generation, SIGCONT after {HALT_S} s", AHEAD + QUICKLY, halt, "generate", None),
    "halt in a push": (f"SIGSTOP in mid-push, SIGCONT after {HALT_S} s", AHEAD + QUICKLY, halt, "push", None),
    "kill": ("kill -9 in mid-generation, started again", AHEAD, kill_and_start, "generate", None),
    "kill in a push": ("kill -9 in mid-push, started again", SYNC, kill_and_start, "push", None),
    "kill the engine": ("kill -9 of the computing process alone, in mid-generation", SYNC, kill_engine, "generate", None),
    "halt for good": (
        "SIGSTOP in mid-generation, for good", AHEAD + QUICKLY + " --vllm_restart_s 10", halt_for_good,
        "generate", None,
    ),
    "kill for good": (
        "kill -9 in mid-generation, not started again for 10 s; then started, and the run resumed",
        AHEAD + " --vllm_restart_s 10 --save_steps 2", kill_for_good, "generate", None,
    ),
}  # fmt: skip
QUICK = ("garbage", "half", "garbage for good")


def watch(server, disturb, word, events):
    """Disturbs the server a moment after the AT-th sampling or push has begun."""
    while not (events.exists() and f"{word} {AT}\n" in events.read_text()):
        time.sleep(0.005)
    time.sleep(0.1)  # requests are in the server
    disturb(server)


def drill(server, folder, options, disturb, word, rule):
    """-> the audits of the run, and of its resumption if it stopped and a server can be had again."""
    if "--save_steps" not in options:
        options += " --save_strategy no"
    with Proxy(server.port, rule) if rule else nullcontext() as proxy:
        process = start(f"{options} --vllm_server_base_url {proxy.url if proxy else server.url}", folder, "first")
        if disturb:
            arguments = (server, disturb, word, process.out.with_suffix(".events"))
            threading.Thread(target=watch, args=arguments, daemon=True).start()
        if proxy:
            proxy.run()
        audits = [result(process)]
    if disturb is halt_for_good:
        server.signal(signal.SIGCONT)
    if disturb is kill_for_good:
        server.start()
        server.wait()
        again = f"{options} --resume_from_checkpoint last --vllm_server_base_url {server.url}"
        audits.append(result(start(again, folder, "second")))
    return audits


def shorten(sentence):
    """Equal for failures of one kind: without the numbers and the contents of the moment."""
    return re.sub(r"\b\d+\b", "N", re.sub(r"answers no JSON.*", "answers no JSON", " ".join(sentence.split())))[:110]


def row(what, audits, folder):
    groups, seen = account(*audits), {}
    for audit in audits:
        for sentence, times in audit["failed"].items():
            seen[shorten(sentence)] = seen.get(shorten(sentence), 0) + times
    steps = [r["step"] for r in read_metrics(folder / "run" / "metrics.jsonl") if "grad_norm" in r]
    stopped = [audit["error"] for audit in audits if audit["error"]]
    whole = steps == list(range(1, STEPS + 1))
    outcome = f"all {STEPS} updates" if whole else f"{len(steps)} of {STEPS} updates"
    if stopped:
        outcome = f'stopped: "{stopped[0]}"' + (f"; resumed: {outcome}" if len(audits) > 1 else "")
    lost = groups["asked"] - groups["trained"] - groups["stale"] - groups["open"]
    detected = "; ".join(f"{times} x {s}" for s, times in sorted(seen.items(), key=lambda x: -x[1])[:6]) or "-"
    return [
        what, detected, f"{sum(a['retries'] for a in audits)}", f"{sum(a['restarts'] for a in audits)}",
        f"{groups['asked']} = {groups['trained']:g} + {groups['stale']} + {groups['open']}" + (f", LOST {lost:g}" if lost else ""),
        f"{groups['twice']}", outcome,
    ]  # fmt: skip


HEAD = (
    "fault", "seen by the engine", "requests sent again", "weights pushed again", "groups asked = trained + stale + not used yet",
    "trained twice", "the run",
)  # fmt: skip


def write(rows, folder):
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, *(rows[name] for name in DRILLS if name in rows))]
    lines.insert(1, "|" + "---|" * len(HEAD))
    (folder / "faults.md").write_text(
        "# Fault drill on a real vLLM server\n\n"
        "Made by `SERVER_PYTHON=.venv-vllm/bin/python python results/async/faults.py`: the dense tiny model on vLLM's CPU build, "
        f"{STEPS} updates of {PROMPTS} prompts x 8 samples, `minirl_async_r3.py --max_staleness 1` (`minirl_sync.py` where a push "
        f"is killed, the computing process, or all answers are hit). The fault strikes at sampling or push {AT}. A group is trained "
        "when all of its samples reached the loss of an update; each trained sequence is matched with the random stream that gave "
        "it, and *trained twice* counts those that find none. N: a number.\n\n" + "\n".join(lines) + "\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="garbage and lost answers only")
    parser.add_argument("--only", nargs="+", choices=DRILLS, help="these drills; the rows of the others are kept")
    args = parser.parse_args()
    python = os.environ.get("SERVER_PYTHON")
    if not python:
        sys.exit("error: SERVER_PYTHON names no python: make the environment of requirements-vllm.txt, see the README")
    os.environ["OMP_NUM_THREADS"] = "1"
    out = REPO / "runs" / "quick" / "async" if args.quick else HERE
    out.mkdir(parents=True, exist_ok=True)
    path = out / "faults.json"
    rows = json.loads(path.read_text()) if path.exists() and not args.quick else {}
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        with RealServer(
            python, REPO / "tiny" / "qwen3", work / "server.log", "--dtype", "float32", "--max-model-len", "256"
        ) as server:
            for name in args.only or (QUICK if args.quick else DRILLS):
                if server.process.poll() is not None:
                    server.start()
                server.wait()
                what, *drilled = DRILLS[name]
                folder = work / name.replace(" ", "_")
                rows[name] = row(what, drill(server, folder, *drilled), folder)
                print("| " + " | ".join(rows[name]) + " |", flush=True)
                path.write_text(json.dumps(rows, indent=1) + "\n")
    write(rows, out)


if __name__ == "__main__":
    main()
