"""The trainer base and the recipe end to end: parity with stock TRL, invariances, resume, metrics, LoRA."""

import json
import math
import warnings

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from rlvr_common import RLVRTrainer, run
from rlvr_launch import complete_checkpoints
from rlvr_report import read_metrics
from training import MODEL, equal, history, largest_difference, make_ours, make_stock, numbers, weights

# --- parity with stock TRL over 6 steps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ours, stock",
    [
        ({}, {"loss_type": "grpo", "scale_rewards": "none"}),
        ({"beta": 0.05}, {"loss_type": "grpo", "scale_rewards": "none", "beta": 0.05}),
        (
            {
                "aggregation": "token_mean",
                "scale_rewards": "group",
                "gradient_accumulation_steps": 2,
                "epsilon_high": 0.28,
            },
            {"loss_type": "dapo", "scale_rewards": "group", "gradient_accumulation_steps": 2, "epsilon_high": 0.28},
        ),
        (
            {"scale_rewards": "batch", "steps_per_generation": 2, "num_iterations": 2, "beta": 0.05},
            {
                "loss_type": "grpo",
                "scale_rewards": "batch",
                "steps_per_generation": 2,
                "num_iterations": 2,
                "beta": 0.05,
            },
        ),
    ],
    ids=["plain", "kl", "token_mean-group-accumulation", "off_policy-kl"],
)
def test_six_steps_equal_stock_trl(tmp_path, ours, stock):
    slow = {"learning_rate": 1e-4}  # 1e-3 amplifies float32 rounding past the tolerance within six steps
    a = make_ours(tmp_path / "ours", **ours, **slow)
    a.train()
    b = make_stock(tmp_path / "stock", **stock, **slow)  # only now: both shuffle with the global generator
    b.train()
    a, b = history(a, "loss", "grad_norm"), history(b, "loss", "grad_norm")
    assert len(a) == len(b) == 6 and sum(norm > 1e-3 for _, norm in b) >= 4  # a step of equal rewards has none
    assert [x[0] for x in a] == pytest.approx([x[0] for x in b], abs=1e-6)
    assert [x[1] for x in a] == pytest.approx([x[1] for x in b], abs=1e-5)


def test_parity_would_notice_another_loss(tmp_path):
    a, b = (
        make_ours(tmp_path / "a", scale_rewards="none"),
        make_stock(tmp_path / "b", scale_rewards="group", loss_type="grpo"),
    )
    a.train()
    b.train()
    a, b = sum(history(a, "grad_norm"), []), sum(history(b, "grad_norm"), [])
    assert a != pytest.approx(b, abs=1e-5)


# --- invariances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "seq_mean_token_mean", pytest.param("seq_sum", marks=pytest.mark.slow)]
)
def test_gradient_accumulation_does_not_change_the_run(tmp_path, aggregation):
    runs = []
    for per_device, accumulation in ((16, 1), (8, 2), (2, 8)):
        trainer = make_ours(
            tmp_path / str(accumulation),
            max_steps=3,
            aggregation=aggregation,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulation,
            token_clip="icepop",  # float32 rollouts: 8-bit rounding would turn 1e-7 into other tokens
            optim="sgd",  # Adam's first step is sign(g): it would hide a wrong scale, and blow up rounding where g = 0
            learning_rate=0.5 if aggregation != "seq_sum" else 0.05,
            max_grad_norm=0.0,
        )
        trainer.train()
        runs.append((weights(trainer), history(trainer, "loss", "grad_norm")))
    for other in runs[1:]:
        assert largest_difference(runs[0][0], other[0]) < 2e-6
        for x, y in zip(runs[0][1], other[1], strict=True):
            assert x == pytest.approx(y, abs=2e-6, rel=2e-5)
    start = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict()
    assert largest_difference(runs[0][0], {k: start[k] for k in runs[0][0]}) > 1e-4  # the runs did move


def test_masked_tokens_stay_in_the_denominator(tmp_path):
    trainer = make_ours(tmp_path, max_steps=1, token_clip="icepop", seq_clip_low=2.0, seq_clip_high=3.0)
    trainer.train()  # rho is about 1: every sequence is dropped
    ((loss, norm),) = history(trainer, "loss", "grad_norm")
    assert loss == 0 and norm == 0 and trainer._counts["seq_mean_token_mean"] == 8
    assert trainer.state.log_history[0]["seq_clip/masked_frac"] == 1


def test_same_seed_same_run_and_other_seed_other_run(tmp_path):
    runs = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        trainer = make_ours(tmp_path / name, max_steps=2, seed=seed, rollout_dtype="fp8", token_clip="icepop")
        trainer.train()
        runs.append(weights(trainer))
    assert equal(runs[0], runs[1]) and not equal(runs[0], runs[2])


# --- clips at work ----------------------------------------------------------------------------------------------------


class Shifted(RLVRTrainer):
    """Plants a mismatch: the first token of every sampled sequence claims a log-prob that is `shift` too low."""

    shift = 0.0

    def _rollout(self, prompts, trainer):
        out = super()._rollout(prompts, trainer)
        out["logprobs"] = [[logps[0] - self.shift, *logps[1:]] for logps in out["logprobs"]]
        return out


@pytest.mark.parametrize("shift, masked", [(0.0, False), (math.log(4.0), False), (math.log(6.0), True), (-1.0, True)])
def test_icepop_masks_the_planted_token_and_only_it(tmp_path, shift, masked):
    from grpo_tokenclip import GRPOTokenClipTrainer

    trainer = make_ours(tmp_path, max_steps=1, token_clip="icepop")
    trainer.__class__ = type("Planted", (GRPOTokenClipTrainer, Shifted), {"shift": shift})
    trainer.rollout_func = trainer._rollout
    trainer.train()
    record = trainer.state.log_history[0]
    tokens = trainer._counts["token_mean"]
    assert record["token_clip/masked_frac"] == pytest.approx(8 / tokens if masked else 0.0, abs=1e-9)
    expected = math.exp(shift)
    assert (record["omega/max"] if shift >= 0 else record["omega/min"]) == pytest.approx(expected, rel=1e-4)
    assert record["mismatch/extreme_frac"] == pytest.approx(8 / tokens if abs(shift) > math.log(2) else 0, abs=1e-9)


def test_low_precision_rollouts_show_a_mismatch_and_float32_none(tmp_path):
    k3 = {}
    for dtype in ("float32", "fp8"):
        trainer = make_ours(tmp_path / dtype, max_steps=1, rollout_dtype=dtype)
        trainer.train()
        k3[dtype] = trainer.state.log_history[0]["mismatch/k3"]
    assert k3["float32"] < 1e-7 and k3["fp8"] > 1e-5


# --- resume -----------------------------------------------------------------------------------------------------------

RESUME = {
    "rows": 6,  # 4 prompts a sampling: the data order starts anew every second step
    "steps_per_generation": 2,  # and a checkpoint at step 3 lies in the middle of a sampling
    "num_iterations": 1,
    "token_clip": "icepop",
    "rollout_dtype": "fp8",
    "save_strategy": "steps",
    "save_steps": 3,
    "beta": 0.02,
}


@pytest.mark.parametrize("peft", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_resume_is_bit_for_bit(tmp_path, peft):
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1) if peft else None
    changes = RESUME | {"peft_config": config, "disable_dropout": False}
    whole = make_ours(tmp_path / "whole", **changes)
    run(whole)
    half = make_ours(tmp_path / "half", **changes)
    half.add_callback(StopAt(3))
    run(half)
    rest = make_ours(tmp_path / "half", resume_from_checkpoint=str(tmp_path / "half/checkpoint-3"), **changes)
    run(rest)
    assert rest.state.global_step == 6
    assert equal(weights(whole), weights(rest))
    assert equal(whole.optimizer.state_dict(), rest.optimizer.state_dict())
    assert numbers(tmp_path / "whole/metrics.jsonl") == numbers(tmp_path / "half/metrics.jsonl")
    prompts = [r["omega/max"] for r in read_metrics(tmp_path / "whole/metrics.jsonl")]
    assert len(set(prompts)) == 6  # the six steps really differ, so equality above says something


def test_dropout_is_off_unless_asked_for(tmp_path):
    """TRL's own LoRA has dropout 0.05, in old and new log-probs alike: ratio and mismatch would read its noise."""
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    trainer = make_ours(tmp_path, peft_config=config, steps_per_generation=2, max_steps=1)
    trainer.train()
    record = trainer.state.log_history[0]
    assert record["mismatch/k3"] < 1e-6 and [record["ratio/min"], record["ratio/max"]] == pytest.approx(
        [1, 1], abs=1e-4
    )


@pytest.mark.parametrize("missing", ["rollout_state_0.pt", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_resume_refuses_an_incomplete_checkpoint(tmp_path, missing):
    first = make_ours(tmp_path, **RESUME | {"max_steps": 3})
    first.train()
    (tmp_path / "checkpoint-3" / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        make_ours(tmp_path, **RESUME).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_resume_refuses_other_rows(tmp_path):
    first = make_ours(tmp_path, **RESUME | {"max_steps": 3})
    first.train()
    with pytest.raises(ValueError, match="other training rows"):
        make_ours(tmp_path, **RESUME | {"rows": 7}).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_resume_of_a_finished_run_and_of_another_recipe_is_refused(tmp_path):
    make_ours(tmp_path, **RESUME | {"max_steps": 3}).train()
    checkpoint = str(tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match="nothing is left to train"):
        make_ours(tmp_path, **RESUME | {"max_steps": 3}).train(resume_from_checkpoint=checkpoint)
    other = make_ours(tmp_path, **RESUME)
    other.__class__ = type("OtherRecipe", (type(other),), {})
    with pytest.raises(ValueError, match="made by GRPOTokenClipTrainer and this is OtherRecipe"):
        other.train(resume_from_checkpoint=checkpoint)


def test_a_stop_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    trainer = make_ours(tmp_path, **RESUME | {"save_total_limit": 1})
    monkeypatch.setattr(trainer, "_save_rollout_state", stop_at(trainer, 6))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (tmp_path / "checkpoint-3" / "rollout_state_0.pt").exists()


def test_a_checkpoint_counts_once_every_process_has_written_its_part(tmp_path, monkeypatch):
    trainer = make_ours(tmp_path, **RESUME | {"max_steps": 3})
    seen, wait = [], trainer.accelerator.wait_for_everyone

    def waits():
        seen.append((tmp_path / "checkpoint-3/rollout_state_0.tmp").exists() and not complete_checkpoints(tmp_path))
        wait()

    monkeypatch.setattr(trainer.accelerator, "wait_for_everyone", waits)
    trainer.train()
    assert True in seen and [p.name for p in complete_checkpoints(tmp_path)] == ["checkpoint-3"]


def stop_at(trainer, step):
    save = trainer._save_rollout_state

    def stopped(trial):
        if trainer.state.global_step == step:
            raise KeyboardInterrupt
        save(trial)

    return stopped


# --- LoRA -------------------------------------------------------------------------------------------------------------


def test_lora_trains_adapters_and_the_engine_samples_from_the_merged_weights(tmp_path):
    config = LoraConfig(r=4, target_modules="all-linear")
    trainer = make_ours(tmp_path, max_steps=3, peft_config=config, learning_rate=1e-2)
    run(trainer)
    assert trainer.state.log_history[2]["mismatch/k3"] < 1e-7  # a stale or unmerged copy would disagree
    assert trainer.state.log_history[2]["rollout/weights_changed"] == 1
    assert (tmp_path / "final" / "adapter_model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict()
    trained = trainer.model.get_base_model().state_dict()
    frozen = [k for k in base if k in trained]
    assert frozen and all(torch.equal(base[k], trained[k]) for k in frozen)


# --- broken numbers and empty groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_a_broken_log_prob_shows_in_the_metrics(tmp_path, logging_steps):
    from grpo_tokenclip import GRPOTokenClipTrainer

    class Broken(GRPOTokenClipTrainer):
        def _rollout(self, prompts, trainer):
            out = super()._rollout(prompts, trainer)
            if self.state.global_step == 0:
                out["logprobs"][0][0] = math.nan
            return out

    trainer = make_ours(tmp_path, max_steps=2, logging_steps=logging_steps)
    trainer.__class__ = Broken
    trainer.rollout_func = trainer._rollout
    run(trainer)
    first = read_metrics(tmp_path / "metrics.jsonl")[0]
    for name in ("mismatch/k1", "mismatch/k3", "mismatch/extreme_frac", "omega/max", "rho/max"):
        assert math.isnan(first[name]), name
    assert not math.isnan(first["entropy"])


@pytest.mark.parametrize("reward", [0.3, None])
def test_groups_of_equal_or_missing_rewards_have_no_gradient_and_are_counted(tmp_path, reward):
    trainer = make_ours(
        tmp_path,
        max_steps=1,
        num_generations=7,
        per_device_train_batch_size=7,
        reward=lambda completions, **kwargs: [reward] * len(completions),
        scale_rewards="group",
    )
    trainer.train()
    record = trainer.state.log_history[0]
    assert record["grad_norm"] == 0 and record["frac_reward_zero_std"] == 1


def test_fewer_rows_than_one_sampling_needs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gives 1 rows, but one sampling takes 2 prompts"):
        make_ours(tmp_path, rows=1)


# --- what a run writes ------------------------------------------------------------------------------------------------


def test_run_writes_metrics_curve_and_model(tmp_path, capsys):
    from rlvr_common import load_math_rows

    trainer = make_ours(tmp_path, max_steps=2, eval_samples=2, token_clip="tis", rollout_dtype="int8", eval_every=1)
    run(trainer, load_math_rows("tiny:heldout", limit=5))
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1, 2, 2]
    assert ["eval/accuracy" in r for r in records] == [True, True, False, True]
    for name in ("reward", "entropy", "grad_norm", "mismatch/k1", "mismatch/k3", "omega/p99", "rho/p01", "ratio/max"):
        assert isinstance(records[1][name], float), name
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final").num_parameters() > 0
    out = capsys.readouterr().out
    for text in (
        "2 prompts x 4 generations = 8 sequences",
        "held-out accuracy before",
        "held-out accuracy after",
        "curve.png",
    ):
        assert text in out


def test_metrics_show_non_finite_numbers_as_valid_json(tmp_path):
    from rlvr_report import to_json

    line = to_json({"step": 1, "loss": math.nan, "grad_norm": math.inf, "reward": 0.5})
    assert json.loads(line) == {"step": 1, "loss": "nan", "grad_norm": "inf", "reward": 0.5}
    (tmp_path / "m.jsonl").write_text(line + "\n")
    (record,) = read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(record["loss"]) and math.isinf(record["grad_norm"])


class StopAt(__import__("transformers").TrainerCallback):
    """Ends a run early while its schedule still counts to max_steps, as a killed run does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True
        return control


@pytest.mark.parametrize("learning_rate, warned", [(0.0, 1), (1e-3, 0)])
def test_weights_that_never_change_are_warned_of_once(tmp_path, learning_rate, warned):
    trainer = make_ours(tmp_path, max_steps=7, learning_rate=learning_rate, max_completion_length=4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.train()
    assert sum("used unchanged weights" in str(w.message) for w in seen) == warned
    changed = [r["rollout/weights_changed"] for r in trainer.state.log_history if "rollout/weights_changed" in r]
    assert changed == [float(not warned)] * 6
