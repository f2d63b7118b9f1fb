r"""Math verification that cannot hang: the reward function of every recipe.

    with MathVerifier(workers=2, timeout_s=5.0, memory_mb=512) as verifier:
        verifier([r"... so \boxed{34}", "I do not know"], ["34", "34"])       # [1.0, 0.0]
    verify("34", "Answer: 34. We are done")                                    # Verdict(reward=1.0, reason='correct')
    check_gold(r"f(x)=ax+b, where b is an arbitrary integer")                  # 'prose': no reward can come from it

Three steps, each with its own reasons:

1. The gold comes first. One that nothing can be compared with is `bad_gold`: reward None, so no gradient. Check golds
   when data load (`check_gold`, `MathVerifier.check_golds`) and drop those rows.
2. The answer is taken from the text by the rule of `extract_answer`: the last one counts, a bare number is no answer.
3. Two rational numbers are compared exactly, here, without SymPy. The rest goes to math-verify in a worker process,
   which the kernel kills when its time is up, whatever C code it sits in.

What counts as equal: a decimal equals an exact gold only if it is exactly that number (0.25 is 1/4, but 0.333333 is
not 1/3 and 0.785398 is not pi/4: rounding is what a model does that did not find the value); `rel_tol` allows
approximation for data whose golds are measurements. Units are stripped, not compared. A percentage from 1% on equals
its number with and without the sign (50% = 50 = 0.5). A number base is compared where both sides name one. The order
of a tuple counts, that of a list or set does not. 1,234 without a blank is one number. With `exact=True` only a
literal number counts, so that an arithmetic task cannot be answered with its own question (17 \cdot 2 for 34).

The workers: one supervisor process for each MathVerifier, started by `subprocess` (never a fork of a process that
holds torch), imports math-verify once and forks the workers, so a killed one is replaced in milliseconds. It knows
nothing of `__main__`, imports neither torch nor TRL, leaves the parent's signals alone and ends with its parent,
however that dies. POSIX only; numbers, words and `exact=True` need no worker and work everywhere.
"""

import functools
import gc
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import unicodedata
import weakref
from collections import Counter, deque
from fractions import Fraction
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple

MAX_ANSWER = 2000  # characters; math-verify reads no sum that is longer
MAX_PARTS = 50  # boxes that are joined to one answer
MAX_TAIL = 1 << 18  # characters from the end in which "Answer:" and its like are looked for
TASKS_PER_WORKER = 1000  # the caches of SymPy and ANTLR grow; a fresh fork costs milliseconds
POLL_S = 2.0  # how often an idle process looks whether its parent is still there
START_S = 120.0  # importing SymPy takes half a second, but a minute on a cold network disk
GRACE_S = 5.0  # beyond a task's limit, when the parent stops waiting for the kernel's alarm
GOLD_PATIENCE = 10  # a gold may take timeout_s of processor time, and this many times as long on a busy machine

REASONS = (
    "correct", "wrong", "no_answer", "truncated_box", "unparseable", "too_long", "timeout", "memory", "crash",
    "bad_gold",
)  # fmt: skip


class Verdict(NamedTuple):
    """reward: 1.0 (correct), None (bad_gold), 0.0 (all else). reason: one of REASONS."""

    reward: float | None
    reason: str


def _verdict(reason):
    return Verdict({"correct": 1.0, "bad_gold": None}.get(reason, 0.0), reason)


# ---------------------------------------------------------------------------------------------------------------------
# Where the answer is
# ---------------------------------------------------------------------------------------------------------------------

_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff]")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BARE = re.compile(r"[^\s$]+")
# What may stand between two boxes that together are one answer, as in "$\boxed{1}$ and $x = \boxed{-2}$".
_JOINT = re.compile(r"(?:[ \t$,;、，]|\\[()\[\],; ]|\\text\{|\}|\band\b|\bor\b|和|或|[A-Za-z] ?=)*")
# In lower case, each begins with plain letters that `re` finds fast, and every repetition is bounded: this runs in the
# trainer's own process on whatever the model wrote.
_MARKS = [
    re.compile(pattern, re.VERBOSE)
    for pattern in (
        r"""answers? (?: [\s*_}]{0,5}[:：][\s*_}]{0,9}
                     | (?:\s{1,5}to\s[^.\n]{0,40}?)?
                       (?:\s{0,5}=|\s{1,5}(?:is|are|equals|(?:should|must|will|would)\sbe))
                       (?:\s{1,5}(?:therefore|thus|then|hence|simply|just|indeed|clearly|given\sby|equal\sto))?
                       (?![a-z])[\s:：*]{0,9}
                     | (?<=<answer)>
                     | (?P<heading>[ \t*_]{0,9}\n) )""",
        r"答案[\s*]{0,5}(?:应该|应)?(?:是|为|等于|[:：])[\s*:：]{0,9}",
        r"\#\#\#\#(?<![^\n]\#\#\#\#)[ \t]{1,9}(?=\S)",
    )
]
_BEFORE_HEADING = re.compile(r"[ \t#*_]{0,9}(?:the )?(?:final )?")
_MATHS = re.compile(
    r"[\s*_]*(\$(?=\S)(?:\\\$|[^$\n])*(?<=[^\s\\])\$(?:(?:\s|,|;|、|，|\band\b|\bor\b|和|或)*\$[^$\n]+\$)*(?:\s*\\?%)?)"
    r"(?!\s*[=<>+*/^(-])"
)
_SENTENCE_END = re.compile(
    r"(?<=\S)\.(?=\s|\*|$)|[。！？；]|</|<\||\n|\*\*\s"
    r"|[,.]?\s+\(?(?:because|since|so|which|where|when|as|thus|hence|therefore)\b"
)
_STARTS_LIKE_MATHS = re.compile(r"[\s*_$]*(?:[A-Za-z]\w?\s*=[\s$]*)?[-+.0-9\\(\[{]")


def _box(text, begin):
    r"""What follows a \boxed or \fbox that ends at `begin`: (content, end), or (None, end) where it never closes."""
    if not text.startswith("{", begin):
        bare = _BARE.match(text, begin, begin + MAX_ANSWER + 1)  # \boxed 34
        return (bare.group(), bare.end()) if bare else (None, len(text))
    depth = 0
    for brace in _BRACES.finditer(text, begin, begin + MAX_ANSWER + 2):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[begin + 1 : brace.start()], brace.end()
    return (None if begin + MAX_ANSWER + 2 >= len(text) else text[begin:]), len(text)


def _marks_from_last(text, begin):
    """Where the content of each marker after `begin` starts, the last one first."""
    lower = text[begin:].lower()
    if len(lower) != len(text) - begin:  # a few letters outside ASCII grow
        lower = "".join(char.lower() if char.isascii() else char for char in text[begin:])
    marks = sorted((mark for pattern in _MARKS for mark in pattern.finditer(lower)), key=re.Match.start)
    for mark in reversed(marks):
        line_start = lower.rfind("\n", 0, mark.start()) + 1
        if mark.groupdict().get("heading") is None or _BEFORE_HEADING.fullmatch(lower, line_start, mark.start()):
            yield begin + mark.end()


def _phrase(text, start):
    """The answer after a marker such as "Answer:" that ends at `start`."""
    tail = text[start : start + MAX_ANSWER + 1].lstrip()
    for opening, closing in (("$$", "$$"), ("\\[", "\\]")):
        if tail.startswith(opening):
            return tail[2:].partition(closing)[0]
    line = tail.replace("\\(", "$").replace("\\)", "$")
    if maths := _MATHS.match(line):
        return maths.group(1)
    return _SENTENCE_END.split(line, maxsplit=1)[0]


def _within_limit(answer):
    if len(answer) > MAX_ANSWER:
        return None, "too_long"
    return (answer, "found") if _clean(answer) else (None, "no_answer")


def extract_answer(text):
    r"""The final answer in a completion: (answer, "found"), or (None, reason) with a reason of REASONS.

    The rule: the answer is what follows the marker that comes last. Markers are `\boxed{}` and `\fbox{}`; "Answer:"
    (DAPO); "the (final) answer is"; an "Answer" heading; `#### x` (GSM8K); `<answer>`; 答案是, 答案：. A marker inside
    a box belongs to the box. After a box, a phrase counts only if something like a formula follows it ("The answer is
    correct" takes nothing back). Boxes joined by commas, "and" or "or" on one line are one answer with several parts,
    so that hedging (`\boxed{12}` or `\boxed{34}`) earns nothing. A last box that never closes is `truncated_box`.
    Without a marker there is no answer: the last number of a text that was cut off is not one.
    Where the text thinks aloud, only what follows the last `</think>` is read; after a `<think>` that never closes
    there is no answer.
    """
    text = _INVISIBLE.sub("", text)
    if "</think>" in text:
        text = text[text.rfind("</think>") + len("</think>") :]
    if "<think>" in text:
        return None, "no_answer"
    commands, boxes, end = list(deque(_BOX.finditer(text), maxlen=MAX_PARTS)), [], 0
    if commands:
        content, end = _box(text, commands[-1].end())
        if content is None:
            return None, "truncated_box"
        boxes = [content]
    for content_start in _marks_from_last(text, max(end, len(text) - MAX_TAIL)):
        phrase = _phrase(text, content_start)
        if not phrase.lower().startswith("not ") and (not boxes or _STARTS_LIKE_MATHS.match(phrase)):
            return _within_limit(phrase)
    for earlier, later in zip(commands[-2::-1], commands[:0:-1], strict=True):
        content, end = _box(text, earlier.end())
        if content is None or not _JOINT.fullmatch(text, end, later.start()):
            break
        if content != boxes[0]:
            boxes.insert(0, content)
    return _within_limit(",".join(boxes))


# ---------------------------------------------------------------------------------------------------------------------
# One spelling for each answer
# ---------------------------------------------------------------------------------------------------------------------

_GREEK = "alpha beta gamma delta epsilon zeta eta theta lambda mu pi rho sigma tau phi psi omega"
_SPELLED = {
    **dict.fromkeys("−‐‑‒–—", "-"), **dict.fromkeys("÷∕⁄", "/"), **dict.fromkeys("·⋅", "\\cdot "), "×": "\\times ",
    **dict.fromkeys("≤⩽≦", "\\le "), **dict.fromkeys("≥⩾≧", "\\ge "), "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ",
    "∞": "\\infty ", "°": "^\\circ ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ",
    "ℝ": "\\mathbb{R}", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "、": ",", "‘": "'", "’": "'",
    **dict.fromkeys("“”\"`€£¥￥₹", ""),
    **{letter: f"\\{name} " for letter, name in zip("αβγδεζηθλμπρστφψω", _GREEK.split(), strict=True)},
    **{digit: f"^{value}" for value, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
}  # fmt: skip


class _Spelling(dict):
    """For str.translate: full-width forms become ASCII, any space a blank; format and control characters vanish."""

    def __missing__(self, code):
        char = chr(code)
        if char in _SPELLED:
            value = _SPELLED[char]
        elif 0xFF01 <= code <= 0xFF5E:
            value = chr(code - 0xFEE0)
        elif char.isspace():
            value = " "
        else:
            value = "" if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co") else char
        self[code] = value
        return value


_SPELLING = _Spelling()
_TEXT = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|mathrm|mathbf|mathsf|mathit)\s*\{([^{}]*)\}"
_ANY_TEXT = _TEXT.replace("([^{}]*)", "[^{}]*")
_WHOLE_TEXT = re.compile(rf"\(?\s*{_TEXT}\s*\)?")
_LEADING_TEXT = re.compile(r"^(?:\s*\\(?:text(?:bf|it|rm|normal)?|mbox)\s*\{[^{}]*\}[\s~:=]*)+(?=.*[0-9\\A-Za-z])")
_TRAILING_TEXT = re.compile(
    rf"(?<=[0-9A-Za-z}})\]%!'])(?:(?:[\s~/]|\\cdot)*{_ANY_TEXT}(?:\^\{{?\s*-?[0-9]\s*\}}?)?)+\s*(?=$|[,;)\]])"
)
_SAYS = re.compile(r"(?i)^[^\\{}]*\banswer\s*(?:is|:)\s*")
_SCALES = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "百": 100, "千": 10**3, "万": 10**4, "亿": 10**8,
}  # fmt: skip
_SCALE = re.compile(rf"([+-]?[0-9]+(?:\.[0-9]+)?)\s*({'|'.join(_SCALES)})s?(?:\s[A-Za-z ]+|[\u4e00-\u9fff]*)")
_CHANGES_VALUE = (
    set(
        "factorial squared cubed half halves thirds quarters fifths sixths eighths tenths hundredths thousandths "
        "recurring repeating".split()
    )
    | _SCALES.keys()
)
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:left|right)\.|(?<!\\)\\[()\[\]]", ""),
        (r"\\(?:left|right|[bB]ig[gG]?[lr]?|displaystyle|textstyle|limits|nolimits)(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\q?quad(?![A-Za-z])", " "),
        # 1{,}234  1,\!234  1\!234  1\,234 are never lists; 1,234 is decided at the end
        (r"(?<=[0-9])(?:\{\s*,\s*\}|,?\\!\s*|\\[,;:> ])(?=[0-9]{3}(?![0-9]))", ""),
        (r"(?<!\\)\\!\s*", ""),
        (r"(?<!\\)\\[,;:> ]|~", " "),
        (r"\\(?:textdollar|euro|pounds)(?![A-Za-z])|\\?\$", ""),
        (r"\\%|\s*\\text\s*\{\s*\\?(?:%|percent|percentage)\s*\}|\s*\b(?:percent|percentage|pct)\b", "%"),
        (r"\*\*|__", ""),
        (r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}", ","),
        (r"\\text\s*\{([0-9A-F]+)\}(?=\s*_)", r"\1"),
        (rf"\\text\s*\{{([^{{}}]*\b(?:{'|'.join(sorted(_CHANGES_VALUE))})s?\b[^{{}}]*)\}}", r" \1"),
        (r"\\frac\s*(\\[a-z]+)\s*([0-9a-z])", r"\\frac{\1}{\2}"),
        (r"\\(max|min)(?=\s*\})", r"\1"),
        (r"(?<![A-Za-z\\])(?:,?\s*(?:and|or))(?![A-Za-z])|\s*[和或]\s*", ","),
        (r"\\(?:operatorname|mathrm)\*?\s*\{((?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|exp|gcd|lcm)\}", r"\\\1"),
        (r"\\(?:mathrm|text|operatorname)\s*\{([ie])\}", r"\1"),
        (r"\bnp\.", r"\\"),
        (r"\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])", "DEGREE"),
        (r"√\s*([0-9]+)", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt "),
        (r"([0-9])\.(?=[/)}\s]|$)", r"\1"),
        (r"(?<![A-Za-z0-9.\\])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([+-]?[0-9]{1,3})(?![A-Za-z0-9.])", r"\1\\cdot 10^{\2}"),
        (r"(?<![0-9.])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9.])", r"\1\\frac{\2}{\3}"),
        (r"\s+", " "),
    ]
]
_NOT_UNITS = _CHANGES_VALUE | set(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp sqrt frac gcd lcm max min mod modulo choose "
    "infinity infty theta alpha beta gamma delta lambda sigma omega root over plus minus times".split()
)
_SHORT_UNITS = set(
    "cm mm km nm um dm ft in yd mi kg mg lb lbs oz hr hrs min mins sec secs ms mph kmh kph ml mL cc deg rad sq cu Hz "
    "kHz MHz GHz eV keV MeV GeV Pa kPa mol day gal USD usd EUR eur RMB rs Rs men cup pts per cal".split()
)
_UNIT = r"[A-Za-z]+\.?(?:\^\{?-?[0-9]\}?)?"
_UNITS = re.compile(rf"(.*[0-9)}}%])\s*({_UNIT}(?:[\s/]+{_UNIT})*)")
_CJK = "\u4e00-\u9fff"
_CJK_AROUND = re.compile(rf"[{_CJK}:,\s]*([-+.(\[\\]?[0-9\\][^{_CJK}]*)[{_CJK}]*(?:\^?[23])?")
_PLAIN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_BARE_NUMBER = re.compile(r"[-+.0-9]+")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_SPACED_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_WORDS = re.compile(r"[A-Za-z]+(?:[ -][A-Za-z]+)*")
_TRIG = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*DEGREE")


def _strip_units(s):
    """'34 apples' and '34个' -> '34', but never a word that changes the value."""
    if (match := _CJK_AROUND.fullmatch(s)) and not re.search("[百千万亿]", s):
        s = match.group(1).strip()
    if not (match := _UNITS.fullmatch(s)):
        return s
    for word in re.findall("[A-Za-z]+", match.group(2)):
        changes = {word.lower(), word.lower().removesuffix("s")} & _NOT_UNITS
        if word not in _SHORT_UNITS and (len(word) < 4 or changes):
            return s
    return match.group(1).strip()


def _as_text(words):
    words = re.sub(r"^(?:the|an?)\s+", "", re.sub(r"[\s().:!?]+", " ", words).strip().lower())
    return "\\text{" + ",".join(sorted(part.strip() for part in words.split(","))) + "}"


@functools.lru_cache(maxsize=1 << 13)
def _clean(answer):
    r"""One spelling for one answer: a number, LaTeX that math-verify reads, or lower-case words in one `\text{}`."""
    if _PLAIN.fullmatch(answer):
        return answer
    s = " ".join(answer.translate(_SPELLING).split())
    for pattern, replacement in _REWRITES:
        s = pattern.sub(replacement, s)
    if _TRIG.search(s):  # sin(30 degrees) is not sin(30); elsewhere the sign is a unit
        s = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", s)
    s = s.replace("DEGREE", " ").lstrip(" ,;:。，；：").rstrip(" .,;:。，；：")
    s = _SAYS.sub("", s)
    if whole := _WHOLE_TEXT.fullmatch(s):
        words = _SAYS.sub("", whole.group(1))
        inner = _clean(words)
        maths = s.startswith("\\math") or not re.search(rf"[A-Za-z{_CJK}]", words)
        return inner if maths or _number(inner) else _as_text(words)
    if not _CHOICE.fullmatch(s):
        s = _LEADING_TEXT.sub("", s, count=1)
    s = _TRAILING_TEXT.sub("", s).lstrip(" ,;:=").rstrip(" .,;:=")
    if "\\approx" in s:
        left, right = s.split("\\approx")[0].strip(), s.split("\\approx")[-1].strip()
        s = left if re.search(r"[0-9\\]", left.rsplit("=", 1)[-1]) else right
    s = _strip_units(s)
    if s[:1] + s[-1:] in ("()", "{}") and _BARE_NUMBER.fullmatch(s[1:-1]):
        s = s[1:-1]
    if s[:1] not in ("(", "[") and not s.startswith("\\{") and len(_THOUSANDS.findall(s)) == s.count(","):
        s = _THOUSANDS.sub("", s)
    if _SPACED_THOUSANDS.fullmatch(s):
        s = s.replace(" ", "")
    if scale := _SCALE.fullmatch(s):
        value = Fraction(scale.group(1)) * _SCALES[scale.group(2)]
        return f"{value.numerator}/{value.denominator}" if value.denominator > 1 else str(value.numerator)
    if _WORDS.fullmatch(s) and re.search("[A-Za-z]{4}", s) and not _NOT_UNITS & set(s.lower().split()):
        return _as_text(s)
    return re.sub(r"\s*,\s*", ", ", s)


_DIGITS = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_DECIMAL = re.compile(rf"([+-]?)\s*({_DIGITS})")
_POWER = re.compile(rf"([+-]?)\s*({_DIGITS})\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{{?\s*([+-]?[0-9]{{1,3}})\s*\}}?")
_FRACTION = re.compile(
    r"([+-]?)\s*([0-9]*)\s*\\frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"
)
_SLASH = re.compile(r"([+-]?)\s*([0-9]+)\s*/\s*([0-9]+)")
_REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)\\overline\s*\{\s*([0-9]+)\s*\}")


@functools.lru_cache(maxsize=1 << 13)
def _number(s):
    """(value, is_percent) of a cleaned answer that is a rational number written down; None for anything else."""
    percent = s.endswith("%")
    s = s.removesuffix("%").rstrip()
    if match := _DECIMAL.fullmatch(s):
        value = Fraction(match.group(2))
    elif match := _POWER.fullmatch(s):
        value = Fraction(match.group(2)) * Fraction(10) ** int(match.group(3))
    elif match := _FRACTION.fullmatch(s):
        _, whole, *digits = match.groups()
        top, bottom = (int(number) for number in digits if number is not None)
        if bottom == 0 or whole and top < 0:
            return None
        value = int(whole or 0) + Fraction(top, bottom)
    elif (match := _SLASH.fullmatch(s)) and int(match.group(3)):
        value = Fraction(int(match.group(2)), int(match.group(3)))
    elif match := _REPEATING.fullmatch(s):
        whole, fixed, cycle = match.group(2), match.group(3), match.group(4)
        scale = 10 ** len(fixed)  # 0.1666... = (16 - 1) / (9 * 10)
        value = Fraction(int(whole + fixed + cycle) - int(whole + fixed or 0), (10 ** len(cycle) - 1) * scale)
    else:
        return None
    return (-value if match.group(1) == "-" else value), percent


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts without SymPy
# ---------------------------------------------------------------------------------------------------------------------

_LITERAL = re.compile(rf"[+-]?{_DIGITS}")
_ASSIGNED = re.compile(r"(?:[A-Za-z]\w?|\\text\{[^{}]*\})\s*=\s*")
_RELATION = re.compile(r"[<>!]=|\\(?:n?eq?|[lg]eq?|in|[lg]t)(?![A-Za-z])|[<>]")
_CHOICE = re.compile(r"(?:\\text\w*\s*\{\s*\(?([A-E])\)?[.:]?\s*\}|\(?([A-E])[.:)])\s+(?=.*[0-9\\])(.+)")
# One letter is as likely a variable: a unit only where the gold is a number.
_LETTER = r"(?:[kcm]m|[km]g|ft|mi|in|[mgshLlVANJWKCFT])(?:\^\{?-?[0-9]\}?)?"
_LETTER_UNIT = re.compile(rf"(.*[0-9)}}]) ?(?:(?<= ){_LETTER}|[kcm]m|[km]g)(?:/ ?{_LETTER})?")
_BASE = re.compile(r"([0-9A-F]*[0-9][0-9A-F]*)(?:\s*_\s*\{?\s*(?:\\text\s*\{)?\s*([0-9]+|[a-z]+)\s*\}*)?")
_BASES = {name: i for i, name in enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2)}


def _commas(s):
    """Whether commas stand (outside every bracket, exactly one bracket deep)."""
    depth, seen = 0, set()
    for char in s:
        depth += (char in "([{") - (char in ")]}")
        if char == ",":
            seen.add(depth)
    return 0 in seen, 1 in seen


def _is_tuple(s):
    return s[:1] in ("(", "[") and s[-1:] in (")", "]") and _commas(s) == (False, True)


def _is_list(s):
    outside, inside = _commas(s)
    return outside or inside and s.startswith("\\{")


def _numbers(s):
    r"""(opening, numbers, closing) of a list, set or tuple of rational numbers; brackets empty for 1,2 and \{1,2\}."""
    opening, inside, closing = ("", s, "") if s[:1] not in ("(", "[") else (s[0], s[1:-1], s[-1:])
    if s.startswith("\\{") and s.endswith("\\}"):
        inside = s[2:-2]
    numbers = [_number(part.strip()) for part in inside.split(",")]
    return (opening, numbers, closing) if all(numbers) else None


def _same_numbers(gold, answer, rel_tol):
    (opening, g, closing), (a_opening, a, a_closing) = gold, answer
    if (opening, closing) != (a_opening, a_closing):
        return None
    if opening:
        return len(g) == len(a) and all(_same_number(x, y, rel_tol) for x, y in zip(g, a, strict=True))
    return all(any(_same_number(x, y, rel_tol) for y in a) for x in g) and all(
        any(_same_number(x, y, rel_tol) for x in g) for y in a
    )


def _based(s):
    """(digits, base) of an integer in a named base, base None where it names none; None for anything else."""
    if not (match := _BASE.fullmatch(s)):
        return None
    base = match.group(2) and (_BASES.get(match.group(2)) or match.group(2).isdigit() and int(match.group(2)))
    return (match.group(1).lstrip("0"), base or None)


def _fit(gold, answer):
    """The answer without what this gold does not have: a choice label, "x =", a one-letter unit. Both are cleaned."""
    if choice := _CHOICE.fullmatch(answer):
        label = choice.group(1) or choice.group(2)
        answer = label if re.fullmatch(r"\\text\{[a-e]\}", gold) else _clean(choice.group(3))
    left, equals, right = answer.rpartition("=")
    if equals and "=" not in gold and not _RELATION.search(answer) and not _commas(left)[0]:
        answer = _clean(right)
    if _number(gold) and (unit := _LETTER_UNIT.fullmatch(answer)):
        answer = _clean(unit.group(1))
    return answer


def _same_number(gold, answer, rel_tol):
    (g, g_percent), (a, a_percent) = gold, answer
    pairs = [(g, a)]
    if g_percent != a_percent:
        percent = g if g_percent else a
        # 62.5% is 62.5 to who asks for a percentage, but nobody calls 0.5% a half
        pairs = [(g / 100, a) if g_percent else (g, a / 100), *(pairs if abs(percent) >= 1 else [])]
    return any(x == y or rel_tol is not None and abs(x - y) <= rel_tol * abs(x) for x, y in pairs)


def _quick(gold, answer, rel_tol):
    """A reason where no SymPy is needed, else None. gold: cleaned and checked; answer: cleaned and fitted."""
    if gold.startswith("\\text{"):
        return "correct" if gold in (answer, _as_text(answer)) else "wrong"
    if (g := _number(gold)) and (a := _number(answer)):
        return "correct" if _same_number(g, a, rel_tol) else "wrong"
    if gold == answer or _WORDS.fullmatch(gold) and len(gold) > 2 and _as_text(gold) in (answer, _as_text(answer)):
        return "correct"
    if (g := _based(gold)) and (a := _based(answer)) and (g[1] or a[1]):
        return "correct" if g[0] == a[0] and (g[1] == a[1] or None in (g[1], a[1])) else "wrong"
    if _is_tuple(gold) and _is_list(answer):
        return "wrong"  # math-verify takes 1,2,3 for (1,2,3)
    if (g := _numbers(gold)) and (a := _numbers(answer)) and (same := _same_numbers(g, a, rel_tol)) is not None:
        return "correct" if same else "wrong"
    return None


def _exact(gold, answer, rel_tol):
    literal = _LITERAL.fullmatch(_ASSIGNED.sub("", answer, count=1))
    return "correct" if literal and _same_number(_number(gold), _number(literal.group()), rel_tol) else "wrong"


def _clean_gold(gold):
    """(cleaned, None), or (None, why it can never be compared). A whole solution counts by its last box or ####."""
    if isinstance(gold, bool) or not isinstance(gold, (int, float, str)):
        return None, f"not a number or a text but {type(gold).__name__}"
    if isinstance(gold, float) and not math.isfinite(gold):
        return None, "not finite"
    gold = str(gold)
    if "\\boxed" in gold or "\\fbox" in gold or "####" in gold:
        gold, reason = extract_answer(gold)
        if gold is None:
            return None, reason
    if len(gold) > MAX_ANSWER:
        return None, "too_long"
    cleaned = _clean(gold)
    if not cleaned:
        return None, "empty"
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{3,}", re.sub(_ANY_TEXT, "", cleaned))
    if not cleaned.startswith("\\text{") and len([w for w in words if w not in _NOT_UNITS]) >= 3:
        return None, "prose"
    return cleaned, None


# ---------------------------------------------------------------------------------------------------------------------
# The supervisor and its workers: other processes, which import math-verify and nothing else
# ---------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _parse(answer):
    """A list with one SymPy object, or empty. The box makes math-verify read all of it and nothing else."""
    from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse

    spelling = LatexNormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="last")
    return parse(
        f"\\boxed{{{answer}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )


def _compare(gold, answer, rel_tol):
    """The reason for an answer, or "ok" / "unparseable" for a gold alone (answer None)."""
    from math_verify import verify as same

    golds, answers = _parse(gold), _parse(gold if answer is None else answer)
    if not golds or not answers:
        return "unparseable"
    g, a = (None, None) if answer is None else (_value(golds[0]), _value(answers[0]))
    if g is not None and a is not None:
        distance, size = abs(g - a), max(abs(g), abs(a))
        if distance > 1e-6 * size:  # simplify() finds the same, a hundred times slower
            return "correct" if rel_tol is not None and distance <= rel_tol * abs(g) else "wrong"
    # Rounding to 15 places: 6, the default, takes 0.333333 for 1/3. And 2 < x <= 5 is (2, 5].
    equal = same(golds, answers, float_rounding=15, allow_set_relation_comp=True, timeout_seconds=None)
    if answer is None:  # a gold that takes forever to compare with a number is found now, not in every batch
        same(golds, _parse("0"), float_rounding=15, timeout_seconds=None)
        return "ok" if equal else "unparseable"
    return "correct" if equal or rel_tol is not None and g is not None and a is not None else "wrong"


def _value(expression):
    """A constant to 15 digits; None where it has variables, is no number, or its digits cannot be vouched for."""
    from sympy import Expr, UnevaluatedExpr

    if not isinstance(expression, Expr) or expression.free_symbols or expression.has(UnevaluatedExpr):
        return None
    try:
        value = expression.evalf(15, strict=True)
    except MemoryError:
        raise
    except Exception:  # SymPy has no common base for what its functions raise; the full comparison decides
        return None
    return value if value.is_number and value.is_finite else None


_WARM_UP = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), ("(2,5]", r"2<x\le 5"), ("1,-2", r"\{-2,1\}"), ("x=5", "5"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"), ("x^2+2x", "x(x+2)"),
    (r"(0,9)\cup(9,36)", "(0,36)"), ("1+2i", "2i-1"), (r"(3,\frac{\pi}{2})", r"(3,\pi)"), (r"3\pi", "9.42"),
]  # fmt: skip


def _peak_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmPeak"))


def _work(tasks, supervisor, memory_mb):
    """Answers tasks until the connection ends, the supervisor is gone, or it is time for a fresh process."""
    import resource

    on_linux = sys.platform == "linux"
    if on_linux:  # macOS has no working limit on address space
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    # The default action ends the process inside the kernel: no Python has to run, so no C loop can hold it off.
    for timer in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(timer, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGPROF})
    for _ in range(TASKS_PER_WORKER):
        while not tasks.poll(POLL_S):
            if os.getppid() != supervisor:
                return
        ticket, gold, answer, rel_tol, processor_s, wall_s = json.loads(tasks.recv_bytes())
        signal.setitimer(signal.ITIMER_PROF, processor_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        try:
            reason = _compare(gold, answer, rel_tol)
        except MemoryError:
            reason = "memory"
        except RecursionError:
            reason = "unparseable"
        # math-verify turns a MemoryError into "not equal".
        if on_linux and reason in ("wrong", "unparseable") and _peak_mb() > 0.9 * memory_mb:
            reason = "memory"
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        tasks.send_bytes(f"{ticket} {reason}".encode())
        if reason == "memory":
            return


def _supervise(parent, control, connections, memory_mb):
    """Keeps one worker on each connection until the parent closes `control` or is gone.

    A worker that died by a timer is reported as "died timeout", one that died otherwise as "died crash".
    """
    control, connections = Connection(control), [Connection(fd) for fd in connections]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)  # math-verify warns that its own timeouts are off
    try:
        for gold, answer in _WARM_UP:
            _compare(gold, answer, None)
    except ImportError as error:
        control.send_bytes(f"cannot import math-verify: {error}".encode())
        return
    gc.freeze()
    alive = {}  # read end of a pipe that only this worker can write to -> (slot, process id)

    def start(slot):
        read, write = os.pipe()
        supervisor, worker = os.getpid(), os.fork()
        if worker == 0:
            code = 1
            try:
                control.close()
                _work(connections[slot], supervisor, memory_mb)
                code = 0
            except (EOFError, ConnectionError):
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)
        alive[read] = slot, worker

    for slot in range(len(connections)):
        start(slot)
    control.send_bytes(b"ready")
    try:
        while True:
            ready = wait([control, *alive], POLL_S)
            if control in ready or os.getppid() != parent:
                break
            for read in ready:
                slot, worker = alive.pop(read)
                os.close(read)
                code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
                if code:
                    timer = code in (-signal.SIGALRM, -signal.SIGPROF)
                    connections[slot].send_bytes(b"died timeout" if timer else b"died crash")
                start(slot)
    except ConnectionError:  # the parent died between two looks
        pass
    finally:
        for _, worker in alive.values():
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)


# ---------------------------------------------------------------------------------------------------------------------
# The parent's side
# ---------------------------------------------------------------------------------------------------------------------


class _Workers:
    """Runs (gold, answer or None, rel_tol) in the workers and returns the reasons. Safe from any thread."""

    def __init__(self, count, memory_mb):
        self.count, self.memory_mb = count, memory_mb
        self.process, self.tickets = None, 0
        self.owner, self.lock = os.getpid(), threading.Lock()

    def start(self):
        if os.name != "posix":
            raise RuntimeError("MathVerifier's worker processes need POSIX: use WSL, or exact=True for number tasks")
        self.control, theirs = Pipe()
        pairs = [Pipe() for _ in range(self.count)]
        self.connections = [ours for ours, _ in pairs]
        fds = [there.fileno() for _, there in pairs]
        spec = [os.getpid(), theirs.fileno(), fds, self.memory_mb]
        self.process = subprocess.Popen(
            [sys.executable, "-P", os.path.abspath(__file__), json.dumps(spec)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), *fds],
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops us
        )
        theirs.close()
        for _, there in pairs:
            there.close()
        try:
            message = self.control.recv_bytes().decode() if self.control.poll(START_S) else "no sign of life"
        except (EOFError, ConnectionError):
            message = "the supervisor died; its error is above"
        if message != "ready":
            self.stop()
            raise RuntimeError(f"MathVerifier's workers did not start ({message}): pip install -r requirements.txt")

    def stop(self):
        """Ends all processes and waits for them. Does nothing in a fork of the process that started them."""
        process, self.process = self.process, None
        if process is None or self.owner != os.getpid():
            return
        for connection in (self.control, *self.connections):
            connection.close()
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, tasks, processor_s, wall_s):
        if self.owner != os.getpid():  # forked: those workers, and the lock, are the parent's
            self.__init__(self.count, self.memory_mb)
        with self.lock:
            try:
                return self._run(tasks, processor_s, wall_s)
            except BaseException:
                self.stop()  # a task may still be under way
                raise

    def _run(self, tasks, processor_s, wall_s):
        reasons, todo, flying = [None] * len(tasks), deque((i, False) for i in range(len(tasks))), {}

        def again(index, tried):
            """A death that no alarm caused may be the machine's fault: the task gets a second chance."""
            if tried:
                reasons[index] = "crash"
            else:
                todo.appendleft((index, True))

        while todo or flying:
            if self.process is None:
                self.start()
            try:
                for connection in self.connections:
                    if todo and connection not in flying:
                        index, tried = todo.popleft()
                        self.tickets += 1
                        flying[connection] = self.tickets, index, tried, time.monotonic() + wall_s + GRACE_S
                        task = [self.tickets, *tasks[index], processor_s, wall_s]
                        connection.send_bytes(json.dumps(task).encode())
                ready = wait([self.control, *flying], POLL_S)
                if self.control in ready:
                    raise EOFError
                for connection in ready:
                    head, reason = connection.recv_bytes().decode().split()
                    ticket, index, tried, _ = flying[connection]
                    if head not in ("died", str(ticket)):
                        continue  # the answer to a task that was given up
                    del flying[connection]
                    if (head, reason) == ("died", "crash"):
                        again(index, tried)
                    else:
                        reasons[index] = reason
                lost = any(time.monotonic() > deadline for *_, deadline in flying.values())
            except (EOFError, ConnectionError):
                lost = True
            if lost:
                self.stop()
                for _, index, tried, deadline in flying.values():
                    if time.monotonic() > deadline:
                        reasons[index] = "timeout"
                    else:
                        again(index, tried)
                flying.clear()
        return reasons


def _text(completion):
    """A completion's text: itself, or what the last assistant message of a conversation says."""
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list) or not all(isinstance(message, dict) for message in completion):
        raise TypeError(f"a completion is {completion!r:.80}: MathVerifier reads texts and lists of messages (dicts)")
    said = [message.get("content") for message in completion if message.get("role", "assistant") == "assistant"]
    content = said[-1] if said else None
    if isinstance(content, list):
        content = "".join(block.get("text", "") for block in content)
    return content or ""


class MathVerifier:
    """A TRL reward function: 1.0 for a correct answer, 0.0 for any other, None where the gold is unusable.

    Args:
        workers: worker processes; default: the cores this process may use, shared among the node's ranks, at most 4.
        timeout_s: seconds of wall clock for one comparison, then its worker is killed (reason `timeout`). A gold is
            checked once and has as many seconds of processor time, so that a busy machine drops no row.
        memory_mb: address space of one worker in MiB (reason `memory`); an idle one takes about 70.
        exact: only a literal number counts as an answer, only plain numbers are golds; no process is ever started.
        rel_tol: relative tolerance for numbers, as golds that are measurements need; default: none, numbers are exact.

    `counts` holds how often each reason was given since the start, `pooled` how many comparisons needed SymPy.
    Workers start when first needed and stop with `close()`, at the end of a `with` block, with the object or at exit.
    Every method may be called from any thread. Raises ValueError on impossible arguments.
    """

    __name__ = "math_verifier"  # TRL names the reward's metrics after it

    def __init__(self, workers=None, timeout_s=5.0, memory_mb=512, exact=False, rel_tol=None):
        if workers is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            workers = max(1, min(4, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        if workers < 1 or timeout_s <= 0 or memory_mb < 128:
            raise ValueError(
                f"MathVerifier(workers={workers}, timeout_s={timeout_s}, memory_mb={memory_mb}): pass workers >= 1, "
                "timeout_s > 0 and memory_mb >= 128, as SymPy alone needs about 70 MiB"
            )
        if rel_tol is not None and not 0 <= rel_tol < 1:
            raise ValueError(f"MathVerifier(rel_tol={rel_tol}): a relative tolerance is in [0, 1), like 0.01")
        self.workers, self.timeout_s, self.memory_mb = workers, timeout_s, memory_mb
        self.exact, self.rel_tol = exact, rel_tol
        self.counts, self.pooled = Counter(), 0
        self._golds = {}  # cleaned gold -> None (usable) or why not
        self._lock = threading.Lock()
        self._workers = _Workers(workers, memory_mb)
        weakref.finalize(self, self._workers.stop)

    def __reduce__(self):  # TRL pickles reward functions for its asynchronous rollout process
        return MathVerifier, (self.workers, self.timeout_s, self.memory_mb, self.exact, self.rel_tol)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Stop the workers. A later call that needs them starts them again."""
        with self._workers.lock:
            self._workers.stop()

    def check_golds(self, golds):
        """For each gold: None where answers can be compared with it, else the reason in a few words.

        A gold is an int, a float, a text (plain, LaTeX, or a whole solution with its \\boxed answer), or a list of
        acceptable ones, which is fine if one of them is. Several values that must all be given are one text: "1,-2".
        """
        return [problem for _, problem in self._check(golds)]

    def check_gold(self, gold):
        """`check_golds` for one."""
        return self.check_golds([gold])[0]

    def _check(self, golds):
        """For each gold: (the cleaned ones that are usable, None or the first problem where none is)."""
        groups = [[_clean_gold(g) for g in (gold if isinstance(gold, (list, tuple)) else [gold])] for gold in golds]
        new = dict.fromkeys(g for group in groups for g, problem in group if problem is None and g not in self._golds)
        if self.exact:
            known = {g: None if _LITERAL.fullmatch(g) else "not a plain number, which exact=True needs" for g in new}
        else:
            hard = [g for g in new if not (_number(g) or g.startswith("\\text{") or (_based(g) or (0, 0))[1])]
            limits = self.timeout_s, GOLD_PATIENCE * self.timeout_s
            found = self._workers.run([(g, None, None) for g in hard], *limits) if hard else []
            known = dict.fromkeys(new) | {g: None if why == "ok" else why for g, why in zip(hard, found, strict=True)}
        self._golds.update((g, why) for g, why in known.items() if why != "crash")
        result = []
        for group in groups:
            problems = [problem or known.get(g, self._golds.get(g)) for g, problem in group] or ["an empty list"]
            usable = [g for (g, _), problem in zip(group, problems, strict=False) if problem is None]
            result.append((usable, None if usable else problems[0]))
        return result

    def verify(self, gold, text):
        """Verdict on one completion."""
        return self.verify_batch([gold], [text])[0]

    def verify_batch(self, golds, texts):
        """Verdicts on texts, each against its gold. Equal pairs of gold and final answer are compared once."""
        answers = [extract_answer(text) for text in texts]
        usable = self._check(golds)
        todo = {}  # (gold, answer), both cleaned -> reason
        for (alternatives, _), (answer, _) in zip(usable, answers, strict=True):
            if answer is not None:
                todo.update(dict.fromkeys((gold, _clean(answer)) for gold in alternatives))
        hard = {}  # (gold, answer as it is sent) -> the pairs that it decides
        for gold, answer in todo:
            fitted = answer if self.exact else _fit(gold, answer)
            decide = _exact if self.exact else _quick
            todo[gold, answer] = decide(gold, fitted, self.rel_tol)
            if todo[gold, answer] is None:
                hard.setdefault((gold, fitted), []).append((gold, answer))
        if hard:
            tasks = [(gold, answer, self.rel_tol) for gold, answer in hard]
            reasons = self._workers.run(tasks, self.timeout_s, self.timeout_s)
            todo.update((pair, reason) for pairs, reason in zip(hard.values(), reasons, strict=True) for pair in pairs)
        verdicts = []
        for (alternatives, problem), (answer, reason) in zip(usable, answers, strict=True):
            if problem is not None:
                reason = "bad_gold"
            elif answer is not None:
                found = [todo[gold, _clean(answer)] for gold in alternatives]
                reason = "correct" if "correct" in found else found[0]
            verdicts.append(_verdict(reason))
        with self._lock:
            self.counts.update(verdict.reason for verdict in verdicts)
            self.pooled += len(hard)
        return verdicts

    def __call__(self, completions, solution, log_metric=None, **kwargs):
        """completions: N texts or conversations; solution: N golds -> N rewards. Other columns are not read.

        log_metric(name, value), which TRL passes, receives `verifier/<reason>_frac` for every reason (truncated_frac
        for `truncated_box`) and `verifier/seconds`, the wall clock of this call. Raises ValueError where the lengths
        differ, TypeError on a completion that is neither a text nor a conversation.
        """
        if len(completions) != len(solution):
            raise ValueError(f"MathVerifier got {len(completions)} completions, but {len(solution)} solutions")
        start = time.perf_counter()
        verdicts = self.verify_batch(solution, [_text(completion) for completion in completions])
        if log_metric is not None and verdicts:
            counts = Counter(verdict.reason for verdict in verdicts)
            for reason in REASONS:
                log_metric(f"verifier/{reason.removesuffix('_box')}_frac", counts[reason] / len(verdicts))
            log_metric("verifier/seconds", time.perf_counter() - start)
        return [verdict.reward for verdict in verdicts]


@functools.cache
def _shared(exact, rel_tol):
    return MathVerifier(exact=exact, rel_tol=rel_tol)


def verify(gold, text, exact=False, rel_tol=None):
    """Verdict(reward, reason) on one completion, by a MathVerifier with its defaults that all such calls share."""
    return _shared(exact, rel_tol).verify(gold, text)


def check_gold(gold, exact=False):
    """None where answers can be compared with this gold, else the reason (`MathVerifier.check_golds`)."""
    return _shared(exact, None).check_gold(gold)


if __name__ == "__main__":
    _supervise(*json.loads(sys.argv[1]))
