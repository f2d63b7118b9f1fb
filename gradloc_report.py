"""What GradLoc leaves behind for each spike: one line of spikes.jsonl, one page that opens offline, and an index of them.

Prompts and tokens are whatever a model wrote, so nothing of a report is trusted: all text is escaped, invisible characters are named, a
page holds no script and its content policy allows none, and no link leaves the folder. Only the standard library is needed, so that
`python gradloc.py view DIR` starts at once. The record's fields are SCHEMA, checked by `check_report`.
"""

import contextlib
import html
import json
import math
import os
import re
import unicodedata
import warnings
from collections import Counter
from pathlib import Path
from urllib.parse import quote

FORMAT = 1
RECORDS, INDEX, METRICS = "spikes.jsonl", "index.html", "metrics.jsonl"
CHART_STEPS = 1000  # points of a run's curve on the index
NONFINITE = ("nan", "inf", "-inf")
GOOD_CERTIFICATE = 0.05  # the shares miss the norm by at most 5 %
# tokens shown around a listed token: the first radius that keeps a page below PAGE_CHARS characters
RADII = (200, 100, 40, 10, 3)
PAGE_CHARS = 900_000
# longer text is cut on the page, and the cut is marked; the record has all of it
TOKEN_CHARS, RAW_CHARS, SENTENCE_CHARS, PROMPT_CHARS = 100, 400, 1500, 1500

CAUSES = {  # cause -> (css class, what it means in one line)
    "A.1": (
        "a1",
        "A few tokens have another probability now than when they were sampled: the engines disagree, or the policy moved on.",
    ),
    "A.2": ("a2", "Each token looks fine, but over the whole sequence training and sampling drift apart."),
    "B": ("b", "The tokens are fine; some layers answer them with far more gradient than they used to."),
    "N": ("n", "A number is not finite (NaN or infinite)."),
    "unclassified": ("u", "No known cause fits what was recorded."),
}

NUMBER, TEXT, WHOLE, BOOL = "a number", "text", "a whole number", "true or false"
TOKEN = {
    "rank": WHOLE, "micro_batch": WHOLE, "sequence": WHOLE, "position": WHOLE, "token_id": WHOLE, "token": TEXT,
    "share": NUMBER, "grad_norm": NUMBER, "grad_norm_share": NUMBER, "layers": {"*": NUMBER}, "kinds": {"*": NUMBER},
    "weight": NUMBER, "boost": NUMBER, "logp": NUMBER, "old_logp": NUMBER, "rollout_logp": NUMBER, "ref_logp": NUMBER, "ratio": NUMBER,
    "mismatch": NUMBER, "omega": NUMBER, "rho": NUMBER, "advantage": NUMBER, "reward": NUMBER, "prompt_id": TEXT,
    "version": WHOLE,
}  # fmt: skip
SEQUENCE = {
    "rank": WHOLE, "micro_batch": WHOLE, "sequence": WHOLE, "prompt": TEXT, "prompt_id": TEXT, "tokens": [TEXT],
    "shares": [NUMBER], "first_position": WHOLE, "share": NUMBER, "rho": NUMBER, "advantage": NUMBER, "reward": NUMBER,
    "version": WHOLE, "length": WHOLE,
}  # fmt: skip
SCHEMA = {  # every field is present; null where the value was not recorded. "*" stands for any key
    "format": WHOLE, "run": TEXT, "step": WHOLE, "update": WHOLE, "time": TEXT, "method": TEXT,
    "trigger": {"reason": TEXT, "grad_norm": NUMBER, "threshold": NUMBER, "median": NUMBER, "loss": NUMBER},
    "grad_norm": NUMBER, "certificate": NUMBER, "remainder": NUMBER, "note": TEXT,
    "num_tokens": WHOLE, "num_sequences": WHOLE, "world_size": WHOLE, "seconds": NUMBER, "time_ratio": NUMBER,
    "cause": TEXT, "cause_name": TEXT, "evidence": [TEXT], "not_judged": [TEXT], "remedy": TEXT, "sentence": TEXT,
    "top1_share": NUMBER, "top10_share": NUMBER, "tokens": [TOKEN], "sequences": [SEQUENCE],
    "layers": {"*": {"norm": NUMBER, "median": NUMBER, "ratio": NUMBER}}, "kinds": {"*": NUMBER},
    "search": {
        "probes": WHOLE, "budget": WHOLE, "exhausted": BOOL,
        "trace": [{"level": TEXT, "tokens": WHOLE, "norm": NUMBER, "threshold": NUMBER}],
    },
    "offender": {"where": TEXT, "module": TEXT, "tensor": TEXT, "position": WHOLE},
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- records


def check_report(report):
    """Raise ValueError naming the first field of a spike report that is missing or of another type than SCHEMA says."""
    _check(report, SCHEMA, "report")
    if report["format"] != FORMAT:
        raise ValueError(f"report.format is {report['format']}, but this version reads and writes format {FORMAT}")
    for name, allowed in (("cause", CAUSES), ("sentence", None)):
        if report[name] is None or (allowed and report[name] not in allowed):
            raise ValueError(f"report.{name} is {report[name]!r}, must be {' | '.join(allowed) if allowed else TEXT}")
    for i, sequence in enumerate(report["sequences"] or []):
        tokens, shares = sequence["tokens"], sequence["shares"]
        if tokens is not None and shares is not None and len(tokens) != len(shares):
            raise ValueError(f"report.sequences[{i}] has {len(tokens)} tokens but {len(shares)} shares, must be equal")


def _check(value, spec, where):
    if value is None and where != "report":
        return
    if isinstance(spec, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is {type(value).__name__}, must be a list or null")
        for i, item in enumerate(value):
            _check(item, spec[0], f"{where}[{i}]")
    elif isinstance(spec, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {type(value).__name__}, must be an object")
        names = value if "*" in spec else spec
        for name in names:
            if name not in value:
                raise ValueError(f"{where}.{name} is missing, must be there (null where it was not recorded)")
            _check(value[name], spec.get("*", spec.get(name)), f"{where}.{name}")
    elif not _is(value, spec):
        raise ValueError(f"{where} is {value!r:.80} ({type(value).__name__}), must be {spec} or null")


def _is(value, kind):
    if kind == TEXT:
        return isinstance(value, str)
    if kind == BOOL or isinstance(value, bool):
        return kind == BOOL and isinstance(value, bool)
    return isinstance(value, int) or (kind == NUMBER and (isinstance(value, float) or value in NONFINITE))


def _json_safe(value):
    """A copy that strict JSON can hold: non-finite numbers as the strings of NONFINITE, unpaired surrogates as U+FFFD."""
    if isinstance(value, dict):
        return {_json_safe(k): _json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(v) for v in value]
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _restore(value, spec):
    """_json_safe undone where SCHEMA says number: a token that reads "nan" stays text."""
    if isinstance(spec, list) and isinstance(value, list):
        return [_restore(v, spec[0]) for v in value]
    if isinstance(spec, dict) and isinstance(value, dict):
        return {k: _restore(v, spec.get("*", spec.get(k))) for k, v in value.items()}
    return float(value) if spec == NUMBER and value in NONFINITE else value


def write_spike(report, folder):
    """Append a report to folder/spikes.jsonl and write its page beside it; returns the page's path.

    The page is named by step, update and rank, and a number is added rather than a page overwritten. A disk that is full or a folder
    that cannot be written gives one warning and None: a report is never worth a training run.
    """
    folder, path = Path(folder), None
    lost = "the page and the record"
    page = _spike_page(report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, path = _new_page(folder, report)
        try:
            with file:
                file.write(page)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        lost = f"the record in {RECORDS}; the page is {path.name}"
        _append(folder / RECORDS, json.dumps(_json_safe({**report, "page": path.name}), allow_nan=False))
    except OSError as error:
        where = f"step {report.get('step')}"
        warnings.warn(f"GradLoc report of {where} not written to {folder} ({error}); lost: {lost}", stacklevel=2)
        return None
    return path


def looked_at(report):
    """True for a step that was looked at in turn or by a call: no spike."""
    return (report.get("trigger") or {}).get("reason") in ("every_n_steps", "call")


def _new_page(folder, report):
    first = (report.get("tokens") or [{}])[0]
    step, update, rank = report.get("step"), report.get("update"), first.get("rank")
    kind = "look" if looked_at(report) else "spike"
    stem = f"{kind}_step{step or 0:06d}_update{update or 0:03d}_rank{rank or 0:02d}"
    number = 1
    while True:
        path = folder / (f"{stem}.html" if number == 1 else f"{stem}-{number}.html")
        try:
            return path.open("x", encoding="utf-8", newline="\n"), path
        except FileExistsError:
            number += 1


def _append(path, line):
    # unbuffered: one write a line, so that the lines of several processes do not mix. The torn line of a killed run gets its end
    # first; a line that another process has yet to finish looks the same and leaves an empty line behind, which readers skip
    with path.open("a+b", buffering=0) as file:
        torn = False
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        data = memoryview((b"\n" if torn else b"") + line.encode("ascii") + b"\n")
        while data:
            data = data[file.write(data) :]


def load_spikes(folder):
    """The records of every spikes.jsonl in a folder and below it (a run, its gradloc folder, a folder of runs), in file order.

    Non-finite numbers are floats again; "folder" is added, where the record and its page lie. A last line without an end is the torn
    line of a killed run and left out; a line that is broken otherwise is left out with a warning that names file and line.
    """
    spikes = []
    for path in sorted(Path(folder).rglob(RECORDS)):
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") or not line.strip():
                    continue
                try:
                    record = _restore(json.loads(line), SCHEMA)
                    check_report(record)
                except ValueError as error:
                    warnings.warn(f"{path} line {number} is no spike report and left out: {error}", stacklevel=2)
                    continue
                spikes.append({**record, "folder": str(path.parent)})
    return spikes


# ---------------------------------------------------------------------------------------------------- text


def _finite(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value):
    """812.4, 1,402, nan; a dash for what was not recorded."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else visible(value)


def _percent(value):
    if not _finite(value):
        return _number(value)
    return f"{100 * value:,.0f} %" if abs(value) >= 1 else f"{100 * value:.3g} %"


def _name(char):
    """What stands for a character that cannot be seen or that reorders its neighbours; None for one that can be seen."""
    if char == "\n":
        return "⏎"
    if char == "\t":
        return "⇥"
    category = unicodedata.category(char)
    hidden = category in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") or (category == "Zs" and char != " ")
    return f"⟨U+{ord(char):04X}⟩" if hidden else None


def _halves(text, limit):
    """(start, a note of how much is cut, end); the note and the end are empty where nothing is."""
    if len(text) <= limit:
        return text, "", ""
    head, tail = limit - limit // 2, limit // 2
    return text[:head], f" … {len(text) - limit:,} characters cut … ", text[len(text) - tail :]


def visible(text, limit=None):
    """Text for one line of a page or a terminal: no control, no invisible, no reordering character; long text cut in the middle."""
    text = "".join(_halves(text, limit)) if limit else text
    return text if text.isascii() and text.isprintable() else "".join(_name(c) or c for c in text)


def _text(value, limit=None):
    return html.escape("–" if value is None else visible(str(value), limit))


def _marked(text, limit):
    """Markup of running text: spaces, tabs and line ends keep their character (copied as it is) and get a mark drawn by the style."""
    text, cut, tail = _halves(text, limit)
    if cut:
        return f'{_marked(text, limit)}<i class="c">{cut}</i>{_marked(tail, limit)}'
    out = []
    for piece in re.split(r"(\n|\t| +)", text):
        if piece == "\n":
            out.append('<i class="nl">\n</i>')
        elif piece == "\t":
            out.append('<i class="tab">\t</i>')
        elif piece.startswith(" "):
            out.append('<i class="s"> </i>' * len(piece))
        elif piece.isascii() and piece.isprintable():
            out.append(html.escape(piece))
        else:
            out.extend(f'<i class="c">{_name(c)}</i>' if _name(c) else html.escape(c) for c in piece)
    return "".join(out)


# ---------------------------------------------------------------------------------------------------- page

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#5c6670;--line:#d8dee4;--soft:#f4f6f8;--add:217 95 2;--sub:31 108 190;
--bar:#7d8fa3;--a1:#b84a00;--a2:#8a3b8f;--b:#0b62a8;--n:#33383d;--u:#6a737d;--bad:#c22}
@media (prefers-color-scheme:dark){:root{--bg:#15181c;--fg:#e4e7ea;--dim:#98a2ad;--line:#353b43;--soft:#1e2329;--add:224 110 20;
--sub:60 130 215;--bar:#8496ab;--n:#777f88;--bad:#f66}}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px 24px 60px;max-width:1240px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:22px;line-height:1.35;margin:6px 0 14px}h2{font-size:16px;margin:30px 0 8px}
p{margin:6px 0}.dim,.note{color:var(--dim);font-size:13px}code,.mono,td.r{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,monospace}
.verdict{border:1px solid var(--line);border-left:6px solid var(--c);border-radius:6px;padding:10px 14px;background:var(--soft)}
.badge{display:inline-block;padding:1px 10px;border-radius:12px;background:var(--c);color:#fff;font-weight:600;margin-right:8px;
white-space:nowrap}
.c-a1{--c:var(--a1)}.c-a2{--c:var(--a2)}.c-b{--c:var(--b)}.c-n{--c:var(--n)}.c-u{--c:var(--u)}
.verdict ul{margin:6px 0;padding-left:20px}.remedy{user-select:all;display:inline-block;background:var(--bg);border:1px solid var(--line);
border-radius:4px;padding:2px 8px;font-weight:600}
.strip{display:flex;flex-wrap:wrap;gap:8px;margin:14px 0}
.strip div{flex:1 1 112px;border:1px solid var(--line);border-radius:6px;padding:6px 10px}
.strip b{display:block;font-size:17px;font-variant-numeric:tabular-nums}.strip b.words{font-size:14px}
.strip span{color:var(--dim);font-size:12px;display:block}
.good{color:#1a7f37}.poor{color:var(--bad)}@media (prefers-color-scheme:dark){.good{color:#4cc46a}}
.split{display:flex;height:24px;border-radius:4px;overflow:hidden}.one{background:#c25100}.ten{background:#d9a06c}.all{background:#8a95a1}
.splitkey{font-size:14px}.splitkey span{margin-right:24px}.splitkey i{display:inline-block;width:11px;height:11px;margin-right:6px}
.seq{border:1px solid var(--line);border-radius:6px;margin:10px 0;overflow:hidden;break-inside:auto}
.seq header{background:var(--soft);padding:5px 12px;font-size:13px;border-bottom:1px solid var(--line)}
.prompt{padding:6px 12px;color:var(--dim);font-size:13px;white-space:pre-wrap;border-bottom:1px dashed var(--line)}
.text{padding:10px 12px;white-space:pre-wrap;font:14px/1.9 ui-monospace,"DejaVu Sans Mono",Menlo,monospace;overflow:hidden}
.text span{border-radius:2px;padding:2px 0;unicode-bidi:isolate}
.text .top{outline:3px solid var(--fg);outline-offset:1px;font-weight:700;margin:0 4px}
.text span:target{outline:3px dashed var(--bad);outline-offset:2px}
.cut{display:block;color:var(--dim);font-size:12px;text-align:center;border-top:1px dashed var(--line);border-bottom:1px dashed var(--line);
margin:6px 0;font-style:normal;font-family:system-ui,"DejaVu Sans",sans-serif}
i.s,i.nl,i.tab{position:relative;font-style:normal}i.s::before{content:"·";position:absolute;opacity:.35}
i.nl::before{content:"⏎";opacity:.45}i.tab::before{content:"⇥";position:absolute;opacity:.45}i.c{font-style:normal;font-size:80%;color:var(--bad)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;width:100%}th{font-weight:600;text-align:left;color:var(--dim);
vertical-align:bottom}th,td{padding:3px 7px;border-bottom:1px solid var(--line);overflow-wrap:break-word}
td.r,th.r{text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums}table.tokens{font-size:11.5px}table.tokens th,table.tokens td{padding:3px 4px}
td.tok{white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
table.tokens{border-collapse:separate;border-spacing:0}.k0,.k1,.k2,.k3{position:sticky;background:var(--bg)}
.k0{left:0;min-width:26px;max-width:26px}.k1{left:26px;min-width:140px;max-width:140px}.k2{left:166px;min-width:52px;max-width:52px}
.k3{left:218px;min-width:64px;border-right:1px solid var(--line)}tr.first td{font-weight:700;background:var(--soft)}
.layers td{padding:1px 7px}
.bar{position:relative;height:13px;background:var(--soft);min-width:150px}.bar div{position:absolute;top:0;bottom:0}
.bar .fill{left:0;background:var(--bar)}.bar .tokfill{left:0;background:rgb(var(--add))}.bar .bad{left:0;width:100%;
background:repeating-linear-gradient(45deg,var(--bad) 0 4px,transparent 4px 8px)}.bar .med{width:3px;margin-left:-1px;background:var(--fg)}
a{color:inherit}.key span{color:var(--fg);padding:2px 7px;border-radius:2px;margin-right:10px}
details.raw pre{white-space:pre-wrap;font-size:11px;background:var(--soft);padding:10px;max-height:480px;overflow:auto}
svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font-size:11px}svg .grid{stroke:var(--line)}
svg .norms{stroke:var(--bar);fill:none}svg .limit{stroke:var(--fg);stroke-dasharray:5 4;fill:none}svg .dot{fill:var(--c);stroke:var(--bg)}
td.sentence{min-width:420px;overflow-wrap:anywhere}p.run{margin-top:14px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:0 28px}
@page{size:landscape;margin:10mm}
@media print{:root{color-scheme:light;--bg:#fff;--fg:#000;--dim:#444;--line:#bbb;--soft:#f4f4f4;--add:217 95 2;--sub:31 108 190}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}details.raw{display:none}.wide{overflow:visible}.k0,.k1,.k2,.k3{position:static}
table.tokens{font-size:6.5pt}tr{break-inside:avoid}}
""" + "".join(
    f".a{level}{{background:rgb(var(--add)/{0.05 + 0.07 * level:.2f})}}.s{level}{{background:rgb(var(--sub)/{0.05 + 0.07 * level:.2f})}}"
    for level in range(1, 10)
)

HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body>
"""

COLUMNS = (  # field of a token, heading, what it is; the first two stay in sight with the token
    ("position", "pos.", "position in the completion, from 0"),
    ("share", "share", "part of the gradient norm: weight times the derivative of logp along the gradient; all tokens sum to 100 %"),
    ("grad_norm", "exact norm", "norm of this token's own gradient, from a backward of this token alone"),
    ("grad_norm_share", "of norm", "exact norm divided by the step's norm; above 100 % where tokens cancel each other"),
    ("weight", "weight", "dL/dlogp: how strongly the loss pulls at this token's log-prob"),
    ("boost", "boost", "|weight| over the median |weight| of its sequence: what the loss multiplies this token by"),
    ("logp", "logp", "log-prob now, training engine"),
    ("old_logp", "old", "log-prob in the training engine with the weights that sampled"),
    ("rollout_logp", "rollout", "log-prob in the engine that sampled"),
    ("ref_logp", "ref", "log-prob of the reference model"),
    ("ratio", "ratio", "exp(logp - old): staleness"),
    ("mismatch", "mismatch", "exp(old - rollout): the two engines disagree"),
    ("omega", "omega", "exp(logp - rollout) = ratio x mismatch"),
    ("rho", "rho", "geometric mean of omega over the sequence"),
    ("advantage", "adv.", "advantage of the sequence"),
    ("reward", "reward", "reward of the sequence"),
    ("version", "ver.", "weight version that sampled"),
    ("rank", "rank", "process"),
    ("micro_batch", "mb", "micro-batch within the step"),
    ("sequence", "seq.", "sequence within the micro-batch"),
    ("prompt_id", "prompt", "prompt id"),
)  # fmt: skip


def _place(item):
    return item.get("rank"), item.get("micro_batch"), item.get("sequence")


def _spike_page(report):
    """The page of one report; the window around listed tokens shrinks until it is small enough to open at once."""
    for radius in RADII:
        page = _render(report, radius)
        if len(page) < PAGE_CHARS:
            break
    return page


def _render(report, radius):
    tokens = report.get("tokens") or []
    sequences = [_shortened(s, tokens, radius) for s in report.get("sequences") or []]
    where = " · ".join(f"{field} {_text(report.get(field))}" for field in ("run", "step", "update"))
    reason = (report.get("trigger") or {}).get("reason")
    parts = [
        HEAD.format(title=f"step {_text(report.get('step'))}: {_text(report.get('cause'))}", style=STYLE),
        f'<p class="dim">GradLoc · {where} · {_text(report.get("time"))} · trigger: {_text(reason)}</p>',
        f"<h1>{_text(report.get('sentence'), SENTENCE_CHARS)}</h1>",
        _verdict(report),
        _strip(report),
        _concentration(report),
        _offender(report.get("offender")),
        *_sequences(sequences, tokens),
        _layers(report, tokens),
        _token_table(tokens),
        _search(report.get("search")),
        _raw(report, sequences),
        "</body></html>\n",
    ]
    return "".join(parts)


def _bullets(items):
    return "".join(f"<li>{_text(item, SENTENCE_CHARS)}</li>" for item in items)


def _badge(cause):
    css, _ = CAUSES.get(cause, CAUSES["unclassified"])
    return f'<span class="badge c-{css}">{_text(cause, 40)}</span>'


def _verdict(report):
    cause = report.get("cause")
    css, meaning = CAUSES.get(cause, CAUSES["unclassified"])
    name = _text(report.get("cause_name"), SENTENCE_CHARS)
    out = [f'<div class="verdict c-{css}"><p>{_badge(cause)}<b>{name}</b></p>']
    out.append(f'<p class="dim">{meaning}</p>')
    if report.get("evidence"):
        out.append(f"<ul>{_bullets(report['evidence'])}</ul>")
    if report.get("remedy"):
        ways = _text(report["remedy"], SENTENCE_CHARS).split(", or ")
        ways = " or ".join(f'<code class="remedy">{way}</code>' for way in ways)
        out.append(f"<p>What treats it: {ways}</p>")
    if report.get("not_judged"):
        out.append(f'<p class="dim">Could not be judged:</p><ul class="dim">{_bullets(report["not_judged"])}</ul>')
    if report.get("note"):
        out.append(f'<p class="dim">Note: {_text(report["note"], SENTENCE_CHARS)}</p>')
    return "".join(out) + "</div>"


def _strip(report):
    trigger = report.get("trigger") or {}
    norm, median, certificate = report.get("grad_norm"), trigger.get("median"), report.get("certificate")
    times = ""
    if _finite(norm) and _finite(median) and median > 0:
        times = f"{_number(float(f'{norm / median:.2g}'))} x the median"
    batch = (
        f"{_text(_number(report.get('num_sequences')))} sequences, {_text(_number(report.get('world_size')))} rank(s)"
    )
    times_step = f"{_text(_number(report.get('time_ratio')))} x one step"
    gap = "<b>–</b><span>the shares have no sum to check</span>"
    if certificate is not None:
        word = "good" if _finite(certificate) and certificate <= GOOD_CERTIFICATE else "poor"
        gap = f'<b class="{word}">{_text(_percent(certificate))} {word}</b><span>gap between norm and sum of shares</span>'
    cells = (
        ("gradient norm", f"<b>{_text(_number(norm))}</b><span>{times}</span>"),
        ("its median so far", f"<b>{_text(_number(median))}</b>"),
        ("threshold", f"<b>{_text(_number(trigger.get('threshold')))}</b>"),
        ("loss", f"<b>{_text(_number(trigger.get('loss')))}</b>"),
        ("certificate", gap),
        ("not from tokens", f"<b>{_text(_percent(report.get('remainder')))}</b><span>of the norm</span>"),
        ("method", f'<b class="words">{_text(report.get("method"))}</b>'),
        ("batch", f"<b>{_text(_number(report.get('num_tokens')))} tokens</b><span>{batch}</span>"),
        ("time to localise", f"<b>{_text(_number(report.get('seconds')))} s</b><span>{times_step}</span>"),
    )
    return '<div class="strip">' + "".join(f"<div><span>{k}</span>{v}</div>" for k, v in cells) + "</div>"


def _concentration(report):
    """One bar: the first token, the next nine, all others; only where the shares are parts of a whole."""
    one, ten, total = report.get("top1_share"), report.get("top10_share"), report.get("num_tokens")
    listed = f"The first token holds {_percent(one)} of the gradient norm, the first ten {_percent(ten)}."
    if not (_finite(one) and _finite(ten) and 0 <= one <= ten <= 1):
        return "" if one is None and ten is None else f"<p>{_text(listed)}</p>"
    listed_tokens = min(10, len(report.get("tokens") or ()))
    others = (
        f"the other {_number(total - listed_tokens)} tokens"
        if _finite(total) and total > listed_tokens
        else "all others"
    )
    parts = (("one", "1 token", one), ("ten", f"the next {listed_tokens - 1}", ten - one), ("all", others, 1 - ten))
    parts = [(css, f"{label}: {_percent(part)}", part) for css, label, part in parts if part > 5e-4]
    bar = "".join(
        f'<div class="{css}" style="width:{100 * part:.2f}%" title="{label}"></div>' for css, label, part in parts
    )
    key = "".join(f'<span><i class="{css}"></i>{label}</span>' for css, label, _ in parts)
    return f'<h2>Who makes the gradient norm</h2><div class="split">{bar}</div><p class="splitkey">{key}</p>'


def _offender(offender):
    if not offender:
        return ""
    fields = ("where", "module", "tensor", "position")
    rows = "".join(f"<tr><td>{k}</td><td>{_text(offender.get(k), SENTENCE_CHARS)}</td></tr>" for k in fields)
    return f"<h2>First value that is not finite</h2><table>{rows}</table>"


def _shortened(sequence, tokens, radius):
    """The sequence with "pieces": [(position of the first token, tokens, shares or None)] around the listed tokens."""
    texts, first = sequence.get("tokens") or [], sequence.get("first_position") or 0
    shares = sequence.get("shares")
    if shares is not None and len(shares) != len(texts):
        shares = None
    listed = sorted(
        t["position"] - first for t in tokens if _place(t) == _place(sequence) and _finite(t.get("position"))
    )
    listed = [i for i in listed if 0 <= i < len(texts)] or [0]
    spans = []
    for i in listed:
        low, high = max(0, i - radius), min(len(texts), i + radius + 1)
        if spans and low <= spans[-1][1]:
            spans[-1][1] = high
        else:
            spans.append([low, high])
    pieces = [(first + low, texts[low:high], shares[low:high] if shares else None) for low, high in spans]
    return {**sequence, "pieces": pieces}


def _sequences(sequences, tokens):
    if not sequences:
        return
    shown = [x for s in sequences for _, _, shares in s["pieces"] for x in shares or [] if _finite(x)]
    largest = max(map(abs, shown), default=0.0)
    yield '<h2>The tokens, in their text</h2><p class="key note">'
    if shown:
        yield '<span class="a8">adds to the norm</span><span class="s8">works against it</span>'
        yield "Strength grows with the square root of the share. "
    yield "The first token of the table is outlined; rest the pointer on a token for its numbers. · is a space, ⏎ a line end.</p>"
    ranked = {(*_place(t), t.get("position")): i for i, t in reversed(list(enumerate(tokens)))}
    for sequence in sequences:
        get = sequence.get
        facts = (
            f"rank {_text(get('rank'))}", f"micro-batch {_text(get('micro_batch'))}", f"share {_text(_percent(get('share')))}",
            f"rho {_text(_number(get('rho')))}", f"advantage {_text(_number(get('advantage')))}",
            f"reward {_text(_number(get('reward')))}", f"tokens {_text(_number(get('length')))}",
            f"weight version {_text(_number(get('version')))}", f"prompt id {_text(get('prompt_id'), 60)}",
        )  # fmt: skip
        head = f"<b>sequence {_text(get('sequence'))}</b> · {' · '.join(facts)}"
        prompt = get("prompt")
        body = "" if prompt is None else f'<div class="prompt"><b>Prompt</b> {_marked(prompt, PROMPT_CHARS)}</div>'
        yield f'<div class="seq"><header>{head}</header>{body}<div class="text">'
        at = 0
        for start, texts, shares in sequence["pieces"]:
            yield _cut(start - at)
            for offset, text in enumerate(texts):
                share = shares[offset] if shares else None
                index = ranked.get((*_place(sequence), start + offset))
                yield _token(text, start + offset, share, largest, index, None if index is None else tokens[index])
            at = start + len(texts)
        length = get("length")
        yield _cut((length if _finite(length) else at) - at) + "</div></div>"


def _cut(count):
    return f'<i class="cut">{count:,} tokens not shown</i>' if count > 0 else ""


def _token(text, position, share, largest, index, listed):
    classes = ["top"] if index == 0 else []
    if _finite(share) and largest > 0 and abs(share) >= 1e-3 * largest:
        classes.append(f"{'a' if share > 0 else 's'}{math.ceil(9 * math.sqrt(min(1.0, abs(share) / largest)))}")
    title = f"position {position}" if listed else str(position)
    title += "" if share is None else f": {_percent(share)}"
    if listed:
        for name in ("logp", "old_logp", "rollout_logp", "ratio", "mismatch", "omega"):
            title += f"\n{name} {_number(listed.get(name))}"
    identity = "" if index is None else f' id="t{index}"'
    css = f' class="{" ".join(classes)}"' if classes else ""
    return f'<span{identity}{css} title="{html.escape(title)}">{_marked(text, TOKEN_CHARS)}</span>'


def _scale(values):
    """(function from a value to a width in %, "linear" or "logarithmic"): logarithmic once the values span more than 100x."""
    positive = [v for v in values if _finite(v) and v > 0]
    if not positive:
        return (lambda value: 0.0), "linear"
    top, low = max(positive), min(positive)
    if top <= 100 * low:
        return (lambda value: 100 * max(0.0, value) / top), "linear"
    floor = max(low / 2, top * 1e-8)
    return (lambda value: 100 * math.log(max(value, floor) / floor) / math.log(top / floor)), "logarithmic"


def _bar(value, width, css, median=None):
    if value is None:
        return "<td></td>"
    fill = mark = ""
    if not _finite(value):
        fill = '<div class="bad"></div>'
    elif value > 0:
        fill = f'<div class="{css}" style="width:{width(value):.1f}%"></div>'
    if _finite(median):
        mark = f'<div class="med" style="left:{width(median):.1f}%" title="median {_number(median)}"></div>'
    return f'<td><div class="bar">{fill}{mark}</div></td>'


def _layers(report, tokens):
    top = tokens[0] if tokens else {}
    out = []
    steps = {name: entry or {} for name, entry in (report.get("layers") or {}).items()}
    kinds = {name: {"norm": norm} for name, norm in (report.get("kinds") or {}).items()}
    for field, title, step in (("layers", "layer", steps), ("kinds", "kind of weights", kinds)):
        token = top.get(field) or {}
        names = [*step, *(name for name in token if name not in step)]
        if not names:
            continue
        medians = [entry.get("median") for entry in step.values()]
        width, kind = _scale([*(entry.get("norm") for entry in step.values()), *medians, *token.values()])
        history = any(_finite(m) for m in medians)
        ratios = [e.get("ratio") for e in step.values() if _finite(e.get("ratio"))]
        head = f'<th>{title}</th><th>whole step{" (mark: its median so far)" if history else ""}</th><th class="r">norm</th>'
        head += '<th class="r">x median</th>' if history else ""
        head += '<th>first token alone</th><th class="r">norm</th>' if token else ""
        rows = []
        for name in names:
            entry = step.get(name, {})
            row = f"<td>{_text(name, 80)}</td>{_bar(entry.get('norm'), width, 'fill', entry.get('median'))}"
            row += f'<td class="r">{_text(_number(entry.get("norm")))}</td>'
            if history:
                ratio = _text(_number(entry.get("ratio")))
                row += f'<td class="r">{f"<b>{ratio}</b>" if ratios and entry.get("ratio") == max(ratios) else ratio}</td>'
            if token:
                row += f'{_bar(token.get(name), width, "tokfill")}<td class="r">{_text(_number(token.get(name)))}</td>'
            rows.append(f"<tr>{row}</tr>")
        out.append(f'<h2>Gradient norm by {title}</h2><p class="note">Scale: {kind}, the same for all bars.</p>')
        out.append(f'<table class="layers"><tr>{head}</tr>{"".join(rows)}</table>')
    return "".join(out)


def _key(place):
    """The class of a column that stays in sight."""
    return f" k{place + 2}" if place < 2 else ""


def _token_table(tokens):
    if not tokens:
        return ""
    head = '<th class="k0">#</th><th class="k1">token</th>' + "".join(
        f'<th class="r{_key(i)}" title="{html.escape(what)}">{label}</th>'
        for i, (_, label, what) in enumerate(COLUMNS)
    )
    rows = []
    for i, token in enumerate(tokens):
        name = _marked(token.get("token") or "", 40)
        cells = [
            f'<td class="k0">{i + 1}</td><td class="tok mono k1"><a href="#t{i}" title="show in the text">{name}</a></td>'
        ]
        for place, (field, _, _) in enumerate(COLUMNS):
            show = _percent if field in ("share", "grad_norm_share") else _number
            value = token.get(field)
            full = f' title="{_text(value, SENTENCE_CHARS)}"' if field == "prompt_id" and value else ""
            text = _text(show(value)[:8] if field == "prompt_id" else show(value))
            cells.append(f'<td class="r{_key(place)}"{full}>{text}</td>')
        rows.append(f'<tr class="{"first" if i == 0 else ""}">{"".join(cells)}</tr>')
    title = " with the largest shares" if _finite(tokens[0].get("share")) else ""
    meaning = "".join(f"<li><b>{label}</b>: {html.escape(what)}</li>" for _, label, what in COLUMNS)
    return (
        f"<h2>{len(tokens)} tokens{title}</h2>"
        f'<p class="note">{len(COLUMNS) + 2} columns: scroll sideways for those out of sight.</p>'
        f'<div class="wide"><table class="tokens"><tr>{head}</tr>{"".join(rows)}</table></div>'
        f'<details class="note" open><summary>What the columns mean</summary><ul>{meaning}</ul></details>'
    )


def _search(search):
    if not search:
        return ""
    used = f"{_number(search.get('probes'))} of at most {_number(search.get('budget'))} probes"
    used += "; the budget ran out before the search was done" if search.get("exhausted") else ""
    rows = []
    for probe in search.get("trace") or []:
        norm, threshold = probe.get("norm"), probe.get("threshold")
        above = _finite(norm) and _finite(threshold) and norm > threshold
        cells = f'<td>{_text(probe.get("level"), 80)}</td><td class="r">{_text(_number(probe.get("tokens")))}</td>'
        cells += f'<td class="r">{_text(_number(norm))}</td><td class="r">{_text(_number(threshold))}</td>'
        rows.append(f"<tr>{cells}<td>{'above: searched further' if above else ''}</td></tr>")
    head = '<th>level</th><th class="r">tokens</th><th class="r">norm</th><th class="r">threshold</th><th></th>'
    return f"<h2>Search</h2><p>{_text(used)}</p><table><tr>{head}</tr>{''.join(rows)}</table>"


def _raw(report, sequences):
    """The record as text, with the sequences as they are shown and long texts cut."""
    cut = []
    for sequence in sequences:
        facts = {k: v for k, v in sequence.items() if k != "pieces"}
        for start, texts, shares in sequence["pieces"]:
            cut.append({**facts, "first_position": start, "tokens": texts, "shares": shares})
    record = _json_safe(_cut_texts({**report, "sequences": cut}))
    lines = (f"{json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in record.items())
    text = "{\n " + ",\n ".join(lines) + "\n}"
    return (
        f'<details class="raw"><summary>The record as JSON (long texts and sequences cut; whole in {RECORDS})</summary>'
        f"<pre>{html.escape(text)}</pre></details>"
    )


def _cut_texts(value):
    if isinstance(value, dict):
        return {_cut_texts(k): _cut_texts(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_cut_texts(v) for v in value]
    return "".join(_halves(value, RAW_CHARS)) if isinstance(value, str) else value


# --------------------------------------------------------------------------------------------------- index


def write_index(folder):
    """Write folder/index.html, an overview of every spike below the folder; returns its path, or None (with a warning) if the disk refuses.

    Raises ValueError where there is no spike to show.
    """
    return _write_index(folder, _some_spikes(folder))


def view(folder):
    """Write the index of a folder and return a table of its spikes to print. Raises ValueError where there is none."""
    spikes = _some_spikes(folder)
    path = _write_index(folder, spikes)
    runs = list(dict.fromkeys(_run_of(s, folder) for s in spikes))
    lines = [f"{_counted(spikes)} in {len(runs)} run(s) under {folder}"]
    for run in runs:
        if len(runs) > 1:
            lines.append(f"{visible(run, 100)}:")
        lines.append(f"  {'step':>7}  {'norm':>10}  {'cause':<12}  what")
        for spike in (s for s in spikes if _run_of(s, folder) == run):
            what = visible(spike["sentence"], 300).removeprefix(f"step {spike['step']}: ")
            lines.append(
                f"  {_number(spike['step']):>7}  {_number(spike['grad_norm']):>10}  {spike['cause']:<12}  {what}"
            )
    causes = Counter(s["cause"] for s in spikes if not looked_at(s)).most_common()
    lines.append("causes of the spikes: " + (", ".join(f"{cause} {count}" for cause, count in causes) or "-"))
    lines.append(f"index: {path or 'not written (see the warning)'}")
    return "\n".join(lines)


def _counted(spikes):
    looks = sum(looked_at(s) for s in spikes)
    return f"{len(spikes) - looks} spike(s)" + (f" and {looks} step(s) looked at in turn" if looks else "")


def _some_spikes(folder):
    spikes = load_spikes(folder)
    if not spikes:
        state = "holds no spike report" if Path(folder).is_dir() else "is no folder"
        raise ValueError(
            f"{folder} {state}: give the output folder of a run with GradLoc on (--gradloc directional, or GradLoc(folder)) in which "
            "a spike occurred; --gradloc_every 25 also looks at steps without one"
        )
    return spikes


def _run_of(spike, folder):
    """What tells the runs of one index apart: the run's folder, seen from the index."""
    parts = [part for part in Path(spike["folder"]).relative_to(folder).parts if part != "gradloc"]
    return "/".join(parts) or spike["run"] or Path(folder).resolve().name


def _write_index(folder, spikes):
    path = Path(folder) / INDEX
    draft = path.with_name(f"{INDEX}.{os.getpid()}")
    page = _index_page(Path(folder), spikes)
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)  # a reader never sees half an index
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        warnings.warn(
            f"GradLoc index not written to {path} ({error}); lost: only the overview, the reports are there",
            stacklevel=3,
        )
        return None
    return path


def _index_page(folder, spikes):
    runs = list(dict.fromkeys(_run_of(s, folder) for s in spikes))
    causes = Counter(s["cause"] for s in spikes if not looked_at(s))
    parts = [HEAD.format(title="GradLoc: spikes", style=STYLE), '<p class="dim">GradLoc</p>']
    parts.append(f"<h1>{_counted(spikes)} in {len(runs)} run(s)</h1>")
    rows = "".join(
        f'<tr><td class="r">{count}</td><td>{_badge(cause)}</td><td>{CAUSES[cause][1]}</td></tr>'
        for cause, count in causes.most_common()
    )
    parts.append(f'<table><tr><th class="r">spikes</th><th>cause</th><th>what it means</th></tr>{rows}</table>')
    parts.append(
        '<h2>Spikes over time</h2><p class="note">Gradient norm at each spike (logarithmic), coloured by cause; behind it, where '
        "metrics.jsonl is there, the norm of every step. Dashed: the threshold. "
        "A triangle above the chart: a norm that is not finite.</p>"
    )
    steps = [s["step"] for s in spikes if _finite(s["step"])]
    levels = [
        x for s in spikes for x in (s["grad_norm"], (s["trigger"] or {}).get("threshold")) if _finite(x) and x > 0
    ]
    norms = {run: _norms({s["folder"] for s in spikes if _run_of(s, folder) == run}) for run in runs}
    if steps:  # else there is no chart
        steps += [step for lines in norms.values() for line in lines for step, _ in line]
        levels += [norm for lines in norms.values() for line in lines for _, norm in line]
    for run in runs:
        mine = [s for s in spikes if _run_of(s, folder) == run and _finite(s["step"])]
        parts.append(f'<p class="run"><b>{_text(run, 100)}</b></p>' if len(runs) > 1 else "")
        mine.sort(key=lambda s: s["step"])
        parts.append(_chart(mine, norms[run], steps, levels, folder) if mine else "")
    parts.append(_offenders([s for s in spikes if not looked_at(s)]))
    parts.append("<h2>All reports</h2>" + _spike_rows(spikes, runs, folder) + "</body></html>\n")
    return "".join(parts)


def _norms(folders):
    """The gradient norm over a run, from the metrics.jsonl beside or above its reports: [[(step, norm), ...], ...].

    A new list begins after a norm that a logarithmic axis has no place for. Of more than CHART_STEPS steps each stretch
    keeps its largest norm. [] without such a file; lines that are no records are passed over.
    """
    places = [Path(folder) for folder in sorted(folders)]
    paths = [path for place in places for path in (place / METRICS, place.parent / METRICS) if path.is_file()]
    points = {}
    for line in paths[0].read_text(encoding="utf-8", errors="replace").splitlines() if paths else ():
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            record = json.loads(line)
            points[int(record["step"])] = float(record["grad_norm"])
    steps = sorted(points)
    stretch = math.ceil(len(steps) / CHART_STEPS)
    lines = [[]]
    for i in range(0, len(steps), stretch or 1):
        step = max(steps[i : i + stretch], key=lambda step: points[step] if points[step] < math.inf else 0.0)
        if 0 < points[step] < math.inf:
            lines[-1].append((step, points[step]))
        elif lines[-1]:
            lines.append([])
    return [line for line in lines if line]


def _link(spike, folder):
    """The page's address seen from the index; None where the record names no page of ours or the page is gone."""
    name = spike.get("page")
    if not isinstance(name, str) or not re.fullmatch(r"(spike|look)_[A-Za-z0-9_-]+\.html", name):
        return None
    path = Path(spike["folder"]) / name
    return "./" + quote(path.relative_to(folder).as_posix()) if path.is_file() else None


def _spike_rows(spikes, runs, folder):
    rows = []
    for spike in spikes:
        link = _link(spike, folder)
        page = f'<a href="{html.escape(link)}">page</a>' if link else "–"
        run = f"<td>{_text(_run_of(spike, folder), 60)}</td>" if len(runs) > 1 else ""
        numbers = "".join(f'<td class="r">{_text(_number(spike[name]))}</td>' for name in ("step", "grad_norm"))
        what = f'<td>{_badge(spike["cause"])}</td><td class="sentence">{_text(spike["sentence"], 400)}</td>'
        rows.append(f"<tr>{run}{numbers}{what}<td>{page}</td></tr>")
    run = "<th>run</th>" if len(runs) > 1 else ""
    head = f'{run}<th class="r">step</th><th class="r">norm</th><th>cause</th><th>what</th><th>report</th>'
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _ticks(low, high, count):
    """Round numbers between low and high, about `count` of them."""
    step = 10 ** math.floor(math.log10(max(high - low, 1) / count))
    step = next(int(max(1, step * m)) for m in (1, 2, 5, 10) if step * m * count >= high - low or m == 10)
    return range(math.ceil(low / step) * step, math.floor(high) + 1, step)


def _chart(spikes, norms, steps, levels, folder, width=1180, height=230):
    """Inline SVG of one run's spikes before its norms; steps and levels are those of all runs, so that several charts compare."""
    left, right, top, bottom = 62, 14, 22, 30
    first, last = min(steps), max(steps)
    low, high = (math.log10(min(levels)) - 0.1, math.log10(max(levels)) + 0.1) if levels else (-1.0, 1.0)
    span = max(last - first, 1)

    def x(step):
        return left + 12 + (width - left - right - 24) * ((step - first) / span if last > first else 0.5)

    def y(value):
        return height - bottom - (height - top - bottom) * (math.log10(value) - low) / (high - low)

    out = [f'<svg viewBox="0 0 {width} {height}" role="img"><title>gradient norm at each spike</title>']
    decades = range(math.floor(low), math.ceil(high) + 1)
    marks = [
        m * 10.0**d
        for d in decades
        for m in ((1,) if len(decades) > 3 else (1, 2, 5))
        if low <= math.log10(m * 10.0**d) <= high
    ]
    for mark in marks:
        out.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>')
        out.append(f'<text x="{left - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for tick in _ticks(first, last, 10):
        out.append(f'<text x="{x(tick):.1f}" y="{height - bottom + 16}" text-anchor="middle">{tick:,}</text>')
    out.append(f'<text x="{width - right}" y="{height - 3}" text-anchor="end">optimizer step</text>')
    for line in norms:
        line = [line[0], *line] if len(line) == 1 else line
        points = " ".join(f"{x(step):.1f},{y(norm):.1f}" for step, norm in line)
        out.append(f'<polyline class="norms" points="{points}"/>')
    limits = [
        (s["step"], s["trigger"]["threshold"]) for s in spikes if s["trigger"] and _finite(s["trigger"]["threshold"])
    ]
    limits = [(step, value) for step, value in limits if value > 0]
    if limits:
        path = [(left, limits[0][1]), *((x(step), value) for step, value in limits), (width - right, limits[-1][1])]
        points = " ".join(f"{px:.1f},{y(value):.1f}" for px, value in path)
        out.append(f'<polyline class="limit" points="{points}"/>')
    for spike in spikes:
        norm, css = spike["grad_norm"], CAUSES[spike["cause"]][0]
        title = f"<title>{_text(spike['sentence'], 300)}</title>"
        if _finite(norm) and norm > 0:
            shape = (
                f'<circle class="dot c-{css}" cx="{x(spike["step"]):.1f}" cy="{y(norm):.1f}" r="6">{title}</circle>'
            )
        else:  # no place on a logarithmic axis: a triangle above it
            px = x(spike["step"])
            points = f"{px - 6:.1f},{top - 6} {px + 6:.1f},{top - 6} {px:.1f},{top - 17}"
            shape = f'<polygon class="dot c-{css}" points="{points}">{title}</polygon>'
        link = _link(spike, folder)
        out.append(f'<a href="{html.escape(link)}">{shape}</a>' if link else shape)
    return "".join(out) + "</svg>"


def _offenders(spikes):
    """Prompts, tokens and layers that come back, each counted once a spike (its first token)."""
    prompts, tokens, texts = Counter(), Counter(), {}
    by_norm, by_ratio = Counter(), Counter()
    for spike in spikes:
        for name, counter in (("norm", by_norm), ("ratio", by_ratio)):
            layers = {k: v[name] for k, v in (spike["layers"] or {}).items() if v and _finite(v[name])}
            if layers:
                counter[max(layers, key=layers.get)] += 1
        if not spike["tokens"] or not spike["tokens"][0]:
            continue
        token = spike["tokens"][0]
        tokens[token["token_id"], token["token"]] += token["token"] is not None
        if token["prompt_id"] is not None:
            prompts[token["prompt_id"]] += 1
            for sequence in spike["sequences"] or []:
                if sequence["prompt_id"] == token["prompt_id"] and sequence["prompt"]:
                    texts.setdefault(token["prompt_id"], sequence["prompt"])
    tables = []
    rows = [
        f'<tr><td class="r">{count}</td><td class="mono">{_text(identity, 24)}</td><td>{_text(texts.get(identity, "–")[:160])}</td></tr>'
        for identity, count in prompts.most_common(10)
        if count > 1
    ]
    tables.append(
        _table(
            "Prompts that led more than one spike", '<th class="r">spikes</th><th>prompt id</th><th>begins</th>', rows
        )
    )
    rows = [
        f'<tr><td class="r">{count}</td><td class="mono">{_marked(text or "", 60)}</td><td class="r">{_text(_number(identity))}</td></tr>'
        for (identity, text), count in tokens.most_common(10)
        if count > 1
    ]
    tables.append(
        _table(
            "Tokens that led more than one spike", '<th class="r">spikes</th><th>token</th><th class="r">id</th>', rows
        )
    )
    names = sorted(by_norm | by_ratio, key=lambda name: (-by_ratio[name], -by_norm[name]))[:10]
    rows = [
        f'<tr><td>{_text(name, 80)}</td><td class="r">{by_ratio[name]}</td><td class="r">{by_norm[name]}</td></tr>'
        for name in names
    ]
    head = '<th>layer</th><th class="r">most above median</th><th class="r">largest norm</th>'
    tables.append(_table("Layers that led, in spikes", head, rows))
    return f'<h2>Repeat offenders</h2><div class="two">{"".join(tables)}</div>'


def _table(title, head, rows):
    body = f"<table><tr>{head}</tr>{''.join(rows)}</table>" if rows else '<p class="note">none</p>'
    return f"<div><p><b>{title}</b></p>{body}</div>"
