"""verifier.py: every public report of a wrong or hanging maths verifier that we know, as a case, and what happens when
its processes, or their parent, are killed."""

import asyncio
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import verifier as module
from benchmarks import bench_verifier
from verifier import REASONS, MathVerifier, Verdict, check_gold, extract_answer, verify

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
HANGS = r"\boxed{\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}}"  # Math-Verify#65
on_linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(workers=2, timeout_s=300) as verifier:
        yield verifier


@pytest.fixture
def hasty(verifier, monkeypatch):
    """For what hangs: the same workers, little patience."""
    monkeypatch.setattr(verifier, "timeout_s", 0.3)
    return verifier


@pytest.fixture(scope="module")
def small():
    with MathVerifier(workers=1, timeout_s=300, memory_mb=160) as verifier:
        yield verifier


@pytest.fixture(scope="module")
def mortal():
    """For the tests that kill its processes: started by a thread that has ended."""
    with MathVerifier(workers=2, timeout_s=300) as verifier:
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(works, verifier).result()
        yield verifier


def works(verifier):
    """Whether both workers give right verdicts on what needs SymPy."""
    texts = [rf"\boxed{{\sqrt{{8}}-\sqrt{{{k}}}}}" for k in range(2, 6)]
    return [v.reward for v in verifier.verify_batch([r"\sqrt{2}"] * 4, texts)] == [1.0, 0.0, 0.0, 0.0]


# ---------------------------------------------------------------------------------------------------------------------
# What is equal: (gold, what the box holds), right and wrong
# ---------------------------------------------------------------------------------------------------------------------

RIGHT = [
    # fractions, decimals, mixed numbers
    ("7/3", "2 1/3"), ("7/3", r"2\frac{1}{3}"), ("7/3", r"2\frac13"), ("-7/3", "-2 1/3"), ("7", "21/3"),
    (r"\frac{9}{7}", r"\dfrac{9}{7}"), (r"\dfrac{9}{7}", "9/7"), (r"\frac43", r"\frac{4}{3}"), ("1/4", "0.25"),
    ("0.25", r"\frac14"), ("1/4", ".25"), ("27.0", "27"), (r"1\frac{4}{5}", "1.8"), (r"137 \frac{1}{2}", "137.5"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"), ("-1./3", r"-\frac{1}{3}"), ("1/3", r"0.\overline{3}"),
    (r"\frac{1}{6}", r"0.1\overline{6}"), ("1/7", r"0.\overline{142857}"), ("13/6", r"2.1\overline{6}"), ("½", "0.5"),
    # spellings of one integer
    ("25", "025"), ("025", "25"), ("0", "-0"), ("2", "+2"), ("-5", "−5"), ("-5", "- 5"), ("34", "34."), ("34", "34.0"),
    ("34", "３４"), ("34", "(34)"), ("34", "{34}"), ("34", r"\text{34}"), ("34", r"\mathbf{34}"), ("34", "**34**"),
    ("34", "$34$"), ("34", r"\(34\)"), ("34", "x=34"), ("34", "x = 34"), ("34", r"\text{Area} = 34"),
    ("34", "f(2)=34"),
    ("34", r"\approx 34"), ("34", r"34 \approx 34.2"), ("34", r"\displaystyle 34"), ("34", r"17\cdot 2"),
    ("34", "2^5+2"), ("34", r"\sqrt{1156}"), ("34", r"17 \cdot 2 = 34"), ("1024", "2^{10}"),
    # thousands
    ("1234567", "1,234,567"), ("1234567", r"1\,234\,567"), ("1234567", r"1{,}234{,}567"), ("1234567", "1 234 567"),
    ("1234567", r"1,\!234,\!567"), ("12345", "12 345"), ("12345", r"12\ 345"), (r"10,\!080", "10080"),
    (r"11,\! 111,\! 111,\! 100", "11,111,111,100"), (r"\$32,\!348", "32348"), ("1234.5", "1,234.5"),
    (r"\frac{1}{29,\!322,\!216}", r"\frac{1}{29322216}"), (r"1000\pi", r"1,000\pi"), ("(1,234)", "(1,234)"),
    # scientific notation and large words
    ("12000", "1.2e4"), ("12000", r"1.2 \times 10^4"), ("12000", r"1.2 \cdot 10^{4}"), ("12000", "1.2E+4"),
    ("4.5e33", r"4.5\times10^{33}"), ("1e-5", "0.00001"), ("5.3e3", "5300"), ("4500000", "4.5 million"),
    ("30000", "3万"), ("4500000", r"4.5\text{ million dollars}"), (r"4.5\text{ million}", "4500000"),
    ("30000", "3万人"), ("24", "2 dozen"),
    # percent
    (r"50\%", "50"), (r"50\%", "0.5"), (r"50\%", r"\frac12"), ("50", r"50\%"), ("0.5", "50%"), ("50%", "50 percent"),
    ("62.5%", r"62.5\text{ percent}"), ("62.5%", "62.5"), ("0.5%", "0.005"),
    # units, money, degrees
    ("34", "34 apples"), ("34", "34 cm"), ("34", "34cm"), ("34", r"34\text{ cm}^2"), ("34", r"34\,\text{cm}^2"),
    ("34", r"34~\mathrm{km/h}"), ("34", r"34\ \text{m}/\text{s}"), ("34", "34 m"), ("34", "34 m/s"), ("34", "34 m^2"),
    ("34", "34 km/h"), ("34", "34 square units"), (r"15\mbox{ cm}^2", "15"), (r"864 \mbox{ inches}^2", "864"),
    (r"5.4 \text{ cents}", "5.4"), ("34", r"\$34"), ("34", "€34"), ("18.90", r"\$18.90"), (r"\$18.90", "18.9"),
    ("34", "34 dollars"), ("34", "34个"), ("34", "34 厘米"), ("34", "共34个"), ("34", "34元"), (r"90^\circ", "90"),
    ("90", r"90^{\circ}"), ("90", "90°"), ("90", "90 degrees"), (r"\sin 30^\circ", r"\sin 30^{\circ}"),
    (r"\sin 30^\circ", r"\frac12"), (r"2\cos(60^\circ)+x", "x+1"),
    (r"6m", "6m"), (r"\frac{37}{4} m", r"\frac{37m}{4}"), (r"3\sqrt{2}", r"3\sqrt{2}\text{ cm}"),
    ("15x - 80", "15x - 80 dollars"),
    # words
    ("34", r"\text{The answer is } 34"), ("34", r"\text{The answer is 34}"), ("34", "The answer is 34"),
    ("34", r"34 \text{ is the answer}"), ("34", r"\textbf{(C)}\ 34"), (r"\text{(C)}", r"\textbf{(C)}\ 34"),
    (r"\text{(C)}", "C"), (r"\text{(C)}", "(C)"), (r"\text{(C)}", r"\text{C}"), (r"\text{Evelyn}", "Evelyn"),
    (r"\text{Evelyn}", r"\text{evelyn}"), ("Evelyn", r"\text{Evelyn}"), (r"\text{ellipse}", "an ellipse"),
    (r"\text{A,B,C,D}", "A, B, C, D"), (r"\text{no solution}", "No solution."),
    ("yes", r"\text{Yes}"), ("DNE", "dne"),
    # lists, sets, tuples
    ("(1,2,3)", "(1,2,3)"), ("(1,2,3)", r"\left(1, 2, 3\right)"), ("(-2,1)", "(-2, 1)"), ("1,2,3", "3,2,1"),
    ("1,-2", r"-2 \text{ and } 1"), ("1,-2", "x=1 or x=-2"), ("3, 5, 7", "3,5,7"), (r"\{1,2\}", "2,1"),
    ("1331 and 1728", "1331, 1728"), ("1331 and 1728", r"1728 \text{ and } 1331"), (r"$69$,$84$", "84, 69"),
    (r"(3,2),(-3,2)", "(-3,2), (3,2)"), (r"2, 3, \text{ and } 4", "2,3,4"), ("100, 200", "200, 100"),
    (r"6, 8\text{, and }10", "10, 8, 6"), (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
    (r"3 \pm 2 \sqrt{2}", r"3 \pm \sqrt{8}"), (r"\{1\pm\sqrt{5},-2\}", r"\{-2, 1+\sqrt5, 1-\sqrt5\}"),
    ("1/2, 3", "3, 0.5"), ("10,11,123", "123, 11, 10"), ("(x,y)=(1,2)", "(1,2)"), ("(1,2)", "(x,y) = (1,2)"),
    # intervals and inequalities, both ways
    ("(2,5]", r"2 < x \le 5"), (r"2 < x \le 5", "(2,5]"), (r"x \in [-2,7]", "[-2,7]"), ("[-2,7]", r"x \in [-2,7]"),
    (r"(2,\infty)", "x > 2"), ("x>2", r"(2,\infty)"), ("x > 2", "2 < x"), (r"(-\infty, 0]", "x ≤ 0"),
    (r"(0,9) \cup (9,36)", r"(9,36)\cup(0,9)"), (r"k \geqslant 2", r"k \ge 2"), (r"[2 \sqrt{2},4]", r"[\sqrt{8},4]"),
    # matrices
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}"),
    # number bases
    ("1011_2", "1011_2"), ("1011_2", "1011_{2}"), ("1011_2", r"1011_{\text{two}}"), ("52_8", "52"),
    ("110111", "110111_2"), (r"\text{A5}_{11}", "A5_{11}"),
    # equations, expressions, complex numbers
    ("x=5", "5"), ("x=5", "x=5"), ("5", "x=5"), ("y = 2x + 3", "2x+3"), ("y = 2x + 3", "y=3+2x"), ("p - q", "-q+p"),
    ("x^2+2x+1", "(x+1)^2"), ("x²", "x^2"), ("6 - 5i", "-5i+6"), (r"3\sqrt{13}", r"\sqrt{117}"),
    (r"3\sqrt{13}", "3√13"),
    (r"11\sqrt2", r"11 \sqrt{2}"), (r"\frac{11+9a}{20}", "0.55+0.45a"), (r"\frac{3}{\sqrt{3}}", r"\sqrt{3}"),
    ("np.arcsin(10/13)", r"\arcsin\frac{10}{13}"), (r"2007 + \frac\pi 2", r"2007+\frac{\pi}{2}"), (r"288 \pi", "288π"),
    ("[a +b, b]", "[a+b,b]"), (r"\frac{100!}{2^{50}}", r"\frac{100!}{2^{50}}"), ("k=1", "1"),
    ("5x - 7y + 11z + 4 = 0", "-5x+7y-11z-4=0"), (r"$m_{\max }=n^{2}-n-1$", "n^2-n-1"),
    # characters that nobody sees
    ("34", "34\x00"), ("34", "3\u200b4"), ("34", "\u202e34\u202c"), ("34", "34\ufeff"), ("34", "34\u00a0"),
    ("34", "34\ud800"),
]  # fmt: skip

WRONG = [
    ("34", "35"), ("34", "-34"), ("34", "3 4"), ("34", "340"), ("34", "17+18"), ("7/3", "21/3"), ("7", "2 1/3"),
    # an approximation of an exact gold
    ("1/3", "0.333333"), ("1/3", "0.33"), ("1/3", "0.3333333333333333"), (r"\frac{\pi}{4}", "0.785398"),
    (r"\sqrt{2}", "1.41421356"), (r"2\pi", "6.283185"), ("0.333", "1/3"), ("34", "34.000001"),
    ("34", "33.9999999999999999"), ("10000000000000000", "10000000000000001"), (r"10^{16}", "10000000000000001"),
    (r"\sqrt{2}+10^{-9}", r"\sqrt{2}"),
    # factors that look like something else
    ("12000", "1.2e5"), ("1.77e-6", "1.77e-7"), ("1234", "1,235"), ("3", "3万"), ("34", "34 million"), ("50%", "51%"),
    (r"50\%", "0.5%"), (r"50\%", "5"), ("0.5", "0.5%"), ("34", "34x"), ("34", "34 x"), ("34", "34xy"), ("34", "34i"),
    ("34", r"34\text{ million}"), ("34", "34x^2"), ("34", "34 x^2"), ("34", "34x/y"), ("34", r"34\text{ hundredths}"),
    ("34", "34 hundredths"), ("34", "34 Factorial"), ("34", r"34\pi"), ("10", "10 factorial"), ("34", "34!"),
    (r"90^\circ", r"\frac{\pi}{2}"), ("6m", "6"), (r"\sin 30^\circ", r"\sin 30"),
    (r"\frac{1}{m} t", r"\frac{1}{m}"),
    # words
    (r"\text{(C)}", "(D)"), (r"\text{Evelyn}", r"\text{Navin}"), (r"\text{east}", "seat"),
    (r"\text{A,B,C,D}", "A,B,C"),
    ("34", "undefined"), (r"\text{(C)}", "34"),
    # lists, sets, tuples
    ("(1,2,3)", "1,2,3"), ("(1,2,3)", r"\{1,2,3\}"), ("(1,2,3)", "(3,2,1)"), ("(2,4)", "2,4"), ("(-2,1)", "(1,-2)"),
    (r"(\sqrt{2},\pi)", r"\sqrt{2},\pi"), ("1,-2", "1"), ("1,2", "1,2,3"), ("1,2,3", "1,2"), ("(1,2)", "(1,2,2)"),
    ("1331 and 1728", "1728"), ("1331 and 1728", "1331"), ("1728", "1331 and 1728"), ("34", "12 or 34"),
    ("34", "12, 34"), ("(3,2),(-3,2)", "(-3,2),(2,3)"), ("(1,234)", "1234"), (r"\sqrt{2}", r"\sqrt{2}, \sqrt{3}"),
    # intervals, matrices, bases, equations
    ("(2,5]", "2 < x < 5"), ("(2,5]", "(2,5)"), ("[2,5]", "(2,5]"), ("x > 2", r"x \ge 2"), (r"(2,\infty)", "x > 3"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}"),
    (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{pmatrix} -1 \end{pmatrix}"), ("1011_2", "1011_3"),
    ("1011_2", "1010_2"), ("52_8", "53"), ("x=5", "y=5"), ("6 - 5i", "6+5i"),
    ("5x - 7y + 11z + 4 = 0", "5x-7y+11z=4"),
    # no value at all
    ("34", r"\infty"), ("34", r"\frac{1}{0}"), ("34", r"\frac{0}{0}"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_equal(verifier, gold, answer):
    assert verifier.verify(gold, rf"So the result is $\boxed{{{answer}}}$.") == Verdict(1.0, "correct")


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_not_equal(verifier, gold, answer):
    assert verifier.verify(gold, rf"So the result is $\boxed{{{answer}}}$.") == Verdict(0.0, "wrong")


def test_golds_equal_themselves_and_nothing_else(verifier):
    golds = [gold for gold, _ in RIGHT]
    texts = [rf"\boxed{{{gold}}}" for gold in golds]
    assert {v.reason for v in verifier.verify_batch(golds, texts)} == {"correct"}
    others = verifier.verify_batch(golds, [r"\boxed{98765+\sqrt{7}}"] * len(golds))
    assert {v.reward for v in others} == {0.0}


# ---------------------------------------------------------------------------------------------------------------------
# Where the answer is: (gold, completion, reason)
# ---------------------------------------------------------------------------------------------------------------------

TEXTS = [
    ("34", r"\boxed{34}", "correct"), ("34", r"\fbox{34}", "correct"), ("34", r"\boxed 34", "correct"),
    ("34", r"\boxed{\boxed{34}}", "correct"), ("34", r"$$\boxed{34}$$", "correct"), ("34", r"\boxed {34}", "correct"),
    # the last answer counts
    ("34", r"\boxed{12} no, \boxed{34}", "correct"), ("34", r"\boxed{34} no, \boxed{12}", "wrong"),
    ("34", "Answer: 12\nAnswer: 34", "correct"), ("34", "Answer: 34\nAnswer: 12", "wrong"),
    ("34", "\\boxed{12}\nAnswer: 34", "correct"), ("34", "Answer: 12\n\\boxed{34}", "correct"),
    ("34", "Answer: 34\n\\boxed{12}", "wrong"), ("34", r"\boxed{12} wait, the answer is 34.", "correct"),
    ("34", r"\boxed{12}. \boxed{34}", "correct"), ("34", "\\boxed{12}\n\n\\boxed{34}", "correct"),
    ("34", "#### 12\n\nSo \\boxed{34}", "correct"), ("34", r"\boxed{34}. The answer is correct.", "correct"),
    ("34", r"\boxed{34}. This is the answer: it fits.", "correct"), ("34", r"\boxed{34} is the answer.", "correct"),
    ("34", r"The answer is $\boxed{34}$. I hope it is correct.", "correct"),
    ("34", r"Answer: $\boxed{34}$", "correct"),
    ("34", r"The answer is 34. The answer is not 12.", "correct"), ("34", "The answer is 34. #### 12", "correct"),
    # boxes side by side are one answer
    ("34", r"\boxed{12} or \boxed{34}", "wrong"), ("34", r"$\boxed{12}$, $\boxed{34}$", "wrong"),
    ("12", r"\boxed{12} \boxed{34}", "wrong"), ("34", r"\boxed{34}, \boxed{34}", "correct"),
    ("1,-2", r"$\boxed{1}$ and $\boxed{-2}$", "correct"), ("1,-2", r"$x=\boxed{1}$ or $x=\boxed{-2}$", "correct"),
    ("1,-2,3", r"\(\boxed{1}\), \(\boxed{-2}\), \(\boxed{3}\)", "correct"),
    # cut off
    ("42", r"\boxed{42} wait, no, \boxed{4", "truncated_box"), ("34", r"\boxed{34", "truncated_box"),
    ("34", r"\boxed{\frac{68}{2}", "truncated_box"), ("34", "so \\boxed", "truncated_box"),
    ("34", "so \\boxed{", "truncated_box"), ("34", "\\boxed{3 and on\nAnswer: 34", "truncated_box"),
    ("34", r"\boxed{34\}", "truncated_box"), ("34", "so 17 + 17 = 34 + 0 = 34 and then", "no_answer"),
    ("34", "The result is 34", "no_answer"), ("34", "34", "no_answer"), ("34", "$34$", "no_answer"),
    ("34", "", "no_answer"), ("34", "Answer: 12. No. Answer:", "no_answer"), ("34", r"\boxed{}", "no_answer"),
    ("34", r"\boxed{ }", "no_answer"), ("34", "The answer is", "no_answer"), ("34", "It isn't 34", "no_answer"),
    # DAPO's line
    ("34", "Answer: 34", "correct"), ("34", "**Answer:** 34", "correct"), ("34", "**Answer**: 34", "correct"),
    ("34", "**Answer: 34**", "correct"), ("34", "Answer: 34.", "correct"), ("34", "Answer: 34.0", "correct"),
    ("34", "Answer: 034", "correct"), ("34", "Answer: 34. We have 2 cases", "correct"),
    ("34", "Answer: $34$", "correct"),
    ("34", "Answer: $34$.", "correct"), ("34", "Answer: $x = 34$", "correct"), ("34", "Answer: $34", "correct"),
    ("34", r"Answer: \(34\)", "correct"), ("34", "Answer:\n34", "correct"), ("34", "Answer:\n\n$$34$$", "correct"),
    ("34", "Answer:\n\\[\n34\n\\]\n", "correct"), ("34", "answer : 34", "correct"), ("34", "ANSWER：34", "correct"),
    ("34", "Answer: 34 apples", "correct"), ("34", "Answer: 34 because 17 + 17 = 34", "correct"),
    ("34", "Answer: 34, since it fits", "correct"), ("1234", "Answer: 1,234", "correct"),
    ("34", "İ Answer: 34", "correct"),
    ("34", r"Answer: \textbf{34}", "correct"), ("34", "Answer: 12 or 34", "wrong"), ("34", "Answer: `34`", "correct"),
    ("34", "Answer: $12$ or $34$", "wrong"), ("1,-2", "Answer: $1$ and $-2$", "correct"),
    ("34", 'Answer: "34"', "correct"),
    ("34", "Final Answer: 34", "correct"), ("34", "Answer: **34**", "correct"),
    ("1/2", r"Answer: \frac{1}{2}", "correct"),
    (r"\text{Evelyn}", "Answer: Evelyn", "correct"), ("34", "Answer: 34<|im_end|>", "correct"),
    ("34", "Answer: 34</s>", "correct"), (r"50\%", "Answer: $50$%", "correct"),
    ("18.90", r"Answer: $\$18.90$", "correct"),
    ("34", "Answer: $x$ = 34", "correct"),
    # other markers
    ("34", "## Final Answer\n\n34", "correct"), ("34", "**Final Answer**\n\n$34$", "correct"),
    ("34", "#### 34", "correct"),
    ("1234", "#### 1,234", "correct"), ("34", "text\n#### 34\n", "correct"), ("34", "so #### 34", "no_answer"),
    ("34", "<answer>34</answer>", "correct"), ("34", "<answer> $34$ </answer> ok", "correct"),
    ("34", "I give my answer\n34", "no_answer"), ("34", "The answer is 34.", "correct"),
    ("34", "the final answer is: 34", "correct"), ("34", "So the answer is **34**.", "correct"),
    ("34", "The answer is therefore $34$, as was to be shown.", "correct"),
    ("34", "The answer should be 34", "correct"),
    ("34", "The answer to the problem is 34.", "correct"), ("34", "The answer = 34", "correct"),
    ("1,-2", "The answers are 1 and -2.", "correct"),
    ("1,-2", "Answers: 1, -2", "correct"), ("34", "The answer is 34.5.", "wrong"),
    ("34.5", "The answer is 34.5.", "correct"), ("34", "The answer isn't 34", "no_answer"),
    ("34", "答案是34。", "correct"), ("34", "所以答案是 34", "correct"), ("34", "答案：34", "correct"),
    ("34", "最终答案为：$34$。", "correct"), ("34", "故答案为34个。", "correct"),
    ("34", "答案是12。答案是34。", "correct"),
    ("34", "答案是35。", "wrong"),
    # thinking aloud
    ("34", r"<think>\boxed{12}</think>\boxed{34}", "correct"), ("34", r"<think>\boxed{34}</think>I see.", "no_answer"),
    ("34", r"<think>\boxed{34}", "no_answer"), ("34", r"so \boxed{12}</think>Answer: 34", "correct"),
    ("34", r"<think>a</think>\boxed{34}<think>b", "no_answer"), ("34", r"a</think>\boxed{34}</think>b", "no_answer"),
    # spoiled inside the marker, and very long
    ("34", "\\boxed\u200b{34}", "correct"), ("34", "Ans\x00wer: 34", "correct"), ("34", "Answer:\u00a034", "correct"),
    ("34", r"\boxed{" + "9" * 3000 + "}", "too_long"), ("34", "x" * 2**20 + r"\boxed{34}", "correct"),
    ("34", r"\boxed{34}" + "x" * 2**20, "correct"), ("34", r"\boxed{\frac{}", "truncated_box"),
    ("34", r"\boxed{?}", "unparseable"), ("34", r"\boxed{\frac{3}{}}", "unparseable"),
    # golds
    ("", r"\boxed{34}", "bad_gold"), (None, r"\boxed{34}", "bad_gold"), (r"\frac{", r"\boxed{34}", "bad_gold"),
    ("ax+b, where b is any whole number", "no answer here", "bad_gold"), (float("nan"), r"\boxed{nan}", "bad_gold"),
    (True, r"\boxed{1}", "bad_gold"), ([], r"\boxed{34}", "bad_gold"), (["", "?"], r"\boxed{34}", "bad_gold"),
    (r"We get \boxed{34", r"\boxed{34}", "bad_gold"), ("?" * 3000, r"\boxed{34}", "bad_gold"),
    (34, r"\boxed{34}", "correct"),
    (34.0, r"\boxed{34}", "correct"), (1e22, r"\boxed{10^{22}}", "correct"), (["34"], r"\boxed{34}", "correct"),
    (["35", "34"], r"\boxed{34}", "correct"), (["35", "?"], r"\boxed{34}", "wrong"), (["35", ""], "?", "no_answer"),
    (r"We get \boxed{34}.", r"\boxed{34}", "correct"), ("17 + 17 = 34\n#### 34", r"\boxed{34}", "correct"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "text", "reason"), TEXTS, ids=lambda value: repr(value)[:40])
def test_completion(verifier, gold, text, reason):
    reward = {"correct": 1.0, "bad_gold": None}.get(reason, 0.0)
    assert verifier.verify(gold, text) == Verdict(reward, reason)


def test_extract_answer_says_what_it_read():
    assert extract_answer("Answer: 12\nso $\\boxed{\\frac{1}{2}}$") == ("\\frac{1}{2}", "found")
    assert extract_answer("\\boxed{1} and $\\boxed{2}$") == ("1,2", "found")
    assert extract_answer("\\boxed{1") == (None, "truncated_box")


@pytest.mark.parametrize("golds", [bench_verifier.BUILT_IN], ids=["built-in"])
def test_every_style_of_the_benchmark_gets_the_verdict_it_was_built_for(verifier, golds):
    table = [(gold, *style) for gold in golds for style in bench_verifier.styles(gold, 98765)]
    verdicts = verifier.verify_batch([gold for gold, *_ in table], [text for _, _, text, _ in table])
    failures = [(gold, name) for (gold, name, _, reward), v in zip(table, verdicts, strict=True) if v.reward != reward]
    assert len(table) == 20 * len(golds) and not failures


def test_fast_and_slow_path_agree_and_workers_are_renewed(small):
    """Every pair of 38 spellings of numbers, by exact arithmetic here and by math-verify there, in one worker."""
    spellings = (
        r"0;-0;1;-1;2;+2;025;34;34.0;034;-34;34.5;0.25;.25;1/4;\frac14;\frac{1}{4};-1/4;-0.25;2\frac{1}{4};9/4;2 1/4;"
        r"2.25;-9/4;1,234;1234;1{,}234;1.2e4;12000;1e-3;0.001;1/3;0.333333;10000000000000001;50\%;0.5%;0.5;50"
    ).split(";")
    pairs = list(dict.fromkeys(itertools.product([module._clean(s) for s in spellings], repeat=2)))
    assert len(pairs) > module.TASKS_PER_WORKER
    slow = small._workers.run([(gold, answer, None) for gold, answer in pairs], 60, 60)
    fast = [module._quick(gold, answer, None) for gold, answer in pairs]
    assert [pair for pair, a, b in zip(pairs, fast, slow, strict=True) if a != b] == []


# ---------------------------------------------------------------------------------------------------------------------
# Options, golds, and the reward function
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "text", "reason"),
    [
        ("34", r"\boxed{34}", "correct"), ("34", "Answer: 034", "correct"), ("34", r"\boxed{34.0}", "correct"),
        ("34", r"\boxed{x = 34}", "correct"), ("34", r"\boxed{34\text{ cm}}", "correct"),
        ("-34", r"\boxed{-34}", "correct"),
        ("34", r"\boxed{17\cdot 2}", "wrong"), ("34", r"\boxed{17+17}", "wrong"), ("5", r"\boxed{2+3=5}", "wrong"),
        ("34", r"\boxed{68/2}", "wrong"), ("34", r"\boxed{" + "+".join("1" * 34) + "}", "wrong"),
        ("34", r"\boxed{35}", "wrong"), ("34", r"\boxed{-34}", "wrong"), ("34", r"\boxed{34", "truncated_box"),
        ("34", "so 34", "no_answer"), ("17+17", r"\boxed{34}", "bad_gold"), ("1/2", r"\boxed{1/2}", "bad_gold"),
        (34, r"\boxed{34}", "correct"),
    ],
)  # fmt: skip
def test_exact_takes_only_the_literal_number_and_needs_no_process(gold, text, reason):
    exact = MathVerifier(exact=True)
    assert exact.verify(gold, text).reason == reason
    assert exact._workers.process is None


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("1.6", "1.61", True), ("1.6", "1.7", False), ("4.5e33", r"4.49 \times 10^{33}", True), ("1/3", "0.333", True),
        ("-1.6", "1.6", False), ("0", "0.001", False), (r"\frac{\pi}{4}", "0.785", True),
        (r"\frac{\pi}{4}", "0.8", False),
        (r"\sqrt{2}", r"\frac{1.414}{1}", True), (r"\arcsin(10/13)", "0.878", True), ("x", "1", False),
        (r"\frac{\sqrt{2}}{1000}", "0.0024", False), ("2,3", "2.99,2.01", True), ("2+3i", "2.001+3i", False), ("50%", "0.502", True),
    ],
)  # fmt: skip
def test_relative_tolerance(verifier, monkeypatch, gold, answer, right):
    monkeypatch.setattr(verifier, "rel_tol", 0.01)
    assert verifier.verify(gold, rf"\boxed{{{answer}}}").reward == float(right)


def test_check_golds(verifier):
    good = ["34", r"\sqrt{2}", r"\text{Evelyn}", 3, 0.5, ["?", "34"], "52_8", r"\boxed{3}"]
    assert verifier.check_golds(good) == [None] * len(good)
    bad = {
        "": "empty", "?": "unparseable", "f(x)=ax+b, where b is any integer": "prose", r"\boxed{3": "truncated_box",
        "9" * 2001: "too_long", None: "not a number or a text but NoneType", float("inf"): "not finite",
    }  # fmt: skip
    assert verifier.check_golds([*bad, []]) == [*bad.values(), "an empty list"]
    assert MathVerifier(exact=True).check_gold(r"\frac12") == "not a plain number, which exact=True needs"


@pytest.mark.skipif(not DATA.exists(), reason=f"{DATA} is absent")
@pytest.mark.parametrize("name, unusable", [("aime24", 0), ("aime25", 0), ("amc23", 0), ("hmmt25_feb", 0)])
def test_real_golds_are_usable_and_equal_themselves(verifier, name, unusable):
    golds = [json.loads(line)["answer"] for line in (DATA / f"{name}.jsonl").open()]
    assert sum(problem is not None for problem in verifier.check_golds(golds)) == unusable
    verdicts = verifier.verify_batch(golds, [f"Answer: ${gold}$" for gold in golds])
    assert {v.reason for v in verdicts} == {"correct"}


def test_reward_function_of_trl(verifier):
    logged = {}
    said = [{"role": "assistant", "content": r"\boxed{34}"}]
    blocks = [{"role": "assistant", "content": [{"type": "text", "text": "Answer:"}, {"type": "text", "text": " 34"}]}]
    with_tool = [{"role": "assistant", "content": "12"}, {"role": "tool", "content": "Answer: 34"}]
    only_tools = [{"role": "assistant", "content": None, "tool_calls": []}]
    texts = [r"\boxed{35}", r"\boxed{3", r"\boxed{?}", r"\boxed{34}"]
    completions = [said, blocks, with_tool, only_tools, *texts]
    before = verifier.counts.copy()
    rewards = verifier(
        prompts=[""] * 8, completions=completions, solution=["34"] * 7 + ["?"], log_metric=logged.__setitem__,
        log_extra=None, trainer_state=None, completion_ids=[],
    )  # fmt: skip
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, None]
    assert logged.pop("verifier/seconds") > 0
    assert logged == {
        "verifier/correct_frac": 2 / 8, "verifier/wrong_frac": 1 / 8, "verifier/no_answer_frac": 2 / 8,
        "verifier/truncated_frac": 1 / 8, "verifier/unparseable_frac": 1 / 8, "verifier/bad_gold_frac": 1 / 8,
        "verifier/too_long_frac": 0, "verifier/timeout_frac": 0, "verifier/memory_frac": 0, "verifier/crash_frac": 0,
    }  # fmt: skip
    assert verifier.counts - before == {"correct": 2, "wrong": 1, "no_answer": 2, "truncated_box": 1, "unparseable": 1,
                                        "bad_gold": 1}  # fmt: skip
    assert verifier.__name__ == "math_verifier"
    assert verifier([], []) == []


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"3 completions, but 2 solutions"):
        MathVerifier()(["a", "b", "c"], ["1", "2"])
    with pytest.raises(TypeError, match=r"a completion is \{'content': 'x'\}"):
        MathVerifier()([{"content": "x"}], ["1"])
    for bad in ({"workers": 0}, {"timeout_s": 0}, {"memory_mb": 64}, {"rel_tol": 1.5}, {"rel_tol": -0.1}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}={next(iter(bad.values()))}"):
            MathVerifier(**bad)


def test_module_functions_share_a_verifier():
    assert verify("34", "Answer: 34. We are done") == Verdict(1.0, "correct")
    assert verify("34", r"\boxed{17 \cdot 2}", exact=True).reason == "wrong"
    assert check_gold("") == "empty" and check_gold("34") is None and check_gold("1/2", exact=True) is not None
    assert module._shared(False, None).counts["correct"] == 1


def test_a_pair_is_compared_once_and_all_workers_share_a_batch(verifier, monkeypatch):
    at_once = []
    wait = module.wait
    monkeypatch.setattr(module, "wait", lambda on, timeout: at_once.append(len(on) - 1) or wait(on, timeout))
    before = verifier.pooled
    named = ["", "x = "]  # two spellings of what is sent to the workers as one
    texts = [rf"{k}: \boxed{{{named[k % 2]}\sqrt{{3}}+{k % 5}\pi}}" for k in range(40)]
    verdicts = verifier.verify_batch([r"\pi+\sqrt{3}"] * 40, texts)
    assert [v.reward for v in verdicts] == [float(k % 5 == 1) for k in range(40)]
    assert verifier.pooled - before == 5
    assert max(at_once) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Hostile input, threads, signals, and the death of processes
# ---------------------------------------------------------------------------------------------------------------------


def test_hostile_inputs_are_answered(hasty):
    cases = bench_verifier.hostile()
    assert len(cases) >= 60
    start = time.monotonic()
    verdicts = hasty.verify_batch([gold for _, gold, _ in cases], [text for _, _, text in cases])
    assert time.monotonic() - start < 60  # a hang guard: the timeouts add up to some 5 s
    reasons = {name: v.reason for (name, _, _), v in zip(cases, verdicts, strict=True)}
    assert {name for name, v in zip(reasons, verdicts, strict=True) if v.reward} == {"1 MB boxes", "1 MB zero width"}
    assert reasons["tower of 5"] == "timeout" and "crash" not in reasons.values()


def test_a_timeout_costs_its_own_sample_only(verifier, monkeypatch):
    monkeypatch.setattr(verifier, "timeout_s", 3)
    golds = [r"\sqrt{2}"] * 4
    texts = [HANGS, r"\boxed{\frac{2}{\sqrt{2}}}", HANGS.replace("16", "17"), r"\boxed{\sqrt{8}-\sqrt{2}}"]
    assert [v.reason for v in verifier.verify_batch(golds, texts)] == ["timeout", "correct", "timeout", "correct"]


@pytest.mark.parametrize("limits", [(600, 0.3), (0.3, 600)], ids=["wall clock", "processor time"])
def test_either_timer_ends_a_task_inside_the_kernel(verifier, limits):
    assert works(verifier)
    supervisor, start = verifier._workers.process, time.monotonic()
    tower = module._clean(extract_answer(HANGS)[0])
    assert verifier._workers.run([(r"\sqrt{2}", tower, None)], *limits) == ["timeout"]
    assert verifier._workers.process is supervisor  # else the parent has given up and begun anew
    assert time.monotonic() - start < 60  # a hang guard


def test_golds_have_patience_on_a_busy_machine_and_answers_a_hard_wall_clock(monkeypatch):
    verifier, limits = MathVerifier(timeout_s=2), []

    def run(tasks, *given):
        limits.append(given)
        return ["ok" if answer is None else "wrong" for _, answer, _ in tasks]

    monkeypatch.setattr(verifier._workers, "run", run)
    assert verifier.verify(r"\sqrt{2}", r"\boxed{\sqrt{3}}").reason == "wrong"
    assert limits == [(2, 20), (2, 2)]


def test_a_gold_that_hangs_is_found_by_its_processor_time(hasty):
    assert hasty.check_gold("10^{10^{10}}") == "timeout"
    assert hasty.verify("10^{10^{10}}", r"\boxed{34}") == Verdict(None, "bad_gold")


def test_memory_limit(small):
    assert small.verify("34", r"\boxed{(x+y+z+w+1)^{60}}") == Verdict(0.0, "memory")
    assert works(small)


def test_any_thread_may_call(verifier):
    def check(k):
        return verifier.verify(rf"\sqrt{{{k}}}", rf"\boxed{{\frac{{{k}}}{{\sqrt{{{k}}}}}}}").reason

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(check, [2, 3, 5, 6, 7, 10, 11, 13])) == {"correct"}
    assert asyncio.run(asyncio.to_thread(check, 14)) == "correct"


def test_the_alarm_of_the_parent_is_left_alone(hasty):
    def ours(*_):
        raise AssertionError("the alarm went off")

    old = signal.signal(signal.SIGALRM, ours)
    signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        assert hasty.verify(r"\sqrt{2}", HANGS).reason == "timeout"
        assert signal.getsignal(signal.SIGALRM) is ours
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def processes(group):
    """{process id: parent} of the living processes of a group."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        if int(its_group) == group and state not in "ZX":
            found[int(stat.parent.name)] = int(parent)
    return found


def wait_until(condition):
    guard = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < guard, "30 s have passed"
        time.sleep(0.02)


def group_of(verifier):
    return verifier._workers.process.pid


@on_linux
@pytest.mark.parametrize("victim", ["a worker", "the supervisor"])
def test_an_idle_process_that_is_killed_is_replaced(mortal, victim):
    group = group_of(mortal)
    assert len(processes(group)) == 3
    workers = [pid for pid, parent in processes(group).items() if parent == group]
    pid = workers[0] if victim == "a worker" else group
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in processes(group))
    assert works(mortal)
    assert len(processes(group_of(mortal))) == 3


@on_linux
def test_a_worker_that_is_killed_at_work_gets_a_second_chance_and_then_is_a_crash(mortal):
    reasons, killed, group = [], set(), group_of(mortal)
    thread = threading.Thread(target=lambda: reasons.append(mortal.verify(r"\sqrt{2}", HANGS).reason))
    thread.start()

    def kill_the_busy():
        for pid, parent in processes(group).items():
            ticks = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
            if parent == group and ticks > 20:  # 0.2 s of work: it has begun
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        return reasons

    wait_until(kill_the_busy)
    thread.join()
    assert reasons == ["crash"] and len(killed) == 2
    assert works(mortal) and group_of(mortal) == group


@on_linux
def test_an_interrupt_passes_through_and_leaves_no_stale_answer(mortal, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    group = group_of(mortal)
    with monkeypatch.context() as patch:
        patch.setattr(module, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mortal.verify(r"\sqrt{2}", r"\boxed{\sqrt{3}}")
    assert not processes(group)
    assert works(mortal)


@on_linux
def test_no_process_is_left_behind(mortal):
    assert works(mortal)
    group = group_of(mortal)
    mortal.close()
    assert not processes(group)


def script(tmp_path, body):
    """Starts a script that has no __main__ guard, as a recipe may, and notes how often its top level runs."""
    path = tmp_path / "script.py"
    path.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"open({str(tmp_path / 'runs')!r}, 'a').write('run\\n')\n"
        "import gc, os, threading, time\n"
        "from verifier import MathVerifier, verify\n"
        "assert not {'torch', 'trl', 'transformers', 'sympy', 'math_verify'} & set(sys.modules)\n" + body
    )
    return subprocess.Popen(
        [sys.executable, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )


SLOW = r"r'\boxed{\sqrt{8}-\sqrt{2}}'"


@on_linux
def test_workers_die_with_a_parent_that_is_killed(tmp_path):
    parent = script(
        tmp_path,
        "verifier = MathVerifier(workers=2, timeout_s=600)\n"
        f"verifier.verify(r'\\sqrt{{2}}', {SLOW})\n"
        f"threading.Thread(target=verifier.verify, args=(r'\\sqrt{{2}}', r'{HANGS}')).start()\n"
        "time.sleep(0.3)\n"
        "print(verifier._workers.process.pid, flush=True)\n",
    )
    group = int(parent.stdout.readline())
    assert len(processes(group)) == 3
    parent.kill()
    parent.communicate()
    wait_until(lambda: not processes(group))
    assert (tmp_path / "runs").read_text() == "run\n"


@on_linux
def test_workers_end_with_their_object_and_at_exit(tmp_path):
    parent = script(
        tmp_path,
        "verifier = MathVerifier(workers=1)\n"
        f"verifier.verify(r'\\sqrt{{2}}', {SLOW})\n"
        "print(verifier._workers.process.pid, flush=True)\n"
        "sys.stdin.readline()\n"
        "del verifier; gc.collect()\n"
        f"assert verify(r'\\sqrt{{2}}', {SLOW}).reason == 'correct'\n"
        "import verifier\n"
        "print(verifier._shared(False, None)._workers.process.pid, flush=True)\n"
        "sys.stdin.readline()\n"
        "sys.exit(3)\n",
    )
    first = int(parent.stdout.readline())
    assert len(processes(first)) == 2
    parent.stdin.write("\n")
    parent.stdin.flush()
    second = int(parent.stdout.readline())
    assert processes(second) and not processes(first)
    parent.communicate("\n")
    assert parent.returncode == 3
    assert not processes(second)


def test_a_fork_gets_workers_of_its_own(tmp_path):
    parent = script(
        tmp_path,
        "verifier = MathVerifier(workers=1)\n"
        f"check = lambda: verifier.verify(r'\\sqrt{{2}}', {SLOW}).reason\n"
        "assert check() == 'correct'\n"
        "mine = verifier._workers.process.pid\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    fine = check() == 'correct' and verifier._workers.process.pid != mine\n"
        "    verifier.close()\n"
        "    os._exit(0 if fine else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert check() == 'correct' and verifier._workers.process.pid == mine\n"
        "print('fine')\n",
    )
    assert parent.communicate()[0] == "fine\n"


def test_what_cannot_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such wheel')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"cannot import math-verify: no such wheel.*pip install -r require"):
        MathVerifier(workers=1).verify(r"\sqrt{2}", r"\boxed{\frac{2}{\sqrt{2}}}")


def test_pickling_takes_the_settings_and_no_process():
    verifier = MathVerifier(workers=3, timeout_s=1.5, memory_mb=300, exact=True, rel_tol=0.1)
    copy = pickle.loads(pickle.dumps(verifier))
    names = ("workers", "timeout_s", "memory_mb", "exact", "rel_tol")
    assert [getattr(copy, n) for n in names] == [getattr(verifier, n) for n in names] == [3, 1.5, 300, True, 0.1]


def test_ranks_share_the_cores(monkeypatch):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert MathVerifier().workers == min(4, cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert MathVerifier().workers == 1


def test_reasons_are_the_documented_ones():
    assert {reason for _, _, reason in TEXTS} | {"timeout", "memory", "crash"} == set(REASONS)
