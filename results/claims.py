"""Every claim that the project looked into, with its verdict worked out from the evidence: results/claims.md and README's table.

    python results/reproduce.py table          writes both again; a test fails where they are not what the evidence says

A verdict compares held-out accuracies (or what the row names) of two groups of runs, paired by seed and arm:

    seen       the mean difference lies more than two standard errors on the claimed side
    opposite   as far on the other side
    not seen   neither; or what was claimed to happen did not
    not made yet    the evidence is not there

A claim of no difference is seen where the difference stays within two standard errors, and opposite where it is above: a weak test.
Two standard errors of three to nine pairs are a rough rule, and the same for every row. "Ours" are claims of this project.
"""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from results.claim_gradloc import largest_spike
from results.running import RESULTS, collapse_step, fill, spread

SEEN, NOT_SEEN, OPPOSITE, NOT_MADE = "seen", "not seen", "opposite", "not made yet"


@dataclass
class Claim:
    """One row: `judge()` reads the evidence and returns (verdict, the numbers behind it)."""

    id: str
    statement: str
    source: str
    evidence: str  # name of the claim that `reproduce.py` makes, a key of made.json
    judge: Callable[[], tuple[str, str]]


CLAIMS: list[Claim] = []


def claim(name, statement, source, evidence):
    """Registers the function below it as the judge of a row."""

    def register(judge):
        CLAIMS.append(Claim(name, statement, source, evidence, judge))
        return judge

    return register


# ---------------------------------------------------------------- reading evidence


def read(name):
    """A JSON file of results/."""
    return json.loads((RESULTS / name).read_text())


def runs_of(name):
    """{arm: {seed: records}} of results/<name>/metrics.jsonl."""
    runs = {}
    for line in (RESULTS / name / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        runs.setdefault(record["arm"], {}).setdefault(record["seed"], []).append(record)
    return runs


def after(runs, arm):
    """Held-out accuracy at the end of each seed's run, in %, in the order of the seeds."""
    return [100 * [r["eval/accuracy"] for r in runs[arm][s] if "eval/accuracy" in r][-1] for s in sorted(runs[arm])]


def mean_of(runs, arm, metric, last=None):
    """Mean of a metric over a run, or over its `last` records, of each seed."""
    return [
        statistics.mean([r[metric] for r in runs[arm][s] if metric in r][-last if last else None :])
        for s in sorted(runs[arm])
    ]


def largest_of(runs, arm, metric):
    """Largest value of a metric over a run, of each seed."""
    return [max(r[metric] for r in runs[arm][s] if metric in r) for s in sorted(runs[arm])]


def collapsed(runs, arm):
    """In how many seeds the reward stays below half of its peak to the end."""
    return sum(collapse_step(records) is not None for records in runs[arm].values())


# ---------------------------------------------------------------- judging


def differences(pairs):
    """[(of each pair the list before, the list after)] -> one list of differences, paired by position."""
    return [b - a for before, later in pairs for a, b in zip(before, later, strict=True)]


def rises(values):
    """Verdict on "the difference is above 0", by the rule at the top."""
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    return SEEN if mean > 2 * error else OPPOSITE if mean < -2 * error else NOT_SEEN


def points(values, what="points"):
    """Mean, spread and number of pairs, as text."""
    return f"{spread(values)} {what} over {len(values)} pairs"


def differ(first, second):
    """Do two groups of runs differ by more than two standard errors of the difference of their means?"""
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(second) / len(second))
    return abs(statistics.mean(first) - statistics.mean(second)) > 2 * error


# ---------------------------------------------------------------- GradLoc

BLOG = "GradLoc blog, 2026-02"


def planted(kind, method="directional"):
    """Rates of one kind of planted anomaly, found by one method."""
    return read("gradloc/planted.json")["rates"][kind][method]


def found(kind, cause):
    """Verdict on "directional finds the anomaly and names its cause", in 95 % of the trials or more."""
    rates = planted(kind)
    verdict = SEEN if rates["found"] >= 0.95 and rates["classified"] >= 0.95 else NOT_SEEN
    return (
        verdict,
        f"found {100 * rates['found']:.0f} %, named {cause} {100 * rates['classified']:.0f} % of {rates['trials']}",
    )


@claim("gradloc-token", "One token of huge weight is found and named", BLOG, "planted")
def _():
    return found("token", "A.1")


@claim("gradloc-sequence", "A drifting sequence whose tokens all look fine is found and named", BLOG, "planted")
def _():
    return found("sequence", "A.2")


@claim("gradloc-layer", "An exploding layer is found and named", BLOG, "planted")
def _():
    return found("layer", "B")


@claim("gradloc-nan", "A value that is not finite is traced to its token, tensor or module", "ours", "planted")
def _():
    return found("nan", "N")


@claim("gradloc-pair", "The published search finds two tokens in different micro-batches", BLOG, "planted")
def _():
    theirs, own = planted("pair", "published"), planted("pair")
    verdict = SEEN if theirs["found"] >= 0.95 else OPPOSITE if theirs["found"] <= 0.05 else NOT_SEEN
    return (
        verdict,
        f"published {100 * theirs['found']:.0f} % of {theirs['trials']}, directional {100 * own['found']:.0f} % of {own['trials']}",
    )


@claim("gradloc-certificate", "Token shares sum to the gradient norm (certificate within 5 %)", "ours", "planted")
def _():
    largest = max(planted(kind)["largest_certificate"] for kind in ("token", "pair", "sequence", "layer"))
    return SEEN if largest <= 0.05 else NOT_SEEN, f"largest gap {100 * largest:.1f} % in 400 spikes"


@claim("gradloc-cost", "Directional localisation costs less than the published bisection", "ours", "planted")
def _():
    own, theirs = planted("token")["median_steps"], planted("token", "published")["median_steps"]
    return SEEN if own < theirs else OPPOSITE, f"{own:.2f} against {theirs:.2f} steps"


@claim("gradloc-bound", "The success bound of the bisection holds under its own assumptions", BLOG, "theorem")
def _():
    rows = read("gradloc/theorem.json")["synthetic"]["thresholds"]
    worst = max(r["sigma_99"] / r["bound"] for r in rows)
    return (
        SEEN if worst <= 1 else OPPOSITE,
        f"sigma for success 0.99 is at most {worst:.2f} of the bound ({len(rows)} sizes)",
    )


@claim(
    "gradloc-assumptions",
    "Token gradients of a real model look as the theorem assumes (effective rank near D)",
    BLOG,
    "theorem",
)
def _():
    tiny = read("gradloc/theorem.json")["tiny"]
    rank, size = tiny["shape"]["effective_rank"], tiny["parameters"]
    return SEEN if rank > size / 10 else NOT_SEEN, f"effective rank {rank:.0f} of {size:,} dimensions"


@claim("gradloc-natural", "In runs that spike by themselves a treatment of tokens removes the spikes", BLOG, "gradloc")
def _():
    runs = runs_of("gradloc")
    plain, clipped = (
        [largest_spike(records)[0] for _, records in sorted(runs[f"SGD: GRPO{more}"].items())]
        for more in ("", " + TokenClip")
    )
    fall = [math.log(a / b) for a, b in zip(plain, clipped, strict=True)]
    return rises(
        fall
    ), f"largest norm over the median before it {spread(plain)} -> {spread(clipped)} ({len(fall)} seeds)"


@claim("gradloc-ladder", "TokenClip, SeqClip, LayerClip postpone the collapse (SGD)", BLOG, "gradloc")
def _():
    runs = runs_of("gradloc")
    full = "SGD: GRPO + TokenClip + SeqClip + LayerClip"
    gain = differences([(after(runs, "SGD: GRPO"), after(runs, full))])
    return rises(
        gain
    ), f"{points(gain)}; collapsed seeds {collapsed(runs, 'SGD: GRPO')} -> {collapsed(runs, full)} of 5"


@claim("gradloc-adamw", "The same under AdamW", BLOG, "gradloc")
def _():
    runs = runs_of("gradloc")
    plain, full = "AdamW: GRPO", "AdamW: GRPO + TokenClip + SeqClip + LayerClip"
    gain = differences([(after(runs, plain), after(runs, full))])
    return rises(gain), f"{points(gain)}; collapsed seeds {collapsed(runs, plain)} -> {collapsed(runs, full)} of 5"


@claim(
    "gradloc-type-b",
    "Layers' gradient norms drift apart by themselves (correlation of two layers below 0.5)",
    BLOG,
    "gradloc",
)
def _():
    values = mean_of(runs_of("gradloc"), "SGD: GRPO", "layer_clip/corr_min")
    return SEEN if max(values) < 0.5 else NOT_SEEN, f"smallest correlation {spread(values)}"


@claim("tokenclip-accuracy", "TokenClip lets GRPO learn more at fp8 rollouts", BLOG, "grpo_tokenclip")
def _():
    runs = runs_of("grpo_tokenclip")
    gain = differences([(after(runs, "GRPO"), after(runs, "GRPO + TokenClip"))])
    return rises(gain), points(gain)


@claim("seqclip-norm", "SeqClip lowers the largest gradient norm", BLOG, "grpo_tokenclip")
def _():
    runs = runs_of("grpo_tokenclip")
    without, with_it = (largest_of(runs, f"GRPO + TokenClip{more}", "grad_norm") for more in ("", " + SeqClip"))
    fall = [a - b for a, b in zip(without, with_it, strict=True)]
    return rises(fall), f"{spread(without)} -> {spread(with_it)}"


# ---------------------------------------------------------------- MiniRL

PAPER = "arXiv:2512.01374"
CLIPPED = [(f"N={n}: {r}, no clip", f"N={n}: {r}, clip") for n in (2, 4, 8) for r in ("no replay", "R2", "R3")]


@claim("minirl-is", "N=1: without importance weights the run collapses", PAPER, "minirl")
def _():
    runs = runs_of("minirl")
    gain = differences([(after(runs, "N=1: without IS"), after(runs, "N=1: MiniRL"))])
    down = collapsed(runs, "N=1: without IS")
    return SEEN if down == 3 else NOT_SEEN, f"collapsed {down} of 3; the weights add {points(gain)}"


@claim("minirl-length-norm", "N=1: a length norm costs accuracy", PAPER, "minirl")
def _():
    runs = runs_of("minirl")
    loss = differences([(after(runs, "N=1: with length norm"), after(runs, "N=1: MiniRL"))])
    return rises(loss), f"the sum is better by {points(loss)}"


@claim("r3-mismatch", "R3 lowers the mismatch between training and sampling", f"{PAPER}, arXiv:2510.11370", "minirl")
def _():
    runs = runs_of("minirl")
    arms = [("N=1: MiniRL", "N=1: + R3"), *((f"N={n}: no replay, clip", f"N={n}: R3, clip") for n in (2, 4, 8))]
    without, replayed = ([v for pair in arms for v in mean_of(runs, pair[i], "mismatch/k3")] for i in (0, 1))
    fall = [a - b for a, b in zip(without, replayed, strict=True)]
    return rises(fall), f"k3 {spread(without)} -> {spread(replayed)}, N = 1, 2, 4, 8"


@claim("r3-dense", "R3 takes a MoE's mismatch down to a dense model's", "arXiv:2510.11370", "mismatch")
def _():
    rows = {(r["model"], r["sampling"], r["training"]): r["runs"] for r in read("minirl/mismatch.json")}

    def k3(model, routing):
        return statistics.mean(run[routing]["mismatch"]["k3"] for run in rows[model, "fp8", "float32"])

    native, replayed, dense = k3("tiny-moe", "native"), k3("tiny-moe", "R3"), k3("tiny", "dense")
    return (
        SEEN if replayed <= 1.2 * dense < native else NOT_SEEN,
        f"k3 at fp8 {native:.1e} -> {replayed:.1e}, dense {dense:.1e}",
    )


@claim("r3-n1-score", "N=1: R3 gains no accuracy", PAPER, "minirl")
def _():
    runs = runs_of("minirl")
    gain = differences([(after(runs, "N=1: MiniRL"), after(runs, "N=1: + R3"))])
    return {SEEN: OPPOSITE}.get(rises(gain), SEEN), points(gain)


@claim("minirl-clip", "N>1: the clip is needed", PAPER, "minirl")
def _():
    runs = runs_of("minirl")
    gain = differences([(after(runs, a), after(runs, b)) for a, b in CLIPPED])
    return rises(gain), f"{points(gain)}; as accuracy, nothing collapses without it"


@claim("minirl-replay", "N>1: replay is needed (with the clip)", PAPER, "minirl")
def _():
    runs = runs_of("minirl")
    gain = differences(
        [
            (after(runs, f"N={n}: no replay, clip"), after(runs, f"N={n}: {r}, clip"))
            for n in (2, 4, 8)
            for r in ("R2", "R3")
        ]
    )
    return rises(gain), points(gain)


@claim("minirl-r2-n2", "N=2: R2 beats R3", PAPER, "minirl")
def _():
    runs = runs_of("minirl")
    gain = differences([(after(runs, f"N=2: R3, {c}"), after(runs, f"N=2: R2, {c}")) for c in ("clip", "no clip")])
    return rises(gain), points(gain)


@claim("minirl-r3-n48", "N=4, 8: R3 beats R2", PAPER, "minirl")
def _():
    runs = runs_of("minirl")
    gain = differences(
        [(after(runs, f"N={n}: R2, {c}"), after(runs, f"N={n}: R3, {c}")) for n in (4, 8) for c in ("clip", "no clip")]
    )
    return rises(gain), points(gain)


@claim("minirl-peaks", "Stable runs on- and off-policy end at similar accuracy", PAPER, "minirl")
def _():
    runs = runs_of("minirl")
    ends = {n: after(runs, arm) for n, arm in {1: "N=1: MiniRL"}.items()} | {
        n: after(runs, f"N={n}: no replay, clip") for n in (2, 4, 8)
    }
    verdict = NOT_SEEN if any(differ(ends[1], ends[n]) for n in (2, 4, 8)) else SEEN
    return verdict, ", ".join(f"N={n}: {spread(v)} %" for n, v in ends.items())


@claim("minirl-cold-starts", "Different cold starts end at comparable accuracy", PAPER, "minirl")
def _():
    runs = runs_of("minirl")
    ends = {name: after(runs, f"cold start: {name}") for name in ("steps", "split", "words")}
    verdict = OPPOSITE if differ(ends["steps"], ends["words"]) else SEEN
    return verdict, ", ".join(f"{name} {spread(v)} %" for name, v in ends.items())


@claim("minirl-collapse-mismatch", "A collapse goes with a rise of the mismatch", PAPER, "minirl_push")
def _():
    runs = runs_of("minirl_push")
    arms = [arm for arm in runs if arm.startswith("lr 1e-3")]
    rise = [
        math.log(b / a)
        for arm in arms
        for a, b in zip(
            (records[1]["mismatch/k3"] for _, records in sorted(runs[arm].items())),
            mean_of(runs, arm, "mismatch/k3", 1),
            strict=True,
        )
    ]
    return rises(
        rise
    ), f"k3 at the end {math.exp(statistics.mean(rise)):.1f} times that at the start, {len(rise)} collapsed runs"


@claim("minirl-coarse-is", "Importance weights help where rollouts are coarse (int4)", PAPER, "minirl_push")
def _():
    runs = runs_of("minirl_push")
    gain = differences(
        [
            (after(runs, f"int4, lr 3e-4, N=1: {a}"), after(runs, f"int4, lr 3e-4, N=1: {b}"))
            for a, b in [("without IS", "MiniRL")]
        ]
    )
    return rises(gain), points(gain)


# ---------------------------------------------------------------- asynchronous rollouts, vLLM


def stale_arms(staleness, replay="R3", clip="clip"):
    """Name of an arm of `async`, one update a sampling."""
    return f"N=1, {replay}, {clip}: S={staleness}"


@claim("async-staleness", "Staleness up to 16 updates costs accuracy at equal updates", "ours", "async")
def _():
    runs = runs_of("async")
    pairs = [(r, c) for r in ("no replay", "R3") for c in ("no clip", "clip")]
    loss = differences([(after(runs, stale_arms(16, *p)), after(runs, stale_arms(0, *p))) for p in pairs])
    return rises(loss), f"S=0 is better than S=16 by {points(loss)}"


@claim("async-mild", "Mildly stale rollouts (S=1) cost nothing", "ours", "async")
def _():
    runs = runs_of("async")
    pairs = [(r, c) for r in ("no replay", "R3") for c in ("no clip", "clip")]
    loss = differences([(after(runs, stale_arms(1, *p)), after(runs, stale_arms(0, *p))) for p in pairs])
    return {SEEN: OPPOSITE}.get(rises(loss), SEEN), f"S=0 is better than S=1 by {points(loss)}"


@claim("async-clip", "The clip against mu is needed on stale rollouts (S=4, 16)", PAPER, "async")
def _():
    runs = runs_of("async")
    pairs = [(s, r) for s in (4, 16) for r in ("no replay", "R3")]
    gain = differences([(after(runs, stale_arms(s, r, "no clip")), after(runs, stale_arms(s, r))) for s, r in pairs])
    return rises(gain), points(gain)


@claim("async-r2-mild", "Mild off-policy (N=2, S=4): R2 beats R3", PAPER, "async")
def _():
    runs = runs_of("async")
    gain = differences([(after(runs, "N=2, clip: S=4, R3"), after(runs, "N=2, clip: S=4, R2"))])
    return rises(gain), points(gain)


@claim("async-r3-strong", "Strong off-policy (N=2, S=16): R3 beats R2", PAPER, "async")
def _():
    runs = runs_of("async")
    gain = differences([(after(runs, "N=2, clip: S=16, R2"), after(runs, "N=2, clip: S=16, R3"))])
    return rises(gain), points(gain)


@claim("async-time", "Sampling one update ahead saves wall time", "ours", "async_time")
def _():
    times = read("async_time/time.json")
    share = times["S=1"]["seconds_of_an_update"] / times["S=0"]["seconds_of_an_update"]
    return (
        SEEN if share < 0.95 else OPPOSITE if share > 1.05 else NOT_SEEN,
        f"{share:.2f} of the synchronous run's seconds an update",
    )


# ---------------------------------------------------------------- DeepSeek-V3.2

V32 = "arXiv:2512.02556"
TRUNCATED = ("top-p 0.8", "top-k 5")


@claim(
    "dsv32-mask-mismatch",
    "With the sampling mask kept the mean mismatch is 1; without it, the kept mass",
    f"{V32}, ours",
    "dsv32",
)
def _():
    runs = runs_of("dsv32")
    kept, lost = (
        [v for name in TRUNCATED for v in mean_of(runs, f"sampling mask: {name}, {how}", "mismatch/mean")]
        for how in ("kept", "not kept")
    )
    gap = [abs(1 - b) - abs(1 - a) for a, b in zip(kept, lost, strict=True)]
    return rises(gap), f"{spread(lost)} -> {spread(kept)}"


@claim("dsv32-mask-accuracy", "Keeping the sampling mask raises accuracy", V32, "dsv32")
def _():
    runs = runs_of("dsv32")
    gain = differences(
        [(after(runs, f"sampling mask: {n}, not kept"), after(runs, f"sampling mask: {n}, kept")) for n in TRUNCATED]
    )
    return rises(gain), points(gain)


@claim("dsv32-unbiased-kl", "The unbiased KL estimate trains better than k3 (beta 0.1, N=8)", V32, "dsv32")
def _():
    runs = runs_of("dsv32")
    arm = "KL estimator: N=8, beta 0.1, "
    gain = differences([(after(runs, f"{arm}k3"), after(runs, f"{arm}unbiased"))])
    return rises(gain), points(gain)


@claim("dsv32-kl-norm", "k3 makes larger gradient norms than the unbiased estimate", V32, "dsv32")
def _():
    runs = runs_of("dsv32")
    arm = "KL estimator: N=8, beta 0.1, "
    plain, unbiased = (largest_of(runs, f"{arm}{kind}", "grad_norm") for kind in ("k3", "unbiased"))
    rise = [math.log(a / b) for a, b in zip(plain, unbiased, strict=True)]
    return rises(rise), f"largest norm (means of 8 updates) {spread(plain)} against {spread(unbiased)}"


@claim("dsv32-mask-grows", "The off-policy mask drops more sequences the more updates a sampling feeds", V32, "dsv32")
def _():
    runs = runs_of("dsv32")
    shares = {n: mean_of(runs, f"sequence mask: N={n}, delta 0.1", "off_policy_mask/masked_frac") for n in (1, 4, 8)}
    return rises(differences([(shares[1], shares[8])])), ", ".join(
        f"N={n}: {100 * statistics.mean(v):.1f} %" for n, v in shares.items()
    )


@claim("dsv32-mask-helps", "The off-policy mask raises accuracy at N = 4, 8", V32, "dsv32")
def _():
    runs = runs_of("dsv32")
    gain = differences(
        [(after(runs, f"sequence mask: N={n}, off"), after(runs, f"sequence mask: N={n}, delta 0.1")) for n in (4, 8)]
    )
    return rises(gain), points(gain)


@claim("dsv32-weak-kl", "A weak or no KL suits maths: strong (0.1) costs accuracy", V32, "dsv32")
def _():
    runs = runs_of("dsv32")
    loss = differences(
        [(after(runs, "KL strength: strong"), after(runs, f"KL strength: {k}")) for k in ("zero", "weak")]
    )
    return rises(loss), f"zero and weak are better by {points(loss)}"


# ---------------------------------------------------------------- Ares

ARTICLE = "Ares article, 2026"


def rates_of(runs, name):
    """{learning rate: held-out accuracies} of one optimizer's sweep."""
    return {arm.rpartition(" at ")[2]: after(runs, arm) for arm in runs if arm.rpartition(" at ")[0] == name}


def best(runs, name):
    """(learning rate, accuracies) of the best mean of a sweep."""
    return max(rates_of(runs, name).items(), key=lambda item: statistics.mean(item[1]))


def against(name, other):
    """Verdict on "Ares at its best rate is better than another optimizer at its own"."""
    runs = runs_of("ares")
    (rate, own), (other_rate, theirs) = best(runs, name), best(runs, other)
    return rises(differences([(theirs, own)])), f"{spread(own)} % at {rate} against {spread(theirs)} % at {other_rate}"


@claim("ares-adamw", "Ares ends above AdamW, each at its best learning rate", ARTICLE, "ares")
def _():
    return against("ares", "adamw")


@claim("ares-muon", "Ares ends above Muon", ARTICLE, "ares")
def _():
    return against("ares", "muon")


@claim("ares-galore", "Ares ends above GaLore", ARTICLE, "ares")
def _():
    return against("ares", "galore")


@claim("ares-sgd", "Ares ends above SGD", ARTICLE, "ares")
def _():
    return against("ares", "sgd")


@claim("ares-rmsprop", "Ares ends above RMSprop", ARTICLE, "ares")
def _():
    return against("ares", "rmsprop")


@claim("ares-projected", "The projected step ends above the literal one", "ours", "ares")
def _():
    return against("projected", "ares")


def ablation(name, step="literal"):
    """What the full Ares gains over one that lacks `name`, at 3e-4, pair by pair."""
    runs = runs_of("ares")
    full = {"literal": "ares", "projected": "projected"}[step]
    return differences([(after(runs, f"{step}, {name} at 3e-4"), after(runs, f"{full} at 3e-4"))])


@claim("ares-dynamic-rank", "A fixed rank costs accuracy (at the same rate)", ARTICLE, "ares")
def _():
    loss = ablation("fixed rank") + ablation("fixed rank", "projected")
    return rises(loss), f"the dynamic rank is better by {points(loss)}"


@claim("ares-smoothing", "A rank without smoothing costs accuracy (at the same rate)", ARTICLE, "ares")
def _():
    loss = ablation("no smoothing") + ablation("no smoothing", "projected")
    return rises(loss), f"smoothing is better by {points(loss)}"


@claim(
    "ares-low-rank",
    "Without the low rank it collapses (2.7 against 27.2 in the article), at the same rate",
    ARTICLE,
    "ares",
)
def _():
    runs = runs_of("ares")
    own, without = rates_of(runs, "ares"), rates_of(runs, "no low rank")
    down = [rate for rate in own if statistics.mean(without[rate]) < statistics.mean(own[rate]) / 2]
    numbers = "; ".join(f"{rate}: {spread(own[rate])} against {spread(without[rate])} %" for rate in own)
    return SEEN if down else NOT_SEEN, numbers


@claim(
    "ares-low-rank-step", "With a step of low rank (projected) it collapses without: the reading H1", "ours", "ares"
)
def _():
    runs = runs_of("ares")
    own, without = after(runs, "projected at 1e-3"), after(runs, "no low rank at 1e-3")
    return rises(differences([(without, own)])), f"at 1e-3 {spread(own)} against {spread(without)} %"


@claim("ares-wide", "The projected step learns at ten times AdamW's best rate, where AdamW collapses", "ours", "ares")
def _():
    runs = runs_of("ares")
    own, adamw, peak = (after(runs, arm) for arm in ("projected at 1e-3", "adamw at 1e-3", "adamw at 1e-4"))
    kept = rises(differences([(adamw, own)])) == SEEN and not differ(own, peak)
    return (
        SEEN if kept else NOT_SEEN,
        f"at 1e-3 {spread(own)} against {spread(adamw)} %; AdamW at 1e-4 {spread(peak)} %",
    )


@claim("ares-estimators", "Gains hold under RLOO, REINFORCE++, GDPO, GRPO", ARTICLE, "ares")
def _():
    runs = runs_of("ares")
    names = ("rloo", "reinforce_pp", "gdpo", "grpo")
    gain = differences([(after(runs, f"{n}: adamw at 1e-4"), after(runs, f"{n}: ares at 1e-4")) for n in names])
    return rises(gain), points(gain)


@claim("ares-sft", "Under SFT Ares and AdamW are alike", ARTICLE, "ares")
def _():
    runs = runs_of("ares")
    own, adamw = after(runs, "sft: ares at 1e-4"), after(runs, "sft: adamw at 1e-4")
    return NOT_SEEN if differ(own, adamw) else SEEN, f"{spread(own)} against {spread(adamw)} %"


def shares(kind):
    """(first, last) fifth of the top-4 share over a run on the larger model, each a list by seed: 4 of 256 are 32 of 2,048."""
    runs = runs_of("ares_spectra")
    series = [
        [r["spectral/top_share"] for r in records if "spectral/top_share" in r]
        for _, records in sorted(runs[f"larger: {kind}"].items())
    ]
    fifth = max(1, len(series[0]) // 5)
    return [statistics.mean(s[:fifth]) for s in series], [statistics.mean(s[-fifth:]) for s in series]


@claim(
    "ares-share-rises",
    "The share of a gradient's energy in its leading directions (32 of 2,048; here 4 of 256) rises over RLVR",
    ARTICLE,
    "ares_spectra",
)
def _():
    first, last = shares("RLVR")
    return rises(differences([(first, last)])), f"{spread(first)} -> {spread(last)} (4 of 256 directions)"


@claim("ares-share-random", "It rises more than with a random reward", ARTICLE, "ares_spectra")
def _():
    own, random = (differences([shares(kind)]) for kind in ("RLVR", "random reward"))
    return rises(differences([(random, own)])), f"rise {spread(own)} against {spread(random)}"


@claim("ares-share-sft", "It is larger under RLVR than under SFT", ARTICLE, "ares_spectra")
def _():
    own, sft = shares("RLVR")[1], shares("SFT")[1]
    return rises(differences([(sft, own)])), f"at the end {spread(own)} against {spread(sft)}"


# ---------------------------------------------------------------- the table

RECIPES = {  # recipe -> (papers, the idea in one line, ids of its claims, report)
    "grpo_tokenclip.py": (
        "GRPO (arXiv:2402.03300), GradLoc blog (Tencent Hunyuan, 2026-02)",
        "leave out tokens and sequences that the training engine and the sampling engine rate differently; explain every gradient spike",
        ("gradloc", "tokenclip", "seqclip"), "gradloc",
    ),
    "minirl_sync.py": (
        "MiniRL (arXiv:2512.01374), R3 (arXiv:2510.11370), R2 (GSPO, arXiv:2507.18071)",
        "weight each token for the difference of the two engines, clip what has changed since sampling, and on a MoE train its experts",
        ("minirl", "r3"), "minirl",
    ),
    "minirl_async_r3.py": (
        "MiniRL, R3; decoupled PPO (arXiv:2110.00641)",
        "the same loss, while the next rollouts are made: their staleness bounded, measured and corrected",
        ("async",), "async",
    ),
    "dsv32_stable.py": (
        "DeepSeek-V3.2 (arXiv:2512.02556, section 3.1) and its deployment guide",
        "unbiased KL, off-policy sequence mask, keep routing, keep sampling mask: each a switch; and a guard that alerts and rolls back",
        ("dsv32",), "dsv32",
    ),
    "ares_dapo.py": (
        "Ares (an article, 2026), DAPO (arXiv:2503.14476), RLOO, REINFORCE++, GDPO",
        "an AdamW-like step on the few directions that carry a gradient's energy, their number read from its spectrum",
        ("ares",), "ares",
    ),
}  # fmt: skip


def made():
    """{evidence: {"command", "minutes", "seeds", "commit", "date"}} of every piece of evidence."""
    return read("made.json")


def tables():
    """{"claims": lines of claims.md, "summary": the line under README's table, "recipes": README's table}."""
    entries, rows, verdicts = made(), [], {}
    for row in CLAIMS:
        known = row.evidence in entries
        verdict, numbers = row.judge() if known else (NOT_MADE, "-")
        entry = (
            entries[row.evidence]
            if known
            else {"command": f"python results/reproduce.py {row.evidence}", "minutes": "-", "seeds": "-"}
        )
        verdicts[row.id] = verdict
        cells = [row.id, row.statement, row.source, f"**{verdict}**", numbers, f"`{entry['command']}`"]
        rows.append("| " + " | ".join([*cells, str(entry["minutes"]), entry["seeds"]]) + " |")
    head = [
        "| id | claim | source | verdict | numbers | command | minutes | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    when = [f"| `{e['command']}` | {e['commit']} | {e['date']} |" for e in entries.values()]
    full = [*head, *rows, "", "| evidence | commit | date |", "|---|---|---|", *when]
    summary = [
        f"{len(rows)} claims of the papers and of our own: {tally(verdicts.values())}. [All of them](results/claims.md), with numbers, "
        "commands, commits and dates; a test works the verdicts out again from the evidence."
    ]
    return {"claims": full, "summary": summary, "recipes": recipe_table(entries, verdicts)}


def tally(verdicts):
    """ "3 seen, 2 not seen" of verdicts."""
    verdicts = list(verdicts)
    return ", ".join(f"{verdicts.count(v)} {v}" for v in (SEEN, NOT_SEEN, OPPOSITE, NOT_MADE) if v in verdicts)


def recipe_table(entries, verdicts):
    """Lines of README's table of recipes."""
    runs = runs_of("defaults") if "defaults" in entries else {}
    yield "| recipe | papers | the idea in one line | with no flag, on the tiny model | claims tried here, the papers' and ours |"
    yield "|---|---|---|---|---|"
    for name, (papers, idea, ids, report) in RECIPES.items():
        own = tally(v for i, v in verdicts.items() if i.split("-")[0] in ids)
        first = f"| [{name}](recipes/{name}) | {papers} | {idea}"
        if not runs:
            yield f"{first} | - | [{own}](results/{report}/report.md) |"
            continue
        by_seed = runs[name.removesuffix(".py")]
        before = [100 * next(r["eval/accuracy"] for r in by_seed[s] if "eval/accuracy" in r) for s in sorted(by_seed)]
        end = after(runs, name.removesuffix(".py"))
        updates = max(r["step"] for r in by_seed[0])
        minutes = statistics.mean(entries["defaults"]["arm_minutes"][name.removesuffix(".py")])
        gain = f"{statistics.mean(before):.0f} % -> {spread(end)} % held-out in {updates} updates"
        cost = f"{minutes:.1f} minutes of one core ({len(end)} {'seed' if len(end) == 1 else 'seeds'})"
        yield f"{first} | {gain}, {cost} | [{own}](results/{report}/report.md) |"


MARKS = {
    name: (f"<!-- {name}: written by results/reproduce.py table -->", f"<!-- end of {name} -->")
    for name in ("claims", "summary", "recipes")
}


def written():
    """{path: text} of the files that hold the tables, as they should be."""
    lines = tables()
    page, readme = RESULTS / "claims.md", RESULTS.parent / "README.md"
    text = fill(readme.read_text(), MARKS["recipes"], lines["recipes"], readme.name)
    return {
        page: fill(page.read_text(), MARKS["claims"], lines["claims"], page.name),
        readme: fill(text, MARKS["summary"], lines["summary"], readme.name),
    }


def write():
    """Writes results/claims.md and README's tables."""
    for path, text in written().items():
        path.write_text(text)
