"""The bookkeeping and the faults of results/async/: what finds nothing wrong there must be able to."""

import sys
from contextlib import closing
from pathlib import Path

import pytest
from mock_vllm import MockVLLM
from test_minirl import load

import vllm_engine
from training import MODEL
from vllm_engine import VLLMEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "results" / "async"))
import faults  # noqa: E402
from audit import account  # noqa: E402


def audit(sampled, trained, asked, **more):
    return {
        "group": 2, "sampled": sampled, "trained": [(1, text) for text in trained], "asked": asked, "stale": 0, "open": 0
    } | more  # fmt: skip


TWO = [(0, "a"), (1, "b"), (2, "c"), (3, "c")]  # two groups; two samples of the second are equal


@pytest.mark.parametrize(
    ("audits", "trained", "left", "twice"),
    [
        ([audit(TWO, "abcc", 2)], 2, 0, 0),
        ([audit(TWO, "abccc", 2)], 2, 0, 1),  # a copy too many of one that was sampled twice
        ([audit(TWO, "aabcc", 2)], 2, 0, 1),
        ([audit(TWO, "ab", 2, open=1)], 1, 1, 0),
        ([audit(TWO, "ab", 2)], 1, 0, 0),  # asked = trained + left misses one: lost
        ([audit(TWO, "abz", 2)], 1, 0, 1),  # nobody sampled it
        (
            [audit(TWO, "ab", 2, open=1), audit([], "cc", 2)],
            2,
            0,
            0,
        ),  # resumed: its buffer came from the checkpoint
        ([audit(TWO, "ab", 2, open=1), audit([], "abcc", 2)], 2, 0, 2),  # resumed, and trained again
        (
            [audit(TWO[:2], "", 1, open=1), audit([(0, "x"), (1, "b")], "xb", 1)],
            1,
            0,
            0,
        ),  # sampled again, other text
        ([audit(TWO[:2], "ab", 1), audit([(0, "x"), (1, "b")], "x", 1)], 1, 0, 1),  # both texts of a stream trained
    ],
)
def test_account(audits, trained, left, twice):
    found = account(*audits)
    assert (found["trained"], found["open"], found["twice"]) == (trained, left, twice)


@pytest.mark.slow
def test_what_a_proxy_falsifies_or_loses_is_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine, "FIRST_PAUSE_S", 0.01)
    prompts = [[i, i + 1] for i in range(10, 28) for _ in range(2)]
    results = []
    with MockVLLM(MODEL) as server:
        for rule in (lambda: lambda path: None, faults.some_garbage, lambda: faults.half_lost(False)):
            with faults.Proxy(server.port, rule) as proxy:
                proxy.run()
                model = load(MODEL)
                with closing(VLLMEngine(model, proxy.url, 381, tmp_path, attempts=20, concurrency=1)) as engine:
                    results.append(engine.generate(prompts, 4, sequence_ids=range(len(prompts))))
                    assert (engine.retries > 5) == (len(results) > 1) and engine.restarts == 0
        assert not server.errors
    assert results[0] == results[1] == results[2]
