"""Advantages, weights, clips and losses against plain Python floats, and the properties that any loop would break.

The references below are written from the papers' formulas and share no code with rlvr_common: lists, loops, `math`.
"""

import math
import random
import statistics
from types import SimpleNamespace

import pytest
import torch

from grpo_tokenclip import GRPOTokenClipTrainer
from rlvr_common import (
    AGGREGATIONS,
    RLVRTrainer,
    aggregate,
    group_advantages,
    keep_least_divergent,
    masked_mean,
    minirl_loss,
    off_policy_sequence_mask,
    ppo_clip_loss,
    seq_clip,
    sequence_divergence,
    sequence_weight,
    support_logps,
    token_clip,
    unbiased_kl,
)

SEEDS = range(8)
GARBAGE = (math.nan, math.inf, -math.inf, 1e4, -1e4)
LENGTHS = (0, 1, 4, 4, 7, 9)  # an empty sequence, a single token, two equal ones, a full row


def exact(a, b):
    """Same shape, same numbers to float64 rounding."""
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def batch(seed, spread=0.6, lengths=LENGTHS, width=9):
    """logps, old_logps, rollout_logps, ref_logps (N, T), advantages (N, 1) of both signs, mask (N, T); float64."""
    g = torch.Generator().manual_seed(seed)
    n = len(lengths)
    base = -3 * torch.rand(n, width, generator=g, dtype=torch.float64)
    noise = [spread * torch.randn(n, width, generator=g, dtype=torch.float64) for _ in range(4)]
    logps, old, rollout, ref = (base + x for x in noise)
    advantages = torch.randn(n, 1, generator=g, dtype=torch.float64)
    mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).double()
    return SimpleNamespace(logps=logps, old=old, rollout=rollout, ref=ref, advantages=advantages, mask=mask)


def each(function, *tensors):
    """Apply a function of floats at every (i, t); (N, 1) inputs are read at column 0."""
    n, width = tensors[0].shape
    lists = [x.tolist() for x in tensors]
    rows = [[function(*(x[i][t if len(x[i]) > 1 else 0] for x in lists)) for t in range(width)] for i in range(n)]
    return torch.tensor(rows, dtype=torch.float64)


def gradient(loss, *leaves):
    return torch.autograd.grad(loss, leaves, retain_graph=True)


def leaf(x):
    return x.clone().requires_grad_()


# --- group_advantages ------------------------------------------------------------------------------------------------


def advantages_by_hand(rewards, size, scale):
    """GRPO's advantages from lists; NaN = unscorable."""
    scored = [r for r in rewards if not math.isnan(r)]
    over_batch = statistics.stdev(scored) if len(scored) > 1 else 0.0
    result = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        valid = [r for r in group if not math.isnan(r)]
        mean = math.fsum(valid) / len(valid) if valid else 0.0
        deviation = statistics.stdev(valid) if len(valid) > 1 else 0.0
        divisor = {"none": 1.0, "group": deviation + 1e-4, "batch": over_batch + 1e-4}[scale]
        flat = len(set(valid)) <= 1
        result += [0.0 if math.isnan(r) or flat else (r - mean) / divisor for r in group]
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_are_the_papers(scale, seed):
    draw = random.Random(seed)
    size = draw.choice([2, 3, 4, 8])
    kinds = [lambda: draw.choice([0.0, 1.0]), lambda: draw.gauss(0, 3), lambda: math.nan, lambda: 0.3]
    weights = [4, 4, 2, 1]
    rewards = [kind() for kind in draw.choices(kinds, weights, k=size * 9)]
    rewards[:size] = [math.nan] * size
    rewards[size : 2 * size] = [math.nan] * (size - 1) + [1.0]
    ours = group_advantages(torch.tensor(rewards, dtype=torch.float64), size, scale)
    exact(ours, advantages_by_hand(rewards, size, scale))


def test_some_equal_rewards_have_a_mean_that_is_not_their_value():
    """The rounding that the next test guards against is real: without it that test could not fail."""
    naive = [0.3 - sum([0.3] * n) / n for n in range(2, 65)]
    assert any(x != 0 for x in naive)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_rewards_have_advantage_exactly_zero(scale, dtype):
    for value in (0.3, 0.35, 0.1, 1 / 3, -0.7, 1.1, 1e-3, 1e8 + 0.1, 0.0, 1.0):
        for size in (2, 3, 5, 6, 7, 8, 10, 16, 64):
            varied = torch.linspace(-1, 1, size, dtype=dtype)  # so that "batch" has a deviation to divide by
            rewards = torch.cat([torch.full((size,), value, dtype=dtype), varied])
            advantages = group_advantages(rewards, size, scale)
            assert (advantages[:size] == 0).all(), (value, size)
            assert (advantages[size:] != 0).sum() >= size - 1
            alone = torch.full((size,), value, dtype=dtype)
            assert (group_advantages(alone, size, scale) == 0).all(), (value, size)


def test_equal_but_for_an_unscorable_sibling_is_exactly_zero():
    rewards = torch.tensor([0.3, math.nan, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3], dtype=torch.float64)
    for scale in ("none", "group", "batch"):
        assert (group_advantages(rewards, 8, scale) == 0).all()


def test_a_small_difference_is_a_difference():
    advantages = group_advantages(torch.tensor([0.3, 0.3 + 1e-9, 0.3, 0.3], dtype=torch.float64), 4)
    assert advantages[1] > 0 > advantages[0]
    assert advantages.sum().abs() < 1e-15


def test_nan_reward_changes_no_sibling():
    """An unscorable sample neither counts as 0 nor shifts the baseline: the others see a smaller group."""
    with_nan = group_advantages(torch.tensor([1.0, math.nan, 0.0, 0.0], dtype=torch.float64), 4, "group")
    without = group_advantages(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), 3, "group")
    exact(with_nan[[0, 2, 3]], without)
    assert with_nan[1] == 0


def test_groups_are_consecutive_and_independent():
    rewards = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = group_advantages(rewards, 4, "group")
    exact(whole, torch.cat([group_advantages(part, 4, "group") for part in rewards.split(4)]))
    order = torch.tensor([2, 0, 1])
    exact(group_advantages(rewards.view(3, 4)[order].reshape(-1), 4, "group"), whole.view(3, 4)[order].reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_advantages_keep_dtype_and_shape(dtype):
    advantages = group_advantages(torch.tensor([0, 1, 1, 1], dtype=dtype), 2)
    assert advantages.dtype == dtype and advantages.tolist() == [-0.5, 0.5, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integer_rewards_are_not_truncated(dtype):
    """A reward function may count: (0, 1, 1, 1) has advantages (-0.75, 0.25, 0.25, 0.25), not four zeros."""
    rewards = torch.tensor([0, 1, 1, 1]).to(dtype)
    assert group_advantages(rewards, 4).tolist() == [-0.75, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    ("rewards", "size", "scale", "message"),
    [
        (torch.ones(4), 2, "std", "scale='std' is unknown: use 'none', 'group' or 'batch'"),
        (torch.ones(5), 2, "none", "num_generations=2"),
        (torch.ones(2, 2), 2, "none", r"shape \(2, 2\)"),
        (torch.ones(4), 0, "none", "num_generations=0"),
        (torch.tensor([1.0, 0.0, -math.inf, 0.0]), 2, "none", "reward 2 is infinite"),
    ],
)
def test_advantages_refuse(rewards, size, scale, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, size, scale)


# --- masked_mean, sequence_weight, seq_clip --------------------------------------------------------------------------


def rho_by_hand(logps, rollout, mask):
    """exp of the mean log omega; GradLoc blog A.2. An empty sequence: exp(0)."""
    result = []
    for a, b, m in zip(logps.tolist(), rollout.tolist(), mask.tolist(), strict=True):
        logs = [x - y for x, y, keep in zip(a, b, m, strict=True) if keep]
        result.append([math.exp(math.fsum(logs) / len(logs)) if logs else 1.0])
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_weight_is_the_geometric_mean(seed):
    b = batch(seed)
    exact(sequence_weight(leaf(b.logps), b.rollout, b.mask), rho_by_hand(b.logps, b.rollout, b.mask))


@pytest.mark.parametrize("seed", SEEDS)
def test_seq_clip_keeps_inside_the_band(seed):
    b = batch(seed, spread=0.2)
    keep = seq_clip(leaf(b.logps), b.rollout, b.mask, 0.9, 1.1)
    expected = [[float(0.9 < rho < 1.1)] for (rho,) in rho_by_hand(b.logps, b.rollout, b.mask).tolist()]
    assert keep.tolist() == expected and not keep.requires_grad
    assert keep[0] == 1  # the empty sequence has nothing to clip


def test_seq_clip_is_strict_at_both_bounds():
    logps, mask = torch.full((1, 3), 0.01, dtype=torch.float64), torch.ones(1, 3)
    rho = sequence_weight(logps, 0 * logps, mask).item()
    below, above = math.nextafter(rho, 0), math.nextafter(rho, 2)
    assert [seq_clip(logps, 0 * logps, mask, low, high).item() for low, high in
            [(0.5, rho), (rho, 2), (0.5, above), (below, 2)]] == [0, 0, 1, 1]  # fmt: skip


def test_seq_clip_default_band_is_the_blogs():
    mask = torch.ones(1, 4)
    verdicts = [seq_clip(torch.full((1, 4), math.log(rho), dtype=torch.float64), torch.zeros(1, 4), mask).item()
                for rho in (0.9949, 0.9951, 1.0, 1.0049, 1.0051)]  # fmt: skip
    assert verdicts == [0, 1, 1, 1, 0]


def test_seq_clip_reads_a_mean_and_not_a_product():
    """1000 tokens at omega = 1.001: their product is 2.7, their geometric mean 1.001."""
    logps = torch.full((1, 1000), math.log(1.001), dtype=torch.float64)
    assert seq_clip(logps, 0 * logps, torch.ones(1, 1000)).item() == 1


def test_sequence_weight_ignores_tokens_that_do_not_count():
    b = batch(1)
    for garbage in GARBAGE:
        logps, rollout = (torch.where(b.mask.bool(), x, garbage) for x in (b.logps, b.rollout))
        exact(sequence_weight(logps, rollout, b.mask), sequence_weight(b.logps, b.rollout, b.mask))
        assert torch.equal(seq_clip(logps, rollout, b.mask, 0.9, 1.1), seq_clip(b.logps, b.rollout, b.mask, 0.9, 1.1))


def test_one_impossible_token_counts_in_full():
    """omega = 1e-30 at one of 4096 tokens: rho = exp(-69 / 4096) = 0.983, outside the blog's band."""
    logps, mask = torch.zeros(1, 4096, dtype=torch.float64), torch.ones(1, 4096)
    logps[0, 7] = -69.0
    exact(sequence_weight(logps, 0 * logps, mask), rho_by_hand(logps, 0 * logps, mask))
    assert seq_clip(logps, 0 * logps, mask).item() == 0


def test_seq_clip_shows_nan():
    b = batch(2)
    b.logps[3, 2] = math.nan
    keep = seq_clip(b.logps, b.rollout, b.mask, 0.5, 2.0)
    assert keep.isnan().squeeze(1).tolist() == [i == 3 for i in range(6)]


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (1.1, 0.9), (-0.1, 1.0), (math.nan, 1.0)])
def test_empty_bands_are_refused(low, high):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="sequence clip band"):
        seq_clip(x, x, x + 1, low, high)
    with pytest.raises(ValueError, match="token clip band"):
        token_clip(x, x, x, "icepop", low, high)


def test_masked_mean():
    x = torch.tensor([[1.0, 2.0, math.nan], [math.inf, 4.0, 6.0], [math.nan] * 3])
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    assert masked_mean(x, mask).tolist() == [[1.5], [5.0], [0.0]]


# --- token_clip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_token_clip_weights_are_the_blogs(seed):
    b = batch(seed, spread=1.2)
    logps = leaf(b.logps)
    icepop = token_clip(logps, b.old, b.rollout, "icepop", 0.5, 2.5)
    tis = token_clip(logps, b.old, b.rollout, "tis", 0.5, 2.5)
    assert not icepop.requires_grad and not tis.requires_grad
    exact(icepop, each(lambda p, m: math.exp(p - m) if 0.5 <= math.exp(p - m) <= 2.5 else 0.0, b.logps, b.rollout))
    exact(tis, each(lambda o, m: min(math.exp(o - m), 2.5), b.old, b.rollout))
    assert (icepop == 0).any() and (icepop > 0).any() and (tis < 0.5).any() and (tis == 2.5).any()


def test_icepop_bounds_are_inclusive():
    logps = torch.tensor([[0.3, -0.4]], dtype=torch.float64)
    zero = 0 * logps
    high, low = logps.exp()[0].tolist()
    assert (token_clip(logps, zero, zero, "icepop", low, high) > 0).all()
    assert (token_clip(logps, zero, zero, "icepop", math.nextafter(low, 1), math.nextafter(high, 0)) == 0).all()


def test_token_clip_defaults_are_the_blogs():
    logps = torch.tensor([[0.49, 0.51, 4.99, 5.01]], dtype=torch.float64).log()
    zero = 0 * logps
    exact(token_clip(logps, zero, zero), torch.tensor([[0.0, 0.51, 4.99, 0.0]], dtype=torch.float64))
    exact(token_clip(zero, logps, zero, "tis"), torch.tensor([[0.49, 0.51, 4.99, 5.0]], dtype=torch.float64))


def test_tis_does_not_read_the_current_policy():
    b = batch(3)
    assert torch.equal(token_clip(b.logps, b.old, b.rollout, "tis"), token_clip(b.ref, b.old, b.rollout, "tis"))


def test_icepop_does_not_read_old_logps():
    b = batch(3)
    assert torch.equal(token_clip(b.logps, b.old, b.rollout), token_clip(b.logps, b.ref, b.rollout))


@pytest.mark.parametrize("log_omega", [-69.0, -700.0, -math.inf, 12.0, 100.0, math.inf])
def test_extreme_tokens_have_exactly_zero_gradient(log_omega):
    """omega below 1e-30 and above 1e5 were observed; a bound that clamped up would multiply the former by 1e30."""
    rollout = torch.tensor([[-1.0, -1.0]])
    logps = leaf(torch.tensor([[-1.0, -1.0 if math.isinf(log_omega) else log_omega - 1.0]]))
    if math.isinf(log_omega):
        rollout = torch.tensor([[-1.0, -1.0 - log_omega]])
    weight = token_clip(logps, logps.detach(), rollout)
    (g,) = gradient((-weight * 2.0 * logps).sum(), logps)
    assert g.tolist() == [[-2.0, 0.0]]


def test_icepop_weight_is_detached():
    """The gradient is -omega A, not the -omega A (1 + log pi) of a live weight."""
    b = batch(4, spread=0.1)
    logps = leaf(b.logps)
    weight = token_clip(logps, b.old, b.rollout)
    (g,) = gradient((-weight * b.advantages * logps).sum(), logps)
    omega = (b.logps - b.rollout).exp()
    assert (omega > 0.5).all() and (omega < 5).all()
    exact(g, -omega * b.advantages)


@pytest.mark.parametrize("mode", ["icepop", "tis"])
def test_token_clip_shows_nan(mode):
    b = batch(5)
    bad = b.rollout.clone()
    bad[2, 1] = math.nan
    weight = token_clip(b.logps, b.old, bad, mode)
    assert weight.isnan().nonzero().tolist() == [[2, 1]]


def test_token_clip_refuses_an_unknown_mode():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="mode='none' is unknown: use 'tis' or 'icepop'"):
        token_clip(x, x, x, "none")


# --- ppo_clip_loss ---------------------------------------------------------------------------------------------------


def ppo_by_hand(logp, old, advantage, low, high):
    ratio = math.exp(logp - old)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_loss_is_the_papers(seed):
    b = batch(seed)
    loss = ppo_clip_loss(b.logps, b.old, b.advantages, 0.2, 0.28)
    exact(loss, each(lambda p, o, a: ppo_by_hand(p, o, a, 0.2, 0.28), b.logps, b.old, b.advantages))


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_gradient_is_ratio_times_advantage_until_the_clip_bites(seed):
    b = batch(seed)
    logps = leaf(b.logps)
    (g,) = gradient(ppo_clip_loss(logps, b.old, b.advantages, 0.2, 0.28).sum(), logps)

    def by_hand(p, o, a):
        ratio = math.exp(p - o)
        return 0.0 if (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8) else -ratio * a

    exact(g, each(by_hand, b.logps, b.old, b.advantages))
    assert (g == 0).any()


def test_ppo_default_clip_is_symmetric_at_a_fifth():
    logps = torch.tensor([[0.5], [0.5]], dtype=torch.float64)
    loss = ppo_clip_loss(logps, 0 * logps, torch.tensor([1.0, -1.0]))
    exact(loss, torch.tensor([[-1.2], [math.exp(0.5)]], dtype=torch.float64))
    exact(ppo_clip_loss(-logps, 0 * logps, torch.tensor([1.0, -1.0]))[1], torch.tensor([0.8], dtype=torch.float64))


def test_one_dimensional_advantages_are_one_a_sequence_even_when_n_equals_t():
    b = batch(6, lengths=(9,) * 9)
    for function in (ppo_clip_loss, lambda p, o, a: minirl_loss(p, o, b.rollout, a)):
        assert torch.equal(function(b.logps, b.old, b.advantages.squeeze(1)), function(b.logps, b.old, b.advantages))
    column, flat = b.advantages, b.advantages.squeeze(1)
    masks = [off_policy_sequence_mask(b.logps, b.rollout, a, b.mask, 0.0) for a in (column, flat)]
    assert torch.equal(*masks) and masks[0].shape == (9, 1)


@pytest.mark.parametrize("difference", [90.0, 1e4, math.inf])
def test_infinite_ratio_times_zero_advantage_is_finite(difference):
    logps, old = torch.tensor([[difference, 0.0]]), torch.tensor([[0.0, difference]])
    zero, rollout = torch.zeros(1, 1), torch.zeros(1, 2)
    for loss in (
        lambda p: ppo_clip_loss(p, old, zero),
        lambda p: token_clip(p, old, rollout, "tis", high=1e30) * ppo_clip_loss(p, old, zero),
        lambda p: unbiased_kl(p, old, torch.zeros(1, 2)) * 0,
    ):
        p = leaf(logps)
        value = loss(p)
        assert torch.isfinite(value).all()
        assert torch.isfinite(gradient(value.sum(), p)[0]).all()


def test_ratio_clamp_is_at_twenty():
    p = torch.tensor([[19.0, 21.0, -19.0, -21.0]], dtype=torch.float64)
    loss = ppo_clip_loss(p, 0 * p, torch.tensor([-1.0]), eps_low=1.0)  # A < 0 leaves a rising ratio unclipped
    exact(loss, torch.tensor([[19.0, 20.0, -19.0, -20.0]], dtype=torch.float64).exp())


# --- minirl_loss -----------------------------------------------------------------------------------------------------


def minirl_mask_by_hand(p, o, a, low, high):
    ratio = math.exp(p - o)
    return 0.0 if (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low) else 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_minirl_is_the_papers(seed):
    b = batch(seed, spread=0.9)
    logps = leaf(b.logps)
    loss = minirl_loss(logps, b.old, b.rollout, b.advantages, 0.2, 0.27, 3.0)

    def factor(p, o, m, a):
        return minirl_mask_by_hand(p, o, a, 0.2, 0.27) * min(math.exp(p - m), 3.0) * a

    expected = each(factor, b.logps, b.old, b.rollout, b.advantages)
    exact(loss.detach(), -expected * b.logps)
    exact(gradient(loss.sum(), logps)[0], -expected)  # through log pi_theta only
    assert (expected == 0).any() and (b.logps - b.rollout > math.log(3)).any()


@pytest.mark.parametrize("seed", SEEDS)
def test_minirl_is_ppo_clip_times_the_detached_mismatch(seed):
    """Below the truncation, sg[pi_old/mu] x PPO-clip has MiniRL's gradient, and PPO's min zeroes the tokens of M."""
    b = batch(seed)
    p, q = leaf(b.logps), leaf(b.logps)
    (ours,) = gradient(minirl_loss(p, b.old, b.rollout, b.advantages, 0.2, 0.27, cap=1e6).sum(), p)
    mismatch = (b.old - b.rollout).exp().detach()
    (theirs,) = gradient((mismatch * ppo_clip_loss(q, b.old, b.advantages, 0.2, 0.27)).sum(), q)
    exact(ours, theirs)
    assert torch.equal(ours == 0, theirs == 0)


def test_minirl_defaults():
    """eps 0.2 / 0.27, truncation at 5, all from section 4 of the paper."""
    logps = torch.tensor([[1.26, 1.28, 0.81, 0.79]], dtype=torch.float64).log()
    zero = 0 * logps
    kept = [[(x != 0) for x in minirl_loss(logps, zero, zero, torch.tensor([a]))[0].tolist()] for a in (1.0, -1.0)]
    assert kept == [[True, False, True, True], [True, True, True, False]]
    p = leaf(torch.tensor([[0.0, 0.0]], dtype=torch.float64))
    rollout = torch.tensor([[4.9, 5.1]], dtype=torch.float64).log().neg()
    exact(gradient(minirl_loss(p, p.detach(), rollout, torch.tensor([1.0])).sum(), p)[0],
          torch.tensor([[-4.9, -5.0]], dtype=torch.float64))  # fmt: skip


def test_minirl_clips_by_staleness_and_not_by_the_weight():
    """omega = 4 with r = 1 trains; omega = 1 with r = 4 and A > 0 does not."""
    p = leaf(torch.zeros(1, 2, dtype=torch.float64))
    old = torch.tensor([[1.0, 0.25]], dtype=torch.float64).log()
    loss = minirl_loss(p, old, old.flip(1), torch.tensor([1.0]))
    exact(gradient(loss.sum(), p)[0], torch.tensor([[-4.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("advantage", [-1.0, 0.0])
def test_minirl_is_finite_where_its_weight_is_zero(advantage):
    """A token that became impossible is dropped by M (A < 0), or weighs nothing (A = 0): no 0 x inf."""
    p = leaf(torch.tensor([[-math.inf, -1.0]]))
    loss = minirl_loss(p, torch.full((1, 2), -1.0), torch.full((1, 2), -1.0), torch.tensor([advantage]))
    assert torch.isfinite(loss).all() and torch.isfinite(gradient(loss.sum(), p)[0]).all()


# --- unbiased_kl -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cap", [None, 1.5])
def test_unbiased_kl_is_the_papers(seed, cap):
    b = batch(seed)

    def by_hand(p, behaviour, ref):
        ratio = math.exp(p - behaviour)
        return (ratio if cap is None else min(ratio, cap)) * (math.exp(ref - p) - (ref - p) - 1)

    kl = unbiased_kl(b.logps, b.rollout, b.ref, cap)
    exact(kl, each(by_hand, b.logps, b.rollout, b.ref))
    assert (kl >= 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_unbiased_kl_gradient_is_ratio_times_log_ratio(seed):
    b = batch(seed)
    p = leaf(b.logps)
    (g,) = gradient(unbiased_kl(p, b.rollout, b.ref).sum(), p)
    exact(g, each(lambda p, m, ref: math.exp(p - m) * (p - ref), b.logps, b.rollout, b.ref))


def test_unbiased_kl_on_policy_has_the_value_of_k3_and_another_gradient():
    b = batch(0)
    p = leaf(b.logps)
    kl = unbiased_kl(p, b.logps, b.ref)
    exact(kl.detach(), each(lambda p, ref: math.exp(ref - p) - (ref - p) - 1, b.logps, b.ref))
    (g,) = gradient(kl.sum(), p)
    k3_gradient = each(lambda p, ref: 1 - math.exp(ref - p), b.logps, b.ref)
    exact(g, b.logps - b.ref)
    assert (g - k3_gradient).abs().mean() > 0.1


def expected_kl_gradient(logits, behaviour, ref, kl):
    """E_{a ~ behaviour} of the gradient of kl(log pi(a), log b(a), log ref(a)) over a vocabulary, without sampling."""
    logps = logits.log_softmax(0)
    values = kl(logps.unsqueeze(0), behaviour.log().unsqueeze(0), ref.log().unsqueeze(0))
    return gradient((behaviour * values.squeeze(0)).sum(), logits)[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_expected_gradient_is_that_of_the_reverse_kl(seed):
    g = torch.Generator().manual_seed(seed)
    logits, b_logits, ref_logits = (torch.randn(7, generator=g, dtype=torch.float64) for _ in range(3))
    logits, behaviour, ref = leaf(logits), b_logits.softmax(0), ref_logits.softmax(0)
    pi = logits.detach().softmax(0).tolist()
    total = math.fsum(p * math.log(p / r) for p, r in zip(pi, ref.tolist(), strict=True))
    reverse = torch.tensor([p * (math.log(p / r) - total) for p, r in zip(pi, ref.tolist(), strict=True)]).double()
    forward = logits.detach().softmax(0) - ref  # of KL(ref || pi)

    ours = expected_kl_gradient(logits, behaviour, ref, unbiased_kl)
    torch.testing.assert_close(ours, reverse, rtol=1e-6, atol=1e-6)

    # what a detached ratio would give, shown with our own function: E_pi of plain k3's gradient
    def detached(p, b, r):
        k3 = (r - p).exp() - (r - p) - 1
        return (p - b).exp().detach() * k3

    exact(expected_kl_gradient(logits, behaviour, ref, detached), forward)
    assert (ours - forward).abs().max() > 1e-2

    capped = expected_kl_gradient(logits, behaviour, ref, lambda p, b, r: unbiased_kl(p, b, r, ratio_cap=0.5))
    assert (capped - reverse).abs().max() > 1e-3  # as the docstring says: biased beyond the cap


def test_ratio_cap_drops_the_corrections_own_gradient():
    p = leaf(torch.tensor([[0.0, 0.0]], dtype=torch.float64))
    behaviour = torch.tensor([[-2.0, -0.1]], dtype=torch.float64)  # ratios e^2 and e^0.1
    ref = torch.tensor([[-0.5, -0.5]], dtype=torch.float64)
    (g,) = gradient(unbiased_kl(p, behaviour, ref, ratio_cap=2.0).sum(), p)
    exact(g, torch.tensor([[2 * (1 - math.exp(-0.5)), math.exp(0.1) * 0.5]], dtype=torch.float64))


def test_a_small_kl_keeps_its_digits_in_float32():
    """Next to the reference k3 is x^2 / 2: about 5e-9 at x = 1e-4, far below float32's 1e-7 around 1."""
    x = torch.tensor([[1e-4, -1e-4, 3e-4, -1e-3, 1e-2]])
    kl = unbiased_kl(torch.zeros(1, 5), torch.zeros(1, 5), x)
    expected = [math.expm1(v) - v for v in x[0].tolist()]
    assert kl[0].tolist() == pytest.approx(expected, rel=5e-3) and (kl >= 0).all()


@pytest.mark.parametrize("gap", [100.0, 1e4, math.inf])
def test_kl_against_a_reference_far_away_is_finite(gap):
    p = leaf(torch.tensor([[-gap, -1.0]]))
    kl = unbiased_kl(p, torch.full((1, 2), -1.0), torch.tensor([[-1.0, -gap]]))
    assert torch.isfinite(kl).all() and torch.isfinite(gradient(kl.sum(), p)[0]).all()


# --- off_policy_sequence_mask ----------------------------------------------------------------------------------------


def divergences(logps, rollout, mask):
    """mean_t log(mu / pi_theta), as lists. DeepSeek-V3.2 eq. 9."""
    return [-math.log(rho) for (rho,) in rho_by_hand(logps, rollout, mask).tolist()]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("delta", [-0.1, 0.0, 0.2])
def test_off_policy_mask_is_equation_9(seed, delta):
    b = batch(seed)
    keep = off_policy_sequence_mask(leaf(b.logps), b.rollout, b.advantages, b.mask, delta)
    pairs = zip(b.advantages.squeeze(1).tolist(), divergences(b.logps, b.rollout, b.mask), strict=True)
    assert keep.squeeze(1).tolist() == [0.0 if a < 0 and d > delta else 1.0 for a, d in pairs]
    assert not keep.requires_grad


def test_off_policy_mask_drops_only_bad_answers_that_became_unlikely():
    logps = torch.tensor([[-3.0], [-3.0], [-3.0], [-1.0]])  # the last became *more* likely than when sampled
    advantages = torch.tensor([-1.0, 1.0, 0.0, -1.0])
    keep = off_policy_sequence_mask(logps, torch.full((4, 1), -2.0), advantages, torch.ones(4, 1), 0.5)
    assert keep.squeeze(1).tolist() == [0, 1, 1, 1]


def test_off_policy_mask_is_strict_at_delta():
    logps, mask = torch.full((1, 4), -0.25, dtype=torch.float64), torch.ones(1, 4)
    for delta, kept in ((0.25, 1), (math.nextafter(0.25, 0), 0)):
        assert off_policy_sequence_mask(logps, 0 * logps, torch.tensor([-1.0]), mask, delta).item() == kept


def test_off_policy_mask_is_evaluated_again_at_each_update():
    """Nothing is remembered: as pi_theta leaves mu, the same sequence goes from kept to dropped and back."""
    mask, rollout, bad = torch.ones(1, 5), torch.full((1, 5), -1.0), torch.tensor([-1.0])
    verdicts = [off_policy_sequence_mask(rollout - d, rollout, bad, mask, 0.1).item() for d in (0.0, 0.09, 0.11, 0.05)]
    assert verdicts == [1, 1, 0, 1]


def test_off_policy_mask_is_the_lower_half_of_seq_clip():
    """For A < 0: dropped where rho < exp(-delta)."""
    b = batch(7)
    bad, delta = -torch.ones(6), 0.1
    keep = off_policy_sequence_mask(b.logps, b.rollout, bad, b.mask, delta)
    assert torch.equal(keep == 0, sequence_weight(b.logps, b.rollout, b.mask) < math.exp(-delta))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.21, 0.5, 0.7, 0.8, 1.0])
def test_min_keep_ratio_brings_back_the_least_divergent(share):
    drift = torch.tensor([0.5, 0.3, 0.9, 0.4, 0.0, 0.6, 0.2, 0.8, 0.7, 1.0]).unsqueeze(1)
    advantages = torch.tensor([-1.0] * 9 + [1.0])
    keep = off_policy_sequence_mask(-drift, 0 * drift, advantages, torch.ones(10, 1), 0.05, share).squeeze(1).tolist()
    by_drift = sorted(range(9), key=lambda i: drift[i].item())
    kept = {4, 9} | set(by_drift[: max(1, math.ceil(share * 10) - 1)])  # 4 did not drift, 9 has A > 0
    assert {i for i, k in enumerate(keep) if k} == kept
    assert sum(keep) == max(2, math.ceil(share * 10))


def test_min_keep_ratio_counts_sequences_with_tokens_and_rounds_up_from_the_share_meant():
    drift = torch.arange(1.0, 11).unsqueeze(1)
    bad, ones = -torch.ones(10), torch.ones(10, 1)
    keep = off_policy_sequence_mask(-drift, 0 * drift, bad, ones, 0.5, 0.5)
    padded = [torch.cat([x, torch.zeros_like(x[:6])]) for x in (-drift, 0 * drift, bad, ones)]  # six without tokens
    assert keep.sum() == 5 and torch.equal(off_policy_sequence_mask(*padded, 0.5, 0.5)[:10], keep)
    hundred = torch.ones(100, 1)
    assert keep_least_divergent(hundred, -hundred, hundred.bool(), 0.5, 0.07).sum() == 7  # in floats 0.07 * 100 > 7


def test_the_mask_of_a_whole_is_settled_on_the_divergences_of_its_parts():
    b = batch(9)
    b.advantages = -b.advantages.abs()
    parts = [sequence_divergence(b.logps[k : k + 2], b.rollout[k : k + 2], b.mask[k : k + 2]) for k in (0, 2, 4)]
    counted = b.mask.any(1, keepdim=True)
    for share in (0.0, 0.4, 0.9):
        whole = off_policy_sequence_mask(b.logps, b.rollout, b.advantages, b.mask, 0.0, share)
        assert torch.equal(keep_least_divergent(torch.cat(parts), b.advantages, counted, 0.0, share), whole)


def test_min_keep_ratio_holds_when_a_divergence_is_infinite():
    logps = torch.tensor([[-1.0], [-math.inf]])
    keep = off_policy_sequence_mask(logps, -torch.ones(2, 1), torch.tensor([1.0, -1.0]), torch.ones(2, 1), 0.1, 1.0)
    assert keep.squeeze(1).tolist() == [1, 1]


def test_off_policy_mask_ignores_padding_and_shows_nan():
    b = batch(3)
    b.advantages = -b.advantages.abs()
    clean = off_policy_sequence_mask(b.logps, b.rollout, b.advantages, b.mask, 0.0, 0.5)
    for garbage in GARBAGE:
        logps, rollout = (torch.where(b.mask.bool(), x, garbage) for x in (b.logps, b.rollout))
        assert torch.equal(off_policy_sequence_mask(logps, rollout, b.advantages, b.mask, 0.0, 0.5), clean)
    b.logps[4, 0] = math.nan
    broken = off_policy_sequence_mask(b.logps, b.rollout, b.advantages, b.mask, 0.0)
    assert broken.isnan().squeeze(1).tolist() == [i == 4 for i in range(6)]


def test_off_policy_mask_refuses():
    x = torch.zeros(2, 3)
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="min_keep_ratio"):
            off_policy_sequence_mask(x, x, torch.ones(2), x + 1, 0.1, share)
    with pytest.raises(ValueError, match="eq. 9 needs one a sequence"):
        off_policy_sequence_mask(x, x, x, x + 1, 0.1)


# --- aggregate -------------------------------------------------------------------------------------------------------


def aggregate_by_hand(losses, mask, how, normalizer):
    total = 0.0
    for row, keep in zip(losses, mask, strict=True):
        valid = [x for x, k in zip(row, keep, strict=True) if k]
        if how == "seq_mean_token_mean":
            total += math.fsum(valid) / len(valid) if valid else 0.0
        else:
            total += math.fsum(valid)
    return total / normalizer


def normalizer_of(mask, how):
    return mask.sum().item() if how == "token_mean" else float(len(mask))


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_aggregate_is_the_formula(how, seed):
    b = batch(seed)
    normalizer = normalizer_of(b.mask, how)
    ours = aggregate(b.logps, b.mask, how, normalizer)
    expected = aggregate_by_hand(b.logps.tolist(), b.mask.tolist(), how, normalizer)
    assert ours.shape == () and ours.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_micro_batches_add_up(how):
    """1 x 8 = 2 x 4 = 8 x 1, value and gradient, with sequences of very different lengths."""
    b = batch(0, lengths=(0, 1, 2, 9, 9, 3, 5, 1))
    normalizer = normalizer_of(b.mask, how)
    results = []
    for size in (8, 4, 1):
        p = leaf(b.logps)
        loss = ppo_clip_loss(p, b.old, b.advantages)
        parts = [aggregate(x, m, how, normalizer) for x, m in zip(loss.split(size), b.mask.split(size), strict=True)]
        results.append((sum(parts), gradient(sum(parts), p)[0]))
    for value, g in results[1:]:
        exact(value, results[0][0])
        exact(g, results[0][1])
    assert results[0][1].abs().sum() > 0


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_padding_and_order_do_not_matter(how):
    b = batch(1)
    normalizer = normalizer_of(b.mask, how)
    expected = aggregate(b.logps, b.mask, how, normalizer)
    for garbage in GARBAGE:
        pad = torch.full((6, 5), garbage, dtype=torch.float64)
        for parts in ([pad, b.logps], [b.logps, pad], [pad, b.logps, pad]):
            masks = [torch.zeros_like(x) if x is pad else b.mask for x in parts]
            exact(aggregate(torch.cat(parts, 1), torch.cat(masks, 1), how, normalizer), expected)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    exact(aggregate(b.logps[order], b.mask[order], how, normalizer), expected)


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_outside_the_mask_reaches_neither_value_nor_gradient(how, garbage):
    b = batch(2)
    p, q = leaf(torch.where(b.mask.bool(), b.logps, garbage)), leaf(b.logps)
    dirty, clean = aggregate(p, b.mask, how, 7.0), aggregate(q, b.mask, how, 7.0)
    assert torch.equal(dirty, clean) and torch.equal(*gradient(dirty, p), *gradient(clean, q))


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_nan_inside_the_mask_stays_visible(how):
    b = batch(2)
    b.logps[5, 3] = math.nan
    assert aggregate(b.logps, b.mask, how, 7.0).isnan()


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("normalizer", [0.0, 5.0])
def test_a_batch_without_any_token_gives_zero_and_a_finite_gradient(how, normalizer):
    p = leaf(torch.tensor([[1.0, math.nan], [math.inf, 2.0]]))
    loss = aggregate(p, torch.zeros(2, 2), how, normalizer)
    assert loss.item() == 0 and gradient(loss, p)[0].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_denominators_are_fixed_before_anything_is_dropped(how):
    """Zeroing a token's weight or a whole sequence leaves every other token's gradient where it was."""
    b = batch(4, spread=0.2)
    normalizer = normalizer_of(b.mask, how)

    def gradients(weight):
        p = leaf(b.logps)
        return gradient(aggregate(weight * ppo_clip_loss(p, b.old, b.advantages), b.mask, how, normalizer), p)[0]

    full = gradients(torch.ones(6, 9))
    token, sequence = torch.ones(6, 9), torch.ones(6, 1)
    some = full.abs().argmax().item()
    token.view(-1)[some], sequence[3] = 0, 0
    assert torch.equal(gradients(token), full * token) and full.view(-1)[some] != 0
    assert torch.equal(gradients(sequence), full * sequence) and full[3].abs().sum() > 0


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_masks_of_any_dtype(mask_dtype):
    b = batch(5)
    mask = b.mask.to(mask_dtype)
    for how in AGGREGATIONS:
        exact(aggregate(b.logps, mask, how, 3.0), aggregate(b.logps, b.mask, how, 3.0))
    exact(sequence_weight(b.logps, b.rollout, mask), sequence_weight(b.logps, b.rollout, b.mask))


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_a_bfloat16_loss_is_summed_in_float32(how):
    losses, mask = torch.full((2, 500), 1.01).bfloat16(), torch.ones(2, 500)
    total = aggregate(losses, mask, how, 1000.0)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(aggregate(losses.float(), mask, how, 1000.0).item(), rel=1e-6)


def test_aggregate_refuses():
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match="how='mean' is unknown: use one of token_mean, seq_mean_token_mean, seq_sum"):
        aggregate(x, x, "mean", 1.0)
    for normalizer in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be positive"):
            aggregate(x, x, "token_mean", normalizer)


# --- gradients, dtypes and the on-policy limit -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_the_finite_differences(seed):
    b = batch(seed)
    weight, keep = token_clip(b.logps, b.old, b.rollout, "tis"), seq_clip(b.logps, b.rollout, b.mask, 0.7, 1.4)
    for function in (
        lambda p: ppo_clip_loss(p, b.old, b.advantages, 0.2, 0.3),
        lambda p: unbiased_kl(p, b.rollout, b.ref),
        lambda p: unbiased_kl(p, b.rollout, b.ref, 1.3),
        lambda p: aggregate(keep * weight * ppo_clip_loss(p, b.old, b.advantages), b.mask, "seq_mean_token_mean", 6.0),
        lambda p: aggregate(p * p, b.mask, "token_mean", 11.0),
    ):
        assert torch.autograd.gradcheck(function, (leaf(b.logps),))


@pytest.mark.parametrize("seed", range(3))
def test_on_policy_every_loss_is_reinforce(seed):
    """pi_theta = pi_old = mu: the gradient with respect to log pi is -A_i / (N |o_i|)."""
    b = batch(seed)
    lengths = b.mask.sum(1, keepdim=True).clamp(min=1)
    expected = -b.advantages * b.mask / (6 * lengths)
    for function in (
        lambda p: ppo_clip_loss(p, b.logps, b.advantages),
        lambda p: token_clip(p, b.logps, b.logps, "tis") * ppo_clip_loss(p, b.logps, b.advantages),
        lambda p: -token_clip(p, b.logps, b.logps) * b.advantages * p,
        lambda p: minirl_loss(p, b.logps, b.logps, b.advantages),
        lambda p: seq_clip(p, b.logps, b.mask) * ppo_clip_loss(p, b.logps, b.advantages),
        lambda p: (
            off_policy_sequence_mask(p, b.logps, b.advantages, b.mask, 0.0) * ppo_clip_loss(p, b.logps, b.advantages)
        ),
    ):
        p = leaf(b.logps)
        exact(gradient(aggregate(function(p), b.mask, "seq_mean_token_mean", 6.0), p)[0], expected)


def test_bfloat16_inputs_are_handled_in_float32():
    b = batch(0)
    half = [x.bfloat16() for x in (b.logps, b.old, b.rollout, b.ref)]
    single = [x.float() for x in half]
    a, mask = b.advantages.float(), b.mask
    for function in (
        lambda p, o, m, r: token_clip(p, o, m),
        lambda p, o, m, r: token_clip(p, o, m, "tis"),
        lambda p, o, m, r: ppo_clip_loss(p, o, a),
        lambda p, o, m, r: minirl_loss(p, o, m, a),
        lambda p, o, m, r: unbiased_kl(p, m, r),
        lambda p, o, m, r: sequence_weight(p, m, mask),
        lambda p, o, m, r: seq_clip(p, m, mask, 0.8, 1.2),
        lambda p, o, m, r: off_policy_sequence_mask(p, m, a, mask, 0.01),
    ):
        ours = function(*half)
        assert ours.dtype == torch.float32 and torch.equal(ours, function(*single))


@pytest.mark.parametrize("seed", range(3))
def test_nan_inside_the_mask_reaches_every_loss(seed):
    b = batch(seed)
    b.logps[5, 4] = math.nan
    for loss in (
        ppo_clip_loss(b.logps, b.old, b.advantages),
        minirl_loss(b.logps, b.old, b.rollout, b.advantages),
        unbiased_kl(b.logps, b.rollout, b.ref),
        unbiased_kl(b.logps, b.rollout, b.ref, 1.0),
    ):
        assert loss.isnan().nonzero().tolist() == [[5, 4]]


# --- support_logps ---------------------------------------------------------------------------------------------------


def csr(rows):
    """list of lists of token ids, row-major over (N, T) -> (token_ids, offsets)."""
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    return torch.tensor([i for row in rows for i in row], dtype=torch.long), torch.tensor(offsets)


def support_batch(seed, n=3, t=4, v=11):
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, t, v, generator=g, dtype=torch.float64)
    ids = torch.randint(v, (n, t), generator=g)
    rows = []
    for chosen in ids.reshape(-1).tolist():
        others = draw.sample([i for i in range(v) if i != chosen], draw.randint(0, v - 1))
        row = [chosen, *others]
        draw.shuffle(row)
        rows.append([] if draw.random() < 0.25 else row)
    return logits, ids, rows


def support_by_hand(logits, ids, rows):
    """log softmax over the support, one position at a time."""
    result, k = [], 0
    for scores, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        line = []
        for z, a in zip(scores, chosen, strict=True):
            kept = rows[k] or range(len(z))
            line.append(z[a] - math.log(math.fsum(math.exp(z[i]) for i in kept)))
            k += 1
        result.append(line)
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("seed", SEEDS)
def test_support_logps_is_a_softmax_over_the_support(seed):
    logits, ids, rows = support_batch(seed)
    exact(support_logps(logits, ids, csr(rows)), support_by_hand(logits, ids, rows))


@pytest.mark.parametrize("seed", SEEDS)
def test_support_gradient_is_the_dense_masked_softmaxs(seed):
    logits, ids, rows = support_batch(seed)
    upstream = torch.randn(3, 4, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    sparse, dense = leaf(logits), leaf(logits)
    outside = torch.tensor([[bool(row) and i not in row for i in range(11)] for row in rows]).view(3, 4, 11)
    masked = dense.masked_fill(outside, -math.inf).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    (ours,) = gradient((upstream * support_logps(sparse, ids, csr(rows))).sum(), sparse)
    (theirs,) = gradient((upstream * masked).sum(), dense)
    exact(ours, theirs)
    assert (ours[outside] == 0).all()
    assert torch.autograd.gradcheck(lambda x: support_logps(x, ids, csr(rows)), (leaf(logits),))


def nucleus(logits, top_p):
    """The smallest set of most likely tokens that holds at least top_p, as an engine's sampler keeps it."""
    probabilities = logits.softmax(0).tolist()
    kept, mass = [], 0.0
    for i in sorted(range(len(probabilities)), key=lambda i: -probabilities[i]):
        kept.append(i)
        mass += probabilities[i]
        if mass >= top_p:
            return kept, mass


@pytest.mark.parametrize("top_p", [0.5, 0.8, 0.95])
def test_replayed_support_removes_the_kept_mass_from_the_mismatch(top_p):
    """Equal weights, truncated sampling: without the support the mismatch is the kept mass, with it exactly 1."""
    logits = 2 * torch.randn(1, 40, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sets = [nucleus(logits[0, t], top_p) for t in range(40)]
    rows, masses = [s[0] for s in sets], torch.tensor([s[1] for s in sets], dtype=torch.float64)
    full = csr([[] for _ in range(40)])
    for rank in (0, -1):  # the most and the least likely token that could be sampled
        ids = torch.tensor([[row[rank] for row in rows]])
        engine = support_by_hand(logits, ids, rows)  # processed log-probs: renormalised over the nucleus
        exact((support_logps(logits, ids, full) - engine).exp().squeeze(0), masses)
        exact((support_logps(logits, ids, csr(rows)) - engine).exp(), torch.ones(1, 40, dtype=torch.float64))
    assert masses.mean() < 0.5 * (1 + top_p)


def test_empty_rows_mean_the_full_vocabulary():
    logits, ids, _ = support_batch(0)
    dense = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    exact(support_logps(logits, ids, csr([[] for _ in range(12)])), dense)
    exact(support_logps(logits, ids, csr([list(range(11))] * 12)), dense)


def test_a_support_of_one_token_has_probability_one_and_no_gradient():
    logits, ids, _ = support_batch(1)
    p = leaf(logits)
    result = support_logps(p, ids, csr([[i] for i in ids.reshape(-1).tolist()]))
    exact(result.detach(), torch.zeros(3, 4, dtype=torch.float64))
    assert gradient(result.sum(), p)[0].abs().max() < 1e-15


def test_support_survives_huge_logits():
    logits = torch.tensor([[[1e4, 1e4, -1e4, 3e4], [-1e4, -1e4 - 1, 0.0, 1.0]]])
    p = leaf(logits)
    result = support_logps(p, torch.tensor([[0, 1]]), csr([[1, 0], [0, 1]]))
    expected = torch.tensor([[-math.log(2), -1 - math.log(1 + math.exp(-1))]])
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-3)
    assert torch.isfinite(gradient(result.sum(), p)[0]).all()


def test_support_takes_bfloat16_logits():
    logits, ids, rows = support_batch(2)
    half = logits.bfloat16()
    assert support_logps(half, ids, csr(rows)).dtype == torch.float32
    assert torch.equal(support_logps(half, ids, csr(rows)), support_logps(half.float(), ids, csr(rows)))


def test_support_shows_nan_in_its_own_row_only():
    logits, ids, _ = support_batch(3)
    rows = [[i, (i + 1) % 11] for i in ids.reshape(-1).tolist()]
    logits[1, 2, rows[6][1]] = math.nan
    logits[2, 0, (rows[8][0] + 5) % 11] = math.nan  # outside its support: never read
    result = support_logps(logits, ids, csr(rows))
    assert result.isnan().nonzero().tolist() == [[1, 2]]


def test_support_refuses_a_token_that_could_not_be_sampled():
    logits, ids, rows = support_batch(4)
    rows[7] = [i for i in range(11) if i != ids[1, 3]]
    with pytest.raises(ValueError, match=rf"sampled token {ids[1, 3]} at sequence 1, position 3 is not in"):
        support_logps(logits, ids, csr(rows))


@pytest.mark.parametrize(
    ("token_ids", "offsets", "message"),
    [
        ([0, 1], [0, 1], "offsets must hold 3 values from 0 to 2"),
        ([0, 1], [0, 1, 1], "offsets must hold 3 values from 0 to 2"),
        ([0, 1], [1, 1, 2], "offsets must hold 3 values from 0 to 2"),
        ([0, 1], [0, 3, 2], "offsets must not fall"),
        ([0, 4], [0, 1, 2], r"token ids must lie in \[0, 4\)"),
        ([0, -1], [0, 1, 2], r"token ids must lie in \[0, 4\)"),
    ],
)
def test_support_refuses_offsets_that_do_not_fit(token_ids, offsets, message):
    with pytest.raises(ValueError, match=message):
        support_logps(torch.zeros(1, 2, 4), torch.tensor([[0, 1]]), (torch.tensor(token_ids), torch.tensor(offsets)))


def test_support_is_as_exact_as_log_softmax_in_float32():
    """A constant added to all logits changes nothing: subtract the maximum before, not after, the logarithm."""
    logits, ids, rows = support_batch(6)
    shifted = (logits + 300).float()
    expected = support_by_hand(shifted.double(), ids, rows)
    assert (support_logps(shifted, ids, csr(rows)) - expected).abs().max() < 3e-6


def test_support_refuses_a_repeated_id():
    with pytest.raises(ValueError, match="position 1"):
        support_logps(torch.zeros(1, 2, 4), torch.tensor([[0, 1]]), csr([[0, 2], [1, 1, 2]]))


@pytest.mark.parametrize("token", [-100, 4])
def test_support_refuses_an_id_outside_the_vocabulary(token):
    with pytest.raises(ValueError, match=f"{token}"):
        support_logps(torch.zeros(1, 2, 4), torch.tensor([[0, token]]), csr([[], []]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint16])
def test_support_takes_small_integer_types(dtype):
    logits, ids, rows = support_batch(5)
    token_ids, offsets = csr(rows)
    support = (token_ids.to(dtype), offsets.to(torch.int32))
    exact(support_logps(logits, ids, support), support_by_hand(logits, ids, rows))


# --- the recipe's loss, composed as it trains ------------------------------------------------------------------------


def recipe_loss(b, leaves, micro_batch=None, beta=0.0, aligned=False, **flags):
    """GRPOTokenClipTrainer._compute_loss on log-probs instead of a model; sums over micro-batches. -> () loss."""
    defaults = {"token_clip": "none", "token_clip_low": 0.5, "token_clip_high": 5.0, "seq_clip_low": None,
                "seq_clip_high": None, "aggregation": "seq_mean_token_mean", "routing_replay": "none",
                "keep_sampling_mask": False}  # fmt: skip
    args = SimpleNamespace(**(defaults | flags))
    count = normalizer_of(b.mask, args.aggregation)
    tracked = {}

    def track(name, values, mask=None, quantiles=False):
        tracked.setdefault(name, []).append(values.detach()[mask.bool()] if mask is not None else values.detach())

    trainer = SimpleNamespace(
        args=args, beta=beta, epsilon_low=0.2, epsilon_high=0.3, track=track, track_policy=lambda batch: None,
        flush=lambda: None, normalizer=lambda how: count, _loss_mask=RLVRTrainer._loss_mask, routing=None,
    )  # fmt: skip
    trainer.score = lambda model, inputs: RLVRTrainer.score(trainer, model, inputs)
    total, n = 0.0, len(leaves)
    for rows in torch.arange(n).split(micro_batch or n):
        trainer._get_per_token_logps_and_entropies = lambda *a, _rows=rows, **k: (leaves[_rows], b.ref[_rows], None)
        inputs = {
            "prompt_ids": torch.zeros(len(rows), 2), "prompt_mask": torch.ones(len(rows), 2),
            "completion_ids": torch.zeros(len(rows), b.mask.shape[1]), "completion_mask": b.mask[rows],
            "sampling_per_token_logps": b.rollout[rows], "ref_per_token_logps": b.ref[rows],
            "advantages": b.advantages[rows].squeeze(1),
        }  # fmt: skip
        if not aligned:
            inputs["old_per_token_logps"] = b.old[rows]
        total = total + GRPOTokenClipTrainer._compute_loss(trainer, None, inputs)
    return total, tracked


def recipe_by_hand(b, token_clip, seq_band, beta, aligned):
    """J of the recipe's docstring, token by token: value of the loss and its gradient with respect to log pi_theta."""
    n, width = b.mask.shape
    old = b.logps if aligned else b.old
    p, o, m, ref, a, keep = (x.tolist() for x in (b.logps, old, b.rollout, b.ref, b.advantages, b.mask))
    rhos = rho_by_hand(b.logps, b.rollout, b.mask).tolist()
    value, grad = 0.0, [[0.0] * width for _ in range(n)]
    for i in range(n):
        length = max(sum(keep[i]), 1)
        kept = 1.0 if seq_band is None or seq_band[0] < rhos[i][0] < seq_band[1] else 0.0
        for t in range(width):
            if not keep[i][t]:
                continue
            advantage, logp = a[i][0], p[i][t]
            ratio, omega = math.exp(logp - o[i][t]), math.exp(logp - m[i][t])
            live = 0.0 if (advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.8) else 1.0
            loss, slope = ppo_by_hand(logp, o[i][t], advantage, 0.2, 0.3), -ratio * advantage * live
            if token_clip == "tis":
                factor = min(math.exp(o[i][t] - m[i][t]), 1.5)
                loss, slope = factor * loss, factor * slope
            elif token_clip == "icepop":
                psi = omega if 0.7 <= omega <= 1.5 else 0.0
                loss, slope = -psi * advantage * logp, -psi * advantage
            loss, slope = kept * loss, kept * slope
            behaviour = ratio if token_clip == "none" else min(omega, 1.5)  # no clipped token returns through the KL
            capped = token_clip != "none" and omega > 1.5  # then the cap is a constant: only k3 has a slope
            loss += beta * behaviour * (math.exp(ref[i][t] - logp) - (ref[i][t] - logp) - 1)
            slope += beta * behaviour * (1 - math.exp(ref[i][t] - logp) if capped else logp - ref[i][t])
            value += loss / (n * length)
            grad[i][t] = slope / (n * length)
    return value, torch.tensor(grad, dtype=torch.float64)


@pytest.mark.parametrize("aligned", [False, True], ids=["stale", "aligned"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("band", [None, (0.8, 1.25)], ids=["all", "seq_clip"])
@pytest.mark.parametrize("mode", ["none", "tis", "icepop"])
def test_the_recipes_loss_is_its_docstring(mode, band, beta, aligned):
    low, high = band or (None, None)
    for seed in range(3):
        b = batch(seed, spread=0.4)
        p = leaf(b.logps)
        clips = {"token_clip_low": 0.7, "token_clip_high": 1.5, "seq_clip_low": low, "seq_clip_high": high}
        loss, tracked = recipe_loss(b, p, beta=beta, aligned=aligned, token_clip=mode, **clips)
        value, expected = recipe_by_hand(b, mode, band, beta, aligned)
        assert loss.item() == pytest.approx(value, abs=1e-12)
        exact(gradient(loss, p)[0], expected)
        if mode == "icepop":
            share = torch.cat(tracked["token_clip/masked_frac"]).mean().item()
            omega = (b.logps - b.rollout).exp()[b.mask.bool()]
            assert share == pytest.approx(((omega < 0.7) | (omega > 1.5)).double().mean().item())
        if band is not None:
            rhos = rho_by_hand(b.logps, b.rollout, b.mask)[b.mask.bool().any(1)].squeeze(1).tolist()
            dropped = torch.cat(tracked["seq_clip/masked_frac"]).reshape(-1).tolist()
            assert dropped == [float(not low < rho < high) for rho in rhos]


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("mode", ["none", "tis", "icepop"])
def test_the_recipes_loss_is_invariant(mode, how):
    """Micro-batches, sequence order, padding; and garbage in the padding leaks into neither value nor gradient."""
    flags = {"token_clip": mode, "seq_clip_low": 0.7, "seq_clip_high": 1.4, "beta": 0.1, "aggregation": how}
    b = batch(0, spread=0.4)
    p = leaf(b.logps)
    loss, _ = recipe_loss(b, p, **flags)
    (g,) = gradient(loss, p)
    for size in (3, 2, 1):
        q = leaf(b.logps)
        split, _ = recipe_loss(b, q, micro_batch=size, **flags)
        exact(split, loss)
        exact(gradient(split, q)[0], g)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    moved = SimpleNamespace(**{k: x[order] for k, x in vars(b).items()})
    exact(recipe_loss(moved, moved.logps, **flags)[0], loss)
    for garbage in GARBAGE:
        pad, inside = torch.full((6, 3), garbage, dtype=torch.float64), b.mask.bool()
        dirty = SimpleNamespace(advantages=b.advantages, mask=torch.cat([b.mask, torch.zeros(6, 3)], 1))
        for name in ("logps", "old", "rollout", "ref"):
            setattr(dirty, name, torch.cat([torch.where(inside, getattr(b, name), garbage), pad], 1))
        q = leaf(dirty.logps)
        value, _ = recipe_loss(dirty, q, **flags)
        exact(value, loss)
        exact(gradient(value, q)[0], torch.cat([g, torch.zeros(6, 3)], 1))


@pytest.mark.parametrize("mode", ["none", "tis", "icepop"])
def test_the_recipes_loss_shows_nan_inside_the_mask(mode):
    unread = {"none": "rollout", "tis": None, "icepop": "old"}[mode]
    for name in ("logps", "old", "rollout", "ref"):
        b = batch(0, spread=0.1)
        getattr(b, name)[5, 2] = math.nan
        assert recipe_loss(b, b.logps, token_clip=mode, beta=0.1)[0].isnan() == (name != unread), name


@pytest.mark.parametrize("mode", ["none", "tis", "icepop"])
def test_the_recipes_loss_on_a_fully_masked_batch(mode):
    b = batch(0)
    b.mask = torch.zeros(6, 9)
    p = leaf(torch.full_like(b.logps, math.nan))
    flags = {"token_clip": mode, "seq_clip_low": 0.9, "seq_clip_high": 1.1, "beta": 0.1}
    for how in AGGREGATIONS:
        loss, _ = recipe_loss(b, p, aggregation=how, **flags)
        assert loss.item() == 0 and (gradient(loss, p)[0] == 0).all()
