"""The ares_dapo recipe: advantages, rewards, dynamic sampling, optimizers, resume, the spectral monitor, refusals."""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from test_distributed import FSDP2
from trl import RLOOConfig, RLOOTrainer

import stability
from ares import Ares, spectral_stats
from ares_dapo import (
    AccuracyReward,
    AresDAPOConfig,
    AresDAPOTrainer,
    decoupled_advantages,
    leave_one_out,
    overlong_penalty,
)
from optimizers import make_optimizer
from rlvr_common import group_advantages, refuse_unused
from spectral_monitor import directions, gradient_spectra, matrix_type, read_spectra, summary
from training import (
    MODEL,
    REPO,
    EngineRollout,
    equal,
    history,
    make_ours,
    options,
    quiet,
    tiny_rows,
    tokenizer,
    weights,
)

NAN = math.nan


def digits(completions, solution=None, **kwargs):
    """A verdict that is right for about half of the samples: an even number of characters."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(len(text) % 2) for text in texts]


def make(folder, verifier=digits, peft_config=None, rows=64, model=MODEL, **changes):
    ours = {"dynamic_sampling": False} | changes
    args = AresDAPOConfig(**options(folder, **ours))
    words = tokenizer()
    return quiet(
        AresDAPOTrainer(model, args, verifier, tiny_rows(rows), processing_class=words, peft_config=peft_config)
    )


# --- advantages and rewards -------------------------------------------------------------------------------------------


def test_leave_one_out_against_a_loop():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, NAN, 0.25, 1.0, 1.0, 1.0, 1.0, 1.0])
    wanted = []
    for i, r in enumerate(rewards.tolist()):
        others = [x for j, x in enumerate(rewards.tolist()) if j // 4 == i // 4 and j != i and not math.isnan(x)]
        wanted.append(0.0 if math.isnan(r) else r - sum(others) / len(others))
    torch.testing.assert_close(leave_one_out(rewards, 4), torch.tensor(wanted))


def test_decoupled_advantages_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    parts = torch.rand(12, 2, generator=generator).double()
    parts[:, 1] *= 100  # the scale of a reward does not matter, its weight does
    weights_ = torch.tensor([1.0, 0.5])
    total = torch.zeros(12, dtype=torch.float64)
    for k in range(2):
        for g in range(3):
            group = parts[g * 4 : g * 4 + 4, k]
            total[g * 4 : g * 4 + 4] += weights_[k] * (group - group.mean()) / (group.std() + 1e-4)
    wanted = (total - total.mean()) / (total.std() + 1e-4)
    torch.testing.assert_close(decoupled_advantages(parts, 4, weights_), wanted)
    parts[5, 0] = NAN
    assert decoupled_advantages(parts, 4, weights_)[5] == 0


def test_overlong_penalty():
    lengths = torch.tensor([0.0, 30, 36, 42, 48])
    torch.testing.assert_close(overlong_penalty(lengths, 48, 12), torch.tensor([0.0, 0, 0, -0.5, -1]))


def test_the_overlong_reward_follows_the_length_in_force(tmp_path):
    trainer = make(tmp_path, max_completion_length=48, overlong_buffer=12, guard="warn", guard_stages="medium:50,full")
    reward, lengths = trainer.reward_funcs[1], (18, 21, 24, 36, 42, 48)
    completions = [[0] * n for n in lengths]
    assert trainer.guard.share == 0.5 and reward(completions) == [0.0, -0.5, -1.0, -1.0, -1.0, -1.0]
    trainer.guard.stages.index = 1
    assert trainer.guard.share == 1.0
    assert reward(completions) == [0.0, 0.0, 0.0, 0.0, -0.5, -1.0]


def test_random_reward_keeps_the_rate_and_forgets_the_answer():
    right = [1.0] * 300 + [0.0] * 700 + [None]

    def verifier(completions, solution, **kwargs):
        return right

    reward = AccuracyReward(verifier, random=True, seed=0)
    draws = reward(["x"] * 1001, ["y"] * 1001, trainer_state=object())
    assert draws[-1] is None and set(draws[:-1]) == {0.0, 1.0}
    assert abs(sum(draws[:-1]) / 1000 - 0.3) < 0.05 and abs(sum(draws[:300]) / 300 - 0.3) < 0.1
    assert reward(["x"] * 1001, ["y"] * 1001, trainer_state=object()) == draws
    reward.place = lambda: 1
    assert reward(["x"] * 1001, ["y"] * 1001, trainer_state=object()) != draws
    assert reward(["x"] * 1001, ["y"] * 1001) == right  # an evaluation


# --- training ---------------------------------------------------------------------------------------------------------


def test_grpo_with_adamw_equals_the_grpo_recipe(tmp_path):
    """The same samples, loss and weights as grpo_tokenclip.py without a clip, over six steps."""
    changes = {"scale_rewards": "group", "max_steps": 6}
    theirs = make_ours(tmp_path / "a", reward=digits, **changes)
    ours = make(tmp_path / "b", algorithm="grpo", optim_method="adamw", max_steps=6)
    theirs.train()
    ours.train()
    names = ("loss", "grad_norm", "reward")
    a, b = ([[r[n] for n in names] for r in t.state.log_history if "loss" in r] for t in (theirs, ours))
    assert len(a) == 6 and max(row[1] for row in a) > 0.01
    torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-6, rtol=1e-5)
    for x, y in zip(weights(theirs).values(), weights(ours).values(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=0)


@pytest.mark.parametrize("algorithm", ["dapo", "rloo", "reinforce_pp", "gdpo"])
def test_every_algorithm_trains_with_ares_and_the_advantages_it_says(tmp_path, algorithm):
    trainer = make(tmp_path, algorithm=algorithm, max_steps=2, overlong_buffer=4)
    seen = []
    original = trainer.advantages

    def watch(rewards, g):
        out = original(rewards, g)
        seen.append((rewards.clone(), trainer._parts.clone(), out))
        return out

    trainer.advantages = watch
    before = weights(trainer)
    trainer.train()
    assert not equal(before, weights(trainer))
    rewards, parts, out = seen[0]
    torch.testing.assert_close(rewards, parts.sum(1))
    wanted = {
        "dapo": lambda: group_advantages(rewards, 4, "group"),
        "rloo": lambda: leave_one_out(rewards, 4),
        "reinforce_pp": lambda: (rewards - rewards.mean()) / (rewards.std() + 1e-4),
        "gdpo": lambda: decoupled_advantages(parts, 4, torch.ones(2)),
    }[algorithm]()
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    record = next(r for r in trainer.state.log_history if "loss" in r)
    assert 1 <= record["ares/rank/mean"] <= 16 and record["ares/skipped"] == 0


class StockRLOO(RLOOTrainer):
    """TRL's, on the samples that our trainer draws: it has no rollout_func."""

    rollout = None

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields):
        self.rollout = self.rollout or EngineRollout()
        return self.rollout.sample(prompt_ids, self).completion_ids


@pytest.mark.parametrize(
    "changes", [{}, {"steps_per_generation": 2, "num_iterations": 2}], ids=["plain", "off_policy"]
)
def test_rloo_equals_trls_rloo_over_six_steps(tmp_path, changes):
    """Set equal: TRL's default takes 0.05 of a KL estimate off the reward, and this recipe has no KL. The rest agrees by default."""
    changes = {"learning_rate": 1e-4} | changes
    ours = make(tmp_path / "a", algorithm="rloo", optim_method="adamw", **changes)
    ours.train()
    args = RLOOConfig(**options(tmp_path / "b", use_cpu=True, bf16=False, beta=0.0, **changes))
    stock = quiet(StockRLOO(MODEL, digits, args, tiny_rows(64), processing_class=tokenizer()))
    stock.train()
    a, b = (torch.tensor(history(trainer, "loss", "grad_norm")) for trainer in (ours, stock))
    assert len(a) == 6 and (b[:, 1] > 0.01).sum() >= 4
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    for x, y in zip(weights(ours).values(), weights(stock).values(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=0)


def test_rloo_has_one_ratio_a_sequence(tmp_path):
    """Against the formula in a loop: -min(r A, clip(r) A) with r the product over the sequence, mean over sequences."""
    trainer = make(tmp_path, algorithm="rloo")
    torch.manual_seed(0)
    logps = (0.05 * torch.randn(4, 5)).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    clean = logps * mask
    old, advantages = torch.zeros(4, 5), torch.tensor([[1.0], [-1.0], [0.5], [-2.0]])
    scored = SimpleNamespace(
        logps=clean, old_logps=old, rollout_logps=old, mask=mask, advantages=advantages, entropies=old
    )
    trainer.score = lambda model, inputs: scored
    trainer.flush = lambda: None
    trainer._counts = {"seq_sum": 4}
    loss = trainer._compute_loss(None, {"accuracy": torch.zeros(4)})
    wanted = 0.0
    for i in range(4):
        r, a = clean[i].sum().exp().item(), advantages[i].item()
        wanted += -min(r * a, min(max(r, 0.8), 1.2) * a) / 4
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


def test_dynamic_sampling_fills_the_batch_by_accuracy_and_not_by_the_shaped_reward(tmp_path):
    """Half of the answers are always right, and the length penalty spreads their rewards: such prompts must still go."""
    easy = set(sorted({row["solution"] for row in tiny_rows(64)})[::2])

    def verifier(completions, solution, **kwargs):
        return [1.0 if gold in easy else float(i % 2) for i, gold in enumerate(solution)]

    trainer = make(tmp_path, verifier, dynamic_sampling=True, overlong_buffer=11, max_sampling_rounds=12, max_steps=3)
    batches = []
    score = trainer._generate_and_score_completions

    def watch(inputs):
        batches.append(score(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = watch
    trainer.train()
    assert len(batches) == 3
    for batch in batches:
        groups = batch["accuracy"].view(-1, 4)
        assert len(groups) == 2 and ((groups.mean(1) > 0) & (groups.mean(1) < 1)).all()
        assert (batch["advantages"].view(-1, 4).abs().sum(1) > 0).all()
    record = [r for r in trainer.state.log_history if "loss" in r]
    assert all(r["dynamic/unfilled_frac"] == 0 for r in record) and max(r["dynamic/rounds"] for r in record) > 1
    assert all(
        r["rollout/weights_changed"] == 1 for r in record[1:]
    )  # a refill is no sampling from weights that stand still
    assert all(
        abs(r["mismatch/k3"]) < 1e-6 for r in record
    )  # float32 engine: samples, tokens and log-probs belong together


def test_dynamic_sampling_keeps_the_sampling_mask_and_the_stage(tmp_path):
    """What is replayed travels with the groups that a refill keeps; a stage narrows the batch before it is filled."""
    seen = []

    class Watched(AresDAPOTrainer):
        def score(self, model, inputs):
            seen.append(len(inputs["advantages"]))
            return super().score(model, inputs)

    changes = {"top_k": 4, "keep_sampling_mask": True, "guard": "warn", "guard_stages": "small:1,full"}
    trainer = make(tmp_path, dynamic_sampling=True, per_device_train_batch_size=16, max_steps=2, **changes)
    trainer.__class__ = Watched
    stability.train(trainer)
    assert seen == [4, 16]
    for record in (r for r in trainer.state.log_history if "loss" in r):
        assert record["support/replayed_frac"] == 1 and record["mismatch/mean"] == pytest.approx(1, abs=1e-4)
    control = make(tmp_path / "sft", mode="sft", top_k=4, keep_sampling_mask=True, max_steps=1)
    control.train()
    assert control.state.log_history[0]["support/replayed_frac"] == 1


def test_dynamic_sampling_gives_up_with_advantage_zero(tmp_path):
    def verifier(completions, solution, **kwargs):
        return [1.0] * len(completions)

    trainer = make(tmp_path, verifier, dynamic_sampling=True, max_sampling_rounds=2, max_steps=1)
    before = weights(trainer)
    trainer.train()
    record = next(r for r in trainer.state.log_history if "loss" in r)
    assert record["dynamic/unfilled_frac"] == 1 and record["dynamic/rounds"] == 2 and record["grad_norm"] == 0
    assert equal(before, weights(trainer)) and trainer._refilled == 2


@pytest.mark.parametrize("dynamic", [True, False])
def test_resume_is_bit_for_bit(tmp_path, dynamic):
    changes = {"dynamic_sampling": dynamic, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_sampling_rounds": 3,
               "reward": "verifiable" if dynamic else "random", "spectral_every": 1}  # fmt: skip
    whole = make(tmp_path / "whole", **changes)
    whole.train()
    rest = make(tmp_path / "rest", **changes)
    rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert equal(weights(whole), weights(rest))
    assert equal(whole._ares.state_dict(), rest._ares.state_dict())
    assert whole._refilled == rest._refilled
    a, b = (read_spectra(tmp_path / name / "spectral.jsonl") for name in ("whole", "rest"))
    assert b and [record for record in a if record["step"] > 2] == b


@pytest.mark.parametrize("step", ["literal", "projected"])
def test_gradloc_looks_and_ares_steps_as_if_it_had_not(tmp_path, step):
    """GradLoc moves weights and gradients on its way and puts them back; Ares must not see it. LayerClip and the global clip in between."""
    options_ = {"ares_step": step, "max_steps": 3, "layer_clip": True, "max_grad_norm": 0.05}
    plain = make(tmp_path / "plain", **options_)  # each made just before it trains: that is where the seed is set
    plain.train()
    watched = make(tmp_path / "watched", gradloc="directional", gradloc_every=1, **options_)
    watched.train()
    assert equal(weights(plain), weights(watched))
    states = [trainer.optimizer.optimizer.state_dict()["state"] for trainer in (plain, watched)]
    for key, state in states[0].items():
        assert all(torch.equal(value, states[1][key][name]) for name, value in state.items())
    shares = [r["gradloc/certificate"] for r in watched.state.log_history if "gradloc/certificate" in r]
    assert len(shares) == 3 and max(shares) < 0.05


def test_sft_raises_the_likelihood_of_right_samples_of_the_first_weights(tmp_path):
    trainer = make(tmp_path, mode="sft", max_steps=4, optim_method="adamw")
    first = trainer._first.fingerprint
    trainer.train()
    trainer.sync_engine()
    assert trainer._first.fingerprint == first != trainer.engine.fingerprint
    losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    assert all(loss > 0 for loss in losses)
    batch = {"completion_mask": torch.ones(3, 4), "accuracy": torch.tensor([1.0, 0.0, NAN])}
    assert trainer._loss_mask(batch).sum(1).tolist() == [4, 0, 0]


@pytest.mark.parametrize("method", ["sgd", "rmsprop", pytest.param("muon"), pytest.param("galore")])
def test_baselines_train_and_resume(tmp_path, method):
    changes = {"optim_method": method, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "algorithm": "grpo"}
    whole = make(tmp_path / "whole", **changes)
    before = weights(whole)
    whole.train()
    assert not equal(before, weights(whole))
    rest = make(tmp_path / "rest", **changes)
    rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert equal(weights(whole), weights(rest))


@pytest.mark.parametrize("method", ["muon", "galore"])
def test_a_baseline_for_matrices_takes_no_stack_of_experts(method):
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(8, 8)])})
    model["layers"][0].experts = torch.nn.Parameter(torch.zeros(3, 8, 6))
    args = SimpleNamespace(
        optim_method=method, weight_decay=0.0, learning_rate=0.01, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8,
        rank_max=2, momentum=None, galore_gap=1, galore_scale=1.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"--optim_method {method} .*layers.0.experts is a stack of experts"):
        make_optimizer(model, args)


def test_muon_is_torchs_muon_on_the_matrices():
    weight, twin = (torch.nn.Parameter(torch.ones(8, 6)) for _ in range(2))
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Module()])})
    model["layers"][0].proj = torch.nn.Module()
    model["layers"][0].proj.weight = weight
    args = SimpleNamespace(optim_method="muon", weight_decay=0.1, learning_rate=0.01, adam_beta1=0.9, adam_beta2=0.999,
                           adam_epsilon=1e-8, momentum=None, rank_max=None)  # fmt: skip
    ours = make_optimizer(model, args)
    theirs = torch.optim.Muon([twin], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        weight.grad = torch.randn(8, 6, generator=generator)
        twin.grad = weight.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(weight.detach(), twin.detach(), atol=2e-3, rtol=0)


def test_adapters_train(tmp_path):
    from peft import LoraConfig

    with pytest.raises(ValueError, match="with LoRA: below half of the adapters' rank"):
        make(tmp_path, peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"), rank_max=4)
    trainer = make(
        tmp_path, peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"), rank_max=3, max_steps=2, spectral_every=1
    )
    trainer.train()
    record = next(r for r in trainer.state.log_history if "loss" in r)
    assert 1 <= record["ares/rank/mean"] <= 2 and record["spectral/top_share"] > 0


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"algorithm": "ppo"}, "--algorithm ppo is unknown"),
        ({"optim_method": "lion"}, "--optim_method lion is unknown"),
        ({"optim_method": "adamw", "rank_max": 8}, "--rank_max 8 is set, but --optim_method adamw never reads it"),
        ({"optim": "sgd"}, "--optim sgd is not read beside --optim_method ares"),
        ({"algorithm": "rloo", "aggregation": "token_mean"}, "one ratio a sequence"),
        ({"mode": "sft", "reward": "random"}, "right and wrong only"),
        ({"mode": "sft", "dynamic_sampling": True}, "remove --dynamic_sampling"),
        ({"overlong_buffer": 12}, "--overlong_buffer 12 must be 0 or less than"),
        ({"rank_max": 0}, "--rank_max 0 must be at least 1"),
        ({"max_sampling_rounds": 0}, "at least 1"),
        ({"spectral_every": -1}, "--spectral_every -1"),
        ({"spectral_top": 8}, "spectral is off"),
        ({"rank_ema": 1.5}, "--rank_ema 1.5 must be in"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        AresDAPOConfig(**options(tmp_path, **changes))


def test_flags_of_other_losses_are_refused(tmp_path):
    for name, value in (("beta", 0.1), ("scale_rewards", "batch"), ("delta", 2.0)):
        with pytest.raises(ValueError, match=f"--{name}"):
            refuse_unused(AresDAPOConfig(**options(tmp_path, **{name: value})), {"epsilon", "epsilon_high"})


@pytest.mark.parametrize("size", ["1.7b", "4b", "8b"])
def test_the_configurations_are_consistent(tmp_path, size):
    values = yaml.safe_load((REPO / "recipes" / "configs" / f"qwen3_{size}_ares.yaml").read_text())
    assert values.pop("model_name_or_path").lower().endswith(size)
    args = AresDAPOConfig(**values | {"output_dir": str(tmp_path), "report_to": "none", "bf16": False})
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32 * 12
    assert args.steps_per_generation * args.per_device_train_batch_size == 512 * 12 and args.dynamic_sampling
    refuse_unused(args, {"epsilon", "epsilon_high"})


def test_defaults_of_the_algorithms(tmp_path):
    def settled(**changes):
        args = AresDAPOConfig(**options(tmp_path, **changes))
        return args.aggregation, args.epsilon_high, args.dynamic_sampling

    assert settled() == ("token_mean", 0.28, True)
    assert settled(algorithm="grpo") == ("seq_mean_token_mean", 0.2, False)
    assert settled(algorithm="rloo") == ("seq_sum", 0.2, False)
    assert settled(mode="sft") == ("token_mean", 0.28, False)


# --- the spectral monitor ---------------------------------------------------------------------------------------------


def test_the_monitor_sees_the_gradient_before_any_clip(tmp_path):
    changes = {
        "spectral_every": 2,
        "spectral_top": 3,
        "layer_clip": True,
        "gradloc": "directional",
        "max_grad_norm": 1e-3,
    }
    trainer = make(tmp_path, algorithm="grpo", optim_method="sgd", max_steps=3, **changes)
    seen = {}
    clip = trainer.accelerator.clip_grad_norm_  # the monitor's, which is the outermost

    def before(parameters, max_norm, *args, **kwargs):
        if trainer.state.global_step == 0:
            seen.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.dim() == 2})
        return clip(parameters, max_norm, *args, **kwargs)

    trainer.accelerator.clip_grad_norm_ = before
    trainer.train()
    lines = read_spectra(tmp_path / "spectral.jsonl")
    assert [line["step"] for line in lines] == [1, 3] and lines[0]["top"] == 3
    assert len(lines[0]["matrices"]) == 28 and not any("embed" in name for name in lines[0]["matrices"])
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.3.mlp.down_proj.weight"):
        wanted = spectral_stats(seen[name], top=3)
        for key, value in lines[0]["matrices"][name].items():
            assert value == pytest.approx(wanted[key.replace("_0.", "@0.")], abs=1e-6)
    shared = {f"spectral/{key}" for key in lines[0]["matrices"][name]} & set(trainer.state.log_history[0])
    assert len(shared) == 5  # the file and the metrics use the same names
    assert (tmp_path / "spectral.png").stat().st_size > 10_000
    records = [r for r in trainer.state.log_history if "loss" in r]
    mean = sum(m["top_share"] for m in lines[0]["matrices"].values()) / 28
    assert records[0]["spectral/top_share"] == pytest.approx(mean, abs=1e-5) and "spectral/top_share" not in records[1]


def test_the_monitor_treats_experts_one_by_one_and_marks_what_is_broken():
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Module()])})
    model["layers"][0].experts = torch.nn.Parameter(torch.zeros(3, 8, 6))
    model["layers"][0].proj = torch.nn.Linear(6, 6, bias=False)
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 8, 6, generator=generator)
    stack[1] = 0  # an expert that no token chose has no spectrum
    model["layers"][0].experts.grad = stack
    model["layers"][0].proj.weight.grad = torch.full((6, 6), NAN)
    spectra = gradient_spectra(model, top=2)
    assert spectra["layers.0.proj.weight"] is None
    wanted = (spectral_stats(stack[0], 2)["top_share"] + spectral_stats(stack[2], 2)["top_share"]) / 2
    assert spectra["layers.0.experts"]["top_share"] == pytest.approx(wanted)
    names = {
        name.removeprefix("spectral/") for name in summary(spectra)
    }  # one name, in the metrics and in spectral.jsonl
    assert (
        names == {"top_share", "entropy_rank", "rank_0.5", "rank_0.7", "rank_0.9"} <= set(spectra["layers.0.experts"])
    )


@pytest.mark.parametrize(("sides", "top"), [((96, 64), 2), ((2048, 1024), 32), ((4096, 4096), 32), ((96, 8), 1)])
def test_the_top_share_is_of_few_of_the_directions_that_a_matrix_has(sides, top):
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(*sides, bias=False, device="meta")])})
    assert directions(model) == top


def test_a_statistic_that_one_matrix_lacks_is_left_out_of_the_mean():
    """Of a matrix above 2048 the sketch gives no entropy rank, and no rank for a level it does not reach: a mean of those is no number,
    and the guard would take it for a broken run."""
    whole, flat = (
        {key.replace("@", "_"): value for key, value in spectral_stats(torch.eye(40), top=2, **options).items()}
        for options in ({}, {"exact": False, "sketch": 8})
    )
    assert math.isinf(flat["rank_0.9"]) and math.isnan(flat["entropy_rank"])
    assert summary({"a": whole, "b": flat, "c": None}) == {"spectral/top_share": pytest.approx(0.05)}


def test_matrix_types():
    assert matrix_type("model.layers.3.self_attn.q_proj.weight") == "q_proj"
    assert matrix_type("model.layers.3.mlp.experts.gate_up_proj") == "gate_up_proj"
    assert matrix_type("base_model.model.model.layers.0.self_attn.v_proj.lora_A.default.weight") == "v_proj.lora_A"


# --- two processes ----------------------------------------------------------------------------------------------------


def launch(processes, folder, *changes, script="recipes/ares_dapo.py"):
    env = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RECIPE": "ares_dapo",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = (command if processes > 1 else [sys.executable]) + [
        str(REPO / script), "--max_steps=3", "--num_generations=4", "--max_completion_length=16", "--eval_problems=6", "--eval_samples=1",
        "--warmup_steps=0", "--learning_rate=1e-3", "--max_sampling_rounds=2", "--save_steps=2", "--spectral_every=1", "--gradloc=off",
        f"--per_device_train_batch_size={16 // processes}", f"--output_dir={folder}", f"--expect_processes={processes}", *changes,
    ]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, cwd=folder.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    from safetensors.torch import load_file

    return read_spectra(folder / "spectral.jsonl"), load_file(folder / "final" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_equal_one_and_resume(tmp_path, kind):
    """Without refilling, whose rows depend on which process lacks them."""
    changes = ["--dynamic_sampling=false", *(FSDP2 if kind == "fsdp2" else [])]
    script = "tests/fsdp2_on_cpu.py" if kind == "fsdp2" else "recipes/ares_dapo.py"
    one = launch(1, tmp_path / "one", "--dynamic_sampling=false")
    two = launch(2, tmp_path / "two", *changes, f"--expect_distributed={kind}", script=script)
    for a, b in zip(one[0], two[0], strict=True):
        for name, stats in a["matrices"].items():
            assert stats["top_share"] == pytest.approx(b["matrices"][name]["top_share"], abs=1e-3)
    assert max((one[1][k] - two[1][k]).abs().max().item() for k in one[1]) < 1e-4
    again = launch(
        2,
        tmp_path / "again",
        *changes,
        f"--expect_distributed={kind}",
        f"--resume_from_checkpoint={tmp_path}/two/checkpoint-2",
        script=script,
    )
    assert all(torch.equal(two[1][k], again[1][k]) for k in two[1])


@pytest.mark.slow
def test_dynamic_sampling_on_two_processes(tmp_path):
    spectra, _ = launch(2, tmp_path / "run", "--expect_distributed=ddp")
    assert len(spectra) == 3


def test_optimizer_reaches_the_trainer_with_its_options(tmp_path):
    trainer = make(
        tmp_path, ares_step="projected", rank_mode="fixed", rank_ema=0.5, learning_rate=3e-4, weight_decay=0.05
    )
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, Ares)
    group = optimizer.param_groups[0]
    assert (group["step"], group["rank_mode"], group["rank_ema"], group["lr"], group["rank_max"]) == (
        "projected",
        "fixed",
        0.5,
        3e-4,
        16,
    )
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.05, 0.05, 0.0]
