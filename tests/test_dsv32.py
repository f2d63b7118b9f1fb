"""The DeepSeek-V3.2 recipe: its loss by plain loops, parity with stock TRL, its block of switches, all four mechanisms at work."""

import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from test_losses import batch as random_batch
from test_losses import exact, gradient, leaf

import dsv32_stable
import stability
from dsv32_stable import DSV32Config, DSV32Trainer, RLStability, gather_dotted
from guard_drills import events
from rlvr_common import aggregate, sequence_divergence
from rlvr_launch import REPO
from stability_control import parse_schedule, scheduled
from training import (
    MODEL,
    EngineRollout,
    equal,
    history,
    largest_difference,
    length_reward,
    make_stock,
    options,
    quiet,
    save_moe,
    tiny_rows,
    tokenizer,
    weights,
)

OFF = {"consistency": {"keep_routing": False, "keep_sampling_mask": False}}
PLAIN = {
    "unbiased_kl": {"enabled": False}, "sequence_masking": {"enabled": False},
} | OFF  # fmt: skip


def make_dsv32(folder, model=MODEL, block=OFF, rows=64, reward=length_reward, trainer=DSV32Trainer, **changes):
    settings = {"guard": "off", "top_p": 1.0, "num_minibatches": None} | changes
    args = DSV32Config(**options(folder, rl_stability=block, **settings))
    return quiet(trainer(model, args, reward, tiny_rows(rows), processing_class=tokenizer()))


# --- the loss ---------------------------------------------------------------------------------------------------------


def loss_by_hand(b, ref, beta, delta, cap, eps, unbiased, masking):
    """Eq. 5, 7, 8, 9 in plain loops, value only. Denominators: |o_i| and the number of sequences."""
    total = 0.0
    for i, mask in enumerate(b.mask.tolist()):
        places = [t for t, m in enumerate(mask) if m]
        p, mu, r, a = (x[i].tolist() for x in (b.logps, b.rollout, ref, b.advantages.expand_as(b.logps)))
        divergence = sum(mu[t] - p[t] for t in places) / max(len(places), 1)
        keep = 0.0 if masking and a[0] < 0 and divergence > delta else 1.0
        for t in places:
            ratio = math.exp(p[t] - mu[t])
            policy = min(ratio * a[t], min(max(ratio, 1 - eps), 1 + eps) * a[t])
            k3 = math.exp(r[t] - p[t]) - (r[t] - p[t]) - 1
            kl = (min(ratio, cap) if unbiased else 1.0) * k3
            total += (-keep * policy + beta * kl) / len(places)
    return total / len(b.mask)


class Stub(DSV32Trainer):
    """The recipe's own _compute_loss on log-probs of our choosing."""

    def __init__(self, b, ref, block, beta):
        self.b, self.ref, self.beta = b, ref, beta
        self.epsilon_low = self.epsilon_high = 0.2
        self.args = SimpleNamespace(block=RLStability.read(block), schedule=None, aggregation="seq_mean_token_mean")
        self.tracked, self.step_inputs = {}, [None]
        self.accelerator = SimpleNamespace(gather=lambda x: x, process_index=0)

    def score(self, model, inputs):
        return SimpleNamespace(
            logps=self.b.logps, old_logps=self.b.old, rollout_logps=self.b.rollout, ref_logps=self.ref, mask=self.b.mask,
            advantages=self.b.advantages, entropies=self.b.logps.detach() * 0,
        )  # fmt: skip

    def track(self, name, values, mask=None, quantiles=False):
        self.tracked[name] = values.detach() if mask is None else values.detach()[mask.bool()]

    def flush(self):
        pass

    def normalizer(self, how):
        return float(len(self.b.mask))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("masking", [True, False])
def test_the_loss_is_the_papers(seed, unbiased, masking):
    b = random_batch(seed)
    b.logps = leaf(b.logps)
    ref = b.old + 0.3 * torch.randn(b.old.shape, dtype=b.old.dtype, generator=torch.Generator().manual_seed(seed))
    block = {
        "unbiased_kl": {"enabled": unbiased, "clip_ratio": 1.2},
        "sequence_masking": {"enabled": masking, "divergence_threshold": 0.05},
    }
    stub = Stub(b, ref, block, beta=0.7)
    loss = stub._compute_loss(None, None)
    assert loss.item() == pytest.approx(loss_by_hand(b, ref, 0.7, 0.05, 1.2, 0.2, unbiased, masking), abs=1e-6)
    (g,) = gradient(loss, b.logps)
    steps = 0
    for i, t in b.mask.nonzero().tolist()[::3]:  # the gradient by differences of the hand-made value, the mask held
        values = []
        for sign in (1, -1):
            moved = b.logps.detach().clone()
            moved[i, t] += sign * 1e-6
            c = SimpleNamespace(logps=moved, rollout=b.rollout, mask=b.mask, advantages=b.advantages)
            values.append(loss_by_hand(c, ref, 0.7, 0.05, 1.2, 0.2, unbiased, masking))
        slope = (values[0] - values[1]) / 2e-6
        if abs(slope) < 10:  # a difference across the threshold of eq. 9 is no slope
            assert g[i, t].item() == pytest.approx(slope, abs=1e-4)
            steps += 1
    assert steps > 3


def test_the_sequence_mask_touches_the_policy_term_and_no_denominator():
    b = random_batch(3)
    b.advantages = -b.advantages.abs()
    ref = b.old
    everything = {"sequence_masking": {"enabled": True, "divergence_threshold": 0.0}}
    b.rollout = b.logps + 1.0  # all divergent: only the KL is left
    stub = Stub(b, ref, everything, beta=0.5)
    loss = stub._compute_loss(None, None)
    from rlvr_common import unbiased_kl

    kl = 0.5 * unbiased_kl(b.logps, b.rollout, ref, 5.0)
    exact(loss.double(), aggregate(kl, b.mask, "seq_mean_token_mean", float(len(b.mask))).double())
    assert stub.tracked["off_policy_mask/masked_frac"].mean() == 1
    half = Stub(b, ref, {"sequence_masking": {"divergence_threshold": 0.0, "min_keep_ratio": 0.5}}, beta=0.5)
    half._compute_loss(None, None)
    masked = half.tracked[
        "off_policy_mask/masked_frac"
    ].sum()  # a sequence without tokens is kept, and not among these
    assert 0 < masked <= len(b.mask) // 2


# --- the floor over an optimizer step ---------------------------------------------------------------------------------

# every sequence with A < 0 that drifted at all is dropped, down to a floor; one sampling a step of 16 sequences, however split
FLOOR = {
    "block": {"sequence_masking": {"divergence_threshold": 0.0, "min_keep_ratio": 0.8}} | OFF, "beta": 0.0, "optim": "sgd",
    "learning_rate": 0.5, "max_grad_norm": 0.0, "max_steps": 3, "rollout_dtype": "int8", "reward": length_reward,
}  # fmt: skip


def step_values(trainer):
    """Of each step, what may not depend on the split; and the weights after the last."""
    names = ("loss", "grad_norm", "off_policy_mask/masked_frac", "off_policy_mask/divergence/p50")
    return history(trainer, *names), weights(trainer)


def close(a, b):
    assert len(a[0]) == len(b[0]) == 3
    for x, y in zip(a[0], b[0], strict=True):
        assert x == pytest.approx(y, abs=1e-5, rel=1e-4)
    assert largest_difference(a[1], b[1]) < 1e-5


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory):
    trainer = make_dsv32(tmp_path_factory.mktemp("unsplit"), **FLOOR, per_device_train_batch_size=16)
    trainer.train()
    return step_values(trainer)


@pytest.mark.parametrize("size", [8, 4])
def test_the_floor_is_one_of_the_step_and_not_of_its_micro_batches(tmp_path, unsplit, size):
    trainer = make_dsv32(tmp_path, **FLOOR, per_device_train_batch_size=size, gradient_accumulation_steps=16 // size)
    seen = []
    inner = trainer.score

    def score(model, inputs):
        batch = inner(model, inputs)
        if torch.is_grad_enabled():
            rows = zip(batch.logps.tolist(), batch.rollout_logps.tolist(), batch.mask.tolist(), strict=True)
            drift = [sum(m - p for p, m, on in zip(*row, strict=True) if on) / max(sum(row[2]), 1) for row in rows]
            seen.append([(a < 0, d) for a, d in zip(batch.advantages[:, 0].tolist(), drift, strict=True)])
        return batch

    trainer.score = score
    trainer.train()
    mine = step_values(trainer)
    close(mine, unsplit)
    differ = 0
    for step, (_, _, masked, _) in enumerate(mine[0]):  # plain loops over the whole step
        batches = seen[step * 16 // size : (step + 1) * 16 // size]
        bad = [sum(a and d > 0 for a, d in batch) for batch in batches]
        allowed = 16 - math.ceil(0.8 * 16)
        assert masked * 16 == pytest.approx(min(sum(bad), allowed))
        differ += min(sum(bad), allowed) != sum(min(b, size - math.ceil(0.8 * size)) for b in bad)
    assert differ > 0  # a floor of each micro-batch would have dropped another number


def test_the_pass_before_the_step_leaves_no_trace_where_the_floor_does_not_bind(tmp_path):
    """It replays routes and supports as the loss does, GradLoc looks past it, and metrics count once."""
    moe, runs, before, live = save_moe(tmp_path / "moe"), [], [], []
    for share in (0.0, 1e-9):
        block = {"sequence_masking": {"divergence_threshold": 0.0, "min_keep_ratio": share}}
        trainer = make_dsv32(
            tmp_path / str(share), moe, block, beta=0.01, top_p=0.9, rollout_dtype="int8",
            per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2, gradloc="directional", gradloc_every=1,
            bf16=True,
        )  # fmt: skip
        if share:
            measure, score = trainer.step_divergences, trainer.score

            def kept(model, batch, measure=measure):
                before.append(measure(model, batch))
                return before[-1]

            def scored(model, inputs, score=score):
                batch = score(model, inputs)
                if torch.is_grad_enabled():
                    live.append(sequence_divergence(batch.logps, batch.rollout_logps, batch.mask))
                return batch

            trainer.step_divergences, trainer.score = kept, scored
        trainer.train()
        clock = re.compile("time|second")
        log = [{k: v for k, v in record.items() if not clock.search(k)} for record in trainer.state.log_history]
        runs.append((weights(trainer), repr(log)))
        assert all(record["grad_norm"] > 1e-3 for record in log if "grad_norm" in record)
    assert equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert len(before) == 2 and torch.equal(torch.cat(before)[:, :, :1], torch.stack(live)) and torch.stack(live).any()


@pytest.mark.parametrize(
    "ours, stock",
    [
        ({}, {}),
        ({"block": PLAIN | {"sequence_masking": {"divergence_threshold": 1e-4}}}, {"off_policy_mask_threshold": 1e-4}),
        ({"beta": 0.1, "block": PLAIN | {"unbiased_kl": {"clip_ratio": None}}}, {"beta": 0.1}),
    ],
    ids=["plain", "sequence_mask", "unbiased_kl"],
)
def test_six_steps_equal_stock_trl(tmp_path, ours, stock):
    """Float32 rollouts, so that TRL's pi_old and our mu are one distribution; two updates a sampling."""
    both = {"steps_per_generation": 2, "learning_rate": 2e-4}
    a = make_dsv32(tmp_path / "a", **{"block": PLAIN, "beta": 0.0} | ours | both)
    a.train()
    b = make_stock(
        tmp_path / "b", reward=length_reward, loss_type="grpo", scale_rewards="none",
        **{"use_bias_correction_kl": True, **stock}, **both,
    )  # fmt: skip
    b.train()
    a, b = history(a, "loss", "grad_norm"), history(b, "loss", "grad_norm")
    assert len(a) == 6 and sum(norm > 1e-3 for _, norm in b) >= 4  # all of a mini-batch may be dropped
    assert [x[0] for x in a] == pytest.approx([x[0] for x in b], abs=1e-6)
    assert [x[1] for x in a] == pytest.approx([x[1] for x in b], abs=2e-5)


# --- the block --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"unbiased": {}}, "rl_stability.unbiased: nobody reads it"),
        ({"unbiased_kl": True}, "rl_stability.unbiased_kl: nobody reads it as it is"),
        (
            {"unbiased_kl": {"ratio": 1}},
            "rl_stability.unbiased_kl.ratio: nobody reads it; use enabled, estimator, clip_ratio",
        ),
        ({"unbiased_kl": {"enabled": 1}}, "enabled 1 must be true or false"),
        ({"unbiased_kl": {"estimator": "k3"}}, "estimator 'k3' is unknown"),
        ({"unbiased_kl": {"clip_ratio": 0.5}}, "clip_ratio 0.5 must be a number in"),
        ({"sequence_masking": {"min_keep_ratio": 2}}, "min_keep_ratio 2 must be a number in"),
        ("on", "must hold nested keys"),
    ],
)
def test_the_block_is_checked(tree, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RLStability.read(tree)


def test_switches_are_independent_and_dotted_flags_win(tmp_path):
    rest, tree = gather_dotted(
        [
            "--beta",
            "0.1",
            "--rl_stability.unbiased_kl.enabled",
            "false",
            "--rl_stability.sequence_masking.divergence_threshold=0.3",
        ]
    )
    assert rest == ["--beta", "0.1"]
    args = DSV32Config(
        str(tmp_path), rl_stability={"unbiased_kl": {"clip_ratio": 2}, "consistency": {"keep_routing": False}}
    )
    args.override(tree)
    assert args.block == RLStability.read(
        {
            "unbiased_kl": {"enabled": False, "clip_ratio": 2}, "sequence_masking": {"divergence_threshold": 0.3},
            "consistency": {"keep_routing": False},
        }
    )  # fmt: skip
    assert args.routing_replay == "none" and args.keep_sampling_mask
    args.override({"consistency": {"keep_sampling_mask": False}})
    assert not args.keep_sampling_mask and not args.block.unbiased_kl.enabled and args.routing_replay == "none"
    assert (
        DSV32Config(str(tmp_path), rl_stability='{"unbiased_kl": {"enabled": false}}').block.unbiased_kl.enabled
        is False
    )
    for bad in (["--rl_stability.x", "1"], ["--rl_stability.unbiased_kl.enabled"]):
        with pytest.raises(ValueError, match="--rl_stability"):
            gather_dotted(bad)
    with pytest.raises(ValueError, match="rl_stability.consistency's business"):
        DSV32Config(str(tmp_path), routing_replay="r2")


def test_the_kl_strength_by_schedule(tmp_path):
    assert [scheduled(parse_schedule("0:0.5,2:0,3:0.1"), step) for step in range(5)] == [0.5, 0.5, 0, 0.1, 0.1]
    for bad in ("1:0.1", "0:0.1,0:0.2", "0", "0:x", ""):
        with pytest.raises(ValueError, match="--beta_schedule"):
            parse_schedule(bad)
    trainer = make_dsv32(tmp_path, beta_schedule="0:0,2:0.5", max_steps=3)
    trainer.train()
    assert [r["kl/beta"] for r in trainer.state.log_history if "kl/beta" in r] == [0, 0, 0.5]
    assert "beta" not in trainer.controls()


def test_switches_and_thresholds_change_while_it_runs(tmp_path):
    trainer = make_dsv32(tmp_path, guard="warn", beta=0.1, max_steps=2)
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "control.yaml").write_text(
        "beta: 0\nrl_stability:\n  unbiased_kl: {enabled: false, clip_ratio: null}\n  sequence_masking: {min_keep_ratio: 3}\n"
        "  consistency: {keep_routing: false}\n"
    )
    stability.train(trainer)
    assert (
        trainer.beta == 0
        and not trainer.args.block.unbiased_kl.enabled
        and trainer.args.block.unbiased_kl.clip_ratio is None
    )
    assert trainer.args.block.sequence_masking.min_keep_ratio == 0
    told = {(e["level"], e.get("name")) for e in events(tmp_path, "control")}
    assert told == {
        ("info", "beta"), ("info", "rl_stability.unbiased_kl.enabled"), ("info", "rl_stability.unbiased_kl.clip_ratio"),
        ("warn", "rl_stability.sequence_masking.min_keep_ratio"), ("warn", None),
    }  # fmt: skip


# --- all four at work -------------------------------------------------------------------------------------------------


def test_all_four_mechanisms_on_the_tiny_moe(tmp_path):
    trainer = make_dsv32(
        tmp_path, str(REPO / "tiny" / "qwen3_moe"), {"sequence_masking": {"divergence_threshold": 0.0}}, top_p=0.9, guard="warn",
        num_minibatches=2, max_steps=4, rollout_dtype="fp8", beta=0.01,
    )  # fmt: skip
    stability.train(trainer)
    last = [r for r in trainer.state.log_history if "loss" in r][-1]
    assert last["routing/replayed_rows"] > 0 and last["support/replayed_frac"] == 1
    assert "kl" in last and 0 <= last["off_policy_mask/masked_frac"] <= 1
    # pi_old and mu differ by fp8 alone: neither the kept mass nor other experts are in the mismatch
    assert last["mismatch/mean"] == pytest.approx(1.0, abs=0.05)


def test_a_dense_untruncated_run_says_what_is_off(tmp_path, capsys):
    trainer = make_dsv32(tmp_path, block={}, max_steps=1)
    out = capsys.readouterr().out
    assert "the model is dense" in out and "sampling is not truncated" in out
    assert trainer.args.routing_replay == "none" and not trainer.args.keep_sampling_mask
    assert EngineRollout is not None and dsv32_stable.CHECKS.keys() == {
        "unbiased_kl",
        "sequence_masking",
        "consistency",
    }


@pytest.mark.slow
def test_the_default_run_passes_its_acceptance(tmp_path):
    """`accelerate launch recipes/dsv32_stable.py` as a user starts it: four minutes on two idle cores."""
    command = [
        "accelerate",
        "launch",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    done = subprocess.run(
        [*command, str(REPO / "recipes/dsv32_stable.py"), "--output_dir", str(tmp_path / "run")],
        cwd=tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert " 0 fail," in done.stdout and sys.version_info
    gain = float(re.search(r"([+-][\d.]+) points", done.stdout).group(1))
    assert gain > 5
    assert json.loads((tmp_path / "run/guard.json").read_text())["rollbacks"] == []
