"""The guard: rules on planted and on recorded runs, and drills: what breaks, what is seen, what is restored."""

import errno
import http.server
import json
import math
import os
import random
import re
import statistics
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from test_trainer import StopAt
from transformers import TrainerCallback

import rlvr_common
import stability
import stability_control
from grpo_tokenclip import GRPOTokenClipConfig, GRPOTokenClipTrainer
from guard_drills import (
    DRILL,
    QUIET,
    DropUpdate,
    corrupt_checkpoint,
    events,
    faulty,
    full_disk,
    killed_while_writing,
    largest_file,
    stale_weights,
    wrong_step,
)
from rlvr_common import RLVRConfig, run
from rlvr_launch import parse_args
from rlvr_report import read_metrics
from spectral_monitor import read_spectra
from stability import (
    MIN_HISTORY,
    Alerts,
    GuardHalt,
    StabilityGuard,
    Watch,
    check_alignment,
    check_disk,
    checkpoint_bytes,
    differences,
    faults,
    make_rules,
    not_compared,
    on_disk,
    parse_change,
    parse_rule,
    removable,
    step_of,
    write_manifest,
)
from stability_control import Control, ControlFile, Stages, narrowed, number, parse_stages, switch
from stability_report import TROUBLES, cause_of, checklist, glossary, write_acceptance
from training import MODEL, REPO, equal, length_reward, make_ours, save_moe, weights

# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["kl", "kl>", "kl>1", "kl=1:warn", "kl>1:loud", "kl>x:warn", "kl>1:warn:", "kl>1:warn:two"]
    + ["kl>1.2.3:warn", "kl>1e:warn", "kl>-:warn", "kl>20y:warn", "kl>1:warn:0"],
)
def test_a_bound_that_cannot_be_read_is_named(text, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"--guard_bounds {text!r} is not metric>bound:level")):
        parse_rule(text)
    with pytest.raises(ValueError, match="is not metric>bound:level"):
        RLVRConfig(str(tmp_path), guard="warn", guard_bounds=[text])


def test_any_metric_of_the_glossary_can_have_a_bound_but_those_the_guard_does_not_watch():
    assert parse_rule("spectral/rank_0.5<1.5:warn").metric == "spectral/rank_0.5"
    assert parse_rule("layer_clip/norm/layer 3>.5e-1x:warn:2").bound == 0.05
    for name in sorted(glossary()):
        if name in stability.UNWATCHED:
            with pytest.raises(ValueError, match=f"--guard_bounds '{name}>1:warn': the guard does not watch {name};"):
                parse_rule(f"{name}>1:warn")
        else:
            assert parse_rule(f"{name}>1:warn").metric == name
    assert set(stability.UNWATCHED) <= glossary()


SEEN = {"reward", "grad_norm", "omega/p99", "omega/max", "minirl/masked_frac", "my/metric"}


@pytest.mark.parametrize(
    ("metric", "meant"),
    [("grad_nrom", "grad_norm"), ("omega/p95", "omega/p99"), ("*/maskd_frac", "*/masked_frac"),
     ("suport/agreement", "support/agreement"), ("my/metrik", "my/metric")],
)  # fmt: skip
def test_a_misspelt_metric_is_a_mistake_once_a_step_has_sampled(metric, meant):
    sentence, mistake = stability.unseen(parse_rule(f"{metric}>1:warn"), SEEN, glossary())
    assert (
        mistake and sentence == f"--guard_bounds {metric}>1:warn: no metric is named {metric}; did you mean {meant}?"
    )


@pytest.mark.parametrize(
    "metric",
    ["kl", "gradloc/top1_share", "layer_clip/norm/layer 3", "routing/rollout_agreement/layer_0", "guard/*", "mine"],
)
def test_a_metric_that_may_still_come_is_no_mistake(metric):
    sentence, mistake = stability.unseen(parse_rule(f"{metric}>1:warn"), SEEN, glossary())
    assert not mistake and f"{metric} so far; it is compared once a step has it" in sentence
    assert stability.unseen(parse_rule("*/masked_frac>1:warn"), SEEN, glossary()) is None


def test_a_run_stops_at_a_misspelt_metric_and_at_no_other(tmp_path):
    bounds = ["kl>1:warn", "grad_norm>1e9:warn", "guard/reward_share<0.5:warn"]
    trainer = make_ours(tmp_path, guard="warn", guard_bounds=bounds, max_steps=2)
    guard, told = trainer.guard, []
    guard._tell = lambda level, text, **fields: told.append((level, text))
    guard._check_names({"grad_norm", "entropy"})  # a step between two samplings
    assert told == [] and len(guard.unmatched) == 3
    guard._check_names({"reward"})
    assert [level for level, _ in told] == ["info", "info"] and guard.unmatched == []
    assert "no kl so far" in told[0][1] and "no guard/reward_share so far" in told[1][1]
    guard.unmatched = [parse_rule("entropi<0.1x:warn")]
    with pytest.raises(GuardHalt, match=r"--guard_bounds entropi<0.1x:warn: .*did you mean entropy\?"):
        guard._check_names({"reward"})


def test_a_users_bound_replaces_the_one_of_its_kind_and_level():
    rules = {rule.text for rule in make_rules(["grad_norm>40x:critical", "my/metric<3:warn:2"])}
    assert "grad_norm>40x:critical" in rules and "grad_norm>15x:critical" not in rules and "grad_norm>6x:warn" in rules
    assert "my/metric<3:warn:2" in rules


def levels(watch, **values):
    return {(event["metric"], event["level"]) for event in watch.judge(values)}


def test_absolute_bounds_are_strict_and_patience_counts_steps_in_a_row():
    watch = Watch([parse_rule("a>1:warn:3"), parse_rule("b<0.5:critical")])
    assert levels(watch, a=1.0, b=0.5) == set()
    assert levels(watch, b=0.49) == {("b", "critical")}
    seen = [levels(watch, a=x) for x in (2, 2, 0, 2, 2, 2, 2)]
    assert seen == [set()] * 5 + [{("a", "warn")}] * 2
    watch.judge({"a": 2.0})
    watch.judge({})  # a step without the metric neither counts nor resets
    assert levels(watch, a=2.0) == {("a", "warn")}


def test_patterns_name_each_metric():
    watch = Watch([parse_rule("*/masked_frac>0.9:warn")])
    found = watch.judge({"a/masked_frac": 0.95, "b/masked_frac": 0.2, "c/masked_frac": 1.0})
    assert [event["metric"] for event in found] == ["a/masked_frac", "c/masked_frac"]


def test_relative_bounds_follow_the_runs_own_level():
    watch = Watch([parse_rule("g>6x:warn"), parse_rule("e<0.1x:warn")])
    for i in range(MIN_HISTORY):
        assert levels(watch, g=100.0 if i == 3 else 1.0, e=1.0) == set()  # no judgement without history
    assert watch.bound(watch.rules[0], "g") == pytest.approx(120)  # the recent largest holds the bound up
    for _ in range(stability.WINDOW):
        watch.judge({"g": 1.0, "e": 1.0})
    assert watch.bound(watch.rules[0], "g") == 6.0 and watch.bound(watch.rules[1], "e") == pytest.approx(0.1)
    assert levels(watch, g=6.0, e=0.1) == set()
    assert levels(watch, g=7.3, e=0.09) == {("g", "warn"), ("e", "warn")}
    assert max(watch.history["g"]) == pytest.approx(7.2) and min(watch.history["e"]) == pytest.approx(
        0.1
    )  # a spike enters cut at its bound


def test_a_metric_that_is_mostly_zero_raises_no_alarm_when_it_is_not():
    watch = Watch([parse_rule("g>6x:warn")])
    for i in range(200):
        assert levels(watch, g=0.5 if i % 3 == 0 else 0.0) == set()


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (-1.0, 1.0), (0.0, 7.0)])
def test_reward_collapse_is_seen_on_any_scale(low, high):
    rng = random.Random(0)
    watch = Watch([parse_rule("guard/reward_share<0.4:critical")])
    fell = 120
    for i in range(140):
        level = 0.2 + 0.5 * min(i, 100) / 100 if i < fell else 0.0
        batch = statistics.fmean(rng.random() < level for _ in range(64))
        found = levels(watch, reward=low + (high - low) * batch)
        if i < fell:
            assert found == set()
        elif found:
            break
    assert fell + 2 <= i <= fell + 4


def recorded(name):
    """Runs of results/<name>: {(arm, seed): records}."""
    runs = {}
    for record in read_metrics(REPO / "results" / name / "metrics.jsonl"):
        runs.setdefault((record["arm"], record["seed"]), []).append(record)
    return runs


def test_nine_recorded_healthy_runs_raise_no_alarm():
    for run_name, records in recorded("grpo_tokenclip").items():
        watch = Watch(make_rules())
        for record in records:
            values = {k: v for k, v in record.items() if isinstance(v, float)}
            assert [e for e in watch.judge(values) if e["level"] != "info"] == [], (run_name, record["step"])


@pytest.mark.parametrize("size", [16, 40, 1e4])
@pytest.mark.parametrize("run_name", [("GRPO", 0), ("GRPO + TokenClip", 1), ("GRPO + TokenClip + SeqClip", 2)])
def test_spikes_planted_into_recorded_runs_are_critical_within_two_steps(run_name, size):
    records = [r for r in recorded("grpo_tokenclip")[run_name] if "grad_norm" in r]
    for at in range(30, 140, 10):
        watch = Watch(make_rules())
        for i, record in enumerate(records[: at + 2]):
            norm = record["grad_norm"]
            if i == at:
                norm = size * max(statistics.median(watch.history["grad_norm"]), 0.2 * max(watch.history["grad_norm"]))
            found = levels(watch, grad_norm=norm)
            if i == at:
                assert ("grad_norm", "critical") in found
                break
            assert found == set()


def test_recorded_collapses_are_seen():
    """Seven arms of stale GRPO that spike and die (results/gradloc): whoever ends below a quarter of its best had an alarm."""
    seen = 0
    for records in recorded("gradloc").values():
        rewards = [r["reward"] for r in records if "reward" in r]
        watch, alarms = Watch(make_rules()), []
        for record in records:
            values = {k: v for k, v in record.items() if isinstance(v, float)}
            alarms += [e for e in watch.judge(values) if e["level"] != "info"]
        if statistics.fmean(rewards[-4:]) < 0.25 * max(rewards):
            assert alarms
            seen += 1
    assert seen >= 8


def test_the_watch_goes_on_after_saving():
    rng, a, b = random.Random(1), Watch(make_rules()), Watch(make_rules())
    stream = [{"grad_norm": rng.random() ** 8, "kl": rng.random(), "reward": rng.random()} for _ in range(80)]
    for values in stream[:40]:
        a.judge(values)
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert [a.judge(v) for v in stream[40:]] == [b.judge(v) for v in stream[40:]]


def test_every_rule_has_a_cause_and_an_action():
    for rule in make_rules():
        cause, action = cause_of(rule.metric, rule.text)
        assert cause is not None and "{" not in action, rule.text
    assert cause_of("grad_norm") != cause_of("grad_norm", "not finite")
    guide = ("grad_norm", "*/masked_frac", "routing/*", "guard/effective_batch", "step_time")
    assert tuple(pattern for pattern, _, _ in TROUBLES[:5]) == guide
    assert cause_of("dual_clip/frac") == (None, "to find it: --gradloc directional")


def test_no_alarm_suggests_what_is_on_already(tmp_path):
    for metric in ("grad_norm", "dual_clip/frac", "loss"):
        for rule in ("not finite", "x>1:warn"):
            _, action = cause_of(metric, rule, {"gradloc", "rollback"})
            assert "--gradloc" not in action and "--guard rollback" not in action
    assert "--guard rollback" in cause_of("loss", "not finite")[1]
    told = []
    event = {"rule": "dual_clip/frac>1:warn", "metric": "dual_clip/frac", "value": 2.0, "bound": 1.0, "level": "warn"}
    for gradloc in ("off", "directional"):
        guard = make_ours(tmp_path / gradloc, guard="warn", gradloc=gradloc).guard
        guard.alerts.tell = lambda level, text, **fields: told.append(text)
        guard._announce(7, event)
        assert ("--gradloc" in guard._halt_text("it", False)) == (gradloc == "off")
    assert told[0].endswith("; cause unknown; to find it: --gradloc directional")
    assert "; cause unknown; to find it: GradLoc's report" in told[2]


# --- alerts -----------------------------------------------------------------------------------------------------------


def test_the_hook_gets_the_event_and_its_failures_stop_nothing(tmp_path, capsys):
    got = tmp_path / "got.json"
    alerts = Alerts(tmp_path / "a", hook=f"cat > {got}")
    alerts.tell("info", "fine", step=1)
    alerts.wait()
    assert not got.exists()  # information is for the log
    alerts.tell("critical", "bad", step=2, value=math.nan)
    alerts.wait()
    assert json.loads(got.read_text()) | {"time": 0} == {
        "time": 0,
        "level": "critical",
        "text": "bad",
        "step": 2,
        "value": "nan",
    }
    lines = [json.loads(line) for line in (tmp_path / "a/events.jsonl").read_text().splitlines()]
    assert [line["level"] for line in lines] == ["info", "critical"]

    for hook in ("exit 3", "sleep 5", "http://127.0.0.1:9/none", "http://a host/", "https://host:port/"):
        alerts = Alerts(tmp_path / "b", hook=hook)
        alerts.timeout_s = 0.2
        alerts.tell("warn", "bad")
        alerts.tell("warn", "worse")
        alerts.wait()
        assert alerts.failures == 2
    assert capsys.readouterr().out.count("training goes on") == 5  # once a hook
    Alerts(tmp_path / "c", main=False).tell("critical", "from another rank")
    assert not (tmp_path / "c").exists()


def test_the_hook_posts_to_an_address(tmp_path):
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    alerts = Alerts(tmp_path, hook=f"http://127.0.0.1:{server.server_port}/alert")
    alerts.tell("warn", "bad", step=7)
    alerts.wait()
    server.shutdown()
    assert bodies[0]["step"] == 7 and alerts.failures == 0


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_retention_never_deletes_the_last_good_checkpoint_nor_the_newest():
    rng = random.Random(0)
    for _ in range(500):
        steps = sorted(rng.sample(range(60), rng.randint(1, 10)))
        good = {s for s in steps if rng.random() < 0.4} | {s for s in range(60) if rng.random() < 0.1}
        keep, old = rng.choice([None, 1, 2, 3]), {s for s in steps if rng.random() < 0.3}
        waiting = {s for s in steps if s > max(good, default=-1) and rng.random() < 0.5}
        gone = set(removable(steps, good, keep, old, waiting))
        left = [s for s in steps if s not in gone]
        assert steps[-1] in left
        if good & set(steps):
            assert max(good & set(steps)) in left
        if keep is not None:
            assert len(left) <= max(keep, 3)
        stay = {steps[-1], max(good & set(steps), default=-1), min(waiting, default=-1)}
        assert {s for s in left if s in old} <= stay and min(waiting, default=steps[-1]) in left
        if keep is not None and not old:  # no more than needed
            assert len(left) >= min(len(steps), keep)
            assert not {s for s in gone if s in good} or not [s for s in left if s not in good | stay]
    assert removable([], set(), 1) == []


def test_a_manifest_knows_every_kind_of_damage(tmp_path):
    checkpoint = tmp_path / "checkpoint-3"
    (checkpoint / "inner").mkdir(parents=True)
    for name in ("a.bin", "inner/b.bin", "c.bin"):
        (checkpoint / name).write_bytes(os.urandom(1000))
    assert "no guard_manifest.json" in faults(checkpoint)[0]
    write_manifest(checkpoint)
    assert faults(checkpoint) == []
    data = bytearray((checkpoint / "a.bin").read_bytes())
    data[500] ^= 1
    (checkpoint / "a.bin").write_bytes(data)
    (checkpoint / "inner/b.bin").write_bytes(b"short")
    (checkpoint / "c.bin").unlink()
    assert [fault.split(": ")[-1].split("checkpoint-3/")[1] for fault in faults(checkpoint)] == [
        "a.bin holds other bytes than were written", "c.bin is missing", "inner/b.bin has 5 bytes where 1,000 were written",
    ]  # fmt: skip
    for broken in ("", "[1]", "null", '{"a": 1}', '{"a": [1]}'):
        (checkpoint / "guard_manifest.json").write_text(broken)
        assert "guard_manifest.json cannot be read" in faults(checkpoint)[0]
    (checkpoint / "guard_manifest.tmp").write_text("of a process that was killed as it wrote this")
    write_manifest(checkpoint)
    assert faults(checkpoint) == []


def test_the_disk_budget_is_checked_at_start(tmp_path, monkeypatch):
    model = torch.nn.Linear(10, 10, dtype=torch.bfloat16)
    model.bias.requires_grad_(False)
    assert checkpoint_bytes(model) == 2 * 110 + 4 * 2 * 100
    assert "3 checkpoints of about 1e-09 GB" in check_disk(tmp_path / "new", 1, 3)
    with pytest.raises(ValueError, match="more than --guard_disk_gb 1: lower --save_total_limit"):
        check_disk(tmp_path, 6e8, 2, 1)
    monkeypatch.setattr(stability.shutil, "disk_usage", lambda place: SimpleNamespace(free=1e9))
    with pytest.raises(ValueError, match="has 1 GB left"):
        check_disk(tmp_path, 6e8, 2)
    with pytest.raises(ValueError, match="more than --guard_disk_gb"):
        make_ours(tmp_path, guard="rollback", guard_disk_gb=1e-6).train()


# --- drills -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["nan", "spike", *(pytest.param(f, marks=pytest.mark.slow) for f in ("entropy", "reward"))]
)
def test_drill_rolled_back_run_equals_a_clean_one_that_left_the_batch_out(tmp_path, fault):
    beside = {"layer_clip": True, "spectral_every": 1}  # both look at the gradient before the guard does
    found = wrong_step(fault, tmp_path, from_start=True, **beside)
    (alarm,) = events(tmp_path / "guarded", "alarm")
    assert alarm["step"] == 5 and alarm["level"] == "critical" and alarm["cause"] and alarm["action"]
    assert alarm["metric"] == {"nan": "grad_norm", "spike": "grad_norm"}.get(fault, fault)
    assert found.after == 1 and found.to in (2, 4) and found.skipped == [5]
    assert found.trainer.state.global_step == 6 and found.equal
    assert [e["step"] for e in events(tmp_path / "guarded", "skip")] == [5]
    assert equal(*(t._attachment.layer_clip.state_dict() for t in (found.trainer, found.clean)))
    looks = [
        [(r["step"], r["matrices"]) for r in read_spectra(tmp_path / name / "spectral.jsonl")]
        for name in ("guarded", "clean")
    ]
    assert looks[0] == looks[1]


@pytest.mark.slow
def test_a_rolled_back_run_differs_from_one_that_kept_the_batch(tmp_path):
    guarded = faulty(tmp_path / "a", "spike", **DRILL)
    stability.train(guarded)
    kept = faulty(tmp_path / "b", "spike", **QUIET)
    kept.train()
    assert not equal(weights(guarded), weights(kept))


def test_drill_rollback_restores_the_checkpoint_bit_for_bit(tmp_path):
    """What training starts from after the rollback is what was saved: weights, optimizer, schedule, random state, cursor."""
    seen = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.append((state.global_step, weights(trainer), trainer._step, trainer.guard.watch.state_dict()))

    class Keep(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            kept[state.global_step] = (weights(trainer), trainer._step, trainer.guard.watch.state_dict())

    kept = {}
    trainer = faulty(tmp_path, "nan", **DRILL)
    for callback in (Look(), Keep()):
        trainer.add_callback(callback)
    stability.train(trainer)
    (step, model, cursor, watch) = seen[-1]
    assert step in kept and equal(model, kept[step][0]) and (cursor, watch) == kept[step][1:]


def test_drill_halt_names_the_checkpoint_and_keeps_the_weights(tmp_path, capsys):
    trainer = faulty(tmp_path, "nan", gradloc="directional", **DRILL | {"guard": "halt"})
    before = []
    trainer.add_callback(
        type("B", (TrainerCallback,), {"on_step_end": lambda *a, **k: before.append(weights(trainer))})()
    )
    with pytest.raises(SystemExit) as end:
        run(trainer)
    text = str(end.value)
    assert (
        "step 5: grad_norm is not finite" in text
        and f"--resume_from_checkpoint {tmp_path / 'checkpoint-4'}" not in text
    )
    assert f"--resume_from_checkpoint {tmp_path / 'checkpoint-2'}" in text  # good: two steps after it were healthy
    assert "GradLoc's report: " in text and ".html" in text
    assert equal(weights(trainer), before[-1])  # stopped before the update
    assert (tmp_path / "acceptance.md").exists() and "acceptance after " in capsys.readouterr().out


def test_drill_warn_only_tells(tmp_path):
    trainer = faulty(tmp_path, "spike", **DRILL | {"guard": "warn"})
    stability.train(trainer)
    plain = faulty(tmp_path / "plain", "spike", **QUIET)
    plain.train()
    assert equal(weights(trainer), weights(plain))  # watching changes nothing
    assert [e["level"] for e in events(tmp_path, "alarm")] == ["critical"]
    assert [r["guard/level"] for r in trainer.state.log_history if "guard/level" in r] == [0, 0, 0, 0, 3, 0]


def test_drill_a_fault_that_stays_ends_the_run_after_its_retries(tmp_path):
    class Broken(GRPOTokenClipTrainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            return loss * math.nan if self.state.global_step >= 3 else loss

    (tmp_path / "control.yaml").write_text("learning_rate_scale: 0.8")  # must not undo what a rollback changes
    trainer = make_ours(tmp_path, guard_retries=2, guard_on_rollback=["learning_rate_scale*0.5"], **DRILL)
    trainer.__class__ = Broken
    with pytest.raises(GuardHalt, match=r"after 2 rollbacks \(--guard_retries 2\).*--resume_from_checkpoint"):
        stability.train(trainer)
    assert len(events(tmp_path, "rollback")) == 2 and trainer._lr_scale == pytest.approx(0.2)
    assert trainer._get_learning_rate() == pytest.approx(0.2 * 1e-3)


def test_drill_corrupt_checkpoint_falls_back_to_the_one_before(tmp_path):
    found = corrupt_checkpoint(tmp_path)
    assert "checkpoint-4/optimizer.pt holds other bytes" in found.seen
    assert found.to == 2 and found.skipped == [7] and found.equal


def test_a_damaged_checkpoint_is_refused_at_resume(tmp_path):
    trainer = make_ours(tmp_path, **DRILL | {"max_steps": 2, "guard": "warn"})
    stability.train(trainer)
    path = tmp_path / "checkpoint-2" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="checkpoint-2 is damaged: .*model.safetensors has"):
        stability.train(make_ours(tmp_path, **DRILL), str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize(
    "size", [100_000, pytest.param(2_000_000, marks=pytest.mark.slow)], ids=["weights", "optimizer"]
)
def test_drill_full_disk_leaves_the_checkpoint_before_and_training_goes_on(tmp_path, size):
    """The writer of the weights fails, or torch's."""
    found = full_disk(tmp_path, size=size)
    assert "checkpoint-4 could not be written" in found.seen and found.after == 1
    assert found.trainer.state.global_step == 6 and found.to == 2 and found.equal
    assert [step_of(p) for p in on_disk(tmp_path / "guarded")] == [0, 2, 6]
    assert faults(tmp_path / "guarded/checkpoint-2") == []


def test_a_disk_that_has_no_room_for_a_line_costs_no_training(tmp_path, monkeypatch):
    """Not the checkpoint's big files fail but the guard's own small ones, from step 3 to step 5."""
    trainer, write = make_ours(tmp_path, **DRILL), stability.write_atomically

    def full(path, text):
        if 3 <= trainer.state.global_step <= 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    monkeypatch.setattr(stability, "write_atomically", full)
    stability.train(trainer)
    assert [step_of(p) for p in on_disk(tmp_path)] == [0, 2, 6] and faults(tmp_path / "checkpoint-6") == []
    assert trainer.state.global_step == 6
    told = [event["text"] for event in events(tmp_path, "disk")]
    assert any("checkpoint-4 could not be written" in text for text in told) and "guard.json is out of date" in told[0]
    assert json.loads((tmp_path / "guard.json").read_text()) == trainer.guard.ledger
    assert trainer.guard.ledger["good"] == [0, 2] and trainer.guard.ledger["waiting"] == [6]


def test_without_a_guard_a_full_disk_ends_the_run(tmp_path):
    trainer = faulty(tmp_path, None, **QUIET)
    with largest_file(100_000), pytest.raises(SafetensorError, match="File too large"):
        trainer.train()


def test_another_error_while_saving_is_not_taken_for_a_full_disk(tmp_path, monkeypatch):
    trainer = make_ours(tmp_path, **DRILL | {"guard": "warn"})
    monkeypatch.setattr(trainer, "_save_rollout_state", lambda trial: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        stability.train(trainer)
    (crash,) = events(tmp_path, "crash")
    assert crash["level"] == "critical" and "ended after step 2 with RuntimeError: a bug; no alarm" in crash["text"]
    assert not events(tmp_path, "alarm")


def test_drill_stale_weights_are_seen_within_two_samplings(tmp_path):
    found = stale_weights(tmp_path)
    alarms = events(tmp_path / "guarded", "alarm")
    assert {(e["step"], e["level"]) for e in alarms} == {(4, "warn"), (5, "critical")}
    assert "do not reach the rollout engine" in alarms[-1]["cause"]
    assert found.after == 2 and found.skipped == [4, 5] and found.to == 2 and found.equal


@pytest.mark.slow
def test_drill_a_process_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path):
    found = killed_while_writing(tmp_path, from_start=True)
    assert "checkpoint-4 has no guard_manifest.json" in found.seen
    assert found.to == 2 and found.equal and faults(tmp_path / "guarded/checkpoint-4") == []


@pytest.mark.slow
def test_a_resumed_run_remembers_its_rollbacks_and_what_it_leaves_out(tmp_path):
    first = faulty(tmp_path, "nan", **DRILL)
    first.add_callback(StopAt(5))
    stability.train(first)
    rest = faulty(tmp_path, "nan", **DRILL)
    stability.train(rest, str(tmp_path / "checkpoint-4"))
    assert len(rest.guard.ledger["rollbacks"]) == 1 and rest.state.global_step == 6
    clean = faulty(tmp_path / "clean", "nan", **QUIET)
    clean.add_callback(DropUpdate(clean, {5}))
    clean.train()
    assert equal(weights(rest), weights(clean))


def test_an_engine_that_is_gone_when_the_run_rolls_back_ends_it_with_its_own_sentence(tmp_path):
    trainer = faulty(tmp_path, "nan", 2, **DRILL | {"max_steps": 2, "save_steps": 1})
    trainer.forget = lambda: (_ for _ in ()).throw(RuntimeError("the engine is gone"))
    with pytest.raises(RuntimeError, match="^the engine is gone$"):
        stability.train(trainer)
    assert "RuntimeError: the engine is gone; no alarm" in events(tmp_path, "crash")[0]["text"]


@pytest.mark.parametrize("limit", [None, 2])
def test_checkpoints_become_good_after_k_healthy_steps_and_retention_keeps_one(tmp_path, limit):
    trainer = make_ours(tmp_path, **DRILL | {"guard_k": 3, "save_steps": 1, "max_steps": 8, "save_total_limit": limit})
    history = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            history.append(max(trainer.guard.ledger["good"]))

    trainer.add_callback(Look())
    stability.train(trainer)
    left = [step_of(p) for p in on_disk(tmp_path)]
    assert left[-1] == 8 and history[-1] in left
    if limit is None:
        assert history == [0, 0, 0, 1, 2, 3, 4, 5] and left == list(range(9))
    else:  # every other one is deleted before it can become good
        assert len(left) == 3 and history == sorted(history) and 3 <= history[-1] <= 5


# --- what the guard adds to the metrics -------------------------------------------------------------------------------


def test_update_norm_is_the_norm_of_the_update(tmp_path):
    trainer = make_ours(tmp_path, guard="warn", max_steps=2, reward=length_reward)
    before, norms = [weights(trainer)], []

    class Measure(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            now = weights(trainer)
            moved = {k: (now[k] - before[0][k]).double().square().sum() for k in now if k != "lm_head.weight"}  # tied
            norms.append(math.sqrt(sum(moved.values())))
            before[0] = now

    trainer.add_callback(Measure())
    stability.train(trainer)
    logged = [r["guard/update_norm"] for r in trainer.state.log_history if "guard/update_norm" in r]
    assert logged == pytest.approx(norms, rel=1e-4) and min(norms) > 0
    trainer.guard.sampled = 1000
    trainer.guard._before = [(b[0] * 0, b[1]) for b in trainer.guard._sampled_weights()]
    trainer.guard.on_optimizer_step(None, None, None)
    whole = math.sqrt(sum(p.detach().square().sum().item() for p in trainer.model.parameters()))
    assert trainer._metrics["train"]["guard/update_norm"][-1] == pytest.approx(whole, rel=0.2)  # a sample, scaled up


def test_a_nan_loss_shows_once_and_not_for_ever(tmp_path):
    trainer = faulty(tmp_path, "nan", 2, **QUIET | {"max_steps": 3, "save_strategy": "no", "max_grad_norm": 0.0})
    trainer.add_callback(DropUpdate(trainer, {2}))
    trainer.train()
    losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    assert [math.isnan(loss) for loss in losses] == [False, True, False]


# --- alignment --------------------------------------------------------------------------------------------------------


def test_alignment_is_recorded_and_leaves_no_trace_in_the_run(tmp_path):
    trainer = make_ours(
        tmp_path / "a", guard="warn", max_steps=2, reward=length_reward, top_k=5, keep_sampling_mask=True
    )
    stability.train(trainer)
    plain = make_ours(tmp_path / "b", max_steps=2, reward=length_reward, top_k=5, keep_sampling_mask=True)
    plain.train()
    assert equal(weights(trainer), weights(plain))
    record = json.loads((tmp_path / "a/alignment.json").read_text())
    assert record["libraries"]["torch"].startswith("2.") and record["smoke"]["mean_gap"] < 1e-4
    assert record["training"]["top_k"] == record["rollout"]["top_k"] == 5 and record["settings"]["guard"] == "warn"
    assert record["training"]["fingerprint"] == record["rollout"]["fingerprint"] and record["not_compared"] == []


def test_weights_that_stand_still_by_a_skipped_step_are_not_stale(tmp_path):
    """One update a sampling: after the rollback the step without an update leaves the weights of the sampling before."""
    trainer = faulty(tmp_path, "nan", 4, **DRILL | {"steps_per_generation": 1, "save_steps": 1})
    stability.train(trainer)
    assert {(e["step"], e["metric"]) for e in events(tmp_path, "alarm")} == {(4, "grad_norm")}
    assert list(trainer.guard.still) == [4] and trainer.compared_versions == (4, 5)
    log = {r["step"]: r for r in trainer.state.log_history if "loss" in r}
    assert (
        log[5]["rollout/weights_changed"] == 0 and log[6]["guard/stale"] == 0
    )  # 4 and 5: same weights, as they should


def test_differences_name_both_values():
    assert not_compared({"a": 1, "b": 2, "tokenizer_size": 3}, {"a": 1, "c": 3}) == ["b"]
    assert differences({"a": 1, "b": 2}, {"a": 1, "c": 3}) == []
    assert differences({"a": 1, "b": 2}, {"b": 3}) == ["b is 2 in training and 3 in the rollout engine"]


@pytest.mark.parametrize("what", ["eos", "weights", "fingerprint", "settings", "tokenizer", "nan"])
def test_a_mismatch_stops_the_run_with_the_difference(tmp_path, what, monkeypatch):
    trainer = make_ours(tmp_path, guard="warn", max_steps=1)
    words = {
        "eos": r"eos_token_ids is \[379, 381\] in training and \[300, 379, 381\] in the rollout", "weights": "explains 0.001",
        "settings": "temperature is 1.0 in training and 0.7", "tokenizer": "500 tokens and the model 384 embeddings",
        "nan": "gradient is not finite", "fingerprint": "fingerprint is '[0-9a-f]+' in training and 'of other weights' in",
    }  # fmt: skip
    if what == "eos":
        trainer.engine._is_eos[300] = True
    if what == "weights":
        trainer.sync_engine()
        for p in trainer.engine.model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    if what == "fingerprint":  # nothing that is pushed arrives
        trainer.engine.fingerprint = "of other weights"
        trainer.engine.push_weights = lambda model, version: None
    if what == "settings":
        real = trainer.engine.generate
        trainer.engine.generate = lambda *a, **k: real(*a, **k | {"temperature": 0.7})
    if what == "tokenizer":
        monkeypatch.setattr(type(trainer._tokenizer), "__len__", lambda self: 500)
    if what == "nan":
        for p in trainer.model.model.layers[0].parameters():
            p.data.fill_(math.nan)
    with pytest.raises(ValueError, match=words[what]):
        check_alignment(trainer)


def test_resume_with_another_model_or_world_size_says_so(tmp_path):
    make_ours(tmp_path, **QUIET | {"max_steps": 2}).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    moe = save_moe(tmp_path / "moe")
    with pytest.raises(ValueError, match="holds a model of model_type qwen3 and this run trains one of qwen3_moe"):
        make_ours(tmp_path, model=moe, **QUIET).train(resume_from_checkpoint=checkpoint)
    path = tmp_path / "checkpoint-2" / "rollout_state_0.pt"
    torch.save(torch.load(path) | {"num_processes": 2}, path)
    with pytest.raises(ValueError, match="saved by 2 processes and this run has 1"):
        make_ours(tmp_path, **QUIET).train(resume_from_checkpoint=checkpoint)


# --- control.yaml -----------------------------------------------------------------------------------------------------


def test_bad_input_keeps_the_old_value_and_says_so(tmp_path):
    held, told = {"beta": 0.1, "on": True}, []
    controls = {
        "beta": Control(lambda: held["beta"], lambda v: held.update(beta=v), number(0, 1)),
        "part.enabled": Control(lambda: held["on"], lambda v: held.update(on=v), switch),
    }
    file = ControlFile(
        tmp_path / "control.yaml", controls, lambda level, text, **fields: told.append((level, text, fields))
    )

    def write(text):
        told.clear()
        (tmp_path / "control.yaml").write_text(text)
        values = file.read()
        if values is not None:
            file.apply(values)
        return [level for level, _, _ in told]

    assert file.read() is None  # no file
    assert write("beta: 0.2") == ["info"] and held["beta"] == 0.2
    assert told[0][2] == {"name": "beta", "old": 0.1, "new": 0.2} and "beta 0.1 -> 0.2" in told[0][1]
    assert write("beta: 0.2") == []  # unchanged
    assert write("beta: 0.2\n# a comment") == []  # read again, nothing differs
    for bad in (
        "beta: -1",
        "beta: strong",
        "beta: true",
        "beta: .nan",
        "beta: [1]",
        "beta:",
        "gamma: 1",
        "beta: {x: 1}",
        "- 1",
        "beta: : 1",
        "a\tb: {",
        "beta: {}",
        "beta: []",
        "beta: .inf",
        "beta: 1e999",
        "beta: " + "9" * 400,
        "beta: 2026-13-45",
        "beta: !!int x",
        "beta: !!float x",
        "beta: !!timestamp x",
        "beta: &x {y: *x}",
        "beta: &x [*x]",
        "beta: " + "[" * 400 + "]" * 400,
    ):
        assert write(bad) == ["warn"], bad
        assert held == {"beta": 0.2, "on": True}
    assert "it stays 0.2" in (write("beta: 7"), told[0][1])[1]
    assert write("beta: 1e-2") == ["info"] and held["beta"] == 0.01  # text to YAML 1.1, which wants a point and a sign
    assert write('beta: "0.2"') == ["info"] and held["beta"] == 0.2
    assert write("part: {enabled: false}\nbeta: 0") == ["info", "info"] and held == {"beta": 0.0, "on": False}
    assert write("part.enabled: 1") == ["warn"] and held["on"] is False
    assert write("") == [] and write("beta: 0.3") == ["info"]


def test_control_changes_the_run_at_the_step_boundary_with_an_audit_trail(tmp_path):
    class Edit(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            text = {2: "beta: 0.5\nlearning_rate_scale: 0.1", 3: "beta: oops"}.get(state.global_step)
            if text:
                (tmp_path / "control.yaml").write_text(text)

    trainer = make_ours(tmp_path, **QUIET | {"guard": "warn", "beta": 0.01, "max_steps": 4})
    trainer.add_callback(Edit())
    stability.train(trainer)
    found = events(tmp_path, "control")
    assert [(e["level"], e["step"], e.get("old"), e.get("new")) for e in found] == [
        ("info", 2, 0.01, 0.5), ("info", 2, 1.0, 0.1), ("warn", 3, 0.5, None),
    ]  # fmt: skip
    assert trainer.beta == 0.5
    rates = [r["learning_rate"] for r in trainer.state.log_history if "loss" in r]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])
    rest = make_ours(tmp_path, **QUIET | {"guard": "warn", "beta": 0.01, "max_steps": 6})
    (tmp_path / "control.yaml").unlink()
    stability.train(rest, str(tmp_path / "checkpoint-4"))
    assert rest.beta == 0.5 and rest._get_learning_rate() == pytest.approx(
        1e-4
    )  # the checkpoint carries what was changed


def test_a_learning_rate_scale_of_zero_is_refused(tmp_path):
    class Edit(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            (tmp_path / "control.yaml").write_text(f"learning_rate_scale: {state.global_step - 1}")

    trainer = make_ours(tmp_path, **QUIET | {"guard": "warn", "max_steps": 3, "save_strategy": "no"})
    trainer.add_callback(Edit())
    stability.train(trainer)
    found = [(e["level"], e["step"], e.get("refused")) for e in events(tmp_path, "control")]
    assert found == [("warn", 1, 0)] and trainer._get_learning_rate() == pytest.approx(1e-3)


def test_a_resumed_guard_judges_no_metric_twice(tmp_path):
    """Between two logs a checkpoint holds metrics that were judged already: the reward of this sampling, weights that changed."""
    changes = QUIET | {"guard": "warn", "max_steps": 4, "save_steps": 3, "logging_steps": 4}
    whole = make_ours(tmp_path / "whole", **changes)
    stability.train(whole)
    rest = make_ours(tmp_path / "rest", **changes)
    stability.train(rest, str(tmp_path / "whole" / "checkpoint-3"))
    assert rest.guard.state_dict() == whole.guard.state_dict() and whole.guard.watch.samplings == 2


# --- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "small", "full:20", "small:20,full:3", "small:0,full", "full:2,small", "small:2,small:3,full", "tiny:2,full"],
)
def test_stages_that_make_no_sense_are_refused(text):
    if text == "small":
        assert parse_stages(text) == [("small", None)]
        return
    with pytest.raises(ValueError, match="--guard_stages"):
        parse_stages(text)


def test_a_stage_widens_only_after_its_steps_without_an_alarm():
    stages = Stages(parse_stages("small:3,medium:2,full"))
    shares = []
    for healthy in (1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1):
        shares.append(stages.share)
        stages.step(bool(healthy))
    assert shares == [0.25] * 6 + [0.5] * 4 + [1.0]
    assert narrowed(list(range(32)), 0.25, 8) == list(range(8)) and narrowed(list(range(16)), 0.25, 8) == list(
        range(8)
    )


def test_staged_runs_use_part_of_the_batch_and_of_the_length(tmp_path):
    trainer = make_ours(
        tmp_path, guard="warn", guard_stages="small:2,medium:1,full", max_steps=5, per_device_train_batch_size=16,
        reward=length_reward, max_completion_length=16, guard_bounds=["guard/effective_batch<-1:warn:10"],
    )  # fmt: skip
    sizes, widths = [], []
    inner = trainer._rollout
    trainer.rollout_func = lambda prompts, t: (sizes.append(len(prompts)), inner(prompts, t))[1]
    trainer.add_callback(
        type("W", (TrainerCallback,), {"on_step_end": lambda *a, **k: widths.append(trainer._counts["seq_sum"])})()
    )
    stability.train(trainer)
    assert sizes == widths == [4, 4, 8, 16, 16]
    lengths = [r["completions/max_length"] for r in trainer.state.log_history if "loss" in r]
    assert max(lengths[:2]) <= 4 and lengths[2] <= 8 and max(lengths[3:]) > 8
    assert [e["step"] for e in events(tmp_path, "stage")] == [2, 3]


# --- flags and report -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guard": "on"}, "--guard on is unknown"),
        ({"guard_k": 3}, "--guard_k 3 is set, but guard is off: add --guard warn"),
        ({"guard_bounds": ["kl>1:warn"]}, "--guard_bounds .* is set, but guard is off"),
        ({"guard": "halt", "guard_on_rollback": ["beta=1"]}, "add --guard rollback"),
        ({"guard": "rollback", "guard_on_rollback": ["beta*2"]}, "is not name=value of a control"),
        ({"guard": "warn", "guard_stages": "tiny:3"}, "--guard_stages tiny:3"),
        ({"guard": "warn", "guard_retries": -1}, "--guard_retries -1 must be"),
        ({"guard": "rollback", "save_only_model": True}, "--save_only_model leaves nothing to roll back to"),
    ],
)
def test_guard_options_are_checked(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        RLVRConfig(str(tmp_path), **options)
    with pytest.raises(ValueError, match="beta"):
        make_ours(tmp_path, guard="rollback", guard_on_rollback=["beta=0.1"])  # no reference model is loaded


@pytest.mark.parametrize(
    "change", ["learning_rate_scale*0", "learning_rate_scale=-1", "max_grad_norm=nan", "max_grad_norm=true"]
)
def test_a_change_that_a_rollback_could_not_make_is_refused_before_the_run(tmp_path, change):
    with pytest.raises(ValueError, match=f"--guard_on_rollback {re.split('[=*]', change)[0]}.* must be a number in"):
        make_ours(tmp_path, guard="rollback", guard_on_rollback=[change])


def test_a_halt_names_no_checkpoint_that_no_run_can_go_on_from(tmp_path):
    trainer = faulty(tmp_path, "nan", 5, **DRILL | {"guard": "halt", "save_only_model": True})
    with pytest.raises(GuardHalt, match="no checkpoint to go on from was saved"):
        stability.train(trainer)


def test_stages_is_short_for_guard_stages(tmp_path):
    argv = ["--output_dir", str(tmp_path / "run"), "--guard", "warn", "--stages", "small:20,medium:50,full"]
    args, _ = parse_args(GRPOTokenClipConfig, "", argv)
    assert args.guard_stages == "small:20,medium:50,full"


def test_changes_after_a_rollback_are_read():
    assert parse_change("beta=0.05") == ("beta", "=", 0.05)
    assert parse_change("learning_rate_scale*0.5") == ("learning_rate_scale", "*", 0.5)
    assert parse_change("rl_stability.sequence_masking.enabled=true")[2] is True


def test_acceptance_reports_what_is_wrong(tmp_path, capsys):
    trainer = faulty(tmp_path, "spike", **DRILL | {"guard": "warn"})
    run(trainer)
    lines = {line.text: line for line in checklist(tmp_path)}
    assert lines["Metrics: smooth gradient norm"].verdict == "fail"
    assert lines["Logs: no explosion alert, no NaN or Inf, no filter exception"].verdict == "fail"
    assert lines["Smoke run of forward, backward, sampling"].verdict == "pass"
    assert lines["Keep routing: recorded experts replayed"].verdict == "off"
    summary = write_acceptance(tmp_path)
    assert "fail: Verification: Metrics: smooth gradient norm" in summary
    for name in ("acceptance.md", "acceptance.html"):
        text = (tmp_path / name).read_text()
        assert all(line.text.split(":")[0] in text for line in lines.values())
    stability.main(["report", str(tmp_path)])
    assert capsys.readouterr().out.rstrip().endswith(summary.rstrip().splitlines()[-1])
    with pytest.raises(SystemExit, match="holds no metrics.jsonl"):
        stability.main(["report", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="usage"):
        stability.main([])


def test_acceptance_does_not_hold_a_rolled_back_step_against_the_run(tmp_path):
    run(faulty(tmp_path, "nan", **DRILL))
    lines = {line.text: line for line in checklist(tmp_path)}
    assert lines["Numerical stability: no explosion, no run stopped by a spike"].verdict == "too short"
    assert "1 rollbacks" in lines["Numerical stability: no explosion, no run stopped by a spike"].measured


def recorded_run(folder, steps, every=1, **values):
    """A run's files, without the run."""
    metrics = {
        "grad_norm": 0.5,
        "reward": 0.5,
        "mismatch/mean": 1.0,
        "ratio/p99": 1.0,
        "minirl/masked_frac": 0.1,
        "step_time": 1.0,
    }
    folder.mkdir()
    lines = [json.dumps({"step": step} | metrics | values) for step in range(every, steps + 1, every)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "guard.json").write_text(json.dumps({"good": [0], "waiting": [], "rollbacks": []}))
    return folder


def test_acceptance_says_nothing_about_the_course_of_a_run_of_two_steps(tmp_path):
    short, long = recorded_run(tmp_path / "short", 2), recorded_run(tmp_path / "long", 60, every=5)
    pairs = zip(checklist(short), checklist(long), strict=True)
    verdicts = {before.text: (before.verdict, after.verdict) for before, after in pairs}
    for text in (
        "Numerical stability: no explosion, no run stopped by a spike", "Metrics: smooth gradient norm",
        "Scalability: compute grows without stability regressions", "Resources: steady use, storage growth as expected",
        "Metrics: stable mask ratio", "Logs: no explosion alert, no NaN or Inf, no filter exception",
    ):  # fmt: skip
        assert verdicts[text] == ("too short", "pass"), text
    assert verdicts["Periodic checkpoints; return to a stable version"] == ("pass", "pass")
    for text in ("Rollback rehearsed", "Custom losses and sample filters", "Each mechanism behind its own switch"):
        assert verdicts[text] == ("by construction", "by construction"), text
    for folder, steps in ((short, 2), (long, 60)):
        found = re.match(
            rf"acceptance after {steps} steps: (\d+) measured and passed, (\d+) fail, (\d+) too short, (\d+) by construction, "
            r"(\d+) off, (\d+) operator \(",
            write_acceptance(folder),
        )
        counts = [int(n) for n in found.groups()]
        assert sum(counts) == len(checklist(folder)) and (counts[2] == 0) == (folder == long) and counts[3] >= 9
    assert verdicts["Data: routing and mask fields complete"] == ("off", "off")
    bad = {line.text: line.verdict for line in checklist(recorded_run(tmp_path / "bad", 2, grad_norm="nan"))}
    assert bad["Numerical stability: no explosion, no run stopped by a spike"] == "fail"  # a short run can fail


def table(path):
    """Rows of the first table of a Markdown file, as lists of cells."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def files_of(text):
    """Files that a cell names, where they are: at the top, in recipes/ or in tests/."""
    for name in re.findall(r"`([\w/]+\.(?:py|yaml|md))\b", text):
        places = [REPO / name, REPO / "tests" / name]
        assert any(place.exists() for place in places), name
        yield next(place for place in places if place.exists())


def test_the_checklist_names_files_and_tests_that_exist():
    known = {
        path.name: re.findall(r"^def (test_\w+)", path.read_text(), re.M)
        for path in (REPO / "tests").glob("test_*.py")
    }
    rows, named = table(REPO / "results" / "dsv32" / "checklist.md"), 0
    for section, line, where, tests in rows:
        if where.startswith("operator"):
            assert tests == "-", line
            continue
        text = "".join(path.read_text() for path in files_of(where))
        for symbol in re.findall(r"`[\w/]+\.py` ((?:\w+(?:, )?)+)", where):  # what of the file is meant
            missing = [word for word in symbol.split(", ") if not re.search(rf"\b{word}\b", text)]
            assert missing == [], (line, missing)
        found = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+)?(\*|\[[\w-]+\])?`", tests)
        assert found, f"{section} {line}: no test"
        file = None
        for name, test, rest in found:
            file = name or file
            assert file in known, (line, file)
            if test:
                assert any(t.startswith(test) if rest == "*" else t == test for t in known[file]), (line, test)
            named += 1
    assert len(rows) > 50 and named > 50


def test_the_checklist_and_the_acceptance_table_have_the_same_sections(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "grad_norm": 1.0}\n')
    sections = [row[0] for row in table(REPO / "results" / "dsv32" / "checklist.md") if row[0]]
    mine = dict.fromkeys(line.section.split(",")[0] for line in checklist(tmp_path))
    assert [s for s in sections if s != "Troubleshooting"] == list(mine)  # those are printed with each alarm


def test_a_guard_refuses_what_it_cannot_do(tmp_path):
    trainer = make_ours(tmp_path)
    with pytest.raises(ValueError, match="guard mode 'loud' is unknown"):
        StabilityGuard(trainer, "loud")
    assert rlvr_common.stability is stability and stability_control.SHARES["full"] == 1.0 and MODEL
