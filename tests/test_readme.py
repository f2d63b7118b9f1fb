"""The README's claims that a machine can check: commands, file map, links, glossary, one-word facts about the project."""

import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from rlvr_data import load_math_rows
from stability_report import glossary
from tiny.tasks import KINDS, make_rows
from training import make_ours

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text()


def tracked():
    done = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.split()


def test_the_two_commands_come_first():
    block = README.split("```bash")[1].split("```")[0]
    assert "pip install -r requirements.txt && accelerate launch recipes/grpo_tokenclip.py" in block
    assert "pip install -r requirements.txt && pytest" in block
    assert README[: README.index("```bash")].count("\n") < 15


def test_every_linked_file_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) > 10
    assert [link for link in links if not (REPO / link).exists()] == []


def test_commands_name_files_and_options_that_exist():
    from trl import ModelConfig

    from ares_dapo import AresDAPOConfig
    from grpo_tokenclip import GRPOTokenClipConfig
    from minirl_async_r3 import MiniRLAsyncConfig
    from minirl_sync import MiniRLConfig

    for path in re.findall(r"(?:launch|python) (?:--\S+ \S+ )*((?:recipes|results)/\S+\.py)", README):
        assert (REPO / path).is_file(), path
    for path in re.findall(r"recipes/configs/[\w/]+\.yaml", README):
        assert (REPO / path).is_file(), path
    configs = {
        "ares_dapo": AresDAPOConfig,
        "grpo_tokenclip": GRPOTokenClipConfig,
        "minirl_sync": MiniRLConfig,
        "minirl_async_r3": MiniRLAsyncConfig,
    }
    for recipe, config in configs.items():
        known = set(config.__dataclass_fields__) | set(ModelConfig.__dataclass_fields__)
        lines = re.findall(rf"recipes/{recipe}\.py (.*)", README.replace("\\\n", " "))
        assert lines
        for option in (option for line in lines for option in re.findall(r"--(\w+)", line.split("#")[0])):
            assert option in known | {"config"}, option


def test_file_map_names_every_top_level_file_and_folder():
    section = README.split("## Files")[1]
    tops = {path.split("/")[0] for path in tracked()}
    hidden = {".gitignore", ".ci", "LICENSE", "README.md", "requirements.txt", "pyproject.toml"}
    missing = [top for top in sorted(tops - hidden) if f"]({top})" not in section]
    assert missing == []


def test_every_metric_of_a_run_is_in_the_glossary(tmp_path):
    """Names of metrics.jsonl, quantiles folded, against the README's table (TRL's own names included)."""
    section = README.split("## Metrics")[1].split("\n## ")[0]
    names = set(re.findall(r"`([\w./]+)`", section))
    changes = {"token_clip": "tis", "beta": 0.01, "seq_clip_low": 0.9, "seq_clip_high": 1.1}
    trainer = make_ours(
        tmp_path, max_steps=9, gradloc="directional", gradloc_every=1, layer_clip=True, spectral_every=3, **changes
    )
    trainer.train()
    written = {name for record in trainer.state.log_history if "loss" in record for name in record}
    written |= {"eval/accuracy", "eval/stderr"}
    assert {"gradloc/time_ratio", "layer_clip/corr_min"} <= written
    folded = {re.sub(r"/(min|p01|p50|p99|max)$", "/...", name) for name in written}
    folded = {re.sub(r"^(layer_clip/(norm|factor))/.*", r"\1/...", name) for name in folded}
    missing = sorted(name for name in folded if name not in names and not name.startswith("rewards/digits_reward"))
    assert missing == []


def test_every_metric_that_the_code_names_is_in_the_glossary():
    """Also of recipes and flags that no short run brings together; what a name is made of counts as anything."""
    calls = r'(?:track|track_share|_record|log_metric)\(\s*f?"([^"]+)"|_metrics\[[^\]]+\]\[f?"([^"]+)"\]'
    sources = [*REPO.glob("*.py"), *(REPO / "recipes").glob("*.py")]
    named = {a or b for path in sources for a, b in re.findall(calls, path.read_text())}
    named = {re.sub(r"\{[^}]*\}", "*", name.removesuffix("/layer_{layer}")) for name in named} - {"*", "*/*"}
    known = glossary()
    assert len(named) > 30 and {"guard/level", "dynamic/*", "async/staleness", "support/size"} <= named
    missing = [
        n for n in sorted(named) if not any(fnmatch(k, n) or fnmatch(n, k) or fnmatch(f"{n}/p50", k) for k in known)
    ]
    assert missing == []


def test_every_pin_is_exact_and_says_why():
    lines = [
        line for line in (REPO / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")
    ]
    assert len(lines) > 10
    for line in lines:
        assert re.fullmatch(r"[\w\[\].-]+==[\w.]+\s+# .{10,}", line), line


def test_the_cpu_build_of_torch_is_the_pinned_one():
    (command,) = re.findall(r"`pip install torch==([\d.]+)`", README)
    assert f"torch=={command} " in (REPO / "requirements.txt").read_text()


def test_gradloc_example_in_a_plain_loop_runs(tmp_path):
    code = next(block for block in README.split("```python")[1:] if "gradloc.watch" in block).split("```")[0]
    added = [line for line in code.splitlines() if "gradloc" in line.lower() and "import" not in line]
    assert len(added) <= 5
    (tmp_path / "loop.py").write_text(code.replace('"tiny/qwen3"', repr(str(REPO / "tiny" / "qwen3"))))
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "loop.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("of the gradient norm is token") == 2
    assert len(list((tmp_path / "runs/loop/gradloc").glob("look_*.html"))) == 2


def test_the_rows_of_your_data_are_problems_that_the_tiny_models_know(tmp_path):
    section = README.split("## Your data")[1].split("\n## ")[0]
    rows = re.findall(r"'(\{.*?\})'", section)
    (tmp_path / "mine.jsonl").write_text("\n".join(rows) + "\n")
    assert len(load_math_rows(str(tmp_path / "mine.jsonl"), prompt_style="plain")) == len(rows) == 2
    shape = re.compile(r"\d+")
    known = {shape.sub("1", row["problem"]) for row in make_rows("train", 600)}
    assert {shape.sub("1", json.loads(row)["problem"]) for row in rows} <= known
    assert "eight kinds" in section and len(KINDS) == 8
