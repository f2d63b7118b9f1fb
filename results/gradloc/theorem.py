r"""The blog's theorem on bisection by the larger half-norm, against what happens.

    N - 1 tokens with gradient N(0, s^2 I_D), one with N(0, sigma^2 s^2 I_D); follow the half with the larger norm.
    Bound: found with probability >= 1 - eps for eps >= 2 exp(-D / (144 log2 N)), if
        sigma^2 - 1 >= 2.5 N / sqrt(D) sqrt(log(1 + 1/eps))
    Its proof lets each level fail with 2 delta_j but sums delta_j: as proved, the probability is 1 - 2 eps.

synthetic   Exact sampling without D-vectors. At each level the half with the token has squared norm
            (m - 1 + sigma^2) times a chi-square of D degrees, the other m times an independent one. The half that is
            followed is then bisected again, so its parts must add up to it: of a sum v of known norm and two Gaussian
            parts a + b = v, a = (A / (A + B)) v + sqrt(A B / (A + B)) z, z ~ N(0, I_D) independent of v. Only ||v||, z's
            component along v and its chi-square rest matter. Checked against real vectors at D = 64 and 512.
tiny model  Per-token gradients g_t of -A logp on sequences sampled by tiny/qwen3 (one backward a token, then a random
            projection to 4,096 numbers, which keeps inner products within a few percent). One token of the batch is
            multiplied by sigma. Bisection follows the larger half; directional takes the largest <g_t, g> / ||g||.
            Also: the effective rank of the gradients, and how much of them is a common mean.

    python results/gradloc/theorem.py [--quick]

Writes theorem.json and theorem.png beside this file; --quick to runs/.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(Path(__file__).parent), str(REPO / "benchmarks")]

import matplotlib  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from bench_gradloc import logps_fn, pad  # noqa: E402
from planted import MODEL, sample  # noqa: E402

EPS = 0.01  # the bound's sigma is shown for success 0.99, and 0.98 as proved


def bound_sigma(n, d, eps=EPS):
    return math.sqrt(1 + 2.5 * n / math.sqrt(d) * math.sqrt(math.log(1 + 1 / eps)))


def bound_success(n, d, sigma, slip=False):
    """Smallest success probability that the bound guarantees; 0 where it says nothing. slip: as proved, eps -> 2 eps."""
    x = ((sigma**2 - 1) * math.sqrt(d) / (2.5 * n)) ** 2  # log(1 + 1/eps)
    eps = 1 / math.expm1(min(x, 700.0)) if x > 0 else math.inf
    eps = max(eps, 2 * math.exp(-d / (144 * math.log2(n))))
    return max(0.0, 1 - (2 if slip else 1) * eps)


# --- synthetic --------------------------------------------------------------------------------------------------------


def exact_success(n, d, sigma, trials, rng):
    """Share of trials in which bisection finds the token among n = 2^k, from norms alone."""
    m = n // 2
    with_token, without = m - 1 + sigma**2, float(m)
    a = with_token * rng.chisquare(d, trials)  # squared norm of the half with the token
    b = without * rng.chisquare(d, trials)
    alive = a > b
    square = a  # of the half that is followed
    while m > 1:
        m //= 2
        with_token, without = m - 1 + sigma**2, float(m)
        total = with_token + without
        share, spread = with_token / total, with_token * without / total
        along = rng.standard_normal(trials)
        rest = rng.chisquare(d - 1, trials)
        cross = np.sqrt(square * spread) * along
        noise = spread * (along**2 + rest)
        a = share**2 * square + 2 * share * cross + noise
        b = (1 - share) ** 2 * square - 2 * (1 - share) * cross + noise
        alive &= a > b
        square = a
    return alive.mean()


def vector_success(n, d, sigma, trials, rng):
    """The same with real vectors: the reference."""
    found = 0
    for _ in range(trials):
        g = rng.standard_normal((n, d))
        place = int(rng.integers(n))
        g[place] *= sigma
        found += bisect(g, place)
    return found / trials


def bisect(g, place):
    """Does following the larger half-norm end at row `place`? g (n, d); halves as equal as can be."""
    low, high = 0, len(g)
    sums = np.concatenate([np.zeros((1, g.shape[1])), g.cumsum(0)])
    while high - low > 1:
        middle = (low + high) // 2
        left = np.linalg.norm(sums[middle] - sums[low]) > np.linalg.norm(sums[high] - sums[middle])
        if left != (place < middle):
            return False
        low, high = (low, middle) if left else (middle, high)
    return True


def successes(g, place, factors):
    """For row `place` of g multiplied by each factor: (bisection finds it?, the largest <g_t, g> is its?), two lists of bool.

    Only the half with the row depends on the factor f: ||h + (f - 1) g_p||^2 = ||h||^2 + 2 (f - 1) <h, g_p> + (f - 1)^2 ||g_p||^2.
    """
    sums = np.concatenate([np.zeros((1, g.shape[1])), g.cumsum(0)])
    own, more = g[place], np.asarray(factors) - 1
    low, high, alive = 0, len(g), np.ones(len(more), dtype=bool)
    while high - low > 1:
        middle = (low + high) // 2
        halves = [(low, middle), (middle, high)]
        (low, high), (a, b) = halves if place < middle else halves[::-1]
        mine, other = sums[high] - sums[low], sums[b] - sums[a]
        alive &= mine @ mine + 2 * more * (mine @ own) + more**2 * (own @ own) > other @ other
    total, along = g @ sums[-1], g @ own
    scores = np.abs(total[:, None] + along[:, None] * more)  # (n, factors)
    scores[place] *= np.abs(factors)
    return alive, scores.argmax(0) == place


def crossing(success, target=1 - EPS, low=1.0, high=1e4, steps=14):
    """Smallest sigma with success(sigma) >= target, by bisection on log sigma."""
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if success(middle) >= target else (middle, high)
    return high


def synthetic(quick, rng):
    trials = 1000 if quick else 5000
    check = []
    for d, n, sigma in ((64, 64, 3.0), (64, 256, 5.0), (512, 256, 3.0)):
        count = 300 if quick else 2000
        vectors, exact = vector_success(n, d, sigma, count, rng), exact_success(n, d, sigma, 20 * count, rng)
        check.append(
            {"d": d, "n": n, "sigma": sigma, "vectors": vectors, "exact": exact, "error": math.sqrt(0.25 / count)}
        )
    rows = []
    for d in (10**4, 10**6, 10**8, 10**10):
        for k in (8, 12, 16, 20, 24):
            n = 2**k
            sigma = crossing(lambda s: exact_success(n, d, s, trials, rng))  # noqa: B023
            rows.append(
                {"d": d, "n": n, "sigma_99": sigma, "bound": bound_sigma(n, d), "slip": bound_sigma(n, d, EPS / 2)}
            )
    d, n = 10**8, 2**16
    curve = []
    for sigma in np.geomspace(1.0, 2.5 * bound_sigma(n, d), 25):
        curve.append({
            "sigma": sigma, "measured": exact_success(n, d, sigma, trials, rng), "bound": bound_success(n, d, sigma),
            "slip": bound_success(n, d, sigma, slip=True),
        })  # fmt: skip
    return {"check": check, "thresholds": rows, "curve": {"d": d, "n": n, "points": curve}}


# --- the tiny model ---------------------------------------------------------------------------------------------------


def token_gradients(sequences, width, seed=0):
    """Gradient of -A logp of each token of the first sequences, projected. -> (tokens, width) float64, parameters, ratio.

    The projection is a count sketch: each parameter is added, with a random sign, to one of `width` numbers. Inner
    products are right on average, with relative error about sqrt(2 / width).
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    pool = sample(model, tokenizer, seed=seed)
    random.Random(seed).shuffle(pool)
    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    size = sum(p.numel() for p in parameters)
    bucket = torch.randint(width, (size,), generator=generator)
    sign = torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1
    rows, worst = [], 0.0
    for row in pool[:sequences]:
        batch = pad([row["prompt"]], [row["completion"]], tokenizer.pad_token_id)
        losses = -row["advantage"] * logps_fn(model, batch)[0]
        for t in range(len(losses)):
            grads = torch.autograd.grad(losses[t], parameters, retain_graph=True)
            flat = torch.cat([g.flatten() for g in grads])
            sketch = torch.zeros(width).index_add_(0, bucket, flat * sign)
            worst = max(worst, abs(float(sketch.norm() / flat.norm()) - 1))
            rows.append(sketch.double())
    return torch.stack(rows).numpy(), size, worst


def shape_of(g):
    """How isotropic the gradients are."""
    norms = np.linalg.norm(g, axis=1)
    values = np.linalg.svd(g, compute_uv=False) ** 2
    unit = g / norms[:, None]
    directions = np.linalg.svd(unit, compute_uv=False) ** 2
    cosines = (unit @ unit.T)[np.triu_indices(len(g), 1)]
    mean = g.mean(0)
    return {
        "tokens": len(g),
        "effective_rank": float(values.sum() ** 2 / (values**2).sum()),  # participation ratio: n for independent ones
        "effective_rank_of_directions": float(directions.sum() ** 2 / (directions**2).sum()),
        "mean_share": float(len(g) * (mean @ mean) / (norms**2).sum()),  # ||mean||^2 / mean ||g||^2
        "mean_share_of_independent": 1 / len(g),
        "mean_abs_cosine": float(np.abs(cosines).mean()),
        "abs_cosine_above_half": float((np.abs(cosines) > 0.5).mean()),
        "norm_quantiles": dict(zip(("min", "p50", "p90", "p99", "max"), np.quantile(norms, [0, 0.5, 0.9, 0.99, 1]).tolist(), strict=True)),
        "largest_over_rms": float(norms.max() / np.sqrt((norms**2).mean())),
    }  # fmt: skip


def tiny(quick, rng, width=4096):
    g, size, worst = token_gradients(6 if quick else 80, width)
    trials = 100 if quick else 400
    curves = []
    rms = math.sqrt((g**2).sum(1).mean())
    sigmas = np.geomspace(1, 1e4, 9 if quick else 17)
    for n in (16, 64) if quick else (16, 64, 256, 1024):
        hits = np.zeros((2, 2, len(sigmas)))  # what is scaled, method, sigma
        for _ in range(trials):
            rows = g[rng.choice(len(g), n, replace=False)]
            place = int(rng.integers(n))
            own = max(float(np.linalg.norm(rows[place])), 1e-12)
            for kind, factors in enumerate((sigmas, sigmas * rms / own)):
                hits[kind] += successes(rows, place, factors)
        for kind, label in enumerate(("weight", "norm")):
            for i, sigma in enumerate(sigmas.tolist()):
                curves.append({
                    "n": n, "sigma": sigma, "scaled": label, "bisection": hits[kind, 0, i] / trials,
                    "directional": hits[kind, 1, i] / trials, "bound": bound_success(n, size, sigma),
                })  # fmt: skip
    return {"parameters": size, "sketch": width, "worst_norm_error": worst, "shape": shape_of(g), "curves": curves}


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw(result, path):
    figure, axes = plt.subplots(2, 2, figsize=(14, 10), constrained_layout=True)
    axes = axes.flatten()
    rows = result["synthetic"]["thresholds"]
    for i, d in enumerate(sorted({r["d"] for r in rows})):
        own = [r for r in rows if r["d"] == d]
        n = [r["n"] for r in own]
        axes[0].plot(
            n, [r["sigma_99"] for r in own], "o-", color=f"C{i}", label=f"measured, D = 1e{int(math.log10(d))}"
        )
        axes[0].plot(n, [r["bound"] for r in own], "--", color=f"C{i}")
    axes[0].set(xscale="log", yscale="log", xlabel="tokens N", ylabel="sigma")
    axes[0].set_title("Gaussian: sigma for success 0.99 (dashed: bound)")
    curve = result["synthetic"]["curve"]
    sigma = [p["sigma"] for p in curve["points"]]
    for name, style in (("measured", "o-"), ("bound", "--"), ("slip", ":")):
        label = {"measured": "measured", "bound": "bound as printed", "slip": "bound with eps -> 2 eps"}[name]
        axes[1].plot(sigma, [p[name] for p in curve["points"]], style, label=label)
    axes[1].set(xlabel="sigma", ylabel="success", title=f"Gaussian: N = {curve['n']:,}, D = {curve['d']:.0e}")
    for axis, scaled in zip(axes[2:], ("weight", "norm"), strict=True):
        points = [c for c in result["tiny"]["curves"] if c["scaled"] == scaled]
        for i, n in enumerate(sorted({c["n"] for c in points})):
            own = [c for c in points if c["n"] == n]
            sigma = [c["sigma"] for c in own]
            axis.plot(sigma, [c["bisection"] for c in own], "o-", color=f"C{i}", label=f"bisection, N = {n}")
            axis.plot(sigma, [c["directional"] for c in own], "x-.", color=f"C{i}", label=f"directional, N = {n}")
            axis.plot(sigma, [c["bound"] for c in own], "--", color=f"C{i}")
        title = "weight times sigma" if scaled == "weight" else "norm = sigma times the RMS"
        axis.set(
            xscale="log", xlabel="sigma", ylabel="success", title=f"tiny model: a token's {title} (dashed: bound)"
        )
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=70)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer trials and sequences, written to runs/, not here")
    quick = parser.parse_args().quick
    out = REPO / "runs" / "quick" / "gradloc" if quick else Path(__file__).parent
    out.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    rng, start = np.random.default_rng(0), time.monotonic()
    result = {"name": "theorem", "eps": EPS, "synthetic": synthetic(quick, rng), "tiny": tiny(quick, rng)}
    (out / "theorem.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, out / "theorem.png")
    for row in result["synthetic"]["check"]:
        print(
            "real vectors / exact: D {d}, N {n}, sigma {sigma}: {vectors:.3f} / {exact:.3f} (+- {error:.3f})".format(
                **row
            )
        )
    for row in result["synthetic"]["thresholds"]:
        print(
            "D {d:.0e} N {n:9,d}: success 0.99 from sigma {sigma_99:9.3f}, bound {bound:9.3f}, with 2 eps {slip:9.3f}".format(
                **row
            )
        )
    print(json.dumps(result["tiny"]["shape"], indent=1))
    for c in result["tiny"]["curves"][::4]:
        print(
            "N {n:5d} sigma {sigma:9.1f} {scaled:6}: bisection {bisection:.2f} directional {directional:.2f} bound {bound:.2f}".format(
                **c
            )
        )
    print(f"{time.monotonic() - start:.0f} s, written to {out}")


if __name__ == "__main__":
    main()
