"""rlvr_data: every schema and every load error; what is dropped, counted and said; limit, styles, real rows."""

import json
import random
from pathlib import Path

import datasets
import pytest
import torch

import rlvr_data
from rlvr_data import BOXED_INSTRUCTION, last_box, load_math_rows, load_math_rows_report
from tiny.tasks import make_rows
from verifier import MathVerifier

SHARED = Path(__file__).parents[2] / "shared" / "data"
DAPO_TEXT = (
    "Solve the following math problem step by step. The last line must be of the form Answer: $Answer.\n\n"
    '{}\n\nRemember to put your answer on its own line after "Answer:".'
)


@pytest.fixture
def seen_golds(monkeypatch):
    """A gold is bad when it says so, and every check is recorded: these tests are about loading, not about maths."""
    seen = []

    def check_golds(self, golds):
        seen.append(list(golds))
        return ["unparseable" if "nonsense" in gold else None for gold in golds]

    monkeypatch.setattr(MathVerifier, "check_golds", check_golds)
    return seen


def write(path, rows, ending="\n"):
    path.write_bytes("".join(json.dumps(row) + ending for row in rows).encode())
    return path


def row(i, answer=None):
    return {"problem": f"What is {i} + 0?", "answer": str(i) if answer is None else answer}


def loaded(*args, **kwargs):
    dataset = load_math_rows(*args, **kwargs)
    return dataset, load_math_rows_report(dataset)


def golds(dataset):
    return dataset["solution"][:]


# ---- schemas ----

DAPO = {
    "prompt": [{"role": "user", "content": DAPO_TEXT.format("What is 1 + 1?")}],
    "reward_model": {"ground_truth": "2"},
}
SCHEMA_CASES = [
    ({"problem": "p", "answer": "2"}, "2"),
    ({"question": "p", "answer": "2"}, "2"),
    ({"question": "p", "answer": "#### steps\n1 + 1 = 2\n#### 1,234"}, "1,234"),
    ({"prompt": "p", "answer": "2"}, "2"),
    ({"prompt": "p", "solution": "\\frac{1}{2}"}, "\\frac{1}{2}"),
    ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}], "solution": "2"}, "2"),
    ({"problem": "p", "solution": "first \\boxed{1}, then \\boxed{\\frac{1}{2}}. Also \\boxed{3"}, "\\frac{1}{2}"),
    ({"question": "p", "solution": "so \\boxed 7"}, "7"),
    ({"problem": "p", "solution": "ends in \\boxed{9}", "answer": "2"}, "2"),
    ({"problem": "p", "answer": "so \\boxed{(1, 2)}"}, "(1, 2)"),
    ({"problem": "p", "answer": 42}, "42"),
    ({"problem": "p", "answer": 27.0}, "27.0"),
    ({"problem": "p", "answer": ["$69$,$84$"]}, "69,84"),
    ({"problem": "p", "answer": ["69", 84]}, "69, 84"),
    (DAPO, "2"),
    ({**DAPO, "prompt": "p", "solution": "3"}, "2"),
]


@pytest.mark.parametrize(("line", "gold"), SCHEMA_CASES, ids=range(len(SCHEMA_CASES)))
def test_schema(tmp_path, seen_golds, line, gold):
    dataset = load_math_rows(write(tmp_path / "a.jsonl", [line]))
    assert dataset.column_names == ["prompt", "solution", "source", "id"]
    assert golds(dataset) == [gold]
    assert dataset[0]["prompt"][-1]["role"] == "user"
    assert dataset[0]["source"] == "a.jsonl"


def test_same_rows_from_every_file_type(tmp_path):
    rows = [row(i) for i in range(5)]
    plain = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    write(tmp_path / "lines.json", rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("problem,answer\n" + "".join(f"{r['problem']},{r['answer']}\n" for r in rows))
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(tmp_path / "saved_dict")
    want = load_math_rows(plain).remove_columns("source").to_list()
    assert [r["solution"] for r in want] == ["0", "1", "2", "3", "4"]
    for name in ("a.json", "lines.json", "a.parquet", "a.csv", "saved", "saved_dict", "saved_dict:train"):
        assert load_math_rows(tmp_path / name).remove_columns("source").to_list() == want, name
    with pytest.raises(ValueError, match="saved has no splits, leave :train out"):
        load_math_rows(f"{tmp_path / 'saved'}:train")
    with pytest.raises(ValueError, match="saved:a:b:c' has too many colons"):
        load_math_rows(f"{tmp_path / 'saved'}:a:b:c")


def test_dapo_parquet(tmp_path):
    rows = [{**DAPO, "extra_info": {"index": "abc"}, "data_source": "math_dapo"}] * 100
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "d.parquet")
    dataset, report = loaded(tmp_path / "d.parquet")
    assert dataset.to_list() == [{"prompt": DAPO["prompt"], "solution": "2", "source": "d.parquet", "id": "abc"}]
    assert (report.read, report.duplicates, report.kept) == (100, 99, 1)


def test_bom_crlf_blank_lines(tmp_path):
    body = "\r\n\r\n".join(json.dumps(row(i)) for i in range(3))
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + body.encode() + b"\r\n  \r\n")
    assert golds(load_math_rows(tmp_path / "a.jsonl")) == ["0", "1", "2"]
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfproblem,answer\r\n"What,\r\nthen?",5\r\n')
    assert load_math_rows(tmp_path / "a.csv", prompt_style="plain")[0]["prompt"][0]["content"] == "What,\r\nthen?"


def test_unicode_line_separator_stays_in_its_row(tmp_path, seen_golds):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"problem": "a\u2028b", "answer": "\u221a2"}, ensure_ascii=False) + "\n")
    assert golds(load_math_rows(path)) == ["\u221a2"]


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{a{b}c}", "a{b}c"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{1} \\fbox{ 2 }", "2"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\boxed{", None),
        ("none", None),
        ("\\boxed{}", ""),
    ],
)
def test_last_box(text, box):
    assert last_box(text) == box


# ---- what is dropped, counted and said ----


def test_duplicates_conflicts_and_bad_golds(tmp_path, seen_golds):
    rows = [
        row(1),
        {"problem": "  What is\n1 + 0? ", "answer": "01"},  # twin of row 1 up to blanks and a leading zero
        row(2),
        row(2, "3"),  # conflict: both go
        row(2),  # and every later copy too
        row(4, "nonsense"),
        row(5, ""),
        row(6, None) | {"answer": None},
        row(7),
        {"problem": "What is 7 + 0?\nPut the answer in \\boxed{}.", "answer": "7.0"},  # an instruction is no problem
    ]
    dataset, report = loaded(write(tmp_path / "a.jsonl", rows))
    assert golds(dataset) == ["1", "7"]
    assert dataset["id"][:] == ["1", "9"]
    assert (report.read, report.duplicates, report.conflicts, report.kept) == (10, 2, 3, 2)
    assert {n for n, _ in report.bad_golds.values()} == {1, 2}
    assert report.bad_golds["unparseable"] == [1, "line 6"]
    printed = str(report)
    assert "\n" not in printed
    for part in ("10 rows read", "2 duplicates", "3 with conflicting", "3 bad golds", "2 kept", "line 6", "line 7"):
        assert part in printed
    assert load_math_rows_report(dataset.shuffle(seed=1).select([0])) == report
    assert report.read == report.duplicates + report.conflicts + 3 + report.kept


def test_an_empty_gold_is_no_conflict(tmp_path):
    for rows in ([row(1, ""), row(1)], [row(1), row(1, "")]):
        dataset, report = loaded(write(tmp_path / "a.jsonl", rows))
        assert golds(dataset) == ["1"] and (report.duplicates, report.conflicts) == (1, 0)


def test_no_report_of_another_dataset():
    with pytest.raises(ValueError, match="not made by load_math_rows"):
        load_math_rows_report(datasets.Dataset.from_dict({"prompt": ["p"]}))


def test_a_solution_without_a_box_is_no_gold(tmp_path):
    rows = [{"problem": "p", "solution": "it is 5"}, {"problem": "q", "solution": "\\boxed{6}"}]
    dataset, report = loaded(write(tmp_path / "a.jsonl", rows))
    assert golds(dataset) == ["6"]
    assert list(report.bad_golds.values()) == [[1, "line 1"]]


def test_rank_zero_decides_for_all(tmp_path, monkeypatch):
    """Two ranks whose verifiers disagree still get the same rows."""
    path = write(tmp_path / "a.jsonl", [row(i) for i in range(4)])
    wire = []

    def broadcast(box, src):
        assert src == 0
        if torch.distributed.get_rank() == 0:
            wire.append(list(box))
        else:
            box[:] = wire.pop(0)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    results = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        if rank:
            monkeypatch.delattr(MathVerifier, "check_golds")  # the other ranks do no checking of their own
        else:
            monkeypatch.setattr(MathVerifier, "check_golds", lambda _, golds: ["timeout"] + [None] * (len(golds) - 1))
        results.append(golds(load_math_rows(path)))
    assert results == [["1", "2", "3"]] * 2


# ---- limit and order ----


def test_limit_is_a_prefix_of_one_seeded_shuffle(tmp_path, seen_golds):
    path = write(tmp_path / "a.jsonl", [row(i, "nonsense" if i % 10 == 0 else None) for i in range(200)])
    assert golds(load_math_rows(path)) == [str(i) for i in range(200) if i % 10]  # no limit: the file's order
    order = list(range(200))
    random.Random(3).shuffle(order)
    want = [str(i) for i in order if i % 10]
    seen_golds.clear()
    few, report = loaded(path, limit=5, seed=3)
    assert golds(few) == want[:5]
    assert sum(map(len, seen_golds)) < 60, "golds beyond the limit were checked"
    assert report.unchecked == 200 - 5 - sum(n for n, _ in report.bad_golds.values())
    assert golds(load_math_rows(path, limit=90, seed=3)) == want[:90]
    assert golds(load_math_rows(path, limit=90, seed=4)) != want[:90]
    assert golds(load_math_rows(path, limit=10_000, seed=3)) == want  # more than there are: all of them


@pytest.mark.parametrize("limit", [0, -1, 2.5, "7", True])
def test_bad_limit(tmp_path, limit):
    with pytest.raises(ValueError, match=r"limit is .*; give a whole number"):
        load_math_rows(write(tmp_path / "a.jsonl", [row(1)]), limit=limit)


# ---- prompt styles ----


def content(path, **kw):
    return load_math_rows(path, **kw)[0]["prompt"][-1]["content"]


def test_styles_of_a_bare_problem(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(1)])
    bare = "What is 1 + 0?"
    assert content(path) == content(path, prompt_style="boxed") == f"{bare}\n\n{BOXED_INSTRUCTION}"
    assert content(path, prompt_style="plain") == content(path, prompt_style="keep") == bare
    assert content(path, prompt_style="answer_line").splitlines()[-1].count("Answer: $Answer") == 1
    with pytest.raises(ValueError, match="prompt_style is 'box'; choose one of boxed, answer_line, plain, keep"):
        load_math_rows(path, prompt_style="box")


def test_styles_replace_an_instruction_that_is_there(tmp_path):
    told = write(tmp_path / "a.jsonl", [{"problem": "What is 1 + 0?\nReason, and use \\boxed{}.", "answer": "1"}])
    assert content(told) == "What is 1 + 0?\nReason, and use \\boxed{}."
    dapo = write(tmp_path / "d.jsonl", [DAPO])
    assert content(dapo) == DAPO["prompt"][0]["content"]
    for path, bare in ((told, "What is 1 + 0?"), (dapo, "What is 1 + 1?")):
        assert content(path, prompt_style="plain") == bare
        assert content(path, prompt_style="boxed") == f"{bare}\n\n{BOXED_INSTRUCTION}"
        assert content(path, prompt_style="answer_line").count("\\boxed") == 0


def test_our_own_instructions_are_recognised(tmp_path):
    """A prompt that was styled once can be loaded and styled again."""
    for style in ("boxed", "answer_line"):
        styled = content(write(tmp_path / "a.jsonl", [row(1)]), prompt_style=style)
        again = write(tmp_path / "b.jsonl", [{"prompt": styled, "answer": "1"}])
        assert content(again) == styled
        assert content(again, prompt_style="plain") == "What is 1 + 0?"


def test_a_style_leaves_other_messages_alone(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    path = write(tmp_path / "a.jsonl", [{"prompt": [system, {"role": "user", "content": "p"}], "solution": "1"}])
    assert load_math_rows(path)[0]["prompt"] == [system, {"role": "user", "content": "p"}]
    prompt = load_math_rows(path, prompt_style="boxed")[0]["prompt"]
    assert prompt == [system, {"role": "user", "content": f"p\n\n{BOXED_INSTRUCTION}"}]


# ---- errors: one sentence with file, row and column ----

GOOD = json.dumps(row(1))
BAD_LINES = [
    ('{"problem": "p", "answer": ', "broken JSON at character"),
    ('["problem", "answer"]', "a list, not an object"),
    ('"text"', "a str, not an object"),
    ("[" * 100_000, "JSON that Python refuses to parse"),
    ('{"question": "p", "answer": "1"}', "no column problem (it has question, answer)"),
    ('{"problem": "p", "solution": "1"}', "no column answer (it has problem, solution)"),
    ('{"problem": "  ", "answer": "1"}', "column problem: the prompt is empty"),
    ('{"problem": null, "answer": "1"}', "column problem: NoneType None is neither text nor"),
    ('{"problem": 5, "answer": "1"}', "column problem: int 5 is neither text nor"),
    ('{"problem": "p", "answer": {"value": 1}}', "column answer: dict {'value': 1} is no answer"),
    ('{"problem": "p", "answer": true}', "column answer: bool True is no answer"),
    ('{"problem": "p", "answer": NaN}', "column answer: float nan is no answer"),
    ('{"problem": "p", "answer": [["1"]]}', "column answer: list ['1'] is no answer"),
    ('{"problem": "p\\ud800", "answer": "1"}', "column problem: half of a surrogate pair"),
    ('{"problem": "p", "answer": "\\ud800"}', "column answer: half of a surrogate pair"),
]


@pytest.mark.parametrize(("line", "complaint"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(ValueError) as caught:
        load_math_rows(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3") and complaint in message and "\n" not in message


BAD_PROMPTS = [
    ([], "the prompt is empty"),
    ([{"role": "user"}], "is no message with role and content"),
    (["hello"], "str 'hello' is no message"),
    ([{"role": "user", "content": ["part"]}], "content list ['part']"),
    ([{"role": "tool", "content": "p"}], "not role str 'tool'"),
    ([{"role": "user", "content": "p"}, {"role": "assistant", "content": "x"}], "the last message is the assistant's"),
]


@pytest.mark.parametrize(("prompt", "complaint"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_bad_messages_are_named(tmp_path, prompt, complaint):
    path = write(tmp_path / "a.jsonl", [DAPO, {**DAPO, "prompt": prompt}])
    with pytest.raises(ValueError) as caught:
        load_math_rows(path)
    assert str(caught.value).startswith(f"{path}, line 2, column prompt: ") and complaint in str(caught.value)


def test_missing_ground_truth_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", [DAPO, {**DAPO, "reward_model": {"style": "rule"}}])
    with pytest.raises(
        ValueError, match=r"line 2: no column reward_model\.ground_truth \(it has prompt, reward_model\)"
    ):
        load_math_rows(path)


def test_unknown_schema_lists_the_known_ones(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "p", "label": "1"}])
    with pytest.raises(ValueError) as caught:
        load_math_rows(path)
    message = str(caught.value)
    assert f"{path}, line 1: columns text, label fit no schema" in message
    assert all(
        part in message for part in ("{problem, answer}", "{prompt, reward_model.ground_truth}", "{prompt, solution}")
    )


def test_missing_file_names_its_neighbours(tmp_path):
    write(tmp_path / "math500.jsonl", [row(1)])
    for wrong in ("math50.jsonl", "math500.json", "math500.jsnl"):
        with pytest.raises(FileNotFoundError) as caught:
            load_math_rows(tmp_path / wrong)
        start = f"no file {tmp_path / wrong}; did you mean {tmp_path / 'math500.jsonl'}?"
        assert str(caught.value).startswith(start)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_math_rows(tmp_path / "nowhere" / "a.jsonl")


def test_wrong_files(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"a\.txt: cannot read \.txt; convert it to \.jsonl"):
        load_math_rows(tmp_path / "a.txt")
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable parquet file"):
        load_math_rows(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text('[{"problem": "p",\n"answer": }]')
    with pytest.raises(ValueError, match=r"a\.json, the file: broken JSON at line 2, character 11"):
        load_math_rows(tmp_path / "a.json")
    (tmp_path / "a.jsonl").write_bytes(GOOD.encode() + b'\n{"problem": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not UTF-8 text"):
        load_math_rows(tmp_path / "a.jsonl")
    (tmp_path / "a.csv").write_text("problem,answer\np,1\nq,1,2\n")
    with pytest.raises(ValueError, match=r"a\.csv, line 3: more fields"):
        load_math_rows(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text('problem,answer\n"p,1\n')
    with pytest.raises(ValueError, match=r"a\.csv: not a readable UTF-8 csv file"):
        load_math_rows(tmp_path / "a.csv")
    (tmp_path / "a.json").write_text(f"[{GOOD}, {{}}]")
    with pytest.raises(ValueError, match=r"a\.json, row 2: no column problem \(it has none\)"):
        load_math_rows(tmp_path / "a.json")
    with pytest.raises(ValueError, match="folder of several files; name one of a.csv, a.json, a.jsonl, a.parquet"):
        load_math_rows(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_empty_file(tmp_path, name):
    path = tmp_path / name
    path.write_text({"a.json": "[]", "a.csv": "problem,answer\n"}.get(name, ""))
    if name == "a.parquet":
        datasets.Dataset.from_dict({"problem": [], "answer": []}).to_parquet(path)
    with pytest.raises(ValueError, match=f"{name}: no rows in it"):
        load_math_rows(path)


def test_nothing_left(tmp_path, seen_golds):
    path = write(tmp_path / "a.jsonl", [row(1, "nonsense"), row(2), row(2, "5")])
    with pytest.raises(
        ValueError, match=r"no row is left.*3 rows read.*2 with conflicting golds, 1 bad golds, 0 kept"
    ):
        load_math_rows(path)


# ---- tiny and the hub ----


def test_tiny(monkeypatch):
    calls = []

    def recorded(split, n, seed=0):
        calls.append((split, n, seed))
        return make_rows(split, n, seed)

    monkeypatch.setattr("tiny.tasks.make_rows", recorded)
    heldout, report = loaded("tiny:heldout", seed=5)
    assert (len(heldout), report.read) == (256, 256), "the embedded set has twins or conflicts"
    want = make_rows("heldout", 256)[3]
    assert heldout[3]["prompt"] == [{"role": "user", "content": want["problem"]}]
    assert heldout[3]["solution"] == want["answer"] and heldout[3]["source"] == "tiny:heldout"
    assert heldout[3]["id"] == f"heldout-3-{want['kind']}-{want['level']}"
    assert len(load_math_rows("tiny", limit=7)) == 7
    assert calls == [("heldout", 256, 0), ("train", 4096, 0)], "the embedded set must not depend on the run's seed"
    with pytest.raises(ValueError, match="no split 'test'; use tiny or tiny:heldout"):
        load_math_rows("tiny:test")


@pytest.mark.parametrize(
    ("source", "config", "gold"),
    [
        ("org/one", None, "1"),
        ("org/two:train", None, "1"),
        ("org/two:test", None, "2"),
        ("org/two:main:test", "main", "2"),
    ],
)
def test_hub_id(monkeypatch, source, config, gold):
    def fake(path, name=None):
        assert name == config
        splits = {"train": [row(1) | {"junk": 3}]} | ({"test": [row(2)]} if path == "org/two" else {})
        return datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in splits.items()})

    monkeypatch.setattr(rlvr_data, "load_dataset", fake)
    assert golds(load_math_rows(source)) == [gold]
    *place, split = source.split(":")
    if place:
        with pytest.raises(ValueError, match=f"no split dev; use {':'.join(place)}:train, {':'.join(place)}:test"):
            load_math_rows(":".join([*place, "dev"]))
        if config is None:
            with pytest.raises(ValueError, match="several splits; use org/two:train, org/two:test"):
                load_math_rows("org/two")


def test_hub_failure_is_one_sentence(monkeypatch):
    def fail(path, name=None):
        raise ConnectionError("could not reach the hub")

    monkeypatch.setattr(rlvr_data, "load_dataset", fail)
    with pytest.raises(
        ValueError, match="'org/name' is no local file, and loading it .* could not reach the hub .*:split"
    ):
        load_math_rows("org/name")


def test_other_sources_are_refused():
    with pytest.raises(ValueError, match="source 'gsm8k' is none of: tiny, tiny:heldout, a hub id"):
        load_math_rows("gsm8k")


# ---- real rows ----

REAL = {  # file: (rows, golds that the verifier cannot judge)
    "aime24.jsonl": (30, 0),
    "aime25.jsonl": (30, 0),
    "aime_1983_2023_dapo_schema.jsonl": (975, 0),
    "amc23.jsonl": (40, 0),
    "hmmt25_feb.jsonl": (30, 0),
    "math500.jsonl": (500, 0),
    "math_train_7k.jsonl": (7474, 6),  # 4 of them empty
    "minerva.jsonl": (272, 4),
    "olympiadbench.jsonl": (675, 2),
}
needs_real_rows = pytest.mark.skipif(
    not SHARED.is_dir(), reason="no folder with real benchmark rows beside the repository"
)


@needs_real_rows
@pytest.mark.parametrize("name", REAL)
def test_real_files(name, seen_golds):
    dataset, report = loaded(SHARED / name)
    assert report.read == REAL[name][0]
    assert report.duplicates == (1 if name == "math_train_7k.jsonl" else 0) and report.conflicts == 0
    assert list(report.bad_golds.values()) == ([[4, "line 887"]] if name == "math_train_7k.jsonl" else [])
    assert all(golds(dataset))
    if name in ("aime25.jsonl", "hmmt25_feb.jsonl", "aime_1983_2023_dapo_schema.jsonl"):
        assert set(report.styles) == {"keep"}
    if name == "olympiadbench.jsonl":
        assert "69,84" in golds(dataset) and not any("$" in gold for gold in golds(dataset))
    bare = load_math_rows(SHARED / name, prompt_style="plain")
    assert not any("own line after" in m[-1]["content"] or "\\boxed{}" in m[-1]["content"] for m in bare["prompt"])


@needs_real_rows
def test_real_golds_are_judged():
    """27.0, 025, lists of several answers: every kind of gold is accepted by the verifier and accepts itself."""
    rows = [row for name in ("amc23", "aime24") for row in load_math_rows(SHARED / f"{name}.jsonl").to_list()]
    rows += load_math_rows(SHARED / "olympiadbench.jsonl", limit=25).to_list()
    assert len(rows) == 40 + 30 + 25 and any("," in row["solution"] for row in rows)
    with MathVerifier(workers=2, timeout_s=20) as verifier:
        assert (
            verifier([f"\\boxed{{{row['solution']}}}" for row in rows], [row["solution"] for row in rows])
            == [1.0] * 95
        )


@pytest.mark.slow
@needs_real_rows
@pytest.mark.parametrize("name", REAL)
def test_every_real_gold(name):
    dataset, report = loaded(SHARED / name)
    assert sum(n for n, _ in report.bad_golds.values()) == REAL[name][1]
    assert len(dataset) == report.read - report.duplicates - REAL[name][1]
