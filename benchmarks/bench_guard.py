"""What the guard and the sampling-mask replay cost, and how fast the guard sees a fault.

detection     recorded healthy runs (results/grpo_tokenclip/metrics.jsonl) with planted faults: non-finite norms and spikes of 16 to
              10,000 times the recent level at every tenth step; steps from fault to critical event, the faulty one counted as 1.
              Alarms in 3 x 300 healthy steps of the embedded default, trained here; --quick: in the nine recorded runs of 150
rollback      a run broken by a NaN loss, rolled back, against the same run with that step's gradient left out: equal bits
overhead      CPU seconds of the guard's own callbacks over those of the steps they watch, in one run
support       bytes of the recorded sets at top-k 20 over the bytes that one training step of the same batch allocates at its peak
support_logps forward and backward over (4096, 151936) logits against plain log_softmax + gather on the same, interleaved

    python benchmarks/bench_guard.py [--quick]
"""

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "recipes"), str(REPO / "tests")]

import torch  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

import stability  # noqa: E402
from rlvr_report import read_metrics  # noqa: E402
from stability import StabilityGuard, Watch, make_rules  # noqa: E402
from support import support_bytes_per_token, support_logps  # noqa: E402
from training import equal, length_reward, make_ours, weights  # noqa: E402
from verifier import MathVerifier  # noqa: E402

NONFINITE_BAR, SPIKE_BAR = 1, 2  # steps: before a second update is made from the fault; within two of a spike
FALSE_ALARM_BAR = 0  # in 1,350 recorded healthy steps, and 900 of its own: an alarm that cries wolf is switched off
OVERHEAD_BAR = 0.01  # of a step: cheap enough to be always on
STORAGE_BAR = 0.05  # of step memory at top-k 20: nobody should have to size a batch for it
LOGPS_BAR = 1.3  # times plain log-probs
VOCABULARY, POSITIONS, TOP_K = 151_936, 4_096, 20


def recorded():
    runs = {}
    for record in read_metrics(REPO / "results" / "grpo_tokenclip" / "metrics.jsonl"):
        if "grad_norm" in record:
            values = {k: v for k, v in record.items() if isinstance(v, float)}
            runs.setdefault((record["arm"], record["seed"]), []).append(values)
    return list(runs.values())


def detection(runs):
    """-> (steps to see a non-finite norm, steps to see a spike, alarms in the healthy runs): the worst of all trials."""
    nonfinite = spike = 0
    for records in runs:
        for at in range(20, len(records), 10):
            for size in (math.nan, 16.0, 100.0, 1e4):
                watch, seen = Watch(make_rules()), math.inf
                for i, values in enumerate(records[: at + 3]):
                    past = watch.history.get("grad_norm")
                    level = max(statistics.median(past), 0.2 * max(past)) if i == at else None
                    planted = i == at and math.isfinite(size)
                    values = values | ({"grad_norm": size * level} if planted else {})
                    broken = ["grad_norm"] if i == at and not planted else []
                    if any(event["level"] == "critical" for event in watch.judge(values, broken)):
                        seen = i - at + 1
                        break
                if math.isfinite(size):
                    spike = max(spike, seen)
                else:
                    nonfinite = max(nonfinite, seen)
    alarms = 0
    for records in runs:
        watch = Watch(make_rules())
        for values in records:
            alarms += any(event["level"] != "info" for event in watch.judge(values))
    return nonfinite, spike, alarms


def healthy_alarms(folder, steps=300, seeds=3):
    """Alarms of the guard in runs of the embedded default at a constant learning rate, as users see them."""
    alarms = 0
    for seed in range(seeds):
        with MathVerifier(exact=True) as verifier:
            trainer = make_ours(
                folder / str(seed), rows=None, reward=verifier, max_steps=steps, seed=seed, learning_rate=1e-4,
                per_device_train_batch_size=64, num_generations=8, max_completion_length=48, rollout_dtype="fp8",
                token_clip="icepop", guard="warn",
            )  # fmt: skip
            stability.train(trainer)
        events = [json.loads(line) for line in (folder / str(seed) / "events.jsonl").read_text().splitlines()]
        alarms += sum(event.get("kind") == "alarm" for event in events)
        print(f"seed {seed}: {alarms} alarms in {(seed + 1) * steps} healthy steps", flush=True)
    return alarms


class Leave(TrainerCallback):
    """The same fault, and the step's gradient left out."""

    def __init__(self, trainer, step):
        self.trainer, self.step = trainer, step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.trainer.model.zero_grad(set_to_none=True)


def broken_at(folder, step, **changes):
    trainer = make_ours(
        folder,
        reward=length_reward,
        max_steps=step + 1,
        save_strategy="steps",
        save_steps=2,
        rollout_dtype="fp8",
        **changes,
    )
    inner = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (
        inner(model, inputs) * (math.nan if trainer.state.global_step + 1 == step else 1.0)
    )
    return trainer


def rollback_is_exact(folder):
    guarded = broken_at(folder / "guarded", 5, guard="rollback", guard_k=1)
    stability.train(guarded)
    clean = broken_at(folder / "clean", 5)
    clean.add_callback(Leave(clean, 5))
    clean.train()
    rolled = len(guarded.guard.ledger["rollbacks"]) == 1
    return rolled and equal(weights(guarded), weights(clean)) and equal(
        guarded.optimizer.state_dict(), clean.optimizer.state_dict()
    )  # fmt: skip


def overhead(folder, steps):
    """CPU seconds in the guard over those of the whole steps, saving and alignment left out: both happen outside of steps."""
    spent, begun, total = [0.0], [0.0], [0.0]

    def timed(method):
        def run(*args, **kwargs):
            start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent[0] += time.process_time() - start

        return run

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            begun[0] = time.process_time()

        def on_step_end(self, args, state, control, **kwargs):
            total[0] += time.process_time() - begun[0]

    trainer = make_ours(
        folder, reward=length_reward, max_steps=steps, per_device_train_batch_size=64, num_generations=8, guard="warn",
        max_completion_length=48, rollout_dtype="fp8",
    )  # fmt: skip
    guard = trainer.guard
    for name in ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"):
        setattr(guard, name, timed(getattr(guard, name)))
    assert isinstance(guard, StabilityGuard)
    trainer.add_callback(Steps())  # last of all: its step holds the guard's
    stability.train(trainer)
    return spent[0] / total[0]


def storage(folder):
    """-> (bytes a token of the sets, their share of what one training step allocates), top-k 20, a batch of the embedded default."""
    trainer = make_ours(
        folder, reward=length_reward, max_steps=1, per_device_train_batch_size=64, num_generations=8, max_completion_length=48,
        top_k=TOP_K, keep_sampling_mask=True,
    )  # fmt: skip
    held = {}
    inner = trainer._compute_loss

    def measured(model, inputs):
        support = inputs["support"]
        held["bytes"] = sum(x.numel() * x.element_size() for entry in support for x in entry)
        held["per_token"] = support_bytes_per_token(support)
        saved = []

        def pack(x):
            saved.append(x.untyped_storage().nbytes() if x.untyped_storage().data_ptr() not in held else 0)
            held[x.untyped_storage().data_ptr()] = True
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):  # activations that wait for the backward
            loss = inner(model, inputs)
        held["step"] = sum(saved)
        return loss

    trainer._compute_loss = measured
    trainer.train()
    states = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    return held["per_token"], held["bytes"] / (
        held["step"] + states
    )  # activations and gradients; AdamW's states left out


def logps_ratio(positions, turns):
    """-> (median of CPU seconds over support / plain, forward and backward; the same of the forward alone)."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1, positions, VOCABULARY, generator=g).requires_grad_()
    token_ids = torch.topk(logits.detach()[0], TOP_K).indices.to(torch.int32)
    ids = token_ids[:, 3].long()[None]
    support = token_ids.flatten(), torch.arange(0, positions * TOP_K + 1, TOP_K)

    def plain():
        return logits.log_softmax(-1).gather(2, ids[..., None]).squeeze(2)

    def ours():
        return support_logps(logits, ids, support)

    def seconds(run, backward):
        logits.grad = None
        gc.collect()
        start = time.process_time()
        if backward:
            run().sum().backward()
        else:
            with torch.no_grad():
                run()
        return time.process_time() - start

    whole, forward = [], []
    for turn in range(turns + 1):
        for backward, store in ((True, whole), (False, forward)):
            first, second = (plain, ours) if turn % 2 else (ours, plain)
            times = {first: seconds(first, backward), second: seconds(second, backward)}
            if turn:  # the first warms the memory up
                store.append(times[ours] / times[plain])
    return statistics.median(whole), statistics.median(forward)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer positions and turns, under a minute")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    nonfinite, spike, alarms = detection(recorded())
    ratio, forward = logps_ratio(POSITIONS // 16 if quick else POSITIONS, 3 if quick else 5)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        exact = rollback_is_exact(folder)
        cost = overhead(folder / "overhead", 10 if quick else 60)
        per_token, share = storage(folder / "storage")
        alarms += 0 if quick else healthy_alarms(folder / "healthy")
    print(
        f"detection: {nonfinite} step(s) for a non-finite norm, {spike} for a spike; {alarms} alarms in healthy steps"
    )
    print(f"rollback equals the run that left the batch out, bit for bit: {exact}")
    print(
        f"guard: {100 * cost:.2f} % of a step; support at top-k {TOP_K}: {per_token:.1f} bytes a token, {100 * share:.2f} % of a step"
    )
    print(f"support_logps over plain log-probs: {ratio:.3f} with backward, {forward:.3f} forward alone")
    figures = {
        "nonfinite_steps": nonfinite, "spike_steps": spike, "false_alarms": alarms, "rollback_exact": exact,
        "overhead": round(cost, 5), "support_bytes_per_token": round(per_token, 2), "support_share": round(share, 5),
        "support_logps_ratio": round(ratio, 4), "support_logps_forward_ratio": round(forward, 4),
    }  # fmt: skip
    bars = {
        "nonfinite_steps": NONFINITE_BAR, "spike_steps": SPIKE_BAR, "false_alarms": FALSE_ALARM_BAR, "rollback_exact": True,
        "overhead": OVERHEAD_BAR, "support_share": STORAGE_BAR, "support_logps_ratio": LOGPS_BAR,
    }  # fmt: skip
    ok = exact and all(figures[name] <= bar for name, bar in bars.items() if bar is not True)
    print(json.dumps({"name": "bench_guard", "figures": figures, "bars": bars, "ok": ok}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
