"""docs/tour.md, run as it stands: every command of the file, in its order, in a folder of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradloc_report import load_spikes
from rlvr_report import read_metrics

REPO = Path(__file__).resolve().parents[1]
TOUR = (REPO / "docs" / "tour.md").read_text()
# a fenced block, and the flags that a comment before it appends to each of its launches: fewer steps, fewer held-out problems
BLOCKS = re.findall(r"(?:<!-- test: (.*?) -->\n)?```bash\n(.*?)```", TOUR, re.DOTALL)
SHORTENS = {"max_steps", "eval_problems"}


def shortened(block, flags):
    return re.sub(r"^(accelerate launch .*?)( &)?$", rf"\1 {flags}\2", block.replace("\\\n", ""), flags=re.MULTILINE)


def added(text):
    """The lines that a diff in `text` adds, file names left out."""
    return re.findall(r"^\+(?!\+\+)(.*)$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """What a clone holds and the tour needs; what it writes stays there."""
    folder = tmp_path_factory.mktemp("tour") / "clone"
    folder.mkdir()
    for path in REPO.glob("*.py"):
        shutil.copy(path, folder)
    for name in ("recipes", "tiny"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(block, folder):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the accelerate and python of this environment
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # as in the shell of a reader: a command behind & is a job, and `kill %%` reaches all of its processes
    block = "set -e -m\n" + block
    done = subprocess.run(["bash", "-c", block], cwd=folder, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, block + done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_a_marker_shortens_and_changes_nothing_else():
    assert len(BLOCKS) >= 8 and TOUR.count("```bash") == len(BLOCKS)
    for flags, _ in BLOCKS:
        assert set(re.findall(r"--(\w+)", flags)) <= SHORTENS
    assert (
        shortened("accelerate launch a.py --b \\\n    --c 1 &\nls", "--d 2")
        == "accelerate launch a.py --b     --c 1 --d 2 &\nls"
    )


def test_the_fork_is_six_lines_and_the_readme_shows_the_same():
    fork = next(block for _, block in BLOCKS if "git apply" in block)
    assert 0 < len(added(fork)) <= 6
    shown = (REPO / "README.md").read_text().split("## Fork one")[1].split("```diff")[1].split("```")[0]
    assert added(shown) == added(fork)


def test_the_fork_applies(clone):
    out = run(next(block for _, block in BLOCKS if "git apply" in block), clone)
    assert "Applied patch recipes/mine.py cleanly" in out or "offset" in out
    assert "dual_clip" in (clone / "recipes" / "mine.py").read_text()


@pytest.mark.slow
@pytest.mark.timeout(5400)  # a hang guard: about three minutes on a quiet core
def test_every_command_of_the_tour_runs_and_shows_what_it_says(clone):
    outputs = [run(shortened(block, flags), clone) for flags, block in BLOCKS]
    runs = clone / "runs"
    for name in ("grpo_tokenclip", "spike", "token_clip", "all_clips", "mine", "whole", "killed"):
        assert (runs / name / "final" / "model.safetensors").exists() and (runs / name / "curve.png").exists(), name
    everything = "\n".join(outputs)
    spikes = load_spikes(runs / "spike")
    assert spikes and spikes[0]["cause"] == "A.1" and spikes[0]["certificate"] < 0.05
    assert (runs / "spike" / "index.html").exists()
    assert (
        "token 12 ('[58]') of sequence 5" in everything
        and "omega = pi_theta/mu = 3e+03 (token mismatch)" in everything
    )
    for name in ("token_clip", "mine"):
        assert load_spikes(runs / name) == [], name
    fractions = [r["dual_clip/frac"] for r in read_metrics(runs / "mine" / "metrics.jsonl") if "dual_clip/frac" in r]
    assert len(fractions) == 48 and max(fractions) > 0
    assert everything.count("largest norm") == 4
    assert "resuming from" in outputs[-1] and "the same weights, bit for bit" in outputs[-1]
    assert [r["step"] for r in read_metrics(runs / "killed" / "metrics.jsonl") if "loss" in r] == list(range(1, 31))
