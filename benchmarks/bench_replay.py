"""What routing replay adds to a training step, and recording to generation, on a Qwen3-MoE of a million parameters.

A step is forward and backward over 32 sequences of 64 tokens, float32; the replayed one also checks and lays out its
routes, as a recipe does for every micro-batch. Generation is the rollout engine's, 32 prompts of 16 tokens and 48 more
each. With and without take turns, the order changing; compared are CPU seconds of this process on one thread, which
other processes on the machine disturb less than wall-clock time, as the median over turns of the ratio within a turn.

    python benchmarks/bench_replay.py [--quick] [--device cuda]         (on a GPU: wall-clock seconds, when it has done its work)
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

from rollout import TransformersEngine  # noqa: E402
from routing import record_routing, replay_routing, route_bytes_per_token, routing_shape  # noqa: E402

# Replay is on in every forward of a run and recording in every rollout, so neither may be worth switching off.
REPLAY_BAR, RECORD_BAR = 1.03, 1.05
SEQUENCES, POSITIONS, PROMPT = 32, 64, 16


def build():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config)


def clock(device):
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def compare(with_it, without, turns, device):
    """-> (median ratio, its quartiles, median seconds without)."""

    def seconds(run):
        started = clock(device)
        run()
        return clock(device) - started

    pairs = []
    for turn in range(turns + 2):
        if turn % 2:
            more, less = seconds(with_it), seconds(without)
        else:
            less, more = seconds(without), seconds(with_it)
        pairs.append((more, less))
    ratios = [more / less for more, less in pairs[2:]]  # the first two warm caches
    quartiles = statistics.quantiles(ratios, n=4)
    return statistics.median(ratios), (quartiles[0], quartiles[2]), statistics.median(less for _, less in pairs[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns, under a minute")
    parser.add_argument("--device", default="cpu", help="cpu | cuda")
    args = parser.parse_args()
    step_turns, generate_turns = (40, 20) if args.quick else (160, 80)
    torch.set_num_threads(1)
    model = build().train().to(args.device)
    layers, top_k, _ = routing_shape(model)
    ids = torch.randint(1, 512, (SEQUENCES, POSITIONS), generator=torch.Generator().manual_seed(1)).to(args.device)

    def step():
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean().backward()
        return logits

    def replayed_step():
        with replay_routing(model, routes):
            return step()

    torch.use_deterministic_algorithms(True, warn_only=True)  # a GPU adds experts up in any order; a CPU does not
    with record_routing(model) as recorder:
        native = step()
    routes = recorder.routes
    wanted = [p.grad.clone() for p in model.parameters()]
    identical = torch.equal(replayed_step(), native)
    identical &= all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))
    torch.use_deterministic_algorithms(False)

    engine = TransformersEngine(model, eos_token_ids=511, pad_token_id=0, record_routes=True)
    recording = engine._routing
    prompts = ids[:, :PROMPT].tolist()

    def generate(routing):
        # One engine for both: two copies of the same weights differ by 4 % already, by where they lie in memory.
        engine._routing = routing
        return engine.generate(prompts, POSITIONS - PROMPT, sequence_ids=range(SEQUENCES))

    samples = generate(recording)
    identical &= samples == generate(None)
    bytes_per_token = {route_bytes_per_token(r) for r in (routes, *samples.routes)}

    replay, replay_spread, step_s = compare(replayed_step, step, step_turns, args.device)
    record, record_spread, generate_s = compare(
        lambda: generate(recording), lambda: generate(None), generate_turns, args.device
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {layers} MoE layers, {top_k} experts a token")
    for name, ratio, spread, base in (
        ("replay in a training step", replay, replay_spread, step_s),
        ("recording in generation", record, record_spread, generate_s),
    ):
        print(f"{name}: {ratio:.4f} x {base:.3f} s (quartiles {spread[0]:.4f} to {spread[1]:.4f})")
    figures = {
        "replay_ratio": round(replay, 4),
        "replay_quartiles": [round(x, 4) for x in replay_spread],
        "record_ratio": round(record, 4),
        "record_quartiles": [round(x, 4) for x in record_spread],
        "step_s": round(step_s, 4),
        "generate_s": round(generate_s, 4),
        "route_bytes_per_token": max(bytes_per_token),
        "zero_perturbation_identical": identical,
    }
    bars = {
        "replay_ratio": REPLAY_BAR,
        "record_ratio": RECORD_BAR,
        "route_bytes_per_token": layers * top_k,
        "zero_perturbation_identical": True,
    }
    ok = replay <= REPLAY_BAR and record <= RECORD_BAR and bytes_per_token == {layers * top_k} and identical
    print(json.dumps({"name": "bench_replay", "figures": figures, "bars": bars, "ok": ok}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
