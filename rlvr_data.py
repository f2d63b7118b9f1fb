"""Maths problems from any source as one kind of row: `load_math_rows`.

A source is `tiny` (the embedded task, `tiny:heldout` for its held-out split), a local .jsonl, .json, .parquet or .csv
file, a folder or a hub id that `datasets.load_dataset` can read (`org/name`, `org/name:split`,
`org/name:config:split`). What the columns mean is found from their names, once per source (`SCHEMAS`).

Every row that comes out has a prompt, a gold answer the verifier can judge, and no twin. What was left out is counted
and said: repeated problems (DAPO-Math-17k ships each about 100 times), problems that occur with different golds (every
copy is dropped, since the file does not say which gold is right), golds that are missing or that the verifier cannot
read (they could never be rewarded rightly). A malformed row is an error, never a silent drop.
"""

import csv
import dataclasses
import difflib
import json
import logging
import math
import os
import random
import re
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import torch
from datasets import Dataset, Features, Value, load_dataset, load_from_disk
from datasets.exceptions import DatasetNotFoundError
from tqdm import tqdm

from verifier import MathVerifier

logger = logging.getLogger(__name__)

EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv")
PROMPT_STYLES = ("boxed", "answer_line", "plain", "keep")
CHUNK = 512  # golds checked at once
GOLD_TIMEOUT_S = 20.0  # far above the slowest good gold seen (1 s): a busy machine must not change the data set
TINY_SIZES = {"train": 4096, "heldout": 256}

# (prompt column, gold column); the first pair whose columns a source has is what the source means.
SCHEMAS = (
    ("prompt", "reward_model.ground_truth"),
    ("problem", "answer"),
    ("question", "answer"),
    ("prompt", "answer"),
    ("prompt", "solution"),
    ("problem", "solution"),
    ("question", "solution"),
)
ID_COLUMNS = ("id", "unique_id", "extra_info")
COLUMNS = {name.split(".")[0] for schema in SCHEMAS for name in schema} | set(ID_COLUMNS)
FEATURES = Features(
    {
        "prompt": [{"role": Value("string"), "content": Value("string")}],
        "solution": Value("string"),
        "source": Value("string"),
        "id": Value("string"),
    }
)

BOXED_INSTRUCTION = "Think step by step and give your final answer inside \\boxed{}."
ANSWER_INSTRUCTION = (
    "Think step by step. Let the last line of your reply read Answer: $Answer, where $Answer is your final answer."
)
# A first paragraph in DAPO-Math's wording, and a last line that says where the answer goes.
_DAPO_HEAD = re.compile(r"\ASolve the following math problem step by step\b.*?\n\s*\n", re.DOTALL)
_ANSWER_TAIL = re.compile(r"\n[^\n]*(?:\\boxed\{\s*\}|\bAnswer:)[^\n]*\Z")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{\\])")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[^:/\\]+){0,2}")
_SCHEMA_LIST = ", ".join(f"{{{prompt}, {gold}}}" for prompt, gold in SCHEMAS)


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What `load_math_rows` did with a source; all counts are rows.

    `bad_golds` maps a reason to [count, place of the first such row]. `unchecked` rows were never looked at by the
    verifier, since `limit` was reached before them.
    """

    source: str
    columns: str
    styles: dict
    read: int
    duplicates: int
    conflicts: int
    bad_golds: dict
    unchecked: int
    kept: int

    def __str__(self):
        line = (
            f"{self.source} as {self.columns}: {self.read} rows read, {self.duplicates} duplicates, "
            f"{self.conflicts} with conflicting golds, {sum(n for n, _ in self.bad_golds.values())} bad golds, "
            f"{self.kept} kept"
        )
        if self.bad_golds:
            reasons = (f"{reason}: {n}, first at {place}" for reason, (n, place) in self.bad_golds.items())
            line += f" [bad golds: {'; '.join(reasons)}]"
        if self.unchecked:
            line += f" [limit reached, {self.unchecked} rows not needed]"
        return line + f" [prompt style: {', '.join(f'{style} {n}' for style, n in self.styles.items())}]"


def load_math_rows(source, limit=None, seed=0, *, prompt_style=None):
    """Load `source` as a `datasets.Dataset` with columns prompt (messages), solution (gold, str), source, id.

    limit         None: all rows in file order. An int: that many rows of one seeded shuffle, so a smaller limit gives
                  a prefix of a larger one with the same seed; golds are only checked until the limit is reached.
    prompt_style  boxed | answer_line: the bare problem and an instruction to put the answer in \\boxed{} or on a last
                  `Answer:` line; plain: the bare problem; keep: the row's own text. None: plain for tiny, keep where
                  the source ships messages or its text already says where the answer goes, else boxed.

    What was dropped and why is in `load_math_rows_report(dataset)`. Under several processes all ranks must call this.
    Raises FileNotFoundError or ValueError, one sentence that names the source, the row (1-based; the line in text
    files) and the column.
    """
    source = os.fspath(source)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit is {limit!r}; give a whole number of rows from 1 up, or None for all of them")
    if prompt_style is not None and prompt_style not in PROMPT_STYLES:
        raise ValueError(f"prompt_style is {prompt_style!r}; choose one of {', '.join(PROMPT_STYLES)}")
    name, rows = _open_source(source)
    unique, columns, counts = _unique_rows(source, rows)
    order = list(range(len(unique)))
    if limit is not None:
        random.Random(seed).shuffle(order)
    kept, bad_golds, checked = _judgeable([unique[i] for i in order], limit)
    styles = Counter()
    out = []
    for row in kept:
        messages, style = _styled(row["messages"], row["bare"], prompt_style or row["default_style"])
        styles[style] += 1
        out.append({"prompt": messages, "solution": row["gold"], "source": name, "id": row["id"]})
    report = LoadReport(
        source=source,
        columns=columns,
        styles=dict(styles),
        bad_golds=bad_golds,
        unchecked=len(unique) - checked,
        kept=len(out),
        **counts,
    )
    if not out:
        raise ValueError(f"{source}: no row is left to use. {report}")
    logger.info("%s", report)
    dataset = Dataset.from_list(out, features=FEATURES)
    dataset.info.description = json.dumps(dataclasses.asdict(report))
    return dataset


def load_math_rows_report(dataset):
    """The LoadReport of a dataset that `load_math_rows` made; `str` of it is a summary line."""
    if not dataset.info.description.startswith('{"source"'):
        raise ValueError("this dataset has no report: it was not made by load_math_rows")
    return LoadReport(**json.loads(dataset.info.description))


# ---- rows in: each reader yields (place, row), place being what an error message calls the row ----


def _open_source(source):
    """(short name for the source column, iterator of (place, row))."""
    if source == "tiny" or source.startswith("tiny:"):
        return source, _tiny_rows(source)
    path = Path(source).expanduser()
    if path.is_file() or path.suffix.lower() in EXTENSIONS:
        return path.name, _file_rows(path)
    place, *selection = source.split(":")
    folder = Path(place).expanduser()
    typo = path.suffix and path.parent.is_dir()  # data/math500.jsnl beside data/math500.jsonl is no hub id
    if folder.is_dir() or (_HUB_ID.fullmatch(source) and not typo):
        return source, _data_set_rows(source, folder if folder.is_dir() else place, selection)
    if path.suffix or os.sep in source:
        raise FileNotFoundError(_missing(path))
    raise ValueError(
        f"source {source!r} is none of: tiny, tiny:heldout, a hub id like org/name, a file ending in "
        f"{', '.join(EXTENSIONS)}{_near(path)}"
    )


def _tiny_rows(source):
    split = source.partition(":")[2] or "train"
    if split not in TINY_SIZES:
        raise ValueError(f"source {source!r}: the embedded task has no split {split!r}; use tiny or tiny:heldout")
    from tiny.tasks import make_rows

    # One fixed set whatever the run's seed, so that accuracies of different seeds are about the same problems.
    for number, row in enumerate(make_rows(split, TINY_SIZES[split], seed=0)):
        row_id = f"{split}-{number}-{row['kind']}-{row['level']}"
        yield f"row {number + 1}", {"problem": row["problem"], "answer": row["answer"], "id": row_id}


def _file_rows(path):
    if not path.is_file():
        raise FileNotFoundError(_missing(path))
    suffix = path.suffix.lower()
    if suffix not in EXTENSIONS:
        raise ValueError(f"{path}: cannot read {suffix or 'no extension'}; convert it to {', '.join(EXTENSIONS)}")
    return {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".csv": _csv}[suffix](path)


def _jsonl(path):
    with open(path, "rb") as lines:  # bytes: a line that is not UTF-8 must be named, and \u2028 must not split a line
        for number, line in enumerate(lines, 1):
            text = _utf8(path, f"line {number}", line)
            if text.strip():
                yield f"line {number}", _parsed(path, f"line {number}", text)


def _json(path):
    text = _utf8(path, "the file", path.read_bytes())
    if not text.lstrip().startswith("["):
        yield from _jsonl(path)
        return
    for number, row in enumerate(_parsed(path, "the file", text), 1):
        yield f"row {number}", row


def _utf8(path, place, data):
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, {place}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error


def _parsed(path, place, text):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, character {error.colno}" if place == "the file" else f"character {error.colno}"
        raise ValueError(f"{path}, {place}: broken JSON at {where}: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise ValueError(f"{path}, {place}: JSON that Python refuses to parse: {error}") from error


def _parquet(path):
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = _needed(file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(batch_size=4096, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from error


def _csv(path):
    csv.field_size_limit(sys.maxsize)  # a worked solution may be longer than the default of 131,072 characters
    try:
        with open(path, encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                if None in row:
                    raise ValueError(f"{path}, line {reader.line_num}: more fields than the header has columns")
                yield f"line {reader.line_num}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable UTF-8 csv file: {error}") from error


def _data_set_rows(source, place, selection):
    """Rows of a hub id (str) or a folder (Path); selection: [], [split] or [config, split]."""
    if len(selection) > 2:
        raise ValueError(f"source {source!r} has too many colons; write {place}:split or {place}:config:split")
    config, split = [None] * (2 - len(selection)) + selection
    saved = isinstance(place, Path) and any((place / f).is_file() for f in ("dataset_info.json", "dataset_dict.json"))
    if isinstance(place, Path) and not saved and not (place / "README.md").is_file():
        # Without a card `datasets` picks files by what their names look like and skips the rest silently.
        files = sorted(p.name for p in place.iterdir() if p.suffix.lower() in EXTENSIONS)
        if len(files) > 1:
            raise ValueError(f"source {source!r} is a folder of several files; name one of {', '.join(files)}")
    try:
        data = load_from_disk(place) if saved else load_dataset(os.fspath(place), config)
    except (DatasetNotFoundError, OSError, ValueError) as error:  # OSError: no network, and every error of requests
        raise ValueError(
            f"source {source!r} is no local file, and loading it as a data set failed: {error} "
            f"(write org/name:split or org/name:config:split; without network pass a downloaded .parquet or .jsonl)"
        ) from error
    if isinstance(data, dict):
        if split is None and len(data) == 1:
            split = next(iter(data))
        if split not in data:
            forms = ", ".join(":".join(filter(None, (os.fspath(place), config, name))) for name in data)
            raise ValueError(f"source {source!r}: {f'no split {split}' if split else 'several splits'}; use {forms}")
        data = data[split]
    elif split is not None:
        raise ValueError(f"source {source!r}: {place} has no splits, leave :{split} out")
    number = 0
    for table in data.select_columns(_needed(data.column_names)).with_format("arrow").iter(4096):
        for row in table.to_pylist():  # six times the speed of iterating over rows
            number += 1
            yield f"row {number}", row


def _needed(names):
    return [name for name in names if name in COLUMNS] or list(names)


def _missing(path):
    return f"no file {path}{_near(path)}; give a file, tiny, or a hub id like org/name"


def _near(path):
    folder = path.parent
    if not folder.is_dir():
        return f" (there is no folder {folder})"
    names = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in EXTENSIONS)
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(str(folder / name) for name in near)}?" if near else ""


# ---- rows checked, understood and made unique ----


def _unique_rows(source, rows):
    """(rows without twins and conflicts, the schema as text, counts). Keeps only unique rows in memory."""
    schema, columns = None, ""
    first = {}  # normalised problem -> row
    copies = Counter()
    conflicting = set()
    read = 0
    for place, row in tqdm(rows, desc=f"reading {source}", unit=" rows", delay=5, mininterval=1, leave=False):
        read += 1
        where = f"{source}, {place}"
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a {type(row).__name__}, not an object with columns; wanted {_SCHEMA_LIST}")
        if schema is None:
            schema = _schema(where, row)
            columns = f"{{{', '.join(schema)}}}"
        messages = _messages(where, row, schema)
        gold = _gold(where, row, schema)
        text = messages[-1]["content"]
        bare = _bare(text)
        key = json.dumps([m["content"] for m in messages[:-1]] + [_normal(bare)])
        copies[key] += 1
        if key not in first:
            ships_prompt = schema[0] == "prompt" and not isinstance(row["prompt"], str)
            style = "keep" if ships_prompt or bare != text.strip() else "boxed"
            if source == "tiny" or source.startswith("tiny:"):
                style = "plain"
            first[key] = {
                "place": place,
                "messages": messages,
                "bare": bare,
                "gold": gold,
                "default_style": style,
                "id": _row_id(row, read),
            }
        elif gold and not first[key]["gold"]:
            first[key] |= {"place": place, "gold": gold, "id": _row_id(row, read)}
        elif gold and _normal_gold(gold) != _normal_gold(first[key]["gold"]):
            conflicting.add(key)
    if not read:
        raise ValueError(f"{source}: no rows in it")
    unique = [row for key, row in first.items() if key not in conflicting]
    conflicts = sum(copies[key] for key in conflicting)
    return unique, columns, {"read": read, "duplicates": read - len(unique) - conflicts, "conflicts": conflicts}


def _schema(where, row):
    for schema in SCHEMAS:
        if schema[0] in row and _gold_column(row, schema[1]) is not _ABSENT:
            return schema
    raise ValueError(f"{where}: columns {', '.join(map(str, row)) or '(none)'} fit no schema; wanted {_SCHEMA_LIST}")


_ABSENT = object()


def _gold_column(row, column):
    head, _, inner = column.partition(".")
    value = row.get(head, _ABSENT)
    if not inner or value is _ABSENT:
        return value
    return value.get(inner, _ABSENT) if isinstance(value, dict) else _ABSENT


def _missing_column(where, row, column, schema):
    return (
        f"{where}: no column {column} (it has {', '.join(map(str, row)) or 'none'}), but the first row of this source "
        f"was read as {{{', '.join(schema)}}}; keep one schema a file"
    )


def _messages(where, row, schema):
    """The prompt column as a list of {role, content}; the last message is the user's."""
    column = schema[0]
    if column not in row:
        raise ValueError(_missing_column(where, row, column, schema))
    value = row[column]
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list):
        raise ValueError(f"{where}, column {column}: {_shown(value)} is neither text nor a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"{where}, column {column}: {_shown(message)} is no message with role and content")
        if message["role"] not in ("system", "user", "assistant") or not isinstance(message["content"], str):
            raise ValueError(
                f"{where}, column {column}: a message needs a role of system, user or assistant and text as content, "
                f"not role {_shown(message['role'])} and content {_shown(message['content'])}"
            )
        _encodable(f"{where}, column {column}", message["content"])
    if not messages or not messages[-1]["content"].strip():
        raise ValueError(f"{where}, column {column}: the prompt is empty")
    if messages[-1]["role"] != "user":
        raise ValueError(f"{where}, column {column}: the last message is the {messages[-1]['role']}'s, not the user's")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _gold(where, row, schema):
    """The gold as stripped text; "" where the row has none, which `_judgeable` counts as a bad gold."""
    value = _gold_column(row, schema[1])
    if value is _ABSENT:
        raise ValueError(_missing_column(where, row, schema[1], schema))
    parts = value if isinstance(value, list) else [value]
    texts = [_gold_text(f"{where}, column {schema[1]}", part) for part in parts]
    gold = ", ".join(text for text in texts if text)
    if isinstance(value, list):
        # Several answers are one gold, "69, 84": the verifier compares such a list as a set.
        gold = re.sub(r"(?<!\\)\$", "", gold)
    _encodable(f"{where}, column {schema[1]}", gold)
    if "\\boxed" in gold or "\\fbox" in gold:
        return last_box(gold) or ""
    if schema[1] == "solution" and schema[0] != "prompt":
        return ""  # a worked solution without a box: its last number may be anything
    if schema[1] == "answer" and "####" in gold:  # GSM8K: a worked solution, then "#### 1,234"
        return gold.rpartition("####")[2].strip()
    return gold


def _gold_text(where, value):
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return repr(value)
    raise ValueError(f"{where}: {_shown(value)} is no answer; give text, a finite number, or a list of these")


def last_box(text):
    """Content of the last complete \\boxed{...} or \\fbox{...}, else None; braces may nest, \\{ is no brace."""
    found = None
    for match in _BOX.finditer(text):
        if match[1] != "{":  # \boxed 5: TeX takes one token
            found = match[1]
            continue
        depth = 0
        for token in re.finditer(r"\\.|[{}]", text[match.start(1) :], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(token[0], 0)
            if depth == 0:
                found = text[match.end(1) : match.start(1) + token.start()].strip()
                break
    return found


def _encodable(where, text):
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half of a surrogate pair at character {error.start}; not valid Unicode") from error


def _shown(value):
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _bare(text):
    """The problem without DAPO's wrapping or a last line that says where to put the answer."""
    bare = _ANSWER_TAIL.sub("", _DAPO_HEAD.sub("", text.strip())).strip()
    return bare or text.strip()


def _normal(text):
    return " ".join(unicodedata.normalize("NFC", text).split())


def _normal_gold(gold):
    """Two golds are in conflict when these differ: blanks, $ and the zeros of 025 or 27.0 do not matter."""
    text = re.sub(r"[\s$]", "", gold)
    number = re.fullmatch(r"([+-]?)0*(\d+)(?:\.(\d*?)0*)?", text)
    if number is None:
        return text
    sign, whole, decimals = number.groups()
    return f"{'-' if sign == '-' else ''}{whole}{'.' + decimals if decimals else ''}"


def _row_id(row, number):
    for column in ID_COLUMNS:
        value = row.get(column)
        if column == "extra_info" and isinstance(value, dict):
            value = value.get("index")
        if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value):
            return str(value)
    return str(number)


def _judgeable(rows, limit):
    """(rows whose gold the verifier can judge, up to `limit`; bad golds by reason; how many rows were looked at)."""
    kept, bad = [], {}
    checked = 0
    bar = tqdm(desc="checking golds", unit=" rows", delay=5, mininterval=1, leave=False)
    with MathVerifier(timeout_s=GOLD_TIMEOUT_S) as verifier, bar:
        while checked < len(rows) and (limit is None or len(kept) < limit):
            size = CHUNK if limit is None else min(CHUNK, max(limit - len(kept), 32))
            chunk = rows[checked : checked + size]
            for row, reason in zip(chunk, _gold_reasons(verifier, [row["gold"] for row in chunk]), strict=True):
                if limit is not None and len(kept) == limit:
                    break
                checked += 1
                if reason is None:
                    kept.append(row)
                else:
                    count, place = bad.get(reason, [0, row["place"]])
                    bad[reason] = [count + 1, place]
            bar.update(len(chunk))
    return kept, bad, checked


def _gold_reasons(verifier, golds):
    """None for each gold that can be judged, else why not. Rank 0 decides for all processes: a gold at the edge of the
    verifier's time limit must not give ranks data sets of different lengths."""
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    reasons = None
    if not shared or torch.distributed.get_rank() == 0:
        verdicts = iter(verifier.check_golds([gold for gold in golds if gold]))
        reasons = [next(verdicts) if gold else "empty, or a solution without a complete \\boxed{}" for gold in golds]
    if shared:
        box = [reasons]
        torch.distributed.broadcast_object_list(box, src=0)
        reasons = box[0]
    return reasons


# ---- prompts out ----


def _styled(messages, bare, style):
    """(messages in `style`, style); only the last message, the user's, changes."""
    if style == "keep":
        return messages, style
    instruction = {"boxed": BOXED_INSTRUCTION, "answer_line": ANSWER_INSTRUCTION, "plain": ""}[style]
    content = f"{bare}\n\n{instruction}" if instruction else bare
    return [*messages[:-1], {"role": "user", "content": content}], style
