"""Rollouts ahead of time: overlap, the staleness bound, and what talking to a server costs.

overlap     an engine that takes as long as an update, both asleep rather than busy: wall-clock time of the schedule with one
            sampling ahead over that of the synchronous one (S = 0) on the same code, and the share that the trainer waits.
bound       1,000 updates against an engine whose groups finish in random order, taken as they finish, one to four updates
            a sampling: groups used beyond the bound (counted by the caller, not by the schedule), the largest buffer.
server      answers of 4,096 tokens with the routes of a model of 48 MoE layers and 8 experts a token, replayed by a server
            in a process of its own at once; the client's processor seconds an answer, scheduling, HTTP and decoding
            included, times the requests that a busy server answers at the same time, over the seconds that such a
            generation takes. Processor seconds, as other processes on the machine disturb them less; all of them at one
            moment, as if no decoding overlapped with generation, is the worst case.

    python benchmarks/bench_async.py [--quick]
"""

import argparse
import base64
import io
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

from async_rollout import Ahead, AsyncEngine, Buffer, Group  # noqa: E402
from rollout import Rollout  # noqa: E402
from vllm_engine import VLLMEngine  # noqa: E402

# Half the time is the ideal; start, end and hand-over may cost a fifth of what is gained.
OVERLAP_BAR, WAITING_BAR = 0.60, 0.10
# What the trainer's side adds to a generation must not be worth a second server.
SERVER_BAR = 0.05
TOKENS, PROMPT, LAYERS, TOP_K, EXPERTS = 4096, 128, 48, 8, 128
# One sequence of a 30B-A3B on one H100-class GPU at 16 sequences: faster servers are rarer than slower ones.
TOKENS_PER_S, AT_ONCE = 150, 16


# --- the replaying server: started as a process of its own -----------------------------------------------------------


def recorded_answer():
    """One choice of vLLM 0.32: 4,096 tokens with log-probs, routes as base64 of .npy."""
    pick = np.random.default_rng(0)
    rows = PROMPT + TOKENS - 1
    routes = np.argsort(pick.random((rows * LAYERS, EXPERTS), dtype=np.float32), -1)[:, :TOP_K]
    with io.BytesIO() as buffer:
        np.save(buffer, routes.reshape(rows, LAYERS, TOP_K).astype(np.uint8), allow_pickle=False)
        text = base64.b64encode(buffer.getvalue()).decode()
    ids = pick.integers(2, 500, TOKENS).tolist()
    content = [
        {"token_id": token, "logprob": -float(x), "rank": 1, "top_logprobs": []}
        for token, x in zip(ids, pick.random(TOKENS), strict=True)
    ]
    spans = [{"version": "0", "start": 0, "end": TOKENS}]
    choice = {
        "index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": ids, "routed_experts": text,
        "sampling_mask": None, "weight_versions": spans, "logprobs": {"content": content},
    }  # fmt: skip
    return json.dumps({"request_id": "r", "model": "m", "prompt_logprobs": None, "choices": [choice]}).encode()


def serve():
    answer = recorded_answer()
    label = ["default"]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            path = self.path.split("?")[0]
            config = {"model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.bfloat16"}}
            content = {
                "/health": {}, "/v1/models": {"data": [{"max_model_len": 2 * TOKENS}]},
                "/server_info": {"vllm_config": config}, "/weight_info": {"weight_version": label[0]},
            }[path]  # fmt: skip
            self.send(json.dumps(content).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            if not self.path.startswith("/inference"):
                label[0] = body.get("new_version", label[0])
                return self.send(b'{"success": true}')
            sampling = body["sampling_params"]
            if sampling.get("max_tokens", 0) > 1:
                return self.send(answer)
            scored = [None] + [{str(token): {"logprob": -1.0}} for token in body["token_ids"][1:]]
            self.send(json.dumps({"choices": [{"routed_experts": None}], "prompt_logprobs": scored}).encode())

        def send(self, data):
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


# --- the three measurements ------------------------------------------------------------------------------------------


class Asleep:
    """An engine that takes its time; groups of a call finish together."""

    def __init__(self, seconds):
        self.version, self.fingerprint, self.seconds = 0, "", seconds

    def copy_weights(self, model):
        return model

    def push_weights(self, weights, version):
        self.version = version
        return str(version)

    def generate(self, prompt_ids, max_new_tokens, sequence_ids, **options):
        version = self.version
        time.sleep(self.seconds())
        n = len(prompt_ids)
        return Rollout(prompt_ids, [[1]] * n, [[0.0]] * n, [True] * n, [version] * n)

    def close(self):
        pass


def schedule_of(engine, bound, take="in_order", workers=1):
    front = AsyncEngine(engine, Buffer(take), workers=workers)
    return Ahead(front, lambda i: Group({}, [i + 1], [2 * i, 2 * i + 1]), 4, bound, bound, max_new_tokens=1)


def run_schedule(bound, seconds, samplings):
    """-> (wall-clock seconds, seconds that the trainer waited)."""
    schedule, waited = schedule_of(Asleep(lambda: seconds), bound), 0.0
    with closing(schedule.engine):
        started = time.perf_counter()
        for step in range(samplings):
            schedule.engine.push_weights("weights", step)
            begun = time.perf_counter()
            schedule.ask()
            schedule.take(step)
            waited += time.perf_counter() - begun
            time.sleep(seconds)
        wall = time.perf_counter() - started
    return wall, waited


def measure_overlap(seconds, samplings, turns):
    ratios, shares = [], []
    for _ in range(turns):
        sync, _ = run_schedule(0, seconds, samplings)
        wall, waited = run_schedule(1, seconds, samplings)
        ratios.append(wall / sync)
        shares.append(waited / wall)
    return statistics.median(ratios), statistics.median(shares), max(ratios)


def measure_bound(updates, bound=2):
    pick = random.Random(0)
    schedule = schedule_of(Asleep(lambda: pick.choice([0, 0, 0, 0.001, 0.01])), bound, "as_finished", 4)
    now = beyond = used = largest = 0
    with closing(schedule.engine):
        while now < updates:
            schedule.engine.push_weights("weights", now)
            schedule.ask()
            largest = max(largest, len(schedule.engine.buffer))
            for group in schedule.take(now):
                used += 1
                beyond += now - group.version > bound
            now += pick.choice([1, 1, 2, 4])
    return {"groups_used": used, "beyond_bound": beyond, "stale": schedule.stale, "largest_buffer": largest}


def tiny_moe_of_48_layers():
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=16, intermediate_size=16, moe_intermediate_size=4, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def measure_server(requests, turns):
    """-> median processor seconds of the client for one answer, its quartiles, megabytes of an answer."""
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        model = tiny_moe_of_48_layers()
        with tempfile.TemporaryDirectory() as folder:
            # the replayed server scores no probe: any distance will do here
            engine = VLLMEngine(model, url, 1, folder, concurrency=AT_ONCE, tolerance=math.inf)
        with closing(engine):
            prompts = [[2 + i] * PROMPT for i in range(requests)]
            seconds = []
            for _ in range(turns + 1):
                started = time.process_time()
                rollout = engine.generate(prompts, TOKENS)
                seconds.append((time.process_time() - started) / requests)
                assert rollout.routes[0].shape == (PROMPT + TOKENS - 1, LAYERS, TOP_K)
        quartiles = statistics.quantiles(seconds[1:], n=4)
        size = len(recorded_answer()) / 1e6
        return statistics.median(seconds[1:]), (quartiles[0], quartiles[2]), size
    finally:
        server.kill()
        server.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns, under a minute")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
    quick = args.quick
    ratio, waiting, worst = measure_overlap(0.2, 20, 1 if quick else 5)
    print(f"overlap: {ratio:.3f} of the synchronous time (worst {worst:.3f}), the trainer waits {waiting:.1%}")
    bound = measure_bound(1000)
    print("bound: " + ", ".join(f"{name} {value}" for name, value in bound.items()))
    seconds, spread, size = measure_server(AT_ONCE, 3 if quick else 12)
    generation = TOKENS / TOKENS_PER_S
    overhead = seconds * AT_ONCE / generation
    print(
        f"server: {1000 * seconds:.1f} ms an answer of {size:.1f} MB (quartiles {1000 * spread[0]:.1f} to {1000 * spread[1]:.1f}), "
        f"{AT_ONCE} of them: {overhead:.2%} of a generation of {generation:.1f} s"
    )
    figures = {
        "overlap_ratio": round(ratio, 4), "overlap_worst": round(worst, 4), "waiting_share": round(waiting, 4), **bound,
        "server_overhead": round(overhead, 4), "ms_an_answer": round(1000 * seconds, 2), "mb_an_answer": round(size, 2),
    }  # fmt: skip
    bars = {
        "overlap_ratio": OVERLAP_BAR,
        "waiting_share": WAITING_BAR,
        "beyond_bound": 0,
        "largest_buffer": 12,  # this sampling and two ahead, of four groups
        "server_overhead": SERVER_BAR,
    }
    ok = all(figures[name] <= bar for name, bar in bars.items())
    print(json.dumps({"name": "bench_async", "figures": figures, "bars": bars, "ok": ok}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
