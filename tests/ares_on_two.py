"""Ares on sharded parameters against Ares on one process: `torchrun --nproc_per_node 2 tests/ares_on_two.py`. Prints "equal" on rank 0.

Parameters as FSDP2 makes them: DTensor, split along the first dimension, also unevenly and with a rank that has nothing.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from ares import Ares  # noqa: E402

SHAPES = [(24, 40), (41, 32), (24, 40), (3, 20, 28), (1, 18, 16), (7,), (1,)]
STEPS = 5


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(s, generator=generator) for s in SHAPES]


def start():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator) for s in SHAPES]


def train(parameters, share, **options):
    optimizer = Ares(parameters, lr=0.01, rank_max=6, weight_decay=0.1, **options)
    for step in range(STEPS):
        for p, grad in zip(parameters, gradients(step), strict=True):
            p.grad = share(grad)
        optimizer.step()
    return optimizer


def compare(mesh, **options):
    def share(x):
        return distribute_tensor(x, mesh, [Shard(0)])

    split = [nn.Parameter(share(x)) for x in start()]
    whole = [nn.Parameter(x) for x in start()]
    sharded, single = train(split, share, **options), train(whole, lambda x: x, **options)
    for p, q, shape in zip(split, whole, SHAPES, strict=True):
        torch.testing.assert_close(
            p.full_tensor().detach(), q.detach(), atol=2e-5, rtol=0, msg=lambda m, s=shape: f"{s} {options}: {m}"
        )
        for name in ("exp_avg", "exp_avg_sq", "rank"):
            if name in single.state[q]:
                ours = sharded.state[p][name]
                ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
                torch.testing.assert_close(ours, single.state[q][name], atol=2e-4, rtol=1e-4)
        if len(shape) == 2 and "basis" in sharded.state[p]:  # the basis is whole on every rank, the moments are not
            assert sharded.state[p]["basis"].shape == (shape[1], 6)
            assert sharded.state[p]["exp_avg"].to_local().shape[0] < shape[0]
    return sharded, split, share


def refused(optimizer, split, share):
    """A value that is broken on one rank alone stops all, and nothing has moved."""
    before = [p.full_tensor().detach().clone() for p in split]
    for place in (0, 3, 5):
        for p, grad in zip(split, gradients(9), strict=True):
            if p is split[place]:
                grad.view(-1)[0] = float("nan")
            p.grad = share(grad)
        try:
            optimizer.step()
        except RuntimeError as error:
            assert "is not finite; nothing was changed" in str(error)
        else:
            raise AssertionError(f"parameter {place} with NaN on rank 0 was not refused on rank {dist.get_rank()}")
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, split, strict=True))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for options in ({}, {"step": "projected"}, {"rank_mode": "fixed"}, {"low_rank": False}):
        compare(mesh, **options)
    refused(*compare(mesh))
    factor = torch.linalg.cholesky_ex
    torch.linalg.cholesky_ex = lambda x: (
        torch.full_like(x, float("nan")),
        torch.ones(x.shape[:-2], dtype=torch.int32),
    )
    optimizer, _, _ = compare(mesh, step="projected")
    assert optimizer.fallbacks > 0
    torch.linalg.cholesky_ex = factor
    column = nn.Parameter(distribute_tensor(torch.randn(8, 12), mesh, [Shard(1)]))
    column.grad = column.detach().clone()
    try:
        Ares([column]).step()
    except ValueError as error:
        assert "only a split along the first dimension" in str(error)
    else:
        raise AssertionError("a split along the second dimension was not refused")
    if dist.get_rank() == 0:
        print("equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
