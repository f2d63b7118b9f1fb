"""The spike report: schema, pages that no text can script or break, files that are never overwritten, the index, and broken disks."""

import copy
import errno
import html
import io
import json
import math
import random
import re
import shutil
import subprocess
import sys
import threading
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest

import gradloc_report
from gradloc_report import check_report, load_spikes, view, write_index, write_spike

HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "--><svg onload=alert(1)><!--",
    "</pre></style></title></textarea><iframe src=https://evil.example/>",
    "javascript:alert(1)",
    "a\0b\ud800c\udfff",
    "\u202eevil\u2066\u200b\u2028\ufeff",
    "\x1b[31mred\x1b[0m\x07\r\n\t\x85",
    "é<script>alert(1)</script>\x1b<b>",
    "👩‍🔬🧪 é\u0301 שלום 中文",
    "&lt;script&gt; &amp;#0; ${x} {{y}} {0}",
    "w" * 100_000,
    " \n" * 5_000,
]


def sample_report(step=71, cause="A.1", seed=0, **changes):
    """A realistic report of one spike as GradLoc makes it: the 4 worst of 64 sequences on 2 ranks, 6 layers. `changes` replace fields."""
    rng = random.Random(seed)
    words = "The sum of 48 and 29 is found by adding tens , then ones : 4 0 + 2 0 = 6 0 , 8 + 9 = 1 7 . So the answer is 7 7".split()
    layer_names = ["embeddings", *(f"layer {i}" for i in range(6)), "final norm", "head"]
    kinds = ("attention", "mlp", "norm", "embeddings", "head")
    norm = 812.4

    def token(sequence, position, text, share, exact):
        rank, omega = sequence["rank"], math.exp(rng.gauss(0, 0.3))
        if exact:
            omega = 3.1e4 if cause == "A.1" else omega
        rollout = -rng.random() - (11 if omega > 100 else 2)
        return {
            "rank": rank, "micro_batch": 0, "sequence": sequence["sequence"], "position": position, "token_id": 22, "token": text,
            "share": share, "grad_norm": abs(share) * norm * 1.04 if exact else None,
            "grad_norm_share": abs(share) * 1.04 if exact else None,
            "layers": {n: abs(share) * norm * 0.9 ** (3 * i) for i, n in enumerate(layer_names)} if exact else None,
            "kinds": {n: abs(share) * norm / (i + 1.3) for i, n in enumerate(kinds)} if exact else None,
            "weight": rng.gauss(0, 0.01) if not exact else -12.0, "boost": 1.0,
            "logp": rollout + math.log(omega), "old_logp": rollout + math.log(omega),
            "rollout_logp": rollout, "ref_logp": None, "ratio": 1.0, "mismatch": omega, "omega": omega,
            "rho": sequence["rho"], "advantage": sequence["advantage"], "reward": sequence["reward"],
            "prompt_id": sequence["prompt_id"], "version": 70,
        }  # fmt: skip

    sequences, tokens = [], []
    for i in range(4):
        text = [words[0], *(" " + w for w in words[1:]), "\n", "<|im_end|>"]
        shares = [rng.gauss(0, 2e-4) for _ in text]
        sequence = {
            "rank": 1 - i % 2, "micro_batch": 0, "sequence": 5 + i, "prompt": f"What is 48 + {29 + i}?\nThink step by step.",
            "prompt_id": f"9f3a{i:04d}c0ffee", "tokens": text, "shares": shares, "first_position": 0, "share": 0.0,
            "rho": 0.99 + 0.002 * i, "advantage": 1.2 - i, "reward": float(i == 0), "version": 70, "length": len(text),
        }  # fmt: skip
        if i == 0:
            shares[36], shares[11] = 0.83, 0.06
        elif i == 1:
            shares[20] = -0.031
        sequence["share"] = sum(shares)
        sequences.append(sequence)
        order = sorted(range(len(text)), key=lambda t: -abs(shares[t]))[:5]
        tokens += [token(sequence, t, text[t], shares[t], abs(shares[t]) > 0.02) for t in order]
    tokens.sort(key=lambda t: -abs(t["share"]))
    medians = {name: 0.1 + 0.05 * i for i, name in enumerate(layer_names)}
    layers = {
        name: {"norm": 600 * 0.5**i + median, "median": median, "ratio": (600 * 0.5**i + median) / median}
        for i, (name, median) in enumerate(medians.items())
    }
    names = {"A.1": "token-level training-inference mismatch", "A.2": "sequence-level training-inference mismatch",
             "B": "layer heterogeneity", "N": "non-finite value", "unclassified": "unclassified"}  # fmt: skip
    remedy = {"A.1": "--token_clip icepop", "A.2": "--seq_clip", "B": "--layer_clip"}.get(cause, "")
    report = {
        "format": 1, "run": "grpo_tokenclip", "step": step, "update": 0, "time": "2026-11-29T19:40:00+00:00",
        "method": "directional: finite difference",
        "trigger": {"reason": "adaptive", "grad_norm": norm, "threshold": 3.1, "median": 0.42, "loss": 0.1},
        "grad_norm": norm, "certificate": 0.003, "remainder": 0.0, "note": "", "num_tokens": 1402, "num_sequences": 64,
        "world_size": 2, "seconds": 0.31, "time_ratio": 0.8, "cause": cause, "cause_name": names[cause],
        "evidence": ["omega of the first token is 3.1e+04, outside 0.5 to 5", "rho of its sequence is 0.99, inside 0.98 to 1.02"],
        "not_judged": ["B: fewer than 8 earlier steps are recorded"], "remedy": remedy,
        "sentence": f"step {step}: 83 % of the gradient norm is token 36 (' 7') of sequence 5 on rank 1, layers 0-2; "
                    f"omega = 3.1e+04 (token mismatch): {remedy}",
        "top1_share": 0.83, "top10_share": 0.9, "tokens": tokens[:20], "sequences": sequences, "layers": layers,
        "kinds": {"attention": 640.0, "mlp": 410.0, "norm": 12.0, "embeddings": 480.0, "head": 95.0},
        "search": None, "offender": None,
    }  # fmt: skip
    return {**report, **changes}


def replaced_texts(value, hostile, keep=("cause",)):
    """A copy in which every string but those of `keep` is hostile, and every name of a layer or kind too."""
    if isinstance(value, dict):
        return {
            (k + hostile if " " in k or k in ("head", "mlp", "attention") else k): v
            if k in keep
            else replaced_texts(v, hostile, keep)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [replaced_texts(v, hostile, keep) for v in value]
    return hostile if isinstance(value, str) else value


class Page(HTMLParser):
    """What a browser would build: elements, attributes, text; asserts on the way that nothing is open that should not be."""

    ELEMENTS = set(
        "html head meta title style body h1 h2 p b i div span ul li code table tr th td a header details summary pre "
        "svg line text polyline polygon circle".split()
    )
    ATTRIBUTES = set(
        "lang charset http-equiv content name class id title style href viewbox role open "
        "x1 x2 y1 y2 x y text-anchor points cx cy r".split()
    )
    VOID = {"meta", "line"}

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.found, self.text, self.links, self.titles, self.comments = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag in self.ELEMENTS, tag
        assert {name for name, _ in attrs} <= self.ATTRIBUTES, (tag, attrs)
        for name, value in attrs:
            if name == "style":
                assert all(part.split(":")[0] in ("width", "left") for part in value.split(";")), value
                assert value.rstrip("%").split(":")[1].replace(".", "").isdigit(), value
            if name == "href":
                self.links.append(value)
            if name == "title":
                self.titles.append(value)
            assert name in ("content", "href", "title", "style", "open", "points") or len(value) < 200
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_comment(self, data):
        self.comments.append(data)

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self):
        return "".join(self.text)


def safe(path):
    """Parse a page or index and assert that it is closed to the outside; returns the parsed page."""
    text = Path(path).read_bytes().decode("utf-8")
    page = Page(text)
    assert page.comments == []
    policy = [
        a["content"] for tag, a in page.found if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert text.index("Content-Security-Policy") < text.index("<title>")  # in force before anything is read
    assert all(link.startswith(("#t", "./")) for link in page.links), page.links
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style and "expression" not in style
    shown = page.words + "".join(page.titles)
    assert not [
        c
        for c in set(shown)
        if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000
    ]
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200b\u2028\u2029\ufeff")
    return page


def strict_lines(path):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    data = path.read_bytes()
    assert data.isascii() and data.endswith(b"\n")
    return [json.loads(line, parse_constant=refuse) for line in data.decode().splitlines() if line]


# ------------------------------------------------------------------------------------------------ schema


def test_the_sample_fits_the_schema():
    for cause in gradloc_report.CAUSES:
        check_report(sample_report(cause=cause))
    with pytest.raises(ValueError, match="report is NoneType, must be an object"):
        check_report(None)
    check_report(sample_report(sequences=None, tokens=None, layers=None, trigger=None, step=None, grad_norm=math.nan))


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("tokens", 1, "share"), "0.3", r"report\.tokens\[1\]\.share is '0.3' \(str\), must be a number or null"),
        (("tokens", 0, "rank"), 1.0, r"report\.tokens\[0\]\.rank is 1.0"),
        (("trigger",), [], r"report\.trigger is list, must be an object"),
        (("layers", "layer 2", "median"), True, r"report\.layers\.layer 2\.median is True \(bool\)"),
        (("sequences", 2, "tokens"), "abc", r"report\.sequences\[2\]\.tokens is str, must be a list"),
        (("sequences", 2, "tokens", 3), 5, r"report\.sequences\[2\]\.tokens\[3\] is 5"),
        (("cause",), "C", r"report\.cause is 'C', must be A\.1 \| A\.2 \| B \| N \| unclassified"),
        (("sentence",), None, r"report\.sentence is None, must be text"),
        (("format",), 2, r"report\.format is 2, but this version reads and writes format 1"),
        (("sequences", 0, "shares"), [0.1], r"report\.sequences\[0\] has 39 tokens but 1 shares"),
    ],
)
def test_the_first_wrong_field_is_named(path, value, message):
    report = sample_report()
    place = report
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        check_report(report)


def test_every_missing_field_is_named():
    for name in sample_report():
        report = sample_report()
        del report[name]
        with pytest.raises(ValueError, match=rf"report\.{name} is missing"):
            check_report(report)
    for name in sample_report()["tokens"][0]:
        report = sample_report()
        del report["tokens"][2][name]
        with pytest.raises(ValueError, match=rf"report\.tokens\[2\]\.{name} is missing"):
            check_report(report)


# ------------------------------------------------------------------------------------------------- write


def test_a_report_round_trips(tmp_path):
    report = sample_report(grad_norm=math.inf, certificate=math.nan)
    report["layers"]["layer 3"] = {"norm": -math.inf, "median": 1.0, "ratio": None}
    report["sequences"][0]["tokens"][:3] = ["nan", "inf", "-inf"]  # text that reads like a number stays text
    report["sequences"][0]["tokens"][3:5] = ["\ud83e\uddea", "a\ud83e"]  # a character in halves, and half a one
    path = write_spike(report, tmp_path / "run" / "gradloc")
    assert path.name == "spike_step000071_update000_rank01.html"
    (line,) = strict_lines(path.parent / "spikes.jsonl")
    assert line["grad_norm"] == "inf" and line["certificate"] == "nan" and line["page"] == path.name
    (loaded,) = load_spikes(tmp_path / "run")
    assert loaded.pop("page") == path.name and loaded.pop("folder") == str(path.parent)
    assert math.isnan(loaded.pop("certificate")) and math.isnan(report.pop("certificate"))
    assert loaded["sequences"][0]["tokens"][3:5] == ["🧪", "a\ufffd"]
    report["sequences"][0]["tokens"][3:5] = ["🧪", "a\ufffd"]
    assert loaded == report


def test_the_page_says_what_matters(tmp_path):
    report = sample_report()
    page = safe(write_spike(report, tmp_path))
    for text in (report["sentence"], "--token_clip icepop", "812.4", "0.3 % good", "83 %", *report["evidence"], *report["not_judged"],
                 "x the median", "-12", "3.1e+04", "9f3a0000", "the other 1,392 tokens: 10 %"):  # fmt: skip
        assert text in page.words, text
    top = [a for tag, a in page.found if tag == "span" and "top" in a.get("class", "").split()]
    assert len(top) == 1 and "position 36: 83 %" in top[0]["title"] and "omega 3.1e+04" in top[0]["title"]
    assert "a9" in top[0]["class"]  # the strongest of the first hue
    against = [a for tag, a in page.found if tag == "span" and a.get("title", "").startswith("position 20: -3.1 %")]
    assert against[0]["class"] == "s2" and against[0]["id"] == "t2"  # ceil(9 sqrt(0.031 / 0.83))
    anchors = {a["id"] for _, a in page.found if "id" in a}
    assert {link[1:] for link in page.links} == anchors and len(anchors) == 20
    assert " the answer is 7 7\n<|im_end|>" in page.words  # a copied text has its own characters, not the marks


def test_each_way_to_treat_a_spike_stands_by_itself(tmp_path):
    ways = ["fewer updates a sampling", "a smaller <b>--learning_rate", "--token_clip icepop"]
    text = write_spike(sample_report(remedy=", or ".join(ways)), tmp_path).read_text()
    assert [html.unescape(way) for way in re.findall(r'<code class="remedy">(.*?)</code>', text)] == ways


def test_the_token_table_scrolls_and_keeps_its_key_columns(tmp_path):
    page = safe(write_spike(sample_report(), tmp_path))
    tags = [tag for tag, _ in page.found]
    table = next(i for i, (tag, a) in enumerate(page.found) if tag == "table" and a.get("class") == "tokens")
    assert page.found[table - 1] == ("div", {"class": "wide"})
    heads = page.found[table : tags.index("td", table)]
    sticky = [a["class"].split()[-1] for tag, a in heads if tag == "th"][:5]
    assert sticky == ["k0", "k1", "k2", "k3", "r"]
    assert re.search(r"#token\s*pos\.share", page.words)
    assert ".wide{overflow-x:auto}" in gradloc_report.STYLE and ".k3{position:sticky" in gradloc_report.STYLE
    cells = [a["class"] for tag, a in page.found[table:] if tag == "td"][: len(gradloc_report.COLUMNS) + 2]
    assert [name.split()[-1] for name in cells[:5]] == sticky and not any("k" in name for name in cells[4:])
    assert [a["title"] for tag, a in heads if tag == "th" and a.get("title")] == [
        x for _, _, x in gradloc_report.COLUMNS
    ]
    assert ("details", {"class": "note", "open": None}) in page.found


def test_only_what_lies_above_the_gap_is_good(tmp_path):
    for value, word in ((0.05, "good"), (0.0501, "poor"), (math.nan, "poor")):
        page = safe(write_spike(sample_report(certificate=value), tmp_path))
        assert {"good": "poor", "poor": "good"}[word] not in page.words.split("certificate")[1][:30]
        assert word in page.words.split("certificate")[1][:30]


def test_layer_bars_have_one_scale_and_a_mark_at_the_median(tmp_path):
    layers = {
        "layer 0": {"norm": 4.0, "median": 1.0, "ratio": 4.0},
        "layer 1": {"norm": 2.0, "median": 2.0, "ratio": 1.0},
    }
    layers["head"] = {"norm": math.nan, "median": None, "ratio": None}
    report = sample_report(layers=layers, kinds=None, tokens=None, sequences=None)
    page = safe(write_spike(report, tmp_path))
    bars = [
        (a["class"], a.get("style"))
        for tag, a in page.found
        if tag == "div" and a.get("class") in ("fill", "med", "bad")
    ]
    assert bars == [
        ("fill", "width:100.0%"),
        ("med", "left:25.0%"),
        ("fill", "width:50.0%"),
        ("med", "left:50.0%"),
        ("bad", None),
    ]
    layers["layer 1"]["norm"] = 0.01
    assert "Scale: logarithmic" in safe(write_spike(report, tmp_path)).words


def test_missing_values_are_dashes(tmp_path):
    report = dict.fromkeys(sample_report()) | {"format": 1, "cause": "unclassified", "sentence": "nothing known"}
    check_report(report)
    page = safe(write_spike(report, tmp_path))
    assert "nothing known" in page.words and "None" not in page.words and "–" in page.words
    empty = sample_report()
    empty["tokens"] = [dict.fromkeys(token) for token in empty["tokens"]]
    empty["sequences"] = [dict.fromkeys(sequence) for sequence in empty["sequences"]]
    check_report(empty)
    assert "None" not in safe(write_spike(empty, tmp_path)).words
    assert "2 spike(s)" in view(tmp_path)
    safe(tmp_path / "index.html")


def test_search_and_offender_are_shown(tmp_path):
    trace = [
        {"level": "micro-batch", "tokens": 640, "norm": 3.2, "threshold": 1.1},
        {"level": "token", "tokens": 1, "norm": 0.4, "threshold": 9.0},
    ]
    search = {"probes": 17, "budget": 128, "exhausted": True, "trace": trace}
    offender = {"where": "forward", "module": "model.layers.3.mlp", "tensor": "rollout_logps", "position": 12}
    page = safe(write_spike(sample_report(cause="N", search=search, offender=offender, certificate=None), tmp_path))
    assert (
        "17 of at most 128 probes; the budget ran out" in page.words
        and "1.1above: searched furthertoken" in page.words
    )
    assert page.words.count("searched further") == 1
    assert "model.layers.3.mlp" in page.words and "rollout_logps" in page.words


def test_nothing_is_overwritten(tmp_path):
    paths = [write_spike(sample_report(), tmp_path) for _ in range(3)]
    assert [p.name for p in paths] == [f"spike_step000071_update000_rank01{s}.html" for s in ("", "-2", "-3")]
    assert [r["page"] for r in load_spikes(tmp_path)] == [p.name for p in paths]
    foreign = tmp_path / "spike_step000072_update000_rank01.html"
    foreign.write_text("mine")
    assert write_spike(sample_report(step=72), tmp_path).name == "spike_step000072_update000_rank01-2.html"
    assert foreign.read_text() == "mine"


def test_long_sequences_keep_the_page_small(tmp_path):
    report = sample_report()
    n = 32_000
    for i, sequence in enumerate(report["sequences"] * 2):
        sequence.update(
            tokens=[f" w{t}" for t in range(n)],
            shares=[1e-9 * t for t in range(n)],
            length=n + 500,
            sequence=5 + i % 4,
        )
    report["sequences"] = [copy.deepcopy(s) for s in report["sequences"] * 2]
    for i, token in enumerate(report["tokens"]):
        token.update(position=1500 * i + 400, sequence=5 + i % 4, rank=1 - i % 2)
    path = write_spike(report, tmp_path)
    assert path.stat().st_size < 1_000_000
    page = safe(path)
    position = report["tokens"][0]["position"]
    shown = {
        int(a["title"].split(":")[0].removeprefix("position "))
        for tag, a in page.found
        if tag == "span" and "title" in a
    }
    assert set(range(position - 40, position + 41)) <= shown and position + 300 not in shown
    assert "tokens not shown" in page.words
    (line,) = strict_lines(tmp_path / "spikes.jsonl")
    assert len(line["sequences"][0]["tokens"]) == n  # the record keeps all of it


def test_the_cut_counts_every_token_that_is_not_shown(tmp_path):
    report = sample_report()
    sequence = report["sequences"][0]
    sequence.update(tokens=[f"w{t} " for t in range(1000)], shares=[0.0] * 1000, first_position=100, length=1500)
    report["tokens"] = [{**report["tokens"][0], "position": p} for p in (400, 500, 900)]
    report["sequences"] = [sequence]
    page = safe(write_spike(report, tmp_path))
    spans = [a for tag, a in page.found if tag == "span" and "title" in a]
    # positions 200..700 and 700..1099: one piece, since 500 + 200 = 900 - 200
    assert len(spans) == 900 and page.words.count("tokens not shown") == 2
    assert re.findall(r"(\d+) tokens not shown", page.words) == ["200", "400"]
    del report["tokens"][1]  # positions 200..600 and 700..1099
    page = safe(write_spike(report, tmp_path))
    assert re.findall(r"(\d+) tokens not shown", page.words) == ["200", "99", "400"]


def test_a_listed_token_outside_the_text_and_values_of_the_wrong_type_do_no_harm(tmp_path):
    report = sample_report()
    report["tokens"][0].update(
        position=412, logp='"><script>alert(1)</script>', rho="'", version="<b>", prompt_id='"<i>'
    )
    report["sequences"][0]["shares"] = [0.1]
    report["tokens"] = report["tokens"][:1]
    page = safe(write_spike(report, tmp_path))
    assert page.words.count("So the answer is 7 7\n<|im_end|>") == 4
    report["tokens"][0]["position"] = 36
    assert "alert(1)" in "".join(safe(write_spike(report, tmp_path)).titles)


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_text(hostile, tmp_path):
    report = replaced_texts(sample_report(), hostile)
    trace = [{"level": hostile, "tokens": 1, "norm": 1.0, "threshold": 2.0}]
    report["search"] = {"probes": 1, "budget": 2, "exhausted": False, "trace": trace}
    report["offender"] = {"where": hostile, "module": hostile, "tensor": hostile, "position": 1}
    check_report(report)
    plain = sample_report(
        note="x", search={**report["search"], "trace": [{**trace[0], "level": "x"}]}, offender=report["offender"]
    )
    plain = safe(write_spike(plain, tmp_path / "plain"))
    path = write_spike(report, tmp_path / "hostile")
    page = safe(path)
    assert path.stat().st_size < 1_200_000
    marks = ("i", "span")  # tokens and the marks within them are the only elements whose number the text decides
    assert [t for t, _ in page.found if t not in marks] == [t for t, _ in plain.found if t not in marks]
    (line,) = strict_lines(path.parent / "spikes.jsonl")
    assert line["cause"] == "A.1" and "\ud800" not in line["sentence"]
    write_spike(report, tmp_path / "hostile")
    printed = view(tmp_path / "hostile")
    assert not [c for c in printed if ord(c) < 32 and c != "\n"] and "\x1b" not in printed and "\u202e" not in printed
    index = safe(tmp_path / "hostile" / "index.html")
    assert (tmp_path / "hostile" / "index.html").stat().st_size < 200_000
    assert set(index.links) == {f"./{path.name}", "./spike_step000071_update000_rank01-2.html"}


def test_a_hostile_run_folder_and_a_forged_page_name(tmp_path):
    folder = tmp_path / "javascript:alert(1)" / "a\"><b' onclick=x ?#%"
    write_spike(sample_report(), folder)
    record = strict_lines(folder / "spikes.jsonl")[0]
    (folder.parent / "spike_real.html").write_text("no page of this run")
    with (folder / "spikes.jsonl").open("a") as file:
        for page in (
            "../spike_real.html",
            "../../../etc/passwd",
            "https://evil.example/",
            "javascript:alert(1)",
            "spike_gone.html",
            7,
            None,
        ):
            file.write(json.dumps({**record, "page": page}) + "\n")
    page = safe(write_index(tmp_path))
    quoted = "./javascript%3Aalert%281%29/a%22%3E%3Cb%27%20onclick%3Dx%20%3F%23%25/"
    assert set(page.links) == {quoted + "spike_step000071_update000_rank01.html"}


def test_parallel_writers_neither_mix_nor_overwrite(tmp_path):
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_gradloc_report import sample_report, write_spike\n"
        "for i in range(8):\n"
        "    assert write_spike(sample_report(step=5, seed=i, note='x' * 60_000), sys.argv[1])\n"
    )
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-c", code, str(tmp_path), str(here), str(here.parent)]
    writers = [subprocess.Popen(command) for _ in range(3)]
    threads = [threading.Thread(target=write_spike, args=(sample_report(step=5), tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [w.wait(timeout=60) for w in writers] == [0, 0, 0]
    lines = strict_lines(tmp_path / "spikes.jsonl")
    pages = {line["page"] for line in lines}
    assert len(lines) == len(pages) == len(list(tmp_path.glob("spike_*.html"))) == 28


# ------------------------------------------------------------------------------------------- broken disks


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_a_warning_and_leaves_no_half_page(tmp_path, monkeypatch):
    class Full(io.StringIO):
        write = full

    def opened(path, mode="r", **kwargs):
        if mode == "x":
            real(path, mode, **kwargs).close()
            return Full()
        return real(path, mode, **kwargs)

    real = Path.open
    monkeypatch.setattr(Path, "open", opened)
    with pytest.warns(
        UserWarning, match=r"step 71 not written to .*No space left.*lost: the page and the record"
    ) as seen:
        assert write_spike(sample_report(), tmp_path) is None
    assert len(seen) == 1 and list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_between_page_and_record(tmp_path, monkeypatch):
    monkeypatch.setattr(gradloc_report, "_append", full)
    with pytest.warns(UserWarning, match="lost: the record in spikes.jsonl; the page is spike_step000071") as seen:
        assert write_spike(sample_report(), tmp_path) is None
    assert len(seen) == 1 and [p.suffix for p in tmp_path.iterdir()] == [".html"]


def test_an_interrupt_leaves_no_half_page_and_is_not_swallowed(tmp_path, monkeypatch):
    class Stopped(io.StringIO):
        def write(self, text):
            raise KeyboardInterrupt

    def opened(path, mode="r", **kwargs):
        real(path, mode, **kwargs).close()
        return Stopped()

    real = Path.open
    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(KeyboardInterrupt):
        write_spike(sample_report(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["file", "file/deeper/gradloc"])
def test_a_file_in_the_way_costs_a_warning(below, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.warns(UserWarning, match="lost: the page and the record") as seen:
        assert write_spike(sample_report(), tmp_path / below) is None
    assert len(seen) == 1 and (tmp_path / "file").read_text() == "mine"


def test_a_file_name_too_long_costs_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="File name too long"):
        assert write_spike(sample_report(), tmp_path / ("n" * 300)) is None


def test_an_index_that_cannot_be_written_still_prints(tmp_path):
    write_spike(sample_report(), tmp_path)
    (tmp_path / "index.html").mkdir()
    with pytest.warns(UserWarning, match="index not written"):
        assert "index: not written" in view(tmp_path)
    with pytest.warns(UserWarning, match="index not written"):
        assert write_index(tmp_path) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "index.html",
        "spike_step000071_update000_rank01.html",
        "spikes.jsonl",
    ]


def test_a_torn_line_costs_only_itself(tmp_path):
    write_spike(sample_report(step=1), tmp_path)
    records = tmp_path / "spikes.jsonl"
    with records.open("a") as file:
        file.write('{"format": 1, "run": "gr')  # killed while writing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [r["step"] for r in load_spikes(tmp_path)] == [1]
    write_spike(sample_report(step=2), tmp_path)  # the run goes on: the torn line gets its end
    with pytest.warns(UserWarning, match=r"spikes\.jsonl line 2 is no spike report and left out") as seen:
        assert [r["step"] for r in load_spikes(tmp_path)] == [1, 2]
    assert len(seen) == 1
    with records.open("a") as file:
        file.write(json.dumps({**strict_first(records), "cause": "C"}) + "\n\n[1]\n")
    with pytest.warns(UserWarning) as seen:
        assert [r["step"] for r in load_spikes(tmp_path)] == [1, 2]
    assert [str(w.message).split(": ", 1)[0].split("line ")[1] for w in seen] == [
        f"{n} is no spike report and left out" for n in (2, 4, 6)
    ]


def strict_first(records):
    return json.loads(records.read_text().splitlines()[0])


# ------------------------------------------------------------------------------------------------- index


def two_runs(folder):
    for step in (10, 40, 41):
        write_spike(sample_report(step=step, seed=step), folder / "first" / "gradloc")
    write_spike(sample_report(step=12, cause="B"), folder / "second" / "gradloc")
    report = sample_report(step=60, cause="N", grad_norm=math.nan)
    report["tokens"] = report["tokens"][2:]  # led by a token of another prompt
    write_spike(report, folder / "second" / "gradloc")
    write_spike(sample_report(step=None, cause="unclassified", tokens=None), folder / "second" / "gradloc")


def test_the_index_shows_all_runs_and_repeat_offenders(tmp_path):
    two_runs(tmp_path)
    page = safe(write_index(tmp_path))
    assert "6 spike(s) in 2 run(s)" in page.words
    assert len([1 for tag, _ in page.found if tag == "svg"]) == 2
    dots = [(tag, a["class"]) for tag, a in page.found if tag in ("circle", "polygon")]
    assert dots == [("circle", "dot c-a1")] * 3 + [("circle", "dot c-b"), ("polygon", "dot c-n")]
    assert len([1 for tag, _ in page.found if tag == "polyline"]) == 2
    assert len(set(page.links)) == 6 and all((tmp_path / link).is_file() for link in page.links)
    prompts = page.words.split("Prompts that led more than one spike")[1].split("Tokens that led")[0]
    assert "49f3a0000c0ffeeWhat is 48 + 29?" in prompts and "9f3a0001" not in prompts
    tokens = page.words.split("Tokens that led more than one spike")[1].split("Layers that led")[0]
    assert tokens == "spikestokenid4 722"  # 4 spikes, ' 7', id 22
    layers = page.words.split("Layers that led")[1].split("All spikes")[0]
    assert "embeddings66" in layers.replace(" ", "")


def test_the_chart_places_spikes_by_step_and_norm(tmp_path):
    for step, norm in ((0, 1.0), (50, 10.0), (100, 100.0)):
        write_spike(sample_report(step=step, grad_norm=norm), tmp_path)
    page = safe(write_index(tmp_path))
    dots = [(float(a["cx"]), float(a["cy"])) for tag, a in page.found if tag == "circle"]
    (x0, y0), (x1, y1), (x2, y2) = dots
    assert x0 < x1 < x2 and x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 > y1 > y2 and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)  # a decade is a decade
    (line,) = [a["points"] for tag, a in page.found if tag == "polyline"]
    assert {point.split(",")[1] for point in line.split()} == {line.split(",")[1].split()[0]}
    assert y1 < float(line.split(",")[1].split()[0]) < y0  # threshold 3.1


def curve(page):
    return [[tuple(map(float, xy.split(","))) for xy in a["points"].split()]
            for tag, a in page.found if tag == "polyline" and a["class"] == "norms"]  # fmt: skip


def test_the_chart_has_the_norm_of_every_step_behind_the_spikes(tmp_path):
    norms = {0: 1.0, 10: 10.0, 20: 0.0, 30: 100.0, 40: "nan", 50: 1.0, 60: 10.0}
    lines = [json.dumps({"step": step, "grad_norm": norm}) for step, norm in norms.items()]
    noise = [
        '{"step": 0, "eval/accuracy": 0.5}',
        "[1]",
        "null",
        '{"step": "<b>", "grad_norm": 1}',
        "1e999",
        '{"step": 70, "gra',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], *noise[:-1], *lines[1:], noise[-1]]))
    for step, norm in ((10, 10.0), (60, 10.0)):
        write_spike(sample_report(step=step, grad_norm=norm), tmp_path / "gradloc")
    page = safe(write_index(tmp_path))
    dots = [(float(a["cx"]), float(a["cy"])) for tag, a in page.found if tag == "circle"]
    first, alone, last = curve(page)  # broken at 0 and nan
    assert len(first) == 2 and alone[0] == alone[1] and len(last) == 2
    assert first[1] == dots[0] and last[1] == dots[1] and first[0][1] > first[1][1] > alone[0][1]
    assert first[0][0] < first[1][0] < alone[0][0] < last[0][0]
    assert all(62 < x < 1166 and 22 <= y <= 200 for line in (first, alone, last) for x, y in line), "on the chart"
    tags = [a.get("class") for tag, a in page.found if tag in ("polyline", "circle")]
    assert tags[:3] == ["norms"] * 3 and len(tags) == 6, "the dots lie above the curve"
    assert len(curve(safe(write_index(tmp_path / "gradloc")))) == 3, "found from the folder of the reports too"


def test_a_long_run_keeps_its_peaks_on_the_chart(tmp_path):
    norms = [3.0 if step == 4321 else 1.0 for step in range(5000)]
    text = "".join(json.dumps({"step": i, "grad_norm": norm}) + "\n" for i, norm in enumerate(norms))
    (tmp_path / "metrics.jsonl").write_text(text)
    ((*points,),) = gradloc_report._norms({str(tmp_path)})
    assert len(points) == 1000 and (4321, 3.0) in points and points == sorted(points)
    assert gradloc_report._norms({str(tmp_path / "gone" / "gradloc")}) == []


def test_view_prints_a_table(tmp_path):
    two_runs(tmp_path)
    lines = view(tmp_path).splitlines()
    assert lines[0] == f"6 spike(s) in 2 run(s) under {tmp_path}"
    assert (
        lines[1] == "first:"
        and lines[3].split()[:3] == ["10", "812.4", "A.1"]
        and "83 % of the gradient norm" in lines[3]
    )
    assert (
        lines[-2] == "causes of the spikes: A.1 3, B 1, N 1, unclassified 1"
        and lines[-1] == f"index: {tmp_path / 'index.html'}"
    )
    assert any(line.split()[:3] == ["60", "nan", "N"] for line in lines)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "index.html", "second"]  # no draft is left
    one = view(tmp_path / "second" / "gradloc").splitlines()
    assert one[0].startswith("3 spike(s) in 1 run(s)") and "step 12" not in one[2]


def test_a_folder_without_spikes_is_one_clear_sentence(tmp_path):
    with pytest.raises(ValueError, match="holds no spike report: .*--gradloc directional"):
        view(tmp_path)
    with pytest.raises(ValueError, match="gone is no folder: .*--gradloc directional"):
        write_index(tmp_path / "gone")
    assert list(tmp_path.iterdir()) == []


def test_the_module_needs_only_the_standard_library():
    code = "import sys, gradloc_report; print(*{m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names))"
    here = str(Path(__file__).resolve().parents[1])
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=here, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"__main__", "gradloc_report"}


# ----------------------------------------------------------------------------------------------- browser


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [None, *HOSTILE[:10]], ids=range(11))
def test_a_browser_shows_the_page_without_complaint(hostile, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    if browser is None:
        pytest.skip("no chromium or google-chrome on this machine")
    report = sample_report() if hostile is None else replaced_texts(sample_report(), hostile)
    report["sentence"] = "the sentence " + report["sentence"]
    page = write_spike(report, tmp_path)
    for path in (page, write_index(tmp_path)):
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
                   "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0",
                   f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (
            "the sentence" in done.stdout
            and "<script" not in done.stdout
            and "onerror=" not in done.stdout.split("<body>")[0]
        )
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        if hostile is None:
            assert report["sentence"] in done.stdout
