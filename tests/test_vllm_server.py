"""The vLLM engine against a real server on the CPU: `pytest -m vllm -n 0`, with SERVER_PYTHON naming the environment's python
(made from requirements-vllm.txt)."""

import os
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import torch
from real_vllm import START_S, RealServer
from test_minirl import load, logged

from training import MODEL, largest_difference, make_async, weights
from vllm_engine import VLLMEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "results" / "async"))
import faults  # noqa: E402
import vllm_runs  # noqa: E402

PYTHON = os.environ.get("SERVER_PYTHON")
OPTIONS = ("--dtype", "float32", "--max-model-len", "256")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="SERVER_PYTHON does not name the python of a vLLM environment"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = RealServer(PYTHON, MODEL, tmp_path_factory.mktemp("server") / "log", *OPTIONS)
    try:
        yield running.wait()
    finally:
        running.kill()


def own_logps(model, rollout, i):
    prompt, ids = rollout.prompt_ids[i], rollout.completion_ids[i]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1).tolist()


def test_samples_and_pushes_of_a_real_server(server, tmp_path):
    model = load(MODEL)
    with closing(VLLMEngine(model, server.url, model.config.eos_token_id, tmp_path)) as engine:
        prompts = [[11, 12, 13]] * 4 + [[40, 41, 42, 43]] * 4
        for version in (0, 1, 2):
            if version:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.05)
                engine.push_weights(model, version)
            rollout = engine.generate(prompts, 24, temperature=1.0)
            assert rollout.version == [version] * 8
            for i in range(8):
                assert rollout.rollout_logps[i] == pytest.approx(own_logps(model, rollout, i), abs=1e-3)
        assert len({tuple(ids) for ids in rollout.completion_ids[:4]}) > 1
        assert engine.retries == engine.restarts == 0
        engine.generate(prompts, 4, top_k=5, top_p=0.9)
        told = {
            "version": 2,
            "rollout_dtype": "float32",
            "max_model_len": 256,
            "top_k": 5,
            "top_p": 0.9,
            "temperature": 1.0,
        }
        assert told.items() <= engine.describe().items() and engine.describe()["vllm"]


def test_a_server_that_a_killed_run_left_paused_is_taken_over(server, tmp_path):
    httpx.post(f"{server.url}/pause?mode=wait", trust_env=False).raise_for_status()
    assert httpx.get(f"{server.url}/is_paused", trust_env=False).json() == {"is_paused": True}
    model = load(MODEL)
    with closing(VLLMEngine(model, server.url, model.config.eos_token_id, tmp_path, timeout_s=60.0)) as engine:
        assert engine.generate([[11, 12, 13]], 8).version == [0]


def test_a_run_survives_the_death_of_its_server(server, tmp_path):
    changes = {"max_staleness": 1, "max_steps": 20, "engine": "vllm", "max_completion_length": 24}
    address = {"vllm_server_base_url": server.url, "vllm_restart_s": float(START_S)}

    class Drill:
        """Kills the server during the tenth generation and starts it again."""

        def __init__(self, engine):
            self.engine, self.generate, self.calls = engine, engine.generate, 0

        def __call__(self, *args, **kwargs):
            self.calls += 1
            if self.calls == 10:
                server.kill()
                server.start()
            return self.generate(*args, **kwargs)

    with closing(make_async(tmp_path, MODEL, **changes, **address)) as trainer:
        start = weights(trainer)
        inner = trainer.engine.engine
        inner.generate = Drill(inner)
        trainer.train()
        assert inner.restarts == 1
    records = logged(trainer)
    assert len(records) == 20 and largest_difference(start, weights(trainer)) > 1e-3
    assert [r["async/staleness/max"] for r in records] == [0] + [1] * 19
    fresh = [r["mismatch/k3"] for r in records[:1]]
    assert max(fresh) < 1e-6  # the same numbers in float32, when the weights are the same


def test_without_the_plugin_the_push_is_caught(tmp_path):
    """The measured case: the reload reports success, and the packed linear layers keep their old values."""
    running = RealServer(PYTHON, MODEL, tmp_path / "log", *OPTIONS, plugin=False)
    try:
        model = load(MODEL)
        with pytest.raises(RuntimeError, match="weights canary were pushed .* it reports success, but"):
            VLLMEngine(model, running.wait().url, model.config.eos_token_id, tmp_path)
    finally:
        running.kill()


def test_the_evidence_scripts_account_for_every_group(server, tmp_path):
    """results/async/ in short: a run that is measured, and one that loses half of its answers on the way back."""
    options = f"{vllm_runs.RECIPES['synchronous']} {vllm_runs.COMMON} {vllm_runs.TINY} --max_steps 3"
    measured = vllm_runs.measure("tiny", "float32", "synchronous", options, server, tmp_path / "run", {})["figures"]
    assert measured["groups"] == {"asked": 24, "trained": 24, "stale": 0, "open": 0, "twice": 0}
    assert measured["updates"] == 3 and measured["pushes"] == 2 and measured["mismatch"]["k3"][1] < 1e-6
    what, *drilled = faults.DRILLS["half"]
    cells = faults.row(what, faults.drill(server, tmp_path / "half", *drilled), tmp_path / "half")
    assert int(cells[2]) > 5 and cells[4] == "28 = 24 + 0 + 4" and cells[5] == "0" and "LOST" not in cells[4], cells
