"""Break a run on purpose and write down what the guard saw, when, and what it restored: results/dsv32/drills.md.

    python results/dsv32/drills.py

The faults are those of tests/test_stability.py, which also holds the drills on a killed process, a full disk, a corrupt checkpoint
and stale weights.
"""

import json
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "recipes"), str(REPO / "tests")]

from test_stability import DRILL, QUIET, DropUpdate, events, faulty  # noqa: E402

import stability  # noqa: E402
from training import equal, weights  # noqa: E402

FAULTS = {
    "nan": "loss is NaN", "spike": "loss times 10,000", "entropy": "entropy reads 0", "reward": "all rewards are 0",
}  # fmt: skip


def main():
    at, rows = 5, []
    for fault, words in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            guarded = faulty(folder / "guarded", fault, at, **DRILL)
            stability.train(guarded)
            clean = faulty(folder / "clean", fault, at, **QUIET)
            clean.add_callback(DropUpdate(clean, {at}))
            clean.train()
            alarm = events(folder / "guarded", "alarm")[0]
            (back,) = json.loads((folder / "guarded" / "guard.json").read_text())["rollbacks"]
            same = equal(weights(guarded), weights(clean))
            same = same and equal(guarded.optimizer.state_dict(), clean.optimizer.state_dict())
            rows.append(
                f"| {words} at step {at} | {alarm['metric']} | {alarm['step'] - at} | checkpoint-{back['to']} | "
                f"step {at} made without an update | {'bit for bit' if same else 'NO'} |"
            )
    head = [
        "| fault | seen in | updates made before | restored | then | equals the run that left the batch out |",
        "|---|---|---|---|---|---|",
    ]
    (REPO / "results" / "dsv32" / "drills.md").write_text(
        "# Guard drills\n\nMade by `python results/dsv32/drills.py`; the others are tests (`pytest tests/test_stability.py -k drill`).\n\n"
        + "\n".join(head + rows) + "\n"
    )  # fmt: skip
    print("\n".join(head + rows))


if __name__ == "__main__":
    main()
