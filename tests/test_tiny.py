"""The embedded default: problems, split, tokenizer, template, checkpoint. Every answer is found a second way."""

import ast
import hashlib
import itertools
import json
import operator
import os
import re
import subprocess
import sys
import unicodedata
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from rlvr_common import record_routing
from tiny.tasks import KINDS, LEVELS, STYLES, is_right, make_rows, split_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tiny" / "qwen3"
MOES = [ROOT / "tiny" / name for name in ("qwen3_moe", "qwen3_moe_split", "qwen3_moe_words")]
PINNED = "493c55b16e4da4b6aa9a0326d60b9aa5abe35c4acf796c167449da4382129b1c"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True).eval()


@pytest.fixture(scope="module")
def rows():
    return {split: make_rows(split, 2400) for split in ("train", "heldout")}


# --- answers, by reading the text ------------------------------------------------------------------------------------


def evaluate(expression, x=0):
    """A value by walking the syntax tree: no `eval`, nothing shared with the generator. 3x is 3*x."""
    operators = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

    def walk(node):
        if isinstance(node, ast.BinOp):
            return operators[type(node.op)](walk(node.left), walk(node.right))
        return x if isinstance(node, ast.Name) else node.value

    return walk(ast.parse(re.sub(r"(\d)x", r"\1*x", expression), mode="eval").body)


def solved(problem):
    """The answer from the problem's text alone; brute force where the generator computes."""
    if m := re.fullmatch(r"Compute (.+)\.", problem):
        return evaluate(m[1])
    if m := re.fullmatch(r"Remainder of (\d+)/(\d+)\?", problem):
        rest = int(m[1])
        while rest >= int(m[2]):
            rest -= int(m[2])
        return rest
    if m := re.fullmatch(r"Larger of (.+) and (.+)\?", problem):
        a, b = evaluate(m[1]), evaluate(m[2])
        return a if a > b else b
    if m := re.fullmatch(r"Solve (.+)=(.+)\.", problem):
        (x,) = [x for x in range(100) if evaluate(m[1], x) == evaluate(m[2], x)]
        return x
    if m := re.fullmatch(r"(Second )?(smallest|largest) of (.+)\?", problem, re.IGNORECASE):
        left = [int(number) for number in m[3].split(",")]
        best = min if m[2].lower() == "smallest" else max
        if m[1]:
            left.remove(best(left))
        return best(left)
    for pattern, value in (
        (r"Ann has (\d+) pens and buys (\d+) more. How many pens\?", lambda a, b: a + b),
        (r"Ann has (\d+) pens and loses (\d+). How many pens\?", lambda a, b: a - b),
        (r"Tom has (\d+) eggs and (\d+) boxes of (\d+). How many eggs\?", lambda a, b, c: a + sum([c] * b)),
        (
            r"(\d+) friends share (\d+) eggs, then each buys (\d+) more. How many each\?",
            lambda a, b, c: Fraction(b, a) + c,
        ),
        (
            r"Eve has (\d+) coins, buys (\d+) cakes at (\d+) each and finds (\d+). How many coins\?",
            lambda a, b, c, d: a - sum([c] * b) + d,
        ),
        (
            r"Eve sells (\d+) cakes at (\d+) and (\d+) pies at (\d+). How many coins\?",
            lambda a, b, c, d: sum([b] * a) + sum([d] * c),
        ),
    ):
        if m := re.fullmatch(pattern, problem):
            return value(*map(int, m.groups()))
    raise AssertionError(f"unknown wording: {problem}")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_answers_are_right_by_another_route(rows, split):
    for row in rows[split]:
        assert solved(row["problem"]) == int(row["answer"]), row
        assert int(row["answer"]) >= 0


@pytest.mark.parametrize("style", STYLES)
def test_a_clean_rationale_is_true_line_by_line_and_ends_in_the_box(style):
    operators = {" plus ": "+", " minus ": "-", " times ": "*", " over ": "/", " is ": "="}
    for row in make_rows("train", 1200, seed=3, style=style):
        text = row["rationale"]
        assert text.endswith(f"\\boxed{{{row['answer']}}}") and is_right(text, row["answer"])
        for word, sign in operators.items():
            text = text.replace(word, sign)
        assert "=" in text or "<" in text or "then" in text
        for left, right in re.findall(r"(?<![\d/])([\d+*-]+)=(-?\d+)", text):
            assert evaluate(left) == int(right), row
        for a, b, c in re.findall(r"(\d+)/(\d+)=(\d+)", text):
            assert int(b) * int(c) == int(a), row
        for chain in re.findall(r"[\d<]*<[\d<]*", text):
            numbers = [int(number) for number in chain.split("<")]
            assert numbers == sorted(numbers), row


def test_rows_are_balanced_distinct_and_prefix_stable(rows):
    for split, part in rows.items():
        cells = [(row["kind"], row["level"]) for row in part[:240]]
        assert {cell: cells.count(cell) for cell in set(cells)} == dict.fromkeys(itertools.product(KINDS, LEVELS), 10)
        assert len({row["problem"] for row in part}) == len(part)
        assert make_rows(split, 100) == part[:100]
    assert {(r["kind"], r["level"]) for r in make_rows("train", 50, kinds=["sum", "word"], levels=[2])} == {
        ("sum", 2),
        ("word", 2),
    }
    mixed = make_rows("heldout", 100, kinds=["product", "sum"], levels=[1])  # products end, sums go on
    assert len({row["problem"] for row in mixed}) == 100
    assert make_rows("train", 20, seed=1) != make_rows("train", 20, seed=2)


def test_same_rows_in_another_process_and_forever():
    """A pinned digest: a change of the task's text is a change of the shipped checkpoint's task, never an accident."""
    code = (
        "import hashlib, json; from tiny.tasks import make_rows; "
        "rows = [r for s in ('train', 'heldout') for r in make_rows(s, 240, 5, style='split', lazy=.2, slip=.3)]; "
        "print(hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    here = [
        row
        for split in ("train", "heldout")
        for row in make_rows(split, 240, seed=5, style="split", lazy=0.2, slip=0.3)
    ]
    digest = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()
    assert other.stdout.strip() == digest == PINNED


# --- the split -------------------------------------------------------------------------------------------------------


def test_split_is_a_function_of_the_text(rows):
    """Exhaustive where it can be: whatever make_rows gives for any seed carries its own side in its text."""
    seen = {"train": set(), "heldout": set()}
    for split in seen:
        for seed, style in itertools.product(range(3), STYLES):
            seen[split] |= {row["problem"] for row in make_rows(split, 480, seed=seed, style=style)}
        seen[split] |= {row["problem"] for row in rows[split]}
        assert {split_of(problem) for problem in seen[split]} == {split}
    assert not seen["train"] & seen["heldout"]
    numbers = {
        split: {tuple(sorted(map(int, re.findall(r"\d+", p)))) for p in problems} for split, problems in seen.items()
    }
    assert not numbers["train"] & numbers["heldout"]  # not even in another order, wording or kind


def test_a_whole_small_kind_splits_into_two_disjoint_parts():
    """All 64 problems of product level 1, enumerated: each on exactly one side, about one in five held out."""
    problems = {f"Compute {a}*{b}." for a, b in itertools.product(range(2, 10), repeat=2)}
    sides = {side: {p for p in problems if split_of(p) == side} for side in ("train", "heldout")}
    assert sides["train"] | sides["heldout"] == problems and not sides["train"] & sides["heldout"]
    assert 0.1 < len(sides["heldout"]) / len(problems) < 0.3
    for side, own in sides.items():
        assert {row["problem"] for row in make_rows(side, len(own), kinds=["product"], levels=[1])} == own


def test_order_and_wording_do_not_change_the_side():
    for row in make_rows("heldout", 240, seed=9):
        numbers = re.findall(r"\d+", row["problem"])
        for order in itertools.islice(itertools.permutations(numbers), 24):
            assert split_of("Anything about " + " or ".join(order) + "!") == "heldout"
    assert split_of("Compute 1+23.") != split_of("Compute 12+3.") or split_of("Compute 1+24.") != split_of(
        "Compute 12+4."
    )


# --- the sloppy teacher, the judge, the errors -----------------------------------------------------------------------


def test_sloppy_teacher_keeps_the_answers_and_errs_as_told():
    n = 2400
    clean, lazy, slip = (make_rows("train", n, seed=4, **kw) for kw in ({}, {"lazy": 0.5}, {"slip": 1.0}))
    for other in (lazy, slip):
        assert [(r["problem"], r["answer"]) for r in other] == [(r["problem"], r["answer"]) for r in clean]
    guesses = [r for r in lazy if re.fullmatch(r"\\boxed\{-?\d+\}", r["rationale"])]
    assert 0.46 < len(guesses) / n < 0.54
    assert all(abs(int(re.search(r"-?\d+", r["rationale"])[0]) - int(r["answer"])) <= 3 for r in guesses)
    assert {r["rationale"] for r in lazy} - {r["rationale"] for r in guesses} <= {r["rationale"] for r in clean}
    changed = [a["rationale"] != b["rationale"] for a, b in zip(clean, slip, strict=True)]
    assert all(changed)
    wrong = [not is_right(r["rationale"], r["answer"]) for r in slip]
    assert 0.75 < sum(wrong) / n < 1  # a slip may not matter, as in sorting what is not asked for


@pytest.mark.parametrize(
    "text, right",
    [
        ("\\boxed{68}", True),
        ("23+45=68\n\\boxed{68}", True),
        ("\\boxed{ 68 }", True),
        ("\\boxed{068}", True),
        ("\\boxed{1} no, \\boxed{68}", True),
        ("\\boxed{68} or \\boxed{1}", False),
        ("\\boxed{68} then \\boxed{6", False),
        ("\\boxed{68", False),
        ("68", False),
        ("", False),
        ("\\boxed{}", False),
        ("\\boxed{23+45}", False),
        ("\\boxed{68.0}", False),
        ("\\boxed{-68}", False),
        ("\\boxed{6 8}", False),
        ("\\boxed{\\boxed{68}}", True),
    ],
)
def test_is_right_wants_one_plain_integer_in_the_last_box(text, right):
    assert is_right(text, "68") is right
    assert is_right(text, 68) is right


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"split": "test", "n": 1}, "'test'.*train, heldout"),
        ({"split": "train", "n": 0}, "n=0"),
        ({"split": "train", "n": 1, "kinds": ["sums"]}, "'sums'.*equation"),
        ({"split": "train", "n": 1, "levels": [0]}, r"\[0\].*1, 2, 3"),
        ({"split": "train", "n": 1, "kinds": []}, "kinds is empty"),
        ({"split": "train", "n": 1, "style": "poem"}, "poem.*steps"),
        ({"split": "train", "n": 1, "lazy": 1.5}, "lazy=1.5"),
        ({"split": "train", "n": 1, "slip": -1}, "slip=-1"),
        (
            {"split": "heldout", "n": 500, "kinds": ["product"], "levels": [1]},
            "only 11 different heldout problems of n=500",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_rows(**arguments)
    with pytest.raises(ValueError, match="no number.*'Hello'"):
        split_of("Hello")


# --- tokenizer and template ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Compute 23+45.",
        "Ann has 12 pens.\n\n  two  spaces\ttab",
        "答案是34。",
        "naïve café € ∑ 😀 \u202b",
        "a" * 300,
        "\x00\x7f",
        "<think>hm</think> 1,234,567 \\boxed{\\frac{1}{2}}",
        " ",
        "\r\n",
    ],
)
def test_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert max(ids) < len(tokenizer)


def test_digits_roles_and_specials_are_single_tokens(tokenizer):
    assert tokenizer.tokenize("1234567890") == list("1234567890")
    for token in (
        "user",
        "assistant",
        "system",
        "\\boxed",
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<think>",
        "</think>",
    ):
        assert len(tokenizer(token)["input_ids"]) == 1, token
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == (
        "<|im_end|>",
        "<|endoftext|>",
        "left",
    )
    assert len(tokenizer) <= 512
    assert tokenizer.decode(tokenizer("7<|im_end|><|endoftext|>")["input_ids"], skip_special_tokens=True) == "7"


def test_template_renders_chatml(tokenizer):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Compute 1+2."},
        {"role": "assistant", "content": "\\boxed{3}"},
    ]
    system, user, assistant = (
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\nCompute 1+2.<|im_end|>\n",
        "<|im_start|>assistant\n\\boxed{3}<|im_end|>\n",
    )
    render = lambda *a, **kw: tokenizer.apply_chat_template(*a, tokenize=False, **kw)  # noqa: E731
    assert render(turns) == system + user + assistant
    assert render(turns[1:]) == user + assistant
    assert render(turns[1:2], add_generation_prompt=True) == user + "<|im_start|>assistant\n"
    with pytest.raises(Exception, match="knows system, user and assistant, not tool"):
        render([{"role": "tool", "content": "5"}])


def test_template_marks_what_the_assistant_says(tokenizer):
    """What assistant-only loss trains on: the answer and its <|im_end|>, nothing else."""
    turns = [{"role": "user", "content": "Compute 1+2."}, {"role": "assistant", "content": "\\boxed{3}"}] * 2
    out = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    said = [i for i, keep in zip(out["input_ids"], out["assistant_masks"], strict=True) if keep]
    assert tokenizer.decode(said) == "\\boxed{3}<|im_end|>" * 2


def test_completions_are_short(tokenizer, rows):
    """Rollouts stay quick: 64 new tokens hold every clean solution in the default style, 48 nearly every one."""
    lengths = [len(tokenizer(row["rationale"] + "<|im_end|>")["input_ids"]) for row in rows["train"]]
    assert max(lengths) <= 64 and sum(length <= 48 for length in lengths) / len(lengths) > 0.97
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": row["problem"]}], add_generation_prompt=True)
        for row in rows["train"]
    ]
    assert max(len(prompt["input_ids"]) for prompt in prompts) <= 48


# --- checkpoint ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoint_loads_offline_in_a_fresh_process():
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"print(type(M.from_pretrained({str(FOLDER)!r})).__name__, T.from_pretrained({str(FOLDER)!r}).eos_token)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd="/"
    )
    assert done.stdout.split() == ["Qwen3ForCausalLM", "<|im_end|>"]


def test_checkpoint_is_a_small_real_qwen3(model, tokenizer):
    assert type(model) is Qwen3ForCausalLM
    assert 200_000 < model.num_parameters() < 1_000_000
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.head_dim >= 32 and model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ids and model.generation_config.pad_token_id == ids[1]


def test_folder_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(files.values()) <= 2.5 * 2**20


def test_shipped_checkpoint_leaves_rl_its_work(model, tokenizer):
    """Held-out accuracy at temperature 1 between 30 and 60 %: often right, never reliably."""
    from recipes.cold_start import accuracy_table

    torch.manual_seed(0)
    table = accuracy_table(model, tokenizer, make_rows("heldout", 240))
    assert 0.30 <= table["all"][0] <= 0.60


@pytest.mark.parametrize("folder", MOES, ids=lambda folder: folder.name)
def test_moe_checkpoints_are_small_real_qwen3_moes(folder, tokenizer):
    moe = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert type(moe) is Qwen3MoeForCausalLM
    assert 900_000 < moe.num_parameters() < 1_200_000
    assert (moe.config.num_experts, moe.config.num_experts_per_tok, moe.config.num_hidden_layers) == (8, 2, 4)
    assert moe.config.output_router_logits is False  # RL without a load-balancing loss, as TRL reads it from here
    own = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert own.get_vocab() == tokenizer.get_vocab() and own.chat_template == tokenizer.chat_template
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2.5 * 2**20


@pytest.mark.parametrize("folder", MOES, ids=lambda folder: folder.name)
def test_moe_checkpoints_spread_over_their_experts_and_leave_rl_its_work(folder, tokenizer):
    from recipes.cold_start import solve

    moe = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    heldout = make_rows("heldout", 240)
    torch.manual_seed(0)
    assert 0.15 <= sum(solve(moe, tokenizer, heldout, do_sample=True)) / len(heldout) <= 0.60
    chosen = torch.zeros(4, 8)
    for row in heldout[:48]:
        turns = [{"role": "user", "content": row["problem"]}, {"role": "assistant", "content": row["rationale"]}]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        with torch.no_grad(), record_routing(moe) as recorder:
            moe(**ids)
        for layer in range(4):
            chosen[layer] += recorder.routes[0, :, layer].flatten().long().bincount(minlength=8)
    share = chosen / chosen.sum(1, keepdim=True)
    assert (chosen == 0).sum() <= 1 and share.max() < 0.5, chosen
    assert torch.special.entr(share).sum(1).exp().min() > 4, chosen  # as spread as over half of the experts


def test_the_teachers_of_the_moe_checkpoints_differ(tokenizer):
    """Greedy answers are written in three styles."""
    styles = set()
    for folder in MOES:
        moe = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        prompts = [[{"role": "user", "content": row["problem"]}] for row in make_rows("heldout", 24)]
        ids = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        out = moe.generate(**ids, do_sample=False, max_new_tokens=48)
        answers = "\n".join(tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True))
        # words: no equation; split: a step that adds or subtracts a multiple of ten
        styles.add(("=" in answers, bool(re.search(r"\d[+-][1-9]0=", answers)), "so \\boxed" in answers))
    assert styles == {(True, False, False), (True, True, False), (False, False, True)}


@pytest.mark.slow
def test_remaking_the_checkpoint_lowers_the_loss_and_repeats(tmp_path):
    """The recipe as a user launches it, from another folder, for 40 steps: loss falls, same seed = same weights."""
    weights = []
    for name in ("a", "b"):
        out = subprocess.run(
            [
                sys.executable,
                "-m",
                "accelerate.commands.launch",
                str(ROOT / "recipes" / "cold_start.py"),
                "--max_steps",
                "40",
                "--lazy_steps",
                "4",
                "--output_dir",
                str(tmp_path / name),
                "--logging_steps",
                "10",
                "--copies",
                "1",
                "--heldout_rows",
                "24",
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=900,
        )
        assert out.returncode == 0, out.stderr[-2000:]
        losses = [float(x) for x in re.findall(r"'loss': '([\d.]+)'", out.stdout)]
        assert len(losses) == 4 and losses[-1] < losses[0] - 1
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
