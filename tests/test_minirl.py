"""MiniRL and routing replay in the trainer: the paper's identities in float64, planted routes, replay end to end."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import trl
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from test_gradloc_trainer import everything, reports_of, top
from transformers import AutoModelForCausalLM, TrainerCallback

import minirl_sync
import rlvr_common
from minirl_sync import MiniRLConfig, MiniRLTrainer
from rlvr_common import RLVRTrainer, load_math_rows, minirl_loss, ppo_clip_loss
from rlvr_report import read_metrics
from routing import (
    empty_routes,
    record_routing,
    recorded_rows,
    replay_routing,
    routing_agreement,
    signed_routes,
)
from training import (
    MODEL,
    REPO,
    equal,
    history,
    largest_difference,
    length_reward,
    make_minirl,
    make_ours,
    make_stock,
    options,
    save_moe,
    weights,
)

SGD = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}  # Adam's first step is sign(g): it hides a scale
FP8 = {"rollout_dtype": "fp8"}
L, K, E = 2, 2, 8  # of save_moe


@pytest.fixture(scope="session")
def moe(tmp_path_factory):
    return save_moe(tmp_path_factory.mktemp("moe"))


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def batch_of(inputs):
    """-> ids (N, S) and token mask (N, S) as TRL lays them out."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)


class Watched(MiniRLTrainer):
    """Keeps every micro-batch, what `score` made of it and the weights it was scored with."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        used = self._used_routes if self.routing is not None else None
        self.seen.append(
            SimpleNamespace(inputs=inputs, loss=loss.item(), routes=used, step=self.state.global_step, batch=self.last)
        )
        return loss

    def score(self, model, inputs):
        self.last = super().score(model, inputs)
        return self.last


class Keep(TrainerCallback):
    """The weights after every optimizer step."""

    def __init__(self, trainer):
        self.trainer, self.weights = trainer, []

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(weights(self.trainer))


def trained(folder, model, trainer=Watched, **changes):
    made = make_minirl(folder, model, trainer=trainer, **changes)
    made.kept = Keep(made)
    made.add_callback(made.kept)
    made.train()
    return made


def logged(trainer, skip=()):
    """The numbers of each optimizer step, wall-clock times and the given metrics left out."""
    times = ("time", "runtime", "per_second")
    return [
        {k: v for k, v in record.items() if not any(t in k for t in times) and not k.startswith(skip)}
        for record in trainer.state.log_history
        if "loss" in record
    ]


# --- the loss ---------------------------------------------------------------------------------------------------------

LOW, HIGH = 0.5, 1.0  # the clip's bounds on r are 0.5 and 2: exact in floating point, so that a boundary can be met


@pytest.mark.parametrize("advantage", [1.0, -0.7])
def test_gradient_is_grpo_clip_times_mismatch_at_both_boundaries(advantage):
    """The derived identity of the objective: without truncation, MiniRL = PPO's clip x detached pi_old/mu."""
    low, high, hair = math.log(0.5), math.log(2.0), 1e-12
    log_r = [low - 1, low - hair, low, low + hair, -0.3, 0.0, 0.3, high - hair, high, high + hair, high + 1]
    grid = [(x, m) for x in log_r for m in (0.3, 1.0, 2.0)]
    live = torch.tensor([[x for x, _ in grid]], dtype=torch.float64, requires_grad=True)
    mismatch = torch.tensor([[m for _, m in grid]], dtype=torch.float64)
    old, advantages = torch.zeros_like(mismatch), torch.tensor([[advantage]], dtype=torch.float64)
    assert live.exp()[live == high].unique() == 2 and live.exp()[live == low].unique() == 0.5  # boundaries are met
    ours = minirl_loss(live, old, old - mismatch.log(), advantages, LOW, HIGH, cap=math.inf)
    theirs = mismatch * ppo_clip_loss(live, old, advantages, LOW, HIGH)
    ours, theirs = (torch.autograd.grad(loss.sum(), live)[0][0].tolist() for loss in (ours, theirs))

    by_loops = []
    for x, m in grid:
        dropped = x > high if advantage > 0 else x < low  # strict: at the boundary a token still trains
        by_loops.append(0.0 if dropped else -math.exp(x) * m * advantage)
    assert ours == pytest.approx(by_loops, rel=1e-12) and theirs == pytest.approx(by_loops, rel=1e-12)
    assert [x == 0 for x in ours] == [x == 0 for x in theirs] == [x == 0 for x in by_loops]
    assert sum(x == 0 for x in by_loops) == 6  # one hair and one step beyond, three mismatches each


def planted_batch(seed, n=6, t=7):
    generator = torch.Generator().manual_seed(seed)

    def noise():
        return torch.randn(n, t, generator=generator, dtype=torch.float64)

    logps = -1 - noise().abs()
    lengths = torch.tensor([7, 5, 1, 7, 3, 0])
    batch = SimpleNamespace(
        logps=logps, old=logps + 0.3 * noise(), mask=(torch.arange(t) < lengths.unsqueeze(1)).long(),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 1.0], dtype=torch.float64),
    )  # fmt: skip
    batch.rollout = batch.old + 0.8 * noise()
    return batch


def planted_loss(b, live, rows=slice(None), aligned=False, **flags):
    """MiniRLTrainer._compute_loss on log-probs in place of a model -> loss, tracked metrics."""
    args = SimpleNamespace(
        **{
            "no_is": False,
            "no_clip": False,
            "is_cap": 2.0,
            "aggregation": "seq_sum",
            "routing_replay": "none",
            "keep_sampling_mask": False,
        }
        | flags
    )
    tracked = {}

    def track(name, values, mask=None, quantiles=False):
        tracked[name] = values[mask.bool()] if mask is not None else values

    trainer = SimpleNamespace(
        args=args, epsilon_low=0.2, epsilon_high=0.27, track=track, track_policy=lambda batch: None, routing=None,
        flush=lambda: None, normalizer=lambda how: float(len(b.mask)), _loss_mask=RLVRTrainer._loss_mask,
        _get_per_token_logps_and_entropies=lambda *a, **k: (live[rows], torch.zeros_like(live[rows]), None),
    )  # fmt: skip
    trainer.score = lambda model, inputs: RLVRTrainer.score(trainer, model, inputs)
    n, t = b.mask[rows].shape
    inputs = {
        "prompt_ids": torch.zeros(n, 2), "prompt_mask": torch.ones(n, 2), "completion_ids": torch.zeros(n, t),
        "completion_mask": b.mask[rows], "sampling_per_token_logps": b.rollout[rows], "advantages": b.advantages[rows],
    }  # fmt: skip
    if not aligned:
        inputs["old_per_token_logps"] = b.old[rows]
    return MiniRLTrainer._compute_loss(trainer, None, inputs), tracked


def minirl_by_hand(b, aligned, no_is=False, no_clip=False, length_norm=False, cap=2.0):
    """Equation 7 token by token -> loss, its gradient by log pi_theta, shares of masked and of truncated tokens."""
    n, t = b.mask.shape
    p, o, m, a, keep = (x.tolist() for x in (b.logps, b.old, b.rollout, b.advantages, b.mask))
    value, grad, masked, truncated, tokens = 0.0, torch.zeros(n, t, dtype=torch.float64), 0, 0, 0
    for i in range(n):
        for j in range(sum(keep[i])):
            r = 1.0 if aligned else math.exp(p[i][j] - o[i][j])
            weight = r if no_is else math.exp(p[i][j] - m[i][j])
            drop = not no_clip and ((a[i] > 0 and r > 1.27) or (a[i] < 0 and r < 0.8))
            tokens, masked, truncated = tokens + 1, masked + drop, truncated + (weight > cap)
            factor = 0.0 if drop else min(weight, cap) * a[i]
            scale = n * (sum(keep[i]) if length_norm else 1)
            value -= factor * p[i][j] / scale
            grad[i, j] = -factor / scale
    return value, grad, masked / tokens, truncated / tokens


ARMS = [{}, {"no_is": True}, {"no_clip": True}, {"no_is": True, "no_clip": True}, {"length_norm": True}, {"cap": 1.1}]


@pytest.mark.parametrize("aligned", [False, True], ids=["stale", "aligned"])
@pytest.mark.parametrize("arm", ARMS, ids=[",".join(arm) or "minirl" for arm in ARMS])
def test_the_recipes_loss_is_equation_7(arm, aligned):
    flags = {k: v for k, v in arm.items() if k.startswith("no_")} | {"is_cap": arm.get("cap", 2.0)}
    config = MiniRLConfig(**options("unused", use_cpu=True, length_norm=arm.get("length_norm", False)))
    flags["aggregation"] = config.aggregation
    for seed in range(3):
        b = planted_batch(seed)
        live = b.logps.clone().requires_grad_()
        loss, tracked = planted_loss(b, live, aligned=aligned, **flags)
        value, grad, masked, truncated = minirl_by_hand(b, aligned, **arm)
        assert loss.item() == pytest.approx(value, abs=1e-12)
        assert torch.allclose(torch.autograd.grad(loss, live)[0], grad, rtol=0, atol=1e-12)
        assert tracked["minirl/masked_frac"].mean().item() == pytest.approx(masked)
        assert tracked["minirl/truncated_frac"].mean().item() == pytest.approx(truncated)
        assert (masked > 0) == (not aligned and "no_clip" not in arm)
        assert truncated > 0 or "no_is" in arm


def test_without_is_an_on_policy_update_is_reinforce():
    b = planted_batch(0)
    live = b.logps.clone().requires_grad_()
    loss, _ = planted_loss(b, live, aligned=True, no_is=True)
    plain = -(b.advantages.unsqueeze(1) * live * b.mask).sum() / len(b.mask)  # A log pi, no weight at all
    corrected, _ = planted_loss(b, live, aligned=True)
    loss, plain, corrected = (torch.autograd.grad(x, live)[0] for x in (loss, plain, corrected))
    assert torch.allclose(loss, plain, rtol=0, atol=1e-15) and not torch.allclose(corrected, plain, rtol=0, atol=1e-3)


@pytest.mark.parametrize("how", ["seq_sum", "seq_mean_token_mean"])
def test_the_recipes_loss_does_not_depend_on_order_and_split(how):
    b = planted_batch(1)
    whole = planted_loss(b, b.logps, aggregation=how)[0].item()
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    parts = [planted_loss(b, b.logps, rows=rows, aggregation=how)[0].item() for rows in order.split([1, 3, 2])]
    assert sum(parts) == pytest.approx(whole, abs=1e-14)


@pytest.mark.parametrize("place", ["logps", "old", "rollout"])
def test_a_broken_log_prob_is_a_broken_loss(place):
    b = planted_batch(2)
    getattr(b, place)[0, 3] = math.nan
    assert planted_loss(b, b.logps)[0].isnan()
    b = planted_batch(2)
    getattr(b, place)[1, 6] = math.nan  # padding
    assert planted_loss(b, b.logps)[0].isfinite()


# --- the recipe end to end --------------------------------------------------------------------------------------------


def logps_by_hand(model, inputs, routes=None):
    """(N, T) log-probs of the completions by one plain forward."""
    ids, tokens = batch_of(inputs)
    t = inputs["completion_ids"].shape[1]
    if routes is None:
        logits = model(input_ids=ids, attention_mask=tokens).logits
    else:
        with replay_routing(model, routes):
            logits = model(input_ids=ids, attention_mask=tokens).logits
    return logits[:, -t - 1 : -1].log_softmax(-1).gather(2, inputs["completion_ids"].unsqueeze(2)).squeeze(2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_minibatches": 3, "routing_replay": "r3", "gradient_accumulation_steps": 2},
        {"num_minibatches": 3, "routing_replay": "r2"},
        {"num_minibatches": 3, "no_is": True, "length_norm": True},
    ],
    ids=["on_policy", "r3", "r2", "no_is-length_norm"],
)
def test_three_steps_equal_a_loop_by_hand(moe, tmp_path, changes):
    """Same samples, everything else anew: old log-probs, weights, masks, sums and updates, in plain loops."""
    updates, rate = changes.get("num_minibatches", 1), 3.0 if "length_norm" in changes else 0.3
    trainer = trained(tmp_path, moe, max_steps=3, is_cap=1.02, **FP8, **SGD | {"learning_rate": rate}, **changes)
    model, sampler = load(moe), load(moe)
    for step in range(3):
        if step % updates == 0:
            sampler.load_state_dict(model.state_dict())
        micro = [seen for seen in trainer.seen if seen.step == step]
        assert len(micro) == changes.get("gradient_accumulation_steps", 1)
        sequences = 8 * len(micro)
        value = masked = truncated = tokens = 0
        model.zero_grad()
        for seen in micro:
            x = seen.inputs
            routes = x.get({"r2": "old_routes", "r3": "rollout_routes"}.get(changes.get("routing_replay")))
            logps = logps_by_hand(model, x, routes)
            with torch.no_grad():
                old = logps_by_hand(sampler, x, routes if changes.get("routing_replay") == "r3" else None)
            loss = 0.0
            for i in range(8):
                length = int(x["completion_mask"][i].sum())
                for j in range(length):
                    p, a = logps[i, j], float(x["advantages"][i])
                    r = math.exp(p.item() - old[i, j].item())
                    mu = old[i, j].item() if "no_is" in changes else x["sampling_per_token_logps"][i, j].item()
                    weight = math.exp(p.item() - mu)
                    drop = (a > 0 and r > 1.27) or (a < 0 and r < 0.8)
                    tokens, masked, truncated = tokens + 1, masked + drop, truncated + (weight > 1.02)
                    if not drop:
                        norm = sequences * (length if "length_norm" in changes else 1)
                        loss = loss - min(weight, 1.02) * a * p / norm
            loss.backward()
            value += loss.item()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
        record = trainer.state.log_history[step]
        assert record["loss"] == pytest.approx(value, abs=2e-6)
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert record["minirl/masked_frac"] == pytest.approx(masked / tokens, abs=1e-6)
        assert record["minirl/truncated_frac"] == pytest.approx(truncated / tokens, abs=1e-6)
        assert (masked > 0) == (step % updates > 0)
        assert 0 < truncated < tokens or ("no_is" in changes and step == 0)
        assert largest_difference(weights(trainer) if step == 2 else trainer.kept.weights[step],
                                  {k: model.state_dict()[k] for k in weights(trainer)}) < 5e-6  # fmt: skip


@pytest.mark.parametrize("minibatches", [1, 2])
def test_with_equal_engines_six_steps_are_stock_dr_grpo(moe, tmp_path, minibatches):
    """mu = pi_old in float32, so MiniRL's gradient is GRPO's with clip. TRL's dr_grpo divides by sequences x
    max_completion_length where we divide by sequences: its gradient is 1/12 of ours, so its learning rate is 12 times."""
    length, rate = 12, 0.02
    clip = {"epsilon": 0.2, "epsilon_high": 0.27}
    ours = trained(tmp_path / "ours", moe, num_minibatches=minibatches, **SGD | {"learning_rate": rate}, **clip)
    stock = make_stock(
        tmp_path / "stock", model=moe, loss_type="dr_grpo", scale_rewards="none", router_aux_loss_coef=0.0,
        steps_per_generation=minibatches, reward=length_reward, **SGD | {"learning_rate": rate * length}, **clip,
    )  # fmt: skip
    stock.train()
    a, b = sum(history(ours, "grad_norm"), []), sum(history(stock, "grad_norm"), [])
    assert len(a) == len(b) == 6 and min(a) > 1e-2
    assert a == pytest.approx([length * norm for norm in b], rel=1e-3)
    assert largest_difference(weights(ours), weights(stock)) < 1e-5
    assert largest_difference(weights(ours), {k: load(moe).state_dict()[k] for k in weights(ours)}) > 1e-3
    assert (sum(sum(history(ours, "minirl/masked_frac"), [])) > 0) == (minibatches > 1)


def test_a_dense_model_trains_without_replay(tmp_path):
    trainer = trained(tmp_path, MODEL, max_steps=2, num_minibatches=2, **FP8)
    assert [r["grad_norm"] > 0 for r in logged(trainer)] == [True, True]
    assert not [k for record in logged(trainer) for k in record if k.startswith("routing/")]
    assert not [k for seen in trainer.seen for k in seen.inputs if k.endswith("routes")]


# --- what replay changes, and what it does not ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arms(moe, tmp_path_factory):
    """Two updates of one sampling with each kind of replay, 8-bit rollouts."""
    changes = {"max_steps": 2, "num_minibatches": 2} | FP8 | SGD | {"learning_rate": 0.5}
    return {
        mode: trained(tmp_path_factory.mktemp(mode), moe, routing_replay=mode, **changes)
        for mode in ("none", "r2", "r3")
    }


def test_r2_is_nothing_in_the_first_update_and_something_in_the_next(arms):
    none, r2 = arms["none"], arms["r2"]
    a, b = logged(none), logged(r2, skip="routing/replayed_rows")
    assert a[0] == b[0] and equal(none.kept.weights[0], r2.kept.weights[0])
    assert a[0]["routing/old_agreement"] == 1 and a[1]["routing/old_agreement"] < 1  # so there was something to replay
    assert a[1]["loss"] != b[1]["loss"] and not equal(none.kept.weights[1], r2.kept.weights[1])
    ids, tokens = batch_of(r2.seen[1].inputs)
    assert routing_agreement(r2.seen[1].routes, r2.seen[1].inputs["old_routes"], tokens) == 1
    assert routing_agreement(none.seen[1].routes, none.seen[1].inputs["old_routes"], tokens) < 1


@pytest.mark.parametrize("minibatches", [1, 3])
def test_r3_with_equal_engines_is_no_replay_bit_for_bit(moe, tmp_path, minibatches):
    runs = [
        trained(tmp_path / mode, moe, max_steps=1, num_minibatches=minibatches, routing_replay=mode, **SGD)
        for mode in ("none", "r3")
    ]
    (a,), (b,) = logged(runs[0]), logged(runs[1])
    assert b.pop("routing/replayed_rows") > 0 and a == b
    assert a["routing/rollout_agreement"] == 1 and a["grad_norm"] > 1e-3
    assert equal(runs[0].kept.weights, runs[1].kept.weights)


def test_r3_uses_the_engines_experts_and_changes_log_probs(arms):
    none, r3 = arms["none"].seen[0], arms["r3"].seen[0]
    ids, tokens = batch_of(none.inputs)
    assert torch.equal(ids, batch_of(r3.inputs)[0])
    assert not torch.equal(none.batch.logps, r3.batch.logps)
    assert routing_agreement(none.routes, none.inputs["rollout_routes"], tokens) < 0.95
    assert routing_agreement(r3.routes, r3.inputs["rollout_routes"], tokens) == 1
    last = tokens.flip(1).argmax(1)  # the engine never routed the last token
    places = torch.arange(len(tokens)), tokens.shape[1] - 1 - last
    assert not recorded_rows(r3.inputs["rollout_routes"])[places].any()
    assert recorded_rows(r3.routes)[places].all()


def test_old_log_probs_run_under_r3_and_natively_under_r2(moe, arms):
    model = load(moe)
    for mode, seen in (("r3", arms["r3"].seen), ("r2", arms["r2"].seen), ("none", arms["none"].seen)):
        for micro in seen:
            x, mask = micro.inputs, micro.inputs["completion_mask"].bool()
            with torch.no_grad():
                native, replayed = logps_by_hand(model, x), logps_by_hand(model, x, x["rollout_routes"])
            expected, other = (replayed, native) if mode == "r3" else (native, replayed)
            found = x["old_per_token_logps"]
            assert torch.allclose(found[mask], expected[mask], rtol=0, atol=2e-5)
            assert (found - other)[mask].abs().max() > 1e-3


@pytest.mark.parametrize("mode, passes", [("none", (0, 0)), ("r2", (0, 4)), ("r3", (4, 4))])
def test_replay_contexts_of_each_pass(moe, tmp_path, monkeypatch, mode, passes):
    """Two micro-batches an update, two updates a sampling: R3 replays all of the old pass and every update."""
    contexts = []

    def spy(model, routes):
        contexts.append((torch.is_grad_enabled(), routes))
        return replay_routing(model, routes)

    monkeypatch.setattr(rlvr_common, "replay_routing", spy)
    changes = {"num_minibatches": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    trainer = trained(tmp_path, moe, routing_replay=mode, **changes, **FP8)
    live = [routes for grad, routes in contexts if grad]
    assert (len(contexts) - len(live), len(live)) == passes
    for routes, seen in zip(live, trainer.seen if live else [], strict=True):
        assert torch.equal(routes, seen.inputs["old_routes" if mode == "r2" else "rollout_routes"])
    sampled = Counter(str(row.tolist()) for grad, routes in contexts if not grad for row in routes)
    arrived = Counter(str(row.tolist()) for seen in trainer.seen for row in seen.inputs["rollout_routes"])
    assert not sampled or sampled == arrived


def test_the_reference_policy_routes_natively(moe, tmp_path):
    seen = []

    class Spied(type(make_ours(tmp_path / "x", model=moe, max_steps=1))):
        def _compute_loss(self, model, inputs):
            seen.append(inputs)
            return super()._compute_loss(model, inputs)

    trainer = make_ours(
        tmp_path, model=moe, beta=0.05, num_minibatches=2, routing_replay="r3", max_steps=4, token_clip="tis", **FP8
    )
    trainer.__class__ = Spied
    trainer.train()
    model = load(moe)
    for x in seen:
        mask = x["completion_mask"].bool()
        with torch.no_grad():
            native, replayed = logps_by_hand(model, x), logps_by_hand(model, x, x["rollout_routes"])
        assert torch.allclose(x["ref_per_token_logps"][mask], native[mask], rtol=0, atol=2e-5)
        assert (x["ref_per_token_logps"] - replayed)[mask].abs().max() > 1e-3
    # what R2 would replay was recorded in the policy's pass, which came first, not in the reference's
    ids, tokens = batch_of(seen[2])
    assert routing_agreement(native_routes(model, seen[2]), seen[2]["old_routes"], tokens) < 1
    assert all(r["kl"] >= 0 for r in logged(trainer))


def native_routes(model, inputs):
    ids, tokens = batch_of(inputs)
    with record_routing(model) as recorder, torch.no_grad():
        model(input_ids=ids, attention_mask=tokens)
    return recorder.routes


# --- routes travel with their samples ---------------------------------------------------------------------------------


def coded(ids):
    """Token ids (...,) -> routes (..., L, K) that name them: another pair of experts for other ids and layers."""
    first = ids % E
    return torch.stack([torch.stack([first, (first + 1 + layer + ids // E % 3) % E], -1) for layer in range(L)], -2)


class Coded(Watched):
    """The engine claims routes that spell the tokens they belong to."""

    def _rollout(self, prompts, trainer):
        out = super()._rollout(prompts, trainer)
        ids = [p + c for p, c in zip(out["prompt_ids"], out["completion_ids"], strict=True)]
        self._sampled_routes = [coded(torch.tensor(row[:-1])).to(torch.uint8) for row in ids]
        self.sampled = getattr(self, "sampled", []) + ids
        return out


@pytest.mark.parametrize("minibatches, accumulation", [(1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("mode", ["none", "r3"])
def test_routes_meet_their_tokens_after_shuffle_and_split(moe, tmp_path, mode, minibatches, accumulation):
    changes = {"num_minibatches": minibatches, "gradient_accumulation_steps": accumulation, "max_steps": minibatches}
    trainer = trained(tmp_path, moe, Coded, routing_replay=mode, learning_rate=0.0, **changes, **FP8)
    assert len(trainer.seen) == minibatches * accumulation
    model, arrived, widths = load(moe), [], set()
    for seen in trainer.seen:
        x = seen.inputs
        ids, tokens = batch_of(x)
        assert len(ids) == 8 and x["rollout_routes"].shape == (*ids.shape, L, K)
        routes = signed_routes(x["rollout_routes"])
        followed = tokens.bool() & (tokens.cumsum(1) < tokens.sum(1, keepdim=True))  # all tokens but each last one
        assert torch.equal(routes[followed].long(), coded(ids[followed]))
        assert (routes[~followed] == -1).all()
        if mode == "r3":
            assert torch.equal(seen.routes[followed].long(), coded(ids[followed]))
        # the pass for old log-probs runs before the shuffle: its routes must have moved along
        assert ("old_routes" in x) == ("old_per_token_logps" in x) == (minibatches > 1)
        if mode == "none" and minibatches > 1:
            assert routing_agreement(x["old_routes"], native_routes(model, x), tokens) == 1
        arrived += [tuple(row[mask.bool()].tolist()) for row, mask in zip(ids, tokens, strict=True)]
        widths.update(tokens.sum(1).tolist())
    assert Counter(arrived) == Counter(map(tuple, trainer.sampled))  # each sample in one update, none lost or doubled
    assert len(trainer.sampled) == 8 * minibatches * accumulation and len(widths) > 2
    assert trainer.engine.version == 0 and trainer._counts["seq_sum"] == 8 * accumulation


@pytest.mark.parametrize("minibatches, mode", [(1, "r3"), (2, "r2"), (4, "r3")])
def test_micro_batches_do_not_change_a_run(moe, tmp_path, minibatches, mode):
    """The same 16 sequences an update as 1, 2 or 4 micro-batches: same loss, gradient, metrics and weights."""
    runs = []
    for accumulation in (1, 2, 4):
        size = {"per_device_train_batch_size": 16 // accumulation, "gradient_accumulation_steps": accumulation}
        changes = {"num_minibatches": minibatches, "routing_replay": mode, "max_steps": min(minibatches + 1, 4)}
        trainer = trained(tmp_path / str(accumulation), moe, **size, **changes, **SGD)
        runs.append((logged(trainer, skip="routing/replayed_rows"), weights(trainer)))
    for records, final in runs[1:]:
        assert largest_difference(final, runs[0][1]) < 2e-6
        for a, b in zip(records, runs[0][0], strict=True):
            assert a.keys() == b.keys()
            assert a == pytest.approx(b, abs=1e-5, rel=1e-4, nan_ok=True)
    first = {k: v for k, v in load(moe).state_dict().items() if k in runs[0][1]}
    assert largest_difference(first, runs[0][1]) > 1e-3
    assert minibatches == 1 or min(r["routing/old_agreement"] for r in runs[0][0]) < 1


def test_hidden_truncated_completions_keep_their_prompts_routes(moe, tmp_path):
    """--mask_truncated_completions hides completions without an end, in the attention too."""
    ended = {}

    class Ended(Watched):
        def _rollout(self, prompts, trainer):
            out = super()._rollout(prompts, trainer)
            for i in range(0, len(prompts), 3):  # every third one ends, after 4 tokens
                prompt = len(out["prompt_ids"][i])
                out["completion_ids"][i] = out["completion_ids"][i][:3] + [self.eos_token_ids[0]]
                out["logprobs"][i] = out["logprobs"][i][:4]
                self._sampled_routes[i] = self._sampled_routes[i][: prompt + 3]
                ended[i] = prompt
            return out

    for minibatches in (1, 2):
        changes = {"mask_truncated_completions": True, "routing_replay": "r3", "num_minibatches": minibatches}
        trainer = trained(tmp_path / str(minibatches), moe, Ended, max_steps=2, **changes, **FP8)
        for seen in trainer.seen:
            ids, tokens = batch_of(seen.inputs)
            recorded = recorded_rows(seen.inputs["rollout_routes"]).all(-1)
            for i in range(len(ids)):
                hidden = not seen.inputs["completion_mask"][i].any()
                assert recorded[i].sum() == tokens[i].sum() - (0 if hidden else 1)
                assert not (recorded[i] & ~tokens[i].bool()).any()
        assert ended and any(r["grad_norm"] > 0 for r in logged(trainer))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"routing_replay": "r4"}, "--routing_replay r4 is unknown: use none, r2 or r3"),
        ({"routing_replay": "r3", "use_vllm": True}, "--routing_replay r3: rollouts through --use_vllm carry no routes"),
        ({"num_minibatches": 2, "steps_per_generation": 4}, "--num_minibatches 2 sets steps_per_generation to 2: remove"),
        ({"num_minibatches": 2, "generation_batch_size": 32}, "--num_minibatches 2 sets steps_per_generation to 2: remove"),
        ({"num_minibatches": 0}, "--num_minibatches 0 must be at least 1"),
        ({"is_cap": 0.0}, "--is_cap 0.0 must be above 0"),
        ({"is_cap": -1.0}, "--is_cap -1.0 must be above 0"),
        ({"is_cap": math.nan}, "--is_cap nan must be above 0"),
        ({"length_norm": True, "aggregation": "token_mean"}, "--length_norm is --aggregation seq_mean_token_mean: remove"),
        ({"aggregation": "sum"}, "--aggregation sum is unknown"),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused_in_one_sentence(tmp_path, flags, words):
    with pytest.raises(ValueError) as error:
        MiniRLConfig(**options(tmp_path, use_cpu=True, **flags))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_gradloc_names_the_recipe_whose_flag_treats_it(tmp_path):
    for make, where in ((make_minirl, "grpo_tokenclip.py"), (make_ours, "")):
        folder = tmp_path / make.__name__
        trainer = make(folder, model=MODEL, gradloc="directional", per_device_train_batch_size=8)
        assert trainer._attachment.gradloc.clips_in == where


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_replay_on_a_dense_model_is_refused(tmp_path, mode):
    with pytest.raises(ValueError, match=f"^--routing_replay {mode}: the model is dense, .* use none$"):
        make_minirl(tmp_path, MODEL, routing_replay=mode, num_minibatches=2)


def test_r2_with_one_update_a_sampling_is_refused(moe, tmp_path):
    with pytest.raises(
        ValueError, match=r"^--routing_replay r2 with one update a sampling .*\(--num_minibatches 2\)$"
    ):
        make_minirl(tmp_path, moe, routing_replay="r2")
    make_minirl(tmp_path, moe, routing_replay="r2", num_iterations=2)  # two updates a sampling, by other means


def test_whether_old_log_probs_have_a_pass_is_known_as_trl_knows_it():
    """With --use_vllm alone TRL makes none: R2 has nothing to record, and a reference pass must not be taken for it."""

    def old_pass(steps, accumulation, iterations=1, vllm=False, correction=False):
        args = SimpleNamespace(
            steps_per_generation=steps, gradient_accumulation_steps=accumulation, use_vllm=vllm,
            vllm_importance_sampling_correction=correction,
        )  # fmt: skip
        return RLVRTrainer._old_pass(SimpleNamespace(args=args, num_iterations=iterations))

    assert not old_pass(1, 1) and not old_pass(4, 4) and not old_pass(2, 4)
    assert old_pass(2, 1) and old_pass(8, 4) and old_pass(1, 1, iterations=2)
    assert not old_pass(4, 4, vllm=True) and old_pass(4, 4, vllm=True, correction=True)


# --- replay that replays nothing --------------------------------------------------------------------------------------


class Sentinels(Watched):
    """An engine that recorded nothing."""

    def _rollout(self, prompts, trainer):
        out = super()._rollout(prompts, trainer)
        self._sampled_routes = [empty_routes(rows.shape, E) for rows in self._sampled_routes]
        return out


class Forgetful(Watched):
    """A rollout that was replaced and brings no routes."""

    def _rollout(self, prompts, trainer):
        out = super()._rollout(prompts, trainer)
        self._sampled_routes = None
        return out


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("broken, words", [(Sentinels, "nothing was replayed"), (Forgetful, "brought no routes")])
def test_replay_without_routes_is_an_error(moe, tmp_path, broken, words, minibatches):
    with pytest.raises(RuntimeError, match=words):
        trained(tmp_path, moe, broken, routing_replay="r3", num_minibatches=minibatches, max_steps=2)


def test_without_replay_missing_routes_cost_a_metric_only(moe, tmp_path):
    (record,) = logged(trained(tmp_path / "a", moe, Forgetful, max_steps=1))
    assert record["grad_norm"] > 0 and "routing/rollout_agreement" not in record
    (record,) = logged(trained(tmp_path / "b", moe, Sentinels, max_steps=1))
    assert record["grad_norm"] > 0 and record["routing/rollout_agreement"] is None  # nothing to compare


# --- metrics ----------------------------------------------------------------------------------------------------------


class Misrouted(Watched):
    """The first prompt token of every sequence is routed elsewhere: in MoE layer 1 by the engine, in 0 by pi_old."""

    def _rollout(self, prompts, trainer):
        out = super()._rollout(prompts, trainer)
        for rows in self._sampled_routes:
            rows[0, 1] = self.other(rows[0, 1])
        return out

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if "old_routes" in output:
            for i, start in enumerate(output["prompt_mask"].argmax(1).tolist()):
                output["old_routes"][i, start, 0] = self.other(output["old_routes"][i, start, 0])
        return output

    @staticmethod
    def other(ids):
        """A valid row with one expert in common."""
        unused = next(e for e in range(E) if e not in ids.tolist())
        return torch.stack([ids[1], ids.new_tensor(unused)])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_routing_metrics_of_planted_routes(moe, tmp_path, accumulation):
    changes = {"num_minibatches": 2, "gradient_accumulation_steps": accumulation, "learning_rate": 0.0, "max_steps": 2}
    for mode in ("none", "r3", "r2"):
        trainer = trained(tmp_path / mode, moe, Misrouted, routing_replay=mode, **changes)
        for step, record in enumerate(logged(trainer)):
            micro = [batch_of(seen.inputs)[1] for seen in trainer.seen if seen.step == step]
            tokens = sum(int(mask.sum()) for mask in micro)
            sequences = 8 * accumulation
            rollout, old = 1 - sequences / (tokens - sequences), 1 - sequences / tokens  # no route for last tokens
            if mode == "none":
                assert record["routing/rollout_agreement/layer_0"] == 1
                assert record["routing/rollout_agreement/layer_1"] == pytest.approx(rollout, abs=1e-6)
                assert record["routing/rollout_agreement"] == pytest.approx((1 + rollout) / 2, abs=1e-6)
                assert record["routing/old_agreement/layer_0"] == pytest.approx(old, abs=1e-6)
                assert record["routing/old_agreement/layer_1"] == 1
                assert record["routing/old_agreement"] == pytest.approx((1 + old) / 2, abs=1e-6)
                assert "routing/replayed_rows" not in record
            else:  # a forward of S tokens replays S - 1 rows of the engine's, or all rows of its own, padding included
                rows = L * (tokens - sequences) if mode == "r3" else L * sum(mask.numel() for mask in micro)
                assert record["routing/replayed_rows"] == rows / accumulation
            assert record["routing/bytes_per_token"] == L * K


def test_a_broken_log_prob_of_the_engine_shows(moe, tmp_path):
    class Broken(MiniRLTrainer):
        def _rollout(self, prompts, trainer):
            out = super()._rollout(prompts, trainer)
            out["logprobs"][0][0] = math.nan
            return out

    trainer = make_minirl(tmp_path, moe, trainer=Broken, max_steps=1, routing_replay="r3")
    trainer.train()
    first = trainer.state.log_history[0]
    for name in ("loss", "mismatch/k1", "mismatch/k3", "mismatch/extreme_frac", "omega/max", "rho/max"):
        assert math.isnan(first[name]), name
    assert first["routing/rollout_agreement"] == 1 and not math.isnan(first["entropy"])


def test_evaluation_routes_natively(moe, tmp_path):
    rows = load_math_rows("tiny:heldout", limit=4)
    losses = []
    for mode in ("none", "r3"):
        trainer = make_minirl(
            tmp_path / mode, moe, max_steps=2, num_minibatches=2, per_device_eval_batch_size=4, routing_replay=mode,
            learning_rate=0.0, **FP8,
        )  # fmt: skip
        losses.append(trainer.evaluate(rows)["eval_loss"])  # no training forward has run yet
        trainer.train()
        assert math.isfinite(trainer.evaluate(rows)["eval_loss"])
    assert losses[0] == losses[1]


# --- checkpointing, adapters, GradLoc ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_gradient_checkpointing_changes_nothing(moe, tmp_path, mode):
    changes = {"routing_replay": mode, "num_minibatches": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    runs = [
        trained(tmp_path / str(on), moe, gradient_checkpointing=on, **changes, **FP8, **SGD | {"learning_rate": 0.3})
        for on in (False, True)
    ]
    assert runs[1].model.is_gradient_checkpointing and not runs[0].model.is_gradient_checkpointing
    assert logged(runs[0]) == logged(runs[1])  # the same count of replayed rows too: a recompute is none
    assert equal(weights(runs[0]), weights(runs[1]))


def test_adapters_train_under_replay(moe, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"])
    trainer = trained(
        tmp_path, moe, peft_config=config, num_minibatches=2, routing_replay="r3", max_steps=4, learning_rate=1e-2
    )
    records = logged(trainer)
    assert all(r["grad_norm"] > 0 and r["routing/replayed_rows"] > 0 for r in records)
    assert records[2]["mismatch/k3"] < 1e-7  # the engine's copy is merged and new
    assert records[2]["routing/rollout_agreement"] == 1


class Spiked(MiniRLTrainer):
    """The least likely token of the last micro-batch gets a huge advantage at step 2, when native routing has moved."""

    def score(self, model, inputs):
        batch = super().score(model, inputs)
        if model.training and self.state.global_step == 1 and self.accelerator.sync_gradients:
            row, column = divmod(int(batch.logps.argmin()), batch.logps.shape[1])
            batch.advantages = batch.advantages.expand_as(batch.logps).clone()
            batch.advantages[row, column] = 100.0
            self.place = self.args.gradient_accumulation_steps - 1, row, column
        return batch


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_gradloc_under_replay_is_exact_and_reads_only(moe, tmp_path, mode):
    changes = {"num_minibatches": 2, "routing_replay": mode, "max_steps": 2, "gradient_accumulation_steps": 2}
    changes |= FP8 | {"learning_rate": 1e-2, "no_clip": True}  # the planted token shall not be masked
    runs = {}
    for method in ("off", "directional", "search"):
        flags = {} if method == "off" else {"gradloc": method, "gradloc_every": 1}
        runs[method] = make_minirl(tmp_path / method, moe, trainer=Spiked, **changes, **flags)
        runs[method].train()
        assert all(equal(a, b) for a, b in zip(everything(runs["off"]), everything(runs[method]), strict=True))
    assert runs["off"].state.log_history[1]["routing/old_agreement"] < 1
    directional, search = (reports_of(runs[method]) for method in ("directional", "search"))
    assert [r["step"] for r in directional] == [r["step"] for r in search] == [1, 2]
    assert all(r["certificate"] < 0.05 and r["method"].startswith("directional") for r in directional)
    assert top(directional[1]) == top(search[1]) == runs["off"].place
    assert directional[1]["tokens"][0]["share"] > 0.5
    for report, record in zip(directional, logged(runs["off"]), strict=True):
        assert report["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-4)


# --- resume -----------------------------------------------------------------------------------------------------------


class StopAt(TrainerCallback):
    """Ends a run early while its schedule still counts to max_steps, as a killed run does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


@pytest.mark.parametrize("mode, stop", [("r2", 2), ("r3", 3)])
def test_resume_inside_a_sampling_is_bit_for_bit(moe, tmp_path, mode, stop):
    """Four updates a sampling, stopped with mini-batches left that must be replayed as they were recorded."""
    changes = {"num_minibatches": 4, "routing_replay": mode, "save_strategy": "steps", "save_steps": stop, "rows": 12}
    changes |= FP8 | {"learning_rate": 3e-3}
    whole = make_minirl(tmp_path / "whole", moe, **changes)
    whole.train()
    half = make_minirl(tmp_path / "half", moe, **changes)
    half.add_callback(StopAt(stop))
    half.train()
    checkpoint = tmp_path / f"half/checkpoint-{stop}"
    state = torch.load(checkpoint / "rollout_state_0.pt", weights_only=True)
    assert state["micro_step"] == stop and len(state["buffered_inputs"]) == 4
    assert all({"old_routes", "rollout_routes", "old_per_token_logps"} <= x.keys() for x in state["buffered_inputs"])
    rest = make_minirl(tmp_path / "half", moe, **changes)
    rest.train(resume_from_checkpoint=str(checkpoint))
    assert rest.state.global_step == 6
    assert equal(weights(whole), weights(rest)) and equal(whole.optimizer.state_dict(), rest.optimizer.state_dict())
    assert logged(whole) == logged(rest) and len({r["loss"] for r in logged(whole)}) == 6
    assert logged(whole)[3]["routing/old_agreement"] < 1


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.5.down_proj.weight", "model.layers.0.mlp.gate.weight"])
def test_a_checkpoint_without_one_weight_is_refused(moe, tmp_path, name):
    changes = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    make_minirl(tmp_path, moe, **changes).train()
    path = tmp_path / "checkpoint-1" / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if k != name}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"checkpoint-1 does not hold \['model\.layers"):
        make_minirl(tmp_path, moe, **changes | {"max_steps": 2}).train(resume_from_checkpoint=str(path.parent))


# --- two processes ----------------------------------------------------------------------------------------------------

FSDP2 = [
    "--fsdp=full_shard",
    "--fsdp_config=" + json.dumps(
        {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"], "reshard_after_forward": True,
         "cpu_ram_efficient_loading": False}
    ),
]  # fmt: skip


SCRIPT = """
import sys
from contextlib import nullcontext
sys.path[:0] = {paths}
import minirl_sync, training, trl
from accelerate.state import AcceleratorState
from fsdp2_on_cpu import init_with_fsdp
AcceleratorState.__init__ = init_with_fsdp
minirl_sync.make_verifier = lambda args: nullcontext(training.length_reward)  # a random model answers nothing right
trl.trainer.grpo_trainer.shuffle_sequence_dict = lambda batch: batch
minirl_sync.main()
"""


def flags(moe, folder, processes, *more):
    return [
        f"--model_name_or_path={moe}", "--dataset=tiny", "--num_minibatches=3", "--routing_replay=r3", "--max_steps=4",
        "--num_generations=4", "--max_completion_length=10", "--optim=sgd", "--learning_rate=0.02", "--max_grad_norm=0.0",
        "--lr_scheduler_type=constant", "--warmup_steps=0", "--rollout_dtype=float32", "--save_strategy=no",
        "--report_to=none", "--gradient_checkpointing=false", f"--per_device_train_batch_size={16 // processes}",
        f"--output_dir={folder}", f"--expect_processes={processes}", *more,
    ]  # fmt: skip


def launch(moe, folder, *more):
    script = folder.parent / "script.py"
    script.write_text(SCRIPT.format(paths=[str(REPO), str(REPO / "recipes"), str(REPO / "tests")]))
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    command += flags(moe, folder, 2, *more)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, cwd=folder.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return read_metrics(folder / "metrics.jsonl"), load_file(folder / "final" / "model.safetensors")


@pytest.fixture
def one_process(moe, tmp_path, monkeypatch):
    """The recipe's main on one process. TRL shuffles each process's samples by themselves, so that a mini-batch would hold
    other samples than on two. Here the two shuffle nothing, and one process takes the mini-batches that they take."""

    def halves(batch):
        half = len(batch["prompt_ids"]) // 2
        order = torch.cat([torch.cat([part, half + part]) for part in torch.arange(half).chunk(3)])
        return {k: v[order] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in batch.items()}

    folder = tmp_path / "one"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(trl.trainer.grpo_trainer, "shuffle_sequence_dict", halves)
    monkeypatch.setattr(minirl_sync, "make_verifier", lambda args: nullcontext(length_reward))
    monkeypatch.setattr(sys, "argv", ["minirl_sync.py", *flags(moe, folder, 1)])
    minirl_sync.main()
    return read_metrics(folder / "metrics.jsonl"), load_file(folder / "final" / "model.safetensors")


def compare(one, two):
    records, others = one[0], two[0]
    assert len(records) == len(others) == 4
    prefixes = ("routing/", "minirl/", "ratio/", "omega/")
    names = {name for record in records for name in record if name.startswith(prefixes)}
    names = (names | {"loss", "grad_norm", "reward", "entropy", "mismatch/k3"}) - {"routing/replayed_rows"}
    assert {"routing/old_agreement/layer_1", "routing/rollout_agreement", "minirl/masked_frac"} <= names
    for a, b in zip(records, others, strict=True):
        for name in names & a.keys():
            assert a[name] == pytest.approx(b[name], abs=1e-5, rel=1e-4), (a["step"], name)
        assert a["routing/replayed_rows"] > b["routing/replayed_rows"] > 0  # rows a micro-batch, half as large
    assert any(r["grad_norm"] > 1e-3 for r in records) and records[2]["routing/old_agreement"] < 1
    assert one[1].keys() == two[1].keys() - {"lm_head.weight"}  # FSDP2 writes the tied head out
    assert max((one[1][k] - two[1][k]).abs().max().item() for k in one[1]) < 1e-5


@pytest.mark.slow
def test_two_processes_equal_one(moe, one_process, tmp_path):
    compare(one_process, launch(moe, tmp_path / "run", "--expect_distributed=ddp"))


@pytest.mark.slow
def test_fsdp2_equals_one_process(moe, one_process, tmp_path):
    compare(one_process, launch(moe, tmp_path / "run", *FSDP2, "--expect_distributed=fsdp2"))
