r"""MathVerifier against trl.rewards.accuracy_reward: throughput, verdicts, and inputs made to break a verifier.

    python benchmarks/bench_verifier.py            # about three minutes on two idle cores
    python benchmarks/bench_verifier.py --quick    # within a minute, the same bars on less work

Work: the golds of MATH-500 (../shared/data/math500.jsonl; else 40 golds listed here) in 20 answer styles, the verdicts
of which are known by construction. One batch = one style over all golds, so hardly a pair of gold and answer occurs
twice in it. Both see the same batches, in turns, and a figure is the median of the turns. accuracy_reward gets its
golds as $gold$, the form that it parses best. Start-up (imports, workers) is left out on both sides. "literal" golds
are integers and plain decimals; `literal_speedup` is over the styles that answer with the number itself.
"""

import argparse
import json
import random
import re
import resource
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import verifier as verifier_module  # noqa: E402
from verifier import MathVerifier  # noqa: E402

BARS = {
    "literal_speedup": 20.0,  # numbers are decided without SymPy: anything less means that this path is broken
    "overall_speedup": 1.5,  # two workers on two cores, less the price of talking to them
    "verdicts_worse": 0,  # verdicts that accuracy_reward gets right and we get wrong
    "hostile_overrun_s": 0.5,  # time beyond timeout_s in which every hostile input is answered
    "hostile_crashes": 0,
    "peak_mb": 512,  # memory_mb: no worker may hold more
}
TIMEOUT_S = 5.0
BUILT_IN = (
    r"34;-7;0;1234567;0.25;27.0;-3.5;100;12;9901;\frac{14}{3};-\frac{35}{9};\frac43;3\sqrt{13};11\sqrt2;\pi;"
    r"288 \pi;6 - 5i;p - q;x^5 - x^4 + 1;2k+2;(a+5)(b+2);x=5;y = 2x + 3;1,-2;3, 5, 7;(6,31,-1);(3,4];"
    r"\left( 3, \frac{\pi}{2} \right);(2,\infty);(0,9) \cup (9,36);"
    r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix};52_8;90^\circ;\text{Evelyn};\text{(C)};\$32,\!348;"
    r"5.4 \text{ cents};1 \pm \sqrt{19};\cot x"
).split(";")
MB = 1 << 20


def is_literal(gold):
    return re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", gold) is not None


def can_be_rewritten(gold):
    """Whether 2 * gold / 2 is surely the same answer: no list, relation, unit, word, matrix or base."""
    return re.fullmatch(r"(?:\\(?:sqrt|[dt]?frac|pi|cdot)(?![a-z])|[-+^{}() ]|[0-9a-z.])+", gold) is not None


def styles(gold, other):
    """[(name, completion, expected reward)]: 15 right answers and 5 that must earn nothing."""
    reasoning = "We compute $2+2=4$, then $4 \\cdot 3 = 12$, so the sum is less than 100. " * 40
    literal = is_literal(gold)
    rewritten = rf"\frac{{2 \cdot ({gold})}}{{2}}" if can_be_rewritten(gold) else gold
    right = {
        "boxed": rf"\boxed{{{gold}}}",
        "sentence": rf"Therefore the value is $\boxed{{{gold}}}$, as desired.",
        "display": rf"\[ \boxed{{{gold}}} \]",
        "dapo": f"We add both sides.\nAnswer: ${gold}$",
        "dapo bold": f"We add both sides.\n\n**Answer:** ${gold}$",
        "dapo boxed": rf"Answer: $\boxed{{{gold}}}$",
        "phrase": f"The final answer is ${gold}$. I hope it is correct.",
        "long": reasoning + rf"So we get $\boxed{{{gold}}}$.",
        "second thoughts": rf"So $\boxed{{{other}}}$. Wait, no, that is wrong: we find $\boxed{{{gold}}}$.",
        "thinking": rf"<think>Perhaps \boxed{{{other}}}</think>The result is $\boxed{{{gold}}}$.",
        "chinese": f"所以答案是 ${gold}$。",
        "heading": f"### Final Answer\n\n${gold}$",
        "unit": rf"\boxed{{{gold}\text{{ cm}}}}" if literal else rf"\boxed{{ {gold} }}",
        "named": rf"\boxed{{x = {gold}}}" if literal else rf"$$\boxed{{{gold}}}$$",
        "rewritten": rf"Thus \boxed{{{rewritten}}}.",
    }
    wrong = {
        "other number": rf"So we get $\boxed{{{other}}}$.",
        "plus one": rf"\boxed{{{gold}+1}}" if literal else rf"\boxed{{{other}-\sqrt{{2}}}}",
        "cut off": rf"So we get \boxed{{{gold}",
        "no marker": f"{reasoning}The value is {gold} + 0 and then",
        "hedge": rf"It is \boxed{{{other}}} or \boxed{{{gold}}}.",
    }
    return [(n, text, 1.0) for n, text in right.items()] + [(n, text, 0.0) for n, text in wrong.items()]


def hostile():
    """[(name, gold, completion)]: inputs that hang, crash, flood or mislead a verifier. None may take long."""

    def nest(opening, closing, times, core="34"):
        return opening * times + core + closing * times

    boxed = {
        "tower of 10": "10^{10^{10}}", "tower of 9": "9^{9^{9}}", "higher tower": "9^{9^{9^{9}}}", "2^1e9": "2^{10^9}",
        "tower of 5": r"\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}", "difference": "10^{10^{9}}-10^{10^{9}}+34",
        "factorial": "(10^7)!", "triple factorial": "((100!)!)!", "200 factorials": "34" + "!" * 200,
        "binomial": r"\binom{10^7}{5\cdot10^6}", "harmonic": r"\sum_{k=1}^{10^6}\frac{1}{k}",
        "sum of k^k": r"\sum_{k=1}^{10^9}k^k", "product": r"\prod_{k=1}^{10^5}k",
        "double sum": r"\sum_{i=1}^{10^4}\sum_{j=1}^{10^4}\frac{1}{i+j}",
        "integral": r"\int_0^1 e^{-x^2}\sin(x^3)\ln(x+1)dx",
        "power of a sum": "(x+y+z+w+1)^{60}",
        "power 200": "(a+b+c+d+e+f+g)^{200}-1", "root of a tower": r"\sqrt[3]{7^{7^{7^7}}}",
        "log of a tower": r"\log_2(3^{3^{3^{3}}})", "tan tower": nest(r"\tan(", ")", 60),
        "x tower": nest("x^{", "}", 80, "x"),
        "limit": r"\lim_{n\to\infty}\sum_{k=1}^{n}\frac{\sin k}{k^{3/2}}",
        "roots": "+".join(rf"\sqrt{{{p}}}" for p in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)),
        "braces": nest("{", "}", 900), "parentheses": nest("(", ")", 300), "fractions": nest(r"\frac{1}{", "}", 150),
        "square roots": nest(r"\sqrt{", "}", 200), "bars": nest("|", "|", 300),
        "long sum": "+".join(["1"] * 900), "long product": r"\cdot".join(["2"] * 300),
        "list": ",".join(map(str, range(500))),
        "plus minus": r"\pm".join(map(str, range(1, 25))),
        "inequalities": "<".join(map(str, range(300))),
        "variables": "".join(f"x_{{{i}}}" for i in range(250)), "1900 digits": "9" * 1900, "1e-999": "1e-999",
        "0/0": r"\frac{0}{0}", "0^0^0": "0^{0^{0}}", "oo - oo": r"\infty-\infty", "i^i^i": "i^{i^{i}}",
        "python": "__import__('os').system('sleep 60')", "input": r"\input{/etc/passwd}", "loop": r"\def\x{\x\x}\x",
        "backslashes": "\\" * 1000, "carets": "^" * 1500, "open environment": r"\begin{matrix}1&2\\3",
        "left only": r"\left(\left[\left\{34", "combining": "3\u0301" * 600,
    }  # fmt: skip
    texts = {
        "1 MB number": rf"\boxed{{{'9' * MB}}}", "1 MB open boxes": r"\boxed{" * (MB // 7), "1 MB hashes": "#" * MB,
        "1 MB boxes": r"\boxed{34}," * (MB // 11), "1 MB open braces": r"\boxed" + "{" * MB,
        "1 MB escapes": r"\boxed{" + "\\" * MB, "1 MB answers": "The answer is " * (MB // 14),
        "1 MB answer to": "answer to " * (MB // 10), "1 MB spaces": "Answer" + " " * MB + ": 34",
        "1 MB lines": "\n" * MB + "answer", "1 MB stars": "**" * (MB // 2), "1 MB dollars": "Answer: " + "$" * MB,
        "1 MB think": "<think>" * (MB // 7), "1 MB zero width": "\u200b" * MB + r"\boxed{34}",
        "1 MB prose": "Let us compute 2 + 2 = 4. " * (MB // 26), "spaces": rf"\boxed{{3{' ' * 1990}4}}",
        "dollars": "Answer: " + "$x$ and " * 240,
    }  # fmt: skip
    return [(name, "34", rf"So \boxed{{{answer}}}.") for name, answer in boxed.items()] + [
        (name, "34", text) for name, text in texts.items()
    ]


def load_golds(quick):
    path = ROOT.parent / "shared" / "data" / "math500.jsonl"
    if path.exists():
        golds = [json.loads(line)["answer"] for line in path.open()]
    else:
        print(f"{path} is absent: using the {len(BUILT_IN)} built-in golds")
        golds = BUILT_IN
    random.Random(0).shuffle(golds)
    if not quick:
        return golds
    # More than 20 hard ones: math-verify remembers its last 20 parses, which no real batch would let it profit from.
    return [g for g in golds if is_literal(g)][:20] + [g for g in golds if not is_literal(g)][:40]


def timed(function, *args):
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def compare(golds, literal_turns, other_turns):
    """[(style, literal?, our seconds, TRL's seconds)], our errors, TRL's errors, ours that TRL gets right, SymPy share."""
    from trl.rewards import accuracy_reward

    table = {gold: styles(gold, 98765) for gold in golds}
    names = [name for name, _, _ in styles("1", 2)]
    accuracy_reward(
        [[{"content": text}] for _, text, _ in table[golds[0]]], [f"${golds[0]}$"] * len(names)
    )  # warms up
    rows, ours_wrong, theirs_wrong, worse, pooled = [], [], [], [], 0
    for turn, literal in [(turn, True) for turn in range(literal_turns)] + [
        (turn, False) for turn in range(other_turns)
    ]:
        chosen = [gold for gold in golds if is_literal(gold) == literal]
        verifier_module._clean.cache_clear()
        verifier_module._number.cache_clear()
        with MathVerifier(workers=2, timeout_s=TIMEOUT_S) as verifier:
            verifier.verify("x^2", r"\boxed{x^3}")  # starts the workers
            for k, style in enumerate(names):
                texts = [table[gold][k][1] for gold in chosen]
                expected = table[chosen[0]][k][2]
                messages = [[{"role": "assistant", "content": text}] for text in texts]
                both = [(verifier, texts, chosen), (accuracy_reward, messages, [f"${gold}$" for gold in chosen])]
                order = (0, 1) if (turn + k) % 2 else (1, 0)
                results = {side: timed(*both[side]) for side in order}
                rows.append((style, literal, results[0][0], results[1][0]))
                if turn == 0:
                    for gold, ours, theirs in zip(chosen, results[0][1], results[1][1], strict=True):
                        ours_wrong += [(style, gold)] * (ours != expected)
                        theirs_wrong += [(style, gold)] * (theirs != expected)
                        worse += [(style, gold)] * (theirs == expected != ours)
            pooled += verifier.pooled if turn == 0 else 0
    return rows, ours_wrong, theirs_wrong, worse, pooled


def attack(timeout_s):
    """(seconds beyond timeout_s at worst, its name, reasons) over the hostile set, one worker, one input at a time."""
    with MathVerifier(workers=1, timeout_s=timeout_s, memory_mb=BARS["peak_mb"]) as verifier:
        verifier.verify("x^2", r"\boxed{x^3}")
        overruns, reasons = [], Counter()
        for name, gold, text in hostile():
            overrun = float("inf")
            for _ in range(3):  # an overrun is real if it repeats: the machine may have been busy with something else
                seconds, verdict = timed(verifier.verify, gold, text)
                overrun = min(overrun, seconds - timeout_s)
                if overrun <= BARS["hostile_overrun_s"]:
                    break
            overruns.append((overrun, name))
            reasons[verdict.reason] += 1
    return *max(overruns), reasons


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="60 golds and a shorter timeout: within a minute")
    quick = parser.parse_args().quick
    golds = load_golds(quick)
    rows, ours_wrong, theirs_wrong, worse, pooled = compare(golds, 3 if quick else 5, 1 if quick else 3)

    literal_styles = {style for style, _, _ in styles("1", 2)} - {"rewritten", "plus one"}
    print(f"{'style':16} {'golds':8} {'ours ms':>8} {'TRL ms':>8} {'ratio':>7}     per verdict, median of the turns")
    medians = {}
    for style, literal in dict.fromkeys((style, literal) for style, literal, _, _ in rows):
        n = sum(is_literal(gold) == literal for gold in golds)
        both = [(a, b) for s, was, a, b in rows if (s, was) == (style, literal)]
        ours, theirs = (statistics.median(side) for side in zip(*both, strict=True))
        medians[style, literal] = ours, theirs
        kind = "literal" if literal else "other"
        print(f"{style:16} {kind:8} {1e3 * ours / n:8.3f} {1e3 * theirs / n:8.3f} {theirs / ours:7.1f}")

    def speedup(keys):
        ours, theirs = (sum(medians[key][side] for key in keys) for side in (0, 1))
        return theirs / ours

    overrun, slowest, counts = attack(1.0 if quick else 2.0)
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (1 << (20 if sys.platform == "darwin" else 10))
    figures = {
        "literal_speedup": round(speedup([(style, True) for style in literal_styles]), 1),
        "overall_speedup": round(speedup(list(medians)), 2),
        "other_speedup": round(speedup([key for key in medians if not key[1]]), 2),
        "verdicts": 20 * len(golds),
        "verdicts_worse": len(worse),
        "our_errors": len(ours_wrong),
        "trl_errors": len(theirs_wrong),
        "share_through_sympy": round(pooled / (20 * len(golds)), 3),
        "hostile_inputs": len(hostile()),
        "hostile_timeouts": counts["timeout"],
        "hostile_overrun_s": round(overrun, 3),
        "hostile_crashes": counts["crash"],
        "peak_mb": round(peak_mb),
    }
    for style, gold in ours_wrong[:10]:
        print(f"our error: {style}: {gold}")
    print(f"hostile: {dict(counts)}; longest: {slowest}")
    at_least = {"literal_speedup", "overall_speedup"}
    ok = all(figures[k] >= bar if k in at_least else figures[k] <= bar for k, bar in BARS.items())
    print(json.dumps({"name": "verifier", "figures": figures, "bars": BARS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
