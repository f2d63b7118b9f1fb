"""Break a run on purpose and write down what the guard saw, when, and what it restored: results/dsv32/drills.md.

    python results/dsv32/drills.py

The drills are those of tests/guard_drills.py, here on runs long enough for the guard's own thresholds, which have been set for no drill.
"""

import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "recipes"), str(REPO / "tests")]

from guard_drills import (  # noqa: E402
    corrupt_checkpoint,
    full_disk,
    killed_while_writing,
    stale_weights,
    wrong_step,
)

# the guard's own rules need 16 steps of history; groups of this reward are often equal, which is no fault
LONG = {
    "guard_bounds": ["guard/effective_batch<-1:warn:10"], "guard_k": 3, "max_steps": 28, "per_device_train_batch_size": 16,
    "steps_per_generation": 1, "learning_rate": 1e-4,
}  # fmt: skip
AT = 21
DRILLS = {
    "NaN gradient: the loss of step 21 is NaN": lambda folder: wrong_step("nan", folder, AT, **LONG),
    "spike: the loss of step 21 times 10,000": lambda folder: wrong_step("spike", folder, AT, **LONG),
    "reward collapse: all rewards are 0 from step 21 to 24": lambda folder: wrong_step(
        "reward", folder, range(AT, AT + 4), **LONG
    ),
    "entropy collapse: reads 0 at step 21": lambda folder: wrong_step("entropy", folder, AT, **LONG),
    "stale weights: pushes are lost from step 21 on": lambda folder: stale_weights(folder, AT, **LONG),
    "process killed (SIGKILL) while it writes checkpoint-20": lambda folder: killed_while_writing(folder, 20, **LONG),
    "disk full while checkpoint-20 is written (model.safetensors), then NaN at step 21": lambda folder: full_disk(
        folder, AT, **LONG
    ),
    "disk full while checkpoint-20 is written (optimizer.pt), then NaN at step 21": lambda folder: full_disk(
        folder, AT, size=2_000_000, **LONG
    ),
    "last good checkpoint corrupt, then NaN at step 21": lambda folder: corrupt_checkpoint(folder, AT, **LONG),
}
HEAD = (
    "fault", "seen as", "after steps", "restored", "made without an update", "equals a clean run from that checkpoint",
)  # fmt: skip
WORDS = """# Guard drills

Made by `python results/dsv32/drills.py` on the tiny Qwen3: 16 completions a step, fp8 rollouts, a checkpoint every 2 steps,
`--guard rollback --guard_k 3`, the guard's own thresholds but that of the effective batch (this reward often gives equal groups).
After steps: 1 = before the faulty step was over; of the killed process, at the resume. The clean run starts
from the restored checkpoint without a guard, meets the same fault and leaves the same updates out; equal: weights, optimizer state
and learning rate, every bit. The drills are those of `tests/guard_drills.py`: `tests/test_stability.py` checks each on a shorter run,
`tests/guard_on_two.py` on two processes of which one alone breaks.

"""


def run(fault):
    """One drill -> its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        found = DRILLS[fault](Path(folder))
        seen = found.seen.split(": training goes on")[0].replace(f"{folder}/guarded/", "")
    skipped = ", ".join(map(str, found.skipped)) or "-"
    same = "bit for bit" if found.equal else "**no**"
    return [fault, seen, str(found.after), f"checkpoint-{found.to}", skipped, same]


def write(rows):
    table = ["| " + " | ".join(cells) + " |" for cells in (HEAD, *rows)]
    table.insert(1, "|" + "---|" * len(HEAD))
    (REPO / "results" / "dsv32" / "drills.md").write_text(WORDS + "\n".join(table) + "\n")


def main():
    rows = []
    for fault in DRILLS:
        rows.append(run(fault))
        print(" | ".join(rows[-1]), flush=True)
    write(rows)
    sys.exit(0 if all(cells[-1] == "bit for bit" for cells in rows) else 1)


if __name__ == "__main__":
    main()
