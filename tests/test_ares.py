"""Ares against full SVDs and a plain-loop reference in float64; invariances, state, refusals, two processes."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ares
from ares import Ares, block_power_iteration, effective_rank, spectral_stats

DOUBLE = torch.float64


def matrix(m, n, values, seed=0, dtype=DOUBLE):
    """A random (m, n) matrix with the given singular values."""
    generator = torch.Generator().manual_seed(seed)
    k = len(values)
    u = torch.linalg.qr(torch.randn(m, k, generator=generator, dtype=DOUBLE)).Q
    v = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=DOUBLE)).Q
    return (u @ torch.diag(torch.as_tensor(values, dtype=DOUBLE)) @ v.T).to(dtype)


def falling(k, power=0.7):
    return [(i + 1.0) ** -power for i in range(k)]


# --- singular triplets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (64, 64), (1, 30), (30, 1)])
def test_block_power_iteration_finds_the_leading_triplets(shape):
    grad = matrix(*shape, falling(min(shape), 1.5))
    u, s, v = block_power_iteration(grad, 10, iters=12)
    full = torch.linalg.svd(grad, full_matrices=False)
    k = min(10, *shape)
    assert u.shape == (shape[0], k) and s.shape == (k,) and v.shape == (shape[1], k)
    torch.testing.assert_close(s, full.S[:k], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        u @ u.T, full.U[:, :k] @ full.U[:, :k].T, atol=1e-6, rtol=0
    )  # the subspace, whatever its basis
    torch.testing.assert_close(v @ v.T, full.Vh[:k].T @ full.Vh[:k], atol=1e-6, rtol=0)
    torch.testing.assert_close(u.T @ u, torch.eye(k, dtype=DOUBLE))
    torch.testing.assert_close(grad @ v, u * s, atol=1e-6, rtol=0)


def test_block_power_iteration_is_as_good_as_torchs_own_at_equal_iterations():
    grad = matrix(200, 120, falling(120, 0.5))
    best = torch.linalg.svdvals(grad)[:16].square().sum()
    ours = [block_power_iteration(grad, 16, iters=k)[1].square().sum() / best for k in (0, 1, 2)]
    torch.manual_seed(0)
    theirs = torch.svd_lowrank(grad, q=24, niter=2)[1][:16].square().sum() / best
    assert ours[0] < ours[1] < ours[2] <= 1 + 1e-12
    assert ours[2] > theirs - 0.02 and ours[2] > 0.95


def test_a_warm_start_beats_a_cold_one_and_fresh_columns_find_a_new_direction():
    grad = matrix(200, 120, falling(120, 0.4))
    _, _, basis = block_power_iteration(grad, 16, iters=8)
    best = torch.linalg.svdvals(grad)[:16].square().sum()
    nearby = grad + 0.02 * matrix(200, 120, falling(120, 0.0), seed=1)
    cold, warm = (block_power_iteration(nearby, 16, iters=0, basis=b)[1].square().sum() / best for b in (None, basis))
    assert warm > 0.95 > cold
    spike = matrix(200, 120, [30.0], seed=5)  # orthogonal to nothing the basis holds, and 30 times its largest value
    _, s, v = block_power_iteration(grad + spike, 16, iters=1, basis=basis)
    assert s[0] == pytest.approx(30, rel=0.02)


def test_a_stack_is_its_matrices_and_low_rank_is_exact():
    stack = torch.stack([matrix(30, 20, falling(20), seed=i) for i in range(3)])
    u, s, v = block_power_iteration(stack, 5)
    for i in range(3):
        torch.testing.assert_close(s[i], block_power_iteration(stack[i], 5)[1])
    low = matrix(40, 30, [3.0, 2.0, 1.0])
    u, s, v = block_power_iteration(low, 8, iters=0)
    torch.testing.assert_close(u * s @ v.T, low)
    torch.testing.assert_close(u.T @ u, torch.eye(8, dtype=DOUBLE))
    assert s[3:].max() < 1e-12


def test_wrong_arguments_are_refused_and_large_ranks_cut():
    with pytest.raises(ValueError, match="at least two|two dimensions|give a matrix"):
        block_power_iteration(torch.ones(4), 2)
    with pytest.raises(ValueError, match="rank=0"):
        block_power_iteration(torch.ones(4, 4), 0)
    assert block_power_iteration(torch.randn(6, 4), 9)[0].shape == (6, 4)


def test_random_state_of_torch_is_not_touched():
    before = torch.random.get_rng_state()
    block_power_iteration(torch.ones(9, 9), 2)
    weight = nn.Parameter(torch.ones(9, 9))
    weight.grad = torch.ones(9, 9)
    Ares([weight], rank_max=2).step()
    assert torch.equal(before, torch.random.get_rng_state())


# --- rank and statistics ----------------------------------------------------------------------------------------------


def test_effective_rank_on_known_spectra():
    assert effective_rank(torch.full((7,), 3.0)).item() == pytest.approx(7)
    assert effective_rank(torch.tensor([5.0, 0.0, 0.0])).item() == 1
    assert effective_rank(torch.zeros(4)).item() == 0
    assert effective_rank(torch.tensor([3e-20, 4e-20])).item() == pytest.approx(
        effective_rank(torch.tensor([3.0, 4.0])).item()
    )
    shares = [9 / 25, 16 / 25]
    assert effective_rank(torch.tensor([3.0, 4.0])).item() == pytest.approx(
        math.exp(-sum(p * math.log(p) for p in shares))
    )
    shares = [3 / 7, 4 / 7]
    assert effective_rank(torch.tensor([3.0, 4.0]), power=1).item() == pytest.approx(
        math.exp(-sum(p * math.log(p) for p in shares))
    )
    assert effective_rank(torch.ones(3, 5)).shape == (3,) and effective_rank(torch.ones(5)).dim() == 0


@pytest.mark.parametrize("shape", [(90, 50), (50, 90)])
def test_spectral_stats_against_a_full_svd(shape):
    grad = matrix(*shape, falling(50), dtype=torch.float32)
    energy = torch.linalg.svdvals(grad.double()).square()
    share = energy.cumsum(0) / energy.sum()
    stats = spectral_stats(grad, top=8)
    assert stats["top_share"] == pytest.approx(share[7].item(), rel=1e-6)
    for level in (0.5, 0.7, 0.9):
        assert stats[f"rank@{level}"] == next(k + 1 for k, s in enumerate(share.tolist()) if s >= level)
    assert stats["entropy_rank"] == pytest.approx(effective_rank(energy.sqrt()).item(), rel=1e-6)
    assert spectral_stats(grad, top=1000)["top_share"] == pytest.approx(1)


def test_spectral_stats_of_known_and_zero_matrices():
    flat = spectral_stats(matrix(20, 30, [2.0] * 10), top=5)
    assert flat["top_share"] == pytest.approx(0.5)
    assert (flat["rank@0.5"], flat["rank@0.7"], flat["rank@0.9"]) == (5, 7, 9)
    assert flat["entropy_rank"] == pytest.approx(10, rel=1e-5)
    assert spectral_stats(torch.zeros(4, 5)) == {
        "top_share": 0,
        "rank@0.5": 0,
        "rank@0.7": 0,
        "rank@0.9": 0,
        "entropy_rank": 0,
    }
    with pytest.raises(ValueError, match="not finite"):
        spectral_stats(torch.full((3, 3), math.nan))
    with pytest.raises(ValueError, match="one matrix"):
        spectral_stats(torch.ones(2, 3, 3))


@pytest.mark.parametrize("power", [0.1, 0.5, 1.5])
def test_randomized_statistics_bound_the_exact_ones(power):
    grad = matrix(160, 120, falling(120, power))
    exact, bounds = spectral_stats(grad, top=8), spectral_stats(grad, top=8, exact=False, sketch=40)
    assert bounds["top_share"] <= exact["top_share"] + 1e-12 <= bounds["top_share_upper"] + 2e-12
    for level in ("rank@0.5", "rank@0.7", "rank@0.9"):
        assert bounds[level] >= exact[level]
    assert math.isnan(bounds["entropy_rank"])


# --- the whole step ---------------------------------------------------------------------------------------------------


def reference(weight, grads, step, rank_max, rank_ema, lr, decay, rank_mode="dynamic", betas=(0.9, 0.99), eps=1e-8):
    """Steps 1 to 6 of the module's head with full SVDs, entry by entry where it is short. -> the weight and r after each step."""
    m, n = weight.shape
    first, second, smooth, history = torch.zeros(m, n, dtype=DOUBLE), torch.zeros(m, n, dtype=DOUBLE), None, []
    for t, grad in enumerate(grads, start=1):
        u, s, vh = torch.linalg.svd(grad, full_matrices=False)
        limit = min(rank_max, m, n)
        total = sum(s[j].item() ** 2 for j in range(limit))
        shares = [s[j].item() ** 2 / total for j in range(limit)]
        estimate = math.exp(-sum(p * math.log(p) for p in shares if p > 0))
        smooth = estimate if smooth is None else rank_ema * smooth + (1 - rank_ema) * estimate
        r = limit if rank_mode == "fixed" else max(1, min(limit, round(smooth)))
        direction = torch.zeros(m, n, dtype=DOUBLE)
        for i in range(m):
            for j in range(n):
                g = sum(u[i, k].item() * s[k].item() * vh[k, j].item() for k in range(r))
                first[i, j] = betas[0] * first[i, j] + (1 - betas[0]) * g
                second[i, j] = betas[1] * second[i, j] + (1 - betas[1]) * g * g
                corrected = first[i, j] / (1 - betas[0] ** t), second[i, j] / (1 - betas[1] ** t)
                direction[i, j] = corrected[0] / (math.sqrt(corrected[1]) + eps)
        if step == "projected":
            direction = u[:, :r] @ u[:, :r].T @ direction @ vh[:r].T @ vh[:r]
        weight = weight - lr * (direction + decay * weight)
        history.append((weight, r))
    return history


def drifting(shape, steps):
    """Gradients with gaps between singular values, whose spectrum widens, so that the rank moves over the steps."""
    out = []
    for t in range(steps):
        out.append(matrix(*shape, [2.0 * 0.8 ** (i / (1 + 0.15 * t)) for i in range(min(shape))], seed=7 + t // 4))
    return out


@pytest.mark.parametrize("step", ["literal", "projected"])
@pytest.mark.parametrize("shape", [(7, 12), (12, 7)])
def test_twenty_steps_equal_the_reference(step, shape):
    grads = drifting(shape, 20)
    weight = nn.Parameter(matrix(*shape, falling(7), seed=3))
    options = {"rank_max": 5, "rank_ema": 0.6, "lr": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizer = Ares([weight], step=step, power_iters=60, oversample=2, **options)
    wanted = reference(weight.detach().clone(), grads, step, 5, 0.6, 0.05, 0.1)
    ranks = []
    for grad, (after, r) in zip(grads, wanted, strict=True):
        weight.grad = grad.clone()
        optimizer.step()
        assert torch.equal(weight.grad, grad)
        assert round(optimizer.state[weight]["rank"].item()) == r
        torch.testing.assert_close(weight.detach(), after, rtol=1e-6, atol=1e-7)
        ranks.append(r)
    assert len(set(ranks)) > 1 and 1 < max(ranks) <= 5


@pytest.mark.parametrize("step", ["literal", "projected"])
def test_fixed_rank_equals_the_reference(step):
    grads = drifting((6, 9), 5)
    weight = nn.Parameter(matrix(6, 9, falling(6), seed=3))
    optimizer = Ares([weight], lr=0.05, rank_max=3, step=step, rank_mode="fixed", power_iters=60, betas=(0.9, 0.99))
    wanted = reference(weight.detach().clone(), grads, step, 3, 0.9, 0.05, 0.0, rank_mode="fixed")
    for grad, (after, _) in zip(grads, wanted, strict=True):
        weight.grad = grad.clone()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), after, rtol=1e-6, atol=1e-7)


def run(parameters, grads, **options):
    optimizer = Ares(parameters, **options)
    for step in grads:
        for p, grad in zip(parameters, step, strict=True):
            p.grad = grad.clone()
        optimizer.step()
    return optimizer


def randoms(shapes, steps, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=generator).to(dtype) for s in shapes] for _ in range(steps)]


def parameters(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(9)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def test_without_low_rank_it_is_torchs_adamw_bit_for_bit():
    shapes = [(20, 30), (3, 16, 12), (9,)]
    grads = randoms(shapes, 5)
    ours, theirs = parameters(shapes), parameters(shapes)
    run(ours, grads, lr=0.01, weight_decay=0.1, low_rank=False)
    adamw = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, fused=True)
    for step in grads:
        for p, grad in zip(theirs, step, strict=True):
            p.grad = grad
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_limit_that_cuts_nothing_is_adamw_too():
    shapes = [(12, 20), (20, 12), (2, 9, 7)]
    grads = randoms(shapes, 4)
    whole, cut = parameters(shapes), parameters(shapes)
    run(whole, grads, lr=0.01, low_rank=False)
    run(cut, grads, lr=0.01, rank_max=50, rank_mode="fixed")
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("step", ["literal", "projected"])
def test_stacked_equals_one_by_one_and_an_expert_stack_its_matrices(step, monkeypatch):
    shapes = [(24, 40)] * 3
    grads = randoms(shapes, 4)
    together, apart = parameters(shapes), parameters(shapes)
    experts = nn.Parameter(torch.stack([p.detach().clone() for p in together]))
    options = {"lr": 0.01, "rank_max": 6, "step": step, "weight_decay": 0.1}
    run(together, grads, **options)
    monkeypatch.setattr(ares, "STACK_ELEMENTS", 1)
    run(apart, grads, **options)
    run([experts], [[torch.stack(g)] for g in grads], **options)
    for i, (a, b) in enumerate(zip(together, apart, strict=True)):
        torch.testing.assert_close(a.detach(), b.detach(), atol=2e-5, rtol=0)
        torch.testing.assert_close(a.detach(), experts.detach()[i], atol=2e-5, rtol=0)


@pytest.mark.parametrize("step", ["literal", "projected"])
def test_rank_truncation_of_the_applied_step(step):
    """One step from zero moments: the projected step has rank r, the literal one Adam's sign-like full rank."""
    weight = parameters([(40, 60)])[0]
    before = weight.detach().clone()
    run([weight], randoms([(40, 60)], 1), lr=1.0, rank_max=5, rank_mode="fixed", step=step)
    rank = torch.linalg.matrix_rank(weight.detach() - before, rtol=1e-4).item()
    assert rank == 5 if step == "projected" else rank > 20


def test_smoothing_and_limits_of_the_rank():
    weight = nn.Parameter(torch.zeros(30, 40, dtype=DOUBLE))
    spectra = ([1.0] * 8, [1.0] * 2, [1.0] * 2)
    for ema, wanted in ((0.0, [8, 2, 2]), (0.5, [8, 5, 3.5])):
        optimizer = Ares([weight], rank_max=12, rank_ema=ema)
        for values, rank in zip(spectra, wanted, strict=True):
            weight.grad = matrix(30, 40, values)
            optimizer.step()
            assert optimizer.state[weight]["rank"].item() == pytest.approx(rank, rel=1e-5)
        optimizer.state.clear()
    optimizer = Ares(
        [weight], lr=1e3, rank_max=12, rank_min=4, rank_ema=0.0, eps=1e3, step="projected"
    )  # eps: Adam's step is linear
    before = weight.detach().clone()
    weight.grad = matrix(30, 40, [1.0, 0.01, 0.01, 0.01, 0.01, 0.01])
    optimizer.step()
    assert torch.linalg.matrix_rank(weight.detach() - before, rtol=1e-6).item() == 4


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["literal", "projected"])
def test_a_zero_gradient_moves_nothing_and_teaches_nothing(step):
    weight = parameters([(30, 20)])[0]
    before = weight.detach().clone()
    optimizer = Ares([weight], rank_max=4, oversample=1, step=step)
    weight.grad = torch.zeros(30, 20)
    optimizer.step()
    assert torch.equal(weight, before) and optimizer.state[weight]["rank"].item() == 0
    grad = matrix(30, 20, [1.0] * 4, dtype=torch.float32)
    for wanted in (grad, torch.zeros(30, 20), grad):
        weight.grad = wanted
        optimizer.step()
        assert weight.isfinite().all() and optimizer.state[weight]["rank"].item() == pytest.approx(4, rel=1e-4)
    found = optimizer.state[weight]["basis"]
    torch.testing.assert_close(
        grad @ found @ found.T, grad, atol=1e-4, rtol=0
    )  # found again after a step without a direction


@pytest.mark.parametrize("low_rank", [True, False])
def test_the_gradient_is_taken_as_clipping_left_it(low_rank):
    """A norm that is clipped by another factor each step: the moments must be those of the clipped gradients."""
    shapes = [(24, 40), (9,)]
    grads = [[g * 3.0**t for g in step] for t, step in enumerate(randoms(shapes, 4))]
    clipped, scaled = parameters(shapes), parameters(shapes)
    options = {"rank_max": 6, "lr": 0.01, "low_rank": low_rank}
    by_hand = []
    for step in grads:
        norm = math.sqrt(sum(x * x for g in step for x in g.flatten().tolist()))
        by_hand.append([g * min(1.0, 40.0 / norm) for g in step])
    run(scaled, by_hand, **options)
    optimizer = Ares(clipped, **options)
    for step in grads:
        for p, g in zip(clipped, step, strict=True):
            p.grad = g.clone()
        nn.utils.clip_grad_norm_(clipped, 40.0)
        optimizer.step()
        assert sum(p.grad.square().sum() for p in clipped).sqrt() <= 40.01
    for a, b in zip(clipped, scaled, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), atol=1e-5, rtol=0)
    unclipped = parameters(shapes)
    run(unclipped, grads, **options)
    assert (unclipped[0] - scaled[0]).abs().max() > 1e-3  # the factor matters


@pytest.mark.parametrize("shape", [(160, 120), (120, 160)])
def test_a_warm_sketch_captures_the_energy_of_a_drifting_gradient(shape):
    """At 45 % of the energy in the leading directions and 10 % fresh noise a step, 95 % of what a full SVD would keep."""
    generator = torch.Generator().manual_seed(0)
    fixed = matrix(*shape, falling(120, 0.4), dtype=torch.float32)
    fixed, size = fixed / fixed.norm(), math.sqrt(shape[0] * shape[1])
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = Ares([weight], rank_max=24)
    captured = []
    for _ in range(8):
        weight.grad = math.sqrt(0.9) * fixed + math.sqrt(0.1) * torch.randn(shape, generator=generator) / size
        optimizer.step()
        best = torch.linalg.svdvals(weight.grad)[:24].square().sum()
        kept = (weight.grad @ optimizer.state[weight]["basis"]).square().sum()
        captured.append((kept / best).item())
    assert min(captured[3:]) > 0.95 and max(captured) <= 1 + 1e-5


def test_cost_grows_with_the_rank_and_not_with_the_square_of_the_smaller_side():
    """Multiply-adds of the products of a warm step."""

    def cost(m, n, rank):
        weight = nn.Parameter(torch.zeros(m, n))
        optimizer = Ares([weight], rank_max=rank)
        for step in randoms([(m, n)], 2):
            weight.grad = step[0]
            with FlopCounterMode(display=False) as counter:
                optimizer.step()
        return counter.get_total_flops() / 2

    assert 88 < cost(768, 768, 16) / 768**2 < 1.1 * 88  # 3 products with 24 columns and one with 16
    ranks = [cost(1024, 512, rank) for rank in (8, 24, 56)]  # 16, 32, 64 columns
    assert 1.8 < ranks[1] / ranks[0] < 2.3 and 1.8 < ranks[2] / ranks[1] < 2.3
    assert cost(512, 512, 16) == pytest.approx(cost(256, 1024, 16), rel=0.1)
    assert cost(1024, 512, 16) / cost(512, 256, 16) == pytest.approx(4, rel=0.1)


def test_state_is_adamws_and_one_thin_basis():
    shapes = [(30, 50), (3, 20, 16), (9,)]
    ours, theirs = parameters(shapes), parameters(shapes)
    optimizer, adamw = run(ours, randoms(shapes, 1), rank_max=4), torch.optim.AdamW(theirs)
    for p, g in zip(theirs, randoms(shapes, 1)[0], strict=True):
        p.grad = g
    adamw.step()

    def held(optimizer):
        return sum(x.numel() * x.element_size() for s in optimizer.state.values() for x in s.values())

    assert held(optimizer) - held(adamw) == 4 * (50 * 4 + 1 + 3 * (16 * 4 + 1))


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_scale_of_the_gradient_does_not_matter(scale):
    shapes = [(24, 40)]
    grads = randoms(shapes, 3)
    one, other = parameters(shapes), parameters(shapes)
    run(one, grads, rank_max=6, eps=0.0)
    run(other, [[g * scale for g in step] for step in grads], rank_max=6, eps=0.0)
    torch.testing.assert_close(one[0].detach(), other[0].detach(), atol=1e-4, rtol=0)


def test_rank_deficient_gradients_are_handled_without_a_fallback():
    weight = parameters([(64, 48)])[0]
    optimizer = Ares([weight], rank_max=16, step="projected")
    for t in range(4):
        weight.grad = matrix(64, 48, [3.0, 1.0, 0.5], seed=t, dtype=torch.float32)
        optimizer.step()
        assert weight.isfinite().all()
    assert optimizer.fallbacks == 0
    assert optimizer.state[weight]["rank"].item() < 3


def test_fallback_when_cholesky_fails(monkeypatch):
    shapes, grads = [(40, 30), (40, 30)], randoms([(40, 30), (40, 30)], 3)
    plain, broken = parameters(shapes), parameters(shapes)
    run(plain, grads, rank_max=5)
    factor = torch.linalg.cholesky_ex

    def fails(x):
        lower, info = factor(x)
        return torch.full_like(lower, math.nan), torch.ones_like(info)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails)
    optimizer = run(broken, grads, rank_max=5)
    assert optimizer.fallbacks == 3
    for a, b in zip(plain, broken, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e5])
def test_cholesky_factors_make_columns_orthonormal_and_keep_their_span(condition):
    x = matrix(300, 12, [condition ** (-i / 11) for i in range(12)], dtype=torch.float32)
    q = x
    for loose in (True, False):
        (factor,), (status,) = ares._cholesky_factors([q.mT @ q], loose)
        assert not status.any()
        q = q @ factor
    torch.testing.assert_close(q @ (q.T @ x), x, atol=1e-5, rtol=0)
    torch.testing.assert_close(q.T @ q, torch.eye(12), atol=3e-4, rtol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_that_is_not_finite_is_refused_by_name_and_changes_nothing(value, place):
    model = nn.ParameterDict(
        {"a": parameters([(30, 20)])[0], "b": parameters([(5,)])[0], "c": parameters([(30, 20)])[0]}
    )
    optimizer = Ares(list(model.named_parameters()), rank_max=4)
    for p in model.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    name = "abc"[place]
    model[name].grad.view(-1)[3] = value
    with pytest.raises(RuntimeError, match=f"parameter {name} is not finite; nothing was changed"):
        optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    same(state, optimizer.state_dict())
    optimizer.nonfinite = "skip"
    optimizer.step()
    assert optimizer.skipped == 1 and all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    model[name].grad = torch.ones_like(model[name])
    optimizer.step()
    assert optimizer.skipped == 1 and not torch.equal(before[name], model[name])


def same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    else:
        assert a == b


def test_half_precision_weights_move_by_less_than_their_spacing():
    grads = randoms([(30, 40)], 40)
    full, half = parameters([(30, 40)]), parameters([(30, 40)], torch.bfloat16)
    with torch.no_grad():
        full[0].copy_(half[0])
    start = half[0].detach().clone()
    run(full, [[g.bfloat16().float() for g in step] for step in grads], rank_max=5, lr=1e-5)
    optimizer = run(half, [[g.bfloat16() for g in step] for step in grads], rank_max=5, lr=1e-5)
    state = optimizer.state[half[0]]
    assert all(state[k].dtype == torch.float32 for k in ("exp_avg", "exp_avg_sq", "basis", "master"))
    torch.testing.assert_close(state["master"], full[0].detach(), atol=1e-7, rtol=0)
    assert torch.equal(half[0], full[0].bfloat16())
    assert (half[0] != start).float().mean() < 0.2  # most weights look unchanged, and none has lost its steps
    with torch.no_grad():
        half[0].fill_(1.0)  # loaded from elsewhere: the master follows
    half[0].grad = torch.zeros_like(half[0])
    optimizer.step()
    assert (half[0].float() - 1).abs().max() < 0.01


@pytest.mark.parametrize("step", ["literal", "projected"])
def test_how_weights_and_gradients_lie_in_memory_does_not_matter(step):
    """Torch's fused AdamW reads memory in its own order: transposed and strided tensors would get each other's updates."""

    def trained(lay):
        weight, generator = (
            torch.randn(20, 12, generator=torch.Generator().manual_seed(0)),
            torch.Generator().manual_seed(1),
        )
        stack, table = torch.stack([weight, -weight]), weight[:, :5]
        shapes = [lay(x, True) for x in (weight, stack, table)]
        ps = [nn.Parameter(x) for x in shapes]
        optimizer = Ares([{"params": ps[:2]}, {"params": ps[2:], "spectral": False}], lr=1e-2, rank_max=4, step=step)
        for _ in range(3):
            for p in ps:
                p.grad = lay(torch.randn(p.shape, generator=generator), False)
            optimizer.step()
        return [p.detach() for p in ps]

    def turned(x):
        return x.mT.contiguous().mT

    def gaps(x):
        return torch.cat([x, x], -1)[..., : x.shape[-1]]

    plain = trained(lambda x, weight: x.contiguous())
    for other in (
        lambda x, weight: turned(x),
        lambda x, weight: turned(x) if weight else x.contiguous(),
        lambda x, weight: x.contiguous() if weight else turned(x),
        lambda x, weight: gaps(x),
    ):
        for a, b in zip(trained(other), plain, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_closure_zero_grad_schedulers_and_missing_gradients():
    weight, idle = parameters([(30, 20), (30, 20)])
    optimizer = Ares([weight, idle], lr=0.1, rank_max=4)
    before = idle.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    first = optimizer.step(closure)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.step(closure) < first
    assert torch.equal(idle, before) and idle not in optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", ["literal", "projected"])
def test_resume_goes_on_bit_for_bit(tmp_path, dtype, step):
    shapes = [(30, 20), (2, 16, 24), (7,)]
    grads = randoms(shapes, 6, dtype=dtype)
    whole = parameters(shapes, dtype)
    run(whole, grads, rank_max=4, lr=0.01, step=step)
    first = parameters(shapes, dtype)
    optimizer = run(first, grads[:3], rank_max=4, lr=0.01, step=step)
    torch.save({"weights": [p.detach() for p in first], "state": optimizer.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    rest = parameters(shapes, dtype)
    for p, value in zip(rest, saved["weights"], strict=True):
        p.data.copy_(value)
    resumed = Ares(rest, rank_max=4, lr=0.01, step=step)
    resumed.load_state_dict(saved["state"])
    same(saved["state"], resumed.state_dict())
    for grad in grads[3:]:
        for p, g in zip(rest, grad, strict=True):
            p.grad = g.clone()
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, rest, strict=True))


def test_options_out_of_range_are_refused():
    weight = parameters([(3, 3)])
    for option in (
        {"lr": -1}, {"rank_max": 0}, {"rank_min": 0}, {"rank_min": 9, "rank_max": 8}, {"rank_ema": 1.0},
        {"power_iters": -1}, {"oversample": 0}, {"betas": (0.9, 1.0)}, {"eps": -1}, {"weight_decay": -1},
        {"step": "other"}, {"rank_mode": "other"}, {"nonfinite": "other"}, {"energy_power": 3},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"Ares {next(iter(option))}="):
            Ares(weight, **option)
    with pytest.raises(ValueError, match="Ares rank_ema=2"):
        Ares([{"params": weight, "rank_ema": 2}])
    weight[0].grad = torch.eye(3).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        Ares(weight).step()


# --- parameter groups -------------------------------------------------------------------------------------------------


def tiny_model():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False, mlp_only_layers=[],
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def test_param_groups_sort_a_mixture_of_experts():
    groups = Ares.param_groups(tiny_model(), lr=0.1, weight_decay=0.2, rank_max=8)
    spectral, plain, bare = ({name for name, _ in g["params"]} for g in groups)
    assert [g["spectral"] for g in groups] == [True, False, False] and [g["weight_decay"] for g in groups] == [
        0.2,
        0.2,
        0.0,
    ]
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"} <= spectral
    assert plain == {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"}
    assert all("norm" in name for name in bare)
    optimizer = Ares(groups)
    assert optimizer.param_groups[0]["rank_max"] == 8 and optimizer.param_groups[1]["lr"] == 0.1


def test_param_groups_and_adapters():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    with pytest.raises(ValueError, match="with LoRA: below half of the adapters' rank"):
        Ares.param_groups(model, rank_max=8)
    groups = Ares.param_groups(model, rank_max=4)
    assert len(groups) == 1 and all("lora_" in name for name, _ in groups[0]["params"])


def test_low_rank_regression_is_solved_better_than_by_adamw_at_the_learning_rate_of_each():
    """A noisy regression on a rank-4 target: the projected step takes a larger learning rate and ends lower."""

    def error(make, lr):
        generator = torch.Generator().manual_seed(0)
        target = torch.randn(64, 4, generator=generator) @ torch.randn(4, 96, generator=generator) / 2
        weight = nn.Parameter(torch.zeros(64, 96))
        optimizer = make([weight], lr)
        for _ in range(400):
            x = torch.randn(96, 32, generator=generator)
            noise = 6.0 * torch.randn(64, 32, generator=generator)
            weight.grad = ((weight.detach() - target) @ x + noise) @ x.T / 32
            optimizer.step()
        return ((weight.detach() - target).norm() / target.norm()).item()

    best = min(
        error(lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.0, fused=True), lr) for lr in (1e-2, 3e-2, 1e-1)
    )
    assert error(lambda p, lr: Ares(p, lr, rank_max=16, step="projected"), 1e-1) < 0.85 * best


def test_metrics_name_the_ranks():
    optimizer = run(parameters([(30, 20), (5,)]), randoms([(30, 20), (5,)], 2), rank_max=4)
    metrics = optimizer.metrics()
    assert (
        metrics["ares/rank/min"]
        == metrics["ares/rank/max"]
        == optimizer.state[optimizer.param_groups[0]["params"][0]]["rank"].item()
    )
    assert 1 < metrics["ares/rank/mean"] <= 4 and metrics["ares/skipped"] == 0


@pytest.mark.slow
def test_two_processes_with_sharded_parameters_equal_one():
    """Also uneven shards, a rank without any, a NaN on one rank, Cholesky failing, a sharding that is refused."""
    script = Path(__file__).with_name("ares_on_two.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0 and "equal" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]
