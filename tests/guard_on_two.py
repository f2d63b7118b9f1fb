"""The guard, and the floor of eq. 9, on two processes: `torchrun --nproc_per_node 2 tests/guard_on_two.py ddp|fsdp2 FOLDER [drill ...]`.

A fault happens on rank 1 alone. Both ranks must see it, go back to the same checkpoint and end with the weights of a clean run that
left the batch out. Prints "DRILL agrees" on rank 0 for each drill.
"""

import errno
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "recipes"), str(REPO / "tests")]

from fsdp2_on_cpu import init_with_fsdp  # noqa: E402
from test_distributed import FSDP2  # noqa: E402
from test_dsv32 import FLOOR, make_dsv32, step_values  # noqa: E402

import stability  # noqa: E402
from guard_drills import DRILL, QUIET, DropUpdate, events, faulty  # noqa: E402
from rlvr_launch import leave  # noqa: E402
from stability import GuardHalt, faults, on_disk, step_of  # noqa: E402
from training import equal, make_ours  # noqa: E402

AT = 5  # the faulty step
HALF = {"per_device_train_batch_size": 4}  # the batch of one process's drills


def everyone(value):
    """[value of rank 0, value of rank 1] on both."""
    box = [None, None]
    dist.all_gather_object(box, value)
    return box


def whole(trainer):
    """The weights, gathered where they are sharded."""
    full = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters())
    return [p.detach().clone() for p in full]


def clean_run(folder, fault, options, at=AT):
    """The same faulty run without a guard, the faulty step's gradient left out."""
    clean = faulty(folder, fault, at, **QUIET | options)
    clean.add_callback(DropUpdate(clean, {at}))
    clean.train()
    return clean


def check_rollback(folder, guarded, clean, at=AT):
    """Both ranks went back to one checkpoint, and all weights are those of the clean run."""
    first, second = everyone(json.loads((folder / "guard.json").read_text()) | {"memory": guarded.guard.ledger})
    assert first == second and len(first["memory"]["rollbacks"]) == 1
    assert first["memory"]["rollbacks"][0]["skip"] == [at, at], first
    assert guarded.state.global_step == clean.state.global_step == 6
    assert equal(whole(guarded), whole(clean))
    assert equal(*everyone(whole(guarded)))
    watch = guarded.guard.watch.state_dict()
    assert everyone(json.dumps(watch))[0] == json.dumps(watch)
    return first["memory"]["rollbacks"][0]["to"]


def rollback(fault, at=AT):
    """A fault that only rank 1 computes; it reaches rank 0 through the gradient. At step 2 only the start is left to go back to."""

    def drill(folder, options):
        mine = fault if dist.get_rank() == 1 else None
        guarded = faulty(folder / "guarded", mine, at, **DRILL | options)
        stability.train(guarded)
        to = check_rollback(folder / "guarded", guarded, clean_run(folder / "clean", mine, options, at), at)
        assert to == (2 if at == AT else 0)
        (alarm,) = events(folder / "guarded", "alarm")
        assert (alarm["step"], alarm["metric"], alarm["level"]) == (at, "grad_norm", "critical")

    return drill


def stale(folder, options):
    """Rank 1's engine keeps old weights, which no reduced metric shows."""
    trainer = make_ours(folder, **DRILL | options | {"guard": "halt", "steps_per_generation": 1, "max_steps": 8})
    push = trainer.engine.push_weights

    def lost(model, version):
        fingerprint = trainer.engine.fingerprint
        push(model, version)
        if version >= 3 and dist.get_rank() == 1:
            trainer.engine.fingerprint = fingerprint

    trainer.engine.push_weights = lost
    try:
        stability.train(trainer)
    except GuardHalt as halt:
        assert "guard/stale" in str(halt)
    else:
        raise AssertionError(f"rank {dist.get_rank()} was not stopped")
    assert everyone(trainer.state.global_step) == [5, 5]


def full_disk(folder, options):
    """Rank 1 cannot write its part of checkpoint-4: nobody uses it, and the NaN on rank 1 is rolled back past it."""
    real = torch.save

    def full(state, path, *args, **kwargs):
        if "guarded/checkpoint-4/rollout_state_1" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(state, path, *args, **kwargs)

    torch.save = full
    mine = "nan" if dist.get_rank() == 1 else None
    guarded = faulty(folder / "guarded", mine, AT, **DRILL | options)
    stability.train(guarded)
    torch.save = real
    assert check_rollback(folder / "guarded", guarded, clean_run(folder / "clean", mine, options)) == 2
    assert [step_of(p) for p in on_disk(folder / "guarded")] == [0, 2, 6]
    assert all(faults(p) == [] for p in on_disk(folder / "guarded"))


def floor(folder, options):
    """min_keep_ratio over processes: values for the test, which compares them with one process's."""
    trainer = make_dsv32(folder / "floor", **FLOOR | options | {"per_device_train_batch_size": 8})
    trainer.train()
    assert equal(*everyone(whole(trainer)))
    if dist.get_rank() == 0:
        torch.save(step_values(trainer), folder / "floor.pt")


DRILLS = {
    "nan": rollback("nan"), "start": rollback("nan", 2), "spike": rollback("spike"), "stale": stale, "full_disk": full_disk,
    "floor": floor,
}  # fmt: skip


def main(kind, folder, *names):
    PartialState()  # starts gloo
    options = dict(HALF)
    if kind == "fsdp2":
        AcceleratorState.__init__ = init_with_fsdp
        options |= {"fsdp": "full_shard", "fsdp_config": json.loads(FSDP2[1].partition("=")[2])}
    options["expect_distributed"] = kind
    for name in names or DRILLS:
        place = Path(folder) / name
        DRILLS[name](place, options)
        if dist.get_rank() == 0:
            print(name, "agrees", flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:  # ends the other rank too, which may wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    leave()
