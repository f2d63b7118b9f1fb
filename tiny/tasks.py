"""Arithmetic problems with worked solutions: the task that ships with the project.

    make_rows("train", 3)    ->  [{"problem": "Compute 23+45.", "answer": "68",
                                   "rationale": "23+45=68\n\\boxed{68}", "kind": "sum", "level": 1}, ...]
    is_right(text, "68")     ->  True only when the last box of `text` holds exactly that integer

Eight kinds at three levels, every answer an integer, so that checking is exact and `\\boxed{23+45}` earns nothing.
Same arguments, same rows, on any machine and any Python from 3.11: the only source of chance is
`random.Random(str).random()`, the one part of that module whose sequence is documented not to change.

Train and held-out cannot overlap. Which side a problem is on is a function of its text alone, `split_of`: a hash of
its numbers in sorted order. Problems that share their numbers are on one side whatever their wording, order or kind;
no seed can move them.
"""

import hashlib
import random
import re

HELDOUT_SHARE = 0.2
LEVELS = (1, 2, 3)
STYLES = ("steps", "split", "words")
_DRAWS = 2000  # draws without a new problem after which a (kind, level, split) counts as used up
_SAY = {"+": " plus ", "-": " minus ", "*": " times ", "/": " over "}
_BOX = re.compile(r"\s*(-?\d+)\s*\}")


def split_of(problem):
    """'train' or 'heldout' for a problem's text, by SHA-256 of its numbers in sorted order.

    >>> split_of("Compute 13*4.") == split_of("Ann has 4 pens and buys 13 more. How many pens?")
    True
    """
    numbers = sorted(int(number) for number in re.findall(r"\d+", problem))
    if not numbers:
        raise ValueError(f"split_of: no number in the problem {problem!r}; a tiny problem always has one")
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") < HELDOUT_SHARE * 2**32 else "train"


def is_right(text, answer):
    """True when the last `\\boxed{` of `text` closes around one plain integer equal to `answer` (str or int).

    An expression in the box, an unterminated last box and a missing box are all wrong.
    """
    head, box, tail = text.rpartition("\\boxed{")
    match = _BOX.match(tail) if box else None
    return match is not None and int(match[1]) == int(answer)


def make_rows(split, n, seed=0, kinds=None, levels=None, style="steps", lazy=0.0, slip=0.0):
    """n different problems of one split, balanced over kinds and levels; a longer list starts with the shorter one.

    A (kind, level) whose problems are used up drops out and the others go on: small numbers make few products.

    split: 'train' | 'heldout'. kinds: some of KINDS, None = all. levels: some of 1, 2, 3, None = all.
    style: how the teacher solves. 'steps': one equation a line; 'split': sums and differences in two goes, tens then
    units; 'words': the steps as one sentence.
    lazy, slip: a sloppy teacher, for cold starts that leave RL something to do. With probability `lazy` a rationale is
    only a boxed guess within 3 of the answer; else with probability `slip` one step comes out wrong and the rest
    follows from it. `answer` is right either way.

    Returns list[dict]: problem, answer (str of an integer), rationale (ends in `\\boxed{...}`), kind, level.
    Raises ValueError for an unknown split, kind, level or style, for a bad n, and when all problems are used up.
    """
    kinds = tuple(KINDS) if kinds is None else tuple(kinds)
    levels = LEVELS if levels is None else tuple(levels)
    _check("split", (split,), ("train", "heldout"))
    _check("kinds", kinds, tuple(KINDS))
    _check("levels", levels, LEVELS)
    _check("style", (style,), STYLES)
    if n < 1:
        raise ValueError(f"make_rows: n={n}; ask for at least one row")
    for name, share in (("lazy", lazy), ("slip", slip)):
        if not 0 <= share <= 1:
            raise ValueError(f"make_rows: {name}={share}; give a probability between 0 and 1")
    cells = [(kind, level) for kind in kinds for level in levels]
    # the problems and the teacher draw from separate streams: another teacher solves the same problems
    task, teacher = random.Random(f"tiny task {seed}"), random.Random(f"tiny teacher {seed}")
    rows, seen, queue = [], set(), []
    while len(rows) < n:
        if not queue:  # one round = every cell once, in a fresh order
            queue = cells.copy()
            for i in range(len(queue) - 1, 0, -1):
                j = _between(task, 0, i)
                queue[i], queue[j] = queue[j], queue[i]
        kind, level = queue.pop()
        new = _new_problem(task, split, kind, level, seen)
        if new is None:  # used up: the other cells go on
            cells.remove((kind, level))
            if not cells:
                raise ValueError(
                    f"make_rows: only {len(rows)} different {split} problems of n={n} exist for these kinds and levels; "
                    "ask for fewer rows or for more kinds and levels"
                )
            continue
        problem, solve = new
        work = _Work(style)
        answer = solve(work)
        rationale = work.text(answer)
        if teacher.random() < lazy:
            rationale = _Work(style).text(answer + _between(teacher, -3, 3))
        elif teacher.random() < slip:
            work = _Work(style, teacher, slip_at=_between(teacher, 0, work.steps - 1))
            rationale = work.text(solve(work))
        rows.append({"problem": problem, "answer": str(answer), "rationale": rationale, "kind": kind, "level": level})
    return rows


def _check(name, given, known):
    unknown = [value for value in given if value not in known]
    if unknown or not given:
        raise ValueError(f"make_rows: {name} {unknown or 'is empty'}; choose from {', '.join(map(str, known))}")


def _new_problem(task, split, kind, level, seen):
    for _ in range(_DRAWS):
        problem, solve = KINDS[kind](task, level)
        if problem not in seen and split_of(problem) == split:
            seen.add(problem)
            return problem, solve
    return None


def _between(rng, low, high):
    """An integer from low to high, both included."""
    return low + int(rng.random() * (high - low + 1))


def _pick(rng, items):
    return items[_between(rng, 0, len(items) - 1)]


class _Work:
    """The teacher's paper: every operation writes a line and returns its result, wrong at step `slip_at`."""

    def __init__(self, style, rng=None, slip_at=None):
        self.style, self.rng, self.slip_at = style, rng, slip_at
        self.lines, self.steps = [], 0

    def _slips(self):
        self.steps += 1
        return self.steps - 1 == self.slip_at

    def _op(self, a, op, b):
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]
        if self._slips():
            result += _pick(self.rng, (-10, -2, -1, 1, 2, 10))
        words = f"{a}{_SAY[op]}{b} is {result}"
        self.lines.append(words if self.style == "words" else f"{a}{op}{b}={result}")
        return result

    def _tens_first(self, a, op, b):
        if self.style == "split" and b > 10 and b % 10:
            a, b = self._op(a, op, b // 10 * 10), b % 10
        return self._op(a, op, b)

    def add(self, a, b):
        return self._tens_first(a, "+", b)

    def sub(self, a, b):
        return self._tens_first(a, "-", b)

    def mul(self, a, b):
        """One digit: by heart. Else the factor with more digits (the second of two equals) falls into tens and units."""
        if a < 10 <= b:
            a, b = b, a
        if a < 10 or (b < 10 and a % 10 == 0) or b % 10 == 0:
            return self._op(a, "*", b)
        if b < 10:
            return self._op(self._op(a // 10 * 10, "*", b), "+", self._op(a % 10, "*", b))
        return self._op(self._op(a, "*", b // 10 * 10), "+", self._op(a, "*", b % 10))

    def div(self, a, b):
        return self._op(a, "/", b)

    def sort(self, numbers):
        numbers = sorted(numbers)
        if self._slips():
            i = _between(self.rng, 0, len(numbers) - 2)
            numbers[i], numbers[i + 1] = numbers[i + 1], numbers[i]
        if self.style == "split":
            self.lines += [f"{a}<{b}" for a, b in zip(numbers, numbers[1:], strict=False)]
        else:
            self.lines.append((" then " if self.style == "words" else "<").join(map(str, numbers)))
        return numbers

    def text(self, result):
        if self.style == "words":
            return ", ".join(self.lines) + ("; so " if self.lines else "") + f"\\boxed{{{result}}}"
        return "\n".join([*self.lines, f"\\boxed{{{result}}}"])


# Each kind: (rng, level) -> (problem, solve), where solve(work) writes the solution and returns the result.


def _sum(rng, level):
    first = total = _between(rng, 2, 39)
    terms = []
    for _ in range(level):  # 2, 3, 4 terms; the running total never falls below zero
        b = _between(rng, 2, 9)
        op = "-" if b <= total and rng.random() < 0.5 else "+"
        total += b if op == "+" else -b
        terms.append((op, b))

    def solve(work):
        total = first
        for op, b in terms:
            total = work.add(total, b) if op == "+" else work.sub(total, b)
        return total

    return f"Compute {first}{''.join(f'{op}{b}' for op, b in terms)}.", solve


def _product(rng, level):
    a, b = {
        1: (_between(rng, 2, 9), _between(rng, 2, 9)),
        2: (_between(rng, 11, 19), _between(rng, 2, 9)),
        3: (_between(rng, 21, 49), _between(rng, 2, 9)),
    }[level]
    if rng.random() < 0.5:
        a, b = b, a
    return f"Compute {a}*{b}.", lambda work: work.mul(a, b)


def _mixed(rng, level):
    a, b, c, d = (_between(rng, 2, 9) for _ in range(4))
    e = _between(rng, 2, 9)
    if level == 1:
        if e <= a * b and rng.random() < 0.5:
            return f"Compute {a}*{b}-{e}.", lambda work: work.sub(work.mul(a, b), e)
        return f"Compute {e}+{a}*{b}.", lambda work: work.add(e, work.mul(a, b))
    if level == 2:
        a, b = 1 + a % 4, 1 + b % 5  # the bracket stays below ten
        return f"Compute ({a}+{b})*{c}+{e}.", lambda work: work.add(work.mul(work.add(a, b), c), e)
    if e <= a * b + c * d and rng.random() < 0.5:
        return (f"Compute {a}*{b}+{c}*{d}-{e}.", lambda work: work.sub(work.add(work.mul(a, b), work.mul(c, d)), e))
    return f"Compute {a}*{b}+{c}*{d}+{e}.", lambda work: work.add(work.add(work.mul(a, b), work.mul(c, d)), e)


def _remainder(rng, level):
    d = _between(rng, 2, 3 + 2 * level)
    n = _between(rng, d + 1, 10 * d - 1)  # the quotient has one digit
    return f"Remainder of {n}/{d}?", lambda work: work.sub(n, work.mul(d, n // d))


def _order(rng, level):
    numbers = []
    while len(numbers) < level + 2:
        x = _between(rng, 2, 29)
        if x not in numbers:
            numbers.append(x)
    places = (("Smallest", 0), ("Largest", -1), ("Second smallest", 1), ("Second largest", -2))
    place, rank = _pick(rng, places[:2] if level == 1 else places)
    return f"{place} of {','.join(map(str, numbers))}?", lambda work: work.sort(numbers)[rank]


def _compare(rng, level):
    a, b, c, d = (_between(rng, 2, 9) for _ in range(4))
    e, f, g, h = (_between(rng, 2, 9) for _ in range(4))
    e, g = 10 + e, 10 + g
    if level == 1:
        return f"Larger of {e}+{f} and {g}+{h}?", lambda work: max(work.add(e, f), work.add(g, h))
    if level == 2:
        return f"Larger of {a}*{b} and {e}+{f}?", lambda work: max(work.mul(a, b), work.add(e, f))
    return f"Larger of {a}*{d} and {b}*{c}+{e}?", lambda work: max(work.mul(a, d), work.add(work.mul(b, c), e))


def _equation(rng, level):
    x, a, b = _between(rng, 2, 9), _between(rng, 3, 9), _between(rng, 2, 9)
    if level == 1:
        x = _between(rng, 2, 39)
        return f"Solve x+{b}={x + b}.", lambda work: work.sub(x + b, b)
    if level == 2:
        return f"Solve {a}x+{b}={a * x + b}.", lambda work: work.div(work.sub(a * x + b, b), a)
    c = _between(rng, 2, a - 1)
    right = (a - c) * x + b
    return (
        f"Solve {a}x+{b}={c}x+{right}.",
        lambda work: (lambda left: work.div(work.sub(right, b), left))(work.sub(a, c)),
    )


def _word(rng, level):
    a, b, c = _between(rng, 2, 9), _between(rng, 2, 9), _between(rng, 5, 39)
    d = _between(rng, 2, 9)
    more = rng.random() < 0.5
    if level == 1:
        c = max(c, d)
        return (
            (f"Ann has {c} pens and buys {d} more. How many pens?", lambda work: work.add(c, d))
            if more
            else (f"Ann has {c} pens and loses {d}. How many pens?", lambda work: work.sub(c, d))
        )
    if level == 2:
        return (
            (f"Tom has {c} eggs and {a} boxes of {b}. How many eggs?", lambda work: work.add(c, work.mul(a, b)))
            if more
            else (
                f"{a} friends share {a * b} eggs, then each buys {d} more. How many each?",
                lambda work: work.add(work.div(a * b, a), d),
            )
        )
    c += a * b
    return (
        (
            f"Eve has {c} coins, buys {a} cakes at {b} each and finds {d}. How many coins?",
            lambda work: work.add(work.sub(c, work.mul(a, b)), d),
        )
        if more
        else (
            f"Eve sells {a} cakes at {b} and {d} pies at 3. How many coins?",
            lambda work: work.add(work.mul(a, b), work.mul(d, 3)),
        )
    )


KINDS = {
    "sum": _sum,
    "product": _product,
    "mixed": _mixed,
    "remainder": _remainder,
    "order": _order,
    "compare": _compare,
    "equation": _equation,
    "word": _word,
}
