"""A training step of recipes/grpo_tokenclip.py against a step of stock TRL GRPOTrainer, on the same tiny work.

Both train tiny/qwen3 on the same rows with the same batch, lengths and reward, one process, float32. Ours also records
the log-prob of every sampled token in another engine (fp8 copy of the weights) and applies TokenClip; stock TRL samples with
`model.generate` and records nothing. The two take turns, a block of steps each; compared are medians of step times.

    python benchmarks/bench_step.py [--quick] [--device cuda]        (on a GPU: both in bfloat16)
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "recipes")]

import torch  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402
from transformers.trainer_callback import PrinterCallback, ProgressCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from grpo_tokenclip import GRPOTokenClipConfig, GRPOTokenClipTrainer  # noqa: E402
from rlvr_common import load_math_rows  # noqa: E402
from verifier import MathVerifier  # noqa: E402

BAR = 1.05  # recording rollout log-probs and clipping must not cost a user more than 5 % of a step
MODEL = str(REPO / "tiny" / "qwen3")


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step, sampling and reward included."""

    def __init__(self):
        self.seconds, self.started = [], 0.0

    def on_step_end(self, args, state, control, **kwargs):
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.started)
        self.started = now

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()


def shared_options(folder, steps, device):
    return {
        "use_cpu": device == "cpu",
        "bf16": device != "cpu",
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 48,
        "learning_rate": 1e-6,  # the policy stays what it is: every block of steps does the same work
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 0,
    }


def block(kind, rows, tokenizer, verifier, steps, device):
    """Train `steps` steps from the same weights -> (median seconds of a step, mean completion length)."""
    with tempfile.TemporaryDirectory() as folder:
        options, times = shared_options(folder, steps, device), StepTimes()
        if kind == "ours":
            args = GRPOTokenClipConfig(**options, rollout_dtype="fp8", token_clip="icepop")
            trainer = GRPOTokenClipTrainer(MODEL, args, verifier, rows, processing_class=tokenizer, callbacks=[times])
        else:
            args = GRPOConfig(**options, scale_rewards="none", loss_type="grpo")
            trainer = GRPOTrainer(MODEL, verifier, args, rows, processing_class=tokenizer, callbacks=[times])
        for noisy in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(noisy)
        trainer.train()
        lengths = [r["completions/mean_length"] for r in trainer.state.log_history if "completions/mean_length" in r]
    return times.seconds[2:], statistics.mean(lengths)  # the first two steps warm caches and threads


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer blocks, under a minute")
    parser.add_argument("--device", default="cpu", help="cpu | cuda")
    args = parser.parse_args()
    quick, device = args.quick, args.device
    rounds, steps = (2, 12) if quick else (5, 22)
    rows = load_math_rows("tiny", limit=512, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    times, lengths = {"ours": [], "stock": []}, {"ours": [], "stock": []}
    with MathVerifier(workers=2, exact=True) as verifier:
        for turn in range(rounds):
            for kind in ("ours", "stock") if turn % 2 else ("stock", "ours"):
                seconds, length = block(kind, rows, tokenizer, verifier, steps, device)
                times[kind] += seconds
                lengths[kind].append(length)
                print(
                    f"round {turn + 1}/{rounds} {kind:>5}: {statistics.median(seconds):.3f} s a step, {length:.1f} tokens",
                    flush=True,
                )
    medians = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    ratio = medians["ours"] / medians["stock"]
    figures = {
        "ratio": round(ratio, 3),
        "ours_s": round(medians["ours"], 4),
        "stock_s": round(medians["stock"], 4),
        "ours_length": round(statistics.mean(lengths["ours"]), 1),
        "stock_length": round(statistics.mean(lengths["stock"]), 1),
        "steps_each": len(times["ours"]),
    }
    print(json.dumps({"name": "bench_step", "figures": figures, "bars": {"ratio": BAR}, "ok": ratio <= BAR}))
    sys.exit(0 if ratio <= BAR else 1)


if __name__ == "__main__":
    main()
