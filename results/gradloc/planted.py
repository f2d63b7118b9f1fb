"""Planted anomalies: does GradLoc find and name what was put there, on the way a user goes (watch, backward, check)?

Steps of 16 sequences in 4 micro-batches, sampled by tiny/qwen3 itself through an fp8 copy (so omega = pi_theta/mu is as
noisy as it is in a run), real rewards, loss -omega A logp averaged over the step's tokens. Every GradLoc has first checked
24 normal steps. Then one of:

    token      one token's mu is made so small that its gradient is 3 to 100 times the norm of the rest
    pair       two such tokens, in different micro-batches
    sequence   every token of one sequence drifts by 5 to 35 %, all in one direction; weight of a sequence = product of
               its omegas, so that the drift makes a spike of 3 to 100 times the rest
    layer      one layer's parameters are rescaled without changing the function (up_proj / c and down_proj * c, or norm
               / c and the projections behind it * c): omega and rho stay as they were, the layer's gradient explodes
    nan        NaN at one token, in turn: in its mu, in the output of one module, in its sequence's advantage
    nothing    a normal step, which must not be reported

"the rest" is the larger of the other tokens' gradient and a third of the trigger's threshold: less is no spike.
Methods: GradLoc's `directional` and `search`, and the published schedule as written in benchmarks/bench_gradloc.py
(localisation only: it names no cause and no layer). What takes many steps a trial, the published schedule and a search
for a token where a layer exploded, runs on every fourth trial.

    python results/gradloc/planted.py [--trials 100] [--quick]

Writes planted.jsonl (one line a trial and method) and planted.json (the rates) beside this file; --quick to runs/.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

import torch  # noqa: E402
from bench_gradloc import gradient_norm, logps_fn, pad, published, timed  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

from gradloc import GradLoc  # noqa: E402
from rlvr_common import group_advantages  # noqa: E402
from rollout import TransformersEngine  # noqa: E402
from tiny.tasks import is_right, make_rows  # noqa: E402

MODEL = str(REPO / "tiny" / "qwen3")
KINDS = ("token", "pair", "sequence", "layer", "nan", "nothing")
CAUSE = {"token": "A.1", "pair": "A.1", "sequence": "A.2", "layer": "B", "nan": "N"}
MICRO_BATCHES, ROWS, HISTORY, RARE = 4, 4, 24, 4
METHODS = {"directional": {"differentiation": "finite_difference"}, "search": {"method": "search"}}
BARS = {"found": 0.99, "classified": 0.95, "false_reports": 0}


def sample(model, tokenizer, prompts=96, generations=8, seed=0):
    """-> list of {prompt, completion, rollout_logps, advantage}, from groups in which some answers are right and some wrong."""
    rows = [row for row in make_rows("train", 4 * prompts, seed=seed) if len(row["problem"]) <= 32][:prompts]
    engine = TransformersEngine(model, tokenizer.eos_token_id, tokenizer.pad_token_id, "fp8", seed)
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["problem"]}], add_generation_prompt=True, return_dict=False
        )
        for row in rows
    ]
    rollout = engine.generate([p for p in ids for _ in range(generations)], 48)
    answers = [row["answer"] for row in rows for _ in range(generations)]
    texts = tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
    rewards = torch.tensor([float(is_right(text, a)) for text, a in zip(texts, answers, strict=True)])
    advantages = group_advantages(rewards, generations).tolist()
    fields = zip(rollout.prompt_ids, rollout.completion_ids, rollout.rollout_logps, advantages, strict=True)
    names = ("prompt", "completion", "rollout_logps", "advantage")
    return [dict(zip(names, values, strict=True)) for values in fields if values[3] != 0 and 8 <= len(values[1]) <= 32]


# --- the loss ---------------------------------------------------------------------------------------------------------


def token_losses(logps, batch):
    """-weight A logp. weight: omega of the token, or the product of its sequence's omegas; detached. (N, T)"""
    log_omega = torch.where(batch["completion_mask"].bool(), logps - batch["rollout_logps"], 0.0).detach()
    if batch["sequence_weight"]:
        log_omega = log_omega.sum(1, keepdim=True)
    return -log_omega.exp() * batch["advantages"].unsqueeze(1) * logps


def draw(pool, rng, tokenizer, sequence_weight):
    """A step's micro-batches from the pool."""
    batches = []
    chosen = rng.sample(pool, MICRO_BATCHES * ROWS)
    for i in range(0, len(chosen), ROWS):
        rows = chosen[i : i + ROWS]
        batch = pad([r["prompt"] for r in rows], [r["completion"] for r in rows], tokenizer.pad_token_id)
        batch["rollout_logps"] = torch.zeros(batch["completion_ids"].shape)
        for k, row in enumerate(rows):
            batch["rollout_logps"][k, : len(row["completion"])] = torch.tensor(row["rollout_logps"])
        batch["advantages"] = torch.tensor([r["advantage"] for r in rows])
        batch["sequence_weight"] = sequence_weight
        batches.append(batch)
    return batches


def run_step(model, batches, gradloc=None):
    """The user's step: -> number of tokens. Gradients are left in `.grad`."""
    model.zero_grad()
    tokens = sum(int(batch["completion_mask"].sum()) for batch in batches)
    for batch in batches:
        logps = logps_fn(model, batch) if gradloc is None else gradloc.watch(model, batch, logps_fn)
        loss = torch.where(batch["completion_mask"].bool(), token_losses(logps, batch), 0.0).sum() / tokens
        if gradloc is not None:
            gradloc.losses.append(loss.detach())
        loss.backward()
    return tokens


def norm_of(model, batches, index, select):
    """Norm of the gradient of the selected tokens of one micro-batch, in the step's loss."""
    tokens = sum(int(batch["completion_mask"].sum()) for batch in batches)
    model.zero_grad()
    losses = token_losses(logps_fn(model, batches[index]), batches[index])
    (torch.where(select, losses, 0.0).sum() / tokens).backward()
    return gradient_norm(model)


# --- planting ---------------------------------------------------------------------------------------------------------


def strength(rng):
    return math.exp(rng.uniform(math.log(3), math.log(100)))


def plant_token(model, batches, index, rng, rest, factor):
    """Lower mu of one token until its gradient is factor * rest. -> (micro-batch, row, column)

    A token whose probability is almost 1 has almost no gradient at any omega: those below 1 % of the rest at omega = 1
    are not drawn.
    """
    batch = batches[index]
    mask = batch["completion_mask"].bool()
    with torch.no_grad():
        logps = logps_fn(model, batch)
    while True:
        row, column = rng.choice(mask.nonzero().tolist())
        select = torch.zeros_like(mask)
        select[row, column] = True
        batch["rollout_logps"][row, column] = logps[row, column]  # omega = 1
        unit = norm_of(model, batches, index, select)
        if unit > 0.01 * rest:
            batch["rollout_logps"][row, column] -= math.log(factor * rest / unit)
            return index, row, column


def plant_sequence(model, batches, index, rng, rest, factor):
    """Drift all of one sequence's omegas, each below its band's limit, until the sequence's gradient is factor * rest."""
    batch = batches[index]
    mask = batch["completion_mask"].bool()
    with torch.no_grad():
        logps = logps_fn(model, batch)
    while True:
        row = rng.randrange(ROWS)
        kept = batch["rollout_logps"][row].clone()
        batch["rollout_logps"][row] = logps[row]
        select = torch.zeros_like(mask)
        select[row] = mask[row]
        drift = math.log(factor * rest / norm_of(model, batches, index, select))  # the sum over the sequence
        length = int(mask[row].sum())
        if 0.05 * length < drift < 0.3 * length:
            uneven = torch.tensor([rng.uniform(0.5, 1.5) for _ in range(length)])
            batch["rollout_logps"][row, :length] -= drift * uneven / uneven.sum()
            return index, row
        batch["rollout_logps"][row] = kept
        factor = max(3.0, factor * rng.uniform(0.5, 1.2))


def plant_layer(model, rng, batches, rest, factor):
    """Rescale one layer so that the same function has factor times the gradient. -> (its number, undo)"""
    number = rng.randrange(len(model.model.layers))
    layer = model.model.layers[number]
    where = rng.choice(("up_proj", "input_layernorm", "post_attention_layernorm"))
    if where == "up_proj":
        small, large = [layer.mlp.up_proj.weight], [layer.mlp.down_proj.weight]
    elif where == "input_layernorm":
        small = [layer.input_layernorm.weight]
        large = [getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]
    else:
        small = [layer.post_attention_layernorm.weight]
        large = [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]
    run_step(model, batches)
    own = math.sqrt(sum(float(p.grad.square().sum()) for p in small))  # grows by c as the weights shrink by c
    c = factor * rest / own
    saved = [(p, p.detach().clone()) for p in small + large]

    def undo():
        with torch.no_grad():
            for p, value in saved:
                p.copy_(value)

    with torch.no_grad():
        for p in small:
            p.div_(c)
        for p in large:
            p.mul_(c)
    return number, where, undo


def plant_nan(model, batches, index, rng, trial):
    """-> (place (micro-batch, row, column), what the report must name, undo)"""
    batch = batches[index]
    row = rng.randrange(ROWS)
    length = int(batch["completion_mask"][row].sum())
    column = rng.randrange(length)
    if trial % 3 == 0:
        batch["rollout_logps"][row, column] = math.nan
        return (index, row, column), {"tensor": "rollout_logps"}, lambda: None
    if trial % 3 == 1:
        batch["advantages"][row] = math.nan
        return (index, row, 0), {"tensor": "advantages"}, lambda: None
    number, part = rng.randrange(len(model.model.layers)), rng.choice(("mlp.down_proj", "self_attn.o_proj", "mlp"))
    name = f"model.layers.{number}.{part}"
    position = batch["input_ids"].shape[1] - batch["completion_ids"].shape[1] + column - 1  # it predicts that token
    own, seen = batch["input_ids"][row], {}

    def before(module, args, kwargs):
        seen["ids"] = kwargs["input_ids"]

    def after(module, args, output):
        hit = [i for i, ids in enumerate(seen["ids"]) if ids.equal(own)]
        if not hit:
            return output
        output = output.clone()
        output[hit, position] = math.nan
        return output

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.get_submodule(name).register_forward_hook(after),
    ]

    def undo():
        for handle in handles:
            handle.remove()

    return (index, row, column), {"module": name}, undo


def plant(kind, model, batches, rng, trial, threshold):
    """Change the batches (or the model) in place. -> (truth, undo)"""
    run_step(model, batches)
    rest = max(gradient_norm(model), threshold / 3)
    index = rng.randrange(MICRO_BATCHES)
    if kind == "token":
        return {"tokens": [plant_token(model, batches, index, rng, rest, strength(rng))]}, lambda: None
    if kind == "pair":
        other = rng.choice([m for m in range(MICRO_BATCHES) if m != index])
        factor = strength(rng)
        second = factor * rng.uniform(0.5, 1.0)  # at least half as strong, so that both belong to the spike
        tokens = [plant_token(model, batches, m, rng, rest, f) for m, f in ((index, factor), (other, second))]
        return {"tokens": tokens}, lambda: None
    if kind == "sequence":
        return {"sequence": plant_sequence(model, batches, index, rng, rest, strength(rng))}, lambda: None
    if kind == "layer":
        number, where, undo = plant_layer(model, rng, batches, rest, strength(rng))
        return {"layer": number, "where": where}, undo
    if kind == "nan":
        place, names, undo = plant_nan(model, batches, index, rng, trial)
        return {"tokens": [place], **names}, undo
    return {}, lambda: None


# --- judging ----------------------------------------------------------------------------------------------------------


def judge(kind, truth, report):
    """-> (found?, classified?) of GradLoc's report; for "nothing", found means that nothing was reported."""
    if kind == "nothing":
        return report is None, True
    if report is None:
        return False, False
    top = [(t.micro_batch, t.sequence, t.position) for t in report.tokens]
    if kind == "sequence":
        found = top[:1] != [] and top[0][:2] == tuple(truth["sequence"])
    elif kind == "layer":
        ratios = {name: layer["ratio"] for name, layer in report.layers.items()}
        found = max(ratios, key=ratios.get) == f"layer {truth['layer']}"
    else:
        found = set(top[: len(truth["tokens"])]) == set(map(tuple, truth["tokens"]))
    if kind == "nan":
        offender = report.offender or {}
        found = found and all(offender[key] == truth[key] for key in ("module", "tensor") if key in truth)
    return found, report.cause == CAUSE[kind]


def spread(report):
    """How far the layer furthest from its own history is beyond the median layer: 1 when all layers move together."""
    ratios = [layer["ratio"] for layer in report.layers.values() if layer["ratio"]] if report else []
    return max(ratios) / statistics.median(ratios) if ratios else None


def judge_published(kind, truth, leaves):
    top = [(m, row, column) for _, m, _, row, column in leaves]
    if kind == "nothing":
        return not leaves
    if kind == "sequence":
        return top[:1] != [] and top[0][:2] == tuple(truth["sequence"])
    return set(top[: len(truth["tokens"])]) == set(map(tuple, truth["tokens"]))


class Study:
    def __init__(self, seed=0):
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.pool = sample(self.model, self.tokenizer, seed=seed)
        self.histories = {weight: self._normal_steps(weight) for weight in (False, True)}

    def _normal_steps(self, sequence_weight):
        """State of a GradLoc after normal steps; which method it has does not matter to it."""
        rng, gradloc = random.Random(f"history {sequence_weight}"), GradLoc(quiet=True)
        norms = deque()
        for _ in range(HISTORY):
            run_step(self.model, draw(self.pool, rng, self.tokenizer, sequence_weight), gradloc)
            if gradloc.check(self.model) is not None:
                raise RuntimeError(f"a normal step of the history was reported: {gradloc.last.sentence}")
            norms.append(gradient_norm(self.model))
        print(f"usual norms, {'sequence' if sequence_weight else 'token'} weights: median {statistics.median(norms):.3g}, "
              f"{min(norms):.3g} to {max(norms):.3g}; threshold {gradloc.trigger.threshold():.3g}", flush=True)  # fmt: skip
        return gradloc.state_dict()

    def trial(self, kind, trial):
        """-> one record a method"""
        rng = random.Random(f"{kind} {trial}")
        history = self.histories[kind == "sequence"]
        batches = draw(self.pool, rng, self.tokenizer, kind == "sequence")
        probe = GradLoc(quiet=True)
        probe.load_state_dict(history)
        threshold = probe.trigger.threshold()
        truth, undo = plant(kind, self.model, batches, rng, trial, threshold)
        records = []
        try:
            for method, options in METHODS.items():
                if kind == "layer" and method == "search" and trial % RARE:
                    continue
                gradloc = GradLoc(quiet=True, tokenizer=self.tokenizer, **options)
                gradloc.load_state_dict(json.loads(json.dumps(history)))
                step, _ = timed(lambda: run_step(self.model, batches, gradloc))  # noqa: B023
                seconds, report = timed(lambda: gradloc.check(self.model))  # noqa: B023
                found, classified = judge(kind, truth, report)
                records.append({
                    "kind": kind, "trial": trial, "method": method, "found": found, "classified": classified,
                    "cause": report and report.cause, "certificate": report and report.certificate,
                    "used": report and report.method, "top1_share": report and round(report.top1_share, 4),
                    "grad_norm": report and report.grad_norm, "times_threshold": report and report.grad_norm / threshold,
                    "probes": report.search["probes"] if report and report.search else None,
                    "layer_spread": spread(report), "steps": seconds / step, "truth": truth, "sentence": report and report.sentence,
                    "evidence": report and report.evidence,
                })  # fmt: skip
            if kind != "layer" and trial % RARE == 0:  # the published schedule names no layer
                tokens = run_step(self.model, batches)
                tau = threshold * math.sqrt(tokens)
                parts = [[batch] for batch in batches]
                seconds, (leaves, passes) = timed(lambda: published(self.model, parts, logps_fn, token_losses, tau))
                records.append({
                    "kind": kind, "trial": trial, "method": "published", "found": judge_published(kind, truth, leaves),
                    "classified": None, "probes": passes, "steps": seconds / step, "leaves": len(leaves),
                    "truth": truth,
                })  # fmt: skip
        finally:
            undo()
        return records


def rates(records):
    """{kind: {method: {...}}}"""
    table = {}
    for kind in KINDS:
        for method in (*METHODS, "published"):
            rows = [r for r in records if r["kind"] == kind and r["method"] == method]
            if rows:
                certificates = [r["certificate"] for r in rows if r.get("certificate") is not None]
                probes = [r["probes"] for r in rows if r["probes"] is not None]
                table.setdefault(kind, {})[method] = {
                    "trials": len(rows), "found": sum(r["found"] for r in rows) / len(rows),
                    "classified": None if method == "published" or kind == "nothing"
                    else sum(r["classified"] for r in rows) / len(rows),
                    "largest_certificate": max(certificates, default=None),
                    "median_certificate": statistics.median(certificates) if certificates else None,
                    "median_probes": statistics.median(probes) if probes else None,
                    "median_steps": statistics.median(r["steps"] for r in rows),
                }  # fmt: skip
    return table


def compact(record):
    """For the file: 4 digits, nothing that is None, and words only where something went wrong or as an example."""
    right = record["found"] and record["classified"] is not False and record["trial"] >= 3
    short = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in record.items() if v is not None}
    return {k: v for k, v in short.items() if not (right and k in ("sentence", "evidence"))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="5 trials of each kind, written to runs/, not here")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    trials = 5 if args.quick else args.trials
    whole = not args.quick and set(args.kinds) == set(KINDS)
    out = Path(__file__).parent if whole else REPO / "runs" / "quick" / "gradloc"
    out.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    study, records, start = Study(), [], time.monotonic()
    for kind in args.kinds:
        for trial in range(trials):
            records += study.trial(kind, trial)
        for method, row in rates(records)[kind].items():
            shown = "" if row["classified"] is None else f", classified {row['classified']:.0%}"
            shown += (
                "" if row["largest_certificate"] is None else f", certificate at most {row['largest_certificate']:.1e}"
            )
            shown += "" if row["median_probes"] is None else f", {row['median_probes']:.0f} probes"
            print(f"{kind:9} {method:12} found {row['found']:.0%}{shown}, {row['median_steps']:.2f} steps", flush=True)
    table = rates(records)
    ok = all(
        row["found"] >= (1.0 if kind == "nothing" else BARS["found"])
        and (row["classified"] is None or row["classified"] >= BARS["classified"])
        for kind, methods in table.items()
        for method, row in methods.items()
        if method == "directional"
    )
    with (out / "planted.jsonl").open("w") as file:
        file.writelines(json.dumps(compact(record)) + "\n" for record in records)
    result = {"name": "planted", "trials": trials, "rates": table, "bars": BARS, "ok": ok}
    (out / "planted.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.monotonic() - start:.0f} s, written to {out}")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
