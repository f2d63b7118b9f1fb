"""What an Ares update costs beside other optimizers, on gradients shaped as the layers of Qwen3-0.6B and Qwen3-1.7B.

Seven matrices a layer, float32, two threads. AdamW is torch's foreach one, Muon torch.optim's, GaLore pytorch-optimizer's at the same
rank with a new projection each step, "full SVD" the same step from torch.linalg.svd. Optimizers take turns within a round; compared
is the median over rounds of the ratio within a round, in wall-clock seconds, or with --cpu_time in CPU seconds on one thread (for a
machine that is shared). Gradients drift from step to step as a warm start meets them: a fixed low-rank part and fresh noise, at the top-32
energy shares that the article behind ares.py shows (8 to 18 %).

Also: share of the optimal energy that the warm sketch captures, on recorded gradients of the tiny model's RL run; the step of that run with
Ares and with AdamW; bytes of state; cost against rank, fitted.

    python benchmarks/bench_ares.py [--quick] [--cpu_time | --device cuda]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes"), str(ROOT / "tests")]

import torch  # noqa: E402
from pytorch_optimizer import GaLore  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from ares import Ares  # noqa: E402

# Against AdamW: three products with rank_max + 8 columns and one with rank_max, 560 flops an element, on two cores. The other
# three: what Ares must beat by a wide margin to be worth having, as they do more arithmetic for an update of the same matrices.
BARS = {"adamw": 3.5, "muon": 0.25, "galore": 0.5, "full_svd": 0.05, "step": 1.15, "captured": 0.95}
LAYERS = {
    "0.6B": [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024), (1024, 3072)],
    "1.7B": [(2048, 2048), (1024, 2048), (1024, 2048), (2048, 2048), (6144, 2048), (6144, 2048), (2048, 6144)],
}
RANK = 64
GALORE = {"rank": RANK, "update_proj_gap": 1, "scale": 1.0, "projection_type": "std"}


class FullSVD(torch.optim.Optimizer):
    """Literal Ares at a fixed rank from full SVDs: what the article compares its update time with."""

    def __init__(self, params, rank):
        super().__init__(params, {})
        self.rank = rank

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            u, s, vh = torch.linalg.svd(p.grad, full_matrices=False)
            truncated = (u[:, : self.rank] * s[: self.rank]) @ vh[: self.rank]
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            state["m"].lerp_(truncated, 0.1)
            state["v"].mul_(0.999).addcmul_(truncated, truncated, value=0.001)
            p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-1e-6)


def gradients(shapes, device="cpu", seed=0):
    """A generator of lists: 13 % of the energy in 32 fixed directions, the rest fresh noise."""
    options = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    fixed = [(torch.randn(m, 32, **options), torch.randn(32, n, **options)) for m, n in shapes]
    while True:
        out = []
        for (m, n), (left, right) in zip(shapes, fixed, strict=True):
            noise = torch.randn(m, n, **options)
            low = left @ right
            out.append(1e-4 * (low * (0.13 / 0.87) ** 0.5 / low.square().mean().sqrt() + noise))
        yield out


def compare(shapes, rounds, optimizers, clock, device):
    """{name: constructor} -> {name: seconds of each round after the first two}, all on the same gradients."""
    torch.manual_seed(0)
    start = [0.02 * torch.randn(s, device=device) for s in shapes]
    sets = {name: [nn.Parameter(x.clone()) for x in start] for name in optimizers}
    made = {name: build(sets[name]) for name, build in optimizers.items()}
    seconds = {name: [] for name in optimizers}
    stream = gradients(shapes, device)
    for turn in range(rounds + 2):
        grads = next(stream)
        names = list(made) if turn % 2 else list(made)[::-1]
        for name in names:
            for p, g in zip(sets[name], grads, strict=True):
                p.grad = g
            began = clock()
            made[name].step()
            seconds[name].append(clock() - began)
    return {name: times[2:] for name, times in seconds.items()}, made


def synchronised():
    """Seconds, when the GPU has done all that it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


def ratio(seconds, a, b):
    values = [x / y for x, y in zip(seconds[a], seconds[b], strict=True)]
    spread = statistics.quantiles(values, n=4) if len(values) > 2 else [min(values), 0, max(values)]
    return statistics.median(values), spread[0], spread[2]


def state_bytes(optimizer):
    return sum(
        x.numel() * x.element_size()
        for s in optimizer.state.values()
        for x in s.values()
        if isinstance(x, torch.Tensor)
    )


def rank_cost(rounds, clock, device):
    """Seconds of one update of a (2048, 1024) matrix at rising ranks, and R^2 of a line through them."""
    ranks = [16, 32, 64, 128, 256]
    optimizers = {rank: lambda p, rank=rank: Ares(p, rank_max=rank) for rank in ranks}
    seconds, _ = compare([(2048, 1024)], rounds, optimizers, clock, device)
    times = [statistics.median(seconds[rank]) for rank in ranks]
    slope, offset = statistics.linear_regression(ranks, times)
    explained = statistics.correlation(ranks, times) ** 2
    return {"seconds_by_rank": dict(zip(map(str, ranks), (round(t, 5) for t in times), strict=True)),
            "slope_s": slope, "offset_s": offset, "r2": round(explained, 4)}  # fmt: skip


def rl_figures(rounds, steps, clock, **changes):
    """Captured energy of the warm sketch on the gradients of RL runs, and seconds of a whole step with Ares over AdamW's: runs of
    both in turn, as the machine may change meanwhile. The gradients are the tiny model's, the seconds those of one with hidden
    size 256 as recipes/cold_start.py builds it, untrained: how long a step takes does not depend on it."""
    from test_ares_dapo import MODEL, make  # the tests' trainer

    captured, ratios = [], []
    with tempfile.TemporaryDirectory() as larger:
        config = AutoConfig.from_pretrained(MODEL)
        config.update(
            {"hidden_size": 256, "intermediate_size": 682, "num_attention_heads": 8, "num_key_value_heads": 4}
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(larger)
        run_both(make, {"ares": [], "adamw": []}, captured, 3 * steps, clock, changes)
        for _ in range(rounds):
            spent = {"ares": [], "adamw": []}
            run_both(make, spent, [], steps, clock, changes | {"model": larger})
            middle = {method: statistics.median(times[2:]) for method, times in spent.items()}
            ratios.append(middle["ares"] / middle["adamw"])
    return min(captured), statistics.median(captured), statistics.median(ratios)


def run_both(make, spent, captured, steps, clock, changes):
    """One run with each optimizer: seconds of each step into `spent`, the share of energy of each sketch into `captured`."""
    with tempfile.TemporaryDirectory() as folder:
        trainers = {}
        for method in ("ares", "adamw"):
            trainers[method] = make(
                Path(folder) / method, optim_method=method, algorithm="grpo", max_steps=steps, max_completion_length=48,
                per_device_train_batch_size=32, **changes,
            )  # fmt: skip
        for method, trainer in trainers.items():
            step = trainer.training_step

            def timed(*args, step=step, method=method, **kwargs):
                began = clock()
                out = step(*args, **kwargs)
                spent[method].append(clock() - began)
                return out

            trainer.training_step = timed
        optimizer = trainers["ares"].create_optimizer()
        update = optimizer.step

        def measured(*args, **kwargs):
            began = clock()
            out = update(*args, **kwargs)
            spent["ares"][-1] += clock() - began
            for p in optimizer.param_groups[0]["params"]:
                basis = optimizer.state[p]["basis"]
                if optimizer.state[p]["step"] > 3 and p.grad.any():
                    best = torch.linalg.svdvals(p.grad)[: basis.shape[1]].square().sum()
                    captured.append(((p.grad @ basis).square().sum() / best).item())
            return out

        optimizer.step = measured
        plain = trainers["adamw"].create_optimizer()
        plain_update = plain.step

        def plain_measured(*args, **kwargs):
            began = clock()
            out = plain_update(*args, **kwargs)
            spent["adamw"][-1] += clock() - began
            return out

        plain.step = plain_measured
        for trainer in trainers.values():
            trainer.train()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="0.6B only, fewer rounds, under a minute")
    parser.add_argument(
        "--cpu_time", action="store_true", help="CPU seconds on one thread: for a machine with other work"
    )
    parser.add_argument("--device", default="cpu", help="cpu | cuda; wall-clock seconds there")
    args = parser.parse_args()
    device = args.device
    if args.cpu_time and device != "cpu":
        parser.error("--cpu_time counts the processor's seconds: remove --device")
    torch.set_num_threads(1 if args.cpu_time else 2)
    clock = time.process_time if args.cpu_time else time.perf_counter if device == "cpu" else synchronised
    figures, worst = {}, {}
    # always a whole layer: a few matrices would stay in the cache, which helps AdamW alone and is no layer of a model
    cases = {"0.6B": LAYERS["0.6B"]} if args.quick else LAYERS
    for name, shapes in cases.items():
        # slow baselines get fewer rounds and matrices: one of each kind
        fast, made = compare(
            shapes, 5 if args.quick else 15,
            {"adamw": lambda p: torch.optim.AdamW(p, lr=1e-6, foreach=True), "ares": lambda p: Ares(p, lr=1e-6, rank_max=RANK),
             "projected": lambda p: Ares(p, lr=1e-6, rank_max=RANK, step="projected")}, clock, device,
        )  # fmt: skip
        slow, _ = compare(
            shapes[1:2] if args.quick else shapes[:1], 2 if args.quick else 3,
            {"muon": lambda p: torch.optim.Muon(p, lr=1e-6), "ares": lambda p: Ares(p, lr=1e-6, rank_max=RANK),
             "galore": lambda p: GaLore([{"params": p, **GALORE}], lr=1e-6),
             "full_svd": lambda p: FullSVD(p, RANK)}, clock, device,
        )  # fmt: skip
        for other, seconds in (("adamw", fast), ("muon", slow), ("galore", slow), ("full_svd", slow)):
            middle, low, high = ratio(seconds, "ares", other)
            figures[f"{name}/ares_over_{other}"] = [round(x, 4) for x in (middle, low, high)]
            worst[other] = max(worst.get(other, 0.0), middle)
            print(f"{name}: Ares / {other}: {middle:.3f}   (quartiles {low:.3f} to {high:.3f})", flush=True)
        figures[f"{name}/projected_over_adamw"] = [round(x, 4) for x in ratio(fast, "projected", "adamw")]
        figures[f"{name}/ares_ms"] = round(1e3 * statistics.median(fast["ares"]), 2)
        figures[f"{name}/state_bytes_over_adamw"] = round(state_bytes(made["ares"]) / state_bytes(made["adamw"]), 4)
    figures["rank_cost"] = rank_cost(3 if args.quick else 9, clock, device)
    lowest, middle, step = rl_figures(*(1, 4) if args.quick else (3, 8), clock, use_cpu=device == "cpu")
    figures |= {
        "captured_min": round(lowest, 4),
        "captured_median": round(middle, 4),
        "training_step_over_adamw": round(step, 4),
    }
    print(json.dumps(figures, indent=1))
    ok = all(worst[other] <= BARS[other] for other in worst) and step <= BARS["step"] and middle >= BARS["captured"]
    print(json.dumps({"name": "bench_ares", "figures": figures, "bars": BARS, "ok": ok}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
