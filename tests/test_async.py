"""Rollouts ahead of time: the bound, the order, equality with the synchronous recipe, resume, pushes in mid-generation."""

import functools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
from contextlib import closing
from multiprocessing.connection import Pipe
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from test_minirl import load, logged, planted_batch
from transformers import TrainerCallback

import async_rollout
import stability
from async_rollout import Ahead, AsyncEngine, AsyncTrainer, Buffer, Group, Timeline, is_stale, join, split
from engine_process import EngineProcess, _Worker, receive_weights, send_weights
from guard_drills import DropUpdate, events, faulty
from minirl_async_r3 import MiniRLAsyncConfig, MiniRLAsyncTrainer
from minirl_sync import MiniRLTrainer
from rlvr_report import read_metrics
from rollout import Rollout, TransformersEngine, copy_weights
from stability import GuardHalt
from support import join_support, support_logps
from training import MODEL, REPO, equal, make_async, make_minirl, options, save_moe, weights

FP8 = {"rollout_dtype": "fp8"}
MASK = {"top_k": 6, "top_p": 0.9, "keep_sampling_mask": True}
SGD = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save_moe(tmp_path_factory.mktemp("moe"))


def a_rollout(*versions, tokens=2):
    n = len(versions)
    return Rollout([[1]] * n, [[2] * tokens] * n, [[-0.5] * tokens] * n, [True] * n, list(versions))


def a_group(version=None, name=0):
    rollout = None if version is None else a_rollout(version, version)
    return Group({"name": name}, [1], [2 * name, 2 * name + 1], rollout, f"weights {version}")


class FakeEngine:
    """Answers at once, or when told to; says which version it had."""

    def __init__(self):
        self.version, self.fingerprint, self.log, self.closed = 0, "weights 0", [], False
        self.gate, self.push_gate = threading.Event(), threading.Event()
        self.gate.set()
        self.push_gate.set()
        self.started = threading.Semaphore(0)

    def copy_weights(self, model):
        return model

    def push_weights(self, weights, version):
        self.push_gate.wait(10)
        self.log.append(("push", version))
        self.version, self.fingerprint = version, f"weights {version}"
        return self.fingerprint

    def generate(self, prompt_ids, max_new_tokens, sequence_ids=None, **options):
        version = self.version
        self.log.append(("generate", list(sequence_ids), version))
        self.started.release()
        while not self.gate.wait(0.01):
            if self.closed:
                raise RuntimeError("gone")
        if sequence_ids and sequence_ids[0] == "bad":
            raise OSError("the engine broke")
        n = len(prompt_ids)
        return Rollout(prompt_ids, [[i] for i in sequence_ids], [[0.0]] * n, [True] * n, [version] * n)

    def describe(self):
        return {"version": self.version}

    def close(self):
        self.closed = True


# --- the bound and the buffer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_at_the_bound_a_group_is_fresh_and_one_version_later_it_is_stale(bound):
    for now in (0, 5):
        assert not is_stale(now, now, bound) and not is_stale(now - bound, now, bound)
        assert is_stale(now - bound - 1, now, bound)


def test_a_group_is_as_old_as_its_oldest_token():
    assert Group({}, [1], [0, 1], a_rollout(7, 3)).version == 3


def test_split_is_the_inverse_of_join():
    groups = [a_group(version=i, name=i) for i in range(3)]
    groups[1].rollout = a_rollout(1, tokens=5)
    whole = join(groups)
    assert whole.version == [0, 0, 1, 2, 2] and [len(ids) for ids in whole.completion_ids] == [2, 2, 5, 2, 2]
    assert split(whole, [2, 1, 2]) == [group.rollout for group in groups]
    routed = a_rollout(0)
    routed.routes = [torch.zeros(2, 1, 1)]
    assert join([SimpleNamespace(rollout=routed), groups[0]]).routes is None  # not recorded for all: for none


def test_in_order_groups_leave_as_they_were_asked_for_however_they_finish():
    buffer, groups = Buffer("in_order"), [a_group(name=i) for i in range(4)]
    buffer.ask(groups)
    for group in reversed(groups):
        group.rollout = a_rollout(0, 0)
        buffer.finish([group])
    assert buffer.take(2, now=0, max_staleness=0) == (groups[:2], []) and len(buffer) == 2
    assert buffer.take(2, now=0, max_staleness=0) == (groups[2:], []) and len(buffer) == buffer.finished() == 0


def test_as_finished_a_late_group_holds_nobody_up():
    buffer, groups = Buffer("as_finished"), [a_group(name=i) for i in range(4)]
    buffer.ask(groups)
    for i in (3, 1):
        groups[i].rollout = a_rollout(0, 0)
        buffer.finish([groups[i]])
    assert buffer.take(2, now=0, max_staleness=0) == ([groups[3], groups[1]], [])
    assert len(buffer) == 2 and buffer.finished() == 0


@pytest.mark.parametrize("take", ["in_order", "as_finished"])
def test_stale_groups_are_told_apart_and_gone(take):
    buffer, groups = Buffer(take), [a_group(version=v, name=v) for v in (3, 2, 5)]
    buffer.ask(groups)
    buffer.finish(groups)
    fresh, stale = buffer.take(3, now=5, max_staleness=2)
    assert fresh == [groups[0], groups[2]] and stale == [groups[1]] and len(buffer) == 0


def test_an_error_reaches_who_waits_and_who_comes_later():
    buffer = Buffer()
    buffer.ask([a_group(), a_group(version=0, name=1)])
    threading.Timer(0.05, buffer.fail, [OSError("broke")]).start()
    assert len(buffer.settled()) == 2  # a checkpoint does not wait for ever
    with pytest.raises(OSError, match="broke"):
        buffer.take(2, 0, 0)
    with pytest.raises(RuntimeError, match="3 groups to take, but only 2 were asked for"):
        buffer.take(3, 0, 0)


# --- the engine in front of an engine ---------------------------------------------------------------------------------


def test_pushes_and_generations_happen_in_the_order_of_asking():
    inner = FakeEngine()
    with closing(AsyncEngine(inner)) as engine:
        inner.gate.clear()  # the first generation is under way while everything else is asked for
        for version in range(3):
            engine.push_weights("weights", version)
            engine.ask([a_group(name=version)], 4)
        assert engine.version == 2 and inner.version == 0
        inner.gate.set()
        taken, stale = engine.buffer.take(3, now=2, max_staleness=2)
    expected = [(("push", v), ("generate", [2 * v, 2 * v + 1], v)) for v in range(3)]
    assert inner.log == [job for pair in expected for job in pair]
    assert [group.version for group in taken] == [0, 1, 2] and not stale
    assert [group.fingerprint for group in taken] == ["weights 0", "weights 1", "weights 2"]


def test_with_finish_a_push_waits_for_all_workers_and_holds_up_what_follows():
    inner = FakeEngine()
    with closing(AsyncEngine(inner, Buffer("as_finished"), workers=3)) as engine:
        inner.gate.clear()
        engine.ask([a_group(name=0)], 4)
        engine.ask([a_group(name=1)], 4)
        assert inner.started.acquire(timeout=10) and inner.started.acquire(timeout=10)
        engine.push_weights("weights", 1)
        engine.ask([a_group(name=2)], 4)
        assert not inner.started.acquire(timeout=0.1) and ("push", 1) not in inner.log
        inner.gate.set()
        taken, _ = engine.buffer.take(3, now=1, max_staleness=1)
    assert sorted((g.sequence_ids[0], g.version) for g in taken) == [(0, 0), (2, 0), (4, 1)]


@pytest.mark.parametrize("on_push", ["continue", "restart"])
def test_weights_may_sample_before_their_push_is_over(on_push):
    """As on a server, which goes on before the push is proved to have arrived."""
    inner = FakeEngine()
    push = inner.push_weights

    def slow(weights, version):
        fingerprint = push(weights, version)
        engine.ask([a_group()], 4)
        assert inner.started.acquire(timeout=10)
        threading.Event().wait(0.1)
        assert engine.buffer.finished() == 0
        return fingerprint

    with closing(AsyncEngine(inner, on_push=on_push)) as engine:
        inner.push_weights = slow
        engine.push_weights("weights", 1)
        taken, _ = engine.buffer.take(1, now=1, max_staleness=0)
    assert (taken[0].version, taken[0].fingerprint) == (1, "weights 1")


def test_nobody_generates_while_a_push_is_under_way():
    inner = FakeEngine()
    with closing(AsyncEngine(inner, Buffer("as_finished"), workers=2)) as engine:
        inner.push_gate.clear()
        engine.push_weights("weights", 1)
        engine.ask([a_group()], 4)
        assert not inner.started.acquire(timeout=0.1)
        inner.push_gate.set()
        taken, _ = engine.buffer.take(1, now=1, max_staleness=0)
    assert taken[0].version == 1


@pytest.mark.parametrize("on_push", ["continue", "restart"])
def test_otherwise_a_push_goes_through_at_once(on_push):
    inner = FakeEngine()
    with closing(AsyncEngine(inner, on_push=on_push)) as engine:
        inner.gate.clear()
        engine.ask([a_group(name=0)], 4)
        assert inner.started.acquire(timeout=10)
        engine.push_weights("weights", 1)
        assert inner.log[-1] == ("push", 1) and inner.version == 1
        inner.gate.set()
        engine.buffer.take(1, now=1, max_staleness=1)


def test_generate_waits_for_its_turn_and_passes_options_on():
    inner = FakeEngine()
    with closing(AsyncEngine(inner)) as engine:
        engine.push_weights("weights", 4)
        answer = engine.generate([[1], [2]], 3, sequence_ids=[8, 9])
    assert answer.version == [4, 4] and answer.completion_ids == [[8], [9]]


def test_describe_waits_for_its_turn():
    inner = FakeEngine()
    with closing(AsyncEngine(inner)) as engine:
        inner.push_gate.clear()
        engine.push_weights("weights", 4)
        threading.Timer(0.05, inner.push_gate.set).start()
        assert engine.describe() == {"version": 4}


def test_what_was_asked_for_is_taken_back_and_pushes_still_arrive():
    inner = FakeEngine()
    with closing(AsyncEngine(inner)) as engine:
        done = a_group(name=9)
        engine.ask([done], 4)
        while not engine.buffer.finished():
            threading.Event().wait(0.001)
        inner.gate.clear()
        for version in range(1, 4):  # the first generation is under way, the others wait, pushes between them
            engine.ask([a_group(name=version)], 4)
            engine.push_weights("weights", version)
        assert inner.started.acquire(timeout=10) and inner.started.acquire(timeout=10)
        threading.Timer(0.05, inner.gate.set).start()
        engine.discard()
        assert len(engine.buffer) == engine.buffer.finished() == 0
        assert [job[0] for job in inner.log] == ["generate", "generate", "push", "push", "push"] and inner.version == 3
        engine.ask([a_group(name=5)], 4)
        taken, _ = engine.buffer.take(1, now=3, max_staleness=0)
        assert [group.sequence_ids for group in taken] == [[10, 11]]


def test_taking_back_from_an_engine_that_broke_says_so():
    inner = FakeEngine()
    with closing(AsyncEngine(inner)) as engine:
        inner.gate.clear()
        bad = a_group()
        bad.sequence_ids = ["bad"]
        engine.ask([bad], 4)
        assert inner.started.acquire(timeout=10)
        threading.Timer(0.05, inner.gate.set).start()
        with pytest.raises(OSError, match="the engine broke"):
            engine.discard()


def test_an_error_of_the_engine_reaches_everybody_and_nothing_hangs():
    inner = FakeEngine()
    with closing(AsyncEngine(inner)) as engine:
        bad = a_group()
        bad.sequence_ids = ["bad"]
        engine.ask([bad], 4)
        calls = (
            lambda: engine.buffer.take(1, 0, 0),
            lambda: engine.generate([[1]], 1, sequence_ids=[0]),
            lambda: engine.push_weights("weights", 1),
            lambda: engine.ask([a_group()], 4),
        )
        for call in calls:
            with pytest.raises(OSError, match="the engine broke"):
                call()


def test_close_ends_threads_in_mid_generation():
    before = threading.active_count()
    inner = FakeEngine()
    inner.gate.clear()
    engine = AsyncEngine(inner, Buffer("as_finished"), workers=2)
    engine.ask([a_group()], 4)
    assert inner.started.acquire(timeout=10) and threading.active_count() == before + 2
    engine.close()
    engine.close()
    assert inner.closed and threading.active_count() == before
    with pytest.raises(RuntimeError, match="the rollout engine is closed"):
        engine.ask([a_group()], 4)


def a_schedule(inner, bound=2, updates=1, take="in_order", recycle=True, workers=1, **changes):
    """Four groups of two a sampling; group i is prompt i with streams 2 i and 2 i + 1."""
    engine = AsyncEngine(inner, Buffer(take), workers=workers)

    def draw(cursor):
        return Group({"prompt": cursor}, [cursor], [2 * cursor, 2 * cursor + 1])

    return Ahead(engine, draw, 4, bound // updates, bound, recycle, max_new_tokens=4, **changes)


def consume(schedule, now):
    schedule.engine.push_weights("weights", now)
    schedule.ask()
    return schedule.take(now)


@pytest.mark.parametrize(
    ("bound", "updates", "ahead"), [(0, 1, 0), (1, 1, 1), (4, 1, 4), (4, 2, 2), (5, 2, 2), (2, 2, 1)]
)
def test_sampling_k_comes_from_the_version_of_consumption_k_minus_a(bound, updates, ahead):
    schedule = a_schedule(FakeEngine(), bound, updates)
    with closing(schedule.engine):
        for k in range(8):
            groups = consume(schedule, k * updates)
            assert [group.row["prompt"] for group in groups] == [4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3]
            assert {group.version for group in groups} == {max(0, k - ahead) * updates}
            assert [i for group in groups for i in group.sequence_ids] == list(range(8 * k, 8 * k + 8))
            assert len(schedule.engine.buffer) == 4 * ahead


class Late(FakeEngine):
    """Groups finish in a random order, some much later."""

    def __init__(self, seed):
        super().__init__()
        self.random, self.lock = random.Random(seed), threading.Lock()

    def generate(self, prompt_ids, max_new_tokens, **options):
        answer = super().generate(prompt_ids, max_new_tokens, **options)
        with self.lock:
            pause = self.random.choice([0, 0, 0, 0, 0.002, 0.02])
        threading.Event().wait(pause)
        return answer


@pytest.mark.parametrize("recycle", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_thousand_updates_never_pass_the_bound(recycle):
    """Free-running: four workers, groups used as they finish, one to four updates a sampling taken at random."""
    pick, used, largest, now = random.Random(1), [], 0, 0
    schedule = a_schedule(Late(0), 2, take="as_finished", recycle=recycle, workers=4)
    with closing(schedule.engine):
        while now < 1000:
            groups = consume(schedule, now)
            assert len(groups) == 4 and all(0 <= now - group.version <= 2 for group in groups)
            used += [(group.row["prompt"], tuple(group.sequence_ids)) for group in groups]
            largest = max(largest, len(schedule.engine.buffer))
            now += pick.choice([1, 1, 2, 4])
    assert largest <= 2 * 4 and schedule.stale > 10 and len(schedule.engine._fingerprints) < 10
    assert len({ids for _, ids in used}) == len(used)  # no sample is used twice
    prompts = [prompt for prompt, _ in used]
    assert len(set(prompts)) == len(prompts)  # and no prompt either
    missing = set(range(max(prompts) + 1)) - set(prompts)
    if recycle:
        assert len(missing) <= 3 * 4 and schedule.recycled > 0  # they are in the buffer or about to come back
    else:
        assert len(missing) >= schedule.stale - 3 * 4 and schedule.recycled == 0


def test_stale_groups_are_asked_for_again_with_streams_of_their_own():
    """In order: three samplings were made by version 0, then training jumps ahead."""
    streams = []
    for rank in range(2):
        schedule = a_schedule(FakeEngine(), 2, rank=rank, world=2)
        with closing(schedule.engine):
            consume(schedule, 0)
            groups = consume(schedule, 3)  # the two samplings ahead have version 0
            assert schedule.stale == 8 and {group.version for group in groups} == {3}
            # what was asked for at version 3 comes first, then the prompts that were given up
            assert [group.row["prompt"] for group in groups] == [12, 13, 14, 15]
            later = consume(schedule, 4) + consume(schedule, 5)
            assert [group.row["prompt"] for group in later] == list(range(4, 12))
            streams += [i for group in later for i in group.sequence_ids]
    assert len(set(streams)) == len(streams) == 32 and min(streams) >= async_rollout.RECYCLED_STREAM


def test_a_schedule_is_saved_with_everything_that_was_asked_for():
    whole, fresh = a_schedule(Late(0), 2), a_schedule(FakeEngine(), 2)
    with closing(whole.engine), closing(fresh.engine):
        consume(whole, 0)
        consume(whole, 4)  # stale ones are on their way again
        state = whole.state_dict()
        assert len(state["groups"]) == len(whole.engine.buffer) == 8
        fresh.load_state_dict(state)
        for now in (5, 6, 7):
            a, b = consume(whole, now), consume(fresh, now)
            assert [(g.row, g.sequence_ids, g.rollout) for g in a] == [(g.row, g.sequence_ids, g.rollout) for g in b]
        assert fresh.recycled == whole.recycled and fresh.cursor == whole.cursor


def test_a_checkpoint_between_resumption_and_sampling_keeps_what_a_failed_engine_owed():
    """With several updates a sampling a resumed run may save before it samples: what is owed must not be waited for."""
    first, second, third = (a_schedule(FakeEngine(), 2) for _ in range(3))
    with closing(first.engine), closing(second.engine), closing(third.engine):
        consume(first, 0)
        state = first.state_dict()
        for group in state["groups"][::3]:
            group["rollout"] = None  # as after a failure of the engine
        second.load_state_dict(state)
        saved = []
        saving = threading.Thread(target=lambda: saved.append(second.state_dict()), daemon=True)
        saving.start()
        saving.join(20)
        assert saved == [state]
        third.load_state_dict(saved[0])
        for now in (1, 2):
            a, b = consume(second, now), consume(third, now)
            assert [g.sequence_ids for g in a] == [g.sequence_ids for g in b] and len(a) == len(b) > 0
        assert second.missing == third.missing == []
        assert len(second.state_dict()["groups"]) == len(second.engine.buffer)


def test_a_stage_leaves_groups_out_and_a_sampling_is_used_as_it_was_asked_for():
    """Two samplings ahead: one group of four, then two, then all; each stage shows two samplings later, at its own length."""
    inner, stage = FakeEngine(), [(1, 2)]
    limits = []
    generate = inner.generate
    inner.generate = lambda ids, limit, **options: (limits.append(limit), generate(ids, limit, **options))[1]
    first, second = (a_schedule(inner, 2, stage=lambda: stage[0]) for _ in range(2))
    schedule, used = first, []
    with closing(first.engine), closing(second.engine):
        for now, stage[0] in enumerate([(1, 2), (1, 2), (2, 3), (4, 4), (4, 4), (4, 4)]):
            if now == 4:  # a resumed run knows the sizes of what its buffer holds
                second.load_state_dict(first.state_dict())
                schedule = second
            used.append([group.row["prompt"] for group in consume(schedule, now)])
        schedule.engine.buffer.settled()
    assert used == [[0], [4], [8], [12], [16, 17], [20, 21, 22, 23]] and limits == [2, 2, 2, 2, 3, 4, 4, 4]


def test_two_ranks_share_the_stream_of_one():
    """Rank r takes its part of each global sampling: rows and random streams are those of one process."""

    def drawn(rank, world, cursors):
        per_sampling = 8 // world
        trainer = SimpleNamespace(
            num_generations=2, accelerator=SimpleNamespace(process_index=rank, num_processes=world),
            _groups_per_sampling=per_sampling, train_dataset=[{"prompt": 100 + i} for i in range(40)],
            _sampler=SimpleNamespace(prompts_of=lambda k: list(range(39 - 8 * k, 31 - 8 * k, -1))),
            _tokenize_prompts=lambda prompts: ([[p] for p in prompts], None, None),
        )  # fmt: skip
        groups = [AsyncTrainer._draw(trainer, cursor) for cursor in cursors]
        return [(group.row["prompt"], group.prompt_ids, group.sequence_ids) for group in groups]

    one, two = drawn(0, 1, range(24)), [drawn(rank, 2, range(12)) for rank in range(2)]
    assert one[9] == (130, [130], [18, 19])
    for sampling in range(3):
        a, b = (ranks[4 * sampling : 4 * sampling + 4] for ranks in two)
        assert a + b == one[8 * sampling : 8 * sampling + 8]


# --- an engine in a process of its own --------------------------------------------------------------------------------


def test_weights_travel_bit_for_bit_and_tied_ones_stay_tied():
    model = load(MODEL)
    copied = copy_weights(model)
    here, there = Pipe()
    threading.Thread(target=send_weights, args=(here, copied, 7), daemon=True).start()
    arrived, version = receive_weights(there)
    assert version == 7 and arrived.model_class is type(model)
    assert [s.name for s in arrived.sources] == [s.name for s in copied.sources]
    tensors = {s.name: s.tensor for s in arrived.sources}
    assert all(torch.equal(tensors[k], v) for k, v in model.state_dict().items())
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]
    before = copied.sources[0].tensor.clone()
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    assert torch.equal(copied.sources[0].tensor, before)  # a copy: training on does not change it


PROMPTS = [[11, 12, 13], [11, 12, 13], [20, 21]]
SAMPLE = {"sequence_ids": [3, 5, 7], "temperature": 1.0}


@pytest.fixture(scope="module")
def engines(moe):
    """The same engine in process and in its own, and a second set of weights."""
    model = load(moe)
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    build = {"eos_token_ids": eos, "pad_token_id": pad, "seed": 1, "record_routes": True, "rollout_dtype": "fp8"}
    build["record_support"] = True
    moved = load(moe)
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1.1)
    with closing(EngineProcess(model, **build)) as apart:
        yield SimpleNamespace(
            model=model, moved=moved, build=build, apart=apart, here=TransformersEngine(model, **build)
        )


def assert_same(a, b):
    assert a == b and all(torch.equal(x, y) for x, y in zip(a.routes, b.routes, strict=True))


def test_a_process_samples_what_the_engine_samples(engines):
    apart, here = engines.apart, engines.here
    assert apart.fingerprint == here.fingerprint and apart.version == 0
    assert_same(apart.generate(PROMPTS, 9, **SAMPLE), here.generate(PROMPTS, 9, **SAMPLE))
    first = here.fingerprint
    assert apart.push_weights(engines.moved, 3) == here.push_weights(engines.moved, 3) != first
    answer = apart.generate(PROMPTS, 9, **SAMPLE)
    assert_same(answer, here.generate(PROMPTS, 9, **SAMPLE))
    assert answer.version == [3] * 3 and apart.state_dict() == here.state_dict()
    cut = [engine.generate(PROMPTS, 9, top_k=5, top_p=0.9, **SAMPLE) for engine in (apart, here)]
    assert_same(*cut)  # the mass that was kept included
    assert equal(cut[0].support, cut[1].support) and 0 < min(map(min, cut[0].kept_mass)) < 0.99
    assert apart.describe() == here.describe() and apart.describe()["top_k"] == 5
    apart.load_state_dict(apart.state_dict())
    with pytest.raises(ValueError, match="^prompt 0 has no token"):
        apart.generate([[]], 3)
    with pytest.raises(ValueError, match="does not match the rollout engine's copy"):
        apart.push_weights(load(MODEL), 4)


@pytest.mark.slow  # another start of a process
def test_a_killed_process_is_one_sentence(engines):
    one = EngineProcess(engines.model, **engines.build)
    os.kill(one._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"^the rollout engine's process ended \(exit status -9\)"):
        one.generate(PROMPTS, 3)
    one.close()
    one.close()
    assert one._process.poll() == -9


class Pushing:
    """A push before the given token of a generation."""

    def __init__(self, engine, model, at, version=1):
        self.engine, self.model, self.at, self.version, self.calls = engine, model, at, version, 0

    def __call__(self):
        self.calls += 1
        if self.calls == self.at:
            self.engine.push_weights(self.model, self.version)


def test_weights_that_come_in_mid_generation_sample_the_tokens_from_there_on(engines):
    old, new = (TransformersEngine(m, **engines.build) for m in (engines.model, engines.moved))
    engine = TransformersEngine(engines.model, **engines.build)
    at = 4  # before the forward that gives token 4: tokens 0..3 are the old weights'
    mixed = engine.generate(PROMPTS, 9, between_tokens=Pushing(engine, engines.moved, at), **SAMPLE)
    before, after = old.generate(PROMPTS, 9, **SAMPLE), new.generate(PROMPTS, 9, **SAMPLE)
    assert mixed.token_versions == [[0] * min(at, len(ids)) + [1] * (len(ids) - at) for ids in mixed.completion_ids]
    assert any(len(ids) > at for ids in mixed.completion_ids) and mixed.version == [0] * 3  # the oldest
    for i in range(3):
        assert mixed.completion_ids[i][:at] == before.completion_ids[i][:at]
        assert mixed.rollout_logps[i][:at] == before.rollout_logps[i][:at]
    assert [x[at:] for x in mixed.rollout_logps] != [x[at:] for x in before.rollout_logps]
    assert mixed.completion_ids != after.completion_ids
    late = engine.generate(PROMPTS, 9, between_tokens=lambda: None, **SAMPLE)
    assert late.token_versions == [[1] * len(ids) for ids in late.completion_ids] and late.version == [1] * 3


@pytest.mark.parametrize("on_push", ["finish", "continue", "restart"])
def test_what_the_other_process_does_with_a_push_that_waits(engines, on_push):
    """The worker of the process, with the weights in its pipe when the generation begins."""
    control, pushes = Pipe(), Pipe()
    settings = engines.build | {"device": None}
    control[0].send((settings, 1, on_push))
    sender = threading.Thread(target=send_weights, args=(pushes[0], copy_weights(engines.model), 0), daemon=True)
    sender.start()
    worker = _Worker(control[1], pushes[1])
    sender.join()
    assert control[0].recv() == (True, worker.engine.fingerprint)
    threading.Thread(target=send_weights, args=(pushes[0], copy_weights(engines.moved), 1), daemon=True).start()
    pushes[1].poll(10)
    answer = worker.generate(PROMPTS, 9, dict(SAMPLE))
    old, new = (TransformersEngine(m, **engines.build) for m in (engines.model, engines.moved))
    if on_push == "finish":
        assert_same(answer, old.generate(PROMPTS, 9, **SAMPLE))
        assert worker.engine.version == 0
    elif on_push == "restart":
        fresh = new.generate(PROMPTS, 9, **SAMPLE)
        assert answer.completion_ids == fresh.completion_ids and answer.rollout_logps == fresh.rollout_logps
        assert answer.version == [1] * 3 and {v for row in answer.token_versions for v in row} == {1}
    else:
        assert answer.token_versions == [[0] + [1] * (len(ids) - 1) for ids in answer.completion_ids]
        assert answer.version == [0] * 3 and worker.engine.version == 1


def test_unknown_words_are_refused(engines):
    with pytest.raises(ValueError, match="on_push is 'stop': choose one of finish, continue, restart"):
        EngineProcess(engines.model, **engines.build, on_push="stop")
    with pytest.raises(ValueError, match="on_push is 'stop'"):
        AsyncEngine(FakeEngine(), on_push="stop")


# --- the recipe -------------------------------------------------------------------------------------------------------


def recording(base):
    """A trainer that keeps every micro-batch and the weights that each update starts from."""

    class Recording(base):
        def _compute_loss(self, model, inputs):
            self.seen = getattr(self, "seen", [])
            kept = {k: v.clone() for k, v in inputs.items() if torch.is_tensor(v)}
            self.seen.append((self.state.global_step, kept | {"support": inputs.get("support")}))
            self.starts = getattr(self, "starts", {})
            self.starts.setdefault(self.state.global_step, weights(self))
            return super()._compute_loss(model, inputs)

    return Recording


class InProcess(TransformersEngine):
    """In place of EngineProcess, whose start takes seconds: the same samples from a thread of this process."""

    def __init__(self, *args, threads, on_push, **kwargs):
        super().__init__(*args, **kwargs)


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(async_rollout, "EngineProcess", InProcess)


def trained(make, folder, model, base, **changes):
    with closing(make(folder, model, trainer=recording(base), **changes)) as trainer:
        trainer.train()
    return trainer


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), {"num_minibatches": 2, "routing_replay": "r3"} | MASK],
    ids=["on_policy", "r3_and_mask"],
)
def test_with_staleness_0_a_run_is_the_synchronous_one_bit_for_bit(moe, tmp_path, changes):
    changes = {"max_steps": 4, **FP8, **SGD, **changes}
    sync = trained(make_minirl, tmp_path / "sync", moe, MiniRLTrainer, **changes)
    apart = trained(make_async, tmp_path / "async", moe, MiniRLAsyncTrainer, max_staleness=0, **changes)
    assert equal(weights(sync), weights(apart)) and not equal(sync.starts[0], weights(sync))
    a, b = logged(sync), logged(apart, skip="async/")
    assert a == b and len(a) == 4
    for (_, x), (_, y) in zip(sync.seen, apart.seen, strict=True):
        assert equal(x, y) and (x["support"] is None) == ("top_k" not in changes)
    assert logged(apart)[0]["async/staleness/max"] == 0
    assert apart.engine.engine._process.poll() is not None  # `trained` closed it: no process is left


def test_samples_come_from_the_weights_that_the_schedule_names(moe, tmp_path, in_process):
    """Two samplings ahead: the tokens of sampling k are those of an engine with the weights after update k - 2."""
    trainer = trained(make_async, tmp_path, moe, MiniRLAsyncTrainer, max_staleness=2, max_steps=5, **SGD)
    model = load(moe)
    for step, x in trainer.seen:
        version = max(0, step - 2)
        assert set(x["version"].tolist()) == {version}
        model.load_state_dict(trainer.starts[version], strict=False)
        ids = [row[mask.bool()].tolist() for row, mask in zip(x["prompt_ids"], x["prompt_mask"], strict=True)]
        made = [row[mask.bool()].tolist() for row, mask in zip(x["completion_ids"], x["completion_mask"], strict=True)]
        with torch.no_grad():
            for prompt, completion, logps in zip(ids, made, x["sampling_per_token_logps"], strict=True):
                logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
                own = logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
                assert torch.allclose(own, logps[: len(completion)], atol=2e-4)
    records = logged(trainer)
    assert [r["async/staleness/max"] for r in records] == [0, 1, 2, 2, 2]
    assert [r.get("rollout/weights_changed") for r in records] == [None, None, None, 1, 1]
    assert all(r["async/stale_groups"] == 0 for r in records) and records[-1]["omega/max"] > 1.001
    assert trainer.timeline.staleness == {0: 2, 1: 2, 2: 6}
    glossary = set(
        re.findall(r"`([\w./]+)`", (REPO / "README.md").read_text().split("## Metrics")[1].split("\n## ")[0])
    )
    names = {re.sub(r"/(min|p01|p50|p99|max)$", "/...", name) for name in records[-1] if name.startswith("async/")}
    assert names and names <= glossary


def test_a_full_buffer_is_resumed_bit_for_bit(moe, tmp_path, in_process):
    changes = {
        "max_staleness": 4,
        "num_minibatches": 2,
        "routing_replay": "r3",
        "save_strategy": "steps",
        "save_steps": 3,
    }
    changes |= FP8 | MASK | {"per_device_train_batch_size": 8, "max_steps": 6}
    whole = trained(make_async, tmp_path / "whole", moe, MiniRLAsyncTrainer, **changes)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    state = torch.load(checkpoint / "rollout_state_0.pt", weights_only=True)["own"]
    assert (
        len(state["groups"]) == 8 and state["cursor"] == 16
    )  # two samplings of four groups, ahead of the two that were taken
    with closing(make_async(tmp_path / "rest", moe, trainer=recording(MiniRLAsyncTrainer), **changes)) as rest:
        rest.train(resume_from_checkpoint=str(checkpoint))
    assert equal(weights(whole), weights(rest)) and not equal(whole.starts[0], weights(whole))
    for (a, x), (b, y) in zip([s for s in whole.seen if s[0] >= 3], rest.seen, strict=True):
        assert a == b and equal(x, y)
    a, b = logged(whole)[3:], logged(rest)[3:]
    timed = ("async/waiting_share", "async/engine_tokens", "async/trainer_tokens", "async/buffer")
    assert [{k: v for k, v in r.items() if not k.startswith(timed)} for r in a] == [
        {k: v for k, v in r.items() if not k.startswith(timed)} for r in b
    ]


@pytest.mark.parametrize("take", ["in_order", "as_finished"])
def test_an_engine_that_fails_takes_no_checkpoint_along_and_what_it_owed_is_sampled_after_the_resumption(
    moe, tmp_path, in_process, take
):
    changes = {"max_staleness": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 5, "take": take}
    with closing(make_async(tmp_path / "run", moe, trainer=recording(MiniRLAsyncTrainer), **changes)) as failing:
        inner, calls = failing.engine.engine, []
        generate = inner.generate

        def breaks(*args, **kwargs):
            calls.append(args)
            if len(calls) == (4 if take == "in_order" else 7):  # the second half of a sampling, group by group
                raise OSError("the engine broke")
            return generate(*args, **kwargs)

        inner.generate = breaks
        with pytest.raises(OSError, match="the engine broke"):
            failing.train()
        last = failing.state.global_step
    checkpoint = tmp_path / "run" / f"checkpoint-{last}"
    assert last < 5 and (checkpoint / "trainer_state.json").exists()
    own = torch.load(checkpoint / "rollout_state_0.pt", weights_only=True)["own"]
    assert 0 < sum(group["rollout"] is None for group in own["groups"]) < len(own["groups"]) or last == 3
    with closing(make_async(tmp_path / "run", moe, trainer=recording(MiniRLAsyncTrainer), **changes)) as rest:
        rest.train(resume_from_checkpoint=str(checkpoint))
    assert [step for step, _ in rest.seen] == list(range(last, 5))
    assert all(0 <= step - int(x["version"].min()) <= 2 for step, x in rest.seen)
    owed = [i for group in own["groups"] if group["rollout"] is None for i in group["sequence_ids"]]
    assert owed and rest.ahead.missing == [] and rest.ahead.recycled == rest.ahead.stale == 0


def test_a_lower_bound_after_a_resume_samples_stale_groups_again(moe, tmp_path, in_process):
    changes = {"save_strategy": "steps", "save_steps": 3}
    trained(make_async, tmp_path / "a", moe, MiniRLAsyncTrainer, max_staleness=3, max_steps=3, **changes)
    with closing(
        make_async(tmp_path / "b", moe, trainer=recording(MiniRLAsyncTrainer), max_steps=6, max_staleness=1)
    ) as rest:
        rest.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert all(step - int(x["version"].min()) <= 1 for step, x in rest.seen) and len(rest.seen) == 3
    assert rest.ahead.stale > 0 and rest.ahead.recycled == rest.ahead.stale
    assert sum(r["async/stale_groups"] for r in logged(rest)[3:]) == rest.ahead.stale


def test_sets_and_log_probs_of_a_stale_sample_are_those_of_the_weights_that_sampled_it(moe, tmp_path, in_process):
    changes = {"max_steps": 4, "save_strategy": "no"} | SGD | MASK
    trainer = trained(make_async, tmp_path, moe, MiniRLAsyncTrainer, max_staleness=2, **changes)
    model = load(moe)
    for step, x in trainer.seen:
        model.load_state_dict(trainer.starts[max(0, step - 2)], strict=False)
        width = x["completion_ids"].shape[1]
        with torch.no_grad():
            logits = model(
                input_ids=torch.cat([x["prompt_ids"], x["completion_ids"]], 1),
                attention_mask=torch.cat([x["prompt_mask"], x["completion_mask"]], 1),
            ).logits[:, -width - 1 : -1]
        counts = x["completion_mask"].bool()
        ids = torch.where(counts, x["completion_ids"], 0)
        wanted = support_logps(logits, ids, join_support(x["support"], width))
        torch.testing.assert_close(x["sampling_per_token_logps"][counts], wanted[counts], atol=2e-4, rtol=1e-4)
    records = logged(trainer)
    assert all(r["support/replayed_frac"] == 1 and r["support/rollout_kept_mass"] < 0.99 for r in records)
    assert records[0]["support/agreement"] == pytest.approx(1, abs=1e-4) and records[3]["support/agreement"] < 0.9999
    assert records[0]["mismatch/mean"] == pytest.approx(1, abs=1e-4)


# --- under the guard ---------------------------------------------------------------------------------------------------

GUARDED = {
    "guard": "rollback", "guard_k": 1, "guard_bounds": ["grad_norm>1000:warn", "grad_norm>1000:critical:2"], "save_steps": 1,
    "save_strategy": "steps", "max_steps": 9, "max_completion_length": 8,
}  # fmt: skip
BARE = {k: v for k, v in GUARDED.items() if not k.startswith(("guard", "save"))}


@pytest.mark.parametrize("bound", [0, 2])
def test_a_rollback_takes_back_what_was_sampled_ahead_and_equals_a_clean_run(moe, tmp_path, in_process, bound):
    """Two spikes, and the alarm that matters after the second: by then the spoilt weights have been pushed and, with staleness,
    have sampled ahead. The run goes back, and ends as one that left both updates out."""
    make, changes = functools.partial(make_async, model=moe), {"max_staleness": bound} | MASK
    with closing(faulty(tmp_path / "a", "spike", (5, 6), make=make, **GUARDED | changes)) as guarded:
        asked = []
        ask = guarded.engine.ask
        guarded.engine.ask = lambda groups, *a, **k: (asked.extend(groups), ask(groups, *a, **k))[1]
        stability.train(guarded)
        left = guarded.ahead.state_dict()
    with closing(faulty(tmp_path / "b", "spike", (5, 6), make=make, **BARE | changes)) as clean:
        clean.add_callback(DropUpdate(clean, {5, 6}))
        clean.train()
        assert equal(left, clean.ahead.state_dict()) and len(left["groups"]) == 2 * bound
    (back,) = events(tmp_path / "a", "rollback")
    assert (back["to"], back["skip"]) == (3, [5, 6]) and guarded.state.global_step == 9
    assert {(e["metric"], e["step"]) for e in events(tmp_path / "a", "alarm")} == {("grad_norm", 5), ("grad_norm", 6)}
    assert [e["step"] for e in events(tmp_path / "a", "skip")] == [5, 6]
    assert equal(weights(guarded), weights(clean)) and not equal(weights(clean), load(moe).state_dict())
    rewards = [[r["reward"] for r in logged(t)][-6:] for t in (guarded, clean)]
    assert rewards[0] == rewards[1]
    # what the checkpoint held was not sampled again, what came after it was, by other weights
    streams = [group.sequence_ids[0] // 4 for group in asked]
    twice = sorted({s for s in streams if streams.count(s) == 2})
    assert twice == list(range(2 * (3 + bound), 2 * (6 + bound)))


def test_under_the_guard_a_halt_leaves_no_thread_and_names_the_checkpoint(moe, tmp_path, in_process):
    before = threading.active_count()
    make = functools.partial(make_async, model=moe, max_staleness=2)
    with closing(faulty(tmp_path, "nan", 3, make=make, **GUARDED | {"guard": "halt", "max_steps": 4})) as trainer:
        with pytest.raises(GuardHalt, match=r"step 3: grad_norm is not finite; .*checkpoint-1"):
            stability.train(trainer)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    "error", [OSError("the engine broke"), RuntimeError("No space left on device")], ids=["os", "disk"]
)
def test_an_engine_that_dies_is_neither_an_anomaly_nor_a_full_disk(moe, tmp_path, monkeypatch, in_process, error):
    """It dies while it samples ahead, and whoever waits for that is the checkpoint."""
    generate, calls = InProcess.generate, []

    def dying(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:  # the alignment check, two samplings ahead of the first, and then
            raise error
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(InProcess, "generate", dying)
    with closing(make_async(tmp_path, moe, max_staleness=2, **GUARDED)) as trainer:
        with pytest.raises(type(error), match=str(error)):
            stability.train(trainer)
    assert {e.get("kind") for e in events(tmp_path)} == {None, "alignment", "crash"}
    assert json.loads((tmp_path / "guard.json").read_text())["rollbacks"] == []


@pytest.mark.slow
def test_staged_runs_are_the_synchronous_ones_with_staleness_0(moe, tmp_path, in_process):
    changes = {
        "guard": "warn", "guard_stages": "small:1,medium:1,full", "max_steps": 4, "per_device_train_batch_size": 16,
        "max_completion_length": 16, "guard_bounds": ["guard/effective_batch<-1:warn:10"],
    }  # fmt: skip
    runs = []
    for make, more in ((make_minirl, {}), (make_async, {"max_staleness": 0}), (make_async, {"max_staleness": 1})):
        with closing(make(tmp_path / str(len(runs)), moe, **changes | more | SGD)) as trainer:
            sizes = []
            trainer.add_callback(Sizes(trainer, sizes))
            stability.train(trainer)
        runs.append((weights(trainer), sizes))
    assert equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1] == [4, 8, 16, 16] and runs[2][1] == [4, 4, 8, 16]  # ahead: one sampling later


class Sizes(TrainerCallback):
    def __init__(self, trainer, sizes):
        self.trainer, self.sizes = trainer, sizes

    def on_step_end(self, args, state, control, **kwargs):
        self.sizes.append(self.trainer._counts["seq_sum"])


def test_an_error_in_the_engine_ends_the_run_with_its_sentence(moe, tmp_path, monkeypatch, in_process):
    def broken(self, *args, **kwargs):
        raise ValueError("no more tokens")

    monkeypatch.setattr(InProcess, "generate", broken)
    before = threading.active_count()
    with closing(make_async(tmp_path, moe)) as trainer, pytest.raises(ValueError, match="no more tokens"):
        trainer.train()
    assert threading.active_count() <= before


def test_truncated_sampling_without_the_mask_is_told(moe, tmp_path, in_process):
    with closing(make_async(tmp_path, moe, top_p=0.7, max_steps=1)) as trainer:
        with pytest.warns(
            UserWarning, match="top_p 0.7, .* expect a mismatch pi_old/mu of 0.* add --keep_sampling_mask"
        ):
            trainer.train()


def test_the_clip_may_look_at_the_sampling_weights():
    """--clip_against behaviour: M is decided by pi_theta / mu, by hand in float64."""
    b, masks = planted_batch(0), {}
    for against in ("proximal", "behaviour"):
        args = SimpleNamespace(no_is=False, no_clip=False, is_cap=2.0, aggregation="seq_sum", clip_against=against)
        tracked = {}
        trainer = SimpleNamespace(
            args=args, epsilon_low=0.2, epsilon_high=0.27, track_policy=lambda batch: None, flush=lambda: None,
            track=lambda name, values, mask=None, tracked=tracked: tracked.update({name: values}),
            normalizer=lambda how: 1.0,
            score=lambda model, inputs: SimpleNamespace(
                logps=inputs, old_logps=b.old, rollout_logps=b.rollout, mask=b.mask, advantages=b.advantages.unsqueeze(1)
            ),
        )  # fmt: skip
        live = b.logps.clone().requires_grad_()
        MiniRLAsyncTrainer._compute_loss(trainer, None, live).backward()
        anchor = b.old if against == "proximal" else b.rollout
        for i, row in enumerate(b.mask.tolist()):
            for j, counts in enumerate(row):
                r, a = math.exp(b.logps[i, j] - anchor[i, j]), b.advantages[i].item()
                drop = (a > 0 and r > 1.27) or (a < 0 and r < 0.8)
                weight = min(math.exp(b.logps[i, j] - b.rollout[i, j]), 2.0)
                wanted = 0.0 if drop or not counts else -weight * a
                assert live.grad[i, j].item() == pytest.approx(wanted, abs=1e-12)
        masks[against] = tracked["minirl/masked_frac"]
    assert not torch.equal(masks["proximal"], masks["behaviour"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_staleness": -1}, "--max_staleness -1 must be 0"),
        ({"max_staleness": 1, "num_minibatches": 2}, "--max_staleness 1 is below the 2 updates a sampling"),
        ({"on_push": "stop"}, "--on_push stop is unknown: use finish, continue, restart"),
        ({"take": "any"}, "--take any is unknown: use in_order, as_finished"),
        ({"stale_groups": "keep"}, "--stale_groups keep is unknown: use drop, recycle"),
        ({"rollout_workers": 0}, "--rollout_workers 0 must be at least 1"),
        ({"rollout_workers": 2}, "--rollout_workers 2 needs --take as_finished"),
        ({"use_vllm": True}, "--use_vllm is TRL's synchronous way to vLLM: use --engine vllm"),
        ({"clip_against": "old"}, "--clip_against old is unknown: use proximal or behaviour"),
        ({"no_is": True}, "--no_is with --max_staleness 1: without omega nothing corrects the staleness"),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused_in_one_sentence(tmp_path, flags, words):
    with pytest.raises(ValueError) as error:
        MiniRLAsyncConfig(**options(tmp_path, use_cpu=True, **flags))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_data_order_of_the_sampler_is_that_of_prompts_of(moe, tmp_path, in_process):
    with closing(make_async(tmp_path, moe, rows=10, num_minibatches=2, max_staleness=2)) as trainer:
        sampler = trainer._get_train_sampler()
        for epoch in range(3):
            sampler.epoch = epoch
            indices = list(sampler)
            chunks = [indices[i : i + 32] for i in range(0, len(indices), 32)]  # 4 prompts x 4 samples, twice
            assert len(chunks) == 2
            for place, chunk in enumerate(chunks):
                assert chunk[:16:4] == sampler.prompts_of(2 * epoch + place)
    assert len({tuple(sampler.prompts_of(k)) for k in range(6)}) > 3


LAUNCH = [
    "--max_steps=4", "--num_generations=4", "--max_completion_length=12", "--eval_problems=4", "--eval_samples=2", "--optim=sgd",
    "--learning_rate=0.05", "--max_grad_norm=0.0", "--lr_scheduler_type=constant", "--warmup_steps=0", "--rollout_dtype=float32",
    "--max_staleness=2", "--gradloc=off", "--save_steps=2", "--eval_every=2",
]  # fmt: skip


def launch(processes, folder, *more):
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = command if processes > 1 else [sys.executable]
    command += [str(REPO / "recipes/minirl_async_r3.py"), *LAUNCH, f"--output_dir={folder}", *more]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, cwd=folder.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return read_metrics(folder / "metrics.jsonl"), load_file(folder / "final" / "model.safetensors"), done.stdout


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_resume_bit_for_bit(tmp_path):
    one, two = (launch(n, tmp_path / str(n), f"--per_device_train_batch_size={16 // n}") for n in (1, 2))
    for a, b in zip(one[0], two[0], strict=True):
        for name in ("loss", "grad_norm", "reward", "omega/p50", "async/staleness/max", "eval/accuracy"):
            if name in a:
                assert a[name] == pytest.approx(b[name], abs=1e-5, rel=1e-4), (a["step"], name)
    assert max((one[1][k] - two[1][k]).abs().max().item() for k in one[1]) < 1e-5
    assert [r["async/staleness/max"] for r in two[0] if "async/staleness/max" in r] == [0, 1, 2, 2]
    for folder in ("1", "2"):
        assert (tmp_path / folder / "timeline.png").exists()
    assert "timeline" in two[2] and "the trainer waited" in two[2]
    checkpoint = f"--resume_from_checkpoint={tmp_path}/2/checkpoint-2"
    again = launch(2, tmp_path / "again", "--per_device_train_batch_size=8", checkpoint)
    assert all(torch.equal(two[1][k], again[1][k]) for k in two[1])
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(REPO / "engine_process.py") in (p.info["cmdline"] or [])
        and os.getpid() not in [q.pid for q in p.parents()]
    ]  # children of the test run itself belong to other tests
    assert not psutil.wait_procs(left, timeout=10)[1]


# --- what a run shows -------------------------------------------------------------------------------------------------


def test_timeline_sums_and_advice(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(async_rollout.time, "monotonic", lambda: clock.now)
    timeline = Timeline(keep=3)
    for lane, seconds in (("waiting", 3.0), ("scoring", 1.0), ("training", 6.0), ("generation", 5.0), ("push", 0.5)):
        start, clock.now = clock.now, clock.now + seconds
        assert timeline.add(lane, start, tokens=50) == clock.now
    assert timeline.waiting_share() == 0.3 and timeline.rate("generation") == 10 and timeline.rate("copying") == 0
    assert list(timeline.spans) == [("training", 4.0, 10.0), ("generation", 10.0, 15.0), ("push", 15.0, 15.5)]
    ahead, sync = (SimpleNamespace(max_staleness=s, updates_per_sampling=2) for s in (4, 0))
    assert "generation-bound" in timeline.advice(ahead) and "--engine vllm" in timeline.advice(ahead)
    assert "synchronous" in timeline.advice(sync) and "--max_staleness 2" in timeline.advice(sync)
    timeline.seconds["training"] = 60.0
    assert "trainer-bound" in timeline.advice(ahead)
    timeline.staleness.update([0, 1, 1])
    timeline.fill.append((1.0, 2, 4))
    timeline.draw(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    Timeline().draw(tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()
