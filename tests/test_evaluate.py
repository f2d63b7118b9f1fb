"""evaluate.py: the estimators against enumeration, and runs that are stopped, resumed, changed, or fed bad input."""

import dataclasses
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from peft import LoraConfig, get_peft_model

from recipes import evaluate as ev

REPO = Path(__file__).parents[1]


# ---- estimators ----


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n):
    for c in range(n + 1):
        right = [i < c for i in range(n)]
        for k in range(1, n + 1):
            draws = list(itertools.combinations(right, k))
            assert ev.pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_of_large_numbers():
    exact = 1 - Fraction(math.comb(990, 100), math.comb(1000, 100))
    assert ev.pass_at_k(1000, 10, 100) == pytest.approx(float(exact), rel=1e-12)
    assert ev.pass_at_k(1000, 0, 1000) == 0.0 and ev.pass_at_k(1000, 1, 1000) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 0)])
def test_pass_at_k_refuses(n, c, k):
    with pytest.raises(ValueError, match=r"from (1 to n|0 to n)"):
        ev.pass_at_k(n, c, k)


def majority_by_enumeration(answers, rewards, k):
    total, draws = 0.0, 0
    for draw in itertools.combinations(range(len(answers)), k):
        draws += 1
        votes = Counter(answers[i] for i in draw if answers[i] is not None)
        winners = [a for a in votes if votes[a] == max(votes.values())]
        for winner in winners:
            worth = [r for a, r in zip(answers, rewards, strict=True) if a == winner]
            total += sum(worth) / len(worth) / len(winners)
    return total / draws


@pytest.mark.parametrize("seed", range(25))
def test_maj_at_k_is_the_mean_over_all_draws(seed):
    generator = np.random.default_rng(seed)
    n = int(generator.integers(1, 10))
    kinds = [None, "1", "2", "3", "4", "5", "6"][: int(generator.integers(2, 8))]  # few kinds: ties abound
    answers = [kinds[i] for i in generator.integers(len(kinds), size=n)]
    rewards = list(generator.random(n)) if seed % 2 else [float(a == "1") for a in answers]
    for k in range(1, n + 1):
        want = majority_by_enumeration(answers, rewards, k)
        assert ev.maj_at_k(answers, rewards, k) == pytest.approx(want, abs=1e-12), (answers, rewards, k)


def test_maj_at_k_by_hand():
    assert ev.maj_at_k(["a", "a", "b"], [1, 1, 0], 3) == pytest.approx(1.0)
    assert ev.maj_at_k(["a", "b"], [1, 0], 2) == pytest.approx(0.5), "a tie is shared"
    assert ev.maj_at_k(["a", None, None], [1, 0, 0], 3) == pytest.approx(1.0), "no answer has no vote"
    assert ev.maj_at_k([None, None], [0, 0], 2) == 0.0
    assert ev.maj_at_k(["a", "b", "b"], [1, 0, 0], 1) == pytest.approx(1 / 3), "of one sample: the mean reward"


def test_maj_at_k_of_many_samples_matches_drawing():
    generator = np.random.default_rng(0)
    answers = ["r"] * 90 + ["w"] * 100 + [f"s{i}" for i in range(50)] + [None] * 16
    rewards = [float(a == "r") for a in answers]
    exact = ev.maj_at_k(answers, rewards, 64)
    draws = []
    for _ in range(4000):
        votes = Counter(answers[i] for i in generator.choice(256, 64, replace=False) if answers[i])
        draws.append((votes["r"] > votes["w"]) + 0.5 * (votes["r"] == votes["w"]))
    assert exact == pytest.approx(np.mean(draws), abs=4 * np.std(draws) / math.sqrt(4000))
    assert ev.maj_at_k(answers, rewards, 256) == pytest.approx(0.0)


def test_maj_at_k_and_avg_refuse():
    for arguments, complaint in [
        ((["a"], [1.0], 2), "k is 2 and n is 1"),
        ((["a"], [1.0], 0), "k is 0"),
        ((["a"], [1.0, 0.0], 1), "1 answers but 2 rewards"),
        ((["a"] * 1001, [1.0] * 1001, 1), "at most 1000"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            ev.maj_at_k(*arguments)
    with pytest.raises(ValueError, match="at least one"):
        ev.avg_at_k([])
    assert ev.avg_at_k([1, 0, 0, 1]) == 0.5


@pytest.mark.parametrize(
    "spellings",
    [
        ("1,234", "1234", "1234.0", "01234", "$1{,}234$", "1\\,234", "1234."),
        ("0.5", ".50", "1/2", "\\frac{1}{2}", "\\dfrac{2}{4}", " + 1 / 2 "),
        ("-0.5", "-\\frac{1}{2}"),
        ("(1, 2)", "\\left( 1,2 \\right)"),
        ("x^2", "$x^2$"),
        ("1e999999999",),
        ("1/0",),
    ],
)
def test_spellings_of_one_answer_vote_together(spellings):
    forms = {ev.normalised_answer(spelling) for spelling in spellings}
    assert len(forms) == 1 and None not in forms


def test_different_answers_vote_apart():
    answers = ["1", "-1", "1.1", "11", "1/3", "(1,2)", "1,2", "12", "x", "(1,234)", "10", "100", "\\frac{1}{2}x"]
    assert len({ev.normalised_answer(a) for a in answers}) == len(answers)
    assert ev.normalised_answer(None) is None and ev.normalised_answer(" $ ") is None


def test_bootstrap_interval_covers_the_truth():
    """300 experiments of 60 problems whose true mean is known: 95 % intervals hold it about 95 times of 100."""
    generator = np.random.default_rng(0)
    held, widths = 0, []
    for experiment in range(300):
        values = generator.beta(2, 3, size=60)  # mean 0.4
        low, high = ev.bootstrap_interval(values, resamples=500, seed=experiment)
        held += low <= 0.4 <= high
        widths.append((high - low) / (2 * 1.96 * values.std() / math.sqrt(60)))
    assert 0.90 <= held / 300 <= 0.98  # four standard errors below, 2.4 above 0.95
    assert np.mean(widths) == pytest.approx(1.0, abs=0.03)


def test_bootstrap_interval_of_little():
    values = [0.0, 0.5, 1.0, 1.0]
    assert ev.bootstrap_interval(values, seed=1) == ev.bootstrap_interval(values, seed=1)
    assert ev.bootstrap_interval(values, resamples=50, seed=1) != ev.bootstrap_interval(values, resamples=50, seed=2)
    assert ev.bootstrap_interval([0.3]) == pytest.approx((0.3, 0.3))
    narrow, wide = ev.bootstrap_interval(range(50), 0.5), ev.bootstrap_interval(range(50), 0.99)
    assert wide[0] < narrow[0] < 24.5 < narrow[1] < wide[1]
    for bad in ([], [[1.0]]):
        with pytest.raises(ValueError, match="at least one value"):
            ev.bootstrap_interval(bad)
    with pytest.raises(ValueError, match="between 0 and 1"):
        ev.bootstrap_interval([1.0], confidence=95)


# ---- runs: the shipped tiny model on 10 held-out problems, 3 samples each, 2 problems at once ----


# Temperature 1.2, so that the samples of a problem differ however sure the model is.
OPTIONS = {"limit": 10, "samples": 3, "batch_size": 6, "temperature": 1.2, "verifier_workers": 1}


def config(folder, **changes):
    return ev.EvaluateConfig(**OPTIONS | {"output_dir": str(folder)} | changes)


def run(folder, **changes):
    return ev.evaluate(ev.prepare(config(folder, **changes)))


@pytest.fixture(autouse=True)
def no_folder_stays_taken():
    yield
    ev.let_go()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An evaluation without a stop: (folder, summary)."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


def results(folder):
    return [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]


def test_a_run_and_its_summary(whole):
    folder, summary = whole
    lines = results(folder)
    assert [line["index"] for line in lines] == list(range(10))
    for line in lines:
        assert line["problem"] and line["gold"] and line["id"].startswith("heldout-") and len(line["samples"]) == 3
        for sample in line["samples"]:
            assert sample["reward"] in (0.0, 1.0) and (sample["reward"] == 1.0) == (sample["reason"] == "correct")
            assert 0 < sample["tokens"] <= 64 and (sample["finished"] or sample["tokens"] == 64)
            if sample["reward"]:
                assert int(sample["answer"]) == int(line["gold"])
    rewards = [[sample["reward"] for sample in line["samples"]] for line in lines]
    assert len({sample["text"] for line in lines for sample in line["samples"]}) > 15, "samples repeat each other"
    metrics = summary["metrics"]
    assert list(metrics) == ["avg@3", "pass@1", "pass@2", "pass@3", "maj@1", "maj@2", "maj@3"]
    assert metrics["avg@3"]["value"] == pytest.approx(np.mean(rewards))
    for name in ("pass@1", "maj@1"):
        assert metrics[name]["value"] == pytest.approx(metrics["avg@3"]["value"])
    assert metrics["pass@3"]["value"] == pytest.approx(np.mean([max(r) for r in rewards]))
    assert 0 < metrics["avg@3"]["value"] < metrics["pass@3"]["value"]
    for metric in metrics.values():
        assert metric["low"] <= metric["value"] <= metric["high"]
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert sum(summary["reasons"].values()) == pytest.approx(1.0) and summary["max_new_tokens"] == 64
    table = ev.report(summary)
    assert "10 problems x 3 samples" in table and "95 % interval" in table and "pass@2" in table


def test_unscorable_problems_are_left_out_and_counted():
    def problem(rewards, reason):
        return {
            "samples": [
                {"reward": r, "reason": reason, "answer": "1", "tokens": 4, "finished": r is None} for r in rewards
            ]
        }

    bad, good = problem([None, None], "bad_gold"), problem([1.0, 0.0], "wrong")
    summary = ev.summarise([bad, good, problem([None, 1.0], "bad_gold")], ev.EvaluateConfig(samples=2))
    assert (summary["problems"], summary["unscored_problems"]) == (1, 2)
    assert {name: m["value"] for name, m in summary["metrics"].items()} == pytest.approx(
        {"avg@2": 0.5, "pass@1": 0.5, "pass@2": 1.0, "maj@1": 0.5, "maj@2": 0.5}
    )
    assert summary["reasons"] == pytest.approx({"bad_gold": 2 / 3, "wrong": 1 / 3}) and summary["ended"] == 0.5
    assert "2 problems left out as unscorable" in ev.report(summary)
    with pytest.raises(ValueError, match="no problem could be scored"):
        ev.summarise([bad], ev.EvaluateConfig(samples=2))


def copy_of(whole, folder, keep):
    """A run that was killed after `keep` bytes of problems.jsonl."""
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_text((whole[0] / "settings.json").read_text())
    (folder / "problems.jsonl").write_bytes((whole[0] / "problems.jsonl").read_bytes()[:keep])
    return folder


def counted(monkeypatch):
    calls = []
    generate = ev.TransformersEngine.generate

    def counting(self, prompts, *args, **kwargs):
        calls.append(len(prompts))
        return generate(self, prompts, *args, **kwargs)

    monkeypatch.setattr(ev.TransformersEngine, "generate", counting)
    return calls


@pytest.mark.parametrize(("lines", "extra", "left"), [(0, 40, 5), (5, 0, 3), (5, 100, 3), (6, 1, 2), (10, 0, 0)])
def test_resume_writes_the_same_bytes(whole, tmp_path, monkeypatch, lines, extra, left):
    """Killed after `lines` whole lines and `extra` bytes of the next one; groups of two are done again."""
    data = (whole[0] / "problems.jsonl").read_bytes()
    keep = sum(len(line) + 1 for line in data.split(b"\n")[:lines]) + extra
    folder = copy_of(whole, tmp_path / "run", keep)
    calls = counted(monkeypatch)
    assert run(folder) == whole[1]
    assert (folder / "problems.jsonl").read_bytes() == data
    assert calls == [6] * left
    assert sorted(p.name for p in folder.iterdir()) == ["problems.jsonl", "settings.json", "summary.json"]


def test_files_of_other_processes_are_merged(whole, tmp_path, monkeypatch):
    lines = (whole[0] / "problems.jsonl").read_bytes().splitlines(keepends=True)
    folder = copy_of(whole, tmp_path / "run", 0)
    (folder / "problems.jsonl").write_bytes(b"".join(lines[:2] + lines[4:6] + lines[8:]))
    (folder / "problems.rank1.jsonl").write_bytes(b"".join(lines[2:4] + lines[6:8]))
    calls = counted(monkeypatch)
    assert run(folder) == whole[1] and calls == []
    assert (folder / "problems.jsonl").read_bytes() == b"".join(lines)
    assert not (folder / "problems.rank1.jsonl").exists()


def test_a_killed_process_resumes(whole, tmp_path):
    """The command line in another folder, killed with SIGKILL once it has written; then finished here."""
    folder = tmp_path / "run"
    options = OPTIONS | {"output_dir": folder}
    command = [sys.executable, REPO / "recipes" / "evaluate.py", *(f"--{k}={v}" for k, v in options.items())]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 240
    path = folder / "problems.jsonl"
    while process.poll() is None and not (path.exists() and path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    output = process.communicate()[0]
    assert path.exists() and path.stat().st_size, output
    assert run(folder) == whole[1]
    assert path.read_bytes() == (whole[0] / "problems.jsonl").read_bytes()


@pytest.fixture
def two_problems(whole, tmp_path):
    """A file of two held-out problems: the same ones for every seed."""
    path = tmp_path / "two.jsonl"
    lines = [{"prompt": [{"role": "user", "content": r["problem"]}], "solution": r["gold"]} for r in results(whole[0])]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    return {"source": str(path), "limit": None, "max_new_tokens": 64}


def texts_of(folder, **changes):
    run(folder, **changes)
    return [sample["text"] for line in results(folder) for sample in line["samples"]]


def test_the_sampling_options_reach_the_engine(two_problems, tmp_path):
    assert texts_of(tmp_path / "0", **two_problems) != texts_of(tmp_path / "1", **two_problems, seed=1)
    greedy = texts_of(tmp_path / "greedy", **two_problems, samples=1, temperature=0.0)
    for name, value in {"top_k": 1, "top_p": 1e-6, "min_p": 1.0, "temperature": 1e-6}.items():
        assert texts_of(tmp_path / name, **two_problems, samples=1, seed=3, **{name: value}) == greedy, name
    assert max(len(text) for text in texts_of(tmp_path / "short", **two_problems | {"max_new_tokens": 2})) < 12


@pytest.mark.parametrize(("changes", "right"), [({"exact_answers": True}, 0), ({"rel_tol": 0.5}, 1)])
def test_the_verifier_options_reach_the_verifier(two_problems, tmp_path, changes, right):
    path = Path(two_problems["source"])
    path.write_text(json.dumps({"problem": "What is 17 * 2?", "answer": "34"}))
    job = ev.prepare(config(tmp_path / "run", **two_problems, **changes))

    class Decoder:
        def batch_decode(self, ids, skip_special_tokens):
            assert skip_special_tokens
            return ["\\boxed{17 \\cdot 2}", "\\boxed{30}", "no idea"]

    job.tokenizer = Decoder()
    summary = ev.evaluate(job)
    rewards = [sample["reward"] for sample in results(tmp_path / "run")[0]["samples"]]
    assert rewards == [right, 1.0 if "rel_tol" in changes else 0.0, 0.0]
    assert summary["reasons"]["no_answer"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"temperature": 0.7}, "temperature 1.2, not 0.7"),
        ({"samples": 4}, "samples 3, not 4"),
        ({"seed": 1}, "seed 0, not 1"),
        ({"limit": 9}, "problems 10, not 9"),
        ({"prompt_style": "boxed"}, "prompt_style None, not boxed"),
        ({"rollout_dtype": "int8"}, "rollout_dtype float32, not int8"),
        ({"exact_answers": False}, "exact_answers True, not False"),
    ],
)
def test_a_changed_setting_is_refused(whole, changes, complaint):
    with pytest.raises(ValueError) as caught:
        ev.prepare(config(whole[0], **changes))
    assert str(caught.value).startswith(f"--output_dir {whole[0]} holds an evaluation with {complaint}; name another")


def test_changed_weights_and_problems_are_refused(whole):
    job = ev.prepare(config(whole[0]))
    held = json.loads((whole[0] / "settings.json").read_text())
    assert ev.changed_setting(whole[0], job.settings) is None and job.settings == held
    prompts = [*job.prompts[:-1], [*job.prompts[-1], 5]]
    golds = [row["solution"] for row in job.rows]
    assert "problems_sha256" in ev.changed_setting(whole[0], ev.settings_of(job.config, job.engine, prompts, golds))
    golds[0] = "1" + golds[0]
    assert "problems_sha256" in ev.changed_setting(
        whole[0], ev.settings_of(job.config, job.engine, job.prompts, golds)
    )
    model, _ = ev.load_model("tiny")
    model.get_input_embeddings().weight.data[3, 4] += 1
    job.engine.push_weights(model, 1)
    assert "weights" in ev.changed_setting(
        whole[0],
        ev.settings_of(job.config, job.engine, job.prompts, golds[:0] or [row["solution"] for row in job.rows]),
    )


def test_batch_size_may_change(whole, tmp_path):
    folder = copy_of(whole, tmp_path / "run", 0)
    (folder / "problems.jsonl").write_bytes(b"".join((whole[0] / "problems.jsonl").read_bytes().splitlines(True)[:7]))
    run(folder, batch_size=9)  # groups of three: the seventh line is half a group
    assert results(folder)[:6] == results(whole[0])[:6] and len(results(folder)) == 10


def test_the_default_folder_is_numbered(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = json.loads((whole[0] / "settings.json").read_text())
    base = Path("runs/evaluate/tiny-tiny-heldout")
    free = config(None, output_dir=None)
    assert ev.settle_folder(free, settings) == base
    base.mkdir(parents=True)
    (base / "settings.json").write_text(json.dumps(settings | {"seed": 5}))
    second = ev.settle_folder(free, settings)
    assert second == base.with_name("tiny-tiny-heldout-2")
    second.mkdir()
    (second / "settings.json").write_text(json.dumps(settings))
    assert ev.settle_folder(free, settings) == second, "the same settings go on in their own folder"
    assert ev.settle_folder(free, settings | {"seed": 5}) == base


def test_broken_folders_are_refused(whole, tmp_path):
    folder = copy_of(whole, tmp_path / "run", None)
    lines = (folder / "problems.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "problems.jsonl").write_bytes(lines[0] + b'{"index": \n' + lines[2])
    with pytest.raises(ValueError, match=r"problems\.jsonl, line 2: broken; delete the line"):
        run(folder)
    (folder / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"holds an evaluation with a broken settings\.json"):
        ev.prepare(config(folder))
    (folder / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"holds an evaluation with problems\.jsonl but no settings\.json"):
        ev.prepare(config(folder))


# ---- models, options ----


def test_a_lora_adapter_is_merged(tmp_path):
    model, tokenizer = ev.load_model("tiny")
    before = {name: p.clone() for name, p in model.named_parameters()}
    tuned = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    deltas = {}
    for name, module in tuned.base_model.model.named_modules():
        if name.endswith("q_proj"):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            torch.nn.init.normal_(b)
            deltas[name + ".weight"] = 3.0 * b @ a  # alpha / r
    tuned.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    merged, again = ev.load_model(str(tmp_path))
    assert again.get_vocab() == tokenizer.get_vocab() and deltas
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, before[name] + deltas.get(name, 0.0))


def test_tokens_of_a_model_without_chat_template():
    _, tokenizer = ev.load_model("tiny")
    row = {"prompt": [{"role": "system", "content": "A"}, {"role": "user", "content": "1+1"}], "id": "7"}
    chat = ev.prompt_ids([row], tokenizer)[0]
    assert tokenizer.decode(chat).endswith("1+1<|im_end|>\n<|im_start|>assistant\n")
    tokenizer.chat_template = None
    assert tokenizer.decode(ev.prompt_ids([row], tokenizer)[0]) == "A\n\n1+1\n"


@pytest.mark.parametrize(
    ("asked", "positions", "settled"),
    [(None, 100, 38), (None, 4158, 4096), (None, 4157, 4095), (None, 40_000, 4096), (None, None, 4096), (None, 63, 1),
     (38, 100, 38), (9000, None, 9000), (9000, 40_000, 9000)],
)  # fmt: skip
def test_samples_get_the_room_that_the_longest_prompt_leaves(asked, positions, settled):
    rows, prompts = [{"id": "a"}, {"id": "b"}, {"id": "c"}], [[1] * 7, [1] * 62, [1] * 3]
    assert ev.settle_max_new_tokens(asked, rows, prompts, positions) == settled


@pytest.mark.parametrize(
    ("asked", "positions", "complaint"),
    [
        (39, 100, "problem b has 62 prompt tokens: with --max_new_tokens 39 it exceeds the model's 100 positions; "
                  "give --max_new_tokens 38 or less"),
        (None, 62, "problem b has 62 prompt tokens, which leaves none of the model's 62 positions for an answer"),
        (1, 50, "problem b has 62 prompt tokens, which leaves none of the model's 50 positions for an answer"),
    ],
)  # fmt: skip
def test_what_does_not_fit_beside_the_longest_prompt_is_refused(asked, positions, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        ev.settle_max_new_tokens(asked, [{"id": "a"}, {"id": "b"}], [[1] * 7, [1] * 62], positions)


def test_a_file_of_ones_own_needs_no_max_new_tokens(two_problems, tmp_path, capsys):
    """The number in force is said, written down, and what a second start compares."""
    options = two_problems | {"max_new_tokens": None}
    job = ev.prepare(config(tmp_path / "run", **options))
    room = 4096 - max(map(len, job.prompts))
    assert 3900 < room < 4096 and job.config.max_new_tokens == job.settings["max_new_tokens"] == room
    assert f"tokens a sample: at most {room} " in capsys.readouterr().out
    ev.prepare(config(tmp_path / "run", **options))
    ev.prepare(config(tmp_path / "run", **options | {"max_new_tokens": room}))
    with pytest.raises(ValueError, match=f"max_new_tokens {room}, not {room - 1}; name another"):
        ev.prepare(config(tmp_path / "run", **options | {"max_new_tokens": room - 1}))
    with pytest.raises(ValueError, match=f"with --max_new_tokens {room + 1} it exceeds the model's 4096 positions"):
        ev.prepare(config(tmp_path / "new", **options | {"max_new_tokens": room + 1}))


def test_a_sample_ends_at_every_eos_of_the_model():
    model, tokenizer = ev.load_model("tiny")
    engine = ev.make_engine(model, tokenizer, config("x"), "cpu")
    ends = {i for i, is_end in enumerate(engine._is_eos.tolist()) if is_end}
    assert ends == {tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")}
    model.generation_config.eos_token_id = None
    only = ev.make_engine(model, tokenizer, config("x"), "cpu")._is_eos.nonzero().flatten().tolist()
    assert only == [tokenizer.eos_token_id]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        ev.make_engine(model, tokenizer, config("x"), "cpu")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"samples": 0}, "--samples 0 must be a whole number from 1 up"),
        ({"samples": 1001}, "--samples is 1001; give at most 1000"),
        ({"batch_size": -1}, "--batch_size -1 must be"),
        ({"temperature": 0}, "--temperature 0 makes 3 equal samples; give --samples 1"),
    ],
)
def test_bad_options(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        config("x", **changes)


def test_bad_models(tmp_path):
    for name in (str(tmp_path / "nowhere"), "./nowhere", "a/b/c", "nowhere"):
        with pytest.raises(FileNotFoundError, match=f"--model {name}: there is no such folder, and it is no hub id"):
            ev.load_model(name)
    with pytest.raises(ValueError, match=f"--model {tmp_path} cannot be loaded: .*config.json"):
        ev.load_model(str(tmp_path))


def test_defaults_follow_the_source():
    assert dataclasses.replace(ev.EvaluateConfig()).max_new_tokens == 64
    assert ev.EvaluateConfig().exact_answers and not ev.EvaluateConfig(source="a.jsonl").exact_answers
    assert ev.EvaluateConfig(source="a.jsonl").max_new_tokens is None, "known once the prompts and the model are"
    assert ev.EvaluateConfig(exact_answers=False, max_new_tokens=9).max_new_tokens == 9


def test_help_and_config_file(tmp_path):
    def make_parser():
        return ev.make_small_parser(ev.EvaluateConfig, ev.__doc__)

    text = make_parser().format_help()
    assert len(text.splitlines()) < 70
    assert all(f"--{name}" in text for name in ev.EvaluateConfig.__dataclass_fields__)
    path = tmp_path / "c.yaml"
    path.write_text("samples: 5\ntemperature: 0.6\n")
    (parsed,) = make_parser().parse_args_and_config(["--config", str(path), "--samples", "7"])
    assert (parsed.samples, parsed.temperature) == (7, 0.6)
    for theirs, ours in {"dataset": "source", "model_name_or_path": "model"}.items():
        for option in (f"--{theirs}", f"--{ours}"):
            (parsed,) = make_parser().parse_args_and_config([option, "mine"])
            assert vars(parsed)[ours] == "mine", option
        path.write_text(f"{theirs}: mine\n")
        _, unknown = make_parser().parse_args_and_config(["--config", str(path)], return_remaining_strings=True)
        with pytest.raises(ValueError, match=f"--{theirs} mine is no option of this recipe: did you mean --{ours}?"):
            ev.refuse_unknown(unknown, ev.EvaluateConfig)
    path.write_text("sample: 5\n")
    with pytest.raises(ValueError, match="sample"):
        make_parser().parse_args_and_config(["--config", str(path)])


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(whole, tmp_path):
    options = OPTIONS | {"output_dir": tmp_path / "run"}
    command = ["-m", "torch.distributed.run", "--nproc_per_node=2", REPO / "recipes" / "evaluate.py"]
    command += [f"--{k}={v}" for k, v in options.items()] + ["--expect_processes=2"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "problems.jsonl").read_bytes() == (whole[0] / "problems.jsonl").read_bytes()
    assert done.stdout.count("10 problems x 3 samples") == 1


def test_two_evaluations_of_one_folder(whole, tmp_path, monkeypatch):
    """Both chose the folder when it was free: the second is refused before it writes, whichever comes to its end first."""
    folder = tmp_path / "run"
    folder.mkdir()
    with FileLock(folder / "run.lock", thread_local=False):
        with pytest.raises(ValueError, match="is being written by a run that goes on"):
            ev.prepare(config(folder, samples=2))
    run(folder, limit=2)
    held = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(ev, "settle_folder", lambda *_: folder)
    with pytest.raises(ValueError, match="has just been taken by an evaluation with .*, not"):
        ev.prepare(config(folder, samples=2))
    ev.let_go(folder, remove=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == held
