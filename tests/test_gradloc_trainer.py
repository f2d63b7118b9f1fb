"""GradLoc attached to trainers: read-only over whole runs, resume, stock TRL, SFT, a plain loop, flags, broken folders."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from gradloc import GradLoc, main
from gradloc_report import check_report, load_spikes
from gradloc_trainer import Attachment
from grpo_tokenclip import GRPOTokenClipConfig, GRPOTokenClipTrainer
from rlvr_common import load_math_rows, run
from training import MODEL, TIMES, equal, make_ours, make_stock, numbers, quiet, tokenizer, weights

SPIKES = (5, 12)  # optimizer steps


class Planted(GRPOTokenClipTrainer):
    """The least likely token of the last micro-batch gets a huge advantage at two steps."""

    def score(self, model, inputs):
        batch = super().score(model, inputs)
        step = self.state.global_step + 1
        if model.training and step in SPIKES and self.accelerator.sync_gradients:
            row, column = divmod(int(batch.logps.argmin()), batch.logps.shape[1])
            batch.advantages = batch.advantages.expand_as(batch.logps).clone()
            batch.advantages[row, column] = 100.0
            self.places[step] = self.args.gradient_accumulation_steps - 1, row, column
        return batch


def planted(folder, **changes):
    trainer = make_ours(folder, **{"max_steps": 20, "learning_rate": 1e-4} | changes)
    trainer.__class__, trainer.places = Planted, {}
    return trainer


def everything(trainer):
    """What a run leaves behind, GradLoc's own metrics and wall-clock times left out."""
    logs = [
        {
            k: str(v)
            for k, v in record.items()
            if not k.startswith("gradloc/") and k not in TIMES and not k.startswith("eval_")
        }
        for record in trainer.state.log_history
    ]
    noise = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    return weights(trainer), trainer.optimizer.state_dict(), noise, logs


def reports_of(trainer):
    return load_spikes(Path(trainer.args.output_dir) / "gradloc")


def top(report):
    token = report["tokens"][0]
    return token["micro_batch"], token["sequence"], token["position"]


# --- read-only --------------------------------------------------------------------------------------------------------

LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)


@pytest.mark.parametrize(
    ("changes", "methods"),
    [
        ({}, ("directional", "search")),
        (
            {
                "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
                "token_clip": "icepop", "beta": 0.02, "rollout_dtype": "fp8", "max_steps": 8,
            },
            ("directional",),
        ),
        ({"peft_config": LORA, "disable_dropout": False, "beta": 0.02, "max_steps": 6}, ("directional",)),
        pytest.param({"peft_config": LORA, "disable_dropout": False}, ("search",), marks=pytest.mark.slow),
        pytest.param({"aggregation": "token_mean", "layer_clip": True}, ("directional", "search"), marks=pytest.mark.slow),
    ],
    ids=["plain", "accumulation-off_policy", "lora-dropout", "lora-search", "layer_clip"],
)  # fmt: skip
def test_twenty_steps_are_the_same_bits_with_and_without(tmp_path, changes, methods):
    plain = planted(tmp_path / "off", **changes)
    plain.train()
    expected = everything(plain)
    assert not (tmp_path / "off" / "gradloc").exists()
    for method in methods:
        trainer = planted(tmp_path / method, gradloc=method, gradloc_every=1, **changes)
        trainer.train()
        for a, b in zip(expected, everything(trainer), strict=True):
            assert equal(a, b)
        reports = {r["step"]: r for r in reports_of(trainer)}
        moving = [r["step"] for r in plain.state.log_history if r.get("grad_norm", 0) > 0]
        assert (
            list(reports) == moving and {*trainer.places} <= set(moving) and len(moving) > 0.6 * plain.state.max_steps
        )
        for step, report in reports.items():
            check_report(report)
            record = next(r for r in trainer.state.log_history if r["step"] == step)
            assert report["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-4)
            assert record["gradloc/top1_share"] == pytest.approx(report["top1_share"])
            if method == "directional":
                assert report["certificate"] < 0.05 and report["method"].startswith("directional")
                assert sum(t["share"] for t in report["tokens"][:10]) <= report["top10_share"] + 1e-9
        assert list(trainer.places) == [s for s in SPIKES if s <= trainer.args.max_steps]
        for step in trainer.places:
            assert top(reports[step]) == trainer.places[step]
            assert reports[step]["tokens"][0]["share"] > 0.5 and reports[step]["tokens"][0]["layers"]


def test_the_comparison_would_notice_a_difference(tmp_path):
    runs = []
    for name, shift in (("a", 0.0), ("b", 1e-7)):
        trainer = planted(tmp_path / name, max_steps=3)
        with torch.no_grad():
            trainer.model.model.norm.weight[0] += shift
        trainer.train()
        runs.append(everything(trainer))
    assert not equal(runs[0][0], runs[1][0]) and not equal(runs[0][3], runs[1][3])


def test_only_training_forwards_are_recorded(tmp_path, monkeypatch):
    """Neither generation, nor pi_old, nor the reference, nor an evaluation: one call a micro-batch, and none is kept."""
    calls, check = [], GradLoc.check

    def counted(self, model, step=None):
        calls.append(len(self.calls))
        assert len(self.losses) == len(self.calls)
        report = check(self, model, step)
        assert self.calls == [] and self.losses == []
        return report

    monkeypatch.setattr(GradLoc, "check", counted)
    trainer = make_ours(
        tmp_path, gradloc="directional", max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        steps_per_generation=4, beta=0.05, eval_every=1, eval_samples=1, learning_rate=1e-4,
    )  # fmt: skip
    run(trainer, load_math_rows("tiny:heldout", limit=3))
    assert calls == [2] * 4


# --- when, and what is logged -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.0}], ids=["clipped", "no-global-clip"])
def test_a_spike_triggers_by_itself_and_only_then_metrics_appear(tmp_path, options, capsys):
    trainer = planted(tmp_path, gradloc="directional", max_steps=12, learning_rate=1e-5, **options)
    trainer._attachment.gradloc.trigger.warmup = 4
    trainer.train()
    looked = [r["step"] for r in trainer.state.log_history if "gradloc/top1_share" in r]
    assert looked == [5] and trainer._attachment.gradloc.trigger.suppressed == 1  # step 12 lies in the cooldown
    record = trainer.state.log_history[4]
    assert {k for k in record if k.startswith("gradloc/")} == {
        "gradloc/top1_share", "gradloc/top10_share", "gradloc/certificate", "gradloc/time_ratio",
    }  # fmt: skip
    (report,) = reports_of(trainer)
    assert report["trigger"]["reason"] == "adaptive" and top(report) == trainer.places[5]
    printed = capsys.readouterr().out
    assert report["sentence"] in printed and str(tmp_path / "gradloc" / report["page"]) in printed
    assert (tmp_path / "gradloc" / report["page"]).stat().st_size > 5000


def test_a_report_holds_what_the_trainer_knew(tmp_path):
    trainer = planted(tmp_path, gradloc="directional", gradloc_every=5, max_steps=5, rollout_dtype="fp8")
    seen, score = {}, Planted.score

    def keep(self, model, inputs):
        batch = score(self, model, inputs)
        if self.state.global_step == 4:
            seen.update(inputs=inputs, batch=batch)
        return batch

    trainer.__class__ = type("Kept", (Planted,), {"score": keep})
    trainer.train()
    (report,) = reports_of(trainer)
    inputs, batch, token = seen["inputs"], seen["batch"], report["tokens"][0]
    _, *place = trainer.places[5]
    row, place = place[0], tuple(place)
    assert token["token_id"] == int(inputs["completion_ids"][place])
    assert token["token"] == tokenizer().decode([token["token_id"]])
    assert token["logp"] == pytest.approx(batch.logps[place].item(), abs=1e-6)
    assert token["rollout_logp"] == pytest.approx(float(batch.rollout_logps[place]), abs=1e-6)
    assert token["omega"] == pytest.approx(np.exp(token["logp"] - token["rollout_logp"]), rel=1e-5)
    log_omega = (batch.logps - batch.rollout_logps)[row][inputs["completion_mask"][row].bool()]
    assert token["rho"] == pytest.approx(log_omega.mean().exp().item(), rel=1e-4) and token["rho"] != 1
    assert token["advantage"] == pytest.approx(float(inputs["advantages"][row]))
    assert token["reward"] == pytest.approx(float(inputs["rewards"][row])) and token["version"] == 4
    prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
    (sequence,) = [s for s in report["sequences"] if s["sequence"] == row]
    assert sequence["prompt"] == tokenizer().decode(prompt)
    ids = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()].tolist()
    assert sequence["tokens"] == [tokenizer().decode([i]) for i in ids] and sequence["first_position"] == 0
    assert report["num_sequences"] == 8 and report["num_tokens"] == int(inputs["completion_mask"].sum())


def test_a_broken_log_prob_of_the_engine_is_named(tmp_path):
    class Broken(GRPOTokenClipTrainer):
        def _rollout(self, prompts, trainer):
            out = super()._rollout(prompts, trainer)
            if self.state.global_step == 1:
                out["logprobs"][5][2] = float("nan")
            return out

        def score(self, model, inputs):
            rows = inputs["sampling_per_token_logps"].isnan().any(1).nonzero()
            if self.state.global_step == 1:
                broken.extend(rows.flatten().tolist())  # TRL shuffles the sequences
            return super().score(model, inputs)

    broken = []
    trainer = make_ours(tmp_path, max_steps=3, token_clip="icepop", gradloc="directional")
    trainer.__class__ = Broken
    trainer.rollout_func = trainer._rollout
    trainer.train()
    first = reports_of(trainer)[0]
    assert first["step"] == 2 and first["cause"] == "N" and first["trigger"]["reason"] == "non-finite"
    assert first["offender"]["where"] == "loss" and first["offender"]["tensor"] == "rollout_logps"
    assert len(broken) == 1 and first["offender"]["position"] == 2 and top(first) == (0, broken[0], 2)


def test_no_page_is_overwritten(tmp_path):
    for _ in range(2):
        planted(tmp_path, gradloc="directional", gradloc_every=5, max_steps=5).train()
    pages = sorted(p.name for p in (tmp_path / "gradloc").glob("look_*.html"))
    assert len(pages) == 2 and all("step000005" in name for name in pages)
    assert len((tmp_path / "gradloc" / "spikes.jsonl").read_text().splitlines()) == 2


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "gradloc").write_text("a file is in the way")
    runs = []
    for name, options in (("a", {}), ("b", {"gradloc": "directional", "gradloc_every": 2})):
        trainer = planted(tmp_path / name, max_steps=5, **options)
        if options:
            with pytest.warns(UserWarning, match="GradLoc report of step 2 not written"):
                trainer.train()
        else:
            trainer.train()
        runs.append(weights(trainer))
    assert equal(*runs) and trainer.state.global_step == 5
    assert trainer._attachment.gradloc.last.page is None


# --- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_triggers_and_clips_as_one_that_never_stopped(tmp_path):
    from test_trainer import StopAt

    changes = {
        "max_steps": 8, "save_strategy": "steps", "save_steps": 4, "steps_per_generation": 2, "rollout_dtype": "fp8",
        "gradloc": "directional", "gradloc_every": 3, "gradloc_cooldown": 4, "layer_clip": True,
        "layer_clip_alpha": 1.2, "layer_clip_beta": 0.5,
    }  # fmt: skip

    def make(folder, **more):
        trainer = planted(tmp_path / folder, **changes, **more)
        trainer._attachment.gradloc.trigger.warmup = 3
        return trainer

    whole = make("whole")
    run(whole)
    half = make("half")
    half.add_callback(StopAt(4))
    run(half)
    rest = make("half", resume_from_checkpoint=str(tmp_path / "half/checkpoint-4"))
    run(rest)
    assert equal(weights(whole), weights(rest))
    assert equal(whole.optimizer.state_dict(), rest.optimizer.state_dict())
    assert equal(whole._attachment.state_dict(), rest._attachment.state_dict())
    logs = [
        {step: {k: v for k, v in r.items() if k != "gradloc/time_ratio"} for step, r in numbers(path).items()}
        for path in (tmp_path / "whole/metrics.jsonl", tmp_path / "half/metrics.jsonl")
    ]
    assert logs[0] == logs[1]
    assert any(name.startswith("layer_clip/") for name in logs[0][8])
    spikes = [
        [{k: r[k] for k in ("step", "trigger", "grad_norm", "tokens", "layers")} for r in load_spikes(tmp_path / name)]
        for name in ("whole", "half")
    ]
    assert spikes[0] == spikes[1] and {3, 5, 6} <= {r["step"] for r in spikes[0]}
    assert len(whole._attachment.state_dict()["gradloc"]["layer_history"]) > 4


def test_a_checkpoint_without_gradloc_resumes_with_it_and_the_other_way_round(tmp_path):
    base = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    for name, first, then in (
        ("on", {}, {"gradloc": "directional", "gradloc_every": 1}),
        ("off", {"gradloc": "directional", "layer_clip": True}, {}),
        ("other", {"layer_clip": True}, {"gradloc": "search"}),
    ):
        make_ours(tmp_path / name, **base, **first).train()
        trainer = make_ours(tmp_path / name, **base, **then)
        trainer.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-1"))
        assert trainer.state.global_step == 2


# --- other trainers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_stock_grpo(tmp_path, accumulation):
    options = {
        "max_steps": 3, "per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation,
        "loss_type": "dapo", "learning_rate": 1e-4,
    }  # fmt: skip
    plain = make_stock(tmp_path / "plain", **options)
    plain.train()
    trainer = make_stock(tmp_path / "watched", **options)
    attachment = GradLoc(tmp_path / "spikes", tokenizer=tokenizer(), every_n_steps=1).attach(trainer)
    assert isinstance(attachment, Attachment)
    trainer.train()
    for a, b in zip(everything(plain), everything(trainer), strict=True):
        assert equal(a, b)
    reports = load_spikes(tmp_path / "spikes")
    assert [r["step"] for r in reports] == [1, 2, 3]
    for report in reports:
        assert report["certificate"] < 0.05 and report["num_sequences"] == 8
        token = report["tokens"][0]
        assert token["omega"] == pytest.approx(1.0, abs=1e-3) and token["grad_norm"] > 0 and token["prompt_id"]
        assert token["advantage"] is not None and token["position"] < 12
    assert "gradloc/certificate" in trainer.state.log_history[0]


def sft_trainer(folder, **options):
    rows = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(10, 18) for b in range(30, 32)]
    args = SFTConfig(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-4, report_to="none",
        logging_steps=1, use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
        seed=1, **options,
    )  # fmt: skip
    data = Dataset.from_list(rows)
    return quiet(
        SFTTrainer(MODEL, args, train_dataset=data, eval_dataset=data.select([0]), processing_class=tokenizer())
    )


def test_sft(tmp_path):
    plain = sft_trainer(tmp_path / "plain", eval_strategy="steps", eval_steps=1)
    plain.train()
    trainer = sft_trainer(tmp_path / "watched", eval_strategy="steps", eval_steps=1)
    gradloc = GradLoc(tmp_path / "spikes", tokenizer=tokenizer(), every_n_steps=1)
    batches, compute_loss = [], trainer.compute_loss

    def keep(model, inputs, *args, **kwargs):
        if model.training:
            batches.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = keep
    gradloc.attach(trainer)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    trainer.train()
    for a, b in zip(everything(plain), everything(trainer), strict=True):
        assert equal(a, b)
    reports = load_spikes(tmp_path / "spikes")
    assert [r["step"] for r in reports] == [1, 2, 3, 4] and all(r["certificate"] < 0.05 for r in reports)
    assert reports[0]["not_judged"][0].startswith("A.1 and A.2")  # no engine sampled
    for report, batch in zip(reports, batches, strict=True):
        counted = int((batch["labels"][:, 1:] != -100).sum())
        assert report["num_tokens"] == counted == sum(len(s["tokens"]) for s in report["sequences"])
        for token in report["tokens"]:  # column t holds the log-prob of token t + 1
            place = token["sequence"], token["position"] + 1
            assert token["token_id"] == int(batch["input_ids"][place]) == int(batch["labels"][place])
            assert token["weight"] == pytest.approx(-1 / counted, rel=1e-4)
    with torch.no_grad():
        logps = model(input_ids=batches[0]["input_ids"], attention_mask=batches[0]["attention_mask"]).logits
        logps = logps.log_softmax(-1)
    for token in reports[0]["tokens"]:
        row, column = token["sequence"], token["position"]
        assert token["logp"] == pytest.approx(float(logps[row, column, token["token_id"]]), abs=1e-4)
    assert "gradloc/top10_share" in trainer.state.log_history[0]


def test_a_trainer_without_trls_metrics_logs_layer_clip(tmp_path):
    rows = [{"input_ids": [5, 6, 7, i + 8], "labels": [5, 6, 7, i + 8]} for i in range(8)]
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to="none", logging_steps=1,
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    trainer = quiet(Trainer(model, args, train_dataset=Dataset.from_list(rows)))
    attachment = Attachment(trainer, None, {"alpha": 1.01, "warmup": 1})
    trainer.train()
    assert attachment.layer_clip is not None and attachment.metrics == {}
    assert any(k.startswith("layer_clip/") for k in trainer.state.log_history[0])


# --- a plain loop: the example of the README --------------------------------------------------------------------------


def logps_fn(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)


def plain_loop(folder=None, accumulation=2):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = [{"input_ids": torch.randint(5, 300, (4, 9)), "advantages": torch.randn(4, 8)} for _ in range(12)]
    batches[9]["advantages"][2, 5] = 500.0
    model, optimizer = accelerator.prepare(model, optimizer)
    gradloc = None if folder is None else GradLoc(folder, every_n_steps=5)
    for batch in batches:
        with accelerator.accumulate(model):
            logps = logps_fn(model, batch) if gradloc is None else gradloc.watch(model, batch, logps_fn)
            accelerator.backward(-(batch["advantages"] * logps).mean())
            if accelerator.sync_gradients:
                if gradloc is not None:
                    gradloc.check(model)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_a_plain_accelerate_loop(tmp_path):
    plain, watched = plain_loop(), plain_loop(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    (report,) = load_spikes(tmp_path)
    assert report["step"] == 5 and top(report) == (1, 2, 5) and report["certificate"] < 1e-3
    assert report["num_tokens"] == 64 and report["tokens"][0]["advantage"] == 500.0
    assert report["tokens"][0]["weight"] == pytest.approx(-500 / 32 / 2)  # accelerate's own scaling is in it


# --- refusals and the command line ------------------------------------------------------------------------------------


def test_deepspeed_and_fp16_are_refused_in_one_sentence():
    for deepspeed, scaler, message in (
        (True, None, r"which DeepSpeed keeps to itself: use DDP or FSDP2, or --gradloc off"),
        (False, object(), r"do not follow fp16 loss scaling: train with --bf16, or --gradloc off"),
    ):
        trainer = SimpleNamespace(is_deepspeed_enabled=deepspeed, accelerator=SimpleNamespace(scaler=scaler))
        with pytest.raises(ValueError, match=message):
            GradLoc().attach(trainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradloc": "on"}, "--gradloc on is unknown: use off, directional or search"),
        ({"gradloc": "directional", "gradloc_trigger": "fixed"}, "--gradloc_trigger fixed is unknown"),
        (
            {"gradloc": "search", "gradloc_trigger": "paper"},
            "--gradloc_trigger paper needs --gradloc_tau",
        ),
        ({"gradloc": "search", "gradloc_trigger": "paper", "gradloc_tau": -1.0}, "paper needs --gradloc_tau"),
        ({"gradloc_every": 5}, "--gradloc_every 5 is set, but gradloc is off: add --gradloc directional"),
        ({"layer_clip_alpha": 3.0}, "--layer_clip_alpha 3.0 is set, but layer_clip is off: add --layer_clip"),
        ({"gradloc": "search", "gradloc_tau": 640.0}, "--gradloc_tau 640.0 is read by --gradloc_trigger paper only"),
        ({"gradloc": "search", "gradloc_factor": 1.0}, "--gradloc_factor 1.0 must be above 1"),
        ({"gradloc_every": -1}, "--gradloc_every -1"),
        ({"gradloc_cooldown": -1}, "--gradloc_cooldown -1"),
        ({"layer_clip_alpha": 1.0}, "--layer_clip_alpha 1.0"),
        ({"layer_clip_beta": 1.0}, "--layer_clip_beta 1.0"),
        ({"layer_clip_mode": "row"}, "--layer_clip_mode row is unknown: use layer or tensor"),
    ],
)
def test_wrong_flags_are_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        GRPOTokenClipConfig(output_dir=str(tmp_path), **options)


def test_the_papers_trigger_by_flag(tmp_path):
    trainer = planted(tmp_path, gradloc="search", gradloc_trigger="paper", gradloc_tau=100.0, max_steps=5)
    trainer.train()
    (report,) = reports_of(trainer)
    assert report["step"] == 5 and top(report) == trainer.places[5] and report["trigger"]["reason"] == "paper"
    squares = sum(1 / (8 * s["length"]) ** 2 * s["length"] for s in report["sequences"])
    assert report["trigger"]["threshold"] > 100.0 * squares**0.5  # the other sequences count too
    assert report["trigger"]["threshold"] == pytest.approx(report["search"]["trace"][0]["threshold"])


def test_view(tmp_path, capsys):
    planted(tmp_path / "run", gradloc="directional", gradloc_every=5, max_steps=5).train()
    capsys.readouterr()
    main(["view", str(tmp_path)])
    printed = capsys.readouterr().out
    assert " 5" in printed and (tmp_path / "index.html").exists()
    with pytest.raises(SystemExit, match="usage: python gradloc.py view DIR"):
        main(["show"])
    with pytest.raises(SystemExit, match="error: "):
        main(["view", str(tmp_path / "nothing")])
    json.loads((tmp_path / "run" / "gradloc" / "spikes.jsonl").read_text())
