"""What naming the token behind a gradient spike costs, in forward+backward steps over the batch that spiked.

Two batches with one token of huge omega: (a) 64 sequences of arithmetic on tiny/qwen3, (b) 8 x 512 tokens on a random
4-layer 512-wide Qwen3; both again with four times the tokens. Compared, interleaved, medians:

    step          one forward and backward over the batch: the unit
    directional   what a trainer uses: GradLoc.check by finite differences, exact confirmation of 4 tokens and report
                  object included
    forward_mode  the same with one forward-mode pass, what a plain loop uses
    search        GradLoc.check by bisection with the sibling taken from the parent
    published     the schedule of the GradLoc blog and patch, written here from their description: every micro-batch
                  once, then ranks and tokens by bisection with two probes a split, each a forward and backward over
                  the whole micro-batch with the loss mask cut to the segment, depth first with backtracking, budget
                  128; at the end the gradient is rebuilt by running the step again. `published_m1`: the batch is one
                  micro-batch, as in the shipped script.

The dormant overhead is what GradLoc.watch and GradLoc.check take on a step without a spike, timed by themselves.

    python benchmarks/bench_gradloc.py [--quick]
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

from gradloc import GradLoc  # noqa: E402
from tiny.tasks import make_rows  # noqa: E402

MODEL = str(REPO / "tiny" / "qwen3")
BARS = {  # each an upper limit
    # at most one step on top of the step that spiked; with 8 long sequences 4 confirmed ones are up to half the batch
    "directional_tiny": 1.0,
    "directional_wide": 1.3,
    "dormant_percent_tiny": 1.0,  # a tool that is always on may not be felt
    "dormant_percent_wide": 1.0,
    "missed": 0,  # every method finds the planted token
}
TRIGGER = 3.0  # a spike is this many times the usual norm


# --- the published schedule -------------------------------------------------------------------------------------------


def gradient_norm(model):
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    return math.sqrt(float(torch.stack(squares).sum()))


def published(model, micro_batches, logps_fn, token_losses, tau, budget=128):
    """Localise by the published schedule. -> (leaves [(norm, micro-batch, rank, row, column)], passes of one rank).

    micro_batches  [[batch of rank 0, batch of rank 1, ...], ...]: M micro-batches for each of W ranks. All ranks run every
                   pass (idle ones with the loss times 0), here one after the other; the step does too, so that
                   cost / step is that of W machines at work together.
    token_losses   (logps, batch) -> (N, T) loss of each token, not averaged
    tau            threshold on one token's gradient norm; a mean over n tokens may reach tau/sqrt(n)
    The blog's thresholds for a probe that averages over its own tokens. The patch's other scale (1/gradient
    accumulation, wrong for M > 1) and its crash where nothing is found are left out: they are not the schedule.
    """
    passes = [0]
    masks = [[batch["completion_mask"].bool() for batch in ranks] for ranks in micro_batches]
    world = len(micro_batches[0])
    total = sum(int(mask.sum()) for ranks in masks for mask in ranks)

    def run(m, select, count):
        """Add the gradient of the mean loss over `select` (one mask a rank, None = idle) of micro-batch m."""
        passes[0] += 1
        for batch, keep in zip(micro_batches[m], select, strict=True):
            losses = token_losses(logps_fn(model, batch), batch)
            loss = losses.sum() * 0 if keep is None else torch.where(keep, losses, 0.0).sum() / count
            loss.backward()

    def probe(m, select):
        model.zero_grad()
        count = sum(int(keep.sum()) for keep in select if keep is not None)
        run(m, select, count)
        return gradient_norm(model), tau / math.sqrt(count)

    if not gradient_norm(model) > tau / math.sqrt(total):  # False for NaN: the schedule never sees one
        return [], 0
    leaves = []
    norms = [probe(m, masks[m]) for m in range(len(micro_batches))]
    best = max(range(len(norms)), key=lambda m: norms[m][0])
    low, high = 0, world
    found = norms[best][0] > norms[best][1]
    while found and high - low > 1:
        middle = (low + high) // 2
        sides = []
        for a, b in ((low, middle), (middle, high)):
            active = [masks[best][r] if a <= r < b else None for r in range(world)]
            sides.append((*probe(best, active), a, b))
        norm, threshold, low, high = max(sides)
        found = norm > threshold
    if found:
        tokens = masks[best][low].nonzero().tolist()  # all sequences of the micro-batch, row by row
        stack, probes = [(0.0, 0, len(tokens))], 0
        while stack and probes + 2 <= budget:
            norm, a, b = stack.pop()
            if b - a == 1:
                leaves.append((norm, best, low, *tokens[a]))
                continue
            children = []
            for left, right in ((a, (a + b) // 2), ((a + b) // 2, b)):
                keep = torch.zeros_like(masks[best][low])
                for row, column in tokens[left:right]:
                    keep[row, column] = True
                norm, threshold = probe(best, [keep if r == low else None for r in range(world)])
                probes += 1
                if norm > threshold:
                    children.append((norm, left, right))
            stack += sorted(children)
        leaves += [(norm, best, low, *tokens[a]) for norm, a, b in stack if b - a == 1]
    model.zero_grad()
    for m, select in enumerate(masks):  # the gradient of the step was thrown away by the first probe
        run(m, select, total)
    return sorted(leaves, reverse=True), passes[0]


# --- the work ---------------------------------------------------------------------------------------------------------


def logps_fn(model, batch):
    ids, width = batch["completion_ids"], batch["completion_ids"].shape[1]
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], logits_to_keep=width + 1
    ).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)


def token_losses(logps, batch):
    """-omega A logp, omega = pi_theta/mu detached. (N, T)"""
    omega = (logps - batch["rollout_logps"]).detach().exp()
    return -omega * batch["advantages"].unsqueeze(1) * logps


def pad(prompts, completions, fill):
    """Prompts end, completions start, in the same column."""
    n, left, right = len(prompts), max(map(len, prompts)), max(map(len, completions))
    batch = {
        "input_ids": torch.full((n, left + right), fill), "attention_mask": torch.zeros(n, left + right, dtype=torch.long),
        "completion_ids": torch.full((n, right), fill), "completion_mask": torch.zeros(n, right, dtype=torch.long),
    }  # fmt: skip
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        span = slice(left - len(prompt), left + len(completion))
        batch["input_ids"][i, span] = torch.tensor(prompt + completion)
        batch["attention_mask"][i, span] = 1
        batch["completion_ids"][i, : len(completion)] = torch.tensor(completion)
        batch["completion_mask"][i, : len(completion)] = 1
    return batch


def rows_of(batch, start, stop):
    return {name: value[start:stop] for name, value in batch.items()}


class Work:
    """A model and a batch in which one token was given so small a rollout probability that it makes the gradient."""

    def __init__(self, model, prompts, completions, fill, seed=0):
        self.model = model
        generator = torch.Generator().manual_seed(seed)
        batch = pad(prompts, completions, fill)
        mask = batch["completion_mask"].bool()
        with torch.no_grad():
            logps = torch.cat([logps_fn(model, rows_of(batch, i, i + 16)) for i in range(0, len(mask), 16)])
        batch["rollout_logps"] = logps + 0.02 * torch.randn(logps.shape, generator=generator)
        batch["advantages"] = torch.randn(len(mask), generator=generator).sign() / 2
        self.normal, self.tokens = batch, int(mask.sum())
        self.step(self.normal)
        self.usual = gradient_norm(model)
        likely = (mask & (logps < -1)).nonzero()
        self.planted = likely[int(torch.randint(len(likely), (), generator=generator))].tolist()
        self.spiked = batch | {"rollout_logps": batch["rollout_logps"].clone()}
        strength = 10.0
        while True:  # a token's gradient follows its omega: find the one that makes 10 to 30 times the usual norm
            row, column = self.planted
            self.spiked["rollout_logps"][row, column] = logps[row, column] - math.log(strength)
            self.step(self.spiked)
            if gradient_norm(model) > 10 * self.usual:
                break
            strength *= 3

    def loss(self, logps, batch):
        return (token_losses(logps, batch) * batch["completion_mask"]).sum() / self.tokens

    def step(self, batch, gradloc=None):
        self.model.zero_grad()
        logps = logps_fn(self.model, batch) if gradloc is None else gradloc.watch(self.model, batch, logps_fn)
        self.loss(logps, batch).backward()

    def gradloc(self, **options):
        """One that has seen enough usual norms to know a spike."""
        gradloc = GradLoc(quiet=True, **options)
        gradloc.trigger.norms.extend([self.usual] * gradloc.trigger.warmup)
        return gradloc

    def localise(self, **options):
        """-> (seconds of the check, found?, its report)"""
        gradloc = self.gradloc(**options)
        self.step(self.spiked, gradloc)
        seconds, report = timed(lambda: gradloc.check(self.model))
        top = report.tokens[0]
        return seconds, [top.sequence, top.position] == self.planted, report

    def published(self, parts):
        size = len(self.spiked["input_ids"]) // parts
        micro_batches = [[rows_of(self.spiked, i * size, (i + 1) * size)] for i in range(parts)]
        tau = TRIGGER * self.usual * math.sqrt(self.tokens)
        self.step(self.spiked)
        seconds, (leaves, passes) = timed(lambda: published(self.model, micro_batches, logps_fn, token_losses, tau))
        found = bool(leaves) and [leaves[0][1] * size + leaves[0][3], leaves[0][4]] == self.planted
        return seconds, found, passes

    def dormant(self, repeats):
        """Median seconds that watching and checking add to a step without a spike."""
        gradloc, seconds = self.gradloc(), []
        inner = [0.0]

        def inside(model, batch):
            inner[0], logps = timed(lambda: logps_fn(model, batch))
            return logps

        for _ in range(repeats):
            self.model.zero_grad()
            watch, logps = timed(lambda: gradloc.watch(self.model, self.normal, inside))
            call = gradloc.calls[-1]
            self.loss(logps, self.normal).backward()
            weight = call.weights.pop("logps")
            hook, _ = timed(lambda: call._arrived("logps", weight))  # noqa: B023
            check, report = timed(lambda: gradloc.check(self.model))
            if report is not None:
                raise RuntimeError(f"a step without a spike was reported: {report.sentence}")
            seconds.append(watch - inner[0] + hook + check)
        return statistics.median(seconds)


def timed(function):
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def tiny_work(sequences):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompts, completions = [], []
    for row in make_rows("train", 20 * sequences, levels=(2, 3), kinds=("sum", "mixed", "word", "equation")):
        completion = tokenizer(row["rationale"]).input_ids + [tokenizer.eos_token_id]
        if 20 <= len(completion) <= 48:
            message = [{"role": "user", "content": row["problem"]}]
            prompts.append(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
            completions.append(completion)
    return Work(model, prompts[:sequences], completions[:sequences], tokenizer.pad_token_id)


def wide_work(sequences, length):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
        )
    )  # fmt: skip
    ids = torch.randint(1, 4096, (sequences, 8 + length), generator=generator).tolist()
    return Work(model, [row[:8] for row in ids], [row[8:] for row in ids], 0)


METHODS = {
    "directional": {"differentiation": "finite_difference"},
    "forward_mode": {"differentiation": "jvp"},
    "search": {"method": "search"},
}


def measure(name, work, methods, rounds, parts, slow_rounds):
    """Cost of the methods in steps, interleaved. parts: numbers of micro-batches for the published schedule."""
    seconds, passes, missed = {"step": []}, {}, 0
    work.localise(**METHODS["directional"])  # warms caches and threads
    for turn in range(rounds):
        seconds["step"].append(timed(lambda: work.step(work.spiked))[0])
        for method in methods:
            took, found, report = work.localise(**METHODS[method])
            seconds.setdefault(method, []).append(took)
            missed += not found
            if report.search is not None:
                passes[method] = report.search["probes"]
        for m in parts if turn < slow_rounds else ():
            label = "published_m1" if m == 1 else "published"
            took, found, passes[label] = work.published(m)
            seconds.setdefault(label, []).append(took)
            missed += not found
    unit = statistics.median(seconds["step"])
    ratios = {method: statistics.median(values) / unit for method, values in seconds.items() if method != "step"}
    print(f"{name}: {work.tokens} tokens, a step takes {unit:.3f} s; cost in steps, median [least, most] of its turns")
    for method, values in seconds.items():
        if method != "step":
            note = f", {passes[method]} probes" if method in passes else ""
            spread = f"[{min(values) / unit:.2f}, {max(values) / unit:.2f}] of {len(values)}"
            print(f"    {method:13} {ratios[method]:7.2f}   {spread}{note}", flush=True)
    return unit, ratios, missed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="(b) with half the tokens and the bar's method alone, no growth; under a minute",
    )
    quick = parser.parse_args().quick
    logging.disable_progress_bar()
    figures, missed = {}, 0
    # name, work, methods, rounds, micro-batches of the published schedule, rounds in which that runs
    if quick:
        plan = [
            ("tiny", lambda: tiny_work(64), METHODS, 3, (4,), 1),
            ("wide", lambda: wide_work(8, 256), ("directional",), 2, (), 0),
        ]
    else:
        plan = [
            ("tiny", lambda: tiny_work(64), METHODS, 9, (1, 4), 3),
            ("tiny_4x", lambda: tiny_work(256), METHODS, 3, (1, 4), 1),
            ("wide", lambda: wide_work(8, 512), METHODS, 5, (4,), 1),
            ("wide_4x", lambda: wide_work(16, 1024), METHODS, 1, (16,), 1),
        ]
    for name, make, methods, rounds, parts, slow_rounds in plan:
        work = make()
        unit, ratios, lost = measure(name, work, methods, rounds, parts, slow_rounds)
        missed += lost
        figures[f"step_s_{name}"] = round(unit, 4)
        figures |= {f"{method}_{name}": round(ratio, 3) for method, ratio in ratios.items()}
        if not name.endswith("4x"):
            percent = 100 * work.dormant(5 if name == "wide" else 15) / unit
            figures[f"dormant_percent_{name}"] = round(percent, 3)
            print(f"    watch + check without a spike: {percent:.2f} % of a step", flush=True)
    for name in ("tiny", "wide"):
        for method in [*METHODS, "published", "published_m1"]:
            if f"{method}_{name}_4x" in figures and f"{method}_{name}" in figures:
                grown = figures[f"{method}_{name}_4x"] / figures[f"{method}_{name}"]
                figures[f"growth_{method}_{name}"] = round(grown, 2)
    figures["missed"] = missed
    ok = all(figures[name] <= bar for name, bar in BARS.items())
    print(json.dumps({"name": "bench_gradloc", "figures": figures, "bars": BARS, "ok": ok}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
