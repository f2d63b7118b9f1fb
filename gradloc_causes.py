"""Why the gradient spiked: the cause from a report's numbers, the flag that treats it, and the sentence that says so.

Source: Tencent Hunyuan, "GradLoc" blog, 2026-02, for the three causes and their bands; what counts as evidence is ours.
"""

import math
import statistics

CAUSES = {
    "A.1": "token-level mismatch, training against sampling",
    "A.2": "sequence-level training-inference mismatch",
    "B": "layer-wise gradient heterogeneity",
    "N": "a value that is not finite",
    "unclassified": "no known cause",
}
REMEDIES = {
    "A.1": "--token_clip icepop",
    "A.2": "--seq_clip_low 0.995 --seq_clip_high 1.005",
    "B": "--layer_clip",
    "N": "",
    "unclassified": "",
}
# A.1 where the weight is the policy's own movement: the same evidence under another name, with more that treats it
STALE = "stale token: the policy has moved since sampling"
STALE_REMEDY = "fewer updates a sampling, or a smaller --learning_rate, or --token_clip icepop"
NOT_JUDGED = "cause not judged"


def diagnose(tokens, sequences, layers, token_band=(0.5, 5.0), seq_band=(0.995, 1.005), layer_factor=5.0, apart=4.0):
    """Cause of a spike from its evidence. -> (cause, evidence sentences, what could not be judged).

    tokens     [{"share", "omega", "ratio", "boost"}] signed shares of the norm; the others may be None or absent
    sequences  [{"share", "rho", "log_rho_z"}]: rho may be None; log_rho_z = |log rho - median| / (1.4826 MAD) over the step's
               sequences
    layers     {name: {"norm", "median", "ratio"}}: ratio to the layer's own median, None without history

    A.1  the tokens with a weight outside token_band hold at least half of the norm that the listed tokens hold. The weight: omega;
         or the staleness r = pi_theta/pi_old, where the loss does multiply by it (boost, the token's |dL/dlogp| over the median
         of its sequence, is 2 or more). r and pi_old/mu can cancel in omega while PPO's loss, which leaves r unbounded
         for A < 0, takes r alone; the clip on omega treats both. ours: the blog looks at omega only
    A.2  else, the sequences with omega inside and rho outside seq_band hold at least half of it, and they stand out of the step (z > 3)
    B    else, some layer is more than layer_factor times its own median and more than twice as far from it as the
         median layer is: heterogeneous, not everything at once. Before A.2, and before an A.1 whose omegas are the smaller
         factor, if it is more than `apart` times as far: omega and rho weigh a token's gradient alike in all layers
    paper: bands TokenClip [0.5, 5], SeqClip (0.995, 1.005); which share makes a cause, and what "outside its history" means for a
    layer, not stated; we: half, and the factors above, because they separate planted causes (results/gradloc/report.md).
    """
    evidence, not_judged = [], []
    ratios = {name: layer["ratio"] for name, layer in layers.items() if layer["ratio"] is not None}
    middle = statistics.median(ratios.values()) if ratios else 0.0
    furthest = max(ratios, key=ratios.get) if len(ratios) > 1 else None
    spread = 1.0  # how much further from its history one layer is than the median layer, where that says something
    if furthest and ratios[furthest] > layer_factor and ratios[furthest] > apart * middle:
        spread = ratios[furthest] / max(middle, 1e-6)
    total = sum(abs(t["share"]) for t in tokens) or 1.0
    judged = [t for t in tokens if t["omega"] is not None or t.get("ratio") is not None]
    outside = [(t, *weight) for t in judged if (weight := outside_weight(t, token_band)) is not None]
    part = sum(abs(t["share"]) for t, _, _ in outside) / total
    factor = max((max(value, 1 / max(value, 1e-30)) for _, _, value in outside), default=1.0)
    if not tokens:
        not_judged.append("A.1 and A.2: no token stands out")
    elif not judged:
        not_judged.append("A.1 and A.2: the inference engine's log-probs (rollout_logps) were not recorded")
    elif part >= 0.5 and not factor < spread:  # a NaN omega counts
        worst, name, value = max(outside, key=lambda x: abs(x[0]["share"]))
        evidence.append(
            f"{len(outside)} of the {len(tokens)} listed tokens have a weight outside [{token_band[0]:g}, {token_band[1]:g}]; they "
            f"hold {100 * part:.0f} % of what the list holds; the largest has {WEIGHTS[name]} = {value:.3g}"
        )
        if stale(worst):
            evidence.append(
                f"it is stale: the policy moved since it sampled (r = pi_theta/pi_old = {worst['ratio']:.3g}) more than the engines "
                f"disagree (pi_old/mu = {_shown(worst.get('mismatch'))}): fewer updates a sampling, a smaller learning rate or the "
                "clip treat that"
            )
        return "A.1", evidence, not_judged
    elif outside:
        evidence.append(
            f"tokens with a weight outside the band hold {'only ' if part < 0.5 else ''}{100 * part:.0f} % of what the list holds"
            + ("" if part < 0.5 else ", but one layer is further outside its own history")
        )
    else:
        evidence.append(f"the weight of every listed token lies in [{token_band[0]:g}, {token_band[1]:g}]")
    known = [s for s in sequences if s["rho"] is not None]
    drifting = [s for s in known if not seq_band[0] < s["rho"] < seq_band[1]]
    share = sum(abs(s["share"]) for s in sequences) or 1.0
    apart_from_others = standing_out(sequences, seq_band)
    part = sum(abs(s["share"]) for s in apart_from_others) / share
    if part >= 0.5 and spread == 1.0:
        worst = max(apart_from_others, key=lambda s: abs(s["share"]))
        z = (
            ""
            if worst["log_rho_z"] is None
            else f", {worst['log_rho_z']:.0f} robust deviations from the step's median"
        )
        evidence.append(
            f"rho (geometric mean of omega) is {worst['rho']:.4g}, outside ({seq_band[0]:g}, {seq_band[1]:g}){z}, in sequences "
            f"with {100 * part:.0f} % of what the listed ones hold"
        )
        return "A.2", evidence, not_judged
    if known:
        evidence.append(
            f"rho is outside ({seq_band[0]:g}, {seq_band[1]:g}) in {len(drifting)} of {len(known)} listed sequences, but "
            + (
                "in none that stands out of the step" if not apart_from_others
                else "these hold the smaller part" if part < 0.5
                else "a sequence's weight is the same in all layers"
            )
        )  # fmt: skip
    if furthest is None:
        not_judged.append("B: fewer than 8 earlier steps of layer norms are recorded")
        return "unclassified", evidence, not_judged
    if ratios[furthest] > layer_factor and ratios[furthest] > 2 * middle:
        evidence.append(
            f"{furthest} is at {ratios[furthest]:.1f} times its own median norm while the median layer is at {middle:.1f} times"
        )
        return "B", evidence, not_judged
    evidence.append(
        f"layers move together: the largest, {furthest}, is at {ratios[furthest]:.1f} times its median, the median layer at {middle:.1f}"
    )
    return "unclassified", evidence, not_judged


WEIGHTS = {"omega": "omega = pi_theta/mu", "ratio": "r = pi_theta/pi_old"}


def outside_weight(token, band):
    """("omega" or "ratio", its value) of a token whose weight lies outside the band, as in `diagnose`; else None."""
    omega, ratio, boost = token["omega"], token.get("ratio"), token.get("boost")
    if omega is not None and not band[0] <= omega <= band[1]:
        return "omega", omega
    if ratio is not None and not band[0] <= ratio <= band[1] and boost is not None and boost >= 2:
        return "ratio", ratio
    return None


def standing_out(sequences, band):
    """The sequences whose rho is outside the band and more than 3 robust deviations from the step's median."""
    known = [s for s in sequences if s["rho"] is not None and not band[0] < s["rho"] < band[1]]
    return [s for s in known if s["log_rho_z"] is None or s["log_rho_z"] > 3]


def stale(token):
    """Is a token's weight the policy's own movement (ratio) rather than the engines' disagreement (mismatch)?"""
    ratio, mismatch = token.get("ratio"), token.get("mismatch")
    if ratio is None or not ratio > 0:
        return False
    return mismatch is None or not mismatch > 0 or abs(math.log(ratio)) > abs(math.log(mismatch))


def _shown(value):
    return "not recorded" if value is None else f"{value:.3g}"


def _advantage_outlier(sequences):
    """A sentence where the leading sequence's advantage is far larger than the others'."""
    sizes = [abs(s["advantage"]) for s in sequences if s["advantage"] is not None]
    if len(sizes) < 3 or sequences[0]["advantage"] is None:
        return None
    median = statistics.median(sizes[1:])
    if not abs(sequences[0]["advantage"]) > 5 * median > 0:
        return None
    first = sequences[0]["advantage"]
    return f"the advantage of the first listed sequence, {first:.3g}, is {abs(first) / median:.0f} times the others'"


def diagnose_into(report, token_band, seq_band, clips_in=""):
    """Writes cause, evidence, what was not judged, and remedy into a SpikeReport.

    clips_in: the script that has the flags of TokenClip and SeqClip, where the one that runs has not.
    """
    tokens = [vars(t) for t in report.tokens]
    cause, report.evidence, report.not_judged = diagnose(tokens, report.sequences, report.layers, token_band, seq_band)
    outlier = _advantage_outlier(report.sequences)
    if outlier:
        report.evidence.append(outlier)
    report.cause = cause
    report.remedy = STALE_REMEDY if cause_name(report, token_band) == STALE else REMEDIES[cause]
    if clips_in and cause in ("A.1", "A.2"):
        report.remedy += f" of {clips_in}"
    if report.trigger["reason"] == "every_n_steps":
        report.remedy = ""  # nothing to treat


def _worst_outside(report, band):
    """The token with the largest share of those whose weight lies outside the band: what an A.1 is about."""
    return max((t for t in report.tokens if outside_weight(vars(t), band)), key=lambda t: abs(t.share))


def cause_name(report, token_band):
    """The cause in words, as the report's sentence puts it."""
    if report.cause == "A.1" and stale(vars(_worst_outside(report, token_band))):
        return STALE
    if report.cause == "unclassified" and report.not_judged:
        return NOT_JUDGED
    return CAUSES[report.cause]


def _place(item, many):
    """`sequence 5, micro-batch 1, on rank 0` of a token or a sequence of the report."""
    item = item if isinstance(item, dict) else vars(item)
    part = f", micro-batch {item['micro_batch']}," if many else ""
    return f"sequence {item['sequence']}{part} on rank {item['rank']}"


def place_key(item):
    """(rank, micro-batch, sequence) of a token or a sequence of a report."""
    item = item if isinstance(item, dict) else vars(item)
    return item["rank"], item["micro_batch"], item["sequence"]


def sentence(report, token_band, seq_band):
    """The headline: who, where, why, and the flag that treats it."""
    head, many = f"step {report.step}: ", report.num_micro_batches > 1
    # what the norm is made of, not what opposes it
    t = max(report.tokens, key=lambda x: x.share) if report.tokens else None
    if report.cause == "N":
        text = head + report.evidence[0]
        return text + (f"; token {t.position} ({t.token!r}) of {_place(t, many)}" if t is not None else "")
    if report.grad_norm == 0:
        return head + report.note
    if t is None:
        text = head + f"gradient norm {report.grad_norm:.3g}, and no token stands out"
        if report.search and report.search["exhausted"]:
            text = (
                head
                + f"the search budget of {report.search['budget']} backward passes ended before a token was reached"
            )
    else:
        text = (
            head
            + f"{100 * t.share:.0f} % of the gradient norm is token {t.position} ({t.token!r}) of {_place(t, many)}"
        )
        rest = [x for x in report.tokens if x is not t]
        if rest and abs(rest[0].share) > 0.1:
            text += f", {100 * rest[0].share:.0f} % the next"
        whole = next((x["share"] for x in report.sequences if place_key(x) == place_key(t)), None)
        if whole is not None and whole > max(0.5, 1.5 * t.share):
            text += f", {100 * whole:.0f} % its whole sequence"
        if t.layers:
            text += f", {_leading(t.layers)}"
    if report.cause == "A.1":
        worst = _worst_outside(report, token_band)
        name, value = outside_weight(vars(worst), token_band)
        where = "" if worst is t else f" at token {worst.position} of {_place(worst, many)}"
        kind = "stale token" if stale(vars(worst)) else "token mismatch"
        text += f"; {WEIGHTS[name]} = {value:.2g}{where} ({kind})"
    elif report.cause == "A.2":
        worst = max(standing_out(report.sequences, seq_band), key=lambda x: abs(x["share"]))
        where = "" if t is not None and place_key(worst) == place_key(t) else f" in {_place(worst, many)}"
        text += f"; rho = {worst['rho']:.3g}{where} with omega in its band (sequence mismatch)"
    elif report.cause == "B":
        name = max((n for n in report.layers if report.layers[n]["ratio"]), key=lambda n: report.layers[n]["ratio"])
        text += f"; {name} at {report.layers[name]['ratio']:.1f} times its own median (layer heterogeneity)"
    elif report.not_judged:
        text += "; cause not judged: " + "; ".join(report.not_judged)
    else:
        text += "; no known cause"
    if report.trigger["reason"] == "every_n_steps":
        return text + "; no spike, looked at in turn"
    return text + (f": {report.remedy}" if report.remedy else "")


def _leading(layers):
    """The fewest layers that hold 80 % of the squared norm, as `layers 0-2` or a list."""
    total, taken = sum(n * n for n in layers.values()), []
    for name in sorted(layers, key=layers.get, reverse=True):
        if sum(layers[n] ** 2 for n in taken) >= 0.8 * total:
            break
        taken.append(name)
    numbers = sorted(int(n.split()[1]) for n in taken if n.startswith("layer "))
    others = [n for n in taken if not n.startswith("layer ")]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return ", ".join([f"layers {numbers[0]}-{numbers[-1]}", *others])
    return ", ".join([f"layer {n}" for n in numbers] + others)
