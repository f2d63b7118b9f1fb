"""Change a run while it runs: control.yaml, schedules and stages, every change checked and written down.

`control.yaml` in the run folder holds `name: value` lines. It is read again at each step boundary; a value that changed is checked,
applied and logged with old value, new value and step (events.jsonl, kind "control"). A bad file or value changes nothing and says
so. Names with a dot are nested keys (`rl_stability: {unbiased_kl: {clip_ratio: 5}}` or `rl_stability.unbiased_kl.clip_ratio: 5`).
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Control:
    """One value that may change during a run. check(value) -> the value to set, or ValueError with the reason."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    check: Callable[[Any], Any]


def number(low=-math.inf, high=math.inf, none=False):
    """A check for Control: a number in [low, high]; with none also null."""

    def check(value):
        if value is None and none:
            return None
        try:  # text too: YAML 1.1 takes 1e-3, without a point, for text
            new = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            new = math.nan
        if not math.isfinite(new) or not low <= new <= high:
            end = f"{high:g}]" if math.isfinite(high) else "inf)"
            raise ValueError(f"must be a number in [{low:g}, {end}" + (" or null" if none else ""))
        return new

    return check


def switch(value):
    """A check for Control: true or false."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def read_yaml(text):
    """YAML -> plain values. Raises ValueError, one line, for whatever is none: 2026-13-45 and !!int x end elsewhere than in YAMLError."""
    try:
        tree = yaml.safe_load(text)
        json.dumps(tree, default=str, skipkeys=True)  # refuses a value that contains itself
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    return tree


def flatten(tree, prefix=""):
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class ControlFile:
    """Reads `path` when its content changed. `tell(level, text, **fields)` receives changes and refusals."""

    def __init__(self, path, controls, tell):
        self.path, self.controls, self.tell, self._digest = Path(path), controls, tell, None

    def read(self):
        """The values asked for now, or None where the file is absent, unchanged since the last call, or unreadable."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.tell("warn", f"{self.path} cannot be read ({error}): nothing is changed")
            return None
        digest = hashlib.sha256(content).hexdigest()
        if digest == self._digest:
            return None
        self._digest = digest
        try:
            tree = read_yaml(content)
        except ValueError as error:
            self.tell("warn", f"{self.path} is not YAML ({error}): nothing is changed")
            return None
        if tree is None:
            return None
        if not isinstance(tree, dict):
            self.tell("warn", f"{self.path} must hold `name: value` lines: nothing is changed")
            return None
        return flatten(tree)

    def apply(self, values):
        """Set what differs from the values in force; each change and each refusal is told."""
        for name, value in values.items():
            change(self.controls, str(name), value, self.tell, self.path.name)


def change(controls, name, value, tell, source):
    """Check and set one control. Returns whether it changed."""
    control = controls.get(name)
    if control is None:
        tell("warn", f"{source}: {name} cannot be changed while this run runs (known: {', '.join(sorted(controls))})")
        return False
    old = control.get()
    try:
        new = control.check(value)
    except ValueError as error:
        tell("warn", f"{source}: {name} {value!r} {error}: it stays {old!r}", name=name, old=old, refused=value)
        return False
    if new == old:
        return False
    control.set(new)
    tell("info", f"{source}: {name} {old!r} -> {new!r}", name=name, old=old, new=new)
    return True


# --- schedules and stages ---------------------------------------------------------------------------------------------


def parse_schedule(text):
    """Schedule text "0:0.0,100:0.01" -> [(0, 0.0), (100, 0.01)]: value from that step on. Raises ValueError naming the entry."""
    pairs = []
    for part in text.split(","):
        step, _, value = part.partition(":")
        try:
            pairs.append((int(step), float(value)))
        except ValueError as error:
            raise ValueError(f"--beta_schedule {text}: {part!r} is not step:value, as in 0:0.0,100:0.01") from error
    if [step for step, _ in pairs] != sorted({step for step, _ in pairs}) or pairs[0][0] != 0:
        raise ValueError(f"--beta_schedule {text}: steps must start at 0 and rise")
    return pairs


def scheduled(pairs, step):
    """The value in force at a step."""
    return [value for start, value in pairs if start <= step][-1]


SHARES = {"small": 0.25, "medium": 0.5, "full": 1.0}  # of prompts and of completion length


def parse_stages(text):
    """Stage text "small:20,medium:50,full" -> [("small", 20), ("medium", 50), ("full", None)]. Raises ValueError naming the entry."""
    stages = []
    for part in text.split(","):
        name, _, steps = part.strip().partition(":")
        if name not in SHARES or (steps and not (steps.isdecimal() and int(steps) > 0)):
            raise ValueError(f"--guard_stages {text}: {part!r} is not name:steps with a name of {', '.join(SHARES)}")
        stages.append((name, int(steps) if steps else None))
    shares = [SHARES[name] for name, _ in stages]
    open_ended = [i for i, (_, steps) in enumerate(stages) if steps is None]
    if shares != sorted(set(shares)) or open_ended != [len(stages) - 1]:
        raise ValueError(f"--guard_stages {text}: stages must widen, and only the last one has no number of steps")
    return stages


class Stages:
    """Which stage a run is in. A stage lasts until so many steps in a row, as many as it names, had no alarm."""

    def __init__(self, stages):
        self.stages, self.index, self.healthy = stages, 0, 0  # healthy: steps in a row without an alarm

    @property
    def name(self):
        """Of the stage in force."""
        return self.stages[self.index][0]

    @property
    def share(self):
        """Of prompts and of completion length that it uses."""
        return SHARES[self.name]

    def step(self, healthy):
        """After a step. Returns "widened" on the step after which the next stage begins, else None."""
        steps = self.stages[self.index][1]
        self.healthy = self.healthy + 1 if healthy else 0
        if steps is not None and self.healthy >= steps:
            self.index, self.healthy = self.index + 1, 0
            return "widened"
        return None

    def state_dict(self):
        """Place in the stages and healthy steps so far."""
        return {"index": self.index, "healthy": self.healthy}

    def load_state_dict(self, state):
        """The counterpart of `state_dict`."""
        self.index, self.healthy = state["index"], state["healthy"]


def narrowed(rows, share, unit):
    """The first `share` of the rows, whole units of `unit` rows, at least one unit."""
    return rows[: max(unit, int(share * len(rows)) // unit * unit)]
