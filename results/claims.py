"""Every claim that the project looked into, with its verdict worked out from the evidence: results/claims.md and README's table.

    python results/reproduce.py table          writes both again; a test fails where they are not what the evidence says

A verdict compares held-out accuracies (or what the row names) of two groups of runs, paired by seed and arm:

    seen       the mean difference lies more than two standard errors on the claimed side
    opposite   as far on the other side
    not seen   neither; or what was claimed to happen did not

Two standard errors of three to nine pairs are a rough rule, and the same for every row. "Ours" are claims of this project.
"""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from results.claim_gradloc import largest_spike
from results.running import RESULTS, collapse_step

SEEN, NOT_SEEN, OPPOSITE = "seen", "not seen", "opposite"


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
    return [max(r[metric] for r in runs[arm][s] if metric in r) for s in sorted(runs[arm])]


def collapsed(runs, arm):
    """In how many seeds the reward stays below half of its peak to the end."""
    return sum(collapse_step(records) is not None for records in runs[arm].values())


# ---------------------------------------------------------------- judging


def text_of(values, digits=3):
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.{digits}g}"
    return f"{mean:.{digits}g} ± {statistics.stdev(values):.2g}"


def differences(pairs):
    """[(of each pair the list before, the list after)] -> one list of differences, paired by position."""
    return [b - a for before, later in pairs for a, b in zip(before, later, strict=True)]


def rises(values):
    """Verdict on "the difference is above 0", by the rule at the top."""
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    return SEEN if mean > 2 * error else OPPOSITE if mean < -2 * error else NOT_SEEN


def points(values, what="points"):
    return f"{text_of(values)} {what} over {len(values)} pairs"


def differ(first, second):
    """Do two groups of runs differ by more than two standard errors of the difference of their means?"""
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(second) / len(second))
    return abs(statistics.mean(first) - statistics.mean(second)) > 2 * error


# ---------------------------------------------------------------- GradLoc

BLOG = "GradLoc blog, 2026-02"


def planted(kind, method="directional"):
    return read("gradloc/planted.json")["rates"][kind][method]


def found(kind, cause):
    rates = planted(kind)
    verdict = SEEN if rates["found"] >= 0.95 and (rates["classified"] or 1.0) >= 0.95 else NOT_SEEN
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
    ), f"largest norm over the median before it {text_of(plain)} -> {text_of(clipped)} ({len(fall)} seeds)"


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
    return SEEN if max(values) < 0.5 else NOT_SEEN, f"smallest correlation {text_of(values)}"


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
    return rises(fall), f"{text_of(without)} -> {text_of(with_it)}"


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
    return rises(fall), f"k3 {text_of(without, 2)} -> {text_of(replayed, 2)}, N = 1, 2, 4, 8"


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
    return verdict, ", ".join(f"N={n}: {text_of(v)} %" for n, v in ends.items())


@claim("minirl-cold-starts", "Different cold starts end at comparable accuracy", PAPER, "minirl")
def _():
    runs = runs_of("minirl")
    ends = {name: after(runs, f"cold start: {name}") for name in ("steps", "split", "words")}
    verdict = OPPOSITE if differ(ends["steps"], ends["words"]) else SEEN
    return verdict, ", ".join(f"{name} {text_of(v)} %" for name, v in ends.items())


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


# ---------------------------------------------------------------- the table

BEGIN, END = "<!-- claims: written by results/reproduce.py table -->", "<!-- end of claims -->"


def made():
    """{evidence: {"command", "minutes", "seeds", "commit", "date"}} of every piece of evidence."""
    return read("made.json")


def tables():
    """(the lines of claims.md, the lines of README's summary)."""
    entries, rows, counts = made(), [], {}
    for row in CLAIMS:
        verdict, numbers = row.judge()
        entry = entries[row.evidence]
        counts.setdefault(row.id.split("-")[0], []).append(verdict)
        cells = [row.id, row.statement, row.source, f"**{verdict}**", numbers, f"`{entry['command']}`"]
        rows.append("| " + " | ".join([*cells, str(entry["minutes"]), entry["seeds"]]) + " |")
    head = [
        "| id | claim | source | verdict | numbers | command | minutes | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    when = [f"| `{e['command']}` | {e['commit']} | {e['date']} |" for e in entries.values()]
    full = [*head, *rows, "", "| evidence | commit | date |", "|---|---|---|", *when]
    verdicts = [v for vs in counts.values() for v in vs]
    short = [
        f"{len(rows)} claims: {', '.join(f'{verdicts.count(v)} {v}' for v in (SEEN, NOT_SEEN, OPPOSITE))}. "
        "[All of them](results/claims.md), with numbers and commands; a test works the verdicts out again."
    ]
    return full, short


def fill(text, lines, name):
    """Replaces what lies between the two marks. ValueError where a mark is missing."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"{name} has lost its marks {BEGIN} ... {END}: put them back where the claims belong")
    return text.split(BEGIN)[0] + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + text.split(END)[1]


def write():
    """results/claims.md and README's part."""
    for path, lines in zip((RESULTS / "claims.md", RESULTS.parent / "README.md"), tables(), strict=True):
        path.write_text(fill(path.read_text(), lines, path.name))
