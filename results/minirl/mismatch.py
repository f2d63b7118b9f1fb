r"""What routing replay does to mismatch and staleness: the same samples, scored under native routing, R2 and R3.

For each precision of the sampling copy: 128 training problems x 8 samples of the tiny MoE, scored by the training engine in
float32 (and, for fp8, under bfloat16 autocast). Then 7 updates with MiniRL's loss on 7 mini-batches of that sampling, as the last
of N = 8 updates would find the weights, and one more look at the same samples.

    mismatch    pi_old / mu        before the updates: R2 replays what the training engine chose, so it changes nothing here
    staleness   pi_theta / pi_old  after them, both under the routing that the column names
    weight      pi_theta / mu      after them

Of each ratio x: k3 = mean(x - 1 - log x), mean |log x|, and F(2) = share of tokens with max(x, 1/x) > 2 (R3, arXiv:2510.11370).
The dense tiny model is the reference.

    python results/minirl/mismatch.py [--seeds 0 1 2] [--quick]

Writes mismatch.json and mismatch.md beside this file; --quick to runs/.
"""

import argparse
import json
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from rlvr_common import aggregate, group_advantages, k3, minirl_loss  # noqa: E402
from rlvr_launch import find_model  # noqa: E402
from rollout import TransformersEngine  # noqa: E402
from routing import place_routes, record_routing, replay_routing, routing_agreement  # noqa: E402
from tiny.tasks import is_right, make_rows  # noqa: E402

PRECISIONS = ("float32", "bfloat16", "int8", "fp8", "int4")
GROUP, MAX_NEW, UPDATES, LEARNING_RATE = 8, 48, 7, 1e-4


def sample(model, tokenizer, rollout_dtype, prompts, seed):
    """`prompts` problems x GROUP samples -> dict of padded tensors (N, S), with log mu at the completion tokens and rewards."""
    rows = make_rows("train", prompts, seed=seed)
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["problem"]}], add_generation_prompt=True, return_dict=False
        )
        for row in rows
        for _ in range(GROUP)
    ]
    moe = hasattr(model.config, "num_experts")
    engine = TransformersEngine(
        model, model.generation_config.eos_token_id, tokenizer.pad_token_id, rollout_dtype, seed, record_routes=moe
    )
    out = engine.generate(ids, MAX_NEW)
    width = max(len(p) + len(c) for p, c in zip(ids, out.completion_ids, strict=True))
    shape = (len(ids), width)
    tokens, attention = torch.full(shape, tokenizer.pad_token_id), torch.zeros(shape, dtype=torch.long)
    mask, logps = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
    for i, (prompt, completion) in enumerate(zip(ids, out.completion_ids, strict=True)):
        end = len(prompt) + len(completion)
        tokens[i, :end] = torch.tensor(prompt + completion)
        attention[i, :end] = 1
        mask[i, len(prompt) : end] = True
        logps[i, len(prompt) : end] = torch.tensor(out.rollout_logps[i])
    texts = tokenizer.batch_decode(out.completion_ids, skip_special_tokens=True)
    answers = [row["answer"] for row in rows for _ in range(GROUP)]
    rewards = torch.tensor([float(is_right(text, answer)) for text, answer in zip(texts, answers, strict=True)])
    return {
        "tokens": tokens,
        "attention": attention,
        "mask": mask[:, 1:],
        "rollout_logps": logps[:, 1:],
        "advantages": group_advantages(rewards, GROUP).unsqueeze(1),
        "routes": place_routes(out.routes, attention) if moe else None,
    }


def score(model, batch, routes=None, rows=slice(None), autocast=False):
    """-> (log-probs (N, S-1) of the tokens that follow, the routing that the model would choose by itself or None)."""
    replay = replay_routing(model, routes[rows]) if routes is not None else nullcontext()
    moe = hasattr(model.config, "num_experts")
    with replay, record_routing(model, native=True) if moe else nullcontext() as recorder:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            logits = model(batch["tokens"][rows], attention_mask=batch["attention"][rows]).logits
        logps = logits[:, :-1].float().log_softmax(-1)
        logps = logps.gather(2, batch["tokens"][rows][:, 1:, None]).squeeze(2)
    return logps, recorder.routes if moe else None


def ratio_figures(numerator, denominator, mask):
    x = (numerator - denominator)[mask].double()
    return {
        "k3": k3(x).mean().item(),
        "mean |log|": x.abs().mean().item(),
        "F(2)": (x.abs() > torch.tensor(2.0).log()).double().mean().item(),
    }


def update(model, batch, old_logps):
    """UPDATES steps of MiniRL's loss, one mini-batch each, native routing: the weights that the last mini-batch would meet."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    size = len(batch["tokens"]) // (UPDATES + 1)
    for i in range(UPDATES):
        rows = slice(i * size, (i + 1) * size)
        logps, _ = score(model, batch, rows=rows)
        loss = minirl_loss(logps, old_logps[rows], batch["rollout_logps"][rows], batch["advantages"][rows])
        aggregate(loss, batch["mask"][rows], "seq_sum", size).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def measure(name, rollout_dtype, seed, prompts, autocast=False):
    """One sampling, before and after the updates -> {routing: {quantity: {figure: value}}}, with the routing agreement."""
    tokenizer = AutoTokenizer.from_pretrained(find_model(name))
    model = AutoModelForCausalLM.from_pretrained(find_model(name), dtype=torch.float32)
    batch = sample(model, tokenizer, rollout_dtype, prompts, seed)
    mask, mu = batch["mask"], batch["rollout_logps"]
    routings = {"dense": None} if batch["routes"] is None else {"native": None, "R2": None, "R3": batch["routes"]}
    old, figures = {}, {routing: {} for routing in routings}
    with torch.no_grad():
        for routing, routes in routings.items():
            old[routing], native = score(model, batch, routes, autocast=autocast)
            if routing == "R2":
                routings["R2"] = native  # what pi_old chose; while recording it, routing is native
            if routing == "native":
                figures["agreement"] = routing_agreement(native, batch["routes"], batch["attention"])
            figures[routing]["mismatch"] = ratio_figures(old[routing], mu, mask)
    update(model, batch, next(iter(old.values())))
    last = slice(-(len(mask) // (UPDATES + 1)), None)  # the mini-batch that the next update would use
    with torch.no_grad():
        for routing, routes in routings.items():
            logps, native = score(model, batch, routes, last, autocast)
            if routing == "native":
                figures["old agreement"] = routing_agreement(native, routings["R2"][last], batch["attention"][last])
            figures[routing]["staleness"] = ratio_figures(logps, old[routing][last], mask[last])
            figures[routing]["weight"] = ratio_figures(logps, mu[last], mask[last])
    return figures


def mean(runs, *path):
    values = []
    for run in runs:
        for key in path:
            run = run[key]
        values.append(run)
    return statistics.mean(values)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="a quarter of the samples, one seed, fp8 only")
    args = parser.parse_args()
    prompts, seeds = (32, args.seeds[:1]) if args.quick else (128, args.seeds)
    cases = [("tiny-moe", precision, False) for precision in PRECISIONS] + [("tiny-moe", "fp8", True)]
    cases += [("tiny", precision, False) for precision in PRECISIONS]
    if args.quick:
        cases = [case for case in cases if case[1] == "fp8"]
    head = [
        "sampling", "training", "routing", "engines route alike", "mismatch k3", "mean abs log", "F(2)",
        "routing unmoved by 7 updates", "staleness k3", "mean abs log", "weight k3", "F(2)",
    ]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    results = []
    for name, precision, autocast in cases:
        runs = [measure(name, precision, seed, prompts, autocast) for seed in seeds]
        training = "bfloat16 autocast" if autocast else "float32"
        for routing in ("dense",) if name == "tiny" else ("native", "R2", "R3"):
            native = routing == "native"
            cells = [
                f"{precision}{', dense' if name == 'tiny' else ''}", training, routing,
                f"{100 * mean(runs, 'agreement'):.1f} %" if native else "",
                *(f"{mean(runs, routing, 'mismatch', key):.2e}" for key in ("k3", "mean |log|", "F(2)")),
                f"{100 * mean(runs, 'old agreement'):.1f} %" if native else "",
                *(f"{mean(runs, routing, 'staleness', key):.2e}" for key in ("k3", "mean |log|")),
                *(f"{mean(runs, routing, 'weight', key):.2e}" for key in ("k3", "F(2)")),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
        results.append({"model": name, "sampling": precision, "training": training, "seeds": seeds, "runs": runs})
    folder = REPO / "runs" / "quick" / "minirl" if args.quick else Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mismatch.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "mismatch.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
