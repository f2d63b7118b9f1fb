"""Rollouts that do not wait for training, training that does not wait for rollouts: how far apart they may drift.

The trainer asks for groups ahead of time, a thread hands them to a rollout engine that keeps weights of its own, and
finished groups wait in a bounded buffer. A weight *version* is the number of optimizer steps that made it. A group's
*staleness* is the current version minus the one that sampled it, when the group leaves the buffer; it never exceeds
`--max_staleness` (S). With U updates a sampling, A = S // U samplings are asked for ahead:

    consumption k:   push version kU | ask for sampling k + A | take sampling k | U updates

So sampling k comes from version max(0, k - A) U, whatever the machine's speed: the same seed gives the same run. With
S = 0 the order is ask, take, train: the synchronous recipe, bit for bit.

`AsyncEngine` is an engine in front of an engine; `Buffer` holds what was asked for; `AsyncTrainer` connects both to a
recipe; `Timeline` draws who waited for whom.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from transformers import TrainerCallback

from engine_process import ON_PUSH, EngineProcess
from rlvr_common import RLVRConfig, RLVRTrainer, truncates
from rlvr_report import unless_full
from rollout import Rollout, Weights

TAKE = ("in_order", "as_finished")
STALE_GROUPS = ("drop", "recycle")
RECYCLED_STREAM = 2**41  # random streams of groups that are sampled again, beyond those of training and of evaluation

# ---------------------------------------------------------------- groups that were asked for


def is_stale(version: int, now: int, max_staleness: int) -> bool:
    """Is what version `version` sampled too old for an update of version `now`? At the bound itself it is not."""
    return now - version > max_staleness


@dataclass
class Group:
    """The G samples of one prompt: what was asked for, and the answer once it is there.

    row           the row of the dataset
    prompt_ids    token ids of its prompt
    sequence_ids  G random streams
    rollout       G completions, None until they are sampled
    fingerprint   of the weights that sampled them
    """

    row: dict
    prompt_ids: list[int]
    sequence_ids: list[int]
    rollout: Rollout | None = None
    fingerprint: str = ""

    @property
    def version(self) -> int:
        """The oldest weights that sampled a token of the group."""
        return min(self.rollout.version)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors of the group, its rollout as a dict."""
        return vars(self) | {"rollout": self.rollout and vars(self.rollout).copy()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Group":
        """The group that `state_dict` described."""
        return cls(**state | {"rollout": state["rollout"] and Rollout(**state["rollout"])})


def join(groups: Iterable[Group]) -> Rollout:
    """One rollout of all the groups' sequences, in order."""
    parts = [group.rollout for group in groups]
    joined = {}
    for name in vars(parts[0]):
        values = [getattr(part, name) for part in parts]
        joined[name] = None if any(value is None for value in values) else [x for value in values for x in value]
    return Rollout(**joined)


def split(rollout: Rollout, sizes: Iterable[int]) -> list[Rollout]:
    """The inverse of `join`."""
    parts, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        parts.append(Rollout(**{k: None if v is None else v[part] for k, v in vars(rollout).items()}))
        start += size
    return parts


class Buffer:
    """The groups that were asked for and not taken yet, in the order of asking; safe to use from several threads.

    take  in_order: groups leave in the order in which they were asked for; as_finished: in that in which they finished
    """

    def __init__(self, take: str = "in_order"):
        self.take_as = take
        self._asked: list[Group] = []
        self._finished: list[Group] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def __len__(self) -> int:
        with self._changed:
            return len(self._asked)

    def finished(self) -> int:
        """How many groups could be taken now, were they all fresh."""
        with self._changed:
            return len(self._finished)

    def ask(self, groups: Iterable[Group]) -> None:
        """The groups were asked for: `take` may wait for them."""
        with self._changed:
            self._asked += groups

    def finish(self, groups: Iterable[Group]) -> None:
        """The groups have their rollouts."""
        with self._changed:
            self._finished += groups
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more groups will finish; whoever waits for one gets the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def take(self, count: int, now: int, max_staleness: int) -> tuple[list[Group], list[Group]]:
        """Waits for `count` groups and removes them -> (fresh, stale), `count` in all, or fewer fresh ones when a stale
        group stood among them. At least `count` groups must have been asked for."""
        with self._changed:
            if len(self._asked) < count:
                raise RuntimeError(f"{count} groups to take, but only {len(self._asked)} were asked for")
            while True:
                ready = self._ready(count)
                if len(ready) == count:
                    break
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            gone = {id(group) for group in ready}
            self._asked = [group for group in self._asked if id(group) not in gone]
            self._finished = [group for group in self._finished if id(group) not in gone]
        stale = [group for group in ready if is_stale(group.version, now, max_staleness)]
        fresh = [group for group in ready if not is_stale(group.version, now, max_staleness)]
        return fresh, stale

    def _ready(self, count: int) -> list[Group]:
        if self.take_as == "as_finished":
            return self._finished[:count]
        first = self._asked[:count]
        return first if all(group.rollout is not None for group in first) else []

    def clear(self) -> None:
        """Nothing was asked for."""
        with self._changed:
            self._asked, self._finished = [], []

    def settled(self, owed: int = 0) -> list[Group]:
        """Waits until everything that was asked for has finished, or no more will -> all groups, in the order in which they
        leave. After a failure some have no rollout, and so have the `owed` ones that nobody samples yet."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._finished) + owed == len(self._asked) or self._error is not None)
            if self.take_as == "in_order":
                return list(self._asked)
            finished = {id(group) for group in self._finished}
            return self._finished + [group for group in self._asked if id(group) not in finished]


# ---------------------------------------------------------------- who did what when


class Timeline:
    """Spans of time by lane, their sums, and the figure. Times are seconds since the first use.

    `keep` bounds the memory: the sums count every span, the figure shows the newest ones.
    """

    TRAINER = ("copying", "waiting", "scoring", "training")
    ENGINE = ("generation", "push")

    def __init__(self, keep: int = 4096):
        self.start, self.spans, self.seconds, self.tokens = time.monotonic(), deque(maxlen=keep), Counter(), Counter()
        self.staleness, self.fill = Counter(), deque(maxlen=keep)
        self._lock = threading.Lock()

    def add(self, lane: str, start: float, tokens: int = 0) -> float:
        """A span from `start` (time.monotonic) to now, which is returned."""
        end = time.monotonic()
        with self._lock:
            self.spans.append((lane, start - self.start, end - self.start))
            self.seconds[lane] += end - start
            self.tokens[lane] += tokens
        return end

    def rate(self, lane: str) -> float:
        """Tokens a second while the lane was busy."""
        return self.tokens[lane] / self.seconds[lane] if self.seconds[lane] else 0.0

    def waiting_share(self) -> float:
        """Share of the trainer's time that it waited for rollouts."""
        total = sum(self.seconds[lane] for lane in self.TRAINER)
        return self.seconds["waiting"] / total if total else 0.0

    def advice(self, args: "AsyncConfig") -> str:
        """One line: who waits for whom, and the flag that changes it."""
        updates = args.updates_per_sampling
        wall = time.monotonic() - self.start
        waiting, idle = self.waiting_share(), max(0.0, 1 - self.seconds["generation"] / wall) if wall else 0.0
        if waiting < 0.1:
            return (
                f"trainer-bound: the engine was idle {idle:.0%} of the time, the trainer waited {waiting:.0%}; more samples a prompt "
                "(--num_generations) cost little"
            )
        if not args.max_staleness:
            return (
                f"synchronous: the trainer waited {waiting:.0%} of the time; --max_staleness {updates} overlaps generation and "
                "training"
            )
        return (
            f"generation-bound: the trainer waited {waiting:.0%} of the time, the engine was idle {idle:.0%}; use a faster engine "
            "or more of them (--engine vllm), or a lower --max_completion_length"
        )

    def draw(self, path: Path, steps: int = 12) -> None:
        """The newest spans (about `steps` updates of them), staleness as a histogram, the buffer's fill."""
        with self._lock:
            spans, staleness, fill = list(self.spans), dict(self.staleness), list(self.fill)
        if not spans:
            return
        figure = plt.figure(figsize=(14, 6.5), constrained_layout=True)
        grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
        top, left, right = (figure.add_subplot(grid[place]) for place in ((0, slice(None)), (1, 0), (1, 1)))
        trained = [span for span in spans if span[0] == "training"][-steps:]
        since = trained[0][1] if trained else spans[0][1]
        lanes = (*self.ENGINE, *self.TRAINER)
        colors = {lane: f"C{i}" for i, lane in enumerate(lanes)}
        for lane, start, end in spans:
            if end >= since:
                row = 1 if lane in self.ENGINE else 0
                top.broken_barh([(start, end - start)], (row - 0.35, 0.7), color=colors[lane], edgecolor="white")
        top.legend(
            handles=[Patch(color=colors[lane], label=f"{lane} ({self.seconds[lane]:.0f} s)") for lane in lanes],
            loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(lanes),
        )  # fmt: skip
        top.set_yticks([0, 1], ["trainer", "engine"])
        top.set_xlabel(f"seconds since the start, the last {len(trained)} updates (in brackets: the whole run)")
        top.set_title(f"the trainer waited {self.waiting_share():.0%} of its time for rollouts")
        left.bar(list(staleness), list(staleness.values()), color="C7")
        left.xaxis.get_major_locator().set_params(integer=True)
        left.set_xlabel("staleness of a group when it was used (weight versions)")
        left.set_ylabel("groups")
        right.step([at for at, _, _ in fill], [done for _, done, _ in fill], where="post", label="finished")
        right.step([at for at, _, _ in fill], [asked for _, _, asked in fill], where="post", label="asked for")
        right.set_xlabel("seconds since the start")
        right.set_ylabel("groups in the buffer")
        if fill:
            right.legend()
        figure.savefig(path, dpi=90)
        plt.close(figure)


# ---------------------------------------------------------------- an engine in front of an engine


class AsyncEngine:
    """Does what an engine is asked, in the order of asking, on threads of its own.

    engine    what samples; it must not share weights with the trainer. `EngineProcess` and `vllm_engine.VLLMEngine` run
              beside it; a `TransformersEngine` shares the interpreter and overlaps with waiting only
    buffer    where finished groups go
    on_push   finish: a push waits for the generations before it and holds up those after it. continue, restart: it
              goes to the engine at once, which was built with the same word
    workers   generations under way at once. With one, and `finish`, a run depends on the order of asking alone
    """

    def __init__(
        self,
        engine: Any,
        buffer: Buffer | None = None,
        on_push: str = "finish",
        workers: int = 1,
        timeline: Timeline | None = None,
    ):
        if on_push not in ON_PUSH:
            raise ValueError(f"on_push is {on_push!r}: choose one of {', '.join(ON_PUSH)}")
        self.engine, self.on_push = engine, on_push
        self.buffer = Buffer() if buffer is None else buffer  # an empty one is false
        self.timeline = timeline or Timeline()
        self.version = engine.version  # the newest one that was pushed, whether it has arrived or not
        self._fingerprints = {engine.version: engine.fingerprint}
        self._jobs: deque[tuple[bool, Callable[[], None]]] = deque()  # (alone, job)
        self._running, self._alone, self._closing = 0, False, False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"rollout-{i}", daemon=True) for i in range(max(1, workers))
        ]
        for thread in self._threads:
            thread.start()

    # ---- what every engine offers

    @property
    def fingerprint(self) -> str:
        """Of the newest weights that arrived."""
        return self.engine.fingerprint

    def push_weights(self, model: torch.nn.Module | Weights, version: int) -> None:
        """Copies the weights before it returns (a collective call where they are sharded); they arrive in their turn."""
        weights = model if isinstance(model, Weights) else self.engine.copy_weights(model)
        self.version = int(version)

        def push():
            begun = time.monotonic()
            fingerprint = self.engine.push_weights(weights, version)
            with self._changed:
                self._fingerprints[int(version)] = fingerprint
                self._changed.notify_all()
            self.timeline.add("push", begun)

        if self.on_push == "finish":
            self._put(push, alone=True)
        else:
            push()

    def generate(self, prompt_ids: list[list[int]], max_new_tokens: int, **options: Any) -> Rollout:
        """As the engine's, after everything that was asked for before. Waits."""
        return self._wait_for(lambda: self.engine.generate(prompt_ids, max_new_tokens, **options))

    def describe(self) -> dict[str, Any]:
        """As the engine's, after everything that was asked for before. Waits."""
        return self._wait_for(self.engine.describe)

    def _wait_for(self, work: Callable[[], Any]) -> Any:
        done, answer = threading.Event(), []

        def job():
            answer.append(work())
            done.set()

        self._put(job)
        while not done.wait(0.1):
            self._raise()
        return answer[0]

    # ---- ahead of time

    def ask(self, groups: list[Group], max_new_tokens: int, **options: Any) -> None:
        """Samples the groups in their turn and puts them into the buffer."""
        self._raise()
        self.buffer.ask(groups)
        self.sample(groups, max_new_tokens, **options)

    def sample(self, groups: list[Group], max_new_tokens: int, **options: Any) -> None:
        """Groups that the buffer already waits for."""

        def job():
            begun = time.monotonic()
            rollout = self.engine.generate(
                [group.prompt_ids for group in groups for _ in group.sequence_ids],
                max_new_tokens,
                sequence_ids=[i for group in groups for i in group.sequence_ids],
                **options,
            )
            for group, part in zip(groups, split(rollout, [len(g.sequence_ids) for g in groups]), strict=True):
                group.fingerprint = self._fingerprint_of(min(part.version))
                group.rollout = part  # last: who looks at a group without a lock finds it whole
            self.timeline.add("generation", begun, sum(map(len, rollout.completion_ids)))
            self.buffer.finish(groups)

        self._put(job)

    def _fingerprint_of(self, version: int) -> str:
        """Weights may sample before their push is over (continue, restart): waits for its end."""
        with self._changed:
            self._changed.wait_for(
                lambda: version <= max(self._fingerprints) or self._closing or self._error is not None
            )
            self._raise()
            return self._fingerprints.get(version, "")  # forgotten: no update may use the group

    def discard(self) -> None:
        """Takes back what was asked for and not taken yet; waits for the generations under way, which nobody will see."""
        with self._changed:
            # Pushes stay: with a server, other processes wait for the version that this one promised.
            self._jobs = deque(job for job in self._jobs if job[0])
            while self._error is None and (self._jobs or self._running):
                self._changed.wait()
        self._raise()
        self.buffer.clear()

    def forget(self, before: int) -> None:
        """Versions that no group can have any more."""
        with self._changed:
            for version in [v for v in self._fingerprints if v < before]:
                del self._fingerprints[version]

    # ---- threads

    def _put(self, job: Callable[[], None], alone: bool = False) -> None:
        self._raise()
        with self._changed:
            self._jobs.append((alone, job))
            self._changed.notify_all()

    def _raise(self) -> None:
        if self._closing:
            raise RuntimeError("the rollout engine is closed")
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closing and not self._may_start():
                    self._changed.wait()
                if self._closing:
                    return
                self._alone, job = self._jobs.popleft()
                self._running += 1
            try:
                job()
            except BaseException as error:  # handed to whoever waits for a result; nothing may hang for want of one
                self._fail(error)
                return
            with self._changed:
                self._running -= 1
                self._alone = self._alone and self._running > 0
                self._changed.notify_all()

    def _may_start(self) -> bool:
        return bool(self._jobs) and not self._alone and (not self._jobs[0][0] or self._running == 0)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._jobs.clear()
            self._changed.notify_all()
        self.buffer.fail(error)

    def close(self) -> None:
        """Ends engine and threads, whatever they are doing. May be called twice."""
        with self._changed:
            self._closing = True
            self._jobs.clear()
            self._changed.notify_all()
        self.engine.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


class Ahead:
    """Asks for groups ahead of their use and takes them within the bound: the schedule of one rank.

    draw           i -> the i-th group of this rank's data order, not sampled yet
    per_sampling   groups of one sampling in the data order
    ahead          samplings that are asked for before the one in turn is used, A
    max_staleness  S; what is older is sampled again where `recycle`, else dropped, and counted in `stale`
    stage          -> (groups, max_new_tokens) of a sampling that is asked for now; it is used as it was asked for. The groups of
                   the data order beyond it are left out. None: all of them, at full length
    sampling       max_new_tokens and the other arguments of `generate`
    """

    def __init__(
        self,
        engine: AsyncEngine,
        draw: Callable[[int], Group],
        per_sampling: int,
        ahead: int,
        max_staleness: int,
        recycle: bool = True,
        rank: int = 0,
        world: int = 1,
        stage: Callable[[], tuple[int, int]] | None = None,
        **sampling: Any,
    ):
        self.engine, self.draw, self.sampling = engine, draw, sampling
        self.stage = stage or (lambda: (per_sampling, sampling["max_new_tokens"]))
        self.due: deque[int] = deque()  # groups of each sampling that was asked for and not taken whole
        self.per_sampling, self.ahead, self.max_staleness, self.recycle = per_sampling, ahead, max_staleness, recycle
        self.rank, self.world = rank, world
        self.cursor = self.recycled = self.stale = 0
        self.again: deque[Group] = deque()
        self.missing: list[Group] = []  # a failed engine owed them to a checkpoint: sampled at the next `ask`

    def ask(self, taken: int = 0) -> None:
        """Fill the buffer up to this sampling, less the groups of it that were taken, and the ones ahead of it."""
        missing, self.missing = self.missing, []
        self._in_calls(missing, self.engine.sample)
        self._sample(sum(self.due) - taken - len(self.engine.buffer))  # in place of stale ones
        while len(self.due) <= self.ahead:
            size, _ = self.stage()
            self.due.append(size)
            self._sample(size)
            self.cursor += self.per_sampling - size

    def _sample(self, count: int) -> None:
        self._in_calls([self._next() for _ in range(count)], self.engine.ask)

    def _in_calls(self, groups: list[Group], call: Callable[..., None]) -> None:
        # In order a sampling is one call, as the synchronous recipe makes it; else each group may finish by itself.
        at_once = self.per_sampling if self.engine.buffer.take_as == "in_order" else 1
        options = self.sampling | {"max_new_tokens": self.stage()[1]}
        for start in range(0, len(groups), at_once):
            call(groups[start : start + at_once], **options)

    def _next(self) -> Group:
        if not self.again:
            self.cursor += 1
            return self.draw(self.cursor - 1)
        old = self.again.popleft()
        size = len(old.sequence_ids)
        first = RECYCLED_STREAM + (self.recycled * self.world + self.rank) * size
        self.recycled += 1
        return Group(old.row, old.prompt_ids, list(range(first, first + size)))

    def take(self, now: int) -> list[Group]:
        """Waits for the groups of one sampling, used by weights of version `now`; replaces those that are stale."""
        taken: list[Group] = []
        while len(taken) < self.due[0]:
            fresh, old = self.engine.buffer.take(self.due[0] - len(taken), now, self.max_staleness)
            taken += fresh
            self.stale += len(old)
            if self.recycle:
                self.again += old
            self.ask(len(taken))
        self.due.popleft()
        self.engine.forget(before=now - self.max_staleness - 1)
        return taken

    def settled(self) -> list[Group]:
        """Waits for what is under way. -> all groups that were asked for, in the order in which they leave."""
        return self.engine.buffer.settled(len(self.missing))

    def state_dict(self) -> dict[str, Any]:
        """Everything that was asked for, finished: what is under way would be sampled by weights that are gone. Where the engine
        has failed, what it owes is asked for again after the resumption, of the weights of then."""
        return {
            "groups": [group.state_dict() for group in self.settled()],
            "again": [group.state_dict() for group in self.again],
            "due": list(self.due),
            "cursor": self.cursor,
            "recycled": self.recycled,
            "stale": self.stale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`; groups without a rollout are asked for again by the next `ask`."""
        groups = [Group.from_state(group) for group in state["groups"]]
        self.engine.buffer.ask(groups)
        self.engine.buffer.finish([group for group in groups if group.rollout is not None])
        self.missing = [group for group in groups if group.rollout is None]
        self.again = deque(Group.from_state(group) for group in state["again"])
        self.due = deque(state["due"])
        self.cursor, self.recycled, self.stale = state["cursor"], state["recycled"], state["stale"]


# ---------------------------------------------------------------- the trainer


@dataclass
class AsyncConfig(RLVRConfig):
    """What `AsyncTrainer` reads beside RLVRConfig."""

    max_staleness: int = field(
        default=1, metadata={"help": "weight versions between sampling and use at most; 0 = synchronous"}
    )
    on_push: str = field(
        default="finish",
        metadata={"help": "a generation under way when weights are pushed: finish | continue | restart"},
    )
    take: str = field(
        default="in_order",
        metadata={
            "help": "groups are used in_order (same seed, same run) or as_finished (a long one holds nobody up)"
        },
    )
    stale_groups: str = field(
        default="recycle", metadata={"help": "groups beyond --max_staleness: drop, or recycle (sample again)"}
    )
    rollout_workers: int = field(
        default=1, metadata={"help": "generations under way at once, with --take as_finished"}
    )
    rollout_device: str | None = field(
        default=None, metadata={"help": "device of the sampling process, for example cuda:1; unset = the trainer's"}
    )

    def __post_init__(self):
        if self.max_staleness < 0:
            raise ValueError(f"--max_staleness {self.max_staleness} must be 0 (synchronous) or more weight versions")
        for name, known in (("on_push", ON_PUSH), ("take", TAKE), ("stale_groups", STALE_GROUPS)):
            if vars(self)[name] not in known:
                raise ValueError(f"--{name} {vars(self)[name]} is unknown: use {', '.join(known)}")
        if self.rollout_workers < 1:
            raise ValueError(f"--rollout_workers {self.rollout_workers} must be at least 1")
        if self.rollout_workers > 1 and self.take == "in_order":
            raise ValueError(
                f"--rollout_workers {self.rollout_workers} needs --take as_finished: in order, one sampling is made after the other"
            )
        super().__post_init__()
        if self.use_vllm:
            raise ValueError("--use_vllm is TRL's synchronous way to vLLM: use --engine vllm")
        updates = self.updates_per_sampling
        if 0 < self.max_staleness < updates:
            raise ValueError(
                f"--max_staleness {self.max_staleness} is below the {updates} updates a sampling, so nothing could be sampled "
                f"ahead: use 0, or at least {updates}"
            )
        if (self.per_device_train_batch_size * self.steps_per_generation) % self.num_generations:
            raise ValueError(
                f"per_device_train_batch_size {self.per_device_train_batch_size} x {self.steps_per_generation} are no whole groups "
                f"of num_generations {self.num_generations} on each process, which samples for itself: use a multiple"
            )

    @property
    def updates_per_sampling(self) -> int:
        """Optimizer steps that one sampling feeds, U."""
        return self.steps_per_generation * self.num_iterations // self.gradient_accumulation_steps


class AsyncTrainer(RLVRTrainer):
    """RLVRTrainer whose rollouts are made ahead of time. A recipe subclasses it and writes `_compute_loss`.

    Each process samples for itself: groups do not travel between ranks, and no thread takes part in a collective call.
    """

    def __init__(self, *args, **kwargs):
        self.timeline = Timeline()
        super().__init__(*args, **kwargs)
        self._mark = time.monotonic()  # where the trainer's last span ended
        self._taken: list[Group] | None = None  # the groups of this sampling, while they become a batch
        self._since = self._mark  # where the last sampling was complete
        args, accelerator = self.args, self.accelerator
        self.ahead = Ahead(
            self.engine,
            self._draw,
            self._groups_per_sampling,
            args.max_staleness // args.updates_per_sampling,
            args.max_staleness,
            args.stale_groups == "recycle",
            accelerator.process_index,
            accelerator.num_processes,
            self._stage,
            max_new_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p or 0.0,
            batch_size=args.rollout_batch_size,
        )
        self.add_callback(_Marks(self))

    # engine -----------------------------------------------------------------------------------------------------------

    def _make_engine(self):
        args = self.args
        if args.engine == "vllm":
            engine = self._make_vllm_engine(args.on_push)
        else:
            threads = torch.get_num_threads()
            if args.max_staleness and self.accelerator.device.type == "cpu" and threads > 1:
                torch.set_num_threads(threads - threads // 2)  # both sides work at the same time
                threads //= 2
            engine = EngineProcess(
                self.accelerator.unwrap_model(self.model),
                self.eos_token_ids,
                self._tokenizer.pad_token_id,
                rollout_dtype=args.rollout_dtype,
                seed=args.seed,
                device=args.rollout_device or self.accelerator.device,
                record_routes=self.routing is not None,
                record_support=truncates(args),
                threads=threads,
                on_push=args.on_push,
            )
        return AsyncEngine(engine, Buffer(args.take), args.on_push, args.rollout_workers, self.timeline)

    def close(self):
        """Ends the engine, its process and its threads."""
        self.engine.close()

    # asking -----------------------------------------------------------------------------------------------------------

    @property
    def _groups_per_sampling(self):
        return self.args.per_device_train_batch_size * self.args.steps_per_generation // self.num_generations

    def _stage(self):
        """Groups and tokens of a sampling that is asked for now."""
        sequences = range(self._groups_per_sampling * self.num_generations)
        return len(super()._staged(sequences)) // self.num_generations, self._completion_limit()

    def _staged(self, rows):
        return rows  # as they were asked for

    def _draw(self, cursor):
        """The cursor-th group of this rank in the data order of all ranks."""
        size, rank, world = self.num_generations, self.accelerator.process_index, self.accelerator.num_processes
        sampling, place = divmod(cursor, self._groups_per_sampling)
        place += rank * self._groups_per_sampling
        row = self.train_dataset[self._sampler.prompts_of(sampling)[place]]
        first = (sampling * world * self._groups_per_sampling + place) * size
        return Group(row, self._tokenize_prompts([row["prompt"]])[0][0], list(range(first, first + size)))

    def _take(self):
        """The groups of one sampling, and what is worth knowing about them."""
        now, buffer, stale = self.state.global_step, self.engine.buffer, self.ahead.stale
        finished, asked = buffer.finished(), len(buffer)
        groups = self.ahead.take(now)
        for group in groups:
            if is_stale(group.version, now, self.args.max_staleness):
                raise RuntimeError(
                    f"a group of version {group.version} came to version {now}, beyond --max_staleness {self.args.max_staleness}"
                )
            self.timeline.staleness[now - group.version] += 1
        self.timeline.fill.append((time.monotonic() - self.timeline.start, finished, asked))
        self._metrics["train"]["async/buffer_groups"].append(float(finished))
        self._metrics["train"]["async/stale_groups"].append(float(self.ahead.stale - stale))
        return groups

    # using ------------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs):
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        started = self._mark
        self.sync_engine()
        self.ahead.ask()
        asked = self.timeline.add("copying", started)
        self._taken = self._take()
        taken = self.timeline.add("waiting", asked)
        rows = [dict(group.row) for group in self._taken for _ in group.sequence_ids]
        if self.args.take == "in_order" and not self.ahead.stale and rows != inputs[: len(rows)]:
            raise RuntimeError("the rows sampled ahead are not those of the data order: the sampler has changed")
        output = super()._generate_and_score_completions(rows)
        rollout, self._taken = join(self._taken), None
        output["version"] = torch.tensor(rollout.version, device=output["advantages"].device)
        if rollout.token_versions is not None:
            versions = output["version"].unsqueeze(1).repeat(1, output["completion_ids"].shape[1])  # (n, T)
            for row, tokens in zip(versions, rollout.token_versions, strict=True):
                row[: len(tokens)] = torch.tensor(tokens)
            output["token_versions"] = versions
        self._mark = self.timeline.add("scoring", taken)
        metrics = self._metrics["train"]
        metrics["async/waiting_share"].append((taken - asked) / (self._mark - self._since))
        metrics["async/engine_tokens_per_s"].append(self.timeline.rate("generation"))
        metrics["async/trainer_tokens_per_s"].append(self.timeline.rate("training"))
        self._since = self._mark
        return output

    def _rollout(self, prompts, trainer):
        if self._taken is None:
            return super()._rollout(prompts, trainer)
        oldest = min(self._taken, key=lambda group: group.version)
        self._compare_weights(oldest.version, oldest.fingerprint)
        return self._hand_over(join(self._taken))

    def score(self, model, inputs):
        """RLVRTrainer's, with the staleness of every counted token as a metric."""
        batch = super().score(model, inputs)
        if self.model.training:
            versions = inputs["token_versions"] if "token_versions" in inputs else inputs["version"].unsqueeze(1)
            age = (self.state.global_step - versions).expand_as(batch.mask)
            self.track("async/staleness", age, batch.mask, quantiles=True)
        return batch

    # resume -----------------------------------------------------------------------------------------------------------

    def settle(self):
        """Waits until all that was asked for is sampled, or the engine has failed."""
        # a failure ends the run at its next sampling, with this checkpoint behind it
        self.ahead.settled()

    def recipe_state(self):
        """The schedule and everything sampled ahead."""
        return self.ahead.state_dict()

    def load_recipe_state(self, state):
        """The counterpart of `recipe_state`."""
        self.ahead.load_state_dict(state)

    def forget(self):
        """Also takes back what was asked for since the checkpoint: it was sampled by weights that never were."""
        super().forget()
        self.engine.discard()

    def closing_rows(self):
        """Draws timeline.png; its path, and who waits for whom."""
        path = Path(self.args.output_dir) / "timeline.png"
        with unless_full(path):
            self.timeline.draw(path)
        return [("timeline", str(path)), ("", self.timeline.advice(self.args))]


class _Marks(TrainerCallback):
    """Where one update of the trainer ends and the next begins, on its timeline."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._since = time.monotonic()

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer._mark = time.monotonic()  # evaluation and checkpoints lie between updates

    def on_step_end(self, args, state, control, **kwargs):
        tokens = int(self.trainer._counts["token_mean"])
        self.trainer._mark = self.trainer.timeline.add("training", self.trainer._mark, tokens)
