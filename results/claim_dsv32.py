"""`dsv32`: DeepSeek-V3.2's mechanisms (arXiv:2512.02556, section 3.1) on the tiny MoE, one changed at a time."""

import statistics

import torch

from results.running import collapse_step, curves_by_group, rows_by_arm, run_arms, windows, write_table
from rlvr_common import k3, unbiased_kl

# DeepSeek-V3.2's mechanisms (arXiv:2512.02556, section 3.1) on the tiny MoE, one changed at a time; the guard only watches.
DSV32 = [
    "--per_device_train_batch_size", "32", "--max_steps", "64", "--learning_rate", "3e-4", "--save_strategy", "no",
    "--report_to", "none", "--eval_problems", "100", "--eval_samples", "8", "--gradloc", "off", "--guard", "warn",
    "--verifier_workers", "1",
]  # fmt: skip
UNMASKED = ["--rl_stability.consistency.keep_sampling_mask", "false"]
WHOLE = ["--top_p", "1.0"]  # no truncation: nothing to keep
NO_SEQUENCE_MASK = ["--rl_stability.sequence_masking.enabled", "false"]
DSV32_ARMS = {
    f"sampling mask: {name}, {'kept' if kept else 'not kept'}": [*DSV32, *options, *([] if kept else UNMASKED)]
    for name, options in {"top-p 0.8": ["--top_p", "0.8"], "top-k 5": ["--top_p", "1.0", "--top_k", "5"]}.items()
    for kept in (True, False)
} | {
    f"KL estimator: N=8, beta 0.1, {name}": [*DSV32, *WHOLE, *NO_SEQUENCE_MASK, "--num_minibatches", "8", "--beta", "0.1", *options]
    for name, options in {
        "k3": ["--rl_stability.unbiased_kl.enabled", "false"],
        "unbiased": [],
        "unbiased, no clip": ["--rl_stability.unbiased_kl.clip_ratio", "null"],
    }.items()
} | {
    f"sequence mask: N={n}, {name}": [*DSV32, *WHOLE, "--num_minibatches", str(n), *options]
    for n in (1, 4, 8)
    for name, options in {
        "off": NO_SEQUENCE_MASK,
        **{f"delta {d}": ["--rl_stability.sequence_masking.divergence_threshold", d] for d in ("0.02", "0.1", "0.5")},
    }.items()
    if n > 1 or name in ("off", "delta 0.1")
} | {
    f"KL strength: {name}": [*DSV32, *WHOLE, "--beta", beta] for name, beta in {"zero": "0", "weak": "0.001", "strong": "0.1"}.items()
}  # fmt: skip


def dsv32_cells(records, minutes):
    """The cells of one run of the DeepSeek-V3.2 claim: outcome, mismatch, KL and filters."""
    train = [r for r in records if "grad_norm" in r]
    evals = [100 * r["eval/accuracy"] for r in records if "eval/accuracy" in r]
    points = [{"step": step, **w} for step, w in windows(train, 8) if "reward" in w]
    return {
        "held-out after %": evals[-1],
        "gain, points": evals[-1] - evals[0],
        "best reward": max(w["reward"] for w in points),
        "last reward": points[-1]["reward"],
        "collapse step": collapse_step(points),
        "largest grad norm": max(r["grad_norm"] for r in train),
        "kept mass": points[0].get("support/rollout_kept_mass"),
        "mean mismatch, first": train[0]["mismatch/mean"],
        "last": points[-1]["mismatch/mean"],
        "F(2), last": points[-1]["mismatch/extreme_frac"],
        "kl, last": points[-1].get("kl"),
        "sequences masked %": 100 * statistics.mean(r.get("off_policy_mask/masked_frac", 0.0) for r in train),
        "steps with an alarm": float(sum(r.get("guard/level", 0.0) >= 2 for r in train)),
        "entropy, last": points[-1]["entropy"],
        "minutes": minutes,
    }


def kl_gradients():
    """|d KL_t / d log pi_theta| of one token that lies `gap` nats below the reference, sampled off-policy from mu = pi_theta e^drift:
    plain k3, the unbiased estimate, and what it would be with a detached ratio."""
    yield "| log pi_ref/pi_theta | log mu/pi_theta | k3 | unbiased, live ratio | ratio detached |"
    yield "|---|---|---|---|---|"
    for gap in (1.0, 5.0, 10.0, 15.0):
        for drift in (0.0, 2.0, 5.0):
            slopes = []
            for kind in ("k3", "live", "detached"):
                logp = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
                mu, ref = torch.full_like(logp, drift), torch.full_like(logp, gap)
                if kind == "k3":
                    value = k3(ref - logp)
                elif kind == "live":
                    value = unbiased_kl(logp, mu, ref)
                else:
                    value = (logp - mu).exp().detach() * k3(ref - logp)
                slopes.append(abs(torch.autograd.grad(value.sum(), logp)[0].item()))
            yield f"| {gap:g} | {drift:g} | " + " | ".join(f"{slope:.3g}" for slope in slopes) + " |"


def dsv32(seeds, steps, out, jobs):
    """Runs every arm and writes table and curves, and the table of gradients of one token."""
    runs, _ = run_arms("dsv32", DSV32_ARMS, seeds, steps, out, jobs, recipe="dsv32_stable", every=8)
    curves_by_group(runs, out)
    names, rows = rows_by_arm(runs, dsv32_cells)
    write_table("dsv32", ["arm", *names], rows, runs, seeds, steps, jobs, out, ["", *kl_gradients()])
